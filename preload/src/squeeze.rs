//! Calls in which the driver takes memory of the GPU for itself. Where it finds none, others have it, or this program's own
//! demand has grown into it: the scheduler is asked for room, and the call is made again, a few times.

use crate::{
    client,
    cuda::{CUresult, ERROR_OUT_OF_MEMORY},
    futex,
    gpu::{self, Gpu},
    sys::time::Instant,
    trace::trace,
};
use core::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};
use nvshare_wire::{ClientMessage, version};

/// How much room is asked for, time after time: at most so many bytes, and such a part of the GPU.
const STEPS: [(u64, u64); 3] = [(64 << 20, 16), (512 << 20, 8), (4 << 30, 4)];
/// How long an answer is waited for. The scheduler gives one within 2 s.
const PATIENCE: Duration = Duration::from_secs(3);

/// A call that failed in spite of it all is not helped again for so long: neighbours would lose their memory for nothing.
const FUTILE: Duration = Duration::from_secs(10);

/// The scheduler's answers for one GPU.
#[derive(Debug)]
pub struct Answers {
    count: AtomicU32,
    /// How much room there is.
    bytes: AtomicU64,
    /// When room was made and did not help, in milliseconds; 0 before.
    futile: AtomicU64,
}

impl Answers {
    pub const fn new() -> Self {
        Self { count: AtomicU32::new(0), bytes: AtomicU64::new(0), futile: AtomicU64::new(0) }
    }

    pub fn room(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::SeqCst);
        self.count.fetch_add(1, Ordering::SeqCst);
        futex::wake_all(&self.count);
    }
}

/// Makes a call, and again if it found no memory and room was made.
#[inline]
pub fn retried(call: impl Fn() -> CUresult) -> CUresult {
    retried_on(gpu::current, call)
}

/// The same for a call that concerns that GPU.
#[inline]
pub fn retried_on(gpu: impl FnOnce() -> Option<&'static Gpu>, call: impl Fn() -> CUresult) -> CUresult {
    let result = call();
    if result == ERROR_OUT_OF_MEMORY { again(result, gpu, call) } else { result }
}

#[cold]
fn again(mut result: CUresult, gpu: impl FnOnce() -> Option<&'static Gpu>, call: impl Fn() -> CUresult) -> CUresult {
    let Some(gpu) = client::is_on().then(gpu).flatten() else { return result };
    let futile = gpu.squeezed.futile.load(Ordering::Relaxed);
    if futile != 0 && now() < futile + FUTILE.as_millis() as u64 {
        return result;
    }
    if gpu.is_hopeless() {
        return result; // it is the program's own memory that lacks room
    }
    for (most, part) in STEPS {
        if !crate::errno::preserved(|| make_room(gpu, most.min(gpu.total() / part))) {
            break;
        }
        result = call();
        if result != ERROR_OUT_OF_MEMORY {
            return result;
        }
    }
    gpu.squeezed.futile.store(now(), Ordering::Relaxed);
    result
}

/// Milliseconds, never 0.
fn now() -> u64 {
    Instant::now().since_start().as_millis() as u64 + 1
}

/// Asks for room; whether there is some.
fn make_room(gpu: &Gpu, bytes: u64) -> bool {
    let seen = gpu.squeezed.count.load(Ordering::SeqCst);
    let ask = || {
        let met = client::schedulers_met();
        let speaks = client::speaks(version::PROMISES);
        (speaks && gpu.is_introduced() && client::send(&ClientMessage::Squeeze { slot: gpu.index, bytes }))
            .then_some(met)
    };
    let Some(mut asked) = ask() else { return false };
    let begin = Instant::now();
    while gpu.squeezed.count.load(Ordering::SeqCst) == seen {
        let left = PATIENCE.saturating_sub(begin.elapsed());
        if left.is_zero() || !client::is_connected() {
            return false;
        }
        futex::wait(&gpu.squeezed.count, seen, left.min(Duration::from_millis(100)));
        // Another scheduler has not been asked.
        if asked != client::schedulers_met() {
            let Some(again) = ask() else { return false };
            asked = again;
        }
    }
    let room = gpu.squeezed.bytes.load(Ordering::SeqCst);
    trace!("GPU {}: {room} of {bytes} bytes were made room for in {} µs", gpu.index, begin.elapsed().as_micros());
    room > 0
}
