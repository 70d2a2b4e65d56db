//! Rules that are set at run time (`nvsharectl set-rule`, D-Bus). Each rule has a name. These rules
//! are tried before the rules of files, the newest first.

use toml::Table;

use super::parse::read_one;
use super::rule::{Origin, Rule};

/// The origin that messages give for these rules.
const ORIGIN: &str = "set at run time";
/// Bounds on the number of rules and the length of names. A caller that may change settings must
/// not be able to exhaust the host's memory.
const MOST: usize = 256;
const LONGEST_NAME: usize = 64;

/// A change: sets the rule `name`, or removes it if `rule` is `None`. User and group names in the
/// rule have already been looked up.
#[derive(Debug, Clone, PartialEq)]
pub struct Addition {
    name: String,
    rule: Option<(Table, Rule)>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Added(Vec<(Table, Rule)>);

impl Addition {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn rule(&self) -> Option<&Rule> {
        self.rule.as_ref().map(|(_, rule)| rule)
    }

    /// Parses a change. Without keys, the change removes the rule. May block on a directory service
    /// that looks up users.
    ///
    /// # Errors
    /// Returns a sentence about the first mistake.
    pub fn read(name: &str, keys: &Table) -> Result<Self, String> {
        if name.is_empty() || name.len() > LONGEST_NAME || name.chars().any(char::is_control) {
            return Err(format!("the name of a rule must be one line of 1 to {LONGEST_NAME} bytes"));
        }
        if keys.contains_key("name") {
            return Err("the rule has more than one name".into());
        }
        let read = || {
            let mut table = keys.clone();
            table.insert("name".into(), name.into());
            let rule = read_one(&table.to_string(), Origin { file: ORIGIN.into(), line: 0 })?;
            Ok::<_, String>((table, rule))
        };
        let rule = (!keys.is_empty()).then(read).transpose()?;
        Ok(Self { name: name.into(), rule })
    }
}

impl Added {
    /// Sets a rule or removes it. A rule of the same name is replaced at its position.
    ///
    /// # Errors
    /// The rule to remove does not exist, or there are too many rules.
    pub fn set(&mut self, Addition { name, rule }: Addition) -> Result<(), String> {
        let Some(rule) = rule else {
            let before = self.0.len();
            self.0.retain(|(_, rule)| rule.name != name);
            let is_gone = self.0.len() < before;
            return is_gone.then_some(()).ok_or_else(|| format!("no rule {name:?} was set at run time"));
        };
        if let Some(place) = self.0.iter_mut().find(|(_, rule)| rule.name == name) {
            *place = rule;
        } else if self.0.len() < MOST {
            self.0.insert(0, rule);
        } else {
            return Err(format!("at most {MOST} rules can be set at run time"));
        }
        Ok(())
    }

    /// Reads the rules of a file that [`Self::text`] wrote. Also returns a sentence about each rule
    /// that is no longer valid.
    pub fn read(tables: Vec<Table>) -> (Self, Vec<String>) {
        let (mut all, mut wrong) = (Self::default(), Vec::new());
        for mut table in tables.into_iter().rev() {
            let name = table.remove("name");
            let name = name.as_ref().and_then(|name| name.as_str()).unwrap_or_default();
            if let Err(e) = Addition::read(name, &table).and_then(|addition| all.set(addition)) {
                wrong.push(format!("rule {name:?}: {e}"));
            }
        }
        (all, wrong)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(_, rule)| rule.name.as_str())
    }

    pub fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.0.iter().map(|(_, rule)| rule)
    }

    /// Returns the text of a file with these rules.
    pub fn text(&self) -> String {
        self.0.iter().map(|(table, _)| format!("\n[[rule]]\n{table}")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::rules::LIMIT_KEYS;

    fn table(text: &str) -> Table {
        text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    fn set(added: &mut Added, name: &str, keys: &str) -> Result<(), String> {
        Addition::read(name, &table(keys)).and_then(|addition| added.set(addition))
    }

    #[test]
    fn runtime_rules_round_trip_through_the_state_file() {
        let mut added = Added::default();
        set(&mut added, "one", "user = 5\nmemory-max = \"8G\"").expect("a rule");
        set(&mut added, "two", "unit = \"a.service\"\nweight = \"idle\"\ninteractive = true").expect("another");
        set(&mut added, "one", "user = 5\nweight = 7").expect("it again");
        assert_eq!(added.names().collect::<Vec<_>>(), ["two", "one"], "it keeps its place");
        #[derive(serde::Deserialize)]
        struct File {
            rule: Vec<Table>,
        }
        let text = added.text();
        let file: File = toml::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!(Added::read(file.rule), (added.clone(), Vec::new()));
        set(&mut added, "one", "").expect("it is there");
        assert_eq!(added.names().collect::<Vec<_>>(), ["two"]);
        assert_eq!(added.rules().next().map(Rule::to_string), Some("\"two\" (set at run time)".into()));
    }

    #[test]
    fn an_invalid_runtime_rule_is_rejected_and_changes_nothing() {
        let mut added = Added::default();
        set(&mut added, "one", "user = 5\nmemory-max = \"8G\"").expect("a rule");
        let before = added.clone();
        for (name, keys, expected) in [
            ("", "weight = 5", "the name of a rule must be one line of 1 to 64 bytes"),
            ("a\nb", "weight = 5", "the name of a rule must be one line of 1 to 64 bytes"),
            ("two", "", "no rule \"two\" was set at run time"),
            ("two", "user = 5", &*format!("the rule sets nothing: it needs at least one of {}", LIMIT_KEYS.join(", "))),
            ("two", "weight = 0", "weight cannot be 0: a number from 1 to 10000, or \"idle\" is allowed"),
            ("two", "name = \"x\"\nweight = 5", "the rule has more than one name"),
        ] {
            assert_eq!(set(&mut added, name, keys), Err(expected.to_owned()), "{name} {keys}");
        }
        assert_eq!(added, before);
        let (read, wrong) = Added::read(vec![table("name = \"x\"\nweight = -1"), table("name = \"y\"\nweight = 1")]);
        assert_eq!((read.names().collect::<Vec<_>>(), wrong.len()), (vec!["y"], 1));
    }
}
