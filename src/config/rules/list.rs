//! All rules, in the order in which they are tried.

use std::sync::Arc;

use super::rule::{Origin, Rule, Subject};
use super::runtime::Added;

/// All rules, in the order in which they are tried: those set at run time, those of files, those of claims, those of pods.
/// A copy shares them.
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

    /// From now on these come before those of files.
    pub fn put_first(&mut self, added: &Added) {
        self.added = added.rules().cloned().collect();
    }

    /// Replaces the rules of claims and of pods, which come last: an administrator's rules take precedence, and what a claim was
    /// allocated over what a pod asks for by itself.
    pub fn put_last(&mut self, claimed: Vec<Rule>, wished: Vec<Rule>) {
        (self.claimed, self.wished) = (claimed.into(), wished.into());
    }

    /// Those rules come first, then the others. A rule that can never match is an error, as its place and a sentence.
    pub fn new(all: Vec<Rule>) -> Result<Self, (Origin, String)> {
        for (at, rule) in all.iter().enumerate() {
            let before = all.iter().take(at).find(|other| other.subject.covers(&rule.subject));
            if let Some(other) = before {
                let what = if other.subject == Subject::default() { "matches everybody" } else { "names the same" };
                let text = format!("this rule can never match: rule {other} comes before it and {what}");
                return Err((rule.origin.clone(), text));
            }
            let mut before = all.iter().take(at);
            if let Some(text) = before.find_map(|other| rule.contradicts(other)) {
                return Err((rule.origin.clone(), text));
            }
        }
        Ok(Self { written: all.into(), ..Self::default() })
    }

    /// Why a rule cannot be set at run time, in the place of one of that name, if it cannot.
    pub fn contradicted(&self, rule: &Rule) -> Option<String> {
        let added = self.added.iter().filter(|other| other.name != rule.name);
        added.chain(&*self.written).find_map(|other| rule.contradicts(other))
    }
}
