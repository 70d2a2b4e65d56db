//! A copy of the scheduling loop's state at one moment, for all readers: D-Bus, the control socket,
//! metrics, and systemd's status line. The loop makes the copy, and other threads produce answers from
//! it. No scheduling decision depends on the copy.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use nvshare_wire::client::GpuKind;

use super::counts::Counts;
use super::log::Refusals;
use super::model::Use;
use super::pressure::{self, GroupStall};
use super::routing::Core;
use crate::bus;
use crate::config::rules::{EnvLimits, GpuHours, Instance, Rule, Rules};
use crate::daemon::gpu::accounting::Basis;
use crate::identity::{Identity, printable};
use crate::scheduler::{ClientId, GpuId, Machine, RoomId, Time};
use crate::sys::clock;

/// A copy of the state. Results that several readers need are computed once.
#[derive(Debug)]
pub struct View {
    pub now: Time,
    pub machine: Machine,
    pub clients: BTreeMap<ClientId, CopiedClient>,
    pub gpus: BTreeMap<GpuId, CopiedGpu>,
    pub(super) rules: Rules,
    pub(super) room_owners: BTreeMap<RoomId, Arc<Identity>>,
    pub(super) refusals: Refusals,
    pub(super) unproven: Vec<(GpuId, bus::Unproven)>,
    pub stalls: Vec<GroupStall>,
    pub counts: Counts,
    pub metrics_of_programs: bool,
    pub(super) problems: Vec<String>,
    pub(super) listed_clients: OnceLock<Arc<Vec<ClientView>>>,
    pub(super) listed_gpus: OnceLock<Arc<Vec<bus::Gpu>>>,
}

/// Data about a client that `View::machine` does not include.
#[derive(Debug)]
pub struct CopiedClient {
    pub identity: Arc<Identity>,
    pub library: String,
    pub connected: SystemTime,
    pub rule: Option<Instance>,
    pub has_used_up: bool,
    /// The `gpu-hours` of the client's rule, and the GPU time already used.
    pub hours: Option<(GpuHours, Duration)>,
    pub env_limits: EnvLimits,
    /// The client is a lock acquired over D-Bus.
    pub is_lock: bool,
    /// No helper can determine whether the client is asleep.
    pub is_undetermined: bool,
    pub uses: BTreeMap<GpuId, Use>,
}

/// Data about a GPU that `View::machine` does not include.
#[derive(Debug)]
pub struct CopiedGpu {
    pub kind: GpuKind,
    pub name: String,
    pub total: u64,
    pub index: Option<u32>,
    pub overhead: Option<u64>,
    /// The source of the GPU's memory figures.
    pub basis: Basis,
    /// Bytes of all clients' contexts, if NVML lists processes.
    pub contexts: Option<u64>,
    /// Process IDs of programs that use the GPU and are not clients, if NVML lists processes.
    pub others: Vec<u32>,
}

/// A client, as D-Bus callers see it.
#[derive(Debug, Clone)]
pub struct ClientView {
    pub id: ClientId,
    pub identity: Arc<Identity>,
    /// The client without its command line, which not all callers may see.
    pub(super) shown: bus::Client,
}

impl ClientView {
    /// Converts the client for D-Bus. Includes the command line only if `may_see` is true.
    pub fn present(&self, may_see: bool) -> bus::Client {
        bus::Client { command: may_see.then(|| self.identity.command.clone()), ..self.shown.clone() }
    }

    #[cfg(test)]
    pub fn named(id: u64, identity: Identity) -> Self {
        Self { id: ClientId(id), identity: Arc::new(identity), shown: bus::Client::default() }
    }
}

impl CopiedGpu {
    pub fn label(&self, gpu: GpuId) -> String {
        bus::gpu_name(self.kind, gpu)
    }
}

impl View {
    /// Copies the state.
    pub fn new(core: &Core) -> Self {
        let Core { model, io, observe, host, .. } = core;
        let clients = model.clients.iter().map(|(id, client)| {
            let copied = CopiedClient {
                identity: client.identity.clone(),
                library: client.library.clone(),
                connected: client.connected,
                rule: client.rule.clone(),
                has_used_up: client.has_used_up,
                hours: model.hours_of(*id),
                env_limits: client.env_limits.clone(),
                is_lock: client.lock.is_some(),
                is_undetermined: host.sleep.is_undetermined(model, *id),
                uses: client.gpus.iter().map(|(gpu, stats)| (*gpu, stats.shown)).collect(),
            };
            (*id, copied)
        });
        let gpus = model.known_gpus().map(|(id, gpu)| {
            let accounting = &gpu.accounting;
            let contexts = || accounting.contexts().values().sum();
            let copied = CopiedGpu {
                kind: gpu.kind,
                name: gpu.name.clone(),
                total: gpu.total,
                index: gpu.index,
                overhead: accounting.overhead(),
                basis: if model.is_measured(gpu) { accounting.basis() } else { Basis::Reports },
                contexts: (accounting.basis() == Basis::Processes).then(contexts),
                others: model.others_on(gpu),
            };
            (*id, copied)
        });
        Self {
            now: clock::now(),
            machine: model.machine.clone(),
            clients: clients.collect(),
            gpus: gpus.collect(),
            rules: model.config.rules.clone(),
            room_owners: host.rooms.owners(),
            refusals: observe.log.refusals.clone(),
            unproven: observe.unproven.running(),
            stalls: observe.pressure.stalls(model),
            counts: observe.counts.clone(),
            metrics_of_programs: model.config.metrics_of_programs,
            problems: io.published.borrow().problems.clone(),
            listed_clients: OnceLock::new(),
            listed_gpus: OnceLock::new(),
        }
    }
    pub(super) fn rule_of(&self, client: ClientId) -> Option<&Rule> {
        self.rules.get(self.clients.get(&client)?.rule.as_ref()?.rule)
    }

    /// Every rule in effect and its origin, in the order in which rules are matched.
    pub fn rules(&self) -> Vec<(toml::Table, String)> {
        self.rules.all().map(|rule| (rule.to_table(), rule.origin.to_string())).collect()
    }

    /// Sentences about why the scheduler does not work as configured.
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    /// The pressure on each GPU, and of each tenant and unit.
    pub fn list_pressure(&self) -> Vec<bus::Pressure> {
        pressure::present(&self.stalls)
    }

    pub(super) fn present_rooms(&self, rooms: &[crate::scheduler::RoomView]) -> Vec<bus::Room> {
        let present = |room: &crate::scheduler::RoomView| {
            let owner = self.room_owners.get(&room.room)?;
            Some(bus::Room {
                who: printable(&owner.name),
                pid: u32::try_from(owner.pid).unwrap_or(0),
                uid: owner.uid,
                bytes: room.bytes,
                ready: room.is_ready,
                ends_in: room.until.saturating_sub(self.now).as_secs_f64(),
            })
        };
        rooms.iter().filter_map(present).collect()
    }
}
