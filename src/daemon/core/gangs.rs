//! Gangs: clients whose kernels wait for each other, so that they must run together.

use std::collections::{BTreeMap, BTreeSet};

use crate::identity::{Identity, Tenant};
use crate::scheduler::ClientId;

/// The gangs that have clients, by tenant and the name that clients send.
#[derive(Debug, Default)]
pub(super) struct Gangs {
    gangs: BTreeMap<(Tenant, u64), Gang>,
    last: u64,
}

#[derive(Debug)]
struct Gang {
    /// The scheduler's number of this gang.
    number: u64,
    members: BTreeSet<ClientId>,
}

impl Gangs {
    /// The scheduler's number of the gang whose name a client sent, or 0 for no gang. Two clients are in the
    /// same gang if both the name and the tenant are equal.
    pub fn join(&mut self, client: ClientId, identity: &Identity, name: u64) -> u64 {
        if name == 0 {
            return 0;
        }
        if !identity.placed {
            self.last += 1;
            return self.last; // alone: without a control group, the tenant is uncertain
        }
        let gang = self.gangs.entry((identity.tenant.clone(), name)).or_insert_with(|| {
            self.last += 1;
            Gang { number: self.last, members: BTreeSet::new() }
        });
        gang.members.insert(client);
        gang.number
    }

    pub fn leave(&mut self, client: ClientId, tenant: &Tenant, name: u64) {
        let key = (tenant.clone(), name);
        if let Some(gang) = self.gangs.get_mut(&key) {
            gang.members.remove(&client);
            if gang.members.is_empty() {
                self.gangs.remove(&key);
            }
        }
    }
}
