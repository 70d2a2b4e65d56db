//! What a debug bundle has of the scheduling loop.

use super::Hub;
use crate::daemon::bundle::Snapshot;
use crate::sys::clock;

impl Hub {
    /// A copy, so that nothing of it is formatted or written on the scheduling loop.
    pub fn debug_snapshot(&self) -> Snapshot {
        let samples = self.gpus.iter().filter_map(|(id, gpu)| Some((gpu.label(*id), gpu.sample.clone()?)));
        Snapshot {
            now: clock::now(),
            config: self.config.clone(),
            gpus: self.list_gpus(),
            clients: self.list_clients(),
            samples: samples.collect(),
            driver: self.driver.clone(),
            recording: self.recorder.recording(),
        }
    }
}
