//! The limits that the program's environment sets (`NVSHARE_WEIGHT` and others), as messages for the scheduler. What they
//! mean is the scheduler's business, except for the memory limit ([`Amount`](super::amount::Amount)), which holds without
//! a scheduler too.

use crate::sys::c::environment;
use alloc::vec::Vec;
use nvshare_wire::{
    ClientMessage,
    env_limits::{self, LimitName},
};

#[derive(Debug)]
pub struct EnvLimits {
    messages: Vec<ClientMessage>,
}

impl EnvLimits {
    /// Reads the environment as it is now.
    pub fn read() -> Self {
        let parts = |limit: LimitName| env_limits::parts(limit, environment(limit.variable()).unwrap_or_default());
        Self { messages: LimitName::ALL.into_iter().flat_map(parts).collect() }
    }

    /// What to tell a scheduler before anything else.
    pub fn messages(&self) -> &[ClientMessage] {
        &self.messages
    }
}
