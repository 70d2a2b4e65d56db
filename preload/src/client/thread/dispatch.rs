//! Carries out the scheduler's messages.

use super::ClientThread;
use crate::{
    client::turn::Turn,
    env::trace::trace,
    gpu::{self, Gpu, memory_limits},
    registry::shared,
};
use alloc::vec::Vec;
use core::time::Duration;
use nvshare_wire::{
    SchedulerMessage, SlotSet,
    scheduler::{Denial, WaitReason},
};
use rustix::fd::OwnedFd;

impl ClientThread {
    /// Carries out one message. Closes descriptors that the message does not use.
    pub(super) fn handle(&mut self, message: SchedulerMessage, descriptors: Vec<OwnedFd>) {
        if let SchedulerMessage::Remark { text } = message {
            return trace!("{}", text.as_str());
        }
        trace!("← {message:?}");
        match message {
            SchedulerMessage::Welcome { .. } => {}
            SchedulerMessage::Refused { text, .. } => self.refused(text.as_str()),
            // Admits no allocation yet, because a later message contains the limit. An allocation made now could
            // exceed that limit permanently.
            SchedulerMessage::Attached { .. } => {}
            SchedulerMessage::Limit { slot, bytes, seq, most, spare, max } => {
                if let Some(gpu) = by_slot(slot) {
                    gpu.uuid().inspect(|uuid| memory_limits::set(*uuid, max));
                    gpu.forget_denials();
                    if let Some(space) = gpu.space() {
                        let mut guard = space.lock();
                        let before = guard.account;
                        guard.limit(seq, bytes, most, spare);
                        guard.account.max = max;
                        gpu.account_changed(&before, &guard.account);
                    }
                    gpu.limit_answers.changed();
                    gpu.admit_context();
                }
            }
            SchedulerMessage::MemoryMax { uuid, bytes } => memory_limits::set(uuid, bytes),
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
                    Denial::Limit => gpu.limit_answers.denied(bytes),
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
            SchedulerMessage::Waiting { gpus, why: WaitReason::Context } => {
                gpu::attached().filter(|gpu| gpus >> gpu.index & 1 == 1).for_each(Gpu::defer_context);
            }
            SchedulerMessage::Waiting { gpus, why: WaitReason::Memory } => {
                let named = gpu::attached().filter(|gpu| gpus >> gpu.index & 1 == 1);
                named.for_each(|gpu| gpu.limit_answers.awaited());
            }
            SchedulerMessage::Waiting { .. } => {}
            SchedulerMessage::Export { ticket, secret, range, allocation, first } => {
                shared::answer(ticket, secret, range, allocation, first)
            }
            SchedulerMessage::Opened { ticket, outcome, bytes, chunk } => {
                shared::answered(ticket, outcome, bytes, chunk, descriptors)
            }
            SchedulerMessage::Adopt { exporter, range } => shared::adopt(exporter, range),
            SchedulerMessage::RunAhead { slot, micros } => {
                by_slot(slot).inspect(|gpu| gpu.work.limit_run_ahead(micros));
            }
            SchedulerMessage::HostMemory { ram, file } => self.set_host_memory(ram, file, descriptors),
            SchedulerMessage::OfferSwapFile {} => self.use_swap_file(),
            SchedulerMessage::PrepareSleep { flags } => self.prepare_sleep(flags),
            SchedulerMessage::Awake { moved } => self.wake_up(moved),
            SchedulerMessage::Resume { .. } => self.resume(),
            SchedulerMessage::Remark { .. } => {}
            // These answers come too late: the driver has already read `CUDA_VISIBLE_DEVICES`.
            SchedulerMessage::Placed { .. } | SchedulerMessage::Unplaced { .. } => {}
        }
    }

    pub(super) fn for_each_turn(&mut self, gpus: SlotSet, mut f: impl FnMut(&mut Turn, &'static Gpu)) {
        for gpu in gpu::attached().filter(|g| gpus >> g.index & 1 == 1) {
            f(self.turn(gpu), gpu);
        }
    }
}

fn by_slot(slot: u32) -> Option<&'static Gpu> {
    gpu::by_ordinal(slot.try_into().ok()?)
}
