//! Log lines as native entries of the journal: each field by its name (`NVSHARE_CLIENT=`, `NVSHARE_GPU=`, …), and the
//! `MESSAGE_ID` that the catalog explains. A thread sends them, since journald may read late: if it falls far behind,
//! lines are dropped and counted, and the scheduling loop never waits.

use std::fmt::{self, Write as _};
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

use super::messages;

pub const SOCKET: &str = "/run/systemd/journal/socket";
const IDENTIFIER: &str = "nvshare-scheduler";
/// The prefix of the names of our own fields.
const PREFIX: &str = "NVSHARE_";
/// Lines that may wait for journald.
const MAX_WAITING: usize = 4096;
/// Longer values are cut.
const MAX_VALUE: usize = 4096;
/// Time that a daemon which ends waits for its last lines to be read.
const FLUSH_PATIENCE: Duration = Duration::from_millis(300);

#[derive(Debug)]
enum Entry {
    Line(Vec<u8>),
    /// Everything before this has been sent.
    Flush(mpsc::Sender<()>),
}

/// The layer that makes entries of events.
#[derive(Debug)]
pub struct Journal {
    sender: Sender,
    left_out: AtomicU64,
}

/// The way of entries to the journal.
#[derive(Clone)]
pub struct Sender {
    entries: SyncSender<Entry>,
    /// The socket and the entries for the thread, until it is started.
    waiting: Arc<Mutex<Option<Waiting>>>,
}

#[derive(Debug)]
struct Waiting {
    socket: UnixDatagram,
    path: PathBuf,
    entries: Receiver<Entry>,
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sender")
    }
}

impl Sender {
    /// Starts the thread; until then entries are kept.
    pub fn begin(&self) {
        let waiting = self.waiting.lock().ok().and_then(|mut waiting| waiting.take());
        let Some(Waiting { socket, path, entries }) = waiting else { return };
        let run = move || {
            for entry in entries {
                match entry {
                    // By the socket's path, so that a restarted journal receives the next line.
                    Entry::Line(line) => drop(socket.send_to(&line, &path)),
                    Entry::Flush(reply) => drop(reply.send(())),
                }
            }
        };
        // Without a thread there is no log, and no way to report that.
        let _ = thread::Builder::new().name("journal".into()).spawn(run);
    }

    /// Waits a moment until what was logged has been sent.
    pub fn flush(&self) {
        self.begin();
        let (reply, flushed) = mpsc::channel();
        if self.entries.try_send(Entry::Flush(reply)).is_ok() {
            let _ = flushed.recv_timeout(FLUSH_PATIENCE);
        }
    }
}

/// Connects to the journal.
pub fn connect(path: &Path) -> io::Result<(Journal, Sender)> {
    UnixDatagram::unbound()?.connect(path)?;
    let socket = UnixDatagram::unbound()?;
    let (sender, entries) = mpsc::sync_channel(MAX_WAITING);
    let waiting = Waiting { socket, path: path.into(), entries };
    let sender = Sender { entries: sender, waiting: Arc::new(Mutex::new(Some(waiting))) };
    Ok((Journal { sender: sender.clone(), left_out: AtomicU64::new(0) }, sender))
}

impl<S: Subscriber> Layer<S> for Journal {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let line = entry(event, self.left_out.load(Ordering::Relaxed));
        match self.sender.entries.try_send(Entry::Line(line)) {
            Ok(()) => self.left_out.store(0, Ordering::Relaxed),
            Err(TrySendError::Full(_)) => drop(self.left_out.fetch_add(1, Ordering::Relaxed)),
            Err(TrySendError::Disconnected(_)) => {}
        }
    }
}

fn entry(event: &Event<'_>, left_out: u64) -> Vec<u8> {
    let metadata = event.metadata();
    let mut entry = Writer(Vec::with_capacity(512));
    let priority = match *metadata.level() {
        Level::ERROR => "3",
        Level::WARN => "4",
        Level::INFO => "6",
        _ => "7",
    };
    entry.put("PRIORITY", priority);
    entry.put("SYSLOG_IDENTIFIER", IDENTIFIER);
    if let Some(id) = messages::id(metadata.name()) {
        entry.put("MESSAGE_ID", id);
    }
    if let (Some(file), Some(line)) = (metadata.file(), metadata.line()) {
        entry.put("CODE_FILE", file);
        entry.put("CODE_LINE", &line.to_string());
    }
    if left_out > 0 {
        entry.put("NVSHARE_LEFT_OUT", &left_out.to_string());
    }
    event.record(&mut entry);
    entry.0
}

/// Writes fields in the journal's form: the name, a newline, the length in eight bytes, the value, a newline.
struct Writer(Vec<u8>);

impl Writer {
    fn put(&mut self, name: &str, value: &str) {
        let end = (0..=value.len().min(MAX_VALUE)).rev().find(|at| value.is_char_boundary(*at)).unwrap_or(0);
        let value = value.as_bytes().get(..end).unwrap_or_default();
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(b'\n');
        self.0.extend_from_slice(&(value.len() as u64).to_le_bytes());
        self.0.extend_from_slice(value);
        self.0.push(b'\n');
    }

    fn put_field(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.put("MESSAGE", value),
            name => {
                let upper: String = name
                    .chars()
                    .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' })
                    .collect();
                self.put(&format!("{PREFIX}{upper}"), value);
            }
        }
    }
}

impl Visit for Writer {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put_field(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let mut text = String::new();
        let _ = write!(text, "{value:?}");
        self.put_field(field, &text);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    fn fields(mut entry: &[u8]) -> BTreeMap<String, String> {
        let mut fields = BTreeMap::new();
        while let Some(end) = entry.iter().position(|b| *b == b'\n') {
            let name = String::from_utf8(entry[..end].to_vec()).expect("ASCII");
            let (length, rest) = entry[end + 1..].split_first_chunk().expect("a length");
            let (value, rest) = rest.split_at(u64::from_le_bytes(*length) as usize);
            assert_eq!(rest[0], b'\n');
            fields.insert(name, String::from_utf8(value.to_vec()).expect("UTF-8"));
            entry = &rest[1..];
        }
        fields
    }

    #[test]
    fn an_entry_has_its_fields_by_name_and_its_id() {
        let directory = std::env::temp_dir().join(format!("nvshare-journal-{}", std::process::id()));
        let _ = std::fs::remove_file(&directory);
        let journald = UnixDatagram::bind(&directory).expect("a socket");
        let (journal, sender) = connect(&directory).expect("it listens");
        let subscriber = tracing_subscriber::registry().with(journal);
        tracing::subscriber::with_default(subscriber, || {
            let unit = "jupyter.service";
            tracing::info!(name: "client-connected", client = 7, unit, gpu = ?Some("GPU-1"), "two\nlines of {}", "it");
            tracing::error!(bytes = 1u64 << 40, "{}", "ö".repeat(MAX_VALUE));
        });
        sender.flush();
        let mut buffer = [0; 16 << 10];
        let mut receive = || {
            let n = journald.recv(&mut buffer).expect("an entry");
            fields(&buffer[..n])
        };
        let first = receive();
        let expected = [
            ("MESSAGE", "two\nlines of it"),
            ("MESSAGE_ID", messages::id("client-connected").expect("an id")),
            ("PRIORITY", "6"),
            ("SYSLOG_IDENTIFIER", "nvshare-scheduler"),
            ("NVSHARE_CLIENT", "7"),
            ("NVSHARE_UNIT", "jupyter.service"),
        ];
        for (name, value) in expected {
            assert_eq!(first[name], value);
        }
        assert!(first.contains_key("CODE_FILE") && !first.contains_key("NVSHARE_LEFT_OUT"));
        let second = receive();
        assert_eq!((second["PRIORITY"].as_str(), second["NVSHARE_BYTES"].as_str()), ("3", "1099511627776"));
        assert!(second["MESSAGE"].len() <= MAX_VALUE && !second.contains_key("MESSAGE_ID"));
        let _ = std::fs::remove_file(&directory);
    }

    #[test]
    fn a_journal_that_does_not_read_holds_nobody_up() {
        let path = std::env::temp_dir().join(format!("nvshare-journal-full-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let _journald = UnixDatagram::bind(&path).expect("a socket");
        let (journal, sender) = connect(&path).expect("it listens");
        let subscriber = tracing_subscriber::registry().with(journal);
        tracing::subscriber::with_default(subscriber, || {
            (0..3 * MAX_WAITING).for_each(|i| tracing::info!("line {i}"));
        });
        sender.flush();
        let _ = std::fs::remove_file(&path);
    }
}
