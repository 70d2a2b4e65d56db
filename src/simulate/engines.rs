//! The work of GPUs. A lock holder that runs alone runs at full speed. If concurrent holders
//! together need more than the GPU, the GPU slows all of them down by the same factor. A program on
//! several GPUs is as fast as on the slowest of them.

use std::time::Duration;

use super::queue::{Happening, Queue};
use super::scenario::FULL;
use crate::scheduler::Time;

#[derive(Debug)]
pub struct Engines {
    gpus: Vec<Engine>,
    programs: Vec<Work>,
}

#[derive(Debug, Clone, Default)]
struct Engine {
    running: Vec<usize>,
    /// Sum of the fullness of the running programs, in millionths of the GPU.
    wanted: u64,
}

/// A program's work.
#[derive(Debug, Clone, Default)]
pub struct Work {
    gpus: Vec<usize>,
    /// The fraction of a GPU that the program can use, in millionths.
    fullness: u32,
    /// GPU time that the current work still needs, in nanoseconds.
    left: f64,
    /// GPU time of all work so far, in nanoseconds.
    done: f64,
    /// The time up to which `left` and `done` are accounted. `None` while the program does not run.
    since: Option<Time>,
    /// GPU time per unit of virtual time.
    rate: f64,
    /// Number of changes of the rate. An event with another number is outdated.
    number: u32,
}

impl Work {
    pub fn new(gpus: Vec<usize>, fullness: u32) -> Self {
        Self { gpus, fullness, ..Self::default() }
    }

    /// Accounts the work up to `now`.
    fn advance(&mut self, now: Time) {
        let Some(since) = self.since.as_mut().map(|since| std::mem::replace(since, now)) else { return };
        let done = (now.saturating_sub(since).as_nanos() as f64 * self.rate).min(self.left);
        self.left -= done;
        self.done += done;
    }
}

impl Engines {
    pub fn new(gpus: usize, programs: Vec<Work>) -> Self {
        Self { gpus: vec![Engine::default(); gpus], programs }
    }

    /// Returns the GPU time of each program until `now`, on each of its GPUs.
    pub fn gpu_times(&mut self, now: Time) -> Vec<Duration> {
        let gpu_time = |work: &mut Work| {
            work.advance(now);
            nanos(work.done)
        };
        self.programs.iter_mut().map(gpu_time).collect()
    }

    /// Starts a program that needs `left` GPU time.
    pub fn start(&mut self, program: usize, left: Duration, now: Time, queue: &mut Queue) {
        let Some(work) = self.programs.get_mut(program).filter(|work| work.since.is_none()) else { return };
        (work.left, work.since, work.rate) = (left.as_nanos() as f64, Some(now), 0.0);
        let fullness = u64::from(work.fullness);
        self.each_gpu(program, |engine| {
            engine.running.push(program);
            engine.wanted += fullness;
        });
        self.update_neighbours(program, now, queue);
        self.update_rate(program, now, queue);
    }

    /// Interrupts a program. Returns the GPU time that its work still needs.
    pub fn stop(&mut self, program: usize, now: Time, queue: &mut Queue) -> Duration {
        let Some(work) = self.programs.get_mut(program).filter(|work| work.since.is_some()) else {
            return Duration::ZERO;
        };
        work.advance(now);
        work.since = None;
        work.number = work.number.wrapping_add(1);
        let (left, fullness) = (nanos(work.left), u64::from(work.fullness));
        self.each_gpu(program, |engine| {
            engine.running.retain(|other| *other != program);
            engine.wanted -= fullness;
        });
        self.update_neighbours(program, now, queue);
        left
    }

    /// Handles the end of a program's work. Returns false if the event is outdated.
    pub fn done(&mut self, program: usize, number: u32, now: Time, queue: &mut Queue) -> bool {
        let Some(work) = self.programs.get_mut(program) else { return false };
        if work.number != number || work.since.is_none() {
            return false;
        }
        work.done += std::mem::take(&mut work.left); // less than a nanosecond
        work.since = Some(now);
        self.stop(program, now, queue);
        true
    }

    fn each_gpu(&mut self, program: usize, mut f: impl FnMut(&mut Engine)) {
        let gpus = self.programs.get(program).map_or(&[][..], |work| &work.gpus);
        for gpu in gpus {
            if let Some(engine) = self.gpus.get_mut(*gpu) {
                f(engine);
            }
        }
    }

    /// Updates the rates of the other programs on the program's GPUs.
    fn update_neighbours(&mut self, program: usize, now: Time, queue: &mut Queue) {
        let gpus = self.programs.get(program).map_or(0, |work| work.gpus.len());
        for at in 0..gpus {
            let Some(gpu) = self.programs.get(program).and_then(|work| work.gpus.get(at)).copied() else { return };
            let others = self.gpus.get(gpu).map_or(0, |engine| engine.running.len());
            for at in 0..others {
                let other = self.gpus.get(gpu).and_then(|engine| engine.running.get(at)).copied();
                if let Some(other) = other.filter(|other| *other != program) {
                    self.update_rate(other, now, queue);
                }
            }
        }
    }

    fn update_rate(&mut self, program: usize, now: Time, queue: &mut Queue) {
        let Some(work) = self.programs.get_mut(program) else { return };
        let wanted = work.gpus.iter().filter_map(|gpu| self.gpus.get(*gpu)).map(|engine| engine.wanted).max();
        let rate = f64::from(work.fullness) / wanted.unwrap_or(0).max(FULL.into()) as f64;
        if rate == work.rate {
            return;
        }
        work.advance(now);
        work.rate = rate;
        work.number = work.number.wrapping_add(1);
        queue.at(now + nanos(work.left / rate), Happening::WorkDone(program, work.number));
    }
}

/// Rounds up, so that no event precedes the end of its work.
fn nanos(value: f64) -> Duration {
    Duration::from_nanos(value.ceil() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Starts these programs at the same time on their GPUs, and returns the end time of each.
    fn ends(programs: &[(&[usize], u32, u64)]) -> Vec<f64> {
        let works = programs.iter().map(|(gpus, fullness, _)| Work::new(gpus.to_vec(), *fullness)).collect();
        let (mut engines, mut queue) = (Engines::new(3, works), Queue::default());
        for (at, (_, _, work)) in programs.iter().enumerate() {
            engines.start(at, s(*work), Time::ZERO, &mut queue);
        }
        let mut ends = vec![0.0; programs.len()];
        while let Some(at) = queue.next() {
            if let Some(super::super::queue::Next::Happening(Happening::WorkDone(program, number))) = queue.pop(at)
                && engines.done(program, number, at, &mut queue)
            {
                ends[program] = (at.as_secs_f64() * 1e6).round() / 1e6;
                assert_eq!(engines.gpu_times(at)[program].as_secs(), programs[program].2);
            }
        }
        ends
    }

    #[test]
    fn a_single_program_runs_at_full_speed() {
        assert_eq!(ends(&[(&[0], FULL, 10), (&[1], FULL / 4, 10)]), [10.0, 40.0]);
    }

    #[test]
    fn oversubscribed_programs_slow_down_equally() {
        assert_eq!(ends(&[(&[0], FULL, 10), (&[0], FULL, 20)]), [20.0, 30.0]);
        assert_eq!(ends(&[(&[0], FULL / 4, 10), (&[0], FULL / 2, 20)]), [40.0, 40.0], "they want less");
        assert_eq!(ends(&[(&[0], FULL, 10), (&[0], FULL / 4, 10)]), [12.5, 42.5]);
    }

    #[test]
    fn a_program_on_several_gpus_runs_at_the_slowest_rate() {
        assert_eq!(ends(&[(&[0, 1], FULL, 10), (&[1], FULL, 5), (&[2], FULL, 5)]), [15.0, 10.0, 5.0]);
    }
}
