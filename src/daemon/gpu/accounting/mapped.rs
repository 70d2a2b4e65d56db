//! Bounds on each client's mapped memory, derived from NVML's figures.

use std::collections::BTreeMap;

use super::{Accounting, Attached, Basis, Process, SIGNIFICANT, by_process};
use crate::daemon::gpu::nvml::Sample;
use crate::scheduler::{ClientId, Found};

impl Accounting {
    /// Bounds on each client's mapped bytes. `None` if the sample is not sufficient to derive them.
    pub fn found(&self, sample: &Sample, clients: &[Attached], guess: u64) -> Option<BTreeMap<ClientId, Found>> {
        let processes = sample.processes.as_ref().filter(|_| self.basis == Basis::Processes);
        let Some(processes) = processes else { return self.found_in_total(sample, clients) };
        let of_clients = by_process(processes, clients);
        // A context that was not measured may have any size up to the guess, or may not exist yet.
        let context = |process: &Process| self.contexts.get(&process.first).copied();
        let shared = |(pid, process): (&u32, &Process)| {
            let bytes = process.used.saturating_sub(context(process).unwrap_or(0));
            let bytes = bytes.saturating_add(self.adopted.get(pid).copied().unwrap_or(0));
            (*pid, Shared { bytes, least: process.least, clients: process.clients })
        };
        let mut in_use: BTreeMap<u32, Shared> = of_clients.iter().map(shared).collect();
        let mut managed = self.unlisted.map_or(0, |unlisted| unlisted.managed);
        let found = clients.iter().filter_map(|client| {
            let process = of_clients.get(&client.pid)?;
            let large = context(process).unwrap_or(guess);
            // Other clients of the same process may have mapped up to `others` of these bytes.
            let others = process.most - client.most;
            let least = process.used.saturating_sub(large).saturating_sub(others).saturating_sub(SIGNIFICANT);
            // Each managed byte counts for one client, too.
            let of_client = managed.min(client.managed_mapped);
            managed -= of_client;
            let most = in_use.get_mut(&client.pid)?.take(client).saturating_add(of_client);
            Some((client.client, Found { least, most }))
        });
        Some(found.collect())
    }

    /// Bounds from the figures for the whole GPU. Bytes that no client reports may belong to any
    /// client, but to only one client.
    fn found_in_total(&self, sample: &Sample, clients: &[Attached]) -> Option<BTreeMap<ClientId, Found>> {
        let overhead = self.total.filter(|_| sample.steady)?;
        let least = clients.iter().fold(0u64, |sum, client| sum.saturating_add(client.least));
        // Managed memory that is not mapped may be in use, and belongs to any client.
        let margin = sum_of(clients, |client| client.unmapped).saturating_add(SIGNIFICANT);
        let mut in_use = Shared { bytes: sample.used.saturating_sub(overhead), least, clients: clients.len() };
        let found = clients.iter().map(|client| {
            let most = in_use.take(client);
            (client.client, Found { least: most.saturating_sub(margin), most })
        });
        Some(found.collect())
    }

    /// The bytes in use that the driver gives to plain allocations of `cuMemAlloc`: managed memory that clients
    /// have evicted. Without figures for processes, an upper bound.
    pub fn evicted(&self, sample: &Sample, clients: &[Attached]) -> u64 {
        let in_use = match self.basis {
            Basis::Processes => self.unlisted.map_or(0, |unlisted| unlisted.managed),
            Basis::Total | Basis::Reports => {
                let least = sum_of(clients, |client| client.least);
                sample.used.saturating_sub(self.total.unwrap_or(sample.used)).saturating_sub(least)
            }
        };
        let unmapped = in_use.saturating_sub(sum_of(clients, |client| client.managed_mapped));
        unmapped.min(sum_of(clients, |client| client.unmapped))
    }
}

fn sum_of(clients: &[Attached], bytes: impl Fn(&Attached) -> u64) -> u64 {
    clients.iter().map(bytes).fold(0, u64::saturating_add)
}

/// Bytes of several clients. Each byte counts only once. One after the other, each client takes up
/// to its `most` bytes, but leaves the `least` bytes of the later clients. The last client takes
/// the rest.
#[derive(Debug)]
struct Shared {
    bytes: u64,
    /// The sum of `least` over the clients that have not taken their bytes yet, and the number of
    /// these clients.
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
