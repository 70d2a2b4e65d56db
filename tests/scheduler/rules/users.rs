//! Users take turns, whatever the number of their clients.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

/// Connects clients 1, 2, … of these users. All of them always need the whole GPU. Returns the
/// clients in the order of their turns.
fn turns_of(users: &[u64], count: usize) -> Vec<u64> {
    let mut t = Talk::in_mode(AntiThrash::On);
    for (n, user) in (1..).zip(users) {
        t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(*user) });
        t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
        t.report(n, 0, 0, 0);
        t.after(ms(1));
        t.request(n);
    }
    let mut turns = Vec::new();
    while turns.len() < count {
        let holder = t.machine.gpu(gpu(0)).unwrap().holders[0].client.0;
        turns.push(holder);
        assert!(t.after(Duration::from_secs(1)).contains(&revoke(holder)));
        t.release(holder, ReleaseReason::Revoked);
        t.request(holder);
    }
    turns
}

#[test]
fn clients_of_one_user_take_turns() {
    assert_eq!(turns_of(&[0, 0, 0], 7), [1, 2, 3, 1, 2, 3, 1]);
}

#[test]
fn turns_are_divided_per_user_and_not_per_client() {
    assert_eq!(turns_of(&[0, 0, 0, 7], 9), [1, 4, 2, 4, 3, 4, 1, 4, 2]);
    assert_eq!(turns_of(&[0, 0, 7, 7], 8), [1, 3, 2, 4, 1, 3, 2, 4]);
}

#[test]
fn three_users_share_the_gpu_in_thirds() {
    let turns = turns_of(&[1, 1, 1, 2, 2, 3], 30);
    for clients in [1..=3u64, 4..=5, 6..=6] {
        assert_eq!(turns.iter().filter(|c| clients.contains(*c)).count(), 10, "{turns:?}");
    }
}

#[test]
fn a_holder_that_is_next_itself_is_not_revoked() {
    let mut t = Talk::in_mode(AntiThrash::On);
    for n in 1..=2 {
        t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(n) });
        t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
        t.report(n, 0, 0, 0);
        t.request(n);
    }
    assert_eq!(t.after(Duration::from_secs(1)), [revoke(1)]);
    t.release(1, ReleaseReason::Revoked);
    t.request(1);
    // Client 2 takes 2 s longer to drain, so client 1 is owed that time.
    assert_eq!(t.after(Duration::from_secs(1)), [revoke(2)]);
    t.after(Duration::from_secs(2));
    t.release(2, ReleaseReason::Revoked);
    t.request(2);
    assert_eq!(t.state(1), LockState::Holding);
    // Client 1 continues until both clients have had the same time.
    assert_eq!(t.after(Duration::from_secs(1)), []);
    assert_eq!(t.after(ms(499)), []);
    assert_eq!(t.after(ms(1)), [revoke(1)]);
    t.release(1, ReleaseReason::Revoked);
    t.request(1);
    assert_eq!(t.state(2), LockState::Holding);
}

#[test]
fn time_used_on_one_gpu_delays_only_requests_that_want_that_gpu() {
    let mut t = Talk::in_mode(AntiThrash::On);
    (1..3).for_each(|n| drop(t.say(Event::GpuFound { gpu: gpu(n), total: 16 * GIB })));
    for (n, user) in [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)] {
        t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(user) });
        (0..3).for_each(|at| drop(t.say(Event::Attached { client: client(n), gpu: gpu(at), engine: Engine::Swap })));
    }
    let ask = |t: &mut Talk, n, gpus| t.say(Event::Requested { client: client(n), gpus });
    ask(&mut t, 1, gpus([1]));
    ask(&mut t, 4, gpus([1]));
    ask(&mut t, 5, gpus([0]));
    t.after(Duration::from_secs(1));
    let (reason, busy) = (ReleaseReason::Revoked, Duration::ZERO);
    t.say(Event::Released { client: client(1), gpus: gpus([1]), reason, busy });
    ask(&mut t, 2, gpus([0, 1]));
    t.after(ms(1));
    ask(&mut t, 3, gpus([0, 2]));
    let commands = t.release(5, ReleaseReason::Idle);
    assert!(commands.contains(&Command::Grant { client: client(3), gpus: gpus([0, 2]) }), "{commands:?}");
}

#[test]
fn time_used_on_an_uncontended_gpu_is_not_held_against_a_user() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    for n in 1..=5 {
        t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(n) });
        t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
        t.report(n, 0, 0, 0);
    }
    // Client 1 always has work. Clients 2 and 5 sometimes have a little work.
    t.request(1);
    for _ in 0..500 {
        t.request(2);
        t.request(5);
        t.after(Duration::from_secs(1));
        t.release(1, ReleaseReason::Revoked);
        t.request(1);
        for brief in [2, 5] {
            t.after(ms(5));
            t.release(brief, ReleaseReason::Idle);
        }
        t.after(ms(5));
        assert_eq!(t.state(1), LockState::Holding);
    }
    // Clients 3 and 4 always have work from now on, too.
    t.request(3);
    t.request(4);
    let mut turns = Vec::new();
    for _ in 0..9 {
        let holder = t.machine.gpu(gpu(0)).unwrap().holders[0].client.0;
        turns.push(holder);
        t.after(Duration::from_secs(1));
        t.release(holder, ReleaseReason::Revoked);
        t.request(holder);
    }
    assert!(turns.iter().filter(|turn| **turn == 1).count() >= 3, "{turns:?}");
}

#[test]
fn clients_with_short_bursts_are_granted_without_a_measuring_turn() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    t.join(1, GIB);
    t.join(2, GIB);
    t.request(1);
    for round in 0..5 {
        t.request(2);
        let turn = if round == 0 { 150 } else { 50 };
        t.after(ms(turn));
        assert_eq!(t.state(1), LockState::Revoking, "in round {round}");
        t.release(1, ReleaseReason::Revoked);
        t.request(1);
        t.after(ms(5));
        t.release(2, ReleaseReason::Idle);
    }
}
