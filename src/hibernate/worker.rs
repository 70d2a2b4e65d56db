//! Workers: processes that run as the owner of a program, with the owner's rights and limits, and with the
//! capabilities that CRIU needs and no others.
//!
//! The kernel then checks each access of CRIU as an access of the owner. So a restore opens only files
//! that the owner may open now, whatever a path in the image refers to, and creates only processes
//! with the owner's users, groups and limits.
//!
//! A worker begins as root in a copy of the helper, and waits for its task on its standard input. Only
//! when it is in its scope, it gets the task, becomes the owner and carries out the task. If the helper
//! ends before, so does the worker.

use crate::{
    Refusal,
    files::Examination,
    rights::{Rights, login},
    scope::{PATIENCE, Scope},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, pidfd_open},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, BorrowedFd, OwnedFd},
        unix::{
            fs::{FileTypeExt, MetadataExt, OpenOptionsExt},
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

/// Maximum time of all work for one request.
pub const TIMEOUT: Duration = Duration::from_secs(600);
/// Maximum time until a worker has ended after it was killed. A worker that waits for a file system of its
/// owner may never end.
const END: Duration = Duration::from_secs(2);
/// Maximum length of an answer in bytes.
pub const MAX_ANSWER: usize = 1 << 20;
/// Interval of the checks while a worker works.
const LOOK: Duration = Duration::from_millis(250);

/// Choosing the PIDs of new processes, and reading the files that processes have mapped.
pub const CAP_CHECKPOINT_RESTORE: u32 = 40;
/// Lowering the bounding set of a process. CRIU restores a bounding set that lacks capabilities, and
/// fails if it may not lower its own [CRIU 4.1.1].
pub const CAP_SETPCAP: u32 = 8;

/// What a worker does.
#[derive(Debug, Serialize, Deserialize)]
pub enum Task {
    /// Executes a program with these capabilities. `survives_limit`: a write beyond the limit on the size of
    /// files fails, instead of ending the program.
    Execute { program: String, arguments: Vec<String>, capabilities: Vec<u32>, survives_limit: bool },
    /// Makes all further writes to files by this process of the owner fail. The owner cannot undo it.
    EndWrites { pid: u32 },
    /// Opens regular files, for writing if the flag is set, and writes their file systems' data to the disk.
    /// Prints the first [`Unfit`] file.
    Open { files: BTreeSet<(OsString, bool)> },
    /// Examines the files that a program needs, and prints the answer.
    Examine(Examination),
}

#[derive(Debug, Serialize, Deserialize)]
struct Order {
    rights: Rights,
    task: Task,
}

/// When a task is given up: at this time, or once `obstacle`, which is called from time to time, returns a
/// reason.
#[derive(Clone, Copy)]
pub struct Limit<'a> {
    pub deadline: Instant,
    pub obstacle: &'a dyn Fn() -> Option<String>,
}

/// What a worker prints, up to a maximum length. It is read while the worker works, because a pipe may hold as
/// little as 4 KiB.
struct Answer {
    /// `None`: all was read.
    pipe: Option<ChildStdout>,
    bytes: Vec<u8>,
}

impl Answer {
    fn new(pipe: Option<ChildStdout>) -> io::Result<Self> {
        pipe.as_ref().map_or(Ok(()), |pipe| rustix::io::ioctl_fionbio(pipe, true))?;
        Ok(Self { pipe, bytes: Vec::new() })
    }

    /// Reads what the worker has printed so far.
    fn read(&mut self) {
        let mut part = [0; 4096];
        while let Some(pipe) = &mut self.pipe {
            match pipe.read(&mut part) {
                Ok(length @ 1..) if self.bytes.len() < MAX_ANSWER => {
                    self.bytes.extend(part.get(..length).unwrap_or_default());
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                _ => self.pipe = None,
            }
        }
    }
}

/// The end of a worker.
#[derive(Debug)]
pub struct Done {
    pub status: ExitStatus,
    pub output: Vec<u8>,
}

/// Carries out a task in a scope, in this directory. If the task is given up, all processes of the scope are
/// ended. Only a program that is executed may end in order if there is an obstacle: its writes fail.
///
/// # Errors
/// The reason; or the worker cannot be started, or does not end.
pub fn run(
    scope: &Scope,
    rights: &Rights,
    task: Task,
    directory: BorrowedFd<'_>,
    limit: Limit<'_>,
) -> Result<Done, Refusal> {
    let words = |e: io::Error| Refusal::new(format!("cannot start a worker: {e}"));
    let ends_in_order = matches!(task, Task::Execute { .. });
    let mut command = Command::new("/proc/self/exe");
    command.arg("--worker").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("NVSHARE_DISABLE", "1");
    command.current_dir(format!("/proc/self/fd/{}", directory.as_raw_fd()));
    let mut child = command.spawn().map_err(words)?;
    let pidfd = Pid::from_raw(child.id() as i32).ok_or(io::ErrorKind::NotFound.into());
    let pidfd = pidfd.and_then(|pid| Ok(pidfd_open(pid, PidfdFlags::empty())?)).map_err(words)?;
    let order = serde_json::to_vec(&Order { rights: rights.clone(), task }).map_err(|e| words(e.into()))?;
    let begun = scope.start(child.id() as i32, || is_ready(&pidfd, PollFlags::IN)).and_then(|()| {
        // Dropped, so the worker reads to the end.
        let mut stdin = child.stdin.take().ok_or_else(|| Refusal::new("the worker has no input"))?;
        stdin.write_all(&order).map_err(words)
    });
    let pid = child.id();
    let stop = || end_writes(rights, pid);
    let stop: Option<&dyn Fn() -> Result<(), Refusal>> = if ends_in_order { Some(&stop) } else { None };
    let mut answer = Answer::new(child.stdout.take()).map_err(words)?;
    let waited = begun.and_then(|()| wait(&pidfd, &mut answer, limit, stop));
    if waited.is_err() {
        end(scope, &mut child, &pidfd);
    }
    waited?;
    let status = child.wait().map_err(words)?;
    answer.read();
    Ok(Done { status, output: answer.bytes })
}

fn is_ready(fd: &impl std::os::fd::AsFd, flags: PollFlags) -> bool {
    poll(&mut [PollFd::new(fd, flags)], Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Waits until a worker has ended. If there is an obstacle, calls `stop` until it succeeds.
///
/// # Errors
/// The obstacle: with `stop`, when the worker has ended; or the worker does not end.
fn wait(
    worker: &OwnedFd,
    answer: &mut Answer,
    Limit { deadline, obstacle }: Limit<'_>,
    stop: Option<&dyn Fn() -> Result<(), Refusal>>,
) -> Result<(), Refusal> {
    let mut reason = None;
    let mut is_stopped = false;
    loop {
        let limit = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
        let mut awaited = vec![PollFd::new(worker, PollFlags::IN)];
        awaited.extend(answer.pipe.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        let _ = poll(&mut awaited, Some(&limit)); // a signal only shortens the wait
        answer.read();
        if is_ready(worker, PollFlags::IN) {
            return reason.map_or(Ok(()), |why| Err(Refusal::new(why)));
        }
        if Instant::now() >= deadline {
            return Err(Refusal::new(format!("it took longer than {} s", TIMEOUT.as_secs())));
        }
        reason = reason.or_else(obstacle);
        match (&reason, stop) {
            (Some(why), None) => return Err(Refusal::new(why.clone())),
            (Some(_), Some(stop)) if !is_stopped => {
                let stopped = stop().inspect_err(|why| eprintln!("nvshare-hibernate: {why}"));
                is_stopped = stopped.is_ok();
            }
            _ => {}
        }
    }
}

/// Makes the writes of a worker fail. The kernel lets the owner lower the limits of its processes, but not the
/// helper, which lacks `CAP_SYS_RESOURCE`.
fn end_writes(rights: &Rights, pid: u32) -> Result<(), Refusal> {
    let words = |why: String| Refusal::new(format!("cannot end the writes of process {pid}: {why}"));
    let scope = Scope::new("limits", rights.owner.uid).map_err(|e| words(e.to_string()))?;
    let root = File::open("/").map_err(|e| words(e.to_string()))?;
    let limit = Limit { deadline: Instant::now() + PATIENCE, obstacle: &|| None };
    let done = run(&scope, rights, Task::EndWrites { pid }, std::os::fd::AsFd::as_fd(&root), limit)?;
    if done.status.success() { Ok(()) } else { Err(words(done.status.to_string())) }
}

/// Ends a worker and all other processes of its scope, as far as they end.
fn end(scope: &Scope, child: &mut Child, worker: &OwnedFd) {
    let _ = child.kill(); // it may not be in its scope yet
    if let Err(e) = scope.kill(Instant::now() + PATIENCE) {
        eprintln!("nvshare-hibernate: cannot end the processes of {scope:?}: {e}");
    }
    let limit = Timespec { tv_sec: END.as_secs() as i64, tv_nsec: 0 };
    if poll(&mut [PollFd::new(worker, PollFlags::IN)], Some(&limit)).is_ok_and(|ready| ready > 0) {
        let _ = child.wait(); // it has ended
    }
}

/// A file with which a program cannot be saved.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unfit {
    /// The owner may not open the file.
    Closed(OsString),
    /// The file is a FIFO, and the program has only one end open: the end for writing if the flag is set.
    HalfOpen(OsString, bool),
}

/// Returns the first of these files with which a program cannot be saved. The flag: the file is open for
/// writing. Data that programs have written to the files' file systems is on the disk afterwards.
///
/// # Errors
/// The worker does not answer.
pub fn first_unfit(rights: &Rights, files: Vec<(PathBuf, bool)>, limit: Limit<'_>) -> Result<Option<Unfit>, Refusal> {
    let words = |e: io::Error| Refusal::new(format!("cannot examine its files: {e}"));
    let scope = Scope::new("files", rights.owner.uid).map_err(words)?;
    let root = File::open("/").map_err(words)?;
    let task = Task::Open { files: files.into_iter().map(|(path, is_written)| (path.into(), is_written)).collect() };
    let done = run(&scope, rights, task, std::os::fd::AsFd::as_fd(&root), limit)?;
    serde_json::from_slice(&done.output)
        .map_err(|_| Refusal::new(format!("cannot examine its files: the worker failed: {}", done.status)))
}

/// The main function of a worker. Returns if the task has failed, or ends this process.
///
/// # Errors
/// The helper has ended, or this process cannot become the owner.
pub fn work() -> io::Result<()> {
    let mut text = Vec::new();
    io::stdin().read_to_end(&mut text)?;
    let Order { rights, task } = serde_json::from_slice(&text)?;
    match task {
        Task::Execute { program, arguments, capabilities, survives_limit } => {
            become_owner(&rights, &capabilities)?;
            if survives_limit {
                // SAFETY: this signal has no handler.
                unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
            }
            let mut command = Command::new(program);
            command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            Err(command.exec())
        }
        Task::EndWrites { pid } => {
            become_owner(&rights, &[])?;
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: `none` lives during the call, and the previous limit is not asked for.
            let result =
                unsafe { libc::prlimit(pid as i32, libc::RLIMIT_FSIZE, &raw const none, std::ptr::null_mut()) };
            check(result)
        }
        Task::Open { files } => {
            // The kernel lets no process with the owner's rights trace this one, which changed its user and
            // executes nothing.
            become_owner(&rights, &[])?;
            println!("{}", serde_json::to_string(&find_unfit(&files))?);
            Ok(())
        }
        Task::Examine(work) => {
            become_owner(&rights, &[])?;
            println!("{}", work.perform()?);
            Ok(())
        }
    }
}

fn find_unfit(files: &BTreeSet<(OsString, bool)>) -> Option<Unfit> {
    let mut synced = BTreeSet::new();
    let unfit = |(path, is_written): &(OsString, bool)| {
        if std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_fifo()) {
            let has_other_end = files.contains(&(path.clone(), !is_written));
            return (!has_other_end).then(|| Unfit::HalfOpen(path.clone(), *is_written));
        }
        (!opens(path.as_ref(), *is_written, &mut synced)).then(|| Unfit::Closed(path.clone()))
    };
    files.iter().find_map(unfit)
}

fn opens(path: &Path, is_written: bool, synced: &mut BTreeSet<u64>) -> bool {
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {}
        found => return found.is_ok(),
    }
    let mut options = OpenOptions::new();
    let Ok(file) = options.read(!is_written).write(is_written).custom_flags(libc::O_NONBLOCK).open(path) else {
        return false;
    };
    let is_new = is_written && file.metadata().is_ok_and(|metadata| synced.insert(metadata.dev()));
    !is_new || rustix::fs::syncfs(&file).is_ok()
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Sets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

const VERSION_3: u32 = 0x2008_0522;

/// Gives this process the rights of a program, and these capabilities.
fn become_owner(rights: &Rights, capabilities: &[u32]) -> io::Result<()> {
    let Rights { owner, limits, .. } = rights;
    // Without a login, a process may choose any. The program has the login that it had.
    if let Some(user) = rights.login
        && login(Path::new("/proc/self")) != Some(user)
    {
        std::fs::write("/proc/self/loginuid", user.to_string())?;
    }
    let set = capabilities.iter().fold(0_u64, |set, capability| set | 1 << capability);
    let half = |half: u32| Sets { effective: half, permitted: half, inheritable: half };
    let sets = [half(set as u32), half((set >> 32) as u32)];
    let header = Header { version: VERSION_3, pid: 0 };
    // SAFETY: the pointers refer to values that live during the calls.
    unsafe {
        libc::umask(0o077);
        for (resource, limit) in limits.iter().enumerate() {
            let limit = libc::rlimit { rlim_cur: *limit, rlim_max: *limit };
            check(libc::setrlimit(resource as _, &raw const limit))?;
        }
        check(libc::setgroups(owner.groups.len(), owner.groups.as_ptr()))?;
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        check(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0))?;
        check(libc::setresgid(owner.gid, owner.gid, owner.gid))?;
        check(libc::setresuid(owner.uid, owner.uid, owner.uid))?;
        check(libc::syscall(libc::SYS_capset, &raw const header, sets.as_ptr()) as i32)?;
        for capability in capabilities {
            check(libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_RAISE, *capability, 0, 0))?;
        }
    }
    leave_keyring()
}

/// Joins an empty session keyring, so that the program has no keys of the helper.
fn leave_keyring() -> io::Result<()> {
    // SAFETY: without a name, the call reads no memory.
    let result = unsafe { libc::syscall(libc::SYS_keyctl, libc::KEYCTL_JOIN_SESSION_KEYRING, 0_usize, 0, 0, 0) };
    match io::Error::last_os_error() {
        _ if result >= 0 => Ok(()),
        // The kernel, or a container manager, has no keyrings.
        e if matches!(e.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => Ok(()),
        e => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

    fn sleeper(seconds: &str) -> (Child, OwnedFd) {
        let child = Command::new("sleep").arg(seconds).spawn().expect("a process");
        let pid = Pid::from_raw(child.id() as i32).expect("a process ID");
        (child, pidfd_open(pid, PidfdFlags::empty()).expect("it lives"))
    }

    #[test]
    fn a_worker_that_does_not_end_is_given_up_at_the_deadline() {
        let (mut child, pidfd) = sleeper("1000");
        let soon = Instant::now() + LOOK * 2;
        let nothing = || Answer { pipe: None, bytes: Vec::new() };
        let limit = |deadline| Limit { deadline, obstacle: &|| None };
        let why = wait(&pidfd, &mut nothing(), limit(soon), None).expect_err("it does not end").to_string();
        assert!(why.contains("longer than 600 s") && Instant::now() >= soon, "{why}");
        let later = Instant::now() + TIMEOUT;
        child.kill().expect("killed");
        wait(&pidfd, &mut nothing(), limit(later), None).expect("it has ended");
        child.wait().expect("it has ended");
    }

    #[test]
    fn an_obstacle_stops_a_worker_once_and_is_the_reason() {
        let (child, pidfd) = sleeper("1000");
        let (obstacles, stops) = (Cell::new(0), Cell::new(0));
        let obstacle = || {
            obstacles.set(obstacles.get() + 1);
            (obstacles.get() == 1).then(|| "the disk is full".to_owned())
        };
        let child = RefCell::new(child);
        let stop = || {
            stops.set(stops.get() + 1);
            if stops.get() == 1 {
                return Err(Refusal::new("systemd does not answer"));
            }
            child.borrow_mut().kill().expect("killed");
            Ok(())
        };
        let limit = Limit { deadline: Instant::now() + TIMEOUT, obstacle: &obstacle };
        let mut answer = Answer { pipe: None, bytes: Vec::new() };
        let why = wait(&pidfd, &mut answer, limit, Some(&stop)).expect_err("an obstacle").to_string();
        assert_eq!((why.as_str(), obstacles.get(), stops.get()), ("the disk is full", 1, 2));
        child.borrow_mut().wait().expect("it has ended");
    }

    #[test]
    fn a_task_without_writes_is_given_up_at_once() {
        let (mut child, pidfd) = sleeper("1000");
        let limit = Limit { deadline: Instant::now() + TIMEOUT, obstacle: &|| Some("it was cancelled".to_owned()) };
        let mut answer = Answer { pipe: None, bytes: Vec::new() };
        let why = wait(&pidfd, &mut answer, limit, None).expect_err("an obstacle").to_string();
        assert_eq!(why, "it was cancelled");
        child.kill().expect("it has not ended");
        child.wait().expect("it has ended");
    }

    /// A pipe holds 64 KiB or less.
    #[test]
    fn an_answer_of_any_length_is_read_while_the_worker_works() {
        for (printed, read) in [(300_000, 300_000), (2 << 20, MAX_ANSWER)] {
            let mut printer = Command::new("head");
            printer.args(["-c", &printed.to_string(), "/dev/zero"]).stdout(Stdio::piped());
            let mut child = printer.spawn().expect("a process");
            let pidfd = pidfd_open(Pid::from_raw(child.id() as i32).expect("a process ID"), PidfdFlags::empty());
            let mut answer = Answer::new(child.stdout.take()).expect("a pipe");
            let limit = Limit { deadline: Instant::now() + TIMEOUT, obstacle: &|| None };
            wait(&pidfd.expect("it was not awaited"), &mut answer, limit, None).expect("it ends");
            child.wait().expect("it has ended");
            answer.read();
            assert!(answer.bytes.len() >= read && answer.bytes.len() < read + 4097, "{}", answer.bytes.len());
        }
    }

    #[test]
    fn a_worker_without_an_order_does_nothing() {
        assert!(serde_json::from_slice::<Order>(b"").is_err(), "its helper has ended");
    }

    #[test]
    fn files_that_may_not_be_opened_are_found() {
        let directory = test_support::Directory::new();
        let path = directory.0.join("file");
        std::fs::write(&path, "x").expect("a file");
        let mut synced = BTreeSet::new();
        assert!(opens(&path, false, &mut synced) && synced.is_empty(), "nothing was written");
        assert!(opens(&path, true, &mut synced) && synced.len() == 1);
        assert!(!opens(&directory.0.join("gone"), false, &mut synced));
        assert!(opens(Path::new("/dev/null"), true, &mut synced), "devices are not opened");
        assert_eq!(synced.len(), 1);
    }

    #[test]
    fn a_fifo_with_one_end_in_the_program_is_found() {
        let directory = test_support::Directory::new();
        let path = directory.0.join("fifo");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).expect("a FIFO");
        let path = path.into_os_string();
        for is_written in [false, true] {
            let end = (path.clone(), is_written);
            assert_eq!(find_unfit(&[end].into()), Some(Unfit::HalfOpen(path.clone(), is_written)));
        }
        assert_eq!(find_unfit(&[(path.clone(), false), (path, true)].into()), None);
    }
}
