//! A world in virtual time around the scheduler's machine: clients that behave as the library does (or do not), and
//! checks after every event of what must always hold. Messages take a little time in both directions and keep their
//! order, so that they cross as they do in life.

mod decisions;

pub use decisions::Decisions;
use nvshare_sched::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;
/// Over which parts of the time are counted.
pub const PERIOD: Duration = Duration::from_secs(10);

pub fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub fn gpu(n: u64) -> GpuId {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    GpuId(Uuid(bytes))
}

pub fn gpus<const N: usize>(n: [u64; N]) -> GpuSet {
    n.into_iter().map(gpu).collect()
}

pub fn client(n: u64) -> ClientId {
    ClientId(n)
}

pub fn settings(anti_thrash: AntiThrash, time_quantum: Duration) -> Settings {
    Settings {
        time_quantum,
        anti_thrash,
        policy: PolicyName::Fcfs,
        max_wait: Duration::ZERO,
        reserve: 0,
        context: 0,
        time_period: PERIOD,
        placement: Placement::None,
    }
}

/// What a measurement finds that leaves no doubt.
pub fn exactly(bytes: u64) -> Found {
    Found { least: bytes, most: bytes }
}

/// Made-up behaviour: the same for the same seed.
#[derive(Debug, Clone)]
pub struct Dice(fastrand::Rng);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }
    pub fn seed(&mut self) -> u64 {
        self.0.u64(..)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.0.u64(..n.max(1))
    }
    pub fn between(&mut self, a: Duration, b: Duration) -> Duration {
        a + Duration::from_nanos(self.below((b.saturating_sub(a)).as_nanos() as u64 + 1))
    }
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// What keeps clients from mapping what seems to be free on a GPU.
#[derive(Debug, Clone, Copy, Default)]
pub struct Trouble {
    /// Bytes that programs outside have.
    pub stranger: u64,
    /// Bytes that are free and cannot be had.
    pub fragmented: u64,
    /// Every mapping fails until then.
    pub refuses_until: Time,
}

/// What a program does, and how well its library behaves.
#[derive(Debug, Clone)]
pub struct Plan {
    pub gpus: GpuSet,
    pub gang: u64,
    /// Its work and that of all others of this job, where it is not 0, run only together: each spins until the others are
    /// there, and cannot drain meanwhile.
    pub job: u64,
    pub user: UserId,
    /// What it counts with others for, and how much that may be.
    pub group: Option<Group>,
    /// What it says of itself.
    pub own: EnvLimits,
    /// How full it keeps a GPU, in thousandths, if it says so.
    pub fullness: Option<u32>,
    pub engine: Engine,
    pub demand: u64,
    /// What it allocates besides at the beginning of each phase.
    pub growth: u64,
    pub pinned: u64,
    /// When it starts.
    pub start: Time,
    pub phases: u32,
    /// Without GPU work before each phase, and with.
    pub cpu: Duration,
    pub gpu: Duration,
    /// Between a revoke and the release. One that takes long says so once, as the library does.
    pub drain: Duration,
    /// Its work never ends, and it never releases. The world does not wait for it.
    pub endless: bool,
    /// Bytes a second that it can evict.
    pub rate: u64,
    /// How often it answers a revoke with Stuck and works on.
    pub stuck: u32,
    /// Stopped from then to then.
    pub stopped: Option<(Time, Time)>,
    /// Killed then.
    pub killed: Option<Time>,
    pub lie: Option<Lie>,
    /// Leaves when its phases are done, and does not stay idle with its memory.
    pub leaves: bool,
}

/// So many bytes it reports as freed whenever it evicts, and keeps: for so long, or until it may have them again.
#[derive(Debug, Clone, Copy)]
pub struct Lie {
    pub bytes: u64,
    pub late: Option<Duration>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            gpus: gpus([0]),
            gang: 0,
            job: 0,
            user: UserId(0),
            group: None,
            own: EnvLimits::default(),
            fullness: None,
            engine: Engine::Swap,
            demand: GIB,
            growth: 0,
            pinned: 0,
            start: Time::ZERO,
            phases: 1,
            cpu: Duration::ZERO,
            gpu: ms(100),
            drain: Duration::ZERO,
            endless: false,
            rate: 40 * GIB,
            stuck: 0,
            stopped: None,
            killed: None,
            lie: None,
            leaves: true,
        }
    }
}

/// A drain that takes longer is reported.
const LONG: Duration = Duration::from_secs(2);
/// Work that never ends.
pub const ENDLESS: Duration = Duration::from_secs(1 << 20);

#[derive(Debug, Default, Clone)]
pub struct Place {
    pub limit: u64,
    pub limit_seq: u32,
    /// What it has allocated: all that it plans, or what it could get.
    pub demand: u64,
    /// Waits for a higher limit, and since when.
    pub wishes: Option<Time>,
    pub denied: bool,
    pub allowance: u64,
    pub mapped: u64,
    /// There as well, and reported as freed.
    pub hidden: u64,
    pub seq: u32,
    todo: VecDeque<(u32, u64)>,
    busy: bool,
    /// It tries to map what it lacks.
    tries: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Cpu,
    Gpu,
    Done,
}

#[derive(Debug)]
pub struct Model {
    pub plan: Plan,
    pub places: BTreeMap<GpuId, Place>,
    pub holds: GpuSet,
    attached: GpuSet,
    revoked: GpuSet,
    contended: BTreeMap<GpuId, Duration>,
    phase: Phase,
    left: u32,
    remaining: Duration,
    /// Work is running since then.
    running: Option<Time>,
    /// Its part of the job's work is on the GPU.
    submitted: bool,
    idle_since: Time,
    asked: Option<Time>,
    stuck: u32,
    inbox: VecDeque<Command>,
    stopped: bool,
    epoch: u64,
    /// Start to end of each burst, waiting included.
    pub bursts: Vec<(Time, Time)>,
    pub waits: Vec<Duration>,
    pub finished: Option<Time>,
}

#[derive(Debug)]
enum Happening {
    Start(ClientId),
    ToMachine(Event),
    ToClient(ClientId, Command),
    PhaseBegins(ClientId),
    WorkEnds(ClientId, u64),
    Drained(ClientId, GpuSet),
    Lingers(ClientId, GpuSet),
    Evicted(ClientId, GpuId),
    Quiet(ClientId, u64),
    /// It tries again to map what it lacks, which it has done since then.
    TriesToMap(ClientId, GpuId, Time),
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
    /// It is time to say what moves.
    Traffic,
}

#[derive(Debug)]
pub struct World {
    pub machine: Machine,
    pub now: Time,
    pub totals: BTreeMap<GpuId, u64>,
    pub overheads: BTreeMap<GpuId, u64>,
    /// The host's memory, where that is bounded.
    pub host: Option<u64>,
    /// Limits matter: somebody is in a group, or the host is small.
    limited: bool,
    /// What each group was promised when it was last looked at.
    promised: BTreeMap<(GroupId, GpuId), u64>,
    /// The same of each client that bounds itself.
    own_promised: BTreeMap<(ClientId, GpuId), u64>,
    pub models: BTreeMap<ClientId, Model>,
    pub history: Vec<(Time, Event)>,
    pub commands: Vec<(Time, Command)>,
    decisions: Decisions,
    pub rng: Dice,
    pub latency: Duration,
    /// What clients have is measured, as NVML does; else they are believed.
    pub measures: bool,
    /// Exceptions to "one holder" and "nobody is revoked for nothing" until then, since settings changed.
    pub tolerant: Time,
    /// GPUs where a client may map, or has mapped, more than the machine counts with, until then at least: it tries to, or
    /// it did not answer for long and goes on with what it was allowed before.
    overdrawn: BTreeMap<GpuId, Time>,
    /// Mapping fails where there is no room, whatever the machine believes.
    pub physical: bool,
    /// What ails each GPU, where mapping can fail.
    pub troubles: BTreeMap<GpuId, Trouble>,
    /// Until when there is trouble, and by how many bytes each measurement is wrong at most, also afterwards.
    troubled: Time,
    error: u64,
    connected: BTreeSet<ClientId>,
    asked: BTreeMap<ClientId, GpuSet>,
    /// The allowance that each was last sent.
    allowed: BTreeMap<(ClientId, GpuId), u64>,
    queue: BTreeMap<(Time, u64), Happening>,
    last: BTreeMap<(ClientId, bool), Time>,
    counter: u64,
    /// More are taken for a loop.
    pub most_steps: u64,
    /// Models that are not done.
    busy: usize,
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
            limited: false,
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
            troubles: BTreeMap::new(),
            troubled: Time::ZERO,
            error: 0,
            connected: BTreeSet::new(),
            asked: BTreeMap::new(),
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
        self.feed(Event::GpuOverhead { gpu, begun: self.now, bytes: overhead, complete: true });
    }

    /// From now on what is swapped out has so much room.
    pub fn set_host(&mut self, bytes: u64) {
        self.host = Some(bytes);
        self.limited = true;
        self.feed(Event::HostMemory { bytes });
    }

    /// From now on the machine hears of traffic on every GPU, of which most looks like thrashing.
    pub fn watch_traffic(&mut self) {
        self.at(self.now, Happening::Traffic);
    }

    /// From now on mapping fails where there is no room; until that time programs outside come and go, memory cannot be had
    /// that is free, and the driver fails for a while. Each measurement is wrong by up to `error` bytes, also afterwards.
    pub fn trouble(&mut self, until: Time, error: u64) {
        (self.physical, self.limited, self.troubled, self.error) = (true, true, until, error);
        self.measure();
        self.at(self.now, Happening::Trouble);
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
        let places = plan.gpus.iter().map(|g| (*g, Place::default())).collect();
        self.busy += usize::from(!plan.endless);
        self.limited |= plan.group.is_some() || plan.own.memory_max != Amount::Infinity || plan.own.swap_max.is_some();
        let model = Model {
            places,
            holds: GpuSet::new(),
            attached: GpuSet::new(),
            revoked: GpuSet::new(),
            contended: BTreeMap::new(),
            phase: Phase::Cpu,
            left: plan.phases,
            remaining: Duration::ZERO,
            running: None,
            submitted: false,
            idle_since: plan.start,
            asked: None,
            stuck: plan.stuck,
            inbox: VecDeque::new(),
            stopped: false,
            epoch: 0,
            bursts: Vec::new(),
            waits: Vec::new(),
            finished: None,
            plan,
        };
        self.models.insert(id, model);
        id
    }

    fn at(&mut self, at: Time, what: Happening) {
        self.counter += 1;
        self.queue.insert((at, self.counter), what);
    }

    /// On its way, behind what was sent before.
    fn send(&mut self, client: ClientId, up: bool, what: Happening) {
        let delay = Duration::from_nanos(self.rng.below(self.latency.as_nanos() as u64 + 1));
        let last = self.last.entry((client, up)).or_default();
        let at = (self.now + delay).max(*last);
        *last = at;
        self.at(at, what);
    }

    fn say(&mut self, client: ClientId, event: Event) {
        self.send(client, true, Happening::ToMachine(event));
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
            }
            Event::Requested { client, gpus } => drop(self.asked.insert(*client, gpus.clone())),
            Event::Configure(_) => self.tolerant = self.now + Duration::from_secs(20),
            _ => {}
        }
        if self.keep {
            self.history.push((self.now, event.clone()));
        }
        let before = self.measures.then(|| (self.charges(), self.unfreed()));
        let commands = self.machine.handle(self.now, event);
        self.decisions.add(self.now, &commands);
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
        }
        if self.thorough {
            self.check_state();
            self.check_groups();
            self.check_own();
        }
        for command in commands {
            if let Command::Allowance { client, gpu, bytes, .. } = command {
                self.allowed.insert((client, gpu), bytes);
            }
            if self.keep {
                self.commands.push((self.now, command.clone()));
            }
            let Some(to) = addressee(&command) else {
                self.look(&command);
                continue;
            };
            self.send(to, false, Happening::ToClient(to, command));
        }
    }

    fn check_command(&self, command: &Command) {
        let Some(to) = addressee(command) else { return };
        assert!(self.connected.contains(&to), "{command:?} to a client that is gone");
        match command {
            Command::Grant { client, .. } => {
                let view = self.machine.client(*client).unwrap();
                for id in &self.asked[client] {
                    let attachment = view.attachments.iter().find(|s| s.gpu == *id);
                    let state = attachment.map(|s| s.state);
                    assert!(
                        matches!(state, None | Some(LockState::Holding | LockState::Revoking)),
                        "{command:?}, but {id:?} is {state:?}"
                    );
                }
            }
            // A gang is revoked together, so one of it may not be in anybody's way.
            Command::Revoke { client, gpus } if self.gang(*client) == 0 => {
                let reason = gpus.iter().any(|id| {
                    let view = self.machine.gpu(*id).unwrap();
                    let waits =
                        |w: &WaiterView| w.blocked.is_none() || w.client == *client || self.undrainable(*client, *id);
                    view.waiters.iter().any(waits) || view.charged > view.capacity || view.holders.len() > 1
                });
                let plan = self.models.get(client).map(|m| &m.plan);
                let share = plan.and_then(|plan| plan.group?.limits.share);
                let is_capped =
                    share.is_some_and(|share| share.max < 100) || plan.is_some_and(|p| p.own.time_max < 100);
                // With the memory of one that is stopped, nobody may have room to wait in line.
                let is_stopped = self.models.get(client).is_some_and(|m| m.stopped);
                assert!(
                    reason || is_capped || is_stopped || self.grows() || self.now < self.tolerant,
                    "{command:?} for an empty queue"
                );
            }
            Command::Allowance { client, gpu, bytes, .. } if self.undrainable(*client, *gpu) => {
                let before = self.allowed.get(&(*client, *gpu)).copied().unwrap_or(0);
                assert!(*bytes >= before, "{command:?} after {before}, to one that cannot drain");
            }
            _ => {}
        }
    }

    fn charges(&self) -> BTreeMap<(ClientId, GpuId), u64> {
        let attachments =
            self.machine.clients().into_iter().flat_map(|c| c.attachments.into_iter().map(move |s| (c.client, s)));
        attachments.map(|(client, attachment)| ((client, attachment.gpu), attachment.charge)).collect()
    }

    /// What was found on a GPU whatever its client says.
    fn unfreed(&self) -> Vec<(ClientId, GpuId, u64)> {
        let attachments =
            self.machine.clients().into_iter().flat_map(|c| c.attachments.into_iter().map(move |s| (c.client, s)));
        let attachments = attachments.filter(|(_, attachment)| attachment.unfreed > 0);
        attachments.map(|(client, attachment)| (client, attachment.gpu, attachment.unfreed)).collect()
    }

    /// Whoever may have more than before has it of what was there: what clients of other users had, whatever they said, was
    /// not. Within a user they are believed; what that gives away comes after what others were given.
    fn check_credit(&self, before: &BTreeMap<(ClientId, GpuId), u64>, commands: &[Command]) {
        let mut charges = self.charges();
        let all = |client, gpu| {
            commands.iter().filter_map(move |command| match command {
                Command::Allowance { client: to, gpu: on, bytes, .. } if (to, on) == (client, gpu) => Some(*bytes),
                _ => None,
            })
        };
        for command in commands.iter().rev() {
            let Command::Allowance { client, gpu, bytes, .. } = command else { continue };
            // It was given more, which was taken back at once for another.
            if all(client, gpu).any(|other| other > *bytes) {
                continue;
            }
            let allowed = self.allowed.get(&(*client, *gpu)).copied().unwrap_or(0);
            let charge = |client| charges.get(&(client, *gpu)).copied().unwrap_or(0);
            let earlier = before.get(&(*client, *gpu)).copied().unwrap_or(0);
            if *bytes <= allowed || charge(*client) <= earlier || self.overdrawn.contains_key(gpu) {
                continue;
            }
            let user = self.models[client].plan.user;
            let others = self.models.iter().filter(|(_, m)| m.plan.user != user);
            let has = others.filter_map(|(other, m)| Some((*other, m.places.get(gpu)?)));
            let hidden: u64 = has.map(|(other, p)| (p.mapped + p.hidden).saturating_sub(charge(other))).sum();
            let charged: u64 = charges.iter().filter(|((_, on), _)| on == gpu).map(|(_, charge)| charge).sum();
            let capacity = self.machine.gpu(*gpu).unwrap().capacity;
            assert!(
                charged + hidden <= capacity,
                "{command:?} at {:?}: {charged} charged and {hidden} hidden of {capacity}: {:?} after {:?}",
                self.now,
                self.machine.gpu(*gpu),
                self.history.last()
            );
            charges.insert((*client, *gpu), earlier);
        }
    }

    /// The machine wants to know what is on a GPU.
    fn look(&mut self, command: &Command) {
        let Command::Measure { gpu } = command else { return };
        if self.measures {
            let at = self.now + Duration::from_micros(self.rng.below(2000));
            self.at(at, Happening::Read(*gpu, self.now));
        } else {
            let believe = Event::Measured { gpu: *gpu, begun: self.now, free: None, found: BTreeMap::new() };
            self.at(self.now, Happening::ToMachine(believe));
        }
    }

    fn undrainable(&self, client: ClientId, id: GpuId) -> bool {
        let view = self.machine.gpu(id).unwrap();
        view.holders.iter().any(|h| h.client == client && h.state == LockState::Undrainable)
    }

    /// The gang that a client is in, by a rule or by what it says; 0: none.
    fn gang(&self, client: ClientId) -> u64 {
        let Some(plan) = self.models.get(&client).map(|m| &m.plan) else { return 0 };
        plan.group.filter(|group| group.limits.gang).map_or(plan.gang, |group| 1000 + group.id.0)
    }

    fn grows(&self) -> bool {
        self.machine.settings().anti_thrash == AntiThrash::Off
    }

    fn check_state(&mut self) {
        let mut in_host = 0;
        for view in self.machine.gpus() {
            let id = view.gpu;
            let lied = self.measures && self.unfreed().iter().any(|(_, gpu, _)| *gpu == id);
            let models = self.models.values().filter_map(|m| m.places.get(&id));
            let mapped: u64 = models.clone().map(|p| p.mapped).sum();
            let demand: u64 = models.map(|p| p.demand).sum();
            // What was mapped beyond the capacity leaves again.
            if view.trial > 0 {
                self.overdrawn.insert(id, self.now);
            } else if view.charged <= view.capacity && mapped <= view.charged {
                self.overdrawn.retain(|gpu, until| *gpu != id || self.now <= *until);
            }
            let overdrawn = self.overdrawn.contains_key(&id);
            let fits = view.charged <= view.capacity || lied || self.physical || overdrawn;
            assert!(fits, "{id:?}: {} charged of {}", view.charged, view.capacity);
            in_host += demand.saturating_sub(view.capacity);
            assert!(
                demand <= view.committed || self.host.is_none(),
                "{id:?}: {demand} needed, {} promised",
                view.committed
            );
            assert!(mapped <= view.charged || overdrawn, "{id:?}: {mapped} mapped, {} charged", view.charged);
            if self.now < self.tolerant || self.machine.settings().anti_thrash == AntiThrash::Off {
                continue;
            }
            let auto = self.machine.settings().anti_thrash == AntiThrash::Auto;
            // Who is let in before others waits for no drain.
            let has_class = |m: &Model| m.plan.group.is_some_and(|group| group.limits.share.is_some());
            let preempts = auto && self.models.values().any(|m| has_class(m) || m.plan.own != EnvLimits::default());
            let aside = |h: &HolderView| match h.state {
                LockState::Suspended | LockState::Undrainable => true,
                LockState::Revoking | LockState::Stuck => preempts,
                _ => false,
            };
            let holders = view
                .holders
                .iter()
                .filter(|h| !aside(h) && self.models.get(&h.client).is_none_or(|m| m.plan.stopped.is_none()));
            let gang = |h: &HolderView| match self.gang(h.client) {
                0 => (0, h.client),
                gang => (gang, ClientId(0)),
            };
            let units: BTreeSet<(u64, ClientId)> = holders.clone().map(gang).collect();
            // Those who leave it idle run together.
            let full = |h: &HolderView| self.models.get(&h.client).and_then(|m| m.plan.fullness).unwrap_or(1000);
            let light = auto && holders.map(full).sum::<u32>() <= 1100;
            assert!(units.len() <= 1 || light, "{id:?} has the holders {:?} at {:?}", view.holders, self.now);
        }
        if let Some(host) = self.host {
            let (_, promised) = self.machine.host();
            assert!(promised <= host, "{promised} promised of {host} in the host");
            assert!(in_host <= host, "{in_host} needed of {host} in the host");
        }
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
        self.limited |= self.models.values().any(|model| model.plan.group.is_some());
        self.promised.clear();
        let groups = self.connected.iter().map(|id| (*id, self.models.get(id).and_then(|m| m.plan.group))).collect();
        self.feed(Event::Groups { groups });
    }

    /// What a group was promised covers what it has, and never rises above what it may be.
    fn check_groups(&mut self) {
        let mut sums: BTreeMap<(GroupId, GpuId), (Group, u64, u64)> = BTreeMap::new();
        for view in self.machine.clients() {
            let Some(model) = self.models.get(&view.client) else { continue };
            let Some(group) = model.plan.group else { continue };
            for attachment in view.attachments {
                let (_, promised, demand) = sums.entry((group.id, attachment.gpu)).or_insert((group, 0, 0));
                *promised += attachment.committed;
                *demand += model.places.get(&attachment.gpu).map_or(0, |place| place.demand);
            }
        }
        for ((id, gpu), (group, promised, demand)) in &sums {
            assert!(demand <= promised, "{group:?} on {gpu:?}: {demand} needed, {promised} promised");
            let max = group.limits.memory_max.on(self.totals[gpu]).unwrap_or(u64::MAX);
            let before = self.promised.get(&(*id, *gpu)).copied();
            let most = before.map_or(u64::MAX, |before| before.max(max));
            assert!(*promised <= most, "{group:?} on {gpu:?}: {promised} promised, {before:?} before");
        }
        self.promised = sums.into_iter().map(|(at, (_, promised, _))| (at, promised)).collect();
    }

    /// The same of each client, by what it says itself.
    fn check_own(&mut self) {
        let mut all = BTreeMap::new();
        for view in self.machine.clients() {
            let Some(own) = self.models.get(&view.client).map(|model| model.plan.own) else { continue };
            let mut sum = 0;
            for attachment in view.attachments {
                sum += attachment.committed;
                all.insert((view.client, attachment.gpu), attachment.committed);
                let max = own.memory_max.on(self.totals[&attachment.gpu]).unwrap_or(u64::MAX);
                let before = self.own_promised.get(&(view.client, attachment.gpu)).copied();
                let most = before.map_or(u64::MAX, |before| before.max(max));
                assert!(attachment.committed <= most, "{attachment:?}: {most} at most, {before:?} before");
            }
            let before = self.own_promised.range((view.client, gpu(0))..).take_while(|((id, _), _)| *id == view.client);
            let before: u64 = before.map(|(_, promised)| *promised).sum();
            assert!(
                sum <= before.max(own.swap_max.unwrap_or(u64::MAX)),
                "{sum} promised over all GPUs, {before} before"
            );
        }
        self.own_promised = all;
    }

    /// Whether no group has more than it may.
    pub fn within_limits(&self) -> bool {
        let groups = self.models.values().filter_map(|model| model.plan.group);
        let max: BTreeMap<GroupId, Amount> = groups.map(|group| (group.id, group.limits.memory_max)).collect();
        let most = |gpu: &GpuId, id: &GroupId| max.get(id).and_then(|max| max.on(self.totals[gpu])).unwrap_or(u64::MAX);
        self.promised.iter().all(|((id, gpu), promised)| *promised <= most(gpu, id))
    }

    fn happen(&mut self, what: Happening) {
        match what {
            Happening::Start(id) => self.start(id),
            // Which rule it has is what the daemon finds now.
            Happening::ToMachine(Event::Groups { groups }) => {
                let group_of = |id: &ClientId| self.models.get(id).and_then(|m| m.plan.group);
                let groups = groups.into_keys().map(|id| (id, group_of(&id))).collect();
                self.feed(Event::Groups { groups });
            }
            Happening::ToMachine(event) => self.feed(event),
            Happening::ToClient(id, command) => {
                let Some(model) = self.models.get_mut(&id).filter(|m| m.phase != Phase::Done) else {
                    // A process that is done but stays still evicts and releases.
                    if self.connected.contains(&id) {
                        self.receive(id, command);
                    } else if let Command::Probe { .. } = command {
                    }
                    return;
                };
                if let Command::Probe { .. } = command {
                    let stopped = model.stopped;
                    return self.feed(Event::Stopped { client: id, stopped });
                }
                if model.stopped {
                    model.inbox.push_back(command);
                } else {
                    self.receive(id, command);
                }
            }
            Happening::PhaseBegins(id) => self.begin(id),
            Happening::WorkEnds(id, epoch) => self.work_ends(id, epoch),
            Happening::Drained(id, gpus) => self.drained(id, gpus),
            Happening::Lingers(id, gpus) => self.lingers(id, gpus),
            Happening::Evicted(id, gpu) => self.evicted(id, gpu),
            Happening::Quiet(id, epoch) => self.quiet(id, epoch),
            Happening::TriesToMap(id, gpu, since) => self.try_to_map(id, gpu, since),
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
                if let Some(place) = self.models.get_mut(&id).and_then(|m| m.places.get_mut(&gpu)) {
                    place.hidden = 0;
                }
            }
            Happening::Sample => {
                let gpus: Vec<GpuId> = self.totals.keys().copied().collect();
                gpus.into_iter().for_each(|gpu| self.at(self.now, Happening::Read(gpu, self.now)));
                self.at(self.now + ms(200), Happening::Sample);
            }
            Happening::Traffic => {
                for gpu in self.totals.keys().copied().collect::<Vec<_>>() {
                    let traffic = self.made_up_traffic();
                    self.feed(Event::Traffic { gpu, traffic });
                }
                self.at(self.now + ms(500), Happening::Traffic);
            }
            Happening::Read(gpu, begun) => {
                let has = |m: &Model| m.places.get(&gpu).map(|p| p.mapped + p.hidden);
                let found = self.models.iter().filter_map(|(id, m)| Some((*id, exactly(has(m)?)))).collect();
                let at = self.now + Duration::from_micros(self.rng.below(2000));
                if self.physical {
                    return self.read_wrongly(gpu, begun, at, found);
                }
                self.at(at, Happening::ToMachine(Event::Measured { gpu, begun, free: None, found }));
            }
            Happening::Kill(id) => {
                if self.connected.contains(&id) {
                    self.gone(id);
                }
            }
        }
    }

    /// Measures with an error, which clients' figures have as well.
    fn read_wrongly(&mut self, gpu: GpuId, begun: Time, at: Time, found: BTreeMap<ClientId, Found>) {
        let error = self.rng.below(2 * self.error + 1);
        let wrong = |bytes: u64, error: u64, most: u64| (bytes + error).saturating_sub(most);
        let most = self.error;
        let overhead = self.overheads[&gpu] + self.troubles[&gpu].stranger;
        let bytes = wrong(overhead, error, most);
        let free = Some(wrong(self.really_free(gpu), 2 * most - error, most));
        self.at(at, Happening::ToMachine(Event::GpuOverhead { gpu, begun, bytes, complete: true }));
        let found = found.into_iter().map(|(client, Found { least, most })| {
            let spread = self.rng.below(64 * MIB);
            (client, Found { least: least.saturating_sub(spread), most: most + spread })
        });
        let found = found.collect();
        self.at(at, Happening::ToMachine(Event::Measured { gpu, begun, free, found }));
    }

    /// Bytes that nothing has.
    fn really_free(&self, gpu: GpuId) -> u64 {
        let used: u64 = self.models.values().filter_map(|m| m.places.get(&gpu)).map(|p| p.mapped + p.hidden).sum();
        self.totals[&gpu].saturating_sub(self.overheads[&gpu] + self.troubles[&gpu].stranger + used)
    }

    /// Bytes of them that can be mapped now.
    fn mappable(&self, gpu: GpuId) -> u64 {
        let trouble = self.troubles[&gpu];
        let free = self.really_free(gpu).saturating_sub(trouble.fragmented);
        if self.now < trouble.refuses_until { 0 } else { free }
    }

    fn make_trouble(&mut self) {
        let is_over = self.now >= self.troubled;
        for gpu in self.totals.keys().copied().collect::<Vec<_>>() {
            let before = self.troubles.get(&gpu).copied().unwrap_or_default();
            self.troubles.insert(gpu, before);
            let free = self.really_free(gpu);
            let rng = &mut self.rng;
            let trouble = Trouble {
                // Takes what is free at most.
                stranger: if rng.one_in(2) { rng.below(before.stranger + free.min(4 * GIB) + 1) } else { 0 },
                fragmented: if rng.one_in(3) { rng.below(GIB) } else { 0 },
                refuses_until: if rng.one_in(4) { self.now + rng.between(ms(0), ms(2000)) } else { Time::ZERO },
            };
            self.troubles.insert(gpu, if is_over { Trouble::default() } else { trouble });
        }
        if !is_over {
            let after = self.rng.between(ms(20), ms(1500));
            self.at((self.now + after).min(self.troubled), Happening::Trouble);
        }
    }

    fn map_what_is_allowed(&mut self, id: ClientId, gpu: GpuId) {
        let now = self.now;
        let Some(p) = self.models.get_mut(&id).and_then(|m| m.places.get_mut(&gpu)) else { return };
        if self.physical && p.demand.min(p.allowance) > p.mapped && !std::mem::replace(&mut p.tries, true) {
            self.at(now, Happening::TriesToMap(id, gpu, now));
        }
    }

    /// What it may map and lacks, it tries to map: for 300 ms, then it gives the GPU back and tries again a little later.
    fn try_to_map(&mut self, id: ClientId, gpu: GpuId, since: Time) {
        let now = self.now;
        let free = self.mappable(gpu);
        let Some(m) = self.models.get_mut(&id) else { return };
        let (holds, stopped) = (m.holds.contains(&gpu) && !m.revoked.contains(&gpu), m.stopped);
        let Some(p) = m.places.get_mut(&gpu) else { return };
        let lacks = p.demand.min(p.allowance).saturating_sub(p.mapped);
        if lacks == 0 || p.busy {
            p.tries = false;
            return;
        }
        if stopped {
            return self.at(now + ms(100), Happening::TriesToMap(id, gpu, since));
        }
        p.tries = true;
        let grown = lacks.min(free / (2 * MIB) * (2 * MIB)).min(lacks);
        let grown = if lacks <= free { lacks } else { grown };
        if grown > 0 {
            p.mapped += grown;
            p.hidden = p.hidden.saturating_sub(grown);
            self.report(id, gpu);
            self.work(id);
            return self.at(now + ms(1), Happening::TriesToMap(id, gpu, now));
        }
        if now < since + ms(300) {
            return self.at(now + ms(5), Happening::TriesToMap(id, gpu, since));
        }
        if holds {
            self.pause(id);
            // One GPU is of no use without the others.
            let m = self.models.get_mut(&id).unwrap();
            let all: GpuSet = m.holds.difference(&m.revoked).copied().collect();
            for gpus in [GpuSet::from([gpu]), all.into_iter().filter(|other| *other != gpu).collect()] {
                let m = self.models.get_mut(&id).unwrap();
                m.holds.retain(|gpu| !gpus.contains(gpu));
                m.contended.retain(|gpu, _| !gpus.contains(gpu));
                let reason = if gpus.contains(&gpu) { ReleaseReason::NoMemory } else { ReleaseReason::Idle };
                if !gpus.is_empty() {
                    self.say(id, Event::Released { client: id, gpus, reason, busy: Duration::ZERO });
                }
            }
            self.ask(id);
        }
        self.at(now + ms(50), Happening::TriesToMap(id, gpu, now + ms(50)));
    }

    fn made_up_traffic(&mut self) -> Traffic {
        let rng = &mut self.rng;
        let mut often = |most: u64| (!rng.one_in(8)).then(|| rng.below(most));
        Traffic { to_gpu: often(20 * GIB), from_gpu: often(20 * GIB), faults: often(50_000) }
    }

    fn start(&mut self, id: ClientId) {
        let plan = self.models[&id].plan.clone();
        self.say(id, Event::Connected { client: id, gang: plan.gang, user: plan.user });
        if plan.group.is_some() {
            self.say(id, Event::Groups { groups: [(id, plan.group)].into() });
        }
        if plan.own != EnvLimits::default() {
            self.say(id, Event::EnvLimits { client: id, limits: plan.own });
        }
        for gpu in &plan.gpus {
            self.say(id, Event::Attached { client: id, gpu: *gpu, engine: plan.engine });
        }
    }

    fn gone(&mut self, id: ClientId) {
        let Some(m) = self.models.get_mut(&id) else { return };
        if m.phase != Phase::Done && !m.plan.endless {
            self.busy -= 1;
        }
        m.phase = Phase::Done;
        m.running = None;
        m.finished.get_or_insert(self.now);
        m.places.clear();
        m.holds.clear();
        // Killed while it was stopped: nobody reads these any more.
        m.stopped = false;
        m.inbox.clear();
        self.queue.retain(|_, w| match w {
            Happening::ToMachine(e) => event_of(e) != Some(id),
            Happening::ToClient(c, _) => *c != id,
            _ => true,
        });
        if self.connected.contains(&id) {
            self.feed(Event::Disconnected { client: id });
        }
    }

    fn report(&mut self, id: ClientId, gpu: GpuId) {
        let Some(m) = self.models.get_mut(&id) else { return };
        let Some(p) = m.places.get(&gpu) else { return };
        let demand = p.demand;
        let report = MemoryReport {
            limit_ack: p.limit_seq,
            ack: p.seq,
            demand,
            mapped: p.mapped,
            swapped: demand.saturating_sub(p.mapped),
            pinned: m.plan.pinned.min(p.mapped),
        };
        self.say(id, Event::Memory { client: id, gpu, report });
    }

    fn receive(&mut self, id: ClientId, command: Command) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id) else { return };
        match command {
            Command::Attached { gpu, .. } => {
                m.attached.insert(gpu);
                let all = m.attached == m.plan.gpus;
                if !self.limited {
                    // A limit is no matter: what it plans it has.
                    let demand = m.plan.demand;
                    m.places.get_mut(&gpu).unwrap().demand = demand;
                    self.report(id, gpu);
                }
                if all {
                    let cpu = self.models[&id].plan.cpu;
                    self.at(now + cpu, Happening::PhaseBegins(id));
                }
            }
            Command::Limit { gpu, bytes, seq, .. } => {
                if let Some(p) = m.places.get_mut(&gpu) {
                    assert!(seq > p.limit_seq || bytes == p.limit, "limit {seq} after {}", p.limit_seq);
                    p.limit = bytes;
                    p.limit_seq = seq;
                }
                if self.limited {
                    self.grow(id, gpu);
                    self.report(id, gpu);
                }
                self.work(id);
            }
            Command::Prepare { gpu, bytes, .. } => {
                let Some(p) = m.places.get(&gpu) else { return };
                assert!(bytes <= p.mapped.max(p.demand), "told to lose more than it has");
            }
            Command::Denied { gpu, .. } => {
                let Some(p) = m.places.get_mut(&gpu) else { return };
                p.wishes = None;
                p.denied = true;
                self.grow(id, gpu);
                self.report(id, gpu);
                self.work(id);
            }
            Command::Allowance { gpu, seq, bytes, .. } => {
                if let Some(p) = m.places.get_mut(&gpu) {
                    // The newest decides: of those before it only steps on the way there are left, and what has begun.
                    let mut begun = p.busy;
                    p.todo.retain(|(_, step)| std::mem::take(&mut begun) || *step > bytes);
                    p.todo.push_back((seq, bytes));
                    if !p.busy {
                        self.obey(id, gpu);
                    }
                }
            }
            Command::Grant { gpus, .. } => {
                for g in &gpus {
                    assert!(m.holds.insert(*g), "{id:?} was granted {g:?} twice");
                    m.contended.remove(g);
                }
                if m.plan.gpus.is_subset(&m.holds)
                    && let Some(at) = m.asked.take()
                {
                    m.waits.push(now - at);
                }
                self.work(id);
                self.maybe_quiet(id);
            }
            Command::Contended { gpus, waiters, grace, .. } => {
                for g in &gpus {
                    if waiters > 0 {
                        m.contended.insert(*g, grace)
                    } else {
                        m.contended.remove(g)
                    };
                }
                if let Some(permille) = m.plan.fullness.filter(|_| waiters > 0) {
                    for gpu in gpus {
                        self.say(id, Event::Utilization { client: id, gpu, permille });
                    }
                }
                self.maybe_quiet(id);
            }
            Command::Revoke { gpus, .. } => {
                // One that drains already does not answer again.
                let gpus: GpuSet = gpus.intersection(&m.holds).filter(|g| !m.revoked.contains(g)).copied().collect();
                if gpus.is_empty() {
                    return;
                }
                if m.stuck > 0 {
                    m.stuck -= u32::from(!m.plan.endless);
                    let reason = StuckReason::NeedsHost;
                    return self.say(id, Event::Stuck { client: id, gpus, reason });
                }
                if m.submitted {
                    m.revoked.extend(gpus.iter().copied());
                    return self.at(now + LONG, Happening::Lingers(id, gpus));
                }
                self.pause(id);
                let m = self.models.get_mut(&id).unwrap();
                m.revoked.extend(gpus.iter().copied());
                let (drain, endless) = (m.plan.drain, m.plan.endless);
                if endless || drain > LONG {
                    self.at(now + LONG, Happening::Lingers(id, gpus.clone()));
                }
                if !endless {
                    self.at(now + drain, Happening::Drained(id, gpus));
                }
            }
            Command::Reserved { .. } | Command::Measure { .. } | Command::Thrashing { .. } => {}
            Command::Waiting { .. }
            | Command::Probe { .. }
            | Command::Undrainable { .. }
            | Command::EvictionBlocked { .. }
            | Command::MappingFailed { .. }
            | Command::Placed { .. }
            | Command::Unplaced { .. } => {}
        }
    }

    /// Allocates what its limit allows, and asks for more where that is too little. Denied, it makes do with what it has.
    fn grow(&mut self, id: ClientId, gpu: GpuId) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id) else { return };
        let plan = m.plan.demand;
        let Some(p) = m.places.get_mut(&gpu) else { return };
        let wanted = if p.denied { plan.min(p.limit) } else { plan };
        if wanted <= p.limit.max(p.demand) {
            p.wishes = None;
            p.demand = p.demand.max(wanted);
        } else if p.wishes.is_none() {
            // In two halves, so that several hold one and want the other.
            p.demand = p.demand.max((plan / 2).min(p.limit));
            p.wishes = Some(now);
            self.report(id, gpu);
            self.say(id, Event::LimitRequested { client: id, gpu, bytes: plan });
        }
    }

    /// Carries out the oldest allowance.
    fn obey(&mut self, id: ClientId, gpu: GpuId) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id) else { return };
        let (rate, pinned) = (m.plan.rate, m.plan.pinned);
        let Some(p) = m.places.get_mut(&gpu) else { return };
        let demand = p.demand;
        let Some((_, bytes)) = p.todo.front().copied() else { return };
        if bytes < p.mapped {
            let move_out = p.mapped - bytes.max(pinned.min(p.mapped));
            p.busy = true;
            let time = Duration::from_secs_f64(move_out as f64 / rate as f64);
            self.pause(id);
            self.at(now + time, Happening::Evicted(id, gpu));
        } else {
            let (seq, bytes) = p.todo.pop_front().unwrap();
            p.seq = seq;
            p.allowance = bytes;
            let grown = bytes.min(demand).saturating_sub(p.mapped);
            if self.physical {
                self.map_what_is_allowed(id, gpu);
            } else {
                p.mapped += grown;
                p.hidden = p.hidden.saturating_sub(grown);
            }
            self.report(id, gpu);
            self.work(id);
            self.obey(id, gpu);
        }
    }

    fn evicted(&mut self, id: ClientId, gpu: GpuId) {
        let Some(m) = self.models.get_mut(&id) else { return };
        let pinned = m.plan.pinned;
        if m.stopped {
            let again = self.now + ms(100);
            return self.at(again, Happening::Evicted(id, gpu));
        }
        let Some(p) = m.places.get_mut(&gpu) else { return };
        let Some((seq, bytes)) = p.todo.pop_front() else { return };
        p.busy = false;
        p.seq = seq;
        p.allowance = bytes;
        let freed = p.mapped.saturating_sub(bytes.max(pinned));
        p.mapped -= freed;
        if let Some(lie) = m.plan.lie.filter(|_| freed > 0) {
            p.hidden = (p.hidden + freed).min(lie.bytes.max(p.hidden));
            if let Some(late) = lie.late {
                self.at(self.now + late, Happening::Frees(id, gpu));
            }
        }
        self.report(id, gpu);
        self.obey(id, gpu);
        self.work(id);
    }

    fn begin(&mut self, id: ClientId) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id).filter(|m| m.phase == Phase::Cpu) else { return };
        if m.stopped {
            return self.at(now + ms(100), Happening::PhaseBegins(id));
        }
        if m.left == 0 {
            m.phase = Phase::Done;
            m.finished = Some(now);
            self.busy -= 1;
            if m.plan.leaves {
                self.gone(id);
            } else {
                self.maybe_quiet(id);
            }
            return;
        }
        m.left -= 1;
        m.phase = Phase::Gpu;
        m.remaining = m.plan.gpu;
        m.bursts.push((now, now));
        if m.plan.growth > 0 {
            m.plan.demand += m.plan.growth;
            for gpu in m.plan.gpus.clone() {
                if let Some(p) = self.models.get_mut(&id).and_then(|m| m.places.get_mut(&gpu)) {
                    p.denied = false;
                }
                self.grow(id, gpu);
                self.report(id, gpu);
                // It may have been allowed more than it needed.
                self.map_what_is_allowed(id, gpu);
            }
        }
        self.work(id);
        self.ask(id);
    }

    fn ask(&mut self, id: ClientId) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id) else { return };
        if m.phase == Phase::Gpu && m.asked.is_none() && m.revoked.is_empty() && !m.plan.gpus.is_subset(&m.holds) {
            m.asked = Some(now);
            let gpus = m.plan.gpus.clone();
            self.say(id, Event::Requested { client: id, gpus });
        }
    }

    /// Starts work if it can run.
    fn work(&mut self, id: ClientId) {
        let (now, off, physical) = (self.now, self.grows(), self.physical);
        let Some(m) = self.models.get_mut(&id) else { return };
        let mapped = m.places.values().all(|p| {
            let needs = if physical { u64::MAX } else { p.limit.min(p.allowance.max(p.mapped)) };
            (p.mapped >= p.demand.min(needs) && p.todo.is_empty() && p.wishes.is_none())
                || (off && m.plan.engine == Engine::Managed)
        });
        if m.phase == Phase::Gpu
            && m.running.is_none()
            && mapped
            && m.revoked.is_empty()
            && m.plan.gpus.is_subset(&m.holds)
        {
            // Only once all have done something alone the work of each needs the others'.
            if m.plan.job != 0 && m.left + 1 < m.plan.phases {
                m.submitted = true;
                return self.meet(id);
            }
            m.running = Some(now);
            m.epoch += 1;
            let (end, epoch) = (now + m.remaining, m.epoch);
            self.at(end, Happening::WorkEnds(id, epoch));
        }
    }

    /// Runs the work of a job once all of it is there.
    fn meet(&mut self, id: ClientId) {
        let (now, job) = (self.now, self.models[&id].plan.job);
        let members = || self.models.iter().filter(|(_, m)| m.plan.job == job && m.phase != Phase::Done);
        if !members().all(|(_, m)| m.submitted) {
            return;
        }
        for id in members().map(|(id, _)| *id).collect::<Vec<_>>() {
            let m = self.models.get_mut(&id).unwrap();
            m.running = Some(now);
            m.epoch += 1;
            let (end, epoch) = (now + m.remaining, m.epoch);
            self.at(end, Happening::WorkEnds(id, epoch));
        }
    }

    fn pause(&mut self, id: ClientId) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id) else { return };
        if let Some(since) = m.running.take() {
            m.remaining = m.remaining.saturating_sub(now - since);
            m.epoch += 1;
        }
    }

    fn work_ends(&mut self, id: ClientId, epoch: u64) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id) else { return };
        if m.epoch != epoch || m.running.is_none() {
            return;
        }
        if m.stopped {
            m.remaining = Duration::ZERO;
            return self.at(now + ms(100), Happening::WorkEnds(id, epoch));
        }
        m.running = None;
        m.phase = Phase::Cpu;
        m.idle_since = now;
        if std::mem::take(&mut m.submitted) && !m.revoked.is_empty() {
            let (at, gpus) = (now + m.plan.drain, m.revoked.clone());
            self.at(at, Happening::Drained(id, gpus));
        }
        let m = self.models.get_mut(&id).unwrap();
        m.bursts.last_mut().unwrap().1 = now;
        let cpu = m.plan.cpu;
        self.at(now + cpu, Happening::PhaseBegins(id));
        self.maybe_quiet(id);
    }

    fn maybe_quiet(&mut self, id: ClientId) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id) else { return };
        if m.phase == Phase::Gpu {
            return;
        }
        let Some(grace) = m.contended.values().min().copied() else { return };
        let (at, epoch) = (now.max(m.idle_since + grace), m.epoch);
        self.at(at, Happening::Quiet(id, epoch));
    }

    /// Nothing ran and nothing was submitted for the grace.
    fn quiet(&mut self, id: ClientId, epoch: u64) {
        let Some(m) = self.models.get_mut(&id) else { return };
        if m.epoch != epoch || m.phase == Phase::Gpu || m.stopped || m.contended.is_empty() {
            return;
        }
        let gpus: GpuSet = m.holds.difference(&m.revoked).copied().collect();
        for g in &gpus {
            m.holds.remove(g);
            m.contended.remove(g);
        }
        if !gpus.is_empty() {
            let busy = Duration::ZERO;
            self.say(id, Event::Released { client: id, gpus, reason: ReleaseReason::Idle, busy });
        }
    }

    fn drained(&mut self, id: ClientId, gpus: GpuSet) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id) else { return };
        if m.stopped {
            return self.at(now + ms(100), Happening::Drained(id, gpus));
        }
        for g in &gpus {
            m.revoked.remove(g);
            m.holds.remove(g);
            m.contended.remove(g);
        }
        let busy = Duration::ZERO;
        self.say(id, Event::Released { client: id, gpus, reason: ReleaseReason::Revoked, busy });
        self.ask(id);
    }

    /// A drain takes long.
    fn lingers(&mut self, id: ClientId, gpus: GpuSet) {
        let Some(m) = self.models.get(&id).filter(|_| self.connected.contains(&id)) else { return };
        if m.stopped {
            return self.at(self.now + ms(100), Happening::Lingers(id, gpus));
        }
        let gpus: GpuSet = gpus.intersection(&m.revoked).copied().collect();
        if !gpus.is_empty() {
            self.say(id, Event::Stuck { client: id, gpus, reason: StuckReason::LongWork });
        }
    }

    /// The same events again, on a new machine: the same commands.
    pub fn check_replay(&self, settings: Settings) {
        let mut machine = Machine::new(settings);
        let mut commands = Vec::new();
        for (at, event) in &self.history {
            commands.extend(machine.handle(*at, event.clone()).into_iter().map(|c| (*at, c)));
        }
        assert_eq!(commands, self.commands, "the same events gave other commands");
    }

    pub fn grants_of(&self, client: ClientId) -> Vec<Time> {
        let grants =
            self.commands.iter().filter(|(_, c)| matches!(c, Command::Grant { client: c, .. } if *c == client));
        grants.map(|(at, _)| *at).collect()
    }

    pub fn revokes_of(&self, client: ClientId) -> Vec<Time> {
        let revokes =
            self.commands.iter().filter(|(_, c)| matches!(c, Command::Revoke { client: c, .. } if *c == client));
        revokes.map(|(at, _)| *at).collect()
    }

    pub fn finished(&self, client: ClientId) -> Time {
        self.models[&client].finished.unwrap_or(Time::MAX)
    }
}

/// The client that is told, if any is.
pub fn addressee(command: &Command) -> Option<ClientId> {
    match command {
        Command::Measure { .. } | Command::Thrashing { .. } => None,
        Command::Attached { client, .. }
        | Command::MappingFailed { client, .. }
        | Command::Limit { client, .. }
        | Command::Denied { client, .. }
        | Command::Allowance { client, .. }
        | Command::Grant { client, .. }
        | Command::Revoke { client, .. }
        | Command::Contended { client, .. }
        | Command::Waiting { client, .. }
        | Command::Undrainable { client, .. }
        | Command::EvictionBlocked { client, .. }
        | Command::Reserved { client, .. }
        | Command::Prepare { client, .. }
        | Command::Probe { client }
        | Command::Placed { client, .. }
        | Command::Unplaced { client, .. } => Some(*client),
    }
}

fn event_of(event: &Event) -> Option<ClientId> {
    match event {
        Event::Connected { client, .. }
        | Event::Disconnected { client }
        | Event::EnvLimits { client, .. }
        | Event::Attached { client, .. }
        | Event::Detached { client, .. }
        | Event::Memory { client, .. }
        | Event::LimitRequested { client, .. }
        | Event::ReservationRequested { client, .. }
        | Event::Utilization { client, .. }
        | Event::Held { client, .. }
        | Event::Requested { client, .. }
        | Event::Cancelled { client, .. }
        | Event::Released { client, .. }
        | Event::Stuck { client, .. }
        | Event::Stopped { client, .. }
        | Event::PlacementRequested { client, .. }
        | Event::PlacementTaken { client, .. } => Some(*client),
        Event::Groups { groups } => groups.keys().next().copied(),
        Event::Labels { labels } => labels.keys().next().copied(),
        Event::Tick
        | Event::Configure(_)
        | Event::GpuFound { .. }
        | Event::GpuLink { .. }
        | Event::ContextSizes { .. }
        | Event::GpuOverhead { .. }
        | Event::Measured { .. }
        | Event::Traffic { .. }
        | Event::HostMemory { .. } => None,
    }
}
