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
    pub(in crate::memory) fn chunks_to_restore(&self) -> Vec<(u64, u64, u64)> {
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
    pub(super) fn chunks_to_evict(&self, bytes: u64) -> Vec<(u64, &Chunk)> {
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
        let names: Vec<_> = self.chunks_to_evict(bytes).into_iter().map(|(base, chunk)| (base, chunk.offset)).collect();
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
        self.on_eviction(len, &residency);
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
    pub(in crate::memory) fn on_eviction(&mut self, len: u64, there: &Residency) {
        self.account.mapped -= len;
        if let Residency::Host(_) | Residency::File(_) = there {
            self.account.swapped += len;
        }
        if let Residency::File(_) = there {
            self.account.in_file += len;
        }
        self.acknowledge();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{
        engine::{CHUNK, Flags, GRANULE},
        fake::{EVICT_ALL, Memory},
        mover::Goal,
    };

    fn addresses(leaving: &[(u64, &Chunk)]) -> Vec<u64> {
        leaving.iter().map(|(base, chunk)| base + chunk.offset).collect()
    }

    #[test]
    fn chunks_with_a_copy_in_host_memory_leave_first() {
        let memory = Memory::new();
        let [first, second] = [(); 2].map(|()| memory.allocate());
        memory.run(EVICT_ALL);
        memory.run(Goal::Restore);
        let mut space = memory.space.lock();
        let buffer = space.take_copy(GRANULE).expect("a copy"); // of the first chunk
        space.keep_buffers([buffer]);
        assert_eq!(addresses(&space.chunks_to_evict(GRANULE)), [second]);
        assert_eq!(addresses(&space.chunks_to_evict(GRANULE + 1)), [second, first]);
        assert_eq!(addresses(&space.chunks_to_evict(0)), []);
    }

    #[test]
    fn a_chunk_that_is_put_back_leaves_the_account_unchanged() {
        let memory = Memory::new();
        memory.allocate();
        memory.run(EVICT_ALL);
        memory.run(Goal::Restore);
        let mut space = memory.space.lock();
        let before = space.account;
        assert_eq!(before.host_cache, GRANULE);
        let Leaving { base, chunk, is_copied, .. } = space.take_leaving(GRANULE).remove(0);
        assert_eq!((space.account.in_flight, space.account.host_cache, is_copied), (GRANULE, 0, true));
        assert!(!space.account.can_run() && space.chunks_to_evict(GRANULE).is_empty(), "the mover has the chunk");
        space.put(base, chunk.offset, chunk.residency);
        assert_eq!(space.account, before);
    }

    #[test]
    fn a_chunk_is_restored_only_within_the_allowance() {
        let memory = Memory::new();
        memory.allocate();
        memory.run(EVICT_ALL);
        let mut space = memory.space.lock();
        let lacking = space.chunks_to_restore();
        let [(base, offset, GRANULE)] = lacking[..] else { panic!("{lacking:?}") };
        space.allow(1, GRANULE - 1);
        assert!(!space.can_restore() && space.take_lacking(base, offset).is_none());
        space.allow(2, GRANULE);
        assert!(space.can_restore());
        let before = space.account;
        let chunk = space.take_lacking(base, offset).expect("room");
        let account = space.account;
        assert_eq!((account.mapped, account.swapped, account.in_flight), (GRANULE, 0, GRANULE));
        assert!(space.take_lacking(base, offset).is_none() && space.chunks_to_restore().is_empty());
        space.stays_away(base, offset, GRANULE, chunk.residency);
        assert_eq!(space.account, before);
    }

    #[test]
    fn pinned_memory_does_not_move() {
        let memory = Memory::new();
        let at = memory.allocate();
        let mut space = memory.space.lock();
        assert!(space.pin(at) && space.chunks_to_evict(GRANULE).is_empty());
        assert_eq!((space.account.demand, space.account.mapped, space.account.pinned), (0, 0, GRANULE));
        space.undo(at);
        assert_eq!((space.account.demand, space.account.pinned, memory.driver.used()), (0, 0, 0));
    }

    /// Two allocations of one slab are announced to other devices.
    #[test]
    fn announced_memory_moves_again_once_no_device_accesses_its_range() {
        let memory = Memory::new();
        let mut space = memory.space.lock();
        let mut small = || space.allocate(1000, memory.context as usize, false, memory.work).expect("room").address;
        let (one, other) = (small(), small());
        let base = space.range_of(one).expect("a slab");
        assert_eq!(space.range_of(other), Some(base));
        assert!(space.announce(base, one) && space.announce(base, other) && space.announce(base, one));
        assert_eq!((space.account.demand, space.account.pinned), (0, GRANULE));
        space.withdraw(base, one);
        assert_eq!(space.account.pinned, GRANULE, "the other is still announced");
        space.undo(other);
        assert_eq!((space.account.demand, space.account.mapped, space.account.pinned), (GRANULE, GRANULE, 0));
        assert!(!space.chunks_to_evict(GRANULE).is_empty());
        space.undo(one);
        assert_eq!((space.account.demand, memory.driver.used()), (0, 0));
    }

    #[test]
    fn memory_is_divided_into_chunks_unless_the_program_can_export_it() {
        let memory = Memory::new();
        let mut space = memory.space.lock();
        let size = 2 * CHUNK + GRANULE;
        let mut create = |handle_types| {
            let flags = Flags { handle_types, ..Flags::default() };
            let (base, _) = space.create(size, flags, false, memory.work).expect("room");
            let lens: Vec<u64> = space.chunks_to_evict(u64::MAX).iter().map(|(_, chunk)| chunk.len).collect();
            space.destroy(base);
            lens
        };
        assert_eq!(create(0), [CHUNK, CHUNK, GRANULE]);
        assert_eq!(create(MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), [size]);
    }

    #[test]
    fn an_allowance_is_acknowledged_when_the_excess_has_left() {
        let memory = Memory::new();
        let _ = [(); 2].map(|()| memory.allocate());
        let mut space = memory.space.lock();
        space.allow(1, GRANULE);
        space.allow(2, 0);
        for ack in [1, 2] {
            assert_eq!(space.account.ack, ack - 1);
            let Leaving { base, chunk, .. } = space.take_leaving(GRANULE).remove(0);
            let Residency::Gpu { handle, .. } = chunk.residency else { panic!("{chunk:?}") };
            space.engine().unmap(base + chunk.offset, chunk.len, handle);
            space.on_eviction(chunk.len, &Residency::Constant(0));
            space.put(base, chunk.offset, Residency::Constant(0));
        }
        assert_eq!((space.account.ack, space.account.mapped, space.account.swapped), (2, 0, 0));
    }
}
