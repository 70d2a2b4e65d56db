//! Checks of the invariants after every event, and of every command.

use crate::*;
use std::collections::BTreeSet;

impl World {
    pub(crate) fn check_command(&self, command: &Command) {
        let Some(to) = command.client() else { return };
        assert!(self.connected.contains(&to), "{command:?} to a client that is gone");
        match command {
            Command::Grant { client, .. } => {
                let view = self.machine.client(*client).unwrap();
                for id in &self.asked[client] {
                    let attachment = view.attachments.iter().find(|s| s.gpu == *id);
                    let state = attachment.map(|s| s.state);
                    assert!(
                        matches!(state, None | Some(LockState::Holding | LockState::Revoking)),
                        "{command:?}, but {id:?} is {state:?}"
                    );
                }
            }
            // A gang is revoked as a whole, so a revoked member need not have blocked another
            // client.
            Command::Revoke { client, gpus } if self.gang(*client) == 0 => {
                let reason = gpus.iter().any(|id| {
                    let view = self.machine.gpu(*id).unwrap();
                    let waits =
                        |w: &WaiterView| w.blocked.is_none() || w.client == *client || self.undrainable(*client, *id);
                    view.waiters.iter().any(waits) || view.charged > view.capacity || view.holders.len() > 1
                });
                let plan = self.models.get(client).map(|m| &m.plan);
                let share = plan.and_then(|plan| plan.group?.limits.share);
                let is_capped = share.is_some_and(|share| share.max < 100);
                // The memory of a stopped client may leave no room for any waiting client.
                let is_asleep = self.overdrawn.values().any(|until| *until == Time::MAX);
                let sleep = self.machine.sleep_of(*client);
                let is_paused = sleep.paused || sleep.drained || sleep.moving.is_some();
                let is_stopped = self.models.get(client).is_some_and(|m| m.stopped);
                assert!(
                    reason
                        || is_capped
                        || is_stopped
                        || is_asleep
                        || is_paused
                        || self.grows()
                        || self.now < self.tolerant,
                    "{command:?} for an empty queue"
                );
            }
            Command::Attached { gpu, .. } => {
                assert!(!self.machine.gpu(*gpu).unwrap().drained, "{command:?} on a GPU that is drained");
            }
            Command::Allowance { client, gpu, bytes, .. } if self.undrainable(*client, *gpu) => {
                let before = self.allowed.get(&(*client, *gpu)).copied().unwrap_or(0);
                assert!(*bytes >= before, "{command:?} after {before}, to one that cannot drain");
            }
            _ => {}
        }
    }

    pub(crate) fn charges(&self) -> BTreeMap<(ClientId, GpuId), u64> {
        let attachments =
            self.machine.clients().into_iter().flat_map(|c| c.attachments.into_iter().map(move |s| (c.client, s)));
        attachments.map(|(client, attachment)| ((client, attachment.gpu), attachment.charge)).collect()
    }

    /// Bytes of clients that a measurement found on a GPU in addition to their reports.
    pub(crate) fn unfreed(&self) -> Vec<(ClientId, GpuId, u64)> {
        let attachments =
            self.machine.clients().into_iter().flat_map(|c| c.attachments.into_iter().map(move |s| (c.client, s)));
        let attachments = attachments.filter(|(_, attachment)| attachment.unfreed > 0);
        attachments.map(|(client, attachment)| (client, attachment.gpu, attachment.unfreed)).collect()
    }

    /// Checks that a client's allowance rises only by free memory. Memory that a client of another
    /// user hides isn't free, whatever that client reported. The scheduler believes clients of the
    /// same user. For each rise, all charges and the memory hidden by other users' clients must
    /// together fit into the capacity.
    pub(crate) fn check_credit(&self, before: &BTreeMap<(ClientId, GpuId), u64>, commands: &[Command]) {
        let mut charges = self.charges();
        let all = |client, gpu| {
            commands.iter().filter_map(move |command| match command {
                Command::Allowance { client: to, gpu: on, bytes, .. } if (to, on) == (client, gpu) => Some(*bytes),
                _ => None,
            })
        };
        for command in commands.iter().rev() {
            let Command::Allowance { client, gpu, bytes, .. } = command else { continue };
            // Skips an allowance that lowers a higher one among the same commands, for the benefit
            // of another client.
            if all(client, gpu).any(|other| other > *bytes) {
                continue;
            }
            let allowed = self.allowed.get(&(*client, *gpu)).copied().unwrap_or(0);
            let charge = |client| charges.get(&(client, *gpu)).copied().unwrap_or(0);
            let earlier = before.get(&(*client, *gpu)).copied().unwrap_or(0);
            if *bytes <= allowed
                || charge(*client) <= earlier
                || self.overdrawn.contains_key(gpu)
                || self.sleeps.is_some()
            {
                continue;
            }
            let tenant = self.models[client].plan.tenant;
            let others = self.models.iter().filter(|(_, m)| m.plan.tenant != tenant);
            let hidden: u64 = others.map(|(other, m)| m.has(*gpu).saturating_sub(charge(*other))).sum();
            let charged: u64 = charges.iter().filter(|((_, on), _)| on == gpu).map(|(_, charge)| charge).sum();
            let capacity = self.machine.gpu(*gpu).unwrap().capacity;
            assert!(
                charged + hidden <= capacity,
                "{command:?} at {:?}: {charged} charged and {hidden} hidden of {capacity}: {:?} after {:?}",
                self.now,
                self.machine.gpu(*gpu),
                self.history.last()
            );
            charges.insert((*client, *gpu), earlier);
        }
    }

    /// Checks that each migration has exactly one answer.
    pub(crate) fn check_migrations(&self) {
        for client in &self.connected {
            let unanswered = self.migrations.get(client).copied().unwrap_or(0);
            let moving = self.machine.sleep_of(*client).moving;
            let is_drained = self.has_drained && unanswered == 0;
            assert!(is_drained || unanswered == u32::from(moving.is_some()), "{client:?} is on its way: {moving:?}");
        }
    }

    pub(crate) fn check_state(&mut self) {
        let mut in_host = 0;
        for view in self.machine.gpus() {
            let id = view.gpu;
            let lied = self.measures && self.unfreed().iter().any(|(_, gpu, _)| *gpu == id);
            let mapped: u64 = self.models.values().map(|m| m.mapped(id)).sum();
            let demand: u64 = self.models.values().map(|m| m.demand(id)).sum();
            // Memory that was mapped beyond the capacity is evicted again.
            if view.trial > 0 {
                self.overdrawn.insert(id, self.now);
            } else if view.charged <= view.capacity && mapped <= view.charged {
                self.overdrawn.retain(|gpu, until| *gpu != id || self.now <= *until);
            }
            let overdrawn = self.sleeps.is_some() || self.overdrawn.contains_key(&id);
            let fits = view.charged <= view.capacity || lied || self.physical || overdrawn;
            assert!(fits, "{id:?}: {} charged of {}", view.charged, view.capacity);
            in_host += demand.saturating_sub(view.capacity);
            assert!(demand <= view.committed, "{id:?}: {demand} needed, {} promised", view.committed);
            assert!(mapped <= view.charged || overdrawn, "{id:?}: {mapped} mapped, {} charged", view.charged);
            if self.now < self.tolerant || self.machine.settings().anti_thrash == AntiThrash::Off {
                continue;
            }
            let auto = self.machine.settings().anti_thrash == AntiThrash::Auto;
            // A client with precedence over others doesn't wait for drains.
            let has_class = |m: &Model| m.plan.group.is_some_and(|group| group.limits.share.is_some());
            let preempts = auto && self.models.values().any(|m| has_class(m) || m.plan.own != EnvLimits::default());
            let aside = |h: &HolderView| match h.state {
                LockState::Suspended | LockState::Undrainable => true,
                LockState::Revoking | LockState::Stuck => preempts,
                _ => false,
            };
            let holders = view
                .holders
                .iter()
                .filter(|h| !aside(h) && self.models.get(&h.client).is_none_or(|m| m.plan.stopped.is_none()));
            let gang = |h: &HolderView| match self.gang(h.client) {
                0 => (0, h.client),
                gang => (gang, ClientId(0)),
            };
            let units: BTreeSet<(u64, ClientId)> = holders.clone().map(gang).collect();
            // Clients that leave the GPU partly idle run at the same time.
            let full = |h: &HolderView| self.models.get(&h.client).and_then(|m| m.plan.fullness).unwrap_or(1000);
            let light = auto && holders.map(full).sum::<u32>() <= 1100;
            assert!(units.len() <= 1 || light, "{id:?} has the holders {:?} at {:?}", view.holders, self.now);
        }
        if let Some(host) = self.host {
            let (_, promised) = self.machine.host();
            // The memory of a new or restored context was promised before. Such a context also
            // counts twice until a measurement is known to include it. Until then some promises
            // assume too little memory on the GPU, but none assumes too much.
            let contexts = self.sleeps.map_or(0, |_| self.machine.settings().context * self.models.len() as u64);
            let views = self.machine.gpus().into_iter();
            let twice: u64 = views.map(|view| view.overhead.saturating_sub(self.overhead_now(view.gpu))).sum();
            let host = host + contexts * self.totals.len() as u64 + self.sleeps.map_or(0, |_| twice);
            assert!(promised <= host, "{promised} promised of {host} in the host");
            assert!(in_host <= host, "{in_host} needed of {host} in the host");
        }
    }

    /// Checks that the bytes promised to a group cover its demand, and never rise above its limit.
    pub(crate) fn check_groups(&mut self) {
        let mut sums: BTreeMap<(GroupId, GpuId), (Group, u64, u64)> = BTreeMap::new();
        for view in self.machine.clients() {
            let Some(model) = self.models.get(&view.client) else { continue };
            let Some(group) = model.plan.group else { continue };
            for attachment in view.attachments {
                let (_, promised, demand) = sums.entry((group.id, attachment.gpu)).or_insert((group, 0, 0));
                *promised += attachment.committed;
                *demand += model.demand(attachment.gpu);
            }
        }
        for ((id, gpu), (group, promised, demand)) in &sums {
            assert!(demand <= promised, "{group:?} on {gpu:?}: {demand} needed, {promised} promised");
            let max = group.limits.memory_max.on(self.totals[gpu]).unwrap_or(u64::MAX);
            let before = self.promised.get(&(*id, *gpu)).copied();
            let most = before.map_or(u64::MAX, |before| before.max(max));
            assert!(*promised <= most, "{group:?} on {gpu:?}: {promised} promised, {before:?} before");
        }
        self.promised = sums.into_iter().map(|(at, (_, promised, _))| (at, promised)).collect();
    }

    /// Checks that the bytes promised to a client never rise above the client's own limit.
    pub(crate) fn check_own(&mut self) {
        let mut all = BTreeMap::new();
        for view in self.machine.clients() {
            let Some(own) = self.models.get(&view.client).map(|model| model.plan.own) else { continue };
            for attachment in view.attachments {
                all.insert((view.client, attachment.gpu), attachment.committed);
                let max = own.memory_max.on(self.totals[&attachment.gpu]).unwrap_or(u64::MAX);
                let before = self.own_promised.get(&(view.client, attachment.gpu)).copied();
                let most = before.map_or(u64::MAX, |before| before.max(max));
                assert!(attachment.committed <= most, "{attachment:?}: {most} at most, {before:?} before");
            }
        }
        self.own_promised = all;
    }

    /// Whether no group is promised more than its limit on any GPU.
    pub fn within_limits(&self) -> bool {
        let groups = self.models.values().filter_map(|model| model.plan.group);
        let max: BTreeMap<GroupId, Amount> = groups.map(|group| (group.id, group.limits.memory_max)).collect();
        let most = |gpu: &GpuId, id: &GroupId| max.get(id).and_then(|max| max.on(self.totals[gpu])).unwrap_or(u64::MAX);
        self.promised.iter().all(|((id, gpu), promised)| *promised <= most(gpu, id))
    }

    /// Checks that a new machine answers the same events with the same commands.
    pub fn check_replay(&self, settings: Settings) {
        let mut machine = Machine::new(settings);
        let mut commands = Vec::new();
        for (at, event) in &self.history {
            commands.extend(machine.handle(*at, event.clone()).into_iter().map(|c| (*at, c)));
        }
        assert_eq!(commands, self.commands, "the same events gave other commands");
    }
}
