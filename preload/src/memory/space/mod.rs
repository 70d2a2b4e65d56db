//! The space: the program's allocations on one GPU, with their addresses, chunks and account.
//!
//! A *range* is a reserved part of the address space that is divided into chunks. It holds one large
//! allocation, or a slab of small allocations. The addresses of a range never change, and freed memory
//! is reused only after all earlier work is done.
//!
//! - [`chunks`]: the units in which memory is moved, and the allowance. `buffers`: host buffers. `files`:
//!   swap files.
//! - `pools`: memory pools of the program. `managed`: memory that only the program's threads can free.
//! - `mapping`: other addresses and devices that reach a range. `export`: other processes.

mod buffers;
pub(in crate::memory) mod chunks;
mod export;
mod files;
mod managed;
mod mapping;
mod pools;

pub use export::{Exported, Opening};
pub use managed::Unfreed;
pub use pools::has_pending_frees;

use crate::{
    connection::outbox,
    driver::types::*,
    memory::{
        account::Account,
        alias::Aliases,
        engine::{self, CHUNK, Engine, Flags, GRANULE},
        slab::{self, Slab},
        staging::Buffer,
        visible_limit::VisibleLimit,
        waiter::Waiter,
    },
    submit::{Fence, Work},
    sys::time::Instant,
};
use alloc::{
    boxed::Box,
    collections::{BTreeMap, BTreeSet, VecDeque},
    vec::Vec,
};
use chunks::{Chunk, Kept, Residency};
use nvshare_pools::Pools;
use nvshare_wire::ClientMessage;

#[derive(Debug)]
pub struct Space {
    gpu: CUdevice,
    engine: Engine,
    ranges: BTreeMap<u64, Range>,
    allocations: BTreeMap<u64, Allocation>,
    /// Freed allocations that earlier work may still use.
    freed: VecDeque<Freed>,
    next_id: u64,
    /// Allowances that have not been carried out, in order, with their sequence numbers. The scheduler
    /// requests an eviction in steps, so that other clients can use evicted memory while the eviction
    /// continues.
    pending: VecDeque<(u32, u64)>,
    /// The properties of the chunks of allocations, which match the properties of `cuMemAlloc`
    /// memory.
    flags: Flags,
    /// Host buffers that are not in use.
    free_buffers: Vec<Buffer>,
    waiter: Waiter,
    /// Managed memory that counts as freed, but that a program thread must still pass to the driver.
    unfreed: Vec<Unfreed>,
    pub pools: Pools<Fence>,
    pub account: Account,
    visible_limit: VisibleLimit,
    /// Whether chunks have arrived, or pools at rest have released memory, since the last
    /// [`take_arrivals`](Self::take_arrivals).
    has_arrivals: bool,
    /// Whether managed memory that does not count as mapped may be on the GPU ([`Space::take_strays`]).
    may_have_strays: bool,
}

/// The purpose of a range.
#[derive(Debug)]
enum RangeKind {
    Single,
    Slab(Box<Slab>),
    /// Memory that the program created with `cuMemCreate`. The program accesses it only at its aliases.
    Created,
    /// A segment of the memory pool with this number.
    Pool(u32),
}

#[derive(Debug)]
struct Range {
    len: u64,
    kind: RangeKind,
    chunks: Vec<Chunk>,
    /// The range was freed while the mover held one of its chunks. It is dismantled when the chunk is put
    /// back.
    dead: bool,
    /// The driver has already freed the addresses of the range.
    gone: bool,
    pins: Pins,
    /// Identifies the range to processes that open it.
    exported: Option<Exported>,
    aliases: Aliases,
}

/// The reasons for which a range stays on the GPU, and counts as pinned.
#[derive(Debug, Default)]
struct Pins {
    /// Other processes or devices may access the range until it is freed.
    always: bool,
    /// Other processes may have the exported range open.
    opened: bool,
    /// A process waits to open the exported range. It counts as open once it is on the GPU. Otherwise it
    /// could be evicted again before the process asks again.
    awaited: bool,
    /// The addresses that the program has announced to other devices.
    announced: BTreeSet<u64>,
}

impl Pins {
    fn are_any(&self) -> bool {
        self.always || self.opened || !self.announced.is_empty()
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Allocation {
    pub base: u64,
    /// The size that the program requested.
    pub size: u64,
    pub id: u64,
    pub context: usize,
    /// Whether the program allocated managed memory. The driver then answers all queries about it.
    pub managed: bool,
    /// The driver's handle of the memory pool; 0 for an allocation without a pool.
    pub pool: u64,
    range: u64,
}

impl Allocation {
    /// Describes an allocation of another process.
    pub fn foreign(base: u64, size: u64, id: u64, context: usize) -> Self {
        Self { base, size, id, context, managed: false, pool: 0, range: 0 }
    }

    pub fn is_foreign(&self) -> bool {
        self.range == 0
    }
}

#[derive(Debug)]
struct Freed {
    allocation: Allocation,
    /// A fence behind the work that may still use the allocation. `None` if the fence could not be recorded
    /// yet because of a capture.
    fence: Option<Fence>,
}

/// The outcome of an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocated {
    pub address: u64,
    pub backing: Backing,
}

/// Whether new memory is on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    There,
    /// The memory is mapped when the scheduler allows it. The gate must be closed until then.
    Later,
    /// Like `Later`, but the allowance had room and the driver had no memory. The driver may never have
    /// enough.
    Refused,
}

impl Range {
    /// Whether the mover may take chunks of the range.
    fn moves(&self) -> bool {
        !self.dead && !self.pins.are_any()
    }

    fn is_moving(&self) -> bool {
        self.chunks.iter().any(|chunk| matches!(chunk.residency, Residency::Moving))
    }
}

impl Space {
    /// `total` is the size of the GPU in bytes.
    pub fn new(gpu: CUdevice, engine: Engine, total: u64, env_max: u64, work: &'static Work) -> Self {
        let demand_paged = !engine.copies();
        let can_rdma = !demand_paged && engine::has(gpu, DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
        let account = Account {
            allowance: u64::MAX,
            limit: total.min(env_max),
            env_max,
            host_cache_max: u64::MAX,
            demand_paged,
            ..Account::default()
        };
        Self {
            gpu,
            engine,
            ranges: BTreeMap::new(),
            allocations: BTreeMap::new(),
            freed: VecDeque::new(),
            next_id: 1,
            pending: VecDeque::new(),
            flags: Flags { rdma: u8::from(can_rdma), exportable: true, ..Flags::default() },
            free_buffers: Vec::new(),
            waiter: Waiter::new(work),
            unfreed: Vec::new(),
            pools: Pools::default(),
            account,
            visible_limit: VisibleLimit::Unasked,
            has_arrivals: false,
            may_have_strays: false,
        }
    }

    /// Bytes that the program sees as free.
    pub fn visible_free(&mut self) -> u64 {
        let limit = self.visible_limit.of(&self.account, Instant::now());
        self.account.free_within(limit)
    }

    pub fn engine(&self) -> Engine {
        self.engine
    }

    pub fn gpu(&self) -> CUdevice {
        self.gpu
    }

    /// The engine that moves a chunk with these flags.
    pub(in crate::memory) fn engine_of(&self, flags: Flags) -> Engine {
        if flags.managed > 0 { Engine::Managed } else { self.engine }
    }

    /// The allocation that contains this address.
    pub fn find(&self, address: u64) -> Option<Allocation> {
        let (_, a) = self.allocations.range(..=address).next_back()?;
        (address - a.base < a.size).then_some(*a)
    }

    /// Allocates memory. With `beyond`, the demand may exceed the limit.
    pub fn allocate(&mut self, size: u64, context: usize, beyond: bool, work: &Work) -> Result<Allocated, CUresult> {
        self.reclaim(work);
        let (range, address, backing) = if size <= slab::LARGEST {
            self.allocate_in_slab(size, beyond)?
        } else {
            self.release_unused_pools_for(size, work);
            let len = size.checked_next_multiple_of(GRANULE).ok_or(ERROR_OUT_OF_MEMORY)?;
            let (base, backing) = self.make_range(len, RangeKind::Single, self.flags, beyond)?;
            (base, base, backing)
        };
        self.add_allocation(Allocation { base: address, size, id: 0, context, managed: false, pool: 0, range });
        Ok(Allocated { address, backing })
    }

    /// Adds an allocation under the next id.
    fn add_allocation(&mut self, allocation: Allocation) {
        self.allocations.insert(allocation.base, Allocation { id: self.next_id, ..allocation });
        self.next_id += 1;
    }

    fn allocate_in_slab(&mut self, size: u64, beyond: bool) -> Result<(u64, u64, Backing), CUresult> {
        for (base, range) in &mut self.ranges {
            if let (RangeKind::Slab(slab), false) = (&mut range.kind, range.dead)
                && let Some(offset) = slab.take(size)
            {
                return Ok((*base, base + offset, Backing::There));
            }
        }
        let (base, backing) = self.make_range(GRANULE, RangeKind::Slab(Box::new(Slab::new())), self.flags, beyond)?;
        match self.ranges.get_mut(&base).map(|r| &mut r.kind) {
            Some(RangeKind::Slab(slab)) => {
                slab.take(size).map(|offset| (base, base + offset, backing)).ok_or(ERROR_OUT_OF_MEMORY)
            }
            _ => Err(ERROR_OUT_OF_MEMORY),
        }
    }

    /// Allocates memory for `cuMemCreate`, at an address that the program does not know: the base of its
    /// range.
    pub fn create(&mut self, len: u64, flags: Flags, beyond: bool, work: &Work) -> Result<Allocated, CUresult> {
        self.reclaim(work);
        self.release_unused_pools_for(len, work);
        let (address, backing) = self.make_range(len, RangeKind::Created, flags, beyond)?;
        Ok(Allocated { address, backing })
    }

    /// Frees a range from [`create`](Self::create) that is no longer mapped or referenced.
    pub fn destroy(&mut self, base: u64) {
        self.drop_range(base);
    }

    fn make_range(
        &mut self,
        len: u64,
        kind: RangeKind,
        flags: Flags,
        beyond: bool,
    ) -> Result<(u64, Backing), CUresult> {
        let is_too_much = self.account.may_exceed_gpu && !self.account.is_grantable(len, false, self.account.limit_max);
        if is_too_much || !self.account.admits(len, beyond) {
            return Err(ERROR_OUT_OF_MEMORY);
        }
        let base = self.engine.reserve(len)?;
        self.add_range(base, len, kind, flags)
    }

    fn add_range(&mut self, base: u64, len: u64, kind: RangeKind, flags: Flags) -> Result<(u64, Backing), CUresult> {
        let engine = self.engine_of(flags);
        // Memory that the program can export has a single handle, so it must be a single chunk.
        let step = if flags.handle_types == 0 { CHUNK } else { len };
        let chunks = (0..len.div_ceil(step))
            .map(|i| Chunk { offset: i * step, len: step.min(len - i * step), flags, residency: Residency::Unbacked })
            .collect();
        let (pins, exported, aliases) = (Pins::default(), None, Aliases::default());
        let mut range = Range { len, kind, chunks, dead: false, gone: false, pins, exported, aliases };
        let is_managed = !engine.copies();
        self.account.demand_more(len, is_managed);
        self.account.managed += if is_managed { len } else { 0 };
        self.may_have_strays |= is_managed && self.account.may_exceed_gpu;
        // Maps the range now only if no other memory is missing, because missing chunks get the
        // room first. Managed memory that exceeds the GPU makes room.
        let mut lacking = self.account.demand - len > self.account.mapped;
        if self.account.may_exceed_gpu && !is_managed {
            lacking = self.account.shortfall() > len;
            self.yield_pages(self.account.shortfall());
        }
        let may_map = !lacking && len <= self.account.room();
        let mut backing = if may_map { Backing::There } else { Backing::Later };
        if may_map {
            for chunk in &mut range.chunks {
                match engine.map(self.gpu, base + chunk.offset, chunk.len, flags) {
                    Ok(handle) => {
                        chunk.residency = Residency::Gpu { handle, copy: None };
                        self.account.map(chunk.len, is_managed);
                    }
                    // Other clients have not freed their memory yet, so the mover retries. A retry
                    // helps only if a scheduler or other clients exist.
                    Err(ERROR_OUT_OF_MEMORY) if self.account.room_comes() => {
                        backing = Backing::Refused;
                        break;
                    }
                    Err(error) => {
                        self.dismantle(base, range);
                        return Err(error);
                    }
                }
            }
        }
        self.ranges.insert(base, range);
        self.update_peak();
        Ok((base, backing))
    }

    /// Frees a range that is no longer in use.
    fn dismantle(&mut self, base: u64, mut range: Range) {
        let engine = range.chunks.first().map_or(self.engine, |chunk| self.engine_of(chunk.flags));
        let is_managed = !engine.copies();
        if range.pins.are_any() {
            self.account.unpin(range.len);
        }
        if range.dead {
            self.account.freeing -= range.len;
        }
        for chunk in range.chunks {
            match chunk.residency {
                Residency::Gpu { handle, copy } => {
                    range.aliases.hide(chunk.offset);
                    engine.unmap(base + chunk.offset, chunk.len, handle);
                    self.account.unmap(chunk.len, is_managed);
                    self.account.host_cache -= copy.as_ref().map_or(0, Kept::host_bytes);
                    self.keep_buffers(copy.and_then(|copy| copy.without_buffer().0));
                }
                Residency::Host(copy) => {
                    self.account.swapped -= chunk.len;
                    self.keep_buffers(copy.map(|c| c.buffer));
                }
                Residency::File(_) => {
                    self.account.swapped -= chunk.len;
                    self.account.in_file -= chunk.len;
                }
                Residency::Unbacked | Residency::Constant(_) | Residency::Moving => {}
            }
            self.account.demand_less(chunk.len, is_managed);
        }
        if is_managed && range.gone {
            self.account.managed -= range.len;
        } else if !engine.unreserve(base, range.len) {
            self.unfreed.push(Unfreed { base, len: range.len });
        }
        // Lowers the peak, because a new allocation that raises the demand again has not been used
        // by any work.
        self.account.peak = self.account.peak.min(self.account.demand);
        self.update_peak();
        if let Some(Exported { range, .. }) = range.exported {
            // The scheduler must receive this message before the report of fewer bytes.
            outbox::push([ClientMessage::Withdrawn { range }]);
        }
        self.acknowledge();
    }

    /// Frees the allocation at this address when no work uses it any more. Returns its id, or
    /// `None` if there is no such allocation.
    pub fn free(&mut self, address: u64, work: &Work) -> Option<u64> {
        let allocation = *self.allocations.get(&address)?;
        if self.free_in_pool(address, None) {
            self.tend_pools(work);
            return Some(allocation.id);
        }
        self.allocations.remove(&address);
        self.account.freeing += self.room_of(&allocation);
        self.freed.push_back(Freed { allocation, fence: work.fence_for_freeing() });
        self.reclaim(work);
        Some(allocation.id)
    }

    /// Whether work in the context of a freed allocation may still be running. Returns `None` if that
    /// cannot be determined now.
    pub fn is_awaited(&mut self, id: u64, work: &Work) -> Option<bool> {
        let Some(freed) = self.freed.iter_mut().find(|freed| freed.allocation.id == id) else { return Some(false) };
        if freed.fence.is_none() {
            freed.fence = work.fence_for_freeing();
        }
        let done = work.is_done_in(freed.fence.as_ref()?, freed.allocation.context)?;
        Some(!done)
    }

    /// Frees a new allocation whose address has not been returned to the program.
    pub fn undo(&mut self, address: u64) {
        if let Some(allocation) = self.allocations.remove(&address) {
            self.release(allocation);
        }
    }

    /// Frees allocations that work no longer uses.
    pub fn reclaim(&mut self, work: &Work) {
        while let Some(freed) = self.freed.front_mut() {
            if !work.has_ended(&mut freed.fence, || work.fence_for_freeing()) {
                break;
            }
            if let Some(freed) = self.freed.pop_front() {
                self.account.freeing -= self.room_of(&freed.allocation);
                self.release(freed.allocation);
            }
        }
        self.tend_pools(work);
    }

    /// Bytes that are released when the allocation is freed: the whole range for a large allocation, 0 for
    /// a part of a slab or pool.
    fn room_of(&self, allocation: &Allocation) -> u64 {
        let range = self.ranges.get(&allocation.range);
        range.filter(|r| matches!(r.kind, RangeKind::Single)).map_or(0, |r| r.len)
    }

    pub fn has_freed(&self) -> bool {
        !self.freed.is_empty()
    }

    fn release(&mut self, allocation: Allocation) {
        self.withdraw(allocation.range, allocation.base);
        let Some(range) = self.ranges.get_mut(&allocation.range) else { return };
        let empty = match &mut range.kind {
            RangeKind::Single | RangeKind::Created => true,
            RangeKind::Pool(_) => false, // freed with its pool
            RangeKind::Slab(slab) => {
                slab.give_back(allocation.base - allocation.range, allocation.size);
                slab.is_empty()
            }
        };
        if empty {
            self.drop_range(allocation.range);
        }
    }

    fn drop_range(&mut self, base: u64) {
        let Some(range) = self.ranges.get_mut(&base) else { return };
        if range.is_moving() {
            if !core::mem::replace(&mut range.dead, true) {
                self.account.freeing += range.len; // dismantled when the moving chunk is put back
            }
        } else if let Some(range) = self.ranges.remove(&base) {
            self.dismantle(base, range);
        }
    }

    /// Frees all memory of a context that is being destroyed. With `last`, frees the memory of all
    /// contexts, except pool memory, which belongs to no context.
    pub fn drop_context(&mut self, context: usize, last: bool) {
        let of_contexts = self.allocations.values().filter(|a| a.pool == 0);
        let gone: Vec<_> = of_contexts.filter(|a| last || a.context == context).copied().collect();
        for allocation in gone {
            self.allocations.remove(&allocation.base);
            self.release_gone(allocation);
        }
        // The driver may have freed some of it with the context and reused the addresses.
        for unfreed in core::mem::take(&mut self.unfreed) {
            self.account.managed -= unfreed.len;
        }
        self.buffers().for_each(|buffer| buffer.forget_context(context));
        if last {
            for freed in core::mem::take(&mut self.freed) {
                self.account.freeing -= self.room_of(&freed.allocation);
                self.release_gone(freed.allocation);
            }
        }
    }

    /// Releases an allocation whose context no longer exists. The driver has already freed managed memory.
    fn release_gone(&mut self, allocation: Allocation) {
        let is_managed = !self.engine_of_range(allocation.range).copies();
        if let Some(range) = self.ranges.get_mut(&allocation.range) {
            range.gone = is_managed;
        }
        self.release(allocation);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{driver::fake::TOTAL, memory::fake::Memory};

    impl Memory {
        fn try_allocate(&self, size: u64, beyond: bool) -> Result<Allocated, CUresult> {
            self.space.lock().allocate(size, self.context as usize, beyond, self.work)
        }

        fn free(&self, address: u64) -> Option<u64> {
            self.space.lock().free(address, self.work)
        }

        fn busy_stream(&self) -> CUstream {
            let stream = self.driver.new_stream(self.context);
            self.work.note(stream);
            self.driver.keep_busy(stream);
            stream
        }
    }

    #[test]
    fn small_allocations_share_a_granule() {
        let memory = Memory::new();
        let addresses = [1, 700, slab::LARGEST].map(|size| memory.try_allocate(size, false).expect("room").address);
        assert_eq!(addresses.map(|at| at - addresses[0]), [0, 512, 1536]);
        assert_eq!((memory.account().demand, memory.driver.used()), (GRANULE, GRANULE));
        let found = memory.space.lock().find(addresses[1] + 699).expect("the last byte");
        assert_eq!((found.base, found.size), (addresses[1], 700));
        assert!(memory.space.lock().find(addresses[1] + 700).is_none());
        assert!(addresses.iter().all(|at| memory.free(*at).is_some()));
        assert_eq!((memory.account().demand, memory.driver.used()), (0, 0));
        assert_eq!(memory.free(addresses[0]), None);
    }

    #[test]
    fn freed_memory_stays_until_earlier_work_is_done() {
        let memory = Memory::new();
        let at = memory.allocate();
        let stream = memory.busy_stream();
        let id = memory.free(at).expect("an allocation");
        let account = memory.account();
        assert_eq!((account.demand, account.freeing, memory.driver.is_mapped(at)), (GRANULE, GRANULE, true));
        assert_eq!(account.free(), TOTAL, "the program can allocate these bytes again");
        let mut space = memory.space.lock();
        assert_eq!((space.find(at).is_none(), space.is_awaited(id, memory.work)), (true, Some(true)));
        memory.driver.finish(stream);
        assert_eq!(space.is_awaited(id, memory.work), Some(false));
        space.reclaim(memory.work);
        assert_eq!((space.account.demand, space.account.freeing, space.has_freed()), (0, 0, false));
        assert!(!memory.driver.is_mapped(at));
    }

    #[test]
    fn an_allocation_above_the_limit_has_no_effect() {
        let memory = Memory::new();
        memory.space.lock().limit(1, 2 * GRANULE, 0, 0);
        memory.allocate();
        assert_eq!(memory.try_allocate(2 * GRANULE, false), Err(ERROR_OUT_OF_MEMORY));
        assert_eq!(memory.try_allocate(u64::MAX, false), Err(ERROR_OUT_OF_MEMORY));
        assert_eq!((memory.account().demand, memory.driver.count("cuMemAddressReserve")), (GRANULE, 1));
        assert!(memory.try_allocate(2 * GRANULE, true).is_ok(), "the caller may exceed the limit");
        memory.space.lock().account.max = 2 * GRANULE;
        assert_eq!(memory.try_allocate(GRANULE, true), Err(ERROR_OUT_OF_MEMORY), "a rule sets the limit");
    }

    #[test]
    fn memory_beyond_the_allowance_is_mapped_later() {
        let memory = Memory::new();
        memory.space.lock().allow(1, GRANULE);
        let backing = |memory: &Memory| memory.try_allocate(GRANULE, false).expect("room").backing;
        assert_eq!((backing(&memory), backing(&memory)), (Backing::There, Backing::Later));
        assert_eq!((memory.account().demand, memory.account().mapped), (2 * GRANULE, GRANULE));
        memory.space.lock().allow(2, TOTAL);
        assert_eq!(backing(&memory), Backing::Later, "missing chunks get the room first");
        assert_eq!(memory.driver.used(), GRANULE);
    }

    #[test]
    fn an_allocation_fails_if_the_gpu_is_full_and_no_room_comes() {
        let memory = Memory::new();
        memory.driver.set_room(0);
        assert_eq!(memory.try_allocate(GRANULE, false), Err(ERROR_OUT_OF_MEMORY));
        assert_eq!((memory.account().demand, memory.driver.count("cuMemAddressFree")), (0, 1));
        memory.space.lock().allow(1, GRANULE);
        let refused = memory.try_allocate(GRANULE, false).expect("the scheduler makes room");
        assert_eq!((refused.backing, memory.account().demand), (Backing::Refused, GRANULE));
    }

    #[test]
    fn an_allocation_that_fails_halfway_frees_its_chunks() {
        let memory = Memory::new();
        memory.driver.fail_later("cuMemSetAccess", 1, 1, 700);
        assert_eq!(memory.try_allocate(2 * CHUNK, false), Err(700));
        let account = memory.account();
        assert_eq!((account.demand, account.mapped, account.peak, memory.driver.used()), (0, 0, 0, 0));
    }

    #[test]
    fn memory_freed_during_a_move_is_dismantled_when_the_move_ends() {
        let memory = Memory::new();
        let at = memory.allocate();
        let leaving = memory.space.lock().take_leaving(GRANULE).remove(0);
        memory.free(at).expect("an allocation");
        let account = memory.account();
        assert_eq!((account.demand, account.freeing, memory.driver.is_mapped(at)), (GRANULE, GRANULE, true));
        memory.space.lock().put(leaving.base, leaving.chunk.offset, leaving.chunk.residency);
        let account = memory.account();
        assert_eq!((account.demand, account.mapped, account.freeing, account.in_flight), (0, 0, 0, 0));
        assert!(!memory.driver.is_mapped(at));
    }

    #[test]
    fn the_memory_of_a_destroyed_context_is_freed() {
        let memory = Memory::new();
        let others = memory.allocate();
        let own = memory.space.lock().allocate(GRANULE, 77, false, memory.work).expect("room").address;
        memory.busy_stream();
        memory.space.lock().drop_context(77, false);
        assert_eq!([others, own].map(|at| memory.driver.is_mapped(at)), [true, false]);
        memory.free(others).expect("an allocation");
        assert!(memory.driver.is_mapped(others), "work of another context may use it");
        memory.space.lock().drop_context(memory.context as usize, true);
        assert_eq!((memory.account().demand, memory.account().freeing, memory.driver.used()), (0, 0, 0));
    }

    #[test]
    fn an_undone_allocation_is_freed_without_waiting_for_work() {
        let memory = Memory::new();
        memory.busy_stream();
        let at = memory.allocate();
        memory.space.lock().undo(at);
        assert_eq!((memory.account().demand, memory.account().peak, memory.driver.used()), (0, 0, 0));
    }
}
