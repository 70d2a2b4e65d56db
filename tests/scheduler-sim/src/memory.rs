//! Memory of simulated clients: what they allocate, map, evict and report.

use crate::{world::Happening, *};

impl World {
    pub(crate) fn report(&mut self, id: ClientId, gpu: GpuId) {
        let Some(m) = self.models.get_mut(&id) else { return };
        let Some(p) = m.places.get(&gpu) else { return };
        let demand = p.demand;
        let report = MemoryReport {
            limit_ack: p.limit_seq,
            ack: p.seq,
            demand,
            mapped: p.mapped,
            swapped: demand.saturating_sub(p.mapped),
            pinned: m.plan.pinned.min(p.mapped),
        };
        self.say(id, Event::Memory { client: id, gpu, report });
    }

    /// Allocates what its limit allows, and asks for more where that is too little. Denied, it makes do with what it has.
    pub(crate) fn grow(&mut self, id: ClientId, gpu: GpuId) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id) else { return };
        let plan = m.plan.demand;
        let Some(p) = m.places.get_mut(&gpu) else { return };
        let wanted = if p.denied { plan.min(p.limit) } else { plan };
        if wanted <= p.limit.max(p.demand) {
            p.wishes = None;
            p.demand = p.demand.max(wanted);
        } else if p.wishes.is_none() {
            // In two halves, so that several hold one and want the other.
            p.demand = p.demand.max((plan / 2).min(p.limit));
            p.wishes = Some(now);
            self.report(id, gpu);
            self.say(id, Event::LimitRequested { client: id, gpu, bytes: plan });
        }
    }

    /// Carries out the oldest allowance.
    pub(crate) fn obey(&mut self, id: ClientId, gpu: GpuId) {
        let now = self.now;
        let Some(m) = self.models.get_mut(&id) else { return };
        let (rate, pinned) = (m.plan.rate, m.plan.pinned);
        let Some(p) = m.places.get_mut(&gpu) else { return };
        let demand = p.demand;
        let Some((_, bytes)) = p.todo.front().copied() else { return };
        if bytes < p.mapped {
            let move_out = p.mapped - bytes.max(pinned.min(p.mapped));
            p.busy = true;
            let time = Duration::from_secs_f64(move_out as f64 / rate as f64);
            self.pause(id);
            self.at(now + time, Happening::Evicted(id, gpu));
        } else {
            let (seq, bytes) = p.todo.pop_front().unwrap();
            p.seq = seq;
            p.allowance = bytes;
            let grown = bytes.min(demand).saturating_sub(p.mapped);
            if self.physical {
                self.map_what_is_allowed(id, gpu);
            } else {
                p.mapped += grown;
                p.hidden = p.hidden.saturating_sub(grown);
            }
            self.report(id, gpu);
            self.work(id);
            self.obey(id, gpu);
        }
    }

    pub(crate) fn evicted(&mut self, id: ClientId, gpu: GpuId) {
        let Some(m) = self.models.get_mut(&id) else { return };
        let pinned = m.plan.pinned;
        if m.stopped {
            let again = self.now + ms(100);
            return self.at(again, Happening::Evicted(id, gpu));
        }
        let Some(p) = m.places.get_mut(&gpu) else { return };
        let Some((seq, bytes)) = p.todo.pop_front() else { return };
        p.busy = false;
        p.seq = seq;
        p.allowance = bytes;
        let freed = p.mapped.saturating_sub(bytes.max(pinned));
        p.mapped -= freed;
        if let Some(lie) = m.plan.lie.filter(|_| freed > 0) {
            p.hidden = (p.hidden + freed).min(lie.bytes.max(p.hidden));
            if let Some(late) = lie.late {
                self.at(self.now + late, Happening::Frees(id, gpu));
            }
        }
        self.report(id, gpu);
        self.obey(id, gpu);
        self.work(id);
    }

    pub(crate) fn map_what_is_allowed(&mut self, id: ClientId, gpu: GpuId) {
        let now = self.now;
        let Some(p) = self.models.get_mut(&id).and_then(|m| m.places.get_mut(&gpu)) else { return };
        if self.physical && p.demand.min(p.allowance) > p.mapped && !std::mem::replace(&mut p.tries, true) {
            self.at(now, Happening::TriesToMap(id, gpu, now));
        }
    }

    /// What it may map and lacks, it tries to map: for 300 ms, then it gives the GPU back and tries again a little later.
    pub(crate) fn try_to_map(&mut self, id: ClientId, gpu: GpuId, since: Time) {
        let now = self.now;
        let free = self.mappable(gpu);
        let Some(m) = self.models.get_mut(&id) else { return };
        let (holds, stopped) = (m.holds.contains(&gpu) && !m.revoked.contains(&gpu), m.stopped);
        let Some(p) = m.places.get_mut(&gpu) else { return };
        let lacks = p.demand.min(p.allowance).saturating_sub(p.mapped);
        if lacks == 0 || p.busy {
            p.tries = false;
            return;
        }
        if stopped {
            return self.at(now + ms(100), Happening::TriesToMap(id, gpu, since));
        }
        p.tries = true;
        let grown = lacks.min(free / (2 * MIB) * (2 * MIB)).min(lacks);
        let grown = if lacks <= free { lacks } else { grown };
        if grown > 0 {
            p.mapped += grown;
            p.hidden = p.hidden.saturating_sub(grown);
            self.report(id, gpu);
            self.work(id);
            return self.at(now + ms(1), Happening::TriesToMap(id, gpu, now));
        }
        if now < since + ms(300) {
            return self.at(now + ms(5), Happening::TriesToMap(id, gpu, since));
        }
        if holds {
            self.pause(id);
            // One GPU is of no use without the others.
            let m = self.models.get_mut(&id).unwrap();
            let all: GpuSet = m.holds.difference(&m.revoked).copied().collect();
            for gpus in [GpuSet::from([gpu]), all.into_iter().filter(|other| *other != gpu).collect()] {
                let m = self.models.get_mut(&id).unwrap();
                m.holds.retain(|gpu| !gpus.contains(gpu));
                m.contended.retain(|gpu, _| !gpus.contains(gpu));
                let reason = if gpus.contains(&gpu) { ReleaseReason::NoMemory } else { ReleaseReason::Idle };
                if !gpus.is_empty() {
                    self.say(id, Event::Released { client: id, gpus, reason, busy: Duration::ZERO });
                }
            }
            self.ask(id);
        }
        self.at(now + ms(50), Happening::TriesToMap(id, gpu, now + ms(50)));
    }
}
