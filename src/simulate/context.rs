//! State that all programs share: the time, messages, the engines and links of GPUs, and
//! statistics.

use super::engines::Engines;
use super::link::Link;
use super::queue::{Happening, Queue};
use super::statistics::Statistics;
use crate::scheduler::{Event, GpuId, Time, Uuid};

#[derive(Debug)]
pub struct Context {
    pub now: Time,
    pub queue: Queue,
    pub engines: Engines,
    pub links: Vec<Link>,
    pub statistics: Statistics,
}

impl Context {
    /// Sends an event to the scheduler.
    pub fn send(&mut self, event: Event) {
        self.queue.send(self.now, event);
    }

    pub fn at(&mut self, at: Time, what: Happening) {
        self.queue.at(at, what);
    }
}

/// Returns the id of the GPU with the index `place`.
pub fn gpu_id(place: usize) -> GpuId {
    let mut bytes = [0; 16];
    let (_, last) = bytes.split_at_mut(8);
    last.copy_from_slice(&(place as u64).to_be_bytes());
    GpuId(Uuid(bytes))
}

/// Returns the index of a GPU.
pub fn place_of(gpu: GpuId) -> usize {
    let last = gpu.0.0.iter().skip(8);
    last.fold(0, |place, byte| place << 8 | usize::from(*byte))
}
