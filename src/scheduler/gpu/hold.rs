//! A client's lock of a GPU, and statistics of earlier locks.

use super::drain_time::DrainTime;
use crate::{api::*, entity::Entity};
use std::time::Duration;

/// The lock state of a client on one GPU.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct ClientLock {
    pub hold: Option<Hold>,
    /// The client failed to drain in its last hold, so it gets less time in the next one. Cleared by a hold that ends
    /// normally.
    pub slow_to_drain: bool,
    pub drains: DrainTime,
    /// When the client last held the lock, or attached the GPU.
    pub last_run: Time,
    pub grants: u64,
    pub lock_time: Duration,
    pub wait_time: Duration,
}

impl ClientLock {
    pub fn new(now: Time) -> Self {
        Self {
            hold: None,
            slow_to_drain: false,
            drains: DrainTime::default(),
            last_run: now,
            grants: 0,
            lock_time: Duration::ZERO,
            wait_time: Duration::ZERO,
        }
    }

    /// Whether the client holds the lock, cannot drain, and has reported so, now or in its last hold. Such a client may
    /// be mapping memory in order to drain, and need more. A holder that became undrainable without a report gets no
    /// more memory.
    pub fn may_need_memory(&self) -> bool {
        self.hold.as_ref().is_some_and(|hold| hold.is_undrainable() && (hold.stuck || self.slow_to_drain))
    }

    /// Records the end of a hold.
    pub fn ended(&mut self, now: Time, hold: &Hold) {
        self.lock_time += now.saturating_sub(hold.since);
        self.last_run = now;
        self.slow_to_drain = hold.undrainable && (hold.stuck || self.slow_to_drain);
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
    /// Locks with the same group were granted together, and are revoked together.
    pub group: u64,
    pub since: Time,
    /// How long the GPU was idle before the grant, waiting for this client's memory to be moved in.
    pub moved: Duration,
    /// The request had aged before it was granted.
    pub aged: bool,
    /// The finish tags at the grant: the owner's, and the client's own if it has a weight of its own.
    pub finish_tag: Time,
    pub own_finish_tag: Time,
    /// The clock of the turn: how long other clients have waited for this holder. It has been running since
    /// `waited_since`.
    pub waited: Duration,
    pub waited_since: Option<Time>,
    /// The first waiting request, and the longest expected time to move memory for it. The longest is kept because the
    /// time shrinks during the turn, as memory of other clients is evicted.
    pub exchange: Option<(Entity, Duration)>,
    /// When the turn ends if other clients keep waiting for this holder; waiters on other GPUs may extend it. `None`:
    /// no client waits, or the end is unknown.
    pub ends: Option<Time>,
    /// The request was granted by backfilling: ahead of this first request, until this time.
    pub backfills: Option<(Entity, Time)>,
    /// The number of waiters and the grace period last sent to the holder.
    pub told: Option<(u32, Duration)>,
    /// The bytes that the holder was last asked to prepare to evict.
    pub prepared: u64,
    /// The revoke that the holder has not answered with a release. `None`: it was not revoked.
    pub revoked: Option<Revoked>,
    /// The client's process is stopped, so it does not count as a holder until it runs again.
    pub suspended: bool,
    /// The client reported that it cannot drain.
    pub stuck: bool,
    /// The holder takes longer to drain than usual, and may need other members of its gang in order to drain.
    pub lags: bool,
    /// The holder's time to drain has passed. Whenever it is revoked, it does not count as a holder.
    pub undrainable: bool,
}

/// A revoke that the client has not answered with a release yet.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(crate) struct Revoked {
    /// When the first revoke was sent.
    pub first: Time,
    /// When the last revoke was sent.
    pub since: Time,
    /// When the client, which reported itself stuck, is revoked again.
    pub again: Option<Time>,
    /// The delay after its next report of that kind.
    pub backoff: Duration,
}

impl Hold {
    pub fn new(entity: Entity, number: u64, group: u64, since: Time) -> Self {
        Self {
            entity,
            number,
            group,
            since,
            moved: Duration::ZERO,
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

    /// Whether the holder does not count as one: other clients are admitted beside it, and its memory stays where it
    /// is.
    pub fn is_bypassed(&self) -> bool {
        self.suspended || self.is_undrainable()
    }
}
