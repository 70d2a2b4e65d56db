//! How two sides that were built at different times agree on what they speak.
//!
//! A client names the oldest and the newest version it speaks; the scheduler takes the newest that both know. A
//! scheduler keeps every version down to [`MIN`], because a library lives on in running programs and in containers
//! long after the host's packages were upgraded. A version's layouts never change once released.

/// The oldest version this build speaks.
pub const MIN: u16 = 1;
/// The newest version this build speaks.
pub const MAX: u16 = 6;
/// The version from which on limits are promises: numbered, acknowledged, and raised or refused when asked for.
pub const LIMITS: u16 = 2;
/// The version from which on programs share memory through the scheduler.
pub const SHARING: u16 = 2;

/// The version from which on a connection outlives the scheduler: a new one that was handed it says
/// [`Resume`](crate::SchedulerMessage::Resume).
pub const RESUMING: u16 = 3;
/// The version from which on a client waits to create a context for as long as it is told to.
pub const CONTEXT_WAIT: u16 = 3;
/// The version from which on a client says how full it keeps a GPU.
pub const UTILIZATION: u16 = 3;
/// The version from which on a scheduler says which GPUs a program is to see.
pub const PLACEMENT: u16 = 3;
/// The version from which on a client says what its own environment allows it.
pub const ENV_LIMITS: u16 = 4;

/// The version from which on a client hears what a rule allows it of a GPU that it does not use yet.
pub const ANNOUNCED_LIMITS: u16 = 4;
/// The version from which on a client says what it has counted.
pub const COUNTERS: u16 = 5;
/// The version from which on a client hears that it cannot have a context, or that its memory cannot be mapped.
pub const DENIALS: u16 = 6;

/// The newest version that a peer speaking `min..=max` and this build have in common.
pub fn negotiate(min: u16, max: u16) -> Option<u16> {
    let version = max.min(MAX);
    (min <= max && version >= min.max(MIN)).then_some(version)
}
