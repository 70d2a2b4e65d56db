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

use super::Model;
use crate::{
    api::*,
    gpu::{Hold, STUCK},
};
use std::time::Duration;

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

/// The answers that a client owes.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    /// GPUs on which an eviction is late.
    pub late: GpuSet,
    /// GPUs on which an undrainable holder has not used all memory that it is allowed, as far as
    /// measurements show.
    pub unused: GpuSet,
    /// GPUs on which the drain lags.
    pub lagging: GpuSet,
    /// GPUs on which the client becomes undrainable.
    pub undrainable: GpuSet,
    /// GPUs on which a revoke is withdrawn, because no request waits any more. The client is an
    /// ordinary holder again.
    pub unwanted: GpuSet,
    /// GPUs on which the client is revoked again, and the delay of the next revoke.
    pub again: Option<(GpuSet, Duration)>,
    /// When the answer to a revoke or to an eviction is overdue, so that the process is probed.
    pub overdue: Option<Time>,
    /// When the client is checked again.
    pub next: Option<Time>,
}

fn sooner(at: &mut Option<Time>, new: Time) {
    *at = Some(at.map_or(new, |old| old.min(new)));
}

impl Answers {
    /// Decides whether to probe the process now. Returns the new value of `probed`: when the process
    /// was probed, and the minimum time until the next probe.
    pub fn probe(&mut self, now: Time, probed: Option<(Time, Duration)>) -> (bool, Option<(Time, Duration)>) {
        let Some(due) = self.overdue else { return (false, None) };
        let (due, interval) = match probed {
            Some((at, interval)) => (due.max(at + interval), interval),
            None => (due, PROBE.0 / 2),
        };
        if due > now {
            sooner(&mut self.next, due);
            return (false, probed);
        }
        let interval = (interval * 2).min(PROBE.1);
        sooner(&mut self.next, now + interval);
        (true, Some((now, interval)))
    }
}

impl Model<'_> {
    /// The answers that a client owes now.
    pub fn answers(&self, client: ClientId) -> Answers {
        let (now, mut all) = (self.now, Answers::default());
        let Some(state) = self.clients.get(&client) else { return all };
        if self.sleep.is_foreign(client) {
            return all; // the client cannot answer, and the daemon follows the state of its process
        }
        let mut again: Option<(GpuSet, Duration)> = None;
        for (id, lock) in self.gpus.locks_of(client) {
            let mut note = |due: Option<Time>, ids: &mut GpuSet| match due {
                Some(due) if due <= now => drop(ids.insert(id)),
                Some(due) => sooner(&mut all.next, due),
                None => {}
            };
            if let Some(eviction) = self.gpus.account(client, id).and_then(|account| account.eviction.as_ref()) {
                sooner(&mut all.overdue, eviction.since + EVICTION_ANSWER);
                note(self.gpus.get(id).and_then(|gpu| gpu.late_at(client)), &mut all.late);
            }
            let Some(hold) = &lock.hold else { continue };
            let Some(revoked) = hold.revoked else { continue };
            let account = self.gpus.account(client, id).filter(|_| hold.is_undrainable());
            if account.is_some_and(|account| account.unused_since().is_some()) {
                all.unused.insert(id);
            }
            note(self.lags_at(client, id), &mut all.lagging);
            // The decision depends on time instead of the number of reports, because a client whose
            // work makes no CUDA calls reports only once.
            if !hold.undrainable && !state.stopped {
                let due = match (lock.slow_to_drain, hold.stuck) {
                    (true, _) => revoked.first + DRAIN.1,
                    (false, true) => revoked.first + DRAIN.0,
                    (false, false) => (revoked.first.max(state.heard) + SILENCE.0).min(revoked.first + SILENCE.1),
                };
                note(Some(due), &mut all.undrainable);
            }
            match revoked.again {
                Some(at) if at <= now => {
                    let (gpus, backoff) = again.get_or_insert((GpuSet::new(), STUCK.0));
                    gpus.insert(id);
                    *backoff = (*backoff).max(revoked.backoff);
                }
                Some(at) => sooner(&mut all.next, at),
                None => sooner(&mut all.overdue, revoked.since + REVOKE_ANSWER),
            }
        }
        all.again = again;
        all
    }

    /// Withdraws repeated revokes that no request needs any more. Locks that were revoked together
    /// are revoked again together or not at all.
    pub fn withdraw_unwanted(&self, client: ClientId, answers: &mut Answers) {
        let is_wanted = |(gpus, _): &mut (GpuSet, Duration)| gpus.iter().any(|id| self.is_wanted_from(client, *id));
        let unwanted = answers.again.take_if(|again| !is_wanted(again));
        answers.unwanted = unwanted.map(|(gpus, _)| gpus).unwrap_or_default();
    }

    /// The holds of a client that are charged before they end, because they may never end. If their
    /// time were charged only at the end, a tenant with many clients that never release would be
    /// served again and again before other tenants.
    pub fn charged_early(&self, client: ClientId, id: GpuId) -> Option<(Hold, Duration)> {
        let hold = self.gpus.hold(client, id)?.clone();
        let waited = hold.waited(self.now).min(self.now.saturating_sub(hold.since));
        Some((hold, waited))
    }
}
