//! Gangs: clients whose kernels wait for each other and which therefore have to run at the same time. A client names
//! its gang, or a rule makes all clients that it counts together a gang.

use crate::api::{ClientId, Time};
use crate::entity::Gang;
use std::collections::{BTreeMap, BTreeSet};

/// A job has no more processes than this on one host: a few for each of its GPUs.
const MOST_OF_A_JOB: usize = 64;

/// The members of each gang, and the beginning of each gang's turn.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Gangs {
    #[serde(with = "crate::encoding::pairs")]
    members: BTreeMap<Gang, BTreeSet<ClientId>>,
    of: BTreeMap<ClientId, Gang>,
    /// Since when a gang has held a GPU without a break.
    #[serde(with = "crate::encoding::pairs")]
    turns: BTreeMap<Gang, Time>,
}

impl Gangs {
    /// Puts a client that is in no gang into one.
    pub fn join(&mut self, client: ClientId, gang: Gang) {
        self.of.insert(client, gang);
        self.members.entry(gang).or_default().insert(client);
    }

    pub fn leave(&mut self, client: ClientId) {
        let Some(gang) = self.of.remove(&client) else { return };
        let Some(members) = self.members.get_mut(&gang) else { return };
        members.remove(&client);
        if members.is_empty() {
            self.members.remove(&gang);
        }
    }

    pub fn of(&self, client: ClientId) -> Option<Gang> {
        self.of.get(&client).copied()
    }

    pub fn members(&self, gang: Gang) -> impl Iterator<Item = ClientId> {
        self.members.get(&gang).into_iter().flatten().copied()
    }

    pub fn size(&self, gang: Gang) -> usize {
        self.members.get(&gang).map_or(0, BTreeSet::len)
    }

    /// Whether the members may be the processes of one job on one host. Members of a larger gang are not assumed to
    /// wait for each other.
    pub fn is_job(&self, gang: Gang) -> bool {
        (2..=MOST_OF_A_JOB).contains(&self.size(gang))
    }

    pub fn others(&self, gang: Gang) -> impl Iterator<Item = Gang> {
        self.members.keys().copied().filter(move |other| *other != gang)
    }

    pub fn are_several(&self) -> bool {
        self.members.len() > 1
    }

    /// Begins a gang's turn at `since`, or moves its beginning back to that.
    pub fn begin_turn(&mut self, gang: Gang, since: Time) {
        let turn = self.turns.entry(gang).or_insert(since);
        *turn = since.min(*turn);
    }

    pub fn end_turn(&mut self, gang: Gang) {
        self.turns.remove(&gang);
    }

    pub fn turn_since(&self, gang: Gang) -> Option<Time> {
        self.turns.get(&gang).copied()
    }

    /// Gangs that have a turn, and since when.
    pub fn turns(&self) -> impl Iterator<Item = (Gang, Time)> {
        self.turns.iter().map(|(gang, since)| (*gang, *since))
    }
}
