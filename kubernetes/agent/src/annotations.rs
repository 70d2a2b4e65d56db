//! Converts a pod's annotations to a rule. The scheduler checks the values.

use std::collections::BTreeMap;

pub use nvshare_kubernetes::scheduler::variants;
use toml::Value;

use crate::permissions::{KEYS, Permissions};

/// The prefix of annotations for nvshare.
pub const PREFIX: &str = "nvshare.com/";

/// Maximum length of a value, in bytes. The longest useful value is a list of all slices of eight
/// GPUs by UUID, which has 2300 bytes.
const LONGEST: usize = 4096;

/// The rule that a pod requests, and a sentence about each ignored annotation.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PodRule {
    pub keys: BTreeMap<&'static str, Value>,
    /// Keys that come from the namespace's defaults rather than from the pod.
    pub defaults: Vec<&'static str>,
    pub left_out: Vec<String>,
}

/// Reads a pod's annotations. The keys of `annotations` are names without [`PREFIX`].
pub fn read(namespace: &str, annotations: &BTreeMap<String, String>, permissions: &Permissions) -> PodRule {
    let mut rule = PodRule::default();
    for (name, text) in annotations {
        match read_one(namespace, name, text, permissions) {
            Ok((key, value)) => drop(rule.keys.insert(key, value)),
            Err(why) => rule.left_out.push(format!("ignoring its annotation {PREFIX}{name}: {why}")),
        }
    }
    if let Some(weight) = &permissions.weight
        && !rule.keys.contains_key("weight")
    {
        rule.keys.insert("weight", weight.clone());
        rule.defaults.push("weight");
    }
    rule
}

fn read_one(
    namespace: &str,
    name: &str,
    text: &str,
    permissions: &Permissions,
) -> Result<(&'static str, Value), String> {
    let Some(key) = KEYS.into_iter().find(|key| *key == name) else {
        return Err(format!("unknown key. The keys are {}", KEYS.join(", ")));
    };
    if text.len() > LONGEST {
        return Err(format!("its value has {} bytes. At most {LONGEST} are allowed", text.len()));
    }
    let text = text.trim();
    // D-Bus texts must not contain NUL: the scheduler would refuse the whole message.
    if text.chars().any(char::is_control) {
        return Err("its value is not a single line of text".into());
    }
    let value = value(namespace, key, text);
    permissions.check(namespace, key, &value)?;
    Ok((key, value))
}

/// Converts a text to a rule's value. An invalid value stays a text, and the scheduler reports an
/// error about it.
fn value(namespace: &str, key: &str, text: &str) -> Value {
    match key {
        "weight" | "priority" => text.parse::<i64>().map_or_else(|_| text.into(), Value::Integer),
        "interactive" | "gang" | "fabric-handles" | "managed-beyond-gpu" => {
            text.parse::<bool>().map_or_else(|_| text.into(), Value::Boolean)
        }
        "allowed-gpus" => text.split(',').map(str::trim).filter(|gpu| !gpu.is_empty()).collect::<Vec<_>>().into(),
        // A label is prefixed with its namespace. A pod can therefore not join or obstruct another
        // namespace's pods by guessing their labels.
        "affinity" | "anti-affinity" | "exclusion" if !text.is_empty() => format!("{namespace}/{text}").into(),
        _ => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(annotations: &[(&str, &str)]) -> PodRule {
        let mut permissions = Permissions::default();
        permissions.may_set.extend(KEYS);
        let annotations = annotations.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        read("team-a", &annotations, &permissions)
    }

    #[test]
    fn annotation_text_becomes_a_typed_value() {
        for (key, text, expected) in [
            ("memory-max", "8G", Value::from("8G")),
            ("memory-max", "8589934592", "8589934592".into()),
            ("on-memory-full", " wait\n", "wait".into()),
            ("weight", "50", 50.into()),
            ("weight", "idle", "idle".into()),
            ("weight", "5.5", "5.5".into()),
            ("priority", "-7", (-7).into()),
            ("interactive", "true", true.into()),
            ("interactive", "yes", "yes".into()),
            ("gang", "false", false.into()),
            ("allowed-gpus", "GPU-8a6c, 1,", vec!["GPU-8a6c", "1"].into()),
            ("allowed-gpus", "", Value::Array(Vec::new())),
            ("time-min", "20%", "20%".into()),
            ("affinity", "train", "team-a/train".into()),
            ("exclusion", "", "".into()),
        ] {
            let rule = read_all(&[(key, text)]);
            assert_eq!(rule.keys.get(key), Some(&expected), "{key} {text:?}");
            assert_eq!(rule.left_out, Vec::<String>::new(), "{key} {text:?}");
        }
    }

    #[test]
    fn invalid_annotations_are_ignored_and_valid_annotations_apply() {
        let long = "x".repeat(5000);
        let annotations =
            [("memory-max", "8G"), ("pod", "*"), ("colour", "red"), ("affinity", &long), ("exclusion", "a\u{0}b")];
        let rule = read_all(&annotations);
        assert_eq!(rule.keys, BTreeMap::from([("memory-max", Value::from("8G"))]));
        let said = rule.left_out.join("\n");
        assert!(said.contains("nvshare.com/exclusion: its value is not a single line of text"), "{said}");
        assert!(said.contains("nvshare.com/affinity: its value has 5000 bytes"), "{said}");
        assert!(said.contains("nvshare.com/colour: unknown key. The keys are memory-max,"), "{said}");
        assert!(said.contains("nvshare.com/pod: unknown key"), "{said}");

        let annotations = BTreeMap::from([("time-min".to_owned(), "50%".to_owned())]);
        let rule = read("team-a", &annotations, &Permissions::default());
        assert_eq!(
            rule.left_out,
            ["ignoring its annotation nvshare.com/time-min: pods of namespace team-a may not set it"]
        );
    }

    #[test]
    fn a_pod_without_a_weight_gets_the_namespaces_weight() {
        let permissions = Permissions { weight: Some(100.into()), ..Permissions::default() };
        for (wished, expected, defaults) in [("50", 50, 0), ("500", 100, 1)] {
            let annotations = BTreeMap::from([("weight".to_owned(), wished.to_owned())]);
            let rule = read("team-a", &annotations, &permissions);
            assert_eq!(rule.keys.get("weight"), Some(&Value::Integer(expected)), "{wished}");
            assert_eq!(rule.defaults.len(), defaults, "{wished}");
        }
        assert_eq!(read("team-a", &BTreeMap::new(), &permissions).keys.len(), 1);
    }

    #[test]
    fn rule_values_keep_their_types_on_the_bus() {
        let rule = read_all(&[("weight", "50"), ("gang", "true"), ("allowed-gpus", "0,1"), ("time-max", "20%")]);
        let sent = variants(&rule.keys);
        let text = |key: &str| format!("{:?}", **sent.get(key).expect("a key"));
        assert_eq!(sent.len(), 4);
        assert!(text("weight").contains("I64(50)") && text("gang").contains("Bool(true)"), "{sent:?}");
        assert!(text("time-max").contains("20%") && text("allowed-gpus").contains('1'), "{sent:?}");
    }
}
