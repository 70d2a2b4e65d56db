//! The scheduling loop's state: the machine, everybody it decides about, and the carrying out of its commands. All of
//! it belongs to one thread; a message that comes in has been answered, to everybody concerned, when its call returns.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nvshare_wire::SchedulerMessage;
use nvshare_wire::client::GpuKind;
use tokio::sync::{Notify, watch};
use tracing::{debug, info, warn};

use super::clients::Link;
use super::config::Config;
use super::gpus::{Ask, GpuDescription, Sample};
use super::overhead::{Attached, Overhead};
use super::peer::{self, Identity};
use super::session::{Meaning, Session, Violation};
use super::socket::{self, Timer};
use super::trace::Trace;
use crate::bus;
use crate::scheduler::{self, ClientId, Command, Event, GpuId, GpuSet, Machine, SeatView, Settings, Time};

/// GPUs that NVML does not know are believed to a client, up to this many: more is a client that makes them up.
const MAX_UNKNOWN_GPUS: usize = 128;

/// The machine asks for no tick sooner than this after one, so that a mistake in it cannot take a whole CPU.
const MIN_TICK: Duration = Duration::from_micros(100);

pub struct Hub {
    pub config: Config,
    machine: Machine,
    clients: BTreeMap<ClientId, Client>,
    gpus: BTreeMap<GpuId, Gpu>,
    next_client: u64,
    /// Connections of each user, those that have not said Hello included.
    connections: Rc<RefCell<HashMap<u32, u32>>>,
    timer: Rc<Timer>,
    armed: Option<Time>,
    /// When the machine was last given a tick.
    ticked: Time,
    started: Time,
    /// Processes whose connection has closed, and when: what they had on a GPU is still there for a moment.
    departed: BTreeMap<u32, Time>,
    stopped: BTreeSet<ClientId>,
    trace: Option<Trace>,
    nvml: Option<std::sync::mpsc::Sender<Ask>>,
    settings: watch::Sender<Settings>,
    pub signals: Rc<Signals>,
}

/// What wakes the loop's background tasks.
#[derive(Debug, Default)]
pub struct Signals {
    /// A client is stopped, and has to be looked at until it runs again.
    pub stopped: Notify,
    /// A client did something.
    pub activity: Notify,
    pub last_activity: Cell<Time>,
    pub clients: Cell<usize>,
}

/// A client that has been welcomed.
struct Client {
    link: Rc<Link>,
    session: Session,
    identity: Arc<Identity>,
    library: String,
    connected: SystemTime,
    uses: BTreeMap<GpuId, Use>,
}

/// What the machine does not remember of a client on one GPU.
struct Use {
    /// When it last had nothing to do with the lock.
    idle_since: Time,
    mapped: u64,
    allowance: u64,
    /// When one of these two last changed.
    changed: Time,
    attached: Time,
    limit: Option<u64>,
}

struct Gpu {
    kind: GpuKind,
    name: String,
    total: u64,
    /// Its number for NVML; `None` while only clients know it.
    index: Option<u32>,
    overhead: Overhead,
}

impl Gpu {
    fn label(&self, gpu: GpuId) -> String {
        bus::gpu_name(self.kind, gpu)
    }
}

impl Hub {
    pub fn new(config: Config, trace: Option<Trace>, settings: watch::Sender<Settings>) -> std::io::Result<Self> {
        Ok(Self {
            machine: Machine::new(config.settings.clone()),
            config,
            clients: BTreeMap::new(),
            gpus: BTreeMap::new(),
            next_client: 1,
            connections: Rc::default(),
            timer: Rc::new(Timer::new()?),
            armed: None,
            ticked: Time::ZERO,
            started: socket::now(),
            departed: BTreeMap::new(),
            stopped: BTreeSet::new(),
            trace,
            nvml: None,
            settings,
            signals: Rc::default(),
        })
    }

    pub fn timer(&self) -> Rc<Timer> {
        self.timer.clone()
    }

    pub fn connections(&self) -> Rc<RefCell<HashMap<u32, u32>>> {
        self.connections.clone()
    }

    pub fn use_nvml(&mut self, ask: std::sync::mpsc::Sender<Ask>) {
        self.nvml = Some(ask);
    }

    pub fn ask_nvml(&self, ask: Ask) {
        if let Some(nvml) = &self.nvml {
            let _ = nvml.send(ask);
        }
    }

    // ---- clients -------------------------------------------------------------------------------------------------

    /// Lets a client in that said Hello.
    pub fn connect(
        &mut self,
        link: Rc<Link>,
        identity: Arc<Identity>,
        version: u16,
        gang: u64,
        library: &str,
    ) -> ClientId {
        let client = ClientId(self.next_client);
        self.next_client += 1;
        let library: String = library.chars().filter(|c| !c.is_control()).collect();
        info!(
            client = client.0,
            pid = identity.pid,
            uid = identity.uid,
            unit = identity.unit,
            library,
            "{} connected",
            identity.name
        );
        let session = Session::new(client, version);
        let uses = BTreeMap::new();
        let entry = Client { link, session, identity, library, connected: SystemTime::now(), uses };
        self.clients.insert(client, entry);
        self.signals.clients.set(self.clients.len());
        self.active();
        self.trace(socket::now(), client, None, "connect", None);
        self.send(client, SchedulerMessage::Welcome { version, client: client.0 });
        self.apply(Event::Connected { client, gang });
        client
    }

    /// The client is gone, for whatever reason.
    pub fn disconnect(&mut self, client: ClientId, why: &str) {
        let now = socket::now();
        self.trace(now, client, None, "disconnect", None);
        let Some(gone) = self.clients.remove(&client) else { return };
        let identity = &gone.identity;
        info!(client = client.0, pid = identity.pid, uid = identity.uid, "{} {why}", identity.name);
        self.departed.insert(identity.pid.try_into().unwrap_or(0), now);
        self.stopped.remove(&client);
        self.signals.clients.set(self.clients.len());
        self.active();
        self.apply(Event::Disconnected { client });
    }

    /// One packet of a client.
    pub fn receive(&mut self, client: ClientId, packet: &[u8]) -> Result<(), Violation> {
        let now = socket::now();
        let Some(entry) = self.clients.get_mut(&client) else { return Ok(()) };
        let meaning = entry.session.receive(packet)?;
        self.active();
        match meaning {
            Meaning::Event(event) => self.apply(event),
            Meaning::Attach { event, slot, gpu, kind, total, name } => {
                let Event::Attached { engine, .. } = event else { return Ok(()) };
                self.know(gpu, kind, total, name)?;
                let Some(entry) = self.clients.get_mut(&client) else { return Ok(()) };
                let fresh = Use { idle_since: now, mapped: 0, allowance: 0, changed: now, attached: now, limit: None };
                entry.uses.insert(gpu, fresh);
                debug!(client = client.0, slot, gpu = %gpu.0, ?engine, "attached");
                self.trace(now, client, Some(gpu), "attach", None);
                self.apply(event);
            }
            Meaning::Memory { gpu, mut report, device_free } => {
                let (total, measured) = self.gpus.get(&gpu).map_or((0, false), |gpu| (gpu.total, gpu.index.is_some()));
                // No client has more on a GPU than the GPU has: what it says decides what others get.
                report.mapped = report.mapped.min(total);
                report.pinned = report.pinned.min(report.mapped);
                self.apply(Event::Memory { client, gpu, report });
                if let Some(free) = device_free.filter(|_| !measured) {
                    let used = total.saturating_sub(free);
                    let sample = Sample { gpu, begun: now, used, processes: BTreeMap::new() };
                    self.measure(&sample, Some(client));
                }
            }
        }
        Ok(())
    }

    /// Makes sure that the machine knows a GPU which a client named.
    fn know(&mut self, gpu: GpuId, kind: GpuKind, total: u64, name: String) -> Result<(), Violation> {
        if self.gpus.contains_key(&gpu) {
            return Ok(());
        }
        if self.gpus.values().filter(|known| known.index.is_none()).count() >= MAX_UNKNOWN_GPUS {
            return Err(Violation::TooManyGpus);
        }
        let name: String = name.chars().filter(|c| !c.is_control()).collect();
        let entry = Gpu { kind, name, total, index: None, overhead: Overhead::default() };
        info!(gpu = entry.label(gpu), total, "a client knows {}", entry.name);
        self.gpus.insert(gpu, entry);
        self.apply(Event::GpuFound { gpu, total });
        // Perhaps a slice that was made just now.
        self.ask_nvml(Ask::Scan);
        Ok(())
    }

    // ---- the machine ---------------------------------------------------------------------------------------------

    pub fn tick(&mut self) {
        self.armed = None;
        self.ticked = socket::now();
        self.apply(Event::Tick);
    }

    /// Gives the machine an event and carries out what it decides.
    fn apply(&mut self, event: Event) {
        let now = socket::now();
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            self.note_event(&event, now);
            for command in self.machine.handle(now, event) {
                if let Some(answer) = self.carry_out(command, now) {
                    events.push_back(answer);
                }
            }
        }
        let deadline = self.machine.deadline().map(|at| at.max(self.ticked + MIN_TICK));
        if deadline != self.armed {
            self.timer.set(deadline);
            self.armed = deadline;
        }
    }

    /// Sends what a command says to its client. A command that asks something is answered with an event.
    fn carry_out(&mut self, command: Command, now: Time) -> Option<Event> {
        self.note_command(&command, now);
        let slot_of = |client: &ClientId, gpu: &GpuId| self.clients.get(client).and_then(|c| c.session.slot(*gpu));
        let slots_of = |client: &ClientId, gpus: &GpuSet| {
            self.clients.get(client).map(|c| c.session.slots(gpus)).filter(|slots| *slots != 0)
        };
        let (client, message) = match command {
            Command::Attached { client, gpu } => (client, SchedulerMessage::Attached { slot: slot_of(&client, &gpu)? }),
            Command::Limit { client, gpu, bytes } => {
                (client, SchedulerMessage::Limit { slot: slot_of(&client, &gpu)?, bytes })
            }
            Command::Allowance { client, gpu, seq, bytes } => {
                (client, SchedulerMessage::Allowance { slot: slot_of(&client, &gpu)?, seq, bytes })
            }
            Command::Grant { client, gpus } => (client, SchedulerMessage::Grant { gpus: slots_of(&client, &gpus)? }),
            Command::Revoke { client, gpus } => (client, SchedulerMessage::Revoke { gpus: slots_of(&client, &gpus)? }),
            Command::Contended { client, gpus, waiters, grace } => {
                let grace_us = u32::try_from(grace.as_micros()).unwrap_or(u32::MAX);
                (client, SchedulerMessage::Contended { gpus: slots_of(&client, &gpus)?, waiters, grace_us })
            }
            Command::Waiting { client, gpus, why } => {
                (client, SchedulerMessage::Waiting { gpus: slots_of(&client, &gpus)?, why })
            }
            Command::Probe { client } => {
                let entry = self.clients.get(&client)?;
                let stopped = peer::is_stopped(entry.identity.pid);
                if stopped && self.stopped.insert(client) {
                    debug!(client = client.0, pid = entry.identity.pid, "the process is stopped");
                    self.signals.stopped.notify_one();
                }
                return Some(Event::Stopped { client, stopped });
            }
            Command::Undrainable { .. } => return None,
        };
        self.send(client, message);
        None
    }

    fn send(&self, client: ClientId, message: SchedulerMessage) {
        if let Some(entry) = self.clients.get(&client) {
            entry.link.send(message);
        }
    }

    /// Looks at those that were stopped. Returns whether any still is.
    pub fn check_stopped(&mut self) -> bool {
        let running: Vec<ClientId> = self
            .stopped
            .iter()
            .filter(|client| !self.clients.get(client).is_some_and(|c| peer::is_stopped(c.identity.pid)))
            .copied()
            .collect();
        for client in running {
            self.stopped.remove(&client);
            debug!(client = client.0, "the process runs again");
            self.apply(Event::Stopped { client, stopped: false });
        }
        !self.stopped.is_empty()
    }

    // ---- what is remembered for people ---------------------------------------------------------------------------

    fn note_event(&mut self, event: &Event, now: Time) {
        match event {
            Event::Requested { client, gpus } => self.trace_all(now, *client, gpus, "request"),
            Event::Cancelled { client, gpus } => {
                self.trace_all(now, *client, gpus, "cancel");
                self.idle(*client, gpus, now);
            }
            Event::Released { client, gpus, reason, busy } => {
                debug!(client = client.0, ?gpus, ?reason, ?busy, "release");
                self.trace_all(now, *client, gpus, "release");
                self.idle(*client, gpus, now);
            }
            Event::Stuck { client, gpus, reason } => {
                debug!(client = client.0, ?gpus, ?reason, "cannot drain");
                self.trace_all(now, *client, gpus, "stuck");
            }
            Event::Detached { client, gpu } => {
                self.trace(now, *client, Some(*gpu), "detach", None);
                if let Some(entry) = self.clients.get_mut(client) {
                    entry.uses.remove(gpu);
                }
            }
            Event::Memory { client, gpu, report } => {
                let Some(usage) = self.usage(*client, *gpu) else { return };
                let before = std::mem::replace(&mut usage.mapped, report.mapped);
                if before != report.mapped {
                    usage.changed = now;
                }
                if report.mapped < before {
                    self.trace(now, *client, Some(*gpu), "freed", Some(before - report.mapped));
                } else if report.mapped > before {
                    self.trace(now, *client, Some(*gpu), "mapped", Some(report.mapped - before));
                }
            }
            _ => {}
        }
    }

    fn note_command(&mut self, command: &Command, now: Time) {
        match command {
            Command::Limit { client, gpu, bytes } => {
                if let Some(usage) = self.usage(*client, *gpu) {
                    usage.limit = Some(*bytes);
                }
            }
            Command::Allowance { client, gpu, bytes, .. } => {
                let Some(usage) = self.usage(*client, *gpu) else { return };
                let before = std::mem::replace(&mut usage.allowance, *bytes);
                usage.changed = now;
                let (what, by) = if *bytes < before { ("evict", before - bytes) } else { ("credit", bytes - before) };
                debug!(client = client.0, gpu = %gpu.0, bytes, "{what}");
                self.trace(now, *client, Some(*gpu), what, Some(by));
            }
            Command::Grant { client, gpus } => {
                debug!(client = client.0, ?gpus, "grant");
                self.trace_all(now, *client, gpus, "grant");
            }
            Command::Revoke { client, gpus } => {
                debug!(client = client.0, ?gpus, "revoke");
                self.trace_all(now, *client, gpus, "revoke");
            }
            Command::Contended { client, gpus, waiters, grace } => {
                debug!(client = client.0, ?gpus, waiters, ?grace, "contended");
            }
            Command::Undrainable { client, gpus } => {
                self.trace_all(now, *client, gpus, "undrainable");
                let Some(identity) = self.clients.get(client).map(|entry| &entry.identity) else { return };
                let Identity { pid, unit, name, .. } = &**identity;
                let gpus: Vec<String> = gpus.iter().filter_map(|id| Some(self.gpus.get(id)?.label(*id))).collect();
                warn!(
                    client = client.0,
                    pid,
                    unit,
                    gpus = gpus.join(" "),
                    "{name} cannot be drained: others run beside it"
                );
            }
            Command::Waiting { client, gpus, why } => debug!(client = client.0, ?gpus, ?why, "waits"),
            Command::Attached { .. } | Command::Probe { .. } => {}
        }
    }

    fn usage(&mut self, client: ClientId, gpu: GpuId) -> Option<&mut Use> {
        self.clients.get_mut(&client)?.uses.get_mut(&gpu)
    }

    fn idle(&mut self, client: ClientId, gpus: &GpuSet, now: Time) {
        for gpu in gpus {
            if let Some(usage) = self.usage(client, *gpu) {
                usage.idle_since = now;
            }
        }
    }

    fn trace_all(&mut self, now: Time, client: ClientId, gpus: &GpuSet, what: &str) {
        if self.trace.is_some() {
            for gpu in gpus {
                self.trace(now, client, Some(*gpu), what, None);
            }
        }
    }

    fn active(&self) {
        let now = socket::now();
        let before = self.signals.last_activity.replace(now);
        if now.saturating_sub(before) > super::SAMPLE_QUIET {
            self.signals.activity.notify_one();
        }
    }

    fn trace(&mut self, now: Time, client: ClientId, gpu: Option<GpuId>, what: &str, bytes: Option<u64>) {
        if let Some(trace) = &mut self.trace {
            let pid = self.clients.get(&client).map_or(0, |c| c.identity.pid);
            trace.write(now, client, pid, gpu, what, bytes);
        }
    }

    // ---- GPUs, as NVML sees them ---------------------------------------------------------------------------------

    pub fn gpus_found(&mut self, found: Vec<GpuDescription>) {
        for GpuDescription { gpu, kind, name, total, index } in found {
            let known = self.gpus.get_mut(&gpu);
            let changed = known.as_ref().is_none_or(|known| known.total != total);
            match known {
                Some(known) => {
                    known.total = total;
                    known.index = Some(index);
                    known.name = name;
                }
                None => {
                    let entry = Gpu { kind, name, total, index: Some(index), overhead: Overhead::default() };
                    info!(gpu = entry.label(gpu), total, "found {}", entry.name);
                    self.gpus.insert(gpu, entry);
                }
            }
            if changed {
                self.apply(Event::GpuFound { gpu, total });
            }
        }
    }

    /// What NVML says is in use.
    pub fn sample(&mut self, sample: &Sample) {
        self.measure(sample, None);
    }

    /// What is in use, as NVML says or that client, whose own report is of the same moment.
    fn measure(&mut self, sample: &Sample, by: Option<ClientId>) {
        let gpu = sample.gpu;
        let mut attached = Vec::new();
        for view in self.machine.clients() {
            let Some(seat) = view.seats.iter().find(|seat| seat.gpu == gpu) else { continue };
            let Some(client) = self.clients.get(&view.client) else { continue };
            let changed = client.uses.get(&gpu).map_or(Time::ZERO, |usage| usage.changed);
            attached.push(Attached {
                client: view.client,
                pid: client.identity.pid.try_into().unwrap_or(0),
                is_new: client.uses.get(&gpu).is_none_or(|usage| sample.begun < usage.attached + CONTEXT_APPEARS),
                mapped: seat.mapped,
                at_rest: by == Some(view.client) || (changed + AT_REST <= sample.begun && !is_moving(seat)),
            });
        }
        let context = self.config.settings.context;
        let Some(entry) = self.gpus.get_mut(&gpu) else { return };
        let before = entry.overhead.told();
        let settled = sample.begun >= self.started + RETURN;
        self.departed.retain(|_, left| sample.begun < *left + LEAVING);
        let departed = &self.departed;
        if let Some(bytes) =
            entry.overhead.sample(sample, &attached, context, |pid| !settled || departed.contains_key(&pid))
        {
            if before != Some(bytes) {
                debug!(gpu = %gpu.0, bytes, "used by others than clients");
            }
            // Also when it is what it was: the machine waits for a measurement that knows a new context.
            self.apply(Event::GpuOverhead { gpu, bytes });
        }
    }

    // ---- settings ------------------------------------------------------------------------------------------------

    /// Puts a configuration into effect.
    pub fn configure(&mut self, config: Config) {
        self.config = config;
        let settings = self.config.settings.clone();
        if *self.settings.borrow() != settings {
            info!(
                time_quantum = settings.time_quantum.as_secs(),
                anti_thrash = bus::anti_thrash_name(settings.anti_thrash),
                "settings changed"
            );
            self.apply(Event::Configure(settings.clone()));
            self.settings.send_replace(settings);
        }
    }

    // ---- what people see -----------------------------------------------------------------------------------------

    pub fn list_clients(&self) -> Vec<ClientView> {
        let now = socket::now();
        let since = self.since();
        let view = |seen: scheduler::ClientView| {
            let client = self.clients.get(&seen.client)?;
            let uses = seen.seats.iter().map(|seat| {
                let usage = client.uses.get(&seat.gpu);
                let since = since.get(&(seen.client, seat.gpu)).copied();
                let since = since.or(usage.map(|usage| usage.idle_since)).unwrap_or(now);
                bus::GpuUse {
                    uuid: self.gpus.get(&seat.gpu).map_or_else(String::new, |entry| entry.label(seat.gpu)),
                    state: bus::state_name(seat.state, seat.attached).into(),
                    since: now.saturating_sub(since).as_secs_f64(),
                    engine: bus::engine_name(seat.engine).into(),
                    demand: seat.demand,
                    resident: seat.mapped,
                    swapped: seat.swapped,
                    pinned: seat.pinned,
                    allowance: seat.allowance,
                    limit: usage.and_then(|usage| usage.limit),
                    lock_time: seat.lock_time.as_secs_f64(),
                    wait_time: seat.wait_time.as_secs_f64(),
                    grants: seat.grants,
                }
            });
            Some(ClientView {
                id: seen.client,
                identity: client.identity.clone(),
                library: client.library.clone(),
                connected: client.connected,
                stopped: seen.stopped,
                uses: uses.collect(),
            })
        };
        self.machine.clients().into_iter().filter_map(view).collect()
    }

    /// Since when each holder holds and each waiter waits.
    fn since(&self) -> HashMap<(ClientId, GpuId), Time> {
        let mut since = HashMap::new();
        for gpu in self.machine.gpus() {
            since.extend(gpu.holders.iter().map(|holder| ((holder.client, gpu.gpu), holder.since)));
            since.extend(gpu.waiters.iter().map(|waiter| ((waiter.client, gpu.gpu), waiter.since)));
        }
        since
    }

    pub fn list_gpus(&self) -> Vec<bus::Gpu> {
        let seats: Vec<SeatView> = self.machine.clients().into_iter().flat_map(|client| client.seats).collect();
        let view = |seen: scheduler::GpuView| {
            let entry = self.gpus.get(&seen.gpu)?;
            let seats = || seats.iter().filter(|seat| seat.gpu == seen.gpu);
            Some(bus::Gpu {
                uuid: entry.label(seen.gpu),
                kind: bus::kind_name(entry.kind).into(),
                name: entry.name.clone(),
                index: entry.index,
                total: entry.total,
                capacity: seen.capacity,
                overhead: entry.overhead.told(),
                demand: seats().map(|seat| seat.demand).sum(),
                resident: seats().map(|seat| seat.mapped).sum(),
                swapped: seats().map(|seat| seat.swapped).sum(),
                clients: seats().count() as u32,
                holders: seen.holders.iter().map(|holder| holder.client.0).collect(),
                queue: seen.waiters.iter().map(|waiter| waiter.client.0).collect(),
            })
        };
        self.machine.gpus().into_iter().filter_map(view).collect()
    }

    /// Tells every client that the daemon stops, by hanging up.
    pub fn stop(&mut self) {
        for client in self.clients.values() {
            client.link.close();
        }
    }
}

/// How long a client's report must have stood for its memory to count as at rest.
const AT_REST: Duration = Duration::from_millis(50);

/// Programs that ran under an earlier scheduler are back within this time; until then nobody is taken for a stranger.
const RETURN: Duration = Duration::from_secs(1);

/// A process that ends closes its connection first and frees its memory later; after this time it is a stranger.
const LEAVING: Duration = Duration::from_secs(5);

/// For how long after a client attached its context may not exist yet; the machine puts room aside for so long.
const CONTEXT_APPEARS: Duration = Duration::from_millis(500);

/// Whether its memory is on the way in or out, so that what it reports is not what the GPU shows. A client maps as much
/// as it needs and may, holder or not.
fn is_moving(seat: &SeatView) -> bool {
    let evicting = seat.mapped > seat.allowance.max(seat.pinned);
    let filling = seat.mapped < seat.demand.min(seat.allowance);
    evicting || filling
}

/// What the D-Bus object is told of a client; it leaves out what its caller may not see.
#[derive(Debug, Clone)]
pub struct ClientView {
    pub id: ClientId,
    pub identity: Arc<Identity>,
    pub library: String,
    pub connected: SystemTime,
    pub stopped: bool,
    pub uses: Vec<bus::GpuUse>,
}
