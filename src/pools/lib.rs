//! Memory pools of one GPU: stream-ordered allocators of address space. This crate is pure
//! bookkeeping. Its user provides segments of address space, and fences that show when work is done.
//!
//! [`pool`] divides the segments of one pool into blocks. [`Pools`] knows which frees are done, and
//! when pools release unused segments.
//!
//! Memory above a pool's threshold is released after the program has waited for its work.
//!
//! `libnvshare.so` uses this crate. The crate has no dependencies, because the library runs inside
//! unmodified programs.

#![cfg_attr(not(test), no_std)]

extern crate alloc;

mod pool;
#[cfg(test)]
mod tests;

pub use pool::{Order, SEGMENT, Statistics, StreamName, UNIT, block_len};

use alloc::vec::Vec;
use pool::Pool;

/// Records fences behind the work of a GPU.
pub trait Fences {
    type Fence;
    /// Records a fence behind all work that may use freed blocks. Returns `None` if that is impossible at
    /// the moment.
    fn record(&self) -> Option<Self::Fence>;
    /// Whether the work before the fence is done.
    fn is_done(&self, fence: &mut Self::Fence) -> bool;
}

/// The work that the program has waited for.
#[derive(Debug, Clone, Copy)]
pub enum Awaited {
    /// All work that was submitted to this stream.
    Stream(StreamName),
    /// All submitted work.
    All,
    /// Unknown work.
    Some,
}

/// The properties of a pool that the program can set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Policy {
    /// Bytes that the pool keeps when the program waits for its work. Memory above this size is released.
    pub threshold: u64,
    /// Whether a block may be reused in another stream when its free is found done, even if the program has
    /// not waited for it.
    pub opportunistic: bool,
}

#[derive(Debug)]
struct Member {
    /// The program's handle; 0 once the program has destroyed the pool.
    handle: u64,
    /// Identifies the pool even after its destruction.
    id: u32,
    policy: Policy,
    pool: Pool,
}

impl Member {
    /// Whether the pool releases memory, or reuses it in other streams, only when the program waits for
    /// work.
    fn needs_waits(&self) -> bool {
        self.pool.statistics().reserved > self.threshold() || !self.policy.opportunistic
    }

    /// Bytes that the pool keeps when the program waits for its work.
    fn threshold(&self) -> u64 {
        if self.handle == 0 { 0 } else { self.policy.threshold }
    }
}

/// The pools of one GPU. The methods that remove segments return their addresses.
#[derive(Debug)]
pub struct Pools<F> {
    members: Vec<Member>,
    next_id: u32,
    /// The number of frees so far.
    frees: u64,
    /// A fence behind all work that may use freed blocks, and the number of the last free that it covers.
    fence: Option<(u64, F)>,
    /// All frees up to this number are known to be done, in all streams.
    done: u64,
}

impl<F> Default for Pools<F> {
    fn default() -> Self {
        Self { members: Vec::new(), next_id: 0, frees: 0, fence: None, done: 0 }
    }
}

impl<F> Pools<F> {
    fn member(&mut self, handle: u64) -> Option<&mut Member> {
        self.members.iter_mut().find(|member| member.handle == handle && handle != 0)
    }

    fn by_id(&mut self, id: u32) -> Option<&mut Member> {
        self.members.iter_mut().find(|member| member.id == id)
    }

    /// Whether the pool with this handle is known.
    pub fn has(&self, handle: u64) -> bool {
        self.handles().any(|known| known == handle)
    }

    /// The handles of all known pools.
    pub fn handles(&self) -> impl Iterator<Item = u64> {
        self.members.iter().map(|member| member.handle).filter(|handle| *handle != 0)
    }

    /// Returns the number of a pool.
    pub fn id(&mut self, handle: u64) -> Option<u32> {
        self.member(handle).map(|member| member.id)
    }

    pub fn add(&mut self, handle: u64, policy: Policy) {
        if !self.has(handle) {
            self.members.push(Member { handle, id: self.next_id, policy, pool: Pool::new() });
            self.next_id += 1;
        }
    }

    /// Called before the program destroys a pool. The pool's memory is released as its blocks are freed.
    pub fn destroy(&mut self, handle: u64) {
        if let Some(member) = self.member(handle) {
            member.handle = 0;
        }
    }

    pub fn set_policy(&mut self, handle: u64, policy: Policy) {
        if let Some(member) = self.member(handle) {
            member.policy = policy;
        }
    }

    pub fn statistics(&mut self, handle: u64) -> Option<Statistics> {
        self.member(handle).map(|member| member.pool.statistics())
    }

    /// Resets the high-water mark of used memory (`of_used`) or of reserved memory.
    pub fn reset_high(&mut self, handle: u64, of_used: bool) {
        if let Some(member) = self.member(handle) {
            member.pool.reset_high(of_used);
        }
    }

    /// Allocates a free block of `len` bytes, for work submitted to `stream` from now on. Returns `None` if
    /// no block fits or the pool is not known.
    ///
    /// If the block's reuse relies on the order of the stream, `order` is called, and returns whether it
    /// has established that order.
    pub fn allocate(
        &mut self,
        handle: u64,
        len: u64,
        stream: StreamName,
        order: Option<&dyn Fn() -> bool>,
        fences: &impl Fences<Fence = F>,
    ) -> Option<u64> {
        let member = self.member(handle)?;
        let is_ordered = order.is_none_or(|order| !member.pool.relies_on_order(len, stream) || order());
        let stream = if is_ordered { stream } else { StreamName::NONE };
        let found = member.pool.allocate(len, stream);
        if found.is_none() && member.policy.opportunistic && member.pool.has_pending() {
            self.look(fences);
            return self.member(handle)?.pool.allocate(len, stream);
        }
        found
    }

    /// Adds a segment of `segment` bytes to a pool, and allocates a block of `len` bytes. Any stream may use
    /// the block, because the segment's free counts as done.
    pub fn grow(&mut self, id: u32, base: u64, segment: u64, len: u64) -> Option<u64> {
        let pool = &mut self.by_id(id)?.pool;
        pool.grow(base, segment, len);
        pool.allocate(len, StreamName::NONE)
    }

    /// Frees the block at this address.
    pub fn free(&mut self, id: u32, at: u64, order: Order) {
        self.frees += 1;
        let number = self.frees;
        if let Some(member) = self.by_id(id) {
            member.pool.free(at, order, number);
        }
    }

    /// The number of frees so far, for [`synchronize`](Self::synchronize).
    pub fn frees(&self) -> u64 {
        self.frees
    }

    /// Called when the program has waited for work. `number` is the number of frees before that wait.
    /// Removes segments above the thresholds.
    pub fn synchronize(&mut self, awaited: Awaited, number: u64, fences: &impl Fences<Fence = F>) -> Vec<u64> {
        match awaited {
            Awaited::Stream(stream) => self.members.iter_mut().for_each(|member| member.pool.done_in(stream, number)),
            Awaited::All => self.done(number),
            // Records a fence only if a pool needs it, because a fence costs more than synchronizing one stream.
            Awaited::Some if self.members.iter().any(Member::needs_waits) => self.look(fences),
            Awaited::Some => {}
        }
        self.trim(Member::threshold)
    }

    /// Removes idle segments of a pool until the pool has at most `keep` bytes.
    pub fn trim_to(&mut self, handle: u64, keep: u64) -> Vec<u64> {
        self.trim(|member| if member.handle == handle { keep } else { u64::MAX })
    }

    /// Removes idle segments of at least `bytes` bytes. Removes none if that is impossible.
    pub fn make_room(&mut self, bytes: u64, fences: &impl Fences<Fence = F>) -> Vec<u64> {
        if self.members.is_empty() {
            return Vec::new();
        }
        self.look_if_pending(fences);
        let mut lacking = bytes;
        if self.members.iter().map(|member| member.pool.idle()).sum::<u64>() < lacking {
            return Vec::new();
        }
        self.trim(|member| {
            let (idle, reserved) = (member.pool.idle(), member.pool.statistics().reserved);
            let part = idle.min(lacking);
            lacking -= part;
            if part > 0 { reserved - part } else { u64::MAX }
        })
    }

    /// Removes all idle segments.
    pub fn release(&mut self, fences: &impl Fences<Fence = F>) -> Vec<u64> {
        self.look_if_pending(fences);
        self.trim(|_| 0)
    }

    /// Removes all idle segments when no work is running and none can be submitted.
    pub fn release_at_rest(&mut self) -> Vec<u64> {
        self.fence = None;
        self.done(self.frees);
        self.trim(|_| 0)
    }

    /// Removes idle segments of destroyed pools.
    pub fn tend(&mut self, fences: &impl Fences<Fence = F>) -> Vec<u64> {
        if self.members.iter().all(|member| member.handle != 0) {
            return Vec::new();
        }
        self.look_if_pending(fences);
        self.trim(|member| if member.handle == 0 { 0 } else { u64::MAX })
    }

    fn trim(&mut self, mut keep: impl FnMut(&Member) -> u64) -> Vec<u64> {
        let mut idle = Vec::new();
        for member in &mut self.members {
            let keep = keep(member);
            idle.extend(member.pool.trim(keep));
        }
        self.members.retain(|member| member.handle != 0 || !member.pool.is_empty());
        idle
    }

    /// Whether some frees are not known to be done.
    pub fn has_pending(&self) -> bool {
        self.members.iter().any(|member| member.pool.has_pending())
    }

    /// Whether destroyed pools still wait for work to be done.
    pub fn has_dying(&self) -> bool {
        self.members.iter().any(|member| member.handle == 0 && member.pool.has_pending())
    }

    /// Checks whether frees are done. Returns whether some are still pending.
    pub fn look_if_pending(&mut self, fences: &impl Fences<Fence = F>) -> bool {
        if self.has_pending() {
            self.look(fences);
        }
        self.has_pending()
    }

    /// Checks whether frees are done. Uses one fence at a time: the next fence covers later frees.
    fn look(&mut self, fences: &impl Fences<Fence = F>) {
        if let Some((number, fence)) = &mut self.fence {
            if !fences.is_done(fence) {
                return;
            }
            let number = *number;
            self.fence = None;
            self.done(number);
        }
        if self.done < self.frees && self.has_pending() {
            self.fence = fences.record().map(|fence| (self.frees, fence));
        }
    }

    /// Marks frees up to this number as done.
    fn done(&mut self, number: u64) {
        self.members.iter_mut().for_each(|member| member.pool.done(number));
        self.done = self.done.max(number);
    }
}
