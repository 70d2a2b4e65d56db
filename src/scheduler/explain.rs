//! Explains why a client does not run on a GPU now, and when it is expected to run. No decision
//! depends on these estimates, and the scheduler keeps no state for them. An explanation takes time
//! proportional to the length of the queue.
//!
//! Estimates assume that no further client arrives. Each request ahead is assumed to run for its
//! usual time, at most one turn, and to move its memory at the measured rates. Clients that can run
//! at the same time start earlier than estimated.

use crate::{
    api::*,
    gpu::{Access, Hold},
    model::{Model, standstill::Standstill},
    policy::{self, Precedence, Waiter},
    queue::{Blocked, Entity, QueueKey, Tier},
    view::{LockState, NO_TURN},
};
use std::time::Duration;

/// A client's state on one GPU, and the reasons why it waits. Amounts are bytes.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Explanation {
    pub gpu: GpuId,
    pub state: LockState,
    /// How long the client has waited for the lock.
    pub waits: Option<Duration>,
    /// Why the client is in no queue.
    pub obstacle: Option<Obstacle>,
    /// The client may wait for ever.
    pub standstill: Option<Standstill>,
    /// Holders that delay the client's grant, in the order of their own grants. If the client is
    /// itself a holder, the list contains only that client.
    pub holders: Vec<HolderAhead>,
    /// Requests that are served before the client's request, the next one first.
    pub ahead: Vec<Ahead>,
    /// Bytes of other clients that must leave the GPU before the client's missing memory fits.
    pub leaves: u64,
    /// Bytes of the client's missing memory that return from host memory.
    pub comes: u64,
    /// The estimated time that both moves take.
    pub moving: Duration,
    /// The estimated time until the client runs. `None`: the client does not wait, or the time
    /// cannot be estimated.
    pub starts: Option<Duration>,
}

/// A holder that delays a waiting client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HolderAhead {
    pub client: ClientId,
    pub state: LockState,
    /// The rest of the holder's turn; 0 once the holder was asked to release the lock. `None`:
    /// nothing ends the turn.
    pub left: Option<Duration>,
    /// The holder keeps the GPU until it runs out of work, because of its own rule or the waiting
    /// client's rule.
    pub precedes: bool,
}

/// A request that is served before a waiting client's request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ahead {
    /// A single client, or the members of a gang.
    pub clients: Vec<ClientId>,
    pub reason: Reason,
    /// The estimated time for which the request keeps the GPU, including the time to move its
    /// memory in. `None`: the request keeps the GPU until it runs out of work.
    pub takes: Option<Duration>,
}

/// Why a request is served before another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The request's rule has a higher priority.
    Priority,
    /// The other request's rule has weight 0: the other request is served only while no other
    /// client wants the GPU.
    OtherIsIdle,
    /// The request's rule says `interactive`, and its owner has used no more than its share.
    Interactive,
    /// The request's owner is below its minimum.
    BelowMinimum,
    /// Other members of the request's gang have their turn.
    GangTurn,
    /// The request's owner has used less of its share.
    Share,
    /// The request has waited long enough to precede all other requests of its owner.
    Aged,
    Earlier,
    /// The request is expected to need the GPU for less time, including the time to move its
    /// memory.
    Shorter,
    /// The request's client has had less time on the GPU (policy `adaptive`).
    LessServed,
}

/// Why a client is in no queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// The client is kept off its GPUs until it is resumed.
    Paused,
    /// A GPU that the client has attached is drained.
    Drained,
    /// The client is off its GPUs, or is leaving them or returning to them.
    Sleeps(SleepPhase),
    /// The client waits to be restored. Its context, and its memory that other clients use, do not fit
    /// on this GPU beside this number of unevictable bytes of other clients.
    NoRoomToReturn(u64),
    /// The client's process is stopped.
    Stopped,
    /// The client waits for room for its context. `deferred`: the context would leave too little
    /// room for another client ever to run again.
    Context { deferred: bool },
    /// An allocation waits until other clients have freed memory. The number is the limit in bytes
    /// that the allocation needs.
    Memory(u64),
    /// These members of the client's gang are stopped, paused or asleep.
    Away(Vec<ClientId>),
    /// The driver found too little room for the client's memory when the client last ran. The
    /// client waits for this long.
    MappingFailed(Duration),
    /// The client's owner has used its maximum for the period. The client waits for this long.
    TimeMax(Duration),
    /// The client still holds a lock that it was asked to release.
    OwnHold,
    /// The client's memory does not fit on that GPU beside this number of unevictable bytes of
    /// other clients.
    Pinned(GpuId, u64),
    /// The client's memory does not fit on that GPU beside this number of bytes kept free for other
    /// programs.
    Room(GpuId, u64),
    /// A client of a better class holds or wants that GPU. The request wants that GPU and other
    /// GPUs.
    Behind(GpuId),
    /// The host is about to suspend.
    Suspended,
}

impl<'a> Model<'a> {
    /// Explains what a client waits for on each of its GPUs. Returns an iterator, because each
    /// explanation takes time proportional to the queue. `now` must not be before the newest event.
    pub fn explain(self, client: ClientId, now: Time) -> impl Iterator<Item = Explanation> {
        self.gpus.locks_of(client).filter_map(move |(id, _)| self.explain_on(client, id, now))
    }

    /// Estimates the time until each of the next `most` requests in the queue of a GPU runs, the
    /// next one first. Stops at the first request whose start cannot be estimated.
    pub fn expected_starts(&self, id: GpuId, most: usize, now: Time) -> Vec<(ClientId, Duration)> {
        let queue = self.whole_queue(id);
        let mut starts = Vec::new();
        let Some(mut at) = queue.first().and_then(|first| self.holders_leave_in(*first, id, now)) else {
            return starts;
        };
        for (position, entity) in queue.iter().take(most).enumerate() {
            let clients = self.queues.wanting(*entity, id);
            starts.extend(clients.map(|client| (client, at.saturating_add(self.arrival(*entity, id, position == 0)))));
            let Some(takes) = self.takes(*entity, queue.get(position + 1).copied(), id, position == 0) else { break };
            at = at.saturating_add(takes);
        }
        starts
    }

    fn explain_on(&self, client: ClientId, id: GpuId, now: Time) -> Option<Explanation> {
        let state = self.state(client, id);
        let entity = self.queues.waiting(client).filter(|_| self.queues.waits_for(client, id));
        let request = entity.and_then(|entity| self.queues.request(entity));
        let waits = request.and_then(|request| request.since.get(&client)).map(|since| now.saturating_sub(*since));
        let mut explanation = Explanation {
            gpu: id,
            state,
            waits,
            obstacle: self.kept_out_by(client, id, now),
            standstill: self.standstill(client),
            ..Explanation::default()
        };
        if let Some(hold) = self.gpus.hold(client, id) {
            explanation.holders = vec![self.holder_ahead(client, hold, None, now, state)];
        }
        let Some((entity, request)) = entity.zip(request) else { return Some(explanation) };
        let is_let_in = self.is_admissible(entity, id);
        if !is_let_in {
            let holders = self.gpus.holds_on(id).filter(|(_, hold)| !hold.is_bypassed());
            let ahead = |(holder, hold)| self.holder_ahead(holder, hold, Some(entity), now, self.state(holder, id));
            explanation.holders = holders.map(ahead).collect();
        }
        let lacking = self.lacking(entity, id);
        let gpu = self.gpus.get(id)?;
        explanation.leaves = lacking.saturating_sub(gpu.free(self.settings));
        let reports = self.queues.wanting(entity, id).filter_map(|member| Some(self.gpus.account(member, id)?.report));
        let swapped = reports.fold(0u64, |sum, report| sum.saturating_add(report.swapped));
        explanation.comes = swapped.min(lacking);
        explanation.moving = gpu.rates.moving(explanation.leaves) + gpu.rates.coming(explanation.comes);
        if explanation.obstacle.is_some() || request.blocked.is_some() {
            return Some(explanation);
        }
        let queue = self.whole_queue(id);
        let own = queue.iter().position(|queued| *queued == entity)?;
        let mut at = if is_let_in { Some(Duration::ZERO) } else { self.holders_leave_in(queue[0], id, now) };
        for (position, other) in queue[..own].iter().enumerate() {
            let takes = self.takes(*other, queue.get(position + 1).copied(), id, position == 0);
            at = at.zip(takes).map(|(at, takes)| at.saturating_add(takes));
            let clients = self.queues.members(*other, id);
            explanation.ahead.push(Ahead { clients, reason: self.reason(*other, entity), takes });
        }
        explanation.starts = at.map(|at| at.saturating_add(self.arrival(entity, id, own == 0)));
        Some(explanation)
    }

    fn kept_out_by(&self, client: ClientId, id: GpuId, now: Time) -> Option<Obstacle> {
        let sleep = self.sleep.view(client);
        let gpu = self.gpus.get(id)?;
        if sleep.paused {
            return Some(Obstacle::Paused);
        }
        if sleep.drained {
            return Some(Obstacle::Drained);
        }
        if sleep.phase == SleepPhase::Waking && gpu.lacks_to_return(self.gpu_context(), client) > 0 {
            let stays = gpu.ledger.unevictable().saturating_sub(gpu.unevictable_of(client));
            return Some(Obstacle::NoRoomToReturn(stays));
        }
        if sleep.phase != SleepPhase::Awake {
            return Some(Obstacle::Sleeps(sleep.phase));
        }
        if self.clients.get(&client)?.stopped {
            return Some(Obstacle::Stopped);
        }
        if gpu.access == Access::Suspended {
            return Some(Obstacle::Suspended);
        }
        if let Some(place) = gpu.contexts.iter().position(|pending| pending.client == client) {
            return Some(Obstacle::Context { deferred: place >= gpu.contexts.len() - gpu.contexts.deferred() });
        }
        if let Some(wanted) = self.quota.limit(client, id).and_then(|limit| limit.wanted.as_ref())
            && wanted.held.is_some()
        {
            return Some(Obstacle::Memory(wanted.bytes));
        }
        let entity = self.queues.waiting(client).filter(|_| self.queues.waits_for(client, id))?;
        Some(match self.queues.request(entity)?.blocked? {
            Blocked::Until(until) if self.is_delayed(entity) => Obstacle::MappingFailed(until.saturating_sub(now)),
            Blocked::Until(until) => Obstacle::TimeMax(until.saturating_sub(now)),
            Blocked::Absent => {
                let members = self.queues.clients_of_entity(entity).into_iter();
                Obstacle::Away(members.filter(|member| self.is_absent(*member)).collect())
            }
            Blocked::Undrained => Obstacle::OwnHold,
            Blocked::Pinned(full) if self.is_crowded_out(full, self.queues.wanting(entity, full)) => {
                Obstacle::Room(full, self.gpus.get(full).map_or(0, |gpu| gpu.others.kept()))
            }
            Blocked::Pinned(full) => {
                let gpu = self.gpus.get(full);
                let stays = gpu.map_or(0, |it| it.ledger.unevictable().saturating_sub(it.unevictable_of(client)));
                Obstacle::Pinned(full, stays)
            }
            Blocked::Behind(other) => Obstacle::Behind(other),
        })
    }

    fn holder_ahead(
        &self,
        client: ClientId,
        hold: &Hold,
        waiter: Option<Entity>,
        now: Time,
        state: LockState,
    ) -> HolderAhead {
        let precedence = waiter.map(|waiter| self.shares().precedence(waiter, client));
        let left = match hold.revoked {
            Some(_) => Some(Duration::ZERO),
            None => hold.ends.map(|ends| ends.saturating_sub(now)).filter(|left| *left < NO_TURN),
        };
        HolderAhead { client, state, left, precedes: precedence == Some(Precedence::After) }
    }

    /// The time until the holders that delay the first request of the queue have drained. `None`:
    /// unknown.
    fn holders_leave_in(&self, first: Entity, id: GpuId, now: Time) -> Option<Duration> {
        if self.is_admissible(first, id) {
            return Some(Duration::ZERO);
        }
        // Without a holder on this GPU, the request waits for another GPU, or for a conflicting
        // gang.
        let mut latest = None;
        for (holder, hold) in self.gpus.holds_on(id).filter(|(_, hold)| !hold.is_bypassed()) {
            if hold.stuck {
                return None;
            }
            let left = self.holder_ahead(holder, hold, None, now, LockState::Holding).left?;
            let drain = self.gpus.lock(holder, id).map_or(Duration::ZERO, |lock| lock.drains.expected());
            latest = latest.max(Some(left.saturating_add(drain)));
        }
        latest
    }

    /// The duration of the evictions and restores that delay a request after all other delays have ended.
    /// For the first request, evictable memory of idle clients is not counted, because it moves while
    /// holders still run.
    fn arrival(&self, entity: Entity, id: GpuId, is_first: bool) -> Duration {
        let Some(gpu) = self.gpus.get(id) else { return Duration::ZERO };
        let lacking = self.lacking(entity, id);
        let ready = if is_first { gpu.free(self.settings).saturating_add(gpu.ledger.evicting()) } else { 0 };
        let others = || gpu.ledger.eviction_order().filter(|(_, client)| self.queues.waiting(*client) != Some(entity));
        let idle = || others().filter_map(|(_, client)| Some(gpu.account(client)?.evictable()));
        let given = if is_first { idle().fold(ready, u64::saturating_add) } else { 0 };
        gpu.rates.both_ways(lacking.saturating_sub(given), None)
    }

    /// How long a queued request keeps a GPU from the next request: the time to move the request's
    /// memory in, plus its expected run time of at most one turn. `None`: no request follows, or
    /// the turn ends only when the request runs out of work.
    fn takes(&self, entity: Entity, next: Option<Entity>, id: GpuId, is_first: bool) -> Option<Duration> {
        let gpu = self.gpus.get(id)?;
        let next = next?;
        let burst = |entity: Entity| {
            let members = self.queues.wanting(entity, id).filter_map(|member| self.gpus.history(member, id));
            members.map(|history| history.bursts.expected()).max().unwrap_or_default()
        };
        let moves = gpu.rates.both_ways(self.lacking(next, id), None);
        let client = self.queues.wanting(entity, id).next()?;
        let (tier, next_tier) = (self.tier(entity)?, self.tier(next)?);
        let waiter = Waiter {
            precedence: if tier < next_tier { Precedence::After } else { Precedence::Equal },
            burst: burst(next),
            moving: moves,
            arrives: moves,
            evicts: !moves.is_zero(),
            holders_measured: true,
            waiters: self.queues.queue_length(id),
            ..Waiter::default()
        };
        let holder = policy::Holder {
            exchange: moves,
            fills: gpu.rates.both_ways(self.need(client, id), None),
            batch: self.shares().share_of(client).weight == 0,
            attained: self
                .gpus
                .history(client, id)
                .map_or(Duration::ZERO, |it| it.progress.after(self.now, Duration::ZERO).0),
            same_owner: self.owner_of(entity) == self.owner_of(next),
            ..policy::Holder::default()
        };
        let turn = self.policy().turn(self.settings, &holder, &waiter);
        let has_run = self.gpus.lock(client, id).is_some_and(|lock| lock.grants > 0);
        let runs = if has_run { turn.min(burst(entity)) } else { turn };
        (runs < NO_TURN).then(|| runs.saturating_add(self.arrival(entity, id, is_first)))
    }

    fn tier(&self, entity: Entity) -> Option<Tier> {
        Some(self.queues.request(entity)?.key.class.tier)
    }

    /// Why a queued request is served before another request.
    fn reason(&self, ahead: Entity, behind: Entity) -> Reason {
        let (Some(one), Some(other)) = (self.queues.request(ahead), self.queues.request(behind)) else {
            return Reason::Earlier;
        };
        let (own, its) = (self.key_now(ahead, &one.key), self.key_now(behind, &other.key));
        if own.class.tier != its.class.tier {
            return if its.class.tier == Tier::Idle { Reason::OtherIsIdle } else { Reason::Priority };
        }
        if own.class.interactive_first != its.class.interactive_first {
            return Reason::Interactive;
        }
        if own.class.below_minimum != its.class.below_minimum {
            return Reason::BelowMinimum;
        }
        if own.has_turn != its.has_turn {
            return Reason::GangTurn;
        }
        let is_same_owner = self.owner_of(ahead) == self.owner_of(behind);
        // The request behind is delayed by its finish tag, not by its rank.
        let is_by_share = own.at != its.at && (!self.policy().tenants_take_turns() || its.at > its.rank);
        if is_by_share && !is_same_owner {
            return Reason::Share;
        }
        if one.aged && !other.aged {
            return Reason::Aged;
        }
        let since = |request: &crate::queue::Request| request.since.values().min().copied();
        match (since(one) <= since(other), self.policy().tenants_take_turns()) {
            (true, true) => Reason::Earlier,
            (false, true) => Reason::Shorter,
            (_, false) => Reason::LessServed,
        }
    }

    fn key_now(&self, entity: Entity, otherwise: &QueueKey) -> QueueKey {
        self.current_key(entity).unwrap_or(*otherwise)
    }
}
