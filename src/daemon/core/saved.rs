//! Orders for the next daemon, saved in the directory that systemd provides (`StateDirectory=`).
//! Saved orders are valid until the host reboots. Without such a directory, orders end with the
//! daemon.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::mpsc::{self, Sender};
use std::thread;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tracing::warn;

use crate::sys::atomic_file;

/// The kernel's ID of the present boot.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// A set of orders, and the thread that saves it. Writing to disk can be slow.
#[derive(Debug)]
pub struct Saved<T> {
    pub all: BTreeSet<T>,
    saver: Option<Sender<(String, oneshot::Sender<()>)>>,
}

/// Completes once a change has been saved, or saving has failed. The thread logs failures.
pub type Saving = oneshot::Receiver<()>;

impl<T> Default for Saved<T> {
    fn default() -> Self {
        Self { all: BTreeSet::new(), saver: None }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Text<T: Ord> {
    pub boot: String,
    pub all: BTreeSet<T>,
}

pub(super) fn boot() -> String {
    std::fs::read_to_string(BOOT).unwrap_or_default().trim().to_owned()
}

impl<T: Ord + Clone + Serialize + DeserializeOwned> Saved<T> {
    /// Reads the orders that an earlier daemon saved in a file. An invalid file is logged and ignored.
    /// `lost`: a sentence for the log about the consequences of a failure to save.
    pub fn open(directory: &Path, file: &str, lost: &'static str) -> Self {
        let path = directory.join(file);
        let read = match std::fs::read_to_string(&path) {
            Ok(text) => toml::from_str::<Text<T>>(&text).map_err(|e| e.message().to_owned()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Text { boot: String::new(), all: BTreeSet::new() }),
            Err(e) => Err(e.to_string()),
        };
        let read = read.inspect_err(|e| warn!("cannot restore the state saved in {}: {e}", path.display()));
        let all = read.ok().filter(|read| read.boot == boot()).map(|read| read.all).unwrap_or_default();
        let (saver, texts) = mpsc::channel::<(String, oneshot::Sender<()>)>();
        let started = thread::Builder::new().name("saved".into()).spawn(move || {
            while let Ok(first) = texts.recv() {
                let (texts, waiting): (Vec<String>, Vec<_>) = std::iter::once(first).chain(texts.try_iter()).unzip();
                let newest = texts.last().map_or("", String::as_str);
                if let Err(e) = atomic_file::write(&path, newest) {
                    warn!("{lost} ({}: {e})", path.display());
                }
                waiting.into_iter().for_each(|done: oneshot::Sender<()>| {
                    let _ = done.send(()); // the caller may have left
                });
            }
        });
        if let Err(e) = &started {
            warn!("{lost} ({e})");
        }
        Self { all, saver: started.is_ok().then_some(saver) }
    }

    /// Saves the present set. An empty set is saved by removing the file. The D-Bus call returns only after
    /// the save, so every confirmed order outlives the daemon.
    pub fn save(&self) -> Saving {
        let (done, saving) = oneshot::channel();
        if let Some(saver) = &self.saver {
            let text = Text { boot: boot(), all: self.all.clone() };
            let text = if self.all.is_empty() { String::new() } else { toml::to_string(&text).unwrap_or_default() };
            let _ = saver.send((text, done));
        }
        saving
    }
}
