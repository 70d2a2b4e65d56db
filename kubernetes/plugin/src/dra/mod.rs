//! The DRA driver. It offers GPUs by kubelet's other API (`resource.k8s.io/v1`), with consumable
//! capacity.
//!
//! The driver is part of `nvshare-device-plugin`. One process has one list of GPUs, so it cannot
//! offer a GPU through both of kubelet's APIs. It also watches the GPUs' health only once.
//! Rejected: two programs with the same configuration file, because each would read it at a
//! different time.
//!
//! - [`slice`]: the devices of a ResourceSlice, without I/O.
//! - [`claim`]: the allocation of a ResourceClaim as a rule, without I/O.
//! - [`quantity`]: numbers in Kubernetes' notation.
//! - [`publish`]: keeps the slice at the API server up to date, and checks what the API server
//!   stores.
//! - [`claims`]: the prepared claims. [`store`] keeps them on disk. The scheduler receives them,
//!   and the container runtime finds them as CDI devices.
//! - [`service`]: kubelet's calls.
//! - [`registration`]: discovery of the driver by kubelet.
//! - [`driver`]: the whole driver.
//! - [`protocol`]: kubelet's API for DRA drivers.
//! - [`health`]: kubelet's API for the health of devices.
//! - [`plugin_registration`]: kubelet's API for discovering plugins.

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
#[allow(missing_debug_implementations)] // tonic generates types without Debug
pub mod protocol {
    tonic::include_proto!("k8s.io.kubelet.pkg.apis.dra.v1");

    /// The service's name in registrations with kubelet.
    pub const SERVICE: &str = "v1.DRAPlugin";
}

/// kubelet's API for the health of devices.
#[allow(missing_debug_implementations)] // tonic generates types without Debug
pub mod health {
    tonic::include_proto!("v1alpha1");

    /// The service's name in registrations with kubelet.
    pub const SERVICE: &str = "v1alpha1.DRAResourceHealth";
}

/// kubelet's API for the registration of plugins.
#[allow(missing_debug_implementations)] // tonic generates types without Debug
pub mod plugin_registration {
    tonic::include_proto!("pluginregistration");

    /// The type of plugins that are DRA drivers.
    pub const DRA_PLUGIN: &str = "DRAPlugin";
}
