//! The limits that the program's environment sets (`NVSHARE_WEIGHT` and others), as messages to the
//! scheduler. The scheduler interprets them. The memory limit ([`Amount`](super::amount::Amount)) also
//! applies without a scheduler.

use crate::sys::c::environment;
use alloc::vec::Vec;
use nvshare_wire::{
    ClientMessage,
    env_limits::{self, LimitName},
};

/// Reads the limits from the current environment. A scheduler must receive these messages before all
/// other messages.
pub fn read() -> Vec<ClientMessage> {
    let parts = |limit: LimitName| env_limits::parts(limit, environment(limit.variable()).unwrap_or_default());
    LimitName::ALL.into_iter().flat_map(parts).collect()
}
