//! Notices of changes in kubelet's directory, by inotify. Without inotify, every wait ends after
//! one second.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use tokio::io::unix::AsyncFd;
use tokio::time::sleep;
use tracing::debug;

/// Polling interval while inotify cannot be used, for example before the directory exists.
const UNHEARD: Duration = Duration::from_secs(1);

/// Size of the buffer in bytes, which suffices for many events. The name in an event has at most
/// 255 bytes.
const BUFFER: usize = 4096;

/// Changes of one directory.
#[derive(Debug)]
pub struct Notices {
    directory: PathBuf,
    inotify: Option<AsyncFd<OwnedFd>>,
}

impl Notices {
    /// Creates the watch. Recording of changes begins immediately.
    pub fn new(directory: &Path) -> Self {
        let mut notices = Self { directory: directory.to_owned(), inotify: None };
        notices.begin();
        notices
    }

    fn begin(&mut self) {
        let wanted = WatchFlags::CREATE
            | WatchFlags::DELETE
            | WatchFlags::MOVED_TO
            | WatchFlags::MOVED_FROM
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        let begun = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).and_then(|fd| {
            inotify::add_watch(&fd, &self.directory, wanted)?;
            Ok(fd)
        });
        // SAFETY: the `AsyncFd` owns the descriptor, which stays open and refers to the same file until the
        // `AsyncFd` is dropped.
        let register = |fd: OwnedFd| unsafe { AsyncFd::register(fd) }.map_err(|e| e.into_parts().1);
        self.inotify = match begun.map_err(std::io::Error::from).and_then(register) {
            Ok(fd) => Some(fd),
            Err(e) => {
                debug!("cannot watch {} for changes: {e}", self.directory.display());
                None
            }
        };
    }

    /// Returns when something may have changed. The future can be dropped and created again without
    /// missing a change.
    pub async fn changed(&mut self) {
        let Some(inotify) = &self.inotify else {
            sleep(UNHEARD).await;
            return self.begin();
        };
        let Ok(mut ready) = inotify.readable().await else {
            self.inotify = None;
            return;
        };
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut reader = inotify::Reader::new(inotify.get_ref(), &mut buffer);
        let mut is_over = false;
        while let Ok(event) = reader.next() {
            // The directory itself was removed or replaced, so this watch no longer works.
            is_over |= event.events().intersects(ReadFlags::IGNORED | ReadFlags::MOVE_SELF | ReadFlags::UNMOUNT);
        }
        ready.clear_ready();
        if is_over {
            self.begin();
        }
    }
}
