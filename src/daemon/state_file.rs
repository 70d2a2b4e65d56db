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

use crate::sys::{atomic_file, small_file};

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
        let read = match small_file::read(&path) {
            Ok(text) => T::parse(&text, &path),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(T::default()),
            Err(e) => Err(e.to_string()),
        };
        let content = read.inspect_err(|e| log(e)).unwrap_or_default();
        let (sender, texts) = mpsc::channel::<(String, oneshot::Sender<Result<(), String>>)>();
        let saver = Saver { path: path.clone(), texts: sender };
        let started = thread::Builder::new().name("state".into()).spawn(move || {
            for (text, done) in texts {
                let saved = atomic_file::write(&path, &text).map_err(|e| format!("{}: {e}", path.display()));
                drop(done.send(saved)); // the caller may have left
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;
    use std::process::Command;
    use test_support::Directory;

    #[derive(Debug, Default)]
    struct Words(String);

    impl Content for Words {
        fn parse(text: &str, _: &Path) -> Result<Self, String> {
            Ok(Self(text.into()))
        }

        fn text(&self) -> String {
            self.0.clone()
        }
    }

    fn fifo(path: &Path) {
        assert!(Command::new("mkfifo").arg(path).status().is_ok_and(|status| status.success()));
    }

    /// Reading a FIFO or writing to it would block, and the other files would fill the memory.
    #[test]
    fn a_file_of_another_kind_or_size_is_ignored_and_replaced() {
        let directory = Directory::new();
        let path = directory.0.join("state");
        let large = |path: &Path| File::create(path).and_then(|file| file.set_len(1 << 34)).expect("a file");
        let device = |path: &Path| symlink("/dev/zero", path).expect("a link");
        let folder = |path: &Path| fs::create_dir(path).expect("a directory");
        type Make = fn(&Path);
        let kinds: [(Make, &str); 4] = [(fifo, "regular"), (device, "regular"), (folder, "regular"), (large, "16 MiB")];
        for (make, why) in kinds {
            make(&path);
            fifo(&path.with_extension("new"));
            let mut logged = String::new();
            let file = StateFile::<Words>::open(path.clone(), |e| logged = e.into());
            assert!(file.content.0.is_empty() && logged.contains(why), "{logged}");
            let saved = file.save(&Words("saved".into())).blocking_recv().expect("an answer");
            if path.is_dir() {
                assert!(saved.is_err());
                fs::remove_dir(&path).expect("the directory");
            } else {
                assert_eq!((saved, fs::read_to_string(&path).expect("the file")), (Ok(()), "saved".into()));
                fs::remove_file(&path).expect("the file");
            }
        }
    }
}
