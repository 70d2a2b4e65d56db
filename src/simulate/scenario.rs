//! A scenario: GPUs, the scheduler's settings, and jobs. A job consists of programs of one kind.
//! Scenarios are read from a file (`schema`), with errors that name the place of a mistake and the
//! valid values.

use std::fmt::Display;
use std::ops::{Range, RangeInclusive};
use std::path::Path;
use std::time::Duration;

use toml::Spanned;

pub use nvshare_simulated_client::FULL;

use super::schema::{self, Length, Size};
use crate::config::ConfigError;
use crate::config::document::{self, position};
use crate::config::rules::{self, Subject};
use crate::config::settings;
use crate::config::swap::SwapMax;
use crate::config::swap::SwapSection;
use crate::scheduler::{AntiThrash, PolicyName, RuleLimits, Settings};

/// Valid numbers of programs, and of GPUs.
const PROGRAMS: RangeInclusive<u32> = 1..=100_000;
const GPUS: RangeInclusive<u32> = 1..=10_000;
/// Bandwidth of copies between an H200 and registered host memory in each direction, in bytes per
/// second [H200, PCIe 5].
const LINK: u64 = 48 << 30;
/// The slowest valid link, in bytes per second. A smaller number probably has the wrong unit.
const SLOWEST_LINK: u64 = 1 << 20;
/// The default end of a simulation. A longer scenario is probably a mistake.
const UNTIL: Duration = Duration::from_secs(365 * 24 * 3600);

#[derive(Debug, Clone, PartialEq)]
pub struct Scenario {
    pub settings: Settings,
    /// Restricts the comparison to one mode or one policy, if the file names a mode or a policy.
    pub mode: Option<AntiThrash>,
    pub policy: Option<PolicyName>,
    /// Limit of host memory for evicted memory, in bytes. `None` means no limit.
    pub swap: Option<u64>,
    pub gpus: Vec<Gpu>,
    pub jobs: Vec<Job>,
    pub seed: u32,
    /// The time at which the simulation ends.
    pub until: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gpu {
    pub memory: u64,
    /// Bytes per second in each direction.
    pub link: u64,
    /// Bytes per second in both directions together, at most twice `link`.
    pub link_total: u64,
}

/// Programs of one kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    pub name: String,
    pub count: u32,
    /// The users who own the programs. The programs are assigned to the users in rotation.
    pub users: Vec<String>,
    /// Number of GPUs that a program needs at the same time.
    pub gpus: usize,
    /// The indices of the allowed GPUs.
    pub on: Vec<usize>,
    /// Bytes on each GPU of a program.
    pub memory: u64,
    /// Total GPU time on each GPU of a program.
    pub work: Duration,
    /// The time with GPU work in an iteration, and the preceding time without GPU work.
    pub gpu_time: Duration,
    pub cpu_time: Duration,
    /// Time for which submitted work continues after a revoke.
    pub drain: Duration,
    pub arrival: Arrival,
    /// The limits of the job's rule. All programs of the job belong to the rule's group.
    pub rule: Option<RuleLimits>,
}

/// The arrival times of programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    pub first: Duration,
    pub gap: Gap,
}

/// The time between arrivals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gap {
    Always(Duration),
    /// A Poisson process with this mean time between arrivals.
    Random(Duration),
}

/// The position and the text of an error.
type Mistake = (Range<usize>, String);

impl Scenario {
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let unreadable = |e: std::io::Error| ConfigError::Unreadable { path: path.into(), reason: e.to_string() };
        Self::parse(&std::fs::read_to_string(path).map_err(unreadable)?, path)
    }

    /// Parses the text of a file. Error messages name `path`.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let file: schema::File = document::parse(text, path)?;
        let line_of = |at| position(text, at).0;
        Self::check(file, path, line_of).map_err(|(span, reason)| document::wrong(text, path, span.start, reason))
    }

    fn check(file: schema::File, path: &Path, line_of: impl Fn(usize) -> usize) -> Result<Self, Mistake> {
        let default = settings::defaults();
        let settings = Settings {
            time_quantum: file.time_quantum.unwrap_or(default.time_quantum),
            max_wait: file.max_wait.unwrap_or(default.max_wait),
            time_period: file.time_period.unwrap_or(default.time_period),
            anti_thrash: file.anti_thrash.unwrap_or(default.anti_thrash),
            policy: file.policy.unwrap_or(default.policy),
            reserve: file.memory.reserve.unwrap_or(default.reserve),
            context: file.memory.context.unwrap_or(default.context),
            ..default
        };
        let swap = file.swap.map_or(Ok(None), |section| swap(&section))?;
        let until = file.until.map(|until| positive("until", &until)).transpose()?;
        let mut gpus = Vec::new();
        for gpu in file.gpu {
            let gpu = gpu.into_inner();
            let count = counted("count", gpu.count.as_ref(), GPUS)?;
            let memory = bytes("memory", &gpu.memory, 1)?;
            let link = gpu.link.as_ref().map_or(Ok(LINK), |link| bytes("link", link, SLOWEST_LINK))?;
            let link_total = match &gpu.link_total {
                None => link.saturating_mul(2),
                Some(total) => bytes("link-total", total, link)?.min(link.saturating_mul(2)),
            };
            gpus.extend((0..count).map(|_| Gpu { memory, link, link_total }));
        }
        let all = within("GPUs", 0..0, gpus.len(), &GPUS, "write [[gpu]] with memory and, optionally, count")?;
        let mut jobs: Vec<Job> = Vec::new();
        for raw in file.job {
            let job = job(raw.into_inner(), all, path, &line_of, &jobs)?;
            jobs.push(job);
        }
        let programs = jobs.iter().map(|job| job.count as usize).sum();
        within("programs", 0..0, programs, &PROGRAMS, "write [[job]] with name, memory and work")?;
        Ok(Self {
            mode: file.anti_thrash,
            policy: file.policy,
            settings,
            swap,
            gpus,
            jobs,
            seed: file.seed,
            until: until.unwrap_or(UNTIL),
        })
    }

    pub fn has_rules(&self) -> bool {
        self.jobs.iter().any(|job| job.rule.is_some())
    }
}

impl Job {
    /// The shortest pause that the simulation represents. A shorter pause is a gap between launches
    /// of a busy program, in which the library keeps the lock.
    const NOTICED: Duration = Duration::from_millis(1);

    /// Returns true if the programs always have work, because their pauses are shorter than
    /// [`NOTICED`](Self::NOTICED).
    pub fn is_steady(&self) -> bool {
        self.cpu_time < Self::NOTICED
    }

    /// Returns the fraction of a GPU that a program keeps busy while it runs alone, in millionths.
    pub fn fullness(&self) -> u32 {
        let iteration = (self.gpu_time + self.cpu_time).as_nanos().max(1);
        let part = self.gpu_time.as_nanos() * u128::from(FULL) / iteration;
        if self.is_steady() { u32::try_from(part).unwrap_or(FULL).clamp(1, FULL) } else { FULL }
    }

    /// Returns the completion time of a program that runs alone.
    pub fn alone(&self) -> Duration {
        let (work, part) = (self.work.as_nanos(), self.gpu_time.as_nanos().max(1));
        let nanos = if self.is_steady() {
            work * u128::from(FULL) / u128::from(self.fullness())
        } else {
            work + work.div_ceil(part) * self.cpu_time.as_nanos()
        };
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

fn job(
    raw: schema::Job,
    all: usize,
    path: &Path,
    line_of: &impl Fn(usize) -> usize,
    others: &[Job],
) -> Result<Job, Mistake> {
    let name = raw.name.get_ref().clone();
    if name.is_empty() || name.chars().any(char::is_control) {
        return Err((raw.name.span(), "name: a job's name must be one line of text".into()));
    }
    if others.iter().any(|other| other.name == name) {
        return Err((
            raw.name.span(),
            format!("name: another job is already called {name:?}. Job names must be unique"),
        ));
    }
    let count = counted("count", raw.count.as_ref(), PROGRAMS)?;
    let users = match (raw.user, &raw.users) {
        (Some(_), Some(users)) => {
            return Err((users.span(), "users: cannot be combined with the key \"user\". Remove \"user\"".into()));
        }
        (_, Some(_)) => {
            let number = counted("users", raw.users.as_ref(), PROGRAMS)?;
            (1..=number).map(|number| format!("{name}-{number}")).collect()
        }
        (user, None) => vec![user.unwrap_or_else(|| name.clone())],
    };
    let on = match &raw.on {
        None => (0..all).collect(),
        Some(on) => places(on, all)?,
    };
    let gpus = match &raw.gpus {
        None => 1,
        Some(gpus) => {
            let most = u32::try_from(on.len()).unwrap_or(u32::MAX);
            counted("gpus", Some(gpus), 1..=most)? as usize
        }
    };
    let work = positive("work", &raw.work)?;
    let gpu_time = raw.gpu_time.as_ref().map_or(Ok(work), |time| positive("gpu-time", time))?;
    let gap = match (raw.every, raw.random) {
        (Some(_), Some(random)) => {
            return Err((random.span(), "random: cannot be combined with the key \"every\". Remove \"every\"".into()));
        }
        (_, Some(random)) => Gap::Random(positive("random", &random)?),
        (every, None) => Gap::Always(every.map_or(Duration::ZERO, |every| every.0)),
    };
    Ok(Job {
        count,
        users,
        gpus,
        on,
        memory: bytes("memory", &raw.memory, 1)?,
        work,
        gpu_time: gpu_time.min(work),
        cpu_time: raw.cpu_time.map_or(Duration::ZERO, |time| time.0),
        drain: raw.drain.map_or(Duration::ZERO, |time| time.0),
        arrival: Arrival { first: raw.at.map_or(Duration::ZERO, |at| at.0), gap },
        rule: raw.rule.map(|rule| limits(rule, path, line_of)).transpose()?,
        name,
    })
}

/// The limits of the job's rule.
fn limits(
    rule: Spanned<rules::RawRule>,
    path: &Path,
    line_of: &impl Fn(usize) -> usize,
) -> Result<RuleLimits, Mistake> {
    let span = rule.span();
    let read = rules::read(vec![rule], path, rules::Unknown::Mistake, line_of)?;
    match read.first() {
        Some(rule) if rule.subject == Subject::default() && rule.name.is_empty() => Ok(rule.limits),
        _ => {
            let keys = "name, unit, slice, container, pod, user and group are not allowed here";
            Err((span, format!("rule: a job's rule always applies to the job's own programs: {keys}")))
        }
    }
}

fn swap(section: &Spanned<SwapSection>) -> Result<Option<u64>, Mistake> {
    match section.get_ref().max {
        None | Some(SwapMax::None) => Ok(None),
        Some(SwapMax::Bytes(bytes)) => Ok(Some(bytes)),
        Some(SwapMax::Percent(_)) => {
            let text = "swap.max: a scenario does not define the amount of RAM. Write a size like \"64G\", or \"none\"";
            Err((section.span(), text.into()))
        }
    }
}

/// Returns the indices of GPUs, sorted and without duplicates.
fn places(on: &Spanned<Vec<u32>>, all: usize) -> Result<Vec<usize>, Mistake> {
    let mut places: Vec<usize> = on.get_ref().iter().map(|place| *place as usize).collect();
    places.sort_unstable();
    places.dedup();
    match places.last() {
        None => Err((on.span(), "on: the list is empty. Omit it to allow every GPU".into())),
        Some(last) if *last >= all => {
            Err((on.span(), format!("on: the scenario has no GPU {last}. GPUs are numbered from 0 to {}", all - 1)))
        }
        Some(_) => Ok(places),
    }
}

fn counted(key: &str, given: Option<&Spanned<u32>>, allowed: RangeInclusive<u32>) -> Result<u32, Mistake> {
    let Some(given) = given else { return Ok(1) };
    within(key, given.span(), *given.get_ref() as usize, &allowed, "").map(|_| *given.get_ref())
}

fn within(
    what: impl Display,
    span: Range<usize>,
    number: usize,
    allowed: &RangeInclusive<u32>,
    hint: &str,
) -> Result<usize, Mistake> {
    if u32::try_from(number).is_ok_and(|number| allowed.contains(&number)) {
        return Ok(number);
    }
    let (least, most) = (allowed.start(), allowed.end());
    let hint = if hint.is_empty() || number > 0 { String::new() } else { format!(": {hint}") };
    Err((span, format!("{what} cannot be {number}: {least} to {most} are allowed{hint}")))
}

fn positive(key: &str, given: &Spanned<Length>) -> Result<Duration, Mistake> {
    let length = given.get_ref().0;
    if length.is_zero() {
        return Err((given.span(), format!("{key} cannot be 0: write a longer time")));
    }
    Ok(length)
}

fn bytes(key: &str, given: &Spanned<Size>, least: u64) -> Result<u64, Mistake> {
    let bytes = given.get_ref().0;
    if bytes < least {
        return Err((given.span(), format!("{key} cannot be {bytes}: at least {least} is allowed")));
    }
    Ok(bytes)
}
