//! Log lines about events and commands.

use std::time::Duration;

use nvshare_wire::client::StuckReason;
use tracing::debug;

use super::state::Core;
use crate::bus;
use crate::identity::Identity;
use crate::scheduler::{ClientId, Command, Event, GpuId, GpuSet, Time, WaitReason};

/// A log line about a client and a GPU, with the fields that all such lines have.
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

/// Time before the same line about the same client and GPU is logged again.
const REPEAT: Duration = Duration::from_secs(10);

/// True if a line that was logged at `last` must not be repeated yet.
pub(super) fn is_recent(last: Option<Time>, now: Time) -> bool {
    last.is_some_and(|at| now < at + REPEAT)
}

impl Core {
    /// Logs an event, before the scheduler handles it, and updates the client's entry.
    pub(super) fn log_event(&mut self, event: &Event, now: Time) {
        use Event::{Connected, Disconnected, Held, Released, Requested};
        if let Connected { .. } | Disconnected { .. } | Held { .. } | Released { .. } | Requested { .. } = event {
            self.signals.turns.notify_one();
            self.signals.holders.notify_one();
        }
        match event {
            Event::Cancelled { client, gpus } => self.set_idle(*client, gpus, now),
            Event::Released { client, gpus, reason, busy } => {
                debug!(client = client.0, ?gpus, ?reason, ?busy, "release");
                self.set_idle(*client, gpus, now);
            }
            Event::Stuck { client, gpus, reason: StuckReason::UntrackedWork } => {
                let mut is_new = false;
                for gpu in gpus {
                    if let Some(stats) = self.stats(*client, *gpu) {
                        is_new |= !std::mem::replace(&mut stats.untracked_work, true);
                    }
                }
                let Some(identity) = self.identity(*client).filter(|_| is_new) else { return };
                log_client!(
                    info,
                    name: "untracked-work",
                    client,
                    identity,
                    gpu = self.labels(gpus),
                    "{} submits work to the GPU that nvshare cannot track: its memory stays on the GPU",
                    identity.name
                );
            }
            Event::Stuck { client, gpus, reason } => debug!(client = client.0, ?gpus, ?reason, "cannot drain"),
            Event::Detached { client, gpu } => {
                let Some(entry) = self.clients.get_mut(client) else { return };
                if entry.gpus.remove(gpu).is_some() && entry.lock.is_none() {
                    self.count_attachments(|count| count - 1);
                }
            }
            Event::Memory { client, gpu, report } => {
                if let Some(stats) = self.stats(*client, *gpu) {
                    stats.mapped = report.mapped;
                }
            }
            _ => {}
        }
    }

    /// Logs a command, and updates the entry of its client.
    pub(super) fn log_command(&mut self, command: &Command, now: Time) {
        match command {
            Command::Reserved { client, gpu, bytes } => debug!(client = client.0, gpu = %gpu.0, bytes, "reserved"),
            Command::Prepare { client, gpu, bytes } => debug!(client = client.0, gpu = %gpu.0, bytes, "prepare"),
            Command::Denied { client, gpu, bytes, why } => self.log_refusal(*client, *gpu, *bytes, *why, now),
            Command::Limit { client, gpu, bytes, .. } => {
                if let Some(stats) = self.stats(*client, *gpu) {
                    stats.limit = Some(*bytes);
                }
            }
            Command::Allowance { client, gpu, bytes, .. } => {
                let Some(stats) = self.stats(*client, *gpu) else { return };
                let before = std::mem::replace(&mut stats.allowance, *bytes);
                let what = match *bytes {
                    bytes if bytes < stats.mapped.min(before) => "evict",
                    bytes if bytes < before => "take-back", // no memory has to leave
                    _ => "credit",
                };
                debug!(client = client.0, gpu = %gpu.0, bytes, "{what}");
            }
            Command::Grant { client, gpus } => {
                self.signals.holders.notify_one();
                debug!(client = client.0, ?gpus, "grant");
            }
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
                    "{} cannot be drained: other programs run beside it",
                    identity.name
                );
            }
            Command::EvictionBlocked { client, gpu, why } => {
                let Some(stats) = self.stats(*client, *gpu) else { return };
                if is_recent(stats.eviction_block_logged, now) {
                    return;
                }
                stats.eviction_block_logged = Some(now);
                let Some(identity) = self.identity(*client) else { return };
                log_client!(
                    warn,
                    name: "eviction-blocked",
                    client,
                    identity,
                    gpu = self.label(*gpu),
                    "the memory of {} cannot be evicted: {}; other programs make room",
                    identity.name,
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
                    "{} is waiting to create a CUDA context: another program would no longer fit",
                    identity.name
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

    pub(super) fn set_idle(&mut self, client: ClientId, gpus: &GpuSet, now: Time) {
        for gpu in gpus {
            if let Some(stats) = self.stats(client, *gpu) {
                stats.idle_since = now;
            }
        }
    }
}
