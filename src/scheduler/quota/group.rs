//! Limits for groups of clients: on each GPU, all members together may have no more than their rule's `memory-max`.
//!
//! What is limited is Σ committed of the members on a GPU, their contexts included, so it holds whatever messages are in flight and
//! whatever clients report: demand beyond a client's limit counts against its group and earns nothing. The group's memory is
//! divided like host memory (`limit`): each member has what it needs and an equal part of the rest, and more on request.
//!
//! Lowering a limit below current usage fails no existing allocation. Members' limits fall below what some of them need, so that
//! freed memory stays free until the rest fits; meanwhile the excess is swapped out whenever its client does not run.

use crate::{
    api::*,
    machine::{Attachment, Client, Gpu, Machine},
    quota::limit::LIMIT_STEP,
    quota::solver::Target,
};
use std::collections::{BTreeMap, BTreeSet};

/// Who is in a group, and what it may have.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct GroupState {
    pub limits: RuleLimits,
    clients: BTreeSet<ClientId>,
}

impl GroupState {
    pub fn is_bounded_everywhere(&self) -> bool {
        self.limits.swap_max.is_some()
    }
}

impl Gpu {
    /// Keeps the sum of a group when a promise in it changes.
    pub fn count_for(&mut self, group: Option<GroupId>, before: u64, after: u64) {
        let Some(group) = group else { return };
        let sum = self.grouped.entry(group).or_default();
        *sum = *sum - before + after;
        if *sum == 0 {
            self.grouped.remove(&group);
        }
    }
}

impl Machine {
    /// What the client's group may have on that GPU; `None`: it is in none, or there is no bound.
    pub fn memory_max(&self, client: ClientId, id: GpuId) -> Option<u64> {
        let group = self.clients.get(&client)?.group?;
        self.groups.get(&group)?.limits.memory_max.on(self.gpus.get(&id)?.total)
    }

    /// The least of all that rules allow the client's group of that GPU's memory: what it is told of that GPU.
    pub fn ruled_max(&self, client: ClientId, id: GpuId) -> Option<u64> {
        let by_rule = self.memory_max(client, id).into_iter().chain(self.swap_max(client));
        by_rule.chain(self.client_memory_max(client, id)).chain(self.client_swap_max(client)).min()
    }

    /// What demands of the client's group can come to there: its contexts are memory as well.
    pub(crate) fn memory_bound(&self, client: ClientId, id: GpuId) -> Option<u64> {
        let max = self.memory_max(client, id)?;
        let contexts = self.sum_of_group(client, id, |attachment| self.context(attachment, id));
        Some(max.saturating_sub(contexts))
    }

    /// What its context takes of the memory there.
    pub(crate) fn context(&self, attachment: &Attachment, id: GpuId) -> u64 {
        let usual = || self.gpus.get(&id).map_or(0, |gpu| gpu.contexts(&self.settings, 1));
        attachment.context.unwrap_or_else(usual)
    }

    /// Contexts were measured.
    pub(crate) fn contexts(&mut self, id: GpuId, bytes: &BTreeMap<ClientId, u64>) {
        for (client, bytes) in bytes {
            let Some(attachment) = self.attachment_mut(*client, id) else { continue };
            let is_same = attachment.context.is_some_and(|before| before.abs_diff(*bytes) <= LIMIT_STEP);
            if !is_same {
                attachment.context = Some(*bytes);
                self.mark_group_changed(*client, id);
            }
        }
    }

    /// What the client's group may have over all GPUs, since all of it may have to leave them; `None`: there is no bound.
    pub(crate) fn swap_max(&self, client: ClientId) -> Option<u64> {
        let group = self.clients.get(&client)?.group?;
        self.groups.get(&group)?.limits.swap_max
    }

    /// The members of the client's group, itself included.
    fn group_peers(&self, client: ClientId) -> impl Iterator<Item = ClientId> {
        let group = self.clients.get(&client).and_then(|state| self.groups.get(&state.group?));
        group.into_iter().flat_map(|members| members.clients.iter().copied())
    }

    /// What members of the client's group have there, all of them.
    fn sum_of_group(&self, client: ClientId, id: GpuId, of: impl Fn(&Attachment) -> u64) -> u64 {
        let attachments = self.group_peers(client).filter_map(|member| self.attachment(member, id));
        attachments.fold(0, |sum, attachment| sum.saturating_add(of(attachment)))
    }

    /// Whether the client's group needs more than it may have there, as its limit fell.
    fn is_over(&self, client: ClientId, id: GpuId) -> bool {
        let max = self.memory_bound(client, id);
        max.is_some_and(|max| self.sum_of_group(client, id, |attachment| attachment.limit_state.demand()) > max)
    }

    /// Whether it needs more by itself than it says that it may have.
    fn is_over_own(&self, client: ClientId, id: GpuId) -> bool {
        let demand = || self.attachment(client, id).map_or(0, |attachment| attachment.limit_state.demand());
        self.client_bound(client, id).is_some_and(|max| demand() > max)
    }

    /// Whether a client is to have nothing on a GPU that is free: it does not run there, and it or its group has too much.
    pub(crate) fn is_over_limit(&self, client: ClientId, id: GpuId) -> bool {
        let uses = |state: &Client| {
            let wants = state.waiting.and_then(|entity| self.requests.get(&entity)?.wants.get(&client));
            let holds = state.attachments.get(&id).is_some_and(|attachment| attachment.hold.is_some());
            holds || wants.is_some_and(|wants| wants.contains(&id))
        };
        self.is_bounded(client, id)
            && !self.clients.get(&client).is_some_and(uses)
            && (self.is_over(client, id) || self.is_over_own(client, id))
    }

    /// Has what a group has beyond its limit leave the GPU, from a client that does not run there now. Who runs has what it
    /// needs.
    pub(crate) fn swap_surplus(&mut self, client: ClientId, id: GpuId) {
        if !self.is_over_limit(client, id) {
            return;
        }
        let accounts = self.group_peers(client).filter_map(|member| self.account(member, id));
        let has = accounts.fold(0u64, |sum, account| sum.saturating_add(account.allowance));
        let surplus = has.saturating_sub(self.memory_bound(client, id).unwrap_or(u64::MAX));
        let Some(account) = self.account(client, id) else { return };
        let surplus = surplus.max(account.allowance.saturating_sub(self.client_bound(client, id).unwrap_or(u64::MAX)));
        let take = account.evictable().min(surplus);
        if take > 0 {
            self.allow(client, id, account.allowance - take);
            self.check(client);
        }
    }

    /// What groups that a rule protects there have beyond what is protected.
    pub(crate) fn unprotected(&self, id: GpuId) -> BTreeMap<GroupId, u64> {
        let Some(gpu) = self.gpus.get(&id) else { return BTreeMap::new() };
        let protected = self.groups.iter().filter_map(|(group, members)| {
            let low = members.limits.memory_low?;
            let accounts = members.clients.iter().filter_map(|client| gpu.ledger.account(*client));
            let has = accounts.fold(0u64, |sum, account| sum.saturating_add(account.allowance));
            Some((*group, has.saturating_sub(low.on(gpu.total).unwrap_or(u64::MAX))))
        });
        protected.collect()
    }

    pub(crate) fn is_bounded(&self, client: ClientId, id: GpuId) -> bool {
        let by_rule = self.memory_max(client, id).is_some() || self.swap_max(client).is_some();
        by_rule || self.client_limits.get(&client).is_some_and(EnvLimits::is_bounded)
    }

    /// By how much promises of the client's group can rise. `None`: they are above what they may be.
    pub(crate) fn group_room(&self, client: ClientId, id: GpuId) -> Option<u64> {
        self.room_within(client, id, self.memory_bound(client, id))
    }

    /// The same where it is known what they can come to on that GPU.
    pub(crate) fn room_within(&self, client: ClientId, id: GpuId, bound: Option<u64>) -> Option<u64> {
        let own = self.client_room(client)?;
        let Some(group) = self.clients.get(&client).and_then(|state| state.group) else { return Some(own) };
        let committed = |gpu: &Gpu| gpu.grouped.get(&group).copied().unwrap_or(0);
        let here = match bound {
            Some(max) => max.checked_sub(self.gpus.get(&id).map_or(0, committed))?,
            None => u64::MAX,
        };
        let everywhere = match self.swap_max(client) {
            Some(max) => max.checked_sub(self.gpus.values().map(committed).fold(0, u64::saturating_add))?,
            None => u64::MAX,
        };
        Some(here.min(everywhere).min(own))
    }

    pub(crate) fn grouped(&mut self, groups: &BTreeMap<ClientId, Option<Group>>) {
        // All of them first: who is let into a group too early would be promised what the others have.
        let mut told: BTreeSet<ClientId> = groups.keys().copied().collect();
        let mut shares_changed = false;
        for (client, group) in groups {
            self.leave_group(*client);
            let Some(state) = self.clients.get_mut(client) else { continue };
            let Some(Group { id: group, limits }) = *group else {
                self.gang_anew(*client);
                continue;
            };
            state.group = Some(group);
            let members = self.groups.entry(group).or_default();
            members.clients.insert(*client);
            let before = std::mem::replace(&mut members.limits, limits);
            if (before.memory_max, before.swap_max, before.on_memory_full)
                != (limits.memory_max, limits.swap_max, limits.on_memory_full)
            {
                told.extend(&members.clients);
            }
            shares_changed |= before.share != limits.share;
            let others = if before.gang == limits.gang { BTreeSet::new() } else { members.clients.clone() };
            for (id, attachment) in &state.attachments {
                if let Some(gpu) = self.gpus.get_mut(id) {
                    gpu.count_for(Some(group), 0, attachment.limit_state.counted);
                }
            }
            self.gang_anew(*client);
            others.into_iter().for_each(|other| self.gang_anew(other));
        }
        for client in told {
            let attachments = self.clients.get(&client).into_iter().flat_map(|state| &state.attachments);
            let attachments: Vec<(GpuId, bool)> =
                attachments.map(|(id, attachment)| (*id, attachment.attached.is_some())).collect();
            for (id, is_told) in attachments {
                self.host.mark_changed(id);
                self.swap_surplus(client, id);
                if is_told {
                    self.tell_limit(client, id); // of the bound; the limit itself follows
                }
            }
        }
        // Who has just come stands nowhere.
        let stands = |client: &ClientId| self.clients.get(client).is_some_and(|c| c.waiting.is_some() || c.holds());
        if shares_changed || groups.keys().any(stands) {
            self.requeue_all();
        }
    }

    pub(crate) fn leave_group(&mut self, client: ClientId) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        let Some(group) = state.group.take() else { return };
        for (id, attachment) in &state.attachments {
            if let Some(gpu) = self.gpus.get_mut(id) {
                gpu.count_for(Some(group), attachment.limit_state.counted, 0);
            }
        }
        if let Some(members) = self.groups.get_mut(&group) {
            members.clients.remove(&client);
            if members.clients.is_empty() {
                self.groups.remove(&group);
            }
        }
    }

    /// What a client needs has changed, and with it what others of its group can have.
    pub(crate) fn mark_group_changed(&mut self, client: ClientId, id: GpuId) {
        if self.is_bounded(client, id) {
            self.host.mark_changed(id);
        }
    }

    /// Whether anybody in the client's group waits for a higher limit that it stands in the way of.
    pub(crate) fn is_awaited(&self, client: ClientId, id: GpuId) -> bool {
        let group = self.clients.get(&client).and_then(|state| self.groups.get(&state.group?));
        let Some(members) = group else { return false };
        let clients = members.clients.iter().filter_map(|member| self.clients.get(member));
        let mut attachments = clients.flat_map(|state| &state.attachments);
        attachments.any(|(other, attachment)| {
            attachment.limit_state.wanted.is_some() && (*other == id || members.is_bounded_everywhere())
        })
    }

    /// What members of bounded groups are to have on these GPUs, where nothing else bounds them.
    pub(crate) fn solve_bounded(&mut self, ids: &GpuSet) -> Vec<Target> {
        let is_free =
            |members: &GroupState| members.limits.memory_max == Amount::Infinity && !members.is_bounded_everywhere();
        if self.groups.values().all(is_free) && !self.client_limits.values().any(EnvLimits::is_bounded) {
            return Vec::new();
        }
        self.solve_limits(None, ids)
    }
}
