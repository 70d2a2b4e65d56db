//! The sums of committed bytes: per GPU, per group, and in host memory.

use super::{Context, LIMIT_STEP, Quota, coming::Coming};
use crate::api::*;

impl Quota {
    /// Updates the sums after a GPU's offer or its number of clients has changed.
    pub fn note_offer(&mut self, cx: Context, id: GpuId) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        let offer = cx.gpus.offer(id);
        if gpu.summed_for.replace(offer) != Some(offer) {
            // The sum depends on demands instead of limits, because limits depend on the sum.
            let most = gpu.most_in_host(offer);
            self.host.most = (self.host.most - gpu.most_in_host).saturating_add(most);
            gpu.most_in_host = most;
        }
        let clients = gpu.clients.len();
        match &mut gpu.solved_for {
            Some((bytes, count)) if bytes.abs_diff(offer) <= LIMIT_STEP => {
                if std::mem::replace(count, clients) != clients {
                    self.host.mark_joined(id);
                }
            }
            solved_for => {
                *solved_for = Some((offer, clients));
                self.host.mark_changed(id);
            }
        }
        self.count_in_host(cx, id);
        self.check_scarcity();
    }

    /// Updates the sums after one client's limit has changed.
    pub(super) fn recommit(&mut self, cx: Context, client: ClientId, id: GpuId) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        let Some(limit) = gpu.clients.get_mut(&client).map(|entry| &mut entry.limit) else { return };
        let committed = limit.committed();
        if committed > limit.limit.max(limit.demand()) {
            self.falling.insert((id, client));
        } else {
            self.falling.remove(&(id, client));
        }
        let before = std::mem::replace(&mut limit.counted, committed);
        gpu.count(cx.rules.group(client), before, committed);
        self.count_in_host(cx, id);
        self.follow(cx, client, id, committed);
    }

    /// Adjusts the room for a client on the GPUs that it may be moved back to. The room follows the
    /// client's committed bytes on its present GPU `from`.
    fn follow(&mut self, cx: Context, client: ClientId, from: GpuId, committed: u64) {
        for id in self.homes(client, from) {
            let Some(gpu) = self.gpus.get_mut(&id) else { continue };
            let Some(coming) = gpu.coming.get_mut(&client) else { continue };
            coming.bytes = committed.saturating_add(coming.context);
            let bytes = coming.bytes;
            gpu.summed_for = None;
            self.set_aside(cx, client, id, bytes);
        }
    }

    /// The GPUs that a client on `from` may be moved back to.
    pub(super) fn homes(&self, client: ClientId, from: GpuId) -> GpuSet {
        let is_home = |coming: &Coming| coming.comes_back && coming.from == from;
        let homes = self.gpus.iter().filter(|(_, gpu)| gpu.coming.get(&client).is_some_and(is_home));
        homes.map(|(id, _)| *id).collect()
    }

    pub(super) fn set_aside(&mut self, cx: Context, client: ClientId, id: GpuId, bytes: u64) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        let Some(coming) = gpu.coming.get_mut(&client) else { return };
        let before = std::mem::replace(&mut coming.counted, bytes);
        gpu.count(cx.rules.group(client), before, bytes);
        self.count_in_host(cx, id);
    }

    /// Updates the host's sum for one GPU.
    pub(super) fn count_in_host(&mut self, cx: Context, id: GpuId) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        let excess = gpu.committed.saturating_sub(cx.gpus.offer(id));
        self.host.committed = self.host.committed - gpu.in_host + excess;
        gpu.in_host = excess;
    }

    /// Bytes by which the sum of the limits on a GPU can rise.
    pub(super) fn committable(&self, cx: Context, id: GpuId) -> u64 {
        let Some(budget) = self.host.budget() else { return u64::MAX };
        let here = self.gpus.get(&id).map_or(0, |gpu| cx.gpus.offer(id).saturating_sub(gpu.committed));
        here.saturating_add(budget.saturating_sub(self.host.committed))
    }
}
