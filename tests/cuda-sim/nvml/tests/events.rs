//! NVML reports the faults that tests set: events, a lost GPU, a recovery action, a missing driver.

use cuda_sim_gpus::trouble::{self, DOUBLE_BIT_ECC, Event, XID};
use nvidia_ml::*;
use std::{env, fs, process};

#[test]
fn faults_of_a_gpu_are_reported() {
    let dir = env::temp_dir().join(format!("nvml-sim-events-{}", process::id()));
    fs::create_dir_all(&dir).expect("a directory");
    // SAFETY: this is the only test of the process, and no other thread reads the environment.
    unsafe {
        env::set_var("CUDA_SIM_DIR", &dir);
        env::set_var("CUDA_SIM_GPUS", "2");
    }
    trouble::unload(&dir, true).expect("a file");
    assert_eq!(nvmlInit_v2(), 9);
    trouble::unload(&dir, false).expect("a file");
    assert_eq!(nvmlInit_v2(), 0);

    let happens = |gpu, kind, data| trouble::happen(&dir, Event { gpu, kind, data }).expect("a file");
    happens(1, XID, 1);
    let (mut one, mut set, mut kinds) = (0, 0, 0);
    assert_eq!(nvmlDeviceGetHandleByIndex_v2(1, &mut one), 0);
    assert_eq!(nvmlDeviceGetSupportedEventTypes(one, &mut kinds), 0);
    assert_eq!(kinds, XID | DOUBLE_BIT_ECC);
    assert_eq!(nvmlEventSetCreate(&mut set), 0);
    assert_eq!(nvmlDeviceRegisterEvents(one, 4, set), 3, "power states are not watched");
    assert_eq!(nvmlDeviceRegisterEvents(one, XID, set), 0);
    let wait = || {
        let mut words = [0_u64; 4];
        (nvmlEventSetWait_v2(set, words.as_mut_ptr().cast(), 20), words[1], words[2])
    };
    assert_eq!(wait().0, 10, "what happened before is not told");
    happens(0, XID, 2);
    happens(1, DOUBLE_BIT_ECC, 0);
    happens(1, XID, 79);
    assert_eq!(wait(), (0, XID, 79), "the others are not asked for");
    assert_eq!(wait().0, 10);

    let action = || {
        let mut words = [230_u64, 0, 0, 0, 0];
        assert_eq!(nvmlDeviceGetFieldValues(one, 1, words.as_mut_ptr().cast()), 0);
        (words[3] >> 32, words[4])
    };
    assert_eq!(action(), (3, 0), "the driver says nothing of that");
    trouble::advise(&dir, 1, Some(2)).expect("a file");
    assert_eq!(action(), (0, 2));

    trouble::lose(&dir, 1, true).expect("a file");
    assert_eq!((wait().0, nvmlDeviceGetIndex(one, &mut 0)), (15, 15));
    trouble::lose(&dir, 1, false).expect("a file");
    assert_eq!(nvmlDeviceGetIndex(one, &mut 0), 0);
    assert_eq!((nvmlEventSetFree(set), nvmlEventSetFree(0)), (0, 2));
    let _ = fs::remove_dir_all(dir);
}
