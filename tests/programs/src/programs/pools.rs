//! Random stream-ordered steps: allocating from two pools, late writes, freeing in the same stream
//! or after an event in another, and destroying streams with pending frees. Blocking streams and
//! the legacy stream rely on their implicit synchronization. If a block is reused too early, the
//! work of its previous owner overwrites it.

use super::{Outcome, Random, expect};
use crate::{
    args::Args,
    cuda::{
        Error, Gpu, Mapped, Stream, cu,
        late::{PoolProperties, late_cu},
    },
    report::Report,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

/// The time for which a stream is kept busy before some writes, in nanoseconds.
const BUSY: u64 = 300_000;

/// The maximum number of pending sums of one thread.
const SUMS: usize = 256;

const RELEASE_THRESHOLD: u32 = 4;
const RESERVED: u32 = 5;
const USED: u32 = 7;
const USED_HIGH: u32 = 8;

#[derive(Clone, Copy)]
struct Plan {
    memory: u64,
    streams: u64,
    time: Duration,
    pause: Duration,
    pools: [usize; 2],
}

struct Block {
    at: u64,
    count: u64,
    value: u32,
    /// The index of the stream in which the block was last used.
    stream: usize,
}

/// The sum of a block that a stream is computing.
struct Sum {
    slot: usize,
    want: u64,
    stream: usize,
}

/// One thread's streams and blocks.
struct Worker<'a> {
    gpu: &'a Gpu,
    plan: Plan,
    random: Random,
    streams: Vec<Stream>,
    blocks: Vec<Block>,
    sums: Vec<Sum>,
    results: Mapped,
    steps: u64,
    refused: u64,
}

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let gpu = Gpu::open(0)?;
    let (threads, seed) = (args.size("threads", "2"), args.size("seed", "1"));
    let mut pools = [0; 2];
    late_cu!(cuDeviceGetDefaultMemPool(&mut pools[0], gpu.device))?;
    let location = crate::cuda::api::Location { kind: 1, id: gpu.device };
    let usage = args.size("usage", "0") as u16;
    let properties =
        PoolProperties { kind: 1, handle_types: 0, location, security: 0, max_size: 0, usage, reserved: [0; 54] };
    late_cu!(cuMemPoolCreate(&mut pools[1], &properties))?;
    late_cu!(cuMemPoolSetAttribute(pools[1], RELEASE_THRESHOLD, &u64::MAX))?;
    let plan = Plan {
        memory: args.size("mem", "64M") / threads,
        streams: args.size("streams", "3"),
        time: Duration::from_secs_f64(args.number("seconds", "2")),
        pause: args.milliseconds("pause-ms", "0"),
        pools,
    };
    let (steps, refused) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let work = |number: u64| -> Result<(), String> {
        let work = || -> Outcome {
            gpu.enter()?;
            let mut worker = Worker::new(&gpu, plan, seed * 1000 + number)?;
            worker.work()?;
            steps.fetch_add(worker.steps, Ordering::Relaxed);
            refused.fetch_add(worker.refused, Ordering::Relaxed);
            Ok(())
        };
        work().map_err(|error| format!("thread {number}: {error}"))
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|number| scope.spawn(move || work(number))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("a thread ends"))
    })?;
    gpu.synchronise()?;
    for pool in pools {
        // After all frees, the driver still counts up to 195 KiB as used [H100, driver 580].
        expect("hardly any bytes in use in the end", get(pool, USED)? < 1 << 20, true)?;
        expect("nothing was ever in use", get(pool, USED_HIGH)? > 0, true)?;
        late_cu!(cuMemPoolTrimTo(pool, 0))?;
        expect("bytes after everything was trimmed", get(pool, RESERVED)?, 0)?;
    }
    late_cu!(cuMemPoolDestroy(pools[1]))?;
    report.integer("steps", steps.load(Ordering::Relaxed));
    report.integer("refused", refused.load(Ordering::Relaxed));
    Ok(())
}

fn get(pool: usize, which: u32) -> Result<u64, Error> {
    let mut value = 0;
    late_cu!(cuMemPoolGetAttribute(pool, which, &mut value))?;
    Ok(value)
}

impl Worker<'_> {
    fn new(gpu: &Gpu, plan: Plan, seed: u64) -> Result<Worker<'_>, Error> {
        let streams = (0..plan.streams).map(Self::make).collect::<Result<_, _>>()?;
        let (blocks, sums, results) = (Vec::new(), Vec::new(), Mapped::new(SUMS * 8)?);
        Ok(Worker { gpu, plan, random: Random::new(seed), streams, blocks, sums, results, steps: 0, refused: 0 })
    }

    /// Creates a stream. Streams with odd numbers are blocking.
    fn make(number: u64) -> Result<Stream, Error> {
        if number.is_multiple_of(2) { Stream::new() } else { Stream::blocking() }
    }

    /// Whether a stream synchronizes with the legacy stream.
    fn is_blocking(stream: usize) -> bool {
        stream == 1 || (stream >= 2 && stream % 2 == 1)
    }

    /// Whether work in `after` implicitly waits for work in `before`.
    fn is_ordered(before: usize, after: usize) -> bool {
        before == after || (before == 0 && Self::is_blocking(after)) || (after == 0 && Self::is_blocking(before))
    }

    /// Returns the handle of a stream. The first two numbers are the default streams, and the
    /// others the worker's own.
    fn handle(&self, stream: usize) -> usize {
        match stream {
            0 => LEGACY,
            1 => PER_THREAD,
            _ => self.streams[stream - 2].0,
        }
    }

    fn any_stream(&mut self) -> usize {
        self.random.below(self.plan.streams + 2) as usize
    }

    fn work(&mut self) -> Outcome {
        let start = Instant::now();
        while start.elapsed() < self.plan.time {
            self.steps += 1;
            match self.random.below(24) {
                0..=9 => self.allocate()?,
                10..=17 => self.free_one()?,
                18 => {
                    let stream = self.any_stream();
                    self.synchronise(stream)?;
                }
                19 => self.replace_stream()?,
                20 => {
                    let pool = self.plan.pools[self.random.below(2) as usize];
                    late_cu!(cuMemPoolTrimTo(pool, self.random.below(self.plan.memory) as usize))?;
                }
                21 => {
                    let threshold = [0, self.plan.memory / 2, u64::MAX][self.random.below(3) as usize];
                    late_cu!(cuMemPoolSetAttribute(self.plan.pools[0], RELEASE_THRESHOLD, &threshold))?;
                }
                22 if !self.plan.pause.is_zero() => thread::sleep(self.plan.pause),
                _ => self.change_one()?,
            }
        }
        while !self.blocks.is_empty() {
            self.free_one()?;
        }
        (0..self.streams.len() + 2).try_for_each(|stream| self.synchronise(stream))
    }

    fn allocate(&mut self) -> Outcome {
        let held: u64 = self.blocks.iter().map(|block| block.count * 4).sum();
        let most = if self.random.below(3) == 0 { self.plan.memory / 6 } else { 96 << 10 };
        let count = 1 + self.random.below(most / 4);
        if held + count * 4 > self.plan.memory / 2 {
            return self.free_one();
        }
        let (stream, value) = (self.any_stream(), self.random.next() as u32);
        let handle = self.handle(stream);
        let mut at = 0;
        let result = match self.random.below(3) {
            0 => cu!(cuMemAllocAsync(&mut at, count as usize * 4, handle)),
            1 if stream == 1 => late_cu!(cuMemAllocAsync_ptsz(&mut at, count as usize * 4, 0)),
            pool => late_cu!(cuMemAllocFromPoolAsync(
                &mut at,
                count as usize * 4,
                self.plan.pools[pool as usize - 1],
                handle
            )),
        };
        match result {
            Ok(()) => {}
            Err(error) if error.code == Error::OUT_OF_MEMORY => {
                self.refused += 1;
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
        // The block may also be used in another stream that is ordered after this one.
        let other = self.any_stream();
        let stream = if Self::is_ordered(stream, other) { other } else { stream };
        let handle = self.handle(stream);
        if self.random.below(4) == 0 {
            self.gpu.spin(BUSY, handle)?;
        }
        self.gpu.fill(at, count, value, handle)?;
        self.blocks.push(Block { at, count, value, stream });
        Ok(())
    }

    /// Writes to a block after a delay.
    fn change_one(&mut self) -> Outcome {
        let Some(at) = self.pick() else { return Ok(()) };
        let add = self.random.next() as u32;
        let handle = self.handle(self.blocks[at].stream);
        self.gpu.spin(BUSY / 4, handle)?;
        let block = &mut self.blocks[at];
        block.value = block.value.wrapping_add(add);
        Ok(self.gpu.add(block.at, block.count, add, handle)?)
    }

    fn pick(&mut self) -> Option<usize> {
        let count = self.blocks.len() as u64;
        (count > 0).then(|| self.random.below(count) as usize)
    }

    /// Orders one stream after another by an event.
    fn order(&self, before: usize, after: usize) -> Result<(), Error> {
        let mut event = 0;
        cu!(cuEventCreate(&mut event, 2))?;
        cu!(cuEventRecord(event, self.handle(before)))?;
        cu!(cuStreamWaitEvent(self.handle(after), event, 0))?;
        cu!(cuEventDestroy_v2(event))
    }

    /// Sums a block, overwrites it and frees it, all asynchronously.
    fn free_one(&mut self) -> Outcome {
        let Some(at) = self.pick() else { return Ok(()) };
        let Block { at, count, value, stream } = self.blocks.swap_remove(at);
        let freeing = if self.random.below(3) == 0 { self.any_stream() } else { stream };
        // If the streams are implicitly ordered, the freeing stream runs no other work on the
        // block.
        let last = if Self::is_ordered(stream, freeing) { stream } else { freeing };
        if last != stream {
            self.order(stream, last)?;
        }
        let handle = self.handle(last);
        if self.sums.len() == SUMS {
            for stream in 0..self.streams.len() + 2 {
                self.synchronise(stream)?;
            }
        }
        let slot = (0..SUMS).find(|slot| self.sums.iter().all(|sum| sum.slot != *slot)).expect("a free one");
        let to = self.results.host.wrapping_add(slot * 8).cast::<u64>();
        // SAFETY: the slot is within the results, and no kernel writes to it now.
        unsafe { to.write_volatile(0) };
        self.gpu.add_sum(at, count, self.results.at + slot as u64 * 8, handle)?;
        self.sums.push(Sum { slot, want: count * u64::from(value), stream: last });
        if self.random.below(2) == 0 {
            self.gpu.spin(BUSY / 2, handle)?;
        }
        self.gpu.fill(at, count, !value, handle)?;
        if self.random.below(8) == 0 {
            // Before `cuMemFree`, the driver requires that all work on the block is done.
            self.synchronise(last)?;
            cu!(cuMemFree_v2(at))?;
        } else {
            cu!(cuMemFreeAsync(at, self.handle(freeing)))?;
        }
        if self.random.below(4) == 0 {
            cu!(cuStreamSynchronize(self.handle(freeing)))?;
        }
        Ok(())
    }

    /// Waits for a stream and checks its sums.
    fn synchronise(&mut self, stream: usize) -> Outcome {
        cu!(cuStreamSynchronize(self.handle(stream)))?;
        let (done, others) = std::mem::take(&mut self.sums).into_iter().partition(|sum| sum.stream == stream);
        self.sums = others;
        let done: Vec<Sum> = done;
        done.iter().try_for_each(|sum| {
            // SAFETY: the slot is within the results, and the kernel that writes to it has ended.
            let got = unsafe { self.results.host.wrapping_add(sum.slot * 8).cast::<u64>().read_volatile() };
            expect("a sum", got, sum.want)
        })
    }

    /// Destroys a stream with running work, and creates another.
    fn replace_stream(&mut self) -> Outcome {
        let Some(own) = self.random.below(self.plan.streams + 1).checked_sub(1).map(|own| own as usize) else {
            return Ok(());
        };
        let stream = own + 2;
        // Another stream waits for the pending sums, which are checked later. Frees stay pending.
        if self.sums.iter().any(|sum| sum.stream == stream) {
            self.order(stream, 0)?;
            self.sums.iter_mut().filter(|sum| sum.stream == stream).for_each(|sum| sum.stream = 0);
        }
        let new = Self::make(own as u64)?;
        let old = std::mem::replace(&mut self.streams[own], new);
        if self.blocks.iter().any(|block| block.stream == stream) {
            let mut event = 0;
            cu!(cuEventCreate(&mut event, 2))?;
            cu!(cuEventRecord(event, old.0))?;
            cu!(cuStreamWaitEvent(self.streams[own].0, event, 0))?;
            cu!(cuEventDestroy_v2(event))?;
        }
        drop(old);
        Ok(())
    }
}
