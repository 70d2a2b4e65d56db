//! Swap files, the tier behind host memory. This module decides how much of each client's evicted
//! memory may stay in RAM, and how much space the client's swap file has.
//!
//! A client's limit is a promise that there is room for its memory. The scheduler backs promises
//! that do not fit on the GPUs with bytes on the host, the *excess*. The excess is at least the
//! usable RAM, and more if files back it. **In the worst case, all memory promised to a client is
//! off its GPUs, and the part without space in its file needs RAM.** So every promise can be kept
//! if Σ over clients of max(0, committed − reserved) is at most the RAM. The scheduler keeps Σ
//! committed ≤ excess + Σ offers, where a GPU's offer is the memory that it has for clients. So the
//! excess may be RAM + Σ min(reserved, committed) − Σ offers. For clients without a file,
//! `reserved` is 0. The scheduler knows nothing of files: the daemon sends only this number.
//!
//! A file has space for all of its client's memory, including memory on a GPU. So files add memory
//! only if they have more space than the GPUs have memory. Rejected: a pool of space for the excess
//! alone. When another client runs, space would have to move from one client's file to another's,
//! and a file system cannot do that in one step.
//!
//! A file is the guarantee, and RAM is a cache. So space is reserved (`fallocate`) before a promise
//! relies on it. If RAM has no room for the higher limit that a client requests, the request waits
//! for the disk, for at most [`PATIENCE`]. Reserved space stays with its client, as promised memory
//! does.
//!
//! The RAM is divided among the clients, so that evicted memory moves to disk before RAM runs out.
//! Memory without space in a file gets RAM first. The rest of the RAM is assigned to clients in
//! this order, up to their needs: waiting for a GPU, running, idle. Among idle clients, the most
//! recently active are first. While processes on the host are stalled on memory, idle clients get
//! none of this RAM. As a result, the memory of the longest-idle programs is the first to go to
//! disk, and the sum never exceeds the RAM.
//!
//! Only memory with contents needs RAM. Evicted memory takes no RAM if it was never written or holds
//! one repeated value, so it displaces no other client's memory. This exemption covers only memory with
//! space in the file. Other memory is charged in full: the client may write to it at any time, and the
//! new contents would then need RAM.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nvshare_wire::SchedulerMessage;
use tracing::{debug, info, warn};

use super::host_use::HostFigures;
use super::model::{Client, Model, Wanted};
use crate::config::{Config, units};
use crate::daemon::swap_files::{self, Job, Keeper, Record, Report, STEP, Stored};
use crate::daemon::systemd::fd_store::StoredSwapFile;
use crate::identity::Tenant;
use crate::scheduler::{ClientId, Engine, Event, GpuId, Time};
use crate::sys::clock;

/// Maximum time for which a request waits for the disk. After that, it is decided without the
/// additional space.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time after a failure before space is requested again.
const RETRY: Duration = Duration::from_secs(10);
/// Interval of the checks for clients that write beyond their reserved space.
const CHECK_PERIOD: Duration = Duration::from_secs(5);

/// The files of all clients.
#[derive(Debug, Default)]
pub struct SwapFiles {
    keeper: Option<Keeper>,
    of: BTreeMap<ClientId, ClientFile>,
    /// Files of clients that are not connected: of disconnected clients, and of an earlier daemon's clients
    /// until they are taken over. The space of a file stays reserved while any process has the file
    /// open.
    left: BTreeMap<ClientId, LeftFile>,
    /// Requests for higher limits that wait for the disk, with their arrival times.
    held: Vec<(Time, Wanted)>,
    /// RAM has no room for all memory that programs have allocated or requested, or the host is short of
    /// memory.
    is_short: bool,
    /// Time at which a reservation of space last failed.
    failed: Option<Time>,
    /// Whether each client can use a file.
    uses: BTreeMap<ClientId, FileUse>,
    /// The last failure has been logged.
    has_warned: bool,
    checked: Time,
    /// The excess last sent to the scheduler, in bytes.
    promised: Option<u64>,
}

impl ClientFile {
    /// True while a request for space is unanswered by the file thread.
    fn is_growing(&self) -> bool {
        self.asked > self.reserved
    }
}

#[derive(Debug)]
struct LeftFile {
    tenant: Tenant,
    file: Arc<File>,
    reserved: u64,
    stored: Option<Stored>,
}

#[derive(Debug, Default)]
struct ClientFile {
    file: Option<Arc<File>>,
    /// The open file description for the client, until the daemon has sent it.
    theirs: Option<OwnedFd>,
    /// Bytes reserved in the file.
    reserved: u64,
    /// Total bytes that the file thread was asked to reserve.
    asked: u64,
    /// The limits last sent to the client: bytes in RAM, and bytes in the file.
    told: Option<(u64, u64)>,
    stored: Option<Stored>,
}

/// A client's need for host memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    client: ClientId,
    /// The client can use a file.
    files: bool,
    /// Bytes that the client keeps off its GPUs if all its movable memory is evicted.
    demand: u64,
    /// The part of `demand` that takes host memory, or would take it if evicted now: memory on the GPUs,
    /// and evicted memory with contents.
    present: u64,
    reserved: u64,
    /// Bytes of host memory that the client's control groups allow.
    ram_max: u64,
    /// The client's position in the order in which RAM is assigned.
    rank: Rank,
}

/// Whether a client that was asked can use a file.
#[derive(Debug)]
enum FileUse {
    /// The client was asked, and has not answered. Clients that cannot use a file do not answer.
    Offered,
    /// The client can use a file, and its control groups allow it `ram_max` bytes of host memory.
    Possible { ram_max: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Waits,
    Runs,
    /// Idle since this time. The longest-idle clients are assigned RAM last.
    Idle(Reverse<Time>),
}

/// Bytes of a client's demand without space in its file.
fn beyond(need: &Need) -> u64 {
    need.demand.saturating_sub(if need.files { need.reserved } else { 0 })
}

/// Divides the RAM among the clients. `short`: the host is short of memory. Idle clients then get RAM
/// only for memory without space in their files.
fn divide(ram: u64, short: bool, needs: &[Need]) -> BTreeMap<ClientId, u64> {
    let mut left = needs.iter().fold(ram, |left, need| left.saturating_sub(beyond(need)));
    let mut order: Vec<&Need> = needs.iter().filter(|need| need.files).collect();
    order.sort_by_key(|need| (need.rank, need.client));
    let mut shares = BTreeMap::new();
    for need in order {
        let is_idle = matches!(need.rank, Rank::Idle(_));
        let present = need.present.min(need.ram_max);
        let more = if short && is_idle { 0 } else { present.saturating_sub(beyond(need)).min(left) };
        left -= more;
        shares.insert(need.client, beyond(need) + more);
    }
    shares
}

/// Rounds up to a multiple of the step in which space is reserved.
fn in_steps(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(STEP).unwrap_or(bytes)
}

/// Divides `most` bytes equally. A part that a tenant does not need in full is divided among the other
/// tenants.
fn equal_parts(most: u64, wanted: Vec<u64>) -> Vec<u64> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by_key(|at| wanted[*at]);
    let (mut left, mut parts) = (most, wanted);
    for (before, at) in order.iter().enumerate() {
        let equal = left / (order.len() - before) as u64;
        parts[*at] = parts[*at].min(equal);
        left -= parts[*at];
    }
    parts
}

impl SwapFiles {
    /// Sets the handle of the thread that creates the files.
    pub fn use_keeper(&mut self, keeper: Keeper) {
        self.keeper = Some(keeper);
    }

    /// Counts a file that an earlier daemon created.
    pub fn inherit(&mut self, model: &mut Model, stored: StoredSwapFile) {
        let Some((client, file, stored)) = Stored::inherit(stored) else { return };
        model.reserve_id(client);
        let Record { tenant, reserved, .. } = stored.record().clone();
        self.left.insert(client, LeftFile { tenant, file: Arc::new(file), reserved, stored: Some(stored) });
    }

    /// Takes over the file of a client of an earlier daemon. The client keeps using its file until it is
    /// offered another.
    pub fn resume(&mut self, client: ClientId) {
        let Some(LeftFile { file, reserved, stored, .. }) = self.left.remove(&client) else { return };
        let ram_max = stored.as_ref().map_or(u64::MAX, |stored| stored.record().ram_max);
        self.uses.insert(client, FileUse::Possible { ram_max });
        let (file, theirs, told) = (Some(file), None, None);
        self.of.insert(client, ClientFile { file, theirs, reserved, asked: reserved, told, stored });
    }

    /// True if memory is in files or may be written to files. Host memory must then be watched.
    pub fn are_used(&self, config: &Config) -> bool {
        config.swap_file.is_some() || !self.of.is_empty() || !self.left.is_empty()
    }

    /// True if processes may still have files of disconnected clients open.
    pub fn has_left_files(&self) -> bool {
        !self.left.is_empty()
    }

    /// If files are configured, asks a client that attaches a GPU whether it can use a file. Each client is
    /// asked once. The client is not yet allowed to create its context, so its answer precedes its
    /// first request for memory.
    pub fn offer(&mut self, model: &Model, client: ClientId) {
        let Some(entry) = model.clients.get(&client) else { return };
        if model.config.swap_file.is_some() && entry.lock.is_none() && !self.uses.contains_key(&client) {
            self.uses.insert(client, FileUse::Offered);
            entry.connection.send(SchedulerMessage::OfferSwapFile {});
        }
    }

    /// Asks all clients with GPUs whether they can use a file. Called after files have been configured.
    pub fn offer_to_all(&mut self, model: &Model) {
        let attached = model.clients.iter().filter(|(_, entry)| !entry.gpus.is_empty());
        attached.for_each(|(client, _)| self.offer(model, *client));
    }

    /// Handles a client's message that it can use a file.
    pub fn accepted(&mut self, client: ClientId, ram_max: u64) {
        self.uses.entry(client).and_modify(|file_use| *file_use = FileUse::Possible { ram_max });
    }

    /// The clients' needs for host memory. `wanted`: a client's request for a GPU. If the request is higher
    /// than the client's demand on that GPU, it replaces the demand.
    fn needs(&self, model: &Model, wanted: Option<Wanted>) -> Vec<Need> {
        let programs = model.clients.iter().filter(|(_, entry)| entry.lock.is_none());
        let need = |(client, entry): (&ClientId, &Client)| {
            let known = entry.gpus.iter().filter(|(id, _)| model.is_known(**id));
            let gpus = known.map(|(gpu, stats)| {
                let report = stats.report.unwrap_or_default();
                let demand = report.demand.saturating_sub(report.pinned);
                let present = report.mapped.saturating_sub(report.pinned).saturating_add(report.swapped).min(demand);
                match model.machine.engine(*client, *gpu) {
                    Some(Engine::None) | None => (0, 0, true),
                    Some(engine) => (demand.max(bytes_of(wanted, *client, *gpu)), present, engine == Engine::Swap),
                }
            });
            let (demand, present, copies) = gpus.fold((0u64, 0u64, true), |sum, gpu| {
                (sum.0.saturating_add(gpu.0), sum.1.saturating_add(gpu.1), sum.2 && gpu.2)
            });
            let (mut waits, mut runs) = (false, false);
            for (_, activity) in model.machine.activities(*client) {
                (waits, runs) = (waits || activity.is_stalled, runs || activity.runs);
            }
            let idle_since = entry.gpus.values().map(|stats| stats.shown.idle_since).max().unwrap_or_default();
            let rank = match () {
                () if waits => Rank::Waits,
                () if runs => Rank::Runs,
                () => Rank::Idle(Reverse(idle_since)),
            };
            let reserved = self.of.get(client).map_or(0, |file| file.reserved);
            let (can_use, ram_max) = match self.uses.get(client) {
                Some(FileUse::Possible { ram_max }) => (true, *ram_max),
                Some(FileUse::Offered) | None => (false, u64::MAX),
            };
            // Only memory that the library copies can be moved to a file.
            Need { client: *client, files: copies && can_use, demand, present, reserved, ram_max, rank }
        };
        programs.map(need).collect()
    }

    /// Reserves file space for demand that does not fit into RAM. Returns the clients' needs, which include
    /// the request `wanted`.
    pub fn reserve(&mut self, model: &Model, host: &HostFigures, wanted: Option<Wanted>) -> Vec<Need> {
        let needs = self.needs(model, wanted);
        self.is_short = false;
        if let Some(directory) = &model.config.swap_file {
            self.reserve_in(directory, model, host, &needs);
        }
        needs
    }

    fn reserve_in(&mut self, directory: &Path, model: &Model, host: &HostFigures, needs: &[Need]) {
        let now = clock::now();
        if self.failed.is_some_and(|failed| now < failed + RETRY) {
            return;
        }
        let Some(ram) = host.memory.bytes() else { return };
        let total = needs.iter().fold(0u64, |sum, need| sum.saturating_add(need.demand));
        // All programs of a control group share its headroom, and may use it at any time. So a
        // client in a group with a limit needs a file even if the host has free RAM.
        let is_short = total > ram || host.ahead.is_short(now);
        let lacks = |need: &&Need| need.files && need.demand > need.reserved && (is_short || need.ram_max < u64::MAX);
        self.is_short = is_short;
        if !needs.iter().any(|need| lacks(&need)) {
            return;
        }
        let most = swap_files::most(directory, model.config.swap_file_max);
        let mut left = self.of.values().fold(most, |left, file| left.saturating_sub(file.asked));
        left = self.left.values().fold(left, |left, file| left.saturating_sub(file.reserved));
        let mut shares = self.shares(model, most, needs);
        let mut is_lacking = false;
        for need in needs.iter().filter(lacks) {
            let share = model.identity(need.client).and_then(|identity| shares.get_mut(&identity.tenant));
            let entry = self.of.entry(need.client).or_default();
            let Some(share) = share.filter(|_| !entry.is_growing()) else { continue };
            // Space is reserved in steps, so that a client with small allocations does not wait for
            // each allocation.
            let more = swap_files::usable(in_steps(need.demand - need.reserved).min(left).min(*share));
            if more == 0 {
                is_lacking = true;
                continue;
            }
            left -= more;
            *share -= more;
            if let Some(keeper) = &self.keeper {
                entry.asked = entry.reserved + more;
                let (client, file, reserved) = (need.client, entry.file.clone(), entry.reserved);
                keeper.ask(Job::Grow { client, directory: directory.to_owned(), file, reserved, to: entry.asked });
            }
        }
        if is_lacking && !std::mem::replace(&mut self.has_warned, true) {
            let most = swap_files::most(directory, model.config.swap_file_max);
            warn!(
                "no space is left for programs' memory in {}: file-max in [swap] allows {}",
                directory.display(),
                units::size(most)
            );
        }
    }

    /// True if the decision on a client's request depends on a pending reservation. While RAM has room for
    /// all clients, only the client's own file matters. Otherwise, every file matters.
    fn awaits_space(&self, client: ClientId) -> bool {
        let mut all = self.of.iter();
        all.any(|(owner, file)| file.is_growing() && (self.is_short || *owner == client))
    }

    /// The bytes that each tenant may still reserve if all tenants together may reserve `most`. Tenants
    /// have equal parts of the disk. A part that a tenant does not need goes to other tenants.
    fn shares(&self, model: &Model, most: u64, needs: &[Need]) -> BTreeMap<Tenant, u64> {
        let mut tenants: BTreeMap<Tenant, (u64, u64)> = BTreeMap::new();
        for need in needs.iter().filter(|need| need.files) {
            let Some(identity) = model.identity(need.client) else { continue };
            let asked = self.of.get(&need.client).map_or(0, |file| file.asked);
            let wanted = asked.max(need.reserved.saturating_add(in_steps(need.demand.saturating_sub(need.reserved))));
            let (sum, has) = tenants.entry(identity.tenant.clone()).or_default();
            (*sum, *has) = (sum.saturating_add(wanted), has.saturating_add(asked));
        }
        for LeftFile { tenant, reserved, .. } in self.left.values() {
            let (sum, has) = tenants.entry(tenant.clone()).or_default();
            (*sum, *has) = (sum.saturating_add(*reserved), has.saturating_add(*reserved));
        }
        let parts = equal_parts(most, tenants.values().map(|(wanted, _)| *wanted).collect());
        tenants.into_iter().zip(parts).map(|((tenant, (_, has)), part)| (tenant, part.saturating_sub(has))).collect()
    }

    /// Handles a report of the file thread.
    pub fn report(&mut self, model: &Model, report: Report) {
        match report {
            Report::Grown { client, file, theirs, reserved, error } => {
                if let Some(error) = error {
                    self.failed = Some(clock::now());
                    let directory = model.config.swap_file.as_deref().unwrap_or("".as_ref());
                    if !std::mem::replace(&mut self.has_warned, true) {
                        warn!(
                            "cannot reserve space for programs' memory in {}, retrying: {}. Without this space, \
                             programs can allocate only what fits in RAM",
                            directory.display(),
                            swap_files::in_words(&error)
                        );
                    }
                } else if self.failed.take().is_some() {
                    self.has_warned = false;
                    info!("can reserve space for programs' memory again");
                }
                if let Some(identity) = model.identity(client) {
                    let entry = self.of.entry(client).or_default();
                    match (&mut entry.stored, &file, self.uses.get(&client)) {
                        (Some(stored), ..) => stored.reserve(reserved),
                        (stored, Some(file), Some(FileUse::Possible { ram_max })) => {
                            let record = Record { tenant: identity.tenant.clone(), ram_max: *ram_max, reserved };
                            *stored = Stored::keep(client, file, record);
                        }
                        _ => {}
                    }
                    (entry.file, entry.reserved, entry.asked) = (file, reserved, reserved);
                    entry.theirs = theirs.or_else(|| entry.theirs.take());
                    debug!(client = client.0, reserved, "space in a swap file");
                }
            }
            Report::Overrun { client } => {
                if let Some(entry) = model.clients.get(&client) {
                    warn!(
                        "disconnected {}, because it wrote more than its limit into its swap file",
                        entry.identity.label()
                    );
                    entry.connection.close();
                }
            }
            Report::Freed { client } => {
                if let Some(stored) = self.left.remove(&client).and_then(|left| left.stored) {
                    stored.forget();
                }
            }
        }
    }

    /// True if a request for a higher limit must wait for the disk. The request is then queued.
    pub fn hold(&mut self, model: &Model, host: &HostFigures, wanted: Wanted) -> bool {
        self.reserve(model, host, Some(wanted));
        let (client, gpu, _) = wanted;
        let waits = self.awaits_space(client);
        if waits {
            self.held.retain(|(_, (who, at, _))| (*who, *at) != (client, gpu)); // a newer request replaces an older one
            self.held.push((clock::now(), wanted));
        }
        waits
    }

    /// Removes and returns the queued requests for which the file thread has answered, or that have waited
    /// for `PATIENCE`.
    pub fn take_due(&mut self, model: &Model) -> Vec<Wanted> {
        let now = clock::now();
        let held = std::mem::take(&mut self.held).into_iter();
        let (due, rest): (Vec<_>, Vec<_>) =
            held.partition(|(since, (client, ..))| !self.awaits_space(*client) || now >= *since + PATIENCE);
        self.held = rest;
        due.into_iter().map(|(_, wanted)| wanted).filter(|(client, gpu, _)| model.is_attached(*client, *gpu)).collect()
    }

    /// The number of bytes that the scheduler can promise beyond the GPUs' memory, if it has changed. A
    /// client's pending request counts as committed in this sum, because its file has space for the request.
    /// `wanted`: a request that is about to be made.
    pub fn promise(&mut self, model: &Model, host: &HostFigures, wanted: Option<Wanted>) -> Option<Event> {
        let ram = host.memory.bytes()?;
        let backed = self.of.iter().fold(0u64, |sum, (client, file)| {
            let gpus = model.gpus_of(*client).into_iter().filter(|gpu| model.is_known(*gpu));
            let committed = gpus.fold(0u64, |sum, gpu| {
                let committed = model.machine.committed_or_requested(*client, gpu);
                sum.saturating_add(committed.max(bytes_of(wanted, *client, gpu)))
            });
            sum.saturating_add(file.reserved.min(committed))
        });
        let bytes = if backed == 0 { ram } else { ram.saturating_add(backed.saturating_sub(offers(model))) };
        (self.promised.replace(bytes) != Some(bytes)).then_some(Event::HostMemory { bytes })
    }

    /// Tells the clients with files their shares of RAM.
    pub fn divide_ram(&mut self, model: &Model, host: &HostFigures, needs: &[Need]) {
        let Some(ram) = host.memory.bytes() else { return };
        let short = host.ahead.is_short(clock::now());
        let total = needs.iter().fold(0u64, |sum, need| sum.saturating_add(need.present.max(beyond(need))));
        let shares = if total > ram || short { divide(ram, short, needs) } else { BTreeMap::new() };
        for (client, file) in &mut self.of {
            let Some(entry) = model.clients.get(client).filter(|_| file.file.is_some()) else { continue };
            let bytes = shares.get(client).map_or(u64::MAX, |bytes| swap_files::rounded(*bytes));
            let told = (bytes, file.reserved);
            if file.told == Some(told) {
                continue;
            }
            let message = SchedulerMessage::HostMemory { ram: bytes, file: file.reserved };
            match file.theirs.take() {
                None => entry.connection.send(message),
                // If the client's socket is full, the next call sends the message.
                Some(theirs) => {
                    let sent = [theirs];
                    if entry.connection.send_with(message, &sent).is_err() {
                        [file.theirs] = sent.map(Some);
                        continue;
                    }
                }
            }
            file.told = Some(told);
        }
    }

    /// Requests checks for clients that write beyond their reserved space.
    pub fn check(&mut self) {
        let now = clock::now();
        let Some(keeper) = self.keeper.as_ref().filter(|_| now >= self.checked + CHECK_PERIOD) else { return };
        self.checked = now;
        for (client, entry) in self.of.iter().filter(|(_, entry)| !entry.is_growing()) {
            if let Some(file) = &entry.file {
                keeper.ask(Job::Check { client: *client, file: file.clone(), reserved: entry.reserved });
            }
        }
        for (client, LeftFile { file, reserved, .. }) in &self.left {
            keeper.ask(Job::CheckLeft { client: *client, file: file.clone(), reserved: *reserved });
        }
    }

    /// Handles the end of a client's connection. The client's process, or a process that received
    /// the file's descriptor from it, may still have the file open. While any process has the file
    /// open, the file's space counts for the tenant, and the file thread checks it for overruns.
    pub fn leave(&mut self, client: ClientId, tenant: &Tenant) {
        self.uses.remove(&client);
        self.held.retain(|(_, (who, ..))| *who != client);
        let Some(ClientFile { file: Some(file), theirs, reserved, asked, mut stored, .. }) = self.of.remove(&client)
        else {
            return;
        };
        if theirs.is_some() {
            stored.into_iter().for_each(Stored::forget);
            return; // the client never got the file
        }
        let reserved = reserved.max(asked);
        stored.iter_mut().for_each(|stored| stored.reserve(reserved));
        let file = LeftFile { tenant: tenant.clone(), file, reserved, stored };
        if let Some(keeper) = &self.keeper {
            keeper.ask(Job::CheckLeft { client, file: file.file.clone(), reserved: file.reserved });
        }
        self.left.insert(client, file);
    }
}

/// The bytes that a request wants for a client on a GPU. 0 if it is another client's or about another GPU.
fn bytes_of(wanted: Option<Wanted>, client: ClientId, gpu: GpuId) -> u64 {
    wanted.filter(|(who, at, _)| (*who, *at) == (client, gpu)).map_or(0, |(_, _, bytes)| bytes)
}

/// Sum of the memory that the GPUs in use offer to clients.
fn offers(model: &Model) -> u64 {
    let used: BTreeSet<GpuId> = model.clients.values().flat_map(|entry| entry.gpus.keys().copied()).collect();
    let offers = model.known_gpus().filter(|(id, _)| used.contains(id)).map(|(id, _)| model.machine.offer(*id));
    offers.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn need(client: u64, demand: u64, reserved: u64, rank: Rank) -> Need {
        let demand = demand * GIB;
        let (present, reserved, ram_max) = (demand, reserved * GIB, u64::MAX);
        Need { client: ClientId(client), files: true, demand, present, reserved, ram_max, rank }
    }

    fn idle(since: u64) -> Rank {
        Rank::Idle(Reverse(Duration::from_secs(since)))
    }

    fn shares(ram: u64, short: bool, needs: &[Need]) -> Vec<u64> {
        divide(ram * GIB, short, needs).into_values().map(|bytes| bytes / GIB).collect()
    }

    #[test]
    fn ram_goes_to_waiting_clients_first_and_longest_idle_clients_last() {
        let needs = [
            need(1, 18, 18, idle(5)),
            need(2, 18, 18, Rank::Runs),
            need(3, 18, 18, idle(9)),
            need(4, 18, 18, Rank::Waits),
        ];
        assert_eq!(shares(100, false, &needs), [18, 18, 18, 18]);
        assert_eq!(shares(40, false, &needs), [0, 18, 4, 18]);
        assert_eq!(shares(10, false, &needs), [0, 0, 0, 10]);
        assert_eq!(shares(100, true, &needs), [0, 18, 0, 18], "what is idle leaves a host that lacks memory");
    }

    #[test]
    fn memory_without_file_space_stays_in_ram() {
        let old = Need { files: false, ..need(3, 10, 0, Rank::Runs) };
        let needs = [need(1, 18, 4, idle(5)), need(2, 18, 18, Rank::Waits), old];
        assert_eq!(shares(30, false, &needs), [14, 6]);
        assert_eq!(shares(0, false, &needs), [14, 0], "it has nowhere else to be");
    }

    #[test]
    fn empty_memory_with_file_space_takes_no_ram() {
        let mostly_empty = |client, reserved, rank| Need { present: 2 * GIB, ..need(client, 18, reserved, rank) };
        let needs = [need(1, 18, 18, idle(5)), mostly_empty(2, 18, Rank::Waits), mostly_empty(3, 18, Rank::Runs)];
        assert_eq!(shares(22, false, &needs), [18, 2, 2]);
        let needs = [need(1, 18, 18, idle(5)), mostly_empty(2, 10, Rank::Waits)];
        assert_eq!(shares(22, false, &needs), [14, 8], "it may be written, and has nowhere else to be");
    }

    #[test]
    fn tenants_share_the_disk_equally_and_redistribute_the_unused_part() {
        assert_eq!(equal_parts(90, vec![100]), [90]);
        assert_eq!(equal_parts(90, vec![100, 10, 50]), [40, 10, 40]);
        assert_eq!(equal_parts(90, vec![20, 10, 50]), [20, 10, 50]);
        assert_eq!(equal_parts(90, vec![]), [0; 0]);
        assert_eq!(equal_parts(u64::MAX, vec![7, u64::MAX]), [7, u64::MAX - 7]);
    }

    /// For any needs, the sum of the shares exceeds the RAM only if the memory without space in
    /// files exceeds the RAM.
    #[test]
    fn ram_shares_never_exceed_the_ram() {
        let mut seed = 7u64;
        let mut random = |n: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % n
        };
        for _ in 0..2000 {
            let needs: Vec<Need> = (0..random(6))
                .map(|client| {
                    let rank = [Rank::Waits, Rank::Runs, idle(random(9))][random(3) as usize];
                    let (demand, reserved) = (random(30), random(30));
                    let present = random(demand + 1) * GIB;
                    Need { files: random(4) > 0, present, ..need(client, demand, reserved, rank) }
                })
                .collect();
            let (ram, short) = (random(60), random(2) > 0);
            let least: u64 = needs.iter().map(beyond).sum();
            let without: u64 = needs.iter().filter(|need| !need.files).map(beyond).sum();
            let sum = without + divide(ram * GIB, short, &needs).into_values().sum::<u64>();
            assert!(sum <= least.max(ram * GIB), "{needs:?}");
        }
    }
}
