//! A recording as JSON Lines: either a debug bundle or a running record. A debug bundle includes
//! the context that a reader needs. `nvshare-scheduler --record` appends to a running record as
//! events happen. Each line is an object with a `kind`:
//!
//! | kind | number | contents |
//! |---|---|---|
//! | `nvshare-bundle` or `nvshare-record` | first | versions, and the time of creation |
//! | `configuration` | one | settings and rules in effect, with the configuration file's keys |
//! | `status` | one | the output of `nvsharectl status --json` |
//! | `nvml` | one | the newest measurement of each GPU |
//! | `client` | any | a client's process: its id, its unit and its name |
//! | `checkpoint` | one | the machine's state before the first entry |
//! | `entry` | any | an event, its time, and the resulting commands |
//! | `end` | last | the number of entries: a bundle without this line is truncated |
//!
//! A running record has no lines of the kinds `configuration`, `status`, `nvml` and `end`, and its
//! last line may be incomplete. In a running record, the `client` line of a client precedes the
//! client's `connected` event.
//!
//! Times are nanoseconds of `CLOCK_MONOTONIC`. A `present` or `contexts` event lists only the
//! clients whose figures have changed since the previous event of the same kind and GPU. `gone`
//! lists the clients that are no longer measured.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, Write};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::samples::Samples;
use super::{Entry, Recording};
use crate::scheduler::{ClientId, Command, Event, Machine, Time};

/// The version of this format, incremented by every change that older programs cannot read.
pub const FORMAT: u32 = 1;

const BUNDLE: &str = "nvshare-bundle";
const RECORD: &str = "nvshare-record";

/// Versions of the scheduler and its environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Header {
    pub format: u32,
    /// The version of nvshare-scheduler.
    pub version: String,
    /// The oldest and the newest supported version of the clients' protocol.
    pub protocol: (u16, u16),
    /// The host's name and kernel.
    pub host: String,
    pub kernel: String,
    /// The versions of the NVIDIA driver and of NVML, if known.
    pub driver: Option<String>,
    pub nvml: Option<String>,
    /// Time of creation, in microseconds since 1970.
    pub made: u64,
    /// The time of creation on the clock of the entries, in nanoseconds.
    pub now_ns: u64,
    /// Whether the bundle contains names and command lines of programs.
    pub command_lines: bool,
}

impl Header {
    /// Returns the time, since 1970, at which the entries' clock was 0.
    pub fn epoch(&self) -> Duration {
        Duration::from_micros(self.made).saturating_sub(Duration::from_nanos(self.now_ns))
    }
}

/// A client's process, for tables and pictures. Unknown or omitted fields are 0 or empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Process {
    pub client: u64,
    pub pid: i32,
    pub name: String,
    pub unit: String,
    pub container: String,
    /// Whether the client had connected to an earlier scheduler.
    pub resumed: bool,
}

impl Process {
    /// Returns the process's name (or else its unit, container or client id), and its process id.
    pub fn label(&self) -> String {
        let Self { client, pid, name, unit, container, .. } = self;
        let named = [name, unit, container].into_iter().find(|text| !text.is_empty());
        let named = named.cloned().unwrap_or_else(|| format!("client {client}"));
        if *pid > 0 { format!("{named} (PID {pid})") } else { named }
    }
}

/// The contents of a bundle besides the recording.
#[derive(Debug, Clone)]
pub struct Circumstances {
    pub header: Header,
    /// Clients that are connected or have recently ended.
    pub clients: Vec<Process>,
    pub configuration: Value,
    pub status: Value,
    pub nvml: Value,
}

#[derive(Serialize)]
struct Line<T> {
    kind: &'static str,
    #[serde(flatten)]
    content: T,
}

/// A `checkpoint` line to write. Borrows the machine, so that its large state is not copied.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct CheckpointOut<'a> {
    kind: &'static str,
    before_entry: u64,
    machine: &'a Machine,
}

#[derive(Deserialize)]
struct CheckpointIn {
    machine: Machine,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct EntryOut<'a> {
    kind: &'static str,
    number: u64,
    at_ns: u64,
    event: &'a Event,
    #[serde(skip_serializing_if = "<[ClientId]>::is_empty")]
    gone: &'a [ClientId],
    commands: &'a [Command],
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct EntryIn {
    number: u64,
    at_ns: u64,
    event: Event,
    #[serde(default)]
    gone: Vec<ClientId>,
    commands: Vec<Command>,
}

#[derive(Serialize, Deserialize)]
struct End {
    entries: u64,
}

#[derive(Deserialize)]
struct Kind {
    kind: String,
}

pub fn nanos(time: Time) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Writes a bundle.
pub fn write(to: &mut impl Write, circumstances: &Circumstances, recording: &Recording) -> io::Result<()> {
    let Circumstances { header, clients, configuration, status, nvml } = circumstances;
    line(to, &Line { kind: BUNDLE, content: header })?;
    for (kind, content) in [("configuration", configuration), ("status", status), ("nvml", nvml)] {
        line(to, &Line { kind, content })?;
    }
    for client in clients {
        line(to, &Line { kind: "client", content: client })?;
    }
    let checkpoint = recording.checkpoint().map_err(io::Error::other)?;
    line(to, &CheckpointOut { kind: "checkpoint", before_entry: recording.first(), machine: &checkpoint })?;
    let (mut samples, mut entries) = (Samples::default(), 0);
    for entry in recording.entries() {
        let Entry { number, at, event, commands } = entry.map_err(io::Error::other)?;
        let (differences, gone) = samples.reduce(&event);
        let event = differences.as_ref().unwrap_or(&event);
        line(to, &EntryOut { kind: "entry", number, at_ns: nanos(at), event, gone: &gone, commands: &commands })?;
        entries += 1;
    }
    line(to, &Line { kind: "end", content: End { entries } })
}

fn line(to: &mut impl Write, content: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *to, content)?;
    to.write_all(b"\n")
}

/// A running record, which is appended to a file.
#[derive(Debug)]
pub struct RecordFile {
    file: File,
    line: Vec<u8>,
    /// Samples of the whole file. A file has no spans, whereas the recorder's own samples restart
    /// with each span.
    samples: Samples,
}

impl RecordFile {
    /// Writes the first lines. `first` is the number of the next entry.
    pub fn begin(file: File, header: &Header, machine: &Machine, first: u64) -> io::Result<Self> {
        let mut record = Self { file, line: Vec::new(), samples: Samples::default() };
        record.append(&Line { kind: RECORD, content: header })?;
        record.append(&CheckpointOut { kind: "checkpoint", before_entry: first, machine })?;
        Ok(record)
    }

    pub fn client(&mut self, process: &Process) -> io::Result<()> {
        self.append(&Line { kind: "client", content: process })
    }

    pub fn entry(&mut self, number: u64, at: Time, event: &Event, commands: &[Command]) -> io::Result<()> {
        let (differences, gone) = self.samples.reduce(event);
        let event = differences.as_ref().unwrap_or(event);
        self.append(&EntryOut { kind: "entry", number, at_ns: nanos(at), event, gone: &gone, commands })
    }

    /// Appends a line with a single `write`, so that a reader that follows the file sees whole
    /// lines.
    fn append(&mut self, content: &impl Serialize) -> io::Result<()> {
        self.line.clear();
        line(&mut self.line, content)?;
        self.file.write_all(&self.line)
    }
}

/// The parts of a bundle or record that a replay needs.
#[derive(Debug)]
pub struct Bundle<R> {
    pub header: Header,
    pub status: Value,
    /// The state before the first entry.
    pub checkpoint: Machine,
    pub entries: Entries<R>,
}

/// The entries of a bundle, read one by one.
#[derive(Debug)]
pub struct Entries<R> {
    lines: Lines<R>,
    version: String,
    samples: Samples,
    /// The clients named so far, by id.
    pub clients: BTreeMap<u64, Process>,
    /// The number of the line that contains the first entry; 0 before that line was read.
    first_line: usize,
    /// For each `client` line after the first entry, the number of entries before it.
    between: Vec<u64>,
    count: u64,
    /// The number of the last entry.
    last: u64,
    is_over: bool,
}

/// A mistake in a bundle, with its line number.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {text}")]
pub struct ReadError {
    pub line: usize,
    pub text: String,
}

/// Reads a file that [`write`] or a [`RecordFile`] wrote, up to the checkpoint.
pub fn read<R: BufRead>(from: R) -> Result<Bundle<R>, ReadError> {
    let mut lines = Lines { from, number: 0, text: String::new(), is_record: false };
    let header: Header = match lines.next()?.as_deref() {
        Some(BUNDLE) => lines.header()?,
        Some(RECORD) => {
            lines.is_record = true;
            lines.header()?
        }
        _ => {
            return Err(lines.wrong(
                "this file is neither a debug bundle of `nvsharectl debug` nor a record of `nvshare-scheduler \
                 --record`",
            ));
        }
    };
    let version = header.version.clone();
    let (mut status, mut clients) = (Value::Null, BTreeMap::new());
    loop {
        match lines.next()?.as_deref() {
            Some("status") => status = lines.parse(&version)?,
            Some("client") => lines.client(&version, &mut clients)?,
            Some("checkpoint") => {
                let CheckpointIn { machine: checkpoint } = lines.parse(&version)?;
                let (samples, between) = (Samples::default(), Vec::new());
                let entries = Entries {
                    lines,
                    version,
                    samples,
                    clients,
                    first_line: 0,
                    between,
                    count: 0,
                    last: 0,
                    is_over: false,
                };
                return Ok(Bundle { header, status, checkpoint, entries });
            }
            Some("entry" | "end") => return Err(lines.wrong("a line of kind checkpoint must precede this line")),
            // Skips lines that only people read, and lines of later versions.
            Some(_) => {}
            None => return Err(lines.cut_off()),
        }
    }
}

impl<R: BufRead> Entries<R> {
    /// Returns the line number of the entry with the index `at`.
    pub fn line(&self, at: usize) -> usize {
        self.first_line + at + self.between.iter().filter(|before| **before <= at as u64).count()
    }

    /// Reads the next entry. Returns `None` after a bundle's last line, and at the end of a record.
    fn read(&mut self) -> Result<Option<Entry>, ReadError> {
        loop {
            match self.lines.next()?.as_deref() {
                Some("entry") => {
                    let EntryIn { number, at_ns, event, gone, commands } = self.lines.parse(&self.version)?;
                    if self.count == 0 {
                        self.first_line = self.lines.number;
                    } else if number != self.last + 1 {
                        let text = format!("entry {number} follows entry {}: entries are missing", self.last);
                        return Err(self.lines.wrong(&text));
                    }
                    (self.count, self.last) = (self.count + 1, number);
                    let event = self.samples.restore(event, &gone);
                    return Ok(Some(Entry { number, at: Time::from_nanos(at_ns), event, commands }));
                }
                Some("end") => {
                    let End { entries } = self.lines.parse(&self.version)?;
                    if entries != self.count {
                        let text = format!("the last line says {entries} entries, but the file has {}", self.count);
                        return Err(self.lines.wrong(&text));
                    }
                    return Ok(None);
                }
                Some("client") => {
                    self.lines.client(&self.version, &mut self.clients)?;
                    self.between.extend((self.count > 0).then_some(self.count));
                }
                Some(_) => {}
                None if self.lines.is_record => return Ok(None),
                None => return Err(self.lines.cut_off()),
            }
        }
    }
}

impl<R: BufRead> Iterator for Entries<R> {
    type Item = Result<Entry, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_over {
            return None;
        }
        let next = self.read().transpose();
        self.is_over = !matches!(next, Some(Ok(_)));
        next
    }
}

#[derive(Debug)]
struct Lines<R> {
    from: R,
    number: usize,
    text: String,
    is_record: bool,
}

impl<R: BufRead> Lines<R> {
    /// Reads the next line and returns its kind, or `None` at the end of the file. A record's last
    /// line may be incomplete, because the scheduler is still writing it or the disk was full.
    fn next(&mut self) -> Result<Option<String>, ReadError> {
        self.text.clear();
        self.number += 1;
        match self.from.read_line(&mut self.text) {
            Ok(read) if read == 0 || (self.is_record && !self.text.ends_with('\n')) => {
                self.number -= 1;
                return Ok(None);
            }
            Ok(_) => {}
            Err(e) => return Err(self.wrong(&format!("cannot be read: {e}"))),
        }
        let kind: Result<Kind, _> = serde_json::from_str(&self.text);
        match kind {
            Ok(Kind { kind }) => Ok(Some(kind)),
            Err(_) if self.number == 1 => Ok(Some(String::new())),
            Err(e) => Err(self.wrong(&format!("this line is not an object with a kind: {}", cause(&e)))),
        }
    }

    fn header(&self) -> Result<Header, ReadError> {
        #[derive(Deserialize)]
        struct Format {
            format: u32,
            version: String,
        }
        let wrong = |e: serde_json::Error| self.wrong(&cause(&e));
        let Format { format, version } = serde_json::from_str(&self.text).map_err(wrong)?;
        if format != FORMAT {
            let text = format!(
                "this bundle has format {format}, but this nvsharectl reads format {FORMAT}. Use nvsharectl {version}"
            );
            return Err(self.wrong(&text));
        }
        serde_json::from_str(&self.text).map_err(wrong)
    }

    fn client(&self, version: &str, clients: &mut BTreeMap<u64, Process>) -> Result<(), ReadError> {
        let process: Process = self.parse(version)?;
        clients.insert(process.client, process);
        Ok(())
    }

    fn parse<T: for<'de> Deserialize<'de>>(&self, version: &str) -> Result<T, ReadError> {
        serde_json::from_str(&self.text).map_err(|e| {
            let own = env!("CARGO_PKG_VERSION");
            let hint = match version == own {
                true => String::new(),
                false => format!(
                    " (the bundle is from version {version}, but this nvsharectl is version {own}. Use nvsharectl \
                     {version})"
                ),
            };
            self.wrong(&format!("{}{hint}", cause(&e)))
        })
    }

    fn cut_off(&self) -> ReadError {
        ReadError { line: self.number + 1, text: "the file is truncated: its last line must be of kind end".into() }
    }

    fn wrong(&self, text: &str) -> ReadError {
        ReadError { line: self.number.max(1), text: text.to_owned() }
    }
}

/// Formats the error without serde_json's line number, which is always 1 here.
fn cause(error: &serde_json::Error) -> String {
    error.to_string().replace(" at line 1 column ", ", at column ")
}
