//! Faults of GPUs. From the driver's events and its answers to queries, this module derives when a
//! GPU becomes unhealthy, and when it is healthy again. The daemon and nvshare-device-plugin use
//! the module. The module does no I/O: `nvml` provides the data.

pub mod nvml;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// XIDs that result from mistakes of programs and do not indicate a fault of the GPU: graphics
/// engine exception, MMU fault, channel stopped because of another error, preemptive cleanup, video
/// processor exception, context switch timeout.
pub const PROGRAMS_XIDS: [u64; 6] = [13, 31, 43, 45, 68, 109];

/// Duration after an event for which a "no action" recommendation is ignored, because the driver
/// may have computed it before the event.
pub const SETTLING: Duration = Duration::from_secs(2);

/// An event of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    Xid(u64),
    DoubleBitEcc,
}

/// The action that the driver recommends for a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// The driver gives no recommendations.
    Unknown,
    Nothing,
    /// The number of an action: `NVML_GPU_RECOVERY_ACTION_*`.
    Action(u64),
}

/// The result of querying a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FaultAnswer {
    /// The GPU answers.
    There(Advice),
    /// The GPU does not answer. The text is the reason.
    Silent(String),
    /// The GPU or the driver has disappeared. The text is the reason.
    Lost(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Fault {
    what: String,
    since: Instant,
}

/// The faults of GPUs, by UUID. A MIG slice has the faults of its GPU.
#[derive(Debug, Default)]
pub struct Faults {
    faults: BTreeMap<String, Fault>,
    lost: BTreeSet<String>,
}

impl Faults {
    /// Handles an event. Returns true if the event makes its GPU unhealthy.
    pub fn happened(&mut self, gpu: &str, event: Event, ignored: &BTreeSet<u64>, now: Instant) -> bool {
        let what = match event {
            Event::Xid(xid) if PROGRAMS_XIDS.contains(&xid) || ignored.contains(&xid) => return false,
            Event::Xid(xid) => format!("the driver reported XID {xid}"),
            Event::DoubleBitEcc => "the driver reported an ECC error of two bits".to_owned(),
        };
        self.faults.insert(gpu.to_owned(), Fault { what, since: now });
        true
    }

    /// Marks faulty GPUs that are missing from `gpus` as lost. A lost GPU must answer again before
    /// its fault is cleared.
    pub fn only_there(&mut self, gpus: &BTreeSet<String>) {
        self.lost.extend(self.faults.keys().filter(|gpu| !gpus.contains(*gpu)).cloned());
    }

    /// Handles the answer to a query. Returns the reason if the GPU is unhealthy.
    ///
    /// A fault ends when a query at least [`SETTLING`] after the event returns the recommendation
    /// "no action". A fault also ends when a lost GPU answers again, because that requires a reset
    /// or a reload of the driver. If the driver gives no recommendations, only the return of a lost
    /// GPU ends a fault.
    pub fn answered(&mut self, gpu: &str, answer: &FaultAnswer, now: Instant) -> Option<String> {
        let advice = match answer {
            FaultAnswer::Silent(why) => return Some(format!("NVML cannot read it: {why}")),
            FaultAnswer::Lost(why) => {
                self.lost.insert(gpu.to_owned());
                return Some(format!("NVML cannot reach it: {why}"));
            }
            FaultAnswer::There(advice) => *advice,
        };
        if self.lost.remove(gpu) {
            self.faults.remove(gpu);
        }
        let is_settled =
            self.faults.get(gpu).is_some_and(|fault| now.saturating_duration_since(fault.since) >= SETTLING);
        match advice {
            Advice::Action(action) => {
                return Some(format!("the driver reports that the GPU needs {}", action_name(action)));
            }
            Advice::Nothing if is_settled => drop(self.faults.remove(gpu)),
            Advice::Nothing | Advice::Unknown => {}
        }
        self.faults.get(gpu).map(|fault| fault.what.clone())
    }
}

/// Returns the name of an action by its number in `nvml.h`.
fn action_name(action: u64) -> String {
    match action {
        1 => "a reset".into(),
        2 => "a reboot of the node".into(),
        3 => "its peer-to-peer traffic to stop".into(),
        4 => "to be drained and reset".into(),
        5 => "a reset of its bus".into(),
        other => format!("recovery action {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: &str = "GPU-a";

    fn there(advice: Advice) -> FaultAnswer {
        FaultAnswer::There(advice)
    }

    #[test]
    fn xids_caused_by_programs_are_no_faults() {
        let (mut faults, now) = (Faults::default(), Instant::now());
        for xid in PROGRAMS_XIDS.into_iter().chain([94]) {
            assert!(!faults.happened(GPU, Event::Xid(xid), &BTreeSet::from([94]), now), "{xid}");
        }
        assert_eq!(faults.answered(GPU, &there(Advice::Unknown), now), None);
    }

    #[test]
    fn a_fault_lasts_until_the_driver_clears_it() {
        let (mut faults, now) = (Faults::default(), Instant::now());
        for (event, said) in [(Event::Xid(79), "XID 79"), (Event::DoubleBitEcc, "ECC error of two bits")] {
            assert!(faults.happened(GPU, event, &BTreeSet::new(), now));
            assert!(faults.answered(GPU, &there(Advice::Unknown), now).is_some_and(|why| why.contains(said)));
            // The driver may have computed an immediate recommendation before the event.
            assert!(faults.answered(GPU, &there(Advice::Nothing), now).is_some());
            let asks = faults.answered(GPU, &there(Advice::Action(1)), now + SETTLING);
            assert_eq!(asks.as_deref(), Some("the driver reports that the GPU needs a reset"));
            assert_eq!(faults.answered(GPU, &there(Advice::Nothing), now + SETTLING), None);
        }
    }

    #[test]
    fn without_driver_advice_a_fault_lasts_until_the_gpu_was_absent() {
        let (mut faults, mut now) = (Faults::default(), Instant::now());
        faults.happened(GPU, Event::Xid(48), &BTreeSet::new(), now);
        now += Duration::from_secs(86_400);
        assert!(faults.answered(GPU, &there(Advice::Unknown), now).is_some());
        let silent = faults.answered(GPU, &FaultAnswer::Silent("unknown error".into()), now);
        assert_eq!(silent.as_deref(), Some("NVML cannot read it: unknown error"));
        assert!(faults.answered(GPU, &there(Advice::Unknown), now).is_some(), "that was no reset");
        let lost = faults.answered(GPU, &FaultAnswer::Lost("fallen off the bus".into()), now);
        assert_eq!(lost.as_deref(), Some("NVML cannot reach it: fallen off the bus"));
        assert_eq!(faults.answered(GPU, &there(Advice::Unknown), now), None);
        faults.happened(GPU, Event::Xid(48), &BTreeSet::new(), now);
        faults.only_there(&BTreeSet::from([GPU.to_owned()]));
        assert!(faults.answered(GPU, &there(Advice::Unknown), now).is_some(), "it was there");
        faults.only_there(&BTreeSet::new());
        assert_eq!(faults.answered(GPU, &there(Advice::Unknown), now), None);
    }

    #[test]
    fn a_recommended_recovery_action_makes_a_gpu_unhealthy() {
        let mut faults = Faults::default();
        for (action, said) in [(1, "a reset"), (2, "a reboot"), (4, "drained"), (9, "recovery action 9")] {
            let why = faults.answered(GPU, &there(Advice::Action(action)), Instant::now());
            assert!(why.is_some_and(|why| why.contains(said)), "{action}");
        }
    }
}
