//! CUDA contexts that do not exist yet. A client waits for room for its context on the GPU. If the
//! context would leave an attached client too little memory to ever run again, the waiting client
//! is *deferred*, and refused after [`CONTEXT_TIMEOUT`]. While contexts of admitted clients are only
//! estimated, it is refused after [`PATIENT_TIMEOUT`], because a measurement may show that there is room.

use super::{Context, Gpu, context_queue::PendingContext};
use crate::{
    api::*,
    effects::Effects,
    queue::Gang,
    quota::{CONTEXT_APPEARS, FIRST_LIMIT_TIMEOUT},
};
use std::time::Duration;

/// How long an attaching client waits for room. After that time the client is admitted without
/// room, and the driver decides.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(2);

/// How long attaching and waking clients wait for another client's restore. The limit is needed
/// because a stopped process can delay its restore indefinitely.
pub(super) const RESTORE: Duration = Duration::from_secs(10);
/// How long a client is deferred before it is notified that its context has no room. Some programs
/// give the discovery of GPUs three seconds, and report an error better than a timeout. If the
/// client's rule makes allocations wait, the client is never notified.
const CONTEXT_TIMEOUT: Duration = Duration::from_secs(2);
/// The longer wait while there may soon be room: a client of the GPU is being put to sleep, or the
/// context of an admitted client is not measured yet.
const PATIENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Memory that a restore needs beyond the measured context: at most `SLACK` bytes, and at most one
/// part in `SLACK_PART` of a GPU.
const SLACK: u64 = 64 << 20;
const SLACK_PART: u64 = 64;

/// What happens to the first client that waits for room for its context.
#[derive(Debug)]
pub(crate) enum Admission {
    /// The client waits. The time of the next check.
    Waits(Option<Time>),
    Admits(ClientId),
}

impl Gpu {
    /// Admits the first attaching client if it has room or has waited long enough.
    pub fn admit_context(&mut self, cx: Context, fx: &mut Effects) -> Admission {
        self.count_deferred(cx);
        if self.contexts.is_empty() {
            return Admission::Waits(None);
        }
        let Some((client, since, behind)) = self.contexts.first() else {
            self.notify_deferred(fx);
            return Admission::Waits(self.refuse_contexts(cx, fx));
        };
        // During a restore, no client is admitted without room. Otherwise the restore could run out
        // of memory and fail permanently.
        let restored = self.returning.and_then(|returning| returning.restored).map(|since| since + RESTORE);
        let deadline = restored.map_or(since + ATTACH_TIMEOUT, |restored| restored.max(since + ATTACH_TIMEOUT));
        // The capacity excludes the contexts of all waiting clients. The contexts behind this
        // client's do not exist yet, so their bytes are added.
        let behind = self.context_bytes(cx.settings, behind);
        let unverified = self.request_verification(cx, fx, client);
        let room =
            self.capacity(cx.settings).saturating_add(behind) >= self.ledger.charged().saturating_add(unverified);
        let reserved = self.total.saturating_sub(self.reserve(cx.settings))
            < self.overhead_wanted(cx.settings).saturating_sub(behind);
        if (!room || reserved || self.incomplete) && cx.now < deadline {
            return Admission::Waits(Some(deadline));
        }
        // Waits here because limits have to be recomputed first. The old limits may rely on the room
        // of contexts that were deferred until now.
        if cx.quota.has_changed() {
            return Admission::Waits(None);
        }
        let committed = since + FIRST_LIMIT_TIMEOUT;
        if !cx.quota.has_first_limit(client, self.id) && cx.now < committed {
            return Admission::Waits(Some(committed));
        }
        self.contexts.pop();
        let Some(attachment) = self.attachments.get_mut(&client) else { return Admission::Waits(None) };
        attachment.attached = Some(cx.now);
        fx.command(Command::Attached { client, gpu: self.id });
        Admission::Admits(client)
    }

    /// Whether the client's context was complete at the time `begun`.
    pub fn has_context(&self, client: ClientId, begun: Time) -> bool {
        let Some(attachment) = self.attachments.get(&client).filter(|_| !self.away.contains_key(&client)) else {
            return false;
        };
        let since = attachment.attached.map(|allowed| {
            let at_last = allowed.saturating_add(CONTEXT_APPEARS);
            attachment.used.map_or(at_last, |used| used.max(allowed).min(at_last))
        });
        since.is_some_and(|since| since <= begun)
    }

    /// Counts the clients to defer. A client is deferred if its context would leave an attached
    /// client too little memory for that client's whole demand. The attached client could then
    /// never run again. The deferred client waits until the attached client needs less or detaches.
    pub fn count_deferred(&mut self, cx: Context) {
        if self.contexts.is_empty() {
            return;
        }
        // A client that reports demand or waits for a GPU has a context from an earlier scheduler,
        // so it is never deferred.
        let waits = |pending: &PendingContext| {
            let needs_nothing = self.account(pending.client).is_some_and(|account| account.report.demand == 0);
            needs_nothing && cx.queues.waiting(pending.client).is_none()
        };
        let estimated = self.context_bytes(cx.settings, self.estimated_contexts());
        let taken = self.measured.unwrap_or(0).saturating_add(estimated);
        let taken = taken.saturating_add(self.returning_bytes());
        let capacity = self.total.saturating_sub(self.reserve(cx.settings)).saturating_sub(taken);
        let waits_with = |gang: Gang| self.contexts.iter().any(|pending| cx.queues.gang(pending.client) == Some(gang));
        let is_kept_from_running = |client: ClientId| {
            let attachment = self.attachments.get(&client);
            attachment.is_some_and(|attachment| attachment.attached.is_some() && attachment.engine != Engine::Managed)
                && !cx.queues.gang(client).is_some_and(waits_with)
        };
        // Ignores demands that would not fit even without the pending contexts.
        let most = self.ledger.needs_up_to(capacity).find(|(_, client)| is_kept_from_running(*client));
        let most = most.map(|(need, _)| need);
        let room = most.and_then(|most| (capacity - most).checked_div(self.context_bytes(cx.settings, 1)));
        let room = room.map_or(usize::MAX, |room| usize::try_from(room).unwrap_or(usize::MAX));
        let too_many = if self.drained { self.contexts.len() } else { self.contexts.len().saturating_sub(room) };
        let deferred = self.contexts.iter().rev().take(too_many).take_while(|pending| waits(pending)).count();
        self.contexts.defer(cx.now, if self.access == super::Access::Gone { 0 } else { deferred });
    }

    /// The number of admitted clients whose contexts are not in a measurement yet.
    fn estimated_contexts(&self) -> usize {
        self.unmeasured.len().saturating_sub(self.contexts.len())
    }

    /// Notifies deferred clients that their wait may be long.
    pub fn notify_deferred(&mut self, fx: &mut Effects) {
        for pending in self.contexts.deferred_mut().filter(|pending| !pending.told) {
            pending.told = true;
            let (client, why) = (pending.client, WaitReason::Context);
            fx.command(Command::Waiting { client, gpus: GpuSet::from([self.id]), why });
        }
    }

    /// Denies the contexts of clients that have been deferred for too long. A client's request
    /// stays until the client detaches. Returns the time of the next denial.
    pub fn refuse_contexts(&mut self, cx: Context, fx: &mut Effects) -> Option<Time> {
        if self.drained {
            return None; // clients wait until the drain ends
        }
        let is_leaving = self.attachments.keys().any(|client| cx.sleep.is_leaving(*client));
        let may_have_room = is_leaving || (self.measured.is_some() && self.estimated_contexts() > 0);
        let timeout = if may_have_room { PATIENT_TIMEOUT } else { CONTEXT_TIMEOUT };
        let mut next: Option<Time> = None;
        for pending in self.contexts.iter_mut().filter(|pending| !pending.refused) {
            if cx.rules.waits_for_memory(pending.client) {
                continue;
            }
            // A client that is not deferred waits for room that becomes free.
            let due = pending.deferred.map_or(pending.since + PATIENT_TIMEOUT, |since| since + timeout);
            if cx.now < due {
                next = Some(next.map_or(due, |next| next.min(due)));
                continue;
            }
            pending.refused = true;
            let (client, why) = (pending.client, Denial::NoContext);
            fx.command(Command::Denied { client, gpu: self.id, bytes: 0, why });
        }
        next
    }

    /// Whether pending contexts lack room, and a client of the GPU could sleep to make room.
    pub fn lacks_contexts(&self, cx: Context) -> bool {
        let all = self.total.saturating_sub(self.reserve(cx.settings));
        let is_full =
            || self.overhead_wanted(cx.settings) > all || self.ledger.unevictable() > self.capacity(cx.settings);
        self.has_only_clients
            && (self.contexts.deferred() > 0 || (!self.contexts.is_empty() && is_full()))
            && self.attachments.keys().any(|client| cx.rules.sleep_after(*client, cx.settings).is_some())
    }

    /// Bytes that a restore needs for a client's context.
    pub fn context_of(&self, cx: Context, client: ClientId) -> u64 {
        let measured = cx.quota.measured_context(client, self.id).unwrap_or(0);
        let slack = SLACK.min(self.total / SLACK_PART);
        measured.max(self.context_bytes(cx.settings, 1)).saturating_add(slack)
    }

    /// Records that a client has left the GPU, and the bytes that its context will need when the
    /// client returns.
    pub fn left(&mut self, cx: Context, fx: &mut Effects, client: ClientId) {
        let bytes = self.context_of(cx, client);
        self.lent.remove(&client);
        self.unmeasured.remove(&client);
        self.contexts.remove(client);
        self.end_return(client);
        if self.attachments.contains_key(&client) {
            self.away.entry(client).or_insert(bytes);
        }
        self.charge_checkpointed(cx, fx, client);
        // The next measurement no longer contains the client's context.
        self.contexts.restart_deferrals(cx.now);
        self.measure(fx);
        fx.touch(self.id);
    }

    /// Records that a client is on the GPU again.
    pub fn came_back(&mut self, now: Time, fx: &mut Effects, client: ClientId) {
        self.end_return(client);
        self.lent.remove(&client);
        if let Some(attachment) = self.attachments.get_mut(&client)
            && self.away.remove(&client).is_some()
        {
            self.unmeasured.insert(client);
            (attachment.used, attachment.return_patience) = (Some(now), Duration::ZERO);
            match &mut attachment.attached {
                Some(attached) => *attached = now,
                // This scheduler has sent the client no limit.
                None => self.contexts.push(now, client),
            }
        }
        fx.touch(self.id);
    }

    /// Handles a measurement of free memory for the client that waits for its restore.
    pub fn returning_measured(&mut self, settings: &Settings, begun: Time, free: Option<u64>) {
        // Memory that other clients may map at any time is not free for the restore.
        let promised = self.ledger.charged().saturating_sub(self.in_use());
        let overdue = self.overdue.values().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
        let taken =
            promised.saturating_add(self.context_bytes(settings, self.estimated_contexts())).saturating_add(overdue);
        if let Some(returning) = self.returning.as_mut() {
            returning.measured(begun, free.map(|free| free.saturating_sub(taken)));
        }
    }
}
