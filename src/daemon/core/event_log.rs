//! Log lines about events and commands. Logging only reads the state, except for [`Logged`].

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use nvshare_wire::client::StuckReason;
use tracing::debug;

use super::state::Core;
use crate::bus;
use crate::identity::Identity;
use crate::scheduler::{ClientId, Command, Event, GpuId, GpuSet, Time, WaitReason};

/// Logs a line about a client and a GPU, with the fields common to all such lines.
macro_rules! log_client {
    ($level:ident, name: $event:literal, $client:expr, $identity:expr, gpu = $gpu:expr, $($rest:tt)+) => {{
        let identity: &$crate::identity::Identity = $identity;
        tracing::$level!(
            name: $event,
            client = $client.0,
            pid = identity.pid,
            uid = identity.uid,
            unit = identity.unit.as_str(),
            gpu = $gpu,
            $($rest)+
        );
    }};
}
pub(super) use log_client;

/// Minimum time between two equal lines about the same client and GPU.
const REPEAT: Duration = Duration::from_secs(10);

/// Time at which each line about a client and a GPU was last logged, by the line's name.
#[derive(Debug, Default)]
pub(super) struct Logged(RefCell<BTreeMap<&'static str, Time>>);

impl Core {
    /// True if a line with this name may be logged now. In this case, records the line as logged.
    pub(super) fn may_log(&self, name: &'static str, client: ClientId, gpu: GpuId, now: Time) -> bool {
        let Some(stats) = self.clients.get(&client).and_then(|entry| entry.gpus.get(&gpu)) else { return false };
        let mut lines = stats.logged.0.borrow_mut();
        let is_recent = lines.get(name).is_some_and(|at| now < *at + REPEAT);
        if !is_recent {
            lines.insert(name, now);
        }
        !is_recent
    }

    /// Logs an event before the scheduler handles it.
    pub(super) fn log_event(&self, event: &Event) {
        match event {
            Event::Released { client, gpus, reason, busy } => {
                debug!(client = client.0, ?gpus, ?reason, ?busy, "release");
            }
            Event::Stuck { client, gpus, reason: StuckReason::UntrackedWork } => {
                let Some(entry) = self.clients.get(client) else { return };
                if gpus.iter().filter_map(|gpu| entry.gpus.get(gpu)).all(|stats| stats.untracked_work) {
                    return;
                }
                log_client!(
                    info,
                    name: "untracked-work",
                    client,
                    &entry.identity,
                    gpu = self.labels(gpus),
                    "keeping the memory of {} on the GPU, because it submits work that nvshare cannot track",
                    entry.identity.label()
                );
            }
            Event::Stuck { client, gpus, reason } => debug!(client = client.0, ?gpus, ?reason, "cannot drain"),
            _ => {}
        }
    }

    /// Logs a command.
    pub(super) fn log_command(&self, command: &Command, now: Time) {
        match command {
            Command::Reserved { client, gpu, bytes } => debug!(client = client.0, gpu = %gpu.0, bytes, "reserved"),
            Command::Prepare { client, gpu, bytes } => debug!(client = client.0, gpu = %gpu.0, bytes, "prepare"),
            Command::Denied { client, gpu, bytes, why } => {
                debug!(client = client.0, gpu = %gpu.0, bytes, ?why, "denied");
            }
            Command::Limit { client, gpu, bytes, .. } => debug!(client = client.0, gpu = %gpu.0, bytes, "limit"),
            Command::Allowance { client, gpu, bytes, .. } => {
                debug!(client = client.0, gpu = %gpu.0, bytes, "allowance");
            }
            Command::Grant { client, gpus } => debug!(client = client.0, ?gpus, "grant"),
            Command::Revoke { client, gpus } => debug!(client = client.0, ?gpus, "revoke"),
            Command::Contended { client, gpus, waiters, grace } => {
                debug!(client = client.0, ?gpus, waiters, ?grace, "contended");
            }
            Command::MappingFailed { client, gpu, bytes, failures } => {
                debug!(client = client.0, gpu = %gpu.0, bytes, failures, "mapping failed");
                self.log_mapping_failure(*client, *gpu, *bytes, *failures, now);
            }
            Command::Undrainable { client, gpus } => {
                let Some(identity) = self.identity(*client) else { return };
                log_client!(
                    warn,
                    name: "undrainable",
                    client,
                    identity,
                    gpu = self.labels(gpus),
                    "cannot interrupt the work of {}: other programs run at the same time",
                    identity.label()
                );
            }
            Command::EvictionBlocked { client, gpu, why } => {
                let Some(identity) = self.identity(*client) else { return };
                if !self.may_log("eviction-blocked", *client, *gpu, now) {
                    return;
                }
                log_client!(
                    warn,
                    name: "eviction-blocked",
                    client,
                    identity,
                    gpu = self.label(*gpu),
                    "cannot evict the memory of {}: {}. Evicting the memory of other programs instead",
                    identity.label(),
                    bus::eviction_block_name(*why)
                );
            }
            Command::Waiting { client, gpus, why: WaitReason::Context } => {
                let Some(identity) = self.identity(*client) else { return };
                log_client!(
                    info,
                    name: "context-waits",
                    client,
                    identity,
                    gpu = self.labels(gpus),
                    "delaying the CUDA context of {}, because another program's memory would no longer fit",
                    identity.label()
                );
            }
            Command::PrepareSleep { client, paused } => debug!(client = client.0, paused, "prepare-sleep"),
            Command::Awake { client, moved } => debug!(client = client.0, ?moved, "awake"),
            Command::Checkpoint { client, operation, moves } => {
                debug!(client = client.0, ?operation, ?moves, "checkpoint");
            }
            Command::Moved { client, from, to } => debug!(client = client.0, from = %from.0, to = %to.0, "moved"),
            Command::Migrated { client, from, to, why } => {
                debug!(client = client.0, from = %from.0, to = %to.0, ?why, "migrated");
            }
            Command::Waiting { client, gpus, why } => debug!(client = client.0, ?gpus, ?why, "waits"),
            Command::RoomReady { room, gpu } => debug!(room = room.0, gpu = %gpu.0, "room ready"),
            Command::RoomRefused { room, gpu, why } => debug!(room = room.0, gpu = %gpu.0, ?why, "room refused"),
            Command::RoomEnded { room, gpu } => debug!(room = room.0, gpu = %gpu.0, "room ended"),
            Command::Attached { .. }
            | Command::Probe { .. }
            | Command::Measure { .. }
            | Command::Placed { .. }
            | Command::Unplaced { .. } => {}
        }
    }

    pub(super) fn identity(&self, client: ClientId) -> Option<&Identity> {
        self.clients.get(&client).map(|entry| &*entry.identity)
    }

    pub(super) fn label(&self, gpu: GpuId) -> Option<String> {
        self.gpus.get(&gpu).map(|entry| entry.label(gpu))
    }

    /// The labels of several GPUs.
    pub(super) fn labels(&self, gpus: &GpuSet) -> String {
        let labels: Vec<String> = gpus.iter().filter_map(|id| self.label(*id)).collect();
        labels.join(" ")
    }
}
