//! The identity of a process: its user and groups, control group, systemd unit, container and pod, and its tenant. Rules
//! match on it, and the scheduler shows it. It comes from the kernel (`daemon::transport::peer`), never from the process itself.

mod cgroup;
mod printable;
mod tenant;
mod user_name;

pub use cgroup::{Cgroup, Owned, is_slice, is_unit, name};
pub use printable::printable;
pub use tenant::{Place, Tenant};
pub use user_name::{user_in_words, user_name};

/// A process that connected.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Identity {
    /// 0 where the process is in a PID namespace that we cannot see into.
    pub pid: i32,
    pub uid: u32,
    /// Whose account it is on.
    pub tenant: Tenant,
    /// The short name (`comm`), which every user may see; empty if unknown.
    pub name: String,
    /// The command line, which only its user and root may see.
    pub command: String,
    /// The reason given for a lock over D-Bus.
    pub why: String,
    /// The systemd unit, like `session-2.scope` or `jupyter.service`; empty where there is none.
    pub unit: String,
    pub slice: String,
    /// The id of its container, shortened as container tools show it; empty where there is none.
    pub container: String,
    /// The pod of Kubernetes that it is in, as far as that is known.
    pub pod: Pod,
    /// The ResourceClaim of Kubernetes through whose socket it connected.
    pub claim: Claim,
    /// All its groups, as the kernel recorded them when it connected. `/proc` would show those of a later moment,
    /// perhaps of another process, and nothing of a process in another PID namespace.
    pub groups: Vec<u32>,
    pub cgroup: Cgroup,
    /// The kernel showed its control group: then an empty container means that it is in none.
    pub placed: bool,
}

/// A pod, and the container in it. The UID comes from the kernel, the names from the agent that queries Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pod {
    /// Empty where there is no pod.
    pub uid: String,
    pub namespace: String,
    pub name: String,
    pub container: String,
}

/// A ResourceClaim. Containers have the socket of a claim only if Kubernetes gave it to them, so the UID is as trustworthy as what
/// comes from the kernel. The names are from the device plugin.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Claim {
    /// Empty where there is no claim.
    pub uid: String,
    pub namespace: String,
    pub name: String,
}

impl Identity {
    /// True if one of the two may open memory that the other exports: both belong to the same tenant. The container of a
    /// process that is not visible is unknown, so such a process shares with none.
    pub fn may_share_with(&self, other: &Self) -> bool {
        self.placed && other.placed && self.tenant == other.tenant
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
