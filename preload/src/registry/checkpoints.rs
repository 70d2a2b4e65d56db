//! Checkpoints that this program makes of other processes (`cuCheckpointProcess…`), for example vLLM's
//! sleep mode. The scheduler is told of each change. A restore waits for room: a restore without room
//! fails permanently, and other programs may be using the room until then.
//!
//! The calls themselves are the driver's. Without a scheduler nothing waits.

use crate::{
    connection::{self, presence},
    submit,
    sys::{futex, sync::await_client_thread, time::Instant},
};
use core::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};
use nvshare_wire::{ClientMessage, client::CheckpointStep};
use rustix::{
    fd::AsFd,
    io::Errno,
    process::{Pid, PidfdFlags, getpid, pidfd_open},
};

/// How long a thread sleeps before it checks whether the scheduler is still there.
const LOOK: Duration = Duration::from_millis(100);
/// The longest wait for the answer to a report. The scheduler answers reports at once.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// The interval between repetitions of an unanswered message: a scheduler without a free descriptor cannot
/// tell which process the message concerns, and ignores it.
const REPEAT: Duration = Duration::from_secs(3);
/// How long a call waits for a free descriptor. It then continues, because the wait might never end.
const DESCRIPTOR_TIMEOUT: Duration = Duration::from_secs(10);
/// The number of threads that can wait at the same time. Further calls do not wait.
const MOST: usize = 64;

/// The tickets of the waiting threads; 0: the place is free, or its thread may continue.
static WAITING: [AtomicU32; MOST] = [const { AtomicU32::new(0) }; MOST];

/// Tells the scheduler that this program has changed another process. Waits until the scheduler knows:
/// the program may be about to end.
pub fn report(pid: i32, step: CheckpointStep) {
    say(pid, step, REPORT_TIMEOUT);
}

/// Waits until the scheduler allows this program to restore another process.
pub fn wait_for_room(pid: i32) {
    say(pid, CheckpointStep::Restoring, Duration::MAX);
}

/// Whether the client's thread may receive an answer. It does not in the child of a fork, nor after a failure
/// of this library. After the loss of a scheduler, the wait lasts until the client runs without one.
fn is_answered() -> bool {
    submit::is_active() && connection::is_expected()
}

/// Returns a ticket that was not used lately, and is not 0.
fn new_ticket() -> u32 {
    static TICKETS: AtomicU32 = AtomicU32::new(1);
    TICKETS.fetch_add(2, Ordering::Relaxed)
}

fn say(pid: i32, step: CheckpointStep, most: Duration) {
    if !is_answered() {
        return;
    }
    let Some(process) = Pid::from_raw(pid).filter(|pid| *pid != getpid()) else { return };
    let mut ticket = new_ticket();
    let take = |place: &&AtomicU32| place.compare_exchange(0, ticket, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    let Some(place) = WAITING.iter().find(take) else { return };
    let _waiting = await_client_thread();
    // The scheduler that has the message, and since when.
    let (begin, mut told) = (Instant::now(), None::<(_, Instant)>);
    while place.load(Ordering::SeqCst) == ticket && is_answered() && begin.elapsed() < most {
        // A process that is asleep gets no answer. It may also fall asleep during this wait.
        presence::want();
        // A new scheduler does not know the message.
        let met = connection::generation();
        let has_it = told.is_some_and(|(scheduler, since)| scheduler == met && since.elapsed() < REPEAT);
        if !has_it && connection::is_connected() {
            // The scheduler also answers a request that is repeated, so each request has its own ticket.
            let next = new_ticket();
            if place.compare_exchange(ticket, next, Ordering::SeqCst, Ordering::SeqCst).is_err() {
                break; // the answer has just arrived
            }
            ticket = next;
            let message = ClientMessage::ForeignCheckpoint { step, ticket };
            // The descriptor is open only here: the program may close any descriptor, and reuse its number.
            match pidfd_open(process, PidfdFlags::empty()) {
                Ok(process) => {
                    let is_sent = connection::send_with(&message, &[process.as_fd()]);
                    told = is_sent.then(|| (met, Instant::now()));
                }
                // The program or the system has no descriptor left at the moment.
                Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) if begin.elapsed() < DESCRIPTOR_TIMEOUT => {}
                Err(_) => break,
            }
        }
        futex::wait(place, ticket, LOOK);
    }
    // After the answer, the place may belong to another thread.
    let _ = place.compare_exchange(ticket, 0, Ordering::SeqCst, Ordering::SeqCst);
}

/// Whether any thread waits for an answer.
pub fn is_any_waiting() -> bool {
    WAITING.iter().any(|place| place.load(Ordering::SeqCst) != 0)
}

/// Handles the scheduler's answer.
pub fn on_answer(ticket: u32) {
    let done = |place: &&AtomicU32| place.compare_exchange(ticket, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    if let Some(place) = WAITING.iter().filter(|_| ticket != 0).find(done) {
        futex::wake_all(place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{connection::fake::Scheduler, driver::fake::until};
    use rustix::process::{Resource, Rlimit, getppid, getrlimit, setrlimit};
    use std::{thread, vec::Vec};

    fn connect() -> Scheduler {
        submit::set_active(true);
        Scheduler::connect()
    }

    /// Waits for room to restore another process, which the tests leave alone.
    fn restore() {
        wait_for_room(getppid().expect("a parent").as_raw_nonzero().get());
    }

    /// Waits for the next request, and returns its ticket.
    fn ticket(scheduler: &Scheduler) -> u32 {
        let mut found = 0;
        until(|| match scheduler.next() {
            Some(ClientMessage::ForeignCheckpoint { step: CheckpointStep::Restoring, ticket }) => {
                found = ticket;
                true
            }
            _ => false,
        });
        found
    }

    #[test]
    fn a_restore_waits_only_while_the_library_is_active() {
        let scheduler = connect();
        thread::scope(|scope| {
            let waiting = scope.spawn(restore);
            ticket(&scheduler);
            assert!(!waiting.is_finished());
            submit::set_active(false);
        });
        restore();
        assert_eq!(scheduler.sent(), []);
    }

    #[test]
    fn a_restore_waits_for_a_free_descriptor() {
        let scheduler = connect();
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..limit }).expect("a lower limit");
        thread::scope(|scope| {
            let waiting = scope.spawn(restore);
            thread::sleep(3 * LOOK);
            assert!(!waiting.is_finished());
            setrlimit(Resource::Nofile, limit).expect("the former limit");
            on_answer(ticket(&scheduler));
        });
        assert!(!is_any_waiting());
    }

    #[test]
    fn an_unanswered_request_is_repeated() {
        let scheduler = connect();
        thread::scope(|scope| {
            let waiting = scope.spawn(restore);
            let ignored = ticket(&scheduler);
            let repeated = ticket(&scheduler);
            assert!(repeated != ignored && !waiting.is_finished());
            on_answer(repeated);
        });
        assert!(!is_any_waiting());
    }

    #[test]
    fn a_restore_wakes_its_own_process() {
        let scheduler = connect();
        presence::leave();
        thread::scope(|scope| {
            scope.spawn(restore);
            let ticket = ticket(&scheduler);
            until(presence::is_wanted);
            presence::leave();
            until(presence::is_wanted);
            assert!(is_any_waiting());
            presence::come_back();
            on_answer(ticket);
        });
        assert!(!is_any_waiting());
    }

    /// A request may reach a scheduler before the process has introduced itself there, and is then repeated.
    #[test]
    fn only_the_answer_to_the_latest_request_ends_a_wait() {
        let scheduler = connect();
        let mut tickets = Vec::new();
        for _ in 0..2 {
            thread::scope(|scope| {
                let waiting = scope.spawn(restore);
                let replaced = ticket(&scheduler);
                connection::begin_generation();
                let latest = ticket(&scheduler);
                on_answer(replaced);
                thread::sleep(2 * LOOK);
                assert!(!waiting.is_finished());
                on_answer(latest);
                tickets.extend([replaced, latest]);
            });
        }
        tickets.dedup();
        assert_eq!(tickets.len(), 4, "{tickets:?}");
    }
}
