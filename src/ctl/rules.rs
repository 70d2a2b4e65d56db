//! `nvsharectl set-rule` and `unset-rule`, and the output of rules by `get`.

use std::collections::HashMap;

use toml::Value;
use zbus::{OwnedVariant, Variant};

use super::{CtlError, Target, block_on, password};
use crate::bus::SchedulerProxy;
use crate::config::rules::{LIMIT_KEYS, SUBJECT_KEYS};
use crate::identity::{printable, user_name};

/// Keys whose value is a list, separated by commas.
const LISTS: [&str; 1] = ["allowed-gpus"];

/// Parses `KEY=VALUE`. The value is a number, `true` or `false`. Any other value is a text.
pub fn parse_pair(text: &str) -> Result<(String, Value), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is not of the form KEY=VALUE"))?;
    if LISTS.contains(&key) {
        return Ok((key.to_owned(), value.split(',').map(str::trim).collect::<Vec<_>>().into()));
    }
    let plain = value.parse().map(Value::Integer).ok().or_else(|| value.parse().map(Value::Boolean).ok());
    Ok((key.to_owned(), plain.unwrap_or_else(|| value.into())))
}

/// Sets a rule. Without keys, removes the rule.
pub fn set(target: &Target, name: &str, keys: &[(String, Value)]) -> Result<(), CtlError> {
    block_on(async { call(&target.connect().await?, name, keys).await })
}

/// Sets or removes a rule through a connection to the scheduler.
pub(super) async fn call(scheduler: &SchedulerProxy<'_>, name: &str, keys: &[(String, Value)]) -> Result<(), CtlError> {
    let mut rule = HashMap::new();
    for (key, value) in keys {
        let value = match value {
            Value::Integer(number) => Variant::from(*number),
            Value::Boolean(value) => Variant::from(*value),
            Value::Array(all) => Variant::from(all.iter().filter_map(Value::as_str).collect::<Vec<_>>()),
            other => Variant::from(other.as_str().unwrap_or_default()),
        };
        if rule.insert(key.as_str(), value).is_some() {
            return Err(CtlError::Failed(format!("{key} is given twice")));
        }
    }
    Ok(password::call(scheduler, "SetRule", &(name, rule)).await?)
}

/// Formats rules like the configuration, each with its origin.
pub fn text(rules: Vec<HashMap<String, OwnedVariant>>) -> String {
    let one = |mut rule: HashMap<String, OwnedVariant>| {
        let origin = rule.remove("origin").and_then(|origin| String::try_from(origin).ok()).unwrap_or_default();
        let mut keys: Vec<(String, OwnedVariant)> = rule.into_iter().collect();
        // Unknown keys, which come from later versions, are printed first.
        let place = |key: &str| SUBJECT_KEYS.iter().chain(&LIMIT_KEYS).position(|known| *known == key);
        keys.sort_by_key(|(key, _)| (place(key), key.clone()));
        let lines = keys.into_iter().filter_map(|(key, value)| {
            let name = match &*value {
                Variant::I64(uid) if key == "user" => u32::try_from(*uid).ok().and_then(user_name),
                _ => None,
            };
            let name = name.map_or(String::new(), |name| format!(" # {}", printable(&name)));
            Some(format!("{key} = {}{name}\n", plain(&value)?))
        });
        format!("\n# {origin}\n[[rule]]\n{}", lines.collect::<String>())
    };
    rules.into_iter().map(one).collect()
}

/// Returns the name of a rule if the rule was set at run time.
pub(super) fn set_at_run_time(rule: &HashMap<String, OwnedVariant>) -> Option<String> {
    let text = |key: &str| rule.get(key).and_then(|value| <&str>::try_from(value).ok());
    (text("origin") == Some("set at run time")).then(|| text("name").unwrap_or_default().to_owned())
}

/// A rule with its keys, as JSON.
pub(super) fn json(rule: &HashMap<String, OwnedVariant>) -> serde_json::Value {
    let keys = rule.iter().filter_map(|(key, value)| Some((key.clone(), serde_json::to_value(plain(value)?).ok()?)));
    serde_json::Value::Object(keys.collect())
}

fn plain(value: &Variant<'_>) -> Option<Value> {
    match value {
        Variant::I64(number) => Some((*number).into()),
        Variant::Bool(value) => Some((*value).into()),
        Variant::Str(text) => Some(text.as_str().into()),
        Variant::Array(all) => Some(Value::Array(all.iter().map(plain).collect::<Option<_>>()?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pairs_value_type_follows_from_its_text() {
        for (text, key, value) in [
            ("weight=50", "weight", Value::Integer(50)),
            ("weight=idle", "weight", "idle".into()),
            ("interactive=true", "interactive", Value::Boolean(true)),
            ("memory-max=8G", "memory-max", "8G".into()),
            ("allowed-gpus=0, GPU-8a", "allowed-gpus", vec!["0", "GPU-8a"].into()),
            ("unit=a=b*.service", "unit", "a=b*.service".into()),
        ] {
            assert_eq!(parse_pair(text), Ok((key.to_owned(), value)), "{text}");
        }
        assert_eq!(parse_pair("weight"), Err("\"weight\" is not of the form KEY=VALUE".into()));
    }

    #[test]
    fn rules_are_printed_in_the_configurations_format() {
        let owned = |value: Variant<'static>| OwnedVariant::try_from(value).expect("a value");
        let rule = [
            ("origin", owned("nvshare.toml:3".into())),
            ("weight", owned(5i64.into())),
            ("user", owned(0i64.into())),
            ("name", owned("a \"b\"".into())),
            ("interactive", owned(true.into())),
        ];
        let rule = rule.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
        let expected =
            "\n# nvshare.toml:3\n[[rule]]\nname = 'a \"b\"'\nuser = 0 # root\nweight = 5\ninteractive = true\n";
        assert_eq!(text(vec![rule]), expected);
    }
}
