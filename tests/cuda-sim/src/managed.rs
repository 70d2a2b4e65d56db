//! Managed memory. The host and GPUs access it at the same address. Managed memory resides on a GPU
//! only while that GPU needs it. After a prefetch to the host, the GPU's memory stays in use until
//! allocations need it, as with driver 580.
//!
//! Residency is recorded per block. A kernel waits while the blocks that it accesses fault in to its
//! GPU. If the GPU has no room, other blocks of any process are evicted. If no block can be evicted,
//! kernels access blocks over the link.

use crate::{
    context, device,
    error::{Done, Error},
    memory::{self, Backing, GRANULARITY, Mapping, space, space_mut},
    out,
};
use cuda_sim_gpus::{Account, Config, Engine, EngineKind, MAX_GPUS};
use std::{
    sync::{Arc, Mutex, MutexGuard, Weak},
    time::Duration,
};

/// One managed allocation.
#[derive(Debug)]
pub struct Managed {
    blocks: usize,
    state: Mutex<Residency>,
}

#[derive(Debug, Default)]
struct Residency {
    /// The GPU on which each block resides, if any.
    gpu: Vec<Option<usize>>,
    /// The GPU whose memory each block keeps although it was prefetched to the host, if any.
    kept: Vec<Option<usize>>,
    last_used: u64,
    read_mostly: bool,
    preferred: i32,
    prefetched: i32,
}

/// The value that `cuMemRangeGetAttribute` returns for no location.
const NOWHERE: i32 = -2;
/// The host, as a device number.
const CPU: i32 = -1;

#[derive(Debug)]
struct Table {
    all: Vec<Weak<Managed>>,
    clock: u64,
    /// Resident bytes at this process's last update. The account contains the bytes that other processes
    /// have not evicted since.
    believed: [u64; MAX_GPUS],
}

static TABLE: Mutex<Table> = Mutex::new(Table { all: Vec::new(), clock: 0, believed: [0; MAX_GPUS] });

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// `cuMemAllocManaged`
pub fn alloc(at: *mut u64, bytes: usize, flags: u32) -> Done {
    if at.is_null() || bytes == 0 || !matches!(flags, 1 | 2) {
        return Err(Error::INVALID_VALUE);
    }
    let context = context::healthy()?;
    crate::capture::forbid()?;
    let len = (bytes as u64).next_multiple_of(4096);
    let place = memory::reserve(len, GRANULARITY, 0)?;
    // SAFETY: `reserve` has allocated these addresses exclusively. They become host memory at the same
    // address.
    let protected = unsafe { libc::mprotect(place as *mut _, len as usize, libc::PROT_READ | libc::PROT_WRITE) };
    if protected != 0 {
        memory::unreserve(place, len);
        return Err(Error::OUT_OF_MEMORY);
    }
    let blocks = len.div_ceil(GRANULARITY) as usize;
    let residency = Residency {
        gpu: vec![None; blocks],
        kept: vec![None; blocks],
        preferred: NOWHERE,
        prefetched: NOWHERE,
        ..Residency::default()
    };
    let managed = Arc::new(Managed { blocks, state: Mutex::new(residency) });
    lock(&TABLE).all.push(Arc::downgrade(&managed));
    space_mut().insert(Mapping::new(place, len, Backing::Managed(managed), context.handle()).for_gpus(u64::MAX));
    out(at, place)
}

/// Frees memory from [`alloc`]. The caller has already removed the memory's mapping from the table.
pub fn free(mapping: &Mapping, managed: &Managed) {
    let mut table = lock(&TABLE);
    let mut gone = [0; MAX_GPUS];
    let mut state = lock(&managed.state);
    for gpu in state.gpu.iter_mut().filter_map(Option::take) {
        gone[gpu] += GRANULARITY;
    }
    for gpu in state.kept.iter_mut().filter_map(Option::take) {
        Account::get().give_kept(gpu, GRANULARITY);
    }
    drop(state);
    for (gpu, bytes) in gone.into_iter().enumerate().filter(|(_, bytes)| *bytes > 0) {
        table.believed[gpu] -= bytes;
        Account::get().give_managed(gpu, bytes);
    }
    table.all.retain(|m| m.strong_count() > 0 && m.as_ptr() != std::ptr::from_ref(managed));
    memory::unreserve(mapping.at, mapping.len);
}

/// Faults in the range that a piece of work is about to access, and waits for the time that the
/// page faults would take.
pub fn fault(at: u64, len: u64, gpu: usize) {
    pay(migrate(at, len, gpu), Config::get().fault_bandwidth, gpu, EngineKind::In);
}

/// Moves a range to a GPU, or to the host.
pub fn prefetch(at: u64, len: u64, gpu: Option<usize>) -> Done {
    let bandwidth = Config::get().link_bandwidth;
    match gpu {
        Some(gpu) => {
            let end = at + len;
            let mut from = at;
            while from < end {
                let piece = memory::PIECE.min(end - from);
                pay(migrate(from, piece, gpu), bandwidth, gpu, EngineKind::In);
                from += piece;
            }
        }
        None => {
            let mut table = lock(&TABLE);
            let mut gone = [0; MAX_GPUS];
            for (managed, first, last) in blocks(at, len) {
                let mut state = lock(&managed.state);
                for block in first..=last {
                    let Some(gpu) = state.gpu[block].take() else { continue };
                    gone[gpu] += GRANULARITY;
                    state.release_kept(block);
                    state.kept[block] = Some(gpu);
                }
            }
            for (gpu, bytes) in gone.into_iter().enumerate().filter(|(_, bytes)| *bytes > 0) {
                table.believed[gpu] -= bytes;
                Account::get().keep_managed(gpu, bytes);
            }
            drop(table);
            for (gpu, bytes) in gone.into_iter().enumerate() {
                pay(bytes, bandwidth, gpu, EngineKind::Out);
            }
        }
    }
    for (managed, _, _) in blocks(at, len) {
        lock(&managed.state).prefetched = gpu.map_or(CPU, device::ordinal);
    }
    Ok(())
}

fn pay(bytes: u64, bandwidth: u64, gpu: usize, engine: EngineKind) {
    if bytes > 0 {
        let cost = Duration::from_nanos((u128::from(bytes) * 1_000_000_000 / u128::from(bandwidth)) as u64);
        Engine::get(gpu, engine).run(cost, || {});
    }
}

/// Returns the managed allocations in a range, each with its first and last block in that range.
fn blocks(at: u64, len: u64) -> Vec<(Arc<Managed>, usize, usize)> {
    let space = space();
    let mut found = Vec::new();
    let mut from = at;
    while let Some(mapping) = space.at(from).filter(|_| from < at + len) {
        let to = mapping.end().min(at + len);
        if let Backing::Managed(managed) = &mapping.backing {
            found.push((
                managed.clone(),
                ((from - mapping.at) / GRANULARITY) as usize,
                ((to - 1 - mapping.at) / GRANULARITY) as usize,
            ));
        }
        from = to;
    }
    found
}

/// Makes the blocks of a range resident, as far as the GPU has room. Returns the bytes that cross
/// the link.
fn migrate(at: u64, len: u64, gpu: usize) -> u64 {
    let blocks = blocks(at, len);
    if blocks.is_empty() {
        return 0;
    }
    let mut table = lock(&TABLE);
    table.reconcile(gpu);
    let mut moved = 0;
    for (managed, first, last) in blocks {
        table.clock += 1;
        lock(&managed.state).last_used = table.clock;
        for block in first..=last {
            let before = lock(&managed.state).gpu[block];
            if before == Some(gpu) {
                continue;
            }
            if let Some(other) = before {
                table.believed[other] -= GRANULARITY;
                Account::get().give_managed(other, GRANULARITY);
            }
            moved += GRANULARITY;
            lock(&managed.state).release_kept(block);
            if !Account::get().take_managed(gpu, GRANULARITY) {
                lock(&managed.state).gpu[block] = None;
                continue;
            }
            lock(&managed.state).gpu[block] = Some(gpu);
            table.believed[gpu] += GRANULARITY;
            table.reconcile_except(gpu, Some((&managed, block)));
        }
    }
    moved
}

impl Residency {
    /// Releases the memory that a block keeps.
    fn release_kept(&mut self, block: usize) {
        if let Some(gpu) = self.kept[block].take() {
            Account::get().give_kept(gpu, GRANULARITY);
        }
    }
}

impl Table {
    /// Determines how many of this process's blocks other processes have evicted. Marks that number
    /// of blocks as not resident, beginning with the least recently used allocations.
    fn reconcile(&mut self, gpu: usize) {
        self.reconcile_except(gpu, None);
    }

    fn reconcile_except(&mut self, gpu: usize, keep: Option<(&Arc<Managed>, usize)>) {
        let have = Account::get().managed(gpu);
        if self.believed[gpu] <= have {
            return;
        }
        let mut all: Vec<Arc<Managed>> = self.all.iter().filter_map(Weak::upgrade).collect();
        all.sort_by_key(|m| lock(&m.state).last_used);
        for managed in all {
            let mut state = lock(&managed.state);
            for block in 0..managed.blocks {
                if self.believed[gpu] <= have {
                    return;
                }
                let kept = keep.is_some_and(|(m, b)| Arc::ptr_eq(m, &managed) && b == block);
                if state.gpu[block] == Some(gpu) && !kept {
                    state.gpu[block] = None;
                    self.believed[gpu] -= GRANULARITY;
                }
            }
        }
    }
}

/// Returns the GPU of a `CUdevice`, or `None` for the host.
fn place(device: i32) -> Result<Option<usize>, Error> {
    if device == CPU { Ok(None) } else { device::gpu(device).map(Some) }
}

/// A `CUmemLocation`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Location {
    pub kind: u32,
    pub id: i32,
}

impl Location {
    pub const DEVICE: u32 = 1;
    pub const HOST: u32 = 2;

    /// Returns the GPU of a location, or `None` for the host.
    fn gpu(self) -> Result<Option<usize>, Error> {
        match self.kind {
            Location::DEVICE => device::gpu(self.id).map(Some),
            Location::HOST..=4 => Ok(None),
            _ => Err(Error::INVALID_VALUE),
        }
    }
}

fn check(at: u64, len: usize) -> Done {
    let space = space();
    let managed = space.at(at).is_some_and(|m| matches!(m.backing, Backing::Managed(_)));
    if len > 0 && managed && space.covers(at, len as u64) { Ok(()) } else { Err(Error::INVALID_VALUE) }
}

/// `cuMemPrefetchAsync`
pub fn prefetch_async(flavour: crate::stream::Flavour, at: u64, len: usize, device: i32, stream: usize) -> Done {
    prefetch_to(flavour, at, len, place(device)?, stream)
}

/// `cuMemPrefetchAsync_v2`
pub fn prefetch_async_v2(
    flavour: crate::stream::Flavour,
    at: u64,
    len: usize,
    to: Location,
    _flags: u32,
    stream: usize,
) -> Done {
    prefetch_to(flavour, at, len, to.gpu()?, stream)
}

fn prefetch_to(flavour: crate::stream::Flavour, at: u64, len: usize, gpu: Option<usize>, stream: usize) -> Done {
    let stream = crate::stream::of(stream, flavour)?;
    check(at, len)?;
    stream.submit(crate::work::Work::Prefetch { at, len: len as u64, gpu }).map(drop)
}

/// `cuMemAdvise`
pub fn advise(at: u64, len: usize, advice: u32, device: i32) -> Done {
    if matches!(advice, 3 | 5 | 6) {
        place(device)?;
    }
    advise_at(at, len, advice, device)
}

/// `cuMemAdvise_v2`
pub fn advise_v2(at: u64, len: usize, advice: u32, to: Location) -> Done {
    let device = if matches!(advice, 3 | 5 | 6) { to.gpu()?.map_or(CPU, device::ordinal) } else { NOWHERE };
    advise_at(at, len, advice, device)
}

fn advise_at(at: u64, len: usize, advice: u32, device: i32) -> Done {
    context::healthy()?;
    check(at, len)?;
    for (managed, _, _) in blocks(at, len as u64) {
        let mut state = lock(&managed.state);
        match advice {
            1 | 2 => state.read_mostly = advice == 1,
            3 => state.preferred = device,
            4 => state.preferred = NOWHERE,
            5 | 6 => {}
            _ => return Err(Error::INVALID_VALUE),
        }
    }
    Ok(())
}

/// `cuMemRangeGetAttribute`
pub fn range_attribute(data: *mut i32, size: usize, attribute: u32, at: u64, len: usize) -> Done {
    check(at, len)?;
    if size < 4 {
        return Err(Error::INVALID_VALUE);
    }
    let Some((managed, _, _)) = blocks(at, len as u64).into_iter().next() else { return Err(Error::INVALID_VALUE) };
    let state = lock(&managed.state);
    match attribute {
        1 => out(data, i32::from(state.read_mostly)),
        2 => out(data, state.preferred),
        3 => out(data, NOWHERE),
        4 => out(data, state.prefetched),
        _ => Err(Error::INVALID_VALUE),
    }
}
