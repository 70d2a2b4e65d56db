//! Clients' claims of managed memory. NVML shows managed memory under no process, so the claims of a
//! client count only up to the most memory that the scheduler has let it have.

use std::collections::BTreeMap;

use super::Extent;
use crate::daemon::transport::session::Managed;
use crate::scheduler::{GpuId, Time};

/// A client's claims of managed memory on one GPU.
#[derive(Debug, Clone, Copy)]
pub struct Claims {
    newest: Managed,
    /// The most bytes that count: the client's highest charge, or what the process had before the client
    /// attached the GPU.
    most: u64,
    has_reported: bool,
}

impl Claims {
    /// The claims of a client that attaches a GPU. The process may already have `before` bytes there.
    pub fn new(before: u64) -> Self {
        Self { newest: Managed { bytes: before, mapped: 0 }, most: before, has_reported: false }
    }

    /// Records a report.
    pub fn report(&mut self, managed: Managed) {
        self.newest = managed;
        if !std::mem::replace(&mut self.has_reported, true) {
            // The process had no more before the client attached the GPU.
            self.most = self.most.min(managed.bytes);
        }
    }

    /// Records that `bytes` of the GPU are charged to the client.
    pub fn charged(&mut self, bytes: u64) {
        self.most = self.most.max(bytes);
    }

    /// The claimed bytes that count.
    pub fn believed(&self) -> u64 {
        self.newest.bytes.min(self.most)
    }

    /// The claimed bytes that do not count.
    pub fn disbelieved(&self) -> u64 {
        self.newest.bytes - self.believed()
    }

    /// Bounds on the memory of a client that has from `least` to `most` bytes mapped, and reports `mapped`
    /// bytes. Any bytes beyond the report may be managed memory, and any that leave may be.
    pub fn extent(&self, (least, most): (u64, u64), mapped: u64) -> Extent {
        let managed = self.believed();
        let reported = self.newest.mapped.min(mapped).min(managed);
        let staying = reported.saturating_sub(mapped.saturating_sub(least));
        Extent {
            least: least.saturating_sub(reported),
            most,
            managed,
            managed_mapped: managed.min(reported.saturating_add(most.saturating_sub(mapped))),
            unmapped: managed - staying,
        }
    }
}

/// Processes whose clients have disconnected. The driver frees their memory soon afterwards.
#[derive(Debug, Default)]
pub struct Departed {
    processes: BTreeMap<u32, (Time, BTreeMap<GpuId, u64>)>,
}

impl Departed {
    /// Adds a process. `managed`: the bytes of managed memory that its client may have on each GPU.
    pub fn add(&mut self, pid: u32, now: Time, managed: impl Iterator<Item = (GpuId, u64)>) {
        let (left, on_gpus) = self.processes.entry(pid).or_default();
        *left = now;
        for (gpu, bytes) in managed {
            let sum = on_gpus.entry(gpu).or_default();
            *sum = sum.saturating_add(bytes);
        }
    }

    /// The managed memory of a process that has a client again. The memory then counts for the client.
    pub fn take_managed(&mut self, pid: u32, gpu: GpuId) -> u64 {
        self.processes.get_mut(&pid).and_then(|(_, managed)| managed.remove(&gpu)).unwrap_or(0)
    }

    /// The most bytes of managed memory that the processes may have on a GPU.
    pub fn managed(&self, gpu: GpuId) -> u64 {
        let on_gpu = self.processes.values().filter_map(|(_, managed)| managed.get(&gpu));
        on_gpu.fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Drops the processes that left before `time`.
    pub fn forget(&mut self, time: Time) {
        self.processes.retain(|_, (left, _)| *left > time);
    }

    pub fn contains(&self, pid: u32) -> bool {
        self.processes.contains_key(&pid)
    }

    pub fn len(&self) -> usize {
        self.processes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::Uuid;
    use std::time::Duration;

    fn report(bytes: u64, mapped: u64) -> Managed {
        Managed { bytes, mapped }
    }

    #[test]
    fn a_claim_counts_up_to_the_highest_charge() {
        let mut claims = Claims::new(0);
        claims.report(report(u64::MAX, u64::MAX));
        assert_eq!((claims.believed(), claims.disbelieved()), (0, u64::MAX));
        for (charge, counts) in [(7, 7), (3, 7), (9, 9)] {
            claims.charged(charge);
            assert_eq!(claims.believed(), counts);
        }
        claims.report(report(8, 0));
        assert_eq!((claims.believed(), claims.disbelieved()), (8, 0));
    }

    #[test]
    fn the_first_report_states_what_the_process_had_before() {
        let mut claims = Claims::new(100);
        assert_eq!(claims.believed(), 100, "any part of the GPU");
        claims.report(report(36, 0));
        assert_eq!(claims.believed(), 36);
        claims.report(report(90, 0));
        assert_eq!(claims.believed(), 36, "the scheduler has allowed it no more");
    }

    #[test]
    fn moving_bytes_widen_the_bounds() {
        let mut claims = Claims::new(0);
        claims.charged(20);
        claims.report(report(12, 8));
        let extent =
            |least, most, managed_mapped, unmapped| Extent { least, most, managed: 12, managed_mapped, unmapped };
        assert_eq!(claims.extent((10, 10), 10), extent(2, 10, 8, 4));
        assert_eq!(claims.extent((10, 13), 10), extent(2, 13, 11, 4), "3 bytes may arrive");
        assert_eq!(claims.extent((7, 10), 10), extent(0, 10, 8, 7), "3 bytes may leave");
        assert_eq!(claims.extent((0, 20), 10), extent(0, 20, 12, 12));
        // It claims more managed memory than it has mapped.
        assert_eq!(claims.extent((5, 5), 5), extent(0, 5, 5, 7));
    }

    #[test]
    fn managed_memory_of_departed_processes_counts_once() {
        let second = Duration::from_secs;
        let gpu = GpuId(Uuid([0; 16]));
        let mut departed = Departed::default();
        departed.add(1, second(1), [(gpu, 5)].into_iter());
        departed.add(1, second(2), [(gpu, 3)].into_iter());
        departed.add(2, second(2), [(gpu, 1)].into_iter());
        assert_eq!((departed.len(), departed.managed(gpu)), (2, 9), "a process may have two clients");
        assert_eq!((departed.take_managed(1, gpu), departed.take_managed(1, gpu)), (8, 0));
        assert!(departed.contains(1) && departed.managed(gpu) == 1);
        departed.forget(second(2));
        assert_eq!((departed.len(), departed.managed(gpu)), (0, 0));
    }
}
