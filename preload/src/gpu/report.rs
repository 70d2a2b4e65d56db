//! The effects of a change of a GPU's memory account: closing the gate, and reporting to the scheduler.

use super::Gpu;
use crate::{
    connection::{self, outbox},
    driver::{context::with_current, query, types::*},
    env::trace::trace,
    memory::{account::Account, space::Space},
    submit::closed,
    sys::{
        rank::{self, Rank},
        sync::Mutex,
    },
};
use core::sync::atomic::Ordering;
use nvshare_wire::{ClientMessage, client as wire};

impl Gpu {
    /// Reports the account to the scheduler, and updates the error of waiting calls. Called after a
    /// change, with the space still locked, so that the last report has the latest state.
    pub fn report(&self, account: &Account) {
        self.send_report(account, u64::MAX);
    }

    /// Runs `moves`, which moves chunks of this GPU's space, and reports the account if chunks have arrived.
    /// The start of a move is not reported: the scheduler would count the memory as restored, and the
    /// client's turn as begun, before the copy is done.
    pub fn report_after<R>(&self, space: &Mutex<Space>, moves: impl FnOnce() -> R) -> R {
        let result = moves();
        let mut guard = space.lock();
        if guard.take_arrivals() {
            self.report(&guard.account);
        }
        result
    }

    /// Reports the account and the bytes that are free on the device. A scheduler without NVML
    /// computes the memory use of other programs from the free bytes. The caller holds the mover's
    /// lock, so that the context is not destroyed.
    pub fn report_measured(&self, account: &Account, context: CUcontext) {
        debug_assert!(rank::holds(Rank::Mover), "the program may destroy the context at any time");
        let free = with_current(context as usize, query::free_memory).ok().flatten();
        self.send_report(account, free.unwrap_or(u64::MAX));
    }

    fn send_report(&self, account: &Account, device_free: u64) {
        self.update_failure(account);
        // The scheduler rejects reports about a GPU that has not been introduced.
        let sent = self.is_introduced()
            && outbox::flush()
            && connection::send(&ClientMessage::Memory {
                slot: self.index,
                ack: account.ack,
                demand: account.demand + account.pinned,
                mapped: account.mapped + account.pinned,
                swapped: account.swapped,
                pinned: account.pinned + if account.unevictable.is_some() { account.mapped } else { 0 },
                device_free,
                limit_ack: account.limit_seq,
                host: account.host(),
                counts: account.counts,
                in_file: account.in_file,
                managed: account.managed,
                managed_mapped: account.pageable_mapped + account.managed_pinned,
            });
        self.unreported.store(!sent, Ordering::SeqCst);
    }

    /// Whether the latest state of the account has not been sent yet.
    pub fn is_unreported(&self) -> bool {
        self.unreported.load(Ordering::SeqCst)
    }

    /// Keeps all memory on the GPU permanently. The first reason is kept.
    pub fn make_unevictable(&self, reason: wire::StuckReason) {
        let Some(space) = self.space() else { return };
        let mut guard = space.lock();
        if guard.account.unevictable.is_none() {
            guard.account.unevictable = Some(reason);
            trace!("GPU {}: keeping memory on the GPU: {reason:?}", self.index);
            self.explain_unevictable(reason);
            self.report(&guard.account);
        }
    }

    /// Tells the scheduler why all memory stays on the GPU. If the GPU has not been introduced yet, its
    /// introduction calls this function again.
    pub(super) fn explain_unevictable(&self, reason: wire::StuckReason) {
        if self.is_introduced() {
            connection::send(&ClientMessage::Stuck { gpus: 1 << self.index, reason });
        }
    }

    /// Changes the program's memory, and updates the gate and the scheduler. Returns `None` if no engine
    /// moves the memory of this GPU.
    pub fn change<R>(&self, change: impl FnOnce(&mut Space) -> R) -> Option<R> {
        let mut guard = self.space()?.lock();
        let before = guard.account;
        let result = change(&mut guard);
        let after = guard.account;
        self.account_changed(&before, &after);
        Some(result)
    }

    /// Changes the number of pinned bytes.
    pub fn pin(&self, change: impl FnOnce(u64) -> u64) {
        self.change(|space| space.account.pinned = change(space.account.pinned));
    }

    /// Changes the number of pinned bytes by changing the number of managed bytes among them.
    pub fn pin_managed(&self, change: impl Fn(u64) -> u64) {
        self.change(|space| {
            space.account.pinned = change(space.account.pinned);
            space.account.managed = change(space.account.managed);
            space.account.managed_pinned = change(space.account.managed_pinned);
        });
    }

    /// Counts an allocation that fails for lack of memory.
    pub fn count_refusal(&self) {
        self.change(|space| space.account.counts.refused += 1);
    }

    /// Records that, according to the scheduler, this client's `bytes` bytes cannot be mapped together.
    pub fn deny_mapping(&self, bytes: u64) {
        if let Some(space) = self.space() {
            let guard = space.lock();
            self.unmappable.store(bytes, Ordering::SeqCst);
            self.update_failure(&guard.account);
        }
    }

    /// Forgets any denial, because the denied allocation was undone or the scheduler has sent a new
    /// answer.
    pub fn forget_denials(&self) {
        self.deny_mapping(0);
    }

    /// Whether memory that was allocated but never used cannot be mapped. Calls that wait for this memory
    /// then fail with `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn is_mapping_denied(&self) -> bool {
        self.failure() == ERROR_OUT_OF_MEMORY
    }

    /// Decides whether calls that wait for this GPU's memory fail. Called with each report, with each
    /// denial, and in each step of the client's thread, while the space is locked. If contents are lost,
    /// such calls fail as after an uncorrectable error of the GPU's memory. No process recovers from such
    /// an error either.
    pub fn update_failure(&self, account: &Account) {
        let unmappable = self.unmappable.load(Ordering::SeqCst);
        let needed = account.demand + account.pinned - account.freeing;
        let is_denied = unmappable != 0 && account.exceeds_peak() && needed >= unmappable;
        if !is_denied {
            self.unmappable.store(0, Ordering::SeqCst); // handled, or no longer valid
        }
        self.set_failure(match account.is_lost {
            true => ERROR_ECC_UNCORRECTABLE,
            false if is_denied => ERROR_OUT_OF_MEMORY,
            false => SUCCESS,
        });
    }

    /// Called before the gate opens for the lock. Closes the gate for memory if memory is missing.
    pub fn close_gate_if_memory_is_missing(&self) {
        if let Some(space) = self.space()
            && !space.lock().account.can_run()
        {
            self.gate.close(closed::MEMORY);
        }
    }

    /// Called after an allocation or a free changed the account. Closes the gate if memory is missing, and
    /// reports the account. Only the client's thread, which knows the copies in flight, opens the gate
    /// again.
    pub fn account_changed(&self, before: &Account, after: &Account) {
        if !after.can_run() {
            self.gate.close(closed::MEMORY);
            if after.may_grow() {
                connection::wake(); // mapping failed, and no message of the scheduler will follow
            }
        } else if self.gate.is_closed_for(closed::MEMORY) {
            connection::wake();
        }
        if before != after {
            self.report(after);
            if self.is_unreported() && connection::is_connected() {
                connection::wake();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        connection::fake::was_woken,
        driver::fake::{Driver, TOTAL, until},
        gpu::fake::{attach, attach_to_scheduler},
        memory::{
            engine::GRANULE,
            mover::{Goal, Step},
        },
        sys::sync::on_client_thread,
    };

    /// Allocates one chunk, and returns the account before and after.
    fn allocate(gpu: &Gpu) -> (Account, Account) {
        let mut space = gpu.space().expect("a space").lock();
        let before = space.account;
        space.allocate(GRANULE, 1, true, &gpu.work).expect("room");
        (before, space.account)
    }

    #[test]
    fn a_report_counts_pinned_memory_as_demand() {
        let driver = Driver::new();
        let (gpu, _, scheduler) = attach_to_scheduler(&driver);
        gpu.pin(|pinned| pinned + GRANULE);
        let sent = scheduler.sent();
        let [ClientMessage::Memory { demand, mapped, pinned, device_free, .. }] = sent[..] else { panic!("{sent:?}") };
        assert_eq!((demand, mapped, pinned, device_free), (GRANULE, GRANULE, GRANULE, u64::MAX));
        gpu.pin(|pinned| pinned);
        assert_eq!(scheduler.sent().len(), 0, "nothing has changed");
    }

    #[test]
    fn a_gpu_is_not_reported_before_its_introduction() {
        let driver = Driver::new();
        let (gpu, _) = attach(&driver);
        let scheduler = crate::connection::fake::Scheduler::connect();
        gpu.count_refusal();
        assert!(gpu.is_unreported() && scheduler.sent().is_empty());
        gpu.introduce(false, |_| {});
        let sent = scheduler.sent();
        assert!(matches!(sent[..], [_, ClientMessage::Memory { counts, .. }] if counts.refused == 1), "{sent:?}");
        assert!(!gpu.is_unreported());
    }

    #[test]
    fn a_report_that_cannot_be_sent_wakes_the_clients_thread() {
        let driver = Driver::new();
        let (gpu, _, scheduler) = attach_to_scheduler(&driver);
        scheduler.stop_reading();
        was_woken();
        gpu.count_refusal();
        assert!(gpu.is_unreported() && was_woken());
        scheduler.sent();
        gpu.report(&gpu.account().expect("a space"));
        assert!(!gpu.is_unreported() && scheduler.sent().len() == 1);
    }

    #[test]
    fn missing_memory_closes_the_gate_and_only_the_clients_thread_opens_it() {
        let driver = Driver::new();
        let (gpu, _, scheduler) = attach_to_scheduler(&driver);
        gpu.space().expect("a space").lock().allow(1, 0);
        was_woken();
        let (before, after) = allocate(gpu);
        gpu.account_changed(&before, &after);
        assert!(gpu.gate.is_closed_for(closed::MEMORY));
        assert!(!was_woken(), "the scheduler's next allowance wakes the thread");
        assert_eq!(scheduler.sent().len(), 1);
        // The program frees the memory.
        gpu.account_changed(&after, &before);
        assert!(gpu.gate.is_closed_for(closed::MEMORY) && was_woken());
    }

    #[test]
    fn memory_that_fits_the_allowance_but_is_not_mapped_wakes_the_clients_thread() {
        let driver = Driver::new();
        let (gpu, _, _scheduler) = attach_to_scheduler(&driver);
        gpu.space().expect("a space").lock().allow(1, GRANULE);
        driver.set_room(0);
        was_woken();
        let (before, after) = allocate(gpu);
        gpu.account_changed(&before, &after);
        assert!(gpu.gate.is_closed_for(closed::MEMORY) && was_woken());
    }

    #[test]
    fn the_gate_closes_before_a_turn_with_missing_memory() {
        let driver = Driver::new();
        let (gpu, _) = attach(&driver);
        gpu.close_gate_if_memory_is_missing();
        assert!(!gpu.gate.is_closed_for(closed::MEMORY));
        gpu.space().expect("a space").lock().allow(1, 0);
        allocate(gpu);
        gpu.close_gate_if_memory_is_missing();
        assert!(gpu.gate.is_closed_for(closed::MEMORY));
    }

    #[test]
    fn a_measured_report_contains_the_free_bytes_of_the_device() {
        let driver = Driver::new();
        let (gpu, context, scheduler) = attach_to_scheduler(&driver);
        let account = gpu.account().expect("a space");
        let measured = || {
            let _mover = gpu.moving.lock();
            gpu.report_measured(&account, context);
            match scheduler.sent()[..] {
                [ClientMessage::Memory { device_free, .. }] => device_free,
                ref sent => panic!("{sent:?}"),
            }
        };
        driver.set_room(TOTAL / 2);
        assert_eq!(measured(), TOTAL / 2);
        driver.fail("cuMemGetInfo_v2", 1, ERROR_INVALID_CONTEXT);
        assert_eq!(measured(), u64::MAX);
        driver.fail("cuCtxPushCurrent_v2", 1, ERROR_INVALID_CONTEXT);
        assert_eq!(measured(), u64::MAX);
    }

    #[test]
    fn a_denied_mapping_applies_only_to_memory_that_no_work_has_used() {
        let driver = Driver::new();
        let (gpu, _) = attach(&driver);
        let space = gpu.space().expect("a space");
        allocate(gpu);
        gpu.deny_mapping(GRANULE);
        assert!(!gpu.is_mapping_denied(), "all of the memory has been on the GPU");
        space.lock().allow(1, GRANULE);
        allocate(gpu);
        assert!(!gpu.is_mapping_denied(), "that denial was forgotten");
        gpu.deny_mapping(3 * GRANULE);
        assert!(!gpu.is_mapping_denied(), "the demand is smaller");
        gpu.deny_mapping(2 * GRANULE);
        assert!(gpu.is_mapping_denied());
        gpu.forget_denials();
        assert!(!gpu.is_mapping_denied());
    }

    #[test]
    fn unevictable_memory_is_explained_once_and_reported_as_pinned() {
        let driver = Driver::new();
        let (gpu, _, scheduler) = attach_to_scheduler(&driver);
        allocate(gpu);
        gpu.make_unevictable(wire::StuckReason::OtherDevice);
        let sent = scheduler.sent();
        let [ClientMessage::Stuck { reason, .. }, ClientMessage::Memory { pinned, mapped, .. }] = sent[..] else {
            panic!("{sent:?}")
        };
        assert_eq!((reason, pinned, mapped), (wire::StuckReason::OtherDevice, GRANULE, GRANULE));
        gpu.make_unevictable(wire::StuckReason::UntrackedWork);
        assert_eq!(scheduler.sent().len(), 0);
    }

    #[test]
    fn a_move_is_reported_when_its_chunk_has_arrived() {
        let driver = Driver::new();
        let (gpu, context, scheduler) = attach_to_scheduler(&driver);
        allocate(gpu);
        let space = gpu.space().expect("a space");
        let step = || {
            let _client = on_client_thread();
            let contexts = gpu.work.contexts();
            gpu.report_after(space, || gpu.moving.lock().step(space, &contexts, Goal::Evict { target: 0 }))
        };
        let stream = driver.streams_of(context)[0];
        driver.keep_busy(stream);
        until(|| {
            step();
            driver.count("cuMemcpyDtoHAsync_v2") == 1
        });
        assert_eq!(scheduler.sent().len(), 0);
        driver.finish(stream);
        until(|| step() == Step::Done { moved: true });
        let sent = scheduler.sent();
        assert!(matches!(sent[..], [ClientMessage::Memory { mapped: 0, swapped: GRANULE, .. }]), "{sent:?}");
    }
}
