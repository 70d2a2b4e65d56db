//! Clients' processes that programs other than the checkpoint helper lock and checkpoint: vLLM's sleep
//! mode, `cuda-checkpoint`, snapshots of containers. The scheduler must know, because such a process
//! neither runs nor answers, and has no memory on its GPUs.
//!
//! A program that runs under the library reports its calls, but only the helper's answer counts
//! ([`Operation::Inspect`]). The calls of other programs are found by their effects: the process does not
//! answer, or NVML does not list it although it has memory. While a process is locked or checkpointed, it
//! is inspected again whenever it sends a message. A checkpointed process is also inspected when NVML lists
//! it again, and a locked one at each measurement, because an unlock has no effect that can be seen.
//!
//! A program under the library asks before it restores a process, and waits for room. The process is
//! inspected first. No inspection begins between the answer and the end of the restore: the process would
//! still look checkpointed.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;

use nvshare_wire::SchedulerMessage;
use nvshare_wire::client::CheckpointStep;
use tokio::sync::oneshot;
use tracing::info;

use super::model::Model;
use super::sleep::Sleep;
use crate::daemon::checkpoint::Outcome;
use crate::scheduler::{ClientId, Event, ForeignState, SleepPhase};

/// Checkpoints of clients' processes by other programs.
#[derive(Debug, Default)]
pub struct ForeignCheckpoints {
    /// Clients that were last checkpointed by a program that asks before it restores them.
    restores_wait: BTreeSet<ClientId>,
    inspections: BTreeMap<ClientId, Inspection>,
    restores: BTreeMap<Restore, Request>,
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
        if is_own || self.restores.iter().any(|(restore, request)| restore.target == client && request.is_passed_on) {
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
                let before = self.restores.insert(restore, Request { ticket, is_passed_on: false });
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
        let waiting = self.restores.iter_mut().filter(|(restore, _)| restore.target == target);
        let count = waiting.map(|(_, request)| request.is_passed_on = true).count();
        (count > 0).then_some(Event::RestoreRequested { client: target })
    }

    /// Whether the program that restores the client will wait for room.
    fn restore_waits(&self, client: ClientId) -> bool {
        self.restores_wait.contains(&client) || self.restores.keys().any(|restore| restore.target == client)
    }

    /// Tells the programs that wait for room that they may restore a client.
    pub fn allow(&self, model: &Model, client: ClientId) {
        for (restore, request) in self.restores.iter().filter(|(restore, _)| restore.target == client) {
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
