//! Moves each GPU's memory towards its allowance, and does work that other threads have deferred.

use super::{CHORE_INTERVAL, ClientThread};
use crate::{
    connection::{self},
    driver::redirect,
    env::trace::trace,
    gpu::Gpu,
    memory::{
        account::Account,
        foreign_devices,
        mover::{Goal, Step, Stop},
        space::Space,
    },
    registry::shared,
    submit::{Fence, captures, closed},
    sys::{sync::Mutex, time::Instant},
};
use core::time::Duration;
use nvshare_wire::{ClientMessage, client::StuckReason};

/// The interval between checks whether a call that has passed the gate has returned.
const CALL_POLL_INTERVAL: Duration = Duration::from_micros(100);

/// The longest time that an eviction waits for host memory.
const HOST_TIMEOUT: Duration = Duration::from_millis(500);

/// The interval between attempts to restore memory when the GPU has no room.
const RESTORE_RETRY: Duration = Duration::from_millis(50);

/// The longest wait for the confirmation. All work that passed a hook is done before this wait, so any
/// remaining work was submitted without a hook. After this time the client reports that its eviction is
/// stuck, and the scheduler evicts other clients' memory.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);

/// The idle check of one GPU whose memory is about to be evicted. The gate is closed, and all work that
/// passed a hook is done. No such work can start until the eviction ends. The end of the eviction
/// resets the check.
#[derive(Debug, Default)]
pub struct IdleCheck(Option<Asked>);

#[derive(Debug)]
struct Asked {
    since: Instant,
    /// `None` while the driver cannot be queried.
    fence: Option<Fence>,
}

impl IdleCheck {
    /// Whether the driver has confirmed that no work is running. Otherwise returns when to ask again, or
    /// `None` if work that passed no hook is running, or may be running.
    fn ask(&mut self, gpu: &'static Gpu) -> Result<(), Option<Duration>> {
        let asked = self.0.get_or_insert_with(|| Asked { since: Instant::now(), fence: None });
        if gpu.work.has_ended(&mut asked.fence, || gpu.work.fence_of_contexts()) {
            return Ok(());
        }
        if asked.since.elapsed() < IDLE_TIMEOUT {
            return Err(Some(CALL_POLL_INTERVAL));
        }
        trace!("GPU {}: keeping memory on the GPU, because the driver does not report its contexts as idle", gpu.index);
        *self = Self::default();
        Err(None)
    }
}

impl ClientThread {
    /// Moves memory as the allowance demands, and does work that other threads have deferred. Returns the
    /// time until the next call.
    pub(super) fn service(&mut self, gpu: &'static Gpu) -> Duration {
        gpu.work.warm_up_contexts();
        if connection::is_connected() {
            gpu.introduce(false, shared::introduce); // in case `Attach` could not be sent earlier
        }
        let Some(space) = gpu.space() else { return Duration::MAX };
        {
            // Copies whose buffers have been unregistered can be written to a file from here on. No later event
            // would cause the write.
            let mut guard = space.lock();
            if guard.collect_released() {
                gpu.report(&guard.account);
            }
        }
        let mut wait = self.step_files(gpu, space);
        let mut guard = space.lock();
        if guard.has_freed() || guard.pools.has_dying() {
            let before = guard.account;
            guard.reclaim(&gpu.work);
            let after = guard.account;
            gpu.account_changed(&before, &after);
            wait = wait.min(CHORE_INTERVAL);
        }
        if gpu.is_unreported() && connection::is_connected() {
            gpu.report(&guard.account);
            wait = wait.min(CHORE_INTERVAL);
        }
        let (account, can_restore) = (guard.account, guard.can_restore());
        let is_surplus = account.mapped + account.pinned > account.allowance || self.is_preparing_sleep();
        let leaves = is_surplus && self.turn(gpu).is_over();
        // The space is locked, so no thread can change the amount of missing memory between this
        // test and the opening of the gate.
        if account.can_run() && !leaves && gpu.gate.is_closed_for(closed::MEMORY) {
            gpu.gate.open(closed::MEMORY);
        }
        gpu.update_failure(&account); // a restore that has begun is not reported before it is done
        drop(guard);
        let most = account.host_cache_max.max(if can_restore { Self::bytes_to_read(&account) } else { 0 });
        if account.host_cache > most {
            release_surplus(gpu, space, most);
        }
        let (goal, again) = self.goal(gpu, space, &account, can_restore);
        wait.min(again).min(self.move_memory(gpu, space, goal))
    }

    /// Returns the goal for this GPU's memory, and the time until it must be recomputed if no event
    /// occurs earlier.
    fn goal(
        &mut self,
        gpu: &'static Gpu,
        space: &Mutex<Space>,
        account: &Account,
        can_restore: bool,
    ) -> (Goal, Duration) {
        let target = if self.is_preparing_sleep() { 0 } else { account.allowance.saturating_sub(account.pinned) };
        if account.mapped > target || account.mapped + account.pinned > account.allowance {
            if account.unevictable.is_some() {
                give_up_eviction(gpu, space);
                return (Goal::Idle, Duration::MAX);
            }
            return match self.may_evict(gpu) {
                Ok(()) => (Goal::Evict { target }, Duration::MAX),
                Err(Some(again)) => (Goal::Idle, again),
                Err(None) => {
                    self.stop_eviction(gpu, space, StuckReason::UnseenWork);
                    (Goal::Idle, Duration::MAX)
                }
            };
        }
        *self.idle_check(gpu) = IdleCheck::default();
        let now = Instant::now();
        match self.on(gpu).restore_at.filter(|at| now < *at) {
            _ if !can_restore || self.is_preparing_sleep() => (Goal::Idle, Duration::MAX),
            Some(at) => (Goal::Idle, at - now),
            None => (Goal::Restore, Duration::MAX),
        }
    }

    /// Checks that no running work of this client may access this GPU's memory, and that no such
    /// work can start. Otherwise returns when to check again, or `None` if another check is pointless.
    fn may_evict(&mut self, gpu: &'static Gpu) -> Result<(), Option<Duration>> {
        // The scheduler evicts only clients that do not hold the lock. But a release message may still be on
        // its way.
        if !(self.turn(gpu).is_over() && gpu.is_shut() && !captures::any()) {
            *self.idle_check(gpu) = IdleCheck::default();
            return Err(Some(CHORE_INTERVAL));
        }
        // Calls that need only the memory pass the gate until it is closed for memory too.
        if !gpu.gate.is_closed_for(closed::MEMORY) {
            gpu.gate.close(closed::MEMORY);
        }
        let check = self.idle_check(gpu);
        if !gpu.is_quiet() {
            *check = IdleCheck::default(); // a call that needs only the memory gate has passed
            return Err(Some(CALL_POLL_INTERVAL));
        }
        check.ask(gpu)
    }

    /// Moves memory towards the goal by one step. Returns the time until the next step.
    fn move_memory(&mut self, gpu: &'static Gpu, space: &Mutex<Space>, goal: Goal) -> Duration {
        let mut mover = gpu.moving.lock();
        let contexts = gpu.work.contexts();
        if goal == Goal::Idle && mover.is_idle() {
            let _ = mover.choose_context(&contexts);
            return mover.tidy(space, self.tier.is_pageable);
        }
        if matches!(goal, Goal::Evict { .. }) && mover.is_idle() {
            let is_reached = foreign_devices::may_reach_memory();
            if is_reached || redirect::was_refused() {
                gpu.make_unevictable(if is_reached { StuckReason::OtherDevice } else { StuckReason::UntrackedWork });
                return Duration::ZERO;
            }
        }
        let step = gpu.report_after(space, || mover.step(space, &contexts, goal));
        if let (Step::Done { moved: true }, Some(context)) = (step, mover.context()) {
            self.on(gpu).host_full = None;
            // The context is not destroyed while the mover is locked.
            gpu.report_measured(&space.lock().account, context);
            return Duration::ZERO;
        }
        drop(mover);
        match step {
            Step::Busy(after) => return after,
            Step::Done { .. } => {
                self.on(gpu).host_full = None;
                // The gate has stayed closed for chunks that were planned but did not move. The
                // next call of `service` opens the gate.
                let is_closed = gpu.gate.is_closed_for(closed::MEMORY) && space.lock().account.can_run();
                return if is_closed { CHORE_INTERVAL } else { Duration::MAX };
            }
            Step::Stopped(Stop::HostFull)
                if self.on(gpu).host_full.get_or_insert_with(Instant::now).elapsed() < HOST_TIMEOUT
                    || self.is_writing() =>
            {
                return CHORE_INTERVAL; // restoring memory to the GPU or writing it to a file will free host memory
            }
            Step::Stopped(stop) if goal != Goal::Restore => {
                self.on(gpu).host_full = None;
                trace!("GPU {}: eviction stopped: {stop:?}", gpu.index);
                let is_full = stop == Stop::HostFull;
                self.stop_eviction(gpu, space, if is_full { StuckReason::HostFull } else { StuckReason::Broken });
                return Duration::ZERO;
            }
            Step::Stopped(Stop::GpuFull) => {
                self.turn(gpu).no_memory(gpu);
                if self.ungated {
                    self.on(gpu).offline.gpu_is_full();
                }
            }
            // No context works any more. The program's next call returns the driver's error.
            Step::Stopped(_) => gpu.gate.open(closed::MEMORY),
        }
        trace!("GPU {}: {step:?}", gpu.index);
        self.on(gpu).restore_at = Some(Instant::now() + RESTORE_RETRY);
        RESTORE_RETRY
    }

    /// Abandons an eviction whose remaining memory cannot be evicted. The scheduler's records still count
    /// this memory as mapped, and the scheduler evicts other clients.
    fn stop_eviction(&mut self, gpu: &Gpu, space: &Mutex<Space>, reason: StuckReason) {
        give_up_eviction(gpu, space);
        report_stuck(gpu, reason);
        self.cannot_leave(reason);
    }
}

fn give_up_eviction(gpu: &Gpu, space: &Mutex<Space>) {
    let mut guard = space.lock();
    guard.give_up_eviction();
    gpu.report(&guard.account);
}

/// Tells the scheduler why memory stays on the GPU. The scheduler then evicts other clients'
/// memory, and asks this client again later.
fn report_stuck(gpu: &Gpu, reason: StuckReason) {
    connection::send(&ClientMessage::Stuck { gpus: 1 << gpu.index, reason });
}

/// Frees buffers of the host cache beyond `most` bytes.
pub(super) fn release_surplus(gpu: &Gpu, space: &Mutex<Space>, most: u64) {
    let mut guard = space.lock();
    let before = guard.account.host_cache;
    guard.release_surplus(most);
    if guard.account.host_cache < before {
        trace!("GPU {}: freeing host buffers of {} bytes", gpu.index, before - guard.account.host_cache);
    }
    gpu.report(&guard.account);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        client::thread::fake::Client, driver::types::*, memory::engine::GRANULE, submit::threads,
        sys::thread::stack_pointer,
    };
    use nvshare_wire::{SchedulerMessage, client::ReleaseReason};

    const OUT: &str = "cuMemcpyDtoHAsync_v2";
    const IN: &str = "cuMemcpyHtoDAsync_v2";

    fn account(gpu: &Gpu) -> Account {
        gpu.account().expect("a space")
    }

    #[test]
    fn memory_leaves_after_the_turn_and_returns_before_the_gate_opens() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        client.grant(gpu);
        let at = client.allocate(gpu, 5);
        client.allow(gpu, 1, 0);
        for _ in 0..3 {
            client.step();
        }
        assert_eq!((client.driver.count(OUT), gpu.gate.is_closed_for(closed::MEMORY)), (0, false));
        client.receive(SchedulerMessage::Revoke { gpus: 1 << gpu.index });
        client.step_until(|client| client.driver.count(OUT) > 0);
        assert!(gpu.gate.is_closed_for(closed::MEMORY));
        client.step_until(|_| account(gpu).ack == 1);
        assert_eq!((account(gpu).mapped, client.driver.is_mapped(at)), (0, false));
        client.grant(gpu);
        assert!(gpu.gate.is_closed_for(closed::MEMORY));
        client.allow(gpu, 2, 1);
        client.step_until(|_| !gpu.gate.is_closed_for(closed::MEMORY));
        assert_eq!((account(gpu).can_run(), client.driver.word(at)), (true, Some(5)));
    }

    /// Enters the gate like a call that submits no work and needs only the memory.
    fn enter_for_memory(gpu: &Gpu) {
        assert!(gpu.gate.try_enter(gpu.index, threads::mine(), stack_pointer(), closed::MEMORY));
    }

    #[test]
    fn memory_stays_while_a_thread_is_inside_the_gate() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        client.allocate(gpu, 0);
        enter_for_memory(gpu);
        client.allow(gpu, 1, 0);
        for _ in 0..3 {
            client.step();
        }
        assert_eq!(client.driver.count(OUT), 0);
        threads::mine().leave(gpu.index);
        client.step_until(|_| account(gpu).ack == 1);
    }

    #[test]
    fn the_gate_closes_for_memory_although_a_thread_is_inside() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        client.allocate(gpu, 0);
        enter_for_memory(gpu);
        client.allow(gpu, 1, 0);
        client.step();
        assert!(gpu.gate.is_closed_for(closed::MEMORY), "further calls can enter, so the gate may never be quiet");
        threads::mine().leave(gpu.index);
    }

    #[test]
    fn an_eviction_ends_if_work_that_passed_no_hook_does_not() {
        let mut client = Client::new(1);
        let (gpu, context) = client.gpus[0];
        client.allocate(gpu, 0);
        client.driver.keep_busy(client.driver.new_stream(context));
        client.allow(gpu, 1, 0);
        for _ in 0..3 {
            client.step();
        }
        assert_eq!((client.driver.count(OUT), account(gpu).ack), (0, 0));
        client.sent();
        client.thread.on(gpu).idle_check =
            IdleCheck(Some(Asked { since: Instant::ago(Duration::from_secs(60)), fence: None }));
        client.step();
        let gpus = 1 << gpu.index;
        assert_eq!(client.sent(), [ClientMessage::Stuck { gpus, reason: StuckReason::UnseenWork }]);
        assert_eq!((client.driver.count(OUT), account(gpu).ack, account(gpu).mapped), (0, 1, GRANULE));
        client.step();
        assert!(!gpu.gate.is_closed_for(closed::MEMORY), "the program continues");
    }

    #[test]
    fn an_eviction_without_host_memory_waits_and_then_ends() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        client.allocate(gpu, 0);
        client.driver.fail(OUT, usize::MAX, ERROR_INVALID_VALUE);
        client.allow(gpu, 1, 0);
        client.step_until(|client| client.thread.on(gpu).host_full.is_some());
        assert_eq!((client.sent().len(), account(gpu).ack), (0, 0));
        client.thread.on(gpu).host_full = Some(Instant::ago(HOST_TIMEOUT));
        client.step_until(|_| account(gpu).ack == 1);
        let gpus = 1 << gpu.index;
        assert_eq!(client.sent(), [ClientMessage::Stuck { gpus, reason: StuckReason::HostFull }]);
        assert_eq!((account(gpu).mapped, client.thread.on(gpu).host_full), (GRANULE, None));
    }

    #[test]
    fn a_client_whose_memory_finds_no_room_releases_the_lock_and_retries() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        let at = client.allocate(gpu, 3);
        client.evict(gpu, 1);
        client.grant(gpu);
        client.driver.fail(IN, 1, ERROR_OUT_OF_MEMORY);
        client.allow(gpu, 2, 1);
        client.step_until(|client| client.thread.turn(gpu).is_over());
        let sent = client.sent();
        assert!(matches!(sent[..], [ClientMessage::Release { reason: ReleaseReason::NoMemory, .. }]), "{sent:?}");
        let restore_at = client.thread.on(gpu).restore_at.expect("a retry");
        let attempts = client.driver.count(IN);
        client.step();
        assert!(client.driver.count(IN) == attempts || Instant::now() >= restore_at);
        client.thread.on(gpu).restore_at = Some(Instant::now());
        client.step_until(|_| account(gpu).can_run());
        assert_eq!(client.driver.word(at), Some(3));
    }

    #[test]
    fn a_full_gpu_does_not_delay_another() {
        let mut client = Client::new(2);
        let [(first, _), (second, _)] = client.gpus[..] else { unreachable!() };
        for gpu in [first, second] {
            client.allocate(gpu, 0);
            client.evict(gpu, 1);
        }
        client.thread.on(first).restore_at = Some(Instant::now() + Duration::from_secs(3600));
        client.thread.on(first).host_full = Some(Instant::now());
        second.space().expect("a space").lock().allow(2, GRANULE);
        first.space().expect("a space").lock().allow(2, GRANULE);
        client.step_until(|_| account(second).can_run());
        assert_eq!(account(first).mapped, 0);
        assert!(client.thread.on(first).host_full.is_some(), "the move on another GPU has not ended this wait");
        client.thread.on(first).restore_at = None;
        client.step_until(|_| account(first).can_run());
    }

    #[test]
    fn unevictable_memory_is_acknowledged_and_stays() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        client.allocate(gpu, 0);
        gpu.make_unevictable(StuckReason::UntrackedWork);
        client.allow(gpu, 7, 0);
        client.step();
        assert_eq!((account(gpu).ack, account(gpu).mapped, client.driver.count(OUT)), (7, GRANULE, 0));
    }

    #[test]
    fn freed_memory_is_reclaimed_when_its_work_is_done() {
        let mut client = Client::new(1);
        let (gpu, context) = client.gpus[0];
        let at = client.allocate(gpu, 0);
        let stream = crate::gpu::fake::busy_stream(&client.driver, gpu, context);
        gpu.space().expect("a space").lock().free(at, &gpu.work);
        assert_eq!((client.step() <= CHORE_INTERVAL, client.driver.is_mapped(at)), (true, true));
        client.driver.finish(stream);
        client.step();
        assert_eq!((account(gpu).demand, client.driver.is_mapped(at)), (0, false));
    }
}
