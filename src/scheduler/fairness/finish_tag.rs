//! Weighted fair queueing with virtual finish times (Demers, Keshav and Shenker, "Analysis and
//! Simulation of a Fair Queueing Algorithm", SIGCOMM 1989). The queueing is between owners of turns
//! ([`ShareOwner`]): tenants, or groups whose rule sets a share. The policy orders the clients of
//! one owner.
//!
//! An owner that held the lock while other owners waited has used some of their time. The *finish
//! tag* is the time at which the owner has waited long enough in return. The wait is the time used,
//! times the total weight of the waiting owners, divided by the owner's own weight. Time also
//! counts as used if no client could run because the owner's memory was being moved in. The owner's
//! next request is queued by the tag. A tenant with ten clients therefore gets no more turns than a
//! tenant with one client. Time in which an owner did not want the GPU earns no credit, so older
//! clients do not precede a new client to make up for their idle time.
//!
//! Tags are times on the machine's clock.

use super::{ShareOwner, Shares};
use crate::{api::*, gpu::Hold};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The weight of the served owner, and the total weight of the waiting owners.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ServiceWeights {
    own: u32,
    others: u32,
}

impl ServiceWeights {
    /// How long the owner must wait in return for `time` of service.
    fn wait_for(self, time: Duration) -> Duration {
        scaled(time, self.others.into(), self.own.into())
    }

    /// The service time that advances the owner's finish tag by `time`.
    pub fn service_until(self, time: Duration) -> Duration {
        scaled(time, self.own.into(), u128::from(self.own) + u128::from(self.others))
    }
}

fn scaled(time: Duration, by: u128, of: u128) -> Duration {
    let nanos = time.as_nanos().saturating_mul(by) / of.max(1);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// The finish tags on one GPU: all tags in the future, and some in the past.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(super) struct FinishTags {
    #[serde(with = "crate::encoding::pairs")]
    of: BTreeMap<ShareOwner, Time>,
    /// The same tags, the earliest first. So the end of a hold finds the past tags without a walk over
    /// the tags of all owners.
    order: BTreeSet<(Time, ShareOwner)>,
}

impl FinishTags {
    pub fn of(&self, owner: ShareOwner) -> Option<Time> {
        self.of.get(&owner).copied()
    }

    pub fn remove(&mut self, owner: ShareOwner) {
        if let Some(until) = self.of.remove(&owner) {
            self.order.remove(&(until, owner));
        }
    }

    /// Sets an owner's tag if it has no tag or an earlier one.
    pub fn raise(&mut self, owner: ShareOwner, until: Time) {
        if self.of(owner).is_none_or(|before| before < until) {
            self.remove(owner);
            self.of.insert(owner, until);
            self.order.insert((until, owner));
        }
    }

    /// Forgets tags in the past, except tags of owners in `keep`.
    pub fn forget_past(&mut self, now: Time, keep: &BTreeSet<ShareOwner>) {
        let past = self.order.iter().take_while(|(until, _)| *until <= now).map(|(_, owner)| *owner);
        let past: Vec<ShareOwner> = past.filter(|owner| !keep.contains(owner)).collect();
        past.into_iter().for_each(|owner| self.remove(owner));
    }

    /// Lowers all tags by `by`.
    pub fn lower_all(&mut self, by: Duration) {
        self.of.values_mut().for_each(|until| *until = until.saturating_sub(by));
        self.order = self.of.iter().map(|(owner, until)| (*until, *owner)).collect();
    }
}

impl Shares<'_> {
    /// The finish tag that `owner` would have if the client's hold ended now. `owner` is one of the
    /// client's owners, and `waited` is the contended part of the hold. Also returns the weights
    /// that determine how fast the tag advances. `None`: no other owner of the same tier waits, so
    /// the hold used no other owner's time.
    pub fn finish_tag(
        &self,
        client: ClientId,
        owner: ShareOwner,
        id: GpuId,
        hold: &Hold,
        waited: Duration,
    ) -> Option<(Time, ServiceWeights)> {
        let others = self.weights_of_others(client, owner, id);
        if others == 0 {
            return None;
        }
        let weights = ServiceWeights { own: self.weight_on(owner, id), others };
        let waited = waited + hold.moved;
        let before = if owner == ShareOwner::Client(client) { hold.own_finish_tag } else { hold.finish_tag };
        let begun = hold.since.saturating_sub(hold.moved).max(before);
        Some((begun.saturating_add(waited).saturating_add(weights.wait_for(waited)), weights))
    }

    /// The total weight of the other owners of the same tier that wait for a GPU. An owner's weight
    /// is limited to the weight of its waiting clients. For the client's own tag, other clients of
    /// its group or tenant count too.
    fn weights_of_others(&self, client: ClientId, owner: ShareOwner, id: GpuId) -> u32 {
        let own = self.owner(client);
        // If no environment sets limits, all clients of an owner have the owner's share.
        if let Some(own) = own.filter(|own| *own == owner && self.rules.with_env().next().is_none()) {
            let tier = self.share(own).tier();
            let others = self.queues.owners_waiting(id).filter(|other| *other != own);
            let peers = others.filter(|other| self.share(*other).tier() == tier);
            return peers.map(|other| self.waiting_weight(other, id)).fold(0, u32::saturating_add);
        }
        let mut others: BTreeMap<ShareOwner, u32> = BTreeMap::new();
        for waiting in self.queues.waiting_on(id) {
            let Some(other) = self.owner(waiting) else { continue };
            let is_self = if own == Some(owner) { own == Some(other) } else { waiting == client };
            if !is_self && self.are_peers(waiting, client) {
                let weight = others.entry(other).or_default();
                *weight = weight.saturating_add(self.weight_of(waiting)).min(self.weight_on(other, id));
            }
        }
        others.into_values().fold(0, u32::saturating_add)
    }

    /// The weight of an owner that waits for a GPU, if all of its clients have the owner's share.
    fn waiting_weight(&self, owner: ShareOwner, id: GpuId) -> u32 {
        let weight = self.weight(owner);
        match owner {
            ShareOwner::Others => {
                let clients = u32::try_from(self.queues.queued_of(id, owner).count()).unwrap_or(u32::MAX);
                weight.saturating_mul(clients).min(self.weight_on(owner, id))
            }
            _ => weight,
        }
    }

    /// The finish tags of a client's owner and of the client itself, at the moment when the client
    /// is granted a GPU. A tag is 0 if no competitor wants the GPU, because time used without
    /// competition is not charged.
    pub fn finish_tags_before(&self, client: ClientId, id: GpuId) -> (Time, Time) {
        let Some(owner) = self.owner(client) else { return Default::default() };
        let preempted = self.gpus.preempted(id);
        let tag = |owner: ShareOwner, is_wanted: bool| {
            self.state.finish_tag(owner, id).filter(|_| is_wanted).unwrap_or_default()
        };
        let owners = self.queues.owners_waiting(id).chain(preempted.and_then(|other| self.owner(other)));
        let by_others = owners.into_iter().any(|other| other != owner);
        let by_any = self.queues.waiting_on(id).chain(preempted).any(|other| other != client);
        (tag(owner, by_others), tag(ShareOwner::Client(client), by_any))
    }

    /// The latest finish tag of a client's owners on a GPU; 0 if they have no tag.
    pub fn latest_finish_tag(&self, client: ClientId, id: GpuId) -> Time {
        self.owners(client).filter_map(|owner| self.state.finish_tag(owner, id)).max().unwrap_or_default()
    }

    /// How far the earliest finish tag of the clients that want a GPU lies beyond a time quantum
    /// from now; 0 if it does not. The quantum is tolerated because turns do not end exactly on
    /// time. Such a lead arises when competing owners have left.
    pub fn virtual_time_lead(&self, id: GpuId, granted: ClientId) -> Duration {
        let until = self.now.saturating_add(self.settings.time_quantum);
        let mut least = Duration::MAX;
        // The loop usually ends at the first client.
        for client in self.queues.waiting_on(id).chain([granted]) {
            least = least.min(self.latest_finish_tag(client, id));
            if least <= until {
                return Duration::ZERO;
            }
        }
        least - until
    }
}
