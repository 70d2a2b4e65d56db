//! One GPU lock as this client has it, step by step: holding, giving it back early, draining after a revoke.
//!
//! Only the link's thread is here. Nothing waits: each step looks, and says when to look again.

use crate::{
    client,
    gate::{Gate, closed},
    gpu::Gpu,
    sys::time::Instant,
    trace::trace,
    work::Fence,
};
use core::time::Duration;
use nvshare_wire::{ClientMessage, client::ReleaseReason, client::StuckReason};

/// Between looks at a GPU that is finishing its work.
const LOOK: Duration = Duration::from_micros(100);
/// How long a drain may make no progress while threads wait at the gate, at first; doubled each time.
const FIRST_PATIENCE: Duration = Duration::from_millis(500);
const MOST_PATIENCE: Duration = Duration::from_secs(16);
/// After how long a drain without progress is reported although nobody waits at the gate.
const LONG: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Turn {
    state: State,
    /// How long a drain may stand still before the gate opens again.
    patience: Duration,
    /// When the turn began, and the count of submissions then.
    began: (Instant, u64),
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
    grace: Duration,
    /// The count of submissions when it was last looked at.
    count: u64,
    /// Behind those submissions.
    fence: Option<Fence>,
    /// Since when they have been done.
    idle_since: Option<Instant>,
}

#[derive(Debug)]
struct Drain {
    why: ReleaseReason,
    fence: Option<Fence>,
    /// How many marks were done, and since when it has been that many.
    progress: (u64, Instant),
    reported: bool,
}

impl Default for Turn {
    fn default() -> Self {
        Self { state: State::Over, patience: FIRST_PATIENCE, began: (Instant::now(), 0) }
    }
}

impl Turn {
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Granted.
    pub fn begin(&mut self, gpu: &Gpu) {
        gpu.request_is_over();
        gpu.set_drained(false);
        gpu.work.contend(false);
        gpu.close_if_lacking();
        self.began = (Instant::now(), gpu.submitted());
        self.state = State::Holding { contended: None };
        gpu.gate.open(closed::LOCK);
    }

    /// There is no scheduler, or none any more.
    pub fn run_free(&mut self, gpu: &Gpu) {
        if !matches!(self.state, State::Holding { .. }) {
            self.begin(gpu);
        }
        self.contend(gpu, None);
    }

    /// Somebody waits for the lock, with how long this client may be idle before it gives it back; or nobody does.
    pub fn contend(&mut self, gpu: &Gpu, grace: Option<Duration>) {
        gpu.work.contend(grace.is_some());
        if let State::Holding { contended } = &mut self.state {
            match (grace, contended) {
                (Some(grace), Some(contended)) => contended.grace = grace,
                (grace, contended) => {
                    *contended = grace.map(|grace| Contended { grace, count: u64::MAX, fence: None, idle_since: None })
                }
            }
        }
    }

    pub fn revoke(&mut self, gpu: &Gpu) {
        if matches!(self.state, State::Holding { .. }) {
            self.drain(gpu, ReleaseReason::Revoked);
        }
    }

    /// Memory that should have come back found no room: lets others go first.
    pub fn no_memory(&mut self, gpu: &Gpu) {
        if matches!(self.state, State::Holding { .. }) && client::is_connected() {
            self.drain(gpu, ReleaseReason::NoMemory);
        }
    }

    /// A new scheduler knows of no turn: ends this one without a word.
    pub fn lay_down(&mut self, gpu: &Gpu) {
        if !gpu.gate.is_closed_for(closed::LOCK) || !self.is_over() {
            self.drain(gpu, ReleaseReason::Gone);
        }
    }

    fn drain(&mut self, gpu: &Gpu, why: ReleaseReason) {
        gpu.gate.close(closed::LOCK);
        gpu.set_drained(false); // without a scheduler no turn began
        let progress = (gpu.work.progress(), Instant::now());
        self.forget_fence(gpu);
        self.state = State::Draining(Drain { why, fence: None, progress, reported: false });
    }

    fn forget_fence(&mut self, gpu: &Gpu) {
        let fence = match &mut self.state {
            State::Holding { contended: Some(contended) } => contended.fence.take(),
            State::Draining(drain) => drain.fence.take(),
            _ => None,
        };
        fence.into_iter().for_each(|f| gpu.work.forget(f));
    }

    /// Looks at how things stand; says after how long to look again.
    pub fn step(&mut self, gpu: &Gpu) -> Duration {
        match &mut self.state {
            State::Over => {
                if gpu.gate.waiting() > 0 && !gpu.is_requested() && client::is_connected() {
                    gpu.request();
                }
                Duration::MAX
            }
            State::Holding { contended: None } => Duration::MAX,
            State::Holding { contended: Some(contended) } => match contended.look(gpu) {
                Look::Again(after) => after,
                Look::Idle => {
                    gpu.gate.close(closed::LOCK);
                    // A thread may have slipped in before the gate closed.
                    if Gate::is_quiet(gpu.index) && gpu.submitted() == contended.count {
                        self.release(gpu, ReleaseReason::Idle)
                    } else {
                        // A request that was sent meanwhile says nothing new to the scheduler, so it is forgotten there.
                        gpu.request_is_over();
                        gpu.gate.open(closed::LOCK);
                        LOOK
                    }
                }
            },
            State::Draining(drain) => match drain.look(gpu, self.patience) {
                Drained::NotYet => LOOK,
                Drained::Done(why) => {
                    self.patience = FIRST_PATIENCE;
                    self.release(gpu, why)
                }
                Drained::NeedsHost => {
                    trace!("GPU {}: the drain stands still while threads wait: opening again", gpu.index);
                    self.patience = (self.patience * 2).min(MOST_PATIENCE);
                    self.forget_fence(gpu);
                    client::send(&ClientMessage::Stuck { gpus: 1 << gpu.index, reason: StuckReason::NeedsHost });
                    self.state = State::Holding { contended: None };
                    gpu.request_is_over();
                    gpu.gate.open(closed::LOCK);
                    LOOK
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
        self.forget_fence(gpu);
        let (began, count) = self.began;
        let busy_us = began.elapsed().as_micros() as u64;
        let message = ClientMessage::Release { gpus: 1 << gpu.index, reason, busy_us };
        // `Gone` is between this client and a scheduler that is no more.
        if reason != ReleaseReason::Gone && client::is_connected() && !client::send(&message) {
            self.state = State::Releasing(reason);
            return LOOK;
        }
        gpu.turn_is_over(gpu.submitted() != count);
        self.state = State::Over;
        if gpu.gate.waiting() > 0 {
            gpu.request_is_over();
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
    /// Whether nothing has been running for as long as the grace, and nothing waits to run.
    fn look(&mut self, gpu: &Gpu) -> Look {
        let count = gpu.submitted();
        if count != self.count || !Gate::is_quiet(gpu.index) || gpu.gate.waiting() > 0 {
            self.count = count;
            self.idle_since = None;
            self.fence.take().into_iter().for_each(|f| gpu.work.forget(f));
            return Look::Again((self.grace / 4).clamp(LOOK, 5 * LOOK));
        }
        if self.idle_since.is_none() {
            let Some(fence) = self.fence.take().or_else(|| gpu.work.fence()) else { return Look::Again(10 * LOOK) };
            let fence = self.fence.insert(fence);
            if !gpu.work.is_done(fence) {
                return Look::Again(LOOK);
            }
            self.idle_since = Some(Instant::now());
        }
        let idle = self.idle_since.map_or(Duration::ZERO, |since| since.elapsed());
        if idle >= self.grace { Look::Idle } else { Look::Again((self.grace - idle).min(5 * LOOK)) }
    }
}

enum Drained {
    NotYet,
    NeedsHost,
    Done(ReleaseReason),
}

impl Drain {
    fn look(&mut self, gpu: &Gpu, patience: Duration) -> Drained {
        if Gate::is_quiet(gpu.index)
            && let Some(fence) = self.fence.take().or_else(|| gpu.work.fence())
        {
            let fence = self.fence.insert(fence);
            if gpu.work.is_done(fence) {
                return Drained::Done(self.why);
            }
        }
        let done = gpu.work.progress();
        if done != self.progress.0 {
            self.progress = (done, Instant::now());
        }
        let standing = self.progress.1.elapsed();
        if standing >= patience && gpu.gate.waiting() > 0 {
            return Drained::NeedsHost;
        }
        if standing >= LONG && !self.reported {
            self.reported = true;
            let reason = if crate::capture::any() { StuckReason::Capturing } else { StuckReason::LongWork };
            client::send(&ClientMessage::Stuck { gpus: 1 << gpu.index, reason });
        }
        Drained::NotYet
    }
}
