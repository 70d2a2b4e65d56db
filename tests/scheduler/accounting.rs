//! Accounting, message by message: clients' reports are checked against measurements, failed
//! mappings change the plan, and clients that grow don't wait for messages. In a *trial*, a client
//! may map more memory than seems free.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::collections::BTreeMap;
use std::time::Duration;

/// Reports a measurement that begins now, with the free bytes and each client's bytes.
fn found(t: &mut Talk, free: u64, clients: &[(u64, u64)]) -> Vec<Command> {
    let found: BTreeMap<ClientId, Found> = clients.iter().map(|(n, bytes)| (client(*n), exactly(*bytes))).collect();
    t.say(Event::Measured { gpu: gpu(0), begun: t.now, free: Some(free), evicted: 0, found })
}

/// Creates a GPU of 16 GiB on which clients' memory is measured.
fn measured(anti_thrash: AntiThrash) -> Talk {
    let mut t = Talk::in_mode(anti_thrash);
    t.join(9, 0);
    found(&mut t, 16 * GIB, &[(9, 0)]);
    t
}

fn capacity(t: &Talk) -> u64 {
    t.machine.gpu(gpu(0)).unwrap().capacity
}

fn failed(commands: &[Command]) -> Vec<(u64, u64, u32)> {
    let failures = commands.iter().filter_map(|command| match command {
        Command::MappingFailed { client, bytes, failures, .. } => Some((client.0, *bytes, *failures)),
        _ => None,
    });
    failures.collect()
}

const MEASURE: Command = Command::Measure { gpu: GpuId(Uuid([0; 16])) };

// ---- reports ----

#[test]
fn reported_memory_that_no_measurement_shows_is_disbelieved() {
    let mut t = measured(AntiThrash::On);
    t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(7) });
    t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Swap });
    let commands = t.report(1, 15 * GIB, 15 * GIB, 15 * GIB);
    assert!(commands.contains(&MEASURE), "{commands:?}");
    assert_eq!((t.attachment(1).pinned, t.attachment(1).disbelieved), (0, Some(15 * GIB)));
    // Client 1's reported memory must be evicted for client 2. Client 1 doesn't answer, and the
    // measurement shows that it has no memory.
    t.join(2, 12 * GIB);
    t.request(2);
    for _ in 0..10 {
        t.after(ms(200));
        let mapped = t.attachment(2).mapped;
        found(&mut t, 16 * GIB, &[(1, 0), (2, mapped), (9, 0)]);
    }
    t.map(2);
    assert_eq!((t.state(2), t.attachment(2).mapped), (LockState::Holding, 12 * GIB));
}

#[test]
fn a_silent_client_is_charged_its_measured_memory() {
    let mut t = measured(AntiThrash::On);
    t.join(1, 12 * GIB);
    t.join(2, 8 * GIB);
    t.request(2);
    for _ in 0..10 {
        t.after(ms(200));
        let mapped = t.attachment(2).mapped;
        found(&mut t, 4 * GIB, &[(1, 12 * GIB), (2, mapped), (9, 0)]);
    }
    t.map(2);
    assert_eq!((t.state(2), t.attachment(1).charge), (LockState::Waiting, 12 * GIB));
}

/// Managed memory counts as mapped before the GPU has its pages.
#[test]
fn a_stuck_holder_whose_managed_memory_is_not_on_the_gpu_yet_stays_charged() {
    let mut t = measured(AntiThrash::On);
    t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(0) });
    t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Managed });
    t.report(1, 12 * GIB, 0, 0);
    t.request(1);
    t.map(1);
    t.join(2, 12 * GIB);
    t.request(2);
    t.after(ms(2000));
    t.stuck(1, StuckReason::LongWork);
    t.after(ms(4000));
    for _ in 0..10 {
        found(&mut t, 16 * GIB, &[(1, 0), (2, 0), (9, 0)]);
        t.after(ms(200));
    }
    assert_eq!((t.state(1), t.state(2)), (LockState::Undrainable, LockState::Waiting));
    assert_eq!((t.attachment(1).allowance, t.attachment(1).charge), (12 * GIB, 12 * GIB));
}

/// Whether the program reports its memory as mapped or not, whatever kind of memory it claims, whether
/// it once had the memory, and even if its process stops and continues.
#[test]
fn a_stuck_holder_that_leaves_its_memory_unused_loses_it() {
    let unused = (0, 0, Engine::Swap);
    for (had, mapped, engine) in [unused, (0, 15, Engine::Swap), (0, 15, Engine::Managed), (15, 15, Engine::Swap)] {
        let mut t = measured(AntiThrash::On);
        t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(0) });
        t.say(Event::Attached { client: client(1), gpu: gpu(0), engine });
        t.report(1, 15 * GIB, 0, 0);
        t.request(1);
        t.report(1, 15 * GIB, mapped * GIB, 0);
        t.join_of(TenantId(2), 2, 8 * GIB);
        let present = GIB / 4;
        let measure = |t: &mut Talk| {
            let mapped = t.attachment(2).mapped;
            found(t, 16 * GIB - present - mapped, &[(1, present), (2, mapped), (9, 0)]);
        };
        found(&mut t, (16 - had) * GIB, &[(1, had * GIB), (2, 0), (9, 0)]);
        measure(&mut t);
        t.request(2);
        t.after(ms(2000));
        for second in 0..70 {
            t.stuck(1, StuckReason::LongWork);
            if second == 30 {
                t.say(Event::Stopped { client: client(1), stopped: true });
                t.say(Event::Stopped { client: client(1), stopped: false });
            }
            measure(&mut t);
            t.after(ms(1000));
            if second < 50 {
                assert_eq!(t.state(2), LockState::Waiting, "an honest holder may still wait for memory");
            }
        }
        t.map(2);
        assert_eq!(t.state(2), LockState::Holding, "{mapped} {engine:?}");
        // It gets free memory while no client waits, and loses it as soon as one does.
        t.after(ms(10_000));
        t.report(1, 15 * GIB, mapped * GIB, 0);
        assert_eq!((t.attachment(1).allowance, t.attachment(2).allowance), (8 * GIB, 8 * GIB));
        t.join_of(TenantId(3), 3, 4 * GIB);
        t.request(3);
        for _ in 0..5 {
            t.after(ms(1000));
            t.stuck(1, StuckReason::LongWork);
            measure(&mut t);
            t.release(2, ReleaseReason::Revoked);
        }
        t.map(3);
        assert_eq!((t.state(1), t.state(3)), (LockState::Undrainable, LockState::Holding), "{mapped} {engine:?}");
    }
}

/// A client that was treated as dead maps its former allowance, and keeps that memory, whatever it
/// reports.
#[test]
fn memory_that_a_late_client_maps_is_still_charged() {
    let mut t = measured(AntiThrash::On);
    t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(1) });
    t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Swap });
    t.acknowledge(1, 0, 4 * GIB, 0, 0);
    t.request(1);
    t.release(1, ReleaseReason::Idle);
    assert_eq!(t.attachment(1).allowance, 4 * GIB);
    t.join_of(TenantId(2), 2, 16 * GIB);
    t.request(2);
    for _ in 0..20 {
        t.after(ms(200));
        let mapped = t.attachment(2).mapped;
        found(&mut t, 4 * GIB, &[(1, 0), (2, mapped), (9, 0)]);
    }
    t.map(2);
    assert_eq!((t.attachment(1).charge, t.state(2)), (0, LockState::Holding));
    t.acknowledge(1, 1, 4 * GIB, 4 * GIB, 0);
    assert_eq!(t.attachment(1).charge, 4 * GIB, "it says so itself");
    t.acknowledge(1, u32::MAX, 4 * GIB, 0, 0);
    assert_eq!((t.attachment(1).charge, t.attachment(1).unverified), (0, 4 * GIB));
    for _ in 0..20 {
        t.after(ms(200));
        found(&mut t, 0, &[(1, 4 * GIB), (2, 12 * GIB), (9, 0)]);
    }
    assert_eq!(t.attachment(1).unfreed, 4 * GIB);
    // The client can no longer map memory up to its former allowance.
    t.acknowledge(1, u32::MAX, 4 * GIB, 8 * GIB, 0);
    assert_eq!(t.attachment(1).disbelieved, Some(8 * GIB));
}

#[test]
fn memory_confirmed_by_a_measurement_counts() {
    let mut t = measured(AntiThrash::On);
    t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(7) });
    t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Swap });
    // The driver allocates this memory, not nvshare: arrays and pools.
    t.report(1, 3 * GIB, 3 * GIB, 3 * GIB);
    found(&mut t, 13 * GIB, &[(1, 3 * GIB), (9, 0)]);
    let attachment = t.attachment(1);
    assert_eq!(
        (attachment.mapped, attachment.pinned, attachment.charge, attachment.allowance),
        (3 * GIB, 3 * GIB, 3 * GIB, 3 * GIB)
    );
    assert_eq!(attachment.disbelieved, None);
}

#[test]
fn memory_allowed_since_the_measurement_is_believed() {
    let mut t = measured(AntiThrash::On);
    t.join(1, 8 * GIB);
    assert_eq!(t.attachment(1).mapped, 8 * GIB);
    // The measurement began before the client had mapped anything.
    t.say(Event::Measured {
        gpu: gpu(0),
        begun: t.now.saturating_sub(ms(1)),
        free: None,
        evicted: 0,
        found: [(client(1), exactly(0))].into(),
    });
    assert_eq!((t.attachment(1).mapped, t.attachment(1).disbelieved), (8 * GIB, None));
}

#[test]
fn client_reports_are_believed_without_measurements() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(7) });
    t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Swap });
    t.report(1, 8 * GIB, 8 * GIB, 8 * GIB);
    assert_eq!((t.attachment(1).charge, t.attachment(1).disbelieved), (8 * GIB, None));
}

// ---- mappings that fail ----

/// Two clients grow side by side until each lacks 64 MiB. The GPU has 512 MiB less free memory than
/// the scheduler believes.
fn standstill() -> Talk {
    let mut t = measured(AntiThrash::Auto);
    t.measured(GIB); // the actual overhead is 1.5 GiB
    for n in [1, 2] {
        t.join(n, 7 * GIB);
        t.report(n, 7 * GIB + 256 * MIB, 7 * GIB, 0);
        t.request(n);
    }
    t
}

#[test]
fn two_clients_that_each_lack_a_little_make_progress() {
    let mut t = standstill();
    let really = 16 * GIB - 1536 * MIB;
    let mut done = [false; 2];
    // Each client that holds the lock maps the memory that is actually free. If that memory is too
    // little, the client releases the lock. Otherwise the client computes for a moment.
    for _ in 0..100 {
        for n in [1, 2] {
            let other = t.attachment(3 - n).mapped;
            let attachment = t.attachment(n);
            let can = attachment.allowance.min(really - other).min(attachment.demand);
            t.report(n, attachment.demand, can, 0);
            match t.state(n) {
                LockState::Holding if can == attachment.demand => {
                    done[n as usize - 1] = true;
                    t.release(n, ReleaseReason::Idle);
                }
                LockState::Holding | LockState::Revoking => {
                    t.release(n, ReleaseReason::NoMemory);
                    let (one, two) = (t.attachment(1).mapped, t.attachment(2).mapped);
                    t.measured(GIB); // the overhead is still wrong
                    found(&mut t, really - one - two, &[(1, one), (2, two)]);
                    t.request(n);
                }
                LockState::Idle => drop(t.request(n)),
                _ => {}
            }
        }
        t.after(ms(10));
        if done == [true; 2] {
            return;
        }
    }
    panic!("{done:?} {:?} {:?}", t.attachment(1), t.attachment(2));
}

/// Client 1 has 8 GiB. Client 2 has 6 GiB, holds the lock, and now needs 7 GiB.
fn grown() -> Talk {
    let mut t = measured(AntiThrash::On);
    t.join(1, 8 * GIB);
    t.join(2, 6 * GIB);
    t.request(2);
    t.now += Duration::from_secs(2);
    t.report(2, 7 * GIB, 6 * GIB, 0);
    t
}

#[test]
fn a_mapping_failure_evicts_other_clients_and_grants_again() {
    let mut t = grown();
    let commands = t.release(2, ReleaseReason::NoMemory);
    assert_eq!(failed(&commands), [(2, GIB, 1)]);
    assert!(commands.contains(&MEASURE));
    assert_eq!(t.request(2), [], "the same would fail again");
    // The measurement shows free memory. That memory could not be mapped, so the scheduler doesn't
    // allocate it.
    let commands = found(&mut t, 2 * GIB, &[(1, 8 * GIB), (2, 6 * GIB)]);
    assert_eq!(allowances(&commands).last(), Some(&(1, 7 * GIB)), "{commands:?}");
    assert_eq!(capacity(&t), 16 * GIB, "others may have what it could not");
    assert_eq!(t.machine.gpu(gpu(0)).unwrap().shortfall, 2 * GIB);
    t.map(1);
    assert_eq!(t.state(2), LockState::Holding);
    // The mapping fails again, so the scheduler reserves twice as much.
    assert_eq!(failed(&t.release(2, ReleaseReason::NoMemory)), [(2, GIB, 2)]);
    t.request(2);
    let commands = found(&mut t, 3 * GIB, &[(1, 7 * GIB), (2, 6 * GIB)]);
    assert_eq!(allowances(&commands).last(), Some(&(1, 5 * GIB)), "{commands:?}");
    t.map(1);
    t.report(2, 7 * GIB, 7 * GIB, 0);
    assert_eq!(t.attachment(2).failures, 0);
}

#[test]
fn a_mapping_failure_explained_by_a_measurement_leaves_no_shortfall() {
    let mut t = grown();
    t.release(2, ReleaseReason::NoMemory);
    t.request(2);
    t.measured(2 * GIB); // a program without nvshare has grown
    let commands = found(&mut t, 0, &[(1, 8 * GIB), (2, 6 * GIB)]);
    assert_eq!(t.machine.gpu(gpu(0)).unwrap().shortfall, 0, "{commands:?}");
    assert_eq!(capacity(&t), 14 * GIB);
    t.map(1);
    assert_eq!((t.attachment(1).mapped, t.state(2)), (7 * GIB, LockState::Holding));
}

#[test]
fn a_missing_measurement_times_out() {
    let mut t = grown();
    t.release(2, ReleaseReason::NoMemory);
    t.request(2);
    t.after(ms(499));
    assert_eq!(t.attachment(1).allowance, 8 * GIB);
    t.after(ms(1));
    assert_eq!(t.attachment(1).allowance, 7 * GIB);
}

#[test]
fn a_measurement_clears_a_contradicted_shortfall() {
    let mut t = grown();
    t.release(2, ReleaseReason::NoMemory);
    let shortfall = |t: &Talk| t.machine.gpu(gpu(0)).unwrap().shortfall;
    found(&mut t, 2 * GIB, &[(1, 8 * GIB), (2, 6 * GIB)]);
    assert_eq!(shortfall(&t), 2 * GIB);
    // More memory is free now, but that doesn't show whether the memory that could not be mapped is
    // usable.
    found(&mut t, 5 * GIB, &[(1, 5 * GIB), (2, 6 * GIB)]);
    assert_eq!(shortfall(&t), 2 * GIB);
    // Less memory is free than the client failed to map, so some of the unusable memory has been
    // mapped since.
    found(&mut t, 512 * MIB, &[(1, 8 * GIB), (2, 6 * GIB)]);
    assert_eq!(shortfall(&t), 512 * MIB + GIB, "that, and as much as it lacked");
    t.after(Duration::from_secs(10));
    assert_eq!(shortfall(&t), 0);
}

#[test]
fn a_client_may_try_to_map_more_than_seems_free() {
    let mut t = measured(AntiThrash::On);
    t.join(1, 12 * GIB);
    t.join(2, 3 * GIB);
    t.request(2);
    t.release(2, ReleaseReason::Idle);
    // The measurement shows too little free memory.
    t.measured(6 * GIB);
    t.map(1);
    t.map(2);
    t.request(1);
    t.map(2);
    assert_eq!((t.state(1), t.attachment(1).allowance), (LockState::Holding, 12 * GIB), "{:?}", t.machine.gpu(gpu(0)));
    assert_eq!((t.attachment(2).mapped, t.machine.gpu(gpu(0)).unwrap().trial), (0, 2 * GIB));
    // The mapping fails, and other clients run before client 1 tries again.
    t.release(1, ReleaseReason::NoMemory);
    t.request(1);
    t.request(2);
    found(&mut t, 0, &[(1, 10 * GIB)]);
    assert_eq!(t.machine.gpu(gpu(0)).unwrap().trial, 0);
    t.map(1);
    assert_eq!(t.state(2), LockState::Holding);
}

#[test]
fn a_client_that_cannot_map_its_memory_alone_is_denied() {
    let mut t = measured(AntiThrash::On);
    t.join(1, 15 * GIB);
    t.request(1);
    t.now += Duration::from_secs(2);
    t.report(1, 15 * GIB, 14 * GIB, 0);
    let (begun, limit) = (t.now, t.attachment(1).limit);
    for failures in 1..=12 {
        t.release(1, ReleaseReason::NoMemory);
        t.report(1, 15 * GIB, 14 * GIB, 0);
        t.request(1);
        let commands = found(&mut t, 2 * GIB, &[(1, 14 * GIB)]);
        assert_eq!(commands.contains(&denied(1, 15 * GIB, Denial::Unmappable)), failures == 12, "{failures}");
        while t.state(1) != LockState::Holding {
            t.after(ms(10));
        }
    }
    assert!(t.now - begun > Duration::from_secs(5));
    assert_eq!(t.attachment(1).limit, limit, "another may get what it could not");
}

#[test]
fn an_unconfirmed_mapping_failure_has_no_effect() {
    let mut t = measured(AntiThrash::On);
    t.join(1, 12 * GIB);
    t.join(2, 4 * GIB - 4096);
    t.request(1);
    let before = capacity(&t);
    for _ in 0..20 {
        t.report(1, 12 * GIB, 11 * GIB, 0);
        t.release(1, ReleaseReason::NoMemory);
        t.request(1);
        found(&mut t, 12 * GIB, &[(1, 0), (2, 4 * GIB - 4096)]);
        t.after(Duration::from_secs(2));
    }
    assert_eq!((capacity(&t), t.machine.gpu(gpu(0)).unwrap().shortfall), (before, 0));
    assert_eq!(t.attachment(2).mapped, 4 * GIB - 4096);
}

#[test]
fn mapping_failures_do_not_reduce_other_clients_memory() {
    let mut t = measured(AntiThrash::On);
    t.join(1, 65 * MIB);
    t.join(2, 12 * GIB);
    // Client 1 has mapped 64 MiB. So the scheduler believes its repeated reports that the rest
    // cannot be mapped.
    for _ in 0..20 {
        t.report(1, 65 * MIB, 64 * MIB, 0);
        t.request(1);
        t.map(2);
        t.release(1, ReleaseReason::NoMemory);
        let mapped = t.attachment(2).mapped;
        found(&mut t, 3 * GIB, &[(1, 64 * MIB), (2, mapped)]);
        assert_eq!(capacity(&t), 16 * GIB);
        t.request(2);
        t.map(1);
        t.map(2);
        assert_eq!((t.state(2), t.attachment(2).mapped), (LockState::Holding, 12 * GIB));
        t.release(2, ReleaseReason::Idle);
    }
}

#[test]
fn a_mapping_failure_beside_pinned_memory_leaves_enough_room() {
    let mut t = measured(AntiThrash::On);
    t.say(Event::Connected { client: client(3), gang: 0, tenant: TenantId(0) });
    t.say(Event::Attached { client: client(3), gpu: gpu(0), engine: Engine::Swap });
    t.report(3, 4 * GIB, 4 * GIB, 4 * GIB);
    found(&mut t, 12 * GIB, &[(3, 4 * GIB)]);
    t.join(1, 2 * GIB);
    t.join(2, 10 * GIB);
    t.request(2);
    t.report(2, 10 * GIB, 4 * GIB, 0);
    t.release(2, ReleaseReason::NoMemory);
    t.request(2);
    found(&mut t, 6 * GIB, &[(1, 2 * GIB), (2, 4 * GIB), (3, 4 * GIB)]);
    t.map(1);
    assert_eq!((t.attachment(1).mapped, t.state(2)), (0, LockState::Holding), "all that is not pinned has left");
}

#[test]
fn a_lone_mapping_failure_is_recognized_despite_a_later_mapping() {
    let mut t = measured(AntiThrash::On);
    t.join(1, 15 * GIB);
    t.join(2, GIB / 2);
    t.request(1);
    let mut is_denied = false;
    for _ in 0..12 {
        t.report(2, GIB / 2, 0, 0);
        t.report(1, 15 * GIB, 14 * GIB, 0);
        t.release(1, ReleaseReason::NoMemory);
        t.request(1);
        t.map(2);
        let mapped = t.attachment(2).mapped;
        is_denied |=
            found(&mut t, GIB, &[(1, 14 * GIB), (2, mapped)]).contains(&denied(1, 15 * GIB, Denial::Unmappable));
        for _ in 0..4000 {
            t.map(2);
            if t.state(1) == LockState::Holding {
                break;
            }
            t.after(ms(10));
        }
        assert_eq!(t.state(1), LockState::Holding);
    }
    assert!(is_denied);
}

#[test]
fn a_reconnecting_client_waits_for_a_measurement_only_briefly() {
    let mut t = measured(AntiThrash::On);
    t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(0) });
    t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Swap });
    t.report(1, 0, 0, 0);
    t.after(Duration::from_secs(5));
    t.report(1, 10 * GIB, 10 * GIB, 0);
    t.request(1);
    t.join(2, GIB);
    t.after(ms(2999));
    assert_eq!(t.attachment(1).allowance, 0);
    t.after(ms(1));
    assert_eq!(t.attachment(1).allowance, 10 * GIB);
    t.map(1);
    assert_eq!(t.state(1), LockState::Holding);
}

#[test]
fn a_reconnecting_client_does_not_wait_after_a_measurement_has_refuted_its_report() {
    let mut t = measured(AntiThrash::On);
    t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(0) });
    t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Swap });
    t.report(1, 10 * GIB, 10 * GIB, 0);
    t.request(1);
    assert_eq!(t.attachment(1).allowance, 0);
    found(&mut t, 16 * GIB, &[(1, 0), (9, 0)]);
    assert_eq!((t.state(1), t.attachment(1).allowance), (LockState::Holding, 10 * GIB));
}

#[test]
fn a_client_may_try_to_map_more_on_each_gpu() {
    let mut t = measured(AntiThrash::On);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(0) });
    for n in [0, 1] {
        t.say(Event::GpuOverhead { gpu: gpu(n), begun: t.now, bytes: 6 * GIB, others: 0, complete: true });
        t.say(Event::Attached { client: client(1), gpu: gpu(n), engine: Engine::Swap });
        let report = MemoryReport { ack: u32::MAX, demand: 12 * GIB, limit_ack: u32::MAX, ..MemoryReport::default() };
        t.say(Event::Memory { client: client(1), gpu: gpu(n), report });
    }
    t.say(Event::Requested { client: client(1), gpus: gpus([0, 1]) });
    assert_eq!([0, 1].map(|n| t.machine.gpu(gpu(n)).unwrap().trial), [2 * GIB; 2]);
}

/// No request follows while the client holds the GPU, so the trial begins when the other client's
/// memory has left.
#[test]
fn a_holder_may_try_to_map_more_after_other_memory_is_evicted() {
    let mut t = measured(AntiThrash::On);
    t.measured(16 * GIB); // no memory seems to be free
    t.join(1, 2 * GIB);
    t.join(2, 2 * GIB);
    t.request(1);
    t.map(1);
    assert_eq!(t.attachment(1).mapped, 2 * GIB, "by a trial");
    t.request(2);
    t.release(1, ReleaseReason::Idle);
    assert_eq!((t.state(2), t.attachment(2).allowance), (LockState::Holding, 0));
    t.map(1);
    assert_eq!(t.attachment(1).mapped, 0);
    assert_eq!(t.attachment(2).allowance, 2 * GIB, "{:?}", t.machine.gpu(gpu(0)));
}

/// The capacity falls below the memory that the holder has already mapped, and its demand grows.
#[test]
fn a_holder_that_exceeds_the_capacity_may_try_to_map_more() {
    let mut t = measured(AntiThrash::On);
    t.measured(16 * GIB); // no memory seems to be free
    t.join(1, 2 * GIB);
    t.request(1);
    t.map(1);
    assert_eq!(t.attachment(1).mapped, 2 * GIB, "by a trial");
    t.release(1, ReleaseReason::Idle);
    t.report(1, 4 * GIB, 2 * GIB, 0);
    assert_eq!(t.attachment(1).allowance, 0, "its memory has to leave");
    // The client requests the lock before it has evicted any memory.
    t.request(1);
    assert_eq!((t.state(1), t.attachment(1).allowance), (LockState::Holding, 4 * GIB), "{:?}", t.machine.gpu(gpu(0)));
}

/// Each demand exceeds the capacity of 0. If both clients ran at the same time, neither could try
/// to map its memory.
#[test]
fn clients_that_exceed_the_capacity_never_run_together() {
    let mut t = measured(AntiThrash::Auto);
    t.measured(16 * GIB); // no memory seems to be free
    t.join(1, 2 * GIB);
    t.join(2, 2 * GIB);
    let uses_little = |n| Event::Utilization { client: client(n), gpu: gpu(0), permille: 100 };
    t.request(1);
    t.map(1);
    t.say(uses_little(1));
    t.request(2);
    t.release(1, ReleaseReason::Idle);
    t.say(uses_little(2));
    t.request(1);
    assert_eq!([t.state(1), t.state(2)], [LockState::Waiting, LockState::Holding]);
    t.map(1);
    assert_eq!(t.attachment(2).allowance, 2 * GIB);
}

#[test]
fn a_mapping_trial_takes_no_memory_from_contexts() {
    let mut t = measured(AntiThrash::On);
    t.measured(6 * GIB);
    t.join(1, 12 * GIB);
    t.request(1);
    assert_eq!(t.machine.gpu(gpu(0)).unwrap().trial, 2 * GIB);
    t.measured(7 * GIB); // another program has started
    assert_eq!(t.machine.gpu(gpu(0)).unwrap().trial, 2 * GIB);
}

#[test]
fn a_reconnecting_client_is_measured_before_it_is_evicted() {
    let mut t = measured(AntiThrash::On);
    t.measured(10 * GIB); // includes the client's own memory, which was measured before it connected
    t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(0) });
    t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Swap });
    let commands = t.report(1, 10 * GIB, 10 * GIB, 0);
    assert_eq!((allowances(&commands), commands.contains(&MEASURE)), (vec![], true), "{commands:?}");
    t.measured(0);
    let commands = found(&mut t, 6 * GIB, &[(1, 10 * GIB)]);
    assert_eq!(allowances(&commands), [(1, 10 * GIB)]);
}

/// A change of its owner, or of the policy, moves only queued requests.
#[test]
fn a_request_delayed_by_a_mapping_failure_stays_delayed_after_a_change() {
    let fcfs = settings(AntiThrash::On, Duration::from_secs(1));
    let group = Some(Group { id: GroupId(7), limits: RuleLimits::default() });
    for change in [
        Event::Groups { groups: BTreeMap::from([(client(2), group)]) },
        Event::Configure(Settings { policy: PolicyName::Adaptive, ..fcfs }),
    ] {
        let mut t = Talk::in_mode(AntiThrash::On);
        t.join(1, 4 * GIB);
        t.join(2, 8 * GIB);
        t.request(2);
        t.report(2, 8 * GIB, 7 * GIB, 0);
        t.release(2, ReleaseReason::NoMemory);
        assert!(!t.request(2).contains(&grant(2)), "it waits for a measurement");
        assert!(!t.say(change.clone()).contains(&grant(2)), "{change:?}");
        assert_eq!(t.state(2), LockState::Waiting);
        t.after(Duration::from_secs(1));
        t.map(1);
        assert_eq!(t.state(2), LockState::Holding);
    }
}

// ---- growth ----

/// Joins a client that holds the lock and has grown twice.
fn growing(t: &mut Talk, n: u64, from: u64) {
    t.join(n, from);
    grows(t, n, from);
}

fn grows(t: &mut Talk, n: u64, from: u64) {
    t.request(n);
    for step in 1..=2 {
        t.now += ms(1);
        t.report(n, from + step * 32 * MIB, from + (step - 1) * 32 * MIB, 0);
        t.map(n);
    }
}

#[test]
fn a_holder_that_keeps_growing_may_map_ahead() {
    let mut t = Talk::in_mode(AntiThrash::On);
    growing(&mut t, 1, GIB);
    let attachment = t.attachment(1);
    assert_eq!((attachment.demand, attachment.allowance), (GIB + 64 * MIB, 2 * GIB + 32 * MIB));
    // The scheduler has allowed the client more than its demand, and sends no message until the
    // client has used half of that advance.
    t.now += ms(1);
    assert_eq!(t.report(1, GIB + 500 * MIB, GIB + 500 * MIB, 0), []);
    t.now += ms(1);
    let commands = t.report(1, GIB + 600 * MIB, GIB + 600 * MIB, 0);
    assert_eq!(allowances(&commands), [(1, 2 * GIB + 600 * MIB)]);
}

#[test]
fn a_map_ahead_allowance_returns_to_a_client_that_needs_it() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    growing(&mut t, 1, 4 * GIB);
    assert_eq!(t.attachment(1).allowance, 5 * GIB + 32 * MIB);
    // Client 2 leaves only a part of the free memory.
    t.join(2, 11 * GIB + 512 * MIB);
    t.request(2);
    assert_eq!(t.attachment(1).allowance, 4 * GIB + 512 * MIB, "as much as is lacking");
    assert_eq!(t.state(1), LockState::Holding, "nothing has to leave");
    t.map(1);
    assert_eq!(t.attachment(2).allowance, 11 * GIB + 512 * MIB);
}

#[test]
fn a_map_ahead_allowance_passes_to_another_gang_member() {
    let mut t = Talk::in_mode(AntiThrash::On);
    let join = |t: &mut Talk, n: u64, demand: u64| {
        t.say(Event::Connected { client: client(n), gang: 1, tenant: TenantId(0) });
        t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
        t.report(n, demand, 0, 0);
        t.map(n);
    };
    join(&mut t, 1, 4 * GIB);
    grows(&mut t, 1, 4 * GIB);
    assert_eq!(t.attachment(1).allowance, 5 * GIB + 32 * MIB);
    t.join(3, 0);
    t.request(3);
    t.release(1, ReleaseReason::Idle);
    t.request(1);
    join(&mut t, 2, 11 * GIB + 512 * MIB);
    t.request(2);
    t.map(1);
    t.map(2);
    t.release(3, ReleaseReason::Idle);
    assert_eq!((t.attachment(1).allowance, t.attachment(2).allowance), (4 * GIB + 512 * MIB, 11 * GIB + 512 * MIB));
    assert_eq!((t.state(1), t.state(2)), (LockState::Holding, LockState::Holding));
}

#[test]
fn a_map_ahead_allowance_stays_within_the_limit() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(0) });
    t.group(1, Amount::Bytes(GIB + 128 * MIB));
    t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Swap });
    t.report(1, GIB, 0, 0);
    t.map(1);
    t.request(1);
    for step in 1..=2 {
        t.now += ms(1);
        t.report(1, GIB + step * 32 * MIB, GIB + (step - 1) * 32 * MIB, 0);
        t.map(1);
    }
    assert_eq!(t.attachment(1).allowance, GIB + 128 * MIB);
}

#[test]
fn a_holder_that_does_not_grow_gets_no_map_ahead_allowance() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, GIB);
    t.request(1);
    t.now += Duration::from_secs(2);
    t.report(1, 2 * GIB, GIB, 0);
    t.map(1);
    assert_eq!(t.attachment(1).allowance, 2 * GIB);
    t.now += Duration::from_secs(2);
    t.report(1, 3 * GIB, 2 * GIB, 0);
    assert_eq!(t.attachment(1).allowance, 3 * GIB);
}
