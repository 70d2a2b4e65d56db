//! Memory of the program that no engine can move: VMM allocations of certain kinds, arrays, pools and
//! managed memory. The library permits it within the limit, counts it, and reports it, so that the
//! scheduler does not try to evict it.

use crate::{
    driver::{context::current_context, types::*},
    gpu::{
        self, Gpu,
        limit_request::{self, Outcome},
    },
    memory::engine::GRANULE,
    sys::sync::{Mutex, Rank},
};
use alloc::collections::BTreeMap;

/// The kind of a driver's identifier. It is part of the key, because a handle may equal an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A handle from `cuMemCreate`. The chunk lives until its last handle and its last mapping are gone.
    Chunk,
    Array,
    /// Managed memory, by address.
    Managed,
    /// Memory of a pool, by address. [`take`] also finds managed memory by this kind.
    Address,
}

impl Kind {
    /// Changes the bytes that count for memory of this kind.
    fn count(self, gpu: &Gpu, change: impl Fn(u64) -> u64) {
        match self {
            Self::Managed => gpu.pin_managed(change),
            Self::Chunk | Self::Array | Self::Address => gpu.pin(change),
        }
    }
}

#[derive(Debug)]
struct Pinned {
    gpu: &'static Gpu,
    bytes: u64,
    /// The number of handles and mappings that refer to the memory.
    references: u32,
    /// The context whose destruction frees the memory, unless it is freed earlier; 0 for none.
    context: usize,
}

static PINNED: Mutex<BTreeMap<(Kind, u64), Pinned>> = Mutex::new(Rank::PinnedMemory, BTreeMap::new());

/// Adds an allocation that the program has made.
pub fn add(gpu: Option<&'static Gpu>, kind: Kind, name: u64, bytes: u64) {
    let Some(gpu) = gpu.filter(|_| bytes > 0) else { return };
    // The driver takes whole granules from the GPU. Small allocations share a granule.
    let bytes = if bytes < GRANULE / 2 { bytes } else { bytes.div_ceil(GRANULE) * GRANULE };
    let context = if kind == Kind::Chunk { 0 } else { current_context().map_or(0, |context| context as usize) };
    PINNED.lock().insert((kind, name), Pinned { gpu, bytes, references: 1, context });
    kind.count(gpu, |counted| counted.saturating_add(bytes));
}

/// Removes the arrays and addresses of a destroyed context. If it was the `last` context of the
/// GPU, removes all arrays and addresses of the GPU. Chunks belong to no context, and stay.
pub fn drop_context(gpu: &Gpu, context: CUcontext, last: bool) {
    let mut table = PINNED.lock();
    let (mut bytes, mut managed) = (0u64, 0u64);
    table.retain(|(kind, _), pinned| {
        let gone = core::ptr::eq(pinned.gpu, gpu)
            && *kind != Kind::Chunk
            && (last || (pinned.context != 0 && pinned.context == context as usize));
        *if *kind == Kind::Managed { &mut managed } else { &mut bytes } += if gone { pinned.bytes } else { 0 };
        !gone
    });
    drop(table);
    for (kind, bytes) in [(Kind::Address, bytes), (Kind::Managed, managed)] {
        if bytes > 0 {
            kind.count(gpu, |counted| counted.saturating_sub(bytes));
        }
    }
}

/// Records another handle or a mapping of a chunk. Returns `false` if the chunk does not count.
pub fn retain(chunk: Handle) -> bool {
    let mut table = PINNED.lock();
    let known = table.get_mut(&(Kind::Chunk, chunk));
    known.map(|pinned| pinned.references = pinned.references.saturating_add(1)).is_some()
}

/// A reference that is being released.
#[derive(Debug)]
pub struct Reference {
    name: (Kind, u64),
    /// The memory, if this was the last reference to it.
    last: Option<Pinned>,
}

/// Takes a reference out before the call that releases it, because after the call the handle or
/// address may denote other memory.
pub fn take(kind: Kind, name: u64) -> Option<Reference> {
    let mut table = PINNED.lock();
    let is_managed = kind == Kind::Address && table.contains_key(&(Kind::Managed, name));
    let name = (if is_managed { Kind::Managed } else { kind }, name);
    let pinned = table.get_mut(&name)?;
    pinned.references = pinned.references.saturating_sub(1);
    let last = if pinned.references == 0 { table.remove(&name) } else { None };
    Some(Reference { name, last })
}

impl Reference {
    /// Completes the release, after the driver's call has succeeded. Memory without references no
    /// longer counts.
    pub fn release(self) {
        if let Some(Pinned { gpu, bytes, .. }) = self.last {
            self.name.0.count(gpu, |counted| counted.saturating_sub(bytes));
        }
    }

    /// Undoes the release, after the driver's call has failed.
    pub fn restore(self) {
        let mut table = PINNED.lock();
        match (self.last, table.get_mut(&self.name)) {
            (Some(pinned), None) => drop(table.insert(self.name, Pinned { references: 1, ..pinned })),
            (_, Some(pinned)) => pinned.references = pinned.references.saturating_add(1),
            (None, None) => {}
        }
    }
}

/// Releases a reference to a chunk that the program has unmapped.
pub fn release_mapped(chunk: Handle) {
    if let Some(reference) = take(Kind::Chunk, chunk) {
        reference.release();
    }
}

/// Returns the GPU and the context of an array.
pub fn array(array: CUarray) -> Option<(&'static Gpu, usize)> {
    PINNED.lock().get(&(Kind::Array, array as u64)).map(|pinned| (pinned.gpu, pinned.context))
}

/// Whether the program may allocate `bytes` more on this GPU.
pub fn fits(gpu: Option<&Gpu>, bytes: u64) -> bool {
    let Some((gpu, space)) = gpu.and_then(|gpu| Some((gpu, gpu.space()?))) else { return true };
    if bytes > space.lock().account.free() {
        gpu.release_pools(); // before an allocation fails, unused memory of pools is released
    }
    let account = space.lock().account;
    bytes <= account.free() || limit_request::raise(gpu, bytes, false, account.limit) == Outcome::Raised
}

/// Returns the GPU of a VMM allocation, or `None` for an allocation in host memory.
pub fn gpu_of(prop: *const AllocationProp) -> Option<&'static Gpu> {
    // SAFETY: `prop` is the program's pointer, which the driver would dereference too. NULL is handled.
    let location = unsafe { prop.as_ref() }?.location;
    (location.kind == MEM_LOCATION_TYPE_DEVICE).then(|| gpu::by_ordinal(location.id)).flatten()
}
