//! A consumer card. Its link is slow compared with its memory, and both directions of the link
//! share the host's memory bandwidth. The host has little memory, and NVML lacks traffic counters,
//! events and link data. With `NVSHARE_TEST_CARD=consumer`, the other tests of `tests/sharing` and
//! `tests/guest` use a consumer card, too.

use std::time::Duration;

use test_support::machine::*;

fn consumer(setup: Setup) -> Setup {
    Setup { card: Card::Consumer, ..setup }
}

/// A setup in which a turn lasts longer than moving the memory of one program.
fn desktop() -> Setup {
    let time_quantum = Duration::from_secs(2);
    consumer(Setup { memory: 96 * MIB, reserve: 2 * MIB, time_quantum, ..Setup::default() })
}

/// Two thirds of the GPU's memory, in the proportion of 16 GiB to 24 GiB.
fn two_thirds(memory: u64) -> u64 {
    memory / 3 * 2
}

#[test]
fn two_programs_that_do_not_fit_take_turns_on_a_consumer_card() {
    let setup = desktop();
    let words = format!("mix --mem {} --chunks 4 --reps 4 --rounds endless", two_thirds(setup.memory));
    let machine = Machine::with_scheduler(setup);
    let mut programs = [(); 2].map(|()| machine.program(&words).start());
    machine.wait_for_exchange(&programs);
    programs.iter_mut().for_each(|program| drop(program.end()));
    assert_one_holder(&machine.moves());
    machine.wait_until_empty();
    assert_eq!(machine.free(), machine.setup.memory);
}

#[test]
fn three_programs_that_do_not_fit_take_turns_on_a_consumer_card() {
    let machine = Machine::with_scheduler(desktop());
    let mut programs = [(); 3].map(|()| machine.program("mix --mem 40M --chunks 4 --reps 4 --rounds endless").start());
    machine.wait_for_exchange(&programs);
    programs.iter_mut().for_each(|program| drop(program.end()));
    machine.wait_until_empty();
}

/// The host's 64 GB are about two and a half times the GPU's 24 GiB. An allocation that exceeds
/// both together is refused, and no program fails later.
#[test]
fn memory_beyond_the_hosts_capacity_is_refused_on_a_consumer_card() {
    let machine = Machine::with_scheduler(consumer(Setup { memory: 96 * MIB, reserve: 2 * MIB, ..Setup::default() }));
    let words = "mix --mem 64M --chunks 4 --reps 2 --rounds endless";
    let mut first: Vec<Program> = (0..4).map(|_| machine.program(words).start()).collect();
    first.iter().for_each(|program| machine.wait_for_grants(program, 1));
    let mut fifth = machine.program(words).start();
    let status = wait_for("an answer to the fifth", || fifth.poll());
    assert_eq!(status.code(), Some(1));
    assert!(fifth.stdout().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{}", fifth.stdout());
    for program in &mut first {
        assert!(program.poll().is_none(), "`{}` goes on", program.name);
        program.kill();
    }
    machine.wait_until_empty();
}
