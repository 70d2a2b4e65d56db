//! Chunks: the pieces in which memory is mapped and moved, and where their contents are.
//!
//! A restored chunk leaves its source behind, in host memory or in its file, while there is room. If its fingerprint is
//! still the same at its next eviction, it is neither copied nor written again.

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
    /// Nowhere: the chunk has no contents yet.
    Unbacked,
    /// On the GPU. `copy` is the copy kept since the chunk was last restored; it may still be current.
    Gpu { handle: Handle, copy: Option<Kept> },
    /// In host memory; without a copy of ours if the driver moves it.
    Host(Option<HostCopy>),
    /// In a swap file only.
    File(FileCopy),
    /// Nowhere: every 32-bit word has this value.
    Constant(u32),
    /// The mover has taken the chunk.
    Moving,
}

/// The copy kept of a chunk that is on the GPU.
#[derive(Debug)]
pub(super) enum Kept {
    Host(HostCopy),
    File(FileCopy),
}

impl Kept {
    /// Takes the buffer. Returns it, and the rest.
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

    /// The size of its buffer.
    pub(super) fn host_bytes(&self) -> u64 {
        match self {
            Self::Host(copy) => copy.buffer.len(),
            Self::File(_) => 0,
        }
    }
}

impl Chunk {
    /// Whether it is neither on the GPU nor being moved.
    pub(super) fn is_away(&self) -> bool {
        self.is_at_hand() || matches!(self.residency, Residency::File(_))
    }

    /// Whether it is not on the GPU, and can be put there immediately.
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
    /// Whether this library copies it, rather than the driver.
    pub is_copied: bool,
    /// The fingerprint of the contents, if known.
    pub fingerprint: Option<Fingerprint>,
}

impl Leaving {
    /// Whether it must be copied to a buffer that it does not have yet.
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
