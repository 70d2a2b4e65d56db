//! The configuration file: what can be set, what each setting is when nobody sets it, and errors that say where the
//! mistake is and what is allowed. Reading it again at run time is `hub`'s business.

use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::host::SwapMax;
use super::metrics::listen::{self, Listen};
use super::rules::{self, Origin, RawRule, Rule, Rules};
use crate::scheduler::{AntiThrash, Placement, PolicyName, Settings};
use crate::units;

pub const DEFAULT_PATH: &str = "/etc/nvshare/nvshare.toml";

/// What a time quantum may be, in whole seconds. The original's default is 30 s too.
pub const TIME_QUANTUM_SECONDS: RangeInclusive<u64> = 1..=3600;

/// What the longest wait may be, in whole seconds; 0 stands for no bound.
pub const MAX_WAIT_SECONDS: RangeInclusive<u64> = 0..=3600;

/// Over how many whole seconds parts of the time of a GPU can be counted.
pub const TIME_PERIOD_SECONDS: RangeInclusive<u64> = 1..=3600;

/// The whole configuration, with the default of everything in one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    pub settings: Settings,
    /// How many connections one user may have; root has no limit.
    pub max_clients_per_user: u32,
    pub log_level: LogLevel,
    /// Whether connections outlive the daemon, where systemd keeps them.
    pub keep_connections: bool,
    /// How much host memory all programs together may take for what is swapped out.
    pub swap_max: SwapMax,
    /// Whether the driver is to bound what rules bound.
    pub driver_limits: bool,
    /// Where metrics are served, beside what systemd passes.
    pub metrics: Listen,
    /// What programs may have, by where they belong.
    pub rules: Rules,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            settings: Settings {
                time_quantum: Duration::from_secs(30),
                // Three that need each other's memory wait no longer than two do with the default quantum.
                max_wait: Duration::from_secs(60),
                anti_thrash: AntiThrash::Auto,
                policy: PolicyName::Fcfs,
                reserve: 512 << 20,
                // A bare context takes about 527 MiB on an H200; libraries that programs load add to it.
                context: 600 << 20,
                time_period: Duration::from_secs(10),
                placement: Placement::None,
            },
            max_clients_per_user: 512,
            log_level: LogLevel::Info,
            keep_connections: true,
            // Swapped memory is locked in RAM: what the host itself needs must not be.
            swap_max: SwapMax::Percent(80),
            // It takes a privilege.
            driver_limits: false,
            metrics: Listen::Nowhere,
            rules: Rules::default(),
        }
    }
}

/// How much is logged; each level has those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// What is wrong with a configuration file. The text is whole: it names the file and, where it is known, the place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConfigError {
    Unreadable { path: PathBuf, reason: String },
    Invalid { path: PathBuf, line: usize, column: usize, reason: String },
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { path, reason } => write!(f, "cannot read {}: {reason}", path.display()),
            Self::Invalid { path, line, column, reason } => write!(f, "{}:{line}:{column}: {reason}", path.display()),
        }
    }
}

impl std::error::Error for ConfigError {}

impl Config {
    /// Reads `explicit`, or the default file, which may be missing; then what is in the directory beside it, by name.
    pub fn load(explicit: Option<&Path>) -> Result<Self, ConfigError> {
        let path = explicit.unwrap_or(Path::new(DEFAULT_PATH));
        let unreadable =
            |path: &Path, e: &io::Error| ConfigError::Unreadable { path: path.into(), reason: e.to_string() };
        let mut texts = Vec::new();
        match std::fs::read_to_string(path) {
            Ok(text) => texts.push((path.to_owned(), text)),
            Err(e) if e.kind() == io::ErrorKind::NotFound && explicit.is_none() => {
                texts.push((path.to_owned(), String::new()));
            }
            Err(e) => return Err(unreadable(path, &e)),
        }
        let directory = drop_ins(path);
        for path in listed(&directory).map_err(|e| unreadable(&directory, &e))? {
            match std::fs::read_to_string(&path) {
                Ok(text) => texts.push((path, text)),
                Err(e) => return Err(unreadable(&path, &e)),
            }
        }
        Self::read(texts.iter().map(|(path, text)| (path.as_path(), text.as_str())))
    }

    /// Reads the text of a file; `path` is for messages only.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        Self::read([(path, text)])
    }

    /// Reads the texts of files, the main one first. Of a setting, the last one counts. Rules of drop-ins are tried before
    /// those of the main file, so that a drop-in can say something else of somebody.
    fn read<'a>(files: impl IntoIterator<Item = (&'a Path, &'a str)>) -> Result<Self, ConfigError> {
        let mut all = File::default();
        let mut rules: Vec<Vec<Rule>> = Vec::new();
        for (path, text) in files {
            let mut file: File = parse(text, path)?;
            let line_of = |at| position(text, at).0;
            let read = rules::read(std::mem::take(&mut file.rule), path, line_of);
            rules.push(read.map_err(|(span, reason)| wrong(text, path, span.start, reason))?);
            all = file.over(all);
        }
        let main = 1.min(rules.len());
        rules.rotate_left(main);
        let rules = Rules::new(rules.into_iter().flatten().collect())
            .map_err(|(Origin { file, line }, reason)| ConfigError::Invalid { path: file, line, column: 1, reason })?;
        let default = Self::default();
        let said = Said {
            time_quantum: all.time_quantum,
            max_wait: all.max_wait,
            time_period: all.time_period,
            anti_thrash: all.anti_thrash,
            policy: all.policy,
            memory: MemorySection { reserve: all.memory.reserve, context: all.memory.context },
        };
        Ok(Self {
            settings: Settings { placement: all.placement.unwrap_or(default.settings.placement), ..said.settings() },
            max_clients_per_user: all.max_clients_per_user.unwrap_or(default.max_clients_per_user),
            log_level: all.log_level.unwrap_or(default.log_level),
            keep_connections: all.keep_connections.unwrap_or(default.keep_connections),
            swap_max: all.swap.max.unwrap_or(default.swap_max),
            driver_limits: all.memory.driver_limits.unwrap_or(default.driver_limits),
            metrics: all.metrics.listen.unwrap_or(default.metrics),
            rules,
        })
    }
}

/// What somebody says of the scheduler's settings. Of the others the default counts.
#[derive(Debug, Clone, Copy, Default)]
pub struct Said {
    pub time_quantum: Option<Duration>,
    pub max_wait: Option<Duration>,
    pub time_period: Option<Duration>,
    pub anti_thrash: Option<AntiThrash>,
    pub policy: Option<PolicyName>,
    pub memory: MemorySection,
}

impl Said {
    pub fn settings(self) -> Settings {
        let default = Config::default().settings;
        Settings {
            time_quantum: self.time_quantum.unwrap_or(default.time_quantum),
            max_wait: self.max_wait.unwrap_or(default.max_wait),
            anti_thrash: self.anti_thrash.unwrap_or(default.anti_thrash),
            policy: self.policy.unwrap_or(default.policy),
            reserve: self.memory.reserve.unwrap_or(default.reserve),
            context: self.memory.context.unwrap_or(default.context),
            time_period: self.time_period.unwrap_or(default.time_period),
            ..default
        }
    }
}

/// Where the drop-ins of a configuration file are.
pub fn drop_ins(path: &Path) -> PathBuf {
    let mut directory = path.as_os_str().to_owned();
    directory.push(".d");
    directory.into()
}

/// The drop-ins there, in the order of their names. Other files, and hidden ones, are left alone.
fn listed(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    let is_hidden = |path: &Path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    paths.retain(|path| path.extension().is_some_and(|end| end == "toml") && !is_hidden(path));
    paths.sort();
    Ok(paths)
}

/// Reads the text of a file, with errors that say where it is wrong.
pub fn parse<T: de::DeserializeOwned>(text: &str, path: &Path) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|e| wrong(text, path, e.span().map_or(0, |span| span.start), e.message().to_owned()))
}

/// What is wrong at that byte of a file.
pub fn wrong(text: &str, path: &Path, at: usize, reason: String) -> ConfigError {
    let (line, column) = position(text, at);
    ConfigError::Invalid { path: path.into(), line, column, reason }
}

/// Line and column of a byte, both from 1, columns in characters.
pub fn position(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
    (line, column)
}

/// The time quantum, or a sentence about what it may be.
pub fn time_quantum(value: Duration) -> Result<Duration, String> {
    whole_seconds(value, "time quantum", TIME_QUANTUM_SECONDS)
}

/// The longest wait, or a sentence about what it may be.
pub fn max_wait(value: Duration) -> Result<Duration, String> {
    whole_seconds(value, "longest wait", MAX_WAIT_SECONDS)
}

fn time_period(value: Duration) -> Result<Duration, String> {
    whole_seconds(value, "time period", TIME_PERIOD_SECONDS)
}

fn whole_seconds(value: Duration, what: &str, allowed: RangeInclusive<u64>) -> Result<Duration, String> {
    let seconds = value.as_secs();
    if value.subsec_nanos() == 0 && allowed.contains(&seconds) {
        return Ok(value);
    }
    let (min, max) = (allowed.start(), allowed.end());
    let given = if value.subsec_nanos() == 0 { seconds.to_string() } else { value.as_secs_f64().to_string() };
    Err(format!("the {what} cannot be {given} seconds: whole seconds from {min} to {max} are allowed"))
}

/// A file as it is written. Every key can be left out.
#[derive(Deserialize, Default)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct File {
    #[serde(default, deserialize_with = "read_time_quantum")]
    time_quantum: Option<Duration>,
    #[serde(default, deserialize_with = "read_max_wait")]
    max_wait: Option<Duration>,
    #[serde(default, deserialize_with = "read_time_period")]
    time_period: Option<Duration>,
    #[serde(default, deserialize_with = "read_anti_thrash")]
    anti_thrash: Option<AntiThrash>,
    #[serde(default, deserialize_with = "read_policy")]
    policy: Option<PolicyName>,
    #[serde(default, deserialize_with = "read_placement")]
    placement: Option<Placement>,
    #[serde(default, deserialize_with = "read_max_clients")]
    max_clients_per_user: Option<u32>,
    #[serde(default, deserialize_with = "read_log_level")]
    log_level: Option<LogLevel>,
    #[serde(default)]
    keep_connections: Option<bool>,
    #[serde(default)]
    memory: FileMemory,
    #[serde(default)]
    swap: SwapSection,
    #[serde(default)]
    metrics: listen::Section,
    #[serde(default)]
    rule: Vec<Spanned<RawRule>>,
}

impl File {
    /// What this file says, and, where it says nothing, what those before it say.
    fn over(self, before: Self) -> Self {
        Self {
            time_quantum: self.time_quantum.or(before.time_quantum),
            max_wait: self.max_wait.or(before.max_wait),
            time_period: self.time_period.or(before.time_period),
            anti_thrash: self.anti_thrash.or(before.anti_thrash),
            policy: self.policy.or(before.policy),
            placement: self.placement.or(before.placement),
            max_clients_per_user: self.max_clients_per_user.or(before.max_clients_per_user),
            log_level: self.log_level.or(before.log_level),
            keep_connections: self.keep_connections.or(before.keep_connections),
            memory: FileMemory {
                reserve: self.memory.reserve.or(before.memory.reserve),
                context: self.memory.context.or(before.memory.context),
                driver_limits: self.memory.driver_limits.or(before.memory.driver_limits),
            },
            swap: SwapSection { max: self.swap.max.or(before.swap.max) },
            metrics: listen::Section { listen: self.metrics.listen.or(before.metrics.listen) },
            rule: Vec::new(),
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct FileMemory {
    #[serde(default, deserialize_with = "read_reserve")]
    reserve: Option<u64>,
    #[serde(default, deserialize_with = "read_context")]
    context: Option<u64>,
    #[serde(default)]
    driver_limits: Option<bool>,
}

/// What of it is the scheduler's own.
#[derive(Debug, Clone, Copy, Deserialize, Default)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct MemorySection {
    #[serde(default, deserialize_with = "read_reserve")]
    reserve: Option<u64>,
    #[serde(default, deserialize_with = "read_context")]
    context: Option<u64>,
}

#[derive(Debug, Clone, Copy, Deserialize, Default)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct SwapSection {
    #[serde(default, deserialize_with = "read_swap_max")]
    pub max: Option<SwapMax>,
}

fn read_swap_max<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SwapMax>, D::Error> {
    match Scalar::read(from, "swap.max", "\"80%\", a size like \"64G\", or \"none\"")? {
        Scalar::Number(bytes) => Ok(SwapMax::Bytes(bytes)),
        Scalar::Text(text) => SwapMax::parse(&text),
    }
    .map(Some)
    .map_err(|e| de::Error::custom(format!("swap.max: {e}")))
}

pub fn read_time_quantum<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    read_duration(from, "time-quantum", time_quantum)
}

pub fn read_max_wait<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    read_duration(from, "max-wait", max_wait)
}

pub fn read_time_period<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    read_duration(from, "time-period", time_period)
}

fn read_duration<'de, D: Deserializer<'de>>(
    from: D,
    key: &'static str,
    check: impl FnOnce(Duration) -> Result<Duration, String>,
) -> Result<Option<Duration>, D::Error> {
    let scalar = Scalar::read(from, key, "a duration in whole seconds, like \"30s\"")?;
    let parsed = match scalar {
        Scalar::Number(seconds) => Ok(Duration::from_secs(seconds)),
        Scalar::Text(text) => units::parse_duration(&text),
    };
    parsed.and_then(check).map(Some).map_err(|e| de::Error::custom(format!("{key}: {e}")))
}

pub fn read_anti_thrash<'de, D: Deserializer<'de>>(from: D) -> Result<Option<AntiThrash>, D::Error> {
    match Scalar::read(from, "anti-thrash", "\"auto\", \"on\" or \"off\"")? {
        Scalar::Text(text) => crate::bus::parse_anti_thrash(&text).map(Some),
        Scalar::Number(number) => {
            Err(format!("anti-thrash cannot be {number}: \"auto\", \"on\" or \"off\" are allowed"))
        }
    }
    .map_err(de::Error::custom)
}

pub fn read_policy<'de, D: Deserializer<'de>>(from: D) -> Result<Option<PolicyName>, D::Error> {
    match Scalar::read(from, "policy", "\"fcfs\" or \"adaptive\"")? {
        Scalar::Text(text) => crate::bus::parse_policy(&text).map(Some),
        Scalar::Number(number) => Err(format!("the policy cannot be {number}: \"fcfs\" or \"adaptive\" is allowed")),
    }
    .map_err(de::Error::custom)
}

fn read_placement<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Placement>, D::Error> {
    let allowed = "\"none\", \"pack\" or \"spread\"";
    let given = match Scalar::read(from, "placement", allowed)? {
        Scalar::Text(text) => match &*text {
            "none" => return Ok(Some(Placement::None)),
            "pack" => return Ok(Some(Placement::Pack)),
            "spread" => return Ok(Some(Placement::Spread)),
            _ => format!("{text:?}"),
        },
        Scalar::Number(number) => number.to_string(),
    };
    Err(de::Error::custom(format!("placement cannot be {given}: {allowed} are allowed")))
}

fn read_max_clients<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    match Scalar::read(from, "max-clients-per-user", "a number from 1 to 65535")? {
        Scalar::Number(number @ 1..=65535) => Ok(Some(number as u32)),
        Scalar::Number(other) => Err(other.to_string()),
        Scalar::Text(text) => Err(format!("{text:?}")),
    }
    .map_err(|given| de::Error::custom(format!("max-clients-per-user cannot be {given}: 1 to 65535 are allowed")))
}

fn read_log_level<'de, D: Deserializer<'de>>(from: D) -> Result<Option<LogLevel>, D::Error> {
    let allowed = "\"error\", \"warn\", \"info\", \"debug\" or \"trace\"";
    let given = match Scalar::read(from, "log-level", allowed)? {
        Scalar::Text(text) => match clap::ValueEnum::from_str(&text, false) {
            Ok(level) => return Ok(Some(level)),
            Err(_) => format!("{text:?}"),
        },
        Scalar::Number(number) => number.to_string(),
    };
    Err(de::Error::custom(format!("log-level cannot be {given}: {allowed} are allowed")))
}

fn read_reserve<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    read_size(from, "memory.reserve")
}

fn read_context<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    read_size(from, "memory.context")
}

/// More than any GPU has; a larger number is a slip of the unit.
pub const MAX_MEMORY: u64 = 1 << 40;

fn read_size<'de, D: Deserializer<'de>>(from: D, key: &'static str) -> Result<Option<u64>, D::Error> {
    let bytes = match Scalar::read(from, key, "a size, like \"512M\"")? {
        Scalar::Number(bytes) => Ok(bytes),
        Scalar::Text(text) => units::parse_size(&text),
    };
    match bytes {
        Ok(bytes) if bytes <= MAX_MEMORY => Ok(Some(bytes)),
        Ok(_) => Err(de::Error::custom(format!("{key} is too large: at most 1T is allowed"))),
        Err(e) => Err(de::Error::custom(format!("{key}: {e}"))),
    }
}

/// A value that may be written as a number or as a text.
#[derive(Debug)]
pub enum Scalar {
    Number(u64),
    Text(String),
}

impl Scalar {
    pub fn read<'de, D: Deserializer<'de>>(
        from: D,
        key: &'static str,
        allowed: &'static str,
    ) -> Result<Self, D::Error> {
        from.deserialize_any(ScalarVisitor { key, allowed })
    }
}

struct ScalarVisitor {
    key: &'static str,
    allowed: &'static str,
}

impl Visitor<'_> for ScalarVisitor {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {}", self.allowed, self.key)
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Scalar, E> {
        Ok(Scalar::Number(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Scalar, E> {
        let positive = u64::try_from(value);
        positive
            .map(Scalar::Number)
            .map_err(|_| E::custom(format!("{} cannot be {value}: {} is allowed", self.key, self.allowed)))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Scalar, E> {
        Ok(Scalar::Text(value.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        Config::parse(text, Path::new("nvshare.toml")).expect_err(text).to_string()
    }

    #[test]
    fn an_empty_file_is_the_default() {
        assert_eq!(Config::parse("", Path::new("x")), Ok(Config::default()));
    }

    #[test]
    fn the_installed_file_says_the_defaults() {
        let text = include_str!("../../etc/nvshare.toml");
        assert_eq!(Config::parse(text, Path::new("etc/nvshare.toml")), Ok(Config::default()));
        // Its commented settings are the defaults as well, so that uncommenting one changes nothing.
        let uncommented: String = text
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(setting) if !setting.starts_with(' ') && !setting.is_empty() => setting,
                _ => line,
            })
            .flat_map(|line| [line, "\n"])
            .collect();
        assert_ne!(uncommented, text);
        assert_eq!(Config::parse(&uncommented, Path::new("etc/nvshare.toml")), Ok(Config::default()));
    }

    #[test]
    fn every_setting_is_read() {
        let text = "time-quantum = \"2min\"\nmax-wait = 0\ntime-period = \"20s\"\nanti-thrash = \"on\"\npolicy = \"adaptive\"\nplacement = \"pack\"\nmax-clients-per-user = 9\nlog-level = \"debug\"\n\
                     keep-connections = false\n\
                    [memory]\nreserve = \"1G\"\ncontext = 1048576\ndriver-limits = true\n[swap]\nmax = \"64G\"\n\
                    [metrics]\nlisten = \"/run/m.sock\"\n";
        let expected = Config {
            settings: Settings {
                time_quantum: Duration::from_secs(120),
                max_wait: Duration::ZERO,
                anti_thrash: AntiThrash::On,
                policy: PolicyName::Adaptive,
                reserve: 1 << 30,
                context: 1 << 20,
                time_period: Duration::from_secs(20),
                placement: Placement::Pack,
            },
            max_clients_per_user: 9,
            log_level: LogLevel::Debug,
            keep_connections: false,
            swap_max: SwapMax::Bytes(64 << 30),
            driver_limits: true,
            metrics: Listen::Path("/run/m.sock".into()),
            rules: Rules::default(),
        };
        assert_eq!(Config::parse(text, Path::new("x")), Ok(expected));
        let number = Config::parse("time-quantum = 45", Path::new("x")).expect("a plain number");
        assert_eq!(number.settings.time_quantum, Duration::from_secs(45));
    }

    #[test]
    fn drop_ins_say_more_and_their_rules_come_first() {
        let directory = tempfile::tempdir().expect("a directory");
        let main = directory.path().join("a.toml");
        let put = |name: &str, text: &str| std::fs::write(drop_ins(&main).join(name), text).expect("a drop-in");
        std::fs::create_dir(drop_ins(&main)).expect("a directory for drop-ins");
        let rule = |user: u32| format!("[[rule]]\nuser = {user}\nmemory-max = \"1G\"\n");
        std::fs::write(&main, format!("time-quantum = 5\nmax-wait = 7\n[memory]\nreserve = 9\n{}", rule(1)))
            .expect("a file");
        put("20.toml", &format!("time-quantum = 20\n{}", rule(20)));
        put("10.toml", &format!("time-quantum = 10\n[memory]\ncontext = 8\n{}", rule(10)));
        put("30.conf", "nonsense");
        put(".40.toml", "nonsense");
        let config = Config::load(Some(&main)).expect("it is right");
        let Settings { time_quantum, max_wait, reserve, context, .. } = config.settings;
        assert_eq!((time_quantum.as_secs(), max_wait.as_secs(), reserve, context), (20, 7, 9, 8));
        let users: Vec<_> = (0..4).map_while(|at| config.rules.get(at)?.subject.user).collect();
        assert_eq!(users, [10, 20, 1]);

        put("20.toml", "time-quantum = 20\n\ntime-quantum = 0\n");
        let error = Config::load(Some(&main)).expect_err("it is wrong").to_string();
        assert!(error.contains("a.toml.d/20.toml:3:1: "), "{error}");
        put("20.toml", "[[rule]]\nmemory-max = \"1G\"\n");
        let error = Config::load(Some(&main)).expect_err("it is wrong").to_string();
        assert!(
            error.contains("a.toml:5:1: this rule can never match: rule ") && error.contains("20.toml:1"),
            "{error}"
        );
    }

    #[test]
    fn errors_say_where_and_what_is_allowed() {
        let cases = [
            (
                "time-quantum = 0",
                "nvshare.toml:1:16: time-quantum: the time quantum cannot be 0 seconds: whole seconds from 1 to 3600 are allowed",
            ),
            (
                "\n  time-quantum = \"500ms\"",
                "nvshare.toml:2:18: time-quantum: the time quantum cannot be 0.5 seconds: whole seconds from 1 to 3600 are allowed",
            ),
            (
                "time-quantum = \"soon\"",
                "nvshare.toml:1:16: time-quantum: \"soon\" is not a duration: write a number and ms, s, min or h, like \"30s\"",
            ),
            (
                "time-quantum = true",
                "nvshare.toml:1:16: invalid type: boolean `true`, expected a duration in whole seconds, like \"30s\" for time-quantum",
            ),
            (
                "max-wait = \"2h\"",
                "nvshare.toml:1:12: max-wait: the longest wait cannot be 7200 seconds: whole seconds from 0 to 3600 are allowed",
            ),
            (
                "anti-thrash = \"maybe\"",
                "nvshare.toml:1:15: anti-thrash cannot be \"maybe\": \"auto\", \"on\" or \"off\" are allowed",
            ),
            (
                "policy = \"fair\"",
                "nvshare.toml:1:10: the policy cannot be \"fair\": \"fcfs\" or \"adaptive\" is allowed",
            ),
            (
                "placement = \"full\"",
                "nvshare.toml:1:13: placement cannot be \"full\": \"none\", \"pack\" or \"spread\" are allowed",
            ),
            (
                "[memory]\nreserve = \"lots\"",
                "nvshare.toml:2:11: memory.reserve: \"lots\" is not a size: write a number and K, M, G or T, like \"512M\"",
            ),
            ("[memory]\ncontext = \"2T\"", "nvshare.toml:2:11: memory.context is too large: at most 1T is allowed"),
            (
                "[swap]\nmax = \"all\"",
                "nvshare.toml:2:7: swap.max: \"all\" is not allowed: write \"80%\", a size like \"64G\", or \"none\"",
            ),
            (
                "[metrics]\nlisten = \"9810\"",
                "nvshare.toml:2:10: metrics.listen cannot be \"9810\": the path of a socket, like \"/run/nvshare-metrics/metrics.sock\", an address with a port, like \"127.0.0.1:9810\" or \"[::1]:9810\", or nothing at all is allowed",
            ),
            ("max-clients-per-user = 0", "nvshare.toml:1:24: max-clients-per-user cannot be 0: 1 to 65535 are allowed"),
            (
                "log-level = \"loud\"",
                "nvshare.toml:1:13: log-level cannot be \"loud\": \"error\", \"warn\", \"info\", \"debug\" or \"trace\" are allowed",
            ),
            (
                "quantum = 3",
                "nvshare.toml:1:1: unknown field `quantum`, expected one of `time-quantum`, `max-wait`, `time-period`, `anti-thrash`, `policy`, `placement`, `max-clients-per-user`, `log-level`, `keep-connections`, `memory`, `swap`, `metrics`, `rule`",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(error(text), expected);
        }
        assert!(error("time-quantum 3").starts_with("nvshare.toml:1:14: "), "{}", error("time-quantum 3"));
    }
}
