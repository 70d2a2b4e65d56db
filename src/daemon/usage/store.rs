//! The database. One table has a row for each hour, tenant, GPU, unit and container. After a month, the
//! hours of a day are merged into one row. Rows older than the retention time are deleted, and so are
//! the oldest rows if there are too many. A second table stores the last month of programs with
//! `gpu-hours`.
//!
//! The clock may be wrong, for example until the host has synchronized it. So deletion uses a
//! separate time, which a third table stores. This time follows the clock, but advances at most
//! [`CATCH_UP`] times as fast as monotonic time.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, Row, Statement, Transaction, params};

use super::{Account, Accounts, Amounts, DAY, HOUR, HoursUsed, Key, MAX_ACCOUNTS, Query};
use crate::sys::small_file;

pub const FILE: &str = "usage.sqlite";
/// Suffix of the file name of a database that was set aside.
pub const DAMAGED: &str = ".damaged";

/// The version of this schema. A database with another version belongs to another version of nvshare,
/// and is not used.
const VERSION: i64 = 1;
const SCHEMA: &str = "
    CREATE TABLE usage (
        begins INTEGER NOT NULL,
        lasts INTEGER NOT NULL,
        tenant TEXT NOT NULL,
        gpu TEXT NOT NULL,
        unit TEXT NOT NULL,
        container TEXT NOT NULL,
        lock_seconds REAL NOT NULL,
        grants REAL NOT NULL,
        wait_seconds REAL NOT NULL,
        resident_byte_seconds REAL NOT NULL,
        swapped_byte_seconds REAL NOT NULL,
        swapped_in_bytes REAL NOT NULL,
        swapped_out_bytes REAL NOT NULL,
        PRIMARY KEY (begins, lasts, tenant, gpu, unit, container)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE hours (
        begins INTEGER NOT NULL,
        programs TEXT NOT NULL,
        lock_seconds REAL NOT NULL,
        PRIMARY KEY (begins, programs)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE retention (at INTEGER NOT NULL) STRICT;
    PRAGMA user_version = 1;";

/// Age in seconds after which hours are merged into days: the longest month.
const HOURS_LAST: i64 = 31 * DAY;
/// Maximum speed of the time for deletion, as a multiple of monotonic time. A clock that is ahead
/// for an hour then costs at most the records of one day. The time can catch up with the clock
/// after the host was off.
const CATCH_UP: i64 = 24;
/// Maximum number of rows, about 100 MB. If there are more, the oldest are deleted.
const MAX_ROWS: i64 = 500_000;
/// Maximum number of rows of programs with `gpu-hours`. If there are more, the oldest are deleted.
const MAX_HOURS: i64 = 100_000;
/// Maximum number of rows in an answer.
pub const MAX_ANSWER: usize = 10_000;

const ADD: &str = "
    INSERT INTO usage VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)
    ON CONFLICT DO UPDATE SET
        lock_seconds = lock_seconds + excluded.lock_seconds,
        grants = grants + excluded.grants,
        wait_seconds = wait_seconds + excluded.wait_seconds,
        resident_byte_seconds = resident_byte_seconds + excluded.resident_byte_seconds,
        swapped_byte_seconds = swapped_byte_seconds + excluded.swapped_byte_seconds,
        swapped_in_bytes = swapped_in_bytes + excluded.swapped_in_bytes,
        swapped_out_bytes = swapped_out_bytes + excluded.swapped_out_bytes";

/// A reason why the database cannot be used.
#[derive(Debug)]
pub enum StoreError {
    /// The database is damaged.
    Unusable(String),
    /// A condition that may be temporary: the disk is full or read-only, or another version of nvshare
    /// wrote the database.
    Other(String),
}

impl StoreError {
    pub fn reason(&self) -> &str {
        match self {
            Self::Unusable(reason) | Self::Other(reason) => reason,
        }
    }
}

impl From<rusqlite::Error> for StoreError {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Self::Unusable(error.to_string()),
            // A table or a column is missing, or has unexpected contents.
            Some(ErrorCode::Unknown | ErrorCode::TypeMismatch | ErrorCode::ConstraintViolation) => {
                Self::Unusable(error.to_string())
            }
            _ => Self::Other(error.to_string()),
        }
    }
}

#[derive(Debug)]
pub struct Store {
    connection: Connection,
}

impl Store {
    /// Opens the database, or creates it.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        // Other users must not read the names of programs.
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NONBLOCK);
        let created = options.open(path).and_then(|file| small_file::check_kind(&file));
        created.map_err(|e| StoreError::Other(e.to_string()))?;
        let mut connection = Connection::open(path)?;
        connection.busy_timeout(Duration::from_secs(1))?;
        let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        let tables: i64 = connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
        match (version, tables) {
            (0, 0) => {
                let creation = connection.transaction()?;
                creation.execute_batch(SCHEMA)?;
                creation.commit()?;
            }
            (VERSION, _) => {
                let found: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
                if found != "ok" {
                    return Err(StoreError::Unusable(found));
                }
            }
            // The database is left unchanged, in case the other version is installed again.
            _ => {
                return Err(StoreError::Other(format!(
                    "its format is {version}, but this version of nvshare needs {VERSION}. Move it away to start a new \
                     one"
                )));
            }
        }
        Ok(Self { connection })
    }

    /// Adds all of the usage, or nothing on failure. Hours are given by their start, in seconds
    /// since 1970.
    ///
    /// `hours`: lock time in seconds of programs with `gpu-hours`.
    pub fn add<'a>(
        &mut self,
        used: impl Iterator<Item = (i64, &'a str, &'a Accounts)>,
        hours: impl Iterator<Item = (i64, &'a str, f64)>,
    ) -> Result<(), StoreError> {
        let transaction = self.connection.transaction()?;
        {
            let mut of_account = transaction.prepare(
                "SELECT EXISTS (SELECT 1 FROM usage
                WHERE begins = ?1 AND lasts = ?2 AND tenant = ?3 AND gpu = ?4 AND unit = ?5 AND container = ?6)",
            )?;
            let mut of_tenant =
                transaction.prepare("SELECT count(*) FROM usage WHERE begins = ?1 AND lasts = ?2 AND tenant = ?3")?;
            let mut add = transaction.prepare(ADD)?;
            let others = Account::others();
            for (hour, tenant, accounts) in used {
                for (account, amounts) in &accounts.0 {
                    let Account { gpu, unit, container } = account;
                    let has_row: bool =
                        of_account.query_row(params![hour, HOUR, tenant, gpu, unit, container], |row| row.get(0))?;
                    let rows: i64 = of_tenant.query_row(params![hour, HOUR, tenant], |row| row.get(0))?;
                    let is_room = has_row || rows < MAX_ACCOUNTS as i64;
                    insert(&mut add, (hour, HOUR), tenant, if is_room { account } else { &others }, amounts)?;
                }
            }
        }
        {
            let mut add = transaction.prepare(
                "INSERT INTO hours VALUES (?1, ?2, ?3)
                ON CONFLICT DO UPDATE SET lock_seconds = lock_seconds + excluded.lock_seconds",
            )?;
            for (hour, programs, seconds) in hours {
                add.execute(params![hour, programs, seconds])?;
            }
        }
        Ok(transaction.commit()?)
    }

    /// The saved lock time in seconds of programs with `gpu-hours`.
    pub fn read_hours(&self) -> Result<HoursUsed, StoreError> {
        let mut statement = self.connection.prepare("SELECT programs, begins, lock_seconds FROM hours")?;
        let mut rows = statement.query([])?;
        let mut all = HoursUsed::new();
        while let Some(row) = rows.next()? {
            all.entry(row.get(0)?).or_default().insert(row.get(1)?, row.get(2)?);
        }
        Ok(all)
    }

    /// Merges hours older than a month into days. Deletes rows older than `keep`, and the oldest rows
    /// beyond the limits. `clock`: the time by the clock, in seconds since 1970. `elapsed`: monotonic time
    /// since the previous call, or zero.
    pub fn tidy(&mut self, clock: i64, elapsed: Duration, keep: Duration) -> Result<(), StoreError> {
        self.tidy_to(clock, elapsed, keep, MAX_ROWS)
    }

    fn tidy_to(&mut self, clock: i64, elapsed: Duration, keep: Duration, most: i64) -> Result<(), StoreError> {
        let transaction = self.connection.transaction()?;
        let now = advance(&transaction, clock, elapsed)?;
        let keep = i64::try_from(keep.as_secs()).unwrap_or(i64::MAX);
        transaction.execute("DELETE FROM usage WHERE begins + lasts <= ?1", [now.saturating_sub(keep)])?;
        let first_whole_hour = (now - HOURS_LAST).div_euclid(DAY) * DAY;
        let days: Vec<i64> = transaction
            .prepare("SELECT DISTINCT begins / ?1 * ?1 FROM usage WHERE begins < ?2 AND lasts < ?1")?
            .query_map([DAY, first_whole_hour], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        for day in days {
            make_day(&transaction, day)?;
        }
        // The longest window of a rule is a month.
        transaction.execute("DELETE FROM hours WHERE begins + ?2 <= ?1", [now - HOURS_LAST, HOUR])?;
        transaction.execute(
            "DELETE FROM hours WHERE begins <= (SELECT begins FROM hours ORDER BY begins DESC LIMIT 1 OFFSET ?1)",
            [MAX_HOURS],
        )?;
        // Deletes all rows of an hour or day together.
        let beyond =
            "DELETE FROM usage WHERE begins <= (SELECT begins FROM usage ORDER BY begins DESC LIMIT 1 OFFSET ?1)";
        transaction.execute(beyond, [most])?;
        Ok(transaction.commit()?)
    }

    /// Finds the rows that match a query, and sums them by the query's columns. Returns at most
    /// [`MAX_ANSWER`] + 1 rows.
    ///
    /// `clock`: the time by the clock, in seconds since 1970. Later rows were recorded while the clock was
    /// wrong, and do not count.
    pub fn read(&self, query: &Query, clock: i64) -> Result<BTreeMap<Key, Amounts>, StoreError> {
        let mut statement = self.connection.prepare(
            "SELECT * FROM usage WHERE begins + lasts > ?1 AND begins <= ?3 AND (?2 IS NULL OR tenant = ?2)",
        )?;
        let mut rows = statement.query(params![query.since, query.tenant, clock])?;
        let mut sums = BTreeMap::new();
        while let Some(row) = rows.next()?
            && sums.len() <= MAX_ANSWER
        {
            let account = Account { gpu: row.get(3)?, unit: row.get(4)?, container: row.get(5)? };
            let key = Key { time: (row.get(0)?, row.get(1)?), tenant: row.get(2)?, account };
            let sum: &mut Amounts = sums.entry(key.reduced(&query.by)).or_default();
            sum.add(&amounts(row, 6)?);
        }
        Ok(sums)
    }
}

/// Advances the time for deletion towards the clock, and returns the new time. The first call sets
/// the time to the clock's.
fn advance(transaction: &Transaction<'_>, clock: i64, elapsed: Duration) -> rusqlite::Result<i64> {
    let before: Option<i64> = transaction.query_row("SELECT max(at) FROM retention", [], |row| row.get(0))?;
    let elapsed = i64::try_from(elapsed.as_secs()).unwrap_or(i64::MAX);
    let now = before.map_or(clock, |before| clock.min(before.saturating_add(elapsed.saturating_mul(CATCH_UP))));
    transaction.execute("DELETE FROM retention", [])?;
    transaction.execute("INSERT INTO retention VALUES (?1)", [now])?;
    Ok(now)
}

/// Reads amounts from consecutive columns, beginning with the column `first`.
fn amounts(row: &Row<'_>, first: usize) -> rusqlite::Result<Amounts> {
    let mut amounts = Amounts::default();
    for (at, amount) in amounts.all_mut().into_iter().enumerate() {
        *amount = row.get(first + at)?;
    }
    Ok(amounts)
}

fn insert(
    add: &mut Statement<'_>,
    (begins, lasts): (i64, i64),
    tenant: &str,
    account: &Account,
    amounts: &Amounts,
) -> rusqlite::Result<()> {
    let Account { gpu, unit, container } = account;
    let [lock, grants, waits, resident, swapped, moved_in, moved_out] = amounts.all();
    add.execute(params![
        begins, lasts, tenant, gpu, unit, container, lock, grants, waits, resident, swapped, moved_in, moved_out
    ])?;
    Ok(())
}

/// Merges each account's hours of a day into one row. If a tenant has too many accounts, only the
/// accounts with the most GPU time keep separate rows.
fn make_day(transaction: &Transaction<'_>, day: i64) -> rusqlite::Result<()> {
    let sums = "SELECT tenant, gpu, unit, container, sum(lock_seconds), sum(grants), sum(wait_seconds),
            sum(resident_byte_seconds), sum(swapped_byte_seconds), sum(swapped_in_bytes), sum(swapped_out_bytes)
        FROM usage WHERE begins >= ?1 AND begins < ?1 + ?2 GROUP BY tenant, gpu, unit, container
        ORDER BY sum(lock_seconds) DESC";
    let mut tenants: BTreeMap<String, Accounts> = BTreeMap::new();
    {
        let mut statement = transaction.prepare(sums)?;
        let mut rows = statement.query([day, DAY])?;
        while let Some(row) = rows.next()? {
            let account = Account { gpu: row.get(1)?, unit: row.get(2)?, container: row.get(3)? };
            tenants.entry(row.get(0)?).or_default().add(account, &amounts(row, 4)?);
        }
    }
    transaction.execute("DELETE FROM usage WHERE begins >= ?1 AND begins < ?1 + ?2", [day, DAY])?;
    let mut add = transaction.prepare(ADD)?;
    for (tenant, accounts) in &tenants {
        for (account, amounts) in &accounts.0 {
            insert(&mut add, (day, DAY), tenant, account, amounts)?;
        }
    }
    Ok(())
}

/// Maximum number of databases that are set aside. Beyond it, the last one is replaced.
const MAX_ASIDE: u32 = 9;

/// Sets a database aside, under the first free name.
pub fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let with = |end: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(end);
        PathBuf::from(name)
    };
    // The new database must not find the journal of this one.
    match std::fs::remove_file(with("-journal")) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let names = (1..=MAX_ASIDE).map(|number| match number {
        1 => with(DAMAGED),
        _ => with(&format!("{DAMAGED}-{number}")),
    });
    let last = with(&format!("{DAMAGED}-{MAX_ASIDE}"));
    let aside = names.into_iter().find(|name| !name.exists()).unwrap_or(last);
    std::fs::rename(path, &aside).map(|()| aside)
}

#[cfg(test)]
mod tests {
    use super::super::Column;
    use super::*;
    use test_support::Directory;

    /// An elapsed monotonic time that is long enough for deletion to follow the clock.
    const LONG: Duration = Duration::from_secs(1000 * DAY as u64);

    fn account(unit: &str) -> Account {
        Account { gpu: "GPU-1".into(), unit: unit.into(), ..Account::default() }
    }

    fn seconds(lock_seconds: f64) -> Amounts {
        Amounts { lock_seconds, swapped_in_bytes: lock_seconds * 10.0, ..Amounts::default() }
    }

    fn add(store: &mut Store, hour: i64, tenant: &str, unit: &str, lock_seconds: f64) {
        let mut accounts = Accounts::default();
        accounts.add(account(unit), &seconds(lock_seconds));
        store.add([(hour, tenant, &accounts)].into_iter(), [].into_iter()).expect("added");
    }

    fn read(store: &Store, since: i64, by: &[Column], tenant: Option<&str>) -> Vec<(Key, Amounts)> {
        let query = Query { since: since as f64, by: by.iter().copied().collect(), tenant: tenant.map(str::to_owned) };
        store.read(&query, i64::MAX).expect("rows").into_iter().collect()
    }

    fn rows(store: &Store) -> i64 {
        store.connection.query_row("SELECT count(*) FROM usage", [], |row| row.get(0)).expect("a number")
    }

    #[test]
    fn usage_is_summed_by_the_requested_columns() {
        let directory = Directory::new();
        let mut store = Store::open(&directory.0.join(FILE)).expect("a database");
        add(&mut store, 0, "user 1", "a.service", 1.0);
        add(&mut store, 0, "user 1", "a.service", 2.0);
        add(&mut store, HOUR, "user 1", "b.service", 4.0);
        add(&mut store, HOUR, "user 2", "b.service", 8.0);
        drop(store);
        let store = Store::open(&directory.0.join(FILE)).expect("the same");
        let of = |since, by: &[Column], tenant| -> Vec<(Key, Amounts)> { read(&store, since, by, tenant) };
        assert_eq!(of(0, &[], None), [(Key::default(), seconds(15.0))]);
        assert_eq!(of(HOUR, &[], None), [(Key::default(), seconds(12.0))], "what has ended by then is not meant");
        let whose = |tenant: &str| Key { tenant: tenant.into(), ..Key::default() };
        let both = [(whose("user 1"), seconds(7.0)), (whose("user 2"), seconds(8.0))];
        assert_eq!(of(0, &[Column::Tenant], None), both);
        assert_eq!(of(0, &[Column::Tenant], Some("user 2")), both[1..]);
        let at = |begins, unit: &str| {
            let account = Account { unit: unit.into(), ..Account::default() };
            Key { time: (begins, HOUR), tenant: String::new(), account }
        };
        let expected = [(at(0, "a.service"), seconds(3.0)), (at(HOUR, "b.service"), seconds(12.0))];
        assert_eq!(of(0, &[Column::Unit, Column::Time], None), expected);
        assert_eq!(of(5 * HOUR, &[], None), []);
        let mut store = store;
        add(&mut store, DAY + 5 * HOUR, "user 1", "a.service", 16.0);
        let day = |begins| Key { time: (begins, DAY), ..Key::default() };
        assert_eq!(read(&store, 0, &[Column::Day], None), [(day(0), seconds(15.0)), (day(DAY), seconds(16.0))]);
    }

    #[test]
    fn hourly_rows_are_merged_into_days_and_old_days_deleted() {
        let directory = Directory::new();
        let mut store = Store::open(&directory.0.join(FILE)).expect("a database");
        for hour in 0..48 {
            add(&mut store, hour * HOUR, "user 1", "a.service", 1.0);
        }
        let keep = Duration::from_secs(400 * DAY as u64);
        store.tidy(32 * DAY, LONG, keep).expect("tidied");
        let times = |store: &Store| -> Vec<_> {
            read(store, 0, &[Column::Time], None).into_iter().map(|(key, amounts)| (key.time, amounts)).collect()
        };
        let first = times(&store);
        assert_eq!((first.len(), first[0]), (25, ((0, DAY), seconds(24.0))), "the second day is within the month");
        store.tidy(33 * DAY + 1, LONG, keep).expect("tidied");
        let days = [((0, DAY), seconds(24.0)), ((DAY, DAY), seconds(24.0))];
        assert_eq!(times(&store), days);
        // Usage that was saved late because the disk was full is added to the day's row.
        add(&mut store, HOUR, "user 1", "a.service", 3.0);
        store.tidy(33 * DAY + 1, LONG, keep).expect("tidied");
        assert_eq!(times(&store)[0], ((0, DAY), seconds(27.0)));
        store.tidy(401 * DAY, LONG, keep).expect("tidied");
        assert_eq!(times(&store), days[1..]);
        store.tidy(402 * DAY, LONG, keep).expect("tidied");
        assert_eq!(rows(&store), 0);
    }

    #[test]
    fn wrong_clock_deletes_nothing_and_its_records_do_not_count() {
        let directory = Directory::new();
        let mut store = Store::open(&directory.0.join(FILE)).expect("a database");
        let (today, keep) = (1000 * DAY, Duration::from_secs(400 * DAY as u64));
        add(&mut store, today, "user 1", "a.service", 1.0);
        store.add([].into_iter(), [(today, "unit=a", 1.0)].into_iter()).expect("added");
        store.tidy(today + HOUR, LONG, keep).expect("tidied");
        // The host starts with a clock that is 500 days ahead, and synchronizes it after 2 hours.
        let wrong = today + 500 * DAY;
        add(&mut store, wrong, "user 1", "a.service", 2.0);
        drop(store);
        let mut store = Store::open(&directory.0.join(FILE)).expect("the same");
        for hours in 0..2 {
            let elapsed = Duration::from_secs(hours * HOUR as u64);
            store.tidy(wrong + hours as i64 * HOUR, elapsed, keep).expect("tidied");
        }
        assert_eq!((rows(&store), store.read_hours().expect("rows").len()), (2, 1));
        let query = Query { since: 0.0, by: [].into(), tenant: None };
        let counted = |clock| store.read(&query, clock).expect("rows").into_values().collect::<Vec<_>>();
        assert_eq!(counted(today + 3 * HOUR), [seconds(1.0)]);
        assert_eq!(counted(wrong), [seconds(3.0)]);
    }

    #[test]
    fn retention_follows_the_clock_of_a_host_that_was_off() {
        let directory = Directory::new();
        let mut store = Store::open(&directory.0.join(FILE)).expect("a database");
        let keep = Duration::from_secs(10 * DAY as u64);
        add(&mut store, 0, "user 1", "a.service", 1.0);
        store.tidy(HOUR, Duration::ZERO, keep).expect("tidied");
        let hour = Duration::from_secs(HOUR as u64);
        let hours = (1..100).find(|_| {
            store.tidy(20 * DAY, hour, keep).expect("tidied");
            rows(&store) == 0
        });
        assert_eq!(hours, Some(10), "a day for each hour");
    }

    #[test]
    fn gpu_time_of_limited_programs_is_kept_for_a_month() {
        let directory = Directory::new();
        let mut store = Store::open(&directory.0.join(FILE)).expect("a database");
        for hour in [0, DAY, DAY] {
            let hours = [(hour, "unit=a", 1.0), (hour, "user=7", 2.5)];
            store.add([].into_iter(), hours.into_iter()).expect("added");
        }
        drop(store);
        let mut store = Store::open(&directory.0.join(FILE)).expect("the same");
        let all = |from: &[(i64, f64)], to: &[(i64, f64)]| -> HoursUsed {
            [("unit=a".to_owned(), from.iter().copied().collect()), ("user=7".into(), to.iter().copied().collect())]
                .into()
        };
        assert_eq!(store.read_hours().expect("rows"), all(&[(0, 1.0), (DAY, 2.0)], &[(0, 2.5), (DAY, 5.0)]));
        let keep = Duration::from_secs(DAY as u64);
        store.tidy(31 * DAY + HOUR - 1, LONG, keep).expect("tidied");
        assert_eq!(store.read_hours().expect("rows").len(), 2, "whatever is kept of the others");
        store.tidy(31 * DAY + HOUR, LONG, keep).expect("tidied");
        assert_eq!(store.read_hours().expect("rows"), all(&[(DAY, 2.0)], &[(DAY, 5.0)]));
        assert_eq!(rows(&store), 0);
    }

    #[test]
    fn a_tenants_excess_units_share_a_row() {
        let directory = Directory::new();
        let mut store = Store::open(&directory.0.join(FILE)).expect("a database");
        for number in 0..250 {
            add(&mut store, 0, "user 1", &format!("run-{number}.scope"), 1.0);
            add(&mut store, HOUR, "user 1", &format!("run-{}.scope", number + 1000), 2.0);
        }
        add(&mut store, 0, "user 2", "a.service", 5.0);
        assert_eq!(rows(&store), 2 * (MAX_ACCOUNTS as i64 + 1) + 1);
        let of = |store: &Store, unit: &str| {
            let units = read(store, 0, &[Column::Unit], None);
            units.into_iter().find(|(key, _)| key.account.unit == unit).map(|(_, amounts)| amounts)
        };
        assert_eq!(of(&store, crate::identity::OTHERS), Some(seconds(150.0 + 300.0)));
        assert_eq!(of(&store, "a.service"), Some(seconds(5.0)), "another tenant is not concerned");
        store.tidy(40 * DAY, LONG, Duration::from_secs(400 * DAY as u64)).expect("tidied");
        assert_eq!(rows(&store), MAX_ACCOUNTS as i64 + 1);
        assert_eq!(
            of(&store, crate::identity::OTHERS),
            Some(seconds(450.0 + 100.0 + 2.0)),
            "those with least are joined"
        );
        assert_eq!(read(&store, 0, &[], None), [(Key::default(), seconds(750.0 + 5.0))], "nothing is lost");
    }

    #[test]
    fn the_oldest_rows_are_deleted_beyond_the_maximum() {
        let directory = Directory::new();
        let mut store = Store::open(&directory.0.join(FILE)).expect("a database");
        for hour in 0..10 {
            add(&mut store, hour * HOUR, "user 1", "a.service", 1.0);
            add(&mut store, hour * HOUR, "user 2", "a.service", 1.0);
        }
        let keep = Duration::from_secs(400 * DAY as u64);
        store.tidy_to(10 * HOUR, LONG, keep, 20).expect("tidied");
        assert_eq!(rows(&store), 20);
        store.tidy_to(10 * HOUR, LONG, keep, 7).expect("tidied");
        assert_eq!(rows(&store), 6, "of an hour all or none");
        assert_eq!(read(&store, 0, &[Column::Time], None)[0].0.time, (7 * HOUR, HOUR));
    }

    #[test]
    fn invalid_or_newer_databases_are_unusable() {
        let directory = Directory::new();
        let path = directory.0.join(FILE);
        let failure = |text: &str| {
            std::fs::write(&path, text).expect("a file");
            Store::open(&path).expect_err("not a database")
        };
        assert!(matches!(failure(&"nonsense ".repeat(1000)), StoreError::Unusable(_)));
        std::fs::remove_file(&path).expect("removed");
        let newer = Connection::open(&path).expect("a database");
        newer.execute_batch("CREATE TABLE other (a); PRAGMA user_version = 2;").expect("a schema");
        drop(newer);
        let Err(StoreError::Other(reason)) = Store::open(&path) else { panic!("it is not damaged") };
        assert!(reason.contains("format is 2"), "{reason}");
        let missing = Store::open(&directory.0.join("missing").join(FILE)).expect_err("no directory");
        assert!(matches!(missing, StoreError::Other(_)), "{missing:?}");
    }
}
