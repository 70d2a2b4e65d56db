//! Wake-ups, one for each reason. A wake-up that finds nothing to do is harmless, so none has to be cancelled exactly.

use crate::{api::*, lock::Entity};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) enum Wake {
    /// A turn may be over, or an attaching client has waited long enough.
    Gpu(GpuId),
    /// An answer of that client is due.
    Client(ClientId),
    /// That request may join the line.
    Entity(Entity),
    /// Bytes have been in doubt there for long.
    Verification(GpuId),
    /// A measurement that is to explain failed mappings is late.
    Failures(GpuId),
    /// A measurement that wishes wait for is late.
    HeldRequests(GpuId),
    /// A wish has waited long enough, or an acknowledgement of a lower limit is due.
    Limits,
    /// That client may be asked for its memory again.
    Eviction(ClientId, GpuId),
    /// Clients may be tried together there again, or nothing was seen of that GPU for long.
    Thrash(GpuId),
}

#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Timers {
    #[serde(with = "crate::encoding::pairs")]
    at: BTreeMap<Wake, Time>,
    order: BTreeSet<(Time, Wake)>,
}

impl Timers {
    /// One time for each; setting replaces.
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

    pub fn pop(&mut self, now: Time) -> Option<Wake> {
        let (_, wake) = *self.order.first().filter(|(at, _)| *at <= now)?;
        self.set(wake, None);
        Some(wake)
    }
}
