//! Bytes that are kept free on a GPU for programs that are not clients. Such a program, for example
//! a display server or a game, cannot wait for memory: if none is free, its allocation fails. So
//! clients' memory is evicted before the program needs it.
//!
//! Users request *rooms*. *Headroom* is kept ahead of programs that grow. Memory that other
//! programs have already taken from a room or headroom is not kept free a second time. Rooms count
//! from a base level: the usage when the first room of a GPU is made, or the least usage since.
//! Only the larger of rooms and headroom is kept free, because both are for the same programs. No
//! client waits forever, because rooms and headroom expire.
//!
//! Kept bytes count like overhead, so limits, placement and co-running already exclude them. They
//! differ from overhead only in urgency (`rooms`).

use crate::api::*;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Headroom covers the growth of other programs for this long, at their present rate. Growth is
/// measured over the same time.
const AHEAD: Duration = Duration::from_secs(1);
/// Growth below this many bytes is covered by the reserve.
const SLOW: u64 = 64 << 20;
/// How long headroom is kept after the last growth of other programs. A client that does not fit
/// beside the headroom waits for this time.
const HELD: Duration = Duration::from_secs(3);
/// Growth counts only beyond the highest usage of other programs in this time. Otherwise programs
/// that repeatedly grow and shrink would always have headroom, and a client that does not fit
/// beside the headroom would wait forever.
const REMEMBERED: Duration = Duration::from_secs(60);
/// Headroom is at most a GPU's size divided by this number.
const LARGEST_PART: u64 = 8;

/// Bytes that are kept free at the request of a user.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(crate) struct Room {
    pub bytes: u64,
    /// When the room was requested.
    pub since: Time,
    /// When the room ends, unless it is requested again.
    pub until: Time,
    /// The room's bytes are free.
    pub is_ready: bool,
}

/// The memory that other programs use on a GPU, and the memory kept free for them, in bytes.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Others {
    used: u64,
    rooms: BTreeMap<RoomId, Room>,
    /// The base level of rooms: bytes of `used` that other programs did not take from a room.
    beside_rooms: u64,
    /// Measurements of the last [`AHEAD`], the newest last, each with its time.
    samples: VecDeque<(Time, u64)>,
    /// The highest measurement of the last [`REMEMBERED`], and its time.
    highest: (u64, Time),
    /// The expected usage of other programs in bytes, and the end of that expectation.
    expected: Option<(u64, Time)>,
}

impl Others {
    /// Handles a measurement of the memory that other programs use.
    pub fn measured(&mut self, now: Time, total: u64, used: u64) {
        self.used = used;
        self.beside_rooms = self.beside_rooms.min(used);
        while self.samples.front().is_some_and(|(at, _)| *at + AHEAD < now) {
            self.samples.pop_front();
        }
        self.samples.push_back((now, used));
        let least = self.samples.iter().map(|(_, bytes)| *bytes).min().unwrap_or(used);
        let (highest, at) = self.highest;
        let is_new = used > highest;
        if is_new || at + REMEMBERED <= now {
            self.highest = (used, now);
        }
        let growth = if is_new { used - least } else { 0 };
        self.expected.take_if(|(_, until)| *until <= now);
        if growth >= SLOW {
            let reached = self.expected.map_or(0, |(bytes, _)| bytes);
            // Keeps twice the needed headroom, so that memory need not be evicted at each
            // measurement.
            let to = if used.saturating_add(growth) > reached { used.saturating_add(growth * 2) } else { reached };
            self.expected = Some((to, now + HELD));
        }
        if let Some((bytes, _)) = &mut self.expected {
            *bytes = (*bytes).min(used.saturating_add(total / LARGEST_PART));
        }
    }

    /// Restarts the measurement of growth. Until now, the memory of other programs could not be
    /// identified, so a higher value does not show growth.
    pub fn begin_again(&mut self) {
        self.samples.clear();
    }

    /// Creates or changes a room. A ready room stays ready unless it becomes larger.
    pub fn keep(&mut self, now: Time, id: RoomId, bytes: u64, until: Time) {
        if self.rooms.is_empty() {
            self.beside_rooms = self.used;
        }
        let is_ready = self.rooms.get(&id).is_some_and(|room| room.is_ready && bytes <= room.bytes);
        self.rooms.insert(id, Room { bytes, since: now, until, is_ready });
    }

    /// Ends a room. Memory that other programs have taken from the room then counts like the rest
    /// of their memory.
    pub fn end(&mut self, id: RoomId) -> Option<Room> {
        let taken = self.taken();
        let room = self.rooms.remove(&id)?;
        self.beside_rooms += room.bytes.min(taken);
        Some(room)
    }

    pub fn rooms(&self) -> impl Iterator<Item = (RoomId, Room)> {
        self.rooms.iter().map(|(id, room)| (*id, *room))
    }

    pub fn set_ready(&mut self, id: RoomId) {
        self.rooms.get_mut(&id).into_iter().for_each(|room| room.is_ready = true);
    }

    /// Bytes that other programs use.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Bytes that other programs have taken from rooms.
    pub fn taken(&self) -> u64 {
        if self.rooms.is_empty() { 0 } else { self.used - self.beside_rooms }
    }

    /// Bytes that are kept free for rooms.
    pub fn in_rooms(&self) -> u64 {
        let all = self.rooms.values().fold(0u64, |sum, room| sum.saturating_add(room.bytes));
        all.saturating_sub(self.taken())
    }

    /// Bytes that are kept free in total.
    pub fn kept(&self) -> u64 {
        let ahead = self.expected.map_or(0, |(bytes, _)| bytes.saturating_sub(self.used));
        self.in_rooms().max(ahead)
    }

    /// When headroom ends without another measurement. `None`: no headroom is kept.
    pub fn next(&self) -> Option<Time> {
        self.expected.map(|(_, until)| until)
    }

    /// Ends headroom that has expired.
    pub fn expire(&mut self, now: Time) {
        self.expected.take_if(|(_, until)| *until <= now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    const TOTAL: u64 = 80 * GIB;

    fn ms(ms: u64) -> Time {
        Duration::from_millis(ms)
    }

    #[test]
    fn memory_taken_from_a_reserved_room_is_not_reserved_again() {
        let mut others = Others::default();
        others.measured(ms(0), TOTAL, 3 * GIB);
        others.keep(ms(0), RoomId(1), 8 * GIB, ms(60_000));
        assert_eq!(others.kept(), 8 * GIB);
        others.measured(ms(20_000), TOTAL, 6 * GIB);
        assert_eq!(others.in_rooms(), 5 * GIB);
        others.measured(ms(40_000), TOTAL, 12 * GIB);
        assert_eq!(others.in_rooms(), 0, "they have more than was asked for");
        // Older programs have ended, so only 1 GiB still counts as used outside the room.
        others.measured(ms(60_000), TOTAL, GIB);
        others.measured(ms(80_000), TOTAL, 3 * GIB);
        assert_eq!(others.in_rooms(), 6 * GIB);
    }

    #[test]
    fn reserved_rooms_are_accounted_separately() {
        let mut others = Others::default();
        others.keep(ms(0), RoomId(1), 8 * GIB, ms(60_000));
        others.measured(ms(20_000), TOTAL, 6 * GIB);
        others.keep(ms(20_000), RoomId(2), 4 * GIB, ms(60_000));
        assert_eq!(others.in_rooms(), 6 * GIB);
        assert!(others.end(RoomId(1)).is_some());
        assert_eq!(others.in_rooms(), 4 * GIB, "what was taken was taken from the first");
        others.keep(ms(20_000), RoomId(2), 2 * GIB, ms(60_000));
        assert_eq!(others.in_rooms(), 2 * GIB);
        assert!(others.end(RoomId(2)).is_some() && others.end(RoomId(2)).is_none());
        assert_eq!(others.in_rooms(), 0);
    }

    #[test]
    fn only_a_growing_room_is_vacated_again() {
        let mut others = Others::default();
        let is_ready = |others: &Others| others.rooms().all(|(_, room)| room.is_ready);
        others.keep(ms(0), RoomId(1), 8 * GIB, ms(60_000));
        assert!(!is_ready(&others));
        others.set_ready(RoomId(1));
        others.keep(ms(10), RoomId(1), 8 * GIB, ms(90_000));
        assert!(is_ready(&others));
        others.keep(ms(20), RoomId(1), 9 * GIB, ms(90_000));
        assert!(!is_ready(&others));
    }

    #[test]
    fn headroom_runs_ahead_of_growth_and_ends_after_it() {
        let mut others = Others::default();
        others.measured(ms(0), TOTAL, GIB);
        others.measured(ms(500), TOTAL, GIB + 60 * MIB);
        assert_eq!(others.kept(), 0, "the reserve is enough");
        // Other programs grow by 1 GiB/s.
        let mut last = others.kept();
        let mut raised = 0;
        for n in 0..40 {
            let used = GIB + n * 128 * MIB;
            others.measured(ms(10_000 + n * 125), TOTAL, used);
            raised += u32::from(others.kept() > last);
            last = others.kept();
            assert!(n < 9 || last >= GIB, "{last} after {n}");
            assert!(last <= 2 * GIB, "{last} after {n}");
        }
        assert!(raised < 12, "memory had to leave {raised} times in 5 s");
        let end = ms(10_000 + 39 * 125);
        assert_eq!(others.next(), Some(end + HELD));
        others.expire(end + HELD);
        assert_eq!(others.kept(), 0);
    }

    #[test]
    fn repeated_growth_does_not_keep_headroom_reserved_permanently() {
        let mut others = Others::default();
        let mut with_headroom = 0;
        for second in 0..300 {
            others.measured(ms(second * 1000), TOTAL, if second % 4 < 2 { 0 } else { GIB });
            with_headroom += u32::from(others.kept() > GIB);
        }
        assert!((1..60).contains(&with_headroom), "in {with_headroom} of 300 s");
    }

    #[test]
    fn headroom_leaves_clients_most_of_a_small_gpu() {
        let mut others = Others::default();
        others.measured(ms(0), 8 * GIB, 0);
        others.measured(ms(100), 8 * GIB, 3 * GIB);
        assert_eq!(others.kept(), GIB);
        others.measured(ms(200), 8 * GIB, 0);
        assert_eq!(others.kept(), GIB, "also when they have ended");
    }
}
