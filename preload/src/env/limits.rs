//! The limits that the program's environment sets (`NVSHARE_WEIGHT` and others), as messages to the
//! scheduler. The scheduler interprets them. The memory limit ([`Amount`](super::amount::Amount)) also
//! applies without a scheduler.

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
    /// Reads the current environment.
    pub fn read() -> Self {
        let parts = |limit: LimitName| env_limits::parts(limit, environment(limit.variable()).unwrap_or_default());
        Self { messages: LimitName::ALL.into_iter().flat_map(parts).collect() }
    }

    /// Returns the messages, which a scheduler must receive before all other messages.
    pub fn messages(&self) -> &[ClientMessage] {
        &self.messages
    }
}
