//! Clients that join and leave gangs.

use super::Sharing;
use crate::{
    api::*,
    queue::{Entity, Gang},
};

impl Sharing<'_> {
    pub fn enter_gang(&mut self, client: ClientId, gang: Option<Gang>) {
        let Some(gang) = gang else { return };
        self.queues.gangs_mut().join(client, gang);
        self.members_changed(gang);
        self.requests().touch_conflicting_gangs(Entity::Gang(gang));
    }

    pub fn leave_gang(&mut self, client: ClientId) {
        let Some(gang) = self.queues.gang(client) else { return };
        self.requests().touch_conflicting_gangs(Entity::Gang(gang));
        self.queues.gangs_mut().leave(client);
        self.members_changed(gang);
    }

    /// Updates the members of a gang after a member joined or left. The members' class changes, and
    /// they may have become a gang or ceased to be one.
    fn members_changed(&mut self, gang: Gang) {
        for member in self.queues.gangs().members(gang).collect::<Vec<_>>() {
            self.update_entity(member);
            self.effects.touch_all(self.gpus.holds_of(member).map(|(id, _)| id));
            self.with_requests(|requests| requests.members_changed(member));
        }
    }

    /// Assigns a client's holds and requests to the client's present entity: its gang, or the client
    /// alone.
    pub fn update_entity(&mut self, client: ClientId) {
        let entity = self.queues.entity(client);
        // The holds are revoked together with the members of the new entity.
        if let Some(since) = self.gpus.set_entity_of_holds(client, entity) {
            self.requests().begin_gang_turn(entity, since);
        }
        if self.queues.waiting(client).is_some_and(|waiting| waiting != entity)
            && let Some(wants) = self.queues.wants(client).cloned()
        {
            self.request(client, wants);
        }
    }

    /// Updates a client's gang after its rule changed. The client's requests become requests of the
    /// new gang.
    pub fn update_gang(&mut self, client: ClientId) {
        let gang = self.model().gang_by_rule(client);
        if !self.clients.contains_key(&client) || gang == self.queues.gang(client) {
            return;
        }
        self.leave_gang(client);
        self.enter_gang(client, gang);
        self.update_entity(client);
    }

    /// Puts a client's request back into the queues once all of its clients run.
    pub fn runs_again(&mut self, client: ClientId) {
        if self.with_requests(|requests| requests.runs_again(client)) {
            self.update_entity(client);
        }
    }
}
