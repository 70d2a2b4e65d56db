//! One simulated client: a program that alternates between pauses and work for its GPUs.

use std::time::Duration;

use nvshare_idle_gap::IdleGapPredictor;

use super::context::{Context, gpu_id, place_of};
use super::memory::Place;
use super::plans::Plan;
use super::queue::Happening;
use super::scenario::Job;
use super::statistics::End;
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

/// A job's parameters for its programs.
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

    pub fn arrives(&mut self, context: &mut Context) {
        let client = self.client();
        context.send(Event::Connected { client, gang: 0, tenant: self.plan.tenant });
        if self.group.is_some() {
            context.send(Event::Groups { groups: [(client, self.group)].into() });
        }
        for gpu in &self.gpus {
            context.send(Event::Attached { client, gpu: *gpu, engine: Engine::Swap });
        }
    }

    pub fn has_work(&mut self, context: &mut Context) {
        if self.phase != Phase::Pauses {
            return;
        }
        self.phase = Phase::HasWork;
        self.now_left = if self.shape.is_steady { self.left } else { self.shape.gpu_time.min(self.left) };
        self.left -= self.now_left;
        if let Some(since) = self.idle_since.take() {
            self.idle_gaps.record(context.now.saturating_sub(since));
        }
        self.pauses += 1;
        self.waits_since = Some(context.now);
        context.statistics.has_work(self.at, context.now);
        match self.turn {
            Turn::Over => self.request(context),
            Turn::Held(_) => self.run(context),
            Turn::Draining(_) => {} // it asks once it has given the lock back
        }
    }

    pub fn work_done(&mut self, context: &mut Context) {
        self.now_left = Duration::ZERO;
        context.statistics.has_none(self.at, context.now);
        if let Turn::Held(held) = &mut self.turn {
            held.rest(context.now);
        }
        if self.left.is_zero() {
            return self.leave(context, End::Done(context.now));
        }
        self.pause(context);
        match self.turn {
            Turn::Draining(_) => self.release(context, ReleaseReason::Revoked),
            Turn::Held(_) => self.idle(context),
            Turn::Over => {}
        }
    }

    /// A pause before the next work, or none.
    pub(super) fn pause(&mut self, context: &mut Context) {
        self.phase = Phase::Pauses;
        if self.shape.is_steady {
            return self.has_work(context);
        }
        let at = context.now + self.shape.cpu_time;
        context.at(at, Happening::HasWork(self.at));
    }

    /// Runs, if it has work, the lock and its memory.
    pub(super) fn run(&mut self, context: &mut Context) {
        let Turn::Held(held) = &mut self.turn else { return };
        if self.phase != Phase::HasWork || held.runs() || !self.places.iter().all(Place::is_complete) {
            return;
        }
        held.run(context.now);
        if let Some(since) = self.waits_since.take()
            && since < context.now
        {
            context.statistics.waits.add(context.now - since);
        }
        context.engines.start(self.at, self.now_left, context.now, &mut context.queue);
    }

    pub(super) fn stop(&mut self, context: &mut Context) {
        if context.engines.runs(self.at) {
            self.now_left = context.engines.stop(self.at, context.now, &mut context.queue);
            self.waits_since = Some(context.now);
        }
    }

    /// The process ends.
    pub(super) fn leave(&mut self, context: &mut Context, end: End) {
        self.phase = Phase::Over;
        if let Some(place) = context.statistics.ends.get_mut(self.at) {
            *place = Some(end);
        }
        self.places = Vec::new();
        context.send(Event::Disconnected { client: self.client() });
    }
}
