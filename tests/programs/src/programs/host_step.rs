//! GPU work that waits for a step of the host. For this step, another thread must allocate, launch
//! work, or find room in the queues of streams, all through the library.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind, Mapped, Stream, cu, late::late_cu, read},
    report::Report,
    signal,
};
use std::{
    ffi::c_void,
    sync::{Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};

/// More launches than the queue of a stream can hold.
const MANY: u32 = 3000;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    match args.text("how", "allocate") {
        "allocate" => allocate(args, report),
        "destroy" => destroy(args, report),
        "fill" => fill(report),
        _ => Err("--how: want allocate, destroy or fill".into()),
    }
}

/// Runs a kernel that waits until another thread has allocated and used memory. Before that, the
/// program works for `before-ms` or until the signal, so that its memory is evicted and restored.
fn allocate(args: &Args, report: &mut Report) -> Outcome {
    let memory = args.size("mem", "60M") as usize;
    let (before, pause) = (args.milliseconds("before-ms", "3000"), args.milliseconds("pause-ms", "2000"));
    let after = args.milliseconds("after-ms", "0");
    let gpu = Gpu::open(0)?;
    let flag = Mapped::new(4)?;
    let (stream, buffer) = (Stream::new()?, Buffer::new(Kind::Alloc, memory)?);
    // Writes contents that must be copied at an eviction.
    for at in (0..memory as u64 / 4).step_by(1 << 18) {
        gpu.fill(buffer.at + 4 * at, 1 << 10, at as u32, stream.0)?;
    }
    let begin = Instant::now();
    while begin.elapsed() < before && !signal::take() {
        gpu.add(buffer.at, 16, 0, stream.0)?;
        stream.synchronise()?;
        thread::sleep(Duration::from_millis(20));
    }
    gpu.spin_until(flag.at, stream.0)?;
    eprintln!("the kernel runs");
    signal::pause(pause);
    thread::scope(|scope| {
        let other = scope.spawn(|| -> crate::cuda::Result<u32> {
            gpu.enter()?;
            let (stream, more) = (Stream::new()?, Buffer::new(Kind::Alloc, 8 << 20)?);
            gpu.fill(more.at, more.count(), 7, stream.0)?;
            stream.synchronise()?;
            eprintln!("the kernel ends");
            flag.set(1);
            read(more.at)
        });
        expect("what the other thread has written", other.join().map_err(|_| "a thread panicked")??, 7)
    })?;
    stream.synchronise()?;
    eprintln!("the results are right");
    thread::sleep(after);
    report.integer("memory", memory as u64);
    Ok(())
}

/// Channels to the steps for which a host function in a stream waits.
struct Steps {
    go: Mutex<mpsc::Sender<()>>,
    done: Mutex<mpsc::Receiver<()>>,
}

unsafe extern "C" fn step(steps: *mut c_void) {
    // SAFETY: `destroy` passes a `Steps` that outlives the context.
    let steps = unsafe { &*steps.cast::<Steps>() };
    let _ = steps.go.lock().map(|go| go.send(()));
    let _ = steps.done.lock().map(|done| done.recv());
}

/// Destroys a context while a host function of the program runs in it. The function waits until
/// another thread has worked in another context. That thread pauses first, and other programs have
/// their turns during the pause.
fn destroy(args: &Args, report: &mut Report) -> Outcome {
    let (memory, pause) = (args.size("mem", "60M") as usize, args.milliseconds("pause-ms", "1500"));
    let gpu = Gpu::open(0)?;
    let (stream, buffer) = (Stream::new()?, Buffer::new(Kind::Alloc, memory)?);
    gpu.fill(buffer.at, buffer.count(), 0, stream.0)?;
    stream.synchronise()?;
    let ((go, has_begun), (tell, done)) = (mpsc::channel(), mpsc::channel());
    let steps = Steps { go: Mutex::new(go), done: Mutex::new(done) };
    let mut context = 0;
    late_cu!(cuCtxCreate_v2(&mut context, 0, gpu.device))?;
    let dying = Stream::new()?;
    cu!(cuLaunchHostFunc(dying.0, step, (&raw const steps).cast_mut().cast()))?;
    std::mem::forget(dying); // destroyed with its context
    thread::scope(|scope| {
        let (gpu, stream, buffer) = (&gpu, &stream, &buffer);
        let worker = scope.spawn(move || -> crate::cuda::Result<()> {
            gpu.enter()?;
            let _ = has_begun.recv();
            thread::sleep(pause);
            for _ in 0..5 {
                gpu.add(buffer.at, buffer.count(), 1, stream.0)?;
                stream.synchronise()?;
            }
            let _ = tell.send(());
            Ok(())
        });
        late_cu!(cuCtxDestroy_v2(context))?;
        worker.join().map_err(|_| "a thread panicked")??;
        Outcome::Ok(())
    })?;
    gpu.enter()?;
    expect("sum", gpu.sum(buffer.at, buffer.count())?, 5 * buffer.count())?;
    report.integer("memory", memory as u64);
    Ok(())
}

/// One thread fills the queue of a stream behind a waiting kernel until its launches block. Another
/// thread works in its own streams and then ends the kernel.
fn fill(report: &mut Report) -> Outcome {
    let gpu = Gpu::open(0)?;
    let flag = Mapped::new(4)?;
    let stream = Stream::new()?;
    gpu.spin_until(flag.at, stream.0)?;
    thread::scope(|scope| {
        let launches = scope.spawn(|| {
            gpu.enter()?;
            (0..MANY).try_for_each(|_| gpu.empty(stream.0))
        });
        // The pause is longer than the library's longest delay of a launch, so the queue is full
        // afterwards.
        thread::sleep(Duration::from_secs(8));
        for _ in 0..20 {
            let own = Stream::new()?;
            gpu.empty(own.0)?;
            own.synchronise()?;
        }
        let was_waiting = !launches.is_finished();
        flag.set(1);
        launches.join().map_err(|_| "a thread panicked")??;
        expect("whether the other thread waited", was_waiting, true)
    })?;
    stream.synchronise()?;
    report.integer("launches", MANY.into());
    Ok(())
}
