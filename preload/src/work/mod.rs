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
mod contexts;
mod fence;
mod marks;
mod point;
mod streams;

pub use fence::Fence;
pub use streams::{context_of, name_of};

use crate::{driver::types::*, sys::sync::Mutex};
use alloc::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    vec::Vec,
};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use marks::{AbandonedWait, FIRST_WINDOW, Mark, RUN_AHEAD};
use point::{Context, Point};
use streams::{MIN_PRUNE_THRESHOLD, Stream, StreamState};

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
    streams: BTreeMap<Stream, StreamState>,
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

    pub fn peers(&self) -> u64 {
        self.peers.load(Ordering::SeqCst)
    }

    pub fn set_peers(&self, gpus: u64) {
        self.peers.store(gpus, Ordering::SeqCst);
    }
}
