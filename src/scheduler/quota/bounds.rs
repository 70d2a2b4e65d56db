//! The limits that rules and environments set on a client's memory.
//!
//! On each GPU, the members of a group together may use at most their rule's `memory-max`. The
//! bound applies to the members' committed bytes plus their contexts. So the bound holds regardless
//! of messages in flight and of clients' reports. A client that exceeds its limit uses up its own
//! group's bound and gains nothing. The group's memory is divided like host memory: each member's
//! limit is its demand plus an equal part of the rest, and more on request.
//!
//! A limit that is lowered below current usage fails no existing allocation. Some members' limits
//! are then below their demand, so that memory they free cannot be allocated again until the rest
//! fits. Until then, a client's excess memory is swapped out whenever the client does not run.

use super::{ClientLimit, Context, GpuLimits, Quota};
use crate::api::*;

impl ClientLimit {
    /// The client's context in bytes: its measured size, or an estimate.
    pub(super) fn context(&self, cx: Context, id: GpuId) -> u64 {
        self.context.unwrap_or_else(|| cx.gpus.context(id))
    }
}

impl Quota {
    pub(crate) fn context(&self, cx: Context, client: ClientId, id: GpuId) -> u64 {
        self.entry(client, id).map_or(0, |entry| entry.context(cx, id))
    }

    /// Whether the size of a client's context is estimated because the context has not been
    /// measured.
    pub(super) fn is_context_unmeasured(&self, cx: Context, client: ClientId, id: GpuId) -> bool {
        self.entry(client, id).is_some_and(|entry| entry.context.is_none()) && cx.gpus.context(id) > 0
    }

    /// The highest sum of the demands of a client's group on a GPU: its `memory-max` minus the
    /// members' contexts. `None`: no limit.
    pub(super) fn group_bound(&self, cx: Context, client: ClientId, id: GpuId) -> Option<u64> {
        let max = cx.rules.memory_max(client, cx.gpus.total(id))?;
        Some(max.saturating_sub(self.contexts_of_group(cx, client, id)))
    }

    /// The contexts of a client's group on a GPU, in bytes.
    pub(crate) fn contexts_of_group(&self, cx: Context, client: ClientId, id: GpuId) -> u64 {
        self.sum_of_group(cx, client, id, |entry| entry.context(cx, id))
    }

    /// The highest demand that a client's environment allows it on a GPU. `None`: no limit.
    pub(super) fn env_bound(&self, cx: Context, client: ClientId, id: GpuId) -> Option<u64> {
        Some(cx.rules.env_memory_max(client, cx.gpus.total(id))?.saturating_sub(self.context(cx, client, id)))
    }

    fn sum_of_group(&self, cx: Context, client: ClientId, id: GpuId, of: impl Fn(&ClientLimit) -> u64) -> u64 {
        let entries = cx.rules.group_peers(client).filter_map(|member| self.entry(member, id));
        entries.fold(0, |sum, entry| sum.saturating_add(of(entry)))
    }

    /// Whether the demand of a client or of its group exceeds its limit on a GPU. A demand can
    /// exceed a limit that was lowered.
    pub fn is_over(&self, cx: Context, client: ClientId, id: GpuId) -> bool {
        let demand = |entry: &ClientLimit| entry.limit.demand();
        let group = || self.group_bound(cx, client, id);
        let is_over = || group().is_some_and(|max| self.sum_of_group(cx, client, id, demand) > max);
        let env = || self.env_bound(cx, client, id);
        let is_over_env = || env().is_some_and(|max| self.entry(client, id).map_or(0, demand) > max);
        cx.rules.is_bounded(client) && (is_over() || is_over_env())
    }

    /// Bytes by which the allowances of a client and its group exceed their limits. `allowance`
    /// returns a client's allowance.
    pub fn surplus(&self, cx: Context, client: ClientId, id: GpuId, allowance: impl Fn(ClientId) -> u64) -> u64 {
        let has = cx.rules.group_peers(client).fold(0u64, |sum, member| sum.saturating_add(allowance(member)));
        let of_group = has.saturating_sub(self.group_bound(cx, client, id).unwrap_or(u64::MAX));
        let own = allowance(client).saturating_sub(self.env_bound(cx, client, id).unwrap_or(u64::MAX));
        of_group.max(own)
    }

    /// Bytes by which the limits of a client's group can rise on a GPU. `None`: the limits already
    /// exceed the group's bound.
    pub(super) fn group_room(&self, cx: Context, client: ClientId, id: GpuId) -> Option<u64> {
        self.room_within(cx, client, id, self.group_bound(cx, client, id))
    }

    /// Like `group_room`, with the given bound for the GPU `id`.
    pub(super) fn room_within(&self, cx: Context, client: ClientId, id: GpuId, bound: Option<u64>) -> Option<u64> {
        let Some(group) = cx.rules.group(client) else { return Some(u64::MAX) };
        let committed = |gpu: &GpuLimits| gpu.by_group.get(&group).copied().unwrap_or(0);
        let here = match bound {
            Some(max) => max.checked_sub(self.gpus.get(&id).map_or(0, committed))?,
            None => u64::MAX,
        };
        let everywhere = match cx.rules.swap_max(client) {
            Some(max) => max.checked_sub(self.gpus.values().map(committed).fold(0, u64::saturating_add))?,
            None => u64::MAX,
        };
        Some(here.min(everywhere))
    }
}
