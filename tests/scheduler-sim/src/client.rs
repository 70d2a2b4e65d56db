//! A simulated program and its client, which answers as the library does. Contains the program's
//! work and its misbehaviour.

use crate::{sleep::Sleeper, world::Happening, *};
use nvshare_simulated_client::{Client, Effect, Memory, Setup, Way};
use std::collections::VecDeque;

/// Bytes that are copied and reported in one step. For speed, the step is larger than the
/// library's.
const CHUNK: u64 = GIB;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Waits for its contexts.
    Starts,
    Cpu,
    Gpu,
    Done,
}

#[derive(Debug)]
pub struct Model {
    pub plan: Plan,
    pub(crate) client: Client,
    /// Bytes that the client has reported as freed and still has.
    pub(crate) hidden: BTreeMap<GpuId, u64>,
    pub(crate) phase: Phase,
    pub(crate) left: u32,
    pub(crate) remaining: Duration,
    /// The time at which the running work was started.
    pub(crate) running: Option<Time>,
    /// Whether the client has submitted its part of the job's work to the GPU.
    pub(crate) submitted: bool,
    pub(crate) asked: Option<Time>,
    pub(crate) stuck: u32,
    pub(crate) inbox: VecDeque<Command>,
    pub(crate) stopped: bool,
    pub(crate) sleeper: Sleeper,
    pub(crate) epoch: u64,
    /// Start and end of each burst, including waits.
    pub bursts: Vec<(Time, Time)>,
    pub waits: Vec<Duration>,
    pub finished: Option<Time>,
}

impl Model {
    pub(crate) fn new(id: ClientId, plan: Plan) -> Self {
        Self {
            client: client_of(id, &plan),
            hidden: BTreeMap::new(),
            phase: Phase::Starts,
            left: plan.phases,
            remaining: Duration::ZERO,
            running: None,
            submitted: false,
            asked: None,
            stuck: plan.stuck,
            inbox: VecDeque::new(),
            stopped: false,
            sleeper: Sleeper::default(),
            epoch: 0,
            bursts: Vec::new(),
            waits: Vec::new(),
            finished: None,
            plan,
        }
    }

    /// Bytes that the client needs on the GPU.
    pub(crate) fn demand(&self, gpu: GpuId) -> u64 {
        self.client.memory(gpu).map_or(0, Memory::demand)
    }

    /// Bytes that the client has on the GPU, according to its own report.
    pub(crate) fn mapped(&self, gpu: GpuId) -> u64 {
        self.client.memory(gpu).map_or(0, Memory::mapped)
    }

    /// Bytes that the client actually has on the GPU.
    pub(crate) fn has(&self, gpu: GpuId) -> u64 {
        self.mapped(gpu) + self.hidden.get(&gpu).copied().unwrap_or(0)
    }

    fn run(&mut self, now: Time) -> (Time, u64) {
        self.running = Some(now);
        self.epoch += 1;
        (now + self.remaining, self.epoch)
    }
}

fn client_of(id: ClientId, plan: &Plan) -> Client {
    let spins = plan.endless || plan.job != 0;
    let setup = Setup {
        gang: plan.gang,
        tenant: plan.tenant,
        group: plan.group,
        limits: plan.own,
        engine: plan.engine,
        gpus: plan.gpus.clone(),
        peers: false,
        drain: (!spins).then_some(plan.drain),
        fullness: None, // the plan gives the fullness, independently of the running work
        pinned: plan.pinned,
        chunk: CHUNK,
    };
    Client::new(id, setup)
}

impl World {
    pub(crate) fn start(&mut self, id: ClientId) {
        let Some(m) = self.models.get_mut(&id) else { return };
        m.client = client_of(id, &m.plan); // the client's group may have changed
        // The client allocates in two halves. So several clients have one half each and wait for
        // the other half.
        m.client.allocate(self.now, m.plan.demand, m.plan.demand / 2);
        let effects = m.client.connect();
        self.carry_out(id, effects);
    }

    pub(crate) fn gone(&mut self, id: ClientId) {
        let Some(m) = self.models.get_mut(&id) else { return };
        if m.phase != Phase::Done && !m.plan.endless {
            self.busy -= 1;
        }
        m.phase = Phase::Done;
        m.running = None;
        m.finished.get_or_insert(self.now);
        m.client = client_of(id, &m.plan);
        m.hidden.clear();
        // A client that was killed while it was stopped never reads its messages.
        m.stopped = false;
        m.sleeper = Sleeper::default();
        m.inbox.clear();
        self.queue.retain(|_, w| match w {
            Happening::FromClient(c, _) | Happening::ToClient(c, _) | Happening::Wakes(c, _) => *c != id,
            Happening::Moved(c, ..) | Happening::Helps(c, _) | Happening::Prepares(c) => *c != id,
            _ => true,
        });
        if self.connected.contains(&id) {
            self.feed(Event::Disconnected { client: id });
        }
    }

    pub(crate) fn receive(&mut self, id: ClientId, command: Command) {
        let now = self.now;
        let command = match self.sleeps {
            Some(_) => self.receive_asleep(id, command),
            None => Some(command),
        };
        let (Some(command), Some(m)) = (command, self.models.get_mut(&id)) else { return };
        match &command {
            Command::Limit { gpu, bytes, seq, .. } => {
                let memory = m.client.memory(*gpu).unwrap();
                assert!(*seq > memory.limit_seq() || *bytes == memory.limit(), "{command:?} after {memory:?}");
            }
            Command::Prepare { gpu, bytes, .. } => {
                assert!(*bytes <= m.mapped(*gpu).max(m.demand(*gpu)), "told to lose more than it has");
            }
            Command::Grant { gpus, .. } => {
                assert!(m.client.held().is_disjoint(gpus), "{id:?} was granted {gpus:?} twice");
            }
            Command::Contended { gpus, waiters, .. } if *waiters > 0 => {
                if let Some(permille) = m.plan.fullness {
                    for gpu in gpus {
                        self.say(id, Event::Utilization { client: id, gpu: *gpu, permille });
                    }
                }
            }
            Command::Revoke { gpus, .. } if m.stuck > 0 => {
                // A client that is already draining doesn't answer again.
                let held = m.client.held().difference(m.client.draining());
                let gpus: GpuSet = held.filter(|gpu| gpus.contains(gpu)).copied().collect();
                if !gpus.is_empty() {
                    m.stuck -= u32::from(!m.plan.endless);
                    self.say(id, Event::Stuck { client: id, gpus, reason: StuckReason::NeedsHost });
                }
                return;
            }
            _ => {}
        }
        self.client_does(id, |client| client.handle(now, command));
        let m = self.models.get_mut(&id).unwrap();
        if m.plan.gpus.is_subset(m.client.held())
            && let Some(at) = m.asked.take()
        {
            m.waits.push(now - at);
        }
        if m.phase == Phase::Starts && m.client.is_attached() {
            m.phase = Phase::Cpu;
            let begin = now + m.plan.cpu;
            self.at(begin, Happening::PhaseBegins(id));
        }
    }

    pub(crate) fn client_does(&mut self, id: ClientId, does: impl FnOnce(&mut Client) -> Vec<Effect>) {
        let Some(m) = self.models.get_mut(&id) else { return };
        let effects = does(&mut m.client);
        self.carry_out(id, effects);
    }

    fn carry_out(&mut self, id: ClientId, effects: Vec<Effect>) {
        let now = self.now;
        for effect in effects {
            let m = self.models.get_mut(&id).unwrap();
            match effect {
                Effect::Send(event) => {
                    if let Event::Requested { .. } = event {
                        m.asked.get_or_insert(now);
                    }
                    self.say(id, event);
                }
                Effect::Wake(at, timer) => self.at(at, Happening::Wakes(id, timer)),
                Effect::Move { gpu, way: Way::Out, bytes } => {
                    let time = Duration::from_secs_f64(bytes as f64 / m.plan.rate as f64);
                    self.at(now + time, Happening::Moved(id, gpu, Way::Out, bytes));
                }
                Effect::Move { gpu, way, bytes } => {
                    let bytes = if self.physical { self.mappable(gpu, bytes) } else { bytes };
                    self.moved(id, gpu, way, bytes);
                }
                Effect::Run => self.work(id),
                Effect::Halt => {
                    m.submitted = false;
                    if let Some(since) = m.running.take() {
                        m.remaining = m.remaining.saturating_sub(now - since);
                        m.epoch += 1;
                    }
                }
                Effect::Denied(gpu) => self.client_does(id, |client| client.make_do(now, gpu)),
            }
        }
    }

    /// Records that bytes have moved. A lying client may still have some of the evicted bytes.
    pub(crate) fn moved(&mut self, id: ClientId, gpu: GpuId, way: Way, bytes: u64) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id) else { return };
        let hidden = m.hidden.entry(gpu).or_default();
        match (way, m.plan.lie) {
            (Way::Out, Some(lie)) => {
                *hidden = (*hidden + bytes).min(lie.bytes.max(*hidden));
                if let Some(late) = lie.late {
                    self.at(now + late, Happening::Frees(id, gpu));
                }
            }
            (Way::Out, None) => {}
            (Way::Back | Way::Fresh, _) => *hidden = hidden.saturating_sub(bytes),
        }
        self.client_does(id, |client| client.moved(now, gpu, way, bytes));
    }

    pub(crate) fn begin(&mut self, id: ClientId) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id).filter(|m| m.phase == Phase::Cpu) else { return };
        if m.left == 0 {
            m.phase = Phase::Done;
            m.finished = Some(now);
            self.busy -= 1;
            if m.plan.leaves {
                self.gone(id);
            }
            return;
        }
        m.left -= 1;
        m.phase = Phase::Gpu;
        m.remaining = m.plan.gpu;
        m.bursts.push((now, now));
        if m.plan.growth > 0 {
            m.plan.demand += m.plan.growth;
            let demand = m.plan.demand;
            self.client_does(id, |client| client.allocate(now, demand, demand / 2));
        }
        self.client_does(id, |client| client.begin_work(now));
    }

    /// Starts a client's work, or submits its part of a job.
    fn work(&mut self, id: ClientId) {
        let now = self.now;
        let m = self.models.get_mut(&id).unwrap();
        // In its first phase, each member works alone. In later phases, the members' work runs only
        // together.
        if m.plan.job != 0 && m.left + 1 < m.plan.phases {
            m.submitted = true;
            let job = m.plan.job;
            return self.meet(job);
        }
        let (end, epoch) = m.run(now);
        self.at(end, Happening::WorkEnds(id, epoch));
    }

    /// Runs the work of a job after all members of the job have submitted their parts.
    fn meet(&mut self, job: u64) {
        let now = self.now;
        let members = || self.models.iter().filter(|(_, m)| m.plan.job == job && m.phase != Phase::Done);
        if !members().all(|(_, m)| m.submitted) {
            return;
        }
        for id in members().map(|(id, _)| *id).collect::<Vec<_>>() {
            let (end, epoch) = self.models.get_mut(&id).unwrap().run(now);
            self.at(end, Happening::WorkEnds(id, epoch));
        }
    }

    pub(crate) fn work_ends(&mut self, id: ClientId, epoch: u64) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id).filter(|m| m.epoch == epoch && m.running.is_some()) else { return };
        (m.running, m.submitted, m.phase) = (None, false, Phase::Cpu);
        m.bursts.last_mut().unwrap().1 = now;
        let begin = now + m.plan.cpu;
        self.at(begin, Happening::PhaseBegins(id));
        self.client_does(id, |client| client.end_work(now));
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
