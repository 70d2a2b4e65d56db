//! The groups that rules define.

use std::collections::{BTreeMap, BTreeSet};

use super::hours::Hours;
use crate::config::rules::{Instance, Rules, Subject};
use crate::scheduler::GroupId;

/// Threshold for the number of groups. If it is reached, groups without clients are dropped. With many
/// clients, the threshold is higher.
const MAX_GROUPS: usize = 1024;

/// The groups that rules define, and the GPU time that they have used.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// The scheduler's IDs of the groups.
    ids: BTreeMap<Instance, GroupId>,
    last: u64,
    pub hours: Hours,
}

impl Groups {
    /// The ID of a group, which is new if the group is unknown.
    pub fn id(&mut self, instance: Instance) -> GroupId {
        *self.ids.entry(instance).or_insert_with(|| {
            self.last += 1;
            GroupId(self.last)
        })
    }

    /// Keeps the groups of rules whose subject is the same in the new rules, even with other limits.
    pub fn follow(&mut self, before: &Rules, now: &Rules) {
        let now: Vec<&Subject> = now.all().map(|rule| &rule.subject).collect();
        let place =
            |rule: usize| now.iter().position(|subject| before.get(rule).is_some_and(|old| old.subject == **subject));
        let ids = std::mem::take(&mut self.ids).into_iter();
        let follow = |(instance, id): (Instance, GroupId)| {
            let rule = place(instance.rule)?;
            Some((instance.of_rule(rule), id))
        };
        self.ids = ids.filter_map(follow).collect();
    }

    /// Drops groups without clients if there are many groups. Otherwise such groups are kept: the usage of
    /// a unit's programs must count for the programs that the unit starts next. `of_clients`: the group of each
    /// client.
    pub fn forget<'a>(&mut self, of_clients: impl ExactSizeIterator<Item = Option<&'a Instance>>) {
        if self.ids.len() >= MAX_GROUPS.max(2 * of_clients.len()) {
            let present: BTreeSet<&Instance> = of_clients.flatten().collect();
            self.ids.retain(|instance, _| present.contains(instance));
        }
    }
}
