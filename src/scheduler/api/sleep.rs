//! Sleep: taking a client off its GPUs, contexts included.

use super::{ClientId, EvictionBlock, GpuId};
use std::time::Duration;

/// An operation of the checkpoint helper on a client's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SleepOperation {
    /// Locks and checkpoints the process.
    Sleep,
    /// Restores and unlocks the process.
    Wake,
    /// Determines whether the process runs. Unlocks the process if it is locked and still on its
    /// GPUs.
    Settle,
}

/// The state in which the checkpoint helper left the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SleepOutcome {
    Runs,
    Asleep,
    /// The process never runs again: its restore failed permanently, or it has ended.
    Lost,
    /// The helper died, took too long, or could not determine the state.
    Unknown,
}

/// The state of a client's process, as the checkpoint helper reads it after a program other than the
/// helper may have locked or checkpointed the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub enum ForeignState {
    Runs,
    /// The process is on its GPUs, and its driver calls block.
    Locked,
    /// The process is off its GPUs. `restore_waits`: the program that checkpointed the process runs
    /// under the library, so its restore waits for [`Command::RestoreAllowed`](super::Command).
    Checkpointed {
        restore_waits: bool,
    },
    /// The process never runs again.
    Lost,
}

/// Why a client cannot sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SleepObstacle {
    /// The client has work, or threads that may be in the driver.
    Busy,
    /// The client uses managed memory, which the driver does not checkpoint.
    Managed,
    /// The client shares memory with other processes.
    Ipc,
    /// The client's GPUs have peer access to each other's memory.
    Peers,
    /// The client has memory that cannot leave the GPU.
    Immovable,
    /// Other devices may access the client's memory.
    Rdma,
    /// Some of the client's work bypasses the gate.
    UnseenWork,
    /// A stream is being captured.
    Capture,
    /// The client is in a gang.
    Gang,
    /// The client has no context, or is waiting for one.
    NoContext,
    /// The daemon cannot see the client's process.
    Unreachable,
    /// The driver or the daemon does not support sleep here.
    Unsupported,
    /// Memory in use on the client's GPUs is not measured, so the scheduler could not tell when the
    /// client fits again.
    Unmeasured,
    /// The client has not answered.
    Silent,
    /// Another program has locked or checkpointed the client's process.
    Foreign,
    /// The checkpoint failed.
    Failed,
}

/// The move of a client's attachment from one GPU to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Move {
    pub from: GpuId,
    pub to: GpuId,
}

/// Why a client is not moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MoveObstacle {
    /// The client has not attached the GPU that it should leave.
    NotThere,
    /// The other GPU does not exist, or has a different size.
    NoGpu,
    /// The client has attached the other GPU too.
    Attached,
    /// The client's memory does not fit on the other GPU beside memory that other clients need or
    /// that cannot be evicted, or limits forbid it.
    NoRoom,
    /// The client's memory would fit on the other GPU if the memory there could be evicted. Most of the memory
    /// that cannot be evicted belongs to this client.
    Unevictable(ClientId, EvictionBlock),
    /// Host memory or a group's limit would suffice for the move if other clients had acknowledged lower limits.
    Unacknowledged,
    /// The other GPU is drained.
    Drained,
    /// The client is already being moved, or it is asleep and its list of past moves is full.
    Moving,
    /// The client cannot sleep.
    Sleep(SleepObstacle),
    /// The client was resumed before it slept.
    Resumed,
    /// The client could not be restored on the other GPU, and is moved back.
    Failed,
}

/// A client's progress on its way off its GPUs, or back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SleepPhase {
    Awake,
    /// The client is evicting its memory, and stops entering the driver.
    Preparing,
    Checkpointing,
    Asleep,
    /// The client is waiting for room on its GPUs.
    Waking,
    Restoring,
    /// The checkpoint helper is determining whether the client's process runs.
    Settling,
    /// The client's process never runs again.
    Lost,
    /// Another program has locked the client's process. Its memory is on its GPUs.
    Locked,
    /// Another program has checkpointed the client's process. The room for the restore stays
    /// reserved, because that program's restore does not wait for room.
    Checkpointed,
    /// Another program has checkpointed the client's process, and its restore will wait for room.
    /// Until then, other clients use the room.
    Lent,
}

/// A client's sleep state, as the scheduler knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SleepView {
    pub phase: SleepPhase,
    /// The client is kept off its GPUs until it is resumed, whether asleep or not.
    pub paused: bool,
    /// The client should be off its GPUs because one of them is drained.
    pub drained: bool,
    /// Why the last attempt to put the client to sleep failed.
    pub obstacle: Option<SleepObstacle>,
    /// The client's current move to another GPU.
    pub moving: Option<Move>,
    /// The client's last wake. `None`: the client has not slept.
    pub woken: Option<Woken>,
}

/// How a client was restored to its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Woken {
    pub by: WakeReason,
    /// The time from the request to wake until the client was restored.
    pub took: Duration,
}

/// The reason why a client wakes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WakeReason {
    /// One of the client's threads called the driver.
    Call,
    Resumed,
}
