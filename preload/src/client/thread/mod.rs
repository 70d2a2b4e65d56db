//! The client's thread: owns the connection to the scheduler, receives messages and carries them out.
//!
//! The thread makes no call that waits for running work; debug builds check this. It polls drains, idle
//! checks and handshakes in short steps ([`Turn`]), and splits moving memory into steps too. Without a
//! scheduler the program runs ungated, and the thread keeps trying to connect.
//!
//! - `dispatch`: carries out messages. `session`: connects, resumes, handles a lost connection.
//! - `memory`: moves memory, once the driver has confirmed that no work is running. `files`: the swap
//!   files. `sleep`: leaving the GPUs and coming back. `leave`: leaving the scheduler while asleep.

mod dispatch;
#[cfg(test)]
mod fake;
mod files;
mod leave;
mod memory;
mod session;
mod sleep;

pub use session::hello;

use crate::{
    client::{
        offline::{Offline, OtherGpus},
        turn::Turn,
    },
    connection::{
        self, gangs,
        handshake::Attempt,
        outbox,
        socket::{self, Socket},
        wakeup,
    },
    driver,
    env::settings,
    gpu::{self, Gpu},
    registry::shared,
    submit::{captures, closed, threads},
    sys::{
        sync::on_client_thread,
        time::{self, Instant},
    },
};
use alloc::{string::String, sync::Arc, vec::Vec};
use core::{sync::atomic::AtomicU64, time::Duration};
use files::HostTier;
use memory::IdleCheck;
use sleep::Sleep;

/// The longest wait for a scheduler that has gone away. After that, the client runs ungated.
const RETURN_TIMEOUT: Duration = Duration::from_secs(3);

/// The intervals between attempts to connect: `RETRY_SOON` at first after the scheduler has gone
/// away, `RETRY_LATE` later.
const RETRY_SOON: Duration = Duration::from_millis(100);

const RETRY_LATE: Duration = Duration::from_secs(2);

/// The interval between checks for work that other threads have deferred, such as unsent reports and
/// freed memory.
const CHORE_INTERVAL: Duration = Duration::from_millis(20);

/// The number of messages after which the thread serves its GPUs again.
const MESSAGES_AT_ONCE: u32 = 256;

/// The client id that the scheduler has assigned; 0 if none.
static CLIENT: AtomicU64 = AtomicU64::new(0);

/// Starts the thread. First tries to connect, so that the program's first launch is already gated.
pub fn start() -> Start {
    // Looks up all symbols now. A later first lookup would take the loader's lock, which a thread of the
    // program may hold while it waits at a gate.
    driver::resolve_all();
    driver::hook::all().for_each(|hook| {
        hook.real.find();
    });
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

/// The outcome of [`start`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    Started,
    NoThread,
    /// `NVSHARE_REQUIRED` is set and no scheduler answers.
    NoScheduler,
}

#[derive(Debug, Default)]
struct ClientThread {
    /// Indexed by GPU.
    gpus: Vec<PerGpu>,
    socket: Option<Arc<Socket>>,
    /// The protocol version in use.
    version: u16,
    /// When the scheduler was lost; `None` while connected.
    disconnected_since: Option<Instant>,
    /// When the current connection was made, and when the previous connection was lost.
    connected_at: (Instant, Instant),
    next_try: Instant,
    /// A handshake in progress.
    attempt: Option<Attempt>,
    ungated: bool,
    /// The reason for running without a scheduler, and whether it has been printed. A process prints it
    /// once.
    offline_reason: String,
    reported: bool,
    /// Host memory, and the files for copies that exceed its limit.
    tier: HostTier,
    sleep: Sleep,
}

/// The thread's state for one GPU.
#[derive(Debug, Default)]
struct PerGpu {
    turn: Turn,
    idle_check: IdleCheck,
    /// Decides in place of the scheduler while no scheduler is connected.
    offline: Offline,
    /// When to try again to restore memory for which the GPU had no room.
    restore_at: Option<Instant>,
    /// When an eviction began to wait for host memory.
    host_full: Option<Instant>,
}

impl ClientThread {
    fn new() -> Self {
        let now = Instant::now();
        Self { disconnected_since: Some(now), connected_at: (now, now), ..Self::default() }
    }

    fn run(mut self) {
        let _here = on_client_thread();
        captures::relax_thread();
        loop {
            time::follow();
            let mut timeout = if self.is_off_its_gpus() { self.step_asleep() } else { self.step() };
            let woken = wakeup::receiver();
            if woken.is_none() {
                timeout = timeout.min(CHORE_INTERVAL);
            }
            let socket = self.socket.as_deref().or(self.attempt.as_ref().map(Attempt::socket));
            if let [_, true] = socket::wait([socket, woken], timeout) {
                woken.inspect(|receiver| receiver.drain());
            }
            for _ in 0..MESSAGES_AT_ONCE {
                let Some(socket) = &self.socket else { break };
                match socket.receive(self.version) {
                    Ok(Some((message, descriptors))) if self.is_off_its_gpus() => {
                        self.receive_asleep(message, descriptors)
                    }
                    Ok(Some((message, descriptors))) => self.handle(message, descriptors),
                    Ok(None) => break,
                    Err(why) if self.is_off_its_gpus() => self.on_disconnect_asleep(&why),
                    Err(why) => self.on_disconnect(&why),
                }
            }
        }
    }

    /// Does the work that is due. Returns the time until the next step is due if no message arrives
    /// earlier.
    fn step(&mut self) -> Duration {
        if self.ungated && !core::mem::replace(&mut self.reported, true) && settings::get().asked_for {
            self.report_offline("programs run concurrently, and take turns by a lock file if memory is short");
        }
        let mut wait = Duration::from_secs(3600);
        if let Some(since) = self.disconnected_since {
            if self.step_connecting() {
                let after = if since.elapsed() < 4 * RETURN_TIMEOUT { RETRY_SOON } else { RETRY_LATE };
                self.next_try = Instant::now() + after;
            }
            if self.disconnected_since.is_some() && !self.ungated && since.elapsed() >= RETURN_TIMEOUT {
                self.run_ungated();
            }
            wait = wait.min(RETRY_SOON);
        }
        if !shared::unmap_closed() || (connection::is_connected() && !(outbox::flush() && gangs::tell())) {
            wait = CHORE_INTERVAL;
        }
        for gpu in gpu::in_use() {
            if self.ungated {
                wait = wait.min(self.step_offline(gpu));
            } else if self.disconnected_since.is_some() {
                self.on(gpu).offline.show(gpu);
            }
            // A client needs the locks of all peer GPUs, and holds all of them or none.
            if connection::is_connected() && gpu.peers().any(|other| !self.turn(other).is_held()) {
                self.turn(gpu).release_early(gpu);
            }
            wait = wait.min(self.turn(gpu).step(gpu));
            wait = wait.min(self.service(gpu));
        }
        wait.min(self.step_preparation())
    }

    fn on(&mut self, gpu: &Gpu) -> &mut PerGpu {
        let at = gpu.index as usize;
        if self.gpus.len() <= at {
            self.gpus.resize_with(at + 1, PerGpu::default);
        }
        &mut self.gpus[at]
    }

    fn turn(&mut self, gpu: &Gpu) -> &mut Turn {
        &mut self.on(gpu).turn
    }

    fn idle_check(&mut self, gpu: &Gpu) -> &mut IdleCheck {
        &mut self.on(gpu).idle_check
    }

    fn step_offline(&mut self, gpu: &'static Gpu) -> Duration {
        let turn = self.turn(gpu);
        if turn.is_over() && !gpu.gate.is_closed_for(closed::LOCK) {
            turn.run_ungated(gpu); // the GPU was attached while no scheduler was connected
        }
        let mut others = OtherGpus::default();
        for other in gpu::in_use().filter(|other| other.index != gpu.index) {
            let Some(PerGpu { offline: there, .. }) = self.gpus.get(other.index as usize) else { continue };
            others.before |= there.waits() && other.uuid() < gpu.uuid();
            others.after |= there.waits() && other.uuid() > gpu.uuid();
            others.stopped |= there.is_stopped() && gpu.is_peer_of(other);
        }
        let PerGpu { offline, turn, .. } = self.on(gpu);
        offline.step(gpu, turn, others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fake::Client;
    use nvshare_wire::{ClientMessage, client::ReleaseReason};

    #[test]
    fn a_client_runs_without_a_scheduler_after_a_timeout() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        client.thread.on_disconnect("it has ended");
        client.thread.next_try = Instant::now() + Duration::from_secs(3600);
        client.thread.disconnected_since = Some(Instant::now());
        assert!(client.step() <= RETRY_SOON);
        assert!(!client.thread.ungated && gpu.gate.is_closed_for(closed::LOCK));
        client.thread.disconnected_since = Some(Instant::ago(RETURN_TIMEOUT));
        client.step();
        assert!(client.thread.ungated && !gpu.gate.is_closed_for(closed::FOR_ALL));
        assert_eq!(gpu.account().map(|account| account.allowance), Some(u64::MAX));
    }

    #[test]
    fn the_locks_of_peers_are_held_together_or_not_at_all() {
        let mut client = Client::new(2);
        let [(first, _), (second, _)] = client.gpus[..] else { unreachable!() };
        first.work.set_peers(1 << second.index);
        second.work.set_peers(1 << first.index);
        client.grant(first);
        client.grant(second);
        client.step();
        assert!([first, second].iter().all(|gpu| client.thread.turn(gpu).is_held()));
        client.thread.turn(second).revoke(second);
        client.step_until(|client| [first, second].iter().all(|gpu| client.thread.turn(gpu).is_over()));
        let sent = client.sent();
        let is_release = |gpu: &Gpu, expected: ReleaseReason| {
            let is = |message: &ClientMessage| {
                matches!(message, ClientMessage::Release { gpus, reason, .. }
                    if *gpus == 1 << gpu.index && *reason == expected)
            };
            sent.iter().filter(|message| is(message)).count()
        };
        assert_eq!((is_release(first, ReleaseReason::Idle), is_release(second, ReleaseReason::Revoked)), (1, 1));
    }

    #[test]
    fn a_report_that_could_not_be_sent_is_repeated() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        client.scheduler.stop_reading();
        gpu.count_refusal();
        client.step();
        assert!(gpu.is_unreported());
        client.scheduler.sent();
        client.step();
        assert!(!gpu.is_unreported());
        let sent = client.scheduler.sent();
        assert!(matches!(sent[..], [ClientMessage::Memory { counts, .. }] if counts.refused == 1), "{sent:?}");
    }

    #[test]
    fn a_thread_at_the_gate_gets_the_lock_requested() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        assert_eq!((client.step() > RETRY_SOON, client.sent().len()), (true, 0), "no thread waits");
        threads::mine().begin_waiting(gpu.index, threads::Waits::WithWork, Duration::from_secs(60));
        for _ in 0..2 {
            client.step();
        }
        threads::mine().end_waiting();
        assert_eq!(client.sent(), [ClientMessage::Request { gpus: 1 << gpu.index }]);
    }
}
