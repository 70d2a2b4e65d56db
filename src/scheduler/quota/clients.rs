//! Clients that attach a GPU, report, move and detach.

use super::{Context, Quota};
use crate::{api::*, effects::Effects, rules::Rules};
use std::collections::BTreeMap;

impl Quota {
    /// Adds a client that is about to use a GPU.
    pub fn attach(&mut self, client: ClientId, id: GpuId) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        gpu.clients.entry(client).or_default();
        gpu.fresh.insert(client);
        gpu.summed_for = None;
    }

    pub fn detach(&mut self, client: ClientId, id: GpuId, rules: &Rules) {
        self.set_wanted(client, id, None);
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        let Some(entry) = gpu.clients.remove(&client) else { return };
        gpu.count(rules.group(client), entry.limit.counted, 0);
        gpu.held_requests.remove(&client);
        gpu.fresh.remove(&client);
        gpu.demand_changed(client, entry.limit.demand(), 0);
        self.rising.remove(&(id, client));
        self.falling.remove(&(id, client));
        self.ahead.forget((client, id));
    }

    /// Moves a client's limit from one GPU to another. The caller must call `expect` next. Returns
    /// the bytes that the client has requested, which the caller must request again.
    #[must_use]
    pub fn move_client(&mut self, cx: Context, client: ClientId, from: GpuId, to: GpuId) -> Option<u64> {
        let requested = self.limit(client, from)?.wanted;
        self.set_wanted(client, from, None);
        let gpu = self.gpus.get_mut(&from)?;
        let mut entry = gpu.clients.remove(&client)?;
        let is_fresh = gpu.fresh.remove(&client);
        let held = gpu.held_requests.remove(&client);
        let demand = entry.limit.demand();
        gpu.count(cx.rules.group(client), std::mem::take(&mut entry.limit.counted), 0);
        gpu.demand_changed(client, demand, 0);
        let rises = self.rising.remove(&(from, client));
        self.falling.remove(&(from, client));
        self.ahead.move_client(client, from, to);
        let wanted = requested.map(|wanted| wanted.bytes).or(held.map(|held| held.bytes()));
        let there = self.gpus.entry(to).or_default();
        there.clients.insert(client, entry);
        if is_fresh {
            there.fresh.insert(client);
        }
        there.demand_changed(client, 0, demand);
        self.set_wanted(client, to, requested);
        if rises {
            self.rising.insert((to, client));
        }
        self.recommit(cx, client, to);
        self.count_in_host(cx, from);
        self.host.mark_changed(from);
        self.host.mark_changed(to);
        wanted
    }

    /// Updates the group sums for a client that has joined the group (`joins`) or is about to leave
    /// it.
    pub fn count_member(&mut self, client: ClientId, group: GroupId, joins: bool) {
        for gpu in self.gpus.values_mut() {
            let coming = gpu.coming.get(&client).map_or(0, |coming| coming.counted);
            let counted = gpu.clients.get(&client).map_or(0, |entry| entry.limit.counted) + coming;
            match joins {
                true => gpu.count_for(Some(group), 0, counted),
                false => gpu.count_for(Some(group), counted, 0),
            }
        }
    }

    /// Sends the first limit to a client that may now create its context.
    pub fn admit(&mut self, cx: Context, fx: &mut Effects, client: ClientId, id: GpuId) {
        if let Some(entry) = self.entry_mut(client, id) {
            entry.is_told = true;
        }
        self.tell(cx, fx, client, id);
    }

    /// Handles a client's report of its demand and of the newest limit that it applies.
    pub fn reported(&mut self, cx: Context, client: ClientId, id: GpuId, ack: u32, demand: u64) {
        let Some(limit) = self.limit(client, id) else { return };
        let (committed, needed, was_unresponsive) =
            (limit.committed(), limit.demand(), self.is_unresponsive(cx, client, limit));
        let Some(limit) = self.entry_mut(client, id).map(|entry| &mut entry.limit) else { return };
        let fell = limit.reported(cx.now, ack, demand);
        let (rose, needs_another) = (limit.committed() > committed, demand != needed);
        if let Some(gpu) = self.gpus.get_mut(&id).filter(|_| needs_another) {
            gpu.demand_changed(client, needed, demand);
            self.host.demand_changed();
        }
        if fell || rose {
            self.recommit(cx, client, id);
            self.host.committed_changed();
            if was_unresponsive {
                self.host.answers_again();
                self.host.mark_changed(id); // the client's limit may rise again
            }
            self.mark_bounded_changed(cx, client, id);
        } else if needs_another && self.is_awaited(cx, client, id) {
            self.mark_bounded_changed(cx, client, id);
        }
    }

    /// Whether a member of the client's group is waiting for a limit that depends on the client's
    /// demand.
    fn is_awaited(&self, cx: Context, client: ClientId, id: GpuId) -> bool {
        let everywhere = cx.rules.swap_max(client).is_some();
        cx.rules.group_peers(client).any(|member| {
            let mut limits = self.limits_of(member);
            limits.any(|(other, limit)| limit.wanted.is_some() && (other == id || everywhere))
        })
    }

    /// Records measured context sizes.
    pub fn contexts_measured(&mut self, cx: Context, id: GpuId, sizes: &BTreeMap<ClientId, u64>) {
        for (client, bytes) in sizes {
            let Some(entry) = self.entry_mut(*client, id) else { continue };
            if entry.context.replace(*bytes) != Some(*bytes) {
                self.mark_bounded_changed(cx, *client, id);
            }
        }
    }
}
