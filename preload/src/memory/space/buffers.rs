//! Host buffers that belong to the space: free ones, and copies of chunks that are on the GPU.

use super::Space;
use crate::memory::{
    chunk::{Chunk, Kept, Residency},
    staging::Buffer,
};
use alloc::vec::Vec;

impl Space {
    /// Keeps buffers for the next eviction. [`take_surplus`](Self::take_surplus) removes those beyond what may be kept.
    pub(in crate::memory) fn keep_buffers(&mut self, buffers: impl IntoIterator<Item = Buffer>) {
        for buffer in buffers {
            self.account.host_cache += buffer.len();
            self.free_buffers.push(buffer);
        }
    }

    /// A free buffer of this length.
    pub(in crate::memory) fn take_free_buffer(&mut self, len: u64) -> Option<Buffer> {
        let at = self.free_buffers.iter().position(|buffer| buffer.len() == len)?;
        self.account.host_cache -= len;
        Some(self.free_buffers.swap_remove(at))
    }

    /// The last `count` free buffers.
    pub(in crate::memory) fn take_free_buffers(&mut self, count: usize) -> Vec<Buffer> {
        let taken = self.free_buffers.split_off(self.free_buffers.len().saturating_sub(count));
        self.account.host_cache -= taken.iter().map(Buffer::len).sum::<u64>();
        taken
    }

    /// Buffers beyond `most` bytes: first free ones, then copies of chunks on the GPU.
    pub fn take_surplus(&mut self, most: u64) -> Vec<Buffer> {
        let mut surplus = Vec::new();
        while self.account.host_cache > most {
            let Some(buffer) = self.take_free_buffers(1).pop().or_else(|| self.take_copy_if(|_| true)) else { break };
            surplus.push(buffer);
        }
        surplus
    }

    /// The buffer of a copy whose chunk is on the GPU.
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

    /// The lengths of the free buffers.
    pub(in crate::memory) fn free_buffer_lengths(&self) -> Vec<u64> {
        self.free_buffers.iter().map(Buffer::len).collect()
    }

    /// The lengths of the buffers that evicting so many bytes would need, if what is kept has not changed on the GPU.
    pub(in crate::memory) fn buffers_for(&self, bytes: u64) -> Vec<u64> {
        let needs = |chunk: &Chunk| {
            self.engine_of(chunk.flags).copies() && matches!(chunk.residency, Residency::Gpu { copy: None, .. })
        };
        self.leaving(bytes).into_iter().filter(|(_, chunk)| needs(chunk)).map(|(_, chunk)| chunk.len).collect()
    }

    /// All buffers.
    pub(in crate::memory) fn buffers(&mut self) -> impl Iterator<Item = &mut Buffer> {
        let chunks = self.ranges.values_mut().flat_map(|range| &mut range.chunks);
        let copies = chunks.filter_map(|chunk| match &mut chunk.residency {
            Residency::Gpu { copy: Some(Kept::Host(copy)), .. } | Residency::Host(Some(copy)) => Some(&mut copy.buffer),
            _ => None,
        });
        copies.chain(&mut self.free_buffers)
    }
}
