//! The queue of a GPU's work, and its limit.
//!
//! Every few submissions, a thread records a *mark*: a point in its stream. When too much work is
//! outstanding, the next submission waits for the oldest mark. The limit is a window of submissions,
//! about [`RUN_AHEAD`] µs of GPU time according to recent marks. This is far more than the GPU needs to
//! stay busy, and bounds the time that a revoke waits. All waits are short, because running work may
//! depend on the program's next call.

use super::{
    Inner, Work, context_of, epoch,
    fast::Thread,
    points::Point,
    streams::{Stream, is_idle},
};
use crate::{
    driver::types::*,
    sys::{
        errno,
        time::{self, Instant},
    },
};
use alloc::sync::Arc;
use core::{sync::atomic::Ordering, time::Duration};

/// The GPU time of the work that may be queued, in microseconds, while no other client waits for the
/// lock. While another client waits, `RUN_AHEAD_CONTENDED` applies.
pub(super) const RUN_AHEAD: u32 = 100_000;

const RUN_AHEAD_CONTENDED: u32 = 20_000;

/// The lowest limit that the scheduler can set, in microseconds. With less, the GPU would idle between
/// kernels.
const RUN_AHEAD_LEAST: u32 = 1_000;

/// The first window of a program, in submissions, while the duration of its kernels is unknown.
/// `MAX_WINDOW` is the largest window.
pub(super) const FIRST_WINDOW: u32 = 1;

const MAX_WINDOW: u32 = 4096;

/// The number of marks in a window. With more marks, the window advances in smaller steps. A mark is an
/// event and a few queries, and costs about as much as a launch. That cost is small if the window is
/// large, as it is for small kernels.
const MARKS_PER_WINDOW: u32 = 8;

/// Up to this number of pending marks, each due mark is recorded. Normally, no more marks are
/// pending. Each mark occupies an entry in the driver's queue, which has about a thousand. If the
/// work does not end, the spacing of marks doubles with every `MARKS_PER_DOUBLING` marks. A
/// thousand launches then need 40 marks, and a million launches need 70.
const FEW_MARKS: usize = 16;

const MARKS_PER_DOUBLING: usize = 3;

/// The initial timeout of a thread's wait for a mark. The timeout grows with the duration of recent
/// work and is halved each time it expires. Work that waits for the program's next submission is
/// therefore delayed by at most twice this time in total.
const MARK_TIMEOUT: Duration = Duration::from_millis(1500);

const MAX_MARK_TIMEOUT: Duration = Duration::from_secs(3);

/// After this many timeouts for one mark, threads no longer wait for it, because each wait would be
/// shorter than a sleep.
const MAX_HALVINGS: u32 = 15;

/// A waiting thread first polls continuously, then at `POLL_INTERVAL`, then at intervals of the elapsed
/// time divided by `POLL_PART`.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

const POLL_PART: u32 = 64;

const MAX_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The most commands that may be in a stream's queue when a point is recorded. A queue holds about 1,020
/// commands. The difference is reserved for submissions before a mark is due.
const MANY_COMMANDS: u32 = 1020 - MAX_WINDOW / MARKS_PER_WINDOW;

/// Work that ends this soon after a submission may have waited for that submission.
const PROMPTLY: Duration = Duration::from_millis(20);

/// The longest wait of a thread for work in other streams than its own.
const OTHERS_TIMEOUT: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) struct Mark {
    pub(super) point: Arc<Point>,
    pub(super) stream: Stream,
    pub(super) since: Instant,
    /// Submissions since the previous mark.
    pub(super) weight: u32,
    /// Upper bound on the commands that these submissions put into the queue.
    pub(super) commands: u32,
    /// Submissions that were outstanding when the mark was recorded, including the mark's own
    /// submissions.
    pub(super) ahead: u32,
}

/// Submissions since the latest mark, and the number of times that a mark was due since then.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unmarked {
    weight: u32,
    commands: u32,
    due: u32,
}

impl Unmarked {
    pub(super) const NONE: Self = Self { weight: 0, commands: 0, due: 0 };
}

#[derive(Debug)]
pub(super) struct AbandonedWait {
    /// The time at which the mark was recorded, and the time at which a thread first gave up waiting for
    /// it.
    pub(super) mark: Instant,
    pub(super) first: Instant,
    pub(super) times: u32,
}

impl Work {
    /// Called before a submission, outside the gate. Waits until the work that is outstanding now fits the
    /// window.
    pub(super) fn throttle(&self, stream: CUstream) {
        if self.is_full() {
            let begin = Instant::now();
            errno::preserve(|| while self.is_full() && self.wait_for_oldest(stream, begin) {});
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }

    /// Updates the number of submissions between this thread's marks. Submissions since its last mark still
    /// count.
    pub(super) fn renew_marks(&self, thread: &Thread) {
        let between = self.per_mark.load(Ordering::Relaxed) as i32 - 1;
        thread.unmarked_left.set(thread.unmarked_left.get() + between - thread.between_marks.get());
        thread.between_marks.set(between);
    }

    pub(super) fn mark(&self, weight: u32, commands: u32, stream: CUstream) {
        let Some(context) = context_of(stream) else { return };
        let mut inner = self.inner.lock();
        let stream = Stream::of(stream, context);
        if !inner.has(stream.context) {
            return; // a stream of another GPU
        }
        inner.unmarked.due += 1;
        let is_due = inner.unmarked.due >= spacing(inner.marks.len());
        if is_due || inner.is_oldest_done() {
            self.collect(&mut inner, false);
        }
        inner.outstanding = inner.outstanding.saturating_add(weight);
        inner.unmarked.weight = inner.unmarked.weight.saturating_add(weight);
        inner.unmarked.commands = inner.unmarked.commands.saturating_add(commands);
        if is_due {
            drop(inner);
            let point = self.point_of_mark(stream);
            inner = self.inner.lock();
            if let Some(point) = point {
                let Unmarked { weight, commands, .. } = core::mem::replace(&mut inner.unmarked, Unmarked::NONE);
                let ahead = inner.outstanding;
                inner.marks.push_back(Mark { point, stream, since: Instant::now(), weight, commands, ahead });
            }
        }
        inner.forget_unmarked();
        self.update_full(&mut inner, Instant::now());
    }

    /// Sets `full` if too much work is outstanding: more submissions than the window, or an
    /// unfinished mark that is older than the run-ahead limit.
    pub(super) fn update_full(&self, inner: &mut Inner, now: Instant) {
        let run_ahead = Duration::from_micros(self.run_ahead.load(Ordering::Relaxed).into());
        let old = inner.marks.front().is_some_and(|oldest| now - oldest.since > run_ahead);
        let full = (old || inner.outstanding > inner.window) && !inner.is_given_up();
        if full && !self.full.swap(true, Ordering::Relaxed) {
            epoch::end();
        } else if !full {
            self.full.store(false, Ordering::Relaxed);
        }
    }

    /// Waits until the oldest mark is done, and adapts the window to the duration. The wait is
    /// limited, because the mark may be behind a kernel that ends only after a further call of the
    /// program, perhaps this thread's next call. Returns whether the mark is done and was recorded
    /// no later than `newest`.
    fn wait_for_oldest(&self, stream: CUstream, newest: Instant) -> bool {
        let begin = Instant::now();
        let mut inner = self.inner.lock();
        // Marks found done here may have finished long ago, so their duration is not exact.
        self.collect(&mut inner, false);
        self.update_full(&mut inner, Instant::now());
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
            // Tiny kernels end within microseconds. For longer kernels, a sleep is short compared with the window.
            if waited > POLL_INTERVAL {
                time::sleep((waited / POLL_PART).clamp(POLL_INTERVAL, MAX_POLL_INTERVAL));
            }
            let mut inner = self.inner.lock();
            if inner.is_oldest_done() {
                self.collect(&mut inner, true);
            }
            if inner.marks.front().is_none_or(|m| m.since != oldest) {
                self.update_full(&mut inner, Instant::now());
                return true;
            }
            if waited > timeout || (waited > OTHERS_TIMEOUT && is_idle(stream)) {
                let first = first.unwrap_or_else(Instant::now);
                inner.abandoned = Some(AbandonedWait { mark: oldest, first, times: times + 1 });
                return false;
            }
        }
    }

    /// Adapts the window to a finished mark: `took` is its duration with `ahead` submissions outstanding.
    pub(super) fn learn(&self, inner: &mut Inner, took: Duration, ahead: u32, exact: bool) {
        let micros = (took.as_micros() as u64).max(1);
        let ahead = u64::from(ahead.max(1));
        if exact {
            self.note_duration(took);
            inner.longest = max_with_decay(inner.longest, micros / ahead);
        }
        let run_ahead = u64::from(self.run_ahead.load(Ordering::Relaxed));
        let fitting = ahead.saturating_mul(run_ahead) / micros;
        // The window at most doubles, so that little work is queued while the duration of the
        // kernels is unknown. The window is 0 if a single submission takes longer than the
        // run-ahead limit, or recently did. One short submission in between does not mean that
        // short submissions follow.
        let most = inner.window.saturating_mul(2).clamp(1, MAX_WINDOW).into();
        let window = if inner.longest < run_ahead { fitting.min(most) as u32 } else { 0 };
        self.set_window(inner, if exact { window } else { window.max(inner.window) });
    }

    pub(super) fn note_duration(&self, took: Duration) {
        let slowest = max_with_decay(self.slowest.load(Ordering::Relaxed), took.as_micros() as u64);
        self.slowest.store(slowest, Ordering::Relaxed);
    }

    /// Returns the longest recent time from submission to completion, or `None` if no work has completed.
    pub fn slowest(&self) -> Option<Duration> {
        let slowest = self.slowest.load(Ordering::Relaxed);
        (slowest > 0).then(|| Duration::from_micros(slowest))
    }

    pub(super) fn set_window(&self, inner: &mut Inner, window: u32) {
        inner.window = window;
        // A power of two, so that the value seldom decreases: a decrease must reach all threads.
        let per_mark = 1 << (window / MARKS_PER_WINDOW).max(1).ilog2();
        if per_mark < self.per_mark.swap(per_mark, Ordering::Relaxed) {
            epoch::end();
        }
    }

    /// Sets whether another client waits for the GPU. While one waits, less work is queued.
    pub fn set_contended(&self, contended: bool) {
        self.contended.store(contended, Ordering::Relaxed);
        self.bound_run_ahead();
    }

    /// Sets the most GPU time that may be queued, in microseconds. 0 removes the scheduler's limit.
    pub fn limit_run_ahead(&self, micros: u32) {
        self.run_ahead_limit.store(if micros == 0 { u32::MAX } else { micros.max(RUN_AHEAD_LEAST) }, Ordering::Relaxed);
        self.bound_run_ahead();
    }

    fn bound_run_ahead(&self) {
        let wanted = if self.contended.load(Ordering::Relaxed) { RUN_AHEAD_CONTENDED } else { RUN_AHEAD };
        let to = wanted.min(self.run_ahead_limit.load(Ordering::Relaxed));
        let from = self.run_ahead.swap(to, Ordering::Relaxed);
        if to < from {
            let mut inner = self.inner.lock();
            let window = inner.window.div_ceil(from / to);
            self.set_window(&mut inner, window);
        }
    }

    /// Collects finished marks if the queues of streams may be full.
    pub(super) fn find_room(&self, inner: &mut Inner) {
        if !inner.has_room() {
            self.collect(inner, false);
        }
    }

    /// Removes finished marks, and adapts the window to the latest of them. `waited` says that a thread
    /// waited for the mark and knows its duration. Otherwise the duration is an upper bound, so the window
    /// may grow but not shrink.
    pub(super) fn collect(&self, inner: &mut Inner, waited: bool) {
        let mut newest = None;
        let mut weight = 0;
        // Marks of one stream finish in order, so only the oldest mark of each stream is queried. The list is
        // so short that a linear search suffices.
        let mut pending: [Option<Stream>; FEW_MARKS] = [None; FEW_MARKS];
        let mut count = 0;
        inner.marks.retain(|mark| {
            if pending.contains(&Some(mark.stream)) {
                return true;
            }
            let done = mark.point.is_done();
            if done {
                newest = Some((mark.since, mark.ahead));
                weight += mark.weight;
                self.done.fetch_add(1, Ordering::Relaxed);
            } else if let Some(place) = pending.get_mut(count) {
                *place = Some(mark.stream);
                count += 1;
            }
            !done
        });
        inner.outstanding = inner.outstanding.saturating_sub(weight);
        inner.forget_unmarked();
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

    /// Returns the number of finished marks. If this number does not grow during a drain, the drain makes
    /// no progress.
    pub fn progress(&self) -> u64 {
        self.collect(&mut self.inner.lock(), false);
        self.done.load(Ordering::Relaxed)
    }
}

/// Returns the maximum of recent values. The maximum decays by an eighth with each smaller value.
fn max_with_decay(known: u64, seen: u64) -> u64 {
    seen.max(known - known / 8)
}

/// Returns the number of times that a mark must be due before one is recorded, while `pending` marks
/// are pending.
fn spacing(pending: usize) -> u32 {
    1 << (pending.saturating_sub(FEW_MARKS) / MARKS_PER_DOUBLING).min(31)
}

impl Inner {
    /// Whether any thread can record a point in any stream without waiting. The queues must have room even
    /// for the submissions that threads made since a mark was last due.
    pub(super) fn has_room(&self) -> bool {
        self.marks.iter().map(|mark| mark.commands.saturating_add(1)).fold(self.unmarked.commands, u32::saturating_add)
            < MANY_COMMANDS
    }

    fn is_oldest_done(&self) -> bool {
        self.marks.front().is_some_and(|oldest| oldest.point.is_done())
    }

    /// Stops counting the submissions since the latest mark if no mark is pending, because the
    /// library could not detect when they are done.
    fn forget_unmarked(&mut self) {
        if self.marks.is_empty() {
            (self.outstanding, self.unmarked) = (0, Unmarked::NONE);
        }
    }

    /// Whether threads no longer wait for the oldest mark, because its work may need a further call of the
    /// program.
    fn is_given_up(&self) -> bool {
        let waits = |abandoned: &AbandonedWait| self.futile_waits + abandoned.times;
        let oldest = self.marks.front().map(|mark| mark.since);
        self.abandoned.as_ref().is_some_and(|g| Some(g.mark) == oldest && waits(g) >= MAX_HALVINGS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_take_a_small_part_of_the_driver_queue() {
        let (mut marks, mut due) = (0, 0);
        for launches in 1.. {
            due += 1;
            if due >= spacing(marks) {
                (marks, due) = (marks + 1, 0);
            }
            match launches {
                16 => assert_eq!(marks, 16),
                970 => assert_eq!(marks, 40, "launches and marks are no more than the queue takes"),
                1_000_000 => {
                    assert!(marks < 72);
                    break;
                }
                _ => {}
            }
        }
    }
}
