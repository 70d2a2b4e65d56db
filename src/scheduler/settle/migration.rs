//! Clients that are moved by themselves: what `migration` decides from, and what follows.

use crate::{
    api::*,
    lock::Blocked,
    machine::Machine,
    memory::Access,
    migration::{Candidate, LOOK, Migration, Site, View},
    timers::Wake,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

impl Machine {
    /// Has it looked whether clients should be moved, or no longer, after settings or kinds of GPUs have changed.
    pub(crate) fn migration_changed(&mut self) {
        let set = self.effects.wakes_at(Wake::Migration);
        let is_on = self.settings.migrate && self.settings.placement != Placement::None;
        if is_on && self.places.kinds().iter().any(|kind| kind.len() > 1) {
            return self.effects.wake(Wake::Migration, Some(set.unwrap_or(self.now + LOOK)));
        }
        self.effects.wake(Wake::Migration, None);
        let asked = self.migration.stop();
        self.effects.touch_all(asked);
    }

    /// Moves a client, if one should be.
    pub(crate) fn look_at_migration(&mut self) {
        let clients: BTreeSet<ClientId> = self.clients.keys().copied().collect();
        self.migration.keep(&clients);
        let waited: BTreeMap<ClientId, Duration> = clients
            .iter()
            .map(|client| (*client, self.migration.waited(self.now, *client, self.waited(*client))))
            .collect();
        let view = self.migration_view(&waited);
        let before = std::mem::replace(&mut self.migration.asks, view.asks());
        self.effects.touch_all(before.symmetric_difference(&self.migration.asks).copied().collect::<Vec<_>>());
        let is_one_on_its_way = clients.iter().any(|client| self.sleep.view(*client).moving.is_some());
        if !is_one_on_its_way && let Some((client, to)) = view.decide() {
            self.migration.begins(self.now, client);
            self.migrate(client, to);
        }
        self.effects.wake(Wake::Migration, Some(self.now + LOOK));
    }

    /// Whether holders of a GPU are to let go of its lock when they are idle, since clients may be moved for that.
    pub(super) fn asks_who_is_idle(&self, id: GpuId) -> bool {
        self.migration.asks.contains(&id)
    }

    /// How long a client has waited for its GPUs in all.
    fn waited(&self, client: ClientId) -> Duration {
        let turns = self.lock.all_of(client).filter_map(|(id, _)| self.turns(client, id, self.now));
        turns.map(|turns| turns.wait_time + turns.waits).sum()
    }

    /// How long a client has neither had the lock of a GPU, nor waited for it or for its context there.
    fn idle(&self, client: ClientId, id: GpuId) -> Duration {
        let Some((lock, memory)) = self.lock.of(client, id).zip(self.memory_of(client, id)) else { return self.now };
        let is_busy = lock.hold.is_some() || self.lock.waits_for(client, id) || memory.attached.is_none();
        match is_busy {
            true => Duration::ZERO,
            false => self.now.saturating_sub(lock.last_run.max(memory.used.unwrap_or_default())),
        }
    }

    fn migration_view(&self, waited: &BTreeMap<ClientId, Duration>) -> View {
        let there = self.memory.iter().filter(|(_, gpu)| gpu.access == Access::Turns && !gpu.drained);
        let site = |id: GpuId| {
            let clients = self.memory.get(&id).into_iter().flat_map(|gpu| gpu.clients.keys());
            Site {
                is_failing: self.memory.get(&id).is_some_and(|gpu| gpu.failing),
                lacks: self.lacks_for_ever(id),
                clients: clients.clone().count(),
                busy: clients.filter(|client| !Migration::is_long(self.idle(**client, id))).count(),
            }
        };
        let sites: BTreeMap<GpuId, Site> = there.map(|(id, _)| (*id, site(*id))).collect();
        let candidates = self.clients.keys().filter_map(|client| self.candidate(*client, &sites, waited));
        View {
            placement: self.settings.placement,
            pause: self.migration.pause(),
            candidates: candidates.collect(),
            sites,
        }
    }

    /// A client as one that may be moved, if it may.
    fn candidate(
        &self,
        client: ClientId,
        sites: &BTreeMap<GpuId, Site>,
        waited: &BTreeMap<ClientId, Duration>,
    ) -> Option<Candidate> {
        let [from] = self.gpus_of(client)[..] else { return None };
        let is_awake = self.sleep.view(client).phase == SleepPhase::Awake;
        let can = (self.sleep.is_away(client) || (is_awake && self.lasting_obstacle(client).is_none()))
            && !self.sleep.is_ordered(client)
            && !self.clients.get(&client).is_some_and(|state| state.stopped)
            && self.places.has_no_labels(client)
            && !self.migration.has_just_moved(self.now, client);
        if !can || !sites.contains_key(&from) {
            return None;
        }
        let context = self.context_elsewhere(client, from);
        let demand = self.account(client, from)?.report.demand.saturating_add(context);
        let fits = |to: &GpuId| {
            let gpu = self.memory.get(to)?;
            Some(gpu.ledger.demanded().saturating_add(demand) <= gpu.promisable(&self.settings))
        };
        let may = |to: &GpuId| {
            let is_open = self.memory.get(to)?.clients.keys().all(|client| self.places.has_no_labels(*client));
            let has_room =
                is_open && sites.contains_key(to) && self.move_obstacle(client, Move { from, to: *to }).is_none();
            has_room.then(|| fits(to)).flatten()
        };
        let to = self.places.candidates(client, from).filter_map(|to| Some((to, may(&to)?)));
        let idle = self.idle(client, from);
        Some(Candidate {
            client,
            from,
            to: to.collect(),
            context,
            waited: waited.get(&client).copied().unwrap_or_default(),
            idle: if Migration::is_long(idle) { idle } else { Duration::ZERO },
        })
    }

    /// Bytes by which requests that contexts and pinned memory keep from a GPU are too large, together, for what is left.
    fn lacks_for_ever(&self, id: GpuId) -> u64 {
        let blocked = self.lock.requests().filter(|(_, request)| request.blocked == Some(Blocked::Pinned(id)));
        let members = blocked.flat_map(|(_, request)| request.wants.iter().filter(|(_, gpus)| gpus.contains(&id)));
        let need = |client: ClientId| self.account(client, id).map_or(0, |account| account.report.demand);
        let needs = members.map(|(client, _)| need(*client)).fold(0u64, u64::saturating_add);
        let Some(gpu) = self.memory.get(&id).filter(|_| needs > 0) else { return 0 };
        let free = gpu.usable(&self.settings).saturating_sub(gpu.ledger.unevictable());
        needs.saturating_sub(free)
    }
}
