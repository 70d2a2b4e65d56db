//! Engines: ways to evict memory from a GPU. An [`Engine`] reserves address ranges, maps chunks of them
//! on the GPU and unmaps them.
//!
//! [`Engine::Swap`] maps physical chunks at reserved addresses. The eviction of a chunk frees its bytes
//! immediately, and the chunk is restored at the same address. [`Engine::Managed`] uses managed memory: pages
//! fault in when they are touched, and chunks are prefetched.

use crate::driver::{types::*, *};
use core::sync::atomic::{AtomicU64, Ordering};
use nvshare_wire::client::{self, EngineReason};

/// Granularity of ranges and chunks, in bytes: the granularity of `cuMemCreate` on all GPUs that
/// support it.
pub const GRANULE: u64 = 2 << 20;
/// The size of the largest chunk, in bytes, except for memory that the program can export. Larger
/// chunks are no faster to create and map [H200], and smaller chunks make room for other clients
/// sooner.
pub const CHUNK: u64 = 64 << 20;

/// Properties of a chunk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flags {
    /// The `CUmemAllocationHandleType`s that the program may export the chunk as.
    pub handle_types: i32,
    /// Whether other devices may access the chunk (GPUDirect RDMA).
    pub rdma: u8,
    /// The size of the program's managed allocation; 0 for other memory.
    pub managed: u64,
    /// Whether this library may export the chunk. The chunk is created exportable if the GPU supports that.
    pub exportable: bool,
    /// Other GPUs that may access the chunk, one bit per GPU.
    pub peers: u64,
}

impl Flags {
    /// Bytes of a chunk that are inside its allocation. Bytes beyond the allocation cannot be prefetched.
    pub fn part_inside(self, offset: u64, len: u64) -> u64 {
        if self.managed > 0 { len.min(self.managed.saturating_sub(offset)) } else { len }
    }
}

/// Returns the properties of new chunks.
pub fn properties(gpu: CUdevice, flags: Flags) -> AllocationProp {
    let exportable = flags.exportable && Engine::Swap.shares(gpu);
    AllocationProp {
        kind: MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: flags.handle_types | if exportable { MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR } else { 0 },
        location: Location { kind: MEM_LOCATION_TYPE_DEVICE, id: gpu },
        gpu_direct_rdma_capable: flags.rdma,
        ..AllocationProp::default()
    }
}

fn devices(set: u64) -> impl Iterator<Item = CUdevice> {
    (0..u64::BITS).filter(move |bit| set >> bit & 1 == 1).map(|bit| bit as CUdevice)
}

/// Gives a GPU access to the chunk that is mapped at `at`.
pub fn let_in(gpu: CUdevice, at: u64, len: u64) -> Result<(), CUresult> {
    let location = Location { kind: MEM_LOCATION_TYPE_DEVICE, id: gpu };
    let access = AccessDesc { location, flags: MEM_ACCESS_FLAGS_PROT_READWRITE };
    // SAFETY: `access` outlives the call, and the caller has mapped a chunk of this library at `at`.
    check(unsafe { cuMemSetAccess(at, len as usize, &access, 1) })
}

/// The GPUs on which chunks are created exportable, one bit per GPU. Exportable chunks cost nothing
/// extra [H200].
static SHARING: AtomicU64 = AtomicU64::new(0);

/// Calls `cuMemCreate` for a chunk. If the driver cannot create exportable chunks, as in some
/// containers, creates a chunk that is not exportable.
fn create(gpu: CUdevice, len: u64, flags: Flags) -> Result<Handle, CUresult> {
    let create = |flags| {
        // SAFETY: the place is valid, and the properties outlive the call.
        query::value(|handle| unsafe { cuMemCreate(handle, len as usize, &properties(gpu, flags), 0) })
    };
    match create(flags) {
        Err(error) if error != ERROR_OUT_OF_MEMORY && flags.exportable && Engine::Swap.shares(gpu) => {
            let handle = create(Flags { exportable: false, ..flags })?;
            SHARING.fetch_and(!bit(gpu), Ordering::Relaxed);
            Ok(handle)
        }
        result => result,
    }
}

/// The bit of a GPU in a set.
pub fn bit(gpu: CUdevice) -> u64 {
    u32::try_from(gpu).ok().and_then(|gpu| 1u64.checked_shl(gpu)).unwrap_or(0)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    Swap,
    Managed,
}

impl Engine {
    pub fn kind(self) -> client::Engine {
        match self {
            Self::Swap => client::Engine::Swap,
            Self::Managed => client::Engine::Managed,
        }
    }

    /// Reserves addresses for `len` bytes. The addresses have no memory yet if the engine supports that.
    pub fn reserve(self, len: u64) -> Result<u64, CUresult> {
        // SAFETY: the place is valid.
        query::value(|base| unsafe {
            match self {
                Self::Swap => cuMemAddressReserve(base, len as usize, GRANULE as usize, 0, 0),
                Self::Managed => cuMemAllocManaged(base, len as usize, MEM_ATTACH_GLOBAL),
            }
        })
    }

    /// Frees the addresses. Returns `false` if only a thread of the program can free them.
    pub fn unreserve(self, base: u64, len: u64) -> bool {
        if self == Self::Managed {
            return false; // `cuMemFree` would wait for the work of the current context
        }
        // SAFETY: this library has reserved the range, and no chunk is mapped in it.
        unsafe { cuMemAddressFree(base, len as usize) };
        true
    }

    /// Backs a chunk with memory on the GPU. Its contents are undefined.
    pub fn map(self, gpu: CUdevice, at: u64, len: u64, flags: Flags) -> Result<Handle, CUresult> {
        if self == Self::Managed {
            return Ok(0);
        }
        let handle = create(gpu, len, flags)?;
        // SAFETY: this library has reserved `at..at + len`, and no chunk is mapped there. `handle` is a new
        // chunk of `len` bytes.
        unsafe {
            let mapped = check(cuMemMap(at, len as usize, 0, handle, 0)).and_then(|()| {
                let mut all = core::iter::once(gpu).chain(devices(flags.peers));
                all.try_for_each(|device| let_in(device, at, len)).inspect_err(|_| {
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

    /// Frees the chunk's memory on the GPU. No running work may access it.
    pub fn unmap(self, at: u64, len: u64, handle: Handle) {
        if self == Self::Swap {
            // SAFETY: the chunk was mapped by `map`, and the caller ensures that no running work accesses it.
            unsafe {
                cuMemUnmap(at, len as usize);
                cuMemRelease(handle);
            }
        }
    }

    /// Whether this library must copy contents to a host buffer before `unmap` and back after `map`.
    pub fn copies(self) -> bool {
        self == Self::Swap
    }

    /// Whether chunks can be exported to other processes.
    pub fn shares(self, gpu: CUdevice) -> bool {
        self == Self::Swap && SHARING.load(Ordering::Relaxed) & bit(gpu) != 0
    }

    /// Prefetches the chunk to the GPU or to the host. Does nothing if the engine copies.
    pub fn prefetch(self, gpu: CUdevice, at: u64, len: u64, onto_gpu: bool, stream: CUstream) {
        let to = if onto_gpu { gpu } else { DEVICE_CPU };
        if self == Self::Managed {
            // SAFETY: the range is inside an allocation of this library. The result is ignored: if a prefetch
            // fails, pages fault in on demand.
            unsafe { cuMemPrefetchAsync(at, len as usize, to, stream) };
        }
    }
}

/// Whether this attribute of the GPU is nonzero.
pub fn has(gpu: CUdevice, attribute: i32) -> bool {
    query::device_attribute(gpu, attribute).is_some_and(|value| value != 0)
}

/// Whether managed memory of this GPU can be prefetched.
pub fn can_prefetch(gpu: CUdevice) -> bool {
    has(gpu, DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS)
}

/// Chooses the engine for a GPU: the requested engine if the GPU supports it, otherwise the best
/// supported engine. Also returns the reason. If the engine is `None`, memory stays where the driver
/// put it.
pub fn choose(gpu: CUdevice, asked: Option<client::Engine>) -> (Option<Engine>, EngineReason) {
    if has(gpu, DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) {
        SHARING.fetch_or(bit(gpu), Ordering::Relaxed);
    }
    let swap = || has(gpu, DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED).then_some(Engine::Swap);
    let managed = || can_prefetch(gpu).then_some(Engine::Managed);
    let (first, second, without_first) = match asked {
        Some(client::Engine::None) => return (None, EngineReason::Asked),
        Some(client::Engine::Managed) => (managed(), swap(), EngineReason::NoManaged),
        Some(client::Engine::Swap) | None => (swap(), managed(), EngineReason::NoVmm),
    };
    let reason = match (first.is_some(), second.is_some()) {
        (true, _) if asked.is_some() => EngineReason::Asked,
        (true, _) => EngineReason::Best,
        (false, true) => without_first,
        (false, false) => EngineReason::Neither,
    };
    (first.or(second), reason)
}
