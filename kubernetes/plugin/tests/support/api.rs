//! A stand-in for the API server, with ResourceSlices and ResourceClaims of `resource.k8s.io/v1`
//! over HTTP. Requests must conform to the published schema, by types generated from the schema.
//! Requests must also conform to the published rules that concern a driver. Like an API server, the
//! stand-in drops fields whose feature gates are off.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kubernetes_test_support::api_server::{Answer, ApiServer, Method, Watchers, World, refused, watches_from, whole};
use nvshare_device_plugin::dra::quantity;
use serde_json::{Value, json};

pub use kubernetes_test_support::{NODE, uid};

const CLAIMS: &str = "/apis/resource.k8s.io/v1/resourceclaims";
const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

/// The API server.
#[derive(Debug)]
pub struct Api(ApiServer<Resources>);

#[derive(Debug)]
pub struct Resources {
    version: u64,
    slices: BTreeMap<String, Value>,
    claims: BTreeMap<(String, String), Value>,
    events: Vec<Value>,
    watchers: Watchers,
    /// The state of the feature gates `DRAConsumableCapacity` and `DRADeviceTaints`.
    has_consumable_capacity: bool,
    has_taints: bool,
    has_resource_api: bool,
    forbids: bool,
}

impl Deref for Api {
    type Target = ApiServer<Resources>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Api {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl Api {
    /// Starts an API server with all feature gates on.
    pub fn start() -> Self {
        Self(ApiServer::start(Resources {
            version: 100,
            slices: BTreeMap::new(),
            claims: BTreeMap::new(),
            events: Vec::new(),
            watchers: Watchers::default(),
            has_consumable_capacity: true,
            has_taints: true,
            has_resource_api: true,
            forbids: false,
        }))
    }

    pub fn set_consumable_capacity(&self, is_on: bool) {
        self.with(|world| world.has_consumable_capacity = is_on);
    }

    pub fn set_taints(&self, is_on: bool) {
        self.with(|world| world.has_taints = is_on);
    }

    pub fn set_resource_api(&self, is_there: bool) {
        self.with(|world| world.has_resource_api = is_there);
    }

    pub fn forbid(&self, forbids: bool) {
        self.with(|world| world.forbids = forbids);
    }

    /// The node's slice, if any.
    pub fn slice(&self) -> Option<ResourceSlice> {
        self.with(|world| {
            assert!(world.slices.len() <= 1, "{:?}", world.slices.keys());
            Some(serde_json::from_value(world.slices.values().next()?.clone()).expect("a slice"))
        })
    }

    pub fn devices(&self) -> Vec<Device> {
        self.slice().and_then(|slice| slice.spec.devices).unwrap_or_default()
    }

    /// Waits until the slice's devices satisfy the condition.
    #[track_caller]
    pub fn until(&self, what: &str, is_so: impl Fn(&[Device]) -> bool) {
        kubernetes_test_support::until(what, || is_so(&self.devices()).then_some(()));
    }

    /// Deletes the slice, like a starting kubelet.
    pub fn delete_slices(&self) {
        self.with(|world| {
            for (_, slice) in std::mem::take(&mut world.slices) {
                world.version += 1;
                world.say("DELETED", &slice);
            }
        });
    }

    /// The events of pods.
    pub fn events(&self) -> Vec<Value> {
        self.with(|world| world.events.clone())
    }

    /// Adds an allocated claim.
    pub fn put_claim(&self, claim: Value) {
        let known: ResourceClaim = serde_json::from_value(claim.clone()).expect("a claim");
        assert_known(&claim, &serde_json::to_value(known).expect("JSON"), "claim");
        let name = |key: &str| claim["metadata"][key].as_str().expect(key).to_owned();
        let key = (name("namespace"), name("name"));
        self.with(|world| world.claims.insert(key, claim));
    }
}

impl World for Resources {
    fn answer(&mut self, method: &Method, uri: &str, body: &[u8]) -> Answer {
        let path = uri.split('?').next().unwrap_or_default();
        if path == "/version" {
            let version = json!({"major": "1", "minor": "35", "gitVersion": "v1.35.2", "gitCommit": "", "gitTreeState": "",
                "buildDate": "", "goVersion": "", "compiler": "", "platform": ""});
            return whole(200, &version);
        }
        if self.forbids {
            return refused(403, "Forbidden", "User \"system:serviceaccount:nvshare:nvshare\" cannot do that");
        }
        if path == format!("/api/v1/nodes/{NODE}") {
            let node = json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": NODE, "uid": "node-uid"}});
            return whole(200, &node);
        }
        if *method == Method::POST && path == "/api/v1/namespaces/team-a/events" {
            let sent: Value = serde_json::from_slice(body).expect("JSON");
            let event: Event = serde_json::from_value(sent.clone()).expect("an event");
            assert_known(&sent, &serde_json::to_value(event).expect("JSON"), "event");
            assert_eq!(sent["involvedObject"]["namespace"], "team-a", "an event is in the namespace of its object");
            self.events.push(sent.clone());
            return whole(201, &sent);
        }
        if !self.has_resource_api {
            return refused(404, "NotFound", "the server could not find the requested resource");
        }
        match (method, path.strip_prefix(SLICES)) {
            (&Method::GET, Some("")) => self.list(uri),
            (&Method::POST, Some("")) => self.store(uri, body, None),
            (&Method::PUT, Some(name)) => self.store(uri, body, name.strip_prefix('/')),
            (&Method::DELETE, Some(name)) => match self.slices.remove(name.trim_start_matches('/')) {
                Some(slice) => {
                    self.version += 1;
                    self.say("DELETED", &slice);
                    whole(200, &slice)
                }
                None => refused(404, "NotFound", "there is no such slice"),
            },
            (&Method::GET, None) if path == CLAIMS => {
                let items: Vec<&Value> = self.claims.values().collect();
                let metadata = json!({"resourceVersion": self.version.to_string()});
                whole(
                    200,
                    &json!({"kind": "ResourceClaimList", "apiVersion": "resource.k8s.io/v1", "metadata": metadata, "items": items}),
                )
            }
            _ => {
                match path
                    .strip_prefix("/apis/resource.k8s.io/v1/namespaces/")
                    .map(|rest| rest.split('/').collect::<Vec<_>>())
                {
                    Some(parts) if *method == Method::GET => self.claim(&parts),
                    _ => refused(404, "NotFound", &format!("{method} {uri}")),
                }
            }
        }
    }

    fn watchers(&mut self) -> &mut Watchers {
        &mut self.watchers
    }
}

impl Resources {
    fn say(&mut self, kind: &str, slice: &Value) {
        self.watchers.say(&json!({"type": kind, "object": slice}).to_string());
    }

    fn claim(&self, parts: &[&str]) -> Answer {
        let [namespace, "resourceclaims", name] = parts[..] else { return refused(404, "NotFound", "what?") };
        match self.claims.get(&(namespace.to_owned(), name.to_owned())) {
            Some(claim) => whole(200, claim),
            None => refused(404, "NotFound", &format!("resourceclaims.resource.k8s.io {name:?} not found")),
        }
    }

    fn list(&mut self, uri: &str) -> Answer {
        let selector = format!("fieldSelector=spec.driver%3Dgpu.nvshare.com%2Cspec.nodeName%3D{NODE}");
        assert!(uri.contains(&selector), "another node's are asked for: {uri}");
        let Some(from) = watches_from(uri) else {
            let items: Vec<&Value> = self.slices.values().collect();
            let metadata = json!({"resourceVersion": self.version.to_string()});
            let list = json!({"kind": "ResourceSliceList", "apiVersion": "resource.k8s.io/v1", "metadata": metadata, "items": items});
            return whole(200, &list);
        };
        // The stand-in keeps no history, so a watch from an older version ends immediately.
        self.watchers.begin([], from == self.version)
    }

    fn store(&mut self, uri: &str, body: &[u8], name: Option<&str>) -> Answer {
        let sent: Value = serde_json::from_slice(body).expect("JSON");
        let mut slice: ResourceSlice = serde_json::from_value(sent.clone()).expect("a slice");
        assert_known(&sent, &serde_json::to_value(&slice).expect("JSON"), "slice");
        if let Err(why) = check(&slice) {
            return refused(422, "Invalid", &why);
        }
        let own = slice.metadata.name.clone().expect("a name");
        match (name, self.slices.get(&own)) {
            (None, Some(_)) => return refused(409, "AlreadyExists", "it is there already"),
            (Some(_), None) => return refused(404, "NotFound", "there is no such slice"),
            (Some(_), Some(there))
                if there["metadata"]["resourceVersion"].as_str() != slice.metadata.resource_version.as_deref() =>
            {
                return refused(409, "Conflict", "the object has been modified");
            }
            _ => {}
        }
        // The clock advances by one second at each change.
        let now =
            i64::try_from(self.version).ok().and_then(|seconds| Timestamp::from_second(seconds).ok()).expect("a time");
        for device in slice.spec.devices.iter_mut().flatten() {
            if !self.has_taints {
                device.taints = None;
            }
            for taint in device.taints.iter_mut().flatten() {
                taint.time_added.get_or_insert(Time(now));
            }
            if !self.has_consumable_capacity {
                device.allow_multiple_allocations = None;
                device.capacity.iter_mut().flatten().for_each(|(_, capacity)| capacity.request_policy = None);
            }
        }
        slice.metadata.uid = Some("slice-uid".into());
        let is_dry = uri.contains("dryRun=All");
        if !is_dry {
            self.version += 1;
            slice.metadata.resource_version = Some(self.version.to_string());
        }
        let stored = serde_json::to_value(&slice).expect("JSON");
        if !is_dry {
            self.say(if name.is_some() { "MODIFIED" } else { "ADDED" }, &stored);
            self.slices.insert(own, stored.clone());
        }
        whole(if name.is_some() { 200 } else { 201 }, &stored)
    }
}

/// Fails if a written field is unknown to the schema.
fn assert_known(written: &Value, known: &Value, at: &str) {
    match (written, known) {
        (Value::Object(written), Value::Object(known)) => {
            for (key, value) in written {
                assert_known(
                    value,
                    known.get(key).unwrap_or_else(|| panic!("{at}.{key} is unknown")),
                    &format!("{at}.{key}"),
                );
            }
        }
        (Value::Array(written), Value::Array(known)) => {
            assert_eq!(written.len(), known.len(), "{at}");
            written.iter().zip(known).for_each(|(written, known)| assert_known(written, known, at));
        }
        (written, known) => assert_eq!(written, known, "{at}"),
    }
}

/// Checks the rules for ResourceSlices that apply to the driver's requests.
fn check(slice: &ResourceSlice) -> Result<(), String> {
    let is_label = |text: &str| {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !text.is_empty()
            && text.len() <= 63
            && text.chars().all(inner)
            && !text.starts_with('-')
            && !text.ends_with('-')
    };
    let is_identifier = |text: &str| {
        text.len() <= 32
            && text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let is_qualified = |text: &str| match text.split_once('/') {
        Some((domain, name)) => domain.split('.').all(is_label) && is_identifier(name),
        None => is_identifier(text),
    };
    // Accepts semantic versions without suffixes after the numbers.
    let is_version = |text: &str| {
        let is_number = |text: &str| text == "0" || (!text.starts_with('0') && text.parse::<u64>().is_ok());
        text.split('.').count() == 3 && text.split('.').all(is_number)
    };
    let spec = &slice.spec;
    let owner =
        slice.metadata.owner_references.iter().flatten().any(|owner| owner.kind == "Node" && owner.uid == "node-uid");
    let devices = spec.devices.as_deref().unwrap_or_default();
    let is_one = [spec.node_name.is_some(), spec.node_selector.is_some(), spec.all_nodes.is_some()];
    let has_taints = devices.iter().any(|device| device.taints.is_some());
    for (is_right, what) in [
        (owner, "it goes with no node"),
        (spec.driver == "gpu.nvshare.com", "spec.driver"),
        (is_one.iter().filter(|is| **is).count() == 1 && spec.node_name.as_deref() == Some(NODE), "spec.nodeName"),
        (spec.pool.name == NODE && spec.pool.generation > 0 && spec.pool.resource_slice_count == 1, "spec.pool"),
        (devices.len() <= if has_taints { 64 } else { 128 }, "too many devices"),
    ] {
        is_right.then_some(()).ok_or(what)?;
    }
    for device in devices {
        let attributes = device.attributes.clone().unwrap_or_default();
        let capacities = device.capacity.clone().unwrap_or_default();
        for (is_right, what) in [
            (is_label(&device.name), "name"),
            (attributes.len() + capacities.len() <= 32, "too many attributes"),
            (attributes.keys().chain(capacities.keys()).all(|name| is_qualified(name)), "a name"),
            (attributes.values().all(|value| value.version.as_ref().is_none_or(|text| is_version(text))), "a version"),
            (attributes.values().all(|value| value.string.as_ref().is_none_or(|text| text.len() <= 64)), "a text"),
            (
                device
                    .taints
                    .iter()
                    .flatten()
                    .all(|taint| ["NoSchedule", "NoExecute", "None"].contains(&&*taint.effect)),
                "effect",
            ),
        ] {
            is_right.then_some(()).ok_or_else(|| format!("{}: {what}", device.name))?;
        }
        let number = |quantity: &Quantity| quantity::whole(quantity).ok_or_else(|| format!("{quantity:?}"));
        for (name, capacity) in capacities {
            let value = number(&capacity.value)?;
            let Some(policy) = capacity.request_policy else { continue };
            if device.allow_multiple_allocations != Some(true) {
                return Err(format!("{name}: allowMultipleAllocations must be true"));
            }
            let Some(range) = policy.valid_range else { continue };
            let default = number(policy.default.as_ref().ok_or("a range needs a default")?)?;
            let (least, most) = (number(&range.min)?, range.max.as_ref().map_or(Ok(value), number)?);
            let step = range.step.as_ref().map_or(Ok(1), number)?;
            let fits = least <= default && default <= most && most <= value && (most - least) % step == 0;
            if !fits || (default - least) % step != 0 || (range.step.is_some() && least + step > value) {
                return Err(format!("{name}: {range:?}"));
            }
        }
    }
    Ok(())
}

/// Returns the claim `team-a/claim-N` with these allocated devices. `memory` and `time` are the
/// amounts of each device.
pub fn claim(number: u32, devices: &[&str], memory: &str, time: &str, config: &[Value]) -> Value {
    let result = |device: &&str| {
        json!({"request": "gpu", "driver": "gpu.nvshare.com", "pool": NODE, "device": device, "shareID": uid(900 + number),
               "consumedCapacity": {"memory": memory, "time": time, "slots": "1"}})
    };
    let results: Vec<Value> = devices.iter().map(result).collect();
    json!({
        "kind": "ResourceClaim", "apiVersion": "resource.k8s.io/v1",
        "metadata": {"uid": uid(number), "namespace": "team-a", "name": format!("claim-{number}"), "resourceVersion": "7"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvshare.com", "allocationMode": "ExactCount",
            "count": devices.len()}}]}},
        "status": {
            "allocation": {"devices": {"results": results, "config": config}},
            "reservedFor": [{"resource": "pods", "name": "pod-1", "uid": uid(800 + number)}]
        }
    })
}

/// A configuration from a source such as `FromClaim`.
pub fn config(source: &str, keys: Value) -> Value {
    let mut parameters = json!({"apiVersion": "nvshare.com/v1", "kind": "Rule"});
    parameters.as_object_mut().expect("an object").extend(keys.as_object().expect("an object").clone());
    json!({"source": source, "requests": [], "opaque": {"driver": "gpu.nvshare.com", "parameters": parameters}})
}
