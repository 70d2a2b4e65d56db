//! Memory limits of rules, message by message: allocations that wait, their order, and the choice
//! of memory to evict.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

/// Creates clients in one group with these limits. Each client has one of the demands.
fn group<const N: usize>(limits: RuleLimits, demands: [u64; N]) -> Talk {
    let mut t = Talk::in_mode(AntiThrash::On);
    for (n, demand) in (1..).zip(demands) {
        t.join(n, 0);
        t.put(&[n], limits);
        t.report(n, demand, 0, 0);
        settle(&mut t, n);
    }
    t
}

/// The first `clients` clients carry out their limits and allowances, until no more commands
/// follow.
fn settle(t: &mut Talk, clients: u64) {
    (0..3).for_each(|_| (1..=clients).for_each(|n| drop(t.map(n))));
}

/// Requests a limit. Returns the commands that make clients wait or refuse their requests.
fn wish(t: &mut Talk, n: u64, bytes: u64) -> Vec<Command> {
    let mut commands = t.wish(n, bytes);
    commands.retain(|command| matches!(command, Command::Waiting { .. } | Command::Denied { .. }));
    settle(t, t.machine.clients().len() as u64);
    commands
}

fn waits(memory_max: u64) -> RuleLimits {
    RuleLimits { memory_max: Amount::Bytes(memory_max), on_memory_full: OnMemoryFull::Wait, ..RuleLimits::default() }
}

/// Returns the clients whose limits have reached the requested bytes.
fn fulfilled(t: &Talk, wishes: &[(u64, u64)]) -> Vec<u64> {
    let has = |n: u64| t.attachment(n).limit;
    wishes.iter().filter(|(n, bytes)| has(*n) >= *bytes).map(|(n, _)| *n).collect()
}

#[test]
fn an_allocation_beyond_the_group_limit_waits_for_freed_memory() {
    let mut t = group(waits(8 * GIB), [6 * GIB, GIB]);
    assert_eq!(wish(&mut t, 2, 3 * GIB), [waiting(2, WaitReason::Memory)]);
    assert_eq!(t.after(Duration::from_secs(3600)), [], "as long as it takes");
    assert_eq!(wish(&mut t, 2, 3 * GIB), [], "it knows");
    assert_eq!(wish(&mut t, 2, 4 * GIB), [], "it knows");
    assert_eq!(t.attachment(2).pending_limit, Some(4 * GIB));
    wish(&mut t, 2, 3 * GIB);
    t.report(1, 4 * GIB, 4 * GIB, 0);
    settle(&mut t, 2);
    assert_eq!(fulfilled(&t, &[(2, 3 * GIB)]), [2]);
}

#[test]
fn an_allocation_above_the_limit_fails_immediately() {
    let mut t = group(waits(8 * GIB), [GIB, GIB]);
    assert_eq!(wish(&mut t, 1, 9 * GIB), [denied(1, 9 * GIB, Denial::MemoryMax)]);
    let mut t = group(RuleLimits { swap_max: Some(4 * GIB), ..waits(8 * GIB) }, [GIB, GIB]);
    assert_eq!(wish(&mut t, 1, 5 * GIB), [denied(1, 5 * GIB, Denial::SwapMax)]);
}

#[test]
fn the_last_of_mutually_waiting_allocations_is_denied() {
    let mut t = group(waits(8 * GIB), [4 * GIB, 4 * GIB]);
    assert_eq!(wish(&mut t, 1, 6 * GIB), [waiting(1, WaitReason::Memory)]);
    assert_eq!(t.after(Duration::from_secs(60)), [], "the other may free some");
    assert_eq!(wish(&mut t, 2, 6 * GIB), [waiting(2, WaitReason::Memory)]);
    assert_eq!(t.after(Duration::from_secs(4)), []);
    assert_eq!(t.after(Duration::from_secs(1)), [denied(2, 6 * GIB, Denial::MemoryMax)]);
    assert_eq!(t.after(Duration::from_secs(60)), [], "the first waits for it still");
    t.say(Event::Disconnected { client: client(2) });
    assert_eq!(fulfilled(&t, &[(1, 6 * GIB)]), [1]);
}

#[test]
fn a_lone_client_at_its_limit_is_denied_immediately() {
    let mut t = group(waits(8 * GIB), [GIB]);
    t.put(&[1], waits(2 * GIB));
    assert_eq!(wish(&mut t, 1, 3 * GIB), [denied(1, 3 * GIB, Denial::MemoryMax)]);
}

#[test]
fn waiting_allocations_of_a_group_are_served_in_order_of_arrival() {
    let wishes = [(2, 4 * GIB), (3, GIB), (4, 3 * GIB)];
    let mut t = group(waits(8 * GIB), [8 * GIB, 0, 0, 0]);
    for (n, bytes) in wishes {
        assert_eq!(wish(&mut t, n, bytes), [waiting(n, WaitReason::Memory)]);
    }
    let mut served = Vec::new();
    for (left, expected) in [(5 * GIB, &[][..]), (4 * GIB, &[2]), (3 * GIB, &[2, 3]), (0, &[2, 3, 4])] {
        t.report(1, left, left, 0);
        settle(&mut t, 4);
        for n in fulfilled(&t, &wishes).into_iter().filter(|n| !served.contains(n)).collect::<Vec<_>>() {
            served.push(n);
            t.report(n, wishes[n as usize - 2].1, 0, 0);
        }
        assert_eq!(served, expected, "while client 1 has {left}");
    }
}

#[test]
fn pending_allocations_are_denied_if_the_rule_stops_waiting() {
    let mut t = group(waits(8 * GIB), [8 * GIB, 0]);
    assert_eq!(wish(&mut t, 2, GIB), [waiting(2, WaitReason::Memory)]);
    let commands = t.put(&[1, 2], RuleLimits { memory_max: Amount::Bytes(8 * GIB), ..RuleLimits::default() });
    assert!(commands.contains(&denied(2, GIB, Denial::MemoryMax)), "{commands:?}");
}

#[test]
fn allocations_also_wait_for_host_memory() {
    let mut t = group(waits(16 * GIB), [10 * GIB, 6 * GIB]);
    t.say(Event::HostMemory { bytes: 2 * GIB });
    t.join(3, 0);
    t.report(3, 2 * GIB, 0, 0);
    t.put(&[1, 2], RuleLimits { memory_max: Amount::Infinity, ..waits(0) });
    assert!(wish(&mut t, 1, 12 * GIB).contains(&waiting(1, WaitReason::Memory)));
    assert!(wish(&mut t, 3, 4 * GIB).contains(&denied(3, 4 * GIB, Denial::NoRoom)), "it has no such rule");
    t.report(3, 0, 0, 0);
    settle(&mut t, 3);
    assert_eq!(fulfilled(&t, &[(1, 12 * GIB)]), [1]);
}

#[test]
fn protected_memory_is_evicted_last() {
    let mut t = Talk::in_mode(AntiThrash::On);
    for n in [1, 2] {
        t.join(n, 6 * GIB);
    }
    // Client 1 ran longest ago, so its memory is evicted first unless it is protected.
    let low = |bytes| RuleLimits { memory_low: Some(Amount::Bytes(bytes)), ..RuleLimits::default() };
    t.put(&[1], low(5 * GIB));
    t.join(3, 8 * GIB);
    let commands = t.request(3);
    let least = |n| allowances(&commands).into_iter().filter(|(client, _)| *client == n).map(|(_, bytes)| bytes).min();
    assert_eq!((least(1), least(2)), (Some(5 * GIB), Some(3 * GIB)), "{commands:?}");
    for n in [1, 2] {
        t.map(n);
    }
    // Client 2 now has too little memory left to evict, so protected memory must be evicted too.
    let demand = 14 * GIB;
    let mapped = t.attachment(3).mapped;
    let commands = t.report(3, demand, mapped, 0);
    let least = |n| allowances(&commands).into_iter().filter(|(client, _)| *client == n).map(|(_, bytes)| bytes).min();
    assert_eq!(least(2), Some(0), "{commands:?}");
    assert_eq!(least(1), Some(2 * GIB), "{commands:?}");
}

#[test]
fn swap_max_bounds_a_groups_memory_on_all_gpus() {
    let limits = RuleLimits { swap_max: Some(6 * GIB), ..RuleLimits::default() };
    let mut t = group(limits, [4 * GIB, GIB]);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    t.say(Event::Attached { client: client(2), gpu: gpu(1), engine: Engine::Swap });
    let report = MemoryReport { demand: GIB, limit_ack: u32::MAX, ack: u32::MAX, ..MemoryReport::default() };
    t.say(Event::Memory { client: client(2), gpu: gpu(1), report });
    for n in [1, 2] {
        t.report(n, t.attachment(n).demand, t.attachment(n).mapped, 0);
    }
    assert_eq!(wish(&mut t, 1, 5 * GIB), [denied(1, 5 * GIB, Denial::SwapMax)]);
    // If one client frees memory on one GPU, the other client may allocate it on another GPU.
    t.report(2, 0, 0, 0);
    settle(&mut t, 2);
    wish(&mut t, 1, 5 * GIB);
    settle(&mut t, 2);
    assert_eq!(fulfilled(&t, &[(1, 5 * GIB)]), [1]);
}

#[test]
fn memory_above_a_lowered_limit_is_evicted_while_idle() {
    let mut t = group(RuleLimits { memory_max: Amount::Bytes(16 * GIB), ..RuleLimits::default() }, [6 * GIB, 6 * GIB]);
    t.request(1);
    let lowered = RuleLimits { memory_max: Amount::Bytes(8 * GIB), ..RuleLimits::default() };
    let commands = t.put(&[1, 2], lowered);
    let least = allowances(&commands).into_iter().min();
    assert_eq!(least, Some((2, 2 * GIB)), "not from the one that runs: {commands:?}");
    t.map(2);
    assert_eq!(t.attachment(2).allowance, 2 * GIB, "though the GPU has room");
    // When client 2 runs, it gets all memory that it needs. Then client 1's memory must be evicted.
    t.release(1, ReleaseReason::Idle);
    t.request(2);
    assert_eq!((t.state(2), t.attachment(2).allowance), (LockState::Holding, 6 * GIB));
    t.map(2);
    t.release(2, ReleaseReason::Idle);
    t.map(2);
    assert_eq!(t.attachment(1).allowance + t.attachment(2).allowance, 8 * GIB);
    // When the limit rises, the old limit no longer has any effect.
    t.put(&[1, 2], RuleLimits { memory_max: Amount::Bytes(16 * GIB), ..RuleLimits::default() });
    (1..3).for_each(|n| drop(t.map(n)));
    assert_eq!(t.attachment(1).allowance + t.attachment(2).allowance, 12 * GIB);
}

#[test]
fn contexts_count_towards_a_groups_limit() {
    let settings = Settings { context: 512 * MIB, ..settings(AntiThrash::On, Duration::from_secs(1)) };
    let mut t = Talk::new(settings);
    t.join(1, 0);
    t.put(&[1], RuleLimits { memory_max: Amount::Bytes(4 * GIB), ..RuleLimits::default() });
    settle(&mut t, 1);
    assert_eq!(t.attachment(1).limit, 4 * GIB - 512 * MIB, "as long as it was not measured");
    let measured = |bytes| Event::ContextSizes { gpu: gpu(0), bytes: [(client(1), bytes)].into() };
    t.say(measured(300 * MIB));
    assert_eq!(t.attachment(1).limit, 4 * GIB - 300 * MIB);
    let beyond = 4 * GIB - 299 * MIB;
    assert_eq!(wish(&mut t, 1, beyond), [denied(1, beyond, Denial::MemoryMax)]);
    t.say(measured(299 * MIB));
    assert_eq!(wish(&mut t, 1, beyond), [], "a smaller context leaves more, however little");
    t.say(measured(5 * GIB));
    assert_eq!(t.attachment(1).limit, 0, "nothing is left");
}

#[test]
fn no_turn_ends_for_a_request_that_has_no_room_on_another_gpu() {
    let mut t = Talk::new(settings(AntiThrash::Auto, Duration::from_secs(30)));
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    for id in [gpu(0), gpu(1)] {
        t.say(Event::GpuLink { gpu: id, rate: 8 * GIB });
    }
    let beside = |t: &mut Talk, n: u64, demand: u64, mapped: u64| {
        t.say(Event::Attached { client: client(n), gpu: gpu(1), engine: Engine::Swap });
        for mapped in [0, mapped] {
            let report = MemoryReport {
                ack: u32::MAX,
                demand,
                mapped,
                swapped: demand - mapped,
                pinned: 0,
                limit_ack: u32::MAX,
            };
            t.say(Event::Memory { client: client(n), gpu: gpu(1), report });
        }
    };
    t.join(2, 12 * GIB);
    t.request(2);
    t.join(1, 14 * GIB);
    beside(&mut t, 1, 12 * GIB, 12 * GIB);
    t.join(3, 6 * GIB);
    beside(&mut t, 3, 8 * GIB, 0);
    for n in [1, 3] {
        t.say(Event::Requested { client: client(n), gpus: gpus([0, 1]) });
    }
    // Client 2's turn lasts longer while client 1 is next, because more memory has to move for it.
    t.after(Duration::from_secs(20));
    assert_eq!(t.state(2), LockState::Holding);
    let commands = t.say(Event::Stopped { client: client(1), stopped: true });
    let why = Command::Waiting { client: client(3), gpus: gpus([0, 1]), why: WaitReason::Pinned };
    assert!(commands.contains(&why), "client 1's memory cannot leave GPU 1: {commands:?}");
    assert_eq!(t.state(2), LockState::Holding, "{commands:?}");
}
