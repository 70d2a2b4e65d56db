//! The mover: brings memory to where the scheduler wants it, chunk by chunk off the GPU and back to the same addresses.
//!
//! Nothing waits for a copy. Each step starts what it can and completes what has arrived, so that messages are read between
//! steps and new allowances are used as they come. (Steps do wait for fingerprints, which takes milliseconds.) Many copies are
//! in flight at once, and the account is reported after each, so that other clients can use freed bytes while the rest still
//! leaves. The space is locked only between driver calls, never during one.
//!
//! Chunks that need no copy are not copied, see [`fingerprint`](super::fingerprint).
//!
//! What it needs in a context is made when the program creates that, by the program's thread ([`Mover::make_ready`]). What a
//! driver does for the first time may take long, and may need the loader's lock, while an eviction has others wait.
//!
//! - `evict`, `restore`: the two directions. `transfer`: copies in flight. `staging`: host buffers for evictions.

mod evict;
mod restore;
mod staging;
mod transfer;

use crate::{
    driver::{
        context::{is_dead_in, with_current},
        types::*,
    },
    env::trace::trace,
    memory::{
        account::Account,
        chunk::Leaving,
        space::Space,
        staging::{StagingAllocator, workers_have_ended},
    },
    sys::{
        sync::Mutex,
        time::{self, Instant},
    },
};
use alloc::{collections::VecDeque, vec::Vec};
use core::time::Duration;
use transfer::{CopyContext, Transfer};

/// The interval between looks at copies in flight: an eighth of the time that one chunk takes.
const POLL_INTERVAL: Duration = Duration::from_micros(150);

const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// After this time without a move, the kernel may page out the host buffers, and free ones are released.
const REST: Duration = Duration::from_secs(180);

/// The number of buffers that are tidied up at a time.
const TIDY_BATCH: usize = 4;

/// Where memory should go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// Off the GPU, until at most `target` bytes are mapped. No work of this client may run or start: its gate is closed.
    Evict { target: u64 },
    /// Onto the GPU, as far as the allowance permits.
    Restore,
    /// Nowhere. Transfers in flight are completed.
    Idle,
}

/// The outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Transfers are in flight: take the next step after this time.
    Busy(Duration),
    /// Nothing is in flight, and nothing more can be done. `moved`: something has moved since the last time.
    Done {
        moved: bool,
    },
    Stopped(Stop),
}

/// The reason why a move ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The host has no room: the rest stays on the GPU.
    HostFull,
    /// The GPU has no room although the allowance does.
    GpuFull,
    /// No context works any more.
    Broken,
}

/// Moves the chunks of one GPU.
#[derive(Debug)]
pub struct Mover {
    /// The contexts in which it can work. It works in the first.
    ready: Vec<CopyContext>,
    /// Contexts that have failed.
    broken: Vec<usize>,
    transfers: VecDeque<Transfer>,
    /// The chunks that leave next.
    plan: VecDeque<Leaving>,
    /// Chunks that may come back next: base, offset and length.
    lacking: VecDeque<(u64, u64, u64)>,
    staging: Option<StagingAllocator>,
    /// The buffers being allocated are for a later eviction.
    preparing: bool,
    /// Since when the GPU has had no room although the allowance does.
    full_since: Option<Instant>,
    /// A chunk that came back could not be mapped at all its aliases.
    refused: bool,
    /// When something last moved, until host memory has been tidied up since.
    untidy_since: Option<Instant>,
    /// Counts for the trace.
    stats: Stats,
}

// SAFETY: its pointers are the driver's handles, which any thread may use.
unsafe impl Send for Mover {}

#[derive(Debug, Default)]
struct Stats {
    since: Option<Instant>,
    out: u64,
    back: u64,
    /// Of both, the bytes that were not copied.
    uncopied: u64,
}

impl Mover {
    pub const fn new() -> Self {
        Self {
            ready: Vec::new(),
            broken: Vec::new(),
            transfers: VecDeque::new(),
            plan: VecDeque::new(),
            lacking: VecDeque::new(),
            staging: None,
            preparing: false,
            full_since: None,
            refused: false,
            untidy_since: None,
            stats: Stats { since: None, out: 0, back: 0, uncopied: 0 },
        }
    }

    /// Does what can be done now, in one of these contexts.
    pub fn step(
        &mut self,
        space: &Mutex<Space>,
        contexts: &[CUcontext],
        goal: Goal,
        report: &dyn Fn(&Account),
    ) -> Step {
        if goal == Goal::Idle && self.is_idle() {
            return Step::Done { moved: false };
        }
        self.broken.retain(|context| contexts.contains(&(*context as CUcontext)));
        loop {
            let context = match self.settle(contexts) {
                Ok(context) => context,
                Err(stop) => {
                    self.end(space, goal);
                    // Nothing is under way any more but buffers that were to be copied to.
                    return match self.stop_staging(space) {
                        false => Step::Busy(RETRY_INTERVAL),
                        true if goal == Goal::Idle => Step::Done { moved: false },
                        true => Step::Stopped(stop),
                    };
                }
            };
            let step = match with_current(context, || self.step_here(space, goal, report)) {
                Ok(step) => step,
                Err(error) if is_dead_in(context, error) => Step::Stopped(Stop::Broken),
                Err(_) => return Step::Busy(RETRY_INTERVAL), // only that call has failed
            };
            match step {
                Step::Stopped(Stop::Broken) => {
                    // Chunks in flight have lost their contents. The program's own next call returns the error.
                    self.complete_all(space, report);
                    self.ready.retain(|ready| ready.context != context);
                    self.broken.push(context);
                }
                Step::Busy(after) => return Step::Busy(after),
                Step::Done { .. } => return Step::Done { moved: self.end(space, goal) },
                Step::Stopped(stop) => {
                    self.end(space, goal);
                    return Step::Stopped(stop);
                }
            }
        }
    }

    /// Whether nothing is under way, so that only a new goal makes work.
    pub fn is_idle(&self) -> bool {
        self.transfers.is_empty() && self.plan.is_empty() && self.staging.is_none()
    }

    /// The context in which it works.
    pub fn context(&self) -> Option<CUcontext> {
        self.ready.first().map(|ready| ready.context as CUcontext)
    }

    /// Tidies up host memory when nothing has moved for a while, or at once if the host lacks memory. Returns when to call again.
    pub fn tidy(&mut self, space: &Mutex<Space>, is_host_short: bool) -> Duration {
        let (Some(since), Some(context)) = (self.untidy_since, self.context()) else { return Duration::MAX };
        let rest = since.elapsed();
        if rest < REST && !is_host_short {
            return REST - rest;
        }
        let spare = space.lock().take_free_buffers(TIDY_BATCH);
        let more = with_current(context as usize, || {
            let mut tidied = spare.len();
            drop(spare);
            let mut guard = space.lock();
            let registered = guard.buffers().filter(|buffer| buffer.is_registered()).take(TIDY_BATCH - tidied);
            registered.for_each(|buffer| {
                buffer.unregister();
                tidied += 1;
            });
            tidied > 0
        });
        if more == Ok(true) {
            return RETRY_INTERVAL;
        }
        trace!("idle host memory may be paged out");
        self.untidy_since = None;
        Duration::MAX
    }

    /// Makes all that moving memory needs in a new context, so that an eviction finds everything loaded and allocated. Nothing
    /// works in the context yet: loading code may wait for running work, which may wait for the calling thread. That work has
    /// ended in an eviction, too, so the kernel for which there is no memory now is loaded then.
    pub fn make_ready(&mut self, context: CUcontext, copies: bool) {
        let context = context as usize;
        if self.ready.iter().any(|ready| ready.context == context) {
            return;
        }
        let made = with_current(context, || {
            let mut ready = CopyContext::new(context)?;
            if copies {
                ready.load_kernel();
            }
            Ok(ready)
        });
        self.ready.extend(made.flatten());
    }

    /// Chooses one of these contexts to work in, unless there is one, and returns it. Best done early, while there is memory
    /// for it.
    pub fn settle(&mut self, contexts: &[CUcontext]) -> Result<usize, Stop> {
        if let Some(ready) = self.ready.first() {
            return Ok(ready.context);
        }
        let mut stop = Stop::Broken;
        for context in contexts.iter().map(|c| *c as usize).filter(|c| !self.broken.contains(c)) {
            match with_current(context, || CopyContext::new(context)).flatten() {
                Ok(ready) => {
                    self.ready.push(ready);
                    return Ok(context);
                }
                Err(error) if is_dead_in(context, error) => {}
                Err(_) => stop = Stop::GpuFull,
            }
        }
        Err(stop)
    }

    /// Stops using a context that is about to be destroyed.
    pub fn leave(&mut self, context: CUcontext, space: &Mutex<Space>, report: &dyn Fn(&Account)) {
        // Buffers are registered with the mover's context, or with an earlier one that has failed, and threads that have not begun to
        // allocate will make it current.
        while !self.stop_staging(space) || !workers_have_ended() {
            time::sleep(RETRY_INTERVAL);
        }
        let is_used = self.context() == Some(context);
        let Some(at) = self.ready.iter().position(|ready| ready.context == context as usize) else { return };
        let _ = with_current(context as usize, || {
            if is_used {
                self.complete_all(space, report);
            }
            self.ready.remove(at).close();
        });
        self.ready.retain(|ready| ready.context != context as usize);
        if is_used {
            self.unplan(space);
        }
    }

    /// Completes or undoes everything that is under way.
    pub fn rest(&mut self, space: &Mutex<Space>, report: &dyn Fn(&Account)) {
        if let (false, Some(context)) = (self.transfers.is_empty(), self.context()) {
            let _ = with_current(context as usize, || self.complete_all(space, report));
        }
        self.unplan(space);
    }

    fn step_here(&mut self, space: &Mutex<Space>, goal: Goal, report: &dyn Fn(&Account)) -> Step {
        self.stats.since.get_or_insert_with(Instant::now);
        self.complete(space, report);
        if !matches!(goal, Goal::Evict { .. }) {
            // The program may write to its memory from here on.
            self.unplan(space);
            if !self.collect_staging(space) && self.transfers.is_empty() && goal == Goal::Idle {
                return Step::Busy(RETRY_INTERVAL);
            }
        }
        let more = match goal {
            Goal::Evict { target } => self.evict_some(space, target, report),
            Goal::Restore => self.restore_some(space),
            Goal::Idle => Ok(None),
        };
        match more {
            Err(Stop::Broken) => Step::Stopped(Stop::Broken),
            _ if !self.transfers.is_empty() => Step::Busy(POLL_INTERVAL),
            Ok(None) => Step::Done { moved: false },
            Ok(Some(after)) => Step::Busy(after),
            Err(stop) => Step::Stopped(stop),
        }
    }

    /// Ends a move. Returns whether anything moved.
    fn end(&mut self, space: &Mutex<Space>, goal: Goal) -> bool {
        self.unplan(space);
        self.lacking.clear();
        let Stats { since, out, back, uncopied } = core::mem::take(&mut self.stats);
        let moved = out + back > 0;
        if let Some(since) = since.filter(|_| moved) {
            self.untidy_since = Some(Instant::now());
            let time = since.elapsed().as_micros();
            for (bytes, what) in [(out, "left"), (back, "came back")].iter().filter(|(bytes, _)| *bytes > 0) {
                trace!("{bytes} bytes {what} in {time} µs, {uncopied} bytes of both without a copy ({goal:?})");
            }
        }
        moved
    }
}
