//! Which processes are paused, for the next daemon: saved in the directory that systemd provides (`StateDirectory=`). A process is
//! named by its number and when it began, as the kernel says, and until the machine is started again. Without a directory pauses end
//! with the daemon.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::mpsc::{self, Sender};
use std::thread;

use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::daemon::transport::peer;
use crate::sys::atomic_file;

const FILE: &str = "paused.toml";
/// Another one each time that the machine is started.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// The processes, and the thread that saves them, since writing can take long.
#[derive(Debug, Default)]
pub struct Paused {
    processes: BTreeSet<Process>,
    saver: Option<Sender<String>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Process {
    pid: i32,
    /// Clock ticks since the machine was started.
    began: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    boot: String,
    process: BTreeSet<Process>,
}

impl Process {
    fn of(pid: i32) -> Option<Self> {
        Some(Self { pid, began: peer::start_time(pid).filter(|_| pid > 0)? })
    }

    fn lives(&self) -> bool {
        Self::of(self.pid) == Some(*self)
    }
}

fn boot() -> String {
    std::fs::read_to_string(BOOT).unwrap_or_default().trim().to_owned()
}

impl Paused {
    /// Reads what an earlier daemon has saved. A wrong file is logged and ignored.
    pub fn open(directory: &Path) -> Self {
        let path = directory.join(FILE);
        let saved = match std::fs::read_to_string(&path) {
            Ok(text) => toml::from_str::<Saved>(&text).map_err(|e| e.message().to_owned()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                Ok(Saved { boot: String::new(), process: BTreeSet::new() })
            }
            Err(e) => Err(e.to_string()),
        };
        let saved = saved.inspect_err(|e| warn!("who was paused is not known: {}: {e}", path.display()));
        let processes = saved.ok().filter(|saved| saved.boot == boot()).map(|saved| saved.process);
        let processes = processes.unwrap_or_default().into_iter().filter(Process::lives).collect();
        let (saver, texts) = mpsc::channel::<String>();
        let started = thread::Builder::new().name("paused".into()).spawn(move || {
            while let Ok(first) = texts.recv() {
                let newest = texts.try_iter().last().unwrap_or(first);
                if let Err(e) = atomic_file::write(&path, &newest) {
                    warn!("programs that are paused will go on if the scheduler is restarted: {}: {e}", path.display());
                }
            }
        });
        if let Err(e) = &started {
            warn!("programs that are paused will go on if the scheduler is restarted: {e}");
        }
        Self { processes, saver: started.is_ok().then_some(saver) }
    }

    pub fn set(&mut self, pid: i32, is_paused: bool) {
        self.processes.retain(|process| process.pid != pid && process.lives());
        self.processes.extend(Process::of(pid).filter(|_| is_paused));
        let Some(saver) = &self.saver else { return };
        let saved = Saved { boot: boot(), process: self.processes.clone() };
        let text = if self.processes.is_empty() { String::new() } else { toml::to_string(&saved).unwrap_or_default() };
        let _ = saver.send(text);
    }

    pub fn has(&self, pid: i32) -> bool {
        Process::of(pid).is_some_and(|process| self.processes.contains(&process))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::{Directory, wait_for};

    fn own() -> i32 {
        std::process::id() as i32
    }

    #[test]
    fn who_is_paused_is_known_to_the_next_daemon_until_it_is_resumed() {
        let directory = Directory::new();
        let file = directory.0.join(FILE);
        let mut paused = Paused::open(&directory.0);
        paused.set(own(), true);
        assert!(paused.has(own()) && !paused.has(1));
        wait_for("a file", || file.exists().then_some(()));
        let mut next = Paused::open(&directory.0);
        assert!(next.has(own()));
        next.set(own(), false);
        assert!(!next.has(own()));
        wait_for("no file", || (!file.exists()).then_some(()));
        assert!(!Paused::open(&directory.0).has(own()));
    }

    #[test]
    fn another_process_of_the_same_number_is_not_paused() {
        let directory = Directory::new();
        let began = peer::start_time(own()).expect("it runs");
        let write = |boot: String, began| {
            let saved = Saved { boot, process: [Process { pid: own(), began }].into() };
            std::fs::write(directory.0.join(FILE), toml::to_string(&saved).expect("text")).expect("a file");
            Paused::open(&directory.0).has(own())
        };
        assert!(write(boot(), began));
        assert!(!write(boot(), began + 1), "it began at another time");
        assert!(!write("another".into(), began), "the machine was started again");
        std::fs::write(directory.0.join(FILE), "nonsense").expect("a file");
        assert!(!Paused::open(&directory.0).has(own()));
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("a process");
        let mut paused = Paused::default();
        paused.set(child.id() as i32, true);
        assert!(paused.has(child.id() as i32));
        child.kill().expect("killed");
        child.wait().expect("ended");
        assert!(!paused.has(child.id() as i32));
    }
}
