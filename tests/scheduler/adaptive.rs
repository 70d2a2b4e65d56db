//! The policy `adaptive`: the order of clients, the choice of memory to evict, and the guarantee
//! that no client starves.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn adaptive(anti_thrash: AntiThrash, time_quantum: Duration, max_wait: Duration) -> Settings {
    Settings { policy: PolicyName::Adaptive, max_wait, ..settings(anti_thrash, time_quantum) }
}

fn world(settings: Settings) -> World {
    let mut world = World::new(settings, 1);
    world.add_gpu(gpu(0), 16 * GIB, 0);
    world.most_steps = 3_000_000;
    world
}

fn user(n: u64) -> TenantId {
    TenantId(n)
}

fn ended(world: &World, client: ClientId) -> Duration {
    world.models[&client].finished.unwrap_or_else(|| panic!("{client:?} has not ended"))
}

fn grants(world: &World, client: ClientId) -> usize {
    let is_own = |command: &Command| matches!(command, Command::Grant { client: to, .. } if *to == client);
    world.commands.iter().filter(|(_, command)| is_own(command)).count()
}

fn longest_wait(world: &World) -> Duration {
    world.models.values().flat_map(|model| &model.waits).max().copied().unwrap_or_default()
}

#[test]
fn a_new_short_job_overtakes_a_long_job() {
    let mut world = world(adaptive(AntiThrash::Auto, s(30), s(60)));
    let long = world.add(Plan { gpu: s(200), tenant: user(1), ..Plan::default() });
    let short = world.add(Plan { gpu: s(3), start: s(20), tenant: user(2), ..Plan::default() });
    assert!(world.run(s(300)));
    assert!(ended(&world, short) < ms(23_500), "{:?}", ended(&world, short));
    assert!(ended(&world, long) < ms(204_000), "{:?}", ended(&world, long));
}

#[test]
fn equal_jobs_that_do_not_fit_together_run_nearly_in_sequence() {
    let mut world = world(adaptive(AntiThrash::Auto, s(30), s(60)));
    let job = |n| Plan { demand: 12 * GIB, gpu: s(60), tenant: user(n), ..Plan::default() };
    let jobs = [1, 2, 3].map(|n| world.add(job(n)));
    assert!(world.run(s(400)));
    for client in jobs {
        // The client needs one grant to measure how full it keeps the GPU, and one grant for each
        // level below the length of its work: 1, 4, 16 and 64 s.
        assert!(grants(&world, client) <= 5, "{client:?}: {}", grants(&world, client));
    }
    let first = jobs.map(|job| ended(&world, job)).into_iter().min().expect("three jobs");
    assert!(first < s(160), "{first:?}");
}

#[test]
fn gpu_time_is_divided_per_job_and_not_per_user() {
    let mut world = world(adaptive(AntiThrash::Auto, s(5), s(10)));
    let job = |n| Plan { gpu: s(400), tenant: user(n), ..Plan::default() };
    let many = [1, 1, 1].map(|n| world.add(job(n)));
    let one = world.add(job(2));
    world.run(s(120));
    let had = |client: ClientId| world.machine.client(client).expect("a client").attachments[0].lock_time.as_secs_f64();
    let of_many: f64 = many.iter().map(|client| had(*client)).sum();
    assert!(of_many > 2.0 * had(one), "{of_many} and {}", had(one));
}

#[test]
fn waits_are_bounded_by_twice_max_wait_or_eight_rounds() {
    for (mode, max_wait) in [AntiThrash::Auto, AntiThrash::On].into_iter().flat_map(|mode| [(mode, 4), (mode, 0)]) {
        let mut world = world(adaptive(mode, s(1), s(max_wait)));
        // Two long jobs compete with newcomers that would fill the GPU by themselves.
        let long = [1, 2].map(|n| world.add(Plan { gpu: s(60), tenant: user(n), ..Plan::default() }));
        for n in 0..400 {
            world.add(Plan { gpu: ms(950), start: s(n), tenant: user(3), ..Plan::default() });
        }
        world.run(s(400));
        assert!(long.iter().all(|client| grants(&world, *client) > 5), "{mode:?}: {}", grants(&world, long[0]));
        // About five clients wait for turns of 1 s. Clients that have aged longer run first.
        let is_bounded = mode == AntiThrash::Auto && max_wait > 0;
        let bound = if is_bounded { s(2 * max_wait + 4) } else { s(8 * 8 + 4) };
        assert!(longest_wait(&world) < bound, "{mode:?}, {max_wait} s: {:?}", longest_wait(&world));
    }
}

/// A turn is useless if it ends before the client's memory has been restored.
#[test]
fn an_aged_clients_turn_exceeds_its_restore_time() {
    let mut world = world(adaptive(AntiThrash::Auto, s(30), s(20)));
    let large = world.add(Plan { demand: 14 * GIB, gpu: s(300), tenant: user(1), ..Plan::default() });
    for n in 0..400 {
        let start = s(60) + ms(500) * n;
        world.add(Plan { demand: GIB, gpu: ms(600), start, tenant: user(2), leaves: true, ..Plan::default() });
    }
    world.run(s(250));
    let waits: Vec<Duration> = world.models[&large].waits.iter().filter(|wait| **wait > s(10)).copied().collect();
    assert!(!waits.is_empty() && waits.iter().all(|wait| *wait < s(50)), "{waits:?}");
    assert!(grants(&world, large) < 50, "each of its turns is worth its memory: {}", grants(&world, large));
}

/// After half a second at a hundredth of the weight, the client waits for 50 s.
#[test]
fn a_lower_environment_weight_delays_a_client_only_temporarily() {
    let mut t = Talk::new(adaptive(AntiThrash::On, ms(500), s(0)));
    (1..=3).for_each(|n| drop(t.join(n, GIB)));
    let limits = EnvLimits { weight: Some(1), ..EnvLimits::default() };
    t.say(Event::EnvLimits { client: client(2), limits });
    t.request(2);
    t.request(1);
    t.after(ms(500));
    t.release(2, ReleaseReason::Idle);
    t.request(3);
    t.request(2);
    let queue = |t: &Talk| t.machine.gpus()[0].waiters.iter().map(|waiter| waiter.client).collect::<Vec<_>>();
    assert_eq!((t.state(1), queue(&t)), (LockState::Holding, vec![client(3), client(2)]));
    t.release(1, ReleaseReason::Idle);
    t.request(1);
    assert_eq!(queue(&t), [client(1), client(2)]);
    t.after(s(51));
    t.release(3, ReleaseReason::Idle);
    t.request(3);
    assert_eq!((t.state(2), queue(&t)), (LockState::Holding, vec![client(1), client(3)]));
}

/// A turn of a second costs the clients that age little, and shorter turns would be of no use.
#[test]
fn a_turn_lasts_at_least_a_second_before_an_aged_client() {
    let mut t = Talk::new(adaptive(AntiThrash::Auto, s(5), s(4)));
    (1..=3).for_each(|n| drop(t.join(n, GIB)));
    t.request(2);
    t.say(Event::Utilization { client: client(2), gpu: gpu(0), permille: 1000 });
    t.after(s(20));
    t.request(1);
    t.release(2, ReleaseReason::Revoked);
    t.request(2); // it ages after 8 s
    t.after(ms(7950));
    t.request(3);
    t.release(1, ReleaseReason::Idle);
    assert_eq!(t.state(3), LockState::Holding);
    t.after(ms(50));
    t.after(ms(949));
    assert_eq!(t.state(3), LockState::Holding);
    assert!(t.after(ms(1)).contains(&revoke(3)));
}

/// After half a second at a fifth of the weight, the client waits for 2.5 s.
#[test]
fn a_lower_environment_weight_stops_delaying_a_client_without_an_event() {
    let mut t = Talk::new(adaptive(AntiThrash::On, ms(500), s(0)));
    (1..=3).for_each(|n| drop(t.join(n, GIB)));
    let limits = EnvLimits { weight: Some(20), ..EnvLimits::default() };
    t.say(Event::EnvLimits { client: client(2), limits });
    t.request(2);
    t.request(3);
    t.after(ms(500));
    t.release(2, ReleaseReason::Idle);
    t.request(2);
    t.after(ms(1));
    t.request(1);
    let queue = |t: &Talk| t.machine.gpus()[0].waiters.iter().map(|waiter| waiter.client).collect::<Vec<_>>();
    t.after(ms(2400));
    assert_eq!(queue(&t), [client(1), client(2)]);
    t.after(ms(100));
    assert_eq!(queue(&t), [client(2), client(1)]);
}

#[test]
fn clients_that_run_last_are_evicted_first() {
    let mut world = world(adaptive(AntiThrash::Auto, s(30), s(0)));
    for n in 1..=4 {
        let start = ms(500 * n);
        world.add(Plan { demand: 4 * GIB, gpu: s(400), tenant: user(n), start, ..Plan::default() });
    }
    world.run(s(100));
    let line: Vec<ClientId> = world.machine.gpus()[0].waiters.iter().map(|waiter| waiter.client).collect();
    let had_it = |client: ClientId| {
        let is_own = |command: &Command| matches!(command, Command::Revoke { client: of, .. } if *of == client);
        world.commands.iter().rfind(|(_, command)| is_own(command)).map(|(at, _)| *at)
    };
    let last = *line.last().expect("three wait");
    assert!(line.iter().any(|client| had_it(*client) < had_it(last)), "another one ran less recently: {line:?}");
    world.add(Plan { demand: 2 * GIB, gpu: ms(100), start: s(101), tenant: user(9), ..Plan::default() });
    world.run(s(101) + ms(10));
    let evicted = world.commands.iter().find_map(|(at, command)| match command {
        Command::Allowance { client, bytes, .. } if *at > s(101) && *bytes < 4 * GIB => Some(*client),
        _ => None,
    });
    assert_eq!(evicted, Some(last));
}

#[test]
fn shares_hold_for_any_number_of_jobs() {
    for (weights, part) in [((300, 100), 0.75), ((100, 100), 0.5)] {
        let mut world = world(adaptive(AntiThrash::Auto, s(1), s(4)));
        let group = |id, weight| {
            let share = Share { weight, ..Share::default() };
            Some(Group { id: GroupId(id), limits: RuleLimits { share: Some(share), ..RuleLimits::default() } })
        };
        let few = world.add(Plan { gpu: s(400), group: group(1, weights.0), ..Plan::default() });
        for n in 0..4 {
            world.add(Plan { gpu: s(400), start: ms(n), group: group(2, weights.1), ..Plan::default() });
        }
        world.run(s(200));
        let had = world.machine.client(few).expect("a client").attachments[0].lock_time.as_secs_f64() / 200.0;
        assert!((had - part).abs() < 0.05, "{weights:?}: {had}");
    }
}

#[test]
fn clients_without_a_rule_form_one_group_per_user() {
    let mut world = world(adaptive(AntiThrash::Auto, s(1), s(4)));
    let share = Share { weight: 200, ..Share::default() };
    let group = Some(Group { id: GroupId(1), limits: RuleLimits { share: Some(share), ..RuleLimits::default() } });
    let ruled = world.add(Plan { gpu: s(400), group, ..Plan::default() });
    for n in [1, 2, 2] {
        world.add(Plan { gpu: s(400), tenant: user(n), ..Plan::default() });
    }
    world.run(s(600)); // turns take up to 64 s
    let had = world.machine.client(ruled).expect("a client").attachments[0].lock_time.as_secs_f64() / 600.0;
    assert!((had - 0.5).abs() < 0.07, "{had}");
}

#[test]
fn time_min_and_time_max_hold() {
    let mut world = world(adaptive(AntiThrash::Auto, s(1), s(4)));
    let group = |id, min, max| {
        let share = Share { min, max, ..Share::default() };
        Some(Group { id: GroupId(id), limits: RuleLimits { share: Some(share), ..RuleLimits::default() } })
    };
    let owed = world.add(Plan { gpu: s(900), group: group(1, 60, 100), ..Plan::default() });
    let capped = world.add(Plan { gpu: s(900), group: group(2, 0, 10), ..Plan::default() });
    for n in 1..4 {
        world.add(Plan { gpu: s(900), tenant: user(n), ..Plan::default() });
    }
    world.run(s(200));
    let had = |client| world.machine.client(client).expect("a client").attachments[0].lock_time.as_secs_f64() / 200.0;
    assert!(had(owed) > 0.58 && had(capped) < 0.12, "{} and {}", had(owed), had(capped));
}

#[test]
fn an_interactive_client_waits_for_no_turn_to_end() {
    let mut world = world(adaptive(AntiThrash::Auto, s(30), s(60)));
    let share = Share { interactive: true, ..Share::default() };
    let group = Some(Group { id: GroupId(1), limits: RuleLimits { share: Some(share), ..RuleLimits::default() } });
    let person = Plan { gpu: ms(50), cpu: s(1), phases: 20, group, start: s(1), ..Plan::default() };
    let person = world.add(person);
    for n in 1..4 {
        world.add(Plan { gpu: s(100), tenant: user(n), ..Plan::default() });
    }
    world.run(s(60));
    let worst = world.models[&person].waits.iter().max().copied().unwrap_or_default();
    assert!(worst < ms(50), "{worst:?}");
}

#[test]
fn a_policy_change_takes_effect_immediately() {
    let mut world = world(settings(AntiThrash::Auto, s(30)));
    let job = |gpu, start| Plan { demand: 12 * GIB, gpu, start, ..Plan::default() };
    let long = world.add(job(s(300), s(0)));
    let other = world.add(job(s(300), s(1)));
    world.run(s(100));
    let short = world.add(job(s(2), s(101)));
    world.run(s(102));
    assert!(world.models[&short].finished.is_none());
    world.feed(Event::Configure(adaptive(AntiThrash::Auto, s(30), s(60))));
    world.run(s(112));
    assert!(world.models[&short].finished.is_some(), "it has had least");
    assert!(world.run(s(700)));
    assert!(ended(&world, long).max(ended(&world, other)) < s(640));
}
