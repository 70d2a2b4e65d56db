//! `nvshare-device-plugin`: which of the things that its command line can ask is done.

use std::process::ExitCode;

use clap::Parser;
use nvshare_device_plugin::arguments::Arguments;
use nvshare_device_plugin::cdi;
use nvshare_device_plugin::config::{Config, DEFAULT_PATH};
use nvshare_device_plugin::plugin::{self, Options};
use nvshare_device_plugin::probe::{probe, ready};
use nvshare_kubernetes::command::{check_config, exit_code};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = if arguments.check_config {
        let path = arguments.config.as_deref().unwrap_or(DEFAULT_PATH.as_ref());
        check_config(path, Config::load(arguments.config.as_deref()))
    } else if arguments.probe {
        probe(&arguments.kubelet)
    } else if arguments.ready {
        ready(&arguments.kubelet)
    } else {
        plugin::run(Options {
            config: arguments.config,
            kubelet: arguments.kubelet,
            control: arguments.control,
            cdi: cdi::Paths { directories: arguments.cdi, containerd: arguments.containerd },
            log_level: arguments.log_level,
        })
    };
    exit_code("nvshare-device-plugin", done)
}
