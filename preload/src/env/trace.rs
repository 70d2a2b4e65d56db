//! Messages to the user on stderr: traces if `NVSHARE_DEBUG` is set, and single lines that are always
//! printed.
//!
//! Each line is one `write(2)`. So lines of several threads do not mix, and no lock or buffer of this
//! library is needed.

use crate::{
    env::settings,
    sys::{
        file::{DescriptorRecord, Identity},
        time::{Instant, timespec},
    },
};
use core::{fmt::Write as _, time::Duration};
use rustix::{
    event::{PollFd, PollFlags, poll},
    fd::BorrowedFd,
};

/// Prints a trace line. If tracing is off, this costs one test of a flag.
macro_rules! trace {
    ($($arg:tt)*) => {
        if $crate::env::settings::get().debug {
            $crate::env::trace::line(format_args!($($arg)*));
        }
    };
}
pub(crate) use trace;

/// Prints one line on stderr.
pub fn line(text: core::fmt::Arguments<'_>) {
    let mut line = Line::new();
    if settings::get().debug {
        let (pid, thread) = (rustix::process::getpid(), rustix::thread::gettid());
        let now = Instant::now().since_start();
        let _ = write!(line, "nvshare {}.{:06} [{pid}:{thread}] ", now.as_secs(), now.subsec_micros());
    } else {
        let _ = write!(line, "nvshare: ");
    }
    let _ = line.write_fmt(text);
    let Some((number, _)) = STDERR.get().filter(|(number, identity)| identity.is(*number)) else { return };
    // SAFETY: the descriptor is borrowed for two calls. The calls return an error if it is closed.
    let stderr = unsafe { BorrowedFd::borrow_raw(number) };
    let mut ready = [PollFd::from_borrowed_fd(stderr, PollFlags::OUT)];
    // The line is lost if no process reads stderr, because the program must neither get a SIGPIPE nor
    // wait.
    if poll(&mut ready, Some(&timespec(Duration::ZERO))) == Ok(1) && ready[0].revents() == PollFlags::OUT {
        let _ = rustix::io::write(stderr, line.end());
    }
}

/// Standard error when the library was loaded. If descriptor 2 has been closed at any time, its number
/// may now belong to a file of the program.
static STDERR: DescriptorRecord = DescriptorRecord::none();

/// Records the identity of stderr. Called once, when the library is loaded.
pub fn remember_stderr() {
    // SAFETY: the descriptor is borrowed for one call. The call returns an error if it is closed.
    let identity = Identity::of(unsafe { BorrowedFd::borrow_raw(2) });
    identity.into_iter().for_each(|identity| STDERR.set(2, identity));
}

/// A line of text. Text beyond its room is lost.
pub struct Line {
    bytes: [u8; 400],
    len: usize,
}

impl Line {
    pub const fn new() -> Self {
        Self { bytes: [0; 400], len: 0 }
    }

    /// Returns the text, which ends with a newline.
    pub fn end(&mut self) -> &[u8] {
        let end = self.len.min(self.bytes.len() - 1);
        self.bytes[end] = b'\n';
        self.bytes.get(..=end).unwrap_or(&[])
    }
}

impl core::fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        let room = self.bytes.len() - 1 - self.len;
        let text = text.as_bytes().get(..text.len().min(room)).unwrap_or(&[]);
        if let Some(place) = self.bytes.get_mut(self.len..self.len + text.len()) {
            place.copy_from_slice(text);
            self.len += text.len();
        }
        Ok(())
    }
}
