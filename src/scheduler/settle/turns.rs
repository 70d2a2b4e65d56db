//! Turns: when holders have to release the lock. The clock of a turn runs only while the holder
//! keeps another client waiting.

use super::Pressure;
use crate::{
    api::*,
    gpu::Hold,
    machine::Machine,
    policy::Precedence,
    policy::{SHORTEST_GRACE, Waiter},
    queue::Entity,
};
use std::time::Duration;

/// A holder is asked again to prepare for eviction when the number of bytes to evict has grown by
/// this much.
const PREPARE_STEP: u64 = 256 << 20;

/// The state that is common to all holders of a GPU.
struct Holders {
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

/// The state of one holder's turn.
struct TurnState {
    /// The holder keeps a waiting client from running.
    wanted: bool,
    /// Bytes that the holder must evict after its turn.
    leaves: u64,
}

impl Machine {
    /// Runs the clocks of holders that keep other clients waiting, informs holders, and revokes
    /// holders whose turn is over. Returns the time at which the next turn ends.
    pub(super) fn update_turns(&mut self, id: GpuId, pressure: &Pressure) -> Option<Time> {
        let now = self.now;
        self.gpus.get(id)?;
        let until = self.model().together_until(id);
        let all = self.holders_of(id, pressure);
        if until.is_some_and(|until| until <= now) {
            self.forget_utilization(id);
        }
        let mut next = until.filter(|_| all.together);
        let mut short = pressure.short;
        for client in self.gpus.holders(id).collect::<Vec<_>>() {
            let Some(state) = self.turn_state(client, id, pressure, &all, &mut short) else { continue };
            let again = self.update_holder(client, id, pressure, &all, &state);
            next = next.into_iter().chain(again).min();
        }
        next
    }

    fn holders_of(&self, id: GpuId, pressure: &Pressure) -> Holders {
        let first = self.gpus.holds_on(id).map(|(_, hold)| hold).find(|hold| hold.revoked.is_none());
        Holders {
            exclusive: self.settings.anti_thrash != AntiThrash::Off,
            // A lone holder may always continue. `turn_ends` decides when its turn ends.
            together: self.gpus.holders(id).nth(1).is_none() || self.model().may_stay(id),
            first: first.map(|hold| hold.entity),
            awaited: self.queues.behind(id).next().is_some() || self.lacks_contexts(id),
            waiters: self.queues.queue_length(id).max(1),
            grace: self
                .model()
                .policy()
                .grace(&self.settings, pressure.waiter.map_or(Duration::ZERO, |waiter| waiter.moving)),
        }
    }

    /// The state of a holder's turn. Deducts the holder's part from the `short` bytes that holders
    /// have to free. `None`: the holder was already revoked.
    fn turn_state(
        &self,
        client: ClientId,
        id: GpuId,
        pressure: &Pressure,
        all: &Holders,
        short: &mut u64,
    ) -> Option<TurnState> {
        let (hold, account) = (self.gpus.hold(client, id)?, self.gpus.account(client, id)?);
        let evictable = if hold.is_bypassed() { 0 } else { account.evictable() };
        let is_first = pressure.locked_out && pressure.first == Some(hold.entity);
        let gives = *short > 0 && evictable > 0 && pressure.grower != Some(client);
        let wanted = !is_first && (gives || (all.exclusive && pressure.locked_out));
        let leaves = if gives { evictable.min(*short) } else { 0 };
        *short -= leaves;
        // The allowance may exceed the mapped memory, and only mapped memory is evicted.
        let leaves = leaves.min(account.report.mapped);
        hold.revoked.is_none().then_some(TurnState { wanted, leaves })
    }

    /// Informs or revokes one holder. Returns the time of its next check.
    fn update_holder(
        &mut self,
        client: ClientId,
        id: GpuId,
        pressure: &Pressure,
        all: &Holders,
        state: &TurnState,
    ) -> Option<Time> {
        let (now, wanted) = (self.now, state.wanted);
        let hold = self.gpus.hold_mut(client, id)?;
        if let Some((first, waiter)) = pressure.first.zip(pressure.waiter) {
            hold.expect_exchange(first, waiter.arrives);
        }
        let hold = self.gpus.hold(client, id)?;
        let ends = self.turn_ends(client, id, hold, pressure, all, wanted)?;
        let own_end = wanted.then_some(ends).filter(|at| *at < Time::MAX);
        let capped = self.model().shares().capped_at(client, id);
        let helps = self.model().helps_to_drain(hold);
        // If holders may not continue together, all holders except the first have to release the
        // lock. A gang that conflicts with an earlier gang has to release the lock too.
        let surplus = all.exclusive && !all.together && all.first.is_some_and(|first| hold.entity != first);
        let surplus = surplus || self.model().yields(hold.entity);
        // Memory for other programs is evicted without waiting for the end of a turn.
        let vacates = pressure.at_once && state.leaves > 0 || self.model().is_crowded_out(id, &[client]);
        // If a rule caps the holder's time, or requests outside the queue wait for the GPU, the
        // holder should release the GPU whenever the holder is idle.
        let (tells, waiters, grace) = match capped {
            _ if wanted => (true, all.waiters, all.grace),
            None if !all.awaited => (false, all.waiters, all.grace),
            _ => (true, 1, SHORTEST_GRACE),
        };
        let grace = grace.max(self.model().gang_grace(hold));
        let hold = self.gpus.hold_mut(client, id)?;
        hold.run_clock(now, wanted);
        hold.ends = own_end;
        let told = hold.told.unwrap_or((0, grace));
        let tell = match (told.0 > 0, tells) {
            (false, true) => Some((waiters, grace)),
            (true, false) => Some((0, grace)),
            (true, true) if grace > told.1 * 2 || told.1 > grace * 2 => Some((waiters, grace)),
            _ => None,
        };
        let over = ends <= now;
        let spent = capped.is_some_and(|at| at <= now);
        let goes = !helps && (surplus || spent || vacates || self.suspended || (wanted && over));
        // Host memory takes longer to allocate than to fill, so the holder allocates it during the
        // rest of the turn.
        let prepare = state.leaves >= hold.prepared.saturating_add(PREPARE_STEP) && !over;
        hold.prepared = if prepare { state.leaves } else { hold.prepared };
        // A holder that is revoked is sent no other message.
        let tell = tell.filter(|_| !goes);
        hold.told = tell.or(hold.told);
        if let Some((waiters, grace)) = tell {
            self.effects.command(Command::Contended { client, gpus: GpuSet::from([id]), waiters, grace });
        }
        if prepare {
            self.effects.command(Command::Prepare { client, gpu: id, bytes: state.leaves });
        }
        if goes {
            self.revoke(client, id);
            return None;
        }
        let ends = capped.into_iter().chain(wanted.then_some(ends));
        ends.filter(|at| *at < Time::MAX && !helps).min()
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
            Some(first) => self.model().shares().precedence(first, client),
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
                let holder = self.model().policy_holder(client, id, hold, pressure.first);
                self.model().policy().turn(&self.settings, &holder, &Waiter { precedence, ..waiter })
            }
            _ => self.settings.time_quantum,
        };
        let gang = hold.entity.gang().filter(|gang| equal && self.queues.gangs().is_job(*gang));
        let turn = turn.max(gang.map_or(Duration::ZERO, |gang| self.shortest_gang_turn(gang, id, pressure.waiter)));
        // A holder that would be granted again immediately is not revoked, since that would only
        // cost a drain.
        let other = pressure.first.filter(|_| !pressure.overdue && equal && wanted && waited >= turn);
        let stays = other.and_then(|other| self.model().precedes_until(client, id, other)).unwrap_or_default();
        let ends = self.now.saturating_add(turn.saturating_sub(waited)).max(stays);
        // Turns of other members of the holder's gang count as the same turn.
        let gang_since = pressure.first.and_then(|first| self.model().awaited_since(hold.entity, first));
        let gang_ends = gang_since.map(|since| since.saturating_add(turn));
        let ends = gang_ends.map_or(ends, |at| at.min(ends));
        let backfills = hold.backfills.filter(|(first, _)| pressure.first == Some(*first));
        Some(match backfills.map(|(_, until)| until) {
            Some(until) if equal && !pressure.overdue => until,
            Some(until) => until.min(ends),
            None => ends,
        })
    }
}
