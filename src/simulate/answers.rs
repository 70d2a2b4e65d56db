//! The library's answers in a simulated program, like those of `libnvshare.so`: it requests the lock when there is
//! work and the gate is closed, drains after a revoke, releases the lock in a pause while others wait, moves memory
//! to its allowance, and reports utilization.

use std::time::Duration;

use super::context::{Context, gpu_id, place_of};
use super::memory::{Place, Step, Way};
use super::program::{Phase, Program};
use super::queue::Happening;
use super::statistics::End;
use super::turn::{Held, Turn};
use crate::scheduler::{Command, Event, GpuId, GpuSet, ReleaseReason, StuckReason};

/// With so short a grace, the lock is given back after just that, whatever is known of the program's pauses.
const SHORTEST: Duration = Duration::from_millis(1);
/// Time over which the library samples utilization: 24 samples, one every 2.1 ms.
const SAMPLED: Duration = Duration::from_millis(50);
/// A drain that takes longer is reported (`preload/src/client/turn.rs`).
const LONG: Duration = Duration::from_secs(2);

impl Program {
    pub fn receive(&mut self, command: Command, context: &mut Context) {
        if self.is_over() {
            return;
        }
        match command {
            Command::Attached { gpu, .. } => {
                if let Some((_, place)) = self.place(gpu) {
                    place.attached = true; // the limit follows
                }
            }
            Command::Limit { gpu, bytes, seq, .. } => self.limited(gpu, bytes, seq, context),
            Command::Denied { .. } => self.leave(context, End::Failed),
            Command::Allowance { gpu, seq, bytes, .. } => {
                let Some((at, place)) = self.place(gpu) else { return };
                if place.allow(seq, bytes) {
                    self.report(at, context);
                }
                self.move_memory(at, context);
                self.run(context);
            }
            Command::Grant { gpus, .. } => self.granted(&gpus, context),
            Command::Revoke { .. } => self.revoked(context),
            Command::Contended { gpus, waiters, grace, .. } => self.contended(&gpus, waiters, grace, context),
            // Simulated processes are never stopped.
            Command::Probe { client } => context.send(Event::Stopped { client, stopped: false }),
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

    fn limited(&mut self, gpu: GpuId, bytes: u64, seq: u32, context: &mut Context) {
        let client = self.client();
        let Some((at, place)) = self.place(gpu) else { return };
        place.limited(bytes, seq);
        if place.attached && !place.is_allocated() && !place.allocate() && !place.wishes {
            place.wishes = true;
            context.send(Event::LimitRequested { client, gpu, bytes: place.size() });
        }
        self.report(at, context);
        if self.phase == Phase::Starts && self.places.iter().all(Place::is_allocated) {
            self.pause(context);
        }
    }

    fn granted(&mut self, gpus: &GpuSet, context: &mut Context) {
        gpus.iter().for_each(|gpu| context.statistics.granted(self.at, place_of(*gpu)));
        self.turns += 1;
        self.turn = Turn::Held(Held::new(context.now));
        self.run(context);
    }

    fn revoked(&mut self, context: &mut Context) {
        let Turn::Held(held) = &self.turn else { return };
        self.turn = Turn::Draining(held.since);
        if !context.engines.runs(self.at) {
            return self.release(context, ReleaseReason::Revoked);
        }
        let (now, drain) = (context.now, self.shape.drain);
        if drain > LONG {
            context.at(now + LONG, Happening::Lingers(self.at, self.turns));
        }
        context.at(now + drain, Happening::Drained(self.at, self.turns));
    }

    fn contended(&mut self, gpus: &GpuSet, waiters: u32, grace: Duration, context: &mut Context) {
        let Turn::Held(held) = &mut self.turn else { return };
        let was = held.is_contended();
        held.contend(gpus, (waiters > 0).then_some(grace));
        match (was, held.is_contended()) {
            (false, true) => {
                self.look(context);
                if self.phase == Phase::Pauses {
                    self.idle(context);
                }
            }
            (true, false) => {
                self.idle_since = None;
                self.pauses += 1;
            }
            _ => {}
        }
    }

    pub fn quiet(&mut self, pause: u32, context: &mut Context) {
        let is_contended = matches!(&self.turn, Turn::Held(held) if held.is_contended());
        if self.phase == Phase::Pauses && self.pauses == pause && is_contended {
            self.release(context, ReleaseReason::Idle);
        }
    }

    pub fn drained(&mut self, turn: u32, context: &mut Context) {
        if self.turns == turn && matches!(self.turn, Turn::Draining(_)) && !self.is_over() {
            self.stop(context);
            self.release(context, ReleaseReason::Revoked);
        }
    }

    pub fn lingers(&mut self, turn: u32, context: &mut Context) {
        if self.turns == turn && matches!(self.turn, Turn::Draining(_)) && !self.is_over() {
            let (client, gpus) = (self.client(), self.gpus.clone());
            context.send(Event::Stuck { client, gpus, reason: StuckReason::LongWork });
        }
    }

    /// Says how full it has kept the GPU, if that is news.
    pub fn sampled(&mut self, turn: u32, context: &mut Context) {
        let Turn::Held(held) = &mut self.turn else { return };
        if self.turns != turn || self.phase == Phase::Over {
            return;
        }
        let (permille, goes_on) = held.seen(context.now, self.shape.fullness);
        if let Some(permille) = permille {
            for gpu in &self.gpus {
                context.send(Event::Utilization { client: self.client(), gpu: *gpu, permille });
            }
        }
        if goes_on {
            self.look(context);
        }
    }

    /// It has the lock and nothing to do. Where others wait, it gives the lock back after a while.
    pub(super) fn idle(&mut self, context: &mut Context) {
        let Turn::Held(held) = &self.turn else { return };
        let Some(grace) = held.grace() else { return };
        self.idle_since = Some(context.now);
        self.pauses += 1;
        let timeout = if grace <= SHORTEST { grace } else { self.idle_gaps.timeout(grace) };
        context.at(context.now + timeout, Happening::Quiet(self.at, self.pauses));
        if timeout > SAMPLED {
            self.look(context);
        }
    }

    /// Looks how full it keeps the GPU, unless it does already.
    fn look(&mut self, context: &mut Context) {
        let Turn::Held(held) = &mut self.turn else { return };
        if held.look(context.now) {
            context.at(context.now + SAMPLED, Happening::Sampled(self.at, self.turns));
        }
    }

    pub(super) fn request(&mut self, context: &mut Context) {
        context.send(Event::Requested { client: self.client(), gpus: self.gpus.clone() });
    }

    pub(super) fn release(&mut self, context: &mut Context, reason: ReleaseReason) {
        let since = match &self.turn {
            Turn::Over => return,
            Turn::Held(Held { since, .. }) | Turn::Draining(since) => *since,
        };
        self.turn = Turn::Over;
        let busy = context.now.saturating_sub(since);
        context.send(Event::Released { client: self.client(), gpus: self.gpus.clone(), reason, busy });
        if self.phase == Phase::HasWork {
            self.request(context);
        }
        for at in 0..self.places.len() {
            self.move_memory(at, context);
        }
    }

    pub fn copied(&mut self, at: usize, context: &mut Context) {
        let Some(place) = self.places.get_mut(at).filter(|_| self.phase != Phase::Over) else { return };
        if place.copied() {
            self.report(at, context);
        }
        self.move_memory(at, context);
        self.run(context);
    }

    fn report(&mut self, at: usize, context: &mut Context) {
        let (Some(place), Some(gpu)) = (self.places.get(at), self.plan.gpus.get(at)) else { return };
        context.send(Event::Memory { client: self.client(), gpu: gpu_id(*gpu), report: place.report() });
    }

    /// Moves memory towards the allowance. None leaves during a turn.
    fn move_memory(&mut self, at: usize, context: &mut Context) {
        let stays = !matches!(self.turn, Turn::Over);
        let (Some(place), Some(gpu)) = (self.places.get_mut(at), self.plan.gpus.get(at)) else { return };
        let Some(link) = context.links.get_mut(*gpu) else { return };
        match place.step(context.now, stays, link) {
            Step::Nothing => {}
            Step::Reports => self.report(at, context),
            Step::Copies(until, way, bytes) => {
                match way {
                    Way::Out => context.statistics.swapped_out += bytes,
                    Way::In => context.statistics.swapped_in += bytes,
                }
                context.at(until, Happening::Copied(self.at, at));
            }
        }
    }
}
