//! Work that was submitted to one GPU and may still run: how it is bounded, and how it is known to be done.
//!
//! Which streams were given work is noted with each submission. A [`Point`] is an event in one of them. An event behind
//! *everything* (`cuCtxRecordEvent`, or one in the legacy stream) would be simpler, but one in the legacy stream makes
//! streams wait for each other that did not before, the other is forbidden beside every capture, and drivers before 12.5
//! lack it.
//!
//! **Marks** bound it. Every few submissions a thread records a point in its stream; when too much is outstanding, whoever
//! submits next waits for the oldest mark first. What is too much follows from how long marks took and how much was before
//! them: the window is kept at about [`RUN_AHEAD`] µs of GPU time, far more than the GPU needs to stay busy, and a revoke
//! finds no more than that in the queues. Nobody is kept waiting for long: work may be waiting for what its program does
//! next.
//!
//! **Fences** tell when it is done: a point in every stream that was given work.

pub mod capture;
mod point;

use point::{Context, Point, is_legacy};

use crate::{
    driver::{
        self,
        context::{current_or_null, is_dead, with_current},
        types::*,
    },
    gate::{epoch, threads},
    sys::{
        sync::Mutex,
        time::{self, Instant},
    },
};
use alloc::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    vec::Vec,
};
use core::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

/// How much GPU time may be queued ahead while nobody waits, and while somebody does.
const RUN_AHEAD: u32 = 100_000;
const RUN_AHEAD_CONTENDED: u32 = 20_000;
/// Streams beyond which no samples are taken: each costs an event in every one.
const MAX_SAMPLED_STREAMS: usize = 32;
/// Streams, at first, among which idle ones are looked for when another one comes.
const MIN_PRUNE_THRESHOLD: usize = 64;
/// Submissions between two marks. A mark is an event and a few queries, so it costs about as much as a launch.
const MAX_PER_MARK: u32 = 64;
/// The window a program starts with, in submissions, before anything is known about its kernels, and the largest.
const FIRST_WINDOW: u32 = 1;
const MAX_WINDOW: u32 = 4096;
/// So that the window moves on in small steps.
const MARKS_PER_WINDOW: u32 = 8;
/// How long a thread waits for a mark at first: longer where work took longer lately; half as long each time it was in vain,
/// so that a program whose work waits for what it submits next is delayed by no more than twice this, and less each time.
const MARK_TIMEOUT: Duration = Duration::from_millis(1500);
const MAX_MARK_TIMEOUT: Duration = Duration::from_secs(3);
const MAX_HALVINGS: u32 = 20;
/// Work that is done so soon after a submission may have needed it.
const PROMPTLY: Duration = Duration::from_millis(20);
/// How long if all that is not done is in other streams than its own.
const OTHERS_TIMEOUT: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub struct Work {
    /// Submissions of one thread after which it takes a mark.
    per_mark: AtomicU32,
    /// Microseconds of GPU time that may be queued ahead.
    run_ahead: AtomicU32,
    /// Marks that were seen done, ever: the measure of progress.
    done: AtomicU64,
    /// Too much is outstanding: whoever submits next waits.
    full: AtomicBool,
    /// The longest that a mark took lately, in microseconds.
    slowest: AtomicU64,
    /// GPUs whose work may touch memory of this one.
    peers: AtomicU64,
    /// Finds the work of the GPU of that index: the table of GPUs is in a layer above.
    of_gpu: fn(u32) -> Option<&'static Work>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    contexts: Vec<Context>,
    /// Streams that were given work and not seen idle since.
    streams: BTreeMap<Stream, State>,
    /// The last points of streams that are gone; what they were given may still run.
    closed_streams: Vec<Arc<Point>>,
    marks: VecDeque<Mark>,
    /// Submissions before marks that are not done.
    outstanding: u32,
    /// Submissions that may be outstanding when another is made.
    window: u32,
    /// The longest that one submission took lately, in microseconds: the mean of those before a mark.
    longest: u64,
    /// The oldest mark, once it was waited for in vain.
    abandoned: Option<AbandonedWait>,
    /// How often lately a mark was done as soon as it was waited for no longer: it had needed what came next.
    futile_waits: u32,
    /// So many streams are known before those are looked for that are idle.
    prune_threshold: usize,
}

/// What tells a stream from others: the default streams have one handle for all contexts, or for all threads. A thread goes by
/// its number: what its stream was given may outlive it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Stream {
    context: usize,
    handle: usize,
    thread: u64,
}

#[derive(Debug, Default)]
struct State {
    /// It was given something since its last point.
    dirty: bool,
    last: Option<Arc<Point>>,
}

impl Stream {
    /// As the calling thread means it.
    fn of(handle: CUstream, context: CUcontext) -> Self {
        let thread = if handle == STREAM_PER_THREAD { threads::mine().number.load(Ordering::Relaxed) } else { 0 };
        Self { context: context as usize, handle: handle as usize, thread }
    }

    fn handle(self) -> CUstream {
        self.handle as CUstream
    }
}

#[derive(Debug)]
struct Mark {
    point: Arc<Point>,
    since: Instant,
    /// Submissions since the mark before.
    weight: u32,
    /// Submissions that were outstanding when it was recorded, its own included.
    ahead: u32,
}

#[derive(Debug)]
struct AbandonedWait {
    /// When the mark was made, and when it was first waited for no longer.
    mark: Instant,
    first: Instant,
    times: u32,
}

/// Everything that had been submitted when it was made.
#[derive(Debug, Default)]
pub struct Fence {
    points: Vec<Arc<Point>>,
    /// The same for work of peers.
    others: Vec<(&'static Work, Fence)>,
}

impl Work {
    pub const fn new(of_gpu: fn(u32) -> Option<&'static Work>) -> Self {
        Self {
            of_gpu,
            per_mark: AtomicU32::new(1),
            run_ahead: AtomicU32::new(RUN_AHEAD),
            done: AtomicU64::new(0),
            full: AtomicBool::new(false),
            slowest: AtomicU64::new(0),
            peers: AtomicU64::new(0),
            inner: Mutex::new(Inner {
                contexts: Vec::new(),
                streams: BTreeMap::new(),
                closed_streams: Vec::new(),
                marks: VecDeque::new(),
                outstanding: 0,
                window: FIRST_WINDOW,
                longest: 0,
                abandoned: None,
                futile_waits: 0,
                prune_threshold: MIN_PRUNE_THRESHOLD,
            }),
        }
    }

    /// Before a submission, outside the gate: waits while too much is outstanding.
    #[inline]
    pub fn throttle(&self, stream: CUstream) {
        if self.full.load(Ordering::Relaxed) {
            crate::sys::errno::preserved(|| self.wait_while_full(stream));
        }
    }

    pub fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }

    /// A submission went to that stream.
    pub fn note(&self, stream: CUstream) {
        let Some(context) = context_of(stream) else { return };
        let mut inner = self.inner.lock();
        let stream = Stream::of(stream, context);
        let is_known = inner.has(stream.context);
        if !is_known {
            inner.contexts.push(Context::new(stream.context, true));
        }
        inner.prune_streams(stream);
        inner.streams.entry(stream).or_default().dirty = true;
        // Nobody else can record a point there.
        if stream.thread != 0 || inner.context(stream.context).is_some_and(|c| c.foreign) {
            inner.point_in_its_context(stream);
        }
    }

    /// After a submission: takes a mark when one is due.
    #[inline]
    pub fn submitted(&self, slot: &threads::Slot, weight: u32, stream: CUstream) {
        let unmarked = slot.unmarked.load(Ordering::Relaxed) + weight;
        if unmarked < self.per_mark.load(Ordering::Relaxed) {
            slot.unmarked.store(unmarked, Ordering::Relaxed);
        } else {
            slot.unmarked.store(0, Ordering::Relaxed);
            crate::sys::errno::preserved(|| self.mark(unmarked, stream));
        }
    }

    #[cold]
    fn mark(&self, weight: u32, stream: CUstream) {
        let Some(context) = context_of(stream) else { return };
        let mut inner = self.inner.lock();
        let stream = Stream::of(stream, context);
        if !inner.has(stream.context) {
            return; // of another GPU, which is given work by way of this one's
        }
        let Some(point) = inner.point_in_its_context(stream) else { return };
        self.collect(&mut inner, false);
        let ahead = inner.outstanding.saturating_add(weight);
        inner.outstanding = ahead;
        inner.marks.push_back(Mark { point, since: Instant::now(), weight, ahead });
        self.update_full(&mut inner);
    }

    /// Whether too much is outstanding: more than the window, which what is known of earlier work made, or for longer than
    /// the window was meant to last.
    fn update_full(&self, inner: &mut Inner) {
        let run_ahead = Duration::from_micros(self.run_ahead.load(Ordering::Relaxed).into());
        let old = inner.marks.front().is_some_and(|oldest| oldest.since.elapsed() > run_ahead);
        let full = old || inner.outstanding > inner.window;
        if full && !self.full.swap(true, Ordering::Relaxed) {
            epoch::end();
        } else if !full {
            self.full.store(false, Ordering::Relaxed);
        }
    }

    /// Waits until no more is outstanding than may be, as far as that was submitted before.
    fn wait_while_full(&self, stream: CUstream) {
        let begin = Instant::now();
        while self.is_full() && self.wait_for_oldest(stream, begin) {}
    }

    /// Waits until the oldest mark is done, and learns from how long it took. A mark may be behind a kernel that only ends
    /// when the program tells it to, perhaps by what this very thread does next: so it is not waited for for long. Says
    /// whether it became done, and was older than `newest`.
    fn wait_for_oldest(&self, stream: CUstream, newest: Instant) -> bool {
        let begin = Instant::now();
        let mut inner = self.inner.lock();
        // What is done already may have been for long.
        self.collect(&mut inner, false);
        self.update_full(&mut inner);
        let oldest = inner.marks.front().map(|m| m.since).filter(|since| self.is_full() && *since <= newest);
        let Some(oldest) = oldest else { return false };
        let timeout =
            self.slowest().map_or(MARK_TIMEOUT, |slowest| (slowest * 2).clamp(MARK_TIMEOUT, MAX_MARK_TIMEOUT));
        let known = inner.abandoned.as_ref().filter(|g| g.mark == oldest);
        let (times, first) = known.map_or((0, None), |g| (g.times, Some(g.first)));
        let timeout = timeout / (1 << (inner.futile_waits + times).min(MAX_HALVINGS));
        drop(inner);
        loop {
            let waited = begin.elapsed();
            // Tiny kernels are done within microseconds; for others a sleep is short against the window.
            if waited > Duration::from_micros(50) {
                time::sleep(Duration::from_micros(50));
            }
            let mut inner = self.inner.lock();
            self.collect(&mut inner, true);
            if inner.marks.front().is_none_or(|m| m.since != oldest) {
                self.update_full(&mut inner);
                return true;
            }
            if waited > timeout || (waited > OTHERS_TIMEOUT && is_idle(stream)) {
                let first = first.unwrap_or_else(Instant::now);
                inner.abandoned = Some(AbandonedWait { mark: oldest, first, times: times + 1 });
                return false;
            }
        }
    }

    /// A mark was seen to become done: it took so long with so many submissions outstanding.
    fn learn(&self, inner: &mut Inner, took: Duration, ahead: u32, exact: bool) {
        let micros = (took.as_micros() as u64).max(1);
        let ahead = u64::from(ahead.max(1));
        if exact {
            self.note_duration(took);
            inner.longest = decaying_max(inner.longest, micros / ahead);
        }
        let run_ahead = u64::from(self.run_ahead.load(Ordering::Relaxed));
        let fitting = ahead.saturating_mul(run_ahead) / micros;
        // Twice as wide at most, so that what is queued of unknown kernels stays little. None where a single submission
        // takes longer, or did lately: a short one in between does not say that more of them follow.
        let most = inner.window.saturating_mul(2).clamp(1, MAX_WINDOW).into();
        let window = if inner.longest < run_ahead { fitting.min(most) as u32 } else { 0 };
        self.set_window(inner, if exact { window } else { window.max(inner.window) });
    }

    fn note_duration(&self, took: Duration) {
        let slowest = decaying_max(self.slowest.load(Ordering::Relaxed), took.as_micros() as u64);
        self.slowest.store(slowest, Ordering::Relaxed);
    }

    /// The longest that submitted work took lately; `None` before that was ever seen.
    pub fn slowest(&self) -> Option<Duration> {
        let slowest = self.slowest.load(Ordering::Relaxed);
        (slowest > 0).then(|| Duration::from_micros(slowest))
    }

    fn set_window(&self, inner: &mut Inner, window: u32) {
        inner.window = window;
        self.per_mark.store((window / MARKS_PER_WINDOW).clamp(1, MAX_PER_MARK), Ordering::Relaxed);
    }

    /// Somebody waits for the GPU, or nobody does any more: the queue is kept shorter while somebody does.
    pub fn set_contended(&self, contended: bool) {
        let to = if contended { RUN_AHEAD_CONTENDED } else { RUN_AHEAD };
        let from = self.run_ahead.swap(to, Ordering::Relaxed);
        if to < from {
            let mut inner = self.inner.lock();
            let window = inner.window.div_ceil(from / to);
            self.set_window(&mut inner, window);
        }
    }

    /// Takes out the marks that are done, and learns from the newest of them. Only who waited for it knows how long it
    /// really took; otherwise it took no longer than that, so that the window may be wider but not that it is too wide.
    fn collect(&self, inner: &mut Inner, waited: bool) {
        let mut newest = None;
        let mut weight = 0;
        inner.marks.retain(|mark| {
            let done = mark.point.is_done();
            if done {
                newest = Some((mark.since, mark.ahead));
                weight += mark.weight;
                self.done.fetch_add(1, Ordering::Relaxed);
            }
            !done
        });
        inner.outstanding = inner.outstanding.saturating_sub(weight);
        if let Some(abandoned) = &inner.abandoned
            && inner.marks.front().is_none_or(|m| m.since != abandoned.mark)
        {
            if abandoned.times > 1 {
                inner.futile_waits = 0;
                self.note_duration(abandoned.first - abandoned.mark);
            } else if abandoned.first.elapsed() < PROMPTLY {
                inner.futile_waits = (inner.futile_waits + 1).min(MAX_HALVINGS);
            }
            inner.abandoned = None;
        }
        if let Some((since, ahead)) = newest {
            self.learn(inner, since.elapsed(), ahead, waited);
        }
    }

    /// How many marks have been done so far; a drain that does not see it grow makes no progress.
    pub fn progress(&self) -> u64 {
        self.collect(&mut self.inner.lock(), false);
        self.done.load(Ordering::Relaxed)
    }

    pub fn peers(&self) -> u64 {
        self.peers.load(Ordering::SeqCst)
    }

    pub fn set_peers(&self, gpus: u64) {
        self.peers.store(gpus, Ordering::SeqCst);
    }

    /// A fence behind everything submitted so far that may touch memory of this GPU, or `None` where it cannot be made now:
    /// where a capture forbids it, say.
    pub fn fence(&self) -> Option<Fence> {
        let mut fence = self.fence_of_own()?;
        let peers = self.peers();
        for work in (0..u64::BITS).filter(|index| peers >> index & 1 == 1).filter_map(self.of_gpu) {
            fence.others.push((work, work.fence_of_own()?));
        }
        Some(fence)
    }

    /// The same in the middle of work: only where that makes no stream wait for another, and costs little.
    pub fn sample(&self) -> Option<Fence> {
        let inner = self.inner.lock();
        let legacy = |stream: &Stream| is_legacy(stream.handle());
        let marks_legacy = inner.streams.iter().any(|(stream, state)| state.dirty && legacy(stream));
        if inner.streams.len() > MAX_SAMPLED_STREAMS || (marks_legacy && !inner.streams.keys().all(legacy)) {
            return None;
        }
        drop(inner);
        self.fence()
    }

    fn fence_of_own(&self) -> Option<Fence> {
        let mut inner = self.inner.lock();
        inner.closed_streams.retain(|point| !point.is_done());
        let mut fence = Fence { points: inner.closed_streams.clone(), others: Vec::new() };
        inner.streams.retain(|_, state| state.dirty || state.last.as_ref().is_some_and(|point| !point.is_done()));
        let dirty: Vec<Stream> = inner.streams.iter().filter(|(_, state)| state.dirty).map(|(s, _)| *s).collect();
        for stream in dirty {
            // Its own thread is just about to, where nobody else can.
            let foreign = stream.thread != 0 || inner.context(stream.context).is_none_or(|c| c.foreign);
            let made = !foreign && with_current(stream.context, || inner.point_in(stream).is_some()) == Ok(true);
            if !made && inner.streams.contains_key(&stream) {
                return None;
            }
        }
        fence.points.extend(inner.streams.values().filter_map(|state| state.last.clone()));
        Some(fence)
    }

    /// Whether all of it is done. A fence that is done stays done and costs nothing to ask.
    pub fn is_done(&self, fence: &mut Fence) -> bool {
        while let Some((work, other)) = fence.others.last_mut() {
            if !work.is_done(other) {
                return false;
            }
            fence.others.pop();
        }
        // Not while a context goes.
        let _inner = self.inner.lock();
        while let Some(point) = fence.points.last() {
            if !point.is_done() {
                return false;
            }
            fence.points.pop();
        }
        true
    }

    /// The program begins to capture on a stream: a last moment to record a point behind what it was given.
    pub fn mark_stream(&self, stream: CUstream) {
        self.with_marked(stream, |_, _| {});
    }

    /// The program destroys a stream: what it was given goes on.
    pub fn forget_stream(&self, stream: CUstream) {
        self.with_marked(stream, |inner, stream| {
            if let Some(State { last: Some(point), .. }) = inner.streams.remove(&stream) {
                inner.closed_streams.push(point);
            }
            epoch::end();
        });
    }

    fn with_marked(&self, stream: CUstream, then: impl FnOnce(&mut Inner, Stream)) {
        let Some(context) = context_of(stream) else { return };
        let stream = Stream::of(stream, context);
        let mut inner = self.inner.lock();
        if inner.streams.get(&stream).is_some_and(|state| state.dirty) {
            let _ = with_current(stream.context, || inner.point_in(stream));
        }
        then(&mut inner, stream);
    }

    /// A context was created or retained.
    pub fn add_context(&self, context: CUcontext) {
        let mut inner = self.inner.lock();
        if !inner.has(context as usize) {
            inner.contexts.push(Context::new(context as usize, false));
        }
    }

    /// Runs a call that may destroy a context while nothing of ours uses it; the call says whether it did. Gives its result
    /// and, where a known context is gone, whether it was the last on this GPU.
    pub fn destroying_context(
        &self,
        context: CUcontext,
        call: impl FnOnce() -> (CUresult, bool),
    ) -> (CUresult, Option<bool>) {
        let mut inner = self.inner.lock();
        let known = inner.has(context as usize);
        let (result, gone) = call();
        if !gone || !known {
            return (result, None);
        }
        inner.forget_context(context as usize);
        (result, Some(inner.contexts.iter().all(|c| c.foreign)))
    }

    /// `cuCtxAttach`: one more use of it.
    pub fn attach(&self, context: CUcontext) {
        if let Some(context) = self.inner.lock().context(context as usize) {
            context.attached += 1;
        }
    }

    /// `cuCtxDetach`: one use less; `false` if that was the last.
    pub fn detach(&self, context: CUcontext) -> bool {
        let mut inner = self.inner.lock();
        let Some(context) = inner.context(context as usize).filter(|c| c.attached > 0) else { return false };
        context.attached -= 1;
        true
    }

    /// The client's thread uses a context for the first time before anybody depends on it: the driver then sets up storage
    /// of the thread's, for which it may need the loader's lock, which a thread that waits at the gate may hold.
    pub fn warm_up_contexts(&self) {
        let mut inner = self.inner.lock();
        if let Some(context) = inner.contexts.iter_mut().find(|c| !c.foreign && !c.warm) {
            context.warm = true;
            let _ = with_current(context.handle, || context.warm_up());
        }
    }

    /// A green context is gone.
    pub fn forget_foreign(&self, context: CUcontext) {
        self.inner.lock().forget_context(context as usize);
    }

    pub fn has_contexts(&self) -> bool {
        !self.inner.lock().contexts.is_empty()
    }

    pub fn has_context(&self, context: CUcontext) -> bool {
        self.inner.lock().has(context as usize)
    }

    /// The program's contexts on this GPU, to copy memory with.
    pub fn contexts(&self) -> Vec<CUcontext> {
        self.inner.lock().contexts.iter().filter(|c| !c.foreign).map(|c| c.handle as CUcontext).collect()
    }
}

impl Inner {
    fn has(&self, context: usize) -> bool {
        self.contexts.iter().any(|c| c.handle == context)
    }

    fn context(&mut self, context: usize) -> Option<&mut Context> {
        self.contexts.iter_mut().find(|c| c.handle == context)
    }

    /// Forgets streams that are idle before there are too many: where threads come and go, so do their streams.
    fn prune_streams(&mut self, stream: Stream) {
        if self.streams.len() >= self.prune_threshold && !self.streams.contains_key(&stream) {
            self.streams.retain(|_, state| state.dirty || state.last.as_ref().is_some_and(|point| !point.is_done()));
            self.prune_threshold = MIN_PRUNE_THRESHOLD.max(self.streams.len() * 2);
        }
    }

    /// Records a point in a stream of the calling thread's, whatever context is current to it.
    fn point_in_its_context(&mut self, stream: Stream) -> Option<Arc<Point>> {
        if current_or_null() as usize == stream.context {
            return self.point_in(stream);
        }
        with_current(stream.context, || self.point_in(stream)).ok().flatten()
    }

    /// Records a point in a stream, whose context is current.
    fn point_in(&mut self, stream: Stream) -> Option<Arc<Point>> {
        let context = self.contexts.iter_mut().find(|c| c.handle == stream.context)?;
        // Before the point: a thread that sees this epoch has submitted before it, one that sees the next waits for this to
        // be done and notes the stream anew.
        epoch::end();
        match context.record(stream.handle()) {
            Ok(point) => {
                let state = self.streams.entry(stream).or_default();
                *state = State { dirty: false, last: Some(point.clone()) };
                Some(point)
            }
            Err(error) => {
                // Nothing runs there any more; or there is no such stream, and the program's call failed.
                if is_dead(error) || matches!(error, ERROR_INVALID_HANDLE | ERROR_STREAM_DETACHED) {
                    self.streams.remove(&stream);
                }
                None
            }
        }
    }

    fn forget_context(&mut self, context: usize) {
        self.contexts.iter().filter(|c| c.handle == context).for_each(Context::end);
        self.contexts.retain(|c| c.handle != context);
        self.streams.retain(|stream, _| stream.context != context);
        self.closed_streams.retain(|point| point.context != context);
        self.marks.retain(|mark| mark.point.context != context);
        self.outstanding = self.marks.iter().map(|mark| mark.weight).sum();
        epoch::end();
    }
}

/// The largest of the figures seen lately: one that is not seen again is forgotten little by little.
fn decaying_max(known: u64, seen: u64) -> u64 {
    seen.max(known - known / 8)
}

/// The context of a stream of the calling thread's.
pub fn context_of(stream: CUstream) -> Option<CUcontext> {
    let mut context = core::ptr::null_mut();
    // SAFETY: a valid place, and a stream that the program has just used; the default streams are the current context's.
    unsafe {
        let is_default = (stream as usize) <= STREAM_PER_THREAD as usize;
        if is_default || driver::cuStreamGetCtx(stream, &mut context) != SUCCESS {
            context = current_or_null();
        }
    }
    (!context.is_null()).then_some(context)
}

/// What a thread knows a stream by from one launch to the next. The legacy stream is another one in each context, and goes
/// by its context's name.
#[inline]
pub fn name_of(stream: CUstream) -> usize {
    if is_legacy(stream) { current_or_null() as usize } else { stream as usize }
}

/// Whether all that this stream of the current context was given is done.
fn is_idle(stream: CUstream) -> bool {
    // SAFETY: the program has just submitted to this stream. A stream that captures is never asked.
    capture::beside(|capturing| {
        !(capturing && capture::is_capturing(stream)) && unsafe { driver::cuStreamQuery(stream) } == SUCCESS
    })
}
