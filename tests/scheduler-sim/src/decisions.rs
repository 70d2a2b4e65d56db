//! A record of all decisions of a machine, used to compare a rewritten scheduler with the previous
//! version.
//!
//! With `NVSHARE_DECISIONS=DIRECTORY`, every world of a test adds a line to a file with the test's
//! name. The line has the number of commands that the machine gave, and a hash of the commands and
//! their times. `PROPTEST_RNG_SEED=N` creates the same worlds again:
//!
//! ```text
//! mkdir /tmp/before /tmp/after
//! PROPTEST_RNG_SEED=1 NVSHARE_SCHEDULER_CASES=1500 NVSHARE_DECISIONS=/tmp/before cargo nextest run -p scheduler-tests
//! (change the scheduler, and run the same with /tmp/after)
//! diff -r /tmp/before /tmp/after
//! ```
//!
//! Commands are hashed by numbers from this file, so the hashes don't depend on names.

use nvshare_sched::*;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug)]
pub struct Decisions {
    file: Option<PathBuf>,
    count: u64,
    hash: u64,
}

impl Decisions {
    /// Opens the record of the test that runs on this thread.
    pub fn of_this_test() -> Self {
        let name = std::thread::current().name().unwrap_or("main").replace("::", "-");
        let file = std::env::var_os("NVSHARE_DECISIONS").map(|directory| PathBuf::from(directory).join(name));
        Self { file, count: 0, hash: 0xcbf2_9ce4_8422_2325 }
    }

    pub fn add(&mut self, now: Time, commands: &[Command]) {
        if self.file.is_none() {
            return;
        }
        for command in commands {
            self.count += 1;
            self.number(now.as_nanos() as u64);
            numbers(command).into_iter().for_each(|number| self.number(number));
        }
    }

    /// Adds a number to the hash (FNV-1a).
    fn number(&mut self, number: u64) {
        for byte in number.to_le_bytes() {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

impl Drop for Decisions {
    fn drop(&mut self) {
        let Some(path) = &self.file else { return };
        let file = OpenOptions::new().append(true).create(true).open(path);
        let _ = file.and_then(|mut file| writeln!(file, "{} {:016x}", self.count, self.hash));
    }
}

fn numbers(command: &Command) -> Vec<u64> {
    match command {
        Command::Placed { client, gpus } => [vec![1, client.0], gpus.iter().map(number).collect()].concat(),
        Command::Unplaced { client, .. } => vec![2, client.0],
        Command::Attached { client, gpu } => vec![3, client.0, number(gpu)],
        Command::Limit { client, gpu, bytes, seq, most, spare, max } => {
            vec![4, client.0, number(gpu), *bytes, u64::from(*seq), *most, *spare, max.unwrap_or(u64::MAX)]
        }
        Command::Denied { client, gpu, bytes, .. } => vec![5, client.0, number(gpu), *bytes],
        Command::Reserved { client, gpu, bytes } => vec![6, client.0, number(gpu), *bytes],
        Command::Allowance { client, gpu, seq, bytes } => vec![7, client.0, number(gpu), u64::from(*seq), *bytes],
        Command::Grant { client, gpus } => set(8, client, gpus),
        Command::Revoke { client, gpus } => set(9, client, gpus),
        Command::Prepare { client, gpu, bytes } => vec![10, client.0, number(gpu), *bytes],
        Command::Contended { client, gpus, waiters, grace } => {
            [set(11, client, gpus), vec![u64::from(*waiters), grace.as_nanos() as u64]].concat()
        }
        Command::Waiting { client, gpus, why } => [set(12, client, gpus), vec![*why as u64]].concat(),
        Command::Probe { client } => vec![13, client.0],
        Command::Measure { gpu } => vec![14, number(gpu)],
        Command::EvictionBlocked { client, gpu, .. } => vec![15, client.0, number(gpu)],
        Command::MappingFailed { client, gpu, bytes, failures } => {
            vec![17, client.0, number(gpu), *bytes, u64::from(*failures)]
        }
        Command::Undrainable { client, gpus } => set(18, client, gpus),
        Command::PrepareSleep { client, .. } => vec![19, client.0],
        Command::Awake { client, moved } => [vec![20, client.0], pairs(moved)].concat(),
        Command::Checkpoint { client, operation, moves } => {
            [vec![21, client.0, *operation as u64], pairs(moves)].concat()
        }
        Command::RestoreAllowed { client } => vec![27, client.0],
        Command::Moved { client, from, to } => vec![22, client.0, number(from), number(to)],
        Command::Migrated { client, from, to, why } => {
            vec![23, client.0, number(from), number(to), u64::from(why.is_some())]
        }
        Command::RoomReady { room, gpu } => vec![24, room.0, number(gpu)],
        Command::RoomRefused { room, gpu, .. } => vec![25, room.0, number(gpu)],
        Command::RoomEnded { room, gpu } => vec![26, room.0, number(gpu)],
    }
}

fn set(kind: u64, client: &ClientId, gpus: &GpuSet) -> Vec<u64> {
    [vec![kind, client.0], gpus.iter().map(number).collect()].concat()
}

fn pairs(moves: &[Move]) -> Vec<u64> {
    moves.iter().flat_map(|Move { from, to }| [number(from), number(to)]).collect()
}

fn number(gpu: &GpuId) -> u64 {
    gpu.0.0.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
