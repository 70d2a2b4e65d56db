//! Room for what the driver takes for itself inside a call of a client: code, stacks, streams, graphs. It found none, so
//! that much is freed by those who do not hold the lock, and kept for the client for a moment, in which it tries again.

use super::{api::*, locks::Hold, machine::Machine};
use std::time::Duration;

/// How long room is waited for; the client waits longer.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long room is kept once the client knows of it. What it took of it is measured by then, or soon is.
const KEPT: Duration = Duration::from_millis(500);
/// Nobody is made room for beyond this part of a GPU: that is no driver's need.
const LARGEST_PART: u64 = 4;

#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(super) struct Squeeze {
    client: ClientId,
    bytes: u64,
    since: Time,
    /// Free, and kept from everybody.
    pub secured: u64,
    answered: Option<Time>,
}

/// What squeezed clients wait for.
#[derive(Debug, Default)]
pub(super) struct Squeezed {
    /// Bytes that are on their way out, for them.
    pub lacking: u64,
    /// Bytes that only holders can give, and a client that is not to give them.
    pub short: u64,
    pub caller: Option<ClientId>,
    /// When to look again.
    pub next: Option<Time>,
}

impl Squeeze {
    pub fn is_of(&self, client: ClientId) -> bool {
        self.client == client
    }
}

impl Machine {
    pub(super) fn squeezed(&mut self, client: ClientId, id: GpuId, bytes: u64) {
        let since = self.now;
        if self.seat(client, id).is_none() {
            return;
        }
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        gpu.squeezes.retain(|squeeze| squeeze.client != client);
        let bytes = bytes.min(gpu.total / LARGEST_PART);
        gpu.squeezes.push(Squeeze { client, bytes, since, secured: 0, answered: None });
        self.touch(id);
    }

    /// Secures what is free, and sees to it that the rest is freed; `owed` bytes of what is on its way out are spoken for.
    pub(super) fn serve_squeezed(&mut self, id: GpuId, owed: u64) -> Squeezed {
        let now = self.now;
        let mut all = Squeezed::default();
        let Some(gpu) = self.gpus.get_mut(&id) else { return all };
        gpu.squeezes.retain(|squeeze| squeeze.answered.is_none_or(|at| now < at + KEPT));
        for i in 0..gpu.squeezes.len() {
            let Some(mut squeeze) = self.gpus.get(&id).and_then(|gpu| gpu.squeezes.get(i).copied()) else { break };
            let free = if owed == 0 { self.free_for(squeeze.client, id) } else { 0 };
            if squeeze.answered.is_none() {
                squeeze.secured += free.min(squeeze.bytes - squeeze.secured);
                if let Some(place) = self.gpus.get_mut(&id).and_then(|gpu| gpu.squeezes.get_mut(i)) {
                    place.secured = squeeze.secured; // and so free no longer
                }
                let short = squeeze.bytes - squeeze.secured;
                let before = owed.saturating_add(all.lacking);
                let rest = match short {
                    0 => 0,
                    _ => self.collect(id, before.saturating_add(short), &[squeeze.client], &[]).min(short),
                };
                let held = self.held_by_others(id, squeeze.client);
                if short == 0 || rest > held && rest == short || squeeze.since + PATIENCE <= now {
                    squeeze.answered = Some(now);
                    self.out.push(Command::Room { client: squeeze.client, gpu: id, bytes: squeeze.secured });
                } else {
                    all.lacking += short - rest;
                    if rest > 0 && held > 0 {
                        (all.short, all.caller) = (all.short.max(rest), Some(squeeze.client));
                    }
                }
            }
            let at = squeeze.answered.map_or(squeeze.since + PATIENCE, |at| at + KEPT);
            all.next = Some(all.next.map_or(at, |next| next.min(at)));
            if let Some(place) = self.gpus.get_mut(&id).and_then(|gpu| gpu.squeezes.get_mut(i)) {
                *place = squeeze;
            }
        }
        all
    }

    /// Bytes that holders other than that client could give if they gave the lock back.
    fn held_by_others(&self, id: GpuId, client: ClientId) -> u64 {
        let holders = self.gpus.get(&id).into_iter().flat_map(|gpu| gpu.holders.values());
        let gives = |holder: &&ClientId| {
            let seat = self.seat(**holder, id);
            **holder != client && seat.is_some_and(|seat| !seat.hold.as_ref().is_some_and(Hold::is_aside))
        };
        let movable = holders.filter(gives).filter_map(|holder| Some(self.account(*holder, id)?.movable()));
        movable.fold(0, u64::saturating_add)
    }
}
