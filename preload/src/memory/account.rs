//! The account of one GPU's memory: how many bytes the program has there, where they are, and how many it may have.

use nvshare_wire::Counts;

/// The bytes of one GPU. Ranges count whole, so everything is a multiple of the granule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Account {
    /// Needed on the GPU in order to run.
    pub demand: u64,
    /// On the GPU now, or on the way there.
    pub mapped: u64,
    /// In host memory.
    pub swapped: u64,
    /// Outside the engines: the driver holds it and it cannot move.
    pub pinned: u64,
    /// May be mapped, as the scheduler says.
    pub allowance: u64,
    /// The newest allowance that was carried out.
    pub ack: u32,
    /// The most that demand may become, the number of that limit, and the most that it can be raised to.
    pub limit: u64,
    pub limit_seq: u32,
    pub limit_max: u64,
    /// What a rule of the scheduler's allows this program and those that count with it; 0 where none does. It stays when
    /// the scheduler goes.
    pub max: u64,
    /// What its environment allows it; `u64::MAX` where that says nothing.
    pub env_max: u64,
    /// Bytes of buffers that hold nothing, or a copy of what is on the GPU; and how many of them may be kept.
    pub host_cache: u64,
    pub host_cache_max: u64,
    /// Bytes whose copy, in or out, is under way.
    pub in_flight: u64,
    /// Freed bytes that work submitted earlier may still use, or that are on the move; part of demand until then.
    pub freeing: u64,
    /// What is not on the GPU comes when it is touched.
    pub demand_paged: bool,
    /// Without a scheduler: what this client may need, with others there who make room for it; 0 without them.
    pub company: u64,
    /// The most that was ever needed and all on the GPU.
    pub peak: u64,
    /// An allocation found no room, and nobody to make some; and others that might were waited for in vain.
    pub refused: bool,
    pub searched: bool,
    /// It stays on the GPU, since nobody knows when the program's work is done.
    pub unevictable: bool,
    /// What has been moved and refused.
    pub counts: Counts,
}

impl Account {
    pub fn is_complete(&self) -> bool {
        self.mapped >= self.demand
    }
    /// Whether more of what is lacking is allowed already.
    pub fn may_grow(&self) -> bool {
        !self.is_complete() && self.room() > 0
    }
    /// Whether the program may run as far as memory goes. Where pages come when they are touched, it always may.
    pub fn can_run(&self) -> bool {
        self.demand_paged || (self.is_complete() && self.in_flight == 0)
    }
    /// So much of the GPU, or as much of it as a rule and the environment allow.
    pub fn at_most(&self, bytes: u64) -> u64 {
        let ruled = if self.max == 0 { bytes } else { bytes.min(self.max) };
        ruled.min(self.env_max)
    }
    /// Whether so many more bytes can be allocated; `beyond` lets them exceed the limit, but not one that somebody set.
    pub(super) fn admits(&self, len: u64, beyond: bool) -> bool {
        let wanted = (self.demand + self.pinned - self.freeing).saturating_add(len);
        len <= self.free() || (beyond && self.max == 0 && wanted <= self.env_max)
    }
    /// Whether some of what is needed was never on the GPU together with the rest, and is not now: memory that no work has
    /// used yet.
    pub fn exceeds_peak(&self) -> bool {
        !self.demand_paged && !self.is_complete() && self.demand > self.peak
    }
    /// What the program may still allocate.
    pub fn free(&self) -> u64 {
        self.limit.saturating_sub(self.demand + self.pinned - self.freeing)
    }
    /// Whether so many more bytes would fit if nobody but clients had anything on the GPU, which has `total`: of that, the
    /// scheduler puts up to an eighth aside.
    pub fn fits_without_others(&self, bytes: u64, total: u64) -> bool {
        let most = self.at_most(total - total / 8);
        self.limit < most && self.demand.saturating_add(self.pinned).saturating_add(bytes) <= most
    }
    /// Without a scheduler: whether so many more bytes would fit with the whole GPU, which has `total`, to itself, and nobody
    /// knows yet whether there are others who make room.
    pub fn may_find_company(&self, bytes: u64, total: u64) -> bool {
        let most = self.at_most(total - total / 8);
        !self.searched && self.demand.saturating_add(self.pinned).saturating_add(bytes) <= most
    }
    /// Whether somebody will make room for what does not fit now.
    pub(super) fn room_comes(&self) -> bool {
        self.allowance != u64::MAX || self.demand.saturating_add(self.pinned) <= self.company
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
