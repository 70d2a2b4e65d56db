//! The steps that bring one GPU to rest after an event: memory first, then the lock, then what holders are told. Settling a GPU on
//! which nothing changed does nothing.

mod contexts;
mod corun;
mod credit;
mod eviction;
mod eviction_blocks;
mod failures;
mod gang_conflict;
mod gangs;
mod measurements;
mod order;
mod protection;
mod requests;
mod reservations;
mod traffic;
mod unresponsive;

use crate::{
    api::*,
    fairness::Precedence,
    lock::{Blocked, Entity},
    machine::Machine,
    policy::{SHORTEST_GRACE, Waiter},
    timers::Wake,
};
use reservations::ReservationNeeds;
use std::time::Duration;

/// A holder is told of bytes that it is likely to lose when they are so many more than it was told.
const PREPARE_STEP: u64 = 256 << 20;

/// A gang that waits for another is looked at again after this: whether the two can run together depends on what is said of
/// other GPUs.
const CONFLICT_LOOK: Duration = Duration::from_millis(100);

/// A gang's turn is no shorter than so many times what its drain takes.
const DRAINS_PER_TURN: u32 = 5;

/// Why holders of a GPU are to give its lock back.
#[derive(Debug, Clone, Copy, Default)]
struct Pressure {
    /// Bytes that only holders can give.
    short: u64,
    /// A holder that is not to give them, since it is the one that lacks them.
    grower: Option<ClientId>,
    /// Bytes are lacked by more than those who wait for the lock.
    overdue: bool,
    /// The first in line.
    first: Option<Entity>,
    /// Whether the lock itself is in its way.
    locked_out: bool,
    /// What the turn depends on.
    waiter: Option<Waiter>,
}

impl Pressure {
    /// What clients with reservations lack that only holders can give; from here on more than the queue waits for bytes.
    fn add_reservations(&mut self, needs: &ReservationNeeds) {
        if needs.short > self.short {
            self.short = needs.short;
            self.grower = self.grower.or(needs.caller);
        }
        self.overdue = self.short > 0;
    }
}

impl Machine {
    pub(crate) fn settle(&mut self, id: GpuId) {
        // Who is here, how much there is, and in what order they wait.
        self.count_deferred(id);
        self.note_capacity(id);
        self.with_quota(|quota, cx, _| quota.note_offer(cx, id));
        self.enqueue_unblocked(id);
        let reclassified = self.reclassify(id);

        // Memory, for those who come first: overdrawn bytes and holders, then reservations, then the queue. `reserved_ahead` is
        // on its way out and spoken for.
        let mut pressure = Pressure::default();
        let holders_lack = self.make_room(id, &mut pressure);
        let reserved = self.serve_reservations(id, holders_lack);
        pressure.add_reservations(&reserved);
        let reserved_ahead = holders_lack.saturating_add(reserved.lacking);
        let mut lacking = self.serve_queue(id, reserved_ahead, &mut pressure);
        self.note_conflict(id, &mut pressure);
        if reserved_ahead == 0 && lacking == 0 {
            lacking = self.serve_undrainable(id);
        }
        let is_enough = reserved_ahead == 0 && lacking == 0;
        if let Some(gpu) = self.memory.get_mut(&id) {
            gpu.lacking = !is_enough;
        }
        let attaching = self.answer_attaching(id);
        if is_enough {
            self.credit_ahead(id);
        }

        // The lock: turns that end, and what holders are told.
        let turn = self.press(id, &pressure);
        let conflict = pressure.first.filter(|first| self.waits_for_gang(*first)).map(|_| self.now + CONFLICT_LOOK);
        let next = [attaching, turn, reserved.next, reclassified, conflict].into_iter().flatten().min();
        self.effects.wake(Wake::Gpu(id), next);
    }

    /// Requests that pinned memory kept out may fit once there is more room.
    fn note_capacity(&mut self, id: GpuId) {
        let Some(gpu) = self.memory.get_mut(&id) else { return };
        let capacity = gpu.capacity(&self.settings);
        if gpu.ledger.take_loosened() || capacity > gpu.capacity {
            for entity in self.lock.take_blocked_by_pinned(id) {
                self.enqueue(entity);
            }
        }
        if let Some(gpu) = self.memory.get_mut(&id) {
            gpu.capacity = capacity;
        }
    }

    /// Requests that waited for one of a better class, which has gone.
    fn enqueue_unblocked(&mut self, id: GpuId) {
        let free: Vec<Entity> = self.lock.behind(id).filter(|entity| !self.waits_behind(*entity, id)).collect();
        free.into_iter().for_each(|entity| self.enqueue(entity));
    }

    /// A gang that waits in other queues for the holders of this GPU counts as the first in line here.
    fn note_conflict(&mut self, id: GpuId, pressure: &mut Pressure) {
        if !pressure.locked_out
            && let Some(rival) = self.rival_of_holders(id)
        {
            pressure.first = Some(rival);
            pressure.locked_out = true;
            pressure.waiter.get_or_insert_default();
        }
    }

    /// Bytes for those who come before any waiter: contexts and strangers first, then holders that grow. Returns the
    /// bytes that are on their way out but spoken for.
    fn make_room(&mut self, id: GpuId, pressure: &mut Pressure) -> u64 {
        let mut owed = self.overdrawn(id);
        let next = self.members_of_first(id);
        if owed > 0 {
            pressure.short = self.collect(id, owed, &[], &next);
        }
        for holder in self.lock.holders(id).collect::<Vec<_>>() {
            if self.lock.hold(holder, id).is_none_or(|hold| hold.revoked.is_some()) {
                continue;
            }
            let lacking = self.credit(holder, id, owed);
            if lacking > 0 {
                owed = owed.saturating_add(lacking);
                let short = self.collect(id, owed, &[holder], &next);
                if short > 0 {
                    // It waits for its fellows' bytes. Only the first one granted does: two that wait for each other
                    // would wait for ever, so the others are asked to go, whatever they want themselves.
                    pressure.short = pressure.short.max(short);
                    pressure.grower = Some(holder);
                }
                break;
            }
        }
        owed
    }

    /// Sees to it that `owed` bytes are on their way out, from clients without the lock. Says how many are not.
    pub(crate) fn collect(&mut self, id: GpuId, owed: u64, spare: &[ClientId], last: &[ClientId]) -> u64 {
        let coming = self.arriving(id, spare);
        if owed > coming {
            self.evict(id, owed - coming, spare, last);
        }
        owed.saturating_sub(self.arriving(id, spare))
    }

    fn members_of_first(&self, id: GpuId) -> Vec<ClientId> {
        self.lock.first(id).map(|entity| self.lock.members(entity, id)).unwrap_or_default()
    }

    /// Prepares the first in line, grants what can be granted, and goes on with the next, until one has to wait.
    /// Returns the bytes that this one lacks.
    fn serve_queue(&mut self, id: GpuId, owed: u64, pressure: &mut Pressure) -> u64 {
        loop {
            let Some(entity) = self.lock.first(id) else { return 0 };
            let members = self.lock.members(entity, id);
            if !self.fits(entity, id, &members) {
                continue; // it left the line
            }
            let mut lacking = 0u64;
            if pressure.short == 0 {
                for member in &members {
                    lacking = lacking.saturating_add(self.credit(*member, id, owed));
                }
            } else {
                // Nothing is free, and what comes is owed to others.
                for member in &members {
                    let allowed = self.account(*member, id).map_or(0, |account| account.allowance);
                    lacking = lacking.saturating_add(self.need(*member, id).saturating_sub(allowed));
                }
            }
            let short = if lacking > 0 { self.collect(id, owed.saturating_add(lacking), &members, &[]) } else { 0 };
            if self.is_grantable(entity) {
                self.begin_trials(entity);
                self.grant(entity);
                continue;
            }
            if self.waits_behind(entity, id) {
                self.block(entity, Blocked::Behind(id));
                continue;
            }
            let locked = !self.is_admissible(entity, id);
            self.lock.note_idle_for(self.now, id, entity, lacking > 0 && !locked);
            if lacking > 0 && !locked {
                self.report_wait(entity, WaitReason::Eviction);
            }
            let burst =
                members.iter().filter_map(|m| self.histories.of(*m, id)).map(|history| history.bursts.expected()).max();
            let both_ways = |bytes| self.moving_both_ways(id, bytes, &members);
            let (moving, arrives) = (both_ways(short), both_ways(lacking));
            pressure.short = pressure.short.max(short);
            pressure.first = Some(entity);
            pressure.locked_out = locked;
            pressure.waiter = Some(Waiter {
                precedence: Precedence::default(),
                burst: burst.unwrap_or_default(),
                moving,
                arrives,
                evicts: lacking > 0,
                unmeasured: members
                    .iter()
                    .any(|m| self.histories.of(*m, id).is_some_and(|history| history.utilization.is_open())),
                holders_measured: self.are_measured(id),
                waiters: self.lock.queue_length(id),
                rank: self.lock.request(entity).map_or(Time::ZERO, |request| request.key.rank),
                aged: self.lock.request(entity).is_some_and(|request| request.aged),
                ..Waiter::default()
            });
            self.defer_behind(id);
            return lacking;
        }
    }

    /// A holder that cannot drain may need more bytes in order to get there. It comes after all who wait, and no holder
    /// gives anything for it. Returns the bytes that it lacks.
    fn serve_undrainable(&mut self, id: GpuId) -> u64 {
        let holders = self.lock.holds_on(id).filter(|(_, hold)| hold.is_undrainable());
        let mut lacking = 0u64;
        for holder in holders.map(|(client, _)| client).collect::<Vec<_>>() {
            lacking = lacking.saturating_add(self.credit(holder, id, lacking));
            if lacking > 0 {
                let mut spare = self.members_of_first(id);
                spare.push(holder);
                self.collect(id, lacking, &spare, &[]);
            }
        }
        lacking
    }

    /// Lets a request that cannot be served leave the line, so that it does not hold up others, until something that is
    /// pinned goes; a gang that is too large together falls apart.
    fn fits(&mut self, entity: Entity, id: GpuId, members: &[ClientId]) -> bool {
        if self.has_room(entity, id, members) {
            return true;
        }
        if members.len() > 1 {
            let all: Vec<ClientId> = self.lock.clients_of(entity).collect();
            self.split(entity, &all);
        } else {
            self.block(entity, Blocked::Pinned(id));
        }
        false
    }

    /// Whether a request could be served there if everybody who can give bytes did.
    pub(crate) fn has_room(&self, entity: Entity, id: GpuId, members: &[ClientId]) -> bool {
        let (Some(gpu), Some(_)) = (self.memory.get(&id), self.lock.request(entity)) else { return true };
        let mut own = 0u64;
        let mut need = 0u64;
        for member in members {
            own = own.saturating_add(gpu.ledger.unevictable_of(*member));
            need = need.saturating_add(self.need(*member, id));
        }
        let room = gpu.capacity(&self.settings).saturating_sub(gpu.ledger.unevictable().saturating_sub(own));
        need <= room || self.has_memory(entity, id)
    }

    /// Runs the clocks of those holders that are in somebody's way, tells them, and revokes those whose turn is over.
    /// Returns when the next turn will be.
    fn press(&mut self, id: GpuId, pressure: &Pressure) -> Option<Time> {
        let now = self.now;
        let waiters = self.lock.queue_length(id).max(1);
        let grace = self.policy().grace(&self.settings, pressure.waiter.map_or(Duration::ZERO, |w| w.moving));
        let exclusive = self.settings.anti_thrash != AntiThrash::Off;
        let together = self.may_stay(id);
        let first = self.lock.holds_on(id).map(|(_, hold)| hold).find(|hold| hold.revoked.is_none());
        let first = first.map(|hold| hold.entity);
        let awaited = self.lock.behind(id).next().is_some();
        let mut short = pressure.short;
        let mut next: Option<Time> = self.together_until(id);
        let holders: Vec<ClientId> = self.lock.holders(id).collect();
        if next.is_some_and(|until| until <= now) {
            self.forget_utilization(id);
        }
        next = next.filter(|_| together);
        for client in holders {
            let Some((history, account)) = self.histories.of(client, id).zip(self.account(client, id)) else {
                continue;
            };
            let Some(hold) = self.lock.hold(client, id) else { continue };
            let evictable = if hold.is_bypassed() { 0 } else { account.evictable() };
            let own = pressure.locked_out && pressure.first == Some(hold.entity);
            let gives = short > 0 && evictable > 0 && pressure.grower != Some(client);
            let wanted = !own && (gives || (exclusive && pressure.locked_out));
            let leaves = if gives { evictable.min(short) } else { 0 };
            short -= leaves;
            let leaves = leaves.min(account.report.mapped); // it may be allowed more than it has
            if hold.revoked.is_some() {
                continue;
            }
            // They run together no longer.
            let surplus = exclusive && !together && first.is_some_and(|entity| hold.entity != entity);
            let surplus = surplus || self.yields(hold.entity);
            // Nobody knows what one needs that wants the GPU for itself, so it has what the administrator set.
            let for_itself = history.utilization.is_for_itself();
            let precedence = match pressure.first {
                Some(first) => self.shares().precedence(first, client),
                None => Precedence::Equal,
            };
            // Others than who waits need the bytes.
            let precedence =
                if pressure.overdue && precedence == Precedence::After { Precedence::Equal } else { precedence };
            let turn = match pressure.waiter {
                Some(waiter)
                    if precedence != Precedence::Equal || !for_itself && (exclusive || pressure.grower.is_none()) =>
                {
                    let holder = self.runner(client, id, hold, pressure.first);
                    self.policy().turn(&self.settings, &holder, &Waiter { precedence, ..waiter })
                }
                _ => self.settings.time_quantum,
            };
            let equal = precedence == Precedence::Equal;
            // The others of it spin meanwhile.
            let least = hold.entity.gang().filter(|gang| equal && self.lock.gangs().is_job(*gang));
            let least = least.map_or(Duration::ZERO, |gang| self.gang_drains_in(gang) * DRAINS_PER_TURN);
            let turn = turn.max(least.min(self.settings.time_quantum));
            let helps = self.helps_to_drain(hold);
            let gang_ends = pressure.first.and_then(|first| self.awaited_since(hold.entity, first));
            let gang_ends = gang_ends.map(|since| since.saturating_add(turn));
            let rival = pressure.first.filter(|_| !pressure.overdue && equal && wanted && hold.waited(now) >= turn);
            let stays = rival.and_then(|rival| self.precedes_until(client, id, rival));
            let capped = self.shares().capped_at(client, id);
            // One whose time is counted, or for whom others wait outside of the line, gives the GPU back whenever it has no
            // use for it.
            let (tells, waiters, grace) = match capped {
                _ if wanted => (true, waiters, grace),
                None if !awaited => (false, waiters, grace),
                _ => (true, 1, SHORTEST_GRACE),
            };
            let gpus = GpuSet::from([id]);
            let Some(hold) = self.lock.hold_mut(client, id) else { continue };
            if wanted {
                hold.waited_since.get_or_insert(now);
            } else if let Some(since) = hold.waited_since.take() {
                hold.waited += now.saturating_sub(since);
            }
            let told = hold.told.unwrap_or((0, grace));
            let tell = match (told.0 > 0, tells) {
                (false, true) => Some((waiters, grace)),
                (true, false) => Some((0, grace)),
                (true, true) if grace > told.1 * 2 || told.1 > grace * 2 => Some((waiters, grace)),
                _ => None,
            };
            let ends = now.saturating_add(turn.saturating_sub(hold.waited(now))).max(stays.unwrap_or_default());
            // Its fellows had turns before it that are the same.
            let ends = gang_ends.map_or(ends, |at| at.min(ends));
            let over = ends <= now;
            let spent = capped.is_some_and(|at| at <= now);
            let goes = !helps && (surplus || spent || (wanted && over));
            // Host memory takes longer to make than to fill, and now there is time.
            let prepare = leaves >= hold.prepared.saturating_add(PREPARE_STEP) && !over;
            hold.prepared = if prepare { leaves } else { hold.prepared };
            // Who has to go is told that, and nothing else.
            let tell = tell.filter(|_| !goes);
            hold.told = tell.or(hold.told);
            if prepare {
                self.effects.command(Command::Prepare { client, gpu: id, bytes: leaves });
            }
            if let Some((waiters, grace)) = tell {
                self.effects.command(Command::Contended { client, gpus, waiters, grace });
            }
            if goes {
                self.revoke(client, id);
            } else {
                let ends = capped.into_iter().chain(wanted.then_some(ends)).filter(|at| *at < Time::MAX && !helps);
                next = next.into_iter().chain(ends).min();
            }
        }
        next
    }
}
