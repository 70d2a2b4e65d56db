//! Traffic between GPUs and the host: over PCIe by NVML, and by page faults where the driver shows them. It is
//! measured only while a GPU may be thrashing, since NVML takes its time.

use std::collections::BTreeSet;

use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::PcieUtilCounter;
use tracing::debug;

use super::uvm::Faults;
use crate::scheduler::{GpuId, Traffic};
use crate::sys::clock;

/// NVML's unit of traffic.
const KILOBYTE: u64 = 1000;

/// Takes the figures, in the thread that talks to NVML.
#[derive(Debug, Default)]
pub struct Meter {
    faults: Faults,
    /// Figures that are not available, each of which is logged once.
    missing: BTreeSet<(GpuId, &'static str)>,
}

impl Meter {
    /// Takes 40 ms.
    pub fn take(&mut self, gpu: GpuId, device: &Device<'_>) -> Traffic {
        let faults = self.faults.rate(gpu, clock::now());
        // As the GPU sees it.
        let mut moves = |counter| {
            let rate = device.pcie_throughput(counter).map(|rate| u64::from(rate) * KILOBYTE);
            rate.map_err(|e| self.note(gpu, "its PCIe traffic", &e)).ok()
        };
        let (to_gpu, from_gpu) = (moves(PcieUtilCounter::Receive), moves(PcieUtilCounter::Send));
        Traffic { to_gpu, from_gpu, faults: faults.map_err(|e| self.note(gpu, "its page faults", &e)).ok().flatten() }
    }

    fn note(&mut self, gpu: GpuId, what: &'static str, why: &dyn std::fmt::Display) {
        if self.missing.insert((gpu, what)) {
            debug!(gpu = %gpu.0, "thrashing is detected without {what}: {why}");
        }
    }
}
