//! The driver's services on its socket: kubelet's calls, health, and the probe.

use std::collections::HashMap;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client, Error};
use nvshare_kubernetes::api_server::{causes, message};
use nvshare_kubernetes::permissions::file::Config as Permissions;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use super::claim::{self, Prepared, PreparedDevice};
use super::claims::Claims;
use super::health::dra_resource_health_server::DraResourceHealth;
use super::health::{
    DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
};
use super::protocol::dra_plugin_server::DraPlugin;
use super::protocol::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use super::slice::device_name;
use crate::config::Config;
use crate::devices::{Devices, Gpu};
use crate::names::quoted;
use crate::status::status_server::Status as StatusService;
use crate::status::{GpuStatus, StatusRequest, StatusResponse};

/// Timeout for the API server's answer. kubelet's own timeout is 45 s.
const ANSWER: Duration = Duration::from_secs(10);

/// Period of health reports. After 30 s without a report, kubelet treats the health as unknown.
const REPORT: Duration = Duration::from_secs(10);

/// The data from which answers are computed.
#[derive(Clone)]
pub struct Facts {
    pub node: String,
    pub client: Client,
    pub config: watch::Receiver<Arc<Config>>,
    /// The GPUs that the DRA driver offers.
    pub devices: watch::Receiver<Arc<Devices>>,
    pub claims: Arc<Claims>,
    /// The agent's configuration, which limits the keys of claims.
    pub permissions: Option<PathBuf>,
    /// The reason why no GPU is offered. `None` if GPUs are offered.
    pub problem: watch::Receiver<Option<String>>,
    /// Whether kubelet has registered the driver.
    pub registered: watch::Receiver<bool>,
    pub stopped: watch::Receiver<bool>,
}

impl std::fmt::Debug for Facts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Facts").field("node", &self.node).finish_non_exhaustive()
    }
}

#[derive(Debug, Clone)]
pub struct Service(pub Facts);

impl Service {
    async fn prepare(&self, asked: &Claim) -> Result<Vec<Device>, String> {
        if !nvshare::bus::is_pod_uid(&asked.uid) {
            return Err(format!("{} is not the UID of a claim", quoted(&asked.uid)));
        }
        let prepared = match self.0.claims.get(&asked.uid).await {
            // A restarted kubelet repeats the call. The claim cannot have changed, because kubelet
            // would have unprepared it first.
            Some(prepared) => prepared,
            None => self.read_claim(asked).await?,
        };
        self.0.claims.prepare(prepared.clone()).await?;
        info!("prepared claim {}/{}", prepared.namespace, prepared.name);
        Ok(self.devices(&prepared))
    }

    /// Reads a claim's allocation from the API server.
    async fn read_claim(&self, asked: &Claim) -> Result<Prepared, String> {
        let api: Api<ResourceClaim> = Api::namespaced(self.0.client.clone(), &asked.namespace);
        let claim = match timeout(ANSWER, api.get(&asked.name)).await {
            Ok(Ok(claim)) => claim,
            Ok(Err(Error::Api(status))) => {
                return Err(format!("the API server does not return the claim: {}", message(&status)));
            }
            Ok(Err(e)) => return Err(format!("cannot request the claim from the API server: {}", causes(&e))),
            Err(_) => return Err(format!("the API server has not answered for {} s", ANSWER.as_secs())),
        };
        if claim.metadata.uid.as_deref() != Some(&asked.uid) {
            return Err("another claim has that name now".into());
        }
        let permissions = Permissions::load(self.0.permissions.as_deref()).map_err(|e| e.to_string())?;
        let devices = self.0.devices.borrow().clone();
        claim::read(&claim, &self.0.node, &devices, permissions.of(&asked.namespace))
    }

    fn devices(&self, prepared: &Prepared) -> Vec<Device> {
        let kind = self.0.config.borrow().cdi_kind.clone();
        let device = |device: &PreparedDevice| Device {
            request_names: vec![device.request.clone()],
            pool_name: self.0.node.clone(),
            device_name: device.name.clone(),
            cdi_device_ids: vec![format!("{kind}={}", device.uuid), Claims::cdi_device(&prepared.uid)],
        };
        prepared.devices.iter().map(device).collect()
    }
}

#[tonic::async_trait]
impl DraPlugin for Service {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let mut claims = HashMap::new();
        for asked in request.into_inner().claims {
            let answer = match self.prepare(&asked).await {
                Ok(devices) => NodePrepareResourceResponse { devices, error: String::new() },
                Err(error) => {
                    warn!("cannot prepare claim {}/{}: {error}", asked.namespace, asked.name);
                    NodePrepareResourceResponse { devices: Vec::new(), error }
                }
            };
            claims.insert(asked.uid, answer);
        }
        Ok(Response::new(NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let mut claims = HashMap::new();
        for asked in request.into_inner().claims {
            if nvshare::bus::is_pod_uid(&asked.uid) {
                self.0.claims.unprepare(&asked.uid).await;
            }
            claims.insert(asked.uid, NodeUnprepareResourceResponse::default());
        }
        Ok(Response::new(NodeUnprepareResourcesResponse { claims }))
    }
}

#[tonic::async_trait]
impl DraResourceHealth for Service {
    type NodeWatchResourcesStream = ReceiverStream<Result<NodeWatchResourcesResponse, Status>>;

    async fn node_watch_resources(
        &self,
        _: Request<NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        let (to, stream) = mpsc::channel(1);
        let (mut devices, mut stopped) = (self.0.devices.clone(), self.0.stopped.clone());
        let node = self.0.node.clone();
        let send = async move {
            loop {
                let now = devices.borrow_and_update().clone();
                if to.send(Ok(health(&node, &now))).await.is_err()
                    || matches!(timeout(REPORT, devices.changed()).await, Ok(Err(_)))
                {
                    return;
                }
            }
        };
        until(send, async move { drop(stopped.wait_for(|stopped| *stopped).await) });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// Runs `work` until either `work` or `end` completes.
fn until(work: impl Future<Output = ()> + Send + 'static, end: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(async move {
        tokio::select! {
            () = work => {}
            () = end => {}
        }
    });
}

fn health(node: &str, devices: &Devices) -> NodeWatchResourcesResponse {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let device = |gpu: &Gpu| DeviceHealth {
        device: Some(DeviceIdentifier { pool_name: node.to_owned(), device_name: device_name(&gpu.uuid) }),
        health: if gpu.problem.is_none() { HealthStatus::Healthy } else { HealthStatus::Unhealthy }.into(),
        last_updated_time: i64::try_from(now).unwrap_or(i64::MAX),
        message: gpu.problem.clone().unwrap_or_default(),
    };
    NodeWatchResourcesResponse { devices: devices.gpus.iter().map(device).collect() }
}

#[tonic::async_trait]
impl StatusService for Service {
    async fn read(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        let devices = self.0.devices.borrow().clone();
        let gpu = |gpu: &Gpu| GpuStatus { uuid: gpu.uuid.clone(), problem: gpu.problem.clone().unwrap_or_default() };
        Ok(Response::new(StatusResponse {
            registered: *self.0.registered.borrow(),
            gpus: devices.gpus.iter().map(gpu).collect(),
            problem: self.0.problem.borrow().clone().unwrap_or_default(),
        }))
    }
}
