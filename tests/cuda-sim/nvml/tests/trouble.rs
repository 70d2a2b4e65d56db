//! Late, wrong or missing memory figures of NVML. Each variant of NVML runs in a separate process.

use cuda_sim_gpus::{
    Account,
    trouble::{self, Stranger},
};
use nvidia_ml::*;
use std::{
    env, fs,
    path::PathBuf,
    process::{self, Command},
    thread,
    time::{Duration, Instant},
};

const M: u64 = 1 << 20;
const CHILD: &str = "NVML_SIM_TEST";

/// Runs `body` in a process with this setting.
fn isolated(test: &str, setting: (&str, &str), body: impl FnOnce(PathBuf)) {
    if env::var(CHILD).is_ok_and(|name| name == test) {
        assert_eq!(nvmlInit_v2(), 0);
        return body(env::var_os("CUDA_SIM_DIR").expect("set below").into());
    }
    let dir = env::temp_dir().join(format!("nvml-sim-{test}-{}", process::id()));
    let mut command = Command::new(env::current_exe().expect("this test program"));
    command.args([test, "--exact", "--nocapture"]).env(CHILD, test).env("CUDA_SIM_DIR", &dir);
    let status = command.env("CUDA_SIM_MEMORY", "100M").env(setting.0, setting.1).status().expect("run it again");
    let _ = fs::remove_dir_all(dir);
    assert!(status.success(), "{test}: {status}");
}

/// Bytes in use.
fn used() -> u64 {
    let mut words = [0_u64; 3];
    assert_eq!(nvmlDeviceGetMemoryInfo(1, words.as_mut_ptr().cast()), 0);
    assert_eq!((words[0], words[1] + words[2]), (100 * M, 100 * M));
    words[2]
}

/// Processes with their bytes.
fn processes() -> Vec<(u32, u64)> {
    let (mut count, mut words) = (4_u32, [0_u64; 12]);
    assert_eq!(nvmlDeviceGetComputeRunningProcesses_v3(1, &mut count, words.as_mut_ptr().cast()), 0);
    words.chunks(3).take(count as usize).map(|process| (process[0] as u32, process[1])).collect()
}

#[test]
fn used_bytes_have_the_configured_error() {
    isolated("used_bytes_have_the_configured_error", ("CUDA_SIM_HIDDEN", "5M"), |dir| {
        assert!(Account::get().take(0, 30 * M));
        assert_eq!(used(), 30 * M, "hidden bytes are not counted");
        for (error, want) in [(7 << 20, 37 * M), (-(7 << 20), 23 * M), (-(1 << 40), 0), (1 << 40, 100 * M)] {
            trouble::set_nvml_error(&dir, 0, error).expect("a file");
            assert_eq!(used(), want);
        }
        assert_eq!(processes(), [(process::id(), 30 * M)], "these are right");
        trouble::set_nvml_error(&dir, 0, 0).expect("no file");
        assert_eq!(used(), 30 * M);
    });
}

#[test]
fn foreign_processes_with_a_pid_are_listed() {
    isolated("foreign_processes_with_a_pid_are_listed", ("CUDA_SIM_GPUS", "1"), |dir| {
        let strangers = [
            Stranger { bytes: 20 * M, pid: Some(77), is_graphics: false },
            Stranger { bytes: 10 * M, pid: None, is_graphics: false },
        ];
        trouble::set_strangers(&dir, 0, &strangers).expect("a file");
        assert_eq!((used(), processes()), (30 * M, vec![(77, 20 * M)]));
    });
}

#[test]
fn processes_can_be_listed_without_memory_figures() {
    isolated("processes_can_be_listed_without_memory_figures", ("CUDA_SIM_NVML_PROCESSES", "unmeasured"), |_| {
        assert!(Account::get().take(0, 30 * M));
        assert_eq!((used(), processes()), (30 * M, vec![(process::id(), u64::MAX)]));
    });
}

#[test]
fn processes_can_be_left_unlisted() {
    isolated("processes_can_be_left_unlisted", ("CUDA_SIM_NVML_PROCESSES", "none"), |_| {
        assert!(Account::get().take(0, 30 * M));
        assert_eq!((used(), processes()), (30 * M, vec![]));
    });
}

#[test]
fn figures_can_be_delayed() {
    isolated("figures_can_be_delayed", ("CUDA_SIM_NVML_DELAY", "300"), |_| {
        assert_eq!(used(), 0);
        thread::sleep(Duration::from_millis(350));
        let since = Instant::now();
        assert!(Account::get().take(0, 30 * M));
        while used() == 0 {
            assert!(since.elapsed() < Duration::from_secs(60), "it never shows");
            thread::sleep(Duration::from_millis(5));
        }
        assert!(since.elapsed() >= Duration::from_millis(300), "{:?}", since.elapsed());
        assert_eq!((used(), processes()), (30 * M, vec![(process::id(), 30 * M)]));
    });
}

#[test]
fn gpus_can_be_removed_added_and_partitioned() {
    isolated("gpus_can_be_removed_added_and_partitioned", ("CUDA_SIM_GPUS", "2"), |dir| {
        let count = || {
            let mut count = 0;
            (nvmlDeviceGetCount_v2(&mut count), count)
        };
        let by_index = |index| {
            let mut handle = 0;
            (nvmlDeviceGetHandleByIndex_v2(index, &mut handle), handle)
        };
        assert_eq!((count(), by_index(1)), ((0, 2), (0, 2)));
        trouble::take_out(&dir, 0, true).expect("a file");
        assert_eq!((count(), by_index(0), by_index(1).0), ((0, 1), (0, 2), 2), "the other one has its number");
        trouble::take_out(&dir, 0, false).expect("no file");

        let slice = |place| {
            let mut handle = 0;
            (nvmlDeviceGetMigDeviceHandleByIndex(1, place, &mut handle), handle)
        };
        assert_eq!(slice(0).0, 3, "not supported: it is not in MIG mode");
        trouble::slice(&dir, 0, Some(&[4])).expect("a file");
        let (mut current, mut pending) = (0, 0);
        assert_eq!((nvmlDeviceGetMigMode(1, &mut current, &mut pending), current), (0, 1));
        let (code, handle) = slice(0);
        let mut text = [0_u8; 96];
        assert_eq!((code, nvmlDeviceGetUUID(handle, text.as_mut_ptr().cast(), 96), slice(1).0), (0, 0, 6));
        assert!(text.starts_with(b"MIG-"));

        trouble::break_nvml(&dir, true).expect("a file");
        assert_eq!((count().0, by_index(0).0), (999, 999));
        trouble::break_nvml(&dir, false).expect("no file");
        assert!(fs::exists(trouble::device_file(&dir)).expect("a path") && nvmlShutdown() == 0);
        assert_eq!(nvmlShutdown(), 1, "it is not initialized any more");
    });
}
