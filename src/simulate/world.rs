//! The simulation of a scenario under a policy: the scheduler's state machine and the programs, in
//! virtual time. Delivers messages and runs events in order.

use std::collections::BTreeMap;
use std::time::Duration;

use super::context::{Context, gpu_id, place_of};
use super::drawing::Drawing;
use super::engines::{Engines, Work};
use super::link::Link;
use super::plans::Plan;
use super::policies::Policy;
use super::program::Program;
use super::queue::{Happening, Next, Queue};
use super::report::Outcome;
use super::scenario::{FULL, Gpu, Scenario};
use super::statistics::Statistics;
use crate::scheduler::{ClientId, Command, Event, Group, GroupId, Machine, Time};
use crate::timeline::Timeline;

/// Duration of a measurement of a GPU's memory, similar to a measurement with NVML.
const MEASUREMENT: Duration = Duration::from_millis(2);

#[derive(Debug)]
pub struct World {
    machine: Machine,
    programs: Vec<Program>,
    context: Context,
    until: Time,
    policy: &'static str,
    /// The number of events that the machine has handled.
    events: u64,
    /// The number of programs that have not ended.
    left: usize,
    drawing: Option<Drawing>,
}

impl World {
    /// `gpus` are the GPUs to which the plans' indices refer.
    pub fn new(scenario: &Scenario, gpus: &[Gpu], plans: &[Plan], policy: &Policy) -> Self {
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
            context: Context {
                now: Time::ZERO,
                queue: Queue::default(),
                engines: Engines::new(gpus.len(), works),
                links: gpus.iter().map(|gpu| Link::new(gpu.link, gpu.link_total)).collect(),
                statistics: Statistics::new(scenario, gpus.len(), plans),
            },
            until: scenario.until,
            policy: policy.name,
            events: 0,
            drawing: None,
        };
        for (place, gpu) in gpus.iter().enumerate() {
            world.feed(Event::GpuFound { gpu: gpu_id(place), total: gpu.memory });
            world.feed(Event::GpuLink { gpu: gpu_id(place), rate: gpu.link });
        }
        if let Some(bytes) = scenario.swap {
            world.feed(Event::HostMemory { bytes });
        }
        for (at, plan) in plans.iter().enumerate() {
            world.context.at(plan.arrives, Happening::Arrives(at));
        }
        world
    }

    /// Runs the simulation and returns its timeline. `names` are the programs' names, in the order
    /// of the plans.
    pub fn draw(mut self, names: Vec<String>) -> Timeline {
        self.drawing = Some(Drawing::new(names));
        self.run();
        self.drawing.take().unwrap_or_default().finish(self.context.now)
    }

    pub fn play(mut self) -> Outcome {
        self.run();
        let Context { now, mut statistics, mut engines, .. } = self.context;
        Outcome {
            policy: self.policy,
            could: Some(statistics.could(now)),
            had: engines.gpu_times(now),
            ends: statistics.ends,
            waits: statistics.waits,
            hand_overs: statistics.hand_overs,
            swapped_out: statistics.swapped_out,
            swapped_in: statistics.swapped_in,
            ended: now,
            events: self.events,
        }
    }

    /// Runs until all programs have ended, the scenario's time is over, or no event is left.
    fn run(&mut self) {
        while self.left > 0 {
            let next = self.context.queue.next().into_iter().chain(self.machine.deadline()).min();
            let Some(next) = next else { break };
            self.context.now = self.context.now.max(next.min(self.until));
            if next > self.until {
                break;
            }
            match self.context.queue.pop(self.context.now) {
                Some(Next::ToMachine(event)) => self.feed(event),
                Some(Next::ToProgram(client, command)) => self.tell(client, command),
                Some(Next::Happening(what)) => self.happen(what),
                None => self.feed(Event::Tick),
            }
        }
    }

    fn feed(&mut self, event: Event) {
        self.events += 1;
        if let Event::Disconnected { .. } = event {
            self.left -= 1;
        }
        let now = self.context.now;
        let noted = self.drawing.is_some().then(|| event.clone());
        let commands = self.machine.handle(now, event);
        if let Some((drawing, event)) = self.drawing.as_mut().zip(noted) {
            drawing.note(now, &event, &commands);
        }
        for command in commands {
            if let Some(client) = command.client() {
                self.context.queue.tell(now, client, command);
            } else if let Command::Measure { gpu } = command {
                self.context.at(now + MEASUREMENT, Happening::Measured(place_of(gpu), now));
            }
        }
    }

    fn tell(&mut self, client: ClientId, command: Command) {
        let program = usize::try_from(client.0).ok().and_then(|at| self.programs.get_mut(at));
        if let Some(program) = program {
            program.receive(command, &mut self.context);
        }
    }

    fn happen(&mut self, what: Happening) {
        if let (Some(drawing), &Happening::Moved(at, gpu, way, bytes)) = (&mut self.drawing, &what) {
            let (now, link) = (self.context.now, self.context.links.get(place_of(gpu)));
            let took = link.map_or(Duration::ZERO, |link| link.carries(bytes));
            drawing.moved(now.saturating_sub(took), now, ClientId(at as u64), gpu, way, bytes);
        }
        let context = &mut self.context;
        let mut with = |at: usize, f: &mut dyn FnMut(&mut Program, &mut Context)| {
            if let Some(program) = self.programs.get_mut(at) {
                f(program, context);
            }
        };
        match what {
            Happening::Arrives(at) => with(at, &mut |program, context| program.on_arrival(context)),
            Happening::HasWork(at) => with(at, &mut |program, context| program.on_work(context)),
            Happening::WorkDone(at, number) => with(at, &mut |program, context| {
                if context.engines.done(at, number, context.now, &mut context.queue) {
                    program.on_work_done(context);
                }
            }),
            Happening::Wakes(at, timer) => with(at, &mut |program, context| {
                program.on_timer(timer, context);
            }),
            Happening::Moved(at, gpu, way, bytes) => with(at, &mut |program, context| {
                program.client_does(context, |client, now| client.moved(now, gpu, way, bytes));
            }),
            // Simulated programs report correctly, so the measurement adds no information.
            Happening::Measured(place, begun) => {
                let gpu = gpu_id(place);
                self.feed(Event::Measured { gpu, begun, free: None, evicted: 0, found: BTreeMap::new() });
            }
        }
    }
}
