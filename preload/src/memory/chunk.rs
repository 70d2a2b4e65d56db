//! Chunks: the pieces in which memory is mapped and moved, and where the bytes of each are.

use super::{engine::Flags, fingerprint::Fingerprint, staging::Buffer};
use crate::driver::types::*;

#[derive(Debug)]
pub(super) struct Chunk {
    pub offset: u64,
    pub len: u64,
    pub flags: Flags,
    pub residency: Residency,
}

/// Where a chunk's bytes are.
#[derive(Debug)]
pub(super) enum Residency {
    /// Nowhere: it never had contents.
    Unbacked,
    /// On the GPU; `copy` is what it last left in host memory, and may be the same still.
    Gpu { handle: Handle, copy: Option<HostCopy> },
    /// In host memory; without a copy of ours, where the driver moves it.
    Host(Option<HostCopy>),
    /// Nowhere, and all of it is this value.
    Constant(u32),
    /// The mover has it.
    Moving,
}

/// A chunk's bytes in host memory.
#[derive(Debug)]
pub(super) struct HostCopy {
    pub buffer: Buffer,
    /// What it holds, where that is known.
    pub fingerprint: Option<Fingerprint>,
}

impl Chunk {
    /// Neither on the GPU nor on its way.
    pub(super) fn is_away(&self) -> bool {
        matches!(self.residency, Residency::Unbacked | Residency::Host(_) | Residency::Constant(_))
    }

    pub(super) fn take(&mut self) -> Self {
        let residency = core::mem::replace(&mut self.residency, Residency::Moving);
        Self { offset: self.offset, len: self.len, flags: self.flags, residency }
    }
}

/// A chunk that is to leave.
#[derive(Debug)]
pub(super) struct Leaving {
    pub base: u64,
    pub chunk: Chunk,
    /// By a copy of ours.
    pub is_copied: bool,
    /// What it holds, where that is known.
    pub fingerprint: Option<Fingerprint>,
}
