//! A simulated client's work, and how well its library behaves.

use crate::*;

/// Work that never ends.
pub const ENDLESS: Duration = Duration::from_secs(1 << 20);

/// A program's work, and how well its library behaves.
#[derive(Debug, Clone)]
pub struct Plan {
    pub gpus: GpuSet,
    pub gang: u64,
    /// The job, or 0. The work of a job's clients runs only together: each spins until the others are there, and cannot
    /// drain until then.
    pub job: u64,
    pub tenant: TenantId,
    /// The group that it counts with, and the group's limits.
    pub group: Option<Group>,
    /// Its own limits.
    pub own: EnvLimits,
    /// How full it keeps a GPU, in thousandths, if it reports that.
    pub fullness: Option<u32>,
    pub engine: Engine,
    pub demand: u64,
    /// Bytes that it allocates in addition at the beginning of each phase.
    pub growth: u64,
    pub pinned: u64,
    /// When it starts.
    pub start: Time,
    pub phases: u32,
    /// Time without GPU work before each phase, and time with.
    pub cpu: Duration,
    pub gpu: Duration,
    /// How long submitted work runs on after a revoke. A client whose work takes long reports that once, as the library
    /// does.
    pub drain: Duration,
    /// Its work never ends, and it never releases the lock. The world doesn't wait for it.
    pub endless: bool,
    /// Bytes per second that it can evict.
    pub rate: u64,
    /// How often it answers a revoke with Stuck and continues its work.
    pub stuck: u32,
    /// When it is stopped, and continued.
    pub stopped: Option<(Time, Time)>,
    /// When it is killed.
    pub killed: Option<Time>,
    pub lie: Option<Lie>,
    /// Exits when its phases are done, instead of staying idle with its memory.
    pub leaves: bool,
}

/// The bytes that a client reports as freed whenever it evicts, and keeps: for the time `late`, or until it may have them
/// again.
#[derive(Debug, Clone, Copy)]
pub struct Lie {
    pub bytes: u64,
    pub late: Option<Duration>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            gpus: gpus([0]),
            gang: 0,
            job: 0,
            tenant: TenantId(0),
            group: None,
            own: EnvLimits::default(),
            fullness: None,
            engine: Engine::Swap,
            demand: GIB,
            growth: 0,
            pinned: 0,
            start: Time::ZERO,
            phases: 1,
            cpu: Duration::ZERO,
            gpu: ms(100),
            drain: Duration::ZERO,
            endless: false,
            rate: 40 * GIB,
            stuck: 0,
            stopped: None,
            killed: None,
            lie: None,
            leaves: true,
        }
    }
}
