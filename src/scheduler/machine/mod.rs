//! The state, and the dispatch of events. An event changes the state of a component and marks the
//! affected GPUs. Each marked GPU is then settled.

mod attachment;
mod membership;

use crate::{
    api::*,
    client::Clients,
    effects::Effects,
    explain::Explanation,
    fairness::Fairness,
    gpu::{self, Access, Gpu, Gpus, Hold},
    model::Model,
    placement::Placements,
    queue::Queues,
    quota::Quota,
    rules::Rules,
    sleep::Sleep,
    timers::Wake,
    view::{Activity, ClientView, GpuView, Turns},
};
use std::collections::BTreeMap;
use std::time::Duration;

/// The latest time (34 years). Later times are clamped to this time, so that no sum of times
/// overflows.
const MAX_TIME: Time = Duration::from_secs(1 << 30);

impl Settings {
    /// Clamps durations, so that no sum of times overflows.
    fn clamp(&mut self) {
        self.time_quantum = self.time_quantum.min(MAX_TIME);
        self.time_period = self.time_period.min(MAX_TIME / 100);
        self.sleep_after = self.sleep_after.map(|after| after.min(MAX_TIME));
    }
}

/// The scheduler's state machine. Decides which clients run on which GPU, and which clients' memory
/// is on each GPU.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct Machine {
    pub(crate) now: Time,
    pub(crate) settings: Settings,
    pub(crate) gpus: Gpus,
    pub(crate) clients: Clients,
    pub(crate) queues: Queues,
    pub(crate) fairness: Fairness,
    pub(crate) rules: Rules,
    pub(crate) quota: Quota,
    pub(crate) places: Placements,
    #[serde(default)]
    pub(crate) sleep: Sleep,
    pub(crate) effects: Effects,
    /// The host is about to suspend.
    pub(crate) suspended: bool,
}

impl Machine {
    /// A machine without GPUs and clients, at time 0.
    pub fn new(mut settings: Settings) -> Self {
        settings.clamp();
        Self {
            now: Time::ZERO,
            settings,
            gpus: Gpus::default(),
            clients: Clients::new(),
            queues: Queues::default(),
            fairness: Fairness::default(),
            rules: Rules::default(),
            quota: Quota::default(),
            places: Placements::default(),
            sleep: Sleep::default(),
            effects: Effects::default(),
            suspended: false,
        }
    }

    /// The time at which the next [`Event::Tick`] is due if no other event arrives before. `None`:
    /// no tick is due.
    pub fn deadline(&self) -> Option<Time> {
        self.effects.deadline()
    }

    /// The current settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Handles an event. Returns the commands to carry out, in this order. Invalid events, such as
    /// events of unknown clients, change nothing. `now` should not decrease; an earlier time is
    /// raised to the time of the last event.
    pub fn handle(&mut self, now: Time, event: Event) -> Vec<Command> {
        self.now = self.now.max(now.min(MAX_TIME));
        // The event is handled before due wake-ups, so that an answer that arrives in time counts,
        // and clients that have just disconnected receive no requests.
        self.dispatch(event);
        while let Some(wake) = self.effects.take_due(self.now) {
            match wake {
                Wake::Gpu(gpu) => self.touch(gpu),
                Wake::Client(client) => self.check(client),
                Wake::Entity(entity) => {
                    self.requeue(entity);
                    self.enqueue(entity);
                }
                Wake::Eviction(client, gpu) => {
                    self.with_gpu(gpu, |gpu, cx, fx| gpu.unblock_eviction(cx, fx, client));
                }
                Wake::Verification(gpu) => {
                    self.with_gpu(gpu, |gpu, cx, fx| gpu.expire_unverified(cx.now, fx));
                }
                Wake::HeldRequests(gpu) => self.held_requests_timed_out(gpu),
                Wake::Failures(gpu) => self.failures_are_unexplained(gpu),
                Wake::Limits => self.quota.mark_all_changed(),
                Wake::Ahead(client, gpu) => self.ask_ahead(client, gpu),
                Wake::Sleep(client) => self.look_at_sleep(client),
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
            for client in self.quota.take_expected() {
                self.retry_move(client);
            }
        }
        self.effects.take_commands()
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::Tick => {}
            Event::Configure(settings) => self.configure(settings),
            Event::GpuFound { gpu, total } => self.gpu_found(gpu, total),
            Event::GpuGone { gpu } => self.gpu_gone(gpu),
            Event::Suspend { suspended } => self.suspend(suspended),
            Event::GpuLink { gpu, rate } => {
                self.with_gpu(gpu, |gpu, _, fx| gpu.link_found(fx, rate));
            }
            Event::GpuOverhead { gpu, begun, bytes, others, complete } => {
                self.with_gpu(gpu, |gpu, cx, fx| gpu.overhead_measured(cx, fx, begun, bytes, others, complete));
            }
            Event::Measured { gpu, begun, free, found } => self.clients_measured(gpu, begun, free, &found),
            Event::ContextSizes { gpu, bytes } => {
                self.with_quota(|quota, cx, _| quota.contexts_measured(cx, gpu, &bytes))
            }
            Event::OtherPrograms { gpu, present } => {
                self.with_gpu(gpu, |gpu, _, fx| gpu.other_programs(fx, present));
            }
            Event::HostMemory { bytes } => self.quota.host_memory(bytes),
            Event::HostAhead { bytes } => self.host_ahead(bytes),
            Event::Connected { client, gang, tenant } => self.connected(client, gang, tenant),
            Event::Groups { groups } => self.grouped(&groups),
            Event::EnvLimits { client, limits } => self.set_env_limits(client, limits),
            Event::Labels { labels } => self.places.label(&labels),
            Event::PlacementRequested { client, request } => self.request_placement(client, &request),
            Event::PlacementTaken { client, from } => self.take_placement(client, from),
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
                self.report(client, gpu, report);
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
                self.try_sleep(client);
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
            Event::RoomRequested { room, gpu, bytes, until } => {
                self.request_room(room, gpu, bytes, until.min(MAX_TIME))
            }
            Event::RoomClosed { room } => self.end_room(room),
            Event::SleepWanted { client, paused } => self.want_sleep(client, paused),
            Event::FoundAsleep { client } => self.found_asleep(client),
            Event::Resumed { client } => self.wake(client, true),
            Event::Migrate { client, from, to } => self.migrate(client, Move { from, to }),
            Event::Drain { gpu, drained } => self.drain(gpu, drained),
            Event::Kinds { kinds } => self.places.set_kinds(kinds),
            Event::Failing { gpu, failing } => {
                self.gpus.get_mut(gpu).into_iter().for_each(|gpu| gpu.failing = failing);
            }
            Event::Allowed { allowed } => self.places.allow(allowed),
            Event::SleepReady { client } => {
                self.alive(client);
                self.sleep_ready(client);
            }
            Event::SleepRefused { client, why } => {
                self.alive(client);
                self.sleep_refused(client, why);
            }
            Event::WakeRequested { client } => {
                self.alive(client);
                self.wake(client, false);
            }
            Event::Checkpointed { client, outcome } => self.checkpointed(client, outcome),
        }
    }

    fn request_room(&mut self, room: RoomId, id: GpuId, bytes: u64, until: Time) {
        let made = match self.gpu_mut(id) {
            Some((gpu, cx, fx)) => gpu.make_room(cx.now, cx.settings, fx, room, bytes, until),
            None => Err(RoomObstacle::Gone),
        };
        if let Err(why) = made {
            self.end_room(room);
            self.effects.command(Command::RoomRefused { room, gpu: id, why });
        }
    }

    /// Ends a room on all GPUs.
    fn end_room(&mut self, room: RoomId) {
        self.gpus.iter_mut().for_each(|(_, gpu)| gpu.end_room(&mut self.effects, room));
    }

    fn configure(&mut self, mut settings: Settings) {
        settings.clamp();
        let is_same = settings.time_period == self.settings.time_period;
        let is_same_policy = settings.policy == self.settings.policy;
        self.settings = settings;
        if !is_same_policy {
            self.rerank_all();
        }
        if !(is_same && is_same_policy) {
            self.requeue_all();
        }
        self.effects.touch_all(self.gpus.ids());
        self.admit_needless();
    }

    fn gpu_found(&mut self, id: GpuId, total: u64) {
        let gpu = self.gpus.found(id, total);
        gpu.total = total;
        gpu.failing = false;
        gpu.access = if self.suspended { Access::Suspended } else { Access::Turns };
        self.quota.gpu_found(id);
        self.queues.gpu_found(id);
        self.fairness.gpu_found(id);
        self.touch(id);
    }

    fn gpu_gone(&mut self, id: GpuId) {
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        gpu.access = Access::Gone;
        gpu.end_rooms(&mut self.effects);
        self.touch(id);
        self.forget_if_gone(id);
    }

    /// Forgets a GPU that is gone and has no clients.
    pub(crate) fn forget_if_gone(&mut self, id: GpuId) {
        if !self.gpus.get(id).is_some_and(|gpu| gpu.access == Access::Gone && gpu.attachments.is_empty()) {
            return;
        }
        self.gpus.forget(id);
        self.quota.gpu_forgotten(id);
        self.queues.gpu_forgotten(id);
        self.fairness.gpu_forgotten(id);
        self.effects.forget(id);
    }

    fn suspend(&mut self, suspended: bool) {
        self.suspended = suspended;
        for (_, gpu) in self.gpus.iter_mut().filter(|(_, gpu)| gpu.access != Access::Gone) {
            gpu.access = if suspended { Access::Suspended } else { Access::Turns };
        }
        self.effects.touch_all(self.gpus.ids());
        self.admit_needless();
    }

    /// Marks a GPU to be settled.
    pub(crate) fn touch(&mut self, gpu: GpuId) {
        if self.gpus.contains(gpu) {
            self.effects.touch(gpu);
        }
    }

    /// The view of one GPU. `None`: the GPU is unknown.
    pub fn gpu(&self, id: GpuId) -> Option<GpuView> {
        self.model().gpu(id, self.effects.wakes_at(Wake::Gpu(id)))
    }

    /// Views of all known GPUs.
    pub fn gpus(&self) -> Vec<GpuView> {
        self.gpus.ids().filter_map(|id| self.gpu(id)).collect()
    }

    /// A read-only view of the current state.
    pub(crate) fn model(&self) -> Model<'_> {
        let Self { now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places, .. } = self;
        Model { now: *now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places }
    }

    /// A GPU to change, the state that decisions about it depend on, and the effects to add to.
    /// `None`: the GPU is unknown.
    pub(crate) fn gpu_mut(&mut self, id: GpuId) -> Option<(&mut Gpu, gpu::Context<'_>, &mut Effects)> {
        let Self { now, settings, gpus, rules, clients, queues, sleep, quota, effects, .. } = self;
        let context = gpu::Context { now: *now, settings, rules, clients, queues, sleep, quota };
        Some((gpus.get_mut(id)?, context, effects))
    }

    /// Runs `act` on a GPU if the GPU is known.
    pub(crate) fn with_gpu(&mut self, id: GpuId, act: impl FnOnce(&mut Gpu, gpu::Context, &mut Effects)) {
        if let Some((gpu, cx, fx)) = self.gpu_mut(id) {
            act(gpu, cx, fx);
        }
    }

    pub(crate) fn allow(&mut self, client: ClientId, id: GpuId, bytes: u64) {
        self.with_gpu(id, |gpu, cx, fx| gpu.allow(cx, fx, client, bytes));
    }

    pub(crate) fn credit(&mut self, client: ClientId, id: GpuId, reserved_ahead: u64) -> u64 {
        self.gpu_mut(id).map_or(0, |(gpu, cx, fx)| gpu.credit(cx, fx, client, reserved_ahead))
    }

    /// Requests a measurement of a GPU if none is pending.
    pub(crate) fn measure(&mut self, id: GpuId) {
        self.with_gpu(id, |gpu, _, fx| gpu.measure(fx));
    }

    /// Requests a measurement even if another is pending.
    pub(crate) fn measure_again(&mut self, id: GpuId) {
        self.with_gpu(id, |gpu, _, fx| gpu.measure_again(fx));
    }

    /// Changes a client's hold of a GPU, and updates the ledger.
    pub(crate) fn change_hold(&mut self, client: ClientId, id: GpuId, change: impl FnOnce(&mut Hold)) {
        if let Some(hold) = self.gpus.hold_mut(client, id) {
            change(hold);
            self.lock_changed(client, id);
        }
    }

    /// See [`Gpu::lock_changed`].
    pub(crate) fn lock_changed(&mut self, client: ClientId, id: GpuId) {
        self.with_gpu(id, |gpu, cx, fx| gpu.lock_changed(cx, fx, client));
    }
}

/// Methods of [`Machine`] that return what the method of [`Model`] with the same name returns.
macro_rules! reads {
    ($($name:ident($($argument:ident: $kind:ty),*) -> $result:ty;)*) => {
        impl Machine {
            $(
                #[doc = concat!("See `Model::", stringify!($name), "`.")]
                pub fn $name(&self, $($argument: $kind),*) -> $result {
                    self.model().$name($($argument),*)
                }
            )*
        }
    };
}

reads! {
    // Clients.
    clients() -> Vec<ClientView>;
    client(id: ClientId) -> Option<ClientView>;
    tenants() -> BTreeMap<ClientId, TenantId>;
    allowed(client: ClientId) -> Option<&GpuSet>;
    sleep_of(client: ClientId) -> SleepView;
    activities(id: ClientId) -> impl Iterator<Item = (GpuId, Activity)>;
    explain(client: ClientId, now: Time) -> impl Iterator<Item = Explanation>;

    // GPUs.
    is_known(id: GpuId) -> bool;
    is_held(gpu: GpuId) -> bool;
    offer(gpu: GpuId) -> u64;
    charged(gpu: GpuId) -> u64;
    kinds() -> &[GpuSet];
    shares_due(id: GpuId) -> BTreeMap<ClientId, u32>;
    expected_starts(id: GpuId, most: usize, now: Time) -> Vec<(ClientId, Duration)>;
    is_evacuated() -> bool;

    // A client on one GPU.
    engine(id: ClientId, gpu: GpuId) -> Option<Engine>;
    extent(id: ClientId, gpu: GpuId) -> Option<(u64, u64)>;
    resident_and_swapped(id: ClientId, gpu: GpuId) -> Option<(u64, u64)>;
    committed_or_requested(id: ClientId, gpu: GpuId) -> u64;
    turns(id: ClientId, gpu: GpuId, now: Time) -> Option<Turns>;
    has_context(client: ClientId, id: GpuId, begun: Time) -> bool;
    counted_context(client: ClientId, id: GpuId) -> u64;
    contexts_of_group(client: ClientId, id: GpuId) -> u64;
    memory_max(client: ClientId, id: GpuId) -> Option<u64>;
    env_memory_max(client: ClientId, id: GpuId) -> Option<u64>;
    lowest_max(client: ClientId, id: GpuId) -> Option<u64>;

    // Host memory.
    host() -> (Option<u64>, u64);
    is_host_scarce() -> bool;
    swapped() -> u64;
    is_ahead() -> bool;
}
