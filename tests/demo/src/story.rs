//! What happened, from the scheduler's record: who held the lock when, and which bytes went where.

use std::path::Path;
use test_support::record::{Move as Happening, Record};

/// One turn with the lock, and what moved since the turn before it ended.
#[derive(Debug, Clone, Copy)]
pub struct Turn {
    pub who: usize,
    pub at: f64,
    pub waited: f64,
    pub held: f64,
    /// Out of the GPU, and into it.
    pub out: Move,
    pub back: Move,
}

/// Bytes on their way in one direction, from when to when.
#[derive(Debug, Clone, Copy, Default)]
pub struct Move {
    pub from: f64,
    pub to: f64,
    pub bytes: u64,
}

impl Move {
    fn at(from: f64) -> Move {
        Move { from, to: from, bytes: 0 }
    }

    fn add(&mut self, now: f64, bytes: u64) {
        (self.to, self.bytes) = (now, self.bytes + bytes);
    }
}

#[derive(Debug, Default)]
struct Player {
    pid: u32,
    client: Option<u64>,
    /// Since when it wants the lock, and since when it has it.
    waits: Option<f64>,
    holds: Option<f64>,
    /// For the turn it has.
    waited: f64,
    leaving: Option<Move>,
    returning: Option<Move>,
    /// What has left since a turn was told.
    gone: Move,
    /// Bytes that are in host memory now.
    away: u64,
    turns: usize,
}

/// Everything so far.
#[derive(Debug)]
pub struct Story {
    players: [Player; 2],
    record: Record,
    start: Option<f64>,
    order: Vec<usize>,
    overlaps: usize,
    out: u64,
    back: u64,
}

impl Story {
    pub fn new(record: &Path, pids: &[u32]) -> Story {
        let player = |i: usize| Player { pid: pids[i], ..Player::default() };
        Story {
            players: [player(0), player(1)],
            record: Record::new(record, 1),
            start: None,
            order: Vec::new(),
            overlaps: 0,
            out: 0,
            back: 0,
        }
    }

    pub fn turns(&self) -> [usize; 2] {
        [self.players[0].turns, self.players[1].turns]
    }

    pub fn grants(&self) -> usize {
        self.order.len()
    }

    /// How often the lock went from one program to the other.
    pub fn alternations(&self) -> usize {
        self.order.windows(2).filter(|pair| pair[0] != pair[1]).count()
    }

    /// How often one was granted the lock while the other had it.
    pub fn overlaps(&self) -> usize {
        self.overlaps
    }

    /// Bytes that left the GPU for host memory, and bytes that came back.
    pub fn moved(&self) -> (u64, u64) {
        (self.out, self.back)
    }

    /// Reads what is new in the record, and says which turns have ended.
    pub fn read(&mut self) -> Vec<Turn> {
        let mut turns = Vec::new();
        for event in self.record.new_moves() {
            self.happened(&event, &mut turns);
        }
        turns
    }

    /// Takes one event in; a turn that it ends is added to `turns`.
    fn happened(&mut self, event: &Happening, turns: &mut Vec<Turn>) {
        let Happening { ms, client, pid, what, bytes, .. } = *event;
        let now = (ms - *self.start.get_or_insert(ms)) / 1000.0;
        if what == "connect"
            && let Some(player) = self.players.iter_mut().find(|p| p.pid == pid)
        {
            player.client = Some(client);
        }
        let Some(who) = self.players.iter().position(|p| p.client == Some(client)) else { return };
        let other_holds = self.players[1 - who].holds.is_some();
        let player = &mut self.players[who];
        match what {
            "request" => player.waits = player.waits.or(Some(now)),
            "cancel" => player.waits = None,
            "grant" => {
                let since = player.waits.take().unwrap_or(now);
                (player.holds, player.waited) = (Some(now), now - since);
                player.turns += 1;
                self.overlaps += usize::from(other_holds);
                self.order.push(who);
            }
            "evict" => {
                player.returned();
                player.leaving.get_or_insert(Move::at(now));
            }
            // What a program frees on its own account goes nowhere.
            "freed" => {
                if let Some(leaving) = &mut player.leaving {
                    leaving.add(now, bytes);
                    player.away += bytes;
                    self.out += bytes;
                }
            }
            "credit" => {
                player.left();
                if player.away > 0 {
                    player.returning.get_or_insert(Move::at(now));
                }
            }
            "mapped" => {
                let bytes = bytes.min(player.away);
                if let Some(returning) = player.returning.as_mut().filter(|_| bytes > 0) {
                    returning.add(now, bytes);
                    player.away -= bytes;
                    self.back += bytes;
                }
            }
            // A program that ends detaches the GPU, which is granted at that moment, before it disconnects.
            "release" | "detach" | "disconnect" => {
                if let Some(since) = player.holds.take() {
                    let back = player.returned();
                    let waited = player.waited;
                    let other = &mut self.players[1 - who];
                    other.left();
                    let out = std::mem::take(&mut other.gone);
                    turns.push(Turn { who, at: since, waited, held: now - since, out, back });
                }
            }
            _ => {}
        }
    }
}

impl Player {
    /// Its bytes have gone, as far as they had to.
    fn left(&mut self) {
        let moved = self.leaving.take().unwrap_or_default();
        self.gone = if self.gone.bytes == 0 {
            moved
        } else {
            Move { to: self.gone.to.max(moved.to), bytes: self.gone.bytes + moved.bytes, ..self.gone }
        };
    }

    /// Its bytes are there, as far as it has room.
    fn returned(&mut self) -> Move {
        self.returning.take().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A record by hand: milliseconds, pid (the client's id as well), what, bytes.
    fn story(events: &[(u32, u32, &'static str, u64)]) -> (Story, Vec<Turn>) {
        let (mut story, mut turns) = (Story::new(Path::new(""), &[1, 2]), Vec::new());
        for &(ms, pid, what, bytes) in events {
            let event = Happening { run: 1, ms: ms.into(), client: pid.into(), pid, what, bytes };
            story.happened(&event, &mut turns);
        }
        (story, turns)
    }

    #[test]
    fn a_hand_over_is_told() {
        let (story, turns) = story(&[
            (0, 1, "connect", 0),
            (0, 1, "request", 0),
            (0, 1, "grant", 0),
            (0, 2, "connect", 0),
            (0, 2, "request", 0),
            (1000, 1, "release", 0),
            (1000, 1, "evict", 100),
            (1000, 1, "request", 0),
            (1500, 1, "freed", 100),
            (1500, 2, "grant", 0),
            (2500, 2, "release", 0),
            (2500, 2, "evict", 100),
            (2600, 2, "freed", 100),
            (2600, 1, "credit", 100),
            (2600, 1, "grant", 0),
            (2700, 1, "mapped", 100),
            (3000, 1, "disconnect", 0),
        ]);
        assert_eq!(turns.iter().map(|turn| turn.who).collect::<Vec<_>>(), [0, 1, 0]);
        assert_eq!(turns.iter().map(|turn| turn.out.bytes).collect::<Vec<_>>(), [0, 100, 100]);
        assert_eq!(turns.iter().map(|turn| turn.back.bytes).collect::<Vec<_>>(), [0, 0, 100]);
        assert_eq!((story.turns(), story.alternations(), story.overlaps()), ([2, 1], 2, 0));
        assert_eq!(story.moved(), (200, 100));
    }

    #[test]
    fn two_holders_at_once_are_noticed() {
        let (story, _) = story(&[(0, 1, "connect", 0), (0, 2, "connect", 0), (1, 1, "grant", 0), (2, 2, "grant", 0)]);
        assert_eq!(story.overlaps(), 1);
    }

    #[test]
    fn a_program_that_detaches_holds_the_lock_no_longer() {
        let (story, turns) = story(&[
            (0, 1, "connect", 0),
            (0, 2, "connect", 0),
            (1, 1, "grant", 0),
            (2, 1, "detach", 0),
            (2, 2, "grant", 0),
            (3, 1, "disconnect", 0),
        ]);
        assert_eq!((story.overlaps(), turns.len()), (0, 1));
    }

    #[test]
    fn memory_that_a_program_frees_has_not_moved() {
        let (story, _) = story(&[(0, 1, "connect", 0), (1, 1, "mapped", 100), (2, 1, "freed", 100)]);
        assert_eq!(story.moved(), (0, 0));
    }
}
