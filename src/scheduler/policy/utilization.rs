//! How much of the time a client keeps a GPU busy, as the client reports it. A client can measure that only while it is the only
//! holder. A report is believed for a while.

use std::time::Duration;

/// Of a GPU, in thousandths, what clients that run together may fill: one of them may fill it, beside others that hardly do.
pub(crate) const FULL: u32 = 1100;
/// What a client that says nothing is taken to fill.
const UNKNOWN: u32 = 1000;
/// How long clients run together before they are asked again: the first time, twice as long after each time that they said
/// the same, and at most.
const TOGETHER: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(80));
/// What is said differs by no more, in thousandths, if it is the same.
const SAME: u32 = 150;
/// A turn that is long enough for a client to say how full it keeps the GPU.
pub(crate) const MEASURED: Duration = Duration::from_millis(150);

/// How full a client keeps a GPU, in thousandths.
#[derive(Debug, Clone, Copy, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Utilization {
    said: Option<u32>,
    /// What it had said before, and for how long that was believed.
    before: Option<(u32, Duration)>,
    /// It was alone, and waited for, for long enough, and said nothing.
    silent: bool,
    /// It had no more work before it could say anything.
    brief: bool,
}

impl Utilization {
    pub fn permille(self) -> Option<u32> {
        self.said.or(self.silent.then_some(UNKNOWN))
    }

    /// Whether it wants nobody beside it, and not for what it does there: it is no program whose work can be told.
    pub fn is_for_itself(self) -> bool {
        self.said.is_some_and(|said| said > FULL)
    }

    /// How long it is believed.
    pub fn believed(self) -> Duration {
        let same = self.before.filter(|(before, _)| self.permille().is_some_and(|said| said.abs_diff(*before) <= SAME));
        same.map_or(TOGETHER.0, |(_, believed)| (believed * 2).min(TOGETHER.1))
    }

    /// What was said is believed no longer.
    pub fn forget(&mut self) {
        let before = self.said.map(|said| (said, self.believed())).or(self.before);
        *self = Self { before, ..Self::default() };
    }

    /// Whether a turn that is long enough would tell.
    pub fn is_open(self) -> bool {
        self.permille().is_none() && !self.brief
    }

    /// A turn ended, after somebody had waited so long for it. `idle`: because it had no more work.
    pub fn turn_ended(&mut self, waited: Duration, idle: bool) {
        self.silent |= waited >= MEASURED;
        self.brief = idle;
    }

    /// The client reports it.
    pub fn reported(&mut self, permille: u32) {
        *self = Self { said: Some(permille), before: self.before, ..Self::default() };
    }
}
