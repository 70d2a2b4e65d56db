//! The least and the most of a GPU's time that an owner has within a period.

use super::{ShareOwner, Shares, usage::Window};
use crate::{api::*, lock::Entity};
use std::collections::BTreeSet;
use std::time::Duration;

/// An owner that has had its maximum is not looked at again sooner.
const LEAST_PAUSE: Duration = Duration::from_millis(1);

/// That part of the period.
fn part(percent: u8, settings: &Settings) -> Duration {
    settings.time_period * u32::from(percent.min(100)) / 100
}

fn is_bounded(share: Share) -> bool {
    share.min > 0 || share.max < 100
}

/// Whether the class of a client with that share depends on what it has had.
pub(super) fn is_watched(share: Share) -> bool {
    is_bounded(share) || share.interactive
}

impl<'a> Shares<'a> {
    /// What an owner has had of a GPU.
    fn window(&self, owner: ShareOwner, id: GpuId) -> Window<'a> {
        let is_own = |client| self.owner(client) == Some(owner) || owner == ShareOwner::Client(client);
        // A client that is counted as no holder takes nothing from others of its owner.
        let holds = self.lock.holds_on(id).filter(|(client, hold)| is_own(*client) && !hold.is_bypassed());
        let since = holds.map(|(_, hold)| hold.since).min();
        Window {
            usage: self.state.gpus.get(&id).and_then(|gpu| gpu.used.get(&owner)),
            since,
            period: self.settings.time_period,
        }
    }

    /// The owners of a client whose usage matters.
    pub fn bounded_owners(&self, client: ClientId) -> Vec<ShareOwner> {
        let owners = [self.owner(client), Some(ShareOwner::Client(client))].into_iter().flatten();
        owners.filter(|owner| is_bounded(self.share(*owner))).collect()
    }

    /// Whether it has had less of that GPU than it is to have.
    pub(super) fn is_below_minimum(&self, owner: ShareOwner, id: GpuId) -> bool {
        let min = self.share(owner).min;
        min > 0 && self.window(owner, id).used(self.now) < part(min, self.settings)
    }

    /// When the holder or its group will have had all that it may; None: there is no such bound. A time that is not to come:
    /// it has had it.
    pub fn capped_at(&self, holder: ClientId, id: GpuId) -> Option<Time> {
        let owners = [self.owner(holder), Some(ShareOwner::Client(holder))].into_iter().flatten();
        owners.filter_map(|owner| self.owner_capped_at(owner, id)).min()
    }

    fn owner_capped_at(&self, owner: ShareOwner, id: GpuId) -> Option<Time> {
        let share = self.share(owner);
        if share.max >= 100 {
            return None;
        }
        let (window, most) = (self.window(owner, id), part(share.max, self.settings));
        if window.used(self.now) >= most {
            return Some(self.now);
        }
        Some(window.reaches(most, self.now).unwrap_or(Time::MAX))
    }

    /// Until when a client may have none of these GPUs, because it or its group has had all that it may. It may again once
    /// enough for a turn is a period ago.
    fn capped_until(&self, client: ClientId, gpus: &GpuSet) -> Option<Time> {
        let owners = [self.owner(client), Some(ShareOwner::Client(client))].into_iter().flatten();
        owners.filter_map(|owner| self.owner_capped_until(owner, gpus)).max()
    }

    fn owner_capped_until(&self, owner: ShareOwner, gpus: &GpuSet) -> Option<Time> {
        let share = self.share(owner);
        if share.max >= 100 {
            return None;
        }
        let most = part(share.max, self.settings);
        let turn = self.settings.slice().min(most / 2);
        let until = gpus.iter().filter_map(|id| {
            let window = self.window(owner, *id);
            let is_spent = window.used(self.now) >= most;
            // A fellow may have it for as long as it takes to end its work.
            let again =
                || window.falls_below(most.saturating_sub(turn), self.now).unwrap_or(self.now + self.settings.slice());
            is_spent.then(again)
        });
        until.max().map(|until| until.max(self.now + LEAST_PAUSE))
    }

    /// The same for all who are to be granted together.
    pub fn is_capped(&self, entity: Entity) -> Option<Time> {
        let wants = self.lock.request(entity).into_iter().flat_map(|request| &request.wants);
        wants.filter_map(|(client, gpus)| self.capped_until(*client, gpus)).max()
    }

    /// Whether any owner's class depends on what it has had.
    pub fn are_watched(&self) -> bool {
        self.rules.groups().any(|(_, limits)| limits.share.is_some_and(is_watched))
            || self.rules.with_env().any(|(_, limits)| limits.time_max < 100)
    }

    pub fn is_watched(&self, client: ClientId) -> bool {
        is_watched(self.share_of(client))
    }

    /// When the class of an owner that waits for a GPU or holds it will change, if nothing else happens.
    pub fn class_changes_at(&self, id: GpuId) -> Option<Time> {
        let waiting = self.lock.queue(id).flat_map(|(_, entity)| self.lock.clients_of(entity));
        let owners: BTreeSet<ShareOwner> =
            waiting.chain(self.lock.holders(id)).filter_map(|client| self.owner(client)).collect();
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
