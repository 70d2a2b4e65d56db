//! One program: it alternates between pauses and work for its GPUs. Its client answers the scheduler.

use std::collections::VecDeque;
use std::time::Duration;

use nvshare_simulated_client::{Client, Effect, Setup, Timer, Way, rename};

use super::context::{Context, gpu_id, place_of};
use super::plans::Plan;
use super::queue::Happening;
use super::scenario::Job;
use super::statistics::End;
use crate::scheduler::{
    ClientId, Command, Engine, EnvLimits, Event, Found, GpuId, Group, Move, SleepOperation, SleepOutcome, Time,
};

/// Bytes copied and reported at once. The library's own chunks are at most a quarter of this, which makes a hand-over
/// some milliseconds shorter, and for a hundred programs on a GPU changes the time at which the last one ends by less
/// than 3 percent.
const CHUNK: u64 = 256 << 20;
/// How long it takes to take a program off a GPU whose memory has left it, and to put it back [H200, 580.159].
const CHECKPOINT: Duration = Duration::from_millis(290);
const RESTORE: Duration = Duration::from_millis(190);
/// What a program that is off its GPUs wants to do it tries again after this time.
const LATER: Duration = Duration::from_millis(10);

#[derive(Debug)]
pub struct Program {
    at: usize,
    client: Client,
    phase: Phase,
    /// Of an iteration: time with work for the GPUs, and without.
    gpu_time: Duration,
    cpu_time: Duration,
    /// It always has work.
    is_steady: bool,
    /// GPU time to come, and of that in this iteration.
    left: Duration,
    now_left: Duration,
    /// Since when it has had work and has not run.
    waits_since: Option<Time>,
    sleep: Sleep,
    /// What arrived since it was prepared to sleep.
    kept: VecDeque<Command>,
}

/// How far a program is off its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sleep {
    Awake,
    /// Its memory leaves.
    Prepares,
    /// Nothing of it enters the driver.
    Prepared,
    /// Nothing of it is on its GPUs.
    Off,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Waits for its contexts and its memory.
    Starts,
    Pauses,
    HasWork,
    Over,
}

impl Program {
    pub fn new(at: usize, plan: &Plan, job: &Job, group: Option<Group>) -> Self {
        let setup = Setup {
            gang: 0,
            tenant: plan.tenant,
            group,
            limits: EnvLimits::default(),
            engine: Engine::Swap,
            gpus: plan.gpus.iter().map(|place| gpu_id(*place)).collect(),
            peers: true,
            drain: Some(job.drain),
            fullness: Some(job.fullness()),
            pinned: 0,
            chunk: CHUNK,
        };
        let mut client = Client::new(ClientId(at as u64), setup);
        client.allocate(Time::ZERO, job.memory, 0); // once it is attached
        Self {
            at,
            client,
            phase: Phase::Starts,
            gpu_time: job.gpu_time,
            cpu_time: job.cpu_time,
            is_steady: job.is_steady(),
            left: job.work,
            now_left: Duration::ZERO,
            waits_since: None,
            sleep: Sleep::Awake,
            kept: VecDeque::new(),
        }
    }

    pub fn id(&self) -> ClientId {
        ClientId(self.at as u64)
    }

    /// Whether something of it may be on a GPU.
    pub fn is_on(&self, gpu: GpuId) -> bool {
        self.sleep != Sleep::Off && !matches!(self.phase, Phase::Over) && self.client.memory(gpu).is_some()
    }

    /// What is found of its memory on a GPU.
    pub fn found(&self, gpu: GpuId) -> Found {
        let bytes = self.client.memory(gpu).map_or(0, |memory| memory.mapped());
        Found { least: bytes, most: bytes }
    }

    /// It has been moved to another GPU, asleep.
    pub fn migrated(&mut self, both: Move) {
        self.client.migrated(both.from, both.to);
        self.kept.iter_mut().for_each(|command| rename(command, both));
    }

    fn is_prepared(&self) -> bool {
        matches!(self.sleep, Sleep::Prepared | Sleep::Off)
    }

    /// Says that it is prepared, once its memory has left.
    fn prepare(&mut self, context: &mut Context) {
        let is_there = |gpu: &GpuId| self.client.memory(*gpu).is_some_and(|memory| memory.mapped() > 0);
        if self.sleep == Sleep::Prepares && self.client.held().is_empty() && !self.client.gpus().iter().any(is_there) {
            self.sleep = Sleep::Prepared;
            context.send(Event::SleepReady { client: self.id() });
        }
    }

    /// It has been taken off its GPUs, or put back.
    pub fn checkpointed(&mut self, operation: SleepOperation, context: &mut Context) {
        if self.phase == Phase::Over {
            return;
        }
        self.sleep = match operation {
            SleepOperation::Sleep => Sleep::Off,
            SleepOperation::Wake => Sleep::Prepared,
            SleepOperation::Settle => self.sleep,
        };
        let outcome = if self.sleep == Sleep::Off { SleepOutcome::Asleep } else { SleepOutcome::Runs };
        context.send(Event::Checkpointed { client: self.id(), outcome });
    }

    pub fn wakes(&mut self, timer: Timer, context: &mut Context) {
        if self.is_prepared() {
            return context.at(context.now + LATER, Happening::Wakes(self.at, timer));
        }
        self.client_does(context, |client, now| client.wake(now, timer));
    }

    pub fn arrives(&mut self, context: &mut Context) {
        self.client_does(context, |client, _| client.connect());
    }

    /// Has the client do something, and carries out what follows. Nothing does once the program is over.
    pub fn client_does(&mut self, context: &mut Context, does: impl FnOnce(&mut Client, Time) -> Vec<Effect>) {
        if self.phase != Phase::Over {
            let effects = does(&mut self.client, context.now);
            self.carry_out(effects, context);
            self.prepare(context);
        }
    }

    pub fn receive(&mut self, command: Command, context: &mut Context) {
        if self.phase == Phase::Over {
            return;
        }
        match &command {
            // Simulated processes are never stopped.
            Command::Probe { client } => return context.send(Event::Stopped { client: *client, stopped: false }),
            Command::Checkpoint { operation, .. } => {
                let takes = if *operation == SleepOperation::Sleep { CHECKPOINT } else { RESTORE };
                return context.at(context.now + takes, Happening::Checkpointed(self.at, *operation));
            }
            Command::Awake { .. } => {
                self.sleep = Sleep::Awake;
                for command in std::mem::take(&mut self.kept) {
                    self.receive(command, context);
                }
                return;
            }
            _ if self.is_prepared() => return self.kept.push_back(command),
            Command::PrepareSleep { .. } => {
                self.sleep = Sleep::Prepares;
                return self.prepare(context);
            }
            Command::Grant { gpus, .. } => {
                gpus.iter().for_each(|gpu| context.statistics.granted(self.at, place_of(*gpu)));
            }
            _ => {}
        }
        self.client_does(context, |client, now| client.handle(now, command));
        if self.phase == Phase::Starts && self.client.is_allocated() {
            self.pause(context);
        }
    }

    pub fn has_work(&mut self, context: &mut Context) {
        if self.phase != Phase::Pauses {
            return;
        }
        if self.is_prepared() {
            return context.at(context.now + LATER, Happening::HasWork(self.at));
        }
        self.phase = Phase::HasWork;
        self.now_left = if self.is_steady { self.left } else { self.gpu_time.min(self.left) };
        self.left -= self.now_left;
        self.waits_since = Some(context.now);
        context.statistics.has_work(self.at, context.now);
        self.client_does(context, |client, now| client.begin_work(now));
    }

    pub fn work_done(&mut self, context: &mut Context) {
        self.now_left = Duration::ZERO;
        context.statistics.has_none(self.at, context.now);
        if self.left.is_zero() {
            return self.leave(context, End::Done(context.now));
        }
        self.pause(context);
        self.client_does(context, |client, now| client.end_work(now));
    }

    /// A pause before the next work, or none.
    fn pause(&mut self, context: &mut Context) {
        self.phase = Phase::Pauses;
        if self.is_steady {
            return self.has_work(context);
        }
        context.at(context.now + self.cpu_time, Happening::HasWork(self.at));
    }

    fn carry_out(&mut self, effects: Vec<Effect>, context: &mut Context) {
        let now = context.now;
        for effect in effects {
            match effect {
                Effect::Send(event) => context.send(event),
                Effect::Wake(at, timer) => context.at(at, Happening::Wakes(self.at, timer)),
                Effect::Move { gpu, way, bytes } => {
                    let Some(link) = context.links.get_mut(place_of(gpu)) else { continue };
                    let until = match way {
                        Way::Fresh => {
                            self.client_does(context, |client, now| client.moved(now, gpu, way, bytes));
                            continue;
                        }
                        Way::Out => {
                            context.statistics.swapped_out += bytes;
                            link.copy_out(now, bytes)
                        }
                        Way::Back => {
                            context.statistics.swapped_in += bytes;
                            link.copy_back(now, bytes)
                        }
                    };
                    context.at(until, Happening::Moved(self.at, gpu, way, bytes));
                }
                Effect::Run => {
                    if let Some(since) = self.waits_since.take().filter(|since| *since < now) {
                        context.statistics.waits.add(now - since);
                    }
                    context.engines.start(self.at, self.now_left, now, &mut context.queue);
                }
                Effect::Halt => {
                    self.now_left = context.engines.stop(self.at, now, &mut context.queue);
                    self.waits_since = Some(now);
                }
                Effect::Denied(_) => return self.leave(context, End::Failed),
            }
        }
    }

    /// The process ends.
    fn leave(&mut self, context: &mut Context, end: End) {
        self.phase = Phase::Over;
        if let Some(place) = context.statistics.ends.get_mut(self.at) {
            *place = Some(end);
        }
        context.send(Event::Disconnected { client: ClientId(self.at as u64) });
    }
}
