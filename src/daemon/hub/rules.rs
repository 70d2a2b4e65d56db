//! Who has which rule, and with whom it counts.

use std::collections::BTreeMap;

use super::Hub;
use crate::daemon::rules::{Instance, Rule};
use crate::scheduler::{ClientId, Event, Group, GroupId};

impl Hub {
    /// The rule of a client that has come.
    pub(super) fn rule(&mut self, client: ClientId) {
        if let Some(group) = self.matched(client) {
            self.apply(Event::Grouped { groups: BTreeMap::from([(client, Some(group))]) });
        }
    }

    /// The rules are others: everybody's is looked up anew, all at once.
    pub(super) fn rule_anew(&mut self) {
        self.groups.clear();
        let clients: Vec<ClientId> = self.clients.keys().copied().collect();
        let groups = clients.into_iter().map(|client| (client, self.matched(client))).collect();
        self.apply(Event::Grouped { groups });
    }

    /// Looks up the rule of a client.
    fn matched(&mut self, client: ClientId) -> Option<Group> {
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
        Some(Group { id, memory_max: rule.memory_max, share: rule.share })
    }

    /// Somebody with that rule is gone: perhaps it was the last who counted so.
    pub(super) fn forget_group(&mut self, instance: Option<&Instance>) {
        if let Some(instance) = instance
            && !self.clients.values().any(|client| client.rule.as_ref() == Some(instance))
        {
            self.groups.remove(instance);
        }
    }

    pub(super) fn rule_of(&self, client: ClientId) -> Option<&Rule> {
        self.config.rules.get(self.clients.get(&client)?.rule.as_ref()?.rule)
    }
}
