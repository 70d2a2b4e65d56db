//! Chunks: the units in which memory is mapped and moved. Their [`Residency`] says where the contents
//! are.
//!
//! A restored chunk keeps its copy in host memory or in its file while there is room. If its
//! fingerprint is unchanged at the next eviction, the chunk is neither copied nor written again.

use super::{
    engine::Flags,
    file::{FileCopy, HostCopy},
    fingerprint::Fingerprint,
    staging::Buffer,
};
use crate::driver::types::*;

#[derive(Debug)]
pub(super) struct Chunk {
    pub offset: u64,
    pub len: u64,
    pub flags: Flags,
    pub residency: Residency,
}

/// Where a chunk's contents are.
#[derive(Debug)]
pub(super) enum Residency {
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
pub(super) enum Kept {
    Host(HostCopy),
    File(FileCopy),
}

impl Kept {
    /// Separates the host buffer from the copy in a file.
    pub(super) fn without_buffer(self) -> (Option<Buffer>, Option<Self>) {
        match self {
            Self::Host(HostCopy { buffer, file, .. }) => (Some(buffer), file.map(Self::File)),
            Self::File(_) => (None, Some(self)),
        }
    }

    pub(super) fn fingerprint(&self) -> Option<Fingerprint> {
        match self {
            Self::Host(copy) => copy.fingerprint,
            Self::File(copy) => copy.fingerprint(),
        }
    }

    /// Bytes of the host buffer; 0 if the copy is only in a file.
    pub(super) fn host_bytes(&self) -> u64 {
        match self {
            Self::Host(copy) => copy.buffer.len(),
            Self::File(_) => 0,
        }
    }
}

impl Chunk {
    /// Whether the chunk is neither on the GPU nor being moved.
    pub(super) fn is_away(&self) -> bool {
        self.is_at_hand() || matches!(self.residency, Residency::File(_))
    }

    /// Whether the chunk is off the GPU and can be restored without reading a file.
    pub(super) fn is_at_hand(&self) -> bool {
        matches!(self.residency, Residency::Unbacked | Residency::Host(_) | Residency::Constant(_))
    }

    pub(super) fn take(&mut self) -> Self {
        let residency = core::mem::replace(&mut self.residency, Residency::Moving);
        Self { offset: self.offset, len: self.len, flags: self.flags, residency }
    }
}

/// A chunk that is about to be evicted.
#[derive(Debug)]
pub(super) struct Leaving {
    pub base: u64,
    pub chunk: Chunk,
    /// Whether this library copies the chunk; otherwise the driver moves it.
    pub is_copied: bool,
    /// The fingerprint of the contents, if known.
    pub fingerprint: Option<Fingerprint>,
}

impl Leaving {
    /// Whether the chunk must be copied and no buffer is available in its kept copy.
    pub(super) fn needs_buffer(&self) -> bool {
        match &self.chunk.residency {
            Residency::Gpu { copy: Some(copy), .. } => {
                copy.host_bytes() == 0 && (self.fingerprint.is_none() || copy.fingerprint() != self.fingerprint)
            }
            Residency::Gpu { copy: None, .. } => true,
            _ => false,
        }
    }
}
