//! Queries NVML for GPUs and slices, their NUMA nodes, and their faults. The queries run in a separate
//! thread, because NVML's calls can be slow. Events and queries detect faults. If the driver does
//! not support events, only queries detect faults. After a failure, NVML is initialized again. In
//! this way, the plugin detects a driver that is loaded later or reloaded.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper::enum_wrappers::device::Brand;
use nvml_wrapper::enums::device::DeviceArchitecture;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, EventSet, Nvml, cuda_driver_version_major, cuda_driver_version_minor};
use nvshare::gpu_faults::nvml::{advice, event, watch as watch_events};
use nvshare::gpu_faults::{Event, FaultAnswer, Faults};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;
use tracing::{debug, info};

use super::Report;
use crate::config::Config;
use crate::devices::{NvmlGpu, Properties};

/// Linux's directory of PCI devices.
const PCI_DEVICES: &str = "/sys/bus/pci/devices";

/// Starts the thread, which ends when the receiver of reports is dropped.
pub fn start(config: watch::Receiver<Arc<Config>>, reports: UnboundedSender<Report>) -> std::io::Result<()> {
    let thread = thread::Builder::new().name("nvml".into());
    thread.spawn(move || {
        drop(Watch { config, reports, faults: Faults::default(), boards: Vec::new(), said: None }.run())
    })?;
    Ok(())
}

/// A physical GPU, with its MIG slices if it has any. A fault concerns the whole board.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Board {
    uuid: String,
    index: u32,
    /// The GPUs that programs can use: the board itself, or its slices.
    gpus: Vec<NvmlGpu>,
}

struct Watch {
    config: watch::Receiver<Arc<Config>>,
    reports: UnboundedSender<Report>,
    faults: Faults,
    /// The boards at the last scan.
    boards: Vec<Board>,
    /// The last log line about NVML or its events.
    said: Option<String>,
}

/// The receiver of reports was dropped.
struct Unheard;

impl Watch {
    fn run(mut self) -> Result<(), Unheard> {
        loop {
            match Nvml::init() {
                Ok(nvml) => self.session(&nvml)?,
                Err(e) => {
                    let why = format!("NVML cannot be used: {e}");
                    self.say(why.clone());
                    if self.boards.is_empty() {
                        self.reports.send(Report::Nvml(None)).map_err(|_| Unheard)?;
                    } else {
                        self.report(|_| FaultAnswer::Lost(why.clone()))?;
                    }
                    thread::sleep(self.interval());
                }
            }
        }
    }

    /// Logs a line unless it equals the previous line.
    fn say(&mut self, text: String) {
        if self.said.as_ref() != Some(&text) {
            info!("{text}");
            self.said = Some(text);
        }
    }

    fn interval(&self) -> Duration {
        self.config.borrow().health.query_interval
    }

    /// Watches until GPUs are added or removed, or a GPU does not answer. NVML must then be
    /// initialized again.
    fn session(&mut self, nvml: &Nvml) -> Result<(), Unheard> {
        self.boards = scan(nvml, &self.boards);
        let events = self.events(nvml);
        loop {
            let is_lost = self.query(nvml)?;
            let until = Instant::now() + self.interval();
            let is_broken = match &events {
                Some(events) => self.listen(nvml, events, until)?,
                None => false,
            };
            thread::sleep(until.saturating_duration_since(Instant::now()));
            if is_lost || is_broken || scan(nvml, &self.boards) != self.boards {
                return Ok(());
            }
        }
    }

    /// Registers for the events of all GPUs that support events.
    fn events<'nvml>(&mut self, nvml: &'nvml Nvml) -> Option<EventSet<'nvml>> {
        let devices = self.boards.iter().filter_map(|board| nvml.device_by_index(board.index).ok());
        let (events, able) = watch_events(nvml, devices.collect());
        let all = able == self.boards.len();
        let seconds = self.interval().as_secs();
        self.say(match &events {
            Some(_) if all => {
                format!("watching driver events of {able} GPUs, and polling all GPUs every {seconds} s")
            }
            Some(_) => format!("some GPUs support no events, polling those every {seconds} s"),
            None if self.boards.is_empty() => "NVML shows no GPU".to_owned(),
            None => format!("the driver supports no events, polling GPUs every {seconds} s"),
        });
        events
    }

    /// Handles events until the time `until`. Returns true if waiting for events no longer works.
    fn listen(&mut self, nvml: &Nvml, events: &EventSet<'_>, until: Instant) -> Result<bool, Unheard> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let Ok(milliseconds @ 1..) = u32::try_from(left.as_millis()) else { return Ok(false) };
            match events.wait(milliseconds) {
                Ok(data) => {
                    let Some(what) = event(&data) else { continue };
                    self.happened(&data.device, what);
                    self.query(nvml)?;
                }
                Err(NvmlError::Timeout) => {}
                Err(e) => {
                    debug!("cannot receive further events: {e}");
                    self.query(nvml)?;
                    return Ok(true);
                }
            }
        }
    }

    fn happened(&mut self, device: &Device<'_>, event: Event) {
        let Ok(uuid) = device.uuid() else { return };
        let config = self.config.borrow().clone();
        match self.faults.happened(&uuid, event, &config.health.ignored_xids, Instant::now()) {
            true => info!("{uuid}: {event:?}"),
            false => debug!("{uuid}: ignoring {event:?}, which does not make the GPU unhealthy"),
        }
    }

    /// Queries each GPU and reports the results. Returns true if a GPU does not answer.
    fn query(&mut self, nvml: &Nvml) -> Result<bool, Unheard> {
        let mut is_lost = false;
        self.report(|board| {
            let answer = ask(nvml, board);
            is_lost |= !matches!(answer, FaultAnswer::There(_));
            answer
        })?;
        Ok(is_lost)
    }

    fn report(&mut self, mut answers: impl FnMut(&Board) -> FaultAnswer) -> Result<(), Unheard> {
        let mut gpus = Vec::new();
        for board in &self.boards {
            let trouble = self.faults.answered(&board.uuid, &answers(board), Instant::now());
            gpus.extend(board.gpus.iter().map(|gpu| NvmlGpu { trouble: trouble.clone(), ..gpu.clone() }));
        }
        self.reports.send(Report::Nvml(Some(gpus))).map_err(|_| Unheard)
    }
}

/// Checks a GPU by querying its memory. `NotSupported` also counts as an answer, because GPUs that
/// use the host's memory do not support this query.
fn ask(nvml: &Nvml, board: &Board) -> FaultAnswer {
    let asked = nvml.device_by_uuid(board.uuid.as_str()).and_then(|device| match device.memory_info() {
        Ok(_) | Err(NvmlError::NotSupported) => Ok(advice(&device)),
        Err(e) => Err(e),
    });
    match asked {
        Ok(advice) => FaultAnswer::There(advice),
        Err(e @ (NvmlError::GpuLost | NvmlError::DriverNotLoaded | NvmlError::NotFound)) => {
            FaultAnswer::Lost(e.to_string())
        }
        Err(e) => FaultAnswer::Silent(e.to_string()),
    }
}

/// Scans all boards. For a board that does not answer, returns its earlier description.
fn scan(nvml: &Nvml, before: &[Board]) -> Vec<Board> {
    let Ok(count) = nvml.device_count() else { return before.to_vec() };
    let known: BTreeMap<u32, &Board> = before.iter().map(|board| (board.index, board)).collect();
    (0..count)
        .filter_map(|index| board(nvml, index).or_else(|| known.get(&index).map(|board| (*board).clone())))
        .collect()
}

fn board(nvml: &Nvml, index: u32) -> Option<Board> {
    let device = nvml.device_by_index(index).ok()?;
    let address = address(&device);
    let numa = address.as_ref().and_then(|address| numa_node(PCI_DEVICES.as_ref(), address));
    let minor = device.minor_number().ok();
    let properties = Properties {
        pcie_root: address.as_ref().and_then(|address| pcie_root(PCI_DEVICES.as_ref(), address)),
        pci_bus_id: address,
        ..properties(nvml, &device)
    };
    let uuid = device.uuid().ok()?;
    let gpu = |device: &Device<'_>, properties: Properties| {
        let (uuid, name) = (device.uuid().ok()?, device.name().unwrap_or_default());
        Some(NvmlGpu { uuid, name, index, minor, numa, properties, trouble: None })
    };
    let places = device.mig_device_count().unwrap_or(0);
    let slices = (0..places).filter_map(|place| {
        let slice = device.mig_device_by_index(place).ok()?;
        let profile = slice.name().ok().and_then(|name| Some(name.split_once(" MIG ")?.1.to_owned()));
        gpu(&slice, Properties { parent: Some(uuid.clone()), profile, ..properties.clone() })
    });
    let mut gpus: Vec<NvmlGpu> = slices.collect();
    if gpus.is_empty() {
        gpus.push(gpu(&device, properties)?);
    }
    Some(Board { uuid, index, gpus })
}

/// A GPU's properties, except the properties that Linux provides.
fn properties(nvml: &Nvml, device: &Device<'_>) -> Properties {
    let capability = device.cuda_compute_capability().ok();
    let cuda = nvml.sys_cuda_driver_version().ok();
    Properties {
        architecture: device.architecture().ok().and_then(|architecture| architecture_name(&architecture)),
        brand: device.brand().ok().and_then(brand_name),
        compute_capability: capability.map(|capability| format!("{}.{}.0", capability.major, capability.minor)),
        driver_version: nvml.sys_driver_version().ok().and_then(|text| version(&text)),
        cuda_driver_version: cuda
            .map(|cuda| format!("{}.{}.0", cuda_driver_version_major(cuda), cuda_driver_version_minor(cuda))),
        ..Properties::default()
    }
}

/// Returns an architecture's name in NVIDIA's DRA driver.
fn architecture_name(architecture: &DeviceArchitecture) -> Option<&'static str> {
    Some(match architecture {
        DeviceArchitecture::Kepler => "Kepler",
        DeviceArchitecture::Maxwell => "Maxwell",
        DeviceArchitecture::Pascal => "Pascal",
        DeviceArchitecture::Volta => "Volta",
        DeviceArchitecture::Turing => "Turing",
        DeviceArchitecture::Ampere => "Ampere",
        DeviceArchitecture::Ada => "Ada Lovelace",
        DeviceArchitecture::Hopper => "Hopper",
        DeviceArchitecture::Blackwell => "Blackwell",
        DeviceArchitecture::Unknown => return None,
    })
}

/// Returns a brand's name in NVIDIA's DRA driver.
fn brand_name(brand: Brand) -> Option<&'static str> {
    Some(match brand {
        Brand::Unknown => return None,
        Brand::Quadro => "Quadro",
        Brand::Tesla => "Tesla",
        Brand::NVS => "NVS",
        Brand::GRID => "Grid",
        Brand::GeForce => "GeForce",
        Brand::Titan => "Titan",
        Brand::VApps => "NvidiaVApps",
        Brand::VPC => "NvidiaVPC",
        Brand::VCS => "NvidiaVCS",
        Brand::VWS => "NvidiaVWS",
        Brand::CloudGaming | Brand::VGaming => "NvidiaCloudGaming",
        Brand::QuadroRTX => "QuadroRTX",
        Brand::NvidiaRTX => "NvidiaRTX",
        Brand::Nvidia => "Nvidia",
        Brand::GeForceRTX => "GeForceRTX",
        Brand::TitanRTX => "TitanRTX",
    })
}

/// Converts a driver's version to a semantic version, which has three numbers without leading
/// zeros.
fn version(text: &str) -> Option<String> {
    let numbers: Option<Vec<u32>> = text.split('.').map(|number| number.parse().ok()).collect();
    match numbers?[..] {
        [major, minor] => Some(format!("{major}.{minor}.0")),
        [major, minor, patch] => Some(format!("{major}.{minor}.{patch}")),
        _ => None,
    }
}

/// A GPU's address in Linux's notation.
fn address(device: &Device<'_>) -> Option<String> {
    let pci = device.pci_info().ok()?;
    Some(format!("{:04x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device))
}

/// Returns the root of a device's PCIe hierarchy, from the device's path in Linux's device tree.
fn pcie_root(devices: &Path, address: &str) -> Option<String> {
    let place = std::fs::read_link(devices.join(address)).ok()?;
    let names = place.iter().filter_map(|name| name.to_str());
    names.map(str::to_owned).find(|name| name.starts_with("pci") && name.contains(':'))
}

/// Returns a device's NUMA node. For a device without a NUMA node, Linux shows -1.
fn numa_node(devices: &Path, address: &str) -> Option<u32> {
    std::fs::read_to_string(devices.join(address).join("numa_node")).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numa_node_is_read_from_sysfs() {
        let directory = std::env::temp_dir().join(format!("nvshare-plugin-numa-{}", std::process::id()));
        for (address, text) in [("0000:10:00.0", "1\n"), ("0000:11:00.0", "-1\n")] {
            let device = directory.join(address);
            std::fs::create_dir_all(&device).expect("a directory");
            std::fs::write(device.join("numa_node"), text).expect("a file");
        }
        assert_eq!(numa_node(&directory, "0000:10:00.0"), Some(1));
        assert_eq!(numa_node(&directory, "0000:11:00.0"), None);
        assert_eq!(numa_node(&directory, "0000:12:00.0"), None);
        std::fs::remove_dir_all(directory).expect("it is removed");
    }

    #[test]
    fn the_pcie_root_is_the_first_component_of_the_sysfs_path() {
        let directory = std::env::temp_dir().join(format!("nvshare-plugin-root-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let place = "../../../devices/pci0000:64/0000:64:01.0/0000:65:00.0";
        std::os::unix::fs::symlink(place, directory.join("0000:65:00.0")).expect("a link");
        assert_eq!(pcie_root(&directory, "0000:65:00.0").as_deref(), Some("pci0000:64"));
        assert_eq!(pcie_root(&directory, "0000:66:00.0"), None);
        std::fs::remove_dir_all(directory).expect("it is removed");
    }

    #[test]
    fn driver_versions_are_semantic_versions() {
        for (text, expected) in [
            ("570.86.15", Some("570.86.15")),
            ("535.54.03", Some("535.54.3")),
            ("470.256", Some("470.256.0")),
            ("580", None),
            ("570.1a.2", None),
        ] {
            assert_eq!(version(text).as_deref(), expected, "{text}");
        }
    }
}
