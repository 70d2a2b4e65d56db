//! A client's memory on one GPU: limit and demand, allowance and mapped bytes. Memory is allocated,
//! evicted and restored as in the library (`preload/src/memory/`).

use nvshare_sched::{MemoryReport, Time};
use std::collections::VecDeque;
use std::time::Duration;

/// How long mapping may fail before the client releases the lock
/// (`preload/src/memory/mover/restore.rs`).
const FULL_TIMEOUT: Duration = Duration::from_millis(300);

/// The direction of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// From the GPU to the host.
    Out,
    /// Back to the GPU, by mapping and copying.
    Back,
    /// Onto the GPU for the first time, by mapping without copying.
    Fresh,
}

/// All quantities are in bytes.
#[derive(Debug, Default)]
pub struct Memory {
    is_attached: bool,
    /// Bytes that the program allocates as soon as its limit allows them.
    wanted: u64,
    /// The part of `wanted` that the program can allocate separately.
    part: u64,
    demand: u64,
    /// The client has requested a higher limit and has no answer yet.
    is_limit_requested: bool,
    limit: u64,
    limit_seq: u32,
    allowance: u64,
    /// Sequence number of the newest allowance that the client has carried out.
    ack: u32,
    /// Allowances that the client has not carried out yet: sequence number and bytes.
    pending: VecDeque<(u32, u64)>,
    /// Bytes on the GPU, including bytes on their way there.
    mapped: u64,
    /// Bytes in host memory that were on the GPU before.
    swapped: u64,
    /// Bytes that cannot leave the GPU.
    pinned: u64,
    moving: Option<(Way, u64)>,
    /// Start of the current series of mapping failures.
    full_since: Option<Time>,
    /// A retry of a mapping is scheduled.
    pub(crate) retries: bool,
}

impl Memory {
    pub(crate) fn new(pinned: u64) -> Self {
        Self { pinned, ..Self::default() }
    }

    pub fn demand(&self) -> u64 {
        self.demand
    }

    /// Bytes on the GPU or on their way there.
    pub fn mapped(&self) -> u64 {
        self.mapped
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// The sequence number of the newest limit.
    pub fn limit_seq(&self) -> u32 {
        self.limit_seq
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.is_attached
    }

    pub(crate) fn is_allocated(&self) -> bool {
        self.demand == self.wanted
    }

    /// Whether the program can run: no limit request is pending, and all memory is on the GPU or
    /// the driver handles page faults.
    pub(crate) fn is_ready(&self, is_paged: bool) -> bool {
        !self.is_limit_requested && (is_paged || (self.mapped >= self.demand && self.moving.is_none()))
    }

    /// Whether the mapped bytes match the allowance.
    fn is_settled(&self) -> bool {
        self.moving.is_none() && self.mapped >= self.demand.min(self.allowance) && self.mapped <= self.allowance
    }

    pub(crate) fn report(&self) -> MemoryReport {
        MemoryReport {
            ack: self.ack,
            demand: self.demand,
            mapped: self.mapped,
            swapped: self.swapped,
            pinned: self.pinned.min(self.mapped),
            limit_ack: self.limit_seq,
        }
    }

    /// Marks the context as created. The scheduler then sends the limit.
    pub(crate) fn attach(&mut self) {
        self.is_attached = true;
    }

    pub(crate) fn want(&mut self, bytes: u64, part: u64) {
        (self.wanted, self.part) = (bytes, part);
    }

    pub(crate) fn set_limit(&mut self, bytes: u64, seq: u32) {
        (self.limit, self.limit_seq) = (bytes, seq);
    }

    /// Allocates the wanted bytes up to the limit. Returns the limit to request.
    pub(crate) fn allocate(&mut self) -> Option<u64> {
        if !self.is_attached {
            return None;
        }
        if self.wanted <= self.limit.max(self.demand) {
            (self.demand, self.is_limit_requested) = (self.demand.max(self.wanted), false);
            return None;
        }
        self.demand = self.demand.max(self.part.min(self.limit));
        let is_new = !std::mem::replace(&mut self.is_limit_requested, true);
        is_new.then_some(self.wanted)
    }

    /// Handles the refusal of a higher limit.
    pub(crate) fn refuse(&mut self) {
        self.is_limit_requested = false;
    }

    /// Reduces the wanted bytes to the limit.
    pub(crate) fn make_do(&mut self) {
        self.wanted = self.wanted.min(self.limit).max(self.demand);
    }

    /// Sets a new allowance. Returns true if no memory must be evicted first, so that the client
    /// acknowledges the allowance immediately.
    pub(crate) fn allow(&mut self, seq: u32, bytes: u64) -> bool {
        self.allowance = bytes;
        self.pending.push_back((seq, bytes));
        self.settle();
        self.ack == seq
    }

    /// Acknowledges the allowances that have been carried out. If the newest has been carried out,
    /// all earlier ones are dropped.
    fn settle(&mut self) {
        let mapped = self.mapped;
        if self.pending.back().is_some_and(|(_, bytes)| mapped <= *bytes) {
            self.pending.drain(..self.pending.len() - 1);
        }
        while let Some((seq, _)) = self.pending.front().copied().filter(|(_, bytes)| mapped <= *bytes) {
            self.ack = seq;
            self.pending.pop_front();
        }
    }

    /// Starts the next move towards the allowance, unless a move is in progress. `stays`: the
    /// client holds the lock, so no memory leaves the GPU.
    pub(crate) fn step(&mut self, stays: bool, chunk: u64) -> Option<(Way, u64)> {
        if self.moving.is_some() {
            return None;
        }
        let leaving = self.mapped.saturating_sub(self.allowance.max(self.pinned));
        let lacking = self.demand.min(self.allowance).saturating_sub(self.mapped);
        let fresh = self.demand.saturating_sub(self.mapped).saturating_sub(self.swapped);
        self.moving = if leaving > 0 {
            (!stays).then_some((Way::Out, leaving.min(chunk)))
        } else if lacking > fresh {
            Some((Way::Back, (lacking - fresh).min(chunk)))
        } else {
            (lacking > 0).then_some((Way::Fresh, lacking))
        };
        match self.moving {
            Some((Way::Back, bytes)) => (self.mapped, self.swapped) = (self.mapped + bytes, self.swapped - bytes),
            Some((Way::Fresh, bytes)) => self.mapped += bytes,
            _ => {}
        }
        self.moving
    }

    /// Ends a move after `bytes` have been moved. Returns true if the client must report the move.
    /// While memory returns, the client reports only the last move or a failure, because the
    /// scheduler counts returning memory from the allowance on.
    pub(crate) fn moved(&mut self, bytes: u64) -> bool {
        let Some((way, wanted)) = self.moving.take() else { return false };
        let failed = wanted.saturating_sub(bytes);
        match way {
            Way::Out => {
                (self.mapped, self.swapped) = (self.mapped - bytes, self.swapped + bytes);
                self.settle();
                true
            }
            Way::Back => {
                (self.mapped, self.swapped) = (self.mapped - failed, self.swapped + failed);
                self.is_settled() || failed > 0
            }
            Way::Fresh => {
                self.mapped -= failed;
                true
            }
        }
    }

    /// Records whether an attempt mapped no memory (`nothing`). Returns true if all attempts have
    /// failed for [`FULL_TIMEOUT`], so that other clients should run first.
    pub(crate) fn is_full(&mut self, now: Time, nothing: bool) -> bool {
        let since = *self.full_since.get_or_insert(now);
        let is_full = nothing && now.saturating_sub(since) >= FULL_TIMEOUT;
        if is_full || !nothing {
            self.full_since = None;
        }
        is_full
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// Makes all possible moves. Returns the evicted and the restored bytes.
    fn run(memory: &mut Memory) -> (u64, u64) {
        let (mut out, mut back) = (0, 0);
        while let Some((way, bytes)) = memory.step(false, GIB / 4) {
            match way {
                Way::Out => out += bytes,
                Way::Back => back += bytes,
                Way::Fresh => {}
            }
            memory.moved(bytes);
        }
        (out, back)
    }

    #[test]
    fn first_mapping_needs_no_copy_but_eviction_and_return_do() {
        let mut memory = Memory::new(0);
        memory.want(3 * GIB, 0);
        memory.attach();
        memory.set_limit(4 * GIB, 1);
        assert_eq!((memory.allocate(), memory.demand()), (None, 3 * GIB));
        assert!(memory.allow(1, 2 * GIB));
        assert_eq!((run(&mut memory), memory.is_ready(false)), ((0, 0), false));
        assert!(memory.allow(2, 3 * GIB));
        assert_eq!((run(&mut memory), memory.is_ready(false)), ((0, 0), true));
        assert!(!memory.allow(3, 2 * GIB) && !memory.allow(4, GIB));
        assert_eq!(memory.step(true, GIB), None, "its program has the lock");
        assert_eq!(run(&mut memory), (2 * GIB, 0));
        let MemoryReport { ack, mapped, swapped, demand, .. } = memory.report();
        assert_eq!((ack, mapped, swapped, demand), (4, GIB, 2 * GIB, 3 * GIB));
        assert!(memory.allow(5, 3 * GIB) && !memory.is_ready(false));
        assert_eq!((run(&mut memory), memory.is_ready(false)), ((0, 2 * GIB), true));
    }

    #[test]
    fn bytes_that_cannot_be_mapped_stay_in_the_host() {
        let mut memory = Memory::new(0);
        memory.want(2 * GIB, 0);
        memory.attach();
        memory.set_limit(2 * GIB, 1);
        memory.allocate();
        memory.allow(1, 2 * GIB);
        assert_eq!(memory.step(false, GIB), Some((Way::Fresh, 2 * GIB)));
        assert!(memory.moved(GIB) && memory.mapped() == GIB && !memory.is_ready(false));
        memory.allow(2, 0);
        run(&mut memory);
        memory.allow(3, 2 * GIB);
        assert_eq!(memory.step(false, GIB), Some((Way::Back, GIB)));
        assert!(memory.moved(0) && memory.report().swapped == GIB && memory.mapped() == 0);
        let ms = Duration::from_millis;
        assert!(!memory.is_full(ms(0), true) && memory.is_full(ms(300), true) && !memory.is_full(ms(301), true));
    }

    #[test]
    fn a_higher_limit_is_requested_once() {
        let mut memory = Memory::new(0);
        memory.want(4 * GIB, 2 * GIB);
        assert_eq!(memory.allocate(), None, "it is not attached yet");
        memory.attach();
        memory.set_limit(GIB, 1);
        assert_eq!((memory.allocate(), memory.allocate(), memory.demand()), (Some(4 * GIB), None, GIB));
        memory.refuse();
        memory.make_do();
        assert_eq!((memory.allocate(), memory.is_allocated(), memory.demand()), (None, true, GIB));
    }
}
