//! The state of one GPU in this client: its gate, its work and its memory. Also the table of all GPUs,
//! by the driver's ordinal.
//!
//! - [`which`]: finds the GPU that a call concerns.
//! - [`info`]: properties of a GPU. [`identity`]: its UUID, which may change when the process is
//!   restored. [`unsupported`]: GPUs that this library does not manage.
//! - [`attach`]: the program's first use of a GPU. [`proof`]: the proof that it may use the GPU.
//!   [`peers`]: GPUs that access each other's memory.
//! - [`lock_request`]: waiting at the gate. [`submission`]: recording the work that passes the gate.
//! - [`report`]: reporting the memory account to the scheduler.
//! - [`limit_request`]: requests for a higher limit. [`reservation`]: requests for memory that the
//!   driver needs. [`answers`]: the answers to both.
//! - [`memory_limits`]: limits on the program's memory. [`memory_info`]: the sizes that the program sees.

pub mod answers;
pub mod attach;
#[cfg(test)]
pub mod fake;
pub mod identity;
pub mod info;
pub mod limit_request;
mod lock_request;
pub mod memory_info;
pub mod memory_limits;
pub mod peers;
pub mod proof;
mod report;
pub mod reservation;
mod submission;
pub mod unsupported;
mod which;

pub use which::{are_several, current, device_of, of_context, of_stream};

use crate::{
    driver::{self, types::*},
    gate::{Gate, closed, threads},
    memory::{account::Account, mover::Mover, space::Space},
    sys::{
        once::OnceBox,
        sync::{Mutex, Rank},
    },
    work::{Work, capture},
};
use alloc::vec::Vec;
use answers::{LimitAnswers, ReservationAnswers};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use info::Info;
use nvshare_wire::{MAX_SLOTS, Uuid};

#[derive(Debug)]
pub struct Gpu {
    /// The driver's ordinal of the GPU in this process, which is also the GPU's slot in the
    /// protocol.
    pub index: u32,
    pub gate: Gate,
    pub work: Work,
    /// Queried on first use. The inner `None` means that this library does not support the GPU.
    info: OnceBox<Option<Info>>,
    /// Whether the program has ever created a context on this GPU.
    attached: AtomicBool,
    attaching: Mutex<()>,
    space: OnceBox<Mutex<Space>>,
    /// The mover. The mover must stop using a context before the context is destroyed.
    pub moving: Mutex<Mover>,
    primary: AtomicUsize,
    /// Whether this GPU has been introduced to the connected scheduler.
    introduced: AtomicBool,
    introducing: Mutex<()>,
    /// Whether a request for the lock is pending.
    requested: AtomicBool,
    /// The time of the last request for the lock, in microseconds.
    requested_at: AtomicU64,
    /// The scheduler's answer to the request for a context; see [`attach`].
    admission: AtomicU32,
    /// Whether the gate has been closed and all work has ended since then.
    drained: AtomicBool,
    unreported: AtomicBool,
    /// The scheduler's answers to requests for a higher limit.
    pub limit_answers: LimitAnswers,
    /// The number of bytes that the scheduler has declared impossible to map; 0 for none.
    unmappable: AtomicU64,
    /// The scheduler's answers to requests for memory that the driver needs.
    pub reservation_answers: ReservationAnswers,
    /// The time at which this client last released the lock after using it, in milliseconds; 0 if never.
    used_until: AtomicU64,
}

static GPUS: [Gpu; MAX_SLOTS as usize] = {
    let mut gpus = [const { Gpu::new() }; MAX_SLOTS as usize];
    let mut i = 0;
    while i < gpus.len() {
        gpus[i].index = i as u32;
        i += 1;
    }
    gpus
};

/// Returns the GPU with that ordinal, if the program has created a context there.
pub fn by_ordinal(device: CUdevice) -> Option<&'static Gpu> {
    find(device).filter(|g| g.is_attached())
}

/// Returns the GPU with that ordinal, used or not, if this library manages its memory or will do so.
pub fn managed(device: CUdevice) -> Option<&'static Gpu> {
    let gpu = find(device)?;
    gpu.identify(device).filter(|info| info.engine.is_some()).map(|_| gpu)
}

/// Returns the GPU with that UUID, if this library manages its memory or will do so.
pub fn managed_by_uuid(uuid: Uuid) -> Option<&'static Gpu> {
    let mut count = 0;
    // SAFETY: `count` outlives the call.
    unsafe { driver::cuDeviceGetCount(&mut count) };
    (0..count.min(MAX_SLOTS as i32)).filter_map(managed).find(|gpu| gpu.uuid() == Some(uuid))
}

/// Iterates over the GPUs that this process uses.
pub fn attached() -> impl Iterator<Item = &'static Gpu> {
    GPUS.iter().filter(|g| g.is_attached())
}

/// Updates the identities after a possible restore of the process. Returns each attached GPU with
/// its UUIDs before and after the update. Takes no lock, and may be called while calls into the
/// driver are blocked.
pub fn look_again() -> Vec<(&'static Gpu, Uuid, Uuid)> {
    identity::may_have_changed();
    let learned = GPUS.iter().filter_map(|gpu| Some((gpu, gpu.info()?.identity.ask(gpu.index as CUdevice))));
    learned.filter(|(gpu, _)| gpu.is_attached()).map(|(gpu, (before, now))| (gpu, before, now)).collect()
}

/// Returns the GPU with that ordinal, used or not.
fn find(device: CUdevice) -> Option<&'static Gpu> {
    GPUS.get(usize::try_from(device).ok()?)
}

/// Returns the work of a GPU that this process uses.
fn work_of(index: u32) -> Option<&'static Work> {
    GPUS.get(index as usize).filter(|gpu| gpu.is_attached()).map(|gpu| &gpu.work)
}

/// Opens every gate permanently.
pub fn open_all() {
    GPUS.iter().for_each(|gpu| gpu.gate.open(closed::FOR_ALL));
}

impl Gpu {
    const fn new() -> Self {
        Self {
            index: 0,
            gate: Gate::new(),
            work: Work::new(work_of),
            info: OnceBox::new(),
            attached: AtomicBool::new(false),
            attaching: Mutex::new(Rank::Attachment, ()),
            space: OnceBox::new(),
            moving: Mutex::new(Rank::Mover, Mover::new()),
            primary: AtomicUsize::new(0),
            introduced: AtomicBool::new(false),
            introducing: Mutex::new(Rank::Introduction, ()),
            requested: AtomicBool::new(false),
            requested_at: AtomicU64::new(0),
            admission: AtomicU32::new(0),
            drained: AtomicBool::new(true),
            unreported: AtomicBool::new(false),
            limit_answers: LimitAnswers::new(),
            unmappable: AtomicU64::new(0),
            reservation_answers: ReservationAnswers::new(),
            used_until: AtomicU64::new(0),
        }
    }

    fn info(&self) -> Option<&Info> {
        self.info.get()?.as_ref()
    }

    pub fn is_attached(&self) -> bool {
        self.attached.load(Ordering::Acquire)
    }

    pub fn uuid(&self) -> Option<Uuid> {
        self.info().map(|info| info.identity.get())
    }

    /// Called when this slot has become another GPU. Answers about the previous GPU are no longer valid.
    /// Pending requests stay pending, because the scheduler that moved this process knows them.
    pub fn has_moved(&self) {
        self.forget_denials();
        self.reservation_answers.forget();
        if let (Some(space), Some(uuid)) = (self.space(), self.uuid()) {
            space.lock().account.max = memory_limits::of(uuid);
        }
    }

    pub fn total(&self) -> u64 {
        self.info().map_or(0, |i| i.total)
    }

    /// Returns the memory account, if the program uses this GPU and an engine can move its memory.
    pub fn account(&self) -> Option<Account> {
        self.space().map(|space| space.lock().account)
    }

    /// Returns the limit on the program's memory on this GPU, in bytes; `u64::MAX` for none.
    pub fn bound(&self) -> u64 {
        if let Some(account) = self.account() {
            return account.at_most(u64::MAX);
        }
        let Some(info) = self.info() else { return u64::MAX };
        let ruled = memory_limits::of(info.identity.get());
        info.env_max.min(if ruled == 0 { u64::MAX } else { ruled })
    }

    /// The memory of this GPU, if an engine can move it.
    pub fn space(&self) -> Option<&Mutex<Space>> {
        self.space.get()
    }

    /// Releases unused memory of pools. Returns the number of bytes.
    pub fn release_pools(&self) -> u64 {
        let Some(space) = self.space() else { return 0 };
        let mut guard = space.lock();
        let before = guard.account;
        let released = guard.release_pools(&self.work);
        let after = guard.account;
        self.account_changed(&before, &after);
        released
    }

    /// Whether other devices can access allocations (GPUDirect RDMA).
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

    /// Iterates over the peers of this GPU (see [`mod@peers`]).
    pub fn peers(&self) -> impl Iterator<Item = &'static Gpu> + use<> {
        let set = self.work.peers();
        let last = u64::BITS - set.leading_zeros();
        GPUS.iter().take(last as usize).filter(move |gpu| set >> gpu.index & 1 == 1)
    }

    pub fn is_peer_of(&self, other: &Gpu) -> bool {
        self.work.peers() >> other.index & 1 == 1
    }

    /// The number of submissions of all threads to this GPU and its peers.
    pub fn submitted(&self) -> u64 {
        self.peers().fold(threads::submitted(self.index), |sum, gpu| sum.wrapping_add(threads::submitted(gpu.index)))
    }

    /// Whether no thread is inside the gate of this GPU or of a peer.
    pub fn is_quiet(&self) -> bool {
        Gate::is_quiet(self.index) && self.peers().all(|gpu| Gate::is_quiet(gpu.index))
    }

    /// Whether a thread waits at the gate of this GPU or of a peer.
    pub fn are_waited_for(&self) -> bool {
        self.is_waited_for() || self.peers().any(Self::is_waited_for)
    }

    pub fn set_drained(&self, drained: bool) {
        self.drained.store(drained, Ordering::SeqCst);
    }

    /// Whether this client runs no work that may access this GPU's memory, and can start no such
    /// work.
    pub fn is_drained(&self) -> bool {
        self.is_shut() && self.is_quiet() && !capture::any()
    }

    /// Whether the work of this client on this GPU and its peers has ended, and calls that need the lock wait.
    /// Calls that need only the memory may be in progress.
    pub fn is_shut(&self) -> bool {
        // The gate must be closed for the lock. Behind a gate that is closed only for memory, earlier work may
        // still be running.
        let is_shut = |gpu: &Self| gpu.drained.load(Ordering::SeqCst) && gpu.gate.is_closed_for(closed::LOCK);
        is_shut(self) && self.peers().all(is_shut)
    }
}
