//! Limits on the memory that clients may allocate. The memory that does not fit on the GPUs must
//! fit in host memory: Σ over GPUs of max(0, Σ committed − capacity) ≤ host memory. Rules and
//! environments may set lower limits.
//!
//! Memory that does not fit on a GPU is stored in host memory, which all GPUs share. If host memory
//! suffices, every client may allocate a whole GPU. Otherwise each client's limit is its demand
//! plus an equal part of the remaining memory, its *slack*. A client that requests more memory gets
//! part of other clients' slack. A request that can be met is granted, and any other request fails
//! immediately. A client waits for another client's memory only if a rule says so.
//!
//! - `limit`: one client's limit on one GPU, with the changes that it has not acknowledged.
//! - `host`: the host memory that limits rely on.
//! - `sums`: the sums of committed bytes: per GPU, per group, and in host memory.
//! - `clients`: clients that attach a GPU, report, move and detach.
//! - `solver`: divides memory among clients: max-min fairness by water-filling.
//! - `balance`: brings each client's limit to the solver's result. `beyond`: limits that exceed a GPU.
//! - `bounds`: the limits that rules and environments set.
//! - `request`: allocations that need a higher limit.
//! - `held`: requests that wait for a measurement.
//! - `coming`: room set aside for clients that are about to be moved to another GPU, or may be
//!   moved back.
//! - `ahead`: host memory that clients allocate before memory on a GPU is evicted to it.
//! - `asleep`: clients that are off their GPUs. Their limit is their present memory.
//!
//! The quota knows demands, limits and requests. The quota queries [`Capacities`] for the capacity
//! of GPUs, and [`Rules`] for limits set by rules.

mod ahead;
mod asleep;
mod balance;
mod beyond;
mod bounds;
mod clients;
mod coming;
mod held;
mod host;
mod limit;
mod request;
mod solver;
mod sums;

pub(crate) use balance::FIRST_LIMIT_TIMEOUT;
pub(crate) use coming::{Expected, RoomToMove};
pub(crate) use held::CONTEXT_APPEARS;
pub(crate) use limit::Limit;

use crate::{api::*, effects::Effects, rules::Rules, timers::Wake};
use ahead::Ahead;
use balance::ACK_TIMEOUT;
use coming::Coming;
use held::HeldRequest;
use host::Host;
use limit::Wanted;
use std::collections::{BTreeMap, BTreeSet};

/// A new limit is sent if it differs by more than this many bytes. The value is the driver's own
/// granularity.
const LIMIT_STEP: u64 = 2 << 20;

/// The quota's view of GPUs. The quota queries it at each decision, because contexts and other
/// programs appear and disappear.
pub(crate) trait Capacities {
    /// The size of the GPU in bytes.
    fn total(&self, gpu: GpuId) -> u64;
    /// Bytes of the GPU that limits can rely on.
    fn offer(&self, gpu: GpuId) -> u64;
    /// The offer if unmeasured contexts had size 0. Without estimates, the offer excludes only
    /// memory that is certainly unavailable.
    fn offer_as_measured(&self, gpu: GpuId) -> u64;
    /// Bytes that limits could rely on if no other program used the GPU. `None`: the GPU was never
    /// measured.
    fn offer_at_best(&self, gpu: GpuId) -> Option<u64>;
    /// The estimated size of an unmeasured context, in bytes.
    fn context(&self, gpu: GpuId) -> u64;
    /// Whether all memory on the GPU belongs to this client, or can be evicted for it.
    fn can_be_whole(&self, gpu: GpuId, client: ClientId) -> bool;
    /// Whether clients are waiting to create a context on the GPU. Such clients also wait for their
    /// first limit.
    fn is_attaching(&self, gpu: GpuId) -> bool;
}

/// The state outside the quota that the quota's decisions depend on.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub now: Time,
    pub rules: &'a Rules,
    pub gpus: &'a dyn Capacities,
}

/// The limits of all clients on all GPUs.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Quota {
    gpus: BTreeMap<GpuId, GpuLimits>,
    host: Host,
    ahead: Ahead,
    /// Clients whose process is stopped and acknowledges nothing.
    stopped: BTreeSet<ClientId>,
    /// Clients that are off their GPUs, or are leaving or returning. Their limit is their present
    /// memory.
    asleep: BTreeSet<ClientId>,
    /// Limit requests that are neither granted nor denied. Only `set_wanted` changes them.
    requests: BTreeSet<(GpuId, ClientId)>,
    /// The sum of `Wanted::beyond` over `requests`. A client may request any number of bytes, so the sum
    /// may exceed 64 bits.
    requested_beyond: u128,
    /// Clients for which room was set aside since the last call of `take_expected`.
    expected: BTreeSet<ClientId>,
    /// Limits below their target while host memory is scarce. These limits rise as other clients
    /// acknowledge lower limits.
    rising: BTreeSet<(GpuId, ClientId)>,
    /// Lowered limits that their clients have not acknowledged.
    falling: BTreeSet<(GpuId, ClientId)>,
}

/// The limits on one GPU, and their sums.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
struct GpuLimits {
    clients: BTreeMap<ClientId, ClientLimit>,
    /// The clients' demands, smallest first. Demands of 0 are left out.
    demands: BTreeSet<(u64, ClientId)>,
    held_requests: BTreeMap<ClientId, HeldRequest>,
    coming: BTreeMap<ClientId, Coming>,
    /// Σ committed, including memory set aside for clients in `coming`.
    committed: u64,
    /// The part of `committed` that belongs to each group.
    by_group: BTreeMap<GroupId, u64>,
    /// The bytes of `committed` beyond the GPU's offer.
    in_host: u64,
    /// The bytes of Σ max(demand, offer) beyond the GPU's offer.
    most_in_host: u64,
    /// The offer that `most_in_host` was computed for. `None`: a client or a demand has changed
    /// since that computation.
    summed_for: Option<u64>,
    /// The offer and the number of clients when limits were last computed. A computation for new
    /// clients alone does not count.
    solved_for: Option<(u64, usize)>,
    /// Clients that attached since limits were last computed.
    fresh: BTreeSet<ClientId>,
}

#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
struct ClientLimit {
    limit: Limit,
    /// The size of the client's context, if it was measured.
    context: Option<u64>,
    /// The client was sent a limit, so it may have a context.
    is_told: bool,
}

impl GpuLimits {
    /// Bytes that would be in host memory if every client used a whole GPU, or its demand if that
    /// is larger.
    fn most_in_host(&self, offer: u64) -> u64 {
        let all = offer.saturating_mul((self.clients.len() + self.coming.len()) as u64);
        let beyond = self.demands.range((offer, ClientId(u64::MAX))..).map(|(demand, _)| demand.saturating_sub(offer));
        let coming = self.coming.values().map(|coming| coming.bytes.saturating_sub(offer));
        let most = beyond.chain(coming).fold(all, u64::saturating_add).saturating_sub(offer);
        debug_assert_eq!(most, {
            let needs =
                self.clients.values().map(|entry| entry.limit.demand()).chain(self.coming.values().map(|c| c.bytes));
            needs.map(|bytes| bytes.max(offer)).fold(0, u64::saturating_add).saturating_sub(offer)
        });
        most
    }

    /// Updates the order of demands. Demands of 0 are left out.
    fn demand_changed(&mut self, client: ClientId, before: u64, after: u64) {
        self.demands.remove(&(before, client));
        self.demands.extend((after > 0).then_some((after, client)));
        self.summed_for = None;
    }

    /// Updates the sums after one client's committed bytes have changed.
    fn count(&mut self, group: Option<GroupId>, before: u64, after: u64) {
        self.committed = self.committed - before + after;
        self.count_for(group, before, after);
    }

    fn count_for(&mut self, group: Option<GroupId>, before: u64, after: u64) {
        let Some(group) = group else { return };
        let sum = self.by_group.entry(group).or_default();
        *sum = *sum - before + after;
        if *sum == 0 {
            self.by_group.remove(&group);
        }
    }
}

impl Quota {
    pub fn gpu_found(&mut self, id: GpuId) {
        self.gpus.entry(id).or_default();
    }

    /// Forgets a GPU that no client has attached.
    pub fn gpu_forgotten(&mut self, id: GpuId) {
        let Some(gpu) = self.gpus.remove(&id) else { return };
        self.host.committed -= gpu.in_host;
        self.host.most -= gpu.most_in_host;
        self.check_scarcity();
    }

    pub fn disconnected(&mut self, client: ClientId) {
        self.stopped.remove(&client);
    }

    pub fn set_stopped(&mut self, client: ClientId, is_stopped: bool) {
        if is_stopped {
            self.stopped.insert(client);
        } else if self.stopped.remove(&client) {
            self.host.answers_again();
        }
    }

    /// The size of a client's context, if it was measured.
    pub fn measured_context(&self, client: ClientId, id: GpuId) -> Option<u64> {
        self.entry(client, id)?.context
    }

    pub fn host_memory(&mut self, bytes: u64) {
        self.host.found(bytes);
    }

    /// Marks the limits on a GPU for recomputation.
    pub fn mark_changed(&mut self, id: GpuId) {
        self.host.mark_changed(id);
    }

    pub fn mark_all_changed(&mut self) {
        self.host.mark_all_changed();
    }

    /// Whether limits have to be recomputed.
    pub fn has_changed(&self) -> bool {
        self.host.has_changed()
    }

    /// Marks the limits on a GPU for recomputation if the client's memory is limited. The limits
    /// then depend on its demand.
    fn mark_bounded_changed(&mut self, cx: Context, client: ClientId, id: GpuId) {
        if cx.rules.is_bounded(client) {
            self.host.mark_changed(id);
        }
    }

    /// Whether a client does not acknowledge lower limits. The memory of such a client cannot be
    /// promised to other clients.
    fn is_unresponsive(&self, cx: Context, client: ClientId, limit: &Limit) -> bool {
        self.stopped.contains(&client)
            || !limit.is_responsive()
            || limit.lowered.is_some_and(|at| cx.now.saturating_sub(at) >= ACK_TIMEOUT)
    }

    /// Records the limit that a client has requested. `None`: the request has ended.
    fn set_wanted(&mut self, client: ClientId, id: GpuId, wanted: Option<Wanted>) {
        let Some(entry) = self.entry_mut(client, id) else { return };
        let beyond = |wanted: Option<Wanted>| wanted.map_or(0, |wanted| u128::from(wanted.beyond));
        let before = beyond(std::mem::replace(&mut entry.limit.wanted, wanted));
        self.requested_beyond = self.requested_beyond - before + beyond(wanted);
        if wanted.is_some() {
            self.requests.insert((id, client));
        } else {
            self.requests.remove(&(id, client));
        }
    }

    /// Sends a client its limit.
    pub fn tell(&self, cx: Context, fx: &mut Effects, client: ClientId, id: GpuId) {
        let Some(Limit { limit: bytes, seq, .. }) = self.limit(client, id) else { return };
        let (bytes, seq) = (*bytes, *seq);
        let spare = if self.host.is_scarce() || self.ahead.is_host_short() { 0 } else { u64::MAX };
        // `most` includes room that unmeasured contexts may leave. A request for that room is held
        // until the contexts are measured.
        let most = cx.gpus.offer_as_measured(id);
        // A limit may exceed the GPU for managed memory. Other memory must fit there.
        let most = if cx.rules.may_exceed_gpu(client) { most } else { most.max(bytes) };
        let max = cx.rules.lowest_max(client, cx.gpus.total(id));
        fx.command(Command::Limit { client, gpu: id, bytes, seq, most, spare, max });
    }

    /// Sends a client its limit again after its bounds have changed. Does nothing if the client was
    /// never sent a limit.
    pub fn tell_again(&self, cx: Context, fx: &mut Effects, client: ClientId, id: GpuId) {
        if self.entry(client, id).is_some_and(|entry| entry.is_told) {
            self.tell(cx, fx, client, id);
        }
    }

    /// Schedules a recomputation of limits for `at`, unless an earlier one is scheduled.
    fn balance_at(fx: &mut Effects, at: Time) {
        fx.wake(Wake::Limits, Some(fx.wakes_at(Wake::Limits).map_or(at, |set| set.min(at))));
    }

    fn entry_mut(&mut self, client: ClientId, id: GpuId) -> Option<&mut ClientLimit> {
        self.gpus.get_mut(&id)?.clients.get_mut(&client)
    }

    fn entry(&self, client: ClientId, id: GpuId) -> Option<&ClientLimit> {
        self.gpus.get(&id)?.clients.get(&client)
    }

    pub fn limit(&self, client: ClientId, id: GpuId) -> Option<&Limit> {
        Some(&self.entry(client, id)?.limit)
    }

    /// A client's limits on all GPUs.
    fn limits_of(&self, client: ClientId) -> impl Iterator<Item = (GpuId, &Limit)> {
        self.gpus.iter().filter_map(move |(id, gpu)| Some((*id, &gpu.clients.get(&client)?.limit)))
    }

    /// GPUs that a client has attached.
    pub fn gpus_of(&self, client: ClientId) -> GpuSet {
        self.limits_of(client).map(|(id, _)| id).collect()
    }

    /// Σ committed on a GPU.
    pub fn committed(&self, id: GpuId) -> u64 {
        self.gpus.get(&id).map_or(0, |gpu| gpu.committed)
    }

    /// Bytes of host memory that limits may rely on (`None`: unbounded), and the bytes that they
    /// rely on now.
    pub fn host(&self) -> (Option<u64>, u64) {
        (self.host.bytes(), self.host.committed)
    }
}
