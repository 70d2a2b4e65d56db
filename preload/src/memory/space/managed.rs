//! Managed memory: the program's own, and all of it with the engine that uses managed memory.
//!
//! The driver frees managed memory only in a thread that has a context, where it waits for the work of the context. So the thread
//! in which the program frees it makes that call: it waits there just as it would without this library. The client's thread,
//! on which others depend, never does.

use super::{Allocation, Freed, Range, RangeKind, Space};
use crate::{
    driver::types::*,
    memory::engine::{Engine, Flags, GRANULE},
    work::Work,
};
use alloc::{collections::VecDeque, vec::Vec};

/// Managed memory that is being freed by the driver. Nothing else knows it meanwhile, since its addresses may be used again before
/// that call returns.
#[derive(Debug)]
pub struct Freeing {
    base: u64,
    allocation: Allocation,
    range: Range,
    /// Other allocations of the same range, which earlier work might still use.
    freed: VecDeque<Freed>,
}

impl Freeing {
    /// What to pass to `cuMemFree`.
    pub fn base(&self) -> CUdeviceptr {
        self.base
    }
}

/// The mover has a part of it at the moment.
#[derive(Debug)]
pub struct IsMoving;

impl Space {
    /// Allocates memory that `make` gets from the driver.
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
        let id = self.next_id;
        self.next_id += 1;
        self.allocations.insert(base, Allocation { base, size, id, context, managed: true, pool: 0, range: base });
        Ok(base)
    }

    /// Whether there is any, of the program's own.
    pub fn has_managed(&self) -> bool {
        self.allocations.values().any(|allocation| allocation.managed)
    }

    pub(super) fn engine_of_range(&self, base: u64) -> &'static dyn Engine {
        let flags = self.ranges.get(&base).and_then(|range| range.chunks.first()).map(|chunk| chunk.flags);
        flags.map_or(self.engine, |flags| self.engine_of(flags))
    }

    /// Takes out the allocation at this address, if freeing it means that the driver frees managed memory: not if other
    /// allocations share the memory.
    ///
    /// # Errors
    /// The mover has a part of it, and gives it back soon.
    pub fn take_managed(&mut self, address: u64) -> Result<Option<Freeing>, IsMoving> {
        let Some(allocation) = self.allocations.get(&address).copied() else { return Ok(None) };
        let base = allocation.range;
        let is_shared = |space: &Self| {
            // Those of a slab are within it.
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

    /// The driver has freed it, or has refused to: then it is as it was.
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

    /// Managed memory that could not be freed earlier; the caller gives it back to the driver.
    pub fn take_unfreed(&mut self) -> Vec<u64> {
        core::mem::take(&mut self.unfreed)
    }

    /// The driver has refused it, for instance because of a capture.
    pub fn keep_unfreed(&mut self, unfreed: Vec<u64>) {
        self.unfreed.extend(unfreed);
    }
}
