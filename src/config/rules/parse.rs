//! Parses and checks `[[rule]]`. An error contains the position of the mistake and the allowed
//! values.

use std::ops::Range;
use std::path::Path;

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use toml::Spanned;

use super::gpu_hours::GpuHours;
use super::gpu_names::GpuNames;
use super::patterns::{contradiction, pattern};
use super::places::{self, Whereabouts};
use super::rule::{LIMIT_KEYS, Origin, Rule, Subject};
use super::values::{IdleTime, MemoryLow, MemoryMax, OnFull, Percent, Priority, SwapMax, Weight};
use crate::scheduler::{Amount, Labels, OnMemoryFull, RuleLimits, Share};

/// A rule in a file.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct RawRule {
    name: Option<String>,
    unit: Option<Spanned<String>>,
    slice: Option<Spanned<String>>,
    container: Option<Spanned<String>>,
    pod: Option<Spanned<String>>,
    claim: Option<Spanned<String>>,
    #[serde(default)]
    user: Option<Spanned<Account>>,
    #[serde(default)]
    group: Option<Spanned<Account>>,
    memory_max: Option<MemoryMax>,
    memory_low: Option<Spanned<MemoryLow>>,
    swap_max: Option<SwapMax>,
    on_memory_full: Option<OnFull>,
    managed_beyond_gpu: Option<bool>,
    sleep_after: Option<IdleTime>,
    weight: Option<Weight>,
    time_min: Option<Spanned<Percent>>,
    time_max: Option<Spanned<Percent>>,
    gpu_hours: Option<Spanned<GpuHours>>,
    priority: Option<Priority>,
    interactive: Option<bool>,
    gang: Option<bool>,
    fabric_handles: Option<bool>,
    allowed_gpus: Option<GpuNames>,
    affinity: Option<Spanned<String>>,
    anti_affinity: Option<Spanned<String>>,
    exclusion: Option<Spanned<String>>,
}

/// A user or a group: a name or a number.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Account {
    Name(String),
    Number(u32),
}

/// The treatment of a rule that names an unknown account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unknown {
    /// The rule is an error.
    Mistake,
    /// The rule matches no program.
    Nobody,
}

/// An ID that no user or group can have, because system calls interpret it as "unchanged".
const NOBODY: u32 = u32::MAX;

/// The position and the description of a mistake.
pub type Mistake = (Range<usize>, String);

/// Checks the rules of one file. `line_of` returns the line number of a byte in the file.
pub fn read(
    raw: Vec<Spanned<RawRule>>,
    file: &Path,
    unknown: Unknown,
    line_of: impl Fn(usize) -> usize,
) -> Result<Vec<Rule>, Mistake> {
    let rule = |raw: Spanned<RawRule>| {
        let span = raw.span();
        let origin = Origin { file: file.into(), line: line_of(span.start) };
        raw.into_inner().check(span, origin, unknown)
    };
    raw.into_iter().map(rule).collect()
}

/// Parses the keys of a rule that comes from no file.
///
/// # Errors
/// Returns a sentence about the first mistake.
pub fn read_one(text: &str, origin: Origin) -> Result<Rule, String> {
    let raw: RawRule = toml::from_str(text).map_err(|e| e.message().to_owned())?;
    raw.check(0..0, origin, Unknown::Mistake).map_err(|(_, reason)| reason)
}

impl RawRule {
    fn check(self, span: Range<usize>, origin: Origin, unknown: Unknown) -> Result<Rule, Mistake> {
        let (memory, share, places) = (self.memory()?, self.share()?, self.places()?);
        let unit = self.unit.map(|text| pattern("unit", text)).transpose()?;
        let slice = self.slice.map(|text| pattern("slice", text)).transpose()?;
        contradiction(unit.as_ref(), slice.as_ref())?;
        let subject = Subject {
            unit: unit.map(|(glob, _)| glob),
            slice: slice.map(|(glob, _)| glob),
            container: self.container.map(|text| pattern("container", text)).transpose()?.map(|(glob, _)| glob),
            pod: self.pod.map(|text| pattern("pod", text)).transpose()?.map(|(glob, _)| glob),
            claim: self.claim.map(|text| pattern("claim", text)).transpose()?.map(|(glob, _)| glob),
            user: self.user.map(|user| account("user", user, unknown, user_id)).transpose()?,
            group: self.group.map(|group| account("group", group, unknown, group_id)).transpose()?,
        };
        let has_flag = self.gang.or(self.fabric_handles).or(self.managed_beyond_gpu).is_some();
        let is_empty = memory.is_none() && share.is_none() && !has_flag && self.sleep_after.is_none();
        if is_empty && self.gpu_hours.is_none() && places == Whereabouts::default() {
            return Err((span, format!("the rule sets nothing: it needs at least one of {}", LIMIT_KEYS.join(", "))));
        }
        let name = self.name.unwrap_or_default();
        if name.chars().any(char::is_control) {
            return Err((span, "the name of a rule cannot contain line breaks or other control characters".into()));
        }
        if let Some(hours) = self.gpu_hours.as_ref().filter(|_| share.is_some_and(|share| share.weight == 0)) {
            return Err((hours.span(), "gpu-hours changes nothing with weight = \"idle\"".into()));
        }
        let gpu_hours = self.gpu_hours.map(Spanned::into_inner);
        let sleep_after = self.sleep_after.map(|after| after.0);
        let limits = RuleLimits {
            sleep_after,
            share,
            gang: self.gang.unwrap_or(false),
            managed_beyond_gpu: self.managed_beyond_gpu.unwrap_or(false),
            ..memory.unwrap_or_default()
        };
        let fabric_handles = self.fabric_handles.unwrap_or(false);
        Ok(Rule { origin, name, subject, limits, gpu_hours, fabric_handles, places })
    }

    /// Returns the rule's settings for placement.
    fn places(&self) -> Result<Whereabouts, Mistake> {
        let label = |key, label: &Option<Spanned<String>>| {
            let Some(label) = label else { return Ok(None) };
            places::label(key, label.as_ref()).map(Some).map_err(|text| (label.span(), text))
        };
        let labels = Labels {
            affinity: label("affinity", &self.affinity)?,
            anti_affinity: label("anti-affinity", &self.anti_affinity)?,
            exclusion: label("exclusion", &self.exclusion)?,
        };
        if let Some(both) = self.anti_affinity.as_ref().filter(|_| labels.affinity == labels.anti_affinity) {
            let text = format!("anti-affinity cannot be {:?}, which is the rule's own affinity", both.as_ref());
            return Err((both.span(), text));
        }
        Ok(Whereabouts { allowed: self.allowed_gpus.as_ref().map(|names| names.0.clone()), labels })
    }

    /// Returns the rule's memory limits, if the rule sets any.
    fn memory(&self) -> Result<Option<RuleLimits>, Mistake> {
        let low = self.memory_low.as_ref().map(|low| low.as_ref().0);
        let on_memory_full = match self.on_memory_full {
            Some(OnFull::Wait) => OnMemoryFull::Wait,
            Some(OnFull::Fail) | None => OnMemoryFull::Fail,
        };
        let says = self.memory_max.is_some() || low.is_some() || self.swap_max.is_some();
        if !says && self.on_memory_full.is_none() {
            return Ok(None);
        }
        let memory_max = self.memory_max.map_or(Amount::Infinity, |max| max.0);
        // A percentage of a GPU can be compared with a size only for a known GPU.
        let is_more = match (low, memory_max) {
            (Some(Amount::Bytes(low)), Amount::Bytes(max)) => low > max,
            (Some(Amount::Percent(low)), Amount::Percent(max)) => low > max,
            _ => false,
        };
        if let Some(low) = self.memory_low.as_ref().filter(|_| is_more) {
            return Err((low.span(), "memory-low cannot exceed memory-max".into()));
        }
        let swap_max = self.swap_max.and_then(|max| max.0);
        Ok(Some(RuleLimits { memory_max, memory_low: low, swap_max, on_memory_full, ..RuleLimits::default() }))
    }

    /// Returns the rule's share of GPU time, if the rule sets one.
    fn share(&self) -> Result<Option<Share>, Mistake> {
        let percent = |given: &Option<Spanned<Percent>>| given.as_ref().map(|percent| percent.as_ref().0);
        let (min, max) = (percent(&self.time_min), percent(&self.time_max));
        let says = self.weight.is_some() || min.is_some() || max.is_some() || self.priority.is_some();
        if !says && self.interactive.is_none() {
            return Ok(None);
        }
        let default = Share::default();
        let share = Share {
            weight: self.weight.map_or(default.weight, |weight| weight.0),
            min: min.unwrap_or(default.min),
            max: max.unwrap_or(default.max),
            priority: self.priority.map_or(default.priority, |priority| priority.0),
            interactive: self.interactive.unwrap_or(default.interactive),
        };
        match (&self.time_min, share.weight) {
            (Some(least), _) if share.min > share.max => {
                let text = format!("time-min cannot be {}%: time-max is {}%", share.min, share.max);
                Err((least.span(), text))
            }
            (Some(least), 0) => Err((least.span(), "time-min cannot be combined with weight = \"idle\"".into())),
            _ => Ok(Some(share)),
        }
    }
}

fn account(
    what: &str,
    given: Spanned<Account>,
    unknown: Unknown,
    find: impl Fn(&str) -> Result<Option<u32>, String>,
) -> Result<u32, Mistake> {
    let span = given.span();
    match given.into_inner() {
        Account::Number(id) => Ok(id),
        Account::Name(name) => match find(&name) {
            Ok(Some(id)) => Ok(id),
            _ if unknown == Unknown::Nobody => Ok(NOBODY),
            Ok(None) => Err((span, format!("{what}: this host has no {what} {name:?}. Write a name or a number"))),
            Err(e) => Err((span, format!("{what}: cannot look up {name:?}: {e}"))),
        },
    }
}

fn user_id(name: &str) -> Result<Option<u32>, String> {
    nix::unistd::User::from_name(name).map(|user| user.map(|user| user.uid.as_raw())).map_err(|e| e.to_string())
}

fn group_id(name: &str) -> Result<Option<u32>, String> {
    nix::unistd::Group::from_name(name).map(|group| group.map(|group| group.gid.as_raw())).map_err(|e| e.to_string())
}

impl Account {
    const ALLOWED: &'static str = "the name or the number of a user or group";
}

impl<'de> Deserialize<'de> for Account {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(AccountVisitor)
    }
}

struct AccountVisitor;

impl Visitor<'_> for AccountVisitor {
    type Value = Account;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(Account::ALLOWED)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Account, E> {
        // System calls use the highest ID for "none", so no account can have it.
        let id = u32::try_from(value).ok().filter(|id| *id != u32::MAX);
        id.map(Account::Number).ok_or_else(|| E::custom(format!("{value} cannot be {}", Account::ALLOWED)))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Account, E> {
        match value.parse() {
            Ok(number) => self.visit_i64(number),
            Err(_) => Ok(Account::Name(value.to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::patterns::PATTERNS;
    use super::*;
    use crate::config::Config;
    use crate::config::rules::Rules;
    use crate::config::rules::SUBJECT_KEYS;

    fn rules(text: &str) -> Rules {
        Config::parse(text, Path::new("nvshare.toml")).unwrap_or_else(|e| panic!("{text}: {e}")).rules
    }

    #[test]
    fn a_rule_has_subjects_and_limits() {
        let text = "log-level = \"info\"\n[[rule]]\nname = \"students\"\nunit = \"jupyter-*.service\"\nslice = \"lab.slice\"\n\
                    container = \"*\"\nuser = \"root\"\ngroup = 7\nmemory-max = \"8G\"\n\n[[rule]]\nmemory-max = \"50%\"\n";
        let rules = rules(text);
        let rule = rules.get(0).expect("a rule");
        assert_eq!(rule.to_string(), "\"students\" (nvshare.toml:2)");
        assert_eq!(
            (rule.subject.user, rule.subject.group, rule.limits.memory_max),
            (Some(0), Some(7), Amount::Bytes(8 << 30))
        );
        let all = rules.get(1).expect("another");
        assert_eq!(all.to_string(), "nvshare.toml:11");
        assert_eq!((&all.subject, all.limits.memory_max), (&Subject::default(), Amount::Percent(50)));
        assert_eq!(rules.get(2), None);
    }

    #[test]
    fn a_rule_round_trips_through_toml() {
        for text in [
            "name = \"a\"\nunit = \"a-*.service\"\nslice = \"b.slice\"\ncontainer = \"*\"\nuser = 5\ngroup = 6\nmemory-max = \"8G\"",
            "memory-max = \"50%\"\nweight = \"idle\"\npriority = -3\ninteractive = true\ntime-max = \"80%\"",
            "memory-max = \"infinity\"",
            "pod = \"team-a/*\"\nclaim = \"team-a/half-*\"\nweight = 5",
            "weight = 100",
            "memory-low = \"25%\"\nswap-max = \"8G\"\non-memory-full = \"wait\"",
            "on-memory-full = \"fail\"",
            "sleep-after = \"90s\"",
            "sleep-after = \"never\"",
            "time-min = \"20%\"",
            "gpu-hours = \"20h/week\"",
            "weight = 50\ngpu-hours = \"90min / day\"",
            "gpu-hours = \"90061s/month\"",
            "gang = true",
            "allowed-gpus = [\"GPU-8a6c\", 0, \"MIG-1\"]",
            "affinity = \"a\"\nanti-affinity = \"b\"\nexclusion = \"c\"",
        ] {
            let origin = Origin { file: "x".into(), line: 0 };
            let rule = read_one(text, origin.clone()).unwrap_or_else(|e| panic!("{text}: {e}"));
            let written = rule.to_table().to_string();
            assert_eq!(read_one(&written, origin), Ok(rule), "{text}: {written}");
        }
    }

    #[test]
    fn an_amount_is_a_size_a_percentage_or_infinity() {
        for (text, expected) in [
            ("8589934592", Amount::Bytes(8 << 30)),
            ("\"1.5G\"", Amount::Bytes(3 << 29)),
            ("\"2M\"", Amount::Bytes(2 << 20)),
            ("\"1%\"", Amount::Percent(1)),
            ("\"100 %\"", Amount::Percent(100)),
            ("\"infinity\"", Amount::Infinity),
        ] {
            let rules = rules(&format!("[[rule]]\nmemory-max = {text}"));
            assert_eq!(rules.get(0).map(|rule| rule.limits.memory_max), Some(expected), "{text}");
        }
    }

    #[test]
    fn a_rules_keys_determine_the_share_of_time() {
        let default = Share::default();
        for (text, expected) in [
            ("memory-max = \"1G\"", None),
            ("weight = 100", Some(default)),
            ("weight = \"idle\"", Some(Share { weight: 0, ..default })),
            ("weight = 10000\npriority = -100", Some(Share { weight: 10_000, priority: -100, ..default })),
            ("time-min = \"20%\"\ntime-max = \"20 %\"", Some(Share { min: 20, max: 20, ..default })),
            ("interactive = true", Some(Share { interactive: true, ..default })),
            ("interactive = false", Some(default)),
        ] {
            let rules = rules(&format!("[[rule]]\n{text}"));
            assert_eq!(rules.get(0).map(|rule| rule.limits.share), Some(expected), "{text}");
        }
        assert_eq!(rules("[[rule]]\nweight = 5").get(0).map(|rule| rule.limits.memory_max), Some(Amount::Infinity));
    }

    /// Each case follows a line `[[rule]]`, so line 2 is the first line of the case.
    #[test]
    fn errors_name_the_line_and_the_allowed_values() {
        let gpus =
            "the UUID of a GPU or MIG slice as nvidia-smi -L prints it, the start of a UUID, or the number of a GPU";
        let amounts = "a size from 2M to 1T like \"8G\", a percentage from 1% to 100%, or \"infinity\" is allowed";
        let cases = [
            ("memory-max = \"lots\"", format!("2:14: memory-max cannot be \"lots\": {amounts}")),
            ("memory-max = \"0%\"", format!("2:14: memory-max cannot be \"0%\": {amounts}")),
            ("memory-max = \"101%\"", format!("2:14: memory-max cannot be \"101%\": {amounts}")),
            ("memory-max = 8", format!("2:14: memory-max cannot be 8: {amounts}")),
            ("memory-max = \"2T\"", format!("2:14: memory-max cannot be \"2T\": {amounts}")),
            (
                "memory-max = true",
                "2:14: invalid type: boolean `true`, expected a size from 2M to 1T like \"8G\", a percentage from 1% to 100%, \
                 or \"infinity\" for memory-max"
                    .to_owned(),
            ),
            (
                "user = \"root\"",
                format!("1:1: the rule sets nothing: it needs at least one of {}", LIMIT_KEYS.join(", ")),
            ),
            (
                "weight = 0",
                "2:10: weight cannot be 0: a number from 1 to 10000, or \"idle\" is allowed".to_owned(),
            ),
            (
                "weight = \"heavy\"",
                "2:10: weight cannot be \"heavy\": a number from 1 to 10000, or \"idle\" is allowed".to_owned(),
            ),
            (
                "time-max = 20",
                "2:12: time-min and time-max cannot be 20: a percentage from \"1%\" to \"100%\" is allowed".to_owned(),
            ),
            (
                "time-min = \"0%\"",
                "2:12: time-min and time-max cannot be \"0%\": a percentage from \"1%\" to \"100%\" is allowed"
                    .to_owned(),
            ),
            ("time-max = \"20%\"\ntime-min = \"30%\"", "3:12: time-min cannot be 30%: time-max is 20%".to_owned()),
            (
                "weight = \"idle\"\ntime-min = \"30%\"",
                "3:12: time-min cannot be combined with weight = \"idle\"".to_owned(),
            ),
            (
                "gpu-hours = \"20h\"",
                "2:13: gpu-hours cannot be \"20h\": a time in whole seconds per \"day\", \"week\" or \"month\" is allowed, like \"20h/week\""
                    .to_owned(),
            ),
            (
                "gpu-hours = \"0h/week\"",
                "2:13: gpu-hours cannot be \"0h/week\": a time in whole seconds per \"day\", \"week\" or \"month\" is allowed, like \"20h/week\""
                    .to_owned(),
            ),
            (
                "gpu-hours = \"20h/week\"\nweight = \"idle\"",
                "2:13: gpu-hours changes nothing with weight = \"idle\"".to_owned(),
            ),
            (
                "priority = 200",
                "2:12: priority cannot be 200: a number from -100 to 100 is allowed".to_owned(),
            ),
            (
                "interactive = \"yes\"",
                "2:15: invalid type: string \"yes\", expected a boolean".to_owned(),
            ),
            (
                "memory-high = \"1G\"",
                format!(
                    "2:1: unknown field `memory-high`, expected one of `{}`",
                    [&SUBJECT_KEYS[..], &LIMIT_KEYS[..]].concat().join("`, `")
                ),
            ),
            (
                "swap-max = \"50%\"",
                "2:12: swap-max cannot be \"50%\": a size from 2M to 1T like \"8G\", or \"infinity\" is allowed".to_owned(),
            ),
            (
                "sleep-after = \"2d\"",
                "2:15: sleep-after: the time until programs sleep cannot be 172800 seconds: whole seconds from 1 to 86400 are allowed"
                    .to_owned(),
            ),
            (
                "memory-low = \"2G\"\nmemory-max = \"1G\"",
                "2:14: memory-low cannot exceed memory-max".to_owned(),
            ),
            (
                "on-memory-full = \"kill\"",
                "2:18: unknown variant `kill`, expected `fail` or `wait`".to_owned(),
            ),
            (
                "user = \"nobody-of-this-name\"\nmemory-max = \"1G\"",
                "2:8: user: this host has no user \"nobody-of-this-name\". Write a name or a number".to_owned(),
            ),
            (
                "group = \"no-group\"\nmemory-max = \"1G\"",
                "2:9: group: this host has no group \"no-group\". Write a name or a number".to_owned(),
            ),
            (
                "user = -1\nmemory-max = \"1G\"",
                "2:8: -1 cannot be the name or the number of a user or group".to_owned(),
            ),
            (
                "unit = \"a[.service\"\nmemory-max = \"1G\"",
                format!("2:8: unit: \"a[.service\" is not a valid pattern (invalid range pattern): {PATTERNS}"),
            ),
            (
                "unit = \"jupyter\"\nmemory-max = \"1G\"",
                "2:8: unit: \"jupyter\" cannot match a unit: unit names end with .service or .scope, as in \"jupyter.service\""
                    .to_owned(),
            ),
            (
                "slice = \"batch\"\nmemory-max = \"1G\"",
                "2:9: slice: \"batch\" cannot match a slice: slice names end with .slice, as in \"batch.slice\"".to_owned(),
            ),
            (
                "unit = \"\"\nmemory-max = \"1G\"",
                "2:8: unit: \"\" matches nothing. Omit the key to match every program".to_owned(),
            ),
            (
                "unit = \"system.slice/a.service\"\nmemory-max = \"1G\"",
                "2:8: unit: \"system.slice/a.service\" cannot match a path: a path begins with / or **/".to_owned(),
            ),
            (
                "container = \"/docker/a\"\nmemory-max = \"1G\"",
                "2:13: container: \"/docker/a\" cannot match a container. Write its ID, or * for any".to_owned(),
            ),
            (
                "unit = \"/system.slice/a.service\"\nslice = \"user.slice\"\nmemory-max = \"1G\"",
                "3:9: the rule can never match: unit \"/system.slice/a.service\" is not in slice \"user.slice\"".to_owned(),
            ),
            (
                "memory-max = \"1G\"\n[[rule]]\nuser = 5\nmemory-max = \"2G\"",
                "3:1: this rule can never match: the earlier rule nvshare.toml:1 matches every program".to_owned(),
            ),
            (
                "user = 5\nmemory-max = \"1G\"\n[[rule]]\nuser = 5\nunit = \"a.service\"\nmemory-max = \"2G\"",
                "4:1: this rule can never match: the earlier rule nvshare.toml:1 matches the same programs".to_owned(),
            ),
            (
                "allowed-gpus = []",
                format!("2:16: allowed-gpus cannot be empty: name {gpus}, or leave it out"),
            ),
            (
                "allowed-gpus = [\"0\", \"first\"]",
                format!("2:22: allowed-gpus cannot have \"first\": {gpus} is allowed"),
            ),
            ("allowed-gpus = [-1]", format!("2:17: allowed-gpus cannot have -1: {gpus} is allowed")),
            (
                "allowed-gpus = 0",
                "2:16: invalid type: integer `0`, expected a list of GPUs for allowed-gpus, like [\"GPU-8a6c1b2d\", \"0\"]"
                    .to_owned(),
            ),
            (
                "affinity = \"\"",
                "2:12: affinity cannot be \"\": one line of text of 1 to 64 bytes is allowed".to_owned(),
            ),
            (
                "affinity = \"a\"\nanti-affinity = \"a\"",
                "3:17: anti-affinity cannot be \"a\", which is the rule's own affinity".to_owned(),
            ),
            (
                "user = 5\naffinity = \"a\"\nallowed-gpus = [0, 1]\n[[rule]]\naffinity = \"a\"\nallowed-gpus = [2]",
                "5:1: affinity \"a\": rule nvshare.toml:1 has the same affinity, but allows none of the GPUs that this rule allows"
                    .to_owned(),
            ),
            (
                "user = 5\naffinity = \"a\"\nexclusion = \"x\"\n[[rule]]\naffinity = \"a\"",
                "5:1: affinity \"a\": rule nvshare.toml:1 has the same affinity, but a different exclusion".to_owned(),
            ),
            ("name = 5\nmemory-max = \"1G\"", "2:8: invalid type: integer `5`, expected a string".to_owned()),
        ];
        for (rule, expected) in cases {
            let text = format!("[[rule]]\n{rule}");
            let error = Config::parse(&text, Path::new("nvshare.toml")).expect_err(&text).to_string();
            assert_eq!(error, format!("nvshare.toml:{expected}"), "{text}");
        }
    }
}
