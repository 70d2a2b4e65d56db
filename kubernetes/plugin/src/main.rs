//! `nvshare-device-plugin`: dispatches the command line.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use nvshare_device_plugin::arguments::Arguments;
use nvshare_device_plugin::config::{Config, DEFAULT_PATH, Offer};
use nvshare_device_plugin::plugin::{self, Options};
use nvshare_device_plugin::probe::{probe, ready};
use nvshare_device_plugin::sockets::PLUGIN;
use nvshare_device_plugin::{cdi, dra};
use nvshare_kubernetes::command::{check_config, exit_code};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = if arguments.check_config {
        let path = arguments.config.as_deref().unwrap_or(DEFAULT_PATH.as_ref());
        check_config(path, Config::load(arguments.config.as_deref()))
    } else if arguments.probe {
        sockets(&arguments).and_then(|sockets| probe(&sockets))
    } else if arguments.ready {
        sockets(&arguments).and_then(|sockets| ready(&sockets, &arguments.control))
    } else if arguments.check_removal {
        plugin::block_on(dra::removal::check(arguments.kubeconfig.as_deref()))
    } else {
        plugin::run(options(arguments))
    };
    exit_code("nvshare-device-plugin", done)
}

/// Returns the sockets of the running plugin, according to its configuration.
fn sockets(arguments: &Arguments) -> Result<Vec<PathBuf>, String> {
    let config = Config::load(arguments.config.as_deref()).map_err(|e| e.to_string())?;
    let all =
        [(Offer::DevicePlugin, arguments.kubelet.join(PLUGIN)), (Offer::Dra, dra::driver::socket(&arguments.plugins))];
    Ok(all.into_iter().filter(|(offer, _)| config.offers_by(*offer)).map(|(_, socket)| socket).collect())
}

fn options(arguments: Arguments) -> Options {
    // Runtimes give precedence to the last directory.
    let for_claims = arguments.cdi.last().cloned().unwrap_or_default();
    let dra = arguments.node.map(|node| dra::driver::Options {
        node,
        kubeconfig: arguments.kubeconfig,
        plugins: arguments.plugins,
        registry: arguments.registry,
        control: arguments.control.clone(),
        cdi: for_claims,
        sockets: arguments.claims,
        permissions: arguments.agent_config,
    });
    Options {
        config: arguments.config,
        kubelet: arguments.kubelet,
        control: arguments.control,
        cdi: cdi::Paths { directories: arguments.cdi, containerd: arguments.containerd },
        dra,
        log_level: arguments.log_level,
    }
}
