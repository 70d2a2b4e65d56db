//! Memory accounting of one GPU: reconciles clients' reports with NVML's measurements.
//!
//! A sample and a client's reports are taken at different times, so the bytes that the client had mapped at the time of the
//! sample are only known as an interval, from [`Attached::least`] to [`Attached::most`], and so are quantities derived from
//! them. An estimate is kept while it lies in the newest interval, and otherwise clamped to it, so that a wrong estimate lasts
//! at most until the next sample, even while memory moves.
//!
//! - *Context*: memory of a client's process beyond its mapped memory. It is measured only once it is complete: the
//!   driver takes seconds to create a context, and a sample taken in that time shows only a part.
//! - *Overhead*: memory in use beyond all clients' mapped memory: contexts, programs without nvshare, the driver.
//! - *Others*: the overhead without contexts. Without figures for processes, contexts count with their assumed size.
//! - *Found*: bounds on a client's mapped memory, independent of the client's reports. The scheduler accepts no report outside
//!   them.
//! - *Adopted*: shared memory that its exporter has freed, and that counts for another client now. NVML may show it for the
//!   exporter, for no process, or for the adopter. It counts for the adopter if NVML shows it anywhere.
//!
//! `history` keeps the intervals, [`Basis`] is the kind of figures that NVML has, `mapped` bounds each client's memory.

mod basis;
mod history;
mod mapped;

use std::collections::BTreeMap;

use super::nvml::Sample;
use crate::scheduler::ClientId;
pub use basis::Basis;
pub use history::History;

/// Smaller differences are not reported to the scheduler: the granularity of GPU memory.
const SIGNIFICANT: u64 = 2 << 20;

/// The estimates for one GPU, in bytes.
#[derive(Debug, Default)]
pub struct Accounting {
    contexts: BTreeMap<ClientId, u64>,
    /// The overhead last reported to the scheduler.
    overhead: Option<u64>,
    /// The estimate of the overhead without figures for processes, before small changes are suppressed.
    total: Option<u64>,
    /// Memory of programs that are not clients.
    others: u64,
    basis: Basis,
    /// Adopted memory of each process's clients that the last sample did not show for that process.
    adopted: BTreeMap<u32, u64>,
}

/// A client on the GPU that was sampled.
#[derive(Debug, Clone, Copy)]
pub struct Attached {
    pub client: ClientId,
    pub pid: u32,
    /// Bounds on the bytes that the client had mapped at the time of the sample.
    pub least: u64,
    pub most: u64,
    /// Adopted bytes among the mapped bytes.
    pub adopted: u64,
    /// The client's context may have been incomplete at the time of the sample. The scheduler reserves memory for it.
    pub is_new: bool,
}

/// The figures of a client's process.
#[derive(Debug, Clone, Copy)]
struct Process {
    used: u64,
    least: u64,
    most: u64,
    /// Bytes adopted by the process's clients.
    adopted: u64,
    /// One of the process's clients is new.
    is_new: bool,
    clients: usize,
    /// The client under which the context is recorded, since a process may have several clients.
    first: ClientId,
}

impl Accounting {
    /// Processes a sample. Returns the overhead, with small changes suppressed; `None` if it is still unknown.
    ///
    /// `guess` is the size assumed for a context that was not measured. `is_own` tells whether a process that is not a client
    /// was one, or may be about to reconnect. Its memory is not overhead.
    pub fn sample(
        &mut self,
        sample: &Sample,
        clients: &[Attached],
        guess: u64,
        is_own: impl Fn(u32) -> bool,
    ) -> Option<u64> {
        self.contexts.retain(|client, _| clients.iter().any(|c| c.client == *client));
        self.adopted.clear();
        // An empty list does not show whether NVML would list processes.
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
                let bytes = self.sample_total(sample.used, clients);
                let contexts = clients.iter().filter(|client| !client.is_new).count() as u64;
                self.others = bytes.saturating_sub(guess.saturating_mul(contexts));
                bytes
            }
        };
        if self.overhead.is_none_or(|told| told.abs_diff(bytes) > SIGNIFICANT) {
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
        self.others = others;
        let contexts = of_clients.values().map(|process| {
            // Bounds on mapped memory are lowered by this margin, which must not accumulate in the context.
            let most = process.most.saturating_add(SIGNIFICANT);
            let range = (process.used.saturating_sub(most), process.used.saturating_sub(process.least));
            if process.is_new {
                // The scheduler itself reserves the guess.
                return range.0.saturating_sub(guess);
            }
            let known = self.contexts.get(&process.first);
            // Managed memory is reported as mapped before it reaches the GPU. Such a sample does not show the context.
            if (1..process.least).contains(&process.used) {
                return known.copied().unwrap_or(guess);
            }
            match known {
                // The context is known to the byte only while no memory moves. Exactness matters, since a limit counts each
                // byte.
                _ if process.most == process.least => {
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

    /// Finds adopted memory that NVML does not show for the adopter's process: first among clients' processes, in bytes that no
    /// client reports, then among `others`, the bytes in use by no client's process. Returns the rest of `others`.
    fn find_adopted(&mut self, processes: &BTreeMap<u32, Process>, guess: u64, others: u64) -> u64 {
        let mapped = |process: &Process| {
            process.used.saturating_sub(self.contexts.get(&process.first).copied().unwrap_or(guess))
        };
        let unclaimed = processes.values().map(|process| mapped(process).saturating_sub(process.least));
        let (mut unclaimed, mut others) = (unclaimed.fold(0u64, u64::saturating_add), others);
        let mut adopted = BTreeMap::new();
        for (pid, process) in processes.iter().filter(|(_, process)| process.adopted > 0) {
            let missing = process.most.saturating_sub(mapped(process)).min(process.adopted);
            // Bytes of the adopter's own process beyond its reports already count as mapped there.
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
        // Initially, clients that had memory before this daemon started are trusted.
        let bytes = self.total.map_or(range.0, |before| before.clamp(range.0, range.1));
        *self.total.insert(bytes)
    }

    /// The sizes of measured contexts.
    pub fn contexts(&self) -> &BTreeMap<ClientId, u64> {
        &self.contexts
    }

    /// The overhead last reported to the scheduler.
    pub fn overhead(&self) -> Option<u64> {
        self.overhead
    }

    /// Memory of programs that are not clients, at the last sample.
    pub fn others(&self) -> u64 {
        self.others
    }

    pub fn basis(&self) -> Basis {
        self.basis
    }

    /// Discards the estimate made without figures for processes. Clients that had memory before this daemon started may still
    /// reconnect, and until then the overhead is unknown.
    pub fn forget_total(&mut self) {
        self.total = None;
    }
}

/// Groups clients by process. A process that NVML does not list uses no memory.
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
mod tests;
