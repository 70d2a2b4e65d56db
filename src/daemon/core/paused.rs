//! The paused processes. A process is identified by its PID and its start time. The state directory
//! keeps the list for the next daemon and for clients that connect again. Clients do not
//! report the pause in `Hello`: the library may be older than the scheduler, and a client that is
//! paused but could not sleep does not know that it is paused.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::daemon::state_file::{Content, Saving, StateFile};
use crate::daemon::transport::peer;

const FILE: &str = "paused.toml";
/// The kernel's ID of the present boot.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// Orders for the next daemon. They are valid until the host reboots.
#[derive(Debug, Serialize, Deserialize)]
pub struct Orders<T: Ord> {
    boot: String,
    pub all: BTreeSet<T>,
}

impl<T: Ord> Default for Orders<T> {
    fn default() -> Self {
        let boot = std::fs::read_to_string(BOOT).unwrap_or_default().trim().to_owned();
        Self { boot, all: BTreeSet::new() }
    }
}

impl<T: Ord + Serialize + DeserializeOwned> Content for Orders<T> {
    fn parse(text: &str, _: &Path) -> Result<Self, String> {
        let (read, none) = (toml::from_str::<Self>(text).map_err(|e| e.message().to_owned())?, Self::default());
        Ok(if read.boot == none.boot { read } else { none })
    }

    fn text(&self) -> String {
        if self.all.is_empty() { String::new() } else { toml::to_string(self).unwrap_or_default() }
    }
}

impl<T: Ord + Serialize + DeserializeOwned> Orders<T> {
    /// Reads the orders that an earlier daemon saved in a file. Saves changes there.
    pub fn open(path: PathBuf) -> StateFile<Self> {
        let shown = path.display().to_string();
        StateFile::open(path, |e| warn!("cannot restore the state saved in {shown}: {e}"))
    }
}

#[derive(Debug, Default)]
pub struct Paused(StateFile<Orders<Process>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Process {
    pid: i32,
    /// Start time of the process, in clock ticks since boot.
    began: u64,
}

impl Process {
    fn of(pid: i32) -> Option<Self> {
        Some(Self { pid, began: peer::start_time(pid).filter(|_| pid > 0)? })
    }

    fn lives(&self) -> bool {
        Self::of(self.pid) == Some(*self)
    }
}

impl Paused {
    /// Reads the paused processes that an earlier daemon saved. Drops processes that have ended.
    pub fn open(directory: &Path) -> Self {
        let mut file: StateFile<Orders<Process>> = Orders::open(directory.join(FILE));
        file.content.all.retain(Process::lives);
        Self(file)
    }

    pub fn set(&mut self, pid: i32, is_paused: bool) -> Saving {
        let all = &mut self.0.content.all;
        all.retain(|process| process.pid != pid && process.lives());
        all.extend(Process::of(pid).filter(|_| is_paused));
        self.0.save(&self.0.content)
    }

    pub fn has(&self, pid: i32) -> bool {
        Process::of(pid).is_some_and(|process| self.0.content.all.contains(&process))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::Directory;

    fn own() -> i32 {
        std::process::id() as i32
    }

    #[test]
    fn a_paused_process_is_remembered_until_it_is_resumed() {
        let directory = Directory::new();
        let file = directory.0.join(FILE);
        let mut paused = Paused::open(&directory.0);
        let saving = paused.set(own(), true);
        assert!(paused.has(own()) && !paused.has(1));
        saving.blocking_recv().expect("an answer").expect("it is saved");
        assert!(file.exists());
        let mut next = Paused::open(&directory.0);
        assert!(next.has(own()));
        next.set(own(), false).blocking_recv().expect("an answer").expect("it is saved");
        assert!(!next.has(own()) && !file.exists());
        assert!(!Paused::open(&directory.0).has(own()));
    }

    #[test]
    fn a_process_that_reuses_a_paused_pid_is_not_paused() {
        let directory = Directory::new();
        let began = peer::start_time(own()).expect("it runs");
        let write = |boot: String, began| {
            let saved = Orders { boot, all: [Process { pid: own(), began }].into() };
            std::fs::write(directory.0.join(FILE), toml::to_string(&saved).expect("text")).expect("a file");
            Paused::open(&directory.0).has(own())
        };
        let boot = || Orders::<Process>::default().boot;
        assert!(write(boot(), began));
        assert!(!write(boot(), began + 1), "it began at another time");
        assert!(!write("another".into(), began), "the machine was started again");
        std::fs::write(directory.0.join(FILE), "nonsense").expect("a file");
        assert!(!Paused::open(&directory.0).has(own()));
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("a process");
        let mut paused = Paused::default();
        drop(paused.set(child.id() as i32, true));
        assert!(paused.has(child.id() as i32));
        child.kill().expect("killed");
        child.wait().expect("ended");
        assert!(!paused.has(child.id() as i32));
    }
}
