//! The world in which a policy is tried: the scheduler's machine and the programs, in virtual time. It carries messages, and
//! has happen what is next.

use std::collections::BTreeMap;
use std::time::Duration;

use super::engines::{Engines, Work};
use super::ledger::Ledger;
use super::memory::Link;
use super::plans::Plan;
use super::policies::Policy;
use super::program::Program;
use super::queue::{Happening, Next, Queue};
use super::report::Outcome;
use super::scenario::{FULL, Scenario};
use super::surroundings::{Surroundings, gpu_id, place_of};
use crate::scheduler::{ClientId, Command, Event, Group, GroupId, Machine, Time};

/// How long it takes to measure what is on a GPU, as NVML does.
const MEASUREMENT: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub struct World {
    machine: Machine,
    programs: Vec<Program>,
    around: Surroundings,
    until: Time,
    policy: &'static str,
    /// Events that the machine was given.
    events: u64,
    /// Programs that have not ended.
    left: usize,
}

impl World {
    pub fn new(scenario: &Scenario, plans: &[Plan], policy: &Policy) -> Self {
        let groups = scenario.jobs.iter().zip(1..).map(|(job, number)| {
            let limits = job.rule.filter(|_| policy.rules)?;
            Some(Group { id: GroupId(number), limits })
        });
        let groups: Vec<Option<Group>> = groups.collect();
        let of = |plan: &Plan| Some((scenario.jobs.get(plan.job)?, groups.get(plan.job).copied().flatten()));
        let described = plans.iter().enumerate().filter_map(|(at, plan)| Some((at, plan, of(plan)?)));
        let programs: Vec<Program> =
            described.map(|(at, plan, (job, group))| Program::new(at, plan, job, group)).collect();
        let fullness = |plan: &Plan| scenario.jobs.get(plan.job).map_or(FULL, |job| job.fullness());
        let works = plans.iter().map(|plan| Work::new(plan.gpus.clone(), fullness(plan))).collect();
        let mut world = Self {
            machine: Machine::new(policy.settings(&scenario.settings)),
            left: programs.len(),
            programs,
            around: Surroundings {
                now: Time::ZERO,
                queue: Queue::default(),
                engines: Engines::new(scenario.gpus.len(), works),
                links: scenario.gpus.iter().map(|gpu| Link::new(gpu.link)).collect(),
                ledger: Ledger::new(scenario, plans),
            },
            until: scenario.until,
            policy: policy.name,
            events: 0,
        };
        for (place, gpu) in scenario.gpus.iter().enumerate() {
            world.feed(Event::GpuFound { gpu: gpu_id(place), total: gpu.memory });
            world.feed(Event::GpuLink { gpu: gpu_id(place), rate: gpu.link });
        }
        if let Some(bytes) = scenario.swap {
            world.feed(Event::HostMemory { bytes });
        }
        for (at, plan) in plans.iter().enumerate() {
            world.around.at(plan.arrives, Happening::Arrives(at));
        }
        world
    }

    /// Until all programs have ended, or the time is over, or nothing will ever happen again.
    pub fn play(mut self) -> Outcome {
        while self.left > 0 {
            let next = self.around.queue.next().into_iter().chain(self.machine.deadline()).min();
            let Some(next) = next else { break };
            self.around.now = self.around.now.max(next.min(self.until));
            if next > self.until {
                break;
            }
            match self.around.queue.pop(self.around.now) {
                Some(Next::ToMachine(event)) => self.feed(event),
                Some(Next::ToProgram(client, command)) => self.tell(client, command),
                Some(Next::Happening(what)) => self.happen(what),
                None => self.feed(Event::Tick),
            }
        }
        let Surroundings { now, mut ledger, mut engines, .. } = self.around;
        Outcome {
            policy: self.policy,
            could: Some(ledger.could(now)),
            had: engines.had(now),
            ends: ledger.ends,
            waits: ledger.waits,
            hand_overs: ledger.hand_overs,
            swapped_out: ledger.swapped_out,
            swapped_in: ledger.swapped_in,
            ended: now,
            events: self.events,
        }
    }

    fn feed(&mut self, event: Event) {
        self.events += 1;
        if let Event::Disconnected { .. } = event {
            self.left -= 1;
        }
        let now = self.around.now;
        for command in self.machine.handle(now, event) {
            match addressee(&command) {
                Some(client) => self.around.queue.tell(now, client, command),
                None => {
                    if let Command::Measure { gpu } = command {
                        self.around.at(now + MEASUREMENT, Happening::Measured(place_of(gpu), now));
                    }
                }
            }
        }
    }

    fn tell(&mut self, client: ClientId, command: Command) {
        let program = usize::try_from(client.0).ok().and_then(|at| self.programs.get_mut(at));
        if let Some(program) = program {
            program.receive(command, &mut self.around);
        }
    }

    fn happen(&mut self, what: Happening) {
        let around = &mut self.around;
        let mut with = |at: usize, f: &mut dyn FnMut(&mut Program, &mut Surroundings)| {
            if let Some(program) = self.programs.get_mut(at) {
                f(program, around);
            }
        };
        match what {
            Happening::Arrives(at) => with(at, &mut |program, around| program.arrives(around)),
            Happening::HasWork(at) => with(at, &mut |program, around| program.has_work(around)),
            Happening::WorkDone(at, number) => with(at, &mut |program, around| {
                if around.engines.done(at, number, around.now, &mut around.queue) {
                    program.work_done(around);
                }
            }),
            Happening::Quiet(at, pause) => with(at, &mut |program, around| program.quiet(pause, around)),
            Happening::Sampled(at, turn) => with(at, &mut |program, around| program.sampled(turn, around)),
            Happening::Drained(at, turn) => with(at, &mut |program, around| program.drained(turn, around)),
            Happening::Lingers(at, turn) => with(at, &mut |program, around| program.lingers(turn, around)),
            Happening::Copied(at, place) => with(at, &mut |program, around| program.copied(place, around)),
            // Programs are believed: none of them lies.
            Happening::Measured(place, begun) => {
                self.feed(Event::Measured { gpu: gpu_id(place), begun, free: None, found: BTreeMap::new() });
            }
        }
    }
}

/// The program that is told, if any is: the others are for people and for what measures.
fn addressee(command: &Command) -> Option<ClientId> {
    match command {
        Command::Measure { .. }
        | Command::EvictionBlocked { .. }
        | Command::Undrainable { .. }
        | Command::MappingFailed { .. }
        | Command::Placed { .. }
        | Command::Unplaced { .. }
        | Command::Thrashing { .. } => None,
        Command::Attached { client, .. }
        | Command::Limit { client, .. }
        | Command::Denied { client, .. }
        | Command::Allowance { client, .. }
        | Command::Grant { client, .. }
        | Command::Revoke { client, .. }
        | Command::Contended { client, .. }
        | Command::Waiting { client, .. }
        | Command::Reserved { client, .. }
        | Command::Prepare { client, .. }
        | Command::Probe { client } => Some(*client),
    }
}
