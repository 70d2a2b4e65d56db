//! The state, and the dispatch of events. An event changes what it is about and marks the GPUs that it touches; then each marked GPU is
//! settled.

mod membership;

use crate::{
    api::*,
    effects::Effects,
    fairness::Fairness,
    lock::{Hold, Lock},
    memory::ledger::{Account, Ledger, State},
    memory::reservation::Reservation,
    memory::shortfall::{Failures, Trial},
    placement::Placements,
    policy::{self, Bursts, FIRST_RATE, Policy, Progress, RATE_BACK},
    quota::Quota,
    rules::Rules,
    settle::corun::Utilization,
    thrash::Detector,
    timers::Wake,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// Later times are taken for this one (34 years), so that no sum of times overflows.
const MAX_TIME: Time = Duration::from_secs(1 << 30);

impl Settings {
    fn bound(&mut self) {
        self.time_quantum = self.time_quantum.min(MAX_TIME);
        self.time_period = self.time_period.min(MAX_TIME / 100);
    }
}

/// Decides who may run on which GPU, and whose memory is there. See the [module](super).
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub struct Machine {
    pub(crate) now: Time,
    pub(crate) settings: Settings,
    pub(crate) gpus: BTreeMap<GpuId, Gpu>,
    pub(crate) clients: BTreeMap<ClientId, Client>,
    pub(crate) lock: Lock,
    pub(crate) fairness: Fairness,
    pub(crate) rules: Rules,
    pub(crate) quota: Quota,
    pub(crate) places: Placements,
    pub(crate) effects: Effects,
}

#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Gpu {
    pub total: u64,
    /// The newest measured overhead.
    pub measured: Option<u64>,
    /// Processes were left out of that which may be clients on their way back.
    pub incomplete: bool,
    /// A client that may try to map more than there seems to be.
    pub trial: Option<Trial>,
    /// Clients are measured there: what they report is believed only as far as that goes.
    pub verifies: bool,
    /// Clients whose context the newest measurement cannot have seen.
    pub unmeasured: BTreeSet<ClientId>,
    pub clients: BTreeSet<ClientId>,
    pub ledger: Ledger,
    /// It is being measured what is there.
    pub asked: bool,
    /// Waiting for room for a context, and how many of them, from the back, are not to have any: others could never run then.
    pub attaching: VecDeque<PendingContext>,
    pub deferred: usize,
    pub reservations: Vec<Reservation>,
    /// The capacity when it was last settled.
    pub capacity: u64,
    /// Whether a holder or the first in line lacks bytes: what becomes free is theirs.
    pub lacking: bool,
    /// Bytes per second of evictions, smoothed: of what had to be copied. And at which memory comes back.
    pub rate: u64,
    pub rate_back: u64,
    pub thrash: Detector,
}

/// A client that is about to create a context.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct PendingContext {
    pub client: ClientId,
    pub since: Time,
    /// It was told that it waits for others to need less; and that it waits in vain, which it may accept.
    pub told: bool,
    pub refused: bool,
}

#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Client {
    /// As it calls its gang; 0: it is in none, unless a rule says so.
    pub named: u64,
    pub user: UserId,
    pub stopped: bool,
    pub attachments: BTreeMap<GpuId, Attachment>,
    /// When it was last asked about, and how long not to ask again.
    pub probed: Option<(Time, Duration)>,
}

/// A client on a GPU that it attached.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Attachment {
    #[serde(with = "crate::encoding::Engine")]
    pub engine: Engine,
    pub failures: Failures,
    /// When what it needs last grew, and whether it had grown shortly before that, too.
    pub grew: Option<Time>,
    pub keeps_growing: bool,
    /// Why its memory cannot leave, and for how long it is then not asked for it.
    pub eviction_block: Option<EvictionBlock>,
    pub eviction_backoff: Duration,
    /// Bytes per second at which its memory leaves, whether copied or not, smoothed.
    pub rate: Option<u64>,
    /// When it was told to create its context, and when it first did something for which it must have one.
    pub attached: Option<Time>,
    pub used: Option<Time>,
    pub bursts: Bursts,
    pub progress: Progress,
    pub utilization: Utilization,
}

impl Machine {
    pub fn new(mut settings: Settings) -> Self {
        settings.bound();
        Self {
            now: Time::ZERO,
            settings,
            gpus: BTreeMap::new(),
            clients: BTreeMap::new(),
            lock: Lock::default(),
            fairness: Fairness::default(),
            rules: Rules::default(),
            quota: Quota::default(),
            places: Placements::default(),
            effects: Effects::default(),
        }
    }

    pub(crate) fn policy(&self) -> &'static dyn Policy {
        policy::named(self.settings.policy)
    }

    /// When it wants the next [`Event::Tick`], unless another event comes first.
    pub fn deadline(&self) -> Option<Time> {
        self.effects.deadline()
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Takes in what happened, and says what is to be done, in this order. Events that make no sense change nothing.
    pub fn handle(&mut self, now: Time, event: Event) -> Vec<Command> {
        self.now = self.now.max(now.min(MAX_TIME));
        // What happened goes before what is due: an answer that came just in time is an answer, and the dead are not asked.
        self.dispatch(event);
        while let Some(wake) = self.effects.take_due(self.now) {
            match wake {
                Wake::Gpu(gpu) => self.touch(gpu),
                Wake::Client(client) => self.check(client),
                Wake::Entity(entity) => self.enqueue(entity),
                Wake::Eviction(client, gpu) => self.unblock_eviction(client, gpu),
                Wake::Verification(gpu) => self.expire_unverified(gpu),
                Wake::HeldRequests(gpu) => self.held_requests_timed_out(gpu),
                Wake::Failures(gpu) => self.failures_are_unexplained(gpu),
                Wake::Limits => self.quota.mark_all_changed(),
                Wake::Thrash(gpu) => self.look_at_traffic(gpu),
            }
        }
        loop {
            while let Some(gpu) = self.effects.take_touched() {
                self.settle(gpu);
            }
            if !self.quota.has_changed() {
                break;
            }
            self.with_quota(Quota::balance);
        }
        self.effects.take_commands()
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::Tick => {}
            Event::Configure(settings) => self.configure(settings),
            Event::GpuFound { gpu, total } => self.gpu_found(gpu, total),
            Event::GpuLink { gpu, rate } => self.link_found(gpu, rate),
            Event::GpuOverhead { gpu, begun, bytes, complete } => self.overhead(gpu, begun, bytes, complete),
            Event::Measured { gpu, begun, free, found } => self.present(gpu, begun, free, &found),
            Event::ContextSizes { gpu, bytes } => {
                self.with_quota(|quota, cx, _| quota.contexts_measured(cx, gpu, &bytes))
            }
            Event::Traffic { gpu, traffic } => self.traffic(gpu, traffic),
            Event::HostMemory { bytes } => self.quota.host_memory(bytes),
            Event::Connected { client, gang, user } => self.connected(client, gang, user),
            Event::Groups { groups } => self.grouped(&groups),
            Event::EnvLimits { client, limits } => self.set_env_limits(client, limits),
            Event::Labels { labels } => self.places.label(&labels),
            Event::PlacementRequested { client, request } => self.give_place(client, &request),
            Event::PlacementTaken { client, from } => self.take_place(client, from),
            Event::Disconnected { client } => self.disconnected(client),
            Event::Attached { client, gpu, engine } => {
                self.alive(client);
                self.attach(client, gpu, engine);
            }
            Event::Detached { client, gpu } => {
                self.alive(client);
                self.detach(client, gpu);
            }
            Event::Memory { client, gpu, report } => {
                self.alive(client);
                self.memory(client, gpu, report);
            }
            Event::LimitRequested { client, gpu, bytes } => {
                self.alive(client);
                self.request_limit(client, gpu, bytes);
            }
            Event::ReservationRequested { client, gpu, bytes } => {
                self.alive(client);
                self.request_reservation(client, gpu, bytes);
            }
            Event::Utilization { client, gpu, permille } => {
                self.alive(client);
                self.utilization(client, gpu, permille);
            }
            Event::Requested { client, gpus } => {
                self.alive(client);
                self.request(client, gpus);
            }
            Event::Cancelled { client, gpus } => {
                self.alive(client);
                self.cancel(client, &gpus);
            }
            Event::Released { client, gpus, reason, busy } => {
                self.alive(client);
                self.released(client, &gpus, reason, busy);
            }
            Event::Held { client, gpus } => {
                self.alive(client);
                self.held(client, &gpus);
            }
            Event::Stuck { client, gpus, reason } => {
                self.alive(client);
                self.stuck(client, &gpus, reason);
            }
            Event::Stopped { client, stopped } => self.stopped(client, stopped),
        }
    }

    fn configure(&mut self, mut settings: Settings) {
        settings.bound();
        let is_same = settings.time_period == self.settings.time_period;
        let is_same_policy = settings.policy == self.settings.policy;
        self.settings = settings;
        if !is_same_policy {
            self.rerank_all();
        }
        if !(is_same && is_same_policy) {
            self.requeue_all();
        }
        self.effects.touch_all(self.gpus.keys().copied());
        self.admit_needless();
    }

    fn gpu_found(&mut self, id: GpuId, total: u64) {
        self.gpus
            .entry(id)
            .or_insert_with(|| Gpu {
                total,
                measured: None,
                incomplete: false,
                trial: None,
                verifies: false,
                unmeasured: BTreeSet::new(),
                clients: BTreeSet::new(),
                ledger: Ledger::default(),
                asked: false,
                attaching: VecDeque::new(),
                deferred: 0,
                reservations: Vec::new(),
                capacity: 0,
                lacking: false,
                rate: FIRST_RATE,
                rate_back: RATE_BACK,
                thrash: Detector::default(),
            })
            .total = total;
        self.quota.gpu_found(id);
        self.lock.gpu_found(id);
        self.fairness.gpu_found(id);
        self.touch(id);
    }

    /// That GPU is to be settled.
    pub(crate) fn touch(&mut self, gpu: GpuId) {
        if self.gpus.contains_key(&gpu) {
            self.effects.touch(gpu);
        }
    }

    pub(crate) fn attachment(&self, client: ClientId, gpu: GpuId) -> Option<&Attachment> {
        self.clients.get(&client)?.attachments.get(&gpu)
    }

    pub(crate) fn attachment_mut(&mut self, client: ClientId, gpu: GpuId) -> Option<&mut Attachment> {
        self.clients.get_mut(&client)?.attachments.get_mut(&gpu)
    }

    pub(crate) fn account(&self, client: ClientId, gpu: GpuId) -> Option<&Account> {
        self.gpus.get(&gpu)?.ledger.account(client)
    }

    pub(crate) fn change_account<R>(
        &mut self,
        client: ClientId,
        id: GpuId,
        change: impl FnOnce(&mut Account) -> R,
    ) -> Option<R> {
        let gpu = self.gpus.get_mut(&id)?;
        let result = gpu.ledger.change(client, change);
        if gpu.ledger.is_loosened() {
            self.effects.touch(id);
        }
        result
    }

    /// Changes a client's hold of a GPU.
    pub(crate) fn change_hold(&mut self, client: ClientId, id: GpuId, change: impl FnOnce(&mut Hold)) {
        if let Some(hold) = self.lock.hold_mut(client, id) {
            change(hold);
            self.lock_changed(client, id);
        }
    }

    /// A client's hold of a GPU, or why its memory stays there, is another: the ledger follows, and the GPU is settled.
    pub(crate) fn lock_changed(&mut self, client: ClientId, id: GpuId) {
        self.touch(id);
        let block = self.eviction_block(client, id);
        let (Some(lock), Some(gpu)) = (self.lock.of(client, id), self.gpus.get_mut(&id)) else { return };
        let now = match block {
            Some(_) => State::Unevictable,
            None if lock.hold.is_some() => State::Running,
            None => State::Idle(lock.last_run),
        };
        gpu.ledger.set_state(client, now);
        if gpu.ledger.is_loosened() {
            self.effects.touch(id);
        }
    }
}
