//! Converts the allocation of a ResourceClaim on this node to a rule for the scheduler, without
//! I/O.
//!
//! A claim has one rule, which all programs of the claim share, in all containers and pods.
//! Kubernetes counts the capacities memory and time. These capacities need no permission, because
//! Kubernetes does not promise them twice. Permissions bound the other keys of a claim, like
//! annotations of pods. An administrator sets the keys of the claim's DeviceClass, so permissions
//! do not bound them.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{DeviceAllocationConfiguration, DeviceRequestAllocationResult, ResourceClaim};
use nvshare::config::rules::LIMIT_KEYS;
use nvshare_kubernetes::permissions::Permissions;
use serde::{Deserialize, Serialize};
use toml::Value;

use super::slice::{MEMORY, TIME, device_name};
use super::{DRIVER, quantity};
use crate::devices::{Devices, Gpu};

/// The `apiVersion` and `kind` of the driver's configuration in a claim or class. All other keys of
/// the configuration are keys of a rule.
pub const API_VERSION: &str = "nvshare.com/v1";
pub const KIND: &str = "Rule";

/// The keys of a rule that a claim cannot set. These keys choose GPUs, but Kubernetes chooses a
/// claim's GPUs.
const CHOOSING: [&str; 4] = ["allowed-gpus", "affinity", "anti-affinity", "exclusion"];

/// The keys that a claim can set.
fn allowed() -> impl Iterator<Item = &'static str> {
    LIMIT_KEYS.into_iter().filter(|key| !CHOOSING.contains(key))
}

/// The default weight of a claim whose namespace has no default weight. This weight equals the
/// default weight of a user.
const WEIGHT: i64 = 100;

/// A prepared claim.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Prepared {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    pub devices: Vec<PreparedDevice>,
    /// The keys of the claim's rule.
    pub rule: BTreeMap<String, Value>,
}

/// A GPU of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedDevice {
    /// The request of the claim for which the GPU was allocated.
    pub request: String,
    /// The name of the device.
    pub name: String,
    /// The GPU's UUID.
    pub uuid: String,
}

/// A claim's share of one GPU.
#[derive(Debug, Clone, PartialEq, Default)]
struct Share {
    /// Memory in bytes, and time in percent. 0 means that nothing is reserved.
    memory: u64,
    time: u64,
    keys: BTreeMap<String, Value>,
}

/// Reads a claim's allocation of these GPUs.
///
/// # Errors
/// Nothing is allocated on this node, a GPU is missing or unhealthy, or the claim's configuration
/// is invalid. The error is a sentence for an event of the pod.
pub fn read(claim: &ResourceClaim, node: &str, gpus: &Devices, permissions: &Permissions) -> Result<Prepared, String> {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    let (uid, namespace, name) =
        (text(&claim.metadata.uid), text(&claim.metadata.namespace), text(&claim.metadata.name));
    let allocated = claim.status.as_ref().and_then(|status| status.allocation.as_ref()?.devices.as_ref());
    let allocated = allocated.ok_or("it is not allocated")?;
    let config: Vec<&DeviceAllocationConfiguration> = allocated.config.iter().flatten().collect();
    let results = allocated.results.iter().flatten().filter(|result| result.driver == DRIVER && result.pool == node);
    let (mut devices, mut shares) = (Vec::new(), BTreeMap::<String, Share>::new());
    for result in results {
        let gpu = find(gpus, &result.device)?;
        let share = share(result, &config, &namespace, permissions)?;
        match shares.get_mut(&gpu.uuid) {
            None => drop(shares.insert(gpu.uuid.clone(), share)),
            Some(others) if others.keys != share.keys => return Err(UNEQUAL.into()),
            Some(others) => {
                others.memory = others.memory.saturating_add(share.memory);
                others.time = others.time.saturating_add(share.time);
            }
        }
        let request = main_request(&result.request).to_owned();
        devices.push(PreparedDevice { request, name: result.device.clone(), uuid: gpu.uuid.clone() });
    }
    let Some(share) = shares.values().next() else {
        return Err(format!("it has no allocated GPU of the driver {DRIVER} on node {node}"));
    };
    if shares.values().any(|other| other != share) {
        return Err(UNEQUAL.into());
    }
    let rule = rule(share, shares.keys().cloned().collect(), permissions)?;
    Ok(Prepared { uid, namespace, name, devices, rule })
}

const UNEQUAL: &str = "its requests have different shares or configurations, but one rule applies \
    to all programs and GPUs of a claim. Create one claim per request";

fn find<'a>(gpus: &'a Devices, device: &str) -> Result<&'a Gpu, String> {
    let gpu = gpus.gpus.iter().find(|gpu| device_name(&gpu.uuid) == device);
    let gpu = gpu.ok_or_else(|| format!("this node no longer offers its device {device:?}"))?;
    match &gpu.problem {
        Some(problem) => Err(format!("{} is unhealthy: {problem}", gpu.uuid)),
        None => Ok(gpu),
    }
}

/// Returns a request's name without the chosen alternative.
fn main_request(request: &str) -> &str {
    request.split_once('/').map_or(request, |(main, _)| main)
}

fn share(
    result: &DeviceRequestAllocationResult,
    config: &[&DeviceAllocationConfiguration],
    namespace: &str,
    permissions: &Permissions,
) -> Result<Share, String> {
    let consumed = |name: &str| {
        let all = result.consumed_capacity.iter().flatten();
        let amount =
            all.filter(|(key, _)| *key == name || **key == format!("{DRIVER}/{name}")).map(|(_, amount)| amount);
        let wrong = |text: &str| format!("its capacity {name} must be a whole number, not {text:?}");
        amount.map(|amount| quantity::whole(amount).ok_or_else(|| wrong(&amount.0))).sum::<Result<u64, String>>()
    };
    if result.consumed_capacity.is_none() && result.admin_access != Some(true) {
        return Err(format!(
            "kube-scheduler allocated a whole GPU to request {:?}. Enable the feature gate DRAConsumableCapacity in \
             kube-scheduler too",
            result.request
        ));
    }
    let (mut of_class, mut of_claim) = (BTreeMap::new(), BTreeMap::new());
    for entry in config {
        let applies = |request: &String| *request == result.request || request == main_request(&result.request);
        let is_for_it = entry.requests.as_ref().is_none_or(|all| all.is_empty() || all.iter().any(applies));
        let Some(opaque) = entry.opaque.as_ref().filter(|opaque| opaque.driver == DRIVER && is_for_it) else {
            continue;
        };
        let keys = keys(&opaque.parameters.0)?;
        if entry.source == "FromClass" { of_class.extend(keys) } else { of_claim.extend(keys) }
    }
    for (key, value) in &of_claim {
        if of_class.get(key).is_some_and(|other| other != value) {
            return Err(format!("its DeviceClass already sets {key}. Remove {key} from the claim"));
        }
        permissions.check(namespace, key, value).map_err(|why| format!("its key {key} is not allowed: {why}"))?;
    }
    of_class.extend(of_claim);
    Ok(Share { memory: consumed(MEMORY)?, time: consumed(TIME)?, keys: of_class })
}

/// Returns the keys of one configuration.
fn keys(parameters: &serde_json::Value) -> Result<BTreeMap<String, Value>, String> {
    let wrong = |what: &str| {
        format!(
            "its configuration for {DRIVER} {what}. It must have apiVersion: {API_VERSION}, kind: {KIND}, and the keys \
             of a rule"
        )
    };
    let all = parameters.as_object().ok_or_else(|| wrong("is not an object"))?;
    for (key, expected) in [("apiVersion", API_VERSION), ("kind", KIND)] {
        match all.get(key).and_then(serde_json::Value::as_str) {
            Some(text) if text == expected => {}
            Some(text) => return Err(wrong(&format!("has {key}: {text:?}"))),
            None => return Err(wrong(&format!("has no {key}"))),
        }
    }
    let others = all.iter().filter(|(key, _)| *key != "apiVersion" && *key != "kind");
    let pairs = others.map(|(key, value)| {
        if !allowed().any(|other| other == key) {
            let allowed: Vec<&str> = allowed().collect();
            let allowed = allowed.join(", ");
            return Err(format!("its configuration for {DRIVER} has the unknown key {key:?}. Allowed keys: {allowed}"));
        }
        let value = match value {
            serde_json::Value::Bool(value) => Some(Value::Boolean(*value)),
            serde_json::Value::String(text) => Some(Value::String(text.clone())),
            serde_json::Value::Number(number) => number.as_i64().map(Value::Integer),
            _ => None,
        };
        let value = value.ok_or_else(|| format!("its {key} must be a string, a whole number, true or false"))?;
        Ok((key.clone(), value))
    });
    pairs.collect()
}

fn rule(share: &Share, uuids: Vec<String>, permissions: &Permissions) -> Result<BTreeMap<String, Value>, String> {
    let mut rule = share.keys.clone();
    // The claim is guaranteed its reserved memory, and may not use more.
    let memory = (share.memory > 0).then(|| i64::try_from(share.memory).unwrap_or(i64::MAX).into());
    let time = (share.time > 0).then(|| format!("{}%", share.time).into());
    let reserved: [(&str, &str, Option<Value>); 3] =
        [(MEMORY, "memory-max", memory.clone()), (MEMORY, "memory-low", memory), (TIME, "time-min", time)];
    for (capacity, key, value) in reserved {
        let Some(value) = value else { continue };
        if rule.insert(key.to_owned(), value).is_some() {
            return Err(format!(
                "its configuration and its request for the capacity {capacity} both set {key}. Remove one of them"
            ));
        }
    }
    rule.entry("weight".to_owned()).or_insert_with(|| permissions.weight.clone().unwrap_or(Value::Integer(WEIGHT)));
    rule.insert("allowed-gpus".to_owned(), uuids.into());
    Ok(rule)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn gpus() -> Devices {
        let gpu = |uuid: &str, problem: Option<&str>| Gpu {
            uuid: uuid.into(),
            problem: problem.map(str::to_owned),
            ..Gpu::default()
        };
        Devices { gpus: vec![gpu("GPU-a", None), gpu("GPU-b", None), gpu("GPU-c", Some("XID 79"))] }
    }

    fn result(request: &str, device: &str, memory: &str, time: &str) -> serde_json::Value {
        json!({"request": request, "driver": DRIVER, "pool": "node-1", "device": device, "shareID": "1",
               "consumedCapacity": {"memory": memory, "time": time, "slots": "1"}})
    }

    fn config(source: &str, requests: &[&str], keys: serde_json::Value) -> serde_json::Value {
        let mut parameters = json!({"apiVersion": "nvshare.com/v1", "kind": "Rule"});
        parameters.as_object_mut().expect("an object").extend(keys.as_object().expect("an object").clone());
        json!({"source": source, "requests": requests, "opaque": {"driver": DRIVER, "parameters": parameters}})
    }

    fn read_it(results: &[serde_json::Value], configs: &[serde_json::Value]) -> Result<Prepared, String> {
        let claim = json!({
            "metadata": {"name": "half", "namespace": "team-a", "uid": "01234567-89ab-cdef-0123-456789abcdef"},
            "spec": {}, "status": {"allocation": {"devices": {"results": results, "config": configs}}}
        });
        let claim: ResourceClaim = serde_json::from_value(claim).expect("a claim");
        read(&claim, "node-1", &gpus(), &Permissions::default())
    }

    #[test]
    fn keys_that_choose_gpus_are_rule_keys() {
        assert!(CHOOSING.iter().all(|key| LIMIT_KEYS.contains(key)));
    }

    #[test]
    fn a_claims_rule_grants_exactly_the_reserved_capacity() {
        let claim = read_it(&[result("gpu", "gpu-a", "40Gi", "20")], &[]).expect("it is right");
        let expected = BTreeMap::from(
            [
                ("allowed-gpus", Value::from(vec!["GPU-a"])),
                ("memory-low", (40_i64 << 30).into()),
                ("memory-max", (40_i64 << 30).into()),
                ("time-min", "20%".into()),
                ("weight", 100.into()),
            ]
            .map(|(key, value)| (key.to_owned(), value)),
        );
        assert_eq!(claim.rule, expected);
        let nothing = read_it(&[result("gpu", "gpu-a", "0", "0")], &[]).expect("it is right");
        assert_eq!(nothing.rule.keys().collect::<Vec<_>>(), ["allowed-gpus", "weight"]);
    }

    #[test]
    fn a_gang_claim_has_one_rule_for_all_its_gpus() {
        let results = [result("gpus/large", "gpu-b", "0", "0"), result("gpus/large", "gpu-a", "0", "0")];
        let claim = read_it(&results, &[config("FromClaim", &["gpus"], json!({"gang": true}))]).expect("it is right");
        assert_eq!(claim.rule["gang"], true.into());
        assert_eq!(claim.rule["allowed-gpus"], vec!["GPU-a", "GPU-b"].into());
        let devices: Vec<_> =
            claim.devices.iter().map(|device| (device.request.as_str(), device.name.as_str())).collect();
        assert_eq!(devices, [("gpus", "gpu-b"), ("gpus", "gpu-a")]);
    }

    #[test]
    fn shares_of_one_gpu_in_a_claim_are_summed() {
        let results = [result("a", "gpu-a", "1Gi", "10"), result("b", "gpu-a", "2Gi", "5")];
        let claim = read_it(&results, &[]).expect("it is right");
        assert_eq!((&claim.rule["memory-max"], &claim.rule["time-min"]), (&(3_i64 << 30).into(), &"15%".into()));
        assert_eq!(claim.devices.len(), 2);
    }

    #[test]
    fn a_device_class_may_set_keys_that_a_claim_may_not() {
        let one = [result("gpu", "gpu-a", "0", "0")];
        let keys = json!({"interactive": true, "sleep-after": "10min", "weight": 500});
        let claim = read_it(&one, &[config("FromClass", &["gpu"], keys.clone())]).expect("an administrator said so");
        assert_eq!((&claim.rule["interactive"], &claim.rule["weight"]), (&true.into(), &500.into()));
        for (key, value) in keys.as_object().expect("an object") {
            let refused =
                read_it(&one, &[config("FromClaim", &[], json!({key: value}))]).expect_err("it is not allowed");
            assert!(
                refused.contains(&format!("its key {key} is not allowed: pods of namespace team-a may")),
                "{refused}"
            );
        }
        let both =
            [config("FromClass", &[], json!({"weight": "idle"})), config("FromClaim", &[], json!({"weight": 100}))];
        assert_eq!(
            read_it(&one, &both),
            Err("its DeviceClass already sets weight. Remove weight from the \
            claim"
                .into())
        );
    }

    #[test]
    fn invalid_claims_are_rejected_with_a_reason() {
        let one = [result("gpu", "gpu-a", "40Gi", "0")];
        let cases = [
            (read_it(&[], &[]), "it has no allocated GPU of the driver gpu.nvshare.com on node node-1"),
            (read_it(&[result("gpu", "gpu-z", "0", "0")], &[]), "no longer offers its device \"gpu-z\""),
            (read_it(&[result("gpu", "gpu-c", "0", "0")], &[]), "GPU-c is unhealthy: XID 79"),
            (
                read_it(&[result("a", "gpu-a", "1Gi", "0"), result("b", "gpu-b", "2Gi", "0")], &[]),
                "Create one claim per request",
            ),
            (
                read_it(
                    &[result("a", "gpu-a", "1Gi", "0"), result("b", "gpu-a", "1Gi", "0")],
                    &[config("FromClaim", &["a"], json!({"gang": true}))],
                ),
                "have different shares or configurations",
            ),
            (read_it(&[result("gpu", "gpu-a", "much", "0")], &[]), "must be a whole number, not \"much\""),
            (read_it(&one, &[config("FromClaim", &[], json!({"memory-max": "8G"}))]), "Remove one of them"),
            (
                read_it(&one, &[config("FromClaim", &[], json!({"allowed-gpus": "0"}))]),
                "has the unknown key \"allowed-gpus\". Allowed keys: memory-max,",
            ),
            (read_it(&one, &[config("FromClaim", &[], json!({"gang": [1]}))]), "its gang must be"),
            (read_it(&one, &[config("FromClaim", &[], json!({"kind": "Gpu"}))]), "has kind: \"Gpu\""),
        ];
        for (read, said) in cases {
            let refused = read.expect_err(said);
            assert!(refused.contains(said), "{refused}");
        }
        let mut whole = result("gpu", "gpu-a", "0", "0");
        whole.as_object_mut().expect("an object").remove("consumedCapacity");
        let refused = read_it(&[whole.clone()], &[]).expect_err("it cannot be shared");
        assert!(refused.contains("DRAConsumableCapacity in kube-scheduler"), "{refused}");
        whole["adminAccess"] = true.into();
        assert!(read_it(&[whole], &[]).is_ok(), "a monitor takes nothing");
        let unallocated = ResourceClaim::default();
        assert_eq!(read(&unallocated, "n", &gpus(), &Permissions::default()), Err("it is not allocated".into()));
    }

    #[test]
    fn configurations_for_other_requests_and_drivers_are_ignored() {
        let mut other = config("FromClaim", &[], json!({"interactive": true}));
        other["opaque"]["driver"] = "gpu.nvidia.com".into();
        let another = config("FromClaim", &["second"], json!({"interactive": true}));
        assert!(read_it(&[result("gpu", "gpu-a", "0", "0")], &[other, another]).is_ok());
    }
}
