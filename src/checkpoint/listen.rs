//! Starts this program for each connection on hosts without systemd, for example in a pod. On hosts
//! with systemd, `nvshare-checkpoint.socket` does this.

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::Mode,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, acceptfrom_with, bind, listen, socket_with},
    process::{Pid, PidfdFlags, pidfd_open, umask},
};
use std::{
    convert::Infallible,
    env, fs, io,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

/// Maximum number of helpers at a time. The socket unit has the same limit (`MaxConnections=`) and
/// explains the value.
const MAX_CONNECTIONS: usize = 64;
/// Maximum run time of a helper in seconds. The service has the same limit (`RuntimeMaxSec=`).
const MAX_RUNTIME_S: i64 = 155;
/// Delay before the next `accept` after descriptors or memory have run out.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves a socket that the user and the group of this process may connect to, until this process
/// ends. Helpers accept requests only from root and the user `scheduler`.
///
/// # Errors
/// The socket cannot be created.
pub fn serve(path: &Path, scheduler: u32) -> io::Result<Infallible> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // Sets the umask before the socket exists, so that no other user can connect.
    let before = umask(Mode::from_raw_mode(0o117));
    bind(&listener, &SocketAddrUnix::new(path)?)?;
    umask(before);
    listen(&listener, MAX_CONNECTIONS as i32)?;
    let program = env::current_exe()?;
    let running = Arc::new(AtomicUsize::new(0));
    loop {
        let Ok(connection) = acceptfrom_with(&listener, SocketFlags::CLOEXEC).map(|(connection, _)| connection) else {
            thread::sleep(PAUSE);
            continue;
        };
        // Connections beyond the maximum are closed.
        if running.load(Ordering::Relaxed) < MAX_CONNECTIONS {
            let running = Running::count(&running);
            let mut command = Command::new(&program);
            command.args(["--scheduler", &scheduler.to_string()]).stdin(Stdio::from(connection)).stdout(Stdio::null());
            // The helper uses the driver, but must not become a client of nvshare.
            command.env("NVSHARE_DISABLE", "1");
            let started = command.spawn().and_then(|child| {
                thread::Builder::new().spawn(move || {
                    wait(child);
                    drop(running);
                })
            });
            if let Err(e) = started {
                eprintln!("cannot start nvshare-checkpoint: {e}");
            }
        }
    }
}

/// Counts a running helper until this value is dropped.
struct Running(Arc<AtomicUsize>);

impl Running {
    fn count(all: &Arc<AtomicUsize>) -> Self {
        all.fetch_add(1, Ordering::Relaxed);
        Self(all.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Waits until the helper has ended, and kills it after `MAX_RUNTIME_S`. The next helper then
/// undoes the unfinished operation.
fn wait(mut child: Child) {
    let pidfd = Pid::from_raw(child.id() as i32).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let limit = Timespec { tv_sec: MAX_RUNTIME_S, tv_nsec: 0 };
    let has_ended = pidfd.is_some_and(|pidfd| poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit)) == Ok(1));
    if !has_ended {
        let _ = child.kill();
    }
    let _ = child.wait();
}
