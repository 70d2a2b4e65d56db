//! One simulated client: a program that pauses and has work for its GPUs, in turn, and the library in it, which answers the
//! scheduler as `libnvshare.so` does: it asks for the lock when there is work and the gate is closed, drains when it is
//! revoked, gives the lock back in a pause when others wait, moves memory as it is told, and says how full it keeps the GPU.

use std::time::Duration;

use super::gaps::Gaps;
use super::ledger::End;
use super::memory::{Place, Step, Way};
use super::plans::Plan;
use super::queue::Happening;
use super::scenario::{FULL, Job};
use super::surroundings::{Surroundings, gpu_id, place_of};
use crate::scheduler::{ClientId, Command, Engine, Event, GpuId, GpuSet, Group, ReleaseReason, StuckReason, Time};

/// With so short a grace, the lock is given back after just that, whatever is known of the program's pauses.
const SHORTEST: Duration = Duration::from_millis(1);
/// How long the library looks before it says how full the GPU is: 24 samples, one every 2.1 ms (`preload/src/fullness.rs`).
const SAMPLED: Duration = Duration::from_millis(50);
/// A change that it says, in thousandths.
const NEWS: u32 = 100;
/// A drain that takes longer is reported (`preload/src/turn.rs`).
const LONG: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Program {
    at: usize,
    plan: Plan,
    shape: Shape,
    group: Option<Group>,
    gpus: GpuSet,
    places: Vec<Place>,
    phase: Phase,
    /// GPU time to come, and of that in this iteration.
    left: Duration,
    now_left: Duration,
    turn: Turn,
    /// Counts turns and pauses, so that what was to happen in an earlier one does not.
    turns: u32,
    pauses: u32,
    gaps: Gaps,
    /// Since when it has been idle, while others wait or since it gave the lock back for that.
    idle_since: Option<Time>,
    /// Since when it has had work and has not run.
    waits_since: Option<Time>,
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
enum Phase {
    /// Waits for its contexts and its memory.
    Starts,
    Pauses,
    HasWork,
    Over,
}

/// The lock, as this client has it: of all of its GPUs, or of none.
#[derive(Debug)]
enum Turn {
    Over,
    Held(Held),
    /// Asked for, and what was submitted is finishing. Since when it was held.
    Draining(Time),
}

#[derive(Debug)]
struct Held {
    since: Time,
    /// Who waits: for each GPU, how long it may be idle.
    graces: Vec<(GpuId, Duration)>,
    /// Since when it has looked how full the GPU is, and how long it had run until then; and what it said of that.
    sample: Option<(Time, Duration)>,
    said: Option<u32>,
    /// How long it has run in this turn, and since when it runs.
    ran: Duration,
    runs_since: Option<Time>,
}

impl Held {
    fn ran(&self, now: Time) -> Duration {
        self.ran + self.runs_since.map_or(Duration::ZERO, |since| now.saturating_sub(since))
    }

    fn grace(&self) -> Option<Duration> {
        self.graces.iter().map(|(_, grace)| *grace).min()
    }
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
            gaps: Gaps::default(),
            idle_since: None,
            waits_since: None,
        }
    }

    fn client(&self) -> ClientId {
        ClientId(self.at as u64)
    }

    fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    fn place(&mut self, gpu: GpuId) -> Option<(usize, &mut Place)> {
        let at = self.plan.gpus.iter().position(|place| *place == place_of(gpu))?;
        Some((at, self.places.get_mut(at)?))
    }

    // ---- what happens to it ----

    pub fn arrives(&mut self, around: &mut Surroundings) {
        let client = self.client();
        around.say(Event::Connected { client, gang: 0, user: self.plan.user });
        if self.group.is_some() {
            around.say(Event::Grouped { groups: [(client, self.group)].into() });
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
            self.gaps.ended(around.now.saturating_sub(since));
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
            held.ran = held.ran(around.now);
            held.runs_since = None;
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

    pub fn quiet(&mut self, pause: u32, around: &mut Surroundings) {
        let is_contended = matches!(&self.turn, Turn::Held(held) if !held.graces.is_empty());
        if self.phase == Phase::Pauses && self.pauses == pause && is_contended {
            self.release(around, ReleaseReason::Idle);
        }
    }

    /// Says how full it has kept the GPU, if that is news.
    pub fn sampled(&mut self, turn: u32, around: &mut Surroundings) {
        let Turn::Held(held) = &mut self.turn else { return };
        let Some((since, before)) = held.sample.filter(|_| self.turns == turn && self.phase != Phase::Over) else {
            return;
        };
        held.sample = None;
        if held.graces.is_empty() {
            return;
        }
        let (window, ran) = (around.now.saturating_sub(since), held.ran(around.now).saturating_sub(before));
        let busy = ran.as_nanos() * u128::from(self.shape.fullness);
        let permille = busy / window.as_nanos().max(1) / u128::from(FULL / 1000);
        let permille = u32::try_from(permille).unwrap_or(u32::MAX);
        if held.said.is_none_or(|said| said.abs_diff(permille) >= NEWS) {
            held.said = Some(permille);
            for gpu in &self.gpus {
                around.say(Event::Fullness { client: ClientId(self.at as u64), gpu: *gpu, permille });
            }
        }
        // Until it pauses, there is nothing more to be seen of one that has run all the time.
        if ran < window {
            self.sample(around);
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

    pub fn copied(&mut self, at: usize, around: &mut Surroundings) {
        let Some(place) = self.places.get_mut(at).filter(|_| self.phase != Phase::Over) else { return };
        place.copied();
        self.report(at, around);
        self.move_memory(at, around);
        self.run(around);
    }

    // ---- what the scheduler says ----

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
            | Command::Room { .. }
            | Command::Prepare { .. }
            | Command::Measure { .. }
            | Command::Stays { .. }
            | Command::Undrainable { .. } => {}
        }
    }

    fn limited(&mut self, gpu: GpuId, bytes: u64, seq: u32, around: &mut Surroundings) {
        let client = self.client();
        let Some((at, place)) = self.place(gpu) else { return };
        place.limited(bytes, seq);
        if place.attached && !place.is_allocated() && !place.allocate() && !place.wishes {
            place.wishes = true;
            around.say(Event::Wished { client, gpu, bytes: place.size() });
        }
        self.report(at, around);
        if self.phase == Phase::Starts && self.places.iter().all(Place::is_allocated) {
            self.pause(around);
        }
    }

    fn granted(&mut self, gpus: &GpuSet, around: &mut Surroundings) {
        gpus.iter().for_each(|gpu| around.ledger.granted(self.at, place_of(*gpu)));
        self.turns += 1;
        self.turn = Turn::Held(Held {
            since: around.now,
            graces: Vec::new(),
            sample: None,
            said: None,
            ran: Duration::ZERO,
            runs_since: None,
        });
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
        let was = !held.graces.is_empty();
        held.graces.retain(|(gpu, _)| !gpus.contains(gpu));
        if waiters > 0 {
            held.graces.extend(gpus.iter().map(|gpu| (*gpu, grace)));
        }
        match (was, !held.graces.is_empty()) {
            (false, true) => {
                self.sample(around);
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

    // ---- what it does ----

    /// A pause before the next work, or none.
    fn pause(&mut self, around: &mut Surroundings) {
        self.phase = Phase::Pauses;
        if self.shape.is_steady {
            return self.has_work(around);
        }
        let at = around.now + self.shape.cpu_time;
        around.at(at, Happening::HasWork(self.at));
    }

    /// It has the lock and nothing to do. Where others wait, it gives the lock back after a while.
    fn idle(&mut self, around: &mut Surroundings) {
        let Turn::Held(held) = &self.turn else { return };
        let Some(grace) = held.grace() else { return };
        self.idle_since = Some(around.now);
        self.pauses += 1;
        let patience = if grace <= SHORTEST { grace } else { self.gaps.patience(grace) };
        around.at(around.now + patience, Happening::Quiet(self.at, self.pauses));
        if patience > SAMPLED {
            self.sample(around);
        }
    }

    /// Looks how full it keeps the GPU, unless it does already.
    fn sample(&mut self, around: &mut Surroundings) {
        let Turn::Held(held) = &mut self.turn else { return };
        if held.sample.is_none() {
            held.sample = Some((around.now, held.ran(around.now)));
            around.at(around.now + SAMPLED, Happening::Sampled(self.at, self.turns));
        }
    }

    fn request(&mut self, around: &mut Surroundings) {
        around.say(Event::Requested { client: self.client(), gpus: self.gpus.clone() });
    }

    /// Runs, if it has work, the lock and its memory.
    fn run(&mut self, around: &mut Surroundings) {
        let Turn::Held(held) = &mut self.turn else { return };
        if self.phase != Phase::HasWork || held.runs_since.is_some() || !self.places.iter().all(Place::is_complete) {
            return;
        }
        held.runs_since = Some(around.now);
        if let Some(since) = self.waits_since.take()
            && since < around.now
        {
            around.ledger.waits.add(around.now - since);
        }
        around.engines.start(self.at, self.now_left, around.now, &mut around.queue);
    }

    fn stop(&mut self, around: &mut Surroundings) {
        if around.engines.runs(self.at) {
            self.now_left = around.engines.stop(self.at, around.now, &mut around.queue);
            self.waits_since = Some(around.now);
        }
    }

    fn release(&mut self, around: &mut Surroundings, reason: ReleaseReason) {
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

    /// The process ends.
    fn leave(&mut self, around: &mut Surroundings, end: End) {
        self.phase = Phase::Over;
        if let Some(place) = around.ledger.ends.get_mut(self.at) {
            *place = Some(end);
        }
        self.places = Vec::new();
        around.say(Event::Disconnected { client: self.client() });
    }
}
