//! Calls of an initialised NVML: the existing GPUs and MIG slices, and the memory in use on each of
//! them.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};
use nvshare_wire::Uuid;
use nvshare_wire::client::GpuKind;
use tracing::debug;

use super::fabric::has_fabric;
use super::{GpuDescription, Sample};
use crate::gpu_faults::nvml::advice;
use crate::gpu_faults::{FaultAnswer, Faults};
use crate::scheduler::GpuId;
use crate::sys::clock;

/// A GPU or a MIG slice.
pub struct Found<'a> {
    pub device: Device<'a>,
    pub gpu: GpuId,
    kind: GpuKind,
    /// NVML's index of the GPU, and the minor number of its device file.
    index: u32,
    minor: Option<u32>,
}

/// The GPUs and MIG slices that NVML lists.
#[derive(Default)]
pub struct Devices<'a> {
    pub found: Vec<Found<'a>>,
    /// The error of a call that should have succeeded. If there is an error, `found` may lack existing
    /// GPUs.
    pub error: Option<NvmlError>,
}

impl<'a> Devices<'a> {
    /// Lists every GPU that can run work. A GPU in MIG mode is represented by its slices. GPUs that NVML
    /// reports as lost are left out.
    pub fn list(nvml: &'a Nvml) -> Self {
        let mut devices = Self::default();
        match nvml.device_count() {
            Ok(count) => (0..count).for_each(|index| devices.add_gpu(nvml, index)),
            Err(e) => devices.error = Some(e),
        }
        devices
    }

    /// The error, if a call failed and no GPU was listed.
    pub fn broken(&mut self) -> Option<NvmlError> {
        self.error.take_if(|_| self.found.is_empty())
    }

    fn add_gpu(&mut self, nvml: &'a Nvml, index: u32) {
        let Some(device) = self.answer(nvml.device_by_index(index)) else { return };
        let minor = device.minor_number().ok();
        // A GPU in MIG mode cannot run work as a whole, even if it has no slices.
        if !device.mig_mode().is_ok_and(|mode| mode.current == MIG_ENABLED) {
            return self.add(device, GpuKind::Gpu, index, minor);
        }
        let Some(places) = self.answer(device.mig_device_count()) else { return };
        for place in 0..places {
            match device.mig_device_by_index(place) {
                Ok(slice) => self.add(slice, GpuKind::Mig, index, minor),
                Err(NvmlError::NotFound) => {} // a slot without a slice
                Err(e) => self.error = Some(e),
            }
        }
    }

    fn add(&mut self, device: Device<'a>, kind: GpuKind, index: u32, minor: Option<u32>) {
        let Some(text) = self.answer(device.uuid()) else { return };
        match parse_uuid(&text) {
            Some(uuid) => self.found.push(Found { device, gpu: GpuId(uuid), kind, index, minor }),
            None => debug!("NVML returned an invalid GPU UUID: {text:?}"),
        }
    }

    /// The value that a call about one GPU returned. Returns `None` after an error, and records the
    /// error in `error` unless it means that the GPU is unusable.
    fn answer<T>(&mut self, result: Result<T, NvmlError>) -> Option<T> {
        use NvmlError::{GpuLost, NoPermission, ResetRequired};
        match result {
            Ok(answer) => return Some(answer),
            Err(GpuLost | ResetRequired | NoPermission) => {}
            Err(e) => self.error = Some(e),
        }
        None
    }

    /// Describes all GPUs. If a call about a GPU fails, leaves the GPU out and records the error in
    /// `error`.
    pub fn describe(&mut self) -> Vec<GpuDescription> {
        let mut described = Vec::with_capacity(self.found.len());
        for Found { device, gpu, kind, index, minor } in &self.found {
            match device.memory_info() {
                Ok(memory) => described.push(GpuDescription {
                    gpu: *gpu,
                    kind: *kind,
                    name: device.name().unwrap_or_default(),
                    total: memory.total,
                    index: *index,
                    minor: *minor,
                    capability: device.cuda_compute_capability().ok().map(|is| (is.major, is.minor)),
                    link: link(device),
                    has_display: device.is_display_active().is_ok_and(|is| is)
                        || device.is_display_connected().is_ok_and(|is| is),
                    has_fabric: *kind == GpuKind::Gpu && has_fabric(device),
                }),
                Err(e) => self.error = Some(e),
            }
        }
        described
    }

    /// The GPUs with faults, each with its fault. A MIG slice has the faults of its physical GPU.
    pub fn failing(&self, nvml: &Nvml, faults: &mut Faults) -> BTreeMap<GpuId, String> {
        let uuids = self.found.iter().filter_map(|found| Some((found, nvml.device_by_index(found.index).ok()?)));
        let uuids = uuids.filter_map(|(found, board)| Some((found, board.uuid().ok()?, board)));
        let found: Vec<(&Found<'_>, String, Device<'_>)> = uuids.collect();
        faults.only_there(&found.iter().map(|(_, uuid, _)| uuid.clone()).collect());
        let fault = |(found, uuid, board): (&Found<'_>, String, Device<'_>)| {
            Some((found.gpu, faults.answered(&uuid, &FaultAnswer::There(advice(&board)), Instant::now())?))
        };
        found.into_iter().filter_map(fault).collect()
    }

    /// The memory in use on each GPU.
    pub fn sample(&self) -> Vec<Sample> {
        self.found.iter().filter_map(sample).collect()
    }
}

/// `NVML_DEVICE_MIG_ENABLE`
const MIG_ENABLED: u32 = 1;

fn link(device: &Device<'_>) -> Option<u64> {
    link_rate(device.max_pcie_link_gen().ok()?, device.max_pcie_link_width().ok()?)
}

/// Rate of copies that a PCIe link achieves, in bytes per second: three quarters of its raw rate. An
/// H200 reaches 46 of 59 GiB/s with copies in both directions.
fn link_rate(generation: u32, lanes: u32) -> Option<u64> {
    // Raw bytes per second of a lane, after line coding: 8 of 10 bits in generations 1 and 2, 128 of 130
    // bits from generation 3 on.
    let lane: u64 = match generation {
        0 => return None,
        1 | 2 => 250_000_000 << (generation - 1),
        _ => 984_615_384 << (generation - 3).min(8),
    };
    (lanes > 0).then(|| u64::from(lanes.min(32)) * lane / 4 * 3)
}

/// Maximum number of attempts to take a consistent sample.
const TRIES: usize = 3;

/// Samples a GPU with several calls. If the memory in use has changed between the first and the
/// last call, samples again, up to `TRIES` times in all.
fn sample(Found { device, gpu, .. }: &Found<'_>) -> Option<Sample> {
    let memory = || device.memory_info().ok().map(|memory| (memory.total.saturating_sub(memory.free), memory.reserved));
    let take = || {
        let begun = clock::now();
        let (used, reserved) = memory()?;
        let processes = device.running_compute_processes().ok().and_then(|all| by_pid(&all));
        let processes = processes.filter(|processes| are_here(processes.keys().copied()));
        let graphics = device.running_graphics_processes().unwrap_or_default();
        let graphics = processes.as_ref().map_or(0, |listed| graphics_only(&graphics, listed));
        Some(Sample { gpu: *gpu, begun, steady: memory()?.0 == used, used, reserved, graphics, processes })
    };
    let mut sample = take()?;
    for _ in 1..TRIES {
        if sample.steady {
            break;
        }
        sample = take()?;
    }
    Some(sample)
}

/// True if these process IDs belong to this PID namespace. At least half of the processes must
/// exist in `/proc`. The others may just have exited.
fn are_here(pids: impl Iterator<Item = u32>) -> bool {
    let (mut all, mut here) = (0, 0);
    for pid in pids {
        all += 1;
        here += u32::from(Path::new("/proc").join(pid.to_string()).exists());
    }
    2 * here >= all
}

/// Memory in use by each process. `None` if NVML does not know the memory of every process.
fn by_pid(all: &[ProcessInfo]) -> Option<BTreeMap<u32, u64>> {
    let mut processes = BTreeMap::new();
    for process in all {
        let UsedGpuMemory::Used(bytes) = process.used_gpu_memory else { return None };
        *processes.entry(process.pid).or_default() += bytes;
    }
    Some(processes)
}

/// Memory in use by the processes of a list of graphics programs that are not among `listed`.
fn graphics_only(all: &[ProcessInfo], listed: &BTreeMap<u32, u64>) -> u64 {
    let bytes = |process: &ProcessInfo| match process.used_gpu_memory {
        UsedGpuMemory::Used(bytes) if !listed.contains_key(&process.pid) => bytes,
        UsedGpuMemory::Used(_) | UsedGpuMemory::Unavailable => 0,
    };
    all.iter().map(bytes).fold(0, u64::saturating_add)
}

/// Parses NVML's UUIDs, such as `GPU-8a6c…` and `MIG-8a6c…`.
fn parse_uuid(text: &str) -> Option<Uuid> {
    Uuid::parse(text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_rate_follows_from_pcie_generation_and_lanes() {
        let gib = |generation, lanes| link_rate(generation, lanes).map(|rate| rate as f64 / f64::from(1 << 30));
        assert!(gib(5, 16).is_some_and(|rate| (43.0..46.0).contains(&rate)));
        assert!(gib(3, 16).is_some_and(|rate| (10.0..12.0).contains(&rate)));
        assert!(gib(1, 1).is_some_and(|rate| rate > 0.1));
        assert!(gib(u32::MAX, u32::MAX).is_some());
        assert_eq!((link_rate(0, 16), link_rate(4, 0)), (None, None));
    }

    #[test]
    fn pids_of_another_namespace_are_detected() {
        let (own, none) = (std::process::id(), u32::MAX);
        assert!(are_here([].into_iter()) && are_here([own].into_iter()) && are_here([own, none].into_iter()));
        assert!(!are_here([none].into_iter()) && !are_here([own, none, none - 1].into_iter()));
    }

    #[test]
    fn uuids_are_parsed_in_nvidia_smi_format() {
        let text = "GPU-00112233-4455-6677-8899-aabbccddeeff";
        let uuid = parse_uuid(text).expect("a UUID");
        assert_eq!(format!("GPU-{uuid}"), text);
        assert_eq!(parse_uuid(&text.replace("GPU", "MIG")), Some(uuid));
        for wrong in ["", "GPU-", "GPU-0011", "MIG-GPU-00112233-4455-6677-8899-aabbccddeeff/1/0", &text[4..]] {
            assert_eq!(parse_uuid(wrong), None, "{wrong}");
        }
    }
}
