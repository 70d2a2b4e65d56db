//! Random worlds for the properties: the actions of their clients, the kinds of misbehaviour, and a
//! bound on waits.

use nvshare_sched::*;
use proptest::prelude::*;
use scheduler_sim::*;
use std::time::Duration;

/// The mode and the policy.
pub type Mode = (AntiThrash, PolicyName);

pub fn mode() -> impl Strategy<Value = Mode> {
    let modes = prop_oneof![Just(AntiThrash::On), Just(AntiThrash::Auto), Just(AntiThrash::Off)];
    (modes, prop_oneof![Just(PolicyName::Fcfs), Just(PolicyName::Adaptive)])
}

pub fn settings_of((anti_thrash, policy): Mode, quantum: Duration) -> Settings {
    Settings { policy, ..scheduler_sim::settings(anti_thrash, quantum) }
}

/// The ways in which the clients of a world are unruly.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unruly {
    pub stuck: bool,
    /// Some drains take seconds, or never end.
    pub lingering: bool,
    pub stopped: bool,
    pub killed: bool,
    pub pinned: bool,
    pub gangs: bool,
    pub managed: bool,
    /// Some clients report bytes as freed that they still have.
    pub lying: bool,
    /// Some clients have environment limits, which are lower than their rules' limits.
    pub claiming: bool,
}

pub fn unruly() -> impl Strategy<Value = Unruly> {
    any::<[bool; 9]>().prop_map(|[stuck, lingering, stopped, killed, pinned, gangs, managed, lying, claiming]| Unruly {
        stuck,
        lingering,
        stopped,
        killed,
        pinned,
        gangs,
        managed,
        lying,
        claiming,
    })
}

/// Returns random environment limits: a memory limit and, in half of the cases, a weight.
pub fn claims(rng: &mut Dice) -> EnvLimits {
    let most = [Amount::Infinity, Amount::Percent(1 + rng.below(100) as u8), Amount::Bytes(rng.below(24) * GIB / 2)];
    EnvLimits {
        memory_max: most[rng.below(3) as usize],
        weight: rng.one_in(2).then(|| [1, 10, 99, 100, 10_000][rng.below(5) as usize]),
    }
}

/// Returns a random environment weight, which limits the client's share of the time, or no weight.
pub fn claims_of_time(rng: &mut Dice) -> EnvLimits {
    EnvLimits { weight: [None, Some(0), Some(1), Some(40), Some(400)][rng.below(5) as usize], ..EnvLimits::default() }
}

pub const TOTAL: u64 = 16 * GIB;

pub fn plan(rng: &mut Dice, gpus: u64, unruly: Unruly) -> Plan {
    let mut set = GpuSet::from([gpu(rng.below(gpus))]);
    while rng.one_in(3) && set.len() < 4 {
        set.insert(gpu(rng.below(gpus)));
    }
    let start = rng.between(ms(0), ms(3000));
    let pinned = if unruly.pinned && rng.one_in(3) { rng.below(256 * MIB) } else { 0 };
    // All pinned memory together must leave room for the largest client. Otherwise that client
    // could never run.
    let largest = match unruly {
        Unruly { lingering: true, .. } => 8, // the largest client must fit beside clients that never drain
        Unruly { pinned: true, lying: true, .. } => 8,
        Unruly { pinned: true, .. } | Unruly { lying: true, .. } => 12,
        _ => 20,
    };
    let endless = unruly.lingering && rng.one_in(5);
    let late = unruly.lingering && !endless && rng.one_in(4);
    let stopped = (unruly.stopped && rng.one_in(5)).then(|| {
        let from = start + rng.between(ms(0), ms(4000));
        (from, from + rng.between(ms(1), ms(20_000)))
    });
    Plan {
        gpus: set,
        job: 0,
        gang: if unruly.gangs && rng.one_in(2) { 1 + rng.below(3) } else { 0 },
        tenant: TenantId(rng.below(3)),
        group: None,
        own: if unruly.claiming && rng.one_in(3) { claims(rng) } else { EnvLimits::default() },
        fullness: [None, Some(1000), Some(900), Some(100), Some(0)][rng.below(5) as usize],
        engine: if unruly.managed && rng.one_in(3) { Engine::Managed } else { Engine::Swap },
        demand: if endless { 0 } else { rng.below(largest) * GIB } + pinned + rng.below(3) * 4096,
        growth: 0,
        pinned,
        start,
        phases: 1 + rng.below(5) as u32,
        cpu: rng.between(ms(0), ms(300)),
        gpu: if endless { ENDLESS } else { rng.between(ms(1), ms(800)) },
        drain: rng.between(ms(0), ms(if late { 10_000 } else { 30 })),
        endless,
        rate: (1 + rng.below(40)) * GIB,
        stuck: match () {
            () if endless && rng.one_in(2) => u32::MAX,
            () if unruly.stuck && rng.one_in(3) => rng.below(8) as u32,
            () => 0,
        },
        stopped,
        killed: (unruly.killed && rng.one_in(4)).then(|| start + rng.between(ms(0), ms(5000))),
        lie: (unruly.lying && rng.one_in(3)).then(|| match rng.one_in(3) {
            true => Lie { bytes: rng.below(256 * MIB), late: None },
            false => Lie { bytes: rng.below(16) * GIB, late: Some(rng.between(ms(0), ms(8000))) },
        }),
        leaves: rng.one_in(2),
    }
}

pub fn world(seed: u64, mode: Mode, quantum: Duration, gpus: u64, clients: u64, unruly: Unruly) -> World {
    let mut world = World::new(settings_of(mode, quantum), seed);
    for n in 0..gpus {
        world.add_gpu(gpu(n), TOTAL, 512 * MIB);
    }
    if unruly.lying {
        world.measure();
    }
    for _ in 0..clients {
        let plan = plan(&mut world.rng, gpus, unruly);
        world.add(plan);
    }
    world
}

/// Returns an upper bound: the time to run all clients one after the other, each at its slowest.
pub fn bound(world: &World, quantum: Duration) -> Duration {
    let mut sum = Duration::from_secs(30);
    for m in world.models.values() {
        let p = &m.plan;
        if p.endless {
            sum += Duration::from_secs(10); // the scheduler waits for such a client once
            continue;
        }
        let turns = p.phases + (p.gpu.as_nanos() * u128::from(p.phases) / ms(20).as_nanos()) as u32;
        let swap = Duration::from_secs_f64(2.0 * p.demand as f64 / p.rate as f64);
        sum += (p.cpu + p.gpu) * p.phases + (p.drain * 2 + swap * 4 + ms(10)) * turns.max(1) + quantum;
        sum += Duration::from_secs(8) * turns.max(1) * u32::from(p.lie.is_some());
        sum += Duration::from_secs(25) * u32::from(p.stopped.is_some()) + Duration::from_secs(5) * p.stuck;
    }
    sum
}

/// At each of these moments, moves every client to another group. The group depends on the client
/// and on the moment's seed.
pub fn regroup_now_and_then(world: &mut World, changes: Vec<(u64, u64)>, group: impl Fn(u64, u64) -> Option<Group>) {
    for (after, seed) in changes {
        let at = world.now + ms(after);
        world.run(at);
        world.regroup(|client| group(seed, client.0));
    }
}
