//! Shares of a GPU's time that rules give to groups. Clients without such a rule take turns by user, with equal weights.
//!
//! - **Weight**: scales the finish tag (`fair_queue`).
//! - **Priority**, and weight 0 (idle): classes. A higher class goes first and does not wait for the turn of a lower one to end.
//! - **Minimum**: the group goes first while it has used less than that part of the last period.
//! - **Maximum**: ends the group's turns once it has used that part of the last period, whether or not others wait.
//! - **Interactive**: the group goes first while it has used no more than its share.

use crate::{
    api::*,
    fairness::usage::Window,
    lock::{Blocked, Entity, Gang, Hold},
    machine::Machine,
};
use std::cmp::{Ordering, Reverse};
use std::collections::BTreeSet;
use std::time::Duration;

/// A group that has had all that it may is not looked at again sooner.
const LEAST_PAUSE: Duration = Duration::from_millis(1);

/// Who takes turns as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) enum ShareOwner {
    User(UserId),
    Group(GroupId),
    /// Within one of those, by what it says itself (`own`).
    Client(ClientId),
    /// All to whom no rule gives a part of the time, where the policy does not have users take turns.
    Others,
}

/// Who goes before whom, whenever they came: the smaller first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Class {
    tier: Tier,
    interactive_first: Reverse<bool>,
    below_minimum: Reverse<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
enum Tier {
    /// Of that priority; the higher goes first.
    Ordinary(Reverse<i8>),
    /// Has what nobody else wants.
    Idle,
}

impl Default for Tier {
    fn default() -> Self {
        Self::Ordinary(Reverse(0))
    }
}

/// What somebody who waits is to somebody who holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Precedence {
    /// Waits for no turn to end; in `auto` for no drain either.
    Before,
    /// Has had less than it is to have, which the other has not.
    BelowMinimum,
    #[default]
    Equal,
    /// Has to wait until the other has no work, or has had what it is to have.
    After,
}

impl Share {
    /// Of the period.
    fn part(percent: u8, settings: &Settings) -> Duration {
        settings.time_period * u32::from(percent.min(100)) / 100
    }

    fn tier(self) -> Tier {
        if self.weight == 0 { Tier::Idle } else { Tier::Ordinary(Reverse(self.priority)) }
    }

    fn is_bounded(self) -> bool {
        self.min > 0 || self.max < 100
    }

    /// Whether its class depends on what it has had.
    fn is_watched(self) -> bool {
        self.is_bounded() || self.interactive
    }
}

impl Machine {
    pub(crate) fn owner(&self, client: ClientId) -> Option<ShareOwner> {
        let state = self.clients.get(&client)?;
        let has_share = |group: &GroupId| self.rules.limits(*group).is_some_and(|limits| limits.share.is_some());
        let group = self.rules.group(client).filter(has_share);
        let user = if self.policy().users_take_turns() { ShareOwner::User(state.user) } else { ShareOwner::Others };
        Some(group.map_or(user, ShareOwner::Group))
    }

    pub(crate) fn share(&self, owner: ShareOwner) -> Share {
        match owner {
            ShareOwner::User(_) | ShareOwner::Others => Share::default(),
            ShareOwner::Group(group) => self.rules.limits(group).and_then(|limits| limits.share).unwrap_or_default(),
            ShareOwner::Client(client) => self.client_share(client),
        }
    }

    /// Its party's, as far as it claims that.
    pub(crate) fn share_of(&self, client: ClientId) -> Share {
        let share = self.owner(client).map_or_else(Share::default, |owner| self.share(owner));
        self.rules.env(client).map_or(share, |limits| limits.tighten(share))
    }

    /// What it counts for when turns are divided.
    pub(crate) fn weight(&self, owner: ShareOwner) -> u32 {
        u32::from(self.share(owner).weight.max(1))
    }

    /// The same where it wants that GPU: the others count for as many users as they are.
    pub(crate) fn weight_on(&self, owner: ShareOwner, id: GpuId) -> u32 {
        let users = || {
            let waiting = self.lock.queue(id).flat_map(|(_, entity)| self.lock.clients_of(entity));
            let clients = waiting.chain(self.lock.holders(id));
            let others = clients.filter(|client| self.owner(*client) == Some(ShareOwner::Others));
            let users: BTreeSet<UserId> = others.filter_map(|client| Some(self.clients.get(&client)?.user)).collect();
            u32::try_from(users.len()).unwrap_or(u32::MAX).max(1)
        };
        self.weight(owner).saturating_mul(if owner == ShareOwner::Others { users() } else { 1 })
    }

    /// What a party has had of a GPU.
    fn window(&self, owner: ShareOwner, id: GpuId) -> Window<'_> {
        let is_own = |client| self.owner(client) == Some(owner) || owner == ShareOwner::Client(client);
        // A client that is counted as no holder takes nothing from others of its owner.
        let holds = self.lock.holds_on(id).filter(|(client, hold)| is_own(*client) && !hold.is_bypassed());
        let since = holds.map(|(_, hold)| hold.since).min();
        Window {
            usage: self.gpus.get(&id).and_then(|gpu| gpu.used.get(&owner)),
            since,
            period: self.settings.time_period,
        }
    }

    /// The client no longer has the lock, which it had since then.
    pub(crate) fn count_usage(&mut self, client: ClientId, id: GpuId, since: Time) {
        let bounded = [self.owner(client), Some(ShareOwner::Client(client))].into_iter().flatten();
        let bounded: Vec<ShareOwner> = bounded.filter(|owner| self.share(*owner).is_bounded()).collect();
        let (now, period) = (self.now, self.settings.time_period);
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        for owner in bounded {
            gpu.used.entry(owner).or_default().record(since, now, period);
        }
    }

    /// Whether it has had less of that GPU than it is to have.
    fn is_below_minimum(&self, owner: ShareOwner, id: GpuId) -> bool {
        let min = self.share(owner).min;
        min > 0 && self.window(owner, id).used(self.now) < Share::part(min, &self.settings)
    }

    /// The class of a client that wants these GPUs, or has them: the last of its gang's, which goes together. Nobody gains
    /// anything by joining one.
    pub(crate) fn class(&self, client: ClientId, gpus: &GpuSet) -> Class {
        // All of a gang that a rule makes have the same share, where none of them claims less.
        let gang = self.lock.gang(client);
        if let (Some(Gang::Group(_)), true) = (gang, self.rules.with_env().next().is_none()) {
            return self.own_class(client, gpus);
        }
        let all = self.lock.gang_peers(client).chain([client]).map(|member| self.own_class(member, gpus));
        all.max().unwrap_or_default()
    }

    fn own_class(&self, client: ClientId, gpus: &GpuSet) -> Class {
        let Some(owner) = self.owner(client) else { return Class::default() };
        let share = self.share_of(client);
        let has_had_more = |id: &GpuId| self.latest_finish_tag(client, *id) > self.now;
        Class {
            tier: share.tier(),
            interactive_first: Reverse(share.interactive && !gpus.iter().any(has_had_more)),
            below_minimum: Reverse(share.min > 0 && gpus.iter().any(|id| self.is_below_minimum(owner, *id))),
        }
    }

    /// Whether they share what is left by those of better tiers.
    pub(crate) fn are_peers(&self, one: ClientId, other: ClientId) -> bool {
        self.share_of(one).tier() == self.share_of(other).tier()
    }

    /// The class of a holder, by all that it has.
    fn class_of_holder(&self, holder: ClientId) -> Class {
        self.class(holder, &self.lock.holds_of(holder).map(|(id, _)| id).collect())
    }

    /// What the first in line is to a holder.
    pub(crate) fn precedence(&self, waiter: Entity, holder: ClientId) -> Precedence {
        let Some(request) = self.lock.request(waiter) else { return Precedence::Equal };
        if !self.has_classes() {
            return Precedence::Equal;
        }
        let (first, has) = (request.key.class, self.class_of_holder(holder));
        // Even if it has had more than its share.
        let is_interactive = has.interactive_first.0 || self.share_of(holder).interactive;
        match (first.tier.cmp(&has.tier), first.interactive_first.0, (first.below_minimum.0, has.below_minimum.0)) {
            (Ordering::Less, ..) => Precedence::Before,
            (Ordering::Greater, ..) => Precedence::After,
            (_, true, _) if is_interactive => Precedence::BelowMinimum,
            (_, true, _) => Precedence::Before,
            (.., (true, false)) => Precedence::BelowMinimum,
            (.., (false, true)) => Precedence::After,
            _ => Precedence::Equal,
        }
    }

    /// Whether a holder that drains keeps that waiter from nothing: in `auto`, one who waits for no turn to end does not wait
    /// for the work that is queued either, if its memory has room beside. The GPU shares itself out for that long.
    pub(crate) fn makes_way(&self, holder: ClientId, hold: &Hold, waiter: Entity) -> bool {
        let is_auto = self.settings.anti_thrash == AntiThrash::Auto;
        is_auto && hold.revoked.is_some() && self.precedence(waiter, holder) == Precedence::Before
    }

    /// Whether anybody has a share.
    pub(crate) fn has_classes(&self) -> bool {
        self.rules.have_classes()
    }

    /// Whether a request that wants other GPUs as well waits here for one of a better tier, which may be long: it would keep
    /// the others from everybody meanwhile.
    pub(crate) fn waits_behind(&self, entity: Entity, id: GpuId) -> bool {
        let Some(request) = self.lock.request(entity).filter(|_| self.has_classes()) else { return false };
        let tier = request.key.class.tier;
        let several = request.wants.values().flatten().any(|other| *other != id);
        let waits = || self.lock.queue(id).next().is_some_and(|(key, _)| key.class.tier < tier);
        let is_better = |(holder, hold): (ClientId, &Hold)| {
            !hold.is_bypassed() && hold.entity != entity && self.class_of_holder(holder).tier < tier
        };
        several && (waits() || (self.lock.holds_on(id).any(is_better) && !self.is_admissible(entity, id)))
    }

    /// Takes those out of that line who only keep other GPUs from others, as one of a better tier waits there.
    pub(crate) fn defer_behind(&mut self, id: GpuId) {
        if !self.has_classes() {
            return;
        }
        let queue = self.lock.queue(id).map(|(_, entity)| entity);
        let behind: Vec<Entity> = queue.skip(1).filter(|entity| self.waits_behind(*entity, id)).collect();
        behind.into_iter().for_each(|entity| self.block(entity, Blocked::Behind(id)));
    }

    /// When the holder or its group will have had all that it may; None: there is no such bound. A time that is not to come:
    /// it has had it.
    pub(crate) fn capped_at(&self, holder: ClientId, id: GpuId) -> Option<Time> {
        let owners = [self.owner(holder), Some(ShareOwner::Client(holder))].into_iter().flatten();
        owners.filter_map(|owner| self.party_capped_at(owner, id)).min()
    }

    fn party_capped_at(&self, owner: ShareOwner, id: GpuId) -> Option<Time> {
        let share = self.share(owner);
        if share.max >= 100 {
            return None;
        }
        let (window, most) = (self.window(owner, id), Share::part(share.max, &self.settings));
        if window.used(self.now) >= most {
            return Some(self.now);
        }
        Some(window.reaches(most, self.now).unwrap_or(Time::MAX))
    }

    /// Until when a client may have none of these GPUs, because it or its group has had all that it may. It may again once
    /// enough for a turn is a period ago.
    fn capped_until(&self, client: ClientId, gpus: &GpuSet) -> Option<Time> {
        let owners = [self.owner(client), Some(ShareOwner::Client(client))].into_iter().flatten();
        owners.filter_map(|owner| self.owner_capped_until(owner, gpus)).max()
    }

    fn owner_capped_until(&self, owner: ShareOwner, gpus: &GpuSet) -> Option<Time> {
        let share = self.share(owner);
        if share.max >= 100 {
            return None;
        }
        let most = Share::part(share.max, &self.settings);
        let turn = self.settings.slice().min(most / 2);
        let until = gpus.iter().filter_map(|id| {
            let window = self.window(owner, *id);
            let is_spent = window.used(self.now) >= most;
            // A fellow may have it for as long as it takes to end its work.
            let again =
                || window.falls_below(most.saturating_sub(turn), self.now).unwrap_or(self.now + self.settings.slice());
            is_spent.then(again)
        });
        until.max().map(|until| until.max(self.now + LEAST_PAUSE))
    }

    /// The same for all who are to be granted together.
    pub(crate) fn is_capped(&self, entity: Entity) -> Option<Time> {
        let wants = self.lock.request(entity).into_iter().flat_map(|request| &request.wants);
        wants.filter_map(|(client, gpus)| self.capped_until(*client, gpus)).max()
    }

    /// Whether nobody may run at the same moment: what it has of the time is counted, or it is not to be slowed down.
    pub(crate) fn runs_alone(&self, client: ClientId) -> bool {
        let share = self.share_of(client);
        share.is_watched() || share.tier() != Tier::default()
    }

    /// Rules are others: everybody who waits stands where it belongs by them.
    pub(crate) fn requeue_all(&mut self) {
        for entity in self.lock.requests().map(|(entity, _)| entity).collect::<Vec<_>>() {
            self.requeue(entity);
            let blocked = self.lock.request(entity).and_then(|request| request.blocked);
            let is_capped = matches!(blocked, Some(Blocked::Until(_))) && !self.is_delayed(entity);
            if is_capped || matches!(blocked, Some(Blocked::Behind(_))) {
                self.enqueue(entity);
            }
        }
        let (now, period) = (self.now, self.settings.time_period);
        for (id, gpu) in &mut self.gpus {
            gpu.used.retain(|_, usage| !usage.is_past(now, period));
            self.effects.touch(*id);
        }
    }

    /// Puts those in line where they belong now, as what they have had goes into it. Says when to look again.
    pub(crate) fn reclassify(&mut self, id: GpuId) -> Option<Time> {
        let is_watched = |limits: &RuleLimits| limits.share.is_some_and(Share::is_watched);
        if !self.rules.groups().any(|(_, limits)| is_watched(limits))
            && !self.rules.with_env().any(|(_, limits)| limits.time_max < 100)
        {
            return None;
        }
        let watched = |entity: &Entity| self.lock.clients_of(*entity).any(|client| self.share_of(client).is_watched());
        let queue: Vec<Entity> = self.lock.queue(id).map(|(_, entity)| entity).filter(watched).collect();
        for entity in &queue {
            match self.is_capped(*entity) {
                Some(until) => self.block(*entity, Blocked::Until(until)),
                None => self.requeue(*entity),
            }
        }
        let gpu = self.gpus.get(&id).filter(|_| self.lock.first(id).is_some())?;
        let waiting =
            self.lock.queue(id).flat_map(|(_, entity)| self.lock.clients_of(entity)).chain(self.lock.holders(id));
        let watched: BTreeSet<ShareOwner> = waiting.filter_map(|client| self.owner(client)).collect();
        let changes = watched.into_iter().filter(|owner| self.share(*owner).is_watched()).filter_map(|owner| {
            let share = self.share(owner);
            let window = self.window(owner, id);
            let least = Share::part(share.min, &self.settings);
            let below_minimum = match window.since {
                _ if share.min == 0 => None,
                Some(_) => window.reaches(least, self.now).filter(|_| window.used(self.now) < least),
                None => window.falls_below(least, self.now).filter(|_| window.used(self.now) >= least),
            };
            let interactive_first =
                gpu.finish_tags.get(&owner).copied().filter(|until| share.interactive && *until > self.now);
            below_minimum.into_iter().chain(interactive_first).min()
        });
        let interactive =
            self.rules.with_env().map(|(client, _)| client).filter(|client| self.share_of(*client).interactive);
        let own = interactive.map(|client| self.latest_finish_tag(client, id));
        changes.chain(own).filter(|at| *at > self.now).min()
    }
}
