//! Requests for a higher limit when an allocation needs it. The scheduler lends a client's unused
//! bytes to other clients. Within seconds of a request, the scheduler takes these bytes back or
//! refuses the request, unless a rule lets the client wait. The request never waits for the GPU
//! lock. The client's thread stores the answers, and the requesting threads wait for them.

use crate::{
    connection::{self, presence::Patience},
    env::trace::trace,
    gpu::Gpu,
    memory::{engine::GRANULE, slab},
    sys::{futex, sync::await_client_thread},
};
use core::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    time::Duration,
};
use nvshare_wire::ClientMessage;

/// The longest wait for an answer. The scheduler answers within half of this time.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The interval between attempts to send to a scheduler that does not read.
const SEND_RETRY: Duration = Duration::from_millis(2);

/// The scheduler's answers to requests for a higher limit on one GPU.
#[derive(Debug)]
pub struct LimitAnswers {
    /// Counts answers.
    count: AtomicU32,
    /// The size of the refused limit in bytes, if the latest answer is a refusal; otherwise 0.
    denied: AtomicU64,
    /// Whether the scheduler has replied that its answer follows when other clients no longer need
    /// the memory.
    awaited: AtomicBool,
}

impl LimitAnswers {
    pub const fn new() -> Self {
        Self { count: AtomicU32::new(0), denied: AtomicU64::new(0), awaited: AtomicBool::new(false) }
    }

    /// Called when a new limit has arrived, when the scheduler was replaced or its connection was lost, and when
    /// the client begins to run without a scheduler.
    pub fn on_change(&self) {
        self.on_answer(0);
    }

    pub fn on_denial(&self, bytes: u64) {
        self.awaited.store(false, Ordering::SeqCst);
        self.on_answer(bytes);
    }

    fn on_answer(&self, denied: u64) {
        self.denied.store(denied, Ordering::SeqCst);
        self.count.fetch_add(1, Ordering::SeqCst);
        futex::wake_all(&self.count);
    }

    /// Called when the scheduler replies that the memory becomes available after other clients have
    /// freed some.
    pub fn on_deferral(&self) {
        self.awaited.store(true, Ordering::SeqCst);
    }

    /// Returns the size of the refused limit, if the latest answer is a refusal and came after the count was
    /// `seen`. If another answer has followed already, the caller repeats its request.
    fn denial_since(&self, seen: u32) -> Option<u64> {
        let is_new = self.count.load(Ordering::SeqCst) != seen;
        Some(self.denied.load(Ordering::SeqCst)).filter(|bytes| is_new && *bytes != 0)
    }
}

/// The outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The limit has been raised, so the caller should try again.
    Raised,
    /// Neither the GPU nor the host has enough memory.
    Denied,
    /// The allocation failed for another reason, or the limit cannot be raised.
    Beyond,
}

/// Requests a limit that admits `bytes` more, of managed memory or other memory. `limit` is the limit
/// under which the allocation failed.
pub fn raise(gpu: &Gpu, bytes: u64, is_managed: bool, limit: u64) -> Outcome {
    let Some(space) = gpu.space() else { return Outcome::Beyond };
    let bytes = if bytes <= slab::LARGEST { GRANULE } else { bytes.checked_next_multiple_of(GRANULE).unwrap_or(bytes) };
    let _waiting = await_client_thread();
    let mut patience = Patience::new(TIMEOUT);
    let mut asked = false;
    loop {
        let seen = gpu.limit_answers.count.load(Ordering::SeqCst);
        let account = space.lock().account;
        let wanted = (account.demand + account.pinned - account.freeing).saturating_add(bytes);
        if wanted <= account.limit {
            gpu.limit_answers.awaited.store(false, Ordering::SeqCst);
            return if asked || account.limit > limit { Outcome::Raised } else { Outcome::Beyond };
        }
        let is_known = account.limit_is_known(connection::is_connected());
        let most = if is_known { account.limit_max } else { account.at_most(u64::MAX) };
        // To the scheduler, a program is not on a GPU that has refused it.
        if !account.is_grantable(bytes, is_managed, most) || gpu.is_refused() {
            return Outcome::Beyond;
        }
        if gpu.limit_answers.awaited.load(Ordering::SeqCst) {
            patience = Patience::new(TIMEOUT);
        }
        if patience.is_over() {
            return Outcome::Denied;
        }
        asked = true;
        if !is_known {
            patience.wait(&gpu.limit_answers.count, seen);
            continue;
        }
        if gpu.is_introduced() && connection::send(&ClientMessage::RequestLimit { slot: gpu.index, bytes: wanted }) {
            patience.wait(&gpu.limit_answers.count, seen);
            if gpu.limit_answers.denial_since(seen).is_some_and(|denied| denied <= wanted) {
                trace!("GPU {}: the scheduler refused a limit of {wanted} bytes", gpu.index);
                return Outcome::Denied;
            }
        } else {
            patience.wait_at_most(&gpu.limit_answers.count, seen, SEND_RETRY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_answers_only_earlier_requests() {
        let answers = LimitAnswers::new();
        let seen = answers.count.load(Ordering::SeqCst);
        assert_eq!(answers.denial_since(seen), None);
        answers.on_change();
        assert_eq!(answers.denial_since(seen), None);
        answers.on_denial(7);
        assert_eq!(answers.denial_since(seen), Some(7));
        let seen = answers.count.load(Ordering::SeqCst);
        assert_eq!(answers.denial_since(seen), None);
    }
}
