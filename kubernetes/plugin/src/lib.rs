//! `nvshare-device-plugin`: the kubelet's view of the GPUs that nvshare's scheduler shares.
//!
//! - [`config`]: the configuration file; [`names`]: names of resources, CDI devices and GPUs.
//! - [`devices`]: the devices for kubelet. [`allocation`]: preferred slots for a container. [`injection`]: the files
//!   and variables that it gets. All pure.
//! - [`health`]: reports of NVML and the scheduler about GPUs. [`cdi`]: whether containers can get them, for which
//!   [`containerd`] reads that runtime's settings. [`inventory`]: combines them.
//! - [`server`]: the services on the plugin's socket. [`lifecycle`]: keeps the socket and its registration with
//!   kubelet; [`sockets`], [`notices`] and [`registration`] are parts of it.
//! - [`dra`]: the same GPUs by kubelet's other API.
//! - [`probe`]: whether a running plugin is registered and containers can get slots, for Kubernetes' probes.
//! - [`plugin`]: all of it as one process.
//! - [`protocol`]: kubelet's device plugin API, generated from `proto/deviceplugin.proto`. [`status`]: the plugin's own,
//!   for the probe.

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
#[allow(missing_debug_implementations)] // of what is generated
pub mod protocol {
    tonic::include_proto!("v1beta1");

    /// The API's version in registrations.
    pub const VERSION: &str = "v1beta1";
}

/// The plugin's own service: how it is, in words.
#[allow(missing_debug_implementations)] // of what is generated
pub mod status {
    tonic::include_proto!("nvshare.deviceplugin");
}
