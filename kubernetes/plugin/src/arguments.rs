//! The command line of `nvshare-device-plugin`.

use std::path::PathBuf;

use clap::Parser;
use nvshare::config::LogLevel;
use nvshare::config::paths::CONTROL_SOCKET;
use nvshare::ctl::cdi::specs;

/// Where kubelet keeps the sockets of plugins, unless its own directory is moved.
pub const KUBELET_DIRECTORY: &str = "/var/lib/kubelet/device-plugins";

/// Where containerd's packages have its settings.
pub const CONTAINERD: &str = "/etc/containerd/config.toml";

/// Offers slots of the GPUs that nvshare shares to Kubernetes.
#[derive(Debug, Parser)]
#[command(name = "nvshare-device-plugin", version)]
pub struct Arguments {
    /// The configuration file [default: /etc/nvshare/device-plugin.toml, which may be missing]
    #[arg(long, value_name = "PATH")]
    pub config: Option<PathBuf>,

    /// Only say whether the configuration file is right
    #[arg(long)]
    pub check_config: bool,

    /// Only say whether the plugin that runs answers, and kubelet knows of it
    #[arg(long, conflicts_with = "check_config")]
    pub probe: bool,

    /// Only say whether kubelet knows the plugin that runs, and containers can get slots of a GPU
    #[arg(long, conflicts_with_all = ["check_config", "probe"])]
    pub ready: bool,

    /// The directory of kubelet's socket and of plugins'
    #[arg(long, value_name = "PATH", default_value = KUBELET_DIRECTORY)]
    pub kubelet: PathBuf,

    /// The scheduler's control socket
    #[arg(long, value_name = "PATH", default_value = CONTROL_SOCKET)]
    pub control: PathBuf,

    /// A directory of CDI files, for inject = "cdi"; can be repeated
    #[arg(long, value_name = "PATH", default_values = specs::DIRECTORIES)]
    pub cdi: Vec<PathBuf>,

    /// containerd's settings, which may be missing: whether it heeds CDI devices
    #[arg(long, value_name = "PATH", default_value = CONTAINERD)]
    pub containerd: PathBuf,

    /// How much is logged
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: LogLevel,
}
