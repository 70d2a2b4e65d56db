//! Brings each client's limit to the solver's result. Limits above the result are lowered first.
//! Other limits rise as clients acknowledge lower limits.

use super::{Context, LIMIT_STEP, Quota, limit::Limit, solver::Target};
use crate::{api::*, effects::Effects};
use std::collections::BTreeSet;
use std::time::Duration;

/// How long an attaching client waits for other clients to acknowledge lower limits. After that
/// time, the client gets a smaller limit itself.
pub(crate) const FIRST_LIMIT_TIMEOUT: Duration = Duration::from_millis(200);
/// If a client with a lowered limit acknowledges nothing for this long, the client counts as
/// unresponsive. The client's committed bytes then stay promised to it.
pub(super) const ACK_TIMEOUT: Duration = Duration::from_secs(4);

impl Quota {
    /// Targets of clients whose memory no rule or environment limits. The target is the GPU's whole
    /// offer, or more if managed memory exceeds the GPU. For a client that is asleep, it is the client's
    /// demand or its requested limit, whichever is higher, but at most the offer.
    fn whole_gpu<'a>(
        &self,
        cx: Context,
        id: GpuId,
        clients: impl Iterator<Item = &'a ClientId>,
    ) -> impl Iterator<Item = Target> {
        let offer = cx.gpus.offer(id);
        let free = clients.filter(move |client| !cx.rules.is_bounded(**client));
        free.map(move |client| {
            let asleep = self.limit(*client, id).filter(|_| self.asleep.contains(client));
            let bytes = asleep.map_or(offer, |limit| limit.while_asleep().min(offer));
            let bytes = bytes.max(self.reach_beyond(cx, *client, id));
            Target { client: *client, gpu: id, bytes, exact: false, bound: None }
        })
    }

    /// Recomputes limits. Lowers limits above their target and raises other limits as far as there
    /// is room.
    pub fn balance(&mut self, cx: Context, fx: &mut Effects) {
        let freed = self.host.take_freed();
        if freed && !self.host.is_out_of_date() && self.requests.is_empty() && cx.rules.are_none() {
            return self.raise(cx, fx);
        }
        if freed {
            self.host.mark_all_changed();
        }
        let mut joined = self.host.take_joined();
        let (changed, was_scarce) = self.host.take_changed(self.would_be_scarce());
        let budget = self.host.budget();
        // Some bounds span all GPUs, and waiting requests may depend on several GPUs.
        let all = was_scarce || budget.is_some() || cx.rules.bound_swap() || self.host.awaited;
        let mut ids = match changed {
            Some(changed) if !all => changed,
            _ => self.gpus.keys().copied().collect(),
        };
        if cx.rules.bound_memory() {
            ids.append(&mut joined); // a group's memory is divided among all of its members
        }
        joined.retain(|id| !ids.contains(id));
        let targets = match budget {
            Some(_) => self.solve(cx, fx, budget, &ids),
            None => {
                let bounded = if cx.rules.bound_memory() { self.solve(cx, fx, None, &ids) } else { Vec::new() };
                bounded
                    .into_iter()
                    .chain(self.unbounded_targets(cx, &ids))
                    .chain(self.fresh_targets(cx, &joined))
                    .collect()
            }
        };
        for id in ids.union(&joined) {
            self.gpus.get_mut(id).into_iter().for_each(|gpu| gpu.fresh.clear());
        }
        targets.iter().for_each(|target| self.approach(cx, fx, target, true));
        self.set_all_aside(cx);
        targets.iter().for_each(|target| self.approach(cx, fx, target, false));
        let is_below = |target: &&Target| self.limit(target.client, target.gpu).is_some_and(Limit::is_below_target);
        self.rising = match self.host.is_scarce() {
            true => targets.iter().filter(is_below).map(|target| (target.gpu, target.client)).collect(),
            false => BTreeSet::new(),
        };
        self.finish_requests(cx, fx);
        self.touch_attaching(cx, fx);
    }

    /// Raises limits further towards their unchanged targets. While no client waits for memory and
    /// no rule bounds memory, targets depend on demands alone, so acknowledgements do not change
    /// the targets.
    fn raise(&mut self, cx: Context, fx: &mut Effects) {
        self.set_all_aside(cx);
        let targets = self.rising.iter().filter_map(|(id, client)| {
            let bytes = self.limit(*client, *id)?.target;
            Some(Target { client: *client, gpu: *id, bytes, exact: false, bound: None })
        });
        for target in targets.collect::<Vec<_>>() {
            self.approach(cx, fx, &target, false);
            if !self.limit(target.client, target.gpu).is_some_and(Limit::is_below_target) {
                self.rising.remove(&(target.gpu, target.client));
            }
        }
        self.touch_attaching(cx, fx);
    }

    /// Marks each GPU to which a client is attaching, so that the GPU is settled. An attaching
    /// client waits for up-to-date limits on every GPU.
    fn touch_attaching(&self, cx: Context, fx: &mut Effects) {
        fx.touch_all(self.gpus.keys().copied().filter(|id| cx.gpus.is_attaching(*id)));
    }

    /// The targets of clients without a limit from a rule or their environment, while host memory
    /// suffices.
    fn unbounded_targets(&self, cx: Context, ids: &GpuSet) -> Vec<Target> {
        let gpus = ids.iter().filter_map(|id| Some((*id, self.gpus.get(id)?)));
        gpus.flat_map(|(id, gpu)| self.whole_gpu(cx, id, gpu.clients.keys())).collect()
    }

    /// Like `unbounded_targets`, but only for clients that attached since limits were last
    /// computed.
    fn fresh_targets(&self, cx: Context, ids: &GpuSet) -> Vec<Target> {
        let gpus = ids.iter().filter_map(|id| Some((*id, self.gpus.get(id)?)));
        gpus.flat_map(|(id, gpu)| self.whole_gpu(cx, id, gpu.fresh.iter())).collect()
    }

    /// Moves one limit towards its target, down or up.
    fn approach(&mut self, cx: Context, fx: &mut Effects, target: &Target, lower: bool) {
        let Target { client, gpu: id, bytes: target, exact, bound } = *target;
        let scarce = self.host.is_scarce();
        let room = self.committable(cx, id).min(self.room_at_home(cx, client, id));
        let step = if exact { 0 } else { LIMIT_STEP };
        let in_group = self.room_within(cx, client, id, bound);
        let Some(entry) = self.entry_mut(client, id) else { return };
        let (told, limit) = (entry.is_told, &mut entry.limit);
        limit.target = target;
        let near = limit.limit.abs_diff(target) <= step;
        let room = in_group.map(|left| left.min(room));
        let late = limit.lowered.is_some_and(|at| cx.now.saturating_sub(at) >= ACK_TIMEOUT);
        let bytes = match limit.wanted {
            _ if lower => {
                if target > limit.limit || near || !limit.is_responsive() {
                    return;
                }
                target
            }
            // A requested limit is granted only in full, because part of the memory would be
            // useless.
            Some(wanted) if wanted.bytes > limit.limit => {
                let Some(room) = room else { return };
                let reach = target.min(limit.committed().saturating_add(room));
                if reach < wanted.bytes {
                    return;
                }
                reach
            }
            // A client that is late to acknowledge a lower limit gets no higher limit. The client's
            // excess goes to other clients when the client acknowledges the lower limit.
            _ if late => return,
            _ => {
                let Some(room) = room else { return };
                let reach = target.min(limit.committed().saturating_add(room));
                let is_more = reach / LIMIT_STEP > limit.limit / LIMIT_STEP;
                if near || !is_more || reach <= limit.limit.saturating_add(step) {
                    return;
                }
                reach
            }
        };
        limit.set(cx.now, bytes, told);
        if limit.lowered == Some(cx.now) && (scarce || cx.rules.is_bounded(client)) {
            Self::balance_at(fx, cx.now + ACK_TIMEOUT);
        }
        self.recommit(cx, client, id);
        if told {
            self.tell(cx, fx, client, id);
        }
    }

    /// Whether an attaching client's limit is close to its target, or cannot rise because no other
    /// client has a lower limit to acknowledge. Valid only while limits are up to date.
    pub fn has_first_limit(&self, client: ClientId, id: GpuId) -> bool {
        let is_there = self.limit(client, id).is_some_and(|limit| limit.seq > 0 && !limit.is_below_target());
        is_there || self.falling.is_empty()
    }
}
