//! Clients that leave the GPU idle hold the lock at the same time.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

/// Joins two clients whose memory fits. Each has reported how full it keeps the GPU.
fn with_fullness(permille: &[u32; 2]) -> Talk {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    for n in 1..=2 {
        t.join(n, GIB);
        t.request(n);
    }
    for (n, permille) in (1..).zip(permille) {
        assert_eq!(t.state(n), LockState::Holding);
        t.say(Event::Utilization { client: client(n), gpu: gpu(0), permille: *permille });
        if n < 2 {
            assert_eq!(t.after(ms(150)), [revoke(n)]);
            t.release(n, ReleaseReason::Revoked);
            t.request(n);
        }
    }
    t
}

/// Managed memory pages in without the scheduler. Two clients with managed memory that doesn't fit
/// together would thrash.
#[test]
fn managed_clients_run_concurrently_only_if_they_fit() {
    for (second, fits) in [(6 * GIB, true), (6 * GIB + 1, false)] {
        let mut t = Talk::in_mode(AntiThrash::Auto);
        for (n, demand) in [(1, 10 * GIB), (2, second)] {
            t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(0) });
            t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Managed });
            t.report(n, demand, 0, 0);
        }
        let holding = |t: &Talk| -> Vec<u64> { (1..=2).filter(|n| t.state(*n) == LockState::Holding).collect() };
        // Each client reports that it leaves the GPU idle while it is the only holder.
        for round in 0..10 {
            for n in 1..=2 {
                t.map(n);
                t.request(n);
            }
            let [holder] = holding(&t)[..] else { panic!("{:?} in round {round}", holding(&t)) };
            t.say(Event::Utilization { client: client(holder), gpu: gpu(0), permille: 50 });
            if fits && round == 1 {
                assert_eq!(holding(&t).len(), 2);
                break;
            }
            let revoked = (0..100).any(|_| t.after(ms(50)).contains(&revoke(holder)));
            assert!(revoked && holding(&t).is_empty(), "round {round}");
            t.release(holder, ReleaseReason::Revoked);
        }
    }
}

/// For example, a program may hold the lock over D-Bus. The scheduler doesn't know how long that
/// program needs the lock.
#[test]
fn a_client_that_demands_exclusive_use_gets_the_time_quantum() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    for n in 1..=2 {
        t.join(n, GIB);
    }
    t.request(1);
    t.say(Event::Utilization { client: client(1), gpu: gpu(0), permille: 2000 });
    t.request(2);
    assert_eq!(t.after(ms(999)), []);
    assert_eq!(t.after(ms(1)), [revoke(1)]);
}

#[test]
fn a_measuring_turn_ends_once_the_utilization_is_known() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    for n in 1..=2 {
        t.join(n, GIB);
        t.request(n);
    }
    assert_eq!(t.after(ms(50)), []);
    assert_eq!(t.say(Event::Utilization { client: client(1), gpu: gpu(0), permille: 1000 }), [revoke(1)]);
    t.release(1, ReleaseReason::Revoked);
    t.request(1);
    // Client 2's use of the GPU is unknown, so its turn isn't shortened, although client 1's use is
    // known.
    assert_eq!(t.after(ms(50)), []);
    assert_eq!(t.state(2), LockState::Holding);
}

#[test]
fn a_measuring_turn_is_not_cut_short_for_short_bursts() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    for n in 1..=2 {
        t.join(n, GIB);
    }
    for _ in 0..3 {
        t.request(1);
        t.after(ms(5));
        t.release(1, ReleaseReason::Idle);
    }
    t.request(1);
    t.say(Event::Utilization { client: client(1), gpu: gpu(0), permille: 300 });
    t.request(2);
    assert_eq!(t.after(ms(20)), [revoke(1)]);
    t.release(1, ReleaseReason::Revoked);
    t.request(1);
    assert_eq!(t.after(ms(149)), []);
    t.say(Event::Utilization { client: client(2), gpu: gpu(0), permille: 300 });
    assert_eq!([t.state(1), t.state(2)], [LockState::Holding; 2]);
}

#[test]
fn clients_with_low_utilization_run_concurrently() {
    let t = with_fullness(&[300, 200]);
    assert_eq!([t.state(1), t.state(2)], [LockState::Holding; 2]);
}

#[test]
fn clients_with_high_utilization_take_turns() {
    let t = with_fullness(&[900, 800]);
    assert_eq!([t.state(1), t.state(2)], [LockState::Waiting, LockState::Holding]);
}

#[test]
fn a_nearly_idle_client_runs_beside_a_busy_client() {
    let t = with_fullness(&[50, 1000]);
    assert_eq!([t.state(1), t.state(2)], [LockState::Holding; 2]);
}

#[test]
fn clients_that_do_not_fit_together_do_not_run_concurrently() {
    let mut t = with_fullness(&[300, 200]);
    t.report(1, 10 * GIB, GIB, 0);
    assert_eq!([t.state(1), t.state(2)], [LockState::Holding; 2], "together they fit still");
    let commands = t.report(2, 10 * GIB, GIB, 0);
    assert!(commands.contains(&revoke(1)), "{commands:?}");
}

#[test]
fn concurrent_clients_are_measured_again_periodically() {
    let mut t = with_fullness(&[300, 200]);
    assert_eq!(t.after(ms(9999)), []);
    assert_eq!(t.after(ms(1)), [revoke(1)]);
    t.release(1, ReleaseReason::Revoked);
    t.request(1);
    // Each client now keeps 90 % of the GPU busy, so the clients no longer run concurrently.
    t.say(Event::Utilization { client: client(2), gpu: gpu(0), permille: 900 });
    assert_eq!(t.after(ms(150)), [revoke(2)]);
    t.release(2, ReleaseReason::Revoked);
    t.request(2);
    t.say(Event::Utilization { client: client(1), gpu: gpu(0), permille: 900 });
    assert_eq!([t.state(1), t.state(2)], [LockState::Holding, LockState::Waiting]);
}

#[test]
fn clients_of_stable_utilization_are_measured_less_often() {
    let mut t = with_fullness(&[300, 200]);
    let measure = |t: &mut Talk, n: u64, permille: u32| {
        t.release(n, ReleaseReason::Revoked);
        t.request(n);
        t.say(Event::Utilization { client: client(3 - n), gpu: gpu(0), permille });
    };
    for (seconds, said) in [(10, [310, 190]), (20, [280, 200]), (40, [300, 500]), (10, [300, 500])] {
        assert_eq!(t.after(Duration::from_secs(seconds) - ms(1)), [], "{seconds} s");
        let asked = t.after(ms(1));
        let [Command::Revoke { client: first, .. }] = asked[..] else { panic!("{asked:?}") };
        measure(&mut t, first.0, said[2 - first.0 as usize]);
        t.after(ms(150));
        measure(&mut t, 3 - first.0, said[first.0 as usize - 1]);
        assert_eq!([t.state(1), t.state(2)], [LockState::Holding; 2], "{seconds} s");
    }
}

#[test]
fn a_client_of_unknown_utilization_counts_as_busy() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    for n in 1..=2 {
        t.join(n, GIB);
        t.request(n);
    }
    for holder in [1, 2, 1, 2] {
        assert_eq!(t.state(holder), LockState::Holding);
        assert_eq!(t.state(3 - holder), LockState::Waiting);
        t.after(Duration::from_secs(1));
        t.release(holder, ReleaseReason::Revoked);
        t.request(holder);
    }
}

#[test]
fn both_concurrent_holders_yield_to_a_client_that_needs_the_gpu() {
    let mut t = with_fullness(&[300, 200]);
    t.join(3, 16 * GIB);
    t.request(3);
    let commands = t.after(Duration::from_secs(30));
    assert!(commands.contains(&revoke(1)) && commands.contains(&revoke(2)), "{commands:?}");
    t.release(1, ReleaseReason::Revoked);
    t.release(2, ReleaseReason::Revoked);
    t.map(1);
    t.map(2);
    assert_eq!(t.state(3), LockState::Holding);
}

/// Members of one gang are measured although they run at the same time: the overlap can only make
/// their utilization seem higher.
#[test]
fn gangs_with_low_utilization_run_concurrently() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    for (n, gang) in [(1, 8), (2, 8), (3, 9), (4, 9)] {
        t.say(Event::Connected { client: client(n), gang, tenant: TenantId(0) });
        t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
    }
    let request = |t: &mut Talk, two: [u64; 2]| {
        for n in two {
            t.request(n);
        }
        t.after(ms(5));
    };
    let reports = |t: &mut Talk, two: [u64; 2], permille: u32| {
        for n in two {
            t.say(Event::Utilization { client: client(n), gpu: gpu(0), permille });
        }
    };
    request(&mut t, [1, 2]);
    reports(&mut t, [1, 2], 100);
    request(&mut t, [3, 4]);
    assert_eq!(t.after(ms(144)), []);
    assert_eq!(t.after(ms(1))[..2], [revoke(1), revoke(2)], "a turn to measure is short");
    for n in [1, 2] {
        t.release(n, ReleaseReason::Revoked);
    }
    request(&mut t, [1, 2]);
    assert_eq!([1, 2, 3, 4].map(|n| t.state(n) == LockState::Holding), [false, false, true, true]);
    reports(&mut t, [3, 4], 300);
    assert_eq!([1, 2, 3, 4].map(|n| t.state(n)), [LockState::Holding; 4]);
    assert_eq!(t.after(Duration::from_secs(9)), []);
}
