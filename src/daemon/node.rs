//! Checks that a daemon in a pod sees the processes of its node. The daemon identifies clients by their processes, and for a
//! peer in another PID namespace the kernel reports process ID 0.

use std::path::Path;

use crate::identity::Cgroup;

/// The initial PID namespace of every Linux kernel (`PROC_PID_INIT_INO`).
const INITIAL: &str = "pid:[4026531836]";

/// # Errors
/// A sentence with the remedy if the daemon cannot see the node's processes.
pub fn sees_the_host() -> Result<(), String> {
    let namespace = Path::new("/proc/self/ns/pid").read_link().unwrap_or_default();
    let read = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    // A node can itself be a container. Its first process is then not in the machine's initial PID namespace.
    if namespace == Path::new(INITIAL) || is_of_a_node(&read("/proc/1/cgroup"), &read("/proc/self/cgroup")) {
        return Ok(());
    }
    Err("this pod has its own PID namespace, so the scheduler cannot identify programs. Set hostPID: true for the pod"
        .into())
}

/// True if the first process is the node's: it is in no container, and not in this process's own control group.
fn is_of_a_node(first: &str, own: &str) -> bool {
    !first.is_empty() && Cgroup::read(first).container().is_empty() && first != own
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn the_first_process_is_the_nodes_or_one_of_a_pod() {
        let in_pod = format!("0::/kubepods/podx/{ID}\n");
        let cases = [
            // With a control group namespace of its own, which pods have.
            ("0::/../../../init.scope\n".to_owned(), "0::/\n".to_owned(), true),
            ("0::/../../..\n".to_owned(), "0::/\n".to_owned(), true),
            ("0::/\n".to_owned(), "0::/\n".to_owned(), false),
            (format!("0::/../cri-containerd-{ID}.scope\n"), "0::/\n".to_owned(), false),
            // Without a control group namespace of its own.
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
