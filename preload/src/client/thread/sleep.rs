//! Sleep: the checkpoint helper takes this process off its GPUs, until a thread of the program is
//! about to enter the driver.
//!
//! `PrepareSleep` asks for a sleep, which is prepared in steps. First the gates close, the work
//! drains, and all memory is evicted. Then the entries into the driver close ([`presence`]).
//! Finally, each thread that was running gets time to enter the driver, because the thread may have
//! read an entry's address before the entries closed: the preparation waits until the thread has
//! slept or used processor time (`tasks`). `SleepRefused` or `Awake` undoes all steps. The library
//! cannot detect a thread that was already inside the driver. The timeout of the driver's lock
//! detects such a thread, and undoes the sleep.
//!
//! From the moment the entries are closed until `Awake`, the client's thread makes no driver call.
//! It also takes no lock of a GPU, because a waiting thread of the program may hold that lock.
//! Messages that arrive in that time are carried out afterwards. A thread that waits for the
//! scheduler's answer, at a gate, for a limit or to restore another process, cancels the
//! preparation, or wakes the process if it is already prepared. If `PrepareSleep` has the flag
//! `PAUSED`, waiting threads do not prevent the sleep, because they could not continue anyway.
//!
//! If the scheduler disappears while the process sleeps, the client waits for the next scheduler.
//! The client's `Hello` says that the process is asleep. The client then names the process's GPUs,
//! because a wake needs room there. While the process is asleep, the client sends no other message
//! except a request to be woken. The scheduler's helper finds out whether the process really
//! sleeps.
//!
//! If the client has found no scheduler after `RETURN_TIMEOUT`, a thread of this library calls the
//! driver. The call returns once any program has unlocked the process. The process then continues
//! without a scheduler. A process cannot unlock itself, so a process that stays locked waits.

use super::{ClientThread, RETRY_LATE, RETRY_SOON, session};
use crate::{
    client::{exit, placement},
    connection::{self, Connection, gangs, handshake, presence, socket::Socket},
    driver::{self, entries::shut_driver, redirect, types::CUcontext},
    env::{settings, trace::trace},
    gpu::{self, Gpu},
    memory::foreign_devices,
    registry::{checkpoints, graphics, shared},
    submit::{barrier, captures, threads},
    sys::{
        tasks::{self, Task},
        time::Instant,
    },
};
use alloc::{string::String, sync::Arc, vec::Vec};
use core::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};
use nvshare_wire::{
    ClientMessage, Moves, SchedulerMessage, SlotSet,
    client::{Engine, SleepRefusal, StuckReason},
    scheduler::PAUSED,
};
use rustix::fd::OwnedFd;

/// The interval between checks of the conditions that a preparation waits for.
const LOOK: Duration = Duration::from_millis(1);
/// The longest preparation. Evicting a whole GPU's memory over a slow link takes about this long.
const MOST: Duration = Duration::from_secs(30);
/// The longest wait for threads that may be about to enter the driver.
const MOST_ON_THEIR_WAY: Duration = Duration::from_secs(1);

/// The longest wait for another scheduler, if the scheduler disappears while the process is asleep.
/// After this time, this library calls the driver.
const RETURN_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a client that was told to leave runs before it connects again.
const AWAY: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) enum Sleep {
    #[default]
    Awake,
    /// Memory is being evicted. If `paused`, waiting threads do not prevent the sleep.
    Preparing { since: Instant, paused: bool },
    /// The entries into the driver are closed.
    Leaving(Leaving),
    /// No thread enters the driver. The process may be off its GPUs.
    Prepared(Prepared),
}

/// A message with its descriptors.
type Message = (SchedulerMessage, Vec<OwnedFd>);

#[derive(Debug)]
pub(super) struct Leaving {
    since: Instant,
    paused: bool,
    /// Threads that may have passed an entry into the driver before it closed.
    on_their_way: Vec<Task>,
    /// Messages received since the entries were closed.
    messages: Vec<Message>,
}

#[derive(Debug, Default)]
pub(super) struct Prepared {
    /// Whether the scheduler has been told that the process is prepared (`told`), and that its threads want
    /// to run (`asked`).
    told: bool,
    asked: bool,
    /// Messages received since the entries were closed.
    messages: Vec<Message>,
    /// Why the connection was lost, and the connection that was made afterwards.
    lost: Option<String>,
    connected: Option<(Arc<Socket>, u16, u64)>,
    /// When to try to connect.
    next_try: Option<Instant>,
    pub(super) lost_at: Option<Instant>,
    /// Set while the client stays disconnected, so that CRIU can save the process.
    pub(super) away: Option<Away>,
    /// True if a thread of this library is calling the driver.
    is_tried: bool,
    /// True if a successor has taken over the connection and been greeted.
    has_successor: bool,
    /// The GPUs already named to the present scheduler, if it replaced the scheduler that asked for the
    /// sleep.
    named: SlotSet,
}

/// Measures [`AWAY`] in steps. A step takes at least `RETRY_SOON`. A step in which the process was
/// stopped counts like any other, so the time for which the process is stopped does not count.
#[derive(Debug)]
pub(super) struct Away {
    pub steps_left: u128,
    pub since: Instant,
}

impl Away {
    pub fn begin() -> Self {
        Self { steps_left: AWAY.as_millis() / RETRY_SOON.as_millis(), since: Instant::now() }
    }

    /// Returns true if the process has run for [`AWAY`].
    pub fn is_over(&mut self) -> bool {
        if self.since.elapsed() >= RETRY_SOON {
            (self.steps_left, self.since) = (self.steps_left.saturating_sub(1), Instant::now());
        }
        self.steps_left == 0
    }
}

impl ClientThread {
    pub(super) fn is_preparing_sleep(&self) -> bool {
        matches!(self.sleep, Sleep::Preparing { .. })
    }

    /// Whether the entries into the driver are closed.
    pub(super) fn is_off_its_gpus(&self) -> bool {
        matches!(self.sleep, Sleep::Leaving(_) | Sleep::Prepared(_))
    }

    pub(super) fn prepare_sleep(&mut self, flags: u32) {
        match &mut self.sleep {
            Sleep::Awake => {
                self.sleep = Sleep::Preparing { since: Instant::now(), paused: flags & PAUSED != 0 };
            }
            Sleep::Preparing { .. } | Sleep::Leaving(_) => {}
            Sleep::Prepared(prepared) => prepared.told = false,
        }
    }

    /// Cancels a preparation while the entries into the driver are still open. Called if the scheduler that
    /// asked for the sleep is gone.
    pub(super) fn forget_preparation(&mut self) {
        if self.is_preparing_sleep() {
            self.sleep = Sleep::Awake;
        }
    }

    /// Advances the preparation while memory is being evicted. Returns the time until the next step.
    pub(super) fn step_preparation(&mut self) -> Duration {
        let Sleep::Preparing { since, paused } = self.sleep else { return Duration::MAX };
        let late = (since.elapsed() > MOST).then_some(SleepRefusal::Busy);
        if let Some(why) = self.why_not(paused).or(late) {
            self.stay_awake(why);
            return Duration::ZERO;
        }
        gpu::in_use().for_each(|gpu| self.turn(gpu).release_early(gpu));
        if gpu::in_use().all(|gpu| self.has_left(gpu)) {
            presence::leave();
            shut_driver(true);
            if !barrier::heavy() {
                barrier::wait_for_stores();
            }
            self.sleep = match tasks::on_their_way() {
                Some(on_their_way) => {
                    Sleep::Leaving(Leaving { since: Instant::now(), paused, on_their_way, messages: Vec::new() })
                }
                None => return self.stay_awake(SleepRefusal::Busy),
            };
        }
        LOOK
    }

    /// Whether all memory has left this GPU, no work is running there, and none can start.
    fn has_left(&mut self, gpu: &'static Gpu) -> bool {
        let is_empty = |account: crate::memory::account::Account| account.mapped == 0 && account.in_flight == 0;
        self.turn(gpu).is_over()
            && gpu.is_drained()
            && gpu.account().is_none_or(is_empty)
            && !gpu.is_unreported()
            && gpu.space().is_none_or(|space| !space.lock().is_releasing())
            && gpu.moving.lock().is_idle()
    }

    /// Returns the reason why this process cannot sleep now. If `paused`, the threads of the
    /// process may wait until the process is resumed.
    fn why_not(&mut self, paused: bool) -> Option<SleepRefusal> {
        if settings::get().gang != 0 || gangs::any() {
            return Some(SleepRefusal::Gang);
        }
        if captures::any() {
            return Some(SleepRefusal::Capture);
        }
        if exit::has_begun() || (!paused && checkpoints::is_any_waiting()) {
            return Some(SleepRefusal::Busy);
        }
        // Checked before `unevictable`, which foreign devices may have caused: otherwise the reason
        // would be reported as unseen work.
        if foreign_devices::may_reach_memory() {
            return Some(SleepRefusal::Rdma);
        }
        for gpu in gpu::in_use() {
            let Some(space) = gpu.space() else { return Some(SleepRefusal::Immovable) };
            let (account, engine, has_managed, is_exported) = {
                let space = space.lock();
                (space.account, space.engine().kind(), space.has_managed(), space.has_exported())
            };
            let reasons = [
                (account.unevictable.is_some(), SleepRefusal::UnseenWork),
                (engine != Engine::Swap || has_managed, SleepRefusal::Managed),
                (gpu.peers().next().is_some(), SleepRefusal::Peers),
                (is_exported || shared::has_imports(), SleepRefusal::Ipc),
                (account.pinned > 0, SleepRefusal::Immovable),
                (!paused && gpu.is_waited_for(), SleepRefusal::Busy),
                (self.turn(gpu).is_contended(), SleepRefusal::Busy),
            ];
            if let Some((_, why)) = reasons.into_iter().find(|(is_so, _)| *is_so) {
                return Some(why);
            }
        }
        (graphics::any() || redirect::was_refused()).then_some(SleepRefusal::UnseenWork)
    }

    /// Ends the preparation. Called when an eviction has stopped, because the preparation would
    /// only begin the eviction again.
    pub(super) fn cannot_leave(&mut self, reason: StuckReason) {
        if self.is_preparing_sleep() {
            let is_unseen = reason == StuckReason::UnseenWork;
            self.stay_awake(if is_unseen { SleepRefusal::UnseenWork } else { SleepRefusal::Immovable });
        }
    }

    /// Undoes a preparation, and reports the reason to the scheduler.
    fn stay_awake(&mut self, why: SleepRefusal) -> Duration {
        trace!("cannot sleep: {why:?}");
        self.undo();
        connection::send(&ClientMessage::SleepRefused { why });
        Duration::ZERO
    }

    /// Lets threads enter the driver again, and carries out the messages that arrived while the entries
    /// were closed.
    fn undo(&mut self) {
        if presence::is_away() {
            shut_driver(false);
            presence::come_back();
        }
        if let Sleep::Leaving(Leaving { messages, .. }) = core::mem::take(&mut self.sleep) {
            messages.into_iter().for_each(|(message, descriptors)| self.handle(message, descriptors));
        }
    }

    /// Replaces [`step`](Self::step) while the entries into the driver are closed.
    pub(super) fn step_asleep(&mut self) -> Duration {
        if let Sleep::Leaving(leaving) = &mut self.sleep {
            leaving.on_their_way.retain(|task| !task.has_moved_on());
            let is_quiet = gpu::in_use().all(|gpu| gpu.is_quiet());
            let is_wanted = !leaving.paused && presence::is_wanted();
            if is_wanted || leaving.since.elapsed() > MOST_ON_THEIR_WAY {
                return self.stay_awake(SleepRefusal::Busy);
            }
            if !(is_quiet && leaving.on_their_way.is_empty()) {
                return LOOK;
            }
            let messages = core::mem::take(&mut leaving.messages);
            self.sleep = Sleep::Prepared(Prepared { messages, ..Prepared::default() });
        }
        let Sleep::Prepared(prepared) = &mut self.sleep else { return Duration::ZERO };
        if prepared.away.as_mut().is_some_and(|away| !away.is_over()) {
            return RETRY_SOON;
        }
        prepared.away = None;
        let mut wait = Duration::from_secs(3600);
        if let Some(next_try) = prepared.next_try {
            let lost_at = *prepared.lost_at.get_or_insert_with(Instant::now);
            if Instant::now() >= next_try {
                prepared.next_try = Some(Instant::now() + RETRY_LATE);
                if let Ok((socket, version, id)) = handshake::connect(&session::hello()) {
                    let socket = Arc::new(socket);
                    // Names the GPUs before the connection is set, because other threads may then
                    // send messages about these GPUs.
                    prepared.named = name_gpus(&socket, version);
                    connection::set_connection(Some(Connection { socket: socket.clone(), version }));
                    (self.socket, self.version) = (Some(socket.clone()), version);
                    (prepared.connected, prepared.next_try) = (Some((socket, version, id)), None);
                    (prepared.told, prepared.asked) = (true, false); // told by `Hello`
                }
            }
            wait = RETRY_SOON;
            // The process may be unlocked: the scheduler may have disappeared before it locked the
            // process, or another process may have restored this process.
            if !prepared.is_tried && lost_at.elapsed() >= RETURN_TIMEOUT {
                prepared.is_tried = try_driver();
            }
            if prepared.is_tried && has_answered() {
                trace!("the process is on its GPUs, but no scheduler has resumed it");
                self.wake_up(Moves::default());
                return Duration::ZERO;
            }
        }
        // Threads may wait for an answer that the client's thread carries out only when the process
        // is awake.
        if gpu::in_use().any(|gpu| gpu.is_waited_for()) {
            presence::want();
        }
        if connection::is_connected() {
            let send_once = |message: &ClientMessage, done: &mut bool| *done = *done || connection::send(message);
            send_once(&ClientMessage::SleepReady {}, &mut prepared.told);
            if presence::is_wanted() {
                send_once(&ClientMessage::Wake {}, &mut prepared.asked);
            }
            if !prepared.told || (presence::is_wanted() && !prepared.asked) {
                wait = RETRY_SOON;
            }
        }
        wait
    }

    /// Handles a message that arrives while the entries into the driver are closed.
    pub(super) fn receive_asleep(&mut self, message: SchedulerMessage, descriptors: Vec<OwnedFd>) {
        match (&mut self.sleep, message) {
            (_, SchedulerMessage::Awake { moved }) => self.wake_up(moved),
            (_, SchedulerMessage::PrepareSleep { flags }) => self.prepare_sleep(flags),
            (Sleep::Prepared(prepared), SchedulerMessage::Resume { .. }) => {
                // This client sends the successor the rest of its state when the process is awake.
                // Messages of the previous scheduler are obsolete.
                prepared.messages.clear();
                (prepared.has_successor, prepared.told, prepared.asked) = (true, true, false);
                let is_greeted = self.greet_successor();
                if let (Sleep::Prepared(prepared), Some(socket)) = (&mut self.sleep, &self.socket) {
                    prepared.named = name_gpus(socket, self.version);
                }
                if !(is_greeted && connection::send(&ClientMessage::Held { gpus: 0 })) {
                    self.on_disconnect_asleep("it does not read its messages");
                }
            }
            (Sleep::Prepared(_), SchedulerMessage::Leave {}) => self.leave(),
            (Sleep::Prepared(prepared), message) => prepared.messages.push((message, descriptors)),
            // The scheduler does not know yet that the process is prepared, so it has not locked the process.
            (_, message @ SchedulerMessage::Resume { .. }) => {
                self.stay_awake(SleepRefusal::Busy);
                self.handle(message, descriptors);
            }
            (Sleep::Leaving(leaving), message) => leaving.messages.push((message, descriptors)),
            (_, message) => self.handle(message, descriptors),
        }
    }

    /// Called when the process is back on its GPUs, or never left them. `moved` lists the GPUs that the
    /// scheduler exchanged for others. The driver's answer prevails over `moved`, because an earlier
    /// scheduler may have restored the process before this scheduler started.
    pub(super) fn wake_up(&mut self, moved: Moves) {
        if matches!(self.sleep, Sleep::Preparing { .. } | Sleep::Leaving(_)) {
            // The process never left. The scheduler stopped waiting for the preparation, and makes no further
            // request before it has an answer.
            self.stay_awake(SleepRefusal::Busy);
            return;
        }
        // Updates the UUIDs before threads resume, so that no thread names a GPU that the process
        // has left.
        placement::look_again();
        let gpus = gpu::look_again();
        let prepared = match &mut self.sleep {
            Sleep::Prepared(prepared) => core::mem::take(prepared),
            _ => Prepared::default(),
        };
        self.undo();
        for gpu in gpu::in_use().filter(|gpu| gpu.work.are_all_broken()) {
            trace!("GPU {}: the driver could not restore the process", gpu.index);
            // The program continues until it gets the driver's error. From now on, each of its calls returns that
            // error.
            self.run_ungated_on(gpu);
        }
        let Prepared { messages, lost, connected, has_successor, named, .. } = prepared;
        let is_known = gpus.iter().all(|(gpu, before, now)| gpu.is_refused() || moved.now(*before) == *now);
        let unknown = || (!is_known).then(|| "it expects this process on other GPUs".into());
        if let Some(why) = lost.or_else(unknown) {
            self.on_disconnect(&why);
        }
        for (gpu, before, now) in gpus.iter().filter(|(_, before, now)| before != now) {
            trace!("GPU {}: moved from {before} to {now}", gpu.index);
            gpu.has_moved();
        }
        if !is_known {
            return; // the next connection begins with the UUIDs of the GPUs
        }
        if let Some((socket, version, id)) = connected {
            self.on_connect(socket, version, id, named);
        } else if has_successor {
            self.tell_successor(Some(named));
        }
        messages.into_iter().for_each(|(message, descriptors)| self.handle(message, descriptors));
    }

    /// Handles the loss of the connection while the entries into the driver are closed.
    pub(super) fn on_disconnect_asleep(&mut self, why: &str) {
        let Sleep::Prepared(prepared) = &mut self.sleep else {
            self.undo();
            return self.on_disconnect(why);
        };
        trace!("lost the scheduler while asleep: {why}");
        self.socket = None;
        connection::set_connection(None);
        prepared.messages.clear();
        (prepared.connected, prepared.has_successor) = (None, false);
        prepared.lost = Some(why.into());
        prepared.next_try = Some(Instant::now());
        prepared.lost_at = Some(Instant::now());
    }
}

/// Names the GPUs to a scheduler that knows that the process is asleep. The rest of the state
/// follows when the process is awake. Returns the GPUs that were named.
fn name_gpus(socket: &Socket, version: u16) -> SlotSet {
    let send = |gpu: &Gpu| {
        gpu.name_to(|attach, files| {
            socket.wait_for_room() && socket.send_with(attach.encode(version).as_bytes(), files)
        })
    };
    let named = gpu::in_use().filter(|gpu| !gpu.is_refused() && send(gpu));
    named.fold(0, |named, gpu| named | 1 << gpu.index)
}

static ANSWERED: AtomicBool = AtomicBool::new(false);

/// Whether the call that [`try_driver`] made has returned.
fn has_answered() -> bool {
    ANSWERED.load(Ordering::SeqCst)
}

/// Calls the driver on a separate thread. While the process is locked, the call blocks. Returns `false`
/// if no thread could be started.
fn try_driver() -> bool {
    ANSWERED.store(false, Ordering::SeqCst);
    let primary = gpu::in_use().find_map(Gpu::primary).unwrap_or(core::ptr::null_mut()) as usize;
    threads::spawn(c"nvshare-try", move || {
        // SAFETY: `primary` is NULL or a context that the program has retained. The thread runs nothing else.
        unsafe { driver::wait_while_locked(primary as CUcontext) };
        ANSWERED.store(true, Ordering::SeqCst);
        connection::wake();
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::thread::fake::Client;
    use nvshare_wire::{Uuid, client::ASLEEP};

    fn prepare(client: &mut Client) {
        client.sent();
        client.receive(SchedulerMessage::PrepareSleep { flags: 0 });
    }

    fn refusals(client: &Client) -> Vec<SleepRefusal> {
        let why = |message| match message {
            ClientMessage::SleepRefused { why } => Some(why),
            _ => None,
        };
        client.sent().into_iter().filter_map(why).collect()
    }

    #[test]
    fn a_client_sleeps_after_its_memory_has_left_and_wakes_with_its_contents() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        let at = client.allocate(gpu, 4);
        client.allow(gpu, 1, 1);
        client.fall_asleep(0, |client| {
            let has_left = client.driver.used() == 0;
            assert!(has_left || !Client::is_shut(), "the driver was shut before the memory had left");
        });
        assert!(Client::is_shut() && presence::is_away());
        client.step_until(|client| client.sent().contains(&ClientMessage::SleepReady {}));
        client.driver.forget_calls();
        client.allow(gpu, 2, 0);
        client.step();
        let calls = ["cuCtxPushCurrent_v2", "cuEventQuery", "cuStreamQuery", "cuMemCreate"];
        assert!(client.driver.calls(&calls).is_empty(), "the process is off its GPUs");
        assert_eq!(gpu.account().map(|account| account.ack), Some(1), "the message waits");
        client.receive(SchedulerMessage::Awake { moved: Moves::default() });
        assert!(client.is_awake() && !Client::is_shut() && !presence::is_away());
        assert_eq!(gpu.account().map(|account| account.ack), Some(2));
        client.allow(gpu, 3, 1);
        client.step_until(|client| client.driver.word(at) == Some(4));
    }

    #[test]
    fn a_client_that_cannot_sleep_says_why() {
        let mut client = Client::new(2);
        let [(gpu, context), (other, _)] = client.gpus[..] else { unreachable!() };
        let stream = client.driver.new_stream(context);
        let mut refusal = |begin: &dyn Fn(&mut Client), end: &dyn Fn(&mut Client)| {
            begin(&mut client);
            prepare(&mut client);
            client.step();
            assert!(client.is_awake() && !Client::is_shut());
            end(&mut client);
            refusals(&client)
        };
        let capture = refusal(&|_| assert_eq!(captures::begin(stream, || 0), 0), &|_| captures::end(stream));
        let peers = refusal(&|_| gpu.work.set_peers(1 << other.index), &|_| gpu.work.set_peers(0));
        let pinned = refusal(&|_| gpu.pin(|_| 512), &|_| gpu.pin(|_| 0));
        let contended = SchedulerMessage::Contended { gpus: 1 << gpu.index, waiters: 1, grace_us: 1_000_000 };
        let contended = refusal(
            &|client| {
                client.grant(gpu);
                client.receive(contended);
            },
            &|client| client.thread.turn(gpu).release_early(gpu),
        );
        let refused = [capture, peers, pinned, contended];
        let expected =
            [SleepRefusal::Capture, SleepRefusal::Peers, SleepRefusal::Immovable, SleepRefusal::Busy].map(|why| [why]);
        assert_eq!(refused, expected);
    }

    #[test]
    fn a_client_that_waits_to_restore_another_process_stays_awake() {
        let mut client = Client::new(1);
        std::thread::scope(|scope| {
            scope.spawn(|| checkpoints::wait_for_room(std::os::unix::process::parent_id() as i32));
            let mut ticket = 0;
            client.step_until(|client| match client.sent()[..] {
                [ClientMessage::ForeignCheckpoint { ticket: sent, .. }] => {
                    ticket = sent;
                    true
                }
                _ => false,
            });
            prepare(&mut client);
            client.step();
            assert_eq!((refusals(&client), client.is_awake()), (Vec::from([SleepRefusal::Busy]), true));
            client.receive(SchedulerMessage::Continue { ticket });
        });
        prepare(&mut client);
        client.step_until(|client| client.thread.is_off_its_gpus());
    }

    #[test]
    fn a_thread_that_wants_the_driver_cancels_the_preparation() {
        let mut client = Client::new(1);
        prepare(&mut client);
        client.step_until(|client| client.thread.is_off_its_gpus());
        let gpu = client.gpu();
        client.allow(gpu, 5, 0);
        presence::want();
        client.step_until(|client| client.is_awake());
        assert_eq!(refusals(&client), [SleepRefusal::Busy]);
        assert!(!Client::is_shut() && !presence::is_away());
        assert_eq!(gpu.account().map(|account| account.ack), Some(5), "the messages are carried out");
    }

    #[test]
    fn a_preparation_ends_with_the_scheduler_that_asked_for_it() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        client.allocate(gpu, 0);
        prepare(&mut client);
        assert!(client.thread.is_preparing_sleep());
        client.thread.on_disconnect("it has ended");
        assert!(client.is_awake() && !Client::is_shut());
    }

    #[test]
    fn a_preparation_that_takes_too_long_is_refused() {
        let mut client = Client::new(1);
        prepare(&mut client);
        client.thread.sleep = Sleep::Preparing { since: Instant::ago(MOST + LOOK), paused: false };
        client.step();
        assert_eq!((refusals(&client), client.is_awake()), (Vec::from([SleepRefusal::Busy]), true));
    }

    #[test]
    fn a_sleeping_client_asks_once_to_be_woken() {
        let mut client = Client::new(1);
        client.fall_asleep(0, |_| {});
        client.step();
        let sent = client.sent();
        assert_eq!(sent.iter().filter(|sent| **sent == ClientMessage::SleepReady {}).count(), 1, "{sent:?}");
        presence::want();
        for _ in 0..3 {
            client.step();
        }
        assert_eq!(client.sent(), [ClientMessage::Wake {}]);
        client.receive(SchedulerMessage::Awake { moved: Moves::default() });
        assert!(client.is_awake());
    }

    /// A client with one GPU that is ready to sleep, and the UUID of the GPU.
    fn ready_to_sleep() -> (Client, Uuid) {
        let mut client = Client::new(1);
        client.fall_asleep(0, |_| {});
        client.sent();
        let uuid = client.gpu().uuid().expect("a UUID");
        (client, uuid)
    }

    #[test]
    fn a_process_that_was_restored_on_another_gpu_continues_there() {
        let (mut client, before) = ready_to_sleep();
        let now = Uuid([0xe0 + client.gpu().index as u8; 16]);
        client.driver.set_uuid(client.gpu().index as i32, now.0);
        let moved = Moves::new([(before, now)]).expect("one move");
        client.receive(SchedulerMessage::Awake { moved });
        assert_eq!((client.gpu().uuid(), connection::is_connected(), client.is_awake()), (Some(now), true, true));
    }

    #[test]
    fn a_client_reconnects_if_the_scheduler_does_not_know_its_gpus() {
        let (mut client, _) = ready_to_sleep();
        client.driver.set_uuid(client.gpu().index as i32, [0xd0; 16]);
        client.receive(SchedulerMessage::Awake { moved: Moves::default() });
        assert!(client.is_awake() && !connection::is_connected() && !client.gpu().is_introduced());
        assert!(client.thread.offline_reason.contains("other GPUs"), "{}", client.thread.offline_reason);
    }

    #[test]
    fn a_successor_of_the_scheduler_learns_that_the_client_sleeps() {
        let (mut client, _) = ready_to_sleep();
        let slot = client.gpu().index;
        client.receive(SchedulerMessage::Resume { client: 1 });
        let sent = client.scheduler.sent();
        let [
            ClientMessage::Hello { flags: ASLEEP, .. },
            ClientMessage::Attach { slot: named, .. },
            ClientMessage::Held { gpus: 0 },
        ] = sent[..]
        else {
            panic!("{sent:?}")
        };
        assert_eq!(named, slot);
        client.step();
        assert!(client.scheduler.sent().is_empty() && Client::is_shut());
        client.receive(SchedulerMessage::Awake { moved: Moves::default() });
        let sent = client.scheduler.sent();
        assert!(matches!(sent[..], [ClientMessage::Memory { .. }]), "{sent:?}");
        assert!(client.is_awake() && client.gpu().is_introduced());
    }

    /// Without a scheduler, only the driver shows that the process has been unlocked.
    #[test]
    fn a_sleeping_client_without_a_scheduler_wakes_when_the_driver_answers() {
        let (mut client, _) = ready_to_sleep();
        client.thread.on_disconnect_asleep("it has ended");
        client.driver.block("cuCtxPushCurrent_v2");
        client.step();
        let Sleep::Prepared(prepared) = &mut client.thread.sleep else { panic!("awake") };
        assert!(prepared.next_try.is_some() && !prepared.is_tried);
        prepared.lost_at = Some(Instant::ago(RETURN_TIMEOUT));
        client.driver.forget_calls();
        for _ in 0..3 {
            client.step();
        }
        client.driver.wait_for_calls("cuCtxPushCurrent_v2", 1);
        assert!(Client::is_shut() && !client.is_awake(), "the driver has not answered");
        assert_eq!(client.driver.count("cuCtxPushCurrent_v2"), 1);
        client.driver.unblock("cuCtxPushCurrent_v2");
        client.step_until(|client| client.is_awake());
        assert!(!Client::is_shut() && !connection::is_connected());
    }
}
