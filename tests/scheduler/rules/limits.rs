//! Limits: the memory that clients and groups may allocate on a small host or under a rule, and
//! requests for higher limits.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

/// Two clients need 2 GiB each on a GPU of 16 GiB. The host has 8 GiB for evicted memory.
fn on_a_small_host() -> Talk {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    t.say(Event::HostMemory { bytes: 8 * GIB });
    assert_eq!(limits(&t.join(1, 2 * GIB)), [], "told when it attached");
    t.join(2, 2 * GIB);
    t.map(1);
    t.map(2);
    t.wish(1, 12 * GIB);
    t.map(1);
    t.map(2);
    t.after(ms(1000)); // client 1 has not used its limit
    t
}

#[test]
fn a_lone_client_is_promised_the_whole_gpu() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    t.say(Event::HostMemory { bytes: 0 });
    t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(0) });
    let commands = t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Swap });
    assert_eq!(limits(&commands), [(1, 16 * GIB)]);
}

#[test]
fn a_small_host_promises_demands_plus_equal_parts_of_the_rest() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    t.say(Event::HostMemory { bytes: 8 * GIB });
    t.join(1, 2 * GIB);
    t.say(Event::Connected { client: client(2), gang: 0, tenant: TenantId(0) });
    let commands = t.say(Event::Attached { client: client(2), gpu: gpu(0), engine: Engine::Swap });
    assert_eq!(limits(&commands), [(1, 13 * GIB)], "it has to know before anybody else has it");
    assert!(!commands.contains(&Command::Attached { client: client(2), gpu: gpu(0) }));
    let commands = t.map(1);
    assert_eq!(limits(&commands), [(2, 11 * GIB)]);
    assert!(commands.contains(&Command::Attached { client: client(2), gpu: gpu(0) }));
    assert_eq!(limits(&t.say(Event::HostMemory { bytes: 16 * GIB })), [(1, 16 * GIB), (2, 16 * GIB)], "enough for all");
}

#[test]
fn clients_on_all_gpus_share_host_memory() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    t.say(Event::HostMemory { bytes: 8 * GIB });
    let limit = |t: &Talk, n: u64| t.attachment(n).limit;
    for (n, at) in [(1, 0), (2, 0), (3, 1), (4, 1)] {
        if n == 3 {
            assert_eq!([limit(&t, 1), limit(&t, 2)], [12 * GIB; 2]);
        }
        t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(0) });
        t.say(Event::Attached { client: client(n), gpu: gpu(at), engine: Engine::Swap });
        let report = MemoryReport { ack: u32::MAX, limit_ack: u32::MAX, ..MemoryReport::default() };
        for m in (1..=n).chain(1..=n) {
            t.say(Event::Memory { client: client(m), gpu: gpu((m - 1) / 2), report });
        }
    }
    assert_eq!([1, 2, 3, 4].map(|n| limit(&t, n)), [10 * GIB; 4]);
}

#[test]
fn a_silent_client_does_not_delay_an_attaching_client() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    t.say(Event::HostMemory { bytes: 8 * GIB });
    t.join(1, 2 * GIB);
    t.join(2, 0);
    assert_eq!(limits(&t.after(ms(199))), []);
    assert_eq!(limits(&t.after(ms(1))), [(2, 8 * GIB)], "what is there without it");
    assert_eq!(t.attachment(1).committed, 16 * GIB);
}

#[test]
fn limits_do_not_count_on_a_client_that_stays_silent() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    t.say(Event::HostMemory { bytes: 8 * GIB });
    t.join(1, 2 * GIB);
    t.join(2, 0);
    assert_eq!(limits(&t.after(ms(200))), [(2, 8 * GIB)]);
    t.map(2);
    t.after(ms(1800));
    t.join(3, 0);
    t.map(2);
    t.after(ms(1999));
    assert!(t.attachment(2).limit > 7 * GIB, "client 1 may still answer");
    assert_eq!(limits(&t.after(ms(1))), [(2, 4 * GIB)]);
    t.map(2);
    assert_eq!([2, 3].map(|n| t.attachment(n).limit), [4 * GIB; 2]);
}

#[test]
fn a_limit_request_is_granted_from_other_clients_unused_promises() {
    let mut t = on_a_small_host();
    assert_eq!((t.attachment(1).committed, t.attachment(2).committed), (12 * GIB, 12 * GIB));
    assert_eq!(limits(&t.wish(1, 14 * GIB)), [(2, 10 * GIB)], "first the other has to know");
    assert_eq!(limits(&t.map(2)), [(1, 14 * GIB)]);
    assert_eq!(limits(&t.wish(1, 13 * GIB)), [(1, 14 * GIB)], "it has that");
}

#[test]
fn an_impossible_limit_request_is_denied_immediately() {
    let mut t = on_a_small_host();
    let denied = |n, bytes| denied(n, bytes, Denial::NoRoom);
    assert_eq!(t.wish(1, 17 * GIB), [denied(1, 17 * GIB)], "more than the GPU");
    t.report(2, 11 * GIB, 2 * GIB, 0);
    let commands = t.wish(1, 14 * GIB);
    assert!(commands.contains(&denied(1, 14 * GIB)), "only 13 are not needed: {commands:?}");
}

#[test]
fn managed_memory_may_exceed_the_gpu_as_far_as_the_host_has_room() {
    let mut t = on_a_small_host();
    t.put(&[1], RuleLimits { managed_beyond_gpu: true, ..RuleLimits::default() });
    assert_eq!(limits(&t.wish(1, 20 * GIB)), [(2, 4 * GIB)], "first the other has to know");
    assert_eq!(limits(&t.map(2)), [(1, 20 * GIB)]);
    assert!(t.wish(1, 23 * GIB).contains(&denied(1, 23 * GIB, Denial::NoRoom)), "the host has 8, and 2 are needed");
    assert!(t.wish(2, 17 * GIB).contains(&denied(2, 17 * GIB, Denial::NoRoom)), "no rule permits it");
}

#[test]
fn waiting_requests_beyond_the_gpu_may_have_any_size() {
    let mut t = on_a_small_host();
    let waits = RuleLimits { on_memory_full: OnMemoryFull::Wait, managed_beyond_gpu: true, ..RuleLimits::default() };
    t.put(&[1, 2], waits);
    let memory = [waiting(1, WaitReason::Memory), waiting(2, WaitReason::Memory)];
    let commands = [1, 2].map(|n| t.wish(n, u64::MAX)).concat();
    assert!(memory.iter().all(|command| commands.contains(command)), "{commands:?}");
    for n in [1, 2] {
        t.say(Event::Disconnected { client: client(n) });
    }
    t.join(3, 2 * GIB);
    assert_eq!(t.attachment(3).limit, 16 * GIB, "host memory is not scarce any more");
}

/// A client that requests more than other programs left free at the last measurement.
fn hoping() -> Talk {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    t.measured(8 * GIB);
    t.join(1, GIB);
    assert_eq!(t.wish(1, 12 * GIB), [Command::Measure { gpu: gpu(0) }]);
    t
}

fn present(t: &mut Talk, begun: Duration) -> Vec<Command> {
    t.say(Event::Measured { gpu: gpu(0), begun, free: None, evicted: 0, found: Default::default() })
}

#[test]
fn a_measurement_precedes_the_denial_of_a_limit_request() {
    let mut t = hoping();
    let wished = t.now;
    t.now += ms(5);
    let commands = t.measured(0);
    assert!(limits(&commands).contains(&(1, 16 * GIB)), "{commands:?}");
    assert!(limits(&present(&mut t, wished)).contains(&(1, 16 * GIB)));
    // The other programs are still there, and their memory cannot be allocated. No measurement can
    // help a request above the GPU's size.
    let mut t = hoping();
    let wished = t.now;
    t.now += ms(5);
    t.measured(8 * GIB);
    let again = present(&mut t, wished - ms(1));
    assert_eq!(again, [Command::Measure { gpu: gpu(0) }], "that began before");
    assert_eq!(present(&mut t, wished), [denied(1, 12 * GIB, Denial::NoRoom)]);
    assert_eq!(present(&mut t, wished + ms(1)), []);
    assert_eq!(t.wish(1, 17 * GIB), [denied(1, 17 * GIB, Denial::NoRoom)]);
}

#[test]
fn a_limit_request_waits_for_a_measurement_only_briefly() {
    let mut t = hoping();
    assert_eq!(t.after(ms(499)), []);
    assert_eq!(t.after(ms(1)), [denied(1, 12 * GIB, Denial::NoRoom)]);
    let mut t = hoping();
    t.say(Event::Disconnected { client: client(1) });
    assert_eq!(t.after(ms(500)), []);
}

#[test]
fn two_clients_with_half_each_that_want_more_do_not_deadlock() {
    let mut t = on_a_small_host();
    for n in [1, 2] {
        t.report(n, 12 * GIB, 2 * GIB, 0);
    }
    for n in [1, 2] {
        assert_eq!(t.wish(n, 13 * GIB), [denied(n, 13 * GIB, Denial::NoRoom)]);
    }
}

#[test]
fn a_limit_request_times_out_if_a_client_does_not_answer() {
    let mut t = on_a_small_host();
    assert_eq!(limits(&t.wish(1, 14 * GIB)), [(2, 10 * GIB)]);
    assert_eq!((t.after(ms(3999)), t.after(ms(1000))), (vec![], vec![]));
    let commands = t.after(ms(1));
    assert!(commands.contains(&denied(1, 14 * GIB, Denial::NoRoom)), "{commands:?}");
    assert_eq!(t.attachment(2).committed, 12 * GIB, "it may not know yet");
    t.map(2);
    t.wish(1, 14 * GIB);
    assert_eq!(limits(&t.map(2)), [(1, 14 * GIB)]);
}

#[test]
fn a_limit_request_waits_for_a_late_answer() {
    let mut t = on_a_small_host();
    assert_eq!(limits(&t.wish(1, 14 * GIB)), [(2, 10 * GIB)]);
    assert_eq!(t.after(ms(4500)), []);
    assert_eq!(limits(&t.map(2)), [(1, 14 * GIB)]);
    t.report(1, 14 * GIB, 2 * GIB, 0);
    let commands = t.after(ms(600));
    assert!(!commands.contains(&denied(1, 14 * GIB, Denial::NoRoom)), "{commands:?}");
    assert_eq!(t.attachment(1).committed, 14 * GIB, "more once the other has acknowledged that, too");
}

/// Attaches clients at the same time. Each needs all memory. The scheduler takes 1 ms for each
/// message, so clients acknowledge lower limits seconds later. Returns how many clients got the
/// memory that they need, and how many were refused.
fn crowd(clients: u64, demand: u64) -> (usize, usize) {
    let mut machine = Machine::new(Settings { context: 0, reserve: 0, ..settings(AntiThrash::Auto, ms(1000)) });
    let mut now = Duration::from_secs(100);
    machine.handle(now, Event::GpuFound { gpu: gpu(0), total: 16 * GIB });
    machine.handle(now, Event::HostMemory { bytes: 8 * GIB });
    machine.handle(now, Event::GpuOverhead { gpu: gpu(0), begun: now, bytes: 0, others: 0, complete: true });
    let attach = |n| {
        let connects = Event::Connected { client: client(n), gang: 0, tenant: TenantId(n % 7) };
        [connects, Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap }]
    };
    let mut messages: VecDeque<Event> = (1..=clients).flat_map(attach).collect();
    let (mut has, mut refused) = (BTreeSet::new(), BTreeSet::new());
    let end = now + Duration::from_secs(60);
    while now < end {
        let event = messages.pop_front().unwrap_or(Event::Tick);
        now = if event == Event::Tick { machine.deadline().unwrap_or(end).max(now) } else { now };
        let commands = machine.handle(now, event);
        now += ms(1);
        for command in commands {
            match command {
                Command::Limit { client, gpu, bytes, seq: limit_ack, .. } => {
                    if demand <= bytes {
                        has.insert(client);
                    } else {
                        messages.push_back(Event::LimitRequested { client, gpu, bytes: demand });
                    }
                    let demand = if has.contains(&client) { demand } else { 0 };
                    let report = MemoryReport { demand, limit_ack, ..MemoryReport::default() };
                    messages.push_back(Event::Memory { client, gpu, report });
                }
                Command::Denied { client, .. } => drop(refused.insert(client)),
                _ => {}
            }
        }
        assert!(machine.host().1 <= 8 * GIB, "{:?} promised", machine.host());
    }
    (has.len(), refused.len())
}

#[test]
fn simultaneously_attaching_clients_that_fit_are_never_denied() {
    assert_eq!(crowd(1000, 24 * MIB), (1000, 0));
    let (has, refused) = crowd(1000, 40 * MIB);
    assert!(has >= 24 * 1024 / 40 && has + refused >= 1000, "{has} have it, {refused} are refused");
}

#[test]
fn a_host_memory_decrease_lowers_unused_promises() {
    let mut t = on_a_small_host();
    let commands = t.say(Event::HostMemory { bytes: 4 * GIB });
    assert_eq!(limits(&commands), [(1, 10 * GIB), (2, 10 * GIB)]);
    let commands = t.say(Event::HostMemory { bytes: 0 });
    assert_eq!(limits(&commands), [(1, 8 * GIB), (2, 8 * GIB)]);
}

#[test]
fn a_departing_clients_promise_passes_to_other_clients() {
    let mut t = on_a_small_host();
    let commands = t.say(Event::Disconnected { client: client(2) });
    assert_eq!(limits(&commands), [(1, 16 * GIB)]);
    assert_eq!(t.machine.host().1, 0);
    let is_spared = |command: &Command| matches!(command, Command::Limit { spare: u64::MAX, .. });
    assert!(commands.iter().any(is_spared), "host memory is not scarce any more: {commands:?}");
}

/// Creates clients in one group on the GPU of 16 GiB.
fn in_a_group(most: Amount, clients: u64) -> Talk {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    for n in 1..=clients {
        t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(0) });
        t.group(n, most);
        t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
        // Each client must acknowledge its lower limit before the next client can have the
        // difference.
        for m in 1..=n {
            t.report(m, 0, 0, 0);
        }
    }
    t
}

#[test]
fn a_rules_memory_max_is_exact_to_the_byte() {
    let most = 5 * GIB + 2 * MIB;
    let mut t = in_a_group(Amount::Bytes(most), 1);
    assert_eq!((t.attachment(1).limit, t.machine.memory_max(client(1), gpu(0))), (most, Some(most)));
    assert_eq!(t.wish(1, most + 1), [denied(1, most + 1, Denial::MemoryMax)]);
    let commands = t.wish(1, most);
    let told = Command::Limit {
        client: client(1),
        gpu: gpu(0),
        bytes: most,
        seq: 1,
        most: 16 * GIB,
        spare: u64::MAX,
        max: Some(most),
    };
    assert_eq!(commands, [told]);
    // A client without a group may have the whole GPU.
    t.join(2, 16 * GIB);
    assert_eq!((t.attachment(2).limit, t.machine.memory_max(client(2), gpu(0))), (16 * GIB, None));
    let t = in_a_group(Amount::Percent(25), 1);
    assert_eq!(t.attachment(1).limit, 4 * GIB);
    let t = in_a_group(Amount::Infinity, 1);
    assert_eq!(t.attachment(1).limit, 16 * GIB);
}

#[test]
fn a_group_divides_its_limit_by_need() {
    let mut t = in_a_group(Amount::Bytes(8 * GIB), 2);
    assert_eq!((t.attachment(1).committed, t.attachment(2).committed), (4 * GIB, 4 * GIB));
    assert_eq!(limits(&t.wish(1, 6 * GIB)), [(2, 2 * GIB)], "first the other has to know");
    assert_eq!(limits(&t.report(2, GIB, GIB, 0)), [(1, 6 * GIB)]);
    t.report(1, 6 * GIB, 6 * GIB, 0);
    assert_eq!(limits(&t.wish(2, 2 * GIB)), [(2, 2 * GIB)], "all of it is used");
    t.report(2, 2 * GIB, 2 * GIB, 0);
    assert_eq!(t.wish(2, 2 * GIB + 1), [denied(2, 2 * GIB + 1, Denial::MemoryMax)]);
    assert_eq!(t.wish(2, 9 * GIB), [denied(2, 9 * GIB, Denial::MemoryMax)]);
    // The memory that a disconnected client leaves is available to the other client.
    assert_eq!(limits(&t.say(Event::Disconnected { client: client(1) })), [(2, 8 * GIB)]);
}

#[test]
fn a_requested_limit_is_granted_only_in_full() {
    let mut t = in_a_group(Amount::Bytes(8 * GIB), 3);
    assert_eq!(limits(&t.wish(1, 6 * GIB)), [(2, GIB), (3, GIB)]);
    assert_eq!(limits(&t.report(2, 0, 0, 0)), [], "a part of the memory would be of no use");
    assert_eq!(limits(&t.report(3, 0, 0, 0)), [(1, 6 * GIB)]);
}

#[test]
fn memory_allocated_before_a_lower_limit_arrives_is_kept() {
    let mut t = in_a_group(Amount::Bytes(10 * GIB), 3);
    t.wish(3, 3 * GIB + GIB / 2);
    // Client 1 allocates all that it was promised before it learns of its lower limit.
    let share = t.attachment(1).committed;
    let report = MemoryReport { demand: share, limit_ack: 1, ..MemoryReport::default() };
    t.say(Event::Memory { client: client(1), gpu: gpu(0), report });
    for n in [1, 2, 1, 2] {
        t.report(n, if n == 1 { share } else { 0 }, 0, 0);
    }
    assert_eq!(t.attachment(3).limit, 3 * GIB + GIB / 2, "without the time that one who does not answer is given");
}

#[test]
fn a_group_of_many_clients_stays_within_its_limit() {
    let mut t = in_a_group(Amount::Bytes(8 * GIB), 20);
    let promised = |t: &Talk| (1..=20).map(|n| t.attachment(n).committed).sum::<u64>();
    assert!(promised(&t) <= 8 * GIB);
    for n in 1..=20 {
        t.wish(n, GIB);
        for m in 1..=20 {
            let demand = if t.attachment(m).limit >= GIB { GIB } else { 0 };
            t.report(m, demand, 0, 0);
        }
        assert!(promised(&t) <= 8 * GIB, "{} promised", promised(&t));
    }
    assert_eq!((1..=20).filter(|n| t.attachment(*n).demand == GIB).count(), 8);
}

#[test]
fn lowering_a_limit_fails_no_client_and_frees_no_promise() {
    let mut t = in_a_group(Amount::Bytes(8 * GIB), 2);
    t.report(1, 4 * GIB, 4 * GIB, 0);
    t.report(2, 2 * GIB, 2 * GIB, 0);
    let commands = t.regroup([1, 2], Amount::Bytes(3 * GIB));
    assert_eq!(
        limits(&commands)[2..],
        [(1, 3 * GIB / 2), (2, 3 * GIB / 2)],
        "below what they have: what is freed is gone"
    );
    assert_eq!(allowances(&commands).pop(), Some((1, GIB)), "what is too much is swapped out");
    t.report(1, 4 * GIB, 4 * GIB, 0);
    t.report(2, 2 * GIB, 2 * GIB, 0);
    assert_eq!(t.wish(2, 2 * GIB + MIB), [denied(2, 2 * GIB + MIB, Denial::MemoryMax)]);
    assert_eq!(limits(&t.report(1, GIB, GIB, 0)), [(1, GIB)], "it fits: each may have what it has");
    assert_eq!(limits(&t.report(1, GIB, GIB, 0)), [(2, 2 * GIB)]);
    let commands = t.regroup([1, 2], Amount::Bytes(16 * GIB));
    assert_eq!(limits(&commands)[2..], [(1, 15 * GIB / 2), (2, 17 * GIB / 2)], "and raised, they share the rest");
}

#[test]
fn a_demand_above_the_promise_raises_no_limit() {
    let mut t = in_a_group(Amount::Bytes(8 * GIB), 2);
    t.report(1, 40 * GIB, 0, 0);
    assert!(t.attachment(1).limit <= 8 * GIB && t.attachment(2).limit <= 4 * GIB);
    t.report(2, 0, 0, 0);
    t.report(1, u64::MAX, 0, 0);
    assert!(t.attachment(1).limit + t.attachment(2).limit <= 8 * GIB);
    // A report of no demand doesn't release the promised memory: the promise still counts.
    let mut t = in_a_group(Amount::Bytes(8 * GIB), 1);
    t.report(1, 0, 0, 0);
    t.say(Event::Connected { client: client(2), gang: 0, tenant: TenantId(0) });
    t.group(2, Amount::Bytes(8 * GIB));
    t.say(Event::Attached { client: client(2), gpu: gpu(0), engine: Engine::Swap });
    assert_eq!(t.attachment(2).limit, 0);
}

#[test]
fn a_client_without_any_promised_memory_attaches_immediately() {
    let mut t = in_a_group(Amount::Bytes(8 * GIB), 1);
    t.report(1, 8 * GIB, 8 * GIB, 0);
    t.say(Event::Connected { client: client(2), gang: 0, tenant: TenantId(0) });
    t.group(2, Amount::Bytes(8 * GIB));
    let commands = t.say(Event::Attached { client: client(2), gpu: gpu(0), engine: Engine::Swap });
    assert!(commands.contains(&Command::Attached { client: client(2), gpu: gpu(0) }), "{commands:?}");
    assert_eq!(t.attachment(2).limit, 0);
}

#[test]
fn a_memory_limit_applies_per_gpu() {
    let mut t = in_a_group(Amount::Percent(50), 1);
    t.say(Event::GpuFound { gpu: gpu(1), total: 8 * GIB });
    t.say(Event::Attached { client: client(1), gpu: gpu(1), engine: Engine::Swap });
    let attachments = t.machine.client(client(1)).unwrap().attachments;
    assert_eq!(attachments.iter().map(|attachment| attachment.limit).collect::<Vec<_>>(), [8 * GIB, 4 * GIB]);
}

#[test]
fn group_limits_and_host_memory_both_apply() {
    let mut t = in_a_group(Amount::Bytes(10 * GIB), 1);
    t.join(2, 12 * GIB);
    t.say(Event::HostMemory { bytes: 4 * GIB });
    t.report(1, 0, 0, 0);
    assert_eq!(t.attachment(1).limit + t.attachment(2).limit, 20 * GIB, "what the GPU and the host have");
    assert_eq!(t.wish(1, 9 * GIB), [denied(1, 9 * GIB, Denial::NoRoom)]);
    assert_eq!(t.wish(1, 11 * GIB), [denied(1, 11 * GIB, Denial::MemoryMax)]);
}

#[test]
fn a_client_without_room_for_a_context_attaches_after_a_timeout() {
    let mut t = Talk::new(Settings { context: GIB, ..settings(AntiThrash::Auto, Duration::from_secs(1)) });
    t.measured(16 * GIB);
    t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(0) });
    assert_eq!(t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Swap }), []);
    assert_eq!(t.machine.deadline(), Some(t.now + Duration::from_secs(2)));
    assert!(t.after(Duration::from_secs(2)).contains(&Command::Attached { client: client(1), gpu: gpu(0) }));
}
