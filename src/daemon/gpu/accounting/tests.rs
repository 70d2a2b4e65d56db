use super::*;
use crate::scheduler::{GpuId, Time, Uuid};
use std::cell::Cell;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const GUESS: u64 = 600 * MIB;

/// The memory that the driver reserves, in MiB.
const RESERVED: u64 = 300;

/// A sample, 5 s after the previous one.
fn sample(used: u64, processes: &[(u32, u64)]) -> Sample {
    thread_local!(static NOW: Cell<Time> = const { Cell::new(Time::ZERO) });
    let begun = NOW.replace(NOW.get() + Duration::from_secs(5));
    let processes = Some(processes.iter().map(|(pid, mib)| (*pid, mib * MIB)).collect());
    let (gpu, reserved) = (GpuId(Uuid([0; 16])), RESERVED * MIB);
    Sample { gpu, begun, steady: true, used: used * MIB, reserved, graphics: 0, processes }
}

/// A client whose mapped memory does not change.
fn client(id: u64, mapped: u64) -> Attached {
    moving(id, mapped, mapped)
}

fn moving(id: u64, least: u64, most: u64) -> Attached {
    Attached {
        client: ClientId(id),
        pid: id as u32,
        least: least * MIB,
        most: most * MIB,
        managed: 0,
        managed_mapped: 0,
        unmapped: 0,
        adopted: 0,
        is_new: false,
    }
}

/// A client with `managed` MiB of managed memory, `mapped` of them mapped, and no other memory.
fn managed(id: u64, managed: u64, mapped: u64) -> Attached {
    Attached {
        managed: managed * MIB,
        managed_mapped: mapped * MIB,
        unmapped: (managed - mapped) * MIB,
        ..moving(id, 0, mapped)
    }
}

fn told(accounting: &mut Accounting, sample: &Sample, clients: &[Attached]) -> u64 {
    accounting.sample(sample, clients, GUESS, 0, |_| false).expect("a figure") / MIB
}

fn told_in_total(accounting: &mut Accounting, used: u64, clients: &[Attached]) -> u64 {
    let sample = Sample { processes: None, ..sample(used, &[]) };
    accounting.sample(&sample, clients, GUESS, 0, |_| false).expect("a figure") / MIB
}

#[test]
fn other_programs_and_contexts_count_as_overhead() {
    let mut accounting = Accounting::default();
    let told = told(&mut accounting, &sample(9000, &[(1, 4500), (7, 3000)]), &[client(1, 4000)]);
    assert_eq!(told, 5000, "500 of context, 3000 of process 7, 1500 of no process");
    assert_eq!((accounting.basis(), accounting.others()), (Basis::Processes, 4500 * MIB));
}

#[test]
fn without_process_figures_context_sizes_are_assumed() {
    let mut accounting = Accounting::default();
    told_in_total(&mut accounting, 9000, &[client(1, 4000), client(2, 2000)]);
    assert_eq!(accounting.others(), 1800 * MIB);
}

#[test]
fn moving_memory_does_not_change_the_overhead() {
    let mut accounting = Accounting::default();
    told(&mut accounting, &sample(5000, &[(1, 4500)]), &[client(1, 4000)]);
    // The client has unmapped 3 GiB, or mapped 2 GiB, and has not reported it yet.
    for (used, process) in [(2000, 1500), (7000, 6500)] {
        let clients = [moving(1, 1000, 6000)];
        assert_eq!(told(&mut accounting, &sample(used, &[(1, process)]), &clients), 1000);
    }
}

/// Regression test: two servers that started together deadlocked. Samples showed only a part of each
/// context. The wrong sizes were not corrected, because the servers' memory kept moving afterwards.
#[test]
fn a_context_under_construction_is_not_measured() {
    let mut accounting = Accounting::default();
    let new = |id| Attached { is_new: true, ..client(id, 0) };
    told(&mut accounting, &sample(1040, &[(1, 20), (2, 20)]), &[new(1), new(2)]);
    // The contexts are complete, and the memory of both clients keeps growing.
    let clients = [moving(1, 4000, 4064), moving(2, 5000, 5064)];
    let told = told(&mut accounting, &sample(11_054, &[(1, 4527), (2, 5527)]), &clients);
    assert_eq!(told, 1000 + 2 * 527);
}

#[test]
fn the_next_sample_corrects_a_wrong_context_estimate() {
    let mut accounting = Accounting::default();
    told(&mut accounting, &sample(4020, &[(1, 4020)]), &[client(1, 4000)]);
    // The context has grown to at least 527 - 64 MiB while memory moves.
    let told = told(&mut accounting, &sample(5027, &[(1, 5027)]), &[moving(1, 4500, 4564)]);
    assert_eq!(told, 461);
}

#[test]
fn an_unmeasured_context_is_estimated() {
    let mut accounting = Accounting::default();
    assert_eq!(told(&mut accounting, &sample(5000, &[(1, 4500)]), &[moving(1, 0, 4500)]), 1100);
    assert_eq!(told(&mut accounting, &sample(5000, &[(1, 4500)]), &[client(1, 4000)]), 1000);
}

/// Regression test: a program was refused its last 2 MiB. The program's context had been measured while
/// the program mapped 2 MiB, so the context counted as 2 MiB too large.
#[test]
fn arriving_memory_is_not_attributed_to_the_context() {
    let mut accounting = Accounting::default();
    told(&mut accounting, &sample(8, &[(1, 8)]), &[moving(1, 2, 4)]);
    assert_eq!(accounting.contexts().get(&ClientId(1)), None);
    told(&mut accounting, &sample(8, &[(1, 8)]), &[client(1, 4)]);
    assert_eq!(accounting.contexts().get(&ClientId(1)), Some(&(4 * MIB)));
    told(&mut accounting, &sample(10, &[(1, 10)]), &[moving(1, 4, 6)]);
    assert_eq!(accounting.contexts().get(&ClientId(1)), Some(&(4 * MIB)), "what was measured stays");
}

/// Regression test: a program's limit was too high by the size of its context. The process's figure did
/// not contain all memory that was reported as mapped, so the context seemed to be empty.
#[test]
fn a_report_of_more_memory_than_is_in_use_does_not_shrink_the_context() {
    let mut accounting = Accounting::default();
    assert_eq!(told(&mut accounting, &sample(24, &[(1, 24)]), &[client(1, 40)]), 600, "it is not known yet");
    assert_eq!(accounting.contexts().get(&ClientId(1)), None);
    told(&mut accounting, &sample(44, &[(1, 44)]), &[client(1, 40)]);
    assert_eq!(accounting.contexts().get(&ClientId(1)), Some(&(4 * MIB)));
    told(&mut accounting, &sample(44, &[(1, 44)]), &[client(1, 80)]);
    assert_eq!(accounting.contexts().get(&ClientId(1)), Some(&(4 * MIB)), "more has been allocated");
}

/// Regression test: two programs stood still for 3 s. One had freed a chunk and the other had mapped one
/// between two calls of NVML, which looked like growth of a third program.
#[test]
fn memory_that_moves_during_a_sample_is_not_growth_of_other_programs() {
    let mut accounting = Accounting::default();
    told(&mut accounting, &sample(5300, &[(1, 4000), (2, 500)]), &[client(1, 4000), client(2, 500)]);
    assert_eq!(accounting.others(), 800 * MIB);
    let moved = [moving(1, 3936, 4000), moving(2, 500, 564)];
    told(&mut accounting, &sample(5300, &[(1, 3936), (2, 500)]), &moved);
    assert_eq!(accounting.others(), 800 * MIB);
    told(&mut accounting, &sample(5600, &[(1, 3936), (2, 500)]), &moved);
    assert_eq!(accounting.others(), (5600 - 3936 - 500 - 128) * MIB, "more has grown than moved");
    told(&mut accounting, &sample(5700, &[(1, 3936), (2, 564), (3, 100)]), &[client(1, 3936), client(2, 564)]);
    assert_eq!(accounting.others(), 1200 * MIB);
}

/// A client whose bounds are wide, because it has not reported yet or moves much, hides no other growth.
#[test]
fn wide_bounds_hide_no_more_than_the_process_uses() {
    let mut accounting = Accounting::default();
    told(&mut accounting, &sample(5300, &[(1, 10)]), &[client(1, 10)]);
    told(&mut accounting, &sample(5700, &[(1, 10)]), &[moving(1, 0, 80_000)]);
    assert_eq!(accounting.others(), (5690 - 10) * MIB);
}

#[test]
fn a_growing_context_counts_beyond_the_guess() {
    let mut accounting = Accounting::default();
    let new = Attached { is_new: true, ..client(1, 0) };
    assert_eq!(told(&mut accounting, &sample(1000, &[(1, 1000)]), &[new]), 398);
}

#[test]
fn memory_of_disconnected_clients_is_no_overhead() {
    let mut accounting = Accounting::default();
    let overhead = accounting.sample(&sample(5000, &[(1, 4500)]), &[], GUESS, 0, |_| true);
    assert_eq!(overhead, Some(500 * MIB));
    assert_eq!(told(&mut accounting, &sample(5000, &[(1, 4500)]), &[]), 5000);
}

#[test]
fn a_new_clients_context_is_not_counted_as_overhead() {
    let mut accounting = Accounting::default();
    let new = Attached { is_new: true, ..client(1, 4000) };
    assert_eq!(told(&mut accounting, &sample(5000, &[(1, 4500)]), &[new]), 500);
}

#[test]
fn a_departed_client_leaves_no_overhead() {
    let mut accounting = Accounting::default();
    told(&mut accounting, &sample(5000, &[(1, 4500)]), &[client(1, 4000)]);
    assert_eq!(told(&mut accounting, &sample(500, &[]), &[]), 500);
}

#[test]
fn without_process_figures_only_sums_are_compared() {
    let mut accounting = Accounting::default();
    assert_eq!(told_in_total(&mut accounting, 6500, &[client(1, 4000), client(2, 1000)]), 1500);
    assert_eq!(told_in_total(&mut accounting, 9000, &[client(1, 4000), moving(2, 1000, 4000)]), 1500);
    // Memory that is evicted or restored counts for the clients.
    assert_eq!(told_in_total(&mut accounting, 6000, &[moving(1, 0, 4000), moving(2, 0, 4000)]), 1500);
    assert_eq!(told_in_total(&mut accounting, 7000, &[client(1, 4000), client(2, 1000)]), 2000);
    assert_eq!(accounting.basis(), Basis::Total);
}

#[test]
fn a_clients_memory_is_its_processs_memory_less_the_context() {
    let mut accounting = Accounting::default();
    told(&mut accounting, &sample(9000, &[(1, 4500), (2, 1500)]), &[client(1, 4000)]);
    // The client reports that it freed 3 GiB, but has freed only 1 GiB.
    let clients = [moving(1, 1000, 4000), moving(2, 0, 900)];
    let found = accounting.found(&sample(8000, &[(1, 3500), (2, 1500)]), &clients, GUESS).expect("figures");
    assert_eq!((found[&ClientId(1)].least, found[&ClientId(1)].most), (2998 * MIB, 3000 * MIB));
    let second = found[&ClientId(2)];
    assert_eq!((second.least, second.most), (898 * MIB, 1500 * MIB), "its context was never measured");
}

#[test]
fn a_process_not_listed_by_nvml_has_no_memory() {
    let mut accounting = Accounting::default();
    let clients = [client(1, 4000), Attached { least: 0, ..client(2, 8000) }];
    assert_eq!(told(&mut accounting, &sample(5000, &[(1, 4500)]), &clients), 1000);
    let found = accounting.found(&sample(5000, &[(1, 4500)]), &clients, GUESS).expect("figures");
    assert_eq!(found[&ClientId(2)].most, 0);
    assert_eq!(found[&ClientId(1)].most, 4000 * MIB);
}

#[test]
fn clients_of_one_process_share_its_figures() {
    let mut accounting = Accounting::default();
    let clients = [client(1, 4000), Attached { pid: 1, ..client(2, 1000) }];
    assert_eq!(told(&mut accounting, &sample(6000, &[(1, 5500)]), &clients), 1000);
    let found = accounting.found(&sample(6000, &[(1, 5500)]), &clients, GUESS).expect("figures");
    assert_eq!((found[&ClientId(1)].most, found[&ClientId(2)].most), (4000 * MIB, 1000 * MIB));
}

#[test]
fn a_processs_memory_counts_once_despite_its_clients_claims() {
    let mut accounting = Accounting::default();
    let of_one = |id, least, most| Attached { pid: 1, ..moving(id, least, most) };
    told(&mut accounting, &sample(8500, &[(1, 8500)]), &[of_one(1, 8000, 8000)]);
    let clients: Vec<Attached> = (1..=10).map(|id| of_one(id, if id == 1 { 8000 } else { 0 }, 8000)).collect();
    let found = accounting.found(&sample(8500, &[(1, 8500)]), &clients, GUESS).expect("figures");
    assert_eq!(found.values().map(|found| found.most).sum::<u64>(), 8000 * MIB);
}

#[test]
fn adopted_memory_counts_for_the_adopter() {
    let adopter = Attached { adopted: 300 * MIB, ..moving(2, 0, 300) };
    let found = |used: u64, processes: &[(u32, u64)], clients: &[Attached]| {
        let mut accounting = Accounting::default();
        told(&mut accounting, &sample(1000, &[(1, 500), (2, 500)]), &[client(1, 0), client(2, 0)]);
        let sample = sample(used, processes);
        let overhead = told(&mut accounting, &sample, clients);
        (accounting.found(&sample, clients, GUESS).expect("figures")[&ClientId(2)].most / MIB, overhead)
    };
    let exporter = client(1, 0);
    assert_eq!(found(1300, &[(1, 500), (2, 800)], &[exporter, adopter]), (300, 1000), "its own process");
    let given_up = moving(1, 0, 300);
    assert_eq!(found(1300, &[(1, 800), (2, 500)], &[given_up, adopter]), (300, 1000), "the exporter's process");
    assert_eq!(found(800, &[(2, 500)], &[adopter]), (300, 500), "no process");
    // Memory that does not exist or that the exporter still reports does not count as adopted.
    assert_eq!(found(1000, &[(1, 500), (2, 500)], &[exporter, adopter]).0, 0);
    assert_eq!(found(1300, &[(1, 800), (2, 500)], &[client(1, 300), adopter]).0, 0);
}

#[test]
fn the_overhead_is_kept_for_a_sample_without_process_figures() {
    let mut accounting = Accounting::default();
    told(&mut accounting, &sample(9000, &[(1, 4500), (2, 0)]), &[client(1, 4000), client(2, 0)]);
    // The second client claims 4 GiB that are not in use.
    let clients = [client(1, 4000), moving(2, 0, 4000)];
    assert_eq!(told_in_total(&mut accounting, 9000, &clients), 5000);
    let unlisted = Sample { processes: None, ..sample(9000, &[]) };
    let found = accounting.found(&unlisted, &clients, GUESS).expect("figures");
    assert_eq!(found[&ClientId(2)].most, 0);
}

#[test]
fn without_process_figures_a_claim_requires_bytes_in_use() {
    let mut accounting = Accounting::default();
    told_in_total(&mut accounting, 6500, &[client(1, 4000), client(2, 1000)]);
    // The second client reports 3 GiB more, which are not in use.
    let clients = [client(1, 4000), moving(2, 1000, 4000)];
    let found = accounting.found(&sample(6500, &[]), &clients, GUESS).expect("figures");
    assert_eq!(found[&ClientId(2)].most, 1000 * MIB);
    // Now the reported memory is in use.
    let found = accounting.found(&sample(9500, &[]), &clients, GUESS).expect("figures");
    assert_eq!(found[&ClientId(2)].most, 4000 * MIB);
    let unsteady = Sample { steady: false, ..sample(9500, &[]) };
    assert!(accounting.found(&unsteady, &clients, GUESS).is_none());
}

/// Regression test: managed memory is in no process's figure, so it counted as memory of other programs
/// too. It stays in use after it was evicted, and the GPU's capacity for all clients fell by its size.
#[test]
fn managed_memory_does_not_count_as_other_programs_memory() {
    let mut accounting = Accounting::default();
    let mut others = |used: u64, client: Attached| {
        let told = told(&mut accounting, &sample(used, &[(1, 500)]), &[client]);
        assert_eq!(told, accounting.others() / MIB + 500, "the context's size stays");
        told - 500
    };
    assert_eq!(others(800, client(1, 0)), 300);
    assert_eq!(others(800, managed(1, 36_000, 36_000)), 300, "it has not arrived yet");
    assert_eq!(others(36_800, managed(1, 36_000, 36_000)), 300, "it is on the GPU");
    assert_eq!(others(36_800, managed(1, 36_000, 0)), 300, "it was evicted, and stays in use");
    assert_eq!(others(6800, managed(1, 36_000, 0)), 300, "another program got its pages");
    assert_eq!(others(800, client(1, 0)), 300, "it was freed");
}

/// Regression test: while some of a program's managed memory was mapped, its context was never measured,
/// and counted as memory of other programs.
#[test]
fn the_context_of_a_process_with_managed_memory_is_estimated() {
    let mut accounting = Accounting::default();
    let partly_mapped = managed(1, 8000, 3000);
    assert_eq!(told(&mut accounting, &sample(3500, &[(1, 500)]), &[partly_mapped]), RESERVED + 500);
    assert_eq!(accounting.contexts().get(&ClientId(1)), Some(&(500 * MIB)));
    let with_other_memory = Attached { most: 4000 * MIB, ..partly_mapped };
    told(&mut accounting, &sample(4500, &[(1, 1500)]), &[with_other_memory]);
    assert_eq!(accounting.contexts().get(&ClientId(1)), Some(&(500 * MIB)), "it stays while it is possible");
}

/// A game beside evicted managed memory: graphics programs are measured exactly.
#[test]
fn growth_of_listed_programs_is_not_hidden_by_managed_memory() {
    let mut accounting = Accounting::default();
    told(&mut accounting, &sample(800, &[(1, 500)]), &[client(1, 0)]);
    for client in [managed(1, 36_000, 0), managed(1, 36_000, 36_000)] {
        assert_eq!(told(&mut accounting, &sample(6800, &[(1, 500)]), &[client]), 800);
        let game = Sample { graphics: 6000 * MIB, ..sample(12_800, &[(1, 500)]) };
        assert_eq!(told(&mut accounting, &game, &[client]), 6800);
        let game = Sample { graphics: 7000 * MIB, ..sample(15_800, &[(1, 500), (7, 2000)]) };
        assert_eq!(told(&mut accounting, &game, &[client]), 9800);
    }
}

#[test]
fn unlisted_memory_beyond_the_managed_memory_is_other_programs() {
    let mut accounting = Accounting::default();
    let evicted = managed(1, 6000, 0);
    told(&mut accounting, &sample(800, &[(1, 500)]), &[client(1, 0)]);
    assert_eq!(told(&mut accounting, &sample(6800, &[(1, 500)]), &[evicted]), 800);
    assert_eq!(told(&mut accounting, &sample(10_800, &[(1, 500)]), &[evicted]), 4800);
    assert_eq!(told(&mut accounting, &sample(7800, &[(1, 500)]), &[evicted]), 4800, "it stays");
    assert_eq!(told(&mut accounting, &sample(1000, &[(1, 500)]), &[evicted]), 1000);
}

/// A sample may be handled before the report of a new managed allocation.
#[test]
fn a_late_report_of_managed_memory_lowers_the_overhead_again() {
    let mut accounting = Accounting::default();
    let first = sample(800, &[(1, 500)]);
    told(&mut accounting, &first, &[client(1, 0)]);
    let early = Sample { used: 6800 * MIB, ..sample(0, &[(1, 500)]) };
    assert_eq!(told(&mut accounting, &early, &[client(1, 0)]), 6800);
    let later = Sample { begun: early.begun + Duration::from_secs(1), ..early };
    assert_eq!(told(&mut accounting, &later, &[managed(1, 6000, 6000)]), 800);
}

/// One failed list of processes does not turn memory of the driver and of other programs into clients' managed
/// memory.
#[test]
fn the_estimate_survives_a_sample_without_process_figures() {
    let mut accounting = Accounting::default();
    let evicted = managed(1, 36_000, 0);
    told(&mut accounting, &sample(2800, &[(1, 500)]), &[client(1, 0)]);
    assert_eq!(told(&mut accounting, &sample(20_000, &[(1, 500)]), &[evicted]), 2800);
    assert_eq!(told_in_total(&mut accounting, 20_000, &[evicted]), 2800);
    assert_eq!(told(&mut accounting, &sample(20_000, &[(1, 500)]), &[evicted]), 2800);
    let sample = sample(20_000, &[(1, 500)]);
    assert_eq!(accounting.evicted(&sample, &[evicted]), 17_200 * MIB);
}

#[test]
fn claims_of_managed_memory_lower_no_estimate() {
    let mut accounting = Accounting::default();
    assert_eq!(told(&mut accounting, &sample(9000, &[(1, 4500), (7, 3000)]), &[client(1, 4000)]), 5000);
    let liar = Attached { most: 4000 * MIB, ..managed(1, 1 << 20, 1 << 20) };
    assert_eq!(told(&mut accounting, &sample(9000, &[(1, 4500), (7, 3000)]), &[liar]), 5000);
    // Memory of its own process cannot be hidden.
    assert_eq!(told(&mut accounting, &sample(13_000, &[(1, 8500), (7, 3000)]), &[liar]), 8998);
}

/// A new daemon learns late of the managed memory of an earlier daemon's clients.
#[test]
fn the_first_report_of_an_older_process_corrects_the_estimate() {
    let processes = || sample(36_800, &[(1, 500), (2, 500)]);
    let mut accounting = Accounting::default();
    let unknown = accounting.sample(&processes(), &[client(1, 0)], GUESS, u64::MAX, |_| true);
    assert_eq!(unknown, Some((RESERVED + 500) * MIB), "clients may reconnect");
    assert_eq!(told(&mut accounting, &processes(), &[client(1, 0)]), 36_800);
    accounting.forget();
    let clients = [client(1, 0), managed(2, 36_000, 36_000)];
    assert_eq!(told(&mut accounting, &processes(), &clients), RESERVED + 1000);
}

#[test]
fn managed_memory_of_a_departed_client_is_no_overhead() {
    let mut accounting = Accounting::default();
    told(&mut accounting, &sample(800, &[(1, 500)]), &[client(1, 0)]);
    told(&mut accounting, &sample(36_800, &[(1, 500)]), &[managed(1, 36_000, 36_000)]);
    let departed = accounting.sample(&sample(36_300, &[]), &[], GUESS, 36_000 * MIB, |_| true);
    assert_eq!(departed, Some(300 * MIB));
    assert_eq!(told(&mut accounting, &sample(36_300, &[]), &[]), 36_300, "it is still there after a while");
}

#[test]
fn managed_memory_in_use_confirms_reports_of_it_once() {
    let mut accounting = Accounting::default();
    told(&mut accounting, &sample(1300, &[(1, 500), (2, 500)]), &[client(1, 0), client(2, 0)]);
    let clients = [managed(1, 8000, 8000), managed(2, 8000, 8000)];
    let sample = sample(11_300, &[(1, 500), (2, 500)]);
    told(&mut accounting, &sample, &clients);
    let found = accounting.found(&sample, &clients, GUESS).expect("figures");
    assert_eq!(found.values().map(|found| found.most / MIB).collect::<Vec<_>>(), [8000, 2000]);
    assert!(found.values().all(|found| found.least == 0), "nothing shows whose it is");
    assert_eq!(accounting.evicted(&sample, &clients), 0);
    // The second client's pages were the first client's.
    let clients = [managed(1, 8000, 0), managed(2, 8000, 8000)];
    assert_eq!(accounting.evicted(&sample, &clients), 2000 * MIB);
    let clients = [managed(1, 8000, 0), managed(2, 8000, 2000)];
    assert_eq!(accounting.evicted(&sample, &clients), 8000 * MIB);
    let found = accounting.found(&sample, &clients, GUESS).expect("figures");
    assert_eq!(
        found.values().map(|found| found.most / MIB).collect::<Vec<_>>(),
        [0, 2000],
        "evicted memory is not mapped"
    );
}

#[test]
fn without_process_figures_evicted_managed_memory_is_no_overhead_and_no_false_report() {
    let mut accounting = Accounting::default();
    assert_eq!(told_in_total(&mut accounting, 1500, &[client(1, 0), client(2, 0)]), 1500);
    let other = moving(2, 0, 4000);
    assert_eq!(told_in_total(&mut accounting, 1500, &[managed(1, 8000, 8000), other]), 1500, "it has not arrived yet");
    assert_eq!(told_in_total(&mut accounting, 9500, &[managed(1, 8000, 8000), other]), 1500);
    let clients = [managed(1, 8000, 0), other];
    assert_eq!(told_in_total(&mut accounting, 9500, &clients), 1500);
    let unlisted = Sample { processes: None, ..sample(9500, &[]) };
    assert_eq!(accounting.evicted(&unlisted, &clients), 8000 * MIB);
    let found = accounting.found(&unlisted, &clients, GUESS).expect("figures");
    assert!(found.values().all(|found| found.least == 0), "the other client may have freed its memory: {found:?}");
}

#[test]
fn small_overhead_changes_are_ignored() {
    let mut accounting = Accounting::default();
    assert_eq!(told(&mut accounting, &sample(500, &[]), &[]), 500);
    assert_eq!(told(&mut accounting, &sample(501, &[]), &[]), 500);
}
