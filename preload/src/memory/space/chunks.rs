//! Chunks: the units in which memory is mapped and moved. Their [`Residency`] says where the contents
//! are. The mover takes chunks out of the space, moves them and puts them back. The *allowance* is the
//! scheduler's limit on this client's bytes on the GPU. The space records which allowances have been
//! carried out.
//!
//! A restored chunk keeps its copy in host memory or in its file while there is room. If its
//! fingerprint is unchanged at the next eviction, the chunk is neither copied nor written again.

use super::Space;
use crate::{
    driver::types::*,
    memory::{
        engine::Flags,
        file::{FileCopy, HostCopy},
        fingerprint::Fingerprint,
        staging::Buffer,
    },
};
use alloc::vec::Vec;

/// The most pending allowances. No eviction has this many steps.
const MANY_PENDING: usize = 4096;

#[derive(Debug)]
pub(in crate::memory) struct Chunk {
    pub offset: u64,
    pub len: u64,
    pub flags: Flags,
    pub residency: Residency,
}

/// Where a chunk's contents are.
#[derive(Debug)]
pub(in crate::memory) enum Residency {
    /// The chunk has no contents yet, and no memory.
    Unbacked,
    /// On the GPU. `copy` is the copy that was kept when the chunk was last restored, and may still be
    /// current.
    Gpu { handle: Handle, copy: Option<Kept> },
    /// In host memory. `None` if the driver moves the chunk, so that this library holds no copy.
    Host(Option<HostCopy>),
    /// In a swap file only.
    File(FileCopy),
    /// Stored nowhere, because every 32-bit word has this value.
    Constant(u32),
    /// The mover has taken the chunk.
    Moving,
}

/// A copy of a chunk that is on the GPU.
#[derive(Debug)]
pub(in crate::memory) enum Kept {
    Host(HostCopy),
    File(FileCopy),
}

impl Kept {
    /// Separates the host buffer from the copy in a file.
    pub(in crate::memory) fn without_buffer(self) -> (Option<Buffer>, Option<Self>) {
        match self {
            Self::Host(HostCopy { buffer, file, .. }) => (Some(buffer), file.map(Self::File)),
            Self::File(_) => (None, Some(self)),
        }
    }

    pub(in crate::memory) fn fingerprint(&self) -> Option<Fingerprint> {
        match self {
            Self::Host(copy) => copy.fingerprint,
            Self::File(copy) => copy.fingerprint(),
        }
    }

    /// Bytes of the host buffer; 0 if the copy is only in a file.
    pub(in crate::memory) fn host_bytes(&self) -> u64 {
        match self {
            Self::Host(copy) => copy.buffer.len(),
            Self::File(_) => 0,
        }
    }
}

impl Chunk {
    /// Whether the chunk is neither on the GPU nor being moved.
    pub(in crate::memory) fn is_away(&self) -> bool {
        self.is_at_hand() || matches!(self.residency, Residency::File(_))
    }

    /// Whether the chunk is off the GPU and can be restored without reading a file.
    pub(in crate::memory) fn is_at_hand(&self) -> bool {
        matches!(self.residency, Residency::Unbacked | Residency::Host(_) | Residency::Constant(_))
    }

    pub(in crate::memory) fn take(&mut self) -> Self {
        let residency = core::mem::replace(&mut self.residency, Residency::Moving);
        Self { offset: self.offset, len: self.len, flags: self.flags, residency }
    }
}

/// A chunk that is about to be evicted.
#[derive(Debug)]
pub(in crate::memory) struct Leaving {
    pub base: u64,
    pub chunk: Chunk,
    /// Whether this library copies the chunk; otherwise the driver moves it.
    pub is_copied: bool,
    /// The fingerprint of the contents, if known.
    pub fingerprint: Option<Fingerprint>,
}

impl Leaving {
    /// Whether the chunk must be copied and no buffer is available in its kept copy.
    pub(in crate::memory) fn needs_buffer(&self) -> bool {
        match &self.chunk.residency {
            Residency::Gpu { copy: Some(copy), .. } => {
                copy.host_bytes() == 0 && (self.fingerprint.is_none() || copy.fingerprint() != self.fingerprint)
            }
            Residency::Gpu { copy: None, .. } => true,
            _ => false,
        }
    }
}

impl Space {
    /// Takes a chunk that is still off the GPU, if the allowance has room for the chunk. The chunk counts
    /// as mapped from then on.
    pub(in crate::memory) fn take_lacking(&mut self, base: u64, offset: u64) -> Option<Chunk> {
        let room = self.account.room();
        let range = self.ranges.get_mut(&base).filter(|range| range.moves())?;
        let chunk = range.chunks.iter_mut().find(|c| c.offset == offset && c.is_at_hand() && c.len <= room)?;
        let taken = chunk.take();
        self.account.in_flight += taken.len;
        self.account.map(taken.len, !self.engine_of(taken.flags).copies());
        if matches!(taken.residency, Residency::Host(_)) {
            self.account.swapped -= taken.len;
        }
        Some(taken)
    }

    /// Returns all chunks that can be restored without reading a file: base, offset and length. Chunks
    /// that the driver cannot fault in come first.
    pub(in crate::memory) fn chunks_to_restore(&mut self) -> Vec<(u64, u64, u64)> {
        self.may_have_strays |= self.account.may_exceed_gpu;
        self.yield_pages(self.account.shortfall());
        let live = || self.ranges.iter().filter(|(_, range)| range.moves());
        let chunks = |is_paged: bool| {
            let chunks = live().flat_map(|(base, range)| range.chunks.iter().map(move |c| (*base, c)));
            chunks.filter(move |(_, c)| (c.flags.managed > 0) == is_paged && c.is_at_hand())
        };
        chunks(false).chain(chunks(true)).map(|(base, c)| (base, c.offset, c.len)).collect()
    }

    /// Whether the allowance has room for a chunk that is off the GPU.
    pub fn can_restore(&self) -> bool {
        let room = self.account.room();
        let lacking = |c: &Chunk| c.is_away() && c.len <= room;
        let account = &self.account;
        let can_yield = || account.may_exceed_gpu && account.shortfall() > 0 && account.pageable_mapped > 0;
        let has_room = || self.ranges.values().any(|r| r.moves() && r.chunks.iter().any(lacking));
        !account.is_complete() && (has_room() || (can_yield() && account.shortfall() <= room + account.pageable_mapped))
    }

    /// Makes room within the allowance for `len` bytes that the driver cannot fault in, if managed memory
    /// may exceed the GPU. Chunks of managed memory then count as off the GPU. The driver moves their pages
    /// when the room is used.
    pub(super) fn yield_pages(&mut self, len: u64) {
        while self.account.may_exceed_gpu && self.account.room() < len {
            let is_there = |chunk: &Chunk| chunk.flags.managed > 0 && matches!(chunk.residency, Residency::Gpu { .. });
            let live = self.ranges.iter_mut().filter(|(_, range)| range.moves());
            let found = live.flat_map(|(base, range)| range.chunks.iter_mut().map(move |c| (*base, c)));
            let Some((base, chunk)) = { found }.find(|(_, chunk)| is_there(chunk)) else { return };
            chunk.residency = Residency::Host(None);
            let len = chunk.len;
            self.on_eviction(base, len, &Residency::Host(None));
            self.may_have_strays = true;
        }
    }
    /// Returns parts of managed memory that may be on the GPU although they do not count as mapped,
    /// because the program has run while its managed memory exceeded the GPU. The caller prefetches them
    /// to the host.
    pub(in crate::memory) fn take_strays(&mut self) -> Vec<(u64, u64)> {
        if !core::mem::take(&mut self.may_have_strays) {
            return Vec::new();
        }
        let mut strays: Vec<(u64, u64)> = Vec::new();
        for (base, range) in self.ranges.iter_mut().filter(|(_, range)| range.moves()) {
            for chunk in range.chunks.iter_mut().filter(|chunk| chunk.flags.managed > 0 && chunk.is_at_hand()) {
                let (at, len) = (base + chunk.offset, chunk.flags.part_inside(chunk.offset, chunk.len));
                if matches!(chunk.residency, Residency::Unbacked) {
                    chunk.residency = Residency::Host(None);
                    self.account.swapped += chunk.len;
                }
                match strays.last_mut().filter(|(before, part)| before + part == at) {
                    Some((_, part)) => *part += len,
                    None => strays.push((at, len)),
                }
            }
        }
        strays
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
        self.on_eviction(base, len, &residency);
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
            self.has_arrivals = true;
        }
        self.update_peak();
        if dead {
            self.drop_range(base);
        } else {
            self.on_arrival(base);
        }
    }

    /// Whether chunks have arrived at a new residency since the last call.
    pub fn take_arrivals(&mut self) -> bool {
        core::mem::take(&mut self.has_arrivals)
    }

    /// Accounts for a chunk of the range `base` whose memory on the GPU has been freed. `there` is the chunk's
    /// new residency.
    pub(in crate::memory) fn on_eviction(&mut self, base: u64, len: u64, there: &Residency) {
        self.account.unmap(len, !self.engine_of_range(base).copies());
        if let Residency::Host(_) | Residency::File(_) = there {
            self.account.swapped += len;
        }
        if let Residency::File(_) = there {
            self.account.in_file += len;
        }
        self.acknowledge();
    }
}

impl Space {
    /// Applies a new allowance.
    pub fn allow(&mut self, seq: u32, bytes: u64) {
        self.account.allowance = bytes;
        self.pending.push_back((seq, bytes));
        if self.pending.len() > MANY_PENDING {
            self.pending.pop_front(); // later allowances replace it
        }
        self.acknowledge();
    }

    /// Resets the allowance for a new scheduler. Mapped memory stays until the scheduler sends allowances.
    pub fn reset_for_scheduler(&mut self) {
        self.reset_for_successor();
        (self.account.limit_max, self.account.host_cache_max) = (0, u64::MAX);
    }

    /// Resets the allowance for a scheduler that continues on the same connection. The highest limit that
    /// can be requested stays.
    pub fn reset_for_successor(&mut self) {
        self.pending.clear();
        (self.account.allowance, self.account.ack) = (self.account.mapped + self.account.pinned, 0);
        (self.account.limit_seq, self.account.has_limit) = (0, false);
    }

    /// Removes the allowance, to run without a scheduler.
    pub fn run_ungated(&mut self, limit: u64) {
        self.pending.clear();
        (self.account.allowance, self.account.limit) = (u64::MAX, self.account.at_most(limit));
        (self.account.limit_max, self.account.host_cache_max) = (0, u64::MAX);
    }

    /// Applies a new limit on the demand. `most` is the highest limit that can be requested, and `keep` the
    /// limit on cached host buffers.
    pub fn limit(&mut self, seq: u32, bytes: u64, most: u64, keep: u64) {
        self.account.limit = bytes.min(self.account.env_max);
        self.account.limit_max = most.min(self.account.env_max);
        (self.account.limit_seq, self.account.host_cache_max) = (seq, keep);
        self.account.has_limit = true;
    }

    /// Sets the allowance so that `bytes` bytes are evicted and none are restored. Used without a
    /// scheduler, while other clients lack memory.
    pub fn lower_allowance_by(&mut self, bytes: u64) {
        self.account.allowance = self.account.mapped.saturating_sub(bytes) + self.account.pinned;
    }

    /// Ends an eviction that cannot continue. The remaining memory stays on the GPU.
    pub fn give_up_eviction(&mut self) {
        self.account.allowance = self.account.mapped + self.account.pinned;
        if let Some((seq, _)) = self.pending.drain(..).next_back() {
            self.account.ack = seq;
        }
    }

    pub(super) fn update_peak(&mut self) {
        if self.account.can_run() && !self.account.demand_paged {
            self.account.peak = self.account.peak.max(self.account.demand);
        }
    }

    /// Acknowledges the allowances that have been carried out. If the latest has been carried out, all
    /// earlier allowances are obsolete.
    pub(super) fn acknowledge(&mut self) {
        let there = self.account.mapped + self.account.pinned;
        if self.pending.back().is_some_and(|(_, bytes)| there <= *bytes) {
            self.pending.drain(..self.pending.len() - 1);
        }
        while let Some((seq, _)) = self.pending.front().copied().filter(|(_, bytes)| there <= *bytes) {
            self.account.ack = seq;
            self.pending.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{
        engine::{CHUNK, GRANULE},
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
        assert_eq!([one, other, one].map(|at| space.announce(base, at)), [Some(true), Some(true), Some(false)]);
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
            let base = space.create(size, flags, false, memory.work).expect("room").address;
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
            space.on_eviction(base, chunk.len, &Residency::Constant(0));
            space.put(base, chunk.offset, Residency::Constant(0));
        }
        assert_eq!((space.account.ack, space.account.mapped, space.account.swapped), (2, 0, 0));
    }
}
