//! Weighted fair queueing with virtual finish times (Demers, Keshav and Shenker, "Analysis and Simulation of a Fair Queueing
//! Algorithm", SIGCOMM 1989), between owners of turns ([`ShareOwner`]: users, or groups whose rule gives them a share). Among the clients
//! of one owner the policy decides.
//!
//! An owner that held the lock while others waited has used some of their time. Its *finish tag* is the time at which it will
//! have waited that off: the time it used, scaled by the weights of the waiting owners over its own weight. Its next request is
//! queued by that tag. Time in which no client could run because the owner's memory was being moved in counts as used. So a user
//! with ten clients gets no more turns than a user with one, and a newcomer does not wait for others to catch up with it.
//!
//! Tags are times on the machine's clock.

use super::{ShareOwner, Shares};
use crate::{api::*, lock::Hold};
use std::collections::BTreeMap;
use std::time::Duration;

/// The weights by which an owner that is served owes time to others.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Debt {
    own: u32,
    others: u32,
}

impl Debt {
    /// What is owed for that time.
    fn of(self, time: Duration) -> Duration {
        scaled(time, self.others.into(), self.own.into())
    }

    /// After how long as much is owed as that, with the time itself.
    pub fn until_as_much(self, time: Duration) -> Duration {
        scaled(time, self.own.into(), u128::from(self.own) + u128::from(self.others))
    }
}

fn scaled(time: Duration, by: u128, of: u128) -> Duration {
    let nanos = time.as_nanos().saturating_mul(by) / of.max(1);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

impl Shares<'_> {
    /// Until when a client has been served as its party, or as itself, if it had the lock and others waited for so much of the
    /// time; and what it owes the others then. None where nobody's time was taken.
    pub fn finish_tag(
        &self,
        client: ClientId,
        as_whom: ShareOwner,
        id: GpuId,
        hold: &Hold,
        waited: Duration,
    ) -> Option<(Time, Debt)> {
        let weights = self.weights_of_others(client, as_whom, id);
        if weights == 0 {
            return None;
        }
        let debt = Debt { own: self.weight_on(as_whom, id), others: weights };
        let waited = waited + hold.moved;
        let before = if as_whom == ShareOwner::Client(client) { hold.own_finish_tag } else { hold.finish_tag };
        let begun = hold.since.saturating_sub(hold.moved).max(before);
        Some((begun.saturating_add(waited).saturating_add(debt.of(waited)), debt))
    }

    /// What those who wait there, and share it with that client, count for together: other parties, each for no more than
    /// those of it who wait. For the client as itself its fellows are others, too.
    fn weights_of_others(&self, client: ClientId, as_whom: ShareOwner, id: GpuId) -> u32 {
        let own = self.owner(client);
        let mut others: BTreeMap<ShareOwner, u32> = BTreeMap::new();
        for waiting in self.lock.waiting_on(id) {
            let Some(owner) = self.owner(waiting) else { continue };
            let is_self = if own == Some(as_whom) { own == Some(owner) } else { waiting == client };
            if !is_self && self.are_peers(waiting, client) {
                let weight = others.entry(owner).or_default();
                *weight = weight.saturating_add(self.weight_of(waiting)).min(self.weight_on(owner, id));
            }
        }
        others.into_values().fold(0, u32::saturating_add)
    }

    /// The tags of a client's owners when it is granted a GPU: time that they had while no other wanted it is not owed.
    pub fn finish_tags_before(&self, client: ClientId, id: GpuId) -> (Time, Time) {
        let Some(owner) = self.owner(client) else { return Default::default() };
        let waiting = || self.lock.waiting_on(id).chain(self.lock.preempted(id));
        let tag = |as_whom: ShareOwner, is_wanted: bool| {
            self.state.finish_tag(as_whom, id).filter(|_| is_wanted).unwrap_or_default()
        };
        let by_others = waiting().any(|other| self.owner(other).is_some_and(|other| other != owner));
        let by_any = waiting().any(|other| other != client);
        (tag(owner, by_others), tag(ShareOwner::Client(client), by_any))
    }

    /// The virtual time until which a client has been served there.
    pub fn latest_finish_tag(&self, client: ClientId, id: GpuId) -> Time {
        self.owners(client).filter_map(|owner| self.state.finish_tag(owner, id)).max().unwrap_or_default()
    }

    /// By how much all clients that want a GPU are ahead of time, since the owners that they owed it to have gone. A time quantum
    /// of it is left, since turns do not end to the moment.
    pub fn ahead_of_time(&self, id: GpuId, granted: ClientId) -> Duration {
        let until = self.now.saturating_add(self.settings.time_quantum);
        let served = self.lock.waiting_on(id).chain([granted]).map(|client| self.latest_finish_tag(client, id));
        served.min().unwrap_or_default().saturating_sub(until)
    }

    pub fn tag_of(&self, owner: ShareOwner, id: GpuId) -> Option<Time> {
        self.state.finish_tag(owner, id)
    }
}
