//! Host memory that GPUs can access. The memory is either allocated here, or registered memory of
//! the program.

use crate::{
    capture, context,
    error::{Done, Error},
    memory::{self, Backing, GRANULARITY, Mapping, space, space_mut},
    out,
};

/// `cuMemAllocHost`
pub fn alloc(at: *mut u64, len: usize) -> Done {
    alloc_with_flags(at, len, 0)
}

/// `cuMemHostAlloc`
pub fn alloc_with_flags(at: *mut u64, len: usize, flags: u32) -> Done {
    if at.is_null() || len == 0 || flags > 7 {
        return Err(Error::INVALID_VALUE);
    }
    let context = context::healthy()?;
    capture::forbid()?;
    let size = (len as u64).next_multiple_of(4096);
    let place = memory::reserve(size, GRANULARITY, 0)?;
    // SAFETY: `reserve` has allocated these addresses exclusively.
    if unsafe { libc::mprotect(place as *mut _, size as usize, libc::PROT_READ | libc::PROT_WRITE) } != 0 {
        memory::unreserve(place, size);
        return Err(Error::OUT_OF_MEMORY);
    }
    space_mut()
        .insert(Mapping::new(place, size, Backing::Host { flags, owned: true }, context.handle()).for_gpus(u64::MAX));
    out(at, place)
}

/// `cuMemFreeHost`
pub fn free(at: u64) -> Done {
    let context = context::healthy()?;
    capture::forbid()?;
    if !matches!(space().exact(at).map(|m| &m.backing), Some(Backing::Host { owned: true, .. })) {
        return Err(Error::INVALID_VALUE);
    }
    context.synchronise()?;
    let mapping = space_mut().remove(at).ok_or(Error::INVALID_VALUE)?;
    memory::unreserve(mapping.at, mapping.len);
    Ok(())
}

/// `cuMemHostRegister`
pub fn register(at: u64, len: usize, flags: u32) -> Done {
    let context = context::healthy()?;
    capture::forbid()?;
    if at == 0 || len == 0 || !there(at, len) {
        return Err(Error::INVALID_VALUE);
    }
    let mut space = space_mut();
    if !space.overlapping(at, len as u64).is_empty() {
        return Err(Error::HOST_MEMORY_ALREADY_REGISTERED);
    }
    space.insert(
        Mapping::new(at, len as u64, Backing::Host { flags, owned: false }, context.handle()).for_gpus(u64::MAX),
    );
    Ok(())
}

/// Whether the process has mapped all pages of the range.
fn there(at: u64, len: usize) -> bool {
    let start = at & !4095;
    let pages = ((at + len as u64).next_multiple_of(4096) - start) / 4096;
    let mut resident = vec![0_u8; pages as usize];
    // SAFETY: `mincore` only reads the page tables, and `resident` has one byte for each page.
    unsafe { libc::mincore(start as *mut _, (pages * 4096) as usize, resident.as_mut_ptr()) == 0 }
}

/// `cuMemHostUnregister`
pub fn unregister(at: u64) -> Done {
    let context = context::healthy()?;
    capture::forbid()?;
    if !matches!(space().exact(at).map(|m| &m.backing), Some(Backing::Host { owned: false, .. })) {
        return Err(Error::HOST_MEMORY_NOT_REGISTERED);
    }
    context.synchronise()?;
    space_mut().remove(at);
    Ok(())
}

/// `cuMemHostGetDevicePointer`
pub fn device_pointer(device: *mut u64, host: u64, flags: u32) -> Done {
    context::healthy()?;
    let reachable = matches!(space().at(host).map(|m| &m.backing), Some(Backing::Host { .. } | Backing::Managed(_)));
    if flags != 0 || !reachable {
        return Err(Error::INVALID_VALUE);
    }
    out(device, host)
}

/// `cuMemHostGetFlags`
pub fn get_flags(flags: *mut u32, host: u64) -> Done {
    context::healthy()?;
    match space().at(host).map(|m| &m.backing) {
        Some(Backing::Host { flags: set, .. }) => out(flags, *set | 2),
        _ => Err(Error::INVALID_VALUE),
    }
}
