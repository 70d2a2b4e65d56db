//! A stand-in for the API server: ResourceSlices and ResourceClaims of `resource.k8s.io/v1` over HTTP. What it is sent has to be what the
//! published schema knows (by types that are generated from it), and is checked by the published rules as far as they are about what a
//! driver sends. It drops fields whose feature gates are off, as an API server does.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::resource::v1::{Device, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use nvshare_device_plugin::dra::quantity;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::PATIENCE;

type Chunk = Result<Frame<Bytes>, io::Error>;

/// The name of the node.
pub const NODE: &str = "node-1";

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

/// The API server.
#[derive(Debug)]
pub struct Api {
    address: SocketAddr,
    world: Arc<Mutex<World>>,
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

#[derive(Debug)]
struct World {
    version: u64,
    slices: BTreeMap<String, Value>,
    claims: BTreeMap<(String, String), Value>,
    watchers: Vec<UnboundedSender<Chunk>>,
    /// `DRAConsumableCapacity` and `DRADeviceTaints`.
    has_consumable_capacity: bool,
    has_taints: bool,
    has_resource_api: bool,
    forbids: bool,
    requests: Vec<String>,
}

impl Api {
    /// One with all feature gates.
    pub fn start() -> Self {
        let world = World {
            version: 100,
            slices: BTreeMap::new(),
            claims: BTreeMap::new(),
            watchers: Vec::new(),
            has_consumable_capacity: true,
            has_taints: true,
            has_resource_api: true,
            forbids: false,
            requests: Vec::new(),
        };
        let mut api = Self { address: ([127, 0, 0, 1], 0).into(), world: Arc::new(Mutex::new(world)), running: None };
        api.start_again();
        api
    }

    /// At the same address, with what it knows.
    pub fn start_again(&mut self) {
        let listener = TcpListener::bind(self.address).expect("the address is free");
        self.address = listener.local_addr().expect("an address");
        listener.set_nonblocking(true).expect("a socket");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (stop, stopped) = oneshot::channel();
        let world = self.world.clone();
        let thread = std::thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = serve(listener, world) => {}
                    _ = stopped => {}
                }
            });
        });
        self.running = Some((stop, thread));
    }

    /// All connections end, and nobody answers any more.
    pub fn stop(&mut self) {
        if let Some((stop, thread)) = self.running.take() {
            drop(stop);
            thread.join().expect("the API server ran");
        }
        self.world().watchers.clear();
    }

    /// How to reach it, as a kubeconfig.
    pub fn kubeconfig(&self) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\nclusters:\n- name: test\n  cluster: {{server: \"http://{}\"}}\n\
             users:\n- name: test\n  user: {{}}\ncontexts:\n- name: test\n  context: {{cluster: test, user: test}}\n",
            self.address
        )
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().expect("the world")
    }

    pub fn set_consumable_capacity(&self, is_on: bool) {
        self.world().has_consumable_capacity = is_on;
    }

    pub fn set_taints(&self, is_on: bool) {
        self.world().has_taints = is_on;
    }

    pub fn set_resource_api(&self, is_there: bool) {
        self.world().has_resource_api = is_there;
    }

    pub fn forbid(&self, forbids: bool) {
        self.world().forbids = forbids;
    }

    /// The node's slice, if there is one.
    pub fn slice(&self) -> Option<ResourceSlice> {
        let world = self.world();
        assert!(world.slices.len() <= 1, "{:?}", world.slices.keys());
        Some(serde_json::from_value(world.slices.values().next()?.clone()).expect("a slice"))
    }

    pub fn devices(&self) -> Vec<Device> {
        self.slice().and_then(|slice| slice.spec.devices).unwrap_or_default()
    }

    /// Waits until the devices of the slice are so.
    #[track_caller]
    pub fn until(&self, what: &str, is_so: impl Fn(&[Device]) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !is_so(&self.devices()) {
            assert!(Instant::now() < deadline, "{what}: {:?}", self.devices());
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// Somebody else deletes the slice, as a kubelet that starts does.
    pub fn delete_slices(&self) {
        let mut world = self.world();
        for (_, slice) in std::mem::take(&mut world.slices) {
            world.say("DELETED", &slice);
        }
    }

    /// A claim is there, and is allocated.
    pub fn put_claim(&self, claim: Value) {
        let known: ResourceClaim = serde_json::from_value(claim.clone()).expect("a claim");
        assert_known(&claim, &serde_json::to_value(known).expect("JSON"), "claim");
        let name = |key: &str| claim["metadata"][key].as_str().expect(key).to_owned();
        self.world().claims.insert((name("namespace"), name("name")), claim);
    }

    /// What was asked so far that has this in it.
    pub fn requests(&self, text: &str) -> usize {
        self.world().requests.iter().filter(|request| request.contains(text)).count()
    }
}

impl Drop for Api {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn serve(listener: TcpListener, world: Arc<Mutex<World>>) {
    let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
    while let Ok((stream, _)) = listener.accept().await {
        let world = world.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            let world = world.clone();
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
                let uri = parts.uri.to_string();
                let answer = world.lock().expect("the world").answer(&parts.method, &uri, &body);
                Ok::<_, io::Error>(answer)
            }
        });
        tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

type Answer = Response<UnsyncBoxBody<Bytes, io::Error>>;

fn whole(status: u16, body: &Value) -> Answer {
    let body = Full::new(Bytes::from(body.to_string())).map_err(|never| match never {}).boxed_unsync();
    let response = Response::builder().status(status).header("content-type", "application/json");
    response.body(body).expect("a response")
}

fn refused(code: u16, reason: &str, message: &str) -> Answer {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
        "reason": reason, "code": code});
    whole(code, &status)
}

impl World {
    fn say(&mut self, kind: &str, slice: &Value) {
        let line = Bytes::from(format!("{}\n", json!({"type": kind, "object": slice})));
        self.watchers.retain(|watcher| watcher.send(Ok(Frame::data(line.clone()))).is_ok());
    }

    fn answer(&mut self, method: &Method, uri: &str, body: &[u8]) -> Answer {
        self.requests.push(format!("{method} {uri}"));
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
        if !self.has_resource_api {
            return refused(404, "NotFound", "the server could not find the requested resource");
        }
        match (method, path.strip_prefix(SLICES)) {
            (&Method::GET, Some("")) => self.list(uri),
            (&Method::POST, Some("")) => self.store(uri, body, None),
            (&Method::PUT, Some(name)) => self.store(uri, body, name.strip_prefix('/')),
            (&Method::DELETE, Some(name)) => match self.slices.remove(name.trim_start_matches('/')) {
                Some(slice) => {
                    self.say("DELETED", &slice);
                    whole(200, &slice)
                }
                None => refused(404, "NotFound", "there is no such slice"),
            },
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
        if !uri.contains("watch=true") {
            let items: Vec<&Value> = self.slices.values().collect();
            let metadata = json!({"resourceVersion": self.version.to_string()});
            let list = json!({"kind": "ResourceSliceList", "apiVersion": "resource.k8s.io/v1", "metadata": metadata, "items": items});
            return whole(200, &list);
        }
        let (sender, chunks) = unbounded_channel::<Chunk>();
        let from = uri.split("resourceVersion=").nth(1).and_then(|rest| rest.split('&').next()?.parse::<u64>().ok());
        // It does not know what happened in between, so it ends such a watch.
        if from == Some(self.version) {
            self.watchers.push(sender);
        }
        let body = StreamBody::new(UnboundedReceiverStream::new(chunks)).boxed_unsync();
        Response::builder().status(200).header("content-type", "application/json").body(body).expect("a response")
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
        for device in slice.spec.devices.iter_mut().flatten() {
            if !self.has_taints {
                device.taints = None;
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

/// Fails if something was written that is not in what the schema knows of it.
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

/// The rules for ResourceSlices that are about what is sent here.
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
            (attributes.keys().chain(capacities.keys()).all(|name| is_identifier(name)), "a name"),
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

/// A UID that is like no other's.
pub fn uid(number: u32) -> String {
    format!("{number:08x}-89ab-cdef-0123-456789abcdef")
}

/// The claim `team-a/claim-N`, to which Kubernetes has allocated these devices, with so many bytes and percent of each.
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

/// A configuration of that source, such as `FromClaim`.
pub fn config(source: &str, keys: Value) -> Value {
    let mut parameters = json!({"apiVersion": "nvshare.com/v1", "kind": "Rule"});
    parameters.as_object_mut().expect("an object").extend(keys.as_object().expect("an object").clone());
    json!({"source": source, "requests": [], "opaque": {"driver": "gpu.nvshare.com", "parameters": parameters}})
}
