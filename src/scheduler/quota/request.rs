//! Requests for a higher limit. The client's allocation blocks until its request is answered. A
//! request that can be met is granted. Any other request is denied once acknowledgements of lower
//! limits can no longer help. If a rule says so, the request waits instead until other clients have
//! freed enough memory. A group's oldest waiting request is served first.
//!
//! If all clients that could free memory are waiting themselves, the clients are in a deadlock. The
//! newest request is then denied.

use super::{
    Context, Quota,
    held::HeldRequest,
    limit::{Limit, Wanted},
    solver::{At, QuotaProblem},
};
use crate::{api::*, effects::Effects};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How long a request waits for other clients to acknowledge lower limits before it is denied. A
/// process may be unable to answer for seconds while the driver creates contexts for several
/// programs at once.
const LIMIT_REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// A limit request while all limits are being computed.
#[derive(Debug, Clone, Copy)]
pub(super) struct LimitRequest {
    pub client: ClientId,
    pub gpu: GpuId,
    pub group: Option<GroupId>,
    pub wanted: Wanted,
    pub at: At,
}

impl Quota {
    /// Handles a client's request for a limit of `bytes`. Returns whether the request needs a
    /// measurement that begins now.
    #[must_use]
    pub fn request(&mut self, cx: Context, fx: &mut Effects, client: ClientId, id: GpuId, bytes: u64) -> bool {
        self.decide_request(cx, fx, client, id, bytes, None)
    }

    /// Decides on a request. A request that exceeds the present room is denied only after another
    /// measurement, and never because of an estimate alone. `held`: the request was held for such a
    /// measurement. Returns whether the request needs a measurement that begins now.
    pub(super) fn decide_request(
        &mut self,
        cx: Context,
        fx: &mut Effects,
        client: ClientId,
        id: GpuId,
        bytes: u64,
        held: Option<HeldRequest>,
    ) -> bool {
        let number = fx.number();
        let Some(limit) = self.limit(client, id) else { return false };
        let before = limit.wanted;
        // Other members of the group may free memory, but the client's own context stays allocated.
        let context = self.context(cx, client, id);
        let memory_max = cx.rules.memory_max(client, cx.gpus.total(id)).map(|max| max.saturating_sub(context));
        let is_beyond = |max: Option<u64>| max.is_some_and(|max| bytes > max);
        // Requests up to the client's present memory are always granted.
        let never = if bytes <= limit.limit.max(limit.demand()) {
            self.keep(cx, client, id, bytes);
            self.tell(cx, fx, client, id);
            return false;
        } else if held.is_none() && self.hold_for_context(cx, client, id, bytes) {
            return self.schedule_samples(cx, fx, id);
        } else if is_beyond(self.env_bound(cx, client, id)) {
            Some(Denial::EnvLimit)
        } else if is_beyond(memory_max) {
            Some(Denial::MemoryMax)
        } else if is_beyond(cx.rules.swap_max(client)) {
            Some(Denial::SwapMax)
        } else if bytes > cx.gpus.offer(id) && !self.may_exceed(cx, client, id) {
            let is_held = match held {
                None => self.hold_for_room(cx, client, id, bytes),
                Some(before) => self.hold_for_contexts(cx, fx, client, id, before),
            };
            if is_held {
                return self.schedule_samples(cx, fx, id);
            }
            Some(Denial::NoRoom)
        } else {
            None
        };
        if let Some(why) = never {
            self.set_wanted(client, id, None);
            fx.command(Command::Denied { client, gpu: id, bytes, why });
        } else {
            // If a client repeats its request, the request keeps its place in the order.
            let has = self.limit(client, id).map_or(0, Limit::demand).max(cx.gpus.offer(id));
            let fresh = Wanted { bytes, since: cx.now, number, beyond: bytes.saturating_sub(has), held: None };
            self.set_wanted(
                client,
                id,
                Some(before.map_or(fresh, |before| Wanted { bytes, beyond: fresh.beyond, ..before })),
            );
            self.host.mark_all_changed();
        }
        false
    }

    /// Grants the requests that can be met, in order. Denies the other requests, except if a rule
    /// lets a request wait, or outstanding acknowledgements could still help. Returns the granted
    /// requests.
    pub(super) fn serve_requests(
        &mut self,
        cx: Context,
        fx: &mut Effects,
        problem: &mut QuotaProblem,
        mut requests: Vec<LimitRequest>,
        budget: Option<u64>,
    ) -> Vec<At> {
        let mut granted = Vec::new();
        // Groups with a waiting request, each with the reason. The waiting request is served before
        // all later requests of its group.
        let mut held: BTreeMap<(GroupId, GpuId), Denial> = BTreeMap::new();
        self.host.awaited = false;
        requests.sort_unstable_by_key(|request| request.wanted.number);
        for request in requests {
            let LimitRequest { client, gpu, group, wanted, at } = request;
            let waits = cx.rules.waits_for_memory(client);
            let place = group.map(|group| (group, gpu)).filter(|_| waits);
            if let Some(why) = place.and_then(|place| held.get(&place).copied()) {
                self.hold_back(fx, client, gpu, why);
                continue;
            }
            match problem.grant(at, wanted.bytes, budget) {
                Ok(()) => granted.push(at),
                // The client's own environment limit stays the same when other clients free memory.
                Err(why) if waits && why != Denial::EnvLimit => {
                    held.extend(place.map(|place| (place, why)));
                    self.hold_back(fx, client, gpu, why);
                }
                // The request waits for acknowledgements, for up to `LIMIT_REQUEST_TIMEOUT`.
                Err(_) if problem.is_possible_later(at, wanted.bytes, budget) => {}
                Err(why) => self.deny(fx, client, gpu, why),
            }
        }
        granted
    }

    /// Makes a request wait for other clients to free memory, and notifies its client.
    fn hold_back(&mut self, fx: &mut Effects, client: ClientId, gpu: GpuId, why: Denial) {
        self.host.awaited = true;
        let wanted = self.entry_mut(client, gpu).and_then(|entry| entry.limit.wanted.as_mut());
        if wanted.is_some_and(|wanted| wanted.held.replace(why).is_none()) {
            fx.command(Command::Waiting { client, gpus: GpuSet::from([gpu]), why: WaitReason::Memory });
        }
    }

    /// Ends requests that are met or have timed out.
    pub(super) fn finish_requests(&mut self, cx: Context, fx: &mut Effects) {
        let requests = self.requests.iter().filter_map(|(id, client)| {
            let limit = self.limit(*client, *id)?;
            Some((*client, *id, limit.wanted?, limit.limit, limit.target))
        });
        for (client, id, wanted, limit, target) in requests.collect::<Vec<_>>() {
            let until = wanted.since + LIMIT_REQUEST_TIMEOUT;
            let waits = cx.rules.waits_for_memory(client);
            if wanted.bytes <= limit {
                self.set_wanted(client, id, None);
                self.keep(cx, client, id, wanted.bytes);
            } else if waits && (wanted.bytes <= target || !self.is_last_of_all(cx, client, wanted.held)) {
                // Other clients can still free memory, or have yet to acknowledge a lower limit.
                continue;
            } else if until <= cx.now {
                let is_full = self.group_room(cx, client, id).is_none_or(|room| room < wanted.bytes - limit);
                self.deny(fx, client, id, if is_full { Denial::MemoryMax } else { Denial::NoRoom });
            } else {
                Self::balance_at(fx, until);
            }
        }
    }

    /// Whether this request is the newest request, and every client that could free memory for it
    /// is waiting too. Denying this request then resolves a deadlock.
    fn is_last_of_all(&self, cx: Context, client: ClientId, held: Option<Denial>) -> bool {
        let newest = |client: ClientId| {
            let requests = self.limits_of(client).filter_map(|(_, limit)| limit.wanted);
            requests.max_by_key(|wanted| wanted.number)
        };
        let number = newest(client).map(|wanted| wanted.number);
        let group = cx.rules.group(client);
        let (mut of_group, mut of_all) = (true, true);
        let clients: BTreeSet<ClientId> = self.gpus.values().flat_map(|gpu| gpu.clients.keys().copied()).collect();
        let has_some = |client: &ClientId| self.limits_of(*client).any(|(_, limit)| limit.demand() > 0);
        for other in clients.into_iter().filter(|other| *other != client && has_some(other)) {
            let newest = newest(other).filter(|wanted| Some(wanted.number) < number);
            of_all &= newest.is_some();
            // A member that waits for room on the GPU or the host may get it from clients outside
            // the group, so the group's members are not in a deadlock.
            let is_member = group.is_some() && cx.rules.group(other) == group;
            of_group &= !is_member || newest.is_some_and(|wanted| wanted.held != Some(Denial::NoRoom));
            if !(of_group || of_all) {
                return false;
            }
        }
        of_all || (of_group && held != Some(Denial::NoRoom))
    }

    /// Reserves requested memory within the client's limit until the client uses it.
    fn keep(&mut self, cx: Context, client: ClientId, id: GpuId, bytes: u64) {
        self.entry_mut(client, id).into_iter().for_each(|entry| entry.limit.keep(cx.now, bytes));
    }

    fn deny(&mut self, fx: &mut Effects, client: ClientId, id: GpuId, why: Denial) {
        let Some(wanted) = self.limit(client, id).and_then(|limit| limit.wanted) else { return };
        self.set_wanted(client, id, None);
        fx.command(Command::Denied { client, gpu: id, bytes: wanted.bytes, why });
    }
}
