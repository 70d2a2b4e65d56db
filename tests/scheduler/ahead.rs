//! Host memory that clients allocate ahead of evictions, while their memory is still on a GPU.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

const REST: Duration = Duration::from_secs(3);

/// Client 1 has 4 GiB on the GPU, and the host can spare `spare` bytes.
fn with_client(spare: u64) -> Talk {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.say(Event::HostAhead { bytes: Some(spare) });
    t.join(1, 4 * GIB);
    t
}

fn prepare(n: u64, bytes: u64) -> Command {
    Command::Prepare { client: client(n), gpu: gpu(0), bytes }
}

/// Returns the empty host memory that each client may keep, according to the commands.
fn spares(commands: &[Command]) -> Vec<(u64, u64)> {
    let spare = |command: &Command| match command {
        Command::Limit { client, spare, .. } => Some((client.0, *spare)),
        _ => None,
    };
    commands.iter().filter_map(spare).collect()
}

#[test]
fn a_client_with_unchanged_memory_prepares_once_for_eviction() {
    let mut t = with_client(64 * GIB);
    assert_eq!(t.after(REST - ms(1)), []);
    assert!(!t.machine.is_ahead());
    assert_eq!(t.after(ms(1)), [prepare(1, 4 * GIB)]);
    assert!(t.machine.is_ahead());
    t.report(1, 4 * GIB, 4 * GIB, 0);
    assert_eq!(t.after(10 * REST), [], "nothing has changed");
    t.report(1, 6 * GIB, 4 * GIB, 0);
    t.map(1);
    assert_eq!(t.after(REST), [prepare(1, 6 * GIB)]);
    t.report(1, 3 * GIB, 3 * GIB, 0);
    assert_eq!(t.after(REST), [], "it has more than enough");
}

#[test]
fn changing_or_unevictable_memory_gets_no_buffers_ahead() {
    let mut t = with_client(64 * GIB);
    for n in 1..10 {
        assert_eq!(t.after(REST / 2), []);
        t.report(1, 4 * GIB + n * (2 << 20), 4 * GIB, 0);
        t.map(1);
    }
    t.report(1, 4 * GIB, 4 * GIB, 3 * GIB);
    t.after(ms(1));
    let asked = t.after(REST);
    assert_eq!(asked, [prepare(1, GIB)], "3 GiB are pinned");
    t.say(Event::Connected { client: client(2), gang: 0, tenant: TenantId(0) });
    t.say(Event::Attached { client: client(2), gpu: gpu(0), engine: Engine::Managed });
    t.report(2, GIB, 0, 0);
    t.map(2);
    assert!(!t.after(REST).contains(&prepare(2, GIB)), "the driver moves it");
}

#[test]
fn buffers_ahead_stay_within_the_hosts_spare_memory() {
    let mut t = with_client(5 * GIB);
    t.after(REST);
    t.join(2, 4 * GIB);
    assert_eq!(t.after(REST), [prepare(2, GIB)]);
    t.join(3, GIB);
    assert_eq!(t.after(REST), [], "there is no more");
    t.say(Event::Detached { client: client(1), gpu: gpu(0) });
    t.report(3, 2 * GIB, GIB, 0);
    t.map(3);
    let asked = t.after(REST);
    assert!(asked.contains(&prepare(3, 2 * GIB)), "{asked:?}");
}

#[test]
fn buffers_ahead_are_returned_under_host_memory_pressure() {
    let mut t = with_client(64 * GIB);
    t.after(REST);
    t.join(2, 0);
    assert_eq!(spares(&t.say(Event::HostAhead { bytes: None })), [(1, 0), (2, 0)]);
    assert!(!t.machine.is_ahead());
    t.report(1, 3 * GIB, 3 * GIB, 0);
    assert!(!t.after(REST).contains(&prepare(1, 3 * GIB)));
    assert_eq!(spares(&t.say(Event::HostAhead { bytes: Some(8 * GIB) })), [(1, u64::MAX), (2, u64::MAX)]);
    assert!(t.after(REST).contains(&prepare(1, 3 * GIB)));
    assert_eq!(spares(&t.say(Event::HostAhead { bytes: Some(GIB) })), [], "only what comes is bounded");
}

#[test]
fn no_buffers_are_made_ahead_if_host_memory_is_scarce() {
    let mut t = with_client(0);
    assert_eq!(t.after(REST), []);
    let mut t = with_client(64 * GIB);
    t.say(Event::HostMemory { bytes: GIB });
    t.join(2, 14 * GIB);
    let asked = t.after(REST);
    assert!(!asked.iter().any(|command| matches!(command, Command::Prepare { .. })), "{asked:?}");
}
