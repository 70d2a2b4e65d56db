//! The driver's confirmation that no work of the program is running. An eviction waits for this
//! confirmation.

use crate::{env::trace::trace, gpu::Gpu, submit::Fence, sys::time::Instant};
use core::time::Duration;

/// The longest wait for the confirmation. All work that passed a hook is done before this wait, so any
/// remaining work was submitted without a hook. After this time the client reports that its eviction is
/// stuck, and the scheduler evicts other clients' memory.
const PATIENCE: Duration = Duration::from_secs(1);

/// The idle check of one GPU whose memory is about to be evicted. The gate is closed, and all work that
/// passed a hook is done. No such work can start until the eviction ends. The end of the eviction
/// resets the check.
#[derive(Debug, Default)]
pub enum IdleCheck {
    #[default]
    NotAsked,
    Asked {
        since: Instant,
        /// `None` while the driver cannot be queried.
        fence: Option<Fence>,
    },
    Idle,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idleness {
    Idle,
    /// Not yet known.
    Pending,
    /// Work that passed no hook is running, or may be running.
    Busy,
}

impl IdleCheck {
    pub fn ask(&mut self, gpu: &'static Gpu) -> Idleness {
        if matches!(self, Self::NotAsked) {
            *self = Self::Asked { since: Instant::now(), fence: None };
        }
        let Self::Asked { since, fence } = self else { return Idleness::Idle };
        if fence.is_none() {
            *fence = gpu.work.fence_of_contexts();
        }
        if fence.as_mut().is_some_and(|fence| gpu.work.is_done(fence)) {
            *self = Self::Idle;
            return Idleness::Idle;
        }
        if since.elapsed() < PATIENCE {
            return Idleness::Pending;
        }
        trace!("GPU {}: keeping memory on the GPU, because the driver does not report its contexts as idle", gpu.index);
        Idleness::Busy
    }
}
