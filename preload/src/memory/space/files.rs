//! Chunks that are being written to a swap file or read from it. They count as in flight, so the
//! program does not run.

use super::{
    Space,
    chunks::{Kept, Residency},
};
use crate::memory::file::{ChunkName, Done, FileCopy, HostCopy, Outcome, SwapFile};

impl Space {
    /// Takes a chunk whose copy can move to the file. Prefers a chunk that already has a place in a file.
    /// Otherwise takes the last chunk that fits, because the first chunks are restored first.
    fn take_for_file(&mut self, room: u64) -> Option<(ChunkName, HostCopy)> {
        let gpu = self.gpu as u32;
        for is_there in [true, false] {
            for (base, range) in self.ranges.iter_mut().rev().filter(|(_, range)| range.moves()) {
                for chunk in range.chunks.iter_mut().rev() {
                    if let Residency::Host(Some(copy)) = &chunk.residency
                        && copy.file.is_some() == is_there
                        && (is_there || chunk.len <= room)
                        && let Residency::Host(Some(copy)) = chunk.take().residency
                    {
                        self.account.in_flight += chunk.len;
                        return Some((ChunkName { gpu, base: *base, offset: chunk.offset, len: chunk.len }, copy));
                    }
                }
            }
        }
        None
    }

    /// Frees the file space of all chunks whose contents are also in host memory or on the GPU.
    pub fn forget_places(&mut self) {
        for chunk in self.ranges.values_mut().flat_map(|range| &mut range.chunks) {
            match &mut chunk.residency {
                Residency::Gpu { copy: Some(Kept::Host(copy)), .. } | Residency::Host(Some(copy)) => copy.file = None,
                Residency::Gpu { copy: copy @ Some(Kept::File(_)), .. } => *copy = None,
                _ => {}
            }
        }
    }

    /// Moves one more copy out of host memory. The copy is written unless it is already in a file. Returns
    /// the size of the chunk, or `None` if no copy fits.
    pub fn write_one(&mut self, file: &SwapFile) -> Option<u64> {
        let (chunk, mut copy) = self.take_for_file(file.room()).or_else(|| {
            // The file may be full of copies of chunks that are also in host memory or on the GPU.
            if self.bytes_in_host_buffers() > 0 && file.jobs() == 0 {
                self.forget_places();
            }
            self.take_for_file(file.room())
        })?;
        if let Some(place) = copy.file.take() {
            self.release_buffer(copy.buffer);
            self.account.in_file += chunk.len;
            self.put(chunk.base, chunk.offset, Residency::File(place));
            return Some(chunk.len);
        }
        match file.write(chunk, copy) {
            Ok(()) => Some(chunk.len),
            Err(copy) => {
                self.put(chunk.base, chunk.offset, Residency::Host(Some(copy)));
                None
            }
        }
    }

    /// Starts reading the next chunk that fits in the allowance. Chunks in host memory or in flight
    /// may total `most` bytes, but a single chunk may be larger. Reads into a free buffer, a new
    /// buffer of at most `spare` bytes, or the buffer of a copy whose chunk is on the GPU. Returns
    /// the size of the chunk, or `None` if no chunk can be read.
    pub fn read_one(&mut self, most: u64, spare: u64) -> Option<u64> {
        let others = self.bytes_in_host_buffers() + self.account.in_flight;
        let room = self.account.room().saturating_sub(self.account.in_flight);
        let room = if others == 0 { room } else { room.min(most.saturating_sub(others)) };
        let (chunk, copy) = self.take_from_file(room)?;
        let free = self.take_free_buffer(chunk.len);
        let buffer = free.or_else(|| (chunk.len > spare).then(|| self.take_copy(chunk.len))?);
        copy.read(chunk, buffer);
        Some(chunk.len)
    }

    fn take_from_file(&mut self, room: u64) -> Option<(ChunkName, FileCopy)> {
        let gpu = self.gpu as u32;
        for (base, range) in self.ranges.iter_mut().filter(|(_, range)| range.moves()) {
            for chunk in range.chunks.iter_mut().filter(|chunk| chunk.len <= room) {
                if let Residency::File(_) = chunk.residency
                    && let Residency::File(copy) = chunk.take().residency
                {
                    self.account.in_flight += chunk.len;
                    return Some((ChunkName { gpu, base: *base, offset: chunk.offset, len: chunk.len }, copy));
                }
            }
        }
        None
    }

    /// Bytes of chunks whose contents are in host memory only.
    fn bytes_in_host_buffers(&self) -> u64 {
        let chunks = self.ranges.values().filter(|range| range.moves()).flat_map(|range| &range.chunks);
        chunks.filter(|chunk| matches!(chunk.residency, Residency::Host(Some(_)))).map(|chunk| chunk.len).sum()
    }

    /// Puts back the chunks of a file's finished jobs. Returns whether there were finished jobs.
    pub fn land(&mut self, file: &SwapFile) -> bool {
        let done = file.take_done(self.gpu as u32);
        let any = !done.is_empty();
        for Done { chunk: ChunkName { base, offset, len, .. }, outcome } in done {
            let residency = match outcome {
                Outcome::Written(copy, buffer) => {
                    self.release_buffer(buffer);
                    self.account.in_file += len;
                    Residency::File(copy)
                }
                Outcome::NotWritten(copy) => Residency::Host(Some(copy)),
                Outcome::NoBuffer(copy) => Residency::File(copy),
                Outcome::Read(mut copy) => {
                    self.account.in_file -= len;
                    if !file.is_kept() {
                        copy.file = None;
                    }
                    Residency::Host(Some(copy))
                }
                Outcome::Lost(buffer) => {
                    self.keep_buffers([buffer]);
                    self.account.in_file -= len;
                    self.account.swapped -= len;
                    self.account.is_lost = true;
                    Residency::Unbacked
                }
            };
            self.put(base, offset, residency);
        }
        any
    }
}
