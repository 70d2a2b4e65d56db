//! Random sequences of messages, most of them nonsense.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use nvshare_wire::{SchedulerMessage, version};
use test_support::Dice;
use test_support::machine::*;

use crate::fake::{Fake, judge, machine};
use crate::nonsense;

/// The number of random sequences if `NVSHARE_HOSTILE_SEQUENCES` is not set.
const SEQUENCES: u64 = 100;
/// The number of concurrent sequences. Most of them wait.
const ACTORS: usize = 16;

/// Each program needs at most 8 MiB and runs for a fraction of a second. So most of the nonsense
/// arrives while the program works.
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

/// One step of a sequence.
fn misbehave(fake: &mut Fake, dice: &mut Dice) {
    if fake.accept() {
        match dice.below(20) {
            0 => {}                      // no answer
            1 => fake.connection = None, // closes the connection again
            2 => fake.say(nonsense::refusal(dice)),
            3 => fake.welcome(dice.pick(&[0, version::MAX + 1, u16::MAX])),
            4 => fake.send(&nonsense::packet(dice, 0)),
            5 => fake.say(nonsense::message(dice)),
            _ => fake.welcome(version::MAX),
        }
    }
    let version = fake.connection.as_ref().map_or(1, |c| c.version);
    match dice.below(40) {
        0..10 => fake.say(nonsense::message(dice)),
        10 => fake.send(&nonsense::packet(dice, version)),
        11 => (0..dice.below(2000)).for_each(|_| fake.say(nonsense::message(dice))),
        // Sends valid messages, so that the program makes some progress before the next nonsense.
        12..18 => {
            fake.provide(0);
            fake.say(SchedulerMessage::Grant { gpus: 1 });
        }
        18..22 => (0..4).for_each(|_| fake.serve()),
        // Revokes the lock and memory, with or without time for the program to obey.
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

/// Runs a program under a scheduler that sends the nonsense of `seed`. After that, the scheduler
/// either behaves well or is gone.
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
fn random_message_sequences_harm_no_program() {
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
