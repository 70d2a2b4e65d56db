//! The identity of a process: its user and groups, control group, systemd unit, container and pod,
//! and its tenant. Rules match on the identity, and the scheduler shows it. The data come from the
//! kernel (`daemon::transport::peer`), never from the process itself.

mod cgroup;
mod printable;
mod subordinate;
mod tenant;
mod user_name;

pub use cgroup::{Cgroup, Owned, is_slice, is_unit, name};
pub use printable::printable;
pub use subordinate::{accountable, groups};
pub use tenant::{Owners, Place, Tenant};
pub use user_name::{user_in_words, user_name};

/// The unit under which processes of further units are counted. No real unit has this name.
pub const OTHERS: &str = "others";

/// A process that connected.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Identity {
    /// The pid, or 0 if the scheduler's PID namespace does not contain the process.
    pub pid: i32,
    pub uid: u32,
    /// The accountable user, if that is not `uid`. Then `uid` is, for example, a subordinate id or
    /// an id of another user namespace.
    pub owner: Option<u32>,
    /// The tenant that the process belongs to.
    pub tenant: Tenant,
    /// The short name (`comm`), which every user may see. Empty if unknown.
    pub name: String,
    /// The command line, which only the process's user and root may see.
    pub command: String,
    /// The reason that a D-Bus caller gave for its lock.
    pub why: String,
    /// The systemd unit, like `session-2.scope` or `jupyter.service`. Empty without a unit.
    pub unit: String,
    pub slice: String,
    /// The id of the container, shortened like in container tools. Empty without a container.
    pub container: String,
    /// The Kubernetes pod of the process, if known.
    pub pod: Pod,
    /// The Kubernetes ResourceClaim whose socket the process connected to.
    pub claim: Claim,
    /// The groups of the process, as the kernel recorded them at the connection, and the groups of
    /// `owner`. `/proc` is unsuitable: it shows the groups at a later time, perhaps of another
    /// process with the same pid, and shows no process of another PID namespace.
    pub groups: Vec<u32>,
    pub cgroup: Cgroup,
    /// Whether the process's unit and container are counted under [`OTHERS`], because its tenant has too
    /// many.
    pub is_among_others: bool,
    /// Whether the kernel showed the control group. If true, an empty `container` means that the
    /// process is in no container.
    pub placed: bool,
}

/// A pod, and the container in it. The kernel provides the UID. The agent that queries Kubernetes
/// provides the names.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Pod {
    /// Empty without a pod.
    pub uid: String,
    pub namespace: String,
    pub name: String,
    pub container: String,
}

/// A ResourceClaim. Kubernetes mounts a claim's socket only into containers that use the claim, so
/// the UID is as trustworthy as data from the kernel. The device plugin provides the names.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct Claim {
    /// Empty without a claim.
    pub uid: String,
    pub namespace: String,
    pub name: String,
}

impl Identity {
    /// The short name for messages: "a program" if the name is unknown.
    pub fn label(&self) -> &str {
        if self.name.is_empty() { "a program" } else { &self.name }
    }

    /// The user that is accountable for the process. Rules and budgets for users apply to this
    /// user.
    pub fn accountable(&self) -> u32 {
        self.owner.unwrap_or(self.uid)
    }

    /// The unit under which metrics, pressure and usage records count the process.
    pub fn counted_unit(&self) -> &str {
        if self.is_among_others { OTHERS } else { &self.unit }
    }

    /// The container under which metrics, pressure and usage records count the process. A container
    /// that root's runtime created is a tenant of its own, so it keeps its name.
    pub fn counted_container(&self) -> &str {
        let is_invented = self.is_among_others && matches!(self.tenant, Tenant::User(_));
        if is_invented { "" } else { &self.container }
    }

    /// Returns true if either process may open memory that the other exports, because both belong
    /// to the same tenant. If a process is not visible, its container is unknown, so it cannot
    /// share memory with any process.
    pub fn may_share_with(&self, other: &Self) -> bool {
        self.placed && other.placed && self.tenant == other.tenant
    }

    /// Returns true if `other` is the process `pid`, and a process of this tenant may name it.
    pub fn is_neighbour(&self, other: &Self, pid: i32) -> bool {
        pid > 0 && other.pid == pid && self.may_share_with(other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_names_only_visible_processes_of_its_tenant() {
        let process = |pid, uid, placed| Identity { pid, tenant: Tenant::User(uid), placed, ..Identity::default() };
        let own = process(1, 1000, true);
        assert!(own.is_neighbour(&process(2, 1000, true), 2));
        for (other, pid) in [((2, 1000, true), 3), ((2, 1001, true), 2), ((2, 1000, false), 2), ((0, 1000, true), 0)] {
            assert!(!own.is_neighbour(&process(other.0, other.1, other.2), pid), "{other:?}");
        }
        assert!(!process(1, 1000, false).is_neighbour(&process(2, 1000, true), 2), "its container is unknown");
    }

    #[test]
    fn memory_is_shared_within_a_tenant_only() {
        let process = |tenant, placed| Identity { tenant, placed, ..Identity::default() };
        let container = |id: &str| Tenant::Container(id.into());
        let one = process(container("a"), true);
        assert!(one.may_share_with(&process(container("a"), true)));
        for other in [(container("b"), true), (Tenant::User(1000), true), (container("a"), false)] {
            let other = process(other.0, other.1);
            assert!(!one.may_share_with(&other) && !other.may_share_with(&one), "{other:?}");
        }
    }
}
