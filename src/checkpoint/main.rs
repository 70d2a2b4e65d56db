//! `nvshare-checkpoint`: takes a process off its GPUs, or puts it back, as long as it is asked to. Standard input is a socket to the
//! scheduler, which says what to do; the crate's library describes the packets.
//!
//! A call of the driver takes seconds, for ever while the process is stopped, and cannot be taken back. So nobody who has other
//! work makes them but this program, and the scheduler hangs up when it has waited long enough.

mod driver;
mod listen;
mod process;

use clap::Parser;
use driver::{Code, Driver, ILLEGAL_STATE, SUCCESS, State};
use nvshare_checkpoint::{Answer, IDLE, MAX_REQUEST, Operation, Outcome, Request, Step};
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

/// Takes programs off their GPUs and puts them back, for nvshare-scheduler, which is connected to standard input.
#[derive(Debug, Parser)]
#[command(name = "nvshare-checkpoint", version)]
struct Arguments {
    /// The number of the scheduler's user [default: the user of this process]
    #[arg(long, value_name = "UID")]
    scheduler: Option<u32>,
    /// Start one for each connection to this socket instead, where there is no systemd that does
    #[arg(long, value_name = "PATH")]
    listen: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let scheduler = arguments.scheduler.unwrap_or_else(|| rustix::process::geteuid().as_raw());
    if let Some(path) = arguments.listen {
        let Err(e) = listen::serve(&path, scheduler);
        eprintln!("nvshare-checkpoint cannot listen at {}: {e}", path.display());
        return ExitCode::FAILURE;
    }
    let stdin = stdin();
    let socket = stdin.as_fd();
    if !is_scheduler(socket, scheduler) {
        eprintln!("nvshare-checkpoint is started by the scheduler, with a socket as its standard input");
        return ExitCode::FAILURE;
    }
    // Before anything is asked: it takes a while.
    let driver = Driver::load();
    while let Some((request, pidfd)) = receive(socket) {
        let answer = match Process::of(pidfd) {
            Some(process) => perform(&request, &process, driver.as_ref(), socket),
            None => Answer { outcome: Outcome::Gone, failed: Step::None, error: SUCCESS },
        };
        // Whoever has hung up does not want to know.
        if send(socket, &answer.encode(), SendFlags::NOSIGNAL).is_err() {
            break;
        }
    }
    ExitCode::SUCCESS
}

/// Whether the other side of the socket is of that user, or of root.
fn is_scheduler(socket: BorrowedFd<'_>, scheduler: u32) -> bool {
    let is_allowed = |peer: UCred| peer.uid.is_root() || peer.uid.as_raw() == scheduler;
    rustix::net::sockopt::socket_peercred(socket).is_ok_and(is_allowed)
}

/// One request, with one descriptor. `None` if none comes, or what is no request.
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

/// A call that failed.
struct Failure(Step, Code);

fn perform(request: &Request, process: &Process, driver: Result<&Driver, &Code>, socket: BorrowedFd<'_>) -> Answer {
    let driver = match driver {
        Ok(driver) => driver,
        Err(error) => return Answer { outcome: Outcome::Unknown, failed: Step::Driver, error: *error },
    };
    let calls = Calls { driver, process };
    let done = match request.operation {
        Operation::Sleep if !process.is_of(request.uid) => Err(Failure(Step::User, SUCCESS)),
        // One that has changed its user asleep is put back all the same.
        Operation::Sleep => calls.sleep(request.lock_timeout_ms, || has_hung_up(socket)),
        Operation::Wake => calls.wake(request),
        Operation::Settle => {
            // Even if it does not look locked: this waits behind a lock that is still under way.
            let _ = calls.unlock();
            calls.settle()
        }
    };
    let Failure(failed, error) = done.err().unwrap_or(Failure(Step::None, SUCCESS));
    let outcome = match calls.state() {
        _ if !process.lives() => Outcome::Gone,
        Ok(State::Running) => Outcome::Runs,
        Ok(State::Checkpointed) => Outcome::Asleep,
        Ok(State::Failed) => Outcome::Lost,
        Ok(State::Locked) | Err(_) => Outcome::Unknown,
    };
    Answer { outcome, failed, error }
}

/// The driver's calls about one process.
struct Calls<'a> {
    driver: &'a Driver,
    process: &'a Process,
}

impl Calls<'_> {
    fn call<T>(&self, step: Step, call: impl FnOnce(i32) -> Result<T, Code>) -> Result<T, Failure> {
        let pid = self.process.pid().ok_or(Failure(step, SUCCESS))?;
        call(pid).map_err(|error| Failure(step, error))
    }

    fn state(&self) -> Result<State, Failure> {
        self.call(Step::State, |pid| self.driver.state(pid))
    }

    fn unlock(&self) -> Result<(), Failure> {
        self.call(Step::Unlock, |pid| self.driver.unlock(pid))
    }

    /// Makes the call that each state asks for, until one asks for none. What a helper that was killed has begun may still be under
    /// way: then a call finds another state than it was made for, and it is looked again.
    fn until_done(&self, next: impl Fn(State) -> Option<Result<(), Failure>>) -> Result<(), Failure> {
        loop {
            let state = self.state()?;
            match next(state) {
                None => return Ok(()),
                Some(Err(Failure(_, ILLEGAL_STATE))) if self.state()? != state => {}
                Some(done) => done?,
            }
        }
    }

    /// Ends with the process asleep, or running. A checkpoint that has begun cannot be taken back.
    fn sleep(&self, lock_timeout_ms: u32, is_taken_back: impl Fn() -> bool) -> Result<(), Failure> {
        let slept = self.until_done(|state| match state {
            State::Running | State::Locked if is_taken_back() => None,
            State::Running => Some(self.call(Step::Lock, |pid| self.driver.lock(pid, lock_timeout_ms))),
            State::Locked => Some(self.call(Step::Checkpoint, |pid| self.driver.checkpoint(pid))),
            State::Checkpointed | State::Failed => None,
        });
        // The lock may have taken much longer than its timeout: a process that is stopped does not answer.
        self.settle().and(slept)
    }

    /// Not taken back once it has begun: a process that is back on a GPU has to run. A restore without room is final, so the
    /// scheduler makes sure of the room before it asks.
    fn wake(&self, request: &Request) -> Result<(), Failure> {
        self.until_done(|state| match state {
            State::Checkpointed => Some(self.call(Step::Restore, |pid| self.driver.restore(pid, &request.pairs))),
            State::Locked => Some(self.unlock()),
            State::Running | State::Failed => None,
        })
    }

    fn settle(&self) -> Result<(), Failure> {
        self.until_done(|state| (state == State::Locked).then(|| self.unlock()))
    }
}
