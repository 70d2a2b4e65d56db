//! Chunks on their way into a swap file or out of it. Meanwhile they are in flight, so the program does not run.

use super::Space;
use crate::{
    memory::{
        chunk::{HostCopy, Residency},
        file::{ChunkName, Done, FileCopy, Outcome, SwapFile},
        staging::Buffer,
    },
    sys::sync::Mutex,
};

impl Space {
    /// Takes a chunk whose copy can go into a file: the last, since the first come back first.
    fn take_for_file(&mut self, room: u64) -> Option<(ChunkName, HostCopy)> {
        let gpu = self.gpu as u32;
        for (base, range) in self.ranges.iter_mut().rev().filter(|(_, range)| range.moves()) {
            for chunk in range.chunks.iter_mut().rev().filter(|chunk| chunk.len <= room) {
                if let Residency::Host(Some(_)) = chunk.residency
                    && let Residency::Host(Some(copy)) = chunk.take().residency
                {
                    self.account.in_flight += chunk.len;
                    return Some((ChunkName { gpu, base: *base, offset: chunk.offset, len: chunk.len }, copy));
                }
            }
        }
        None
    }

    /// Has one more copy written, whose buffer `unregister` makes fit to be freed without the driver. Returns its size; `None` if
    /// there is none that fits.
    pub fn write_one(
        space: &Mutex<Space>,
        file: &SwapFile,
        unregister: impl FnOnce(&mut Buffer) -> bool,
    ) -> Option<u64> {
        let (chunk, mut copy) = space.lock().take_for_file(file.room())?;
        let written = if unregister(&mut copy.buffer) { file.write(chunk, copy) } else { Err(copy) };
        match written {
            Ok(()) => Some(chunk.len),
            Err(copy) => {
                space.lock().put(chunk.base, chunk.offset, Residency::Host(Some(copy)));
                None
            }
        }
    }

    /// Has the next chunk read, if the allowance has room for it, and if it is read alone or with others of at most `most` bytes in
    /// all, those included that wait in host memory. Returns whether there is one.
    pub fn read_one(&mut self, most: u64) -> bool {
        let others = self.bytes_in_host_buffers() + self.account.in_flight;
        let room = self.account.room().saturating_sub(self.account.in_flight);
        let room = if others == 0 { room } else { room.min(most.saturating_sub(others)) };
        let Some((chunk, copy)) = self.take_from_file(room) else { return false };
        copy.read(chunk);
        true
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

    /// Bytes of chunks that are away from the GPU and in host memory.
    fn bytes_in_host_buffers(&self) -> u64 {
        let chunks = self.ranges.values().filter(|range| range.moves()).flat_map(|range| &range.chunks);
        chunks.filter(|chunk| matches!(chunk.residency, Residency::Host(Some(_)))).map(|chunk| chunk.len).sum()
    }

    /// Puts back the chunks of a file's jobs that are done. `register` makes buffers fit for fast copies. Returns whether there were
    /// any.
    pub fn land(space: &Mutex<Space>, file: &SwapFile, register: impl Fn(&mut Buffer)) -> bool {
        let gpu = space.lock().gpu as u32;
        let done = file.take_done(gpu);
        let any = !done.is_empty();
        for Done { chunk: ChunkName { base, offset, len, .. }, outcome } in done {
            let outcome = match outcome {
                Outcome::Read(mut copy) => {
                    register(&mut copy.buffer);
                    Outcome::Read(copy)
                }
                other => other,
            };
            let mut guard = space.lock();
            let residency = match outcome {
                Outcome::Written(copy) => {
                    guard.account.in_file += len;
                    Residency::File(copy)
                }
                Outcome::NotWritten(copy) => Residency::Host(Some(copy)),
                Outcome::NoBuffer(copy) => Residency::File(copy),
                Outcome::Read(copy) => {
                    guard.account.in_file -= len;
                    Residency::Host(Some(copy))
                }
                Outcome::Lost => {
                    guard.account.in_file -= len;
                    guard.account.swapped -= len;
                    guard.account.is_lost = true;
                    Residency::Unbacked
                }
            };
            guard.put(base, offset, residency);
        }
        any
    }
}
