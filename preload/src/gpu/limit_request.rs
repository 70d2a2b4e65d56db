//! Requests for a higher limit when an allocation needs it. The scheduler lends a client's unused
//! bytes to other clients. Within seconds of a request, the scheduler takes these bytes back or
//! refuses the request, unless a rule lets the client wait. The request never waits for the GPU
//! lock.

use crate::{
    connection,
    env::trace::trace,
    gpu::Gpu,
    memory::{engine::GRANULE, slab},
    sys::{futex, sync::await_client_thread, time::Instant},
};
use core::{sync::atomic::Ordering, time::Duration};
use nvshare_wire::ClientMessage;

/// The longest wait for an answer. The scheduler answers within half of this time.
const TIMEOUT: Duration = Duration::from_secs(10);
/// The interval between attempts to send to a scheduler that does not read.
const SEND_RETRY: Duration = Duration::from_millis(2);

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

/// Requests a limit that admits `bytes` more. `limit` is the limit under which the allocation failed.
pub fn raise(gpu: &Gpu, bytes: u64, limit: u64) -> Outcome {
    let Some(space) = gpu.space() else { return Outcome::Beyond };
    let bytes = if bytes <= slab::LARGEST { GRANULE } else { bytes.checked_next_multiple_of(GRANULE).unwrap_or(bytes) };
    let _waiting = await_client_thread();
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
        let is_known = account.limit_is_known(connection::is_connected());
        let most = if is_known { account.limit_max } else { account.at_most(u64::MAX) };
        if wanted > most {
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
        if !is_known {
            futex::wait(&gpu.limit_answers.count, seen, left);
            continue;
        }
        if connection::send(&ClientMessage::RequestLimit { slot: gpu.index, bytes: wanted }) {
            futex::wait(&gpu.limit_answers.count, seen, left);
            if gpu.limit_answers.denial_since(seen).is_some_and(|denied| denied <= wanted) {
                trace!("GPU {}: the scheduler refused a limit of {wanted} bytes", gpu.index);
                return Outcome::Denied;
            }
        } else {
            futex::wait(&gpu.limit_answers.count, seen, SEND_RETRY);
        }
    }
}
