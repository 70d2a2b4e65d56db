//! The copies of the state that status and metrics show, message by message.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::collections::BTreeMap;
use std::time::Duration;

fn activity(t: &Talk, n: u64) -> Activity {
    t.machine.activities(client(n)).next().expect("it has a GPU").1
}

const STALLED: Activity = Activity { is_stalled: true, runs: false };
const RUNS: Activity = Activity { is_stalled: false, runs: true };

#[test]
fn views_count_grants_waits_and_memory_in_the_host() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 6 * GIB);
    t.join(2, 6 * GIB);
    t.request(1);
    t.request(2);
    t.after(ms(300));
    assert!(t.release(1, ReleaseReason::Idle).contains(&grant(2)));
    t.after(ms(200));
    let view = t.attachment(2);
    assert_eq!((view.grants, view.wait_time, view.lock_time), (1, ms(300), ms(200)));
    assert_eq!(t.machine.swapped(), 0);
    t.report(1, 6 * GIB, GIB, 0);
    assert_eq!(t.machine.swapped(), 5 * GIB);
    let limits = EnvLimits { memory_max: Amount::Percent(50), ..EnvLimits::default() };
    t.say(Event::EnvLimits { client: client(1), limits });
    assert_eq!(t.machine.env_memory_max(client(1), gpu(0)), Some(8 * GIB));
    assert_eq!(t.machine.env_memory_max(client(2), gpu(0)), None);
}

#[test]
fn a_view_of_memory_covers_memory_that_is_on_its_way() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join_of(TenantId(3), 1, 4 * GIB);
    let of = |t: &Talk| {
        let (m, c, g) = (&t.machine, client(1), gpu(0));
        (m.charge(c, g), m.extent(c, g), m.resident_and_swapped(c, g), m.charged(g))
    };
    assert_eq!(of(&t), (4 * GIB, Some((4 * GIB, 4 * GIB)), Some((4 * GIB, 0)), 4 * GIB));
    t.join_of(TenantId(3), 2, 14 * GIB);
    t.request(2);
    let leaving = (4 * GIB, Some((2 * GIB, 4 * GIB)), Some((4 * GIB, 0)), 16 * GIB);
    assert_eq!(of(&t), leaving, "2 GiB are being evicted");
    t.map(1);
    t.map(2);
    let freed = (2 * GIB, Some((2 * GIB, 4 * GIB)), Some((2 * GIB, 2 * GIB)), 16 * GIB);
    assert_eq!(of(&t), freed, "no measurement has confirmed that they were freed");
    assert_eq!((t.machine.engine(client(1), gpu(0)), t.machine.offer(gpu(0))), (Some(Engine::Swap), 16 * GIB));
    assert_eq!(t.machine.tenants(), BTreeMap::from([(client(1), TenantId(3)), (client(2), TenantId(3))]));
    // Neither the client nor the GPU is known.
    let (m, c, g) = (&t.machine, client(9), gpu(9));
    assert_eq!((m.charge(c, g), m.extent(c, g), m.resident_and_swapped(c, g), m.charged(g)), (0, None, None, 0));
    assert_eq!((m.engine(c, g), m.committed_or_requested(c, g), m.offer(g), m.is_known(g)), (None, 0, 0, false));
    assert!(m.is_known(gpu(0)) && m.client(c).is_none() && m.gpu(g).is_none());
}

#[test]
fn freed_memory_that_a_measurement_still_shows_is_resident() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 4 * GIB);
    let found = |t: &mut Talk, bytes| {
        let found = [(client(1), exactly(bytes))].into();
        t.say(Event::Measured { gpu: gpu(0), begun: t.now, free: None, evicted: 0, found });
    };
    found(&mut t, 4 * GIB);
    t.join_of(TenantId(2), 2, 14 * GIB);
    t.request(2);
    t.map(1);
    let of = |t: &Talk| (t.machine.extent(client(1), gpu(0)), t.machine.resident_and_swapped(client(1), gpu(0)));
    assert_eq!(of(&t), (Some((2 * GIB, 4 * GIB)), Some((2 * GIB, 2 * GIB))), "no measurement has confirmed it");
    for _ in 0..4 {
        t.after(Duration::from_secs(1));
        found(&mut t, 4 * GIB);
    }
    let view = t.attachment(1);
    assert_eq!((view.unfreed, view.mapped, view.charge), (2 * GIB, 4 * GIB, 4 * GIB));
    assert_eq!(view.eviction_blocked, Some(EvictionBlock::Unfreed));
    assert_eq!(of(&t), (Some((2 * GIB, 4 * GIB)), Some((4 * GIB, 2 * GIB))), "it is asked to evict all of it");
}

/// Most likely, the bytes belong to a context that is larger than was measured.
#[test]
fn few_unverified_bytes_do_not_count_as_resident() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join_of(TenantId(3), 1, 4 * GIB);
    t.join_of(TenantId(3), 2, 13 * GIB);
    t.request(2);
    t.map(1);
    assert_eq!(t.attachment(1).unverified, GIB);
    assert_eq!(t.machine.extent(client(1), gpu(0)), Some((3 * GIB, 3 * GIB)));
}

#[test]
fn a_view_of_turns_includes_the_present_turn_and_the_present_wait() {
    let mut t = Talk::with_waiter();
    t.after(ms(300));
    assert!(t.machine.is_held(gpu(0)));
    let turns = |t: &Talk, n| t.machine.turns(client(n), gpu(0), t.now + ms(100));
    let none = Turns::default();
    assert_eq!(turns(&t, 1), Some(Turns { grants: 1, lock_time: ms(400), ..none }));
    assert_eq!(turns(&t, 2), Some(Turns { waits: ms(400), ..none }));
    t.release(1, ReleaseReason::Idle);
    assert_eq!(turns(&t, 1), Some(Turns { grants: 1, lock_time: ms(300), ..none }));
    assert_eq!(turns(&t, 2), Some(Turns { grants: 1, lock_time: ms(100), wait_time: ms(300), ..none }));
    t.release(2, ReleaseReason::Idle);
    assert!(!t.machine.is_held(gpu(0)));
    assert_eq!(turns(&t, 9), None);
}

#[test]
fn a_client_stalls_while_it_waits_for_the_lock_a_context_or_memory() {
    let mut t = Talk::with_waiter();
    assert_eq!((activity(&t, 1), activity(&t, 2)), (RUNS, STALLED));
    t.say(Event::SleepWanted { client: client(2), paused: true });
    assert_eq!(activity(&t, 2), Activity::default(), "it is paused");
    t.release(1, ReleaseReason::Idle);
    assert_eq!(activity(&t, 1), Activity::default());
    t.say(Event::Drain { gpu: gpu(0), drained: true });
    t.say(Event::Connected { client: client(3), gang: 0, tenant: TenantId(0) });
    t.say(Event::Attached { client: client(3), gpu: gpu(0), engine: Engine::Swap });
    assert_eq!(activity(&t, 3), STALLED);

    let mut t = Talk::with_shared_limit();
    assert_eq!(activity(&t, 2), Activity::default());
    t.wish(2, 4 * GIB);
    assert_eq!((activity(&t, 2), t.machine.committed_or_requested(client(2), gpu(0))), (STALLED, 4 * GIB));
    assert_eq!(t.attachment(2).pending_limit, Some(4 * GIB));
}

#[test]
fn a_suspended_holder_does_not_run() {
    let mut t = Talk::with_waiter();
    t.after(Duration::from_secs(1));
    assert_eq!((activity(&t, 1), t.machine.is_stopped(client(1))), (RUNS, false));
    t.say(Event::Stopped { client: client(1), stopped: true });
    assert_eq!((activity(&t, 1), t.machine.is_stopped(client(1))), (Activity::default(), true));
    assert!(t.machine.client(client(1)).is_some_and(|view| view.stopped));
    assert!(!t.machine.is_foreign(client(1)));
    t.say(Event::ForeignCheckpoint { client: client(1), state: ForeignState::Locked });
    assert!(t.machine.is_foreign(client(1)));
}

#[test]
fn a_view_of_limits_counts_contexts_towards_them() {
    let mut t = Talk::new(Settings { context: 512 * MIB, ..settings(AntiThrash::On, ms(1000)) });
    (1..=3).for_each(|n| drop(t.join(n, 0)));
    t.put(&[1, 2], RuleLimits { memory_max: Amount::Bytes(4 * GIB), ..RuleLimits::default() });
    let own = EnvLimits { memory_max: Amount::Bytes(3 * GIB), ..EnvLimits::default() };
    t.say(Event::EnvLimits { client: client(1), limits: own });
    t.say(Event::ContextSizes { gpu: gpu(0), bytes: [(client(1), 300 * MIB)].into() });
    let of = |n| {
        let (m, c, g) = (&t.machine, client(n), gpu(0));
        (m.lowest_max(c, g), m.memory_max(c, g), m.counted_context(c, g), m.contexts_of_group(c, g))
    };
    assert_eq!(of(1), (Some(3 * GIB), Some(4 * GIB), 300 * MIB, 812 * MIB));
    assert_eq!(of(2), (Some(4 * GIB), Some(4 * GIB), 512 * MIB, 812 * MIB));
    assert_eq!(of(3), (None, None, 512 * MIB, 0));
    assert_eq!((t.machine.lowest_max(client(1), gpu(9)), t.machine.memory_max(client(1), gpu(9))), (None, None));
}

#[test]
fn a_context_exists_once_its_client_has_used_it() {
    let mut t = Talk::in_mode(AntiThrash::On);
    let has = |t: &Talk, n, at| t.machine.has_context(client(n), gpu(0), at);
    t.join(1, 0);
    let allowed = t.now;
    assert!(!has(&t, 1, allowed + Duration::from_secs(9)) && has(&t, 1, allowed + Duration::from_secs(10)));
    t.after(Duration::from_secs(2));
    t.request(1);
    assert!(!has(&t, 1, t.now - ms(1)) && has(&t, 1, t.now));
    assert!(!has(&t, 2, t.now + Duration::from_secs(60)));
}

#[test]
fn a_view_of_a_gpu_shows_its_queue_and_blocked_requests() {
    let mut t = Talk::with_waiter();
    t.say(Event::GpuLink { gpu: gpu(0), rate: 8 * GIB });
    t.join(3, GIB);
    t.after(ms(100));
    t.request(3);
    t.say(Event::Stopped { client: client(2), stopped: true });
    let view = t.machine.gpu(gpu(0)).expect("a GPU");
    let (begun, ends) = (t.now - ms(100), Some(t.now + ms(900)));
    let holder = HolderView { client: client(1), since: begun, state: LockState::Holding, ends };
    let waiter = |n, since, blocked| WaiterView { client: client(n), since, blocked };
    assert_eq!(view.holders, [holder]);
    assert_eq!(view.waiters, [waiter(3, t.now, None), waiter(2, begun, Some(WaitReason::Queue))]);
    assert_eq!(t.machine.deadline(), ends);
    assert_eq!((view.link, view.overhead, view.shortfall, view.trial), (Some(8 * GIB), 0, 0, 0));
    assert_eq!((view.gone, view.drained, view.charged, view.total), (false, false, 3 * GIB, 16 * GIB));
    t.say(Event::Drain { gpu: gpu(0), drained: true });
    assert!(t.machine.gpus()[0].drained);
}

#[test]
fn the_reserve_and_a_context_take_at_most_a_sixteenth_of_a_gpu_each() {
    let mut t = Talk::new(Settings { context: 4 * GIB, reserve: 4 * GIB, ..settings(AntiThrash::On, ms(1000)) });
    assert_eq!(t.machine.gpus()[0].capacity, 15 * GIB);
    t.join(1, 0);
    assert_eq!(t.machine.gpus()[0].capacity, 14 * GIB);
}

#[test]
fn a_waiting_client_that_cannot_sleep_is_in_the_queue_once() {
    let mut t = Talk::with_waiter();
    t.join(3, GIB);
    t.request(3);
    t.say(Event::SleepWanted { client: client(2), paused: false });
    assert_eq!(t.machine.sleep_of(client(2)).obstacle, Some(SleepObstacle::Busy));
    let waiters = t.machine.gpus().remove(0).waiters;
    assert_eq!(waiters.iter().map(|waiter| waiter.client.0).collect::<Vec<_>>(), [2, 3]);
}

#[test]
fn a_turn_that_no_client_ends_has_no_end_in_the_view() {
    let mut t = Talk::in_mode(AntiThrash::On);
    (1..3).for_each(|n| drop(t.join_of(TenantId(n), n, GIB)));
    let idle = Some(Share { weight: 0, ..Share::default() });
    t.put(&[2], RuleLimits { share: idle, ..RuleLimits::default() });
    t.request(1);
    t.request(2);
    assert_eq!(t.machine.gpus()[0].holders[0].ends, None);
}

#[test]
fn reports_of_the_daemon_about_gpus_are_kept() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, GIB);
    assert!(!t.machine.is_failing(gpu(0)) && t.machine.kinds().is_empty());
    t.say(Event::Failing { gpu: gpu(0), failing: true });
    t.say(Event::Kinds { kinds: vec![gpus([0, 1])] });
    t.say(Event::Allowed { allowed: [(client(1), Some(gpus([0])))].into() });
    assert!(t.machine.is_failing(gpu(0)) && !t.machine.is_failing(gpu(9)));
    assert_eq!((t.machine.kinds(), t.machine.allowed(client(1))), (&[gpus([0, 1])][..], Some(&gpus([0]))));
    assert_eq!(t.machine.allowed(client(2)), None);
    t.say(Event::Allowed { allowed: [(client(1), None)].into() });
    assert_eq!(t.machine.allowed(client(1)), None);
}
