//! Room for the context of a client that wakes up, and for its memory if other clients use that. A
//! restore that runs out of memory cannot be repeated. So a restore begins only after its room was
//! set aside and a later measurement found the room free.
//!
//! A GPU sets room aside for one client at a time. That room is no capacity of other clients, so
//! their requests may not fit, and wait. They would wait without a bound if the room could not
//! become free. So **room is set aside only while it fits beside all memory that cannot be
//! evicted**, on each of the client's GPUs. A client whose room does not fit delays no other client.
//! Each settling of one of its GPUs looks at it again, before any request is served.
//!
//! So other clients' later demand cannot keep a client from returning: it can be evicted, except
//! memory of holders that cannot drain. Two programs with long kernels that take turns would keep the
//! client out for ever, because the GPU is never without a kernel. So holders that cannot drain have
//! [`PATIENCE`] to drain before the room is given up, and twice that time after each failure. Other
//! clients thus wait for at most twice the time that a drain has already taken.

use super::{Access, Context, Gpu, Hold, contexts::RESTORE};
use crate::{
    api::{ClientId, Time},
    effects::Effects,
};
use std::time::Duration;

/// The interval between measurements while a waking client waits for one.
const MEASURE: Duration = Duration::from_secs(1);
/// How long room stays set aside beside holders that cannot drain, the first time.
const PATIENCE: Duration = Duration::from_secs(10);

/// The client that waits for its restore on a GPU, or is being restored there. A GPU has at most
/// one such client at a time, so memory that is measured as free is available to that client.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(crate) struct Returning {
    pub client: ClientId,
    /// Bytes set aside for the client's context.
    pub bytes: u64,
    /// The client's charge that the restore maps. It was lent to other clients until now.
    pub lent: u64,
    /// When these bytes became free of other charges. `None`: other clients still have some of the
    /// bytes.
    pub secured: Option<Time>,
    /// A measurement that began after `secured` found the bytes free.
    pub is_measured: bool,
    /// When the restore of the client began. `None`: the client still waits.
    pub restored: Option<Time>,
    /// When a measurement was last requested.
    pub asked: Option<Time>,
    /// Since when the room does not fit beside holders that cannot drain.
    pub lacks_since: Option<Time>,
}

impl Returning {
    pub fn new(client: ClientId, bytes: u64, lent: u64) -> Self {
        let (secured, restored, asked, lacks_since) = (None, None, None, None);
        Self { client, bytes, lent, secured, is_measured: false, restored, asked, lacks_since }
    }

    /// Records whether the bytes are secured. If not, other clients still have some of the bytes.
    pub fn set_secured(&mut self, now: Time, is_secured: bool) {
        if is_secured {
            if self.secured.is_none() {
                (self.secured, self.asked) = (Some(now), None);
            }
        } else {
            (self.secured, self.is_measured) = (None, false);
        }
    }

    /// Handles a measurement that began no earlier than `begun`. `free` is the number of bytes that
    /// no client has or may map. If `free` is `None`, the number is unknown, and the clients'
    /// reports have to suffice.
    pub fn measured(&mut self, begun: Time, free: Option<u64>) {
        if self.secured.is_some_and(|since| since <= begun) {
            self.is_measured = free.is_none_or(|free| free >= self.bytes.saturating_add(self.lent));
        }
    }
}

/// The state of the client that waits for its restore on a GPU.
#[derive(Debug)]
pub(crate) enum Return {
    /// The client is being restored or waits for room. The time of the next check.
    Waits(Option<Time>),
    /// The restore takes too long, so the next client no longer waits for it.
    IsOverdue(ClientId),
    /// The client has room on this GPU.
    HasRoom(ClientId),
    /// The client does not fit beside memory that cannot be evicted.
    DoesNotFit(ClientId),
}

impl Gpu {
    /// Sets room aside for a waking client, unless another client waits for its restore.
    pub fn expect_return(&mut self, cx: Context, fx: &mut Effects, client: ClientId) {
        if self.returning.is_none() {
            let (bytes, lent) = self.room_of(cx, client);
            self.lent.remove(&client);
            self.returning = Some(Returning::new(client, bytes, lent));
            fx.touch(self.id);
        }
    }

    /// Bytes that a client needs for its context, and bytes of its charge that other clients use,
    /// while no room is set aside for it.
    fn room_of(&self, cx: Context, client: ClientId) -> (u64, u64) {
        let context = self.away.get(&client).copied().unwrap_or_else(|| self.context_of(cx, client));
        let lent = self.account(client).filter(|_| self.lent.contains(&client)).map_or(0, |account| account.charge);
        (context, lent)
    }

    /// The bytes that a waking client lacks beside memory that cannot be evicted. 0: the client fits.
    pub fn lacks_to_return(&self, cx: Context, client: ClientId) -> u64 {
        if self.access != Access::Turns {
            return 0;
        }
        let (context, lent) = if self.is_set_aside(client) { (0, 0) } else { self.room_of(cx, client) };
        let overhead = self.overhead_wanted(cx.settings).saturating_add(context);
        let taken = self.ledger.unevictable().saturating_add(lent).saturating_add(overhead);
        taken.saturating_sub(self.all(cx.settings))
    }

    /// Whether room is set aside for a waking client, or the client is being restored.
    pub fn is_set_aside(&self, client: ClientId) -> bool {
        self.returning.is_some_and(|returning| returning.client == client)
    }

    /// Lets other clients use the room of a client that does not fit now.
    pub fn give_up_room(&mut self, fx: &mut Effects, client: ClientId) {
        if let Some(returning) = self.returning.take_if(|returning| returning.client == client) {
            self.lent.extend(Some(client).filter(|_| returning.lent > 0));
            fx.touch(self.id);
        }
    }

    /// Whether the client that waits for its restore fits, or only holders that cannot drain are in its
    /// way, and have time left. Returns the end of that time.
    fn fits_or_waits(&mut self, cx: Context, client: ClientId) -> Option<Option<Time>> {
        let lacks = self.lacks_to_return(cx, client);
        let undrainable = self.holders().filter(|holder| self.hold(*holder).is_some_and(Hold::is_undrainable));
        let may_leave = undrainable.fold(0u64, |sum, holder| sum.saturating_add(self.unevictable_of(holder)));
        let (returning, attachment) = (self.returning.as_mut()?, self.attachments.get_mut(&client)?);
        if lacks == 0 {
            returning.lacks_since = None;
            return Some(None);
        }
        if lacks > may_leave {
            return None;
        }
        let patience = attachment.return_patience.max(PATIENCE);
        let until = returning.lacks_since.get_or_insert(cx.now).saturating_add(patience);
        if until <= cx.now {
            attachment.return_patience = patience.saturating_mul(2);
            return None;
        }
        Some(Some(until))
    }

    /// Reserves room for the context of a client that may be restored at any moment. The client's
    /// charge stays.
    pub fn reserve_return(&mut self, fx: &mut Effects, client: ClientId) {
        if let Some(bytes) = self.away.get(&client) {
            self.overdue.insert(client, *bytes);
            fx.touch(self.id);
        }
    }

    /// Lends the charge of a client that is off the GPU, until [`Gpu::expect_return`].
    pub fn lend(&mut self, fx: &mut Effects, client: ClientId) {
        if self.away.contains_key(&client) {
            self.lent.insert(client);
            fx.touch(self.id);
        }
    }

    /// Releases the room of a client that stays asleep.
    pub fn cancel_return(&mut self, fx: &mut Effects, client: ClientId) {
        if self.returning.take_if(|returning| returning.client == client).is_some() {
            fx.touch(self.id);
        }
    }

    /// Whether another client waits for its restore on the GPU.
    pub fn returns_other(&self, client: ClientId) -> bool {
        self.returning.is_some_and(|returning| returning.client != client)
    }

    /// Records that the client's restore has begun.
    pub fn begin_restore(&mut self, now: Time) {
        self.returning.iter_mut().for_each(|returning| returning.restored = Some(now));
    }

    /// Checks the room of the client that waits for its restore, and asks for a measurement of it.
    pub fn serve_return(&mut self, cx: Context, fx: &mut Effects) -> Option<Return> {
        let now = cx.now;
        let Returning { client, restored, .. } = self.returning?;
        if let Some(due) = restored.map(|since| since + RESTORE) {
            if now < due {
                return Some(Return::Waits(Some(due)));
            }
            self.give_up_return();
            return Some(Return::IsOverdue(client));
        }
        let Some(until) = self.fits_or_waits(cx, client) else { return Some(Return::DoesNotFit(client)) };
        let is_gone = self.access == Access::Gone; // the driver's error should reach the client
        let has_room = self.access == Access::Turns
            && self.trial.is_none()
            && !self.incomplete
            && self.ledger.unverified() == 0
            && self.ledger.charged() <= self.usable(cx.settings)
            && self.overhead_wanted(cx.settings) <= self.total.saturating_sub(self.reserve(cx.settings));
        let returning = self.returning.as_mut()?;
        returning.set_secured(now, has_room || is_gone);
        returning.is_measured |= is_gone;
        if returning.is_measured {
            return Some(Return::HasRoom(client));
        }
        if returning.asked.is_none_or(|asked| asked + MEASURE <= now) {
            returning.asked = Some(now);
            // A pending measurement may never arrive, or may have begun too early.
            self.measure_again(fx);
        }
        Some(Return::Waits(until.into_iter().chain([now + MEASURE]).min()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn at(ms: u64) -> Time {
        Duration::from_millis(ms)
    }

    #[test]
    fn only_a_measurement_that_began_with_the_room_secured_counts() {
        let mut returning = Returning::new(ClientId(1), 90, 10);
        let mut measured = |secured: Option<(u64, bool)>, begun, free| {
            if let Some((now, is_secured)) = secured {
                returning.set_secured(at(now), is_secured);
            }
            returning.measured(at(begun), free);
            returning.is_measured
        };
        assert!(!measured(None, 4, Some(200)), "others may have it");
        assert!(!measured(Some((10, true)), 9, Some(200)), "it began before");
        assert!(!measured(None, 12, Some(99)), "it is not there");
        assert!(measured(None, 14, Some(100)));
        assert!(measured(None, 16, None));
        assert!(!measured(Some((18, false)), 19, Some(200)), "others have some of it again");
    }
}
