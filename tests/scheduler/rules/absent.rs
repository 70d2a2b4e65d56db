//! Clients that are stopped, silent or dead, and a scheduler that has just started.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

#[test]
fn other_clients_run_while_a_holder_is_stopped() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 4 * GIB);
    t.join(2, 4 * GIB);
    t.request(1);
    t.request(2);
    t.after(Duration::from_secs(1));
    assert_eq!(t.after(Duration::from_secs(1)), [Command::Probe { client: client(1) }]);
    assert_eq!(t.say(Event::Stopped { client: client(1), stopped: true }), [grant(2)]);
    assert_eq!(t.attachment(1).state, LockState::Suspended);
    assert_eq!(t.attachment(1).charge, 4 * GIB, "its bytes are where they are");
    t.say(Event::Stopped { client: client(1), stopped: false });
    t.release(1, ReleaseReason::Revoked);
    assert_eq!(t.attachment(2).state, LockState::Holding);
}

/// Client 1 has all its memory mapped, was revoked, and has been silent since then. Its process
/// still runs. Returns the last commands.
fn silent(mut t: Talk, seconds: u64) -> (Talk, Vec<Command>) {
    assert_eq!(t.after(Duration::from_secs(1)), [revoke(1)]);
    let mut last = Vec::new();
    for _ in 0..seconds {
        last = t.after(Duration::from_secs(1));
        if last.contains(&Command::Probe { client: client(1) }) {
            t.say(Event::Stopped { client: client(1), stopped: false });
        }
    }
    (t, last)
}

#[test]
fn a_silent_running_holder_is_probed_with_backoff() {
    let mut t = Talk::with_waiter();
    t.after(Duration::from_secs(1));
    let mut looks = Vec::new();
    for second in 1..=36 {
        if t.after(Duration::from_secs(1)).contains(&Command::Probe { client: client(1) }) {
            t.say(Event::Stopped { client: client(1), stopped: false });
            looks.push(second);
        }
    }
    assert_eq!(looks, [1, 2, 4, 8, 16, 26, 36]);
}

#[test]
fn other_clients_run_beside_a_silent_running_holder() {
    let (t, commands) = silent(Talk::with_waiter(), 4);
    assert_eq!((t.state(1), commands.contains(&grant(2))), (LockState::Revoking, false), "it has 5 s");
    let (mut t, commands) = silent(Talk::with_waiter(), 5);
    assert!(commands.contains(&undrainable(1)) && commands.contains(&grant(2)), "{commands:?}");
    assert_eq!((t.attachment(1).charge, t.state(2)), (GIB, LockState::Holding), "nothing says that it has less");
    t.release(1, ReleaseReason::Revoked);
    assert_eq!(t.state(1), LockState::Idle);
    // A silent client doesn't show how long its work takes, so its next turn has the full length.
    t.request(1);
    t.release(2, ReleaseReason::Idle);
    t.request(2);
    let (t, commands) = silent(t, 4);
    assert_eq!((t.state(1), commands.contains(&grant(2))), (LockState::Revoking, false));
}

#[test]
fn a_holder_that_sends_reports_has_a_minute_to_drain() {
    let mut t = Talk::with_waiter();
    assert_eq!(t.after(Duration::from_secs(1)), [revoke(1)]);
    for second in 1..=60 {
        let commands = t.after(Duration::from_secs(1));
        assert_eq!(commands.contains(&grant(2)), second == 60, "after {second} s: {commands:?}");
        t.report(1, GIB, GIB, 0);
    }
}

/// A process without a context on the GPU has no memory there, whatever it reports.
#[test]
fn a_silent_holder_withholds_only_its_measured_memory() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 12 * GIB);
    t.join(2, 12 * GIB);
    t.request(1);
    t.request(2);
    let (mut t, commands) = silent(t, 5);
    assert!(commands.contains(&undrainable(1)) && commands.contains(&Command::Measure { gpu: gpu(0) }), "{commands:?}");
    assert_eq!(t.state(2), LockState::Waiting, "12 of 16 GiB are the other's, as far as is known");
    let found = [(client(1), Found { least: 0, most: 0 }), (client(2), Found { least: 0, most: 4 * GIB })];
    let begun = t.now;
    t.say(Event::Measured { gpu: gpu(0), begun, free: None, evicted: 0, found: found.into() });
    t.map(2);
    assert_eq!((t.attachment(1).charge, t.state(2)), (0, LockState::Holding));
}

#[test]
fn a_disconnected_client_gets_no_messages() {
    let mut t = Talk::in_mode(AntiThrash::Off);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    t.join(1, 16 * GIB);
    t.request(1);
    t.join(2, 16 * GIB);
    t.say(Event::Attached { client: client(2), gpu: gpu(1), engine: Engine::Swap });
    t.say(Event::Requested { client: client(2), gpus: gpus([0, 1]) });
    let commands = t.say(Event::Disconnected { client: client(2) });
    assert_eq!(commands, [contended(1, 0, ms(1))], "what is left of its request is not granted");
}

#[test]
fn a_client_of_an_earlier_scheduler_keeps_its_memory() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(0) });
    t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Swap });
    let report =
        MemoryReport { ack: 0, demand: 6 * GIB, mapped: 5 * GIB, swapped: GIB, pinned: 0, limit_ack: u32::MAX };
    let commands = t.say(Event::Memory { client: client(1), gpu: gpu(0), report });
    assert_eq!(allowances(&commands), [(1, 5 * GIB), (1, 6 * GIB)]);
}
