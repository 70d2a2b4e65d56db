//! The devices for kubelet, which are the slots of each GPU. This module computes the list from the
//! configuration and the reports of NVML, the scheduler and CDI, without I/O.

use crate::cdi::CdiView;
use crate::config::{Config, Inject, Offer};

/// A GPU or MIG slice, as NVML reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmlGpu {
    pub uuid: String,
    pub name: String,
    /// NVML's index. A slice has the index of its GPU.
    pub index: u32,
    /// The number of the device file. A slice has the number of its GPU.
    pub minor: Option<u32>,
    /// The GPU's NUMA node. `None` if the host has only one node.
    pub numa: Option<u32>,
    pub properties: Properties,
    /// The reason why no new program should run on the GPU.
    pub trouble: Option<String>,
}

/// The properties of a GPU that claims can select, as far as NVML knows them. Names and texts are
/// the same as in NVIDIA's DRA driver.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Properties {
    pub architecture: Option<&'static str>,
    pub brand: Option<&'static str>,
    /// The compute capability. Versions have three numbers, because Kubernetes compares semantic
    /// versions.
    pub compute_capability: Option<String>,
    pub driver_version: Option<String>,
    pub cuda_driver_version: Option<String>,
    /// The GPU's address in Linux's notation: `0000:65:00.0`.
    pub pci_bus_id: Option<String>,
    /// The root of the GPU's PCIe hierarchy: `pci0000:64`.
    pub pcie_root: Option<String>,
    /// For a MIG slice, the GPU and the slice's profile: `1g.10gb`.
    pub parent: Option<String>,
    pub profile: Option<String>,
}

/// A GPU or MIG slice that the scheduler manages.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SchedulerGpu {
    pub uuid: String,
    pub name: String,
    pub index: Option<u32>,
    /// Size of the memory in bytes.
    pub total: u64,
    /// Whether an administrator has drained the GPU.
    pub drained: bool,
}

/// The scheduler's report.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SchedulerView {
    /// The scheduler's newest list of GPUs.
    pub gpus: Vec<SchedulerGpu>,
    /// The reason why the scheduler counts as silent. `None` if the scheduler answers.
    pub silence: Option<String>,
}

/// A GPU or MIG slice with slots for containers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Gpu {
    pub uuid: String,
    /// The model's name.
    pub model: String,
    pub index: Option<u32>,
    pub minor: Option<u32>,
    pub numa: Option<u32>,
    pub properties: Properties,
    pub slots: u32,
    pub offer: Offer,
    /// Size of the memory in bytes. `None` until the scheduler has listed the GPU.
    pub memory: Option<u64>,
    pub drained: bool,
    /// The reason why the GPU is unhealthy.
    pub problem: Option<String>,
}

impl Gpu {
    /// Returns the names of the GPU's devices. The names stay the same after restarts, and are
    /// shorter than the limit of 63 characters.
    pub fn ids(&self) -> impl Iterator<Item = String> {
        (0..self.slots).map(|slot| self.id(slot))
    }

    pub fn id(&self, slot: u32) -> String {
        format!("{}{SEPARATOR}{slot}", self.uuid)
    }
}

const SEPARATOR: &str = "::";

/// All GPUs, sorted by number and UUID.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Devices {
    pub gpus: Vec<Gpu>,
}

impl Devices {
    /// Combines the reports. Without NVML, the scheduler's report alone determines the list.
    pub fn new(config: &Config, nvml: Option<&[NvmlGpu]>, scheduler: &SchedulerView, cdi: &CdiView) -> Self {
        let listed = |uuid: &str| scheduler.gpus.iter().find(|gpu| gpu.uuid == uuid);
        let unserved = |uuid: &str| match &scheduler.silence {
            Some(why) => Some(why.clone()),
            None if listed(uuid).is_none() => Some("the scheduler does not list it".to_owned()),
            None => None,
        };
        // This reason applies only if there is no other, because without a scheduler the CDI file
        // is missing too.
        let unreachable = |uuid: &str| match config.inject {
            Inject::Cdi => cdi.problem(&config.cdi_kind, uuid),
            Inject::Mounts => None,
        };
        let shown = nvml.unwrap_or_default().iter().map(|gpu| Gpu {
            uuid: gpu.uuid.clone(),
            model: gpu.name.clone(),
            index: Some(gpu.index),
            minor: gpu.minor,
            numa: gpu.numa,
            properties: gpu.properties.clone(),
            slots: config.slots_of(&gpu.uuid, Some(gpu.index), &gpu.name),
            offer: config.offer_of(&gpu.uuid, Some(gpu.index), &gpu.name),
            memory: listed(&gpu.uuid).map(|listed| listed.total),
            drained: listed(&gpu.uuid).is_some_and(|listed| listed.drained),
            problem: gpu.trouble.clone().or_else(|| unserved(&gpu.uuid)).or_else(|| unreachable(&gpu.uuid)),
        });
        let unseen = |uuid: &str| {
            let is_seen = nvml.is_none_or(|shown| shown.iter().any(|gpu| gpu.uuid == uuid));
            (!is_seen).then(|| "NVML does not show it".to_owned())
        };
        let is_shown = |uuid: &str| nvml.unwrap_or_default().iter().any(|gpu| gpu.uuid == uuid);
        let others = scheduler.gpus.iter().filter(|gpu| !is_shown(&gpu.uuid)).map(|gpu| Gpu {
            uuid: gpu.uuid.clone(),
            model: gpu.name.clone(),
            index: gpu.index,
            minor: None,
            numa: None,
            properties: Properties::default(),
            slots: config.slots_of(&gpu.uuid, gpu.index, &gpu.name),
            offer: config.offer_of(&gpu.uuid, gpu.index, &gpu.name),
            memory: Some(gpu.total),
            drained: gpu.drained,
            problem: unserved(&gpu.uuid).or_else(|| unseen(&gpu.uuid)).or_else(|| unreachable(&gpu.uuid)),
        });
        let mut gpus: Vec<Gpu> = shown.chain(others).filter(|gpu| gpu.slots > 0).collect();
        gpus.sort_by(|one, other| {
            let key = |gpu: &Gpu| (gpu.index.is_none(), gpu.index);
            key(one).cmp(&key(other)).then_with(|| one.uuid.cmp(&other.uuid))
        });
        gpus.dedup_by(|one, other| one.uuid == other.uuid);
        Self { gpus }
    }

    /// The GPUs that this API offers.
    pub fn offered_by(&self, offer: Offer) -> Self {
        Self { gpus: self.gpus.iter().filter(|gpu| gpu.offer == offer).cloned().collect() }
    }

    /// Returns the position of a device's GPU, and the slot's number.
    pub fn find(&self, id: &str) -> Option<(usize, u32)> {
        let (uuid, slot) = id.rsplit_once(SEPARATOR)?;
        let (at, gpu) = self.gpus.iter().enumerate().find(|(_, gpu)| gpu.uuid == uuid)?;
        let number = slot.parse().ok().filter(|number| *number < gpu.slots)?;
        // Only names that `id` returns are valid. For example, `+1` and `01` are invalid.
        (gpu.id(number) == id).then_some((at, number))
    }

    pub fn gpu(&self, at: usize) -> Option<&Gpu> {
        self.gpus.get(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(uuid: &str, index: u32) -> NvmlGpu {
        let properties = Properties::default();
        NvmlGpu {
            uuid: uuid.into(),
            name: "Test".into(),
            index,
            minor: Some(index),
            numa: Some(1),
            properties,
            trouble: None,
        }
    }

    fn listed(uuids: &[&str]) -> SchedulerView {
        let gpu = |uuid: &&str| SchedulerGpu { uuid: (*uuid).into(), name: "Test".into(), ..Default::default() };
        SchedulerView { gpus: uuids.iter().map(gpu).collect(), silence: None }
    }

    /// With mounts, no CDI device can be missing.
    fn mounted() -> Config {
        Config { inject: Inject::Mounts, ..Config::default() }
    }

    fn problems(devices: &Devices) -> Vec<(&str, Option<&str>)> {
        devices.gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu.problem.as_deref())).collect()
    }

    #[test]
    fn a_gpu_is_healthy_if_nvml_and_the_scheduler_list_it() {
        let config = mounted();
        let mut nvml = [seen("GPU-b", 1), seen("GPU-a", 0), seen("GPU-c", 2)];
        nvml[2].trouble = Some("XID 79".into());
        let devices = Devices::new(&config, Some(&nvml), &listed(&["GPU-a", "GPU-c", "GPU-d"]), &CdiView::default());
        let expected = [
            ("GPU-a", None),
            ("GPU-b", Some("the scheduler does not list it")),
            ("GPU-c", Some("XID 79")),
            ("GPU-d", Some("NVML does not show it")),
        ];
        assert_eq!(problems(&devices), expected);
    }

    #[test]
    fn without_nvml_the_scheduler_determines_health() {
        let devices = Devices::new(&mounted(), None, &listed(&["GPU-a"]), &CdiView::default());
        assert_eq!(problems(&devices), [("GPU-a", None)]);
    }

    #[test]
    fn a_gpu_that_cannot_be_injected_is_unhealthy() {
        let devices = Devices::new(&Config::default(), None, &listed(&["GPU-a"]), &CdiView::default());
        let said = devices.gpus[0].problem.as_deref().unwrap_or_default();
        assert!(said.contains("names \"nvshare.com/gpu=GPU-a\""), "{said}");
    }

    #[test]
    fn a_silent_scheduler_makes_its_last_listed_gpus_unhealthy() {
        let scheduler = SchedulerView { silence: Some("it is gone".into()), ..listed(&["GPU-a"]) };
        let devices = Devices::new(&mounted(), Some(&[seen("GPU-b", 0)]), &scheduler, &CdiView::default());
        assert_eq!(problems(&devices), [("GPU-b", Some("it is gone")), ("GPU-a", Some("it is gone"))]);
    }

    #[test]
    fn each_gpu_is_offered_by_one_api() {
        let text = "[[gpu]]\ngpu = 1\nslots = 3\noffer = \"dra\"";
        let config = Config::parse(text, "x".as_ref()).expect("it is right");
        let nvml = [seen("GPU-a", 0), seen("GPU-b", 1)];
        let devices = Devices::new(&config, Some(&nvml), &listed(&["GPU-a", "GPU-c"]), &CdiView::default());
        let names = |offer| devices.offered_by(offer).gpus.into_iter().map(|gpu| gpu.uuid).collect::<Vec<_>>();
        assert_eq!(
            (names(Offer::DevicePlugin), names(Offer::Dra)),
            (vec!["GPU-a".into(), "GPU-c".into()], vec!["GPU-b".into()])
        );
        assert!(config.offers_by(Offer::Dra) && config.offers_by(Offer::DevicePlugin));
    }

    #[test]
    fn each_gpu_has_the_configured_number_of_slots() {
        let text = "slots = 2\n[[gpu]]\ngpu = 1\nslots = 0\n[[gpu]]\ngpu = \"GPU-c\"\nslots = 3";
        let config = Config::parse(text, "x".as_ref()).expect("it is right");
        let nvml = [seen("GPU-a", 0), seen("GPU-b", 1), seen("GPU-c", 2)];
        let devices = Devices::new(&config, Some(&nvml), &listed(&[]), &CdiView::default());
        let ids: Vec<String> = devices.gpus.iter().flat_map(Gpu::ids).collect();
        assert_eq!(ids, ["GPU-a::0", "GPU-a::1", "GPU-c::0", "GPU-c::1", "GPU-c::2"]);
        for (at, gpu) in devices.gpus.iter().enumerate() {
            for (slot, id) in (0..).zip(gpu.ids()) {
                assert_eq!(devices.find(&id), Some((at, slot)), "{id}");
            }
        }
        for wrong in
            ["", "::", "GPU-a", "GPU-a::", "GPU-a::2", "GPU-a::+1", "GPU-a::01", "GPU-b::0", "GPU-a::0::0", "GPU-a::-1"]
        {
            assert_eq!(devices.find(wrong), None, "{wrong}");
        }
    }
}
