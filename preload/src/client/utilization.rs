//! Utilization: how busy this client keeps a GPU while it holds the lock. The scheduler uses the
//! utilization to decide which programs run at the same time.
//!
//! Every few milliseconds, the client records a fence behind the submitted work. If the fence is done
//! almost immediately, the GPU was about to run out of work: the program launches more slowly than the
//! GPU works. Otherwise work was queued. Rejected: testing whether the GPU is idle at one moment. A
//! launch takes some microseconds to reach the GPU, so the queue is hardly ever empty in either case.
//! Samples are taken only while another client waits for the lock, because the scheduler needs the
//! result only then.

use crate::{connection, gpu::Gpu, submit::Fence, sys::time::Instant};
use core::time::Duration;
use nvshare_wire::ClientMessage;

/// The interval between samples. A fence is one event in each stream, so it costs about the same as a
/// launch.
const EVERY: Duration = Duration::from_millis(2);
/// A fence that is done within this time did not wait for other work. The time is longer than a launch
/// takes to reach the GPU, and much shorter than the wait of a fence behind queued work.
const AT_ONCE: Duration = Duration::from_micros(100);
/// Later checks are discarded, because other work may have finished by then.
const TOO_LATE: Duration = Duration::from_micros(400);
/// The number of samples per report.
const SAMPLES: u32 = 24;
/// The smallest change of the utilization that is reported, in thousandths.
const CHANGE: u32 = 100;

#[derive(Debug)]
pub struct Utilization {
    next: Instant,
    sample: Option<(Fence, Instant)>,
    seen: u32,
    busy: u32,
    reported: Option<u32>,
}

impl Utilization {
    pub fn new() -> Self {
        Self { next: Instant::now(), sample: None, seen: 0, busy: 0, reported: None }
    }

    /// Begins a turn. Keeps the samples of earlier turns: if a program's bursts are too short for all
    /// samples of a report, one report needs several turns.
    pub fn begin_turn(&mut self) {
        *self = Self { seen: self.seen, busy: self.busy, ..Self::new() };
    }

    /// Takes a sample if one is due. Returns the time until the next step.
    pub fn step(&mut self, gpu: &Gpu) -> Duration {
        if !connection::is_connected() {
            return Duration::MAX; // an offline turn is contended, and no scheduler needs the result
        }
        match self.sample.take() {
            Some((fence, since)) if since.elapsed() < AT_ONCE => {
                let rest = AT_ONCE.saturating_sub(since.elapsed());
                self.sample = Some((fence, since));
                rest
            }
            Some((mut fence, since)) => {
                let done = gpu.work.is_done(&mut fence);
                if since.elapsed() < TOO_LATE {
                    self.seen += 1;
                    self.busy += u32::from(!done);
                    self.report(gpu);
                }
                EVERY
            }
            None if Instant::now() < self.next => self.next - Instant::now(),
            None => {
                self.next = Instant::now() + EVERY;
                // During a capture, `sample` returns `None`.
                self.sample = gpu.work.sample().map(|fence| (fence, Instant::now()));
                if self.sample.is_some() { AT_ONCE } else { EVERY }
            }
        }
    }

    fn report(&mut self, gpu: &Gpu) {
        if self.seen < SAMPLES {
            return;
        }
        let permille = self.busy * 1000 / self.seen;
        (self.seen, self.busy) = (0, 0);
        if self.reported.is_none_or(|reported| reported.abs_diff(permille) >= CHANGE)
            && connection::send(&ClientMessage::Utilization { slot: gpu.index, permille })
        {
            self.reported = Some(permille);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_combines_samples_of_several_turns() {
        let mut utilization = Utilization::new();
        (utilization.seen, utilization.busy, utilization.reported) = (SAMPLES - 1, 7, Some(500));
        utilization.begin_turn();
        assert_eq!((utilization.seen, utilization.busy), (SAMPLES - 1, 7));
        // A later turn reports an equal value again, because the scheduler may have forgotten the
        // value.
        assert_eq!(utilization.reported, None);
    }
}
