//! Rules: each client's rule and group, the limits from the client's environment, and the memory
//! limits that the daemon sends to the client.

use std::collections::{BTreeMap, BTreeSet};

use nvshare_wire::env_limits::LimitName;
use nvshare_wire::{SchedulerMessage, Text};
use tracing::debug;

use super::claims::Claims;
use super::pods::{Pods, Refused};
use super::state::Core;
use crate::config::rules::{Instance, Rule, Rules, Subject};
use crate::scheduler::{ClientId, Event, Group, GroupId};

/// Threshold for the number of groups. If it is reached, groups without clients are dropped. With many
/// clients, the threshold is higher.
const MAX_GROUPS: usize = 1024;

impl Core {
    /// Applies a new client's rule.
    pub(super) fn apply_rule(&mut self, client: ClientId) {
        if let Some(group) = self.find_group(client) {
            self.apply(Event::Groups { groups: BTreeMap::from([(client, Some(group))]) });
            self.set_labels([client]);
        }
        self.tell_allowed([client]);
        self.announce_limits([client]);
    }

    /// Applies changed rules to all clients at the same time. A group keeps its usage if the new
    /// rules include a rule with the same subject, even with other limits.
    pub(super) fn reapply_rules(&mut self, before: &Rules) {
        let now: Vec<&Subject> = self.config.rules.all().map(|rule| &rule.subject).collect();
        let place =
            |rule: usize| now.iter().position(|subject| before.get(rule).is_some_and(|old| old.subject == **subject));
        let groups = std::mem::take(&mut self.groups).into_iter();
        let kept = groups.filter_map(|(instance, id)| {
            let rule = place(instance.rule)?;
            Some((instance.of_rule(rule), id))
        });
        let kept: BTreeMap<Instance, GroupId> = kept.collect();
        self.groups = kept;
        let clients: Vec<ClientId> = self.clients.keys().copied().collect();
        let groups = clients.iter().map(|client| (*client, self.find_group(*client))).collect();
        self.apply(Event::Groups { groups });
        self.announce_all_limits();
        self.set_labels(clients.iter().copied());
        self.tell_allowed(clients);
    }

    /// Replaces the list of this node's pods. Returns the reasons for refusing pods' rules that contradict
    /// other rules.
    pub fn set_pods(&mut self, mut pods: Pods) -> Refused {
        let rules = &self.config.rules;
        let refused = pods.reconcile(|rule, kept| {
            kept.iter().find_map(|other| rule.contradicts(other)).or_else(|| rules.contradicted(rule))
        });
        if pods == self.pods {
            return refused;
        }
        self.pods = pods;
        for client in self.clients.values_mut() {
            self.pods.name(&mut client.identity);
        }
        self.replace_last_rules();
        refused
    }

    /// Replaces the list of this node's claims.
    pub fn set_claims(&mut self, claims: Claims) {
        if claims == self.claims {
            return;
        }
        self.claims = claims;
        for client in self.clients.values_mut() {
            self.claims.name(&mut client.identity);
        }
        self.replace_last_rules();
    }

    fn replace_last_rules(&mut self) {
        let before = self.config.rules.clone();
        self.config.rules.put_last(self.claims.rules(), self.pods.rules());
        self.reapply_rules(&before);
    }

    /// Sends clients the memory limits that their rules set on each GPU, if the limits have changed.
    /// Programs query the GPU's memory size before they use the GPU, and plan their allocations by this
    /// size.
    pub(super) fn announce_limits(&mut self, clients: impl IntoIterator<Item = ClientId>) {
        for client in clients {
            let Some(entry) = self.clients.get_mut(&client) else { continue };
            if entry.announced_limits.len() > self.gpus.len() {
                entry.announced_limits.retain(|gpu, _| self.gpus.contains_key(gpu));
            }
            for gpu in self.gpus.keys() {
                let bytes = self.machine.lowest_max(client, *gpu).unwrap_or(0);
                let before = entry.announced_limits.insert(*gpu, bytes);
                if before.unwrap_or(0) != bytes || (before.is_none() && entry.reconnects) {
                    entry.connection.send(SchedulerMessage::MemoryMax { uuid: gpu.0, bytes });
                }
            }
        }
    }

    /// Sends limits to the next `count` clients after `client`. Returns the last of these clients, or
    /// `None` if there are no more.
    pub fn announce_limits_after(&mut self, client: ClientId, count: usize) -> Option<ClientId> {
        let after = (std::ops::Bound::Excluded(client), std::ops::Bound::Unbounded);
        let next: Vec<ClientId> = self.clients.range(after).map(|(client, _)| *client).take(count).collect();
        let last = next.last().copied();
        self.announce_limits(next);
        last
    }

    pub(super) fn announce_all_limits(&mut self) {
        self.announce_limits(self.clients.keys().copied().collect::<Vec<_>>());
    }

    /// Finds the rule of a client, and its group.
    pub(super) fn find_group(&mut self, client: ClientId) -> Option<Group> {
        self.forget_groups();
        let entry = self.clients.get_mut(&client)?;
        let found = self.config.rules.of(&entry.identity);
        // A lock excludes other clients, so it cannot belong to a gang. `may_lock` refuses locks under gang
        // rules.
        let found = found.filter(|(rule, _)| entry.lock.is_none() || !rule.limits.gang);
        entry.rule = found.as_ref().map(|(_, instance)| instance.clone());
        entry.has_used_up = false;
        let (rule, instance) = found?;
        let has_used_up = self.hours.are_used_up(rule, &instance);
        entry.has_used_up = has_used_up;
        let next = &mut self.next_group;
        let id = *self.groups.entry(instance).or_insert_with(|| {
            *next += 1;
            GroupId(*next)
        });
        let limits = if has_used_up { rule.limits_when_used_up() } else { rule.limits };
        Some(Group { id, limits })
    }

    /// Drops groups without clients if there are many groups. Otherwise such groups are kept: the usage of
    /// a unit's programs must count for the programs that the unit starts next.
    fn forget_groups(&mut self) {
        if self.groups.len() >= MAX_GROUPS.max(2 * self.clients.len()) {
            let present: BTreeSet<&Instance> =
                self.clients.values().filter_map(|client| client.rule.as_ref()).collect();
            self.groups.retain(|instance, _| present.contains(instance));
        }
    }

    /// Sets a limit that the client read from its environment.
    pub(super) fn set_env_limit(&mut self, client: ClientId, limit: LimitName, text: &str) {
        let Some(entry) = self.clients.get_mut(&client) else { return };
        let before = entry.env_limits.limits();
        entry.env_limits.set(limit, text);
        let limits = entry.env_limits.limits();
        if let Some(remark) =
            self.clients.get(&client).and_then(|entry| entry.env_limits.remark(limit, self.rule_of(client)))
        {
            debug!(client = client.0, "{remark}");
            self.send(client, SchedulerMessage::Remark { text: Text::new(&remark) });
        }
        if limits != before {
            self.apply(Event::EnvLimits { client, limits });
            self.announce_limits([client]);
        }
        if limit == LimitName::AllowedGpus {
            self.tell_allowed([client]);
        }
    }

    pub(super) fn rule_of(&self, client: ClientId) -> Option<&Rule> {
        self.config.rules.get(self.clients.get(&client)?.rule.as_ref()?.rule)
    }
}
