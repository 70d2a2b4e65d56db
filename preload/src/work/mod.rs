//! Work that was submitted to one GPU and may still run. This module limits the amount of work and
//! detects when it is done.
//!
//! Each submission records its stream as in use. A [`Point`] is an event in one stream. A single
//! event behind the work of all streams would be simpler, but neither kind of such an event is
//! usable. An event in the legacy stream adds dependencies between streams ([`is_marked_at_once`]).
//! `cuCtxRecordEvent` is forbidden during captures and missing before driver 12.5.
//!
//! [`marks`] limit the work. Every few submissions, a thread records a point in its stream. When too
//! much work is outstanding, the next submission waits for the oldest mark. The limit is a window of
//! submissions, about [`RUN_AHEAD`] µs of GPU time according to recent marks. This is far more than the
//! GPU needs to stay busy, and bounds the time that a revoke waits. All waits are short, because
//! running work may depend on the program's next call.
//!
//! [`fence`]s show when the work is done: a fence is a point in every stream with work. Before an
//! eviction, the driver is also queried ([`idle`]).
//!
//! [`streams`], [`contexts`]: the program's streams and contexts. [`capture`]: captures of streams
//! into graphs.

pub mod capture;
mod contexts;
#[cfg(test)]
pub mod fake;
mod fence;
mod idle;
mod marks;
mod point;
mod streams;

pub use contexts::{are_several as contexts_are_several, is_there as context_is_there};
pub use fence::Fence;
pub use idle::Passing;
pub use streams::{context_of, first_blocking_stream, is_marked_at_once, name_of};

use crate::{
    driver::types::*,
    sys::sync::{Mutex, Rank},
};
use alloc::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    vec::Vec,
};
use contexts::Dying;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use marks::{AbandonedWait, FIRST_WINDOW, Mark, RUN_AHEAD, Unmarked};
use point::{Context, Point};
use streams::{MIN_PRUNE_THRESHOLD, Recording, Stream, StreamState};

#[derive(Debug)]
pub struct Work {
    /// The number of submissions after which a thread records a mark. When this number decreases, the epoch
    /// ends.
    per_mark: AtomicU32,
    /// Microseconds of GPU time that may be queued, computed from `run_ahead_limit` and `contended`.
    run_ahead: AtomicU32,
    /// The scheduler's limit on `run_ahead`, and whether another client waits for the GPU.
    run_ahead_limit: AtomicU32,
    contended: AtomicBool,
    /// The number of finished marks: the measure of progress.
    done: AtomicU64,
    /// Whether too much work is outstanding, so that the next submission waits.
    full: AtomicBool,
    /// The longest recent time from a mark to its completion, in microseconds.
    slowest: AtomicU64,
    /// GPUs whose work may access memory of this GPU, one bit per GPU.
    peers: AtomicU64,
    /// Returns the work of another GPU. A function pointer, because the table of GPUs is in a higher layer.
    of_gpu: fn(u32) -> Option<&'static Work>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    contexts: Vec<Context>,
    /// Contexts that the program is destroying.
    dying: Vec<Dying>,
    /// Streams with submitted work that have not been found idle since the submission.
    streams: BTreeMap<Stream, StreamState>,
    /// Points that threads are recording.
    recording: Vec<Recording>,
    /// The last points of destroyed streams, whose work may still run.
    closed_streams: VecDeque<Arc<Point>>,
    marks: VecDeque<Mark>,
    unmarked: Unmarked,
    /// Submissions that unfinished marks cover, plus the submissions since the latest mark.
    outstanding: u32,
    /// The most submissions that may be outstanding before the next submission waits.
    window: u32,
    /// The longest recent duration of one submission, in microseconds, averaged over a mark.
    longest: u64,
    /// The oldest mark, if a thread has given up waiting for it.
    abandoned: Option<AbandonedWait>,
    /// The number of recent marks that finished soon after a thread gave up waiting for them. The marked
    /// work had been waiting for the thread's next submission.
    futile_waits: u32,
    /// When this many streams are known, idle streams are removed.
    prune_threshold: usize,
}

impl Work {
    pub const fn new(of_gpu: fn(u32) -> Option<&'static Work>) -> Self {
        Self {
            of_gpu,
            per_mark: AtomicU32::new(1),
            run_ahead: AtomicU32::new(RUN_AHEAD),
            run_ahead_limit: AtomicU32::new(u32::MAX),
            contended: AtomicBool::new(false),
            done: AtomicU64::new(0),
            full: AtomicBool::new(false),
            slowest: AtomicU64::new(0),
            peers: AtomicU64::new(0),
            inner: Mutex::new(
                Rank::Work,
                Inner {
                    contexts: Vec::new(),
                    dying: Vec::new(),
                    streams: BTreeMap::new(),
                    recording: Vec::new(),
                    closed_streams: VecDeque::new(),
                    marks: VecDeque::new(),
                    unmarked: Unmarked::NONE,
                    outstanding: 0,
                    window: FIRST_WINDOW,
                    longest: 0,
                    abandoned: None,
                    futile_waits: 0,
                    prune_threshold: MIN_PRUNE_THRESHOLD,
                },
            ),
        }
    }

    /// Records a submission to this stream.
    pub fn note(&self, handle: CUstream) {
        let Some(context) = context_of(handle) else { return };
        let stream = Stream::of(handle, context);
        let mut inner = self.inner.lock();
        let is_known = inner.has(stream.context);
        if !is_known {
            contexts::is_there(context);
            inner.contexts.push(Context::new(stream.context, true));
        }
        inner.prune_streams(stream);
        inner.streams.entry(stream).or_default().dirty = true;
        let needs_point = inner.needs_points_at_once(stream);
        drop(inner);
        if needs_point {
            self.point_in(stream);
        }
    }

    pub fn peers(&self) -> u64 {
        self.peers.load(Ordering::SeqCst)
    }

    fn peer_works(&self) -> impl Iterator<Item = &'static Work> + use<> {
        let (peers, of_gpu) = (self.peers(), self.of_gpu);
        (0..u64::BITS).filter(move |index| peers >> index & 1 == 1).filter_map(of_gpu)
    }

    pub fn set_peers(&self, gpus: u64) {
        self.peers.store(gpus, Ordering::SeqCst);
    }
}
