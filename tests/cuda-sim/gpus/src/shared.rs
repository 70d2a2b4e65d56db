//! Memory that several processes share. Shared memory counts for its *owner*, the process that
//! allocated it. After the owner has freed the memory or has ended, the memory counts for one of
//! the importing processes, until the last importer has closed it. An H200 (driver 580) does the
//! same.
//!
//! Each process's file has a table of the process's shared chunks. The owner's `Usage::plain`
//! includes the bytes of the chunks that the owner shares.

use crate::account::Process;
use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicU64, Ordering},
};

/// One process's entry for a shared chunk of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// The inode of the file with the chunk's contents. No other chunk has this inode at the same
    /// time.
    pub inode: u64,
    /// The GPU's number in the machine.
    pub gpu: usize,
    pub bytes: u64,
    pub is_owner: bool,
}

/// The maximum number of shared chunks of one process.
const MOST: usize = 1024;
/// The words of the table. Each chunk has two words: its inode, or 0 in a free entry, and its other
/// fields.
pub(crate) const WORDS: usize = 2 * MOST;

impl Shared {
    fn rest(self) -> u64 {
        self.bytes << 8 | (self.gpu as u64) << 1 | u64::from(self.is_owner)
    }

    fn unpack(inode: u64, rest: u64) -> Self {
        Self { inode, gpu: (rest >> 1 & 0x7f) as usize, bytes: rest >> 8, is_owner: rest & 1 != 0 }
    }
}

/// Adds an entry, and returns false if the table is full. The caller holds the lock of all
/// accounts.
pub(crate) fn insert(table: &[AtomicU64], chunk: Shared) -> bool {
    let Some(free) = table.chunks_exact(2).find(|place| place[0].load(Ordering::Relaxed) == 0) else { return false };
    free[1].store(chunk.rest(), Ordering::Relaxed);
    free[0].store(chunk.inode, Ordering::Relaxed);
    true
}

/// Removes one entry for the chunk. The caller holds the lock of all accounts.
pub(crate) fn remove(table: &[AtomicU64], chunk: Shared) {
    let entry = [chunk.inode, chunk.rest()];
    let is_it = |place: &&[AtomicU64]| [place[0].load(Ordering::Relaxed), place[1].load(Ordering::Relaxed)] == entry;
    if let Some(place) = table.chunks_exact(2).find(is_it) {
        place[0].store(0, Ordering::Relaxed);
    }
}

/// The entries of a table.
pub(crate) fn read(table: &[u64]) -> Vec<Shared> {
    let places = table.chunks_exact(2).filter(|place| place[0] != 0);
    places.map(|place| Shared::unpack(place[0], place[1])).collect()
}

/// Counts each chunk without an owner for one of the processes that have the chunk.
pub(crate) fn count_without_owner(processes: &mut [Process]) {
    let all = |processes: &[Process]| processes.iter().flat_map(|p| p.shared.clone()).collect::<Vec<_>>();
    let mut counted: BTreeSet<u64> = all(processes).iter().filter(|c| c.is_owner).map(|c| c.inode).collect();
    for process in processes {
        for chunk in &process.shared {
            if counted.insert(chunk.inode) {
                process.gpus[chunk.gpu].plain += chunk.bytes;
            }
        }
    }
}
