//! Carries out the scheduler's messages.

use super::ClientThread;
use crate::{
    client::turn::Turn,
    env::trace::trace,
    gpu::{self, Gpu, rules},
    registry::{checkpoints, shared},
};
use alloc::vec::Vec;
use core::time::Duration;
use nvshare_wire::{
    SchedulerMessage, SlotSet,
    client::LeaveAnswer,
    scheduler::{Denial, WaitReason},
};
use rustix::fd::OwnedFd;

impl ClientThread {
    /// Carries out one message. Closes descriptors that the message does not use.
    pub(super) fn handle(&mut self, message: SchedulerMessage, descriptors: Vec<OwnedFd>) {
        if !matches!(message, SchedulerMessage::Remark { .. }) {
            trace!("← {message:?}");
        }
        match message {
            SchedulerMessage::Welcome { .. } => {}
            SchedulerMessage::Refused { text, .. } => self.on_refusal(text.as_str()),
            // Admits no allocation yet, because a later message contains the limit. An allocation made now could
            // exceed that limit permanently.
            SchedulerMessage::Attached { .. } => {}
            SchedulerMessage::Limit { slot, bytes, seq, most, spare, max } => {
                if let Some(gpu) = by_slot(slot) {
                    gpu.uuid().inspect(|uuid| rules::limit(*uuid, max));
                    gpu.forget_denials();
                    gpu.change(|space| {
                        space.limit(seq, bytes, most, spare);
                        space.account.max = max;
                    });
                    gpu.limit_answers.on_change();
                    gpu.admit_context();
                }
            }
            SchedulerMessage::GpuRules { uuid, memory_max, permissions } => {
                rules::limit(uuid, memory_max);
                rules::permit(uuid, permissions);
                gpu::in_use().filter(|gpu| gpu.uuid() == Some(uuid)).for_each(Gpu::update_permissions);
            }
            SchedulerMessage::Reserved { slot, bytes } => {
                by_slot(slot).inspect(|gpu| gpu.reservation_answers.room(bytes));
            }
            SchedulerMessage::Prepare { slot, bytes } => {
                if let Some((gpu, space)) = by_slot(slot).and_then(|gpu| Some((gpu, gpu.space()?))) {
                    let is_contended = self.turn(gpu).is_contended();
                    let bytes = bytes.min(self.spare_host_memory(is_contended));
                    gpu.moving.lock().prepare(space, &gpu.work.contexts(), bytes);
                }
            }
            SchedulerMessage::Denied { slot, bytes, what } => {
                by_slot(slot).inspect(|gpu| match what {
                    Denial::Limit => gpu.limit_answers.on_denial(bytes),
                    Denial::Context => gpu.refuse_context(),
                    Denial::Mapping => gpu.deny_mapping(bytes),
                });
            }
            SchedulerMessage::Allowance { slot, seq, bytes } => {
                if let Some((gpu, space)) = by_slot(slot).and_then(|gpu| Some((gpu, gpu.space()?))) {
                    let mut guard = space.lock();
                    guard.allow(seq, bytes);
                    if guard.account.ack == seq {
                        gpu.report(&guard.account); // already acknowledged, since no chunk has to be evicted first
                    }
                    self.on(gpu).restore_at = None;
                }
            }
            SchedulerMessage::Grant { gpus } => self.for_each_turn(gpus, |turn, gpu| turn.begin(gpu)),
            SchedulerMessage::Revoke { gpus } => self.for_each_turn(gpus, |turn, gpu| turn.revoke(gpu)),
            SchedulerMessage::Contended { gpus, waiters, grace_us } => {
                let grace = (waiters > 0).then(|| Duration::from_micros(grace_us.into()));
                self.for_each_turn(gpus, |turn, gpu| turn.contend(gpu, grace));
            }
            SchedulerMessage::Waiting { gpus, why } => by_set(gpus).for_each(|gpu| match why {
                WaitReason::Context => gpu.defer_context(),
                WaitReason::Memory => gpu.limit_answers.on_deferral(),
                _ => {}
            }),
            SchedulerMessage::Export { ticket, secret, range, allocation, first } => {
                shared::answer(ticket, secret, range, allocation, first)
            }
            SchedulerMessage::Opened { ticket, outcome, bytes, chunk } => {
                shared::on_answer(ticket, outcome, bytes, chunk, descriptors)
            }
            SchedulerMessage::Adopt { exporter, range } => shared::adopt(exporter, range),
            SchedulerMessage::Unused { range } => shared::on_unused(range),
            SchedulerMessage::RunAhead { slot, micros } => {
                by_slot(slot).inspect(|gpu| gpu.work.limit_run_ahead(micros));
            }
            SchedulerMessage::HostMemory { ram, file } => self.set_host_memory(ram, file, descriptors),
            SchedulerMessage::OfferSwapFile {} => self.use_swap_file(),
            SchedulerMessage::PrepareSleep { flags } => self.prepare_sleep(flags),
            SchedulerMessage::Continue { ticket } => checkpoints::on_answer(ticket),
            SchedulerMessage::Awake { moved } => self.wake_up(moved),
            SchedulerMessage::Leave {} => self.refuse_to_leave(LeaveAnswer::Awake),
            SchedulerMessage::Resume { .. } => self.resume(),
            SchedulerMessage::Remark { text } => trace!("{}", text.as_str()),
            // These answers come too late: the driver has already read `CUDA_VISIBLE_DEVICES`.
            SchedulerMessage::Placed { .. } | SchedulerMessage::Unplaced { .. } => {}
        }
    }

    pub(super) fn for_each_turn(&mut self, gpus: SlotSet, mut f: impl FnMut(&mut Turn, &'static Gpu)) {
        by_set(gpus).for_each(|gpu| f(self.turn(gpu), gpu));
    }
}

fn by_set(gpus: SlotSet) -> impl Iterator<Item = &'static Gpu> {
    gpu::in_use().filter(move |gpu| gpus >> gpu.index & 1 == 1)
}

fn by_slot(slot: u32) -> Option<&'static Gpu> {
    gpu::by_ordinal(slot.try_into().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        client::thread::fake::Client,
        driver::fake::until,
        gpu::limit_request::{Outcome, raise},
        memory::engine::GRANULE,
        submit::closed,
    };
    use nvshare_wire::ClientMessage;
    use std::thread;

    fn set(gpu: &Gpu) -> SlotSet {
        1 << gpu.index
    }

    #[test]
    fn a_grant_and_a_revoke_affect_only_the_named_gpus() {
        let mut client = Client::new(2);
        let [(first, _), (second, _)] = client.gpus[..] else { unreachable!() };
        client.receive(SchedulerMessage::Grant { gpus: set(second) });
        assert_eq!([first, second].map(|gpu| gpu.gate.is_closed_for(closed::LOCK)), [true, false]);
        client.receive(SchedulerMessage::Grant { gpus: set(first) });
        client.receive(SchedulerMessage::Revoke { gpus: set(second) | 1 << 63 });
        assert_eq!([first, second].map(|gpu| gpu.gate.is_closed_for(closed::LOCK)), [false, true]);
        client.step();
        let sent = client.sent();
        assert!(matches!(sent[..], [ClientMessage::Release { gpus, .. }] if gpus == set(second)), "{sent:?}");
    }

    #[test]
    fn a_holder_is_contended_while_other_clients_wait() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        client.grant(gpu);
        for (waiters, is_contended) in [(1, true), (0, false)] {
            client.receive(SchedulerMessage::Contended { gpus: set(gpu), waiters, grace_us: 1_000_000 });
            assert_eq!(client.thread.turn(gpu).is_contended(), is_contended);
        }
    }

    #[test]
    fn an_allowance_is_acknowledged_at_once_if_no_memory_has_to_leave() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        client.allow(gpu, 1, 4);
        client.allocate(gpu, 0);
        client.scheduler.sent();
        let acknowledged = |client: &Client| {
            let sent = client.scheduler.sent();
            let ack = |message: &ClientMessage| match message {
                ClientMessage::Memory { ack, .. } => Some(*ack),
                _ => None,
            };
            sent.iter().filter_map(ack).next_back()
        };
        client.allow(gpu, 2, 1);
        assert_eq!(acknowledged(&client), Some(2));
        client.allow(gpu, 3, 0);
        assert_eq!(acknowledged(&client), None);
        client.step_until(|_| gpu.account().is_some_and(|account| account.ack == 3));
        assert_eq!(acknowledged(&client), Some(3));
    }

    #[test]
    fn a_limit_applies_to_its_gpu_and_admits_the_context() {
        let mut client = Client::new(2);
        let [(first, _), (second, _)] = client.gpus[..] else { unreachable!() };
        let limit = |slot| SchedulerMessage::Limit {
            slot,
            bytes: 3 * GRANULE,
            seq: 9,
            most: 4 * GRANULE,
            spare: 2 * GRANULE,
            max: 5 * GRANULE,
        };
        let before = first.account();
        client.receive(limit(second.index));
        client.receive(limit(u32::MAX));
        let account = second.account().expect("a space");
        assert_eq!((account.limit, account.limit_seq, account.limit_max), (3 * GRANULE, 9, 4 * GRANULE));
        assert_eq!(
            (account.host_cache_max, account.max, second.memory_limit()),
            (2 * GRANULE, 5 * GRANULE, 5 * GRANULE)
        );
        assert_eq!(first.account(), before);
        let sent = client.scheduler.sent();
        assert!(matches!(sent[..], [ClientMessage::Memory { limit_ack: 9, .. }]), "{sent:?}");
    }

    #[test]
    fn a_request_for_a_higher_limit_ends_with_the_schedulers_answer() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        let slot = gpu.index;
        let limit = |bytes, seq| SchedulerMessage::Limit { slot, bytes, seq, most: 8 * GRANULE, spare: 0, max: 0 };
        client.receive(limit(0, 1));
        let denied = SchedulerMessage::Denied { slot, bytes: GRANULE, what: Denial::Limit };
        for (answer, outcome) in [(denied, Outcome::Denied), (limit(GRANULE, 2), Outcome::Raised)] {
            client.scheduler.sent();
            thread::scope(|scope| {
                let asking = scope.spawn(move || raise(gpu, GRANULE, false, 0));
                let mut sent = Vec::new();
                until(|| {
                    sent.extend(client.sent());
                    !sent.is_empty()
                });
                assert_eq!(sent, [ClientMessage::RequestLimit { slot, bytes: GRANULE }]);
                client.receive(answer);
                assert_eq!(asking.join().expect("no panic"), outcome);
            });
        }
    }

    #[test]
    fn buffers_are_prepared_for_a_likely_eviction() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        client.allocate(gpu, 0);
        client.receive(SchedulerMessage::Prepare { slot: gpu.index, bytes: GRANULE });
        client.step_until(|_| gpu.account().is_some_and(|account| account.host_cache == GRANULE));
        assert_eq!(gpu.account().map(|account| account.mapped), Some(GRANULE), "the memory stays on the GPU");
    }
}
