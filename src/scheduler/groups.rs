//! Groups of clients that may together have no more of each GPU than a rule says (`memory-max`).
//!
//! What is bounded is Σ demand, as their promises bound it: Σ promises of a group on a GPU never rises above its most. So
//! it holds whatever messages are on their way, and whatever a client says: one that claims to need more than it was
//! promised has that counted against its group, and is promised nothing for it. The group's bytes are divided as the
//! host's are (`limits`): each client has what it needs and an equal part of the rest, and gets more when it asks.
//!
//! A bound that falls below what is there takes nothing from anybody. Limits fall to what the group may have, below what
//! some need already, so that what is freed from then on is gone, until the rest fits.

use super::{
    api::*,
    limits::{Part, Target},
    machine::{Gpu, Machine},
};
use std::collections::{BTreeMap, BTreeSet};

/// Who is in a group, and what it may have.
#[derive(Debug, Default)]
pub(super) struct Members {
    pub terms: Terms,
    clients: BTreeSet<ClientId>,
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
        self.groups.get(&group)?.terms.memory_max.on(self.gpus.get(&id)?.total)
    }

    /// By how much promises of the client's group can rise. `None`: they are above what they may be.
    pub(super) fn group_room(&self, client: ClientId, id: GpuId) -> Option<u64> {
        let Some(max) = self.memory_max(client, id) else { return Some(u64::MAX) };
        let group = self.clients.get(&client).and_then(|state| state.group)?;
        let promised = self.gpus.get(&id).and_then(|gpu| gpu.grouped.get(&group)).copied().unwrap_or(0);
        max.checked_sub(promised)
    }

    pub(super) fn grouped(&mut self, groups: &BTreeMap<ClientId, Option<Group>>) {
        // All of them first: who is let into a group too early would be promised what the others have.
        let mut told: BTreeSet<ClientId> = groups.keys().copied().collect();
        let mut shares_changed = false;
        for (client, group) in groups {
            self.leave_group(*client);
            let Some(state) = self.clients.get_mut(client) else { continue };
            let Some(Group { id: group, terms }) = *group else {
                self.gang_anew(*client);
                continue;
            };
            state.group = Some(group);
            let members = self.groups.entry(group).or_default();
            members.clients.insert(*client);
            let before = std::mem::replace(&mut members.terms, terms);
            if before.memory_max != terms.memory_max {
                told.extend(&members.clients);
            }
            shares_changed |= before.share != terms.share;
            let others = if before.gang == terms.gang { BTreeSet::new() } else { members.clients.clone() };
            for (id, seat) in &state.seats {
                if let Some(gpu) = self.gpus.get_mut(id) {
                    gpu.count_for(Some(group), 0, seat.promise.counted);
                }
            }
            self.gang_anew(*client);
            others.into_iter().for_each(|other| self.gang_anew(other));
        }
        for client in told {
            let seats = self.clients.get(&client).into_iter().flat_map(|state| &state.seats);
            let seats: Vec<(GpuId, bool)> = seats.map(|(id, seat)| (*id, seat.attached.is_some())).collect();
            for (id, is_told) in seats {
                self.host.has_changed_on(id);
                if is_told {
                    self.tell_limit(client, id); // of the bound; the limit itself follows
                }
            }
        }
        // Who has just come stands nowhere.
        let stands = |client: &ClientId| self.clients.get(client).is_some_and(|c| c.waiting.is_some() || c.holds());
        if shares_changed || groups.keys().any(stands) {
            self.stand_anew();
        }
    }

    pub(super) fn leave_group(&mut self, client: ClientId) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        let Some(group) = state.group.take() else { return };
        for (id, seat) in &state.seats {
            if let Some(gpu) = self.gpus.get_mut(id) {
                gpu.count_for(Some(group), seat.promise.counted, 0);
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
    pub(super) fn weigh_group(&mut self, client: ClientId, id: GpuId) {
        if self.memory_max(client, id).is_some() {
            self.host.has_changed_on(id);
        }
    }

    /// Whether anybody in the client's group waits for a higher limit there.
    pub(super) fn is_awaited(&self, client: ClientId, id: GpuId) -> bool {
        let group = self.clients.get(&client).and_then(|state| self.groups.get(&state.group?));
        let seats = group.into_iter().flat_map(|group| &group.clients).filter_map(|member| self.seat(*member, id));
        seats.into_iter().any(|seat| seat.promise.wish.is_some())
    }

    /// What members of bounded groups are to have on these GPUs, where nothing else bounds them.
    pub(super) fn weigh_members(&mut self, ids: &GpuSet) -> Vec<Target> {
        if self.groups.values().all(|members| members.terms.memory_max == MemoryMax::Infinity) {
            return Vec::new();
        }
        self.weigh(None, ids)
    }
}

/// A group on a GPU while promises are weighed.
#[derive(Debug)]
pub(super) struct Bound {
    pub max: u64,
    /// Its members, by their places among the parts.
    pub parts: Vec<usize>,
}

impl Bound {
    /// Bytes that its members have with so much slack.
    pub fn used(&self, parts: &[Part], slack: u64) -> u64 {
        let members = self.parts.iter().filter_map(|at| parts.get(*at));
        members.fold(0, |sum, part| sum.saturating_add(part.at(slack)))
    }

    /// Divides what the group may have among its members. `awaited`: somebody waits for its part.
    pub fn divide(&self, parts: &mut [Part], awaited: bool) {
        // The most that all of them can have each.
        let highest = |most: u64, used: &dyn Fn(u64) -> u64| {
            let (mut low, mut high) = (0, most);
            while low < high {
                let middle = low + (high - low).div_ceil(2);
                if used(middle) <= self.max { low = middle } else { high = middle - 1 }
            }
            low
        };
        let over = self.used(parts, 0) > self.max;
        let (slack, cap) = if over {
            let capped = |cap: u64| {
                let members = self.parts.iter().filter_map(|at| parts.get(*at));
                members.fold(0u64, |sum, part| sum.saturating_add(part.capped(cap)))
            };
            (0, highest(self.max, &capped))
        } else {
            (highest(self.max, &|slack| self.used(parts, slack)), u64::MAX)
        };
        // To the byte, but where that is worth no messages.
        let exact = over || awaited || self.parts.len() == 1;
        for at in &self.parts {
            if let Some(part) = parts.get_mut(*at) {
                (part.slack, part.exact) = (slack, exact);
                part.cap = if part.deaf { u64::MAX } else { cap };
            }
        }
    }
}
