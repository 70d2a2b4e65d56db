//! Handles clients that connect, send messages and disconnect.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::time::{Duration, SystemTime};

use nvshare_wire::client::{GpuKind, Sharing};
use nvshare_wire::scheduler::Refusal;
use nvshare_wire::{SchedulerMessage, SlotSet, Text};
use tracing::{debug, info, warn};
use zbus::fdo;

use super::bundle;
use super::event_log::Logged;
use super::measure::EXIT_TIME;
use super::state::{Adoptions, Arrival, Client, ClientGpuStats, Core, Gang, Gpu};
use super::swap_files::FileUse;
use crate::config::rules::EnvLimits;
use crate::daemon::gpu::accounting::{Accounting, History};
use crate::daemon::gpu::device_files;
use crate::daemon::gpu::nvml::{Query, Sample};
use crate::daemon::metrics::snapshot::Workload;
use crate::daemon::systemd;
use crate::daemon::systemd::fd_store::{ConnectionName, Kind, LOCK_RECORD};
use crate::daemon::tenants::What;
use crate::daemon::transport::peer;
use crate::daemon::transport::session::{ClientAction, Session, Violation};
use crate::identity::{Identity, Pod, printable};
use crate::scheduler::{ClientId, Engine, Event, GpuId, TenantId};
use crate::sys::clock;
use crate::sys::device_file::DeviceFile;
use crate::sys::foreign::Foreign;

/// If `departed` has this many entries at a disconnect, entries older than [`EXIT_TIME`] are dropped.
const MAX_DEPARTED: usize = 1024;
/// Maximum number of ended clients whose names are kept for timelines and bundles.
const MAX_ENDED: usize = 1024;
/// Maximum number of device files that are remembered for each client.
pub const MAX_DEVICES: usize = 64;
/// Minimum time between two measurements of host memory for limit requests.
const HOST_PERIOD: Duration = Duration::from_millis(10);

/// Formats the process's pod as a suffix to append to the client's name in log lines. Leaves out
/// parts of the pod's name that the agent has not reported.
fn of_pod(identity: &Identity) -> String {
    let Pod { uid, namespace, name, container } = &identity.pod;
    match (&**uid, &**name, &**container) {
        ("", ..) => String::new(),
        (uid, "", _) => format!(" of pod {uid}"),
        (_, name, "") => format!(" of pod {namespace}/{name}"),
        (_, name, container) => format!(" of pod {namespace}/{name}, container {container},"),
    }
}

/// True if this library name belongs to `nvsharectl`. `nvsharectl run` queries GPUs for a command and
/// uses none itself. The name only affects a log line, so a client gains nothing by a false name.
fn asks_for_a_command(library: &str) -> bool {
    library == "nvsharectl"
}

impl Core {
    /// Welcomes a client that has sent Hello.
    pub fn connect(&mut self, mut arrival: Arrival) -> ClientId {
        self.pods.name(&mut arrival.identity);
        self.claims.name(&mut arrival.identity);
        let most = arrival.connection.budget().limit(What::Units);
        self.units.admit(clock::now(), most, &mut arrival.identity);
        let client = ClientId(self.next_client);
        self.next_client += 1;
        let (version, account) = (arrival.version, TenantId(arrival.identity.tenant.number()));
        let gang = self.gang(client, &arrival);
        let identity = arrival.identity.clone();
        let Identity { pid, uid, unit, name, tenant, .. } = &*identity;
        if self.log_limit.allows("connected", tenant) {
            let (library, of) = (printable(&arrival.library), of_pod(&identity));
            match asks_for_a_command(&arrival.library) {
                true => {
                    info!(name: "gpus-asked", client = client.0, pid, uid, unit, %tenant, "{name}{of} asks which GPUs \
                        a command may use")
                }
                false => {
                    info!(name: "client-connected", client = client.0, pid, uid, unit, %tenant, library, "{name}{of} connected")
                }
            }
        }
        let is_asleep = arrival.is_asleep;
        self.add_client(client, arrival, gang, false);
        self.send(client, SchedulerMessage::Welcome { version, client: client.0 });
        self.apply(Event::Connected { client, gang, tenant: account });
        self.restore_sleep(client, is_asleep);
        self.apply_rule(client);
        self.find_place(client);
        client
    }

    /// Takes over a client of an earlier daemon. The client keeps its ID.
    pub fn resume(&mut self, client: ClientId, mut arrival: Arrival, name: ConnectionName) {
        self.pods.name(&mut arrival.identity);
        self.claims.name(&mut arrival.identity);
        let most = arrival.connection.budget().limit(What::Units);
        self.units.admit(clock::now(), most, &mut arrival.identity);
        let (gang, account) = (self.gang(client, &arrival), TenantId(arrival.identity.tenant.number()));
        let identity = arrival.identity.clone();
        let Identity { pid, uid, unit, name: called, tenant, .. } = &*identity;
        if self.log_limit.allows("connected", tenant) {
            let (library, of) = (printable(&arrival.library), of_pod(&identity));
            info!(name: "client-resumed", client = client.0, pid, uid, unit, %tenant, library, "{called}{of} continues");
        }
        let is_asleep = arrival.is_asleep;
        self.add_client(client, arrival, gang, true);
        if let Some(entry) = self.clients.get_mut(&client) {
            entry.stored_as = Some(name);
            entry.session.taken_over();
        }
        self.apply(Event::Connected { client, gang, tenant: account });
        self.restore_sleep(client, is_asleep);
        self.apply_rule(client);
    }

    /// The scheduler's number of the gang whose name a client sent. Two clients are in the same gang if
    /// both the name and the tenant are equal.
    fn gang(&mut self, client: ClientId, arrival: &Arrival) -> u64 {
        if arrival.gang == 0 {
            return 0;
        }
        let Identity { placed, tenant, .. } = &*arrival.identity;
        if !placed {
            self.next_gang += 1;
            return self.next_gang; // alone: without a control group, the tenant is uncertain
        }
        let gang = self.gangs.entry((tenant.clone(), arrival.gang)).or_insert_with(|| {
            self.next_gang += 1;
            Gang { number: self.next_gang, members: BTreeSet::new() }
        });
        gang.members.insert(client);
        gang.number
    }

    /// Removes a client from its gang.
    fn leave_gang(&mut self, client: ClientId, gone: &Client) {
        let key = (gone.identity.tenant.clone(), gone.gang.0);
        if let Some(gang) = self.gangs.get_mut(&key) {
            gang.members.remove(&client);
            if gang.members.is_empty() {
                self.gangs.remove(&key);
            }
        }
    }

    /// Reserves this ID: new clients get higher ones.
    pub fn reserve_id(&mut self, client: ClientId) {
        self.next_client = self.next_client.max(client.0.saturating_add(1));
    }

    fn add_client(&mut self, client: ClientId, arrival: Arrival, gang: u64, resumed: bool) {
        let Arrival { connection, identity, version, gang: named, library, lock, reconnects, is_asleep, process } =
            arrival;
        let entry = Client {
            connection,
            session: Session::new(client, version),
            identity,
            library: printable(&library),
            connected: SystemTime::now(),
            gpus: BTreeMap::new(),
            gang: (named, gang),
            rule: None,
            has_used_up: false,
            env_limits: EnvLimits::default(),
            announced_limits: BTreeMap::new(),
            adoptions: Adoptions::default(),
            asked_for: None,
            reconnects,
            file_use: FileUse::default(),
            devices: BTreeSet::new(),
            is_exempt: is_asleep,
            process,
            checkpoint: None,
            stored_as: None,
            lock,
        };
        self.recorder.name(|| bundle::process(client, &entry.identity, resumed));
        self.clients.insert(client, entry);
        self.signals.clients.set(self.clients.len());
        self.signals.arrivals.notify_one();
        self.mark_active();
    }

    /// Puts a client's connection into systemd's descriptor store, so that the connection outlives the
    /// daemon. A client that has attached no GPU loses nothing by reconnecting and needs no stored
    /// connection.
    fn store(&mut self, client: ClientId) {
        let Some(entry) = self.clients.get_mut(&client) else { return };
        let (kind, version, descriptors) = match &entry.lock {
            None => (Kind::Program, entry.session.version, vec![entry.connection.socket()]),
            Some(lock) => (Kind::Lock, LOCK_RECORD, vec![lock.owner.as_fd(), lock.record.as_fd()]),
        };
        if entry.gpus.is_empty() || entry.stored_as.is_some() {
            return;
        }
        let start_time = peer::start_time(entry.identity.pid).unwrap_or(0);
        let name = ConnectionName { kind, version, client: client.0, start_time };
        if systemd::keep(&name.to_string(), &descriptors) {
            entry.stored_as = Some(name);
        }
    }

    /// Handles a client's report about the locks that an earlier daemon granted to the client.
    pub fn resume_locks(&mut self, client: ClientId, slots: SlotSet) {
        let Some(entry) = self.clients.get(&client) else { return };
        let gpus = entry.session.attached(slots);
        if !gpus.is_empty() {
            self.apply(Event::Held { client, gpus });
        }
    }

    /// Ends a D-Bus lock by closing its connection. The task that owns the lock notices the end of the
    /// connection.
    pub fn end_lock(&self, client: ClientId) -> fdo::Result<()> {
        let entry = self.clients.get(&client).filter(|entry| entry.lock.is_some());
        let no_lock =
            || fdo::Error::InvalidArgs(format!("client {} does not hold a lock acquired with AcquireLock", client.0));
        entry.map(|entry| entry.connection.close()).ok_or_else(no_lock)
    }

    /// Removes a client. `why` completes the log line "NAME ...".
    pub fn disconnect(&mut self, client: ClientId, why: &str) {
        let now = clock::now();
        self.record_usage_of_all(client, now);
        let Some(gone) = self.clients.remove(&client) else { return };
        if gone.lock.is_none() {
            self.count_attachments(|count| count - gone.gpus.len());
        }
        self.leave_gang(client, &gone);
        self.leave_swap_file(client, &gone.identity.tenant);
        if let Some(name) = gone.stored_as {
            systemd::forget(&name.to_string());
        }
        let Identity { pid, uid, unit, name, tenant, .. } = &*gone.identity;
        let identity = &gone.identity;
        let only_asked = asks_for_a_command(&gone.library) && gone.gpus.is_empty();
        if !only_asked && self.log_limit.allows("gone", tenant) {
            let of = of_pod(identity);
            info!(name: "client-gone", client = client.0, pid, uid, unit, %tenant, "{name}{of} {why}");
        }
        if self.departed.len() >= MAX_DEPARTED {
            // Measurements remove old entries too, but NVML may be unavailable.
            self.departed.retain(|_, left| now < *left + EXIT_TIME);
        }
        self.departed.insert(identity.pid.try_into().unwrap_or(0), now);
        self.stopped.remove(&client);
        self.signals.clients.set(self.clients.len());
        self.signals.arrivals.notify_one();
        self.mark_active();
        // Must precede `Event::Disconnected`, which frees the client's memory. Memory that other clients have
        // open stays in use.
        let (adopters, unanswered) = self.shared_memory.leave(client);
        self.ask_to_adopt(adopters);
        for (importer, ticket) in unanswered.into_iter().filter_map(|request| request.importer) {
            self.send_open_result(importer, ticket, Sharing::Unknown);
        }
        if let Some(reply) = self.migrations.remove(&client) {
            let _ = reply.send(Err(fdo::Error::Failed("cannot move the program to another GPU: it has ended".into())));
        }
        self.apply(Event::Disconnected { client });
        if self.ended.len() >= MAX_ENDED {
            self.ended.pop_front();
        }
        self.ended.push_back((client, gone.identity.clone()));
        self.counts.end(client, &Workload::of(identity), now);
        let clients = &self.clients;
        let living = || clients.values().map(|other| Workload::of(&other.identity)).collect();
        self.counts.forget_ended(now, living);
        gone.gpus.keys().for_each(|gpu| self.forget_unlisted(*gpu));
    }

    /// Handles one packet from a client, and the file descriptors received with it.
    ///
    /// # Errors
    /// The client broke the protocol. The caller must then close the connection.
    pub fn receive(&mut self, client: ClientId, packet: &[u8], descriptors: Vec<Foreign>) -> Result<(), Violation> {
        let now = clock::now();
        let Some(entry) = self.clients.get_mut(&client) else { return Ok(()) };
        let action = entry.session.receive(packet)?;
        self.mark_active();
        match action {
            ClientAction::Event(event) => {
                if let Event::LimitRequested { .. } = event
                    && now >= self.host_sampled + HOST_PERIOD
                {
                    self.sample_host(); // the decision needs current figures
                }
                if let Event::LimitRequested { client, gpu, bytes } = event
                    && self.hold_for_file(client, gpu, bytes)
                {
                    return Ok(());
                }
                let detached = if let Event::Detached { gpu, .. } = &event { Some(*gpu) } else { None };
                self.apply(event);
                detached.into_iter().for_each(|gpu| self.forget_unlisted(gpu));
            }
            ClientAction::Attach { .. } => {
                self.prove(client, descriptors.iter().filter_map(DeviceFile::opened));
                drop(descriptors);
                self.attach(client, action)?;
            }
            ClientAction::Memory { gpu, mut report, device_free, host, in_file, counts } => {
                self.counts.report(client, gpu, counts);
                if let Some(stats) = self.stats(client, gpu) {
                    (stats.host, stats.in_file) = (host, in_file);
                }
                let (total, measured) = self.gpus.get(&gpu).map_or((0, false), |gpu| (gpu.total, gpu.index.is_some()));
                // Reports affect other clients' shares, so they are capped at the GPU's size. The demand of managed
                // memory may exceed that size.
                let is_managed = self.machine.engine(client, gpu) == Some(Engine::Managed);
                report.demand = if is_managed { report.demand } else { report.demand.min(total) };
                report.mapped = report.mapped.min(total);
                report.pinned = report.pinned.min(report.mapped);
                if let Some(stats) = self.stats(client, gpu) {
                    stats.report = Some(report);
                }
                self.shared_memory.reported(client, gpu);
                self.report(client, gpu);
                if let Some(free) = device_free.filter(|_| !measured) {
                    let used = total.saturating_sub(free);
                    self.measure(&Sample { gpu, begun: now, steady: true, used, processes: None });
                }
            }
            ClientAction::Incomplete => {}
            ClientAction::UseSwapFile { ram_max } => self.uses_swap_file(client, ram_max),
            ClientAction::EnvLimit { limit, text } => self.set_env_limit(client, limit, &text),
            ClientAction::RequestPlacement(request) => self.place(client, &request),
            ClientAction::SharedMemory { message, gpu } => {
                self.shared_memory_message(client, message, gpu, &descriptors, now)
            }
        }
        let overdue = self.shared_memory.overdue(client, now);
        self.ask_to_adopt(overdue);
        Ok(())
    }

    /// Records device files that a client has open. Ignores files beyond [`MAX_DEVICES`].
    pub fn prove(&mut self, client: ClientId, files: impl IntoIterator<Item = DeviceFile>) {
        let Some(entry) = self.clients.get_mut(&client) else { return };
        let room = MAX_DEVICES.saturating_sub(entry.devices.len());
        entry.devices.extend(files.into_iter().take(room));
    }

    /// True if a client has proven that it may use a GPU, or need not prove it. No proof is needed
    /// for a GPU that NVML does not list, because its device file is unknown, nor for a lock
    /// acquired over D-Bus, which was checked when it was requested.
    pub(super) fn may_use(&self, client: ClientId, gpu: GpuId) -> bool {
        let Some((entry, found)) = self.clients.get(&client).zip(self.gpus.get(&gpu)) else { return true };
        let is_free = entry.lock.is_some() || entry.is_exempt || found.index.is_none();
        is_free
            || match found.minor {
                Some(minor) => entry.devices.contains(&device_files::of_gpu(minor)),
                None => entry.devices.iter().any(|file| device_files::is_of_gpu(*file)),
            }
    }

    /// Disconnects clients that use a GPU without proof. Clients may attach a GPU before NVML lists it.
    pub(super) fn disconnect_unproven(&mut self, gpu: GpuId) {
        let users = self.clients.iter().filter(|(_, entry)| entry.gpus.contains_key(&gpu)).map(|(client, _)| *client);
        for client in users.filter(|client| !self.may_use(*client, gpu)).collect::<Vec<_>>() {
            let why = self.refuse_unproven(client, gpu);
            let Some(entry) = self.clients.get(&client) else { continue };
            warn!("disconnected {}: {why}", entry.identity.label());
            entry.connection.close();
        }
    }

    /// Tells a client that it is refused for lack of a proof, so that its library does not take the end of
    /// the connection for a restart of the scheduler.
    fn refuse_unproven(&mut self, client: ClientId, gpu: GpuId) -> Violation {
        self.note_unproven(client, gpu);
        let violation = Violation::Unproven { gpu: self.label(gpu).unwrap_or_default() };
        let text = Text::new(&violation.to_string());
        self.send(client, SchedulerMessage::Refused { reason: Refusal::Device, text });
        violation
    }

    /// Attaches a GPU to a client.
    ///
    /// # Errors
    /// The client's tenant has named too many GPUs that NVML does not list, or the client has not proven
    /// that it may use the GPU.
    fn attach(&mut self, client: ClientId, attach: ClientAction) -> Result<(), Violation> {
        let ClientAction::Attach { event, slot, gpu, kind, total, name, reason } = attach else { return Ok(()) };
        let Event::Attached { engine, .. } = event else { return Ok(()) };
        self.offer_swap_file(client);
        let now = clock::now();
        self.add_unknown_gpu(client, gpu, kind, total, name)?;
        if !self.may_use(client, gpu) {
            return Err(self.refuse_unproven(client, gpu));
        }
        self.forget_unproven(client, gpu);
        let Some(entry) = self.clients.get_mut(&client) else { return Ok(()) };
        let is_program = entry.lock.is_none();
        let total = self.gpus.get(&gpu).filter(|_| is_program).map_or(0, |gpu| gpu.total);
        let fresh = ClientGpuStats {
            attached: now,
            idle_since: now,
            history: History::unknown(now, total),
            logged: Logged::default(),
            report: None,
            host: 0,
            in_file: 0,
            untracked_work: false,
            reason,
        };
        if entry.gpus.insert(gpu, fresh).is_none() && is_program {
            self.count_attachments(|count| count + 1);
        }
        self.store(client);
        self.query_nvml(Query::Attach);
        debug!(client = client.0, slot, gpu = %gpu.0, ?engine, "attached");
        self.apply(event);
        // A client that reconnects may still use limits that an earlier daemon sent.
        let reconnects = self.clients.get(&client).is_some_and(|entry| entry.reconnects);
        if reconnects || self.gpus.get(&gpu).is_some_and(|gpu| gpu.has_display) {
            self.limit_run_ahead(client, gpu);
        }
        Ok(())
    }

    /// Handles a packet from a client that has ended. Only the counters in the packet still matter.
    pub fn receive_last(&mut self, client: ClientId, packet: &[u8]) {
        let action = self.clients.get_mut(&client).map(|entry| entry.session.receive(packet));
        if let Some(Ok(ClientAction::Memory { gpu, counts, .. })) = action {
            self.counts.report(client, gpu, counts);
        }
    }

    /// Passes a client's memory on a GPU to the scheduler: the client's own report, plus adopted memory
    /// that the report does not include yet.
    pub(super) fn report(&mut self, client: ClientId, gpu: GpuId) {
        let extra = self.shared_memory.uncounted(client, gpu);
        let total = self.gpus.get(&gpu).map_or(0, |gpu| gpu.total);
        let Some(mut report) = self.stats(client, gpu).and_then(|stats| stats.report) else { return };
        for bytes in [&mut report.mapped, &mut report.pinned] {
            *bytes = bytes.saturating_add(extra).min(total);
        }
        report.demand = report.demand.saturating_add(extra);
        self.apply(Event::Memory { client, gpu, report });
    }

    /// Adds a GPU that a client named, if NVML does not list it.
    fn add_unknown_gpu(
        &mut self,
        client: ClientId,
        gpu: GpuId,
        kind: GpuKind,
        total: u64,
        name: String,
    ) -> Result<(), Violation> {
        let Some(budget) = self.budget(client).filter(|_| !self.gpus.contains_key(&gpu)) else { return Ok(()) };
        let share = budget.take(What::Gpus, 1).ok_or(Violation::TooManyGpus)?;
        let name = printable(&name);
        let entry = Gpu {
            failing: false,
            kind,
            name,
            total,
            index: None,
            gone: false,
            minor: None,
            capability: None,
            accounting: Accounting::default(),
            sample: None,
            has_others: true,
            has_display: false,
            named_by: Some(share),
        };
        if self.log_limit.allows("gpu-found", budget.tenant()) {
            info!(name: "gpu-found", gpu = entry.label(gpu), bytes = total, "a program uses {}, which NVML does not \
                list", entry.name);
        }
        let is_known = self.is_known(&entry);
        self.gpus.insert(gpu, entry);
        if is_known {
            self.create_lock_files(gpu);
        }
        self.apply(Event::GpuFound { gpu, total });
        self.drain_again(gpu);
        self.announce_limits([client]);
        self.signals.limits.notify_one();
        self.publish_gpus();
        // The GPU may be a newly created MIG slice.
        self.query_nvml(Query::Scan);
        Ok(())
    }

    /// Removes a GPU that NVML does not list if no client uses it any more.
    fn forget_unlisted(&mut self, gpu: GpuId) {
        let is_used = || self.clients.values().any(|client| client.gpus.contains_key(&gpu));
        if self.gpus.get(&gpu).is_none_or(|entry| entry.index.is_some()) || is_used() {
            return;
        }
        debug!(gpu = %gpu.0, "removing a GPU: no program uses it, and NVML does not list it");
        self.apply(Event::GpuGone { gpu });
        self.forget(gpu);
    }
}
