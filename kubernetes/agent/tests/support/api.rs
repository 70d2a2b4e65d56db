//! A stand-in for the API server. It lists and watches pods like the real API server, with
//! versions, bookmarks, broken streams and outdated versions.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

use kubernetes_test_support::api_server::{Answer, ApiServer, Method, Watchers, World, refused, watches_from, whole};
use serde_json::{Value, json};

pub use kubernetes_test_support::{NODE, uid};

/// The API server.
#[derive(Debug)]
pub struct Api(ApiServer<Pods>);

#[derive(Debug)]
pub struct Pods {
    version: u64,
    /// The oldest version from which a watch may start.
    oldest: u64,
    pods: BTreeMap<String, Value>,
    /// The events by version.
    history: Vec<(u64, String)>,
    watchers: Watchers,
    forbids: bool,
}

impl Deref for Api {
    type Target = ApiServer<Pods>;

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
    pub fn start() -> Self {
        let (pods, history) = (BTreeMap::new(), Vec::new());
        let watchers = Watchers::default();
        Self(ApiServer::start(Pods { version: 100, oldest: 100, pods, history, watchers, forbids: false }))
    }

    /// Adds or replaces a pod.
    pub fn put(&self, pod: Value) {
        let uid = pod["metadata"]["uid"].as_str().expect("a UID").to_owned();
        self.with(|world| {
            let kind = if world.pods.contains_key(&uid) { "MODIFIED" } else { "ADDED" };
            let pod = world.happened(kind, pod);
            world.pods.insert(uid, pod);
        });
    }

    pub fn remove(&self, uid: &str) {
        self.with(|world| {
            let pod = world.pods.remove(uid).expect("it is there");
            world.happened("DELETED", pod);
        });
    }

    /// Sends a bookmark, as the API server does after a time without changes.
    pub fn bookmark(&self) -> u64 {
        self.with(|world| {
            world.version += 10;
            let event = json!({"type": "BOOKMARK", "object": {
                "kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": world.version.to_string()}
            }});
            world.watchers.say(&event.to_string());
            world.version
        })
    }

    /// Forgets all earlier events, and ends the watches. The server tells watchers the reason only
    /// if `says_so` is true.
    pub fn forget(&self, says_so: bool) {
        self.with(|world| {
            world.version += 1;
            world.oldest = world.version;
            world.history.clear();
            if says_so {
                world.watchers.say(&gone());
            }
            world.watchers.end();
        });
    }

    /// Ends all streams in the middle of a line.
    pub fn break_streams(&self) {
        self.with(|world| world.watchers.tear());
    }

    /// Sends an arbitrary line to all watchers.
    pub fn babble(&self, line: &str) {
        self.with(|world| world.watchers.say(line));
    }

    pub fn forbid(&self, forbids: bool) {
        self.with(|world| {
            world.forbids = forbids;
            world.watchers.end();
        });
    }

    pub fn lists(&self) -> usize {
        self.requests("").len() - self.watches()
    }

    pub fn watches(&self) -> usize {
        self.requests("watch=true").len()
    }
}

impl Pods {
    fn happened(&mut self, kind: &str, mut pod: Value) -> Value {
        self.version += 1;
        pod["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let event = json!({"type": kind, "object": pod}).to_string();
        if is_here(&pod) {
            self.watchers.say(&event);
            self.history.push((self.version, event));
        }
        pod
    }
}

impl World for Pods {
    fn answer(&mut self, method: &Method, uri: &str, _: &[u8]) -> Answer {
        let is_right = *method == Method::GET
            && uri.split('?').next() == Some("/api/v1/pods")
            && uri.contains(&format!("fieldSelector=spec.nodeName%3D{NODE}"));
        if self.forbids || !is_right {
            let message =
                "pods is forbidden: User \"system:serviceaccount:nvshare:agent\" cannot list resource \"pods\"";
            return refused(403, "Forbidden", message);
        }
        match watches_from(uri) {
            None => {
                let items: Vec<&Value> = self.pods.values().filter(|pod| is_here(pod)).collect();
                let metadata = json!({"resourceVersion": self.version.to_string()});
                whole(200, &json!({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items}))
            }
            Some(from) if from < self.oldest => self.watchers.begin([gone()], false),
            Some(from) => {
                let since = self.history.iter().filter(|(version, _)| *version > from);
                self.watchers.begin(since.map(|(_, event)| event.clone()), true)
            }
        }
    }

    fn watchers(&mut self) -> &mut Watchers {
        &mut self.watchers
    }
}

fn is_here(pod: &Value) -> bool {
    pod["spec"]["nodeName"] == NODE
}

fn gone() -> String {
    let event = json!({"type": "ERROR", "object": {
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410,
        "message": "too old resource version"
    }});
    event.to_string()
}

/// The id of a pod's container.
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
