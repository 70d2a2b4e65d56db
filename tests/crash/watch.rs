//! Observes the machine from outside: the holders and waiters from the scheduler's record, and the
//! used memory of the simulated GPU.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::path::Path;

use test_support::record::{Move, Record};

/// The state of a client on the only GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stand {
    Idle,
    Waits,
    Holds,
}

/// Follows the record of one scheduler.
#[derive(Debug)]
pub struct Watch {
    record: Record,
    clients: BTreeMap<u64, (u32, Stand)>,
    /// The highest number of concurrent holders at any grant. The scheduler does not wait for a
    /// holder that was stopped during a replacement of the scheduler. That holder may report its
    /// lock after another grant, and is then immediately asked to release it.
    pub most_holders: usize,
}

impl Watch {
    pub fn new(record: &Path) -> Self {
        Self { record: Record::new(record, 1), clients: BTreeMap::new(), most_holders: 0 }
    }

    pub fn look(&mut self) {
        for Move { client, pid, what, .. } in self.record.new_moves() {
            let now = match what {
                "request" => Stand::Waits,
                "grant" | "held" => Stand::Holds,
                // An undrainable client does not count as a holder.
                "release" | "cancel" | "detach" | "undrainable" => Stand::Idle,
                "disconnect" => {
                    self.clients.remove(&client);
                    continue;
                }
                _ => continue,
            };
            let stand = &mut self.clients.entry(client).or_insert((pid, Stand::Idle)).1;
            // A holder that requests another lock still holds its lock.
            if (*stand, now) != (Stand::Holds, Stand::Waits) {
                *stand = now;
            }
            if what == "grant" {
                self.most_holders = self.most_holders.max(self.pids(Stand::Holds).count());
            }
        }
    }

    fn pids(&self, wanted: Stand) -> impl Iterator<Item = u32> {
        self.clients.values().filter(move |(_, stand)| *stand == wanted).map(|(pid, _)| *pid)
    }

    pub fn stand(&self, pid: u32) -> Stand {
        self.clients.values().find(|(p, _)| *p == pid).map_or(Stand::Idle, |(_, stand)| *stand)
    }
}

/// Returns the bytes of the simulated GPU that living processes use, or `None` while a process is
/// allocating. The bytes are from the simulator's accounts (`tests/cuda-sim/gpus`). Each process
/// has a file, which is locked while the process lives. The file has the pid, and two counts for
/// each GPU.
pub fn used(simulator: &Path) -> Option<u64> {
    let all = File::open(simulator.join("accounts.lock")).ok()?;
    if !lock(&all) {
        return None;
    }
    let files = fs::read_dir(simulator.join("processes")).ok()?.flatten();
    let bytes = files.filter_map(|entry| {
        let mut file = File::open(entry.path()).ok()?;
        let mut counts = [0; 16];
        // If the lock is free, the process has ended.
        if lock(&file) || file.seek(SeekFrom::Start(8)).is_err() || file.read_exact(&mut counts).is_err() {
            return None;
        }
        let count = |at: usize| u64::from_ne_bytes(counts[at..at + 8].try_into().expect("eight bytes"));
        Some(count(0) + count(8))
    });
    Some(bytes.sum())
}

/// Tries to lock the file. The lock ends when the file is closed.
fn lock(file: &File) -> bool {
    // SAFETY: `file` keeps the descriptor open during the call.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
}
