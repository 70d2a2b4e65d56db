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

/// Offers shares of the GPUs managed by nvshare to Kubernetes.
#[derive(Debug, Parser)]
#[command(name = "nvshare-device-plugin", version)]
pub struct Arguments {
    /// The configuration file [default: /etc/nvshare/device-plugin.toml, which may be missing]
    #[arg(long, value_name = "PATH")]
    pub config: Option<PathBuf>,

    /// Only check the configuration file
    #[arg(long)]
    pub check_config: bool,

    /// Only check that the running plugin answers and is registered with kubelet
    #[arg(long, conflicts_with = "check_config")]
    pub probe: bool,

    /// Only check that the running plugin is registered with kubelet and that containers can get a GPU
    #[arg(long, conflicts_with_all = ["check_config", "probe"])]
    pub ready: bool,

    /// Only check for pods with claims (these pods prevent the driver's removal), and create an event for each
    #[arg(long, conflicts_with_all = ["check_config", "probe", "ready"])]
    pub check_removal: bool,

    /// Directory of kubelet's socket and of the plugins' sockets
    #[arg(long, value_name = "PATH", default_value = KUBELET_DIRECTORY)]
    pub kubelet: PathBuf,

    /// Name of this node in Kubernetes, for offer = "dra"
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    pub node: Option<String>,

    /// Kubeconfig file for reaching the API server from outside a cluster, for offer = "dra"
    #[arg(long, value_name = "PATH")]
    pub kubeconfig: Option<PathBuf>,

    /// Kubelet's directory for plugins' files, for offer = "dra"
    #[arg(long, value_name = "PATH", default_value = PLUGINS)]
    pub plugins: PathBuf,

    /// Directory in which kubelet looks for plugins, for offer = "dra"
    #[arg(long, value_name = "PATH", default_value = REGISTRY)]
    pub registry: PathBuf,

    /// Scheduler's directory for the sockets of claims, on the host, for offer = "dra"
    #[arg(long, value_name = "PATH", default_value = CLAIMS)]
    pub claims: PathBuf,

    /// The agent's configuration file, which bounds what claims may set [default: /etc/nvshare/agent.toml, which may be missing]
    #[arg(long, value_name = "PATH")]
    pub agent_config: Option<PathBuf>,

    /// The scheduler's control socket
    #[arg(long, value_name = "PATH", default_value = CONTROL_SOCKET)]
    pub control: PathBuf,

    /// Directory of CDI files, for inject = "cdi"; can be repeated, and the CDI files of claims go to the last directory
    #[arg(long, value_name = "PATH", default_values = specs::DIRECTORIES)]
    pub cdi: Vec<PathBuf>,

    /// Configuration file of containerd, which may be missing; checked for CDI support
    #[arg(long, value_name = "PATH", default_value = CONTAINERD)]
    pub containerd: PathBuf,

    /// Log level
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: LogLevel,
}
