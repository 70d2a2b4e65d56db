//! Brings a client's memory to where the scheduler wants it: off the GPU chunk by chunk, and back to the same addresses.
//!
//! No copy is waited for: each step starts what it can and lands what has arrived, so that between two steps messages are
//! read and credit is used as it comes. (Prints are waited for: they take milliseconds.) Many copies are in flight at once,
//! and the account is reported after each, so that freed bytes serve others while the rest still leaves. The space is locked
//! only between driver calls, never during one.
//!
//! What need not be copied is not: see [`fingerprint`](super::fingerprint).

use super::{
    account::Account,
    chunk::{Chunk, HostCopy, Leaving, Residency},
    engine::Engine,
    fingerprint::Fingerprinter,
    space::Space,
    staging::StagingAllocator,
};
use crate::{
    driver::{
        self, check,
        context::{is_dead, with_current},
        types::*,
    },
    env::trace::trace,
    sys::{
        sync::Mutex,
        time::{self, Instant},
    },
    work::capture,
};
use alloc::{collections::VecDeque, vec::Vec};
use core::time::Duration;

/// Bytes and copies in flight: more than the link carries until the next look, however small the chunks are.
const MAX_IN_FLIGHT: u64 = 512 << 20;
const MAX_COPIES: usize = 256;
/// Between looks at copies that are under way: an eighth of what one chunk takes.
const POLL_INTERVAL: Duration = Duration::from_micros(150);
/// How long memory that others are letting go of may take to appear, and between looks.
const TIMEOUT: Duration = Duration::from_millis(300);
const RETRY_INTERVAL: Duration = Duration::from_millis(1);
/// Threads that make buffers. While nobody waits for them yet, the program needs the processors more.
const WORKERS: usize = 8;
const WORKERS_AHEAD: usize = 2;
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

/// What the mover has in the context that it works in.
#[derive(Debug)]
struct CopyContext {
    context: usize,
    stream: CUstream,
    /// Events that are not in use.
    events: Vec<CUevent>,
    /// `None` inside: prints cannot be made here.
    fingerprinter: Option<Option<Fingerprinter>>,
}

/// A chunk whose copy is under way.
#[derive(Debug)]
struct Transfer {
    base: u64,
    offset: u64,
    len: u64,
    handle: Handle,
    engine: &'static dyn Engine,
    direction: Direction,
    event: CUevent,
}

/// Where a chunk comes from or goes to.
#[derive(Debug)]
enum Direction {
    /// To host memory.
    Out(Option<HostCopy>),
    /// From there, or from nowhere: where it is still, should it not arrive.
    In(Residency),
}

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

    // ---- out ----

    /// Starts as many chunks on their way out as may be under way. Gives when to look again for what could not start yet.
    fn evict_some(
        &mut self,
        space: &Mutex<Space>,
        target: u64,
        report: &dyn Fn(&Account),
    ) -> Result<Option<Duration>, Stop> {
        while self.has_room() {
            let guard = space.lock();
            let leaving: u64 =
                self.transfers.iter().filter(|f| matches!(f.direction, Direction::Out(_))).map(|f| f.len).sum();
            let excess = guard.account.mapped.saturating_sub(leaving).saturating_sub(target);
            if excess == 0 {
                drop(guard);
                self.unplan(space);
                return Ok(None);
            }
            if self.plan.is_empty() {
                drop(guard);
                // What was ordered for the plan before goes first.
                if !self.stop_staging(space) {
                    return Ok(Some(RETRY_INTERVAL));
                }
                self.plan = space.lock().take_leaving(excess).into();
                if self.plan.is_empty() {
                    return Ok(None);
                }
                self.fingerprint_plan();
                self.allocate_for_plan(space);
                continue;
            }
            drop(guard);
            let Some(leaving) = self.plan.pop_front() else { return Ok(None) };
            match self.evict_one(space, leaving, report)? {
                None => {}
                Some((leaving, after)) => {
                    self.plan.push_front(leaving);
                    return Ok(Some(after));
                }
            }
        }
        Ok(Some(POLL_INTERVAL))
    }

    /// What was to leave stays.
    fn unplan(&mut self, space: &Mutex<Space>) {
        if !self.plan.is_empty() {
            let mut guard = space.lock();
            for Leaving { base, chunk, .. } in self.plan.drain(..) {
                guard.put(base, chunk.offset, chunk.residency);
            }
        }
    }

    fn has_room(&self) -> bool {
        self.transfers.len() < MAX_COPIES && self.transfers.iter().map(|f| f.len).sum::<u64>() < MAX_IN_FLIGHT
    }

    /// Finds out what the chunks of the plan hold.
    fn fingerprint_plan(&mut self) {
        let Some(copy_context) = &mut self.copy_context else { return };
        let context = copy_context.context;
        let copied = self.plan.iter().filter(|leaving| leaving.is_copied);
        let chunks: Vec<_> = copied.map(|leaving| (leaving.base + leaving.chunk.offset, leaving.chunk.len)).collect();
        if chunks.is_empty() {
            return;
        }
        let Some(fingerprinter) = copy_context.fingerprinter.get_or_insert_with(|| Fingerprinter::new(context)) else {
            return;
        };
        let begin = Instant::now();
        if let Some(fingerprints) = fingerprinter.fingerprints(&chunks, copy_context.stream) {
            let copied = self.plan.iter_mut().filter(|leaving| leaving.is_copied);
            copied.zip(fingerprints).for_each(|(leaving, fingerprint)| leaving.fingerprint = Some(fingerprint));
        }
        trace!("prints of {} chunks in {} µs", chunks.len(), begin.elapsed().as_micros());
    }

    /// Orders the buffers that the plan will need and nobody has.
    fn allocate_for_plan(&mut self, space: &Mutex<Space>) {
        let needs = |leaving: &&Leaving| {
            leaving.is_copied
                && leaving.fingerprint.is_none_or(|fingerprint| fingerprint.constant.is_none())
                && matches!(leaving.chunk.residency, Residency::Gpu { copy: None, .. })
        };
        let needed = self.plan.iter().filter(needs).map(|leaving| leaving.chunk.len).collect();
        self.start_staging(space, needed, WORKERS);
    }

    fn start_staging(&mut self, space: &Mutex<Space>, mut lengths: Vec<u64>, workers: usize) {
        let mut spare = space.lock().free_buffer_lengths();
        lengths.retain(|len| match spare.iter().position(|spare| spare == len) {
            Some(at) => {
                spare.swap_remove(at);
                false
            }
            None => true,
        });
        if let (false, Some(copy_context)) = (lengths.is_empty(), &self.copy_context) {
            self.staging = Some(StagingAllocator::start(&lengths, copy_context.context, workers));
        }
    }

    /// No more buffers are needed. Says whether none is in the making any more.
    fn stop_staging(&mut self, space: &Mutex<Space>) -> bool {
        self.preparing = false;
        self.collect_staging(space)
    }

    /// Keeps what was made. Says whether nothing is in the making any more; unless it is for later, that is soon.
    fn collect_staging(&mut self, space: &Mutex<Space>) -> bool {
        let Some(staging) = &self.staging else { return true };
        if !self.preparing {
            staging.stop();
        }
        let busy = staging.is_busy();
        space.lock().keep_buffers(staging.rest());
        if !busy {
            self.staging = None;
            self.preparing = false;
        }
        !busy
    }

    /// So many bytes are likely to leave before long: has buffers for them made, without hurry.
    pub fn prepare(&mut self, space: &Mutex<Space>, contexts: &[CUcontext], bytes: u64) {
        if !self.is_idle() || self.settle(contexts).is_err() {
            return;
        }
        let guard = space.lock();
        let bytes = bytes.min(guard.account.host_cache_max.saturating_sub(guard.account.host_cache));
        let needed = guard.buffers_for(bytes);
        drop(guard);
        self.start_staging(space, needed, WORKERS_AHEAD);
        self.preparing = self.staging.is_some();
        trace!("buffers are made ahead: {}", self.preparing);
    }

    /// Starts one chunk on its way out. Where that has to wait, gives the chunk back, and says for how long.
    fn evict_one(
        &mut self,
        space: &Mutex<Space>,
        leaving: Leaving,
        report: &dyn Fn(&Account),
    ) -> Result<Option<(Leaving, Duration)>, Stop> {
        let Leaving { base, chunk: Chunk { offset, len, flags, residency }, is_copied, fingerprint } = leaving;
        let Residency::Gpu { handle, copy } = residency else { return Ok(None) };
        let at = base + offset;
        let (gpu, engine) = {
            let guard = space.lock();
            (guard.gpu(), guard.engine_of(flags))
        };
        let transfer =
            |direction| Transfer { base, offset, len, handle, engine, direction, event: core::ptr::null_mut() };
        if !engine.copies() {
            engine.prefetch(gpu, at, flags.inside(offset, len), false, self.stream());
            self.track(transfer(Direction::Out(None)));
            return Ok(None);
        }
        let take_off = || {
            space.lock().hide(base, offset);
            engine.unmap(at, len, handle);
        };
        if let Some(value) = fingerprint.and_then(|p| p.constant) {
            take_off();
            let mut guard = space.lock();
            guard.keep_buffers(copy.map(|c| c.buffer));
            self.evicted_uncopied(&mut guard, base, offset, len, Residency::Constant(value), report);
            return Ok(None);
        }
        let mut buffer = match copy {
            Some(copy) if fingerprint.is_some() && copy.fingerprint == fingerprint => {
                take_off();
                self.evicted_uncopied(&mut space.lock(), base, offset, len, Residency::Host(Some(copy)), report);
                return Ok(None);
            }
            Some(copy) => copy.buffer,
            None => {
                let comes = self.staging.as_ref().is_some_and(StagingAllocator::is_busy);
                let spare = space.lock().take_free_buffer(len);
                let found = spare.or_else(|| self.staging.as_ref()?.take(len));
                let found = if comes { found } else { found.or_else(|| space.lock().take_copy(len)) };
                let Some(buffer) = found else {
                    let residency = Residency::Gpu { handle, copy: None };
                    if comes {
                        let chunk = Chunk { offset, len, flags, residency };
                        return Ok(Some((Leaving { base, chunk, is_copied, fingerprint }, POLL_INTERVAL)));
                    }
                    space.lock().put(base, offset, residency);
                    return Err(Stop::HostFull);
                };
                buffer
            }
        };
        buffer.register(self.context().map_or(0, |context| context as usize));
        // SAFETY: the chunk is mapped and idle, the buffer is as long, and both stay until the copy has landed.
        let copied = unsafe { driver::cuMemcpyDtoHAsync_v2(buffer.address(), at, len as usize, self.stream()) };
        if copied != SUCCESS {
            let mut guard = space.lock();
            guard.put(base, offset, Residency::Gpu { handle, copy: None });
            guard.keep_buffers([buffer]);
            return Err(if is_dead(copied) { Stop::Broken } else { Stop::HostFull });
        }
        self.track(transfer(Direction::Out(Some(HostCopy { buffer, fingerprint }))));
        Ok(None)
    }

    /// A chunk is off the GPU without a copy.
    fn evicted_uncopied(
        &mut self,
        guard: &mut Space,
        base: u64,
        offset: u64,
        len: u64,
        residency: Residency,
        report: &dyn Fn(&Account),
    ) {
        self.stats.out += len;
        self.stats.uncopied += len;
        guard.account.counts.unmoved += len;
        guard.left(len, matches!(residency, Residency::Host(_)));
        guard.put(base, offset, residency);
        report(&guard.account);
    }

    // ---- in ----

    /// Starts as many chunks on their way back as may be under way and as the allowance has room for.
    fn restore_some(&mut self, space: &Mutex<Space>) -> Result<Option<Duration>, Stop> {
        while self.has_room() {
            if core::mem::take(&mut self.refused) {
                return Err(Stop::GpuFull);
            }
            let mut guard = space.lock();
            let Some((base, chunk)) = self.take_lacking(&mut guard) else { return Ok(None) };
            let Chunk { offset, len, flags, residency } = chunk;
            let (gpu, engine) = (guard.gpu(), guard.engine_of(flags));
            drop(guard);
            let at = base + offset;
            let handle = match engine.map(gpu, at, len, flags) {
                Ok(handle) => handle,
                Err(error) => {
                    space.lock().stays_away(base, offset, len, residency);
                    if is_dead(error) {
                        return Err(Stop::Broken);
                    }
                    // Others free their memory before they say so, but the driver may need a moment.
                    if self.full_since.get_or_insert_with(Instant::now).elapsed() < TIMEOUT {
                        return Ok(Some(RETRY_INTERVAL));
                    }
                    self.full_since = None;
                    let (mut free, mut total) = (0, 0);
                    // SAFETY: valid places.
                    unsafe { driver::cuMemGetInfo_v2(&mut free, &mut total) };
                    trace!("GPU {gpu}: no room for {len} bytes, while {free} of {total} are free");
                    return Err(Stop::GpuFull);
                }
            };
            self.full_since = None;
            let stream = self.stream();
            // SAFETY: the chunk has just been mapped, the buffer is as long, and both stay until this has landed.
            let copied = unsafe {
                match &residency {
                    Residency::Host(Some(copy)) => {
                        driver::cuMemcpyHtoDAsync_v2(at, copy.buffer.address(), len as usize, stream)
                    }
                    Residency::Constant(value) => {
                        self.stats.uncopied += len;
                        driver::cuMemsetD32Async(at, *value, len as usize / 4, stream)
                    }
                    _ => {
                        engine.prefetch(gpu, at, flags.inside(offset, len), true, stream);
                        SUCCESS
                    }
                }
            };
            if copied != SUCCESS {
                engine.unmap(at, len, handle);
                space.lock().stays_away(base, offset, len, residency);
                return Err(if is_dead(copied) { Stop::Broken } else { Stop::GpuFull });
            }
            let (direction, event) = (Direction::In(residency), core::ptr::null_mut());
            self.track(Transfer { base, offset, len, handle, engine, direction, event });
        }
        Ok(Some(POLL_INTERVAL))
    }

    /// The next chunk that can come back.
    fn take_lacking(&mut self, space: &mut Space) -> Option<(u64, Chunk)> {
        if self.lacking.is_empty() {
            self.lacking = space.lacking().into();
        }
        loop {
            let room = space.account.room();
            let at = self.lacking.iter().position(|(_, _, len)| *len <= room)?;
            let (base, offset, _) = self.lacking.remove(at)?;
            // It may have been freed since.
            if let Some(chunk) = space.take_lacking(base, offset) {
                return Some((base, chunk));
            }
        }
    }

    // ---- under way ----

    fn stream(&self) -> CUstream {
        self.copy_context.as_ref().map_or(core::ptr::null_mut(), |copy_context| copy_context.stream)
    }

    /// Marks the end of what was started.
    fn track(&mut self, mut transfer: Transfer) {
        if let Some(copy_context) = &mut self.copy_context {
            let mut event = copy_context.events.pop().unwrap_or(core::ptr::null_mut());
            // SAFETY: a valid place; an event and a stream of this context. Without an event, landing waits for the stream.
            unsafe {
                if (!event.is_null() || driver::cuEventCreate(&mut event, EVENT_DISABLE_TIMING) == SUCCESS)
                    && check(driver::cuEventRecord(event, copy_context.stream)).is_ok()
                {
                    transfer.event = event;
                }
            }
        }
        self.transfers.push_back(transfer);
    }

    /// Lands what has arrived.
    fn complete(&mut self, space: &Mutex<Space>, report: &dyn Fn(&Account)) {
        while let Some(first) = self.transfers.front() {
            // SAFETY: the mover's own event, or stream.
            let there = unsafe {
                match first.event.is_null() {
                    true => driver::cuStreamQuery(self.stream()),
                    false => driver::cuEventQuery(first.event),
                }
            };
            if there == ERROR_NOT_READY {
                return;
            }
            if let Some(transfer) = self.transfers.pop_front() {
                self.complete_one(transfer, space, report);
            }
        }
    }

    fn complete_all(&mut self, space: &Mutex<Space>, report: &dyn Fn(&Account)) {
        // A thread of the program's may be here, beside a capture of another.
        // SAFETY: the mover's own stream.
        capture::relaxed(|| unsafe { driver::cuStreamSynchronize(self.stream()) });
        while let Some(transfer) = self.transfers.pop_front() {
            self.complete_one(transfer, space, report);
        }
    }

    fn complete_one(&mut self, transfer: Transfer, space: &Mutex<Space>, report: &dyn Fn(&Account)) {
        let Transfer { base, offset, len, handle, engine, direction, event } = transfer;
        if let (false, Some(copy_context)) = (event.is_null(), &mut self.copy_context) {
            copy_context.events.push(event);
        }
        let residency = match direction {
            Direction::Out(copy) => {
                space.lock().account.counts.swapped_out += len;
                Residency::Host(copy)
            }
            Direction::In(residency) => {
                let mut guard = space.lock();
                match residency {
                    Residency::Host(_) => guard.account.counts.swapped_in += len,
                    Residency::Constant(_) => guard.account.counts.unmoved += len,
                    _ => {} // it never had contents
                }
                if guard.show(base, offset, len, handle).is_ok() {
                    let copy = if let Residency::Host(copy) = residency { copy } else { None };
                    self.stats.back += len;
                    guard.put(base, offset, Residency::Gpu { handle, copy });
                    return report(&guard.account);
                }
                // No room for page tables, say: it comes back later.
                self.refused = true;
                residency
            }
        };
        space.lock().hide(base, offset);
        engine.unmap(base + offset, len, handle);
        let mut guard = space.lock();
        self.stats.out += len;
        guard.left(len, matches!(residency, Residency::Host(_)));
        guard.put(base, offset, residency);
        report(&guard.account);
    }
}
