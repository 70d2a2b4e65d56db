//! Memory pools: stream-ordered allocation and freeing.

use crate::{
    capture, device,
    error::{Done, Error},
    managed::Location,
    memory::{self, Backing, Chunk, GRANULARITY, Mapping, space, space_mut},
    out,
    registry::Registry,
    stream::{self, Flavour},
    vmm::Access,
    work::Work,
};
use cuda_sim_gpus::MAX_GPUS;
use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock},
};

/// A pool of one GPU's memory.
#[derive(Debug)]
pub struct Pool {
    gpu: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Freed chunks that are kept for later allocations.
    kept: Vec<Arc<Chunk>>,
    used: u64,
    used_high: u64,
    reserved: u64,
    reserved_high: u64,
    threshold: u64,
    reuse: [i32; 3],
    access: HashMap<i32, u32>,
    dead: bool,
}

/// `CUmemPoolProps`, up to the last field that the simulator reads.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
}

static POOLS: Registry<Pool> = Registry::new();
/// The pool of each address.
static OWNERS: LazyLock<Mutex<HashMap<u64, Arc<Pool>>>> = LazyLock::new(Mutex::default);
/// The current pool of each GPU; `None` for the default pool.
static CHOSEN: [Mutex<Option<Arc<Pool>>>; MAX_GPUS] = [const { Mutex::new(None) }; MAX_GPUS];

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Pool {
    fn new(gpu: usize) -> Arc<Pool> {
        let pool = Arc::new(Pool { gpu, state: Mutex::new(State { reuse: [1; 3], ..State::default() }) });
        POOLS.add(pool.clone());
        pool
    }

    fn default(gpu: usize) -> Arc<Pool> {
        static DEFAULTS: [OnceLock<Arc<Pool>>; MAX_GPUS] = [const { OnceLock::new() }; MAX_GPUS];
        DEFAULTS[gpu].get_or_init(|| Pool::new(gpu)).clone()
    }

    fn chosen(gpu: usize) -> Arc<Pool> {
        lock(&CHOSEN[gpu]).clone().unwrap_or_else(|| Pool::default(gpu))
    }

    /// Returns the GPUs that can access the pool's memory, as bits.
    fn gpus(&self) -> u64 {
        let own = 1 << self.gpu;
        let state = lock(&self.state);
        let others = state.access.iter().filter(|(_, flags)| **flags != 0);
        others.filter_map(|(device, _)| device::gpu(*device).ok()).fold(own, |set, gpu| set | 1 << gpu)
    }

    fn take(&self, len: u64) -> Result<Arc<Chunk>, Error> {
        let mut state = lock(&self.state);
        let chunk = match state.kept.iter().position(|c| c.len == len) {
            Some(at) => state.kept.swap_remove(at),
            None => {
                let new = Chunk::new(self.gpu, len, false).or_else(|_| {
                    state.trim(0);
                    Chunk::new(self.gpu, len, false)
                })?;
                state.reserved += len;
                state.reserved_high = state.reserved_high.max(state.reserved);
                new
            }
        };
        state.used += len;
        state.used_high = state.used_high.max(state.used);
        Ok(chunk)
    }

    fn give(&self, chunk: Arc<Chunk>) {
        let mut state = lock(&self.state);
        state.used -= chunk.len;
        state.kept.push(chunk);
        let keep = if state.dead { 0 } else { state.threshold };
        state.trim(keep);
    }
}

impl State {
    fn trim(&mut self, keep: u64) {
        while self.reserved > keep {
            let Some(chunk) = self.kept.pop() else { return };
            self.reserved -= chunk.len;
        }
    }
}

fn allocate(pool: &Arc<Pool>, at: *mut u64, len: usize, flavour: Flavour, stream: usize) -> Done {
    let stream = stream::of(stream, flavour)?;
    stream.context.error()?;
    if at.is_null() || len == 0 {
        return Err(Error::INVALID_VALUE);
    }
    if capture::capturing(&stream) {
        stream.submit(Work::AllocNode)?;
    }
    let len = (len as u64).next_multiple_of(GRANULARITY);
    let chunk = pool.take(len)?;
    let place = memory::reserve(len, GRANULARITY, 0)?;
    lock(&OWNERS).insert(place, pool.clone());
    let mapping = Mapping::new(place, len, Backing::Chunk { chunk, offset: 0, legacy: true }, 0);
    space_mut().insert(mapping.for_gpus(pool.gpus()));
    out(at, place)
}

/// Frees memory. Called when the stream of `cuMemFreeAsync` has reached the free.
pub fn freed(mapping: &Mapping) {
    if space().exact(mapping.at).is_none_or(|m| m.id != mapping.id) {
        return;
    }
    // Removes the owner before the address can be reused.
    let pool = lock(&OWNERS).remove(&mapping.at);
    space_mut().remove(mapping.at);
    memory::unreserve(mapping.at, mapping.len);
    if let (Some(pool), Backing::Chunk { chunk, .. }) = (pool, &mapping.backing) {
        pool.give(chunk.clone());
    }
}

/// Returns memory to its pool after `cuMemFree` has freed the memory.
pub fn forget(mapping: &Mapping) {
    if let Some(pool) = lock(&OWNERS).remove(&mapping.at)
        && let Backing::Chunk { chunk, .. } = &mapping.backing
    {
        pool.give(chunk.clone());
    }
}

/// `cuMemAllocAsync`
pub fn alloc_async(flavour: Flavour, at: *mut u64, len: usize, stream: usize) -> Done {
    let gpu = stream::of(stream, flavour)?.context.gpu;
    allocate(&Pool::chosen(gpu), at, len, flavour, stream)
}

/// `cuMemAllocFromPoolAsync`
pub fn alloc_from(flavour: Flavour, at: *mut u64, len: usize, pool: usize, stream: usize) -> Done {
    allocate(&POOLS.get(pool).map_err(|_| Error::INVALID_VALUE)?, at, len, flavour, stream)
}

/// `cuMemFreeAsync`
pub fn free_async(flavour: Flavour, at: u64, stream: usize) -> Done {
    let stream = stream::of(stream, flavour)?;
    if at == 0 {
        return Ok(());
    }
    let mapping = space()
        .exact(at)
        .cloned()
        .filter(|m| matches!(m.backing, Backing::Chunk { legacy: true, .. }))
        .ok_or(Error::INVALID_VALUE)?;
    if capture::capturing(&stream) {
        return stream.submit(Work::FreeNode).map(drop);
    }
    stream.submit(Work::Free(Arc::new(mapping))).map(drop)
}

/// `cuMemPoolCreate`
pub fn create(pool: *mut usize, properties: *const Properties) -> Done {
    let properties = crate::arg(properties)?;
    if properties.kind != 1 || properties.location.kind != Location::DEVICE {
        return Err(Error::INVALID_VALUE);
    }
    let new = Pool::new(device::gpu(properties.location.id)?);
    out(pool, crate::registry::handle_of(&new))
}

/// `cuMemPoolDestroy`
pub fn destroy(pool: usize) -> Done {
    let pool = POOLS.get(pool).map_err(|_| Error::INVALID_VALUE)?;
    if Arc::ptr_eq(&pool, &Pool::default(pool.gpu)) {
        return Err(Error::INVALID_VALUE);
    }
    POOLS.remove(crate::registry::handle_of(&pool))?;
    let mut chosen = lock(&CHOSEN[pool.gpu]);
    if chosen.as_ref().is_some_and(|c| Arc::ptr_eq(c, &pool)) {
        *chosen = None;
    }
    let mut state = lock(&pool.state);
    state.dead = true;
    state.trim(0);
    Ok(())
}

/// `cuMemPoolTrimTo`
pub fn trim(pool: usize, keep: usize) -> Done {
    let pool = POOLS.get(pool).map_err(|_| Error::INVALID_VALUE)?;
    let mut state = lock(&pool.state);
    state.trim(keep as u64);
    Ok(())
}

/// `cuMemPoolSetAttribute`
pub fn set_attribute(pool: usize, attribute: u32, value: *const u64) -> Done {
    let pool = POOLS.get(pool).map_err(|_| Error::INVALID_VALUE)?;
    let mut state = lock(&pool.state);
    match attribute {
        1..=3 => state.reuse[attribute as usize - 1] = crate::arg(value.cast::<i32>())?,
        4 => state.threshold = crate::arg(value)?,
        6 => state.reserved_high = state.reserved,
        8 => state.used_high = state.used,
        _ => return Err(Error::INVALID_VALUE),
    }
    Ok(())
}

/// `cuMemPoolGetAttribute`
pub fn get_attribute(pool: usize, attribute: u32, value: *mut u64) -> Done {
    let pool = POOLS.get(pool).map_err(|_| Error::INVALID_VALUE)?;
    let state = lock(&pool.state);
    match attribute {
        1..=3 => out(value.cast::<i32>(), state.reuse[attribute as usize - 1]),
        4 => out(value, state.threshold),
        5 => out(value, state.reserved),
        6 => out(value, state.reserved_high),
        7 => out(value, state.used),
        8 => out(value, state.used_high),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// `cuMemPoolSetAccess`: also changes the access rights of existing allocations.
pub fn set_access(pool: usize, access: *const Access, count: usize) -> Done {
    let pool = POOLS.get(pool).map_err(|_| Error::INVALID_VALUE)?;
    for i in 0..count {
        // SAFETY: the program passes `count` entries.
        let access = unsafe { *access.add(i) };
        lock(&pool.state).access.insert(access.location.id, access.flags);
    }
    let gpus = pool.gpus();
    let owners = lock(&OWNERS);
    let mut space = space_mut();
    for (at, _) in owners.iter().filter(|(_, owner)| Arc::ptr_eq(owner, &pool)) {
        if let Some(mapping) = space.exact_mut(*at) {
            (mapping.read, mapping.write) = (gpus, gpus);
        }
    }
    Ok(())
}

/// `cuMemPoolGetAccess`
pub fn get_access(flags: *mut u32, pool: usize, location: *const Location) -> Done {
    let pool = POOLS.get(pool).map_err(|_| Error::INVALID_VALUE)?;
    let location = crate::arg(location)?;
    let own = device::ordinal(pool.gpu) == location.id;
    let set = lock(&pool.state).access.get(&location.id).copied();
    out(flags, if own { 3 } else { set.unwrap_or(0) })
}

/// `cuDeviceGetDefaultMemPool`
pub fn device_default(pool: *mut usize, device: i32) -> Done {
    out(pool, crate::registry::handle_of(&Pool::default(device::gpu(device)?)))
}

/// `cuDeviceGetMemPool`
pub fn device_get(pool: *mut usize, device: i32) -> Done {
    out(pool, crate::registry::handle_of(&Pool::chosen(device::gpu(device)?)))
}

/// `cuDeviceSetMemPool`
pub fn device_set(device: i32, pool: usize) -> Done {
    let gpu = device::gpu(device)?;
    let pool = POOLS.get(pool).map_err(|_| Error::INVALID_VALUE)?;
    if pool.gpu != gpu {
        return Err(Error::INVALID_DEVICE);
    }
    *lock(&CHOSEN[gpu]) = Some(pool);
    Ok(())
}

/// Returns the handle of the pool that owns this address, if one does.
pub fn owner(at: u64) -> Option<usize> {
    lock(&OWNERS).get(&at).map(crate::registry::handle_of)
}
