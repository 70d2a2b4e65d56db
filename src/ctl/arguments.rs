//! The command line of `nvsharectl`, also used to generate shell completions.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Arg, Args, Command, CommandFactory, Parser, Subcommand, ValueHint};

use nvshare_wire::MAX_SLOTS;

#[cfg(feature = "cdi")]
use super::cdi::{Generate, Install};
use super::lock::OnLoss;
use super::preload::Of;
use super::report::By;
use super::settings::parse_seconds;
use super::{adopt, rules};
use crate::config::names::{ANTI_THRASH, POLICY_NAMES, anti_thrash_name, parse_anti_thrash, parse_policy, policy_name};
use crate::config::{settings, units};
use crate::scheduler::{AntiThrash, PolicyName};
use crate::simulate::policies::POLICIES;

/// The same limit as for every size in the configuration.
const MOST_MEMORY: u64 = 1 << 40;

/// Shows who uses which GPU, and changes how GPUs are shared.
///
/// Exit codes: 0 done; 1 it failed; 2 the command line is wrong; 3 the scheduler is not running; 4 `preload status`: off;
/// 5 `lock`: the lock was lost. `run`, `lock` and `make-room` end as their command does, with 126 or 127 where that cannot be started.
#[derive(Debug, Parser)]
#[command(name = "nvsharectl", version)]
pub struct Arguments {
    /// Talk to the scheduler over its control socket instead of the system bus
    #[arg(long, value_name = "PATH", env = "NVSHARE_CONTROL", global = true)]
    pub control: Option<PathBuf>,

    /// Set the time quantum, in seconds: the same as `set time-quantum`
    #[arg(short = 'T', long = "set-tq", value_name = "SECONDS", value_parser = parse_seconds, value_hint = ValueHint::Other)]
    pub set_tq: Option<Duration>,

    /// Set anti-thrash: the same as `set anti-thrash`
    #[arg(short = 'S', long = "anti-thrash", value_name = "on|off|auto", value_parser = Mode, hide_possible_values = true)]
    pub anti_thrash: Option<AntiThrash>,

    #[command(flatten)]
    pub json: Json,

    #[command(subcommand)]
    pub command: Option<Verb>,
}

/// `--json`, which commands accept and which may precede them.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct Json {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl Arguments {
    /// Whether `--json` was given.
    pub fn is_json(&self) -> bool {
        self.json.json || self.command.as_ref().and_then(Verb::json).is_some_and(|json| json.json)
    }

    /// Reads the command line of this process. Exits after printing help, the version or an error.
    pub fn of_process() -> Self {
        let arguments = Self::parse();
        if arguments.command.is_some() && (arguments.set_tq.is_some() || arguments.anti_thrash.is_some()) {
            let text = "-T and -S cannot be combined with a command";
            Self::command().error(ErrorKind::ArgumentConflict, text).exit();
        }
        if arguments.json.json && arguments.command.as_ref().is_some_and(|command| command.json().is_none()) {
            let text = "this command does not support --json";
            Self::command().error(ErrorKind::ArgumentConflict, text).exit();
        }
        arguments
    }
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Show GPUs, who holds them, who waits and what memory is where (the default)
    Status(Json),
    /// Show GPUs and programs on the whole terminal, each second
    ///
    /// Where standard output is no terminal, it prints the same as text.
    #[cfg(feature = "top")]
    Top {
        /// End after N updates, one a second
        #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), value_hint = ValueHint::Other)]
        iterations: Option<u32>,
    },
    /// Print the settings and rules that are in effect
    Get(Json),
    /// Change a setting; it outranks the configuration file, also after a restart
    #[command(subcommand)]
    Set(Setting),
    /// Set a rule with limits for programs of a unit, container or user; it comes before those of the configuration
    ///
    /// The keys are those of nvshare.toml(5). A rule of that name that was set before is replaced.
    SetRule {
        /// A name for it
        #[arg(value_hint = ValueHint::Other)]
        name: String,
        /// The programs it applies to and their limits, like unit=jupyter-*.service memory-max=8G
        #[arg(required = true, value_name = "KEY=VALUE", value_parser = rules::parse_pair, value_hint = ValueHint::Other)]
        keys: Vec<(String, toml::Value)>,
    },
    /// Remove a rule that was set with `set-rule`
    UnsetRule {
        /// Its name
        #[arg(value_hint = ValueHint::Other)]
        name: String,
    },
    /// Forget what was changed with `set` and `set-rule`: the configuration file decides again
    Reset,
    /// Make the scheduler read its configuration files again
    Reload,
    /// Make the scheduler release the driver, so that it can be unloaded or a GPU be reset
    ///
    /// Fails if programs use the driver, and names them.
    ReleaseDriver {
        /// Longest time, in seconds; it also ends when a program uses a GPU
        #[arg(long = "for", value_name = "SECONDS", value_parser = parse_release, value_hint = ValueHint::Other, default_value = "60")]
        lasts: Duration,
    },
    /// Show for which part of the time programs were kept from GPUs
    Pressure(Json),
    /// Explain what a program waits for, when it is expected to run, and why it was refused memory
    Why {
        /// Its process id, its systemd unit or its container, as `status` shows them
        #[arg(value_name = "PID|UNIT|CONTAINER|POD", value_hint = ValueHint::Other)]
        program: String,
        #[command(flatten)]
        json: Json,
    },
    /// Show the GPU time, memory, waits and moved memory of users, units and containers
    ///
    /// Users see their own; root sees all, and so do users whom polkit lets see command lines.
    Report {
        /// Start of the period, to the hour, or to the day if it is older than a month
        #[arg(long, value_name = "-TIME", value_parser = parse_since, allow_hyphen_values = true, value_hint = ValueHint::Other, default_value = "-30d")]
        since: Duration,
        /// Group by: user, unit, container
        #[arg(
            long,
            value_name = "user|unit|container",
            value_enum,
            default_value = "user",
            hide_possible_values = true
        )]
        by: By,
        /// Print comma-separated values
        #[arg(long, conflicts_with = "json")]
        csv: bool,
        #[command(flatten)]
        json: Json,
    },
    /// Take a running program off its GPUs, its contexts included, until it is resumed
    Pause {
        /// Its process id, its systemd unit or its container, as `status` shows them
        #[arg(value_name = "PID|UNIT|CONTAINER|POD", value_hint = ValueHint::Other)]
        program: String,
    },
    /// Resume a paused program
    Resume {
        /// Its process id, its systemd unit or its container, as `status` shows them
        #[arg(value_name = "PID|UNIT|CONTAINER|POD", value_hint = ValueHint::Other)]
        program: String,
    },
    /// Move a running program to another GPU of the same kind
    ///
    /// Returns once it is there.
    Migrate {
        /// Its process id, its systemd unit or its container, as `status` shows them
        #[arg(value_name = "PID|UNIT|CONTAINER|POD", value_hint = ValueHint::Other)]
        program: String,
        /// The GPU: its UUID or number
        #[arg(long, value_name = "GPU", value_hint = ValueHint::Other)]
        to: String,
    },
    /// Empty a GPU: its programs move to others of the same kind or sleep, and no more may use it
    ///
    /// Returns once it is empty, and names the programs that sleep or stay.
    Drain {
        /// The GPU: its UUID or number
        #[arg(value_name = "GPU", value_hint = ValueHint::Other)]
        gpu: String,
    },
    /// Let programs use a drained GPU again
    Undrain {
        /// The GPU: its UUID or number
        #[arg(value_name = "GPU", value_hint = ValueHint::Other)]
        gpu: String,
    },
    /// Run a command whose CUDA programs share GPUs
    Run {
        /// The library to load [default: libnvshare.so beside nvsharectl, else where the loader finds it]
        #[arg(long, value_name = "PATH", env = "NVSHARE_LIBRARY")]
        library: Option<PathBuf>,
        /// How many GPUs it sees, chosen by the scheduler [default: as the configuration and its rule say]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SLOTS)), value_hint = ValueHint::Other)]
        gpus: Option<u32>,
        /// Memory that it needs on each GPU, like 20G: it gets a GPU where that fits, if there is one
        #[arg(long, value_name = "SIZE", value_parser = parse_memory, value_hint = ValueHint::Other)]
        memory: Option<u64>,

        /// The command and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND", value_hint = ValueHint::CommandWithArguments)]
        command: Vec<OsString>,
    },
    /// Run a command while no program under nvshare uses a GPU: it waits for the lock as programs do
    Lock {
        /// The GPU: its UUID or number [default: the only one]
        #[arg(long, value_name = "GPU", value_hint = ValueHint::Other, default_value = "", hide_default_value = true)]
        gpu: String,
        /// Who has the lock, for others to read [default: the command]
        #[arg(long, value_name = "TEXT", value_hint = ValueHint::Other)]
        who: Option<String>,
        /// What it is for, likewise
        #[arg(long, value_name = "TEXT", value_hint = ValueHint::Other, default_value = "nvsharectl lock")]
        why: String,
        /// What happens to the command if the lock is lost, because its turn is over or the scheduler ends: it goes on, is paused
        /// until the lock is held again, or is terminated
        #[arg(
            long,
            value_name = "continue|pause|terminate",
            value_enum,
            default_value = "continue",
            hide_possible_values = true
        )]
        on_loss: OnLoss,

        /// The command and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND", value_hint = ValueHint::CommandWithArguments)]
        command: Vec<OsString>,
    },
    /// Vacate memory of a GPU and keep it free for programs without nvshare: a game, a renderer, a desktop
    ///
    /// Programs under nvshare continue with the rest, or wait if it is too little. Without a command, the memory is kept free until
    /// this one is interrupted.
    MakeRoom {
        /// How much, like 8G
        #[arg(value_name = "SIZE", value_parser = parse_memory, value_hint = ValueHint::Other, required_unless_present = "games")]
        size: Option<u64>,
        /// The GPU: its UUID or number [default: the only one]
        #[arg(long, value_name = "GPU", value_hint = ValueHint::Other, default_value = "", hide_default_value = true)]
        gpu: String,
        /// For how long at most, up to a day [default: until the command ends, or this one is interrupted]
        #[arg(long = "for", value_name = "TIME", value_parser = parse_room, value_hint = ValueHint::Other)]
        lasts: Option<Duration>,
        /// Only while a game runs, as GameMode says on the session's bus; 8 GiB unless a size is given
        #[arg(long, conflicts_with_all = ["lasts", "command"])]
        games: bool,

        /// The command and its arguments
        #[arg(last = true, value_name = "COMMAND", value_hint = ValueHint::CommandWithArguments)]
        command: Vec<OsString>,
    },
    /// Simulate a described mix of programs in virtual time under each policy, and compare
    ///
    /// Needs no running scheduler, GPU or privileges. The file is described in nvshare-simulation(7).
    Simulate {
        /// Only under this policy; can be given several times [default: all]
        #[arg(long, value_name = "NAME", conflicts_with = "replay", value_parser = PossibleValuesParser::new(POLICIES.map(|policy| policy.name)))]
        policy: Vec<String>,
        /// Draw holders, waits and moved memory of each GPU over time, under each policy, as an SVG file
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "replay")]
        timeline: Option<PathBuf>,
        /// Instead, replay a debug bundle: show what happened, and check that the scheduler still decides the same
        #[arg(long, value_name = "BUNDLE", value_hint = ValueHint::FilePath)]
        replay: Option<PathBuf>,

        /// The GPUs, the settings and the jobs
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath, required_unless_present = "replay", conflicts_with = "replay")]
        file: Option<PathBuf>,
        #[command(flatten)]
        json: Json,
    },
    /// Save a debug bundle for a bug report: versions, configuration, status and the scheduler's flight recorder
    ///
    /// Requires root or, over the system bus, an administrator's password, since it shows what all users do.
    Debug {
        /// The file, which must not exist; - is standard output [default: nvshare-debug-HOST-TIME.jsonl]
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        output: Option<PathBuf>,
        /// Include names and command lines of programs, which can contain secrets
        #[arg(long)]
        command_lines: bool,
    },
    /// Draw holders, waits and moved memory of each GPU over time, as text or as an SVG file
    ///
    /// From the scheduler's flight recorder, or from a file. Users see the names of their own programs only.
    Timeline {
        /// Write an SVG picture to this file, which is overwritten; - is standard output
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "json")]
        output: Option<PathBuf>,
        /// Only this GPU: its UUID or its number; in a running record, its UUID
        #[arg(long, value_name = "GPU", value_hint = ValueHint::Other)]
        gpu: Option<String>,
        /// Only so long before the end, like -10min
        #[arg(long, value_name = "-TIME", value_parser = parse_since, allow_hyphen_values = true, value_hint = ValueHint::Other)]
        since: Option<Duration>,
        /// Of a debug bundle, or of what `nvshare-scheduler --record` writes
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        bundle: Option<PathBuf>,
        #[command(flatten)]
        json: Json,
    },
    /// Make a service share GPUs from its next start on, and give it a rule for a server
    ///
    /// It preloads the library, as by `preload enable --unit`, skips the queue while it is within its share, and is evicted after 5
    /// idle minutes if others need the room.
    Adopt {
        #[command(flatten)]
        server: adopt::Server,
        /// It is the name of a container: only print the flags to start it with
        #[arg(long, conflicts_with_all = ["user", "restart", "library"])]
        container: bool,
        /// The library [default: the one that is installed with nvsharectl]
        #[arg(long, value_name = "PATH")]
        library: Option<PathBuf>,
    },
    /// Undo what `adopt` did with the same options
    Release {
        #[command(flatten)]
        server: adopt::Server,
    },
    /// Make every program of this machine load the library, or those of a service
    #[command(subcommand)]
    Preload(Preload),
    /// Bring GPUs and nvshare into containers, by the Container Device Interface (CDI)
    #[cfg(feature = "cdi")]
    #[command(subcommand)]
    Cdi(Cdi),
}

impl Verb {
    /// The command's `--json` option; `None` if the command prints no JSON.
    fn json(&self) -> Option<Json> {
        match self {
            Self::Status(json) | Self::Get(json) | Self::Pressure(json) => Some(*json),
            Self::Why { json, .. } | Self::Report { json, .. } | Self::Simulate { json, .. } => Some(*json),
            Self::Timeline { json, .. } => Some(*json),
            Self::Preload(Preload::Status { json, .. } | Preload::Verify { json, .. }) => Some(*json),
            _ => None,
        }
    }
}

#[cfg(feature = "cdi")]
#[derive(Debug, Subcommand)]
pub enum Cdi {
    /// Write the CDI file of this machine's GPUs; then `--device nvshare.com/gpu=0` has a container share GPU 0
    Generate(Generate),
    /// Put the library where containers can mount it from, on a host that has nvshare in containers only
    Install(Install),
    /// Container runtimes call this for each container that the file names, as an OCI hook; standard input is the container's state
    #[command(hide = true)]
    MergePreload,
}

#[derive(Debug, Subcommand)]
pub enum Preload {
    /// Show whether programs load the library, which one, and what is wrong with that
    Status {
        #[command(flatten)]
        of: Of,
        #[command(flatten)]
        json: Json,
    },
    /// Check that the library can be loaded by everything; changes nothing
    Verify {
        /// The library [default: the one that is installed with nvsharectl]
        #[arg(long, value_name = "PATH")]
        library: Option<PathBuf>,
        #[command(flatten)]
        json: Json,
    },
    /// Verify the library, and then have every program load it that starts from now on, or a service's programs
    Enable {
        /// The library [default: the one that is installed with nvsharectl]
        #[arg(long, value_name = "PATH")]
        library: Option<PathBuf>,
        #[command(flatten)]
        of: Of,
    },
    /// Undo what `enable` did with the same options
    Disable {
        #[command(flatten)]
        of: Of,
    },
}

#[derive(Debug, Subcommand)]
pub enum Setting {
    /// How long a program keeps a GPU while others wait: whole seconds, from 1 to 3600
    TimeQuantum {
        #[arg(allow_negative_numbers = true, value_parser = parse_seconds, value_hint = ValueHint::Other)]
        value: Duration,
    },
    /// Longest wait for a turn, in the mode auto: whole seconds up to 3600, or 0 for no limit
    MaxWait {
        #[arg(allow_negative_numbers = true, value_parser = parse_seconds, value_hint = ValueHint::Other)]
        value: Duration,
    },
    /// Whether programs exclude each other on a GPU
    AntiThrash {
        #[arg(value_name = "auto|on|off", value_parser = Mode, hide_possible_values = true)]
        value: AntiThrash,
    },
    /// Order of programs: first come, first served; or least GPU time first, which shortens mean completion time
    Policy {
        #[arg(value_name = "fcfs|adaptive", value_parser = Order, hide_possible_values = true)]
        value: PolicyName,
    },
}

fn parse_release(text: &str) -> Result<Duration, String> {
    settings::release(parse_seconds(text)?)
}

fn parse_room(text: &str) -> Result<Duration, String> {
    settings::room(parse_seconds(text)?)
}

/// Parses a time before now, such as `-10min`.
fn parse_since(text: &str) -> Result<Duration, String> {
    let ago = text.strip_prefix('-').ok_or_else(|| {
        format!("cannot use the time {text:?}: a time before now starts with a minus, like \"-10min\"")
    })?;
    units::parse_duration(ago)
}

/// Parses an amount of GPU memory.
fn parse_memory(text: &str) -> Result<u64, String> {
    let bytes = units::parse_size(text)?;
    let is_some = (1..=MOST_MEMORY).contains(&bytes);
    is_some
        .then_some(bytes)
        .ok_or_else(|| format!("{text:?} is not an amount of GPU memory. Write a size up to 1T, like \"20G\""))
}

/// Parses the words of [`parse_anti_thrash`], and lists them for shell completion.
#[derive(Clone)]
struct Mode;

impl TypedValueParser for Mode {
    type Value = AntiThrash;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<AntiThrash, clap::Error> {
        parse_anti_thrash.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(ANTI_THRASH.into_iter().map(|mode| PossibleValue::new(anti_thrash_name(mode)))))
    }
}

/// Parses the names of policies, and lists them for shell completion.
#[derive(Clone)]
struct Order;

impl TypedValueParser for Order {
    type Value = PolicyName;

    fn parse_ref(&self, command: &Command, arg: Option<&Arg>, value: &OsStr) -> Result<PolicyName, clap::Error> {
        parse_policy.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(POLICY_NAMES.into_iter().map(|policy| PossibleValue::new(policy_name(policy)))))
    }
}
