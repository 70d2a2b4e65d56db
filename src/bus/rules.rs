//! Rules on D-Bus: dictionaries with the keys of the configuration file.

use std::collections::HashMap;

use toml::{Table, Value};
use zbus::{OwnedVariant, Variant};

/// Converts a dictionary to a rule.
///
/// # Errors
/// Returns a sentence if a value has a type that no key of a rule has.
pub fn table(rule: &HashMap<String, OwnedVariant>) -> Result<Table, String> {
    rule.iter().map(|(key, value)| Ok((key.clone(), plain(key, value)?))).collect()
}

fn plain(key: &str, value: &Variant<'_>) -> Result<Value, String> {
    let number = |number: Option<i64>| number.map(Value::from).ok_or_else(|| format!("{key} is too large"));
    match value {
        Variant::Str(text) => Ok(text.as_str().into()),
        Variant::Bool(value) => Ok((*value).into()),
        Variant::U8(value) => number(Some((*value).into())),
        Variant::I16(value) => number(Some((*value).into())),
        Variant::U16(value) => number(Some((*value).into())),
        Variant::I32(value) => number(Some((*value).into())),
        Variant::U32(value) => number(Some((*value).into())),
        Variant::I64(value) => number(Some(*value)),
        Variant::U64(value) => number(i64::try_from(*value).ok()),
        Variant::Array(all) => Ok(Value::Array(all.iter().map(|value| plain(key, value)).collect::<Result<_, _>>()?)),
        _ => Err(format!("{key} must be a string, a number, true or false, or a list of strings or numbers")),
    }
}

/// Converts a rule and its origin to a dictionary.
pub fn present(keys: Table, origin: String) -> HashMap<String, OwnedVariant> {
    let value = |value| match value {
        Value::Integer(number) => Some(Variant::I64(number)),
        Value::Boolean(value) => Some(Variant::Bool(value)),
        Value::String(text) => Some(Variant::Str(text.into())),
        Value::Array(all) => {
            let texts: Vec<String> = all.iter().filter_map(|value| value.as_str().map(str::to_owned)).collect();
            Some(texts.into())
        }
        _ => None, // rules have no values of other types
    };
    let origin = ("origin".to_owned(), Value::from(origin));
    let all = keys.into_iter().chain([origin]).filter_map(|(key, given)| Some((key, value(given)?)));
    all.filter_map(|(key, value)| Some((key, OwnedVariant::try_from(value).ok()?))).collect()
}
