//! Placement: the choice of a GPU for programs that do not choose one. Choices are remembered for a
//! while, so that programs started together are not all placed on the GPU that was free at the
//! time. Rules and environments, not this module, decide which GPUs a program may use.

use crate::{
    api::*,
    client::Clients,
    effects::Effects,
    gpu::{Access, Gpus},
    rules::Rules,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long a placement is kept for a program that is about to start. Also, how long a program that
/// does not state its need is expected to allocate as much as its rule allows. An interpreter takes
/// about this long to load its libraries from a cold disk.
const EXPECTED: Duration = Duration::from_secs(30);
/// The maximum number of a tenant's placements that wait for their programs. A further placement
/// replaces the oldest.
const MOST_WAITING: usize = 64;

/// A placement that a client has received.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
struct Place {
    /// The GPUs, and the bytes that the program is expected to need on each GPU, excluding its
    /// context.
    gpus: BTreeMap<GpuId, u64>,
    /// The program stated its need. The stated need counts until the program ends.
    is_declared: bool,
    ahead: bool,
    since: Time,
    tenant: TenantId,
    labels: Labels,
}

/// The placements of clients and of programs that have not started yet, and the labels of all
/// clients.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Placements {
    labels: BTreeMap<ClientId, Labels>,
    places: BTreeMap<ClientId, Place>,
    /// The sets of GPUs within which clients can be moved.
    kinds: Vec<GpuSet>,
    /// The permitted GPUs of each client that may not use all GPUs.
    allowed: BTreeMap<ClientId, GpuSet>,
}

impl Place {
    fn is_expected(&self, now: Time) -> bool {
        self.is_declared || now < self.since + EXPECTED
    }
}

impl Placements {
    /// The GPUs on which a client was placed.
    pub fn of(&self, client: ClientId) -> Vec<GpuId> {
        self.places.get(&client).into_iter().flat_map(|place| place.gpus.keys().copied()).collect()
    }

    pub fn set_kinds(&mut self, kinds: Vec<GpuSet>) {
        self.kinds = kinds;
    }

    pub fn kinds(&self) -> &[GpuSet] {
        &self.kinds
    }

    pub fn allow(&mut self, allowed: BTreeMap<ClientId, Option<GpuSet>>) {
        for (client, gpus) in allowed {
            match gpus {
                Some(gpus) => self.allowed.insert(client, gpus),
                None => self.allowed.remove(&client),
            };
        }
    }

    /// The GPUs that a client may use. `None`: all GPUs.
    pub fn allowed(&self, client: ClientId) -> Option<&GpuSet> {
        self.allowed.get(&client)
    }

    /// The GPUs to which a client on `from` can be moved.
    pub fn candidates(&self, client: ClientId, from: GpuId) -> impl Iterator<Item = GpuId> {
        let kind = self.kinds.iter().find(|kind| kind.contains(&from));
        let allowed = self.allowed.get(&client);
        let may = move |id: &GpuId| *id != from && allowed.is_none_or(|allowed| allowed.contains(id));
        kind.into_iter().flatten().copied().filter(may)
    }

    pub fn label(&mut self, labels: &BTreeMap<ClientId, Labels>) {
        for (client, labels) in labels {
            if *labels == Labels::default() {
                self.labels.remove(client);
            } else {
                self.labels.insert(*client, labels.clone());
            }
        }
    }

    fn labels(&self, client: ClientId) -> Labels {
        let waiting = || self.places.get(&client).map(|place| &place.labels);
        self.labels.get(&client).or_else(waiting).cloned().unwrap_or_default()
    }
}

/// The properties of a GPU's programs that placement considers.
struct Neighbours {
    labels: Vec<Labels>,
    /// Bytes that the programs need, or are expected to need.
    bytes: u64,
}

impl Placements {
    /// Answers a client's request for a placement. A repeated request replaces the earlier placement.
    pub fn request(&mut self, cx: Context, fx: &mut Effects, client: ClientId, request: &PlacementRequest) {
        let Some(tenant) = cx.clients.get(&client).map(|state| state.tenant) else { return };
        self.end_expected(cx);
        self.places.remove(&client);
        let gpus = match self.decide(cx, client, request) {
            Err(why) => return fx.command(Command::Unplaced { client, why }),
            Ok(gpus) => gpus,
        };
        let need = |id: &GpuId| (*id, self.expected_need(cx, client, *id, request.bytes).unwrap_or(0));
        let place = Place {
            gpus: gpus.iter().map(need).collect(),
            is_declared: request.bytes.is_some(),
            ahead: request.ahead,
            since: cx.now,
            tenant,
            labels: self.labels(client),
        };
        fx.command(Command::Placed { client, gpus });
        self.places.insert(client, place);
    }

    /// Records the move of a client from one GPU to another.
    pub fn move_client(&mut self, client: ClientId, from: GpuId, to: GpuId) {
        let Some(place) = self.places.get_mut(&client) else { return };
        if let Some(bytes) = place.gpus.remove(&from) {
            place.gpus.insert(to, bytes);
        }
    }

    /// Assigns `client` the placement that `from` requested for it before `from` disconnected.
    pub fn take_over(&mut self, cx: Context, client: ClientId, from: ClientId) {
        self.end_expected(cx);
        if cx.clients.contains_key(&client)
            && !cx.clients.contains_key(&from)
            && let Some(place) = self.places.remove(&from)
        {
            self.places.insert(client, Place { ahead: false, ..place });
        }
    }

    /// Removes a client. A placement for a program that has not started yet is kept, within
    /// [`MOST_WAITING`].
    pub fn leave(&mut self, cx: Context, client: ClientId) {
        self.labels.remove(&client);
        self.allowed.remove(&client);
        let Some(place) = self.places.get(&client) else { return };
        let tenant = place.tenant;
        if !place.ahead {
            self.places.remove(&client);
            return;
        }
        let waiting: Vec<ClientId> = self
            .places
            .iter()
            .filter(|(id, place)| place.tenant == tenant && !cx.clients.contains_key(id))
            .map(|(id, _)| *id)
            .collect();
        if let Some(oldest) = waiting.first().filter(|_| waiting.len() >= MOST_WAITING) {
            self.places.remove(oldest);
        }
    }

    /// Forgets placements of programs that have not started in time.
    fn end_expected(&mut self, cx: Context) {
        self.places.retain(|id, place| cx.clients.contains_key(id) || cx.now < place.since + EXPECTED);
    }
}

/// The state that placements depend on.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub now: Time,
    pub settings: &'a Settings,
    pub rules: &'a Rules,
    pub gpus: &'a Gpus,
    pub clients: &'a Clients,
}

/// The decision about a request.
impl Placements {
    /// The GPUs for a request.
    ///
    /// # Errors
    /// There are too few candidates, or labels exclude the client from them.
    fn decide(&self, cx: Context, client: ClientId, request: &PlacementRequest) -> Result<Vec<GpuId>, PlacementError> {
        let count = request.count.max(1) as usize;
        let is_there = |id: &&GpuId| cx.gpus.get(**id).is_some_and(|gpu| gpu.access != Access::Gone);
        let known = request.candidates.iter().filter(is_there);
        let mut left: Vec<(GpuId, Neighbours)> = known.map(|id| (*id, self.neighbours(cx, *id))).collect();
        if left.len() < count {
            return Err(PlacementError::TooFew { wanted: request.count.max(1), there: left.len() as u32 });
        }
        let Labels { affinity, anti_affinity, exclusion } = self.labels(client);
        let peers = affinity.as_ref().map(|_| self.gpus_with(cx, &affinity)).unwrap_or_default();
        if let Some(label) = affinity.filter(|_| !peers.is_empty()) {
            left.retain(|(id, _)| peers.contains(id));
            if left.len() < count {
                return Err(PlacementError::Affinity(label));
            }
        }
        let differs = |other: &Labels| other.exclusion != exclusion;
        let excluded = left.iter().flat_map(|(_, there)| &there.labels).find(|other| differs(other)).cloned();
        left.retain(|(_, there)| !there.labels.iter().any(differs));
        if let Some(excluded) = excluded.filter(|_| left.len() < count) {
            return Err(PlacementError::Exclusion(exclusion.or(excluded.exclusion).unwrap_or_default()));
        }
        if let Some(label) = anti_affinity {
            let is_same = |other: &Labels| other.anti_affinity.as_ref() == Some(&label);
            left.retain(|(_, there)| !there.labels.iter().any(is_same));
            if left.len() < count {
                return Err(PlacementError::AntiAffinity(label));
            }
        }
        // The sort is stable, so the first of equally good GPUs is chosen.
        left.sort_by_cached_key(|(id, there)| self.preference(cx, client, *id, there, request.bytes));
        Ok(left.into_iter().take(count).map(|(id, _)| id).collect())
    }

    /// How well a GPU suits a client. Lower values are better.
    fn preference(
        &self,
        cx: Context,
        client: ClientId,
        id: GpuId,
        there: &Neighbours,
        bytes: Option<u64>,
    ) -> (bool, u64, u64) {
        let Some(gpu) = cx.gpus.get(id) else { return (true, u64::MAX, u64::MAX) };
        // Every other candidate is preferred to a drained GPU, where new contexts wait, and to a
        // failing GPU, which reports errors.
        let is_avoided = gpu.drained || gpu.failing;
        if cx.settings.placement != Placement::Pack {
            return (is_avoided, there.labels.len() as u64, there.bytes);
        }
        let capacity = gpu.capacity(cx.settings);
        let (free, excess) = (capacity.saturating_sub(there.bytes), there.bytes.saturating_sub(capacity));
        // Any room suffices for a client whose need is unknown.
        let need =
            self.expected_need(cx, client, id, bytes).unwrap_or(1).saturating_add(gpu.context_bytes(cx.settings, 1));
        match need.checked_sub(free) {
            None | Some(0) => (is_avoided, 0, free),
            Some(lack) => (is_avoided, 1, lack.saturating_add(excess)),
        }
    }

    /// Bytes that a client is expected to need on a GPU, excluding its context. `None`: unknown.
    fn expected_need(&self, cx: Context, client: ClientId, id: GpuId, bytes: Option<u64>) -> Option<u64> {
        let gpu = cx.gpus.get(id)?;
        let of_rules = [cx.rules.memory_max(client, gpu.total), cx.rules.env_memory_max(client, gpu.total)];
        let max = || of_rules.into_iter().flatten().min();
        let allowed = || Some(max()?.saturating_sub(gpu.context_bytes(cx.settings, 1)));
        Some(bytes.or_else(allowed)?.min(gpu.total))
    }

    /// The programs that have attached a GPU or were placed on it.
    fn neighbours(&self, cx: Context, id: GpuId) -> Neighbours {
        let mut all = Neighbours { labels: Vec::new(), bytes: 0 };
        let Some(gpu) = cx.gpus.get(id) else { return all };
        let expected = |client: &ClientId| {
            let place = self.places.get(client).filter(|place| place.is_expected(cx.now))?;
            place.gpus.get(&id).copied()
        };
        for client in gpu.attachments.keys() {
            let demand = gpu.account(*client).map_or(0, |account| account.report.demand);
            all.bytes = all.bytes.saturating_add(demand.max(expected(client).unwrap_or(0)));
            all.labels.push(self.labels(*client));
        }
        let to_come = self.places.iter().filter(|(_, place)| place.gpus.contains_key(&id));
        for (client, _) in to_come.filter(|(client, _)| !gpu.attachments.contains_key(client)) {
            let bytes = expected(client).map_or(0, |bytes| bytes.saturating_add(gpu.context_bytes(cx.settings, 1)));
            all.bytes = all.bytes.saturating_add(bytes);
            all.labels.push(self.labels(*client));
        }
        all
    }

    /// The GPUs of programs with this affinity.
    fn gpus_with(&self, cx: Context, affinity: &Option<String>) -> GpuSet {
        let has = |id: &GpuId| self.neighbours(cx, *id).labels.iter().any(|labels| labels.affinity == *affinity);
        cx.gpus.ids().filter(has).collect()
    }
}
