//! A stand-in for the API server: pods are listed and watched over HTTP as there, with versions, bookmarks, streams that
//! break and versions that are too old.

use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use super::NODE;

type Chunk = Result<Frame<Bytes>, io::Error>;

/// The API server.
#[derive(Debug)]
pub struct Api {
    address: SocketAddr,
    world: Arc<Mutex<World>>,
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

#[derive(Debug, Default)]
struct World {
    version: u64,
    /// A watch from before this one is too old.
    oldest: u64,
    pods: BTreeMap<String, Value>,
    /// What happened, by the version that it made.
    history: Vec<(u64, String)>,
    watchers: Vec<UnboundedSender<Chunk>>,
    requests: Vec<String>,
    forbids: bool,
}

impl Api {
    pub fn start() -> Self {
        let world = Arc::new(Mutex::new(World { version: 100, oldest: 100, ..World::default() }));
        let mut api = Self { address: ([127, 0, 0, 1], 0).into(), world, running: None };
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

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().expect("the world")
    }

    /// A pod comes, or is another now.
    pub fn put(&self, pod: Value) {
        let mut world = self.world();
        let uid = pod["metadata"]["uid"].as_str().expect("a UID").to_owned();
        let kind = if world.pods.contains_key(&uid) { "MODIFIED" } else { "ADDED" };
        let pod = world.happened(kind, pod);
        world.pods.insert(uid, pod);
    }

    pub fn remove(&self, uid: &str) {
        let mut world = self.world();
        let pod = world.pods.remove(uid).expect("it is there");
        world.happened("DELETED", pod);
    }

    /// Time has passed in which nothing happened to these pods.
    pub fn bookmark(&self) -> u64 {
        let mut world = self.world();
        world.version += 10;
        let version = world.version;
        world.say(json!({"type": "BOOKMARK", "object": {
            "kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": version.to_string()}
        }}));
        version
    }

    /// What happened until now is forgotten; who watches hears so, or hears nothing but the end.
    pub fn forget(&self, says_so: bool) {
        let mut world = self.world();
        world.version += 1;
        world.oldest = world.version;
        world.history.clear();
        if says_so {
            world.say(gone());
        }
        world.watchers.clear();
    }

    /// Streams end in the middle of a line.
    pub fn break_streams(&self) {
        for watcher in self.world().watchers.drain(..) {
            let _ = watcher.send(Ok(Frame::data(Bytes::from_static(b"{\"type\": \"ADDED\", \"object\": {\"metad"))));
            let _ = watcher.send(Err(io::ErrorKind::ConnectionReset.into()));
        }
    }

    /// Sends who watches something else.
    pub fn babble(&self, line: &str) {
        let line = Bytes::from(format!("{line}\n"));
        self.world().watchers.retain(|watcher| watcher.send(Ok(Frame::data(line.clone()))).is_ok());
    }

    pub fn forbid(&self, forbids: bool) {
        let mut world = self.world();
        world.forbids = forbids;
        world.watchers.clear();
    }

    /// What was asked so far that has this in it.
    pub fn requests(&self, text: &str) -> Vec<String> {
        self.world().requests.iter().filter(|request| request.contains(text)).cloned().collect()
    }

    pub fn lists(&self) -> usize {
        self.world().requests.iter().filter(|request| !request.contains("watch=true")).count()
    }

    pub fn watches(&self) -> usize {
        self.requests("watch=true").len()
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
        let service = service_fn(move |request| {
            let answer = answer(&world, &request);
            async move { Ok::<_, io::Error>(answer) }
        });
        tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

impl World {
    fn happened(&mut self, kind: &str, mut pod: Value) -> Value {
        self.version += 1;
        pod["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let event = json!({"type": kind, "object": pod});
        if is_here(&pod) {
            self.history.push((self.version, event.to_string()));
            self.say(event);
        }
        pod
    }

    fn say(&mut self, event: Value) {
        let line = Bytes::from(format!("{event}\n"));
        self.watchers.retain(|watcher| watcher.send(Ok(Frame::data(line.clone()))).is_ok());
    }
}

fn is_here(pod: &Value) -> bool {
    pod["spec"]["nodeName"] == NODE
}

fn gone() -> Value {
    json!({"type": "ERROR", "object": {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410,
        "message": "too old resource version"
    }})
}

type Answer = Response<UnsyncBoxBody<Bytes, io::Error>>;

fn whole(status: u16, body: &Value) -> Answer {
    let body = Full::new(Bytes::from(body.to_string())).map_err(|never| match never {}).boxed_unsync();
    let response = Response::builder().status(status).header("content-type", "application/json");
    response.body(body).expect("a response")
}

fn answer(world: &Mutex<World>, request: &Request<Incoming>) -> Answer {
    let mut world = world.lock().expect("the world");
    let uri = request.uri().to_string();
    world.requests.push(uri.clone());
    let is_right = request.method() == "GET"
        && request.uri().path() == "/api/v1/pods"
        && uri.contains(&format!("fieldSelector=spec.nodeName%3D{NODE}"));
    if world.forbids || !is_right {
        let message = "pods is forbidden: User \"system:serviceaccount:nvshare:agent\" cannot list resource \"pods\"";
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": message, "reason": "Forbidden", "code": 403});
        return whole(403, &status);
    }
    if !uri.contains("watch=true") {
        let items: Vec<&Value> = world.pods.values().filter(|pod| is_here(pod)).collect();
        let metadata = json!({"resourceVersion": world.version.to_string()});
        return whole(200, &json!({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items}));
    }
    let from: u64 =
        uri.split("resourceVersion=").nth(1).and_then(|rest| rest.split('&').next()?.parse().ok()).unwrap_or(0);
    let (sender, mut chunks) = unbounded_channel::<Chunk>();
    if from < world.oldest {
        let _ = sender.send(Ok(Frame::data(Bytes::from(format!("{}\n", gone())))));
    } else {
        for (_, line) in world.history.iter().filter(|(version, _)| *version > from) {
            let _ = sender.send(Ok(Frame::data(Bytes::from(format!("{line}\n")))));
        }
        world.watchers.push(sender);
    }
    let body = StreamBody::new(futures::stream::poll_fn(move |context| chunks.poll_recv(context))).boxed_unsync();
    Response::builder().status(200).header("content-type", "application/json").body(body).expect("a response")
}

/// A UID that is like no other's.
pub fn uid(number: u32) -> String {
    format!("{number:08x}-89ab-cdef-0123-456789abcdef")
}

/// The id of the container of a pod.
pub fn container(number: u32) -> String {
    format!("{number:064x}")
}

/// A running pod `team-a/pod-N` with one container, `main`.
pub fn pod(number: u32, annotations: &[(&str, &str)]) -> Value {
    let annotations: BTreeMap<&str, &str> = annotations.iter().copied().collect();
    json!({
        "kind": "Pod", "apiVersion": "v1",
        "metadata": {
            "uid": uid(number), "namespace": "team-a", "name": format!("pod-{number}"), "annotations": annotations,
            "creationTimestamp": "2026-01-02T03:04:05Z", "labels": {"app": "train"}, "ownerReferences": [],
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}]
        },
        "spec": {"nodeName": NODE, "containers": [{"name": "main", "image": "cuda"}], "hostPID": false},
        "status": {
            "phase": "Running", "podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{
                "name": "main", "containerID": format!("containerd://{}", container(number)), "ready": true,
                "state": {"running": {"startedAt": "2026-01-02T03:04:06Z"}}
            }]
        }
    })
}
