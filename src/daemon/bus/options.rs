//! The options of methods: dictionaries that only admit known keys.

use std::collections::HashMap;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use zbus::{OwnedVariant, fdo};

use crate::bus::rules;
use crate::config::settings;
use crate::daemon::core::describe::{MOST_PROGRAMS, Selection};
use crate::recorder::follow;

/// The period of a live timeline in seconds if the caller names none.
const DEFAULT_LAST: u32 = 60;

/// Options of a method that has none.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoOptions {}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct BundleOptions {
    /// The bundle has programs' names and command lines.
    pub command_lines: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct HibernationOptions {
    /// The restore closes network connections.
    pub close_connections: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RoomOptions {
    /// Seconds.
    r#for: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TimelineOptions {
    gpu: Option<String>,
    /// Seconds.
    last: Option<u32>,
}

/// Words in serde's errors, and the words for callers.
const WORDS: [(&str, &str); 3] = [
    ("unknown field", "unknown option"),
    ("there are no fields", "none is allowed"),
    ("expected u32", "expected a whole number"),
];

fn wrong(text: impl Into<String>) -> fdo::Error {
    fdo::Error::InvalidArgs(text.into())
}

/// Parses options.
pub fn parse<T: DeserializeOwned>(options: &HashMap<String, OwnedVariant>) -> fdo::Result<T> {
    let table = rules::table(options).map_err(wrong)?;
    table.try_into().map_err(|e: toml::de::Error| {
        let mut text = e.to_string().trim().replace('\n', " ");
        for (serde, ours) in WORDS {
            text = text.replace(serde, ours);
        }
        wrong(format!("wrong options: {text}"))
    })
}

/// Parses the options of a room. Returns the time for which the room is kept after each renewal.
pub fn room(options: &HashMap<String, OwnedVariant>) -> fdo::Result<Duration> {
    let lasts = parse::<RoomOptions>(options)?.r#for;
    let lasts = lasts.map_or(settings::DEFAULT_ROOM, |seconds| Duration::from_secs(seconds.into()));
    settings::room(lasts).map_err(wrong)
}

/// Parses the options of a description.
pub fn selection(options: &HashMap<String, OwnedVariant>) -> fdo::Result<Selection> {
    match parse(options)? {
        Selection { count, .. } if count > MOST_PROGRAMS => {
            Err(wrong(format!("the option count cannot be {count}: at most {MOST_PROGRAMS} is allowed")))
        }
        selection => Ok(selection),
    }
}

/// Parses the options of a live timeline. Returns the GPU, and the period before now.
pub fn live_timeline(options: &HashMap<String, OwnedVariant>) -> fdo::Result<(Option<String>, Duration)> {
    let TimelineOptions { gpu, last } = parse(options)?;
    let last = Duration::from_secs(last.unwrap_or(DEFAULT_LAST).into());
    if last.is_zero() || last > follow::KEPT {
        let most = follow::KEPT.as_secs();
        return Err(wrong(format!("the option last cannot be {} seconds: 1 to {most} are allowed", last.as_secs())));
    }
    Ok((gpu, last))
}
