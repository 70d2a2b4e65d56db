//! Messages to clients, from the scheduler's commands.

use nvshare_wire::{Moves, SchedulerMessage, scheduler as wire};

use super::model::Model;
use crate::scheduler::{ClientId, Command, Denial, GpuId, GpuSet, Move};

/// The message that tells a client of a command. `None` if the command is for the daemon, or the client
/// has no slot for the GPU any more.
pub(super) fn message(model: &Model, command: &Command) -> Option<(ClientId, SchedulerMessage)> {
    let slot_of = |client: &ClientId, gpu: &GpuId| model.clients.get(client).and_then(|c| c.session.slot(*gpu));
    let slots_of = |client: &ClientId, gpus: &GpuSet| {
        model.clients.get(client).map(|c| c.session.slots(gpus)).filter(|slots| *slots != 0)
    };
    Some(match command {
        Command::Attached { client, gpu } => (*client, SchedulerMessage::Attached { slot: slot_of(client, gpu)? }),
        Command::Limit { client, gpu, bytes, seq, most, spare, max } => {
            let (slot, max) = (slot_of(client, gpu)?, max.unwrap_or(0));
            (*client, SchedulerMessage::Limit { slot, bytes: *bytes, seq: *seq, most: *most, spare: *spare, max })
        }
        Command::Reserved { client, gpu, bytes } => {
            (*client, SchedulerMessage::Reserved { slot: slot_of(client, gpu)?, bytes: *bytes })
        }
        Command::Denied { client, gpu, bytes, why } => {
            let what = match why {
                Denial::NoContext => wire::Denial::Context,
                Denial::Unmappable => wire::Denial::Mapping,
                _ => wire::Denial::Limit,
            };
            (*client, SchedulerMessage::Denied { slot: slot_of(client, gpu)?, bytes: *bytes, what })
        }
        Command::Prepare { client, gpu, bytes } => {
            (*client, SchedulerMessage::Prepare { slot: slot_of(client, gpu)?, bytes: *bytes })
        }
        Command::Allowance { client, gpu, seq, bytes } => {
            (*client, SchedulerMessage::Allowance { slot: slot_of(client, gpu)?, seq: *seq, bytes: *bytes })
        }
        Command::Grant { client, gpus } => (*client, SchedulerMessage::Grant { gpus: slots_of(client, gpus)? }),
        Command::Revoke { client, gpus } => (*client, SchedulerMessage::Revoke { gpus: slots_of(client, gpus)? }),
        Command::Contended { client, gpus, waiters, grace } => {
            let grace_us = u32::try_from(grace.as_micros()).unwrap_or(u32::MAX);
            (*client, SchedulerMessage::Contended { gpus: slots_of(client, gpus)?, waiters: *waiters, grace_us })
        }
        Command::Waiting { client, gpus, why } => {
            (*client, SchedulerMessage::Waiting { gpus: slots_of(client, gpus)?, why: *why })
        }
        Command::PrepareSleep { client, paused } => {
            (*client, SchedulerMessage::PrepareSleep { flags: if *paused { wire::PAUSED } else { 0 } })
        }
        Command::Awake { client, moved } => {
            let moved = Moves::new(moved.iter().map(|Move { from, to }| (from.0, to.0))).unwrap_or_default();
            (*client, SchedulerMessage::Awake { moved })
        }
        Command::Probe { .. }
        | Command::Measure { .. }
        | Command::Placed { .. }
        | Command::Unplaced { .. }
        | Command::Checkpoint { .. }
        | Command::RestoreAllowed { .. }
        | Command::Migrated { .. }
        | Command::Moved { .. }
        | Command::RoomReady { .. }
        | Command::RoomRefused { .. }
        | Command::RoomEnded { .. }
        | Command::Undrainable { .. }
        | Command::EvictionBlocked { .. }
        | Command::MappingFailed { .. } => return None,
    })
}
