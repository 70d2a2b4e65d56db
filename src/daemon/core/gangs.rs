//! Gangs: clients whose kernels wait for each other, so that they must run together.
//!
//! A client gives the names of its gangs: when it connects, and when it joins a NCCL communicator. Gangs
//! with a common member are one gang, up to [`MOST_MERGED`], so a client of several communicators joins
//! all of their members. A gang ends when its last member leaves: a library does not report that a communicator has
//! ended, and another one usually follows.

use std::collections::{BTreeMap, BTreeSet};

use crate::identity::{Identity, Tenant};
use crate::scheduler::ClientId;

/// Maximum number of names for each client; later names have no effect. A job creates the
/// communicator of all its processes first.
pub(super) const MAX_NAMES: usize = 64;

/// Two gangs with more members together stay apart: a merge queues all members anew, while all tenants
/// wait. A larger job needs no merge if its first communicator has all its processes.
const MOST_MERGED: usize = 64;

/// The gangs that have clients.
#[derive(Debug, Default)]
pub(super) struct Gangs {
    /// The clients that gave each name. They are in the same gang, unless it would be too large to merge.
    named: BTreeMap<(Tenant, u64), BTreeSet<ClientId>>,
    /// The members of each gang, by the scheduler's number of the gang.
    gangs: BTreeMap<u64, BTreeSet<ClientId>>,
    clients: BTreeMap<ClientId, Member>,
    last: u64,
}

#[derive(Debug)]
struct Member {
    gang: u64,
    names: BTreeSet<u64>,
}

impl Gangs {
    /// The scheduler's number of the client's gang, or 0 for no gang.
    pub fn of(&self, client: ClientId) -> u64 {
        self.clients.get(&client).map_or(0, |member| member.gang)
    }

    /// Adds a client to the gang of this name, or to none if the name is 0. Two clients give the same name if
    /// both the name and the tenant are equal. Returns the clients whose gang has changed, except clients that
    /// were in no gang before.
    pub fn join(&mut self, client: ClientId, identity: &Identity, name: u64) -> BTreeSet<ClientId> {
        let names = self.clients.get(&client).map_or(0, |member| member.names.len());
        if name == 0 || names >= MAX_NAMES {
            return BTreeSet::new();
        }
        if !identity.placed {
            // Alone: without a control group, the tenant is uncertain.
            self.clients.entry(client).or_insert_with(|| {
                self.last += 1;
                Member { gang: self.last, names: BTreeSet::new() }
            });
            return BTreeSet::new();
        }
        let same = self.named.entry((identity.tenant.clone(), name)).or_default();
        let others = same.first().and_then(|other| self.clients.get(other)).map(|other| other.gang);
        same.insert(client);
        let gang = others.unwrap_or_else(|| match self.clients.get(&client) {
            Some(member) => member.gang,
            None => {
                self.last += 1;
                self.last
            }
        });
        let member = self.clients.entry(client).or_insert(Member { gang, names: BTreeSet::new() });
        member.names.insert(name);
        let own = member.gang;
        self.gangs.entry(own).or_default().insert(client);
        self.merge(own, gang)
    }

    /// Makes one gang of two. Returns the members of the smaller one, whose gang has changed.
    fn merge(&mut self, one: u64, other: u64) -> BTreeSet<ClientId> {
        let size = |gang: u64| self.gangs.get(&gang).map_or(0, BTreeSet::len);
        let (smaller, larger) = if size(one) < size(other) { (one, other) } else { (other, one) };
        if smaller == larger || size(one) + size(other) > MOST_MERGED {
            return BTreeSet::new();
        }
        let moved = self.gangs.remove(&smaller).unwrap_or_default();
        for client in &moved {
            self.clients.entry(*client).and_modify(|member| member.gang = larger);
        }
        self.gangs.entry(larger).or_default().extend(&moved);
        moved
    }

    pub fn leave(&mut self, client: ClientId, tenant: &Tenant) {
        let Some(Member { gang, names }) = self.clients.remove(&client) else { return };
        let remove = |clients: &mut BTreeSet<ClientId>| {
            clients.remove(&client);
            clients.is_empty()
        };
        for name in names {
            let key = (tenant.clone(), name);
            if self.named.get_mut(&key).is_some_and(remove) {
                self.named.remove(&key);
            }
        }
        if self.gangs.get_mut(&gang).is_some_and(remove) {
            self.gangs.remove(&gang);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(uid: u32) -> Identity {
        Identity { tenant: Tenant::User(uid), placed: true, ..Identity::default() }
    }

    #[test]
    fn gangs_with_a_common_member_are_one_gang() {
        let (mut gangs, user) = (Gangs::default(), user(1000));
        let join = |gangs: &mut Gangs, client, name| gangs.join(ClientId(client), &user, name);
        let gang = |gangs: &Gangs, client| gangs.of(ClientId(client));
        for (client, name) in [(1, 10), (2, 10), (3, 20), (4, 20), (5, 20)] {
            assert!(join(&mut gangs, client, name).is_empty());
        }
        let (first, second) = (gang(&gangs, 1), gang(&gangs, 3));
        assert!(first != 0 && second != 0 && first != second);
        assert_eq!(gang(&gangs, 2), first);
        // Client 2 is in both communicators.
        assert_eq!(join(&mut gangs, 2, 20), BTreeSet::from([ClientId(1), ClientId(2)]));
        assert!((1..=5).all(|client| gang(&gangs, client) == second));
        assert!(join(&mut gangs, 2, 20).is_empty() && join(&mut gangs, 1, 10).is_empty());
        // A new member of either communicator joins all of them.
        assert!(join(&mut gangs, 6, 10).is_empty());
        assert_eq!(gang(&gangs, 6), second);
    }

    #[test]
    fn gangs_that_are_too_large_together_stay_apart() {
        let (mut gangs, user) = (Gangs::default(), user(1000));
        let most = MOST_MERGED as u64;
        for client in 1..=most {
            gangs.join(ClientId(client), &user, if client == 1 { 10 } else { 20 });
        }
        gangs.join(ClientId(most + 1), &user, 30);
        assert_eq!(gangs.join(ClientId(1), &user, 20), BTreeSet::from([ClientId(1)]));
        let gang = gangs.of(ClientId(1));
        assert!(gangs.join(ClientId(most + 1), &user, 20).is_empty());
        assert_ne!(gangs.of(ClientId(most + 1)), gang);
        // A client that is in no gang causes no merge.
        gangs.join(ClientId(most + 2), &user, 20);
        assert_eq!(gangs.of(ClientId(most + 2)), gang);
        for client in 1..=most + 2 {
            gangs.leave(ClientId(client), &user.tenant);
        }
        assert!(gangs.named.is_empty() && gangs.gangs.is_empty() && gangs.clients.is_empty());
    }

    #[test]
    fn a_gang_lasts_until_its_last_member_has_left() {
        let (mut gangs, user) = (Gangs::default(), user(1000));
        for (client, name) in [(1, 10), (2, 10), (2, 20), (3, 20)] {
            gangs.join(ClientId(client), &user, name);
        }
        let gang = gangs.of(ClientId(1));
        gangs.leave(ClientId(2), &user.tenant);
        assert_eq!([1, 2, 3].map(|client| gangs.of(ClientId(client))), [gang, 0, gang]);
        gangs.leave(ClientId(1), &user.tenant);
        gangs.leave(ClientId(3), &user.tenant);
        assert!(gangs.named.is_empty() && gangs.gangs.is_empty() && gangs.clients.is_empty());
        gangs.join(ClientId(4), &user, 10);
        assert_ne!(gangs.of(ClientId(4)), gang);
    }

    #[test]
    fn names_are_those_of_one_tenant_and_limited() {
        let (mut gangs, one, other) = (Gangs::default(), user(1000), user(1001));
        gangs.join(ClientId(1), &one, 10);
        gangs.join(ClientId(2), &other, 10);
        assert_ne!(gangs.of(ClientId(1)), gangs.of(ClientId(2)));
        let unplaced = Identity { placed: false, ..user(1000) };
        gangs.join(ClientId(3), &unplaced, 10);
        gangs.join(ClientId(3), &unplaced, 11);
        assert!(![0, gangs.of(ClientId(1))].contains(&gangs.of(ClientId(3))));
        assert!(gangs.join(ClientId(1), &one, 0).is_empty());
        (0..100).for_each(|name| drop(gangs.join(ClientId(1), &one, 1000 + name)));
        assert_eq!(gangs.clients[&ClientId(1)].names.len(), MAX_NAMES);
    }
}
