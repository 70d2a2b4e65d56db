//! Gangs: clients whose kernels wait for each other, so that they must run at the same time. A
//! client names its gang, or a rule makes all clients of its group a gang.

use crate::api::{ClientId, Time};
use crate::entity::Gang;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The maximum number of processes of one job on one host: a few for each GPU.
const MOST_OF_A_JOB: usize = 64;
/// Assumed duration of a hand-over until one has been measured.
const FIRST_HAND_OVER: Duration = Duration::from_millis(50);

/// The members of each gang, its turn, and the time that ending a turn takes.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Gangs {
    #[serde(with = "crate::encoding::pairs")]
    members: BTreeMap<Gang, BTreeSet<ClientId>>,
    of: BTreeMap<ClientId, Gang>,
    /// Turns of the gangs that hold a GPU.
    #[serde(with = "crate::encoding::pairs")]
    turns: BTreeMap<Gang, Turn>,
    /// The smoothed duration of each gang's hand-over, from the first revoke until the last member
    /// has drained.
    #[serde(with = "crate::encoding::pairs")]
    hand_overs: BTreeMap<Gang, Duration>,
}

/// The turn of a gang.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
struct Turn {
    /// When the gang's uninterrupted hold of a GPU began.
    since: Time,
    /// When the first member of the gang was revoked.
    revoked: Option<Time>,
    /// All members had drained when the turn began, so the end of the turn measures a hand-over.
    is_measured: bool,
}

impl Gangs {
    /// Adds a client that is in no gang to a gang.
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
            self.hand_overs.remove(&gang);
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

    /// Whether the members may be the processes of one job on one host. Members of a larger gang
    /// are not assumed to wait for each other.
    pub fn is_job(&self, gang: Gang) -> bool {
        (2..=MOST_OF_A_JOB).contains(&self.size(gang))
    }

    pub fn others(&self, gang: Gang) -> impl Iterator<Item = Gang> {
        self.members.keys().copied().filter(move |other| *other != gang)
    }

    pub fn are_several(&self) -> bool {
        self.members.len() > 1
    }

    /// Begins a gang's turn at `since`, or moves the start of its current turn back to `since`.
    /// `is_measured`: all members of an earlier turn have drained.
    pub fn begin_turn(&mut self, gang: Gang, since: Time, is_measured: bool) {
        let turn = self.turns.entry(gang).or_insert(Turn { since, revoked: None, is_measured });
        turn.since = since.min(turn.since);
    }

    /// Records that a member was revoked.
    pub fn revoked(&mut self, now: Time, gang: Gang) {
        if let Some(turn) = self.turns.get_mut(&gang) {
            turn.revoked.get_or_insert(now);
        }
    }

    /// Records that the revoke is withdrawn, and no member needs to release its locks.
    pub fn goes_on(&mut self, gang: Gang) {
        if let Some(turn) = self.turns.get_mut(&gang) {
            turn.revoked = None;
        }
    }

    /// Ends a gang's turn. `drained`: no member holds a lock any more.
    pub fn end_turn(&mut self, now: Time, gang: Gang, drained: bool) {
        let turn = self.turns.remove(&gang).filter(|turn| turn.is_measured && drained);
        if let Some(revoked) = turn.and_then(|turn| turn.revoked).filter(|_| self.members.contains_key(&gang)) {
            let took = now.saturating_sub(revoked);
            let before = self.hand_overs.get(&gang).copied().unwrap_or(took);
            self.hand_overs.insert(gang, before / 4 * 3 + took / 4);
        }
    }

    pub fn turn_since(&self, gang: Gang) -> Option<Time> {
        self.turns.get(&gang).map(|turn| turn.since)
    }

    /// Gangs that have a turn, and when each turn began.
    pub fn turns(&self) -> impl Iterator<Item = (Gang, Time)> {
        self.turns.iter().map(|(gang, turn)| (*gang, turn.since))
    }

    /// The expected duration of a hand-over by a gang. Until the hand-over ends, other members may
    /// spin while they wait for drained members.
    pub fn hand_over(&self, gang: Gang) -> Duration {
        self.hand_overs.get(&gang).copied().unwrap_or(FIRST_HAND_OVER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hand_over_lasts_until_the_last_member_has_drained() {
        let ms = Duration::from_millis;
        let (gang, mut gangs) = (Gang::Group(crate::api::GroupId(1)), Gangs::default());
        gangs.join(ClientId(1), gang);
        assert_eq!(gangs.hand_over(gang), FIRST_HAND_OVER);
        let mut turn = |is_measured, revoked: &[u64], goes_on: bool, ended: u64, drained| {
            gangs.begin_turn(gang, ms(1000), is_measured);
            revoked.iter().for_each(|at| gangs.revoked(ms(1000 + at), gang));
            if goes_on {
                gangs.goes_on(gang);
            }
            gangs.end_turn(ms(1000 + ended), gang, drained);
            gangs.hand_over(gang)
        };
        assert_eq!(turn(true, &[], false, 7, true), FIRST_HAND_OVER, "it released what it had by itself");
        assert_eq!(turn(true, &[10], true, 900, true), FIRST_HAND_OVER, "nobody wanted it after all");
        assert_eq!(turn(true, &[10], false, 900, false), FIRST_HAND_OVER, "one has not drained at all");
        assert_eq!(turn(false, &[10], false, 20, true), FIRST_HAND_OVER, "nor had it before");
        assert_eq!(turn(true, &[10, 80], false, 90, true), ms(80));
        assert_eq!(turn(true, &[10], false, 50, true), ms(70));
        gangs.leave(ClientId(1));
        assert_eq!(gangs.hand_over(gang), FIRST_HAND_OVER);
    }
}
