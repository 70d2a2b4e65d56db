//! Backfilling: while the first request of a GPU waits for other GPUs, requests for this GPU alone that stand behind it and
//! whose memory is there are granted until the holders of those GPUs let the first one in.
//!
//! Each GPU has a time at which its holders let the first request in, from their turns alone. What is granted by backfilling
//! ends at the latest of these times, and so never moves it: the first request waits no longer than for the turns that it would
//! wait for anyway, a drain, and, where the other GPUs have no such time, [`SLOT`].

use super::Model;
use crate::{
    api::*,
    gpu::{Access, Account, Hold},
    queue::Entity,
};
use std::time::Duration;

/// The least time for which a request is granted, and the time granted if the wait of the first one is unknown.
pub(crate) const SLOT: Duration = Duration::from_millis(150);
/// No more requests than this are looked at behind the first one.
pub(crate) const LOOKS: usize = 16;

impl Model<'_> {
    /// When a GPU lets its first request in, according to the turns of its holders; 0: it would be granted this GPU
    /// now. `None`: unknown.
    pub fn opens_at(&self, id: GpuId, first: Entity) -> Option<Time> {
        if self.access(id) == Access::Suspended || self.queues.first(id) != Some(first) {
            return None;
        }
        if self.is_admissible(first, id) {
            return Some(Time::ZERO);
        }
        let in_the_way = self.gpus.holds_on(id).filter(|(_, hold)| !hold.is_bypassed() && hold.entity != first);
        let ends = |hold: &Hold| if hold.revoked.is_some() { Some(Time::ZERO) } else { hold.ends };
        in_the_way.map(|(_, hold)| ends(hold)).try_fold(Time::ZERO, |latest, ends| Some(latest.max(ends?)))
    }

    /// Whether the first request of a GPU also waits for other GPUs.
    pub fn wants_others(&self, id: GpuId, first: Entity) -> bool {
        self.settings.anti_thrash != AntiThrash::Off
            && self.queues.request(first).is_some_and(|request| request.wants.values().flatten().any(|gpu| *gpu != id))
    }

    /// When the last of the other GPUs lets the first request of this GPU in. `None`: unknown.
    pub fn others_open_at(&self, id: GpuId, first: Entity) -> Option<Time> {
        let request = self.queues.request(first)?;
        let others = request.wants.values().flatten().filter(|gpu| **gpu != id && self.access(**gpu) != Access::Gone);
        others.map(|gpu| self.opens_at(*gpu, first)).try_fold(Time::ZERO, |latest, opens| Some(latest.max(opens?)))
    }

    /// Whether a waiting client may run on a GPU before the first request until then: it wants only that GPU, is
    /// expected to finish by then, and all of its memory is there.
    pub fn may_backfill(&self, client: ClientId, id: GpuId, until: Time) -> bool {
        let is_quick = |burst: Duration| burst <= until.saturating_sub(self.now);
        let fits = |account: &Account| account.report.demand <= account.allowance;
        self.queues.wants(client).is_some_and(|gpus| gpus.len() == 1)
            && self.history(client, id).is_some_and(|history| is_quick(history.bursts.expected()))
            && self.gpus.lock(client, id).is_some_and(|lock| !lock.slow_to_drain)
            && self.account(client, id).is_some_and(fits)
            && self.is_admissible(Entity::Solo(client), id)
    }
}
