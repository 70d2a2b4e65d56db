//! Work that waits for the host, for another process, or for another part of the GPU.

use crate::support::*;
use std::{
    ffi::c_void,
    io::{BufRead, BufReader, Write},
    mem,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

const MS: u64 = 1_000_000;
const NON_BLOCKING: usize = 1;
const NOT_READY: u32 = 600;
const INTERPROCESS: usize = 4 | 2;

#[test]
fn a_stream_waits_for_a_value_written_by_a_stream_or_the_host() {
    isolated("waits::a_stream_waits_for_a_value_written_by_a_stream_or_the_host", &[], || {
        let gpu = Gpu::open();
        let (at, lane, other) = (alloc(64), stream(NON_BLOCKING), stream(NON_BLOCKING));
        let fill = || assert_eq!(gpu.launch("fill_u32", lane, &[at + 32, 1, 7]), 0);
        assert_eq!(cu("cuMemsetD8_v2", &[at as usize, 0, 64]), 0);
        assert_eq!(cu("cuCtxSynchronize", &[]), 0); // the null stream does not order `lane`
        assert_eq!(cu("cuStreamWaitValue32_v2", &[lane, at as usize, 1, 0]), 0);
        fill();
        thread::sleep(Duration::from_millis(20));
        assert_eq!(cu("cuStreamQuery", &[lane]), NOT_READY);
        assert_eq!(cu("cuStreamWriteValue32_v2", &[other, at as usize, 1, 0]), 0);
        assert_eq!(cu("cuStreamSynchronize", &[lane]), 0);
        assert_eq!(read(at + 32), 7);

        let host = get("cuMemHostAlloc", &[4096, 2]);
        let mapped = get("cuMemHostGetDevicePointer_v2", &[host, 0]);
        assert_eq!(cu("cuStreamWaitValue64_v2", &[lane, mapped, 5, 1]), 0);
        thread::sleep(Duration::from_millis(20));
        assert_eq!(cu("cuStreamQuery", &[lane]), NOT_READY);
        // SAFETY: this is mapped host memory. The stream reads the memory during the write, as a
        // GPU does.
        unsafe { (host as *mut u64).write_volatile(5) };
        assert_eq!(cu("cuStreamSynchronize", &[lane]), 0);
    });
}

#[test]
fn host_functions_run_in_stream_order() {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn plain(_: *mut c_void) {
        CALLS.fetch_add(1, Ordering::SeqCst);
    }
    unsafe extern "C" fn told(_: usize, status: u32, _: *mut c_void) {
        CALLS.fetch_add(10 + status, Ordering::SeqCst);
    }
    isolated("waits::host_functions_run_in_stream_order", &[], || {
        let gpu = Gpu::open();
        let (lane, flag) = (stream(NON_BLOCKING), Flag::new());
        assert_eq!(gpu.launch("spin_until", lane, &[flag.at()]), 0);
        assert_eq!(cu("cuLaunchHostFunc", &[lane, plain as *const () as usize, 0]), 0);
        assert_eq!(cu("cuStreamAddCallback", &[lane, told as *const () as usize, 0, 0]), 0);
        assert_eq!(CALLS.load(Ordering::SeqCst), 0, "not before the kernel ends");
        flag.write();
        assert_eq!(cu("cuStreamSynchronize", &[lane]), 0);
        assert_eq!(CALLS.load(Ordering::SeqCst), 11);
    });
}

type Handle = [u64; 8];

/// Opens an event. The handle is passed by value, which [`cu`] cannot do.
fn open_event(handle: Handle) -> usize {
    type Open = extern "C" fn(*mut usize, Handle8) -> u32;
    #[repr(C)]
    struct Handle8(Handle);
    let mut event = 0;
    // SAFETY: the CUDA headers declare the function with this signature, except for the structure's
    // name.
    let open = unsafe { mem::transmute::<*mut c_void, Open>(symbol("cuIpcOpenEventHandle")) };
    assert_eq!(open(&mut event, Handle8(handle)), 0);
    event
}

#[test]
fn a_stream_waits_for_an_event_of_another_process() {
    const NAME: &str = "waits::a_stream_waits_for_an_event_of_another_process";
    isolated(NAME, &[], || {
        let gpu = Gpu::open();
        let lane = stream(NON_BLOCKING);
        if role().is_some() {
            // Exports an event that was recorded behind work. The work ends on request.
            let (event, flag) = (get("cuEventCreate", &[INTERPROCESS]), Flag::new());
            let mut handle: Handle = [0; 8];
            assert_eq!(cu("cuIpcGetEventHandle", &[handle.as_mut_ptr() as usize, event]), 0);
            assert_eq!(gpu.launch("spin_until", lane, &[flag.at()]), 0);
            assert_eq!(cu("cuEventRecord", &[event, lane]), 0);
            let words = handle.map(|word| word.to_string());
            println!("handle {}", words.join(" "));
            std::io::stdout().flush().expect("a pipe");
            let _ = std::io::stdin().read_line(&mut String::new());
            flag.write();
            assert_eq!(cu("cuStreamSynchronize", &[lane]), 0);
            // This process lives until its parent ends.
            let _ = std::io::stdin().read_line(&mut String::new());
            return;
        }
        let mut other = companion(NAME, "exporter");
        let mut lines = BufReader::new(other.stdout.take().expect("piped")).lines().map_while(Result::ok);
        let line = lines.find_map(|line| Some(line.split_once("handle ")?.1.to_owned())).expect("a handle");
        let words: Vec<u64> = line.split_whitespace().map(|word| word.parse().expect("a number")).collect();
        let event = open_event(words.try_into().expect("eight words"));
        assert_eq!(cu("cuEventQuery", &[event]), NOT_READY);
        assert_eq!(cu("cuStreamWaitEvent", &[lane, event, 0]), 0);
        assert_eq!(cu("cuStreamQuery", &[lane]), NOT_READY);
        writeln!(other.stdin.as_ref().expect("piped")).expect("it reads");
        assert_eq!(cu("cuStreamSynchronize", &[lane]), 0);
        assert_eq!(cu("cuEventQuery", &[event]), 0, "the stream waited for it");
        drop(other.stdin.take());
        other.wait().expect("wait");
    });
}

/// Creates a green context of 16 multiprocessors, and converts it to a context.
fn green() -> (usize, usize) {
    let (mut all, mut part, mut rest, mut count) = ([0_u32; 36], [0_u32; 36], [0_u32; 36], 1_u32);
    assert_eq!(cu("cuDeviceGetDevResource", &[0, all.as_mut_ptr() as usize, 1]), 0);
    let args =
        [part.as_mut_ptr() as usize, &raw mut count as usize, all.as_ptr() as usize, rest.as_mut_ptr() as usize, 0, 16];
    assert_eq!(cu("cuDevSmResourceSplitByCount", &args), 0);
    assert_eq!((count, part[24], part[24] + rest[24]), (1, 16, all[24]));
    let description = get("cuDevResourceGenerateDesc", &[part.as_ptr() as usize, 1]);
    let green = get("cuGreenCtxCreate", &[description, 0, 1]);
    (green, get("cuCtxFromGreenCtx", &[green]))
}

#[test]
fn synchronizing_the_primary_context_waits_for_green_contexts() {
    isolated("waits::synchronizing_the_primary_context_waits_for_green_contexts", &[], || {
        let gpu = Gpu::open();
        let before = free_memory();
        let (green, context) = green();
        assert_eq!(free_memory(), before, "it takes no memory of its own");
        let lane = get("cuGreenCtxStreamCreate", &[green, NON_BLOCKING, 0]);
        let mut answer = 0_usize;
        assert_eq!(cu("cuStreamGetGreenCtx", &[lane, &raw mut answer as usize]), 0);
        assert_eq!(answer, green);
        let (at, mark) = (alloc(4), event());
        for wait in ["cuCtxRecordEvent", "cuGreenCtxRecordEvent", "cuCtxSynchronize"] {
            let (flag, all) = (Flag::new(), wait == "cuCtxSynchronize");
            let kernel = if all { ("spin_ns", 30 * MS) } else { ("spin_until", flag.at()) };
            assert_eq!(gpu.launch(kernel.0, lane, &[kernel.1]), 0);
            assert_eq!(gpu.launch("fill_u32", lane, &[at, 1, 3]), 0);
            match wait {
                "cuCtxSynchronize" => assert_eq!(cu(wait, &[]), 0),
                "cuCtxRecordEvent" => assert_eq!(cu(wait, &[gpu.context, mark]), 0),
                _ => assert_eq!(cu(wait, &[green, mark]), 0),
            }
            if !all {
                assert_eq!(cu("cuEventQuery", &[mark]), NOT_READY, "{wait}");
                flag.write();
                assert_eq!(cu("cuEventSynchronize", &[mark]), 0);
            }
            assert_eq!(cu("cuStreamQuery", &[lane]), 0, "{wait}");
        }
        assert_eq!(cu("cuCtxSetCurrent", &[context]), 0);
        assert_eq!(gpu.launch("add_u32", lane, &[at, 1, 1]), 0);
        assert_eq!(cu("cuCtxSynchronize", &[]), 0);
        assert_eq!(read(at), 4, "memory is shared");
        assert_eq!(cu("cuCtxSetCurrent", &[gpu.context]), 0);
        assert_eq!(cu("cuGreenCtxDestroy", &[green]), 0);
        assert_eq!(read(at), 4);
    });
}

#[test]
fn a_graph_that_waits_for_the_host_ends_on_its_signal() {
    isolated("waits::a_graph_that_waits_for_the_host_ends_on_its_signal", &[], || {
        let gpu = Gpu::open();
        let (lane, host) = (stream(NON_BLOCKING), get("cuMemHostAlloc", &[4096, 2]));
        assert_eq!(cu("cuStreamBeginCapture_v2", &[lane, 0]), 0);
        assert_eq!(gpu.launch("spin_until", lane, &[host as u64]), 0);
        let mut graph = 0_usize;
        assert_eq!(cu("cuStreamEndCapture", &[lane, &raw mut graph as usize]), 0);
        let exec = get("cuGraphInstantiateWithFlags", &[graph, 0]);
        assert_eq!(cu("cuGraphLaunch", &[exec, lane]), 0);
        thread::sleep(Duration::from_millis(20));
        assert_eq!(cu("cuStreamQuery", &[lane]), NOT_READY);
        // SAFETY: this is mapped host memory. The kernel reads the memory during the write, as a
        // GPU does.
        unsafe { (host as *mut u32).write_volatile(1) };
        assert_eq!(cu("cuStreamSynchronize", &[lane]), 0);
    });
}
