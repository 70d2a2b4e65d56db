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
use super::{adopt, rules};
use crate::config::names::{ANTI_THRASH, POLICY_NAMES, anti_thrash_name, parse_anti_thrash, parse_policy, policy_name};
use crate::config::{settings, units};
use crate::scheduler::{AntiThrash, PolicyName};
use crate::simulate::policies::POLICIES;

/// The same limit as for every size in the configuration.
const MOST_MEMORY: u64 = 1 << 40;

/// Shows which programs use which GPUs, and changes how programs share GPUs.
///
/// Exit codes: 0 success; 1 failure; 2 invalid command line; 3 the scheduler is not running; 4
/// `preload status`: off; 5 `lock`: the lock was lost. `run`, `lock` and `make-room` exit with
/// their command's code, or with 126 or 127 if the command cannot be started.
#[derive(Debug, Parser)]
#[command(name = "nvsharectl", version)]
pub struct Arguments {
    /// Connect to the scheduler's control socket instead of the system bus
    #[arg(long, value_name = "PATH", env = "NVSHARE_CONTROL", global = true)]
    pub control: Option<PathBuf>,

    /// Set the time quantum in seconds, like `set time-quantum`
    #[arg(short = 'T', long = "set-tq", value_name = "SECONDS", value_parser = units::parse_duration, value_hint = ValueHint::Other)]
    pub set_tq: Option<Duration>,

    /// Set anti-thrash, like `set anti-thrash`
    #[arg(short = 'S', long = "anti-thrash", value_name = "on|off|auto", value_parser = Mode, hide_possible_values = true)]
    pub anti_thrash: Option<AntiThrash>,

    #[command(flatten)]
    pub json: Json,

    #[command(subcommand)]
    pub command: Option<Verb>,
}

/// The option `--json`, before or after the name of a command.
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
    /// Show GPUs, lock holders, waiting programs and their memory (the default)
    Status(Json),
    /// Show GPUs and programs on the full screen, updated every second
    ///
    /// If standard output is not a terminal, the same data is printed as text.
    #[cfg(feature = "top")]
    Top {
        /// Exit after N updates
        #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), value_hint = ValueHint::Other)]
        iterations: Option<u32>,
    },
    /// Print the settings and rules in effect
    Get(Json),
    /// Change a setting. It overrides the configuration file, even after a restart
    #[command(subcommand)]
    Set(Setting),
    /// Set a rule with limits for programs of a unit, container or user. It precedes the rules of
    /// the configuration file
    ///
    /// nvshare.toml(5) describes the keys. An existing rule of the same name is replaced.
    SetRule {
        /// Name of the rule
        #[arg(value_hint = ValueHint::Other)]
        name: String,
        /// The programs that the rule applies to, and their limits, like unit=jupyter-*.service
        /// memory-max=8G
        #[arg(required = true, value_name = "KEY=VALUE", value_parser = rules::parse_pair, value_hint = ValueHint::Other)]
        keys: Vec<(String, toml::Value)>,
    },
    /// Remove a rule that was set with `set-rule`
    UnsetRule {
        /// Name of the rule
        #[arg(value_hint = ValueHint::Other)]
        name: String,
    },
    /// Discard all changes made with `set` and `set-rule`, and return to the configuration file
    Reset,
    /// Reload the scheduler's configuration files
    Reload,
    /// Make the scheduler release the driver, so that you can unload the driver or reset a GPU
    ///
    /// Fails if programs use the driver, and lists these programs.
    ReleaseDriver {
        /// Longest time in seconds. The scheduler reopens the driver earlier if a program uses a
        /// GPU
        #[arg(long = "for", value_name = "SECONDS", value_parser = parse_release, value_hint = ValueHint::Other, default_value = "60")]
        lasts: Duration,
    },
    /// Show the share of time in which programs waited for GPUs
    Pressure(Json),
    /// Explain why a program waits, when it will run, and why it was refused memory
    Why {
        /// Process ID, systemd unit, container or pod, as shown by `status`
        #[arg(value_name = "PID|UNIT|CONTAINER|POD", value_hint = ValueHint::Other)]
        program: String,
        #[command(flatten)]
        json: Json,
    },
    /// Report GPU time, memory, waits and moved memory by user, unit or container
    ///
    /// Users see their own usage. Root sees all usage, as do users whom polkit allows to see
    /// command lines.
    Report {
        /// Start of the period, rounded to the hour, or to the day if older than a month
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
    /// Take a running program and its CUDA contexts off its GPUs until it is resumed
    Pause {
        /// Process ID, systemd unit, container or pod, as shown by `status`
        #[arg(value_name = "PID|UNIT|CONTAINER|POD", value_hint = ValueHint::Other)]
        program: String,
    },
    /// Resume a paused program
    Resume {
        /// Process ID, systemd unit, container or pod, as shown by `status`
        #[arg(value_name = "PID|UNIT|CONTAINER|POD", value_hint = ValueHint::Other)]
        program: String,
    },
    /// Move a running program to another GPU of the same kind
    ///
    /// Returns when the program is on the new GPU.
    Migrate {
        /// Process ID, systemd unit, container or pod, as shown by `status`
        #[arg(value_name = "PID|UNIT|CONTAINER|POD", value_hint = ValueHint::Other)]
        program: String,
        /// UUID or number of the GPU
        #[arg(long, value_name = "GPU", value_hint = ValueHint::Other)]
        to: String,
    },
    #[command(flatten)]
    Images(Images),
    /// Empty a GPU and admit no new programs to it. Its programs move to GPUs of the same kind, or
    /// sleep
    ///
    /// Returns when the GPU is empty, and lists the programs that sleep or cannot leave.
    Drain {
        /// UUID or number of the GPU
        #[arg(value_name = "GPU", value_hint = ValueHint::Other)]
        gpu: String,
    },
    /// Let programs use a drained GPU again
    Undrain {
        /// UUID or number of the GPU
        #[arg(value_name = "GPU", value_hint = ValueHint::Other)]
        gpu: String,
    },
    /// Run a command whose CUDA programs share GPUs
    Run {
        /// Library to load [default: libnvshare.so next to nvsharectl, otherwise from the loader's
        /// search path]
        #[arg(long, value_name = "PATH", env = "NVSHARE_LIBRARY")]
        library: Option<PathBuf>,
        /// Number of GPUs that the command sees, chosen by the scheduler [default: from the
        /// configuration and the command's rule]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SLOTS)), value_hint = ValueHint::Other)]
        gpus: Option<u32>,
        /// Memory that the command needs on each GPU, like 20G. The scheduler prefers GPUs where it
        /// fits
        #[arg(long, value_name = "SIZE", value_parser = parse_memory, value_hint = ValueHint::Other)]
        memory: Option<u64>,
        /// Run the command in the background, so that it can be hibernated: without a terminal, in
        /// a session of its own, with its output in this file
        #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true, default_missing_value = "nvshare.log", value_hint = ValueHint::FilePath)]
        portable: Option<PathBuf>,

        /// The command and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND", value_hint = ValueHint::CommandWithArguments)]
        command: Vec<OsString>,
    },
    /// Hold the lock of a GPU while a command runs, so that no program under nvshare uses the GPU
    Lock {
        /// UUID or number of the GPU [default: the only one]
        #[arg(long, value_name = "GPU", value_hint = ValueHint::Other, default_value = "", hide_default_value = true)]
        gpu: String,
        /// Name of the lock holder, shown to other users [default: the command]
        #[arg(long, value_name = "TEXT", value_hint = ValueHint::Other)]
        who: Option<String>,
        /// Purpose of the lock, shown to other users
        #[arg(long, value_name = "TEXT", value_hint = ValueHint::Other, default_value = "nvsharectl lock")]
        why: String,
        /// If the lock is lost (the turn is over or the scheduler ends): let the command continue,
        /// pause it until the lock is reacquired, or terminate it
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
    /// Free GPU memory and reserve it for programs without nvshare: a game, a renderer, a desktop
    ///
    /// Programs under nvshare continue with the remaining memory, or wait if it is too small for
    /// them. Without COMMAND, the memory is kept free until nvsharectl is interrupted.
    MakeRoom {
        /// Amount of memory, like 8G
        #[arg(value_name = "SIZE", value_parser = parse_memory, value_hint = ValueHint::Other, required_unless_present = "games")]
        size: Option<u64>,
        /// UUID or number of the GPU [default: the only one]
        #[arg(long, value_name = "GPU", value_hint = ValueHint::Other, default_value = "", hide_default_value = true)]
        gpu: String,
        /// Longest time, up to a day [default: until COMMAND ends or nvsharectl is interrupted]
        #[arg(long = "for", value_name = "TIME", value_parser = parse_room, value_hint = ValueHint::Other)]
        lasts: Option<Duration>,
        /// Keep memory free only while GameMode reports a running game on the session bus; SIZE
        /// defaults to 8 GiB
        #[arg(long, conflicts_with_all = ["lasts", "command"])]
        games: bool,

        /// The command and its arguments
        #[arg(last = true, value_name = "COMMAND", value_hint = ValueHint::CommandWithArguments)]
        command: Vec<OsString>,
    },
    /// Simulate a workload in virtual time under each policy, and compare the results
    ///
    /// Needs no running scheduler, GPU or privileges. nvshare-simulation(7) describes the file.
    Simulate {
        /// Simulate only this policy; can be repeated [default: all]
        #[arg(long, value_name = "NAME", conflicts_with = "replay", value_parser = PossibleValuesParser::new(POLICIES.map(|policy| policy.name)))]
        policy: Vec<String>,
        /// Draw lock holders, waits and moved memory of each GPU over time and for each policy, as
        /// an SVG file
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "replay")]
        timeline: Option<PathBuf>,
        /// Replay a debug bundle instead: show its events, and check that the scheduler's decisions
        /// are still the same
        #[arg(long, value_name = "BUNDLE", value_hint = ValueHint::FilePath)]
        replay: Option<PathBuf>,

        /// File with the GPUs, settings and jobs
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath, required_unless_present = "replay", conflicts_with = "replay")]
        file: Option<PathBuf>,
        #[command(flatten)]
        json: Json,
    },
    /// Save a debug bundle for a bug report: versions, configuration, status and the scheduler's
    /// flight recorder
    ///
    /// The bundle shows all users' activity, so this requires root or, over the system bus, an
    /// administrator's password.
    Debug {
        /// File to create, which must not exist yet; - for standard output [default:
        /// nvshare-debug-HOST-TIME.jsonl]
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        output: Option<PathBuf>,
        /// Include names and command lines of programs, which can contain secrets
        #[arg(long)]
        command_lines: bool,
    },
    /// Draw lock holders, waits and moved memory of each GPU over time, as text or as an SVG file
    ///
    /// The data comes from the scheduler's flight recorder or from a file. Users see the names of
    /// their own programs only.
    Timeline {
        /// Write an SVG image to FILE, overwriting it; - for standard output
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "json")]
        output: Option<PathBuf>,
        /// Draw only the GPU with this UUID or number; a record that is still being written
        /// requires the UUID
        #[arg(long, value_name = "GPU", value_hint = ValueHint::Other)]
        gpu: Option<String>,
        /// Start of the drawing, relative to the end of the recording, like -10min
        #[arg(long, value_name = "-TIME", value_parser = parse_since, allow_hyphen_values = true, value_hint = ValueHint::Other)]
        since: Option<Duration>,
        /// Read a debug bundle, or a file written by `nvshare-scheduler --record`
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        bundle: Option<PathBuf>,
        #[command(flatten)]
        json: Json,
    },
    /// Make a service share GPUs from its next start, and set a rule suited to servers
    ///
    /// The service preloads the library, as with `preload enable --unit`. By its rule, the service
    /// skips the queue while it is within its share. It is put to sleep after 5 idle minutes if
    /// other programs need the memory.
    Adopt {
        #[command(flatten)]
        server: adopt::Server,
        /// Treat UNIT as a container's name, and only print the options for starting the container
        #[arg(long, conflicts_with_all = ["user", "restart", "library"])]
        container: bool,
        /// Library to load [default: the library installed with nvsharectl]
        #[arg(long, value_name = "PATH")]
        library: Option<PathBuf>,
    },
    /// Undo what `adopt` did with the same options
    Release {
        #[command(flatten)]
        server: adopt::Server,
    },
    /// Make every program of this machine, or of one service, load the library
    #[command(subcommand)]
    Preload(Preload),
    /// Provide GPUs and nvshare to containers through the Container Device Interface (CDI)
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
            Self::Timeline { json, .. } | Self::Images(Images::Hibernated { json, .. }) => Some(*json),
            Self::Preload(Preload::Status { json, .. } | Preload::Verify { json, .. }) => Some(*json),
            _ => None,
        }
    }
}

/// Programs that are saved to disk.
#[derive(Debug, Subcommand)]
pub enum Images {
    /// Save running programs to disk and end their processes
    ///
    /// Returns when the images are complete. A program that cannot be saved continues.
    Hibernate {
        /// Copy the image to this host with rsync over ssh, restore it there, and delete it here.
        /// Also continues such a move of an image. Requires root on both hosts
        #[arg(long, value_name = "HOST", value_hint = ValueHint::Hostname)]
        send: Option<String>,
        /// Save also programs that have network connections. The restored programs find them closed
        #[arg(long)]
        close_connections: bool,
        /// Save all programs that can be saved, in the order of their GPU time, the longest first.
        /// `restore --all` restores them. Requires root
        #[arg(long, conflicts_with_all = ["send", "program"])]
        all: bool,
        /// Longest time for --all, like 2min. Programs that would probably take longer are not
        /// saved
        #[arg(long, value_name = "TIME", requires = "all", value_parser = parse_room, value_hint = ValueHint::Other)]
        within: Option<Duration>,
        /// First restore the programs that --all has saved. Then wait until the host shuts down,
        /// and save all programs in the time that logind gives
        #[arg(long, requires = "all", conflicts_with = "within")]
        at_shutdown: bool,
        /// Process ID, systemd unit, container or pod, as shown by `status`; with --send also an
        /// image
        #[arg(value_name = "PID|UNIT|CONTAINER|POD", value_hint = ValueHint::Other, required_unless_present = "all", default_value = "", hide_default_value = true)]
        program: String,
    },
    /// Restore a program that was saved to disk
    Restore {
        /// Start nothing. List what this host lacks for a restore, and fail if it lacks something
        #[arg(long)]
        check: bool,
        /// Restore the image although it was sent to another host. Use this only if the program
        /// does not run there
        #[arg(long, conflicts_with = "check")]
        sent: bool,
        /// Restore the programs that `hibernate --all` has saved. Requires root
        #[arg(long, conflicts_with_all = ["check", "sent", "image"])]
        all: bool,
        /// Name of the image, as shown by `hibernated`
        #[arg(value_name = "IMAGE", value_hint = ValueHint::Other, required_unless_present = "all", default_value = "", hide_default_value = true)]
        image: String,
    },
    /// List the programs that were saved to disk, or delete an image
    Hibernated {
        /// Delete this image
        #[arg(long, value_name = "IMAGE", value_hint = ValueHint::Other, conflicts_with = "json")]
        delete: Option<String>,
        #[command(flatten)]
        json: Json,
    },
}

#[cfg(feature = "cdi")]
#[derive(Debug, Subcommand)]
pub enum Cdi {
    /// Write the CDI file of this machine's GPUs, for containers started with `--device
    /// nvshare.com/gpu=0`
    Generate(Generate),
    /// Copy the library to a directory that containers can mount, on a host that runs nvshare only
    /// in containers
    Install(Install),
    /// OCI hook that container runtimes call for each container with nvshare's CDI device; standard
    /// input is the container's state
    #[command(hide = true)]
    MergePreload,
}

#[derive(Debug, Subcommand)]
pub enum Preload {
    /// Show whether programs load the library, its path, and any problems
    Status {
        #[command(flatten)]
        of: Of,
        #[command(flatten)]
        json: Json,
    },
    /// Check that every program can load the library, without changing anything
    Verify {
        /// Library to load [default: the library installed with nvsharectl]
        #[arg(long, value_name = "PATH")]
        library: Option<PathBuf>,
        #[command(flatten)]
        json: Json,
    },
    /// Verify the library, then make all programs started from now on, or those of a service, load
    /// it
    Enable {
        /// Library to load [default: the library installed with nvsharectl]
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
    /// Time that a program may keep a GPU while others wait: whole seconds, from 1 to 3600
    TimeQuantum {
        #[arg(allow_negative_numbers = true, value_parser = units::parse_duration, value_hint = ValueHint::Other)]
        value: Duration,
    },
    /// Longest wait for a turn, under fcfs only if anti-thrash is auto: whole seconds up to 3600,
    /// or 0 for no limit
    MaxWait {
        #[arg(allow_negative_numbers = true, value_parser = units::parse_duration, value_hint = ValueHint::Other)]
        value: Duration,
    },
    /// Whether programs exclude each other on a GPU
    AntiThrash {
        #[arg(value_name = "auto|on|off", value_parser = Mode, hide_possible_values = true)]
        value: AntiThrash,
    },
    /// Order of waiting programs: first come, first served; or least GPU time first, which shortens
    /// the mean completion time
    Policy {
        #[arg(value_name = "fcfs|adaptive", value_parser = Order, hide_possible_values = true)]
        value: PolicyName,
    },
}

fn parse_release(text: &str) -> Result<Duration, String> {
    settings::release(units::parse_duration(text)?)
}

fn parse_room(text: &str) -> Result<Duration, String> {
    settings::room(units::parse_duration(text)?)
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
