//! The configuration file `/etc/nvshare/agent.toml`: the keys that pods may set, and their weights.
//! Errors name the line of a mistake. `permissions` interprets the settings.

use std::path::Path;

use glob::Pattern;
use nvshare::config::document::{ConfigError, parse, wrong};
use serde::Deserialize;
use toml::{Spanned, Value};

use super::{Ceilings, KEYS, Permissions, share};

pub const DEFAULT_PATH: &str = "/etc/nvshare/agent.toml";

/// The whole configuration.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Config {
    /// Permissions by patterns of namespaces. The first matching pattern applies.
    namespaces: Vec<(Pattern, Permissions)>,
    /// The permissions of all other namespaces.
    others: Permissions,
}

impl Config {
    /// Reads `explicit`, or the default file, which may be missing.
    pub fn load(explicit: Option<&Path>) -> Result<Self, ConfigError> {
        crate::config::load(explicit, DEFAULT_PATH, Self::parse)
    }

    /// Parses the text of a file. Error messages name `path`.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let file: File = parse(text, path)?;
        let mut namespaces: Vec<(Pattern, Permissions)> = Vec::new();
        for entry in file.namespaces {
            let (pattern, permissions) =
                entry.check(&namespaces).map_err(|Mistake { at, what }| wrong(text, path, at, what))?;
            namespaces.push((pattern, permissions));
        }
        Ok(Self { namespaces, others: Permissions::default() })
    }

    /// The permissions of pods in a namespace.
    pub fn of(&self, namespace: &str) -> &Permissions {
        let entry = self.namespaces.iter().find(|(pattern, _)| pattern.matches(namespace));
        entry.map_or(&self.others, |(_, permissions)| permissions)
    }
}

/// A mistake in a file, with the position of its first byte.
struct Mistake {
    at: usize,
    what: String,
}

impl Mistake {
    fn at<T>(place: &Spanned<T>, what: String) -> Self {
        Self { at: place.span().start, what }
    }
}

/// The contents of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    namespaces: Vec<Entry>,
}

/// `[[namespaces]]`.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Entry {
    name: Spanned<String>,
    may_set: Option<Vec<Spanned<String>>>,
    weight_max: Option<Spanned<Value>>,
    time_min_max: Option<Spanned<Value>>,
    priority_max: Option<Spanned<Value>>,
    weight: Option<Spanned<Value>>,
}

impl Entry {
    fn check(self, before: &[(Pattern, Permissions)]) -> Result<(Pattern, Permissions), Mistake> {
        let pattern = self.pattern(before)?;
        let mut permissions = Permissions::default();
        if let Some(keys) = self.may_set {
            let known = |name: Spanned<String>| {
                let key = KEYS.into_iter().find(|key| key == name.as_ref());
                let what = || format!("may-set cannot contain {:?}: {} are allowed", name.as_ref(), KEYS.join(", "));
                key.ok_or_else(|| Mistake::at(&name, what()))
            };
            permissions.may_set = keys.into_iter().map(known).collect::<Result<_, _>>()?;
        }
        if let Some(weight) = self.weight {
            share("weight", weight.as_ref()).map_err(|what| Mistake::at(&weight, what))?;
            permissions.weight = Some(weight.into_inner());
        }
        let ceiling = |key: &'static str, value: Option<Spanned<Value>>| {
            let Some(value) = value else { return Ok(None) };
            if !permissions.may_set.contains(key) {
                return Err(Mistake::at(&value, format!("{key}-max has no effect: {key} is not in may-set")));
            }
            let read = share(key, value.as_ref());
            read.map(Some).map_err(|what| Mistake::at(&value, format!("{key}-max: {what}")))
        };
        let default = permissions.ceilings;
        permissions.ceilings = Ceilings {
            weight: ceiling("weight", self.weight_max)?.map_or(default.weight, |share| share.weight),
            time_min: ceiling("time-min", self.time_min_max)?.map_or(default.time_min, |share| share.min),
            priority: ceiling("priority", self.priority_max)?.map_or(default.priority, |share| share.priority),
        };
        Ok((pattern, permissions))
    }

    fn pattern(&self, before: &[(Pattern, Permissions)]) -> Result<Pattern, Mistake> {
        let text = self.name.as_ref();
        let mistake = |what: String| Err(Mistake::at(&self.name, what));
        if text.is_empty() {
            return mistake("name: \"\" matches no namespace. To match every namespace, write \"*\"".into());
        }
        let covers = |other: &Pattern| other.as_str() == text || other.as_str() == "*";
        if let Some((other, _)) = before.iter().find(|(other, _)| covers(other)) {
            return mistake(format!(
                "name: {text:?} can never match, because the earlier {:?} matches all its namespaces",
                other.as_str()
            ));
        }
        match Pattern::new(text) {
            Ok(pattern) => Ok(pattern),
            Err(e) => mistake(format!(
                "name: {text:?} is not a valid pattern ({}). * stands for any text, ? for a character, [ab] for a or b",
                e.msg
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("agent.toml")).map_err(|e| e.to_string())
    }

    #[test]
    fn the_first_matching_entry_applies_or_else_the_default() {
        let text = r#"
            [[namespaces]]
            name = "team-a"
            may-set = ["weight", "time-min", "priority"]
            weight-max = 200
            time-min-max = "20%"
            priority-max = 5

            [[namespaces]]
            name = "team-*"
            may-set = []

            [[namespaces]]
            name = "batch"
            weight-max = "idle"
            weight = "idle"
        "#;
        let config = parse(text).expect("it is right");
        let a = config.of("team-a");
        assert_eq!(a.ceilings, Ceilings { weight: 200, time_min: 20, priority: 5 });
        assert_eq!(a.may_set.len(), 3);
        assert!(config.of("team-b").may_set.is_empty());
        assert_eq!(config.of("batch").may_set, Permissions::default().may_set);
        assert_eq!(config.of("batch").ceilings.weight, 0);
        assert_eq!((&config.of("batch").weight, &a.weight), (&Some("idle".into()), &None));
        assert_eq!(config.of("default"), &Permissions::default());
        assert_eq!(parse(""), Ok(Config::default()));
    }

    #[test]
    fn errors_name_the_line_and_the_allowed_values() {
        for (text, said) in [
            ("namespace = 1", "agent.toml:1:1: unknown field `namespace`, expected `namespaces`"),
            ("[[namespaces]]", "agent.toml:1:1: missing field `name`"),
            (
                "[[namespaces]]\nname = \"a\"\nmay = []",
                "agent.toml:3:1: unknown field `may`, expected one of `name`, `may-set`",
            ),
            ("[[namespaces]]\nname = \"\"", "agent.toml:2:8: name: \"\" matches no namespace"),
            ("[[namespaces]]\nname = \"a[\"", "agent.toml:2:8: name: \"a[\" is not a valid pattern"),
            (
                "[[namespaces]]\nname = \"a\"\nmay-set = [\"weight\", \"colour\"]",
                "agent.toml:3:22: may-set cannot contain \"colour\": memory-max, memory-low,",
            ),
            (
                "[[namespaces]]\nname = \"a\"\nweight-max = 0",
                "agent.toml:3:14: weight-max: weight cannot be 0: a number from 1 to 10000, or \"idle\" is allowed",
            ),
            ("[[namespaces]]\nname = \"a\"\nweight = true", "agent.toml:3:10: invalid type: boolean `true`"),
            (
                "[[namespaces]]\nname = \"a\"\npriority-max = 101",
                "agent.toml:3:16: priority-max: priority cannot be 101: a number from -100 to 100 is allowed",
            ),
            (
                "[[namespaces]]\nname = \"a\"\ntime-min-max = \"20%\"",
                "agent.toml:3:16: time-min-max has no effect: time-min is not in may-set",
            ),
            (
                "[[namespaces]]\nname = \"a\"\nmay-set = [\"time-min\"]\ntime-min-max = 20",
                "agent.toml:4:16: time-min-max: time-min and time-max cannot be 20: a percentage",
            ),
            (
                "[[namespaces]]\nname = \"*\"\n[[namespaces]]\nname = \"a\"",
                "agent.toml:4:8: name: \"a\" can never match, because the earlier \"*\" matches",
            ),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.starts_with(said), "{text:?}: {error}");
        }
    }
}
