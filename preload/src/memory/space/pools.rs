//! Memory pools of the program. The blocks of each pool are cut from ranges, which are called
//! *segments*.
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

use super::{Allocated, Allocation, Backing, RangeKind, Space};
use crate::{
    driver::types::*,
    memory::{
        engine::GRANULE,
        pool::{self, Order, Pool, Statistics, StreamName},
    },
    submit::{Fence, Work},
};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

/// The GPUs on which frees are not known to be done, one bit per GPU.
static PENDING: AtomicU64 = AtomicU64::new(0);

/// Whether [`Space::synchronized`] may have pending frees to process on any GPU.
#[inline]
pub fn has_pending_frees() -> bool {
    PENDING.load(Ordering::Relaxed) != 0
}

/// The work that the program has waited for.
#[derive(Debug, Clone, Copy)]
pub enum Awaited {
    /// All work that was submitted to this stream.
    Stream(StreamName),
    /// All submitted work.
    All,
    /// Unknown work.
    Some,
}

/// The properties of a pool that the program can set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Policy {
    /// Bytes that the pool keeps when the program waits for its work. Memory above this size is released.
    pub threshold: u64,
    /// Whether a block may be reused in another stream when its free is found done, even if the program has
    /// not waited for it.
    pub opportunistic: bool,
}

#[derive(Debug)]
struct PoolOfGpu {
    /// The driver's handle; 0 once the program has destroyed the pool.
    handle: u64,
    /// The pool's number, which `RangeKind::Pool` contains.
    id: u32,
    policy: Policy,
    pool: Pool,
}

impl PoolOfGpu {
    /// Whether the pool releases memory, or reuses it in other streams, only when the program waits for
    /// work.
    fn needs_waits(&self) -> bool {
        self.pool.statistics().reserved > self.threshold() || !self.policy.opportunistic
    }

    /// Bytes that the pool keeps when the program waits for its work.
    fn threshold(&self) -> u64 {
        if self.handle == 0 { 0 } else { self.policy.threshold }
    }
}

/// The pools of one GPU.
#[derive(Debug, Default)]
pub(super) struct Pools {
    pools: Vec<PoolOfGpu>,
    next_id: u32,
    /// The number of frees so far.
    frees: u64,
    /// A fence behind all work that may use freed blocks, and the number of the last free that it covers.
    fence: Option<(u64, Fence)>,
    /// All frees up to this number are known to be done, in all streams.
    done: u64,
}

impl Pools {
    fn of(&mut self, handle: u64) -> Option<&mut PoolOfGpu> {
        self.pools.iter_mut().find(|pool| pool.handle == handle && handle != 0)
    }

    fn by_id(&mut self, id: u32) -> Option<&mut PoolOfGpu> {
        self.pools.iter_mut().find(|pool| pool.id == id)
    }

    /// Marks frees up to this number as done.
    fn done(&mut self, number: u64) {
        self.pools.iter_mut().for_each(|its| its.pool.done(number));
        self.done = self.done.max(number);
    }

    fn has_pending(&self) -> bool {
        self.pools.iter().any(|its| its.pool.has_pending())
    }

    /// Checks whether frees are done. Uses one fence at a time: the next fence covers later frees.
    fn look(&mut self, work: &Work) {
        if let Some((number, fence)) = &mut self.fence {
            if !work.is_done(fence) {
                return;
            }
            let number = *number;
            self.fence = None;
            self.done(number);
        }
        if self.done < self.frees && self.has_pending() {
            self.fence = work.fence_for_freeing().map(|fence| (self.frees, fence));
        }
    }
}

impl Space {
    /// Whether the pool with this handle is known on this GPU.
    pub fn has_pool(&self, handle: u64) -> bool {
        handle != 0 && self.pools.pools.iter().any(|pool| pool.handle == handle)
    }

    /// The driver's handles of all known pools.
    pub fn pools(&self) -> impl Iterator<Item = u64> {
        self.pools.pools.iter().map(|its| its.handle).filter(|handle| *handle != 0)
    }

    /// Whether a pool allocation is at this address.
    pub fn is_of_pool(&self, address: u64) -> bool {
        self.allocations.get(&address).is_some_and(|allocation| allocation.pool != 0)
    }

    /// Whether some frees may be pending.
    pub fn has_pending_in_pools(&self) -> bool {
        self.pools.has_pending()
    }

    /// Adds a pool that shadows this pool of the driver.
    pub fn adopt_pool(&mut self, handle: u64, policy: Policy) {
        if self.has_pool(handle) {
            return;
        }
        let id = self.pools.next_id;
        self.pools.next_id += 1;
        self.pools.pools.push(PoolOfGpu { handle, id, policy, pool: Pool::new() });
    }

    /// Called before the program destroys a pool. The pool's memory is released as its blocks are freed.
    /// Returns the pool's number for [`Self::revive_pool`].
    pub fn destroy_pool(&mut self, handle: u64, work: &Work) -> Option<u32> {
        let pool = self.pools.of(handle)?;
        pool.handle = 0;
        let id = pool.id;
        self.tend_pools(work);
        Some(id)
    }

    /// Undoes [`Self::destroy_pool`], after the driver has refused to destroy the pool.
    pub fn revive_pool(&mut self, id: u32, handle: u64, policy: Policy) {
        if self.has_pool(handle) {
            return; // another thread has adopted the pool since
        }
        match self.pools.by_id(id) {
            Some(pool) => pool.handle = handle,
            None => self.adopt_pool(handle, policy),
        }
    }

    pub fn set_pool_policy(&mut self, handle: u64, policy: Policy) {
        if let Some(its) = self.pools.of(handle) {
            its.policy = policy;
        }
    }

    pub fn pool_statistics(&mut self, handle: u64) -> Option<Statistics> {
        self.pools.of(handle).map(|its| its.pool.statistics())
    }

    /// Resets the high-water mark of used memory (`of_used`) or of reserved memory.
    pub fn reset_pool_high(&mut self, handle: u64, of_used: bool) {
        if let Some(its) = self.pools.of(handle) {
            its.pool.reset_high(of_used);
        }
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
        let len = pool::block_len(size)?;
        let its = self.pools.of(handle)?;
        let is_ordered = order.is_none_or(|order| !its.pool.relies_on_order(len, stream) || order());
        let stream = if is_ordered { stream } else { StreamName::NONE };
        let mut found = its.pool.allocate(len, stream);
        if found.is_none() && its.policy.opportunistic && its.pool.has_pending() {
            self.pools.look(work);
            found = self.pools.of(handle).and_then(|its| its.pool.allocate(len, stream));
        }
        found.inspect(|address| self.add_allocation_of_pool(*address, size, handle))
    }

    /// Allocates from a new segment of a pool.
    pub fn allocate_with_pool(
        &mut self,
        handle: u64,
        size: u64,
        beyond: bool,
        work: &Work,
    ) -> Result<Allocated, CUresult> {
        let len = pool::block_len(size).ok_or(ERROR_OUT_OF_MEMORY)?;
        let id = self.pools.of(handle).ok_or(ERROR_INVALID_VALUE)?.id;
        let backing = self.grow_pool(id, len, beyond, work)?;
        // Any stream may use the block of a new segment, because its free counts as done.
        let grown = self.pools.by_id(id).and_then(|its| its.pool.allocate(len, StreamName::NONE));
        let address = grown.ok_or(ERROR_OUT_OF_MEMORY)?;
        self.add_allocation_of_pool(address, size, handle);
        Ok(Allocated { address, backing })
    }

    fn add_allocation_of_pool(&mut self, address: u64, size: u64, pool: u64) {
        // The segment that contains the block.
        let range = self.ranges.range(..=address).next_back().map_or(address, |(base, _)| *base);
        let id = self.next_id;
        self.next_id += 1;
        let (context, managed) = (0, false); // pool memory belongs to no context
        self.allocations.insert(address, Allocation { base: address, size, id, context, managed, range, pool });
    }

    /// Releases unused memory of pools for an allocation that would not fit otherwise. Does nothing if that
    /// would not suffice.
    pub(super) fn make_room(&mut self, len: u64, work: &Work) {
        let mut lacking = len.saturating_sub(self.account.free().min(self.account.room()));
        if lacking == 0 || self.pools.pools.is_empty() {
            return;
        }
        self.look_at_pools(work);
        if self.pools.pools.iter().map(|its| its.pool.idle()).sum::<u64>() < lacking {
            return;
        }
        self.trim_pools(|its| {
            let (idle, reserved) = (its.pool.idle(), its.pool.statistics().reserved);
            let part = idle.min(lacking);
            lacking -= part;
            if part > 0 { reserved - part } else { u64::MAX }
        });
    }

    /// Adds a segment to a pool.
    fn grow_pool(&mut self, id: u32, len: u64, beyond: bool, work: &Work) -> Result<Backing, CUresult> {
        let least = len.checked_next_multiple_of(GRANULE).ok_or(ERROR_OUT_OF_MEMORY)?;
        let usual = least.max(pool::SEGMENT);
        // Allocates only the necessary size if the program is near its limit.
        let segment = if usual <= self.account.free() / 8 { usual } else { least };
        self.make_room(segment, work);
        let (base, backing) = self.make_range(segment, RangeKind::Pool(id), self.flags, beyond)?;
        if let Some(its) = self.pools.by_id(id) {
            its.pool.grow(base, segment, len);
        }
        Ok(backing)
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
        let Some(RangeKind::Pool(id)) = self.ranges.get(&range).map(|range| &range.kind) else { return false };
        self.allocations.remove(&address);
        self.pools.frees += 1;
        let number = self.pools.frees;
        if let Some(its) = self.pools.by_id(*id) {
            its.pool.free(address, order, number);
        }
        if PENDING.load(Ordering::Relaxed) & bit(self.gpu) == 0 {
            PENDING.fetch_or(bit(self.gpu), Ordering::Relaxed);
        }
        true
    }

    /// The number of frees so far, for [`Self::synchronized`].
    pub fn pool_frees(&self) -> u64 {
        self.pools.frees
    }

    /// Called when the program has waited for work. `number` is the number of frees before that wait.
    /// Releases memory above the thresholds.
    pub fn synchronized(&mut self, awaited: Awaited, number: u64, work: &Work) {
        match awaited {
            Awaited::Stream(stream) => self.pools.pools.iter_mut().for_each(|its| its.pool.done_in(stream, number)),
            Awaited::All => self.pools.done(number),
            // Records a fence only if a pool needs it, because a fence costs more than synchronizing one stream.
            Awaited::Some if self.pools.pools.iter().any(PoolOfGpu::needs_waits) => self.pools.look(work),
            Awaited::Some => {}
        }
        self.trim_pools(PoolOfGpu::threshold);
        if !self.pools.has_pending() {
            PENDING.fetch_and(!bit(self.gpu), Ordering::Relaxed);
        }
    }

    /// Releases unused memory of a pool until the pool has at most `keep` bytes.
    pub fn trim_pool(&mut self, handle: u64, keep: u64) {
        self.trim_pools(|its| if its.handle == handle { keep } else { u64::MAX });
    }

    /// Checks whether frees of pools are done. Returns whether some are still pending.
    pub fn look_at_pools(&mut self, work: &Work) -> bool {
        if self.pools.has_pending() {
            self.pools.look(work);
        }
        self.pools.has_pending()
    }

    /// Releases all unused memory of pools. Returns the number of bytes.
    pub fn release_pools(&mut self, work: &Work) -> u64 {
        self.look_at_pools(work);
        self.trim_pools(|_| 0)
    }

    /// Releases all unused memory of pools when no work is running and none can be submitted.
    pub(in crate::memory) fn release_idle_pools(&mut self) -> u64 {
        if self.pools.pools.is_empty() {
            return 0;
        }
        let number = self.pools.frees;
        self.pools.fence = None;
        self.pools.done(number);
        self.trim_pools(|_| 0)
    }

    fn trim_pools(&mut self, mut keep: impl FnMut(&PoolOfGpu) -> u64) -> u64 {
        let before = self.account.demand;
        let mut idle = Vec::new();
        for its in &mut self.pools.pools {
            let keep = keep(its);
            idle.extend(its.pool.trim(keep));
        }
        idle.into_iter().for_each(|base| self.drop_range(base));
        self.pools.pools.retain(|its| its.handle != 0 || !its.pool.is_empty());
        before.saturating_sub(self.account.demand)
    }

    /// Whether destroyed pools still wait for work to be done.
    pub fn has_dying_pools(&self) -> bool {
        self.pools.pools.iter().any(|its| its.handle == 0 && its.pool.has_pending())
    }

    /// Frees unused memory of destroyed pools.
    pub(super) fn tend_pools(&mut self, work: &Work) {
        if self.pools.pools.iter().any(|its| its.handle == 0) {
            self.look_at_pools(work);
            self.trim_pools(|its| if its.handle == 0 { 0 } else { u64::MAX });
        }
    }
}

fn bit(gpu: CUdevice) -> u64 {
    u32::try_from(gpu).ok().and_then(|gpu| 1u64.checked_shl(gpu)).unwrap_or(0)
}
