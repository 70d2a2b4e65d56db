//! Clients' processes that programs other than the checkpoint helper lock and checkpoint: vLLM's sleep
//! mode, `cuda-checkpoint`, snapshots of containers. The scheduler must know, because such a process
//! neither runs nor answers, and has no memory on its GPUs.
//!
//! A program that runs under the library reports its calls, but only the helper's answer counts
//! ([`Operation::Inspect`]). The calls of other programs are found by their effects: the process does not
//! answer, or NVML does not list it although it has memory. While a process is locked or checkpointed, it
//! is inspected again whenever it sends a message. A checkpointed process is also inspected when NVML lists
//! it again, and a locked one from time to time ([`LOOK`]), because an unlock has no effect that can be seen.
//!
//! A program under the library asks before it restores a process, and waits for room. The process is
//! inspected first. No inspection begins between the answer and the end of the restore: the process would
//! still look checkpointed. After [`RESTORE`], the program may have hung, and the process is inspected again.
//! Until the program reports the end of the restore or ends itself, the room stays reserved, because the
//! restore may still begin.
//!
//! A new daemon does not know whether the restore of a checkpointed process will wait. So the room of each
//! such process is reserved until a program asks to restore it: a restore without room fails permanently,
//! and reserved room only makes other programs move their memory.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::time::Duration;

use nvshare_wire::SchedulerMessage;
use nvshare_wire::client::CheckpointStep;
use tokio::sync::oneshot;
use tracing::info;

use super::model::Model;
use super::sleep::Sleep;
use crate::daemon::checkpoint::Outcome;
use crate::scheduler::{ClientId, Event, ForeignState, SleepPhase, Time};
use crate::sys::clock;

/// How long a restore may take. The driver restores 2 GiB per second, and the largest GPUs have 192 GiB.
const RESTORE: Duration = Duration::from_secs(120);
/// The first and the longest interval between inspections of a locked process that sends no messages. The
/// interval doubles. Other clients wait for a locked process's memory for at most this long after its unlock.
const LOOK: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(10));

/// Checkpoints of clients' processes by other programs.
#[derive(Debug, Default)]
pub struct ForeignCheckpoints {
    /// Clients that were last checkpointed by a program that asks before it restores them.
    restores_wait: BTreeSet<ClientId>,
    inspections: BTreeMap<ClientId, Inspection>,
    restores: BTreeMap<Restore, Request>,
    /// For locked clients: when the next measurement may cause an inspection, and the interval after it.
    looks: BTreeMap<ClientId, (Time, Duration)>,
}

/// The client whose process is restored, and the client that restores it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Restore {
    target: ClientId,
    caller: ClientId,
}

#[derive(Debug, Clone, Copy)]
struct Request {
    ticket: u32,
    /// The scheduler has been asked for room.
    is_passed_on: bool,
    /// When the caller was allowed to restore the client.
    allowed: Option<Time>,
}

/// A running inspection of a process.
#[derive(Debug)]
struct Inspection {
    /// Dropping the receiver cancels the inspection.
    _awaits: oneshot::Receiver<Infallible>,
    /// The process may have changed since the inspection began.
    is_outdated: bool,
}

impl ForeignCheckpoints {
    /// Inspects a client's process, unless the helper has the process or it is being restored.
    pub fn inspect(&mut self, model: &Model, sleep: &Sleep, client: ClientId) {
        let is_own = !model.machine.is_foreign(client)
            && !matches!(model.machine.sleep_of(client).phase, SleepPhase::Awake | SleepPhase::Preparing);
        if is_own || self.is_restored(client, clock::now()) {
            return;
        }
        if let Some(inspection) = self.inspections.get_mut(&client) {
            inspection.is_outdated = true;
            return;
        }
        if let Some(awaits) = sleep.inspect(model, client) {
            self.inspections.insert(client, Inspection { _awaits: awaits, is_outdated: false });
        }
    }

    /// Handles a measurement after which the state of a client's process may have changed.
    pub fn measured(&mut self, model: &Model, sleep: &Sleep, client: ClientId) {
        let is_locked = model.machine.sleep_of(client).phase == SleepPhase::Locked;
        if !is_locked || self.is_due(client, clock::now()) {
            self.inspect(model, sleep, client);
        }
    }

    /// Whether the next inspection of a locked client is due. If so, schedules the one after it.
    fn is_due(&mut self, client: ClientId, now: Time) -> bool {
        let (due, interval) = self.looks.entry(client).or_insert((now, LOOK.0));
        let is_due = *due <= now;
        if is_due {
            (*due, *interval) = (now + *interval, (*interval * 2).min(LOOK.1));
        }
        is_due
    }

    /// Whether a client waits for its restore, or is being restored.
    fn is_restored(&self, client: ClientId, now: Time) -> bool {
        let is_pending = |request: &Request| request.allowed.is_none_or(|at| now < at + RESTORE);
        let mut all = self.restores.iter().filter(|(restore, _)| restore.target == client);
        all.any(|(_, request)| request.is_passed_on && is_pending(request))
    }

    /// Handles a client that changes the process of `target`. `None`: no program of the client's tenant has
    /// that process. Returns the request for room, if the client needs any.
    pub fn receive(
        &mut self,
        model: &Model,
        sleep: &Sleep,
        caller: ClientId,
        target: Option<ClientId>,
        (step, ticket): (CheckpointStep, u32),
    ) -> Option<Event> {
        let go_on = |ticket| model.send(caller, SchedulerMessage::Continue { ticket });
        let Some(target) = target else {
            go_on(ticket);
            return None;
        };
        let restore = Restore { target, caller };
        match step {
            CheckpointStep::Restoring => {
                if let Some(waiting) = self.restores.get_mut(&restore).filter(|request| request.allowed.is_none()) {
                    // The caller repeats its request, or another of its threads wants the same. That thread repeats
                    // its request too. The inspection or the room is still awaited.
                    waiting.ticket = ticket;
                    return None;
                }
                let before = self.restores.insert(restore, Request { ticket, is_passed_on: false, allowed: None });
                if let Some(before) = before.filter(|before| before.ticket != ticket) {
                    go_on(before.ticket);
                }
                // This scheduler may not know yet that the process is checkpointed.
                self.inspect(model, sleep, target);
                return self.pass_on(target);
            }
            CheckpointStep::Locked => {}
            CheckpointStep::Checkpointed => drop(self.restores_wait.insert(target)),
            CheckpointStep::Restored => drop(self.restores.remove(&restore)),
        }
        go_on(ticket);
        self.inspect(model, sleep, target);
        None
    }

    /// Asks the scheduler for room if a program wants to restore a client whose state is known.
    fn pass_on(&mut self, target: ClientId) -> Option<Event> {
        if self.inspections.contains_key(&target) {
            return None;
        }
        let is_waiting =
            |(restore, request): &(&Restore, &mut Request)| restore.target == target && request.allowed.is_none();
        let waiting = self.restores.iter_mut().filter(is_waiting);
        let count = waiting.map(|(_, request)| request.is_passed_on = true).count();
        (count > 0).then_some(Event::RestoreRequested { client: target })
    }

    /// Whether the program that restores the client will wait for room. It will not if it has permission.
    fn restore_waits(&self, client: ClientId) -> bool {
        let mut requests = self.restores.iter().filter(|(restore, _)| restore.target == client).peekable();
        let is_any = requests.peek().is_some();
        requests.all(|(_, request)| request.allowed.is_none()) && (is_any || self.restores_wait.contains(&client))
    }

    /// Tells the programs that wait for room that they may restore a client.
    pub fn allow(&mut self, model: &Model, client: ClientId) {
        let requests = self.restores.iter_mut().filter(|(restore, _)| restore.target == client);
        for (restore, request) in requests.filter(|(_, request)| request.allowed.is_none()) {
            request.allowed = Some(clock::now());
            model.send(restore.caller, SchedulerMessage::Continue { ticket: request.ticket });
        }
    }

    /// Handles the helper's answer. Returns the events for the scheduler.
    pub fn inspected(&mut self, model: &Model, sleep: &Sleep, client: ClientId, outcome: Outcome) -> Vec<Event> {
        let is_outdated = self.inspections.remove(&client).is_some_and(|inspection| inspection.is_outdated);
        let state = match outcome {
            Outcome::Runs => Some(ForeignState::Runs),
            Outcome::Locked => Some(ForeignState::Locked),
            Outcome::Asleep => Some(ForeignState::Checkpointed { restore_waits: self.restore_waits(client) }),
            Outcome::Lost => Some(ForeignState::Lost),
            // An ended process disconnects. A process whose state cannot be read is inspected again.
            Outcome::Gone | Outcome::Unknown => None,
        };
        if state == Some(ForeignState::Runs) {
            self.restores_wait.remove(&client);
        }
        if state.is_some_and(|state| state != ForeignState::Locked) {
            self.looks.remove(&client);
        }
        let mut events: Vec<Event> =
            state.map(|state| Event::ForeignCheckpoint { client, state }).into_iter().collect();
        // A restore does not wait for another inspection, which each message of the process causes.
        events.extend(self.pass_on(client));
        if is_outdated {
            self.inspect(model, sleep, client);
        }
        if let Some(state) = state {
            note(model, client, state);
        }
        events
    }

    /// Forgets a client that has disconnected. Returns the clients that it was about to restore.
    pub fn leave(&mut self, model: &Model, client: ClientId) -> Vec<ClientId> {
        self.restores_wait.remove(&client);
        self.inspections.remove(&client);
        self.looks.remove(&client);
        self.allow(model, client); // the driver's call fails
        let targets = self.restores.keys().filter(|restore| restore.caller == client).map(|restore| restore.target);
        let targets = targets.filter(|target| *target != client).collect();
        self.restores.retain(|restore, _| restore.target != client && restore.caller != client);
        targets
    }
}

/// Logs a change of a client's process.
fn note(model: &Model, client: ClientId, state: ForeignState) {
    let (before, is_known) = (model.machine.sleep_of(client).phase, model.machine.is_foreign(client));
    let what = match state {
        ForeignState::Locked if before != SleepPhase::Locked => "has locked",
        ForeignState::Checkpointed { restore_waits: true } if before != SleepPhase::Lent => {
            "has checkpointed, and will wait to restore,"
        }
        ForeignState::Checkpointed { restore_waits: false } if before != SleepPhase::Checkpointed => "has checkpointed",
        ForeignState::Runs if is_known => "has unlocked",
        ForeignState::Lost if is_known => "could not restore",
        _ => return,
    };
    if let Some(identity) = model.identity(client) {
        let (name, pid) = (identity.label(), identity.pid);
        info!(name: "foreign-checkpoint", client = client.0, pid, "another program {what} {name}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    const TARGET: ClientId = ClientId(1);
    const CALLER: ClientId = ClientId(2);

    /// A caller that has permission may hang before or after the restore.
    #[test]
    fn an_unfinished_restore_is_inspected_again_and_keeps_its_room() {
        let (model, mut foreign) = (Model::new(Config::default()), ForeignCheckpoints::default());
        foreign.restores_wait.insert(TARGET);
        assert!(foreign.restore_waits(TARGET));
        let request = Request { ticket: 1, is_passed_on: false, allowed: None };
        foreign.restores.insert(Restore { target: TARGET, caller: CALLER }, request);
        assert!(!foreign.is_restored(TARGET, clock::now()) && foreign.restore_waits(TARGET));
        assert_eq!(foreign.pass_on(TARGET), Some(Event::RestoreRequested { client: TARGET }));
        assert!(foreign.is_restored(TARGET, clock::now() + 10 * RESTORE), "it waits for room");
        foreign.allow(&model, TARGET);
        assert!(foreign.is_restored(TARGET, clock::now()) && !foreign.restore_waits(TARGET));
        assert!(!foreign.is_restored(TARGET, clock::now() + RESTORE) && !foreign.restore_waits(TARGET));
        assert_eq!(foreign.pass_on(TARGET), None, "it is not asked twice");
        foreign.leave(&model, CALLER);
        assert!(foreign.restore_waits(TARGET), "the caller has ended, and the next one will ask");
    }

    #[test]
    fn a_repeated_request_waits_for_the_same_room() {
        let (model, mut foreign) = (Model::new(Config::default()), ForeignCheckpoints::default());
        let mut receive = |ticket| {
            foreign.receive(&model, &Sleep::default(), CALLER, Some(TARGET), (CheckpointStep::Restoring, ticket))
        };
        assert_eq!(receive(1), Some(Event::RestoreRequested { client: TARGET }));
        assert_eq!(receive(2), None);
        let request = foreign.restores[&Restore { target: TARGET, caller: CALLER }];
        assert_eq!((request.ticket, request.is_passed_on, request.allowed), (2, true, None));
    }

    #[test]
    fn a_locked_process_is_inspected_less_and_less_often() {
        let mut foreign = ForeignCheckpoints::default();
        let looks = |foreign: &mut ForeignCheckpoints, from: u64| {
            (from..from + 600).filter(|n| foreign.is_due(TARGET, Duration::from_millis(n * 200))).count()
        };
        let (first, later) = (looks(&mut foreign, 0), looks(&mut foreign, 600));
        assert!((12..20).contains(&first) && later == 12, "{first} and {later} in 2 minutes");
        foreign.leave(&Model::new(Config::default()), TARGET);
        assert!(foreign.is_due(TARGET, Duration::from_secs(240)));
    }
}
