//! The program's allocations on one GPU: their addresses, their chunks and where each chunk is, and the account of bytes.
//!
//! A *range* is reserved address space made of chunks: one large allocation, or a slab that small ones share. A range's
//! addresses never change, and what was freed is not reused before all work that was submitted earlier is done.

use super::{
    engine::{CHUNK, Engine, GRANULE, check},
    host::Buffer,
    slab::{self, Slab},
};
use crate::{
    cuda::*,
    work::{Fence, Work},
};
use alloc::{
    boxed::Box,
    collections::{BTreeMap, VecDeque},
    vec::Vec,
};

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
    /// Buffers not in use.
    pub(super) spare: Vec<Buffer>,
    pub account: Account,
}

/// The bytes of one GPU. Ranges count whole, so everything is a multiple of the granule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Account {
    /// Needed on the GPU in order to run.
    pub demand: u64,
    /// On the GPU now, or on the way there.
    pub mapped: u64,
    /// In host memory.
    pub swapped: u64,
    /// Outside the engines: the driver holds it and it cannot move.
    pub pinned: u64,
    /// May be mapped, as the scheduler says.
    pub allowance: u64,
    /// The newest allowance that was carried out.
    pub ack: u32,
    /// The most that demand may become.
    pub limit: u64,
    /// Bytes whose copy, in or out, is under way.
    pub flying: u64,
    /// Freed bytes that work submitted earlier may still use; part of demand until then.
    pub freeing: u64,
    /// What is not on the GPU comes when it is touched.
    pub faults: bool,
    /// It stays on the GPU, since nobody knows when the program's work is done.
    pub frozen: bool,
}

/// What a range is for.
#[derive(Debug)]
enum Use {
    Whole,
    Slab(Box<Slab>),
}

#[derive(Debug)]
struct Range {
    len: u64,
    purpose: Use,
    chunks: Vec<Chunk>,
    /// Freed while a chunk was on its way; the mover takes the range apart when it is done with it.
    dead: bool,
}

#[derive(Debug)]
pub(super) struct Chunk {
    pub offset: u64,
    pub len: u64,
    pub place: Place,
}

/// Where a chunk's bytes are.
#[derive(Debug)]
pub(super) enum Place {
    /// Nowhere: it never had contents.
    Nowhere,
    Gpu(Handle),
    Host(Option<Buffer>),
    /// The mover has it.
    Moving,
}

#[derive(Debug, Clone, Copy)]
pub struct Allocation {
    pub base: u64,
    /// As the program asked.
    pub size: u64,
    pub id: u64,
    pub context: usize,
    range: u64,
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
    /// Its memory is on the GPU. If not, it comes with credit from the scheduler, and the gate must be closed until then.
    pub backed: bool,
}

impl Account {
    pub fn is_complete(&self) -> bool {
        self.mapped >= self.demand
    }
    /// Whether the program may run as far as memory goes. Where pages come when they are touched, it always may.
    pub fn can_run(&self) -> bool {
        self.faults || (self.is_complete() && self.flying == 0)
    }
    /// What the program may still allocate.
    pub fn free(&self) -> u64 {
        self.limit.saturating_sub(self.demand + self.pinned - self.freeing)
    }
    /// Whether so many more bytes would fit if nobody but clients had anything on the GPU, which has `total`: of that, the
    /// scheduler puts up to an eighth aside.
    pub fn fits_without_others(&self, bytes: u64, total: u64) -> bool {
        let most = total - total / 8;
        self.limit < most && self.demand.saturating_add(self.pinned).saturating_add(bytes) <= most
    }
    fn room(&self) -> u64 {
        self.allowance.saturating_sub(self.mapped + self.pinned)
    }
}

impl Space {
    pub fn new(gpu: CUdevice, engine: &'static dyn Engine, limit: u64) -> Self {
        let faults = !engine.copies();
        let account = Account {
            demand: 0,
            mapped: 0,
            swapped: 0,
            pinned: 0,
            allowance: u64::MAX,
            ack: 0,
            limit,
            flying: 0,
            freeing: 0,
            faults,
            frozen: false,
        };
        Self {
            gpu,
            engine,
            ranges: BTreeMap::new(),
            allocations: BTreeMap::new(),
            freed: VecDeque::new(),
            next_id: 1,
            pending: VecDeque::new(),
            spare: Vec::new(),
            account,
        }
    }

    pub fn engine(&self) -> &'static dyn Engine {
        self.engine
    }

    /// The allocation that holds this address.
    pub fn find(&self, address: u64) -> Option<Allocation> {
        let (_, a) = self.allocations.range(..=address).next_back()?;
        (address - a.base < a.size).then_some(*a)
    }

    /// Makes an allocation; `beyond` lets it exceed the limit.
    pub fn allocate(&mut self, size: u64, context: usize, beyond: bool, work: &Work) -> Result<Allocated, CUresult> {
        self.reclaim(work);
        let (range, address, backed) = if size <= slab::LARGEST {
            self.allocate_in_slab(size, beyond)?
        } else {
            let len = size.checked_next_multiple_of(GRANULE).ok_or(ERROR_OUT_OF_MEMORY)?;
            let (base, backed) = self.make_range(len, Use::Whole, beyond)?;
            (base, base, backed)
        };
        let id = self.next_id;
        self.next_id += 1;
        self.allocations.insert(address, Allocation { base: address, size, id, context, range });
        Ok(Allocated { address, backed })
    }

    fn allocate_in_slab(&mut self, size: u64, beyond: bool) -> Result<(u64, u64, bool), CUresult> {
        for (base, range) in &mut self.ranges {
            if let (Use::Slab(slab), false) = (&mut range.purpose, range.dead)
                && let Some(offset) = slab.take(size)
            {
                return Ok((*base, base + offset, true));
            }
        }
        let (base, backed) = self.make_range(GRANULE, Use::Slab(Box::new(Slab::new())), beyond)?;
        match self.ranges.get_mut(&base).map(|r| &mut r.purpose) {
            Some(Use::Slab(slab)) => {
                slab.take(size).map(|offset| (base, base + offset, backed)).ok_or(ERROR_OUT_OF_MEMORY)
            }
            _ => Err(ERROR_OUT_OF_MEMORY),
        }
    }

    fn make_range(&mut self, len: u64, purpose: Use, beyond: bool) -> Result<(u64, bool), CUresult> {
        if len > self.account.free() && !beyond {
            return Err(ERROR_OUT_OF_MEMORY);
        }
        let base = self.engine.reserve(len)?;
        let chunks = (0..len.div_ceil(CHUNK))
            .map(|i| Chunk { offset: i * CHUNK, len: CHUNK.min(len - i * CHUNK), place: Place::Nowhere })
            .collect();
        let mut range = Range { len, purpose, chunks, dead: false };
        self.account.demand += len;
        // Only while nothing else is lacking: what is restored first must not find its place taken.
        let lacking = self.account.demand - len > self.account.mapped;
        let mut backed = !lacking && len <= self.account.room();
        if backed {
            for chunk in &mut range.chunks {
                match self.engine.map(self.gpu, base + chunk.offset, chunk.len) {
                    Ok(handle) => {
                        chunk.place = Place::Gpu(handle);
                        self.account.mapped += chunk.len;
                    }
                    // Others have not let go yet; the mover tries again. Without a scheduler nobody will.
                    Err(ERROR_OUT_OF_MEMORY) if self.account.allowance != u64::MAX => {
                        backed = false;
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
        Ok((base, backed))
    }

    /// Takes a range apart. Nothing may be using it.
    fn dismantle(&mut self, base: u64, range: Range) {
        for chunk in range.chunks {
            match chunk.place {
                Place::Gpu(handle) => {
                    self.engine.unmap(base + chunk.offset, chunk.len, handle);
                    self.account.mapped -= chunk.len;
                }
                Place::Host(buffer) => {
                    self.account.swapped -= chunk.len;
                    self.spare.extend(buffer);
                }
                Place::Nowhere | Place::Moving => {}
            }
            self.account.demand -= chunk.len;
        }
        self.engine.unreserve(base, range.len);
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
        range.filter(|r| matches!(r.purpose, Use::Whole)).map_or(0, |r| r.len)
    }

    pub fn has_freed(&self) -> bool {
        !self.freed.is_empty()
    }

    fn release(&mut self, allocation: Allocation) {
        let Some(range) = self.ranges.get_mut(&allocation.range) else { return };
        let empty = match &mut range.purpose {
            Use::Whole => true,
            Use::Slab(slab) => {
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
        if range.chunks.iter().any(|c| matches!(c.place, Place::Moving)) {
            range.dead = true;
        } else if let Some(range) = self.ranges.remove(&base) {
            self.dismantle(base, range);
        }
    }

    /// Everything that belongs to a context which is being destroyed (or to any, where none is left).
    pub fn drop_context(&mut self, context: usize, last: bool) {
        let gone: Vec<_> = self.allocations.values().filter(|a| last || a.context == context).copied().collect();
        for allocation in gone {
            self.allocations.remove(&allocation.base);
            self.release(allocation);
        }
        if last {
            self.account.freeing = 0;
            for freed in core::mem::take(&mut self.freed) {
                self.release(freed.allocation);
            }
        }
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
    pub fn meet_scheduler(&mut self) {
        self.pending.clear();
        (self.account.allowance, self.account.ack) = (self.account.mapped + self.account.pinned, 0);
    }

    /// There is no scheduler.
    pub fn run_free(&mut self, limit: u64) {
        self.pending.clear();
        (self.account.allowance, self.account.limit) = (u64::MAX, limit);
    }

    /// An eviction got as far as it can: what is left stays.
    pub fn give_up_eviction(&mut self) {
        self.account.allowance = self.account.mapped + self.account.pinned;
        if let Some((seq, _)) = self.pending.drain(..).next_back() {
            self.account.ack = seq;
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

    /// The next chunk that can leave: it is the mover's until [`put`](Self::put).
    pub(super) fn take_mapped(&mut self) -> Option<(u64, Chunk)> {
        self.take_chunk(|place| matches!(place, Place::Gpu(_)))
    }

    /// The next chunk that is not on the GPU, if the allowance has room for it. It counts as mapped from here on.
    pub(super) fn take_lacking(&mut self) -> Option<(u64, Chunk)> {
        let room = self.account.room();
        let found = self.take_chunk_if(|c| matches!(c.place, Place::Nowhere | Place::Host(_)) && c.len <= room)?;
        self.account.mapped += found.1.len;
        if matches!(found.1.place, Place::Host(_)) {
            self.account.swapped -= found.1.len;
        }
        Some(found)
    }

    /// Whether [`take_lacking`](Self::take_lacking) would find one.
    pub fn can_restore(&self) -> bool {
        let room = self.account.room();
        let lacking = |c: &Chunk| matches!(c.place, Place::Nowhere | Place::Host(_)) && c.len <= room;
        !self.account.is_complete() && self.ranges.values().any(|r| !r.dead && r.chunks.iter().any(lacking))
    }

    fn take_chunk(&mut self, wanted: impl Fn(&Place) -> bool) -> Option<(u64, Chunk)> {
        self.take_chunk_if(|c| wanted(&c.place))
    }

    fn take_chunk_if(&mut self, wanted: impl Fn(&Chunk) -> bool) -> Option<(u64, Chunk)> {
        let live = self.ranges.iter_mut().filter(|(_, range)| !range.dead);
        let taken = live
            .flat_map(|(base, range)| range.chunks.iter_mut().map(move |c| (*base, c)))
            .find(|(_, c)| wanted(c))
            .map(|(base, c)| {
                let place = core::mem::replace(&mut c.place, Place::Moving);
                (base, Chunk { offset: c.offset, len: c.len, place })
            });
        self.account.flying += taken.as_ref().map_or(0, |(_, c)| c.len);
        taken
    }

    /// Lengths of the chunks that would leave next, for up to so many bytes.
    pub(super) fn mapped_lengths(&self, bytes: u64) -> Vec<u64> {
        let mapped = self.ranges.values().filter(|r| !r.dead).flat_map(|r| &r.chunks);
        let mapped = mapped.filter(|c| matches!(c.place, Place::Gpu(_)));
        let mut sum = 0u64;
        let enough = |len: &u64| {
            let more = sum < bytes;
            sum += len;
            more
        };
        mapped.map(|c| c.len).take_while(enough).collect()
    }

    /// The mover is done with a chunk: `place` is where it is now.
    pub(super) fn put(&mut self, base: u64, offset: u64, place: Place) {
        let Some(range) = self.ranges.get_mut(&base) else { return };
        let dead = range.dead;
        if let Some(chunk) = range.chunks.iter_mut().find(|c| c.offset == offset) {
            chunk.place = place;
            self.account.flying -= chunk.len;
        }
        if dead {
            self.drop_range(base);
        }
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

/// `cuCtxGetCurrent`, as an error where there is none.
pub fn current_context() -> Result<CUcontext, CUresult> {
    let mut context = core::ptr::null_mut();
    // SAFETY: a valid place.
    check(unsafe { crate::driver::cuCtxGetCurrent(&mut context) })?;
    Ok(context)
}
