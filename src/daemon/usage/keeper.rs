//! The work of the usage thread: collects unsaved usage in memory, saves it on disk, and answers
//! queries. If the disk is full or read-only, or the directory is missing, the thread logs this once
//! and retries on every save. The thread sets a damaged database aside.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::store::{FILE, MAX_ANSWER, Store, StoreError, set_aside};
use super::{Accounts, HOUR, HoursUsed, Job, Key, Query, Tenants, UsageAnswer};
use crate::sys::clock::unix_time;

/// Maximum number of unsaved entries in memory: hours of tenants, and hours of programs with
/// `gpu-hours`. If there are more, the oldest are dropped.
const MAX_UNSAVED: usize = 10_000;

#[derive(Default)]
pub struct Records {
    path: PathBuf,
    store: Option<Store>,
    keep: Duration,
    /// Usage by hour and tenant. The hour is given by its start, in seconds since 1970.
    unsaved: BTreeMap<(i64, String), Accounts>,
    /// Lock time in seconds of programs with `gpu-hours`, by hour and programs.
    unsaved_hours: BTreeMap<(i64, String), f64>,
    /// Start of the hour in which the database was last tidied, in seconds since 1970.
    tidied: Option<i64>,
    /// Monotonic time at which the database was last tidied.
    tidied_at: Option<Instant>,
    /// True once a failure to save records has been logged.
    has_failed: bool,
}

fn now() -> i64 {
    i64::try_from(unix_time()).unwrap_or(i64::MAX)
}

impl Records {
    pub fn new(directory: &Path, keep: Duration) -> Self {
        Self { path: directory.join(FILE), keep, ..Self::default() }
    }

    pub fn does(&mut self, job: Job) {
        match job {
            Job::Add(hour, tenants, hours) => self.add(hour, tenants, hours),
            Job::Save => self.save(),
            Job::Keep(keep) => {
                (self.keep, self.tidied) = (keep, None);
                self.save();
            }
            // If the receiver of a reply was dropped, sending the reply fails. That is not an
            // error.
            Job::Read(query, reply) => drop(reply.send(self.read(&query))),
            Job::ReadHours(reply) => drop(reply.send(self.read_hours())),
        }
    }

    fn add(&mut self, hour: i64, tenants: Tenants, hours: BTreeMap<String, f64>) {
        for (programs, seconds) in hours {
            *self.unsaved_hours.entry((hour, programs)).or_default() += seconds;
        }
        while self.unsaved_hours.len() > MAX_UNSAVED {
            self.unsaved_hours.pop_first();
        }
        for (tenant, accounts) in tenants {
            let sums = self.unsaved.entry((hour, tenant)).or_default();
            accounts.0.into_iter().for_each(|(account, amounts)| sums.add(account, &amounts));
        }
        while self.unsaved.len() > MAX_UNSAVED {
            self.unsaved.pop_first();
        }
    }

    fn save(&mut self) {
        let hour = now().div_euclid(HOUR) * HOUR;
        // Does not create the file before there is usage to save.
        if self.unsaved.is_empty()
            && self.unsaved_hours.is_empty()
            && (self.tidied == Some(hour) || !self.path.exists())
        {
            return;
        }
        let result = self.with_store(|store, records| {
            let used = records.unsaved.iter().map(|((hour, tenant), accounts)| (*hour, tenant.as_str(), accounts));
            let hours = records.unsaved_hours.iter();
            store.add(used, hours.map(|((hour, programs), seconds)| (*hour, programs.as_str(), *seconds)))?;
            records.unsaved.clear();
            records.unsaved_hours.clear();
            if records.tidied != Some(hour) {
                let began = Instant::now();
                let elapsed = records.tidied_at.map_or(Duration::ZERO, |before| began - before);
                store.tidy(now(), elapsed, records.keep)?;
                (records.tidied, records.tidied_at) = (Some(hour), Some(began));
            }
            Ok(())
        });
        match result {
            Ok(()) if self.has_failed => {
                self.has_failed = false;
                info!("recording usage again in {}", self.path.display());
            }
            Ok(()) => {}
            Err(failure) => {
                if !std::mem::replace(&mut self.has_failed, true) {
                    warn!("cannot write usage records to {}: {}", self.path.display(), failure.reason());
                }
            }
        }
    }

    fn read(&mut self, query: &Query) -> UsageAnswer {
        let rows = match self.has_failed || self.path.exists() {
            true => self.with_store(|store, _| store.read(query, now())),
            false => Ok(BTreeMap::new()),
        };
        let mut rows = rows.map_err(|failure| format!("{}: {}", self.path.display(), failure.reason()))?;
        for ((hour, tenant), accounts) in &self.unsaved {
            let is_future = *hour > now();
            if is_future
                || (hour + HOUR) as f64 <= query.since
                || query.tenant.as_ref().is_some_and(|only| only != tenant)
            {
                continue;
            }
            for (account, amounts) in &accounts.0 {
                let key = Key { time: (*hour, HOUR), tenant: tenant.clone(), account: account.clone() };
                rows.entry(key.reduced(&query.by)).or_default().add(amounts);
            }
        }
        if rows.len() > MAX_ANSWER {
            return Err(format!(
                "there are more than {MAX_ANSWER} records. Choose a shorter period or fewer grouping columns."
            ));
        }
        Ok(rows.into_iter().collect())
    }

    /// The saved hours. Does not set a damaged database aside: the next save does this.
    fn read_hours(&self) -> Result<HoursUsed, String> {
        if !self.path.exists() {
            return Ok(HoursUsed::new());
        }
        let hours = Store::open(&self.path).and_then(|store| store.read_hours());
        hours.map_err(|failure| {
            format!(
                "cannot read programs' used GPU time from {}: {}. Limits in gpu-hours count only time from now on",
                self.path.display(),
                failure.reason()
            )
        })
    }

    /// Runs `what` on the database. If the database is damaged, sets it aside and runs `what` again on a
    /// new one.
    fn with_store<T>(
        &mut self,
        mut what: impl FnMut(&mut Store, &mut Self) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut attempt = |records: &mut Self| {
            let mut store = match records.store.take() {
                Some(store) => store,
                None => Store::open(&records.path)?,
            };
            let result = what(&mut store, records);
            // After a failure, the file is opened again for the next job: it may have been replaced.
            records.store = result.is_ok().then_some(store);
            result
        };
        let result = attempt(self);
        let Err(StoreError::Unusable(reason)) = &result else { return result };
        match set_aside(&self.path) {
            Ok(aside) => {
                let (path, aside) = (self.path.display(), aside.display());
                warn!("cannot use {path}: {reason}. Renamed it to {aside} and created a new one");
                self.tidied = None;
                attempt(self)
            }
            Err(e) => Err(StoreError::Other(format!("{reason}, and it cannot be renamed: {e}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::store::DAMAGED;
    use super::super::{Account, Amounts, Column};
    use super::*;
    use test_support::Directory;

    const KEEP: Duration = Duration::from_secs(400 * 24 * 3600);

    fn used(tenant: &str, lock_seconds: f64) -> Tenants {
        let mut accounts = Accounts::default();
        accounts.add(Account::default(), &Amounts { lock_seconds, ..Amounts::default() });
        [(tenant.to_owned(), accounts)].into()
    }

    fn hour() -> i64 {
        now().div_euclid(HOUR) * HOUR
    }

    /// The lock time in seconds of each tenant.
    fn read(records: &mut Records) -> Result<Vec<(String, f64)>, String> {
        let query = Query { since: 0.0, by: [Column::Tenant].into(), tenant: None };
        let rows = records.read(&query)?;
        Ok(rows.into_iter().map(|(key, amounts)| (key.tenant, amounts.lock_seconds)).collect())
    }

    #[test]
    fn unsaved_records_are_readable_but_lost_if_the_daemon_is_killed() {
        let directory = Directory::new();
        let mut records = Records::new(&directory.0, KEEP);
        records.does(Job::Add(hour(), used("root", 2.0), BTreeMap::new()));
        records.does(Job::Save);
        records.does(Job::Add(hour(), used("root", 3.0), BTreeMap::new()));
        records.does(Job::Add(hour(), used("user 1", 1.0), BTreeMap::new()));
        assert_eq!(read(&mut records), Ok(vec![("root".into(), 5.0), ("user 1".into(), 1.0)]));
        let mut next = Records::new(&directory.0, KEEP);
        assert_eq!(read(&mut next), Ok(vec![("root".into(), 2.0)]));
        records.does(Job::Save);
        assert_eq!(read(&mut next), read(&mut records));
        let of_one = Query { since: 0.0, by: [].into(), tenant: Some("user 1".into()) };
        records.does(Job::Add(hour(), used("user 1", 1.5), BTreeMap::new()));
        let rows = records.read(&of_one).expect("rows");
        assert_eq!(rows, [(Key::default(), Amounts { lock_seconds: 2.5, ..Amounts::default() })]);
    }

    #[test]
    fn a_damaged_database_is_set_aside_at_start_and_at_run_time() {
        let directory = Directory::new();
        let (path, aside) = (directory.0.join(FILE), directory.0.join(format!("{FILE}{DAMAGED}")));
        std::fs::write(&path, "nonsense ".repeat(1000)).expect("a file");
        let mut records = Records::new(&directory.0, KEEP);
        records.does(Job::Add(hour(), used("root", 2.0), BTreeMap::new()));
        records.does(Job::Save);
        assert!(std::fs::read_to_string(&aside).expect("set aside").starts_with("nonsense"));
        assert_eq!(read(&mut Records::new(&directory.0, KEEP)), Ok(vec![("root".into(), 2.0)]));
        // Another program overwrites the database.
        std::fs::write(&path, "other nonsense ".repeat(1000)).expect("a file");
        records.does(Job::Add(hour(), used("root", 4.0), BTreeMap::new()));
        records.does(Job::Save);
        assert!(std::fs::read_to_string(&aside).expect("set aside").starts_with("nonsense"), "it is still there");
        let second = directory.0.join(format!("{FILE}{DAMAGED}-2"));
        assert!(std::fs::read_to_string(second).expect("set aside").starts_with("other"));
        assert_eq!(read(&mut Records::new(&directory.0, KEEP)), Ok(vec![("root".into(), 4.0)]));
    }

    #[test]
    fn a_missing_state_directory_is_retried() {
        let directory = Directory::new();
        let state = directory.0.join("state");
        let mut records = Records::new(&state, KEEP);
        records.does(Job::Add(hour(), used("root", 2.0), BTreeMap::new()));
        records.does(Job::Save);
        assert!(records.has_failed && read(&mut records).is_err_and(|e| e.contains("usage.sqlite: No such file")));
        std::fs::create_dir(&state).expect("a directory");
        records.does(Job::Add(hour(), used("root", 1.0), BTreeMap::new()));
        records.does(Job::Save);
        assert!(!records.has_failed);
        assert_eq!(read(&mut Records::new(&state, KEEP)), Ok(vec![("root".into(), 3.0)]));
    }

    #[test]
    fn unsaved_records_are_bounded() {
        let directory = Directory::new();
        let mut records = Records::new(&directory.0.join("missing"), KEEP);
        for at in 0..2 * MAX_UNSAVED as i64 {
            records.does(Job::Add(at * HOUR, used("root", 1.0), BTreeMap::new()));
        }
        assert_eq!(records.unsaved.len(), MAX_UNSAVED);
        assert_eq!(records.unsaved.first_key_value().map(|((hour, _), _)| *hour), Some(MAX_UNSAVED as i64 * HOUR));
    }
}
