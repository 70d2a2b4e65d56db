//! Holding the lock together, in mode `auto`. Programs that leave the GPU idle between launches lose half of it by taking turns;
//! programs that keep it busy lose some of it by running at once. A client reports its utilization, which it can measure only while
//! it is the only holder. A report is believed for a while; then the clients take short turns again, long enough to measure anew.

use crate::{api::*, lock::Entity, machine::Machine, policy::utilization::FULL};

impl Machine {
    /// It says how full it keeps that GPU; or, by more than there is, that it wants it alone.
    pub(crate) fn utilization(&mut self, client: ClientId, id: GpuId, permille: u32) {
        let alone = self.lock.holders(id).count() == 1 && self.lock.hold(client, id).is_some();
        let is_measured = permille > FULL || alone;
        let Some(history) = self.histories.of_mut(client, id).filter(|_| is_measured) else { return };
        history.utilization.reported(permille);
        self.touch(id);
    }

    /// Whether that unit may hold the lock beside those who do.
    pub(crate) fn may_join(&self, entity: Entity, id: GpuId) -> bool {
        self.run_together(id, self.lock.running_on(id).chain(self.lock.members(entity, id)))
    }

    /// Whether the holders of a GPU may go on together.
    pub(crate) fn may_stay(&self, id: GpuId) -> bool {
        let expired = self.believed_until(id).is_some_and(|until| self.now >= until);
        !expired && self.run_together(id, self.lock.running_on(id))
    }

    /// Whether all holders of a GPU could be counted as such, those included that are not now.
    pub(crate) fn may_all_stay(&self, id: GpuId) -> bool {
        self.run_together(id, self.lock.holders(id))
    }

    /// When they will have to take turns again, if nothing else happens.
    pub(crate) fn together_until(&self, id: GpuId) -> Option<Time> {
        let several = self.lock.running_on(id).count() > 1;
        self.believed_until(id).filter(|_| several && self.settings.anti_thrash == AntiThrash::Auto)
    }

    /// Until when what the holders said is believed.
    fn believed_until(&self, id: GpuId) -> Option<Time> {
        let histories = || self.lock.running_on(id).filter_map(|client| self.histories.of(client, id));
        let last = self.lock.running_on(id).filter_map(|client| Some(self.lock.hold(client, id)?.since)).max()?;
        let believed = histories().map(|history| history.utilization.believed()).min()?;
        Some(last.saturating_add(believed))
    }

    /// What holders said before they ran together is no longer believed.
    pub(crate) fn forget_utilization(&mut self, id: GpuId) {
        for client in self.lock.running_on(id).collect::<Vec<_>>() {
            if let Some(history) = self.histories.of_mut(client, id) {
                history.utilization.forget();
            }
        }
    }

    /// Whether it is known how full those keep a GPU who have it now.
    pub(crate) fn are_measured(&self, id: GpuId) -> bool {
        self.lock.running_on(id).filter_map(|c| self.histories.of(c, id)).all(|history| !history.utilization.is_open())
    }

    /// Whether these, together, leave the GPU idle at times, and all of their bytes fit.
    pub(crate) fn run_together(&self, id: GpuId, clients: impl Iterator<Item = ClientId>) -> bool {
        let Some(gpu) = self.memory.get(&id).filter(|_| self.settings.anti_thrash == AntiThrash::Auto) else {
            return false;
        };
        if self.keeps_apart(id) {
            return false;
        }
        let (mut full, mut need, mut own) = (0u32, 0u64, 0u64);
        for client in clients {
            let Some(history) = self.histories.of(client, id) else { return false };
            if self.shares().runs_alone(client) {
                return false;
            }
            let Some(permille) = history.utilization.permille() else { return false };
            full = full.saturating_add(permille);
            need = need.saturating_add(self.need(client, id));
            own = own.saturating_add(gpu.ledger.unevictable_of(client));
        }
        let room = gpu.capacity(&self.settings).saturating_sub(gpu.ledger.unevictable().saturating_sub(own));
        full <= FULL && need <= room
    }
}
