//! A consumer card: NVML supports only memory and processes, and copies in both directions share
//! the host's bandwidth.

use cuda_sim_gpus::host_link;
use nvidia_ml::*;
use std::{
    env, fs, process, thread,
    time::{Duration, Instant},
};

const NOT_SUPPORTED: u32 = 3;

#[test]
fn a_consumer_card_has_only_memory_and_process_figures() {
    let dir = env::temp_dir().join(format!("nvml-sim-test-{}", process::id()));
    // SAFETY: this is the only test of the process, and no other thread reads the environment.
    unsafe {
        env::set_var("CUDA_SIM_DIR", &dir);
        env::set_var("CUDA_SIM_MEMORY", "100M");
        env::set_var("CUDA_SIM_NVML", "memory");
        env::set_var("CUDA_SIM_PCIE_LANES", "16");
        env::set_var("CUDA_SIM_HOST_BANDWIDTH", "100M");
    }
    assert_eq!(nvmlInit_v2(), 0);
    let (mut handle, mut memory, mut count, mut text) = (0, [0_u64; 3], 0_u32, [0; 96]);
    assert_eq!(nvmlDeviceGetHandleByIndex_v2(0, &mut handle), 0);
    assert_eq!(nvmlDeviceGetUUID(handle, text.as_mut_ptr(), 96), 0);
    assert_eq!(nvmlDeviceGetMemoryInfo(handle, memory.as_mut_ptr().cast()), 0);
    assert_eq!(memory[0], 100 << 20);
    assert_eq!(nvmlDeviceGetComputeRunningProcesses_v3(handle, &mut count, std::ptr::null_mut()), 0);
    assert_eq!(count, 0);
    let (mut a, mut b, mut rates, mut field) = (0, 0, [0_u32; 2], [0_u64; 8]);
    for answer in [
        nvmlDeviceGetUtilizationRates(handle, rates.as_mut_ptr().cast()),
        nvmlDeviceGetMaxPcieLinkGeneration(handle, &mut a),
        nvmlDeviceGetMaxPcieLinkWidth(handle, &mut a),
        nvmlDeviceGetMigMode(handle, &mut a, &mut b),
        nvmlDeviceGetMaxMigDeviceCount(handle, &mut a),
        nvmlDeviceGetFieldValues(handle, 1, field.as_mut_ptr().cast()),
        nvmlEventSetCreate(&mut 0),
    ] {
        assert_eq!(answer, NOT_SUPPORTED);
    }

    // Ten pieces of 1 MiB are copied in each direction. The host's memory transfers 100 MiB/s in
    // total.
    let begin = Instant::now();
    let ways = [(); 2].map(|()| thread::spawn(|| (0..10).for_each(|_| host_link::wait_for_host(1 << 20))));
    ways.into_iter().for_each(|way| way.join().expect("it ends"));
    assert!(begin.elapsed() >= Duration::from_millis(199), "{:?}", begin.elapsed());
    let _ = fs::remove_dir_all(dir);
}
