//! Settings changed at run time (`nvsharectl set`, D-Bus). These settings take precedence over the
//! configuration file, which is never written. The changes are saved in the directory that systemd
//! provides (`StateDirectory=`). Without such a directory, the changes last until the daemon exits.
//!
//! A change takes effect only after it has been saved, so every setting in effect survives a
//! restart.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Deserializer};
use tokio::sync::{Mutex, MutexGuard};
use tracing::{info, warn};
use zbus::fdo;

use crate::config::names::{anti_thrash_name, policy_name};
use crate::config::rules::Added;
use crate::config::{Config, document, settings};
use crate::daemon::state_file::{Content, StateFile};
use crate::scheduler::{AntiThrash, PolicyName};

const FILE: &str = "settings.toml";
const HEADER: &str =
    "# Settings changed with `nvsharectl set`, `set-rule` or over D-Bus. `nvsharectl reset` discards them.\n";

/// The settings changed at run time, in the form in which they are saved. The lock serializes changes: one
/// change is saved before the next begins.
#[derive(Debug, Default)]
pub struct Changes(Mutex<StateFile<Changed>>);

/// The content of the file. Keys of later versions are ignored.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Changed {
    #[serde(default, deserialize_with = "settings::read_time_quantum")]
    pub time_quantum: Option<Duration>,
    #[serde(default, deserialize_with = "settings::read_max_wait")]
    pub max_wait: Option<Duration>,
    #[serde(default, deserialize_with = "settings::read_anti_thrash")]
    pub anti_thrash: Option<AntiThrash>,
    #[serde(default, deserialize_with = "settings::read_policy")]
    pub policy: Option<PolicyName>,
    #[serde(default, deserialize_with = "read_rules")]
    pub rule: Added,
}

/// Parses the rules. Invalid rules are logged and ignored.
fn read_rules<'de, D: Deserializer<'de>>(from: D) -> Result<Added, D::Error> {
    let (rules, wrong) = Added::read(Vec::deserialize(from)?);
    for e in wrong {
        warn!(name: "settings-ignored", "ignoring a rule that was set at run time: {e}");
    }
    Ok(rules)
}

impl Changes {
    /// Reads the settings that an earlier daemon saved in `directory`. An invalid file is logged and ignored.
    pub fn open(directory: Option<&Path>) -> Self {
        let Some(directory) = directory else { return Self::default() };
        let file = StateFile::<Changed>::open(directory.join(FILE), |e| {
            warn!(name: "settings-ignored", "ignoring the settings that were changed at run time: {e}");
        });
        if file.content != Changed::default() {
            let text = file.content.summary();
            info!(name: "settings-kept", "settings that were changed at run time take precedence over the configuration file: {text}");
        }
        Self(Mutex::new(file))
    }

    /// Applies the changes to the configuration at startup.
    pub fn apply(&mut self, config: &mut Config) {
        self.0.get_mut().content.apply(config);
    }

    /// Waits until no other change is in progress. Other changes then wait until the returned value is
    /// dropped.
    pub async fn begin(&self) -> Turn<'_> {
        Turn(self.0.lock().await)
    }
}

/// Exclusive permission to change the settings.
#[derive(Debug)]
pub struct Turn<'a>(MutexGuard<'a, StateFile<Changed>>);

impl Turn<'_> {
    /// Applies the changes to a configuration that was read from files.
    pub fn apply(&self, config: &mut Config) {
        self.0.content.apply(config);
    }

    /// Changes the settings and saves them, also on disk.
    ///
    /// # Errors
    /// The error of `change`, or `IOError` if the change cannot be saved. In both cases, the change has no
    /// effect.
    pub async fn change(&mut self, change: impl FnOnce(&mut Changed) -> fdo::Result<()>) -> fdo::Result<()> {
        let mut changed = self.0.content.clone();
        change(&mut changed)?;
        if let Ok(Err(e)) = self.0.save(&changed).await {
            warn!(name: "settings-unsaved", "refused a change of settings, because it cannot be saved in {e}");
            return Err(fdo::Error::IOError(format!("cannot save the change in {e}. Nothing has changed.")));
        }
        self.0.content = changed;
        Ok(())
    }
}

impl Changed {
    fn apply(&self, config: &mut Config) {
        let Self { time_quantum, max_wait, anti_thrash, policy, ref rule } = *self;
        config.rules.put_first(rule);
        let settings = &mut config.settings;
        settings.time_quantum = time_quantum.unwrap_or(settings.time_quantum);
        settings.max_wait = max_wait.unwrap_or(settings.max_wait);
        settings.anti_thrash = anti_thrash.unwrap_or(settings.anti_thrash);
        settings.policy = policy.unwrap_or(settings.policy);
    }

    /// Describes the changes in one line, for the log.
    fn summary(&self) -> String {
        let settings = self.settings().lines().map(str::to_owned).collect::<Vec<_>>();
        let rules = self.rule.names().map(|name| format!("rule {name:?}"));
        settings.into_iter().chain(rules).collect::<Vec<_>>().join(", ")
    }

    fn settings(&self) -> String {
        let quantum = self.time_quantum.map(|quantum| format!("time-quantum = \"{}s\"\n", quantum.as_secs()));
        let most = self.max_wait.map(|most| format!("max-wait = \"{}s\"\n", most.as_secs()));
        let mode = self.anti_thrash.map(|mode| format!("anti-thrash = \"{}\"\n", anti_thrash_name(mode)));
        let policy = self.policy.map(|policy| format!("policy = \"{}\"\n", policy_name(policy)));
        [quantum, most, mode, policy].into_iter().flatten().collect()
    }
}

impl Content for Changed {
    fn parse(text: &str, path: &Path) -> Result<Self, String> {
        document::parse(text, path).map_err(|e| e.to_string())
    }

    /// Empty if nothing was changed.
    fn text(&self) -> String {
        let text = self.settings() + &self.rule.text();
        if text.is_empty() { text } else { format!("{HEADER}{text}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::rules::Addition;
    use crate::scheduler::Settings;

    #[test]
    fn changed_settings_round_trip_through_the_state_file() {
        let changed = Changed {
            time_quantum: Some(Duration::from_secs(45)),
            max_wait: Some(Duration::ZERO),
            anti_thrash: Some(AntiThrash::On),
            policy: Some(PolicyName::Adaptive),
            rule: {
                let mut rule = Added::default();
                let keys = "weight = 5".parse().expect("a table");
                rule.set(Addition::read("one", &keys).expect("a rule")).expect("room");
                rule
            },
        };
        let text = changed.text();
        assert_eq!(document::parse(&text, Path::new(FILE)), Ok(changed.clone()));
        let later = format!("of-a-later-version = 3\n{text}");
        assert_eq!(document::parse(&later, Path::new(FILE)), Ok(changed));
        assert_eq!(Changed::default().text(), "");
    }

    #[test]
    fn unchanged_settings_keep_the_configurations_values() {
        let mut config = Config::default();
        let before = config.clone();
        Changed::default().apply(&mut config);
        assert_eq!(config, before);
        let changed = Changed { time_quantum: Some(Duration::from_secs(7)), ..Changed::default() };
        changed.apply(&mut config);
        let settings = Settings { time_quantum: Duration::from_secs(7), ..before.settings.clone() };
        assert_eq!(config, Config { settings, ..before });
    }
}
