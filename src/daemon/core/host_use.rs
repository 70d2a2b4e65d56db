//! The use of host memory: how much memory programs may keep there, and allocate there in advance.

use tracing::debug;

use super::model::Model;
use crate::daemon::gpu::host_memory::{HostAhead, HostMemory, HostUse, MemInfo};
use crate::scheduler::{Event, Time};
use crate::sys::clock;

/// The newest figures of host memory.
#[derive(Debug, Default)]
pub struct HostFigures {
    pub memory: HostMemory,
    pub ahead: HostAhead,
    pub sampled: Time,
}

impl HostFigures {
    /// Measures host memory. Returns the event for the scheduler if the memory that clients may allocate in
    /// advance has changed.
    pub fn sample(&mut self, model: &Model) -> Option<Event> {
        let now = clock::now();
        self.sampled = now;
        let info = MemInfo::read()?;
        let held = model.clients.values().flat_map(|c| c.gpus.values()).fold(0u64, |sum, u| sum.saturating_add(u.host));
        if let Some(bytes) = self.memory.sample(now, info, held, model.config.swap_max) {
            debug!(bytes, held, "measured the host memory that may hold swapped memory");
        }
        let host = HostUse { info, held, swapped: model.machine.swapped() };
        let bytes = self.ahead.sample(now, host, model.config.swap_ahead)?;
        match bytes {
            Some(bytes) => debug!(bytes, "measured the host memory that may be allocated in advance"),
            None => debug!("the host is short of memory"),
        }
        Some(Event::HostAhead { bytes })
    }
}
