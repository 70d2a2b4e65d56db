//! Reservations: room for allocations that the driver makes inside a client's call, such as code,
//! stacks, streams and graphs. A client requests a reservation when the driver found no room.
//! Clients that do not hold the lock then evict that many bytes. The room is kept free for a moment
//! while the client repeats the call.

use super::{Context, Gpu};
use crate::{api::*, effects::Effects};
use std::time::Duration;

/// How long a reservation waits for room. The client waits longer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// How long room is kept after the client was notified. By then, a measurement shows how much of
/// the room the driver took.
const KEPT: Duration = Duration::from_millis(500);
/// A reservation is at most a GPU's size divided by this number. No driver needs more.
const LARGEST_PART: u64 = 4;

#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(crate) struct Reservation {
    pub client: ClientId,
    pub bytes: u64,
    pub since: Time,
    /// Bytes that are free and kept for the client.
    pub secured: u64,
    /// When the client was notified. `None`: the client is still waiting.
    pub answered: Option<Time>,
}

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

impl Gpu {
    /// Handles a client's reservation, which replaces the client's earlier reservation.
    pub fn request_reservation(&mut self, cx: Context, fx: &mut Effects, client: ClientId, bytes: u64) {
        if !self.attachments.contains_key(&client) {
            return;
        }
        self.reservations.retain(|reservation| reservation.client != client);
        let bytes = bytes.min(self.total / LARGEST_PART);
        self.reservations.push(Reservation { client, bytes, since: cx.now, secured: 0, answered: None });
        fx.touch(self.id);
    }

    /// Ends the reservations that have been answered for long enough. Returns the number of the
    /// others.
    pub fn end_reservations(&mut self, now: Time) -> usize {
        self.reservations.retain(|reservation| reservation.answered.is_none_or(|at| now < at + KEPT));
        self.reservations.len()
    }

    /// Reserves free bytes for a waiting reservation. `reserved_ahead` bytes being freed are reserved
    /// for earlier needs. Returns the client and the bytes that are still lacking. `None`: the
    /// reservation does not wait.
    pub fn secure(&mut self, cx: Context, at: usize, reserved_ahead: u64) -> Option<(ClientId, u64)> {
        let Reservation { client, bytes, secured, .. } =
            *self.reservations.get(at).filter(|reservation| reservation.answered.is_none())?;
        let free = if reserved_ahead == 0 { self.free_for(cx, client) } else { 0 };
        let secured = secured + free.min(bytes - secured);
        self.reservations.get_mut(at)?.secured = secured;
        Some((client, bytes - secured))
    }

    /// Answers a reservation that has its bytes or has waited long enough, and adds the needs of
    /// other reservations to `all`. `short`: bytes that the reservation lacks. `rest`: those of them
    /// that only holders can free.
    pub fn answer_reservation(
        &mut self,
        cx: Context,
        fx: &mut Effects,
        at: usize,
        (short, rest): (u64, u64),
        all: &mut ReservationNeeds,
    ) {
        let Some(Reservation { client, since, secured, answered, .. }) = self.reservations.get(at).copied() else {
            return;
        };
        let mut answered = answered;
        let held = self.held_by_others(client);
        if answered.is_none() {
            if short == 0 || rest > held && rest == short || since + TIMEOUT <= cx.now {
                answered = Some(cx.now);
                fx.command(Command::Reserved { client, gpu: self.id, bytes: secured });
            } else {
                all.lacking += short - rest;
                if rest > 0 && held > 0 {
                    (all.short, all.caller) = (all.short.max(rest), Some(client));
                }
            }
        }
        let due = answered.map_or(since + TIMEOUT, |at| at + KEPT);
        all.next = Some(all.next.map_or(due, |next| next.min(due)));
        if let Some(reservation) = self.reservations.get_mut(at) {
            reservation.answered = answered;
        }
    }
}
