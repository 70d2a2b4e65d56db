//! Sets of GPUs and gangs are granted and revoked as a whole.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

#[test]
fn requests_are_served_in_order_and_gpu_sets_are_granted_whole() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    for n in 1..=4 {
        t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(0) });
        for g in [0, 1] {
            t.say(Event::Attached { client: client(n), gpu: gpu(g), engine: Engine::Swap });
        }
    }
    let ask = |t: &mut Talk, n, set| t.say(Event::Requested { client: client(n), gpus: set });
    assert_eq!(ask(&mut t, 1, gpus([0])), [grant(1)]);
    ask(&mut t, 2, gpus([0, 1]));
    t.after(ms(900));
    assert_eq!(ask(&mut t, 3, gpus([1])), [], "GPU 1 is free, but kept for 2, whose turn begins soon");
    let both = |n| Command::Grant { client: client(n), gpus: gpus([0, 1]) };
    let commands = t.release(1, ReleaseReason::Idle);
    assert!(commands.contains(&both(2)), "{commands:?}");
    ask(&mut t, 4, gpus([0]));
    t.after(Duration::from_secs(1));
    let all =
        Event::Released { client: client(2), gpus: gpus([0, 1]), reason: ReleaseReason::Revoked, busy: Duration::ZERO };
    let commands = t.say(all);
    assert!(commands.contains(&Command::Grant { client: client(3), gpus: gpus([1]) }));
    assert!(commands.contains(&grant(4)));
}

#[test]
fn a_gpu_set_does_not_overtake_a_waiting_overlapping_set() {
    let mut t = Talk::in_mode(AntiThrash::On);
    for g in [1, 2] {
        t.say(Event::GpuFound { gpu: gpu(g), total: 16 * GIB });
    }
    for n in 1..=3 {
        t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(0) });
        for g in 0..3 {
            t.say(Event::Attached { client: client(n), gpu: gpu(g), engine: Engine::Swap });
        }
    }
    let ask = |t: &mut Talk, n, set| t.say(Event::Requested { client: client(n), gpus: set });
    ask(&mut t, 1, gpus([0]));
    ask(&mut t, 2, gpus([0, 1]));
    assert_eq!(ask(&mut t, 3, gpus([1, 2])), [], "both are free, but 2 stands before it for one of them");
    let commands = t.release(1, ReleaseReason::Idle);
    assert_eq!(commands.first(), Some(&Command::Grant { client: client(2), gpus: gpus([0, 1]) }));
}

#[test]
fn gpus_granted_together_are_revoked_together() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    t.join(1, 0);
    t.say(Event::Attached { client: client(1), gpu: gpu(1), engine: Engine::Swap });
    t.join(2, 0);
    t.say(Event::Requested { client: client(1), gpus: gpus([0, 1]) });
    t.request(2);
    let commands = t.after(Duration::from_secs(1));
    assert_eq!(commands, [Command::Revoke { client: client(1), gpus: gpus([0, 1]) }]);
}

#[test]
fn a_holders_request_for_another_gpu_grants_only_that_gpu() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    t.join(1, 0);
    t.say(Event::Attached { client: client(1), gpu: gpu(1), engine: Engine::Swap });
    t.request(1);
    let commands = t.say(Event::Requested { client: client(1), gpus: gpus([0, 1]) });
    assert_eq!(commands, [Command::Grant { client: client(1), gpus: gpus([1]) }]);
}

#[test]
fn a_gang_waits_for_its_members_and_is_granted_whole() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    for n in [1, 2] {
        t.say(Event::Connected { client: client(n), gang: 9, tenant: TenantId(0) });
        t.say(Event::Attached { client: client(n), gpu: gpu(n - 1), engine: Engine::Swap });
    }
    assert_eq!(t.say(Event::Requested { client: client(1), gpus: gpus([0]) }), []);
    let commands = t.say(Event::Requested { client: client(2), gpus: gpus([1]) });
    assert_eq!(commands, [grant(1), Command::Grant { client: client(2), gpus: gpus([1]) }]);
    t.join(3, 0);
    t.request(3);
    let commands = t.after(Duration::from_secs(1));
    assert_eq!(commands, [revoke(1), Command::Revoke { client: client(2), gpus: gpus([1]) }]);
}

#[test]
fn a_rule_with_gang_makes_its_group_a_gang() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    for n in [1, 2] {
        t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(n) });
        t.say(Event::Attached { client: client(n), gpu: gpu(n - 1), engine: Engine::Swap });
    }
    let rule = |gang| {
        let group = Group { id: GroupId(3), limits: RuleLimits { gang, ..RuleLimits::default() } };
        Event::Groups { groups: [1, 2].map(|n| (client(n), Some(group))).into() }
    };
    t.say(rule(true));
    assert_eq!(t.machine.client(client(1)).map(|view| view.gang_peers), Some(vec![client(2)]));
    assert_eq!(t.say(Event::Requested { client: client(1), gpus: gpus([0]) }), [], "it waits for its fellow");
    let both = [grant(1), Command::Grant { client: client(2), gpus: gpus([1]) }];
    assert_eq!(t.say(Event::Requested { client: client(2), gpus: gpus([1]) }), both);
    // The rule changes while one member is due to be revoked, so the other member may continue.
    t.say(rule(false));
    assert_eq!(t.machine.client(client(1)).map(|view| view.gang_peers), Some(vec![]));
    t.join(3, 0);
    t.request(3);
    assert_eq!(t.after(Duration::from_secs(1)), [revoke(1)]);
    // A member that waits when the rule takes effect is granted together with the others.
    t.release(1, ReleaseReason::Revoked);
    t.request(1);
    t.say(rule(true));
    assert_eq!((t.state(1), t.state(3)), (LockState::Waiting, LockState::Holding));
    assert_eq!(t.say(Event::Disconnected { client: client(3) }), [grant(1)]);
    // Both clients are one gang again, although one was granted the lock while it was alone.
    t.join(4, 0);
    t.request(4);
    assert_eq!(t.after(Duration::from_secs(1)), [revoke(1), Command::Revoke { client: client(2), gpus: gpus([1]) }]);
}

#[test]
fn a_gang_does_not_wait_for_members_idle_for_long() {
    let mut t = Talk::in_mode(AntiThrash::On);
    for n in [1, 2] {
        t.say(Event::Connected { client: client(n), gang: 9, tenant: TenantId(0) });
        t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
    }
    t.after(Duration::from_secs(2));
    assert_eq!(t.request(1), [grant(1)]);
    assert_eq!(t.release(1, ReleaseReason::Idle), []);
    // Client 2 waits briefly for client 1, which has just released the lock. Client 3 must not
    // overtake the waiting gang.
    assert_eq!(t.request(2), [], "the first was here a moment ago");
    t.join(3, 0);
    assert_eq!(t.request(3), [], "the place is the gang's");
    assert_eq!(t.after(ms(5)), [grant(2), contended(2, 1, ms(1))]);
}

#[test]
fn a_gang_of_one_runs_alone_until_another_member_joins() {
    let mut t = Talk::in_mode(AntiThrash::On);
    let arrive = |t: &mut Talk, n| {
        t.say(Event::Connected { client: client(n), gang: 9, tenant: TenantId(0) });
        t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
    };
    arrive(&mut t, 1);
    assert_eq!(t.request(1), [grant(1)], "there is nobody to wait for");
    arrive(&mut t, 2);
    assert_eq!(t.request(2), [grant(2)], "beside its fellow");
    t.join(3, 0);
    t.request(3);
    assert_eq!(t.after(Duration::from_secs(1)), [revoke(1), revoke(2)]);
}

#[test]
fn a_stopped_member_blocks_a_declared_gang_but_not_a_rules_gang() {
    for (by_rule, expected) in [(false, vec![]), (true, vec![grant(2)])] {
        let mut t = Talk::in_mode(AntiThrash::On);
        t.join(3, 0);
        t.request(3);
        for n in [1, 2] {
            let gang = if by_rule { 0 } else { 9 };
            t.say(Event::Connected { client: client(n), gang, tenant: TenantId(0) });
            t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
        }
        if by_rule {
            let group = Group { id: GroupId(3), limits: RuleLimits { gang: true, ..RuleLimits::default() } };
            t.say(Event::Groups { groups: [1, 2].map(|n| (client(n), Some(group))).into() });
        }
        t.request(1);
        t.request(2);
        t.say(Event::Stopped { client: client(1), stopped: true });
        assert_eq!(t.release(3, ReleaseReason::Idle), expected, "by a rule: {by_rule}");
        let both = if by_rule { vec![grant(1)] } else { vec![grant(1), grant(2)] };
        assert_eq!(t.say(Event::Stopped { client: client(1), stopped: false }), both);
    }
}

/// In `auto`, clients 1 and 2 are a gang that has the GPU, and client 3 doesn't request it yet.
/// Each client fills the GPU.
fn with_a_gang_in_auto(time_quantum: Duration, max_wait: Duration) -> Talk {
    let mut t = Talk::new(Settings { max_wait, ..settings(AntiThrash::Auto, time_quantum) });
    let fills_the_gpu = |n| Event::Utilization { client: client(n), gpu: gpu(0), permille: 1000 };
    t.join(3, 0);
    t.request(3);
    t.say(fills_the_gpu(3));
    t.release(3, ReleaseReason::Idle);
    for n in [1, 2] {
        t.say(Event::Connected { client: client(n), gang: 9, tenant: TenantId(0) });
        t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
        t.request(n);
    }
    t.after(ms(5));
    assert_eq!([t.state(1), t.state(2)], [LockState::Holding; 2]);
    t.say(fills_the_gpu(1));
    t.say(fills_the_gpu(2));
    t
}

#[test]
fn a_turn_of_a_gang_is_33_times_as_long_as_its_hand_over() {
    let mut t = with_a_gang_in_auto(Duration::from_secs(5), Duration::ZERO);
    // Until a hand-over has been measured, the scheduler assumes 50 ms for it. A member of the gang
    // may also be idle for 50 ms.
    assert_eq!(t.request(3), [contended(1, 1, ms(50)), contended(2, 1, ms(50))]);
    assert_eq!(t.after(ms(1649)), []);
    assert_eq!(t.after(ms(1)), [revoke(1), revoke(2)]);
    t.after(ms(10));
    t.release(1, ReleaseReason::Revoked);
    t.after(ms(2));
    assert_eq!(t.release(2, ReleaseReason::Revoked)[..1], [grant(3)], "after 12 ms");
    t.request(1);
    t.request(2);
    t.release(3, ReleaseReason::Idle);
    t.after(ms(5));
    assert_eq!([t.state(1), t.state(2)], [LockState::Holding; 2]);
    assert_eq!(t.request(3), [contended(1, 1, ms(12)), contended(2, 1, ms(12))]);
    assert_eq!(t.after(ms(395)), []);
    assert_eq!(t.after(ms(1)), [revoke(1), revoke(2)]);
}

#[test]
fn a_turn_of_a_gang_exceeds_neither_the_time_quantum_nor_max_wait() {
    for (time_quantum, max_wait) in [(ms(700), Duration::ZERO), (ms(5000), ms(700))] {
        let mut t = with_a_gang_in_auto(time_quantum, max_wait);
        t.request(3);
        assert_eq!(t.after(ms(699)), [], "{time_quantum:?}, {max_wait:?}");
        assert_eq!(t.after(ms(1)), [revoke(1), revoke(2)], "{time_quantum:?}, {max_wait:?}");
    }
}

/// If the returning member did not go first, the other member would wait for the gang to drain, and
/// the gang would wait for the other member.
#[test]
fn a_member_returning_during_its_gangs_turn_goes_first() {
    let mut t = Talk::in_mode(AntiThrash::On);
    for n in [1, 2] {
        t.say(Event::Connected { client: client(n), gang: 9, tenant: TenantId(0) });
        t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
    }
    t.join(3, 0);
    t.join(4, 0);
    t.request(4);
    t.request(1);
    t.request(2);
    t.after(ms(10));
    t.request(3);
    t.after(ms(10));
    assert_eq!(t.release(4, ReleaseReason::Idle)[..2], [grant(1), grant(2)]);
    t.after(ms(900));
    t.release(1, ReleaseReason::Idle);
    assert_eq!(t.request(1)[..1], [grant(1)]);
    t.release(1, ReleaseReason::Idle);
    t.after(ms(100));
    assert_eq!(t.state(2), LockState::Revoking, "the turn is over");
    assert_eq!(t.request(1), []);
    assert_eq!(t.release(2, ReleaseReason::Revoked)[..1], [grant(3)]);
}
