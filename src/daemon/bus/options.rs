//! The options of methods: dictionaries that only admit known keys.

use std::collections::HashMap;
use std::time::Duration;

use zbus::{OwnedVariant, Variant, fdo};

use crate::config::settings;
use crate::daemon::core::describe::{MOST_PROGRAMS, Order, Selection};
use crate::recorder::follow;

/// The period of a live timeline if the caller names none.
const DEFAULT_LAST: Duration = Duration::from_secs(60);

fn wrong(text: impl Into<String>) -> fdo::Error {
    fdo::Error::InvalidArgs(text.into())
}

/// Parses options. Only the option `allowed` may be given. Returns true if it is set.
fn flag(options: &HashMap<String, OwnedVariant>, allowed: &str) -> fdo::Result<bool> {
    let mut is_set = false;
    for (name, value) in options {
        match &**value {
            _ if name != allowed => return Err(wrong(format!("unknown option {name:?}: only {allowed:?} is allowed"))),
            Variant::Bool(value) => is_set = *value,
            _ => return Err(wrong(format!("the option {allowed} must be true or false"))),
        }
    }
    Ok(is_set)
}

/// Parses the options of a debug bundle. Returns true if programs' names and command lines are
/// requested.
pub fn debug(options: &HashMap<String, OwnedVariant>) -> fdo::Result<bool> {
    flag(options, "command-lines")
}

/// Parses the options of a hibernation. Returns true if network connections are closed.
pub fn hibernation(options: &HashMap<String, OwnedVariant>) -> fdo::Result<bool> {
    flag(options, "close-connections")
}

/// Parses the options of a room. Returns the time for which the room is kept after each renewal.
pub fn room(options: &HashMap<String, OwnedVariant>) -> fdo::Result<Duration> {
    let mut lasts = settings::DEFAULT_ROOM;
    for (name, value) in options {
        match (name.as_str(), &**value) {
            ("for", Variant::U32(seconds)) => lasts = Duration::from_secs((*seconds).into()),
            ("for", _) => return Err(wrong("the option for must be a number of seconds (type u)")),
            _ => return Err(wrong(format!("unknown option {name:?}: only \"for\" is allowed"))),
        }
    }
    settings::room(lasts).map_err(fdo::Error::InvalidArgs)
}

/// Parses the options of a description.
pub fn selection(options: &HashMap<String, OwnedVariant>) -> fdo::Result<Selection> {
    let mut selection = Selection { count: MOST_PROGRAMS, ..Selection::default() };
    for (name, value) in options {
        match (name.as_str(), &**value) {
            ("gpu", Variant::Str(gpu)) => selection.gpu = Some(gpu.to_string()),
            ("find", Variant::Str(text)) => selection.find = text.to_string(),
            ("order", Variant::Str(order)) => selection.order = Order::parse(order).map_err(wrong)?,
            ("first", Variant::U32(first)) => selection.first = *first,
            ("count", Variant::U32(count)) if *count <= MOST_PROGRAMS => selection.count = *count,
            ("count", Variant::U32(count)) => {
                return Err(wrong(format!("the option count cannot be {count}: at most {MOST_PROGRAMS} is allowed")));
            }
            ("pid", Variant::U32(pid)) => selection.pid = Some(*pid),
            ("gpu" | "find" | "order", _) => return Err(wrong(format!("the option {name} must be a text (type s)"))),
            ("first" | "count" | "pid", _) => {
                return Err(wrong(format!("the option {name} must be a number (type u)")));
            }
            _ => {
                return Err(wrong(format!(
                    "unknown option {name:?}: gpu, find, order, first, count and pid are allowed"
                )));
            }
        }
    }
    Ok(selection)
}

/// Parses the options of a live timeline. Returns the GPU, and the period before now.
pub fn live_timeline(options: &HashMap<String, OwnedVariant>) -> fdo::Result<(Option<String>, Duration)> {
    let (mut gpu, mut last) = (None, DEFAULT_LAST);
    for (name, value) in options {
        match (name.as_str(), &**value) {
            ("gpu", Variant::Str(name)) => gpu = Some(name.to_string()),
            ("gpu", _) => return Err(wrong("the option gpu must be a text (type s)")),
            ("last", Variant::U32(seconds)) => last = Duration::from_secs((*seconds).into()),
            ("last", _) => return Err(wrong("the option last must be a number of seconds (type u)")),
            _ => return Err(wrong(format!("unknown option {name:?}: gpu and last are allowed"))),
        }
    }
    if last.is_zero() || last > follow::KEPT {
        let most = follow::KEPT.as_secs();
        return Err(wrong(format!("the option last cannot be {} seconds: 1 to {most} are allowed", last.as_secs())));
    }
    Ok((gpu, last))
}
