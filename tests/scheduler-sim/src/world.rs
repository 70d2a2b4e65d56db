//! A world in virtual time: the machine, its clients, and the messages between them. Messages keep
//! their order and take a little time.

use crate::{client::Phase, rooms::SimulatedRoom, sleep::Stage, *};
use nvshare_simulated_client::{Timer, Way};
use std::collections::BTreeSet;

#[derive(Debug)]
pub(crate) enum Happening {
    Start(ClientId),
    /// Delivers a measurement.
    ToMachine(Event),
    FromClient(ClientId, Event),
    ToClient(ClientId, Command),
    PhaseBegins(ClientId),
    WorkEnds(ClientId, u64),
    /// A timer that the client has set expires.
    Wakes(ClientId, Timer),
    Moved(ClientId, GpuId, Way, u64),
    /// The trouble of the GPUs changes.
    Trouble,
    Stop(ClientId),
    Cont(ClientId),
    Kill(ClientId),
    /// A client frees the bytes that it had already reported as freed.
    Frees(ClientId, GpuId),
    /// Reads a GPU's memory use, for a measurement that began at that time.
    Read(GpuId, Time),
    /// A periodic measurement, which the machine didn't request.
    Sample,
    /// Tells a random client to sleep or to run.
    SleepSomebody,
    /// Requests a room on a GPU, or closes the present room.
    Room(RoomId, GpuId),
    RoomCloses(RoomId),
    /// Checks whether a client is prepared.
    Prepares(ClientId),
    /// The checkpoint helper has finished with a process.
    Helps(ClientId, SleepOperation),
}

#[derive(Debug)]
pub struct World {
    pub machine: Machine,
    pub now: Time,
    pub totals: BTreeMap<GpuId, u64>,
    pub overheads: BTreeMap<GpuId, u64>,
    /// The host's memory, if it is limited.
    pub host: Option<u64>,
    /// The bytes that each group was promised at the last check.
    pub(crate) promised: BTreeMap<(GroupId, GpuId), u64>,
    /// The bytes that each client was promised at the last check.
    pub(crate) own_promised: BTreeMap<(ClientId, GpuId), u64>,
    pub models: BTreeMap<ClientId, Model>,
    pub history: Vec<(Time, Event)>,
    pub commands: Vec<(Time, Command)>,
    pub(crate) decisions: Decisions,
    pub rng: Dice,
    pub latency: Duration,
    /// Whether clients' memory is measured, as on a host with NVML. Otherwise the machine believes
    /// reports.
    pub measures: bool,
    /// Until this time, several holders and revokes without a cause are allowed, because settings
    /// have changed.
    pub tolerant: Time,
    /// GPUs on which a client may map more memory than the machine counts, at least until this
    /// time. Such a client tries to map beyond the capacity, or continues with its former allowance
    /// after a long silence.
    pub(crate) overdrawn: BTreeMap<GpuId, Time>,
    /// Whether mapping fails without room, even if the machine believes that there is room.
    pub physical: bool,
    /// The odds of failures, if clients are put to sleep.
    pub(crate) sleeps: Option<Sleeps>,
    /// The time after which no more rooms are opened.
    pub(crate) rooms_until: Time,
    /// The requested rooms. Each has its GPU, size, times, and whether its bytes are free.
    pub(crate) rooms: BTreeMap<RoomId, SimulatedRoom>,
    /// Each GPU's trouble, if mapping can fail.
    pub troubles: BTreeMap<GpuId, Trouble>,
    /// The time when the trouble ends, and the largest error of each measurement in bytes. Errors
    /// continue after the trouble.
    pub(crate) troubled: Time,
    pub(crate) error: u64,
    pub(crate) connected: BTreeSet<ClientId>,
    pub(crate) asked: BTreeMap<ClientId, GpuSet>,
    /// The number of each client's unanswered migrations.
    pub(crate) migrations: BTreeMap<ClientId, u32>,
    /// Whether a GPU has been drained. Clients then move without an administrator's order.
    pub(crate) has_drained: bool,
    /// The last allowance that each client was sent.
    pub(crate) allowed: BTreeMap<(ClientId, GpuId), u64>,
    pub(crate) queue: BTreeMap<(Time, u64), Happening>,
    pub(crate) last: BTreeMap<(ClientId, bool), Time>,
    pub(crate) counter: u64,
    /// The maximum number of steps. A world that takes more steps counts as an endless loop.
    pub most_steps: u64,
    /// The number of models that are not done.
    pub(crate) busy: usize,
    pub keep: bool,
    /// Whether expensive checks run, too.
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

    /// Creates a world with one GPU of `total` bytes.
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

    /// From now on, limits the host memory for evicted memory to `bytes`.
    pub fn set_host(&mut self, bytes: u64) {
        self.host = Some(bytes);
        self.feed(Event::HostMemory { bytes });
    }

    /// From now on, mapping fails without room. Until `until`, other programs start and end, some
    /// free memory cannot be mapped, and the driver sometimes fails. Each measurement is wrong by
    /// up to `error` bytes, also after `until`.
    pub fn trouble(&mut self, until: Time, error: u64) {
        (self.physical, self.troubled, self.error) = (true, until, error);
        self.measure();
        self.at(self.now, Happening::Trouble);
    }

    /// The machine is about to suspend, or has resumed. Until the resume, the checks accept any
    /// memory on GPUs as overdrawn.
    pub fn suspend(&mut self, suspended: bool) {
        let until = if suspended { Time::MAX } else { self.now };
        self.overdrawn.extend(self.totals.keys().map(|gpu| (*gpu, until)));
        self.feed(Event::Suspend { suspended });
    }

    /// From now on, measures clients' memory periodically and when the machine requests it.
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

    /// Queues a message behind all earlier messages.
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

    /// Runs until that time, or until no happenings are left. Returns whether all living clients
    /// are done.
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

    /// Gives an event to the machine, checks the invariants, and delivers the commands.
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
            Event::GangChanged { client, gang } => {
                self.models.get_mut(client).into_iter().for_each(|m| m.plan.gang = *gang);
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
        // If the machine has just learned that a charge was too low, the earlier charge cannot be
        // compared.
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
            let Some(to) = command.client() else {
                self.look(&command);
                continue;
            };
            self.send(to, false, Happening::ToClient(to, command));
        }
    }

    pub(crate) fn happen(&mut self, what: Happening) {
        let now = self.now;
        // A stopped process does no work.
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
            // The daemon looks up the client's rule at this moment.
            Happening::FromClient(id, Event::Groups { .. }) => {
                let group = self.models.get(&id).and_then(|m| m.plan.group);
                self.feed(Event::Groups { groups: [(id, group)].into() });
            }
            Happening::FromClient(_, event) | Happening::ToMachine(event) => self.feed(event),
            // A process that has finished its work still evicts memory and releases the lock.
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
                self.at(at, Happening::ToMachine(Event::Measured { gpu, begun, free: None, evicted: 0, found }));
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

    /// Carries out the machine's request to measure a GPU.
    pub(crate) fn look(&mut self, command: &Command) {
        let Command::Measure { gpu } = command else { return };
        if self.measures {
            let at = self.now + Duration::from_micros(self.rng.below(2000));
            self.at(at, Happening::Read(*gpu, self.now));
        } else {
            let believe =
                Event::Measured { gpu: *gpu, begun: self.now, free: None, evicted: 0, found: BTreeMap::new() };
            self.at(self.now, Happening::ToMachine(believe));
        }
    }

    /// A client's gang, from a rule or from the client itself, or 0.
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

    /// Changes the rules. From now on each client is in the group that `group_of` returns.
    pub fn regroup(&mut self, group_of: impl Fn(ClientId) -> Option<Group>) {
        let gangs = |world: &Self| -> Vec<u64> { world.models.keys().map(|id| world.gang(*id)).collect() };
        let before = gangs(self);
        for (id, model) in &mut self.models {
            model.plan.group = group_of(*id);
        }
        // If the gangs change, the reason for a revoke may be gone, and clients that ran together
        // may have to drain separately.
        let patience = if gangs(self) == before { ms(1) } else { Duration::from_secs(20) };
        self.tolerant = self.tolerant.max(self.now + patience);
        self.promised.clear();
        let groups = self.connected.iter().map(|id| (*id, self.models.get(id).and_then(|m| m.plan.group))).collect();
        self.feed(Event::Groups { groups });
    }
}
