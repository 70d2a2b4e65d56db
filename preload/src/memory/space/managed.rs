//! Managed memory: the program's managed allocations, and all memory of the managed engine.
//!
//! The driver frees managed memory only on a thread with a current context, and first waits for the
//! work of that context. Therefore the program thread that frees the memory makes the call: that thread
//! would also wait without this library. The client's thread never makes the call, because other threads
//! depend on the client's thread.

use super::{Allocation, Freed, Range, RangeKind, Space};
use crate::{
    driver::types::*,
    memory::engine::{Engine, Flags, GRANULE},
    submit::Work,
};
use alloc::{collections::VecDeque, vec::Vec};

/// Managed memory that the driver is freeing. The memory is removed from the space before the call,
/// because its addresses may be reused before the call returns.
#[derive(Debug)]
pub struct Freeing {
    base: u64,
    allocation: Allocation,
    range: Range,
    /// Other freed allocations of the same range, which earlier work might still use.
    freed: VecDeque<Freed>,
}

impl Freeing {
    /// The address to pass to `cuMemFree`.
    pub fn base(&self) -> CUdeviceptr {
        self.base
    }
}

/// Managed memory that has left the space, and that a thread of the program must still pass to
/// `cuMemFree`. It may be on the GPU until then.
#[derive(Debug, Clone, Copy)]
pub struct Unfreed {
    pub base: u64,
    pub len: u64,
}

/// The error if the mover currently holds a part of the memory.
#[derive(Debug)]
pub struct IsMoving;

impl Space {
    /// Adds a managed allocation. `make` obtains its memory from the driver.
    pub fn allocate_managed(
        &mut self,
        size: u64,
        context: usize,
        beyond: bool,
        work: &Work,
        make: impl FnOnce() -> Result<u64, CUresult>,
    ) -> Result<u64, CUresult> {
        self.reclaim(work);
        let len = size.checked_next_multiple_of(GRANULE).ok_or(ERROR_OUT_OF_MEMORY)?;
        if !self.account.admits(len, beyond) {
            return Err(ERROR_OUT_OF_MEMORY);
        }
        let base = make()?;
        self.add_range(base, len, RangeKind::Single, Flags { managed: size, ..Flags::default() })?;
        self.add_allocation(Allocation { base, size, id: 0, context, managed: true, pool: 0, range: base });
        Ok(base)
    }

    /// Whether the program has allocated managed memory.
    pub fn has_managed(&self) -> bool {
        self.allocations.values().any(|allocation| allocation.managed)
    }

    pub(super) fn engine_of_range(&self, base: u64) -> Engine {
        let flags = self.ranges.get(&base).and_then(|range| range.chunks.first()).map(|chunk| chunk.flags);
        flags.map_or(self.engine, |flags| self.engine_of(flags))
    }

    /// Removes the allocation at this address from the space, if freeing it frees managed memory of the
    /// driver. Returns `None` if other allocations share the memory, which then stays.
    ///
    /// # Errors
    /// [`IsMoving`] if the mover holds a part of the memory, which it will soon put back.
    pub fn take_managed(&mut self, address: u64) -> Result<Option<Freeing>, IsMoving> {
        let Some(allocation) = self.allocations.get(&address).copied() else { return Ok(None) };
        let base = allocation.range;
        let is_shared = |space: &Self| {
            // All allocations of a slab lie within one granule.
            let mut within = space.allocations.range(base..base.saturating_add(GRANULE)).map(|(_, other)| other);
            within.any(|other| other.range == base && other.base != address)
        };
        if self.engine_of_range(base).copies() || is_shared(self) {
            return Ok(None);
        }
        if self.ranges.get(&base).is_some_and(Range::is_moving) {
            return Err(IsMoving);
        }
        let Some(range) = self.ranges.remove(&base) else { return Ok(None) };
        self.allocations.remove(&address);
        let (freed, others) =
            core::mem::take(&mut self.freed).into_iter().partition(|freed| freed.allocation.range == base);
        self.freed = others;
        Ok(Some(Freeing { base, allocation, range, freed }))
    }

    /// Ends a free. If the driver has refused to free the memory, puts it back into the space.
    pub fn end_of_freeing(&mut self, freeing: Freeing, is_freed: bool) {
        let Freeing { base, allocation, mut range, freed } = freeing;
        if is_freed {
            range.gone = true;
            return self.dismantle(base, range);
        }
        self.ranges.insert(base, range);
        self.allocations.insert(allocation.base, allocation);
        self.freed.extend(freed);
    }

    /// Takes managed memory that could not be freed earlier. The caller passes it to `cuMemFree`, and
    /// then calls [`end_of_unfreed`](Self::end_of_unfreed).
    pub fn take_unfreed(&mut self) -> Vec<Unfreed> {
        core::mem::take(&mut self.unfreed)
    }

    /// Keeps memory that the driver has refused to free, for example because of a capture. `freed`: the
    /// bytes that it has freed.
    pub fn end_of_unfreed(&mut self, refused: Vec<Unfreed>, freed: u64) {
        self.unfreed.extend(refused);
        // The memory of a context that was destroyed during the call no longer counts.
        self.account.managed = self.account.managed.saturating_sub(freed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::fake::Memory;

    const AT: u64 = 64 << 30;
    const SIZE: u64 = 3 * GRANULE;

    fn allocate(memory: &Memory, at: u64) {
        let mut space = memory.space.lock();
        let context = memory.context as usize;
        assert_eq!(space.allocate_managed(SIZE - 1, context, false, memory.work, || Ok(at)), Ok(at));
    }

    #[test]
    fn managed_memory_counts_until_the_driver_has_freed_it() {
        let memory = Memory::new();
        let counted = || (memory.account().demand, memory.account().managed);
        allocate(&memory, AT);
        memory.allocate();
        assert_eq!(counted(), (SIZE + GRANULE, SIZE), "other memory is not managed");
        let take = || memory.space.lock().take_managed(AT).expect("it is not moving").expect("managed memory");
        let freeing = take();
        assert_eq!(counted().1, SIZE, "the driver may still be waiting for work");
        memory.space.lock().end_of_freeing(freeing, false);
        assert_eq!(counted().1, SIZE, "it has refused");
        let freeing = take();
        memory.space.lock().end_of_freeing(freeing, true);
        assert_eq!(counted(), (GRANULE, 0));
    }

    #[test]
    fn managed_memory_beyond_the_gpu_makes_room_for_other_memory() {
        let memory = Memory::new();
        {
            let mut space = memory.space.lock();
            space.account.may_exceed_gpu = true;
            space.limit(1, 8 * GRANULE, 2 * GRANULE, 0);
            space.allow(1, 4 * GRANULE);
        }
        allocate(&memory, AT);
        let plain = [(); 2].map(|()| memory.allocate());
        assert!(plain.iter().all(|at| memory.driver.is_mapped(*at)));
        let account = memory.account();
        assert_eq!((account.mapped, account.swapped, account.shortfall()), (2 * GRANULE, SIZE, 0));
        assert!(account.can_run(), "the driver pages the managed memory");
        let more = memory.space.lock().allocate(GRANULE, memory.context as usize, false, memory.work);
        assert_eq!(more, Err(ERROR_OUT_OF_MEMORY), "other memory must fit on the GPU");
        assert_eq!(memory.space.lock().take_strays(), [(AT, SIZE - 1)], "the driver may have moved it to the GPU");
        memory.space.lock().account.may_exceed_gpu = false;
        assert!(!memory.account().can_run());
    }

    /// For example small managed allocations.
    #[test]
    fn managed_memory_outside_of_chunks_makes_no_room() {
        let memory = Memory::new();
        let mut space = memory.space.lock();
        space.account.may_exceed_gpu = true;
        (space.account.pinned, space.account.managed, space.account.managed_pinned) = (GRANULE, GRANULE, GRANULE);
        space.limit(1, 8 * GRANULE, 8 * GRANULE, 0);
        space.allow(1, GRANULE);
        space.allocate(GRANULE, memory.context as usize, false, memory.work).expect("room within the limit");
        assert_eq!((space.account.shortfall(), space.account.managed_pinned), (GRANULE, GRANULE));
        assert!(!space.can_restore(), "none of it can leave the GPU");
    }

    #[test]
    fn managed_memory_that_a_program_thread_must_free_still_counts() {
        let memory = Memory::new();
        let managed = || memory.account().managed;
        for at in [AT, 2 * AT] {
            allocate(&memory, at);
            memory.space.lock().undo(at);
        }
        assert_eq!((memory.account().demand, managed()), (0, 2 * SIZE));
        let unfreed = memory.space.lock().take_unfreed();
        assert_eq!(unfreed.iter().map(|unfreed| unfreed.base).collect::<Vec<_>>(), [AT, 2 * AT]);
        memory.space.lock().end_of_unfreed(unfreed[1..].to_vec(), SIZE);
        assert_eq!(managed(), SIZE);
        allocate(&memory, AT);
        memory.space.lock().drop_context(memory.context as usize, true);
        assert_eq!(managed(), 0, "the driver has freed it with its context");
    }
}
