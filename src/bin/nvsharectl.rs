//! `nvsharectl`: the command line.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use nvshare::bus::parse_anti_thrash;
use nvshare::ctl::lock;
use nvshare::ctl::settings::{self, Change, parse_seconds};
use nvshare::ctl::status::{self, Style};
use nvshare::ctl::{CtlError, Target, preload, run};
use nvshare::scheduler::AntiThrash;

/// Shows who uses which GPU, and changes how GPUs are shared.
///
/// Exit codes: 0 done; 1 it failed; 2 the command line is wrong; 3 the scheduler is not running; 4 `preload status`: off.
/// `run` ends as its command does, with 126 or 127 where that cannot be started.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Talk to the scheduler over its control socket instead of the system bus
    #[arg(long, value_name = "PATH", env = "NVSHARE_CONTROL", global = true)]
    control: Option<PathBuf>,

    /// Set the time quantum, in seconds: the same as `set time-quantum`
    #[arg(short = 'T', long = "set-tq", value_name = "SECONDS", value_parser = parse_seconds)]
    set_tq: Option<Duration>,

    /// Set anti-thrash: the same as `set anti-thrash`
    #[arg(short = 'S', long = "anti-thrash", value_name = "on|off|auto", value_parser = parse_anti_thrash)]
    anti_thrash: Option<AntiThrash>,

    /// Print JSON
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    command: Option<Verb>,
}

#[derive(Subcommand)]
enum Verb {
    /// Show GPUs, who holds them, who waits and what memory is where (the default)
    Status,
    /// Print the settings that are in effect
    Get,
    /// Change a setting; it outranks the configuration file, also after a restart
    #[command(subcommand)]
    Set(Setting),
    /// Forget what was changed with `set`: the configuration file decides again
    Reset,
    /// Have the scheduler read its configuration file again
    Reload,
    /// Run a command whose CUDA programs share GPUs
    Run {
        /// The library to load [default: libnvshare.so beside nvsharectl, else where the loader finds it]
        #[arg(long, value_name = "PATH", env = "NVSHARE_LIBRARY")]
        library: Option<PathBuf>,

        /// The command and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// Run a command while no program under nvshare uses a GPU: it waits for the lock as programs do
    Lock {
        /// The GPU: its UUID or number [default: the only one]
        #[arg(long, value_name = "GPU", default_value = "", hide_default_value = true)]
        gpu: String,
        /// Who has the lock, for others to read [default: the command]
        #[arg(long, value_name = "TEXT")]
        who: Option<String>,
        /// What it is for, likewise
        #[arg(long, value_name = "TEXT", default_value = "nvsharectl lock")]
        why: String,

        /// The command and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
        command: Vec<OsString>,
    },
    /// Have every program of this machine load the library, by /etc/ld.so.preload
    #[command(subcommand)]
    Preload(Preload),
}

#[derive(Subcommand)]
enum Preload {
    /// Show whether programs load the library, which one, and what is wrong with that
    Status,
    /// Check that the library can be loaded by everything; changes nothing
    Verify {
        /// The library [default: the one that is installed with nvsharectl]
        #[arg(long, value_name = "PATH")]
        library: Option<PathBuf>,
    },
    /// Verify the library, and then have every program load it that starts from now on
    Enable {
        /// The library [default: the one that is installed with nvsharectl]
        #[arg(long, value_name = "PATH")]
        library: Option<PathBuf>,
    },
    /// Have no program load it that starts from now on
    Disable,
}

#[derive(Subcommand)]
enum Setting {
    /// How long a program keeps a GPU while others wait: whole seconds, from 1 to 3600
    TimeQuantum {
        #[arg(value_parser = parse_seconds)]
        value: Duration,
    },
    /// How long the last of those who wait is to wait, in the mode auto: whole seconds up to 3600, or 0 for no bound
    MaxWait {
        #[arg(value_parser = parse_seconds)]
        value: Duration,
    },
    /// Whether programs exclude each other on a GPU
    AntiThrash {
        #[arg(value_name = "auto|on|off", value_parser = parse_anti_thrash)]
        value: AntiThrash,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.command.is_some() && (arguments.set_tq.is_some() || arguments.anti_thrash.is_some()) {
        let text = "-T and -S stand alone: they cannot be used with a command";
        Arguments::command().error(ErrorKind::ArgumentConflict, text).exit();
    }
    match carry_out(arguments) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            eprintln!("nvsharectl: {e}");
            ExitCode::from(e.exit_code())
        }
    }
}

fn carry_out(arguments: Arguments) -> Result<u8, CtlError> {
    let target = arguments.control.map_or(Target::Anywhere, Target::Control);
    let changes: Vec<Change> =
        [arguments.set_tq.map(Change::TimeQuantum), arguments.anti_thrash.map(Change::AntiThrash)]
            .into_iter()
            .flatten()
            .collect();
    let done = match arguments.command {
        None if !changes.is_empty() => settings::set(&target, &changes),
        None | Some(Verb::Status) => show(&target, arguments.json),
        Some(Verb::Get) => print(&settings::get(&target)?),
        Some(Verb::Set(Setting::TimeQuantum { value })) => settings::set(&target, &[Change::TimeQuantum(value)]),
        Some(Verb::Set(Setting::MaxWait { value })) => settings::set(&target, &[Change::MaxWait(value)]),
        Some(Verb::Set(Setting::AntiThrash { value })) => settings::set(&target, &[Change::AntiThrash(value)]),
        Some(Verb::Reset) => settings::reset(&target),
        Some(Verb::Reload) => settings::reload(&target),
        Some(Verb::Run { library, command }) => Err(run::run(library.as_deref(), &command)),
        Some(Verb::Lock { gpu, who, why, command }) => {
            return lock::lock(&target, &lock::Wish { gpu, who, why }, &command);
        }
        Some(Verb::Preload(command)) => return toggle(&command, &target, arguments.json),
    };
    done.map(|()| 0)
}

fn toggle(command: &Preload, target: &Target, json: bool) -> Result<u8, CtlError> {
    let answer = match command {
        Preload::Status => preload::status(target, json)?,
        Preload::Verify { library } => preload::verify(library.as_deref(), json)?,
        Preload::Enable { library } => preload::enable(library.as_deref())?,
        Preload::Disable => preload::disable()?,
    };
    print(&answer.text)?;
    Ok(answer.exit_code)
}

fn show(target: &Target, json: bool) -> Result<(), CtlError> {
    let status = status::ask(target)?;
    if json {
        print(&format!("{:#}\n", status::json(&status)))
    } else {
        print(&status::text(&status, Style::of_stdout()))
    }
}

/// Prints; a reader that went away (`| head`) is no error.
fn print(text: &str) -> Result<(), CtlError> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(CtlError::Failed(format!("cannot print: {e}"))),
        _ => Ok(()),
    }
}
