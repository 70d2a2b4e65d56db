//! Gangs: groups of clients that wait for each other's kernels.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

/// Creates two jobs of two processes each, and two programs beside the jobs. The two jobs reach the
/// two GPUs in opposite order. Each process has the given demand.
fn two_jobs(mode: AntiThrash, demand: u64, late: Duration, gang: impl Fn(u64) -> u64) -> (World, Vec<ClientId>) {
    let mut world = World::new(settings(mode, Duration::from_secs(2)), 1);
    (0..2).for_each(|n| world.add_gpu(gpu(n), 16 * GIB, 0));
    let plan = Plan { demand, phases: 100, gpu: ms(80), cpu: ms(20), drain: ms(5), ..Plan::default() };
    let mut clients = Vec::new();
    for (job, order) in [(1, [0, 1]), (2, [1, 0])] {
        for (place, at) in order.into_iter().enumerate() {
            let start = ms(100 * place as u64);
            let cpu = plan.cpu + late * place as u32;
            clients.push(world.add(Plan { gpus: gpus([at]), job, gang: gang(job), start, cpu, ..plan.clone() }));
        }
    }
    for at in 0..2 {
        clients.push(world.add(Plan { gpus: gpus([at]), start: ms(50), ..plan.clone() }));
    }
    (world, clients)
}

#[test]
fn declared_gangs_never_deadlock_each_other() {
    for mode in [AntiThrash::On, AntiThrash::Auto] {
        for demand in [GIB, 12 * GIB] {
            let (mut world, clients) = two_jobs(mode, demand, Duration::ZERO, |job| job);
            assert!(world.run(Duration::from_secs(120)), "{mode:?} {demand}: {:?}", world.machine.gpus());
            let last = clients.iter().map(|client| world.finished(*client)).max().unwrap();
            assert!(last < Duration::from_secs(60), "{mode:?} {demand}: {last:?}");
        }
    }
}

/// One process of a job always requests its GPU later than the other process. The other process
/// then waits for the late process, and often loses its own GPU to a revoke during that wait.
#[test]
fn a_gang_revoked_midway_continues_until_it_drains() {
    for mode in [AntiThrash::On, AntiThrash::Auto] {
        for demand in [GIB, 12 * GIB] {
            let (mut world, clients) = two_jobs(mode, demand, ms(20), |job| job);
            assert!(world.run(Duration::from_secs(120)), "{mode:?} {demand}: {:?}", world.machine.gpus());
            let last = clients.iter().map(|client| world.finished(*client)).max().unwrap();
            assert!(last < Duration::from_secs(60), "{mode:?} {demand}: {last:?}");
        }
    }
}

#[test]
fn an_undeclared_deadlock_is_broken_by_running_the_partners() {
    for mode in [AntiThrash::On, AntiThrash::Auto] {
        let (mut world, clients) = two_jobs(mode, GIB, Duration::ZERO, |_| 0);
        assert!(world.run(Duration::from_secs(300)), "{mode:?}: {:?}", world.machine.gpus());
        let last = clients.iter().map(|client| world.finished(*client)).max().unwrap();
        assert!(last < Duration::from_secs(250), "{mode:?}: {last:?}");
    }
}

/// The processes of each job join their gang one after another, beside programs that run already.
#[test]
fn clients_that_become_a_gang_after_they_connected_never_deadlock() {
    for mode in [AntiThrash::On, AntiThrash::Auto] {
        for seed in 0..20 {
            let mut world = World::new(settings(mode, Duration::from_secs(2)), seed);
            (0..2).for_each(|n| world.add_gpu(gpu(n), 16 * GIB, 0));
            let mut dice = Dice::new(seed);
            let plan = Plan { demand: 12 * GIB, gpu: ms(80), drain: ms(5), phases: 20, ..Plan::default() };
            for at in 0..2 {
                world.add(Plan { gpus: gpus([at]), ..plan.clone() });
            }
            let mut ranks = Vec::new();
            for (job, at) in [(1, 0), (2, 1), (2, 0), (1, 1)] {
                // The first work of a rank follows the creation of the communicator.
                let (start, cpu) = (dice.between(ms(0), ms(100)), ms(600));
                let rank = world.add(Plan { gpus: gpus([at]), job, start, cpu, ..plan.clone() });
                ranks.push((dice.between(ms(110), ms(590)), rank, job));
            }
            ranks.sort();
            for (at, client, gang) in ranks {
                world.run(at);
                world.feed(Event::GangChanged { client, gang });
            }
            assert!(world.run(Duration::from_secs(120)), "{mode:?} {seed}: {:?}", world.machine.gpus());
        }
    }
}

#[test]
fn a_deadlock_of_unnamed_jobs_is_explained() {
    let mut world = World::new(settings(AntiThrash::On, Duration::from_secs(2)), 1);
    (0..2).for_each(|n| world.add_gpu(gpu(n), 16 * GIB, 0));
    let rank = |job, at, start| Plan { gpus: gpus([at]), job, demand: 12 * GIB, phases: 100, start, ..Plan::default() };
    let killed = |plan| Plan { killed: Some(Duration::from_secs(61)), ..plan };
    let plans = [rank(1, 0, ms(0)), killed(rank(2, 1, ms(0))), killed(rank(2, 0, ms(100))), rank(1, 1, ms(100))];
    let [one, two, waits, waits_too] = plans.map(|plan| world.add(plan));
    let standstill = |world: &World, client| {
        let explained: Vec<_> = world.machine.explain(client, world.now).collect();
        explained.into_iter().find_map(|explanation| explanation.standstill)
    };
    world.run(Duration::from_secs(2));
    assert_eq!(standstill(&world, waits), None, "the holders may still drain");
    assert!(!world.run(Duration::from_secs(60)));
    let expected = |holder, at, other_holder| Some(Standstill { holder, gpu: gpu(at), other_holder });
    assert_eq!(standstill(&world, waits), expected(one, 1, two));
    assert_eq!(standstill(&world, waits_too), expected(two, 0, one));
    assert_eq!(standstill(&world, one), None, "it does not wait");
    // The end of one job ends the standstill.
    assert!(world.run(Duration::from_secs(120)));
}

#[test]
fn a_wait_for_another_tenants_kernel_is_no_deadlock() {
    let mut world = World::new(settings(AntiThrash::On, Duration::from_secs(2)), 1);
    (0..2).for_each(|n| world.add_gpu(gpu(n), 16 * GIB, 0));
    let endless = Plan { demand: 12 * GIB, endless: true, stuck: u32::MAX, gpu: ENDLESS, ..Plan::default() };
    for (at, tenant) in [(0, 1), (1, 2)] {
        world.add(Plan { gpus: gpus([at]), tenant: TenantId(tenant), ..endless.clone() });
    }
    let waits = [(0, 3), (1, 4)].map(|(at, tenant)| {
        let plan =
            Plan { gpus: gpus([at]), tenant: TenantId(tenant), demand: 12 * GIB, start: ms(100), ..Plan::default() };
        world.add(plan)
    });
    assert!(!world.run(Duration::from_secs(60)));
    for client in waits {
        let explained: Vec<_> = world.machine.explain(client, world.now).collect();
        assert!(matches!(explained[0].obstacle, Some(Obstacle::Pinned(..))), "{explained:?}");
        assert_eq!(explained[0].standstill, None);
    }
}

/// Clients 1 and 2 are a gang that has the GPU, and client 3 requests it. Client 1 was revoked and
/// has released the lock.
fn with_draining_member() -> Talk {
    let mut t = Talk::in_mode(AntiThrash::On);
    for (n, gang) in [(1, 7), (2, 7), (3, 0)] {
        t.join(n, GIB);
        t.say(Event::Disconnected { client: client(n) });
        t.say(Event::Connected { client: client(n), gang, tenant: TenantId(0) });
        t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
        t.report(n, GIB, 0, 0);
        t.map(n);
    }
    t.request(1);
    t.request(2);
    t.after(ms(5));
    assert_eq!((t.state(1), t.state(2)), (LockState::Holding, LockState::Holding));
    t.request(3);
    assert_eq!(t.after(Duration::from_secs(1)), [revoke(1), revoke(2)]);
    assert_eq!(t.release(1, ReleaseReason::Revoked), []);
    assert_eq!(t.request(1), [], "the other one is about to drain");
    t
}

#[test]
fn a_slowly_draining_member_gets_its_gang_until_it_has_drained() {
    let mut t = with_draining_member();
    assert_eq!(t.after(ms(19)), []);
    assert_eq!(t.after(ms(1))[..1], [grant(1)], "it lags");
    assert_eq!(t.after(ms(500)), [], "nobody is asked for what another one may need");
    assert_eq!(t.release(2, ReleaseReason::Revoked), [revoke(1)]);
    assert_eq!(t.request(2), []);
    assert_eq!(t.release(1, ReleaseReason::Revoked)[..1], [grant(3)]);
}

#[test]
fn a_member_that_drains_in_time_delays_the_next_grant() {
    let mut t = with_draining_member();
    t.after(ms(15));
    assert_eq!(t.release(2, ReleaseReason::Revoked)[..1], [grant(3)]);
}

/// Returns a machine with two GPUs. The clients attached their GPUs a while ago. Each client is given by
/// its number, its gang (0: none) and the number of its GPU.
fn on_two_gpus(anti_thrash: AntiThrash, clients: &[(u64, u64, u64)]) -> Talk {
    let mut t = Talk::in_mode(anti_thrash);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    for (n, gang, at) in clients.iter().copied() {
        let (client, gpu) = (client(n), gpu(at));
        let tenant = TenantId(if gang == 0 { 100 + n } else { gang });
        t.say(Event::Connected { client, gang, tenant });
        t.say(Event::Attached { client, gpu, engine: Engine::Swap });
        let report = MemoryReport { ack: u32::MAX, demand: GIB, limit_ack: u32::MAX, ..MemoryReport::default() };
        t.say(Event::Memory { client, gpu, report });
    }
    t.after(Duration::from_secs(2));
    t
}

/// Clients 1 and 2 are a gang, and so are clients 3 and 4. The first client of each gang is on GPU 0,
/// and the other one on GPU 1. Client 1 has GPU 0.
fn with_conflicting_gangs(anti_thrash: AntiThrash) -> Talk {
    let mut t = on_two_gpus(anti_thrash, &[(1, 1, 0), (2, 1, 1), (3, 2, 0), (4, 2, 1)]);
    t.request(1);
    t.after(Duration::from_secs(10));
    assert_eq!(t.state(1), LockState::Holding);
    t
}

#[test]
fn a_gang_is_granted_other_gpus_as_soon_as_a_conflicting_gang_has_left() {
    for leaves in [
        Event::Released { client: client(1), gpus: gpus([0]), reason: ReleaseReason::Idle, busy: Duration::ZERO },
        Event::Detached { client: client(1), gpu: gpu(0) },
        Event::GangChanged { client: client(1), gang: 0 },
        Event::Disconnected { client: client(2) },
    ] {
        let mut t = with_conflicting_gangs(AntiThrash::On);
        t.request_on(4, [1]);
        t.after(ms(50));
        assert_eq!(t.state(4), LockState::Waiting, "the other gang runs");
        assert!(t.say(leaves.clone()).contains(&grant_on(4, 1)), "{leaves:?}");
    }
}

#[test]
fn conflicting_gangs_run_together_without_turns() {
    let mut t = with_conflicting_gangs(AntiThrash::Off);
    let commands = t.request_on(4, [1]);
    assert!(commands.contains(&grant_on(4, 1)), "{commands:?}");
    assert!(!t.after(Duration::from_secs(60)).iter().any(|c| matches!(c, Command::Revoke { .. })));
}

#[test]
fn a_gangs_turn_includes_the_turns_of_members_that_have_left() {
    let mut t = with_conflicting_gangs(AntiThrash::On);
    t.release_on(1, 0, ReleaseReason::Idle);
    t.after(Duration::from_secs(2));
    t.request_on(1, [0]);
    t.request_on(4, [1]);
    t.after(ms(800));
    assert!(t.request_on(2, [1]).contains(&grant_on(2, 1)), "its gang has its turn");
    t.after(ms(100));
    t.release_on(1, 0, ReleaseReason::Idle);
    t.after(ms(99));
    assert_eq!(t.state(2), LockState::Holding);
    assert!(t.after(ms(1)).contains(&revoke_on(2, 1)), "the gang has had a time quantum");
}

#[test]
fn a_gang_precedes_other_clients_only_during_its_turn() {
    let mut t = on_two_gpus(AntiThrash::On, &[(1, 1, 0), (2, 1, 1), (3, 0, 1), (4, 0, 1)]);
    t.request_on(3, [1]);
    t.request_on(4, [1]);
    t.request_on(1, [0]);
    t.after(ms(100));
    t.request_on(2, [1]);
    let queue = |t: &Talk| t.machine.gpus()[1].waiters.iter().map(|waiter| waiter.client).collect::<Vec<_>>();
    assert_eq!(queue(&t), [client(2), client(4)]);
    let explanation = t.machine.explain(client(4), t.now).next().expect("it has a GPU");
    assert_eq!(explanation.ahead.iter().map(|ahead| ahead.reason).collect::<Vec<_>>(), [Reason::GangTurn]);
    t.after(ms(900));
    assert_eq!(queue(&t), [client(4), client(2)]);
}

/// A member that has not drained may need the other member.
#[test]
fn a_gpu_is_kept_for_a_draining_gang_if_a_member_left_it_during_the_turn() {
    for leaves_during_the_turn in [false, true] {
        let mut t = on_two_gpus(AntiThrash::On, &[(1, 1, 0), (2, 1, 1), (3, 0, 1), (4, 0, 0)]);
        t.request_on(3, [1]);
        t.request_on(1, [0]);
        t.request_on(2, [1]);
        t.after(ms(10));
        let leaving = if leaves_during_the_turn { [(3, 1), (1, 0)] } else { [(1, 0), (3, 1)] };
        leaving.into_iter().for_each(|(n, at)| drop(t.release_on(n, at, ReleaseReason::Idle)));
        assert_eq!(t.state(2), LockState::Holding);
        t.request_on(3, [1]);
        assert_eq!(t.after(Duration::from_secs(1)), [revoke_on(2, 1)]);
        assert_eq!(t.request_on(4, [0]).contains(&grant_on(4, 0)), !leaves_during_the_turn);
        let commands = t.release_on(2, 1, ReleaseReason::Revoked);
        assert_eq!(commands.contains(&grant_on(4, 0)), leaves_during_the_turn, "{commands:?}");
    }
}

#[test]
fn a_gpu_on_which_a_member_has_never_run_is_not_kept_for_its_gang() {
    let mut t = on_two_gpus(AntiThrash::On, &[(2, 1, 1), (3, 0, 1), (4, 0, 0)]);
    t.request_on(2, [1]);
    t.after(ms(10));
    t.say(Event::Connected { client: client(1), gang: 1, tenant: TenantId(1) });
    t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Swap });
    t.request_on(3, [1]);
    assert_eq!(t.after(Duration::from_secs(1)), [revoke_on(2, 1)]);
    assert!(t.request_on(4, [0]).contains(&grant_on(4, 0)));
}

#[test]
fn a_withdrawn_revoke_frees_a_gpu_that_was_kept_for_the_gang() {
    let mut t = on_two_gpus(AntiThrash::On, &[(1, 1, 0), (2, 1, 1), (3, 0, 1), (4, 0, 0)]);
    t.request_on(1, [0]);
    t.request_on(2, [1]);
    t.request_on(3, [1]);
    assert_eq!(t.after(Duration::from_secs(1)), [revoke_on(1, 0), revoke_on(2, 1)]);
    t.release_on(1, 0, ReleaseReason::Revoked);
    t.say(Event::Stuck { client: client(2), gpus: gpus([1]), reason: StuckReason::NeedsHost });
    assert_eq!(t.request_on(4, [0]), []);
    t.say(Event::Disconnected { client: client(3) });
    let commands = t.after(ms(100));
    assert_eq!((t.state(2), commands.contains(&grant_on(4, 0))), (LockState::Holding, true), "{commands:?}");
}

#[test]
fn a_gang_has_the_worst_class_of_its_members() {
    let mut t = on_two_gpus(AntiThrash::On, &[(1, 0, 0), (2, 0, 1), (3, 0, 1)]);
    let share = Share { interactive: true, ..Share::default() };
    t.put(&[1, 2], RuleLimits { gang: true, share: Some(share), ..RuleLimits::default() });
    t.request_on(2, [1]);
    t.request_on(3, [1]);
    assert!(t.after(Duration::from_secs(1)).contains(&revoke_on(2, 1)));
    t.release_on(2, 1, ReleaseReason::Revoked);
    assert_eq!(t.state(3), LockState::Holding);
    // The group has used more than its share of GPU 1, but not of GPU 0.
    t.request_on(1, [0]);
    t.request_on(2, [1]);
    t.after(ms(500));
    assert_eq!(t.state(3), LockState::Holding);
}

#[test]
fn a_stuck_member_becomes_undrainable_for_a_conflicting_gang_on_another_gpu() {
    let mut t = with_conflicting_gangs(AntiThrash::On);
    assert!(t.request_on(4, [1]).contains(&revoke_on(1, 0)));
    for _ in 0..30 {
        assert_eq!(t.state(4), LockState::Waiting);
        t.say(Event::Stuck { client: client(1), gpus: gpus([0]), reason: StuckReason::NeedsHost });
        t.after(ms(100));
    }
    assert_eq!((t.state(1), t.state(4)), (LockState::Undrainable, LockState::Holding));
}
