//! Memory pools of the program (`nvshare-pools`). The blocks of each pool are cut from ranges, which are
//! called *segments*.
//!
//! Each pool shadows a pool of the driver and has the same handle. The driver's pool serves the
//! allocations that this library leaves to the driver. Memory of a pool belongs to no context, and
//! outlives all contexts.
//!
//! With the driver, a free is work in its stream; in this library, it is not. The difference is visible
//! only in the legacy stream, through which blocking streams wait for each other. If blocking streams
//! exist, a reuse in the legacy stream records an event. Synchronizing one blocking stream then does
//! not prove that its frees are done.
//!
//! Memory beyond a pool's threshold is released after the program has waited for its work. All unused
//! memory of pools is released before an allocation fails for lack of memory. It is also released
//! before chunks are evicted: no work runs then, and free blocks need not be copied.

use super::{Allocated, Allocation, RangeKind, Space};
use crate::{
    driver::types::*,
    memory::engine::{GRANULE, bit},
    submit::{Fence, Work},
};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};
use nvshare_pools::{Awaited, Fences, Order, SEGMENT, StreamName, block_len};

/// The GPUs on which frees are not known to be done, one bit per GPU.
static PENDING: AtomicU64 = AtomicU64::new(0);

/// Whether [`Space::synchronize_pools`] may have pending frees to process on any GPU.
#[inline]
pub fn has_pending_frees() -> bool {
    PENDING.load(Ordering::Relaxed) != 0
}

impl Fences for Work {
    type Fence = Fence;

    fn record(&self) -> Option<Fence> {
        self.fence_for_freeing()
    }

    fn is_done(&self, fence: &mut Fence) -> bool {
        self.is_done(fence)
    }
}

impl Space {
    /// Whether a pool allocation is at this address.
    pub fn is_of_pool(&self, address: u64) -> bool {
        self.allocations.get(&address).is_some_and(|allocation| allocation.pool != 0)
    }

    /// Called before the program destroys a pool. The pool's memory is released as its blocks are freed.
    pub fn destroy_pool(&mut self, handle: u64, work: &Work) {
        self.pools.destroy(handle);
        self.tend_pools(work);
    }

    /// Allocates a free block of a pool, for work submitted to `stream` from now on. Returns `None` if no
    /// block fits or the pool is not known on this GPU.
    ///
    /// `order` is `Some` for the legacy stream. A call of `order` makes later work of blocking
    /// streams wait for their earlier work, and returns whether that succeeded. The call is needed
    /// because some programs rely on the legacy stream to order other streams. Such programs expect
    /// allocations and frees to be work in that stream, but this library submits no such work.
    pub fn allocate_from_pool(
        &mut self,
        handle: u64,
        stream: StreamName,
        order: Option<&dyn Fn() -> bool>,
        size: u64,
        work: &Work,
    ) -> Option<u64> {
        let address = self.pools.allocate(handle, block_len(size)?, stream, order, work)?;
        self.add_allocation_of_pool(address, size, handle);
        Some(address)
    }

    /// Allocates from a new segment of a pool.
    pub fn allocate_with_pool(
        &mut self,
        handle: u64,
        size: u64,
        beyond: bool,
        work: &Work,
    ) -> Result<Allocated, CUresult> {
        let len = block_len(size).ok_or(ERROR_OUT_OF_MEMORY)?;
        let id = self.pools.id(handle).ok_or(ERROR_INVALID_VALUE)?;
        let least = len.checked_next_multiple_of(GRANULE).ok_or(ERROR_OUT_OF_MEMORY)?;
        let usual = least.max(SEGMENT);
        // Allocates only the necessary size if the program is near its limit.
        let segment = if usual <= self.account.free() / 8 { usual } else { least };
        self.release_unused_pools_for(segment, work);
        let (base, backing) = self.make_range(segment, RangeKind::Pool(id), self.flags, beyond)?;
        let address = self.pools.grow(id, base, segment, len).ok_or(ERROR_OUT_OF_MEMORY)?;
        self.add_allocation_of_pool(address, size, handle);
        Ok(Allocated { address, backing })
    }

    fn add_allocation_of_pool(&mut self, address: u64, size: u64, pool: u64) {
        // The segment that contains the block.
        let range = self.ranges.range(..=address).next_back().map_or(address, |(base, _)| *base);
        let context = 0; // pool memory belongs to no context
        self.add_allocation(Allocation { base: address, size, id: 0, context, managed: false, range, pool });
    }

    /// Releases unused memory of pools for an allocation that would not fit otherwise. Does nothing if that
    /// would not suffice.
    pub(super) fn release_unused_pools_for(&mut self, len: u64, work: &Work) {
        let lacking = len.saturating_sub(self.account.free().min(self.account.room()));
        if lacking > 0 {
            let idle = self.pools.make_room(lacking, work);
            self.drop_segments(idle);
        }
    }

    /// Frees an allocation of a pool in the order of this stream's work. With `None`, the block is
    /// reusable when all work that may use it is done. Returns whether the allocation exists.
    pub fn free_in_pool(&mut self, address: u64, stream: Option<StreamName>) -> bool {
        self.free_in_order(address, stream.map_or(Order::Unknown, Order::Stream))
    }

    /// Frees a pool allocation whose address has not been returned to the program, and the segment added
    /// for it.
    pub fn undo_in_pool(&mut self, address: u64, work: &Work) {
        if self.free_in_order(address, Order::Done) {
            self.release_pools(work);
        }
    }

    fn free_in_order(&mut self, address: u64, order: Order) -> bool {
        let Some(range) = self.allocations.get(&address).filter(|a| a.pool != 0).map(|a| a.range) else { return false };
        let Some(&RangeKind::Pool(id)) = self.ranges.get(&range).map(|range| &range.kind) else { return false };
        self.allocations.remove(&address);
        self.withdraw(range, address);
        self.pools.free(id, address, order);
        if PENDING.load(Ordering::Relaxed) & bit(self.gpu) == 0 {
            PENDING.fetch_or(bit(self.gpu), Ordering::Relaxed);
        }
        true
    }

    /// Called when the program has waited for work. `number` is the number of frees before that wait.
    /// Releases memory above the thresholds.
    pub fn synchronize_pools(&mut self, awaited: Awaited, number: u64, work: &Work) {
        let idle = self.pools.synchronize(awaited, number, work);
        self.drop_segments(idle);
        if !self.pools.has_pending() {
            PENDING.fetch_and(!bit(self.gpu), Ordering::Relaxed);
        }
    }

    /// Releases unused memory of a pool until the pool has at most `keep` bytes.
    pub fn trim_pool(&mut self, handle: u64, keep: u64) {
        let idle = self.pools.trim_to(handle, keep);
        self.drop_segments(idle);
    }

    /// Releases all unused memory of pools. Returns the number of bytes.
    pub fn release_pools(&mut self, work: &Work) -> u64 {
        let idle = self.pools.release(work);
        self.drop_segments(idle)
    }

    /// Releases all unused memory of pools when no work is running and none can be submitted.
    pub(in crate::memory) fn release_pools_at_rest(&mut self) {
        let idle = self.pools.release_at_rest();
        self.has_arrivals |= self.drop_segments(idle) > 0;
    }

    /// Frees unused memory of destroyed pools.
    pub(super) fn tend_pools(&mut self, work: &Work) {
        let idle = self.pools.tend(work);
        self.drop_segments(idle);
    }

    /// Frees segments that pools no longer use. Returns the number of bytes.
    fn drop_segments(&mut self, segments: Vec<u64>) -> u64 {
        let before = self.account.demand;
        segments.into_iter().for_each(|base| self.drop_range(base));
        before.saturating_sub(self.account.demand)
    }
}

#[cfg(test)]
mod tests {
    use crate::memory::fake::Memory;
    use nvshare_pools::Policy;

    #[test]
    fn a_segment_moves_again_once_its_announced_block_is_freed() {
        let memory = Memory::new();
        let mut space = memory.space.lock();
        space.pools.add(7, Policy::default());
        let at = space.allocate_with_pool(7, 1000, false, memory.work).expect("room").address;
        let base = space.range_of(at).expect("a segment");
        assert!(space.announce(base, at).is_some() && space.account.pinned > 0);
        assert!(space.free_in_pool(at, None));
        assert_eq!(space.account.pinned, 0);
    }
}
