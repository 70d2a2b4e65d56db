//! Those who are about to create a context: room is made for it first, or they wait.

use super::{
    api::*,
    gangs::Gang,
    limits::{LIMIT_STEP, PROMISE_PATIENCE},
    machine::{Machine, Newcomer},
};
use std::collections::BTreeSet;
use std::time::Duration;

/// How long a client that has had room made for its context, and has not used it yet, may still be about to create it: the
/// driver creates one after the other, and some take more than a second.
const CONTEXT_APPEARS: Duration = Duration::from_secs(10);

/// How long a client waits for a context beside which another one could not run, unless its rule has allocations wait.
const CONTEXT_TIMEOUT: Duration = Duration::from_secs(30);

/// A program that attaches is not kept longer than this: where strangers leave no room, it gets the driver's own answer.
const ATTACH_PATIENCE: Duration = Duration::from_secs(2);

impl Machine {
    /// Whether a client's context was there, all of it, at a moment not before `begun`.
    pub fn has_context(&self, client: ClientId, id: GpuId, begun: Time) -> bool {
        let Some(seat) = self.seat(client, id) else { return false };
        let there = seat.attached.map(|allowed| {
            let at_last = allowed.saturating_add(CONTEXT_APPEARS);
            seat.used.map_or(at_last, |used| used.max(allowed).min(at_last))
        });
        there.is_some_and(|there| there <= begun)
    }

    /// Counts those who would leave a client that is there too little, by their context: it could never have all that it
    /// needs on the GPU again, and so never run. They wait until it needs less, or has gone.
    pub(super) fn keep_out(&mut self, id: GpuId) {
        let Some(gpu) = self.gpus.get(&id) else { return };
        if gpu.attaching.is_empty() && gpu.kept_out == 0 {
            return;
        }
        // One that did not wait (an older library does not) has its context already.
        let waits = |newcomer: &Newcomer| {
            let state = self.clients.get(&newcomer.client);
            let needs_nothing = gpu.ledger.account(newcomer.client).is_some_and(|account| account.report.demand == 0);
            needs_nothing && state.is_some_and(|client| client.waiting.is_none())
        };
        let waiting = gpu.attaching.iter().rev().take_while(|newcomer| waits(newcomer)).count();
        let newcomers = gpu.attaching.iter().filter_map(|newcomer| self.clients.get(&newcomer.client));
        let gangs: BTreeSet<Gang> = newcomers.filter_map(|client| client.gang).collect();
        let unmeasured = gpu.unmeasured.len().saturating_sub(gpu.attaching.len());
        let taken = gpu.measured.unwrap_or(0).saturating_add(gpu.contexts(&self.settings, unmeasured));
        let capacity = gpu.total.saturating_sub(gpu.reserve(&self.settings)).saturating_sub(taken);
        let needs = gpu.seats.iter().filter_map(|client| {
            let state =
                self.clients.get(client).filter(|state| state.gang.is_none_or(|gang| !gangs.contains(&gang)))?;
            state.seats.get(&id).filter(|seat| seat.attached.is_some() && seat.engine != Engine::Managed)?;
            Some(gpu.ledger.account(*client)?.seen_to_need())
        });
        // What is not possible as it is does not depend on them.
        let most = needs.filter(|need| (1..=capacity).contains(need)).max();
        let room = most.and_then(|most| (capacity - most).checked_div(gpu.contexts(&self.settings, 1)));
        let room = room.map_or(usize::MAX, |room| usize::try_from(room).unwrap_or(usize::MAX));
        let kept_out = gpu.attaching.len().saturating_sub(room).min(waiting);
        if let Some(gpu) = self.gpus.get_mut(&id) {
            gpu.kept_out = kept_out;
        }
    }

    /// Says to those who are kept out that this may take long.
    fn tell_newcomers(&mut self, id: GpuId) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        let from = gpu.attaching.len() - gpu.kept_out;
        for newcomer in gpu.attaching.iter_mut().skip(from).filter(|newcomer| !newcomer.told) {
            newcomer.told = true;
            let (client, why) = (newcomer.client, WaitReason::Context);
            self.out.push(Command::Waiting { client, gpus: GpuSet::from([id]), why });
        }
    }

    /// Answers those who attach and for whom room is made, or who waited long enough.
    pub(super) fn answer_attaching(&mut self, id: GpuId) -> Option<Time> {
        loop {
            self.keep_out(id);
            let gpu = self.gpus.get_mut(&id)?;
            let behind = gpu.attaching.len().checked_sub(1 + gpu.kept_out);
            let &Newcomer { client, since, .. } = gpu.attaching.front()?;
            let Some(behind) = behind else {
                self.tell_newcomers(id);
                return self.refuse_contexts(id);
            };
            let patience = since + ATTACH_PATIENCE;
            // Capacity leaves out the contexts of all who wait; those behind this one may still be without.
            let behind = gpu.contexts(&self.settings, behind);
            let doubted = self.ask_about_doubts(client, id);
            let gpu = self.gpus.get(&id)?;
            let room =
                gpu.capacity(&self.settings).saturating_add(behind) >= gpu.ledger.charged().saturating_add(doubted);
            let squeezed = gpu.total.saturating_sub(gpu.reserve(&self.settings))
                < gpu.overhead_wanted(&self.settings).saturating_sub(behind);
            if (!room || squeezed || gpu.incomplete) && self.now < patience {
                return Some(patience);
            }
            if !self.is_promised(client, id) {
                let promised = since + PROMISE_PATIENCE;
                if self.host.has_changed() {
                    return None; // promises are weighed next
                }
                if self.now < promised {
                    return Some(promised);
                }
            }
            let now = self.now;
            self.gpus.get_mut(&id)?.attaching.pop_front();
            if let Some(seat) = self.seat_mut(client, id) {
                seat.attached = Some(now);
            }
            self.out.push(Command::Attached { client, gpu: id });
            self.tell_limit(client, id);
        }
    }

    /// Tells those that have waited for long, while there is no room for anybody, that there is none for their contexts. One
    /// that gives up detaches; an older library waits on. Returns when the next is told.
    fn refuse_contexts(&mut self, id: GpuId) -> Option<Time> {
        let waiting = self.gpus.get(&id).into_iter().flat_map(|gpu| &gpu.attaching);
        let waiting: Vec<(ClientId, Time)> =
            waiting.filter(|newcomer| !newcomer.refused).map(|newcomer| (newcomer.client, newcomer.since)).collect();
        let mut next: Option<Time> = None;
        for (client, since) in waiting {
            if self.waits_for_memory(client) {
                continue;
            }
            let due = since + CONTEXT_TIMEOUT;
            if self.now < due {
                next = Some(next.map_or(due, |next| next.min(due)));
                continue;
            }
            let attaching = self.gpus.get_mut(&id).into_iter().flat_map(|gpu| &mut gpu.attaching);
            attaching.filter(|newcomer| newcomer.client == client).for_each(|newcomer| newcomer.refused = true);
            self.out.push(Command::Denied { client, gpu: id, bytes: 0, why: Denial::NoContext });
        }
        next
    }

    /// Whether somebody who attaches has been promised what it is to be.
    fn is_promised(&self, client: ClientId, id: GpuId) -> bool {
        let promise = self.seat(client, id).map(|s| &s.promise);
        promise.is_some_and(|p| p.seq > 0 && p.limit.saturating_add(LIMIT_STEP) >= p.target)
    }
}
