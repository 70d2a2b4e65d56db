//! Virtual memory management: addresses, physical chunks, and mappings between them.

use crate::{
    device,
    error::{Done, Error},
    managed::Location,
    memory::{self, Backing, Chunk, GRANULARITY, Mapping, space, space_mut},
    out,
};
use cuda_sim_gpus::{Config, at_place, config::Fabric, place, trouble};
use std::{
    collections::HashMap,
    ffi::CString,
    fs,
    os::fd::{AsRawFd, BorrowedFd, IntoRawFd},
    process,
    sync::{Arc, LazyLock, Mutex, MutexGuard, atomic::Ordering},
};

const PINNED: u32 = 1;
const FILE_DESCRIPTOR: u32 = 1;
const FABRIC: u32 = 8;

/// The types of handles that chunks can be created for.
fn handle_types() -> u32 {
    if Config::get().fabric == Fabric::None { FILE_DESCRIPTOR } else { FILE_DESCRIPTOR | FABRIC }
}

/// `CUmemAllocationProp`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
    windows: usize,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Access {
    pub location: Location,
    pub flags: u32,
}

type Handles = HashMap<u64, (Arc<Chunk>, u32)>;

/// The program's chunks and their reference counts.
static HANDLES: LazyLock<Mutex<Handles>> = LazyLock::new(Mutex::default);

fn handles() -> MutexGuard<'static, Handles> {
    HANDLES.lock().unwrap_or_else(|e| e.into_inner())
}

fn hold(chunk: Arc<Chunk>) -> u64 {
    let handle = Arc::as_ptr(&chunk) as u64;
    handles().entry(handle).or_insert((chunk, 0)).1 += 1;
    handle
}

fn chunk(handle: u64) -> Result<Arc<Chunk>, Error> {
    handles().get(&handle).map(|(chunk, _)| chunk.clone()).ok_or(Error::INVALID_VALUE)
}

fn supported() -> Done {
    if Config::get().vmm { Ok(()) } else { Err(Error::NOT_SUPPORTED) }
}

/// Checks that `n` is a valid size of a chunk.
pub fn whole(n: u64) -> Done {
    if n != 0 && n.is_multiple_of(GRANULARITY) { Ok(()) } else { Err(Error::INVALID_VALUE) }
}

/// Checks that a range is a part of a chunk.
pub fn part(handle: u64, offset: u64, size: u64) -> Done {
    whole(size)?;
    let len = chunk(handle)?.len;
    let is_part = offset.is_multiple_of(GRANULARITY) && offset.checked_add(size).is_some_and(|end| end <= len);
    if is_part { Ok(()) } else { Err(Error::INVALID_VALUE) }
}

impl Properties {
    fn gpu(&self) -> Result<usize, Error> {
        match (self.kind, self.location.kind) {
            (PINNED, Location::DEVICE) => device::gpu(self.location.id),
            (PINNED, 2..=4) => Err(Error::NOT_SUPPORTED),
            _ => Err(Error::INVALID_VALUE),
        }
    }
}

/// `cuMemGetAllocationGranularity`
pub fn granularity(granularity: *mut usize, properties: *const Properties, _option: u32) -> Done {
    supported()?;
    crate::arg(properties)?.gpu()?;
    out(granularity, GRANULARITY as usize)
}

/// `cuMemCreate`
pub fn create(handle: *mut u64, size: usize, properties: *const Properties, flags: u64) -> Done {
    supported()?;
    let properties = crate::arg(properties)?;
    if handle.is_null() || flags != 0 || properties.handle_types & !handle_types() != 0 {
        return Err(Error::INVALID_VALUE);
    }
    whole(size as u64)?;
    let gpu = properties.gpu()?;
    if trouble::is_refused(&Config::get().dir, place(gpu), process::id()) {
        crate::write_down_failure("cuMemCreate");
        return Err(Error::OUT_OF_MEMORY);
    }
    let chunk = Chunk::new(gpu, size as u64, properties.handle_types & FILE_DESCRIPTOR != 0)?;
    chunk.rdma.store(properties.rdma != 0, Ordering::Relaxed);
    out(handle, hold(chunk))
}

/// `cuMemRelease`: mapped memory stays until it is unmapped.
pub fn release(handle: u64) -> Done {
    let mut handles = handles();
    let (_, references) = handles.get_mut(&handle).ok_or(Error::INVALID_VALUE)?;
    *references -= 1;
    let last = if *references == 0 { handles.remove(&handle) } else { None };
    drop(handles);
    drop(last);
    Ok(())
}

/// `cuMemRetainAllocationHandle`
pub fn retain(handle: *mut u64, at: u64) -> Done {
    let chunk = match space().at(at).map(|m| &m.backing) {
        Some(Backing::Chunk { chunk, legacy: false, .. }) => chunk.clone(),
        _ => return Err(Error::INVALID_VALUE),
    };
    out(handle, hold(chunk))
}

/// `cuMemGetAllocationPropertiesFromHandle`
pub fn properties(properties: *mut Properties, handle: u64) -> Done {
    let chunk = chunk(handle)?;
    let location = Location { kind: Location::DEVICE, id: device::ordinal(chunk.gpu) };
    let handle_types = if chunk.shareable { FILE_DESCRIPTOR } else { 0 };
    let rdma = u8::from(chunk.rdma.load(Ordering::Relaxed));
    out(properties, Properties { kind: PINNED, handle_types, location, rdma, ..Properties::default() })
}

/// `cuMemAddressReserve`
pub fn reserve(at: *mut u64, size: usize, align: usize, hint: u64, flags: u64) -> Done {
    supported()?;
    let (size, align) = (size as u64, align as u64);
    if at.is_null() || flags != 0 || !(align == 0 || align.is_power_of_two()) {
        return Err(Error::INVALID_VALUE);
    }
    whole(size)?;
    let place = memory::reserve(size, align, hint)?;
    space_mut().reserved.insert(place, size);
    out(at, place)
}

/// `cuMemAddressFree`
pub fn free(at: u64, size: usize) -> Done {
    let mut space = space_mut();
    if space.reserved.get(&at) != Some(&(size as u64)) || !space.overlapping(at, size as u64).is_empty() {
        return Err(Error::INVALID_VALUE);
    }
    space.reserved.remove(&at);
    memory::unreserve(at, size as u64);
    Ok(())
}

/// `cuMemMap`
pub fn map(at: u64, size: usize, offset: usize, handle: u64, flags: u64) -> Done {
    let (size, offset) = (size as u64, offset as u64);
    let chunk = chunk(handle)?;
    whole(size)?;
    if flags != 0 || !at.is_multiple_of(GRANULARITY) {
        return Err(Error::INVALID_VALUE);
    }
    // The driver maps a chunk only as a whole.
    if offset != 0 || size != chunk.len {
        return Err(Error::NOT_SUPPORTED);
    }
    let mut space = space_mut();
    let reserved = space.reservation(at).is_some_and(|(start, len)| at + size <= start + len);
    if !reserved || !space.overlapping(at, size).is_empty() {
        return Err(Error::INVALID_VALUE);
    }
    space.insert(Mapping::new(at, size, Backing::Chunk { chunk, offset, legacy: false }, 0));
    Ok(())
}

/// Returns the mappings that make up a range. Returns an error if the range cuts a mapping or has a
/// gap.
fn mappings(space: &memory::Space, at: u64, size: u64) -> Result<Vec<u64>, Error> {
    let found = space.overlapping(at, size);
    let mut next = at;
    for start in &found {
        match space.exact(*start) {
            Some(m) if m.at == next && matches!(m.backing, Backing::Chunk { legacy: false, .. }) => next = m.end(),
            _ => return Err(Error::INVALID_VALUE),
        }
    }
    if found.is_empty() || next != at + size { Err(Error::INVALID_VALUE) } else { Ok(found) }
}

/// `cuMemUnmap`: does not wait for running work. Ignores unmapped ranges. Returns an error if the range
/// cuts a mapping.
pub fn unmap(at: u64, size: usize) -> Done {
    let mut space = space_mut();
    whole(size as u64)?;
    let reserved = space.reservation(at).is_some_and(|(start, len)| at + size as u64 <= start + len);
    let found = space.overlapping(at, size as u64);
    let whole = found.iter().filter_map(|start| space.exact(*start)).all(|m| {
        at <= m.at && m.end() <= at + size as u64 && matches!(m.backing, Backing::Chunk { legacy: false, .. })
    });
    if !reserved || !whole {
        return Err(Error::INVALID_VALUE);
    }
    let removed: Vec<_> = found.into_iter().filter_map(|start| space.remove(start)).collect();
    drop(space);
    drop(removed);
    Ok(())
}

/// `cuMemSetAccess`
pub fn set_access(at: u64, size: usize, access: *const Access, count: usize) -> Done {
    if access.is_null() || count == 0 {
        return Err(Error::INVALID_VALUE);
    }
    let mut space = space_mut();
    let starts = mappings(&space, at, size as u64)?;
    for i in 0..count {
        // SAFETY: the program passes `count` entries.
        let access = unsafe { *access.add(i) };
        if access.location.kind == Location::HOST {
            return Err(Error::NOT_SUPPORTED); // as driver 580 does
        }
        if access.location.kind != Location::DEVICE || !matches!(access.flags, 0 | 1 | 3) {
            return Err(Error::INVALID_VALUE);
        }
        let gpu = device::gpu(access.location.id).map_err(|_| Error::INVALID_VALUE)?; // as driver 580 does
        let homes = || starts.iter().filter_map(|start| space.exact(*start)?.gpu());
        if access.flags != 0 && homes().any(|home| home != gpu && !crate::peer::are_peers(gpu, home)) {
            return Err(Error::INVALID_DEVICE);
        }
        let bit = 1 << gpu;
        for start in &starts {
            if let Some(mapping) = space.exact_mut(*start) {
                mapping.read = mapping.read & !bit | if access.flags & 1 != 0 { bit } else { 0 };
                mapping.write = mapping.write & !bit | if access.flags & 2 != 0 { bit } else { 0 };
            }
        }
    }
    Ok(())
}

/// `cuMemGetAccess`: for memory of `cuMemMap`, the host has the same rights as the memory's own
/// GPU. For other memory, the host has no rights (driver 580).
pub fn get_access(flags: *mut u64, location: *const Location, at: u64) -> Done {
    let location = crate::arg(location)?;
    let space = space();
    let mapping = space.at(at).ok_or(Error::INVALID_VALUE);
    let gpu = match location.kind {
        Location::DEVICE => Some(device::gpu(location.id)?),
        Location::HOST => mapping?.gpu(),
        _ => return Err(Error::INVALID_VALUE),
    };
    let mapping = mapping?;
    let gpu = gpu.filter(|_| matches!(mapping.backing, Backing::Chunk { legacy: false, .. }));
    out(flags, gpu.map_or(0, |gpu| mapping.rights(gpu).into()))
}

/// `cuMemExportToShareableHandle`: returns a descriptor that the program owns.
pub fn export(shared: *mut i32, handle: u64, kind: u32, flags: u64) -> Done {
    let chunk = chunk(handle)?;
    if !chunk.shareable || kind != FILE_DESCRIPTOR || flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    out(shared, chunk.export()?.into_raw_fd())
}

/// `cuMemImportFromShareableHandle`: the pointer argument contains the descriptor number.
pub fn import(handle: *mut u64, shared: usize, kind: u32) -> Done {
    let fd = i32::try_from(shared).map_err(|_| Error::UNKNOWN)?;
    if kind != FILE_DESCRIPTOR {
        return Err(Error::INVALID_VALUE);
    }
    out(handle, hold(imported(fd)?))
}

/// Returns the chunk behind a descriptor. For other descriptors returns an unknown error, like the
/// driver on an H200.
pub fn imported(fd: i32) -> Result<Arc<Chunk>, Error> {
    let name = fs::read_link(format!("/proc/self/fd/{fd}")).map_err(|_| Error::UNKNOWN)?;
    let name = name.to_string_lossy().into_owned();
    let gpu = name
        .strip_prefix("/memfd:cuda-sim-gpu")
        .and_then(|rest| rest.split(' ').next()?.parse().ok())
        .ok_or(Error::UNKNOWN)?;
    // SAFETY: the descriptor is open, because its name was just read.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().map_err(|_| Error::OPERATING_SYSTEM)?;
    let path = CString::new(format!("/proc/self/fd/{}", fd.as_raw_fd())).map_err(|_| Error::UNKNOWN)?;
    let len = fs::metadata(path.to_string_lossy().as_ref()).map_err(|_| Error::OPERATING_SYSTEM)?.len();
    Chunk::import(at_place(gpu), len, fd)
}

/// `cuMemGetHandleForAddressRange`: returns a dummy descriptor.
pub fn range_handle(handle: *mut i32, at: u64, size: usize, kind: u32, _flags: u64) -> Done {
    const DMA_BUF: u32 = 1;
    let is_there = space().at(at).is_some_and(|m| m.gpu().is_some() && at + size as u64 <= m.end());
    if kind != DMA_BUF || handle.is_null() || !is_there || size == 0 {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the name is a C string. The program owns the new descriptor.
    match unsafe { libc::memfd_create(c"cuda-sim-dma-buf".as_ptr(), libc::MFD_CLOEXEC) } {
        -1 => Err(Error::OPERATING_SYSTEM),
        descriptor => out(handle, descriptor),
    }
}
