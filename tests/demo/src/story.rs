//! The events of a demo from the scheduler's record: the turns, and the bytes that moved.

use std::path::Path;
use test_support::record::{Move as Happening, Record};

/// One turn, and the bytes that moved since the previous turn ended.
#[derive(Debug, Clone, Copy)]
pub struct Turn {
    pub who: usize,
    pub at: f64,
    pub waited: f64,
    pub held: f64,
    /// The eviction before the turn.
    pub out: Move,
    pub back: Move,
}

/// Bytes that moved in one direction, and the period of the move.
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
    /// The time of the pending request.
    waits: Option<f64>,
    holds: Option<f64>,
    /// The wait before the current turn.
    waited: f64,
    leaving: Option<Move>,
    returning: Option<Move>,
    /// The bytes evicted since the last reported turn.
    gone: Move,
    /// Bytes that are currently in host memory.
    away: u64,
    /// Whether the program is done and frees its memory.
    frees: bool,
    turns: usize,
}

/// All events so far.
#[derive(Debug)]
pub struct Story {
    players: [Player; 2],
    record: Record,
    start: Option<f64>,
    order: Vec<usize>,
    overlaps: Vec<f64>,
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
            overlaps: Vec::new(),
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

    /// The number of hand-overs between the programs.
    pub fn alternations(&self) -> usize {
        self.order.windows(2).filter(|pair| pair[0] != pair[1]).count()
    }

    /// The times, in seconds, at which a program got the lock while the other, unfinished program
    /// held the lock.
    pub fn overlaps(&self) -> &[f64] {
        &self.overlaps
    }

    /// Bytes that were evicted to host memory, and bytes that were restored.
    pub fn moved(&self) -> (u64, u64) {
        (self.out, self.back)
    }

    /// Reads new events of the record, and returns the turns that have ended.
    pub fn read(&mut self) -> Vec<Turn> {
        let mut turns = Vec::new();
        for event in self.record.new_moves() {
            self.happened(&event, &mut turns);
        }
        turns
    }

    /// Handles one event. If the event ends a turn, the turn is added to `turns`.
    fn happened(&mut self, event: &Happening, turns: &mut Vec<Turn>) {
        let Happening { ms, client, pid, what, bytes, .. } = *event;
        let now = (ms - *self.start.get_or_insert(ms)) / 1000.0;
        if what == "connect"
            && let Some(player) = self.players.iter_mut().find(|p| p.pid == pid)
        {
            player.client = Some(client);
        }
        let Some(who) = self.players.iter().position(|p| p.client == Some(client)) else { return };
        // A program that is done may end slowly. Its memory delays no program, because both
        // programs fit by then.
        let other = &self.players[1 - who];
        let other_has_it = other.holds.is_some() && !other.frees;
        let player = &mut self.players[who];
        match what {
            "request" => player.waits = player.waits.or(Some(now)),
            "cancel" => player.waits = None,
            "grant" => {
                let since = player.waits.take().unwrap_or(now);
                (player.holds, player.waited) = (Some(now), now - since);
                player.turns += 1;
                if other_has_it {
                    self.overlaps.push(now);
                }
                self.order.push(who);
            }
            "evict" => {
                player.returned();
                player.leaving.get_or_insert(Move::at(now));
            }
            // Memory that the program itself frees does not move.
            "freed" => match &mut player.leaving {
                Some(leaving) => {
                    leaving.add(now, bytes);
                    player.away += bytes;
                    self.out += bytes;
                }
                None => player.frees = true,
            },
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
            // A program that ends detaches the GPU before it disconnects. The scheduler grants the
            // lock at the detach.
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
    /// Records that the evicted bytes have left the GPU.
    fn left(&mut self) {
        let moved = self.leaving.take().unwrap_or_default();
        self.gone = if self.gone.bytes == 0 {
            moved
        } else {
            Move { to: self.gone.to.max(moved.to), bytes: self.gone.bytes + moved.bytes, ..self.gone }
        };
    }

    /// Removes and returns the move back to the GPU.
    fn returned(&mut self) -> Move {
        self.returning.take().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a story from a handwritten record. Each event has the milliseconds, the pid (which
    /// is also the client's ID), the name, and the bytes.
    fn story(events: &[(u32, u32, &'static str, u64)]) -> (Story, Vec<Turn>) {
        let (mut story, mut turns) = (Story::new(Path::new(""), &[1, 2]), Vec::new());
        for &(ms, pid, what, bytes) in events {
            let event = Happening { run: 1, ms: ms.into(), client: pid.into(), pid, what, bytes };
            story.happened(&event, &mut turns);
        }
        (story, turns)
    }

    #[test]
    fn a_hand_over_is_reported() {
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
        assert_eq!((story.turns(), story.alternations(), story.overlaps().len()), ([2, 1], 2, 0));
        assert_eq!(story.moved(), (200, 100));
    }

    #[test]
    fn concurrent_holders_are_detected() {
        let (story, _) = story(&[(0, 1, "connect", 0), (0, 2, "connect", 0), (1, 1, "grant", 0), (2, 2, "grant", 0)]);
        assert_eq!(story.overlaps(), [0.002]);
    }

    #[test]
    fn a_holder_without_memory_overlaps_no_program() {
        let before = [(0, 1, "connect", 0), (0, 2, "connect", 0), (1, 1, "grant", 0), (1, 1, "mapped", 100)];
        let (story, _) = story(&[&before[..], &[(2, 1, "freed", 100), (3, 2, "grant", 0)]].concat());
        assert_eq!(story.overlaps(), [0.0; 0]);
    }

    #[test]
    fn detaching_ends_a_turn() {
        let (story, turns) = story(&[
            (0, 1, "connect", 0),
            (0, 2, "connect", 0),
            (1, 1, "grant", 0),
            (2, 1, "detach", 0),
            (2, 2, "grant", 0),
            (3, 1, "disconnect", 0),
        ]);
        assert_eq!((story.overlaps().len(), turns.len()), (0, 1));
    }

    #[test]
    fn freed_memory_does_not_count_as_moved() {
        let (story, _) = story(&[(0, 1, "connect", 0), (1, 1, "mapped", 100), (2, 1, "freed", 100)]);
        assert_eq!(story.moved(), (0, 0));
    }
}
