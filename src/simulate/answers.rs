//! What the library in a simulated program answers the scheduler, as `libnvshare.so` does: it asks for the lock when there is
//! work and the gate is closed, drains when it is revoked, gives the lock back in a pause when others wait, moves memory as it
//! is told, and says how full it keeps the GPU.

use std::time::Duration;

use super::ledger::End;
use super::memory::{Place, Step, Way};
use super::program::{Phase, Program};
use super::queue::Happening;
use super::surroundings::{Surroundings, gpu_id, place_of};
use super::turn::{Held, Turn};
use crate::scheduler::{Command, Event, GpuId, GpuSet, ReleaseReason, StuckReason};

/// With so short a grace, the lock is given back after just that, whatever is known of the program's pauses.
const SHORTEST: Duration = Duration::from_millis(1);
/// How long the library looks before it says how full the GPU is: 24 samples, one every 2.1 ms.
const SAMPLED: Duration = Duration::from_millis(50);
/// A drain that takes longer is reported (`preload/src/client/turn.rs`).
const LONG: Duration = Duration::from_secs(2);

impl Program {
    pub fn receive(&mut self, command: Command, around: &mut Surroundings) {
        if self.is_over() {
            return;
        }
        match command {
            Command::Attached { gpu, .. } => {
                if let Some((_, place)) = self.place(gpu) {
                    place.attached = true; // the limit follows
                }
            }
            Command::Limit { gpu, bytes, seq, .. } => self.limited(gpu, bytes, seq, around),
            Command::Denied { .. } => self.leave(around, End::Failed),
            Command::Allowance { gpu, seq, bytes, .. } => {
                let Some((at, place)) = self.place(gpu) else { return };
                if place.allow(seq, bytes) {
                    self.report(at, around);
                }
                self.move_memory(at, around);
                self.run(around);
            }
            Command::Grant { gpus, .. } => self.granted(&gpus, around),
            Command::Revoke { .. } => self.revoked(around),
            Command::Contended { gpus, waiters, grace, .. } => self.contended(&gpus, waiters, grace, around),
            // Whoever looks at the process sees that it runs.
            Command::Probe { client } => around.say(Event::Stopped { client, stopped: false }),
            Command::Waiting { .. }
            | Command::Reserved { .. }
            | Command::Prepare { .. }
            | Command::Measure { .. }
            | Command::EvictionBlocked { .. }
            | Command::Placed { .. }
            | Command::Unplaced { .. }
            | Command::Thrashing { .. }
            | Command::MappingFailed { .. }
            | Command::Undrainable { .. } => {}
        }
    }

    fn limited(&mut self, gpu: GpuId, bytes: u64, seq: u32, around: &mut Surroundings) {
        let client = self.client();
        let Some((at, place)) = self.place(gpu) else { return };
        place.limited(bytes, seq);
        if place.attached && !place.is_allocated() && !place.allocate() && !place.wishes {
            place.wishes = true;
            around.say(Event::LimitRequested { client, gpu, bytes: place.size() });
        }
        self.report(at, around);
        if self.phase == Phase::Starts && self.places.iter().all(Place::is_allocated) {
            self.pause(around);
        }
    }

    fn granted(&mut self, gpus: &GpuSet, around: &mut Surroundings) {
        gpus.iter().for_each(|gpu| around.ledger.granted(self.at, place_of(*gpu)));
        self.turns += 1;
        self.turn = Turn::Held(Held::new(around.now));
        self.run(around);
    }

    fn revoked(&mut self, around: &mut Surroundings) {
        let Turn::Held(held) = &self.turn else { return };
        self.turn = Turn::Draining(held.since);
        if !around.engines.runs(self.at) {
            return self.release(around, ReleaseReason::Revoked);
        }
        let (now, drain) = (around.now, self.shape.drain);
        if drain > LONG {
            around.at(now + LONG, Happening::Lingers(self.at, self.turns));
        }
        around.at(now + drain, Happening::Drained(self.at, self.turns));
    }

    fn contended(&mut self, gpus: &GpuSet, waiters: u32, grace: Duration, around: &mut Surroundings) {
        let Turn::Held(held) = &mut self.turn else { return };
        let was = held.is_contended();
        held.contend(gpus, (waiters > 0).then_some(grace));
        match (was, held.is_contended()) {
            (false, true) => {
                self.look(around);
                if self.phase == Phase::Pauses {
                    self.idle(around);
                }
            }
            (true, false) => {
                self.idle_since = None;
                self.pauses += 1;
            }
            _ => {}
        }
    }

    pub fn quiet(&mut self, pause: u32, around: &mut Surroundings) {
        let is_contended = matches!(&self.turn, Turn::Held(held) if held.is_contended());
        if self.phase == Phase::Pauses && self.pauses == pause && is_contended {
            self.release(around, ReleaseReason::Idle);
        }
    }

    pub fn drained(&mut self, turn: u32, around: &mut Surroundings) {
        if self.turns == turn && matches!(self.turn, Turn::Draining(_)) && !self.is_over() {
            self.stop(around);
            self.release(around, ReleaseReason::Revoked);
        }
    }

    pub fn lingers(&mut self, turn: u32, around: &mut Surroundings) {
        if self.turns == turn && matches!(self.turn, Turn::Draining(_)) && !self.is_over() {
            let (client, gpus) = (self.client(), self.gpus.clone());
            around.say(Event::Stuck { client, gpus, reason: StuckReason::LongWork });
        }
    }

    /// Says how full it has kept the GPU, if that is news.
    pub fn sampled(&mut self, turn: u32, around: &mut Surroundings) {
        let Turn::Held(held) = &mut self.turn else { return };
        if self.turns != turn || self.phase == Phase::Over {
            return;
        }
        let (permille, goes_on) = held.seen(around.now, self.shape.fullness);
        if let Some(permille) = permille {
            for gpu in &self.gpus {
                around.say(Event::Utilization { client: self.client(), gpu: *gpu, permille });
            }
        }
        if goes_on {
            self.look(around);
        }
    }

    /// It has the lock and nothing to do. Where others wait, it gives the lock back after a while.
    pub(super) fn idle(&mut self, around: &mut Surroundings) {
        let Turn::Held(held) = &self.turn else { return };
        let Some(grace) = held.grace() else { return };
        self.idle_since = Some(around.now);
        self.pauses += 1;
        let timeout = if grace <= SHORTEST { grace } else { self.idle_gaps.timeout(grace) };
        around.at(around.now + timeout, Happening::Quiet(self.at, self.pauses));
        if timeout > SAMPLED {
            self.look(around);
        }
    }

    /// Looks how full it keeps the GPU, unless it does already.
    fn look(&mut self, around: &mut Surroundings) {
        let Turn::Held(held) = &mut self.turn else { return };
        if held.look(around.now) {
            around.at(around.now + SAMPLED, Happening::Sampled(self.at, self.turns));
        }
    }

    pub(super) fn request(&mut self, around: &mut Surroundings) {
        around.say(Event::Requested { client: self.client(), gpus: self.gpus.clone() });
    }

    pub(super) fn release(&mut self, around: &mut Surroundings, reason: ReleaseReason) {
        let since = match &self.turn {
            Turn::Over => return,
            Turn::Held(Held { since, .. }) | Turn::Draining(since) => *since,
        };
        self.turn = Turn::Over;
        let busy = around.now.saturating_sub(since);
        around.say(Event::Released { client: self.client(), gpus: self.gpus.clone(), reason, busy });
        if self.phase == Phase::HasWork {
            self.request(around);
        }
        for at in 0..self.places.len() {
            self.move_memory(at, around);
        }
    }

    pub fn copied(&mut self, at: usize, around: &mut Surroundings) {
        let Some(place) = self.places.get_mut(at).filter(|_| self.phase != Phase::Over) else { return };
        if place.copied() {
            self.report(at, around);
        }
        self.move_memory(at, around);
        self.run(around);
    }

    fn report(&mut self, at: usize, around: &mut Surroundings) {
        let (Some(place), Some(gpu)) = (self.places.get(at), self.plan.gpus.get(at)) else { return };
        around.say(Event::Memory { client: self.client(), gpu: gpu_id(*gpu), report: place.report() });
    }

    /// Brings memory to where it is to be. None leaves while there is a turn.
    fn move_memory(&mut self, at: usize, around: &mut Surroundings) {
        let stays = !matches!(self.turn, Turn::Over);
        let (Some(place), Some(gpu)) = (self.places.get_mut(at), self.plan.gpus.get(at)) else { return };
        let Some(link) = around.links.get_mut(*gpu) else { return };
        match place.step(around.now, stays, link) {
            Step::Nothing => {}
            Step::Reports => self.report(at, around),
            Step::Copies(until, way, bytes) => {
                match way {
                    Way::Out => around.ledger.swapped_out += bytes,
                    Way::In => around.ledger.swapped_in += bytes,
                }
                around.at(until, Happening::Copied(self.at, at));
            }
        }
    }
}
