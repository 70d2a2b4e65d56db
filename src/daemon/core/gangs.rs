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

/// The clients in gangs. A message takes time in proportion to their number, which its tenant's budget pays for.
#[derive(Debug, Default)]
pub(super) struct Gangs {
    clients: BTreeMap<ClientId, Member>,
    last: u64,
}

#[derive(Debug)]
struct Member {
    /// The scheduler's number of the gang.
    gang: u64,
    /// The names that the client gave. Clients that gave the same name are in the same gang, unless it would be too
    /// large to merge.
    names: BTreeSet<(Tenant, u64)>,
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
        let own = self.clients.get(&client);
        if name == 0 || own.is_some_and(|member| member.names.len() >= MAX_NAMES) {
            return BTreeSet::new();
        }
        // Without a control group, the tenant is uncertain, so the client stays alone.
        let name = identity.placed.then(|| (identity.tenant.clone(), name));
        let has_name = |member: &&Member| name.as_ref().is_some_and(|name| member.names.contains(name));
        let others = self.clients.values().find(has_name).map(|member| member.gang);
        let gang = own.map(|member| member.gang).or(others).unwrap_or(self.last + 1);
        self.last = self.last.max(gang);
        self.clients.entry(client).or_insert(Member { gang, names: BTreeSet::new() }).names.extend(name);
        self.merge(gang, others.unwrap_or(gang))
    }

    /// Makes one gang of two. Returns the members of the smaller one, whose gang has changed.
    fn merge(&mut self, one: u64, other: u64) -> BTreeSet<ClientId> {
        let members = |gang: u64| -> BTreeSet<ClientId> {
            self.clients.iter().filter(|(_, member)| member.gang == gang).map(|(client, _)| *client).collect()
        };
        if one == other {
            return BTreeSet::new();
        }
        let (of_one, of_other) = (members(one), members(other));
        if of_one.len() + of_other.len() > MOST_MERGED {
            return BTreeSet::new();
        }
        let (moved, larger) = if of_one.len() < of_other.len() { (of_one, other) } else { (of_other, one) };
        for client in &moved {
            self.clients.entry(*client).and_modify(|member| member.gang = larger);
        }
        moved
    }

    pub fn leave(&mut self, client: ClientId) {
        self.clients.remove(&client);
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
            gangs.leave(ClientId(client));
        }
        assert!(gangs.clients.is_empty());
    }

    #[test]
    fn a_gang_lasts_until_its_last_member_has_left() {
        let (mut gangs, user) = (Gangs::default(), user(1000));
        for (client, name) in [(1, 10), (2, 10), (2, 20), (3, 20)] {
            gangs.join(ClientId(client), &user, name);
        }
        let gang = gangs.of(ClientId(1));
        gangs.leave(ClientId(2));
        assert_eq!([1, 2, 3].map(|client| gangs.of(ClientId(client))), [gang, 0, gang]);
        gangs.leave(ClientId(1));
        gangs.leave(ClientId(3));
        assert!(gangs.clients.is_empty());
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
