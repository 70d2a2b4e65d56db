//! The configuration file `/etc/nvshare/device-plugin.toml`: keys, defaults, and errors that name
//! the line of a mistake.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nvshare::config::paths::PRELOAD_LIST;
use nvshare::config::scalar::Scalar;
use nvshare::config::{ConfigError, document, units};
use serde::Deserialize;
use serde::de::{self, Deserializer};
use toml::Spanned;

use crate::names::{self, GpuName};

pub const DEFAULT_PATH: &str = "/etc/nvshare/device-plugin.toml";

/// Valid numbers of slots per GPU. kubelet accepts lists of up to 4 MiB, which is gRPC's default.
/// This is enough for 8 GPUs of 7 slices with 1000 slots each.
pub const SLOTS: RangeInclusive<u64> = 1..=1000;

/// Valid times, in whole seconds, for which the scheduler may be silent. A restart lasts at most
/// two seconds.
const SCHEDULER_TIMEOUT_SECONDS: RangeInclusive<u64> = 1..=600;

/// Valid intervals between queries of GPUs, in whole seconds.
const QUERY_INTERVAL_SECONDS: RangeInclusive<u64> = 1..=600;

/// The whole configuration. `Default` returns the default of every setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The resource's name in Kubernetes.
    pub resource: String,
    /// Slots of a GPU without an entry in `gpus`.
    pub slots: u32,
    pub allocation: Allocation,
    pub inject: Inject,
    /// The kubelet API that offers GPUs without an entry in `gpus`.
    pub offer: Offer,
    /// The kind of the CDI devices.
    pub cdi_kind: String,
    /// Settings of some GPUs. The first entry that matches a GPU applies.
    pub gpus: Vec<GpuSlots>,
    pub mounts: Mounts,
    pub health: HealthSettings,
}

/// The order in which containers get GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Allocation {
    /// The GPU with the most free slots first.
    Spread,
    /// The GPU with the fewest free slots first.
    Pack,
}

/// The kubelet API that offers a GPU. A GPU is offered by one API only, because otherwise two
/// containers could be promised the same part of the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Offer {
    /// The slots of the GPU are an extended resource.
    #[default]
    DevicePlugin,
    /// The GPU is a device of a ResourceSlice, and ResourceClaims get parts of the GPU.
    Dra,
}

/// How GPUs are injected into a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Inject {
    /// By named CDI devices, which the container runtime looks up.
    Cdi,
    /// By mounts and environment in the answer to kubelet.
    Mounts,
}

/// The number of slots of some GPUs. Zero hides the GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuSlots {
    pub gpu: GpuName,
    #[serde(deserialize_with = "read_gpu_slots")]
    pub slots: u32,
    #[serde(default)]
    pub offer: Option<Offer>,
}

/// The files for containers with [`Inject::Mounts`]. Paths are paths of the host.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Mounts {
    /// The library.
    #[serde(deserialize_with = "read_path")]
    pub library: PathBuf,
    /// The loader's preload list, mounted as `/etc/ld.so.preload` in containers. The list contains
    /// the library's path in containers.
    #[serde(deserialize_with = "read_path")]
    pub preload: PathBuf,
    /// The directory of the clients' socket, mounted as `/run/nvshare` in containers.
    #[serde(deserialize_with = "read_path")]
    pub sockets: PathBuf,
    /// Whether the driver's device files are passed too, which runtimes other than NVIDIA's need.
    pub device_nodes: bool,
}

/// Settings of the health checks.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct HealthSettings {
    /// The time for which the scheduler may be silent.
    #[serde(deserialize_with = "read_scheduler_timeout")]
    pub scheduler_timeout: Duration,
    /// Period of queries of each GPU.
    #[serde(deserialize_with = "read_query_interval")]
    pub query_interval: Duration,
    /// XIDs to ignore, in addition to the XIDs that mistakes of programs cause.
    pub ignored_xids: BTreeSet<u64>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            resource: "nvshare.com/gpu".into(),
            slots: 10,
            allocation: Allocation::Spread,
            inject: Inject::Cdi,
            offer: Offer::default(),
            cdi_kind: "nvshare.com/gpu".into(),
            gpus: Vec::new(),
            mounts: Mounts::default(),
            health: HealthSettings::default(),
        }
    }
}

impl Default for Mounts {
    fn default() -> Self {
        Self {
            // The path in Debian's package.
            library: format!("/usr/lib/{}-linux-gnu/libnvshare.so", std::env::consts::ARCH).into(),
            preload: PRELOAD_LIST.into(),
            sockets: "/run/nvshare".into(),
            device_nodes: false,
        }
    }
}

impl Default for HealthSettings {
    fn default() -> Self {
        Self {
            scheduler_timeout: Duration::from_secs(10),
            query_interval: Duration::from_secs(5),
            ignored_xids: BTreeSet::new(),
        }
    }
}

impl Config {
    /// Reads `explicit`, or the default file, which may be missing.
    pub fn load(explicit: Option<&Path>) -> Result<Self, ConfigError> {
        nvshare_kubernetes::config::load(explicit, DEFAULT_PATH, Self::parse)
    }

    /// Parses the text of a file. Error messages name `path`.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let file: File = document::parse(text, path)?;
        let default = Self::default();
        let config = Self {
            resource: file.resource.unwrap_or(default.resource),
            slots: file.slots.unwrap_or(default.slots),
            allocation: file.allocation.unwrap_or(default.allocation),
            inject: file.inject.unwrap_or(default.inject),
            offer: file.offer.as_ref().map_or(default.offer, |offer| *offer.as_ref()),
            cdi_kind: file.cdi_kind.unwrap_or(default.cdi_kind),
            gpus: file.gpu,
            mounts: file.mounts,
            health: file.health,
        };
        if config.inject == Inject::Mounts && config.offers_by(Offer::Dra) {
            let at = file.offer.map_or(0, |offer| offer.span().start);
            let what = "offer = \"dra\" needs inject = \"cdi\": a DRA driver can return only CDI devices";
            return Err(document::wrong(text, path, at, what.into()));
        }
        Ok(config)
    }

    /// Returns true if the configuration offers a GPU by this API, or would offer a new GPU by it.
    pub fn offers_by(&self, offer: Offer) -> bool {
        self.offer == offer || self.gpus.iter().any(|entry| entry.offer == Some(offer))
    }

    /// Returns the API that offers this GPU.
    pub fn offer_of(&self, uuid: &str, index: Option<u32>, name: &str) -> Offer {
        let entry = self.gpus.iter().find(|entry| entry.gpu.is(uuid, index, name));
        entry.and_then(|entry| entry.offer).unwrap_or(self.offer)
    }

    /// The number of slots of this GPU.
    pub fn slots_of(&self, uuid: &str, index: Option<u32>, name: &str) -> u32 {
        let entry = self.gpus.iter().find(|entry| entry.gpu.is(uuid, index, name));
        entry.map_or(self.slots, |entry| entry.slots)
    }
}

/// The contents of the file. Every key is optional.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct File {
    #[serde(default, deserialize_with = "read_resource")]
    resource: Option<String>,
    #[serde(default, deserialize_with = "read_slots")]
    slots: Option<u32>,
    #[serde(default)]
    allocation: Option<Allocation>,
    #[serde(default)]
    inject: Option<Inject>,
    #[serde(default)]
    offer: Option<Spanned<Offer>>,
    #[serde(default, deserialize_with = "read_cdi_kind")]
    cdi_kind: Option<String>,
    #[serde(default)]
    gpu: Vec<GpuSlots>,
    #[serde(default)]
    mounts: Mounts,
    #[serde(default)]
    health: HealthSettings,
}

fn read_resource<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let text = String::deserialize(from)?;
    names::check_resource(&text).map_err(de::Error::custom)?;
    Ok(Some(text))
}

fn read_cdi_kind<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    let text = String::deserialize(from)?;
    names::check_cdi_kind(&text).map_err(de::Error::custom)?;
    Ok(Some(text))
}

fn read_slots<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    number(from, "slots", SLOTS).map(Some)
}

fn read_gpu_slots<'de, D: Deserializer<'de>>(from: D) -> Result<u32, D::Error> {
    number(from, "slots of [[gpu]]", 0..=*SLOTS.end())
}

fn number<'de, D: Deserializer<'de>>(
    from: D,
    key: &'static str,
    allowed: RangeInclusive<u64>,
) -> Result<u32, D::Error> {
    let given = match Scalar::read(from, key, "a whole number")? {
        Scalar::Number(number) => match u32::try_from(number) {
            Ok(fits) if allowed.contains(&number) => return Ok(fits),
            _ => number.to_string(),
        },
        Scalar::Text(text) => format!("{text:?}"),
    };
    let (least, most) = (allowed.start(), allowed.end());
    Err(de::Error::custom(format!("{key} cannot be {given}: {least} to {most} are allowed")))
}

fn read_path<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
    let path = PathBuf::deserialize(from)?;
    if path.is_absolute() {
        return Ok(path);
    }
    Err(de::Error::custom(format!("{:?} is not an absolute path: it must begin with /", path.display().to_string())))
}

fn read_scheduler_timeout<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    whole_seconds(from, "scheduler-timeout", SCHEDULER_TIMEOUT_SECONDS)
}

fn read_query_interval<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    whole_seconds(from, "query-interval", QUERY_INTERVAL_SECONDS)
}

fn whole_seconds<'de, D: Deserializer<'de>>(
    from: D,
    key: &'static str,
    allowed: RangeInclusive<u64>,
) -> Result<Duration, D::Error> {
    let value = match Scalar::read(from, key, "a duration in whole seconds, like \"10s\"")? {
        Scalar::Number(seconds) => Ok(Duration::from_secs(seconds)),
        Scalar::Text(text) => units::parse_duration(&text),
    };
    let value = value.map_err(|e| de::Error::custom(format!("{key}: {e}")))?;
    if value.subsec_nanos() == 0 && allowed.contains(&value.as_secs()) {
        return Ok(value);
    }
    let (least, most, given) = (allowed.start(), allowed.end(), value.as_secs_f64());
    Err(de::Error::custom(format!("{key} cannot be {given} seconds: whole seconds from {least} to {most} are allowed")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("p.toml")).map_err(|e| e.to_string())
    }

    #[test]
    fn an_empty_file_is_the_default() {
        assert_eq!(parse(""), Ok(Config::default()));
        assert_eq!(parse("[mounts]\n[health]\n"), Ok(Config::default()));
    }

    #[test]
    fn every_setting_is_parsed() {
        let text = r#"
            resource = "example.com/shared-gpu"
            slots = 4
            allocation = "pack"
            inject = "mounts"
            cdi-kind = "example.com/gpu"
            [[gpu]]
            gpu = 0
            slots = 0
            [[gpu]]
            gpu = "NVIDIA H*"
            slots = 32
            [mounts]
            library = "/opt/libnvshare.so"
            preload = "/opt/preload"
            sockets = "/var/run/nvshare"
            device-nodes = true
            [health]
            scheduler-timeout = "30s"
            query-interval = 1
            ignored-xids = [94, 63]
        "#;
        let config = parse(text).expect("it is right");
        assert_eq!(config.slots_of("GPU-1", Some(0), "NVIDIA H200"), 0, "the first entry counts");
        assert_eq!(config.slots_of("GPU-2", Some(1), "NVIDIA H200"), 32);
        assert_eq!(config.slots_of("GPU-3", None, "Tesla T4"), 4);
        assert_eq!((config.allocation, config.inject), (Allocation::Pack, Inject::Mounts));
        assert_eq!(config.mounts.preload, Path::new("/opt/preload"));
        assert_eq!(config.health.scheduler_timeout, Duration::from_secs(30));
        assert_eq!(config.health.query_interval, Duration::from_secs(1));
        assert_eq!(config.health.ignored_xids, BTreeSet::from([63, 94]));
    }

    #[test]
    fn errors_name_the_line_and_the_allowed_values() {
        for (text, said) in [
            ("slots = 0", "p.toml:1:9: slots cannot be 0: 1 to 1000 are allowed"),
            ("\nslots = 1001", "p.toml:2:9: slots cannot be 1001: 1 to 1000 are allowed"),
            ("slots = -1", "slots cannot be -1"),
            ("slots = \"ten\"", "slots cannot be \"ten\""),
            ("slot = 3", "p.toml:1:1: unknown field `slot`, expected one of `resource`, `slots`"),
            ("inject = \"nothing\"", "p.toml:1:10: unknown variant `nothing`, expected `cdi` or `mounts`"),
            ("allocation = \"best\"", "expected `spread` or `pack`"),
            ("resource = \"gpu\"", "p.toml:1:12: \"gpu\" is not a resource name"),
            ("cdi-kind = \"gpu\"", "\"gpu\" is not a kind of CDI devices"),
            ("[[gpu]]\ngpu = 0\nslots = 2000", "p.toml:3:9: slots of [[gpu]] cannot be 2000: 0 to 1000 are allowed"),
            ("[[gpu]]\ngpu = 0", "missing field `slots`"),
            ("[[gpu]]\ngpu = -2\nslots = 1", "p.toml:2:7: "),
            ("[mounts]\nlibrary = \"libnvshare.so\"", "p.toml:2:11: \"libnvshare.so\" is not an absolute path"),
            ("[health]\nscheduler-timeout = \"1.5s\"", "scheduler-timeout cannot be 1.5 seconds"),
            ("[health]\nquery-interval = 0", "whole seconds from 1 to 600 are allowed"),
            ("[health]\nignored-xids = [\"a\"]", "p.toml:2:17: "),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(said), "{text:?}: {error}");
        }
    }
}
