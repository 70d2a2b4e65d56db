//! A simulated client of the scheduler: a pure state machine that answers like `libnvshare.so`, in
//! virtual time. The client requests the lock when its program has work, and drains after a revoke.
//! It releases the lock when its program pauses while other clients wait. It allocates within its
//! limit, moves memory to match its allowance, and reports memory and utilization.
//!
//! `nvsharectl simulate` and the random worlds of the scheduler's tests run programs on this
//! client. A world delivers messages and calls the client back at the requested times. A world also
//! decides how long work and copies take, whether mapping memory fails, and which misbehaviour
//! occurs. Every function takes the time and returns [`Effect`]s, which the world carries out in
//! order.
//!
//! - `client`: requests, turns and allocations.
//! - `memory`: the memory on one GPU.
//! - `utilization`: the part of the time in which the client keeps a GPU busy.

mod client;
mod memory;
mod utilization;

pub use client::Client;
pub use memory::{Memory, Way};
pub use utilization::FULL;

use nvshare_sched::{Engine, EnvLimits, Event, GpuId, GpuSet, Group, TenantId, Time};
use std::time::Duration;

/// The fixed properties of a client.
#[derive(Debug, Clone)]
pub struct Setup {
    pub gang: u64,
    pub tenant: TenantId,
    pub group: Option<Group>,
    /// The limits from the client's environment.
    pub limits: EnvLimits,
    /// With [`Engine::Managed`], the program runs regardless of the mapped bytes, because the
    /// driver handles page faults.
    pub engine: Engine,
    /// The client's GPUs. The program needs the locks of all these GPUs to run.
    pub gpus: GpuSet,
    /// Whether the client releases the locks of all its GPUs together.
    pub peers: bool,
    /// The time for which submitted work continues after a revoke. `None`: the program's work
    /// continues to its end.
    pub drain: Option<Duration>,
    /// The part of a GPU that the program keeps busy while it runs, in millionths. The client
    /// reports it while other clients wait. `None`: the client never reports it.
    pub fullness: Option<u32>,
    /// Bytes on each GPU that cannot be evicted.
    pub pinned: u64,
    /// Bytes per copy. The client reports after each copy.
    pub chunk: u64,
}

/// An action of the client, or a request to its world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// A message to the scheduler.
    Send(Event),
    /// The world must call [`Client::wake`] at the given time.
    Wake(Time, Timer),
    /// The world moves these bytes, and must call [`Client::moved`] at the end of the move. Each
    /// GPU has at most one move in progress.
    Move { gpu: GpuId, way: Way, bytes: u64 },
    /// The program's work starts or continues. The world must call [`Client::end_work`] when the
    /// work ends.
    Run,
    /// The program's work is interrupted.
    Halt,
    /// An allocation on this GPU is denied. The program ends, or [reduces](Client::make_do) its
    /// demand.
    Denied(GpuId),
}

/// The reason for a wake-up. The sequence number identifies outdated timers, which have no effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Timer {
    /// The program has been idle for its timeout.
    Quiet(u32),
    /// A utilization sample is complete.
    Sampled(u32),
    /// Work submitted before a revoke is done.
    Drained(u32),
    /// Work submitted before a revoke still runs after a long time.
    Lingers(u32),
    /// A failed mapping on this GPU is due for a retry.
    Retry(GpuId),
}
