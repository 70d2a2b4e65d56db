//! Programs in the control groups of pods: a client of the scheduler that does nothing. It needs root and control groups of
//! version 2, which are mounted in a mount namespace of their own.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nvshare_wire::{ClientMessage, MAX_LEN, SchedulerMessage, Text};

/// Mounts control groups at `$1`, goes into `$2` there, and becomes the rest.
const ENTER: &str =
    r#"mount -t cgroup2 none "$1" && mkdir -p "$1/$2" && echo $$ > "$1/$2/cgroup.procs" && shift 2 && exec "$@""#;
/// Removes those directories again, from the innermost.
const LEAVE: &str = r#"mount -t cgroup2 none "$1" && cd "$1" && rmdir -p "$2""#;

/// A client in a container of a pod. It goes away with the test.
#[derive(Debug)]
pub struct Inmate {
    child: Child,
    mount: PathBuf,
    group: String,
}

impl Inmate {
    /// Starts one, unless this machine does not let us; then a line says so.
    pub fn start(directory: &Path, socket: &Path, uid: &str, container: &str) -> Option<Self> {
        let mount = directory.join("cgroup");
        std::fs::create_dir_all(&mount).expect("a directory");
        let group = format!("kubepods/besteffort/pod{uid}/{container}");
        let possible = within(ENTER, &mount, &format!("nvshare-test-{}", std::process::id())).arg("true").status();
        let _ = within(LEAVE, &mount, &format!("nvshare-test-{}", std::process::id())).status();
        if !possible.is_ok_and(|status| status.success()) {
            eprintln!(
                "skipped: putting a process into a pod's control group needs root and control groups of version 2"
            );
            return None;
        }
        let mut command = within(ENTER, &mount, &group);
        command.arg(std::env::current_exe().expect("this program"));
        command.args(["agent::stays_connected", "--exact", "--ignored", "--test-threads=1"]);
        let child = command.env("NVSHARE_TEST_SOCKET", socket).stdin(Stdio::piped()).spawn().expect("unshare is there");
        Some(Self { child, mount, group })
    }
}

fn within(script: &str, mount: &Path, group: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script, "sh"]).arg(mount).arg(group);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

impl Drop for Inmate {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = within(LEAVE, &self.mount, &self.group).status();
    }
}

/// What such a client does: it says hello, and stays until it is killed.
pub fn stay_connected() {
    let path = PathBuf::from(std::env::var_os("NVSHARE_TEST_SOCKET").expect("run by a test, not by hand"));
    let socket = connect(&path);
    let hello = ClientMessage::Hello {
        min_version: 1,
        max_version: 1,
        flags: 0,
        resume: 0,
        gang: 0,
        library: Text::new("test"),
    };
    let packet = hello.encode(1);
    let packet = packet.as_bytes();
    // SAFETY: the kernel reads `packet.len()` bytes.
    let sent = unsafe { libc::send(socket.as_raw_fd(), packet.as_ptr().cast(), packet.len(), libc::MSG_NOSIGNAL) };
    assert_eq!(sent, packet.len() as isize);
    let mut buffer = [0u8; MAX_LEN];
    loop {
        // SAFETY: the kernel writes at most `buffer.len()` bytes.
        let n = unsafe { libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        let Ok(length) = usize::try_from(n) else { return };
        if length == 0 {
            return;
        }
        SchedulerMessage::decode(&buffer[..length], 1).expect("the scheduler speaks the protocol");
    }
}

fn connect(path: &Path) -> OwnedFd {
    // SAFETY: plain system calls; the address is a live sockaddr_un and the descriptor new.
    unsafe {
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
        assert!(fd >= 0);
        let socket = OwnedFd::from_raw_fd(fd);
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        address.sun_family = libc::AF_UNIX as u16;
        for (to, from) in address.sun_path.iter_mut().zip(path.as_os_str().as_bytes()) {
            *to = *from as libc::c_char;
        }
        let size = size_of_val(&address) as libc::socklen_t;
        assert_eq!(libc::connect(fd, (&raw const address).cast(), size), 0);
        socket
    }
}
