//! The file format of a scenario, in TOML: the keys and the types of their values. `scenario`
//! checks that the values are consistent.

use std::time::Duration;

use serde::Deserialize;
use serde::de::{self, Deserializer};
use toml::Spanned;

use crate::config::rules::RawRule;
use crate::config::scalar::Scalar;
use crate::config::settings::{self, MAX_MEMORY, MemorySection};
use crate::config::swap::SwapSection;
use crate::config::units;
use crate::scheduler::{AntiThrash, PolicyName};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct File {
    /// The seed of random arrivals.
    #[serde(default)]
    pub seed: u32,
    pub until: Option<Spanned<Length>>,
    #[serde(default, deserialize_with = "settings::read_time_quantum")]
    pub time_quantum: Option<Duration>,
    #[serde(default, deserialize_with = "settings::read_max_wait")]
    pub max_wait: Option<Duration>,
    #[serde(default, deserialize_with = "settings::read_time_period")]
    pub time_period: Option<Duration>,
    #[serde(default, deserialize_with = "settings::read_anti_thrash")]
    pub anti_thrash: Option<AntiThrash>,
    #[serde(default, deserialize_with = "settings::read_policy")]
    pub policy: Option<PolicyName>,
    #[serde(default)]
    pub memory: MemorySection,
    pub swap: Option<Spanned<SwapSection>>,
    #[serde(default)]
    pub gpu: Vec<Spanned<Gpu>>,
    #[serde(default)]
    pub job: Vec<Spanned<Job>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Gpu {
    pub count: Option<Spanned<u32>>,
    pub memory: Spanned<Size>,
    pub link: Option<Spanned<Size>>,
    pub link_total: Option<Spanned<Size>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Job {
    pub name: Spanned<String>,
    pub count: Option<Spanned<u32>>,
    pub user: Option<String>,
    pub users: Option<Spanned<u32>>,
    pub gpus: Option<Spanned<u32>>,
    pub on: Option<Spanned<Vec<u32>>>,
    pub memory: Spanned<Size>,
    pub work: Spanned<Length>,
    pub gpu_time: Option<Spanned<Length>>,
    pub cpu_time: Option<Length>,
    pub drain: Option<Length>,
    pub at: Option<Length>,
    pub every: Option<Length>,
    pub random: Option<Spanned<Length>>,
    pub rule: Option<Spanned<RawRule>>,
}

/// A duration.
#[derive(Debug, Clone, Copy)]
pub struct Length(pub Duration);

/// A number of bytes, or of bytes per second.
#[derive(Debug, Clone, Copy)]
pub struct Size(pub u64);

/// The longest valid duration, longer than any simulation. A larger number has the wrong unit.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

impl<'de> Deserialize<'de> for Length {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let length = match Scalar::read(from, "this key", "a duration like \"30s\"")? {
            Scalar::Number(seconds) => Ok(Duration::from_secs(seconds)),
            Scalar::Text(text) => units::parse_duration(&text),
        };
        match length {
            Ok(length) if length <= LONGEST => Ok(Self(length)),
            Ok(_) => Err(de::Error::custom("too long: at most 3650d is allowed")),
            Err(e) => Err(de::Error::custom(e)),
        }
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let size = match Scalar::read(from, "this key", "a size like \"16G\"")? {
            Scalar::Number(bytes) => Ok(bytes),
            Scalar::Text(text) => units::parse_size(&text),
        };
        match size {
            Ok(bytes) if bytes <= MAX_MEMORY => Ok(Self(bytes)),
            Ok(_) => Err(de::Error::custom("too large: at most 1T is allowed")),
            Err(e) => Err(de::Error::custom(e)),
        }
    }
}
