//! One rule: the programs that it matches, and their limits.

use std::fmt;
use std::path::PathBuf;

use super::gpu_hours::GpuHours;
use super::gpu_names::GpuName;
use super::places::Whereabouts;
use super::values::idle_time;
use crate::scheduler::{Amount, OnMemoryFull, RuleLimits, Share};

/// The keys of a rule that select programs, in their usual order.
pub const SUBJECT_KEYS: [&str; 8] = ["name", "unit", "slice", "container", "pod", "claim", "user", "group"];

/// The keys of a rule that set limits and shares.
pub const LIMIT_KEYS: [&str; 18] = [
    "memory-max",
    "memory-low",
    "swap-max",
    "on-memory-full",
    "managed-beyond-gpu",
    "sleep-after",
    "weight",
    "time-min",
    "time-max",
    "gpu-hours",
    "priority",
    "interactive",
    "gang",
    "fabric-handles",
    "allowed-gpus",
    "affinity",
    "anti-affinity",
    "exclusion",
];

/// The file and line of a rule. The line is 0 if the rule comes from no file.
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

/// A rule applies its limits to a program if all of its conditions hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    pub origin: Origin,
    /// A name for messages; may be empty.
    pub name: String,
    pub subject: Subject,
    pub limits: RuleLimits,
    pub gpu_hours: Option<GpuHours>,
    /// The programs may use FABRIC handles of memory, which then stays on the GPU.
    pub fabric_handles: bool,
    pub places: Whereabouts,
}

impl fmt::Display for Rule {
    /// Formats the rule's name and origin: `"students" (/etc/nvshare/nvshare.toml:12)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.name {
            "" => write!(f, "{}", self.origin),
            name => write!(f, "\"{name}\" ({})", self.origin),
        }
    }
}

impl Rule {
    /// Returns the rule in the syntax of the configuration.
    pub fn to_table(&self) -> toml::Table {
        let Subject { unit, slice, container, pod, claim, user, group } = &self.subject;
        let glob = |glob: &Option<Glob>| Some(toml::Value::from(glob.as_ref()?.0.as_str()));
        let id = |id: &Option<u32>| Some(toml::Value::from(i64::from((*id)?)));
        let RuleLimits {
            memory_max,
            memory_low,
            swap_max,
            on_memory_full,
            sleep_after,
            share: says,
            gang,
            managed_beyond_gpu,
        } = self.limits;
        let amount = |amount: Amount| match amount {
            Amount::Infinity => "infinity".into(),
            Amount::Bytes(bytes) => i64::try_from(bytes).unwrap_or(i64::MAX).into(),
            Amount::Percent(percent) => toml::Value::from(format!("{percent}%")),
        };
        let is_empty = self.limits == RuleLimits::default()
            && self.gpu_hours.is_none()
            && !self.fabric_handles
            && self.places == Whereabouts::default();
        let memory_max = (memory_max != Amount::Infinity || is_empty).then(|| amount(memory_max));
        let Share { weight, min, max, priority, interactive } = says.unwrap_or_default();
        let weight = if weight == 0 { "idle".into() } else { i64::from(weight).into() };
        let pairs = [
            ("name", (!self.name.is_empty()).then(|| self.name.as_str().into())),
            ("unit", glob(unit)),
            ("slice", glob(slice)),
            ("container", glob(container)),
            ("pod", glob(pod)),
            ("claim", glob(claim)),
            ("user", id(user)),
            ("group", id(group)),
            ("memory-max", memory_max),
            ("memory-low", memory_low.map(amount)),
            ("swap-max", swap_max.map(|bytes| amount(Amount::Bytes(bytes)))),
            ("on-memory-full", (on_memory_full == OnMemoryFull::Wait).then(|| "wait".into())),
            ("managed-beyond-gpu", managed_beyond_gpu.then(|| true.into())),
            ("sleep-after", sleep_after.map(|after| idle_time(after).into())),
            ("weight", says.map(|_| weight)),
            ("time-min", (min > 0).then(|| format!("{min}%").into())),
            ("time-max", (max < 100).then(|| format!("{max}%").into())),
            ("gpu-hours", self.gpu_hours.map(|hours| hours.to_string().into())),
            ("priority", (priority != 0).then(|| i64::from(priority).into())),
            ("interactive", interactive.then(|| true.into())),
            ("gang", gang.then(|| true.into())),
            ("fabric-handles", self.fabric_handles.then(|| true.into())),
        ];
        pairs.into_iter().chain(self.places.pairs()).filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
    }
}

impl Rule {
    /// Returns the limits of programs that have used their `gpu-hours`. These programs run only
    /// while no other program wants the GPU.
    pub fn limits_when_used_up(&self) -> RuleLimits {
        let share = self.limits.share.unwrap_or_default();
        let share = Share { weight: 0, min: 0, priority: share.priority.min(0), interactive: false, ..share };
        RuleLimits { share: Some(share), ..self.limits }
    }
}

/// The conditions of a rule. A rule without conditions applies to every program.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Subject {
    pub unit: Option<Glob>,
    pub slice: Option<Glob>,
    pub container: Option<Glob>,
    /// A pattern of the pod's namespace and name. A pattern without a `/` matches the pod's UID
    /// instead.
    pub pod: Option<Glob>,
    /// A pattern of a ResourceClaim, with the same syntax as `pod`.
    pub claim: Option<Glob>,
    pub user: Option<u32>,
    pub group: Option<u32>,
}

/// A pattern of a name. A pattern that contains a `/` matches a whole path instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Glob(pub(super) glob::Pattern);

impl Subject {
    /// Returns true if every program that matches `other` also matches `self`, that is, if `other`
    /// contains all conditions of `self`.
    pub(super) fn covers(&self, other: &Self) -> bool {
        fn same<T: PartialEq>(mine: &Option<T>, theirs: &Option<T>) -> bool {
            mine.is_none() || mine == theirs
        }
        same(&self.unit, &other.unit)
            && same(&self.slice, &other.slice)
            && same(&self.container, &other.container)
            && same(&self.pod, &other.pod)
            && same(&self.claim, &other.claim)
            && same(&self.user, &other.user)
            && same(&self.group, &other.group)
    }
}

impl Rule {
    /// Returns the reason why programs of this rule can never share a GPU with programs of `other`,
    /// although both rules have the same `affinity`.
    pub fn contradicts(&self, other: &Self) -> Option<String> {
        let (mine, theirs) = (&self.places, &other.places);
        let label = mine.labels.affinity.as_ref().filter(|label| theirs.labels.affinity.as_ref() == Some(label))?;
        let apart = |one: &[GpuName], other: &[GpuName]| !one.iter().any(|a| other.iter().any(|b| a.may_be(b)));
        let has = format!("affinity {label:?}: rule {other} has the same affinity, but");
        match (&mine.allowed, &theirs.allowed) {
            (Some(one), Some(other)) if apart(one, other) => {
                Some(format!("{has} allows none of the GPUs that this rule allows"))
            }
            _ if mine.labels.exclusion != theirs.labels.exclusion => Some(format!("{has} a different exclusion")),
            _ => None,
        }
    }
}
