//! Work that was submitted to one GPU and may still run: limits it, and detects when it is done.
//!
//! Each submission notes its stream. A [`Point`] is an event in one of them. An event behind *everything* would be
//! simpler, but an event in the legacy stream makes streams wait for each other that otherwise would not
//! ([`is_marked_at_once`]), and `cuCtxRecordEvent` is forbidden during any capture and missing before driver 12.5.
//!
//! [`marks`] limit the work. Every few submissions a thread records a point in its stream; when too much is
//! outstanding, the next submission waits for the oldest mark. The limit is a window of submissions, derived from the
//! time that marks took: about [`RUN_AHEAD`] µs of GPU time, which is far more than the GPU needs to stay busy, and
//! bounds how long a revoke waits. No wait is long, because running work may depend on the program's next call.
//!
//! [`fence`]s tell when it is done: a point in every stream that was given work. Before memory is evicted, the driver
//! is queried too ([`idle`]).
//!
//! [`streams`], [`contexts`]: the program's streams and contexts. [`capture`]: captures of streams into graphs.

pub mod capture;
mod contexts;
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
    /// Submissions of one thread after which it records a mark. An epoch ends when it decreases.
    per_mark: AtomicU32,
    /// Microseconds of GPU time that may be queued; follows from `run_ahead_limit` and `contended`.
    run_ahead: AtomicU32,
    /// The scheduler's limit on it, and whether another client waits for the GPU.
    run_ahead_limit: AtomicU32,
    contended: AtomicBool,
    /// Marks that were seen done: the measure of progress.
    done: AtomicU64,
    /// Too much is outstanding: the next submission waits.
    full: AtomicBool,
    /// The longest recent time from a mark to its completion, in microseconds.
    slowest: AtomicU64,
    /// GPUs whose work may access memory of this one, as bits.
    peers: AtomicU64,
    /// Returns the work of another GPU: the table of GPUs is in a layer above.
    of_gpu: fn(u32) -> Option<&'static Work>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    contexts: Vec<Context>,
    /// Contexts that the program is destroying.
    dying: Vec<Dying>,
    /// Streams that were given work and have not been seen idle since.
    streams: BTreeMap<Stream, StreamState>,
    /// Points that threads are recording.
    recording: Vec<Recording>,
    /// The last points of streams that were destroyed, whose work may still run.
    closed_streams: VecDeque<Arc<Point>>,
    marks: VecDeque<Mark>,
    unmarked: Unmarked,
    /// Submissions that unfinished marks cover, plus the submissions behind the newest mark.
    outstanding: u32,
    /// Submissions that may be outstanding when another is made.
    window: u32,
    /// The longest recent time of one submission, in microseconds, as the mean over a mark.
    longest: u64,
    /// The oldest mark, once a thread has given up waiting for it.
    abandoned: Option<AbandonedWait>,
    /// The number of recent marks that finished soon after a thread gave up waiting for them: their work had needed the
    /// thread's next submission.
    futile_waits: u32,
    /// The number of known streams above which idle ones are removed.
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

    /// Notes a submission to this stream.
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
