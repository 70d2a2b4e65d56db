//! Negotiation of the protocol version.
//!
//! A client sends the oldest and the newest version that it supports. The scheduler chooses the
//! newest version that both support. A scheduler supports every version down to [`MIN`], because an
//! old library may stay loaded in programs and containers long after the host's packages were
//! upgraded. A version's layouts never change after its release.

/// The oldest version that this build supports.
pub const MIN: u16 = 1;
/// The newest version that this build supports.
pub const MAX: u16 = 1;

/// The newest version that this build shares with a peer that supports `min..=max`.
pub fn negotiate(min: u16, max: u16) -> Option<u16> {
    let version = max.min(MAX);
    (min <= max && version >= min.max(MIN)).then_some(version)
}
