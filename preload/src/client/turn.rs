//! One GPU lock as this client has it, step by step: holding, giving it back early, draining after a revoke.
//!
//! Only the client's thread runs this. Nothing waits: each step looks, and says when to look again.

use crate::{
    client::utilization::Utilization,
    connection,
    env::trace::trace,
    gate::closed,
    gpu::Gpu,
    sys::time::Instant,
    work::{Fence, capture},
};
use core::time::Duration;
use nvshare_idle_gap::IdleGapPredictor;
use nvshare_wire::{ClientMessage, client::ReleaseReason, client::StuckReason};

/// Between looks at a GPU that is finishing its work.
const POLL_INTERVAL: Duration = Duration::from_micros(100);
/// Between attempts to send to a scheduler that does not read.
const SEND_RETRY: Duration = Duration::from_millis(2);
/// How long a drain may make no progress while threads wait at the gate, before copies and flags are let through, which
/// it may need: that gives the GPU hardly more to do.
const HELP_AFTER: Duration = Duration::from_millis(200);
/// How long then before kernels are: at least this, and as a multiple of how long submitted work took lately.
const OPEN_AFTER: Duration = Duration::from_millis(500);
const OPEN_AFTER_WORK: u32 = 3;
const OPEN_AT_LAST: Duration = Duration::from_secs(3);
/// At least so long for a client that never needed it yet: rather a longer kernel than any before.
const OPEN_FIRST: Duration = Duration::from_secs(2);
/// After how long a drain without progress is reported although nobody waits at the gate.
const LONG: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Turn {
    state: State,
    /// When the turn began, and the count of submissions then.
    began: (Instant, u64),
    /// How long a drain stands still, after help, before it is given up.
    stall_timeout: StallTimeout,
    utilization: Utilization,
    idle_gaps: IdleGapPredictor,
    /// Since when it has had no work, if it gave the lock back for that.
    idle_since: Option<Instant>,
}

/// The least for this client.
#[derive(Debug, Clone, Copy)]
struct StallTimeout(Duration);

impl StallTimeout {
    fn on(self, gpu: &Gpu) -> Duration {
        let work = gpu.work.slowest().unwrap_or_default();
        (work * OPEN_AFTER_WORK).clamp(self.0, OPEN_AT_LAST)
    }
}

#[derive(Debug)]
enum State {
    /// No lock. The gate is closed, and nothing runs.
    Over,
    /// The lock is here (or there is no scheduler); `contended`: somebody waits for it.
    Holding { contended: Option<Contended> },
    /// The gate is closed, and what was submitted is finishing.
    Draining(Drain),
    /// Everything is done, but the release could not be sent yet.
    Releasing(ReleaseReason),
}

/// The holder looks for a moment to give the lock back early.
#[derive(Debug)]
struct Contended {
    /// What a hand-over costs.
    grace: Duration,
    /// The count of submissions when it was last looked at.
    count: u64,
    /// Behind those submissions.
    fence: Option<Fence>,
    /// Since when they have been done, and how long the lock is kept from then on.
    idle_since: Option<Instant>,
    idle_timeout: Duration,
}

#[derive(Debug)]
struct Drain {
    why: ReleaseReason,
    /// The gate lets work through that is no kernel: what runs may need it in order to end.
    helped: bool,
    fence: Option<Fence>,
    /// How many marks were done, and since when it has been that many.
    progress: (u64, Instant),
    reported: bool,
}

impl Default for Turn {
    fn default() -> Self {
        Self {
            state: State::Over,
            began: (Instant::now(), 0),
            stall_timeout: StallTimeout(OPEN_FIRST),
            utilization: Utilization::new(),
            idle_gaps: IdleGapPredictor::default(),
            idle_since: None,
        }
    }
}

impl Turn {
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Granted.
    pub fn begin(&mut self, gpu: &Gpu) {
        if let Some(since) = self.idle_since.take() {
            self.idle_gaps.record(gpu.requested_at().saturating_sub(since.since_start()));
        }
        gpu.request_is_over();
        gpu.set_drained(false);
        gpu.work.set_contended(false);
        gpu.close_if_lacking();
        self.began = (Instant::now(), gpu.submitted());
        self.utilization = Utilization::new();
        self.state = State::Holding { contended: None };
        gpu.gate.open(closed::LOCK | closed::KERNELS);
    }

    /// There is no scheduler, or none any more.
    pub fn run_ungated(&mut self, gpu: &Gpu) {
        if !matches!(self.state, State::Holding { .. }) {
            self.begin(gpu);
        }
        self.contend(gpu, None);
    }

    /// Somebody waits for the lock, with how long this client may be idle before it gives it back; or nobody does.
    pub fn contend(&mut self, gpu: &Gpu, grace: Option<Duration>) {
        gpu.work.set_contended(grace.is_some());
        if let State::Holding { contended } = &mut self.state {
            match (grace, contended) {
                (Some(grace), Some(contended)) => contended.grace = grace,
                (grace, contended) => *contended = grace.map(Contended::new),
            }
        }
    }

    pub fn revoke(&mut self, gpu: &Gpu) {
        if matches!(self.state, State::Holding { .. }) {
            self.drain(gpu, ReleaseReason::Revoked);
        }
    }

    pub fn is_held(&self) -> bool {
        matches!(self.state, State::Holding { .. })
    }

    /// Whether the scheduler that gave the lock has not been given it back.
    pub fn has_lock(&self) -> bool {
        match &self.state {
            State::Over => false,
            State::Holding { .. } => true,
            State::Draining(Drain { why, .. }) | State::Releasing(why) => *why != ReleaseReason::Gone,
        }
    }

    /// Gives the lock back without having been asked: it is of no use alone.
    pub fn release_early(&mut self, gpu: &Gpu) {
        if self.is_held() {
            self.drain(gpu, ReleaseReason::Idle);
        }
    }

    /// Memory that should have come back found no room: lets others go first.
    pub fn no_memory(&mut self, gpu: &Gpu) {
        if matches!(self.state, State::Holding { .. }) && connection::is_connected() {
            self.drain(gpu, ReleaseReason::NoMemory);
        }
    }

    /// A new scheduler knows of no turn: ends this one without a word.
    pub fn abandon(&mut self, gpu: &Gpu) {
        if matches!(self.state, State::Draining(Drain { why: ReleaseReason::Gone, .. })) {
            return;
        }
        if !gpu.gate.is_closed_for(closed::LOCK) || !self.is_over() {
            self.drain(gpu, ReleaseReason::Gone);
        }
    }

    fn drain(&mut self, gpu: &Gpu, why: ReleaseReason) {
        gpu.gate.close(closed::LOCK);
        if let State::Holding { contended: Some(contended) } = &self.state {
            // A pause that is cut short is known by when there is work again, as any other.
            self.idle_since = contended.idle_since.filter(|_| contended.saw_all(gpu));
        }
        gpu.gate.open(closed::KERNELS);
        gpu.set_drained(false); // without a scheduler no turn began
        let progress = (gpu.work.progress(), Instant::now());
        self.state = State::Draining(Drain { why, helped: false, fence: None, progress, reported: false });
    }

    /// Looks at how things stand; says after how long to look again.
    pub fn step(&mut self, gpu: &Gpu) -> Duration {
        match &mut self.state {
            State::Over => {
                if gpu.gate.waiting() > 0 && !gpu.is_requested() && connection::is_connected() {
                    gpu.request();
                }
                Duration::MAX
            }
            State::Holding { contended: None } => Duration::MAX,
            State::Holding { contended: Some(contended) } => match contended.look(gpu, &mut self.idle_gaps) {
                Look::Again(after) => after.min(self.utilization.step(gpu)),
                Look::Idle => {
                    gpu.gate.close(closed::LOCK);
                    // A thread may have slipped in before the gate closed.
                    if contended.saw_all(gpu) {
                        self.idle_since = contended.idle_since;
                        self.release(gpu, ReleaseReason::Idle)
                    } else {
                        // A request that was sent meanwhile says nothing new to the scheduler, so it is forgotten there.
                        gpu.request_is_over();
                        gpu.gate.open(closed::LOCK);
                        POLL_INTERVAL
                    }
                }
            },
            State::Draining(drain) => match drain.look(gpu, self.stall_timeout) {
                Drained::NotYet => POLL_INTERVAL,
                Drained::Done(why) => self.release(gpu, why),
                Drained::NeedsHost => {
                    trace!("GPU {}: the drain stands still while threads wait: opening again", gpu.index);
                    self.stall_timeout = StallTimeout(OPEN_AFTER);
                    // From here on the first moment without work is one to give the lock back in.
                    self.state = State::Holding { contended: Some(Contended::new(Duration::ZERO)) };
                    gpu.gate.open(closed::LOCK | closed::KERNELS);
                    gpu.request_is_over();
                    // Which also takes back what threads asked for: they go on.
                    connection::send(&ClientMessage::Stuck { gpus: 1 << gpu.index, reason: StuckReason::NeedsHost });
                    POLL_INTERVAL
                }
            },
            State::Releasing(why) => {
                let why = *why;
                self.release(gpu, why)
            }
        }
    }

    /// Everything is done: gives the lock back, and asks again where threads wait.
    fn release(&mut self, gpu: &Gpu, reason: ReleaseReason) -> Duration {
        gpu.set_drained(true);
        let (began, count) = self.began;
        let busy_us = began.elapsed().as_micros() as u64;
        let message = ClientMessage::Release { gpus: 1 << gpu.index, reason, busy_us };
        // `Gone` is between this client and a scheduler that is no more.
        if reason != ReleaseReason::Gone && connection::is_connected() && !connection::send(&message) {
            self.state = State::Releasing(reason);
            return SEND_RETRY;
        }
        gpu.turn_is_over(gpu.submitted() != count);
        self.state = State::Over;
        // A request that was made during this turn was not one to the scheduler, so whoever waits asks anew: the thread
        // itself, if it is awake and sees that there is none, or this one for it.
        gpu.request_is_over();
        if gpu.gate.waiting() > 0 {
            gpu.request();
        }
        Duration::ZERO
    }
}

enum Look {
    Again(Duration),
    Idle,
}

impl Contended {
    fn new(grace: Duration) -> Self {
        Self { grace, count: u64::MAX, fence: None, idle_since: None, idle_timeout: grace }
    }

    /// Whether nothing was submitted since it was last looked at.
    fn saw_all(&self, gpu: &Gpu) -> bool {
        gpu.is_quiet() && gpu.submitted() == self.count
    }

    /// Whether nothing has been running for so long that nothing will for long, and nothing waits to run.
    fn look(&mut self, gpu: &Gpu, idle_gaps: &mut IdleGapPredictor) -> Look {
        let count = gpu.submitted();
        if count != self.count || !gpu.is_quiet() || gpu.waiting() > 0 {
            self.count = count;
            if let Some(since) = self.idle_since.take() {
                idle_gaps.record(since.elapsed());
            }
            self.fence = None;
            return Look::Again((self.grace / 4).clamp(POLL_INTERVAL, 5 * POLL_INTERVAL));
        }
        if self.idle_since.is_none() {
            let Some(fence) = self.fence.take().or_else(|| gpu.work.fence()) else {
                return Look::Again(10 * POLL_INTERVAL);
            };
            let fence = self.fence.insert(fence);
            if !gpu.work.is_done(fence) {
                return Look::Again(POLL_INTERVAL);
            }
            (self.idle_since, self.idle_timeout) = (Some(Instant::now()), idle_gaps.timeout(self.grace));
        }
        let idle = self.idle_since.map_or(Duration::ZERO, |since| since.elapsed());
        if idle >= self.idle_timeout {
            Look::Idle
        } else {
            Look::Again((self.idle_timeout - idle).min(5 * POLL_INTERVAL))
        }
    }
}

enum Drained {
    NotYet,
    NeedsHost,
    Done(ReleaseReason),
}

impl Drain {
    fn look(&mut self, gpu: &Gpu, stall_timeout: StallTimeout) -> Drained {
        if gpu.is_quiet()
            && let Some(fence) = self.fence.take().or_else(|| gpu.work.fence())
        {
            let fence = self.fence.insert(fence);
            if gpu.work.is_done(fence) {
                if !core::mem::take(&mut self.helped) {
                    return Drained::Done(self.why);
                }
                // Threads got through meanwhile; behind them comes another fence, and nobody else.
                gpu.gate.close(closed::LOCK);
                gpu.gate.open(closed::KERNELS);
                self.fence = None;
                self.progress.1 = Instant::now();
                return Drained::NotYet;
            }
        }
        let done = gpu.work.progress();
        if done != self.progress.0 {
            self.progress = (done, Instant::now());
        }
        let standing = self.progress.1.elapsed();
        let timeout = if self.helped { stall_timeout.on(gpu) } else { HELP_AFTER };
        if standing >= timeout && gpu.has_work_waiting() {
            if self.helped {
                return Drained::NeedsHost;
            }
            trace!("GPU {}: the drain stands still while threads wait: opening for copies and flags", gpu.index);
            self.helped = true;
            self.progress.1 = Instant::now();
            gpu.gate.close(closed::KERNELS);
            gpu.gate.open(closed::LOCK);
        }
        if standing >= LONG && !self.reported {
            self.reported = true;
            let reason = if capture::any() { StuckReason::Capturing } else { StuckReason::LongWork };
            connection::send(&ClientMessage::Stuck { gpus: 1 << gpu.index, reason });
        }
        Drained::NotYet
    }
}
