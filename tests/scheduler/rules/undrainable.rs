//! Holders whose work doesn't end. Other clients run beside them.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

#[test]
fn a_stuck_holder_is_revoked_again_with_backoff() {
    let mut t = Talk::with_waiter();
    assert_eq!(t.after(Duration::from_secs(1)), [revoke(1)]);
    let stuck = Event::Stuck { client: client(1), gpus: gpus([0]), reason: StuckReason::NeedsHost };
    assert_eq!(t.say(stuck.clone()), [waiting(2, WaitReason::HolderStuck)]);
    for wait in [100, 200, 400, 800] {
        assert_eq!(t.machine.deadline(), Some(t.now + ms(wait)));
        assert_eq!(t.after(ms(wait)), [revoke(1)]);
        assert_eq!(t.say(stuck.clone()), [], "its waiter knows");
    }
    assert_eq!(t.after(ms(1500)), [undrainable(1), grant(2)], "3 s after it was first asked");
    for wait in [100, 3200, 5000, 5000] {
        assert_eq!(t.machine.deadline(), Some(t.now + ms(wait)));
        assert_eq!(t.after(ms(wait)), [revoke(1)]);
        assert_eq!(t.say(stuck.clone()), []);
    }
    assert_eq!(t.release(1, ReleaseReason::Revoked), []);
    assert_eq!(t.machine.deadline(), None);
}

#[test]
fn no_client_runs_beside_a_stuck_holder_that_drains_in_time() {
    let mut t = Talk::with_waiter();
    t.after(Duration::from_secs(1));
    t.stuck(1, StuckReason::Capturing);
    t.after(ms(100));
    assert_eq!(t.after(ms(2800)), [Command::Probe { client: client(1) }]);
    assert_eq!(t.state(1), LockState::Stuck);
    assert_eq!(t.release(1, ReleaseReason::Revoked), [grant(2)]);
}

#[test]
fn a_holder_becomes_undrainable_by_time_and_not_by_report_count() {
    let mut t = Talk::with_waiter();
    t.after(Duration::from_secs(1));
    t.after(Duration::from_secs(2));
    t.stuck(1, StuckReason::LongWork);
    assert_eq!(t.after(ms(100)), [revoke(1)], "which it does not answer, as it drains already");
    assert_eq!(t.machine.deadline(), Some(t.now + ms(900)));
    assert_eq!(t.after(ms(900)), [undrainable(1), grant(2)]);
}

#[test]
fn a_holder_that_reports_stuck_too_late_is_undrainable_immediately() {
    let mut t = Talk::with_waiter();
    t.after(Duration::from_secs(1));
    t.after(Duration::from_secs(4));
    assert_eq!(t.state(1), LockState::Revoking, "it may only be slow");
    let commands = t.stuck(1, StuckReason::LongWork);
    assert_eq!(commands, [waiting(2, WaitReason::HolderStuck), undrainable(1), grant(2)]);
}

#[test]
fn clients_beside_an_undrainable_holder_take_turns() {
    let (mut t, commands) = Talk::with_undrainable(AntiThrash::On, [GIB, GIB]);
    assert_eq!(commands, [undrainable(1), grant(2)]);
    t.join(3, GIB);
    assert!(t.request(3).contains(&contended(2, 1, ms(1))), "one of them at a time");
    assert!(t.after(Duration::from_secs(1)).contains(&revoke(2)));
    assert_eq!(t.release(2, ReleaseReason::Revoked), [grant(3)]);
    assert_eq!(t.state(1), LockState::Undrainable);
    t.request(2);
    t.release(1, ReleaseReason::Revoked);
    assert_eq!(t.state(2), LockState::Waiting, "3 has its turn, and 1 left nothing to wait for");
    t.request(1);
    assert_eq!(t.release(3, ReleaseReason::Idle), [grant(2), contended(2, 1, ms(1))]);
}

/// A silent holder is charged when other clients are admitted beside it, although its hold does not
/// end.
#[test]
fn silent_clients_of_one_tenant_delay_another_tenant_once() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    let (silent, honest) = (TenantId(1), TenantId(2));
    for n in 1..=5 {
        t.join_of(silent, n, GIB);
        t.request(n);
    }
    t.join_of(honest, 6, GIB);
    t.request(6);
    let seconds = (1..=60).find(|_| t.after(Duration::from_secs(1)).contains(&grant(6)));
    assert!(seconds.is_some_and(|seconds| seconds <= 10), "{seconds:?}");
    assert_eq!((t.state(2), t.state(3)), (LockState::Waiting, LockState::Waiting));
}

#[test]
fn two_undrainable_holders_and_a_third_client_run_concurrently() {
    let (mut t, _) = Talk::with_undrainable(AntiThrash::On, [GIB, GIB]);
    t.join(3, GIB);
    t.request(3);
    assert!(t.after(Duration::from_secs(1)).contains(&revoke(2)));
    t.stuck(2, StuckReason::LongWork);
    assert_eq!(t.state(3), LockState::Waiting);
    let commands = t.after(Duration::from_secs(3));
    assert!(commands.contains(&undrainable(2)) && commands.contains(&grant(3)), "{commands:?}");
    t.release(3, ReleaseReason::Idle);
    t.request(3);
    assert_eq!(t.state(3), LockState::Holding, "at once");
    t.release(3, ReleaseReason::Idle);
    for n in [1, 2] {
        assert_eq!(t.state(n), LockState::Undrainable, "each is asked for the other");
    }
}

#[test]
fn an_undrainable_holder_keeps_its_bytes_and_others_are_evicted() {
    let (mut t, commands) = Talk::with_undrainable(AntiThrash::On, [6 * GIB, 4 * GIB]);
    assert_eq!(commands, [undrainable(1), grant(2)]);
    t.join(3, 10 * GIB);
    t.request(3);
    t.after(Duration::from_secs(1));
    let commands = t.release(2, ReleaseReason::Revoked);
    assert_eq!(allowances(&commands).last(), Some(&(2, 0)), "least recently run or not");
    assert!(t.map(2).contains(&grant(3)));
    assert_eq!((t.attachment(1).allowance, t.attachment(1).charge), (6 * GIB, 6 * GIB));
}

#[test]
fn a_client_too_large_beside_an_undrainable_holder_blocks_no_other() {
    let (mut t, commands) = Talk::with_undrainable(AntiThrash::On, [6 * GIB, 12 * GIB]);
    assert_eq!(commands, [undrainable(1), waiting(2, WaitReason::Pinned)]);
    t.join(3, 6 * GIB);
    t.request(3);
    t.map(2);
    assert_eq!(t.state(3), LockState::Holding);
    t.release(3, ReleaseReason::Idle);
    for _ in 0..20 {
        let commands = t.after(Duration::from_secs(5));
        if commands == [revoke(1)] {
            t.stuck(1, StuckReason::NeedsHost);
        }
    }
    assert_eq!(t.state(1), LockState::Undrainable, "it is still asked, for 2");
    t.release(1, ReleaseReason::Revoked);
    t.map(3);
    t.map(1);
    assert_eq!(t.state(2), LockState::Holding);
}

#[test]
fn an_undrainable_holder_gets_bytes_of_idle_clients() {
    let (mut t, _) = Talk::with_undrainable(AntiThrash::On, [6 * GIB, 6 * GIB]);
    t.release(2, ReleaseReason::Idle);
    let commands = t.report(1, 12 * GIB, 6 * GIB, 0);
    assert_eq!(allowances(&commands).last(), Some(&(2, 4 * GIB)));
    t.map(2);
    assert_eq!(t.attachment(1).allowance, 12 * GIB);
}

/// Memory that is allocated during a capture must be resident, so the allocation waits for it.
#[test]
fn an_undrainable_holder_gets_memory_before_a_client_runs_beside_it_again() {
    for anti_thrash in [AntiThrash::On, AntiThrash::Auto] {
        let (mut t, _) = Talk::with_undrainable(anti_thrash, [GIB, 12 * GIB]);
        assert_eq!(t.state(2), LockState::Holding);
        t.report(1, 8 * GIB, GIB, 0);
        assert!((1..=60).any(|_| t.after(Duration::from_secs(1)).contains(&revoke(2))), "its turn ends");
        t.request(2);
        let commands = t.release(2, ReleaseReason::Revoked);
        assert_eq!(allowances(&commands).last(), Some(&(2, 8 * GIB)));
        assert_eq!(t.state(2), LockState::Waiting);
        t.join(3, GIB);
        t.map(2);
        assert_eq!(t.attachment(1).allowance, 8 * GIB);
        t.map(1);
        t.request(3);
        t.map(2);
        assert_eq!(t.state(3), LockState::Holding, "it fits beside the undrainable holder");
        t.release(3, ReleaseReason::Idle);
        t.release(1, ReleaseReason::Revoked);
        t.map(1);
        t.map(3);
        assert_eq!(t.state(2), LockState::Holding);
    }
}

#[test]
fn an_undrainable_holder_that_cannot_get_its_memory_delays_no_client() {
    let (mut t, _) = Talk::with_undrainable(AntiThrash::On, [GIB, 12 * GIB]);
    t.join(3, GIB);
    t.report(3, GIB, GIB, GIB); // it stays on the GPU
    t.report(1, 16 * GIB, GIB, 0);
    assert!((1..=60).all(|_| !t.after(Duration::from_secs(1)).contains(&revoke(2))));
    t.release(2, ReleaseReason::Idle);
    t.request(2);
    assert_eq!(t.state(2), LockState::Holding);
}

#[test]
fn anti_thrash_off_revokes_another_holder_if_one_is_undrainable() {
    let mut t = Talk::in_mode(AntiThrash::Off);
    for n in [1, 2] {
        t.join(n, 6 * GIB);
        t.request(n);
    }
    t.join(3, 6 * GIB);
    t.request(3);
    assert_eq!(t.after(Duration::from_secs(1)), [revoke(1)]);
    t.stuck(1, StuckReason::NeedsHost);
    t.after(ms(100));
    assert!(t.after(ms(2900)).contains(&undrainable(1)));
    assert!(t.after(Duration::from_secs(1)).contains(&revoke(2)));
    t.release(2, ReleaseReason::Revoked);
    t.map(2);
    assert_eq!(t.state(3), LockState::Holding);
}

#[test]
fn the_patience_for_a_holder_shrinks_until_it_drains_in_time() {
    let (mut t, _) = Talk::with_undrainable(AntiThrash::On, [GIB, GIB]);
    let mut patience = Vec::new();
    for (late, says) in [(true, false), (true, true), (false, false), (true, true)] {
        t.release(1, ReleaseReason::Revoked);
        t.request(1);
        t.release(2, ReleaseReason::Idle);
        assert_eq!(t.state(1), LockState::Holding);
        t.request(2);
        t.after(Duration::from_secs(1));
        let asked = t.now;
        if says {
            t.stuck(1, StuckReason::NeedsHost);
        }
        while late && t.state(2) == LockState::Waiting {
            t.after(ms(100));
        }
        patience.push(t.now - asked);
    }
    assert_eq!(patience, [ms(500), ms(500), ms(0), ms(3000)]);
}

#[test]
fn an_undrainable_holder_without_waiters_is_not_asked_but_remembered() {
    let (mut t, _) = Talk::with_undrainable(AntiThrash::On, [GIB, GIB]);
    t.stuck(1, StuckReason::NeedsHost);
    t.say(Event::Disconnected { client: client(2) });
    t.after(Duration::from_secs(5));
    assert_eq!(t.state(1), LockState::Holding);
    assert_eq!(t.machine.deadline(), None);
    t.join(3, GIB);
    assert_eq!(t.request(3), [revoke(1), grant(3)], "it is known for what it is");
    assert_eq!(t.state(1), LockState::Undrainable);
}

#[test]
fn a_request_waiting_for_its_own_release_blocks_no_other_client() {
    let (mut t, _) = Talk::with_undrainable(AntiThrash::On, [GIB, GIB]);
    t.join(3, GIB);
    assert_eq!(t.request(1), [waiting(1, WaitReason::HolderStuck)]);
    t.request(3);
    t.after(Duration::from_secs(1));
    assert_eq!(t.release(2, ReleaseReason::Revoked), [grant(3)]);
    t.release(1, ReleaseReason::Revoked);
    assert_eq!(t.release(3, ReleaseReason::Idle), [grant(1)]);
}

#[test]
fn an_earlier_request_of_an_undrainable_holder_blocks_no_other_client() {
    let mut t = Talk::in_mode(AntiThrash::On);
    for n in [1, 2] {
        t.join(n, GIB);
        t.request(n);
    }
    t.after(Duration::from_secs(1));
    t.request(1); // the request crossed the revoke
    t.stuck(1, StuckReason::LongWork);
    assert!(t.after(Duration::from_secs(3)).contains(&grant(2)));
    assert_eq!(t.release(2, ReleaseReason::Idle), []);
    assert_eq!(t.release(1, ReleaseReason::Revoked), [grant(1)]);
}

#[test]
fn a_continuing_holder_is_not_revoked_for_its_own_request() {
    let mut t = Talk::with_waiter();
    t.after(Duration::from_secs(1));
    t.request(1); // a thread of the client has new work, and waits for the lock
    // earlier work waits for that thread, so the client lets it continue
    t.stuck(1, StuckReason::NeedsHost);
    t.say(Event::Disconnected { client: client(2) });
    assert_eq!(t.after(ms(100)), [contended(1, 0, ms(1))]);
    assert_eq!(t.after(Duration::from_secs(10)), []);
    assert_eq!(t.state(1), LockState::Holding);
    assert_eq!(t.release(1, ReleaseReason::Idle), []);
}

#[test]
fn a_client_with_untracked_work_is_not_undrainable() {
    let mut t = Talk::with_waiter();
    t.after(Duration::from_secs(1));
    assert_eq!(t.stuck(1, StuckReason::UntrackedWork), []);
    t.after(Duration::from_secs(4));
    assert_eq!(t.state(1), LockState::Revoking, "it has not said that it cannot");
}

#[test]
fn members_of_an_undrainable_holders_gang_run_beside_it() {
    let mut t = Talk::in_mode(AntiThrash::On);
    for n in [1, 2, 3] {
        t.say(Event::Connected { client: client(n), gang: 9, tenant: TenantId(0) });
        t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
    }
    t.join(4, GIB);
    for n in 1..=4 {
        t.request(n);
    }
    assert_eq!(t.after(Duration::from_secs(1)), [revoke(1), revoke(2), revoke(3)]);
    t.stuck(1, StuckReason::NeedsHost);
    for n in [2, 3] {
        t.release(n, ReleaseReason::Revoked);
    }
    for n in [1, 2, 3] {
        t.request(n); // both
    }
    let commands = t.after(Duration::from_secs(3));
    assert!(commands.contains(&grant(4)), "{commands:?}");
    t.after(Duration::from_secs(1));
    let commands = t.release(4, ReleaseReason::Revoked);
    assert!(commands.contains(&grant(2)) && commands.contains(&grant(3)), "1 may need them to drain: {commands:?}");
}

#[test]
fn a_stopped_holder_gets_its_drain_time_after_it_continues() {
    let mut t = Talk::with_waiter();
    t.after(Duration::from_secs(1));
    t.stuck(1, StuckReason::NeedsHost);
    t.after(ms(100));
    t.after(Duration::from_secs(1));
    assert_eq!(t.say(Event::Stopped { client: client(1), stopped: true }), [grant(2)]);
    t.after(Duration::from_secs(60));
    assert_eq!(t.state(1), LockState::Suspended);
    t.say(Event::Stopped { client: client(1), stopped: false });
    assert_eq!(t.state(1), LockState::Stuck);
    t.after(ms(2999));
    assert_eq!(t.state(1), LockState::Stuck);
    assert!(t.after(ms(1)).contains(&undrainable(1)));
    t.stuck(1, StuckReason::NeedsHost);
    t.say(Event::Stopped { client: client(1), stopped: true });
    t.say(Event::Stopped { client: client(1), stopped: false });
    assert_eq!(t.state(1), LockState::Undrainable, "as before");
}

#[test]
fn a_holder_undrainable_on_one_gpu_releases_its_other_gpus() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    for n in [1, 2] {
        t.join(n, 0);
        t.say(Event::Attached { client: client(n), gpu: gpu(1), engine: Engine::Swap });
    }
    let both = gpus([0, 1]);
    t.say(Event::Requested { client: client(1), gpus: both.clone() });
    t.say(Event::Requested { client: client(2), gpus: both.clone() });
    t.after(Duration::from_secs(1));
    t.stuck(1, StuckReason::NeedsHost);
    let one = gpus([1]);
    let (reason, busy) = (ReleaseReason::Revoked, Duration::ZERO);
    assert_eq!(t.say(Event::Released { client: client(1), gpus: one, reason, busy }), []);
    let commands = t.after(Duration::from_secs(3));
    assert!(commands.contains(&Command::Grant { client: client(2), gpus: both }), "{commands:?}");
}

#[test]
fn an_endless_kernel_delays_other_clients_once_by_three_seconds() {
    for (stuck, mode) in [(0, AntiThrash::On), (u32::MAX, AntiThrash::On), (0, AntiThrash::Auto)] {
        let mut world = World::with_gpu(mode, Duration::from_secs(1), 16 * GIB);
        world.add(Plan { endless: true, gpu: ENDLESS, stuck, ..Plan::default() });
        let job = Plan { start: ms(10), demand: 12 * GIB, phases: 5, gpu: Duration::from_secs(2), ..Plan::default() };
        world.add(job.clone());
        world.add(job);
        assert!(world.run(Duration::from_secs(60)), "{:?}", world.machine.gpus());
        // The limit covers two jobs of 10 s each, the first turn, the 3 s that a stuck holder may
        // take to drain, and the hand-overs. Each hand-over moves 9 GiB at 40 GiB/s.
        assert!(world.now < Duration::from_secs(32), "{:?} with {mode:?}", world.now);
    }
}

#[test]
fn a_stuck_holder_without_waiters_is_not_revoked() {
    let mut t = Talk::with_waiter();
    t.after(Duration::from_secs(1));
    t.say(Event::Stuck { client: client(1), gpus: gpus([0]), reason: StuckReason::LongWork });
    t.say(Event::Disconnected { client: client(2) });
    t.after(Duration::from_secs(10));
    assert_eq!(t.attachment(1).state, LockState::Holding);
    assert_eq!(t.machine.deadline(), None);
}
