//! All rules, in the order in which they are tried.

use std::sync::Arc;

use super::rule::{Origin, Rule, Subject};
use super::runtime::Added;

/// All rules, in the order in which they are tried: rules set at run time, then rules of files, of
/// claims and of pods. Clones share the rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    added: Arc<[Rule]>,
    written: Arc<[Rule]>,
    claimed: Arc<[Rule]>,
    wished: Arc<[Rule]>,
}

impl Rules {
    pub fn all(&self) -> impl Iterator<Item = &Rule> {
        self.added.iter().chain(&*self.written).chain(&*self.claimed).chain(&*self.wished)
    }

    pub fn get(&self, at: usize) -> Option<&Rule> {
        self.all().nth(at)
    }

    /// Replaces the rules set at run time, which are tried before the rules of files.
    pub fn put_first(&mut self, added: &Added) {
        self.added = added.rules().cloned().collect();
    }

    /// Replaces the rules of claims and of pods, which are tried last. An administrator's rules
    /// take precedence over both. The allocation of a claim takes precedence over a pod's own
    /// requests.
    pub fn put_last(&mut self, claimed: Vec<Rule>, wished: Vec<Rule>) {
        (self.claimed, self.wished) = (claimed.into(), wished.into());
    }

    /// Creates the list from the rules of files.
    ///
    /// # Errors
    /// If a rule can never match or contradicts another rule, returns the rule's origin and a
    /// sentence about the mistake.
    pub fn new(all: Vec<Rule>) -> Result<Self, (Origin, String)> {
        for (at, rule) in all.iter().enumerate() {
            let before = all.iter().take(at).find(|other| other.subject.covers(&rule.subject));
            if let Some(other) = before {
                let what = if other.subject == Subject::default() {
                    "matches every program"
                } else {
                    "matches the same programs"
                };
                let text = format!("this rule can never match: the earlier rule {other} {what}");
                return Err((rule.origin.clone(), text));
            }
            let mut before = all.iter().take(at);
            if let Some(text) = before.find_map(|other| rule.contradicts(other)) {
                return Err((rule.origin.clone(), text));
            }
        }
        Ok(Self { written: all.into(), ..Self::default() })
    }

    /// Returns the reason why a rule cannot be set at run time. An existing run-time rule with the
    /// same name is not checked, because `rule` replaces it.
    pub fn contradicted(&self, rule: &Rule) -> Option<String> {
        let added = self.added.iter().filter(|other| other.name != rule.name);
        added.chain(&*self.written).find_map(|other| rule.contradicts(other))
    }
}
