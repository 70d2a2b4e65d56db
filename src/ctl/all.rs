//! `nvsharectl hibernate --all` and `restore --all`: all programs of the host, for a shutdown.
//!
//! A list on the disk names the images, because `restore --all` must not restore programs that
//! their users have hibernated. An image is in the list only after it is complete. If it is missing
//! there, the program is not lost: its user restores it.
//!
//! If the time does not suffice, **the programs with the most work are saved first**. A program's
//! work is the time for which it has held GPUs. A program whose bytes need more than the time that
//! is left is skipped, so that smaller ones are saved.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use tokio::time::timeout;

use super::hibernate::Options;
use super::{CtlError, Target, block_on, password};
use crate::bus::{Client, SchedulerProxy};
use crate::config::units;

/// The images that `restore --all` restores, one on each line. Not the name of an image, which
/// contains `-`.
const LIST: &str = "/var/lib/nvshare-hibernate/all";
/// Bytes per second that are written until a program was saved.
const ASSUMED_RATE: f64 = 200e6;
/// Seconds that a save takes without the bytes: a program falls asleep, and CRIU starts.
const START: f64 = 2.0;
/// A program is given up after its expected duration times this.
const LIMIT: u32 = 3;
/// Interval and number of the attempts to restore a program. After a boot, the scheduler may not
/// know the GPUs yet.
const AGAIN: Duration = Duration::from_secs(2);
const ATTEMPTS: usize = 15;

/// A program that may be saved.
#[derive(Debug, Clone, PartialEq)]
struct Program {
    pid: u32,
    name: String,
    /// Seconds for which the program has held GPUs.
    work: f64,
    bytes: u64,
}

/// The speed of the saves so far.
#[derive(Debug, Default)]
struct Speed {
    bytes: f64,
    seconds: f64,
}

impl Speed {
    fn add(&mut self, bytes: u64, took: Duration) {
        self.bytes += bytes as f64;
        self.seconds += (took.as_secs_f64() - START).max(0.0);
    }

    /// The expected duration of a save.
    fn expects(&self, bytes: u64) -> Duration {
        let rate = if self.bytes > 0.0 && self.seconds > 0.0 { self.bytes / self.seconds } else { ASSUMED_RATE };
        Duration::from_secs_f64(START + bytes as f64 / rate)
    }
}

/// The programs in the order in which they are saved.
fn in_order(clients: &[Client], memory: impl Fn(u32) -> u64) -> Vec<Program> {
    let mut programs: Vec<Program> = Vec::new();
    for client in clients.iter().filter(|client| client.pid > 0 && !client.gpus.is_empty()) {
        let work = client.gpus.iter().map(|gpu| gpu.lock_time).sum::<f64>();
        let bytes = client.gpus.iter().map(|gpu| gpu.demand).sum::<u64>();
        match programs.iter_mut().find(|program| program.pid == client.pid) {
            Some(known) => (known.work, known.bytes) = (known.work + work, known.bytes + bytes),
            None => {
                let bytes = bytes + memory(client.pid);
                programs.push(Program { pid: client.pid, name: client.name.clone(), work, bytes });
            }
        }
    }
    programs.sort_by(|a, b| b.work.total_cmp(&a.work).then(a.pid.cmp(&b.pid)));
    programs
}

/// The memory of a process in bytes.
fn memory(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let kib = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name))?;
        value.split_whitespace().next()?.parse::<u64>().ok()
    };
    ["VmRSS:", "VmSwap:"].into_iter().filter_map(kib).sum::<u64>() << 10
}

fn check_root() -> Result<(), CtlError> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(CtlError::Failed("--all is for programs of all users. Run it as root".into()))
}

/// Saves all programs that can be saved, in this time. Returns a line for each one.
///
/// # Errors
/// The programs that were not saved, with the reasons.
pub fn save(target: &Target, within: Option<Duration>, options: Options) -> Result<String, CtlError> {
    check_root()?;
    block_on(async { save_all(&target.connect().await?, within.map(|within| Instant::now() + within), options).await })
}

/// As [`save`], until a moment.
///
/// # Errors
/// As [`save`].
pub async fn save_all(
    scheduler: &SchedulerProxy<'_>,
    until: Option<Instant>,
    options: Options,
) -> Result<String, CtlError> {
    let mut lines = String::new();
    let mut others = Vec::new();
    let mut speed = Speed::default();
    for program in in_order(&scheduler.list_clients().await?, memory) {
        let Program { pid, name, bytes, .. } = &program;
        // Not from /proc, where a mount option may hide the processes of other users.
        if !is_present(scheduler, *pid).await {
            continue; // it has ended, or was saved with the program that has started it
        }
        let begun = Instant::now();
        let needs = speed.expects(*bytes);
        let left = until.map_or(Duration::MAX, |until| until.saturating_duration_since(begun));
        if needs > left {
            let (needs, left) = (needs.as_secs_f64(), left.as_secs_f64());
            others.push(format!("{name} (process {pid}) needs about {needs:.0} s, and {left:.0} s are left"));
            continue;
        }
        // A program that hangs must not take the time of the others.
        let limit = if until.is_some() { left.min(needs * LIMIT) } else { left };
        let body = options.body(*pid);
        let saved = password::call::<String>(scheduler, "Hibernate", &body);
        match timeout(limit, saved).await.map(|saved| saved.map_err(CtlError::from)) {
            Ok(Ok(image)) => {
                speed.add(*bytes, begun.elapsed());
                lines += &format!("{name} (process {pid}, {}) is saved as {image}\n", units::size(*bytes));
                let remembered = change(Path::new(LIST), |names| names.push(image));
                others.extend(remembered.err().map(|e| e.to_string()));
            }
            Ok(Err(_)) if !is_present(scheduler, *pid).await => {}
            Ok(Err(e)) => others.push(format!("{name} (process {pid}): {e}")),
            Err(_) => others.push(format!("{name} (process {pid}) is not saved after {:.0} s", limit.as_secs_f64())),
        }
    }
    if others.is_empty() {
        return Ok(lines);
    }
    print(&lines);
    Err(CtlError::Failed(format!("not all programs are saved:\n{}", others.join("\n"))))
}

/// True if a process is a program of the scheduler, or if the scheduler does not answer.
pub(super) async fn is_present(scheduler: &SchedulerProxy<'_>, pid: u32) -> bool {
    scheduler.list_clients().await.map_or(true, |clients| clients.iter().any(|client| client.pid == pid))
}

pub(super) fn print(lines: &str) {
    let _ = std::io::stdout().write_all(lines.as_bytes()); // the reader may have left
}

fn cannot_write(e: std::io::Error) -> CtlError {
    CtlError::Failed(format!("cannot write {LIST}: {e}. Restore the programs with: nvsharectl restore IMAGE"))
}

fn names(list: &Path) -> Result<Vec<String>, CtlError> {
    match fs::read_to_string(list) {
        Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(CtlError::Failed(format!("cannot read {LIST}: {e}"))),
    }
}

/// Changes the list. Another command that changes it waits.
fn change(list: &Path, change: impl FnOnce(&mut Vec<String>)) -> Result<(), CtlError> {
    let lock = fs::File::create(list.with_extension("lock")).map_err(cannot_write)?;
    lock.lock().map_err(cannot_write)?;
    let mut names = names(list)?;
    change(&mut names);
    write(list, &names)
}

fn write(list: &Path, names: &[String]) -> Result<(), CtlError> {
    let replace = || {
        let new = list.with_extension("new");
        let mut file = fs::File::create(&new)?;
        names.iter().try_for_each(|name| writeln!(file, "{name}"))?;
        file.sync_all()?;
        fs::rename(new, list)?;
        list.parent().map_or(Ok(()), |directory| fs::File::open(directory)?.sync_all())
    };
    replace().map_err(cannot_write)
}

/// Restores the programs that [`save`] has saved. Returns a line for each one.
///
/// # Errors
/// The programs that were not restored, with the reasons. The next call restores them.
pub fn restore(target: &Target) -> Result<String, CtlError> {
    check_root()?;
    block_on(async { restore_all(&target.connect().await?).await })
}

/// As [`restore`].
///
/// # Errors
/// As [`restore`].
pub async fn restore_all(scheduler: &SchedulerProxy<'_>) -> Result<String, CtlError> {
    let (mut lines, mut others) = (String::new(), Vec::new());
    for image in names(Path::new(LIST))? {
        // The program runs from now on, so a later call must not restore it again.
        match restore_one(scheduler, &image).await {
            Ok(line) => {
                lines += &line;
                let forgotten = change(Path::new(LIST), |names| names.retain(|name| *name != image));
                others.extend(forgotten.err().map(|e| e.to_string()));
            }
            Err(e) => others.push(e.to_string()),
        }
    }
    if others.is_empty() {
        return Ok(lines);
    }
    print(&lines);
    Err(CtlError::Failed(format!("not all programs are restored:\n{}", others.join("\n"))))
}

async fn restore_one(scheduler: &SchedulerProxy<'_>, image: &str) -> Result<String, CtlError> {
    let mut last = CtlError::Failed(format!("cannot restore image {image:?}"));
    for attempt in 0..ATTEMPTS {
        if attempt > 0 {
            tokio::time::sleep(AGAIN).await;
        }
        let images = scheduler.list_hibernated().await?;
        let state = images.iter().find(|known| known.name == image).and_then(|known| known.state.clone());
        match state.as_deref() {
            Some("saved") => {}
            Some("unfinished") => continue,
            _ => return Ok(format!("{image} was restored or deleted in another way.\n")),
        }
        let restored: zbus::Result<u32> = password::call(scheduler, "Restore", &(image,)).await;
        match restored {
            Ok(pid) => return Ok(format!("{image} runs as process {pid}.\n")),
            Err(e) => last = e.into(),
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::GpuUse;

    fn client(pid: u32, lock_time: f64, demand: u64) -> Client {
        let gpus = vec![GpuUse { lock_time, demand, ..GpuUse::default() }];
        Client { pid, name: format!("p{pid}"), gpus, ..Client::default() }
    }

    #[test]
    fn programs_with_the_most_work_are_saved_first() {
        let idle = Client { pid: 9, ..Client::default() };
        let clients = [client(1, 1.0, 10), client(2, 5.0, 20), client(1, 7.0, 30), client(0, 9.0, 1), idle];
        let order = in_order(&clients, |_| 100);
        let expected = [(1, 8.0, 140), (2, 5.0, 120)];
        assert_eq!(order.iter().map(|it| (it.pid, it.work, it.bytes)).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn two_commands_change_the_list_at_the_same_time() {
        let directory = tempfile::tempdir().expect("a directory");
        let list = directory.path().join("all");
        write(&list, &["x-1".into()]).expect("a list");
        std::thread::scope(|scope| {
            for command in ["a", "b"] {
                let list = &list;
                let add = move |n| change(list, |names| names.push(format!("{command}-{n}"))).expect("the list");
                scope.spawn(move || (0..50).for_each(add));
            }
        });
        change(&list, |names| names.retain(|name| name != "x-1")).expect("the list");
        assert_eq!(names(&list).expect("the list").len(), 100);
    }

    #[test]
    fn the_duration_is_estimated_from_earlier_saves() {
        let mut speed = Speed::default();
        assert_eq!(speed.expects(400_000_000).as_secs(), 4, "2 s, and 400 MB at the assumed rate");
        speed.add(1_000_000_000, Duration::from_secs(3));
        assert_eq!(speed.expects(4_000_000_000).as_secs(), 6);
    }
}
