//! The command line of `nvshare-device-plugin`.

use std::path::PathBuf;

use clap::Parser;
use nvshare::config::LogLevel;
use nvshare::config::paths::CONTROL_SOCKET;
use nvshare::ctl::cdi::specs;

/// kubelet's default directory for the sockets of device plugins.
pub const KUBELET_DIRECTORY: &str = "/var/lib/kubelet/device-plugins";

/// kubelet's directory for the files of other plugins, and the directory in which kubelet finds
/// those plugins.
pub const PLUGINS: &str = "/var/lib/kubelet/plugins";
pub const REGISTRY: &str = "/var/lib/kubelet/plugins_registry";

/// The scheduler's directory for the sockets of claims.
pub const CLAIMS: &str = "/run/nvshare-claims";

/// The path of containerd's settings in containerd's packages.
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

    /// Only say whether pods of the cluster have claims, without which the driver cannot be removed, and give these an event
    #[arg(long, conflicts_with_all = ["check_config", "probe", "ready"])]
    pub check_removal: bool,

    /// The directory of kubelet's socket and of plugins'
    #[arg(long, value_name = "PATH", default_value = KUBELET_DIRECTORY)]
    pub kubelet: PathBuf,

    /// The name of this node in Kubernetes, for offer = "dra"
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node: Option<String>,

    /// How to reach the API server, outside of a cluster, for offer = "dra"
    #[arg(long, value_name = "PATH")]
    pub kubeconfig: Option<PathBuf>,

    /// kubelet's directory of plugins' own files, for offer = "dra"
    #[arg(long, value_name = "PATH", default_value = PLUGINS)]
    pub plugins: PathBuf,

    /// The directory in which kubelet finds plugins, for offer = "dra"
    #[arg(long, value_name = "PATH", default_value = REGISTRY)]
    pub registry: PathBuf,

    /// The scheduler's directory of claims' sockets, on the host, for offer = "dra"
    #[arg(long, value_name = "PATH", default_value = CLAIMS)]
    pub claims: PathBuf,

    /// The agent's configuration file, which bounds what claims may set [default: /etc/nvshare/agent.toml, which may be missing]
    #[arg(long, value_name = "PATH")]
    pub agent_config: Option<PathBuf>,

    /// The scheduler's control socket
    #[arg(long, value_name = "PATH", default_value = CONTROL_SOCKET)]
    pub control: PathBuf,

    /// A directory of CDI files, for inject = "cdi"; can be repeated: the last one gets those of claims
    #[arg(long, value_name = "PATH", default_values = specs::DIRECTORIES)]
    pub cdi: Vec<PathBuf>,

    /// containerd's settings, which may be missing: whether it heeds CDI devices
    #[arg(long, value_name = "PATH", default_value = CONTAINERD)]
    pub containerd: PathBuf,

    /// How much is logged
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: LogLevel,
}
