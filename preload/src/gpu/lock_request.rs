//! Waiting at the gate of a GPU, and requesting its lock.

use super::{Gpu, attached};
use crate::{
    connection,
    gate::{
        closed,
        threads::{self, Waits},
    },
    sys::{
        sync::{Mutex, Rank, waiting_for_client_thread},
        time::Instant,
    },
};
use core::{sync::atomic::Ordering, time::Duration};
use nvshare_wire::ClientMessage;

/// The longest sleep of a waiting thread before it checks again.
const WAIT_TIMEOUT: Duration = Duration::from_millis(500);

impl Gpu {
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
        let _waiting = waiting_for_client_thread();
        self.gate.wait(self.index, threads::mine(), what, reasons, WAIT_TIMEOUT, || {
            if self.gate.is_closed_for(closed::LOCK) {
                self.request();
            }
        });
    }

    /// Whether a thread waits at the gate of this GPU.
    pub fn is_waited_for(&self) -> bool {
        threads::waiting(self.index, None) > 0
    }

    /// Whether a thread with work waits at this gate. Running work may depend on the waiting work.
    pub fn has_work_waiting(&self) -> bool {
        threads::waiting(self.index, Some(Waits::WithWork)) > 0
    }

    /// Requests the lock from the scheduler, unless a request is pending.
    pub fn request(&self) {
        // One request at a time. A request replaces the previous request, so the latest request must include
        // the GPUs of all waiting threads.
        static ONE: Mutex<()> = Mutex::new(Rank::LockRequest, ());
        let _one = ONE.lock();
        if !self.introduced.load(Ordering::SeqCst) || self.requested.swap(true, Ordering::SeqCst) {
            return;
        }
        self.requested_at.store(Instant::now().since_start().as_micros() as u64, Ordering::Relaxed);
        if !connection::send(&ClientMessage::Request { gpus: wanted_with(self) }) {
            self.requested.store(false, Ordering::SeqCst);
        }
    }

    /// Called when a turn is over. `used` says whether work was submitted during the turn.
    pub fn turn_is_over(&self, used: bool) {
        if used {
            self.used_until.store(clock(), Ordering::Relaxed);
        }
    }

    pub fn request_is_over(&self) {
        // With a swap instead of a store, this thread sees every waiting thread that still found
        // the flag set.
        self.requested.swap(false, Ordering::SeqCst);
    }

    /// The time of the last request for the lock, on the monotonic clock.
    pub fn requested_at(&self) -> Duration {
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
fn wanted_with(gpu: &Gpu) -> u64 {
    let wanted = attached().filter(|g| {
        let used_until = g.used_until.load(Ordering::Relaxed);
        g.is_waited_for() || (used_until != 0 && clock().saturating_sub(used_until) < LATELY.as_millis() as u64)
    });
    let together = |gpu: &Gpu| 1 << gpu.index | gpu.work.peers();
    let wanted = wanted.fold(together(gpu), |set, g| set | together(g));
    // The scheduler does not know GPUs that have not been introduced.
    attached().filter(|gpu| !gpu.is_introduced()).fold(wanted, |set, gpu| set & !(1 << gpu.index))
}

/// Returns the monotonic time in milliseconds, never 0.
fn clock() -> u64 {
    Instant::now().since_start().as_millis() as u64 + 1
}
