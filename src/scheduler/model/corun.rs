//! Co-running, in mode `auto`: several clients hold the lock of a GPU at the same time. Programs
//! that leave the GPU idle between launches waste up to half of the GPU's time if they take turns.
//! Programs that keep the GPU busy get slower if they run at the same time. A client reports its
//! utilization. The client can measure it only while no client outside its gang holds the lock. The
//! scheduler relies on a report for a limited time. After that, the clients take short turns again,
//! just long enough to measure anew.

use super::Model;
use crate::{api::*, policy::utilization::FULL, queue::Entity};

impl Model<'_> {
    /// Whether an entity may hold the lock beside the current holders.
    pub fn may_join(&self, entity: Entity, id: GpuId) -> bool {
        self.run_together(id, self.gpus.running_on(id).chain(self.queues.wanting(entity, id)))
    }

    /// Whether the holders of a GPU may continue to run together.
    pub fn may_stay(&self, id: GpuId) -> bool {
        let expired = self.believed_until(id).is_some_and(|until| self.now >= until);
        !expired && self.run_together(id, self.gpus.running_on(id))
    }

    /// Whether all holders, including bypassed ones, could continue to run together.
    pub fn may_all_stay(&self, id: GpuId) -> bool {
        self.run_together(id, self.gpus.holders(id))
    }

    /// When the holders of a GPU must take turns again if nothing changes. `None`: there is only
    /// one holder, or the mode is not `auto`.
    pub fn together_until(&self, id: GpuId) -> Option<Time> {
        let several = || self.gpus.running_on(id).nth(1).is_some();
        let takes_turns = self.settings.anti_thrash == AntiThrash::Auto && several();
        if takes_turns { self.believed_until(id) } else { None }
    }

    /// When the scheduler stops relying on the holders' reports.
    pub fn believed_until(&self, id: GpuId) -> Option<Time> {
        let histories = || self.gpus.running_on(id).filter_map(|client| self.gpus.history(client, id));
        let last = self.gpus.running_on(id).filter_map(|client| Some(self.gpus.hold(client, id)?.since)).max()?;
        let believed = histories().map(|history| history.utilization.believed()).min()?;
        Some(last.saturating_add(believed))
    }

    /// Whether the utilization of every holder is known, or cannot be measured in a turn.
    pub fn are_measured(&self, id: GpuId) -> bool {
        self.gpus.running_on(id).filter_map(|c| self.gpus.history(c, id)).all(|history| !history.utilization.is_open())
    }

    /// Whether these clients may run together: they leave the GPU idle at times, and all of their
    /// memory fits.
    pub fn run_together(&self, id: GpuId, clients: impl Iterator<Item = ClientId>) -> bool {
        let Some(gpu) = self.gpus.get(id).filter(|_| self.settings.anti_thrash == AntiThrash::Auto) else {
            return false;
        };
        let (mut full, mut need, mut own_unevictable) = (0u32, 0u64, 0u64);
        let (mut wanted, mut with_memory) = (0u64, 0);
        for client in clients {
            let Some(history) = self.gpus.history(client, id) else { return false };
            if self.shares().runs_alone(client) {
                return false;
            }
            let Some(permille) = history.utilization.permille() else { return false };
            full = full.saturating_add(permille);
            need = need.saturating_add(self.need(client, id));
            let wants = gpu.wanted(self.gpu_context(), client);
            wanted = wanted.saturating_add(wants);
            with_memory += u32::from(wants > 0);
            own_unevictable = own_unevictable.saturating_add(gpu.unevictable_of(client));
        }
        let room = gpu.capacity(self.settings).saturating_sub(gpu.ledger.unevictable().saturating_sub(own_unevictable));
        // A need is at most the capacity. With a capacity of 0, all needs would fit together. But a
        // trial (`gpu::failures`) requires that its client is the only holder. So if several
        // clients want memory, their uncapped wants must fit.
        let bytes = if with_memory > 1 { wanted } else { need };
        full <= FULL && bytes <= room
    }
}
