//! Explanations for a waiting client: the clients ahead, the reasons, and a forecast that must come
//! true.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn of(t: &Talk, n: u64) -> Explanation {
    t.machine.explain(client(n), t.now).next().expect("it has a GPU")
}

fn reasons(t: &Talk, n: u64) -> Vec<(u64, Reason)> {
    of(t, n).ahead.iter().map(|ahead| (ahead.clients[0].0, ahead.reason)).collect()
}

#[test]
fn timed_turns_end_at_the_predicted_time() {
    let mut t = Talk::with_waiter();
    t.join(3, GIB);
    t.request(3);
    t.after(ms(300));
    let what = of(&t, 3);
    let holder = HolderAhead { client: client(1), state: LockState::Holding, left: Some(ms(700)), precedes: false };
    assert_eq!(what.holders, [holder]);
    let ahead = Ahead { clients: vec![client(2)], reason: Reason::Earlier, takes: Some(s(1)) };
    assert_eq!((&what.ahead[..], what.obstacle, what.leaves), (&[ahead][..], None, 0));
    assert_eq!(what.waits, Some(ms(300)));
    let starts = what.starts.expect("all turns end");
    assert!((ms(1700)..ms(1800)).contains(&starts), "the rest of a turn, a drain and a turn: {starts:?}");
    let all = t.machine.expected_starts(gpu(0), usize::MAX, t.now);
    assert_eq!(all.iter().map(|(client, _)| client.0).collect::<Vec<_>>(), [2, 3]);
    assert_eq!(all[1].1, starts);
    // The forecast comes true.
    assert!(t.after(ms(700)).contains(&revoke(1)));
    assert!(t.release(1, ReleaseReason::Revoked).contains(&grant(2)));
    t.request(1);
    assert_eq!(of(&t, 3).ahead, [], "it is the next");
    assert!(t.after(s(1)).contains(&revoke(2)));
    assert!(t.release(2, ReleaseReason::Revoked).contains(&grant(3)));
    let own = of(&t, 3);
    assert_eq!((own.state, own.waits, own.holders.len()), (LockState::Holding, None, 1));
}

#[test]
fn a_client_that_does_not_wait_has_no_predicted_start() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, GIB);
    let idle = of(&t, 1);
    assert_eq!((idle.state, idle.waits, idle.obstacle, idle.starts), (LockState::Idle, None, None, None));
    t.request(1);
    let alone = of(&t, 1);
    assert_eq!((alone.state, alone.holders[0].left), (LockState::Holding, None), "nobody waits");
    assert!(t.machine.explain(client(77), t.now).next().is_none(), "it is unknown");
}

#[test]
fn a_holder_that_is_not_preempted_has_no_predicted_end() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join_of(TenantId(1), 1, GIB);
    t.join_of(TenantId(2), 2, GIB);
    t.put(&[2], RuleLimits { share: Some(Share { weight: 0, ..Share::default() }), ..RuleLimits::default() });
    t.request(1);
    t.request(2);
    let what = of(&t, 2);
    assert_eq!((what.holders.len(), what.starts), (1, None));
    assert!(what.holders[0].precedes && what.holders[0].left.is_none());
    // A third client, which has no rule, runs first.
    t.join_of(TenantId(3), 3, GIB);
    t.request(3);
    assert_eq!(reasons(&t, 2), [(3, Reason::OtherIsIdle)]);
    assert_eq!(of(&t, 2).ahead[0].takes, None, "it runs until it has no more work");
    assert_eq!(reasons(&t, 3), []);
}

#[test]
fn precedence_by_rule_is_named_as_the_reason() {
    for (share, reason) in [
        (Share { priority: 5, ..Share::default() }, Reason::Priority),
        (Share { interactive: true, ..Share::default() }, Reason::Interactive),
        (Share { min: 50, ..Share::default() }, Reason::BelowMinimum),
    ] {
        let mut t = Talk::in_mode(AntiThrash::On);
        for n in [1, 2, 3] {
            t.join_of(TenantId(n), n, GIB);
        }
        // Client 3 is in the holder's group too, so the holder continues.
        t.put(&[1, 3], RuleLimits { share: Some(share), ..RuleLimits::default() });
        t.request(1);
        t.after(ms(1));
        t.request(2);
        t.after(ms(1));
        t.request(3);
        assert_eq!(reasons(&t, 2), [(3, reason)]);
        assert_eq!(reasons(&t, 3), []);
    }
}

#[test]
fn a_tenant_with_less_used_time_goes_first() {
    let mut t = Talk::in_mode(AntiThrash::On);
    for (n, tenant) in [(1, 1), (2, 2), (3, 1), (4, 4)] {
        t.join_of(TenantId(tenant), n, GIB);
    }
    t.request(1);
    t.after(ms(1));
    t.request(3);
    t.after(ms(1));
    t.request(2);
    assert_eq!(reasons(&t, 2), [(3, Reason::Earlier)]);
    t.after(s(1));
    t.release(1, ReleaseReason::Revoked);
    // The owner of client 3 has used one second, so client 3 waits although its request came first.
    assert_eq!(t.state(2), LockState::Holding);
    t.request(4);
    assert_eq!(reasons(&t, 3), [(4, Reason::Share)]);
}

#[test]
fn the_obstacle_of_an_unqueued_client_is_named() {
    let mut t = Talk::with_waiter();
    t.say(Event::Stopped { client: client(2), stopped: true });
    assert_eq!(of(&t, 2).obstacle, Some(Obstacle::Stopped));
    assert_eq!(of(&t, 2).starts, None);
    t.say(Event::Stopped { client: client(2), stopped: false });
    assert_eq!(of(&t, 2).obstacle, None);
    t.say(Event::SleepWanted { client: client(2), paused: true });
    assert_eq!(of(&t, 2).obstacle, Some(Obstacle::Paused));

    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 12 * GIB);
    t.request(1);
    t.report(1, 12 * GIB, 12 * GIB, 12 * GIB);
    t.release(1, ReleaseReason::Idle);
    t.join(2, 8 * GIB);
    t.request(2);
    assert_eq!(of(&t, 2).obstacle, Some(Obstacle::Pinned(gpu(0), 12 * GIB)));

    let (t, _) = Talk::with_undrainable(AntiThrash::On, [10 * GIB, 10 * GIB]);
    assert_eq!((of(&t, 1).state, of(&t, 2).starts), (LockState::Undrainable, None));
}

#[test]
fn each_obstacle_outside_the_queue_is_named() {
    let mut t = Talk::with_waiter();
    t.say(Event::Suspend { suspended: true });
    assert_eq!(of(&t, 2).obstacle, Some(Obstacle::Suspended));
    t.say(Event::Suspend { suspended: false });
    t.say(Event::Drain { gpu: gpu(0), drained: true });
    assert_eq!(of(&t, 2).obstacle, Some(Obstacle::Drained));

    let (mut t, _) = Talk::with_undrainable(AntiThrash::On, [GIB, GIB]);
    t.request(1);
    assert_eq!(of(&t, 1).obstacle, Some(Obstacle::OwnHold));

    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 8 * GIB);
    t.join(2, 6 * GIB);
    t.request(2);
    t.report(2, 7 * GIB, 6 * GIB, 0);
    t.release(2, ReleaseReason::NoMemory);
    t.request(2);
    t.now += ms(100);
    assert_eq!(of(&t, 2).obstacle, Some(Obstacle::MappingFailed(ms(400))));
}

#[test]
fn obstacles_that_rules_set_are_named() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, GIB);
    t.put(&[1], RuleLimits { share: Some(Share { max: 10, ..Share::default() }), ..RuleLimits::default() });
    t.request(1);
    t.after(s(2));
    t.release(1, ReleaseReason::Revoked);
    t.request(1);
    // Of the 2 s, 1.25 s must have left the period of 10 s. The second left before this one.
    assert!(matches!(of(&t, 1).obstacle, Some(Obstacle::TimeMax(left)) if (ms(9250)..ms(9251)).contains(&left)));
    // While another member of the group holds the GPU, no time can be predicted.
    let mut t = Talk::in_mode(AntiThrash::On);
    (1..3).for_each(|n| drop(t.join(n, GIB)));
    t.put(&[1, 2], RuleLimits { share: Some(Share { max: 10, ..Share::default() }), ..RuleLimits::default() });
    t.request(1);
    t.after(s(2));
    t.request(2);
    assert_eq!((t.state(1), of(&t, 2).obstacle), (LockState::Revoking, Some(Obstacle::TimeMax(ms(250)))));

    let mut t = Talk::with_shared_limit();
    t.wish(2, 4 * GIB);
    assert_eq!((of(&t, 1).obstacle, of(&t, 2).obstacle), (None, Some(Obstacle::Memory(4 * GIB))));

    let mut t = Talk::in_mode(AntiThrash::On);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    (1..3).for_each(|n| drop(t.join_of(TenantId(n), n, 0)));
    t.say(Event::Attached { client: client(1), gpu: gpu(1), engine: Engine::Swap });
    t.put(&[2], RuleLimits { share: Some(Share { priority: 1, ..Share::default() }), ..RuleLimits::default() });
    t.request(2);
    t.say(Event::Requested { client: client(1), gpus: gpus([0, 1]) });
    assert_eq!(of(&t, 1).obstacle, Some(Obstacle::Behind(gpu(0))));
}

#[test]
fn an_absent_gang_member_is_named_as_the_obstacle() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(3, 0);
    t.request(3);
    for n in [1, 2] {
        t.say(Event::Connected { client: client(n), gang: 9, tenant: TenantId(0) });
        t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
        t.request(n);
    }
    t.say(Event::Stopped { client: client(1), stopped: true });
    assert_eq!(of(&t, 2).obstacle, Some(Obstacle::Away(vec![client(1)])));
}

#[test]
fn a_wait_for_room_for_a_context_is_named_as_the_obstacle() {
    for is_full in [false, true] {
        let mut t = Talk::new(Settings { context: GIB, ..settings(AntiThrash::Auto, s(1)) });
        t.join(1, 15 * GIB - 512 * MIB);
        if is_full {
            t.measured(16 * GIB);
        }
        t.say(Event::Connected { client: client(2), gang: 0, tenant: TenantId(0) });
        t.say(Event::Attached { client: client(2), gpu: gpu(0), engine: Engine::Swap });
        assert_eq!(of(&t, 2).obstacle, Some(Obstacle::Context { deferred: !is_full }));
        assert_eq!(of(&t, 1).obstacle, None);
    }
}

#[test]
fn a_request_that_is_served_before_an_earlier_one_is_shorter_or_has_aged() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    (1..=3).for_each(|n| drop(t.join(n, GIB)));
    t.request(2);
    t.request(1);
    t.after(ms(300));
    t.release(2, ReleaseReason::Revoked);
    t.request(2);
    t.after(ms(10));
    t.request(3);
    assert_eq!((t.state(1), reasons(&t, 2)), (LockState::Holding, vec![(3, Reason::Shorter)]));

    let adaptive = Settings { policy: PolicyName::Adaptive, ..settings(AntiThrash::On, s(1)) };
    let mut t = Talk::new(adaptive);
    (1..=3).for_each(|n| drop(t.join(n, GIB)));
    t.request(2);
    t.after(s(20));
    t.request(1);
    t.release(2, ReleaseReason::Revoked);
    t.request(2);
    t.after(s(17));
    t.request(3);
    assert_eq!((t.state(1), reasons(&t, 3)), (LockState::Revoking, vec![(2, Reason::Aged)]));
}

#[test]
fn the_predicted_start_includes_the_time_to_move_memory() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.say(Event::GpuLink { gpu: gpu(0), rate: 8 * GIB });
    t.join(1, 12 * GIB);
    t.request(1);
    t.map(1);
    t.join(2, 12 * GIB);
    t.join(3, 12 * GIB);
    t.request(2);
    t.request(3);
    let what = of(&t, 2);
    assert_eq!((what.leaves, what.comes, what.moving), (8 * GIB, 8 * GIB, s(2)), "4 GiB are free");
    // The rest of a turn and a drain precede the move.
    assert_eq!(what.starts, Some(s(3) + ms(10)));
    let ahead = Ahead { clients: vec![client(2)], reason: Reason::Earlier, takes: Some(s(3)) };
    let what = of(&t, 3);
    assert_eq!((what.leaves, what.ahead, what.starts), (12 * GIB, vec![ahead], Some(s(7) + ms(10))));
    let starts = [(client(2), s(3) + ms(10)), (client(3), s(7) + ms(10))];
    assert_eq!(t.machine.expected_starts(gpu(0), 1, t.now), starts[..1]);
    assert_eq!(t.machine.expected_starts(gpu(0), 9, t.now), starts);
    // Memory of idle clients leaves while the holder still runs.
    t.release(1, ReleaseReason::Idle);
    t.map(1);
    t.map(2);
    assert_eq!(t.state(2), LockState::Holding);
    t.report(3, 4 * GIB, 0, 0);
    assert_eq!(of(&t, 3).starts, Some(s(1) + ms(10)));
}

#[test]
fn a_client_ahead_is_expected_to_run_to_the_end_of_its_level() {
    let adaptive = Settings { policy: PolicyName::Adaptive, ..settings(AntiThrash::On, s(1)) };
    let mut t = Talk::new(adaptive);
    (1..=3).for_each(|n| drop(t.join(n, GIB)));
    t.request(3);
    t.after(s(20));
    t.release(3, ReleaseReason::Revoked);
    t.request(2);
    t.request(3);
    t.after(s(5));
    assert!(t.request(1).contains(&revoke(2)));
    t.release(2, ReleaseReason::Revoked);
    t.request(2);
    // Client 2's level ends after 16 s of GPU time, and its burst has lasted for 5 s.
    let ahead = Ahead { clients: vec![client(2)], reason: Reason::LessServed, takes: Some(s(5)) };
    assert_eq!((t.state(1), of(&t, 3).ahead), (LockState::Holding, vec![ahead]));
}

/// Returns the errors of forecasts at several moments, in seconds. The clients always have work.
fn errors(mode: AntiThrash, clients: u64, demand: u64, until: u64) -> Vec<f64> {
    let mut world = World::with_gpu(mode, s(2), 16 * GIB);
    world.feed(Event::GpuLink { gpu: gpu(0), rate: 40 * GIB });
    world.most_steps = 3_000_000;
    let all: Vec<ClientId> = (0..clients)
        .map(|n| world.add(Plan { tenant: TenantId(n), demand, gpu: s(10_000), ..Plan::default() }))
        .collect();
    let mut expected = Vec::new();
    for at in (until / 2..until).step_by(3) {
        world.run(s(at));
        for client in &all {
            let what = world.machine.explain(*client, world.now).next().expect("it has a GPU");
            if what.waits.is_some() {
                expected.push((*client, world.now, what.starts.expect("all turns end")));
            }
        }
    }
    world.run(s(until * 2));
    assert!(!expected.is_empty());
    let error = |(client, at, starts): (ClientId, Time, Duration)| {
        let granted = world.grants_of(client).into_iter().find(|granted| *granted >= at).expect("it runs");
        (at + starts).as_secs_f64() - granted.as_secs_f64()
    };
    expected.into_iter().map(error).collect()
}

#[test]
fn predicted_starts_are_accurate_to_two_seconds() {
    for (mode, clients, demand) in [
        (AntiThrash::On, 2, GIB),
        (AntiThrash::On, 4, GIB),
        (AntiThrash::On, 3, 12 * GIB),
        (AntiThrash::Auto, 2, 12 * GIB),
        (AntiThrash::Auto, 3, 12 * GIB),
    ] {
        let errors = errors(mode, clients, demand, 120);
        let worst = errors.iter().fold(0f64, |worst, error| worst.max(error.abs()));
        assert!(worst <= 2.0, "{mode:?}, {clients} clients of {} GiB: {errors:.2?}", demand / GIB);
    }
}
