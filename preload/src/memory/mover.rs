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
    chunk::{Chunk, HostCopy, Leaving, Place},
    engine::Engine,
    fingerprint::Printer,
    space::Space,
    staging::Workshop,
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
const MOST_IN_FLIGHT: u64 = 512 << 20;
const MOST_COPIES: usize = 256;
/// Between looks at copies that are under way: an eighth of what one chunk takes.
const LOOK: Duration = Duration::from_micros(150);
/// How long memory that others are letting go of may take to appear, and between looks.
const PATIENCE: Duration = Duration::from_millis(300);
const AGAIN: Duration = Duration::from_millis(1);
/// Threads that make buffers. While nobody waits for them yet, the program needs the processors more.
const MAKERS: usize = 8;
const MAKERS_AHEAD: usize = 2;
/// After so long without a move, host memory is the kernel's to page out, and what holds nothing is given back.
const REST: Duration = Duration::from_secs(180);
/// Buffers that are tidied up at a time.
const TIDIED_AT_ONCE: usize = 4;

/// Where the memory is to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aim {
    /// Off the GPU, until no more than `target` bytes are mapped. Nothing of this client may be running, and nothing may
    /// start: its gate is closed.
    Out { target: u64 },
    /// Onto the GPU, as far as the allowance goes.
    In,
    /// Nowhere: what is under way lands.
    Rest,
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
    desk: Option<Desk>,
    /// Contexts that do not work any more.
    broken: Vec<usize>,
    flying: VecDeque<Flying>,
    /// What leaves next, and how.
    plan: VecDeque<Leaving>,
    /// What may come back next: base, offset and length.
    lacking: VecDeque<(u64, u64, u64)>,
    workshop: Option<Workshop>,
    /// What is in the making is for an eviction to come.
    preparing: bool,
    /// Since when the GPU has had no room although the allowance says so.
    full_since: Option<Instant>,
    /// Something that had come back could not be mapped everywhere.
    refused: bool,
    /// When something was last moved, until host memory has been tidied up since.
    untidy_since: Option<Instant>,
    /// What has been moved, for the trace.
    tally: Tally,
}

// SAFETY: its pointers are the driver's handles, which any thread may use.
unsafe impl Send for Mover {}

/// What the mover has in the context that it works in.
#[derive(Debug)]
struct Desk {
    context: usize,
    stream: CUstream,
    /// Events that are not in use.
    events: Vec<CUevent>,
    /// `None` inside: prints cannot be made here.
    printer: Option<Option<Printer>>,
}

/// A chunk whose copy is under way.
#[derive(Debug)]
struct Flying {
    base: u64,
    offset: u64,
    len: u64,
    handle: Handle,
    engine: &'static dyn Engine,
    trip: Trip,
    event: CUevent,
}

/// Where a chunk comes from or goes to.
#[derive(Debug)]
enum Trip {
    /// To host memory.
    Out(Option<HostCopy>),
    /// From there, or from nowhere: where it is still, should it not arrive.
    In(Place),
}

#[derive(Debug, Default)]
struct Tally {
    since: Option<Instant>,
    out: u64,
    back: u64,
    /// Of these, what was not copied.
    uncopied: u64,
}

impl Mover {
    pub const fn new() -> Self {
        Self {
            desk: None,
            broken: Vec::new(),
            flying: VecDeque::new(),
            plan: VecDeque::new(),
            lacking: VecDeque::new(),
            workshop: None,
            preparing: false,
            full_since: None,
            refused: false,
            untidy_since: None,
            tally: Tally { since: None, out: 0, back: 0, uncopied: 0 },
        }
    }

    /// Does what can be done now with one of these contexts.
    pub fn step(&mut self, space: &Mutex<Space>, contexts: &[CUcontext], aim: Aim, report: &dyn Fn(&Account)) -> Step {
        if aim == Aim::Rest && self.is_idle() {
            return Step::Done { moved: false };
        }
        self.broken.retain(|context| contexts.contains(&(*context as CUcontext)));
        loop {
            let context = match self.settle(contexts) {
                Ok(context) => context,
                Err(stop) => {
                    self.end(space, aim);
                    return Step::Stopped(stop);
                }
            };
            let step = with_current(context, || self.step_here(space, aim, report));
            match step.unwrap_or(Step::Stopped(Stop::Broken)) {
                Step::Stopped(Stop::Broken) => {
                    // What was under way has lost its contents, and the program is told so by its own next call.
                    self.land_all(space, report);
                    self.desk = None;
                    self.broken.push(context);
                }
                Step::Busy(after) => return Step::Busy(after),
                Step::Done { .. } => return Step::Done { moved: self.end(space, aim) },
                Step::Stopped(stop) => {
                    self.end(space, aim);
                    return Step::Stopped(stop);
                }
            }
        }
    }

    /// Whether there is nothing to do but what a new aim asks for.
    pub fn is_idle(&self) -> bool {
        self.flying.is_empty() && self.plan.is_empty() && self.workshop.is_none()
    }

    /// The context it works in.
    pub fn context(&self) -> Option<CUcontext> {
        self.desk.as_ref().map(|desk| desk.context as CUcontext)
    }

    /// Tidies up when nothing has moved for long; says when to call again.
    pub fn tidy(&mut self, space: &Mutex<Space>) -> Duration {
        let (Some(since), Some(context)) = (self.untidy_since, self.context()) else { return Duration::MAX };
        let rest = since.elapsed();
        if rest < REST {
            return REST - rest;
        }
        let spare = space.lock().take_last_spare(TIDIED_AT_ONCE);
        let more = with_current(context as usize, || {
            let mut tidied = spare.len();
            drop(spare);
            let mut guard = space.lock();
            let registered = guard.buffers().filter(|buffer| buffer.is_registered()).take(TIDIED_AT_ONCE - tidied);
            registered.for_each(|buffer| {
                buffer.unregister();
                tidied += 1;
            });
            tidied > 0
        });
        if more == Ok(true) {
            return AGAIN;
        }
        trace!("host memory at rest is the kernel's to page out");
        self.untidy_since = None;
        Duration::MAX
    }

    /// Has a desk in one of these contexts, and says in which. Best done long before it is needed, when there is memory
    /// for it.
    pub fn settle(&mut self, contexts: &[CUcontext]) -> Result<usize, Stop> {
        if let Some(desk) = &self.desk {
            return Ok(desk.context);
        }
        let mut stop = Stop::Broken;
        for context in contexts.iter().map(|c| *c as usize).filter(|c| !self.broken.contains(c)) {
            let mut stream = core::ptr::null_mut();
            // SAFETY: a valid place.
            let made =
                with_current(context, || check(unsafe { driver::cuStreamCreate(&mut stream, STREAM_NON_BLOCKING) }));
            match made.flatten() {
                Ok(()) => {
                    self.desk = Some(Desk { context, stream, events: Vec::new(), printer: None });
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
        while !self.close_workshop(space) {
            time::sleep(AGAIN);
        }
        if self.desk.as_ref().is_none_or(|desk| desk.context != context as usize) {
            return;
        }
        let _ = with_current(context as usize, || {
            self.land_all(space, report);
            if let Some(Desk { stream, events, printer, .. }) = self.desk.take() {
                // SAFETY: the desk's own, and no longer in use.
                unsafe {
                    for event in events {
                        driver::cuEventDestroy_v2(event);
                    }
                    driver::cuStreamDestroy_v2(stream);
                }
                if let Some(printer) = printer.flatten() {
                    printer.close();
                }
            }
        });
        self.desk = None;
        self.unplan(space);
    }

    /// Nothing is on the move any more when this returns.
    pub fn rest(&mut self, space: &Mutex<Space>, report: &dyn Fn(&Account)) {
        if let (false, Some(context)) = (self.flying.is_empty(), self.context()) {
            let _ = with_current(context as usize, || self.land_all(space, report));
        }
        self.unplan(space);
    }

    fn step_here(&mut self, space: &Mutex<Space>, aim: Aim, report: &dyn Fn(&Account)) -> Step {
        self.tally.since.get_or_insert_with(Instant::now);
        self.land(space, report);
        if !matches!(aim, Aim::Out { .. }) {
            // The program may write to its memory from here on.
            self.unplan(space);
            if !self.empty_workshop(space) && self.flying.is_empty() && aim == Aim::Rest {
                return Step::Busy(AGAIN);
            }
        }
        let more = match aim {
            Aim::Out { target } => self.leave_some(space, target, report),
            Aim::In => self.return_some(space),
            Aim::Rest => Ok(None),
        };
        match more {
            Err(Stop::Broken) => Step::Stopped(Stop::Broken),
            _ if !self.flying.is_empty() => Step::Busy(LOOK),
            Ok(None) => Step::Done { moved: false },
            Ok(Some(after)) => Step::Busy(after),
            Err(stop) => Step::Stopped(stop),
        }
    }

    /// Nothing is under way any more; says whether something was moved.
    fn end(&mut self, space: &Mutex<Space>, aim: Aim) -> bool {
        self.unplan(space);
        self.lacking.clear();
        let Tally { since, out, back, uncopied } = core::mem::take(&mut self.tally);
        let moved = out + back > 0;
        if let Some(since) = since.filter(|_| moved) {
            self.untidy_since = Some(Instant::now());
            let time = since.elapsed().as_micros();
            for (bytes, what) in [(out, "left"), (back, "came back")].iter().filter(|(bytes, _)| *bytes > 0) {
                trace!("{bytes} bytes {what} in {time} µs, {uncopied} of all without a copy ({aim:?})");
            }
        }
        moved
    }

    // ---- out ----

    /// Starts as many chunks on their way out as may be under way. Gives when to look again for what could not start yet.
    fn leave_some(
        &mut self,
        space: &Mutex<Space>,
        target: u64,
        report: &dyn Fn(&Account),
    ) -> Result<Option<Duration>, Stop> {
        while self.has_room() {
            let guard = space.lock();
            let leaving: u64 = self.flying.iter().filter(|f| matches!(f.trip, Trip::Out(_))).map(|f| f.len).sum();
            let excess = guard.account.mapped.saturating_sub(leaving).saturating_sub(target);
            if excess == 0 {
                drop(guard);
                self.unplan(space);
                return Ok(None);
            }
            if self.plan.is_empty() {
                drop(guard);
                // What was ordered for the plan before goes first.
                if !self.close_workshop(space) {
                    return Ok(Some(AGAIN));
                }
                self.plan = space.lock().take_leaving(excess).into();
                if self.plan.is_empty() {
                    return Ok(None);
                }
                self.make_prints();
                self.order_for_plan(space);
                continue;
            }
            drop(guard);
            let Some(leaving) = self.plan.pop_front() else { return Ok(None) };
            match self.leave_one(space, leaving, report)? {
                None => {}
                Some((leaving, after)) => {
                    self.plan.push_front(leaving);
                    return Ok(Some(after));
                }
            }
        }
        Ok(Some(LOOK))
    }

    /// What was to leave stays.
    fn unplan(&mut self, space: &Mutex<Space>) {
        if !self.plan.is_empty() {
            let mut guard = space.lock();
            for Leaving { base, chunk, .. } in self.plan.drain(..) {
                guard.put(base, chunk.offset, chunk.place);
            }
        }
    }

    fn has_room(&self) -> bool {
        self.flying.len() < MOST_COPIES && self.flying.iter().map(|f| f.len).sum::<u64>() < MOST_IN_FLIGHT
    }

    /// Finds out what the chunks of the plan hold.
    fn make_prints(&mut self) {
        let Some(desk) = &mut self.desk else { return };
        let context = desk.context;
        let copied = self.plan.iter().filter(|leaving| leaving.is_copied);
        let chunks: Vec<_> = copied.map(|leaving| (leaving.base + leaving.chunk.offset, leaving.chunk.len)).collect();
        if chunks.is_empty() {
            return;
        }
        let Some(printer) = desk.printer.get_or_insert_with(|| Printer::new(context)) else { return };
        let begin = Instant::now();
        if let Some(prints) = printer.prints(&chunks, desk.stream) {
            let copied = self.plan.iter_mut().filter(|leaving| leaving.is_copied);
            copied.zip(prints).for_each(|(leaving, print)| leaving.print = Some(print));
        }
        trace!("prints of {} chunks in {} µs", chunks.len(), begin.elapsed().as_micros());
    }

    /// Orders the buffers that the plan will need and nobody has.
    fn order_for_plan(&mut self, space: &Mutex<Space>) {
        let needs = |leaving: &&Leaving| {
            leaving.is_copied
                && leaving.print.is_none_or(|print| print.constant.is_none())
                && matches!(leaving.chunk.place, Place::Gpu { copy: None, .. })
        };
        let needed = self.plan.iter().filter(needs).map(|leaving| leaving.chunk.len).collect();
        self.order(space, needed, MAKERS);
    }

    fn order(&mut self, space: &Mutex<Space>, mut lengths: Vec<u64>, makers: usize) {
        let mut spare = space.lock().spare_lengths();
        lengths.retain(|len| match spare.iter().position(|spare| spare == len) {
            Some(at) => {
                spare.swap_remove(at);
                false
            }
            None => true,
        });
        if let (false, Some(desk)) = (lengths.is_empty(), &self.desk) {
            self.workshop = Some(Workshop::order(&lengths, desk.context, makers));
        }
    }

    /// No more buffers are needed. Says whether none is in the making any more.
    fn close_workshop(&mut self, space: &Mutex<Space>) -> bool {
        self.preparing = false;
        self.empty_workshop(space)
    }

    /// Keeps what was made. Says whether nothing is in the making any more; unless it is for later, that is soon.
    fn empty_workshop(&mut self, space: &Mutex<Space>) -> bool {
        let Some(workshop) = &self.workshop else { return true };
        if !self.preparing {
            workshop.stop();
        }
        let busy = workshop.is_busy();
        space.lock().add_spare(workshop.rest());
        if !busy {
            self.workshop = None;
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
        let bytes = bytes.min(guard.account.keep.saturating_sub(guard.account.spare));
        let needed = guard.buffers_for(bytes);
        drop(guard);
        self.order(space, needed, MAKERS_AHEAD);
        self.preparing = self.workshop.is_some();
        trace!("buffers are made ahead: {}", self.preparing);
    }

    /// Starts one chunk on its way out. Where that has to wait, gives the chunk back, and says for how long.
    fn leave_one(
        &mut self,
        space: &Mutex<Space>,
        leaving: Leaving,
        report: &dyn Fn(&Account),
    ) -> Result<Option<(Leaving, Duration)>, Stop> {
        let Leaving { base, chunk: Chunk { offset, len, flags, place }, is_copied, print } = leaving;
        let Place::Gpu { handle, copy } = place else { return Ok(None) };
        let at = base + offset;
        let (gpu, engine) = {
            let guard = space.lock();
            (guard.gpu(), guard.engine_of(flags))
        };
        let flying = |trip| Flying { base, offset, len, handle, engine, trip, event: core::ptr::null_mut() };
        if !engine.copies() {
            engine.prefetch(gpu, at, flags.inside(offset, len), false, self.stream());
            self.fly(flying(Trip::Out(None)));
            return Ok(None);
        }
        let take_off = || {
            space.lock().hide(base, offset);
            engine.unmap(at, len, handle);
        };
        if let Some(value) = print.and_then(|p| p.constant) {
            take_off();
            let mut guard = space.lock();
            guard.add_spare(copy.map(|c| c.buffer));
            self.has_left(&mut guard, base, offset, len, Place::Constant(value), report);
            return Ok(None);
        }
        let mut buffer = match copy {
            Some(copy) if print.is_some() && copy.print == print => {
                take_off();
                self.has_left(&mut space.lock(), base, offset, len, Place::Host(Some(copy)), report);
                return Ok(None);
            }
            Some(copy) => copy.buffer,
            None => {
                let comes = self.workshop.as_ref().is_some_and(Workshop::is_busy);
                let spare = space.lock().take_spare(len);
                let found = spare.or_else(|| self.workshop.as_ref()?.take(len));
                let found = if comes { found } else { found.or_else(|| space.lock().take_copy(len)) };
                let Some(buffer) = found else {
                    let place = Place::Gpu { handle, copy: None };
                    if comes {
                        let chunk = Chunk { offset, len, flags, place };
                        return Ok(Some((Leaving { base, chunk, is_copied, print }, LOOK)));
                    }
                    space.lock().put(base, offset, place);
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
            guard.put(base, offset, Place::Gpu { handle, copy: None });
            guard.add_spare([buffer]);
            return Err(if is_dead(copied) { Stop::Broken } else { Stop::HostFull });
        }
        self.fly(flying(Trip::Out(Some(HostCopy { buffer, print }))));
        Ok(None)
    }

    /// A chunk is off the GPU without a copy.
    fn has_left(
        &mut self,
        guard: &mut Space,
        base: u64,
        offset: u64,
        len: u64,
        place: Place,
        report: &dyn Fn(&Account),
    ) {
        self.tally.out += len;
        self.tally.uncopied += len;
        guard.account.counts.unmoved += len;
        guard.left(len, matches!(place, Place::Host(_)));
        guard.put(base, offset, place);
        report(&guard.account);
    }

    // ---- in ----

    /// Starts as many chunks on their way back as may be under way and as the allowance has room for.
    fn return_some(&mut self, space: &Mutex<Space>) -> Result<Option<Duration>, Stop> {
        while self.has_room() {
            if core::mem::take(&mut self.refused) {
                return Err(Stop::GpuFull);
            }
            let mut guard = space.lock();
            let Some((base, chunk)) = self.take_lacking(&mut guard) else { return Ok(None) };
            let Chunk { offset, len, flags, place } = chunk;
            let (gpu, engine) = (guard.gpu(), guard.engine_of(flags));
            drop(guard);
            let at = base + offset;
            let handle = match engine.map(gpu, at, len, flags) {
                Ok(handle) => handle,
                Err(error) => {
                    space.lock().stays_away(base, offset, len, place);
                    if is_dead(error) {
                        return Err(Stop::Broken);
                    }
                    // Others free their memory before they say so, but the driver may need a moment.
                    if self.full_since.get_or_insert_with(Instant::now).elapsed() < PATIENCE {
                        return Ok(Some(AGAIN));
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
                match &place {
                    Place::Host(Some(copy)) => {
                        driver::cuMemcpyHtoDAsync_v2(at, copy.buffer.address(), len as usize, stream)
                    }
                    Place::Constant(value) => {
                        self.tally.uncopied += len;
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
                space.lock().stays_away(base, offset, len, place);
                return Err(if is_dead(copied) { Stop::Broken } else { Stop::GpuFull });
            }
            let (trip, event) = (Trip::In(place), core::ptr::null_mut());
            self.fly(Flying { base, offset, len, handle, engine, trip, event });
        }
        Ok(Some(LOOK))
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
        self.desk.as_ref().map_or(core::ptr::null_mut(), |desk| desk.stream)
    }

    /// Marks the end of what was started.
    fn fly(&mut self, mut flying: Flying) {
        if let Some(desk) = &mut self.desk {
            let mut event = desk.events.pop().unwrap_or(core::ptr::null_mut());
            // SAFETY: a valid place; an event and a stream of this context. Without an event, landing waits for the stream.
            unsafe {
                if (!event.is_null() || driver::cuEventCreate(&mut event, EVENT_DISABLE_TIMING) == SUCCESS)
                    && check(driver::cuEventRecord(event, desk.stream)).is_ok()
                {
                    flying.event = event;
                }
            }
        }
        self.flying.push_back(flying);
    }

    /// Lands what has arrived.
    fn land(&mut self, space: &Mutex<Space>, report: &dyn Fn(&Account)) {
        while let Some(first) = self.flying.front() {
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
            if let Some(flying) = self.flying.pop_front() {
                self.land_one(flying, space, report);
            }
        }
    }

    fn land_all(&mut self, space: &Mutex<Space>, report: &dyn Fn(&Account)) {
        // A thread of the program's may be here, beside a capture of another.
        // SAFETY: the mover's own stream.
        capture::relaxed(|| unsafe { driver::cuStreamSynchronize(self.stream()) });
        while let Some(flying) = self.flying.pop_front() {
            self.land_one(flying, space, report);
        }
    }

    fn land_one(&mut self, flying: Flying, space: &Mutex<Space>, report: &dyn Fn(&Account)) {
        let Flying { base, offset, len, handle, engine, trip, event } = flying;
        if let (false, Some(desk)) = (event.is_null(), &mut self.desk) {
            desk.events.push(event);
        }
        let place = match trip {
            Trip::Out(copy) => {
                space.lock().account.counts.swapped_out += len;
                Place::Host(copy)
            }
            Trip::In(place) => {
                let mut guard = space.lock();
                match place {
                    Place::Host(_) => guard.account.counts.swapped_in += len,
                    Place::Constant(_) => guard.account.counts.unmoved += len,
                    _ => {} // it never had contents
                }
                if guard.show(base, offset, len, handle).is_ok() {
                    let copy = if let Place::Host(copy) = place { copy } else { None };
                    self.tally.back += len;
                    guard.put(base, offset, Place::Gpu { handle, copy });
                    return report(&guard.account);
                }
                // No room for page tables, say: it comes back later.
                self.refused = true;
                place
            }
        };
        space.lock().hide(base, offset);
        engine.unmap(base + offset, len, handle);
        let mut guard = space.lock();
        self.tally.out += len;
        guard.left(len, matches!(place, Place::Host(_)));
        guard.put(base, offset, place);
        report(&guard.account);
    }
}
