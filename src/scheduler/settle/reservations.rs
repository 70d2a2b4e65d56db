//! Serves reservations (see `gpu::reservation`): clients that do not hold the lock evict the
//! requested bytes.

use crate::{api::*, gpu::Gpu, gpu::reservation::Reservation, machine::Machine};
use std::time::Duration;

/// How long a reservation waits for room. The client waits longer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// How long room is kept after the client was notified. By then, a measurement shows how much of
/// the room the driver took.
const KEPT: Duration = Duration::from_millis(500);
/// A reservation is at most a GPU's size divided by this number. No driver needs more.
const LARGEST_PART: u64 = 4;

/// Bytes that reservations wait for.
#[derive(Debug, Default)]
pub(crate) struct ReservationNeeds {
    /// Bytes being freed that are intended for reservations.
    pub lacking: u64,
    /// Bytes that only holders can free.
    pub short: u64,
    /// The client that needs the `short` bytes and is not asked to free them.
    pub caller: Option<ClientId>,
    /// The time of the next check.
    pub next: Option<Time>,
}

impl Machine {
    /// Handles a client's reservation, which replaces the client's earlier reservation.
    pub(crate) fn request_reservation(&mut self, client: ClientId, id: GpuId, bytes: u64) {
        let since = self.now;
        if self.gpus.attachment(client, id).is_none() {
            return;
        }
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        gpu.reservations.retain(|reservation| reservation.client != client);
        let bytes = bytes.min(gpu.total / LARGEST_PART);
        gpu.reservations.push(Reservation { client, bytes, since, secured: 0, answered: None });
        self.touch(id);
    }

    /// Reserves free bytes and evicts memory for the rest. `reserved_ahead` of the bytes being
    /// freed are reserved for earlier needs.
    pub(crate) fn serve_reservations(&mut self, id: GpuId, reserved_ahead: u64) -> ReservationNeeds {
        let now = self.now;
        let mut all = ReservationNeeds::default();
        let Some(gpu) = self.gpus.get_mut(id) else { return all };
        gpu.reservations.retain(|reservation| reservation.answered.is_none_or(|at| now < at + KEPT));
        for i in 0..gpu.reservations.len() {
            let Some(mut reservation) = self.gpus.get(id).and_then(|gpu| gpu.reservations.get(i).copied()) else {
                break;
            };
            let free_for = |gpu: &Gpu| gpu.free_for(self.model().gpu_context(), reservation.client);
            let free = if reserved_ahead == 0 { self.gpus.get(id).map_or(0, free_for) } else { 0 };
            if reservation.answered.is_none() {
                reservation.secured += free.min(reservation.bytes - reservation.secured);
                if let Some(place) = self.gpus.get_mut(id).and_then(|gpu| gpu.reservations.get_mut(i)) {
                    place.secured = reservation.secured; // so that these bytes are not free any more
                }
                let short = reservation.bytes - reservation.secured;
                let before = reserved_ahead.saturating_add(all.lacking);
                let rest = match short {
                    0 => 0,
                    _ => self.collect(id, before.saturating_add(short), &[reservation.client], &[]).min(short),
                };
                let held = self.gpus.get(id).map_or(0, |gpu| gpu.held_by_others(reservation.client));
                if short == 0 || rest > held && rest == short || reservation.since + TIMEOUT <= now {
                    reservation.answered = Some(now);
                    self.effects.command(Command::Reserved {
                        client: reservation.client,
                        gpu: id,
                        bytes: reservation.secured,
                    });
                } else {
                    all.lacking += short - rest;
                    if rest > 0 && held > 0 {
                        (all.short, all.caller) = (all.short.max(rest), Some(reservation.client));
                    }
                }
            }
            let at = reservation.answered.map_or(reservation.since + TIMEOUT, |at| at + KEPT);
            all.next = Some(all.next.map_or(at, |next| next.min(at)));
            if let Some(place) = self.gpus.get_mut(id).and_then(|gpu| gpu.reservations.get_mut(i)) {
                *place = reservation;
            }
        }
        all
    }
}
