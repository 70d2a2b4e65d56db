//! Limits from rules and environments: the group of each client, the limits of the group's rule,
//! and the limits that the client's own environment sets. This module only stores the limits;
//! quota, fairness and gangs apply them.
//!
//! Limits from a client's environment apply in addition to the limits of its group's rule, and can
//! only tighten them. A client therefore cannot gain by such limits at the expense of other
//! clients.

use crate::api::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A group with at least one member.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
struct GroupRule {
    limits: RuleLimits,
    members: BTreeSet<ClientId>,
}

/// The groups, their rules, and the limits of environments.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Rules {
    groups: BTreeMap<GroupId, GroupRule>,
    group_of: BTreeMap<ClientId, GroupId>,
    /// The limits of those clients whose environment sets any limit.
    env: BTreeMap<ClientId, EnvLimits>,
}

impl EnvLimits {
    /// A group's share, tightened by this client's limits.
    pub(crate) fn tighten(&self, share: Share) -> Share {
        let weight = self.weight.map_or(share.weight, |weight| weight.min(share.weight));
        // A client of weight 0 has no minimum.
        Share { weight, min: if weight == 0 { 0 } else { share.min }, ..share }
    }

    /// Whether these limits can put a client into a different class from its group.
    fn makes_classes(&self) -> bool {
        self.weight == Some(0)
    }

    fn is_bounded(&self) -> bool {
        self.memory_max != Amount::Infinity
    }
}

/// Changes for a group's members when a client joins the group with other limits.
pub(crate) struct GroupChange {
    /// Members whose turns may belong to another owner.
    pub owners: BTreeSet<ClientId>,
    /// Members whose memory has other bounds.
    pub bounds: BTreeSet<ClientId>,
    /// Members that may be in another gang.
    pub gangs: BTreeSet<ClientId>,
    /// The group's share has changed.
    pub shares: bool,
}

impl Rules {
    /// Removes a client from its group.
    pub fn leave(&mut self, client: ClientId) {
        let Some(group) = self.group_of.remove(&client) else { return };
        if let Some(rule) = self.groups.get_mut(&group) {
            rule.members.remove(&client);
            if rule.members.is_empty() {
                self.groups.remove(&group);
            }
        }
    }

    /// Adds a client that is in no group to a group. From now on, `limits` apply to all members of
    /// the group. Returns what changed for the members.
    pub fn join(&mut self, client: ClientId, Group { id, limits: now }: Group) -> GroupChange {
        self.group_of.insert(client, id);
        let rule = self.groups.entry(id).or_default();
        rule.members.insert(client);
        // A new key of a rule belongs to one of the changes, or needs none because each decision reads
        // it. Eviction reads `memory_low`, and idle sleep reads `sleep_after`.
        let RuleLimits {
            memory_max,
            memory_low: _,
            swap_max,
            on_memory_full,
            sleep_after: _,
            share,
            gang,
            managed_beyond_gpu,
        } = std::mem::replace(&mut rule.limits, now);
        let bounds = (memory_max, swap_max, on_memory_full, managed_beyond_gpu);
        let all_or_new = |all: bool| if all { rule.members.clone() } else { BTreeSet::from([client]) };
        GroupChange {
            owners: all_or_new(share.is_some() != now.share.is_some()),
            bounds: all_or_new(bounds != (now.memory_max, now.swap_max, now.on_memory_full, now.managed_beyond_gpu)),
            gangs: all_or_new(gang != now.gang),
            shares: share != now.share,
        }
    }

    /// Sets the limits of a client's environment. Returns the previous limits.
    pub fn set_env(&mut self, client: ClientId, limits: EnvLimits) -> EnvLimits {
        let before = self.env.remove(&client).unwrap_or_default();
        if limits != EnvLimits::default() {
            self.env.insert(client, limits);
        }
        before
    }

    pub fn group(&self, client: ClientId) -> Option<GroupId> {
        self.group_of.get(&client).copied()
    }

    pub fn limits(&self, group: GroupId) -> Option<&RuleLimits> {
        Some(&self.groups.get(&group)?.limits)
    }

    /// The limits of a client's group.
    pub fn limits_of(&self, client: ClientId) -> Option<&RuleLimits> {
        self.limits(self.group(client)?)
    }

    pub fn env(&self, client: ClientId) -> Option<&EnvLimits> {
        self.env.get(&client)
    }

    pub fn members(&self, group: GroupId) -> impl Iterator<Item = ClientId> {
        self.groups.get(&group).into_iter().flat_map(|rule| rule.members.iter().copied())
    }

    /// The members of a client's group, including the client. Empty if the client is in no group.
    pub fn group_peers(&self, client: ClientId) -> impl Iterator<Item = ClientId> {
        self.group(client).into_iter().flat_map(|group| self.members(group))
    }

    pub fn groups(&self) -> impl Iterator<Item = (GroupId, &RuleLimits)> {
        self.groups.iter().map(|(group, rule)| (*group, &rule.limits))
    }

    pub fn are_none(&self) -> bool {
        self.groups.is_empty() && self.env.is_empty()
    }

    /// Clients whose environment sets limits, with those limits.
    pub fn with_env(&self) -> impl Iterator<Item = (ClientId, &EnvLimits)> {
        self.env.iter().map(|(client, limits)| (*client, limits))
    }

    /// Whether clients can be of different classes.
    pub fn have_classes(&self) -> bool {
        self.groups.values().any(|rule| rule.limits.share.is_some()) || self.env.values().any(EnvLimits::makes_classes)
    }

    /// Whether any rule or environment limits memory, on one GPU or over all GPUs.
    pub fn bound_memory(&self) -> bool {
        let is_bounded = |limits: &RuleLimits| limits.memory_max != Amount::Infinity || limits.swap_max.is_some();
        self.groups().any(|(_, limits)| is_bounded(limits)) || self.env.values().any(EnvLimits::is_bounded)
    }

    /// Whether any rule limits memory over all GPUs.
    pub fn bound_swap(&self) -> bool {
        self.groups().any(|(_, limits)| limits.swap_max.is_some())
    }

    /// Whether the client's rule or environment limits its memory.
    pub fn is_bounded(&self, client: ClientId) -> bool {
        let by_rule = self
            .limits_of(client)
            .is_some_and(|limits| limits.memory_max != Amount::Infinity || limits.swap_max.is_some());
        by_rule || self.env(client).is_some_and(EnvLimits::is_bounded)
    }

    /// Bytes that a client's group may allocate on a GPU of `total` bytes. `None`: no limit.
    pub fn memory_max(&self, client: ClientId, total: u64) -> Option<u64> {
        self.limits_of(client)?.memory_max.on(total)
    }

    /// Bytes that a client's group may allocate over all GPUs. All of these bytes may have to be
    /// evicted to the host. `None`: no limit.
    pub fn swap_max(&self, client: ClientId) -> Option<u64> {
        self.limits_of(client)?.swap_max
    }

    /// Bytes that a client's environment allows the client to allocate on a GPU of `total` bytes,
    /// its context included. `None`: no limit.
    pub fn env_memory_max(&self, client: ClientId, total: u64) -> Option<u64> {
        self.env(client)?.memory_max.on(total)
    }

    /// The lowest of all limits on the client's memory on a GPU of `total` bytes. `None`: no limit.
    pub fn lowest_max(&self, client: ClientId, total: u64) -> Option<u64> {
        let rule = [self.memory_max(client, total), self.swap_max(client)];
        rule.into_iter().chain([self.env_memory_max(client, total)]).flatten().min()
    }

    /// The idle time after which a client is put to sleep, from its rule or else the settings.
    /// `None`: the client is not put to sleep.
    pub fn sleep_after(&self, client: ClientId, settings: &Settings) -> Option<Duration> {
        let rule = self.limits_of(client).and_then(|limits| limits.sleep_after);
        rule.or(settings.sleep_after.map(SleepAfter::Idle))?.time()
    }

    /// Whether the client's managed memory may exceed a GPU.
    pub fn may_exceed_gpu(&self, client: ClientId) -> bool {
        self.limits_of(client).is_some_and(|limits| limits.managed_beyond_gpu)
    }

    /// Whether the client's allocations wait for memory instead of failing.
    pub fn waits_for_memory(&self, client: ClientId) -> bool {
        self.limits_of(client).is_some_and(|limits| limits.on_memory_full == OnMemoryFull::Wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_environment_weight_only_lowers_the_weight_and_0_ends_the_minimum() {
        let share = Share { weight: 100, min: 30, ..Share::default() };
        let tightened = |weight| EnvLimits { weight, ..EnvLimits::default() }.tighten(share);
        assert_eq!([tightened(None), tightened(Some(400))], [share; 2]);
        assert_eq!(tightened(Some(40)), Share { weight: 40, ..share });
        assert_eq!(tightened(Some(0)), Share { weight: 0, min: 0, ..share });
    }
}
