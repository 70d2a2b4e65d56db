//! Asking the scheduler for a higher limit, when an allocation needs one: what was promised to this client for as long as
//! nobody needed it may have gone to others, and comes back, or is refused: within seconds, unless a rule has it wait, and
//! nothing of the GPU lock is waited for.

use crate::{
    client, futex,
    gpu::Gpu,
    memory::{engine::GRANULE, slab},
    sys::{sync::Mutex, time::Instant},
    trace::trace,
};
use core::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::Duration,
};
use nvshare_wire::ClientMessage;

/// How long an answer is waited for. The scheduler gives one within half of that.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between attempts to send to a scheduler that does not read.
const SEND_AGAIN: Duration = Duration::from_millis(2);

/// The answers of one GPU.
#[derive(Debug)]
pub struct Answers {
    /// Counts limits and refusals.
    count: AtomicU32,
    /// The newest refusal: how many bytes, and the count then.
    denied: Mutex<(u64, u32)>,
    /// The scheduler says that it takes as long as it takes.
    awaited: AtomicBool,
}

/// How asking went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// There is more now: try again.
    Raised,
    /// There is no memory for it, on the GPU or in the host.
    Denied,
    /// The limit is not what is in the way, or nobody can raise it.
    Beyond,
}

impl Answers {
    pub const fn new() -> Self {
        Self { count: AtomicU32::new(0), denied: Mutex::new((0, 0)), awaited: AtomicBool::new(false) }
    }

    /// A limit has come, or there is another scheduler to ask, or none.
    pub fn changed(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        futex::wake_all(&self.count);
    }

    pub fn denied(&self, bytes: u64) {
        let mut denied = self.denied.lock();
        *denied = (bytes, self.count.fetch_add(1, Ordering::SeqCst).wrapping_add(1));
        self.awaited.store(false, Ordering::SeqCst);
        drop(denied);
        futex::wake_all(&self.count);
    }

    /// What is asked for comes when others have freed it.
    pub fn awaited(&self) {
        self.awaited.store(true, Ordering::SeqCst);
    }

    /// The refusal that came after the count was `seen`.
    fn denied_since(&self, seen: u32) -> Option<u64> {
        let (bytes, at) = *self.denied.lock();
        (at.wrapping_sub(seen) as i32 > 0).then_some(bytes)
    }
}

/// An allocation of so many bytes did not fit under the limit, which was `limit` then.
pub fn raise(gpu: &Gpu, bytes: u64, limit: u64) -> Outcome {
    let Some(space) = gpu.space() else { return Outcome::Beyond };
    let bytes = if bytes <= slab::LARGEST { GRANULE } else { bytes.checked_next_multiple_of(GRANULE).unwrap_or(bytes) };
    let mut begin = Instant::now();
    let mut asked = false;
    loop {
        let seen = gpu.answers.count.load(Ordering::SeqCst);
        let account = space.lock().account;
        let wanted = (account.demand + account.pinned - account.freeing).saturating_add(bytes);
        if wanted <= account.limit {
            gpu.answers.awaited.store(false, Ordering::SeqCst);
            return if asked || account.limit > limit { Outcome::Raised } else { Outcome::Beyond };
        }
        if wanted > account.most || !client::is_connected() {
            return Outcome::Beyond;
        }
        if gpu.answers.awaited.load(Ordering::SeqCst) {
            begin = Instant::now();
        }
        let left = PATIENCE.saturating_sub(begin.elapsed());
        if left.is_zero() {
            return Outcome::Denied;
        }
        asked = true;
        if client::send(&ClientMessage::Wish { slot: gpu.index, bytes: wanted }) {
            futex::wait(&gpu.answers.count, seen, left);
            if gpu.answers.denied_since(seen).is_some_and(|denied| denied <= wanted) {
                trace!("GPU {}: a limit of {wanted} bytes is refused", gpu.index);
                return Outcome::Denied;
            }
        } else {
            futex::wait(&gpu.answers.count, seen, SEND_AGAIN);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_one_of_what_was_asked_before_it() {
        let answers = Answers::new();
        let seen = answers.count.load(Ordering::SeqCst);
        assert_eq!(answers.denied_since(seen), None);
        answers.changed();
        assert_eq!(answers.denied_since(seen), None);
        answers.denied(7);
        assert_eq!(answers.denied_since(seen), Some(7));
        let seen = answers.count.load(Ordering::SeqCst);
        assert_eq!(answers.denied_since(seen), None);
    }
}
