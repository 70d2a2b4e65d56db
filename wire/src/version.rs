//! Negotiation of the protocol version.
//!
//! A client names the oldest and the newest version that it speaks; the scheduler takes the newest that both know. A
//! scheduler keeps every version down to [`MIN`], because a library lives on in running programs and in containers
//! long after the host's packages were upgraded. A version's layouts never change once released.

/// The oldest version this build speaks.
pub const MIN: u16 = 1;
/// The newest version this build speaks.
pub const MAX: u16 = 8;
/// From this version on, limits are promises: numbered, acknowledged, and raised or denied on request.
pub const LIMITS: u16 = 2;
/// From this version on, programs share memory through the scheduler.
pub const SHARING: u16 = 2;

/// From this version on, a connection outlives the scheduler: a new scheduler that takes it over sends
/// [`Resume`](crate::SchedulerMessage::Resume).
pub const RESUMING: u16 = 3;
/// From this version on, a client waits with its context until it is answered.
pub const CONTEXT_WAIT: u16 = 3;
/// From this version on, a client reports its utilization of a GPU.
pub const UTILIZATION: u16 = 3;
/// From this version on, the scheduler can choose the GPUs that a program sees.
pub const PLACEMENT: u16 = 3;
/// From this version on, a client sends the limits of its environment.
pub const ENV_LIMITS: u16 = 4;

/// From this version on, a client is sent what a rule allows it on GPUs that it does not use yet.
pub const ANNOUNCED_LIMITS: u16 = 4;
/// From this version on, reports have counters.
pub const COUNTERS: u16 = 5;
/// From this version on, contexts and mappings can be denied.
pub const DENIALS: u16 = 6;
/// From this version on, a client says that work that passed no gate keeps its memory on the GPU.
pub const UNSEEN_WORK: u16 = 6;

/// From this version on, a client can be taken off its GPUs.
pub const SLEEP: u16 = 7;
/// From this version on, a client can be given a file for memory that has left the GPU.
pub const SWAP_FILE: u16 = 8;

/// From this version on, the scheduler bounds how much work a client queues ahead of a GPU.
pub const RUN_AHEAD: u16 = 8;

/// The newest version that a peer speaking `min..=max` and this build have in common.
pub fn negotiate(min: u16, max: u16) -> Option<u16> {
    let version = max.min(MAX);
    (min <= max && version >= min.max(MIN)).then_some(version)
}
