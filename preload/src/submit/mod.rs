//! Submitting work to the GPUs. Work waits for the GPU lock and for memory at the gate of its GPU.
//! Submitted work may still run, so this module also limits the amount of work, and detects when it is
//! done.
//!
//! - [`fast`]: everything that a launch through an open gate executes. [`slow`]: everything that a
//!   launch does if it cannot take that path: it finds the GPU ([`target`]), and waits at the gate.
//! - [`gate`]: closing and opening a gate. [`barrier`]: the fence between a thread that passes a gate and
//!   a thread that closes it. [`threads`]: the list of the program's threads.
//! - [`queue`]: marks, which limit the work in the queues. [`drain`]: fences, which show when the work is
//!   done.
//! - [`streams`], [`contexts`]: the program's streams and contexts. [`points`]: events in them.
//!   [`captures`]: captures of streams into graphs.
//!
//! Each submission records its stream as in use. A [`Point`] is an event in one stream. A single
//! event behind the work of all streams would be simpler, but neither kind of such an event is
//! usable. An event in the legacy stream adds dependencies between streams ([`is_marked_at_once`]).
//! `cuCtxRecordEvent` is forbidden during captures and missing before driver 12.5.

pub mod atomic;
pub mod barrier;
pub mod captures;
mod contexts;
mod drain;
#[cfg(test)]
pub mod fake;
pub mod fast;
mod gate;
mod points;
mod queue;
pub mod slow;
mod streams;
pub mod target;
pub mod threads;

pub use captures::context_of;
pub use drain::Fence;
pub use fast::{Gate, closed, epoch};
pub use streams::{expect_blocking_streams, is_marked_at_once};

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
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use nvshare_wire::MAX_SLOTS;
use points::{Context, Point};
use queue::{AbandonedWait, FIRST_WINDOW, Mark, RUN_AHEAD, Unmarked};
use streams::{MIN_PRUNE_THRESHOLD, Recording, Stream, StreamState};

/// `false` before CUDA is initialised, if nvshare is disabled, and in the child of a fork, where the
/// driver does not work either. Every hook then passes its call to the driver unchanged.
static ACTIVE: AtomicBool = AtomicBool::new(false);

/// Whether this library gates work and moves memory in this process.
#[inline]
pub fn is_active() -> bool {
    ACTIVE.load(Ordering::Relaxed)
}

pub fn set_active(active: bool) {
    ACTIVE.store(active, Ordering::SeqCst);
}

/// The number of GPUs that a process can use.
pub const GPUS: usize = MAX_SLOTS as usize;

/// A GPU, as far as submissions are concerned.
#[derive(Debug)]
pub struct Lane {
    /// The driver's ordinal of the GPU in this process, which is also the GPU's slot in the
    /// protocol.
    pub index: u32,
    pub gate: Gate,
    pub work: Work,
    /// Whether the program has ever created a context on this GPU.
    attached: AtomicBool,
    /// Whether this GPU has been introduced to the connected scheduler.
    introduced: AtomicBool,
    /// Whether a request for the lock is pending.
    requested: AtomicBool,
    /// The time of the last request for the lock, in microseconds.
    requested_at: AtomicU64,
    /// The time at which this client last released the lock after using it, in milliseconds; 0 if never.
    used_until: AtomicU64,
    /// Whether the gate has been closed and all work has ended since then.
    drained: AtomicBool,
    /// The error of calls that wait for this GPU's memory; `SUCCESS` if they may wait.
    failure: AtomicI32,
}

/// The lanes of all GPUs, by the ordinals.
pub static LANES: [Lane; GPUS] = {
    let mut lanes = [const { Lane::new() }; GPUS];
    let mut i = 0;
    while i < lanes.len() {
        lanes[i].index = i as u32;
        i += 1;
    }
    lanes
};

/// Iterates over the lanes of the GPUs that this process uses.
fn lanes_in_use() -> impl Iterator<Item = &'static Lane> {
    LANES.iter().filter(|lane| lane.is_attached())
}

/// Opens every gate permanently.
pub fn open_all() {
    LANES.iter().for_each(|lane| lane.gate.open(closed::FOR_ALL));
}

impl Lane {
    const fn new() -> Self {
        Self {
            index: 0,
            gate: Gate::new(),
            work: Work::new(),
            attached: AtomicBool::new(false),
            introduced: AtomicBool::new(false),
            requested: AtomicBool::new(false),
            requested_at: AtomicU64::new(0),
            used_until: AtomicU64::new(0),
            drained: AtomicBool::new(true),
            failure: AtomicI32::new(SUCCESS),
        }
    }

    pub fn is_attached(&self) -> bool {
        self.attached.load(Ordering::SeqCst)
    }

    /// Called when the program first creates a context on this GPU.
    pub fn set_attached(&self) {
        self.attached.store(true, Ordering::SeqCst);
    }

    pub fn is_introduced(&self) -> bool {
        self.introduced.load(Ordering::SeqCst)
    }

    pub fn set_introduced(&self, introduced: bool) {
        self.introduced.store(introduced, Ordering::SeqCst);
    }

    /// Sets the error of calls that wait for this GPU's memory; `SUCCESS` if they may wait.
    pub fn set_failure(&self, failure: CUresult) {
        self.failure.store(failure, Ordering::SeqCst);
    }

    pub fn failure(&self) -> CUresult {
        self.failure.load(Ordering::SeqCst)
    }

    /// Iterates over the lanes of this GPU's peers.
    fn peers(&self) -> impl Iterator<Item = &'static Lane> + use<> {
        self.work.peer_lanes()
    }
}

/// Work that was submitted to one GPU and may still run.
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
    pub const fn new() -> Self {
        Self {
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

    pub fn peers(&self) -> u64 {
        self.peers.load(Ordering::SeqCst)
    }

    pub fn set_peers(&self, gpus: u64) {
        self.peers.store(gpus, Ordering::SeqCst);
    }

    pub fn peer_lanes(&self) -> impl Iterator<Item = &'static Lane> + use<> {
        let peers = self.peers();
        let last = (u64::BITS - peers.leading_zeros()) as usize;
        LANES.iter().take(last).filter(move |lane| peers >> lane.index & 1 == 1)
    }

    fn peer_works(&self) -> impl Iterator<Item = &'static Work> + use<> {
        self.peer_lanes().map(|lane| &lane.work)
    }
}
