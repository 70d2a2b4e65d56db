//! Rooms: memory of a GPU that is kept free for programs that are not clients (see `memory::others`). A room is vacated
//! immediately: holders of the lock that do not fit beside it, or have some of it, are revoked without the rest of
//! their turn. Clients that do not fit on the GPU beside a room wait until it ends.

use crate::{api::*, gpu::Access, machine::Machine};
use std::time::Duration;

/// How long memory may take to leave for a room. After that the room is refused: some of the memory does not leave.
const VACATING: Duration = Duration::from_secs(10);

impl Machine {
    /// Makes a room, or changes it: see [`Event::RoomRequested`].
    pub(crate) fn request_room(&mut self, room: RoomId, id: GpuId, bytes: u64, until: Time) {
        let gpu = self.gpus.get(id).filter(|gpu| gpu.access != Access::Gone);
        let most = gpu.map(|gpu| {
            let others = gpu.others.rooms().filter(|(other, _)| *other != room);
            let rooms = others.fold(0u64, |sum, (_, room)| sum.saturating_add(room.bytes));
            let overhead = gpu.overhead_wanted(&self.settings).saturating_sub(gpu.others.kept());
            let beside = overhead.saturating_sub(gpu.others.taken()).saturating_add(rooms);
            // A promised room is kept.
            let before = gpu.others.rooms().find(|(other, _)| *other == room).map_or(0, |(_, room)| room.bytes);
            gpu.total.saturating_sub(gpu.reserve(&self.settings)).saturating_sub(beside).max(before)
        });
        let refused = match most {
            None => Some(RoomObstacle::Gone),
            Some(most) if bytes > most => Some(RoomObstacle::TooLarge { most }),
            Some(_) => None,
        };
        if let Some(why) = refused {
            self.end_room(room);
            return self.effects.command(Command::RoomRefused { room, gpu: id, why });
        }
        let now = self.now;
        if let Some(gpu) = self.gpus.get_mut(id) {
            gpu.others.keep(now, room, bytes, until);
        }
        if self.is_ready(room, id) {
            self.effects.command(Command::RoomReady { room, gpu: id });
        }
        self.touch(id);
    }

    fn is_ready(&self, room: RoomId, id: GpuId) -> bool {
        self.gpus.get(id).is_some_and(|gpu| gpu.others.rooms().any(|(other, it)| other == room && it.is_ready))
    }

    /// Ends a room, if it has not ended.
    pub(crate) fn end_room(&mut self, room: RoomId) {
        for (id, gpu) in self.gpus.iter_mut() {
            if gpu.others.end(room).is_some() {
                self.effects.touch(id);
            }
        }
    }

    /// Ends all rooms on a GPU that is gone.
    pub(crate) fn end_rooms(&mut self, id: GpuId) {
        let rooms: Vec<_> = self.gpus.get(id).into_iter().flat_map(|gpu| gpu.others.rooms()).collect();
        for (room, state) in rooms {
            self.end_room(room);
            self.effects.command(match state.is_ready {
                true => Command::RoomEnded { room, gpu: id },
                false => Command::RoomRefused { room, gpu: id, why: RoomObstacle::Gone },
            });
        }
    }

    /// Reports which rooms are ready, are over, or cannot be made. Returns when to look again.
    pub(super) fn serve_rooms(&mut self, id: GpuId) -> Option<Time> {
        let now = self.now;
        let gpu = self.gpus.get_mut(id)?;
        gpu.others.expire(now);
        let mut next = gpu.others.next();
        let rooms: Vec<_> = gpu.others.rooms().collect();
        for (room, state) in rooms {
            if state.until <= now {
                self.end_room(room);
                self.effects.command(Command::RoomEnded { room, gpu: id });
                continue;
            }
            let due = if state.is_ready { state.until } else { state.until.min(state.since + VACATING) };
            if !state.is_ready {
                let why = self.room_obstacle(id).or((due <= now).then_some(RoomObstacle::Late));
                if self.is_vacated(id) {
                    self.gpus.get_mut(id).into_iter().for_each(|gpu| gpu.others.set_ready(room));
                    self.effects.command(Command::RoomReady { room, gpu: id });
                    next = next.into_iter().chain([state.until]).min();
                    continue;
                }
                if let Some(why) = why {
                    self.end_room(room);
                    self.effects.command(Command::RoomRefused { room, gpu: id, why });
                    continue;
                }
            }
            next = next.into_iter().chain([due]).min();
        }
        next
    }

    /// Whether memory to be kept free on a GPU is free: neither charged nor reserved, and measured to be free.
    fn is_vacated(&mut self, id: GpuId) -> bool {
        let Some(gpu) = self.gpus.get(id) else { return false };
        let reserved = gpu.reservations.iter().fold(0u64, |sum, reservation| sum.saturating_add(reservation.secured));
        let room = gpu.usable(&self.settings).checked_sub(gpu.ledger.charged().saturating_add(reserved));
        let unverified = gpu.ledger.unverified();
        let Some(room) = room else { return false };
        if unverified > room {
            self.request_any_verification(id);
        }
        unverified <= room && !self.is_overdrawn_by_overhead(id)
    }

    /// Whether contexts and other programs leave too little to keep free, whatever clients give.
    fn is_overdrawn_by_overhead(&self, id: GpuId) -> bool {
        self.gpus.get(id).is_some_and(|gpu| {
            gpu.overhead_wanted(&self.settings) > gpu.total.saturating_sub(gpu.reserve(&self.settings))
        })
    }

    /// Memory that does not leave for the rooms on a GPU, as it stands.
    fn room_obstacle(&self, id: GpuId) -> Option<RoomObstacle> {
        let gpu = self.gpus.get(id)?;
        let bytes = gpu.ledger.unevictable().saturating_sub(gpu.usable(&self.settings));
        (bytes > 0).then_some(RoomObstacle::Unevictable { bytes })
    }

    /// Whether memory still has to leave for the bytes kept free on a GPU.
    pub(super) fn vacates(&self, id: GpuId) -> bool {
        self.gpus.get(id).is_some_and(|gpu| gpu.others.kept() > 0) && self.overdrawn(id) > 0
    }

    /// Whether these clients together need more of a GPU than the bytes kept free on it leave. Without them, they can
    /// run only by page faults.
    pub(crate) fn is_crowded_out(&self, id: GpuId, clients: &[ClientId]) -> bool {
        let Some(gpu) = self.gpus.get(id).filter(|gpu| gpu.access == Access::Turns && gpu.others.kept() > 0) else {
            return false;
        };
        let (mut need, mut unevictable) = (0u64, gpu.ledger.unevictable());
        for client in clients {
            unevictable = unevictable.saturating_sub(gpu.unevictable_of(*client));
            let needs_all = gpu.attachments.get(client).is_some_and(|attachment| attachment.engine != Engine::Managed);
            if let Some(account) = gpu.account(*client).filter(|_| needs_all) {
                need = need.saturating_add(account.report.demand);
            }
        }
        need > gpu.usable(&self.settings).saturating_sub(unevictable)
    }
}
