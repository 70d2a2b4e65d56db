//! Chunks: the pieces in which memory is mapped and moved, and where the contents of each are.
//!
//! A chunk that comes back onto the GPU leaves what it came from behind, in host memory or in its file, as long as there is room for
//! it. If its fingerprint is still the same when it leaves again, it is neither copied nor written a second time.

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
    /// Nowhere: the chunk never had any.
    Unbacked,
    /// On the GPU. `copy` is what is kept elsewhere since the chunk last came back; it may still be the same.
    Gpu { handle: Handle, copy: Option<Kept> },
    /// In host memory; without a copy of ours if the driver moves it.
    Host(Option<HostCopy>),
    /// In a swap file alone.
    File(FileCopy),
    /// Nowhere: every 32-bit word has this value.
    Constant(u32),
    /// The mover has taken the chunk.
    Moving,
}

/// What is kept of a chunk that is on the GPU.
#[derive(Debug)]
pub(super) enum Kept {
    Host(HostCopy),
    File(FileCopy),
}

impl Kept {
    /// Takes the buffer out of it. Returns that, and what is left.
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

    /// The bytes of its buffer.
    pub(super) fn host_bytes(&self) -> u64 {
        match self {
            Self::Host(copy) => copy.buffer.len(),
            Self::File(_) => 0,
        }
    }
}

impl Chunk {
    /// Neither on the GPU nor on its way.
    pub(super) fn is_away(&self) -> bool {
        self.is_at_hand() || matches!(self.residency, Residency::File(_))
    }

    /// Not on the GPU, and can be put there at once.
    pub(super) fn is_at_hand(&self) -> bool {
        matches!(self.residency, Residency::Unbacked | Residency::Host(_) | Residency::Constant(_))
    }

    pub(super) fn take(&mut self) -> Self {
        let residency = core::mem::replace(&mut self.residency, Residency::Moving);
        Self { offset: self.offset, len: self.len, flags: self.flags, residency }
    }
}

/// A chunk that is about to leave.
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
    /// Whether it is copied to a buffer that it does not have.
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
