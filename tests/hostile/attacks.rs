//! Programs that attack the scheduler while a client of another tenant takes turns. The attackers are
//! other users, root of a container, or root of a user namespace. The scheduler survives, keeps its
//! limits, and grants the client its lock.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::iter;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use nvshare::bus::SchedulerProxy;
use nvshare_wire::client::{ASLEEP, Engine, EngineReason, GpuKind, ReleaseReason, Sharing, SleepRefusal, StuckReason};
use nvshare_wire::env_limits::LimitName;
use nvshare_wire::visible_devices::Chooser;
use nvshare_wire::{ClientMessage, Counts, MAX_LEN, SchedulerMessage, Secret, Text, Uuid, version};
use test_support::cgroup::Unit;
use test_support::daemon::{self as support, Client, Daemon, helper, helper_socket, is_root};
use test_support::{Dice, MIB, has_own_process, wait_within};

/// The user of the attackers.
const NOBODY: u32 = 65534;
/// The user of the honest client.
const HONEST: u32 = 65533;
/// The time for which attackers act.
const ATTACK: Duration = Duration::from_millis(1500);
/// The maximum time for a step that is not a hang, on a loaded machine.
const HANG: Duration = Duration::from_secs(60);
/// The number of turns that the honest client must get during an attack.
const TURNS: usize = 5;
/// The maximum resident memory of the daemon.
const MEMORY: u64 = 200 * MIB;
/// The maximum number of descriptors that the daemon has open during an attack. Without one of its bounds, it has
/// more than 13,000.
const DESCRIPTORS: usize = 8000;
/// An attacker prints this line when its attack has begun.
const BEGUN: &str = "the attack has begun";

fn listed() -> Uuid {
    Uuid(cuda_sim_gpus::Config::get().uuid(0))
}

/// Returns whether the test runs in this process, as root and with a simulated GPU.
#[track_caller]
fn runs_here(test: &str) -> bool {
    if !is_root() {
        test_support::skip("root, to act as other users");
        return false;
    }
    has_own_process(test, &[("CUDA_SIM_MEMORY", (16u64 << 30).to_string())])
}

fn container_id() -> String {
    format!("a77a{:08x}{:052x}", std::process::id(), 0)
}

/// Becomes true when the test closes this helper's standard input.
fn end_of_input() -> &'static AtomicBool {
    static ENDED: AtomicBool = AtomicBool::new(false);
    thread::spawn(|| {
        let _ = io::stdin().read_to_end(&mut Vec::new());
        ENDED.store(true, Ordering::Relaxed);
    });
    &ENDED
}

/// Repeats a step of an attack until the test ends it.
fn attack(mut step: impl FnMut()) {
    let ended = end_of_input();
    eprintln!("{BEGUN}");
    while !ended.load(Ordering::Relaxed) {
        step();
    }
}

/// Keeps the state that an attack has reached until the test ends it.
fn hold<T>(state: T) {
    attack(|| thread::sleep(Duration::from_millis(5)));
    drop(state);
}

/// A process of a test, and the lines of its standard error.
struct Actor {
    child: Child,
    lines: Receiver<String>,
}

impl Actor {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        let (send, lines) = mpsc::channel();
        let stderr = BufReader::new(child.stderr.take().expect("its stderr"));
        thread::spawn(move || stderr.lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
        Self { child, lines }
    }

    /// Waits for a line that contains the text.
    #[track_caller]
    fn wait(&self, text: &str) -> String {
        let mut said = Vec::new();
        loop {
            match self.lines.recv_timeout(HANG) {
                Ok(line) if line.contains(text) => return line,
                Ok(line) => said.push(line),
                Err(e) => panic!("no line with {text:?} ({e}), only: {}", said.join("\n")),
            }
        }
    }

    /// Ends the process, and returns its remaining lines.
    #[track_caller]
    fn end(mut self) -> Vec<String> {
        drop(self.child.stdin.take());
        let status = wait_within(HANG, "the end of a process", || self.child.try_wait().expect("a child"));
        let said: Vec<String> = self.lines.iter().collect();
        assert!(status.success(), "{status}: {}", said.join("\n"));
        said
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A daemon under attack.
struct Siege {
    daemon: Daemon,
    /// The number of the daemon's open descriptors before the attack.
    descriptors: usize,
}

impl Siege {
    fn start(config: &str) -> Self {
        Self::around(Daemon::start_with(|command, directory| {
            let path = directory.join("nvshare.toml");
            fs::write(&path, config).expect("a file");
            command.arg("--config").arg(path).args(["--log-level", "info"]);
        }))
    }

    fn around(daemon: Daemon) -> Self {
        daemon.log.wait("found");
        support::device_files(support::devices().as_deref()); // creates them for the other users
        let siege = Self { daemon, descriptors: 0 };
        assert!(siege.answers().contains("gpus"));
        let descriptors = siege.open_descriptors();
        Self { descriptors, ..siege }
    }

    fn open_descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.daemon.child.id())).expect("the daemon runs").count()
    }

    /// The highest resident memory of the daemon so far, without its program text.
    fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.daemon.child.id())).expect("it runs");
        let line = status.lines().find(|line| line.starts_with("VmHWM")).expect("its line");
        line.split_whitespace().nth(1).and_then(|number| number.parse::<u64>().ok()).expect("a number") << 10
    }

    /// Returns the daemon's answer to root's query.
    #[track_caller]
    fn answers(&self) -> String {
        let mut command = support::ctl();
        command.arg("--control").arg(self.daemon.control()).args(["--json", "status"]);
        let mut child = command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn().expect("it starts");
        let mut stdout = child.stdout.take().expect("its stdout");
        let reader = thread::spawn(move || {
            let mut text = String::new();
            stdout.read_to_string(&mut text).map(|_| text)
        });
        let status = wait_within(HANG, "an answer to root", || child.try_wait().expect("a child"));
        assert!(status.success(), "root is not answered");
        reader.join().expect("a thread").expect("UTF-8")
    }

    /// The number of clients that the daemon lists.
    fn clients(&self) -> usize {
        let status: serde_json::Value = serde_json::from_str(&self.answers()).expect("JSON");
        status["clients"].as_array().expect("clients").len()
    }

    /// Runs attackers. Checks that an honest client of another user gets its turns, that root is
    /// answered, and that the daemon keeps its limits. Returns what the attackers said.
    #[track_caller]
    fn withstands(&self, attackers: impl IntoIterator<Item = Command>) -> Vec<String> {
        let mut honest = helper("attacks::helper_takes_turns", &self.daemon.socket());
        honest.uid(HONEST).gid(HONEST);
        let honest = Actor::start(honest);
        honest.wait("granted");
        let attackers: Vec<Actor> = attackers.into_iter().map(Actor::start).collect();
        attackers.iter().for_each(|attacker| drop(attacker.wait(BEGUN)));
        let begin = Instant::now();
        while honest.lines.try_recv().is_ok() {} // turns before the attack
        let mut turns = 0;
        while turns < TURNS || begin.elapsed() < ATTACK {
            honest.wait("granted");
            turns += 1;
        }
        self.answers();
        let open = self.open_descriptors();
        assert!(open < DESCRIPTORS, "the daemon has {open} descriptors open");
        let said = attackers.into_iter().flat_map(Actor::end).collect();
        honest.end();
        wait_within(support::PATIENCE, "the attackers' clients to be forgotten", || {
            (self.clients() == 0).then_some(())
        });
        wait_within(support::PATIENCE, "the attackers' descriptors to be closed", || {
            (self.open_descriptors() <= self.descriptors).then_some(())
        });
        let memory = self.memory();
        eprintln!("{turns} turns, {} MiB", memory / MIB);
        assert!(memory < MEMORY, "the daemon had {} MiB", memory / MIB);
        let lines = self.daemon.log.lines();
        let most = 1000 + 100 * begin.elapsed().as_secs() as usize;
        assert!(lines.len() < most, "{} lines were logged", lines.len());
        let has_control = |line: &&String| line.contains(|c: char| c.is_control()) || line.contains("panicked");
        assert_eq!(lines.iter().find(has_control), None);
        said
    }
}

/// An attacker as an ordinary user.
fn user(name: &str, siege: &Siege) -> Command {
    let mut command = helper(&format!("attacks::{name}"), &siege.daemon.socket());
    command.uid(NOBODY).gid(NOBODY);
    command
}

/// Makes the command the first process of a new PID namespace in this control group, as root.
fn contain(mut command: Command, unit: &Unit) -> Command {
    let procs = std::ffi::CString::new(unit.procs().into_os_string().into_encoded_bytes()).expect("a path");
    let enter = move || {
        // SAFETY: these are system calls on live arguments, and all are async-signal-safe. The process that
        // forks neither allocates nor returns: it waits and ends.
        unsafe {
            let file = libc::open(procs.as_ptr(), libc::O_WRONLY);
            if file < 0 || libc::write(file, c"0".as_ptr().cast(), 1) != 1 || libc::unshare(libc::CLONE_NEWPID) != 0 {
                return Err(io::Error::last_os_error());
            }
            libc::close(file);
            match libc::fork() {
                -1 => Err(io::Error::last_os_error()),
                0 => {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    Ok(())
                }
                child => {
                    // The standard library waits until its pipe is closed.
                    libc::close_range(0, libc::c_uint::MAX, 0);
                    let mut status = 0;
                    libc::waitpid(child, &mut status, 0);
                    libc::_exit(libc::c_int::from(status != 0));
                }
            }
        }
    };
    // SAFETY: see `enter`.
    unsafe { command.pre_exec(enter) };
    command
}

/// An attacker as root of a container.
fn root_of(unit: &Unit, name: &str, siege: &Siege) -> Command {
    contain(helper(&format!("attacks::{name}"), &siege.daemon.socket()), unit)
}

/// An attacker with the user ID `inside` in its own user namespace, and with its own network.
fn in_user_namespace(inside: u32, name: &str, siege: &Siege) -> Command {
    let mut command = user(name, siege);
    let map = std::ffi::CString::new(format!("{inside} {NOBODY} 1")).expect("a text");
    let enter = move || {
        // SAFETY: these are system calls on live arguments, and all are async-signal-safe.
        unsafe {
            libc::prctl(libc::PR_SET_DUMPABLE, 1); // else the files of `/proc/self` belong to root
            if libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNET) != 0 {
                return Err(io::Error::last_os_error());
            }
            for (path, text) in [(c"/proc/self/setgroups", c"deny"), (c"/proc/self/uid_map", &*map)] {
                let file = libc::open(path.as_ptr(), libc::O_WRONLY);
                let length = text.count_bytes();
                if file < 0 || libc::write(file, text.as_ptr().cast(), length) != length as isize {
                    return Err(io::Error::last_os_error());
                }
                libc::close(file);
            }
        }
        Ok(())
    };
    // SAFETY: see `enter`.
    unsafe { command.pre_exec(enter) };
    command
}

/// Connects without waiting for an answer. Sends time out soon, so that an attacker always ends.
fn intrude() -> Option<Client> {
    let client = Client::connect(&helper_socket()).ok()?;
    let soon = libc::timeval { tv_sec: 0, tv_usec: 20_000 };
    // SAFETY: the option's value is live and of this size.
    unsafe {
        let (value, size) = ((&raw const soon).cast(), size_of_val(&soon) as libc::socklen_t);
        libc::setsockopt(client.socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_SNDTIMEO, value, size);
    }
    client.send_raw(support::hello().encode(0).as_bytes()).then_some(client)
}

/// Sends a message, which may fail.
fn say(client: &Client, message: ClientMessage) -> bool {
    let packet = message.encode(version::MAX);
    match message {
        ClientMessage::Attach { .. } => {
            client.send_with(packet.as_bytes(), &support::device_files(support::devices().as_deref()))
        }
        _ => client.send_raw(packet.as_bytes()),
    }
}

/// Discards all packets that have arrived.
fn discard(client: &Client) {
    let mut byte = 0u8;
    // SAFETY: the kernel writes at most one byte.
    while unsafe { libc::recv(client.socket.as_raw_fd(), (&raw mut byte).cast(), 1, libc::MSG_DONTWAIT) } > 0 {}
}

/// Sends a packet with any number of descriptors.
fn send_with(client: &Client, packet: &[u8], descriptors: &[RawFd]) -> bool {
    #[repr(C, align(8))]
    struct Control([u8; 16 + 4 * 256]);
    let mut control = Control([0; _]);
    let mut part = libc::iovec { iov_base: packet.as_ptr().cast_mut().cast(), iov_len: packet.len() };
    assert!(descriptors.len() <= 255, "{}", descriptors.len());
    // SAFETY: the buffers outlive the call, and `control` has room for 255 descriptors.
    unsafe {
        let bytes = size_of_val(descriptors) as u32;
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        if !descriptors.is_empty() {
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(bytes) as _;
            let header = &mut *libc::CMSG_FIRSTHDR(&message);
            (header.cmsg_level, header.cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
            header.cmsg_len = libc::CMSG_LEN(bytes) as _;
            let data = libc::CMSG_DATA(header).cast::<RawFd>();
            descriptors.iter().enumerate().for_each(|(i, fd)| data.add(i).write_unaligned(*fd));
        }
        libc::sendmsg(client.socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) >= 0
    }
}

#[test]
#[ignore = "a helper: an honest client, which takes turns and reports each of them"]
fn helper_takes_turns() {
    let ended = end_of_input();
    while !ended.load(Ordering::Relaxed) {
        let client = Client::welcomed(&helper_socket());
        client.attach_gpu(listed(), 16 << 30);
        client.report(64 * MIB, 0);
        client.request();
        client.until_granted();
        client.release();
        eprintln!("granted");
        thread::sleep(Duration::from_millis(20));
    }
}

// ---- Descriptors ----

/// A descriptor whose last `close` waits: a TCP connection with `SO_LINGER` to a peer that reads nothing.
fn lingering(listener: &TcpListener) -> (TcpStream, TcpStream) {
    let mut sender = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
    let (peer, _) = listener.accept().expect("a connection");
    sender.set_nonblocking(true).expect("a flag");
    while sender.write(&[0; 65536]).is_ok() {}
    let linger = libc::linger { l_onoff: 1, l_linger: 600 };
    // SAFETY: the option's value is live and of this size.
    let set = unsafe {
        let (value, size) = ((&raw const linger).cast(), size_of_val(&linger) as libc::socklen_t);
        libc::setsockopt(sender.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, value, size)
    };
    assert_eq!(set, 0, "{}", io::Error::last_os_error());
    (sender, peer)
}

/// Switches the loopback interface of this network namespace on.
fn set_loopback_up() {
    // SAFETY: the request is live, and the kernel reads one `ifreq`.
    unsafe {
        let socket = OwnedFd::from_raw_fd(libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0));
        let mut request: libc::ifreq = std::mem::zeroed();
        (request.ifr_name[0], request.ifr_name[1]) = (b'l' as i8, b'o' as i8);
        request.ifr_ifru.ifru_flags = libc::IFF_UP as i16;
        libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &request);
    }
}

#[test]
#[ignore = "a helper: sends descriptors whose last close waits for ten minutes, with all kinds of messages"]
fn helper_sends_lingering_descriptors() {
    set_loopback_up();
    let listener = TcpListener::bind("127.0.0.1:0").expect("an address");
    let hello = support::hello().encode(0);
    let attach = support::attach(0, listed()).encode(version::MAX);
    let exported = ClientMessage::Exported { ticket: 1, outcome: Sharing::Done, slot: 0, bytes: MIB, chunk: MIB };
    let exported = exported.encode(version::MAX);
    let mut kept = Vec::new();
    for n in 0..60 {
        let (sender, peer) = lingering(&listener);
        let Ok(client) = Client::connect(&helper_socket()) else { continue };
        let descriptors = [sender.as_raw_fd()];
        match n % 6 {
            // The daemon reads the descriptor with each of the messages that may carry one.
            0 | 1 => {
                client.send_raw(hello.as_bytes());
                send_with(&client, if n % 6 == 0 { attach.as_bytes() } else { exported.as_bytes() }, &descriptors);
            }
            2 => drop(send_with(&client, hello.as_bytes(), &descriptors)),
            // More descriptors than a packet may carry.
            3 => {
                client.send_raw(hello.as_bytes());
                send_with(&client, attach.as_bytes(), &[descriptors[0]; 250]);
            }
            // The daemon closes the connection before it has read the packet.
            4 => {
                client.send_raw(b"nonsense");
                send_with(&client, attach.as_bytes(), &descriptors);
            }
            _ => {
                client.send_raw(support::hello_of(99, 99).encode(0).as_bytes());
                send_with(&client, attach.as_bytes(), &descriptors);
            }
        }
        // If this process has the last copy of the sender, closing it waits. The thread then ends
        // with the process.
        thread::spawn(move || drop(sender));
        kept.push((client, peer));
    }
    // A thread of the daemon waits now. The daemon must not take more and more descriptors of this tenant,
    // whether it receives them or accepts connections.
    let null = File::open("/dev/null").expect("a file");
    let flood: Vec<_> = iter::repeat_with(intrude).take(3 * DESCRIPTORS / 250).flatten().collect();
    for client in &flood {
        send_with(client, attach.as_bytes(), &[null.as_raw_fd(); 250]);
    }
    (0..2 * DESCRIPTORS).for_each(|_| drop(Client::connect(&helper_socket())));
    hold((kept, flood));
}

/// A thread that closes such a descriptor waits. The scheduling loop must not.
#[test]
fn descriptors_whose_close_waits_delay_no_other_tenant() {
    if !runs_here("attacks::descriptors_whose_close_waits_delay_no_other_tenant") {
        return;
    }
    let siege = Siege::start("");
    siege.withstands([in_user_namespace(0, "helper_sends_lingering_descriptors", &siege)]);
}

/// Descriptors of many kinds. Some of them contain others, or themselves.
fn assortment() -> Vec<OwnedFd> {
    let mut all = Vec::new();
    // SAFETY: each call gets live arguments. A non-negative result is a new descriptor, which no other value
    // owns.
    unsafe {
        let mut add = |fd: libc::c_long| {
            if fd >= 0 {
                all.push(OwnedFd::from_raw_fd(fd as RawFd));
            }
        };
        add(libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0));
        add(libc::memfd_create(c"attack".as_ptr(), libc::MFD_CLOEXEC).into());
        add(libc::eventfd(0, libc::EFD_CLOEXEC).into());
        add(libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC).into());
        add(libc::inotify_init1(libc::IN_CLOEXEC).into());
        for (path, flags) in [
            (c"/", libc::O_PATH),
            (c"/proc/self/mem", libc::O_RDWR),
            (c"/dev/null", libc::O_RDWR),
            (c"/dev/zero", libc::O_RDONLY),
            (c"/dev/ptmx", libc::O_RDWR | libc::O_NOCTTY),
        ] {
            add(libc::open(path.as_ptr(), flags | libc::O_CLOEXEC).into());
        }
        let mut pipe = [0; 2];
        if libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC) == 0 {
            pipe.into_iter().for_each(|fd| add(fd.into()));
        }
        // Each epoll descriptor watches the previous one.
        let mut watched = libc::eventfd(0, libc::EFD_CLOEXEC);
        for _ in 0..4 {
            let epoll = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
            libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, watched, &mut event);
            add(watched.into());
            watched = epoll;
        }
        add(watched.into());
    }
    // A socket whose queue contains the socket and its peer, so that only the garbage collector frees it.
    let (one, other) = UnixStream::pair().expect("a pair");
    let holder = Client { socket: one.into(), id: 0, version: 1, devices: None };
    for _ in 0..8 {
        send_with(&holder, b"x", &[holder.socket.as_raw_fd(), other.as_raw_fd()]);
    }
    all.extend([holder.socket, other.into()]);
    all
}

#[test]
#[ignore = "a helper: sends descriptors of all kinds with all messages, as many as the kernel passes"]
fn helper_sends_all_kinds_of_descriptors() {
    let mut dice = Dice::new(u64::from(std::process::id()));
    let mut clients = Vec::new();
    attack(|| {
        let kinds = assortment();
        let descriptors: Vec<RawFd> = kinds.iter().map(AsRawFd::as_raw_fd).collect();
        let Some(client) = intrude() else { return };
        say(&client, support::attach(0, listed()));
        for count in [1, 16, 17, 253] {
            let many: Vec<RawFd> = descriptors.iter().copied().cycle().take(count).collect();
            for message in [support::attach(dice.below(64) as u32, listed()), support::release(), any(&mut dice)] {
                send_with(&client, message.encode(version::MAX).as_bytes(), &many);
            }
            send_with(&client, b"", &many);
        }
        discard(&client);
        clients.push(client);
        if clients.len() > 50 {
            clients.clear();
        }
    });
}

#[test]
fn all_kinds_of_descriptors_are_closed() {
    if !runs_here("attacks::all_kinds_of_descriptors_are_closed") {
        return;
    }
    let siege = Siege::start("");
    siege.withstands([0, 1].map(|_| user("helper_sends_all_kinds_of_descriptors", &siege)));
}

// ---- Messages ----

/// Returns a valid message with values at the edges of their ranges.
fn any(dice: &mut Dice) -> ClientMessage {
    let number = dice.number();
    let slot = dice.pick(&[0, 0, 0, 0, 1, 2, 62, 63, 64, u32::MAX]);
    let near = 1 << 50;
    let bytes = dice.pick(&[0, 1, MIB, 16 << 30, near - 1, near, near + 1, u64::MAX - 1, u64::MAX, number]);
    let more = dice.pick(&[0, 1, MIB, 15 << 30, near]);
    let gpus = dice.pick(&[1, 1, 1, 1, 0, 2, 3, 1 << 63, u64::MAX]);
    let seq = dice.pick(&[0, 1, 2, u32::MAX - 1, u32::MAX]);
    let key = Secret([dice.below(3) as u8; 16]);
    let [own, other] = [listed(), listed()];
    let bit = dice.below(128) as usize;
    let mut twisted = other;
    twisted.0[bit / 8] ^= 1 << (bit % 8);
    let uuid = dice.pick(&[own, own, own, twisted, Uuid([0; 16]), Uuid([0xff; 16])]);
    let outcome = dice.pick(&[Sharing::Done, Sharing::Unknown, Sharing::Failed, Sharing::Busy]);
    match dice.below(30) {
        0 => support::hello(),
        1..5 => ClientMessage::Attach {
            slot,
            uuid,
            kind: dice.pick(&[GpuKind::Gpu, GpuKind::Gpu, GpuKind::Mig]),
            engine: dice.pick(&[Engine::Swap, Engine::Managed, Engine::None]),
            total: dice.pick(&[16 << 30, 1, near, bytes]),
            name: Text::new("\u{1b}[2J\nGPU\r%s%n"),
            reason: EngineReason::Best,
        },
        5 => ClientMessage::Detach { slot },
        6..9 => ClientMessage::Memory {
            slot,
            ack: seq,
            demand: bytes.min(near),
            mapped: more,
            swapped: bytes.min(near),
            pinned: more,
            device_free: bytes,
            limit_ack: seq,
            host: more,
            counts: Counts { swapped_out: bytes, swapped_in: number, unmoved: u64::MAX, refused: bytes },
            in_file: bytes.min(near),
            managed: more,
            managed_mapped: more,
        },
        9..11 => ClientMessage::Request { gpus },
        11..13 => {
            let reason = dice.pick(&[ReleaseReason::Idle, ReleaseReason::Revoked, ReleaseReason::NoMemory]);
            ClientMessage::Release { gpus, reason, busy_us: bytes }
        }
        13 => {
            let reasons = [StuckReason::NeedsHost, StuckReason::LongWork, StuckReason::HostFull, StuckReason::Broken];
            ClientMessage::Stuck { gpus, reason: dice.pick(&reasons) }
        }
        14 => ClientMessage::Cancel { gpus },
        15 => ClientMessage::Exporter { key },
        16 => ClientMessage::Open {
            ticket: seq,
            exporter: key,
            secret: Secret([dice.below(3) as u8; 16]),
            range: seq,
            allocation: bytes,
            first: seq,
        },
        17 => ClientMessage::Exported { ticket: bytes, outcome, slot, bytes: more, chunk: bytes },
        18 => ClientMessage::RequestLimit { slot, bytes },
        19 => ClientMessage::Reserve { slot, bytes },
        20 => ClientMessage::Utilization { slot, permille: seq },
        21 => ClientMessage::Withdrawn { range: seq },
        22 => ClientMessage::Imported { slot, exporter: key, range: seq, bytes: more, adopted: dice.below(256) as u8 },
        23 => ClientMessage::Adopted { exporter: key, range: seq },
        24 => ClientMessage::Closed { exporter: key, range: seq },
        25 => match dice.below(4) {
            0 => ClientMessage::Held { gpus },
            1 => ClientMessage::SleepReady {},
            2 => ClientMessage::SleepRefused { why: SleepRefusal::Busy },
            _ => ClientMessage::Wake {},
        },
        26 if dice.one_in(2) => ClientMessage::JoinGang { gang: dice.below(4) },
        26 => ClientMessage::UseSwapFile { ram_max: bytes },
        27 => ClientMessage::VisibleDevices { text: Text::new("GPU-,-1,MIG-/0/1,99999999999999999999,") },
        28 => {
            let chooser = dice.pick(&[Chooser::Nobody, Chooser::List, Chooser::Rank]);
            let ahead = dice.below(2) as u8;
            ClientMessage::RequestPlacement { chooser, count: seq, bytes: more, devices: number, ahead }
        }
        _ => {
            let limit = dice.pick(&[LimitName::MemoryMax, LimitName::Weight, LimitName::AllowedGpus]);
            let text = dice.pick(&["-1", "1e400", "99999999999999999999T", "0%", "101%", "nan", "*", "GPU-\u{0}", "ä"]);
            ClientMessage::EnvLimit { limit, more: dice.below(2) as u8, text: Text::new(text) }
        }
    }
}

#[test]
#[ignore = "a helper: sends random messages with values at the edges"]
fn helper_sends_messages_at_the_edges() {
    let seed = Dice::seed().wrapping_add(u64::from(std::process::id()));
    eprintln!("NVSHARE_TEST_SEED={seed}");
    let mut dice = Dice::new(seed);
    let mut clients: Vec<Client> = Vec::new();
    attack(|| {
        if clients.len() < 16 {
            clients.extend(intrude());
        }
        if clients.is_empty() {
            return;
        }
        let at = dice.below(clients.len() as u64) as usize;
        discard(&clients[at]);
        let message = any(&mut dice);
        // Releases the lock after each message. Another test covers holders that keep the lock.
        if !say(&clients[at], message) || !say(&clients[at], support::release()) || dice.one_in(200) {
            clients.swap_remove(at);
        }
    });
}

/// A debug build of the daemon panics at the first overflow.
#[test]
fn messages_with_values_at_the_edges_harm_no_other_tenant() {
    if !runs_here("attacks::messages_with_values_at_the_edges_harm_no_other_tenant") {
        return;
    }
    let siege = Siege::start("[swap]\nmax = \"1G\"\n");
    siege.withstands([0, 1, 2].map(|_| user("helper_sends_messages_at_the_edges", &siege)));
}

#[test]
#[ignore = "a helper: sends packets of all lengths, and reads at most one byte of each answer"]
fn helper_sends_packets_of_all_lengths() {
    let noise = vec![0xa5; 200_000];
    let mut length = 0;
    attack(|| {
        let lengths = [0, 1, 7, 8, MAX_LEN - 1, MAX_LEN, MAX_LEN + 1, 65536, 150_000];
        length = (length + 1) % lengths.len();
        if let Ok(client) = Client::connect(&helper_socket()) {
            client.send_raw(&noise[..lengths[length]]);
        }
        if let Some(client) = intrude() {
            client.send_raw(&noise[..lengths[length]]);
            // A valid header, with a body of the maximum length.
            let mut packet = vec![0; MAX_LEN];
            packet[..8].copy_from_slice(&[1, 0, length as u8, 0, 0, 1, 0, 0]);
            client.send_raw(&packet);
            discard(&client);
        }
    });
}

#[test]
fn packets_of_all_lengths_harm_no_other_tenant() {
    if !runs_here("attacks::packets_of_all_lengths_harm_no_other_tenant") {
        return;
    }
    let siege = Siege::start("");
    siege.withstands([0, 1].map(|_| user("helper_sends_packets_of_all_lengths", &siege)));
}

#[test]
#[ignore = "a helper: changes its demand, its requests and its GPUs as fast as it can, and reads nothing"]
fn helper_oscillates() {
    let mut clients: Vec<Client> = Vec::new();
    let mut round = 0u64;
    attack(|| {
        round += 1;
        if clients.len() < 100 {
            clients.extend(intrude());
        }
        clients.retain(|client| {
            let demand = if round.is_multiple_of(2) { 16 << 30 } else { 0 };
            say(client, support::attach(0, listed()))
                && say(client, support::memory(0, demand, 0))
                && say(client, ClientMessage::RequestLimit { slot: 0, bytes: 1 << 49 })
                && say(client, ClientMessage::Reserve { slot: 0, bytes: u64::MAX })
                && say(client, ClientMessage::Utilization { slot: 0, permille: u32::MAX })
                && say(client, ClientMessage::Request { gpus: 1 })
                && say(client, ClientMessage::Cancel { gpus: 1 })
                && say(client, support::release())
                && say(client, ClientMessage::Detach { slot: 0 })
        });
    });
}

#[test]
fn oscillating_clients_leave_turns_to_other_tenants() {
    if !runs_here("attacks::oscillating_clients_leave_turns_to_other_tenants") {
        return;
    }
    let siege = Siege::start("");
    siege.withstands([user("helper_oscillates", &siege)]);
}

#[test]
#[ignore = "a helper: claims to be asleep, to hold locks, and to belong to gangs"]
fn helper_claims() {
    let mut gang = 0;
    let mut clients = Vec::new();
    attack(|| {
        gang += 1;
        let Ok(client) = Client::connect(&helper_socket()) else { return };
        let flags = if gang % 2 == 0 { ASLEEP } else { u32::MAX };
        let (min_version, max_version, library) = (version::MIN, version::MAX, Text::new("\u{1b}[2Jlibrary"));
        // Half of the clients are in one gang. Its members never all request a GPU.
        let key = if gang % 2 == 0 { 1 } else { gang };
        let hello = ClientMessage::Hello { min_version, max_version, flags, resume: gang, gang: key, library };
        client.send_raw(hello.encode(0).as_bytes());
        say(&client, support::attach(0, listed()));
        say(&client, support::memory(0, 16 << 30, 0));
        if gang % 5 == 0 {
            say(&client, ClientMessage::Held { gpus: 1 });
        }
        clients.push(client);
        if clients.len() > 50 {
            clients.clear();
        }
        thread::sleep(Duration::from_millis(5));
    });
}

#[test]
fn claims_of_sleep_locks_and_gangs_delay_no_other_tenant() {
    if !runs_here("attacks::claims_of_sleep_locks_and_gangs_delay_no_other_tenant") {
        return;
    }
    let siege = Siege::start("");
    siege.withstands([user("helper_claims", &siege)]);
}

#[test]
#[ignore = "a helper: requests the lock for many clients, which never answer, and reports each grant"]
fn helper_requests_and_says_nothing() {
    let clients: Vec<Client> = (0..20).map(|_| Client::welcomed(&helper_socket())).collect();
    for client in &clients {
        client.attach_gpu(listed(), 16 << 30);
        client.report(12 << 30, 0);
        client.request();
    }
    for client in clients {
        // SAFETY: `fcntl` with F_SETFL takes no pointers, and the descriptor is open.
        unsafe { libc::fcntl(client.socket.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        thread::spawn(move || {
            loop {
                let mut packet = [0; MAX_LEN];
                // SAFETY: the kernel writes at most the length of `packet`.
                let length = unsafe {
                    libc::recv(client.socket.as_raw_fd(), packet.as_mut_ptr().cast(), packet.len(), 0).max(0)
                };
                let message = SchedulerMessage::decode(&packet[..length as usize], client.version);
                if let Ok(SchedulerMessage::Grant { .. }) = message {
                    eprintln!("held");
                }
                thread::sleep(Duration::from_millis(5));
            }
        });
    }
    hold(());
}

/// Each of the silent clients may keep the lock for five seconds, but they are one tenant.
#[test]
fn many_silent_clients_delay_other_tenants_like_one() {
    if !runs_here("attacks::many_silent_clients_delay_other_tenants_like_one") {
        return;
    }
    let siege = Siege::start("");
    let attacker = Actor::start(user("helper_requests_and_says_nothing", &siege));
    attacker.wait(BEGUN);
    for _ in 0..2 {
        let client = siege.daemon.client();
        client.attach_gpu(listed(), 16 << 30);
        client.report(64 * MIB, 0);
        client.request();
        client.until_granted();
    }
    let held = attacker.end().iter().filter(|line| *line == "held").count();
    assert!(held <= 4, "they held the lock {held} times before the other tenant's second turn");
}

#[test]
#[ignore = "a helper: its clients claim almost the whole GPU, map nothing, and keep their claims"]
fn helper_hoards() {
    let (total, demand) = (16u64 << 30, 15u64 << 30);
    let clients: Vec<Client> = (0..3).map(|_| Client::welcomed(&helper_socket())).collect();
    for client in &clients {
        client.attach_gpu(listed(), total);
        client.send(ClientMessage::RequestLimit { slot: 0, bytes: demand });
        client.report(demand, 0);
    }
    hold(clients);
}

/// Demand that was never on the GPU defers no context of another tenant.
#[test]
fn claims_of_the_whole_gpu_keep_no_other_tenant_from_a_context() {
    if !runs_here("attacks::claims_of_the_whole_gpu_keep_no_other_tenant_from_a_context") {
        return;
    }
    let siege = Siege::start("");
    let attacker = Actor::start(user("helper_hoards", &siege));
    attacker.wait(BEGUN);
    let newcomers: Vec<Client> = (0..3).map(|_| siege.daemon.client()).collect();
    let begin = Instant::now();
    newcomers.iter().for_each(|client| client.attach_gpu(listed(), 16 << 30));
    assert!(begin.elapsed() < HANG, "new contexts were deferred");
    attacker.end();
}

#[test]
#[ignore = "a helper: sends lists and values without end"]
fn helper_sends_texts_without_end() {
    let mut clients: Vec<Client> = Vec::new();
    let part = Text::new(&"GPU-0,".repeat(32));
    attack(|| {
        if clients.len() < 200 {
            clients.extend(intrude());
        }
        clients.retain(|client| {
            discard(client);
            (0..21).all(|_| say(client, ClientMessage::VisibleDevices { text: part }))
                && (0..20).all(|_| {
                    say(client, ClientMessage::EnvLimit { limit: LimitName::AllowedGpus, more: 1, text: part })
                })
                && say(client, ClientMessage::EnvLimit { limit: LimitName::AllowedGpus, more: 0, text: part })
                && say(
                    client,
                    ClientMessage::RequestPlacement {
                        chooser: Chooser::List,
                        count: u32::MAX,
                        bytes: 1 << 50,
                        devices: u64::MAX,
                        ahead: 1,
                    },
                )
        });
    });
}

#[test]
fn texts_without_end_use_little_memory() {
    if !runs_here("attacks::texts_without_end_use_little_memory") {
        return;
    }
    let siege = Siege::start("");
    siege.withstands([0, 1].map(|_| user("helper_sends_texts_without_end", &siege)));
}

// ---- Processes ----

/// Moves this process's command line to a region of `bytes` bytes, which take no memory.
fn lengthen_command_line(bytes: usize) {
    /// The kernel's `struct prctl_mm_map`.
    #[repr(C)]
    struct Map {
        addresses: [u64; 11],
        auxv: *const u64,
        auxv_size: u32,
        exe: u32,
    }
    let stat = fs::read_to_string("/proc/self/stat").expect("the own state");
    let fields: Vec<u64> =
        stat.rsplit_once(')').expect("a name").1.split(' ').map(|f| f.parse().unwrap_or(0)).collect();
    // The text after the process's name begins with a space, so `fields[0]` is empty and
    // `fields[1]` is the third field of the file.
    let field = |number: usize| fields[number - 2];
    // SAFETY: the mapping is new, and the kernel checks the addresses of the map.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let region = libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, flags, -1, 0);
        assert_ne!(region, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        let (brk, begin) = (libc::sbrk(0) as u64, region as u64);
        let addresses = [
            field(26),
            field(27),
            field(45),
            field(46),
            field(47),
            brk,
            field(28),
            begin,
            begin + bytes as u64,
            field(50),
            field(51),
        ];
        let map = Map { addresses, auxv: std::ptr::null(), auxv_size: 0, exe: u32::MAX };
        let size = size_of::<Map>() as libc::c_ulong;
        let done = libc::prctl(libc::PR_SET_MM, libc::PR_SET_MM_MAP as libc::c_ulong, &raw const map, size, 0);
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
    }
}

#[test]
#[ignore = "a helper: connects with a command line of 64 GiB and a name of control characters"]
fn helper_has_a_long_command_line() {
    lengthen_command_line(64 << 30);
    // SAFETY: the name ends with NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"\x1b[2J\n) R 1 \x07".as_ptr()) };
    let mut clients: Vec<Client> = Vec::new();
    attack(|| {
        clients.extend(intrude());
        if clients.len() > 20 {
            clients.clear();
        }
        thread::sleep(Duration::from_millis(1));
    });
}

/// The kernel lets each process choose the address and the length of its command line.
#[test]
fn a_command_line_of_any_length_takes_neither_time_nor_memory() {
    if !runs_here("attacks::a_command_line_of_any_length_takes_neither_time_nor_memory") {
        return;
    }
    let siege = Siege::start("");
    siege.withstands([user("helper_has_a_long_command_line", &siege)]);
}

/// Connects until a client is refused, and keeps the clients.
fn fill() -> Vec<Client> {
    let mut welcomed = Vec::new();
    loop {
        let Ok(client) = Client::connect(&helper_socket()) else { return welcomed };
        client.send_raw(support::hello().encode(0).as_bytes());
        match client.receive() {
            Some(SchedulerMessage::Welcome { .. }) => welcomed.push(client),
            _ => return welcomed,
        }
    }
}

#[test]
#[ignore = "a helper: connects until it is refused"]
fn helper_fills() {
    let clients = fill();
    let count = clients.len();
    hold(clients);
    eprintln!("{count} welcomed");
}

/// The sum of the clients that attackers report as welcomed.
fn welcomed(said: &[String]) -> usize {
    said.iter().filter_map(|line| line.strip_suffix(" welcomed")?.parse::<usize>().ok()).sum()
}

/// Namespaces map the user to root, to the honest client's user, and to other users.
#[test]
fn user_namespaces_share_their_owners_limit() {
    if !runs_here("attacks::user_namespaces_share_their_owners_limit") {
        return;
    }
    let siege = Siege::start("max-clients-per-tenant = 5\n");
    let inside = [0, HONEST, 1, 1000, NOBODY];
    let said = siege.withstands(inside.map(|uid| in_user_namespace(uid, "helper_fills", &siege)));
    assert_eq!(welcomed(&said), 5);
}

#[test]
#[ignore = "a helper: as root of a container, connects from control groups with misleading names"]
fn helper_renames_its_control_group() {
    let own = std::env::var("NVSHARE_TEST_CGROUP").expect("run by a test, not by hand");
    let own = Path::new(&own);
    let mut clients = Vec::new();
    let names = [
        "user-0.slice".to_owned(),
        "system.slice".into(),
        "user@0.service".into(),
        format!("docker-{:064x}.scope", 1),
        format!("kubepods-pod{:032x}.slice", 2),
        "\u{1b}[2J\r.service".into(),
        "..\u{7}".into(),
    ];
    let mut groups = Vec::new();
    for name in &names {
        let group = own.join(name);
        fs::create_dir(&group).expect("a control group");
        fs::write(group.join("cgroup.procs"), "0").expect("a move");
        clients.extend(fill());
        groups.push(group);
    }
    let count = clients.len();
    hold(clients);
    fs::write(own.join("cgroup.procs"), "0").expect("a move");
    groups.iter().for_each(|group| fs::remove_dir(group).expect("an empty control group"));
    eprintln!("{count} welcomed");
}

#[test]
fn names_of_control_groups_inside_a_container_change_no_limit() {
    if !runs_here("attacks::names_of_control_groups_inside_a_container_change_no_limit") {
        return;
    }
    let Some(unit) = Unit::new(&format!("docker-{}.scope", container_id())) else { return };
    let siege = Siege::start("max-clients-per-tenant = 5\n");
    let mut attacker = root_of(&unit, "helper_renames_its_control_group", &siege);
    attacker.env("NVSHARE_TEST_CGROUP", unit.procs().parent().expect("a directory"));
    assert_eq!(welcomed(&siege.withstands([attacker])), 5);
}

#[test]
#[ignore = "a helper: as root of a container, joins 65,536 groups and connects often"]
fn helper_has_many_groups() {
    let groups: Vec<libc::gid_t> = (1..=65536).collect();
    // SAFETY: the list is live and has this length.
    let set = unsafe { libc::setgroups(groups.len(), groups.as_ptr()) };
    assert_eq!(set, 0, "{}", io::Error::last_os_error());
    let mut clients = Vec::new();
    attack(|| {
        clients.extend(intrude().inspect(|client| {
            say(client, support::attach(0, listed()));
        }));
        if clients.len() > 50 {
            clients.clear();
        }
        thread::sleep(Duration::from_millis(5));
    });
}

/// Root of a container may join any number of groups.
#[test]
fn clients_in_many_groups_use_little_memory() {
    if !runs_here("attacks::clients_in_many_groups_use_little_memory") {
        return;
    }
    let Some(unit) = Unit::new(&format!("docker-{}.scope", container_id())) else { return };
    let siege = Siege::start("");
    siege.withstands([root_of(&unit, "helper_has_many_groups", &siege)]);
}

#[test]
#[ignore = "a helper: as root of a container, connects from processes that end before they are accepted"]
fn helper_connects_and_ends() {
    attack(|| {
        // SAFETY: the child makes only system calls.
        let child = unsafe { libc::fork() };
        if child != 0 {
            // SAFETY: `child` is a child of this process.
            unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
            return;
        }
        for _ in 0..500 {
            if let Some(client) = intrude() {
                say(&client, support::attach(0, listed()));
                say(&client, ClientMessage::Request { gpus: 1 });
                std::mem::forget(client);
            }
        }
        // SAFETY: the process ends without any cleanup.
        unsafe { libc::_exit(0) };
    });
}

/// The scheduler knows only that such a process belongs to the host's root.
#[test]
fn processes_that_end_before_they_are_accepted_delay_no_other_tenant() {
    if !runs_here("attacks::processes_that_end_before_they_are_accepted_delay_no_other_tenant") {
        return;
    }
    let Some(unit) = Unit::new(&format!("docker-{}.scope", container_id())) else { return };
    let siege = Siege::start("");
    siege.withstands([0, 1].map(|_| root_of(&unit, "helper_connects_and_ends", &siege)));
}

#[test]
#[ignore = "a helper: as root of a container, connects from ever new units"]
fn helper_invents_units() {
    let own = std::env::var("NVSHARE_TEST_CGROUP").expect("run by a test, not by hand");
    let own = Path::new(&own);
    let (long, mut number) = ("u".repeat(200), 0);
    let ended = end_of_input();
    while number < 1000 && !ended.load(Ordering::Relaxed) {
        let group = own.join(format!("{long}{number:04}.scope"));
        fs::create_dir(&group).expect("a control group");
        fs::write(group.join("cgroup.procs"), "0").expect("a move");
        let client = Client::welcomed(&helper_socket());
        client.attach_gpu(listed(), 16 << 30);
        drop(client);
        fs::write(own.join("cgroup.procs"), "0").expect("a move");
        fs::remove_dir(&group).expect("an empty control group");
        number += 1;
        if number == 300 {
            eprintln!("{BEGUN}");
        }
    }
}

/// Runs a query on the control socket.
fn ask<T>(daemon: &Daemon, query: impl AsyncFnOnce(SchedulerProxy<'_>) -> zbus::Result<T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let stream = UnixStream::connect(daemon.control()).expect("the control socket");
        let connection = zbus::connection::Builder::unix_stream(stream).p2p().build().await.expect("the handshake");
        let scheduler = SchedulerProxy::new(&connection).await.expect("a proxy");
        query(scheduler).await.expect("an answer")
    })
}

/// The scheduler remembers units for five minutes.
#[test]
fn invented_units_of_one_tenant_are_limited() {
    if !runs_here("attacks::invented_units_of_one_tenant_are_limited") {
        return;
    }
    let Some(unit) = Unit::new(&format!("docker-{}.scope", container_id())) else { return };
    let siege = Siege::start("");
    let mut attacker = root_of(&unit, "helper_invents_units", &siege);
    attacker.env("NVSHARE_TEST_CGROUP", unit.procs().parent().expect("a directory"));
    siege.withstands([attacker]);
    let groups = ask(&siege.daemon, async |scheduler| scheduler.list_pressure().await);
    assert!(groups.len() < 150, "{} groups", groups.len());
}

// ---- D-Bus ----

#[test]
#[ignore = "a helper: in a container that sees the control socket, begins large messages and never ends them"]
fn helper_begins_large_messages() {
    let begin = || -> io::Result<UnixStream> {
        let mut stream = UnixStream::connect(helper_socket())?;
        stream.write_all(b"\0AUTH EXTERNAL 30\r\nNEGOTIATE_UNIX_FD\r\nBEGIN\r\n")?;
        // A method call with a body of 127 MiB.
        let mut header = vec![b'l', 1, 0, 1];
        header.extend((127u32 << 20).to_le_bytes());
        header.extend(1u32.to_le_bytes());
        header.extend(16u32.to_le_bytes());
        stream.write_all(&header)?;
        Ok(stream)
    };
    hold((0..32).map(|_| begin()).collect::<Vec<_>>());
}

/// The control socket is not mounted into containers. This one sees it nevertheless.
#[test]
fn unfinished_messages_on_the_control_socket_use_little_memory() {
    if !runs_here("attacks::unfinished_messages_on_the_control_socket_use_little_memory") {
        return;
    }
    let Some(unit) = Unit::new(&format!("docker-{}.scope", container_id())) else { return };
    let siege = Siege::start("");
    let attacker = helper("attacks::helper_begins_large_messages", &siege.daemon.control());
    siege.withstands([contain(attacker, &unit)]);
}

#[test]
#[ignore = "a helper: in a container that sees the control socket, keeps all of its connections"]
fn helper_keeps_control_connections() {
    let begin = || -> io::Result<UnixStream> {
        let mut stream = UnixStream::connect(helper_socket())?;
        stream.write_all(b"\0AUTH EXTERNAL 30\r\nBEGIN\r\n")?;
        Ok(stream)
    };
    hold((0..200).map(|_| begin()).collect::<Vec<_>>());
}

#[test]
fn idle_connections_of_a_container_leave_the_control_socket_to_root() {
    if !runs_here("attacks::idle_connections_of_a_container_leave_the_control_socket_to_root") {
        return;
    }
    let Some(unit) = Unit::new(&format!("docker-{}.scope", container_id())) else { return };
    let siege = Siege::start("");
    let attacker = helper("attacks::helper_keeps_control_connections", &siege.daemon.control());
    siege.withstands([contain(attacker, &unit)]);
}

#[test]
#[ignore = "a helper: in a container, leaves its control connections to a child, and ends"]
fn helper_leaves_control_connections_to_a_child() {
    let socket = helper_socket();
    // The scheduler may accept some connections before their process has ended, so there are many.
    for _ in 0..40 {
        // SAFETY: this process has one thread that uses the heap while it forks. The processes end without any
        // cleanup, or with this process's PID namespace.
        unsafe {
            let parent = libc::fork();
            if parent == 0 {
                let streams: Vec<_> = (0..20).filter_map(|_| UnixStream::connect(&socket).ok()).collect();
                if libc::fork() == 0 {
                    libc::pause();
                }
                std::mem::forget(streams);
                libc::_exit(0);
            }
            libc::waitpid(parent, std::ptr::null_mut(), 0);
        }
    }
    hold(());
}

/// The scheduler cannot tell the PID namespace of a process that has ended.
#[test]
fn connections_of_a_process_that_has_ended_leave_the_control_socket_to_root() {
    if !runs_here("attacks::connections_of_a_process_that_has_ended_leave_the_control_socket_to_root") {
        return;
    }
    let Some(unit) = Unit::new(&format!("docker-{}.scope", container_id())) else { return };
    let siege = Siege::start("");
    let attacker = helper("attacks::helper_leaves_control_connections_to_a_child", &siege.daemon.control());
    siege.withstands([contain(attacker, &unit)]);
}

// ---- Files ----

#[test]
#[ignore = "a helper: locks the lock files beside the socket"]
fn helper_locks_the_lock_files() {
    let directory = helper_socket().parent().expect("a directory").to_owned();
    let mut locked: Vec<File> = Vec::new();
    attack(|| {
        locked.clear();
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            let Ok(file) = File::open(entry.path()) else { continue };
            // SAFETY: the descriptor is open.
            unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) };
            locked.push(file);
        }
        if let Some(client) = intrude() {
            say(&client, support::attach(0, Uuid([locked.len() as u8; 16])));
        }
        thread::sleep(Duration::from_millis(5));
    });
}

#[test]
fn locked_lock_files_delay_no_client_of_a_running_scheduler() {
    if !runs_here("attacks::locked_lock_files_delay_no_client_of_a_running_scheduler") {
        return;
    }
    let siege = Siege::start("");
    siege.withstands([user("helper_locks_the_lock_files", &siege)]);
}

/// A client that names the listed GPU without its device file is disconnected, whether it names the
/// GPU as a MIG slice or as a GPU. A GPU whose UUID differs in one bit is another GPU.
#[test]
fn a_listed_gpu_needs_its_device_file_under_any_kind() {
    if !runs_here("attacks::a_listed_gpu_needs_its_device_file_under_any_kind") {
        return;
    }
    let siege = Siege::start("");
    let attach = |uuid, kind| ClientMessage::Attach {
        slot: 63,
        uuid,
        kind,
        engine: Engine::Swap,
        total: 16 << 30,
        name: Text::new("GPU"),
        reason: EngineReason::Best,
    };
    for kind in [GpuKind::Mig, GpuKind::Gpu] {
        let client = siege.daemon.client();
        client.send_raw(attach(listed(), kind).encode(client.version).as_bytes());
        client.until_end();
    }
    let neighbours: Vec<Client> = (0..16)
        .map(|bit| {
            let mut uuid = listed();
            uuid.0[bit] ^= 1 << (bit % 8);
            let client = siege.daemon.client();
            client.send_raw(attach(uuid, GpuKind::Mig).encode(client.version).as_bytes());
            client.until(|message| matches!(message, SchedulerMessage::Attached { slot: 63 }));
            client.send(ClientMessage::Request { gpus: 1 << 63 });
            client.until(|message| matches!(message, SchedulerMessage::Grant { gpus } if *gpus == 1 << 63));
            client
        })
        .collect();
    let client = siege.daemon.client();
    client.attach_gpu(listed(), 16 << 30);
    client.request();
    client.until_granted();
    drop(neighbours);
}

/// A client that is asleep need not show the device file. The claim grants nothing.
#[test]
fn a_claim_of_sleep_is_no_substitute_for_the_device_file() {
    if !runs_here("attacks::a_claim_of_sleep_is_no_substitute_for_the_device_file") {
        return;
    }
    let siege = Siege::start("");
    let claimant = Client::connect(&siege.daemon.socket()).expect("the daemon listens");
    let (min_version, max_version, library) = (version::MIN, version::MAX, Text::new("test"));
    let hello = ClientMessage::Hello { min_version, max_version, flags: ASLEEP, resume: 0, gang: 0, library };
    claimant.send_raw(hello.encode(0).as_bytes());
    claimant.send_raw(support::attach(0, listed()).encode(version::MAX).as_bytes());
    for message in [support::memory(0, 16 << 30, 16 << 30), ClientMessage::Wake {}, ClientMessage::Request { gpus: 1 }]
    {
        say(&claimant, message);
    }
    let honest = siege.daemon.client();
    honest.attach_gpu(listed(), 16 << 30);
    honest.report(15 << 30, 0);
    honest.request();
    honest.until_granted();
    honest.release();
    let soon = libc::timeval { tv_sec: 1, tv_usec: 0 };
    // SAFETY: the option's value is live and of this size.
    unsafe {
        let (value, size) = ((&raw const soon).cast(), size_of_val(&soon) as libc::socklen_t);
        libc::setsockopt(claimant.socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVTIMEO, value, size);
    }
    let mut packet = [0; MAX_LEN];
    loop {
        // SAFETY: the kernel writes at most the length of `packet`.
        let length = unsafe { libc::recv(claimant.socket.as_raw_fd(), packet.as_mut_ptr().cast(), packet.len(), 0) };
        if length <= 0 {
            break;
        }
        let message = SchedulerMessage::decode(&packet[..length as usize], version::MAX).expect("a message");
        assert!(!matches!(message, SchedulerMessage::Grant { .. }), "{message:?}");
    }
}

/// The key of an exporter is a secret, but only within the exporter's tenant.
#[test]
#[ignore = "a helper: exports memory with the key of another tenant, and opens that tenant's memory"]
fn helper_uses_a_foreign_key() {
    let [exporter, importer] = [(), ()].map(|()| Client::welcomed(&helper_socket()));
    for client in [&exporter, &importer] {
        client.attach_gpu(listed(), 16 << 30);
    }
    exporter.send(ClientMessage::Exporter { key: KEY });
    let mut ticket = 0;
    attack(|| {
        ticket += 1;
        let message = ClientMessage::Open { ticket, exporter: KEY, secret: KEY, range: 1, allocation: 2, first: 0 };
        say(&importer, message);
        discard(&importer);
        // A guess at the ticket of the other tenant's importer.
        let answer =
            ClientMessage::Exported { ticket: ticket.into(), outcome: Sharing::Done, slot: 0, bytes: MIB, chunk: MIB };
        let null = File::open("/dev/null").expect("a file");
        send_with(&exporter, answer.encode(version::MAX).as_bytes(), &[null.as_raw_fd()]);
        discard(&exporter);
    });
}

const KEY: Secret = Secret([77; 16]);

/// Both tenants have an exporter with the same key. Each request reaches the exporter of its own
/// tenant.
#[test]
fn exporters_of_two_tenants_with_one_key_stay_apart() {
    if !runs_here("attacks::exporters_of_two_tenants_with_one_key_stay_apart") {
        return;
    }
    let siege = Siege::start("");
    let attacker = Actor::start(user("helper_uses_a_foreign_key", &siege));
    attacker.wait(BEGUN);
    let [exporter, importer] = [(), ()].map(|()| siege.daemon.client());
    for client in [&exporter, &importer] {
        client.attach_gpu(listed(), 16 << 30);
    }
    exporter.send(ClientMessage::Exporter { key: KEY });
    exporter.request();
    exporter.until_granted(); // the scheduler has read the key
    let file = File::open("/proc/self/exe").expect("a file");
    for ticket in 0..20 {
        let open = ClientMessage::Open { ticket, exporter: KEY, secret: KEY, range: 1, allocation: 2, first: 0 };
        importer.send(open);
        let export = exporter.until(|message| matches!(message, SchedulerMessage::Export { .. }));
        let SchedulerMessage::Export { ticket: of_export, .. } = export else { panic!("{export:?}") };
        let bytes = MIB + u64::from(ticket);
        let answer =
            ClientMessage::Exported { ticket: of_export, outcome: Sharing::Done, slot: 0, bytes, chunk: bytes };
        assert!(exporter.send_with(answer.encode(exporter.version).as_bytes(), &[file.try_clone().expect("a copy")]));
        let opened = importer.until(|message| matches!(message, SchedulerMessage::Opened { .. }));
        assert_eq!(opened, SchedulerMessage::Opened { ticket, outcome: Sharing::Done, bytes, chunk: bytes });
        importer.send(ClientMessage::Closed { exporter: KEY, range: 1 });
    }
    attacker.end();
}

// ---- Swap files and rooms ----

/// Receives a message, and the files that it carries.
fn receive_with_files(client: &Client) -> Option<(SchedulerMessage, Vec<File>)> {
    let (mut packet, mut control) = ([0u8; MAX_LEN], [0u64; 16]);
    let mut part = libc::iovec { iov_base: packet.as_mut_ptr().cast(), iov_len: packet.len() };
    // SAFETY: all pointers in `header` are to live buffers of the lengths beside them. The kernel has made
    // the descriptors for this process, and no other value owns them.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        (header.msg_iov, header.msg_iovlen) = (&raw mut part, 1);
        (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control));
        let length = libc::recvmsg(client.socket.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC);
        let message = SchedulerMessage::decode(packet.get(..usize::try_from(length).ok()?)?, client.version).ok()?;
        let mut files = Vec::new();
        let first = libc::CMSG_FIRSTHDR(&raw const header);
        if !first.is_null() && (*first).cmsg_type == libc::SCM_RIGHTS {
            let count = ((*first).cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<RawFd>();
            let data = libc::CMSG_DATA(first).cast::<RawFd>();
            files.extend((0..count).map(|index| File::from_raw_fd(data.add(index).read_unaligned())));
        }
        Some((message, files))
    }
}

/// A client that requests a limit, and has its swap file.
struct Requester {
    client: Client,
    wanted: u64,
    ram_max: u64,
    limit: u64,
    file: Option<File>,
}

impl Requester {
    /// Attaches the listed GPU.
    fn start(client: Client, total: u64, wanted: u64, ram_max: u64) -> Self {
        let soon = libc::timeval { tv_sec: 0, tv_usec: 20_000 };
        // SAFETY: the option's value is live and of this size.
        unsafe {
            let (value, size) = ((&raw const soon).cast(), size_of_val(&soon) as libc::socklen_t);
            libc::setsockopt(client.socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVTIMEO, value, size);
        }
        say_attach(&client, total);
        Self { client, wanted, ram_max, limit: 0, file: None }
    }

    /// Answers the next message, if one comes soon.
    fn step(&mut self) {
        let Some((message, files)) = receive_with_files(&self.client) else { return };
        match message {
            SchedulerMessage::OfferSwapFile {} => {
                say(&self.client, ClientMessage::UseSwapFile { ram_max: self.ram_max });
            }
            SchedulerMessage::Attached { .. } => {
                say(&self.client, ClientMessage::RequestLimit { slot: 0, bytes: self.wanted });
            }
            SchedulerMessage::Limit { bytes, seq, .. } => {
                self.limit = bytes;
                say(&self.client, support::memory_after(0, seq, bytes.min(self.wanted), 0));
            }
            SchedulerMessage::HostMemory { .. } => self.file = files.into_iter().next().or(self.file.take()),
            _ => {}
        }
    }

    /// Returns the client's swap file, if it gets one within a second.
    fn swap_file(client: Client) -> Option<File> {
        let mut requester = Self::start(client, 16 << 30, 15 << 30, MIB);
        let begin = Instant::now();
        while requester.file.is_none() && begin.elapsed() < Duration::from_secs(1) {
            requester.step();
        }
        requester.file
    }
}

fn say_attach(client: &Client, of: u64) {
    let mut attach = support::attach(0, listed());
    if let ClientMessage::Attach { total, .. } = &mut attach {
        *total = of;
    }
    say(client, attach);
}

fn blocks(file: &File) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&file.metadata().expect("its size")) * 512
}

fn swap_files(max: &str, file_max: &str) -> String {
    let directory = test_support::artifact("nvshare-scheduler").with_file_name("swap-files");
    format!("[swap]\nmax = \"{max}\"\nfile = {directory:?}\nfile-max = \"{file_max}\"\n")
}

#[test]
#[ignore = "a helper: gets a swap file, disconnects, keeps the file, and begins again; then it fills the first file"]
fn helper_hoards_swap_files() {
    let mut kept = Vec::new();
    for _ in 0..8 {
        kept.extend(Requester::swap_file(Client::welcomed(&helper_socket())));
    }
    let first = kept.first().expect("a swap file");
    eprintln!("{} files have {} bytes", kept.len(), kept.iter().map(blocks).sum::<u64>());
    // SAFETY: `posix_fallocate` takes no pointers, and the descriptor is open.
    assert_eq!(unsafe { libc::posix_fallocate(first.as_raw_fd(), first.metadata().unwrap().len() as i64, 1 << 30) }, 0);
    wait_within(support::PATIENCE, "the file to be emptied", || (blocks(first) == 0).then_some(()));
    eprintln!("its file is empty");
    hold(kept);
}

/// A process keeps its swap file open after it has disconnected. The space still counts for its tenant, and the
/// file is emptied if it grows.
#[test]
fn files_kept_by_disconnected_clients_count_for_their_tenant() {
    if !runs_here("attacks::files_kept_by_disconnected_clients_count_for_their_tenant") {
        return;
    }
    let siege = Siege::start(&swap_files("80%", "1G"));
    let attacker = Actor::start(user("helper_hoards_swap_files", &siege));
    let line = attacker.wait("files have");
    let bytes: u64 = line.split(' ').nth(3).and_then(|number| number.parse().ok()).expect("a number");
    assert!(bytes > 0 && bytes <= (1 << 30) + (64 << 20), "{line}");
    // Files are checked every 5 s.
    let line = attacker.lines.recv_timeout(support::PATIENCE).expect("a line");
    assert_eq!(line, "its file is empty");
    attacker.end();
    let has_file = || Requester::swap_file(siege.daemon.client()).map(drop);
    wait_within(support::PATIENCE, "the space to be free", has_file);
}

#[test]
#[ignore = "a helper: names GPUs that do not exist and are larger than all memory"]
fn helper_invents_large_gpus() {
    let client = intrude().expect("the daemon listens");
    for slot in 0..4 {
        let mut attach = support::attach(slot, Uuid([slot as u8 + 1; 16]));
        if let ClientMessage::Attach { total, .. } = &mut attach {
            *total = 1 << 50;
        }
        assert!(say(&client, attach));
    }
    client.until(|message| matches!(message, SchedulerMessage::Attached { slot: 3 }));
    hold(client);
}

/// The space of swap files backs promises beyond the memory of the GPUs. The memory of a GPU that does not
/// exist must not be subtracted from it.
#[test]
fn invented_gpus_leave_the_swap_files_to_other_tenants() {
    let test = "attacks::invented_gpus_leave_the_swap_files_to_other_tenants";
    if !is_root() {
        return test_support::skip("root, to act as other users");
    }
    if !has_own_process(test, &[("CUDA_SIM_MEMORY", (2u64 << 30).to_string())]) {
        return;
    }
    let siege = Siege::start(&swap_files("256M", "8G"));
    let attacker = Actor::start(user("helper_invents_large_gpus", &siege));
    attacker.wait(BEGUN);
    // Together, they need more than the GPU and the host memory, and less than the files.
    let start = |_| Requester::start(siege.daemon.client(), 2 << 30, 1 << 30, u64::MAX);
    let mut clients: Vec<Requester> = (0..5).map(start).collect();
    wait_within(support::PATIENCE, "all limits", || {
        clients.iter_mut().for_each(Requester::step);
        clients.iter().all(|client| client.limit >= client.wanted).then_some(())
    });
    attacker.end();
}

/// Each byte written to a room's descriptor renews the room, which takes time proportional to the number of
/// clients.
#[test]
fn bytes_written_to_a_room_without_end_renew_it_rarely() {
    if !runs_here("attacks::bytes_written_to_a_room_without_end_renew_it_rarely") {
        return;
    }
    let siege = Siege::around(Daemon::start_with(|command, directory| {
        command.arg("--record").arg(directory.join("record")).args(["--log-level", "info"]);
    }));
    let begin = Instant::now();
    let rooms: Vec<UnixStream> = (0..4)
        .map(|_| {
            let make = async |scheduler: SchedulerProxy<'_>| {
                scheduler.make_room("", MIB, std::collections::HashMap::new()).await
            };
            UnixStream::from(OwnedFd::from(ask(&siege.daemon, make)))
        })
        .collect();
    rooms.iter().for_each(|room| room.set_nonblocking(true).expect("a socket"));
    let mut written = 0;
    while begin.elapsed() < 2 * ATTACK {
        for mut room in &rooms {
            written += room.write(&[0; 64]).unwrap_or(0);
        }
    }
    siege.answers();
    let record = fs::read(siege.daemon.socket().parent().and_then(Path::parent).expect("its directory").join("record"));
    let record = String::from_utf8_lossy(&record.expect("the record")).into_owned();
    let renewals = record.matches("room-requested").count();
    // Twice a second each, and once at first.
    let most = rooms.len() * (2 + 2 * begin.elapsed().as_secs_f64().ceil() as usize);
    assert!(written > 10_000 && renewals > rooms.len() && renewals <= most, "{renewals} of {most}, {written} bytes");
}
