//! The work of a simulated client, and the behaviour of its library.

use crate::*;

/// Work that never ends.
pub const ENDLESS: Duration = Duration::from_secs(1 << 20);

/// The work of a program, and the behaviour of its library.
#[derive(Debug, Clone)]
pub struct Plan {
    pub gpus: GpuSet,
    pub gang: u64,
    /// The job, or 0. The work of a job's clients runs only together: each client's work spins
    /// until the work of all other clients has started. Until then the client cannot drain.
    pub job: u64,
    pub tenant: TenantId,
    /// The client's group with its limits.
    pub group: Option<Group>,
    /// The client's own limits.
    pub own: EnvLimits,
    /// How full the client keeps a GPU, in thousandths, if the client reports that.
    pub fullness: Option<u32>,
    pub engine: Engine,
    pub demand: u64,
    /// Bytes that the client allocates in addition at the start of each phase.
    pub growth: u64,
    pub pinned: u64,
    /// The start time.
    pub start: Time,
    pub phases: u32,
    /// The time without GPU work before each phase, and the time of the phase's GPU work.
    pub cpu: Duration,
    pub gpu: Duration,
    /// The time for which submitted work continues after a revoke. If that time is long, the client
    /// reports it once, like the library.
    pub drain: Duration,
    /// The client's work never ends, and the client never releases the lock. The world doesn't wait
    /// for this client to finish.
    pub endless: bool,
    /// Bytes per second that the client can evict.
    pub rate: u64,
    /// The number of revokes that the client answers with `Stuck` while it continues its work.
    pub stuck: u32,
    /// The times at which the client is stopped and continued.
    pub stopped: Option<(Time, Time)>,
    /// The time at which the client is killed.
    pub killed: Option<Time>,
    pub lie: Option<Lie>,
    /// The client exits when its phases are done. Otherwise it stays idle and keeps its memory.
    pub leaves: bool,
}

/// The bytes that a client reports as freed at each eviction but keeps. The client keeps these
/// bytes for the time `late`, or until an allowance covers them again.
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
