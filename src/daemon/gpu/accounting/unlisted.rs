//! The memory in use that NVML shows under no process.

use super::Attached;

/// The memory in use that NVML shows under no process, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Unlisted {
    /// Clients' managed memory.
    pub managed: u64,
    /// The rest: memory of the driver and of other programs.
    pub rest: u64,
}

impl Unlisted {
    /// Divides the `bytes` that a sample shows under no process. `before`: the division of the previous
    /// sample. `absent`: the most managed bytes of processes that are not clients now.
    pub fn measured(before: Option<Self>, bytes: u64, clients: &[Attached], absent: u64) -> Self {
        let sum = |of: fn(&Attached) -> u64| clients.iter().map(of).fold(absent, u64::saturating_add);
        let managed = sum(|client| client.managed);
        let Some(before) = before else {
            // In the first sample, memory in use counts as memory of the clients, up to their upper bounds.
            let managed = managed.min(bytes);
            return Self { managed, rest: bytes - managed };
        };
        // Evicted memory stays in use, and memory that arrives comes in addition.
        let most = managed.min(before.managed.saturating_add(sum(|client| client.arrived)));
        let rest = before.rest.clamp(bytes.saturating_sub(most), bytes);
        Self { managed: bytes - rest, rest }
    }
}
