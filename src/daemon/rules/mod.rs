//! Rules: what programs may have, by where they belong. The first rule that matches a program counts.
//!
//! - `parse`: `[[rule]]` of the configuration, and what can be wrong with it.
//! - `amounts`: what the values of a rule can be.
//! - `matching`: which rule a program has, and who counts with it.

mod amounts;
mod matching;
mod parse;

use std::fmt;
use std::path::PathBuf;

pub use matching::Instance;
pub use parse::RawRule;
pub(super) use parse::read;

use crate::scheduler::{MemoryMax, Share};

/// Where a rule is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    pub file: PathBuf,
    pub line: usize,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.line)
    }
}

/// What a program must be, all of it, and what it then may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    pub origin: Origin,
    /// For people; may be empty.
    pub name: String,
    pub subject: Subject,
    pub memory_max: MemoryMax,
    /// None: it says nothing of time.
    pub share: Option<Share>,
}

impl fmt::Display for Rule {
    /// `"students" (/etc/nvshare/nvshare.toml:12)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.name {
            "" => write!(f, "{}", self.origin),
            name => write!(f, "\"{name}\" ({})", self.origin),
        }
    }
}

/// Whom a rule is about: everybody, where it names nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Subject {
    pub unit: Option<Glob>,
    pub slice: Option<Glob>,
    pub container: Option<Glob>,
    pub user: Option<u32>,
    pub group: Option<u32>,
}

/// A pattern of a name, or of a whole path where there is a `/` in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob(glob::Pattern);

/// All rules, in the order in which they are tried.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules(Vec<Rule>);

impl Rules {
    pub fn get(&self, at: usize) -> Option<&Rule> {
        self.0.get(at)
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
        }
        Ok(Self(all))
    }
}

impl Subject {
    /// Whether whom the other is about is surely one of these: all that this names the other names as well.
    fn covers(&self, other: &Self) -> bool {
        fn same<T: PartialEq>(mine: &Option<T>, theirs: &Option<T>) -> bool {
            mine.is_none() || mine == theirs
        }
        same(&self.unit, &other.unit)
            && same(&self.slice, &other.slice)
            && same(&self.container, &other.container)
            && same(&self.user, &other.user)
            && same(&self.group, &other.group)
    }
}
