//! The GPU lock: requests and the queue of each GPU, grants, revokes, releases.
//!
//! An [`Entity`] is queued and granted as one: a client, or the waiting members of a gang. It is granted all GPUs that it wants or
//! none. It has the same [`QueueKey`] in the queue of each of them, so two entities never each precede the other: the first of all
//! always makes progress, and no entity holds one GPU while it waits for another (no hold and wait, hence no deadlock).

use crate::{
    api::*,
    fairness::share::Class,
    lock::gang::Gang,
    machine::{Machine, QueueKey},
    timers::Wake,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What is granted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) enum Entity {
    Solo(ClientId),
    Gang(Gang),
}

impl Entity {
    pub fn gang(self) -> Option<Gang> {
        match self {
            Self::Solo(_) => None,
            Self::Gang(gang) => Some(gang),
        }
    }
}

/// A unit that waits.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Request {
    pub key: QueueKey,
    pub since: BTreeMap<ClientId, Time>,
    pub wants: BTreeMap<ClientId, GpuSet>,
    /// Others of the gang are likely to ask within a moment: it is not granted before them.
    pub gathers: Option<Time>,
    /// When it will have waited for so long that it goes before all others of its party.
    pub ages: Option<Time>,
    /// It has.
    pub aged: bool,
    /// Whether it stands in line, and if not, why.
    pub blocked: Option<Blocked>,
    /// What it was last told about why it waits.
    #[serde(with = "crate::encoding::wait_reason")]
    pub told: Option<WaitReason>,
}

/// Why a request is not in line. It then reserves nothing, and holds up nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Blocked {
    Until(Time),
    Stopped,
    /// It wants a lock that it has to release first, and cannot drain.
    Undrained,
    /// What is pinned on that GPU leaves too little.
    Pinned(GpuId),
    /// That GPU is somebody's of a better class, and it wants others as well.
    Behind(GpuId),
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
    fn new(entity: Entity, number: u64, group: u64, since: Time) -> Self {
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

impl Machine {
    pub(crate) fn request(&mut self, client: ClientId, gpus: GpuSet) {
        let Some(state) = self.clients.get(&client) else { return };
        // What it holds it need not wait for; a lock that was asked back has to be released first.
        let wants: GpuSet = gpus
            .into_iter()
            .filter(|gpu| {
                let attachment = state.attachments.get(gpu);
                attachment.is_some_and(|s| s.hold.as_ref().is_none_or(|h| h.revoked.is_some()))
            })
            .collect();
        let (entity, stopped) = (self.entity(client), state.stopped);
        let not_before = state.delayed_until(&wants);
        // A request that replaces another keeps its key.
        let old = state.waiting.and_then(|entity| self.requests.get(&entity)?.since.get(&client).copied());
        let since = old.unwrap_or(self.now);
        let key = state.waiting.and_then(|entity| self.requests.get(&entity)).map(|r| (r.key, r.ages, r.aged));
        self.withdraw(client);
        let now = self.now;
        for id in &wants {
            if let Some(attachment) = self.attachment_mut(client, *id) {
                attachment.used.get_or_insert(now);
                if old.is_none() && attachment.hold.is_none() {
                    attachment.progress.asks(now);
                }
            }
        }
        if wants.is_empty() {
            return;
        }
        self.dequeue(entity);
        if !self.requests.contains_key(&entity) {
            let (key, ages, aged) = match key {
                Some(key) => key,
                None => {
                    let (rank, ages) = self.rank(client, &wants, now);
                    let (number, joined) = (self.effects.number(), self.joined(client, &wants));
                    (QueueKey { class: Class::default(), at: rank, rank, number, joined }, ages, false)
                }
            };
            let (since, wants) = (BTreeMap::new(), BTreeMap::new());
            let request = Request { key, since, wants, gathers: None, ages, aged, blocked: None, told: None };
            self.requests.insert(entity, request);
        }
        if let Some(request) = self.requests.get_mut(&entity) {
            request.since.insert(client, since);
            request.wants.insert(client, wants);
        }
        if let Some(state) = self.clients.get_mut(&client) {
            state.waiting = Some(entity);
        }
        let (key, gathers) = (self.current_key(entity), self.gathers_until(entity));
        if let Some(request) = self.requests.get_mut(&entity) {
            request.key = key.unwrap_or(request.key);
            // Who asks late has nobody wait anew.
            request.gathers = gathers.map(|until| request.gathers.map_or(until, |before| before.min(until)));
        }
        if stopped {
            self.wait_until_it_runs(entity, client);
        } else if not_before > self.now {
            self.block(entity, Blocked::Until(not_before));
        } else {
            self.enqueue(entity);
        }
        self.check_gang_peers(entity);
    }

    /// Puts a request into the lines of its GPUs.
    pub(crate) fn enqueue(&mut self, entity: Entity) {
        let Some(request) = self.requests.get(&entity) else { return };
        if request.blocked == Some(Blocked::Stopped) {
            return; // it is put back when all of its members run
        }
        self.age(entity);
        let Some(request) = self.requests.get(&entity) else { return };
        // One that waits for its own client holds up nobody. Its fellows in a gang go on without it: it may need them in
        // order to drain.
        let undrained = self.undrained(entity);
        if !undrained.is_empty() {
            if undrained.len() == request.wants.len() {
                return self.block(entity, Blocked::Undrained);
            }
            self.split(entity, &undrained);
        }
        if let Some(until) = self.is_capped(entity) {
            return self.block(entity, Blocked::Until(until));
        }
        let Some(request) = self.requests.get(&entity) else { return };
        // One that would only take bytes elsewhere, and could not use them, stays out.
        let ids: BTreeSet<GpuId> = request.wants.values().flatten().copied().collect();
        let full = ids.iter().find(|id| {
            let members = self.members(entity, **id);
            members.len() == 1 && !self.has_room(entity, **id, &members)
        });
        if let Some(full) = full {
            return self.block(entity, Blocked::Pinned(*full));
        }
        let key = self.current_key(entity);
        let Some(request) = self.requests.get_mut(&entity) else { return };
        if request.blocked.take().is_some() {
            request.key = key.unwrap_or(request.key);
        }
        // Nobody gives anything back for it elsewhere at once, to no avail.
        let behind = ids.iter().find(|id| self.waits_behind(entity, **id));
        if let Some(behind) = behind {
            return self.block(entity, Blocked::Behind(*behind));
        }
        let Some(request) = self.requests.get(&entity) else { return };
        for id in request.wants.values().flatten() {
            if let Some(gpu) = self.gpus.get_mut(id) {
                gpu.queue.insert((request.key, entity));
                gpu.blocked_by_pinned.remove(&entity);
                gpu.behind.remove(&entity);
                self.effects.touch(*id);
            }
        }
        let next = request.gathers.into_iter().chain(request.ages).filter(|at| *at > self.now).min();
        self.touch_rivals(entity);
        self.effects.wake(Wake::Entity(entity), next);
        self.admit_if_needless(entity);
    }

    pub(crate) fn dequeue(&mut self, entity: Entity) {
        let Some(request) = self.requests.get(&entity) else { return };
        for id in request.wants.values().flatten() {
            if let Some(gpu) = self.gpus.get_mut(id) {
                gpu.blocked_by_pinned.remove(&entity);
                gpu.behind.remove(&entity);
                if gpu.queue.remove(&(request.key, entity)) {
                    self.effects.touch(*id);
                }
            }
        }
        self.effects.wake(Wake::Entity(entity), None);
    }

    pub(crate) fn block(&mut self, entity: Entity, why: Blocked) {
        self.dequeue(entity);
        let Some(request) = self.requests.get_mut(&entity) else { return };
        request.blocked = Some(why);
        match why {
            Blocked::Until(at) => self.effects.wake(Wake::Entity(entity), Some(at)),
            Blocked::Pinned(id) => {
                if let Some(gpu) = self.gpus.get_mut(&id) {
                    gpu.blocked_by_pinned.insert(entity);
                }
                self.report_wait(entity, WaitReason::Pinned);
            }
            Blocked::Behind(id) => {
                // Who has it is told that somebody waits.
                if let Some(gpu) = self.gpus.get_mut(&id) {
                    gpu.behind.insert(entity);
                    self.effects.touch(id);
                }
            }
            Blocked::Undrained => self.report_wait(entity, WaitReason::HolderStuck),
            Blocked::Stopped => {}
        }
    }

    /// Those members of a unit that want a lock which they hold still and cannot give back.
    fn undrained(&self, entity: Entity) -> Vec<ClientId> {
        let wants = self.requests.get(&entity).into_iter().flat_map(|r| &r.wants);
        let undrainable = |client: ClientId, id: GpuId| {
            self.attachment(client, id).and_then(|s| s.hold.as_ref()).is_some_and(Hold::is_undrainable)
        };
        let undrained = wants.filter(|(client, gpus)| gpus.iter().any(|id| undrainable(**client, *id)));
        undrained.map(|(client, _)| *client).collect()
    }

    /// Takes a client out of the request that it is part of.
    pub(crate) fn withdraw(&mut self, client: ClientId) {
        let Some(entity) = self.clients.get_mut(&client).and_then(|c| c.waiting.take()) else { return };
        self.dequeue(entity);
        let Some(request) = self.requests.get_mut(&entity) else { return };
        request.wants.remove(&client);
        request.since.remove(&client);
        let blocked = request.blocked;
        if request.wants.is_empty() {
            self.requests.remove(&entity);
        } else {
            match blocked {
                Some(Blocked::Until(at)) if self.is_delayed(entity) => self.block(entity, Blocked::Until(at)),
                Some(Blocked::Stopped) if self.any_stopped(entity) => {}
                _ => {
                    if let Some(request) = self.requests.get_mut(&entity) {
                        request.blocked = None;
                    }
                    self.enqueue(entity);
                }
            }
        }
    }

    /// Whether one of them is not to have anything yet, since mapping failed.
    pub(crate) fn is_delayed(&self, entity: Entity) -> bool {
        let mut wants = self.requests.get(&entity).into_iter().flat_map(|request| &request.wants);
        wants.any(|(c, gpus)| self.clients.get(c).is_some_and(|state| state.delayed_until(gpus) > self.now))
    }

    pub(crate) fn any_stopped(&self, entity: Entity) -> bool {
        let wants = self.requests.get(&entity).into_iter().flat_map(|r| r.wants.keys());
        wants.filter_map(|c| self.clients.get(c)).any(|c| c.stopped)
    }

    pub(crate) fn cancel(&mut self, client: ClientId, gpus: &GpuSet) {
        let entity = self.clients.get(&client).and_then(|c| c.waiting);
        let wants = entity.and_then(|entity| self.requests.get(&entity)?.wants.get(&client));
        let Some(wants) = wants.filter(|w| !w.is_disjoint(gpus)) else { return };
        let rest: GpuSet = wants.difference(gpus).copied().collect();
        if rest.is_empty() {
            self.withdraw(client);
        } else {
            self.request(client, rest);
        }
    }

    /// Why a unit waits, told when it changes.
    pub(crate) fn report_wait(&mut self, entity: Entity, why: WaitReason) {
        let Some(request) = self.requests.get_mut(&entity).filter(|r| r.told != Some(why)) else { return };
        request.told = Some(why);
        for (client, gpus) in &request.wants {
            self.effects.command(Command::Waiting { client: *client, gpus: gpus.clone(), why });
        }
    }

    /// With anti-thrash off, one who needs neither bytes nor turns need not stand in line.
    fn admit_if_needless(&mut self, entity: Entity) {
        if self.settings.anti_thrash != AntiThrash::Off {
            return;
        }
        let Some(request) = self.requests.get(&entity) else { return };
        let needless = request.wants.iter().all(|(client, gpus)| {
            gpus.iter().all(|gpu| {
                self.attachment(*client, *gpu).is_some_and(|s| s.engine == Engine::Managed && s.hold.is_none())
            })
        });
        if needless {
            self.grant(entity);
        }
    }

    pub(crate) fn admit_needless(&mut self) {
        for entity in self.requests.keys().copied().collect::<Vec<_>>() {
            if self.requests.get(&entity).is_some_and(|r| r.blocked.is_none()) {
                self.admit_if_needless(entity);
            }
        }
    }

    /// Whether, as far as the lock of this GPU goes, that unit can be admitted now.
    pub(crate) fn is_admissible(&self, entity: Entity, id: GpuId) -> bool {
        let (Some(gpu), Some(request)) = (self.gpus.get(&id), self.requests.get(&entity)) else { return false };
        if self.waits_for_gang(entity) || self.is_kept_for_gang(entity, id) {
            return false;
        }
        let together = self.settings.anti_thrash == AntiThrash::Off || self.may_join(entity, id);
        gpu.holders.values().all(|holder| {
            let Some(hold) = self.attachment(*holder, id).and_then(|s| s.hold.as_ref()) else { return true };
            let own = request.wants.get(holder).is_some_and(|gpus| gpus.contains(&id));
            let beside =
                together || hold.is_bypassed() || hold.entity == entity || self.makes_way(*holder, hold, entity);
            beside && !own
        })
    }

    /// Whether all that it needs on this GPU is allowed to it.
    pub(crate) fn has_memory(&self, entity: Entity, id: GpuId) -> bool {
        let Some(request) = self.requests.get(&entity) else { return false };
        let mut here = request.wants.iter().filter(|(_, gpus)| gpus.contains(&id));
        here.all(|(client, _)| {
            self.account(*client, id).is_some_and(|account| account.allowance >= self.need(*client, id))
        })
    }

    /// Whether it is first in line for all that it wants, and can have it.
    pub(crate) fn is_grantable(&self, entity: Entity) -> bool {
        let Some(request) = self.requests.get(&entity) else { return false };
        if request.gathers.is_some_and(|until| until > self.now) || self.is_about_to_drain(entity) {
            return false;
        }
        let ids: BTreeSet<GpuId> = request.wants.values().flatten().copied().collect();
        ids.iter().all(|id| {
            let first = self.gpus.get(id).and_then(|g| g.queue.first()).map(|(_, entity)| *entity);
            first == Some(entity) && self.is_admissible(entity, *id) && self.has_memory(entity, *id)
        })
    }

    pub(crate) fn grant(&mut self, entity: Entity) {
        self.dequeue(entity);
        let Some(request) = self.requests.remove(&entity) else { return };
        self.begin_gang_turn(entity);
        let (now, group) = (self.now, self.effects.number());
        for (client, gpus) in request.wants {
            let waited = now.saturating_sub(request.since.get(&client).copied().unwrap_or(now));
            if let Some(state) = self.clients.get_mut(&client) {
                state.waiting = None;
                // What it holds already becomes part of the set.
                for hold in state.attachments.values_mut().filter_map(|s| s.hold.as_mut()) {
                    if hold.revoked.is_none() {
                        hold.group = group;
                    }
                }
            }
            for id in &gpus {
                let number = self.effects.number();
                let Some(gpu) = self.gpus.get_mut(id).filter(|gpu| gpu.clients.contains(&client)) else { continue };
                gpu.holders.insert(number, client);
                // Nobody could run while its memory came.
                let own = gpu.idle_for.take().filter(|(whose, _)| *whose == entity);
                let moved = own.map_or(Duration::ZERO, |(_, since)| now.saturating_sub(since));
                let (finish_tag, own_finish_tag) = self.finish_tags_before(client, *id);
                self.change_attachment(client, *id, |attachment| {
                    attachment.grants += 1;
                    attachment.wait_time += waited;
                    let hold = Hold::new(entity, number, group, now);
                    attachment.hold = Some(Hold { moved, aged: request.aged, finish_tag, own_finish_tag, ..hold });
                });
            }
            self.effects.command(Command::Grant { client, gpus });
        }
    }

    /// A lock that was granted before this machine was there goes on, as one whose turn begins now.
    pub(crate) fn held(&mut self, client: ClientId, gpus: &GpuSet) {
        let (entity, now, group) = (self.entity(client), self.now, self.effects.number());
        self.begin_gang_turn(entity);
        for id in gpus {
            let number = self.effects.number();
            if self.attachment(client, *id).is_none_or(|attachment| attachment.hold.is_some()) {
                continue;
            }
            self.change_attachment(client, *id, |attachment| {
                attachment.hold = Some(Hold::new(entity, number, group, now))
            });
            if let Some(gpu) = self.gpus.get_mut(id) {
                gpu.holders.insert(number, client);
            }
        }
    }

    /// Asks for the lock back, and for all that was granted with it: a program that is to run on several GPUs together
    /// gains nothing from some of them.
    pub(crate) fn revoke(&mut self, client: ClientId, id: GpuId) {
        let Some(hold) = self.attachment(client, id).and_then(|s| s.hold.as_ref()) else { return };
        let (entity, group) = (hold.entity, hold.group);
        let members = match entity {
            Entity::Solo(client) => vec![client],
            Entity::Gang(gang) => self.gang_members(gang).collect(),
        };
        for member in members {
            let Some(state) = self.clients.get(&member) else { continue };
            let gpus: GpuSet = state
                .attachments
                .iter()
                .filter(|(_, attachment)| {
                    let hold = attachment.hold.as_ref().filter(|h| h.revoked.is_none());
                    hold.is_some_and(|h| h.entity == entity && (h.group == group || entity != Entity::Solo(member)))
                })
                .map(|(gpu, _)| *gpu)
                .collect();
            self.revoke_now(member, gpus, None);
        }
    }

    /// Sends a revoke, the first or again.
    pub(crate) fn revoke_now(&mut self, client: ClientId, gpus: GpuSet, again: Option<Duration>) {
        let now = self.now;
        for id in &gpus {
            self.change_attachment(client, *id, |attachment| {
                let Some(hold) = attachment.hold.as_mut() else { return };
                hold.revoked = Some(Revoked {
                    first: hold.revoked.map_or(now, |revoked| revoked.first),
                    since: now,
                    again: None,
                    backoff: again.unwrap_or(super::unresponsive::STUCK.0),
                });
            });
        }
        if !gpus.is_empty() {
            self.effects.command(Command::Revoke { client, gpus });
            self.check(client);
            // It may need them to drain.
            let waiting: BTreeSet<Entity> =
                self.gang_peers(client).filter_map(|peer| self.clients.get(&peer)?.waiting).collect();
            waiting.into_iter().for_each(|entity| self.requeue(entity));
        }
    }

    pub(crate) fn released(&mut self, client: ClientId, gpus: &GpuSet, reason: ReleaseReason, busy: Duration) {
        let held: Vec<GpuId> =
            gpus.iter().filter(|id| self.attachment(client, **id).is_some_and(|s| s.hold.is_some())).copied().collect();
        let revoked = held.iter().find_map(|id| {
            let hold = self.attachment(client, *id)?.hold.as_ref()?;
            hold.revoked.and(hold.entity.gang())
        });
        for id in &held {
            self.end_hold(client, *id, busy, reason == ReleaseReason::Idle);
            if reason == ReleaseReason::NoMemory {
                self.mapping_failed(client, *id);
            } else if let Some(attachment) = self.attachment_mut(client, *id) {
                attachment.failures.has_run();
            }
            self.swap_surplus(client, *id);
        }
        if let Some(gang) = revoked {
            self.revoke_gang(gang);
        }
        self.check(client);
    }

    /// The client no longer has the lock of that GPU. `idle`: because it had no more work.
    pub(crate) fn end_hold(&mut self, client: ClientId, id: GpuId, busy: Duration, idle: bool) {
        let now = self.now;
        if self.attachment(client, id).is_none_or(|attachment| attachment.hold.is_none()) {
            return;
        }
        let ended = self.change_attachment(client, id, |attachment| {
            let hold = attachment.hold.take()?;
            let held = now.saturating_sub(hold.since);
            let waited = hold.waited(now).min(held);
            let uncontended = held - waited;
            // As for bursts: who has no work has had less than all of what it had while nobody waited.
            let ran = if idle { waited + uncontended.min(attachment.bursts.expected()) } else { held };
            attachment.progress.ran(now, ran, idle);
            attachment.bursts.ran(waited, uncontended, busy, idle);
            attachment.utilization.turn_ended(waited, idle);
            attachment.lock_time += held;
            attachment.last_run = now;
            attachment.slow_to_drain = hold.undrainable;
            if let Some(revoked) = hold.revoked.filter(|_| !hold.suspended) {
                attachment.drains.drained(now.saturating_sub(revoked.first), hold.lags);
            }
            Some((hold, waited))
        });
        let Some((hold, waited)) = ended.flatten() else { return };
        self.end_trial(client, id);
        if let Some(gpu) = self.gpus.get_mut(&id) {
            gpu.holders.remove(&hold.number);
            gpu.preempted = (!idle).then_some(client);
        }
        if !hold.is_bypassed() {
            self.count_usage(client, id, hold.since);
        }
        self.charge_service(client, id, &hold, waited);
        self.touch_rivals(hold.entity);
        self.end_gang_turn(hold.entity);
        if let Some(entity) = self.clients.get(&client).and_then(|c| c.waiting)
            && self.requests.get(&entity).is_some_and(|r| r.blocked == Some(Blocked::Undrained))
        {
            self.enqueue(entity);
        }
    }
}
