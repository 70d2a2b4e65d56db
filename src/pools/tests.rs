//! Pools on a simulated GPU, which executes the work of random streams in random order.

use super::*;
use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, VecDeque},
};

const STREAMS: u64 = 3;
const POOLS: u64 = 2;

/// One submission to a stream.
#[derive(Debug, Clone, Copy)]
enum Step {
    /// Accesses the block of an allocation, which is identified by its number.
    Use { allocation: u64, at: u64, len: u64 },
    /// Waits until another stream has executed this number of steps.
    Wait { stream: usize, steps: u64 },
}

/// The streams, each with its pending steps.
#[derive(Debug, Default)]
struct Gpu {
    pending: [VecDeque<Step>; STREAMS as usize],
    submitted: [u64; STREAMS as usize],
    executed: [u64; STREAMS as usize],
    /// The allocation that has used each unit last.
    users: BTreeMap<u64, u64>,
}

impl Gpu {
    fn submit(&mut self, stream: usize, step: Step) {
        self.pending[stream].push_back(step);
        self.submitted[stream] += 1;
    }

    /// Executes one step of a stream, if the stream has one that need not wait.
    fn execute(&mut self, stream: usize) -> bool {
        match self.pending[stream].front().copied() {
            None => return false,
            Some(Step::Wait { stream: other, steps }) if self.executed[other] < steps => return false,
            Some(Step::Wait { .. }) => {}
            Some(Step::Use { allocation, at, len }) => {
                for unit in (at..at + len).step_by(UNIT as usize) {
                    let before = self.users.insert(unit, allocation);
                    assert!(before.is_none_or(|before| before <= allocation), "a block was reused too early");
                }
            }
        }
        self.pending[stream].pop_front();
        self.executed[stream] += 1;
        true
    }

    fn finish(&mut self) {
        while (0..STREAMS as usize).map(|stream| self.execute(stream)).max() == Some(true) {}
        assert_eq!(self.executed, self.submitted, "a stream waits for ever");
    }
}

/// The fences of the simulated GPU.
#[derive(Debug, Default)]
struct Work {
    gpu: RefCell<Gpu>,
    /// Whether fences cannot be recorded, as during a capture.
    is_capturing: Cell<bool>,
}

impl Fences for Work {
    type Fence = [u64; STREAMS as usize];

    fn record(&self) -> Option<Self::Fence> {
        (!self.is_capturing.get()).then(|| self.gpu.borrow().submitted)
    }

    fn is_done(&self, fence: &mut Self::Fence) -> bool {
        self.gpu.borrow().executed.iter().zip(fence).all(|(executed, needed)| *executed >= *needed)
    }
}

fn name(stream: usize) -> StreamName {
    StreamName { context: 0, id: stream as u64 }
}

#[derive(Debug, Clone, Copy)]
struct Allocation {
    number: u64,
    id: u32,
    at: u64,
    len: u64,
    stream: usize,
}

/// A program with pools, which uses each allocation only in the order that it has established.
struct Program {
    work: Work,
    pools: Pools<[u64; STREAMS as usize]>,
    live: Vec<Allocation>,
    segments: BTreeMap<u64, u64>,
    next_segment: u64,
    next_number: u64,
    state: u64,
}

impl Program {
    fn new(seed: u64) -> Self {
        let mut program = Self {
            work: Work::default(),
            pools: Pools::default(),
            live: Vec::new(),
            segments: BTreeMap::new(),
            next_segment: 1 << 40,
            next_number: 0,
            state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        };
        for handle in 1..=POOLS {
            let (threshold, opportunistic) = (program.random(64) * UNIT, program.random(2) == 0);
            program.pools.add(handle, Policy { threshold, opportunistic });
        }
        program
    }

    fn random(&mut self, below: u64) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state % below
    }

    fn stream(&mut self) -> usize {
        self.random(STREAMS) as usize
    }

    fn allocate(&mut self) {
        let (pool, stream, len) = (1 + self.random(POOLS), self.stream(), (1 + self.random(6)) * UNIT);
        let Some(id) = self.pools.id(pool) else { return };
        let at = self.pools.allocate(pool, len, name(stream), None, &self.work).unwrap_or_else(|| {
            let segment = len + self.random(8) * UNIT;
            let base = self.next_segment;
            self.next_segment += segment; // segments may be adjacent
            self.segments.insert(base, segment);
            self.pools.grow(id, base, segment, len).expect("a new segment has room")
        });
        self.next_number += 1;
        let allocation = Allocation { number: self.next_number, id, at, len, stream };
        let overlaps = |other: &Allocation| other.at < at + len && at < other.at + other.len;
        assert!(!self.live.iter().any(overlaps), "a block was allocated twice");
        assert!(self.segments.range(..=at).next_back().is_some_and(|(base, size)| at + len <= base + size));
        self.live.push(allocation);
        self.use_it(allocation);
    }

    fn use_it(&self, Allocation { number: allocation, at, len, stream, .. }: Allocation) {
        self.work.gpu.borrow_mut().submit(stream, Step::Use { allocation, at, len });
    }

    /// Frees an allocation in its stream, in a stream that waits for that stream, or in an unknown order.
    fn free(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let index = self.random(self.live.len() as u64) as usize;
        let allocation = self.live.swap_remove(index);
        let order = match self.random(8) {
            0 => Order::Unknown,
            1 => {
                let stream = self.stream();
                let mut gpu = self.work.gpu.borrow_mut();
                let steps = gpu.submitted[allocation.stream];
                if stream != allocation.stream {
                    gpu.submit(stream, Step::Wait { stream: allocation.stream, steps });
                }
                Order::Stream(name(stream))
            }
            _ => Order::Stream(name(allocation.stream)),
        };
        self.pools.free(allocation.id, allocation.at, order);
    }

    /// The program waits for work.
    fn synchronize(&mut self) {
        let number = self.pools.frees();
        let stream = self.stream();
        let awaited = match self.random(3) {
            0 => Awaited::Some,
            1 => {
                self.work.gpu.borrow_mut().finish();
                Awaited::All
            }
            _ => {
                self.work.gpu.borrow_mut().finish();
                Awaited::Stream(name(stream))
            }
        };
        let idle = self.pools.synchronize(awaited, number, &self.work);
        self.remove(idle);
    }

    fn remove(&mut self, segments: Vec<u64>) {
        let gpu = self.work.gpu.borrow();
        for base in segments {
            let end = base + self.segments.remove(&base).expect("a segment");
            let is_inside = |at: u64| (base..end).contains(&at);
            assert!(!self.live.iter().any(|allocation| is_inside(allocation.at)), "the segment is in use");
            let uses = |step: &Step| matches!(step, Step::Use { at, .. } if is_inside(*at));
            assert!(!gpu.pending.iter().flatten().any(uses), "work may access the segment");
        }
    }

    fn step(&mut self) {
        match self.random(16) {
            0..=4 => self.allocate(),
            5..=8 => self.free(),
            9..=10 => {
                let stream = self.stream();
                self.work.gpu.borrow_mut().execute(stream);
            }
            11 => {
                if let Some(allocation) = self.live.last() {
                    self.use_it(*allocation);
                }
            }
            12 => self.synchronize(),
            13 => self.work.is_capturing.set(!self.work.is_capturing.get()),
            14 => {
                let bytes = self.random(32) * UNIT;
                let idle = match self.random(3) {
                    0 => self.pools.make_room(bytes, &self.work),
                    1 => self.pools.trim_to(1, bytes),
                    _ => self.pools.release(&self.work),
                };
                self.remove(idle);
            }
            _ => self.destroy(),
        }
    }

    /// Destroys a pool. Another pool gets its handle.
    fn destroy(&mut self) {
        let handle = 1 + self.random(POOLS);
        self.pools.destroy(handle);
        let idle = self.pools.tend(&self.work);
        self.remove(idle);
        assert!(!self.pools.has(handle));
        self.pools.add(handle, Policy::default());
    }
}

#[test]
fn no_block_is_reused_while_earlier_work_may_access_it() {
    for seed in 1..=300 {
        let mut program = Program::new(seed);
        (0..500).for_each(|_| program.step());
        // In the end, all memory is released.
        while !program.live.is_empty() {
            program.free();
        }
        program.work.gpu.borrow_mut().finish();
        program.work.is_capturing.set(false);
        for _ in 0..2 {
            let idle = program.pools.release(&program.work);
            program.remove(idle);
        }
        assert!(!program.pools.has_pending() && !program.pools.has_dying());
        assert!(program.segments.is_empty(), "segments are lost");
    }
}

#[test]
fn memory_at_rest_is_released_without_fences() {
    let mut program = Program::new(1);
    (0..50).for_each(|_| program.allocate());
    while !program.live.is_empty() {
        program.free();
    }
    program.work.gpu.borrow_mut().finish();
    program.work.is_capturing.set(true);
    let idle = program.pools.release_at_rest();
    program.remove(idle);
    assert!(program.segments.is_empty() && !program.pools.has_pending());
}

#[test]
fn a_reuse_that_relies_on_an_order_establishes_it() {
    let (work, mut pools) = (Work::default(), Pools::default());
    pools.add(1, Policy::default());
    let id = pools.id(1).expect("a pool");
    let at = pools.grow(id, 1 << 40, UNIT, UNIT).expect("room");
    let calls = Cell::new(0);
    let establish = |succeeds: bool| {
        calls.set(calls.get() + 1);
        succeeds
    };
    pools.free(id, at, Order::Stream(name(0)));
    assert_eq!(pools.allocate(1, UNIT, name(0), Some(&|| establish(false)), &work), None);
    assert_eq!(pools.allocate(1, UNIT, name(0), Some(&|| establish(true)), &work), Some(at));
    pools.free(id, at, Order::Done);
    assert_eq!(pools.allocate(1, UNIT, name(0), Some(&|| establish(false)), &work), Some(at), "the free is done");
    assert_eq!(calls.get(), 2);
}
