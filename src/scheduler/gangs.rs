//! Gangs: clients that wait for each other's kernels, and so have to run together. They are granted and revoked together as
//! far as their memory fits; what does not fit together takes turns (`locks`).
//!
//! A client says whose gang it is in, or a rule says that all whom it counts together are one.

use super::{
    api::*,
    locks::Unit,
    machine::{Client, Machine},
};
use std::collections::BTreeSet;
use std::time::Duration;

/// How long a gang's request waits for the members that have not asked yet, so that they run together.
pub(super) const GATHERS: Duration = Duration::from_millis(5);

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
    /// As what it waits, and is granted.
    pub fn unit(&self, id: ClientId) -> Unit {
        self.gang.map_or(Unit::Solo(id), Unit::Gang)
    }
}

impl Machine {
    pub(super) fn gang_members(&self, gang: Gang) -> impl Iterator<Item = ClientId> {
        self.gangs.get(&gang).into_iter().flatten().copied()
    }

    /// The others of its gang.
    pub(super) fn fellows(&self, client: ClientId) -> impl Iterator<Item = ClientId> {
        let gang = self.clients.get(&client).and_then(|state| state.gang);
        gang.into_iter().flat_map(|gang| self.gang_members(gang)).filter(move |fellow| *fellow != client)
    }

    /// Whether every member of a gang that has attached a GPU holds or wants one.
    pub(super) fn gathered(&self, gang: Gang) -> bool {
        self.gang_members(gang).filter_map(|id| self.clients.get(&id)).all(|client| {
            client.waiting.is_some() || client.seats.is_empty() || client.seats.values().any(|s| s.hold.is_some())
        })
    }

    pub(super) fn enter_gang(&mut self, client: ClientId, gang: Option<Gang>) {
        if let Some(state) = self.clients.get_mut(&client) {
            state.gang = gang;
        }
        if let Some(gang) = gang {
            self.gangs.entry(gang).or_default().insert(client);
        }
    }

    pub(super) fn leave_gang(&mut self, client: ClientId) {
        let gang = self.clients.get_mut(&client).and_then(|state| state.gang.take());
        let Some(gang) = gang else { return };
        let members: Option<&mut BTreeSet<ClientId>> = self.gangs.get_mut(&gang);
        if members.is_some_and(|members| members.remove(&client) && members.is_empty()) {
            self.gangs.remove(&gang);
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
        let waiting = state.waiting.and_then(|unit| self.requests.get(&unit));
        let wants = waiting
            .and_then(|request| Some((request.wants.get(&client)?.clone(), request.since.get(&client).copied())));
        self.withdraw(client);
        self.leave_gang(client);
        self.enter_gang(client, gang);
        let Some(state) = self.clients.get_mut(&client) else { return };
        // It is revoked with those it is with now.
        let unit = state.unit(client);
        state.seats.values_mut().filter_map(|seat| seat.hold.as_mut()).for_each(|hold| hold.unit = unit);
        let Some((wants, since)) = wants else { return };
        self.request(client, wants);
        let unit = self.clients.get(&client).and_then(|state| state.waiting);
        let request = unit.and_then(|unit| self.requests.get_mut(&unit));
        if let (Some(request), Some(since)) = (request, since) {
            request.since.insert(client, since);
        }
    }
}
