//! Memory: accounting, contents, and out-of-memory errors.

use crate::support::*;
use cuda_sim_gpus::account;
use std::{
    io::{BufRead, BufReader, Write},
    thread,
    time::Duration,
};

const M: usize = 1 << 20;
const OUT_OF_MEMORY: u32 = 2;
const ILLEGAL_ADDRESS: u32 = 700;

#[test]
fn memory_of_a_killed_process_is_free() {
    isolated(
        "memory::memory_of_a_killed_process_is_free",
        &[("CUDA_SIM_MEMORY", "512M"), ("CUDA_SIM_CONTEXT", "16M")],
        || {
            let _gpu = Gpu::open();
            if role().is_some() {
                alloc(300 * M);
                println!("\nholding");
                thread::sleep(Duration::from_secs(60));
                return;
            }
            assert_eq!(free_memory(), 496 * M);
            let mut holder = companion("memory::memory_of_a_killed_process_is_free", "holder");
            let lines = BufReader::new(holder.stdout.take().expect("piped")).lines();
            assert!(lines.map_while(Result::ok).any(|line| line == "holding"));
            assert_eq!(free_memory(), 180 * M, "300M and a context are the other process'");
            let mut at = 0_u64;
            assert_eq!(cu("cuMemAlloc_v2", &[&raw mut at as usize, 200 * M]), OUT_OF_MEMORY);
            holder.kill().expect("kill");
            holder.wait().expect("wait");
            assert_eq!(free_memory(), 496 * M);
            alloc(400 * M);
        },
    );
}

/// Prints the handle of 64 MiB. Frees the memory at the first line of input, and exits at the
/// second.
fn export() {
    let at = alloc(64 * M);
    let mut handle = [0_u64; 8];
    assert_eq!(cu("cuIpcGetMemHandle", &[handle.as_mut_ptr() as usize, at as usize]), 0);
    println!("\nhandle {handle:?}");
    let mut lines = std::io::stdin().lines();
    lines.next();
    assert_eq!(cu("cuMemFree_v2", &[at as usize]), 0);
    println!("\nfreed");
    lines.next();
}

fn imported_memory_counts_once_until_it_is_closed(test: &str, is_exporter_killed: bool) {
    isolated(test, &[("CUDA_SIM_MEMORY", "256M"), ("CUDA_SIM_CONTEXT", "16M")], || {
        let _gpu = Gpu::open();
        if role().is_some() {
            return export();
        }
        let mut exporter = companion(test, "exporter");
        let mut lines = BufReader::new(exporter.stdout.take().expect("piped")).lines().map_while(Result::ok);
        let handle = lines.find_map(|line| Some(line.strip_prefix("handle [")?.trim_end_matches(']').to_owned()));
        let handle: Vec<u64> =
            handle.expect("a handle").split(", ").map(|word| word.parse().expect("a number")).collect();
        let handle: [usize; 8] = std::array::from_fn(|i| handle[i] as usize);
        let pids = [exporter.id(), std::process::id()];
        let have = || {
            let of = |pid| {
                let found = account::processes().into_iter().find(|process| process.pid == pid);
                found.map_or(0, |process| process.gpus[0].plain as usize / M)
            };
            let [exporter, importer] = pids.map(of);
            (free_memory() / M, exporter, importer)
        };
        assert_eq!(have(), (160, 80, 16));
        let at = open_handle(handle);
        assert_eq!(have(), (160, 80, 16), "it counts for its exporter");
        if is_exporter_killed {
            exporter.kill().expect("kill");
            exporter.wait().expect("wait");
            assert_eq!(have(), (176, 0, 80), "it counts for its importer");
        } else {
            writeln!(exporter.stdin.as_mut().expect("piped")).expect("it is running");
            assert!(lines.any(|line| line == "freed"));
            assert_eq!(have(), (160, 16, 80), "it counts for its importer");
        }
        let mut refused = 0_u64;
        assert_eq!(cu("cuMemAlloc_v2", &[&raw mut refused as usize, 200 * M]), OUT_OF_MEMORY);
        assert_eq!(cu("cuIpcCloseMemHandle", &[at]), 0);
        assert_eq!((have().0, have().2), (if is_exporter_killed { 240 } else { 224 }, 16), "nobody has it");
        exporter.kill().expect("kill");
        exporter.wait().expect("wait");
    });
}

#[test]
fn imported_memory_outlives_its_exporter() {
    imported_memory_counts_once_until_it_is_closed("memory::imported_memory_outlives_its_exporter", true);
}

#[test]
fn imported_memory_outlives_the_exporters_free() {
    imported_memory_counts_once_until_it_is_closed("memory::imported_memory_outlives_the_exporters_free", false);
}

#[test]
fn contexts_take_memory() {
    isolated("memory::contexts_take_memory", &[("CUDA_SIM_MEMORY", "100M"), ("CUDA_SIM_CONTEXT", "40M")], || {
        assert_eq!(cu("cuInit", &[0]), 0);
        let first = get("cuCtxCreate_v2", &[0, 0]);
        get("cuCtxCreate_v2", &[0, 0]);
        assert_eq!(free_memory(), 20 * M);
        let mut third = 0_usize;
        assert_eq!(cu("cuCtxCreate_v2", &[&raw mut third as usize, 0, 0]), OUT_OF_MEMORY);
        assert_eq!(cu("cuCtxDestroy_v2", &[first]), 0);
        assert_eq!(free_memory(), 60 * M);
    });
}

#[test]
fn small_allocations_share_blocks() {
    isolated("memory::small_allocations_share_blocks", &[], || {
        let _gpu = Gpu::open();
        let before = free_memory();
        let all: Vec<u64> = (0..20).map(|_| alloc(1000)).collect();
        assert_eq!(before - free_memory(), 2 * M);
        assert!(all.windows(2).all(|w| w[0] != w[1]));
        all.iter().for_each(|at| assert_eq!(cu("cuMemFree_v2", &[*at as usize]), 0));
        assert_eq!(free_memory(), before);
        assert_eq!(cu("cuMemFree_v2", &[all[0] as usize]), 1, "freed twice");
    });
}

#[test]
fn chunks_can_be_remapped_at_the_same_address() {
    isolated("memory::chunks_can_be_remapped_at_the_same_address", &[], || {
        let gpu = Gpu::open();
        let len = 4 * M;
        let at = get("cuMemAddressReserve", &[len, 0, 0, 0]);
        let first = chunk(len).expect("a chunk");
        map(at, len, first);
        let count = (len / 4) as u64;
        assert_eq!(gpu.launch("fill_u32", 0, &[at as u64, count, 7]), 0);
        assert_eq!(gpu.launch("mix_u32", 0, &[at as u64, count, 3]), 0);
        let mut saved = vec![0_u8; len];
        assert_eq!(cu("cuMemcpyDtoH_v2", &[saved.as_mut_ptr() as usize, at, len]), 0);

        let used = free_memory();
        assert_eq!(cu("cuMemRelease", &[first]), 0);
        assert_eq!(free_memory(), used, "mapped memory stays");
        assert_eq!(cu("cuMemUnmap", &[at, len]), 0);
        assert_eq!(free_memory(), used + len);

        let second = chunk(len).expect("a chunk");
        map(at, len, second);
        assert_eq!(read(at as u64), 0, "other memory");
        assert_eq!(cu("cuMemcpyHtoD_v2", &[at, saved.as_ptr() as usize, len]), 0);
        assert_eq!(gpu.launch("unmix_u32", 0, &[at as u64, count, 3]), 0);
        assert_eq!((read(at as u64), read((at + len - 4) as u64)), (7, 7));
    });
}

#[test]
fn unmapping_does_not_wait_and_faults_the_kernel() {
    isolated("memory::unmapping_does_not_wait_and_faults_the_kernel", &[("CUDA_SIM_GPU_BANDWIDTH", "1M")], || {
        let gpu = Gpu::open();
        let len = 8 * M;
        let at = get("cuMemAddressReserve", &[len, 0, 0, 0]);
        let handle = chunk(len).expect("a chunk");
        let (other, mark, lane) = (alloc(4) as usize, event(), stream(0));
        map(at, len, handle);
        assert_eq!(gpu.launch("fill_u32", 0, &[at as u64, (len / 4) as u64, 1]), 0);
        thread::sleep(Duration::from_millis(30));
        assert_eq!(cu("cuStreamQuery", &[0]), 600, "eight seconds of work");
        assert_eq!(cu("cuMemUnmap", &[at, len]), 0);
        assert_eq!(cu("cuCtxSynchronize", &[]), ILLEGAL_ADDRESS);
        let mut answer = 0_usize;
        let to = &raw mut answer as usize;
        for (call, args) in [
            ("cuMemAlloc_v2", vec![to, 4]),
            ("cuMemFree_v2", vec![other]),
            ("cuMemGetInfo_v2", vec![to, 0]),
            ("cuMemHostAlloc", vec![to, 4096, 0]),
            ("cuMemcpyDtoH_v2", vec![to, other, 4]),
            ("cuMemsetD8_v2", vec![other, 0, 4]),
            ("cuStreamCreate", vec![to, 0]),
            ("cuStreamQuery", vec![0]),
            ("cuStreamWaitValue32_v2", vec![0, other, 0, 0]),
            ("cuEventCreate", vec![to, 0]),
            ("cuEventRecord", vec![mark, 0]),
            ("cuEventQuery", vec![mark]),
            ("cuStreamBeginCapture_v2", vec![lane, 0]),
            ("cuCtxRecordEvent", vec![gpu.context, mark]),
            ("cuCtxSynchronize", vec![]),
        ] {
            assert_eq!(cu(call, &args), ILLEGAL_ADDRESS, "{call} in a dead context");
        }
        assert_eq!(cu("cuMemRelease", &[handle]), 0, "memory management goes on");
    });
}

#[test]
fn mapped_memory_without_access_faults() {
    isolated("memory::mapped_memory_without_access_faults", &[], || {
        let gpu = Gpu::open();
        let len = 2 * M;
        let at = get("cuMemAddressReserve", &[len, 0, 0, 0]);
        assert_eq!(cu("cuMemMap", &[at, len, 0, chunk(len).expect("a chunk"), 0]), 0);
        let mut value = 0_u32;
        assert_eq!(cu("cuMemcpyDtoH_v2", &[&raw mut value as usize, at, 4]), 1);
        assert_eq!(gpu.launch("fill_u32", 0, &[at as u64, 1, 1]), 0);
        assert_eq!(cu("cuCtxSynchronize", &[]), ILLEGAL_ADDRESS);
    });
}

#[test]
fn managed_memory_may_exceed_the_gpu() {
    isolated(
        "memory::managed_memory_may_exceed_the_gpu",
        &[("CUDA_SIM_MEMORY", "64M"), ("CUDA_SIM_CONTEXT", "16M"), ("CUDA_SIM_FAULT_BANDWIDTH", "100G")],
        || {
            let gpu = Gpu::open();
            let len = 96 * M;
            let at = get("cuMemAllocManaged", &[len, 1]) as u64;
            assert_eq!(free_memory(), 48 * M, "nothing is resident yet");
            assert_eq!(gpu.launch("fill_u32", 0, &[at, (len / 4) as u64, 9]), 0);
            assert_eq!(cu("cuCtxSynchronize", &[]), 0);
            assert_eq!(free_memory(), 0);
            // SAFETY: managed memory is host memory, too, and the GPU is idle.
            let last = unsafe { ((at + len as u64 - 4) as *const u32).read() };
            assert_eq!(last, 9);
            alloc(40 * M);
            assert_eq!(free_memory(), 0, "plain memory took the place of managed memory");
            assert_eq!(cu("cuMemFree_v2", &[at as usize]), 0);
            assert_eq!(free_memory(), 8 * M);
        },
    );
}

#[test]
fn evicted_managed_memory_stays_in_use_until_plain_allocations_need_it() {
    isolated(
        "memory::evicted_managed_memory_stays_in_use_until_plain_allocations_need_it",
        &[("CUDA_SIM_MEMORY", "64M"), ("CUDA_SIM_CONTEXT", "16M"), ("CUDA_SIM_LINK_BANDWIDTH", "100G")],
        || {
            let gpu = Gpu::open();
            let len = 32 * M;
            let at = get("cuMemAllocManaged", &[len, 1]);
            let prefetch = |device: i32| {
                assert_eq!(cu("cuMemPrefetchAsync", &[at, len, device as usize, 0]), 0);
                assert_eq!(cu("cuCtxSynchronize", &[]), 0);
            };
            assert_eq!(gpu.launch("fill_u32", 0, &[at as u64, (len / 4) as u64, 9]), 0);
            assert_eq!(cu("cuCtxSynchronize", &[]), 0);
            assert_eq!(free_memory(), 16 * M);
            prefetch(-1);
            assert_eq!(free_memory(), 16 * M, "it has left, and its pages are still in use");
            prefetch(0);
            assert_eq!(free_memory(), 16 * M, "the same pages are used again");
            prefetch(-1);

            let chunk = chunk(24 * M).expect("the driver gives it the pages");
            assert_eq!(free_memory(), 0);
            let plain = alloc(16 * M);
            assert_eq!(free_memory(), 0);
            assert_eq!(cu("cuMemRelease", &[chunk]), 0);
            assert_eq!(cu("cuMemFree_v2", &[plain as usize]), 0);
            assert_eq!(free_memory(), 40 * M, "8 MiB of pages are left");
            // SAFETY: managed memory is host memory, too, and the GPU is idle.
            assert_eq!(unsafe { ((at + len - 4) as *const u32).read() }, 9, "its contents");
            assert_eq!(cu("cuMemFree_v2", &[at]), 0);
            assert_eq!(free_memory(), 48 * M);
        },
    );
}

#[test]
fn cuda_sim_fail_makes_the_nth_call_fail() {
    isolated("memory::cuda_sim_fail_makes_the_nth_call_fail", &[("CUDA_SIM_FAIL", "cuMemCreate:2")], || {
        let _gpu = Gpu::open();
        assert!(chunk(2 * M).is_ok());
        assert_eq!(chunk(2 * M), Err(OUT_OF_MEMORY));
        assert!(chunk(2 * M).is_ok());
    });
}

#[test]
fn a_gpu_without_vmm_reports_it() {
    isolated("memory::a_gpu_without_vmm_reports_it", &[("CUDA_SIM_VMM", "0")], || {
        let _gpu = Gpu::open();
        assert_eq!(get("cuDeviceGetAttribute", &[102, 0]), 0);
        assert_eq!(chunk(2 * M), Err(801));
    });
}

#[test]
fn a_forked_child_cannot_call_the_driver() {
    isolated("memory::a_forked_child_cannot_call_the_driver", &[], || {
        let _gpu = Gpu::open();
        // SAFETY: the child only calls the driver and _exit.
        let status = unsafe {
            match libc::fork() {
                0 => libc::_exit(cu("cuCtxSynchronize", &[]) as i32),
                child => {
                    let mut status = 0;
                    assert_eq!(libc::waitpid(child, &mut status, 0), child);
                    libc::WEXITSTATUS(status)
                }
            }
        };
        assert_eq!(status, 3);
        assert_eq!(cu("cuCtxSynchronize", &[]), 0);
    });
}
