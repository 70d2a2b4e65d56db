//! Suspend of the host, and sleep of programs. Before a suspend, programs' memory is evicted from
//! the GPUs. A program sleeps when a user pauses it, or when it has been idle for long. By default,
//! idle programs sleep only with tested driver versions (`KILLS_DO_NO_HARM`), because with some
//! drivers the kill of a restored program has hung the host.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tracing::{debug, info, warn};
use zbus::fdo;

use super::paused::Paused;
use super::saved::{Saved, Saving};
use super::state::Core;
use crate::config::Config;
use crate::daemon::checkpoint::{HelperAnswer, HelperFailure, Operation, Outcome, Uuid};
use crate::daemon::gpu::nvml::DriverVersions;
use crate::identity::Identity;
use crate::scheduler::{
    ClientId, Event, GpuId, Move, Settings, SleepObstacle, SleepOperation, SleepOutcome, SleepPhase, Time,
};
use crate::sys::clock;

/// The file that stores the drained GPUs.
const DRAINED: &str = "drained.toml";
/// Time after which checkpoints are tried again if they were impossible. An administrator may have
/// replaced the driver by then.
const NO_CHECKPOINTS: Duration = Duration::from_secs(600);

/// Prefixes of tested driver versions. By default, the scheduler puts idle programs to sleep only
/// with these versions. With some other drivers, killing restored programs has hung hosts
/// (NVIDIA/cuda-checkpoint#53). With the tested versions, 300 such kills caused no failure
/// (`bench/RESULTS.md`).
const KILLS_DO_NO_HARM: [&str; 1] = ["580.159."];

/// The reason why the state of a process cannot be determined.
const NO_HELPER: &str = "nvshare-checkpoint is missing or cannot use the driver";

/// The scheduler's settings with this driver version. Without `sleep-after` in the configuration,
/// programs sleep only with the drivers in [`KILLS_DO_NO_HARM`].
pub(super) fn settings(config: &Config, driver: Option<&str>) -> Settings {
    let is_known = driver.is_some_and(|driver| KILLS_DO_NO_HARM.iter().any(|begin| driver.starts_with(begin)));
    let sleep_after = config.settings.sleep_after.filter(|_| config.sets_sleep_after || is_known);
    Settings { sleep_after, ..config.settings.clone() }
}

/// A message to the checkpoint helpers.
#[derive(Debug)]
pub enum Checkpoint {
    /// A client is preparing for sleep. A request to checkpoint its process follows soon.
    Prepare(ClientId),
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

impl Core {
    /// A receiver whose value is true while any program has a GPU attached.
    pub fn follow_attached(&self) -> watch::Receiver<bool> {
        self.attached.subscribe()
    }

    pub(super) fn count_attachments(&mut self, change: impl FnOnce(usize) -> usize) {
        self.attachments = change(self.attachments);
        let is_any = self.attachments > 0;
        self.attached.send_if_modified(|before| std::mem::replace(before, is_any) != is_any);
    }

    /// Handles the host's announcement that it is about to suspend, or has resumed.
    pub fn suspend(&mut self, suspended: bool) {
        if self.suspended == suspended {
            return;
        }
        self.suspended = suspended;
        if suspended {
            info!(name: "suspend", "the host is about to suspend: evicting all programs' memory");
        } else {
            info!(name: "host-resumed", "the host has resumed");
        }
        self.apply(Event::Suspend { suspended });
    }

    /// Handles NVML's report of the driver's version.
    pub(super) fn driver_is(&mut self, versions: DriverVersions) {
        self.driver = versions;
        let settings = settings(&self.config, self.driver.driver.as_deref());
        if *self.machine.settings() != settings {
            self.apply(Event::Configure(settings.clone()));
            self.settings.send_replace(settings);
        }
    }

    /// Sets the channel to the task that handles checkpoint requests. The task reports each result to
    /// [`Self::checkpointed`].
    pub fn use_checkpoints(&mut self, requests: mpsc::UnboundedSender<Checkpoint>) {
        self.checkpoints = Some(requests);
    }

    /// An obstacle to a client's sleep that the daemon knows without asking the client.
    pub(super) fn sleep_obstacle(&self, client: ClientId, now: Time) -> Option<SleepObstacle> {
        let entry = self.clients.get(&client)?;
        let is_supported =
            self.checkpoints.is_some() && self.no_checkpoints.is_none_or(|at| now >= at + NO_CHECKPOINTS);
        if entry.process.is_none() {
            return Some(SleepObstacle::Unreachable);
        }
        (!is_supported).then_some(SleepObstacle::Unsupported)
    }

    /// Requests an operation on a client's process. Returns the answer if it is known immediately.
    pub(super) fn request_checkpoint(
        &mut self,
        client: ClientId,
        operation: SleepOperation,
        moves: &[Move],
    ) -> Option<Event> {
        let pairs = self.pairs(moves);
        let entry = self.clients.get_mut(&client)?;
        let operation = match operation {
            SleepOperation::Sleep => Operation::Sleep,
            SleepOperation::Wake => Operation::Wake,
            SleepOperation::Settle => Operation::Settle,
        };
        let untouched = if operation == Operation::Sleep { SleepOutcome::Runs } else { SleepOutcome::Unknown };
        // Without a pidfd, no scheduler can have checkpointed the process.
        let Some(process) = &entry.process else {
            return Some(Event::Checkpointed { client, outcome: SleepOutcome::Runs });
        };
        let Some(requests) = &self.checkpoints else {
            // For operations other than `Sleep`, the outcome is unknown: an earlier scheduler may
            // have had a helper, and may have put the process to sleep. A sleeping process that
            // counts as running would never end its turn.
            return Some(Event::Checkpointed { client, outcome: untouched });
        };
        let (awaited, awaits) = oneshot::channel();
        let identity = entry.identity.clone();
        let request = process.get_ref().try_clone();
        let request = request.map(|process| CheckpointRequest { client, operation, process, identity, pairs, awaited });
        if request.is_ok_and(|request| requests.send(Checkpoint::Do(request)).is_ok()) {
            entry.checkpoint = Some(awaits);
            return None;
        }
        Some(Event::Checkpointed { client, outcome: untouched })
    }

    /// True if a client may be asleep, but no helper can determine its state.
    ///
    /// Only the client itself claims that an earlier scheduler put it to sleep, so only the
    /// client's own status shows the problem. If the scheduler's status showed the problem, any
    /// program could make the scheduler's pod on a Kubernetes node not ready.
    pub(super) fn is_undetermined(&self, client: ClientId) -> bool {
        let is_unable = self.checkpoints.is_none() || self.no_checkpoints.is_some();
        is_unable && self.machine.sleep_of(client).phase == SleepPhase::Settling
    }

    /// True if a client is waiting to be restored to its GPUs.
    pub fn is_to_wake(&self, client: ClientId) -> bool {
        self.machine.sleep_of(client).phase == SleepPhase::Waking
    }

    /// Handles the result of an operation on a client's process.
    pub fn checkpointed(&mut self, client: ClientId, operation: Operation, answer: &HelperAnswer) {
        let Some(entry) = self.clients.get(&client) else { return };
        let (pid, name, tenant) = (entry.identity.pid, entry.identity.label(), &entry.identity.tenant);
        debug!(client = client.0, ?operation, outcome = ?answer.outcome, "checkpoint");
        if let Some(failure) = &answer.failure
            && self.log_limit.allows("checkpoint", tenant)
        {
            let what = if operation == Operation::Wake { "restored on" } else { "taken off" };
            warn!(client = client.0, pid, "{name} was not {what} its GPUs: {failure}");
        }
        match answer.failure {
            Some(HelperFailure::NoCalls | HelperFailure::NotStarted(_)) => self.no_checkpoints = Some(clock::now()),
            None => self.no_checkpoints = None, // checkpoints work again
            Some(_) => {}
        }
        // The client claimed to be asleep, and is not.
        let is_settled = operation == Operation::Settle && answer.outcome == Outcome::Runs;
        let outcome = match answer.outcome {
            Outcome::Runs => SleepOutcome::Runs,
            Outcome::Asleep => SleepOutcome::Asleep,
            Outcome::Lost | Outcome::Gone => SleepOutcome::Lost,
            Outcome::Unknown => SleepOutcome::Unknown,
        };
        self.apply(Event::Checkpointed { client, outcome });
        if let Some(entry) = self.clients.get_mut(&client).filter(|_| is_settled) {
            entry.is_exempt = false;
            let gpus: Vec<GpuId> = entry.gpus.keys().copied().collect();
            gpus.into_iter().for_each(|gpu| self.disconnect_unproven(gpu));
        }
    }

    /// The clients of a process. A process has several clients if it has loaded the library several times.
    ///
    /// # Errors
    /// `InvalidArgs` if the process has no clients.
    pub(super) fn program(&self, pid: u32) -> fdo::Result<Vec<ClientId>> {
        let is_meant =
            |client: &super::state::Client| client.lock.is_none() && i64::from(client.identity.pid) == i64::from(pid);
        let found = self.clients.iter().filter(|(_, client)| pid > 0 && is_meant(client)).map(|(id, _)| *id);
        let found: Vec<ClientId> = found.collect();
        let no_program = || fdo::Error::InvalidArgs(format!("no program under nvshare has process ID {pid}"));
        (!found.is_empty()).then_some(found).ok_or_else(no_program)
    }

    /// The users accountable for a process's clients. There are several if the process connected under several
    /// user ids.
    ///
    /// # Errors
    /// `InvalidArgs` if the process has no clients.
    pub fn users_of(&self, pid: u32) -> fdo::Result<BTreeSet<u32>> {
        let clients = self.program(pid)?;
        Ok(clients.iter().filter_map(|client| Some(self.clients.get(client)?.identity.accountable())).collect())
    }

    /// Pauses or resumes a program. A paused program is off its GPUs until it is resumed. `users`: the
    /// users whose programs the caller may control.
    ///
    /// # Errors
    /// `InvalidArgs` if no program has this process ID, or if the ID now belongs to another user's process.
    /// `Failed` if no helper can wake the program to resume it.
    pub fn pause(&mut self, pid: u32, is_paused: bool, users: &BTreeSet<u32>) -> fdo::Result<Saving> {
        if !self.users_of(pid)?.is_subset(users) {
            return Err(fdo::Error::InvalidArgs(format!("process {pid} has just ended")));
        }
        if !is_paused && self.program(pid)?.iter().any(|client| self.is_undetermined(*client)) {
            return Err(fdo::Error::Failed(format!(
                "cannot resume process {pid}: it may be asleep, and {NO_HELPER}. Install nvshare-checkpoint (on \
                 Kubernetes: the component sleep/), then resume it."
            )));
        }
        let saving = self.paused.set(pid.try_into().unwrap_or_default(), is_paused);
        for client in self.program(pid)? {
            if let Some(entry) = self.clients.get(&client) {
                let (name, uid) = (entry.identity.label(), entry.identity.uid);
                let word = if is_paused { "paused" } else { "resumed" };
                info!(client = client.0, pid, uid, "{name} is {word}");
            }
            self.apply(match is_paused {
                true => Event::SleepWanted { client, paused: true },
                false => Event::Resumed { client },
            });
        }
        Ok(saving)
    }

    /// Restores the paused programs and the drained GPUs saved in this directory. From now on, saves
    /// changes in it.
    pub fn keep_orders(&mut self, directory: &Path) {
        self.paused = Paused::open(directory);
        self.drained = Saved::open(
            directory,
            DRAINED,
            "cannot save the list of drained GPUs, so a restart of the scheduler will end the drains",
        );
    }

    /// Restores the sleep of a newly connected client. `is_asleep`: an earlier scheduler may have put the
    /// client to sleep. If the client's process is paused, the client is paused again. An earlier daemon
    /// may have received that order.
    pub(super) fn restore_sleep(&mut self, client: ClientId, is_asleep: bool) {
        if is_asleep {
            self.apply(Event::FoundAsleep { client });
        }
        let is_paused = |client: &super::state::Client| client.lock.is_none() && self.paused.has(client.identity.pid);
        if self.clients.get(&client).is_some_and(is_paused) {
            self.apply(Event::SleepWanted { client, paused: true });
        }
    }

    /// True if all evictable memory has been evicted, or the host is not about to suspend.
    pub fn is_evacuated(&self) -> bool {
        !self.suspended || self.machine.is_evacuated()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_programs_sleep_by_default_only_with_drivers_that_were_tested() {
        let default = Config::default();
        let after = |config: &Config, driver| settings(config, driver).sleep_after;
        assert_eq!(after(&default, None), None);
        assert_eq!(after(&default, Some("570.86.15")), None);
        assert_eq!(after(&default, Some("580.159.04")), Some(Duration::from_secs(300)));
        let given = Config { sets_sleep_after: true, ..Config::default() };
        assert_eq!(after(&given, Some("570.86.15")), Some(Duration::from_secs(300)));
    }
}
