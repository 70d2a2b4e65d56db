//! The session with a scheduler: connecting, continuing the session with a successor, losing the
//! connection, and running without a scheduler.

use super::{CLIENT, ClientThread, RETRY_LATE};
use crate::{
    client::placement,
    connection::{
        self, Connection,
        handshake::{self, Attempt, Connected},
        outbox, presence,
        socket::Socket,
    },
    env::{
        settings,
        trace::{self, trace},
    },
    gpu::{self, Gpu},
    registry::shared,
    sys::time::Instant,
};
use alloc::{
    string::{String, ToString},
    sync::Arc,
};
use core::{ops::ControlFlow, sync::atomic::Ordering, time::Duration};
use nvshare_wire::{ClientMessage, SlotSet, Text, client::ASLEEP, version};

/// If a connection is lost this soon after it was made, the scheduler counts as lost since the
/// previous loss.
const STEADY: Duration = Duration::from_millis(50);

impl ClientThread {
    /// Prints why no scheduler is connected, and the consequence.
    pub(super) fn report_offline(&self, consequence: &str) {
        let (path, why) = (settings::get().socket.escape_ascii(), &self.offline_reason);
        trace::line(format_args!("no scheduler at {path} ({why}): {consequence}"));
    }

    /// Makes the first connection. The program waits until the attempt has ended.
    pub(super) fn connect(&mut self) {
        let connected = placement::take_connection();
        self.has_tried(connected.unwrap_or_else(|| handshake::connect(&hello())));
    }

    /// Continues the handshake of a later connection, or begins a handshake when it is due. Returns whether
    /// an attempt has ended.
    pub(super) fn step_connecting(&mut self) -> bool {
        let begun = match self.attempt.take() {
            Some(attempt) => Ok(attempt),
            None if Instant::now() < self.next_try => return false,
            None => Attempt::begin(&hello()),
        };
        match begun.and_then(Attempt::look) {
            Ok(ControlFlow::Continue(attempt)) => {
                self.attempt = Some(attempt);
                return false;
            }
            Ok(ControlFlow::Break(connected)) => self.has_tried(Ok(connected)),
            Err(why) => self.has_tried(Err(why)),
        }
        true
    }

    fn has_tried(&mut self, outcome: Result<Connected, String>) {
        match outcome {
            Ok((socket, version, id)) => self.on_connect(Arc::new(socket), version, id, 0),
            Err(why) => {
                trace!("no scheduler: {why}");
                self.offline_reason = why;
            }
        }
    }

    /// Called when a scheduler has accepted this client. `named` is the set of GPUs that this scheduler
    /// already knows.
    pub(super) fn on_connect(&mut self, socket: Arc<Socket>, version: u16, id: u64, named: SlotSet) {
        trace!("client {id}, protocol version {version}");
        let is_first = CLIENT.swap(id, Ordering::Relaxed) == 0;
        self.socket = Some(socket.clone());
        shared::announce_exporter();
        connection::set_connection(Some(Connection { socket, version }));
        self.forget_host_memory();
        self.retire_file();
        let now = Instant::now();
        self.connected_at = (now, self.disconnected_since.filter(|_| !is_first).unwrap_or(now));
        (self.version, self.disconnected_since, self.ungated) = (version, None, false);
        self.gpus.iter_mut().for_each(|gpu| gpu.restore_at = None);
        for gpu in gpu::in_use().filter(|gpu| !gpu.is_refused()) {
            self.on(gpu).offline.end(gpu);
            // This scheduler has granted no lock. So running work is drained, and threads with work request the
            // lock again.
            gpu.request_is_over();
            self.turn(gpu).abandon(gpu);
            gpu.introduce(named & (1 << gpu.index) != 0, shared::introduce);
        }
        connection::begin_generation();
    }

    /// Called when a new scheduler has taken over the connection. Sends the new scheduler the state
    /// of this client, including the locks that this client holds.
    pub(super) fn resume(&mut self) {
        self.forget_preparation();
        if self.greet_successor() {
            self.tell_successor(None)
        } else {
            self.on_disconnect("it does not read its messages")
        }
    }

    /// Introduces this process to a scheduler that has taken over the connection. Returns `false` if the
    /// messages cannot be sent.
    pub(super) fn greet_successor(&mut self) -> bool {
        trace!("a new scheduler has taken over the connection");
        let Some(socket) = self.socket.clone() else { return true };
        // Unread messages to the predecessor keep the socket full until the new scheduler discards them.
        socket.wait_for_room() && connection::send(&hello()) && handshake::announce(&socket, self.version)
    }

    /// Sends the state of the GPUs to a successor, after
    /// [`greet_successor`](Self::greet_successor). `named` is `Some` if the successor knows that
    /// this process is asleep, and contains the GPUs that were already named to the successor.
    pub(super) fn tell_successor(&mut self, named: Option<SlotSet>) {
        self.forget_host_memory();
        // From here on, the new scheduler discards no message.
        shared::announce_exporter();
        let mut held = 0;
        for gpu in gpu::in_use() {
            gpu.introduce_again(named.unwrap_or(0) & (1 << gpu.index) != 0, shared::introduce);
            if !gpu.is_introduced() && !gpu.is_refused() {
                return self.on_disconnect("it does not read its messages");
            }
            let turn = self.turn(gpu);
            turn.contend(gpu, None);
            held |= u64::from(turn.has_lock()) << gpu.index;
        }
        // A process that was asleep held no lock.
        let is_told = || named.is_some() || connection::send(&ClientMessage::Held { gpus: held });
        if !(outbox::flush() && is_told()) {
            return self.on_disconnect("it does not read its messages");
        }
        // The new scheduler may have discarded requests of other threads, so waiting threads repeat their
        // requests.
        for gpu in gpu::in_use() {
            gpu.request_is_over();
            gpu.limit_answers.on_change();
        }
        self.gpus.iter_mut().for_each(|gpu| gpu.restore_at = None);
        connection::begin_generation();
    }

    pub(super) fn on_disconnect(&mut self, why: &str) {
        trace!("lost the scheduler: {why}");
        let now = Instant::now();
        let (met, away) = self.connected_at;
        self.on_loss(now, if now - met < STEADY { away } else { now }, why);
    }

    /// Called when the scheduler refuses this program. The connection counts as never made, so the program
    /// soon runs without a scheduler.
    pub(super) fn on_refusal(&mut self, why: &str) {
        trace!("the scheduler refuses this program: {why}");
        self.on_loss(Instant::now(), self.connected_at.1, why);
    }

    /// Ends the connection. `since`: when the program lost its scheduler.
    fn on_loss(&mut self, now: Instant, since: Instant, why: &str) {
        self.forget_preparation();
        self.socket = None;
        connection::set_connection(None);
        // A connection that keeps breaking is not retried immediately, because each attempt stops the program
        // for a moment.
        let next_try = if since == now { now } else { now + RETRY_LATE };
        (self.disconnected_since, self.next_try, self.offline_reason) = (Some(since), next_try, why.to_string());
        for gpu in gpu::in_use() {
            gpu.forget_introduction();
            gpu.limit_answers.on_change();
        }
    }

    /// Runs without a scheduler. Programs whose memory fits on the GPU run. Evicted memory is restored when
    /// room appears, and its program waits until then.
    pub(super) fn run_ungated(&mut self) {
        self.ungated = true;
        connection::stop_expecting();
        self.forget_host_memory();
        for gpu in gpu::in_use() {
            gpu.admit_context();
            gpu.forget_denials();
            self.run_ungated_on(gpu);
        }
    }

    /// Lets the program use this GPU without the scheduler's lock and limits.
    pub(super) fn run_ungated_on(&mut self, gpu: &'static Gpu) {
        if let Some(space) = gpu.space() {
            space.lock().run_ungated(gpu.total());
        }
        gpu.limit_answers.on_change();
        self.turn(gpu).run_ungated(gpu);
    }
}

/// The message that introduces this process.
pub fn hello() -> ClientMessage {
    ClientMessage::Hello {
        min_version: version::MIN,
        max_version: version::MAX,
        // `Hello` is never sent during a preparation, so "away" means asleep.
        flags: if presence::is_away() { ASLEEP } else { 0 },
        resume: CLIENT.load(Ordering::Relaxed),
        gang: settings::get().gang,
        library: Text::new(env!("CARGO_PKG_VERSION")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        client::thread::{RETRY_SOON, fake::Client},
        connection::fake::{Scheduler, begin},
        driver::fake::until,
        gpu::{
            Gpu,
            limit_request::{Outcome, raise},
        },
        memory::engine::GRANULE,
        registry::checkpoints,
        submit::closed,
    };
    use nvshare_wire::{SchedulerMessage, scheduler::Refusal};
    use std::thread;

    fn is_introduction(messages: &[ClientMessage], gpu: &Gpu) -> bool {
        matches!(messages, [ClientMessage::Attach { slot: attached, .. }, ClientMessage::Memory { slot, .. }]
            if *attached == gpu.index && *slot == gpu.index)
    }

    #[test]
    fn a_new_scheduler_learns_all_gpus_and_has_granted_no_lock() {
        let mut client = Client::new(2);
        let [(first, _), (second, _)] = client.gpus[..] else { unreachable!() };
        client.grant(first);
        client.thread.on_disconnect("it has ended");
        assert!(!connection::is_connected() && !first.is_introduced());
        let generation = connection::generation();
        let next = Scheduler::connect();
        client.thread.on_connect(next.socket.clone(), version::MAX, 2, 0);
        let sent = next.sent();
        assert!(is_introduction(&sent[..2], first) && is_introduction(&sent[2..], second), "{sent:?}");
        assert!(first.gate.is_closed_for(closed::LOCK) && !client.thread.turn(first).has_lock());
        assert_eq!((connection::generation(), client.thread.ungated), (generation + 1, false));
        client.step();
        assert!(next.sent().is_empty(), "the lock of the previous scheduler is not released to this one");
    }

    #[test]
    fn a_successor_learns_the_locks_that_the_client_holds() {
        let mut client = Client::new(2);
        let [(first, _), (second, _)] = client.gpus[..] else { unreachable!() };
        client.grant(second);
        client.receive(SchedulerMessage::Contended { gpus: 1 << second.index, waiters: 1, grace_us: 1_000_000 });
        client.receive(SchedulerMessage::Resume { client: 1 });
        let sent = client.scheduler.sent();
        assert!(matches!(sent[0], ClientMessage::Hello { resume: 1, flags: 0, .. }), "{sent:?}");
        assert!(is_introduction(&sent[1..3], first) && is_introduction(&sent[3..5], second), "{sent:?}");
        assert_eq!(sent[5..], [ClientMessage::Held { gpus: 1 << second.index }]);
        assert!(client.thread.turn(second).is_held() && !client.thread.turn(second).is_contended());
        assert!(!second.gate.is_closed_for(closed::LOCK));
    }

    #[test]
    fn a_request_outlives_the_connection_until_the_client_runs_without_a_scheduler() {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        let limit = SchedulerMessage::Limit { slot: gpu.index, bytes: 0, seq: 1, most: GRANULE, spare: 0, max: 0 };
        client.receive(limit);
        thread::scope(|scope| {
            let asking = scope.spawn(move || raise(gpu, GRANULE, false, 0));
            until(|| client.sent().iter().any(|message| matches!(message, ClientMessage::RequestLimit { .. })));
            client.thread.on_disconnect("it has ended");
            thread::sleep(Duration::from_millis(20));
            assert!(!asking.is_finished(), "the next scheduler may have another limit");
            client.thread.run_ungated();
            assert_eq!(asking.join().expect("no panic"), Outcome::Raised);
        });
    }

    #[test]
    fn a_restore_outlives_the_connection_until_the_client_runs_without_a_scheduler() {
        let mut client = Client::new(1);
        thread::scope(|scope| {
            let restore = || checkpoints::wait_for_room(std::os::unix::process::parent_id() as i32);
            let asked = scope.spawn(restore);
            until(|| client.sent().iter().any(|message| matches!(message, ClientMessage::ForeignCheckpoint { .. })));
            client.thread.on_disconnect("it has ended");
            let asking = scope.spawn(restore);
            thread::sleep(Duration::from_millis(300));
            assert!(!asked.is_finished() && !asking.is_finished(), "the next scheduler may know whether there is room");
            client.thread.run_ungated();
        });
    }

    #[test]
    fn a_handshake_without_an_answer_delays_no_step() {
        let mut client = Client::new(1);
        client.thread.on_disconnect("it has ended");
        let (attempt, peer) = begin(Duration::ZERO);
        client.thread.attempt = Some(attempt);
        for _ in 0..3 {
            let begun = Instant::now();
            assert!(client.step() <= RETRY_SOON && begun.elapsed() < Duration::from_secs(1));
            assert!(client.thread.attempt.is_some());
        }
        peer.send(&SchedulerMessage::Welcome { version: version::MAX, client: 8 });
        client.step();
        assert!(connection::is_connected() && client.gpu().is_introduced());
        assert_eq!(CLIENT.load(Ordering::Relaxed), 8);
        let sent = peer.sent();
        assert!(is_introduction(&sent[..2], client.gpu()), "{sent:?}");
    }

    #[test]
    fn a_handshake_that_fails_is_tried_again_later() {
        let mut client = Client::new(1);
        client.thread.on_disconnect("it has ended");
        for (age, why) in [(Duration::from_secs(60), "it does not answer"), (Duration::ZERO, "it is full")] {
            let (attempt, peer) = begin(age);
            client.thread.attempt = Some(attempt);
            if age.is_zero() {
                peer.send(&SchedulerMessage::Refused { reason: Refusal::TooMany, text: Text::new("it is full") });
            }
            client.step();
            assert!(client.thread.attempt.is_none() && !connection::is_connected());
            assert!(client.thread.offline_reason.contains(why), "{}", client.thread.offline_reason);
            assert!(client.thread.next_try > Instant::now());
        }
    }

    #[test]
    fn a_connection_that_keeps_breaking_is_retried_later() {
        let mut client = Client::new(1);
        client.thread.connected_at = (Instant::ago(Duration::from_secs(1)), Instant::ago(Duration::from_secs(9)));
        client.thread.on_disconnect("it has ended");
        assert!(client.thread.next_try <= Instant::now(), "a steady connection is retried at once");
        let lost_at = Instant::ago(Duration::from_secs(9));
        client.thread.connected_at = (Instant::now(), lost_at);
        client.thread.on_disconnect("it has ended");
        assert_eq!(client.thread.disconnected_since, Some(lost_at), "the connection counts as never made");
        assert!(client.thread.next_try > Instant::now());
        client.thread.on_refusal("it is full");
        assert!(client.thread.next_try > Instant::now() && client.thread.offline_reason == "it is full");
    }
}
