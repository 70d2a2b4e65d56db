//! A client's lock of a GPU, and statistics of earlier ones.

use super::drain_time::DrainTime;
use crate::{api::*, entity::Entity};
use std::time::Duration;

/// The lock state of a client on one GPU.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct ClientLock {
    pub hold: Option<Hold>,
    /// The client did not drain in its last hold, so it is given less time in the next. A hold that ends normally
    /// clears this.
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

    /// Whether the client holds the lock, cannot drain, and has said so, now or in its last hold: it may be mapping memory in order
    /// to drain, and need more. A holder that became undrainable because it says nothing does not.
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
    /// How long the GPU was idle before the grant because this client's memory was moved in first.
    pub moved: Duration,
    /// The request had aged.
    pub aged: bool,
    /// The finish tags at the grant: of the client's owner, and of the client where it has a weight of its own.
    pub finish_tag: Time,
    pub own_finish_tag: Time,
    /// The clock of the turn: how long other clients have waited for this holder. It runs since `waited_since`.
    pub waited: Duration,
    pub waited_since: Option<Time>,
    /// The first request that waits, and the most that moving memory for it was expected to take: less is left of that
    /// while memory of other clients leaves during the turn.
    pub exchange: Option<(Entity, Duration)>,
    /// When the turn ends, by itself, while others wait for this holder; other GPUs may give it longer. `None`: they do not
    /// wait, or that is not known.
    pub ends: Option<Time>,
    /// It was granted the GPU before that request, which was the first, until that time.
    pub backfills: Option<(Entity, Time)>,
    /// The waiters and the grace that the holder was last told.
    pub told: Option<(u32, Duration)>,
    /// The bytes that the holder was told to prepare to evict.
    pub prepared: u64,
    /// The revoke that it has not answered with a release. `None`: it was not revoked.
    pub revoked: Option<Revoked>,
    /// Its process is stopped, so it does not count as a holder until it runs again.
    pub suspended: bool,
    /// The client reported that it cannot drain.
    pub stuck: bool,
    /// It takes longer to drain than usual, and may need other members of its gang in order to drain.
    pub lags: bool,
    /// Its time to drain has passed. Whenever it is revoked, it does not count as a holder.
    pub undrainable: bool,
}

/// A revoke that was not answered by a release yet.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(crate) struct Revoked {
    /// When the first revoke was sent.
    pub first: Time,
    /// When the last revoke was sent.
    pub since: Time,
    /// When the client, which reported itself stuck, is revoked again.
    pub again: Option<Time>,
    /// The delay after its next such report.
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

    /// Takes what moving memory for the first request that waits is expected to take now.
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

    /// Whether it does not count as a holder: other clients are admitted beside it, and its bytes stay where they are.
    pub fn is_bypassed(&self) -> bool {
        self.suspended || self.is_undrainable()
    }
}
