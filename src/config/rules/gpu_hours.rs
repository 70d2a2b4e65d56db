//! `gpu-hours`: the GPU time that a group of programs may use in a day, week or month. A group that
//! has used its time runs only after all other programs.

use std::fmt;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{self, Deserializer};

use crate::config::units;

/// A period that ends at the present time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Window {
    Day,
    Week,
    Month,
}

impl Window {
    const ALL: [Self; 3] = [Self::Day, Self::Week, Self::Month];
    /// The longest of the windows.
    pub const LONGEST: Duration = Self::Month.time();

    fn name(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
        }
    }

    pub const fn time(self) -> Duration {
        let days = match self {
            Self::Day => 1,
            Self::Week => 7,
            Self::Month => 30,
        };
        Duration::from_secs(days * 24 * 3600)
    }
}

/// GPU time within a window, summed over all GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuHours {
    /// GPU time in whole seconds.
    pub time: Duration,
    pub window: Window,
}

/// The largest valid time: a thousand GPUs for 30 days.
const MOST: Duration = Duration::from_secs(1000 * 30 * 24 * 3600);

impl fmt::Display for GpuHours {
    /// Formats the value in the syntax of the configuration: `20h/week`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.time.as_secs();
        let (number, unit) = match (seconds % 3600, seconds % 60) {
            (0, _) => (seconds / 3600, "h"),
            (_, 0) => (seconds / 60, "min"),
            _ => (seconds, "s"),
        };
        write!(f, "{number}{unit}/{}", self.window.name())
    }
}

impl<'de> Deserialize<'de> for GpuHours {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let read = || {
            let (time, per) = text.split_once('/')?;
            let window = Window::ALL.into_iter().find(|window| window.name() == per.trim())?;
            let time = units::parse_duration(time).ok()?;
            let is_allowed = time.subsec_nanos() == 0 && (Duration::from_secs(1)..=MOST).contains(&time);
            is_allowed.then_some(Self { time, window })
        };
        read().ok_or_else(|| {
            de::Error::custom(format!(
                "gpu-hours cannot be {text:?}: a time in whole seconds per \"day\", \"week\" or \"month\" is allowed, like \"20h/week\""
            ))
        })
    }
}
