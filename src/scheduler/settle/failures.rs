//! Failed mappings (see `memory::shortfall`), and trials of clients that need more than there seems to be.

use crate::{
    api::*,
    gpu::{
        Gpu,
        shortfall::{Failure, Trial},
    },
    machine::Machine,
    queue::{Blocked, Entity, Request},
    timers::Wake,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long a failure waits for a measurement that explains it.
const TIMEOUT: Duration = Duration::from_millis(500);
/// A failure asks for at least this much room: a chunk.
const STEP: u64 = 64 << 20;
/// After this many failures in a row, further ones evict nothing more.
const MOST_STEPS: u32 = 12;
/// How long a client waits after a failure that no other client can help with: the first time, and at most. Each
/// attempt of a client that needs all of the GPU evicts other clients, so it waits longer where there are any.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));
const BACKOFF_BESIDE_OTHERS: Duration = Duration::from_secs(30);
/// After this many failures in a row with no other client's memory on the GPU, the mapping counts as impossible: with
/// the pauses between attempts, after at least 5 s.
const PROOF: u32 = 12;

impl Machine {
    /// Until when a client is not granted these GPUs because mapping failed there; 0: it may be.
    pub(crate) fn delayed_until(&self, client: ClientId, gpus: &GpuSet) -> Time {
        let memories = gpus.iter().filter_map(|id| self.attachment(client, *id));
        memories.map(|attachment| attachment.failures.not_before).max().unwrap_or_default()
    }

    /// Handles a release because mapping failed.
    pub(crate) fn mapping_failed(&mut self, client: ClientId, id: GpuId) {
        let now = self.now;
        let clients = self.gpus.get(id).into_iter().flat_map(|gpu| gpu.attachments.keys().copied());
        let others = clients.filter(|other| *other != client && self.can_give(*other, id)).collect();
        let Some(report) = self.account(client, id).map(|account| account.report) else { return };
        let Some(attachment) = self.attachment_mut(client, id) else { return };
        let bytes = report.demand.saturating_sub(report.mapped);
        if bytes == 0 {
            return;
        }
        attachment.failures.in_a_row = attachment.failures.in_a_row.saturating_add(1);
        attachment.failures.unexplained = Some(Failure { at: now, others });
        let failures = attachment.failures.in_a_row;
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        // A measurement under way may have begun before the failure.
        gpu.measurement_requested = false;
        self.effects.command(Command::MappingFailed { client, gpu: id, bytes, failures });
        self.effects.wake(Wake::Failures(id), Some(now + TIMEOUT));
        self.delay_request(client, id, TIMEOUT);
        self.measure(id);
    }

    /// Delays a client's request for a GPU.
    fn delay_request(&mut self, client: ClientId, id: GpuId, delay: Duration) {
        let now = self.now;
        let Some(attachment) = self.attachment_mut(client, id) else { return };
        attachment.failures.not_before = now + delay;
        let waiting = self.queues.waiting(client);
        let Some((entity, request)) = waiting.and_then(|entity| Some((entity, self.queues.request(entity)?))) else {
            return;
        };
        let until = request.wants.get(&client).map_or(now, |gpus| self.delayed_until(client, gpus));
        let blocked = request.blocked;
        if until > now {
            if !matches!(blocked, Some(Blocked::Absent)) {
                self.block(entity, Blocked::Until(until));
            }
        } else if matches!(blocked, Some(Blocked::Until(_))) && !self.is_delayed(entity) {
            self.enqueue(entity);
        }
    }

    /// Explains failures by a measurement that began at `begun`: `free` bytes in all, and the bytes of each client.
    pub(crate) fn explain_failures(
        &mut self,
        id: GpuId,
        begun: Time,
        free: Option<u64>,
        found: &BTreeMap<ClientId, Found>,
    ) {
        let in_use = self.gpus.get(id).map_or(0, Gpu::in_use);
        let clients: Vec<ClientId> =
            self.gpus.get(id).into_iter().flat_map(|gpu| gpu.attachments.keys().copied()).collect();
        let mut is_over = true;
        for client in clients {
            let Some(attachment) = self.attachment_mut(client, id) else { continue };
            attachment.failures.measured(free, in_use);
            match attachment.failures.unexplained.take_if(|failure| failure.at <= begun) {
                Some(Failure { others, .. }) => {
                    let has_others = others.iter().any(|other| match self.account(*other, id) {
                        None => true, // it has gone, which made room
                        Some(account) => {
                            let pinned = account.report.pinned;
                            self.can_give(*other, id) && found.get(other).is_none_or(|found| found.most > pinned)
                        }
                    });
                    self.explain_failure(client, id, has_others, found.contains_key(&client));
                }
                None => is_over &= attachment.failures.unexplained.is_none(),
            }
        }
        if is_over {
            self.effects.wake(Wake::Failures(id), None);
        }
    }

    /// Decides on failures for which no measurement has come in time.
    pub(crate) fn failures_are_unexplained(&mut self, id: GpuId) {
        if let Some(gpu) = self.gpus.get_mut(id) {
            gpu.measurement_requested = false; // the answer may never come
        }
        self.explain_failures(id, self.now.saturating_sub(TIMEOUT), None, &BTreeMap::new());
    }

    fn explain_failure(&mut self, client: ClientId, id: GpuId, has_others: bool, is_measured: bool) {
        let now = self.now;
        let Some(gpu) = self.gpus.get(id) else { return };
        let (usable, charged, is_alone) =
            (gpu.usable(&self.settings), gpu.ledger.charged(), gpu.attachments.len() == 1);
        let Some(account) = gpu.account(client) else { return };
        let MemoryReport { demand, mapped, .. } = account.report;
        let is_overstated = account.is_overstated();
        let Some(attachment) = self.attachment_mut(client, id) else { return };
        let steps = attachment.failures.in_a_row.saturating_sub(1).min(MOST_STEPS);
        // A client that was measured to have less than it reports has not tried to map its memory.
        let overstates = is_measured && is_overstated;
        attachment.failures.alone =
            if has_others || overstates { 0 } else { attachment.failures.alone.saturating_add(1) };
        let is_proof = attachment.failures.alone >= PROOF;
        // Without other clients, what is measured as free may be usable in a moment; and where the ledger is overdrawn,
        // that explains the failure.
        if has_others && !overstates && (steps > 0 || charged <= usable) {
            let more = demand.saturating_sub(mapped).max(STEP).saturating_mul(1 << steps);
            attachment.failures.learn(now, usable.saturating_sub(charged), more);
        }
        let delay = if has_others && steps < MOST_STEPS {
            Duration::ZERO
        } else {
            let most = if is_alone { BACKOFF.1 } else { BACKOFF_BESIDE_OTHERS };
            attachment.failures.backoff = (attachment.failures.backoff * 2).clamp(BACKOFF.0, most);
            attachment.failures.backoff
        };
        if is_proof {
            self.effects.command(Command::Denied { client, gpu: id, bytes: demand, why: Denial::Unmappable });
        }
        self.delay_request(client, id, delay);
        self.touch(id);
    }

    /// The bytes that a client needs beyond its demand, since it could not map what seemed free: no more than all other
    /// clients can give.
    pub(crate) fn shortfall(&self, client: ClientId, id: GpuId) -> u64 {
        let Some(gpu) = self.gpus.get(id) else { return 0 };
        let bytes = gpu.attachments.get(&client).map_or(0, |attachment| attachment.failures.shortfall(self.now));
        if bytes == 0 {
            return 0;
        }
        // The remaining room is shared with the clients that run together with it.
        let entity = self.queues.entity(client);
        let together = gpu.attachments.keys().filter(|other| self.queues.entity(**other) == entity);
        let (mut demand, mut unevictable, mut count) = (0u64, 0u64, 0u64);
        for member in together {
            let Some(account) = gpu.account(*member) else { continue };
            demand = demand.saturating_add(account.report.demand);
            unevictable = unevictable.saturating_add(gpu.unevictable_of(*member));
            count += 1;
        }
        let others = gpu.ledger.unevictable().saturating_sub(unevictable);
        let room = gpu.usable(&self.settings).saturating_sub(others).saturating_sub(demand);
        bytes.min(room / count.max(1))
    }

    /// Whether a client has memory on a GPU that can leave, as far as its reports are believed.
    fn can_give(&self, client: ClientId, id: GpuId) -> bool {
        let Some(account) = self.account(client, id) else { return false };
        self.eviction_block(client, id).is_none() && account.in_use() > account.report.pinned
    }

    /// Begins trials before a request is granted: a client that has all of a GPU, and needs more than there seems to
    /// be, may try to map the rest.
    pub(crate) fn begin_trials(&mut self, entity: Entity) {
        for id in self.queues.request(entity).map(Request::gpus).unwrap_or_default() {
            if let [client] = *self.queues.members(entity, id) {
                self.begin_trial(client, id);
            }
        }
    }

    fn begin_trial(&mut self, client: ClientId, id: GpuId) {
        let Some(demand) = self.demand_of_trial(client, id) else { return };
        let Some(account) = self.account(client, id) else { return };
        // All or nothing: its own memory that is being evicted, and bytes that it cannot get back, are in the way.
        let charge = account.charge;
        if charge > account.allowance {
            return;
        }
        let Some(gpu) = self.gpus.get(id).filter(|gpu| gpu.trial.is_none() && gpu.reservations.is_empty()) else {
            return;
        };
        let beyond = demand.saturating_sub(gpu.usable(&self.settings));
        // Memory that other clients have, or may still have, leaves no room for a trial.
        let fits = gpu.ledger.charged() <= charge.min(gpu.usable(&self.settings));
        if beyond == 0 || !fits || self.unverified_for(client, id) > 0 {
            return;
        }
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        gpu.trial = Some(Trial { client, demand, beyond });
        if self.credit(client, id, 0) > 0 {
            self.end_trial(client, id);
        }
    }

    /// The demand of a client that must have all of it mapped (engine `swap`), if the GPU is large enough. `None`: it
    /// is not, or the client can do with less.
    fn demand_of_trial(&self, client: ClientId, id: GpuId) -> Option<u64> {
        let (attachment, gpu) = (self.attachment(client, id)?, self.gpus.get(id)?);
        let demand = gpu.account(client)?.report.demand;
        (attachment.engine == Engine::Swap && demand <= gpu.total).then_some(demand)
    }

    /// Adjusts the trial after the client's demand or the overhead has changed.
    pub(crate) fn adjust_trial(&mut self, id: GpuId) {
        let Some(trial) = self.gpus.get(id).and_then(|gpu| gpu.trial) else { return };
        let demand = self.demand_of_trial(trial.client, id).unwrap_or(0);
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        // If there is less than before, others need it: that part is not tried.
        let most = trial.beyond.saturating_add(demand.saturating_sub(trial.demand));
        let beyond = demand.saturating_sub(gpu.usable(&self.settings)).min(most);
        gpu.trial = (beyond > 0).then_some(Trial { demand, beyond, ..trial });
    }

    /// Ends a client's trial, if it has one.
    pub(crate) fn end_trial(&mut self, client: ClientId, id: GpuId) {
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        if gpu.trial.take_if(|trial| trial.client == client).is_some() {
            self.touch(id);
        }
    }
}
