//! Wake-ups, one for each reason. A wake-up with nothing to do is harmless, so wake-ups need not be
//! cancelled precisely.

use crate::{api::*, entity::Entity};
use std::collections::{BTreeMap, BTreeSet};

/// The reason for a wake-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) enum Wake {
    /// A turn may be over, or a client that attaches the GPU has waited long enough.
    Gpu(GpuId),
    /// The client's answer to a revoke or an eviction is due.
    Client(ClientId),
    /// The entity's request may join the queues, or it ages.
    Entity(Entity),
    /// Unverified bytes expire.
    Verification(GpuId),
    /// A measurement that should explain failed mappings is overdue.
    Failures(GpuId),
    /// A measurement for held limit requests is due or overdue.
    HeldRequests(GpuId),
    /// A limit request has waited long enough, or the acknowledgement of a lowered limit is
    /// overdue.
    Limits,
    /// The client may be asked again to evict memory that it could not evict before.
    Eviction(ClientId, GpuId),
    /// The client's memory has not changed for a while.
    Ahead(ClientId, GpuId),
    /// The client has not prepared to sleep in time, or a failed step is due for a retry.
    Sleep(ClientId),
}

#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Timers {
    #[serde(with = "crate::encoding::pairs")]
    at: BTreeMap<Wake, Time>,
    order: BTreeSet<(Time, Wake)>,
}

impl Timers {
    /// Sets the time of a wake-up, replacing an earlier time. `None` cancels the wake-up.
    pub fn set(&mut self, wake: Wake, at: Option<Time>) {
        let old = match at {
            Some(at) => self.at.insert(wake, at),
            None => self.at.remove(&wake),
        };
        if old == at {
            return;
        }
        if let Some(old) = old {
            self.order.remove(&(old, wake));
        }
        if let Some(at) = at {
            self.order.insert((at, wake));
        }
    }

    pub fn get(&self, wake: Wake) -> Option<Time> {
        self.at.get(&wake).copied()
    }

    pub fn next(&self) -> Option<Time> {
        self.order.first().map(|(at, _)| *at)
    }

    /// Removes and returns a wake-up that is due.
    pub fn pop(&mut self, now: Time) -> Option<Wake> {
        let (_, wake) = *self.order.first().filter(|(at, _)| *at <= now)?;
        self.set(wake, None);
        Some(wake)
    }
}
