//! Programs take turns on the GPU, however they look up the driver and use it, and whatever an
//! administrator changes. The tests run real processes on the simulated GPU.

use std::time::Duration;

use test_support::machine::*;

/// A GPU that cannot hold two programs of 32 MiB at the same time.
fn pressed() -> Setup {
    Setup { memory: 64 * MIB, ..Setup::default() }
}

/// Arguments of a program that is busy until it is killed.
const ENDLESS: &str = "mix --mem 16M --reps 4 --rounds endless";

#[test]
fn programs_wait_for_the_lock_with_every_kind_of_driver_lookup() {
    let machine = Machine::with_scheduler(Setup { anti_thrash: "on", time_quantum: HOUR, ..Setup::default() });
    // The holder never seems idle, even if it gets little processor time.
    let mut holder = machine.program("endless --seconds 3600").start();
    wait_for("its kernel to run", || holder.stderr().contains("running").then_some(()));

    let ways = [
        ("mix --mem 8M --reps 1 --rounds 2", "link"),
        ("mix --mem 8M --reps 1 --rounds 2", "dlsym"),
        ("mix --mem 8M --reps 1 --rounds 2", "getproc"),
        ("per-thread --mem 8M --rounds 3", "dlsym"),
        ("per-thread --mem 8M --rounds 3", "getproc"),
    ];
    let start = |(words, way): &(&str, &str)| machine.program(words).env("CUDA_LOOKUP", way).start();
    let mut programs: Vec<Program> = ways.iter().map(start).collect();
    for program in &programs {
        machine.wait_for_move(0, "a request", |m| m.pid == program.pid() && m.what == "request");
    }
    // Alone, each program needs a fraction of this time.
    std::thread::sleep(Duration::from_millis(400));
    for (program, (_, way)) in programs.iter_mut().zip(ways) {
        assert_eq!(program.poll(), None, "`{}` found by {way} did not wait: {}", program.name, program.stdout());
        assert_eq!(grants(&machine.moves(), program.pid()), 0);
    }
    holder.kill();
    for program in &mut programs {
        program.finish();
    }
    let moves = machine.moves();
    for program in &programs {
        assert!(grants(&moves, program.pid()) > 0, "`{}` was never given the lock", program.name);
    }
    assert_one_holder(&moves);
}

#[test]
fn programs_of_every_kind_take_turns() {
    let machine = Machine::with_scheduler(Setup { anti_thrash: "on", ..Setup::default() });
    let kinds = [
        ("mix --mem 16M --reps 8 --rounds 6", "link"),
        ("mix --mem 16M --reps 8 --rounds 6", "dlsym"),
        ("mix --mem 16M --reps 8 --rounds 6", "getproc"),
        ("per-thread --mem 48M --rounds 24", "getproc"),
    ];
    let start = |(words, way): &(&str, &str)| machine.program(words).env("CUDA_LOOKUP", way).start();
    let mut programs: Vec<Program> = kinds.iter().map(start).collect();
    for program in &mut programs {
        program.finish();
    }
    let moves = machine.moves();
    assert_one_holder(&moves);
    for program in &programs {
        let turns = grants(&moves, program.pid());
        assert!(turns >= 2, "`{}` was given the lock {turns} times", program.name);
    }
    machine.wait_until_empty();
}

/// Managed memory that doesn't fit would thrash if two programs ran at the same time. The mode
/// `auto` prevents such thrashing from the start.
#[test]
fn managed_memory_beyond_the_capacity_takes_turns_in_auto() {
    let machine = Machine::with_scheduler(Setup { anti_thrash: "auto", ..Setup::default() });
    let start = || machine.program("mix --mem 160M --reps 4 --rounds 12").env("NVSHARE_ENGINE", "managed").start();
    let mut programs = [start(), start()];
    for program in &mut programs {
        program.finish();
    }
    let moves = machine.moves();
    assert_one_holder(&moves);
    for program in &programs {
        let turns = grants(&moves, program.pid());
        assert!(turns >= 2, "`{}` was given the lock {turns} times", program.name);
    }
    machine.wait_until_empty();
}

/// Runs programs beside a program that competes for memory. All results must be correct, and memory
/// must have moved.
#[track_caller]
fn under_pressure(setup: Setup, words: &[&str]) {
    let machine = Machine::with_scheduler(setup);
    let mut opponent = machine.program("mix --mem 32M --reps 3 --rounds endless").start();
    machine.wait_for_grants(&opponent, 1);
    let mut programs: Vec<Program> = words.iter().map(|words| machine.program(words).start()).collect();
    for program in &mut programs {
        program.finish();
    }
    let moves = machine.moves();
    for program in &programs {
        let turns = grants(&moves, program.pid());
        assert!(turns >= 2, "`{}` was given the lock {turns} times", program.name);
        let said = program.stderr();
        assert!(said.contains("bytes left in"), "nothing of `{}` left the GPU", program.name);
    }
    opponent.kill();
    machine.wait_until_empty();
}

#[test]
fn graphs_are_replayed_after_evictions() {
    under_pressure(pressed(), &["graph --mem 32M --replays 12 --cpu-ms 10"]);
}

#[test]
fn stream_captures_survive_hand_overs() {
    under_pressure(pressed(), &["captures --mem 32M --rounds 6 --capture-ms 150"]);
}

#[test]
fn many_streams_of_many_threads_survive_hand_overs() {
    under_pressure(pressed(), &["streams --mem 32M --streams 4 --threads 3 --rounds 15"]);
}

#[test]
fn random_allocations_survive_hand_overs() {
    let seed = Dice::seeded().below(1_000_000);
    under_pressure(pressed(), &[&format!("churn --mem 36M --seconds 2 --steps 150 --seed {seed}")]);
}

#[test]
fn a_kernel_that_the_host_ends_does_not_block_other_programs() {
    let machine = Machine::with_scheduler(Setup { anti_thrash: "on", ..Setup::default() });
    let mut other = machine.program(ENDLESS).start();
    machine.wait_for_grants(&other, 1);
    let mut persistent = machine.program("persistent --mem 16M --seconds 1").start();
    machine.wait_for_grants(&persistent, 1);
    machine.wait_for_grants(&other, 2);
    persistent.finish();
    other.end();
    machine.wait_until_empty();
}

// ---- co-running ----------------------------------------------------------------------------------------------------

#[test]
fn programs_with_low_utilization_run_concurrently() {
    let machine = Machine::with_scheduler(Setup::default());
    let mut programs = [0, 1].map(|_| machine.program("launches --ms 600000 --ns 1000 --pause-us 1000").start());
    // The scheduler measures the use of the GPU again in each turn. On a busy machine the measured
    // use may be too high.
    wait_for("both to hold the lock", || holders(&machine.moves()).iter().any(|(_, now)| now.len() > 1).then_some(()));
    programs.iter_mut().for_each(Program::kill);
    machine.wait_until_empty();
}

#[test]
fn programs_with_high_utilization_take_turns() {
    let machine = Machine::with_scheduler(Setup::default());
    let mut programs = [0, 1].map(|_| machine.program("launches --ms 600000 --ns 5000000 --pause-us 0").start());
    programs.iter().for_each(|program| machine.wait_for_grants(program, 3));
    // A program that ends hardly uses the GPU any more.
    assert_one_holder(&machine.moves());
    programs.iter_mut().for_each(Program::kill);
    machine.wait_until_empty();
}

#[test]
fn a_changed_time_quantum_takes_effect_immediately() {
    let machine = Machine::with_scheduler(Setup { anti_thrash: "on", ..Setup::default() });
    let mut programs = [machine.program(ENDLESS).start(), machine.program(ENDLESS).start()];
    for program in &programs {
        machine.wait_for_grants(program, 2);
    }
    machine.ctl(&["set", "time-quantum", "3600"]);
    let changed = machine.moves().len();
    // A revoke may be in progress. The next holder keeps the lock, unless it seems idle because the
    // machine is slow.
    std::thread::sleep(Duration::from_millis(1500));
    let revokes = machine.moves()[changed..].iter().filter(|m| m.what == "revoke").count();
    assert!(revokes <= 1, "{revokes} turns have ended although one lasts an hour");

    // The turn of one hour ends, and later turns last one second.
    let skip = machine.moves().len();
    machine.ctl(&["-T", "1"]);
    wait_for("the end of two turns", || {
        (machine.moves()[skip..].iter().filter(|m| m.what == "revoke").count() >= 2).then_some(())
    });
    let moves = machine.moves();
    let end = moves.iter().rposition(|m| m.what == "revoke").expect("waited for");
    let begin = moves[..end].iter().rfind(|m| m.what == "grant" && m.pid == moves[end].pid).expect("it was granted");
    let turn = moves[end].ms - begin.ms;
    assert!(turn >= 950.0, "a turn of {turn} ms under a time quantum of 1 s");
    assert_one_holder(&machine.moves());
    programs.iter_mut().for_each(Program::kill);
    machine.wait_until_empty();
}

#[test]
fn anti_thrash_can_be_changed_at_run_time() {
    let machine = Machine::with_scheduler(Setup { anti_thrash: "on", ..Setup::default() });
    let mut programs = [machine.program(ENDLESS).start(), machine.program(ENDLESS).start()];
    for program in &programs {
        machine.wait_for_grants(program, 1);
    }
    let on = machine.moves().len();
    assert_one_holder(&machine.moves());

    machine.ctl(&["-S", "off"]);
    wait_for("both to hold the lock", || holders(&machine.moves()).iter().any(|(_, now)| now.len() == 2).then_some(()));

    machine.ctl(&["-S", "on"]);
    let again = machine.moves().len();
    assert!(again > on);
    wait_for("one of them to be asked to go", || {
        let moves = machine.moves();
        let alone = holders(&moves).last().is_some_and(|(_, now)| now.len() <= 1);
        (moves[again.saturating_sub(2)..].iter().any(|m| m.what == "revoke") && alone).then_some(())
    });
    let alone = machine.moves().len();
    for _ in 0..2 {
        let skip = machine.moves().len();
        machine.wait_for_move(skip, "turns", |m| m.what == "grant");
    }
    for (m, now) in holders(&machine.moves()).iter().filter(|(m, _)| machine.moves()[alone..].contains(m)) {
        assert!(now.len() <= 1, "clients {now:?} hold the lock at once after {m:?}");
    }

    machine.ctl(&["set", "anti-thrash", "auto"]);
    for program in &mut programs {
        program.end();
    }
    machine.wait_until_empty();
}
