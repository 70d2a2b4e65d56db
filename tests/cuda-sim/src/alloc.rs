//! Plain device memory: `cuMemAlloc` and related calls. Small allocations share blocks, as on a
//! GPU.

use crate::{
    capture,
    context::{self, Context},
    error::{Done, Error},
    managed,
    memory::{self, Backing, Chunk, GRANULARITY, Mapping, space, space_mut},
    out,
};
use cuda_sim_gpus::{Config, account::Figures, place};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
};

/// Allocations smaller than this share a block of [`GRANULARITY`].
const SMALL: u64 = 1 << 20;
/// Alignment of allocations that share a block.
const ALIGN: u64 = 512;

/// Blocks by address, each with the allocations in it.
static BLOCKS: Mutex<BTreeMap<u64, Block>> = Mutex::new(BTreeMap::new());

#[derive(Debug)]
struct Block {
    context: usize,
    /// Offset and length of each allocation.
    used: BTreeMap<u64, u64>,
}

impl Block {
    /// Returns the offset of a gap of this size.
    fn gap(&self, len: u64) -> Option<u64> {
        let mut at = 0;
        for (start, size) in &self.used {
            if start - at >= len {
                return Some(at);
            }
            at = (start + size).next_multiple_of(ALIGN);
        }
        (GRANULARITY - at.min(GRANULARITY) >= len).then_some(at)
    }
}

fn blocks() -> MutexGuard<'static, BTreeMap<u64, Block>> {
    BLOCKS.lock().unwrap_or_else(|e| e.into_inner())
}

/// Allocates `len` bytes of the context's GPU at a new address.
pub fn allocate(context: &Arc<Context>, len: u64) -> Result<u64, Error> {
    if len >= SMALL {
        return whole(context, len.next_multiple_of(GRANULARITY));
    }
    let mut blocks = blocks();
    let handle = context.handle();
    for (at, block) in blocks.iter_mut().filter(|(_, b)| b.context == handle) {
        if let Some(offset) = block.gap(len) {
            block.used.insert(offset, len);
            return Ok(at + offset);
        }
    }
    let at = whole(context, GRANULARITY)?;
    blocks.insert(at, Block { context: handle, used: BTreeMap::from([(0, len)]) });
    Ok(at)
}

/// Allocates a separate chunk.
fn whole(context: &Arc<Context>, size: u64) -> Result<u64, Error> {
    let chunk = Chunk::new(context.gpu, size, false)?;
    let at = memory::reserve(size, GRANULARITY, 0)?;
    let gpu = context.gpu;
    space_mut().insert(
        Mapping::new(at, size, Backing::Chunk { chunk, offset: 0, legacy: true }, context.handle()).for_gpus(1 << gpu),
    );
    Ok(at)
}

/// Returns the allocation that contains an address: its first byte and its length.
pub fn range(addr: u64) -> Option<(u64, u64)> {
    let space = space();
    let mapping = space.at(addr)?;
    let (base, len) = (mapping.at, mapping.len);
    drop(space);
    let blocks = blocks();
    match blocks.get(&base) {
        Some(block) => block
            .used
            .range(..=addr - base)
            .next_back()
            .filter(|(start, len)| addr - base < **start + **len)
            .map(|(start, len)| (base + start, *len)),
        None => Some((base, len)),
    }
}

/// Forgets the blocks of a context whose mappings have been removed.
pub fn forget_context(context: usize) {
    blocks().retain(|_, block| block.context != context);
}

/// `cuMemAlloc`
pub fn alloc(at: *mut u64, len: usize) -> Done {
    if at.is_null() || len == 0 {
        return Err(Error::INVALID_VALUE);
    }
    let context = context::healthy()?;
    capture::forbid()?;
    out(at, allocate(&context, len as u64)?)
}

/// `cuMemAllocPitch`
pub fn alloc_pitch(at: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32) -> Done {
    if !matches!(element, 4 | 8 | 16) || width == 0 || height == 0 {
        return Err(Error::INVALID_VALUE);
    }
    let padded = width.next_multiple_of(512);
    alloc(at, padded.checked_mul(height).ok_or(Error::OUT_OF_MEMORY)?)?;
    out(pitch, padded)
}

/// `cuMemFree`: first waits for work, as the driver does. The simulator waits for the work of the
/// current context. The driver waits for the work of the memory's context.
pub fn free(at: u64) -> Done {
    let current = context::healthy()?;
    capture::forbid()?;
    if at == 0 {
        return Ok(());
    }
    let base = {
        let space = space();
        let mapping = space.at(at).ok_or(Error::INVALID_VALUE)?;
        match mapping.backing {
            Backing::Chunk { legacy: true, .. } | Backing::Managed(_) => mapping.at,
            _ => return Err(Error::INVALID_VALUE),
        }
    };
    if range(at).is_none_or(|(start, _)| start != at) || crate::ipc::is_open(base) {
        return Err(Error::INVALID_VALUE);
    }
    // For memory of a pool, the driver assumes that no work uses it, and does not wait.
    if crate::pool::owner(base).is_none() {
        current.synchronise()?;
    }
    {
        let mut blocks = blocks();
        if let Some(block) = blocks.get_mut(&base) {
            block.used.remove(&(at - base));
            if !block.used.is_empty() {
                return Ok(());
            }
            blocks.remove(&base);
        }
    }
    let mapping = space_mut().remove(base).ok_or(Error::INVALID_VALUE)?;
    match &mapping.backing {
        Backing::Managed(managed) => managed::free(&mapping, managed),
        _ => {
            crate::pool::forget(&mapping);
            memory::unreserve(mapping.at, mapping.len);
        }
    }
    Ok(())
}

/// `cuMemGetInfo`; either pointer may be null.
pub fn info(free: *mut usize, total: *mut usize) -> Done {
    let context = context::healthy()?;
    crate::out_if(free, Figures::of(place(context.gpu)).free(place(context.gpu)) as usize);
    crate::out_if(total, Config::get().memory as usize);
    Ok(())
}

/// `cuMemGetAddressRange`; either pointer may be null.
pub fn address_range(base: *mut u64, size: *mut usize, at: u64) -> Done {
    context::healthy()?;
    // Driver 580 does not find memory without access rights.
    let is_closed =
        |m: &memory::Mapping| matches!(m.backing, Backing::Chunk { legacy: false, .. }) && m.read | m.write == 0;
    if space().at(at).is_some_and(is_closed) {
        return Err(Error::NOT_FOUND);
    }
    let (start, len) = range(at).ok_or(Error::NOT_FOUND)?;
    crate::out_if(base, start);
    crate::out_if(size, len as usize);
    Ok(())
}
