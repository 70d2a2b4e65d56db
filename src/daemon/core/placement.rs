//! Placement: the choice of the GPUs that a program sees. A program chooses its GPUs within the limits
//! of its rule and environment, or the scheduler assigns GPUs to it.

use nvshare_wire::env_limits::LimitName;
use nvshare_wire::scheduler::NoPlacement;
use nvshare_wire::visible_devices::Chooser;
use nvshare_wire::{SchedulerMessage, Text};
use tracing::debug;

use super::model::{Gpu, Model, NamedGpu};
use crate::config::rules::variable;
use crate::config::rules::{GpuName, Rule};
use crate::config::units;
use crate::daemon::tenants::What;
use crate::daemon::transport::peer;
use crate::daemon::transport::session::PlacementQuery;
use crate::identity::Identity;
use crate::scheduler::{
    ClientId, Event, GpuId, GpuSet, Labels, Placement, PlacementError, PlacementRequest, TenantId, Time,
};
use crate::sys::clock;
use std::collections::BTreeMap;
use std::time::Duration;

/// Time after which a placement expires if its program has not connected.
const REMEMBERED: Duration = Duration::from_secs(30);
/// Maximum number of processes searched for a placement request: the process itself and its ancestors.
const MOST_ANCESTORS: usize = 16;

/// A placement that a process requested for a program that it will execute or start.
#[derive(Debug, Clone, Copy)]
struct PendingPlacement {
    pid: i32,
    client: ClientId,
    tenant: TenantId,
    since: Time,
}

/// A GPU, its record and its label.
type Known<'a> = (GpuId, &'a Gpu, String);

/// The placements that processes have requested for programs that they have not started yet.
#[derive(Debug, Default)]
pub struct Placements(Vec<PendingPlacement>);

impl Placements {
    /// Records a placement that a client requests for another program. Replaces the previous request of the
    /// client's process.
    pub fn add(&mut self, model: &Model, client: ClientId) {
        let Some(entry) = model.clients.get(&client).filter(|entry| entry.identity.pid > 0) else { return };
        let pid = entry.identity.pid;
        let tenant = TenantId(entry.identity.tenant.number());
        self.0.retain(|ahead| ahead.pid != pid);
        let of_tenant = |ahead: &PendingPlacement| ahead.tenant == tenant;
        let most = entry.connection.budget().limit(What::Placements) as usize;
        // Beyond the limit, the tenant's oldest placement is dropped.
        if self.0.iter().filter(|ahead| of_tenant(ahead)).count() >= most
            && let Some(oldest) = self.0.iter().position(of_tenant)
        {
            self.0.remove(oldest);
        }
        self.0.push(PendingPlacement { pid, client, tenant, since: clock::now() });
    }

    /// Assigns a new client the placement that was requested for it. The request came from an
    /// ancestor of the client's process, or from a program that the process executed earlier.
    pub fn take(&mut self, model: &Model, client: ClientId) -> Option<Event> {
        let now = clock::now();
        self.0.retain(|ahead| now < ahead.since + REMEMBERED);
        let mut pid = model.identity(client)?.pid;
        for _ in 0..MOST_ANCESTORS {
            if pid <= 0 || self.0.is_empty() {
                return None;
            }
            let is_meant = |ahead: &PendingPlacement| ahead.pid == pid && !model.clients.contains_key(&ahead.client);
            // The newest matching request applies.
            if let Some(at) = self.0.iter().rposition(is_meant) {
                return Some(Event::PlacementTaken { client, from: self.0.remove(at).client });
            }
            pid = peer::parent(pid).unwrap_or(0);
        }
        None
    }
}

/// Why a client gets no GPU.
pub struct NoGpu {
    pub why: String,
    /// The label of programs that is the reason. Empty for other reasons.
    pub label: String,
}

/// Sends a client the GPUs that it may see, or returns the event that asks the scheduler to choose them.
///
/// # Errors
/// The client may see no GPU.
pub(super) fn place(model: &Model, client: ClientId, query: &PlacementQuery) -> Result<Option<Event>, NoGpu> {
    match choice(model, client, query) {
        Choice::Free => {
            let is_missing = model.gpus.is_empty() && model.driver_problem().is_some();
            debug!(client = client.0, "not placed: it chooses its own GPUs");
            unplaced(model, client, NoPlacement::Free, &if is_missing { model.no_gpu() } else { String::new() });
        }
        Choice::Of(gpus) => placed(model, client, &gpus),
        Choice::None(why) => return Err(NoGpu { why, label: String::new() }),
        Choice::Machine(request) => return Ok(Some(Event::PlacementRequested { client, request })),
    }
    Ok(None)
}

fn choice(model: &Model, client: ClientId, query: &PlacementQuery) -> Choice {
    let known = known_gpus(model, query.devices);
    let ids = |gpus: &[&Known<'_>]| gpus.iter().map(|(id, ..)| *id).collect::<Vec<_>>();
    if known.is_empty() {
        return Choice::Free; // the daemon does not know any GPU yet
    }
    let rule = model.rule_of(client);
    let allowed = rule.and_then(|rule| rule.places.allowed.as_ref());
    let by_environment = model.clients.get(&client).and_then(|entry| entry.env_limits.allowed());
    let is_named = |names: &[GpuName], gpu: &Known<'_>| names.iter().any(|name| means(name, gpu, &known));
    let is_allowed_by_rule = |gpu: &&Known<'_>| allowed.is_none_or(|names| is_named(names, gpu));
    let chosen: Vec<&Known<'_>> = match query.chooser {
        Chooser::List => listed(&query.choice, &known),
        Chooser::Nobody | Chooser::Rank => known.iter().collect(),
    };
    let allowed_by_rule: Vec<&Known<'_>> = chosen.iter().copied().filter(is_allowed_by_rule).collect();
    if allowed_by_rule.is_empty() && !chosen.is_empty() {
        let rule = rule.map(Rule::to_string).unwrap_or_default();
        return Choice::None(format!("rule {rule} allows none of the program's GPUs"));
    }
    let left: Vec<&Known<'_>> =
        allowed_by_rule.iter().copied().filter(|gpu| by_environment.is_none_or(|names| is_named(names, gpu))).collect();
    if left.is_empty() && !chosen.is_empty() {
        let name = variable(LimitName::AllowedGpus);
        return Choice::None(format!("{name} allows none of the program's GPUs"));
    }
    let policy = model.config.settings.placement;
    let is_request = query.count > 0 || query.bytes.is_some();
    let largest = left.iter().map(|(_, gpu, _)| gpu.total).max();
    if let (Some(bytes), Some(largest)) = (query.bytes, largest)
        && bytes > largest
    {
        let (bytes, largest) = (units::size(bytes), units::size(largest));
        return Choice::None(format!(
            "it requests {bytes} of memory, but the largest GPU that it may use has {largest}"
        ));
    }
    if is_request || (query.chooser == Chooser::Nobody && policy != Placement::None) {
        let PlacementQuery { count, bytes, ahead, .. } = *query;
        // A process can see only one MIG slice, so MIG slices cannot be combined.
        let candidates = left.iter().filter(|(_, gpu, _)| count <= 1 || !gpu.is_slice()).map(|(id, ..)| *id).collect();
        return Choice::Machine(PlacementRequest { candidates, count, bytes, ahead });
    }
    if left.len() == chosen.len() { Choice::Free } else { Choice::Of(ids(&left)) }
}

/// True if the names denote a GPU.
fn are_of(names: &[GpuName], gpu: GpuId, known: &[Known<'_>]) -> bool {
    let mut meant = known.iter().filter(|known| known.0 == gpu);
    meant.any(|gpu| names.iter().any(|name| means(name, gpu, known)))
}

/// Checks that a process's rule allows the process to lock a GPU without the library. Returns the
/// rule's name for messages, or an empty string if no rule applies.
///
/// # Errors
/// Returns a sentence if the rule forbids the lock.
pub fn may_lock(model: &Model, identity: &Identity, gpu: &NamedGpu) -> Result<String, String> {
    let Some((rule, _)) = model.config.rules.of(identity) else { return Ok(String::new()) };
    let known = known_gpus(model, 0);
    if !rule.places.allowed.as_ref().is_none_or(|names| are_of(names, GpuId(gpu.uuid), &known)) {
        return Err(format!("rule {rule} does not allow {}", gpu.label));
    }
    if rule.limits.gang {
        return Err(format!("a lock would prevent the programs of rule {rule} from running together as a gang"));
    }
    Ok(rule.to_string())
}

/// Checks that a client may use a GPU.
///
/// # Errors
/// Returns a sentence if the client's rule or environment forbids the GPU.
pub(super) fn may_be_on(model: &Model, client: ClientId, gpu: GpuId) -> Result<(), String> {
    let known = known_gpus(model, 0);
    let rule = model.rule_of(client);
    if let Some((rule, names)) = rule.and_then(|rule| Some((rule, rule.places.allowed.as_ref()?)))
        && !are_of(names, gpu, &known)
    {
        return Err(format!("rule {rule} does not allow that GPU"));
    }
    let by_environment = model.clients.get(&client).and_then(|entry| entry.env_limits.allowed());
    if by_environment.is_some_and(|names| !are_of(names, gpu, &known)) {
        return Err(format!("{} does not allow that GPU", variable(LimitName::AllowedGpus)));
    }
    Ok(())
}

/// The GPUs whose device files are in the bit mask `devices`, in the order of their NVML indices. The
/// mask 0 stands for all GPUs.
fn known_gpus(model: &Model, devices: u64) -> Vec<Known<'_>> {
    let is_seen = |gpu: &Gpu| {
        let number = gpu.minor.filter(|minor| *minor < u64::BITS && devices != 0);
        number.is_none_or(|minor| devices & 1 << minor != 0)
    };
    let seen = model.known_gpus().filter(|(_, gpu)| !gpu.gone && is_seen(gpu));
    let mut known: Vec<Known<'_>> = seen.map(|(id, gpu)| (*id, gpu, gpu.label(*id))).collect();
    known.sort_by_key(|(id, gpu, _)| (gpu.index.is_none(), gpu.index, *id));
    known
}

/// The event with the labels that rules assign to these clients, for affinity.
pub(super) fn labels(model: &Model, clients: impl IntoIterator<Item = ClientId>) -> Event {
    let labels = |client| {
        let rule = model.rule_of(client);
        (client, rule.map_or_else(Labels::default, |rule| rule.places.labels.clone()))
    };
    Event::Labels { labels: clients.into_iter().map(labels).collect() }
}

/// The event with the GPUs that each of these clients may use. `None` if the scheduler knows them.
pub(super) fn allowed(model: &Model, clients: impl IntoIterator<Item = ClientId>) -> Option<Event> {
    let allowed = |client: ClientId| {
        let (may, may_not): (GpuSet, GpuSet) =
            model.gpus.keys().partition(|gpu| may_be_on(model, client, **gpu).is_ok());
        (client, (!may_not.is_empty()).then_some(may))
    };
    let has_changed = |(client, gpus): &(ClientId, Option<GpuSet>)| model.machine.allowed(*client) != gpus.as_ref();
    let allowed: BTreeMap<ClientId, Option<GpuSet>> = clients.into_iter().map(allowed).filter(has_changed).collect();
    (!allowed.is_empty()).then_some(Event::Allowed { allowed })
}

/// Tells a client the GPUs that it sees.
pub(super) fn placed(model: &Model, client: ClientId, gpus: &[GpuId]) {
    let pid = model.identity(client).map(|identity| identity.pid);
    debug!(client = client.0, pid, gpu = model.labels(gpus), "placed");
    for (at, id) in (0..).zip(gpus) {
        let Some(gpu) = model.gpus.get(id) else { continue };
        let of = gpus.len() as u32;
        model.send(client, SchedulerMessage::Placed { at, of, uuid: id.0, kind: gpu.kind });
    }
}

/// Tells a client that it sees no GPU.
pub(super) fn refuse(model: &Model, client: ClientId, why: &str) {
    unplaced(model, client, NoPlacement::NoGpu, why);
}

fn unplaced(model: &Model, client: ClientId, outcome: NoPlacement, why: &str) {
    model.send(client, SchedulerMessage::Unplaced { outcome, text: Text::new(why) });
}

impl From<&PlacementError> for NoGpu {
    fn from(error: &PlacementError) -> Self {
        let (why, label) = match error {
            PlacementError::TooFew { wanted, there } => {
                (format!("it requests {wanted} GPUs but may use only {there}"), "")
            }
            PlacementError::Affinity(label) => {
                (format!("affinity {label:?}: it may not use any GPU on which programs with this label run"), &**label)
            }
            PlacementError::AntiAffinity(label) => {
                (format!("anti-affinity {label:?}: programs with this label use every GPU that it may use"), &**label)
            }
            PlacementError::Exclusion(label) => {
                (format!("exclusion {label:?}: programs without this label use every GPU that it may use"), &**label)
            }
        };
        Self { why, label: label.to_owned() }
    }
}

/// The decision about a placement.
enum Choice {
    /// The client sees the GPUs that it would see without placement.
    Free,
    Of(Vec<GpuId>),
    None(String),
    /// The scheduler assigns the GPUs.
    Machine(PlacementRequest),
}

/// True if a name denotes this GPU. A name is an index, or a prefix of the UUID of exactly one GPU.
fn means(name: &GpuName, (_, gpu, label): &Known<'_>, known: &[Known<'_>]) -> bool {
    let alone = || match name {
        GpuName::Number(_) => true,
        GpuName::Uuid(_) => known.iter().filter(|(_, gpu, label)| name.fits(label, gpu.index)).count() == 1,
    };
    name.fits(label, gpu.index) && alone()
}

/// The GPUs of a list, parsed by the driver's rules. The list ends before the first name that denotes
/// no GPU. A list with duplicates yields no GPUs.
fn listed<'a, 'b>(list: &str, known: &'a [Known<'b>]) -> Vec<&'a Known<'b>> {
    let find = |name: &str| {
        let name = GpuName::parse(name.trim())?;
        known.iter().find(|gpu| means(&name, gpu, known))
    };
    let mut gpus: Vec<&Known<'_>> = Vec::new();
    for gpu in list.split(',').map_while(find) {
        if gpus.iter().any(|other| other.0 == gpu.0) {
            return Vec::new();
        }
        gpus.push(gpu);
    }
    gpus
}
