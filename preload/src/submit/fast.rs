//! Everything that a launch through an open gate executes, except the thread-local word
//! ([`crate::sys::thread`]) and the entry into the driver ([`crate::driver::Function`]).
//!
//! A thread marks itself as *inside* before it checks whether the gate is open, and leaves after the
//! driver has accepted its call. So when [`Gate::close`] has returned and no thread is inside, no
//! submission is in progress. One fence separates the mark from the check. Another separates closing
//! the gate from looking for threads inside ([`barrier`](super::barrier)).
//!
//! A thread skips all other checks of a launch if the facts about its last launch are still true
//! ([`epoch`]). All slower paths are methods of [`Lane`].
//!
//! `tests/gate-model` compiles this file with modelled atomics, fences and sleeping. It explores all
//! interleavings and so verifies the claims in these comments.

use super::{
    GPUS, Lane,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, compiler_fence, fence},
};
use crate::{
    driver::types::{CUresult, CUstream, ERROR_OUT_OF_MEMORY},
    sys::thread::{self, stack_pointer},
};
use core::{cell::Cell, ptr};

/// The reasons for which a gate is closed, as bits of its state. The gate is open if no reason is set.
pub mod closed {
    /// The client does not have the GPU lock.
    pub const LOCK: u32 = 1;
    /// Part of the client's memory is not on the GPU.
    pub const MEMORY: u32 = 2;
    /// The GPU lock is being revoked. Kernels and graphs wait. Copies and flag writes still pass, because
    /// running work may need them in order to end.
    pub const KERNELS: u32 = 4;
    /// The reasons that stop copies, memsets and flag writes.
    pub const FOR_COPIES: u32 = LOCK | MEMORY;
    /// The reasons that stop any work.
    pub const FOR_ALL: u32 = LOCK | MEMORY | KERNELS;
}

/// The weight of a kernel, a memset or a small copy.
pub const ONE: u32 = 1;
/// The weight of a graph, which contains many kernels.
pub const GRAPH: u32 = 4;

/// Not a reason. This bit tells entering threads to execute a fence themselves, because
/// `membarrier(2)` has failed in the closing thread. Entering threads read the state anyway. The
/// bit is never cleared.
pub(super) const FENCED: u32 = 1 << 30;

/// The gate of one GPU. A thread passes an open gate with one load. At a closed gate, the thread waits
/// for the GPU lock and the memory.
#[derive(Debug)]
pub struct Gate {
    pub(super) state: AtomicU32,
}

impl Gate {
    /// Whether the gate lets in a thread that has called [`Thread::approach`].
    #[inline(always)]
    pub fn lets_in(&self, reasons: u32) -> bool {
        if self.state.load(Ordering::Acquire) & (reasons | FENCED) == 0 {
            return true;
        }
        // This fence is needed only if the gate is `FENCED`. If the gate is closed, the cost does not matter.
        fence(Ordering::SeqCst);
        self.state.load(Ordering::Acquire) & reasons == 0
    }
}

/// Epochs: periods in which the facts about a thread's last launch stay true. For example, its stream
/// is recorded, no capture is active, and the queue is not full. Any change of such a fact ends the
/// epoch. So a thread passes an open gate with one comparison instead of one per fact.
pub mod epoch {
    use super::super::atomic::{AtomicU64, Ordering};

    static EPOCH: AtomicU64 = AtomicU64::new(1);

    /// No epoch has this number.
    pub const NONE: u64 = 0;

    #[inline(always)]
    pub fn now() -> u64 {
        EPOCH.load(Ordering::Acquire)
    }

    /// Ends the epoch. Called after a fact about launches has changed. A thread that reads the
    /// old epoch may miss the change, but checks all facts again in the next epoch.
    pub fn end() {
        EPOCH.fetch_add(1, Ordering::AcqRel);
    }
}

/// [`Thread::inside`] of a thread that is inside no gate.
pub const OUTSIDE: usize = 0;

/// [`Thread::waits_at`] of a thread that waits at no gate.
pub(super) const NOWHERE: u32 = u32::MAX;

/// The minimum stack use of a driver call below the frame of its caller, in bytes.
const CALL_STACK: usize = 4096;

/// A thread of the program: the gate that it is inside, and its submissions. Only the thread itself
/// writes the value. Values are never freed, only reused by other threads ([`threads`](super::threads)).
#[derive(Debug)]
pub struct Thread {
    /// If this thread is inside the gate of GPU `at`, the stack pointer of the function that calls the
    /// driver. A later call uses it to detect that this call was left by a `longjmp`.
    pub inside: AtomicUsize,
    /// The GPU at whose closed gate this thread waits, and the latest end of the wait in microseconds on
    /// the monotonic clock.
    pub(super) waits_at: AtomicU32,
    pub(super) waits_until: AtomicU64,
    /// The index of the GPU whose gate this thread is inside or was inside last. Changes only while the
    /// thread counts as inside.
    pub at: AtomicU32,
    /// The number of submissions of this thread to each GPU.
    pub submitted: [AtomicU64; GPUS],
    /// The epoch, the stream's [name](super::target::name_of) and the lane of this thread's last
    /// launch. If a launch uses the same stream in the same epoch, the stream is already recorded,
    /// and `at` is still the GPU of the last launch.
    ///
    /// Only the thread itself uses these three fields and the next two. The thread changes these
    /// three fields only while it counts as inside. So a signal handler that launches work during a
    /// change finds the thread inside, and leaves the fields alone.
    pub(super) epoch: Cell<u64>,
    pub(super) stream: Cell<usize>,
    pub(super) lane: Cell<*const Lane>,
    /// The number of submissions of this thread between two marks, and how many are left until the next
    /// mark.
    pub(super) between_marks: Cell<i32>,
    pub(super) unmarked_left: Cell<i32>,
    /// Identifies the thread among all threads that have ever had a value.
    pub(super) number: AtomicU64,
    pub(super) taken: AtomicBool,
    pub(super) next: *const Self,
}

// SAFETY: `next` is written once, before the value is published, and points to a value that is never
// freed. Only the owning thread uses the cells. `taken` orders the accesses of successive owners.
unsafe impl Sync for Thread {}

/// Returns the calling thread's value, if it has one.
#[inline(always)]
pub fn this_thread() -> Option<&'static Thread> {
    // SAFETY: values are never freed, and a thread's word is NULL or points to a value.
    unsafe { thread::mine().cast::<Thread>().as_ref() }
}

impl Thread {
    pub(super) const fn new() -> Self {
        Self {
            inside: AtomicUsize::new(OUTSIDE),
            waits_at: AtomicU32::new(NOWHERE),
            waits_until: AtomicU64::new(0),
            at: AtomicU32::new(u32::MAX),
            submitted: [const { AtomicU64::new(0) }; GPUS],
            epoch: Cell::new(epoch::NONE),
            stream: Cell::new(0),
            lane: Cell::new(ptr::null()),
            between_marks: Cell::new(0),
            unmarked_left: Cell::new(0),
            number: AtomicU64::new(0),
            taken: AtomicBool::new(true),
            next: ptr::null(),
        }
    }

    /// Whether the calling thread, which owns this value, is inside no gate.
    #[inline(always)]
    pub fn is_outside(&self) -> bool {
        // SAFETY: only this thread writes `inside`, so a plain read does not race. Unlike an atomic load, it
        // compiles to a comparison in memory.
        unsafe { self.inside.as_ptr().read() == OUTSIDE }
    }

    /// Whether the calling thread is inside no gate, for a call made by a function with the stack
    /// pointer `here`. Also detects that the call marked as inside was left by a `longjmp`, for example
    /// out of a signal handler, and then ends that call.
    ///
    /// The frame of a call in progress is at `inside` and above. If `inside` is at `here` or
    /// directly below, the earlier call has ended, because the new call uses that part of the
    /// stack. Anywhere else, the earlier call may still be in progress. Its frame is above `here`
    /// if the new call is nested in the earlier call. Its frame is on another stack if the new call
    /// is made by a coroutine, or by a signal handler with its own stack.
    pub fn is_outside_for(&self, here: usize) -> bool {
        let inside = self.inside.load(Ordering::Relaxed);
        let was_left = inside <= here && here - inside < CALL_STACK;
        if inside != OUTSIDE && was_left {
            // The abandoned call may have submitted work.
            self.leave(self.at.load(Ordering::Relaxed));
        }
        inside == OUTSIDE || was_left
    }

    /// The first half of entering the gate of the GPU `at`. From now on, the thread counts as inside.
    /// `here` is the stack pointer of the function that calls the driver, or of one of its callers. The
    /// second half is [`Gate::lets_in`]. If that returns `false`, the thread must
    /// [retreat](Self::retreat).
    #[inline(always)]
    pub fn approach(&self, here: usize) {
        // Release order suffices: a thread that sees this mark need not see that the marked thread
        // has left its previous gate.
        self.inside.store(here, Ordering::Release);
        // The fence of the passing side, between the store of "I am inside" and the load of "is the gate
        // open?". `barrier::heavy` is the other side.
        compiler_fence(Ordering::SeqCst);
    }

    /// Undoes [`approach`](Self::approach). The thread has submitted nothing.
    #[inline(always)]
    pub fn retreat(&self) {
        self.inside.store(OUTSIDE, Ordering::Release);
    }

    /// Leaves the gate of this GPU. The calling thread is inside and has submitted work.
    #[inline(always)]
    pub fn leave(&self, gpu: u32) {
        if let Some(count) = self.submitted.get(gpu as usize) {
            // Only this thread writes the counter.
            count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        }
        self.inside.store(OUTSIDE, Ordering::Release);
    }

    /// Whether the current epoch is the epoch of this thread's last launch.
    #[inline(always)]
    pub(super) fn is_current(&self) -> bool {
        self.epoch.get() == epoch::now()
    }

    /// Returns the lane of this thread's last launch.
    ///
    /// # Safety
    /// The thread has launched before.
    #[inline(always)]
    unsafe fn last_lane(&self) -> &'static Lane {
        // SAFETY: the last launch has set the pointer to a static lane, in `record`.
        unsafe { &*self.lane.get() }
    }

    /// Records a launch, which is valid for later launches in this epoch. The thread is inside the
    /// lane's gate.
    pub(super) fn record(&self, lane: &'static Lane, stream: usize, epoch: u64) {
        self.stream.set(stream);
        self.lane.set(lane);
        self.epoch.set(epoch);
    }

    /// Enters the gate of this thread's last launch if three conditions hold: that launch used the stream
    /// with this name, nothing has changed since, and the gate is open.
    #[inline(always)]
    pub(super) fn reenter(&self, here: usize, stream: usize, reasons: u32) -> bool {
        if !self.is_outside() {
            return false;
        }
        // Marks the thread as inside before it reads the last launch. A signal handler may launch at any time,
        // but it does not change the last launch of a thread that is inside.
        self.approach(here);
        let is_as_before = self.is_current() && self.stream.get() == stream;
        // SAFETY: the thread has launched before: no epoch is `NONE`.
        let entered = is_as_before && unsafe { self.last_lane() }.gate.lets_in(reasons);
        if !entered {
            self.retreat();
        }
        entered
    }

    /// Ends a call that has entered the gate by [`reenter`](Self::reenter) and submitted `weight` units of
    /// work to `stream`. Returns `result`, so that the caller need not save it across this call.
    ///
    /// # Safety
    /// `reenter` returned `true` for the call.
    #[inline(always)]
    pub(super) unsafe fn leave_again(&self, weight: u32, stream: impl Fn() -> CUstream, result: CUresult) -> CUresult {
        // SAFETY: the thread has launched before: the caller's contract. A nested call does not change the
        // pointer.
        let lane = || unsafe { self.last_lane() };
        if weight > 0 && !self.is_current() {
            return lane().leave(self, weight, stream(), result);
        }
        let gpu = self.at.load(Ordering::Relaxed);
        // SAFETY: `at` is the index of a lane in the table, because the thread has entered that lane's gate.
        // The assertion saves a bounds check.
        unsafe { core::hint::assert_unchecked((gpu as usize) < GPUS) };
        self.leave(gpu);
        if weight > 0 && self.is_mark_due(weight) { lane().mark(self, stream(), result) } else { result }
    }

    /// Counts a submission, and returns whether the thread must [record a mark](Lane::mark).
    #[inline(always)]
    pub(super) fn is_mark_due(&self, weight: u32) -> bool {
        let left = self.unmarked_left.get().wrapping_sub_unsigned(weight);
        self.unmarked_left.set(left);
        left < 0
    }
}

/// Makes a call that submits a copy, a memset or a flag write. The call is made inside the gate, and
/// counted.
#[inline(always)]
pub fn enqueue(stream: CUstream, weight: u32, call: impl Fn() -> CUresult + Copy) -> CUresult {
    pass::<false>(stream, weight, closed::FOR_COPIES, call, |result| result)
}

/// Makes a call that submits a kernel or a graph. If the call runs out of memory, `retry` makes room and
/// repeats it outside the gate: at the first launch the driver may load code or enlarge the stack.
#[inline(always)]
pub fn launch(
    stream: CUstream,
    weight: u32,
    call: impl Fn() -> CUresult + Copy,
    retry: impl FnOnce(CUresult) -> CUresult,
) -> CUresult {
    pass::<true>(stream, weight, closed::FOR_ALL, call, retry)
}

/// Makes a call inside the gate. A `RETRIED` call that runs out of memory ends with `retry`.
///
/// Nearly every launch uses the stream of the thread's previous launch and takes this path, so
/// every instruction counts. The function is therefore inlined into each hook, so the hook's
/// arguments stay in their registers and stack slots. The function calls only the driver. After
/// that call it needs only the thread's value, which contains the lane and the stream. All slower
/// paths are closures, which are stored to memory only when needed. If the driver's call itself were
/// in such a closure, the closure would be stored before each launch.
#[inline(always)]
fn pass<const RETRIED: bool>(
    stream: CUstream,
    weight: u32,
    reasons: u32,
    call: impl Fn() -> CUresult + Copy,
    retry: impl FnOnce(CUresult) -> CUresult,
) -> CUresult {
    let here = stack_pointer();
    let Some(thread) = this_thread().filter(|thread| thread.reenter(here, stream as usize, reasons)) else {
        return out_of_line(move || match Lane::pass(here, stream, weight, reasons, call) {
            ERROR_OUT_OF_MEMORY if RETRIED => retry(ERROR_OUT_OF_MEMORY),
            result => result,
        });
    };
    let result = call();
    // Checked before the thread leaves the gate, because `result` is available here.
    if RETRIED && result == ERROR_OUT_OF_MEMORY {
        return out_of_line(move || {
            // SAFETY: the thread has entered the gate in `reenter`.
            let lane = unsafe { thread.last_lane() };
            retry(lane.leave(thread, weight, stream, ERROR_OUT_OF_MEMORY))
        });
    }
    // SAFETY: the thread has entered the gate in `reenter`.
    unsafe { thread.leave_again(weight, || thread.stream.get() as CUstream, result) }
}

#[inline(never)]
fn out_of_line(call: impl FnOnce() -> CUresult) -> CUresult {
    call()
}
