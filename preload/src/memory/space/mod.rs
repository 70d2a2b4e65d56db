//! The program's allocations on one GPU: their addresses, their chunks and where each chunk is, and the account of bytes.
//!
//! A *range* is reserved address space made of chunks: one large allocation, or a slab that small ones share. A range's
//! addresses never change, and what was freed is not reused before all work that was submitted earlier is done.

mod allowance;
mod buffers;
mod chunks;
mod export;
mod mapping;

pub use export::{Export, Exported};

use crate::{
    connection::outbox,
    driver::types::*,
    memory::{
        account::Account,
        alias::Aliases,
        chunk::{Chunk, Residency},
        engine::{self, CHUNK, Engine, Flags, GRANULE},
        slab::{self, Slab},
        staging::Buffer,
    },
    work::{Fence, Work},
};
use alloc::{
    boxed::Box,
    collections::{BTreeMap, VecDeque},
    vec::Vec,
};
use nvshare_wire::{ClientMessage, Counts};

#[derive(Debug)]
pub struct Space {
    gpu: CUdevice,
    engine: &'static dyn Engine,
    ranges: BTreeMap<u64, Range>,
    allocations: BTreeMap<u64, Allocation>,
    /// Freed, while work submitted before may still use them.
    freed: VecDeque<Freed>,
    next_id: u64,
    /// Allowances that have not been carried out, in order, by sequence number: an eviction is asked for in steps, so that
    /// what has left can be passed on while the rest still leaves.
    pending: VecDeque<(u32, u64)>,
    /// How chunks of allocations are made, as those of `cuMemAlloc` are.
    flags: Flags,
    /// Buffers not in use.
    free_buffers: Vec<Buffer>,
    pub account: Account,
}

/// What a range is for.
#[derive(Debug)]
enum RangeKind {
    Single,
    Slab(Box<Slab>),
    /// What the program made with `cuMemCreate`: it knows no address of it but its aliases.
    Created,
}

#[derive(Debug)]
struct Range {
    len: u64,
    kind: RangeKind,
    chunks: Vec<Chunk>,
    /// Freed while a chunk was on its way; the mover takes the range apart when it is done with it.
    dead: bool,
    /// The driver has taken its addresses back.
    gone: bool,
    /// It stays on the GPU for good, and is on the account as such.
    pinned: bool,
    /// What other processes know it by; it is pinned, then.
    exported: Option<Exported>,
    aliases: Aliases,
}

#[derive(Debug, Clone, Copy)]
pub struct Allocation {
    pub base: u64,
    /// As the program asked.
    pub size: u64,
    pub id: u64,
    pub context: usize,
    /// The program made it as managed memory, and the driver knows all about it.
    pub managed: bool,
    range: u64,
}

impl Allocation {
    /// One of another process.
    pub fn foreign(base: u64, size: u64, id: u64, context: usize) -> Self {
        Self { base, size, id, context, managed: false, range: 0 }
    }

    pub fn is_foreign(&self) -> bool {
        self.range == 0
    }
}

#[derive(Debug)]
struct Freed {
    allocation: Allocation,
    /// Behind the work that may still use it; `None` if it could not be made yet (a stream was capturing).
    fence: Option<Fence>,
}

/// How an allocation ended up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocated {
    pub address: u64,
    pub backing: Backing,
}

/// Whether new memory is on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    There,
    /// It comes with credit from the scheduler, and the gate must be closed until then.
    Later,
    /// The same, but there was credit, and the driver had no room. It may be that there never will be any.
    Refused,
}

impl Range {
    /// Whether the mover may take chunks of it.
    fn moves(&self) -> bool {
        !self.dead && !self.pinned
    }
}

impl Space {
    /// On a GPU with so much memory.
    pub fn new(gpu: CUdevice, engine: &'static dyn Engine, total: u64, env_max: u64) -> Self {
        let demand_paged = !engine.copies();
        let can_rdma = !demand_paged && engine::has(gpu, DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
        let account = Account {
            demand: 0,
            mapped: 0,
            swapped: 0,
            pinned: 0,
            allowance: u64::MAX,
            ack: 0,
            limit: total.min(env_max),
            limit_seq: 0,
            limit_max: 0,
            max: 0,
            env_max,
            host_cache: 0,
            host_cache_max: u64::MAX,
            in_flight: 0,
            freeing: 0,
            demand_paged,
            company: 0,
            peak: 0,
            refused: false,
            searched: false,
            unevictable: false,
            counts: Counts::default(),
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
            account,
        }
    }

    pub fn engine(&self) -> &'static dyn Engine {
        self.engine
    }

    pub fn gpu(&self) -> CUdevice {
        self.gpu
    }

    /// How a certain chunk moves.
    pub(in crate::memory) fn engine_of(&self, flags: Flags) -> &'static dyn Engine {
        if flags.managed > 0 { &engine::Managed } else { self.engine }
    }

    /// The allocation that holds this address.
    pub fn find(&self, address: u64) -> Option<Allocation> {
        let (_, a) = self.allocations.range(..=address).next_back()?;
        (address - a.base < a.size).then_some(*a)
    }

    /// Makes an allocation; `beyond` lets it exceed the limit.
    pub fn allocate(&mut self, size: u64, context: usize, beyond: bool, work: &Work) -> Result<Allocated, CUresult> {
        self.reclaim(work);
        let (range, address, backing) = if size <= slab::LARGEST {
            self.allocate_in_slab(size, beyond)?
        } else {
            let len = size.checked_next_multiple_of(GRANULE).ok_or(ERROR_OUT_OF_MEMORY)?;
            let (base, backing) = self.make_range(len, RangeKind::Single, self.flags, beyond)?;
            (base, base, backing)
        };
        let id = self.next_id;
        self.next_id += 1;
        self.allocations.insert(address, Allocation { base: address, size, id, context, managed: false, range });
        Ok(Allocated { address, backing })
    }

    /// The same for managed memory, which `make` makes.
    pub fn allocate_managed(
        &mut self,
        size: u64,
        context: usize,
        beyond: bool,
        work: &Work,
        make: impl FnOnce() -> Result<u64, CUresult>,
    ) -> Result<u64, CUresult> {
        self.reclaim(work);
        let len = size.checked_next_multiple_of(GRANULE).ok_or(ERROR_OUT_OF_MEMORY)?;
        if !self.account.admits(len, beyond) {
            return Err(ERROR_OUT_OF_MEMORY);
        }
        let base = make()?;
        self.add_range(base, len, RangeKind::Single, Flags { managed: size, ..Flags::default() })?;
        let id = self.next_id;
        self.next_id += 1;
        self.allocations.insert(base, Allocation { base, size, id, context, managed: true, range: base });
        Ok(base)
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

    /// Makes memory without an address that the program knows; gives the base of its range.
    pub fn create(&mut self, len: u64, flags: Flags, beyond: bool, work: &Work) -> Result<(u64, Backing), CUresult> {
        self.reclaim(work);
        self.make_range(len, RangeKind::Created, flags, beyond)
    }

    /// Nothing refers to what [`create`](Self::create) made any more.
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
        if !self.account.admits(len, beyond) {
            return Err(ERROR_OUT_OF_MEMORY);
        }
        let base = self.engine.reserve(len)?;
        self.add_range(base, len, kind, flags)
    }

    fn add_range(&mut self, base: u64, len: u64, kind: RangeKind, flags: Flags) -> Result<(u64, Backing), CUresult> {
        let engine = self.engine_of(flags);
        // What may be given to others is one thing to them.
        let step = if flags.handle_types == 0 { CHUNK } else { len };
        let chunks = (0..len.div_ceil(step))
            .map(|i| Chunk { offset: i * step, len: step.min(len - i * step), flags, residency: Residency::Unbacked })
            .collect();
        let (pinned, exported, aliases) = (false, None, Aliases::default());
        let mut range = Range { len, kind, chunks, dead: false, gone: false, pinned, exported, aliases };
        self.account.demand += len;
        // Only while nothing else is lacking: what is restored first must not find its place taken.
        let lacking = self.account.demand - len > self.account.mapped;
        let may_map = !lacking && len <= self.account.room();
        let mut backing = if may_map { Backing::There } else { Backing::Later };
        if may_map {
            for chunk in &mut range.chunks {
                match engine.map(self.gpu, base + chunk.offset, chunk.len, flags) {
                    Ok(handle) => {
                        chunk.residency = Residency::Gpu { handle, copy: None };
                        self.account.mapped += chunk.len;
                    }
                    // Others have not let go yet; the mover tries again. Without a scheduler nobody will.
                    Err(ERROR_OUT_OF_MEMORY) if self.account.room_comes() => {
                        backing = Backing::Refused;
                        break;
                    }
                    Err(error) => {
                        self.account.refused |= error == ERROR_OUT_OF_MEMORY;
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

    /// Takes a range apart. Nothing may be using it.
    fn dismantle(&mut self, base: u64, mut range: Range) {
        let engine = range.chunks.first().map_or(self.engine, |chunk| self.engine_of(chunk.flags));
        if range.pinned {
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
                    self.account.mapped -= chunk.len;
                    self.account.host_cache -= copy.as_ref().map_or(0, |c| c.buffer.len());
                    self.keep_buffers(copy.map(|c| c.buffer));
                }
                Residency::Host(copy) => {
                    self.account.swapped -= chunk.len;
                    self.keep_buffers(copy.map(|c| c.buffer));
                }
                Residency::Unbacked | Residency::Constant(_) | Residency::Moving => {}
            }
            self.account.demand -= chunk.len;
        }
        if !range.gone {
            engine.unreserve(base, range.len);
        }
        // What is allocated from here on is new.
        self.account.peak = self.account.peak.min(self.account.demand);
        self.update_peak();
        if let Some(Exported { range, .. }) = range.exported {
            // The scheduler learns of it before it learns of fewer bytes.
            outbox::push([ClientMessage::Withdrawn { range }]);
        }
        self.settle();
    }

    /// Frees the allocation that begins there; `false` if there is none. `idle`: this client has nothing submitted.
    pub fn free(&mut self, address: u64, idle: bool, work: &Work) -> bool {
        let Some(allocation) = self.allocations.remove(&address) else { return false };
        if idle {
            self.release(allocation);
        } else {
            self.account.freeing += self.room_of(&allocation);
            self.freed.push_back(Freed { allocation, fence: work.fence() });
        }
        self.reclaim(work);
        true
    }

    /// Takes back what was freed and is no longer used by any work.
    pub fn reclaim(&mut self, work: &Work) {
        while let Some(freed) = self.freed.front_mut() {
            let fence = match &mut freed.fence {
                Some(fence) => fence,
                None => match work.fence() {
                    Some(fence) => freed.fence.insert(fence),
                    None => break,
                },
            };
            if !work.is_done(fence) {
                break;
            }
            if let Some(freed) = self.freed.pop_front() {
                self.account.freeing -= self.room_of(&freed.allocation);
                self.release(freed.allocation);
            }
        }
    }

    /// What goes with an allocation: its range, unless that is a slab, which others share.
    fn room_of(&self, allocation: &Allocation) -> u64 {
        let range = self.ranges.get(&allocation.range);
        range.filter(|r| matches!(r.kind, RangeKind::Single)).map_or(0, |r| r.len)
    }

    pub fn has_freed(&self) -> bool {
        !self.freed.is_empty()
    }

    fn release(&mut self, allocation: Allocation) {
        let Some(range) = self.ranges.get_mut(&allocation.range) else { return };
        let empty = match &mut range.kind {
            RangeKind::Single | RangeKind::Created => true,
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
        if range.chunks.iter().any(|c| matches!(c.residency, Residency::Moving)) {
            if !core::mem::replace(&mut range.dead, true) {
                self.account.freeing += range.len; // its place may be taken: it goes in a moment
            }
        } else if let Some(range) = self.ranges.remove(&base) {
            self.dismantle(base, range);
        }
    }

    /// Everything that belongs to a context which is being destroyed (or to any, where none is left).
    pub fn drop_context(&mut self, context: usize, last: bool) {
        let gone: Vec<_> = self.allocations.values().filter(|a| last || a.context == context).copied().collect();
        for allocation in gone {
            self.allocations.remove(&allocation.base);
            self.release_gone(allocation);
        }
        self.buffers().for_each(|buffer| buffer.forget_context(context));
        if last {
            for freed in core::mem::take(&mut self.freed) {
                self.account.freeing -= self.room_of(&freed.allocation);
                self.release_gone(freed.allocation);
            }
        }
    }

    /// The same for one of a context that is gone: the driver has freed what was managed memory.
    fn release_gone(&mut self, allocation: Allocation) {
        if let Some(range) = self.ranges.get_mut(&allocation.range) {
            range.gone = allocation.managed;
        }
        self.release(allocation);
    }
}
