//! Fairness: the order in which clients are served, and each client's part of a GPU's time.
//!
//! Rules give groups *shares* of a GPU's time. Under `fcfs`, clients without such a rule take turns
//! by tenant, with equal weights. Under `adaptive`, these clients together are one owner. The weight
//! of this owner is proportional to the number of its tenants that want the GPU.
//!
//! - **Weight**: scales the finish tag (`finish_tag`).
//! - **Priority**, and weight 0 (idle): the tiers of a class (`class`). Requests of a higher tier
//!   are served first and do not wait for the turn of a lower tier to end.
//! - **Minimum** (`bound`): the group is served first while it has used less than its minimum part
//!   of the last period.
//! - **Maximum** (`bound`): ends the group's turns once the group has used its maximum part of the
//!   last period, even if no other client waits.
//! - **Interactive**: the group is served first while it has used no more than its share.
//!
//! Each client's due part of the time is computed only for display (`due`).
//!
//! [`Fairness`] records the usage of owners: finish tags (virtual time) and usage (in a sliding
//! window of real time). [`Shares`] answers queries from this record, the rules, and the current
//! queues and holders.

mod bound;
mod class;
mod due;
mod finish_tag;
mod usage;

pub(crate) use crate::entity::ShareOwner;

use crate::{
    api::*,
    client::Clients,
    gpu::Gpus,
    policy,
    queue::{Queues, Tier},
    rules::Rules,
};
use finish_tag::FinishTags;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use usage::Usage;

/// The owners' usage of each GPU.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Fairness {
    gpus: BTreeMap<GpuId, GpuTime>,
}

/// The owners' usage of one GPU.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
struct GpuTime {
    finish_tags: FinishTags,
    /// The usage of owners with a minimum or a maximum.
    #[serde(with = "crate::encoding::pairs")]
    used: BTreeMap<ShareOwner, Usage>,
}

/// A view of fairness at one point in time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shares<'a> {
    pub now: Time,
    pub settings: &'a Settings,
    pub rules: &'a Rules,
    pub clients: &'a Clients,
    pub gpus: &'a Gpus,
    pub queues: &'a Queues,
    pub state: &'a Fairness,
}

impl Fairness {
    pub fn gpu_found(&mut self, id: GpuId) {
        self.gpus.entry(id).or_default();
    }

    pub fn gpu_forgotten(&mut self, id: GpuId) {
        self.gpus.remove(&id);
    }

    pub fn disconnected(&mut self, client: ClientId) {
        for gpu in self.gpus.values_mut() {
            gpu.finish_tags.remove(ShareOwner::Client(client));
        }
    }

    /// Records that an owner held a GPU from `since` until now.
    pub fn record_usage(&mut self, owner: ShareOwner, id: GpuId, since: Time, now: Time, period: Duration) {
        if let Some(gpu) = self.gpus.get_mut(&id) {
            gpu.used.entry(owner).or_default().record(since, now, period);
        }
    }

    /// Forgets usage that is older than a period.
    pub fn forget_usage(&mut self, now: Time, period: Duration) {
        for gpu in self.gpus.values_mut() {
            gpu.used.retain(|_, usage| !usage.is_past(now, period));
        }
    }

    /// Sets finish tags on a GPU, but never lowers one. Forgets tags in the past, except tags of
    /// owners in `keep`.
    pub fn set_finish_tags(
        &mut self,
        now: Time,
        id: GpuId,
        keep: &BTreeSet<ShareOwner>,
        tags: Vec<(ShareOwner, Time)>,
    ) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        gpu.finish_tags.forget_past(now, keep);
        tags.into_iter().for_each(|(owner, until)| gpu.finish_tags.raise(owner, until));
    }

    /// Advances virtual time on a GPU: lowers all finish tags by `by`.
    pub fn advance_virtual_time(&mut self, id: GpuId, by: Duration) {
        self.gpus.get_mut(&id).into_iter().for_each(|gpu| gpu.finish_tags.lower_all(by));
    }

    pub fn clear_finish_tags(&mut self) {
        self.gpus.values_mut().for_each(|gpu| gpu.finish_tags = FinishTags::default());
    }

    pub fn finish_tag(&self, owner: ShareOwner, id: GpuId) -> Option<Time> {
        self.gpus.get(&id)?.finish_tags.of(owner)
    }
}

impl Share {
    fn tier(self) -> Tier {
        if self.weight == 0 { Tier::Idle } else { Tier::Ordinary(Reverse(self.priority)) }
    }
}

impl<'a> Shares<'a> {
    /// The owner of a client's turns: its group if the group has a share, otherwise its tenant or
    /// [`ShareOwner::Others`]. `None`: the client is unknown.
    pub fn owner(&self, client: ClientId) -> Option<ShareOwner> {
        let tenant = self.clients.get(&client)?.tenant;
        let has_share = |group: &GroupId| self.rules.limits(*group).is_some_and(|limits| limits.share.is_some());
        let group = self.rules.group(client).filter(has_share);
        let by_tenant = policy::named(self.settings.policy).tenants_take_turns();
        let others = if by_tenant { ShareOwner::Tenant(tenant) } else { ShareOwner::Others };
        Some(group.map_or(others, ShareOwner::Group))
    }

    /// The share of an owner.
    pub fn share(&self, owner: ShareOwner) -> Share {
        match owner {
            ShareOwner::Tenant(_) | ShareOwner::Others => Share::default(),
            ShareOwner::Group(group) => self.rules.limits(group).and_then(|limits| limits.share).unwrap_or_default(),
            ShareOwner::Client(client) => {
                let default = Share::default();
                let weight = self.rules.env(client).and_then(|limits| limits.weight);
                Share { weight: weight.unwrap_or(default.weight), ..default }
            }
        }
    }

    /// The share of a client's owner, tightened by the client's environment.
    pub fn share_of(&self, client: ClientId) -> Share {
        if self.rules.are_none() {
            return Share::default();
        }
        let share = self.owner(client).map_or_else(Share::default, |owner| self.share(owner));
        self.rules.env(client).map_or(share, |limits| limits.tighten(share))
    }

    /// The owners that are charged for a client's turns: its group or tenant, and also the client
    /// itself if its environment sets a lower weight. The client is queued by the later finish tag.
    pub fn owners(&self, client: ClientId) -> impl Iterator<Item = ShareOwner> + use<> {
        self.owner(client).into_iter().chain(self.own_owner(client))
    }

    /// The client itself as an owner, if its environment sets a lower weight.
    pub fn own_owner(&self, client: ClientId) -> Option<ShareOwner> {
        let weight = self.rules.env(client)?.weight?;
        (weight < self.share(self.owner(client)?).weight).then_some(ShareOwner::Client(client))
    }

    /// Whether two clients are of the same tier, and so divide the time that better tiers leave
    /// unused.
    pub fn are_peers(&self, one: ClientId, other: ClientId) -> bool {
        self.share_of(one).tier() == self.share_of(other).tier()
    }

    fn weight(&self, owner: ShareOwner) -> u32 {
        u32::from(self.share(owner).weight.max(1))
    }

    /// The weight of an owner on a GPU. [`ShareOwner::Others`] counts once for each tenant that
    /// waits for or holds the GPU.
    fn weight_on(&self, owner: ShareOwner, id: GpuId) -> u32 {
        let tenants = || {
            let waiting = self.queues.queued(id).flat_map(|entity| self.queues.clients_of(entity));
            let clients = waiting.chain(self.gpus.holders(id));
            let others = clients.filter(|client| self.owner(*client) == Some(ShareOwner::Others));
            let tenants: BTreeSet<TenantId> =
                others.filter_map(|client| Some(self.clients.get(&client)?.tenant)).collect();
            u32::try_from(tenants.len()).unwrap_or(u32::MAX).max(1)
        };
        self.weight(owner).saturating_mul(if owner == ShareOwner::Others { tenants() } else { 1 })
    }

    /// The weight of a client within the weight of its owner.
    fn weight_of(&self, client: ClientId) -> u32 {
        self.owners(client).map(|owner| self.weight(owner)).min().unwrap_or(0)
    }
}
