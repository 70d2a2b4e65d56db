//! Rules: what programs may have, by where they belong. The first rule that matches a program counts.
//!
//! - `parse`: `[[rule]]` of the configuration, and what can be wrong with it.
//! - `added`: rules that were set while the daemon runs.
//! - `amounts`: what the values of a rule can be.
//! - `gpus`: how people name GPUs.
//! - `patterns`: of names and paths.
//! - `matching`: which rule a program has, and who counts with it.
//! - `own`: what programs say of themselves, by their environment.
//! - `places`: on which GPUs programs may be, and beside whom.

mod added;
mod amounts;
mod gpus;
mod matching;
mod own;
mod parse;
mod patterns;
mod places;

use std::fmt;
use std::path::PathBuf;

use amounts::Order;

pub use added::{Added, Addition};
pub use gpus::GpuName;
pub use matching::Instance;
pub use own::Own;
pub use parse::{RawRule, read, read_one};
pub use places::Whereabouts;

use crate::scheduler::{Amount, OnMemoryFull, Terms, WaitOrder};

/// The keys of a rule that say whom it is about, as people expect them.
pub const SUBJECT_KEYS: [&str; 7] = ["name", "unit", "slice", "container", "pod", "user", "group"];

/// Those that say what they may have.
pub const TERM_KEYS: [&str; 15] = [
    "memory-max",
    "memory-low",
    "swap-max",
    "on-memory-full",
    "wait-order",
    "weight",
    "time-min",
    "time-max",
    "priority",
    "interactive",
    "gang",
    "allowed-gpus",
    "affinity",
    "anti-affinity",
    "exclusion",
];

/// Where a rule is written; without a line where it is not in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    pub file: PathBuf,
    pub line: usize,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}", self.file.display()),
            line => write!(f, "{}:{line}", self.file.display()),
        }
    }
}

/// What a program must be, all of it, and what it then may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    pub origin: Origin,
    /// For people; may be empty.
    pub name: String,
    pub subject: Subject,
    pub terms: Terms,
    pub places: Whereabouts,
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

impl Rule {
    /// As it could be written.
    pub fn to_table(&self) -> toml::Table {
        let Subject { unit, slice, container, pod, user, group } = &self.subject;
        let glob = |glob: &Option<Glob>| Some(toml::Value::from(glob.as_ref()?.0.as_str()));
        let id = |id: &Option<u32>| Some(toml::Value::from(i64::from((*id)?)));
        let Terms { memory_max, memory_low, swap_max, on_memory_full, share: says, gang } = self.terms;
        let amount = |amount: Amount| match amount {
            Amount::Infinity => "infinity".into(),
            Amount::Bytes(bytes) => i64::try_from(bytes).unwrap_or(i64::MAX).into(),
            Amount::Percent(percent) => toml::Value::from(format!("{percent}%")),
        };
        let (waits, order) = match on_memory_full {
            OnMemoryFull::Fail => (None, None),
            OnMemoryFull::Wait(order) => {
                let order = (order != WaitOrder::default()).then(|| Order::name(order).into());
                (Some("wait".into()), order)
            }
        };
        let is_empty = self.terms == Terms::default() && self.places == Whereabouts::default();
        let memory_max = (memory_max != Amount::Infinity || is_empty).then(|| amount(memory_max));
        let share = says.unwrap_or_default();
        let weight = if share.weight == 0 { "idle".into() } else { i64::from(share.weight).into() };
        let pairs = [
            ("name", (!self.name.is_empty()).then(|| self.name.as_str().into())),
            ("unit", glob(unit)),
            ("slice", glob(slice)),
            ("container", glob(container)),
            ("pod", glob(pod)),
            ("user", id(user)),
            ("group", id(group)),
            ("memory-max", memory_max),
            ("memory-low", memory_low.map(amount)),
            ("swap-max", swap_max.map(|bytes| amount(Amount::Bytes(bytes)))),
            ("on-memory-full", waits),
            ("wait-order", order),
            ("weight", says.map(|_| weight)),
            ("time-min", (share.min > 0).then(|| format!("{}%", share.min).into())),
            ("time-max", (share.max < 100).then(|| format!("{}%", share.max).into())),
            ("priority", (share.priority != 0).then(|| i64::from(share.priority).into())),
            ("interactive", share.interactive.then(|| true.into())),
            ("gang", gang.then(|| true.into())),
        ];
        pairs.into_iter().chain(self.places.pairs()).filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
    }
}

/// Whom a rule is about: everybody, where it names nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Subject {
    pub unit: Option<Glob>,
    pub slice: Option<Glob>,
    pub container: Option<Glob>,
    /// Of its namespace and name, or without a `/` of its UID.
    pub pod: Option<Glob>,
    pub user: Option<u32>,
    pub group: Option<u32>,
}

/// A pattern of a name, or of a whole path where there is a `/` in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob(glob::Pattern);

/// All rules, in the order in which they are tried: those that were set at run time, then those of files, then what pods
/// wish for themselves.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    added: Vec<Rule>,
    written: Vec<Rule>,
    wished: Vec<Rule>,
}

impl Rules {
    pub fn all(&self) -> impl Iterator<Item = &Rule> {
        self.added.iter().chain(&self.written).chain(&self.wished)
    }

    pub fn get(&self, at: usize) -> Option<&Rule> {
        self.all().nth(at)
    }

    /// From now on these come before those of files.
    pub fn put_first(&mut self, added: &Added) {
        self.added = added.rules().cloned().collect();
    }

    /// From now on these come after all others: an administrator's word goes before a pod's own.
    pub fn put_last(&mut self, wished: Vec<Rule>) {
        self.wished = wished;
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
        Ok(Self { added: Vec::new(), written: all, wished: Vec::new() })
    }

    /// Why a rule cannot be set at run time, in the place of one of that name, if it cannot.
    pub fn contradicted(&self, rule: &Rule) -> Option<String> {
        let added = self.added.iter().filter(|other| other.name != rule.name);
        added.chain(&self.written).find_map(|other| rule.contradicts(other))
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
            && same(&self.pod, &other.pod)
            && same(&self.user, &other.user)
            && same(&self.group, &other.group)
    }
}
