//! `nvshare-scheduler`: the command line of the daemon.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use nvshare::config::file::Sources;
use nvshare::config::{LogLevel, paths};
use nvshare::daemon::{self, Options};

/// Schedules CUDA programs on shared GPUs, and tells programs when to move their memory.
#[derive(Parser)]
#[command(name = "nvshare-scheduler", version)]
struct Arguments {
    /// Socket for programs [default: /run/nvshare/scheduler.sock, or the socket passed by systemd]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Control socket for nvsharectl on hosts without a system bus [default: /run/nvshare-control/control.sock, or next to
    /// the directory of --socket]
    #[arg(long, value_name = "PATH")]
    control_socket: Option<PathBuf>,

    /// Configuration file [default: /etc/nvshare/nvshare.toml, which may be missing]; PATH.d/*.toml is also read
    #[arg(long, value_name = "PATH")]
    config: Option<PathBuf>,

    /// Only check the configuration file and its drop-ins
    #[arg(long)]
    check_config: bool,

    /// Log level; overrides the configuration file
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<LogLevel>,

    /// Also write the flight recorder's data to a file, for `nvsharectl timeline` and `simulate --replay`
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,

    /// D-Bus address to connect to [default: the system bus]
    #[arg(long, value_name = "ADDRESS")]
    bus_address: Option<String>,

    /// Connect to no bus; the control socket still works
    #[arg(long, conflicts_with = "bus_address")]
    no_bus: bool,

    /// Run in a pod as the scheduler of a Kubernetes node: connect to no bus, and require the node's PID namespace
    #[arg(long, conflicts_with = "bus_address")]
    in_pod: bool,

    /// Directory for the sockets of Kubernetes ResourceClaims, with one subdirectory for each claim
    #[arg(long, value_name = "DIRECTORY")]
    claims: Option<PathBuf>,

    /// For tests: time quantum in milliseconds, which overrides the configuration
    #[arg(long, value_name = "MILLISECONDS", hide = true, value_parser = clap::value_parser!(u64).range(1..))]
    time_quantum_ms: Option<u64>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.check_config {
        return check_config(&arguments);
    }
    let options = Options {
        socket: arguments.socket,
        control_socket: arguments.control_socket,
        config: arguments.config,
        log_level: arguments.log_level,
        record: arguments.record,
        bus_address: arguments.bus_address,
        no_bus: arguments.no_bus,
        in_pod: arguments.in_pod,
        claims: arguments.claims,
        time_quantum: arguments.time_quantum_ms.map(Duration::from_millis),
    };
    match daemon::run(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            if !e.is_logged {
                eprintln!("nvshare-scheduler: {e}");
            }
            ExitCode::FAILURE
        }
    }
}

fn check_config(arguments: &Arguments) -> ExitCode {
    let read = Sources::read(arguments.config.as_deref()).and_then(|sources| sources.config().map(|_| sources));
    match read {
        Ok(sources) => {
            let files: Vec<String> = sources.paths().map(|path| path.display().to_string()).collect();
            match files.is_empty() {
                true => {
                    println!("the default settings are in effect: neither {} nor drop-ins exist", paths::CONFIGURATION)
                }
                false => println!("the configuration has no errors: {}", files.join(", ")),
            }
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("nvshare-scheduler: {e}");
            ExitCode::FAILURE
        }
    }
}
