//! The levels of the log.

use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize};

use super::scalar::Scalar;

/// Verbosity of the log. Each level includes all levels that precede it in this list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

pub(super) fn read_log_level<'de, D: Deserializer<'de>>(from: D) -> Result<Option<LogLevel>, D::Error> {
    let allowed = "\"error\", \"warn\", \"info\", \"debug\" or \"trace\"";
    let given = match Scalar::read(from, "log-level", allowed)? {
        Scalar::Text(text) => match clap::ValueEnum::from_str(&text, false) {
            Ok(level) => return Ok(Some(level)),
            Err(_) => format!("{text:?}"),
        },
        Scalar::Number(number) => number.to_string(),
    };
    Err(de::Error::custom(format!("log-level cannot be {given}: {allowed} are allowed")))
}
