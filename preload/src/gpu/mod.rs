//! One GPU of this client: its lane ([`Lane`]) and its memory. Also the table of all GPUs,
//! by the driver's ordinal.
//!
//! - [`info`]: properties of a GPU. [`identity`]: its UUID, which may change when the process is
//!   restored. [`support`]: GPUs that this library does not manage.
//! - [`attach`]: the program's first use of a GPU. [`proof`]: the proof that it may use the GPU.
//!   [`peers`]: GPUs that access each other's memory.
//! - [`report`]: reporting the memory account to the scheduler.
//! - [`limit_request`]: requests for a higher limit. [`reservation`]: requests for memory that the
//!   driver needs.
//! - [`rules`]: limits and permissions of the scheduler's rules. [`memory_info`]: the sizes that the
//!   program sees.

pub mod attach;
#[cfg(test)]
pub mod fake;
pub mod identity;
pub mod info;
pub mod limit_request;
pub mod memory_info;
pub mod peers;
pub mod proof;
mod report;
pub mod reservation;
pub mod rules;
pub mod support;

pub use target::{are_several, device_of};

use crate::{
    driver::{query, types::*},
    memory::{account::Account, engine, mover::Mover, space::Space},
    submit::{self, GPUS, Lane, target},
    sys::{
        once::OnceBox,
        sync::{Mutex, Rank},
    },
};
use alloc::vec::Vec;
use core::{
    ops::Deref,
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
};
use info::Info;
use limit_request::LimitAnswers;
use nvshare_wire::{MAX_SLOTS, Uuid, scheduler::MANAGED_BEYOND_GPU};
use reservation::ReservationAnswers;

#[derive(Debug)]
pub struct Gpu {
    /// The part that submissions use.
    lane: &'static Lane,
    /// Queried on first use. The inner `None` means that this library does not support the GPU.
    info: OnceBox<Option<Info>>,
    attaching: Mutex<()>,
    space: OnceBox<Mutex<Space>>,
    /// The mover. The mover must stop using a context before the context is destroyed.
    pub moving: Mutex<Mover>,
    primary: AtomicUsize,
    introducing: Mutex<()>,
    /// The scheduler's answer to the request for a context; see [`attach`].
    admission: AtomicU32,
    unreported: AtomicBool,
    /// The scheduler's answers to requests for a higher limit.
    pub limit_answers: LimitAnswers,
    /// The number of bytes that the scheduler has declared impossible to map; 0 for none.
    unmappable: AtomicU64,
    /// The scheduler's answers to requests for memory that the driver needs.
    pub reservation_answers: ReservationAnswers,
}

static TABLE: [Gpu; GPUS] = {
    let mut gpus = [const { Gpu::new(&submit::LANES[0]) }; GPUS];
    let mut i = 0;
    while i < gpus.len() {
        gpus[i].lane = &submit::LANES[i];
        i += 1;
    }
    gpus
};

impl Deref for Gpu {
    type Target = Lane;

    #[inline]
    fn deref(&self) -> &Lane {
        self.lane
    }
}

/// Returns the GPU of a lane.
fn of_lane(lane: &Lane) -> Option<&'static Gpu> {
    TABLE.get(lane.index as usize)
}

/// Returns the GPU of the calling thread's current context, or `None` if this library does not manage
/// it.
#[inline]
pub fn current() -> Option<&'static Gpu> {
    of_stream(CTX_DEFAULT_STREAM)
}

/// Returns the GPU of a stream, or `None` if this library does not manage it. Default streams belong to
/// the current context.
#[inline]
pub fn of_stream(stream: CUstream) -> Option<&'static Gpu> {
    of_lane(target::of_stream(stream)?)
}

/// Returns the GPU of a context, or `None` if this library does not manage it.
pub fn of_context(context: CUcontext) -> Option<&'static Gpu> {
    of_lane(target::of_context(context)?)
}

/// Returns the GPU with that ordinal, if the program has created a context there.
pub fn by_ordinal(device: CUdevice) -> Option<&'static Gpu> {
    find(device).filter(|g| g.is_attached())
}

/// Returns the GPU with that ordinal, used or not, if this library manages its memory or will do so.
pub fn find_managed(device: CUdevice) -> Option<&'static Gpu> {
    let gpu = find(device)?;
    gpu.identify(device).filter(|info| info.engine.is_some()).map(|_| gpu)
}

/// Returns the GPU with that UUID, if this library manages its memory or will do so.
pub fn find_managed_by_uuid(uuid: Uuid) -> Option<&'static Gpu> {
    (0..query::device_count().min(MAX_SLOTS as i32)).filter_map(find_managed).find(|gpu| gpu.uuid() == Some(uuid))
}

/// Iterates over the GPUs that this process uses.
pub fn in_use() -> impl Iterator<Item = &'static Gpu> {
    TABLE.iter().filter(|g| g.is_attached())
}

/// Updates the identities after a possible restore of the process. Returns each attached GPU with
/// its UUIDs before and after the update. Takes no lock, and may be called while calls into the
/// driver are blocked.
pub fn look_again() -> Vec<(&'static Gpu, Uuid, Uuid)> {
    identity::may_have_changed();
    let learned = TABLE.iter().filter_map(|gpu| Some((gpu, gpu.info()?.identity.ask(gpu.index as CUdevice))));
    learned.filter(|(gpu, _)| gpu.is_attached()).map(|(gpu, (before, now))| (gpu, before, now)).collect()
}

/// Returns the GPU with that ordinal, used or not.
fn find(device: CUdevice) -> Option<&'static Gpu> {
    TABLE.get(usize::try_from(device).ok()?)
}

impl Gpu {
    const fn new(lane: &'static Lane) -> Self {
        Self {
            lane,
            info: OnceBox::new(),
            attaching: Mutex::new(Rank::Attachment, ()),
            space: OnceBox::new(),
            moving: Mutex::new(Rank::Mover, Mover::new()),
            primary: AtomicUsize::new(0),
            introducing: Mutex::new(Rank::Introduction, ()),
            admission: AtomicU32::new(0),
            unreported: AtomicBool::new(false),
            limit_answers: LimitAnswers::new(),
            unmappable: AtomicU64::new(0),
            reservation_answers: ReservationAnswers::new(),
        }
    }

    fn info(&self) -> Option<&Info> {
        self.info.get()?.as_ref()
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
            space.lock().account.max = rules::memory_max(uuid);
        }
        self.update_permissions();
    }

    /// Updates the account after the scheduler has changed the permissions on this GPU.
    pub fn update_permissions(&self) {
        let is_permitted = self.uuid().is_some_and(|uuid| rules::permits(uuid, MANAGED_BEYOND_GPU));
        let can_page = is_permitted && engine::can_prefetch(self.index as CUdevice);
        self.change(|space| {
            // Managed memory that exceeds the GPU already has to stay usable.
            let has_some = space.account.may_exceed_gpu && space.account.pageable > 0;
            space.account.may_exceed_gpu = has_some || (can_page && space.engine().copies());
        });
    }

    pub fn total(&self) -> u64 {
        self.info().map_or(0, |i| i.total)
    }

    /// Returns the memory account, if the program uses this GPU and an engine can move its memory.
    pub fn account(&self) -> Option<Account> {
        self.space().map(|space| space.lock().account)
    }

    /// Returns the limit on the program's memory on this GPU, in bytes; `u64::MAX` for none.
    pub fn memory_limit(&self) -> u64 {
        if let Some(account) = self.account() {
            return account.at_most(u64::MAX);
        }
        let Some(info) = self.info() else { return u64::MAX };
        let ruled = rules::memory_max(info.identity.get());
        info.env_max.min(if ruled == 0 { u64::MAX } else { ruled })
    }

    /// The memory of this GPU, if an engine can move it.
    pub fn space(&self) -> Option<&Mutex<Space>> {
        self.space.get()
    }

    /// Releases unused memory of pools. Returns the number of bytes.
    pub fn release_pools(&self) -> u64 {
        self.change(|space| space.release_pools(&self.work)).unwrap_or(0)
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
    pub fn peers(&self) -> impl Iterator<Item = &'static Self> + use<> {
        self.work.peer_lanes().filter_map(of_lane)
    }

    pub fn is_peer_of(&self, other: &Gpu) -> bool {
        self.work.peers() >> other.index & 1 == 1
    }
}
