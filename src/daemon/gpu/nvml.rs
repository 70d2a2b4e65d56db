//! NVML, in a thread of its own because its calls can take long: which GPUs and MIG slices there are, how much of their
//! memory is in use, and (by `traffic`) what moves between them and the host.
//! A host without NVML works too; then GPUs are known from the clients that use them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc;
use std::thread;

use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;
use nvml_wrapper::{Device, Nvml};
use nvshare_wire::Uuid;
use nvshare_wire::client::GpuKind;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::mpsc::error::SendError;
use tracing::{debug, info};

use super::traffic::Meter;
use crate::scheduler::{GpuId, GpuSet, Time, Traffic};
use crate::sys::clock;

/// A query of the scheduling loop.
#[derive(Debug)]
pub enum Query {
    /// Which GPUs there are, and how much memory is in use.
    Scan,
    /// The memory in use.
    Sample,
    /// The traffic between those GPUs and the host.
    Traffic(GpuSet),
}

/// The queries since the last answer: those that arrived during a slow call are merged.
#[derive(Debug, Default)]
struct Asked {
    scan: bool,
    sample: bool,
    traffic: GpuSet,
}

impl Asked {
    fn add(&mut self, ask: Query) {
        match ask {
            Query::Scan => (self.scan, self.sample) = (true, true),
            Query::Sample => self.sample = true,
            Query::Traffic(mut gpus) => self.traffic.append(&mut gpus),
        }
    }
}

/// A report to the scheduling loop.
#[derive(Debug)]
pub enum Report {
    Gpus(Vec<GpuDescription>),
    Used(Vec<Sample>),
    Driver(DriverVersions),
    Traffic(Vec<(GpuId, Traffic)>),
}

/// Versions of the NVIDIA driver and of NVML; `None` if NVML does not know them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DriverVersions {
    pub driver: Option<String>,
    pub nvml: Option<String>,
}

/// The memory in use on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    pub gpu: GpuId,
    /// When it was begun to be taken.
    pub begun: Time,
    /// Nothing changed meanwhile, so that the figures go together.
    pub steady: bool,
    /// Bytes in use in total, the driver's own included.
    pub used: u64,
    /// Bytes in use by each process, by PID; `None` where NVML has no such figures, or knows processes by the numbers of
    /// another PID namespace.
    pub processes: Option<BTreeMap<u32, u64>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuDescription {
    pub gpu: GpuId,
    pub kind: GpuKind,
    pub name: String,
    pub total: u64,
    /// NVML's number of the GPU; a slice has its GPU's.
    pub index: u32,
    /// The number of its device file; a slice has its GPU's.
    pub minor: Option<u32>,
    /// Bytes per second that copies over its PCIe link reach, by what both ends can do.
    pub link: Option<u64>,
}

/// Starts the thread. Its first reports list the GPUs and the memory in use. `None` if there is no NVML, which is logged.
pub fn start(reports: UnboundedSender<Report>) -> Option<mpsc::Sender<Query>> {
    let (answer, answered) = mpsc::channel();
    let started = thread::Builder::new().name("nvml".into()).spawn(move || serve(&reports, &answer));
    let result = match started {
        Ok(_) => answered.recv().unwrap_or_else(|e| Err(e.to_string())),
        Err(e) => Err(format!("no thread for it: {e}")),
    };
    let unusable = |e| info!(name: "no-nvml", "GPUs are known from their clients only: NVML cannot be used: {e}");
    result.map_err(unusable).ok()
}

/// The thread's loop, until the scheduling loop ends. The answer is where the thread takes queries.
fn serve(reports: &UnboundedSender<Report>, answer: &mpsc::Sender<Result<mpsc::Sender<Query>, String>>) {
    let nvml = match Nvml::init() {
        Ok(nvml) => nvml,
        Err(e) => return drop(answer.send(Err(e.to_string()))),
    };
    let (ask, requests) = mpsc::channel();
    let _ = ask.send(Query::Scan);
    let _ = answer.send(Ok(ask));
    let mut meter = Meter::default();
    while let Ok(first) = requests.recv() {
        let mut asked = Asked::default();
        asked.add(first);
        requests.try_iter().for_each(|next| asked.add(next));
        if report(&devices(&nvml), &asked, &mut meter, reports).is_err() {
            return;
        }
        if asked.scan {
            let (driver, nvml) = (nvml.sys_driver_version().ok(), nvml.sys_nvml_version().ok());
            let _ = reports.send(Report::Driver(DriverVersions { driver, nvml }));
        }
    }
}

/// Answers queries, the slowest last.
///
/// # Errors
/// If the scheduling loop has ended.
fn report(
    devices: &[Found<'_>],
    asked: &Asked,
    meter: &mut Meter,
    reports: &UnboundedSender<Report>,
) -> Result<(), SendError<Report>> {
    if asked.scan {
        reports.send(Report::Gpus(devices.iter().filter_map(describe).collect()))?;
    }
    if asked.sample {
        reports.send(Report::Used(devices.iter().filter_map(sample).collect()))?;
    }
    if !asked.traffic.is_empty() {
        let named = devices.iter().filter_map(|(device, ..)| Some((id(device)?, device)));
        let wanted = named.filter(|(gpu, _)| asked.traffic.contains(gpu));
        reports.send(Report::Traffic(wanted.map(|(gpu, device)| (gpu, meter.take(gpu, device))).collect()))?;
    }
    Ok(())
}

fn id(device: &Device<'_>) -> Option<GpuId> {
    parse_uuid(&device.uuid().ok()?).map(GpuId)
}

/// A GPU or slice, with its GPU's number for NVML and the number of its device file.
type Found<'a> = (Device<'a>, GpuKind, u32, Option<u32>);

/// Every GPU that work can run on: a GPU that is cut into slices is its slices.
fn devices(nvml: &Nvml) -> Vec<Found<'_>> {
    let mut devices = Vec::new();
    for index in 0..nvml.device_count().unwrap_or(0) {
        let Ok(device) = nvml.device_by_index(index) else { continue };
        let places = device.mig_device_count().unwrap_or(0);
        let slices: Vec<_> = (0..places).filter_map(|i| device.mig_device_by_index(i).ok()).collect();
        let minor = device.minor_number().ok();
        if slices.is_empty() {
            devices.push((device, GpuKind::Gpu, index, minor));
        } else {
            devices.extend(slices.into_iter().map(|slice| (slice, GpuKind::Mig, index, minor)));
        }
    }
    devices
}

fn describe((device, kind, index, minor): &Found<'_>) -> Option<GpuDescription> {
    let text = device.uuid().ok()?;
    let Some(uuid) = parse_uuid(&text) else {
        debug!("NVML names a GPU {text:?}, which is no UUID");
        return None;
    };
    let total = device.memory_info().ok()?.total;
    let name = device.name().unwrap_or_default();
    let (gpu, link) = (GpuId(uuid), link(device));
    Some(GpuDescription { gpu, kind: *kind, name, total, index: *index, minor: *minor, link })
}

fn link(device: &Device<'_>) -> Option<u64> {
    link_rate(device.max_pcie_link_gen().ok()?, device.max_pcie_link_width().ok()?)
}

/// Three quarters of the raw rate: an H200 reaches 46 of 59 GiB/s with copies both ways at once.
fn link_rate(generation: u32, lanes: u32) -> Option<u64> {
    // Bytes per second of a lane, less the line code: 8 of 10 bits at first, 128 of 130 from the third generation on.
    let lane: u64 = match generation {
        0 => return None,
        1 | 2 => 250_000_000 << (generation - 1),
        _ => 984_615_384 << (generation - 3).min(8),
    };
    (lanes > 0).then(|| u64::from(lanes.min(32)) * lane / 4 * 3)
}

/// Attempts to take a sample during which nothing changes.
const TRIES: usize = 3;

/// The figures of a GPU are several calls, so they are taken again if the first has changed by the last, a few times.
fn sample((device, ..): &Found<'_>) -> Option<Sample> {
    let gpu = id(device)?;
    let used = || device.memory_info().ok().map(|memory| memory.total.saturating_sub(memory.free));
    let take = || {
        let begun = clock::now();
        let before = used()?;
        let processes = device.running_compute_processes().ok().and_then(|all| by_pid(&all));
        let processes = processes.filter(|processes| are_here(processes.keys().copied()));
        Some(Sample { gpu, begun, steady: used()? == before, used: before, processes })
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

/// Whether these are process ids of this PID namespace: most of the processes exist. One may just have ended.
fn are_here(pids: impl Iterator<Item = u32>) -> bool {
    let (mut all, mut here) = (0, 0);
    for pid in pids {
        all += 1;
        here += u32::from(Path::new("/proc").join(pid.to_string()).exists());
    }
    2 * here >= all
}

/// The memory of each process; `None` if that of any process is unknown.
fn by_pid(all: &[ProcessInfo]) -> Option<BTreeMap<u32, u64>> {
    let mut processes = BTreeMap::new();
    for process in all {
        let UsedGpuMemory::Used(bytes) = process.used_gpu_memory else { return None };
        *processes.entry(process.pid).or_default() += bytes;
    }
    Some(processes)
}

/// Reads `GPU-8a6c…` and `MIG-8a6c…`.
fn parse_uuid(text: &str) -> Option<Uuid> {
    Uuid::parse(text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_known_by_its_generation_and_lanes() {
        let gib = |generation, lanes| link_rate(generation, lanes).map(|rate| rate as f64 / f64::from(1 << 30));
        assert!(gib(5, 16).is_some_and(|rate| (43.0..46.0).contains(&rate)));
        assert!(gib(3, 16).is_some_and(|rate| (10.0..12.0).contains(&rate)));
        assert!(gib(1, 1).is_some_and(|rate| rate > 0.1));
        assert!(gib(u32::MAX, u32::MAX).is_some());
        assert_eq!((link_rate(0, 16), link_rate(4, 0)), (None, None));
    }

    #[test]
    fn processes_of_another_namespace_are_not_taken_for_ours() {
        let (own, none) = (std::process::id(), u32::MAX);
        assert!(are_here([].into_iter()) && are_here([own].into_iter()) && are_here([own, none].into_iter()));
        assert!(!are_here([none].into_iter()) && !are_here([own, none, none - 1].into_iter()));
    }

    #[test]
    fn uuids_are_read_as_nvidia_smi_writes_them() {
        let text = "GPU-00112233-4455-6677-8899-aabbccddeeff";
        let uuid = parse_uuid(text).expect("a UUID");
        assert_eq!(format!("GPU-{uuid}"), text);
        assert_eq!(parse_uuid(&text.replace("GPU", "MIG")), Some(uuid));
        for wrong in ["", "GPU-", "GPU-0011", "MIG-GPU-00112233-4455-6677-8899-aabbccddeeff/1/0", &text[4..]] {
            assert_eq!(parse_uuid(wrong), None, "{wrong}");
        }
    }
}
