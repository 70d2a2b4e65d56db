//! Chunks: the pieces in which memory is mapped and moved, and where the contents of each are.

use super::{engine::Flags, file::FileCopy, fingerprint::Fingerprint, staging::Buffer};
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
    /// On the GPU. `copy` is what host memory holds since the chunk last came back; it may still be the same.
    Gpu { handle: Handle, copy: Option<HostCopy> },
    /// In host memory; without a copy of ours if the driver moves it.
    Host(Option<HostCopy>),
    /// In a swap file.
    File(FileCopy),
    /// Nowhere: every 32-bit word has this value.
    Constant(u32),
    /// The mover has taken the chunk.
    Moving,
}

/// A chunk's contents in host memory.
#[derive(Debug)]
pub(super) struct HostCopy {
    pub buffer: Buffer,
    /// The fingerprint of the contents, if known.
    pub fingerprint: Option<Fingerprint>,
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
