//! Checks that a daemon in a pod can see the processes of its node. The daemon identifies clients by
//! their processes. If a peer is in a PID namespace that the daemon cannot see, the kernel reports PID
//! 0 for it.

use std::path::Path;

use crate::identity::Cgroup;

/// The initial PID namespace of Linux. The inode number is the same on every kernel
/// (`PROC_PID_INIT_INO`).
const INITIAL: &str = "pid:[4026531836]";

/// Checks that the daemon can see the node's processes.
///
/// # Errors
/// Returns a sentence with the remedy if the daemon cannot see these processes.
pub fn sees_the_host() -> Result<(), String> {
    let namespace = Path::new("/proc/self/ns/pid").read_link().unwrap_or_default();
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    // A node can itself be a container. The node's first process is then not in the machine's initial PID
    // namespace.
    if namespace == Path::new(INITIAL) || is_of_a_node(&read("/proc/1/cgroup"), &read("/proc/self/cgroup")) {
        return Ok(());
    }
    Err("this pod has its own PID namespace, so the scheduler cannot identify programs. Set hostPID: true for the pod"
        .into())
}

/// True if process 1 is the node's first process: process 1 is in no container, and not in the daemon's
/// own control group.
fn is_of_a_node(first: &str, own: &str) -> bool {
    !first.is_empty() && Cgroup::read(first).container().is_empty() && first != own
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn pid_1_of_the_node_is_distinguished_from_pid_1_of_a_pod() {
        let in_pod = format!("0::/kubepods/podx/{ID}\n");
        let cases = [
            // The daemon is in a control group namespace of its own, as in most pods.
            ("0::/../../../init.scope\n".to_owned(), "0::/\n".to_owned(), true),
            ("0::/../../..\n".to_owned(), "0::/\n".to_owned(), true),
            ("0::/\n".to_owned(), "0::/\n".to_owned(), false),
            (format!("0::/../cri-containerd-{ID}.scope\n"), "0::/\n".to_owned(), false),
            // The daemon is in the node's control group namespace.
            ("0::/init.scope\n".to_owned(), in_pod.clone(), true),
            ("0::/\n".to_owned(), in_pod.clone(), true),
            (in_pod.clone(), in_pod, false),
            (String::new(), "0::/\n".to_owned(), false),
        ];
        for (first, own, expected) in cases {
            assert_eq!(is_of_a_node(&first, &own), expected, "{first:?} {own:?}");
        }
    }
}
