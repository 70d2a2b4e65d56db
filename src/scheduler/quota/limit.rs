//! Each client's limit on each GPU.
//!
//! What does not fit on a GPU lives in host memory, which all GPUs share: Σ committed ≤ Σ capacity + host memory. Where host memory
//! allows it, every client may allocate a whole GPU. Otherwise each client has what it needs and an equal part of the rest (its
//! *slack*), and more on request, out of the slack of others. A request that can be met is granted and any other fails at once: no
//! client waits for what another one holds, unless a rule says so (`request`). Groups' limits are divided in the same way (`group`).
//! The `solver` computes targets; this module brings limits there as clients acknowledge lower ones.

use crate::{
    api::*,
    machine::{Gpu, Machine},
    quota::group::GroupState,
    quota::limit_state::LimitState,
    quota::solver::Target,
    timers::Wake,
};
use std::collections::BTreeSet;
use std::time::Duration;

/// Clients are told of a new limit when it differs by more: the driver's own granularity.
pub(crate) const LIMIT_STEP: u64 = 2 << 20;
/// How long somebody who attaches waits for others to acknowledge what they no longer have, before it is told of less.
pub(crate) const FIRST_LIMIT_TIMEOUT: Duration = Duration::from_millis(200);
/// How long a wish waits for the same, before it is denied. A driver that makes contexts for several programs at once may
/// keep a process from answering for seconds.
pub(crate) const LIMIT_REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// A client that has not acknowledged a limit for so long keeps what it had.
pub(crate) const ACK_TIMEOUT: Duration = Duration::from_secs(4);

/// Nobody is promised more (16 TiB), so that sums cannot overflow.
const MOST: u64 = 1 << 44;

impl Gpu {
    /// What anybody can be promised there.
    pub(crate) fn offer(&self, settings: &Settings) -> u64 {
        self.usable(settings).min(MOST)
    }
}

/// The host memory that promises may count on.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Host {
    /// `None`: there is no bound.
    pub bytes: Option<u64>,
    /// Bytes that would be in the host if everybody made use of a whole GPU, over all GPUs.
    most: u64,
    /// Bytes that are there if everybody makes use of what it was promised.
    pub committed: u64,
    /// There is less than `most`.
    scarce: bool,
    /// An allocation waits for what others need now.
    pub awaited: bool,
    /// Where something changed that promises depend on; while memory is scarce that concerns everybody.
    changed: BTreeSet<GpuId>,
    all_changed: bool,
}

impl Host {
    /// Somebody needs less than before.
    pub fn is_needed_less(&mut self) {
        self.all_changed |= self.scarce && self.awaited;
    }

    pub fn is_scarce(&self) -> bool {
        self.scarce
    }

    pub fn has_changed(&self) -> bool {
        self.all_changed || !self.changed.is_empty()
    }

    /// All promises are to be weighed anew.
    pub fn mark_all_changed(&mut self) {
        self.all_changed = true;
    }

    /// The promises on that GPU are to be weighed anew.
    pub fn mark_changed(&mut self, id: GpuId) {
        self.changed.insert(id);
    }

    /// Fewer bytes are promised, or more needed, than was known.
    pub fn loosened(&mut self) {
        self.all_changed |= self.scarce;
    }
}

impl Machine {
    pub(crate) fn host_memory(&mut self, bytes: u64) {
        if self.host.bytes != Some(bytes) {
            self.host.bytes = Some(bytes);
            self.host.mark_all_changed();
        }
    }

    /// Takes notice of what a GPU offers, and of who is there.
    pub(crate) fn note_offer(&mut self, id: GpuId) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        let capacity = gpu.offer(&self.settings);
        if gpu.summed_for.replace(capacity) != Some(capacity) {
            // By what they need, never by what they were promised: that follows from this.
            let clients = gpu.clients.iter().filter_map(|client| self.clients.get(client)?.attachments.get(&id));
            let all =
                clients.fold(0u64, |sum, attachment| sum.saturating_add(attachment.limit_state.demand().max(capacity)));
            let most = all.saturating_sub(capacity);
            self.host.most = (self.host.most - gpu.most_in_host).saturating_add(most);
            gpu.most_in_host = most;
        }
        let attachments = gpu.clients.len();
        if gpu.solved.is_none_or(|(bytes, count)| count != attachments || bytes.abs_diff(capacity) > LIMIT_STEP) {
            gpu.solved = Some((capacity, attachments));
            self.host.changed.insert(id);
        }
        self.count_in_host(id);
        let scarce = self.host.bytes.is_some_and(|bytes| bytes < self.host.most);
        self.host.all_changed |= scarce != self.host.scarce;
    }

    /// Brings the host's sum up to date with one GPU.
    pub(crate) fn count_in_host(&mut self, id: GpuId) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        let excess = gpu.committed.saturating_sub(gpu.offer(&self.settings));
        self.host.committed = self.host.committed - gpu.in_host + excess;
        gpu.in_host = excess;
    }

    /// Brings the GPU's sum up to date with one promise.
    pub(crate) fn recommit(&mut self, client: ClientId, id: GpuId) {
        let (Some(state), Some(gpu)) = (self.clients.get_mut(&client), self.gpus.get_mut(&id)) else { return };
        let Some(limit_state) = state.attachments.get_mut(&id).map(|s| &mut s.limit_state) else { return };
        let committed = limit_state.committed();
        let before = std::mem::replace(&mut limit_state.counted, committed);
        gpu.committed = gpu.committed - before + committed;
        gpu.count_for(state.group, before, committed);
        self.count_in_host(id);
    }

    /// Weighs all promises anew: lowers what is more than a client's part, and raises what is less as far as there is room.
    pub(crate) fn balance(&mut self) {
        let changed = std::mem::take(&mut self.host.changed);
        let all = std::mem::take(&mut self.host.all_changed);
        let before = std::mem::replace(&mut self.host.scarce, false);
        self.host.scarce = self.host.bytes.is_some_and(|bytes| bytes < self.host.most);
        let everywhere = || self.gpus.keys().copied().collect();
        let budget = self.host.bytes.filter(|_| self.host.scarce);
        // Some are bounded over all GPUs.
        let are_bounded = self.groups.values().any(GroupState::is_bounded_everywhere)
            || self.client_limits.values().any(EnvLimits::is_bounded_everywhere);
        // Who waits may wait for fellows elsewhere.
        let all = all || before || budget.is_some() || are_bounded || self.host.awaited;
        let ids: GpuSet = if all { everywhere() } else { changed };
        let targets = match budget {
            Some(_) => self.solve_limits(budget, &ids),
            None => {
                let members = self.solve_bounded(&ids);
                members.into_iter().chain(self.unbounded_targets(&ids)).collect()
            }
        };
        for lower in [true, false] {
            for target in &targets {
                self.approach(target, lower);
            }
        }
        if self.host.scarce || before || !self.groups.is_empty() || !self.client_limits.is_empty() {
            self.finish_limit_requests(&targets);
        }
        // Whoever attaches waits to be told.
        let waits = |id: &GpuId| self.gpus.get(id).is_some_and(|gpu| !gpu.attaching.is_empty());
        let waiting: BTreeSet<GpuId> = targets.iter().map(|target| target.gpu).filter(waits).collect();
        self.dirty.extend(waiting);
    }

    /// Everybody can have everything, whom no rule bounds.
    fn unbounded_targets(&self, ids: &GpuSet) -> Vec<Target> {
        let mut all = Vec::new();
        for (id, gpu) in ids.iter().filter_map(|id| Some((*id, self.gpus.get(id)?))) {
            let capacity = gpu.offer(&self.settings);
            let free = gpu.clients.iter().filter(|client| !self.is_bounded(**client, id));
            all.extend(free.map(|client| Target {
                client: *client,
                gpu: id,
                bytes: capacity,
                exact: false,
                bound: None,
            }));
        }
        all
    }

    /// Takes one promise to what it is to be, down or up.
    fn approach(&mut self, target: &Target, lower: bool) {
        let Target { client, gpu: id, bytes: target, exact, bound } = *target;
        let (now, scarce) = (self.now, self.host.scarce);
        let bounded = self.is_bounded(client, id);
        let (room, step) = (self.committable(id), if exact { 0 } else { LIMIT_STEP });
        let in_group = self.room_within(client, id, bound);
        let Some(attachment) = self.attachment_mut(client, id) else { return };
        let told = attachment.attached.is_some();
        let limit_state = &mut attachment.limit_state;
        limit_state.target = target;
        let near = limit_state.limit.abs_diff(target) <= step;
        let room = in_group.map(|left| left.min(room));
        let bytes = match limit_state.wanted {
            _ if lower => {
                if target > limit_state.limit || near || !limit_state.listens() {
                    return;
                }
                target
            }
            // All or nothing.
            Some(wanted) if wanted.bytes > limit_state.limit => {
                let Some(room) = room else { return };
                let reach = target.min(limit_state.committed().saturating_add(room));
                if reach < wanted.bytes {
                    return;
                }
                reach
            }
            _ => {
                let Some(room) = room else { return };
                let reach = target.min(limit_state.committed().saturating_add(room));
                let is_more = reach / LIMIT_STEP > limit_state.limit / LIMIT_STEP;
                if near || !is_more || reach <= limit_state.limit.saturating_add(step) {
                    return;
                }
                reach
            }
        };
        limit_state.set(now, bytes, told);
        if limit_state.lowered == Some(now) && (scarce || bounded) {
            self.solve_at(now + ACK_TIMEOUT);
        }
        self.recommit(client, id);
        if told {
            self.tell_limit(client, id);
        }
    }

    /// Bytes that can be promised on that GPU beyond what is.
    fn committable(&self, id: GpuId) -> u64 {
        let Some(budget) = self.host.bytes.filter(|_| self.host.scarce) else { return u64::MAX };
        let here = self.gpus.get(&id).map_or(0, |gpu| gpu.offer(&self.settings).saturating_sub(gpu.committed));
        here.saturating_add(budget.saturating_sub(self.host.committed))
    }

    pub(crate) fn solve_at(&mut self, at: Time) {
        let set = self.timers.get(Wake::Limits).filter(|set| *set > self.now);
        self.timers.set(Wake::Limits, Some(set.map_or(at, |set| set.min(at))));
    }

    /// Says what the limit is.
    pub(crate) fn tell_limit(&mut self, client: ClientId, id: GpuId) {
        let Some(most) = self.gpus.get(&id).map(|g| g.offer(&self.settings)) else { return };
        let Some(LimitState { limit: bytes, seq, .. }) = self.attachment(client, id).map(|s| s.limit_state.clone())
        else {
            return;
        };
        let spare = if self.host.scarce { 0 } else { u64::MAX };
        let max = self.ruled_max(client, id);
        self.out.push(Command::Limit { client, gpu: id, bytes, seq, most: most.max(bytes), spare, max });
    }
}
