//! Memory that cannot leave its GPU, though its client does not run: the host is full, a context is broken, or a client does
//! not answer. Its bytes then count as fixed, others are asked for theirs, and everything is as before when it can.

use super::{
    api::*,
    locks::Hold,
    machine::{Client, Machine},
    timers::Wake,
};
use std::time::Duration;

/// A client that could not evict is asked again after the first, then twice that, at most the second.
const AGAIN: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));
/// An eviction without progress is late after this, or after so many times what it should take.
const LATE: Duration = Duration::from_secs(3);
const LATE_TIMES: u32 = 4;

#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(super) struct Staying {
    pub why: Stay,
}

impl Client {
    /// Why nothing of it can leave that GPU now.
    pub fn stays(&self, id: GpuId) -> Option<Stay> {
        let seat = self.seats.get(&id)?;
        match seat.staying {
            _ if self.stopped => Some(Stay::Stopped),
            _ if seat.hold.as_ref().is_some_and(Hold::is_undrainable) => Some(Stay::Undrainable),
            staying => staying.map(|staying| staying.why),
        }
    }
}

impl Machine {
    /// A client could not carry out an eviction, and has given it up.
    pub(super) fn cannot_evict(&mut self, client: ClientId, gpus: &GpuSet, why: Stay) {
        for id in gpus {
            let Some(account) = self.account(client, *id) else { continue };
            let (mapped, lower) = (account.report.mapped, account.allowance < account.report.mapped);
            let Some(seat) = self.seat_mut(client, *id) else { continue };
            seat.stay_backoff = (seat.stay_backoff * 2).clamp(AGAIN.0, AGAIN.1);
            let until = seat.stay_backoff;
            self.stay(client, *id, why);
            self.timers.set(Wake::Stay(client, *id), Some(self.now + until));
            if lower {
                self.allow(client, *id, mapped); // which it has still; it raises no charge
            }
            self.touch(*id);
        }
    }

    fn stay(&mut self, client: ClientId, id: GpuId, why: Stay) {
        let before = self.change_seat(client, id, |seat| seat.staying.replace(Staying { why }));
        if before.is_some_and(|before| before.is_none_or(|old| old.why != why)) {
            self.out.push(Command::Stays { client, gpu: id, why });
        }
    }

    /// It is worth asking it again.
    pub(super) fn stay_is_over(&mut self, client: ClientId, id: GpuId) {
        if self.seat(client, id).is_some_and(|seat| seat.staying.is_some()) {
            self.change_seat(client, id, |seat| seat.staying = None);
        }
    }

    /// After a report: an eviction that was late, or failed before, may be done.
    pub(super) fn evicted_at_last(&mut self, client: ClientId, id: GpuId) {
        let now = self.now;
        let Some(account) = self.account(client, id) else { return };
        let (done, fits) = (account.eviction.is_none(), account.report.mapped <= account.allowance);
        let progresses = account.eviction.as_ref().is_some_and(|eviction| eviction.progress == now);
        let Some(seat) = self.seat_mut(client, id) else { return };
        let late = seat.staying.is_some_and(|staying| staying.why == Stay::Late);
        if done && fits && seat.staying.is_none() {
            seat.stay_backoff = Duration::ZERO;
        }
        if late && (done || progresses) {
            self.stay_is_over(client, id);
        }
    }

    /// When the eviction that a client was asked for will be late.
    pub(super) fn late_at(&self, client: ClientId, id: GpuId) -> Option<Time> {
        let (seat, gpu) = (self.seat(client, id)?, self.gpus.get(&id)?);
        let account = gpu.ledger.account(client)?;
        let eviction = account.eviction.as_ref().filter(|_| seat.staying.is_none())?;
        let rest = account.report.mapped.saturating_sub(account.allowance);
        Some(eviction.progress.saturating_add(LATE.max(gpu.moving(rest).saturating_mul(LATE_TIMES))))
    }

    pub(super) fn is_late(&mut self, client: ClientId, id: GpuId) {
        self.charge_as_known(client, id);
        self.stay(client, id, Stay::Late);
    }

    /// Takes from a client that does not answer an eviction what it may still map and does not have: it cannot keep that
    /// from others.
    pub(super) fn charge_as_known(&mut self, client: ClientId, id: GpuId) {
        let now = self.now;
        let Some((seat, account)) = self.seat(client, id).zip(self.account(client, id)) else { return };
        // One that cannot drain may be mapping.
        let cannot_drain = seat.hold.as_ref().is_some_and(Hold::is_undrainable);
        let Some(has) = account.unanswered(now).filter(|_| !cannot_drain) else { return };
        if has < account.allowance {
            self.allow(client, id, has);
        }
        self.change_account(client, id, |account| account.charge_as_known(now));
        self.touch(id);
    }
}
