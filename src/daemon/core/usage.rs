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
use std::time::Duration;

use nvshare_wire::client::GpuKind;
use tokio::sync::oneshot;

use super::counts::{Counted, Counts};
use super::model::Model;
use crate::bus;
use crate::daemon::usage::{Account, Amounts, HOUR, HoursUsed, Keeper, Query, Tenants, UsageAnswer};
use crate::scheduler::{ClientId, GpuId, Time};
use crate::sys::clock::unix_time;

/// The state of recording for one client on one GPU: the counters already recorded, and the
/// client's present bytes.
#[derive(Debug, Default)]
struct Used {
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
    fn has(&mut self, now: Time, resident: u64, swapped: u64) {
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
    /// The state of recording for each client, on each GPU that it uses or has used.
    used: BTreeMap<ClientId, BTreeMap<GpuId, Used>>,
    pending: Tenants,
    /// Start of the pending usage, in seconds since 1970.
    since: u64,
}

impl Usage {
    /// Starts to record the usage of programs in this directory, and keeps records for `keep`. The receiver
    /// yields the hours saved there.
    pub fn start(&mut self, directory: &Path, keep: Duration) -> oneshot::Receiver<Result<HoursUsed, String>> {
        let (reply, saved) = oneshot::channel();
        self.keeper = Keeper::start(directory, keep);
        if let Some(keeper) = &self.keeper {
            keeper.read_hours(reply);
        }
        self.since = unix_time();
        saved
    }

    /// Changes how long records are kept.
    pub fn keep(&self, keep: Duration) {
        if let Some(keeper) = &self.keeper {
            keeper.keep(keep);
        }
    }

    /// Sends pending usage to the recording thread. The usage counts for the hour in which the pending
    /// period began. A period lasts at most a minute, and ends no later than its hour.
    pub fn give(&mut self, hours: BTreeMap<String, f64>) {
        let (since, now) = (std::mem::replace(&mut self.since, unix_time()), std::mem::take(&mut self.pending));
        let hour = i64::try_from(since).unwrap_or(0).div_euclid(HOUR) * HOUR;
        if let Some(keeper) = self.keeper.as_ref().filter(|_| !now.is_empty() || !hours.is_empty()) {
            keeper.add(hour, now, hours);
        }
    }

    /// Records a client's present bytes on a GPU and in host memory.
    pub(super) fn note_bytes(&mut self, model: &Model, client: ClientId, gpu: GpuId, now: Time) {
        let Some((resident, swapped)) = model.machine.resident_and_swapped(client, gpu) else { return };
        self.of(client, gpu).has(now, resident, swapped);
    }

    /// Records that a client has no memory on a GPU any more.
    pub(super) fn note_end(&mut self, client: ClientId, gpu: GpuId, now: Time) {
        self.of(client, gpu).has(now, 0, 0);
    }

    fn of(&mut self, client: ClientId, gpu: GpuId) -> &mut Used {
        self.used.entry(client).or_default().entry(gpu).or_default()
    }

    /// Forgets a client.
    pub(super) fn end(&mut self, client: ClientId) {
        self.used.remove(&client);
    }

    /// Forgets a GPU.
    pub(super) fn forget(&mut self, gpu: GpuId) {
        for gpus in self.used.values_mut() {
            gpus.remove(&gpu);
        }
    }

    /// Records a client's usage of a GPU since the last call. `to`: the GPU that the client has moved to,
    /// otherwise `gpu`. Returns the time with the lock, in seconds.
    pub(super) fn record(
        &mut self,
        model: &Model,
        counts: &Counts,
        (client, gpu): (ClientId, GpuId),
        to: GpuId,
        now: Time,
    ) -> f64 {
        let Some(counts) = counts.of(client, gpu) else { return 0.0 };
        let turns = model.machine.turns(client, to, now).unwrap_or_default();
        let mut counted = counts.counted.clone();
        counted.lock_time = counted.lock_time.saturating_add(counts.lock_time(&turns));
        let amounts = self.of(client, gpu).take(now, counted);
        let is_recorded = amounts != Amounts::default() && self.keeper.is_some();
        if let Some(identity) = model.identity(client).filter(|_| is_recorded) {
            let account = Account {
                gpu: model.label(gpu).unwrap_or_else(|| bus::gpu_name(GpuKind::Gpu, gpu)),
                unit: identity.counted_unit().into(),
                container: identity.counted_container().into(),
            };
            self.pending.entry(identity.tenant.to_string()).or_default().add(account, &amounts);
        }
        amounts.lock_seconds
    }

    /// Saves the recorded usage on disk.
    pub fn save(&self) {
        if let Some(keeper) = &self.keeper {
            keeper.save();
        }
    }

    /// Ends the recording thread. Waits for it for at most `patience`.
    pub fn finish(&mut self, patience: Duration) {
        self.save();
        if let Some(keeper) = self.keeper.take() {
            keeper.finish(patience);
        }
    }

    /// Answers a query about the recorded usage.
    pub fn read(&self, query: Query, reply: oneshot::Sender<UsageAnswer>) {
        match &self.keeper {
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
