//! Invariants, tested in random worlds of well-behaved and misbehaving clients, and with
//! meaningless events. `scheduler_sim` has the checks that follow every event.
//! `NVSHARE_SCHEDULER_CASES` sets the number of cases.

use crate::worlds::*;
use nvshare_sched::*;
use proptest::prelude::*;
use proptest::test_runner::RngAlgorithm;
use scheduler_sim::*;
use scheduler_tests::*;
use std::collections::BTreeMap;
use std::time::Duration;

fn config(cases: u32) -> ProptestConfig {
    let wanted = std::env::var("NVSHARE_SCHEDULER_CASES").ok().and_then(|n| n.parse().ok());
    ProptestConfig {
        cases: wanted.unwrap_or(cases),
        failure_persistence: None,
        // Each choice in a strategy creates its own generator. With proptest's default generator,
        // creating the generators took five sixths of the test's time.
        rng_algorithm: RngAlgorithm::XorShift,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config(200))]

    /// Every client with a share of the time finishes, whatever the shares are, even if rules
    /// change.
    #[test]
    fn every_client_with_a_share_finishes(
        seed: u64, mode in mode(), gpus in 1u64..4, clients in 1u64..12, unruly in unruly(), users: bool,
        changes in prop::collection::vec((0u64..4000, 0u64..u64::MAX), 0..3),
    ) {
        let quantum = ms(500);
        // By design, a client whose work never ends keeps clients of a lower priority waiting for ever.
        let unruly = Unruly { lingering: false, ..unruly };
        let mut world = world(seed, mode, quantum, gpus, 0, unruly);
        world.most_steps = 400_000;
        let group = |seed: u64, client: u64| {
            let mut rng = Dice::new(seed);
            let id = (client + seed) % 5;
            let shares = [(); 4].map(|()| {
                let max = 5 + rng.below(96) as u8;
                let weight = [0, 1, 50, 100, 300, 10_000][rng.below(6) as usize];
                let min = if weight == 0 { 0 } else { rng.below(u64::from(max)) as u8 };
                let (priority, interactive) = (rng.below(3) as i8 - 1, rng.one_in(3));
                Some(Share { weight, min, max, priority, interactive }).filter(|_| !rng.one_in(4))
            });
            let gangs = [(); 4].map(|()| unruly.gangs && rng.one_in(4));
            let limits =
                || RuleLimits { share: shares[id as usize], gang: gangs[id as usize], ..RuleLimits::default() };
            (id < 4).then(|| Group { id: GroupId(id), limits: limits() })
        };
        for n in 1..=clients {
            let plan = plan(&mut world.rng, gpus, unruly);
            let tenant = if users { TenantId(n) } else { plan.tenant };
            let own = if unruly.claiming { claims_of_time(&mut world.rng) } else { plan.own };
            world.add(Plan { group: group(seed, n), tenant, own, ..plan });
        }
        let bound = bound(&world, quantum) * 40;
        regroup_now_and_then(&mut world, changes, group);
        let done = world.run(bound);
        prop_assert!(done, "after {bound:?}: {:#?}", unserved(&world));
    }
}

proptest! {
    #![proptest_config(config(250))]

    /// Every client finishes, and the simulation's checks never fail.
    #[test]
    fn every_client_finishes(
        seed: u64, mode in mode(), quantum in 20u64..3000, gpus in 1u64..5, clients in 1u64..14, unruly in unruly(),
    ) {
        let quantum = ms(quantum);
        let mut world = world(seed, mode, quantum, gpus, clients, unruly);
        let bound = bound(&world, quantum);
        let done = world.run(bound);
        prop_assert!(done, "after {bound:?}: {:#?}", unserved(&world));
        world.check_replay(settings_of(mode, quantum));
    }

    /// Every waiting client runs, or its allocation is refused, whatever trouble the GPUs have and
    /// however wrong their measurements are.
    #[test]
    fn every_client_is_served_despite_gpu_trouble(
        seed: u64, mode in mode(), gpus in 1u64..3, clients in 1u64..8, error in 0u64..2 * GIB, unruly in unruly(),
        calm in 0u64..20_000,
    ) {
        troubled(world(seed, mode, ms(500), gpus, 0, unruly), gpus, clients, error, unruly, calm)?;
    }

    /// On a host with little memory, no client is given memory that fits nowhere, and no client
    /// waits for such memory.
    #[test]
    fn memory_that_fits_nowhere_is_refused(
        seed: u64, mode in mode(), gpus in 1u64..4, clients in 1u64..14, host in 0u64..60, unruly in unruly(),
    ) {
        let quantum = ms(500);
        let mut world = world(seed, mode, quantum, gpus, 0, unruly);
        world.set_host(host * GIB);
        for _ in 0..clients {
            let plan = plan(&mut world.rng, gpus, Unruly { pinned: false, ..unruly });
            world.add(plan);
        }
        let bound = bound(&world, quantum);
        let done = world.run(bound);
        prop_assert!(done, "after {bound:?}: {:#?}", unserved(&world));
    }

    /// Groups are promised no more than their limits on each GPU, even if limits change and the
    /// host is small. Within these limits, every client finishes.
    #[test]
    fn groups_stay_within_their_limits(
        seed: u64, mode in mode(), gpus in 1u64..4, clients in 1u64..14, host in prop::option::of(0u64..60),
        unruly in unruly(), changes in prop::collection::vec((0u64..4000, 0u64..u64::MAX), 0..4),
    ) {
        let quantum = ms(500);
        let unruly = Unruly { pinned: false, ..unruly };
        let mut world = world(seed, mode, quantum, gpus, 0, unruly);
        if let Some(host) = host {
            world.set_host(host * GIB);
        }
        let group = |seed: u64, client: u64| {
            let mut rng = Dice::new(seed);
            let most = [Amount::Infinity, Amount::Percent(1 + rng.below(100) as u8), Amount::Bytes(rng.below(24) * GIB / 2)];
            let id = (client + seed) % 4;
            (id < 3).then(|| Group { id: GroupId(id), limits: RuleLimits { memory_max: most[id as usize], ..RuleLimits::default() } })
        };
        for n in 1..=clients {
            let plan = plan(&mut world.rng, gpus, unruly);
            world.add(Plan { group: group(seed, n), ..plan });
        }
        let bound = bound(&world, quantum) + Duration::from_secs(60);
        regroup_now_and_then(&mut world, changes, group);
        let done = world.run(bound);
        prop_assert!(done, "after {bound:?}: {:#?}", unserved(&world));
    }

    /// An allocation that waits for other clients is granted, or refused if no client would ever
    /// free the memory.
    #[test]
    fn every_waiting_allocation_is_answered(
        seed: u64, mode in mode(), gpus in 1u64..4, clients in 1u64..14, host in prop::option::of(0u64..60),
        changes in prop::collection::vec((0u64..4000, 0u64..u64::MAX), 0..4),
    ) {
        let quantum = ms(500);
        let mut world = world(seed, mode, quantum, gpus, 0, Unruly::default());
        if let Some(host) = host {
            world.set_host(host * GIB);
        }
        let group = |seed: u64, client: u64| {
            let mut rng = Dice::new(seed);
            let limits = |n: u64| RuleLimits {
                memory_max: Amount::Bytes((1 + n * 7 % 24) * GIB / 2),
                memory_low: (n.is_multiple_of(3)).then_some(Amount::Percent((n % 100) as u8)),
                swap_max: (n.is_multiple_of(5)).then_some((n % 48) * GIB / 2),
                on_memory_full: if n.is_multiple_of(7) { OnMemoryFull::Fail } else { OnMemoryFull::Wait },
                ..RuleLimits::default()
            };
            let id = (client + seed) % 4;
            (id < 3).then(|| Group { id: GroupId(id), limits: limits((0..=id).map(|_| rng.below(1 << 20)).last().unwrap_or(0)) })
        };
        for n in 1..=clients {
            let plan = plan(&mut world.rng, gpus, Unruly { claiming: seed.is_multiple_of(2), ..Unruly::default() });
            world.add(Plan { group: group(seed, n), leaves: true, ..plan });
        }
        // The bound lets the clients run one after the other, each after a refused allocation.
        let bound = bound(&world, quantum) + Duration::from_secs(60 + 20 * clients);
        regroup_now_and_then(&mut world, changes, group);
        let done = world.run(bound);
        prop_assert!(done, "after {bound:?}: {:#?}", unserved(&world));
    }

    /// Clients with managed memory finish in every mode, even if settings change.
    #[test]
    fn every_client_with_managed_memory_finishes(
        seed: u64, changes in prop::collection::vec((mode(), 20u64..3000, 0u64..9000), 0..4), gpus in 1u64..3,
        clients in 2u64..10, unruly in unruly(),
    ) {
        managed(seed, &changes, gpus, clients, unruly)?;
    }

    /// Clients are put to sleep and woken, and any of the steps may fail. Every client finishes,
    /// and no restore runs out of memory.
    #[test]
    fn every_client_that_sleeps_finishes(
        seed: u64, mode in mode(), gpus in 1u64..4, clients in 1u64..10, unruly in unruly(), until in 500u64..20_000,
        odds in (1u64..6, 2u64..12, 2u64..6, 2u64..6), after in prop::option::of(10u64..5000),
        host in prop::option::of(0u64..60),
    ) {
        Sleepers { seed, mode, gpus, clients, unruly, until, odds, after, host }.are_served()?;
    }

    /// Rooms are opened and closed. Each room becomes ready, is refused, or is closed within its
    /// time limit. No client maps memory that is kept free, and every client finishes.
    #[test]
    fn every_client_finishes_beside_reserved_rooms(
        seed: u64, mode in mode(), gpus in 1u64..4, clients in 1u64..12, unruly in unruly(), until in 500u64..30_000,
    ) {
        beside_rooms(seed, mode, gpus, clients, unruly, ms(until))?;
    }

    /// After a suspend every client still finishes. No client runs before the resume.
    #[test]
    fn every_client_finishes_after_a_suspend(
        seed: u64, mode in mode(), sleeps in prop::collection::vec((0u64..2000, prop_oneof![10u64..8000, Just(30_000)]), 1..3), gpus in 1u64..3, clients in 2u64..8,
    ) {
        let mut world = world(seed, mode, ms(500), gpus, clients, Unruly::default());
        let asleep: u64 = sleeps.iter().map(|(_, length)| length).sum();
        let bound = bound(&world, ms(500)) + Duration::from_secs(10) + ms(asleep);
        for (after, length) in sleeps {
            let at = world.now + ms(after);
            world.run(at);
            world.suspend(true);
            let at = world.now + ms(length);
            let is_over = world.run(at);
            if !is_over && length == 30_000 {
                prop_assert!(world.machine.is_evacuated(), "{:#?}", world.machine.clients());
            }
            world.suspend(false);
        }
        let done = world.run(bound);
        prop_assert!(done, "{:#?}", unserved(&world));
    }

    /// Every client finishes, even if settings change while clients run.
    #[test]
    fn every_client_finishes_after_settings_change(
        seed: u64, changes in prop::collection::vec((mode(), 20u64..3000, 0u64..2000), 1..6), gpus in 1u64..4, clients in 2u64..10,
    ) {
        let mut world = world(seed, (AntiThrash::Auto, PolicyName::Fcfs), ms(500), gpus, clients, Unruly::default());
        let bound = bound(&world, ms(3000)) + Duration::from_secs(10);
        for (mode, quantum, after) in changes {
            let at = world.now + ms(after);
            world.run(at);
            world.feed(Event::Configure(settings_of(mode, ms(quantum))));
        }
        let done = world.run(bound);
        prop_assert!(done, "{:#?}", unserved(&world));
    }
}

/// Creates a world of clients with managed memory. Each change consists of the mode, the time
/// quantum in milliseconds, and the milliseconds since the previous change.
fn managed(
    seed: u64,
    changes: &[(Mode, u64, u64)],
    gpus: u64,
    clients: u64,
    unruly: Unruly,
) -> Result<(), TestCaseError> {
    let unruly = Unruly { managed: true, ..unruly };
    let mut world = world(seed, (AntiThrash::Off, PolicyName::Fcfs), ms(500), gpus, 0, unruly);
    for _ in 0..clients {
        let plan = plan(&mut world.rng, gpus, unruly);
        // The clients together need more memory than the GPUs have.
        let engine = if world.rng.one_in(4) { plan.engine } else { Engine::Managed };
        world.add(Plan { engine, gpu: plan.gpu * 5, ..plan });
    }
    let bound = bound(&world, ms(3000)) + Duration::from_secs(30);
    for &(mode, quantum, after) in changes {
        let at = world.now + ms(after);
        world.run(at);
        world.feed(Event::Configure(settings_of(mode, ms(quantum))));
    }
    let done = world.run(bound);
    prop_assert!(done, "after {bound:?}: {:#?}", unserved(&world));
    Ok(())
}

/// A world that failed once. A client was granted the lock during an eviction of its memory, and
/// could then no longer finish that eviction.
#[test]
fn a_grant_during_an_eviction_blocks_no_other_client() {
    let (on, off) = ((AntiThrash::On, PolicyName::Fcfs), (AntiThrash::Off, PolicyName::Fcfs));
    let unruly = Unruly { stopped: true, killed: true, ..Unruly::default() };
    managed(765_340_403_619_117_952, &[(on, 20, 0), (off, 20, 2746)], 1, 5, unruly).unwrap();
}

/// A world that failed once. A member with managed memory kept its memory while its gang was served,
/// although it needed none, and another member lacked these bytes.
#[test]
fn managed_memory_of_a_gangs_member_leaves_for_another_member() {
    let (on, off) = ((AntiThrash::On, PolicyName::Fcfs), (AntiThrash::Off, PolicyName::Fcfs));
    let unruly = Unruly { stopped: true, gangs: true, ..Unruly::default() };
    managed(2_401_107_293_383_411_632, &[(on, 288, 1954), (off, 20, 299)], 1, 6, unruly).unwrap();
}

/// Creates a world in which memory is reserved for other programs until `until`.
fn beside_rooms(
    seed: u64,
    mode: Mode,
    gpus: u64,
    clients: u64,
    unruly: Unruly,
    until: Duration,
) -> Result<(), TestCaseError> {
    let mut world = world(seed, mode, ms(500), gpus, clients, unruly);
    world.make_rooms(until);
    let bound = bound(&world, ms(500)) * 2 + until + Duration::from_secs(60);
    let done = world.run(bound);
    prop_assert!(done, "after {bound:?}: {:#?}", unserved(&world));
    world.check_replay(settings_of(mode, ms(500)));
    Ok(())
}

/// A world that failed once. A client was granted the lock before its memory had left for a room, and
/// was therefore revoked and granted again at the same time, without end.
#[test]
fn a_client_whose_memory_leaves_for_a_room_is_not_granted_before() {
    let mode = (AntiThrash::On, PolicyName::Fcfs);
    let unruly = Unruly {
        stuck: true,
        stopped: true,
        killed: true,
        pinned: true,
        managed: true,
        claiming: true,
        ..Unruly::default()
    };
    beside_rooms(9_241_517_173_482_066_790, mode, 2, 1, unruly, ms(816)).unwrap();
}

/// A world whose clients are put to sleep and woken.
struct Sleepers {
    seed: u64,
    mode: Mode,
    gpus: u64,
    clients: u64,
    unruly: Unruly,
    /// Milliseconds after which no more clients are put to sleep.
    until: u64,
    /// The odds, as one in `n`, that a client refuses, is silent, fails, or dies.
    odds: (u64, u64, u64, u64),
    /// Milliseconds after which idle clients sleep.
    after: Option<u64>,
    /// GiB of host memory.
    host: Option<u64>,
}

impl Sleepers {
    fn are_served(self) -> Result<(), TestCaseError> {
        let Self { seed, mode, gpus, clients, unruly, until, odds, after, host } = self;
        let sleep_after = after.map(ms);
        let placement = [Placement::Pack, Placement::Spread][(seed % 2) as usize];
        let settings = Settings { context: 256 * MIB, sleep_after, placement, ..settings_of(mode, ms(500)) };
        let mut world = World::new(settings.clone(), seed);
        for n in 0..gpus {
            world.add_gpu(gpu(n), TOTAL, 512 * MIB);
        }
        if let Some(host) = host {
            world.set_host(host * GIB);
        }
        for _ in 0..clients {
            let plan = plan(&mut world.rng, gpus, unruly);
            // Each client's memory fits beside the contexts of all clients.
            world.add(Plan { demand: plan.demand.min(8 * GIB), cpu: plan.cpu * 4, ..plan });
        }
        let (refused, silent, failed, died) = odds;
        world.put_to_sleep(Sleeps { until: ms(until), refused: refused + 1, silent, failed, died });
        // A failed helper is retried after at most 30 s.
        let bound = bound(&world, ms(500)) * 4 + ms(until) + Duration::from_secs(200 * clients);
        world.most_steps = 600_000;
        let done = world.run(bound);
        prop_assert!(done, "after {bound:?}: {:#?}", unserved(&world));
        world.check_replay(settings);
        Ok(())
    }
}

/// Worlds that failed once. In one, contexts were deferred while their GPU was drained. In the
/// other, new contexts counted twice until a measurement was known to include them.
#[test]
fn new_contexts_block_no_other_client() {
    let mode = (AntiThrash::On, PolicyName::Fcfs);
    let unruly = Unruly { stopped: true, gangs: true, claiming: true, ..Unruly::default() };
    let (seed, odds, host) = (5_310_962_096_927_615_282, (1, 2, 2, 2), Some(0));
    let first = Sleepers { seed, mode, gpus: 1, clients: 3, unruly, until: 2870, odds, after: None, host };
    first.are_served().unwrap();
    let unruly = Unruly { stuck: true, managed: true, claiming: true, ..Unruly::default() };
    let (seed, odds, host) = (17_736_497_436_826_320_326, (5, 6, 2, 3), Some(1));
    let second = Sleepers { seed, mode, gpus: 1, clients: 8, unruly, until: 3139, odds, after: None, host };
    second.are_served().unwrap();
}

/// A world that failed once. A client moves to a GPU and may have to return, but the scheduler
/// cannot reserve room for it on both GPUs.
#[test]
fn a_moving_client_keeps_room_on_its_old_gpu() {
    let unruly = Unruly { stuck: true, managed: true, gangs: true, ..Unruly::default() };
    let mode = (AntiThrash::On, PolicyName::Fcfs);
    let (seed, odds, host) = (16_725_226_304_014_557_030, (1, 9, 2, 4), Some(23));
    let world = Sleepers { seed, mode, gpus: 3, clients: 4, unruly, until: 10_494, odds, after: None, host };
    world.are_served().unwrap();
}

fn unserved(world: &World) -> Vec<String> {
    let mut lines: Vec<String> = world.machine.gpus().iter().map(|g| format!("{g:?}")).collect();
    for (id, m) in world.models.iter().filter(|(_, m)| m.finished.is_none() && !m.plan.endless) {
        lines.push(format!("{id:?} {m:?} {:?}", world.machine.client(*id)));
    }
    lines
}

/// Returns any event. The clients and GPUs are few, so events interact.
fn event() -> impl Strategy<Value = Event> {
    let c = || (0u64..6).prop_map(ClientId);
    let g = || (0u64..4).prop_map(gpu);
    let set = || prop::collection::btree_set((0u64..4).prop_map(gpu), 0..4);
    let bytes = || prop_oneof![0u64..40 * GIB, Just(0), Just(u64::MAX), Just(u64::MAX / 2)];
    let engine = prop_oneof![Just(Engine::Swap), Just(Engine::Managed), Just(Engine::None)];
    let reason = prop_oneof![
        Just(ReleaseReason::Idle),
        Just(ReleaseReason::Revoked),
        Just(ReleaseReason::NoMemory),
        Just(ReleaseReason::Gone)
    ];
    let outcome = prop_oneof![
        Just(SleepOutcome::Runs),
        Just(SleepOutcome::Asleep),
        Just(SleepOutcome::Lost),
        Just(SleepOutcome::Unknown)
    ];
    let foreign = prop_oneof![
        Just(ForeignState::Runs),
        Just(ForeignState::Locked),
        any::<bool>().prop_map(|restore_waits| ForeignState::Checkpointed { restore_waits }),
        Just(ForeignState::Lost)
    ];
    let quantum = prop_oneof![1u64..5000, Just(u64::MAX)];
    let report = (prop_oneof![0u32..40, Just(u32::MAX)], bytes(), bytes(), bytes(), bytes()).prop_map(
        |(ack, demand, mapped, swapped, pinned)| MemoryReport { ack, demand, mapped, swapped, pinned, limit_ack: ack },
    );
    prop_oneof![
        1 => Just(Event::Tick),
        1 => (mode(), quantum, bytes(), bytes()).prop_map(|((anti_thrash, policy), q, reserve, context)| {
            Event::Configure(Settings { time_quantum: ms(q), anti_thrash, policy, max_wait: ms(q / 3), reserve, context, time_period: ms(q / 2), placement: if q % 2 == 0 { Placement::Spread } else { Placement::Pack }, sleep_after: Some(ms(q)) })
        }),
        1 => (g(), bytes()).prop_map(|(gpu, total)| Event::GpuFound { gpu, total }),
        1 => g().prop_map(|gpu| Event::GpuGone { gpu }),
        1 => any::<bool>().prop_map(|suspended| Event::Suspend { suspended }),
        1 => (g(), any::<bool>()).prop_map(|(gpu, present)| Event::OtherPrograms { gpu, present }),
        1 => c().prop_map(|client| Event::FoundAsleep { client }),
        2 => (c(), any::<bool>()).prop_map(|(client, paused)| Event::SleepWanted { client, paused }),
        1 => c().prop_map(|client| Event::Resumed { client }),
        2 => (c(), g(), g()).prop_map(|(client, from, to)| Event::Migrate { client, from, to }),
        1 => (g(), any::<bool>()).prop_map(|(gpu, drained)| Event::Drain { gpu, drained }),
        1 => (g(), any::<bool>()).prop_map(|(gpu, failing)| Event::Failing { gpu, failing }),
        2 => (0u64..5, g(), bytes(), 0u64..100_000)
            .prop_map(|(room, gpu, bytes, until)| Event::RoomRequested { room: RoomId(room), gpu, bytes, until: ms(until) }),
        1 => (0u64..5).prop_map(|room| Event::RoomClosed { room: RoomId(room) }),
        1 => prop::collection::vec(set(), 0..3).prop_map(|kinds| Event::Kinds { kinds }),
        1 => prop::collection::btree_map(c(), prop::option::of(set()), 0..4).prop_map(|allowed| Event::Allowed { allowed }),
        2 => c().prop_map(|client| Event::SleepReady { client }),
        1 => c().prop_map(|client| Event::SleepRefused { client, why: SleepObstacle::Busy }),
        1 => c().prop_map(|client| Event::WakeRequested { client }),
        3 => (c(), outcome).prop_map(|(client, outcome)| Event::Checkpointed { client, outcome }),
        3 => (c(), foreign).prop_map(|(client, state)| Event::ForeignCheckpoint { client, state }),
        1 => c().prop_map(|client| Event::RestoreRequested { client }),
        1 => (g(), bytes()).prop_map(|(gpu, rate)| Event::GpuLink { gpu, rate }),
        1 => (g(), 0u64..100_000, bytes(), any::<bool>())
            .prop_map(|(gpu, begun, bytes, complete)| Event::GpuOverhead { gpu, begun: ms(begun), bytes, others: bytes / 2, complete }),
        1 => bytes().prop_map(|bytes| Event::HostMemory { bytes }),
        1 => prop::option::of(bytes()).prop_map(|bytes| Event::HostAhead { bytes }),
        1 => (g(), prop::collection::btree_map(c(), bytes(), 0..4)).prop_map(|(gpu, bytes)| Event::ContextSizes { gpu, bytes }),
        3 => (g(), 0u64..20_000, prop::collection::btree_map(c(), bytes(), 0..4)).prop_map(|(gpu, begun, bytes)| {
            let found = bytes.into_iter().map(|(client, bytes)| (client, Found { least: bytes / 2, most: bytes }));
            Event::Measured { gpu, begun: ms(begun), free: (begun % 3 > 0).then_some(begun << 20), evicted: 0, found: found.collect() }
        }),
        3 => (c(), g(), bytes()).prop_map(|(client, gpu, bytes)| Event::LimitRequested { client, gpu, bytes }),
        2 => (c(), g(), bytes()).prop_map(|(client, gpu, bytes)| Event::ReservationRequested { client, gpu, bytes }),
        2 => (c(), g(), 0u32..2000).prop_map(|(client, gpu, permille)| Event::Utilization { client, gpu, permille }),
        3 => (c(), 0u64..3, 0u64..3).prop_map(|(client, gang, user)| Event::Connected { client, gang, tenant: TenantId(user) }),
        2 => prop::collection::btree_map(c(), prop::option::of((0u64..3, bytes())), 0..4).prop_map(|groups| {
            // Each group has one limit. The limit doesn't depend on the client of the event.
            let max = |(id, bytes): (u64, u64)| Group {
                id: GroupId(id),
                limits: RuleLimits {
                    sleep_after: (bytes % 5 == 0).then_some(SleepAfter::Idle(Duration::from_millis(bytes % 5000))),
                    memory_max: if id == 0 { Amount::Percent(50) } else { Amount::Bytes(bytes) },
                    share: (bytes % 3 > 0).then(|| Share {
                        weight: (bytes % 5) as u16 * 100,
                        min: (bytes % 7) as u8 * 10,
                        max: 100 - (bytes % 11) as u8 * 10,
                        priority: (bytes % 3) as i8 - 1,
                        interactive: bytes % 2 == 0,
                    }),
                    gang: bytes % 4 == 0,
                    managed_beyond_gpu: bytes % 7 == 0,
                    memory_low: (bytes % 13 == 0).then_some(Amount::Bytes(bytes / 2)),
                    swap_max: (bytes % 17 == 0).then_some(bytes / 3),
                    on_memory_full: match bytes % 5 {
                        0 | 1 => OnMemoryFull::Wait,
                        _ => OnMemoryFull::Fail,
                    },
                },
            };
            Event::Groups { groups: groups.into_iter().map(|(client, group)| (client, group.map(max))).collect() }
        }),
        2 => (c(), bytes(), any::<u64>()).prop_map(|(client, bytes, seed)| {
            let mut rng = Dice::new(seed);
            let limits = EnvLimits { memory_max: Amount::Bytes(bytes), ..claims_of_time(&mut rng) };
            Event::EnvLimits { client, limits }
        }),
        1 => c().prop_map(|client| Event::Disconnected { client }),
        5 => (c(), g(), engine).prop_map(|(client, gpu, engine)| Event::Attached { client, gpu, engine }),
        1 => (c(), g()).prop_map(|(client, gpu)| Event::Detached { client, gpu }),
        8 => (c(), g(), report).prop_map(|(client, gpu, report)| Event::Memory { client, gpu, report }),
        8 => (c(), set()).prop_map(|(client, gpus)| Event::Requested { client, gpus }),
        2 => (c(), set()).prop_map(|(client, gpus)| Event::Cancelled { client, gpus }),
        1 => (c(), set()).prop_map(|(client, gpus)| Event::Held { client, gpus }),
        8 => (c(), set(), reason, 0u64..1000).prop_map(|(client, gpus, reason, busy)| {
            Event::Released { client, gpus, reason, busy: ms(busy) }
        }),
        2 => (c(), set()).prop_map(|(client, gpus)| Event::Stuck { client, gpus, reason: StuckReason::NeedsHost }),
        1 => (c(), set()).prop_map(|(client, gpus)| Event::Stuck { client, gpus, reason: StuckReason::HostFull }),
        1 => (c(), set()).prop_map(|(client, gpus)| Event::Stuck { client, gpus, reason: StuckReason::UnseenWork }),
        2 => (c(), any::<bool>()).prop_map(|(client, stopped)| Event::Stopped { client, stopped }),
    ]
}

proptest! {
    #![proptest_config(config(350))]

    /// Whatever the events are, the scheduler doesn't panic, sends no command to an unknown client,
    /// and raises no limit above the existing memory. The same events always have the same answers.
    #[test]
    fn arbitrary_events_do_not_break_the_scheduler(
        start in prop_oneof![Just(0u64), 0u64..1 << 40],
        events in prop::collection::vec((prop_oneof![0u64..50, 0u64..20_000, Just(u64::MAX)], event()), 1..200),
    ) {
        let first = settings_of((AntiThrash::Auto, PolicyName::Fcfs), ms(1000));
        let mut machines = [Machine::new(first.clone()), Machine::new(first)];
        let mut now = ms(start);
        let mut groups: BTreeMap<ClientId, Option<GroupId>> = BTreeMap::new();
        let mut maxima: BTreeMap<GroupId, Amount> = BTreeMap::new();
        for n in 0..3 {
            for m in &mut machines {
                m.handle(now, Event::GpuFound { gpu: gpu(n), total: TOTAL });
            }
        }
        for (after, event) in events {
            now = now.saturating_add(ms(after));
            if let Event::Groups { groups: named } = &event {
                for (client, group) in named.iter().filter(|(client, _)| machines[0].client(**client).is_some()) {
                    groups.insert(*client, group.map(|group| group.id));
                    maxima.extend(group.map(|group| (group.id, group.limits.memory_max)));
                }
            }
            let limits = |m: &Machine| -> BTreeMap<(ClientId, GpuId), u64> {
                let clients = m.clients().into_iter();
                clients.flat_map(|c| c.attachments.into_iter().map(move |s| ((c.client, s.gpu), s.limit))).collect()
            };
            let limits_before = limits(&machines[0]);
            let charges = |m: &Machine| -> BTreeMap<(ClientId, GpuId), u64> {
                let clients = m.clients().into_iter();
                clients.flat_map(|c| c.attachments.into_iter().map(move |s| ((c.client, s.gpu), s.charge))).collect()
            };
            let before = charges(&machines[0]);
            let commands = machines[0].handle(now, event.clone());
            prop_assert_eq!(&commands, &machines[1].handle(now, event.clone()));
            let after = charges(&machines[0]);
            groups.retain(|client, _| machines[0].client(*client).is_some());
            // While a group exceeds its limit, no limit of its members rises, whatever the members
            // report.
            for ((client, gpu), limit) in limits(&machines[0]) {
                let Some(group) = groups.get(&client).copied().flatten() else { continue };
                let total = machines[0].gpu(gpu).unwrap().total;
                let Some(max) = maxima.get(&group).and_then(|max| max.on(total)) else { continue };
                if limit > limits_before.get(&(client, gpu)).copied().unwrap_or(0) {
                    let members = machines[0].clients().into_iter().filter(|c| groups.get(&c.client) == Some(&Some(group)));
                    let attachments = members.flat_map(|c| c.attachments).filter(|s| s.gpu == gpu);
                    let sum = attachments.fold(0u64, |sum, attachment| sum.saturating_add(attachment.committed));
                    prop_assert!(sum <= max, "{:?} on {:?}: {} of {} after {:?}", group, gpu, sum, max, event);
                }
            }
            for command in &commands {
                let gone = command.client().is_some_and(|to| machines[0].client(to).is_none());
                prop_assert!(!gone, "{:?} after {:?}", command, event);
            }
            for view in machines[0].gpus() {
                let attachments: Vec<AttachmentView> = machines[0]
                    .clients()
                    .into_iter()
                    .flat_map(|c| c.attachments)
                    .filter(|s| s.gpu == view.gpu)
                    .collect();
                prop_assert_eq!(attachments.iter().map(|s| s.charge).sum::<u64>(), view.charged);
                prop_assert!(attachments.iter().all(|s| s.charge >= s.allowance && s.charge >= s.mapped));
                // On an overcharged GPU, a client's charge rises only by its own report.
                let reporter = match &event {
                    Event::Memory { client, .. } => Some(*client),
                    _ => None,
                };
                let raised = after.iter().any(|((client, id), charge)| {
                        let old = before.get(&(*client, *id)).copied().unwrap_or(0);
                        *id == view.gpu && Some(*client) != reporter && *charge > old
                    });
                // A measurement that confirms an earlier report may also raise the charge.
                let confirmed = matches!(event, Event::Measured { .. });
                let fits = view.charged <= view.capacity || confirmed;
                prop_assert!(!raised || fits, "{:?} after {:?}", view, event);
            }
        }
    }
}

proptest! {
    #![proptest_config(config(200))]

    /// If every client answers immediately, a request for memory is granted whenever it fits beside
    /// the other clients' memory and the requests granted before.
    #[test]
    fn every_request_that_fits_is_granted(
        host in 0..20 * GIB,
        rounds in prop::collection::vec(prop::collection::btree_map(1u64..6, 0..8 * GIB, 1..5), 1..12),
    ) {
        let mut t = Talk::in_mode(AntiThrash::Auto);
        t.say(Event::HostMemory { bytes: host });
        (1..6).for_each(|n| drop(t.join(n, 0)));
        for round in rounds {
            let mut left = (16 * GIB + host) - (1..6).map(|n| t.attachment(n).demand).sum::<u64>();
            let mut wishes = Vec::new();
            for (n, more) in round {
                let wanted = t.attachment(n).demand + more;
                t.wish(n, wanted);
                if more <= left && wanted <= 16 * GIB {
                    left -= more;
                    wishes.push((n, wanted));
                }
            }
            for n in (0..5).flat_map(|_| 1..6) {
                t.map(n);
                // The clients act as the library does. A client whose request is granted takes the
                // memory. A client whose limit was lowered in the meantime repeats its request.
                wishes.retain(|(n, wanted)| {
                    let has = t.attachment(*n).limit >= *wanted;
                    if has {
                        t.report(*n, *wanted, 0, 0);
                    } else if t.attachment(*n).pending_limit.is_none() {
                        t.wish(*n, *wanted);
                    }
                    !has
                });
            }
            prop_assert!(wishes.is_empty(), "{:?} wait, though there are {} left", wishes, left);
        }
    }
}

proptest! {
    #![proptest_config(config(3))]

    /// Many clients on many GPUs.
    #[test]
    fn many_clients_on_many_gpus_finish(seed: u64, mode in mode()) {
        crowd(seed, mode, 30, 600)?;
    }
}

/// Run this test with `cargo test --release -- --ignored`.
#[test]
#[ignore = "takes minutes without optimisation"]
fn ten_thousand_clients_on_a_thousand_gpus_finish() {
    for mode in [AntiThrash::On, AntiThrash::Auto, AntiThrash::Off] {
        crowd(7, (mode, PolicyName::Fcfs), 1000, 10_000).unwrap();
    }
}

/// Run this test with `NVSHARE_SCHEDULER_CASES=1000000 cargo test --release -- --ignored
/// troubled_worlds`. It checks only the outcome.
#[test]
#[ignore = "for a large number of cases"]
fn every_client_is_served_in_many_troubled_worlds() {
    let cases = config(1000).cases;
    let mut dice = Dice::new(std::env::var("NVSHARE_SCHEDULER_SEED").map_or(1, |seed| seed.parse().expect("a number")));
    for _ in 0..cases {
        let seed = dice.seed();
        let anti_thrash = [AntiThrash::On, AntiThrash::Auto, AntiThrash::Off][dice.below(3) as usize];
        let mode = (anti_thrash, [PolicyName::Fcfs, PolicyName::Adaptive][dice.below(2) as usize]);
        let unruly = Unruly { stopped: dice.one_in(2), killed: dice.one_in(2), ..Unruly::default() };
        let gpus = 1 + dice.below(2);
        let (clients, error, calm) = (1 + dice.below(7), dice.below(2 * GIB), dice.below(20_000));
        let _case = Case(format!("{seed}, {mode:?}, {gpus}, {clients}, {error}, {unruly:?}, {calm}"));
        let mut world = world(seed, mode, ms(500), gpus, 0, unruly);
        (world.keep, world.thorough) = (false, false);
        troubled(world, gpus, clients, error, unruly, calm).unwrap();
    }
}

/// Prints the case when the test panics.
struct Case(String);

impl Drop for Case {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("case: {}", self.0);
        }
    }
}

fn troubled(
    mut world: World,
    gpus: u64,
    clients: u64,
    error: u64,
    unruly: Unruly,
    calm: u64,
) -> Result<(), TestCaseError> {
    let unruly = Unruly { stopped: unruly.stopped, killed: unruly.killed, ..Unruly::default() };
    world.most_steps = 2_000_000;
    world.trouble(ms(calm), error);
    for _ in 0..clients {
        let plan = plan(&mut world.rng, gpus, unruly);
        let growth = if world.rng.one_in(2) { world.rng.below(512 * MIB) } else { 0 };
        // The memory of all phases together fits on the GPU.
        let demand = plan.demand.min(13 * GIB);
        world.add(Plan { demand, growth, ..plan });
    }
    let bound = bound(&world, ms(500)) * 3 + ms(calm) + Duration::from_secs(60);
    let done = world.run(bound);
    prop_assert!(done, "after {bound:?}: {:#?}", unserved(&world));
    Ok(())
}

fn crowd(seed: u64, mode: Mode, gpus: u64, clients: u64) -> Result<(), TestCaseError> {
    let quantum = ms(300);
    let mut world = world(seed, mode, quantum, gpus, clients, Unruly::default());
    world.keep = false;
    world.thorough = false;
    world.most_steps = u64::MAX;
    let bound = bound(&world, quantum);
    let done = world.run(bound);
    world.thorough = true;
    world.feed(Event::Tick);
    prop_assert!(done);
    Ok(())
}
