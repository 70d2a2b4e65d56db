//! Holding the lock together, in mode `auto`. Programs that leave the GPU idle between launches lose half of it by taking turns;
//! programs that keep it busy lose some of it by running at once. A client reports its utilization, which it can measure only while
//! it is the only holder. A report is believed for a while; then the clients take short turns again, long enough to measure anew.

use crate::{
    api::*,
    lock::Entity,
    machine::{Attachment, Machine},
};
use std::time::Duration;

/// Of a GPU, in thousandths, what clients that run together may fill: one of them may fill it, beside others that hardly do.
const FULL: u32 = 1100;
/// What a client that says nothing is taken to fill.
const UNKNOWN: u32 = 1000;
/// How long clients run together before they are asked again: the first time, twice as long after each time that they said
/// the same, and at most.
const TOGETHER: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(80));
/// What is said differs by no more, in thousandths, if it is the same.
const SAME: u32 = 150;
/// A turn that is long enough for a client to say how full it keeps the GPU.
pub(crate) const MEASURED: Duration = Duration::from_millis(150);

/// How full a client keeps a GPU, in thousandths.
#[derive(Debug, Clone, Copy, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Utilization {
    said: Option<u32>,
    /// What it had said before, and for how long that was believed.
    before: Option<(u32, Duration)>,
    /// It was alone, and waited for, for long enough, and said nothing.
    silent: bool,
    /// It had no more work before it could say anything.
    brief: bool,
}

impl Utilization {
    pub fn permille(self) -> Option<u32> {
        self.said.or(self.silent.then_some(UNKNOWN))
    }

    /// Whether it wants nobody beside it, and not for what it does there: it is no program whose work can be told.
    pub fn is_for_itself(self) -> bool {
        self.said.is_some_and(|said| said > FULL)
    }

    /// How long it is believed.
    fn believed(self) -> Duration {
        let same = self.before.filter(|(before, _)| self.permille().is_some_and(|said| said.abs_diff(*before) <= SAME));
        same.map_or(TOGETHER.0, |(_, believed)| (believed * 2).min(TOGETHER.1))
    }

    /// What was said is believed no longer.
    fn forget(&mut self) {
        let before = self.said.map(|said| (said, self.believed())).or(self.before);
        *self = Self { before, ..Self::default() };
    }

    /// Whether a turn that is long enough would tell.
    pub fn is_open(self) -> bool {
        self.permille().is_none() && !self.brief
    }

    /// A turn ended, after somebody had waited so long for it. `idle`: because it had no more work.
    pub fn turn_ended(&mut self, waited: Duration, idle: bool) {
        self.silent |= waited >= MEASURED;
        self.brief = idle;
    }
}

impl Machine {
    /// It says how full it keeps that GPU; or, by more than there is, that it wants it alone.
    pub(crate) fn utilization(&mut self, client: ClientId, id: GpuId, permille: u32) {
        let alone = self.lock.holders(id).count() == 1 && self.lock.hold(client, id).is_some();
        let measured = |_: &&mut Attachment| permille > FULL || alone;
        let Some(attachment) = self.attachment_mut(client, id).filter(measured) else { return };
        attachment.utilization =
            Utilization { said: Some(permille), before: attachment.utilization.before, ..Utilization::default() };
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
        let attachments = || self.lock.running_on(id).filter_map(|client| self.attachment(client, id));
        let last = self.lock.running_on(id).filter_map(|client| Some(self.lock.hold(client, id)?.since)).max()?;
        let believed = attachments().map(|attachment| attachment.utilization.believed()).min()?;
        Some(last.saturating_add(believed))
    }

    /// What holders said before they ran together is no longer believed.
    pub(crate) fn forget_utilization(&mut self, id: GpuId) {
        for client in self.lock.running_on(id).collect::<Vec<_>>() {
            if let Some(attachment) = self.attachment_mut(client, id) {
                attachment.utilization.forget();
            }
        }
    }

    /// Whether it is known how full those keep a GPU who have it now.
    pub(crate) fn are_measured(&self, id: GpuId) -> bool {
        self.lock
            .running_on(id)
            .filter_map(|c| self.attachment(c, id))
            .all(|attachment| !attachment.utilization.is_open())
    }

    /// Whether these, together, leave the GPU idle at times, and all of their bytes fit.
    pub(crate) fn run_together(&self, id: GpuId, clients: impl Iterator<Item = ClientId>) -> bool {
        let Some(gpu) = self.gpus.get(&id).filter(|_| self.settings.anti_thrash == AntiThrash::Auto) else {
            return false;
        };
        if gpu.thrash.keeps_apart(self.now) {
            return false;
        }
        let (mut full, mut need, mut own) = (0u32, 0u64, 0u64);
        for client in clients {
            let Some(attachment) = self.attachment(client, id) else { return false };
            if self.shares().runs_alone(client) {
                return false;
            }
            let Some(permille) = attachment.utilization.permille() else { return false };
            full = full.saturating_add(permille);
            need = need.saturating_add(self.need(client, id));
            own = own.saturating_add(gpu.ledger.unevictable_of(client));
        }
        let room = gpu.capacity(&self.settings).saturating_sub(gpu.ledger.unevictable().saturating_sub(own));
        full <= FULL && need <= room
    }
}
