//! `nvshare-device-plugin`: offers the GPUs that nvshare's scheduler shares to kubelet.
//!
//! - [`config`]: the configuration file.
//! - [`names`]: names of resources, CDI devices and GPUs.
//! - [`devices`]: the devices for kubelet, without I/O.
//! - [`allocation`]: preferred slots for a container, without I/O.
//! - [`injection`]: the container's files and variables.
//! - [`health`]: reports of NVML and the scheduler about GPUs.
//! - [`cdi`]: checks whether containers can get the GPUs.
//! - [`containerd`]: reads containerd's settings for this check.
//! - [`inventory`]: combines the reports.
//! - [`server`]: the services on the plugin's socket.
//! - [`lifecycle`]: maintains the socket and its registration with kubelet, with [`sockets`],
//!   [`notices`] and [`registration`].
//! - [`dra`]: offers the same GPUs by kubelet's other API.
//! - [`probe`]: checks for Kubernetes' probes whether the running plugin is registered and
//!   containers can get slots.
//! - [`plugin`]: the whole plugin as one process.
//! - [`protocol`]: kubelet's device plugin API, generated from `proto/deviceplugin.proto`.
//! - [`status`]: the plugin's own API, for the probe.

pub mod allocation;
pub mod arguments;
pub mod cdi;
pub mod config;
pub mod containerd;
pub mod devices;
pub mod dra;
pub mod health;
pub mod injection;
pub mod inventory;
pub mod lifecycle;
pub mod names;
pub mod notices;
pub mod plugin;
pub mod probe;
pub mod registration;
pub mod server;
pub mod sockets;

/// The messages and services of kubelet's device plugin API, version v1beta1.
#[allow(missing_debug_implementations)] // tonic generates types without Debug
pub mod protocol {
    tonic::include_proto!("v1beta1");

    /// The API's version in registrations.
    pub const VERSION: &str = "v1beta1";
}

/// The plugin's own service, which describes its status in words.
#[allow(missing_debug_implementations)] // tonic generates types without Debug
pub mod status {
    tonic::include_proto!("nvshare.deviceplugin");
}
