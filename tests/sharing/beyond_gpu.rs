//! Managed memory that exceeds the GPU. The driver pages it, as without nvshare. Only one such program
//! has memory on the GPU at a time. Only the simulated GPU runs these tests: on a card, managed memory
//! beyond the GPU can hang all programs.

use cuda_sim_gpus::account;
use cuda_sim_gpus::trouble::{self, Stranger};
use test_support::machine::*;

const PERMITTED: &str = "[[rule]]\nmanaged-beyond-gpu = true\n";

/// Asks for more managed memory than the GPU has, uses all of it, and checks its contents.
const ASK: &str = "oversub --mem 396M --chunk 36M --rounds 1 --kind managed";

fn permitted() -> Setup {
    Setup { rules: PERMITTED.into(), ..Setup::default() }
}

/// Allocations of `words` that are refused before everything is allocated.
fn refused(machine: &Machine, words: &str) -> String {
    let report = machine.program(words).start().finish();
    assert!(report.number("allocated") < 396 * MIB, "{}", report.0);
    report.0["failed"].as_str().expect("a name").to_owned()
}

#[test]
fn only_managed_memory_may_exceed_the_gpu_under_a_rule() {
    let machine = Machine::with_scheduler(permitted());
    let report = machine.program(ASK).start().finish();
    assert_eq!((report.0["failed"].as_str(), report.number("allocated")), (Some(""), 396 * MIB));
    assert_eq!(refused(&machine, &ASK.replace("managed", "alloc")), "cuMemAlloc_v2");
    machine.wait_until_empty();
    assert_eq!(machine.free(), machine.setup.memory);
}

/// One allocation that exceeds the GPU, as a framework's pool of managed memory.
#[test]
fn plain_memory_has_room_beside_managed_memory_that_exceeds_the_gpu() {
    let machine = Machine::with_scheduler(permitted());
    let words = "oversub --mem 396M --chunk 396M --rounds 2 --kind managed --beside 100M";
    let report = machine.program(words).start().finish();
    assert_eq!((report.0["failed"].as_str(), report.number("allocated")), (Some(""), 496 * MIB));
    machine.wait_until_empty();
}

/// A GPU of 64 MiB, and programs that need 96 MiB of managed memory and 32 MiB of plain memory.
fn start_two(machine: &Machine) -> [Program; 2] {
    let words = ["--mem 96M --kind managed", "--mem 32M"];
    let programs =
        words.map(|words| machine.program(&format!("mix --chunks 4 --reps 3 --rounds endless {words}")).start());
    for program in &programs {
        machine.wait_for_grants(program, 3);
    }
    programs
}

fn small() -> Setup {
    Setup { memory: 64 * MIB, anti_thrash: "on", ..permitted() }
}

#[test]
fn a_program_beyond_the_gpu_takes_turns_with_others() {
    let machine = Machine::with_scheduler(small());
    let mut programs = start_two(&machine);
    wait_for("its memory to leave for the other program's turn", || {
        let there = account::usage(&machine.path("gpu"), programs[0].pid(), 0)?.managed;
        (there <= machine.setup.capacity(2) - 32 * MIB).then_some(())
    });
    for program in &mut programs {
        program.end();
    }
    assert_one_holder(&machine.moves());
    machine.wait_until_empty();
    assert_eq!(machine.free(), machine.setup.memory);
}

#[test]
fn a_program_beyond_the_gpu_may_be_killed_at_any_time() {
    let machine = Machine::with_scheduler(small());
    for _ in 0..3 {
        let [mut beyond, mut other] = start_two(&machine);
        beyond.kill();
        other.end();
        machine.wait_until_empty();
        assert_eq!(machine.free(), machine.setup.memory);
    }
}

#[test]
fn a_program_beyond_the_gpu_outlives_the_scheduler() {
    let mut machine = Machine::with_scheduler(small());
    let mut programs = start_two(&machine);
    machine.kill_scheduler();
    machine.start_scheduler();
    for program in &programs {
        machine.wait_for_grants(program, 3);
    }
    for program in &mut programs {
        program.end();
    }
    machine.wait_until_empty();
}

#[test]
fn managed_memory_stays_within_the_gpu_beside_memory_that_cannot_leave() {
    let machine = Machine::with_scheduler(permitted());
    let mut other = machine.program("escapes --mem 16M --beside 16M --seconds 600 --how sync").start();
    other.wait_to_say("holding");
    assert_eq!(refused(&machine, ASK), "cuMemAllocManaged");
    other.end();
    machine.wait_until_empty();
    let stranger = Stranger { bytes: 16 * MIB, pid: Some(std::process::id()), is_graphics: false };
    trouble::set_strangers(&machine.path("gpu"), 0, &[stranger]).expect("a program without nvshare");
    wait_for("the program to be seen", || {
        (machine.status()["gpus"][0]["overhead"].as_u64() >= Some(16 * MIB)).then_some(())
    });
    assert_eq!(refused(&machine, ASK), "cuMemAllocManaged");
}

/// What exceeds the GPU is in host memory, which then cannot be promised to other programs.
#[test]
fn managed_memory_beyond_the_gpu_needs_host_memory() {
    let machine = Machine::with_scheduler(Setup { swap_max: "64M", ..permitted() });
    assert_eq!(refused(&machine, ASK), "cuMemAllocManaged");
    let words = "oversub --mem 288M --chunk 36M --rounds 1 --kind managed";
    assert_eq!(machine.program(words).start().finish().number("allocated"), 288 * MIB);
}
