//! Suspend of the host, and sleep of programs. Before a suspend, programs' memory is evicted from
//! the GPUs. A program sleeps when a user pauses it, or when it has been idle for long.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tracing::{info, warn};
use zbus::fdo;

use super::log::Log;
use super::model::Model;
use super::paused::Paused;
use crate::daemon::checkpoint::{HelperAnswer, HelperFailure, Operation, Outcome, Uuid};
use crate::daemon::state_file::Saving;
use crate::identity::Identity;
use crate::scheduler::{ClientId, Event, SleepObstacle, SleepOperation, SleepOutcome, SleepPhase, Time};
use crate::sys::clock;

/// Time after which checkpoints are tried again if they were impossible. An administrator may have
/// replaced the driver by then.
const NO_CHECKPOINTS: Duration = Duration::from_secs(600);

/// The reason why the state of a process cannot be determined.
const NO_HELPER: &str = "nvshare-checkpoint is missing or cannot use the driver";

/// A message to the checkpoint helpers.
#[derive(Debug)]
pub enum Checkpoint {
    /// A client is preparing for sleep. A request to checkpoint its process follows soon.
    Prepare(ClientId, Arc<Identity>),
    Do(CheckpointRequest),
}

/// A request to take a process off its GPUs by a checkpoint, or to restore the process.
#[derive(Debug)]
pub struct CheckpointRequest {
    pub client: ClientId,
    pub operation: Operation,
    /// The process's pidfd.
    pub process: OwnedFd,
    pub identity: Arc<Identity>,
    /// For a wake on other GPUs: each GPU of the host, paired with the GPU on which its memory is restored.
    pub pairs: Vec<(Uuid, Uuid)>,
    /// Closed when the client disconnects. The answer is then not needed any more.
    pub awaited: oneshot::Sender<Infallible>,
}

/// The requests to the checkpoint helpers, and the paused processes.
#[derive(Debug, Default)]
pub struct Sleep {
    /// The channel to the task that handles the requests. `None` without helpers.
    requests: Option<mpsc::UnboundedSender<Checkpoint>>,
    /// The newest request for each client. Dropping it cancels the request.
    asked: BTreeMap<ClientId, oneshot::Receiver<Infallible>>,
    /// Time at which the daemon last found that checkpoints are impossible on this host.
    impossible_since: Option<Time>,
    paused: Paused,
}

impl Model {
    /// Handles the host's announcement that it is about to suspend, or has resumed.
    pub fn suspend(&self, suspended: bool) -> Option<Event> {
        if self.machine.is_suspended() == suspended {
            return None;
        }
        if suspended {
            info!(name: "suspend", "the host is about to suspend: evicting all programs' memory");
        } else {
            info!(name: "host-resumed", "the host has resumed");
        }
        Some(Event::Suspend { suspended })
    }

    /// True if all evictable memory has been evicted, or the host is not about to suspend.
    pub fn is_evacuated(&self) -> bool {
        !self.machine.is_suspended() || self.machine.is_evacuated()
    }
}

impl Sleep {
    /// Restores the paused processes saved in this directory. From now on, saves changes in it.
    pub fn open(&mut self, directory: &Path) {
        self.paused = Paused::open(directory);
    }

    /// Sets the channel to the task that handles checkpoint requests.
    pub fn use_helpers(&mut self, requests: mpsc::UnboundedSender<Checkpoint>) {
        self.requests = Some(requests);
    }

    /// Announces to the helpers that a client prepares for sleep.
    ///
    /// # Errors
    /// The obstacle to the client's sleep that the daemon knows without asking the client.
    pub fn prepare(&self, model: &Model, client: ClientId, now: Time) -> Result<(), SleepObstacle> {
        let Some(entry) = model.clients.get(&client) else { return Ok(()) };
        let is_possible = self.impossible_since.is_none_or(|at| now >= at + NO_CHECKPOINTS);
        match &self.requests {
            _ if entry.process.is_none() => Err(SleepObstacle::Unreachable),
            Some(requests) if is_possible => {
                let _ = requests.send(Checkpoint::Prepare(client, entry.identity.clone()));
                Ok(())
            }
            _ => Err(SleepObstacle::Unsupported),
        }
    }

    /// Requests an operation on a client's process. Returns the answer if it is known immediately. `pairs`:
    /// see [`CheckpointRequest::pairs`].
    pub fn request(
        &mut self,
        model: &Model,
        client: ClientId,
        operation: SleepOperation,
        pairs: Vec<(Uuid, Uuid)>,
    ) -> Option<Event> {
        let entry = model.clients.get(&client)?;
        let (operation, untouched) = match operation {
            SleepOperation::Sleep => (Operation::Sleep, SleepOutcome::Runs),
            // An earlier scheduler may have had a helper, and may have put the process to sleep. A
            // sleeping process that counts as running would never end its turn.
            SleepOperation::Wake => (Operation::Wake, SleepOutcome::Unknown),
            SleepOperation::Settle => (Operation::Settle, SleepOutcome::Unknown),
        };
        // Without a pidfd, no scheduler can have checkpointed the process.
        if entry.process.is_none() {
            return Some(Event::Checkpointed { client, outcome: SleepOutcome::Runs });
        }
        let Some(awaits) = self.send(model, client, operation, pairs) else {
            return Some(Event::Checkpointed { client, outcome: untouched });
        };
        self.asked.insert(client, awaits);
        None
    }

    /// Asks a helper for the state of a client's process. Dropping the result cancels the request. `None`: no
    /// helper can read the state.
    pub fn inspect(&self, model: &Model, client: ClientId) -> Option<oneshot::Receiver<Infallible>> {
        let is_possible = self.impossible_since.is_none_or(|at| clock::now() >= at + NO_CHECKPOINTS);
        is_possible.then(|| self.send(model, client, Operation::Inspect, Vec::new())).flatten()
    }

    /// Sends a request about a client's process to the helpers.
    fn send(
        &self,
        model: &Model,
        client: ClientId,
        operation: Operation,
        pairs: Vec<(Uuid, Uuid)>,
    ) -> Option<oneshot::Receiver<Infallible>> {
        let entry = model.clients.get(&client)?;
        let process = entry.process.as_ref()?.get_ref().try_clone().ok()?;
        let (awaited, awaits) = oneshot::channel();
        let identity = entry.identity.clone();
        let request = CheckpointRequest { client, operation, process, identity, pairs, awaited };
        self.requests.as_ref()?.send(Checkpoint::Do(request)).ok()?;
        Some(awaits)
    }

    /// True if a client may be asleep, but no helper can determine its state.
    ///
    /// Only the client itself claims that an earlier scheduler put it to sleep, so only the
    /// client's own status shows the problem. If the scheduler's status showed the problem, any
    /// program could make the scheduler's pod on a Kubernetes node not ready.
    pub fn is_undetermined(&self, model: &Model, client: ClientId) -> bool {
        let is_unable = self.requests.is_none() || self.impossible_since.is_some();
        is_unable && model.machine.sleep_of(client).phase == SleepPhase::Settling
    }

    /// Notes whether the helpers work.
    pub fn note_helper(&mut self, answer: &HelperAnswer) {
        match answer.failure {
            Some(HelperFailure::NoCalls | HelperFailure::NotStarted(_)) => self.impossible_since = Some(clock::now()),
            None => self.impossible_since = None, // checkpoints work again
            Some(_) => {}
        }
    }

    /// Cancels the request for a client that has disconnected.
    pub fn leave(&mut self, client: ClientId) {
        self.asked.remove(&client);
    }

    /// Pauses or resumes a program. A paused program is off its GPUs until it is resumed. `users`: the
    /// users whose programs the caller may control.
    ///
    /// # Errors
    /// `InvalidArgs` if no program has this process ID, or if the ID now belongs to another user's process.
    /// `Failed` if no helper can wake the program to resume it.
    pub fn pause(
        &mut self,
        model: &Model,
        events: &mut Vec<Event>,
        pid: u32,
        is_paused: bool,
        users: &BTreeSet<u32>,
    ) -> fdo::Result<Saving> {
        let clients = model.program_of(pid, users)?;
        if !is_paused && clients.iter().any(|client| self.is_undetermined(model, *client)) {
            return Err(fdo::Error::Failed(format!(
                "cannot resume process {pid}: it may be asleep, and {NO_HELPER}. Install nvshare-checkpoint (on \
                 Kubernetes: the component sleep/), then resume it."
            )));
        }
        let saving = self.paused.set(pid.try_into().unwrap_or_default(), is_paused);
        let event = |client: ClientId| {
            if let Some(identity) = model.identity(client) {
                let (name, uid) = (identity.label(), identity.uid);
                let word = if is_paused { "paused" } else { "resumed" };
                info!(client = client.0, pid, uid, "{name} is {word}");
            }
            match is_paused {
                true => Event::SleepWanted { client, paused: true },
                false => Event::Resumed { client },
            }
        };
        events.extend(clients.into_iter().map(event));
        Ok(saving)
    }

    /// The events that restore the sleep of a newly connected client. If the client's process is paused, the
    /// client is paused again. An earlier daemon may have received that order.
    pub fn restore(&self, model: &Model, client: ClientId) -> Vec<Event> {
        let Some(entry) = model.clients.get(&client) else { return Vec::new() };
        let found = entry.is_exempt.then_some(Event::FoundAsleep { client });
        let is_paused = entry.lock.is_none() && self.paused.has(entry.identity.pid);
        found.into_iter().chain(is_paused.then_some(Event::SleepWanted { client, paused: true })).collect()
    }
}

/// The scheduler's name for the state in which a helper left a process.
pub(super) fn outcome(outcome: Outcome) -> SleepOutcome {
    match outcome {
        Outcome::Runs => SleepOutcome::Runs,
        Outcome::Asleep => SleepOutcome::Asleep,
        Outcome::Lost | Outcome::Gone => SleepOutcome::Lost,
        Outcome::Locked | Outcome::Unknown => SleepOutcome::Unknown,
    }
}

/// Logs why an operation on a client's process failed.
pub(super) fn log_failure(
    log: &mut Log,
    client: ClientId,
    identity: &Identity,
    operation: Operation,
    answer: &HelperAnswer,
) {
    if let Some(failure) = &answer.failure
        && log.allows("checkpoint", identity)
    {
        let what = match operation {
            Operation::Sleep | Operation::Settle => "was not taken off its GPUs",
            Operation::Wake => "was not restored on its GPUs",
            Operation::Inspect => "may have been checkpointed by another program, which cannot be checked",
        };
        let (pid, name) = (identity.pid, identity.label());
        warn!(client = client.0, pid, "{name} {what}: {failure}");
    }
}
