//! `nvshare-agent`: dispatches the command line.

use std::process::ExitCode;

use clap::Parser;
use nvshare_agent::agent::{self, Options};
use nvshare_agent::arguments::Arguments;
use nvshare_agent::config::{Config, DEFAULT_PATH};
use nvshare_agent::probe::probe;
use nvshare_kubernetes::command::{check_config, exit_code};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = if arguments.check_config {
        let path = arguments.config.as_deref().unwrap_or(DEFAULT_PATH.as_ref());
        check_config(path, Config::load(arguments.config.as_deref()))
    } else if arguments.probe {
        probe(&arguments.socket)
    } else {
        agent::run(Options {
            // clap requires the node's name here.
            node: arguments.node.unwrap_or_default(),
            config: arguments.config,
            kubeconfig: arguments.kubeconfig,
            control: arguments.control,
            socket: arguments.socket,
            log_level: arguments.log_level,
        })
    };
    exit_code("nvshare-agent", done)
}
