//! The minimum and maximum GPU time of an owner within a period.

use super::{ShareOwner, Shares, usage::Window};
use crate::{api::*, gpu::Hold, queue::Entity};
use std::collections::BTreeSet;
use std::time::Duration;

/// The minimum time for which an owner is blocked after using its maximum.
const LEAST_PAUSE: Duration = Duration::from_millis(1);

/// `percent` of the period.
fn part(percent: u8, settings: &Settings) -> Duration {
    settings.time_period * u32::from(percent.min(100)) / 100
}

fn is_bounded(share: Share) -> bool {
    share.min > 0 || share.max < 100
}

/// Whether the class of a client with this share depends on its owner's usage.
pub(super) fn is_watched(share: Share) -> bool {
    is_bounded(share) || share.interactive
}

impl<'a> Shares<'a> {
    /// An owner's usage of a GPU within the last period.
    fn window(&self, owner: ShareOwner, id: GpuId) -> Window<'a> {
        // A bypassed holder does not take time from other clients of its owner.
        let is_own = |client, hold: &Hold| self.owner(client) == Some(owner) && !hold.is_bypassed();
        let holds = self.gpus.holds_on(id).filter(|(client, hold)| is_own(*client, hold));
        let since = holds.map(|(_, hold)| hold.since).min();
        Window {
            usage: self.state.gpus.get(&id).and_then(|gpu| gpu.used.get(&owner)),
            since,
            period: self.settings.time_period,
        }
    }

    /// The owner of a client's turns, if that owner has a minimum or a maximum.
    pub fn bounded_owner(&self, client: ClientId) -> Option<ShareOwner> {
        self.owner(client).filter(|owner| is_bounded(self.share(*owner)))
    }

    /// Whether an owner has used less of a GPU than its minimum.
    pub(super) fn is_below_minimum(&self, owner: ShareOwner, id: GpuId) -> bool {
        let min = self.share(owner).min;
        min > 0 && self.window(owner, id).used(self.now) < part(min, self.settings)
    }

    /// The owner of a client's turns, and its maximum time within a period, if it has a maximum.
    fn cap(&self, client: ClientId) -> Option<(ShareOwner, Duration)> {
        let owner = self.owner(client)?;
        let max = self.share(owner).max;
        (max < 100).then(|| (owner, part(max, self.settings)))
    }

    /// When a holder's owner reaches its maximum, or the current time if the owner has reached it.
    /// `None`: the owner has no maximum.
    pub fn capped_at(&self, holder: ClientId, id: GpuId) -> Option<Time> {
        let (owner, most) = self.cap(holder)?;
        let window = self.window(owner, id);
        if window.used(self.now) >= most {
            return Some(self.now);
        }
        Some(window.reaches(most, self.now).unwrap_or(Time::MAX))
    }

    /// When a client may hold these GPUs again after its owner has used its maximum. By that time,
    /// enough of the owner's usage has left the period for another turn. `None`: the client may
    /// hold the GPUs now.
    fn capped_until(&self, client: ClientId, gpus: &GpuSet) -> Option<Time> {
        let (owner, most) = self.cap(client)?;
        let turn = self.settings.slice().min(most / 2);
        let until = gpus.iter().filter_map(|id| {
            let window = self.window(owner, *id);
            let is_spent = window.used(self.now) >= most;
            // While another client of the owner still holds the GPU, the usage does not fall, so
            // the request is checked again after a slice.
            let again =
                || window.falls_below(most.saturating_sub(turn), self.now).unwrap_or(self.now + self.settings.slice());
            is_spent.then(again)
        });
        until.max().map(|until| until.max(self.now + LEAST_PAUSE))
    }

    /// The latest `capped_until` of all clients of a request.
    pub fn request_capped_until(&self, entity: Entity) -> Option<Time> {
        if self.rules.are_none() {
            return None;
        }
        let wants = self.queues.request(entity).into_iter().flat_map(|request| &request.wants);
        wants.filter_map(|(client, gpus)| self.capped_until(*client, gpus)).max()
    }

    /// Whether the class of any owner depends on its usage.
    pub fn are_watched(&self) -> bool {
        self.rules.groups().any(|(_, limits)| limits.share.is_some_and(is_watched))
    }

    pub fn is_watched(&self, client: ClientId) -> bool {
        is_watched(self.share_of(client))
    }

    /// When the class of an owner on a GPU next changes without an event. `None`: not within a
    /// period.
    pub fn class_changes_at(&self, id: GpuId) -> Option<Time> {
        let waiting = self.queues.queued(id).flat_map(|entity| self.queues.clients_of(entity));
        let owners: BTreeSet<ShareOwner> =
            waiting.chain(self.gpus.holders(id)).filter_map(|client| self.owner(client)).collect();
        let changes = owners.into_iter().filter(|owner| is_watched(self.share(*owner))).filter_map(|owner| {
            let share = self.share(owner);
            let window = self.window(owner, id);
            let least = part(share.min, self.settings);
            let below_minimum = match window.since {
                _ if share.min == 0 => None,
                Some(_) => window.reaches(least, self.now).filter(|_| window.used(self.now) < least),
                None => window.falls_below(least, self.now).filter(|_| window.used(self.now) >= least),
            };
            let tag = self.state.finish_tag(owner, id);
            let interactive_first = tag.filter(|until| share.interactive && *until > self.now);
            below_minimum.into_iter().chain(interactive_first).min()
        });
        let interactive =
            self.rules.with_env().map(|(client, _)| client).filter(|client| self.share_of(*client).interactive);
        let own = interactive.map(|client| self.latest_finish_tag(client, id));
        changes.chain(own).filter(|at| *at > self.now).min()
    }
}
