//! The configuration file and its drop-ins: every setting and its default.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use toml::Spanned;

use super::document::{ConfigError, parse, position, wrong};
use super::log_level::{LogLevel, read_log_level};
use super::metrics::{Listen, MetricsSection};
use super::paths::CONFIGURATION;
use super::rules::{self, Origin, RawRule, Rule, Rules, Unknown};
use super::settings::{
    self, AccountingSection, MemorySection, read_anti_thrash, read_max_clients, read_max_wait, read_placement,
    read_policy, read_sleep_after, read_time_period, read_time_quantum,
};
use super::swap::{SwapMax, SwapSection};
use crate::scheduler::{AntiThrash, Placement, PolicyName, Settings};

/// The whole configuration. `Default` returns the default of every setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    pub settings: Settings,
    /// Whether the files set `sleep-after`. The default applies only with some drivers.
    pub sets_sleep_after: bool,
    /// The maximum number of connections of one tenant. Root has no limit.
    pub max_clients_per_tenant: u32,
    pub log_level: LogLevel,
    /// The limit of host memory that all programs together use for swapped memory.
    pub swap_max: SwapMax,
    /// The limit of host memory that programs allocate in advance for memory that is still on a GPU.
    pub swap_ahead: SwapMax,
    /// The directory of swap files, for swapped memory that does not fit in host memory.
    pub swap_file: Option<PathBuf>,
    /// The limit of the total size of all swap files.
    pub swap_file_max: SwapMax,
    /// The address for metrics, in addition to sockets passed by systemd.
    pub metrics: Listen,
    /// Whether the metrics endpoint also serves metrics of single programs.
    pub metrics_of_programs: bool,
    /// How long usage records are kept.
    pub keep_usage: Duration,
    /// Limits and shares of programs by unit, slice, container, user and so on.
    pub rules: Rules,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            settings: settings::defaults(),
            sets_sleep_after: false,
            max_clients_per_tenant: 512,
            log_level: LogLevel::Info,
            // Swapped memory is locked in RAM, so the limit leaves 20 % of RAM for the host itself.
            swap_max: SwapMax::Percent(80),
            swap_ahead: SwapMax::Percent(25),
            swap_file: None,
            swap_file_max: SwapMax::Percent(50),
            metrics: Listen::Nowhere,
            metrics_of_programs: false,
            // Usage records cover more than a year, so any month can be compared with the same
            // month of the year before.
            keep_usage: Duration::from_secs(400 * 24 * 3600),
            rules: Rules::default(),
        }
    }
}

impl Config {
    /// Reads `explicit` or the default file, and its drop-ins.
    ///
    /// # Errors
    /// Fails like [`Sources::read`] and [`Sources::config`].
    pub fn load(explicit: Option<&Path>) -> Result<Self, ConfigError> {
        Sources::read(explicit)?.config()
    }

    /// Parses the text of a file. Error messages name `path`.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        Self::read([(path, text)], Unknown::Mistake)
    }

    /// Parses the texts of files, the main file first. If several files contain a setting, the last
    /// value applies. Rules of drop-ins are tried before the main file's rules, so that a drop-in
    /// can override them.
    fn read<'a>(files: impl IntoIterator<Item = (&'a Path, &'a str)>, unknown: Unknown) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        let mut rules: Vec<Vec<Rule>> = Vec::new();
        for (path, text) in files {
            let mut file: File = parse(text, path)?;
            let line_of = |at| position(text, at).0;
            let read = rules::read(std::mem::take(&mut file.rule), path, unknown, line_of);
            rules.push(read.map_err(|(span, reason)| wrong(text, path, span.start, reason))?);
            file.apply(&mut config);
        }
        let main = 1.min(rules.len());
        rules.rotate_left(main);
        let rules = Rules::new(rules.into_iter().flatten().collect())
            .map_err(|(Origin { file, line }, reason)| ConfigError::Invalid { path: file, line, column: 1, reason })?;
        Ok(Self { rules, ..config })
    }
}

/// The texts of the configuration file and its drop-ins, the main one first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sources {
    file: Vec<Source>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Source {
    path: PathBuf,
    text: String,
}

impl Sources {
    /// Reads the file `explicit`, or the default file, which may be missing. Then reads the file's
    /// drop-ins in the order of their names.
    ///
    /// # Errors
    /// A file cannot be read.
    pub fn read(explicit: Option<&Path>) -> Result<Self, ConfigError> {
        let path = explicit.unwrap_or(Path::new(CONFIGURATION));
        let unreadable =
            |path: &Path, e: &io::Error| ConfigError::Unreadable { path: path.into(), reason: e.to_string() };
        let mut file = Vec::new();
        match std::fs::read_to_string(path) {
            Ok(text) => file.push(Source { path: path.to_owned(), text }),
            Err(e) if e.kind() == io::ErrorKind::NotFound && explicit.is_none() => {
                // `config` treats the first text as the main file, so a missing file is stored as
                // an empty text.
                file.push(Source { path: path.to_owned(), text: String::new() });
            }
            Err(e) => return Err(unreadable(path, &e)),
        }
        let directory = drop_ins(path);
        for path in listed(&directory).map_err(|e| unreadable(&directory, &e))? {
            match std::fs::read_to_string(&path) {
                Ok(text) => file.push(Source { path, text }),
                Err(e) => return Err(unreadable(&path, &e)),
            }
        }
        Ok(Self { file })
    }

    /// Parses the texts into a configuration.
    ///
    /// # Errors
    /// Returns the first mistake in the texts.
    pub fn config(&self) -> Result<Config, ConfigError> {
        self.read_with(Unknown::Mistake)
    }

    /// Parses texts that were valid earlier. An account may have been deleted since, or may be
    /// unknown until the directory service answers. A rule that names such an account matches no
    /// program, and the other rules remain valid.
    ///
    /// # Errors
    /// Returns the first mistake in the texts.
    pub fn config_as_before(&self) -> Result<Config, ConfigError> {
        self.read_with(Unknown::Nobody)
    }

    fn read_with(&self, unknown: Unknown) -> Result<Config, ConfigError> {
        Config::read(self.file.iter().map(|source| (source.path.as_path(), source.text.as_str())), unknown)
    }

    /// Returns the paths of those files that exist.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.file.iter().map(|source| source.path.as_path()).filter(|path| path.exists())
    }
}

/// Returns the directory of a configuration file's drop-ins.
pub fn drop_ins(path: &Path) -> PathBuf {
    let mut directory = path.as_os_str().to_owned();
    directory.push(".d");
    directory.into()
}

/// Lists the drop-ins in a directory, sorted by name. Ignores hidden files and files with other
/// extensions.
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

/// The contents of one file. Every key is optional.
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
    /// `Some(None)` means `never`.
    #[serde(default, deserialize_with = "read_sleep_after")]
    sleep_after: Option<Option<Duration>>,
    #[serde(default, deserialize_with = "read_max_clients")]
    max_clients_per_tenant: Option<u32>,
    #[serde(default, deserialize_with = "read_log_level")]
    log_level: Option<LogLevel>,
    #[serde(default)]
    memory: MemorySection,
    #[serde(default)]
    swap: SwapSection,
    #[serde(default)]
    metrics: MetricsSection,
    #[serde(default)]
    accounting: AccountingSection,
    #[serde(default)]
    rule: Vec<Spanned<RawRule>>,
}

impl File {
    /// Changes the settings that this file contains. Ignores the file's rules.
    fn apply(self, config: &mut Config) {
        fn set<T>(setting: &mut T, value: Option<T>) {
            if let Some(value) = value {
                *setting = value;
            }
        }
        let settings = &mut config.settings;
        set(&mut settings.time_quantum, self.time_quantum);
        set(&mut settings.max_wait, self.max_wait);
        set(&mut settings.time_period, self.time_period);
        set(&mut settings.anti_thrash, self.anti_thrash);
        set(&mut settings.policy, self.policy);
        set(&mut settings.placement, self.placement);
        set(&mut settings.reserve, self.memory.reserve);
        set(&mut settings.context, self.memory.context);
        config.sets_sleep_after |= self.sleep_after.is_some();
        set(&mut settings.sleep_after, self.sleep_after);
        set(&mut config.max_clients_per_tenant, self.max_clients_per_tenant);
        set(&mut config.log_level, self.log_level);
        set(&mut config.swap_max, self.swap.max);
        set(&mut config.swap_ahead, self.swap.ahead);
        set(&mut config.swap_file, self.swap.file);
        set(&mut config.swap_file_max, self.swap.file_max);
        set(&mut config.metrics, self.metrics.listen);
        set(&mut config.metrics_of_programs, self.metrics.programs);
        set(&mut config.keep_usage, self.accounting.keep);
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
    fn the_installed_file_documents_the_defaults() {
        let text = include_str!("../../etc/nvshare.toml");
        assert_eq!(Config::parse(text, Path::new("etc/nvshare.toml")), Ok(Config::default()));
        // The commented settings in the file are the defaults, so uncommenting a setting changes
        // nothing.
        let uncommented: String = text
            .lines()
            .map(|line| match line.strip_prefix('#') {
                Some(setting) if !setting.starts_with(' ') && !setting.is_empty() => setting,
                _ => line,
            })
            .flat_map(|line| [line, "\n"])
            .collect();
        assert_ne!(uncommented, text);
        assert_eq!(
            Config::parse(&uncommented, Path::new("etc/nvshare.toml")),
            Ok(Config { sets_sleep_after: true, ..Config::default() })
        );
    }

    #[test]
    fn every_setting_is_read() {
        let text = "time-quantum = \"2min\"\nmax-wait = 0\ntime-period = \"20s\"\nanti-thrash = \"on\"\npolicy = \"adaptive\"\nplacement = \"pack\"\nsleep-after = \"never\"\nmax-clients-per-tenant = 9\nlog-level = \"debug\"\n\
                    [memory]\nreserve = \"1G\"\ncontext = 1048576\n[swap]\nmax = \"64G\"\nahead = \"none\"\nfile = \"/fast/swap\"\nfile-max = \"100G\"\n\
                    [metrics]\nlisten = \"/run/m.sock\"\nprograms = true\n[accounting]\nkeep = \"30d\"\n";
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
                sleep_after: None,
            },
            sets_sleep_after: true,
            max_clients_per_tenant: 9,
            log_level: LogLevel::Debug,
            swap_max: SwapMax::Bytes(64 << 30),
            swap_ahead: SwapMax::Bytes(0),
            swap_file: Some("/fast/swap".into()),
            swap_file_max: SwapMax::Bytes(100 << 30),
            metrics: Listen::Path("/run/m.sock".into()),
            metrics_of_programs: true,
            keep_usage: Duration::from_secs(30 * 86_400),
            rules: Rules::default(),
        };
        assert_eq!(Config::parse(text, Path::new("x")), Ok(expected));
        let number = Config::parse("time-quantum = 45", Path::new("x")).expect("a plain number");
        assert_eq!(number.settings.time_quantum, Duration::from_secs(45));
        let after = |text: &str| Config::parse(text, Path::new("x")).map(|config| config.settings.sleep_after);
        assert_eq!(after("sleep-after = \"1min\""), Ok(Some(Duration::from_secs(60))));
        let wrong = after("sleep-after = \"2d\"").expect_err("too long").to_string();
        assert!(wrong.contains("whole seconds from 1 to 86400"), "{wrong}");
    }

    #[test]
    fn drop_ins_extend_the_file_and_their_rules_come_first() {
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
            error.contains("a.toml:5:1: this rule can never match: the earlier rule ") && error.contains("20.toml:1"),
            "{error}"
        );
    }

    #[test]
    fn errors_name_the_line_and_the_allowed_values() {
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
                "nvshare.toml:1:16: time-quantum: \"soon\" is not a duration: write a number and ms, s, min, h or d, like \"30s\"",
            ),
            ("time-quantum =", "nvshare.toml:1:15: there is no value after `=`"),
            ("time-quantum = # 30\n", "nvshare.toml:1:16: there is no value after `=`"),
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
                "[swap]\nfile = \"swap\"",
                "nvshare.toml:2:8: swap.file: \"swap\" is not allowed: write the absolute path of a directory, such as \"/var/lib/nvshare/swap\", or \"\" for no files",
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
                "nvshare.toml:2:10: metrics.listen cannot be \"9810\": the path of a socket, like \"/run/nvshare-metrics/metrics.sock\", an address with a port, like \"127.0.0.1:9810\" or \"[::1]:9810\", or \"\" is allowed",
            ),
            (
                "[accounting]\nkeep = \"1h\"",
                "nvshare.toml:2:8: accounting.keep: the time for which records are kept cannot be 3600 seconds: whole seconds from 86400 to 316224000 are allowed",
            ),
            (
                "max-clients-per-tenant = 0",
                "nvshare.toml:1:26: max-clients-per-tenant cannot be 0: 1 to 65535 are allowed",
            ),
            (
                "log-level = \"loud\"",
                "nvshare.toml:1:13: log-level cannot be \"loud\": \"error\", \"warn\", \"info\", \"debug\" or \"trace\" are allowed",
            ),
            (
                "quantum = 3",
                "nvshare.toml:1:1: unknown field `quantum`, expected one of `time-quantum`, `max-wait`, `time-period`, `anti-thrash`, `policy`, `placement`, `sleep-after`, `max-clients-per-tenant`, `log-level`, `memory`, `swap`, `metrics`, `accounting`, `rule`",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(error(text), expected);
        }
        assert!(error("time-quantum 3").starts_with("nvshare.toml:1:14: "), "{}", error("time-quantum 3"));
    }
}
