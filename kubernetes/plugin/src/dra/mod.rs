//! The DRA driver: the other API of kubelet by which GPUs are offered (`resource.k8s.io/v1`), with consumable capacity.
//!
//! - [`slice`]: the devices of a ResourceSlice. [`claim`]: what a ResourceClaim was allocated, as a rule. [`quantity`]: numbers
//!   as Kubernetes writes them. All pure.
//! - [`publish`]: keeps the slice at the API server, and sees what that makes of it.
//! - [`claims`]: the claims that are prepared, which [`store`] keeps on disk, the scheduler is told of, and the container runtime finds
//!   as CDI devices.
//! - [`service`]: kubelet's calls. [`registration`]: how kubelet finds the driver. [`driver`]: all of it.
//! - [`protocol`]: kubelet's API for DRA drivers; [`health`]: how devices are; [`plugin_registration`]: how it finds plugins.

pub mod claim;
pub mod claims;
pub mod driver;
pub mod publish;
pub mod quantity;
pub mod registration;
pub mod removal;
pub mod service;
pub mod slice;
pub mod store;

/// The driver's name in Kubernetes.
pub const DRIVER: &str = "gpu.nvshare.com";

/// The messages and services of kubelet's API for DRA drivers.
#[allow(missing_debug_implementations)] // of what is generated
pub mod protocol {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");

    /// What kubelet calls the service in registrations.
    pub const SERVICE: &str = "v1.DRAPlugin";
}

/// The health of devices.
#[allow(missing_debug_implementations)] // of what is generated
pub mod health {
    tonic::include_proto!("v1alpha1");

    /// What kubelet calls the service in registrations.
    pub const SERVICE: &str = "v1alpha1.DRAResourceHealth";
}

/// kubelet's registration of plugins.
#[allow(missing_debug_implementations)] // of what is generated
pub mod plugin_registration {
    tonic::include_proto!("pluginregistration");

    /// The type of plugins that are DRA drivers.
    pub const DRA_PLUGIN: &str = "DRAPlugin";
}
