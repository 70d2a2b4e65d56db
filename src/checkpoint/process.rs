//! Which process is meant. The driver takes numbers, also those of threads, so it is looked before each call whether the process
//! of the pidfd still lives; until it has been waited for, nobody else gets its number.

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
    /// `None` if that is not a pidfd of a living process, but of a thread for instance, or of a process that has no number in this
    /// PID namespace.
    pub fn of(pidfd: OwnedFd) -> Option<Self> {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
        let pid =
            info.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok().filter(|pid| *pid > 0)?;
        let process = Self { pidfd, pid };
        (process.status("Tgid:")? == [i64::from(pid)] && process.lives()).then_some(process)
    }

    /// Whether it is that user's alone: one that runs a set-user-ID program is not.
    pub fn is_of(&self, uid: u32) -> bool {
        self.status("Uid:").is_some_and(|all| !all.is_empty() && all.iter().all(|id| *id == i64::from(uid)))
    }

    /// The numbers of a field.
    fn status(&self, name: &str) -> Option<Vec<i64>> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let field = status.lines().find_map(|line| line.strip_prefix(name))?;
        field.split_whitespace().map(|number| number.parse().ok()).collect()
    }

    pub fn lives(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())) == Ok(0)
    }

    /// Its number, as long as it lives.
    pub fn pid(&self) -> Option<i32> {
        self.lives().then_some(self.pid)
    }
}

/// Whether the other side of a socket has hung up.
pub fn has_hung_up(socket: impl AsFd) -> bool {
    let mut fds = [PollFd::new(&socket, PollFlags::RDHUP)];
    poll(&mut fds, Some(&Timespec::default())) != Ok(0)
}
