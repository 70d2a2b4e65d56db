//! Rooms: memory of a GPU that is kept free for programs that are not clients (see `others`).
//! Memory is evicted for a room immediately. A holder is revoked before its turn ends if it does
//! not fit beside the room, or if its memory has to be evicted for the room. Clients that do not
//! fit beside a room wait until the room ends. Gangs are not split to make room. Headroom
//! (`others`) has the same effects.

use super::{Access, Attachment, Context, Gpu, Gpus};
use crate::{api::*, effects::Effects, rules::Rules};
use std::time::Duration;

/// How long the eviction of memory for a room may take. After that time the room is refused,
/// because some memory cannot be evicted.
const VACATING: Duration = Duration::from_secs(10);

impl Gpus {
    /// Ends a room on all GPUs.
    pub fn end_room(&mut self, fx: &mut Effects, room: RoomId) {
        self.iter_mut().for_each(|(_, gpu)| gpu.end_room(fx, room));
    }
}

impl Gpu {
    /// Creates or changes a room: see [`Event::RoomRequested`].
    ///
    /// # Errors
    /// Why the room cannot be kept free.
    pub fn make_room(
        &mut self,
        cx: Context,
        fx: &mut Effects,
        room: RoomId,
        bytes: u64,
        until: Time,
    ) -> Result<(), RoomObstacle> {
        if self.access == Access::Gone {
            return Err(RoomObstacle::Gone);
        }
        let others = self.others.rooms().filter(|(other, _)| *other != room);
        let rooms = others.fold(0u64, |sum, (_, room)| sum.saturating_add(room.bytes));
        let overhead = self.overhead_wanted(cx.settings).saturating_sub(self.others.kept());
        let beside = overhead.saturating_sub(self.others.taken()).saturating_add(rooms);
        // A room is never refused a size that it was promised before.
        let before = self.others.rooms().find(|(other, _)| *other == room).map_or(0, |(_, room)| room.bytes);
        let most = self.total.saturating_sub(self.reserve(cx.settings)).saturating_sub(beside).max(before);
        if bytes > most {
            return Err(RoomObstacle::TooLarge { most });
        }
        self.others.keep(cx.now, room, bytes, until);
        if self.others.rooms().any(|(other, it)| other == room && it.is_ready) {
            fx.command(Command::RoomReady { room, gpu: self.id });
        }
        fx.touch(self.id);
        Ok(())
    }

    /// Ends a room, if this GPU has it.
    fn end_room(&mut self, fx: &mut Effects, room: RoomId) {
        if self.others.end(room).is_some() {
            fx.touch(self.id);
        }
    }

    /// Ends all rooms on a GPU that is gone.
    pub fn end_rooms(&mut self, fx: &mut Effects) {
        for (room, state) in self.others.rooms().collect::<Vec<_>>() {
            self.end_room(fx, room);
            fx.command(match state.is_ready {
                true => Command::RoomEnded { room, gpu: self.id },
                false => Command::RoomRefused { room, gpu: self.id, why: RoomObstacle::Gone },
            });
        }
    }

    /// Reports rooms that are ready, expired, or impossible. Returns the time of the next check.
    pub fn serve_rooms(&mut self, now: Time, settings: &Settings, fx: &mut Effects) -> Option<Time> {
        self.others.expire(now);
        let mut next = self.others.next();
        for (room, state) in self.others.rooms().collect::<Vec<_>>() {
            if state.until <= now {
                self.end_room(fx, room);
                fx.command(Command::RoomEnded { room, gpu: self.id });
                continue;
            }
            let due = if state.is_ready { state.until } else { state.until.min(state.since + VACATING) };
            if !state.is_ready {
                let why = self.room_obstacle(settings).or((due <= now).then_some(RoomObstacle::Late));
                if self.is_vacated(settings, fx) {
                    self.others.set_ready(room);
                    fx.command(Command::RoomReady { room, gpu: self.id });
                    next = next.into_iter().chain([state.until]).min();
                    continue;
                }
                if let Some(why) = why {
                    self.end_room(fx, room);
                    fx.command(Command::RoomRefused { room, gpu: self.id, why });
                    continue;
                }
            }
            next = next.into_iter().chain([due]).min();
        }
        next
    }

    /// Whether the bytes to be kept free are neither charged nor reserved, and were measured as
    /// free.
    fn is_vacated(&mut self, settings: &Settings, fx: &mut Effects) -> bool {
        let reserved = self.reservations.iter().fold(0u64, |sum, reservation| sum.saturating_add(reservation.secured));
        let room = self.usable(settings).checked_sub(self.ledger.charged().saturating_add(reserved));
        let unverified = self.ledger.unverified();
        let Some(room) = room else { return false };
        if unverified > room {
            self.request_any_verification(fx);
        }
        unverified <= room && !self.is_overdrawn_by_overhead(settings)
    }

    /// Whether contexts and other programs leave too little memory for rooms and headroom, even if
    /// clients used no memory.
    fn is_overdrawn_by_overhead(&self, settings: &Settings) -> bool {
        self.overhead_wanted(settings) > self.total.saturating_sub(self.reserve(settings))
    }

    /// Unevictable memory, if it makes the rooms impossible now.
    fn room_obstacle(&self, settings: &Settings) -> Option<RoomObstacle> {
        let bytes = self.ledger.unevictable().saturating_sub(self.usable(settings));
        (bytes > 0).then_some(RoomObstacle::Unevictable { bytes })
    }

    /// Whether memory still has to be evicted for rooms or headroom.
    pub fn vacates(&self, settings: &Settings) -> bool {
        self.others.kept() > 0 && self.overdrawn(settings) > 0
    }

    /// Whether these clients together need more memory than rooms and headroom leave. Clients with
    /// managed memory do not count, because they can run by page faults. Neither do clients whose managed
    /// memory may exceed the GPU.
    pub fn is_crowded_out(
        &self,
        settings: &Settings,
        rules: &Rules,
        clients: impl IntoIterator<Item = ClientId>,
    ) -> bool {
        if self.access != Access::Turns || self.others.kept() == 0 {
            return false;
        }
        let (mut need, mut unevictable) = (0u64, self.ledger.unevictable());
        for client in clients {
            unevictable = unevictable.saturating_sub(self.unevictable_of(client));
            let pages = |attachment: &Attachment| attachment.engine == Engine::Managed || rules.may_exceed_gpu(client);
            let all = self.attachments.get(&client).filter(|attachment| !pages(attachment));
            need = need.saturating_add(all.map_or(0, |attachment| attachment.account().report.demand));
        }
        need > self.usable(settings).saturating_sub(unevictable)
    }
}
