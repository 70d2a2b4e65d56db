//! Memory figures of NVML that are late, wrong or missing. Each variant of NVML is a process of its own.

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
    time::Duration,
};

const M: u64 = 1 << 20;
const CHILD: &str = "NVML_SIM_TEST";

/// Runs `body` in a process with that setting.
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
fn used_is_wrong_by_what_a_test_says() {
    isolated("used_is_wrong_by_what_a_test_says", ("CUDA_SIM_HIDDEN", "5M"), |dir| {
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
fn strangers_are_listed_where_they_have_a_pid() {
    isolated("strangers_are_listed_where_they_have_a_pid", ("CUDA_SIM_GPUS", "1"), |dir| {
        let strangers = [Stranger { bytes: 20 * M, pid: Some(77) }, Stranger { bytes: 10 * M, pid: None }];
        trouble::set_strangers(&dir, 0, &strangers).expect("a file");
        assert_eq!((used(), processes()), (30 * M, vec![(77, 20 * M)]));
    });
}

#[test]
fn processes_may_have_no_figures() {
    isolated("processes_may_have_no_figures", ("CUDA_SIM_NVML_PROCESSES", "unmeasured"), |_| {
        assert!(Account::get().take(0, 30 * M));
        assert_eq!((used(), processes()), (30 * M, vec![(process::id(), u64::MAX)]));
    });
}

#[test]
fn processes_may_not_be_listed() {
    isolated("processes_may_not_be_listed", ("CUDA_SIM_NVML_PROCESSES", "none"), |_| {
        assert!(Account::get().take(0, 30 * M));
        assert_eq!((used(), processes()), (30 * M, vec![]));
    });
}

#[test]
fn figures_may_be_late() {
    isolated("figures_may_be_late", ("CUDA_SIM_NVML_DELAY", "300"), |_| {
        assert_eq!(used(), 0);
        thread::sleep(Duration::from_millis(350));
        assert!(Account::get().take(0, 30 * M));
        thread::sleep(Duration::from_millis(150));
        assert_eq!((used(), processes()), (0, vec![]), "as it was");
        thread::sleep(Duration::from_millis(350));
        assert_eq!((used(), processes()), (30 * M, vec![(process::id(), 30 * M)]));
    });
}
