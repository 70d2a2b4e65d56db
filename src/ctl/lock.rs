//! `nvsharectl lock`: runs a command while holding a GPU's lock, as `systemd-inhibit` does with its
//! locks.

use std::collections::{BTreeSet, HashMap};
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use zbus::Variant;

use super::{CtlError, Target, block_on, password};
use crate::bus::LockFd;
use crate::config::units;

/// The exit code if the command ran without the lock for some time.
pub const LOST: u8 = 5;

/// Delay between attempts to reacquire a lost lock.
const RETRY: Duration = Duration::from_secs(1);

/// The requested lock, and descriptions of its holder.
#[derive(Debug, Clone)]
pub struct LockRequest {
    pub gpu: String,
    pub who: Option<String>,
    pub why: String,
    pub on_loss: OnLoss,
}

/// The action that nvsharectl takes on the command when the lock is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum OnLoss {
    /// The command continues to run, concurrently with other programs.
    #[default]
    Continue,
    /// The command is stopped (SIGSTOP) until the lock has been reacquired.
    Pause,
    /// The command receives SIGTERM.
    Terminate,
}

/// Time to wait for processes to stop.
const STOP_PATIENCE: Duration = Duration::from_secs(1);

/// An event that a thread reports.
enum Notice {
    Granted,
    /// The lock's turn has ended. The scheduler will grant the lock again.
    Revoked,
    /// The other end of the lock's socket was closed.
    Lost,
    /// The command has ended.
    Ended,
    /// The scheduler has refused to grant the lock again.
    Refused(CtlError),
}

/// Waits for the lock, runs the command and returns an exit code. The exit code is the command's
/// own code, 128 plus the signal that ended the command, or [`LOST`].
///
/// # Errors
/// The lock cannot be acquired, or the command cannot be started.
pub fn lock(target: &Target, request: &LockRequest, command: &[OsString]) -> Result<u8, CtlError> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(CtlError::Failed("the command is missing".into()));
    };
    let name = program.to_string_lossy();
    let mut request = request.clone();
    request.who.get_or_insert_with(|| name.clone().into_owned());
    let (sender, notices) = mpsc::channel();
    follow(acquire(target, &request)?, sender.clone());
    if !matches!(notices.recv(), Ok(Notice::Granted)) {
        return Err(CtlError::Failed("cannot acquire the lock: the scheduler stopped".into()));
    }
    let child = Command::new(program).args(arguments).spawn();
    let child = child.map_err(|error| CtlError::CannotRun { command: name.clone().into_owned(), error })?;
    let mut command = Running::start(child, &sender);
    let mut lost_at: Option<Instant> = None;
    let mut was_beside_others = false;
    let mut is_told = false;
    loop {
        let notice = notices.recv();
        match notice {
            Ok(Notice::Granted) => {
                let Some(since) = lost_at.take() else { continue };
                let after = units::duration(since.elapsed());
                match request.on_loss {
                    OnLoss::Pause => {
                        eprintln!("nvsharectl: reacquired the lock after {after}, so {name} continues");
                        command.signal(Signal::CONT);
                    }
                    OnLoss::Continue | OnLoss::Terminate => {
                        eprintln!("nvsharectl: reacquired the lock after {after}");
                    }
                }
            }
            Ok(Notice::Revoked | Notice::Lost) => {
                let is_over = matches!(notice, Ok(Notice::Revoked));
                let why = match is_over {
                    true => "the turn is over and other programs wait",
                    false => "the scheduler ended or an administrator ended the lock",
                };
                let lost = format!("nvsharectl: the lock was lost, because {why}.");
                (lost_at, is_told) = (Some(Instant::now()), false);
                match request.on_loss {
                    OnLoss::Continue => {
                        was_beside_others = true;
                        eprintln!("{lost} {name} continues without the lock");
                    }
                    OnLoss::Terminate => {
                        was_beside_others = true;
                        eprintln!("{lost} {name} is terminated");
                        command.signal(Signal::TERM);
                    }
                    OnLoss::Pause => {
                        // The command is stopped before the message is printed, because other
                        // programs may already run.
                        command.signal(Signal::STOP);
                        eprintln!("{lost} {name} is paused until the lock is reacquired");
                        if !is_over {
                            acquire_again(target.clone(), request.clone(), sender.clone());
                        }
                    }
                }
            }
            Ok(Notice::Refused(e)) => {
                if !std::mem::replace(&mut is_told, true) {
                    eprintln!("nvsharectl: {e}. Retrying");
                }
            }
            // A closed channel means that the command has ended, because the thread that waits for
            // the command keeps a sender until then.
            Ok(Notice::Ended) | Err(_) => {
                let is_lost = was_beside_others || lost_at.is_some();
                return Ok(if is_lost { LOST } else { command.exit_code() });
            }
        }
    }
}

/// Queues for the lock.
fn acquire(target: &Target, request: &LockRequest) -> Result<LockFd, CtlError> {
    let LockRequest { gpu, who, why, .. } = request;
    let who = who.as_deref().unwrap_or_default();
    block_on(async {
        let scheduler = target.connect().await?;
        let options: HashMap<&str, Variant<'_>> = HashMap::new();
        Ok(password::call(&scheduler, "AcquireLock", &(gpu, who, why, options)).await?)
    })
}

/// Reacquires a lost lock, retrying without limit.
fn acquire_again(target: Target, request: LockRequest, notices: Sender<Notice>) {
    thread::spawn(move || {
        loop {
            match acquire(&target, &request) {
                Ok(lock) => return follow(lock, notices),
                Err(e) => drop(notices.send(Notice::Refused(e))),
            }
            thread::sleep(RETRY);
        }
    });
}

/// Reads the scheduler's messages about a lock. The lock ends when this process ends, or when the
/// scheduler closes the lock's socket. The command does not inherit the lock's descriptor.
fn follow(lock: LockFd, notices: Sender<Notice>) {
    thread::spawn(move || {
        for line in BufReader::new(UnixStream::from(OwnedFd::from(lock))).lines().map_while(Result::ok) {
            let notice = match line.as_str() {
                "granted" => Notice::Granted,
                "revoked" => Notice::Revoked,
                _ => continue,
            };
            let _ = notices.send(notice);
        }
        let _ = notices.send(Notice::Lost);
    });
}

/// The running command.
struct Running {
    child: Child,
    pid: Option<Pid>,
}

impl Running {
    fn start(child: Child, notices: &Sender<Notice>) -> Self {
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let notices = notices.clone();
        thread::spawn(move || {
            // `NOWAIT` keeps the pid reserved until `exit_code` reaps the process.
            let wait = |pid| waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
            while pid.is_some_and(|pid| matches!(wait(pid), Err(Errno::INTR))) {}
            let _ = notices.send(Notice::Ended);
        });
        Self { child, pid }
    }

    fn signal(&self, signal: Signal) {
        match self.pid {
            Some(pid) if signal == Signal::STOP => stop(pid),
            Some(pid) => {
                for pid in family(pid) {
                    // The error is ignored, because the process may just have ended.
                    let _ = kill_process(pid, signal);
                }
            }
            None => {}
        }
    }

    fn exit_code(&mut self) -> u8 {
        let status = self.child.wait().ok();
        let code = status.and_then(|status| status.code().or_else(|| Some(128 + status.signal()?)));
        u8::try_from(code.unwrap_or(1)).unwrap_or(1)
    }
}

/// Returns a process and its descendants. The command may be a script whose child uses the GPU.
fn family(pid: Pid) -> Vec<Pid> {
    let mut all = vec![pid];
    let mut at = 0;
    while let Some(pid) = all.get(at) {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
        let children: Vec<Pid> = lists
            .flat_map(|list| list.split(' ').filter_map(|pid| pid.trim().parse().ok()).collect::<Vec<i32>>())
            .filter_map(Pid::from_raw)
            .collect();
        all.extend(children);
        at += 1;
    }
    all
}

/// Stops a process and its descendants. A fork in progress may add a child, so the loop repeats
/// until all processes have stopped. The loop gives up after [`STOP_PATIENCE`], because a process
/// that waits for a device may take longer.
fn stop(pid: Pid) {
    let mut signalled = BTreeSet::new();
    let deadline = Instant::now() + STOP_PATIENCE;
    loop {
        let all = family(pid);
        let new: Vec<&Pid> = all.iter().filter(|pid| signalled.insert(pid.as_raw_nonzero())).collect();
        for pid in &new {
            let _ = kill_process(**pid, Signal::STOP);
        }
        if (new.is_empty() && all.iter().all(|pid| has_stopped(*pid))) || Instant::now() > deadline {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns false while a process runs or sleeps.
fn has_stopped(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['R', 'S', 'D']))
}
