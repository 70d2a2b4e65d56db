//! How full this client keeps a GPU while it holds the lock, which decides whether others run at the same moment.
//!
//! Every few milliseconds a fence goes behind what has been submitted. If it is done almost at once, the GPU was about to
//! run out of work: the program launches more slowly than the GPU works. If not, work was waiting for the GPU. Whether the
//! GPU is idle at one moment would not tell: what is launched takes some microseconds to get there, so a queue is hardly
//! ever empty. Samples are taken only while somebody waits for the lock, who alone gains from the answer.

use crate::{connection, gpu::Gpu, sys::time::Instant, work::Fence};
use core::time::Duration;
use nvshare_wire::{ClientMessage, version};

/// Between two samples: a fence is an event in each stream, so it costs about as much as a launch.
const EVERY: Duration = Duration::from_millis(2);
/// What is done within this time was not waiting for the GPU: more than a launch takes to get there, and a small part of
/// what is queued where work does wait.
const AT_ONCE: Duration = Duration::from_micros(100);
/// A look that comes so late tells nothing: other work may have been done by then.
const TOO_LATE: Duration = Duration::from_micros(400);
/// Samples before a word to the scheduler.
const SAMPLES: u32 = 24;
/// A change, in thousandths, that is worth another.
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
    /// A turn begins.
    pub fn new() -> Self {
        Self { next: Instant::now(), sample: None, seen: 0, busy: 0, reported: None }
    }

    /// Takes a sample when one is due; says after how long to look again.
    pub fn step(&mut self, gpu: &Gpu) -> Duration {
        if !connection::speaks(version::UTILIZATION) {
            return Duration::MAX; // there is nobody to tell
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
                // Beside a capture there is none.
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
