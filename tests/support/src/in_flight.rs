//! Descriptors that were sent and are not received yet.
//!
//! The kernel refuses to send a descriptor (`ETOOMANYREFS`) while more descriptors of the sender's user are
//! in flight than the sender may have open. Any process of the same user can cause this.

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

const COUNT: usize = 250;
/// The number of descriptors that the process may have open.
const MOST: u64 = 120;

/// Descriptors in flight. There are enough of them to keep a process of this user from sending any.
#[derive(Debug)]
pub struct InFlight {
    _ends: (UnixStream, UnixStream),
}

impl InFlight {
    /// Lowers the process's limit of open files, and sends more descriptors than that.
    ///
    /// # Panics
    /// The limit cannot be changed.
    pub fn more_than_limit_of(pid: u32) -> Self {
        let pid = Pid::from_raw(pid.cast_signed()).expect("a PID");
        let limit = Rlimit { current: Some(MOST), maximum: Some(MOST) };
        prlimit(Some(pid), Resource::Nofile, limit).expect("the limit");
        let ends = UnixStream::pair().expect("a pair");
        let file = File::open("/dev/null").expect("a file");
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(COUNT))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [file.as_fd(); COUNT];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        sendmsg(&ends.0, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).expect("descriptors in flight");
        Self { _ends: ends }
    }
}
