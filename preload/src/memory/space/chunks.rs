//! The mover's access to chunks: the mover takes chunks out of the space, moves them and puts them
//! back.

use super::Space;
use crate::{
    driver::types::*,
    memory::chunk::{Chunk, Leaving, Residency},
};
use alloc::vec::Vec;

impl Space {
    /// Takes a chunk that is still off the GPU, if the allowance has room for the chunk. The chunk counts
    /// as mapped from then on.
    pub(in crate::memory) fn take_lacking(&mut self, base: u64, offset: u64) -> Option<Chunk> {
        let room = self.account.room();
        let range = self.ranges.get_mut(&base).filter(|range| range.moves())?;
        let chunk = range.chunks.iter_mut().find(|c| c.offset == offset && c.is_at_hand() && c.len <= room)?;
        let taken = chunk.take();
        self.account.in_flight += taken.len;
        self.account.mapped += taken.len;
        if matches!(taken.residency, Residency::Host(_)) {
            self.account.swapped -= taken.len;
        }
        Some(taken)
    }

    /// Returns all chunks that can be restored without reading a file: base, offset and length.
    pub(in crate::memory) fn lacking(&self) -> Vec<(u64, u64, u64)> {
        let live = self.ranges.iter().filter(|(_, range)| range.moves());
        let chunks = live.flat_map(|(base, range)| range.chunks.iter().map(move |c| (*base, c)));
        chunks.filter(|(_, c)| c.is_at_hand()).map(|(base, c)| (base, c.offset, c.len)).collect()
    }

    /// Whether the allowance has room for a chunk that is off the GPU.
    pub fn can_restore(&self) -> bool {
        let room = self.account.room();
        let lacking = |c: &Chunk| c.is_away() && c.len <= room;
        !self.account.is_complete() && self.ranges.values().any(|r| r.moves() && r.chunks.iter().any(lacking))
    }

    /// Selects chunks to evict until `bytes` bytes are freed. Chunks with a copy come first.
    pub(super) fn leaving(&self, bytes: u64) -> Vec<(u64, &Chunk)> {
        let mut leaving = Vec::new();
        let mut sum = 0u64;
        for with_copy in [true, false] {
            let live = self.ranges.iter().filter(|(_, range)| range.moves());
            for (base, chunk) in live.flat_map(|(base, range)| range.chunks.iter().map(move |c| (*base, c))) {
                if sum >= bytes {
                    return leaving;
                }
                if matches!(&chunk.residency, Residency::Gpu { copy, .. } if copy.is_some() == with_copy) {
                    leaving.push((base, chunk));
                    sum += chunk.len;
                }
            }
        }
        leaving
    }

    /// Takes the chunks to evict. They belong to the mover until [`put`](Self::put), so no other code
    /// unmaps them.
    pub(in crate::memory) fn take_leaving(&mut self, bytes: u64) -> Vec<Leaving> {
        let names: Vec<_> = self.leaving(bytes).into_iter().map(|(base, chunk)| (base, chunk.offset)).collect();
        names.into_iter().filter_map(|(base, offset)| self.take_mapped(base, offset)).collect()
    }

    pub(super) fn take_mapped(&mut self, base: u64, offset: u64) -> Option<Leaving> {
        let chunk = self.ranges.get_mut(&base)?.chunks.iter_mut().find(|c| c.offset == offset)?.take();
        self.account.in_flight += chunk.len;
        if let Residency::Gpu { copy: Some(copy), .. } = &chunk.residency {
            self.account.host_cache -= copy.host_bytes();
        }
        let is_copied = self.engine_of(chunk.flags).copies();
        Some(Leaving { base, chunk, is_copied, fingerprint: None })
    }

    /// Puts back a chunk that could not be restored.
    pub(in crate::memory) fn stays_away(&mut self, base: u64, offset: u64, len: u64, residency: Residency) {
        self.left(len, &residency);
        self.put(base, offset, residency);
    }

    /// Puts back a chunk with its new residency.
    pub(in crate::memory) fn put(&mut self, base: u64, offset: u64, residency: Residency) {
        let Some(range) = self.ranges.get_mut(&base) else { return };
        let dead = range.dead;
        if let Some(chunk) = range.chunks.iter_mut().find(|c| c.offset == offset) {
            if let Residency::Gpu { handle, .. } = residency {
                // If the chunk was not evicted after all, it must also be mapped at aliases that were added in the
                // meantime.
                let _ = range.aliases.show(offset, chunk.len, handle);
            }
            // The chunk is on the GPU, so its copy in host memory only counts as cache.
            if let Residency::Gpu { copy: Some(copy), .. } = &residency {
                self.account.host_cache += copy.host_bytes();
            }
            chunk.residency = residency;
            self.account.in_flight -= chunk.len;
        }
        self.update_peak();
        if dead {
            self.drop_range(base);
        }
    }

    /// Unmaps a chunk that is about to be evicted from the aliases of its range.
    pub(in crate::memory) fn hide(&mut self, base: u64, offset: u64) {
        if let Some(range) = self.ranges.get_mut(&base) {
            range.aliases.hide(offset);
        }
    }

    /// Maps a restored chunk at the aliases of its range.
    pub(in crate::memory) fn show(&mut self, base: u64, offset: u64, len: u64, handle: Handle) -> Result<(), CUresult> {
        self.ranges.get_mut(&base).map_or(Ok(()), |range| range.aliases.show(offset, len, handle))
    }

    /// Accounts for a chunk whose memory on the GPU has been freed. `there` is the chunk's new residency.
    pub(in crate::memory) fn left(&mut self, len: u64, there: &Residency) {
        self.account.mapped -= len;
        if let Residency::Host(_) | Residency::File(_) = there {
            self.account.swapped += len;
        }
        if let Residency::File(_) = there {
            self.account.in_file += len;
        }
        self.settle();
    }
}
