//! The scheduling loop's state: the machine, everybody it decides about, and the carrying out of its commands. All of
//! it belongs to one thread; a message that comes in has been answered, to everybody concerned, when its call returns.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fs::{OpenOptions, Permissions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nvshare_wire::client::{EngineReason, GpuKind, Sharing, StuckReason};
use nvshare_wire::{ClientMessage, MAX_DESCRIPTORS, SchedulerMessage, SlotSet, version};
use tokio::sync::{Notify, watch};
use tracing::{debug, info, warn};

use super::bus::Holders;
use super::clients::Link;
use super::complaints::Complaints;
use super::config::Config;
use super::gpus::{Ask, GpuDescription, Sample};
use super::host::{HostMemory, MemInfo};
use super::lock::Wanted;
use super::overhead::{Attached, Overhead};
use super::peer::{self, Identity};
use super::resume::Name;
use super::session::{Meaning, Session, Violation};
use super::shared::{Book, Import};
use super::socket::{self, Timer};
use super::systemd;
use super::trace::Trace;
use crate::bus;
use crate::scheduler::{
    self, ClientId, Command, Event, GpuId, GpuSet, Machine, MemoryReport, SeatView, Settings, Time, UserId,
};
use crate::units;

/// GPUs that NVML does not know are believed to a client, up to this many: more is a client that makes them up.
const MAX_UNKNOWN_GPUS: usize = 128;

/// The machine asks for no tick sooner than this after one, so that a mistake in it cannot take a whole CPU.
const MIN_TICK: Duration = Duration::from_micros(100);

pub struct Hub {
    pub config: Config,
    machine: Machine,
    clients: BTreeMap<ClientId, Client>,
    gpus: BTreeMap<GpuId, Gpu>,
    shared: Book,
    /// Where clients connect, if that is known.
    directory: Option<PathBuf>,
    next_client: u64,
    timer: Rc<Timer>,
    armed: Option<Time>,
    /// When the machine was last given a tick.
    ticked: Time,
    started: Time,
    host: HostMemory,
    /// Processes whose connection has closed, and when: what they had on a GPU is still there for a moment.
    departed: BTreeMap<u32, Time>,
    stopped: BTreeSet<ClientId>,
    complaints: Complaints,
    trace: Option<Trace>,
    nvml: Option<std::sync::mpsc::Sender<Ask>>,
    /// The log has said that clients are believed.
    believed: bool,
    settings: watch::Sender<Settings>,
    pub signals: Rc<Signals>,
}

/// What wakes the loop's background tasks.
#[derive(Debug, Default)]
pub struct Signals {
    /// A client is stopped, and has to be looked at until it runs again.
    pub stopped: Notify,
    /// Clients came or went, or locks moved.
    pub turns: Notify,
    /// The same, for those who follow it on D-Bus.
    pub holders: Notify,
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
    /// What systemd knows its connection by, if that outlives this daemon.
    kept: Option<Name>,
    /// It can be.
    lasts: bool,
}

/// A client that is let in.
pub struct Arrival {
    pub link: Rc<Link>,
    pub identity: Arc<Identity>,
    pub version: u16,
    pub gang: u64,
    pub library: String,
    /// Its connection can outlive this daemon.
    pub lasts: bool,
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
    /// Its own newest report.
    report: Option<MemoryReport>,
    /// Bytes of host memory that it holds.
    host: u64,
    /// When the log last said that it was refused memory.
    refused: Option<Time>,
    /// When the log last said that its memory stays.
    stayed: Option<Time>,
    /// It gives the GPU work by a way that passes no gate.
    unseen: bool,
    /// Why it has its engine.
    reason: EngineReason,
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
            shared: Book::new(socket::now()),
            directory: None,
            next_client: 1,
            timer: Rc::new(Timer::new()?),
            armed: None,
            ticked: Time::ZERO,
            started: socket::now(),
            host: HostMemory::default(),
            departed: BTreeMap::new(),
            stopped: BTreeSet::new(),
            complaints: Complaints::default(),
            trace,
            nvml: None,
            believed: false,
            settings,
            signals: Rc::default(),
        })
    }

    pub fn timer(&self) -> Rc<Timer> {
        self.timer.clone()
    }

    /// Has the files made there that clients need once there is no daemon.
    pub fn provide_in(&mut self, directory: &Path) {
        self.directory = Some(directory.to_owned());
    }

    /// The lock files by which clients take turns without a daemon. Where they cannot be made, clients find another place.
    fn provide(&self, gpu: GpuId) {
        let Some(directory) = &self.directory else { return };
        for what in ["turn", "lack", "here"] {
            let path = directory.join(format!("nvshare-{}.{what}", gpu.0));
            let file =
                OpenOptions::new().write(true).create(true).truncate(false).custom_flags(libc::O_NOFOLLOW).open(&path);
            // They are locked by who reads them, whatever our umask is.
            if let Err(e) = file.and_then(|file| file.set_permissions(Permissions::from_mode(0o644))) {
                debug!("cannot make {}: {e}", path.display());
            }
        }
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
    pub fn connect(&mut self, arrival: Arrival) -> ClientId {
        let client = ClientId(self.next_client);
        self.next_client += 1;
        let (version, gang, user) = (arrival.version, arrival.gang, UserId(arrival.identity.uid));
        let Identity { pid, uid, unit, name, .. } = &*arrival.identity.clone();
        if self.complaints.may("connected", *uid) {
            let library = printable(&arrival.library);
            info!(name: "client-connected", client = client.0, pid, uid, unit, library, "{name} connected");
        }
        self.enter(client, arrival, "connect");
        self.send(client, SchedulerMessage::Welcome { version, client: client.0 });
        self.keep(client);
        self.apply(Event::Connected { client, gang, user });
        client
    }

    /// Lets a client in that an earlier daemon had let in, with the id that it had.
    pub fn resume(&mut self, client: ClientId, arrival: Arrival, name: Name) {
        let (gang, user) = (arrival.gang, UserId(arrival.identity.uid));
        let Identity { pid, uid, unit, name: called, .. } = &*arrival.identity.clone();
        if self.complaints.may("connected", *uid) {
            let library = printable(&arrival.library);
            info!(name: "client-resumed", client = client.0, pid, uid, unit, library, "{called} goes on");
        }
        self.enter(client, arrival, "resume");
        if let Some(entry) = self.clients.get_mut(&client) {
            entry.kept = Some(name);
        }
        self.apply(Event::Connected { client, gang, user });
    }

    /// Gives that id to nobody else.
    pub fn reserve_id(&mut self, client: ClientId) {
        self.next_client = self.next_client.max(client.0.saturating_add(1));
    }

    fn enter(&mut self, client: ClientId, arrival: Arrival, traced: &str) {
        let Arrival { link, identity, version, gang: _, library, lasts } = arrival;
        let library = printable(&library);
        let session = Session::new(client, version);
        let uses = BTreeMap::new();
        let entry = Client { link, session, identity, library, connected: SystemTime::now(), uses, kept: None, lasts };
        self.clients.insert(client, entry);
        self.signals.clients.set(self.clients.len());
        self.active();
        self.trace(socket::now(), client, None, traced, None);
    }

    /// Has a connection outlive this daemon, where the client knows what to do then, and systemd is there to keep it.
    fn keep(&mut self, client: ClientId) {
        let Some(entry) = self.clients.get_mut(&client) else { return };
        let version = entry.session.version;
        if !self.config.keep_connections || version < version::RESUMING || entry.kept.is_some() || !entry.lasts {
            return;
        }
        let began = peer::began(entry.identity.pid).unwrap_or(0);
        let name = Name { version, client: client.0, began };
        if systemd::keep(&name.to_string(), entry.link.socket()) {
            entry.kept = Some(name);
        }
    }

    /// Has connections outlive this daemon, or not, as the configuration says now.
    fn keep_as_configured(&mut self) {
        let clients: Vec<ClientId> = self.clients.keys().copied().collect();
        for client in clients {
            if self.config.keep_connections {
                self.keep(client);
            } else if let Some(name) = self.clients.get_mut(&client).and_then(|entry| entry.kept.take()) {
                systemd::forget(&name.to_string());
            }
        }
    }

    /// What a client has had the lock of since an earlier daemon.
    pub fn held(&mut self, client: ClientId, slots: SlotSet) {
        let Some(entry) = self.clients.get(&client) else { return };
        let gpus = entry.session.known(slots);
        if !gpus.is_empty() {
            self.trace_all(socket::now(), client, &gpus, "held");
            self.apply(Event::Held { client, gpus });
        }
    }

    /// The client is gone, for whatever reason.
    pub fn disconnect(&mut self, client: ClientId, why: &str) {
        let now = socket::now();
        self.trace(now, client, None, "disconnect", None);
        let Some(gone) = self.clients.remove(&client) else { return };
        if let Some(name) = gone.kept {
            // Else systemd would keep a connection to nobody.
            systemd::forget(&name.to_string());
        }
        let Identity { pid, uid, unit, name, .. } = &*gone.identity;
        let identity = &gone.identity;
        if self.complaints.may("gone", *uid) {
            info!(name: "client-gone", client = client.0, pid, uid, unit, "{name} {why}");
        }
        self.departed.insert(identity.pid.try_into().unwrap_or(0), now);
        self.stopped.remove(&client);
        self.signals.clients.set(self.clients.len());
        self.active();
        // Before its bytes are free: what others have open of them is not.
        let (adopters, unanswered) = self.shared.leave(client);
        self.have_adopted(adopters);
        for (importer, ticket) in unanswered.into_iter().filter_map(|question| question.importer) {
            self.answer(importer, ticket, Sharing::Unknown);
        }
        self.apply(Event::Disconnected { client });
    }

    /// One packet of a client, and the descriptors that came with it.
    pub fn receive(&mut self, client: ClientId, packet: &[u8], descriptors: Vec<OwnedFd>) -> Result<(), Violation> {
        let now = socket::now();
        let Some(entry) = self.clients.get_mut(&client) else { return Ok(()) };
        let meaning = entry.session.receive(packet)?;
        self.active();
        match meaning {
            Meaning::Event(event) => {
                if let Event::Wished { .. } = event {
                    self.sample_host(); // what is decided now is decided by what there is now
                }
                self.apply(event);
            }
            Meaning::Attach { event, slot, gpu, kind, total, name, reason } => {
                let Event::Attached { engine, .. } = event else { return Ok(()) };
                self.know(gpu, kind, total, name)?;
                let Some(entry) = self.clients.get_mut(&client) else { return Ok(()) };
                let fresh = Use {
                    idle_since: now,
                    mapped: 0,
                    allowance: 0,
                    changed: now,
                    attached: now,
                    limit: None,
                    report: None,
                    host: 0,
                    refused: None,
                    stayed: None,
                    unseen: false,
                    reason,
                };
                entry.uses.insert(gpu, fresh);
                debug!(client = client.0, slot, gpu = %gpu.0, ?engine, "attached");
                self.trace(now, client, Some(gpu), "attach", None);
                self.apply(event);
            }
            Meaning::Memory { gpu, mut report, device_free, host } => {
                if let Some(usage) = self.usage(client, gpu) {
                    usage.host = host;
                }
                let (total, measured) = self.gpus.get(&gpu).map_or((0, false), |gpu| (gpu.total, gpu.index.is_some()));
                // No client has more on a GPU than the GPU has: what it says decides what others get.
                report.mapped = report.mapped.min(total);
                report.pinned = report.pinned.min(report.mapped);
                if let Some(usage) = self.usage(client, gpu) {
                    usage.report = Some(report);
                }
                self.shared.reported(client, gpu);
                self.report(client, gpu);
                if let Some(free) = device_free.filter(|_| !measured) {
                    let used = total.saturating_sub(free);
                    let sample = Sample { gpu, begun: now, steady: true, used, processes: BTreeMap::new() };
                    self.measure(&sample, Some(client));
                }
            }
            Meaning::Shared { message, gpu } => self.share(client, message, gpu, &descriptors, now),
        }
        let overdue = self.shared.overdue(client, now);
        self.have_adopted(overdue);
        Ok(())
    }

    /// Tells the machine what a client has on a GPU: what it reported, and what counts with it besides.
    fn report(&mut self, client: ClientId, gpu: GpuId) {
        let extra = self.shared.extra(client, gpu);
        let total = self.gpus.get(&gpu).map_or(0, |gpu| gpu.total);
        let Some(mut report) = self.usage(client, gpu).and_then(|usage| usage.report) else { return };
        for bytes in [&mut report.mapped, &mut report.pinned] {
            *bytes = bytes.saturating_add(extra).min(total);
        }
        report.demand = report.demand.saturating_add(extra);
        self.apply(Event::Memory { client, gpu, report });
    }

    // ---- memory that one program lets another use ------------------------------------------------------------------

    fn share(
        &mut self,
        client: ClientId,
        message: ClientMessage,
        gpu: Option<GpuId>,
        descriptors: &[OwnedFd],
        now: Time,
    ) {
        match message {
            ClientMessage::Exporter { key } => {
                let importers = self.shared.announce(client, key);
                importers.into_iter().for_each(|importer| self.report_all(importer));
            }
            ClientMessage::Open { ticket, exporter, secret, range, allocation, first } => {
                let clients = &self.clients;
                let may = |other| {
                    let [a, b] = [client, other].map(|id| clients.get(&id).map(|c| &*c.identity));
                    a.zip(b).is_some_and(|(a, b)| a.may_share_with(b))
                };
                match self.shared.ask(client, ticket, (exporter, range), may) {
                    Ok((exporter, ticket)) => {
                        self.send(exporter, SchedulerMessage::Export { ticket, secret, range, allocation, first });
                    }
                    // It may be on its way back from an earlier daemon.
                    Err(Sharing::Unknown) if now < self.started + LATE_RETURN => {
                        self.answer(client, ticket, Sharing::Busy);
                    }
                    Err(outcome) => self.answer(client, ticket, outcome),
                }
            }
            ClientMessage::Exported { ticket, outcome, slot: _, bytes, chunk } => {
                let Some(question) = self.shared.answer(client, ticket) else { return };
                let Some((importer, ticket)) = question.importer else { return };
                let (Sharing::Done, Some(gpu), 1..=MAX_DESCRIPTORS) = (outcome, gpu, descriptors.len()) else {
                    let outcome = if outcome == Sharing::Done { Sharing::Failed } else { outcome };
                    return self.answer(importer, ticket, outcome);
                };
                let Some(link) = self.clients.get(&importer).map(|entry| entry.link.clone()) else { return };
                let total = self.gpus.get(&gpu).map_or(0, |gpu| gpu.total);
                // First, so that what it has open is never uncounted.
                self.shared.pass(&question, gpu, bytes.min(total));
                if link.send_with(SchedulerMessage::Opened { ticket, outcome, bytes, chunk }, descriptors).is_err() {
                    self.answer(importer, ticket, Sharing::Failed);
                }
            }
            ClientMessage::Withdrawn { range } => {
                let adopter = self.shared.withdraw(client, range);
                self.have_adopted(adopter);
            }
            ClientMessage::Imported { slot: _, exporter, range, bytes, adopted } => {
                let Some(gpu) = gpu else { return };
                let total = self.gpus.get(&gpu).map_or(0, |gpu| gpu.total);
                let import = Import { importer: client, exporter, range };
                self.shared.claim(import, gpu, bytes.min(total), adopted != 0, now);
                self.report(client, gpu);
            }
            ClientMessage::Adopted { exporter, range } => {
                self.shared.adopted(Import { importer: client, exporter, range });
            }
            ClientMessage::Closed { exporter, range } => {
                let adopter = self.shared.close(Import { importer: client, exporter, range });
                self.have_adopted(adopter);
                self.report_all(client);
            }
            _ => {}
        }
    }

    fn answer(&self, importer: ClientId, ticket: u32, outcome: Sharing) {
        self.send(importer, SchedulerMessage::Opened { ticket, outcome, bytes: 0, chunk: 0 });
    }

    /// Has importers count what nobody else counts any more.
    fn have_adopted(&mut self, imports: impl IntoIterator<Item = Import>) {
        for Import { importer, exporter, range } in imports {
            self.report_all(importer);
            self.send(importer, SchedulerMessage::Adopt { exporter, range });
        }
    }

    fn report_all(&mut self, client: ClientId) {
        let gpus: Vec<GpuId> = self.clients.get(&client).map_or_else(Vec::new, |c| c.uses.keys().copied().collect());
        for gpu in gpus {
            self.report(client, gpu);
        }
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
        info!(name: "gpu-found", gpu = entry.label(gpu), bytes = total, "a client knows {}", entry.name);
        self.provide(gpu);
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
            Command::Limit { client, gpu, bytes, seq, most, spare } => {
                (client, SchedulerMessage::Limit { slot: slot_of(&client, &gpu)?, bytes, seq, most, spare })
            }
            Command::Room { client, gpu, bytes } => {
                (client, SchedulerMessage::Room { slot: slot_of(&client, &gpu)?, bytes })
            }
            Command::Denied { client, gpu, bytes } => {
                (client, SchedulerMessage::Denied { slot: slot_of(&client, &gpu)?, bytes })
            }
            Command::Prepare { client, gpu, bytes } => {
                if self.clients.get(&client)?.session.version < version::PROMISES {
                    return None;
                }
                (client, SchedulerMessage::Prepare { slot: slot_of(&client, &gpu)?, bytes })
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
            Command::Measure { gpu } => return self.measure_anew(gpu, now),
            Command::Undrainable { .. } | Command::Stays { .. } => return None,
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
        use Event::{Connected, Disconnected, Held, Released, Requested};
        if let Connected { .. } | Disconnected { .. } | Held { .. } | Released { .. } | Requested { .. } = event {
            self.signals.turns.notify_one();
            self.signals.holders.notify_one();
        }
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
            Event::Stuck { client, gpus, reason: StuckReason::Unseen } => {
                self.trace_all(now, *client, gpus, "unseen");
                let mut is_new = false;
                for gpu in gpus {
                    if let Some(usage) = self.usage(*client, *gpu) {
                        is_new |= !std::mem::replace(&mut usage.unseen, true);
                    }
                }
                let entry = self.clients.get(client).filter(|_| is_new);
                let Some(Identity { pid, uid, unit, name, .. }) = entry.map(|c| &*c.identity) else { return };
                info!(
                    name: "work-unseen",
                    client = client.0,
                    pid,
                    uid,
                    unit,
                    gpu = self.labels(gpus),
                    "{name} gives the GPU work that nvshare does not see: its memory stays there"
                );
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
            Command::Room { client, gpu, bytes } => {
                debug!(client = client.0, gpu = %gpu.0, bytes, "room");
                self.trace(now, *client, Some(*gpu), "room", Some(*bytes));
            }
            Command::Prepare { client, gpu, bytes } => debug!(client = client.0, gpu = %gpu.0, bytes, "prepare"),
            Command::Denied { client, gpu, bytes } => self.note_refusal(*client, *gpu, *bytes, now),
            Command::Limit { client, gpu, bytes, .. } => {
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
                self.signals.holders.notify_one();
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
                let Identity { pid, uid, unit, name, .. } = &**identity;
                warn!(
                    name: "undrainable",
                    client = client.0,
                    pid,
                    uid,
                    unit,
                    gpu = self.labels(gpus),
                    "{name} cannot be drained: others run beside it"
                );
            }
            Command::Stays { client, gpu, why } => {
                self.trace(now, *client, Some(*gpu), "stays", None);
                let label = self.gpus.get(gpu).map(|entry| entry.label(*gpu));
                let Some(usage) = self.usage(*client, *gpu) else { return };
                if usage.stayed.is_some_and(|at| now < at + REFUSAL_PAUSE) {
                    return;
                }
                usage.stayed = Some(now);
                let Some(Identity { pid, uid, unit, name, .. }) = self.clients.get(client).map(|c| &*c.identity) else {
                    return;
                };
                warn!(
                    name: "memory-stays",
                    client = client.0,
                    pid,
                    uid,
                    unit,
                    gpu = label,
                    "the memory of {name} stays on the GPU: {}; others make room",
                    bus::stay_name(*why)
                );
            }
            Command::Waiting { client, gpus, why } => debug!(client = client.0, ?gpus, ?why, "waits"),
            Command::Attached { .. } | Command::Probe { .. } | Command::Measure { .. } => {}
        }
    }

    /// Says who has what somebody else could not get.
    fn note_refusal(&mut self, client: ClientId, gpu: GpuId, bytes: u64, now: Time) {
        debug!(client = client.0, gpu = %gpu.0, bytes, "denied");
        let Some(usage) = self.usage(client, gpu) else { return };
        if usage.refused.is_some_and(|at| now < at + REFUSAL_PAUSE) {
            return;
        }
        usage.refused = Some(now);
        let mut holders: Vec<(u64, ClientId)> = Vec::new();
        for view in self.machine.clients() {
            let demand = view.seats.iter().filter(|seat| seat.gpu == gpu).map(|seat| seat.demand).sum();
            holders.push((demand, view.client));
        }
        holders.sort_unstable_by(|a, b| b.cmp(a));
        let named = holders.iter().filter(|(demand, _)| *demand > 0).take(MOST_NAMED);
        let named: Vec<String> = named
            .filter_map(|(demand, client)| {
                let identity = &self.clients.get(client)?.identity;
                Some(format!("{} (pid {}) {}", identity.name, identity.pid, units::size(*demand)))
            })
            .collect();
        let Some(entry) = self.clients.get(&client) else { return };
        let Identity { pid, uid, unit, name, .. } = &*entry.identity;
        let capacity = self.machine.gpu(gpu).map_or(0, |view| view.capacity);
        let (host, promised) = self.machine.host();
        let host = host.unwrap_or(0);
        warn!(
            name: "memory-refused",
            client = client.0,
            pid,
            uid,
            unit,
            gpu = self.gpus.get(&gpu).map(|entry| entry.label(gpu)),
            bytes,
            capacity,
            host,
            host_promised = promised,
            "{name} is refused memory: it wants {} in all, and what does not fit on the GPU ({}) has no place in host \
             memory ({}); most is held by {}: end one of them, or raise max in [swap]",
            units::size(bytes),
            units::size(capacity),
            units::size(host),
            if named.is_empty() { "nobody".into() } else { named.join(", ") }
        );
    }

    /// The GPU of that UUID or number; of none, the only one there is.
    pub fn find_gpu(&self, name: &str) -> Result<Wanted, String> {
        let known = || self.gpus.iter().map(|(id, gpu)| gpu.label(*id)).collect::<Vec<_>>().join(", ");
        let is_meant = |(id, gpu): &(&GpuId, &Gpu)| {
            gpu.label(**id).eq_ignore_ascii_case(name) || gpu.index.is_some_and(|index| index.to_string() == name)
        };
        let found = match name {
            "" if self.gpus.len() == 1 => self.gpus.iter().next(),
            "" if self.gpus.is_empty() => return Err("there is no GPU here that the scheduler knows".into()),
            "" => return Err(format!("there are several GPUs: say which of {}", known())),
            _ => self.gpus.iter().find(is_meant),
        };
        let (id, gpu) = found.ok_or_else(|| format!("there is no GPU {name:?}: there are {}", known()))?;
        Ok(Wanted { uuid: id.0, kind: gpu.kind, total: gpu.total })
    }

    /// GPUs as people know them.
    fn labels(&self, gpus: &GpuSet) -> String {
        let labels: Vec<String> = gpus.iter().filter_map(|id| Some(self.gpus.get(id)?.label(*id))).collect();
        labels.join(" ")
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
                    info!(name: "gpu-found", gpu = entry.label(gpu), bytes = total, "found {}", entry.name);
                    self.provide(gpu);
                    self.gpus.insert(gpu, entry);
                }
            }
            if changed {
                self.apply(Event::GpuFound { gpu, total });
            }
        }
    }

    /// Looks how much memory the host has.
    pub fn sample_host(&mut self) {
        let Some(info) = MemInfo::read() else { return };
        let held = self.clients.values().flat_map(|c| c.uses.values()).fold(0u64, |sum, u| sum.saturating_add(u.host));
        if let Some(bytes) = self.host.sample(socket::now(), info, held, self.config.swap_max) {
            debug!(bytes, held, "host memory for what is swapped out");
            self.apply(Event::HostMemory { bytes });
        }
    }

    /// What NVML says is in use.
    pub fn sample(&mut self, sample: &Sample) {
        self.measure(sample, None);
    }

    /// What is in use, as NVML says or that client, whose own report is of the same moment.
    fn measure(&mut self, sample: &Sample, by: Option<ClientId>) {
        let gpu = sample.gpu;
        let total = self.gpus.get(&gpu).map_or(0, |entry| entry.total);
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
                at_rest: by == Some(view.client)
                    || (changed + AT_REST <= sample.begun && !is_moving(seat) && seat.doubted <= total / CONTEXT_PART),
            });
        }
        let context = self.config.settings.context;
        let Some(entry) = self.gpus.get_mut(&gpu) else { return };
        let before = entry.overhead.told();
        let is_measured = entry.index.is_some();
        let settled = sample.begun >= self.started + RETURN;
        self.departed.retain(|_, left| sample.begun < *left + LEAVING);
        let departed = &self.departed;
        let fellow = |pid| !settled || departed.contains_key(&pid);
        let told = sample.steady.then(|| entry.overhead.sample(sample, &attached, context, fellow)).flatten();
        // By the contexts as they are now known: what is one of them is not in doubt.
        let context = context.min(total / CONTEXT_PART);
        let present = entry.overhead.present(sample, &attached, context).filter(|_| is_measured);
        if let Some(bytes) = told {
            if before != Some(bytes) {
                debug!(gpu = %gpu.0, bytes, "used by others than clients");
            }
            // Also when it is what it was: the machine waits for a measurement that knows a new context.
            self.apply(Event::GpuOverhead { gpu, bytes });
        }
        if let Some(bytes) = present {
            self.apply(Event::Present { gpu, begun: sample.begun, bytes });
        }
    }

    /// What is on a GPU is in doubt, and somebody waits for it. Where nothing can be measured, clients are believed.
    fn measure_anew(&mut self, gpu: GpuId, now: Time) -> Option<Event> {
        let measured = self.nvml.is_some() && self.gpus.get(&gpu).is_some_and(|entry| entry.index.is_some());
        if measured {
            self.ask_nvml(Ask::Sample);
            return None;
        }
        if !std::mem::replace(&mut self.believed, true) {
            info!("without NVML, programs are believed what memory they have freed, also where another user gets it");
        }
        Some(Event::Present { gpu, begun: now, bytes: BTreeMap::new() })
    }

    // ---- settings ------------------------------------------------------------------------------------------------

    /// Puts a configuration into effect.
    pub fn configure(&mut self, config: Config) {
        let kept = std::mem::replace(&mut self.config, config).keep_connections;
        if kept != self.config.keep_connections {
            self.keep_as_configured();
        }
        let settings = self.config.settings.clone();
        if *self.settings.borrow() != settings {
            info!(
                name: "settings-changed",
                time_quantum = settings.time_quantum.as_secs(),
                max_wait = settings.max_wait.as_secs(),
                anti_thrash = bus::anti_thrash_name(settings.anti_thrash),
                "settings changed"
            );
            self.apply(Event::Configure(settings.clone()));
            self.settings.send_replace(settings);
        }
        self.sample_host();
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
                    engine_reason: bus::engine_reason(usage.map_or(EngineReason::Unsaid, |usage| usage.reason)).into(),
                    demand: seat.demand,
                    resident: seat.mapped,
                    swapped: seat.swapped,
                    pinned: seat.pinned,
                    allowance: seat.allowance,
                    limit: usage.and_then(|usage| usage.limit),
                    unseen: usage.is_some_and(|usage| usage.unseen),
                    stays: seat.stays.map_or("", bus::stay_name).into(),
                    fullness: seat.fullness,
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

    /// Who holds the lock of each GPU.
    pub fn holders(&self) -> Holders {
        let gpus = self.machine.gpus().into_iter();
        let view = |seen: scheduler::GpuView| {
            let label = self.gpus.get(&seen.gpu)?.label(seen.gpu);
            Some((label, seen.holders.iter().map(|holder| holder.client.0).collect()))
        };
        gpus.filter_map(view).collect()
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

    /// Tells every client that the daemon stops, by hanging up. Those whose connection is kept hear of it from systemd,
    /// if there is to be no other daemon.
    pub fn stop(&mut self) {
        for client in self.clients.values().filter(|client| client.kept.is_none()) {
            client.link.close();
        }
    }
}

/// What a program says of itself, for people to read.
pub fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// A client that is refused memory over and over is in the log so often, and those that hold most are named.
const REFUSAL_PAUSE: Duration = Duration::from_secs(10);
const MOST_NAMED: usize = 5;

/// How long a client's report must have stood for its memory to count as at rest.
const AT_REST: Duration = Duration::from_millis(50);

/// Programs that ran under an earlier scheduler are back within this time; until then nobody is taken for a stranger.
const RETURN: Duration = Duration::from_secs(1);
/// And within this time even if they lost two schedulers in a row: such a one waits 2 s before it tries again.
const LATE_RETURN: Duration = Duration::from_secs(3);

/// A process that ends closes its connection first and frees its memory later; after this time it is a stranger.
const LEAVING: Duration = Duration::from_secs(5);

/// For how long after a client attached its context may not exist yet; the machine puts room aside for so long.
const CONTEXT_APPEARS: Duration = Duration::from_millis(500);

/// What a process has beyond what it says is taken for its context up to this part of a GPU.
const CONTEXT_PART: u64 = 16;

/// Memory moves in chunks of up to so many bytes: a client maps nothing for an allowance that is too small for its next one.
const CHUNK: u64 = 64 << 20;

/// Whether its memory is on the way in or out, so that what it reports is not what the GPU shows. A client maps as much
/// as it needs and may, holder or not.
fn is_moving(seat: &SeatView) -> bool {
    let evicting = seat.mapped > seat.allowance.max(seat.pinned);
    let (may, lacking) = (seat.allowance.saturating_sub(seat.mapped), seat.demand.saturating_sub(seat.mapped));
    evicting || (lacking > 0 && may >= CHUNK.min(lacking))
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
