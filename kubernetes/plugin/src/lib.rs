//! `nvshare-device-plugin`: the kubelet's view of the GPUs that nvshare's scheduler shares.
//!
//! - [`config`]: the configuration file; [`names`]: what resources, CDI devices and GPUs are called.
//! - [`devices`]: what kubelet is told there is. [`allocation`]: which slots a container should get. [`injection`]: what it is
//!   given for them. All pure.
//! - [`health`]: what NVML and the scheduler say of GPUs. [`inventory`]: putting that together as it changes.
//! - [`server`]: the services on the plugin's socket. [`lifecycle`]: having the socket, and kubelet know of it;
//!   [`sockets`], [`notices`] and [`registration`] are the parts of that.
//! - [`probe`]: whether a running plugin is registered, for Kubernetes' probes.
//! - [`plugin`]: all of it as one process.
//! - [`protocol`]: kubelet's device plugin API, made from `proto/deviceplugin.proto`.

pub mod allocation;
pub mod arguments;
pub mod config;
pub mod devices;
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

    /// The API's version, as registrations say it.
    pub const VERSION: &str = "v1beta1";
}
