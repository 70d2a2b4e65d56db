//! Backfilling: the first request of a GPU may have to wait for other GPUs. Until those GPUs admit
//! the first request, this GPU is granted to later requests that want only this GPU and have all of
//! their memory on it.
//!
//! The turns of a GPU's holders determine when the GPU admits the first request. Backfilled grants
//! end when the last of the other GPUs admits the first request. Backfilling therefore delays the
//! first request at most by a drain, plus [`SLOT`] if a time is unknown.

use super::Model;
use crate::{
    api::*,
    gpu::{Access, Account, Hold},
    queue::Entity,
};
use std::time::Duration;

/// The minimum time granted to a backfilled request. Also the time granted if the wait of the first
/// request is unknown.
const SLOT: Duration = Duration::from_millis(150);
/// The maximum number of requests behind the first that are considered.
const LOOKS: usize = 16;

impl Model<'_> {
    /// When a GPU admits its first request, according to the turns of its holders. 0 if the GPU
    /// would admit the request now. `None`: unknown.
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

    /// When the last of the other GPUs admits the first request of this GPU. `None`: unknown.
    pub fn others_open_at(&self, id: GpuId, first: Entity) -> Option<Time> {
        let request = self.queues.request(first)?;
        let others = request.wants.values().flatten().filter(|gpu| **gpu != id && self.access(**gpu) != Access::Gone);
        others.map(|gpu| self.opens_at(*gpu, first)).try_fold(Time::ZERO, |latest, opens| Some(latest.max(opens?)))
    }

    /// Whether a waiting client may run on a GPU ahead of the first request until `until`. The
    /// client must want only that GPU, be expected to finish by `until`, and have all of its memory
    /// on the GPU.
    pub fn may_backfill(&self, client: ClientId, id: GpuId, until: Time) -> bool {
        let is_quick = |burst: Duration| burst <= until.saturating_sub(self.now);
        let fits = |account: &Account| account.report.demand <= account.allowance;
        self.queues.wants(client).is_some_and(|gpus| gpus.len() == 1)
            && self.gpus.history(client, id).is_some_and(|history| is_quick(history.bursts.expected()))
            && self.gpus.lock(client, id).is_some_and(|lock| !lock.slow_to_drain)
            && self.gpus.account(client, id).is_some_and(fits)
            && self.is_admissible(Entity::Solo(client), id)
    }

    /// The client whose request is granted ahead of the first request of a GPU, and the end of its
    /// turn.
    pub fn backfill(&self, id: GpuId, first: Entity) -> Option<(ClientId, Time)> {
        // Backfilling does not consider the classes of requests, so it is off if rules create
        // classes.
        if !self.wants_others(id, first) || self.rules.have_classes() || self.access(id) != Access::Turns {
            return None;
        }
        let until = self.others_open_at(id, first).unwrap_or_else(|| self.now.saturating_add(SLOT));
        if until < self.now.saturating_add(SLOT) {
            return None;
        }
        let behind = self.queues.queue(id).skip(1).chain(self.queues.behind_first(id));
        let mut behind = behind.take(LOOKS).filter_map(|(_, entity)| match entity {
            Entity::Solo(client) => Some(client),
            Entity::Gang(_) => None,
        });
        Some((behind.find(|client| self.may_backfill(*client, id, until))?, until))
    }
}
