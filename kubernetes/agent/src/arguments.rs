//! The command line of `nvshare-agent`.

use std::path::PathBuf;

use clap::Parser;
use nvshare::bus::is_pod_name;
use nvshare::config::LogLevel;
use nvshare::config::paths::CONTROL_SOCKET;

/// The socket on which the running agent answers `--probe`.
pub const PROBE_SOCKET: &str = "/run/nvshare-agent/agent.sock";

/// Reports this node's pods and the rules in their annotations to nvshare's scheduler.
#[derive(Debug, Parser)]
#[command(name = "nvshare-agent", version)]
pub struct Arguments {
    /// Name of this node in Kubernetes
    #[arg(long, value_name = "NAME", env = "NODE_NAME", value_parser = read_node)]
    #[arg(required_unless_present_any = ["check_config", "probe"])]
    pub node: Option<String>,

    /// The configuration file [default: /etc/nvshare/agent.toml, which may be missing]
    #[arg(long, value_name = "PATH")]
    pub config: Option<PathBuf>,

    /// Only check the configuration file
    #[arg(long)]
    pub check_config: bool,

    /// Only check that the running agent is connected to the API server and the scheduler
    #[arg(long, conflicts_with = "check_config")]
    pub probe: bool,

    /// Kubeconfig file for reaching the API server from outside a cluster
    #[arg(long, value_name = "PATH")]
    pub kubeconfig: Option<PathBuf>,

    /// The scheduler's control socket
    #[arg(long, value_name = "PATH", default_value = CONTROL_SOCKET)]
    pub control: PathBuf,

    /// Socket on which the agent answers --probe
    #[arg(long, value_name = "PATH", default_value = PROBE_SOCKET)]
    pub socket: PathBuf,

    /// Log level
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: LogLevel,
}

/// Only valid names are accepted, because the name becomes part of a selector, in which a comma is
/// a separator.
fn read_node(text: &str) -> Result<String, String> {
    match is_pod_name(text) {
        true => Ok(text.to_owned()),
        false => Err("invalid node name: up to 253 letters, digits, \"-\" and \".\" are allowed".into()),
    }
}
