//! What a simulated client does, and how well its library behaves.

use crate::*;

/// Work that never ends.
pub const ENDLESS: Duration = Duration::from_secs(1 << 20);

/// What a program does, and how well its library behaves.
#[derive(Debug, Clone)]
pub struct Plan {
    pub gpus: GpuSet,
    pub gang: u64,
    /// Its work and that of all others of this job, where it is not 0, run only together: each spins until the others are
    /// there, and cannot drain meanwhile.
    pub job: u64,
    pub tenant: TenantId,
    /// What it counts with others for, and how much that may be.
    pub group: Option<Group>,
    /// What it says of itself.
    pub own: EnvLimits,
    /// How full it keeps a GPU, in thousandths, if it says so.
    pub fullness: Option<u32>,
    pub engine: Engine,
    pub demand: u64,
    /// What it allocates besides at the beginning of each phase.
    pub growth: u64,
    pub pinned: u64,
    /// When it starts.
    pub start: Time,
    pub phases: u32,
    /// Without GPU work before each phase, and with.
    pub cpu: Duration,
    pub gpu: Duration,
    /// For so long submitted work runs on after a revoke. One that takes long says so once, as the library does.
    pub drain: Duration,
    /// Its work never ends, and it never releases. The world does not wait for it.
    pub endless: bool,
    /// Bytes a second that it can evict.
    pub rate: u64,
    /// How often it answers a revoke with Stuck and works on.
    pub stuck: u32,
    /// Stopped from then to then.
    pub stopped: Option<(Time, Time)>,
    /// Killed then.
    pub killed: Option<Time>,
    pub lie: Option<Lie>,
    /// Leaves when its phases are done, and does not stay idle with its memory.
    pub leaves: bool,
}

/// So many bytes it reports as freed whenever it evicts, and keeps: for so long, or until it may have them again.
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
