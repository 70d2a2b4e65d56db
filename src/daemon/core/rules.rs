//! Rules: each client's rule and group, the limits from the client's environment, and the memory
//! limits and permissions that the daemon sends to the client.

use std::collections::BTreeMap;
use std::time::Duration;

use nvshare_wire::env_limits::LimitName;
use nvshare_wire::scheduler::{FABRIC_HANDLES, MANAGED_BEYOND_GPU};
use nvshare_wire::{SchedulerMessage, Text};
use tracing::debug;

use super::model::Model;
use crate::config::rules::{GpuHours, Rule, Rules};
use crate::scheduler::{ClientId, Event, Group};

impl Model {
    /// The event that assigns the clients to the groups of their rules. A group keeps its usage if the rules
    /// `before` include a rule with the same subject.
    pub(super) fn regroup(&mut self, before: &Rules) -> Event {
        self.groups.follow(before, &self.config.rules);
        let groups = self.all_clients().into_iter().map(|client| (client, self.assign_group(client)));
        Event::Groups { groups: groups.collect() }
    }

    /// Finds the rule of a client, and assigns the client to the rule's group.
    pub(super) fn assign_group(&mut self, client: ClientId) -> Option<Group> {
        self.groups.forget(self.clients.values().map(|client| client.rule.as_ref()));
        let entry = self.clients.get_mut(&client)?;
        let found = self.config.rules.of(&entry.identity);
        // A lock excludes other clients, so it cannot belong to a gang. `may_lock` refuses locks under gang
        // rules.
        let found = found.filter(|(rule, _)| entry.lock.is_none() || !rule.limits.gang);
        entry.rule = found.as_ref().map(|(_, instance)| instance.clone());
        entry.has_used_up =
            found.as_ref().is_some_and(|(rule, instance)| self.groups.hours.are_used_up(rule, instance));
        let (rule, instance) = found?;
        let limits = if entry.has_used_up { rule.limits_when_used_up() } else { rule.limits };
        Some(Group { id: self.groups.id(instance), limits })
    }

    /// Counts clients' lock time, in seconds, if their rules limit it.
    pub(super) fn count_hours(&mut self, used: Vec<(ClientId, f64)>) {
        for (client, lock_seconds) in used {
            if lock_seconds > 0.0
                && self.rule_of(client).is_some_and(|rule| rule.gpu_hours.is_some())
                && let Some(programs) = self.clients.get(&client).and_then(|entry| entry.rule.as_ref())
            {
                self.groups.hours.add(programs.programs(), lock_seconds);
            }
        }
    }

    /// The `gpu-hours` of a client's rule, and the time already used. The time includes programs that the
    /// rule counts together with the client.
    pub(super) fn hours_of(&self, client: ClientId) -> Option<(GpuHours, Duration)> {
        let hours = self.rule_of(client)?.gpu_hours?;
        let programs = self.clients.get(&client)?.rule.as_ref()?.programs();
        Some((hours, self.groups.hours.used(&programs, hours.window)))
    }

    /// True if any client's rule limits its GPU time.
    pub fn limits_hours(&self) -> bool {
        self.clients.keys().any(|client| self.rule_of(*client).is_some_and(|rule| rule.gpu_hours.is_some()))
    }

    /// Updates which programs have used up their hours. The scheduler serves such programs after all other
    /// programs until hours become available again. Returns the groups that have changed.
    pub(super) fn check_hours(&mut self) -> BTreeMap<ClientId, Option<Group>> {
        self.groups.hours.forget();
        let is_used_up = |client| self.hours_of(client).is_some_and(|(hours, used)| used >= hours.time);
        let changed = self.clients.iter().filter(|(client, entry)| is_used_up(**client) != entry.has_used_up);
        let changed: Vec<ClientId> = changed.map(|(client, _)| *client).collect();
        changed.into_iter().map(|client| (client, self.assign_group(client))).collect()
    }

    /// Sends clients the memory limits and permissions that they have on each GPU, if these have changed.
    /// Programs query the GPU's memory size before they use the GPU, and plan their allocations by this
    /// size.
    pub(super) fn announce_rules(&mut self, clients: impl IntoIterator<Item = ClientId>) {
        for client in clients {
            let rule = self.rule_of(client);
            let offers_fabric = rule.is_some_and(|rule| rule.fabric_handles);
            let beyond = rule.filter(|rule| rule.limits.managed_beyond_gpu).map_or(0, |_| MANAGED_BEYOND_GPU);
            let Some(entry) = self.clients.get_mut(&client) else { continue };
            if entry.announced_rules.len() > self.gpus.len() {
                entry.announced_rules.retain(|gpu, _| self.gpus.contains_key(gpu));
            }
            for (gpu, properties) in &self.gpus {
                let memory_max = self.machine.lowest_max(client, *gpu).unwrap_or(0);
                let permissions = beyond | if properties.has_fabric || offers_fabric { FABRIC_HANDLES } else { 0 };
                let before = entry.announced_rules.insert(*gpu, (memory_max, permissions));
                if before.unwrap_or_default() != (memory_max, permissions) || (before.is_none() && entry.reconnects) {
                    entry.connection.send(SchedulerMessage::GpuRules { uuid: gpu.0, memory_max, permissions });
                }
            }
        }
    }

    /// Sends rules to the next `count` clients after `client`. Returns the last of these clients, or
    /// `None` if there are no more.
    pub fn announce_rules_after(&mut self, client: ClientId, count: usize) -> Option<ClientId> {
        let after = (std::ops::Bound::Excluded(client), std::ops::Bound::Unbounded);
        let next: Vec<ClientId> = self.clients.range(after).map(|(client, _)| *client).take(count).collect();
        let last = next.last().copied();
        self.announce_rules(next);
        last
    }

    /// Sets a limit that the client read from its environment. Tells the client if the limit is ignored.
    pub(super) fn set_env_limit(&mut self, client: ClientId, limit: LimitName, text: &str) -> Option<Event> {
        let entry = self.clients.get_mut(&client)?;
        let before = entry.env_limits.limits();
        entry.env_limits.set(limit, text);
        let entry = self.clients.get(&client)?;
        if let Some(remark) = entry.env_limits.remark(limit, self.rule_of(client)) {
            debug!(client = client.0, "{remark}");
            entry.connection.send(SchedulerMessage::Remark { text: Text::new(&remark) });
        }
        let limits = entry.env_limits.limits();
        (limits != before).then_some(Event::EnvLimits { client, limits })
    }

    /// The name of a client's rule for messages. Empty if no rule applies.
    pub(super) fn rule_name(&self, client: ClientId) -> String {
        self.rule_of(client).map(Rule::to_string).unwrap_or_default()
    }
}
