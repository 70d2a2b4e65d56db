//! While the first client in a GPU's queue waits for other GPUs, other clients use the GPU.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

/// Two GPUs, and five clients that need no memory.
fn two_gpus(anti_thrash: AntiThrash) -> Talk {
    let mut t = Talk::in_mode(anti_thrash);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    for n in 1..=5 {
        t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(0) });
        for at in [0, 1] {
            t.say(Event::Attached { client: client(n), gpu: gpu(at), engine: Engine::Swap });
        }
    }
    t
}

fn ask<const N: usize>(t: &mut Talk, n: u64, at: [u64; N]) -> Vec<Command> {
    t.say(Event::Requested { client: client(n), gpus: gpus(at) })
}

fn leave(t: &mut Talk, n: u64, at: u64, reason: ReleaseReason) -> Vec<Command> {
    t.say(Event::Released { client: client(n), gpus: gpus([at]), reason, busy: Duration::ZERO })
}

fn granted(n: u64, at: u64) -> Command {
    Command::Grant { client: client(n), gpus: gpus([at]) }
}

fn revoked(n: u64, at: u64) -> Command {
    Command::Revoke { client: client(n), gpus: gpus([at]) }
}

#[test]
fn a_free_gpu_of_a_waiting_gpu_set_is_lent_until_the_set_is_free() {
    let mut t = two_gpus(AntiThrash::On);
    ask(&mut t, 1, [0]);
    ask(&mut t, 3, [0, 1]);
    t.after(ms(100));
    assert_eq!(ask(&mut t, 2, [1])[..1], [granted(2, 1)]);
    assert_eq!(ask(&mut t, 4, [0, 1]), [], "it wants what the first one waits for");
    t.after(ms(700));
    assert_eq!(leave(&mut t, 2, 1, ReleaseReason::Idle), []);
    assert_eq!(ask(&mut t, 5, [1])[..1], [granted(5, 1)], "for 200 ms");
    assert_eq!(t.after(ms(199)), []);
    assert_eq!(t.after(ms(1)), [revoked(1, 0), revoked(5, 1)]);
    assert_eq!(leave(&mut t, 5, 1, ReleaseReason::Revoked), []);
    assert_eq!(ask(&mut t, 2, [1]), [], "the other GPU is about to be free");
}

#[test]
fn a_gpu_of_a_preceded_gpu_set_is_lent_for_short_turns() {
    let mut t = two_gpus(AntiThrash::On);
    ask(&mut t, 1, [0]);
    ask(&mut t, 2, [1]);
    ask(&mut t, 5, [1]);
    ask(&mut t, 3, [0, 1]);
    assert_eq!(t.after(ms(1000)), [revoked(1, 0), revoked(2, 1)]);
    leave(&mut t, 1, 0, ReleaseReason::Revoked);
    // The scheduler lends the GPU for 150 ms at a time.
    assert_eq!(ask(&mut t, 4, [0])[..1], [granted(4, 0)]);
    assert_eq!(t.after(ms(149)), []);
    assert_eq!(t.after(ms(1)), [revoked(4, 0)]);
}

/// Client 3 is a client of user 1, who has used GPU 0, so client 6 of another user precedes it.
#[test]
fn a_gpu_is_lent_once_its_first_client_is_preceded_on_another_gpu() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    for (n, user) in [(1, 2), (3, 1), (4, 1), (5, 3), (6, 4)] {
        t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(user) });
        for at in [0, 1] {
            t.say(Event::Attached { client: client(n), gpu: gpu(at), engine: Engine::Swap });
        }
    }
    ask(&mut t, 3, [0]);
    ask(&mut t, 5, [0]);
    assert_eq!(t.after(ms(1000)), [revoked(3, 0)]);
    leave(&mut t, 3, 0, ReleaseReason::Revoked);
    leave(&mut t, 5, 0, ReleaseReason::Idle);
    ask(&mut t, 1, [1]);
    ask(&mut t, 3, [0, 1]);
    t.after(ms(900));
    assert_eq!(ask(&mut t, 4, [0]), [], "GPU 1 will be free in 100 ms");
    assert_eq!(ask(&mut t, 6, [1])[..1], [granted(4, 0)]);
}

#[test]
fn backfill_admits_no_client_whose_memory_must_move() {
    let mut t = two_gpus(AntiThrash::On);
    t.report(3, 8 * GIB, 0, 0);
    t.map(3);
    ask(&mut t, 1, [1]);
    ask(&mut t, 3, [0, 1]);
    t.report(2, 12 * GIB, 0, 0);
    t.map(2);
    t.request(2);
    assert_eq!(t.state(2), LockState::Waiting, "8 GiB of it are there");
    t.request(4);
    assert_eq!(t.state(4), LockState::Holding, "this one needs none");
}
