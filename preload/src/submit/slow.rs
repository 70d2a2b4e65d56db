//! The slow half of a submission ([`fast`](super::fast) is the other): finds the GPU, waits at the gate,
//! requests the lock, and records the stream and the marks.

use super::{
    Lane, captures, closed, epoch, expect_blocking_streams,
    fast::{Thread, this_thread},
    is_active, is_marked_at_once, lanes_in_use,
    target::{self, name_of},
    threads::{self, Waits},
};
use crate::{
    connection,
    driver::types::*,
    sys::{
        errno,
        sync::{Mutex, Rank, await_client_thread},
        thread::stack_pointer,
        time::Instant,
    },
};
use core::{sync::atomic::Ordering, time::Duration};
use nvshare_wire::ClientMessage;

/// The longest sleep of a waiting thread before it checks again.
const WAIT_TIMEOUT: Duration = Duration::from_millis(500);

impl Lane {
    /// Makes a call that cannot take the fast path. If the program has had several contexts,
    /// calls in the legacy stream never take the fast path, because only the driver knows the context of
    /// that stream. `here` is the stack pointer of the calling function.
    pub fn pass(here: usize, stream: CUstream, weight: u32, reasons: u32, call: impl FnOnce() -> CUresult) -> CUresult {
        let known = this_thread().filter(|thread| thread.is_current());
        let enters = |thread: &Thread| name_of(stream).is_some_and(|name| thread.reenter(here, name, reasons));
        if let Some(thread) = known.filter(|thread| enters(thread)) {
            let result = call();
            // SAFETY: the thread has entered the gate in `reenter`.
            return unsafe { thread.leave_again(weight, || stream, result) };
        }
        match Self::enter(stream, here, reasons) {
            Ok(Some((lane, thread))) => lane.leave(thread, weight, stream, call()),
            Ok(None) => call(),
            Err(error) => error,
        }
    }

    /// Waits until the thread may enter the gate. Returns `None` if the call does not concern the gate.
    ///
    /// # Errors
    /// Returns an error if memory that the program has allocated but never used cannot be mapped, or if
    /// contents are lost.
    #[inline(never)]
    fn enter(
        stream: CUstream,
        here: usize,
        reasons: u32,
    ) -> Result<Option<(&'static Self, &'static Thread)>, CUresult> {
        if !is_active() {
            return Ok(None);
        }
        let thread = threads::mine();
        // A nested call submits nothing of its own, and a captured call submits nothing now.
        if !thread.is_outside_for(here) || (captures::any() && captures::is_capturing(stream)) {
            return Ok(None);
        }
        let Some(lane) = target::of_stream(stream) else { return Ok(None) };
        if stream == STREAM_PER_THREAD {
            errno::preserve(expect_blocking_streams);
        }
        lane.work.throttle(stream);
        Ok(lane.wait_at(thread, here, reasons)?.then_some((lane, thread)))
    }

    /// Makes a call inside the gate of this GPU. The call counts as use of the GPU. No mark follows its
    /// work, so the work must be done when the call returns.
    pub fn inside(&self, reasons: u32, call: impl FnOnce() -> CUresult) -> CUresult {
        let (thread, here) = (threads::mine(), stack_pointer());
        if !is_active() || !thread.is_outside_for(here) {
            return call();
        }
        match self.wait_at(thread, here, reasons) {
            Ok(true) => {
                let result = call();
                thread.leave(self.index);
                result
            }
            Ok(false) => call(),
            Err(error) => error,
        }
    }

    /// Waits until this thread is inside the gate of this GPU. Returns `false` if the library has stopped
    /// gating.
    ///
    /// # Errors
    /// Returns an error if memory that the program has allocated but never used cannot be mapped, or if
    /// contents are lost.
    fn wait_at(&self, thread: &Thread, here: usize, reasons: u32) -> Result<bool, CUresult> {
        loop {
            // The work may also access memory of peers.
            let is_inside = self.gate.try_enter(self.index, thread, here, reasons);
            let peer = if is_inside { self.peers().find(|peer| peer.gate.is_closed_for(reasons)) } else { None };
            let closed = match peer {
                Some(peer) => peer,
                None if is_inside => return Ok(true),
                None => self,
            };
            thread.retreat();
            if closed.failure() == ERROR_ECC_UNCORRECTABLE {
                return Err(ERROR_ECC_UNCORRECTABLE);
            }
            closed.wait(reasons);
            if !is_active() {
                return Ok(false);
            }
            if closed.failure() == ERROR_OUT_OF_MEMORY {
                return Err(ERROR_OUT_OF_MEMORY);
            }
        }
    }
}

impl Lane {
    /// Records the stream of a submission. Called inside the gate, after the driver has accepted the call.
    fn note(&'static self, thread: &Thread, stream: CUstream) {
        let epoch = epoch::now();
        self.work.note(stream);
        self.work.renew_marks(thread);
        let name = name_of(stream);
        // Only the thread itself can record points in its per-thread stream. So each submission to
        // that stream takes the slow path, which records a point.
        let may_last = stream != STREAM_PER_THREAD
            && name.is_some()
            && !is_marked_at_once(stream)
            && !captures::any()
            && !self.work.is_full()
            && self.work.peers() == 0
            && is_active();
        thread.record(self, name.unwrap_or_default(), if may_last { epoch } else { epoch::NONE });
    }

    /// Ends a call that submitted `weight` units of work. Leaves the gate and counts the work. Returns
    /// `result`, so that the caller need not save it across this call.
    #[cold]
    #[inline(never)]
    pub(super) fn leave(&'static self, thread: &Thread, weight: u32, stream: CUstream, result: CUresult) -> CUresult {
        if weight > 0 {
            self.note(thread, stream);
        }
        thread.leave(self.index);
        if weight > 0 && thread.is_mark_due(weight) { self.mark(thread, stream, result) } else { result }
    }

    /// Records a mark behind all submissions of this thread since its last mark. Returns `result`.
    #[cold]
    #[inline(never)]
    pub(super) fn mark(&self, thread: &Thread, stream: CUstream, result: CUresult) -> CUresult {
        let between = thread.between_marks.get();
        let unmarked = between.abs_diff(thread.unmarked_left.get());
        // No mark was due before the last submission, so at most `between` submissions preceded it.
        // The weight of the last submission may be larger.
        let commands = unmarked.min(between.unsigned_abs() + 1);
        thread.unmarked_left.set(between);
        self.work.renew_marks(thread);
        errno::preserve(|| self.work.mark(unmarked, commands, stream));
        result
    }
}

impl Lane {
    /// Called by a thread that found the gate closed. Requests the lock and waits for at most
    /// [`WAIT_TIMEOUT`].
    #[cold]
    pub fn wait(&self, reasons: u32) {
        self.wait_for(Waits::WithWork, reasons);
    }

    /// Waits until the thread's new memory is on the GPU.
    #[cold]
    pub fn wait_to_allocate(&self) {
        self.wait_for(Waits::ToAllocate, closed::MEMORY);
    }

    fn wait_for(&self, what: Waits, reasons: u32) {
        let _waiting = await_client_thread();
        self.gate.wait(self.index, threads::mine(), what, reasons, WAIT_TIMEOUT, || {
            if self.gate.is_closed_for(closed::LOCK) {
                self.request();
            }
        });
    }

    /// Whether a thread waits at the gate of this GPU.
    pub fn is_waited_for(&self) -> bool {
        threads::waiters(self.index, None) > 0
    }

    /// Whether a thread waits at the gate of this GPU or of a peer.
    pub fn are_waited_for(&self) -> bool {
        self.is_waited_for() || self.peers().any(Self::is_waited_for)
    }

    /// Whether a thread with work waits at this gate. Running work may depend on the waiting work.
    pub fn has_work_waiting(&self) -> bool {
        threads::waiters(self.index, Some(Waits::WithWork)) > 0
    }

    /// Requests the lock from the scheduler, unless a request is pending.
    pub fn request(&self) {
        // One request at a time. A request replaces the previous request, so the latest request must include
        // the GPUs of all waiting threads.
        static ONE: Mutex<()> = Mutex::new(Rank::LockRequest, ());
        let _one = ONE.lock();
        if !self.is_introduced() || self.requested.swap(true, Ordering::SeqCst) {
            return;
        }
        self.requested_at.store(Instant::now().since_start().as_micros() as u64, Ordering::Relaxed);
        if !connection::send(&ClientMessage::Request { gpus: gpus_to_request(self) }) {
            self.requested.store(false, Ordering::SeqCst);
        }
    }

    /// Called when a turn is over. `used` says whether work was submitted during the turn.
    pub fn turn_is_over(&self, used: bool) {
        if used {
            self.used_until.store(Instant::now().milliseconds(), Ordering::Relaxed);
        }
    }

    pub fn request_is_over(&self) {
        // With a swap instead of a store, this thread sees every waiting thread that still found
        // the flag set.
        self.requested.swap(false, Ordering::SeqCst);
    }

    /// The time of the last request for the lock, on the monotonic clock.
    pub fn request_time(&self) -> Duration {
        Duration::from_micros(self.requested_at.load(Ordering::Relaxed))
    }

    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }
}

/// How long a program counts as using a GPU after its last turn there.
const LATELY: Duration = Duration::from_secs(2);

/// Returns the GPUs whose locks this client needs together: this GPU, all GPUs where threads wait,
/// recently used GPUs, and their peers.
fn gpus_to_request(lane: &Lane) -> u64 {
    let wanted = lanes_in_use().filter(|other| {
        let used_until = other.used_until.load(Ordering::Relaxed);
        other.is_waited_for()
            || (used_until != 0 && Instant::now().milliseconds().saturating_sub(used_until) < LATELY.as_millis() as u64)
    });
    let together = |lane: &Lane| 1 << lane.index | lane.work.peers();
    let wanted = wanted.fold(together(lane), |set, other| set | together(other));
    // The scheduler does not know GPUs that have not been introduced.
    lanes_in_use().filter(|lane| !lane.is_introduced()).fold(wanted, |set, lane| set & !(1 << lane.index))
}
