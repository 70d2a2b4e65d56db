//! The client's thread: it owns the connection to the scheduler, listens, and acts.
//!
//! It never sleeps while something depends on it: drains and idleness are looked at in short steps ([`turn`]), and only
//! moving memory takes long. Without a scheduler the program runs ungated; the thread keeps trying to reach one.

use crate::{
    client::{
        offline::{Offline, OtherGpus},
        placement,
        turn::Turn,
    },
    connection::{
        self, Connection, handshake, outbox,
        socket::{self, Socket},
        wakeup,
    },
    driver::{self, context::with_current, types::*},
    env::{
        settings,
        trace::{self, trace},
    },
    gate::{closed, threads},
    gpu::{self, Gpu, memory_limits},
    memory::{
        account::Account,
        foreign_devices,
        mover::{Goal, Step, Stop},
        space::Space,
    },
    registry::shared,
    sys::{sync::Mutex, time::Instant},
};
use alloc::{
    string::{String, ToString},
    sync::Arc,
    vec::Vec,
};
use core::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use nvshare_wire::{
    ClientMessage, SchedulerMessage, SlotSet, Text,
    client::StuckReason,
    scheduler::{Denial, WaitReason},
    version,
};
use rustix::fd::OwnedFd;

/// How long a client whose scheduler went away waits for it to come back before it runs ungated.
const RETURN_TIMEOUT: Duration = Duration::from_secs(3);
/// Between attempts to reach a scheduler: at first, and once it has been away for longer.
const RETRY_SOON: Duration = Duration::from_millis(100);
const RETRY_LATE: Duration = Duration::from_secs(2);
/// Between looks at what other threads left to do (a report that did not go, memory that was freed).
const CHORE_INTERVAL: Duration = Duration::from_millis(20);
/// Between looks whether a call of the program's that is under way has ended.
const CALL_POLL_INTERVAL: Duration = Duration::from_micros(100);
/// A connection that ends within this time ends the same absence of a scheduler that it interrupted.
const STEADY: Duration = Duration::from_millis(50);
/// How many messages are handled before other things are seen to.
const MESSAGES_AT_ONCE: u32 = 256;
/// How long an eviction waits for host memory before it is given up.
const HOST_TIMEOUT: Duration = Duration::from_millis(500);
/// Between attempts to bring memory back that found no room.
const RESTORE_RETRY: Duration = Duration::from_millis(50);

/// The id the scheduler gave.
static CLIENT: AtomicU64 = AtomicU64::new(0);

/// Starts the thread, after a first attempt to connect, so that a program's first launch is already gated.
pub fn start(resolve_hooks: impl FnOnce()) -> Start {
    // A first look-up takes the loader's lock, which a thread of the program may hold while it waits at a gate.
    driver::resolve_all();
    resolve_hooks();
    wakeup::init();
    let mut thread = ClientThread::new();
    thread.connect();
    if !connection::is_connected() {
        if settings::get().required {
            thread.report_offline("NVSHARE_REQUIRED is set, so CUDA is not initialised (CUDA_ERROR_SYSTEM_NOT_READY)");
            return Start::NoScheduler;
        }
        thread.run_ungated();
    }
    if threads::spawn(c"nvshare", move || thread.run()) { Start::Started } else { Start::NoThread }
}

/// How [`start`] went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    Started,
    NoThread,
    /// There is no scheduler, and the user said that there must be one.
    NoScheduler,
}

#[derive(Debug)]
struct ClientThread {
    turns: Vec<Turn>,
    /// What takes the scheduler's place while there is none.
    offline: Vec<Offline>,
    socket: Option<Arc<Socket>>,
    /// The protocol version that was agreed on.
    version: u16,
    /// Since when there has been no scheduler; `None` while connected.
    disconnected_since: Option<Instant>,
    /// When the newest connection was made, and since when there had been none.
    connected_at: (Instant, Instant),
    next_try: Instant,
    ungated: bool,
    /// Why there is no scheduler, and whether the user has been told: once a process.
    offline_reason: String,
    reported: bool,
    /// When to try again to bring memory back that found no room.
    restore_at: Option<Instant>,
    /// Since when an eviction has waited for host memory.
    host_full: Option<Instant>,
}

impl ClientThread {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            turns: Vec::new(),
            offline: Vec::new(),
            socket: None,
            version: 0,
            disconnected_since: Some(now),
            connected_at: (now, now),
            next_try: now,
            ungated: false,
            offline_reason: String::new(),
            reported: false,
            restore_at: None,
            host_full: None,
        }
    }

    fn run(mut self) {
        let mut mode = STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a valid place. Nothing this thread does may break a capture of the program's threads.
        unsafe { driver::cuThreadExchangeStreamCaptureMode(&mut mode) };
        loop {
            let mut timeout = self.step();
            let woken = wakeup::receiver();
            if woken.is_none() {
                timeout = timeout.min(CHORE_INTERVAL);
            }
            if let [_, true] = socket::wait([self.socket.as_deref(), woken], timeout) {
                woken.inspect(|receiver| receiver.drain());
            }
            for _ in 0..MESSAGES_AT_ONCE {
                let Some(socket) = &self.socket else { break };
                match socket.receive(self.version) {
                    Ok(Some((message, descriptors))) => self.handle(message, descriptors),
                    Ok(None) => break,
                    Err(why) => self.disconnected(&why),
                }
            }
        }
    }

    /// Does what is due; says how long there is nothing more to do unless a message arrives.
    fn step(&mut self) -> Duration {
        if self.ungated && !core::mem::replace(&mut self.reported, true) && settings::get().asked_for {
            self.report_offline("running without taking turns on the GPU");
        }
        let mut wait = Duration::from_secs(3600);
        if let Some(since) = self.disconnected_since {
            let now = Instant::now();
            if now >= self.next_try {
                self.connect();
                self.next_try = now + if since.elapsed() < 4 * RETURN_TIMEOUT { RETRY_SOON } else { RETRY_LATE };
            }
            if self.disconnected_since.is_some() && !self.ungated && since.elapsed() >= RETURN_TIMEOUT {
                self.run_ungated();
            }
            wait = wait.min(RETRY_SOON);
        }
        if !shared::unmap_closed() || (connection::is_connected() && !outbox::flush()) {
            wait = CHORE_INTERVAL;
        }
        for gpu in gpu::attached() {
            if self.ungated {
                wait = wait.min(self.step_offline(gpu));
            }
            // Locks of peers are held together or not at all.
            if connection::is_connected() && gpu.peers().any(|other| !self.turn(other).is_held()) {
                self.turn(gpu).release_early(gpu);
            }
            wait = wait.min(self.turn(gpu).step(gpu));
            wait = wait.min(self.service(gpu));
        }
        wait
    }

    fn turn(&mut self, gpu: &Gpu) -> &mut Turn {
        let at = gpu.index as usize;
        if self.turns.len() <= at {
            self.turns.resize_with(at + 1, Turn::default);
        }
        &mut self.turns[at]
    }

    fn step_offline(&mut self, gpu: &'static Gpu) -> Duration {
        let at = gpu.index as usize;
        if self.offline.len() <= at {
            self.offline.resize_with(at + 1, Offline::default);
        }
        let turn = self.turn(gpu);
        if turn.is_over() && !gpu.gate.is_closed_for(closed::LOCK) {
            turn.run_ungated(gpu); // it was attached when there was no scheduler
        }
        let mut others = OtherGpus::default();
        for other in gpu::attached().filter(|other| other.index != gpu.index) {
            let Some(there) = self.offline.get(other.index as usize) else { continue };
            others.before |= there.waits() && other.uuid() < gpu.uuid();
            others.after |= there.waits() && other.uuid() > gpu.uuid();
            others.asked |= there.is_asked() && gpu.is_peer_of(other);
        }
        match (self.offline.get_mut(at), self.turns.get_mut(at)) {
            (Some(offline), Some(turn)) => offline.step(gpu, turn, others, CLIENT.load(Ordering::Relaxed) != 0),
            _ => Duration::MAX,
        }
    }

    /// Moves memory to where the allowance wants it, and does what other threads left.
    fn service(&mut self, gpu: &'static Gpu) -> Duration {
        gpu.work.warm_up_contexts();
        if connection::is_connected() {
            gpu.introduce(shared::introduce); // if that did not go at once
        }
        let Some(space) = gpu.space() else { return Duration::MAX };
        let mut wait = Duration::MAX;
        let mut guard = space.lock();
        if guard.has_freed() {
            let before = guard.account;
            guard.reclaim(&gpu.work);
            let after = guard.account;
            gpu.account_changed(&before, &after);
            wait = CHORE_INTERVAL;
        }
        if gpu.is_unreported() && connection::is_connected() {
            gpu.report(&guard.account);
            wait = wait.min(CHORE_INTERVAL);
        }
        let (account, can_restore) = (guard.account, guard.can_restore());
        let leaves = account.mapped + account.pinned > account.allowance && self.turn(gpu).is_over();
        // Under the lock: nobody can make it lacking between the look and the opening.
        if account.can_run() && !leaves && gpu.gate.is_closed_for(closed::MEMORY) {
            gpu.gate.open(closed::MEMORY);
        }
        drop(guard);
        if account.host_cache > account.host_cache_max {
            trim_host_cache(gpu, space);
        }
        let (goal, again) = self.goal(gpu, space, &account, can_restore);
        wait.min(again).min(self.move_memory(gpu, space, goal))
    }

    /// Where the memory is to go now, and when to ask again whatever happens.
    fn goal(&mut self, gpu: &Gpu, space: &Mutex<Space>, account: &Account, can_restore: bool) -> (Goal, Duration) {
        if account.mapped + account.pinned > account.allowance {
            if account.unevictable {
                give_up_eviction(gpu, space);
                return (Goal::Idle, Duration::MAX);
            }
            // The scheduler evicts only those that do not hold the lock, but a release may still be on its way.
            if !(self.turn(gpu).is_over() && gpu.is_drained()) {
                return (Goal::Idle, CHORE_INTERVAL);
            }
            if !gpu.gate.is_closed_for(closed::MEMORY) {
                gpu.gate.close(closed::MEMORY);
            }
            if !gpu.is_quiet() {
                return (Goal::Idle, CALL_POLL_INTERVAL); // one that needs only the memory has slipped in
            }
            return (Goal::Evict { target: account.allowance.saturating_sub(account.pinned) }, Duration::MAX);
        }
        let now = Instant::now();
        match self.restore_at.filter(|at| now < *at) {
            _ if !can_restore => (Goal::Idle, Duration::MAX),
            Some(at) => (Goal::Idle, at - now),
            None => (Goal::Restore, Duration::MAX),
        }
    }

    /// Says after how long to look again.
    fn move_memory(&mut self, gpu: &'static Gpu, space: &Mutex<Space>, goal: Goal) -> Duration {
        let mut mover = gpu.moving.lock();
        let contexts = gpu.work.contexts();
        if goal == Goal::Idle && mover.is_idle() {
            let _ = mover.settle(&contexts);
            return mover.tidy(space);
        }
        if matches!(goal, Goal::Evict { .. }) && mover.is_idle() && foreign_devices::may_reach_memory() {
            trace!("GPU {}: a device other than GPUs may reach its memory", gpu.index);
            gpu.make_unevictable();
            return Duration::ZERO;
        }
        let step = mover.step(space, &contexts, goal, &|account| gpu.report(account));
        let context = mover.context();
        drop(mover);
        match step {
            Step::Busy(after) => return after,
            Step::Done { moved } => {
                self.host_full = None;
                if let (true, Some(context)) = (moved, context) {
                    gpu.report_measured(&space.lock().account, context);
                    return Duration::ZERO;
                }
                // What was planned and not begun was in the way of opening the gate.
                let is_closed = gpu.gate.is_closed_for(closed::MEMORY) && space.lock().account.can_run();
                return if is_closed { CHORE_INTERVAL } else { Duration::MAX };
            }
            Step::Stopped(Stop::HostFull)
                if self.host_full.get_or_insert_with(Instant::now).elapsed() < HOST_TIMEOUT =>
            {
                return CHORE_INTERVAL; // whoever comes back to the GPU frees host memory
            }
            Step::Stopped(stop) if goal != Goal::Restore => {
                self.host_full = None;
                trace!("GPU {}: eviction stopped: {stop:?}", gpu.index);
                // What is left cannot leave: the scheduler sees it mapped, and carries on with others.
                give_up_eviction(gpu, space);
                report_stuck(gpu, stop);
                return Duration::ZERO;
            }
            Step::Stopped(Stop::GpuFull) => self.turn(gpu).no_memory(gpu),
            // No context works any more: what the program calls next tells it so.
            Step::Stopped(_) => gpu.gate.open(closed::MEMORY),
        }
        trace!("GPU {}: {step:?}", gpu.index);
        self.restore_at = Some(Instant::now() + RESTORE_RETRY);
        RESTORE_RETRY
    }

    // ---- the connection ----

    /// The one line that matters to whoever wants nvshare for this program.
    fn report_offline(&self, consequence: &str) {
        let (path, why) = (settings::get().socket.escape_ascii(), &self.offline_reason);
        trace::line(format_args!("no scheduler at {path} ({why}): {consequence}"));
    }

    fn connect(&mut self) {
        let connected = placement::take_connection();
        let connected = connected.unwrap_or_else(|| handshake::connect(&hello()));
        let (socket, version, id) = match connected {
            Ok(connected) => connected,
            Err(why) => {
                trace!("no scheduler: {why}");
                self.offline_reason = why;
                return;
            }
        };
        trace!("client {id}, protocol version {version}");
        let is_first = CLIENT.swap(id, Ordering::Relaxed) == 0;
        let socket = Arc::new(socket);
        self.socket = Some(socket.clone());
        shared::announce_exporter(version);
        connection::set_connection(Some(Connection { socket, version }));
        let now = Instant::now();
        self.connected_at = (now, self.disconnected_since.filter(|_| !is_first).unwrap_or(now));
        (self.version, self.disconnected_since, self.ungated, self.restore_at) = (version, None, false, None);
        for gpu in gpu::attached().filter(|gpu| !gpu.is_refused()) {
            if let Some(offline) = self.offline.get_mut(gpu.index as usize) {
                offline.end(gpu);
            }
            // This scheduler knows of no turn: what runs is drained, and whoever has work asks anew.
            gpu.request_is_over();
            self.turn(gpu).abandon(gpu);
            gpu.introduce(shared::introduce);
        }
        connection::begin_generation();
    }

    /// There is a new scheduler on the connection to the one before. It is told everything, the locks that are held too.
    fn resume(&mut self) {
        trace!("a new scheduler has the connection");
        let Some(socket) = self.socket.clone() else { return };
        // What was sent before and not read is in the way until it is thrown away there.
        if !(socket.wait_for_room() && connection::send(&hello()) && handshake::announce_limits(&socket, self.version))
        {
            return self.disconnected("it does not read");
        }
        // From here on nothing is thrown away that any thread says.
        shared::announce_exporter(self.version);
        let mut held = 0;
        for gpu in gpu::attached() {
            gpu.introduce_again(shared::introduce);
            if !gpu.is_introduced() && !gpu.is_refused() {
                return self.disconnected("it does not read");
            }
            let turn = self.turn(gpu);
            turn.contend(gpu, None);
            held |= u64::from(turn.has_lock()) << gpu.index;
        }
        if !(outbox::flush() && connection::send(&ClientMessage::Held { gpus: held })) {
            return self.disconnected("it does not read");
        }
        // A request that another thread made meanwhile may have been thrown away, so whoever waits asks anew.
        // So may a wish.
        for gpu in gpu::attached() {
            gpu.request_is_over();
            gpu.limit_answers.changed();
        }
        self.restore_at = None;
        connection::begin_generation();
    }

    fn disconnected(&mut self, why: &str) {
        trace!("the scheduler is gone: {why}");
        self.socket = None;
        connection::set_connection(None);
        let now = Instant::now();
        let (met, away) = self.connected_at;
        let since = if now - met < STEADY { away } else { now };
        // One that keeps ending is not worth an attempt at once: each stops the program for a moment.
        let next_try = if since == now { now } else { now + RETRY_LATE };
        (self.disconnected_since, self.next_try, self.offline_reason) = (Some(since), next_try, why.to_string());
        for gpu in gpu::attached() {
            gpu.forget_introduction();
            gpu.limit_answers.changed();
        }
    }

    /// No scheduler: whatever fits runs. Memory comes back as there is room, and its program waits until it is there.
    fn run_ungated(&mut self) {
        self.ungated = true;
        for gpu in gpu::attached() {
            gpu.admit_context();
            gpu.forget_denials();
            if let Some(space) = gpu.space() {
                space.lock().run_ungated(gpu.total());
            }
            self.turn(gpu).run_ungated(gpu);
        }
    }

    // ---- what the scheduler says ----

    /// Descriptors that belong to nothing are closed.
    fn handle(&mut self, message: SchedulerMessage, descriptors: Vec<OwnedFd>) {
        if let SchedulerMessage::Remark { text } = message {
            return trace!("{}", text.as_str());
        }
        trace!("← {message:?}");
        match message {
            SchedulerMessage::Welcome { .. } => {}
            SchedulerMessage::Refused { text, .. } => self.disconnected(text.as_str()),
            // The limit follows; what is allocated before it is known could be too much for ever.
            SchedulerMessage::Attached { .. } => {}
            SchedulerMessage::Limit { slot, bytes, seq, most, spare, max } => {
                if let Some(gpu) = by_slot(slot) {
                    gpu.uuid().inspect(|uuid| memory_limits::set(*uuid, max)); // an older scheduler says it only here
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
                        gpu.report(&guard.account); // nothing has to leave first
                    }
                }
                self.restore_at = None;
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
            SchedulerMessage::Resume { .. } => self.resume(),
            SchedulerMessage::Remark { .. } => {}
            // It came too late: the driver has seen what it has seen.
            SchedulerMessage::Placed { .. } | SchedulerMessage::Unplaced { .. } => {}
        }
    }

    fn for_each_turn(&mut self, gpus: SlotSet, mut f: impl FnMut(&mut Turn, &'static Gpu)) {
        for gpu in gpu::attached().filter(|g| gpus >> g.index & 1 == 1) {
            f(self.turn(gpu), gpu);
        }
    }
}

/// How this process introduces itself.
pub fn hello() -> ClientMessage {
    ClientMessage::Hello {
        min_version: version::MIN,
        max_version: version::MAX,
        flags: 0,
        resume: CLIENT.load(Ordering::Relaxed),
        gang: settings::get().gang,
        library: Text::new(env!("CARGO_PKG_VERSION")),
    }
}

fn give_up_eviction(gpu: &Gpu, space: &Mutex<Space>) {
    let mut guard = space.lock();
    guard.give_up_eviction();
    gpu.report(&guard.account);
}

/// The scheduler then asks others for their memory, and this client again later.
fn report_stuck(gpu: &Gpu, stop: Stop) {
    let reason = match stop {
        Stop::HostFull => StuckReason::HostFull,
        Stop::Broken | Stop::GpuFull => StuckReason::Broken,
    };
    if connection::speaks(version::LIMITS) {
        connection::send(&ClientMessage::Stuck { gpus: 1 << gpu.index, reason });
    }
}

/// Gives host memory back that holds nothing that is needed, since others need it.
fn trim_host_cache(gpu: &Gpu, space: &Mutex<Space>) {
    let mover = gpu.moving.lock();
    let surplus = space.lock().take_surplus();
    if let Some(context) = mover.context() {
        let _ = with_current(context as usize, || drop(surplus));
    }
    gpu.report(&space.lock().account);
}

fn by_slot(slot: u32) -> Option<&'static Gpu> {
    gpu::by_ordinal(slot.try_into().ok()?)
}
