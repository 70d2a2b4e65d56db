//! The program's allocations on one GPU: their addresses, their chunks and where each chunk is, and the account of bytes.
//!
//! A *range* is reserved address space made of chunks: one large allocation, or a slab that small ones share. A range's
//! addresses never change, and what was freed is not reused before all work that was submitted earlier is done.

use super::{
    account::Account,
    alias::Aliases,
    chunk::{Chunk, Leaving, Residency},
    engine::{self, CHUNK, Engine, Flags, GRANULE},
    slab::{self, Slab},
    staging::Buffer,
};
use crate::{
    connection::outbox,
    driver::types::*,
    work::{Fence, Work},
};
use alloc::{
    boxed::Box,
    collections::{BTreeMap, VecDeque},
    vec::Vec,
};
use nvshare_wire::{ClientMessage, Counts, Secret};

/// More allowances than an eviction of any GPU has steps.
const MANY_PENDING: usize = 4096;

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

/// The name of a range that other processes may open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exported {
    pub range: u32,
    pub secret: Secret,
}

/// How exporting a range went.
#[derive(Debug)]
pub enum Export {
    /// The allocation in it, and where in it.
    Done(Exported, Allocation, u32),
    /// Not all of it is on the GPU.
    Away,
    Impossible,
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

    /// How a certain chunk moves.
    pub(super) fn engine_of(&self, flags: Flags) -> &'static dyn Engine {
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

    // ---- memory that others reach ----

    /// Whether allocations can be given to other devices, as those of `cuMemAlloc` can on such a GPU.
    pub fn is_rdma_capable(&self) -> bool {
        self.flags.rdma != 0 && engine::has(self.gpu, DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)
    }

    /// From now on another GPU may touch all allocations here. Nothing is on the move.
    pub fn let_in(&mut self, gpu: u32) {
        if !self.engine.copies() {
            return; // managed memory is within everybody's reach
        }
        self.flags.peers |= 1 << gpu;
        let allocations = self.ranges.iter_mut().filter(|(_, range)| !matches!(range.kind, RangeKind::Created));
        let chunks = allocations.flat_map(|(base, range)| range.chunks.iter_mut().map(move |chunk| (base, chunk)));
        for (base, chunk) in chunks.filter(|(_, chunk)| chunk.flags.managed == 0) {
            chunk.flags.peers = self.flags.peers;
            if let Residency::Gpu { .. } = chunk.residency {
                let _ = engine::let_in(gpu as CUdevice, base + chunk.offset, chunk.len);
            }
        }
    }

    // ---- memory that the program maps itself ----

    /// The program maps a range at an address of its own. What is on its way is mapped there when it arrives.
    pub fn add_alias(&mut self, base: u64, at: u64) -> Result<(), CUresult> {
        let Some(range) = self.ranges.get_mut(&base) else { return Err(ERROR_INVALID_VALUE) };
        range.aliases.add(at);
        for chunk in &range.chunks {
            if let Residency::Gpu { handle, .. } = chunk.residency {
                range.aliases.show(chunk.offset, chunk.len, handle).inspect_err(|_| range.aliases.remove(at))?;
            }
        }
        Ok(())
    }

    /// The program has unmapped it there.
    pub fn remove_alias(&mut self, base: u64, at: u64) {
        if let Some(range) = self.ranges.get_mut(&base) {
            range.aliases.remove(at);
        }
    }

    /// The aliases of a range, to ask and to give rights.
    pub fn aliases(&mut self, base: u64) -> Option<&mut Aliases> {
        self.ranges.get_mut(&base).map(|range| &mut range.aliases)
    }

    /// The driver's handle of a range that is all on the GPU: of its first chunk.
    pub fn on_gpu(&self, base: u64) -> Option<Handle> {
        let chunks = &self.ranges.get(&base)?.chunks;
        let handles = chunks
            .iter()
            .map(|chunk| if let Residency::Gpu { handle, .. } = chunk.residency { Some(handle) } else { None });
        handles.reduce(|first, next| first.filter(|_| next.is_some()))?
    }

    /// Keeps a range on the GPU for good; `false` if it is not there. It no longer counts as demand, but as pinned.
    pub fn pin(&mut self, base: u64) -> bool {
        let is_there = self.on_gpu(base).is_some();
        let Some(range) = self.ranges.get_mut(&base).filter(|_| is_there) else { return false };
        if !core::mem::replace(&mut range.pinned, true) {
            self.account.pin(range.len);
        }
        true
    }

    /// Whether addresses of a range are among these.
    pub fn overlaps(&self, at: u64, len: u64) -> bool {
        let before = self.ranges.range(..at.saturating_add(len.max(1))).next_back();
        before.is_some_and(|(base, range)| base + range.len > at)
    }

    /// The base of the range that an allocation is in, for [`pin`](Self::pin).
    pub fn range_of(&self, address: u64) -> Option<u64> {
        self.find(address).map(|allocation| allocation.range)
    }

    /// Where the chunks of a range are.
    pub fn chunk_addresses(&self, base: u64) -> Vec<u64> {
        let range = self.ranges.get(&base);
        range.map_or_else(Vec::new, |range| range.chunks.iter().map(|chunk| base + chunk.offset).collect())
    }

    // ---- what other processes may open ----

    /// Exports the range of the allocation that has this address: pins it, if all of it is on the GPU and `can_share` its
    /// chunks. `new` makes its name, the first time.
    pub fn export(
        &mut self,
        address: u64,
        can_share: impl Fn(Handle) -> bool,
        new: impl FnOnce() -> Option<Exported>,
    ) -> Export {
        let allocation = self.find(address).filter(|allocation| !allocation.managed && self.engine.copies());
        let Some(allocation) = allocation else { return Export::Impossible };
        let base = allocation.range;
        let Ok(offset) = u32::try_from(allocation.base - base) else { return Export::Impossible };
        if let Some(exported) = self.ranges.get(&base).and_then(|range| range.exported) {
            return Export::Done(exported, allocation, offset);
        }
        match self.on_gpu(base) {
            Some(first) if can_share(first) => {}
            Some(_) => return Export::Impossible,
            None => return Export::Away,
        }
        let Some(exported) = new().filter(|_| self.pin(base)) else { return Export::Impossible };
        if let Some(range) = self.ranges.get_mut(&base) {
            range.exported = Some(exported);
        }
        Export::Done(exported, allocation, offset)
    }

    /// An exported range that still has that allocation: its bytes, those of each chunk but the last, and its chunks from
    /// that one on.
    pub fn exported(
        &self,
        exported: Exported,
        allocation: u64,
        first: usize,
    ) -> Option<(u64, u64, impl Iterator<Item = Handle>)> {
        let (base, range) = self.ranges.iter().find(|(_, range)| range.exported == Some(exported))?;
        let mut inside = self.allocations.range(*base..base + range.len);
        inside.find(|(_, a)| a.id == allocation)?;
        let handles = range.chunks.iter().skip(first).map_while(|chunk| match chunk.residency {
            Residency::Gpu { handle, .. } => Some(handle),
            _ => None,
        });
        Some((range.len, CHUNK, handles))
    }

    // ---- what the scheduler allows ----

    /// A new allowance arrived.
    pub fn allow(&mut self, seq: u32, bytes: u64) {
        self.account.allowance = bytes;
        self.pending.push_back((seq, bytes));
        if self.pending.len() > MANY_PENDING {
            self.pending.pop_front(); // a later one stands for it
        }
        self.settle();
    }

    /// A new scheduler, whose allowances are yet to come: what is mapped stays until it says otherwise.
    pub fn reset_for_scheduler(&mut self) {
        self.reset_for_successor();
        (self.account.limit_max, self.account.host_cache_max) = (0, u64::MAX);
    }

    /// A scheduler in the place of the one before, on its connection: what may be wished for is as it was.
    pub fn reset_for_successor(&mut self) {
        self.pending.clear();
        (self.account.allowance, self.account.ack) = (self.account.mapped + self.account.pinned, 0);
        self.account.limit_seq = 0;
    }

    /// There is no scheduler.
    pub fn run_ungated(&mut self, limit: u64) {
        self.pending.clear();
        (self.account.allowance, self.account.limit) = (u64::MAX, self.account.at_most(limit));
        (self.account.limit_max, self.account.host_cache_max) = (0, u64::MAX);
    }

    /// A new limit arrived; from an older scheduler without a number, and then it is all there is to know.
    pub fn limit(&mut self, seq: u32, bytes: u64, most: u64, keep: u64) {
        self.account.limit = bytes.min(self.account.env_max);
        let most = most.min(self.account.env_max);
        let keep = if seq == 0 { u64::MAX } else { keep };
        (self.account.limit_seq, self.account.limit_max, self.account.host_cache_max) = (seq, most, keep);
    }

    /// Keeps buffers for the next eviction. Those that are too much are taken away [later](Self::take_surplus).
    pub(super) fn keep_buffers(&mut self, buffers: impl IntoIterator<Item = Buffer>) {
        for buffer in buffers {
            self.account.host_cache += buffer.len();
            self.free_buffers.push(buffer);
        }
    }

    /// A kept buffer of that length.
    pub(super) fn take_free_buffer(&mut self, len: u64) -> Option<Buffer> {
        let at = self.free_buffers.iter().position(|buffer| buffer.len() == len)?;
        self.account.host_cache -= len;
        Some(self.free_buffers.swap_remove(at))
    }

    /// The last ones of those that are kept.
    pub(super) fn take_free_buffers(&mut self, count: usize) -> Vec<Buffer> {
        let taken = self.free_buffers.split_off(self.free_buffers.len().saturating_sub(count));
        self.account.host_cache -= taken.iter().map(Buffer::len).sum::<u64>();
        taken
    }

    /// Buffers beyond what may be kept: first those that hold nothing, then copies of what is on the GPU.
    pub fn take_surplus(&mut self) -> Vec<Buffer> {
        let mut surplus = Vec::new();
        while self.account.host_cache > self.account.host_cache_max {
            let Some(buffer) = self.take_free_buffers(1).pop().or_else(|| self.take_copy_if(|_| true)) else { break };
            surplus.push(buffer);
        }
        surplus
    }

    /// There is no scheduler, and others lack memory: so many bytes are to leave, and none to come.
    pub fn make_room_for_others(&mut self, bytes: u64) {
        self.account.allowance = self.account.mapped.saturating_sub(bytes) + self.account.pinned;
    }

    /// An eviction got as far as it can: what is left stays.
    pub fn give_up_eviction(&mut self) {
        self.account.allowance = self.account.mapped + self.account.pinned;
        if let Some((seq, _)) = self.pending.drain(..).next_back() {
            self.account.ack = seq;
        }
    }

    fn update_peak(&mut self) {
        if self.account.can_run() && !self.account.demand_paged {
            self.account.peak = self.account.peak.max(self.account.demand);
        }
    }

    /// Acknowledges the allowances that are carried out by now. Where the newest is, the others no longer matter.
    fn settle(&mut self) {
        let there = self.account.mapped + self.account.pinned;
        if self.pending.back().is_some_and(|(_, bytes)| there <= *bytes) {
            self.pending.drain(..self.pending.len() - 1);
        }
        while let Some((seq, _)) = self.pending.front().copied().filter(|(_, bytes)| there <= *bytes) {
            self.account.ack = seq;
            self.pending.pop_front();
        }
    }

    // ---- for the mover ----

    /// Takes a chunk that is not on the GPU still, if the allowance has room for it. It counts as mapped from here on.
    pub(super) fn take_lacking(&mut self, base: u64, offset: u64) -> Option<Chunk> {
        let room = self.account.room();
        let range = self.ranges.get_mut(&base).filter(|range| range.moves())?;
        let chunk = range.chunks.iter_mut().find(|c| c.offset == offset && c.is_away() && c.len <= room)?;
        let taken = chunk.take();
        self.account.in_flight += taken.len;
        self.account.mapped += taken.len;
        if matches!(taken.residency, Residency::Host(_)) {
            self.account.swapped -= taken.len;
        }
        Some(taken)
    }

    /// All chunks that are not on the GPU: base, offset and length.
    pub(super) fn lacking(&self) -> Vec<(u64, u64, u64)> {
        let live = self.ranges.iter().filter(|(_, range)| range.moves());
        let chunks = live.flat_map(|(base, range)| range.chunks.iter().map(move |c| (*base, c)));
        chunks.filter(|(_, c)| c.is_away()).map(|(base, c)| (base, c.offset, c.len)).collect()
    }

    /// Whether the allowance has room for one of [those](Self::lacking).
    pub fn can_restore(&self) -> bool {
        let room = self.account.room();
        let lacking = |c: &Chunk| c.is_away() && c.len <= room;
        !self.account.is_complete() && self.ranges.values().any(|r| r.moves() && r.chunks.iter().any(lacking))
    }

    /// The chunks that would leave next, for that many bytes: first those of which a copy exists.
    fn leaving(&self, bytes: u64) -> Vec<(u64, &Chunk)> {
        let mut leaving = Vec::new();
        let mut sum = 0u64;
        for with_copy in [true, false] {
            let live = self.ranges.iter().filter(|(_, range)| range.moves());
            for (base, chunk) in live.flat_map(|(base, range)| range.chunks.iter().map(move |c| (*base, c))) {
                if sum >= bytes {
                    return leaving;
                }
                if matches!(&chunk.residency, Residency::Gpu { copy, .. } if copy.is_some() == with_copy) {
                    leaving.push((base, chunk));
                    sum += chunk.len;
                }
            }
        }
        leaving
    }

    /// Takes them: they are the mover's until [`put`](Self::put), and nobody takes them off the GPU meanwhile.
    pub(super) fn take_leaving(&mut self, bytes: u64) -> Vec<Leaving> {
        let names: Vec<_> = self.leaving(bytes).into_iter().map(|(base, chunk)| (base, chunk.offset)).collect();
        names.into_iter().filter_map(|(base, offset)| self.take_mapped(base, offset)).collect()
    }

    fn take_mapped(&mut self, base: u64, offset: u64) -> Option<Leaving> {
        let chunk = self.ranges.get_mut(&base)?.chunks.iter_mut().find(|c| c.offset == offset)?.take();
        self.account.in_flight += chunk.len;
        if let Residency::Gpu { copy: Some(copy), .. } = &chunk.residency {
            self.account.host_cache -= copy.buffer.len();
        }
        let is_copied = self.engine_of(chunk.flags).copies();
        Some(Leaving { base, chunk, is_copied, fingerprint: None })
    }

    /// Lengths of the buffers that would be needed if so many bytes left.
    pub(super) fn buffers_for(&self, bytes: u64) -> Vec<u64> {
        let needs = |chunk: &Chunk| {
            self.engine_of(chunk.flags).copies() && matches!(chunk.residency, Residency::Gpu { copy: None, .. })
        };
        self.leaving(bytes).into_iter().filter(|(_, chunk)| needs(chunk)).map(|(_, chunk)| chunk.len).collect()
    }

    /// Lengths of the buffers that are kept.
    pub(super) fn free_buffer_lengths(&self) -> Vec<u64> {
        self.free_buffers.iter().map(Buffer::len).collect()
    }

    /// The buffer of a copy that is not needed, as its chunk is on the GPU.
    pub(super) fn take_copy(&mut self, len: u64) -> Option<Buffer> {
        self.take_copy_if(|chunk| chunk.len == len)
    }

    fn take_copy_if(&mut self, wanted: impl Fn(&Chunk) -> bool) -> Option<Buffer> {
        let mut chunks = self.ranges.values_mut().flat_map(|range| &mut range.chunks).filter(|c| wanted(c));
        let buffer = chunks.find_map(|chunk| match &mut chunk.residency {
            Residency::Gpu { copy, .. } => copy.take().map(|copy| copy.buffer),
            _ => None,
        })?;
        self.account.host_cache -= buffer.len();
        Some(buffer)
    }

    /// A chunk that was to come back did not: it is where it was.
    pub(super) fn stays_away(&mut self, base: u64, offset: u64, len: u64, residency: Residency) {
        self.left(len, matches!(residency, Residency::Host(_)));
        self.put(base, offset, residency);
    }

    /// All buffers.
    pub(super) fn buffers(&mut self) -> impl Iterator<Item = &mut Buffer> {
        let chunks = self.ranges.values_mut().flat_map(|range| &mut range.chunks);
        let copies = chunks.filter_map(|chunk| match &mut chunk.residency {
            Residency::Gpu { copy, .. } | Residency::Host(copy) => copy.as_mut().map(|copy| &mut copy.buffer),
            _ => None,
        });
        copies.chain(&mut self.free_buffers)
    }

    /// The mover is done with a chunk: `place` is where it is now.
    pub(super) fn put(&mut self, base: u64, offset: u64, residency: Residency) {
        let Some(range) = self.ranges.get_mut(&base) else { return };
        let dead = range.dead;
        if let Some(chunk) = range.chunks.iter_mut().find(|c| c.offset == offset) {
            if let Residency::Gpu { handle, .. } = residency {
                // For aliases that were added while it was on its way out, and then stayed.
                let _ = range.aliases.show(offset, chunk.len, handle);
            }
            // What comes back leaves a copy that is not needed.
            if let Residency::Gpu { copy: Some(copy), .. } = &residency {
                self.account.host_cache += copy.buffer.len();
            }
            chunk.residency = residency;
            self.account.in_flight -= chunk.len;
        }
        self.update_peak();
        if dead {
            self.drop_range(base);
        }
    }

    /// A chunk is about to leave: unmaps it from the range's aliases.
    pub(super) fn hide(&mut self, base: u64, offset: u64) {
        if let Some(range) = self.ranges.get_mut(&base) {
            range.aliases.hide(offset);
        }
    }

    /// A chunk is back: maps it at the range's aliases.
    pub(super) fn show(&mut self, base: u64, offset: u64, len: u64, handle: Handle) -> Result<(), CUresult> {
        self.ranges.get_mut(&base).map_or(Ok(()), |range| range.aliases.show(offset, len, handle))
    }

    /// A chunk that left the GPU (its memory is freed): accounts for it.
    pub(super) fn left(&mut self, len: u64, with_contents: bool) {
        self.account.mapped -= len;
        if with_contents {
            self.account.swapped += len;
        }
        self.settle();
    }

    pub fn gpu(&self) -> CUdevice {
        self.gpu
    }
}
