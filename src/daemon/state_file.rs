//! Files in the directory that systemd provides for state that outlives the daemon
//! (`StateDirectory=`). A change is confirmed only after the attempt to save it. If saving fails, a
//! change of settings is refused. A pause or a drain takes effect, with a warning that it ends with the
//! daemon. Without such a directory, changes last until the daemon exits.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Sender};
use std::thread;

use tokio::sync::oneshot;
use tracing::warn;

use crate::sys::atomic_file;

/// The content of a state file.
pub trait Content: Default {
    /// Reads the text of a file.
    ///
    /// # Errors
    /// Returns a sentence about an invalid text.
    fn parse(text: &str, path: &Path) -> Result<Self, String>;

    /// The text to save. If it is empty, the file is removed.
    fn text(&self) -> String;
}

/// Completes once a change has been saved, or with the file and the reason why it could not be saved.
/// Closed without a state directory.
pub type Saving = oneshot::Receiver<Result<(), String>>;

/// A state file and the thread that writes it. Writing to disk can be slow.
#[derive(Debug, Default)]
pub struct StateFile<T> {
    pub content: T,
    saver: Option<Saver>,
}

#[derive(Debug)]
struct Saver {
    path: PathBuf,
    texts: Sender<(String, oneshot::Sender<Result<(), String>>)>,
}

impl<T: Content> StateFile<T> {
    /// Reads the content that an earlier daemon saved. An invalid file is ignored. `log` logs the reason.
    pub fn open(path: PathBuf, log: impl FnOnce(&str)) -> Self {
        let read = match std::fs::read_to_string(&path) {
            Ok(text) => T::parse(&text, &path),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(T::default()),
            Err(e) => Err(e.to_string()),
        };
        let content = read.inspect_err(|e| log(e)).unwrap_or_default();
        let (sender, texts) = mpsc::channel::<(String, oneshot::Sender<Result<(), String>>)>();
        let saver = Saver { path: path.clone(), texts: sender };
        let started = thread::Builder::new().name("state".into()).spawn(move || {
            while let Ok(first) = texts.recv() {
                let (texts, waiting): (Vec<String>, Vec<_>) = std::iter::once(first).chain(texts.try_iter()).unzip();
                let newest = texts.last().map_or("", String::as_str);
                let saved = atomic_file::write(&path, newest).map_err(|e| format!("{}: {e}", path.display()));
                // The callers may have left.
                waiting.into_iter().for_each(|done: oneshot::Sender<_>| drop(done.send(saved.clone())));
            }
        });
        if let Err(e) = started {
            warn!("cannot start the thread that saves {}: {e}", saver.path.display());
        }
        Self { content, saver: Some(saver) }
    }

    /// Saves this content. The caller decides whether it is in effect before it is saved.
    pub fn save(&self, content: &T) -> Saving {
        let (done, saving) = oneshot::channel();
        if let Some(saver) = &self.saver
            && let Err(mpsc::SendError((_, done))) = saver.texts.send((content.text(), done))
        {
            let _ = done.send(Err(format!("{}: the thread that saves it is not running", saver.path.display())));
        }
        saving
    }
}
