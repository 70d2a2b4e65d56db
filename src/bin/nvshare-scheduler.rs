//! `nvshare-scheduler`: the command line of the daemon.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use nvshare::config::file::Sources;
use nvshare::config::{LogLevel, paths};
use nvshare::daemon::{self, Options};

/// Decides which CUDA program may use which GPU, and tells programs when to move their memory.
#[derive(Parser)]
#[command(name = "nvshare-scheduler", version)]
struct Arguments {
    /// Where programs connect [default: /run/nvshare/scheduler.sock, or the socket that systemd passes]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Where nvsharectl connects on hosts without a system bus [default: /run/nvshare-control/control.sock, or beside
    /// the directory of --socket]
    #[arg(long, value_name = "PATH")]
    control_socket: Option<PathBuf>,

    /// The configuration file [default: /etc/nvshare/nvshare.toml, which may be missing]; FILE.d/*.toml is read too
    #[arg(long, value_name = "PATH")]
    config: Option<PathBuf>,

    /// Only say whether the configuration file and its drop-ins are right
    #[arg(long)]
    check_config: bool,

    /// How much is logged, whatever the configuration file says
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<LogLevel>,

    /// Write what the flight recorder records to a file, too: `nvsharectl timeline` and `simulate --replay` read it
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,

    /// The D-Bus to be on [default: the system bus]
    #[arg(long, value_name = "ADDRESS")]
    bus_address: Option<String>,

    /// Be on no bus; the control socket still answers
    #[arg(long, conflicts_with = "bus_address")]
    no_bus: bool,

    /// Be the scheduler of a node of Kubernetes, in a pod: on no bus, and only where the processes of the node are seen
    #[arg(long, conflicts_with = "bus_address")]
    in_pod: bool,

    /// The directory for the sockets of Kubernetes' ResourceClaims, of which it has one below it for each
    #[arg(long, value_name = "DIRECTORY")]
    claims: Option<PathBuf>,

    /// For tests: a time quantum in milliseconds instead of that of the configuration, which has whole seconds
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
