//! Events that concern every component: connects, disconnects, and changes to the limits of rules
//! and environments.

use super::Machine;
use crate::{
    api::*,
    client::Client,
    effects::Effects,
    gpu::capacity::GpuCapacities,
    placement::Sites,
    queue::Gang,
    quota::{self, Quota},
    timers::Wake,
};
use std::collections::{BTreeMap, BTreeSet};

impl Machine {
    pub(super) fn connected(&mut self, id: ClientId, gang: u64, tenant: TenantId) {
        if self.clients.contains_key(&id) {
            return;
        }
        let client = Client { named: gang, tenant, stopped: false, heard: self.now, probed: None };
        self.clients.insert(id, client);
        self.fairness.connected(id, tenant);
        self.enter_gang(id, Gang::named(gang));
    }

    pub(super) fn disconnected(&mut self, id: ClientId) {
        if !self.clients.contains_key(&id) {
            return;
        }
        let gpus = self.gpus.of_client(id);
        self.withdraw(id);
        self.sleep.forget(id); // a disconnected client receives no more commands
        self.limit_sleeper(id);
        for gpu in gpus {
            self.detach(id, gpu);
        }
        self.rules.set_env(id, EnvLimits::default());
        self.leave_group(id);
        self.quota.disconnected(id);
        self.leave_gang(id);
        self.queues.disconnected(id);
        self.fairness.disconnected(id);
        self.places.leave(id, |client| self.clients.contains_key(client));
        self.clients.remove(&id);
        self.effects.wake(Wake::Client(id), None);
        self.forget_sleep(id);
    }

    /// Applies new rules to these clients.
    pub(super) fn grouped(&mut self, groups: &BTreeMap<ClientId, Option<Group>>) {
        let mut bounds_changed: BTreeSet<ClientId> = groups.keys().copied().collect();
        let mut shares_changed = false;
        // All clients change groups before any limit is computed. Otherwise a limit could count a
        // member too early and give that member other clients' memory.
        for (client, group) in groups {
            self.leave_group(*client);
            if !self.clients.contains_key(client) {
                continue;
            }
            let Some(group) = *group else {
                self.update_gang(*client);
                continue;
            };
            let (before, now) = (self.rules.join(*client, group), group.limits);
            if before.share.is_some() == now.share.is_some() {
                self.owner_changed(*client);
            } else {
                self.rules.members(group.id).collect::<Vec<_>>().into_iter().for_each(|peer| self.owner_changed(peer));
            }
            self.quota.count_member(*client, group.id, true);
            // `memory_low` needs no update: eviction reads the rule.
            let RuleLimits { memory_max, memory_low: _, swap_max, on_memory_full, sleep_after: _, share, gang } =
                before;
            if (memory_max, swap_max, on_memory_full) != (now.memory_max, now.swap_max, now.on_memory_full) {
                bounds_changed.extend(self.rules.members(group.id));
            }
            shares_changed |= share != now.share;
            self.update_gang(*client);
            if gang != now.gang {
                self.rules.members(group.id).collect::<Vec<_>>().into_iter().for_each(|other| self.update_gang(other));
            }
        }
        bounds_changed.into_iter().for_each(|client| self.bounds_changed(client));
        groups.keys().for_each(|client| self.sleep_after_changed(*client));
        let has_position = |client: &ClientId| self.has_position(*client);
        if shares_changed || groups.keys().any(has_position) {
            self.requeue_all();
        }
    }

    /// Whether a client holds or waits for a lock.
    fn has_position(&self, client: ClientId) -> bool {
        self.queues.waiting(client).is_some() || self.gpus.holds_any(client)
    }

    fn leave_group(&mut self, client: ClientId) {
        if let Some(group) = self.rules.group(client) {
            self.quota.count_member(client, group, false);
            self.rules.leave(client);
            self.owner_changed(client);
        }
    }

    /// Applies the limits of a client's environment.
    pub(super) fn set_env_limits(&mut self, client: ClientId, limits: EnvLimits) {
        let has_position = self.has_position(client);
        if !self.clients.contains_key(&client) {
            return;
        }
        let before = self.rules.set_env(client, limits);
        if before == limits {
            return;
        }
        self.bounds_changed(client);
        if has_position && before.weight != limits.weight {
            self.requeue_all();
        }
    }

    /// Applies a change of the bounds on a client's memory. Evicts memory beyond the bounds from
    /// GPUs on which the client does not run. Notifies the client of the bounds, and later of its
    /// new limits.
    fn bounds_changed(&mut self, client: ClientId) {
        for id in self.quota.gpus_of(client) {
            self.quota.mark_changed(id);
            self.swap_surplus(client, id);
            self.with_quota(|quota, cx, fx| quota.tell_again(cx, fx, client, id));
        }
    }

    pub(super) fn request_placement(&mut self, client: ClientId, request: &PlacementRequest) {
        let Some(tenant) = self.clients.get(&client).map(|state| state.tenant) else { return };
        self.end_expected_placements();
        self.places.forget(client);
        let Self { now, settings, rules, gpus, places, .. } = &*self;
        match (Sites { now: *now, settings, rules, gpus, places }).place(client, request) {
            Err(why) => self.effects.command(Command::Unplaced { client, why }),
            Ok(needs) => {
                let gpus = needs.iter().map(|(id, _)| *id).collect();
                self.places.set(client, tenant, request, self.now, needs);
                self.effects.command(Command::Placed { client, gpus });
            }
        }
    }

    pub(super) fn take_placement(&mut self, client: ClientId, from: ClientId) {
        self.end_expected_placements();
        if self.clients.contains_key(&client) && !self.clients.contains_key(&from) {
            self.places.take_over(client, from);
        }
    }

    fn end_expected_placements(&mut self) {
        self.places.end_expected(self.now, |client| self.clients.contains_key(client));
    }

    /// Handles a client's request for a higher limit.
    pub(crate) fn request_limit(&mut self, client: ClientId, id: GpuId, bytes: u64) {
        let now = self.now;
        if let Some(attachment) = self.gpus.attachment_mut(client, id) {
            attachment.used.get_or_insert(now); // a client allocates only in a context
        }
        if self.with_quota(|quota, cx, fx| quota.request(cx, fx, client, id, bytes)) {
            self.measure(id);
        }
    }

    /// Handles the timeout of a measurement that limit requests wait for.
    pub(super) fn held_requests_timed_out(&mut self, id: GpuId) {
        if let Some(gpu) = self.gpus.get_mut(id) {
            gpu.measurement_requested = false; // the measurement may never arrive
        }
        if self.with_quota(|quota, cx, fx| quota.held_requests_timed_out(cx, fx, id)) {
            self.measure(id);
        }
    }

    /// Runs `act` on the quota. `act` may change the quota's state and send messages.
    pub(crate) fn with_quota<R>(&mut self, act: impl FnOnce(&mut Quota, quota::Context, &mut Effects) -> R) -> R {
        let gpus = GpuCapacities { gpus: &self.gpus, settings: &self.settings };
        let context = quota::Context { now: self.now, rules: &self.rules, gpus: &gpus };
        act(&mut self.quota, context, &mut self.effects)
    }
}
