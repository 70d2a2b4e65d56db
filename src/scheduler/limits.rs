//! Who is promised how much: each client's limit on each GPU.
//!
//! What does not fit on a GPU is in host memory, so Σ promises ≤ capacity + host memory, which all GPUs share. Where there
//! is so much of it that everybody can be promised a whole GPU, everybody is. Where there is not, each client has what it
//! needs and an equal part of what is left (its *slack*), and more when it asks, from the slack of others, if all that is
//! wished for can be had: an allocation that can be had is granted, one that cannot fails at once. Nobody waits for what
//! another one holds, so nobody can wait for ever. What a rule bounds is divided in the same way (`groups`).

use super::{
    api::*,
    groups::Bound,
    machine::{Gpu, Machine},
    promise::{Promise, Wish},
    timers::Wake,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Clients are told of a new limit when it differs by more: the driver's own granularity.
pub(super) const LIMIT_STEP: u64 = 2 << 20;
/// How long somebody who attaches waits for others to acknowledge what they no longer have, before it is told of less.
pub(super) const PROMISE_PATIENCE: Duration = Duration::from_millis(200);
/// How long a wish waits for the same, before it is denied. A driver that makes contexts for several programs at once may
/// keep a process from answering for seconds.
const WISH_PATIENCE: Duration = Duration::from_secs(5);
/// A client that has not acknowledged a limit for so long keeps what it had.
const ACK_PATIENCE: Duration = Duration::from_secs(4);

/// Nobody is promised more (16 TiB), so that sums cannot overflow.
const MOST: u64 = 1 << 44;

impl Gpu {
    /// What anybody can be promised there.
    fn offer(&self, settings: &Settings) -> u64 {
        self.capacity(settings).min(MOST)
    }
}

/// The host memory that promises may count on.
#[derive(Debug, Default)]
pub(super) struct Host {
    /// `None`: there is no bound.
    pub bytes: Option<u64>,
    /// Bytes that would be in the host if everybody made use of a whole GPU, over all GPUs.
    most: u64,
    /// Bytes that are there if everybody makes use of what it was promised.
    pub promised: u64,
    /// There is less than `most`.
    scarce: bool,
    /// Where something changed that promises depend on; while memory is scarce that concerns everybody.
    changed: BTreeSet<GpuId>,
    all_changed: bool,
}

impl Host {
    pub fn is_scarce(&self) -> bool {
        self.scarce
    }

    pub fn has_changed(&self) -> bool {
        self.all_changed || !self.changed.is_empty()
    }

    /// All promises are to be weighed anew.
    pub fn reweigh(&mut self) {
        self.all_changed = true;
    }

    /// The promises on that GPU are to be weighed anew.
    pub fn has_changed_on(&mut self, id: GpuId) {
        self.changed.insert(id);
    }

    /// Fewer bytes are promised, or more needed, than was known.
    pub fn loosened(&mut self) {
        self.all_changed |= self.scarce;
    }
}

/// A client's promise while all of them are weighed.
#[derive(Debug)]
pub(super) struct Part {
    client: ClientId,
    gpu: usize,
    /// What it has whatever others have.
    floor: u64,
    /// Where its slack begins.
    base: u64,
    /// It can be promised no more than this, and no less than its floor.
    most: u64,
    /// The most slack that its group leaves it.
    pub slack: u64,
    /// Its limit, where its group has more than it may.
    pub cap: u64,
    /// It does not answer.
    pub deaf: bool,
    /// Small differences are told.
    pub exact: bool,
}

/// What a client is to be promised on a GPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    client: ClientId,
    gpu: GpuId,
    bytes: u64,
    exact: bool,
}

/// A GPU while promises are weighed.
struct Side {
    id: GpuId,
    capacity: u64,
    parts: Vec<Part>,
    bounds: BTreeMap<GroupId, Bound>,
    /// Somebody waits to be told a limit.
    attaching: bool,
}

impl Part {
    pub fn at(&self, slack: u64) -> u64 {
        self.base.saturating_add(slack.min(self.slack)).min(self.most).max(self.floor)
    }

    /// What it has where its group has too much.
    pub fn capped(&self, cap: u64) -> u64 {
        if self.deaf { self.floor } else { self.at(0).min(cap) }
    }
}

/// Bytes in the host if everybody makes use of so much slack.
fn in_host(sides: &[Side], slack: u64) -> u64 {
    let excess = |side: &Side| {
        let sum = side.parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.at(slack)));
        sum.saturating_sub(side.capacity)
    };
    sides.iter().fold(0, |sum, side| sum.saturating_add(excess(side)))
}

impl Machine {
    pub(super) fn host_memory(&mut self, bytes: u64) {
        if self.host.bytes != Some(bytes) {
            self.host.bytes = Some(bytes);
            self.host.reweigh();
        }
    }

    /// `hopes`: more than there is room for is refused only after another measurement.
    pub(super) fn wish(&mut self, client: ClientId, id: GpuId, bytes: u64, hopes: bool) {
        let (now, number) = (self.now, self.count());
        let Some(capacity) = self.gpus.get(&id).map(|g| g.offer(&self.settings)) else { return };
        let max = self.memory_max(client, id).unwrap_or(u64::MAX);
        let Some(seat) = self.seat_mut(client, id) else { return };
        if bytes <= seat.promise.limit {
            self.tell_limit(client, id);
        } else if bytes > capacity.min(max) {
            let why = if bytes > max { Denial::MemoryMax } else { Denial::NoRoom };
            if hopes && why == Denial::NoRoom && self.hope(client, id, bytes) {
                return;
            }
            self.out.push(Command::Denied { client, gpu: id, bytes, why });
        } else {
            seat.promise.wish = Some(Wish { bytes, since: now, number });
            self.host.reweigh();
        }
    }

    /// Takes notice of what a GPU offers, and of who is there.
    pub(super) fn note_offer(&mut self, id: GpuId) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        let capacity = gpu.offer(&self.settings);
        if gpu.summed_for.replace(capacity) != Some(capacity) {
            // By what they need, never by what they were promised: that follows from this.
            let clients = gpu.seats.iter().filter_map(|client| self.clients.get(client)?.seats.get(&id));
            let all = clients.fold(0u64, |sum, seat| sum.saturating_add(seat.promise.demand().max(capacity)));
            let most = all.saturating_sub(capacity);
            self.host.most = (self.host.most - gpu.most_in_host).saturating_add(most);
            gpu.most_in_host = most;
        }
        let seats = gpu.seats.len();
        if gpu.weighed.is_none_or(|(bytes, count)| count != seats || bytes.abs_diff(capacity) > LIMIT_STEP) {
            gpu.weighed = Some((capacity, seats));
            self.host.changed.insert(id);
        }
        self.count_in_host(id);
        let scarce = self.host.bytes.is_some_and(|bytes| bytes < self.host.most);
        self.host.all_changed |= scarce != self.host.scarce;
    }

    /// Brings the host's sum up to date with one GPU.
    pub(super) fn count_in_host(&mut self, id: GpuId) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        let excess = gpu.promised.saturating_sub(gpu.offer(&self.settings));
        self.host.promised = self.host.promised - gpu.in_host + excess;
        gpu.in_host = excess;
    }

    /// Brings the GPU's sum up to date with one promise.
    pub(super) fn recharge(&mut self, client: ClientId, id: GpuId) {
        let (Some(state), Some(gpu)) = (self.clients.get_mut(&client), self.gpus.get_mut(&id)) else { return };
        let Some(promise) = state.seats.get_mut(&id).map(|s| &mut s.promise) else { return };
        let charge = promise.charge();
        let before = std::mem::replace(&mut promise.counted, charge);
        gpu.promised = gpu.promised - before + charge;
        gpu.count_for(state.group, before, charge);
        self.count_in_host(id);
    }

    /// Weighs all promises anew: lowers what is more than a client's part, and raises what is less as far as there is room.
    pub(super) fn balance(&mut self) {
        let changed = std::mem::take(&mut self.host.changed);
        let all = std::mem::take(&mut self.host.all_changed);
        let before = std::mem::replace(&mut self.host.scarce, false);
        self.host.scarce = self.host.bytes.is_some_and(|bytes| bytes < self.host.most);
        let everywhere = || self.gpus.keys().copied().collect();
        let budget = self.host.bytes.filter(|_| self.host.scarce);
        let ids: GpuSet = if all || before || budget.is_some() { everywhere() } else { changed };
        let targets = match budget {
            Some(_) => self.weigh(budget, &ids),
            None => {
                let members = self.weigh_members(&ids);
                members.into_iter().chain(self.weigh_nothing(&ids)).collect()
            }
        };
        for lower in [true, false] {
            for target in &targets {
                self.approach(target, lower);
            }
        }
        if self.host.scarce || before || !self.groups.is_empty() {
            self.end_wishes(&targets);
        }
        // Whoever attaches waits to be told.
        let waits = |id: &GpuId| self.gpus.get(id).is_some_and(|gpu| !gpu.attaching.is_empty());
        let waiting: BTreeSet<GpuId> = targets.iter().map(|target| target.gpu).filter(waits).collect();
        self.dirty.extend(waiting);
    }

    /// Everybody can have everything, whom no rule bounds.
    fn weigh_nothing(&self, ids: &GpuSet) -> Vec<Target> {
        let mut all = Vec::new();
        for (id, gpu) in ids.iter().filter_map(|id| Some((*id, self.gpus.get(id)?))) {
            let capacity = gpu.offer(&self.settings);
            let free = gpu.seats.iter().filter(|client| self.memory_max(**client, id).is_none());
            all.extend(free.map(|client| Target { client: *client, gpu: id, bytes: capacity, exact: false }));
        }
        all
    }

    /// What each client is to have, those first that wish for something, in the order of their wishes. Denies wishes that
    /// cannot be fulfilled. Without a budget, only for those whom a rule bounds.
    pub(super) fn weigh(&mut self, budget: Option<u64>, ids: &GpuSet) -> Vec<Target> {
        let now = self.now;
        let mut sides = Vec::new();
        let mut wishes = Vec::new();
        for (id, gpu) in ids.iter().filter_map(|id| Some((*id, self.gpus.get(id)?))) {
            let mut parts = Vec::new();
            let mut bounds: BTreeMap<GroupId, Bound> = BTreeMap::new();
            let capacity = gpu.offer(&self.settings);
            for client in &gpu.seats {
                let Some(state) = self.clients.get(client) else { continue };
                let bound = state.group.zip(self.memory_max(*client, id));
                if budget.is_none() && bound.is_none() {
                    continue;
                }
                let Some(promise) = state.seats.get(&id).map(|s| &s.promise) else { continue };
                // From one who does not answer nothing can be had.
                let deaf = state.stopped
                    || !promise.listens()
                    || promise.lowered.is_some_and(|at| now.saturating_sub(at) >= ACK_PATIENCE);
                let floor = if deaf { promise.charge() } else { promise.demand() };
                if let Some(wish) = promise.wish {
                    wishes.push((wish.number, sides.len(), parts.len(), wish.bytes));
                }
                if let Some((group, max)) = bound {
                    bounds.entry(group).or_insert_with(|| Bound { max, parts: Vec::new() }).parts.push(parts.len());
                }
                parts.push(Part {
                    client: *client,
                    gpu: sides.len(),
                    floor,
                    base: promise.demand(),
                    most: capacity,
                    slack: u64::MAX,
                    cap: u64::MAX,
                    deaf,
                    exact: false,
                });
            }
            sides.push(Side { id, capacity, parts, bounds, attaching: !gpu.attaching.is_empty() });
        }
        wishes.sort_unstable();
        let mut granted = Vec::new();
        for (_, side, part, bytes) in wishes {
            let before = in_host(&sides, 0);
            let (id, capacity) = (sides[side].id, sides[side].capacity);
            let grouped = |side: &Side| {
                let bound = side.bounds.values().find(|bound| bound.parts.contains(&part))?;
                Some((bound.max, bound.used(&side.parts, 0)))
            };
            let in_group = grouped(&sides[side]).map(|(_, used)| used);
            let place = &mut sides[side].parts[part];
            let (client, floor) = (place.client, place.floor);
            place.floor = floor.max(bytes);
            let after = in_host(&sides, 0);
            let no_room = bytes > capacity.max(floor) || budget.is_some_and(|budget| after > budget && after > before);
            let no_more = grouped(&sides[side]).is_some_and(|(max, used)| used > max && Some(used) > in_group);
            if no_room || no_more {
                sides[side].parts[part].floor = floor;
                self.deny(client, id, if no_more { Denial::MemoryMax } else { Denial::NoRoom });
            } else {
                granted.push((side, part));
            }
        }
        for (at, side) in sides.iter_mut().enumerate() {
            for bound in side.bounds.values() {
                let wished = granted.iter().any(|(side, part)| *side == at && bound.parts.contains(part));
                bound.divide(&mut side.parts, wished || side.attaching);
            }
        }
        // The highest slack that everybody can have: what is needed grows with it.
        let (mut low, mut high) = (0, sides.iter().map(|side| side.capacity).max().unwrap_or(0));
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if in_host(&sides, middle) <= budget.unwrap_or(u64::MAX) { low = middle } else { high = middle - 1 }
        }
        let target = |part: &Part| Target {
            client: part.client,
            gpu: sides[part.gpu].id,
            bytes: part.at(low).min(part.cap),
            exact: part.exact,
        };
        let first: Vec<_> = granted.iter().map(|(side, part)| target(&sides[*side].parts[*part])).collect();
        first.into_iter().chain(sides.iter().flat_map(|side| &side.parts).map(target)).collect()
    }

    /// Takes one promise to what it is to be, down or up.
    fn approach(&mut self, target: &Target, lower: bool) {
        let Target { client, gpu: id, bytes: target, exact } = *target;
        let (now, scarce) = (self.now, self.host.scarce);
        let bounded = self.memory_max(client, id).is_some();
        let (room, step) = (self.promisable(id), if exact { 0 } else { LIMIT_STEP });
        let in_group = self.group_room(client, id);
        let Some(seat) = self.seat_mut(client, id) else { return };
        let told = seat.attached.is_some();
        let promise = &mut seat.promise;
        promise.target = target;
        let near = promise.limit.abs_diff(target) <= step;
        let room = in_group.map(|left| left.min(room));
        let bytes = match promise.wish {
            _ if lower => {
                if target > promise.limit || near || !promise.listens() {
                    return;
                }
                target
            }
            // All or nothing.
            Some(wish) if wish.bytes > promise.limit => {
                let Some(room) = room else { return };
                let reach = target.min(promise.charge().saturating_add(room));
                if reach < wish.bytes {
                    return;
                }
                reach
            }
            _ => {
                let Some(room) = room else { return };
                let reach = target.min(promise.charge().saturating_add(room));
                if near || reach <= promise.limit.saturating_add(step) {
                    return;
                }
                reach
            }
        };
        promise.set(now, bytes, told);
        if promise.lowered == Some(now) && (scarce || bounded) {
            self.weigh_at(now + ACK_PATIENCE);
        }
        self.recharge(client, id);
        if told {
            self.tell_limit(client, id);
        }
    }

    /// Bytes that can be promised on that GPU beyond what is.
    fn promisable(&self, id: GpuId) -> u64 {
        let Some(budget) = self.host.bytes.filter(|_| self.host.scarce) else { return u64::MAX };
        let here = self.gpus.get(&id).map_or(0, |gpu| gpu.offer(&self.settings).saturating_sub(gpu.promised));
        here.saturating_add(budget.saturating_sub(self.host.promised))
    }

    /// Ends wishes that are fulfilled, or have waited for too long.
    fn end_wishes(&mut self, weighed: &[Target]) {
        let now = self.now;
        let seats = weighed.iter().filter_map(|t| Some((t.client, t.gpu, self.seat(t.client, t.gpu)?)));
        let wishes = seats.filter_map(|(client, id, seat)| Some((client, id, seat.promise.wish?, seat.promise.limit)));
        for (client, id, wish, limit) in wishes.collect::<Vec<_>>() {
            let until = wish.since + WISH_PATIENCE;
            if wish.bytes <= limit {
                if let Some(seat) = self.seat_mut(client, id) {
                    seat.promise.wish = None;
                }
            } else if until <= now {
                let is_full = self.group_room(client, id).is_none_or(|room| room < wish.bytes - limit);
                self.deny(client, id, if is_full { Denial::MemoryMax } else { Denial::NoRoom });
            } else {
                self.weigh_at(until);
            }
        }
    }

    fn weigh_at(&mut self, at: Time) {
        let set = self.timers.get(Wake::Promises).filter(|set| *set > self.now);
        self.timers.set(Wake::Promises, Some(set.map_or(at, |set| set.min(at))));
    }

    fn deny(&mut self, client: ClientId, id: GpuId, why: Denial) {
        let Some(wish) = self.seat_mut(client, id).and_then(|s| s.promise.wish.take()) else { return };
        self.out.push(Command::Denied { client, gpu: id, bytes: wish.bytes, why });
    }

    /// Says what the limit is.
    pub(super) fn tell_limit(&mut self, client: ClientId, id: GpuId) {
        let Some(most) = self.gpus.get(&id).map(|g| g.offer(&self.settings)) else { return };
        let Some(Promise { limit: bytes, seq, .. }) = self.seat(client, id).map(|s| s.promise.clone()) else { return };
        let spare = if self.host.scarce { 0 } else { u64::MAX };
        let max = self.memory_max(client, id);
        self.out.push(Command::Limit { client, gpu: id, bytes, seq, most: most.max(bytes), spare, max });
    }
}
