//! Computes every client's limit at one moment, from demands, requests, capacities, host memory and
//! the limits of groups. The method is max-min fairness by water-filling. The water level is the
//! *slack* that every client gets beyond its demand. The use of host memory grows with the slack,
//! so a search finds the highest possible slack. `balance` moves limits to the result.

use super::{Context, Quota, request::LimitRequest};
use crate::{api::*, effects::Effects};
use std::collections::BTreeMap;

/// A client's new limit on a GPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    pub client: ClientId,
    pub gpu: GpuId,
    pub bytes: u64,
    /// The limit is sent even if it differs only slightly from the client's present limit.
    pub exact: bool,
    /// The highest sum of the demands of the client's group on the GPU. `None`: no limit.
    pub bound: Option<u64>,
}

/// The indices of a client's quota and its GPU in the problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct At {
    gpu: usize,
    quota: usize,
}

/// The variables of one client on one GPU, in bytes.
#[derive(Debug)]
struct ClientQuota {
    client: ClientId,
    /// The smallest limit of the client, regardless of other clients.
    floor: u64,
    /// The client's demand, to which slack is added.
    base: u64,
    /// The limit that was requested and granted. 0: no request was granted.
    granted: u64,
    /// The largest limit of the client, unless the floor is higher.
    most: u64,
    /// The highest slack that the client's group allows it. 0 while the client is off its GPUs.
    slack: u64,
    /// The client's highest limit if the group exceeds the group's bound.
    cap: u64,
    /// The client does not acknowledge limits.
    unresponsive: bool,
    exact: bool,
    bound: Option<u64>,
}

impl ClientQuota {
    /// The variables of a client that is about to be moved to the GPU. Its limit is fixed and
    /// includes its context.
    fn fixed(client: ClientId, bytes: u64) -> Self {
        Self {
            client,
            floor: bytes,
            base: bytes,
            granted: 0,
            most: bytes,
            slack: 0,
            cap: u64::MAX,
            unresponsive: true,
            exact: false,
            bound: None,
        }
    }

    /// The client's limit if all clients get this slack.
    fn at(&self, slack: u64) -> u64 {
        self.base.saturating_add(slack.min(self.slack)).min(self.most).max(self.floor)
    }

    /// The fewest bytes that the client needs after it has acknowledged a lower limit.
    fn acknowledged(&self) -> u64 {
        if self.unresponsive { self.base.max(self.granted) } else { self.at(0) }
    }

    /// The client's limit under `cap`, for a group that exceeds its bound.
    fn capped(&self, cap: u64) -> u64 {
        if self.unresponsive { self.floor } else { self.at(0).min(cap) }
    }
}

/// The variables of one GPU.
#[derive(Debug)]
struct GpuQuota {
    id: GpuId,
    capacity: u64,
    quotas: Vec<ClientQuota>,
    /// A client is waiting for its first limit.
    attaching: bool,
}

/// A bound on the sum of the limits of a group's members.
#[derive(Debug)]
struct Bound {
    max: u64,
    why: Denial,
    quotas: Vec<At>,
}

#[derive(Debug, Default)]
pub(super) struct QuotaProblem {
    gpus: Vec<GpuQuota>,
    bounds: Vec<Bound>,
}

impl QuotaProblem {
    fn quota(&self, at: At) -> Option<&ClientQuota> {
        self.gpus.get(at.gpu)?.quotas.get(at.quota)
    }

    fn quota_mut(&mut self, at: At) -> Option<&mut ClientQuota> {
        self.gpus.get_mut(at.gpu)?.quotas.get_mut(at.quota)
    }

    /// Bytes in host memory if every client has this slack and uses its whole limit.
    fn in_host(&self, slack: u64) -> u64 {
        let excess = |gpu: &GpuQuota| {
            let sum = gpu.quotas.iter().fold(0u64, |sum, quota| sum.saturating_add(quota.at(slack)));
            sum.saturating_sub(gpu.capacity)
        };
        self.gpus.iter().fold(0, |sum, gpu| sum.saturating_add(excess(gpu)))
    }

    /// Sums the results of `of` over a bound's members.
    fn used(&self, bound: &Bound, of: impl Fn(&ClientQuota) -> u64) -> u64 {
        bound.quotas.iter().filter_map(|at| self.quota(*at)).fold(0, |sum, quota| sum.saturating_add(of(quota)))
    }

    /// Raises a client's floor to `bytes`.
    ///
    /// # Errors
    /// The group's bound, the client's own maximum or the budget does not allow the new floor.
    /// Nothing has changed in this case.
    pub fn grant(&mut self, at: At, bytes: u64, budget: Option<u64>) -> Result<(), Denial> {
        if let Some(why) = self.obstacle(at, bytes, budget, |quota| quota.at(0)) {
            return Err(why);
        }
        let quota = self.quota_mut(at).ok_or(Denial::NoRoom)?;
        quota.floor = quota.floor.max(bytes);
        quota.granted = bytes;
        Ok(())
    }

    /// Whether a request that cannot be granted now could be granted once late clients have
    /// acknowledged lower limits.
    pub fn is_possible_later(&self, at: At, bytes: u64, budget: Option<u64>) -> bool {
        self.obstacle(at, bytes, budget, ClientQuota::acknowledged).is_none()
    }

    /// The reason why a client cannot have `bytes` while each other client has the bytes that `of`
    /// returns for it. `None`: the client can have them.
    fn obstacle(&self, at: At, bytes: u64, budget: Option<u64>, of: impl Fn(&ClientQuota) -> u64) -> Option<Denial> {
        let Some(own) = self.quota(at) else { return Some(Denial::NoRoom) };
        let more = bytes.saturating_sub(of(own));
        let broken = self.bounds.iter().filter(|bound| more > 0 && bound.quotas.contains(&at)).find(|bound| {
            let before = self.used(bound, &of);
            before.saturating_add(more) > bound.max
        });
        if let Some(bound) = broken {
            return Some(bound.why);
        }
        let host = |more: u64| {
            let excess = |(place, gpu): (usize, &GpuQuota)| {
                let sum = gpu.quotas.iter().fold(0u64, |sum, quota| sum.saturating_add(of(quota)));
                let sum = if place == at.gpu { sum.saturating_add(more) } else { sum };
                sum.saturating_sub(gpu.capacity)
            };
            self.gpus.iter().enumerate().fold(0u64, |sum, gpu| sum.saturating_add(excess(gpu)))
        };
        let lacks_host = |budget: u64| {
            let after = host(more);
            after > budget && after > host(0)
        };
        let no_room = bytes > own.most.max(own.floor) || budget.is_some_and(lacks_host);
        no_room.then_some(Denial::NoRoom)
    }

    /// Divides each group's bound among its members. `granted`: clients whose request was granted
    /// and who wait for the new limit.
    fn divide(&mut self, granted: &[At]) {
        for bound in std::mem::take(&mut self.bounds) {
            // The highest value, up to `most`, that keeps the sum of the members within the bound.
            let highest = |most: u64, used: &dyn Fn(u64) -> u64| {
                let (mut low, mut high) = (0, most);
                while low < high {
                    let middle = low + (high - low).div_ceil(2);
                    if used(middle) <= bound.max { low = middle } else { high = middle - 1 }
                }
                low
            };
            let over = self.used(&bound, |quota| quota.at(0)) > bound.max;
            let (slack, cap) = if over {
                (0, highest(bound.max, &|cap| self.used(&bound, |quota| quota.capped(cap))))
            } else {
                (highest(bound.max, &|slack| self.used(&bound, |quota| quota.at(slack))), u64::MAX)
            };
            let awaited = bound
                .quotas
                .iter()
                .any(|at| granted.contains(at) || self.gpus.get(at.gpu).is_some_and(|gpu| gpu.attaching));
            // Even small changes of these limits are sent if the group exceeds its bound, a client
            // waits, or the bound has one member. Otherwise they are not worth the messages.
            let exact = over || awaited || bound.quotas.len() == 1;
            for at in bound.quotas {
                if let Some(quota) = self.quota_mut(at) {
                    (quota.slack, quota.exact) = (slack.min(quota.slack), exact || quota.exact);
                    quota.cap = if quota.unresponsive { u64::MAX } else { cap.min(quota.cap) };
                }
            }
        }
    }

    /// The highest slack that all clients can have within the budget. The use of host memory grows
    /// mostly in proportion to the slack, so the search interpolates the next slack to try. Every
    /// second step tries the middle of the interval, which bounds the number of steps.
    fn slack(&self, budget: Option<u64>) -> u64 {
        let budget = budget.unwrap_or(u64::MAX);
        let (mut low, mut high) = (0, self.gpus.iter().map(|gpu| gpu.capacity).max().unwrap_or(0));
        let (mut low_uses, mut high_uses) = (self.in_host(low), self.in_host(high));
        if high_uses <= budget {
            return high;
        }
        if low_uses > budget {
            return low;
        }
        for step in 1u32.. {
            let width = high - low;
            if width <= 1 {
                break;
            }
            let part = u128::from(width) * u128::from(budget - low_uses) / u128::from(high_uses - low_uses);
            let by = if step.is_multiple_of(2) { width / 2 } else { u64::try_from(part).unwrap_or(width) };
            let next = low + by.clamp(1, width - 1);
            let uses = self.in_host(next);
            if uses <= budget {
                (low, low_uses) = (next, uses);
            } else {
                (high, high_uses) = (next, uses);
            }
        }
        low
    }
}

impl Quota {
    /// Returns the target of each client. Clients with granted requests come first, in the order of
    /// their requests. Denies requests that cannot be met. Without a budget, handles only clients
    /// that a rule or an environment limits.
    pub(super) fn solve(&mut self, cx: Context, fx: &mut Effects, budget: Option<u64>, ids: &GpuSet) -> Vec<Target> {
        let (mut problem, requests) = self.load(cx, budget, ids);
        let granted = self.serve_requests(cx, fx, &mut problem, requests, budget);
        problem.divide(&granted);
        let slack = problem.slack(budget);
        // Each other client may keep an excess of less than one step above its target. Together,
        // these excesses may be the bytes that a granted request lacks, so even small changes are
        // sent.
        let is_awaited = budget.is_some() && !granted.is_empty();
        let target = |gpu: &GpuQuota, quota: &ClientQuota| Target {
            client: quota.client,
            gpu: gpu.id,
            bytes: quota.at(slack).min(quota.cap),
            exact: quota.exact || is_awaited,
            bound: quota.bound,
        };
        let first = granted.iter().filter_map(|at| Some(target(problem.gpus.get(at.gpu)?, problem.quota(*at)?)));
        let all = problem.gpus.iter().flat_map(|gpu| gpu.quotas.iter().map(|quota| target(gpu, quota)));
        first.chain(all).collect()
    }

    /// Builds the problem from the present state, and lists the requests.
    fn load(&self, cx: Context, budget: Option<u64>, ids: &GpuSet) -> (QuotaProblem, Vec<LimitRequest>) {
        let mut problem = QuotaProblem::default();
        let mut requests = Vec::new();
        // The bounds of each group: on one GPU (`Some`: the GPU's index), or over all GPUs
        // (`None`).
        let mut bounds: BTreeMap<(GroupId, Option<usize>), Bound> = BTreeMap::new();
        for (id, gpu) in ids.iter().filter_map(|id| Some((*id, self.gpus.get(id)?))) {
            let mut quotas = Vec::new();
            let (capacity, total) = (cx.gpus.offer(id), cx.gpus.total(id));
            for (client, limit) in gpu.clients.iter().map(|(client, entry)| (*client, &entry.limit)) {
                if budget.is_none() && !cx.rules.is_bounded(client) {
                    continue;
                }
                let at = At { gpu: problem.gpus.len(), quota: quotas.len() };
                let unresponsive = self.is_unresponsive(cx, client, limit);
                let floor = if unresponsive { limit.committed() } else { limit.needed(cx.now) };
                let group = cx.rules.group(client);
                if let Some(wanted) = limit.wanted {
                    requests.push(LimitRequest { client, gpu: id, group, wanted, at });
                }
                for (max, why, context) in [
                    (cx.rules.memory_max(client, total), Denial::MemoryMax, self.context(cx, client, id)),
                    (cx.rules.swap_max(client), Denial::SwapMax, 0),
                ] {
                    let (Some(group), Some(max)) = (group, max) else { continue };
                    let gpu = (why == Denial::MemoryMax).then_some(at.gpu);
                    let bound = bounds.entry((group, gpu)).or_insert(Bound { max, why, quotas: Vec::new() });
                    bound.max = bound.max.saturating_sub(context);
                    bound.quotas.push(at);
                }
                let env_bound = self.env_bound(cx, client, id);
                let capacity = capacity.max(self.reach_beyond(cx, client, id));
                quotas.push(ClientQuota {
                    base: limit.demand(),
                    most: env_bound.map_or(capacity, |max| max.min(capacity)),
                    slack: if self.asleep.contains(&client) { 0 } else { u64::MAX },
                    unresponsive,
                    exact: env_bound.is_some(),
                    ..ClientQuota::fixed(client, floor)
                });
            }
            for (client, coming) in &gpu.coming {
                let at = At { gpu: problem.gpus.len(), quota: quotas.len() };
                let (group, max) = (cx.rules.group(*client), cx.rules.memory_max(*client, total));
                if let Some((group, max)) = group.zip(max) {
                    let fresh = Bound { max, why: Denial::MemoryMax, quotas: Vec::new() };
                    let bound = bounds.entry((group, Some(at.gpu))).or_insert(fresh);
                    bound.quotas.push(at);
                } else if budget.is_none() {
                    continue;
                }
                quotas.push(ClientQuota::fixed(*client, coming.bytes));
            }
            problem.gpus.push(GpuQuota { id, capacity, quotas, attaching: cx.gpus.is_attaching(id) });
        }
        problem.bounds = bounds.into_values().collect();
        for bound in &problem.bounds {
            for at in bound.quotas.iter().filter(|_| bound.why == Denial::MemoryMax) {
                let quota = problem.gpus.get_mut(at.gpu).and_then(|gpu| gpu.quotas.get_mut(at.quota));
                quota.into_iter().for_each(|quota| quota.bound = Some(bound.max));
            }
        }
        (problem, requests)
    }
}
