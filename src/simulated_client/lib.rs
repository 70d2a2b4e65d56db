//! A client of the scheduler in virtual time that answers like `libnvshare.so`: a pure state
//! machine, like the scheduler's own. It requests the lock when its program has work, drains after
//! a revoke, releases the lock in a pause while others wait, allocates within its limit, moves
//! memory to its allowance, and reports memory and utilization.
//!
//! `nvsharectl simulate` runs programs on it, and so do the random worlds of the scheduler's tests. Each world delivers
//! messages, calls back at the client's requested times, and decides how long work and copies take, whether mapping
//! memory fails, and which misbehaviour occurs. Every function takes the time and returns the [`Effect`]s, which the
//! world carries out in their order.
//!
//! - `client`: requests, turns and allocations. `memory`: the memory on one GPU. `utilization`: how busy it keeps a GPU.

mod client;
mod memory;
mod utilization;

pub use client::Client;
pub use memory::{Memory, Way};
pub use utilization::FULL;

use nvshare_sched::{ClientId, Command, Engine, EnvLimits, Event, GpuId, GpuSet, Group, TenantId, Time};
use std::time::Duration;

/// The fixed properties of a client.
#[derive(Debug, Clone)]
pub struct Setup {
    pub gang: u64,
    pub tenant: TenantId,
    pub group: Option<Group>,
    /// The limits from the client's environment.
    pub limits: EnvLimits,
    /// With [`Engine::Managed`] the program runs regardless of the mapped bytes: pages are faulted
    /// in.
    pub engine: Engine,
    /// The client's GPUs. The program needs the locks of all of them to run.
    pub gpus: GpuSet,
    /// Whether the locks of the GPUs are granted and released together.
    pub peers: bool,
    /// The time for which submitted work continues after a revoke. `None`: until the program's work
    /// is done.
    pub drain: Option<Duration>,
    /// The part of a GPU that the program keeps busy while it runs, in millionths; reported while
    /// other clients wait. `None`: never reported.
    pub fullness: Option<u32>,
    /// Bytes on each GPU that cannot leave.
    pub pinned: u64,
    /// Bytes per copy; the client reports after each.
    pub chunk: u64,
}

/// An action of the client, or a request to its world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// A message to the scheduler.
    Send(Event),
    /// The world must call [`Client::wake`] at that time.
    Wake(Time, Timer),
    /// Bytes move; the world must call [`Client::moved`] at the end. Each GPU has at most one move
    /// in progress.
    Move { gpu: GpuId, way: Way, bytes: u64 },
    /// The program's work begins or continues. The world calls [`Client::end_work`] at its end.
    Run,
    /// The program's work is interrupted.
    Halt,
    /// An allocation on this GPU is refused: the program ends, or [makes do](Client::make_do) with less memory.
    Denied(GpuId),
}

/// The reason of a wake-up. The sequence number identifies outdated timers, which have no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Timer {
    /// The program has been idle for its timeout.
    Quiet(u32),
    /// A utilization sample is complete.
    Sampled(u32),
    /// Work submitted before a revoke is done.
    Drained(u32),
    /// Work submitted before a revoke runs long.
    Lingers(u32),
    /// Time to retry a failed mapping on this GPU.
    Retry(GpuId),
}

/// The client that a command is sent to, or is about.
pub fn addressee(command: &Command) -> Option<ClientId> {
    match command {
        Command::Measure { .. }
        | Command::RoomReady { .. }
        | Command::RoomRefused { .. }
        | Command::RoomEnded { .. } => None,
        Command::Attached { client, .. }
        | Command::MappingFailed { client, .. }
        | Command::Limit { client, .. }
        | Command::Denied { client, .. }
        | Command::Allowance { client, .. }
        | Command::Grant { client, .. }
        | Command::Revoke { client, .. }
        | Command::Contended { client, .. }
        | Command::Waiting { client, .. }
        | Command::Undrainable { client, .. }
        | Command::EvictionBlocked { client, .. }
        | Command::Reserved { client, .. }
        | Command::Prepare { client, .. }
        | Command::Probe { client }
        | Command::PrepareSleep { client, .. }
        | Command::Awake { client, .. }
        | Command::Moved { client, .. }
        | Command::Migrated { client, .. }
        | Command::Checkpoint { client, .. }
        | Command::Placed { client, .. }
        | Command::Unplaced { client, .. } => Some(*client),
    }
}

/// Replaces `both.from` by `both.to` in a command, for a client that has been migrated.
pub fn rename(command: &mut Command, both: nvshare_sched::Move) {
    match command {
        Command::Attached { gpu, .. }
        | Command::Limit { gpu, .. }
        | Command::Denied { gpu, .. }
        | Command::Allowance { gpu, .. }
        | Command::Reserved { gpu, .. }
        | Command::Prepare { gpu, .. }
        | Command::EvictionBlocked { gpu, .. }
        | Command::MappingFailed { gpu, .. } => *gpu = if *gpu == both.from { both.to } else { *gpu },
        Command::Grant { gpus, .. }
        | Command::Revoke { gpus, .. }
        | Command::Contended { gpus, .. }
        | Command::Waiting { gpus, .. }
        | Command::Undrainable { gpus, .. } => replace(gpus, both),
        _ => {}
    }
}

/// Replaces `from` by `to` in a set.
pub fn replace(gpus: &mut GpuSet, nvshare_sched::Move { from, to }: nvshare_sched::Move) {
    if gpus.remove(&from) {
        gpus.insert(to);
    }
}
