//! Ranges that other processes can open.

use super::{Allocation, Space, chunks::Residency};
use crate::{driver::types::*, memory::engine::CHUNK};
use alloc::vec::Vec;
use nvshare_wire::{MAX_DESCRIPTORS, Secret};

/// The name of an exported range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exported {
    pub range: u32,
    pub secret: Secret,
}

/// What a process that opens a range gets.
#[derive(Debug)]
pub enum Opening {
    /// The size of the range, the size of all its chunks except the last, and the chunks' handles.
    Chunks { bytes: u64, chunk: u64, handles: Vec<Handle> },
    /// Part of the range is off the GPU.
    Away,
}

impl Space {
    /// Whether other processes can open any range of the space.
    pub fn has_exported(&self) -> bool {
        self.ranges.values().any(|range| range.exported.is_some())
    }

    /// Exports and pins the range of the allocation at this address. All chunks of the range must
    /// be on the GPU, and `can_share` must accept the first chunk. `new` creates a name if the
    /// range has none. Returns the name, the allocation, and its offset in the range.
    pub fn export(
        &mut self,
        address: u64,
        can_share: impl Fn(Handle) -> bool,
        new: impl FnOnce() -> Option<Exported>,
    ) -> Option<(Exported, Allocation, u32)> {
        let allocation = self.find(address).filter(|a| !a.managed && a.pool == 0 && self.engine.copies())?;
        let base = allocation.range;
        let offset = u32::try_from(allocation.base - base).ok()?;
        if let Some(exported) = self.ranges.get(&base).and_then(|range| range.exported) {
            return Some((exported, allocation, offset));
        }
        self.on_gpu(base).filter(|first| can_share(*first))?;
        let exported = new().filter(|_| self.set_opened(base, true))?;
        if let Some(range) = self.ranges.get_mut(&base) {
            range.exported = Some(exported);
        }
        Some((exported, allocation, offset))
    }

    /// Sets whether other processes may have a range open. Returns `false` if the range does not exist.
    fn set_opened(&mut self, base: u64, opened: bool) -> bool {
        self.change_pins(base, |pins| (pins.opened, pins.awaited) = (opened, false))
    }

    /// Called when a chunk of a range has arrived on the GPU.
    pub(super) fn on_arrival(&mut self, base: u64) {
        if self.ranges.get(&base).is_some_and(|range| range.pins.awaited) && self.on_gpu(base).is_some() {
            self.set_opened(base, true);
        }
    }

    /// Handles the end of all imports of a range: the range moves again, until a process opens it anew.
    pub fn on_unused(&mut self, number: u32) {
        let mut ranges = self.ranges.iter();
        let base = ranges.find(|(_, range)| range.exported.is_some_and(|exported| exported.range == number));
        if let Some(base) = base.map(|(base, _)| *base) {
            self.set_opened(base, false);
        }
    }

    /// Keeps exported ranges that may be open on the GPU until they are freed. Called for each new connection
    /// to a scheduler: it may not know all importers, so its word about the last importer does not count for
    /// these ranges.
    pub fn keep_opened(&mut self) {
        let opened = self.ranges.iter().filter(|(_, range)| range.pins.opened).map(|(base, _)| *base);
        for base in opened.collect::<Vec<_>>() {
            self.change_pins(base, |pins| pins.always = true);
        }
    }

    /// Returns the chunks of an exported range from index `first` on, for a process that opens it. From then
    /// on, the range stays on the GPU. Returns `None` if the range no longer contains that allocation.
    pub fn open_export(&mut self, exported: Exported, allocation: u64, first: usize) -> Option<Opening> {
        let (base, range) = self.ranges.iter().find(|(_, range)| range.exported == Some(exported))?;
        let (base, bytes) = (*base, range.len);
        let mut inside = self.allocations.range(base..base + bytes);
        inside.find(|(_, a)| a.id == allocation)?;
        if self.on_gpu(base).is_none() {
            self.change_pins(base, |pins| pins.awaited = true);
            return Some(Opening::Away);
        }
        self.set_opened(base, true);
        let chunks = self.ranges.get(&base)?.chunks.iter().skip(first);
        let handles = chunks.map_while(|chunk| match chunk.residency {
            Residency::Gpu { handle, .. } => Some(handle),
            _ => None,
        });
        Some(Opening::Chunks { bytes, chunk: CHUNK, handles: handles.take(MAX_DESCRIPTORS).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{
        engine::GRANULE,
        fake::{EVICT_ALL, Memory},
        mover::Goal,
    };

    fn pinned(memory: &Memory) -> u64 {
        memory.space.lock().account.pinned
    }

    /// A process opens memory that has left the GPU. When it is back, it stays until the process opens it.
    #[test]
    fn unused_memory_moves_until_a_process_opens_it_again() {
        let memory = Memory::new();
        let at = memory.allocate();
        let exported = Exported { range: 1, secret: Secret([7; 16]) };
        let Some((_, allocation, 0)) = memory.space.lock().export(at, |_| true, || Some(exported)) else {
            panic!("an export")
        };
        let open = || memory.space.lock().open_export(exported, allocation.id, 0);
        assert_eq!(pinned(&memory), GRANULE);
        memory.space.lock().on_unused(1);
        assert_eq!(pinned(&memory), 0);
        memory.run(EVICT_ALL);
        assert!(matches!(open(), Some(Opening::Away)));
        assert_eq!(pinned(&memory), 0);
        memory.run(Goal::Restore);
        assert_eq!(pinned(&memory), GRANULE, "it does not leave before it is opened");
        let Some(Opening::Chunks { bytes: GRANULE, handles, .. }) = open() else { panic!("chunks") };
        assert_eq!(handles.len(), 1);
        memory.space.lock().keep_opened();
        memory.space.lock().on_unused(1);
        assert_eq!(pinned(&memory), GRANULE, "another scheduler may know other importers");
    }
}
