//! Admission of CUDA contexts: a client that is about to create one waits until there is room for it, at most
//! [`ATTACH_TIMEOUT`]. A context that would leave an attached client too little memory to ever run again is *deferred*: it waits
//! longer, and is refused after [`CONTEXT_TIMEOUT`].

use crate::{
    api::*,
    gpu::{Access, context_queue::PendingContext},
    machine::Machine,
    queue::Gang,
    quota::{CONTEXT_APPEARS, FIRST_LIMIT_TIMEOUT},
};
use std::time::Duration;

/// How long a client is deferred before the scheduler tells it that its context has no room, unless its rule makes
/// allocations wait.
const CONTEXT_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a client that attaches waits for room. Then it is admitted in any case, and the driver decides.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a restore may take once it has room. After that, no other client waits for its end any longer, whether it
/// attaches or wakes: a process that is stopped keeps its restore from ending.
pub(super) const RESTORE: Duration = Duration::from_secs(10);

impl Machine {
    /// Whether a client's context existed, all of it, by `begun`.
    pub fn has_context(&self, client: ClientId, id: GpuId, begun: Time) -> bool {
        let Some(attachment) = self.attachment(client, id) else { return false };
        if self.gpus.get(id).is_some_and(|gpu| gpu.away.contains_key(&client)) {
            return false;
        }
        let since = attachment.attached.map(|allowed| {
            let at_last = allowed.saturating_add(CONTEXT_APPEARS);
            attachment.used.map_or(at_last, |used| used.max(allowed).min(at_last))
        });
        since.is_some_and(|since| since <= begun)
    }

    /// Counts the clients to defer: clients whose contexts would leave an attached client too little memory ever to
    /// have its whole demand on the GPU again, so that it could never run. They wait until that client needs less or
    /// has gone.
    pub(crate) fn count_deferred(&mut self, id: GpuId) {
        let Some(gpu) = self.gpus.get(id) else { return };
        if gpu.contexts.is_empty() && gpu.contexts.deferred() == 0 {
            return;
        }
        // A client of an earlier scheduler has its context already.
        let waits = |pending: &PendingContext| {
            let needs_nothing = gpu.account(pending.client).is_some_and(|account| account.report.demand == 0);
            needs_nothing && self.queues.waiting(pending.client).is_none()
        };
        let unmeasured = gpu.unmeasured.len().saturating_sub(gpu.contexts.len());
        let taken = gpu.measured.unwrap_or(0).saturating_add(gpu.context_bytes(&self.settings, unmeasured));
        let taken = taken.saturating_add(gpu.returning_bytes());
        let capacity = gpu.total.saturating_sub(gpu.reserve(&self.settings)).saturating_sub(taken);
        let waits_with = |gang: Gang| gpu.contexts.iter().any(|pending| self.queues.gang(pending.client) == Some(gang));
        let is_kept_from_running = |client: ClientId| {
            let attachment = gpu.attachments.get(&client);
            attachment.is_some_and(|attachment| attachment.attached.is_some() && attachment.engine != Engine::Managed)
                && !self.queues.gang(client).is_some_and(waits_with)
        };
        // Demands that do not fit anyway are not made worse by contexts.
        let most = gpu.ledger.needs_up_to(capacity).find(|(_, client)| is_kept_from_running(*client));
        let most = most.map(|(need, _)| need);
        let room = most.and_then(|most| (capacity - most).checked_div(gpu.context_bytes(&self.settings, 1)));
        let room = room.map_or(usize::MAX, |room| usize::try_from(room).unwrap_or(usize::MAX));
        let too_many = if gpu.drained { gpu.contexts.len() } else { gpu.contexts.len().saturating_sub(room) };
        let deferred = gpu.contexts.iter().rev().take(too_many).take_while(|pending| waits(pending)).count();
        if let Some(gpu) = self.gpus.get_mut(id) {
            gpu.contexts.defer(if gpu.access == Access::Gone { 0 } else { deferred });
        }
    }

    /// Tells deferred clients that they may wait for long.
    fn notify_deferred(&mut self, id: GpuId) {
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        for pending in gpu.contexts.deferred_mut().filter(|pending| !pending.told) {
            pending.told = true;
            let (client, why) = (pending.client, WaitReason::Context);
            self.effects.command(Command::Waiting { client, gpus: GpuSet::from([id]), why });
        }
    }

    /// Admits clients that attach, once there is room or they have waited long enough. Returns when to look again.
    pub(crate) fn answer_attaching(&mut self, id: GpuId) -> Option<Time> {
        loop {
            self.count_deferred(id);
            let gpu = self.gpus.get(id).filter(|gpu| !gpu.contexts.is_empty())?;
            let Some((client, since, behind)) = gpu.contexts.first() else {
                self.notify_deferred(id);
                return self.refuse_contexts(id);
            };
            // No client is admitted without room during a restore: the restore would fail permanently.
            let restored = gpu.returning.and_then(|returning| returning.restored).map(|since| since + RESTORE);
            let deadline = restored.map_or(since + ATTACH_TIMEOUT, |restored| restored.max(since + ATTACH_TIMEOUT));
            // Capacity sets aside the contexts of all waiting clients; those behind this one do not exist yet.
            let behind = gpu.context_bytes(&self.settings, behind);
            let unverified = self.request_verification(client, id);
            let gpu = self.gpus.get(id)?;
            let room =
                gpu.capacity(&self.settings).saturating_add(behind) >= gpu.ledger.charged().saturating_add(unverified);
            let reserved = gpu.total.saturating_sub(gpu.reserve(&self.settings))
                < gpu.overhead_wanted(&self.settings).saturating_sub(behind);
            if (!room || reserved || gpu.incomplete) && self.now < deadline {
                return Some(deadline);
            }
            // Limits are computed next: the earlier ones may count on the room of contexts that were deferred until
            // now.
            if self.quota.has_changed() {
                return None;
            }
            let committed = since + FIRST_LIMIT_TIMEOUT;
            if !self.quota.has_first_limit(client, id) && self.now < committed {
                return Some(committed);
            }
            let now = self.now;
            let gpu = self.gpus.get_mut(id)?;
            gpu.contexts.pop();
            gpu.attachments.get_mut(&client)?.attached = Some(now);
            self.effects.command(Command::Attached { client, gpu: id });
            let is_drained = gpu.drained;
            self.with_quota(|quota, cx, fx| quota.admit(cx, fx, client, id));
            if is_drained {
                self.drain_client(client); // its context predates the scheduler
            }
        }
    }

    /// Tells clients that have been deferred for long that their contexts have no room. The request stays until the
    /// client detaches. Returns when to tell the next.
    fn refuse_contexts(&mut self, id: GpuId) -> Option<Time> {
        if self.gpus.get(id).is_some_and(|gpu| gpu.drained) {
            return None; // until it is in use again
        }
        let waiting = self.gpus.get(id).into_iter().flat_map(|gpu| gpu.contexts.iter());
        let waiting: Vec<(ClientId, Time)> =
            waiting.filter(|pending| !pending.refused).map(|pending| (pending.client, pending.since)).collect();
        let mut next: Option<Time> = None;
        for (client, since) in waiting {
            if self.rules.waits_for_memory(client) {
                continue;
            }
            let due = since + CONTEXT_TIMEOUT;
            if self.now < due {
                next = Some(next.map_or(due, |next| next.min(due)));
                continue;
            }
            let attaching = self.gpus.get_mut(id).into_iter().flat_map(|gpu| gpu.contexts.iter_mut());
            attaching.filter(|pending| pending.client == client).for_each(|pending| pending.refused = true);
            self.effects.command(Command::Denied { client, gpu: id, bytes: 0, why: Denial::NoContext });
        }
        next
    }
}
