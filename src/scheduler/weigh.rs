//! Weighs all promises at a moment: what each client's limit is to be, by what it needs, what it wishes for, what there is,
//! and what the rule of its group allows. How limits get there is in `limits`.

use super::{api::*, limits::ACK_PATIENCE, machine::Machine, wishes};
use std::collections::BTreeMap;

/// What a client is to be promised on a GPU.
#[derive(Debug, Clone, Copy)]
pub(super) struct Target {
    pub client: ClientId,
    pub gpu: GpuId,
    pub bytes: u64,
    /// Small differences are told.
    pub exact: bool,
    /// What its group may have on that GPU.
    pub bound: Option<u64>,
}

/// Where a promise is among those that are weighed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct At {
    side: usize,
    part: usize,
}

/// A client's promise on a GPU.
#[derive(Debug)]
struct Part {
    client: ClientId,
    /// What it has whatever others have.
    floor: u64,
    /// Where its slack begins.
    base: u64,
    /// It can be promised no more than this, and no less than its floor.
    most: u64,
    /// The most slack that its group leaves it.
    slack: u64,
    /// Its limit, where its group has more than it may.
    cap: u64,
    /// It does not answer.
    deaf: bool,
    exact: bool,
    bound: Option<u64>,
}

impl Part {
    fn at(&self, slack: u64) -> u64 {
        self.base.saturating_add(slack.min(self.slack)).min(self.most).max(self.floor)
    }

    /// What it has where its group has too much.
    fn capped(&self, cap: u64) -> u64 {
        if self.deaf { self.floor } else { self.at(0).min(cap) }
    }
}

/// A GPU.
#[derive(Debug)]
struct Side {
    id: GpuId,
    capacity: u64,
    parts: Vec<Part>,
    /// Somebody waits to be told a limit.
    attaching: bool,
}

/// Who has a bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Whose {
    Group(GroupId),
    Client(ClientId),
}

/// What the members of a group may have together, or a client over all GPUs.
#[derive(Debug)]
struct Bound {
    max: u64,
    why: Denial,
    parts: Vec<At>,
}

#[derive(Debug, Default)]
pub(super) struct Scales {
    sides: Vec<Side>,
    bounds: Vec<Bound>,
}

impl Scales {
    fn part(&self, at: At) -> Option<&Part> {
        self.sides.get(at.side)?.parts.get(at.part)
    }

    fn part_mut(&mut self, at: At) -> Option<&mut Part> {
        self.sides.get_mut(at.side)?.parts.get_mut(at.part)
    }

    /// Bytes in the host if everybody makes use of so much slack.
    fn in_host(&self, slack: u64) -> u64 {
        let excess = |side: &Side| {
            let sum = side.parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.at(slack)));
            sum.saturating_sub(side.capacity)
        };
        self.sides.iter().fold(0, |sum, side| sum.saturating_add(excess(side)))
    }

    /// Bytes that a bound's members have.
    fn used(&self, bound: &Bound, of: impl Fn(&Part) -> u64) -> u64 {
        bound.parts.iter().filter_map(|at| self.part(*at)).fold(0, |sum, part| sum.saturating_add(of(part)))
    }

    /// By how much a promise would have to rise.
    pub fn lacks(&self, at: At, bytes: u64) -> u64 {
        self.part(at).map_or(0, |part| bytes.saturating_sub(part.floor))
    }

    /// Lets a promise be no less than that, where all bounds allow it.
    pub fn grant(&mut self, at: At, bytes: u64, budget: Option<u64>) -> Result<(), Denial> {
        let host = self.in_host(0);
        let own = |bound: &&Bound| bound.parts.contains(&at);
        let before: Vec<u64> =
            self.bounds.iter().filter(own).map(|bound| self.used(bound, |part| part.at(0))).collect();
        let Some(part) = self.part_mut(at) else { return Err(Denial::NoRoom) };
        let (floor, most) = (part.floor, part.most);
        part.floor = floor.max(bytes);
        let host_after = self.in_host(0);
        let no_room = bytes > most.max(floor) || budget.is_some_and(|most| host_after > most && host_after > host);
        let mut bounds = self.bounds.iter().filter(own).zip(before);
        let broken = bounds.find_map(|(bound, before)| {
            let after = self.used(bound, |part| part.at(0));
            (after > bound.max && after > before).then_some(bound.why)
        });
        match broken.or(no_room.then_some(Denial::NoRoom)) {
            None => Ok(()),
            Some(why) => {
                if let Some(part) = self.part_mut(at) {
                    part.floor = floor;
                }
                Err(why)
            }
        }
    }

    /// Divides what each group may have among its members. Those of `granted` wait for their parts.
    fn divide(&mut self, granted: &[At]) {
        for bound in std::mem::take(&mut self.bounds) {
            // The most that all of them can have each.
            let highest = |most: u64, used: &dyn Fn(u64) -> u64| {
                let (mut low, mut high) = (0, most);
                while low < high {
                    let middle = low + (high - low).div_ceil(2);
                    if used(middle) <= bound.max { low = middle } else { high = middle - 1 }
                }
                low
            };
            let over = self.used(&bound, |part| part.at(0)) > bound.max;
            let (slack, cap) = if over {
                (0, highest(bound.max, &|cap| self.used(&bound, |part| part.capped(cap))))
            } else {
                (highest(bound.max, &|slack| self.used(&bound, |part| part.at(slack))), u64::MAX)
            };
            let awaited = bound
                .parts
                .iter()
                .any(|at| granted.contains(at) || self.sides.get(at.side).is_some_and(|side| side.attaching));
            // To the byte, but where that is worth no messages.
            let exact = over || awaited || bound.parts.len() == 1;
            for at in bound.parts {
                if let Some(part) = self.part_mut(at) {
                    (part.slack, part.exact) = (slack.min(part.slack), exact || part.exact);
                    part.cap = if part.deaf { u64::MAX } else { cap.min(part.cap) };
                }
            }
        }
    }

    /// The highest slack that everybody can have: what is in the host grows with it.
    fn slack(&self, budget: Option<u64>) -> u64 {
        let (mut low, mut high) = (0, self.sides.iter().map(|side| side.capacity).max().unwrap_or(0));
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if self.in_host(middle) <= budget.unwrap_or(u64::MAX) { low = middle } else { high = middle - 1 }
        }
        low
    }
}

impl Machine {
    /// What each client is to have, those first that wish for something, in the order of their wishes. Denies wishes that
    /// cannot be fulfilled. Without a budget, only for those whom a rule bounds.
    pub(super) fn weigh(&mut self, budget: Option<u64>, ids: &GpuSet) -> Vec<Target> {
        let (mut scales, wishes) = self.load(budget, ids);
        let granted = self.serve_wishes(&mut scales, wishes, budget);
        scales.divide(&granted);
        let slack = scales.slack(budget);
        let target = |side: &Side, part: &Part| Target {
            client: part.client,
            gpu: side.id,
            bytes: part.at(slack).min(part.cap),
            exact: part.exact,
            bound: part.bound,
        };
        let first = granted.iter().filter_map(|at| Some(target(scales.sides.get(at.side)?, scales.part(*at)?)));
        let all = scales.sides.iter().flat_map(|side| side.parts.iter().map(|part| target(side, part)));
        first.chain(all).collect()
    }

    /// What there is to weigh, and what is wished for.
    fn load(&self, budget: Option<u64>, ids: &GpuSet) -> (Scales, Vec<wishes::Waiting>) {
        let now = self.now;
        let mut scales = Scales::default();
        let mut waiting = Vec::new();
        // On each GPU, and over all of them.
        let mut bounds: BTreeMap<(Whose, Option<usize>), Bound> = BTreeMap::new();
        for (id, gpu) in ids.iter().filter_map(|id| Some((*id, self.gpus.get(id)?))) {
            let mut parts = Vec::new();
            let capacity = gpu.offer(&self.settings);
            for client in &gpu.seats {
                let Some(state) = self.clients.get(client) else { continue };
                if budget.is_none() && !self.is_bounded(*client, id) {
                    continue;
                }
                let Some(promise) = state.seats.get(&id).map(|s| &s.promise) else { continue };
                let at = At { side: scales.sides.len(), part: parts.len() };
                // From one who does not answer nothing can be had.
                let deaf = state.stopped
                    || !promise.listens()
                    || promise.lowered.is_some_and(|at| now.saturating_sub(at) >= ACK_PATIENCE);
                let floor = if deaf { promise.charge() } else { promise.demand() };
                if let Some(wish) = promise.wish {
                    waiting.push(wishes::Waiting { client: *client, gpu: id, group: state.group, wish, at });
                }
                let context = state.seats.get(&id).map_or(0, |seat| self.context(seat, id));
                for (max, why, own) in [
                    (self.memory_max(*client, id), Denial::MemoryMax, context),
                    (self.swap_max(*client), Denial::SwapMax, 0),
                ] {
                    let (Some(group), Some(max)) = (state.group, max) else { continue };
                    let side = (why == Denial::MemoryMax).then_some(at.side);
                    let bound =
                        bounds.entry((Whose::Group(group), side)).or_insert(Bound { max, why, parts: Vec::new() });
                    bound.max = bound.max.saturating_sub(own);
                    bound.parts.push(at);
                }
                if let Some(max) = self.own_swap_max(*client) {
                    let fresh = Bound { max, why: Denial::Own, parts: Vec::new() };
                    bounds.entry((Whose::Client(*client), None)).or_insert(fresh).parts.push(at);
                }
                let own_bound = self.own_bound(*client, id);
                parts.push(Part {
                    client: *client,
                    floor,
                    base: promise.demand(),
                    most: own_bound.map_or(capacity, |max| max.min(capacity)),
                    slack: u64::MAX,
                    cap: u64::MAX,
                    deaf,
                    exact: own_bound.is_some(),
                    bound: None,
                });
            }
            scales.sides.push(Side { id, capacity, parts, attaching: !gpu.attaching.is_empty() });
        }
        scales.bounds = bounds.into_values().collect();
        for bound in &scales.bounds {
            for at in bound.parts.iter().filter(|_| bound.why == Denial::MemoryMax) {
                let part = scales.sides.get_mut(at.side).and_then(|side| side.parts.get_mut(at.part));
                part.into_iter().for_each(|part| part.bound = Some(bound.max));
            }
        }
        (scales, waiting)
    }
}
