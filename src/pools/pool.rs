//! A stream-ordered allocator: allocates and frees blocks of address space in stream order.
//!
//! A freed block belongs to the stream in which it was freed. Later work of that stream runs after the
//! free, so an allocation in the same stream may reuse the block immediately. A stream that frees and
//! allocates needs no event. An allocation in another stream may reuse the block only after the free is
//! done. Frees are therefore numbered, across all pools of a GPU, and a fence covers all frees up to a
//! number.
//!
//! This allocator never makes one stream wait for another. The waiting stream would also wait for work
//! that the program submitted after the free, and that work may itself be waiting.
//!
//! Segments are divided into two classes, so that small blocks do not fragment the space for large
//! blocks.

use alloc::{
    collections::{BTreeMap, BTreeSet},
    vec::Vec,
};

/// Granularity of block sizes and addresses, in bytes: the driver's alignment of pool memory.
pub const UNIT: u64 = 512;

/// Bytes of a new segment, unless the allocation needs a larger segment. The pools of driver 580 grow
/// in the same steps.
pub const SEGMENT: u64 = 32 << 20;

/// The largest block of the small class, in bytes.
const SMALL: u64 = 1 << 20;

/// Identifies a stream by numbers that are never reused, so the library need not know when a stream ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct StreamName {
    /// The context of a default stream, because default streams have the same handle in all contexts. 0 for
    /// other streams.
    pub context: u64,
    /// The driver's ID of the stream (`cuStreamGetId`).
    pub id: u64,
}

impl StreamName {
    /// No stream.
    pub const NONE: Self = Self::LAST;
    const FIRST: Self = Self { context: 0, id: 0 };
    const LAST: Self = Self { context: u64::MAX, id: u64::MAX };
}

/// The streams that may reuse a free block without waiting. If several blocks have the same size,
/// earlier variants are preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Order {
    /// Later work of this stream.
    Stream(StreamName),
    /// All streams, because the free is done.
    Done,
    /// No stream, until the free is done.
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Class {
    Small,
    Large,
}

impl Class {
    fn of(len: u64) -> Self {
        if len <= SMALL { Self::Small } else { Self::Large }
    }
}

#[derive(Debug, Clone, Copy)]
struct Block {
    len: u64,
    /// Address of the segment that contains the block.
    segment: u64,
    class: Class,
    free: Option<Free>,
}

#[derive(Debug, Clone, Copy)]
struct Free {
    order: Order,
    /// The number of the free. If several free blocks were joined, the highest of their numbers.
    number: u64,
}

/// Size of a pool and of its used blocks, with their maxima, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    pub reserved: u64,
    pub reserved_high: u64,
    pub used: u64,
    pub used_high: u64,
}

#[derive(Debug, Default)]
pub struct Pool {
    /// Lengths of segments, by address.
    segments: BTreeMap<u64, u64>,
    /// All blocks of all segments, by address.
    blocks: BTreeMap<u64, Block>,
    /// The free blocks: class, order, length and address.
    free: BTreeSet<(Class, Order, u64, u64)>,
    statistics: Statistics,
}

/// The length of the block for an allocation of `size` bytes; `None` on overflow.
pub fn block_len(size: u64) -> Option<u64> {
    size.max(1).checked_next_multiple_of(UNIT)
}

impl Pool {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn statistics(&self) -> Statistics {
        self.statistics
    }

    pub fn reset_high(&mut self, of_used: bool) {
        let statistics = &mut self.statistics;
        match of_used {
            true => statistics.used_high = statistics.used,
            false => statistics.reserved_high = statistics.reserved,
        }
    }

    /// Returns the smallest free block of at least `len` bytes that `stream` may use now.
    fn find(&self, len: u64, stream: StreamName) -> Option<(Class, Order, u64, u64)> {
        let class = Class::of(len);
        let smallest =
            |order| self.free.range((class, order, len, 0)..=(class, order, u64::MAX, u64::MAX)).next().copied();
        let candidates = [smallest(Order::Stream(stream)), smallest(Order::Done)];
        candidates.into_iter().flatten().min_by_key(|(_, _, len, _)| *len)
    }

    /// Whether [`allocate`](Self::allocate) would return a block whose free is possibly not done.
    pub fn relies_on_order(&self, len: u64, stream: StreamName) -> bool {
        self.find(len, stream).is_some_and(|(_, order, ..)| order != Order::Done)
    }

    /// Allocates a block of `len` bytes, a multiple of [`UNIT`], that `stream` may use now. Returns `None`
    /// if there is no such free block.
    pub fn allocate(&mut self, len: u64, stream: StreamName) -> Option<u64> {
        let key = self.find(len, stream)?;
        let (class, order, _, at) = key;
        let block = self.blocks.get_mut(&at)?;
        let (rest, before) = (block.len - len, block.free.take());
        block.len = len;
        let block = *block;
        self.free.remove(&key);
        if rest > 0 {
            self.blocks.insert(at + len, Block { len: rest, free: before, ..block });
            self.free.insert((class, order, rest, at + len));
        }
        self.statistics.used += len;
        self.statistics.used_high = self.statistics.used_high.max(self.statistics.used);
        Some(at)
    }

    /// Frees a block in the given order. `number` identifies the free and must exceed all earlier numbers.
    /// Returns the length of the block, or `None` if no allocated block starts at `at`.
    pub fn free(&mut self, at: u64, order: Order, number: u64) -> Option<u64> {
        let block = self.blocks.get_mut(&at).filter(|block| block.free.is_none())?;
        block.free = Some(Free { order, number });
        let block = *block;
        self.statistics.used -= block.len;
        self.free.insert((block.class, order, block.len, at));
        self.join(at);
        Some(block.len)
    }

    /// Adds a free segment of `segment` bytes, whose class fits a block of `len` bytes.
    pub fn grow(&mut self, base: u64, segment: u64, len: u64) {
        let (class, order) = (Class::of(len), Order::Done);
        self.segments.insert(base, segment);
        let free = Some(Free { order, number: 0 });
        self.blocks.insert(base, Block { len: segment, segment: base, class, free });
        self.free.insert((class, order, segment, base));
        self.statistics.reserved += segment;
        self.statistics.reserved_high = self.statistics.reserved_high.max(self.statistics.reserved);
    }

    /// Marks all frees up to this number as done.
    pub fn done(&mut self, number: u64) {
        for class in [Class::Small, Class::Large] {
            self.done_between(
                (class, Order::Stream(StreamName::FIRST)),
                (class, Order::Stream(StreamName::LAST)),
                number,
            );
            self.done_between((class, Order::Unknown), (class, Order::Unknown), number);
        }
    }

    /// Marks the frees in one stream up to this number as done.
    pub fn done_in(&mut self, stream: StreamName, number: u64) {
        for class in [Class::Small, Class::Large] {
            self.done_between((class, Order::Stream(stream)), (class, Order::Stream(stream)), number);
        }
    }

    fn done_between(&mut self, first: (Class, Order), last: (Class, Order), number: u64) {
        let free = self.free.range((first.0, first.1, 0, 0)..=(last.0, last.1, u64::MAX, u64::MAX));
        let is_done = |at: &u64| self.blocks.get(at).and_then(|block| block.free).is_some_and(|f| f.number <= number);
        let done: Vec<u64> = free.map(|(.., at)| *at).filter(is_done).collect();
        for at in done {
            // A previous iteration may have joined this block with its neighbour.
            let Some(block) = self.blocks.get(&at).copied() else { continue };
            self.take_out(at, &block);
            let free = Some(Free { order: Order::Done, number: 0 });
            self.blocks.insert(at, Block { free, ..block });
            self.free.insert((block.class, Order::Done, block.len, at));
            self.join(at);
        }
    }

    /// Joins a free block with adjacent free blocks of the same segment and order.
    fn join(&mut self, at: u64) {
        let Some((mut at, mut block)) = self.blocks.get(&at).map(|block| (at, *block)) else { return };
        let Some(mut free) = block.free else { return };
        let alike = |other: &Block| other.segment == block.segment && other.free.is_some_and(|f| f.order == free.order);
        let before =
            self.blocks.range(..at).next_back().filter(|(_, other)| alike(other)).map(|(at, other)| (*at, *other));
        let after = self.blocks.get_key_value(&(at + block.len)).filter(|(_, other)| alike(other));
        let after = after.map(|(at, other)| (*at, *other));
        if before.is_none() && after.is_none() {
            return;
        }
        self.take_out(at, &block);
        for (its_at, other) in before.into_iter().chain(after) {
            self.take_out(its_at, &other);
            at = at.min(its_at);
            block.len += other.len;
            free.number = free.number.max(other.free.map_or(0, |f| f.number));
        }
        block.free = Some(free);
        self.blocks.insert(at, block);
        self.free.insert((block.class, free.order, block.len, at));
    }

    fn take_out(&mut self, at: u64, block: &Block) {
        self.blocks.remove(&at);
        if let Some(free) = block.free {
            self.free.remove(&(block.class, free.order, block.len, at));
        }
    }

    /// Whether the segment consists of one free block whose free is done.
    fn is_idle(&self, base: u64, len: u64) -> bool {
        let block = self.blocks.get(&base);
        block.is_some_and(|block| block.len == len && block.free.is_some_and(|free| free.order == Order::Done))
    }

    /// Removes idle segments, largest first, until at most `keep` bytes are left. A segment is idle if no
    /// block of it is allocated and no work can still use it. Returns the addresses of the removed
    /// segments.
    pub fn trim(&mut self, keep: u64) -> Vec<u64> {
        if self.statistics.reserved <= keep {
            return Vec::new();
        }
        let mut idle: Vec<_> = self.segments.iter().map(|(base, len)| (*len, *base)).collect();
        idle.retain(|(len, base)| self.is_idle(*base, *len));
        idle.sort_unstable();
        let mut taken = Vec::new();
        while let Some((_, base)) = idle.pop().filter(|_| self.statistics.reserved > keep) {
            self.remove_segment(base);
            taken.push(base);
        }
        taken
    }

    /// Bytes of idle segments, which [`trim`](Self::trim) would remove.
    pub fn idle(&self) -> u64 {
        self.segments.iter().filter(|(base, len)| self.is_idle(**base, **len)).map(|(_, len)| len).sum()
    }

    fn remove_segment(&mut self, base: u64) {
        let Some(len) = self.segments.remove(&base) else { return };
        if let Some(block) = self.blocks.get(&base).copied() {
            self.take_out(base, &block); // the block covers the whole segment
        }
        self.statistics.reserved -= len;
    }

    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Whether some frees are not known to be done.
    pub fn has_pending(&self) -> bool {
        [Class::Small, Class::Large].iter().any(|class| {
            let mut of_streams =
                self.free.range((*class, Order::Stream(StreamName::FIRST), 0, 0)..(*class, Order::Done, 0, 0));
            let mut unknown =
                self.free.range((*class, Order::Unknown, 0, 0)..=(*class, Order::Unknown, u64::MAX, u64::MAX));
            of_streams.next().is_some() || unknown.next().is_some()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeMap, vec};

    const BASE: u64 = 1 << 40;

    fn stream(id: u64) -> StreamName {
        StreamName { context: 0, id }
    }

    #[test]
    fn a_stream_reuses_its_own_block_immediately() {
        let mut pool = Pool::new();
        assert_eq!(pool.allocate(SMALL, stream(1)), None);
        pool.grow(BASE, SEGMENT, SMALL);
        for number in 1..1000 {
            assert_eq!(pool.allocate(SMALL, stream(1)), Some(BASE));
            assert_eq!(pool.free(BASE, Order::Stream(stream(1)), number), Some(SMALL));
        }
        let Statistics { reserved, used, used_high, .. } = pool.statistics();
        assert_eq!((reserved, used, used_high), (SEGMENT, 0, SMALL));
    }

    #[test]
    fn another_stream_reuses_a_block_after_its_free_completes() {
        let mut pool = Pool::new();
        pool.grow(BASE, 2 * UNIT, UNIT);
        let (a, b) = (pool.allocate(UNIT, stream(1)), pool.allocate(UNIT, stream(1)));
        assert_eq!((a, b), (Some(BASE), Some(BASE + UNIT)));
        pool.free(BASE, Order::Stream(stream(1)), 1);
        pool.free(BASE + UNIT, Order::Unknown, 2);
        assert_eq!((pool.allocate(UNIT, stream(2)), pool.allocate(2 * UNIT, stream(1))), (None, None));
        pool.done(1);
        assert_eq!(
            (pool.allocate(UNIT, stream(2)), pool.allocate(UNIT, stream(1))),
            (Some(BASE), None),
            "the second free is not done"
        );
        pool.free(BASE, Order::Stream(stream(2)), 3);
        pool.done_in(stream(1), 3);
        assert!(pool.has_pending());
        pool.done(3);
        assert_eq!((pool.has_pending(), pool.allocate(2 * UNIT, stream(3))), (false, Some(BASE)), "joined");
    }

    #[test]
    fn small_blocks_do_not_break_up_large_ones() {
        let mut pool = Pool::new();
        pool.grow(BASE, 4 * SEGMENT, 4 * SEGMENT);
        assert_eq!(pool.allocate(UNIT, stream(1)), None);
        assert_eq!(pool.allocate(2 * SEGMENT, stream(1)), Some(BASE));
    }

    #[test]
    fn segments_in_use_or_with_pending_frees_are_not_trimmed() {
        let mut pool = Pool::new();
        for i in 0..3 {
            pool.grow(BASE + i * SEGMENT, SEGMENT, SEGMENT);
            pool.allocate(SEGMENT, stream(1));
        }
        pool.free(BASE, Order::Stream(stream(1)), 1);
        pool.free(BASE + SEGMENT, Order::Stream(stream(1)), 2);
        assert_eq!((pool.trim(0), pool.idle()), (vec![], 0));
        pool.done(1);
        assert_eq!(pool.idle(), SEGMENT);
        assert_eq!((pool.trim(3 * SEGMENT), pool.trim(SEGMENT), pool.trim(0)), (vec![], vec![BASE], vec![]));
        pool.done_in(stream(1), 2);
        assert_eq!((pool.trim(0), pool.statistics().reserved), (vec![BASE + SEGMENT], SEGMENT));
        pool.free(BASE + 2 * SEGMENT, Order::Unknown, 3);
        assert_eq!((pool.is_empty(), pool.statistics().used), (false, 0));
    }

    #[test]
    fn only_live_blocks_can_be_freed() {
        let mut pool = Pool::new();
        pool.grow(BASE, SEGMENT, UNIT);
        assert_eq!(pool.free(BASE, Order::Done, 1), None);
        let at = pool.allocate(2 * UNIT, stream(1)).unwrap();
        assert_eq!(pool.free(at + UNIT, Order::Stream(stream(1)), 1), None);
        assert_eq!(
            (pool.free(at, Order::Stream(stream(1)), 1), pool.free(at, Order::Stream(stream(1)), 2)),
            (Some(2 * UNIT), None)
        );
    }

    /// A simple model to compare with: the state of each unit, without joining, splitting or searching.
    #[derive(Debug, Default)]
    struct Model {
        segments: BTreeMap<u64, u64>,
        live: BTreeMap<u64, u64>,
        /// Freed units: the order and the number of the last free.
        freed: BTreeMap<u64, (Order, u64)>,
    }

    impl Model {
        fn units(at: u64, len: u64) -> impl Iterator<Item = u64> {
            (at..at + len).step_by(UNIT as usize)
        }

        fn allocated(&mut self, at: u64, len: u64, stream: StreamName) {
            let (base, segment) = self.segments.range(..=at).next_back().expect("a segment");
            assert!(at + len <= base + segment, "beyond its segment");
            let before = self.live.range(..at + len).next_back();
            assert!(before.is_none_or(|(its, len)| its + len <= at), "in two hands");
            for unit in Self::units(at, len) {
                match self.freed.remove(&unit) {
                    Some((Order::Stream(its), _)) => assert_eq!(its, stream, "before the free was done"),
                    Some((Order::Unknown, _)) => panic!("before the free was done"),
                    Some((Order::Done, _)) | None => {}
                }
            }
            self.live.insert(at, len);
        }

        fn done(&mut self, stream: Option<StreamName>, number: u64) {
            for (order, its) in self.freed.values_mut() {
                if *its <= number && stream.is_none_or(|stream| *order == Order::Stream(stream)) {
                    *order = Order::Done;
                }
            }
        }
    }

    #[test]
    fn no_block_is_allocated_twice_or_before_its_free_completes() {
        for seed in 1..=100u64 {
            let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut random = move |below: u64| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state % below
            };
            let (mut pool, mut model) = (Pool::new(), Model::default());
            let (mut number, mut next) = (0, BASE);
            for _ in 0..600 {
                match random(12) {
                    0..=4 => {
                        let (len, stream) = ((1 + random(6)) * UNIT, stream(random(3)));
                        let at = pool.allocate(len, stream).unwrap_or_else(|| {
                            // Segments may be adjacent.
                            let segment = len + random(8) * UNIT;
                            pool.grow(next, segment, len);
                            model.segments.insert(next, segment);
                            next += segment;
                            pool.allocate(len, stream).expect("there is a new one")
                        });
                        model.allocated(at, len, stream);
                    }
                    5..=8 => {
                        let count = model.live.len() as u64;
                        let Some((at, len)) = model.live.iter().nth(random(count.max(1)) as usize) else { continue };
                        let (at, len) = (*at, *len);
                        number += 1;
                        let order = if random(8) == 0 { Order::Unknown } else { Order::Stream(stream(random(3))) };
                        assert_eq!(pool.free(at, order, number), Some(len));
                        model.live.remove(&at);
                        model.freed.extend(Model::units(at, len).map(|unit| (unit, (order, number))));
                    }
                    9 => {
                        let number = random(number + 1);
                        pool.done(number);
                        model.done(None, number);
                    }
                    10 => {
                        let (stream, number) = (stream(random(3)), random(number + 1));
                        pool.done_in(stream, number);
                        model.done(Some(stream), number);
                    }
                    _ => {
                        for base in pool.trim(random(64) * UNIT) {
                            let len = model.segments.remove(&base).expect("a segment");
                            assert!(model.live.range(base..base + len).next().is_none(), "in use");
                            for unit in Model::units(base, len) {
                                let free = model.freed.remove(&unit);
                                assert!(free.is_none_or(|(order, _)| order == Order::Done), "its work may run");
                            }
                        }
                    }
                }
                let (used, reserved) = (model.live.values().sum::<u64>(), model.segments.values().sum::<u64>());
                assert_eq!((pool.statistics().used, pool.statistics().reserved), (used, reserved));
                assert_eq!(pool.blocks.values().map(|block| block.len).sum::<u64>(), reserved, "nothing is lost");
                assert_eq!(pool.free.len(), pool.blocks.values().filter(|block| block.free.is_some()).count());
            }
            model.live.keys().for_each(|at| assert!(pool.free(*at, Order::Unknown, number).is_some()));
            pool.done(number);
            assert_eq!((pool.trim(0).len(), pool.is_empty()), (model.segments.len(), true), "all is joined in the end");
        }
    }
}
