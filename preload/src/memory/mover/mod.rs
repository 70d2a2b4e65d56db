//! The mover: evicts chunks from the GPU and restores them at the same addresses, as the scheduler's allowance demands.
//!
//! Nothing waits for a copy. Each step starts new copies and completes finished ones, so that messages are read between
//! steps and new allowances take effect as they arrive. (Steps do wait for fingerprints, which takes milliseconds.)
//! Many copies are in flight at a time, and the account is reported after each, so that other clients can use freed
//! bytes while the rest is still being evicted. No step makes a driver call that may wait for running work: the
//! [`waiter`](super::waiter) makes those.
//!
//! Chunks that need no copy are not copied, see [`fingerprint`](super::fingerprint).
//!
//! The mover's objects in a context are created with the context, on the program's thread ([`Mover::make_ready`]). The
//! first use of a driver function may take long, and may need the loader's lock; during an eviction, other clients
//! would wait for that.
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
        waiting,
    },
    env::trace::trace,
    memory::{account::Account, chunk::Leaving, space::Space, staging::StagingAllocator},
    sys::{
        sync::Mutex,
        time::{self, Instant},
    },
    work::capture,
};
use alloc::{collections::VecDeque, vec::Vec};
use core::time::Duration;
use transfer::{CopyContext, Transfer};

/// The interval between polls of copies in flight: an eighth of the time that one chunk takes.
const POLL_INTERVAL: Duration = Duration::from_micros(150);

const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// After this time without a move, the kernel may page out the host buffers, and free ones are released.
const REST: Duration = Duration::from_secs(180);

/// The number of buffers that are unregistered at a time.
const TIDY_BATCH: usize = 4;

/// Where memory should move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// Off the GPU, until at most `target` bytes are mapped. No work of this client is running or can start: its gate
    /// is closed.
    Evict { target: u64 },
    /// Onto the GPU, up to the allowance.
    Restore,
    /// Nowhere. Transfers in flight are completed.
    Idle,
}

/// The outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Transfers are in flight: take the next step after this time.
    Busy(Duration),
    /// Nothing is in flight, and nothing more can be done. `moved`: memory has moved since the last such step.
    Done {
        moved: bool,
    },
    Stopped(Stop),
}

/// The reason why a move ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The host has no room: the remaining chunks stay on the GPU.
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
    /// The chunks to be evicted next.
    plan: VecDeque<Leaving>,
    /// Chunks that may be restored next: base, offset and length.
    lacking: VecDeque<(u64, u64, u64)>,
    staging: Option<StagingAllocator>,
    /// Whether the buffers being allocated are for a later eviction.
    preparing: bool,
    /// When the GPU was first found to have no room although the allowance does.
    full_since: Option<Instant>,
    /// A restored chunk could not be mapped at all its aliases.
    refused: bool,
    /// The number of program threads that pause the mover while they destroy a context or make GPUs peers.
    pauses: u32,
    /// Contexts in which a thread is creating the mover's objects.
    in_the_making: Vec<usize>,
    /// When loading the fingerprint kernel during an eviction began.
    loading_since: Option<Instant>,
    /// When memory last moved; `None` once host memory has been tidied up since.
    untidy_since: Option<Instant>,
    /// Counts for the trace.
    stats: Stats,
}

// SAFETY: the pointers are driver handles, which any thread may use.
unsafe impl Send for Mover {}

#[derive(Debug, Default)]
struct Stats {
    since: Option<Instant>,
    out: u64,
    back: u64,
    /// Of both, the bytes that were not copied.
    uncopied: u64,
}

/// The mover's objects in a context that is being destroyed.
#[derive(Debug)]
pub struct Left(Option<CopyContext>);

impl Left {
    /// Called when the context is gone.
    pub fn forget(self) {
        if let Some(ready) = self.0 {
            ready.forget();
        }
    }
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
            pauses: 0,
            in_the_making: Vec::new(),
            loading_since: None,
            untidy_since: None,
            stats: Stats { since: None, out: 0, back: 0, uncopied: 0 },
        }
    }

    /// Takes one step towards the goal, in one of these contexts.
    pub fn step(
        &mut self,
        space: &Mutex<Space>,
        contexts: &[CUcontext],
        goal: Goal,
        report: &dyn Fn(&Account),
    ) -> Step {
        let goal = if self.pauses > 0 { Goal::Idle } else { goal };
        if goal == Goal::Idle && self.is_idle() {
            return Step::Done { moved: false };
        }
        self.broken.retain(|context| contexts.contains(&(*context as CUcontext)));
        loop {
            let context = match self.settle(contexts) {
                Ok(context) => context,
                Err(stop) => {
                    self.end(space, goal);
                    // Only the allocation of buffers for copies may still be in progress.
                    return match self.stop_staging(space) {
                        false => Step::Busy(RETRY_INTERVAL),
                        true if goal == Goal::Idle => Step::Done { moved: false },
                        true => Step::Stopped(stop),
                    };
                }
            };
            // At most `MAX_COPIES` are in the queue of the mover's stream.
            let step = || waiting::with_room(|| self.step_here(space, goal, report));
            let step = match with_current(context, step) {
                Ok(step) => step,
                Err(error) if is_dead_in(context, error) => Step::Stopped(Stop::Broken),
                Err(_) => return Step::Busy(RETRY_INTERVAL), // only that call has failed
            };
            match step {
                Step::Stopped(Stop::Broken) => {
                    // Chunks in flight have lost their contents. The program's own next call returns the error.
                    self.complete_all(space, report);
                    if let Some(at) = self.ready.iter().position(|ready| ready.context == context) {
                        space.lock().release_buffers(self.ready.remove(at).into_buffers());
                    }
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

    /// Whether nothing is in progress, so that only a new goal creates work.
    pub fn is_idle(&self) -> bool {
        self.transfers.is_empty() && self.plan.is_empty() && self.staging.is_none()
    }

    /// The context in which it works.
    pub fn context(&self) -> Option<CUcontext> {
        self.ready.first().map(|ready| ready.context as CUcontext)
    }

    /// Tidies up host memory when nothing has moved for a while, or immediately if the host is short of memory. Returns
    /// when to call again.
    pub fn tidy(&mut self, space: &Mutex<Space>, is_host_short: bool) -> Duration {
        let Some(since) = self.untidy_since else { return Duration::MAX };
        let rest = since.elapsed();
        if rest < REST && !is_host_short {
            return REST - rest;
        }
        let mut guard = space.lock();
        if guard.is_releasing() || guard.tidy_buffers(TIDY_BATCH) {
            return Duration::MAX; // the waiter wakes this thread
        }
        trace!("advised the kernel to page out idle host memory");
        self.untidy_since = None;
        Duration::MAX
    }

    /// Creates the mover's objects in a new context, so that an eviction finds everything loaded and allocated. The
    /// caller is a thread of the program that holds no lock, since loading code may wait for running work. The program
    /// does not have the context yet, and `add` registers it with the library. If memory for the kernel is short, an
    /// eviction loads it later.
    pub fn make_ready(mover: &Mutex<Self>, context: CUcontext, copies: bool, add: impl FnOnce()) {
        let handle = context as usize;
        loop {
            let mut mover = mover.lock();
            if mover.ready.iter().any(|ready| ready.context == handle) {
                return add();
            }
            if !mover.in_the_making.contains(&handle) {
                mover.in_the_making.push(handle);
                break;
            }
            drop(mover);
            time::sleep(RETRY_INTERVAL); // another thread has retained the same context
        }
        let made = with_current(handle, || {
            let mut ready = CopyContext::new(handle)?;
            if copies {
                ready.load_kernel();
            }
            Ok(ready)
        });
        let mut mover = mover.lock();
        mover.in_the_making.retain(|other| *other != handle);
        mover.ready.extend(made.flatten());
        add();
    }

    /// Returns the context to work in, and chooses one of these if there is none yet. Best called early, while there is
    /// memory for the mover's objects.
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

    /// Stops using a context that is about to be destroyed. The caller holds no lock.
    pub fn leave(mover: &Mutex<Self>, context: CUcontext, space: &Mutex<Space>, report: &dyn Fn(&Account)) -> Left {
        let mut guard = mover.lock();
        guard.pause();
        // Buffers are registered with the mover's context, or with an earlier one that has failed.
        while !(guard.stop_staging(space) && guard.rest(space, report)) {
            drop(guard);
            time::sleep(RETRY_INTERVAL);
            guard = mover.lock();
        }
        guard.resume();
        let at = guard.ready.iter().position(|ready| ready.context == context as usize);
        Left(at.map(|at| guard.ready.remove(at)))
    }

    /// Called when the context stays after all.
    pub fn come_back(&mut self, Left(ready): Left) {
        self.ready.extend(ready);
    }

    /// Starts no new transfers until [`resume`](Self::resume).
    pub fn pause(&mut self) {
        self.pauses += 1;
    }

    pub fn resume(&mut self) {
        self.pauses -= 1;
    }

    /// Completes or undoes everything in progress. Returns whether nothing is left.
    pub fn rest(&mut self, space: &Mutex<Space>, report: &dyn Fn(&Account)) -> bool {
        if let (false, Some(context)) = (self.transfers.is_empty(), self.context()) {
            let complete = || capture::relaxed(|| self.complete(space, report));
            if with_current(context as usize, complete).is_err_and(|error| is_dead_in(context as usize, error)) {
                self.complete_all(space, report);
            }
        }
        self.unplan(space);
        self.transfers.is_empty()
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
        self.loading_since = None;
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
