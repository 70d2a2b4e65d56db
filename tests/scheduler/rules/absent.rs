//! Clients that are stopped, silent or dead, and a new scheduler.

use crate::talk::*;
use nvshare_sched::*;
use scheduler_sim::*;
use std::time::Duration;

#[test]
fn a_stopped_holder_is_routed_around() {
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

#[test]
fn a_silent_holder_that_runs_is_waited_for_and_looked_at_less_and_less_often() {
    let mut t = Talk::with_waiter();
    t.after(Duration::from_secs(1));
    for wait in [1, 1, 2, 4, 8, 10, 10] {
        assert_eq!(t.machine.deadline(), Some(t.now + Duration::from_secs(wait)));
        assert_eq!(t.after(Duration::from_secs(wait)), [Command::Probe { client: client(1) }]);
        assert_eq!(t.say(Event::Stopped { client: client(1), stopped: false }), []);
    }
}

#[test]
fn the_dead_are_told_nothing() {
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
