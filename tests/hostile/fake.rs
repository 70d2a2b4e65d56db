//! A fake scheduler that sends arbitrary messages, and the programs that connect to it.

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use nvshare_wire::{ClientMessage, SchedulerMessage, Uuid, version};
use test_support::machine::*;

use crate::peer::{Connection, Listener, Received};

/// The memory that the fake grants. The GPU has more, so the grant is always honest.
pub const MEMORY: u64 = 64 * MIB;
pub const TICK: Duration = Duration::from_millis(1);

pub fn machine() -> Machine {
    Machine::new(Setup { memory: 2 * MEMORY, context: 2 * MIB, ..Setup::default() })
}

/// A scheduler that sends arbitrary messages.
pub struct Fake<'a> {
    machine: &'a Machine,
    listener: Option<Listener>,
    pub connection: Option<Connection>,
    /// Whether the fake has answered `Hello`. This answer is its first packet, and fixes the
    /// version.
    pub has_answered: bool,
    pub seq: u32,
    /// Whether the fake has told the program a limit below the GPU's memory.
    pub stingy: bool,
    /// Whether the fake refuses to grant locks.
    pub grants_nothing: bool,
    /// The GPUs that the program has named on this connection, by slot.
    pub named: BTreeMap<u32, Uuid>,
}

impl<'a> Fake<'a> {
    pub fn new(machine: &'a Machine) -> Self {
        let listener = Some(Listener::new(&machine.socket()));
        Self {
            machine,
            listener,
            connection: None,
            has_answered: false,
            seq: 0,
            stingy: false,
            grants_nothing: false,
            named: BTreeMap::new(),
        }
    }

    /// Removes the socket and the connection.
    pub fn vanish(&mut self) {
        (self.listener, self.connection) = (None, None);
    }

    pub fn return_if_away(&mut self) {
        self.listener.get_or_insert_with(|| Listener::new(&self.machine.socket()));
    }

    pub fn say(&mut self, message: SchedulerMessage) {
        let version = self.connection.as_ref().map_or(1, |c| c.version);
        self.send(message.encode(version).as_bytes());
    }

    pub fn send(&mut self, packet: &[u8]) {
        let Some(connection) = &mut self.connection else { return };
        connection.send(packet);
        match SchedulerMessage::decode(packet, connection.version) {
            Ok(SchedulerMessage::Limit { bytes, .. }) => self.stingy |= bytes < MEMORY,
            Ok(SchedulerMessage::Denied { .. }) => self.stingy = true,
            Ok(SchedulerMessage::Welcome { version, .. }) if !self.has_answered => {
                connection.version = version;
            }
            _ => {}
        }
        self.has_answered = true;
    }

    /// Accepts a client, which has sent `Hello` or will soon send it. Returns whether a client has
    /// just connected.
    pub fn accept(&mut self) -> bool {
        if self.connection.is_none() {
            self.connection = self.listener.as_ref().and_then(Listener::accept);
            self.has_answered = false;
            self.named.clear();
            return self.connection.is_some();
        }
        false
    }

    pub fn welcome(&mut self, version: u16) {
        self.say(SchedulerMessage::Welcome { version, client: 4711 });
    }

    pub fn receive(&mut self) -> Option<ClientMessage> {
        match self.connection.as_ref()?.receive() {
            Received::Nothing => None,
            Received::Message(message) => {
                if let ClientMessage::Attach { slot, uuid, .. } = message {
                    self.named.insert(slot, uuid);
                }
                Some(message)
            }
            Received::End => {
                self.connection = None;
                None
            }
        }
    }

    /// Sends everything that a program needs to run.
    pub fn provide(&mut self, slot: u32) {
        self.seq += 1;
        self.say(SchedulerMessage::Attached { slot });
        self.say(SchedulerMessage::Limit { slot, bytes: MEMORY, seq: self.seq, most: MEMORY, spare: u64::MAX, max: 0 });
        self.say(SchedulerMessage::Allowance { slot, seq: self.seq, bytes: MEMORY });
    }

    /// Acts for a short time as a scheduler with one client.
    pub fn serve(&mut self) {
        self.return_if_away();
        if self.accept() {
            self.welcome(version::MAX);
        }
        while let Some(message) = self.receive() {
            match message {
                ClientMessage::Attach { slot, .. } => self.provide(slot),
                ClientMessage::Request { gpus } => self.say(SchedulerMessage::Grant { gpus }),
                _ => {}
            }
        }
        thread::sleep(TICK);
    }

    /// Serves the program until it has the lock and all its memory.
    pub fn serve_until_granted(&mut self, program: &mut Program) {
        wait_for("the first grant", || {
            self.serve();
            assert_eq!(program.poll(), None, "it has the lock before it ends");
            program.stderr().contains("← Grant").then_some(())
        });
    }

    /// Serves the program until it ends.
    pub fn serve_to_the_end(&mut self, program: &mut Program) {
        let begin = Instant::now();
        while program.poll().is_none() {
            self.serve();
            assert!(begin.elapsed() < PATIENCE, "`{}` (pid {}) waits for ever", program.name, program.pid());
        }
    }
}

/// Checks that the program has ended with correct results, or because it was refused memory.
pub fn judge(program: &mut Program, may_be_refused: bool) {
    let status = program.wait();
    let refused = status.code() == Some(1) && program.stdout().contains("CUDA_ERROR_OUT_OF_MEMORY (2)");
    if !(refused && may_be_refused) {
        program.finish();
    }
}

/// Checks that the program keeps waiting for this time.
pub fn stays_for(program: &mut Program, time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        assert_eq!(program.poll(), None, "it ended without a grant");
        thread::sleep(TICK);
    }
}
