//! Asking the scheduler for a higher limit, when an allocation needs one: what was promised to this client for as long as
//! nobody needed it may have gone to others, and comes back, or is refused: within seconds, unless a rule has it wait, and
//! nothing of the GPU lock is waited for.

use crate::{
    connection,
    env::trace::trace,
    gpu::Gpu,
    memory::{engine::GRANULE, slab},
    sys::{futex, time::Instant},
};
use core::{sync::atomic::Ordering, time::Duration};
use nvshare_wire::ClientMessage;

/// How long an answer is waited for. The scheduler gives one within half of that.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Between attempts to send to a scheduler that does not read.
const SEND_RETRY: Duration = Duration::from_millis(2);

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

/// An allocation of so many bytes did not fit under the limit, which was `limit` then.
pub fn raise(gpu: &Gpu, bytes: u64, limit: u64) -> Outcome {
    let Some(space) = gpu.space() else { return Outcome::Beyond };
    let bytes = if bytes <= slab::LARGEST { GRANULE } else { bytes.checked_next_multiple_of(GRANULE).unwrap_or(bytes) };
    let mut begin = Instant::now();
    let mut asked = false;
    loop {
        let seen = gpu.limit_answers.count.load(Ordering::SeqCst);
        let account = space.lock().account;
        let wanted = (account.demand + account.pinned - account.freeing).saturating_add(bytes);
        if wanted <= account.limit {
            gpu.limit_answers.awaited.store(false, Ordering::SeqCst);
            return if asked || account.limit > limit { Outcome::Raised } else { Outcome::Beyond };
        }
        if wanted > account.limit_max || !connection::is_connected() {
            return Outcome::Beyond;
        }
        if gpu.limit_answers.awaited.load(Ordering::SeqCst) {
            begin = Instant::now();
        }
        let left = TIMEOUT.saturating_sub(begin.elapsed());
        if left.is_zero() {
            return Outcome::Denied;
        }
        asked = true;
        if connection::send(&ClientMessage::RequestLimit { slot: gpu.index, bytes: wanted }) {
            futex::wait(&gpu.limit_answers.count, seen, left);
            if gpu.limit_answers.denied_since(seen).is_some_and(|denied| denied <= wanted) {
                trace!("GPU {}: a limit of {wanted} bytes is refused", gpu.index);
                return Outcome::Denied;
            }
        } else {
            futex::wait(&gpu.limit_answers.count, seen, SEND_RETRY);
        }
    }
}
