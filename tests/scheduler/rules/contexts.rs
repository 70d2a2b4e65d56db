//! Contexts that wait for room, and frees that no measurement has confirmed yet.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::collections::BTreeMap;
use std::time::Duration;

#[test]
fn unverified_bytes_delay_a_grant_only_if_they_are_free() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join_of(TenantId(1), 3, 3 * GIB);
    t.join(1, 8 * GIB);
    t.report(1, 0, 8 * GIB, 0);
    t.join(2, 12 * GIB);
    t.request(2);
    // Client 2 belongs to the same user. So the scheduler believes client 1's report of 7 GiB
    // freed, and client 2 uses them.
    t.map(1);
    assert_eq!(t.state(2), LockState::Holding);
    t.map(2);
    t.release(2, ReleaseReason::Idle);
    t.join_of(TenantId(1), 4, 8 * GIB + 4096);
    let allowed = |t: &Talk| -> u64 { [1, 2, 3].map(|n| t.attachment(n).allowance).iter().sum() };
    let before = allowed(&t);
    assert_eq!((before, t.attachment(4).allowance), (16 * GIB, 0));
    t.request(4);
    assert_eq!(before - allowed(&t), 8 * GIB + 4096, "nothing is free, or would be if the doubts ended");
}

#[test]
fn unverified_bytes_for_a_holder_go_to_no_later_client() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 8 * GIB);
    t.join_of(TenantId(1), 2, 4 * GIB);
    t.join_of(TenantId(1), 3, 4 * GIB);
    t.request(1);
    t.request(2);
    t.report(2, 5 * GIB, 4 * GIB, 0);
    t.report(1, 9 * GIB, 8 * GIB, 0);
    assert_eq!(t.attachment(3).allowance, 2 * GIB, "it gives for both");
    t.now += ms(1);
    // Client 3 has been sent its present allowance, and then two evictions in four steps each.
    let half = 5;
    assert_eq!(allowances(&t.acknowledge(3, half, 4 * GIB, 3 * GIB, 0)), [], "client 2 has no doubts, but comes later");
    let found = [(1, 8), (2, 4), (3, 3)].map(|(n, gib)| (client(n), exactly(gib * GIB))).into();
    assert_eq!(
        allowances(&t.say(Event::Measured { gpu: gpu(0), begun: t.now, free: None, evicted: 0, found })),
        [(1, 9 * GIB)]
    );
}

#[test]
fn freed_memory_that_was_measured_is_not_measured_again_at_once() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join_of(TenantId(1), 1, 8 * GIB);
    t.join_of(TenantId(2), 2, 12 * GIB);
    t.request(2);
    assert!(t.map(1).contains(&Command::Measure { gpu: gpu(0) }));
    assert_eq!((t.attachment(1).unverified, t.state(2)), (4 * GIB, LockState::Waiting));
    t.now += ms(1);
    let found = [(client(1), exactly(8 * GIB)), (client(2), exactly(8 * GIB))].into();
    let commands = t.say(Event::Measured { gpu: gpu(0), begun: t.now, free: None, evicted: 0, found });
    assert!(!commands.contains(&Command::Measure { gpu: gpu(0) }), "{commands:?}");
    assert_eq!((t.attachment(1).unverified, t.state(2)), (4 * GIB, LockState::Waiting));
}

/// Returns a GPU on which each context takes 1 GiB. Client 1 has all memory except half of such a
/// context.
fn nearly_full() -> Talk {
    let mut t = Talk::new(Settings { context: GIB, ..settings(AntiThrash::Auto, Duration::from_secs(1)) });
    t.join(1, 15 * GIB - 512 * MIB);
    t.request(1);
    t.now += ms(1);
    t.measured(GIB);
    t
}

fn arrive(t: &mut Talk, n: u64, gang: u64) -> Vec<Command> {
    t.say(Event::Connected { client: client(n), gang, tenant: TenantId(0) });
    t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap })
}

fn attached(commands: &[Command]) -> Vec<u64> {
    let all =
        commands.iter().filter_map(|c| if let Command::Attached { client, .. } = c { Some(client.0) } else { None });
    all.collect()
}

#[test]
fn a_context_without_room_is_refused_after_a_timeout() {
    let mut t = nearly_full();
    arrive(&mut t, 2, 0);
    assert_eq!(t.after(ms(1999)), []);
    assert_eq!(t.after(ms(1)), [denied(2, 0, Denial::NoContext)]);
    assert_eq!(t.after(Duration::from_secs(28)), []);
    assert_eq!(t.machine.deadline(), None);
    // The request stays pending until the client detaches.
    assert_eq!(attached(&t.report(1, 14 * GIB, 14 * GIB, 0)), [2]);
}

#[test]
fn a_context_is_not_refused_because_of_an_estimate() {
    let mut t = Talk::new(Settings { context: GIB, ..settings(AntiThrash::Auto, Duration::from_secs(1)) });
    t.measured(0);
    t.join(1, 14 * GIB);
    t.request(1);
    arrive(&mut t, 2, 0);
    assert!(!t.after(ms(200)).contains(&waiting(2, WaitReason::Context)));
    // With the estimates for clients 1 and 2, client 1 would not fit beside a third context.
    assert!(arrive(&mut t, 3, 0).contains(&waiting(3, WaitReason::Context)));
    assert!(!t.after(Duration::from_secs(9)).contains(&denied(3, 0, Denial::NoContext)));
    t.now += Duration::from_secs(2);
    assert_eq!(attached(&t.measured(GIB / 2)), [3]);

    // The measurement confirms the estimates.
    assert!(arrive(&mut t, 4, 0).contains(&waiting(4, WaitReason::Context)));
    t.now += Duration::from_secs(11);
    assert!(t.measured(GIB + GIB / 2).contains(&denied(4, 0, Denial::NoContext)));
}

#[test]
fn a_context_waits_without_timeout_under_on_memory_full_wait() {
    let mut t = nearly_full();
    t.say(Event::Connected { client: client(2), gang: 0, tenant: TenantId(0) });
    t.put(&[2], RuleLimits { on_memory_full: OnMemoryFull::Wait, ..RuleLimits::default() });
    assert_eq!(arrive(&mut t, 2, 0), [waiting(2, WaitReason::Context)]);
    assert_eq!(t.after(Duration::from_secs(3600)), []);
    assert_eq!(attached(&t.report(1, 14 * GIB, 14 * GIB, 0)), [2]);
}

#[test]
fn a_context_that_would_block_a_client_waits() {
    let mut t = nearly_full();
    assert_eq!(arrive(&mut t, 2, 0), [waiting(2, WaitReason::Context)]);
    assert_eq!(arrive(&mut t, 3, 0), [waiting(3, WaitReason::Context)]);
    // Clients take no memory from client 1 while their contexts wait, before and after they are denied.
    assert_eq!(t.after(ms(1999)), []);
    assert_eq!(t.after(Duration::from_secs(28)), [2, 3].map(|n| denied(n, 0, Denial::NoContext)));
    assert_eq!((t.state(1), t.attachment(1).allowance), (LockState::Holding, 15 * GIB - 512 * MIB));
    // There is room for one of the waiting contexts, and later for both.
    assert_eq!(attached(&t.report(1, 14 * GIB, 14 * GIB, 0)), [2]);
    assert_eq!(attached(&t.say(Event::Disconnected { client: client(1) })), [3]);
}

#[test]
fn no_context_is_admitted_while_clients_may_reconnect() {
    let measured = |complete| {
        let mut t = Talk::in_mode(AntiThrash::Auto);
        let say = |t: &mut Talk, complete| {
            t.say(Event::GpuOverhead { gpu: gpu(0), begun: t.now, bytes: 15 * GIB, others: 0, complete })
        };
        t.say(Event::GpuOverhead { gpu: gpu(0), begun: t.now, bytes: 0, others: 0, complete: false });
        assert_eq!(arrive(&mut t, 1, 0), []);
        assert!(attached(&t.after(Duration::from_secs(1))).is_empty());
        let commands = say(&mut t, complete);
        (t, commands)
    };
    let (t, commands) = measured(true);
    assert_eq!(attached(&commands), [1]);
    assert_eq!(t.machine.gpu(gpu(0)).unwrap().capacity, GIB, "they were strangers");
    let (mut t, commands) = measured(false);
    assert!(attached(&commands).is_empty());
    assert_eq!(attached(&t.after(Duration::from_secs(1))), [1], "not for longer than that");
}

#[test]
fn a_context_does_not_wait_for_a_client_that_cannot_run() {
    let mut t = nearly_full();
    t.measured(2 * GIB);
    arrive(&mut t, 2, 0);
    assert_eq!(attached(&t.after(Duration::from_secs(2))), [2]);
}

/// The driver pages managed memory, so its client runs with less.
#[test]
fn a_context_does_not_wait_for_a_client_with_managed_memory() {
    let mut t = Talk::new(Settings { context: GIB, ..settings(AntiThrash::Auto, Duration::from_secs(1)) });
    t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(0) });
    t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Managed });
    t.report(1, 15 * GIB - 512 * MIB, 0, 0);
    t.map(1);
    assert!(!arrive(&mut t, 2, 0).contains(&waiting(2, WaitReason::Context)));
    assert_eq!(attached(&t.map(1)), [2]);
}

#[test]
fn contexts_of_a_gang_are_admitted_together() {
    let mut t = Talk::new(Settings { context: GIB, ..settings(AntiThrash::Auto, Duration::from_secs(1)) });
    arrive(&mut t, 1, 7);
    t.report(1, 15 * GIB, 0, 0);
    arrive(&mut t, 2, 7);
    assert_eq!(attached(&t.after(Duration::from_secs(2))), [2]);
}

#[test]
fn a_client_that_created_its_context_early_is_admitted() {
    let mut t = nearly_full();
    arrive(&mut t, 2, 0);
    t.report(2, GIB, 0, 0);
    assert_eq!(attached(&t.after(Duration::from_secs(2))), [2]);
}

#[test]
fn memory_for_a_context_is_reserved_until_it_is_measured() {
    let mut t = Talk::new(Settings { context: GIB, ..settings(AntiThrash::Auto, Duration::from_secs(1)) });
    t.join(1, 0);
    let capacity = |t: &Talk| t.machine.gpu(gpu(0)).unwrap().capacity;
    assert_eq!(capacity(&t), 15 * GIB);
    t.measured(0);
    assert_eq!(capacity(&t), 15 * GIB, "it may not have been created yet");
    t.now += Duration::from_secs(2);
    t.measured(GIB / 2);
    assert_eq!(capacity(&t), 14 * GIB + GIB / 2, "perhaps only a part of it has");
    // When a client uses its context, the scheduler knows that the context exists.
    t.now += ms(1);
    t.request(1);
    let begun = t.now - ms(1);
    t.say(Event::GpuOverhead { gpu: gpu(0), begun, bytes: GIB / 2, others: 0, complete: true });
    assert_eq!(capacity(&t), 14 * GIB + GIB / 2);
    t.measured(GIB / 2);
    assert_eq!(capacity(&t), 15 * GIB + GIB / 2);
    // The context of an idle client counts as existing after some time, too.
    t.join(2, 0);
    t.now += Duration::from_secs(10);
    t.measured(GIB);
    assert_eq!(capacity(&t), 15 * GIB);
}

/// Eight programs start at the same time beside a program without nvshare. Their contexts are
/// small, but each counts as 1 GiB until it is measured, so together they seem to take all memory.
/// Client 1 allocates first, and is then measured.
fn eight_at_once(bytes: u64) -> (Talk, Vec<Command>) {
    let mut t = Talk::new(Settings { context: GIB, ..settings(AntiThrash::Auto, Duration::from_secs(1)) });
    t.measured(9 * GIB);
    let mut admitted: Vec<u64> = (1..=8).flat_map(|n| attached(&arrive(&mut t, n, 0))).collect();
    admitted.extend(attached(&t.after(Duration::from_secs(2))));
    assert_eq!(admitted, [1, 2, 3, 4, 5, 6, 7, 8]);
    (1..=8).for_each(|n| drop(t.report(n, 0, 0, 0)));
    assert_eq!(t.wish(1, bytes), [Command::Measure { gpu: gpu(0) }]);
    let commands = look(&mut t, 9 * GIB + 300 * MIB);
    (t, commands)
}

/// Measures the GPU and its clients.
fn look(t: &mut Talk, overhead: u64) -> Vec<Command> {
    let mut commands = t.measured(overhead);
    let found = (1..=8).map(|n| (client(n), exactly(0))).collect();
    commands.extend(t.say(Event::Measured { gpu: gpu(0), begun: t.now, free: None, evicted: 0, found }));
    commands
}

fn denials(commands: &[Command]) -> usize {
    commands.iter().filter(|command| matches!(command, Command::Denied { .. })).count()
}

#[test]
fn estimated_future_contexts_do_not_deny_an_allocation() {
    let (mut t, commands) = eight_at_once(800 * MIB);
    assert_eq!(commands, [waiting(1, WaitReason::Memory)], "the library gives up unless it is told to wait");
    for n in 2..=8 {
        assert_eq!(denials(&t.wish(n, 800 * MIB)), 0);
    }
    let mut commands = t.after(ms(100));
    commands.extend(look(&mut t, 9 * GIB + 8 * 300 * MIB));
    commands.extend(t.after(Duration::from_secs(30)));
    assert_eq!(denials(&commands), 0, "{commands:?}");
    for n in 1..=8 {
        assert!(t.attachment(n).limit >= 800 * MIB, "client {n}");
    }
}

#[test]
fn measured_memory_denies_an_allocation() {
    let (_, commands) = eight_at_once(7 * GIB);
    assert_eq!(commands, [denied(1, 7 * GIB, Denial::NoRoom)], "however small the other contexts are");
    let (mut t, _) = eight_at_once(800 * MIB);
    t.after(ms(100));
    assert_eq!(look(&mut t, 15 * GIB + 512 * MIB), [denied(1, 800 * MIB, Denial::NoRoom)]);
}

#[test]
fn an_allocation_waits_at_most_ten_seconds_for_new_contexts() {
    let (mut t, _) = eight_at_once(800 * MIB);
    let begun = t.now;
    while t.now < begun + Duration::from_secs(10) {
        let mut commands = t.after(ms(100));
        // Memory moves continuously, so the overhead cannot be determined.
        commands.extend(t.say(Event::Measured {
            gpu: gpu(0),
            begun: t.now,
            free: None,
            evicted: 0,
            found: BTreeMap::new(),
        }));
        assert_eq!(denials(&commands) > 0, t.now >= begun + Duration::from_secs(10), "{:?}", t.now - begun);
    }
}
