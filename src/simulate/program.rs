//! One simulated client: a program that pauses and has work for its GPUs, in turn. What the library in it answers the scheduler
//! is in `answers`.

use std::time::Duration;

use nvshare_idle_gap::IdleGapPredictor;

use super::ledger::End;
use super::memory::Place;
use super::plans::Plan;
use super::queue::Happening;
use super::scenario::Job;
use super::surroundings::{Surroundings, gpu_id, place_of};
use super::turn::Turn;
use crate::scheduler::{ClientId, Engine, Event, GpuId, GpuSet, Group, ReleaseReason, Time};

#[derive(Debug)]
pub struct Program {
    pub(super) at: usize,
    pub(super) plan: Plan,
    pub(super) shape: Shape,
    pub(super) group: Option<Group>,
    pub(super) gpus: GpuSet,
    pub(super) places: Vec<Place>,
    pub(super) phase: Phase,
    /// GPU time to come, and of that in this iteration.
    pub(super) left: Duration,
    pub(super) now_left: Duration,
    pub(super) turn: Turn,
    /// Counts turns and pauses, so that what was to happen in an earlier one does not.
    pub(super) turns: u32,
    pub(super) pauses: u32,
    pub(super) idle_gaps: IdleGapPredictor,
    /// Since when it has been idle, while others wait or since it gave the lock back for that.
    pub(super) idle_since: Option<Time>,
    /// Since when it has had work and has not run.
    pub(super) waits_since: Option<Time>,
}

/// What a job says of its programs.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub gpu_time: Duration,
    pub cpu_time: Duration,
    pub is_steady: bool,
    pub fullness: u32,
    pub drain: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Waits for its contexts and its memory.
    Starts,
    Pauses,
    HasWork,
    Over,
}

impl Shape {
    pub fn of(job: &Job) -> Self {
        Self {
            gpu_time: job.gpu_time,
            cpu_time: job.cpu_time,
            is_steady: job.is_steady(),
            fullness: job.fullness(),
            drain: job.drain,
        }
    }
}

impl Program {
    pub fn new(at: usize, plan: &Plan, job: &Job, group: Option<Group>) -> Self {
        Self {
            at,
            plan: plan.clone(),
            shape: Shape::of(job),
            group,
            gpus: plan.gpus.iter().map(|place| gpu_id(*place)).collect(),
            places: plan.gpus.iter().map(|_| Place::new(job.memory)).collect(),
            phase: Phase::Starts,
            left: job.work,
            now_left: Duration::ZERO,
            turn: Turn::Over,
            turns: 0,
            pauses: 0,
            idle_gaps: IdleGapPredictor::default(),
            idle_since: None,
            waits_since: None,
        }
    }

    pub(super) fn client(&self) -> ClientId {
        ClientId(self.at as u64)
    }

    pub(super) fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    pub(super) fn place(&mut self, gpu: GpuId) -> Option<(usize, &mut Place)> {
        let at = self.plan.gpus.iter().position(|place| *place == place_of(gpu))?;
        Some((at, self.places.get_mut(at)?))
    }

    pub fn arrives(&mut self, around: &mut Surroundings) {
        let client = self.client();
        around.say(Event::Connected { client, gang: 0, user: self.plan.user });
        if self.group.is_some() {
            around.say(Event::Groups { groups: [(client, self.group)].into() });
        }
        for gpu in &self.gpus {
            around.say(Event::Attached { client, gpu: *gpu, engine: Engine::Swap });
        }
    }

    pub fn has_work(&mut self, around: &mut Surroundings) {
        if self.phase != Phase::Pauses {
            return;
        }
        self.phase = Phase::HasWork;
        self.now_left = if self.shape.is_steady { self.left } else { self.shape.gpu_time.min(self.left) };
        self.left -= self.now_left;
        if let Some(since) = self.idle_since.take() {
            self.idle_gaps.record(around.now.saturating_sub(since));
        }
        self.pauses += 1;
        self.waits_since = Some(around.now);
        around.ledger.has_work(self.at, around.now);
        match self.turn {
            Turn::Over => self.request(around),
            Turn::Held(_) => self.run(around),
            Turn::Draining(_) => {} // it asks once it has given the lock back
        }
    }

    pub fn work_done(&mut self, around: &mut Surroundings) {
        self.now_left = Duration::ZERO;
        around.ledger.has_none(self.at, around.now);
        if let Turn::Held(held) = &mut self.turn {
            held.rest(around.now);
        }
        if self.left.is_zero() {
            return self.leave(around, End::Done(around.now));
        }
        self.pause(around);
        match self.turn {
            Turn::Draining(_) => self.release(around, ReleaseReason::Revoked),
            Turn::Held(_) => self.idle(around),
            Turn::Over => {}
        }
    }

    /// A pause before the next work, or none.
    pub(super) fn pause(&mut self, around: &mut Surroundings) {
        self.phase = Phase::Pauses;
        if self.shape.is_steady {
            return self.has_work(around);
        }
        let at = around.now + self.shape.cpu_time;
        around.at(at, Happening::HasWork(self.at));
    }

    /// Runs, if it has work, the lock and its memory.
    pub(super) fn run(&mut self, around: &mut Surroundings) {
        let Turn::Held(held) = &mut self.turn else { return };
        if self.phase != Phase::HasWork || held.runs() || !self.places.iter().all(Place::is_complete) {
            return;
        }
        held.run(around.now);
        if let Some(since) = self.waits_since.take()
            && since < around.now
        {
            around.ledger.waits.add(around.now - since);
        }
        around.engines.start(self.at, self.now_left, around.now, &mut around.queue);
    }

    pub(super) fn stop(&mut self, around: &mut Surroundings) {
        if around.engines.runs(self.at) {
            self.now_left = around.engines.stop(self.at, around.now, &mut around.queue);
            self.waits_since = Some(around.now);
        }
    }

    /// The process ends.
    pub(super) fn leave(&mut self, around: &mut Surroundings, end: End) {
        self.phase = Phase::Over;
        if let Some(place) = around.ledger.ends.get_mut(self.at) {
            *place = Some(end);
        }
        self.places = Vec::new();
        around.say(Event::Disconnected { client: self.client() });
    }
}
