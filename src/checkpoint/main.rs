//! `nvshare-checkpoint`: checkpoints a process's GPU state and restores it. Standard input is a
//! socket to the scheduler, which sends the requests. The crate's library describes the packets.
//!
//! A call of the driver takes seconds, blocks while the process is stopped, and cannot be
//! cancelled. So a separate program makes these calls. The scheduler closes the socket after its
//! own timeout.
//!
//! The invariant is: **a helper never leaves a process locked that it may have locked**. A process
//! that another program has locked is only inspected. A cancelled request is undone. A
//! checkpoint that has begun is finished. If a helper was killed, the next helper undoes its
//! unfinished operation. So a helper may end at any moment without harm. All operations may be
//! repeated from any state of the process. A call of an earlier helper may still be in progress.
//! The state then changes between two reads, and the helper reads it again.
//!
//! The helper needs the driver. The helper must also run as the user of the process, or have both
//! `CAP_SYS_PTRACE` and `CAP_DAC_OVERRIDE`: neither capability was sufficient alone [H100, driver
//! 580.159]. So the helper is a service with a socket (`nvshare-checkpoint.socket`, `Accept=yes`)
//! in a directory that only the scheduler's user can enter. The service has that user, these two
//! capabilities, the devices, and no other privileges. The scheduler has the same user but no
//! capabilities, so it cannot trace the helper.
//!
//! The helper checks every request. The helper's peer must be the scheduler's user or root
//! (`SO_PEERCRED`). The descriptor must be a pidfd of a process, not of a thread. Before a sleep,
//! the process must belong to the client's user. `NVSHARE_DISABLE=1` keeps libnvshare out of the
//! helper.
//!
//! Three designs were rejected:
//!
//! - A transient unit: a process that may start one can start any program as root.
//! - A child of the daemon, where systemd is available: the daemon drops all capabilities.
//! - Calls of the driver inside the daemon: the daemon would then have the driver's threads, memory
//!   and hangs.

mod driver;
mod listen;
mod process;

use clap::Parser;
use driver::{Code, Driver, ILLEGAL_STATE, ProcessState, SUCCESS};
use nvshare_checkpoint::{IDLE, MAX_REQUEST, Operation, Outcome, Reply, Request, Step};
use process::{Process, has_hung_up};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, UCred, recvmsg, send},
};
use std::{
    io::{IoSliceMut, stdin},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    process::ExitCode,
};

/// Takes programs off their GPUs and restores them, for the nvshare-scheduler connected to standard input.
#[derive(Debug, Parser)]
#[command(name = "nvshare-checkpoint", version)]
struct Arguments {
    /// Numeric user ID of the scheduler [default: the user of this process]
    #[arg(long, value_name = "UID")]
    scheduler: Option<u32>,
    /// Listen on this socket and start one process per connection, on hosts without systemd
    #[arg(long, value_name = "PATH")]
    listen: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let scheduler = arguments.scheduler.unwrap_or_else(|| rustix::process::geteuid().as_raw());
    if let Some(path) = arguments.listen {
        let Err(e) = listen::serve(&path, scheduler);
        eprintln!("nvshare-checkpoint: cannot listen at {}: {e}", path.display());
        return ExitCode::FAILURE;
    }
    let stdin = stdin();
    let socket = stdin.as_fd();
    if !is_scheduler(socket, scheduler) {
        eprintln!("nvshare-checkpoint must be started by the scheduler, with a socket as its standard input");
        return ExitCode::FAILURE;
    }
    // Loading the driver is slow, so this program loads it before the first request arrives.
    let driver = Driver::load();
    while let Some((request, pidfd)) = receive(socket) {
        let answer = match Process::from_pidfd(pidfd) {
            Some(process) => perform(&request, &process, driver.as_ref(), socket),
            None => Reply { outcome: Outcome::Gone, failed: Step::None, error: SUCCESS },
        };
        // If sending fails, the scheduler has closed the socket and needs no answer.
        if send(socket, &answer.encode(), SendFlags::NOSIGNAL).is_err() {
            break;
        }
    }
    ExitCode::SUCCESS
}

/// Returns true if the peer of the socket is the scheduler's user or root.
fn is_scheduler(socket: BorrowedFd<'_>, scheduler: u32) -> bool {
    let is_allowed = |peer: UCred| peer.uid.is_root() || peer.uid.as_raw() == scheduler;
    rustix::net::sockopt::socket_peercred(socket).is_ok_and(is_allowed)
}

/// Receives one request with its pidfd. Returns `None` if no packet arrives within `IDLE`, or if
/// the packet is not a request.
fn receive(socket: BorrowedFd<'_>) -> Option<(Request, OwnedFd)> {
    let mut fds = [PollFd::new(&socket, PollFlags::IN)];
    let limit = Timespec { tv_sec: IDLE.as_secs() as i64, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&limit)).ok().filter(|ready| *ready > 0)?;
    let mut packet = [0; MAX_REQUEST + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut packet)], &mut ancillary, flags).ok()?;
    let descriptors = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Some((Request::decode(packet.get(..received.bytes)?)?, descriptors?.next()?))
}

/// A failed step and the driver's error.
struct FailedStep(Step, Code);

fn perform(request: &Request, process: &Process, driver: Result<&Driver, &Code>, socket: BorrowedFd<'_>) -> Reply {
    let driver = match driver {
        Ok(driver) => driver,
        Err(error) => return Reply { outcome: Outcome::Unknown, failed: Step::Driver, error: *error },
    };
    let calls = Calls { driver, process };
    let done = match request.operation {
        Operation::Sleep if !process.is_of(request.uid) => Err(FailedStep(Step::User, SUCCESS)),
        // Only `sleep` checks the user, because a process that changed its user while asleep must
        // still be restored.
        Operation::Sleep => calls.sleep(request.lock_timeout_ms, || has_hung_up(socket)),
        Operation::Wake => calls.wake(request),
        Operation::Settle => {
            // `unlock` is called even if the process does not look locked, because the call waits
            // for a lock in progress.
            let _ = calls.unlock();
            calls.settle()
        }
        // The process belongs to whichever program has locked it.
        Operation::Inspect => calls.state().map(drop),
    };
    let FailedStep(failed, error) = done.err().unwrap_or(FailedStep(Step::None, SUCCESS));
    let outcome = match calls.state() {
        _ if !process.is_alive() => Outcome::Gone,
        Ok(ProcessState::Running) => Outcome::Runs,
        Ok(ProcessState::Checkpointed) => Outcome::Asleep,
        Ok(ProcessState::Failed) => Outcome::Lost,
        Ok(ProcessState::Locked) if request.operation == Operation::Inspect => Outcome::Locked,
        Ok(ProcessState::Locked) | Err(_) => Outcome::Unknown,
    };
    Reply { outcome, failed, error }
}

/// The driver's calls about one process.
struct Calls<'a> {
    driver: &'a Driver,
    process: &'a Process,
}

impl Calls<'_> {
    fn call<T>(&self, step: Step, call: impl FnOnce(i32) -> Result<T, Code>) -> Result<T, FailedStep> {
        let pid = self.process.pid().ok_or(FailedStep(step, SUCCESS))?;
        call(pid).map_err(|error| FailedStep(step, error))
    }

    fn state(&self) -> Result<ProcessState, FailedStep> {
        self.call(Step::State, |pid| self.driver.state(pid))
    }

    fn unlock(&self) -> Result<(), FailedStep> {
        self.call(Step::Unlock, |pid| self.driver.unlock(pid))
    }

    /// Makes the call that `next` returns for the present state, until `next` returns `None`. An
    /// operation of a killed helper may still be in progress. A call then fails with
    /// `ILLEGAL_STATE`, and the state is read again.
    fn until_done(&self, next: impl Fn(ProcessState) -> Option<Result<(), FailedStep>>) -> Result<(), FailedStep> {
        loop {
            let state = self.state()?;
            match next(state) {
                None => return Ok(()),
                Some(Err(FailedStep(_, ILLEGAL_STATE))) if self.state()? != state => {}
                Some(done) => done?,
            }
        }
    }

    /// Puts the process to sleep, or leaves it running if that fails. A checkpoint that has begun
    /// cannot be cancelled.
    fn sleep(&self, lock_timeout_ms: u32, is_taken_back: impl Fn() -> bool) -> Result<(), FailedStep> {
        let slept = self.until_done(|state| match state {
            ProcessState::Running | ProcessState::Locked if is_taken_back() => None,
            ProcessState::Running => Some(self.call(Step::Lock, |pid| self.driver.lock(pid, lock_timeout_ms))),
            ProcessState::Locked => Some(self.call(Step::Checkpoint, |pid| self.driver.checkpoint(pid))),
            ProcessState::Checkpointed | ProcessState::Failed => None,
        });
        // Unlocks the process if the checkpoint was cancelled or failed. While the process is
        // stopped, `lock` does not return even after its timeout, so the scheduler may have
        // cancelled the request.
        self.settle().and(slept)
    }

    /// Restores the process. A restore is not cancelled once it has begun, because a process that
    /// is back on a GPU must run. A restore without enough free memory fails permanently. The
    /// scheduler therefore reserves the memory before it sends the request.
    fn wake(&self, request: &Request) -> Result<(), FailedStep> {
        self.until_done(|state| match state {
            ProcessState::Checkpointed => {
                Some(self.call(Step::Restore, |pid| self.driver.restore(pid, &request.pairs)))
            }
            ProcessState::Locked => Some(self.unlock()),
            ProcessState::Running | ProcessState::Failed => None,
        })
    }

    fn settle(&self) -> Result<(), FailedStep> {
        self.until_done(|state| (state == ProcessState::Locked).then(|| self.unlock()))
    }
}
