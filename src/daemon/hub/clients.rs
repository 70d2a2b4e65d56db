//! Clients come, say things and go.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::time::SystemTime;

use nvshare_wire::client::{GpuKind, Sharing};
use nvshare_wire::{SchedulerMessage, SlotSet, version};
use tracing::{debug, info};

use super::views::printable;
use super::{Arrival, Client, Gpu, Hub, Use};
use crate::config::rules::EnvLimits;
use crate::daemon::gpu::nvml::{Ask, Sample};
use crate::daemon::gpu::overhead::{Accounting, History};
use crate::daemon::systemd;
use crate::daemon::systemd::fd_store::ConnectionName;
use crate::daemon::transport::peer;
use crate::daemon::transport::session::{Meaning, Session, Violation};
use crate::identity::Identity;
use crate::scheduler::{ClientId, Engine, Event, GpuId, UserId};
use crate::sys::clock;

/// GPUs that NVML does not know are believed to a client, up to this many: more is a client that makes them up.
const MAX_UNKNOWN_GPUS: usize = 128;

impl Hub {
    /// Lets a client in that said Hello.
    pub fn connect(&mut self, arrival: Arrival) -> ClientId {
        let client = ClientId(self.next_client);
        self.next_client += 1;
        let (version, user) = (arrival.version, UserId(arrival.identity.uid));
        let gang = self.gang(&arrival);
        let Identity { pid, uid, unit, name, .. } = &*arrival.identity.clone();
        if self.log_limit.allows("connected", *uid) {
            let library = printable(&arrival.library);
            info!(name: "client-connected", client = client.0, pid, uid, unit, library, "{name} connected");
        }
        self.enter(client, arrival, gang, "connect");
        self.send(client, SchedulerMessage::Welcome { version, client: client.0 });
        self.apply(Event::Connected { client, gang, user });
        self.rule(client);
        self.find_place(client);
        client
    }

    /// Lets a client in that an earlier daemon had let in, with the id that it had.
    pub fn resume(&mut self, client: ClientId, arrival: Arrival, name: ConnectionName) {
        let (gang, user) = (self.gang(&arrival), UserId(arrival.identity.uid));
        let Identity { pid, uid, unit, name: called, .. } = &*arrival.identity.clone();
        if self.log_limit.allows("connected", *uid) {
            let library = printable(&arrival.library);
            info!(name: "client-resumed", client = client.0, pid, uid, unit, library, "{called} goes on");
        }
        self.enter(client, arrival, gang, "resume");
        if let Some(entry) = self.clients.get_mut(&client) {
            entry.kept = Some(name);
        }
        self.apply(Event::Connected { client, gang, user });
        self.rule(client);
    }

    /// The number of the gang that a client says it is in: of the same name, user and container. Nobody gets into another's.
    fn gang(&mut self, arrival: &Arrival) -> u64 {
        if arrival.gang == 0 {
            return 0;
        }
        let same = |other: &&Client| other.gang.0 == arrival.gang && other.identity.may_share_with(&arrival.identity);
        match self.clients.values().find(same) {
            Some(fellow) => fellow.gang.1,
            None => {
                self.next_gang += 1;
                self.next_gang
            }
        }
    }

    /// Gives that id to nobody else.
    pub fn reserve_id(&mut self, client: ClientId) {
        self.next_client = self.next_client.max(client.0.saturating_add(1));
    }

    fn enter(&mut self, client: ClientId, arrival: Arrival, gang: u64, traced: &str) {
        let Arrival { connection, mut identity, version, gang: named, library, lasts, returns } = arrival;
        self.pods.name(&mut identity);
        let library = printable(&library);
        let session = Session::new(client, version);
        let (uses, foretold) = (BTreeMap::new(), BTreeMap::new());
        let (connected, rule, own, kept) = (SystemTime::now(), None, EnvLimits::default(), None);
        let gang = (named, gang);
        let entry = Client {
            connection,
            session,
            identity,
            library,
            connected,
            uses,
            gang,
            rule,
            own,
            foretold,
            returns,
            kept,
            lasts,
        };
        self.clients.insert(client, entry);
        self.signals.clients.set(self.clients.len());
        self.active();
        self.trace(clock::now(), client, None, traced, None);
    }

    /// Has a connection outlive this daemon, where the client knows what to do then, and systemd is there to keep it. One
    /// that uses no GPU yet has nothing to lose, and connects anew.
    fn keep(&mut self, client: ClientId) {
        let Some(entry) = self.clients.get_mut(&client) else { return };
        let version = entry.session.version;
        let is_wanted = self.config.keep_connections && entry.lasts && !entry.uses.is_empty();
        if !is_wanted || version < version::RESUMING || entry.kept.is_some() {
            return;
        }
        let start_time = peer::start_time(entry.identity.pid).unwrap_or(0);
        let name = ConnectionName { version, client: client.0, start_time };
        if systemd::keep(&name.to_string(), entry.connection.socket()) {
            entry.kept = Some(name);
        }
    }

    /// Has connections outlive this daemon, or not, as the configuration says now.
    pub(super) fn keep_as_configured(&mut self) {
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
            self.trace_all(clock::now(), client, &gpus, "held");
            self.apply(Event::Held { client, gpus });
        }
    }

    /// The client is gone, for whatever reason.
    pub fn disconnect(&mut self, client: ClientId, why: &str) {
        let now = clock::now();
        self.trace(now, client, None, "disconnect", None);
        let Some(gone) = self.clients.remove(&client) else { return };
        if let Some(name) = gone.kept {
            // Else systemd would keep a connection to nobody.
            systemd::forget(&name.to_string());
        }
        let Identity { pid, uid, unit, name, .. } = &*gone.identity;
        let identity = &gone.identity;
        if self.log_limit.allows("gone", *uid) {
            info!(name: "client-gone", client = client.0, pid, uid, unit, "{name} {why}");
        }
        self.departed.insert(identity.pid.try_into().unwrap_or(0), now);
        self.stopped.remove(&client);
        self.signals.clients.set(self.clients.len());
        self.signals.limits.notify_one();
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
        let now = clock::now();
        let Some(entry) = self.clients.get_mut(&client) else { return Ok(()) };
        let meaning = entry.session.receive(packet)?;
        self.active();
        match meaning {
            Meaning::Event(event) => {
                if let Event::LimitRequested { .. } = event {
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
                    history: History::default(),
                    limit: None,
                    report: None,
                    host: 0,
                    refused: None,
                    failed: None,
                    eviction_blocked: None,
                    untracked_work: false,
                    reason,
                };
                entry.uses.insert(gpu, fresh);
                self.keep(client);
                debug!(client = client.0, slot, gpu = %gpu.0, ?engine, "attached");
                self.trace(now, client, Some(gpu), "attach", None);
                self.apply(event);
            }
            Meaning::Memory { gpu, mut report, device_free, host, counts } => {
                self.counts.said(client, gpu, counts);
                if let Some(usage) = self.usage(client, gpu) {
                    usage.host = host;
                }
                let (total, measured) = self.gpus.get(&gpu).map_or((0, false), |gpu| (gpu.total, gpu.index.is_some()));
                // No client has more on a GPU than the GPU has: what it says decides what others get. Nor does it need more
                // there, unless its pages come when they are touched.
                let faults = self.machine.engine(client, gpu) == Some(Engine::Managed);
                report.demand = if faults { report.demand } else { report.demand.min(total) };
                report.mapped = report.mapped.min(total);
                report.pinned = report.pinned.min(report.mapped);
                if let Some(usage) = self.usage(client, gpu) {
                    usage.report = Some(report);
                }
                self.shared.reported(client, gpu);
                self.report(client, gpu);
                if let Some(free) = device_free.filter(|_| !measured) {
                    let used = total.saturating_sub(free);
                    self.measure(&Sample { gpu, begun: now, steady: true, used, processes: None });
                }
            }
            Meaning::Part => {}
            Meaning::EnvLimit { limit, text } => self.set_env_limit(client, limit, &text),
            Meaning::Place(ask) => self.place(client, &ask),
            Meaning::Shared { message, gpu } => self.share(client, message, gpu, &descriptors, now),
        }
        let overdue = self.shared.overdue(client, now);
        self.have_adopted(overdue);
        Ok(())
    }

    /// What a client said before it was gone: what it had counted by then.
    pub fn hear_last(&mut self, client: ClientId, packet: &[u8]) {
        let meaning = self.clients.get_mut(&client).map(|entry| entry.session.receive(packet));
        if let Some(Ok(Meaning::Memory { gpu, counts, .. })) = meaning {
            self.counts.said(client, gpu, counts);
        }
    }

    /// Tells the machine what a client has on a GPU: what it reported, and what counts with it besides.
    pub(super) fn report(&mut self, client: ClientId, gpu: GpuId) {
        let extra = self.shared.extra(client, gpu);
        let total = self.gpus.get(&gpu).map_or(0, |gpu| gpu.total);
        let Some(mut report) = self.usage(client, gpu).and_then(|usage| usage.report) else { return };
        for bytes in [&mut report.mapped, &mut report.pinned] {
            *bytes = bytes.saturating_add(extra).min(total);
        }
        report.demand = report.demand.saturating_add(extra);
        self.apply(Event::Memory { client, gpu, report });
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
        let entry =
            Gpu { kind, name, total, index: None, minor: None, accounting: Accounting::default(), sample: None };
        info!(name: "gpu-found", gpu = entry.label(gpu), bytes = total, "a client knows {}", entry.name);
        self.provide(gpu);
        self.gpus.insert(gpu, entry);
        self.apply(Event::GpuFound { gpu, total });
        self.foretell_all();
        // Perhaps a slice that was made just now.
        self.ask_nvml(Ask::Scan);
        Ok(())
    }
}
