//! A stand-in for kubelet's device manager, with the same sockets and the same order of calls.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use nvshare_device_plugin::protocol::device_plugin_client::DevicePluginClient;
use nvshare_device_plugin::protocol::registration_server::{Registration, RegistrationServer};
use nvshare_device_plugin::protocol::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, ContainerPreferredAllocationRequest, Device,
    DevicePluginOptions, Empty, ListAndWatchResponse, PreferredAllocationRequest, RegisterRequest,
};
use tokio::net::UnixListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

use super::PATIENCE;

/// A running kubelet. Dropping this value ends it.
#[derive(Debug)]
pub struct Kubelet {
    directory: PathBuf,
    server: JoinHandle<()>,
    registrations: mpsc::UnboundedReceiver<RegisterRequest>,
    /// The error with which registrations are rejected, if any.
    pub refusal: Arc<Mutex<Option<Status>>>,
}

/// The registration service. kubelet calls the plugin back before it answers.
struct Desk {
    directory: PathBuf,
    to: mpsc::UnboundedSender<RegisterRequest>,
    refusal: Arc<Mutex<Option<Status>>>,
}

#[tonic::async_trait]
impl Registration for Desk {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let refusal = self.refusal.lock().expect("the refusal").clone();
        call(&self.directory, &request.get_ref().endpoint).await;
        self.to.send(request.into_inner()).expect("the test listens");
        refusal.map_or(Ok(Response::new(Empty {})), Err)
    }
}

impl Kubelet {
    /// Starts as kubelet does: first removes all files from its directory.
    pub fn start(directory: &Path) -> Self {
        for entry in std::fs::read_dir(directory).expect("the directory") {
            std::fs::remove_file(entry.expect("an entry").path()).expect("it is removed");
        }
        Self::appear(directory)
    }

    /// Starts without removing other files from its directory.
    pub fn appear(directory: &Path) -> Self {
        let socket = directory.join("kubelet.sock");
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(socket).expect("it listens");
        let (to, registrations) = mpsc::unbounded_channel();
        let refusal = Arc::new(Mutex::new(None));
        let desk = RegistrationServer::new(Desk { directory: directory.to_owned(), to, refusal: refusal.clone() });
        let server = tokio::spawn(async move {
            let serving = Server::builder().add_service(desk).serve_with_incoming(UnixListenerStream::new(listener));
            serving.await.expect("it serves");
        });
        Self { directory: directory.to_owned(), server, registrations, refusal }
    }

    /// Waits for the next registration.
    pub async fn asked(&mut self) -> RegisterRequest {
        let asked = timeout(PATIENCE, self.registrations.recv()).await;
        asked.expect("a plugin registers").expect("the server runs")
    }

    /// Waits for the next registration and accepts it. Calls the plugin back, and watches the
    /// plugin's list.
    pub async fn plugin(&mut self) -> Plugin {
        let asked = self.asked().await;
        assert_eq!(asked.version, "v1beta1");
        assert!(!asked.endpoint.contains('/') && !asked.endpoint.is_empty(), "{asked:?}");
        let mut client = DevicePluginClient::new(call(&self.directory, &asked.endpoint).await);
        let options = client.get_device_plugin_options(Empty {}).await.expect("its options").into_inner();
        assert_eq!(Some(options), asked.options);
        let list = client.list_and_watch(Empty {}).await.expect("its list").into_inner();
        Plugin { asked, options, client, list, last: Vec::new() }
    }
}

/// Connects to a plugin, with the authority that kubelet sends since 1.26.
async fn call(directory: &Path, endpoint: &str) -> Channel {
    let endpoint = Endpoint::try_from(format!("unix://{}", directory.join(endpoint).display())).expect("an endpoint");
    let channel = endpoint.origin("http://localhost".parse().expect("a URI")).connect().await;
    channel.expect("the plugin serves before it registers")
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// kubelet's view of a plugin.
#[derive(Debug)]
pub struct Plugin {
    pub asked: RegisterRequest,
    pub options: DevicePluginOptions,
    pub client: DevicePluginClient<Channel>,
    list: Streaming<ListAndWatchResponse>,
    /// The newest list.
    pub last: Vec<Device>,
}

impl Plugin {
    /// Waits for the next list. Returns `None` at the end of the stream.
    pub async fn next(&mut self) -> Option<&[Device]> {
        let next = timeout(PATIENCE, self.list.message()).await.expect("a list comes");
        self.last = next.ok()??.devices;
        Some(&self.last)
    }

    /// Waits for a list that satisfies the condition.
    pub async fn until(&mut self, what: &str, is_it: impl Fn(&[Device]) -> bool) {
        let waiting = async {
            loop {
                let next = self.list.message().await.expect("the stream goes on").expect("the stream goes on");
                self.last = next.devices;
                if is_it(&self.last) {
                    return;
                }
            }
        };
        let came = timeout(PATIENCE, waiting).await.is_ok();
        assert!(came, "it never becomes so: {what}: {:?}", health(&self.last));
    }

    /// Waits until the GPUs, in the order of the list, have the expected health.
    pub async fn until_healthy(&mut self, expected: &[bool]) {
        let what = format!("healthy: {expected:?}");
        self.until(&what, |devices| health(devices).iter().map(|(_, healthy)| *healthy).eq(expected.iter().copied()))
            .await;
    }

    pub async fn allocate(&mut self, containers: &[&[&str]]) -> Result<AllocateResponse, Status> {
        let container = |ids: &&[&str]| ContainerAllocateRequest { devices_ids: owned(ids) };
        let request = AllocateRequest { container_requests: containers.iter().map(container).collect() };
        self.client.allocate(request).await.map(Response::into_inner)
    }

    pub async fn prefer(&mut self, available: &[String], must: &[&str], size: i32) -> Result<Vec<String>, Status> {
        let request = ContainerPreferredAllocationRequest {
            available_device_i_ds: available.to_vec(),
            must_include_device_i_ds: owned(must),
            allocation_size: size,
        };
        let request = PreferredAllocationRequest { container_requests: vec![request] };
        let answer = self.client.get_preferred_allocation(request).await?.into_inner();
        Ok(answer.container_responses.into_iter().flat_map(|answer| answer.device_i_ds).collect())
    }
}

fn owned(ids: &[&str]) -> Vec<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

pub fn ids(devices: &[Device]) -> Vec<String> {
    devices.iter().map(|device| device.id.clone()).collect()
}

/// Returns each GPU of a list with its health. All slots of a GPU have the same health.
pub fn health(devices: &[Device]) -> Vec<(String, bool)> {
    let mut gpus: Vec<(String, bool)> = Vec::new();
    for device in devices {
        let (uuid, _) = device.id.split_once("::").expect("a slot of a GPU");
        let is_healthy = match device.health.as_str() {
            "Healthy" => true,
            "Unhealthy" => false,
            other => panic!("{other:?} is no health"),
        };
        match gpus.last() {
            Some((last, health)) if last == uuid => assert_eq!(*health, is_healthy, "{uuid}"),
            _ => gpus.push((uuid.to_owned(), is_healthy)),
        }
    }
    gpus
}
