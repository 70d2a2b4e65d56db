//! Ranges that other processes can open.

use super::{Allocation, Space, chunks::Residency};
use crate::{driver::types::*, memory::engine::CHUNK};
use nvshare_wire::Secret;

/// The name of an exported range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exported {
    pub range: u32,
    pub secret: Secret,
}

/// The outcome of exporting a range.
#[derive(Debug)]
pub enum Export {
    /// The range, the allocation, and its offset in the range.
    Done(Exported, Allocation, u32),
    /// Part of the range is off the GPU.
    Away,
    Impossible,
}

impl Space {
    /// Whether other processes can open any range of the space.
    pub fn has_exported(&self) -> bool {
        self.ranges.values().any(|range| range.exported.is_some())
    }

    /// Exports and pins the range of the allocation at this address. All chunks of the range must
    /// be on the GPU, and `can_share` must accept the first chunk. `new` creates a name if the
    /// range has none.
    pub fn export(
        &mut self,
        address: u64,
        can_share: impl Fn(Handle) -> bool,
        new: impl FnOnce() -> Option<Exported>,
    ) -> Export {
        let allocation = self.find(address).filter(|a| !a.managed && a.pool == 0 && self.engine.copies());
        let Some(allocation) = allocation else { return Export::Impossible };
        let base = allocation.range;
        let Ok(offset) = u32::try_from(allocation.base - base) else { return Export::Impossible };
        if let Some(exported) = self.ranges.get(&base).and_then(|range| range.exported) {
            return Export::Done(exported, allocation, offset);
        }
        match self.on_gpu(base) {
            Some(first) if can_share(first) => {}
            Some(_) => return Export::Impossible,
            None => return Export::Away,
        }
        let Some(exported) = new().filter(|_| self.pin(base)) else { return Export::Impossible };
        if let Some(range) = self.ranges.get_mut(&base) {
            range.exported = Some(exported);
        }
        Export::Done(exported, allocation, offset)
    }

    /// Returns the size of an exported range, the size of all its chunks except the last, and the
    /// handles of the chunks from index `first` on. Returns `None` if the range no longer contains
    /// that allocation.
    pub fn chunks_of_export(
        &self,
        exported: Exported,
        allocation: u64,
        first: usize,
    ) -> Option<(u64, u64, impl Iterator<Item = Handle>)> {
        let (base, range) = self.ranges.iter().find(|(_, range)| range.exported == Some(exported))?;
        let mut inside = self.allocations.range(*base..base + range.len);
        inside.find(|(_, a)| a.id == allocation)?;
        let handles = range.chunks.iter().skip(first).map_while(|chunk| match chunk.residency {
            Residency::Gpu { handle, .. } => Some(handle),
            _ => None,
        });
        Some((range.len, CHUNK, handles))
    }
}
