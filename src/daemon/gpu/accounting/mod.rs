//! Memory accounting of one GPU: reconciles clients' reports with NVML's measurements.
//!
//! A sample and a client's reports are taken at different times. So the bytes that the client had
//! mapped at the time of the sample are known only as an interval, from [`Attached::least`] to
//! [`Attached::most`]. Quantities derived from these bytes are intervals too. An estimate is kept while
//! it lies in the newest interval, and is otherwise clamped to that interval. So a wrong estimate lasts
//! at most until the next sample, even while memory moves. Only while clients have managed memory can
//! it last longer.
//!
//! - *Context*: memory of a client's process beyond its mapped memory. The driver takes seconds to
//!   create a context, and a sample from that time shows only a part. So a context is measured only
//!   after its creation.
//! - *Overhead*: memory in use beyond all clients' mapped memory: contexts, programs without nvshare,
//!   the driver.
//! - *Others*: the overhead without contexts. Without figures for processes, contexts count with their
//!   assumed size.
//! - *Managed*: clients' managed memory that NVML counts as in use. NVML does not show it under any
//!   process, and the driver keeps it after it was prefetched to the host, until plain allocations
//!   need the pages (driver 580). So it is unknown how much of a client's managed memory is in use.
//! - *Found*: bounds on a client's mapped memory, independent of the client's reports. The scheduler
//!   accepts only reports within these bounds.
//! - *Adopted*: shared memory that its exporter has freed, and that now counts for another client. NVML
//!   may show this memory under the exporter, the adopter, or no process. In each case, the memory
//!   counts for the adopter.
//!
//! Managed memory widens the intervals. Invariants:
//!
//! - Of the bytes that a client has mapped, its managed bytes may be missing from NVML's figure for
//!   its process. So [`Attached::least`] excludes them.
//! - With figures for processes, other programs' processes are measured exactly. The *unlisted*
//!   bytes, which no process uses, are the managed bytes and the rest: memory of the driver, and
//!   managed memory of other programs. The rest is nearly constant and starts at the memory that the
//!   driver reserves. It changes only if the managed bytes that clients have cannot explain the unlisted
//!   bytes (`unlisted`). The unlisted bytes are an interval too, because NVML is asked for the memory in
//!   use and for the processes one after the other: clients' memory may move in between, and a new context
//!   is listed late.
//! - With figures for the whole GPU, the clients' memory in use exceeds their mapped memory by no more
//!   than the managed memory that they have not mapped.
//! - A claim of managed bytes counts only up to the highest charge of the client. If the process is older
//!   than the daemon, its first claim counts too. So a false claim can hide unlisted memory only as far as
//!   that memory grows, and only as many bytes as the scheduler let the client map. Clients cannot hide
//!   memory that NVML shows under a process.
//! - Managed bytes in use that no client has mapped are *evicted*. The driver gives them to plain
//!   allocations of all programs. Restores of checkpoints do not count on them, because they were never
//!   measured beside them.
//!
//! `history` records the intervals, and `claims` what clients report. [`Basis`] tells which figures NVML provides. `mapped` derives the
//! bounds on each client's memory.

mod basis;
mod claims;
mod history;
mod mapped;
mod unlisted;

use std::collections::BTreeMap;

use self::unlisted::Unlisted;
use super::nvml::Sample;
use crate::scheduler::ClientId;
pub use basis::Basis;
pub use claims::{Claims, Departed};
pub use history::{Extent, History};

/// The granularity of GPU memory, in bytes. Smaller differences are not reported to the scheduler.
const SIGNIFICANT: u64 = 2 << 20;

/// The estimates for one GPU, in bytes.
#[derive(Debug, Default)]
pub struct Accounting {
    contexts: BTreeMap<ClientId, u64>,
    /// The overhead last reported to the scheduler.
    overhead: Option<u64>,
    /// The estimate of the overhead from figures for the whole GPU. Unlike `overhead`, it also follows
    /// small changes.
    total: Option<u64>,
    /// Memory of programs that are not clients.
    others: u64,
    /// The memory that figures for processes do not list.
    unlisted: Option<Unlisted>,
    basis: Basis,
    /// Bytes that each process's clients have adopted. The last sample did not show these bytes under
    /// the process.
    adopted: BTreeMap<u32, u64>,
}

/// A client on the GPU that was sampled.
#[derive(Debug, Clone, Copy)]
pub struct Attached {
    pub client: ClientId,
    pub pid: u32,
    /// Bounds on the bytes that the client had mapped at the time of the sample. `least` does not
    /// include managed bytes.
    pub least: u64,
    pub most: u64,
    /// The most bytes of managed memory that the client had, wherever they were.
    pub managed: u64,
    /// The most managed bytes that the client had mapped, and that it had but not mapped.
    pub managed_mapped: u64,
    pub unmapped: u64,
    /// Adopted bytes among the mapped bytes.
    pub adopted: u64,
    /// The client's context may have been incomplete at the time of the sample. The scheduler reserves
    /// memory for the context.
    pub is_new: bool,
}

/// The figures of a client's process.
#[derive(Debug, Clone, Copy, Default)]
struct Process {
    used: u64,
    least: u64,
    most: u64,
    managed_mapped: u64,
    /// Bytes adopted by the process's clients.
    adopted: u64,
    /// At least one of the process's clients is new.
    is_new: bool,
    clients: usize,
    /// The client under which the context is recorded. A process may have several clients but has one
    /// context.
    first: ClientId,
}

impl Accounting {
    /// Processes a sample. Returns the overhead, with small changes suppressed. `None` if the overhead is
    /// still unknown.
    ///
    /// `guess`: the size assumed for a context that was not measured. `is_own(pid)` is true for a process
    /// that is not a client, but was one or may be about to reconnect. The memory of such a process does
    /// not count as overhead. `absent`: the most managed bytes that such processes may have.
    pub fn sample(
        &mut self,
        sample: &Sample,
        clients: &[Attached],
        guess: u64,
        absent: u64,
        is_own: impl Fn(u32) -> bool,
    ) -> Option<u64> {
        self.contexts.retain(|client, _| clients.iter().any(|c| c.client == *client));
        self.adopted.clear();
        // An empty list does not prove that NVML can list processes.
        let lists = |processes: &&BTreeMap<u32, u64>| !processes.is_empty() || self.basis == Basis::Processes;
        let bytes = match sample.processes.as_ref().filter(lists) {
            Some(processes) => {
                self.basis = Basis::Processes;
                self.total = None;
                self.sample_processes(sample, processes, clients, guess, absent, is_own)
            }
            None => {
                if self.basis == Basis::Processes {
                    self.total = self.overhead; // the better estimate, from figures for processes
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
        sample: &Sample,
        processes: &BTreeMap<u32, u64>,
        clients: &[Attached],
        guess: u64,
        absent: u64,
        is_own: impl Fn(u32) -> bool,
    ) -> u64 {
        let of_clients = by_process(processes, clients);
        let is_client = |pid: u32| of_clients.contains_key(&pid);
        let sum = |bytes: u64, (_, more): (&u32, &u64)| bytes.saturating_add(*more);
        let (own, of_others): (Vec<_>, Vec<_>) =
            processes.iter().partition(|(pid, _)| is_client(**pid) || is_own(**pid));
        let others = sample.used.saturating_sub(own.into_iter().fold(0, sum));
        let others = self.find_adopted(&of_clients, guess, others);
        let listed = of_others.into_iter().fold(sample.graphics, sum).min(others);
        let managed = clients.iter().fold(absent, |sum, client| sum.saturating_add(client.managed));
        // Never more than NVML shows under the process, and for a new context, what the scheduler sets aside:
        // a client cannot hide other programs' memory by moving its own.
        let moving = |process: &Process| {
            let context = if process.is_new { guess } else { 0 };
            let moved = process.most.saturating_sub(process.managed_mapped).saturating_sub(process.least);
            moved.min(process.used).saturating_add(context)
        };
        let moving = match self.unlisted {
            Some(_) => of_clients.values().map(moving).fold(0, u64::saturating_add),
            None => 0, // there is no earlier estimate to keep
        };
        let unlisted = self.unlisted.get_or_insert_with(|| Unlisted::new(sample.begun, sample.reserved));
        unlisted.divide(sample.begun, others - listed, moving, managed);
        let others = listed + unlisted.rest;
        self.others = others;
        let contexts = of_clients.values().map(|process| {
            // `found` lowers the bounds on mapped memory by `SIGNIFICANT`. Adding this margin here
            // keeps it from increasing the measured context.
            let most = process.most.saturating_add(SIGNIFICANT);
            let range = (process.used.saturating_sub(most), process.used.saturating_sub(process.least));
            if process.is_new {
                // The scheduler itself reserves the guessed size.
                return range.0.saturating_sub(guess);
            }
            let known = self.contexts.get(&process.first);
            // Its reports of memory that is not managed are false. The sample then does not show the context's
            // size.
            if (1..process.least).contains(&process.used) {
                return known.copied().unwrap_or(guess);
            }
            match known {
                // The context's size is known to the byte only while no memory moves. The size must be exact, because
                // limits count each byte.
                _ if process.most == process.least => {
                    self.contexts.insert(process.first, range.1);
                    range.1
                }
                None if process.managed_mapped == 0 => guess.clamp(range.0, range.1),
                // While managed memory of a process is mapped, there is no exact size.
                before => {
                    let bytes = before.copied().unwrap_or(guess).clamp(range.0, range.1);
                    self.contexts.insert(process.first, bytes);
                    bytes
                }
            }
        });
        others.saturating_add(contexts.fold(0, u64::saturating_add))
    }

    /// Finds adopted memory that NVML does not show under the adopter's process. Looks first among
    /// bytes of clients' processes that no client reports, and then in `others`: bytes that no
    /// client's process uses. Returns the rest of `others`.
    fn find_adopted(&mut self, processes: &BTreeMap<u32, Process>, guess: u64, others: u64) -> u64 {
        let mapped = |process: &Process| {
            process.used.saturating_sub(self.contexts.get(&process.first).copied().unwrap_or(guess))
        };
        let unclaimed = processes.values().map(|process| mapped(process).saturating_sub(process.least));
        let (mut unclaimed, mut others) = (unclaimed.fold(0u64, u64::saturating_add), others);
        let mut adopted = BTreeMap::new();
        for (pid, process) in processes.iter().filter(|(_, process)| process.adopted > 0) {
            let plain = process.most.saturating_sub(process.managed_mapped);
            let missing = plain.saturating_sub(mapped(process)).min(process.adopted);
            // Unreported bytes of the adopter's own process already count as mapped for the adopter.
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
        let most = clients.iter().fold(0u64, |sum, c| sum.saturating_add(c.most).saturating_add(c.unmapped));
        let least = clients.iter().fold(0u64, |sum, c| sum.saturating_add(c.least));
        let range = (used.saturating_sub(most), used.saturating_sub(least));
        // In the first sample, memory in use counts as memory of the clients, up to their upper
        // bounds. Clients may have had this memory before the daemon started.
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

    /// Discards the estimate from figures for the whole GPU. Clients of an earlier daemon may still
    /// reconnect, and the overhead is unknown until then.
    pub fn forget_total(&mut self) {
        self.total = None;
    }

    /// Discards the estimates that depend on managed memory, because a client of an earlier daemon has
    /// reported managed memory. Until now, that memory counted as another program's.
    pub fn forget(&mut self) {
        (self.total, self.unlisted) = (None, None);
    }
}

/// Groups clients by process. A process that NVML does not list uses no GPU memory.
fn by_process(processes: &BTreeMap<u32, u64>, clients: &[Attached]) -> BTreeMap<u32, Process> {
    let mut all: BTreeMap<u32, Process> = BTreeMap::new();
    for Attached { client, pid, least, most, managed_mapped, adopted, is_new, .. } in clients {
        let used = processes.get(pid).copied().unwrap_or(0);
        let process = all.entry(*pid).or_insert(Process { used, first: *client, ..Process::default() });
        process.least = process.least.saturating_add(*least);
        process.most = process.most.saturating_add(*most);
        process.managed_mapped = process.managed_mapped.saturating_add(*managed_mapped);
        process.adopted = process.adopted.saturating_add(*adopted);
        process.is_new |= is_new;
        process.clients += 1;
    }
    all
}

#[cfg(test)]
mod tests;
