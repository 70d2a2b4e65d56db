//! The memory account of one GPU: how many bytes the program has there, where they are, and its limits.

use nvshare_wire::Counts;

/// All values are in bytes. Ranges count whole, so each is a multiple of the granule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Account {
    /// Bytes that must be on the GPU for the program to run.
    pub demand: u64,
    /// Of the demand: on the GPU, or on the way there.
    pub mapped: u64,
    /// Of the demand: in host memory or in a swap file.
    pub swapped: u64,
    /// Of `swapped`: in a swap file.
    pub in_file: u64,
    /// Memory outside the engines: memory of the driver that cannot move.
    pub pinned: u64,
    /// The scheduler's limit on mapped bytes; `u64::MAX` without a scheduler.
    pub allowance: u64,
    /// The sequence number of the newest allowance that has been carried out.
    pub ack: u32,
    /// The limit on the demand, the limit's sequence number, and the highest limit that can be requested.
    pub limit: u64,
    pub limit_seq: u32,
    pub limit_max: u64,
    /// The limit set by a rule for this program and its group; 0 for none. It outlives the scheduler.
    pub max: u64,
    /// The limit that the program's environment sets; `u64::MAX` if it sets none.
    pub env_max: u64,
    /// Bytes of host buffers that are free or hold copies of chunks on the GPU; and the scheduler's limit on them.
    pub host_cache: u64,
    pub host_cache_max: u64,
    /// Bytes of host buffers that are being freed: the driver may have to wait for running work first.
    pub releasing: u64,
    /// Copies are being written to a swap file, and the writes are behind: evictions pause until they catch up.
    pub is_file_behind: bool,
    /// Contents were lost on the way to a disk and back. No work can use the memory of this GPU any more.
    pub is_lost: bool,
    /// Bytes of chunks that are being copied, in either direction.
    pub in_flight: u64,
    /// Freed bytes that earlier work may still use or that are being moved. Part of the demand until then.
    pub freeing: u64,
    /// Pages that are not on the GPU are faulted in when they are touched.
    pub demand_paged: bool,
    /// Without a scheduler: the demand for which other clients make room, 0 if none exist; `None` until that is
    /// known.
    pub offline_room: Option<u64>,
    /// The largest demand that was on the GPU as a whole.
    pub peak: u64,
    /// All memory stays on the GPU, since the end of the program's work cannot be detected.
    pub unevictable: bool,
    /// Bytes moved and allocations refused.
    pub counts: Counts,
}

impl Account {
    /// Bytes of host memory in use.
    pub fn host(&self) -> u64 {
        self.swapped - self.in_file + self.host_cache + self.releasing
    }
    pub fn is_complete(&self) -> bool {
        self.mapped >= self.demand
    }
    /// Whether the allowance has room for missing memory.
    pub fn may_grow(&self) -> bool {
        !self.is_complete() && self.room() > 0
    }
    /// Whether the account lets the program run. With demand paging it always may.
    pub fn can_run(&self) -> bool {
        !self.is_lost && (self.demand_paged || (self.is_complete() && self.in_flight == 0))
    }
    /// Returns `bytes`, capped at the limits of a rule and of the environment.
    pub fn at_most(&self, bytes: u64) -> u64 {
        let ruled = if self.max == 0 { bytes } else { bytes.min(self.max) };
        ruled.min(self.env_max)
    }
    /// Whether `len` more bytes can be allocated. `beyond` allows more than fits on the GPU, but not more than a rule
    /// or the environment allows.
    pub(super) fn admits(&self, len: u64, beyond: bool) -> bool {
        let wanted = (self.demand + self.pinned - self.freeing).saturating_add(len);
        len <= self.free() || (beyond && self.max == 0 && wanted <= self.env_max)
    }
    /// Whether the demand includes memory that was never on the GPU together with the rest, so that no work has used it
    /// yet.
    pub fn exceeds_peak(&self) -> bool {
        !self.demand_paged && !self.is_complete() && self.demand > self.peak
    }
    /// Bytes that the program may still allocate.
    pub fn free(&self) -> u64 {
        self.limit.saturating_sub(self.demand + self.pinned - self.freeing)
    }
    /// Whether `bytes` more would fit if only clients had memory on the GPU. The scheduler reserves up to an eighth of
    /// `total`.
    pub fn fits_without_others(&self, bytes: u64, total: u64) -> bool {
        let most = self.at_most(total - total / 8);
        self.limit < most && self.demand.saturating_add(self.pinned).saturating_add(bytes) <= most
    }
    /// Without a scheduler: whether it is still unknown if other clients exist that could make room.
    pub fn awaits_company(&self) -> bool {
        self.allowance == u64::MAX && self.offline_room.is_none() && !self.demand_paged
    }
    /// Whether room will be made for memory that does not fit now.
    pub(super) fn room_comes(&self) -> bool {
        self.allowance != u64::MAX || self.demand.saturating_add(self.pinned) <= self.offline_room.unwrap_or(0)
    }
    pub(super) fn pin(&mut self, bytes: u64) {
        (self.demand, self.mapped, self.pinned) = (self.demand - bytes, self.mapped - bytes, self.pinned + bytes);
    }
    pub(super) fn unpin(&mut self, bytes: u64) {
        (self.demand, self.mapped, self.pinned) = (self.demand + bytes, self.mapped + bytes, self.pinned - bytes);
    }
    pub(super) fn room(&self) -> u64 {
        self.allowance.saturating_sub(self.mapped + self.pinned)
    }
}
