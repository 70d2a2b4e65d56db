//! Turns: when holders have to release the lock. The clock of a turn runs only while the holder
//! keeps another client waiting.

use super::Model;
use crate::{
    api::*,
    gpu::{Access, Hold, ReservationNeeds, TurnStep},
    policy::{self, Precedence, SHORTEST_GRACE, Waiter, utilization::MEASURED},
    queue::{Entity, Gang},
};
use std::time::Duration;

/// The minimum length of a gang's turn, as a multiple of the gang's hand-over time. During a
/// hand-over, members spin for members that have already drained. With turns of this length,
/// spinning costs 3 % of the time.
const HAND_OVERS_PER_TURN: u32 = 33;

/// How often a gang's wait for another gang is checked. Whether the two gangs can run together also
/// depends on reports about other GPUs, and such a report does not settle this GPU.
const CONFLICT_LOOK: Duration = Duration::from_millis(100);

/// A holder is asked again to prepare for eviction when the number of bytes to evict has grown by
/// this much.
const PREPARE_STEP: u64 = 256 << 20;

/// The state that is common to all holders of a GPU.
pub(crate) struct Holders {
    /// Holders exclude each other.
    exclusive: bool,
    /// The holders may continue together.
    together: bool,
    /// The entity that stays if the holders may not continue together.
    first: Option<Entity>,
    /// Requests outside the queue wait for a client of a better class, or contexts wait for clients
    /// that could sleep when idle.
    awaited: bool,
    /// The number of waiting requests that is sent to holders. At least 1.
    waiters: u32,
    /// The grace period that is sent to holders.
    grace: Duration,
}

/// Why holders of a GPU should release it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Pressure {
    /// Lacking bytes that only holders can free.
    pub short: u64,
    /// The holder that itself lacks these bytes and is not asked to free them.
    pub grower: Option<ClientId>,
    /// Holders or reservations lack bytes, in addition to the queue.
    pub overdue: bool,
    /// The bytes are for other programs, so holders are revoked before their turn ends.
    pub at_once: bool,
    /// The first request in the queue, or a gang that is in other queues and waits for these
    /// holders.
    pub first: Option<Entity>,
    /// Whether holders of the lock prevent the first request from being granted.
    pub locked_out: bool,
    /// The first request, as the policy sees it.
    pub waiter: Option<Waiter>,
}

impl Pressure {
    /// Adds the bytes that reservations lack and only holders can free. The queue has added nothing
    /// to `short` yet, so any missing bytes are overdue.
    pub fn add_reservations(&mut self, needs: &ReservationNeeds) {
        if needs.short > self.short {
            self.short = needs.short;
            self.grower = self.grower.or(needs.caller);
        }
        self.overdue = self.short > 0;
    }

    /// Adds the bytes that a holder lacks and only other holders can free. Only the holder that was
    /// granted first may wait for others: two holders that wait for each other would never continue.
    /// So the other holders are revoked even if they lack bytes.
    pub fn add_growth(&mut self, holder: ClientId, short: u64) {
        if short > 0 {
            self.short = self.short.max(short);
            self.grower = Some(holder);
        }
    }

    /// Adds the first request of the queue, and the bytes that it lacks and only holders can free.
    pub fn add_first(&mut self, first: Entity, waiter: Waiter, short: u64, locked_out: bool) {
        self.short = self.short.max(short);
        (self.first, self.locked_out, self.waiter) = (Some(first), locked_out, Some(waiter));
    }

    /// Counts a gang in other queues that waits for the holders as the first request.
    pub fn add_conflict(&mut self, gang: Option<Entity>) {
        if gang.is_some() {
            (self.first, self.locked_out) = (gang, true);
            self.waiter.get_or_insert_default();
        }
    }
}

impl Holders {
    pub fn are_together(&self) -> bool {
        self.together
    }
}

impl Model<'_> {
    /// The holders of a GPU that were not revoked.
    pub fn unrevoked_holders(&self, id: GpuId) -> Vec<ClientId> {
        self.gpus.holds_on(id).filter(|(_, hold)| hold.revoked.is_none()).map(|(client, _)| client).collect()
    }

    /// When to check a gang's wait for another gang. `first`: the first request of a GPU.
    pub fn checks_conflict_at(&self, first: Option<Entity>) -> Option<Time> {
        first.filter(|first| self.waits_for_gang(*first)).map(|_| self.now + CONFLICT_LOOK)
    }

    /// The state that is common to all holders of a GPU.
    pub fn holders_of(&self, id: GpuId, pressure: &Pressure) -> Holders {
        let first = self.gpus.holds_on(id).map(|(_, hold)| hold).find(|hold| hold.revoked.is_none());
        Holders {
            exclusive: self.settings.anti_thrash != AntiThrash::Off,
            // A lone holder may always continue. `turn_ends` decides when its turn ends.
            together: self.gpus.holders(id).nth(1).is_none() || self.may_stay(id),
            first: first.map(|hold| hold.entity),
            awaited: self.queues.behind(id).next().is_some() || self.lacks_contexts(id),
            waiters: self.queues.queue_length(id).max(1),
            grace: policy::grace(self.settings, pressure.waiter.map_or(Duration::ZERO, |waiter| waiter.moving)),
        }
    }

    /// The next step of a holder's turn. Deducts the holder's part from the `short` bytes that this
    /// and the following holders have to free. `None`: the holder was already revoked.
    pub fn turn_step(
        &self,
        client: ClientId,
        id: GpuId,
        pressure: &Pressure,
        all: &Holders,
        short: &mut u64,
    ) -> Option<TurnStep> {
        let (hold, account) = (self.gpus.hold(client, id)?, self.gpus.account(client, id)?);
        let evictable = if hold.is_bypassed() { 0 } else { account.evictable() };
        let is_first = pressure.locked_out && pressure.first == Some(hold.entity);
        let gives = *short > 0 && evictable > 0 && pressure.grower != Some(client);
        // Bytes that the holder must evict after its turn. Other holders free the rest, even if this
        // holder was already revoked.
        let leaves = if gives { evictable.min(*short) } else { 0 };
        *short -= leaves;
        if hold.revoked.is_some() {
            return None;
        }
        // The allowance may exceed the mapped memory, and only mapped memory is evicted.
        let leaves = leaves.min(account.report.mapped);
        // Whether the holder keeps a waiting client from running.
        let wanted = !is_first && (gives || (all.exclusive && pressure.locked_out));
        let mut hold = hold.clone();
        if let Some((first, waiter)) = pressure.first.zip(pressure.waiter) {
            hold.expect_exchange(first, waiter.arrives);
        }
        let ends = self.turn_ends(client, id, &hold, pressure, all, wanted)?;
        let capped = self.shares().capped_at(client, id);
        let helps = self.helps_to_drain(&hold);
        // If holders may not continue together, all holders except the first have to release the
        // lock. A gang that conflicts with an earlier gang has to release the lock too.
        let surplus = all.exclusive && !all.together && all.first.is_some_and(|first| hold.entity != first);
        let surplus = surplus || self.yields(hold.entity);
        // Memory for other programs is evicted without waiting for the end of a turn.
        let vacates = pressure.at_once && leaves > 0 || self.is_crowded_out(id, [client]);
        // If a rule caps the holder's time, or requests outside the queue wait for the GPU, the
        // holder should release the GPU whenever the holder is idle.
        let (tells, waiters, grace) = match capped {
            _ if wanted => (true, all.waiters, all.grace),
            None if !all.awaited => (false, all.waiters, all.grace),
            _ => (true, 1, SHORTEST_GRACE),
        };
        let grace = grace.max(self.gang_grace(&hold));
        hold.run_clock(self.now, wanted);
        hold.ends = wanted.then_some(ends).filter(|at| *at < Time::MAX);
        let told = hold.told.unwrap_or((0, grace));
        let tell = match (told.0 > 0, tells) {
            (false, true) => Some((waiters, grace)),
            (true, false) => Some((0, grace)),
            (true, true) if grace > told.1 * 2 || told.1 > grace * 2 => Some((waiters, grace)),
            _ => None,
        };
        let over = ends <= self.now;
        let spent = capped.is_some_and(|at| at <= self.now);
        let goes = !helps && (surplus || spent || vacates || self.access(id) == Access::Suspended || (wanted && over));
        // Host memory takes longer to allocate than to fill, so the holder allocates it during the
        // rest of the turn.
        let prepare = (leaves >= hold.prepared.saturating_add(PREPARE_STEP) && !over).then_some(leaves);
        hold.prepared = prepare.unwrap_or(hold.prepared);
        // A holder that is revoked is sent no other message.
        let tell = tell.filter(|_| !goes);
        hold.told = tell.or(hold.told);
        let next = capped.into_iter().chain(wanted.then_some(ends)).filter(|at| *at < Time::MAX && !helps).min();
        Some(TurnStep { hold, tell, prepare, goes, next: next.filter(|_| !goes) })
    }

    /// When a holder's turn ends if other clients keep waiting for the holder. `None`: the client
    /// has no history on this GPU.
    fn turn_ends(
        &self,
        client: ClientId,
        id: GpuId,
        hold: &Hold,
        pressure: &Pressure,
        all: &Holders,
        wanted: bool,
    ) -> Option<Time> {
        let waited = hold.waited(self.now);
        let precedence = match pressure.first {
            Some(first) => self.shares().precedence(first, client),
            None => Precedence::Equal,
        };
        // Holders or reservations need the bytes, in addition to the first request in the queue.
        let is_overruled = pressure.overdue && precedence == Precedence::After;
        let precedence = if is_overruled { Precedence::Equal } else { precedence };
        let equal = precedence == Precedence::Equal;
        // A client that wants the GPU for itself reports nothing about its work. So its turn is the
        // administrator's time quantum.
        let for_itself = self.gpus.history(client, id)?.utilization.is_for_itself();
        let turn = match pressure.waiter {
            Some(waiter) if !equal || !for_itself && (all.exclusive || pressure.grower.is_none()) => {
                let holder = self.policy_holder(client, id, hold, pressure.first);
                self.policy().turn(self.settings, &holder, &Waiter { precedence, ..waiter })
            }
            _ => self.settings.time_quantum,
        };
        let gang = hold.entity.gang().filter(|gang| equal && self.queues.gangs().is_job(*gang));
        let turn = turn.max(gang.map_or(Duration::ZERO, |gang| self.shortest_gang_turn(gang, id, pressure.waiter)));
        // A holder that would be granted again immediately is not revoked, since that would only
        // cost a drain.
        let other = pressure.first.filter(|_| !pressure.overdue && equal && wanted && waited >= turn);
        let stays = other.and_then(|other| self.precedes_until(client, id, other)).unwrap_or_default();
        let ends = self.now.saturating_add(turn.saturating_sub(waited)).max(stays);
        // Turns of other members of the holder's gang count as the same turn.
        let gang_since = pressure.first.and_then(|first| self.awaited_since(hold.entity, first));
        let gang_ends = gang_since.map(|since| since.saturating_add(turn));
        let ends = gang_ends.map_or(ends, |at| at.min(ends));
        let ends = if precedence == Precedence::Before { ends } else { ends.max(hold.worthwhile_until()) };
        let backfills = hold.backfills.filter(|(first, _)| pressure.first == Some(*first));
        Some(match backfills.map(|(_, until)| until) {
            Some(until) if equal && !pressure.overdue => until,
            Some(until) => until.min(ends),
            None => ends,
        })
    }

    /// The minimum length of a gang's turn on a GPU, so that hand-overs cost little. The time
    /// quantum and `max-wait` are upper bounds. A turn that only measures utilization is short,
    /// because the measurement may show that the clients can run together.
    fn shortest_gang_turn(&self, gang: Gang, id: GpuId, waiter: Option<Waiter>) -> Duration {
        let measures = |waiter: Waiter| !waiter.evicts && (waiter.unmeasured || !waiter.holders_measured);
        if self.settings.anti_thrash == AntiThrash::Auto && waiter.is_some_and(measures) {
            return MEASURED.min(self.settings.time_quantum);
        }
        self.queues
            .gangs()
            .hand_over(gang)
            .saturating_mul(HAND_OVERS_PER_TURN)
            .min(self.settings.time_quantum)
            .min(self.settings.turn_within_max_wait(self.queues.queue_length(id)))
    }
}
