//! The mover: evicts chunks from the GPU and restores them at the same addresses, as the scheduler's
//! allowance requires.
//!
//! The mover never waits for a copy. Each step starts new copies and completes finished ones. Between
//! steps the client's thread reads messages, so a new allowance takes effect immediately. Steps wait
//! only for fingerprints, which take milliseconds.
//!
//! Many copies are in flight at a time. The caller reports the account after each step, so that other
//! clients can use freed bytes while the eviction continues. No step makes a driver call that may wait for
//! running work. The [`waiter`](super::waiter) makes such calls.
//!
//! A chunk whose contents are already in host memory is not copied; see
//! [`fingerprint`](super::fingerprint).
//!
//! The mover's objects in a context are created on the program's thread when the context is created
//! ([`Mover::make_ready`]). The first use of a driver function may take long and may need the
//! dynamic loader's lock. During an eviction, other clients would have to wait for this first use.
//!
//! `evict` and `restore` are the two directions of a move, and `transfer` has the copies in flight.

mod evict;
mod restore;
mod transfer;

use crate::{
    driver::{
        context::{is_dead_in, with_current},
        types::*,
        waits,
    },
    env::trace::trace,
    memory::{
        space::{Space, chunks::Leaving},
        staging::StagingAllocator,
    },
    submit::captures,
    sys::{
        sync::Mutex,
        time::{self, Instant},
    },
};
use alloc::{collections::VecDeque, vec::Vec};
use core::time::Duration;
use transfer::{CopyContext, Transfer};

/// The interval between polls of copies in flight: an eighth of the time that the copy of one chunk
/// takes.
const POLL_INTERVAL: Duration = Duration::from_micros(150);

const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// After this time without a move, free host buffers are released and the other buffers are
/// unregistered, so that the kernel can page them out.
const REST: Duration = Duration::from_secs(180);

/// The number of buffers that are unregistered at a time.
const TIDY_BATCH: usize = 4;

/// The desired direction of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// Evict memory until at most `target` bytes are mapped. The client's gate is closed, so no work of the
    /// client is running or can start.
    Evict { target: u64 },
    /// Restore memory, up to the allowance.
    Restore,
    /// Complete the transfers in flight, and start no others.
    Idle,
}

/// The outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Transfers are in flight. The next step is due after this time.
    Busy(Duration),
    /// No transfer is in flight, and the step can start no further transfer. `moved`: memory has
    /// moved since the last step with this outcome.
    Done {
        moved: bool,
    },
    Stopped(Stop),
}

/// The reason why a move ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The host has no room, so the remaining chunks stay on the GPU.
    HostFull,
    /// The GPU has no room, although the allowance has room.
    GpuFull,
    /// No context works any more.
    Broken,
}

/// Moves the chunks of one GPU.
#[derive(Debug)]
pub struct Mover {
    /// The contexts in which the mover can work. It works in the first.
    ready: Vec<CopyContext>,
    /// Contexts that have failed.
    broken: Vec<usize>,
    transfers: VecDeque<Transfer>,
    /// The chunks to be evicted next.
    plan: VecDeque<Leaving>,
    /// Chunks to restore next: base, offset and length.
    lacking: VecDeque<(u64, u64, u64)>,
    staging: Option<StagingAllocator>,
    /// Whether the buffers being allocated are for a later eviction.
    preparing: bool,
    /// The time at which the GPU was first found full although the allowance has room.
    full_since: Option<Instant>,
    /// True if a restored chunk could not be mapped at one of its aliases.
    refused: bool,
    /// The number of program threads that pause the mover while they destroy a context or couple
    /// GPUs.
    pauses: u32,
    /// Contexts in which a program thread is creating the mover's objects.
    in_the_making: Vec<usize>,
    /// The time of the last move; `None` if host memory has been tidied up since then.
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
    /// The part of `out` and `back` that was not copied.
    uncopied: u64,
}

/// The mover's objects in a context that is being destroyed.
#[derive(Debug)]
pub struct Left(Option<CopyContext>);

impl Left {
    /// Drops the objects without driver calls, after the driver has destroyed the context.
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
            untidy_since: None,
            stats: Stats { since: None, out: 0, back: 0, uncopied: 0 },
        }
    }

    /// Takes one step towards the goal. Works in one of `contexts`.
    pub fn step(&mut self, space: &Mutex<Space>, contexts: &[CUcontext], goal: Goal) -> Step {
        let goal = if self.pauses > 0 { Goal::Idle } else { goal };
        if goal == Goal::Idle && self.is_idle() {
            return Step::Done { moved: false };
        }
        self.broken.retain(|context| contexts.contains(&(*context as CUcontext)));
        loop {
            let context = match self.choose_context(contexts) {
                Ok(context) => context,
                Err(stop) => {
                    self.end(space, goal);
                    // Only the allocation of host buffers may still be in progress.
                    return match self.stop_staging(space) {
                        false => Step::Busy(RETRY_INTERVAL),
                        true if goal == Goal::Idle => Step::Done { moved: false },
                        true => Step::Stopped(stop),
                    };
                }
            };
            // At most `MAX_COPIES` copies are queued in the mover's stream, so the driver has room for more.
            let step = || waits::with_room(|| self.step_here(space, goal));
            let step = match with_current(context, step) {
                Ok(step) => step,
                Err(error) if is_dead_in(context, error) => Step::Stopped(Stop::Broken),
                Err(_) => return Step::Busy(RETRY_INTERVAL), // only this call has failed
            };
            match step {
                Step::Stopped(Stop::Broken) => {
                    // Chunks in flight have lost their contents. The driver returns the error from the program's next
                    // call.
                    self.complete_all(space);
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

    /// Whether no transfer, plan or allocation is in progress, so that only a new goal creates work.
    pub fn is_idle(&self) -> bool {
        self.transfers.is_empty() && self.plan.is_empty() && self.staging.is_none()
    }

    /// The context in which the mover works.
    pub fn context(&self) -> Option<CUcontext> {
        self.ready.first().map(|ready| ready.context as CUcontext)
    }

    /// Tidies up host memory after [`REST`] without a move, or immediately if the host is short of memory.
    /// Returns the time until the next call is due.
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

    /// Creates the mover's objects in a new context, so that an eviction finds all code loaded and
    /// all objects allocated. The caller is a program thread that holds no lock, because loading
    /// code may wait for running work. `add` registers the context with the library, before the
    /// hook returns the context to the program. If memory for the kernel is short, evictions copy all chunks.
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

    /// Returns the context in which the mover works. If there is none yet, chooses one of `contexts`. An
    /// early call is best, while memory for the mover's objects is available.
    pub fn choose_context(&mut self, contexts: &[CUcontext]) -> Result<usize, Stop> {
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

    /// Stops using a context that the program is about to destroy. The caller holds no lock.
    pub fn leave(mover: &Mutex<Self>, context: CUcontext, space: &Mutex<Space>) -> Left {
        let mut guard = mover.lock();
        guard.pause();
        // Waits for all transfers, because their host buffers may be registered in this context:
        // the mover's context, or an earlier context that has failed.
        while !(guard.stop_staging(space) && guard.rest(space)) {
            drop(guard);
            time::sleep(RETRY_INTERVAL);
            guard = mover.lock();
        }
        guard.resume();
        let at = guard.ready.iter().position(|ready| ready.context == context as usize);
        Left(at.map(|at| guard.ready.remove(at)))
    }

    /// Undoes [`leave`](Self::leave), if the context was not destroyed.
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

    /// Completes finished transfers and cancels the plan. Returns whether no transfer is left.
    pub fn rest(&mut self, space: &Mutex<Space>) -> bool {
        if let (false, Some(context)) = (self.transfers.is_empty(), self.context()) {
            let complete = || captures::in_relaxed_mode(|| self.complete(space));
            if with_current(context as usize, complete).is_err_and(|error| is_dead_in(context as usize, error)) {
                self.complete_all(space);
            }
        }
        self.unplan(space);
        self.transfers.is_empty()
    }

    fn step_here(&mut self, space: &Mutex<Space>, goal: Goal) -> Step {
        self.stats.since.get_or_insert_with(Instant::now);
        self.complete(space);
        if !matches!(goal, Goal::Evict { .. }) {
            // From now on, the program may write to its memory, so the fingerprints of the plan are
            // outdated.
            self.unplan(space);
            if !self.collect_staging(space) && self.transfers.is_empty() && goal == Goal::Idle {
                return Step::Busy(RETRY_INTERVAL);
            }
        }
        let more = match goal {
            Goal::Evict { target } => self.evict_some(space, target),
            Goal::Restore => self.restore_some(space),
            Goal::Idle => Ok(None),
        };
        match more {
            Err(Stop::Broken) => Step::Stopped(Stop::Broken),
            Ok(Some(after)) if self.transfers.is_empty() => Step::Busy(after),
            Ok(Some(after)) => Step::Busy(after.min(POLL_INTERVAL)),
            _ if !self.transfers.is_empty() => Step::Busy(POLL_INTERVAL),
            Ok(None) => Step::Done { moved: false },
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
                trace!(
                    "{bytes} bytes {what} in {time} µs, {uncopied} bytes in both directions without a copy ({goal:?})"
                );
            }
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        driver::fake::until,
        memory::{
            engine::GRANULE,
            fake::{EVICT_ALL, Memory},
        },
        sys::sync::Rank,
    };
    use core::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    #[test]
    fn evicted_memory_returns_with_its_contents() {
        let memory = Memory::new();
        let addresses = [1, 2].map(|word| {
            let at = memory.allocate();
            memory.driver.write(at, word);
            at
        });
        assert_eq!(memory.run(EVICT_ALL), Step::Done { moved: true });
        let account = memory.account();
        assert_eq!((account.mapped, account.swapped, account.in_flight), (0, 2 * GRANULE, 0));
        assert_eq!(memory.driver.used(), 0);
        assert_eq!(memory.run(Goal::Restore), Step::Done { moved: true });
        assert_eq!(addresses.map(|at| memory.driver.word(at)), [Some(1), Some(2)]);
        let account = memory.account();
        assert_eq!((account.mapped, account.swapped, account.can_run()), (2 * GRANULE, 0, true));
        assert_eq!(memory.run(Goal::Restore), Step::Done { moved: false }, "there is nothing left to move");
    }

    #[test]
    fn a_paused_mover_starts_no_transfer() {
        let memory = Memory::new();
        memory.allocate();
        memory.mover.lock().pause();
        assert_eq!(memory.step(EVICT_ALL), Step::Done { moved: false });
        assert_eq!((memory.driver.count("cuMemcpyDtoHAsync_v2"), memory.account().mapped), (0, GRANULE));
        memory.mover.lock().resume();
        assert_eq!(memory.run(EVICT_ALL), Step::Done { moved: true });
    }

    #[test]
    fn leaving_a_context_waits_for_transfers_without_the_mover_lock() {
        let memory = Memory::new();
        memory.allocate();
        memory.driver.keep_busy(memory.stream());
        memory.step_until_call(EVICT_ALL, "cuMemcpyDtoHAsync_v2");
        let context = memory.context as usize;
        thread::scope(|scope| {
            let leaving = scope.spawn(move || {
                Mover::leave(memory.mover, context as CUcontext, memory.space).forget();
            });
            until(|| memory.mover.lock().pauses == 1);
            assert!(!leaving.is_finished() && memory.driver.count("cuMemUnmap") == 0, "the copy is not done");
            memory.driver.finish(memory.stream());
            leaving.join().expect("no panic");
        });
        assert_eq!(memory.account().swapped, GRANULE);
        assert_eq!(memory.mover.lock().context(), None);
    }

    #[test]
    fn an_eviction_continues_in_another_context_when_one_breaks() {
        let memory = Memory::new();
        let other = memory.add_context();
        let at = memory.allocate();
        memory.driver.write(at, 7);
        memory.driver.fail("cuMemcpyDtoHAsync_v2", 1, 700);
        assert_eq!(memory.run(EVICT_ALL), Step::Done { moved: true });
        assert_eq!(memory.mover.lock().context(), Some(other));
        assert_eq!(memory.run(Goal::Restore), Step::Done { moved: true });
        assert_eq!(memory.driver.word(at), Some(7));
    }

    #[test]
    fn an_eviction_without_a_working_context_leaves_memory_on_the_gpu() {
        let memory = Memory::new();
        let at = memory.allocate();
        memory.driver.write(at, 7);
        memory.driver.fail("cuMemcpyDtoHAsync_v2", usize::MAX, 700);
        assert_eq!(memory.run(EVICT_ALL), Step::Stopped(Stop::Broken));
        let account = memory.account();
        assert_eq!((account.mapped, account.in_flight, memory.driver.word(at)), (GRANULE, 0, Some(7)));
    }

    /// Two threads retain the same primary context.
    #[test]
    fn the_objects_of_a_context_are_created_once_and_without_a_lock() {
        let memory = Memory::new();
        let context = memory.driver.new_context(0) as usize;
        memory.driver.block("cuStreamCreate");
        let added = AtomicU32::new(0);
        let make_ready = || {
            Mover::make_ready(memory.mover, context as CUcontext, true, || {
                added.fetch_add(1, Ordering::SeqCst);
            });
        };
        thread::scope(|scope| {
            let threads = [(); 2].map(|()| scope.spawn(make_ready));
            memory.driver.wait_for_calls("cuStreamCreate", 1);
            thread::sleep(Duration::from_millis(2)); // lets the other thread find the objects in the making
            assert_eq!(memory.mover.lock().in_the_making, [context]);
            assert_eq!(memory.driver.count("cuStreamCreate"), 1);
            assert_eq!(added.load(Ordering::SeqCst), 0, "the context is usable before its objects exist");
            memory.driver.unblock("cuStreamCreate");
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        });
        assert_eq!((memory.driver.count("cuStreamCreate"), added.load(Ordering::SeqCst)), (1, 2));
        for call in ["cuStreamCreate", "cuModuleLoadData"] {
            assert!(memory.driver.count(call) > 0 && !memory.driver.was_held(Rank::Mover, call), "{call}");
        }
    }
}
