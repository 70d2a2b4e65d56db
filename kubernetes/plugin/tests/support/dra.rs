//! A stand-in for kubelet's plugin manager and DRA manager.

use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nvshare_device_plugin::dra::health::dra_resource_health_client::DraResourceHealthClient;
use nvshare_device_plugin::dra::health::{HealthStatus, NodeWatchResourcesRequest, NodeWatchResourcesResponse};
use nvshare_device_plugin::dra::plugin_registration::registration_client::RegistrationClient;
use nvshare_device_plugin::dra::plugin_registration::{InfoRequest, PluginInfo, RegistrationStatus};
use nvshare_device_plugin::dra::protocol::dra_plugin_client::DraPluginClient;
use nvshare_device_plugin::dra::protocol::{Claim, Device, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use tokio::time::timeout;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint};

use super::PATIENCE;

/// kubelet's view of the driver.
#[derive(Debug)]
pub struct Driver {
    pub info: PluginInfo,
    client: DraPluginClient<Channel>,
    channel: Channel,
}

impl Driver {
    /// Finds the driver by the sockets in a directory, and registers it.
    pub async fn find(registry: &Path) -> Self {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(driver) = Self::look(registry).await {
                return driver;
            }
            assert!(Instant::now() < deadline, "no driver is in {}", registry.display());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn look(registry: &Path) -> Option<Self> {
        let entries = registry.read_dir().ok()?.flatten().map(|entry| entry.path());
        let socket = entries.into_iter().find(|path| path.extension().is_some_and(|end| end == "sock"))?;
        // Escapes a path as gRPC for Go does if the path is the target.
        let escape = |c: char| match c {
            'a'..='z' | 'A'..='Z' | '0'..='9' | '-' | '_' | '.' | '~' | '@' => c.to_string(),
            other => format!("%{:02X}", u32::from(other)),
        };
        let authority: String = socket.to_str().expect("a path").chars().map(escape).collect();
        let channel = call(&socket, &authority).await.ok()?;
        let mut desk = RegistrationClient::new(channel);
        let info = desk.get_info(InfoRequest {}).await.expect("it says what it is").into_inner();
        assert_eq!((&*info.r#type, &*info.name), ("DRAPlugin", "gpu.nvshare.com"));
        assert!(info.supported_versions.contains(&"v1.DRAPlugin".to_owned()), "{info:?}");
        let channel = call(Path::new(&info.endpoint), "localhost").await.expect("the driver serves before it is found");
        let status = RegistrationStatus { plugin_registered: true, error: String::new() };
        desk.notify_registration_status(status).await.expect("it is told");
        Some(Self { info, client: DraPluginClient::new(channel.clone()), channel })
    }

    /// Requests the preparation of claims. Returns the answers by UID, one for each claim.
    pub async fn prepare(&mut self, claims: &[Claim]) -> HashMap<String, Result<Vec<Device>, String>> {
        let request = NodePrepareResourcesRequest { claims: claims.to_vec() };
        let answers = self.client.node_prepare_resources(request).await.expect("it answers").into_inner().claims;
        assert_eq!(answers.len(), claims.len());
        let result = |(uid, answer): (String, nvshare_device_plugin::dra::protocol::NodePrepareResourceResponse)| {
            let answer = if answer.error.is_empty() { Ok(answer.devices) } else { Err(answer.error) };
            (uid, answer)
        };
        answers.into_iter().map(result).collect()
    }

    /// Requests the preparation of one claim.
    pub async fn prepare_one(&mut self, claim: &Claim) -> Result<Vec<Device>, String> {
        self.prepare(std::slice::from_ref(claim)).await.remove(&claim.uid).expect("it is answered")
    }

    pub async fn unprepare(&mut self, claim: &Claim) {
        let request = NodeUnprepareResourcesRequest { claims: vec![claim.clone()] };
        let mut answers = self.client.node_unprepare_resources(request).await.expect("it answers").into_inner().claims;
        assert_eq!(answers.remove(&claim.uid).expect("it is answered").error, "");
    }

    pub async fn health(&self) -> Health {
        let mut client = DraResourceHealthClient::new(self.channel.clone());
        Health(client.node_watch_resources(NodeWatchResourcesRequest {}).await.expect("it reports").into_inner())
    }
}

/// The stream of health reports.
#[derive(Debug)]
pub struct Health(Streaming<NodeWatchResourcesResponse>);

impl Health {
    /// Waits until the devices have the expected health. Returns the reasons.
    pub async fn until(&mut self, expected: &[HealthStatus]) -> Vec<String> {
        let waiting = async {
            loop {
                let report = self.0.message().await.expect("a stream").expect("a report");
                assert!(report.devices.iter().all(|device| device.last_updated_time > 1_700_000_000));
                if report.devices.iter().map(|device| device.health()).eq(expected.iter().copied()) {
                    return report.devices.into_iter().map(|device| device.message).collect();
                }
            }
        };
        timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("{expected:?} never came"))
    }
}

async fn call(socket: &Path, authority: &str) -> Result<Channel, tonic::transport::Error> {
    let endpoint = Endpoint::try_from(format!("unix://{}", socket.display())).expect("an endpoint");
    let origin = format!("http://{authority}").parse().unwrap_or_else(|e| panic!("{authority}: {e}"));
    endpoint.origin(origin).connect().await
}

/// A container with CDI devices, created as a container runtime creates it.
#[derive(Debug, Default)]
pub struct Container {
    /// The host's directory at `/run/nvshare`: the last of several mounts.
    pub sockets: Option<PathBuf>,
    pub env: Vec<String>,
}

impl Container {
    pub fn new(cdi: &Path, devices: &[String]) -> Self {
        let specs: Vec<serde_json::Value> = cdi
            .read_dir()
            .expect("the directory")
            .flatten()
            .filter(|entry| entry.path().extension().is_some_and(|end| end == "json"))
            .map(|entry| serde_json::from_slice(&std::fs::read(entry.path()).expect("a file")).expect("JSON"))
            .collect();
        let (mut container, mut seen) = (Self::default(), Vec::new());
        for device in devices {
            let (kind, name) = device.split_once('=').expect("a device");
            let own = |spec: &serde_json::Value| {
                let devices = spec["devices"].as_array().expect("devices").iter();
                devices.filter(|device| device["name"] == name).map(|device| device["containerEdits"].clone()).next()
            };
            let spec = specs.iter().find(|spec| spec["kind"] == kind && own(spec).is_some());
            let spec = spec.unwrap_or_else(|| panic!("unresolvable CDI device {device}"));
            let mut edits = vec![own(spec).expect("the device")];
            // The edits that a file defines for all of its devices are applied once, before the
            // edits of the device itself.
            if !seen.contains(&spec) {
                edits.insert(0, spec["containerEdits"].clone());
                seen.push(spec);
            }
            let lists = |key: &'static str| edits.iter().filter_map(move |edits| edits[key].as_array()).flatten();
            for mount in lists("mounts").filter(|mount| mount["containerPath"] == "/run/nvshare") {
                container.sockets = Some(PathBuf::from(mount["hostPath"].as_str().expect("a path")));
            }
            container.env.extend(lists("env").map(|variable| variable.as_str().expect("a variable").to_owned()));
        }
        container
    }

    /// Runs the hook that runtimes call when they create the container. Returns its error.
    pub fn create(&self, nvsharectl: &Path) -> Result<(), String> {
        let bundle = tempfile::tempdir().expect("a directory");
        let config = serde_json::json!({"root": {"path": "rootfs"}, "process": {"env": self.env}});
        std::fs::write(bundle.path().join("config.json"), config.to_string()).expect("a file");
        std::fs::create_dir(bundle.path().join("rootfs")).expect("a directory");
        let mut command = Command::new(nvsharectl);
        command.args(["cdi", "merge-preload"]).stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut hook = command.spawn().expect("it starts");
        let state = serde_json::json!({"ociVersion": "1.0.2", "bundle": bundle.path()});
        write!(hook.stdin.take().expect("its input"), "{state}").expect("it reads");
        let output = hook.wait_with_output().expect("it ends");
        if output.status.success() { Ok(()) } else { Err(String::from_utf8(output.stderr).expect("UTF-8")) }
    }
}
