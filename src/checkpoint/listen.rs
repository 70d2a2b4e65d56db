//! Where there is no systemd, as in a pod: starts this program for each connection, as `nvshare-checkpoint.socket` does elsewhere.

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

/// `MaxConnections=` of the socket, which says why.
const MAX_CONNECTIONS: usize = 64;
/// `RuntimeMaxSec=` of the service, in seconds.
const MAX_RUNTIME_S: i64 = 155;
/// How long to wait when there is nothing left to accept a connection with.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves a socket that the owner of this process and its group may connect to, until the process is ended. `scheduler`: whose requests
/// are carried out.
///
/// # Errors
/// If the socket cannot be made.
pub fn serve(path: &Path, scheduler: u32) -> io::Result<Infallible> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // Before anybody can connect.
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
        // One too many is hung up on.
        if running.load(Ordering::Relaxed) < MAX_CONNECTIONS {
            let running = Running::of(&running);
            let mut command = Command::new(&program);
            command.args(["--scheduler", &scheduler.to_string()]).stdin(Stdio::from(connection)).stdout(Stdio::null());
            // It uses the driver and is no program that shares a GPU.
            command.env("NVSHARE_DISABLE", "1");
            let started = command.spawn().and_then(|child| {
                thread::Builder::new().spawn(move || {
                    wait(child);
                    drop(running);
                })
            });
            if let Err(e) = started {
                eprintln!("nvshare-checkpoint cannot be started: {e}");
            }
        }
    }
}

/// Counts one that runs, as long as it lives.
struct Running(Arc<AtomicUsize>);

impl Running {
    fn of(all: &Arc<AtomicUsize>) -> Self {
        all.fetch_add(1, Ordering::Relaxed);
        Self(all.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Waits until it has ended. What it is in the middle of when its time is over, whoever is asked next undoes.
fn wait(mut child: Child) {
    let pidfd = Pid::from_raw(child.id() as i32).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let limit = Timespec { tv_sec: MAX_RUNTIME_S, tv_nsec: 0 };
    let has_ended = pidfd.is_some_and(|pidfd| poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit)) == Ok(1));
    if !has_ended {
        let _ = child.kill();
    }
    let _ = child.wait();
}
