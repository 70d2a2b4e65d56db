//! Decides when NVML is opened and closed. NVML is open while it is needed, closed after an idle
//! period, and retried after a failure. The caller passes the time.

use std::time::Duration;

use crate::scheduler::Time;

/// Time without a query after which NVML is closed. A scheduler with clients sends a query every five
/// seconds.
pub const IDLE: Duration = Duration::from_secs(30);
/// Interval of the checks for GPUs that appeared or disappeared.
pub const LOOK: Duration = Duration::from_secs(5);
/// The first and the longest wait before NVML is retried. The wait doubles with each consecutive
/// failure.
pub const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The state that decides when NVML is opened and closed.
#[derive(Debug, Default)]
pub struct Schedule {
    is_open: bool,
    /// The time of the last query.
    asked: Time,
    /// NVML stays closed until this time or until a client attaches. An administrator requested the
    /// release, for work on the driver.
    released_until: Option<Time>,
    /// Time to open NVML. `None` if NVML is open or not needed.
    open: Option<Time>,
    /// The wait after the last failure. Zero if NVML has worked since then.
    waited: Duration,
    /// Time of the next check for GPUs that appeared or disappeared.
    look: Time,
}

/// A due action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// Check whether GPUs appeared or disappeared.
    Look,
    /// Try to open NVML.
    Open,
    Close,
    /// The release that an administrator requested has expired.
    ReleaseEnds,
}

impl Schedule {
    /// Opens NVML immediately, to list the GPUs.
    pub fn new(now: Time) -> Self {
        Self { asked: now, open: Some(now), look: now + LOOK, ..Self::default() }
    }

    /// The next due action, which the caller must carry out.
    pub fn due(&mut self, now: Time) -> Option<Due> {
        if self.released_until.is_some_and(|until| until <= now) {
            self.released_until = None;
            return Some(Due::ReleaseEnds);
        }
        if self.look <= now {
            self.look = now + LOOK;
            return Some(Due::Look);
        }
        if self.is_open && self.asked + IDLE <= now {
            return Some(Due::Close);
        }
        let is_due = self.open.is_some_and(|at| at <= now);
        (is_due && self.released_until.is_none()).then_some(Due::Open)
    }

    /// The time of the next action.
    pub fn next(&self) -> Time {
        let idle = self.is_open.then_some(self.asked + IDLE);
        let open = self.open.filter(|_| self.released_until.is_none());
        [idle, open, self.released_until].into_iter().flatten().fold(self.look, Time::min)
    }

    /// Records a query. Opens NVML for the query, unless NVML is released or waits to be retried.
    pub fn ask(&mut self, now: Time) {
        self.asked = now;
        if !self.is_open && self.open.is_none() {
            self.open = Some(now);
        }
    }

    /// Handles GPUs that appeared or disappeared. NVML is opened even if the wait after a failure has not
    /// ended. While NVML is released, it stays closed.
    pub fn need(&mut self, now: Time) {
        (self.asked, self.waited) = (now, Duration::ZERO);
        if !self.is_open {
            self.open = Some(now);
        }
    }

    /// Handles a client that attaches. Returns true if the client ends a release.
    pub fn attach(&mut self, now: Time) -> bool {
        self.ask(now);
        self.released_until.take().is_some()
    }

    /// Records that NVML was opened. The idle time starts again.
    pub fn opened(&mut self, now: Time) {
        (self.is_open, self.open, self.asked) = (true, None, now);
    }

    /// Records that calls of NVML succeed.
    pub fn works(&mut self) {
        self.waited = Duration::ZERO;
    }

    pub fn closed(&mut self) {
        (self.is_open, self.open) = (false, None);
    }

    /// Records that NVML failed. NVML is retried later.
    pub fn failed(&mut self, now: Time) {
        self.waited = (self.waited * 2).clamp(RETRY.0, RETRY.1);
        (self.is_open, self.open) = (false, Some(now + self.waited));
    }

    /// Records that the driver is released for at most `lasts`.
    pub fn release(&mut self, now: Time, lasts: Duration) {
        self.closed();
        self.released_until = Some(now + lasts);
    }

    pub fn is_released(&self) -> bool {
        self.released_until.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Time = Duration::from_secs(1000);

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// All actions due until `end`, with their times since `START`. Leaves out checks for GPUs.
    fn until(schedule: &mut Schedule, end: Time) -> Vec<(Duration, Due)> {
        let mut all = Vec::new();
        loop {
            let at = schedule.next();
            if at > end {
                return all;
            }
            while let Some(due) = schedule.due(at) {
                match due {
                    Due::Look => continue,
                    Due::Close => schedule.closed(),
                    Due::Open | Due::ReleaseEnds => {}
                }
                all.push((at - START, due));
                if due == Due::Open {
                    schedule.failed(at);
                }
            }
        }
    }

    #[test]
    fn failed_nvml_initialization_is_retried_with_backoff() {
        let mut schedule = Schedule::new(START);
        let tried: Vec<u64> = until(&mut schedule, START + s(250)).iter().map(|(at, _)| at.as_secs()).collect();
        assert_eq!(tried, [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]);
        // A query does not shorten the wait, but a change of the driver's files does.
        schedule.ask(START + s(251));
        assert_eq!(until(&mut schedule, START + s(252)), []);
        schedule.need(START + s(252));
        assert_eq!(until(&mut schedule, START + s(254)), [(s(252), Due::Open), (s(253), Due::Open)]);
    }

    #[test]
    fn nvml_is_closed_when_unused_and_reopened_on_demand() {
        let mut schedule = Schedule::new(START);
        assert_eq!(schedule.due(START), Some(Due::Open));
        schedule.opened(START);
        for at in [5, 10, 15, 20] {
            schedule.ask(START + s(at));
        }
        assert_eq!(until(&mut schedule, START + s(300)), [(s(50), Due::Close)]);
        schedule.ask(START + s(300));
        assert_eq!(schedule.due(START + s(300)), Some(Due::Open));
    }

    #[test]
    fn released_nvml_stays_closed_until_a_client_attaches_or_it_expires() {
        for attaches in [false, true] {
            let mut schedule = Schedule::new(START);
            schedule.opened(START);
            schedule.release(START, s(60));
            schedule.ask(START + s(1));
            schedule.need(START + s(2));
            assert_eq!(until(&mut schedule, START + s(59)), []);
            let at = if attaches { s(59) } else { s(60) };
            if attaches {
                assert!(schedule.attach(START + at));
            }
            let expected = [(s(60), Due::ReleaseEnds)].into_iter().filter(|_| !attaches).collect::<Vec<_>>();
            let mut all = Vec::new();
            while let Some(due) = schedule.due(START + at) {
                if due != Due::Look {
                    all.push((at, due));
                }
                if due == Due::Open {
                    schedule.opened(START + at);
                }
            }
            assert_eq!(all, [expected, vec![(at, Due::Open)]].concat());
            assert!(!schedule.is_released());
        }
    }

    #[test]
    fn driver_files_are_checked_every_few_seconds() {
        let mut schedule = Schedule::new(START);
        schedule.closed();
        let mut looks = Vec::new();
        while looks.len() < 3 {
            let at = schedule.next();
            assert_eq!(schedule.due(at), Some(Due::Look));
            looks.push(at - START);
        }
        assert_eq!(looks, [s(5), s(10), s(15)]);
    }
}
