//! Memory of the fake driver: a space, its mover, and a context.

use super::{
    account::Account,
    engine::{Engine, GRANULE},
    mover::{Goal, Mover, Step},
    space::Space,
};
use crate::{
    driver::{
        fake::{Driver, TOTAL},
        types::*,
    },
    submit::Work,
    sys::sync::{Mutex, Rank, on_client_thread},
};
use alloc::boxed::Box;
use core::time::Duration;
use std::time::Instant;

pub const EVICT_ALL: Goal = Goal::Evict { target: 0 };

/// The memory of one GPU. It is never freed, because the driver still counts its buffers as registered.
#[derive(Debug)]
pub struct Memory {
    pub driver: Driver,
    pub work: &'static Work,
    pub space: &'static Mutex<Space>,
    pub mover: &'static Mutex<Mover>,
    pub context: CUcontext,
}

// SAFETY: the context is a handle, which any thread may use.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new() -> Self {
        Self::on(Driver::new())
    }

    /// Creates memory whose fingerprints can be computed.
    pub fn with_kernel() -> Self {
        let driver = Driver::new();
        driver.add_kernel();
        Self::on(driver)
    }

    fn on(driver: Driver) -> Self {
        let work = Box::leak(Box::new(Work::new()));
        let space = Space::new(driver.new_device(), Engine::Swap, TOTAL, u64::MAX, work);
        let space = Box::leak(Box::new(Mutex::new(Rank::Space, space)));
        let mover = Box::leak(Box::new(Mutex::new(Rank::Mover, Mover::new())));
        let mut memory = Self { driver, work, space, mover, context: core::ptr::null_mut() };
        memory.context = memory.add_context();
        memory.driver.set_current(memory.context);
        memory.driver.forget_calls();
        memory
    }

    /// Creates a context in which memory can be moved.
    pub fn add_context(&self) -> CUcontext {
        let context = self.driver.new_context(0);
        Mover::make_ready(self.mover, context, true, || self.work.add_context(context));
        context
    }

    /// Allocates one chunk, and returns its address.
    pub fn allocate(&self) -> u64 {
        let allocated = self.space.lock().allocate(GRANULE, self.context as usize, false, self.work);
        allocated.expect("room for a chunk").address
    }

    pub fn account(&self) -> Account {
        self.space.lock().account
    }

    /// The stream in which the mover copies.
    pub fn stream(&self) -> CUstream {
        self.driver.streams_of(self.context)[0]
    }

    /// Takes one step of the mover, as the client's thread.
    pub fn step(&self, goal: Goal) -> Step {
        self.step_in(&self.work.contexts(), goal)
    }

    pub fn step_in(&self, contexts: &[CUcontext], goal: Goal) -> Step {
        let _client = on_client_thread();
        self.mover.lock().step(self.space, contexts, goal)
    }

    /// Takes steps until the mover has reached the goal, or has stopped.
    #[track_caller]
    pub fn run(&self, goal: Goal) -> Step {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match self.step(goal) {
                Step::Busy(after) => std::thread::sleep(after),
                step => return step,
            }
            assert!(Instant::now() < deadline, "{goal:?} is never reached");
        }
    }

    /// Takes steps until a function of the driver has been called.
    #[track_caller]
    pub fn step_until_call(&self, goal: Goal, name: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.driver.count(name) == 0 {
            assert!(matches!(self.step(goal), Step::Busy(_)) && Instant::now() < deadline, "{name} is never called");
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}
