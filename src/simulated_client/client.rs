//! One client: its requests and turns, and the times when its memory moves.

use crate::memory::{Memory, Way};
use crate::utilization::{SAMPLED, Utilization};
use crate::{Effect, Setup, Timer};
use nvshare_idle_gap::IdleGapPredictor;
use nvshare_sched::{ClientId, Command, Engine, Event, GpuId, GpuSet, ReleaseReason, StuckReason, Time};
use std::collections::BTreeMap;
use std::time::Duration;

/// If the grace is at most this long, it overrides the idle-gap prediction, and the lock is
/// released after the grace.
const SHORTEST: Duration = Duration::from_millis(1);
/// Drains that take longer are reported (`preload/src/client/turn.rs`).
const LONG: Duration = Duration::from_secs(2);
/// The intervals between attempts to map memory: at first, and after a while of failures.
const RETRY_SOON: Duration = Duration::from_millis(5);
const RETRY_LATE: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub struct Client {
    id: ClientId,
    setup: Setup,
    memories: BTreeMap<GpuId, Memory>,
    /// The GPUs whose locks the client holds.
    held: GpuSet,
    /// The part of `held` that the client must release when submitted work is done.
    draining: GpuSet,
    /// The grace on each GPU that another client waits for.
    graces: BTreeMap<GpuId, Duration>,
    is_requested: bool,
    /// The program has work for its GPUs.
    has_work: bool,
    /// The program's work is running.
    runs: bool,
    /// Start of the current turn.
    since: Time,
    utilization: Utilization,
    idle_gaps: IdleGapPredictor,
    /// Start of the current idle gap. Set while other clients wait, or after the client released
    /// the lock because it was idle.
    idle_since: Option<Time>,
    /// Sequence numbers that identify outdated timers.
    turn: u32,
    drain: u32,
    pause: u32,
    effects: Vec<Effect>,
}

impl Client {
    pub fn new(id: ClientId, setup: Setup) -> Self {
        Self {
            id,
            memories: setup.gpus.iter().map(|gpu| (*gpu, Memory::new(setup.pinned))).collect(),
            setup,
            held: GpuSet::new(),
            draining: GpuSet::new(),
            graces: BTreeMap::new(),
            is_requested: false,
            has_work: false,
            runs: false,
            since: Time::ZERO,
            utilization: Utilization::default(),
            idle_gaps: IdleGapPredictor::default(),
            idle_since: None,
            turn: 0,
            drain: 0,
            pause: 0,
            effects: Vec::new(),
        }
    }

    /// Whether the client is attached to all of its GPUs.
    pub fn is_attached(&self) -> bool {
        self.memories.values().all(Memory::is_attached)
    }

    /// Whether the program has all memory that it wants.
    pub fn is_allocated(&self) -> bool {
        self.memories.values().all(Memory::is_allocated)
    }

    pub fn memory(&self, gpu: GpuId) -> Option<&Memory> {
        self.memories.get(&gpu)
    }

    /// The GPUs that the client uses.
    pub fn gpus(&self) -> &GpuSet {
        &self.setup.gpus
    }

    /// The GPUs whose locks the client holds.
    pub fn held(&self) -> &GpuSet {
        &self.held
    }

    /// The held GPUs whose locks the client must release.
    pub fn draining(&self) -> &GpuSet {
        &self.draining
    }

    /// Handles a migration of the sleeping client from one GPU to another.
    pub fn migrated(&mut self, from: GpuId, to: GpuId) {
        if let Some(memory) = self.memories.remove(&from) {
            self.memories.insert(to, memory);
            self.setup.gpus.remove(&from);
            self.setup.gpus.insert(to);
        }
    }

    /// Connects to the scheduler and attaches to the client's GPUs.
    pub fn connect(&mut self) -> Vec<Effect> {
        let (client, group, limits) = (self.id, self.setup.group, self.setup.limits);
        self.send(Event::Connected { client, gang: self.setup.gang, tenant: self.setup.tenant });
        if group.is_some() {
            self.send(Event::Groups { groups: [(client, group)].into() });
        }
        if limits != Default::default() {
            self.send(Event::EnvLimits { client, limits });
        }
        for gpu in self.setup.gpus.clone() {
            self.send(Event::Attached { client, gpu, engine: self.setup.engine });
        }
        self.take_effects()
    }

    /// Handles a message of the scheduler.
    pub fn handle(&mut self, now: Time, command: Command) -> Vec<Effect> {
        match command {
            Command::Attached { gpu, .. } => {
                if let Some(memory) = self.memories.get_mut(&gpu) {
                    memory.attach();
                }
            }
            Command::Limit { gpu, bytes, seq, .. } => {
                if let Some(memory) = self.memories.get_mut(&gpu) {
                    memory.set_limit(bytes, seq);
                    self.allocate_on(now, gpu);
                }
            }
            Command::Denied { gpu, .. } => {
                if let Some(memory) = self.memories.get_mut(&gpu) {
                    memory.refuse();
                    self.effects.push(Effect::Denied(gpu));
                }
            }
            Command::Allowance { gpu, seq, bytes, .. } => {
                if self.memories.get_mut(&gpu).is_some_and(|memory| memory.allow(seq, bytes)) {
                    self.report(gpu);
                }
                self.move_memory(gpu);
                self.run(now);
            }
            Command::Grant { gpus, .. } => {
                self.graces.retain(|gpu, _| !gpus.contains(gpu));
                self.held.extend(gpus);
                self.is_requested &= self.held != self.setup.gpus;
                self.since = now;
                self.turn = self.turn.wrapping_add(1);
                self.utilization = Utilization::default();
                self.run(now);
            }
            Command::Revoke { gpus, .. } => self.revoke(now, &gpus),
            Command::Contended { gpus, waiters, grace, .. } => {
                self.set_grace(now, &gpus, (waiters > 0).then_some(grace));
            }
            // Other commands are for the daemon, or do not affect the client.
            _ => {}
        }
        self.take_effects()
    }

    /// Sets the bytes that the program wants on each GPU. If the limit is lower, the program
    /// allocates at most `part` and requests a higher limit for the rest.
    pub fn allocate(&mut self, now: Time, bytes: u64, part: u64) -> Vec<Effect> {
        for gpu in self.setup.gpus.clone() {
            if let Some(memory) = self.memories.get_mut(&gpu) {
                memory.want(bytes, part);
            }
            if self.memory(gpu).is_some_and(Memory::is_attached) {
                self.allocate_on(now, gpu);
            }
        }
        self.take_effects()
    }

    /// Reduces the wanted bytes on this GPU to the limit.
    pub fn make_do(&mut self, now: Time, gpu: GpuId) -> Vec<Effect> {
        if let Some(memory) = self.memories.get_mut(&gpu) {
            memory.make_do();
            self.allocate_on(now, gpu);
        }
        self.take_effects()
    }

    /// Starts the program's work. The work runs as soon as the client has the lock and all of its
    /// memory.
    pub fn begin_work(&mut self, now: Time) -> Vec<Effect> {
        self.has_work = true;
        if let Some(since) = self.idle_since.take() {
            self.idle_gaps.record(now.saturating_sub(since));
        }
        self.pause = self.pause.wrapping_add(1);
        self.request();
        self.run(now);
        self.take_effects()
    }

    /// Ends the program's work.
    pub fn end_work(&mut self, now: Time) -> Vec<Effect> {
        (self.has_work, self.runs) = (false, false);
        self.utilization.rest(now);
        if self.draining.is_empty() {
            self.start_idle_timeout(now);
        } else {
            self.release(now, self.draining.clone(), ReleaseReason::Revoked);
            self.on_released();
        }
        self.take_effects()
    }

    /// Handles the end of a move. `bytes` is the requested number, or less if the world could not
    /// map all memory.
    pub fn moved(&mut self, now: Time, gpu: GpuId, way: Way, bytes: u64) -> Vec<Effect> {
        let Some(memory) = self.memories.get_mut(&gpu) else { return Vec::new() };
        if memory.moved(bytes) {
            self.report(gpu);
        }
        if way == Way::Out || self.on_mapped(now, gpu, bytes) {
            self.move_memory(gpu);
            self.run(now);
        }
        self.take_effects()
    }

    /// Handles an expired timer.
    pub fn wake(&mut self, now: Time, timer: Timer) -> Vec<Effect> {
        match timer {
            Timer::Quiet(pause) => {
                let gpus: GpuSet = self.held.difference(&self.draining).copied().collect();
                if !self.has_work && self.pause == pause && !self.graces.is_empty() && !gpus.is_empty() {
                    self.release(now, gpus, ReleaseReason::Idle);
                    self.on_released();
                }
            }
            Timer::Sampled(turn) => self.on_sampled(now, turn),
            Timer::Drained(drain) if self.drain == drain && !self.draining.is_empty() => {
                self.halt(now);
                self.release(now, self.draining.clone(), ReleaseReason::Revoked);
                self.on_released();
            }
            Timer::Lingers(drain) if self.drain == drain && !self.draining.is_empty() => {
                let gpus = self.draining.clone();
                self.send(Event::Stuck { client: self.id, gpus, reason: StuckReason::LongWork });
            }
            Timer::Retry(gpu) => {
                if let Some(memory) = self.memories.get_mut(&gpu) {
                    memory.retries = false;
                }
                self.move_memory(gpu);
            }
            Timer::Drained(_) | Timer::Lingers(_) => {}
        }
        self.take_effects()
    }

    fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    fn send(&mut self, event: Event) {
        self.effects.push(Effect::Send(event));
    }

    fn wake_at(&mut self, at: Time, timer: Timer) {
        self.effects.push(Effect::Wake(at, timer));
    }

    fn report(&mut self, gpu: GpuId) {
        let Some(report) = self.memory(gpu).map(Memory::report) else { return };
        self.send(Event::Memory { client: self.id, gpu, report });
    }

    /// Requests the lock, unless a request is pending, or the client is draining and requests the
    /// lock after the release.
    fn request(&mut self) {
        if self.has_work && !self.is_requested && self.draining.is_empty() && self.held != self.setup.gpus {
            self.is_requested = true;
            self.send(Event::Requested { client: self.id, gpus: self.setup.gpus.clone() });
        }
    }

    /// Runs the program's work, if the program has work and the client has the lock and all of its
    /// memory.
    fn run(&mut self, now: Time) {
        let is_paged = self.setup.engine == Engine::Managed;
        let can_run = self.has_work && self.draining.is_empty() && self.held == self.setup.gpus;
        if can_run && !self.runs && self.memories.values().all(|memory| memory.is_ready(is_paged)) {
            self.runs = true;
            self.utilization.run(now);
            self.effects.push(Effect::Run);
        }
    }

    fn halt(&mut self, now: Time) {
        if std::mem::take(&mut self.runs) {
            self.utilization.rest(now);
            self.effects.push(Effect::Halt);
        }
    }

    fn revoke(&mut self, now: Time, gpus: &GpuSet) {
        let gpus: GpuSet = self.held.iter().filter(|gpu| self.setup.peers || gpus.contains(gpu)).copied().collect();
        if gpus.is_subset(&self.draining) {
            return;
        }
        if !self.runs {
            self.release(now, gpus, ReleaseReason::Revoked);
            return self.on_released();
        }
        let drains_already = !self.draining.is_empty();
        self.draining.extend(gpus);
        if drains_already {
            return;
        }
        self.drain = self.drain.wrapping_add(1);
        let drain = self.setup.drain;
        if drain.is_none_or(|drain| drain > LONG) {
            self.wake_at(now + LONG, Timer::Lingers(self.drain));
        }
        if let Some(drain) = drain {
            self.wake_at(now + drain, Timer::Drained(self.drain));
        }
    }

    /// Sets the grace for these GPUs. `None`: no other client waits for them any more.
    fn set_grace(&mut self, now: Time, gpus: &GpuSet, grace: Option<Duration>) {
        let was_contended = !self.graces.is_empty();
        for gpu in gpus.intersection(&self.held).filter(|gpu| !self.draining.contains(gpu)) {
            match grace {
                Some(grace) => self.graces.insert(*gpu, grace),
                None => self.graces.remove(gpu),
            };
        }
        match (was_contended, !self.graces.is_empty()) {
            (false, true) => {
                self.sample(now);
                self.start_idle_timeout(now);
            }
            (true, false) => {
                self.idle_since = None;
                self.pause = self.pause.wrapping_add(1);
            }
            _ => {}
        }
    }

    /// Starts the idle timeout if the program has no work while other clients wait.
    fn start_idle_timeout(&mut self, now: Time) {
        let Some(grace) = self.graces.values().min().copied().filter(|_| !self.has_work) else { return };
        self.idle_since = Some(now);
        self.pause = self.pause.wrapping_add(1);
        let timeout = if grace <= SHORTEST { grace } else { self.idle_gaps.timeout(grace) };
        self.wake_at(now + timeout, Timer::Quiet(self.pause));
        if timeout > SAMPLED {
            self.sample(now);
        }
    }

    fn sample(&mut self, now: Time) {
        if self.setup.fullness.is_some() && self.utilization.begin(now) {
            self.wake_at(now + SAMPLED, Timer::Sampled(self.turn));
        }
    }

    fn on_sampled(&mut self, now: Time, turn: u32) {
        let Some(fullness) = self.setup.fullness else { return };
        if self.turn != turn || self.held.is_empty() || !self.draining.is_empty() {
            return;
        }
        let (permille, goes_on) = self.utilization.end(now, fullness, !self.graces.is_empty());
        if let Some(permille) = permille {
            for gpu in self.held.clone() {
                self.send(Event::Utilization { client: self.id, gpu, permille });
            }
        }
        if goes_on {
            self.sample(now);
        }
    }

    fn release(&mut self, now: Time, gpus: GpuSet, reason: ReleaseReason) {
        self.held.retain(|gpu| !gpus.contains(gpu));
        self.draining.retain(|gpu| !gpus.contains(gpu));
        self.graces.retain(|gpu, _| !gpus.contains(gpu));
        let busy = now.saturating_sub(self.since);
        self.send(Event::Released { client: self.id, gpus, reason, busy });
    }

    /// After a release, requests the lock again if the program has work, and starts due moves of
    /// memory.
    fn on_released(&mut self) {
        self.request();
        for gpu in self.setup.gpus.clone() {
            self.move_memory(gpu);
        }
    }

    /// Allocates the wanted bytes up to the limit, and reports the memory.
    fn allocate_on(&mut self, now: Time, gpu: GpuId) {
        if let Some(bytes) = self.memories.get_mut(&gpu).and_then(Memory::allocate) {
            self.send(Event::LimitRequested { client: self.id, gpu, bytes });
        }
        self.report(gpu);
        self.move_memory(gpu);
        self.run(now);
    }

    /// Moves memory towards the allowance. During a turn, no memory leaves the GPU.
    fn move_memory(&mut self, gpu: GpuId) {
        let stays = self.held.contains(&gpu);
        let Some(memory) = self.memories.get_mut(&gpu) else { return };
        if let Some((way, bytes)) = memory.step(stays, self.setup.chunk) {
            self.effects.push(Effect::Move { gpu, way, bytes });
        }
    }

    /// Handles the end of an attempt to map memory. Returns false if no byte could be mapped. In
    /// that case the client retries. After a while of failures, it releases its locks so that other
    /// clients can run.
    fn on_mapped(&mut self, now: Time, gpu: GpuId, bytes: u64) -> bool {
        let Some(memory) = self.memories.get_mut(&gpu) else { return false };
        let is_full = memory.is_full(now, bytes == 0);
        if bytes > 0 {
            return true;
        }
        if !std::mem::replace(&mut memory.retries, true) {
            self.wake_at(now + if is_full { RETRY_LATE } else { RETRY_SOON }, Timer::Retry(gpu));
        }
        if is_full && self.held.contains(&gpu) && !self.draining.contains(&gpu) {
            self.halt(now);
            self.release(now, [gpu].into(), ReleaseReason::NoMemory);
            // The program needs all of its GPUs, so the client also releases the other locks.
            let others: GpuSet = self.held.difference(&self.draining).copied().collect();
            if !others.is_empty() {
                self.release(now, others, ReleaseReason::Idle);
            }
            self.on_released();
        }
        false
    }
}
