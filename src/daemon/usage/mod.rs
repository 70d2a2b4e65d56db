//! Hourly usage of each GPU by tenants, and by their systemd units and containers. D-Bus callers
//! read it by `ListUsage`. The usage is saved in an SQLite database in the directory that systemd
//! provides (`StateDirectory=`).
//!
//! Disks can be slow, so a separate thread reads and writes the records. The scheduling loop sends
//! usage to this thread and never waits. `keeper` is the thread, and `store` is its database.
//! Unsaved usage stays in memory, up to a bound, so a full or broken disk delays nothing else.
//! Without the feature `accounting`, neither exists and usage is not recorded.

#![cfg_attr(not(feature = "accounting"), expect(dead_code))]

#[cfg(feature = "accounting")]
mod keeper;
#[cfg(feature = "accounting")]
mod store;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use tokio::sync::oneshot;
use tracing::warn;

use crate::identity::OTHERS;

/// An hour in seconds.
pub const HOUR: i64 = 3600;
/// A day in seconds.
pub const DAY: i64 = 24 * HOUR;
/// Maximum number of accounts of one tenant in one hour. Usage of further accounts is summed.
pub const MAX_ACCOUNTS: usize = 100;

/// A GPU, and the unit and container that used it. Strings are empty if there is no unit or no
/// container.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Account {
    pub gpu: String,
    pub unit: String,
    pub container: String,
}

impl Account {
    fn others() -> Self {
        Self { unit: OTHERS.into(), ..Self::default() }
    }
}

/// Sums of usage, which never decrease.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Amounts {
    /// Time with the lock.
    pub lock_seconds: f64,
    /// Number of waits that ended with a grant, and their total time.
    pub grants: f64,
    pub wait_seconds: f64,
    /// Products of bytes and time, for bytes on the GPU and bytes in host memory.
    pub resident_byte_seconds: f64,
    pub swapped_byte_seconds: f64,
    /// Bytes copied to the GPU and from it.
    pub swapped_in_bytes: f64,
    pub swapped_out_bytes: f64,
}

impl Amounts {
    fn all_mut(&mut self) -> [&mut f64; 7] {
        [
            &mut self.lock_seconds,
            &mut self.grants,
            &mut self.wait_seconds,
            &mut self.resident_byte_seconds,
            &mut self.swapped_byte_seconds,
            &mut self.swapped_in_bytes,
            &mut self.swapped_out_bytes,
        ]
    }

    fn all(mut self) -> [f64; 7] {
        self.all_mut().map(|amount| *amount)
    }

    pub fn add(&mut self, more: &Self) {
        self.all_mut().into_iter().zip(more.all()).for_each(|(sum, more)| *sum += more);
    }
}

/// The accounts of one tenant: at most [`MAX_ACCOUNTS`], and one account that sums the rest.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Accounts(BTreeMap<Account, Amounts>);

impl Accounts {
    pub fn add(&mut self, account: Account, amounts: &Amounts) {
        let is_room = self.0.len() < MAX_ACCOUNTS || self.0.contains_key(&account);
        self.0.entry(if is_room { account } else { Account::others() }).or_default().add(amounts);
    }
}

/// Usage by tenant name.
pub type Tenants = BTreeMap<String, Accounts>;

/// Lock time in seconds of programs with `gpu-hours`, by programs and hour. The hour is given by its
/// start, in seconds since 1970.
pub type HoursUsed = BTreeMap<String, BTreeMap<i64, f64>>;

/// A column by which a query can group records. Records with equal values in the requested columns are
/// summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Column {
    /// The hour. For records older than a month, the day.
    Time,
    /// The day, which begins at midnight UTC.
    Day,
    Gpu,
    Tenant,
    Unit,
    Container,
}

impl Column {
    /// Parses a column's name.
    ///
    /// # Errors
    /// Returns a sentence that lists the valid names.
    pub fn parse(name: &str) -> Result<Self, String> {
        match name {
            "time" => Ok(Self::Time),
            "day" => Ok(Self::Day),
            "gpu" => Ok(Self::Gpu),
            "tenant" => Ok(Self::Tenant),
            "unit" => Ok(Self::Unit),
            "container" => Ok(Self::Container),
            _ => Err(format!("unknown column {name:?}. The columns are time, day, gpu, tenant, unit and container")),
        }
    }
}

#[derive(Debug, Clone)]
pub struct Query {
    /// Seconds since 1970. Only records that end later are included.
    pub since: f64,
    pub by: BTreeSet<Column>,
    /// If present, only records of this tenant are included.
    pub tenant: Option<String>,
}

/// The key of a row in an answer. Columns that the query does not group by are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// Start in seconds since 1970, and length in seconds.
    pub time: (i64, i64),
    pub tenant: String,
    pub account: Account,
}

impl Key {
    /// The key with only the columns that the query groups by.
    fn reduced(self, by: &BTreeSet<Column>) -> Self {
        let text = |column, text: String| if by.contains(&column) { text } else { String::new() };
        Self {
            time: match self.time {
                time if by.contains(&Column::Time) => time,
                (begins, _) if by.contains(&Column::Day) => (begins.div_euclid(DAY) * DAY, DAY),
                _ => (0, 0),
            },
            tenant: text(Column::Tenant, self.tenant),
            account: Account {
                gpu: text(Column::Gpu, self.account.gpu),
                unit: text(Column::Unit, self.account.unit),
                container: text(Column::Container, self.account.container),
            },
        }
    }
}

/// The rows, or a sentence that explains why there are none.
pub type UsageAnswer = Result<Vec<(Key, Amounts)>, String>;

enum Job {
    /// The usage in the hour that begins at this time (seconds since 1970), and the lock time of
    /// programs with `gpu-hours`, in seconds.
    Add(i64, Tenants, BTreeMap<String, f64>),
    Save,
    Keep(Duration),
    Read(Query, oneshot::Sender<UsageAnswer>),
    ReadHours(oneshot::Sender<Result<HoursUsed, String>>),
}

/// Sends jobs to the usage thread.
#[derive(Debug)]
pub struct Keeper {
    jobs: Sender<Job>,
    ended: Receiver<()>,
}

impl Keeper {
    /// Starts the thread. The thread's database is in this directory. Records are deleted when the time
    /// `keep` has passed since their end.
    #[cfg(feature = "accounting")]
    pub fn start(directory: &Path, keep: Duration) -> Option<Self> {
        let (jobs, asked) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let mut keeper = keeper::Records::new(directory, keep);
        let started = std::thread::Builder::new().name("usage".into()).spawn(move || {
            while let Ok(job) = asked.recv() {
                keeper.does(job);
            }
            drop(end);
        });
        started.inspect_err(|e| warn!("cannot record usage: {e}")).ok().map(|_| Self { jobs, ended })
    }

    #[cfg(not(feature = "accounting"))]
    pub fn start(_directory: &Path, _keep: Duration) -> Option<Self> {
        None
    }

    /// Adds usage in the hour that begins at `hour`, in seconds since 1970. `hours`: lock time in seconds
    /// of programs with `gpu-hours`.
    pub fn add(&self, hour: i64, used: Tenants, hours: BTreeMap<String, f64>) {
        let _ = self.jobs.send(Job::Add(hour, used, hours));
    }

    pub fn save(&self) {
        let _ = self.jobs.send(Job::Save);
    }

    /// Changes how long records are kept.
    pub fn keep(&self, keep: Duration) {
        let _ = self.jobs.send(Job::Keep(keep));
    }

    pub fn read(&self, query: Query, reply: oneshot::Sender<UsageAnswer>) {
        let _ = self.jobs.send(Job::Read(query, reply));
    }

    /// Replies with the saved hours of programs with `gpu-hours`, or with a sentence about why they cannot be
    /// read.
    pub fn read_hours(&self, reply: oneshot::Sender<Result<HoursUsed, String>>) {
        let _ = self.jobs.send(Job::ReadHours(reply));
    }

    /// Waits until everything is saved. The wait is limited to `patience`, because a disk may hang.
    pub fn finish(self, patience: Duration) {
        let Self { jobs, ended } = self;
        drop(jobs);
        if ended.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            warn!("cannot write the last minute of usage records: the disk does not answer");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_beyond_the_maximum_are_combined() {
        let mut accounts = Accounts::default();
        let one = Amounts { lock_seconds: 1.0, grants: 2.0, ..Amounts::default() };
        for round in 0..2 {
            for number in 0..MAX_ACCOUNTS + 50 {
                let unit = format!("run-{number}.scope");
                accounts.add(Account { gpu: "GPU".into(), unit, ..Account::default() }, &one);
            }
            assert_eq!(accounts.0.len(), MAX_ACCOUNTS + 1, "round {round}");
        }
        assert_eq!(accounts.0[&Account::others()], Amounts { lock_seconds: 100.0, grants: 200.0, ..one });
        let sum: f64 = accounts.0.values().map(|amounts| amounts.lock_seconds).sum();
        assert_eq!(sum, 300.0, "nothing is lost");
    }
}
