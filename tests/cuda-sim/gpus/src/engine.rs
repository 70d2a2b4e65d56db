//! The engines of a GPU: one computes, one copies in, and one copies out. Each engine serves all
//! processes, executes one piece of work at a time, and is busy for the work's simulated time.

use crate::{MAX_GPUS, lock::LockFile, place::place};
use std::{
    sync::{Condvar, Mutex, MutexGuard, OnceLock},
    thread,
    time::{Duration, Instant},
};

/// The kind of a GPU's engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    Compute,
    /// Host to device.
    In,
    /// Device to host.
    Out,
}

/// Costs below this, in nanoseconds, are accumulated before the engine sleeps, because sleeping is
/// imprecise.
const NEGLIGIBLE: i64 = 200_000;
/// The maximum oversleeping, in nanoseconds, that is deducted from later work.
const CREDIT: i64 = 2_000_000;

/// One engine of one GPU.
#[derive(Debug)]
pub struct Engine {
    queue: Mutex<Queue>,
    turn: Condvar,
    /// The lock that the process next in line holds. This lock makes processes alternate, because a
    /// single `flock` has no order.
    next: Option<LockFile>,
    busy: Option<LockFile>,
}

/// A ticket queue of this process's threads.
#[derive(Debug, Default)]
struct Queue {
    tickets: u64,
    serving: u64,
    /// Nanoseconds of executed work for which the engine has not slept yet.
    debt: i64,
}

impl Engine {
    /// The engine of a GPU, shared by all threads of this process.
    pub fn get(gpu: usize, kind: EngineKind) -> &'static Engine {
        Engine::at(place(gpu), kind)
    }

    /// The engine of a GPU by its number in the machine.
    pub(crate) fn at(gpu: usize, kind: EngineKind) -> &'static Engine {
        static ENGINES: [OnceLock<Engine>; MAX_GPUS * 3] = [const { OnceLock::new() }; MAX_GPUS * 3];
        ENGINES[gpu * 3 + kind as usize].get_or_init(|| {
            let name = ["compute", "in", "out"][kind as usize];
            let open = |what| LockFile::open(&format!("gpu{gpu}-{name}.{what}")).ok();
            Engine { queue: Mutex::default(), turn: Condvar::new(), next: open("next"), busy: open("busy") }
        })
    }

    /// Executes `work`, and takes `cost` in total. Callers split work into pieces of a few
    /// milliseconds, so that other work runs between the pieces.
    pub fn run<R>(&self, cost: Duration, work: impl FnOnce() -> R) -> R {
        let cost = cost.as_nanos() as i64;
        let mut queue = self.lock();
        if queue.debt + cost < NEGLIGIBLE {
            queue.debt += cost;
            drop(queue);
            return work();
        }
        let ticket = queue.tickets;
        queue.tickets += 1;
        while queue.serving != ticket {
            queue = self.turn.wait(queue).unwrap_or_else(|e| e.into_inner());
        }
        let debt = queue.debt + cost;
        queue.debt = 0;
        drop(queue);

        self.enter();
        let start = Instant::now();
        let result = work();
        let left = debt - start.elapsed().as_nanos() as i64;
        if left > 0 {
            thread::sleep(Duration::from_nanos(left as u64));
        }
        let late = start.elapsed().as_nanos() as i64 - debt;
        self.leave();

        let mut queue = self.lock();
        queue.debt -= late.clamp(0, CREDIT);
        queue.serving += 1;
        self.turn.notify_all();
        result
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn enter(&self) {
        if let (Some(next), Some(busy)) = (&self.next, &self.busy) {
            next.lock();
            busy.lock();
            next.unlock();
        }
    }

    fn leave(&self) {
        if let Some(busy) = &self.busy {
            busy.unlock();
        }
    }
}
