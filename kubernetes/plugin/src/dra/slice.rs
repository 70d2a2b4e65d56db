//! The devices of the node's ResourceSlice, which are the GPUs with their capacities for claims.
//! This module also detects fields that an API server has dropped, because the server does not know
//! the fields or their feature gates are off. The module does no I/O.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Device, DeviceAttribute, DeviceCapacity, DeviceTaint,
};

use super::{DRIVER, quantity};
use crate::devices::{Devices, Gpu};

/// The names of the capacities in claims. `memory` is the memory limit of a claim's programs in
/// bytes. `time` is their guaranteed share of GPU time in percent. `slots` is the number of the
/// claim's slots.
pub const MEMORY: &str = "memory";
pub const TIME: &str = "time";
pub const SLOTS: &str = "slots";

/// The granularity in bytes at which the driver maps memory.
const GRANULE: u64 = 2 << 20;

/// The maximum number of devices in a slice with a tainted device.
pub const MAX_DEVICES: usize = 64;

/// Returns the name of a GPU's device, which is its UUID as a DNS label.
pub fn device_name(uuid: &str) -> String {
    uuid.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' }).collect()
}

/// Returns the offered devices. If taints are not supported, a GPU that must get no new claims is
/// omitted.
pub fn devices(gpus: &Devices, has_taints: bool) -> Vec<Device> {
    let device = |gpu: &Gpu| {
        let (memory, taints) = (gpu.memory?, taints(gpu));
        (has_taints || taints.is_empty()).then(|| Device {
            name: device_name(&gpu.uuid),
            attributes: Some(attributes(gpu)),
            capacity: Some(BTreeMap::from([
                // By default nothing is reserved for a claim. The claim then shares the memory and
                // time that other programs do not use.
                (MEMORY.to_owned(), capacity(memory, 0, memory / GRANULE * GRANULE, GRANULE)),
                (TIME.to_owned(), capacity(100, 0, 100, 1)),
                (SLOTS.to_owned(), capacity(gpu.slots.into(), 1, gpu.slots.into(), 1)),
            ])),
            allow_multiple_allocations: Some(true),
            taints: (!taints.is_empty()).then_some(taints),
            ..Device::default()
        })
    };
    gpus.gpus.iter().filter_map(device).take(MAX_DEVICES).collect()
}

/// Returns a capacity of a GPU. By default a claim gets `least`.
fn capacity(value: u64, least: u64, most: u64, step: u64) -> DeviceCapacity {
    // A step that does not fit between `least` and `most` is omitted.
    let step = (least + step <= most).then(|| quantity::of(step));
    let range = CapacityRequestPolicyRange { min: quantity::of(least), max: Some(quantity::of(most)), step };
    let policy = CapacityRequestPolicy {
        default: Some(quantity::of(least)),
        valid_range: Some(range),
        ..CapacityRequestPolicy::default()
    };
    DeviceCapacity { value: quantity::of(value), request_policy: Some(policy) }
}

/// Maximum length of an attribute's text, in characters.
const LONGEST: usize = 64;

fn attributes(gpu: &Gpu) -> BTreeMap<String, DeviceAttribute> {
    let text = |text: &str| DeviceAttribute {
        string: Some(text.chars().take(LONGEST).collect()),
        ..DeviceAttribute::default()
    };
    let version = |version: &String| DeviceAttribute { version: Some(version.clone()), ..DeviceAttribute::default() };
    let own = &gpu.properties;
    let number = |number: u32| DeviceAttribute { int: Some(number.into()), ..DeviceAttribute::default() };
    let kind = if gpu.uuid.starts_with("MIG-") { "mig" } else { "gpu" };
    let all = [
        ("uuid", Some(text(&gpu.uuid))),
        ("type", Some(text(kind))),
        ("productName", (!gpu.model.is_empty()).then(|| text(&gpu.model))),
        ("index", gpu.index.map(number)),
        ("numaNode", gpu.numa.map(number)),
        ("architecture", own.architecture.map(text)),
        ("brand", own.brand.map(text)),
        ("cudaComputeCapability", own.compute_capability.as_ref().map(version)),
        ("driverVersion", own.driver_version.as_ref().map(version)),
        ("cudaDriverVersion", own.cuda_driver_version.as_ref().map(version)),
        ("pcieBusID", own.pci_bus_id.as_deref().map(text)),
        ("resource.kubernetes.io/pcieRoot", own.pcie_root.as_deref().map(text)),
        ("parentUUID", own.parent.as_deref().map(text)),
        ("profile", own.profile.as_deref().map(text)),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect()
}

/// Returns taints, which are the reasons why a GPU gets no new claims. Running programs stay on the
/// GPU.
fn taints(gpu: &Gpu) -> Vec<DeviceTaint> {
    let taint = |key: &str| DeviceTaint {
        key: format!("{DRIVER}/{key}"),
        effect: "NoSchedule".to_owned(),
        ..DeviceTaint::default()
    };
    let all = [("unhealthy", gpu.problem.is_some()), ("drained", gpu.drained)];
    all.into_iter().filter(|(_, is_so)| *is_so).map(|(key, _)| taint(key)).collect()
}

/// Copies the times of stored taints to equal new taints. Without a time, the API server would set
/// the current time, even if only another device has changed.
pub fn keep_times(devices: &mut [Device], stored: &[Device]) {
    for device in devices {
        let before = stored.iter().find(|stored| stored.name == device.name);
        let before = before.and_then(|stored| stored.taints.as_deref()).unwrap_or_default();
        for taint in device.taints.iter_mut().flatten() {
            let same = before.iter().find(|other| (&other.key, &other.effect) == (&taint.key, &taint.effect));
            taint.time_added = same.and_then(|same| same.time_added.clone());
        }
    }
}

/// Fields that an API server has dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Dropped {
    /// Whether the API server dropped the fields that allow several claims per device.
    pub sharing: bool,
    pub taints: bool,
}

/// Compares sent and stored devices, and returns the fields that the API server has dropped.
pub fn dropped(sent: &[Device], stored: &[Device]) -> Dropped {
    let policies = |device: &Device| {
        let all = device.capacity.iter().flatten();
        all.filter(|(_, capacity)| capacity.request_policy.is_some()).count()
    };
    let mut dropped = Dropped::default();
    for device in sent {
        let stored = stored.iter().find(|stored| stored.name == device.name).cloned().unwrap_or_default();
        dropped.sharing |= stored.allow_multiple_allocations != Some(true) || policies(&stored) < policies(device);
        dropped.taints |= device.taints.is_some() && stored.taints.is_none();
    }
    dropped
}

/// Returns true if the devices are equal apart from the notation of numbers.
pub fn are_same(one: &[Device], other: &[Device]) -> bool {
    let numbers = |capacity: &DeviceCapacity| {
        let policy = capacity.request_policy.clone().unwrap_or_default();
        let range = policy.valid_range.unwrap_or_default();
        let all = [policy.default.as_ref(), Some(&range.min), range.max.as_ref(), range.step.as_ref()];
        (quantity::whole(&capacity.value), all.map(|number| number.and_then(quantity::whole)))
    };
    let capacities = |device: &Device| -> Vec<_> {
        device.capacity.iter().flatten().map(|(name, capacity)| (name.clone(), numbers(capacity))).collect()
    };
    let taints = |device: &Device| -> Vec<_> {
        let all = device.taints.iter().flatten();
        all.map(|taint| (taint.key.clone(), taint.effect.clone())).collect()
    };
    let said = |device: &Device| {
        let (attributes, shared) = (device.attributes.clone(), device.allow_multiple_allocations);
        (device.name.clone(), attributes, shared, capacities(device), taints(device))
    };
    one.iter().map(said).eq(other.iter().map(said))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::Properties;
    use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

    fn gpus() -> Devices {
        let gpu = |uuid: &str, problem: Option<&str>, drained| Gpu {
            uuid: uuid.into(),
            model: "NVIDIA H100".into(),
            index: Some(3),
            slots: 10,
            memory: Some(80 << 30),
            problem: problem.map(str::to_owned),
            drained,
            ..Gpu::default()
        };
        let unlisted = Gpu { memory: None, ..gpu("GPU-d", None, false) };
        let gpus =
            vec![gpu("GPU-A", None, false), gpu("GPU-b", Some("XID 79"), false), gpu("MIG-c", None, true), unlisted];
        Devices { gpus }
    }

    #[test]
    fn a_gpu_becomes_a_device_with_consumable_capacity() {
        let devices = devices(&gpus(), true);
        let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["gpu-a", "gpu-b", "mig-c"], "a GPU of which the scheduler knows nothing is not offered");
        let gpu = serde_json::to_value(&devices[0]).expect("JSON");
        assert_eq!(gpu["allowMultipleAllocations"], true);
        assert_eq!(gpu["capacity"]["memory"]["value"], "85899345920");
        assert_eq!(gpu["capacity"]["memory"]["requestPolicy"]["default"], "0");
        assert_eq!(gpu["capacity"]["memory"]["requestPolicy"]["validRange"]["step"], "2097152");
        assert_eq!(gpu["capacity"]["time"]["requestPolicy"]["validRange"]["max"], "100");
        assert_eq!(gpu["capacity"]["slots"]["requestPolicy"]["default"], "1");
        assert_eq!(gpu["attributes"]["uuid"]["string"], "GPU-A");
        assert_eq!(gpu.get("taints"), None);
    }

    /// tests/dra.rs tests the attributes that the simulated NVML reports.
    #[test]
    fn a_mig_device_has_its_pcie_root_parent_and_profile() {
        let mut all = gpus();
        all.gpus[0].properties = Properties {
            pcie_root: Some("pci0000:64".into()),
            parent: Some("GPU-P".into()),
            profile: Some("1g.10gb".into()),
            ..Properties::default()
        };
        let attributes = &serde_json::to_value(&devices(&all, true)[0]).expect("JSON")["attributes"];
        for (name, value) in
            [("resource.kubernetes.io/pcieRoot", "pci0000:64"), ("parentUUID", "GPU-P"), ("profile", "1g.10gb")]
        {
            assert_eq!(attributes[name]["string"], value, "{name}");
        }
        assert_eq!(attributes.get("architecture"), None);
    }

    #[test]
    fn capacity_request_policies_are_valid() {
        for memory in [80 << 30, (80 << 30) + 12_345, 3 << 20, 1 << 20] {
            let one = Gpu { memory: Some(memory), slots: 1, uuid: "GPU-a".into(), ..Gpu::default() };
            let device = devices(&Devices { gpus: vec![one] }, true).remove(0);
            for (name, capacity) in device.capacity.expect("capacities") {
                let policy = capacity.request_policy.expect("a policy");
                let range = policy.valid_range.expect("a range");
                let number = |quantity: &Quantity| quantity::whole(quantity).expect("a number");
                let (least, most) = (number(&range.min), number(&range.max.expect("a maximum")));
                let (value, default) = (number(&capacity.value), number(&policy.default.expect("a default")));
                assert!(least <= default && default <= most && most <= value, "{name} of {memory}");
                if let Some(step) = range.step.as_ref().map(number) {
                    assert!((most - least) % step == 0 && (default - least) % step == 0, "{name} of {memory}");
                    assert!(least + step <= value, "{name} of {memory}");
                }
            }
        }
    }

    #[test]
    fn unhealthy_and_drained_gpus_are_tainted_or_omitted() {
        let tainted = devices(&gpus(), true);
        let key = |at: usize| Some(tainted[at].taints.as_ref()?[0].key.clone());
        assert_eq!(
            (key(0), key(1), key(2)),
            (None, Some("gpu.nvshare.com/unhealthy".into()), Some("gpu.nvshare.com/drained".into()))
        );
        assert_eq!(devices(&gpus(), false).len(), 1);
    }

    #[test]
    fn fields_that_the_api_server_drops_are_detected() {
        let sent = devices(&gpus(), true);
        assert_eq!(dropped(&sent, &sent), Dropped::default());
        let mut stored = sent.clone();
        stored.iter_mut().for_each(|device| device.taints = None);
        assert_eq!(dropped(&sent, &stored), Dropped { taints: true, sharing: false });
        stored = sent.clone();
        stored[1].allow_multiple_allocations = None;
        assert_eq!(dropped(&sent, &stored), Dropped { taints: false, sharing: true });
        stored = sent.clone();
        stored[0].capacity.as_mut().expect("capacities").get_mut("time").expect("time").request_policy = None;
        assert_eq!(dropped(&sent, &stored), Dropped { taints: false, sharing: true });
        assert!(dropped(&sent, &[]).sharing);
    }

    #[test]
    fn equal_quantities_in_different_notations_compare_equal() {
        let sent = devices(&gpus(), true);
        let mut stored = sent.clone();
        let mut set = |text: &str| {
            let all = stored[0].capacity.as_mut().expect("capacities");
            all.get_mut("memory").expect("memory").value = Quantity(text.into());
            are_same(&sent, &stored)
        };
        assert!(set("80Gi") && !set("79Gi"));
        stored = sent.clone();
        stored[1].taints = None;
        assert!(!are_same(&sent, &stored));
        assert!(!are_same(&sent, &sent[1..]));
    }
}
