//! `[swap]`: the host memory that all programs together may use for swapped-out GPU memory.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{self, Deserializer};

use super::scalar::Scalar;
use super::units;

/// The limit of swapped-out memory for all programs together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwapMax {
    None,
    Bytes(u64),
    /// A percentage of the host's memory. For swap files, a percentage of the file system.
    Percent(u8),
}

impl SwapMax {
    pub fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("\"{text}\" is not allowed: write \"80%\", a size like \"64G\", or \"none\"");
        if text == "none" {
            return Ok(Self::None);
        }
        match text.strip_suffix('%') {
            Some(number) => {
                number.trim().parse().ok().filter(|percent| *percent <= 100).map(Self::Percent).ok_or_else(wrong)
            }
            None => units::parse_size(text).map(Self::Bytes).map_err(|_| wrong()),
        }
    }

    /// Returns the limit in bytes on a host with `total` bytes of memory. Without a limit, returns
    /// `u64::MAX`.
    pub fn bytes(self, total: u64) -> u64 {
        match self {
            Self::None => u64::MAX,
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => (u128::from(total) * u128::from(percent) / 100) as u64,
        }
    }
}

impl fmt::Display for SwapMax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Bytes(bytes) => f.write_str(&units::size(*bytes)),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

#[derive(Debug, Clone, Deserialize, Default)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct SwapSection {
    #[serde(default, deserialize_with = "read_max")]
    pub max: Option<SwapMax>,
    #[serde(default, deserialize_with = "read_ahead")]
    pub ahead: Option<SwapMax>,
    /// `Some(None)` disables swap files.
    #[serde(default, deserialize_with = "read_file")]
    pub file: Option<Option<PathBuf>>,
    #[serde(default, deserialize_with = "read_file_max")]
    pub file_max: Option<SwapMax>,
}

fn read_file<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Option<PathBuf>>, D::Error> {
    let path = String::deserialize(from)?;
    match path.as_str() {
        "" => Ok(Some(None)),
        path if Path::new(path).is_absolute() => Ok(Some(Some(path.into()))),
        _ => Err(de::Error::custom(format!(
            "swap.file: \"{path}\" is not allowed: write the absolute path of a directory, such as \"/var/lib/nvshare/swap\", or \"\" for no files"
        ))),
    }
}

/// Reads `file-max`. A percentage refers to the size of the file system, not to the host's memory.
fn read_file_max<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SwapMax>, D::Error> {
    read(from, "swap.file-max")
}

fn read_max<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SwapMax>, D::Error> {
    read(from, "swap.max")
}

/// Reads `ahead`. Here, "none" means no memory rather than no limit.
fn read_ahead<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SwapMax>, D::Error> {
    let ahead = read(from, "swap.ahead")?;
    Ok(ahead.map(|most| if most == SwapMax::None { SwapMax::Bytes(0) } else { most }))
}

fn read<'de, D: Deserializer<'de>>(from: D, key: &'static str) -> Result<Option<SwapMax>, D::Error> {
    match Scalar::read(from, key, "\"80%\", a size like \"64G\", or \"none\"")? {
        Scalar::Number(bytes) => Ok(SwapMax::Bytes(bytes)),
        Scalar::Text(text) => SwapMax::parse(&text),
    }
    .map(Some)
    .map_err(|e| de::Error::custom(format!("{key}: {e}")))
}
