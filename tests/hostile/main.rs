//! A scheduler that is broken, malicious, or of another version cannot harm a program: its results are right, it ends, and
//! it waits only where one that is alive and never grants may make it wait. A program may be refused memory by it, as by
//! any scheduler, with CUDA's own error.
//!
//! `NVSHARE_HOSTILE_SEQUENCES=20000 cargo nextest run --test hostile --no-capture` tries more of the random sequences;
//! `NVSHARE_TEST_SEED` begins with that one.

mod nonsense;
mod peer;

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nvshare_wire::{ClientMessage, SchedulerMessage, Text, client::Sharing, scheduler::Refusal, version};

use peer::{Connection, Listener, Received};
use test_support::Dice;
use test_support::machine::*;

/// How many random sequences without `NVSHARE_HOSTILE_SEQUENCES`.
const SEQUENCES: u64 = 400;
/// At once: most of them wait.
const ACTORS: usize = 16;
/// What the fake has to give; the GPU has more, so that it never promises what is not there.
const MEMORY: u64 = 64 * MIB;
const TICK: Duration = Duration::from_millis(1);

/// Each needs at most 8 MiB and runs for a fraction of a second, so that much of the nonsense meets it at work.
const PROGRAMS: &[&str] = &[
    "mix --mem 8M --chunks 3 --reps 1 --rounds 20",
    "mix --mem 4M --chunks 2 --reps 2 --rounds 25 --cpu-ms 5",
    "streams --mem 4M --streams 2 --threads 2 --rounds 30",
    "graph --mem 4M --replays 20 --cpu-ms 5",
    "captures --mem 2M --rounds 8 --capture-ms 10",
    "per-thread --mem 2M --threads 2 --rounds 60",
    "bursts --mem 4M --bursts 20 --pause-ms 8",
    "churn --mem 8M --seconds 0.2",
    "forks --mem 2M --rounds 2",
];

fn machine() -> Machine {
    Machine::new(Setup { memory: 2 * MEMORY, context: 2 * MIB, ..Setup::default() })
}

/// A scheduler that says what it likes.
struct Fake<'a> {
    machine: &'a Machine,
    listener: Option<Listener>,
    connection: Option<Connection>,
    /// The first packet is the answer to `Hello`, and settles the version.
    has_answered: bool,
    seq: u32,
    /// Has said that the program may have less memory than there is.
    stingy: bool,
}

impl<'a> Fake<'a> {
    fn new(machine: &'a Machine) -> Self {
        let listener = Some(Listener::new(&machine.socket()));
        Self { machine, listener, connection: None, has_answered: false, seq: 0, stingy: false }
    }

    /// Nobody is there any more.
    fn vanish(&mut self) {
        (self.listener, self.connection) = (None, None);
    }

    fn return_if_away(&mut self) {
        self.listener.get_or_insert_with(|| Listener::new(&self.machine.socket()));
    }

    fn say(&mut self, message: SchedulerMessage) {
        let version = self.connection.as_ref().map_or(1, |c| c.version);
        self.send(message.encode(version).as_bytes());
    }

    fn send(&mut self, packet: &[u8]) {
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

    /// Whether a client has just connected, which has said `Hello` or is about to.
    fn accept(&mut self) -> bool {
        if self.connection.is_none() {
            self.connection = self.listener.as_ref().and_then(Listener::accept);
            self.has_answered = false;
            return self.connection.is_some();
        }
        false
    }

    fn welcome(&mut self, version: u16) {
        self.say(SchedulerMessage::Welcome { version, client: 4711 });
    }

    fn receive(&mut self) -> Option<ClientMessage> {
        match self.connection.as_ref()?.receive() {
            Received::Nothing => None,
            Received::Message(message) => Some(message),
            Received::End => {
                self.connection = None;
                None
            }
        }
    }

    /// All that a program needs.
    fn provide(&mut self, slot: u32) {
        self.seq += 1;
        self.say(SchedulerMessage::Attached { slot });
        self.say(SchedulerMessage::Limit { slot, bytes: MEMORY, seq: self.seq, most: MEMORY, spare: u64::MAX, max: 0 });
        self.say(SchedulerMessage::Allowance { slot, seq: self.seq, bytes: MEMORY });
    }

    /// For a moment, what a scheduler with one client does.
    fn serve(&mut self) {
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

    /// Serves until the program has the lock and all its memory.
    fn serve_until_granted(&mut self, program: &mut Program) {
        wait_for("the first grant", || {
            self.serve();
            assert_eq!(program.poll(), None, "it has the lock before it ends");
            program.stderr().contains("← Grant").then_some(())
        });
    }

    /// Serves until it ends.
    fn serve_to_the_end(&mut self, program: &mut Program) {
        let begin = Instant::now();
        while program.poll().is_none() {
            self.serve();
            assert!(begin.elapsed() < PATIENCE, "`{}` (pid {}) waits for ever", program.name, program.pid());
        }
    }
}

/// It has ended: with right results, or because it was refused memory.
fn judge(program: &mut Program, may_be_refused: bool) {
    let status = program.wait();
    let refused = status.code() == Some(1) && program.stdout().contains("CUDA_ERROR_OUT_OF_MEMORY (2)");
    if !(refused && may_be_refused) {
        program.finish();
    }
}

/// It goes on waiting that long.
fn stays_for(program: &mut Program, time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        assert_eq!(program.poll(), None, "it ended without a grant");
        thread::sleep(TICK);
    }
}

const WORK: &str = "mix --mem 8M --chunks 2 --reps 2 --rounds 20 --cpu-ms 5";

#[test]
fn a_scheduler_that_never_answers_is_done_without() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program(WORK).quiet().start();
    wait_for("its end", || {
        fake.accept();
        program.poll()
    });
    program.finish();
    let said = program.stderr();
    assert!(said.lines().count() == 1 && said.contains("does not answer"), "it said {said:?}");
}

#[test]
fn a_scheduler_that_never_grants_makes_it_wait_until_it_is_gone() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program(WORK).start();
    wait_for("a request", || {
        if fake.accept() {
            fake.welcome(1);
            fake.provide(0);
        }
        matches!(fake.receive(), Some(ClientMessage::Request { .. })).then_some(())
    });
    // Longer than it would wait for one that is gone.
    stays_for(&mut program, Duration::from_secs(4));
    fake.vanish();
    program.finish();
}

#[test]
fn a_scheduler_that_stops_after_a_grant_lets_it_run_to_the_end() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    // It allocates and frees all the time, and nobody takes the reports of that: the socket fills up.
    let mut program = machine.program("churn --mem 32M --seconds 3").start();
    fake.serve_until_granted(&mut program);
    program.finish();
    assert!(program.stderr().contains("(not sent)"), "the socket was never full");
}

#[test]
fn a_scheduler_that_reads_nothing_gets_the_lock_back_once_it_does() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program("churn --mem 32M --seconds 4").start();
    fake.serve_until_granted(&mut program);
    program.wait_to_say("(not sent)");
    fake.say(SchedulerMessage::Revoke { gpus: 1 });
    // It drains, and cannot say so.
    stays_for(&mut program, Duration::from_millis(500));
    wait_for("the release", || matches!(fake.receive(), Some(ClientMessage::Release { .. })).then_some(()));
    fake.serve_to_the_end(&mut program);
    program.finish();
}

#[test]
fn a_scheduler_that_takes_and_gives_at_every_moment_changes_no_result() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program(WORK).start();
    fake.serve_until_granted(&mut program);
    for round in 0..200 {
        let bytes = if round % 2 == 0 { 0 } else { MEMORY };
        fake.say(SchedulerMessage::Revoke { gpus: 1 });
        fake.say(SchedulerMessage::Allowance { slot: 0, seq: round, bytes });
        fake.say(SchedulerMessage::Grant { gpus: 1 });
        thread::sleep(TICK);
    }
    fake.provide(0);
    fake.say(SchedulerMessage::Grant { gpus: 1 });
    fake.serve_to_the_end(&mut program);
    program.finish();
}

#[test]
fn a_scheduler_that_never_stops_talking_changes_no_result() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program(WORK).quiet().start();
    wait_for("a connection", || fake.accept().then_some(()));
    fake.welcome(1);
    fake.provide(0);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(2) && program.poll().is_none() {
        fake.say(SchedulerMessage::Contended { gpus: u64::MAX, waiters: 0, grace_us: u32::MAX });
        fake.say(SchedulerMessage::Allowance { slot: 0, seq: u32::MAX, bytes: MEMORY });
        fake.say(SchedulerMessage::Grant { gpus: 1 });
    }
    fake.serve_to_the_end(&mut program);
    program.finish();
}

#[test]
fn a_version_that_it_does_not_speak_is_no_agreement() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program(WORK).start();
    let begin = Instant::now();
    while program.poll().is_none() {
        if fake.accept() {
            fake.welcome(7);
        }
        fake.receive();
        assert!(begin.elapsed() < PATIENCE / 4, "it waits for the grant of a scheduler it cannot understand");
        thread::sleep(TICK);
    }
    program.finish();
}

#[test]
fn refusals_and_wrong_versions_are_one_line_and_no_more() {
    let mut dice = Dice::new(1);
    for version in [None, Some(1), Some(2), Some(u16::MAX)] {
        let machine = machine();
        let mut fake = Fake::new(&machine);
        let mut program = machine.program(WORK).quiet().start();
        wait_for("its end", || {
            fake.accept();
            if let Some(ClientMessage::Hello { .. }) = fake.receive() {
                match version {
                    None => fake.say(nonsense::refusal(&mut dice)),
                    // A packet of a version that nobody has agreed on.
                    Some(version) => fake.send(&[&version.to_le_bytes()[..], &welcome_after_its_version()].concat()),
                }
                fake.connection = None;
            }
            program.poll()
        });
        program.finish();
        let said = program.stderr();
        assert!(said.lines().count() <= 1, "it said {said:?}");
    }
}

#[test]
fn a_scheduler_that_ends_after_every_welcome_is_done_without() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program(WORK).start();
    wait_within(PATIENCE / 3, "its end", || {
        fake.accept();
        if let Some(ClientMessage::Hello { .. }) = fake.receive() {
            fake.welcome(1);
            fake.connection = None;
        }
        program.poll()
    });
    program.finish();
}

#[test]
fn a_refusal_cannot_write_to_the_terminal_what_it_likes() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program(WORK).quiet().start();
    wait_for("its end", || {
        fake.accept();
        if let Some(ClientMessage::Hello { .. }) = fake.receive() {
            let text = Text::new("no\r\nroot: your disk is full\x1b[8m");
            fake.say(SchedulerMessage::Refused { reason: Refusal::Stopping, text });
            fake.connection = None;
        }
        program.poll()
    });
    program.finish();
    let said = program.stderr();
    assert!(said.lines().count() == 1 && !said.contains(['\r', '\x1b']), "it said {said:?}");
}

/// How many files a program has open.
fn open_files(program: &Program) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", program.pid())).map_or(0, Iterator::count)
}

#[test]
fn descriptors_that_nobody_asked_for_are_closed() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program("bursts --mem 4M --bursts 100 --pause-ms 20").quiet().start();
    wait_for("a request", || {
        fake.serve();
        (open_files(&program) > 0 && fake.has_answered).then_some(())
    });
    (0..50).for_each(|_| fake.serve());
    let before = open_files(&program);
    for count in [1, 16, 30] {
        for message in [
            SchedulerMessage::Opened { ticket: 0, outcome: Sharing::Done, bytes: 4 * MIB, chunk: 2 * MIB },
            SchedulerMessage::Contended { gpus: 1, waiters: 0, grace_us: 0 },
        ] {
            let connection = fake.connection.as_ref().expect("it is connected");
            assert!(connection.send_with(message.encode(connection.version).as_bytes(), count));
        }
    }
    wait_for("them to be closed", || {
        fake.serve();
        (open_files(&program) <= before).then_some(())
    });
    fake.serve_to_the_end(&mut program);
    program.finish();
}

/// What a scheduler may answer to a program that opens another's memory, and no memory comes of it.
#[test]
fn a_scheduler_that_passes_on_nonsense_makes_opening_fail_and_no_more() {
    let real = machine();
    let meeting = real.path("meeting");
    let words = format!("--file {} --mem 8M --private 4M --rounds 1", meeting.display());
    // A handle of ours needs an exporter of ours, with whatever scheduler.
    let mut exporter_fake = Fake::new(&real);
    let mut exporter = real.program(&format!("share --role export {words}")).start();
    wait_for("a handle", || {
        exporter_fake.serve();
        let words = std::fs::read(&meeting).ok()?;
        words.get(..4).is_some_and(|count| count != [0; 4]).then_some(())
    });
    exporter.kill();
    drop(exporter_fake);
    let answers: [(Sharing, u64, u64, usize, u32); 7] = [
        (Sharing::Done, 8 * MIB, 8 * MIB, 1, 205), // a descriptor of something else
        (Sharing::Done, 8 * MIB, 8 * MIB, 0, 205),
        (Sharing::Done, 0, 0, 1, 205),
        (Sharing::Done, 2 * MIB, 2 * MIB, 1, 205), // less than the allocation
        (Sharing::Done, u64::MAX, 2 * MIB, 16, 205),
        (Sharing::Failed, 0, 0, 4, 205),
        (Sharing::Unknown, 0, 0, 4, 1),
    ];
    for (outcome, bytes, chunk, descriptors, code) in answers {
        let mut fake = Fake::new(&real);
        let mut importer = real.program(&format!("share --role import {words} --expect {code}")).start();
        let begin = Instant::now();
        while importer.poll().is_none() {
            fake.return_if_away();
            if fake.accept() {
                fake.welcome(version::MAX);
            }
            while let Some(message) = fake.receive() {
                match message {
                    ClientMessage::Attach { slot, .. } => fake.provide(slot),
                    ClientMessage::Request { gpus } => fake.say(SchedulerMessage::Grant { gpus }),
                    ClientMessage::Open { ticket, .. } => {
                        let connection = fake.connection.as_ref().expect("it is connected");
                        let answer = SchedulerMessage::Opened { ticket, outcome, bytes, chunk };
                        let packet = answer.encode(connection.version);
                        match descriptors {
                            0 => connection.send(packet.as_bytes()),
                            n => connection.send_with(packet.as_bytes(), n),
                        };
                    }
                    _ => {}
                }
            }
            assert!(begin.elapsed() < PATIENCE, "it waits for ever");
            thread::sleep(TICK);
        }
        importer.finish();
    }
}

#[test]
fn a_scheduler_that_says_it_knows_nothing_over_and_over_is_told_everything() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program(WORK).start();
    fake.serve_until_granted(&mut program);
    let begin = Instant::now();
    let mut told = 0;
    while program.poll().is_none() {
        // Also several at once, while it still answers the one before.
        (0..3).for_each(|_| fake.say(SchedulerMessage::Resume { client: u64::MAX }));
        fake.return_if_away();
        if fake.accept() {
            fake.welcome(version::MAX);
        }
        while let Some(message) = fake.receive() {
            match message {
                ClientMessage::Attach { slot, .. } => fake.provide(slot),
                ClientMessage::Request { gpus } => fake.say(SchedulerMessage::Grant { gpus }),
                ClientMessage::Held { .. } => told += 1,
                _ => {}
            }
        }
        assert!(begin.elapsed() < PATIENCE, "it waits for ever");
        thread::sleep(TICK);
    }
    program.finish();
    assert!(told > 3, "it answered {told} times");
}

/// One that has restarted and is not heard of again.
#[test]
fn a_scheduler_that_asks_again_and_reads_nothing_is_left() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program(WORK).start();
    fake.serve_until_granted(&mut program);
    let begin = Instant::now();
    while program.poll().is_none() && begin.elapsed() < Duration::from_secs(2) {
        fake.say(SchedulerMessage::Resume { client: 1 });
        thread::sleep(TICK);
    }
    fake.vanish();
    program.finish();
}

/// It knows no messages about memory of others, and would hang up on one.
#[test]
fn under_an_older_scheduler_a_program_exports_what_it_could_before() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let words = format!("--file {} --mem 8M --private 4M", machine.path("meeting").display());
    let mut program = machine.program(&format!("share --role export {words}")).start();
    let begin = Instant::now();
    while program.poll().is_none() {
        fake.return_if_away();
        if fake.accept() {
            fake.welcome(version::SHARING - 1);
        }
        while let Some(message) = fake.receive() {
            match message {
                ClientMessage::Attach { slot, .. } => fake.provide(slot),
                ClientMessage::Request { gpus } => fake.say(SchedulerMessage::Grant { gpus }),
                _ => {}
            }
        }
        assert!(begin.elapsed() < PATIENCE, "it waits for ever");
        thread::sleep(TICK);
    }
    assert_eq!(program.wait().code(), Some(1));
    assert!(program.stdout().contains("CUDA_ERROR_INVALID_VALUE (1)"), "{}", program.stdout());
}

/// The rest of a `Welcome`, behind the two bytes that say which version its header is of.
fn welcome_after_its_version() -> Vec<u8> {
    SchedulerMessage::Welcome { version: 1, client: 1 }.encode(0).as_bytes()[2..].to_vec()
}

/// One step of a sequence.
fn misbehave(fake: &mut Fake, dice: &mut Dice) {
    if fake.accept() {
        match dice.below(20) {
            0 => {}                      // no answer
            1 => fake.connection = None, // the door is shut again
            2 => fake.say(nonsense::refusal(dice)),
            3 => fake.welcome(dice.pick(&[0, 3, u16::MAX])),
            4 => fake.send(&nonsense::packet(dice, 0)),
            5 => fake.say(nonsense::message(dice)),
            _ => fake.welcome(dice.pick(&[1, 2])),
        }
    }
    let version = fake.connection.as_ref().map_or(1, |c| c.version);
    match dice.below(40) {
        0..10 => fake.say(nonsense::message(dice)),
        10 => fake.send(&nonsense::packet(dice, version)),
        11 => (0..dice.below(2000)).for_each(|_| fake.say(nonsense::message(dice))),
        // As it should be, so that the program gets further before the next blow.
        12..18 => {
            fake.provide(0);
            fake.say(SchedulerMessage::Grant { gpus: 1 });
        }
        18..22 => (0..4).for_each(|_| fake.serve()),
        // The lock and memory taken back, with or without time to do as told.
        22..28 => {
            fake.say(SchedulerMessage::Revoke { gpus: 1 });
            thread::sleep(dice.milliseconds(15));
            fake.seq += 1;
            let bytes = dice.pick(&[0, 0, 2 * MIB, 4 * MIB]);
            fake.say(SchedulerMessage::Allowance { slot: 0, seq: fake.seq, bytes });
            thread::sleep(dice.milliseconds(8));
        }
        28 => while fake.receive().is_some() {},
        29 if dice.one_in(3) => fake.connection = None,
        30 if dice.one_in(3) => fake.vanish(),
        31..33 => fake.return_if_away(),
        _ => thread::sleep(dice.milliseconds(8)),
    }
}

/// A program under a scheduler that says `seed`'s nonsense, and then is a good one or none.
fn play(seed: u64) {
    let mut dice = Dice::new(seed);
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut launch = machine.program(dice.pick(PROGRAMS));
    if dice.one_in(8) {
        launch = launch.env("NVSHARE_ENGINE", dice.pick(&["managed", "none"]));
    }
    let quiet = dice.one_in(4);
    if quiet {
        launch = launch.quiet();
    }
    let mut program = launch.start();
    for _ in 0..5 + dice.below(60) {
        misbehave(&mut fake, &mut dice);
    }
    if dice.one_in(4) {
        fake.vanish();
        program.wait();
    } else {
        if dice.one_in(2) {
            fake.connection = None;
        } else {
            fake.provide(0);
            fake.say(SchedulerMessage::Contended { gpus: 1, waiters: 0, grace_us: 0 });
            fake.say(SchedulerMessage::Grant { gpus: 1 });
        }
        fake.serve_to_the_end(&mut program);
    }
    judge(&mut program, fake.stingy);
    let said = program.stderr();
    assert!(!quiet || said.lines().count() <= 1, "it said {said:?}");
}

#[test]
fn no_sequence_of_nonsense_harms_a_program() {
    let sequences =
        std::env::var("NVSHARE_HOSTILE_SEQUENCES").map_or(SEQUENCES, |text| text.parse().expect("a number"));
    let (first, next) = (Dice::seed(), AtomicU64::new(0));
    let begin = Instant::now();
    thread::scope(|scope| {
        for _ in 0..ACTORS {
            scope.spawn(|| {
                loop {
                    let n = next.fetch_add(1, Ordering::Relaxed);
                    if n >= sequences {
                        break;
                    }
                    let seed = first + n;
                    if std::panic::catch_unwind(|| play(seed)).is_err() {
                        next.store(sequences, Ordering::Relaxed);
                        panic!("NVSHARE_TEST_SEED={seed} shows it first");
                    }
                }
            });
        }
    });
    eprintln!("{sequences} sequences from NVSHARE_TEST_SEED={first} in {:.0} s", begin.elapsed().as_secs_f64());
}
