//! A client's thread for unit tests. The test takes its steps.

use super::{ClientThread, Sleep};
use crate::{
    connection::fake::{Scheduler, wait_for_wake},
    driver::{
        self,
        fake::{Driver, TOTAL},
        types::*,
    },
    gpu::{Gpu, fake},
    memory::engine::GRANULE,
    sys::sync::{Held, on_client_thread},
};
use alloc::vec::Vec;
use core::time::Duration;
use nvshare_wire::{ClientMessage, SchedulerMessage, version};
use std::time::Instant;

/// A client of a scheduler. It holds no lock of its GPUs.
#[derive(Debug)]
pub(super) struct Client {
    pub thread: ClientThread,
    pub gpus: Vec<(&'static Gpu, CUcontext)>,
    pub scheduler: Scheduler,
    pub driver: Driver,
    _client: Held,
}

impl Client {
    /// Connects a client with this number of GPUs. The scheduler allows all of their memory.
    pub fn new(count: usize) -> Self {
        Self::on(Driver::new(), count)
    }

    pub fn on(driver: Driver, count: usize) -> Self {
        let gpus: Vec<_> = (0..count).map(|_| fake::attach(&driver)).collect();
        let (scheduler, client) = (Scheduler::connect(), on_client_thread());
        let mut thread = ClientThread::new();
        thread.on_connect(scheduler.socket.clone(), version::MAX, 1, 0);
        let mut client = Self { thread, gpus, scheduler, driver, _client: client };
        client.step_until(|client| client.gpus.clone().iter().all(|(gpu, _)| client.thread.turn(gpu).is_over()));
        for (gpu, _) in client.gpus.clone() {
            client.allow(gpu, 0, TOTAL / GRANULE);
        }
        client.scheduler.sent();
        client
    }

    pub fn gpu(&self) -> &'static Gpu {
        self.gpus[0].0
    }

    /// Whether the entries into the driver are shut.
    pub fn is_shut() -> bool {
        let function = &driver::address::cuCtxGetCurrent;
        function.find().is_some() && function.open_address().is_none()
    }

    /// The thread carries out a message of the scheduler.
    pub fn receive(&mut self, message: SchedulerMessage) {
        if self.thread.is_off_its_gpus() {
            self.thread.receive_asleep(message, Vec::new());
        } else {
            self.thread.handle(message, Vec::new());
        }
    }

    pub fn grant(&mut self, gpu: &Gpu) {
        self.receive(SchedulerMessage::Grant { gpus: 1 << gpu.index });
        assert!(self.thread.turn(gpu).is_held());
    }

    /// Allows this number of chunks on a GPU.
    pub fn allow(&mut self, gpu: &Gpu, seq: u32, chunks: u64) {
        self.receive(SchedulerMessage::Allowance { slot: gpu.index, seq, bytes: chunks * GRANULE });
    }

    /// Allocates a chunk whose first word is `word`, and returns its address.
    pub fn allocate(&self, gpu: &Gpu, word: u32) -> u64 {
        let allocated = gpu.space().expect("a space").lock().allocate(GRANULE, 1, false, &gpu.work);
        let at = allocated.expect("room").address;
        self.driver.write(at, word);
        at
    }

    /// Takes one step. Returns the time until the next step.
    pub fn step(&mut self) -> Duration {
        if self.thread.is_off_its_gpus() { self.thread.step_asleep() } else { self.thread.step() }
    }

    #[track_caller]
    pub fn step_until(&mut self, mut is_so: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_so(self) {
            assert!(Instant::now() < deadline, "the condition never holds");
            std::thread::sleep(self.step().min(Duration::from_micros(200)));
        }
    }

    /// Takes steps as the thread does: only when one is due, or after another thread has woken this one.
    #[track_caller]
    pub fn run_until(&mut self, mut is_so: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let (wait, left) = (self.step(), deadline.saturating_duration_since(Instant::now()));
            if is_so(self) {
                return;
            }
            assert!(!left.is_zero(), "the condition never holds");
            wait_for_wake(wait.min(left));
        }
    }

    /// Prepares a sleep until the process is ready to sleep. Asks again when the client is busy, as the
    /// scheduler does: beside much other load, the threads of a test may not get to run for a second.
    /// `check` is called before each step.
    #[track_caller]
    pub fn fall_asleep(&mut self, flags: u32, check: impl Fn(&Self)) {
        self.step_until(|client| {
            check(client);
            if client.is_awake() {
                client.receive(SchedulerMessage::PrepareSleep { flags });
            }
            matches!(client.thread.sleep, Sleep::Prepared(_))
        });
    }

    /// Evicts all memory of a GPU.
    pub fn evict(&mut self, gpu: &Gpu, seq: u32) {
        self.allow(gpu, seq, 0);
        self.step_until(|_| gpu.account().is_some_and(|account| account.mapped == 0 && account.in_flight == 0));
    }

    /// The messages since the last call, without memory reports.
    pub fn sent(&self) -> Vec<ClientMessage> {
        let mut sent = self.scheduler.sent();
        sent.retain(|message| !matches!(message, ClientMessage::Memory { .. }));
        sent
    }

    pub fn is_awake(&self) -> bool {
        matches!(self.thread.sleep, Sleep::Awake)
    }
}
