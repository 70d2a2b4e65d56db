//! Tests of `nvshare-checkpoint` on the simulated GPU. Each test runs this test binary again as the
//! process that is put to sleep.

use cuda_sim_gpus::{
    account::Figures,
    trouble::{self, Stranger},
};
use nvshare_checkpoint::{ANSWER, Operation, Outcome, Reply, Request, Step};
use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
        SocketType, recv, sendmsg, socket_with, socketpair,
    },
    process::{Pid, PidfdFlags, geteuid, pidfd_open},
};
use std::{
    env, fs,
    io::{BufRead, BufReader, IoSlice, Lines, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, FromRawFd, OwnedFd},
        unix::{
            fs::{PermissionsExt, symlink},
            process::CommandExt,
        },
    },
    path::PathBuf,
    process::{Child, ChildStdout, Command, Stdio},
    thread,
    time::Duration,
};
use test_support::{Directory, artifact, kill, wait_for};

const M: u64 = 1 << 20;
const ROLE: &str = "NVSHARE_CHECKPOINT_TEST_ROLE";
const HELPER: &str = env!("CARGO_BIN_EXE_nvshare-checkpoint");
const LOCK_TIMEOUT_MS: u32 = 3000;
const NOT_READY: u32 = 600;
const NOT_SUPPORTED: u32 = 801;
const OUT_OF_MEMORY: u32 = 2;

const DONE: Reply = Reply { outcome: Outcome::Runs, failed: Step::None, error: 0 };
const ASLEEP: Reply = Reply { outcome: Outcome::Asleep, ..DONE };

fn call(name: &str, arguments: [usize; 4]) -> u32 {
    // SAFETY: any program may load the simulated driver. Integers and pointers use the same
    // registers, and a function ignores registers beyond its parameters.
    unsafe {
        let library = libloading::Library::new(artifact("libcuda.so")).expect("the simulated driver");
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        type Call = unsafe extern "C" fn(usize, usize, usize, usize) -> u32;
        let call = library.get::<Call>(name.as_bytes()).expect("a function of the driver");
        call(arguments[0], arguments[1], arguments[2], arguments[3])
    }
}

/// The process that is put to sleep. It creates a context, writes a value to 32 MiB of GPU memory,
/// and makes one call for each line of input.
fn sleeper() {
    let (mut context, mut at) = (0_usize, 0_usize);
    assert_eq!(call("cuInit", [0; 4]), 0);
    assert_eq!(call("cuDevicePrimaryCtxRetain", [&raw mut context as usize, 0, 0, 0]), 0);
    assert_eq!(call("cuCtxSetCurrent", [context, 0, 0, 0]), 0);
    assert_eq!(call("cuMemAlloc_v2", [&raw mut at as usize, 32 << 20, 0, 0]), 0);
    assert_eq!(call("cuMemsetD32_v2", [at, 7, 8 << 20, 0]), 0);
    println!("\nsaid 0");
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let mut answer = 0_usize;
        let place = &raw mut answer as usize;
        let code = match line.as_str() {
            "read" => call("cuMemcpyDtoH_v2", [place, at, 4, 0]),
            "managed" => call("cuMemAllocManaged", [place, 1 << 20, 1, 0]),
            "wait" => {
                let mut never = 0_usize;
                assert_eq!(call("cuMemHostAlloc", [&raw mut never as usize, 4096, 2, 0]), 0);
                call("cuStreamWaitValue32_v2", [0, never, 1, 0])
            }
            other => panic!("what is {other}?"),
        };
        println!("\nsaid {}", if line == "read" { answer as u32 } else { code });
    }
}

struct Sleeper {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts the process on a simulated GPU of 128 MiB, where a context uses 16 MiB. The environment
/// selects the GPU, and the driver reads it once per process. Each test therefore runs again in a
/// process of its own. Returns `None` in the outer process.
fn start(test: &str) -> Option<Sleeper> {
    start_as(test, None)
}

fn start_as(test: &str, uid: Option<u32>) -> Option<Sleeper> {
    let again = |role: &str| {
        let mut again = Command::new(env::current_exe().expect("this program"));
        again.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(ROLE, role);
        again
    };
    match env::var(ROLE).as_deref() {
        Ok("sleeper") => {
            sleeper();
            return None;
        }
        Ok(_) => {}
        Err(_) => {
            let directory = Directory::new();
            symlink(artifact("libcuda.so"), directory.0.join("libcuda.so.1")).expect("a link");
            let machine = [("CUDA_SIM_MEMORY", "128M"), ("CUDA_SIM_LINK_BANDWIDTH", "8G")];
            let status = again("test").envs(machine).env("CUDA_SIM_DIR", &directory.0).status().expect("run it again");
            assert!(status.success(), "{test}: {status}");
            assert!(directory.0.join("processes").exists(), "{test} did not run: is that its name?");
            return None;
        }
    }
    let mut sleeper = again("sleeper");
    if let Some(uid) = uid {
        let open = |mode| fs::set_permissions(machine(), fs::Permissions::from_mode(mode)).expect("its mode");
        open(0o777);
        sleeper.uid(uid).gid(uid);
    }
    let mut child = sleeper.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start it");
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut sleeper = Sleeper { child, lines };
    assert_eq!(sleeper.says(), 0);
    Some(sleeper)
}

/// Returns the directory of the simulated GPU, which contains the driver under the name that
/// programs load.
fn machine() -> PathBuf {
    env::var_os("CUDA_SIM_DIR").expect("only in the process of a test").into()
}

fn used() -> u64 {
    Figures::of(0).used(0) / M
}

impl Sleeper {
    fn tell(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().expect("piped"), "{line}").expect("it runs");
    }

    /// Stops the process, and waits until all threads have stopped, because a signal stops them one
    /// after the other.
    fn stop(&self) {
        let pid = self.child.id();
        kill(pid, libc::SIGSTOP);
        wait_for("all threads to stop", || {
            let mut tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
            let has_stopped = |stat: String| stat.rsplit(") ").next().is_some_and(|state| state.starts_with('T'));
            tasks
                .all(|task| task.is_ok_and(|task| fs::read_to_string(task.path().join("stat")).is_ok_and(has_stopped)))
                .then_some(())
        });
    }

    fn says(&mut self) -> u32 {
        let mut lines = self.lines.by_ref().map_while(Result::ok);
        let said = lines.find_map(|line| Some(line.strip_prefix("said ")?.to_owned()));
        said.expect("a line").parse().expect("a number")
    }

    fn pidfd(&self) -> OwnedFd {
        let pid = Pid::from_raw(self.child.id() as i32).expect("a process");
        pidfd_open(pid, PidfdFlags::empty()).expect("a pidfd")
    }

    fn helper(&self, operation: Operation) -> Helper {
        self.helper_for(operation, geteuid().as_raw(), self.pidfd())
    }

    fn helper_for(&self, operation: Operation, uid: u32, pidfd: OwnedFd) -> Helper {
        self.helper_as(Command::new(HELPER), operation, uid, pidfd)
    }

    fn helper_as(&self, command: Command, operation: Operation, uid: u32, pidfd: OwnedFd) -> Helper {
        let helper = Helper::start(command);
        helper.request(operation, uid, pidfd);
        helper
    }

    fn ask(&self, operation: Operation) -> Reply {
        self.helper(operation).answer()
    }
}

fn request(socket: &OwnedFd, operation: Operation, uid: u32, pidfd: OwnedFd) {
    let request = Request { operation, uid, lock_timeout_ms: LOCK_TIMEOUT_MS, pairs: Vec::new() }.encode();
    let descriptors = [pidfd.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
    sendmsg(socket, &[IoSlice::new(&request)], &mut ancillary, SendFlags::empty()).expect("sent");
}

fn answer(socket: &OwnedFd) -> Reply {
    let mut packet = [0; ANSWER];
    let received = loop {
        match recv(socket, &mut packet, RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            received => break received.expect("an answer").0,
        }
    };
    Reply::decode(&packet[..received]).expect("an answer")
}

struct Helper {
    socket: Option<OwnedFd>,
    child: Child,
}

impl Helper {
    fn start(mut command: Command) -> Self {
        let (own, its) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).expect("sockets");
        command.stdin(Stdio::from(its));
        if !command.get_envs().any(|(name, _)| name == "LD_LIBRARY_PATH") {
            command.env("LD_LIBRARY_PATH", machine());
        }
        Self { socket: Some(own), child: command.spawn().expect("start it") }
    }

    fn request(&self, operation: Operation, uid: u32, pidfd: OwnedFd) {
        request(self.socket.as_ref().expect("not hung up"), operation, uid, pidfd);
    }

    fn says(&self) -> Reply {
        answer(self.socket.as_ref().expect("not hung up"))
    }

    fn answer(self) -> Reply {
        let answer = self.says();
        self.ends();
        answer
    }

    fn ends(mut self) {
        self.socket = None;
        assert!(self.child.wait().expect("it ends").success());
    }
}

#[test]
fn sleep_and_wake_round_trip() {
    let Some(mut sleeper) = start("sleep_and_wake_round_trip") else { return };
    for _ in 0..3 {
        assert_eq!((sleeper.ask(Operation::Sleep), used()), (ASLEEP, 0));
        sleeper.tell("read");
        assert_eq!((sleeper.ask(Operation::Sleep), sleeper.ask(Operation::Settle), used()), (ASLEEP, ASLEEP, 0));
        assert_eq!((sleeper.ask(Operation::Wake), sleeper.says(), used()), (DONE, 7, 48));
        assert_eq!((sleeper.ask(Operation::Wake), sleeper.ask(Operation::Settle)), (DONE, DONE));
    }
}

#[test]
fn one_helper_serves_several_requests() {
    let Some(mut sleeper) = start("one_helper_serves_several_requests") else { return };
    let helper = Helper::start(Command::new(HELPER));
    for _ in 0..2 {
        for (operation, answer) in [(Operation::Sleep, ASLEEP), (Operation::Wake, DONE)] {
            helper.request(operation, geteuid().as_raw(), sleeper.pidfd());
            assert_eq!(helper.says(), answer);
        }
    }
    helper.ends();
    sleeper.tell("read");
    assert_eq!((sleeper.says(), used()), (7, 48));
    Helper::start(Command::new(HELPER)).ends();
}

/// Without systemd, for example in a pod, the helper listens itself.
#[test]
fn listening_starts_one_helper_per_connection() {
    let Some(mut sleeper) = start("listening_starts_one_helper_per_connection") else { return };
    let directory = Directory::new();
    let path = directory.0.join("checkpoint.sock");
    // A stale file exists at the socket's path.
    fs::write(&path, "").expect("a file");
    let uid = geteuid().as_raw();
    let mut command = Command::new(HELPER);
    command.arg("--listen").arg(&path).args(["--scheduler", &uid.to_string()]).env("LD_LIBRARY_PATH", machine());
    let mut listening = command.spawn().expect("start it");
    let connect = || {
        wait_for("the socket", || {
            let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
            let socket = socket.expect("a socket");
            rustix::net::connect(&socket, &SocketAddrUnix::new(&path).expect("a short path")).ok()?;
            Some(socket)
        })
    };
    let connections = [connect(), connect()];
    assert_eq!(fs::metadata(&path).expect("the socket").permissions().mode() & 0o777, 0o660);
    let ask = |socket: &OwnedFd, operation| {
        request(socket, operation, uid, sleeper.pidfd());
        answer(socket)
    };
    assert_eq!((ask(&connections[0], Operation::Sleep), used()), (ASLEEP, 0));
    assert_eq!((ask(&connections[1], Operation::Wake), used()), (DONE, 48));
    drop(connections);
    // The helper closes the connection after an invalid request, and serves the next connection.
    let wrong = connect();
    rustix::net::send(&wrong, b"what?", SendFlags::empty()).expect("sent");
    assert_eq!(recv(&wrong, &mut [0_u8; ANSWER], RecvFlags::empty()).expect("an end").0, 0);
    assert_eq!(ask(&connect(), Operation::Settle), DONE);
    sleeper.tell("read");
    assert_eq!(sleeper.says(), 7);
    let children = |pid: u32| fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("children");
    wait_for("all to have ended", || children(listening.id()).is_empty().then_some(()));
    listening.kill().expect("killed");
    listening.wait().expect("ended");
}

#[test]
fn a_process_that_cannot_be_checkpointed_keeps_running() {
    let Some(mut sleeper) = start("a_process_that_cannot_be_checkpointed_keeps_running") else { return };
    sleeper.tell("managed");
    assert_eq!(sleeper.says(), 0);
    let refused = Reply { failed: Step::Checkpoint, error: NOT_SUPPORTED, ..DONE };
    assert_eq!(sleeper.ask(Operation::Sleep), refused);
    sleeper.tell("read");
    assert_eq!(sleeper.says(), 7);
}

#[test]
fn a_lock_timeout_leaves_the_process_running() {
    let Some(mut sleeper) = start("a_lock_timeout_leaves_the_process_running") else { return };
    sleeper.tell("wait");
    assert_eq!(sleeper.says(), 0);
    assert_eq!(sleeper.ask(Operation::Sleep), Reply { failed: Step::Lock, error: NOT_READY, ..DONE });
}

#[test]
fn a_restore_without_room_loses_the_process() {
    let Some(sleeper) = start("a_restore_without_room_loses_the_process") else { return };
    assert_eq!(sleeper.ask(Operation::Sleep), ASLEEP);
    trouble::set_strangers(&machine(), 0, &[Stranger { bytes: 100 * M, pid: None, is_graphics: false }])
        .expect("a file");
    let lost = Reply { outcome: Outcome::Lost, failed: Step::Restore, error: OUT_OF_MEMORY };
    assert_eq!(sleeper.ask(Operation::Wake), lost);
}

#[test]
fn closing_the_socket_cancels_a_request_to_a_stopped_process() {
    let Some(mut sleeper) = start("closing_the_socket_cancels_a_request_to_a_stopped_process") else { return };
    sleeper.stop();
    let mut helper = sleeper.helper(Operation::Sleep);
    thread::sleep(Duration::from_millis(300));
    assert!(helper.child.try_wait().expect("it is a child").is_none(), "it waits for the process");
    helper.socket = None;
    kill(sleeper.child.id(), libc::SIGCONT);
    assert!(helper.child.wait().expect("it ends").success());
    sleeper.tell("read");
    assert_eq!((sleeper.says(), used()), (7, 48));
}

#[test]
fn a_helper_settles_the_operation_of_a_killed_helper() {
    let Some(mut sleeper) = start("a_helper_settles_the_operation_of_a_killed_helper") else { return };
    for delay in [0, 2, 5, 10, 20, 40, 80, 160] {
        for operation in [Operation::Sleep, Operation::Wake] {
            let mut helper = sleeper.helper(operation);
            thread::sleep(Duration::from_millis(delay));
            let _ = helper.child.kill();
            let _ = helper.child.wait();
            let answer = sleeper.ask(Operation::Settle);
            assert!([DONE, ASLEEP].contains(&answer), "{answer:?}");
            wait_for("what was begun", || {
                let used = used();
                [0, 48].contains(&used).then_some(())
            });
        }
        assert_eq!(sleeper.ask(Operation::Wake), DONE);
        sleeper.tell("read");
        assert_eq!(sleeper.says(), 7);
    }
}

#[test]
fn a_helper_settles_a_lock_in_progress() {
    let Some(mut sleeper) = start("a_helper_settles_a_lock_in_progress") else { return };
    sleeper.stop();
    let mut helper = sleeper.helper(Operation::Sleep);
    thread::sleep(Duration::from_millis(200));
    helper.child.kill().expect("killed");
    helper.child.wait().expect("ended");
    let settling = sleeper.helper(Operation::Settle);
    thread::sleep(Duration::from_millis(100));
    kill(sleeper.child.id(), libc::SIGCONT);
    assert_eq!(settling.answer(), DONE);
    sleeper.tell("read");
    assert_eq!((sleeper.says(), used()), (7, 48));
}

#[test]
fn killing_a_sleeping_process_frees_its_memory() {
    let Some(mut sleeper) = start("killing_a_sleeping_process_frees_its_memory") else { return };
    assert_eq!(sleeper.ask(Operation::Sleep), ASLEEP);
    let pidfd = sleeper.pidfd();
    sleeper.child.kill().expect("killed");
    sleeper.child.wait().expect("ended");
    let answer = sleeper.helper_for(Operation::Wake, geteuid().as_raw(), pidfd).answer();
    assert_eq!((answer.outcome, used()), (Outcome::Gone, 0));
}

#[test]
fn requests_for_other_users_processes_are_refused() {
    let Some(sleeper) = start("requests_for_other_users_processes_are_refused") else { return };
    let own = geteuid().as_raw();
    let answer = sleeper.helper_for(Operation::Sleep, own + 1, sleeper.pidfd()).answer();
    assert_eq!(answer, Reply { failed: Step::User, ..DONE }, "another user's");
    let gone = |uid, pidfd| sleeper.helper_for(Operation::Sleep, uid, pidfd).answer().outcome == Outcome::Gone;
    let file = fs::File::open("/dev/null").expect("a file");
    assert!(gone(own, file.into()), "no pidfd");
    // Opens a `PIDFD_THREAD` pidfd (Linux 6.9) of a thread that is not the leader.
    let tasks = fs::read_dir(format!("/proc/{}/task", sleeper.child.id())).expect("threads");
    let ids = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse::<u32>().ok());
    for id in ids.filter(|id| *id != sleeper.child.id()) {
        // SAFETY: the system call takes no pointers.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, id, libc::O_EXCL) };
        if fd >= 0 {
            // SAFETY: the system call has just returned the descriptor, so no other value owns it.
            assert!(gone(own, unsafe { OwnedFd::from_raw_fd(fd as i32) }), "a thread");
        }
    }
    assert_eq!(used(), 48);
}

/// A user can execute a set-user-ID program in a process that has already connected.
#[test]
fn a_process_with_two_uids_is_refused() {
    let is_root = env::var(ROLE).is_ok() || geteuid().is_root();
    if !is_root || Command::new("setpriv").arg("--version").output().is_err() {
        return test_support::skip("root and setpriv(1)");
    }
    let Some(sleeper) = start("a_process_with_two_uids_is_refused") else { return };
    let mut other = Command::new("setpriv");
    let mut other = other.args(["--ruid=65533", "sleep", "1000"]).spawn().expect("start it");
    wait_for("it to have begun", || {
        let name = fs::read_to_string(format!("/proc/{}/comm", other.id())).ok()?;
        (name.trim() == "sleep").then_some(())
    });
    for uid in [65533, 0] {
        let pid = Pid::from_raw(other.id() as i32).expect("a process");
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("a pidfd");
        let answer = sleeper.helper_for(Operation::Sleep, uid, pidfd).answer();
        assert_eq!(answer.failed, Step::User, "for user {uid}");
    }
    other.kill().expect("killed");
    other.wait().expect("ended");
}

#[test]
fn a_process_killed_during_its_checkpoint_frees_its_memory() {
    let test = "a_process_killed_during_its_checkpoint_frees_its_memory";
    let Some(mut sleeper) = start(test) else { return };
    for delay in [0, 2, 5, 10, 20, 40] {
        for operation in [Operation::Sleep, Operation::Wake] {
            if operation == Operation::Wake {
                assert_eq!(sleeper.ask(Operation::Sleep), ASLEEP);
            }
            let (helper, pidfd) = (sleeper.helper(operation), sleeper.pidfd());
            thread::sleep(Duration::from_millis(delay));
            kill(sleeper.child.id(), libc::SIGKILL);
            let outcome = helper.answer().outcome;
            let expected = if operation == Operation::Sleep { ASLEEP.outcome } else { DONE.outcome };
            // A process that is being killed may stop answering the driver before it ends.
            assert!(
                [Outcome::Gone, Outcome::Unknown, expected].contains(&outcome),
                "{operation:?} after {delay} ms: {outcome:?}"
            );
            sleeper.child.wait().expect("ended");
            let settled = sleeper.helper_for(Operation::Settle, geteuid().as_raw(), pidfd).answer();
            assert_eq!((settled.outcome, used()), (Outcome::Gone, 0));
            sleeper = start(test).expect("another one");
        }
    }
}

/// Runs the helper with a driver older than 570, and without a driver.
#[test]
fn a_driver_without_checkpoints_is_reported() {
    let Some(sleeper) = start("a_driver_without_checkpoints_is_reported") else { return };
    let older = Directory::new();
    let without_driver = |answer: Reply| {
        assert_eq!(answer, Reply { outcome: Outcome::Unknown, failed: Step::Driver, error: 0 });
    };
    let ask = || {
        let mut command = Command::new(HELPER);
        command.env("LD_LIBRARY_PATH", &older.0);
        sleeper.helper_as(command, Operation::Sleep, geteuid().as_raw(), sleeper.pidfd()).answer()
    };
    let mut library = fs::read(artifact("libcuda.so")).expect("the simulated driver");
    let name = b"\0cuCheckpointProcessLock\0";
    let at = library.windows(name.len()).position(|bytes| bytes == name).expect("its name");
    library[at + 1] = b'_';
    fs::write(older.0.join("libcuda.so.1"), library).expect("a file");
    without_driver(ask());
    fs::write(older.0.join("libcuda.so.1"), "no library").expect("a file");
    without_driver(ask());
    assert_eq!(used(), 48);
}

/// Runs the helper as systemd does: with two capabilities, and as a user that is neither root nor
/// the process's user.
#[test]
fn two_capabilities_suffice_for_other_users_processes() {
    const CLIENT: u32 = 65533;
    let is_root = env::var(ROLE).is_ok() || geteuid().is_root();
    if !is_root || Command::new("setpriv").arg("--version").output().is_err() {
        return test_support::skip("root and setpriv(1)");
    }
    let test = "two_capabilities_suffice_for_other_users_processes";
    let Some(mut sleeper) = start_as(test, Some(CLIENT)) else { return };
    let ask = |sleeper: &Sleeper, operation, capabilities: &[String]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65532", "--regid=65532", "--clear-groups", "--no-new-privs"]);
        command.args(capabilities).arg(HELPER);
        sleeper.helper_as(command, operation, CLIENT, sleeper.pidfd()).answer()
    };
    let with = |names: &str| ["inh-caps", "ambient-caps", "bounding-set"].map(|set| format!("--{set}=-all{names}"));
    for too_few in ["", ",+sys_ptrace", ",+dac_override"] {
        let refused = ask(&sleeper, Operation::Sleep, &with(too_few));
        assert_eq!((refused.outcome, refused.failed, used()), (Outcome::Unknown, Step::State, 48), "{too_few}");
    }
    let both = with(",+sys_ptrace,+dac_override");
    assert_eq!((ask(&sleeper, Operation::Sleep, &both), used()), (ASLEEP, 0));
    assert_eq!((ask(&sleeper, Operation::Wake, &both), used()), (DONE, 48));
    sleeper.tell("read");
    assert_eq!(sleeper.says(), 7);
}
