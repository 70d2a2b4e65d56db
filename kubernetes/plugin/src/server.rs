//! The services on the plugin's socket: kubelet's calls, and health checks for probes. `devices`,
//! `allocation` and `injection` compute the answers.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use tracing::{debug, info, warn};

use crate::allocation::{self, Question};
use crate::config::Config;
use crate::devices::{Devices, Gpu};
use crate::injection;
use crate::protocol::device_plugin_server::{DevicePlugin, DevicePluginServer};
use crate::protocol::{
    AllocateRequest, AllocateResponse, ContainerPreferredAllocationResponse, Device, DevicePluginOptions, Empty,
    ListAndWatchResponse, NumaNode, PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse, TopologyInfo,
};

use crate::status::status_server::{Status as StatusService, StatusServer};
use crate::status::{GpuStatus, StatusRequest, StatusResponse};

/// Time that pending requests have to complete when the server stops.
pub const GRACE: Duration = Duration::from_millis(500);

/// The service name that stands for the whole server in gRPC's health protocol.
pub const WHOLE_SERVER: &str = "";

/// The plugin's options, which are sent at registration and on kubelet's call.
pub const OPTIONS: DevicePluginOptions =
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true };

/// The data from which answers are computed.
#[derive(Debug, Clone)]
pub struct Facts {
    pub config: watch::Receiver<Arc<Config>>,
    pub devices: watch::Receiver<Arc<Devices>>,
}

/// A server on one socket.
#[derive(Debug)]
pub struct Serving {
    task: JoinHandle<()>,
    stop: watch::Sender<bool>,
    reporter: HealthReporter,
    registered: watch::Sender<bool>,
    watchers: watch::Receiver<usize>,
}

impl Serving {
    /// Starts the server. Until `set_registered` is called, probes get the answer that the plugin
    /// is not registered.
    pub async fn start(listener: UnixListener, facts: Facts) -> Self {
        let (stop, stopped) = watch::channel(false);
        let (count, watchers) = watch::channel(0);
        let (reporter, probes) = tonic_health::server::health_reporter();
        reporter.set_service_status(WHOLE_SERVER, ServingStatus::NotServing).await;
        let (registered, is_registered) = watch::channel(false);
        let status = StatusServer::new(Described { devices: facts.devices.clone(), is_registered });
        let plugin = DevicePluginServer::new(Plugin { facts, stopped: stopped.clone(), count });
        let server = Server::builder().add_service(plugin).add_service(probes).add_service(status);
        let task = tokio::spawn(async move {
            let end = until_stopped(stopped);
            if let Err(e) = server.serve_with_incoming_shutdown(UnixListenerStream::new(listener), end).await {
                warn!("cannot serve the plugin's socket: {e}");
            }
        });
        Self { task, stop, reporter, registered, watchers }
    }

    /// Sets the answer to probes.
    pub async fn set_registered(&self, registered: bool) {
        let status = if registered { ServingStatus::Serving } else { ServingStatus::NotServing };
        self.reporter.set_service_status(WHOLE_SERVER, status).await;
        self.registered.send_replace(registered);
    }

    /// Returns the number of current calls of ListAndWatch.
    pub fn watchers(&self) -> watch::Receiver<usize> {
        self.watchers.clone()
    }

    /// Returns true if the server has ended without being stopped.
    pub fn is_over(&self) -> bool {
        self.task.is_finished()
    }

    /// Ends every stream, and waits briefly for pending requests.
    pub async fn stop(mut self) {
        let _ = self.stop.send(true);
        if tokio::time::timeout(GRACE, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

async fn until_stopped(mut stopped: watch::Receiver<bool>) {
    // An error means that the server was dropped, which also stops the stream.
    let _ = stopped.wait_for(|stopped| *stopped).await;
}

struct Plugin {
    facts: Facts,
    stopped: watch::Receiver<bool>,
    count: watch::Sender<usize>,
}

/// Counts a call of ListAndWatch until this value is dropped.
struct Watcher(watch::Sender<usize>);

impl Watcher {
    fn new(count: &watch::Sender<usize>) -> Self {
        count.send_modify(|count| *count += 1);
        Self(count.clone())
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count = count.saturating_sub(1));
    }
}

#[tonic::async_trait]
impl DevicePlugin for Plugin {
    type ListAndWatchStream = ReceiverStream<Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(&self, _: Request<Empty>) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(OPTIONS))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        // The channel buffers one list, so that a slow reader gets the newest list next.
        let (to, stream) = mpsc::channel(1);
        let (mut devices, stopped, watcher) =
            (self.facts.devices.clone(), self.stopped.clone(), Watcher::new(&self.count));
        tokio::spawn(async move {
            let _watcher = watcher;
            let send = async {
                loop {
                    let now = devices.borrow_and_update().clone();
                    if to.send(Ok(list(&now))).await.is_err() || devices.changed().await.is_err() {
                        return;
                    }
                }
            };
            tokio::select! {
                () = send => {}
                () = to.closed() => {}
                () = until_stopped(stopped) => {}
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let (devices, allocation) = (self.facts.devices.borrow().clone(), self.facts.config.borrow().allocation);
        let answers = request.into_inner().container_requests.into_iter().map(|asked| {
            let (available, must_include) = (&asked.available_device_i_ds, &asked.must_include_device_i_ds);
            let question = Question { available, must_include, size: asked.allocation_size };
            let ids = allocation::prefer(&devices, allocation, question).map_err(Status::invalid_argument)?;
            Ok(ContainerPreferredAllocationResponse { device_i_ds: ids })
        });
        let container_responses = answers.collect::<Result<_, Status>>().inspect_err(|e| debug!("{}", e.message()))?;
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(&self, request: Request<AllocateRequest>) -> Result<Response<AllocateResponse>, Status> {
        let (devices, config) = (self.facts.devices.borrow().clone(), self.facts.config.borrow().clone());
        let containers = request.into_inner().container_requests;
        if containers.is_empty() {
            return Err(Status::invalid_argument("the request names no container. Name at least one"));
        }
        let answers = containers.iter().map(|asked| injection::answer(&config, &devices, &asked.devices_ids));
        let container_responses = answers
            .collect::<Result<_, Status>>()
            .inspect_err(|e| warn!("refused a request for devices from kubelet: {}", e.message()))?;
        let ids: Vec<&str> = containers.iter().flat_map(|asked| &asked.devices_ids).map(String::as_str).collect();
        info!("a pod gets {}", ids.join(", "));
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

/// The plugin's status, for its probe.
struct Described {
    devices: watch::Receiver<Arc<Devices>>,
    is_registered: watch::Receiver<bool>,
}

#[tonic::async_trait]
impl StatusService for Described {
    async fn read(&self, _: Request<StatusRequest>) -> Result<Response<StatusResponse>, Status> {
        let devices = self.devices.borrow().clone();
        let gpu = |gpu: &Gpu| GpuStatus { uuid: gpu.uuid.clone(), problem: gpu.problem.clone().unwrap_or_default() };
        let gpus = devices.gpus.iter().map(gpu).collect();
        let problem = String::new();
        Ok(Response::new(StatusResponse { registered: *self.is_registered.borrow(), gpus, problem }))
    }
}

/// Returns the whole list in kubelet's form.
fn list(devices: &Devices) -> ListAndWatchResponse {
    let of_gpu = |gpu: &Gpu| {
        let health = if gpu.problem.is_none() { "Healthy" } else { "Unhealthy" };
        let topology = gpu.numa.map(|node| TopologyInfo { nodes: vec![NumaNode { id: node.into() }] });
        let device = move |id| Device { id, health: health.to_owned(), topology: topology.clone() };
        gpu.ids().map(device).collect::<Vec<_>>()
    };
    ListAndWatchResponse { devices: devices.gpus.iter().flat_map(of_gpu).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;

    fn gpu(uuid: String, numa: Option<u32>, problem: Option<String>) -> Gpu {
        Gpu { uuid, index: Some(0), numa, slots: 2, problem, ..Gpu::default() }
    }

    #[test]
    fn a_list_has_health_and_topology() {
        let devices = Devices {
            gpus: vec![gpu("GPU-a".into(), Some(1), None), gpu("GPU-b".into(), None, Some("it ails".into()))],
        };
        let list = list(&devices).devices;
        let said: Vec<_> = list
            .iter()
            .map(|device| {
                let nodes = device.topology.iter().flat_map(|topology| &topology.nodes).map(|node| node.id);
                (device.id.as_str(), device.health.as_str(), nodes.collect::<Vec<_>>())
            })
            .collect();
        let (well, ill) = ("Healthy", "Unhealthy");
        let expected = [
            ("GPU-a::0", well, vec![1]),
            ("GPU-a::1", well, vec![1]),
            ("GPU-b::0", ill, vec![]),
            ("GPU-b::1", ill, vec![]),
        ];
        assert_eq!(said, expected);
    }

    #[test]
    fn the_longest_device_list_fits_in_a_grpc_message() {
        /// gRPC's default limit of received messages, in bytes.
        const MESSAGE_MAX: usize = 4 << 20;
        let slots = u32::try_from(*crate::config::SLOTS.end()).expect("it fits");
        let slice = |n: usize| {
            let uuid = format!("MIG-{n:08}-0000-0000-0000-000000000000");
            Gpu { slots, ..gpu(uuid, Some(1), Some("it ails".into())) }
        };
        let list = list(&Devices { gpus: (0..8 * 7).map(slice).collect() });
        assert!(list.devices.iter().all(|device| device.id.len() <= crate::names::ID_MAX));
        assert!(list.encoded_len() < MESSAGE_MAX, "{} bytes", list.encoded_len());
    }
}
