//! While the first client in a GPU's queue waits for other GPUs, other clients use the GPU.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;

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

#[test]
fn a_free_gpu_of_a_waiting_gpu_set_is_lent_until_the_set_is_free() {
    let mut t = two_gpus(AntiThrash::On);
    t.request_on(1, [0]);
    t.request_on(3, [0, 1]);
    t.after(ms(100));
    assert_eq!(t.request_on(2, [1])[..1], [grant_on(2, 1)]);
    assert_eq!(t.request_on(4, [0, 1]), [], "it wants what the first one waits for");
    t.after(ms(700));
    assert_eq!(t.release_on(2, 1, ReleaseReason::Idle), []);
    assert_eq!(t.request_on(5, [1])[..1], [grant_on(5, 1)], "for 200 ms");
    assert_eq!(t.after(ms(199)), []);
    assert_eq!(t.after(ms(1)), [revoke_on(1, 0), revoke_on(5, 1)]);
    assert_eq!(t.release_on(5, 1, ReleaseReason::Revoked), []);
    assert_eq!(t.request_on(2, [1]), [], "the other GPU is about to be free");
}

#[test]
fn a_gpu_of_a_preceded_gpu_set_is_lent_for_short_turns() {
    let mut t = two_gpus(AntiThrash::On);
    t.request_on(1, [0]);
    t.request_on(2, [1]);
    t.request_on(5, [1]);
    t.request_on(3, [0, 1]);
    assert_eq!(t.after(ms(1000)), [revoke_on(1, 0), revoke_on(2, 1)]);
    t.release_on(1, 0, ReleaseReason::Revoked);
    // The scheduler lends the GPU for 150 ms at a time.
    assert_eq!(t.request_on(4, [0])[..1], [grant_on(4, 0)]);
    assert_eq!(t.after(ms(149)), []);
    assert_eq!(t.after(ms(1)), [revoke_on(4, 0)]);
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
    t.request_on(3, [0]);
    t.request_on(5, [0]);
    assert_eq!(t.after(ms(1000)), [revoke_on(3, 0)]);
    t.release_on(3, 0, ReleaseReason::Revoked);
    t.release_on(5, 0, ReleaseReason::Idle);
    t.request_on(1, [1]);
    t.request_on(3, [0, 1]);
    t.after(ms(900));
    assert_eq!(t.request_on(4, [0]), [], "GPU 1 will be free in 100 ms");
    assert_eq!(t.request_on(6, [1])[..1], [grant_on(4, 0)]);
}

#[test]
fn backfill_admits_no_client_whose_memory_must_move() {
    let mut t = two_gpus(AntiThrash::On);
    t.report(3, 8 * GIB, 0, 0);
    t.map(3);
    t.request_on(1, [1]);
    t.request_on(3, [0, 1]);
    t.report(2, 12 * GIB, 0, 0);
    t.map(2);
    t.request(2);
    assert_eq!(t.state(2), LockState::Waiting, "8 GiB of it are there");
    t.request(4);
    assert_eq!(t.state(4), LockState::Holding, "this one needs none");
}
