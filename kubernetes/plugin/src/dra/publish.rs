//! Keeps the node's ResourceSlice at the API server up to date. An API server silently drops fields
//! whose feature gates are off. A dry run therefore first shows which fields the API server would
//! store. The driver offers no device whose meaning would change without the dropped fields.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, ListParams, ObjectMeta, PostParams, WatchEvent, WatchParams};
use kube::{Api, Client, Error};
use nvshare_kubernetes::api_server::{causes, message};
use nvshare_kubernetes::retry::Retry;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_stream::StreamExt;
use tracing::{info, warn};

use super::DRIVER;
use super::slice::{self, MAX_DEVICES};
use crate::devices::Devices;

/// Timeout for the API server's answer.
const ANSWER: Duration = Duration::from_secs(30);

/// The requested duration of a watch, in seconds. On a quiet watch the API server sends a bookmark about every minute.
const WATCH_SECONDS: u32 = 240;
const SILENCE: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 5);

/// Maximum pause before the next attempt.
const RETRY: Duration = Duration::from_secs(30);

const UNAUTHORIZED: u16 = 401;
const FORBIDDEN: u16 = 403;
const NOT_FOUND: u16 = 404;

/// Keeps the slice up to date until the sender of changes is dropped. `problem` receives the reason
/// if no GPU is offered.
pub async fn keep(
    client: Client,
    node: String,
    mut devices: watch::Receiver<Arc<Devices>>,
    problem: watch::Sender<Option<String>>,
) {
    let mut publisher = Publisher { slices: Api::all(client.clone()), client, node, drops_taints: false };
    let mut retry = Retry::up_to(RETRY);
    loop {
        let gpus = devices.borrow_and_update().clone();
        let published = publisher.publish(&gpus).await;
        let wait = async {
            match &published {
                Ok(version) => publisher.changed(version).await,
                Err(_) => sleep(retry.wait()).await,
            }
        };
        let now = published.as_ref().err().cloned();
        problem.send_if_modified(|before| {
            let is_news = *before != now;
            match &now {
                Some(why) if is_news => warn!("{why}"),
                None if before.is_some() => info!("offering GPUs in ResourceSlice {}", publisher.name()),
                _ => {}
            }
            *before = now;
            is_news
        });
        tokio::select! {
            () = wait => {}
            changed = devices.changed() => if changed.is_err() { return },
        }
        if published.is_ok() {
            retry.reset();
        }
    }
}

struct Publisher {
    client: Client,
    slices: Api<ResourceSlice>,
    node: String,
    /// Whether the API server dropped taints when the slice last needed them.
    drops_taints: bool,
}

impl Publisher {
    fn name(&self) -> String {
        format!("{}-{DRIVER}", self.node)
    }

    fn selector(&self) -> String {
        format!("spec.driver={DRIVER},spec.nodeName={}", self.node)
    }

    /// Stores the offered devices at the API server. Returns the version from which to watch the slice.
    async fn publish(&mut self, gpus: &Devices) -> Result<String, String> {
        let list = self.ask("list", self.slices.list(&ListParams::default().fields(&self.selector()))).await?;
        let stored = list.items.into_iter().find(|slice| slice.metadata.name.as_deref() == Some(&self.name()));
        let version = list.metadata.resource_version.unwrap_or_default();
        let unknown = gpus.gpus.iter().filter(|gpu| gpu.memory.is_none()).count();
        if gpus.gpus.len() - unknown > MAX_DEVICES {
            warn!(
                "the node has {} GPUs and MIG slices, but only {MAX_DEVICES} are offered: the limit of a ResourceSlice",
                gpus.gpus.len()
            );
        }
        let drops_taints = !self.store(gpus, stored.as_ref(), true).await?;
        if drops_taints {
            if !self.drops_taints {
                warn!(
                    "omitting unhealthy and drained GPUs, because the API server drops taints of ResourceSlices \
                     (feature gate DRADeviceTaints)"
                );
            }
            self.store(gpus, stored.as_ref(), false).await?;
        }
        self.drops_taints = drops_taints;
        Ok(version)
    }

    /// Stores the slice. Returns false if the API server drops taints.
    async fn store(&self, gpus: &Devices, stored: Option<&ResourceSlice>, has_taints: bool) -> Result<bool, String> {
        let mut devices = slice::devices(gpus, has_taints);
        let of = |slice: &ResourceSlice| slice.spec.devices.clone().unwrap_or_default();
        match stored {
            Some(stored) if slice::are_same(&devices, &of(stored)) => return Ok(true),
            None if devices.is_empty() => return Ok(true),
            _ => {}
        }
        if devices.is_empty() {
            return self.delete().await.map(|()| true);
        }
        if let Some(stored) = stored {
            slice::keep_times(&mut devices, &of(stored));
        }
        let slice = self.slice(devices.clone(), stored).await?;
        for dry_run in [true, false] {
            let params = PostParams { dry_run, ..PostParams::default() };
            let done = match stored {
                None => self.ask("create", self.slices.create(&params, &slice)).await?,
                Some(_) => self.ask("update", self.slices.replace(&self.name(), &params, &slice)).await?,
            };
            let dropped = slice::dropped(&devices, &of(&done));
            if dropped.sharing {
                if stored.is_some() || !dry_run {
                    self.delete().await?;
                }
                return Err(self.gate_is_off().await);
            }
            if dropped.taints {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn slice(&self, devices: Vec<Device>, stored: Option<&ResourceSlice>) -> Result<ResourceSlice, String> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = self.ask_for("read", "its Node", nodes.get(&self.node)).await?;
        // Kubernetes deletes the slice together with its owner, the node.
        let owner = OwnerReference {
            api_version: "v1".into(),
            kind: "Node".into(),
            name: self.node.clone(),
            uid: node.metadata.uid.unwrap_or_default(),
            controller: Some(true),
            ..OwnerReference::default()
        };
        let version = stored.and_then(|stored| stored.metadata.resource_version.clone());
        let generation = stored.map_or(0, |stored| stored.spec.pool.generation) + 1;
        Ok(ResourceSlice {
            metadata: ObjectMeta {
                name: Some(self.name()),
                owner_references: Some(vec![owner]),
                resource_version: version,
                ..ObjectMeta::default()
            },
            spec: ResourceSliceSpec {
                driver: DRIVER.into(),
                node_name: Some(self.node.clone()),
                pool: ResourcePool { name: self.node.clone(), generation, resource_slice_count: 1 },
                devices: Some(devices),
                ..ResourceSliceSpec::default()
            },
        })
    }

    async fn delete(&self) -> Result<(), String> {
        match timeout(ANSWER, self.slices.delete(&self.name(), &DeleteParams::default())).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(Error::Api(status))) if status.code == NOT_FOUND => Ok(()),
            Ok(Err(e)) => Err(failed("delete", "ResourceSlices", &e)),
            Err(_) => Err(late()),
        }
    }

    /// Returns when the slice may have changed.
    async fn changed(&self, version: &str) {
        let params = WatchParams::default().fields(&self.selector()).timeout(WATCH_SECONDS);
        let Ok(Ok(stream)) = timeout(ANSWER, self.slices.watch(&params, version)).await else {
            return sleep(RETRY).await;
        };
        let mut stream = std::pin::pin!(stream);
        while let Ok(Some(Ok(WatchEvent::Bookmark(_)))) = timeout(SILENCE, stream.next()).await {}
    }

    async fn gate_is_off(&self) -> String {
        let version = timeout(ANSWER, self.client.apiserver_version()).await;
        let version =
            version.ok().and_then(Result::ok).map_or_else(String::new, |info| format!(" ({})", info.git_version));
        format!(
            "cannot offer GPUs: the API server{version} drops allowMultipleAllocations of ResourceSlices, so claims \
             could not share a GPU. Enable the feature gate DRAConsumableCapacity in kube-apiserver, kube-scheduler \
             and kubelet (off by default before Kubernetes 1.36), or set offer = \"device-plugin\""
        )
    }

    async fn ask<T>(&self, what: &str, asking: impl Future<Output = kube::Result<T>>) -> Result<T, String> {
        self.ask_for(what, "ResourceSlices", asking).await
    }

    async fn ask_for<T>(
        &self,
        what: &str,
        whom: &str,
        asking: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, String> {
        timeout(ANSWER, asking).await.map_err(|_| late())?.map_err(|e| failed(what, whom, &e))
    }
}

fn late() -> String {
    format!("cannot publish the GPUs: the API server has not answered for {} s", ANSWER.as_secs())
}

/// Describes an error that leaves the API server without a list of GPUs, or with an outdated list.
fn failed(what: &str, whom: &str, error: &Error) -> String {
    let Error::Api(status) = error else {
        return format!("cannot publish the GPUs: cannot reach the API server: {}", causes(error));
    };
    let said = message(status);
    match status.code {
        UNAUTHORIZED | FORBIDDEN => format!(
            "cannot publish the GPUs: the API server does not allow the driver to {what} {whom}. Its service account \
             needs the ClusterRole nvshare-dra ({said})"
        ),
        NOT_FOUND if what == "list" => format!(
            "cannot offer GPUs: the API server has no resource.k8s.io/v1, which needs Kubernetes 1.34. Set offer = \
             \"device-plugin\" ({said})"
        ),
        code => {
            format!("cannot publish the GPUs: the API server cannot {what} {whom} (status {code}): {said}")
        }
    }
}
