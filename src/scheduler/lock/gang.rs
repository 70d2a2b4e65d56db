//! Gang scheduling: clients whose kernels wait for each other have to run at the same time. They are granted and revoked together
//! as far as their memory fits; members that do not fit together take turns.
//!
//! A client names its gang itself, or a rule makes one gang of all clients that it counts together. Gangs that need the same GPUs
//! are in `gang_conflict`.

use crate::{
    api::*,
    lock::queue::{Blocked, Entity, Hold},
    machine::{Client, Machine},
};
use std::collections::BTreeSet;
use std::time::Duration;

/// How long a gang's request waits for the members that have not asked yet, so that they run together.
const GATHERS: Duration = Duration::from_millis(5);
/// Who had a GPU so lately, or has come so lately, is likely to ask for one. Nobody waits for others.
const LATELY: Duration = Duration::from_secs(1);

/// A job has no more processes on one host: some for each of its GPUs.
const MOST_OF_A_JOB: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) enum Gang {
    /// As its members call it.
    Named(u64),
    Group(GroupId),
}

impl Gang {
    pub fn named(name: u64) -> Option<Self> {
        (name != 0).then_some(Self::Named(name))
    }
}

impl Client {
    /// Whether it had a GPU lately that it has no more, or has come lately.
    fn had_lately(&self, now: Time) -> bool {
        let last = self.attachments.values().map(|attachment| attachment.last_run).max();
        last.is_some_and(|last| now.saturating_sub(last) < LATELY)
    }
}

impl Machine {
    /// As what a client waits, and is granted. A gang of one is nothing else than that one.
    pub(crate) fn entity(&self, client: ClientId) -> Entity {
        let gang = self.clients.get(&client).and_then(|state| state.gang);
        let gang = gang.filter(|gang| self.gangs.get(gang).is_some_and(|members| members.len() > 1));
        gang.map_or(Entity::Solo(client), Entity::Gang)
    }

    pub(crate) fn gang_members(&self, gang: Gang) -> impl Iterator<Item = ClientId> {
        self.gangs.get(&gang).into_iter().flatten().copied()
    }

    /// The others of its gang.
    pub(crate) fn gang_peers(&self, client: ClientId) -> impl Iterator<Item = ClientId> {
        let gang = self.clients.get(&client).and_then(|state| state.gang);
        gang.into_iter().flat_map(|gang| self.gang_members(gang)).filter(move |peer| *peer != client)
    }

    /// Until when a request that has just come waits in line for other members, who had a GPU with those lately.
    pub(crate) fn gathers_until(&self, entity: Entity) -> Option<Time> {
        let Entity::Gang(gang) = entity else { return None };
        let members = self.gang_members(gang).filter_map(|id| self.clients.get(&id));
        let mut missing = members.filter(|client| client.waiting.is_none() && !client.holds() && !client.stopped);
        missing.any(|client| client.had_lately(self.now)).then(|| self.now + GATHERS)
    }

    /// Whether they can be the processes of one job on one host. More are merely counted together.
    pub(crate) fn is_job(&self, gang: Gang) -> bool {
        self.gangs.get(&gang).is_some_and(|members| (2..=MOST_OF_A_JOB).contains(&members.len()))
    }

    pub(crate) fn gpus_of_gang(&self, gang: Gang) -> GpuSet {
        let members = self.gang_members(gang).filter_map(|id| self.clients.get(&id));
        members.flat_map(|client| client.attachments.keys().copied()).collect()
    }

    /// What members hold as one of them; a gang of one is none.
    pub(crate) fn holds_of_gang(&self, gang: Gang) -> impl Iterator<Item = (GpuId, &Hold)> {
        let members = self.gang_members(gang).filter_map(|id| self.clients.get(&id));
        let holds = members
            .flat_map(|client| &client.attachments)
            .filter_map(|(id, attachment)| Some((*id, attachment.hold.as_ref()?)));
        holds.filter(move |(_, hold)| hold.entity == Entity::Gang(gang))
    }

    /// Whether that GPU is kept for a gang that others ask to go: one of it does not drain yet, and may need another one for
    /// it that has just left this GPU.
    pub(crate) fn is_kept_for_gang(&self, entity: Entity, id: GpuId) -> bool {
        let mut turns =
            self.gang_turns.iter().filter(|(gang, _)| entity != Entity::Gang(**gang) && self.is_job(**gang));
        turns.any(|(gang, since)| {
            let has_left = |member: ClientId| {
                let attachment =
                    self.attachment(member, id).filter(|attachment| attachment.hold.is_none() && attachment.grants > 0);
                attachment.is_some_and(|attachment| attachment.last_run > *since)
            };
            self.holds_of_gang(*gang).any(|(_, hold)| hold.drains()) && self.gang_members(*gang).any(has_left)
        })
    }

    /// Whether one of a gang was granted a GPU for another one to drain, which has not yet.
    pub(crate) fn helps_to_drain(&self, hold: &Hold) -> bool {
        let gang = hold.entity.gang().filter(|_| hold.revoked.is_none());
        gang.is_some_and(|gang| self.holds_of_gang(gang).any(|(_, hold)| hold.drains()))
    }

    /// What a hand-over by that gang takes, on one GPU and then on the other.
    pub(crate) fn gang_drains_in(&self, gang: Gang) -> Duration {
        let members = self.gang_members(gang).filter_map(|id| self.clients.get(&id));
        let drains =
            members.flat_map(|client| client.attachments.values()).map(|attachment| attachment.drains.expected());
        drains.max().unwrap_or_default()
    }

    /// One of a gang asks for a GPU: another one may be about to need it for draining.
    pub(crate) fn check_gang_peers(&mut self, entity: Entity) {
        let Some(gang) = entity.gang().filter(|gang| self.is_job(*gang)) else { return };
        let members: Vec<ClientId> = self.gang_members(gang).collect();
        members.into_iter().for_each(|member| self.check(member));
    }

    /// When that holder will take longer to drain than is usual, while others of its gang wait that could help.
    pub(crate) fn lags_at(&self, client: ClientId, id: GpuId) -> Option<Time> {
        let attachment = self.attachment(client, id)?;
        let hold = attachment.hold.as_ref().filter(|hold| hold.drains() && !hold.may_need_others())?;
        let gang = hold.entity.gang().filter(|gang| self.is_job(*gang))?;
        let mut peers = self.gang_members(gang).filter_map(|peer| self.clients.get(&peer));
        let begun = hold.revoked?.first;
        peers.any(|peer| peer.waiting.is_some()).then(|| begun + attachment.drains.lags_after())
    }

    /// From now on others of its gang go first.
    pub(crate) fn lags(&mut self, client: ClientId, id: GpuId) {
        if let Some(hold) = self.attachment_mut(client, id).and_then(|attachment| attachment.hold.as_mut()) {
            hold.lags = true;
        }
        self.touch(id);
        self.touch_gang_peers(client);
    }

    /// Whether others of its gang go first is to be seen anew.
    pub(crate) fn touch_gang_peers(&mut self, client: ClientId) {
        let waiting: BTreeSet<Entity> =
            self.gang_peers(client).filter_map(|peer| self.clients.get(&peer)?.waiting).collect();
        for entity in waiting {
            self.requeue(entity);
            let wants = self.requests.get(&entity).into_iter().flat_map(|request| request.wants.values());
            let gpus: GpuSet = wants.flatten().copied().collect();
            self.effects.touch_all(gpus);
        }
    }

    /// One of a gang has drained that was asked to: so do all that have run for it to do so.
    pub(crate) fn revoke_gang(&mut self, gang: Gang) {
        let holds =
            self.holds_of_gang(gang).find(|(_, hold)| hold.revoked.is_none()).map(|(id, hold)| (id, hold.number));
        let holder = holds.and_then(|(id, number)| Some((*self.gpus.get(&id)?.holders.get(&number)?, id)));
        if let Some((client, id)) = holder {
            self.revoke(client, id);
        }
    }

    /// A gang was granted something.
    pub(crate) fn begin_gang_turn(&mut self, entity: Entity) {
        if let Some(gang) = entity.gang() {
            self.gang_turns.entry(gang).or_insert(self.now);
        }
    }

    /// A gang has lost something, or one of it is counted as no holder any more.
    pub(crate) fn end_gang_turn(&mut self, entity: Entity) {
        let is_over = |gang: &Gang| self.holds_of_gang(*gang).all(|(_, hold)| hold.is_bypassed());
        if let Some(gang) = entity.gang().filter(is_over) {
            self.gang_turns.remove(&gang);
        }
    }

    /// Since when a gang has had its turn, if its other members go before all who came later: as long as that lasts no
    /// longer than a turn, and for as long again where one of it cannot drain, which may need them for it.
    pub(crate) fn goes_on_since(&self, entity: Entity) -> Option<Time> {
        let gang = entity.gang()?;
        let since = *self.gang_turns.get(&gang)?;
        let had = self.now.saturating_sub(since);
        let is_stuck = || self.holds_of_gang(gang).any(|(_, hold)| hold.drains() && hold.may_need_others());
        let may = match self.holds_of_gang(gang).any(|(_, hold)| hold.drains()) {
            true => had < self.settings.time_quantum * 2 && is_stuck(),
            false => had < self.settings.time_quantum,
        };
        may.then_some(since)
    }

    /// Whether one of a gang is about to drain: until it has, none of it is granted anything.
    pub(crate) fn is_about_to_drain(&self, entity: Entity) -> bool {
        let holds = entity.gang().into_iter().flat_map(|gang| self.holds_of_gang(gang));
        holds.into_iter().any(|(_, hold)| hold.drains() && !hold.may_need_others())
    }

    pub(crate) fn enter_gang(&mut self, client: ClientId, gang: Option<Gang>) {
        if let Some(state) = self.clients.get_mut(&client) {
            state.gang = gang;
        }
        if let Some(gang) = gang {
            self.gangs.entry(gang).or_default().insert(client);
            self.members_are_others(gang);
            self.touch_rivals(Entity::Gang(gang));
        }
    }

    pub(crate) fn leave_gang(&mut self, client: ClientId) {
        let Some(gang) = self.clients.get(&client).and_then(|state| state.gang) else { return };
        self.touch_rivals(Entity::Gang(gang));
        if let Some(state) = self.clients.get_mut(&client) {
            state.gang = None;
        }
        let members: Option<&mut BTreeSet<ClientId>> = self.gangs.get_mut(&gang);
        if members.is_some_and(|members| members.remove(&client) && members.is_empty()) {
            self.gangs.remove(&gang);
        }
        self.members_are_others(gang);
    }

    /// GroupState came or went. Those who are there are of another class then, and perhaps a gang, or no longer.
    fn members_are_others(&mut self, gang: Gang) {
        for member in self.gang_members(gang).collect::<Vec<_>>() {
            self.unite(member);
            let Some(state) = self.clients.get(&member) else { continue };
            let held = state.attachments.iter().filter(|(_, attachment)| attachment.hold.is_some());
            self.effects.touch_all(held.map(|(id, _)| *id));
            if let Some(entity) = state.waiting {
                self.requeue(entity);
                if self.requests.get(&entity).is_some_and(|request| matches!(request.blocked, Some(Blocked::Behind(_))))
                {
                    self.enqueue(entity);
                }
            }
        }
    }

    /// Has a client hold and want what it does as what it is now: one of a gang, or by itself.
    pub(crate) fn unite(&mut self, client: ClientId) {
        let entity = self.entity(client);
        let Some(state) = self.clients.get_mut(&client) else { return };
        // It is revoked with those it is with now.
        let mut since: Option<Time> = None;
        for hold in state.attachments.values_mut().filter_map(|attachment| attachment.hold.as_mut()) {
            hold.entity = entity;
            since = Some(since.map_or(hold.since, |since| since.min(hold.since)));
        }
        if let (Some(gang), Some(since)) = (entity.gang(), since) {
            let turn = self.gang_turns.entry(gang).or_insert(since);
            *turn = since.min(*turn);
        }
        let Some(state) = self.clients.get(&client) else { return };
        let is_other = state.waiting.is_some_and(|waiting| waiting != entity);
        let (Some(waiting), true) = (state.waiting, is_other) else { return };
        let Some(request) = self.requests.get(&waiting) else { return };
        if let Some(wants) = request.wants.get(&client).cloned() {
            self.request(client, wants);
        }
    }

    /// The client's rule is another: so may its gang be. What it wants it then wants with others.
    pub(crate) fn gang_anew(&mut self, client: ClientId) {
        let Some(state) = self.clients.get(&client) else { return };
        let is_gang = |group: &GroupId| self.rules.limits(*group).is_some_and(|limits| limits.gang);
        let group = self.rules.group(client).filter(is_gang);
        let gang = group.map(Gang::Group).or(Gang::named(state.named));
        if gang == state.gang {
            return;
        }
        self.leave_gang(client);
        self.enter_gang(client, gang);
        self.unite(client);
    }
}
