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

use super::counts::Counts;
use super::model::Model;
use crate::bus;
use crate::daemon::usage::{Account, Amounts, HOUR, HoursUsed, Keeper, Query, Tenants, UsageAnswer};
use crate::scheduler::{ClientId, GpuId, Time};
use crate::sys::clock::unix_time;

/// Usage that has not been sent to the recording thread.
#[derive(Debug, Default)]
pub struct Usage {
    keeper: Option<Keeper>,
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

    /// Records a client's usage of a GPU since the last call. `to`: the GPU that the client has moved to,
    /// otherwise `gpu`. Returns the time with the lock, in seconds.
    pub(super) fn record(
        &mut self,
        model: &Model,
        counts: &mut Counts,
        (client, gpu): (ClientId, GpuId),
        to: GpuId,
        now: Time,
    ) -> f64 {
        let turns = model.machine.turns(client, to, now).unwrap_or_default();
        let Some(amounts) = counts.take_used(client, gpu, &turns, now) else { return 0.0 };
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
