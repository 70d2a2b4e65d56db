//! NVML reports the accounts' figures. The test allocates memory like the simulated driver.

use cuda_sim_gpus::{Account, Config};
use nvidia_ml::*;
use std::{env, ffi::CStr, fs, process, ptr};

#[test]
fn memory_and_process_figures_match_allocations() {
    let dir = env::temp_dir().join(format!("nvml-sim-test-{}", process::id()));
    // SAFETY: this is the only test of the process, and no other thread reads the environment.
    unsafe {
        env::set_var("CUDA_SIM_DIR", &dir);
        env::set_var("CUDA_SIM_GPUS", "2");
        env::set_var("CUDA_SIM_MEMORY", "100M");
        env::set_var("CUDA_SIM_LIMITS", "anybody");
    }
    assert_eq!(nvmlInit_v2(), 0);
    let mut handle = 0;
    assert_eq!(nvmlDeviceGetHandleByIndex_v2(2, &mut handle), 2, "there is no third GPU");
    assert_eq!(nvmlDeviceGetHandleByIndex_v2(1, &mut handle), 0);

    let memory = || {
        let mut words = [0_u64; 3];
        assert_eq!(nvmlDeviceGetMemoryInfo(handle, words.as_mut_ptr().cast()), 0);
        words
    };
    let processes = || {
        let (mut count, mut words) = (4_u32, [0_u64; 12]);
        assert_eq!(nvmlDeviceGetComputeRunningProcesses_v3(handle, &mut count, words.as_mut_ptr().cast()), 0);
        (count, words[0] as u32, words[1])
    };
    const M: u64 = 1 << 20;
    assert_eq!((memory(), processes().0), ([100 * M, 100 * M, 0], 0));
    assert!(Account::get().take(1, 30 * M));
    assert!(!Account::get().take(1, 80 * M), "there are only 70");
    assert_eq!((memory(), processes()), ([100 * M, 70 * M, 30 * M], (1, process::id(), 30 * M)));
    let mut none = 0;
    assert_eq!(nvmlDeviceGetComputeRunningProcesses_v3(handle, &mut none, ptr::null_mut()), 7);
    assert_eq!(none, 1);
    let mut all = [u64::from(40_u32 | 2 << 24), 0, 0, 0, 0];
    assert_eq!(nvmlDeviceGetMemoryInfo_v2(handle, all.as_mut_ptr().cast()), 0);
    assert_eq!(all[1..], [100 * M, 0, 70 * M, 30 * M]);
    assert_eq!(nvmlDeviceGetMemoryInfo_v2(handle, [0_u64; 5].as_mut_ptr().cast()), 25, "it has no version");
    Account::get().give(1, 30 * M);
    assert_eq!((memory(), processes().0), ([100 * M, 100 * M, 0], 0));

    // Managed memory is in no process's figure, and stays in use after it was evicted.
    assert!(Account::get().take(1, 10 * M) && Account::get().take_managed(1, 50 * M));
    assert_eq!((memory(), processes()), ([100 * M, 40 * M, 60 * M], (1, process::id(), 10 * M)));
    Account::get().keep_managed(1, 50 * M);
    assert_eq!((memory(), processes()), ([100 * M, 40 * M, 60 * M], (1, process::id(), 10 * M)));
    assert!(Account::get().take(1, 60 * M));
    assert_eq!((memory(), processes().2), ([100 * M, 0, 100 * M], 70 * M), "30 of the kept bytes remain");
    Account::get().give_kept(1, 50 * M);
    Account::get().give(1, 70 * M);
    assert_eq!((memory(), processes().0), ([100 * M, 100 * M, 0], 0));

    assert_eq!(nvmlDeviceGetMaxPcieLinkWidth(handle, &mut 0), 3, "nobody told what the link is");

    let mut uuid = [0; 96];
    assert_eq!(nvmlDeviceGetUUID(handle, uuid.as_mut_ptr(), 96), 0);
    // SAFETY: NVML ended the text with NUL.
    let text = unsafe { CStr::from_ptr(uuid.as_ptr()) };
    assert_eq!(text.to_str(), Ok(Config::get().uuid_text(1).as_str()));
    let mut same = 0;
    assert_eq!(nvmlDeviceGetHandleByUUID(uuid.as_ptr(), &mut same), 0);
    assert_eq!(same, handle);
    let _ = fs::remove_dir_all(dir);
}
