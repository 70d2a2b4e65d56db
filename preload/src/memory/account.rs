//! The memory account of one GPU: how many bytes the program has there, where they are, and how many it may have.

use nvshare_wire::Counts;

/// In bytes. Ranges count whole, so everything is a multiple of the granule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Account {
    /// Bytes that must be on the GPU for the program to run.
    pub demand: u64,
    /// Of these, on the GPU now or on the way there.
    pub mapped: u64,
    /// Of these, in host memory or in a swap file.
    pub swapped: u64,
    /// Of these, in a swap file.
    pub in_file: u64,
    /// Outside the engines: memory of the driver that cannot move.
    pub pinned: u64,
    /// The most that may be mapped, as the scheduler says; `u64::MAX` without one.
    pub allowance: u64,
    /// The sequence number of the newest allowance that has been carried out.
    pub ack: u32,
    /// The most that demand may become, the number of that limit, and the highest limit that can be requested.
    pub limit: u64,
    pub limit_seq: u32,
    pub limit_max: u64,
    /// The limit of a rule for this program and those that count with it; 0 for none. It outlives the scheduler.
    pub max: u64,
    /// The limit that the program's environment sets; `u64::MAX` if it sets none.
    pub env_max: u64,
    /// Host buffers that are free or hold copies of chunks on the GPU; and the most that the scheduler lets this client keep.
    pub host_cache: u64,
    pub host_cache_max: u64,
    /// Host buffers that are being given back: the driver may have to wait for running work first.
    pub releasing: u64,
    /// Copies go into a swap file, and are behind: nothing more leaves the GPU meanwhile.
    pub is_file_behind: bool,
    /// Contents were lost on the way to a disk and back. Nothing can use memory here any more.
    pub is_lost: bool,
    /// Chunks whose copy, in or out, is under way.
    pub in_flight: u64,
    /// Freed bytes that earlier work may still use or that are being moved. Part of demand until then.
    pub freeing: u64,
    /// Pages that are not on the GPU are faulted in when they are touched.
    pub demand_paged: bool,
    /// Without a scheduler: the demand for which other clients make room, 0 if there are none; `None` until that is known.
    pub offline_room: Option<u64>,
    /// The largest demand that was all on the GPU at once.
    pub peak: u64,
    /// All memory stays on the GPU, since the end of the program's work cannot be known.
    pub unevictable: bool,
    /// Bytes moved and allocations refused.
    pub counts: Counts,
}

impl Account {
    /// Bytes of host memory that are held.
    pub fn host(&self) -> u64 {
        self.swapped - self.in_file + self.host_cache + self.releasing
    }
    pub fn is_complete(&self) -> bool {
        self.mapped >= self.demand
    }
    /// Whether the allowance has room for memory that is lacking.
    pub fn may_grow(&self) -> bool {
        !self.is_complete() && self.room() > 0
    }
    /// Whether the program may run as far as memory is concerned. Where pages are faulted in, it always may.
    pub fn can_run(&self) -> bool {
        !self.is_lost && (self.demand_paged || (self.is_complete() && self.in_flight == 0))
    }
    /// `bytes`, or less if a rule or the environment limits the program to less.
    pub fn at_most(&self, bytes: u64) -> u64 {
        let ruled = if self.max == 0 { bytes } else { bytes.min(self.max) };
        ruled.min(self.env_max)
    }
    /// Whether `len` more bytes can be allocated. `beyond` lets them exceed the GPU, but neither a rule nor the environment.
    pub(super) fn admits(&self, len: u64, beyond: bool) -> bool {
        let wanted = (self.demand + self.pinned - self.freeing).saturating_add(len);
        len <= self.free() || (beyond && self.max == 0 && wanted <= self.env_max)
    }
    /// Whether demand includes memory that has never been on the GPU together with the rest, and so has not been used by any
    /// work.
    pub fn exceeds_peak(&self) -> bool {
        !self.demand_paged && !self.is_complete() && self.demand > self.peak
    }
    /// Bytes that the program may still allocate.
    pub fn free(&self) -> u64 {
        self.limit.saturating_sub(self.demand + self.pinned - self.freeing)
    }
    /// Whether `bytes` more would fit if only clients had memory on the GPU. The scheduler sets up to an eighth of `total`
    /// aside.
    pub fn fits_without_others(&self, bytes: u64, total: u64) -> bool {
        let most = self.at_most(total - total / 8);
        self.limit < most && self.demand.saturating_add(self.pinned).saturating_add(bytes) <= most
    }
    /// Without a scheduler: whether it is not known yet if there are clients that can make room.
    pub fn awaits_company(&self) -> bool {
        self.allowance == u64::MAX && self.offline_room.is_none() && !self.demand_paged
    }
    /// Whether room will be made for what does not fit now.
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
