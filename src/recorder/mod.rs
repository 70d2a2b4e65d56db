//! The flight recorder keeps the newest events and commands of the state machine, and the machine's
//! state before the first of these events. The machine returns the same commands for the same
//! events, so a recording can be replayed.
//!
//! - This file: the [`Recorder`], which receives every event from the daemon.
//! - `samples`: stores each measurement as differences from the previous one, because a measurement
//!   lists all clients of a GPU.
//! - [`bundle`]: writes a recording to a file, for a bug report or continuously.
//! - [`replay`]: computes figures from a recording, and checks that the machine still makes the
//!   same decisions.
//! - [`follow`]: reads a growing recording bit by bit, for a picture of the last minutes.
//! - `movement`: infers when memory moved.
//!
//! The recording is a sequence of spans. Each span consists of a checkpoint of the machine and the
//! entries after it. Only whole spans are dropped from the front, so a recording always begins with
//! a checkpoint. Entries are appended to one buffer in a compact encoding, usually without an
//! allocation. Taking a [`Recording`] copies the newest span and shares the others. Another thread
//! decodes the recording. With `nvshare-scheduler --record`, the recorder also writes everything to
//! a file.

pub mod bundle;
pub mod follow;
mod movement;
pub mod replay;
mod samples;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::Arc;

use bundle::{Header, Process, RecordFile};
use postcard::ser_flavors::Flavor;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::scheduler::{ClientId, Command, Event, Machine, Time};
use samples::Samples;

/// The minimum number of entries kept, unless these entries need more than [`MOST_BYTES`].
pub const ENTRIES: u64 = 10_000;
/// After this many entries or bytes, the span ends and the recorder takes a checkpoint.
const SPAN_ENTRIES: u64 = 5_000;
const SPAN_BYTES: usize = 4 << 20;
/// Maximum size of the recording in memory, including its checkpoints. A single entry may exceed
/// this size. Most entries need about 100 bytes, and an entry that changes the limits of 1,000
/// clients needs 40 KB. [`Samples`] needs another 100 bytes per client and GPU.
const MOST_BYTES: usize = 16 << 20;
/// The buffer grows in steps of this size instead of doubling.
const GROWTH: usize = 256 << 10;

/// An event and the resulting commands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The number of the entry. The first entry after the machine was created is number 1.
    pub number: u64,
    pub at: Time,
    pub event: Event,
    pub commands: Vec<Command>,
}

/// Keeps the newest entries.
#[derive(Debug)]
pub struct Recorder {
    closed: VecDeque<Arc<Span>>,
    open: Span,
    samples: Samples,
    file: Option<RecordFile>,
    /// The event that the machine is handling, for the file.
    begun: Option<(Time, Event)>,
}

/// A checkpoint and the entries after it, encoded.
#[derive(Debug, Clone)]
struct Span {
    checkpoint: Arc<[u8]>,
    /// The number of the span's first entry.
    first: u64,
    count: u64,
    entries: Vec<u8>,
}

/// The part of an entry that is written before the machine handles the event. The commands are
/// appended afterwards.
#[derive(Debug, Serialize)]
struct Head<'a> {
    at: Time,
    event: &'a Event,
    gone: &'a [ClientId],
}

#[derive(Debug, Deserialize)]
struct Stored {
    at: Time,
    event: Event,
    gone: Vec<ClientId>,
    commands: Vec<Command>,
}

impl Recorder {
    /// Begins a recording with the current state of `machine`.
    pub fn new(machine: &Machine) -> Self {
        Self {
            closed: VecDeque::new(),
            open: Span::new(machine, 1),
            samples: Samples::default(),
            file: None,
            begun: None,
        }
    }

    /// Also writes all future entries to `file`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_to(&mut self, file: File, header: &Header, machine: &Machine) -> io::Result<()> {
        self.file = Some(RecordFile::begin(file, header, machine, self.open.first + self.open.count)?);
        Ok(())
    }

    /// Writes a client's process to the file, if there is one.
    pub fn name(&mut self, process: impl FnOnce() -> Process) {
        self.append(|file| file.client(&process()));
    }

    /// Records an event before `machine` handles it. [`Self::finish`] must follow.
    pub fn begin(&mut self, machine: &Machine, now: Time, event: &Event) {
        if self.open.is_full() {
            self.close(machine);
        }
        let (differences, gone) = self.samples.reduce(event);
        self.open.put(&Head { at: now, event: differences.as_ref().unwrap_or(event), gone: &gone });
        self.begun = self.file.is_some().then(|| (now, event.clone()));
    }

    /// Records the commands that result from the event.
    pub fn finish(&mut self, commands: &[Command]) {
        self.open.put(&commands);
        if let Some((now, event)) = self.begun.take() {
            let number = self.open.first + self.open.count;
            self.append(|file| file.entry(number, now, &event, commands));
        }
        self.open.count += 1;
    }

    /// Appends to the file, and ends the record if that fails. A full disk must not stop the
    /// scheduler, and a record with a gap cannot be replayed.
    fn append(&mut self, write: impl FnOnce(&mut RecordFile) -> io::Result<()>) {
        if let Some(file) = &mut self.file
            && let Err(e) = write(file)
        {
            warn!("cannot continue the record: {e}");
            self.file = None;
        }
    }

    /// Returns a copy of the recording, which another thread can decode.
    pub fn recording(&self) -> Recording {
        Recording { spans: self.closed.iter().cloned().chain([Arc::new(self.open.clone())]).collect() }
    }

    /// Returns the recording's size in memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.closed.iter().map(|span| span.bytes()).sum::<usize>() + self.open.bytes()
    }

    /// Begins a new span. Drops the oldest spans that [`ENTRIES`] does not require, and more of
    /// them while the recording exceeds [`MOST_BYTES`].
    fn close(&mut self, machine: &Machine) {
        let next = Span::new(machine, self.open.first + self.open.count);
        let mut full = std::mem::replace(&mut self.open, next);
        full.entries.shrink_to_fit();
        self.closed.push_back(Arc::new(full));
        self.samples = Samples::default();
        let room = MOST_BYTES.saturating_sub(SPAN_BYTES + GROWTH + self.open.checkpoint.len());
        let next = self.open.first;
        let is_dispensable = |oldest: &Span| next - (oldest.first + oldest.count) >= ENTRIES;
        while let Some(oldest) = self.closed.front()
            && (is_dispensable(oldest) || self.closed.iter().map(|span| span.bytes()).sum::<usize>() > room)
        {
            self.closed.pop_front();
        }
    }
}

impl Span {
    fn new(machine: &Machine, first: u64) -> Self {
        let mut checkpoint = Vec::new();
        encode(machine, &mut checkpoint);
        Self { checkpoint: checkpoint.into(), first, count: 0, entries: Vec::new() }
    }

    fn is_full(&self) -> bool {
        self.count >= SPAN_ENTRIES || self.entries.len() >= SPAN_BYTES
    }

    fn bytes(&self) -> usize {
        self.checkpoint.len() + self.entries.capacity()
    }

    fn put(&mut self, value: &impl Serialize) {
        encode(value, &mut self.entries);
    }
}

/// A copy of the recording, up to the time of the copy.
#[derive(Debug, Clone)]
pub struct Recording {
    spans: Vec<Arc<Span>>,
}

impl Recording {
    /// The number of the first entry.
    pub fn first(&self) -> u64 {
        self.spans.first().map_or(1, |span| span.first)
    }

    /// The state before the first entry.
    pub fn checkpoint(&self) -> Result<Machine, String> {
        let oldest = self.spans.first().ok_or("nothing was recorded")?;
        postcard::from_bytes(&oldest.checkpoint).map_err(unreadable)
    }

    /// Decodes the entries one at a time. A decoded entry contains all clients of its measurement,
    /// so it is much larger than the stored entry.
    pub fn entries(&self) -> impl Iterator<Item = Result<Entry, String>> {
        self.spans.iter().flat_map(|span| {
            let mut position = Position::of(span);
            std::iter::from_fn(move || position.next(span))
        })
    }
}

/// A position in a span.
#[derive(Debug)]
struct Position {
    /// The number of the span's first entry, which identifies the span.
    span: u64,
    /// The number of the next entry.
    number: u64,
    /// The place of the next entry in the span's bytes.
    offset: usize,
    samples: Samples,
}

impl Position {
    /// The beginning of a span.
    fn of(span: &Span) -> Self {
        Self { span: span.first, number: span.first, offset: 0, samples: Samples::default() }
    }

    /// Decodes the next entry. `None` at the end of the span.
    fn next(&mut self, span: &Span) -> Option<Result<Entry, String>> {
        let rest = span.entries.get(self.offset..).filter(|_| self.number < span.first + span.count)?;
        let (stored, after): (Stored, _) = match postcard::take_from_bytes(rest) {
            Ok(taken) => taken,
            Err(e) => {
                self.number = u64::MAX; // nothing after a damaged entry can be decoded
                return Some(Err(unreadable(e)));
            }
        };
        self.offset += rest.len() - after.len();
        let event = self.samples.restore(stored.event, &stored.gone);
        let number = self.number;
        self.number += 1;
        Some(Ok(Entry { number, at: stored.at, event, commands: stored.commands }))
    }
}

fn unreadable(error: postcard::Error) -> String {
    format!("cannot read the recording: {error}")
}

/// Appends a value.
fn encode(value: &(impl Serialize + ?Sized), to: &mut Vec<u8>) {
    // postcard fails only for sequences of unknown length, which these types do not contain.
    let written = postcard::serialize_with_flavor(value, Append(to));
    debug_assert!(written.is_ok(), "{written:?}");
}

/// Appends postcard's output to a buffer.
struct Append<'a>(&'a mut Vec<u8>);

impl Append<'_> {
    fn reserve(&mut self, more: usize) {
        if self.0.capacity() - self.0.len() < more {
            self.0.reserve_exact(more.max(GROWTH));
        }
    }
}

impl Flavor for Append<'_> {
    type Output = ();

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.reserve(1);
        self.0.push(byte);
        Ok(())
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.reserve(bytes.len());
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}
