//! A fake systemd. It receives a daemon's messages on the notification socket, stores the daemon's
//! descriptors, and passes them to the next daemon.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;

/// The first descriptor that systemd passes.
const FIRST: RawFd = 3;
/// A number that exceeds all descriptors used by a test or benchmark.
const OUT_OF_THE_WAY: RawFd = 8192;

#[derive(Debug, Clone)]
pub struct Manager {
    path: PathBuf,
    socket: Arc<UnixDatagram>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Stored descriptors by name. Several descriptors can have the same name.
    kept: BTreeMap<String, Vec<OwnedFd>>,
    /// All received lines.
    said: Vec<String>,
    /// Whether descriptors are rejected.
    refuses: bool,
}

impl Manager {
    /// Starts a manager whose socket is in this directory.
    pub fn new(directory: &Path) -> Self {
        crate::raise_descriptor_limit(); // for `OUT_OF_THE_WAY`
        let path = directory.join("notify");
        let socket = UnixDatagram::bind(&path).expect("the notification socket");
        socket.set_nonblocking(true).expect("a socket that does not block");
        let manager = Self { path, socket: Arc::new(socket), state: Arc::default() };
        let listening = manager.clone();
        thread::spawn(move || {
            loop {
                poll(listening.socket.as_raw_fd(), libc::POLLIN, -1);
                listening.state.lock().expect("the state").hear_all(&listening.socket);
            }
        });
        manager
    }

    /// Rejects descriptors, like a unit without `FileDescriptorStoreMax=`.
    pub fn keep_nothing(&self) {
        self.state.lock().expect("the state").refuses = true;
    }

    /// The names of the stored descriptors.
    pub fn kept(&self) -> Vec<String> {
        self.state.lock().expect("the state").kept.keys().cloned().collect()
    }

    /// Stores a descriptor, as if a daemon had sent it.
    pub fn keep(&self, name: &str, descriptor: OwnedFd) {
        self.state.lock().expect("the state").kept.entry(name.into()).or_default().push(descriptor);
    }

    /// Closes all stored descriptors, as if the unit were stopped.
    pub fn close_all(&self) {
        self.state.lock().expect("the state").kept.clear();
    }

    /// The number of received lines that begin with `begin`.
    pub fn heard(&self, begin: &str) -> usize {
        self.state.lock().expect("the state").said.iter().filter(|line| line.starts_with(begin)).count()
    }

    /// The last received value of a variable.
    pub fn last(&self, name: &str) -> Option<String> {
        let state = self.state.lock().expect("the state");
        state.said.iter().rev().find_map(|line| line.strip_prefix(name)?.strip_prefix('=').map(str::to_owned))
    }

    /// Returns a command that runs `command` as a service of this manager, with the stored
    /// descriptors.
    pub fn wrap(&self, command: &Command) -> Command {
        let mut state = self.state.lock().expect("the state");
        // Like systemd, reads a service's messages before it handles the service's end.
        state.hear_all(&self.socket);
        // Like systemd, drops closed connections.
        for descriptors in state.kept.values_mut() {
            descriptors.retain(|descriptor| !has_hung_up(descriptor));
        }
        state.kept.retain(|_, descriptors| !descriptors.is_empty());
        let all = || state.kept.iter().flat_map(|(name, descriptors)| descriptors.iter().map(move |kept| (name, kept)));
        let names: Vec<String> = all().map(|(name, _)| name.clone()).collect();
        let copies: Vec<OwnedFd> = all().map(|(_, kept)| copy_of(kept).expect("a descriptor")).collect();
        let mut wrapped = Command::new("sh");
        // A shell sets LISTEN_PID because the pid is known only after the fork.
        wrapped.args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\""]).arg(command.get_program()).args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => wrapped.env(name, value),
                None => wrapped.env_remove(name),
            };
        }
        wrapped.env("NOTIFY_SOCKET", &self.path);
        wrapped.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        // SAFETY: the closure makes only system calls, which are async-signal-safe. The closure
        // owns the copies, so they are open until the command is dropped.
        unsafe {
            wrapped.pre_exec(move || {
                for (to, from) in (FIRST..).zip(&copies) {
                    if libc::dup2(from.as_raw_fd(), to) < 0 {
                        return Err(io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        wrapped
    }
}

impl State {
    /// Receives all messages that have been sent.
    fn hear_all(&mut self, socket: &UnixDatagram) {
        while let Ok((text, descriptors)) = receive(socket) {
            self.hear(&text, descriptors);
        }
    }

    fn hear(&mut self, text: &str, descriptors: Vec<OwnedFd>) {
        let has = |line: &str| text.lines().any(|l| l == line);
        let name = text.lines().find_map(|line| line.strip_prefix("FDNAME=")).unwrap_or("stored").to_owned();
        if has("FDSTORE=1") && !self.refuses {
            self.kept.entry(name).or_default().extend(descriptors);
        } else if has("FDSTOREREMOVE=1") {
            self.kept.remove(&name);
        }
        self.said.extend(text.lines().map(str::to_owned));
    }
}

fn receive(socket: &UnixDatagram) -> io::Result<(String, Vec<OwnedFd>)> {
    let (mut buffer, mut control) = ([0u8; 4096], [0u64; 16]);
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: the kernel writes at most the given lengths. The descriptors are new, so no other
    // value owns them.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        (message.msg_control, message.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control) as _);
        let n = libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC);
        let n = usize::try_from(n).map_err(|_| io::Error::last_os_error())?;
        let mut descriptors = Vec::new();
        if let Some(header) = libc::CMSG_FIRSTHDR(&message).as_ref()
            && header.cmsg_type == libc::SCM_RIGHTS
        {
            let data = libc::CMSG_DATA(header).cast::<RawFd>();
            let count = (header.cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
            descriptors.extend((0..count).map(|i| OwnedFd::from_raw_fd(data.add(i).read_unaligned())));
        }
        Ok((String::from_utf8_lossy(&buffer[..n]).into_owned(), descriptors))
    }
}

/// Returns a copy of a descriptor. Its number exceeds all numbers that children use.
fn copy_of(descriptor: &OwnedFd) -> io::Result<OwnedFd> {
    // SAFETY: the descriptor is open during the call. The new one has no other owner.
    match unsafe { libc::fcntl(descriptor.as_raw_fd(), libc::F_DUPFD_CLOEXEC, OUT_OF_THE_WAY) } {
        copy if copy >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(copy) }),
        _ => Err(io::Error::last_os_error()),
    }
}

fn has_hung_up(descriptor: &OwnedFd) -> bool {
    poll(descriptor.as_raw_fd(), 0, 0) & (libc::POLLHUP | libc::POLLERR) != 0
}

/// Waits for one of `events`, for at most `milliseconds`. The value -1 means no limit. Returns the
/// events that occurred.
fn poll(descriptor: RawFd, events: i16, milliseconds: i32) -> i16 {
    let mut entry = libc::pollfd { fd: descriptor, events, revents: 0 };
    // SAFETY: `entry` is one live entry.
    unsafe { libc::poll(&mut entry, 1, milliseconds) };
    entry.revents
}
