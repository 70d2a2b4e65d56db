//! Calls in which the driver allocates GPU memory for itself. Memory may be short because other clients
//! use it or because this program's own demand has filled the GPU. The library then requests room from
//! the scheduler and repeats the call, a few times.

use crate::{
    connection::{self, presence::Patience},
    driver::types::{CUresult, ERROR_OUT_OF_MEMORY},
    env::trace::trace,
    gpu::{self, Gpu},
    submit,
    sys::{futex, sync::await_client_thread, time::Instant},
};
use core::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};
use nvshare_wire::ClientMessage;

/// The room that each attempt requests: at most this many bytes, and at most the GPU's memory divided
/// by the second number.
const STEPS: [(u64, u64); 3] = [(64 << 20, 16), (512 << 20, 8), (4 << 30, 4)];
/// The longest wait for an answer. The scheduler answers within 2 s.
const TIMEOUT: Duration = Duration::from_secs(3);

/// After a call has failed although room was made, no room is requested for this time. Requests
/// would evict other clients' memory in vain.
const FUTILE: Duration = Duration::from_secs(10);

/// The scheduler's answers to requests for memory for the driver itself.
#[derive(Debug)]
pub struct ReservationAnswers {
    count: AtomicU32,
    /// Bytes that the scheduler has made available.
    bytes: AtomicU64,
    /// The time at which a call last failed although room was made, in milliseconds; 0 if never.
    futile: AtomicU64,
}

impl ReservationAnswers {
    pub const fn new() -> Self {
        Self { count: AtomicU32::new(0), bytes: AtomicU64::new(0), futile: AtomicU64::new(0) }
    }

    /// Forgets failures that concerned another GPU.
    pub fn forget(&self) {
        self.futile.store(0, Ordering::Relaxed);
    }

    pub fn room(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::SeqCst);
        self.count.fetch_add(1, Ordering::SeqCst);
        futex::wake_all(&self.count);
    }
}

/// Makes a call, and repeats the call if it ran out of memory and room was made.
#[inline]
pub fn retry(call: impl Fn() -> CUresult) -> CUresult {
    retry_on(gpu::current, call)
}

/// Like [`retry`], for a call that concerns this GPU.
#[inline]
pub fn retry_on(gpu: impl FnOnce() -> Option<&'static Gpu>, call: impl Fn() -> CUresult) -> CUresult {
    let result = call();
    if result == ERROR_OUT_OF_MEMORY { repeat(result, gpu, call) } else { result }
}

/// Repeats a call that has run out of memory, if room can be made.
#[cold]
pub fn repeat(
    mut result: CUresult,
    gpu: impl FnOnce() -> Option<&'static Gpu>,
    call: impl Fn() -> CUresult,
) -> CUresult {
    let Some(gpu) = submit::is_active().then(gpu).flatten() else { return result };
    // Release unused memory of pools before other clients' memory is evicted.
    if crate::sys::errno::preserve(|| gpu.release_pools()) > 0 {
        result = call();
        if result != ERROR_OUT_OF_MEMORY {
            return result;
        }
    }
    let futile = gpu.reservation_answers.futile.load(Ordering::Relaxed);
    if futile != 0 && Instant::now().milliseconds() < futile + FUTILE.as_millis() as u64 {
        return result;
    }
    if gpu.is_mapping_denied() {
        return result; // the program's own memory lacks room
    }
    for (most, part) in STEPS {
        if !crate::sys::errno::preserve(|| request_room(gpu, most.min(gpu.total() / part))) {
            break;
        }
        result = call();
        if result != ERROR_OUT_OF_MEMORY {
            return result;
        }
    }
    gpu.reservation_answers.futile.store(Instant::now().milliseconds(), Ordering::Relaxed);
    result
}

/// Requests room for `bytes` bytes. Returns whether any room was made.
fn request_room(gpu: &Gpu, bytes: u64) -> bool {
    let _waiting = await_client_thread();
    let seen = gpu.reservation_answers.count.load(Ordering::SeqCst);
    let ask = || {
        let met = connection::generation();
        (gpu.is_introduced() && connection::send(&ClientMessage::Reserve { slot: gpu.index, bytes })).then_some(met)
    };
    let Some(mut asked) = ask() else { return false };
    let mut patience = Patience::new(TIMEOUT);
    while gpu.reservation_answers.count.load(Ordering::SeqCst) == seen {
        if patience.is_over() || !connection::is_connected() {
            return false;
        }
        patience.wait_at_most(&gpu.reservation_answers.count, seen, Duration::from_millis(100));
        // A new scheduler does not know the request.
        if asked != connection::generation() {
            let Some(again) = ask() else { return false };
            asked = again;
        }
    }
    let room = gpu.reservation_answers.bytes.load(Ordering::SeqCst);
    trace!("GPU {}: reserved {room} of {bytes} bytes in {} µs", gpu.index, patience.duration().as_micros());
    room > 0
}
