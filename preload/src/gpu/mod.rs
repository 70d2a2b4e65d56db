//! One GPU as this client uses it: its gate, its work and its memory, and the table of all GPUs by the driver's ordinal.
//!
//! - [`info`]: what a GPU is; [`unsupported`]: the GPUs that this library leaves alone.
//! - [`attach`]: the program begins to use a GPU. [`peers`]: GPUs that reach each other's memory.
//! - [`lock_request`]: waiting at the gate; [`submission`]: what passes it.
//! - [`report`]: the account of memory, reported to the scheduler.
//! - [`limit_request`]: asking for a higher memory limit; [`reservation`]: asking for memory that the driver needs for
//!   itself; [`answers`] to either.
//! - [`memory_limits`]: what bounds the program's memory; [`memory_info`]: what the program is told of it.

pub mod answers;
pub mod attach;
pub mod info;
pub mod limit_request;
mod lock_request;
pub mod memory_info;
pub mod memory_limits;
pub mod peers;
mod report;
pub mod reservation;
mod submission;
pub mod unsupported;

use crate::{
    driver::{self, types::*},
    gate::{Gate, closed, threads},
    memory::{account::Account, mover::Mover, space::Space},
    sys::sync::{Mutex, OnceLock},
    work::{Work, capture},
};
use answers::{LimitAnswers, ReservationAnswers};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use info::Info;
use nvshare_wire::{MAX_SLOTS, Uuid};

#[derive(Debug)]
pub struct Gpu {
    /// The driver's ordinal in this process, and the slot the scheduler knows it by.
    pub index: u32,
    pub gate: Gate,
    pub work: Work,
    /// Made when it is first asked for; `None` in it where this library stands aside.
    info: OnceLock<Option<Info>>,
    /// Set when the program first creates a context here.
    attached: OnceLock<()>,
    space: OnceLock<Mutex<Space>>,
    /// What moves the memory. A context that it works in must not go before it has left.
    pub moving: Mutex<Mover>,
    primary: AtomicUsize,
    /// The scheduler of this connection knows this GPU.
    introduced: AtomicBool,
    introducing: Mutex<()>,
    /// A request is with the scheduler.
    requested: AtomicBool,
    /// When that was, in microseconds.
    requested_at: AtomicU64,
    /// Whether there is room for a context: see [`attach`].
    admission: AtomicU32,
    /// Nothing of this client runs: the gate has been closed and everything has drained since.
    drained: AtomicBool,
    unreported: AtomicBool,
    /// What the scheduler says to wishes for a higher limit.
    pub limit_answers: LimitAnswers,
    /// So many bytes cannot be mapped, the scheduler says; 0: it has said nothing of that.
    unmappable: AtomicU64,
    /// And to calls in which the driver found no memory.
    pub reservation_answers: ReservationAnswers,
    /// When this client last gave the lock of this GPU back after using it, in milliseconds; 0 before.
    used_until: AtomicU64,
    /// Of the threads that wait at the gate, those that only allocate.
    allocating: AtomicU32,
}

const NONE: i32 = -1;
const SEVERAL: i32 = -2;
/// The only GPU this process uses, if there is just one: then a launch need not ask the driver where it goes.
static ONLY: AtomicI32 = AtomicI32::new(NONE);

static GPUS: [Gpu; MAX_SLOTS as usize] = {
    let mut gpus = [const { Gpu::new() }; MAX_SLOTS as usize];
    let mut i = 0;
    while i < gpus.len() {
        gpus[i].index = i as u32;
        i += 1;
    }
    gpus
};

/// The GPU of that ordinal, once a context was created there.
pub fn by_ordinal(device: CUdevice) -> Option<&'static Gpu> {
    find(device).filter(|g| g.is_attached())
}

/// The GPU of that ordinal, whether it is used or not, where its memory is in this library's hands or will be.
pub fn managed(device: CUdevice) -> Option<&'static Gpu> {
    let gpu = find(device)?;
    gpu.identify(device).filter(|info| info.engine.is_some()).map(|_| gpu)
}

/// The same by what it is known by outside of this process.
pub fn managed_by_uuid(uuid: Uuid) -> Option<&'static Gpu> {
    let mut count = 0;
    // SAFETY: a valid place.
    unsafe { driver::cuDeviceGetCount(&mut count) };
    (0..count.min(MAX_SLOTS as i32)).filter_map(managed).find(|gpu| gpu.uuid() == Some(uuid))
}

/// Those that this process uses.
pub fn attached() -> impl Iterator<Item = &'static Gpu> {
    GPUS.iter().filter(|g| g.is_attached())
}

/// The GPU of the calling thread's current context.
#[inline]
pub fn current() -> Option<&'static Gpu> {
    match ONLY.load(Ordering::Relaxed) {
        NONE => None,
        SEVERAL => {
            let mut device = 0;
            // SAFETY: a valid place.
            (unsafe { driver::cuCtxGetDevice(&mut device) } == SUCCESS).then(|| by_ordinal(device)).flatten()
        }
        only => GPUS.get(only as usize),
    }
}

/// The GPU of that ordinal, whether it is used or not.
fn find(device: CUdevice) -> Option<&'static Gpu> {
    GPUS.get(usize::try_from(device).ok()?)
}

/// The work of a GPU that this process uses.
fn work_of(index: u32) -> Option<&'static Work> {
    GPUS.get(index as usize).filter(|gpu| gpu.is_attached()).map(|gpu| &gpu.work)
}

/// This process uses that GPU from now on.
fn now_in_use(index: u32) {
    let _ = ONLY.compare_exchange(NONE, index as i32, Ordering::AcqRel, Ordering::Acquire).map_err(|_| {
        ONLY.store(SEVERAL, Ordering::Release);
    });
}

/// Whether this process uses more than one GPU.
pub fn are_several() -> bool {
    ONLY.load(Ordering::Relaxed) == SEVERAL
}

/// Opens every gate for good.
pub fn open_all() {
    GPUS.iter().for_each(|gpu| gpu.gate.open(closed::FOR_ALL));
}

impl Gpu {
    const fn new() -> Self {
        Self {
            index: 0,
            gate: Gate::new(),
            work: Work::new(work_of),
            info: OnceLock::new(),
            attached: OnceLock::new(),
            space: OnceLock::new(),
            moving: Mutex::new(Mover::new()),
            primary: AtomicUsize::new(0),
            introduced: AtomicBool::new(false),
            introducing: Mutex::new(()),
            requested: AtomicBool::new(false),
            requested_at: AtomicU64::new(0),
            admission: AtomicU32::new(0),
            drained: AtomicBool::new(true),
            unreported: AtomicBool::new(false),
            limit_answers: LimitAnswers::new(),
            unmappable: AtomicU64::new(0),
            reservation_answers: ReservationAnswers::new(),
            used_until: AtomicU64::new(0),
            allocating: AtomicU32::new(0),
        }
    }

    fn info(&self) -> Option<&Info> {
        self.info.get()?.as_ref()
    }

    pub fn is_attached(&self) -> bool {
        self.attached.get().is_some()
    }

    pub fn uuid(&self) -> Option<Uuid> {
        self.info().map(|i| i.uuid)
    }

    pub fn total(&self) -> u64 {
        self.info().map_or(0, |i| i.total)
    }

    /// How the program's bytes stand here, once it uses this GPU and an engine can move them.
    pub fn account(&self) -> Option<Account> {
        self.space().map(|space| space.lock().account)
    }

    /// The most of this GPU's memory that anybody lets the program have; `u64::MAX` where nobody says.
    pub fn bound(&self) -> u64 {
        if let Some(account) = self.account() {
            return account.at_most(u64::MAX);
        }
        let Some(info) = self.info() else { return u64::MAX };
        let ruled = memory_limits::of(info.uuid);
        info.env_max.min(if ruled == 0 { u64::MAX } else { ruled })
    }

    /// The memory of this GPU, where an engine can move it.
    pub fn space(&self) -> Option<&Mutex<Space>> {
        self.space.get()
    }

    /// Whether other devices may be given its allocations.
    pub fn is_rdma_capable(&self) -> bool {
        self.space().is_some_and(|space| space.lock().is_rdma_capable())
    }

    /// The primary context, if the program has retained it.
    pub fn primary(&self) -> Option<CUcontext> {
        match self.primary.load(Ordering::Acquire) {
            0 => None,
            context => Some(context as CUcontext),
        }
    }

    pub fn set_primary(&self, context: CUcontext) {
        self.primary.store(context as usize, Ordering::Release);
    }

    /// GPUs whose work may touch memory of this one, and the other way round.
    pub fn peers(&self) -> impl Iterator<Item = &'static Gpu> + use<> {
        let set = self.work.peers();
        let last = u64::BITS - set.leading_zeros();
        GPUS.iter().take(last as usize).filter(move |gpu| set >> gpu.index & 1 == 1)
    }

    pub fn is_peer_of(&self, other: &Gpu) -> bool {
        self.work.peers() >> other.index & 1 == 1
    }

    /// Submissions of all threads to this GPU and its peers so far.
    pub fn submitted(&self) -> u64 {
        self.peers().fold(threads::submitted(self.index), |sum, gpu| sum.wrapping_add(threads::submitted(gpu.index)))
    }

    /// Whether no thread is inside the gate of this GPU, or of one whose work may touch its memory.
    pub fn is_quiet(&self) -> bool {
        Gate::is_quiet(self.index) && self.peers().all(|gpu| Gate::is_quiet(gpu.index))
    }

    /// Threads that wait at its gate, or at one of its peers'.
    pub fn waiting(&self) -> u32 {
        self.peers().fold(self.gate.waiting(), |sum, gpu| sum.saturating_add(gpu.gate.waiting()))
    }

    pub fn set_drained(&self, drained: bool) {
        self.drained.store(drained, Ordering::SeqCst);
    }

    /// Whether this client has nothing running here, nor anything that touches memory here, and cannot start any.
    pub fn is_drained(&self) -> bool {
        // Closed for the lock: what is closed for memory alone may have work that was submitted before.
        let is_shut = |gpu: &Gpu| gpu.drained.load(Ordering::SeqCst) && gpu.gate.is_closed_for(closed::LOCK);
        is_shut(self) && self.peers().all(is_shut) && self.is_quiet() && !capture::any()
    }
}
