//! Marks: bounding how much work may be queued ahead of the GPU.

use super::point::Point;
use super::{Inner, Work, capture, context_of, streams::Stream};
use crate::{
    driver::{self, types::*},
    gate::{epoch, threads},
    sys::time::{self, Instant},
};
use alloc::sync::Arc;
use core::{sync::atomic::Ordering, time::Duration};

/// How much GPU time may be queued ahead while nobody waits, and while somebody does.
pub(super) const RUN_AHEAD: u32 = 100_000;

const RUN_AHEAD_CONTENDED: u32 = 20_000;

/// Submissions between two marks. A mark is an event and a few queries, so it costs about as much as a launch.
const MAX_PER_MARK: u32 = 64;

/// The window a program starts with, in submissions, before anything is known about its kernels, and the largest.
pub(super) const FIRST_WINDOW: u32 = 1;

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
pub(super) struct Mark {
    pub(super) point: Arc<Point>,
    pub(super) since: Instant,
    /// Submissions since the mark before.
    pub(super) weight: u32,
    /// Submissions that were outstanding when it was recorded, its own included.
    pub(super) ahead: u32,
}

#[derive(Debug)]
pub(super) struct AbandonedWait {
    /// When the mark was made, and when it was first waited for no longer.
    pub(super) mark: Instant,
    pub(super) first: Instant,
    pub(super) times: u32,
}

impl Work {
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
    pub(super) fn mark(&self, weight: u32, stream: CUstream) {
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
    pub(super) fn update_full(&self, inner: &mut Inner) {
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
    pub(super) fn learn(&self, inner: &mut Inner, took: Duration, ahead: u32, exact: bool) {
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

    pub(super) fn note_duration(&self, took: Duration) {
        let slowest = decaying_max(self.slowest.load(Ordering::Relaxed), took.as_micros() as u64);
        self.slowest.store(slowest, Ordering::Relaxed);
    }

    /// The longest that submitted work took lately; `None` before that was ever seen.
    pub fn slowest(&self) -> Option<Duration> {
        let slowest = self.slowest.load(Ordering::Relaxed);
        (slowest > 0).then(|| Duration::from_micros(slowest))
    }

    pub(super) fn set_window(&self, inner: &mut Inner, window: u32) {
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
    pub(super) fn collect(&self, inner: &mut Inner, waited: bool) {
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
}

/// The largest of the figures seen lately: one that is not seen again is forgotten little by little.
fn decaying_max(known: u64, seen: u64) -> u64 {
    seen.max(known - known / 8)
}

/// Whether all that this stream of the current context was given is done.
fn is_idle(stream: CUstream) -> bool {
    // SAFETY: the program has just submitted to this stream. A stream that captures is never asked.
    capture::beside(|capturing| {
        !(capturing && capture::is_capturing(stream)) && unsafe { driver::cuStreamQuery(stream) } == SUCCESS
    })
}
