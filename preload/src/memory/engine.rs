//! How one GPU's memory can leave it: an [`Engine`] makes address ranges, and puts chunks of them on the GPU and off it.
//!
//! [`Swap`] reserves addresses and maps physical chunks there, so a chunk that leaves frees its bytes at once and comes
//! back at the same address. [`Managed`] uses managed memory: pages fault in when touched, chunks are prefetched.

use crate::cuda::*;
use crate::driver::{self, *};
use nvshare_wire::client;

/// Every range and chunk is a multiple of this: the granularity of `cuMemCreate` on all GPUs that have it.
pub const GRANULE: u64 = 2 << 20;
/// As large as a chunk gets: larger ones are no faster to make and to map [H200], and smaller ones flow sooner.
pub const CHUNK: u64 = 64 << 20;

pub trait Engine: Sync + core::fmt::Debug {
    fn kind(&self) -> client::Engine;
    /// Addresses for `len` bytes, without memory where the engine can do that.
    fn reserve(&self, len: u64) -> Result<u64, CUresult>;
    fn unreserve(&self, base: u64, len: u64);
    /// Backs a chunk with memory on the GPU. Its contents are undefined.
    fn map(&self, gpu: CUdevice, at: u64, len: u64) -> Result<Handle, CUresult>;
    /// Frees the chunk's memory on the GPU. No work that touches it may be running.
    fn unmap(&self, at: u64, len: u64, handle: Handle);
    /// Whether contents must be copied to a buffer of ours before `unmap` and back after `map`.
    fn copies(&self) -> bool;
    /// For engines that do not copy: moves the chunk onto the GPU or off it.
    fn prefetch(&self, gpu: CUdevice, at: u64, len: u64, onto_gpu: bool, stream: CUstream);
}

#[derive(Debug)]
pub struct Swap;

impl Engine for Swap {
    fn kind(&self) -> client::Engine {
        client::Engine::Swap
    }

    fn reserve(&self, len: u64) -> Result<u64, CUresult> {
        let mut base = 0;
        // SAFETY: a valid place.
        check(unsafe { cuMemAddressReserve(&mut base, len as usize, GRANULE as usize, 0, 0) })?;
        Ok(base)
    }

    fn unreserve(&self, base: u64, len: u64) {
        // SAFETY: a reservation of ours with nothing mapped in it.
        unsafe { cuMemAddressFree(base, len as usize) };
    }

    fn map(&self, gpu: CUdevice, at: u64, len: u64) -> Result<Handle, CUresult> {
        let location = Location { kind: MEM_LOCATION_TYPE_DEVICE, id: gpu };
        let prop = AllocationProp {
            kind: MEM_ALLOCATION_TYPE_PINNED,
            requested_handle_types: 0,
            location,
            win32_handle_meta_data: core::ptr::null_mut(),
            compression_type: 0,
            gpu_direct_rdma_capable: 0,
            usage: 0,
            reserved: [0; 4],
        };
        let access = AccessDesc { location, flags: MEM_ACCESS_FLAGS_PROT_READWRITE };
        let mut handle = 0;
        // SAFETY: valid places; `at..at + len` is inside a reservation of ours with nothing mapped there.
        unsafe {
            check(cuMemCreate(&mut handle, len as usize, &prop, 0))?;
            let mapped = check(cuMemMap(at, len as usize, 0, handle, 0)).and_then(|()| {
                check(cuMemSetAccess(at, len as usize, &access, 1)).inspect_err(|_| {
                    cuMemUnmap(at, len as usize);
                })
            });
            if let Err(error) = mapped {
                cuMemRelease(handle);
                return Err(error);
            }
        }
        Ok(handle)
    }

    fn unmap(&self, at: u64, len: u64, handle: Handle) {
        // SAFETY: mapped by `map`, and nothing that touches it runs.
        unsafe {
            cuMemUnmap(at, len as usize);
            cuMemRelease(handle);
        }
    }

    fn copies(&self) -> bool {
        true
    }

    fn prefetch(&self, _: CUdevice, _: u64, _: u64, _: bool, _: CUstream) {}
}

#[derive(Debug)]
pub struct Managed;

impl Engine for Managed {
    fn kind(&self) -> client::Engine {
        client::Engine::Managed
    }

    fn reserve(&self, len: u64) -> Result<u64, CUresult> {
        let mut base = 0;
        // SAFETY: a valid place.
        check(unsafe { cuMemAllocManaged(&mut base, len as usize, MEM_ATTACH_GLOBAL) })?;
        Ok(base)
    }

    fn unreserve(&self, base: u64, _: u64) {
        // SAFETY: an allocation of ours. Freeing synchronises with the work that uses it, as the driver does.
        unsafe { cuMemFree_v2(base) };
    }

    fn map(&self, _: CUdevice, _: u64, _: u64) -> Result<Handle, CUresult> {
        Ok(0)
    }

    fn unmap(&self, _: u64, _: u64, _: Handle) {}

    fn copies(&self) -> bool {
        false
    }

    fn prefetch(&self, gpu: CUdevice, at: u64, len: u64, onto_gpu: bool, stream: CUstream) {
        let to = if onto_gpu { gpu } else { DEVICE_CPU };
        // SAFETY: inside an allocation of ours. A prefetch that fails only means that pages fault in instead.
        unsafe { cuMemPrefetchAsync(at, len as usize, to, stream) };
    }
}

/// The engine for a GPU: the one asked for where the GPU has it, else the best it has; `None`: its memory stays where
/// the driver put it.
pub fn choose(gpu: CUdevice, asked: Option<client::Engine>) -> Option<&'static dyn Engine> {
    let has = |attribute| {
        let mut value = 0;
        // SAFETY: a valid place.
        unsafe { driver::cuDeviceGetAttribute(&mut value, attribute, gpu) == SUCCESS && value != 0 }
    };
    let swap = || has(DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED).then_some(&Swap as &dyn Engine);
    let managed = || has(DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS).then_some(&Managed as &dyn Engine);
    match asked {
        Some(client::Engine::None) => None,
        Some(client::Engine::Managed) => managed().or_else(swap),
        Some(client::Engine::Swap) | None => swap().or_else(managed),
    }
}

pub fn check(result: CUresult) -> Result<(), CUresult> {
    if result == SUCCESS { Ok(()) } else { Err(result) }
}
