//! The link to the scheduler: one thread that owns the connection, listens, and acts.
//!
//! It never sleeps while something depends on it: drains and idleness are looked at in short steps ([`turn`]), and only
//! moving memory takes long. Without a scheduler the program runs ungated; the thread keeps trying to reach one.

use crate::{
    client,
    client::Connection,
    cuda::*,
    driver,
    gate::{Gate, closed},
    gpu::{self, Gpu},
    hooks,
    memory::mover::{self, Stop},
    settings,
    socket::{self, Socket},
    sys::{sync::OnceLock, thread, time::Instant},
    trace,
    trace::trace,
    turn::Turn,
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
use nvshare_wire::{ClientMessage, SchedulerMessage, SlotSet, Text, version};

/// How long a client whose scheduler went away waits for it to come back before it runs ungated.
const RETURN_PATIENCE: Duration = Duration::from_secs(3);
/// Between attempts to reach a scheduler: at first, and once it has been away for longer.
const RETRY_SOON: Duration = Duration::from_millis(100);
const RETRY_LATE: Duration = Duration::from_secs(2);
/// Between looks at what other threads left to do (a report that did not go, memory that was freed).
const CHORES: Duration = Duration::from_millis(20);
/// A connection that ends within this time ends the same absence of a scheduler that it interrupted.
const STEADY: Duration = Duration::from_millis(50);
/// How many messages are handled before other things are seen to.
const MESSAGES_AT_ONCE: u32 = 256;
/// Between attempts to bring memory back that found no room.
const RESTORE_AGAIN: Duration = Duration::from_millis(50);

/// Wakes the thread when another has left something to do: what is sent to the one arrives at the other.
static WAKE: OnceLock<(Socket, Socket)> = OnceLock::new();
/// The id the scheduler gave.
static CLIENT: AtomicU64 = AtomicU64::new(0);

/// Another thread has left something to do: a report that did not go, memory that is to be taken back.
pub fn wake() {
    if let Some((sender, _)) = WAKE.get() {
        sender.send(&[1]);
    }
}

/// Starts the thread, after a first attempt to connect, so that a program's first launch is already gated.
pub fn start() -> Start {
    // A first look-up takes the loader's lock, which a thread of the program may hold while it waits at a gate.
    driver::resolve_all();
    hooks::all().for_each(|hook| {
        hook.real.address();
    });
    if let Some(pair) = socket::pair() {
        let _ = WAKE.set(pair);
    }
    let mut link = Link::new();
    link.connect();
    if !client::is_connected() {
        if settings::get().required {
            link.complain("NVSHARE_REQUIRED is set, so CUDA is not initialised (CUDA_ERROR_SYSTEM_NOT_READY)");
            return Start::NoScheduler;
        }
        link.run_ungated();
    }
    if thread::spawn(c"nvshare", move || link.run()) { Start::Started } else { Start::NoThread }
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
struct Link {
    turns: Vec<Turn>,
    socket: Option<Arc<Socket>>,
    /// The protocol version that was agreed on.
    version: u16,
    /// Since when there has been no scheduler; `None` while connected.
    away: Option<Instant>,
    /// When the newest connection was made, and since when there had been none.
    met: (Instant, Instant),
    next_try: Instant,
    ungated: bool,
    /// Why there is no scheduler, and whether the user has been told: once a process.
    why_away: String,
    said: bool,
    /// When to try again to bring memory back that found no room.
    restore_at: Option<Instant>,
}

impl Link {
    fn new() -> Self {
        let now = Instant::now();
        Self {
            turns: Vec::new(),
            socket: None,
            version: 0,
            away: Some(now),
            met: (now, now),
            next_try: now,
            ungated: false,
            why_away: String::new(),
            said: false,
            restore_at: None,
        }
    }

    fn run(mut self) {
        let mut mode = STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a valid place. Nothing this thread does may break a capture of the program's threads.
        unsafe { driver::cuThreadExchangeStreamCaptureMode(&mut mode) };
        loop {
            let timeout = self.step();
            let woken = WAKE.get().map(|(_, receiver)| receiver);
            if let [_, true] = socket::wait([self.socket.as_deref(), woken], timeout) {
                woken.inspect(|receiver| receiver.drain());
            }
            for _ in 0..MESSAGES_AT_ONCE {
                let Some(socket) = &self.socket else { break };
                match socket.receive(self.version) {
                    Ok(Some(message)) => self.handle(message),
                    Ok(None) => break,
                    Err(why) => self.lost(&why),
                }
            }
        }
    }

    /// Does what is due; says how long there is nothing more to do unless a message arrives.
    fn step(&mut self) -> Duration {
        if self.ungated && !core::mem::replace(&mut self.said, true) && settings::get().asked_for {
            self.complain("running without taking turns on the GPU");
        }
        let mut wait = Duration::from_secs(3600);
        if let Some(since) = self.away {
            let now = Instant::now();
            if now >= self.next_try {
                self.connect();
                self.next_try = now + if since.elapsed() < 4 * RETURN_PATIENCE { RETRY_SOON } else { RETRY_LATE };
            }
            if self.away.is_some() && !self.ungated && since.elapsed() >= RETURN_PATIENCE {
                self.run_ungated();
            }
            wait = wait.min(RETRY_SOON);
        }
        for gpu in gpu::attached() {
            wait = wait.min(self.turn(gpu).step(gpu));
            wait = wait.min(self.look_after(gpu));
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

    /// Moves memory to where the allowance wants it, and does what other threads left.
    fn look_after(&mut self, gpu: &'static Gpu) -> Duration {
        gpu.work.get_acquainted();
        let Some(space) = gpu.space() else { return Duration::MAX };
        let mut wait = Duration::MAX;
        let mut guard = space.lock();
        if guard.has_freed() {
            let before = guard.account;
            guard.reclaim(&gpu.work);
            let after = guard.account;
            gpu.account_changed(&before, &after);
            wait = CHORES;
        }
        if gpu.is_unreported() && client::is_connected() {
            gpu.report(&guard.account);
            wait = wait.min(CHORES);
        }
        let (account, can_restore) = (guard.account, guard.can_restore());
        // Under the lock: nobody can make it lacking between the look and the opening.
        if account.can_run() && gpu.gate.is_closed_for(closed::MEMORY) {
            gpu.gate.open(closed::MEMORY);
        }
        drop(guard);
        if client::is_connected() {
            gpu.introduce();
        }
        if account.mapped + account.pinned > account.allowance {
            // The scheduler evicts only those that do not hold the lock, but a release may still be on its way.
            if account.frozen {
                space.lock().give_up_eviction();
                gpu.report(&space.lock().account);
            } else if self.turn(gpu).is_over() && gpu.is_drained() {
                self.evict(gpu);
                wait = Duration::ZERO;
            } else {
                wait = wait.min(CHORES);
            }
        } else {
            if can_restore {
                wait = wait.min(self.restore(gpu));
            }
        }
        wait
    }

    fn evict(&mut self, gpu: &'static Gpu) {
        let _moving = gpu.moving.lock();
        let Some(space) = gpu.space() else { return };
        gpu.gate.close(closed::MEMORY);
        if !Gate::is_quiet(gpu.index) {
            return; // a call that needs only the memory has slipped in
        }
        let begin = Instant::now();
        let (before, target) = {
            let account = space.lock().account;
            (account.mapped, account.allowance.saturating_sub(account.pinned))
        };
        let result = in_some_context(gpu, |context| {
            let result = mover::evict(space, context, target, &|| gpu.report(&space.lock().account));
            gpu.report_measured(&space.lock().account, context);
            result
        });
        let mut guard = space.lock();
        if let Err(stop) = result {
            trace!("GPU {}: eviction stopped: {stop:?}", gpu.index);
            // What is left cannot leave: the scheduler sees it mapped, and carries on with others.
            guard.give_up_eviction();
            gpu.report(&guard.account);
        }
        let left = before.saturating_sub(guard.account.mapped);
        trace!("GPU {}: {left} bytes left in {} µs", gpu.index, begin.elapsed().as_micros());
    }

    /// Says after how long to look again.
    fn restore(&mut self, gpu: &'static Gpu) -> Duration {
        let now = Instant::now();
        if let Some(at) = self.restore_at.filter(|at| now < *at) {
            return at - now;
        }
        let moving = gpu.moving.lock();
        let Some(space) = gpu.space() else { return Duration::MAX };
        let before = space.lock().account.mapped;
        let result = in_some_context(gpu, |context| {
            let result = mover::restore(space, context, &|| {});
            gpu.report_measured(&space.lock().account, context);
            result
        });
        drop(moving);
        let back = space.lock().account.mapped.saturating_sub(before);
        trace!("GPU {}: {back} bytes came back in {} µs: {result:?}", gpu.index, now.elapsed().as_micros());
        self.restore_at = None;
        match result {
            Ok(()) => return Duration::ZERO,
            Err(Stop::GpuFull) => self.turn(gpu).no_memory(gpu),
            Err(Stop::Broken | Stop::HostFull) => {
                // No context works any more: what the program calls next tells it so.
                gpu.gate.open(closed::MEMORY);
            }
        }
        self.restore_at = Some(Instant::now() + RESTORE_AGAIN);
        RESTORE_AGAIN
    }

    // ---- the connection ----

    /// The one line that matters to whoever wants nvshare for this program.
    fn complain(&self, consequence: &str) {
        let (path, why) = (settings::get().socket.escape_ascii(), &self.why_away);
        trace::line(format_args!("no scheduler at {path} ({why}): {consequence}"));
    }

    fn connect(&mut self) {
        let settings = settings::get();
        let hello = ClientMessage::Hello {
            min_version: version::MIN,
            max_version: version::MAX,
            flags: 0,
            resume: CLIENT.load(Ordering::Relaxed),
            gang: settings.gang,
            library: Text::new(env!("CARGO_PKG_VERSION")),
        };
        let (socket, version, id) = match socket::shake_hands(settings.socket, &hello) {
            Ok(connected) => connected,
            Err(why) => {
                trace!("no scheduler: {why}");
                self.why_away = why;
                return;
            }
        };
        trace!("client {id}, protocol version {version}");
        let is_first = CLIENT.swap(id, Ordering::Relaxed) == 0;
        let socket = Arc::new(socket);
        self.socket = Some(socket.clone());
        client::set_connection(Some(Connection { socket, version }));
        let now = Instant::now();
        self.met = (now, self.away.filter(|_| !is_first).unwrap_or(now));
        (self.version, self.away, self.ungated, self.restore_at) = (version, None, false, None);
        for gpu in gpu::attached() {
            // This scheduler knows of no turn: what runs is drained, and whoever has work asks anew.
            gpu.request_is_over();
            self.turn(gpu).lay_down(gpu);
            gpu.introduce();
        }
    }

    fn lost(&mut self, why: &str) {
        trace!("the scheduler is gone: {why}");
        self.socket = None;
        client::set_connection(None);
        let now = Instant::now();
        let (met, away) = self.met;
        let since = if now - met < STEADY { away } else { now };
        // One that keeps ending is not worth an attempt at once: each stops the program for a moment.
        let next_try = if since == now { now } else { now + RETRY_LATE };
        (self.away, self.next_try, self.why_away) = (Some(since), next_try, why.to_string());
        for gpu in gpu::attached() {
            gpu.forget_introduction();
        }
    }

    /// No scheduler: whatever fits runs. Memory comes back as there is room, and its program waits until it is there.
    fn run_ungated(&mut self) {
        self.ungated = true;
        for gpu in gpu::attached() {
            gpu.make_room();
            if let Some(space) = gpu.space() {
                space.lock().run_free(gpu.total());
            }
            self.turn(gpu).run_free(gpu);
        }
    }

    // ---- what the scheduler says ----

    fn handle(&mut self, message: SchedulerMessage) {
        trace!("← {message:?}");
        match message {
            SchedulerMessage::Welcome { .. } => {}
            SchedulerMessage::Refused { text, .. } => self.lost(text.as_str()),
            // The limit follows; what is allocated before it is known could be too much for ever.
            SchedulerMessage::Attached { .. } => {}
            SchedulerMessage::Limit { slot, bytes } => {
                if let Some(gpu) = by_slot(slot) {
                    if let Some(space) = gpu.space() {
                        let mut guard = space.lock();
                        let before = guard.account;
                        guard.account.limit = bytes;
                        gpu.account_changed(&before, &guard.account);
                    }
                    gpu.make_room();
                }
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
            SchedulerMessage::Grant { gpus } => self.each(gpus, |turn, gpu| turn.begin(gpu)),
            SchedulerMessage::Revoke { gpus } => self.each(gpus, |turn, gpu| turn.revoke(gpu)),
            SchedulerMessage::Contended { gpus, waiters, grace_us } => {
                let grace = (waiters > 0).then(|| Duration::from_micros(grace_us.into()));
                self.each(gpus, |turn, gpu| turn.contend(gpu, grace));
            }
            SchedulerMessage::Waiting { .. } => {}
        }
    }

    fn each(&mut self, gpus: SlotSet, mut f: impl FnMut(&mut Turn, &'static Gpu)) {
        for gpu in gpu::attached().filter(|g| gpus >> g.index & 1 == 1) {
            f(self.turn(gpu), gpu);
        }
    }
}

/// Moves memory with the first context of that GPU that works.
fn in_some_context(gpu: &Gpu, mut moved: impl FnMut(CUcontext) -> Result<(), Stop>) -> Result<(), Stop> {
    let mut result = Err(Stop::Broken);
    for context in gpu.work.contexts() {
        result = moved(context);
        if result != Err(Stop::Broken) {
            break;
        }
    }
    result
}

fn by_slot(slot: u32) -> Option<&'static Gpu> {
    gpu::by_ordinal(slot.try_into().ok()?)
}
