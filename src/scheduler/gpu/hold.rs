//! A client's hold of a GPU's lock, and statistics of its earlier holds.

use super::drain_time::DrainTime;
use crate::{api::*, entity::Entity};
use std::time::Duration;

/// The first and the longest delay before a stuck holder is revoked again. The delay doubles with
/// each attempt.
pub(crate) const STUCK: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// How long a turn waits for a holder's memory, beyond the time that the returned bytes take at
/// [`RETURN_RATE`]. A holder whose memory returns more slowly is revoked at the end of its turn.
const RETURN_PATIENCE: Duration = Duration::from_secs(3);
/// The slowest rate, in bytes per second, at which memory is expected to return. Hard disks, which may
/// hold swap files, are about twice as fast.
const RETURN_RATE: u64 = 64 << 20;

/// The lock state of a client on one GPU.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct ClientLock {
    pub hold: Option<Hold>,
    /// The client failed to drain in its last hold, so it has less time to drain in the next hold.
    /// Cleared by a hold that ends normally.
    pub slow_to_drain: bool,
    /// The client could not drain, and did not use the memory that it was allowed for that. So it gets
    /// no more memory while it cannot drain. Cleared by a hold that ends normally.
    pub hoards: bool,
    pub drains: DrainTime,
    /// When the client last held the lock. If it never held the lock: when it attached the GPU.
    pub last_run: Time,
    pub grants: u64,
    pub lock_time: Duration,
    pub wait_time: Duration,
}

impl ClientLock {
    pub fn new(now: Time) -> Self {
        Self { last_run: now, ..Self::default() }
    }

    /// Whether the client holds the lock, is undrainable, and reported in this or the previous hold
    /// that it cannot drain. Such a client may have to map more memory before it can drain. A
    /// holder that became undrainable without a report gets no more memory, and neither does one that
    /// left its memory unused.
    pub fn may_need_memory(&self) -> bool {
        let reported = |hold: &Hold| hold.is_undrainable() && (hold.stuck || self.slow_to_drain);
        !self.hoards && self.hold.as_ref().is_some_and(reported)
    }

    /// Records the end of a hold.
    pub fn ended(&mut self, now: Time, hold: &Hold) {
        self.lock_time += now.saturating_sub(hold.since);
        self.last_run = now;
        self.slow_to_drain = hold.undrainable && (hold.stuck || self.slow_to_drain);
        self.hoards &= hold.undrainable;
        if let Some(revoked) = hold.revoked.filter(|_| !hold.suspended) {
            self.drains.drained(now.saturating_sub(revoked.first), hold.lags);
        }
    }
}

/// A client's present hold of the lock of one GPU.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Hold {
    pub entity: Entity,
    /// Orders the holders of a GPU.
    pub number: u64,
    /// Locks with the same group number were granted together and are revoked together.
    pub group: u64,
    pub since: Time,
    /// How long the GPU was idle before the grant while this client's memory was being moved in.
    pub moved: Duration,
    /// How the rest of this client's memory returns after the grant. `None`: all memory was there.
    pub returning: Option<Returning>,
    /// The request had waited long enough to precede the other requests of its owner.
    pub aged: bool,
    /// The owner's finish tag at the grant.
    pub finish_tag: Time,
    /// The client's own finish tag at the grant, if the client has a weight of its own.
    pub own_finish_tag: Time,
    /// The clock of the turn: how long other clients had waited for this holder when the clock was
    /// last stopped.
    pub waited: Duration,
    /// When the clock was last started. `None`: the clock is stopped.
    pub waited_since: Option<Time>,
    /// The first waiting request, and the longest expected time to move memory for that request.
    /// The expected time shrinks during the turn, as memory of other clients is evicted.
    pub exchange: Option<(Entity, Duration)>,
    /// When the turn ends if other clients keep waiting for this holder. Waiters on other GPUs may
    /// extend the turn. `None`: no client waits, or the end is unknown.
    pub ends: Option<Time>,
    /// Set if the request was backfilled, that is, granted ahead of the GPU's first request.
    /// Contains that first request and the end of the backfilled turn.
    pub backfills: Option<(Entity, Time)>,
    /// The number of waiters and the grace period last sent to the holder.
    pub told: Option<(u32, Duration)>,
    /// The number of bytes that the holder was last asked to prepare for eviction.
    pub prepared: u64,
    /// The revoke that the holder has not answered with a release. `None`: it was not revoked.
    pub revoked: Option<Revoked>,
    /// The client's process is stopped. The client does not count as a holder until the process
    /// continues.
    pub suspended: bool,
    /// The client reported that it cannot drain.
    pub stuck: bool,
    /// The holder takes longer to drain than usual. The holder may need other members of its gang
    /// in order to drain.
    pub lags: bool,
    /// The holder did not drain in time. While it is revoked, it does not count as a holder.
    pub undrainable: bool,
}

/// The return of a holder's memory to the GPU.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(crate) struct Returning {
    /// Bytes that were missing at the grant ([`Account::returning`](super::Account::returning)).
    all: u64,
    /// Bytes of them that have returned.
    done: u64,
    /// How long the return took. `None`: some bytes are missing.
    took: Option<Duration>,
}

/// A revoke that the client has not answered with a release yet.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(crate) struct Revoked {
    /// When the first revoke was sent.
    pub first: Time,
    /// When the last revoke was sent.
    pub since: Time,
    /// When the client is revoked again after reporting itself stuck.
    pub again: Option<Time>,
    /// The delay of the next revoke if the client reports itself stuck again.
    pub backoff: Duration,
}

/// A step of a holder's turn.
#[derive(Debug)]
pub(crate) struct TurnStep {
    /// The hold after this step.
    pub hold: Hold,
    /// The number of waiters and the grace period to send to the holder.
    pub tell: Option<(u32, Duration)>,
    /// Bytes for which the holder should allocate host memory.
    pub prepare: Option<u64>,
    /// The turn is over.
    pub goes: bool,
    /// When the next step is due.
    pub next: Option<Time>,
}

impl Hold {
    pub fn new(entity: Entity, number: u64, group: u64, since: Time) -> Self {
        Self {
            entity,
            number,
            group,
            since,
            moved: Duration::ZERO,
            returning: None,
            aged: false,
            finish_tag: Time::ZERO,
            own_finish_tag: Time::ZERO,
            waited: Duration::ZERO,
            waited_since: None,
            exchange: None,
            ends: None,
            backfills: None,
            told: None,
            prepared: 0,
            revoked: None,
            suspended: false,
            stuck: false,
            lags: false,
            undrainable: false,
        }
    }

    /// Records that this many bytes of the holder's memory are missing at the grant.
    pub fn begin_return(&mut self, missing: u64) {
        self.returning = (missing > 0).then_some(Returning { all: missing, done: 0, took: None });
    }

    /// Records how many bytes of the holder's memory are still missing.
    pub fn follow_return(&mut self, now: Time, missing: u64) {
        if let Some(Returning { all, done, took: took @ None }) = &mut self.returning {
            *done = all.saturating_sub(missing).max(*done);
            *took = (missing == 0).then(|| now.saturating_sub(self.since));
        }
    }

    /// The earliest end of a turn that was worth the return of the holder's memory: the holder has then
    /// had its memory for as long as the return took.
    ///
    /// **A turn in which a client's memory only returns is wasted, and a client whose turns are all
    /// wasted never finishes.** From a slow disk, memory can take longer than a time quantum.
    pub fn worthwhile_until(&self) -> Time {
        let length = self.returning.map_or(Duration::ZERO, |Returning { done, took, .. }| match took {
            Some(took) => took.saturating_mul(2),
            None => RETURN_PATIENCE + Duration::from_millis(done / (RETURN_RATE / 1000)),
        });
        self.since.saturating_add(length)
    }

    /// How long other clients have waited for this holder.
    pub fn waited(&self, now: Time) -> Duration {
        self.waited + self.waited_since.map_or(Duration::ZERO, |since| now.saturating_sub(since))
    }

    /// Starts or stops the clock of the turn.
    pub fn run_clock(&mut self, now: Time, runs: bool) {
        if runs {
            self.waited_since.get_or_insert(now);
        } else if let Some(since) = self.waited_since.take() {
            self.waited += now.saturating_sub(since);
        }
    }

    /// Updates the expected time to move memory for the first waiting request.
    pub fn expect_exchange(&mut self, first: Entity, takes: Duration) {
        let before = self.exchange.filter(|(entity, _)| *entity == first).map_or(Duration::ZERO, |(_, before)| before);
        self.exchange = Some((first, before.max(takes)));
    }

    /// Whether the holder was revoked and has failed to drain in time.
    pub fn is_undrainable(&self) -> bool {
        self.undrainable && self.revoked.is_some()
    }

    /// Whether the holder may need other members of its gang in order to drain.
    pub fn may_need_others(&self) -> bool {
        self.stuck || self.lags
    }

    /// Whether the holder was revoked and is expected to drain.
    pub fn drains(&self) -> bool {
        self.revoked.is_some() && !self.is_bypassed()
    }

    /// Whether other clients are admitted beside the holder as if it did not hold the lock. The
    /// holder's memory stays on the GPU.
    pub fn is_bypassed(&self) -> bool {
        self.suspended || self.is_undrainable()
    }
}
