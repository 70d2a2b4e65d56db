//! Exporting ranges, so that other processes can open them.

use super::{Allocation, Space};
use crate::{
    driver::types::*,
    memory::{chunk::Residency, engine::CHUNK},
};
use nvshare_wire::Secret;

/// The name of a range that other processes may open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exported {
    pub range: u32,
    pub secret: Secret,
}

/// How exporting a range went.
#[derive(Debug)]
pub enum Export {
    /// The allocation in it, and where in it.
    Done(Exported, Allocation, u32),
    /// Not all of it is on the GPU.
    Away,
    Impossible,
}

impl Space {
    /// Exports the range of the allocation that has this address: pins it, if all of it is on the GPU and `can_share` its
    /// chunks. `new` makes its name, the first time.
    pub fn export(
        &mut self,
        address: u64,
        can_share: impl Fn(Handle) -> bool,
        new: impl FnOnce() -> Option<Exported>,
    ) -> Export {
        let allocation = self.find(address).filter(|allocation| !allocation.managed && self.engine.copies());
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

    /// An exported range that still has that allocation: its bytes, those of each chunk but the last, and its chunks from
    /// that one on.
    pub fn exported(
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
