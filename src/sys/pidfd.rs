//! The processes of descriptors that other processes sent.

use std::os::fd::{AsFd, AsRawFd};

/// The process ID of a pidfd, in this process's PID namespace. `None` if the descriptor is no pidfd of a
/// living process that is visible here.
pub fn process(descriptor: &(impl AsFd + AsRawFd)) -> Option<i32> {
    // Other kinds of descriptors have their own code for `fdinfo`, which may wait.
    let name = rustix::fs::readlink(format!("/proc/self/fd/{}", descriptor.as_raw_fd()), Vec::new()).ok()?;
    let name = name.to_str().ok()?;
    if !(name == "anon_inode:[pidfd]" || name.starts_with("pidfd:")) {
        return None;
    }
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd())).ok()?;
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()?;
    (pid > 0).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};
    use std::process::Command;

    #[test]
    fn only_a_pidfd_names_a_process() {
        let own = pidfd_open(getpid(), PidfdFlags::empty()).expect("a pidfd");
        assert_eq!(process(&own), Some(getpid().as_raw_nonzero().get()));
        assert_eq!(process(&std::fs::File::open("/dev/null").expect("a file")), None);
        let mut child = Command::new("true").spawn().expect("a process");
        let ended = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).expect("a pidfd");
        child.wait().expect("its status");
        assert_eq!(process(&ended), None);
    }
}
