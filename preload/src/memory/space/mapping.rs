//! Other accesses to ranges: the program's own mappings, other GPUs, and calls that require a range to
//! stay on the GPU.

use super::{Pins, RangeKind, Space, chunks::Residency};
use crate::{
    driver::types::*,
    memory::{alias::Aliases, engine},
};
use alloc::vec::Vec;

impl Space {
    /// Whether other devices can access allocations (GPUDirect RDMA), as they can access `cuMemAlloc`
    /// memory on such a GPU.
    pub fn is_rdma_capable(&self) -> bool {
        self.flags.rdma != 0 && engine::has(self.gpu, DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)
    }

    /// Gives another GPU access to all allocations on this GPU. No chunk may be moving.
    pub fn let_in(&mut self, gpu: u32) {
        if !self.engine.copies() {
            return; // all GPUs can access managed memory
        }
        self.flags.peers |= 1 << gpu;
        let allocations = self.ranges.iter_mut().filter(|(_, range)| !matches!(range.kind, RangeKind::Created));
        let chunks = allocations.flat_map(|(base, range)| range.chunks.iter_mut().map(move |chunk| (base, chunk)));
        for (base, chunk) in chunks.filter(|(_, chunk)| chunk.flags.managed == 0) {
            chunk.flags.peers = self.flags.peers;
            if let Residency::Gpu { .. } = chunk.residency {
                let _ = engine::let_in(gpu as CUdevice, base + chunk.offset, chunk.len);
            }
        }
    }

    /// Adds an alias at which the program maps the range. Chunks that are off the GPU are mapped there when
    /// they are restored.
    pub fn add_alias(&mut self, base: u64, at: u64) -> Result<(), CUresult> {
        let Some(range) = self.ranges.get_mut(&base) else { return Err(ERROR_INVALID_VALUE) };
        range.aliases.add(at);
        for chunk in &range.chunks {
            if let Residency::Gpu { handle, .. } = chunk.residency {
                let shown = range.aliases.show_at(at, chunk.offset, chunk.len, handle);
                shown.inspect_err(|_| range.aliases.remove(at))?;
            }
        }
        Ok(())
    }

    /// The aliases of a range.
    pub fn aliases(&mut self, base: u64) -> Option<&mut Aliases> {
        self.ranges.get_mut(&base).map(|range| &mut range.aliases)
    }

    /// Returns the driver's handle of the range's first chunk, if the whole range is on the GPU.
    pub fn on_gpu(&self, base: u64) -> Option<Handle> {
        let chunks = &self.ranges.get(&base)?.chunks;
        let handles = chunks
            .iter()
            .map(|chunk| if let Residency::Gpu { handle, .. } = chunk.residency { Some(handle) } else { None });
        handles.reduce(|first, next| first.filter(|_| next.is_some()))?
    }

    /// Keeps a range on the GPU until it is freed. The range then counts as pinned instead of as demand.
    /// Returns `false` if a part of the range is off the GPU.
    pub fn pin(&mut self, base: u64) -> bool {
        self.on_gpu(base).is_some() && self.change_pins(base, |pins| pins.always = true)
    }

    /// Keeps a range on the GPU until the program withdraws the announcement of this address to other
    /// devices, or frees the memory there. Returns whether the address was not announced before, or `None` if
    /// a part of the range is off the GPU.
    pub fn announce(&mut self, base: u64, address: u64) -> Option<bool> {
        self.on_gpu(base)?;
        let mut is_new = false;
        self.change_pins(base, |pins| is_new = pins.announced.insert(address));
        Some(is_new)
    }

    /// Handles an address that other devices do not access any more.
    pub fn withdraw(&mut self, base: u64, address: u64) {
        let remove = |pins: &mut Pins| {
            pins.announced.remove(&address);
        };
        self.change_pins(base, remove);
    }

    /// Changes the reasons for which a range stays on the GPU. Returns `false` if the range does not exist.
    pub(super) fn change_pins(&mut self, base: u64, change: impl FnOnce(&mut Pins)) -> bool {
        let Some(range) = self.ranges.get_mut(&base) else { return false };
        let before = range.pins.are_any();
        change(&mut range.pins);
        match (before, range.pins.are_any()) {
            (false, true) => self.account.pin(range.len),
            (true, false) => self.account.unpin(range.len),
            _ => {}
        }
        true
    }

    /// Pins a range that consists of a single chunk and returns the driver's handle. Returns `None` if the
    /// range has several chunks or is off the GPU.
    pub fn pin_chunk(&mut self, base: u64) -> Option<Handle> {
        let [_] = self.ranges.get(&base)?.chunks.as_slice() else { return None };
        self.on_gpu(base).filter(|_| self.pin(base))
    }

    /// Whether any of these addresses belongs to a range.
    pub fn overlaps(&self, at: u64, len: u64) -> bool {
        let before = self.ranges.range(..at.saturating_add(len.max(1))).next_back();
        before.is_some_and(|(base, range)| base + range.len > at)
    }

    /// The base of the range of an allocation, for [`pin`](Self::pin).
    pub fn range_of(&self, address: u64) -> Option<u64> {
        self.find(address).map(|allocation| allocation.range)
    }

    /// The addresses of the chunks of a range.
    pub fn chunk_addresses(&self, base: u64) -> Vec<u64> {
        let range = self.ranges.get(&base);
        range.map_or_else(Vec::new, |range| range.chunks.iter().map(|chunk| base + chunk.offset).collect())
    }
}
