//! In `auto`, the length of turns depends on the cost of a hand-over if memory must move.

use nvshare_sched::*;
use scheduler_sim::*;
use std::time::Duration;

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn revokes(world: &World) -> usize {
    world.commands.iter().filter(|(_, command)| matches!(command, Command::Revoke { .. })).count()
}

/// Returns the final length of turns of two clients that always have work. `moves` is the number of
/// bytes that don't fit on the GPU. These bytes move at 40 GiB/s in each direction.
fn turn_between_two(settings: Settings, share: Option<Share>, moves: u64) -> Duration {
    let mut world = World::new(settings, 1);
    world.add_gpu(gpu(0), 16 * GIB, 0);
    let limits = RuleLimits { share, ..RuleLimits::default() };
    let group = share.map(|_| Group { id: GroupId(1), limits });
    let clients =
        [(); 2].map(|()| world.add(Plan { demand: 8 * GIB + moves / 2, gpu: s(900), group, ..Plan::default() }));
    world.run(s(900));
    let of = |wanted: fn(&Command) -> Option<ClientId>| {
        world
            .commands
            .iter()
            .filter_map(move |(at, command)| Some((*at, wanted(command).filter(|c| clients.contains(c))?)))
    };
    let (end, holder) = of(|command| match command {
        Command::Revoke { client, .. } => Some(*client),
        _ => None,
    })
    .next_back()
    .expect("turns end");
    let mut grants = of(|command| match command {
        Command::Grant { client, .. } => Some(*client),
        _ => None,
    });
    let begun = grants.rfind(|(at, client)| *client == holder && *at < end).expect("they begin").0;
    end - begun
}

#[test]
fn two_saturated_servers_have_low_latency_and_high_throughput() {
    for users in [[0, 0], [1, 2]] {
        let mut world = World::with_gpu(AntiThrash::Auto, s(30), 16 * GIB);
        world.feed(Event::GpuLink { gpu: gpu(0), rate: 40 * GIB });
        let (answers, answer) = (150, ms(600));
        let server = |tenant| Plan {
            demand: 12 * GIB,
            phases: answers,
            cpu: ms(5),
            gpu: answer,
            drain: ms(100),
            tenant: TenantId(tenant),
            ..Plan::default()
        };
        let servers = users.map(|tenant| world.add(server(tenant)));
        assert!(world.run(s(600)));
        let ends = servers.map(|server| world.models[&server].finished.expect("it has answered all"));
        let took = ends.into_iter().max().expect("two");
        let alone = (answer + ms(5)) * answers * 2;
        assert!(took.mul_f64(0.85) < alone, "together they answer nearly as often as one does: {took:?}, {alone:?}");
        for server in servers {
            let answers = world.models[&server].bursts.iter().map(|(asked, answered)| *answered - *asked);
            let longest = answers.max().unwrap_or_default();
            assert!(longest < s(8), "{longest:?}");
        }
    }
}

#[test]
fn repeating_bursts_are_not_cut_short() {
    // Moving 8 GiB out and in takes 0.4 s. A turn of ten times that length would end in the middle
    // of each burst.
    let mut world = World::with_gpu(AntiThrash::Auto, s(30), 16 * GIB);
    let job = Plan { demand: 12 * GIB, phases: 20, cpu: s(1), gpu: ms(4500), ..Plan::default() };
    world.add(job.clone());
    world.add(job);
    assert!(world.run(s(400)));
    assert!(revokes(&world) <= 4, "only until their length is known: {}", revokes(&world));
}

#[test]
fn a_turn_is_ten_to_sixteen_times_as_long_as_the_memory_exchange() {
    let auto = Settings { max_wait: Duration::ZERO, ..settings(AntiThrash::Auto, s(60)) };
    for moves in [8 * GIB, 12 * GIB, 16 * GIB] {
        let length = turn_between_two(auto.clone(), None, moves).as_secs_f64();
        let exchange = 2.0 * (moves / GIB) as f64 / 40.0;
        let times = length / exchange;
        assert!((9.5..=15.8).contains(&times), "{length} s: {times} times");
    }
}

#[test]
fn a_turn_that_moves_little_memory_lasts_a_few_seconds() {
    let auto = Settings { max_wait: Duration::ZERO, ..settings(AntiThrash::Auto, s(60)) };
    let length = turn_between_two(auto, None, GIB / 4);
    assert!((s(1)..=ms(5100)).contains(&length), "{length:?}");
}

#[test]
fn the_time_quantum_and_max_wait_bound_long_turns() {
    let short = settings(AntiThrash::Auto, s(4));
    assert_eq!(turn_between_two(Settings { max_wait: Duration::ZERO, ..short }, None, 8 * GIB), s(4));
    let many = settings(AntiThrash::Auto, s(60));
    assert_eq!(turn_between_two(Settings { max_wait: s(5), ..many }, None, 8 * GIB), s(5));
}

#[test]
fn a_turn_before_an_idle_weight_client_lasts_the_time_quantum() {
    let auto = Settings { max_wait: Duration::ZERO, ..settings(AntiThrash::Auto, s(60)) };
    let idle = Share { weight: 0, ..Share::default() };
    assert_eq!(turn_between_two(auto, Some(idle), 4 * GIB), s(60));
}
