//! Turns: their length in each mode, the reasons to end them early, and the choice of the next
//! client.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

#[test]
fn a_lone_client_is_granted_immediately_and_never_revoked() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, GIB);
    assert_eq!(t.request(1), [grant(1)]);
    assert_eq!(t.after(Duration::from_secs(3600)), []);
    assert_eq!(t.machine.deadline(), None, "an idle scheduler sleeps");
}

#[test]
fn anti_thrash_on_honours_the_time_quantum() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, GIB);
    t.join(2, GIB);
    t.request(1);
    t.after(Duration::from_secs(60));
    assert_eq!(t.request(2), [contended(1, 1, ms(1))], "the clock begins when somebody waits");
    assert_eq!(t.machine.deadline(), Some(t.now + Duration::from_secs(1)));
    assert_eq!(t.after(ms(999)), []);
    assert_eq!(t.after(ms(1)), [revoke(1)]);
    assert_eq!(t.release(1, ReleaseReason::Revoked), [grant(2)]);
}

/// Ends the turn of client `from`, maps what client `to` is then allowed, and lets `from` wait again.
fn next_turn(t: &mut Talk, from: u64, to: u64) {
    t.release(from, ReleaseReason::Revoked);
    assert!(t.map(from).contains(&grant(to)));
    t.request(from);
}

/// Returns a machine with turns of a second on which client 2 was just granted the lock, 8 GiB of its
/// memory are in host memory, and client 1 waits.
fn with_returning_memory() -> Talk {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(2, 12 * GIB);
    t.join(1, 12 * GIB);
    t.request(2);
    t.request(1);
    t.after(Duration::from_secs(1));
    next_turn(&mut t, 2, 1);
    t.map(1);
    t.after(Duration::from_secs(1));
    next_turn(&mut t, 1, 2);
    assert_eq!(t.attachment(2).swapped, 8 * GIB);
    t
}

#[test]
fn a_turn_lasts_at_least_twice_as_long_as_memory_takes_to_return() {
    let mut t = with_returning_memory();
    assert_eq!(t.after(ms(2900)), [], "the turn would be wasted");
    t.report(2, 12 * GIB, 5 * GIB, 0);
    assert_eq!(t.after(ms(600)), [], "a gibibyte has returned");
    t.map(2);
    assert_eq!(t.after(ms(3499)), []);
    assert_eq!(t.after(ms(1)), [revoke(2)]);
}

#[test]
fn a_turn_ends_if_memory_does_not_return() {
    let mut t = with_returning_memory();
    assert_eq!(t.after(ms(2999)), []);
    assert_eq!(t.after(ms(1)), [revoke(2)]);
}

/// What exceeds the GPU stays in host memory, and so does a chunk that the rest of the allowance is too
/// small for.
#[test]
fn a_turn_does_not_wait_for_managed_memory_that_exceeds_the_gpu() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(2, 0);
    t.put(&[2], RuleLimits { managed_beyond_gpu: true, ..RuleLimits::default() });
    t.report(2, 20 * GIB, 0, 0);
    t.join(1, 12 * GIB);
    t.request(2);
    t.map(2);
    t.request(1);
    t.after(Duration::from_secs(1));
    next_turn(&mut t, 2, 1);
    t.map(1);
    t.after(Duration::from_secs(1));
    next_turn(&mut t, 1, 2);
    let allowance = t.attachment(2).allowance;
    assert_eq!(t.after(ms(100)), []);
    t.report(2, 20 * GIB, allowance - 40 * MIB, 0);
    assert_eq!(t.after(ms(899)), []);
    assert_eq!(t.after(ms(1)), [revoke(2)]);
}

#[test]
fn a_turn_does_not_wait_for_memory_that_the_scheduler_has_not_taken() {
    let mut t = Talk::in_mode(AntiThrash::On);
    for n in [1, 2] {
        t.join(n, GIB);
        t.report(n, GIB, 0, 0);
    }
    t.request(1);
    t.request(2);
    for n in [1, 2] {
        assert_eq!((t.attachment(n).swapped, t.after(ms(999))), (GIB, vec![]), "it claims so");
        assert_eq!(t.after(ms(1)), [revoke(n)]);
        t.release(n, ReleaseReason::Revoked);
        t.request(n);
    }
}

#[test]
fn a_turns_clock_is_paused_while_no_client_waits() {
    let mut t = Talk::with_waiter();
    t.after(ms(600));
    assert_eq!(t.say(Event::Cancelled { client: client(2), gpus: gpus([0]) }), [contended(1, 0, ms(1))]);
    assert_eq!(t.after(Duration::from_secs(60)), []);
    t.request(2);
    assert_eq!(t.after(ms(399)), []);
    assert_eq!(t.after(ms(1)), [revoke(1)]);
}

#[test]
fn a_shorter_time_quantum_ends_an_overlong_turn() {
    let mut t = Talk::with_waiter();
    t.after(ms(500));
    assert_eq!(t.say(Event::Configure(settings(AntiThrash::On, ms(400)))), [revoke(1)]);
}

#[test]
fn anti_thrash_off_admits_all_clients_that_fit() {
    let mut t = Talk::in_mode(AntiThrash::Off);
    for n in 1..=4 {
        t.join(n, 4 * GIB);
        assert_eq!(t.request(n), [grant(n)]);
    }
    t.join(5, 4 * GIB);
    let commands = t.request(5);
    assert!(commands.contains(&contended(1, 1, Duration::from_micros(333_332))), "{commands:?}");
    let told = commands.iter().filter(|c| matches!(c, Command::Contended { .. })).count();
    assert_eq!(told, 1, "one holder's bytes are enough: {commands:?}");
}

#[test]
fn anti_thrash_off_admits_managed_clients_immediately() {
    let mut t = Talk::in_mode(AntiThrash::Off);
    t.join(1, 16 * GIB);
    t.request(1);
    t.say(Event::Connected { client: client(2), gang: 0, tenant: TenantId(0) });
    t.say(Event::Attached { client: client(2), gpu: gpu(0), engine: Engine::Managed });
    t.report(2, 40 * GIB, 0, 0);
    assert_eq!(t.request(2), [grant(2)]);
}

#[test]
fn turning_anti_thrash_off_admits_waiting_managed_clients() {
    let mut t = Talk::in_mode(AntiThrash::On);
    for n in [1, 2] {
        t.join(n, 16 * GIB);
        t.request(n);
    }
    t.say(Event::Connected { client: client(3), gang: 0, tenant: TenantId(0) });
    t.say(Event::Attached { client: client(3), gpu: gpu(0), engine: Engine::Managed });
    t.report(3, GIB, 0, 0);
    t.request(3);
    let commands = t.say(Event::Configure(settings(AntiThrash::Off, Duration::from_secs(1))));
    assert_eq!((t.state(2), commands.contains(&grant(3))), (LockState::Waiting, true), "{commands:?}");
}

#[test]
fn turning_anti_thrash_on_revokes_all_but_the_first_holder() {
    let mut t = Talk::in_mode(AntiThrash::Off);
    for n in 1..=3 {
        t.join(n, GIB);
        t.request(n);
    }
    let commands = t.say(Event::Configure(settings(AntiThrash::On, Duration::from_secs(1))));
    assert_eq!(commands, [revoke(2), revoke(3)]);
}

#[test]
fn a_lock_held_before_a_restart_continues_as_a_new_turn() {
    let quantum = Duration::from_secs(10);
    let mut t = Talk::new(settings(AntiThrash::On, quantum));
    t.join(1, GIB);
    t.join(2, GIB);
    let held = |n| Event::Held { client: client(n), gpus: gpus([0]) };
    assert_eq!(t.say(held(1)), [], "it knows");
    assert_eq!(t.say(held(1)), [], "also when it says so twice");
    assert_eq!(t.state(1), LockState::Holding);
    assert!(!t.request(2).contains(&grant(2)), "there is a holder");
    assert!(t.after(quantum).contains(&revoke(1)));
    assert!(t.release(1, ReleaseReason::Revoked).contains(&grant(2)));
    // Only one of the two clients can hold the lock, so client 1 is revoked.
    assert_eq!(t.say(held(1)), [revoke(1)]);
    // The scheduler ignores an unknown client, and a GPU that isn't attached.
    assert_eq!(t.say(held(9)), []);
    assert_eq!(t.say(Event::Held { client: client(1), gpus: gpus([5]) }), []);
}

#[test]
fn auto_keeps_turns_short_if_no_memory_moves() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    t.join(1, GIB);
    t.join(2, GIB);
    t.request(2);
    t.release(2, ReleaseReason::Idle);
    t.request(1);
    t.after(Duration::from_secs(5));
    t.request(2);
    assert_eq!(t.after(ms(149)), [], "as long as it takes to see how full a client keeps the GPU");
    assert_eq!(t.after(ms(1)), [revoke(1)]);
    t.release(1, ReleaseReason::Revoked);
    t.request(1);
    t.say(Event::Utilization { client: client(2), gpu: gpu(0), permille: 1000 });
    assert_eq!(t.after(ms(249)), [], "a quarter more than the 200 ms that the waiter is taken to need");
    assert_eq!(t.after(ms(1)), [revoke(2)]);
}

#[test]
fn the_first_of_two_long_first_bursts_may_end() {
    let mut t = Talk::new(settings(AntiThrash::Auto, Duration::from_secs(30)));
    for n in [1, 2] {
        t.join(n, GIB);
        t.request(n);
    }
    let mut turn = |n, length: u64, why: &str| {
        assert_eq!(t.after(ms(length - 1)), [], "{why}");
        assert_eq!(t.after(ms(1)), [revoke(n)], "{why}");
        t.release(n, ReleaseReason::Revoked);
        t.request(n);
        t.say(Event::Utilization { client: client(n), gpu: gpu(0), permille: 1000 });
    };
    turn(1, 150, "as long as it takes to see how full a client keeps the GPU");
    turn(2, 150, "the same");
    turn(1, 188, "a quarter more than client 2 has had");
    turn(2, 423, "a quarter more than client 1 has had");
    turn(1, 10_000 - 338, "10 s in total, because client 2 has had more than half a second");
    turn(2, 12_500, "a quarter more than client 1 has had");
}

#[test]
fn auto_lengthens_turns_if_memory_must_move() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    t.join(1, 12 * GIB);
    t.join(2, 12 * GIB);
    t.request(1);
    let commands = t.request(2);
    // 8 GiB must be evicted and restored. Until the rate has been measured, the scheduler assumes
    // 24 GiB/s.
    assert!(commands.contains(&contended(1, 1, Duration::from_micros(666_666))), "{commands:?}");
    assert_eq!(t.after(ms(3333)), [], "five times what that takes is more than the time quantum");
    assert_eq!(t.after(ms(1)), [revoke(1)]);
}

#[test]
fn auto_shortens_turns_if_many_clients_wait() {
    let quantum = Duration::from_secs(30);
    let mut t = Talk::new(Settings { max_wait: Duration::from_secs(20), ..settings(AntiThrash::Auto, quantum) });
    for n in 1..=5 {
        t.join(n, 12 * GIB);
        t.request(n);
    }
    assert_eq!(t.after(ms(4999)), []);
    assert_eq!(t.after(ms(1)), [revoke(1)], "a fourth of what the fourth may wait");
}

#[test]
fn the_idle_grace_follows_the_measured_eviction_rate() {
    let mut world = World::with_gpu(AntiThrash::Auto, Duration::from_secs(30), 16 * GIB);
    for _ in 0..2 {
        world.add(Plan { demand: 12 * GIB, rate: GIB, phases: 12, cpu: ms(4000), gpu: ms(2000), ..Plan::default() });
    }
    world.run(Duration::from_secs(600));
    let graces: Vec<Duration> = world
        .commands
        .iter()
        .filter_map(|(_, c)| match c {
            Command::Contended { waiters: 1.., grace, .. } => Some(*grace),
            _ => None,
        })
        .collect();
    assert!(graces.first().unwrap() < &Duration::from_secs(1), "{graces:?}");
    assert!(graces.last().unwrap() > &Duration::from_secs(4), "{graces:?}");
    assert!(graces.is_sorted_by(|before, after| before.mul_f64(0.9) <= *after), "{graces:?}");
}

#[test]
fn short_bursts_beside_long_bursts_wait_only_briefly() {
    let mut world = World::with_gpu(AntiThrash::Auto, Duration::from_secs(30), 16 * GIB);
    let batch = Plan { demand: 8 * GIB, phases: 1, gpu: Duration::from_secs(30), drain: ms(5), ..Plan::default() };
    world.add(batch.clone());
    world.add(batch);
    let chat = world.add(Plan { demand: 0, start: ms(100), phases: 50, cpu: ms(300), gpu: ms(10), ..Plan::default() });
    world.run(Duration::from_secs(100));
    let bursts: Vec<Duration> = world.models[&chat].bursts.iter().map(|(a, b)| *b - *a).collect();
    assert_eq!(bursts.len(), 50);
    let slow = bursts.iter().filter(|b| **b > ms(100)).count();
    assert!(slow <= 3, "while it is not known yet it may take longer: {bursts:?}");
}

#[test]
fn no_client_is_overtaken_for_longer_than_the_time_quantum() {
    let quantum = Duration::from_secs(2);
    let mut world = World::with_gpu(AntiThrash::Auto, quantum, 16 * GIB);
    let long = world.add(Plan { demand: GIB, phases: 1, gpu: Duration::from_secs(3), ..Plan::default() });
    for n in 0..30 {
        // These clients together need more than the GPU's whole time.
        world.add(Plan { demand: 0, start: ms(n * 7), phases: 200, cpu: ms(100), gpu: ms(8), ..Plan::default() });
    }
    world.run(Duration::from_secs(120));
    let longest = world.models[&long].waits.iter().max().unwrap();
    assert!(*longest < quantum + ms(500), "{longest:?}");
}

#[test]
fn three_clients_that_do_not_fit_together_finish_in_turn() {
    let mut world = World::with_gpu(AntiThrash::Auto, Duration::from_secs(5), 16 * GIB);
    let job = Plan { demand: 12 * GIB, phases: 1, gpu: Duration::from_secs(10), ..Plan::default() };
    let clients = [world.add(job.clone()), world.add(job.clone()), world.add(job)];
    assert!(world.run(Duration::from_secs(40)));
    // 8 GiB move at each change of the holder, at 40 GiB/s. Thrashing would take many times longer.
    assert!(world.now < Duration::from_millis(32_500), "{:?}", world.now);
    assert!(clients.iter().all(|c| world.revokes_of(*c).len() <= 2));
}
