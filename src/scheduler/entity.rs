//! Entities are queued and granted as a unit. Owners are charged for turns.

use crate::api::{ClientId, GroupId, TenantId};

/// The unit of granting: a client, or the members of a gang together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) enum Entity {
    Solo(ClientId),
    Gang(Gang),
}

impl Entity {
    pub fn gang(self) -> Option<Gang> {
        match self {
            Self::Solo(_) => None,
            Self::Gang(gang) => Some(gang),
        }
    }
}

/// Clients whose kernels wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) enum Gang {
    /// The gang whose members gave this name.
    Named(u64),
    /// The clients of a group whose rule makes them a gang.
    Group(GroupId),
}

impl Gang {
    /// The gang of clients that gave this name. `None` for name 0.
    pub fn named(name: u64) -> Option<Self> {
        (name != 0).then_some(Self::Named(name))
    }
}

/// The owner of turns: clients with the same owner take turns as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) enum ShareOwner {
    Tenant(TenantId),
    Group(GroupId),
    /// A client whose environment sets a lower weight than its tenant or group has. The client's
    /// turns are charged both to the client and to its tenant or group.
    Client(ClientId),
    /// All clients without a share, if the policy does not make tenants take turns.
    Others,
}
