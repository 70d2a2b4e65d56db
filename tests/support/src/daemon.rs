//! A daemon in a temporary directory, and clients that send protocol messages directly.

use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::io::{self, BufRead, BufReader, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nvshare_wire::client::{Engine, EngineReason, GpuKind, ReleaseReason};
use nvshare_wire::{ClientMessage, Counts, MAX_LEN, SchedulerMessage, Text, Uuid, version};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::artifact;
use crate::manager::Manager;
pub use crate::{Directory, PATIENCE, kill};

pub const GIB: u64 = 1 << 30;
pub const GPU: Uuid = Uuid([7; 16]);
pub const GPU_NAME: &str = "GPU-07070707-0707-0707-0707-070707070707";

/// The lines of a process's standard error. They are added as they arrive.
#[derive(Debug, Clone, Default)]
pub struct Log(Arc<(Mutex<Vec<String>>, Condvar)>);

impl Log {
    fn follow(from: impl io::Read + Send + 'static) -> Self {
        let log = Self::default();
        let to = log.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(from).lines().map_while(Result::ok) {
                to.0.0.lock().expect("the log").push(line);
                to.0.1.notify_all();
            }
        });
        log
    }

    /// The lines so far. They are available even after a failed wait.
    pub fn lines(&self) -> Vec<String> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits for a line that contains the text.
    #[track_caller]
    pub fn wait(&self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        let mut lines = self.0.0.lock().expect("the log");
        loop {
            if let Some(line) = lines.iter().find(|line| line.contains(text)) {
                return line.clone();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no log line with {text:?}");
            lines = self.0.1.wait_timeout(lines, left).expect("the log").0;
        }
    }

    pub fn count(&self, text: &str) -> usize {
        self.lines().iter().filter(|line| line.contains(text)).count()
    }
}

/// A running daemon. Its log is shown when a test fails.
#[derive(Debug)]
pub struct Daemon {
    pub child: Child,
    pub log: Log,
    pub directory: Directory,
}

impl Daemon {
    pub fn start() -> Self {
        Self::start_with(|_, _| ())
    }

    /// Starts a daemon, by default without a bus. `change` extends its command line.
    pub fn start_with(change: impl FnOnce(&mut Command, &Path)) -> Self {
        Self::start_in(Directory::new(), None, change)
    }

    /// Starts a daemon under a fake systemd that stores the daemon's connections.
    pub fn start_under(manager: &Manager, directory: Directory) -> Self {
        Self::start_in(directory, Some(manager), |_, _| ())
    }

    pub fn start_in(directory: Directory, manager: Option<&Manager>, change: impl FnOnce(&mut Command, &Path)) -> Self {
        let mut command = command(&directory.0);
        change(&mut command, &directory.0);
        if !command.get_args().any(|argument| argument == "--log-level") {
            command.args(["--log-level", "debug"]);
        }
        if !command.get_args().any(|argument| argument == "--bus-address") {
            command.arg("--no-bus");
        }
        if let Some(manager) = manager {
            command = manager.wrap(&command);
        }
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the daemon starts");
        drop(command);
        let log = Log::follow(child.stderr.take().expect("its stderr"));
        let daemon = Self { child, log, directory };
        daemon.log.wait("serves");
        daemon
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.0.join("run/scheduler.sock")
    }

    pub fn control(&self) -> PathBuf {
        self.directory.0.join("control/control.sock")
    }

    /// Connects a client, which has exchanged `Hello` and `Welcome`.
    #[track_caller]
    pub fn client(&self) -> Client {
        Client::welcomed(&self.socket())
    }

    /// Connects a client that holds the lock and a client that waits for it. Each needs 12 GiB of
    /// the GPU's 16 GiB.
    #[track_caller]
    pub fn holder_and_waiter(&self) -> [Client; 2] {
        let clients = [self.client(), self.client()];
        for client in &clients {
            client.attach();
            client.report(12 * GIB, 0);
        }
        let [holder, waiter] = &clients;
        holder.request();
        holder.until_granted();
        holder.report(12 * GIB, 12 * GIB);
        waiter.request();
        self.log.wait("Contended");
        clients
    }

    pub fn signal(&self, signal: i32) {
        kill(self.child.id(), signal);
    }

    /// Waits until the daemon has ended.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        wait(&mut self.child)
    }

    /// The daemon's CPU time so far.
    pub fn cpu(&self) -> Duration {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("it runs");
        let ran = |thread: std::fs::DirEntry| {
            let text = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
            text.split(' ').next()?.parse::<u64>().ok()
        };
        Duration::from_nanos(threads.filter_map(|thread| ran(thread.ok()?)).sum())
    }

    /// Runs `nvsharectl` on the daemon's control socket.
    pub fn ctl(&self, arguments: &[&str]) -> Output {
        let mut command = ctl();
        command.arg("--control").arg(self.control()).args(arguments);
        Output::of(&mut command)
    }
}

impl Daemon {
    /// The daemon's resident memory that is not backed by files (RssAnon), in bytes.
    pub fn private_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find(|line| line.starts_with("RssAnon")).expect("its line");
        line.split_whitespace().nth(1).and_then(|number| number.parse::<u64>().ok()).expect("a number") << 10
    }

    /// Kills the daemon and returns its directory.
    pub fn kill(mut self) -> Directory {
        self.signal(libc::SIGKILL);
        self.wait();
        self.into_directory()
    }

    /// Terminates the daemon with SIGTERM and returns its directory.
    pub fn stop(mut self) -> Directory {
        self.signal(libc::SIGTERM);
        assert!(self.wait().success());
        self.into_directory()
    }

    fn into_directory(mut self) -> Directory {
        std::mem::replace(&mut self.directory, Directory(PathBuf::new()))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- the daemon's log ---\n{}", self.log.lines().join("\n"));
        }
    }
}

/// A daemon's command line without a bus setting.
pub fn command(directory: &Path) -> Command {
    let mut command = Command::new(artifact("nvshare-scheduler"));
    command.arg("--socket").arg(directory.join("run/scheduler.sock"));
    command.arg("--control-socket").arg(directory.join("control/control.sock"));
    // Hides this machine's service manager from the daemon.
    command.env_remove("NOTIFY_SOCKET").env_remove("JOURNAL_STREAM").env_remove("STATE_DIRECTORY");
    command
}

pub fn ctl() -> Command {
    let mut command = Command::new(artifact("nvsharectl"));
    for name in ["NVSHARE_CONTROL", "NVSHARE_LIBRARY", "LD_PRELOAD", "NO_COLOR"] {
        command.env_remove(name);
    }
    command
}

/// The output and exit status of a finished process.
#[derive(Debug)]
pub struct Output {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    pub fn of(command: &mut Command) -> Self {
        let output = command.stdin(Stdio::null()).output().expect("it starts");
        Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).expect("UTF-8"),
            stderr: String::from_utf8(output.stderr).expect("UTF-8"),
        }
    }
}

#[track_caller]
pub fn wait(child: &mut Child) -> ExitStatus {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().expect("a child") {
            return status;
        }
        assert!(Instant::now() < deadline, "it does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn is_root() -> bool {
    // SAFETY: `geteuid` has no preconditions.
    unsafe { libc::geteuid() == 0 }
}

/// A client that sends only the messages that a test sends.
#[derive(Debug)]
pub struct Client {
    pub socket: OwnedFd,
    pub id: u64,
    /// The protocol version that the client speaks.
    pub version: u16,
    /// The directory of the GPUs' device files, if GPUs are simulated.
    pub devices: Option<PathBuf>,
}

impl Client {
    pub fn connect(path: &Path) -> io::Result<Self> {
        // SAFETY: `address` is a live sockaddr_un. The descriptor is new, so no other value owns
        // it.
        unsafe {
            let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
            assert!(fd >= 0);
            let socket = OwnedFd::from_raw_fd(fd);
            let patience = libc::timeval { tv_sec: PATIENCE.as_secs() as i64, tv_usec: 0 };
            let size = size_of_val(&patience) as libc::socklen_t;
            libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, (&raw const patience).cast(), size);
            let mut address: libc::sockaddr_un = std::mem::zeroed();
            address.sun_family = libc::AF_UNIX as u16;
            for (to, from) in address.sun_path.iter_mut().zip(path.as_os_str().as_bytes()) {
                *to = *from as i8;
            }
            let size = size_of_val(&address) as libc::socklen_t;
            match libc::connect(fd, (&raw const address).cast(), size) {
                0 => Ok(Self { socket, id: 0, version: version::MAX, devices: devices() }),
                _ => Err(io::Error::last_os_error()),
            }
        }
    }

    #[track_caller]
    pub fn welcomed(path: &Path) -> Self {
        let mut client = Self::connect(path).expect("the daemon listens");
        client.send(hello());
        match client.receive() {
            Some(SchedulerMessage::Welcome { version, client: id }) if version == client.version => client.id = id,
            other => panic!("instead of Welcome: {other:?}"),
        }
        client
    }

    /// Sends a message. An `Attach` carries the device files, which prove access to the GPUs.
    pub fn send(&self, message: ClientMessage) {
        let packet = message.encode(self.version);
        let is_sent = match message {
            ClientMessage::Attach { .. } => self.send_with(packet.as_bytes(), &device_files(self.devices.as_deref())),
            _ => self.send_raw(packet.as_bytes()),
        };
        assert!(is_sent, "the daemon has hung up");
    }

    /// Sends a packet with descriptors.
    pub fn send_with(&self, packet: &[u8], files: &[File]) -> bool {
        let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(GPUS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(&files)), "{} files", files.len());
        sendmsg(&self.socket, &[IoSlice::new(packet)], &mut control, SendFlags::NOSIGNAL).is_ok()
    }

    pub fn send_raw(&self, packet: &[u8]) -> bool {
        // SAFETY: `packet` is valid for reads of `packet.len()` bytes, and the kernel reads no
        // more.
        let n =
            unsafe { libc::send(self.socket.as_raw_fd(), packet.as_ptr().cast(), packet.len(), libc::MSG_NOSIGNAL) };
        n == packet.len() as isize
    }

    /// Receives the next message. Returns `None` at the end of the connection.
    #[track_caller]
    pub fn receive(&self) -> Option<SchedulerMessage> {
        let mut buffer = [0u8; MAX_LEN];
        // SAFETY: `buffer` is valid for writes of `buffer.len()` bytes, and the kernel writes no
        // more.
        let n = unsafe { libc::recv(self.socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        match n {
            0 => None,
            n if n > 0 => {
                let message = SchedulerMessage::decode(&buffer[..n as usize], self.version);
                Some(message.expect("the scheduler speaks the protocol"))
            }
            _ => match io::Error::last_os_error() {
                e if e.raw_os_error() == Some(libc::ECONNRESET) => None,
                e => panic!("nothing came: {e}"),
            },
        }
    }

    /// Reads messages until one matches, and returns it.
    #[track_caller]
    pub fn until(&self, is_it: impl Fn(&SchedulerMessage) -> bool) -> SchedulerMessage {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let message = self.receive().expect("the daemon has hung up");
            if is_it(&message) {
                return message;
            }
            assert!(Instant::now() < deadline, "only other messages came, the last of which was {message:?}");
        }
    }

    #[track_caller]
    pub fn until_granted(&self) {
        self.until(|message| matches!(message, SchedulerMessage::Grant { gpus: 1 }));
    }

    /// Reads messages until the end of the connection.
    #[track_caller]
    pub fn until_end(&self) {
        let deadline = Instant::now() + PATIENCE;
        while let Some(message) = self.receive() {
            assert!(Instant::now() < deadline, "the connection did not end, and the last message was {message:?}");
        }
    }

    /// Attaches the GPU as slot 0 and waits for `Attached`.
    #[track_caller]
    pub fn attach(&self) {
        self.attach_gpu(GPU, 16 * GIB);
    }

    /// Attaches a GPU of `total` bytes as slot 0 and waits for `Attached`.
    #[track_caller]
    pub fn attach_gpu(&self, uuid: Uuid, total: u64) {
        self.send(attach_of(0, uuid, total));
        self.until(|message| matches!(message, SchedulerMessage::Attached { slot: 0 }));
    }

    pub fn report(&self, demand: u64, mapped: u64) {
        self.send(memory(0, demand, mapped));
    }

    pub fn request(&self) {
        self.send(ClientMessage::Request { gpus: 1 });
    }

    pub fn release(&self) {
        self.send(release());
    }
}

/// The number of simulated GPUs whose device files a [`Client`] shows.
const GPUS: usize = 4;

/// The directory of the device files in a test with its own process.
pub fn devices() -> Option<PathBuf> {
    std::env::var_os("NVSHARE_DEVICES").map(PathBuf::from)
}

/// Opens the device files of the simulated GPUs. Empty without simulated GPUs.
pub fn device_files(directory: Option<&Path>) -> Vec<File> {
    let Some(directory) = directory else { return Vec::new() };
    let access = |path: &Path, mode| drop(fs::set_permissions(path, Permissions::from_mode(mode)));
    if fs::create_dir_all(directory).is_ok() {
        access(directory, 0o777);
    }
    let open = |number| {
        let path = directory.join(format!("nvidia{number}"));
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path).ok()?;
        access(&path, 0o666);
        Some(file)
    };
    (0..GPUS).filter_map(open).collect()
}

pub fn hello() -> ClientMessage {
    hello_of(version::MAX, version::MAX)
}

pub fn hello_of(min_version: u16, max_version: u16) -> ClientMessage {
    ClientMessage::Hello { min_version, max_version, flags: 0, resume: 0, gang: 0, library: Text::new("test") }
}

pub fn attach(slot: u32, uuid: Uuid) -> ClientMessage {
    attach_of(slot, uuid, 16 * GIB)
}

fn attach_of(slot: u32, uuid: Uuid, total: u64) -> ClientMessage {
    let (kind, engine, name, reason) = (GpuKind::Gpu, Engine::Swap, Text::new("Test GPU"), EngineReason::Best);
    ClientMessage::Attach { slot, uuid, kind, engine, total, name, reason }
}

pub fn memory(slot: u32, demand: u64, mapped: u64) -> ClientMessage {
    let (device_free, limit_ack, host, counts) = (u64::MAX, 0, 0, Counts::default());
    ClientMessage::Memory {
        slot,
        ack: 0,
        demand,
        mapped,
        swapped: 0,
        pinned: 0,
        device_free,
        limit_ack,
        host,
        counts,
        in_file: 0,
        managed: 0,
        managed_mapped: 0,
    }
}

/// Returns a report of a client whose unmapped memory is in the host. The report acknowledges an
/// allowance and a limit.
pub fn memory_after(ack: u32, limit_ack: u32, demand: u64, mapped: u64) -> ClientMessage {
    let (slot, swapped, pinned, device_free) = (0, demand - mapped, 0, u64::MAX);
    let (host, counts) = (swapped, Counts::default());
    ClientMessage::Memory {
        slot,
        ack,
        demand,
        mapped,
        swapped,
        pinned,
        device_free,
        limit_ack,
        host,
        counts,
        in_file: 0,
        managed: 0,
        managed_mapped: 0,
    }
}

pub fn release() -> ClientMessage {
    ClientMessage::Release { gpus: 1, reason: ReleaseReason::Idle, busy_us: 0 }
}

/// Returns a command that runs an ignored test of this test program as a separate process with
/// `NVSHARE_TEST_SOCKET`. `name` is the test's full name.
pub fn helper(name: &str, socket: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args([name, "--exact", "--ignored", "--nocapture", "--test-threads=1"]);
    command.env("NVSHARE_TEST_SOCKET", socket).stdin(Stdio::null()).stdout(Stdio::null());
    command
}

/// The path of the socket that a helper received.
pub fn helper_socket() -> PathBuf {
    PathBuf::from(std::env::var_os("NVSHARE_TEST_SOCKET").expect("run by a test, not by hand"))
}

pub fn exists(path: impl AsRef<OsStr>) -> bool {
    Path::new(path.as_ref()).exists()
}
