//! Reads the file that `nvshare-scheduler --record` writes, as a list of moves of locks and memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};

use nvshare_sched::{ClientId, Command, Event, GpuId, GpuSet, StuckReason};
use serde::Deserialize;

/// An event of a client, on one GPU or on no GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Move {
    /// The number of the scheduler, from 1.
    pub run: u32,
    pub ms: f64,
    pub client: u64,
    pub pid: u32,
    pub what: &'static str,
    pub bytes: u64,
}

#[derive(Deserialize)]
struct Client {
    client: ClientId,
    pid: u32,
    resumed: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Entry {
    at_ns: u64,
    event: Event,
    commands: Vec<Command>,
}

/// A client's allowance on a GPU, and its mapped bytes.
#[derive(Debug, Default)]
struct Memory {
    allowance: u64,
    mapped: u64,
}

/// Follows a record incrementally.
#[derive(Debug)]
pub struct Record {
    path: PathBuf,
    run: u32,
    file: Option<File>,
    /// The beginning of an incomplete line.
    rest: Vec<u8>,
    /// Each client's process, and whether the client continues from an earlier scheduler.
    clients: BTreeMap<ClientId, (u32, bool)>,
    memory: BTreeMap<(ClientId, GpuId), Memory>,
    moves: Vec<Move>,
}

impl Record {
    /// Opens the record of scheduler number `run`. Possibly the file does not exist yet.
    pub fn new(path: &Path, run: u32) -> Self {
        let (clients, memory) = (BTreeMap::new(), BTreeMap::new());
        Self { path: path.to_owned(), run, file: None, rest: Vec::new(), clients, memory, moves: Vec::new() }
    }

    /// All moves so far.
    ///
    /// # Panics
    /// If the file is not a record.
    pub fn moves(&mut self) -> &[Move] {
        self.read();
        &self.moves
    }

    /// The moves since the last call.
    ///
    /// # Panics
    /// If the file is not a record.
    pub fn new_moves(&mut self) -> Vec<Move> {
        self.read();
        std::mem::take(&mut self.moves)
    }

    fn read(&mut self) {
        if self.file.is_none() {
            match File::open(&self.path) {
                Ok(file) => self.file = Some(file),
                Err(e) if e.kind() == ErrorKind::NotFound => return,
                Err(e) => panic!("cannot open {}: {e}", self.path.display()),
            }
        }
        let file = self.file.as_mut().expect("it was just opened");
        file.read_to_end(&mut self.rest).expect("the record");
        let whole = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let after = self.rest.split_off(whole);
        let lines = std::mem::replace(&mut self.rest, after);
        for line in lines.split_inclusive(|byte| *byte == b'\n') {
            self.line(line);
        }
    }

    fn line(&mut self, line: &[u8]) {
        let wrong = |e: serde_json::Error| -> ! { panic!("{e}: {}", String::from_utf8_lossy(line)) };
        if line.starts_with(b"{\"kind\":\"entry\"") {
            let entry: Entry = serde_json::from_slice(line).unwrap_or_else(|e| wrong(e));
            self.entry(&entry);
        } else if line.starts_with(b"{\"kind\":\"client\"") {
            let Client { client, pid, resumed } = serde_json::from_slice(line).unwrap_or_else(|e| wrong(e));
            self.clients.insert(client, (pid, resumed));
        }
    }

    fn entry(&mut self, entry: &Entry) {
        let ms = entry.at_ns as f64 / 1e6;
        match &entry.event {
            Event::Connected { client, .. } => {
                let resumed = self.clients.get(client).is_some_and(|(_, resumed)| *resumed);
                self.add(ms, *client, if resumed { "resume" } else { "connect" }, 0);
            }
            Event::Attached { client, gpu, .. } => {
                self.memory.insert((*client, *gpu), Memory::default());
                self.add(ms, *client, "attach", 0);
            }
            Event::Held { client, gpus } => self.each(ms, *client, gpus, "held"),
            Event::Requested { client, gpus } => self.each(ms, *client, gpus, "request"),
            Event::Cancelled { client, gpus } => self.each(ms, *client, gpus, "cancel"),
            Event::Released { client, gpus, .. } => self.each(ms, *client, gpus, "release"),
            Event::Stuck { client, gpus, reason: StuckReason::UntrackedWork } => {
                self.each(ms, *client, gpus, "untracked-work")
            }
            Event::Stuck { client, gpus, .. } => self.each(ms, *client, gpus, "stuck"),
            Event::Memory { client, gpu, report } => {
                if let Some(memory) = self.memory.get_mut(&(*client, *gpu)) {
                    let before = std::mem::replace(&mut memory.mapped, report.mapped);
                    if report.mapped < before {
                        self.add(ms, *client, "freed", before - report.mapped);
                    } else if report.mapped > before {
                        self.add(ms, *client, "mapped", report.mapped - before);
                    }
                }
            }
            Event::Detached { client, gpu } => {
                self.memory.remove(&(*client, *gpu));
                self.add(ms, *client, "detach", 0);
            }
            Event::Disconnected { client } => {
                self.memory.retain(|(of, _), _| of != client);
                self.add(ms, *client, "disconnect", 0);
            }
            _ => {}
        }
        entry.commands.iter().for_each(|command| self.command(ms, command));
    }

    fn command(&mut self, ms: f64, command: &Command) {
        match command {
            Command::Grant { client, gpus } => self.each(ms, *client, gpus, "grant"),
            Command::Revoke { client, gpus } => self.each(ms, *client, gpus, "revoke"),
            Command::Undrainable { client, gpus } => self.each(ms, *client, gpus, "undrainable"),
            Command::Allowance { client, gpu, bytes, .. } => {
                if let Some(memory) = self.memory.get_mut(&(*client, *gpu)) {
                    let before = std::mem::replace(&mut memory.allowance, *bytes);
                    let what = match *bytes {
                        bytes if bytes < memory.mapped.min(before) => "evict",
                        bytes if bytes < before => "take-back", // no memory must be evicted
                        _ => "credit",
                    };
                    self.add(ms, *client, what, before.abs_diff(*bytes));
                }
            }
            Command::Reserved { client, bytes, .. } => self.add(ms, *client, "reserved", *bytes),
            Command::MappingFailed { client, bytes, .. } => self.add(ms, *client, "mapping-failed", *bytes),
            Command::EvictionBlocked { client, .. } => self.add(ms, *client, "eviction-blocked", 0),
            Command::PrepareSleep { client, .. } => self.add(ms, *client, "prepare-sleep", 0),
            Command::Awake { client, .. } => self.add(ms, *client, "awake", 0),
            _ => {}
        }
    }

    fn each(&mut self, ms: f64, client: ClientId, gpus: &GpuSet, what: &'static str) {
        gpus.iter().for_each(|_| self.add(ms, client, what, 0));
    }

    fn add(&mut self, ms: f64, client: ClientId, what: &'static str, bytes: u64) {
        let pid = self.clients.get(&client).map_or(0, |(pid, _)| *pid);
        self.moves.push(Move { run: self.run, ms, client: client.0, pid, what, bytes });
    }
}

/// The number of grants to this process.
pub fn grants(moves: &[Move], pid: u32) -> usize {
    moves.iter().filter(|m| m.what == "grant" && m.pid == pid).count()
}

/// The processes that were granted the lock, in the order of the grants.
pub fn turns(moves: &[Move]) -> Vec<u32> {
    moves.iter().filter(|m| m.what == "grant").map(|m| m.pid).collect()
}

/// Bytes that clients were asked to evict.
pub fn evicted(moves: &[Move]) -> u64 {
    moves.iter().filter(|m| m.what == "evict").map(|m| m.bytes).sum()
}

/// The holders after each move that changes them.
pub fn holders(moves: &[Move]) -> Vec<(Move, Vec<u64>)> {
    let mut holders: Vec<u64> = Vec::new();
    let mut run = 0;
    let mut list = Vec::new();
    for m in moves {
        if m.run != run {
            (run, holders) = (m.run, Vec::new());
        }
        match m.what {
            "grant" | "held" => holders.push(m.client),
            // An undrainable client does not count as a holder.
            "release" | "detach" | "disconnect" | "undrainable" => holders.retain(|c| *c != m.client),
            _ => continue,
        }
        list.push((m.clone(), holders.clone()));
    }
    list
}

/// Asserts that no two clients ever held the lock at the same time.
#[track_caller]
pub fn assert_one_holder(moves: &[Move]) {
    for (m, now) in holders(moves) {
        assert!(now.len() <= 1, "clients {now:?} hold the lock at once after {m:?}");
    }
}
