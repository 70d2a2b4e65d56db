//! Negotiation of the protocol version.
//!
//! A client names the oldest and the newest version that it speaks; the scheduler takes the newest that both know. A
//! scheduler keeps every version down to [`MIN`], because a library lives on in running programs and in containers
//! long after the host's packages were upgraded. A version's layouts never change once released.

/// The oldest version this build speaks.
pub const MIN: u16 = 1;
/// The newest version this build speaks.
pub const MAX: u16 = 1;

/// The newest version that this build shares with a peer that speaks `min..=max`.
pub fn negotiate(min: u16, max: u16) -> Option<u16> {
    let version = max.min(MAX);
    (min <= max && version >= min.max(MIN)).then_some(version)
}
