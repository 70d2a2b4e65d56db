//! One GPU lock of this client: holding it, releasing it early, and draining after a revoke.
//!
//! This module runs on the client's thread only, and never blocks. Each step checks the state, and
//! returns the time until the next step.

use crate::{
    client::utilization::Utilization,
    connection,
    env::trace::trace,
    gpu::Gpu,
    submit::{Fence, captures, closed},
    sys::time::Instant,
};
use core::time::Duration;
use nvshare_idle_gap::IdleGapPredictor;
use nvshare_wire::{ClientMessage, client::ReleaseReason, client::StuckReason};

/// The interval between polls of a GPU that is finishing its work.
const POLL_INTERVAL: Duration = Duration::from_micros(100);
/// The interval between attempts to send to a scheduler that does not read its socket.
const SEND_RETRY: Duration = Duration::from_millis(2);
/// How long a drain may make no progress while threads wait at the gate. After that, the gate lets
/// copies and flag writes pass. Running kernels may need copies and flag writes in order to end,
/// and these give the GPU little work.
const HELP_AFTER: Duration = Duration::from_millis(200);
/// How long the drain may then make no further progress before the gate lets kernels pass too:
/// `OPEN_AFTER_WORK` times the longest recent duration of submitted work, but at least `OPEN_AFTER` and
/// at most `OPEN_AT_LAST`.
const OPEN_AFTER: Duration = Duration::from_millis(500);
const OPEN_AFTER_WORK: u32 = 3;
const OPEN_AT_LAST: Duration = Duration::from_secs(3);
/// Replaces `OPEN_AFTER` for a client that has never opened the gate for kernels. If the drain of
/// such a client stalls, the likely cause is a kernel that runs longer than all earlier kernels, so
/// the drain gets more time.
const OPEN_FIRST: Duration = Duration::from_secs(2);
/// After this time without progress, a drain is reported even if no thread waits at the gate.
const LONG: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub struct Turn {
    state: TurnPhase,
    /// When the turn began, and the number of submissions at that time.
    began: (Instant, u64),
    /// The minimum time for which a drain may make no progress before the gate opens again for kernels.
    stall_timeout: Duration,
    utilization: Utilization,
    idle_gaps: IdleGapPredictor,
    /// When the client ran out of work, if it released the lock for that reason.
    idle_since: Option<Instant>,
}

#[derive(Debug)]
enum TurnPhase {
    /// The client does not have the lock. The gate is closed, and no work runs.
    Over,
    /// The client has the lock, or runs without a scheduler. `contended` is set if another client waits for
    /// the lock.
    Holding { contended: Option<Contended> },
    /// The gate is closed, and submitted work is finishing.
    Draining(Drain),
    /// All work is done, but the release could not be sent yet.
    Releasing(ReleaseReason),
}

/// The state of a holder while another client waits for the lock. The holder looks for the moment to
/// release it early.
#[derive(Debug)]
struct Contended {
    /// The cost of a hand-over. An idle client keeps the lock for at most this time.
    grace: Duration,
    /// The number of submissions at the last check.
    count: u64,
    /// A fence behind all submissions that `count` includes.
    fence: Option<Fence>,
    /// When the submissions in `count` were done. From then on, the client keeps the lock for `idle_timeout`.
    idle_since: Option<Instant>,
    idle_timeout: Duration,
}

#[derive(Debug)]
struct Drain {
    why: ReleaseReason,
    /// True if the gate lets copies and flag writes pass, because running kernels may need them in order to
    /// end.
    helped: bool,
    fence: Option<Fence>,
    /// The number of completed marks, and when it last changed.
    progress: (u64, Instant),
    reported: bool,
}

impl Default for Turn {
    fn default() -> Self {
        Self {
            state: TurnPhase::Over,
            began: (Instant::now(), 0),
            stall_timeout: OPEN_FIRST,
            utilization: Utilization::new(),
            idle_gaps: IdleGapPredictor::default(),
            idle_since: None,
        }
    }
}

impl Turn {
    pub fn is_over(&self) -> bool {
        matches!(self.state, TurnPhase::Over)
    }

    /// Whether another client waits for the lock that this client has.
    pub fn is_contended(&self) -> bool {
        matches!(self.state, TurnPhase::Holding { contended: Some(_) })
    }

    /// Begins a turn. Called when the lock has been granted.
    pub fn begin(&mut self, gpu: &Gpu) {
        if let Some(since) = self.idle_since.take() {
            self.idle_gaps.record(gpu.request_time().saturating_sub(since.since_start()));
        }
        gpu.request_is_over();
        gpu.set_drained(false);
        gpu.work.set_contended(false);
        gpu.close_gate_if_memory_is_missing();
        self.began = (Instant::now(), gpu.submissions());
        self.utilization.begin_turn();
        self.state = TurnPhase::Holding { contended: None };
        gpu.gate.open(closed::LOCK | closed::KERNELS);
    }

    /// Runs work without turns, because no scheduler has answered yet or the scheduler is gone.
    pub fn run_ungated(&mut self, gpu: &Gpu) {
        if !matches!(self.state, TurnPhase::Holding { .. }) {
            self.begin(gpu);
        }
        self.contend(gpu, None);
    }

    /// Called with `Some` when another client waits for the lock: this client may then stay idle for at
    /// most `grace` before it releases the lock. Called with `None` when no client waits.
    pub fn contend(&mut self, gpu: &Gpu, grace: Option<Duration>) {
        gpu.work.set_contended(grace.is_some());
        if let TurnPhase::Holding { contended } = &mut self.state {
            match (grace, contended) {
                (Some(grace), Some(contended)) => contended.grace = grace,
                (grace, contended) => *contended = grace.map(Contended::new),
            }
        }
    }

    pub fn revoke(&mut self, gpu: &Gpu) {
        if matches!(self.state, TurnPhase::Holding { .. }) {
            self.drain(gpu, ReleaseReason::Revoked);
        }
    }

    pub fn is_held(&self) -> bool {
        matches!(self.state, TurnPhase::Holding { .. })
    }

    /// Whether the scheduler counts this client as a holder.
    pub fn has_lock(&self) -> bool {
        match &self.state {
            TurnPhase::Over => false,
            TurnPhase::Holding { .. } => true,
            TurnPhase::Draining(Drain { why, .. }) | TurnPhase::Releasing(why) => *why != ReleaseReason::Gone,
        }
    }

    /// Releases the lock without a revoke. A client releases a lock that is useless without the locks of
    /// other GPUs.
    pub fn release_early(&mut self, gpu: &Gpu) {
        if self.is_held() {
            self.drain(gpu, ReleaseReason::Idle);
        }
    }

    /// Releases the lock because memory could not be restored. Other clients then run first.
    pub fn no_memory(&mut self, gpu: &Gpu) {
        if matches!(self.state, TurnPhase::Holding { .. }) && connection::is_connected() {
            self.drain(gpu, ReleaseReason::NoMemory);
        }
    }

    /// Ends the turn without a message, because the scheduler that granted the lock is gone.
    pub fn abandon(&mut self, gpu: &Gpu) {
        if matches!(self.state, TurnPhase::Draining(Drain { why: ReleaseReason::Gone, .. })) {
            return;
        }
        if !gpu.gate.is_closed_for(closed::LOCK) || !self.is_over() {
            self.drain(gpu, ReleaseReason::Gone);
        }
    }

    fn drain(&mut self, gpu: &Gpu, why: ReleaseReason) {
        gpu.gate.close(closed::LOCK);
        if let TurnPhase::Holding { contended: Some(contended) } = &self.state {
            // A revoke may cut an idle gap short. Like any other gap, it ends with the client's next request.
            self.idle_since = contended.idle_since.filter(|_| contended.saw_all(gpu));
        }
        gpu.gate.open(closed::KERNELS);
        gpu.set_drained(false); // without a scheduler, `begin` did not run
        let progress = (gpu.work.progress(), Instant::now());
        self.state = TurnPhase::Draining(Drain { why, helped: false, fence: None, progress, reported: false });
    }

    /// Advances the state machine. Returns the time until the next step.
    pub fn step(&mut self, gpu: &Gpu) -> Duration {
        match &mut self.state {
            TurnPhase::Over => {
                if gpu.is_waited_for() && !gpu.is_requested() && connection::is_connected() {
                    gpu.request();
                }
                Duration::MAX
            }
            TurnPhase::Holding { contended: None } => Duration::MAX,
            TurnPhase::Holding { contended: Some(contended) } => match contended.look(gpu, &mut self.idle_gaps) {
                Some(after) => after.min(self.utilization.step(gpu)),
                None => {
                    gpu.gate.close(closed::LOCK);
                    // A thread may have entered before the gate closed.
                    if contended.saw_all(gpu) {
                        self.idle_since = contended.idle_since;
                        self.release(gpu, ReleaseReason::Idle)
                    } else {
                        // The scheduler ignores a request from a holder. So if a thread has requested the lock since,
                        // the client forgets that request too.
                        gpu.request_is_over();
                        gpu.gate.open(closed::LOCK);
                        POLL_INTERVAL
                    }
                }
            },
            TurnPhase::Draining(drain) => match drain.look(gpu, self.stall_timeout) {
                Drained::NotYet => POLL_INTERVAL,
                Drained::Done(why) => self.release(gpu, why),
                Drained::NeedsHost => {
                    trace!("GPU {}: opening the gate, as the drain makes no progress and threads wait", gpu.index);
                    self.stall_timeout = OPEN_AFTER;
                    // From now on the client releases the lock as soon as it has no work.
                    self.state = TurnPhase::Holding { contended: Some(Contended::new(Duration::ZERO)) };
                    gpu.gate.open(closed::LOCK | closed::KERNELS);
                    gpu.request_is_over();
                    // `Stuck` also withdraws the requests of waiting threads, because these threads now continue.
                    connection::send(&ClientMessage::Stuck { gpus: 1 << gpu.index, reason: StuckReason::NeedsHost });
                    POLL_INTERVAL
                }
            },
            TurnPhase::Releasing(why) => {
                let why = *why;
                self.release(gpu, why)
            }
        }
    }

    /// Releases the lock, after all work is done. Requests the lock again if threads wait.
    fn release(&mut self, gpu: &Gpu, reason: ReleaseReason) -> Duration {
        gpu.set_drained(true);
        let (began, count) = self.began;
        let busy_us = began.elapsed().as_micros() as u64;
        let message = ClientMessage::Release { gpus: 1 << gpu.index, reason, busy_us };
        // `Gone` is never sent, because the scheduler that granted the lock is gone.
        if reason != ReleaseReason::Gone && connection::is_connected() && !connection::send(&message) {
            self.state = TurnPhase::Releasing(reason);
            return SEND_RETRY;
        }
        gpu.turn_is_over(gpu.submissions() != count);
        self.state = TurnPhase::Over;
        // The scheduler has ignored any request made during this turn, so the request must be
        // repeated. A waiting thread repeats the request if the thread is awake and sees that no
        // request is pending. Otherwise this thread repeats the request.
        gpu.request_is_over();
        if gpu.is_waited_for() {
            gpu.request();
        }
        Duration::ZERO
    }
}

impl Contended {
    fn new(grace: Duration) -> Self {
        Self { grace, count: u64::MAX, fence: None, idle_since: None, idle_timeout: grace }
    }

    /// Whether no work has been submitted since the last check.
    fn saw_all(&self, gpu: &Gpu) -> bool {
        gpu.is_quiet() && gpu.submissions() == self.count
    }

    /// Returns the time until the next check, or `None` if the client has been idle long enough to release the
    /// lock.
    fn look(&mut self, gpu: &Gpu, idle_gaps: &mut IdleGapPredictor) -> Option<Duration> {
        let count = gpu.submissions();
        if count != self.count || !gpu.is_quiet() || gpu.are_waited_for() {
            self.count = count;
            if let Some(since) = self.idle_since.take() {
                idle_gaps.record(since.elapsed());
            }
            self.fence = None;
            return Some((self.grace / 4).clamp(POLL_INTERVAL, 5 * POLL_INTERVAL));
        }
        if self.idle_since.is_none() {
            if !gpu.work.has_ended(&mut self.fence, || gpu.work.fence()) {
                return Some(if self.fence.is_none() { 10 * POLL_INTERVAL } else { POLL_INTERVAL });
            }
            (self.idle_since, self.idle_timeout) = (Some(Instant::now()), idle_gaps.timeout(self.grace));
        }
        let idle = self.idle_since.map_or(Duration::ZERO, |since| since.elapsed());
        (idle < self.idle_timeout).then(|| (self.idle_timeout - idle).min(5 * POLL_INTERVAL))
    }
}

enum Drained {
    NotYet,
    NeedsHost,
    Done(ReleaseReason),
}

impl Drain {
    fn look(&mut self, gpu: &Gpu, stall_timeout: Duration) -> Drained {
        if gpu.is_quiet() && gpu.work.has_ended(&mut self.fence, || gpu.work.fence()) {
            if !core::mem::take(&mut self.helped) {
                return Drained::Done(self.why);
            }
            // Threads have entered since the gate let copies pass. Closes the gate, so that the next fence covers
            // their work.
            gpu.gate.close(closed::LOCK);
            gpu.gate.open(closed::KERNELS);
            self.fence = None;
            self.progress.1 = Instant::now();
            return Drained::NotYet;
        }
        let done = gpu.work.progress();
        if done != self.progress.0 {
            self.progress = (done, Instant::now());
        }
        let standing = self.progress.1.elapsed();
        let work = gpu.work.slowest().unwrap_or_default();
        let opens_after = (work * OPEN_AFTER_WORK).clamp(stall_timeout, OPEN_AT_LAST);
        let timeout = if self.helped { opens_after } else { HELP_AFTER };
        if standing >= timeout && gpu.has_work_waiting() {
            if self.helped {
                return Drained::NeedsHost;
            }
            trace!(
                "GPU {}: opening the gate for copies and flag writes, as the drain makes no progress and threads wait",
                gpu.index
            );
            self.helped = true;
            self.progress.1 = Instant::now();
            gpu.gate.close(closed::KERNELS);
            gpu.gate.open(closed::LOCK);
        }
        if standing >= LONG && !self.reported {
            self.reported = true;
            let reason = if captures::any() { StuckReason::Capturing } else { StuckReason::LongWork };
            connection::send(&ClientMessage::Stuck { gpus: 1 << gpu.index, reason });
        }
        Drained::NotYet
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        connection::fake::Scheduler,
        driver::{fake::Driver, types::*},
        gpu::fake::{attach_to_scheduler, busy_stream},
        submit::threads::{self, Waits},
        sys::{
            sync::{Held, on_client_thread},
            thread::stack_pointer,
        },
    };

    /// A client that holds the lock of one GPU. The test acts as the client's thread.
    struct Holder {
        turn: Turn,
        gpu: &'static Gpu,
        context: CUcontext,
        scheduler: Scheduler,
        driver: Driver,
        _client: Held,
    }

    impl Holder {
        fn new() -> Self {
            let driver = Driver::new();
            let (gpu, context, scheduler) = attach_to_scheduler(&driver);
            let mut turn = Turn::default();
            gpu.gate.close(closed::LOCK);
            turn.begin(gpu);
            assert!(!gpu.gate.is_closed_for(closed::FOR_ALL));
            Self { turn, gpu, context, scheduler, driver, _client: on_client_thread() }
        }

        fn busy_stream(&self) -> CUstream {
            busy_stream(&self.driver, self.gpu, self.context)
        }

        fn step(&mut self) -> Duration {
            self.turn.step(self.gpu)
        }

        /// Takes steps until the turn is over. Returns the messages of these steps.
        fn end(&mut self) -> alloc::vec::Vec<ClientMessage> {
            let limit = Instant::now() + Duration::from_secs(60);
            while !self.turn.is_over() {
                assert!(Instant::now() < limit, "the turn never ends: {:?}", self.turn);
                self.step();
            }
            self.scheduler.sent()
        }

        /// Moves the last progress of the drain into the past.
        fn stall_for(&mut self, duration: Duration) {
            let TurnPhase::Draining(drain) = &mut self.turn.state else { panic!("{:?}", self.turn) };
            drain.progress.1 = Instant::ago(duration);
        }

        fn gate_is_closed_for(&self) -> u32 {
            let reasons = [closed::LOCK, closed::MEMORY, closed::KERNELS];
            reasons.into_iter().filter(|reason| self.gpu.gate.is_closed_for(*reason)).sum()
        }
    }

    fn is_release(message: &ClientMessage, expected: ReleaseReason) -> bool {
        matches!(message, ClientMessage::Release { reason, .. } if *reason == expected)
    }

    #[test]
    fn a_revoked_turn_ends_when_its_work_is_done() {
        let mut holder = Holder::new();
        let stream = holder.busy_stream();
        holder.turn.revoke(holder.gpu);
        assert_eq!(holder.gate_is_closed_for(), closed::LOCK);
        for _ in 0..3 {
            assert_eq!(holder.step(), POLL_INTERVAL);
        }
        assert!(holder.turn.has_lock() && !holder.gpu.is_drained() && holder.scheduler.sent().is_empty());
        holder.driver.finish(stream);
        let sent = holder.end();
        assert!(matches!(&sent[..], [message] if is_release(message, ReleaseReason::Revoked)), "{sent:?}");
        assert!(holder.gpu.is_drained() && !holder.turn.has_lock());
    }

    #[test]
    fn a_turn_does_not_end_while_a_thread_is_inside_the_gate() {
        let mut holder = Holder::new();
        let (gpu, thread) = (holder.gpu, threads::mine());
        assert!(gpu.gate.try_enter(gpu.index, thread, stack_pointer(), closed::FOR_ALL));
        holder.turn.revoke(gpu);
        assert_eq!((holder.step(), holder.scheduler.sent().len()), (POLL_INTERVAL, 0));
        // The thread submits work before it leaves the gate.
        let stream = holder.busy_stream();
        thread.leave(gpu.index);
        assert_eq!((holder.step(), holder.scheduler.sent().len()), (POLL_INTERVAL, 0));
        holder.driver.finish(stream);
        assert_eq!(holder.end().len(), 1);
    }

    #[test]
    fn a_release_that_cannot_be_sent_is_sent_later() {
        let mut holder = Holder::new();
        holder.turn.revoke(holder.gpu);
        holder.scheduler.stop_reading();
        assert_eq!((holder.step(), holder.step()), (SEND_RETRY, SEND_RETRY));
        assert!(holder.turn.has_lock() && !holder.turn.is_over());
        assert_eq!(holder.gate_is_closed_for(), closed::LOCK);
        holder.scheduler.sent();
        let sent = holder.end();
        assert!(matches!(&sent[..], [message] if is_release(message, ReleaseReason::Revoked)), "{sent:?}");
    }

    #[test]
    fn a_stalled_drain_lets_copies_pass_and_then_kernels() {
        let mut holder = Holder::new();
        let stream = holder.busy_stream();
        holder.turn.revoke(holder.gpu);
        holder.stall_for(HELP_AFTER);
        holder.step();
        assert_eq!(holder.gate_is_closed_for(), closed::LOCK, "no thread waits");
        threads::mine().begin_waiting(holder.gpu.index, Waits::WithWork, Duration::from_secs(60));
        holder.step();
        assert_eq!(holder.gate_is_closed_for(), closed::KERNELS);
        holder.stall_for(OPEN_FIRST);
        holder.step();
        assert_eq!((holder.gate_is_closed_for(), holder.turn.is_held()), (0, true));
        let sent = holder.scheduler.sent();
        assert!(matches!(&sent[..], [ClientMessage::Stuck { reason: StuckReason::NeedsHost, .. }]), "{sent:?}");
        threads::mine().end_waiting();
        holder.driver.finish(stream);
        let sent = holder.end();
        assert!(matches!(&sent[..], [message] if is_release(message, ReleaseReason::Idle)), "{sent:?}");
    }

    /// The client has work that needs the host, so a long kernel is a less likely cause of the next stall.
    #[test]
    fn a_client_that_has_needed_the_host_waits_less_in_its_next_drain() {
        let mut holder = Holder::new();
        holder.busy_stream();
        threads::mine().begin_waiting(holder.gpu.index, Waits::WithWork, Duration::from_secs(60));
        for (timeout, opens) in [(OPEN_AFTER, false), (OPEN_FIRST, true), (OPEN_AFTER, true)] {
            holder.turn.revoke(holder.gpu);
            holder.stall_for(HELP_AFTER);
            holder.step();
            holder.stall_for(timeout);
            holder.step();
            assert_eq!(holder.turn.is_held(), opens, "{timeout:?}");
        }
        threads::mine().end_waiting();
    }

    #[test]
    fn work_that_passed_during_a_drain_is_awaited() {
        let mut holder = Holder::new();
        let stream = holder.busy_stream();
        holder.turn.revoke(holder.gpu);
        threads::mine().begin_waiting(holder.gpu.index, Waits::WithWork, Duration::from_secs(60));
        holder.stall_for(HELP_AFTER);
        holder.step();
        threads::mine().end_waiting();
        // A copy passes the gate, and then the earlier work ends.
        let copy = holder.busy_stream();
        holder.driver.finish(stream);
        assert_eq!(holder.step(), POLL_INTERVAL);
        assert_eq!(holder.gate_is_closed_for(), closed::LOCK);
        assert_eq!((holder.step(), holder.scheduler.sent().len()), (POLL_INTERVAL, 0));
        holder.driver.finish(copy);
        assert_eq!(holder.end().len(), 1);
    }

    #[test]
    fn a_long_drain_is_reported_once() {
        let mut holder = Holder::new();
        holder.busy_stream();
        holder.turn.revoke(holder.gpu);
        for reports in [1, 0] {
            holder.stall_for(LONG);
            holder.step();
            let sent = holder.scheduler.sent();
            assert_eq!(sent.len(), reports);
            let is_long = |message| matches!(message, &ClientMessage::Stuck { reason: StuckReason::LongWork, .. });
            assert!(sent.iter().all(is_long), "{sent:?}");
        }
        assert_eq!(holder.gate_is_closed_for(), closed::LOCK);
    }

    #[test]
    fn an_idle_holder_releases_the_lock_for_a_waiting_client() {
        let mut holder = Holder::new();
        assert_eq!(holder.step(), Duration::MAX, "no client waits");
        holder.turn.contend(holder.gpu, Some(Duration::ZERO));
        let sent = holder.end();
        assert!(matches!(&sent[..], [message] if is_release(message, ReleaseReason::Idle)), "{sent:?}");
        assert_eq!(holder.gate_is_closed_for(), closed::LOCK);
    }

    #[test]
    fn a_holder_with_work_keeps_the_lock() {
        let mut holder = Holder::new();
        let stream = holder.busy_stream();
        holder.turn.contend(holder.gpu, Some(Duration::ZERO));
        for _ in 0..4 {
            holder.step();
        }
        assert!(holder.turn.is_held());
        // Another submission restarts the check.
        let (gpu, thread) = (holder.gpu, threads::mine());
        assert!(gpu.gate.try_enter(gpu.index, thread, stack_pointer(), closed::FOR_ALL));
        thread.leave(gpu.index);
        holder.driver.finish(stream);
        holder.step();
        assert!(holder.turn.is_held() && holder.scheduler.sent().is_empty());
        assert_eq!(holder.end().len(), 1);
    }

    #[test]
    fn a_holder_within_its_grace_keeps_the_lock() {
        let mut holder = Holder::new();
        holder.turn.contend(holder.gpu, Some(Duration::from_secs(3600)));
        for _ in 0..4 {
            assert!(holder.step() <= 5 * POLL_INTERVAL);
        }
        assert!(holder.turn.is_held() && holder.gate_is_closed_for() == 0);
        holder.turn.contend(holder.gpu, None);
        assert_eq!(holder.step(), Duration::MAX);
    }

    #[test]
    fn an_abandoned_turn_drains_and_sends_nothing() {
        let mut holder = Holder::new();
        let stream = holder.busy_stream();
        holder.turn.abandon(holder.gpu);
        assert_eq!((holder.gate_is_closed_for(), holder.turn.has_lock()), (closed::LOCK, false));
        holder.step();
        assert!(!holder.turn.is_over());
        holder.driver.finish(stream);
        assert_eq!(holder.end().len(), 0);
    }

    #[test]
    fn the_lock_is_requested_again_for_threads_that_wait() {
        let mut holder = Holder::new();
        threads::mine().begin_waiting(holder.gpu.index, Waits::WithWork, Duration::from_secs(60));
        holder.turn.revoke(holder.gpu);
        let sent = holder.end();
        threads::mine().end_waiting();
        let gpus = 1 << holder.gpu.index;
        assert!(
            matches!(&sent[..], [ClientMessage::Release { .. }, ClientMessage::Request { gpus: requested }]
                if *requested == gpus),
            "{sent:?}"
        );
    }
}
