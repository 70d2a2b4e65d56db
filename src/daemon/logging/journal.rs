//! Passes log lines to the journal. The thread that logs a line queues a [`Line`], which contains
//! the fields' values as text, and continues. A separate thread passes the lines to
//! tracing-journald, which writes the fields by name (`NVSHARE_CLIENT=`, `NVSHARE_GPU=`, …), with
//! the `MESSAGE_ID` that the catalog explains.
//!
//! Writing blocks while journald does not read. If journald falls far behind, lines are dropped and
//! counted, so the scheduling loop never waits.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender, TrySendError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use tracing::field::{Field, Value, Visit};
use tracing::{Event, Metadata, Subscriber, warn};
use tracing_journald::{Priority, PriorityMappings};
use tracing_subscriber::layer::{Context, Layered, SubscriberExt};
use tracing_subscriber::{Layer, Registry};

use super::messages;

const IDENTIFIER: &str = "nvshare-scheduler";
/// The prefix of the names of nvshare's own fields.
const PREFIX: &str = "NVSHARE";
/// Maximum number of queued lines that journald has not read.
const MAX_WAITING: usize = 4096;
/// Maximum length of a value in bytes. Longer values are truncated.
const MAX_VALUE: usize = 4096;
/// Time for which an exiting daemon waits for its last lines to be written.
const FLUSH_PATIENCE: Duration = Duration::from_millis(300);

/// One log line: its metadata (level, location, names of the fields), and the values of these fields in
/// the same order.
#[derive(Debug)]
struct Line {
    metadata: &'static Metadata<'static>,
    values: Vec<Option<String>>,
}

#[derive(Debug)]
enum Entry {
    Line(Line),
    /// Replies once all earlier lines have been written.
    Flush(mpsc::Sender<()>),
}

/// The tracing layer that passes lines to the thread.
#[derive(Debug)]
pub struct Journal(Sender);

/// The sending end of the queue of lines to the thread.
#[derive(Debug, Clone)]
pub struct Sender {
    entries: SyncSender<Entry>,
    /// Number of lines dropped since the last report of dropped lines.
    lost: Arc<AtomicU64>,
    /// The receiving end of the queue. `None` once the thread has started.
    waiting: Arc<Mutex<Option<Receiver<Entry>>>>,
}

impl Sender {
    /// Starts the thread. Until then, lines are queued.
    pub fn begin(&self) {
        self.begin_with(Writer { open: journald, by_id: HashMap::new() });
    }

    fn begin_with<L: Layer<Registry> + Send>(&self, mut writer: Writer<L>) {
        let Some(entries) = self.waiting.lock().ok().and_then(|mut waiting| waiting.take()) else { return };
        let lost = self.lost.clone();
        let run = move || {
            write_all(entries, &mut writer, &lost, |left_out| {
                let text = "log lines were lost: the journal did not accept them in time";
                warn!(name: "log-lines-lost", left_out, "{left_out} {text}");
            });
        };
        // Without the thread, no line is written, so a failure to start it cannot be reported either.
        let _ = thread::Builder::new().name("journal".into()).spawn(run);
    }

    /// Waits for at most `FLUSH_PATIENCE` until earlier lines have been written.
    pub fn flush(&self) {
        self.begin();
        let (reply, flushed) = mpsc::channel();
        if self.entries.try_send(Entry::Flush(reply)).is_ok() {
            let _ = flushed.recv_timeout(FLUSH_PATIENCE);
        }
    }
}

/// Writes queued lines until the queue is closed. Reports lost lines after a line that the journal
/// accepts. A report is a line too: after a failure, it would fail and be reported for ever.
fn write_all<L: Layer<Registry>>(
    entries: impl IntoIterator<Item = Entry>,
    writer: &mut Writer<L>,
    lost: &AtomicU64,
    report: impl Fn(u64),
) {
    for entry in entries {
        match entry {
            Entry::Line(line) if writer.write(&line).is_err() => drop(lost.fetch_add(1, Ordering::Relaxed)),
            // The queue has room again for a report, which follows the lines that are already queued.
            Entry::Line(_) => match lost.swap(0, Ordering::Relaxed) {
                0 => {}
                left_out => report(left_out),
            },
            Entry::Flush(reply) => drop(reply.send(())),
        }
    }
}

/// Connects to the journal.
///
/// # Errors
/// Journald is not running.
pub fn connect() -> io::Result<(Journal, Sender)> {
    tracing_journald::layer()?;
    Ok(channel())
}

fn channel() -> (Journal, Sender) {
    let (entries, waiting) = mpsc::sync_channel(MAX_WAITING);
    let sender = Sender { entries, lost: Arc::default(), waiting: Arc::new(Mutex::new(Some(waiting))) };
    (Journal(sender.clone()), sender)
}

impl<S: Subscriber> Layer<S> for Journal {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let mut line = Line { metadata, values: vec![None; metadata.fields().len()] };
        event.record(&mut line);
        match self.0.entries.try_send(Entry::Line(line)) {
            Err(TrySendError::Full(_)) => drop(self.0.lost.fetch_add(1, Ordering::Relaxed)),
            Ok(()) | Err(TrySendError::Disconnected(_)) => {}
        }
    }
}

impl Line {
    fn put(&mut self, field: &Field, mut value: String) {
        value.truncate(value.floor_char_boundary(MAX_VALUE));
        if let Some(place) = self.values.get_mut(field.index()) {
            *place = Some(value);
        }
    }
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}"));
    }
}

/// Creates a tracing-journald layer whose constant fields include the message ID.
fn journald(id: Option<&'static str>) -> io::Result<tracing_journald::Layer> {
    let priorities =
        PriorityMappings { info: Priority::Informational, debug: Priority::Debug, ..PriorityMappings::new() };
    let layer = tracing_journald::layer()?
        .with_field_prefix(Some(PREFIX.into()))
        .with_syslog_identifier(IDENTIFIER.into())
        .with_priority_mappings(priorities);
    Ok(layer.with_custom_fields(id.map(|id| ("MESSAGE_ID", id))))
}

/// Writes lines to the journal. A layer writes the same constant fields with every line, so each
/// message ID has its own layer.
///
/// The layers are called directly. If the layers were dispatchers of tracing, every thread would
/// query them about each line, even about lines that are not logged.
struct Writer<L> {
    open: fn(Option<&'static str>) -> io::Result<L>,
    by_id: HashMap<Option<&'static str>, Layered<L, Registry>>,
}

impl<L: Layer<Registry>> Writer<L> {
    fn write(&mut self, line: &Line) -> io::Result<()> {
        use std::collections::hash_map::Entry::{Occupied, Vacant};

        let layer = match self.by_id.entry(messages::id(line.metadata.name())) {
            Occupied(known) => known.into_mut(),
            Vacant(new) => {
                let layer = (self.open)(*new.key())?;
                new.insert(tracing_subscriber::registry().with(layer))
            }
        };
        let values: Vec<Option<&dyn Value>> =
            line.values.iter().map(|value| value.as_ref().map(|value| value as &dyn Value)).collect();
        layer.event(&Event::new(line.metadata, &line.metadata.fields().value_set_all(&values)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::mpsc::Sender as Channel;

    use super::*;

    /// A line in the form that journald would receive.
    #[derive(Debug, Default)]
    struct Written(BTreeMap<String, String>);

    impl Visit for Written {
        fn record_str(&mut self, field: &Field, value: &str) {
            self.0.insert(field.name().to_owned(), value.to_owned());
        }

        fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
            panic!("{field} is no text: {value:?}");
        }
    }

    /// Stands in for journald. The stand-in reads only while `STUCK` is not locked.
    struct Reader {
        id: Option<&'static str>,
        lines: Lines,
    }

    type Lines = Channel<(Option<&'static str>, Written)>;
    static READER: Mutex<Option<Lines>> = Mutex::new(None);
    /// Locked to simulate a journald that does not read.
    static STUCK: Mutex<()> = Mutex::new(());

    impl<S: Subscriber> Layer<S> for Reader {
        fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
            drop(STUCK.lock());
            let mut written = Written::default();
            event.record(&mut written);
            let _ = self.lines.send((self.id, written));
        }
    }

    fn reader(id: Option<&'static str>) -> io::Result<Reader> {
        let lines = READER.lock().expect("the channel").clone();
        lines.map(|lines| Reader { id, lines }).ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    #[test]
    fn a_journal_that_accepts_nothing_is_sent_no_reports() {
        let (journal, sender) = channel();
        let entries = sender.waiting.lock().expect("the queue").take().expect("not begun");
        tracing::subscriber::with_default(tracing_subscriber::registry().with(journal), || {
            (0..3).for_each(|i| tracing::info!("line {i}"));
        });
        let reports = Mutex::new(Vec::new());
        let report = |left_out| reports.lock().expect("no panic").push(left_out);
        let fails = |_: Option<&'static str>| io::Result::<Reader>::Err(io::ErrorKind::NotFound.into());
        let mut lines = entries.try_iter();
        write_all(lines.by_ref().take(2), &mut Writer { open: fails, by_id: HashMap::new() }, &sender.lost, report);
        assert_eq!(*reports.lock().expect("no panic"), [0u64; 0]);
        let accepts = |id| Ok(Reader { id, lines: mpsc::channel().0 });
        write_all(lines, &mut Writer { open: accepts, by_id: HashMap::new() }, &sender.lost, report);
        assert_eq!(*reports.lock().expect("no panic"), [2]);
    }

    /// Tests two behaviours in one test, because both use the same statics.
    #[test]
    fn lines_keep_their_fields_and_a_stuck_journal_blocks_no_thread() {
        let (lines, written) = mpsc::channel();
        *READER.lock().expect("the channel") = Some(lines);
        let (journal, sender) = channel();
        let subscriber = tracing_subscriber::registry().with(journal);
        let stuck = STUCK.lock().expect("no panic");
        sender.begin_with(Writer { open: reader, by_id: HashMap::new() });
        tracing::subscriber::with_default(subscriber, || {
            let unit = "jupyter.service";
            tracing::info!(name: "client-connected", client = 7, unit, gpu = ?Some("GPU-1"), "two\nlines of {}", "it");
            tracing::error!(bytes = 1u64 << 40, absent = None::<u32>, "{}", "ö".repeat(MAX_VALUE));
            (0..3 * MAX_WAITING).for_each(|i| tracing::info!("line {i}"));
        });
        assert!(sender.lost.load(Ordering::Relaxed) >= MAX_WAITING as u64, "it did not wait");
        drop(stuck);
        let (id, Written(first)) = written.recv().expect("a line");
        assert_eq!(id, messages::id("client-connected"));
        let expected =
            [("message", "two\nlines of it"), ("client", "7"), ("unit", "jupyter.service"), ("gpu", "Some(\"GPU-1\")")];
        assert_eq!(first, expected.map(|(name, value)| (name.to_owned(), value.to_owned())).into());
        let (id, Written(second)) = written.recv().expect("a line");
        assert_eq!((id, second["bytes"].as_str(), second.get("absent")), (None, "1099511627776", None));
        assert!(second["message"].len() <= MAX_VALUE);
        let (_, Written(third)) = written.recv().expect("a line");
        assert_eq!(third["message"], "line 0");
    }
}
