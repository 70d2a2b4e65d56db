//! The host buffers of the space: free buffers, and copies of chunks that are on the GPU.

use super::{
    Space,
    chunks::{Chunk, Kept, Residency},
};
use crate::memory::{
    file::HostCopy,
    staging::Buffer,
    waiter::{Finished, Place, Waiter},
};
use alloc::vec::Vec;

impl Space {
    /// Keeps buffers for the next eviction. [`release_surplus`](Self::release_surplus) removes buffers
    /// above the limit.
    pub(in crate::memory) fn keep_buffers(&mut self, buffers: impl IntoIterator<Item = Buffer>) {
        for buffer in buffers {
            self.account.host_cache += buffer.len();
            self.free_buffers.push(buffer);
        }
    }

    /// Takes a free buffer of this length.
    pub(in crate::memory) fn take_free_buffer(&mut self, len: u64) -> Option<Buffer> {
        let at = self.free_buffers.iter().position(|buffer| buffer.len() == len)?;
        self.account.host_cache -= len;
        Some(self.free_buffers.swap_remove(at))
    }

    /// Takes any free buffer.
    fn pop_free_buffer(&mut self) -> Option<Buffer> {
        let taken = self.free_buffers.pop()?;
        self.account.host_cache -= taken.len();
        Some(taken)
    }

    pub(in crate::memory) fn waiter(&self) -> &Waiter {
        &self.waiter
    }

    /// Starts releasing several buffers.
    pub(in crate::memory) fn release_buffers(&mut self, buffers: impl IntoIterator<Item = Buffer>) {
        buffers.into_iter().for_each(|buffer| self.release_buffer(buffer));
    }

    /// Starts unregistering and freeing a buffer that no copy uses.
    pub(in crate::memory) fn release_buffer(&mut self, buffer: Buffer) {
        self.account.releasing += buffer.len();
        self.waiter.unregister(HostCopy { buffer, fingerprint: None, file: None }, None);
    }

    /// Releases cached buffers until at most `most` bytes are left: first free buffers, then copies of
    /// chunks on the GPU.
    pub fn release_surplus(&mut self, most: u64) {
        while self.account.host_cache > most {
            let Some(buffer) = self.pop_free_buffer().or_else(|| self.take_copy_if(|_| true)) else { break };
            self.release_buffer(buffer);
        }
    }

    /// Releases free buffers, and starts unregistering `count` other buffers, so that the kernel
    /// can page them out. `count` is small, because a restore waits for buffers that are being
    /// unregistered. Returns whether buffers are still being unregistered.
    pub(in crate::memory) fn tidy_buffers(&mut self, count: usize) -> bool {
        self.release_surplus(self.account.host_cache - self.free_buffers.iter().map(Buffer::len).sum::<u64>());
        for _ in 0..count {
            let Some((place, copy)) = self.take_registered() else { break };
            self.waiter.unregister(copy, Some(place));
        }
        self.waiter.is_busy()
    }

    /// Takes a copy whose buffer is registered. The bytes of the copy count as in flight, or as releasing
    /// if the chunk is on the GPU.
    fn take_registered(&mut self) -> Option<(Place, HostCopy)> {
        let is_registered = |copy: &HostCopy| copy.buffer.registration().is_some();
        let is_kept = |kept: &Option<Kept>| matches!(kept, Some(Kept::Host(copy)) if is_registered(copy));
        for (base, range) in &mut self.ranges {
            for chunk in &mut range.chunks {
                let (base, offset) = (*base, chunk.offset);
                match &mut chunk.residency {
                    Residency::Host(Some(copy)) if is_registered(copy) => {
                        if let Residency::Host(Some(copy)) = chunk.take().residency {
                            self.account.in_flight += chunk.len;
                            return Some((Place { base, offset, is_away: true }, copy));
                        }
                    }
                    Residency::Gpu { copy: kept, .. } if is_kept(kept) => {
                        if let Some(Kept::Host(copy)) = kept.take() {
                            self.account.host_cache -= copy.buffer.len();
                            self.account.releasing += copy.buffer.len();
                            return Some((Place { base, offset, is_away: false }, copy));
                        }
                    }
                    _ => {}
                }
            }
        }
        None
    }

    /// Applies the results of the thread that unregisters buffers. Returns whether there were results.
    pub fn collect_released(&mut self) -> bool {
        self.waiter.start(); // in case no thread could be started earlier
        let Finished { freed, returned } = self.waiter.take_finished();
        let any = freed > 0 || !returned.is_empty();
        self.account.releasing -= freed;
        for (Place { base, offset, is_away }, copy) in returned {
            if is_away {
                self.put(base, offset, Residency::Host(Some(copy)));
                continue;
            }
            let range = self.ranges.get_mut(&base);
            let chunk = range.and_then(|range| range.chunks.iter_mut().find(|chunk| chunk.offset == offset));
            match chunk.map(|chunk| &mut chunk.residency) {
                Some(Residency::Gpu { copy: kept @ None, .. }) => {
                    self.account.releasing -= copy.buffer.len();
                    self.account.host_cache += copy.buffer.len();
                    *kept = Some(Kept::Host(copy));
                }
                _ => {
                    self.account.releasing -= copy.buffer.len();
                    self.release_buffer(copy.buffer);
                }
            }
        }
        any
    }

    /// Whether buffers are being unregistered.
    pub fn is_releasing(&self) -> bool {
        self.waiter.is_busy()
    }

    /// Takes a buffer of `len` bytes from a copy whose chunk is on the GPU.
    pub(in crate::memory) fn take_copy(&mut self, len: u64) -> Option<Buffer> {
        self.take_copy_if(|chunk| chunk.len == len)
    }

    pub(super) fn take_copy_if(&mut self, wanted: impl Fn(&Chunk) -> bool) -> Option<Buffer> {
        let mut chunks = self.ranges.values_mut().flat_map(|range| &mut range.chunks).filter(|c| wanted(c));
        let buffer = chunks.find_map(|chunk| match &mut chunk.residency {
            Residency::Gpu { copy: kept, .. } => {
                let (buffer, rest) = kept.take()?.without_buffer();
                *kept = rest;
                buffer
            }
            _ => None,
        })?;
        self.account.host_cache -= buffer.len();
        Some(buffer)
    }

    /// Returns the lengths of the free buffers.
    pub(in crate::memory) fn free_buffer_lengths(&self) -> Vec<u64> {
        self.free_buffers.iter().map(Buffer::len).collect()
    }

    /// Returns the lengths of the buffers that an eviction of `bytes` bytes would need. Assumes that chunks
    /// with copies have not changed on the GPU.
    pub(in crate::memory) fn buffers_for(&self, bytes: u64) -> Vec<u64> {
        let needs = |chunk: &Chunk| {
            self.engine_of(chunk.flags).copies() && matches!(chunk.residency, Residency::Gpu { copy: None, .. })
        };
        self.chunks_to_evict(bytes).into_iter().filter(|(_, chunk)| needs(chunk)).map(|(_, chunk)| chunk.len).collect()
    }

    /// Iterates over all host buffers of the space.
    pub(in crate::memory) fn buffers(&mut self) -> impl Iterator<Item = &mut Buffer> {
        let chunks = self.ranges.values_mut().flat_map(|range| &mut range.chunks);
        let copies = chunks.filter_map(|chunk| match &mut chunk.residency {
            Residency::Gpu { copy: Some(Kept::Host(copy)), .. } | Residency::Host(Some(copy)) => Some(&mut copy.buffer),
            _ => None,
        });
        copies.chain(&mut self.free_buffers)
    }
}
