//! The GPU lock: requests and the line they stand in, grants, revokes, releases.
//!
//! What waits and is granted as one is a [`Unit`]: a client, or the waiting members of a gang. A unit is granted all
//! the GPUs that it wants or none. It stands in the line of each under the same [`Place`], so two units can never
//! each stand before the other, and the first of all always makes progress: nobody holds one thing and waits for another.

use super::{
    api::*,
    gangs::Gang,
    machine::{Machine, Place},
    shares::Class,
    timers::Wake,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What is granted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(super) enum Unit {
    Solo(ClientId),
    Gang(Gang),
}

impl Unit {
    pub fn gang(self) -> Option<Gang> {
        match self {
            Self::Solo(_) => None,
            Self::Gang(gang) => Some(gang),
        }
    }
}

/// A unit that waits.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct Request {
    pub place: Place,
    pub since: BTreeMap<ClientId, Time>,
    pub wants: BTreeMap<ClientId, GpuSet>,
    /// Others of the gang are likely to ask within a moment: it is not granted before them.
    pub gathers: Option<Time>,
    /// When it will have waited for so long that it goes before all others of its party.
    pub ages: Option<Time>,
    /// It has.
    pub aged: bool,
    /// Whether it stands in line, and if not, why.
    pub parked: Option<Parked>,
    /// What it was last told about why it waits.
    #[serde(with = "super::encoding::wait_reason")]
    pub told: Option<WaitReason>,
}

/// Why a request is not in line. It then reserves nothing, and holds up nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) enum Parked {
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
pub(super) struct Hold {
    pub unit: Unit,
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
    pub served_until: Time,
    pub own_served_until: Time,
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
pub(super) struct Revoked {
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
    fn new(unit: Unit, number: u64, group: u64, since: Time) -> Self {
        Self {
            unit,
            number,
            group,
            since,
            moved: Duration::ZERO,
            aged: false,
            served_until: Time::ZERO,
            own_served_until: Time::ZERO,
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
        self.revoked.is_some() && !self.is_aside()
    }

    /// Whether it is counted as no holder: others are admitted beside it, and its bytes stay where they are.
    pub fn is_aside(&self) -> bool {
        self.suspended || self.is_undrainable()
    }
}

impl Machine {
    pub(super) fn request(&mut self, client: ClientId, gpus: GpuSet) {
        let Some(state) = self.clients.get(&client) else { return };
        // What it holds it need not wait for; a lock that was asked back has to be released first.
        let wants: GpuSet = gpus
            .into_iter()
            .filter(|gpu| {
                let seat = state.seats.get(gpu);
                seat.is_some_and(|s| s.hold.as_ref().is_none_or(|h| h.revoked.is_some()))
            })
            .collect();
        let (unit, stopped) = (self.unit(client), state.stopped);
        let not_before = state.delayed_until(&wants);
        // A request that replaces another keeps its place.
        let old = state.waiting.and_then(|unit| self.requests.get(&unit)?.since.get(&client).copied());
        let since = old.unwrap_or(self.now);
        let place = state.waiting.and_then(|unit| self.requests.get(&unit)).map(|r| (r.place, r.ages, r.aged));
        self.withdraw(client);
        let now = self.now;
        for id in &wants {
            if let Some(seat) = self.seat_mut(client, *id) {
                seat.used.get_or_insert(now);
                if old.is_none() && seat.hold.is_none() {
                    seat.progress.asks(now);
                }
            }
        }
        if wants.is_empty() {
            return;
        }
        self.leave_line(unit);
        if !self.requests.contains_key(&unit) {
            let (place, ages, aged) = match place {
                Some(place) => place,
                None => {
                    let (rank, ages) = self.rank(client, &wants, now);
                    let (number, joined) = (self.count(), self.joined(client, &wants));
                    (Place { class: Class::default(), at: rank, rank, number, joined }, ages, false)
                }
            };
            let (since, wants) = (BTreeMap::new(), BTreeMap::new());
            let request = Request { place, since, wants, gathers: None, ages, aged, parked: None, told: None };
            self.requests.insert(unit, request);
        }
        if let Some(request) = self.requests.get_mut(&unit) {
            request.since.insert(client, since);
            request.wants.insert(client, wants);
        }
        if let Some(state) = self.clients.get_mut(&client) {
            state.waiting = Some(unit);
        }
        let (place, gathers) = (self.place_now(unit), self.gathers_until(unit));
        if let Some(request) = self.requests.get_mut(&unit) {
            request.place = place.unwrap_or(request.place);
            // Who asks late has nobody wait anew.
            request.gathers = gathers.map(|until| request.gathers.map_or(until, |before| before.min(until)));
        }
        if stopped {
            self.wait_until_it_runs(unit, client);
        } else if not_before > self.now {
            self.park(unit, Parked::Until(not_before));
        } else {
            self.join(unit);
        }
        self.look_for_laggards(unit);
    }

    /// Puts a request into the lines of its GPUs.
    pub(super) fn join(&mut self, unit: Unit) {
        let Some(request) = self.requests.get(&unit) else { return };
        if request.parked == Some(Parked::Stopped) {
            return; // it is put back when all of its members run
        }
        self.age(unit);
        let Some(request) = self.requests.get(&unit) else { return };
        // One that waits for its own client holds up nobody. Its fellows in a gang go on without it: it may need them in
        // order to drain.
        let undrained = self.undrained(unit);
        if !undrained.is_empty() {
            if undrained.len() == request.wants.len() {
                return self.park(unit, Parked::Undrained);
            }
            self.split(unit, &undrained);
        }
        if let Some(until) = self.is_capped(unit) {
            return self.park(unit, Parked::Until(until));
        }
        let Some(request) = self.requests.get(&unit) else { return };
        // One that would only take bytes elsewhere, and could not use them, stays out.
        let ids: BTreeSet<GpuId> = request.wants.values().flatten().copied().collect();
        let full = ids.iter().find(|id| {
            let members = self.members(unit, **id);
            members.len() == 1 && !self.has_room(unit, **id, &members)
        });
        if let Some(full) = full {
            return self.park(unit, Parked::Pinned(*full));
        }
        let place = self.place_now(unit);
        let Some(request) = self.requests.get_mut(&unit) else { return };
        if request.parked.take().is_some() {
            request.place = place.unwrap_or(request.place);
        }
        // Nobody gives anything back for it elsewhere at once, to no avail.
        let behind = ids.iter().find(|id| self.waits_behind(unit, **id));
        if let Some(behind) = behind {
            return self.park(unit, Parked::Behind(*behind));
        }
        let Some(request) = self.requests.get(&unit) else { return };
        for id in request.wants.values().flatten() {
            if let Some(gpu) = self.gpus.get_mut(id) {
                gpu.line.insert((request.place, unit));
                gpu.shut_out.remove(&unit);
                gpu.behind.remove(&unit);
                self.dirty.insert(*id);
            }
        }
        let next = request.gathers.into_iter().chain(request.ages).filter(|at| *at > self.now).min();
        self.touch_rivals(unit);
        self.timers.set(Wake::Unit(unit), next);
        self.admit_if_needless(unit);
    }

    pub(super) fn leave_line(&mut self, unit: Unit) {
        let Some(request) = self.requests.get(&unit) else { return };
        for id in request.wants.values().flatten() {
            if let Some(gpu) = self.gpus.get_mut(id) {
                gpu.shut_out.remove(&unit);
                gpu.behind.remove(&unit);
                if gpu.line.remove(&(request.place, unit)) {
                    self.dirty.insert(*id);
                }
            }
        }
        self.timers.set(Wake::Unit(unit), None);
    }

    pub(super) fn park(&mut self, unit: Unit, why: Parked) {
        self.leave_line(unit);
        let Some(request) = self.requests.get_mut(&unit) else { return };
        request.parked = Some(why);
        match why {
            Parked::Until(at) => self.timers.set(Wake::Unit(unit), Some(at)),
            Parked::Pinned(id) => {
                if let Some(gpu) = self.gpus.get_mut(&id) {
                    gpu.shut_out.insert(unit);
                }
                self.tell(unit, WaitReason::Pinned);
            }
            Parked::Behind(id) => {
                // Who has it is told that somebody waits.
                if let Some(gpu) = self.gpus.get_mut(&id) {
                    gpu.behind.insert(unit);
                    self.dirty.insert(id);
                }
            }
            Parked::Undrained => self.tell(unit, WaitReason::HolderStuck),
            Parked::Stopped => {}
        }
    }

    /// Those members of a unit that want a lock which they hold still and cannot give back.
    fn undrained(&self, unit: Unit) -> Vec<ClientId> {
        let wants = self.requests.get(&unit).into_iter().flat_map(|r| &r.wants);
        let undrainable = |client: ClientId, id: GpuId| {
            self.seat(client, id).and_then(|s| s.hold.as_ref()).is_some_and(Hold::is_undrainable)
        };
        let undrained = wants.filter(|(client, gpus)| gpus.iter().any(|id| undrainable(**client, *id)));
        undrained.map(|(client, _)| *client).collect()
    }

    /// Takes a client out of the request that it is part of.
    pub(super) fn withdraw(&mut self, client: ClientId) {
        let Some(unit) = self.clients.get_mut(&client).and_then(|c| c.waiting.take()) else { return };
        self.leave_line(unit);
        let Some(request) = self.requests.get_mut(&unit) else { return };
        request.wants.remove(&client);
        request.since.remove(&client);
        let parked = request.parked;
        if request.wants.is_empty() {
            self.requests.remove(&unit);
        } else {
            match parked {
                Some(Parked::Until(at)) if self.is_delayed(unit) => self.park(unit, Parked::Until(at)),
                Some(Parked::Stopped) if self.any_stopped(unit) => {}
                _ => {
                    if let Some(request) = self.requests.get_mut(&unit) {
                        request.parked = None;
                    }
                    self.join(unit);
                }
            }
        }
    }

    /// Whether one of them is not to have anything yet, since mapping failed.
    pub(super) fn is_delayed(&self, unit: Unit) -> bool {
        let mut wants = self.requests.get(&unit).into_iter().flat_map(|request| &request.wants);
        wants.any(|(c, gpus)| self.clients.get(c).is_some_and(|state| state.delayed_until(gpus) > self.now))
    }

    pub(super) fn any_stopped(&self, unit: Unit) -> bool {
        let wants = self.requests.get(&unit).into_iter().flat_map(|r| r.wants.keys());
        wants.filter_map(|c| self.clients.get(c)).any(|c| c.stopped)
    }

    pub(super) fn cancel(&mut self, client: ClientId, gpus: &GpuSet) {
        let unit = self.clients.get(&client).and_then(|c| c.waiting);
        let wants = unit.and_then(|unit| self.requests.get(&unit)?.wants.get(&client));
        let Some(wants) = wants.filter(|w| !w.is_disjoint(gpus)) else { return };
        let rest: GpuSet = wants.difference(gpus).copied().collect();
        if rest.is_empty() {
            self.withdraw(client);
        } else {
            self.request(client, rest);
        }
    }

    /// Why a unit waits, told when it changes.
    pub(super) fn tell(&mut self, unit: Unit, why: WaitReason) {
        let Some(request) = self.requests.get_mut(&unit).filter(|r| r.told != Some(why)) else { return };
        request.told = Some(why);
        for (client, gpus) in &request.wants {
            self.out.push(Command::Waiting { client: *client, gpus: gpus.clone(), why });
        }
    }

    /// With anti-thrash off, one who needs neither bytes nor turns need not stand in line.
    fn admit_if_needless(&mut self, unit: Unit) {
        if self.settings.anti_thrash != AntiThrash::Off {
            return;
        }
        let Some(request) = self.requests.get(&unit) else { return };
        let needless = request.wants.iter().all(|(client, gpus)| {
            gpus.iter()
                .all(|gpu| self.seat(*client, *gpu).is_some_and(|s| s.engine == Engine::Managed && s.hold.is_none()))
        });
        if needless {
            self.grant(unit);
        }
    }

    pub(super) fn admit_needless(&mut self) {
        for unit in self.requests.keys().copied().collect::<Vec<_>>() {
            if self.requests.get(&unit).is_some_and(|r| r.parked.is_none()) {
                self.admit_if_needless(unit);
            }
        }
    }

    /// Whether, as far as the lock of this GPU goes, that unit can be admitted now.
    pub(super) fn admissible(&self, unit: Unit, id: GpuId) -> bool {
        let (Some(gpu), Some(request)) = (self.gpus.get(&id), self.requests.get(&unit)) else { return false };
        if self.waits_for_gang(unit) || self.is_kept_for_gang(unit, id) {
            return false;
        }
        let together = self.settings.anti_thrash == AntiThrash::Off || self.may_join(unit, id);
        gpu.holders.values().all(|holder| {
            let Some(hold) = self.seat(*holder, id).and_then(|s| s.hold.as_ref()) else { return true };
            let own = request.wants.get(holder).is_some_and(|gpus| gpus.contains(&id));
            let beside = together || hold.is_aside() || hold.unit == unit || self.makes_way(*holder, hold, unit);
            beside && !own
        })
    }

    /// Whether all that it needs on this GPU is allowed to it.
    pub(super) fn provided(&self, unit: Unit, id: GpuId) -> bool {
        let Some(request) = self.requests.get(&unit) else { return false };
        let mut here = request.wants.iter().filter(|(_, gpus)| gpus.contains(&id));
        here.all(|(client, _)| {
            self.account(*client, id).is_some_and(|account| account.allowance >= self.need(*client, id))
        })
    }

    /// Whether it is first in line for all that it wants, and can have it.
    pub(super) fn complete(&self, unit: Unit) -> bool {
        let Some(request) = self.requests.get(&unit) else { return false };
        if request.gathers.is_some_and(|until| until > self.now) || self.is_about_to_drain(unit) {
            return false;
        }
        let ids: BTreeSet<GpuId> = request.wants.values().flatten().copied().collect();
        ids.iter().all(|id| {
            let first = self.gpus.get(id).and_then(|g| g.line.first()).map(|(_, unit)| *unit);
            first == Some(unit) && self.admissible(unit, *id) && self.provided(unit, *id)
        })
    }

    pub(super) fn grant(&mut self, unit: Unit) {
        self.leave_line(unit);
        let Some(request) = self.requests.remove(&unit) else { return };
        self.begin_gang_turn(unit);
        let (now, group) = (self.now, self.count());
        for (client, gpus) in request.wants {
            let waited = now.saturating_sub(request.since.get(&client).copied().unwrap_or(now));
            if let Some(state) = self.clients.get_mut(&client) {
                state.waiting = None;
                // What it holds already becomes part of the set.
                for hold in state.seats.values_mut().filter_map(|s| s.hold.as_mut()) {
                    if hold.revoked.is_none() {
                        hold.group = group;
                    }
                }
            }
            for id in &gpus {
                let number = self.count();
                let Some(gpu) = self.gpus.get_mut(id).filter(|gpu| gpu.seats.contains(&client)) else { continue };
                gpu.holders.insert(number, client);
                // Nobody could run while its memory came.
                let own = gpu.vacant.take().filter(|(whose, _)| *whose == unit);
                let moved = own.map_or(Duration::ZERO, |(_, since)| now.saturating_sub(since));
                let (served_until, own_served_until) = self.served_before(client, *id);
                self.change_seat(client, *id, |seat| {
                    seat.grants += 1;
                    seat.wait_time += waited;
                    let hold = Hold::new(unit, number, group, now);
                    seat.hold = Some(Hold { moved, aged: request.aged, served_until, own_served_until, ..hold });
                });
            }
            self.out.push(Command::Grant { client, gpus });
        }
    }

    /// A lock that was granted before this machine was there goes on, as one whose turn begins now.
    pub(super) fn held(&mut self, client: ClientId, gpus: &GpuSet) {
        let (unit, now, group) = (self.unit(client), self.now, self.count());
        self.begin_gang_turn(unit);
        for id in gpus {
            let number = self.count();
            if self.seat(client, *id).is_none_or(|seat| seat.hold.is_some()) {
                continue;
            }
            self.change_seat(client, *id, |seat| seat.hold = Some(Hold::new(unit, number, group, now)));
            if let Some(gpu) = self.gpus.get_mut(id) {
                gpu.holders.insert(number, client);
            }
        }
    }

    /// Asks for the lock back, and for all that was granted with it: a program that is to run on several GPUs together
    /// gains nothing from some of them.
    pub(super) fn revoke(&mut self, client: ClientId, id: GpuId) {
        let Some(hold) = self.seat(client, id).and_then(|s| s.hold.as_ref()) else { return };
        let (unit, group) = (hold.unit, hold.group);
        let members = match unit {
            Unit::Solo(client) => vec![client],
            Unit::Gang(gang) => self.gang_members(gang).collect(),
        };
        for member in members {
            let Some(state) = self.clients.get(&member) else { continue };
            let gpus: GpuSet = state
                .seats
                .iter()
                .filter(|(_, seat)| {
                    let hold = seat.hold.as_ref().filter(|h| h.revoked.is_none());
                    hold.is_some_and(|h| h.unit == unit && (h.group == group || unit != Unit::Solo(member)))
                })
                .map(|(gpu, _)| *gpu)
                .collect();
            self.revoke_now(member, gpus, None);
        }
    }

    /// Sends a revoke, the first or again.
    pub(super) fn revoke_now(&mut self, client: ClientId, gpus: GpuSet, again: Option<Duration>) {
        let now = self.now;
        for id in &gpus {
            self.change_seat(client, *id, |seat| {
                let Some(hold) = seat.hold.as_mut() else { return };
                hold.revoked = Some(Revoked {
                    first: hold.revoked.map_or(now, |revoked| revoked.first),
                    since: now,
                    again: None,
                    backoff: again.unwrap_or(super::patience::STUCK.0),
                });
            });
        }
        if !gpus.is_empty() {
            self.out.push(Command::Revoke { client, gpus });
            self.check(client);
            // It may need them to drain.
            let waiting: BTreeSet<Unit> =
                self.fellows(client).filter_map(|fellow| self.clients.get(&fellow)?.waiting).collect();
            waiting.into_iter().for_each(|unit| self.put_back(unit));
        }
    }

    pub(super) fn released(&mut self, client: ClientId, gpus: &GpuSet, reason: ReleaseReason, busy: Duration) {
        let held: Vec<GpuId> =
            gpus.iter().filter(|id| self.seat(client, **id).is_some_and(|s| s.hold.is_some())).copied().collect();
        let revoked = held.iter().find_map(|id| {
            let hold = self.seat(client, *id)?.hold.as_ref()?;
            hold.revoked.and(hold.unit.gang())
        });
        for id in &held {
            self.end_hold(client, *id, busy, reason == ReleaseReason::Idle);
            if reason == ReleaseReason::NoMemory {
                self.mapping_failed(client, *id);
            } else if let Some(seat) = self.seat_mut(client, *id) {
                seat.failures.has_run();
            }
            self.swap_surplus(client, *id);
        }
        if let Some(gang) = revoked {
            self.revoke_gang(gang);
        }
        self.check(client);
    }

    /// The client no longer has the lock of that GPU. `idle`: because it had no more work.
    pub(super) fn end_hold(&mut self, client: ClientId, id: GpuId, busy: Duration, idle: bool) {
        let now = self.now;
        if self.seat(client, id).is_none_or(|seat| seat.hold.is_none()) {
            return;
        }
        let ended = self.change_seat(client, id, |seat| {
            let hold = seat.hold.take()?;
            let held = now.saturating_sub(hold.since);
            let waited = hold.waited(now).min(held);
            let uncontended = held - waited;
            // As for bursts: who has no work has had less than all of what it had while nobody waited.
            let ran = if idle { waited + uncontended.min(seat.bursts.expected()) } else { held };
            seat.progress.ran(now, ran, idle);
            seat.bursts.ran(waited, uncontended, busy, idle);
            seat.fullness.turn_ended(waited, idle);
            seat.lock_time += held;
            seat.last_run = now;
            seat.lingers = hold.undrainable;
            if let Some(revoked) = hold.revoked.filter(|_| !hold.suspended) {
                seat.drains.drained(now.saturating_sub(revoked.first), hold.lags);
            }
            Some((hold, waited))
        });
        let Some((hold, waited)) = ended.flatten() else { return };
        self.end_trial(client, id);
        if let Some(gpu) = self.gpus.get_mut(&id) {
            gpu.holders.remove(&hold.number);
            gpu.cut_short = (!idle).then_some(client);
        }
        if !hold.is_aside() {
            self.count_usage(client, id, hold.since);
        }
        self.has_been_served(client, id, &hold, waited);
        self.touch_rivals(hold.unit);
        self.end_gang_turn(hold.unit);
        if let Some(unit) = self.clients.get(&client).and_then(|c| c.waiting)
            && self.requests.get(&unit).is_some_and(|r| r.parked == Some(Parked::Undrained))
        {
            self.join(unit);
        }
    }
}
