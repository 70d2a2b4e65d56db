//! Changes of the model's clients: arrivals, attachments, proofs of access to GPUs, and departures.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::time::SystemTime;

use nvshare_wire::client::{EngineReason, StuckReason};

use super::measure::EXIT_TIME;
use super::model::{Arrival, Client, ClientGpuStats, Listing, Model, Use};
use crate::config::rules::EnvLimits;
use crate::daemon::gpu::accounting::{Claims, History};
use crate::daemon::gpu::device_files;
use crate::daemon::systemd;
use crate::daemon::systemd::fd_store::{EntryName, Kind, LOCK_RECORD};
use crate::daemon::transport::peer;
use crate::daemon::transport::session::{Managed, Session};
use crate::identity::printable;
use crate::scheduler::{ClientId, Engine, Event, GpuId, MemoryReport, TenantId, Time};
use crate::sys::device_file::DeviceFile;

/// If `departed` has this many entries at a disconnect, entries older than [`EXIT_TIME`] are dropped.
const MAX_DEPARTED: usize = 1024;
/// Maximum number of device files that are remembered for each client.
pub const MAX_DEVICES: usize = 64;

impl Model {
    /// The ID of the next new client.
    pub(super) fn new_id(&mut self) -> ClientId {
        let client = ClientId(self.next_client);
        self.next_client += 1;
        client
    }

    /// Reserves this ID: new clients get higher ones.
    pub fn reserve_id(&mut self, client: ClientId) {
        self.next_client = self.next_client.max(client.0.saturating_add(1));
    }

    /// Adds a client. `stored_as`: the name of the connection, if it was taken over from an earlier daemon.
    /// Returns the event for the scheduler.
    pub(super) fn add_client(&mut self, client: ClientId, arrival: Arrival, stored_as: Option<EntryName>) -> Event {
        let Arrival { connection, identity, version, gang, library, lock, reconnects, is_asleep, process } = arrival;
        self.gangs.join(client, &identity, gang);
        let event =
            Event::Connected { client, gang: self.gangs.of(client), tenant: TenantId(identity.tenant.number()) };
        let mut session = Session::new(client, version);
        if stored_as.is_some() {
            session.taken_over();
        }
        // The daemon cannot see processes outside its PID namespace.
        let is_older = peer::start_time(identity.pid).map_or(reconnects, |start| start < own_start_time());
        let entry = Client {
            connection,
            session,
            identity,
            library: printable(&library),
            connected: SystemTime::now(),
            gpus: BTreeMap::new(),
            rule: None,
            has_used_up: false,
            env_limits: EnvLimits::default(),
            announced_rules: BTreeMap::new(),
            reconnects,
            devices: BTreeSet::new(),
            is_exempt: is_asleep,
            process,
            is_older,
            stored_as,
            lock,
        };
        self.clients.insert(client, entry);
        event
    }

    /// Adds a client to a gang that it names. Returns the events for the scheduler.
    pub(super) fn join_gang(&mut self, client: ClientId, name: u64) -> Vec<Event> {
        let Some(entry) = self.clients.get(&client) else { return Vec::new() };
        let before = self.gangs.of(client);
        let mut changed = self.gangs.join(client, &entry.identity, name);
        if self.gangs.of(client) != before {
            changed.insert(client);
        }
        changed.into_iter().map(|client| Event::GangChanged { client, gang: self.gangs.of(client) }).collect()
    }

    /// Removes a client. Its process may still have memory on GPUs for [`EXIT_TIME`].
    pub(super) fn remove_client(&mut self, client: ClientId, now: Time) -> Option<Client> {
        let gone = self.clients.remove(&client)?;
        self.gangs.leave(client);
        if let Some(name) = gone.stored_as {
            systemd::forget(&name.to_string());
        }
        if self.departed.len() >= MAX_DEPARTED {
            // Measurements remove old entries too, but NVML may be unavailable.
            self.departed.forget(now.saturating_sub(EXIT_TIME));
        }
        let managed = gone.gpus.iter().map(|(gpu, stats)| (*gpu, stats.claims.believed()));
        self.departed.add(gone.identity.pid.try_into().unwrap_or(0), now, managed);
        Some(gone)
    }

    /// Records that a client has attached a GPU.
    pub(super) fn attach(&mut self, client: ClientId, gpu: GpuId, reason: EngineReason, now: Time) {
        let total = self.total(gpu);
        let Some(entry) = self.clients.get_mut(&client) else { return };
        let total = if entry.lock.is_none() { total } else { 0 };
        // The process may have managed memory from before it was connected to this daemon.
        let departed = self.departed.take_managed(entry.identity.pid.try_into().unwrap_or(0), gpu);
        let managed = if entry.is_older { total } else { departed };
        let fresh = ClientGpuStats {
            attached: now,
            history: History::unknown(now, total, managed),
            claims: Claims::new(managed),
            report: None,
            host: 0,
            listing: Listing::Unknown,
            shown: Use { idle_since: now, in_file: 0, untracked_work: false, other_device: false, reason },
        };
        entry.gpus.insert(gpu, fresh);
        self.store(client);
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
        let name = EntryName { kind, version, client: client.0, start_time };
        if systemd::keep(&name.to_string(), &descriptors) {
            entry.stored_as = Some(name);
        }
    }

    /// Records device files that a client has open. Ignores files beyond [`MAX_DEVICES`].
    pub fn prove(&mut self, client: ClientId, files: impl IntoIterator<Item = DeviceFile>) {
        let Some(entry) = self.clients.get_mut(&client) else { return };
        let room = MAX_DEVICES.saturating_sub(entry.devices.len());
        entry.devices.extend(files.into_iter().take(room));
    }

    /// Records a client's report about its memory on a GPU.
    pub(super) fn set_report(
        &mut self,
        client: ClientId,
        gpu: GpuId,
        mut report: MemoryReport,
        managed: Managed,
        (host, in_file): (u64, u64),
    ) {
        let total = self.total(gpu);
        // Reports affect other clients' shares, so they are capped at the GPU's size. The demand of managed
        // memory may exceed that size.
        let is_managed = self.machine.engine(client, gpu) == Some(Engine::Managed);
        report.demand = if is_managed { report.demand } else { report.demand.min(total) };
        report.mapped = report.mapped.min(total);
        report.pinned = report.pinned.min(report.mapped);
        let is_older = self.clients.get(&client).is_some_and(|entry| entry.is_older);
        let Some(stats) = self.stats(client, gpu) else { return };
        let is_first = stats.report.is_none();
        stats.claims.report(Managed { bytes: managed.bytes.min(total), mapped: managed.mapped });
        (stats.host, stats.shown.in_file, stats.report) = (host, in_file, Some(report));
        if is_first && is_older && managed.bytes > 0 {
            self.gpus.get_mut(&gpu).into_iter().for_each(|gpu| gpu.accounting.forget());
        }
    }

    /// A client's memory on a GPU, for the scheduler: the client's own report, plus the `adopted` bytes that
    /// the report does not include yet.
    pub(super) fn report(&self, client: ClientId, gpu: GpuId, adopted: u64) -> Option<Event> {
        let mut report = self.clients.get(&client)?.gpus.get(&gpu)?.report?;
        for bytes in [&mut report.mapped, &mut report.pinned] {
            *bytes = bytes.saturating_add(adopted).min(self.total(gpu));
        }
        report.demand = report.demand.saturating_add(adopted);
        Some(Event::Memory { client, gpu, report })
    }

    /// Updates the records of clients before the scheduler handles an event.
    pub(super) fn note_event(&mut self, event: &Event, now: Time) {
        use Event::{Cancelled, Detached, Released, Stuck};
        match event {
            Cancelled { client, gpus } | Released { client, gpus, .. } => {
                for gpu in gpus {
                    self.stats(*client, *gpu).into_iter().for_each(|stats| stats.shown.idle_since = now);
                }
            }
            Stuck { client, gpus, reason } => {
                for gpu in gpus {
                    let Some(stats) = self.stats(*client, *gpu) else { continue };
                    stats.shown.untracked_work |= *reason == StuckReason::UntrackedWork;
                    stats.shown.other_device |= *reason == StuckReason::OtherDevice;
                }
            }
            Detached { client, gpu } => {
                self.clients.get_mut(client).into_iter().for_each(|entry| drop(entry.gpus.remove(gpu)));
            }
            _ => {}
        }
    }

    /// Records the present bounds on a client's mapped memory.
    pub(super) fn note_extent(&mut self, client: ClientId, gpu: GpuId, now: Time) {
        let Some(extent) = self.machine.extent(client, gpu) else { return };
        let mapped = self.machine.resident_and_swapped(client, gpu).map_or(0, |(resident, _)| resident);
        let charge = self.machine.charge(client, gpu).min(self.total(gpu));
        let Some(stats) = self.stats(client, gpu).filter(|stats| stats.report.is_some()) else { return };
        stats.claims.charged(charge);
        stats.history.record(now, stats.claims.extent(extent, mapped));
    }

    /// Moves a client's records to the new GPU after its memory has moved.
    pub(super) fn move_client(&mut self, client: ClientId, from: GpuId, to: GpuId) {
        let Some(entry) = self.clients.get_mut(&client) else { return };
        entry.session.moved(from, to);
        // The driver has restored the process there.
        entry.devices.extend(self.gpus.get(&to).and_then(|gpu| gpu.minor).map(device_files::of_gpu));
        if let Some(stats) = entry.gpus.remove(&from) {
            // The history describes the old GPU, so it is not copied.
            entry.gpus.insert(to, ClientGpuStats { history: History::default(), listing: Listing::Unknown, ..stats });
        }
    }

    /// The locks that an earlier daemon granted to a client, by the client's report.
    pub(super) fn held(&self, client: ClientId, slots: nvshare_wire::SlotSet) -> Option<Event> {
        let gpus = self.clients.get(&client)?.session.attached(slots);
        (!gpus.is_empty()).then_some(Event::Held { client, gpus })
    }
}

/// The start time of this daemon.
fn own_start_time() -> u64 {
    static START: OnceLock<u64> = OnceLock::new();
    *START.get_or_init(|| peer::start_time(std::process::id().cast_signed()).unwrap_or(0))
}
