//! Log lines about events and commands.

use nvshare_wire::client::StuckReason;
use tracing::debug;

use super::log::{Log, log_client};
use super::model::Model;
use crate::bus;
use crate::scheduler::{Command, Event, Time, WaitReason};

impl Log {
    /// Logs an event before the scheduler handles it.
    pub(super) fn log_event(&self, model: &Model, event: &Event) {
        match event {
            Event::Released { client, gpus, reason, busy } => {
                debug!(client = client.0, ?gpus, ?reason, ?busy, "release");
            }
            Event::Stuck { client, gpus, reason: StuckReason::UntrackedWork } => {
                let Some(entry) = model.clients.get(client) else { return };
                if gpus.iter().filter_map(|gpu| entry.gpus.get(gpu)).all(|stats| stats.shown.untracked_work) {
                    return;
                }
                let (identity, label) = (&entry.identity, entry.identity.label());
                log_client!(info, name: "untracked-work", client, identity, gpu = model.labels(gpus), "keeping the memory \
                    of {label} on the GPU, because it submits work that nvshare cannot track");
            }
            Event::Stuck { client, gpus, reason: StuckReason::OtherDevice } => {
                let Some(entry) = model.clients.get(client) else { return };
                if gpus.iter().filter_map(|gpu| entry.gpus.get(gpu)).all(|stats| stats.shown.other_device) {
                    return;
                }
                let (identity, label) = (&entry.identity, entry.identity.label());
                log_client!(info, name: "untracked-work", client, identity, gpu = model.labels(gpus), "keeping the memory \
                    of {label} on the GPU, because {}", bus::OTHER_DEVICE);
            }
            Event::Stuck { client, gpus, reason } => debug!(client = client.0, ?gpus, ?reason, "cannot drain"),
            _ => {}
        }
    }

    /// Logs a command.
    pub(super) fn log_command(&mut self, model: &Model, command: &Command, now: Time) {
        match command {
            Command::Reserved { client, gpu, bytes } => debug!(client = client.0, gpu = %gpu.0, bytes, "reserved"),
            Command::Prepare { client, gpu, bytes } => debug!(client = client.0, gpu = %gpu.0, bytes, "prepare"),
            Command::Denied { client, gpu, bytes, why } => {
                debug!(client = client.0, gpu = %gpu.0, bytes, ?why, "denied");
                self.note_refusal(model, (*client, *gpu, *bytes), *why, now);
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
                self.log_mapping_failure(model, (*client, *gpu, *bytes), *failures, now);
            }
            Command::Undrainable { client, gpus } => {
                let Some(identity) = model.identity(*client) else { return };
                let label = identity.label();
                log_client!(warn, name: "undrainable", client, identity, gpu = model.labels(gpus), "cannot interrupt the \
                    work of {label}: other programs run at the same time");
            }
            Command::EvictionBlocked { client, gpu, why } => {
                let Some(identity) = model.identity(*client) else { return };
                if model.is_attached(*client, *gpu) && self.may_log("eviction-blocked", *client, *gpu, now) {
                    let (label, why) = (identity.label(), bus::eviction_block_name(*why));
                    log_client!(warn, name: "eviction-blocked", client, identity, gpu = model.label(*gpu), "cannot evict \
                        the memory of {label}: {why}. Evicting the memory of other programs instead");
                }
            }
            Command::Waiting { client, gpus, why: WaitReason::Context } => {
                let Some(identity) = model.identity(*client) else { return };
                let label = identity.label();
                log_client!(info, name: "context-waits", client, identity, gpu = model.labels(gpus), "delaying the CUDA \
                    context of {label}, because another program's memory would no longer fit");
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
            | Command::RestoreAllowed { .. }
            | Command::Probe { .. }
            | Command::Measure { .. }
            | Command::Placed { .. }
            | Command::Unplaced { .. } => {}
        }
    }
}
