//! Requests for a higher limit, each of which an allocation waits for. A request that can be met is granted, any other is denied or,
//! where a rule says so, waits until other members of the group have freed enough, in the order that the rule sets.
//!
//! If every client that could free memory waits itself, the latest request is denied: otherwise all would wait for ever.

use crate::{
    api::*,
    machine::{Client, Machine},
    quota::limit::LIMIT_REQUEST_TIMEOUT,
    quota::limit_state::Wanted,
    quota::solver::{At, QuotaProblem, Target},
};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// A wish while all promises are weighed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LimitRequest {
    pub client: ClientId,
    pub gpu: GpuId,
    pub group: Option<GroupId>,
    pub wanted: Wanted,
    pub at: At,
}

impl WaitOrder {
    /// The smaller, the sooner. `lacks`: the bytes that it waits for.
    fn rank(self, number: u64, lacks: u64) -> (u64, u64) {
        match self {
            Self::Fifo => (0, number),
            // Of those that can be had, the one that leaves least.
            Self::BestFit => (u64::MAX - lacks, number),
            Self::MostRecent => (0, u64::MAX - number),
            // The same for a wish whenever it is asked, so that nobody's chances change by asking.
            Self::Random => (scattered(number), number),
        }
    }
}

/// The finalizer of SplitMix64: neighbours are far from each other.
fn scattered(number: u64) -> u64 {
    let z = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Machine {
    /// `hopes`: more than there is room for is refused only after another measurement.
    pub(crate) fn request_limit(&mut self, client: ClientId, id: GpuId, bytes: u64, held_requests: bool) {
        let (now, number) = (self.now, self.count());
        let Some(capacity) = self.gpus.get(&id).map(|g| g.offer(&self.settings)) else { return };
        // What its fellows have may become free, but not what it has itself.
        let own = self.attachment(client, id).map_or(0, |attachment| self.context(attachment, id));
        let max = self.memory_max(client, id).map(|max| max.saturating_sub(own));
        let swap_max = self.swap_max(client);
        let beyond = |max: Option<u64>| max.is_some_and(|max| bytes > max);
        let Some(limit_state) = self.attachment(client, id).map(|attachment| &attachment.limit_state) else { return };
        // What it has already it may keep.
        let never = if bytes <= limit_state.limit.max(limit_state.demand()) {
            return self.tell_limit(client, id);
        } else if held_requests && self.await_context_sample(client, id, bytes) {
            return;
        } else if beyond(self.client_bound(client, id)) || beyond(self.client_swap_max(client)) {
            Some(Denial::EnvLimit)
        } else if beyond(max) {
            Some(Denial::MemoryMax)
        } else if beyond(swap_max) {
            Some(Denial::SwapMax)
        } else if bytes > capacity {
            if held_requests && self.await_sample(client, id, bytes) {
                return;
            }
            Some(Denial::NoRoom)
        } else {
            None
        };
        let Some(limit_state) = self.attachment_mut(client, id).map(|attachment| &mut attachment.limit_state) else {
            return;
        };
        if let Some(why) = never {
            limit_state.wanted = None;
            self.out.push(Command::Denied { client, gpu: id, bytes, why });
        } else {
            // Who asks again keeps its place.
            let fresh = Wanted { bytes, since: now, number, held: None };
            limit_state.wanted = Some(limit_state.wanted.map_or(fresh, |before| Wanted { bytes, ..before }));
            self.host.mark_all_changed();
        }
    }

    /// What happens to a wish of that client which cannot be had now: as it says itself, or else its rule.
    fn on_full(&self, client: ClientId) -> OnMemoryFull {
        let group = self.clients.get(&client).and_then(|state| self.groups.get(&state.group?));
        let ruled = group.map_or(OnMemoryFull::Fail, |members| members.limits.on_memory_full);
        match self.client_limits.get(&client).and_then(|own| own.waits) {
            Some(false) => OnMemoryFull::Fail,
            Some(true) if ruled == OnMemoryFull::Fail => OnMemoryFull::Wait(WaitOrder::default()),
            Some(true) | None => ruled,
        }
    }

    /// Whether that client's allocations wait where they cannot be had.
    pub(crate) fn waits_for_memory(&self, client: ClientId) -> bool {
        self.on_full(client) != OnMemoryFull::Fail
    }

    /// Grants what can be had, in order, and denies what cannot, unless that waits.
    pub(crate) fn serve_limit_requests(
        &mut self,
        problem: &mut QuotaProblem,
        requests: Vec<LimitRequest>,
        budget: Option<u64>,
    ) -> Vec<At> {
        let mut granted = Vec::new();
        // Where one waits that is served before all who came later.
        let mut held: BTreeMap<(GroupId, GpuId), Denial> = BTreeMap::new();
        self.host.awaited = false;
        for waiting in self.in_order(problem, requests) {
            let LimitRequest { client, gpu, group, wanted, at } = waiting;
            let (waits, is_fifo) = match self.on_full(client) {
                OnMemoryFull::Fail => (false, false),
                OnMemoryFull::Wait(order) => (true, order == WaitOrder::Fifo),
            };
            let place = group.map(|group| (group, gpu)).filter(|_| is_fifo);
            if let Some(why) = place.and_then(|place| held.get(&place).copied()) {
                self.hold_back(client, gpu, why);
                continue;
            }
            match problem.grant(at, wanted.bytes, budget) {
                Ok(()) => granted.push(at),
                // What it does not allow itself nobody else can give it.
                Err(why) if waits && why != Denial::EnvLimit => {
                    held.extend(place.map(|place| (place, why)));
                    self.hold_back(client, gpu, why);
                }
                Err(why) => self.deny(client, gpu, why),
            }
        }
        granted
    }

    /// By their numbers; but those of one group take each other's places, as its rule orders them.
    fn in_order(&self, problem: &QuotaProblem, mut requests: Vec<LimitRequest>) -> Vec<LimitRequest> {
        requests.sort_unstable_by_key(|waiting| waiting.wanted.number);
        let mut groups: BTreeMap<GroupId, Vec<LimitRequest>> = BTreeMap::new();
        let mut orders = BTreeMap::new();
        for waiting in &requests {
            let Some(group) = waiting.group else { continue };
            if let OnMemoryFull::Wait(order) = self.on_full(waiting.client) {
                groups.entry(group).or_default().push(*waiting);
                orders.insert(group, order);
            }
        }
        for (group, members) in &mut groups {
            let order = orders.get(group).copied().unwrap_or_default();
            let rank = |w: &LimitRequest| order.rank(w.wanted.number, problem.lacks(w.at, w.wanted.bytes));
            members.sort_unstable_by_key(|waiting| Reverse(rank(waiting)));
        }
        let next = |waiting: LimitRequest| {
            let waits = self.on_full(waiting.client) != OnMemoryFull::Fail;
            let own = waiting.group.filter(|_| waits).and_then(|group| groups.get_mut(&group));
            own.and_then(Vec::pop).unwrap_or(waiting)
        };
        requests.into_iter().map(next).collect()
    }

    /// A wish waits for what others have, and its client knows that.
    fn hold_back(&mut self, client: ClientId, gpu: GpuId, why: Denial) {
        self.host.awaited = true;
        let wanted = self.attachment_mut(client, gpu).and_then(|attachment| attachment.limit_state.wanted.as_mut());
        if wanted.is_some_and(|wanted| wanted.held.replace(why).is_none()) {
            self.out.push(Command::Waiting { client, gpus: GpuSet::from([gpu]), why: WaitReason::Memory });
        }
    }

    /// Ends wishes that are fulfilled, or have waited for too long.
    pub(crate) fn finish_limit_requests(&mut self, solved: &[Target]) {
        let now = self.now;
        let attachments = solved.iter().filter_map(|t| Some((t.client, t.gpu, self.attachment(t.client, t.gpu)?)));
        let requests = attachments.filter_map(|(client, id, attachment)| {
            let limit_state = &attachment.limit_state;
            Some((client, id, limit_state.wanted?, limit_state.limit, limit_state.target))
        });
        for (client, id, wanted, limit, target) in requests.collect::<Vec<_>>() {
            let until = wanted.since + LIMIT_REQUEST_TIMEOUT;
            let waits = self.on_full(client) != OnMemoryFull::Fail;
            if wanted.bytes <= limit {
                if let Some(attachment) = self.attachment_mut(client, id) {
                    attachment.limit_state.wanted = None;
                }
            } else if waits && (wanted.bytes <= target || !self.is_last_of_all(client, wanted.held)) {
                continue; // those who can free something will, or have, and only have to take notice
            } else if until <= now {
                let is_full = self.group_room(client, id).is_none_or(|room| room < wanted.bytes - limit);
                self.deny(client, id, if is_full { Denial::MemoryMax } else { Denial::NoRoom });
            } else {
                self.solve_at(until);
            }
        }
    }

    /// Whether all who have memory that this wish could be given wait themselves, and it is the newest of theirs.
    fn is_last_of_all(&self, client: ClientId, held: Option<Denial>) -> bool {
        let wanted = |state: &Client| {
            let requests = state.attachments.values().filter_map(|attachment| attachment.limit_state.wanted);
            requests.max_by_key(|wanted| wanted.number)
        };
        let has_some =
            |state: &Client| state.attachments.values().any(|attachment| attachment.limit_state.demand() > 0);
        let Some(own) = self.clients.get(&client) else { return false };
        let number = wanted(own).map(|wanted| wanted.number);
        let (mut group, mut everybody) = (true, true);
        let others = self.clients.iter().filter(|(other, state)| **other != client && has_some(state));
        for (_, state) in others {
            let newest = wanted(state).filter(|wanted| Some(wanted.number) < number);
            everybody &= newest.is_some();
            // What a fellow waits for may come from others.
            let is_same_owner = state.group == own.group && own.group.is_some();
            group &= !is_same_owner || newest.is_some_and(|wanted| wanted.held != Some(Denial::NoRoom));
            if !(group || everybody) {
                return false;
            }
        }
        everybody || (group && held != Some(Denial::NoRoom))
    }

    fn deny(&mut self, client: ClientId, id: GpuId, why: Denial) {
        let Some(wanted) = self.attachment_mut(client, id).and_then(|s| s.limit_state.wanted.take()) else { return };
        self.out.push(Command::Denied { client, gpu: id, bytes: wanted.bytes, why });
    }
}
