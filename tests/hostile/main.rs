//! A scheduler that is broken, malicious, or of another version cannot harm a program: the program
//! ends with correct results, or waits for a living scheduler that never grants the lock. Any
//! scheduler may refuse a program memory, and the program then gets CUDA's own error. The modules
//! `clients` and `attacks` test the reverse: programs cannot prevent a scheduler from serving other
//! programs.
//!
//! `NVSHARE_HOSTILE_SEQUENCES=20000 cargo nextest run --test hostile --no-capture` tries more
//! random sequences. `NVSHARE_TEST_SEED` sets the first seed.

mod attacks;
mod clients;
mod fake;
mod nonsense;
mod peer;
mod readers;
mod sequences;
mod sleep;

use std::thread;
use std::time::{Duration, Instant};

use nvshare_wire::{ClientMessage, SchedulerMessage, Text, client::Sharing, scheduler::Refusal, version};

use fake::{Fake, MEMORY, TICK, machine, stays_for};
use test_support::Dice;
use test_support::machine::*;

const WORK: &str = "mix --mem 8M --chunks 2 --reps 2 --rounds 20 --cpu-ms 5";

#[test]
fn a_program_runs_without_a_scheduler_that_never_answers() {
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
fn a_program_waits_for_a_grant_until_the_scheduler_disconnects() {
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
    // This time exceeds a program's wait for a scheduler that is gone.
    stays_for(&mut program, Duration::from_secs(4));
    fake.vanish();
    program.finish();
}

/// The program has outgrown the limit of a scheduler that has gone. The next scheduler sends its limit late.
#[test]
fn an_allocation_waits_for_the_next_schedulers_limit() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program("mix --mem 24M --chunks 3 --reps 1 --rounds 2").start();
    wait_for("a request for a higher limit", || {
        if fake.accept() {
            fake.welcome(version::MAX);
        }
        match fake.receive()? {
            ClientMessage::Attach { slot, .. } => {
                let limit =
                    SchedulerMessage::Limit { slot, bytes: 12 * MIB, seq: 1, most: MEMORY, spare: u64::MAX, max: 0 };
                fake.say(SchedulerMessage::Attached { slot });
                fake.say(limit);
                fake.say(SchedulerMessage::Allowance { slot, seq: 1, bytes: MEMORY });
                None
            }
            ClientMessage::RequestLimit { .. } => Some(()),
            _ => None,
        }
    });
    fake.vanish();
    stays_for(&mut program, Duration::from_secs(1));
    fake.return_if_away();
    wait_for("the GPU to be named again", || {
        if fake.accept() {
            fake.welcome(version::MAX);
        }
        matches!(fake.receive(), Some(ClientMessage::Attach { .. })).then_some(())
    });
    stays_for(&mut program, Duration::from_secs(1));
    fake.provide(0);
    fake.serve_to_the_end(&mut program);
    program.finish();
}

#[test]
fn a_granted_program_finishes_if_the_scheduler_hangs() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    // The program allocates and frees continuously. The fake never reads its reports, so the socket
    // buffer fills up.
    let mut program = machine.program("churn --mem 32M --seconds 3").start();
    fake.serve_until_granted(&mut program);
    program.finish();
    assert!(program.stderr().contains("(not sent)"), "the socket was never full");
}

#[test]
fn a_release_is_delivered_once_the_scheduler_reads_again() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program("churn --mem 32M --seconds 4").start();
    fake.serve_until_granted(&mut program);
    program.wait_to_say("(not sent)");
    fake.say(SchedulerMessage::Revoke { gpus: 1 });
    // The program drains, but cannot report that.
    stays_for(&mut program, Duration::from_millis(500));
    wait_for("the release", || matches!(fake.receive(), Some(ClientMessage::Release { .. })).then_some(()));
    fake.serve_to_the_end(&mut program);
    program.finish();
}

#[test]
fn rapid_revokes_and_grants_change_no_result() {
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
fn a_flood_of_messages_changes_no_result() {
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
fn an_unknown_protocol_version_is_rejected() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program(WORK).start();
    let begin = Instant::now();
    while program.poll().is_none() {
        if fake.accept() {
            fake.welcome(version::MAX + 1);
        }
        fake.receive();
        assert!(begin.elapsed() < PATIENCE, "it waits for the grant of a scheduler it cannot understand");
        thread::sleep(TICK);
    }
    program.finish();
}

#[test]
fn refusals_and_wrong_versions_print_one_line() {
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
                    // The packet has a version that was not agreed on.
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
fn a_program_runs_without_a_scheduler_that_quits_after_each_welcome() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program(WORK).start();
    wait_for("its end", || {
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
fn control_characters_in_a_refusal_are_replaced() {
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

/// The number of files that a program has open.
fn open_files(program: &Program) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", program.pid())).map_or(0, Iterator::count)
}

#[test]
fn unrequested_descriptors_are_closed() {
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

/// Invalid answers to a program that opens another program's memory. No answer yields memory.
#[test]
fn invalid_answers_to_an_import_only_fail_the_import() {
    let real = machine();
    let meeting = real.path("meeting");
    let words = format!("--file {} --mem 8M --private 4M --rounds 1", meeting.display());
    // nvshare creates the handle, so the exporter runs under nvshare. Any scheduler will do.
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
        (Sharing::Done, 8 * MIB, 8 * MIB, 1, 205), // a descriptor of another kind of file
        (Sharing::Done, 8 * MIB, 8 * MIB, 0, 205),
        (Sharing::Done, 0, 0, 1, 205),
        (Sharing::Done, 2 * MIB, 2 * MIB, 1, 205), // less memory than the allocation
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
fn repeated_resume_requests_are_answered_in_full() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program(WORK).start();
    fake.serve_until_granted(&mut program);
    let begin = Instant::now();
    let mut told = 0;
    while program.poll().is_none() {
        // Sends several messages at a time, while the program still answers the previous one.
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

/// A restarted scheduler sends `Resume` again and again, reads none of the answers, and then
/// disappears.
#[test]
fn a_program_abandons_a_restarted_scheduler_that_reads_nothing() {
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

/// Returns a `Welcome` without the first two bytes, which have the header's version.
fn welcome_after_its_version() -> Vec<u8> {
    SchedulerMessage::Welcome { version: 1, client: 1 }.encode(0).as_bytes()[2..].to_vec()
}
