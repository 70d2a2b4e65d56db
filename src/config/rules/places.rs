//! The GPUs that a rule's programs may use, and the programs that may share those GPUs.

use toml::Value;

use super::gpu_names::GpuName;
use crate::scheduler::Labels;

const LONGEST_LABEL: usize = 64;

/// A rule's settings for placement.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Whereabouts {
    /// The GPUs that programs may use. `None` means all GPUs.
    pub allowed: Option<Vec<GpuName>>,
    pub labels: Labels,
}

impl Whereabouts {
    /// Returns the keys and values in the syntax of the configuration.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (&'static str, Option<Value>)> {
        let allowed =
            self.allowed.as_ref().map(|names| names.iter().map(GpuName::to_string).collect::<Vec<_>>().into());
        let label = |label: &Option<String>| label.as_deref().map(Value::from);
        let Labels { affinity, anti_affinity, exclusion } = &self.labels;
        let pairs = [
            ("allowed-gpus", allowed),
            ("affinity", label(affinity)),
            ("anti-affinity", label(anti_affinity)),
            ("exclusion", label(exclusion)),
        ];
        pairs.into_iter()
    }
}

/// Checks a label.
pub(super) fn label(key: &str, text: &str) -> Result<String, String> {
    let is_allowed = (1..=LONGEST_LABEL).contains(&text.len()) && !text.chars().any(char::is_control);
    let wrong = || format!("{key} cannot be {text:?}: one line of text of 1 to {LONGEST_LABEL} bytes is allowed");
    is_allowed.then(|| text.to_owned()).ok_or_else(wrong)
}
