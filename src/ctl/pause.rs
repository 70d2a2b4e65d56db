//! `nvsharectl pause` and `resume`: checkpoint programs and restore them.

use super::{CtlError, Target, block_on, password};
use crate::bus::{Client, SchedulerProxy};

/// Pauses programs until they are resumed.
///
/// # Errors
/// The program does not exist, or the scheduler refuses.
pub fn pause(target: &Target, program: &str) -> Result<(), CtlError> {
    call(target, program, "Pause")
}

/// Resumes paused programs.
///
/// # Errors
/// The program does not exist, or the scheduler refuses.
pub fn resume(target: &Target, program: &str) -> Result<(), CtlError> {
    call(target, program, "Resume")
}

fn call(target: &Target, program: &str, method: &str) -> Result<(), CtlError> {
    block_on(async {
        let scheduler = target.connect().await?;
        for pid in pids(&scheduler, program).await? {
            password::call::<()>(&scheduler, method, &(pid,)).await?;
        }
        Ok(())
    })
}

/// Returns the selected processes. `program` is a pid, or names a unit, a container or a pod.
///
/// # Errors
/// No process matches.
pub(super) async fn pids(scheduler: &SchedulerProxy<'_>, program: &str) -> Result<Vec<u32>, CtlError> {
    let pids = match program.parse() {
        Ok(pid) => vec![pid],
        Err(_) => pids_of(&scheduler.list_clients().await?, program),
    };
    let none = || CtlError::Failed(format!("no unit, container or pod named {program:?} has a program under nvshare"));
    (!pids.is_empty()).then_some(pids).ok_or_else(none)
}

/// Returns the processes of the programs in a unit, a container or a pod. A container is named by
/// its whole id or a prefix. [`Client`] contains only 12 digits of the id. A pod is named as
/// `namespace/name`.
fn pids_of(clients: &[Client], program: &str) -> Vec<u32> {
    let is_container = |container: &str| {
        program.len() >= 4
            && !container.is_empty()
            && (container.starts_with(program) || program.starts_with(container))
    };
    let pod = program.split_once('/').filter(|(_, name)| !name.is_empty());
    let is_pod = |client: &Client| pod.is_some_and(|pod| pod == (&*client.pod_namespace, &*client.pod_name));
    let is_meant = |client: &&Client| {
        !program.is_empty() && (client.unit == program || is_container(&client.container) || is_pod(client))
    };
    let mut pids: Vec<u32> = clients.iter().filter(is_meant).map(|client| client.pid).filter(|pid| *pid > 0).collect();
    pids.sort_unstable();
    pids.dedup();
    pids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_by_unit_container_and_pod() {
        let client = |pid, unit: &str, container: &str| Client {
            pid,
            unit: unit.into(),
            container: container.into(),
            ..Client::default()
        };
        let clients = [
            client(7, "jupyter.service", ""),
            client(8, "jupyter.service", "0123456789ab"),
            client(8, "jupyter.service", "0123456789ab"),
            client(0, "other.service", "0123456789ab"),
            client(9, "", ""),
            Client { pod_namespace: "team-a".into(), pod_name: "train".into(), ..client(10, "", "") },
        ];
        assert_eq!(pids_of(&clients, "jupyter.service"), [7, 8]);
        assert_eq!(pids_of(&clients, "01234"), [8]);
        assert_eq!(pids_of(&clients, "0123456789abcdef"), [8]);
        assert!(pids_of(&clients, "012").is_empty(), "too short to mean one");
        assert_eq!(pids_of(&clients, "team-a/train"), [10]);
        for other in ["", "/", "train", "team-a/", "team-b/train"] {
            assert!(pids_of(&clients, other).is_empty(), "{other:?}");
        }
    }
}
