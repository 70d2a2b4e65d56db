//! Sleep: a client that is taken off its GPUs, its contexts included.

use super::GpuId;
use std::time::Duration;

/// An operation of the checkpoint helper on a client's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SleepOperation {
    /// Lock it and checkpoint it.
    Sleep,
    /// Restore it and unlock it.
    Wake,
    /// Determine whether it runs, and unlock it if it is locked and still on its GPUs.
    Settle,
}

/// The state in which the helper left the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SleepOutcome {
    Runs,
    Asleep,
    /// It never runs again: its restore failed permanently, or it has ended.
    Lost,
    /// The helper died, took too long, or could not determine the state.
    Unknown,
}

/// Why a client cannot sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SleepObstacle {
    /// It has work, or threads that may be in the driver.
    Busy,
    /// It uses managed memory, which the driver does not checkpoint.
    Managed,
    /// It shares memory with other processes.
    Ipc,
    /// Its GPUs reach each other's memory.
    Peers,
    /// It has memory that cannot leave the GPU.
    Immovable,
    /// Other devices may reach its memory.
    Rdma,
    /// Its work passes no gate.
    UnseenWork,
    /// A stream is being captured.
    Capture,
    /// It is in a gang.
    Gang,
    /// It has no context, or is waiting for one.
    NoContext,
    /// Its process is not visible to the daemon.
    Unreachable,
    /// Neither the driver nor the daemon supports it here.
    Unsupported,
    /// Memory in use on its GPUs is not measured, so the scheduler could not tell when they have room for it again.
    Unmeasured,
    /// It has not answered.
    Silent,
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
    /// It has not attached the GPU that it should leave.
    NotThere,
    /// The other GPU does not exist, or is of another size.
    NoGpu,
    /// It has attached the other GPU too.
    Attached,
    /// On the other GPU, its memory does not fit beside memory that other clients need or may not lose, or limits do
    /// not allow it.
    NoRoom,
    /// The other GPU is drained.
    Drained,
    /// The client is already being moved, or it is asleep and its list of past GPU moves is full.
    Moving,
    /// It cannot sleep.
    Sleep(SleepObstacle),
    /// It was resumed before it slept.
    Resumed,
    /// It could not be restored on the other GPU, and is moved back.
    Failed,
}

/// A client's progress on its way off its GPUs, or back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SleepPhase {
    Awake,
    /// It evicts its memory, and stops entering the driver.
    Preparing,
    Checkpointing,
    Asleep,
    /// It waits for room on its GPUs.
    Waking,
    Restoring,
    /// Whether it runs is being determined.
    Settling,
    /// It never runs again.
    Lost,
}

/// The known state of a client's sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SleepView {
    pub phase: SleepPhase,
    /// It is held off its GPUs until it is resumed, asleep or not.
    pub paused: bool,
    /// It should be off its GPUs because one of them is drained.
    pub drained: bool,
    /// Why it could not sleep at the last attempt.
    pub obstacle: Option<SleepObstacle>,
    /// It is on its way to another GPU.
    pub moving: Option<Move>,
    /// Its last wake, if it has slept.
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
    /// One of its threads called the driver.
    Call,
    Resumed,
}
