//! Rooms that are opened and closed. A room is memory that is kept free for programs that are not
//! clients.

use crate::{world::Happening, *};

/// The time within which a room must be ready or refused.
const ANSWERED: Duration = Duration::from_secs(10);

/// The state of a room, as its requester sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SimulatedRoom {
    pub gpu: GpuId,
    pub asked: Time,
    pub until: Time,
    pub bytes: u64,
    pub is_ready: bool,
}

impl World {
    /// Opens and closes rooms on all GPUs until that time.
    pub fn make_rooms(&mut self, until: Time) {
        self.rooms_until = until;
        for (n, gpu) in self.totals.keys().copied().collect::<Vec<_>>().into_iter().enumerate() {
            let at = self.now + self.rng.between(ms(0), ms(3000));
            self.at(at, Happening::Room(RoomId(1 + n as u64 * 1000), gpu));
        }
    }

    /// Requests a room or a new size of the present room, and schedules the next request.
    pub(crate) fn ask_for_room(&mut self, room: RoomId, gpu: GpuId) {
        if self.now >= self.rooms_until {
            return;
        }
        let bytes = self.rng.below(self.totals[&gpu] + GIB);
        let until = self.now + self.rng.between(ms(1), ms(20_000));
        let asked = SimulatedRoom { gpu, asked: self.now, until, bytes, is_ready: false };
        self.rooms.insert(room, asked);
        self.tolerant = self.tolerant.max(until + Duration::from_secs(20));
        self.overdrawn.insert(gpu, until + Duration::from_secs(20));
        self.feed(Event::RoomRequested { room, gpu, bytes, until });
        let next = if self.rng.one_in(3) { room } else { RoomId(room.0 + 1) };
        let after = self.rng.between(ms(10), ms(8000));
        self.at(self.now + after, Happening::Room(next, gpu));
        if self.rng.one_in(2) {
            let after = self.rng.between(ms(1), ms(12_000));
            self.at(self.now + after, Happening::RoomCloses(room));
        }
    }

    pub(crate) fn close_room(&mut self, room: RoomId) {
        self.rooms.remove(&room);
        self.feed(Event::RoomClosed { room });
    }

    pub(crate) fn note_room(&mut self, command: &Command) {
        match command {
            Command::RoomReady { room, gpu } => {
                let asked = self.rooms.get_mut(room).expect("nobody asked for it");
                assert_eq!(asked.gpu, *gpu);
                asked.is_ready = true;
            }
            Command::RoomRefused { room, .. } | Command::RoomEnded { room, .. } => {
                self.rooms.remove(room).expect("nobody asked for it");
            }
            _ => {}
        }
    }

    /// Checks that no client maps the bytes of rooms that are ready, and that every room becomes
    /// ready, is refused, or is closed in time.
    pub(crate) fn check_rooms(&self) {
        for (room, state) in &self.rooms {
            assert!(self.now <= state.until, "{room:?} is not over: {state:?}");
            assert!(state.is_ready || self.now <= state.asked + ANSWERED, "{room:?} waits: {state:?}");
        }
        // A client that was stopped may map its former allowance. A client that lies isn't
        // measured.
        let is_honest = |m: &Model| m.plan.lie.is_none() && m.plan.stopped.is_none();
        if self.rooms.is_empty() || self.physical || self.sleeps.is_some() || !self.models.values().all(is_honest) {
            return;
        }
        for (gpu, total) in &self.totals {
            let ready = self.rooms.values().filter(|room| room.gpu == *gpu && room.is_ready).map(|room| room.bytes);
            let kept: u64 = ready.sum();
            let mapped: u64 = self.models.values().map(|m| m.mapped(*gpu)).sum();
            assert!(
                kept == 0 || kept + mapped + self.overheads[gpu] <= *total,
                "{mapped} mapped beside {kept} at {:?}: {:?}",
                self.now,
                self.machine.gpu(*gpu)
            );
        }
    }
}
