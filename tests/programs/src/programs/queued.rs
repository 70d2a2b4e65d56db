//! Launches in many streams behind a kernel that waits for the host. Without nvshare, none of these
//! launches blocks.

use super::Outcome;
use crate::{
    args::Args,
    cuda::{self, Gpu, Mapped, Stream, cu},
    report::Report,
};
use std::time::Instant;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (streams, each) = (args.size("streams", "16").max(1), args.size("each", "970"));
    // The driver blocks launches to longer queues, so the host ends the kernel before the queues
    // are full.
    let held = args.size("held", "970").min(each);
    let gpu = Gpu::open(0)?;
    let flag = Mapped::new(4)?;
    let streams = (0..streams).map(|_| Stream::new()).collect::<cuda::Result<Vec<_>>>()?;
    let mut event = 0;
    cu!(cuEventCreate(&mut event, 2))?;
    // The first launch of a kernel may load the kernel, and loading may wait for running kernels.
    gpu.empty(streams[0].0)?;
    gpu.synchronise()?;
    gpu.spin_until(flag.at, streams[0].0)?;
    cu!(cuEventRecord(event, streams[0].0))?;
    for stream in &streams[1..] {
        cu!(cuStreamWaitEvent(stream.0, event, 0))?;
    }
    let (begin, processor) = (Instant::now(), processor_seconds(libc::CLOCK_THREAD_CPUTIME_ID));
    for round in 0..each {
        if round == held {
            flag.set(1);
        }
        streams.iter().try_for_each(|stream| gpu.empty(stream.0))?;
    }
    // The thread's clock excludes the driver's own threads, which poll the flag.
    let processor = processor_seconds(libc::CLOCK_THREAD_CPUTIME_ID) - processor;
    flag.set(1);
    gpu.synchronise()?;
    let launches = each * streams.len() as u64;
    report.number("queue_seconds", begin.elapsed().as_secs_f64());
    report.number("launch_us", processor * 1e6 / launches as f64);
    report.integer("launches", launches);
    cu!(cuEventDestroy_v2(event))?;
    Ok(())
}

/// Returns the processor time of this thread, or of all threads of the process, by the clock.
pub fn processor_seconds(clock: libc::clockid_t) -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a live value.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}
