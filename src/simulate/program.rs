//! One program, which alternates between pauses and work for its GPUs. The program's client answers
//! the scheduler.

use std::time::Duration;

use nvshare_simulated_client::{Client, Effect, Setup, Timer, Way};

use super::context::{Context, gpu_id, place_of};
use super::plans::Plan;
use super::queue::Happening;
use super::scenario::Job;
use super::statistics::End;
use crate::scheduler::{ClientId, Command, Engine, EnvLimits, Event, Group, Time};

/// Bytes per copy and report. The library's own chunks are at most a quarter of this size. Smaller
/// chunks shorten a hand-over by some milliseconds. For a hundred programs on a GPU, they change
/// the end of the last program by less than 3 percent.
const CHUNK: u64 = 256 << 20;

#[derive(Debug)]
pub struct Program {
    at: usize,
    client: Client,
    phase: Phase,
    /// The time with GPU work in an iteration, and the preceding time without GPU work.
    gpu_time: Duration,
    cpu_time: Duration,
    /// Whether the program always has work.
    is_steady: bool,
    /// GPU time that is left in total, and in this iteration.
    left: Duration,
    now_left: Duration,
    /// When the program got work or was interrupted. `None`: the program runs or has no work.
    waits_since: Option<Time>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The program waits for its contexts and its memory.
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
        client.allocate(Time::ZERO, job.memory, 0); // takes effect when the client is attached
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
        }
    }

    pub fn on_timer(&mut self, timer: Timer, context: &mut Context) {
        self.client_does(context, |client, now| client.wake(now, timer));
    }

    pub fn on_arrival(&mut self, context: &mut Context) {
        self.client_does(context, |client, _| client.connect());
    }

    /// Calls the client and carries out the returned effects. Does nothing if the program has
    /// ended.
    pub fn client_does(&mut self, context: &mut Context, does: impl FnOnce(&mut Client, Time) -> Vec<Effect>) {
        if self.phase != Phase::Over {
            let effects = does(&mut self.client, context.now);
            self.carry_out(effects, context);
        }
    }

    pub fn receive(&mut self, command: Command, context: &mut Context) {
        if self.phase == Phase::Over {
            return;
        }
        match &command {
            // Simulated processes are never stopped.
            Command::Probe { client } => return context.send(Event::Stopped { client: *client, stopped: false }),
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

    pub fn on_work(&mut self, context: &mut Context) {
        if self.phase != Phase::Pauses {
            return;
        }
        self.phase = Phase::HasWork;
        self.now_left = if self.is_steady { self.left } else { self.gpu_time.min(self.left) };
        self.left -= self.now_left;
        self.waits_since = Some(context.now);
        context.statistics.has_work(self.at, context.now);
        self.client_does(context, |client, now| client.begin_work(now));
    }

    pub fn on_work_done(&mut self, context: &mut Context) {
        self.now_left = Duration::ZERO;
        context.statistics.has_none(self.at, context.now);
        if self.left.is_zero() {
            return self.leave(context, End::Done(context.now));
        }
        self.pause(context);
        self.client_does(context, |client, now| client.end_work(now));
    }

    /// Schedules the pause before the next work. The pause may be zero.
    fn pause(&mut self, context: &mut Context) {
        self.phase = Phase::Pauses;
        if self.is_steady {
            return self.on_work(context);
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

    /// Ends the process.
    fn leave(&mut self, context: &mut Context, end: End) {
        self.phase = Phase::Over;
        if let Some(place) = context.statistics.ends.get_mut(self.at) {
            *place = Some(end);
        }
        context.send(Event::Disconnected { client: ClientId(self.at as u64) });
    }
}
