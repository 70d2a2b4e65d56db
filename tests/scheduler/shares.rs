//! Shares of a GPU's time, and the time that clients with these shares get, in virtual time. The
//! programs keep the GPU busy whenever they hold the lock. The tests measure many periods, with
//! work that drains quickly and work that drains slowly.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn share(share: Share) -> Option<Share> {
    Some(share)
}

fn bounds(min: u8, max: u8) -> Option<Share> {
    share(Share { min, max, ..Share::default() })
}

fn weight(weight: u16) -> Option<Share> {
    share(Share { weight, ..Share::default() })
}

/// Creates a world of programs that always have work, each with its own group and user. The GPU has
/// room for all of them.
fn busy(mode: AntiThrash, drain: Duration, shares: &[Option<Share>]) -> World {
    let mut world = World::with_gpu(mode, s(5), 16 * GIB);
    world.most_steps = 3_000_000;
    for share in shares {
        add(&mut world, *share, Plan { drain, gpu: s(100_000), ..Plan::default() });
    }
    world
}

fn add(world: &mut World, share: Option<Share>, plan: Plan) -> ClientId {
    let n = world.models.len() as u64 + 1;
    let group =
        share.map(|share| Group { id: GroupId(n), limits: RuleLimits { share: Some(share), ..RuleLimits::default() } });
    world.add(Plan { tenant: TenantId(n), group, ..plan })
}

/// Returns the percentage of time for which each client held the lock between two moments.
fn parts(world: &mut World, from: Duration, to: Duration) -> Vec<f64> {
    let had = |world: &World| -> Vec<Duration> {
        world
            .models
            .keys()
            .map(|id| world.machine.client(*id).map_or(Duration::ZERO, |c| c.attachments[0].lock_time))
            .collect()
    };
    world.run(from);
    world.machine.handle(from, Event::Tick);
    let before = had(world);
    world.run(to);
    world.machine.handle(to, Event::Tick);
    let after = had(world).into_iter().zip(before).map(|(after, before)| after - before);
    after.map(|had| had.as_secs_f64() / (to - from).as_secs_f64() * 100.0).collect()
}

/// Returns the percentages in ten periods, after the first three.
fn ten_periods(world: &mut World) -> Vec<f64> {
    parts(world, PERIOD * 3, PERIOD * 13)
}

#[track_caller]
fn near(parts: &[f64], expected: &[f64]) {
    let all = parts.iter().zip(expected).all(|(part, expected)| (part - expected).abs() <= 3.0);
    assert!(all && parts.len() == expected.len(), "{parts:.1?} percent, and not {expected:?}");
}

/// Work that drains immediately, in 1 ms, and in 200 ms.
const DRAINS: [Duration; 3] = [Duration::ZERO, Duration::from_millis(1), Duration::from_millis(200)];

#[test]
fn time_is_divided_by_weight() {
    for (mode, drain) in
        [AntiThrash::On, AntiThrash::Auto].into_iter().flat_map(|mode| DRAINS.map(|drain| (mode, drain)))
    {
        let mut world = busy(mode, drain, &[weight(100), weight(300)]);
        near(&parts(&mut world, s(100), s(500)), &[25.0, 75.0]);
        // A client without a rule has the default weight.
        let mut world = busy(mode, drain, &[None, weight(200), None]);
        near(&parts(&mut world, s(100), s(500)), &[25.0, 50.0, 25.0]);
    }
}

#[test]
fn continuously_busy_clients_get_their_due_shares() {
    let idle = weight(0);
    let cases: [(&[Option<Share>], &[u32]); 3] = [
        (&[None, weight(200), None], &[250, 500, 250]),
        (&[weight(100), weight(300)], &[250, 750]),
        (&[None, idle], &[1000, 0]),
    ];
    for (shares, expected) in cases {
        let mut world = busy(AntiThrash::On, ms(1), shares);
        let had = ten_periods(&mut world);
        let due: Vec<u32> = world.machine.shares_due(gpu(0)).into_values().collect();
        assert_eq!(due, expected);
        let is_had = had.iter().zip(expected).all(|(had, due)| had + 3.0 >= f64::from(*due) / 10.0);
        assert!(is_had, "{had:.1?} percent, and not {expected:?} thousandths");
    }
}

#[test]
fn an_idle_client_gets_no_arrears_when_it_returns() {
    let mut world = busy(AntiThrash::On, ms(1), &[weight(100)]);
    add(&mut world, weight(100), Plan { start: s(1000), gpu: s(100_000), ..Plan::default() });
    near(&parts(&mut world, s(1000), s(1060)), &[50.0, 50.0]);
}

#[test]
fn every_client_gets_at_least_its_minimum() {
    for (mode, drain) in
        [AntiThrash::On, AntiThrash::Auto].into_iter().flat_map(|mode| DRAINS.map(|drain| (mode, drain)))
    {
        near(&ten_periods(&mut busy(mode, drain, &[bounds(30, 100), bounds(70, 100)])), &[30.0, 70.0]);
        near(&ten_periods(&mut busy(mode, drain, &[bounds(10, 100), bounds(90, 100)])), &[10.0, 90.0]);
        let crowd = ten_periods(&mut busy(mode, drain, &[bounds(60, 100), None, None, None, None, None]));
        assert!(crowd[0] >= 57.0, "{crowd:.1?}");
        assert!(crowd[1..].iter().all(|part| *part >= 3.0), "what is left is the others': {crowd:.1?}");
    }
}

#[test]
fn other_clients_get_the_unused_part_of_a_minimum() {
    let mut world = busy(AntiThrash::Auto, ms(1), &[None]);
    // The client has half a second of work every five seconds.
    let plan = Plan { gpu: ms(500), cpu: ms(4500), phases: 1000, ..Plan::default() };
    add(&mut world, bounds(80, 100), plan);
    let parts = ten_periods(&mut world);
    assert!(parts[0] >= 87.0, "{parts:.1?}");
    let waits = &world.models[&client(2)].waits;
    assert!(waits.iter().skip(1).all(|wait| *wait < ms(700)), "it is owed its time whenever it wants it: {waits:?}");
}

#[test]
fn no_client_exceeds_its_maximum() {
    for drain in DRAINS {
        for mode in [AntiThrash::On, AntiThrash::Auto, AntiThrash::Off] {
            near(&ten_periods(&mut busy(mode, drain, &[bounds(0, 20)])), &[20.0]);
        }
        near(&ten_periods(&mut busy(AntiThrash::On, drain, &[bounds(0, 20), bounds(0, 30)])), &[20.0, 30.0]);
        // The client with a maximum also waits for turns to end, so its share may be smaller.
        let beside = ten_periods(&mut busy(AntiThrash::On, drain, &[bounds(0, 20), None]));
        assert!((10.0..=20.5).contains(&beside[0]) && beside[1] >= 79.5, "{beside:.1?}");
    }
}

#[test]
fn no_client_exceeds_its_maximum_in_any_period() {
    for n in 0..100 {
        let at = PERIOD + ms(700) * n;
        let part = parts(&mut busy(AntiThrash::On, ms(1), &[bounds(0, 20)]), at, at + PERIOD)[0];
        assert!(part <= 20.5, "{part:.1} percent from {at:?}");
    }
}

#[test]
fn clients_of_a_group_have_one_share() {
    let mut world = World::with_gpu(AntiThrash::On, s(1), 16 * GIB);
    for (group, user) in [(1, 1), (1, 2), (1, 3), (2, 4)] {
        let group = Group { id: GroupId(group), limits: RuleLimits { share: weight(100), ..RuleLimits::default() } };
        world.add(Plan { tenant: TenantId(user), group: Some(group), gpu: s(100_000), ..Plan::default() });
    }
    let parts = parts(&mut world, s(20), s(320));
    near(&[parts[..3].iter().sum(), parts[3]], &[50.0, 50.0]);
}

#[test]
fn a_higher_priority_preempts_a_lower_priority() {
    let mut world = busy(AntiThrash::On, ms(3), &[None]);
    let urgent = share(Share { priority: 5, ..Share::default() });
    let one = add(&mut world, urgent, Plan { start: s(1), gpu: s(20), phases: 1, ..Plan::default() });
    let low = share(Share { priority: -5, ..Share::default() });
    let last = add(&mut world, low, Plan { gpu: ms(100), phases: 1, ..Plan::default() });
    world.run(s(30));
    let waited = world.models[&one].waits[0];
    assert!(waited < ms(5), "it waits for the work to end, and no longer: {waited:?}");
    assert!(world.finished(one) < s(22), "nobody is let in beside it: {:?}", world.finished(one));
    assert_eq!(world.finished(last), Time::MAX, "and one of a lower one waits for all");
}

#[test]
fn idle_weight_clients_get_only_unused_time() {
    let mut world = busy(AntiThrash::Auto, ms(1), &[weight(0)]);
    let plan = Plan { gpu: ms(500), cpu: ms(500), phases: 1000, ..Plan::default() };
    let other = add(&mut world, None, plan);
    near(&parts(&mut world, s(10), s(110)), &[50.0, 50.0]);
    let waits = &world.models[&other].waits;
    assert!(waits.iter().all(|wait| *wait < ms(3)), "{waits:?}");
}

#[test]
fn an_interactive_program_gets_the_gpu_within_milliseconds() {
    for mode in [AntiThrash::On, AntiThrash::Auto] {
        let mut world = busy(mode, ms(2), &[None, None]);
        let interactive = share(Share { interactive: true, ..Share::default() });
        let plan = Plan { start: s(1), gpu: ms(10), cpu: ms(200), phases: 500, ..Plan::default() };
        let one = add(&mut world, interactive, plan);
        world.run(s(200));
        let waits = &world.models[&one].waits;
        assert!(
            waits.len() > 300 && waits.iter().all(|wait| *wait < ms(4)),
            "{:?} of {}",
            waits.iter().max(),
            waits.len()
        );
    }
}

#[test]
fn a_busy_interactive_program_gets_only_its_share() {
    for mode in [AntiThrash::On, AntiThrash::Auto] {
        let interactive = share(Share { interactive: true, ..Share::default() });
        near(&parts(&mut busy(mode, ms(1), &[None, interactive]), s(100), s(500)), &[50.0, 50.0]);
    }
}

#[test]
fn restore_time_is_charged_to_the_restored_client() {
    let mut world = World::with_gpu(AntiThrash::On, s(2), 16 * GIB);
    world.most_steps = 3_000_000;
    // The two small clients fit beside each other. The small clients' memory is evicted slowly when
    // the large client runs.
    for (demand, rate) in [(2 * GIB, 2 * GIB), (2 * GIB, 2 * GIB), (15 * GIB, 100 * GIB)] {
        add(&mut world, weight(100), Plan { demand, rate, gpu: s(100_000), ..Plan::default() });
    }
    let parts = parts(&mut world, s(100), s(700));
    let large = parts[2] + (100.0 - parts.iter().sum::<f64>());
    near(&[parts[0], parts[1], large], &[33.3, 33.3, 33.3]);
    assert!(parts[2] < 28.0, "while memory moves, nobody has the GPU: {parts:.1?}");
}

#[test]
fn a_rule_change_takes_effect_immediately() {
    let mut world = busy(AntiThrash::On, ms(1), &[bounds(0, 10)]);
    near(&ten_periods(&mut world), &[10.0]);
    let now = world.now;
    world.regroup(|client| {
        Some(Group { id: GroupId(client.0), limits: RuleLimits { share: bounds(0, 100), ..RuleLimits::default() } })
    });
    near(&parts(&mut world, now + s(1), now + s(11)), &[100.0]);
}

#[test]
fn joining_a_gang_gives_no_precedence() {
    let mut world = busy(AntiThrash::On, ms(1), &[None]);
    let urgent = Share { priority: 1, ..Share::default() };
    let group = Group { id: GroupId(9), limits: RuleLimits { share: Some(urgent), ..RuleLimits::default() } };
    let plan = Plan { gang: 7, start: s(1), gpu: s(1), tenant: TenantId(9), ..Plan::default() };
    let urgent = world.add(Plan { group: Some(group), ..plan.clone() });
    let other = world.add(plan.clone());
    world.run(s(20));
    for member in [urgent, other] {
        assert!(world.models[&member].waits[0] > s(2), "it waits for a turn to end: {:?}", world.models[&member].waits);
    }
    // A gang has precedence only if all of its members have it.
    let both = [(); 2].map(|()| world.add(Plan { gang: 8, group: Some(group), start: s(21), ..plan.clone() }));
    world.run(s(25));
    assert!(both.iter().all(|member| world.finished(*member) < s(23)), "{:?}", world.machine.gpus());
}

#[test]
fn time_owed_to_departed_clients_is_dropped() {
    let mut world = busy(AntiThrash::On, ms(1), &[weight(1)]);
    add(&mut world, weight(10_000), Plan { killed: Some(s(60)), gpu: s(100_000), ..Plan::default() });
    add(&mut world, weight(1), Plan { start: s(60), gpu: s(100_000), ..Plan::default() });
    let parts = parts(&mut world, s(70), s(370));
    near(&[parts[0], parts[2]], &[50.0, 50.0]);
}

#[test]
fn an_undrainable_client_does_not_block_its_group() {
    let mut world = World::with_gpu(AntiThrash::Auto, s(1), 16 * GIB);
    let group = Some(Group { id: GroupId(1), limits: RuleLimits { share: bounds(0, 50), ..RuleLimits::default() } });
    let stuck = world.add(Plan { group, endless: true, gpu: ENDLESS, ..Plan::default() });
    let fellow = world.add(Plan { group, start: s(1), gpu: s(10), ..Plan::default() });
    let other = world.add(Plan { tenant: TenantId(5), start: s(1), gpu: s(20), ..Plan::default() });
    world.run(s(120));
    assert!(world.finished(fellow) < s(120), "{:?}", world.machine.client(fellow));
    assert!(world.finished(other) < s(120), "{:?}", world.machine.client(other));
    assert!(world.grants_of(fellow).len() < 100, "{} grants", world.grants_of(fellow).len());
    assert_eq!(world.finished(stuck), Time::MAX);
}

#[test]
fn a_preceded_waiter_for_several_gpus_blocks_no_gpu() {
    let mut world = World::new(settings(AntiThrash::On, s(1)), 1);
    (0..2).for_each(|n| world.add_gpu(gpu(n), 16 * GIB, 0));
    let urgent = share(Share { priority: 10, ..Share::default() });
    let first = add(&mut world, urgent, Plan { gpus: gpus([1]), gpu: s(50), ..Plan::default() });
    let both = add(&mut world, None, Plan { gpus: gpus([0, 1]), start: s(1), gpu: s(5), ..Plan::default() });
    let last = add(&mut world, None, Plan { gpus: gpus([0]), start: s(2), gpu: s(5), ..Plan::default() });
    world.run(s(100));
    assert!(world.finished(last) < s(8), "{:?}", world.finished(last));
    assert!(world.finished(first) < s(51) && world.finished(both) < s(57), "{:?}", world.finished(both));
}

#[test]
fn a_computing_interactive_program_yields_to_another() {
    let interactive = share(Share { interactive: true, ..Share::default() });
    let mut world = busy(AntiThrash::On, ms(2), &[interactive]);
    let plan = Plan { start: s(1), gpu: ms(10), cpu: s(1), phases: 100, ..Plan::default() };
    let one = add(&mut world, interactive, plan);
    world.run(s(110));
    let waits = &world.models[&one].waits;
    assert!(
        waits.len() > 80 && waits.iter().all(|wait| *wait < ms(300)),
        "{:?} of {}",
        waits.iter().max(),
        waits.len()
    );
}

#[test]
fn a_waiter_for_several_gpus_runs_once_its_predecessor_is_stopped() {
    let mut world = World::new(settings(AntiThrash::On, s(1)), 1);
    (0..2).for_each(|n| world.add_gpu(gpu(n), 16 * GIB, 0));
    let urgent = share(Share { priority: 10, ..Share::default() });
    let stopped = Some((s(3), s(60)));
    add(&mut world, urgent, Plan { gpus: gpus([1]), gpu: s(100_000), stopped, ..Plan::default() });
    let both = add(&mut world, None, Plan { gpus: gpus([0, 1]), start: s(1), gpu: s(5), ..Plan::default() });
    // The scheduler notices the stopped client when another client needs its GPU.
    add(&mut world, urgent, Plan { gpus: gpus([1]), start: s(4), gpu: s(1), ..Plan::default() });
    world.run(s(59));
    assert!(world.finished(both) < s(40), "{:?}", world.finished(both));
}

#[test]
fn a_preceding_client_with_room_does_not_wait_for_a_drain() {
    let interactive = share(Share { interactive: true, ..Share::default() });
    for (demand, mode, expected) in [
        (GIB, AntiThrash::Auto, ms(1)),
        (GIB, AntiThrash::On, ms(101)),
        // The other client's memory has to be evicted first.
        (16 * GIB, AntiThrash::Auto, ms(550)),
    ] {
        let mut world = busy(mode, ms(100), &[None]);
        let plan = Plan { start: s(1), gpu: ms(10), cpu: ms(900), phases: 100, demand, ..Plan::default() };
        let one = add(&mut world, interactive, plan);
        world.run(s(100));
        let waits = &world.models[&one].waits;
        assert!(waits.len() > 50 && waits.iter().all(|wait| *wait < expected), "{mode:?}, {demand}: {waits:?}");
    }
}

#[test]
fn a_gang_too_large_for_the_gpu_takes_turns_despite_interactivity() {
    let mut world = World::with_gpu(AntiThrash::On, s(1), 16 * GIB);
    let interactive = Share { interactive: true, ..Share::default() };
    let group =
        Some(Group { id: GroupId(1), limits: RuleLimits { share: Some(interactive), ..RuleLimits::default() } });
    world.add(Plan { gang: 7, group, gpu: ms(10), leaves: false, ..Plan::default() });
    let large = Plan { gang: 7, start: s(1), demand: 10 * GIB, gpu: s(3), ..Plan::default() };
    let [one, other] = [(); 2].map(|()| world.add(large.clone()));
    world.run(s(60));
    assert!(world.finished(one) < s(20) && world.finished(other) < s(20), "{:?}", world.machine.gpus());
}

#[test]
fn a_queued_waiter_for_several_gpus_leaves_its_other_gpus_in_use() {
    let mut world = World::new(settings(AntiThrash::On, s(1)), 1);
    (0..2).for_each(|n| world.add_gpu(gpu(n), 16 * GIB, 0));
    let share = |priority| share(Share { priority, ..Share::default() });
    // On one GPU, two clients of a higher priority take turns, so one of them always waits there.
    let best = [TenantId(1), TenantId(2)];
    best.into_iter().for_each(|user| {
        add(&mut world, share(10), Plan { tenant: user, gpus: gpus([1]), gpu: s(20), ..Plan::default() });
    });
    let low = add(&mut world, share(0), Plan { gpus: gpus([0]), gpu: s(30), ..Plan::default() });
    let both = add(&mut world, share(5), Plan { gpus: gpus([0, 1]), start: s(1), gpu: s(5), ..Plan::default() });
    world.run(s(100));
    assert!(world.finished(low) < s(31), "nobody keeps the GPU from it: {:?}", world.finished(low));
    assert!(world.finished(both) < s(47), "{:?}", world.finished(both));
}

#[test]
fn a_waiting_gangs_precedence_follows_its_members() {
    let mut world = busy(AntiThrash::On, ms(1), &[None]);
    let urgent = Share { priority: 1, ..Share::default() };
    let group = Group { id: GroupId(9), limits: RuleLimits { share: Some(urgent), ..RuleLimits::default() } };
    let plan = Plan { gang: 7, start: s(1), gpu: s(1), tenant: TenantId(9), ..Plan::default() };
    let urgent = world.add(Plan { group: Some(group), ..plan.clone() });
    world.add(Plan { killed: Some(ms(1_500)), ..plan });
    world.run(s(20));
    let waited = world.models[&urgent].waits[0];
    assert!(waited > ms(450) && waited < ms(550), "as long as the other was there: {waited:?}");
}

#[test]
fn a_waiter_preceded_on_one_gpu_preempts_no_other_gpu() {
    let mut world = World::new(settings(AntiThrash::On, s(1)), 1);
    (0..2).for_each(|n| world.add_gpu(gpu(n), 16 * GIB, 0));
    let share = |priority| share(Share { priority, ..Share::default() });
    add(&mut world, share(10), Plan { gpus: gpus([1]), gpu: s(50), ..Plan::default() });
    let low = add(&mut world, share(-10), Plan { gpus: gpus([0]), gpu: s(10), ..Plan::default() });
    let both = add(&mut world, share(5), Plan { gpus: gpus([0, 1]), start: s(1), gpu: s(5), ..Plan::default() });
    world.run(s(100));
    assert_eq!(world.grants_of(low).len(), 1, "it is not asked for what nobody could use");
    assert!(world.finished(both) < s(57), "{:?}", world.finished(both));
}

/// Like [`busy`], with given group numbers. Some clients have environment limits.
fn tightened(mode: AntiThrash, drain: Duration, members: &[(u64, Option<Share>, EnvLimits)]) -> World {
    let mut world = World::with_gpu(mode, s(5), 16 * GIB);
    world.most_steps = 3_000_000;
    for (id, share, own) in members {
        let group = Group { id: GroupId(*id), limits: RuleLimits { share: *share, ..RuleLimits::default() } };
        let user = TenantId(*id);
        world.add(Plan { tenant: user, group: Some(group), own: *own, drain, gpu: s(100_000), ..Plan::default() });
    }
    world
}

fn own_weight(weight: u16) -> EnvLimits {
    EnvLimits { weight: Some(weight), ..EnvLimits::default() }
}

#[test]
fn a_lower_environment_weight_cedes_time_to_all_other_clients() {
    let none = EnvLimits::default();
    for (mode, drain) in
        [AntiThrash::On, AntiThrash::Auto].into_iter().flat_map(|mode| DRAINS.map(|drain| (mode, drain)))
    {
        let parts_of = |members: &[_]| parts(&mut tightened(mode, drain, members), s(200), s(2_200));
        // A client with an environment weight lowers its group's weight if it is the only member.
        near(&parts_of(&[(1, weight(100), own_weight(10)), (2, weight(100), none)]), &[9.1, 90.9]);
        // The other member gets the time that such a client leaves. The group gets no more than
        // without the environment weight.
        let members = [(1, weight(100), own_weight(10)), (1, weight(100), none), (2, weight(100), none)];
        near(&parts_of(&members), &[4.8, 45.2, 50.0]);
        // An environment weight also applies within one group, and to users without a rule.
        near(&parts_of(&[(1, None, own_weight(25)), (1, None, none)]), &[20.0, 80.0]);
        near(&parts_of(&[(1, None, own_weight(25)), (1, None, own_weight(25))]), &[50.0, 50.0]);
        near(&parts_of(&[(1, None, own_weight(25)), (2, None, own_weight(75))]), &[25.0, 75.0]);
    }
}

#[test]
fn an_environment_limit_looser_than_the_rule_has_no_effect() {
    let loose = EnvLimits { weight: Some(10_000), memory_max: Amount::Bytes(16 * GIB) };
    let rule = share(Share { max: 40, ..Share::default() });
    let grants = |own: EnvLimits| {
        let members = [(1, rule, own), (1, rule, own), (2, weight(300), own)];
        let mut world = tightened(AntiThrash::On, ms(1), &members);
        world.latency = Duration::ZERO;
        world.run(s(300));
        [1, 2, 3].map(|n| world.grants_of(client(n)))
    };
    let plain = grants(EnvLimits::default());
    assert!(plain.iter().all(|grants| grants.len() > 3), "{plain:?}");
    assert_eq!(grants(loose), plain);
}

#[test]
fn an_idle_environment_weight_ranks_a_client_last_in_its_group() {
    let bursts = Plan { start: s(1), gpu: ms(10), cpu: ms(500), phases: 100, ..Plan::default() };
    let waits = |own: EnvLimits, share: Option<Share>| {
        let mut world = tightened(AntiThrash::On, ms(2), &[(1, share, own)]);
        let group = Some(Group { id: GroupId(1), limits: RuleLimits { share, ..RuleLimits::default() } });
        let fellow = world.add(Plan { tenant: TenantId(1), group, ..bursts.clone() });
        world.run(s(100));
        world.models[&fellow].waits.clone()
    };
    for share in [None, weight(100)] {
        let waits = waits(own_weight(0), share);
        assert!(waits.len() > 90 && waits.iter().all(|wait| *wait < ms(4)), "{waits:?}");
    }
    let plain = waits(EnvLimits::default(), None);
    assert!(plain.iter().any(|wait| *wait > s(1)), "{plain:?}");
}

#[test]
fn a_client_is_below_its_minimum_until_it_has_used_all_of_it() {
    for (used, turn) in [(ms(999), ms(250)), (ms(1000), ms(1000))] {
        let mut t = Talk::in_mode(AntiThrash::On);
        (1..3).for_each(|n| drop(t.join_of(TenantId(n), n, GIB)));
        t.put(&[1], RuleLimits { share: bounds(10, 100), ..RuleLimits::default() });
        t.request(1);
        t.after(used);
        t.release(1, ReleaseReason::Idle);
        t.request(2);
        t.request(1);
        t.after(turn - ms(1));
        assert_eq!(t.state(2), LockState::Holding, "{used:?}");
        assert!(t.after(ms(1)).contains(&revoke(2)), "{used:?}");
    }
}

#[test]
fn an_interactive_client_goes_first_again_once_it_has_waited_for_its_used_time() {
    let mut t = Talk::new(settings(AntiThrash::On, s(5)));
    (1..3).for_each(|n| drop(t.join_of(TenantId(n), n, GIB)));
    let interactive = share(Share { interactive: true, ..Share::default() });
    t.put(&[1], RuleLimits { share: interactive, ..RuleLimits::default() });
    t.request(1);
    t.request(2);
    t.after(s(1));
    t.release(1, ReleaseReason::Idle);
    t.request(1);
    t.after(ms(999));
    assert_eq!((t.state(1), t.state(2)), (LockState::Waiting, LockState::Holding));
    assert!(t.after(ms(1)).contains(&revoke(2)));
}

#[test]
fn a_preceding_holder_ends_its_turn_for_memory_that_the_driver_needs() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join_of(TenantId(1), 1, 16 * GIB);
    t.join_of(TenantId(2), 2, GIB);
    t.put(&[2], RuleLimits { share: weight(0), ..RuleLimits::default() });
    t.request(1);
    t.request(2);
    assert!(!t.after(s(60)).contains(&revoke(1)), "the waiting client has weight 0");
    t.join_of(TenantId(3), 3, 0);
    let commands = t.say(Event::ReservationRequested { client: client(3), gpu: gpu(0), bytes: GIB });
    assert!(commands.contains(&revoke(1)), "{commands:?}");
}

#[test]
fn a_changed_share_applies_to_waiting_members_that_the_change_does_not_name() {
    let mut t = Talk::in_mode(AntiThrash::On);
    (1..=3).for_each(|n| drop(t.join_of(TenantId(n), n, GIB)));
    t.put(&[1, 2], RuleLimits { share: weight(100), ..RuleLimits::default() });
    t.request(3);
    t.request(1);
    let urgent = share(Share { priority: 5, ..Share::default() });
    assert!(t.put(&[2], RuleLimits { share: urgent, ..RuleLimits::default() }).contains(&revoke(3)));
}

#[test]
fn a_longer_period_applies_to_a_client_that_has_used_its_maximum() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, GIB);
    t.put(&[1], RuleLimits { share: bounds(0, 10), ..RuleLimits::default() });
    t.request(1);
    assert!(t.after(ms(1001)).contains(&revoke(1)));
    t.release(1, ReleaseReason::Revoked);
    assert!(!t.request(1).contains(&grant(1)));
    let longer = Settings { time_period: PERIOD * 10, ..settings(AntiThrash::On, s(1)) };
    assert!(t.say(Event::Configure(longer)).contains(&grant(1)));
}

#[test]
fn a_queued_waiter_for_several_gpus_leaves_a_free_gpu_to_others_once_it_is_preceded() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    for n in 1..=4 {
        t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(n) });
        for at in [0, 1] {
            t.say(Event::Attached { client: client(n), gpu: gpu(at), engine: Engine::Swap });
        }
    }
    let urgent = share(Share { priority: 5, ..Share::default() });
    t.put(&[4], RuleLimits { share: urgent, ..RuleLimits::default() });
    let ask = |t: &mut Talk, n, at| t.say(Event::Requested { client: client(n), gpus: at });
    ask(&mut t, 1, gpus([0]));
    ask(&mut t, 2, gpus([0, 1]));
    assert_eq!(ask(&mut t, 3, gpus([1])), [], "GPU 1 is kept for client 2");
    let commands = ask(&mut t, 4, gpus([0]));
    assert!(commands.contains(&Command::Grant { client: client(3), gpus: gpus([1]) }), "{commands:?}");
}
