//! Brings a client's memory to where the scheduler wants it: off the GPU chunk by chunk, and back to the same addresses.
//!
//! No copy is waited for: each step starts what it can and lands what has arrived, so that between two steps messages are
//! read and credit is used as it comes. (Prints are waited for: they take milliseconds.) Many copies are in flight at once,
//! and the account is reported after each, so that freed bytes serve others while the rest still leaves. The space is locked
//! only between driver calls, never during one.
//!
//! What need not be copied is not: see [`fingerprint`](super::fingerprint).

mod evict;
mod restore;
mod staging;
mod transfer;

use crate::{
    driver::{
        self, check,
        context::{is_dead, with_current},
        types::*,
    },
    env::trace::trace,
    memory::{account::Account, chunk::Leaving, space::Space, staging::StagingAllocator},
    sys::{
        sync::Mutex,
        time::{self, Instant},
    },
};
use alloc::{collections::VecDeque, vec::Vec};
use core::time::Duration;
use transfer::{CopyContext, Transfer};

/// Between looks at copies that are under way: an eighth of what one chunk takes.
const POLL_INTERVAL: Duration = Duration::from_micros(150);

const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// After so long without a move, host memory is the kernel's to page out, and what holds nothing is given back.
const REST: Duration = Duration::from_secs(180);

/// Buffers that are tidied up at a time.
const TIDY_BATCH: usize = 4;

/// Where the memory is to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// Off the GPU, until no more than `target` bytes are mapped. Nothing of this client may be running, and nothing may
    /// start: its gate is closed.
    Evict { target: u64 },
    /// Onto the GPU, as far as the allowance goes.
    Restore,
    /// Nowhere: what is under way lands.
    Idle,
}

/// How a step went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Something is under way: look again after that time.
    Busy(Duration),
    /// Nothing is, and nothing more can be done. Whether something was moved since the last time.
    Done {
        moved: bool,
    },
    Stopped(Stop),
}

/// Why a move ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The host has no room, so what is left stays on the GPU.
    HostFull,
    /// The GPU has no room although the allowance says so.
    GpuFull,
    /// No context works any more.
    Broken,
}

/// Moves the chunks of one GPU.
#[derive(Debug)]
pub struct Mover {
    copy_context: Option<CopyContext>,
    /// Contexts that do not work any more.
    broken: Vec<usize>,
    transfers: VecDeque<Transfer>,
    /// What leaves next, and how.
    plan: VecDeque<Leaving>,
    /// What may come back next: base, offset and length.
    lacking: VecDeque<(u64, u64, u64)>,
    staging: Option<StagingAllocator>,
    /// What is in the making is for an eviction to come.
    preparing: bool,
    /// Since when the GPU has had no room although the allowance says so.
    full_since: Option<Instant>,
    /// Something that had come back could not be mapped everywhere.
    refused: bool,
    /// When something was last moved, until host memory has been tidied up since.
    untidy_since: Option<Instant>,
    /// What has been moved, for the trace.
    stats: Stats,
}

// SAFETY: its pointers are the driver's handles, which any thread may use.
unsafe impl Send for Mover {}

#[derive(Debug, Default)]
struct Stats {
    since: Option<Instant>,
    out: u64,
    back: u64,
    /// Of these, what was not copied.
    uncopied: u64,
}

impl Mover {
    pub const fn new() -> Self {
        Self {
            copy_context: None,
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

    /// Does what can be done now with one of these contexts.
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
                    return Step::Stopped(stop);
                }
            };
            let step = with_current(context, || self.step_here(space, goal, report));
            match step.unwrap_or(Step::Stopped(Stop::Broken)) {
                Step::Stopped(Stop::Broken) => {
                    // What was under way has lost its contents, and the program is told so by its own next call.
                    self.complete_all(space, report);
                    self.copy_context = None;
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

    /// Whether there is nothing to do but what a new aim asks for.
    pub fn is_idle(&self) -> bool {
        self.transfers.is_empty() && self.plan.is_empty() && self.staging.is_none()
    }

    /// The context it works in.
    pub fn context(&self) -> Option<CUcontext> {
        self.copy_context.as_ref().map(|copy_context| copy_context.context as CUcontext)
    }

    /// Tidies up when nothing has moved for long; says when to call again.
    pub fn tidy(&mut self, space: &Mutex<Space>) -> Duration {
        let (Some(since), Some(context)) = (self.untidy_since, self.context()) else { return Duration::MAX };
        let rest = since.elapsed();
        if rest < REST {
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
        trace!("host memory at rest is the kernel's to page out");
        self.untidy_since = None;
        Duration::MAX
    }

    /// Has a desk in one of these contexts, and says in which. Best done long before it is needed, when there is memory
    /// for it.
    pub fn settle(&mut self, contexts: &[CUcontext]) -> Result<usize, Stop> {
        if let Some(copy_context) = &self.copy_context {
            return Ok(copy_context.context);
        }
        let mut stop = Stop::Broken;
        for context in contexts.iter().map(|c| *c as usize).filter(|c| !self.broken.contains(c)) {
            let mut stream = core::ptr::null_mut();
            // SAFETY: a valid place.
            let made =
                with_current(context, || check(unsafe { driver::cuStreamCreate(&mut stream, STREAM_NON_BLOCKING) }));
            match made.flatten() {
                Ok(()) => {
                    self.copy_context = Some(CopyContext { context, stream, events: Vec::new(), fingerprinter: None });
                    return Ok(context);
                }
                Err(error) if is_dead(error) => {}
                Err(_) => stop = Stop::GpuFull,
            }
        }
        Err(stop)
    }

    /// That context is about to go: nothing here needs it any more when this returns.
    pub fn leave(&mut self, context: CUcontext, space: &Mutex<Space>, report: &dyn Fn(&Account)) {
        // Buffers are registered with the context of a desk, perhaps of one that broke.
        while !self.stop_staging(space) {
            time::sleep(RETRY_INTERVAL);
        }
        if self.copy_context.as_ref().is_none_or(|copy_context| copy_context.context != context as usize) {
            return;
        }
        let _ = with_current(context as usize, || {
            self.complete_all(space, report);
            if let Some(CopyContext { stream, events, fingerprinter, .. }) = self.copy_context.take() {
                // SAFETY: the desk's own, and no longer in use.
                unsafe {
                    for event in events {
                        driver::cuEventDestroy_v2(event);
                    }
                    driver::cuStreamDestroy_v2(stream);
                }
                if let Some(fingerprinter) = fingerprinter.flatten() {
                    fingerprinter.close();
                }
            }
        });
        self.copy_context = None;
        self.unplan(space);
    }

    /// Nothing is on the move any more when this returns.
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

    /// Nothing is under way any more; says whether something was moved.
    fn end(&mut self, space: &Mutex<Space>, goal: Goal) -> bool {
        self.unplan(space);
        self.lacking.clear();
        let Stats { since, out, back, uncopied } = core::mem::take(&mut self.stats);
        let moved = out + back > 0;
        if let Some(since) = since.filter(|_| moved) {
            self.untidy_since = Some(Instant::now());
            let time = since.elapsed().as_micros();
            for (bytes, what) in [(out, "left"), (back, "came back")].iter().filter(|(bytes, _)| *bytes > 0) {
                trace!("{bytes} bytes {what} in {time} µs, {uncopied} of all without a copy ({goal:?})");
            }
        }
        moved
    }
}
