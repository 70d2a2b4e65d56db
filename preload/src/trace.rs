//! Words to the user: traces where `NVSHARE_DEBUG` asks for them, and single lines that matter without being asked.
//!
//! Written with one `write(2)`, so that lines of several threads do not mix and no lock or buffer of ours can be held.

use crate::settings;
use core::fmt::Write as _;

/// A trace line; costs nothing but a flag when tracing is off.
macro_rules! trace {
    ($($arg:tt)*) => {
        if $crate::settings::get().debug {
            $crate::trace::line(format_args!($($arg)*));
        }
    };
}
pub(crate) use trace;

/// One line on stderr.
pub fn line(text: core::fmt::Arguments<'_>) {
    let mut line = Line { bytes: [0; 400], len: 0 };
    // SAFETY: these calls cannot fail.
    let (pid, thread) = unsafe { (libc::getpid(), libc::syscall(libc::SYS_gettid)) };
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid clock and a valid place.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    if settings::get().debug {
        let _ = write!(line, "nvshare {}.{:06} [{pid}:{thread}] ", now.tv_sec, now.tv_nsec / 1000);
    } else {
        let _ = write!(line, "nvshare: ");
    }
    let _ = line.write_fmt(text);
    let end = line.len.min(line.bytes.len() - 1);
    line.bytes[end] = b'\n';
    let mut poll = libc::pollfd { fd: 2, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one valid entry. Where nobody reads, the line is lost: neither SIGPIPE nor waiting is for the program.
    if unsafe { libc::poll(&mut poll, 1, 0) } != 1
        || poll.revents & libc::POLLOUT == 0
        || poll.revents & libc::POLLERR != 0
    {
        return;
    }
    // SAFETY: the buffer is valid for that length.
    unsafe { libc::write(2, line.bytes.as_ptr().cast(), end + 1) };
}

struct Line {
    bytes: [u8; 400],
    len: usize,
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
