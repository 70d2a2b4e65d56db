//! The processes of descriptors that other processes sent.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// The process ID of a pidfd, in this process's PID namespace. `None` if the descriptor is no pidfd of a
/// living process that is visible here.
///
/// # Errors
/// `/proc` cannot be read, for example because no descriptor is left.
pub fn process(descriptor: &(impl AsFd + AsRawFd)) -> io::Result<Option<i32>> {
    // Other kinds of descriptors have their own code for `fdinfo`, which may wait.
    let name = rustix::fs::readlink(format!("/proc/self/fd/{}", descriptor.as_raw_fd()), Vec::new())?;
    if !(name.as_bytes() == b"anon_inode:[pidfd]" || name.as_bytes().starts_with(b"pidfd:")) {
        return Ok(None);
    }
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd()))?;
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok());
    Ok(pid.filter(|pid| *pid > 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, getpid, getrlimit, pidfd_open, setrlimit};
    use std::process::Command;

    #[test]
    fn only_a_pidfd_names_a_process() {
        let own = pidfd_open(getpid(), PidfdFlags::empty()).expect("a pidfd");
        assert_eq!(process(&own).expect("its process"), Some(getpid().as_raw_nonzero().get()));
        assert_eq!(process(&std::fs::File::open("/dev/null").expect("a file")).expect("no process"), None);
        let mut child = Command::new("true").spawn().expect("a process");
        let ended = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).expect("a pidfd");
        child.wait().expect("its status");
        assert_eq!(process(&ended).expect("no process"), None);
    }

    #[test]
    fn without_a_free_descriptor_the_process_is_unknown() {
        let own = pidfd_open(getpid(), PidfdFlags::empty()).expect("a pidfd");
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).expect("a limit");
        let unknown = process(&own);
        setrlimit(Resource::Nofile, limit).expect("the former limit");
        assert_eq!(unknown.expect_err("no descriptor").raw_os_error(), Some(libc::EMFILE));
        assert_eq!(process(&own).expect("its process"), Some(getpid().as_raw_nonzero().get()));
    }
}
