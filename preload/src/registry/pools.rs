//! Memory pools by the driver's handles, which the program uses too. The library serves the pools that
//! the program creates (`cuMemPoolCreate`), and each GPU's default pool. Each pool of this library
//! shadows a pool of the driver. The driver's pool keeps the attributes that the program sets, and
//! answers questions about them. The library cuts the pool's blocks from the same chunks as other
//! allocations, so the blocks move with those chunks.
//!
//! The driver's pool also serves the allocations that this library leaves to it. Their memory is
//! pinned:
//!
//! - allocations from pools that are shareable, limited, not on a GPU, for decompression by hardware
//!   that the GPU has, or of an unknown kind
//! - allocations during a stream capture
//! - allocations on GPUs whose memory is not moved by copying
//!
//! `NVSHARE_MOVABLE_POOLS=0` leaves all memory of pools to the driver, for programs that need features
//! that only the driver's pools have.

use crate::{
    driver::{self, check, query, types::*},
    gpu::{self, Gpu, peers::couple},
    memory::{engine, space::Space},
    sys::sync::{Mutex, Rank},
};
use alloc::{collections::BTreeMap, vec::Vec};
use core::ffi::c_void;
use nvshare_pools::Policy;

/// The pools that the program has created and that this library can serve, and their GPUs.
static MADE: Mutex<BTreeMap<u64, CUdevice>> = Mutex::new(Rank::MemoryPools, BTreeMap::new());

/// `CUmemPoolProps`. Older headers declare fewer fields in the same bytes.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Properties {
    kind: i32,
    handle_types: i32,
    location: Location,
    win32_security_attributes: *mut c_void,
    max_size: Size,
    usage: u16,
    reserved: [u8; 54],
}

impl Properties {
    /// Returns the GPU of a pool of plain memory. Returns `None` for other pools, that is, exportable
    /// pools, limited pools, and pools with unknown properties.
    fn plain(&self) -> Option<CUdevice> {
        let is_plain = self.kind == MEM_ALLOCATION_TYPE_PINNED
            && self.handle_types == 0
            && self.location.kind == MEM_LOCATION_TYPE_DEVICE
            && self.win32_security_attributes.is_null()
            && self.max_size == 0
            && self.reserved == [0; 54];
        (is_plain && self.has_plain_usage()).then_some(self.location.id)
    }

    /// Whether the declared usage requires nothing of the memory. RAPIDS declares decompression by
    /// hardware for each pool if the driver knows this usage, also on GPUs without such hardware.
    fn has_plain_usage(&self) -> bool {
        match self.usage {
            0 => true,
            POOL_USAGE_HW_DECOMPRESS => !engine::has(self.location.id, DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK),
            _ => false,
        }
    }
}

/// Records a pool that the driver has created.
pub fn on_create(handle: u64, properties: &Properties) {
    // An earlier pool may have had the same handle, and may have been destroyed with its context.
    for (gpu, space) in spaces() {
        space.lock().destroy_pool(handle, &gpu.work);
    }
    let mut made = MADE.lock();
    match properties.plain() {
        Some(device) => made.insert(handle, device),
        None => made.remove(&handle),
    };
}

fn spaces() -> impl Iterator<Item = (&'static Gpu, &'static Mutex<Space>)> {
    gpu::in_use().filter_map(|gpu| Some((gpu, gpu.space()?)))
}

/// Returns the GPU and the space of a pool that this library serves.
pub fn find(handle: u64) -> Option<(&'static Gpu, &'static Mutex<Space>)> {
    spaces().find(|(_, space)| space.lock().pools.has(handle))
}

/// Forgets a pool before it is destroyed, because afterwards its handle may denote another pool. If the driver
/// refuses to destroy the pool, as it does for a default pool, the next allocation adopts the pool again.
pub fn on_destroy(handle: u64) {
    MADE.lock().remove(&handle);
    if let Some((gpu, space)) = find(handle) {
        space.lock().destroy_pool(handle, &gpu.work);
    }
}

/// Returns the program's settings of a pool, as the driver reports them.
pub fn policy_of(pool: CUmemoryPool) -> Option<Policy> {
    let (mut opportunistic, mut threshold) = (0i32, 0u64);
    // SAFETY: `pool` is a pool of the program, and each variable has the type of its attribute.
    unsafe {
        let ask = |which, place| check(driver::cuMemPoolGetAttribute(pool, which, place)).ok();
        ask(attribute::REUSE_ALLOW_OPPORTUNISTIC, (&raw mut opportunistic).cast())?;
        ask(attribute::RELEASE_THRESHOLD, (&raw mut threshold).cast())?;
    }
    Some(Policy { threshold, opportunistic: opportunistic != 0 })
}

/// Whether this library serves the pool on this GPU. Adopts the pool if possible.
pub fn is_ours(pool: CUmemoryPool, gpu: &'static Gpu, space: &Mutex<Space>) -> bool {
    let handle = pool as u64;
    let guard = space.lock();
    let (is_known, copies) = (guard.pools.has(handle), guard.engine().copies());
    drop(guard);
    // This library serves no pools from managed memory: the driver frees managed memory together
    // with the memory's context, and only on a thread that can wait.
    if is_known || !copies {
        return is_known;
    }
    let device = gpu.index as CUdevice;
    if MADE.lock().get(&handle) != Some(&device) && default_of(device) != Some(pool) {
        return false;
    }
    let Some(policy) = policy_of(pool) else { return false };
    gpu::in_use().for_each(|other| reach(pool, gpu, other));
    space.lock().pools.add(handle, policy);
    true
}

fn default_of(device: CUdevice) -> Option<CUmemoryPool> {
    // SAFETY: the place is valid.
    let pool = query::handle(|pool| unsafe { driver::cuDeviceGetDefaultMemPool(pool, device) });
    pool.ok().filter(|pool| !pool.is_null())
}

/// Couples two GPUs if the program gives `other` access to this pool of `owner`.
fn reach(pool: CUmemoryPool, owner: &'static Gpu, other: &'static Gpu) {
    if owner.index == other.index {
        return;
    }
    let (location, mut rights) = (Location { kind: MEM_LOCATION_TYPE_DEVICE, id: other.index as i32 }, 0);
    // SAFETY: `rights` and `location` outlive the call, and `pool` is a pool of the program.
    let asked = unsafe { driver::cuMemPoolGetAccess(&mut rights, pool, &location) };
    if asked == SUCCESS && rights != 0 {
        couple(owner, other);
    }
}

/// Called after the program has changed the access rights to a pool.
pub fn access_changed(pool: CUmemoryPool) {
    if let Some((owner, _)) = find(pool as u64) {
        gpu::in_use().for_each(|other| reach(pool, owner, other));
    }
}

/// Called when the program begins to use this GPU, because the GPU may have access to pools of other
/// GPUs.
pub fn on_first_use(gpu: &'static Gpu) {
    for (owner, space) in spaces() {
        let pools: Vec<_> = space.lock().pools.handles().collect();
        pools.into_iter().for_each(|handle| reach(handle as CUmemoryPool, owner, gpu));
    }
}

/// The `CUmemPool_attribute`s that this library knows.
pub mod attribute {
    pub const REUSE_ALLOW_OPPORTUNISTIC: i32 = 2;
    pub const RELEASE_THRESHOLD: i32 = 4;
    pub const RESERVED_MEM_CURRENT: i32 = 5;
    pub const RESERVED_MEM_HIGH: i32 = 6;
    pub const USED_MEM_CURRENT: i32 = 7;
    pub const USED_MEM_HIGH: i32 = 8;
}
