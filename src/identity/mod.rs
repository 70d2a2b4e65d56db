//! Who a process is: its user and groups, control group, systemd unit, container and pod. Rules match on it, and the
//! scheduler shows it; it is the kernel's word (`daemon::transport::peer`), never the process's own.

mod cgroup;

pub use cgroup::{Cgroup, Owned, is_slice, is_unit, name};

/// A process that connected.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Identity {
    /// 0 where the process is in a PID namespace that we cannot see into.
    pub pid: i32,
    pub uid: u32,
    /// The short name (`comm`), which everybody may know; empty where unknown.
    pub name: String,
    /// The command line, which only its user and root may see.
    pub command: String,
    /// What it wants the lock for, where it says so.
    pub why: String,
    /// The systemd unit, like `session-2.scope` or `jupyter.service`; empty where there is none.
    pub unit: String,
    pub slice: String,
    /// The id of its container, shortened as container tools show it; empty where there is none.
    pub container: String,
    /// The pod of Kubernetes that it is in, as far as that is known.
    pub pod: Pod,
    /// All groups of users that it is in. As the kernel kept them with the socket when it connected, as the user: what
    /// `/proc` says later is of another moment, perhaps of another process, and nothing in another PID namespace.
    pub groups: Vec<u32>,
    pub cgroup: Cgroup,
    /// The kernel said where it belongs: where nothing is said of a container, there is none.
    pub placed: bool,
}

/// A pod, and the container in it. The kernel gives the UID; an agent that asks Kubernetes tells the rest.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Pod {
    /// Empty where there is no pod.
    pub uid: String,
    pub namespace: String,
    pub name: String,
    pub container: String,
}

impl Identity {
    /// Whether one of the two may open memory that the other exports: they are of one user, in one container or both in
    /// none. Of a process that cannot be seen, the container is not known.
    pub fn may_share_with(&self, other: &Self) -> bool {
        self.placed && other.placed && (self.uid, &self.container) == (other.uid, &other.container)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_shared_within_a_user_and_a_container_only() {
        let process =
            |uid, container: &str, placed| Identity { uid, container: container.into(), placed, ..Identity::default() };
        let one = process(1000, "a", true);
        assert!(one.may_share_with(&process(1000, "a", true)));
        for other in [(1001, "a", true), (1000, "b", true), (1000, "", true), (1000, "a", false)] {
            let other = process(other.0, other.1, other.2);
            assert!(!one.may_share_with(&other) && !other.may_share_with(&one), "{other:?}");
        }
    }
}
