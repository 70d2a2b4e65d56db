//! Gangs: clients that wait for each other's kernels, and so have to run together. They are granted and revoked together as
//! far as their memory fits; what does not fit together takes turns (`locks`).
//!
//! A client says whose gang it is in, or a rule says that all whom it counts together are one.

use super::{
    api::*,
    locks::{Parked, Unit},
    machine::{Client, Machine},
};
use std::collections::BTreeSet;
use std::time::Duration;

/// How long a gang's request waits for the members that have not asked yet, so that they run together.
const GATHERS: Duration = Duration::from_millis(5);
/// Who had a GPU so lately, or has come so lately, is likely to ask for one. Nobody waits for others.
const LATELY: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Gang {
    /// As its members call it.
    Named(u64),
    Group(GroupId),
}

impl Gang {
    pub fn named(name: u64) -> Option<Self> {
        (name != 0).then_some(Self::Named(name))
    }
}

impl Client {
    /// Whether it had a GPU lately that it has no more, or has come lately.
    fn had_lately(&self, now: Time) -> bool {
        let last = self.seats.values().map(|seat| seat.last_run).max();
        last.is_some_and(|last| now.saturating_sub(last) < LATELY)
    }
}

impl Machine {
    /// As what a client waits, and is granted. A gang of one is nothing else than that one.
    pub(super) fn unit(&self, client: ClientId) -> Unit {
        let gang = self.clients.get(&client).and_then(|state| state.gang);
        let gang = gang.filter(|gang| self.gangs.get(gang).is_some_and(|members| members.len() > 1));
        gang.map_or(Unit::Solo(client), Unit::Gang)
    }

    pub(super) fn gang_members(&self, gang: Gang) -> impl Iterator<Item = ClientId> {
        self.gangs.get(&gang).into_iter().flatten().copied()
    }

    /// The others of its gang.
    pub(super) fn fellows(&self, client: ClientId) -> impl Iterator<Item = ClientId> {
        let gang = self.clients.get(&client).and_then(|state| state.gang);
        gang.into_iter().flat_map(|gang| self.gang_members(gang)).filter(move |fellow| *fellow != client)
    }

    /// Until when a request that has just come waits in line for other members, who had a GPU with those lately.
    pub(super) fn gathers_until(&self, unit: Unit) -> Option<Time> {
        let Unit::Gang(gang) = unit else { return None };
        let members = self.gang_members(gang).filter_map(|id| self.clients.get(&id));
        let mut missing = members.filter(|client| client.waiting.is_none() && !client.holds() && !client.stopped);
        missing.any(|client| client.had_lately(self.now)).then(|| self.now + GATHERS)
    }

    pub(super) fn enter_gang(&mut self, client: ClientId, gang: Option<Gang>) {
        if let Some(state) = self.clients.get_mut(&client) {
            state.gang = gang;
        }
        if let Some(gang) = gang {
            self.gangs.entry(gang).or_default().insert(client);
            self.members_are_others(gang);
        }
    }

    pub(super) fn leave_gang(&mut self, client: ClientId) {
        let gang = self.clients.get_mut(&client).and_then(|state| state.gang.take());
        let Some(gang) = gang else { return };
        let members: Option<&mut BTreeSet<ClientId>> = self.gangs.get_mut(&gang);
        if members.is_some_and(|members| members.remove(&client) && members.is_empty()) {
            self.gangs.remove(&gang);
        }
        self.members_are_others(gang);
    }

    /// Members came or went. Those who are there are of another class then, and perhaps a gang, or no longer.
    fn members_are_others(&mut self, gang: Gang) {
        for member in self.gang_members(gang).collect::<Vec<_>>() {
            self.unite(member);
            let Some(state) = self.clients.get(&member) else { continue };
            let held = state.seats.iter().filter(|(_, seat)| seat.hold.is_some());
            self.dirty.extend(held.map(|(id, _)| *id));
            if let Some(unit) = state.waiting {
                self.put_back(unit);
                if self.requests.get(&unit).is_some_and(|request| matches!(request.parked, Some(Parked::Behind(_)))) {
                    self.join(unit);
                }
            }
        }
    }

    /// Has a client hold and want what it does as what it is now: one of a gang, or by itself.
    pub(super) fn unite(&mut self, client: ClientId) {
        let unit = self.unit(client);
        let Some(state) = self.clients.get_mut(&client) else { return };
        let holds = state.seats.values_mut().filter_map(|seat| seat.hold.as_mut());
        // It is revoked with those it is with now.
        holds.for_each(|hold| hold.unit = unit);
        let is_other = state.waiting.is_some_and(|waiting| waiting != unit);
        let (Some(waiting), true) = (state.waiting, is_other) else { return };
        let Some(request) = self.requests.get(&waiting) else { return };
        if let Some(wants) = request.wants.get(&client).cloned() {
            self.request(client, wants);
        }
    }

    /// The client's rule is another: so may its gang be. What it wants it then wants with others.
    pub(super) fn gang_anew(&mut self, client: ClientId) {
        let Some(state) = self.clients.get(&client) else { return };
        let group = state.group.filter(|group| self.groups.get(group).is_some_and(|members| members.terms.gang));
        let gang = group.map(Gang::Group).or(Gang::named(state.named));
        if gang == state.gang {
            return;
        }
        self.leave_gang(client);
        self.enter_gang(client, gang);
        self.unite(client);
    }
}
