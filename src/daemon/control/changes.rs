//! Settings changed at run time (`nvsharectl set`, D-Bus). They take precedence over the configuration file, and are saved
//! in the directory that systemd provides (`StateDirectory=`); without one, they last as long as the daemon. The configuration
//! file is never written.

use std::io;
use std::path::Path;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Deserializer};
use tokio::sync::oneshot;
use tracing::{info, warn};

use crate::config::names::{anti_thrash_name, policy_name};
use crate::config::rules::{Added, Addition};
use crate::config::{Config, ConfigError, document, settings};
use crate::daemon::bus::Change;
use crate::scheduler::{AntiThrash, PolicyName};
use crate::sys::atomic_file;

const FILE: &str = "settings.toml";
const HEADER: &str =
    "# Settings changed with `nvsharectl set`, `set-rule` or over D-Bus. `nvsharectl reset` forgets them.\n";

/// The changed settings, and the thread that saves them.
#[derive(Debug, Default)]
pub struct Changes {
    changed: Changed,
    /// Passes the file's text to a thread, since writing can take long.
    writer: Option<Sender<(String, oneshot::Sender<()>)>>,
}

/// The file's content. Keys of later versions are ignored.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Changed {
    #[serde(default, deserialize_with = "settings::read_time_quantum")]
    time_quantum: Option<Duration>,
    #[serde(default, deserialize_with = "settings::read_max_wait")]
    max_wait: Option<Duration>,
    #[serde(default, deserialize_with = "settings::read_anti_thrash")]
    anti_thrash: Option<AntiThrash>,
    #[serde(default, deserialize_with = "settings::read_policy")]
    policy: Option<PolicyName>,
    #[serde(default, deserialize_with = "read_rules")]
    rule: Added,
}

/// Reads the rules. Wrong ones are ignored.
fn read_rules<'de, D: Deserializer<'de>>(from: D) -> Result<Added, D::Error> {
    let (rules, wrong) = Added::read(Vec::deserialize(from)?);
    for e in wrong {
        warn!(name: "settings-ignored", "a rule set at run time is ignored: {e}");
    }
    Ok(rules)
}

impl Changes {
    /// Reads the settings that an earlier daemon saved in `directory`. A wrong file is logged and ignored.
    pub fn open(directory: Option<&Path>) -> Self {
        let Some(directory) = directory else { return Self::default() };
        let path = directory.join(FILE);
        let changed = match read(&path) {
            Ok(changed) => changed,
            Err(e) => {
                warn!(name: "settings-ignored", "settings changed at run time are ignored: {e}");
                Changed::default()
            }
        };
        if changed != Changed::default() {
            let text = changed.summary();
            info!(name: "settings-kept", "settings changed at run time take precedence over the configuration file: {text}");
        }
        let (writer, texts) = mpsc::channel::<(String, oneshot::Sender<()>)>();
        let thread = thread::Builder::new().name("state".into()).spawn(move || {
            for (text, written) in texts {
                let text = if text.is_empty() { text } else { format!("{HEADER}{text}") };
                if let Err(e) = atomic_file::write(&path, &text) {
                    warn!(
                        name: "settings-unsaved",
                        "a changed setting is in effect, but could not be saved: {}: {e}",
                        path.display()
                    );
                }
                let _ = written.send(());
            }
        });
        Self { changed, writer: thread.is_ok().then_some(writer) }
    }

    /// Applies the changes to a configuration that was read from its file.
    pub fn apply(&self, config: &mut Config) {
        let Changed { time_quantum, max_wait, anti_thrash, policy, ref rule } = self.changed;
        config.rules.put_first(rule);
        let settings = &mut config.settings;
        settings.time_quantum = time_quantum.unwrap_or(settings.time_quantum);
        settings.max_wait = max_wait.unwrap_or(settings.max_wait);
        settings.anti_thrash = anti_thrash.unwrap_or(settings.anti_thrash);
        settings.policy = policy.unwrap_or(settings.policy);
    }

    /// Adds a change. `written` is notified when it is saved.
    pub fn change(&mut self, change: Change, written: oneshot::Sender<()>) {
        match change {
            Change::TimeQuantum(quantum) => self.changed.time_quantum = Some(quantum),
            Change::MaxWait(most) => self.changed.max_wait = Some(most),
            Change::AntiThrash(mode) => self.changed.anti_thrash = Some(mode),
            Change::Policy(policy) => self.changed.policy = Some(policy),
        }
        self.save(written);
    }

    /// Sets or removes a rule. `written` is notified when that is saved.
    ///
    /// # Errors
    /// If the rule is wrong, or there are too many.
    pub fn set_rule(&mut self, addition: Addition, written: oneshot::Sender<()>) -> Result<(), String> {
        self.changed.rule.set(addition)?;
        self.save(written);
        Ok(())
    }

    /// Forgets all changes.
    pub fn reset(&mut self, written: oneshot::Sender<()>) {
        self.changed = Changed::default();
        self.save(written);
    }

    fn save(&self, written: oneshot::Sender<()>) {
        match &self.writer {
            Some(writer) => drop(writer.send((self.changed.text(), written))),
            None => drop(written.send(())),
        }
    }
}

impl Changed {
    /// The changes in one line, for the log.
    fn summary(&self) -> String {
        let settings = self.settings().lines().map(str::to_owned).collect::<Vec<_>>();
        let rules = self.rule.names().map(|name| format!("rule {name:?}"));
        settings.into_iter().chain(rules).collect::<Vec<_>>().join(", ")
    }

    /// The file's content; empty if nothing was changed.
    fn text(&self) -> String {
        self.settings() + &self.rule.text()
    }

    fn settings(&self) -> String {
        let quantum = self.time_quantum.map(|quantum| format!("time-quantum = \"{}s\"\n", quantum.as_secs()));
        let most = self.max_wait.map(|most| format!("max-wait = \"{}s\"\n", most.as_secs()));
        let mode = self.anti_thrash.map(|mode| format!("anti-thrash = \"{}\"\n", anti_thrash_name(mode)));
        let policy = self.policy.map(|policy| format!("policy = \"{}\"\n", policy_name(policy)));
        [quantum, most, mode, policy].into_iter().flatten().collect()
    }
}

fn read(path: &Path) -> Result<Changed, ConfigError> {
    match std::fs::read_to_string(path) {
        Ok(text) => document::parse(&text, path),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Changed::default()),
        Err(e) => Err(ConfigError::Unreadable { path: path.into(), reason: e.to_string() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::Settings;

    #[test]
    fn what_is_written_is_read_again() {
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
        let text = format!("{HEADER}{}", changed.text());
        assert_eq!(document::parse(&text, Path::new(FILE)), Ok(changed.clone()));
        let later = format!("of-a-later-version = 3\n{text}");
        assert_eq!(document::parse(&later, Path::new(FILE)), Ok(changed));
        assert_eq!(Changed::default().text(), "");
    }

    #[test]
    fn what_nobody_changed_is_left_as_the_file_says() {
        let mut config = Config::default();
        let before = config.clone();
        Changes::default().apply(&mut config);
        assert_eq!(config, before);
        let changed = Changed { time_quantum: Some(Duration::from_secs(7)), ..Changed::default() };
        Changes { changed, writer: None }.apply(&mut config);
        let settings = Settings { time_quantum: Duration::from_secs(7), ..before.settings.clone() };
        assert_eq!(config, Config { settings, ..before });
    }
}
