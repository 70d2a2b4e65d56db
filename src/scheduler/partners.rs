//! Partners: programs that wait for each other's kernels and did not say so. One that cannot drain is scheduled around, so that
//! its partners get to run and it can. Who drains then, more than once and as soon as the same other one runs, is taken to
//! be of one gang with it from then on, and they run together.

use super::{
    api::*,
    gangs::Gang,
    locks::Hold,
    machine::{Machine, Seat},
};
use std::time::Duration;

/// How soon one drains that its partner runs: a step of a training takes no longer.
const SOON: Duration = Duration::from_secs(1);
/// How often that can be chance.
const CHANCES: u32 = 2;

impl Machine {
    /// A holder that could not drain has drained. Who was let run since it was asked may have been its partner.
    pub(super) fn note_partners(&mut self, client: ClientId, hold: &Hold) {
        let Some(asked) = hold.revoked.filter(|_| hold.undrainable).map(|revoked| revoked.first) else {
            return self.note_independence(client, hold);
        };
        let Some(user) = self.clients.get(&client).filter(|state| state.gang.is_none_or(Gang::is_learned)) else {
            return;
        };
        let (user, since) = (user.user, asked.max(self.now.saturating_sub(SOON)));
        let is_partner = |other: &ClientId| {
            let state = self.clients.get(other).filter(|state| state.user == user);
            let seats = state.into_iter().flat_map(|state| &state.seats);
            // Programs that wait for each other's kernels have a GPU each.
            let mut seats = seats.filter(|(id, _)| self.seat(client, **id).is_none()).map(|(_, seat)| seat);
            let ran = |seat: &Seat| match &seat.hold {
                Some(hold) => hold.since >= since,
                None => seat.grants > 0 && seat.last_run >= since,
            };
            let is_free = state.is_some_and(|state| state.gang.is_none_or(Gang::is_learned));
            *other != client && is_free && seats.any(ran)
        };
        let partners: Vec<ClientId> = self.clients.keys().copied().filter(is_partner).collect();
        for other in partners {
            let pair = (client.min(other), client.max(other));
            let seen = self.partners.entry(pair).or_default();
            *seen += 1;
            if *seen > CHANCES {
                self.unite_partners([client, other]);
            }
        }
    }

    /// One that has drained although another did not hold anything meanwhile does not wait for that one.
    fn note_independence(&mut self, client: ClientId, hold: &Hold) {
        let pairs = self.partners.keys().filter(|(one, other)| [one, other].contains(&&client)).copied();
        let was_away = |other: &ClientId| {
            let seats = || self.clients.get(other).into_iter().flat_map(|state| state.seats.values());
            seats().all(|seat| seat.hold.is_none() && seat.last_run <= hold.since)
        };
        let wrong: Vec<_> = pairs.filter(|(one, other)| was_away(if *one == client { other } else { one })).collect();
        self.partners.retain(|pair, _| !wrong.contains(pair));
    }

    fn unite_partners(&mut self, pair: [ClientId; 2]) {
        let known = pair.iter().find_map(|client| self.clients.get(client)?.learned);
        let gang = known.unwrap_or_else(|| self.count());
        for client in pair {
            if let Some(state) = self.clients.get_mut(&client).filter(|state| state.learned.is_none()) {
                state.learned = Some(gang);
                self.gang_anew(client);
            }
        }
    }

    pub(super) fn forget_partner(&mut self, client: ClientId) {
        self.partners.retain(|(one, other), _| *one != client && *other != client);
    }
}
