//! Socket activation, notifications to systemd, and systemd's file descriptor store. Without systemd,
//! all functions do nothing.
//!
//! A separate thread sends notifications: systemd may read them late, and the scheduling loop must not
//! wait.

pub mod fd_store;
pub mod record;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use fd_store::{EntryName, Inherited, Kind as Stored, StoredConnection, StoredSwapFile};
use libsystemd::activation;
use sd_notify::NotifyState;
use tracing::warn;

use crate::sys::descriptors;
use crate::sys::socket::{self, Kind};

/// Names of the file descriptors in `nvshare.socket` (`FileDescriptorName=`).
const CLIENTS: &str = "clients";
const CONTROL: &str = "control";
const METRICS: &str = "metrics";

/// Time for which an exiting daemon waits for systemd to read its notifications.
const STOP_PATIENCE: Duration = Duration::from_millis(300);

/// The file descriptors that systemd passes to the daemon.
#[derive(Debug, Default)]
pub struct Activated {
    pub clients: Option<OwnedFd>,
    pub control: Option<OwnedFd>,
    /// The sockets for metrics. There may be several: a socket unit can listen on several addresses.
    pub metrics: Vec<OwnedFd>,
    pub stored: Inherited,
    /// Names of passed file descriptors that this version of the daemon does not know.
    pub unknown: Vec<String>,
}

/// Takes over the passed file descriptors. Changes the environment, so it must be called once and
/// before other threads start.
pub fn activated() -> Result<Activated, String> {
    let given = activation::receive_descriptors_with_names(true)
        .map_err(|e| format!("cannot take over the sockets that systemd passed: {e}"))?;
    let mut sockets = Activated::default();
    let mut pairs: BTreeMap<(Stored, u64), (EntryName, Vec<OwnedFd>)> = BTreeMap::new();
    for (descriptor, name) in given {
        // SAFETY: systemd passed this descriptor to this process, and no other code uses it.
        let fd = unsafe { OwnedFd::from_raw_fd(descriptor.into_raw_fd()) };
        if let Some(name) = EntryName::parse(&name) {
            match name.kind {
                _ if descriptors::prepare(fd.as_fd()).is_err() => {}
                Stored::Program => sockets.stored.connections.push(StoredConnection { name, socket: fd, record: None }),
                kind => pairs.entry((kind, name.client)).or_insert((name, Vec::new())).1.push(fd),
            }
            continue;
        }
        let kind = match name.as_str() {
            CLIENTS => Kind::Packets,
            CONTROL => Kind::Stream,
            METRICS => Kind::Metrics,
            _ => {
                warn!("ignoring the unknown descriptor {name:?} from systemd");
                sockets.unknown.push(name);
                continue;
            }
        };
        if !socket::is_listening(fd.as_fd(), kind) {
            return Err(format!(
                "the socket {name:?} from systemd is not a listening socket of the expected type. See nvshare.socket"
            ));
        }
        descriptors::prepare(fd.as_fd())
            .map_err(|e| format!("cannot use the socket {name:?} that systemd passed: {e}"))?;
        match kind {
            Kind::Packets => sockets.clients = Some(fd),
            Kind::Stream => sockets.control = Some(fd),
            Kind::Metrics => sockets.metrics.push(fd),
        }
    }
    for (name, pair) in pairs.into_values() {
        let (mut records, mut others): (Vec<_>, Vec<_>) =
            pair.into_iter().partition(|fd| descriptors::is_in_memory(fd));
        match (name.kind, others.pop(), records.pop()) {
            (Stored::SwapFile, Some(file), Some(record)) => {
                let (file, record) = (file.into(), record.into());
                sockets.stored.swap_files.push(StoredSwapFile { name, file, record });
            }
            (Stored::Lock, Some(socket), record) => {
                sockets.stored.connections.push(StoredConnection { name, socket, record })
            }
            // For example, the lock's caller closed its end while no daemon was running.
            _ => sockets.unknown.push(name.to_string()),
        }
    }
    Ok(sockets)
}

/// A message that the notification thread sends to systemd.
enum Note {
    Say(String),
    /// Stores file descriptors with systemd under a name.
    Keep(String, Vec<OwnedFd>),
    /// Removes the file descriptors with a name from systemd's store.
    Forget(String),
    /// Replies to the sender once all earlier messages have been sent.
    Said(Sender<()>),
}

static NOTES: OnceLock<SyncSender<Note>> = OnceLock::new();

/// Maximum number of queued messages, and of entries that wait to be sent again. Further messages are
/// dropped. A dropped message has mild consequences: a connection is not stored, or a closed
/// connection stays in the store until systemd notices its end.
const MOST_NOTES: usize = 1024;

/// Time after which descriptors that could not be sent are sent again.
const RETRY: Duration = Duration::from_millis(250);

/// Entries for systemd's store that could not be sent. `sendmsg` fails with `ETOOMANYREFS` while
/// more descriptors of the daemon's user than its limit of open files are in flight, which any
/// process of that user can cause. Messages without descriptors are not affected.
#[derive(Default)]
struct Unsent(Vec<(String, Vec<OwnedFd>)>);

impl Unsent {
    fn keep(&mut self, name: String, descriptors: Vec<OwnedFd>) {
        match send_entry(&name, &descriptors) {
            Err(e) if self.0.len() < MOST_NOTES => {
                if self.0.is_empty() {
                    warn!("cannot pass descriptors to systemd: {e}. Trying again");
                }
                self.0.push((name, descriptors));
            }
            Err(e) => warn!("cannot pass descriptors to systemd: {e}"),
            Ok(()) => {}
        }
    }

    fn forget(&mut self, name: &str) -> io::Result<()> {
        self.0.retain(|(unsent, _)| unsent != name);
        sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)])
    }

    fn send_again(&mut self) {
        self.0.retain(|(name, descriptors)| send_entry(name, descriptors).is_err());
    }
}

fn send_entry(name: &str, descriptors: &[OwnedFd]) -> io::Result<()> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
    sd_notify::notify_with_fds(&[NotifyState::FdStore, NotifyState::FdName(name)], &descriptors)
}

/// Sends messages to systemd until the daemon exits.
fn send_all(notes: &Receiver<Note>) {
    let mut unsent = Unsent::default();
    let mut again = Instant::now();
    loop {
        let until_again = again.saturating_duration_since(Instant::now());
        let note = notes.recv_timeout(if unsent.0.is_empty() { Duration::MAX } else { until_again });
        if Instant::now() >= again {
            unsent.send_again();
            again = Instant::now() + RETRY;
        }
        let told = match note {
            Ok(Note::Say(text)) => sd_notify::notify(&[NotifyState::Custom(&text)]),
            Ok(Note::Keep(name, descriptors)) => {
                unsent.keep(name, descriptors);
                Ok(())
            }
            Ok(Note::Forget(name)) => unsent.forget(&name),
            Ok(Note::Said(reply)) => {
                unsent.send_again();
                let _ = reply.send(());
                Ok(())
            }
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if let Err(e) = told {
            warn!("cannot notify systemd: {e}");
        }
    }
}

/// Starts the thread for notifications, if systemd started the daemon.
pub fn start() {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    let (sender, notes) = mpsc::sync_channel(MOST_NOTES);
    match thread::Builder::new().name("systemd".into()).spawn(move || send_all(&notes)) {
        Ok(_) => drop(NOTES.set(sender)),
        Err(e) => warn!("cannot notify systemd: cannot start the thread: {e}"),
    }
}

/// True if systemd started the daemon and listens for notifications.
pub fn is_there() -> bool {
    NOTES.get().is_some()
}

/// Queues a message to systemd. Returns false if the message was dropped.
fn tell(note: impl FnOnce() -> Note) -> bool {
    NOTES.get().is_some_and(|notes| notes.try_send(note()).is_ok())
}

fn say(states: &[NotifyState<'_>]) {
    let _ = tell(|| Note::Say(states.iter().map(|state| state.to_string()).collect::<Vec<_>>().join("\n")));
}

pub fn ready() {
    say(&[NotifyState::Ready]);
}

pub fn status(status: &str) {
    say(&[NotifyState::Status(status)]);
}

pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => say(&[NotifyState::Reloading, now]),
        Err(_) => say(&[NotifyState::Reloading]),
    }
}

/// Notifies systemd that the daemon stops. Waits until all messages have been sent, for at most
/// `STOP_PATIENCE`.
pub fn stopping() {
    say(&[NotifyState::Stopping]);
    let (reply, said) = mpsc::channel();
    let _ = tell(|| Note::Said(reply));
    let _ = said.recv_timeout(STOP_PATIENCE);
}

pub fn watchdog() {
    say(&[NotifyState::Watchdog]);
}

/// The interval for calls of [`watchdog`]: half of systemd's watchdog timeout. `None` if the watchdog
/// is disabled.
pub fn watchdog_period() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|limit| limit / 2)
}

/// Stores file descriptors with systemd under one name, for the next daemon. Returns false if they
/// cannot be stored.
pub fn keep(name: &str, descriptors: &[BorrowedFd<'_>]) -> bool {
    if !is_there() {
        return false;
    }
    let copies: io::Result<Vec<OwnedFd>> = descriptors.iter().map(|fd| fd.try_clone_to_owned()).collect();
    copies.is_ok_and(|copies| tell(|| Note::Keep(name.to_owned(), copies)))
}

/// Removes the descriptors with this name from systemd's store.
pub fn forget(name: &str) {
    let _ = tell(|| Note::Forget(name.to_owned()));
}
