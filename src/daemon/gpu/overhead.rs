//! Reconciles what clients report about one GPU's memory with what NVML measures there.
//!
//! A sample is of one moment, and a client's reports are of others, so its mapped bytes at that moment are known as a
//! range: [`Attached::least`] to [`Attached::most`]. What follows from a range is a range as well. An estimate is kept as
//! long as it lies in the newest range, and moved to the nearer end where it does not, so that a wrong one lasts until
//! the next sample at most, whether memory is at rest or not.
//!
//! - *Context*: what NVML shows of a client's process beyond its mapped memory. It counts only once it is complete: the
//!   driver takes seconds to create one, and a sample taken meanwhile shows a part.
//! - *Overhead*: what is in use beyond all clients' mapped memory: contexts, programs without nvshare, the driver.
//! - *Found*: what a client has mapped, whatever it reports. The scheduler believes no report that exceeds it.
//! - *Adopted*: memory that a program allocated, shared and gave up, and that another one has now. NVML may show it for
//!   the first one, for none, or for the one that has it. It counts for that one, as far as it is shown anywhere.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::nvml::Sample;
use crate::scheduler::{ClientId, Found, Time};

/// Smaller differences are not reported to the scheduler: the granularity of GPU memory.
const WORTH_TELLING: u64 = 2 << 20;

/// How long a report takes to arrive: memory has moved by as much as that before it is known.
const LAG: Duration = Duration::from_millis(50);
/// No sample is processed later than this after it was begun.
const LATEST: Duration = Duration::from_secs(2);
/// More changes than these are taken together.
const MANY_CHANGES: usize = 32;

/// How much of a client's memory can have been mapped lately.
#[derive(Debug, Default)]
pub struct History(VecDeque<(Time, (u64, u64))>);

impl History {
    /// From now on it is between these.
    pub fn record(&mut self, now: Time, extent: (u64, u64)) {
        if self.0.back().is_some_and(|(_, last)| *last == extent) {
            return;
        }
        self.0.push_back((now, extent));
        while self.0.get(1).is_some_and(|(at, _)| *at + LATEST < now) {
            self.0.pop_front();
        }
        if self.0.len() > MANY_CHANGES
            && let Some((at, first)) = self.0.pop_front()
            && let Some(second) = self.0.front_mut()
        {
            *second = (at, union(first, second.1));
        }
    }

    /// At a moment between `begun` and now, the delay of reports included.
    pub fn at(&self, begun: Time) -> (u64, u64) {
        let from = begun.saturating_sub(LAG);
        let later = self.0.iter().skip(1).map(|(at, _)| Some(*at)).chain([None]);
        let counts = self.0.iter().zip(later).filter(|(_, until)| until.is_none_or(|until| until > from));
        counts.map(|((_, extent), _)| *extent).reduce(union).unwrap_or_default()
    }
}

fn union(a: (u64, u64), b: (u64, u64)) -> (u64, u64) {
    (a.0.min(b.0), a.1.max(b.1))
}

/// What the figures of a GPU rest on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Basis {
    /// NVML is not available: clients are believed.
    #[default]
    Reports,
    /// NVML measures the GPU as a whole, but shows no figures for the processes of clients: it has none, or knows the
    /// processes by the numbers of another PID namespace.
    Total,
    /// NVML measures each process.
    Processes,
}

impl Basis {
    /// What follows from it, for the log.
    pub fn in_words(self) -> &'static str {
        match self {
            Self::Reports => "NVML is not available: programs are believed what memory they report",
            Self::Total => {
                "NVML shows no memory for the processes of programs: what they report is checked against what is in use in total"
            }
            Self::Processes => "what programs report is checked against what NVML shows for their processes",
        }
    }

    /// Its name in status and on D-Bus.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reports => "reports",
            Self::Total => "total",
            Self::Processes => "processes",
        }
    }
}

/// The estimates for one GPU.
#[derive(Debug, Default)]
pub struct Accounting {
    contexts: BTreeMap<ClientId, u64>,
    /// The overhead that was reported last.
    overhead: Option<u64>,
    /// Without figures for processes: the overhead as estimated, before small changes are left out.
    total: Option<u64>,
    basis: Basis,
    /// What the clients of a process have adopted and the last sample did not show for it.
    adopted: BTreeMap<u32, u64>,
}

/// A client on the GPU of a sample.
#[derive(Debug, Clone, Copy)]
pub struct Attached {
    pub client: ClientId,
    pub pid: u32,
    /// The fewest and the most bytes that it can have had mapped at the moment of the sample.
    pub least: u64,
    pub most: u64,
    /// Of that, what it has adopted.
    pub adopted: u64,
    /// Its context may not have been complete at that moment. The scheduler puts room aside for it.
    pub is_new: bool,
}

/// The figures of a client's process.
#[derive(Debug, Clone, Copy)]
struct Process {
    used: u64,
    least: u64,
    most: u64,
    /// What its clients have adopted.
    adopted: u64,
    /// One of its clients is new.
    is_new: bool,
    clients: usize,
    /// The client under which its context is kept: a process may be several clients.
    first: ClientId,
}

impl Accounting {
    /// Takes in a sample, and returns the overhead, small changes left out; `None` where the sample does not tell.
    ///
    /// `guess` is what a context is taken to need until it was measured. `is_own` says of a process that is not a
    /// client whether it was one or may be about to reconnect: its memory is not overhead.
    pub fn sample(
        &mut self,
        sample: &Sample,
        clients: &[Attached],
        guess: u64,
        is_own: impl Fn(u32) -> bool,
    ) -> Option<u64> {
        self.contexts.retain(|client, _| clients.iter().any(|c| c.client == *client));
        self.adopted.clear();
        // An empty list does not tell whether processes would be listed.
        let lists = |processes: &&BTreeMap<u32, u64>| !processes.is_empty() || self.basis == Basis::Processes;
        let bytes = match sample.processes.as_ref().filter(lists) {
            Some(processes) => {
                self.basis = Basis::Processes;
                self.total = None;
                self.sample_processes(sample.used, processes, clients, guess, is_own)
            }
            None => {
                if self.basis == Basis::Processes {
                    self.total = self.overhead; // which was measured better
                }
                self.basis = Basis::Total;
                self.contexts.clear();
                self.sample_total(sample.used, clients)
            }
        };
        if self.overhead.is_none_or(|told| told.abs_diff(bytes) > WORTH_TELLING) {
            self.overhead = Some(bytes);
        }
        self.overhead
    }

    fn sample_processes(
        &mut self,
        used: u64,
        processes: &BTreeMap<u32, u64>,
        clients: &[Attached],
        guess: u64,
        is_own: impl Fn(u32) -> bool,
    ) -> u64 {
        let of_clients = by_process(processes, clients);
        let is_client = |pid: u32| of_clients.contains_key(&pid);
        let own = processes.iter().filter(|(pid, _)| is_client(**pid) || is_own(**pid));
        let others = used.saturating_sub(own.map(|(_, bytes)| *bytes).fold(0, u64::saturating_add));
        let others = self.find_adopted(&of_clients, guess, others);
        let contexts = of_clients.values().map(|process| {
            // What is found of a client is understated by that, and must not become its context bit by bit.
            let most = process.most.saturating_add(WORTH_TELLING);
            let range = (process.used.saturating_sub(most), process.used.saturating_sub(process.least));
            if process.is_new {
                // The scheduler puts the guess aside itself.
                return range.0.saturating_sub(guess);
            }
            match self.contexts.get(&process.first) {
                _ if process.most - process.least <= WORTH_TELLING => {
                    self.contexts.insert(process.first, range.1);
                    range.1
                }
                Some(before) => {
                    let bytes = (*before).clamp(range.0, range.1);
                    self.contexts.insert(process.first, bytes);
                    bytes
                }
                None => guess.clamp(range.0, range.1),
            }
        });
        others.saturating_add(contexts.fold(0, u64::saturating_add))
    }

    /// Finds the memory that clients have adopted and that NVML does not show for their own process: first among bytes of
    /// clients' processes that no client reports, then among `others`, bytes in use by no client's process. Returns what
    /// is left of `others`.
    fn find_adopted(&mut self, processes: &BTreeMap<u32, Process>, guess: u64, others: u64) -> u64 {
        let mapped = |process: &Process| {
            process.used.saturating_sub(self.contexts.get(&process.first).copied().unwrap_or(guess))
        };
        let unclaimed = processes.values().map(|process| mapped(process).saturating_sub(process.least));
        let (mut unclaimed, mut others) = (unclaimed.fold(0u64, u64::saturating_add), others);
        let mut adopted = BTreeMap::new();
        for (pid, process) in processes.iter().filter(|(_, process)| process.adopted > 0) {
            let missing = process.most.saturating_sub(mapped(process)).min(process.adopted);
            // What its own process has beyond its reports is in what is mapped there already.
            let own = mapped(process).saturating_sub(process.least);
            let of_processes = missing.min(unclaimed.saturating_sub(own));
            let of_others = (missing - of_processes).min(others);
            unclaimed -= of_processes;
            others -= of_others;
            adopted.insert(*pid, of_processes + of_others);
        }
        self.adopted = adopted;
        others
    }

    fn sample_total(&mut self, used: u64, clients: &[Attached]) -> u64 {
        let most = clients.iter().fold(0u64, |sum, c| sum.saturating_add(c.most));
        let least = clients.iter().fold(0u64, |sum, c| sum.saturating_add(c.least));
        let range = (used.saturating_sub(most), used.saturating_sub(least));
        // At first clients are believed that had memory before this daemon was started.
        let bytes = self.total.map_or(range.0, |before| before.clamp(range.0, range.1));
        *self.total.insert(bytes)
    }

    /// What each client was found to have mapped; `None` where the sample does not tell.
    pub fn found(&self, sample: &Sample, clients: &[Attached], guess: u64) -> Option<BTreeMap<ClientId, Found>> {
        let processes = sample.processes.as_ref().filter(|_| self.basis == Basis::Processes);
        let Some(processes) = processes else { return self.found_in_total(sample, clients) };
        let of_clients = by_process(processes, clients);
        // Until it was measured, a context may be anything: up to the guess, or not be there at all.
        let context = |process: &Process| self.contexts.get(&process.first).copied();
        let shared = |(pid, process): (&u32, &Process)| {
            let bytes = process.used.saturating_sub(context(process).unwrap_or(0));
            let bytes = bytes.saturating_add(self.adopted.get(pid).copied().unwrap_or(0));
            (*pid, Shared { bytes, least: process.least, clients: process.clients })
        };
        let mut in_use: BTreeMap<u32, Shared> = of_clients.iter().map(shared).collect();
        let found = clients.iter().filter_map(|client| {
            let process = of_clients.get(&client.pid)?;
            let large = context(process).unwrap_or(guess);
            // Other clients of the same process may have theirs of it.
            let others = process.most - client.most;
            let least = process.used.saturating_sub(large).saturating_sub(others).saturating_sub(WORTH_TELLING);
            Some((client.client, Found { least, most: in_use.get_mut(&client.pid)?.take(client) }))
        });
        Some(found.collect())
    }

    /// What no client accounts for may be any client's, though not of several at once.
    fn found_in_total(&self, sample: &Sample, clients: &[Attached]) -> Option<BTreeMap<ClientId, Found>> {
        let overhead = self.total.filter(|_| sample.steady)?;
        let least = clients.iter().fold(0u64, |sum, client| sum.saturating_add(client.least));
        let mut in_use = Shared { bytes: sample.used.saturating_sub(overhead), least, clients: clients.len() };
        let found = clients.iter().map(|client| {
            let most = in_use.take(client);
            (client.client, Found { least: most.saturating_sub(WORTH_TELLING), most })
        });
        Some(found.collect())
    }

    /// The sizes of contexts, where known.
    pub fn contexts(&self) -> &BTreeMap<ClientId, u64> {
        &self.contexts
    }

    /// The overhead that was reported last.
    pub fn overhead(&self) -> Option<u64> {
        self.overhead
    }

    pub fn basis(&self) -> Basis {
        self.basis
    }

    /// Clients may still reconnect that had memory before this daemon was started: until they have, nothing is known of
    /// what is in use besides, unless NVML measures processes.
    pub fn forget_total(&mut self) {
        self.total = None;
    }
}

/// Bytes that several clients have together. They count once: each client takes what it can have mapped and the others need
/// not have, and the last takes what is left.
#[derive(Debug)]
struct Shared {
    bytes: u64,
    /// The fewest bytes that those can have who are still to take theirs, and how many these are.
    least: u64,
    clients: usize,
}

impl Shared {
    fn take(&mut self, client: &Attached) -> u64 {
        self.least = self.least.saturating_sub(client.least);
        self.clients = self.clients.saturating_sub(1);
        let free = self.bytes.saturating_sub(self.least);
        let taken = if self.clients == 0 { free } else { free.min(client.most) };
        self.bytes -= taken;
        taken
    }
}

/// The processes of clients. One that NVML does not list uses nothing.
fn by_process(processes: &BTreeMap<u32, u64>, clients: &[Attached]) -> BTreeMap<u32, Process> {
    let mut all: BTreeMap<u32, Process> = BTreeMap::new();
    for Attached { client, pid, least, most, adopted, is_new } in clients {
        let used = processes.get(pid).copied().unwrap_or(0);
        let process = all.entry(*pid).or_insert(Process {
            used,
            least: 0,
            most: 0,
            adopted: 0,
            is_new: false,
            clients: 0,
            first: *client,
        });
        process.least = process.least.saturating_add(*least);
        process.most = process.most.saturating_add(*most);
        process.adopted = process.adopted.saturating_add(*adopted);
        process.is_new |= is_new;
        process.clients += 1;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::{GpuId, Uuid};

    const MIB: u64 = 1 << 20;
    const GUESS: u64 = 600 * MIB;

    fn sample(used: u64, processes: &[(u32, u64)]) -> Sample {
        let processes = Some(processes.iter().map(|(pid, mib)| (*pid, mib * MIB)).collect());
        Sample { gpu: GpuId(Uuid([0; 16])), begun: Default::default(), steady: true, used: used * MIB, processes }
    }

    /// At rest.
    fn client(id: u64, mapped: u64) -> Attached {
        moving(id, mapped, mapped)
    }

    fn moving(id: u64, least: u64, most: u64) -> Attached {
        Attached {
            client: ClientId(id),
            pid: id as u32,
            least: least * MIB,
            most: most * MIB,
            adopted: 0,
            is_new: false,
        }
    }

    fn told(accounting: &mut Accounting, sample: &Sample, clients: &[Attached]) -> u64 {
        accounting.sample(sample, clients, GUESS, |_| false).expect("a figure") / MIB
    }

    fn told_in_total(accounting: &mut Accounting, used: u64, clients: &[Attached]) -> u64 {
        let sample = Sample { processes: None, ..sample(used, &[]) };
        accounting.sample(&sample, clients, GUESS, |_| false).expect("a figure") / MIB
    }

    #[test]
    fn other_programs_and_contexts_count() {
        let mut accounting = Accounting::default();
        let told = told(&mut accounting, &sample(9000, &[(1, 4500), (7, 3000)]), &[client(1, 4000)]);
        assert_eq!(told, 5000, "500 of context, 3000 of process 7, 1500 of no process");
        assert_eq!(accounting.basis(), Basis::Processes);
    }

    #[test]
    fn moving_memory_changes_nothing() {
        let mut accounting = Accounting::default();
        told(&mut accounting, &sample(5000, &[(1, 4500)]), &[client(1, 4000)]);
        // It has unmapped 3 GiB, or mapped 2 GiB, and not reported it.
        for (used, process) in [(2000, 1500), (7000, 6500)] {
            let clients = [moving(1, 1000, 6000)];
            assert_eq!(told(&mut accounting, &sample(used, &[(1, process)]), &clients), 1000);
        }
    }

    /// The standstill of two servers that were started at once: a part of each context was taken for the whole, and the
    /// figure was kept, as their memory was never at rest afterwards.
    #[test]
    fn a_context_that_is_being_created_is_not_measured() {
        let mut accounting = Accounting::default();
        let new = |id| Attached { is_new: true, ..client(id, 0) };
        told(&mut accounting, &sample(1040, &[(1, 20), (2, 20)]), &[new(1), new(2)]);
        // Their contexts are complete, and both keep growing.
        let clients = [moving(1, 4000, 4064), moving(2, 5000, 5064)];
        let told = told(&mut accounting, &sample(11_054, &[(1, 4527), (2, 5527)]), &clients);
        assert_eq!(told, 1000 + 2 * 527);
    }

    #[test]
    fn a_wrong_estimate_ends_with_the_next_sample() {
        let mut accounting = Accounting::default();
        told(&mut accounting, &sample(4020, &[(1, 4020)]), &[client(1, 4000)]);
        // The context has grown while memory moves: it cannot be smaller than 527 - 64.
        let told = told(&mut accounting, &sample(5027, &[(1, 5027)]), &[moving(1, 4500, 4564)]);
        assert_eq!(told, 461);
    }

    #[test]
    fn a_context_that_was_never_measured_is_guessed() {
        let mut accounting = Accounting::default();
        assert_eq!(told(&mut accounting, &sample(5000, &[(1, 4500)]), &[moving(1, 0, 4500)]), 1100);
        assert_eq!(told(&mut accounting, &sample(5000, &[(1, 4500)]), &[client(1, 4000)]), 1000);
    }

    #[test]
    fn a_context_larger_than_guessed_counts_before_it_is_complete() {
        let mut accounting = Accounting::default();
        let new = Attached { is_new: true, ..client(1, 0) };
        assert_eq!(told(&mut accounting, &sample(1000, &[(1, 1000)]), &[new]), 398);
    }

    #[test]
    fn processes_that_have_left_or_will_reconnect_are_no_overhead() {
        let mut accounting = Accounting::default();
        let overhead = accounting.sample(&sample(5000, &[(1, 4500)]), &[], GUESS, |_| true);
        assert_eq!(overhead, Some(500 * MIB));
        assert_eq!(told(&mut accounting, &sample(5000, &[(1, 4500)]), &[]), 5000);
    }

    #[test]
    fn a_new_clients_context_is_the_schedulers_to_count() {
        let mut accounting = Accounting::default();
        let new = Attached { is_new: true, ..client(1, 4000) };
        assert_eq!(told(&mut accounting, &sample(5000, &[(1, 4500)]), &[new]), 500);
    }

    #[test]
    fn a_client_that_leaves_leaves_nothing() {
        let mut accounting = Accounting::default();
        told(&mut accounting, &sample(5000, &[(1, 4500)]), &[client(1, 4000)]);
        assert_eq!(told(&mut accounting, &sample(500, &[]), &[]), 500);
    }

    #[test]
    fn without_figures_for_processes_only_sums_are_compared() {
        let mut accounting = Accounting::default();
        assert_eq!(told_in_total(&mut accounting, 6500, &[client(1, 4000), client(2, 1000)]), 1500);
        assert_eq!(told_in_total(&mut accounting, 9000, &[client(1, 4000), moving(2, 1000, 4000)]), 1500);
        // What has left or comes back is the clients'.
        assert_eq!(told_in_total(&mut accounting, 6000, &[moving(1, 0, 4000), moving(2, 0, 4000)]), 1500);
        assert_eq!(told_in_total(&mut accounting, 7000, &[client(1, 4000), client(2, 1000)]), 2000);
        assert_eq!(accounting.basis(), Basis::Total);
    }

    #[test]
    fn what_a_client_has_is_what_its_process_has_less_its_context() {
        let mut accounting = Accounting::default();
        told(&mut accounting, &sample(9000, &[(1, 4500), (2, 1500)]), &[client(1, 4000)]);
        // It reports to have freed 3 GiB, and has freed 1.
        let clients = [moving(1, 1000, 4000), moving(2, 0, 900)];
        let found = accounting.found(&sample(8000, &[(1, 3500), (2, 1500)]), &clients, GUESS).expect("figures");
        assert_eq!((found[&ClientId(1)].least, found[&ClientId(1)].most), (2998 * MIB, 3000 * MIB));
        let second = found[&ClientId(2)];
        assert_eq!((second.least, second.most), (898 * MIB, 1500 * MIB), "its context was never measured");
    }

    #[test]
    fn a_process_that_nvml_does_not_list_has_nothing() {
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
    fn what_a_process_has_counts_once_whatever_its_clients_claim() {
        let mut accounting = Accounting::default();
        let of_one = |id, least, most| Attached { pid: 1, ..moving(id, least, most) };
        told(&mut accounting, &sample(8500, &[(1, 8500)]), &[of_one(1, 8000, 8000)]);
        let clients: Vec<Attached> = (1..=10).map(|id| of_one(id, if id == 1 { 8000 } else { 0 }, 8000)).collect();
        let found = accounting.found(&sample(8500, &[(1, 8500)]), &clients, GUESS).expect("figures");
        assert_eq!(found.values().map(|found| found.most).sum::<u64>(), 8000 * MIB);
    }

    #[test]
    fn what_was_adopted_counts_for_who_has_it_wherever_it_is_shown() {
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
        // What is not there, or the exporter accounts for, was not adopted.
        assert_eq!(found(1000, &[(1, 500), (2, 500)], &[exporter, adopter]).0, 0);
        assert_eq!(found(1300, &[(1, 800), (2, 500)], &[client(1, 300), adopter]).0, 0);
    }

    #[test]
    fn the_overhead_is_kept_where_figures_for_processes_are_missing_for_once() {
        let mut accounting = Accounting::default();
        told(&mut accounting, &sample(9000, &[(1, 4500), (2, 0)]), &[client(1, 4000), client(2, 0)]);
        // The second claims 4 GiB, which are not there.
        let clients = [client(1, 4000), moving(2, 0, 4000)];
        assert_eq!(told_in_total(&mut accounting, 9000, &clients), 5000);
        let unlisted = Sample { processes: None, ..sample(9000, &[]) };
        let found = accounting.found(&unlisted, &clients, GUESS).expect("figures");
        assert_eq!(found[&ClientId(2)].most, 0);
    }

    #[test]
    fn without_figures_for_processes_a_claim_needs_bytes_that_are_in_use() {
        let mut accounting = Accounting::default();
        told_in_total(&mut accounting, 6500, &[client(1, 4000), client(2, 1000)]);
        // The second reports 3 GiB more, which are not there.
        let clients = [client(1, 4000), moving(2, 1000, 4000)];
        let found = accounting.found(&sample(6500, &[]), &clients, GUESS).expect("figures");
        assert_eq!(found[&ClientId(2)].most, 1000 * MIB);
        // Now they are.
        let found = accounting.found(&sample(9500, &[]), &clients, GUESS).expect("figures");
        assert_eq!(found[&ClientId(2)].most, 4000 * MIB);
        let unsteady = Sample { steady: false, ..sample(9500, &[]) };
        assert!(accounting.found(&unsteady, &clients, GUESS).is_none());
    }

    #[test]
    fn history_covers_what_was_on_its_way() {
        let ms = Duration::from_millis;
        let mut history = History::default();
        assert_eq!(history.at(ms(0)), (0, 0));
        history.record(ms(100), (5, 5));
        history.record(ms(200), (5, 9));
        history.record(ms(240), (7, 7));
        assert_eq!(history.at(ms(300)), (7, 7));
        assert_eq!(history.at(ms(289)), (5, 9), "what counted until 240 ms");
        assert_eq!(history.at(ms(120)), (5, 9));
        for i in 0..1000 {
            history.record(ms(1000 + i), (i, 2 * i));
        }
        assert!(history.0.len() <= MANY_CHANGES);
        assert_eq!(history.at(ms(3000)), (999, 1998));
        assert_eq!(history.at(ms(1049)), (0, 1998));
    }

    #[test]
    fn small_changes_do_not_count() {
        let mut accounting = Accounting::default();
        assert_eq!(told(&mut accounting, &sample(500, &[]), &[]), 500);
        assert_eq!(told(&mut accounting, &sample(501, &[]), &[]), 500);
    }
}
