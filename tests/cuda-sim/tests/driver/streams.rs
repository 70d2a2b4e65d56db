//! Streams: order, the default stream, depth, time, and the rules of stream capture.

use crate::support::*;
use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

const MS: u64 = 1_000_000;
const NON_BLOCKING: usize = 1;
const NOT_READY: u32 = 600;

#[test]
fn work_in_a_stream_runs_in_order() {
    isolated("streams::work_in_a_stream_runs_in_order", &[("CUDA_SIM_GPU_BANDWIDTH", "256M")], || {
        let gpu = Gpu::open();
        let (at, count) = (alloc(1 << 20), 1 << 18);
        let (a, b, mark, flag) = (stream(NON_BLOCKING), stream(NON_BLOCKING), event(), Flag::new());
        assert_eq!(gpu.launch("spin_until", a, &[flag.at()]), 0);
        assert_eq!(gpu.launch("fill_u32", a, &[at, count, 1]), 0);
        assert_eq!(gpu.launch("mix_u32", a, &[at, count, 5]), 0);
        assert_eq!(cu("cuEventRecord", &[mark, a]), 0);
        assert_eq!(cu("cuEventQuery", &[mark]), NOT_READY);
        assert_eq!(cu("cuStreamWaitEvent", &[b, mark, 0]), 0);
        assert_eq!(gpu.launch("unmix_u32", b, &[at, count, 5]), 0);
        assert_eq!(gpu.launch("add_u32", b, &[at, count, 2]), 0);
        flag.write();
        assert_eq!(cu("cuStreamSynchronize", &[b]), 0);
        assert_eq!(cu("cuEventQuery", &[mark]), 0);
        assert_eq!((read(at), read(at + 4 * (count - 1))), (3, 3));
    });
}

#[test]
fn the_default_stream_waits_for_blocking_streams() {
    isolated("streams::the_default_stream_waits_for_blocking_streams", &[], || {
        let gpu = Gpu::open();
        let (at, other) = (alloc(4), stream(0));
        for (first, second) in [(other, 0), (0, other)] {
            assert_eq!(gpu.launch("spin_ns", first, &[60 * MS]), 0);
            assert_eq!(cu("cuMemsetD32Async", &[at as usize, 1, 1, second]), 0);
            assert_eq!(cu("cuStreamSynchronize", &[second]), 0);
            assert_eq!(cu("cuStreamQuery", &[first]), 0, "the kernel ends first");
        }
    });
}

#[test]
fn the_default_stream_does_not_wait_for_other_streams() {
    isolated("streams::the_default_stream_does_not_wait_for_other_streams", &[], || {
        let gpu = Gpu::open();
        let (at, other) = (alloc(4), stream(NON_BLOCKING));
        for (first, second) in [(other, 0), (0, other)] {
            let flag = Flag::new();
            assert_eq!(gpu.launch("spin_until", first, &[flag.at()]), 0);
            assert_eq!(cu("cuMemsetD32Async", &[at as usize, 1, 1, second]), 0);
            // If one stream waited for the other, this call would never return.
            assert_eq!(cu("cuStreamSynchronize", &[second]), 0);
            assert_eq!(cu("cuStreamQuery", &[first]), NOT_READY);
            flag.write();
            assert_eq!(cu("cuCtxSynchronize", &[]), 0);
        }
    });
}

#[test]
fn a_full_stream_queue_blocks_launches() {
    static IS_FULL: AtomicBool = AtomicBool::new(false);
    isolated("streams::a_full_stream_queue_blocks_launches", &[], || {
        let gpu = Gpu::open();
        let (flag, lane) = (Flag::new(), stream(NON_BLOCKING));
        assert_eq!(gpu.launch("spin_until", lane, &[flag.at()]), 0);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !IS_FULL.load(Ordering::SeqCst) {
                    thread::sleep(Duration::from_millis(1));
                }
                thread::sleep(Duration::from_millis(50));
                flag.write();
            });
            for _ in 0..1020 {
                assert_eq!(gpu.launch("empty", lane, &[]), 0);
            }
            // None of 1,021 launches has waited for the kernel.
            assert_eq!(cu("cuStreamQuery", &[lane]), NOT_READY);
            IS_FULL.store(true, Ordering::SeqCst);
            (0..2).for_each(|_| assert_eq!(gpu.launch("empty", lane, &[]), 0));
            assert_eq!(flag.value(), 1, "more wait for it");
        });
        assert_eq!(cu("cuStreamSynchronize", &[lane]), 0);
    });
}

#[test]
fn two_processes_share_the_gpu() {
    isolated("streams::two_processes_share_the_gpu", &[("CUDA_SIM_GPU_BANDWIDTH", "64M")], || {
        let gpu = Gpu::open();
        let (at, count) = (alloc(16 << 20), 4 << 20);
        let run = || {
            assert_eq!(gpu.launch("fill_u32", 0, &[at, count, 1]), 0);
            assert_eq!(cu("cuCtxSynchronize", &[]), 0);
        };
        if role().is_some() {
            return run();
        }
        // Each program needs a quarter of a second, which is a lower bound. On an idle machine,
        // concurrent execution would take no longer.
        let start = Instant::now();
        let mut other = companion("streams::two_processes_share_the_gpu", "other");
        run();
        assert!(other.wait().expect("wait").success());
        assert!(start.elapsed() >= Duration::from_millis(490), "{:?}", start.elapsed());
    });
}

/// Whether a capture survives a call.
#[derive(Clone, Copy)]
enum Survives {
    Always,
    /// In global mode never, in thread-local mode if another thread calls, and in relaxed mode
    /// always.
    ByMode,
    Never,
}

#[test]
fn calls_during_a_capture_follow_the_capture_mode() {
    isolated("streams::calls_during_a_capture_follow_the_capture_mode", &[], || {
        let gpu = Gpu::open();
        let (other, mark, at) = (stream(NON_BLOCKING), event(), alloc(16));
        let mut host = vec![0_u64; 512];
        let host_at = host.as_mut_ptr() as usize;
        let mut answer = 0_usize;
        let to = &raw mut answer as usize;
        type Call<'a> = Box<dyn Fn(usize) -> u32 + Sync + 'a>;
        let calls: Vec<(&str, Survives, Call<'_>)> = vec![
            ("record on another stream", Survives::Always, Box::new(|_| cu("cuEventRecord", &[mark, other]))),
            ("launch on another stream", Survives::Always, Box::new(|_| gpu.launch("empty", other, &[]))),
            (
                "copy on another stream",
                Survives::Always,
                Box::new(move |_| cu("cuMemcpyDtoHAsync_v2", &[host_at, at as usize, 8, other])),
            ),
            ("wait for a copy", Survives::Always, Box::new(move |_| cu("cuMemcpyDtoH_v2", &[host_at, at as usize, 8]))),
            ("create a chunk", Survives::Always, Box::new(|_| chunk(2 << 20).err().unwrap_or(0))),
            ("memory information", Survives::Always, Box::new(move |_| cu("cuMemGetInfo_v2", &[to, 0]))),
            ("query an event", Survives::ByMode, Box::new(|_| cu("cuEventQuery", &[mark]))),
            ("wait for an event", Survives::ByMode, Box::new(|_| cu("cuEventSynchronize", &[mark]))),
            ("query another stream", Survives::ByMode, Box::new(|_| cu("cuStreamQuery", &[other]))),
            ("wait for another stream", Survives::ByMode, Box::new(|_| cu("cuStreamSynchronize", &[other]))),
            ("allocate", Survives::ByMode, Box::new(move |_| cu("cuMemAlloc_v2", &[to, 64]))),
            ("free nothing", Survives::ByMode, Box::new(|_| cu("cuMemFree_v2", &[0]))),
            (
                "register host memory",
                Survives::ByMode,
                Box::new(move |_| {
                    let code = cu("cuMemHostRegister_v2", &[host_at, 64, 0]);
                    if code == 0 { cu("cuMemHostUnregister", &[host_at]) } else { code }
                }),
            ),
            ("wait for the context", Survives::Never, Box::new(|_| cu("cuCtxSynchronize", &[]))),
            ("record the context", Survives::Never, Box::new(|_| cu("cuCtxRecordEvent", &[gpu.context, mark]))),
            ("query the capturing stream", Survives::Never, Box::new(|s| cu("cuStreamQuery", &[s]))),
        ];
        for (mode, mode_name) in ["global", "thread-local", "relaxed"].into_iter().enumerate() {
            for other_thread in [false, true] {
                for (what, survives, call) in &calls {
                    let lane = stream(NON_BLOCKING);
                    assert_eq!(cu("cuCtxSynchronize", &[]), 0);
                    assert_eq!(cu("cuStreamBeginCapture_v2", &[lane, mode]), 0);
                    let code = if other_thread {
                        thread::scope(|scope| {
                            let there = scope.spawn(|| {
                                assert_eq!(cu("cuCtxSetCurrent", &[gpu.context]), 0);
                                call(lane)
                            });
                            there.join().expect("no panic")
                        })
                    } else {
                        call(lane)
                    };
                    let lives = match survives {
                        Survives::Always => true,
                        Survives::ByMode => mode == 2 || (mode == 1 && other_thread),
                        Survives::Never => false,
                    };
                    let label = format!("{what}, mode {mode_name}, other thread {other_thread}");
                    assert_eq!(code, if lives { 0 } else { 900 }, "{label}");
                    assert_eq!(gpu.launch("empty", lane, &[]), if lives { 0 } else { 901 }, "{label}");
                    let mut graph = 0_usize;
                    assert_eq!(
                        cu("cuStreamEndCapture", &[lane, &raw mut graph as usize]),
                        if lives { 0 } else { 901 },
                        "{label}"
                    );
                    assert_eq!(graph != 0, lives, "{label}");
                }
            }
        }
    });
}

#[test]
fn a_thread_in_relaxed_mode_may_allocate_during_a_capture() {
    isolated("streams::a_thread_in_relaxed_mode_may_allocate_during_a_capture", &[], || {
        let gpu = Gpu::open();
        let lane = stream(NON_BLOCKING);
        assert_eq!(cu("cuStreamBeginCapture_v2", &[lane, 0]), 0);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut mode = 2_u32;
                assert_eq!(cu("cuCtxSetCurrent", &[gpu.context]), 0);
                assert_eq!(cu("cuThreadExchangeStreamCaptureMode", &[&raw mut mode as usize]), 0);
                assert_eq!(mode, 0, "the mode before");
                alloc(64);
            });
        });
        assert_ne!(get_after(lane), 0);
    });
}

fn get_after(lane: usize) -> usize {
    let mut graph = 0_usize;
    assert_eq!(cu("cuStreamEndCapture", &[lane, &raw mut graph as usize]), 0);
    graph
}

#[test]
fn a_graphs_work_runs_only_when_launched() {
    isolated("streams::a_graphs_work_runs_only_when_launched", &[], || {
        let gpu = Gpu::open();
        let at = alloc(64);
        let (lane, side, fork, join) = (stream(NON_BLOCKING), stream(NON_BLOCKING), event(), event());
        assert_eq!(gpu.launch("fill_u32", 0, &[at, 16, 1]), 0);
        assert_eq!(cu("cuCtxSynchronize", &[]), 0);
        assert_eq!(cu("cuStreamBeginCapture_v2", &[lane, 0]), 0);
        assert_eq!(gpu.launch("add_u32", lane, &[at, 8, 10]), 0);
        assert_eq!(cu("cuEventRecord", &[fork, lane]), 0);
        assert_eq!(cu("cuStreamWaitEvent", &[side, fork, 0]), 0);
        assert_eq!(gpu.launch("add_u32", side, &[at + 32, 8, 20]), 0);
        let mut graph = 0_usize;
        let unjoined = side;
        assert_eq!(cu("cuEventRecord", &[join, unjoined]), 0);
        assert_eq!(cu("cuStreamWaitEvent", &[lane, join, 0]), 0);
        assert_eq!(cu("cuStreamEndCapture", &[lane, &raw mut graph as usize]), 0);
        assert_eq!((read(at), read(at + 32)), (1, 1), "captured, not done");
        let exec = get("cuGraphInstantiateWithFlags", &[graph, 0]);
        for _ in 0..3 {
            assert_eq!(cu("cuGraphLaunch", &[exec, lane]), 0);
        }
        assert_eq!(cu("cuStreamSynchronize", &[lane]), 0);
        assert_eq!((read(at), read(at + 32)), (31, 61));

        assert_eq!(cu("cuStreamBeginCapture_v2", &[lane, 0]), 0);
        assert_eq!(cu("cuEventRecord", &[fork, lane]), 0);
        assert_eq!(cu("cuStreamWaitEvent", &[side, fork, 0]), 0);
        assert_eq!(gpu.launch("empty", side, &[]), 0);
        assert_eq!(cu("cuStreamEndCapture", &[lane, &raw mut graph as usize]), 904, "the side stream never came back");
    });
}
