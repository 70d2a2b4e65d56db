//! A client's lock of a GPU, and what is remembered of earlier ones.

use super::{Entity, drain_time::DrainTime};
use crate::api::*;
use std::time::Duration;

/// A client on a GPU, as far as the lock goes.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct ClientLock {
    pub hold: Option<Hold>,
    /// It did not drain in its last hold, and is not waited for as long in the next. A hold that ends without it being
    /// scheduled around clears this.
    pub slow_to_drain: bool,
    pub drains: DrainTime,
    /// When it last had the lock, or attached.
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

    /// The client gave the lock back.
    pub fn ended(&mut self, now: Time, hold: &Hold) {
        self.lock_time += now.saturating_sub(hold.since);
        self.last_run = now;
        self.slow_to_drain = hold.undrainable;
        if let Some(revoked) = hold.revoked.filter(|_| !hold.suspended) {
            self.drains.drained(now.saturating_sub(revoked.first), hold.lags);
        }
    }
}

/// A client's lock of one GPU.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Hold {
    pub entity: Entity,
    /// Orders the holders of a GPU.
    pub number: u64,
    /// What was granted with it is revoked with it.
    pub group: u64,
    pub since: Time,
    /// How long nobody had the GPU before that, because its memory was to come first.
    pub moved: Duration,
    /// It was granted because it had waited for so long.
    pub aged: bool,
    /// Until when it had been served before: its party, and itself where it has a weight of its own.
    pub finish_tag: Time,
    pub own_finish_tag: Time,
    /// How long somebody has been waiting for it: the turn's clock, which runs only then.
    pub waited: Duration,
    pub waited_since: Option<Time>,
    /// The waiters and the grace that the holder was last told.
    pub told: Option<(u32, Duration)>,
    /// The bytes that it was told to be ready to lose.
    pub prepared: u64,
    pub revoked: Option<Revoked>,
    /// Its process is stopped, so it is counted as no holder until it runs again.
    pub suspended: bool,
    /// It said that it cannot drain.
    pub stuck: bool,
    /// It takes longer to drain than it used to, and may need others of its gang for it.
    pub lags: bool,
    /// It had its time to drain. Whenever it is asked for the lock from now on, it is counted as no holder.
    pub undrainable: bool,
}

/// A revoke that was not answered by a release yet.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(crate) struct Revoked {
    /// When it was first asked.
    pub first: Time,
    /// When it was last asked.
    pub since: Time,
    /// It said that it is stuck, and is asked again then.
    pub again: Option<Time>,
    /// How long after the next time it says so.
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
            told: None,
            prepared: 0,
            revoked: None,
            suspended: false,
            stuck: false,
            lags: false,
            undrainable: false,
        }
    }

    pub fn waited(&self, now: Time) -> Duration {
        self.waited + self.waited_since.map_or(Duration::ZERO, |since| now.saturating_sub(since))
    }

    /// The clock of the turn runs from now on, or stands still.
    pub fn run_clock(&mut self, now: Time, runs: bool) {
        if runs {
            self.waited_since.get_or_insert(now);
        } else if let Some(since) = self.waited_since.take() {
            self.waited += now.saturating_sub(since);
        }
    }

    /// Whether it is asked for the lock and known to be unable to drain.
    pub fn is_undrainable(&self) -> bool {
        self.undrainable && self.revoked.is_some()
    }

    /// Whether it may be unable to drain without others of its gang.
    pub fn may_need_others(&self) -> bool {
        self.stuck || self.lags
    }

    /// Whether it is asked for the lock, and waited for.
    pub fn drains(&self) -> bool {
        self.revoked.is_some() && !self.is_bypassed()
    }

    /// Whether it is counted as no holder: others are admitted beside it, and its bytes stay where they are.
    pub fn is_bypassed(&self) -> bool {
        self.suspended || self.is_undrainable()
    }
}
