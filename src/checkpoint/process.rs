//! The process of a request. The driver's calls take a pid, which may be reused after the process
//! has been reaped. Before each call, the helper therefore checks that the pidfd's process is
//! alive. The calls also accept thread ids, so `from_pidfd` rejects the pidfd of a thread.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::{
    fs,
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

#[derive(Debug)]
pub struct Process {
    pidfd: OwnedFd,
    pid: i32,
}

impl Process {
    /// Returns the process of a pidfd. Returns `None` if the pidfd refers to a thread, to a process
    /// that has ended, or to a process outside this PID namespace.
    pub fn from_pidfd(pidfd: OwnedFd) -> Option<Self> {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
        let pid =
            info.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok().filter(|pid| *pid > 0)?;
        let process = Self { pidfd, pid };
        (process.status("Tgid:")? == [i64::from(pid)] && process.is_alive()).then_some(process)
    }

    /// Returns true if all uids of the process are `uid`. The uids of a set-user-ID program differ.
    pub fn is_of(&self, uid: u32) -> bool {
        self.status("Uid:").is_some_and(|all| !all.is_empty() && all.iter().all(|id| *id == i64::from(uid)))
    }

    /// Returns the numbers in a field of `/proc/PID/status`.
    fn status(&self, name: &str) -> Option<Vec<i64>> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let field = status.lines().find_map(|line| line.strip_prefix(name))?;
        field.split_whitespace().map(|number| number.parse().ok()).collect()
    }

    pub fn is_alive(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())) == Ok(0)
    }

    /// Returns the pid, or `None` if the process has ended.
    pub fn pid(&self) -> Option<i32> {
        self.is_alive().then_some(self.pid)
    }
}

/// Returns true if the peer has closed the socket.
pub fn has_hung_up(socket: impl AsFd) -> bool {
    let mut fds = [PollFd::new(&socket, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec::default())) != Ok(0)
}
