//! Wishes for a higher limit: an allocation that needs one waits for it. What can be had is granted, what cannot is refused;
//! or, where a rule says so, waits until others of the group have freed enough, in the order that the rule says.
//!
//! Where all who could free something wait themselves, nobody ever would: then the last to come is refused.

use super::{
    api::*,
    limits::WISH_PATIENCE,
    machine::{Client, Machine},
    promise::Wish,
    weigh::{At, Scales, Target},
};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// A wish while all promises are weighed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waiting {
    pub client: ClientId,
    pub gpu: GpuId,
    pub group: Option<GroupId>,
    pub wish: Wish,
    pub at: At,
}

impl WaitOrder {
    /// The smaller, the sooner. `lacks`: the bytes that it waits for.
    fn rank(self, number: u64, lacks: u64) -> (u64, u64) {
        match self {
            Self::Fifo => (0, number),
            // Of those that can be had, the one that leaves least.
            Self::BestFit => (u64::MAX - lacks, number),
            Self::MostRecent => (0, u64::MAX - number),
            // The same for a wish whenever it is asked, so that nobody's chances change by asking.
            Self::Random => (scattered(number), number),
        }
    }
}

/// The finalizer of SplitMix64: neighbours are far from each other.
fn scattered(number: u64) -> u64 {
    let z = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Machine {
    /// `hopes`: more than there is room for is refused only after another measurement.
    pub(super) fn wish(&mut self, client: ClientId, id: GpuId, bytes: u64, hopes: bool) {
        let (now, number) = (self.now, self.count());
        let Some(capacity) = self.gpus.get(&id).map(|g| g.offer(&self.settings)) else { return };
        // What its fellows have may become free, but not what it has itself.
        let own = self.seat(client, id).map_or(0, |seat| self.context(seat, id));
        let max = self.memory_max(client, id).map(|max| max.saturating_sub(own));
        let swap_max = self.swap_max(client);
        let beyond = |max: Option<u64>| max.is_some_and(|max| bytes > max);
        let Some(promise) = self.seat(client, id).map(|seat| &seat.promise) else { return };
        // What it has already it may keep.
        let never = if bytes <= promise.limit.max(promise.demand()) {
            return self.tell_limit(client, id);
        } else if hopes && self.hope_for_context(client, id, bytes) {
            return;
        } else if beyond(self.own_bound(client, id)) || beyond(self.own_swap_max(client)) {
            Some(Denial::Own)
        } else if beyond(max) {
            Some(Denial::MemoryMax)
        } else if beyond(swap_max) {
            Some(Denial::SwapMax)
        } else if bytes > capacity {
            if hopes && self.hope(client, id, bytes) {
                return;
            }
            Some(Denial::NoRoom)
        } else {
            None
        };
        let Some(promise) = self.seat_mut(client, id).map(|seat| &mut seat.promise) else { return };
        if let Some(why) = never {
            promise.wish = None;
            self.out.push(Command::Denied { client, gpu: id, bytes, why });
        } else {
            // Who asks again keeps its place.
            let fresh = Wish { bytes, since: now, number, held: None };
            promise.wish = Some(promise.wish.map_or(fresh, |before| Wish { bytes, ..before }));
            self.host.reweigh();
        }
    }

    /// What happens to a wish of that client which cannot be had now: as it says itself, or else its rule.
    fn on_full(&self, client: ClientId) -> OnMemoryFull {
        let group = self.clients.get(&client).and_then(|state| self.groups.get(&state.group?));
        let ruled = group.map_or(OnMemoryFull::Fail, |members| members.terms.on_memory_full);
        match self.own.get(&client).and_then(|own| own.waits) {
            Some(false) => OnMemoryFull::Fail,
            Some(true) if ruled == OnMemoryFull::Fail => OnMemoryFull::Wait(WaitOrder::default()),
            Some(true) | None => ruled,
        }
    }

    /// Whether that client's allocations wait where they cannot be had.
    pub(super) fn waits_for_memory(&self, client: ClientId) -> bool {
        self.on_full(client) != OnMemoryFull::Fail
    }

    /// Grants what can be had, in order, and denies what cannot, unless that waits.
    pub(super) fn serve_wishes(&mut self, scales: &mut Scales, wishes: Vec<Waiting>, budget: Option<u64>) -> Vec<At> {
        let mut granted = Vec::new();
        // Where one waits that is served before all who came later.
        let mut held: BTreeMap<(GroupId, GpuId), Denial> = BTreeMap::new();
        self.host.awaited = false;
        for waiting in self.in_order(scales, wishes) {
            let Waiting { client, gpu, group, wish, at } = waiting;
            let (waits, is_fifo) = match self.on_full(client) {
                OnMemoryFull::Fail => (false, false),
                OnMemoryFull::Wait(order) => (true, order == WaitOrder::Fifo),
            };
            let place = group.map(|group| (group, gpu)).filter(|_| is_fifo);
            if let Some(why) = place.and_then(|place| held.get(&place).copied()) {
                self.hold_back(client, gpu, why);
                continue;
            }
            match scales.grant(at, wish.bytes, budget) {
                Ok(()) => granted.push(at),
                // What it does not allow itself nobody else can give it.
                Err(why) if waits && why != Denial::Own => {
                    held.extend(place.map(|place| (place, why)));
                    self.hold_back(client, gpu, why);
                }
                Err(why) => self.deny(client, gpu, why),
            }
        }
        granted
    }

    /// By their numbers; but those of one group take each other's places, as its rule orders them.
    fn in_order(&self, scales: &Scales, mut wishes: Vec<Waiting>) -> Vec<Waiting> {
        wishes.sort_unstable_by_key(|waiting| waiting.wish.number);
        let mut groups: BTreeMap<GroupId, Vec<Waiting>> = BTreeMap::new();
        let mut orders = BTreeMap::new();
        for waiting in &wishes {
            let Some(group) = waiting.group else { continue };
            if let OnMemoryFull::Wait(order) = self.on_full(waiting.client) {
                groups.entry(group).or_default().push(*waiting);
                orders.insert(group, order);
            }
        }
        for (group, members) in &mut groups {
            let order = orders.get(group).copied().unwrap_or_default();
            let rank = |w: &Waiting| order.rank(w.wish.number, scales.lacks(w.at, w.wish.bytes));
            members.sort_unstable_by_key(|waiting| Reverse(rank(waiting)));
        }
        let next = |waiting: Waiting| {
            let waits = self.on_full(waiting.client) != OnMemoryFull::Fail;
            let own = waiting.group.filter(|_| waits).and_then(|group| groups.get_mut(&group));
            own.and_then(Vec::pop).unwrap_or(waiting)
        };
        wishes.into_iter().map(next).collect()
    }

    /// A wish waits for what others have, and its client knows that.
    fn hold_back(&mut self, client: ClientId, gpu: GpuId, why: Denial) {
        self.host.awaited = true;
        let wish = self.seat_mut(client, gpu).and_then(|seat| seat.promise.wish.as_mut());
        if wish.is_some_and(|wish| wish.held.replace(why).is_none()) {
            self.out.push(Command::Waiting { client, gpus: GpuSet::from([gpu]), why: WaitReason::Memory });
        }
    }

    /// Ends wishes that are fulfilled, or have waited for too long.
    pub(super) fn end_wishes(&mut self, weighed: &[Target]) {
        let now = self.now;
        let seats = weighed.iter().filter_map(|t| Some((t.client, t.gpu, self.seat(t.client, t.gpu)?)));
        let wishes = seats.filter_map(|(client, id, seat)| {
            let promise = &seat.promise;
            Some((client, id, promise.wish?, promise.limit, promise.target))
        });
        for (client, id, wish, limit, target) in wishes.collect::<Vec<_>>() {
            let until = wish.since + WISH_PATIENCE;
            let waits = self.on_full(client) != OnMemoryFull::Fail;
            if wish.bytes <= limit {
                if let Some(seat) = self.seat_mut(client, id) {
                    seat.promise.wish = None;
                }
            } else if waits && (wish.bytes <= target || !self.is_last_of_all(client, wish.held)) {
                continue; // those who can free something will, or have, and only have to take notice
            } else if until <= now {
                let is_full = self.group_room(client, id).is_none_or(|room| room < wish.bytes - limit);
                self.deny(client, id, if is_full { Denial::MemoryMax } else { Denial::NoRoom });
            } else {
                self.weigh_at(until);
            }
        }
    }

    /// Whether all who have memory that this wish could be given wait themselves, and it is the newest of theirs.
    fn is_last_of_all(&self, client: ClientId, held: Option<Denial>) -> bool {
        let wish = |state: &Client| {
            let wishes = state.seats.values().filter_map(|seat| seat.promise.wish);
            wishes.max_by_key(|wish| wish.number)
        };
        let has_some = |state: &Client| state.seats.values().any(|seat| seat.promise.demand() > 0);
        let Some(own) = self.clients.get(&client) else { return false };
        let number = wish(own).map(|wish| wish.number);
        let (mut group, mut everybody) = (true, true);
        let others = self.clients.iter().filter(|(other, state)| **other != client && has_some(state));
        for (_, state) in others {
            let newest = wish(state).filter(|wish| Some(wish.number) < number);
            everybody &= newest.is_some();
            // What a fellow waits for may come from others.
            let is_fellow = state.group == own.group && own.group.is_some();
            group &= !is_fellow || newest.is_some_and(|wish| wish.held != Some(Denial::NoRoom));
            if !(group || everybody) {
                return false;
            }
        }
        everybody || (group && held != Some(Denial::NoRoom))
    }

    fn deny(&mut self, client: ClientId, id: GpuId, why: Denial) {
        let Some(wish) = self.seat_mut(client, id).and_then(|s| s.promise.wish.take()) else { return };
        self.out.push(Command::Denied { client, gpu: id, bytes: wish.bytes, why });
    }
}
