//! Who has which rule, with whom it counts, and what it says of itself; and what the clients hear of it before they use a GPU.

use std::collections::{BTreeMap, BTreeSet};

use nvshare_wire::env_limits::LimitName;
use nvshare_wire::{SchedulerMessage, Text, version};
use tracing::debug;

use super::Hub;
use crate::config::rules::{Instance, Rule, Rules, Subject};
use crate::daemon::pods::{Pods, Refused};
use crate::scheduler::{ClientId, Event, Group, GroupId};

/// Groups that are known at the same moment, more where there are more clients.
const MOST_GROUPS: usize = 1024;

impl Hub {
    /// The rule of a client that has come.
    pub(super) fn rule(&mut self, client: ClientId) {
        if let Some(group) = self.matched(client) {
            self.apply(Event::Groups { groups: BTreeMap::from([(client, Some(group))]) });
            self.label([client]);
        }
        self.foretell([client]);
        self.signals.limits.notify_one();
    }

    /// The rules are others than those: everybody's is looked up anew, all at once. Who counted together for a rule that is
    /// there still, be it that it allows something else, has had what it has had.
    pub(super) fn rule_anew(&mut self, before: &Rules) {
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
        let groups = clients.iter().map(|client| (*client, self.matched(*client))).collect();
        self.apply(Event::Groups { groups });
        self.foretell_all();
        self.label(clients);
    }

    /// An agent says which pods there are. Wishes that cannot be kept are returned, with the reason.
    pub fn set_pods(&mut self, mut pods: Pods) -> Refused {
        let rules = &self.config.rules;
        let refused = pods.reconcile(|wish, kept| {
            kept.iter().find_map(|other| wish.contradicts(other)).or_else(|| rules.contradicted(wish))
        });
        if pods == self.pods {
            return refused;
        }
        self.pods = pods;
        for client in self.clients.values_mut() {
            self.pods.name(&mut client.identity);
        }
        let before = self.config.rules.clone();
        self.config.rules.put_last(self.pods.wishes());
        self.rule_anew(&before);
        refused
    }

    /// Tells clients what a rule allows them of each GPU's memory, where that is not what they know: programs ask how much
    /// there is before they use a GPU, and plan with it.
    fn foretell(&mut self, clients: impl IntoIterator<Item = ClientId>) {
        for client in clients {
            let Some(entry) = self.clients.get_mut(&client) else { continue };
            if entry.session.version < version::ANNOUNCED_LIMITS {
                continue;
            }
            for gpu in self.gpus.keys() {
                let bytes = self.machine.lowest_max(client, *gpu).unwrap_or(0);
                let before = entry.foretold.insert(*gpu, bytes);
                if before.unwrap_or(0) != bytes || (before.is_none() && entry.returns) {
                    entry.connection.send(SchedulerMessage::MemoryMax { uuid: gpu.0, bytes });
                }
            }
        }
    }

    pub(super) fn foretell_all(&mut self) {
        self.foretell(self.clients.keys().copied().collect::<Vec<_>>());
    }

    /// Looks up the rule of a client.
    fn matched(&mut self, client: ClientId) -> Option<Group> {
        self.forget_groups();
        let entry = self.clients.get_mut(&client)?;
        // Who only holds a lock for somebody needs no memory.
        let found = entry.lasts.then(|| self.config.rules.of(&entry.identity)).flatten();
        entry.rule = found.as_ref().map(|(_, instance)| instance.clone());
        let (rule, instance) = found?;
        let next = &mut self.next_group;
        let id = *self.groups.entry(instance).or_insert_with(|| {
            *next += 1;
            GroupId(*next)
        });
        Some(Group { id, limits: rule.limits })
    }

    /// What a unit's programs have had counts for those that it starts next, so groups without clients are kept, up to a
    /// number.
    fn forget_groups(&mut self) {
        if self.groups.len() >= MOST_GROUPS.max(2 * self.clients.len()) {
            let present: BTreeSet<&Instance> =
                self.clients.values().filter_map(|client| client.rule.as_ref()).collect();
            self.groups.retain(|instance, _| present.contains(instance));
        }
    }

    /// A client says what its environment allows it.
    pub(super) fn set_env_limit(&mut self, client: ClientId, limit: LimitName, text: &str) {
        let Some(entry) = self.clients.get_mut(&client) else { return };
        let before = entry.own.limits();
        entry.own.hear(limit, text);
        let limits = entry.own.limits();
        if let Some(remark) = self.clients.get(&client).and_then(|entry| entry.own.remark(limit, self.rule_of(client)))
        {
            debug!(client = client.0, "{remark}");
            self.send(client, SchedulerMessage::Remark { text: Text::new(&remark) });
        }
        if limits != before {
            self.apply(Event::EnvLimits { client, limits });
            self.foretell([client]);
        }
    }

    pub(super) fn rule_of(&self, client: ClientId) -> Option<&Rule> {
        self.config.rules.get(self.clients.get(&client)?.rule.as_ref()?.rule)
    }
}
