//! A world in virtual time: the machine, its clients, and the messages between them, which keep their order and take a little time.

use crate::{client::Phase, rooms::SimulatedRoom, sleep::Stage, *};
use nvshare_simulated_client::{Timer, Way};
use std::collections::BTreeSet;

#[derive(Debug)]
pub(crate) enum Happening {
    Start(ClientId),
    /// A measurement.
    ToMachine(Event),
    FromClient(ClientId, Event),
    ToClient(ClientId, Command),
    PhaseBegins(ClientId),
    WorkEnds(ClientId, u64),
    /// Its client asked to be woken.
    Wakes(ClientId, Timer),
    Moved(ClientId, GpuId, Way, u64),
    /// Something else ails the GPUs.
    Trouble,
    Stop(ClientId),
    Cont(ClientId),
    Kill(ClientId),
    /// A lie becomes the truth.
    Frees(ClientId, GpuId),
    /// What is on a GPU is looked at, for a measurement that was begun then.
    Read(GpuId, Time),
    /// It is time for a measurement that nobody asked for.
    Sample,
    /// Somebody is told to sleep, or to run.
    SleepSomebody,
    /// A room is asked for on a GPU, or is no longer needed.
    Room(RoomId, GpuId),
    RoomCloses(RoomId),
    /// A client looks whether it is prepared.
    Prepares(ClientId),
    /// The checkpoint helper is done with a process.
    Helps(ClientId, SleepOperation),
}

#[derive(Debug)]
pub struct World {
    pub machine: Machine,
    pub now: Time,
    pub totals: BTreeMap<GpuId, u64>,
    pub overheads: BTreeMap<GpuId, u64>,
    /// The host's memory, where that is bounded.
    pub host: Option<u64>,
    /// What each group was promised when it was last looked at.
    pub(crate) promised: BTreeMap<(GroupId, GpuId), u64>,
    /// The same of each client that bounds itself.
    pub(crate) own_promised: BTreeMap<(ClientId, GpuId), u64>,
    pub models: BTreeMap<ClientId, Model>,
    pub history: Vec<(Time, Event)>,
    pub commands: Vec<(Time, Command)>,
    pub(crate) decisions: Decisions,
    pub rng: Dice,
    pub latency: Duration,
    /// What clients have is measured, as NVML does; else they are believed.
    pub measures: bool,
    /// Exceptions to "one holder" and "nobody is revoked for nothing" until then, since settings changed.
    pub tolerant: Time,
    /// GPUs where a client may map, or has mapped, more than the machine counts with, until then at least: it tries to, or
    /// it did not answer for long and goes on with what it was allowed before.
    pub(crate) overdrawn: BTreeMap<GpuId, Time>,
    /// Mapping fails where there is no room, whatever the machine believes.
    pub physical: bool,
    /// How clients are put to sleep.
    pub(crate) sleeps: Option<Sleeps>,
    /// Rooms come and go until then.
    pub(crate) rooms_until: Time,
    /// Rooms that were asked for: when, on which GPU, how large, until when, and whether its bytes are free.
    pub(crate) rooms: BTreeMap<RoomId, SimulatedRoom>,
    /// What ails each GPU, where mapping can fail.
    pub troubles: BTreeMap<GpuId, Trouble>,
    /// Until when there is trouble, and by how many bytes each measurement is wrong at most, also afterwards.
    pub(crate) troubled: Time,
    pub(crate) error: u64,
    pub(crate) connected: BTreeSet<ClientId>,
    pub(crate) asked: BTreeMap<ClientId, GpuSet>,
    /// Migrations that were not answered.
    pub(crate) migrations: BTreeMap<ClientId, u32>,
    /// A GPU has been drained, so clients move that no administrator named.
    pub(crate) has_drained: bool,
    /// The allowance that each was last sent.
    pub(crate) allowed: BTreeMap<(ClientId, GpuId), u64>,
    pub(crate) queue: BTreeMap<(Time, u64), Happening>,
    pub(crate) last: BTreeMap<(ClientId, bool), Time>,
    pub(crate) counter: u64,
    /// More are taken for a loop.
    pub most_steps: u64,
    /// Models that are not done.
    pub(crate) busy: usize,
    pub keep: bool,
    /// How often the checks that cost much are made.
    pub thorough: bool,
}

impl World {
    pub fn new(settings: Settings, seed: u64) -> Self {
        Self {
            machine: Machine::new(settings),
            now: Time::ZERO,
            totals: BTreeMap::new(),
            overheads: BTreeMap::new(),
            host: None,
            promised: BTreeMap::new(),
            own_promised: BTreeMap::new(),
            models: BTreeMap::new(),
            history: Vec::new(),
            commands: Vec::new(),
            decisions: Decisions::of_this_test(),
            rng: Dice::new(seed),
            latency: Duration::from_micros(20),
            measures: false,
            tolerant: Time::ZERO,
            overdrawn: BTreeMap::new(),
            physical: false,
            sleeps: None,
            rooms_until: Time::ZERO,
            rooms: BTreeMap::new(),
            troubles: BTreeMap::new(),
            troubled: Time::ZERO,
            error: 0,
            connected: BTreeSet::new(),
            asked: BTreeMap::new(),
            migrations: BTreeMap::new(),
            has_drained: false,
            allowed: BTreeMap::new(),
            queue: BTreeMap::new(),
            last: BTreeMap::new(),
            counter: 0,
            most_steps: 300_000,
            busy: 0,
            keep: true,
            thorough: true,
        }
    }

    /// A world with one GPU of that size.
    pub fn with_gpu(anti_thrash: AntiThrash, quantum: Duration, total: u64) -> Self {
        let mut world = Self::new(settings(anti_thrash, quantum), 1);
        world.add_gpu(gpu(0), total, 0);
        world
    }

    pub fn add_gpu(&mut self, gpu: GpuId, total: u64, overhead: u64) {
        self.totals.insert(gpu, total);
        self.overheads.insert(gpu, overhead);
        self.feed(Event::GpuFound { gpu, total });
        self.feed(Event::GpuOverhead { gpu, begun: self.now, bytes: overhead, others: 0, complete: true });
    }

    /// From now on what is swapped out has so much room.
    pub fn set_host(&mut self, bytes: u64) {
        self.host = Some(bytes);
        self.feed(Event::HostMemory { bytes });
    }

    /// From now on mapping fails where there is no room; until that time programs outside come and go, memory cannot be had
    /// that is free, and the driver fails for a while. Each measurement is wrong by up to `error` bytes, also afterwards.
    pub fn trouble(&mut self, until: Time, error: u64) {
        (self.physical, self.troubled, self.error) = (true, until, error);
        self.measure();
        self.at(self.now, Happening::Trouble);
    }

    /// The machine is about to sleep, or has woken up. Until then all memory is too much.
    pub fn sleep(&mut self, asleep: bool) {
        let until = if asleep { Time::MAX } else { self.now };
        self.overdrawn.extend(self.totals.keys().map(|gpu| (*gpu, until)));
        self.feed(Event::Sleep { asleep });
    }

    /// From now on what clients have is measured: when the machine asks, and every now and then.
    pub fn measure(&mut self) {
        self.measures = true;
        self.at(self.now, Happening::Sample);
    }

    pub fn add(&mut self, plan: Plan) -> ClientId {
        let id = ClientId(self.models.len() as u64 + 1);
        self.at(plan.start, Happening::Start(id));
        if let Some((from, to)) = plan.stopped {
            self.at(from, Happening::Stop(id));
            self.at(to, Happening::Cont(id));
        }
        if let Some(at) = plan.killed {
            self.at(at, Happening::Kill(id));
        }
        self.busy += usize::from(!plan.endless);
        let model = Model::new(id, plan);
        self.models.insert(id, model);
        id
    }

    pub(crate) fn at(&mut self, at: Time, what: Happening) {
        self.counter += 1;
        self.queue.insert((at, self.counter), what);
    }

    /// On its way, behind what was sent before.
    pub(crate) fn send(&mut self, client: ClientId, up: bool, what: Happening) {
        let delay = Duration::from_nanos(self.rng.below(self.latency.as_nanos() as u64 + 1));
        let last = self.last.entry((client, up)).or_default();
        let at = (self.now + delay).max(*last);
        *last = at;
        self.at(at, what);
    }

    pub(crate) fn say(&mut self, client: ClientId, event: Event) {
        self.send(client, true, Happening::FromClient(client, event));
    }

    /// Runs until that time, or until nothing happens any more. Returns whether all living clients are done.
    pub fn run(&mut self, until: Time) -> bool {
        let mut steps = 0u64;
        loop {
            steps += 1;
            assert!(steps < self.most_steps, "no end: {:?} {:?}", self.queue.first_key_value(), self.machine.gpus());
            let happening = self.queue.first_key_value().map(|((at, _), _)| *at);
            let deadline = self.machine.deadline();
            let next = match (happening, deadline) {
                (Some(a), Some(b)) => a.min(b),
                (Some(a), None) | (None, Some(a)) => a,
                (None, None) => break,
            };
            if next > until {
                self.now = until;
                break;
            }
            self.now = self.now.max(next);
            if happening.is_some_and(|at| at <= self.now) {
                let (_, what) = self.queue.pop_first().unwrap();
                self.happen(what);
            } else {
                self.feed(Event::Tick);
            }
            if self.all_done() {
                break;
            }
        }
        self.all_done()
    }

    pub fn all_done(&self) -> bool {
        self.busy == 0
    }

    /// Gives an event to the machine, checks what must hold, and carries the commands.
    pub fn feed(&mut self, event: Event) {
        match &event {
            Event::Connected { client, .. } => drop(self.connected.insert(*client)),
            Event::Disconnected { client } => {
                self.connected.remove(client);
                self.asked.remove(client);
                self.migrations.remove(client);
            }
            Event::Requested { client, gpus } => drop(self.asked.insert(*client, gpus.clone())),
            Event::Migrate { client, .. } if self.connected.contains(client) => {
                *self.migrations.entry(*client).or_default() += 1;
            }
            Event::Configure(_) => self.tolerant = self.now + Duration::from_secs(20),
            _ => {}
        }
        if self.keep {
            self.history.push((self.now, event.clone()));
        }
        let before = self.measures.then(|| (self.charges(), self.unfreed()));
        let mut commands = self.machine.handle(self.now, event);
        self.decisions.add(self.now, &commands);
        if self.keep {
            self.commands.extend(commands.iter().map(|command| (self.now, command.clone())));
        }
        self.move_clients(&mut commands);
        // What a charge was before it was found to be too low says nothing.
        if let Some((before, unfreed)) = before
            && unfreed == self.unfreed()
        {
            self.check_credit(&before, &commands);
        }
        if let Some(at) = self.machine.deadline() {
            assert!(at > self.now, "a deadline that has passed already: {at:?} at {:?}", self.now);
        }
        for command in &commands {
            self.check_command(command);
            self.note_room(command);
        }
        self.check_rooms();
        if self.thorough {
            self.check_migrations();
            self.check_state();
            self.check_groups();
            self.check_own();
        }
        for command in commands {
            if let Command::Allowance { client, gpu, bytes, .. } = command {
                self.allowed.insert((client, gpu), bytes);
            }
            let Some(to) = addressee(&command) else {
                self.look(&command);
                continue;
            };
            self.send(to, false, Happening::ToClient(to, command));
        }
    }

    pub(crate) fn happen(&mut self, what: Happening) {
        let now = self.now;
        // Nothing goes on in a process that is stopped.
        if let Happening::PhaseBegins(id)
        | Happening::WorkEnds(id, _)
        | Happening::Wakes(id, _)
        | Happening::Moved(id, ..) = what
            && self.models.get(&id).is_some_and(|m| m.stopped || m.sleeper.stage == Stage::Prepared)
        {
            if let Happening::PhaseBegins(_) = what {
                self.wants_driver(id);
            }
            return self.at(now + ms(100), what);
        }
        match what {
            Happening::Start(id) => self.start(id),
            // Which rule it has is what the daemon finds now.
            Happening::FromClient(id, Event::Groups { .. }) => {
                let group = self.models.get(&id).and_then(|m| m.plan.group);
                self.feed(Event::Groups { groups: [(id, group)].into() });
            }
            Happening::FromClient(_, event) | Happening::ToMachine(event) => self.feed(event),
            // A process that is done but stays still evicts and releases.
            Happening::ToClient(id, command) if self.connected.contains(&id) => {
                let Some(model) = self.models.get_mut(&id) else { return };
                match command {
                    Command::Probe { .. } => {
                        let stopped = model.stopped;
                        self.feed(Event::Stopped { client: id, stopped });
                    }
                    Command::Checkpoint { operation, moves, .. } => self.call_helper(id, operation, moves),
                    _ if model.stopped => model.inbox.push_back(command),
                    _ => self.receive(id, command),
                }
            }
            Happening::ToClient(..) => {}
            Happening::PhaseBegins(id) => self.begin(id),
            Happening::WorkEnds(id, epoch) => self.work_ends(id, epoch),
            Happening::Wakes(id, timer) => self.client_does(id, |client| client.wake(now, timer)),
            Happening::Moved(id, gpu, way, bytes) => self.moved(id, gpu, way, bytes),
            Happening::Trouble => self.make_trouble(),
            Happening::Stop(id) => {
                if let Some(m) = self.models.get_mut(&id).filter(|m| m.phase != Phase::Done) {
                    m.stopped = true;
                }
            }
            Happening::Cont(id) => {
                let Some(m) = self.models.get_mut(&id).filter(|m| m.stopped) else { return };
                m.stopped = false;
                let until = self.now + Duration::from_secs(1);
                self.overdrawn.extend(m.plan.gpus.iter().map(|gpu| (*gpu, until)));
                let inbox = std::mem::take(&mut m.inbox);
                self.feed(Event::Stopped { client: id, stopped: false });
                for command in inbox {
                    self.receive(id, command);
                }
            }
            Happening::Frees(id, gpu) => {
                if let Some(m) = self.models.get_mut(&id) {
                    m.hidden.remove(&gpu);
                }
            }
            Happening::Sample => {
                let gpus: Vec<GpuId> = self.totals.keys().copied().collect();
                gpus.into_iter().for_each(|gpu| self.at(self.now, Happening::Read(gpu, self.now)));
                self.at(self.now + ms(200), Happening::Sample);
            }
            Happening::Read(gpu, begun) => {
                let there =
                    self.models.iter().filter(|(id, m)| m.plan.gpus.contains(&gpu) && self.connected.contains(id));
                let found = there.map(|(id, m)| (*id, exactly(m.has(gpu)))).collect();
                let at = self.now + Duration::from_micros(self.rng.below(2000));
                if self.sleeps.is_some() {
                    let bytes = self.overhead_now(gpu);
                    self.at(
                        at,
                        Happening::ToMachine(Event::GpuOverhead { gpu, begun, bytes, others: 0, complete: true }),
                    );
                }
                if self.physical {
                    return self.read_wrongly(gpu, begun, at, found);
                }
                self.at(at, Happening::ToMachine(Event::Measured { gpu, begun, free: None, found }));
            }
            Happening::Room(room, gpu) => self.ask_for_room(room, gpu),
            Happening::RoomCloses(room) => self.close_room(room),
            Happening::SleepSomebody => self.sleep_somebody(),
            Happening::Prepares(id) => self.prepares(id),
            Happening::Helps(id, operation) => self.helps(id, operation),
            Happening::Kill(id) => {
                if self.connected.contains(&id) {
                    self.gone(id);
                }
            }
        }
    }

    /// The machine wants to know what is on a GPU.
    pub(crate) fn look(&mut self, command: &Command) {
        let Command::Measure { gpu } = command else { return };
        if self.measures {
            let at = self.now + Duration::from_micros(self.rng.below(2000));
            self.at(at, Happening::Read(*gpu, self.now));
        } else {
            let believe = Event::Measured { gpu: *gpu, begun: self.now, free: None, found: BTreeMap::new() };
            self.at(self.now, Happening::ToMachine(believe));
        }
    }

    /// The gang that a client is in, by a rule or by what it says; 0: none.
    pub(crate) fn gang(&self, client: ClientId) -> u64 {
        let Some(plan) = self.models.get(&client).map(|m| &m.plan) else { return 0 };
        plan.group.filter(|group| group.limits.gang).map_or(plan.gang, |group| 1000 + group.id.0)
    }

    pub(crate) fn grows(&self) -> bool {
        self.machine.settings().anti_thrash == AntiThrash::Off
    }

    pub(crate) fn undrainable(&self, client: ClientId, id: GpuId) -> bool {
        let view = self.machine.gpu(id).unwrap();
        view.holders.iter().any(|h| h.client == client && h.state == LockState::Undrainable)
    }

    /// Rules are others: from now on these clients are in these groups.
    pub fn regroup(&mut self, group_of: impl Fn(ClientId) -> Option<Group>) {
        let gangs = |world: &Self| -> Vec<u64> { world.models.keys().map(|id| world.gang(*id)).collect() };
        let before = gangs(self);
        for (id, model) in &mut self.models {
            model.plan.group = group_of(*id);
        }
        // Who was in somebody's way may be so no longer; who ran together may have to drain apart.
        let patience = if gangs(self) == before { ms(1) } else { Duration::from_secs(20) };
        self.tolerant = self.tolerant.max(self.now + patience);
        self.promised.clear();
        let groups = self.connected.iter().map(|id| (*id, self.models.get(id).and_then(|m| m.plan.group))).collect();
        self.feed(Event::Groups { groups });
    }
}
