//! Names of GPUs in rules and in `CUDA_VISIBLE_DEVICES`. A name is a UUID as `nvidia-smi` prints
//! it, a prefix of a UUID, or an index.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, SeqAccess, Visitor};

/// The prefixes that all UUIDs of GPUs and MIG slices begin with.
const KINDS: [&str; 2] = ["GPU-", "MIG-"];
const ALLOWED: &str =
    "the UUID of a GPU or MIG slice as nvidia-smi -L prints it, the start of a UUID, or the number of a GPU";

/// The name of a GPU. A prefix of a UUID can also denote several MIG slices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuName {
    /// The index that NVML assigns to a GPU.
    Number(u32),
    /// A UUID or a prefix of a UUID, in lower case except for `GPU-` or `MIG-`.
    Uuid(String),
}

impl GpuName {
    pub fn parse(text: &str) -> Option<Self> {
        if let Ok(number) = text.parse() {
            return (!text.starts_with('+')).then_some(Self::Number(number));
        }
        let kind = KINDS.into_iter().find(|kind| text.starts_with(kind))?;
        let rest = text.get(kind.len()..)?.to_ascii_lowercase();
        let is_whole = rest.len() <= "00000000-0000-0000-0000-000000000000".len();
        let is_hex = !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-');
        (is_whole && is_hex).then(|| Self::Uuid(format!("{kind}{rest}")))
    }

    /// Returns true if the name can denote the GPU with this UUID and index.
    pub fn fits(&self, uuid: &str, index: Option<u32>) -> bool {
        match self {
            Self::Number(number) => index == Some(*number),
            Self::Uuid(beginning) => uuid.starts_with(beginning),
        }
    }

    /// Returns false only if the two names denote different GPUs on every host.
    pub fn may_be(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Number(one), Self::Number(other)) => one == other,
            (Self::Uuid(one), Self::Uuid(other)) => one.starts_with(other) || other.starts_with(one),
            _ => true,
        }
    }
}

impl fmt::Display for GpuName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Uuid(uuid) => uuid.fmt(f),
        }
    }
}

/// A list of GPU names in a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuNames(pub Vec<GpuName>);

impl<'de> Deserialize<'de> for GpuNames {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(ListVisitor)
    }
}

struct ListVisitor;

impl<'de> Visitor<'de> for ListVisitor {
    type Value = GpuNames;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of GPUs for allowed-gpus, like [\"GPU-8a6c1b2d\", \"0\"]")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<GpuNames, A::Error> {
        let mut names = Vec::new();
        while let Some(Written(name)) = from.next_element()? {
            names.push(name);
        }
        if names.is_empty() {
            return Err(de::Error::custom(format!("allowed-gpus cannot be empty: name {ALLOWED}, or leave it out")));
        }
        Ok(GpuNames(names))
    }
}

/// Parses a name.
///
/// # Errors
/// Returns a sentence about the mistake.
pub(super) fn read(text: &str) -> Result<GpuName, String> {
    NameVisitor.visit_str(text).map_err(|e: de::value::Error| e.to_string())
}

/// A name in the configuration.
struct Written(GpuName);

impl<'de> Deserialize<'de> for Written {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(NameVisitor).map(Self)
    }
}

struct NameVisitor;

impl Visitor<'_> for NameVisitor {
    type Value = GpuName;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(ALLOWED)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<GpuName, E> {
        let number = u32::try_from(value).map(GpuName::Number);
        number.map_err(|_| E::custom(format!("allowed-gpus cannot have {value}: {ALLOWED} is allowed")))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<GpuName, E> {
        let name = GpuName::parse(value);
        name.ok_or_else(|| E::custom(format!("allowed-gpus cannot have {value:?}: {ALLOWED} is allowed")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "GPU-8a6c1b2d-0011-2233-4455-66778899aabb";

    #[test]
    fn a_gpu_is_named_by_uuid_uuid_prefix_or_index() {
        for name in [UUID, "GPU-8a6c1b2d", "GPU-8", "GPU-8A6C", "3"] {
            let name = GpuName::parse(name).unwrap_or_else(|| panic!("{name} is a name"));
            assert!(name.fits(UUID, Some(3)), "{name}");
            assert!(!name.fits("GPU-9a6c1b2d-0011-2233-4455-66778899aabb", Some(2)), "{name}");
            assert!(!name.fits(&UUID.replace("GPU", "MIG"), None), "{name}");
        }
        for wrong in ["", "-1", "+1", "GPU-", "gpu-8a", "8a6c", "GPU-8g", "MIG-GPU-8a6c/1/0", "no", &format!("{UUID}0")]
        {
            assert_eq!(GpuName::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn names_that_cannot_match_the_same_gpu_are_recognized() {
        let may_be = |one: &str, other: &str| GpuName::parse(one).unwrap().may_be(&GpuName::parse(other).unwrap());
        assert!(may_be("0", "0") && may_be("GPU-8a", "GPU-8a6c") && may_be("GPU-8a6c", "GPU-8a") && may_be("0", UUID));
        assert!(!may_be("0", "1") && !may_be("GPU-8a", "GPU-8b") && !may_be("GPU-8a", "MIG-8a"));
    }
}
