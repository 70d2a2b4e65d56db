//! Placement: the choice of the GPUs that a program sees. A program chooses its GPUs within the limits
//! of its rule and environment, or the scheduler assigns GPUs to it.

use nvshare_wire::env_limits::LimitName;
use nvshare_wire::scheduler::NoPlacement;
use nvshare_wire::visible_devices::Chooser;
use nvshare_wire::{SchedulerMessage, Text};
use tracing::{debug, info};

use super::state::{Core, Gpu};
use super::views::NamedGpu;
use crate::config::rules::variable;
use crate::config::rules::{GpuName, Rule};
use crate::config::units;
use crate::daemon::tenants::What;
use crate::daemon::transport::peer;
use crate::daemon::transport::session::PlacementQuery;
use crate::identity::Identity;
use crate::scheduler::{ClientId, Event, GpuId, Labels, Placement, PlacementError, PlacementRequest, TenantId, Time};
use crate::sys::clock;
use std::collections::BTreeMap;
use std::time::Duration;

/// Time after which a placement expires if its program has not connected.
const REMEMBERED: Duration = Duration::from_secs(30);
/// Maximum number of processes searched for a placement request: the process itself and its ancestors.
const MOST_ANCESTORS: usize = 16;

/// A placement that a process requested for a program that it will execute or start.
#[derive(Debug, Clone, Copy)]
pub(super) struct PendingPlacement {
    pid: i32,
    client: ClientId,
    tenant: TenantId,
    since: Time,
}

/// A GPU, its record and its label.
type Known<'a> = (GpuId, &'a Gpu, String);

impl Core {
    /// Sends a client the GPUs that it may see.
    pub(super) fn place(&mut self, client: ClientId, query: &PlacementQuery) {
        let Some(entry) = self.clients.get(&client) else { return };
        if query.ahead && entry.identity.pid > 0 {
            let pid = entry.identity.pid;
            let tenant = TenantId(entry.identity.tenant.number());
            self.pending_placements.retain(|ahead| ahead.pid != pid); // replaces the previous request
            let of_tenant = |ahead: &PendingPlacement| ahead.tenant == tenant;
            let most = entry.connection.budget().limit(What::Placements) as usize;
            // Beyond the limit, the tenant's oldest placement is dropped.
            if self.pending_placements.iter().filter(|ahead| of_tenant(ahead)).count() >= most
                && let Some(oldest) = self.pending_placements.iter().position(of_tenant)
            {
                self.pending_placements.remove(oldest);
            }
            self.pending_placements.push(PendingPlacement { pid, client, tenant, since: clock::now() });
        }
        match self.choice(client, query) {
            Choice::Free if self.gpus.is_empty() && self.driver_problem().is_some() => {
                self.unplaced(client, NoPlacement::Free, &self.no_gpu())
            }
            Choice::Free => self.unplaced(client, NoPlacement::Free, ""),
            Choice::Of(gpus) => self.placed(client, &gpus),
            Choice::None(why) => self.refuse_place(client, &why, ""),
            Choice::Machine(request) => self.apply(Event::PlacementRequested { client, request }),
        }
    }

    fn choice(&self, client: ClientId, query: &PlacementQuery) -> Choice {
        let known = self.known(query.devices);
        let ids = |gpus: &[&Known<'_>]| gpus.iter().map(|(id, ..)| *id).collect::<Vec<_>>();
        if known.is_empty() {
            return Choice::Free; // the daemon does not know any GPU yet
        }
        let rule = self.rule_of(client);
        let allowed = rule.and_then(|rule| rule.places.allowed.as_ref());
        let by_environment = self.clients.get(&client).and_then(|entry| entry.env_limits.allowed());
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
        let left: Vec<&Known<'_>> = allowed_by_rule
            .iter()
            .copied()
            .filter(|gpu| by_environment.is_none_or(|names| is_named(names, gpu)))
            .collect();
        if left.is_empty() && !chosen.is_empty() {
            let name = variable(LimitName::AllowedGpus);
            return Choice::None(format!("{name} allows none of the program's GPUs"));
        }
        let policy = self.config.settings.placement;
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
            let mut candidates = ids(&left);
            if query.count > 1 {
                // A process can see only one MIG slice, so MIG slices cannot be combined.
                candidates = left.iter().filter(|(_, gpu, _)| !gpu.is_slice()).map(|(id, ..)| *id).collect();
            }
            return Choice::Machine(PlacementRequest {
                candidates,
                count: query.count,
                bytes: query.bytes,
                ahead: query.ahead,
            });
        }
        if left.len() == chosen.len() { Choice::Free } else { Choice::Of(ids(&left)) }
    }

    /// Checks that a process's rule allows the process to lock a GPU without the library. Returns the
    /// rule's name for messages, or an empty string if no rule applies.
    ///
    /// # Errors
    /// Returns a sentence if the rule forbids the lock.
    pub fn may_lock(&self, identity: &Identity, gpu: &NamedGpu) -> Result<String, String> {
        let Some((rule, _)) = self.config.rules.of(identity) else { return Ok(String::new()) };
        let known = self.known(0);
        let is_allowed = |names: &Vec<GpuName>| {
            let mut meant = known.iter().filter(|known| known.0.0 == gpu.uuid);
            meant.any(|gpu| names.iter().any(|name| means(name, gpu, &known)))
        };
        if !rule.places.allowed.as_ref().is_none_or(is_allowed) {
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
    pub(super) fn may_be_on(&self, client: ClientId, gpu: GpuId) -> Result<(), String> {
        let known = self.known(0);
        let is_named = |names: &[GpuName]| {
            let mut meant = known.iter().filter(|known| known.0 == gpu);
            meant.any(|gpu| names.iter().any(|name| means(name, gpu, &known)))
        };
        let rule = self.rule_of(client);
        if let Some((rule, names)) = rule.and_then(|rule| Some((rule, rule.places.allowed.as_ref()?)))
            && !is_named(names)
        {
            return Err(format!("rule {rule} does not allow that GPU"));
        }
        let by_environment = self.clients.get(&client).and_then(|entry| entry.env_limits.allowed());
        if by_environment.is_some_and(|names| !is_named(names)) {
            return Err(format!("{} does not allow that GPU", variable(LimitName::AllowedGpus)));
        }
        Ok(())
    }

    /// The GPUs whose device files are in the bit mask `devices`, in the order of their NVML indices. The
    /// mask 0 stands for all GPUs.
    fn known(&self, devices: u64) -> Vec<Known<'_>> {
        let is_seen = |gpu: &Gpu| {
            let number = gpu.minor.filter(|minor| *minor < u64::BITS && devices != 0);
            number.is_none_or(|minor| devices & 1 << minor != 0)
        };
        let seen = self.known_gpus().filter(|(_, gpu)| !gpu.gone && is_seen(gpu));
        let mut known: Vec<Known<'_>> = seen.map(|(id, gpu)| (*id, gpu, gpu.label(*id))).collect();
        known.sort_by_key(|(id, gpu, _)| (gpu.index.is_none(), gpu.index, *id));
        known
    }

    /// Sends the scheduler the labels that rules assign to these clients, for affinity.
    pub(super) fn set_labels(&mut self, clients: impl IntoIterator<Item = ClientId>) {
        let labels = |client| {
            let rule = self.rule_of(client);
            (client, rule.map_or_else(Labels::default, |rule| rule.places.labels.clone()))
        };
        let labels: BTreeMap<ClientId, Labels> = clients.into_iter().map(labels).collect();
        self.apply(Event::Labels { labels });
    }

    /// Assigns a new client the placement that was requested for it. The request came from an
    /// ancestor of the client's process, or from a program that the process executed earlier.
    pub(super) fn find_place(&mut self, client: ClientId) {
        let now = clock::now();
        self.pending_placements.retain(|ahead| now < ahead.since + REMEMBERED);
        let Some(mut pid) = self.clients.get(&client).map(|entry| entry.identity.pid) else { return };
        for _ in 0..MOST_ANCESTORS {
            if pid <= 0 || self.pending_placements.is_empty() {
                return;
            }
            let is_meant = |ahead: &PendingPlacement| ahead.pid == pid && !self.clients.contains_key(&ahead.client);
            // The newest matching request applies.
            if let Some(at) = self.pending_placements.iter().rposition(is_meant) {
                let from = self.pending_placements.remove(at).client;
                return self.apply(Event::PlacementTaken { client, from });
            }
            pid = peer::parent(pid).unwrap_or(0);
        }
    }

    pub(super) fn placed(&self, client: ClientId, gpus: &[GpuId]) {
        let names: Vec<String> = gpus.iter().filter_map(|id| Some(self.gpus.get(id)?.label(*id))).collect();
        let pid = self.clients.get(&client).map(|entry| entry.identity.pid);
        debug!(client = client.0, pid, gpu = names.join(" "), "placed");
        for (at, id) in (0..).zip(gpus) {
            let Some(gpu) = self.gpus.get(id) else { continue };
            let of = gpus.len() as u32;
            self.send(client, SchedulerMessage::Placed { at, of, uuid: id.0, kind: gpu.kind });
        }
    }

    /// Handles a failed placement of a client by the scheduler.
    pub(super) fn placement_failed(&mut self, client: ClientId, why: &PlacementError) {
        let (text, label) = match why {
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
        self.refuse_place(client, &text, label);
    }

    fn refuse_place(&mut self, client: ClientId, why: &str, label: &str) {
        self.unplaced(client, NoPlacement::NoGpu, why);
        let Some(identity) = self.clients.get(&client).map(|entry| entry.identity.clone()) else { return };
        let Identity { pid, uid, unit, name, tenant, .. } = &*identity;
        if !self.log_limit.allows("not-placed", tenant) {
            return;
        }
        let rule = self.rule_of(client).map(Rule::to_string).unwrap_or_default();
        let by = if rule.is_empty() { String::new() } else { format!(" (rule {rule})") };
        info!(name: "not-placed", client = client.0, pid, uid, unit, rule, label, "cannot place {name} on a GPU: \
            {why}{by}");
    }

    fn unplaced(&self, client: ClientId, outcome: NoPlacement, why: &str) {
        if outcome == NoPlacement::Free {
            debug!(client = client.0, "not placed: it chooses its own GPUs");
        }
        self.send(client, SchedulerMessage::Unplaced { outcome, text: Text::new(why) });
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
