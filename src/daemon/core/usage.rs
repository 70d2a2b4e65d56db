//! Usage of tenants, units and containers, for the records that [`crate::daemon::usage`] writes to
//! disk. Usage is the growth of clients' counters since the last record, and the product of the
//! bytes in use and the time.
//!
//! At least once a minute, and when the daemon ends, the loop passes the sums to the recording
//! thread. The minutes begin at full minutes of the clock, so no minute belongs to two hours. A
//! tenant chooses the names of its units, so the number of rows that a tenant can add in an hour is
//! bounded. Further units share one row (`Accounts`).

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, SystemTime};

use tokio::sync::oneshot;

use super::state::Core;
use crate::bus;
use crate::daemon::metrics::snapshot::Counted;
use crate::daemon::usage::{Account, Amounts, HOUR, HoursUsed, Keeper, Query, Tenants, UsageAnswer};
use crate::scheduler::{ClientId, GpuId, Time};
use crate::sys::clock;
use nvshare_wire::client::GpuKind;

/// The state of recording for one client on one GPU: the counters already recorded, and the
/// client's present bytes.
#[derive(Debug, Clone, Default)]
pub struct Used {
    recorded: Counted,
    /// Bytes on the GPU and bytes in host memory. Both numbers have been constant since `since`.
    resident: u64,
    swapped: u64,
    since: Time,
    /// Products of bytes and time that are not recorded yet.
    resident_byte_seconds: f64,
    swapped_byte_seconds: f64,
}

impl Used {
    /// Sets the client's bytes on the GPU and in host memory, from `now` on.
    pub fn has(&mut self, now: Time, resident: u64, swapped: u64) {
        let seconds = now.saturating_sub(self.since).as_secs_f64();
        self.resident_byte_seconds += self.resident as f64 * seconds;
        self.swapped_byte_seconds += self.swapped as f64 * seconds;
        (self.resident, self.swapped, self.since) = (resident, swapped, self.since.max(now));
    }

    /// Returns the usage since the last call of `take`.
    fn take(&mut self, now: Time, counted: Counted) -> Amounts {
        self.has(now, self.resident, self.swapped);
        let before = std::mem::replace(&mut self.recorded, counted.clone());
        let seconds = |after: Duration, before: Duration| after.saturating_sub(before).as_secs_f64();
        let number = |after: u64, before: u64| after.saturating_sub(before) as f64;
        Amounts {
            lock_seconds: seconds(counted.lock_time, before.lock_time),
            grants: number(counted.grants, before.grants),
            wait_seconds: seconds(counted.wait_time, before.wait_time),
            resident_byte_seconds: std::mem::take(&mut self.resident_byte_seconds),
            swapped_byte_seconds: std::mem::take(&mut self.swapped_byte_seconds),
            swapped_in_bytes: number(counted.swapped_in, before.swapped_in),
            swapped_out_bytes: number(counted.swapped_out, before.swapped_out),
        }
    }
}

/// Usage that has not been sent to the recording thread.
#[derive(Debug, Default)]
pub struct Usage {
    keeper: Option<Keeper>,
    pending: Tenants,
    /// Start of the pending usage, in seconds since 1970.
    since: u64,
}

impl Usage {
    /// Changes how long records are kept.
    pub fn keep(&self, keep: Duration) {
        if let Some(keeper) = &self.keeper {
            keeper.keep(keep);
        }
    }

    /// Sends pending usage to the recording thread. The usage counts for the hour in which the pending
    /// period began. A period lasts at most a minute, and ends no later than its hour.
    fn give(&mut self, hours: BTreeMap<String, f64>) {
        let (since, now) = (std::mem::replace(&mut self.since, unix_time()), std::mem::take(&mut self.pending));
        let hour = i64::try_from(since).unwrap_or(0).div_euclid(HOUR) * HOUR;
        if let Some(keeper) = self.keeper.as_ref().filter(|_| !now.is_empty() || !hours.is_empty()) {
            keeper.add(hour, now, hours);
        }
    }
}

pub(super) fn unix_time() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl Core {
    /// Starts to record the usage of programs in this directory. The receiver yields the hours saved there,
    /// for [`load_hours`](Self::load_hours).
    pub fn keep_usage(&mut self, directory: &Path) -> oneshot::Receiver<Result<HoursUsed, String>> {
        let keeper = Keeper::start(directory, self.config.keep_usage);
        let (reply, saved) = oneshot::channel();
        if let Some(keeper) = &keeper {
            keeper.read_hours(reply);
        }
        self.usage = Usage { keeper, pending: BTreeMap::new(), since: unix_time() };
        saved
    }

    /// Records a client's present bytes on a GPU and in host memory.
    pub(super) fn note_bytes(&mut self, client: ClientId, gpu: GpuId, now: Time) {
        let Some((resident, swapped)) = self.machine.resident_and_swapped(client, gpu) else { return };
        if let Some(counts) = self.counts.of(client, gpu) {
            counts.used.has(now, resident, swapped);
        }
    }

    /// Records a client's usage of a GPU since the last call. `to`: the GPU that the client has
    /// moved to, otherwise `gpu`.
    pub(super) fn record_usage_of(&mut self, client: ClientId, gpu: GpuId, to: GpuId, now: Time) {
        let turns = self.machine.turns(client, to, now).unwrap_or_default();
        let Some(counts) = self.counts.of(client, gpu) else { return };
        let mut counted = counts.counted.clone();
        counted.lock_time = counted.lock_time.saturating_add(counts.lock_time(&turns));
        let amounts = counts.used.take(now, counted);
        self.count_hours(client, amounts.lock_seconds);
        let is_recorded = amounts != Amounts::default() && self.usage.keeper.is_some();
        let Some(entry) = self.clients.get(&client).filter(|_| is_recorded) else { return };
        let label =
            |gpu| self.gpus.get(&gpu).map_or_else(|| bus::gpu_name(GpuKind::Gpu, gpu), |known| known.label(gpu));
        let identity = &entry.identity;
        let account = Account {
            gpu: label(gpu),
            unit: identity.counted_unit().into(),
            container: identity.counted_container().into(),
        };
        self.usage.pending.entry(identity.tenant.to_string()).or_default().add(account, &amounts);
    }

    /// Records the usage of a client on all its GPUs. Called before the client is removed.
    pub(super) fn record_usage_of_all(&mut self, client: ClientId, now: Time) {
        for gpu in self.counts.gpus_of(client) {
            self.record_usage_of(client, gpu, gpu, now);
        }
    }

    /// Sends the usage of all clients up to now to the recording thread.
    pub fn record_usage(&mut self) {
        let now = clock::now();
        let all: Vec<(ClientId, GpuId)> = self.counts.clients().map(|(client, gpu, _)| (client, gpu)).collect();
        for (client, gpu) in all {
            self.record_usage_of(client, gpu, gpu, now);
        }
        let hours = self.hours.take_pending();
        self.usage.give(hours);
    }

    /// Saves the usage of all clients up to now on disk.
    pub fn save_usage(&mut self) {
        self.record_usage();
        if let Some(keeper) = &self.usage.keeper {
            keeper.save();
        }
    }

    /// Saves usage before the daemon exits. Waits for the recording thread for at most `patience`.
    pub fn finish_usage(&mut self, patience: Duration) {
        self.save_usage();
        if let Some(keeper) = self.usage.keeper.take() {
            keeper.finish(patience);
        }
    }

    /// Answers a query about usage, up to the present moment.
    pub fn read_usage(&mut self, query: Query, reply: oneshot::Sender<UsageAnswer>) {
        self.record_usage();
        match &self.usage.keeper {
            Some(keeper) => keeper.read(query, reply),
            None => {
                let why = if cfg!(feature = "accounting") {
                    "the scheduler has no directory for its state (StateDirectory=)"
                } else {
                    "the scheduler was built without accounting"
                };
                let _ = reply.send(Err(why.into()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Duration::from_secs(seconds)
    }

    #[test]
    fn byte_seconds_integrate_bytes_over_time() {
        let mut used = Used::default();
        used.has(at(100), 10, 1);
        used.has(at(103), 20, 0);
        used.has(at(103), 5, 7);
        let first = used.take(at(104), Counted::default());
        assert_eq!((first.resident_byte_seconds, first.swapped_byte_seconds), (35.0, 10.0));
        used.has(at(106), 0, 0); // the client ends
        let then = used.take(at(200), Counted::default());
        assert_eq!((then.resident_byte_seconds, then.swapped_byte_seconds), (10.0, 14.0));
        assert_eq!(used.take(at(300), Counted::default()), Amounts::default());
    }

    #[test]
    fn each_counter_increase_is_recorded_once() {
        let mut used = Used::default();
        let counted = |lock: u64, waits: u64, moved: u64| Counted {
            lock_time: at(lock),
            wait_time: at(waits),
            grants: lock,
            swapped_in: moved,
            swapped_out: 2 * moved,
            hand_overs: 9,
            ..Counted::default()
        };
        let first = used.take(at(1), counted(3, 4, 5));
        let expected = Amounts {
            lock_seconds: 3.0,
            grants: 3.0,
            wait_seconds: 4.0,
            swapped_in_bytes: 5.0,
            swapped_out_bytes: 10.0,
            ..Amounts::default()
        };
        assert_eq!(first, expected);
        assert_eq!(used.take(at(2), counted(3, 4, 5)), Amounts::default());
        let more = Amounts { wait_seconds: 2.0, ..Amounts::default() };
        assert_eq!(used.take(at(3), counted(3, 6, 5)), more);
    }
}
