//! Clients that do not answer: a holder that cannot drain, a stopped process, or a client that is
//! slow to evict. The scheduler waits, asks again, or schedules around such clients. The scheduler
//! never punishes such clients, because they may be waiting for another client themselves.
//!
//! A holder is *undrainable* if it reports itself stuck or does not answer, and does not drain in
//! time. An undrainable holder no longer counts as a holder, and other clients are admitted beside
//! it if its memory leaves room. A client that does not fit beside it waits until the kernel ends,
//! because nothing can interrupt a kernel. The holder is still revoked periodically. After it has
//! released the lock, it takes turns like any other client.
//!
//! An undrainable holder may need more memory in order to drain. The clients beside it free this
//! memory at the end of their turns, and none of them runs beside it again before it has the memory.
//!
//! A client that does not answer is charged only for its measured memory and gets no more. The same
//! applies to an undrainable holder that has left allowed memory unused for a minute. So a process
//! cannot withhold memory that it does not have on the GPU, whatever it reported.

use crate::{
    api::*,
    gpu::ClientLock,
    machine::Machine,
    queue::{Blocked, Entity, Gang},
    timers::Wake,
};
use std::time::Duration;

/// The first and the longest delay before a stuck holder is revoked again. The delay doubles with
/// each attempt.
pub(crate) const STUCK: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// How long a holder may take to drain after the first revoke. The first value applies if the
/// holder reports itself stuck. The second value applies, even without a report, if the holder also
/// failed to drain in its last hold. The second value lets two programs that wait for each other
/// make progress.
const DRAIN: (Duration, Duration) = (Duration::from_secs(3), Duration::from_millis(500));
/// How long a holder that runs without answering the revoke may take to drain: after its last
/// message, and in total. A library that is moving memory answers late, but keeps sending messages.
const SILENCE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// How long the answer to a revoke may take before the scheduler probes the process.
const REVOKE_ANSWER: Duration = Duration::from_secs(1);
/// How long the answer to an eviction may take before the scheduler probes the process. The time is
/// longer than for a revoke, because an eviction moves bytes.
const EVICTION_ANSWER: Duration = Duration::from_secs(2);
/// The first and the longest interval between probes.
const PROBE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

impl Machine {
    /// Handles a holder's report that it cannot drain or evict.
    pub(crate) fn stuck(&mut self, client: ClientId, gpus: &GpuSet, reason: StuckReason) {
        let cannot_evict = match reason {
            StuckReason::UntrackedWork => return, // concerns the client's memory, not a drain
            StuckReason::HostFull => Some(EvictionBlock::HostFull),
            StuckReason::Broken => Some(EvictionBlock::Broken),
            StuckReason::UnseenWork => Some(EvictionBlock::UnseenWork),
            StuckReason::NeedsHost | StuckReason::LongWork | StuckReason::Capturing => None,
        };
        if let Some(why) = cannot_evict {
            return gpus.iter().for_each(|id| self.with_gpu(*id, |gpu, cx, fx| gpu.cannot_evict(cx, fx, client, why)));
        }
        if reason == StuckReason::NeedsHost {
            // The client's gate is open again and no thread waits at it. So the client's own
            // request must not cause a revoke.
            self.cancel(client, gpus);
        }
        let now = self.now;
        for id in gpus {
            let Some(hold) = self.gpus.hold_mut(client, *id) else { continue };
            let Some(revoked) = hold.revoked.as_mut() else { continue };
            hold.stuck = true;
            revoked.again = Some(now + revoked.backoff);
            revoked.backoff = (revoked.backoff * 2).min(STUCK.1);
            self.touch(*id);
            for entity in self.model().whole_queue(*id) {
                self.report_wait(entity, WaitReason::HolderStuck);
            }
        }
        self.touch_gang_peers(client);
        self.check(client);
    }

    /// Handles a process that was stopped, or has been continued.
    pub(crate) fn stopped(&mut self, client: ClientId, stopped: bool) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        let changed = state.stopped != stopped;
        state.stopped = stopped;
        self.quota.set_stopped(client, stopped || self.sleep.is_away(client));
        let gpus = self.gpus.of_client(client);
        let (now, waiting) = (self.now, self.queues.waiting(client));
        for id in gpus {
            if let Some(hold) = self.gpus.hold_mut(client, id)
                && let Some(revoked) = hold.revoked.as_mut()
            {
                if stopped {
                    hold.suspended |= revoked.again.is_none();
                } else if changed {
                    // Possibly the client has not read the revoke yet, so its time to answer and to
                    // drain starts anew.
                    hold.suspended = false;
                    revoked.first = now;
                    revoked.since = now;
                }
            }
            self.lock_changed(client, id);
        }
        self.end_gang_turn(self.queues.entity(client));
        if changed && let Some(entity) = waiting {
            if stopped {
                self.wait_until_it_runs(entity, client);
            } else if !self.model().any_absent(entity) {
                self.unblock(entity);
                self.enqueue(entity);
                self.update_entity(client);
            }
        }
        self.check(client);
    }

    /// Keeps a request from being granted while one of its clients is absent: stopped or held off
    /// its GPUs. If the members named the gang themselves, the other members wait too, because they
    /// cannot run without the absent client. A gang made by a rule may contain clients that do not
    /// wait for each other, so only the absent client waits.
    pub(crate) fn wait_until_it_runs(&mut self, entity: Entity, client: ClientId) {
        if let Entity::Gang(Gang::Group(_)) = entity {
            self.split(entity, &[client]);
            self.enqueue(entity);
        } else {
            self.block(entity, Blocked::Absent);
        }
    }

    /// Takes any message from a client as proof that its process runs.
    pub(crate) fn alive(&mut self, client: ClientId) {
        let now = self.now;
        let Some(state) = self.clients.get_mut(&client) else { return };
        state.heard = now;
        if state.stopped {
            self.stopped(client, false);
        }
    }

    /// Checks the answers that a client owes, asks again for overdue answers, and sets the time of
    /// the next check.
    pub(crate) fn check(&mut self, client: ClientId) {
        let now = self.now;
        let Some(state) = self.clients.get(&client) else { return };
        let mut again: (GpuSet, Duration) = (GpuSet::new(), STUCK.0);
        let mut next: Option<Time> = None;
        let mut overdue: Option<Time> = None;
        let mut undrainable = GpuSet::new();
        let mut late = GpuSet::new();
        let mut lagging = GpuSet::new();
        let mut unused = GpuSet::new();
        let sooner = |at: &mut Option<Time>, new: Time| *at = Some(at.map_or(new, |old| old.min(new)));
        for (id, lock) in self.gpus.locks_of(client) {
            if let Some(eviction) = self.gpus.account(client, id).and_then(|account| account.eviction.as_ref()) {
                sooner(&mut overdue, eviction.since + EVICTION_ANSWER);
                match self.gpus.get(id).and_then(|gpu| gpu.late_at(client)) {
                    Some(due) if due <= now => drop(late.insert(id)),
                    Some(due) => sooner(&mut next, due),
                    None => {}
                }
            }
            let Some(hold) = &lock.hold else { continue };
            let Some(revoked) = hold.revoked else { continue };
            let account = self.gpus.account(client, id).filter(|_| hold.is_undrainable());
            if account.is_some_and(|account| account.unused_since().is_some()) {
                unused.insert(id);
            }
            match self.model().lags_at(client, id) {
                Some(due) if due <= now => drop(lagging.insert(id)),
                Some(due) => sooner(&mut next, due),
                None => {}
            }
            // The decision depends on time instead of the number of reports, because a client whose
            // work makes no CUDA calls reports only once.
            if !hold.undrainable && !state.stopped {
                let due = match (lock.slow_to_drain, hold.stuck) {
                    (true, _) => revoked.first + DRAIN.1,
                    (false, true) => revoked.first + DRAIN.0,
                    (false, false) => (revoked.first.max(state.heard) + SILENCE.0).min(revoked.first + SILENCE.1),
                };
                match due {
                    due if due <= now => drop(undrainable.insert(id)),
                    due => sooner(&mut next, due),
                }
            }
            match revoked.again {
                Some(at) if at <= now => {
                    again.0.insert(id);
                    again.1 = again.1.max(revoked.backoff);
                }
                Some(at) => sooner(&mut next, at),
                None => sooner(&mut overdue, revoked.since + REVOKE_ANSWER),
            }
        }
        for id in &late {
            self.with_gpu(*id, |gpu, cx, fx| gpu.eviction_is_late(cx, fx, client));
        }
        for id in &lagging {
            self.lags(client, *id);
        }
        unused.into_iter().for_each(|id| self.measure(id));
        self.schedule_around(client, undrainable);
        // Locks that were revoked together are revoked again together or not at all.
        let wanted = again.0.iter().any(|id| self.model().is_wanted_from(client, *id));
        let unwanted = if wanted { GpuSet::new() } else { std::mem::take(&mut again.0) };
        for id in &unwanted {
            // No request waits any more, so the client is an ordinary holder again.
            self.change_hold(client, *id, |hold| hold.revoked = None);
        }
        if !unwanted.is_empty() {
            self.gang_continues(self.queues.entity(client));
            // GPUs are no longer kept to let the client drain.
            self.touch_conflicting_gangs(self.queues.entity(client));
            self.touch_gang_peers(client);
        }
        let Some(state) = self.clients.get_mut(&client) else { return };
        match overdue {
            None => state.probed = None,
            Some(due) => {
                let (due, interval) = match state.probed {
                    Some((at, interval)) => (due.max(at + interval), interval),
                    None => (due, PROBE.0 / 2),
                };
                if due <= now {
                    let interval = (interval * 2).min(PROBE.1);
                    state.probed = Some((now, interval));
                    self.effects.command(Command::Probe { client });
                    sooner(&mut next, now + interval);
                } else {
                    sooner(&mut next, due);
                }
            }
        }
        self.effects.wake(Wake::Client(client), next);
        if !again.0.is_empty() {
            self.revoke_now(client, again.0, Some(again.1));
        }
    }

    /// Marks holds as undrainable: other clients are admitted beside them from now on.
    fn schedule_around(&mut self, client: ClientId, gpus: GpuSet) {
        if gpus.is_empty() {
            return;
        }
        for id in &gpus {
            // The hold may never end. If its time were charged only at the end, a tenant with many
            // clients that never release would be served again and again before other tenants.
            if let Some(hold) = self.gpus.hold(client, *id).cloned() {
                let waited = hold.waited(self.now).min(self.now.saturating_sub(hold.since));
                self.charge_service(client, *id, &hold, waited);
            }
            self.change_hold(client, *id, |hold| hold.undrainable = true);
            if !self.gpus.lock(client, *id).is_some_and(ClientLock::may_need_memory) {
                self.measure(*id);
            }
        }
        self.effects.command(Command::Undrainable { client, gpus });
        let entity = self.queues.entity(client);
        self.end_gang_turn(entity);
        self.touch_conflicting_gangs(entity);
        if let Some(entity) = self.queues.waiting(client)
            && self.queues.request(entity).is_some_and(|r| r.blocked.is_none())
        {
            // Blocks the request. Otherwise it would wait for the client's own lock, ahead of other
            // requests.
            self.enqueue(entity);
        }
    }
}
