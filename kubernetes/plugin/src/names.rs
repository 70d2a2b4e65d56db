//! Names of the resource in Kubernetes, of CDI devices, and of GPUs in the configuration.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

/// Kubernetes' length limits for a domain name and for a label in a domain name, in characters.
const DOMAIN_MAX: usize = 253;
const LABEL_MAX: usize = 63;

/// The length limit of a device's name, in characters.
pub const ID_MAX: usize = 63;

/// Quotes a text from kubelet for a sentence, and cuts it to the maximum length of a device's name.
pub fn quoted(text: &str) -> String {
    match text.char_indices().nth(ID_MAX) {
        Some((end, _)) => format!("{:?} and others", text.get(..end).unwrap_or_default()),
        None => format!("{text:?}"),
    }
}

/// Checks a resource's name.
///
/// # Errors
/// The text is not a valid name of an extended resource in Kubernetes.
pub fn check_resource(text: &str) -> Result<(), String> {
    let is_right = |domain: &str, name: &str| {
        let is_label = |label: &str| {
            is_framed(label, |b| b.is_ascii_lowercase() || b.is_ascii_digit(), |b| b == b'-')
                && label.len() <= LABEL_MAX
        };
        let is_kubernetes_own = domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
        domain.len() <= DOMAIN_MAX
            && domain.split('.').all(is_label)
            && !is_kubernetes_own
            && name.len() <= LABEL_MAX
            && is_framed(name, |b| b.is_ascii_alphanumeric(), |b| b"-_.".contains(&b))
    };
    if text.split_once('/').is_some_and(|(domain, name)| is_right(domain, name)) {
        return Ok(());
    }
    Err(format!(
        "{text:?} is not a resource name. Write a domain other than kubernetes.io, /, and a name, like \
         \"nvshare.com/gpu\""
    ))
}

/// Checks a CDI kind.
///
/// # Errors
/// The text is not a valid kind in CDI.
pub fn check_cdi_kind(text: &str) -> Result<(), String> {
    let is_part = |part: &str| {
        is_framed(part, |b| b.is_ascii_alphanumeric(), |b| b"-_.".contains(&b))
            && part.starts_with(|first: char| first.is_ascii_alphabetic())
    };
    if text.split_once('/').is_some_and(|(vendor, class)| is_part(vendor) && is_part(class)) {
        return Ok(());
    }
    Err(format!("{text:?} is not a kind of CDI devices. Write a vendor, /, and a class, like \"nvshare.com/gpu\""))
}

/// Returns true if the text begins and ends with an `edge` byte, and contains only `edge` and
/// `inner` bytes in between.
fn is_framed(text: &str, edge: impl Fn(u8) -> bool, inner: impl Fn(u8) -> bool) -> bool {
    let bytes = text.as_bytes();
    bytes.first().is_some_and(|b| edge(*b))
        && bytes.last().is_some_and(|b| edge(*b))
        && bytes.iter().all(|b| edge(*b) || inner(*b))
}

/// The GPUs that an entry of the configuration selects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuName {
    /// NVML's index, which also selects the GPU's slices.
    Number(u32),
    /// A pattern with `*`, `?` and `[…]`. The pattern matches a model's name or a UUID. UUIDs are
    /// in lower case except for `GPU-` or `MIG-`.
    Text(glob::Pattern),
}

const ALLOWED: &str =
    "a GPU's number, its UUID as nvidia-smi -L prints it, or its model name, where * matches anything";

impl GpuName {
    pub fn is(&self, uuid: &str, index: Option<u32>, name: &str) -> bool {
        match self {
            Self::Number(number) => index == Some(*number),
            Self::Text(pattern) => {
                let ignoring_case = glob::MatchOptions { case_sensitive: false, ..glob::MatchOptions::new() };
                pattern.matches_with(uuid, ignoring_case) || pattern.matches(name)
            }
        }
    }
}

impl<'de> Deserialize<'de> for GpuName {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(GpuNameVisitor)
    }
}

struct GpuNameVisitor;

impl Visitor<'_> for GpuNameVisitor {
    type Value = GpuName;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(ALLOWED)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<GpuName, E> {
        let number = u32::try_from(value);
        number.map(GpuName::Number).map_err(|_| E::custom(format!("gpu cannot be {value}: write {ALLOWED}")))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<GpuName, E> {
        let number = u32::try_from(value);
        number.map(GpuName::Number).map_err(|_| E::custom(format!("gpu cannot be {value}: write {ALLOWED}")))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<GpuName, E> {
        if value.is_empty() {
            return Err(E::custom(format!("gpu cannot be empty: write {ALLOWED}")));
        }
        if let Ok(number) = value.parse() {
            return Ok(GpuName::Number(number));
        }
        let pattern = glob::Pattern::new(value);
        pattern
            .map(GpuName::Text)
            .map_err(|e| E::custom(format!("gpu cannot be {value:?} ({}): write {ALLOWED}", e.msg)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resource_names_follow_the_kubernetes_syntax() {
        for right in ["nvshare.com/gpu", "a/b", "example.com/Shared_GPU.1"] {
            assert_eq!(check_resource(right), Ok(()), "{right}");
        }
        let long = format!("a.b/{}", "x".repeat(64));
        for wrong in [
            "",
            "gpu",
            "/gpu",
            "nvshare.com/",
            "Nvshare.com/gpu",
            "a..b/gpu",
            "a/b/c",
            "k.kubernetes.io/gpu",
            "a/-b",
            &long,
        ] {
            assert!(check_resource(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn quoted_text_is_truncated() {
        assert_eq!(quoted("GPU-a\n"), "\"GPU-a\\n\"");
        assert_eq!(quoted(&"é".repeat(63)), format!("{:?}", "é".repeat(63)));
        assert_eq!(quoted(&"é".repeat(64)), format!("{:?} and others", "é".repeat(63)));
    }

    #[test]
    fn cdi_kinds_follow_the_cdi_syntax() {
        assert_eq!(check_cdi_kind("nvshare.com/gpu"), Ok(()));
        for wrong in ["", "gpu", "1x/gpu", "nvshare.com/gpu=all", "nvshare.com/9", "a/b-"] {
            assert!(check_cdi_kind(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn gpus_are_selected_by_index_uuid_or_model() {
        let read = |text: &str| {
            let value: toml::Table = toml::from_str(&format!("gpu = {text}")).expect("TOML");
            GpuName::deserialize(value["gpu"].clone()).expect(text)
        };
        let is = |text: &str| read(text).is("GPU-00aa", Some(3), "NVIDIA H200");
        for yes in ["3", "\"3\"", "\"GPU-00aa\"", "\"GPU-00AA\"", "\"GPU-*\"", "\"NVIDIA H200\"", "\"*H200*\"", "\"*\""]
        {
            assert!(is(yes), "{yes}");
        }
        for no in ["2", "\"GPU-00\"", "\"MIG-*\"", "\"NVIDIA\"", "\"nvidia h200\""] {
            assert!(!is(no), "{no}");
        }
    }
}
