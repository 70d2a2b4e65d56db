//! Work that was submitted to one GPU and may still run: how it is bounded, and how it is known to be done.
//!
//! **Marks** bound it. Every few submissions a thread records an event behind everything its context has been given; when
//! too much is outstanding, the thread waits for the oldest mark. What is too much follows from how long that mark took and
//! how much was before it: the window is kept at about [`RUN_AHEAD`] µs of GPU time, far more than the GPU needs to stay
//! busy, so bounding costs nothing, and a revoke finds no more than that in the queues.
//!
//! **Fences** tell when it is done: an event behind everything that every context has been given.

use crate::{
    capture,
    cuda::*,
    driver,
    memory::engine::check,
    sys::{
        sync::Mutex,
        time::{self, Instant},
    },
    threads,
};
use alloc::{collections::VecDeque, vec::Vec};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use core::time::Duration;

/// How much GPU time may be queued ahead while nobody waits, and while somebody does.
const RUN_AHEAD: u32 = 100_000;
const RUN_AHEAD_CONTENDED: u32 = 20_000;
/// Submissions between two marks: a mark costs about 2 µs, a launch 3 to 5 µs [H200].
const MOST_PER_MARK: u32 = 64;
/// The window a program starts with, in submissions, before anything is known about its kernels, and the largest.
const FIRST_WINDOW: u32 = 32;
const MOST_WINDOW: u32 = 4096;
/// So that the window moves on in small steps.
const MARKS_PER_WINDOW: u32 = 8;
/// How long a thread waits for a mark, and how long if all that is not done is in other streams than its own.
const MARK_PATIENCE: Duration = Duration::from_secs(1);
const OTHERS_PATIENCE: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub struct Work {
    /// Submissions of one thread after which it takes a mark.
    per_mark: AtomicU32,
    /// Microseconds of GPU time that may be queued ahead.
    run_ahead: AtomicU32,
    /// Marks that were seen done, ever: the measure of progress.
    done: AtomicU64,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    contexts: Vec<Context>,
    marks: VecDeque<Mark>,
    /// Submissions before marks that are not done.
    outstanding: u32,
    /// Submissions that may be outstanding.
    window: u32,
    /// The oldest mark, once it was found to be behind work that may never end by itself.
    stalled: Option<Instant>,
}

/// A context of the program on this GPU.
#[derive(Debug)]
struct Context {
    handle: usize,
    /// Events that are not in use; an event belongs to its context.
    events: Vec<usize>,
    /// Streams that do not wait for the legacy stream, known for drivers without `cuCtxRecordEvent` (before 12.5).
    streams: Vec<usize>,
}

#[derive(Debug)]
struct Mark {
    event: Event,
    since: Instant,
    /// Submissions since the mark before.
    weight: u32,
    /// Submissions that were outstanding when it was recorded, its own included.
    ahead: u32,
}

#[derive(Debug, Clone, Copy)]
struct Event {
    context: usize,
    handle: usize,
}

impl Event {
    /// Done, or nothing will ever run in its context again. An answer that says neither (beside a capture that went
    /// wrong, say) is not taken for one.
    fn is_done(self) -> bool {
        // SAFETY: events are taken out of use before their context is destroyed.
        let result = capture::beside(|_| unsafe { driver::cuEventQuery(self.handle as CUevent) });
        result == SUCCESS || is_dead(result)
    }
}

/// Whether this error means that nothing runs in the context any more.
fn is_dead(result: CUresult) -> bool {
    ERRORS_OF_A_BROKEN_CONTEXT.contains(&result)
        || matches!(result, ERROR_DEINITIALIZED | ERROR_INVALID_CONTEXT | ERROR_ECC_UNCORRECTABLE)
}

/// Everything that had been submitted when it was made.
#[derive(Debug, Default)]
pub struct Fence {
    events: Vec<Event>,
}

impl Work {
    pub const fn new() -> Self {
        Self {
            per_mark: AtomicU32::new(FIRST_WINDOW / MARKS_PER_WINDOW),
            run_ahead: AtomicU32::new(RUN_AHEAD),
            done: AtomicU64::new(0),
            inner: Mutex::new(Inner {
                contexts: Vec::new(),
                marks: VecDeque::new(),
                outstanding: 0,
                window: FIRST_WINDOW,
                stalled: None,
            }),
        }
    }

    /// After a submission: takes a mark when one is due. The thread is outside the gate, so it may wait here.
    #[inline]
    pub fn submitted(&self, slot: &threads::Slot, weight: u32, stream: CUstream) {
        let unmarked = slot.unmarked.load(Ordering::Relaxed) + weight;
        if unmarked < self.per_mark.load(Ordering::Relaxed) {
            slot.unmarked.store(unmarked, Ordering::Relaxed);
        } else {
            slot.unmarked.store(0, Ordering::Relaxed);
            crate::errno::preserved(|| self.mark(unmarked, stream));
        }
    }

    #[cold]
    fn mark(&self, weight: u32, stream: CUstream) {
        let mut context = core::ptr::null_mut();
        // SAFETY: a valid place.
        if unsafe { driver::cuCtxGetCurrent(&mut context) } != SUCCESS || context.is_null() {
            return;
        }
        let mut inner = self.inner.lock();
        let event = capture::beside(|_| inner.context(context).and_then(|c| c.event().ok()));
        let Some(event) = event else { return };
        if !record_behind(event, stream) {
            inner.give_back(event);
            return;
        }
        self.collect(&mut inner);
        if inner.marks.is_empty() {
            // The GPU keeps up, so marks are only a cost.
            let per_mark = self.per_mark.load(Ordering::Relaxed);
            self.per_mark.store((per_mark * 2).min(MOST_PER_MARK), Ordering::Relaxed);
        }
        let ahead = inner.outstanding.saturating_add(weight);
        inner.outstanding = ahead;
        inner.marks.push_back(Mark { event, since: Instant::now(), weight, ahead });
        if ahead > inner.window && inner.marks.len() > 1 {
            drop(inner);
            self.wait_for_oldest(stream);
        }
    }

    /// Waits until the oldest mark is done, and learns from how long it took. A mark may be behind a kernel that only
    /// ends when the program tells it to, perhaps by what this very thread does next: then nothing is bounded until it has.
    fn wait_for_oldest(&self, stream: CUstream) {
        let begin = Instant::now();
        let Some((since, ahead)) = self.inner.lock().marks.front().map(|m| (m.since, m.ahead)) else { return };
        loop {
            let mut inner = self.inner.lock();
            if inner.stalled == Some(since) {
                return;
            }
            self.collect(&mut inner);
            if inner.marks.front().is_none_or(|m| m.since != since) {
                let took = since.elapsed().as_micros().max(1);
                let run_ahead = self.run_ahead.load(Ordering::Relaxed);
                let fitting = u128::from(ahead) * u128::from(run_ahead) / took;
                let most = u128::from(inner.window.saturating_mul(2).min(MOST_WINDOW));
                self.set_window(&mut inner, fitting.clamp(2, most) as u32);
                return;
            }
            let waited = begin.elapsed();
            if waited > MARK_PATIENCE || (waited > OTHERS_PATIENCE && is_idle(stream)) {
                inner.stalled = Some(since);
                return;
            }
            drop(inner);
            // Tiny kernels are done within microseconds; for others a sleep is short against the window.
            if begin.elapsed() > Duration::from_micros(50) {
                time::sleep(Duration::from_micros(50));
            }
        }
    }

    fn set_window(&self, inner: &mut Inner, window: u32) {
        inner.window = window;
        self.per_mark.store((window / MARKS_PER_WINDOW).clamp(1, MOST_PER_MARK), Ordering::Relaxed);
    }

    /// Somebody waits for the GPU, or nobody does any more: the queue is kept shorter while somebody does.
    pub fn contend(&self, contended: bool) {
        let to = if contended { RUN_AHEAD_CONTENDED } else { RUN_AHEAD };
        let from = self.run_ahead.swap(to, Ordering::Relaxed);
        if to < from {
            let mut inner = self.inner.lock();
            let window = (inner.window / (from / to)).max(2);
            self.set_window(&mut inner, window);
        }
    }

    /// Takes out the marks that are done, in order.
    fn collect(&self, inner: &mut Inner) {
        while let Some(mark) = inner.marks.front() {
            if !mark.event.is_done() {
                break;
            }
            let (event, weight) = (mark.event, mark.weight);
            inner.marks.pop_front();
            inner.outstanding = inner.outstanding.saturating_sub(weight);
            inner.give_back(event);
            self.done.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// How many marks have been done so far; a drain that does not see it grow makes no progress.
    pub fn progress(&self) -> u64 {
        self.collect(&mut self.inner.lock());
        self.done.load(Ordering::Relaxed)
    }

    /// A fence behind everything submitted so far, or `None` where it cannot be made now: while a stream captures, say.
    pub fn fence(&self) -> Option<Fence> {
        let mut inner = self.inner.lock();
        let mut fence = Fence::default();
        let made = capture::beside(|capturing| {
            !capturing && inner.contexts.iter_mut().all(|c| c.fence(&mut fence.events).is_ok())
        });
        if !made {
            fence.events.drain(..).for_each(|event| inner.give_back(event));
        }
        made.then_some(fence)
    }

    /// Whether all of it is done. A fence that is done stays done and costs nothing to ask.
    pub fn is_done(&self, fence: &mut Fence) -> bool {
        let mut inner = self.inner.lock();
        while let Some(event) = fence.events.last().copied() {
            if inner.has(event.context) {
                if !event.is_done() {
                    return false;
                }
                inner.give_back(event);
            }
            fence.events.pop();
        }
        true
    }

    /// The program made a stream that does not wait for the legacy stream, or destroyed one.
    pub fn add_stream(&self, context: CUcontext, stream: CUstream) {
        if let Some(context) = self.inner.lock().context(context) {
            context.streams.push(stream as usize);
        }
    }

    pub fn remove_stream(&self, stream: CUstream) {
        for context in &mut self.inner.lock().contexts {
            context.streams.retain(|s| *s != stream as usize);
        }
    }

    /// No longer asked for: its events can be used again once done, so they are simply dropped with their context.
    pub fn forget(&self, fence: Fence) {
        let mut inner = self.inner.lock();
        for event in fence.events {
            inner.give_back(event);
        }
    }

    /// A context was created or retained.
    pub fn add_context(&self, context: CUcontext) {
        let mut inner = self.inner.lock();
        if !inner.has(context as usize) {
            inner.contexts.push(Context { handle: context as usize, events: Vec::new(), streams: Vec::new() });
        }
    }

    /// Runs a call that may destroy a context while nothing of ours uses it; the call says whether it did. Gives its result
    /// and, where a known context is gone, whether it was the last on this GPU.
    pub fn without(&self, context: CUcontext, call: impl FnOnce() -> (CUresult, bool)) -> (CUresult, Option<bool>) {
        let mut inner = self.inner.lock();
        let known = inner.has(context as usize);
        let (result, gone) = call();
        if !gone || !known {
            return (result, None);
        }
        // Its events went with it.
        inner.contexts.retain(|c| c.handle != context as usize);
        inner.marks.retain(|m| m.event.context != context as usize);
        inner.outstanding = inner.marks.iter().map(|m| m.weight).sum();
        (result, Some(inner.contexts.is_empty()))
    }

    pub fn has_context(&self, context: CUcontext) -> bool {
        self.inner.lock().has(context as usize)
    }

    /// The program's contexts on this GPU, to copy memory with.
    pub fn contexts(&self) -> Vec<CUcontext> {
        self.inner.lock().contexts.iter().map(|c| c.handle as CUcontext).collect()
    }
}

impl Inner {
    fn has(&self, context: usize) -> bool {
        self.contexts.iter().any(|c| c.handle == context)
    }

    fn context(&mut self, context: CUcontext) -> Option<&mut Context> {
        self.contexts.iter_mut().find(|c| c.handle == context as usize)
    }

    fn give_back(&mut self, event: Event) {
        if let Some(context) = self.context(event.context as CUcontext) {
            context.events.push(event.handle);
        }
    }
}

impl Context {
    /// Adds what tells when everything in this context is done; an error where nothing can tell.
    fn fence(&mut self, events: &mut Vec<Event>) -> Result<(), CUresult> {
        with_current(self.handle, || {
            if driver::address::cuCtxRecordEvent.address().is_some() {
                let handle = self.handle as CUcontext;
                // SAFETY: both are alive: contexts leave the list before they are destroyed.
                return self.record(events, |event| unsafe { driver::cuCtxRecordEvent(handle, event) });
            }
            // The legacy stream waits for every stream but these.
            let streams = self.streams.clone();
            core::iter::once(CTX_DEFAULT_STREAM as usize).chain(streams).try_for_each(|stream| {
                // SAFETY: streams leave the list before they are destroyed.
                self.record(events, |event| unsafe { driver::cuEventRecord(event, stream as CUstream) })
            })
        })
        .unwrap_or(Ok(()))
    }

    fn record(&mut self, events: &mut Vec<Event>, record: impl FnOnce(CUevent) -> CUresult) -> Result<(), CUresult> {
        let event = match self.event() {
            Ok(event) => event,
            Err(error) => return if is_dead(error) { Ok(()) } else { Err(error) },
        };
        match record(event.handle as CUevent) {
            SUCCESS => events.push(event),
            error => {
                self.events.push(event.handle);
                return if is_dead(error) { Ok(()) } else { Err(error) };
            }
        }
        Ok(())
    }

    /// An event of this context, which is current. Called beside no capture, see [`capture::beside`].
    fn event(&mut self) -> Result<Event, CUresult> {
        let handle = match self.events.pop() {
            Some(handle) => handle,
            None => {
                let mut event = core::ptr::null_mut();
                // SAFETY: a valid place.
                check(unsafe { driver::cuEventCreate(&mut event, EVENT_DISABLE_TIMING) })?;
                event as usize
            }
        };
        Ok(Event { context: self.handle, handle })
    }
}

/// Records behind everything the context was given; beside a capture, behind that stream only.
fn record_behind(event: Event, stream: CUstream) -> bool {
    let (context, handle) = (event.context as CUcontext, event.handle as CUevent);
    capture::beside(|capturing| {
        if !capturing {
            // SAFETY: both are alive; see `fence`.
            let result = unsafe { driver::cuCtxRecordEvent(context, handle) };
            if result != ERROR_NOT_FOUND {
                return result == SUCCESS;
            }
        } else if capture::is_capturing(stream) {
            return false;
        }
        // SAFETY: the program has just submitted to this stream.
        unsafe { driver::cuEventRecord(handle, stream) == SUCCESS }
    })
}

/// Whether all that this stream of the current context was given is done.
fn is_idle(stream: CUstream) -> bool {
    // SAFETY: the program has just submitted to this stream. A stream that captures is never asked.
    capture::beside(|capturing| {
        !(capturing && capture::is_capturing(stream)) && unsafe { driver::cuStreamQuery(stream) } == SUCCESS
    })
}

/// Runs `f` with that context current on this thread.
pub fn with_current<R>(context: usize, f: impl FnOnce() -> R) -> Option<R> {
    // SAFETY: a context that has not been destroyed.
    if unsafe { driver::cuCtxPushCurrent_v2(context as CUcontext) } != SUCCESS {
        return None;
    }
    let result = f();
    let mut popped = core::ptr::null_mut();
    unsafe { driver::cuCtxPopCurrent_v2(&mut popped) };
    Some(result)
}
