//! A simulated client: it attaches, asks for the lock, works, and gives the lock back, as the library does.

use crate::{messages::event_of, world::Happening, *};
use std::collections::VecDeque;

/// A drain that takes longer is reported.
pub(crate) const LONG: Duration = Duration::from_secs(2);

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
    pub(crate) todo: VecDeque<(u32, u64)>,
    pub(crate) busy: bool,
    /// It tries to map what it lacks.
    pub(crate) tries: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Cpu,
    Gpu,
    Done,
}

#[derive(Debug)]
pub struct Model {
    pub plan: Plan,
    pub places: BTreeMap<GpuId, Place>,
    pub holds: GpuSet,
    pub(crate) attached: GpuSet,
    pub(crate) revoked: GpuSet,
    pub(crate) contended: BTreeMap<GpuId, Duration>,
    pub(crate) phase: Phase,
    pub(crate) left: u32,
    pub(crate) remaining: Duration,
    /// Work is running since then.
    pub(crate) running: Option<Time>,
    /// Its part of the job's work is on the GPU.
    pub(crate) submitted: bool,
    pub(crate) idle_since: Time,
    pub(crate) asked: Option<Time>,
    pub(crate) stuck: u32,
    pub(crate) inbox: VecDeque<Command>,
    pub(crate) stopped: bool,
    pub(crate) epoch: u64,
    /// Start to end of each burst, waiting included.
    pub bursts: Vec<(Time, Time)>,
    pub waits: Vec<Duration>,
    pub finished: Option<Time>,
}

impl World {
    pub(crate) fn start(&mut self, id: ClientId) {
        let plan = self.models[&id].plan.clone();
        self.say(id, Event::Connected { client: id, gang: plan.gang, tenant: plan.tenant });
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

    pub(crate) fn gone(&mut self, id: ClientId) {
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

    pub(crate) fn receive(&mut self, id: ClientId, command: Command) {
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

    pub(crate) fn begin(&mut self, id: ClientId) {
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

    pub(crate) fn ask(&mut self, id: ClientId) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id) else { return };
        if m.phase == Phase::Gpu && m.asked.is_none() && m.revoked.is_empty() && !m.plan.gpus.is_subset(&m.holds) {
            m.asked = Some(now);
            let gpus = m.plan.gpus.clone();
            self.say(id, Event::Requested { client: id, gpus });
        }
    }

    /// Starts work if it can run.
    pub(crate) fn work(&mut self, id: ClientId) {
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
    pub(crate) fn meet(&mut self, id: ClientId) {
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

    pub(crate) fn pause(&mut self, id: ClientId) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id) else { return };
        if let Some(since) = m.running.take() {
            m.remaining = m.remaining.saturating_sub(now - since);
            m.epoch += 1;
        }
    }

    pub(crate) fn work_ends(&mut self, id: ClientId, epoch: u64) {
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

    pub(crate) fn maybe_quiet(&mut self, id: ClientId) {
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
    pub(crate) fn quiet(&mut self, id: ClientId, epoch: u64) {
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

    pub(crate) fn drained(&mut self, id: ClientId, gpus: GpuSet) {
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
    pub(crate) fn lingers(&mut self, id: ClientId, gpus: GpuSet) {
        let Some(m) = self.models.get(&id).filter(|_| self.connected.contains(&id)) else { return };
        if m.stopped {
            return self.at(self.now + ms(100), Happening::Lingers(id, gpus));
        }
        let gpus: GpuSet = gpus.intersection(&m.revoked).copied().collect();
        if !gpus.is_empty() {
            self.say(id, Event::Stuck { client: id, gpus, reason: StuckReason::LongWork });
        }
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
