//! The scheduler is gone permanently. Programs whose memory doesn't fit together take turns among
//! themselves.

use std::fs;
use std::time::Duration;

use test_support::machine::*;

/// A GPU with room for only one of the two programs.
fn pressed() -> Setup {
    Setup { memory: 64 * MIB, anti_thrash: "on", ..Setup::default() }
}

/// Work that lasts until the program is told to end.
fn work(memory: &str) -> String {
    format!("mix --mem {memory} --chunks 4 --reps 6 --rounds endless")
}

/// Starts two programs of `memory` each, then kills their scheduler and removes its socket.
fn abandoned(memory: &str) -> (Machine, [Program; 2]) {
    abandoned_at([work(memory), work(memory)])
}

/// Like [`abandoned`], for programs with these arguments.
fn abandoned_at<const N: usize>(programs: [String; N]) -> (Machine, [Program; N]) {
    let mut machine = Machine::with_scheduler(pressed());
    let programs = programs.map(|arguments| machine.program(&arguments).start());
    for program in &programs {
        machine.wait_for_grants(program, 1);
    }
    machine.kill_scheduler();
    let _ = fs::remove_file(machine.socket());
    (machine, programs)
}

#[track_caller]
fn takes_a_turn(program: &Program) {
    wait_for("a turn", || (turns(program) > 0).then_some(()));
}

/// Returns the number of turns that the program has taken.
fn turns(program: &Program) -> usize {
    program.stderr().matches("acquired the turn").count()
}

#[test]
fn two_programs_that_overcommit_the_gpu_both_finish() {
    let (_machine, mut programs) = abandoned("44M");
    programs.iter().for_each(takes_a_turn);
    programs.iter_mut().for_each(|program| drop(program.end()));
}

#[test]
fn a_small_program_finishes_beside_two_that_take_turns() {
    let small = "mix --mem 10M --chunks 4 --reps 6 --rounds 12".to_owned();
    let (_machine, [mut one, mut small, mut other]) = abandoned_at([work("44M"), small, work("44M")]);
    small.finish();
    [&one, &other].into_iter().for_each(takes_a_turn);
    [&mut one, &mut other].into_iter().for_each(|program| drop(program.end()));
}

#[test]
fn an_idle_program_releases_its_turn() {
    let pauses = format!("{} --cpu-ms 1500", work("44M"));
    let (_machine, mut programs) = abandoned_at([pauses.clone(), pauses]);
    let gives_up = |program: &Program| program.stderr().contains("released the turn (idle)");
    wait_for("a turn to end early", || programs.iter().any(gives_up).then_some(()));
    programs.iter_mut().for_each(|program| drop(program.end()));
}

#[test]
fn programs_started_after_the_scheduler_is_gone_both_finish() {
    let (machine, [mut early]) = abandoned_at([work("20M")]);
    early.end();
    let mut first = machine.program(&work("44M")).start();
    first.wait_to_say("allocation of");
    let mut second = machine.program("churn --mem 40M --seconds 2").start();
    second.finish();
    first.end();
}

#[test]
fn allocations_fail_natively_if_no_scheduler_has_ever_run() {
    const REFUSED: i32 = 3;
    let machine = Machine::new(pressed());
    let mut first = machine.program("stranger --mem 44M --seconds 600").start();
    first.wait_to_say("allocation of");
    let mut second = machine.program("grow --mem 44M").start();
    assert_eq!(second.wait().code(), Some(REFUSED));
    first.end();
    assert_eq!(turns(&first) + turns(&second), 0);
}

#[test]
fn programs_that_fit_continue_without_turns() {
    let words = "mix --mem 20M --chunks 4 --reps 6 --rounds 12".to_owned();
    let (_machine, mut programs) = abandoned_at([words.clone(), words]);
    programs.iter_mut().for_each(|program| drop(program.finish()));
    assert_eq!(programs.iter().map(turns).sum::<usize>(), 0);
}

#[test]
fn a_killed_program_releases_its_turn() {
    let (_machine, mut programs) = abandoned("44M");
    let holder = wait_for("a turn", || programs.iter().position(|program| turns(program) > 0));
    programs[holder].kill();
    programs[1 - holder].end();
}

#[test]
fn a_stopped_program_does_not_block_the_other_permanently() {
    let (machine, mut programs) = abandoned("44M");
    let holder = wait_for("a turn", || programs.iter().position(|program| turns(program) > 0));
    programs[holder].wait_to_say("restored all memory");
    machine.stop_beside_work(&programs[holder]);
    std::thread::sleep(Duration::from_secs(3));
    programs[holder].signal(libc::SIGCONT);
    programs.iter_mut().for_each(|program| drop(program.end()));
}

#[test]
fn a_restarted_scheduler_takes_over() {
    let (mut machine, mut programs) = abandoned("44M");
    wait_for("a turn", || programs.iter().position(|program| turns(program) > 0));
    machine.start_scheduler();
    let skip = machine.moves().iter().filter(|m| m.run == 1).count();
    machine.wait_for_move(skip, "a grant of the new scheduler", |m| m.run == 2 && m.what == "grant");
    let before: usize = programs.iter().map(turns).sum();
    programs.iter().for_each(|program| machine.wait_for_grants(program, 3));
    programs.iter_mut().for_each(|program| drop(program.end()));
    assert_eq!(programs.iter().map(turns).sum::<usize>(), before, "nobody takes turns beside a scheduler");
    machine.wait_until_empty();
}

#[test]
fn a_program_on_two_gpus_finishes_beside_endless_programs() {
    let simulator = vec![("CUDA_SIM_GPUS", "2".to_owned())];
    let mut machine = Machine::with_scheduler(Setup { simulator, ..pressed() });
    let neighbours = [0, 1].map(|gpu| {
        machine.program(&format!("mix --mem 44M --chunks 4 --reps 6 --rounds endless --device {gpu}")).start()
    });
    let mut program = machine.program("across --mem 20M --rounds 6 --pause-ms 50").start();
    for each in neighbours.iter().chain([&program]) {
        machine.wait_for_grants(each, 1);
    }
    machine.kill_scheduler();
    let _ = fs::remove_file(machine.socket());
    program.finish();
    neighbours.into_iter().for_each(|mut neighbour| neighbour.kill());
}
