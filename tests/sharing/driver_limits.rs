//! What the driver bounds for whole control groups, end to end: programs that share never come up against it, and one that
//! does not load the library does.

use std::fs;

use test_support::cgroup::{Unit, finds_version_2};
use test_support::machine::*;

/// A machine whose driver has limits; the simulated one refuses what is beyond them. Each program's margin is 4 MiB.
fn machine(rules: &str) -> Machine {
    let mut machine =
        Machine::new(Setup { simulator: vec![("CUDA_SIM_LIMITS", "anybody".into())], ..Setup::default() });
    let directory = machine.path("nvshare.toml.d");
    fs::create_dir_all(&directory).expect("a directory for drop-ins");
    fs::write(directory.join("limits.toml"), format!("[memory]\ndriver-limits = true\n{rules}")).expect("a drop-in");
    machine.start_scheduler_with(finds_version_2);
    machine
}

fn unit(letter: char) -> Option<Unit> {
    Unit::new(&format!("nvshare-driver-{}-{letter}.service", std::process::id()))
}

fn rule(unit: &Unit, most: &str) -> String {
    format!("[[rule]]\nunit = \"{}\"\nmemory-max = \"{most}\"\n", unit.path)
}

/// Waits until the driver bounds a unit to so many bytes; 0: to none.
#[track_caller]
fn wait_for_limit(machine: &Machine, unit: &Unit, bytes: u64) {
    let directory = unit.directory().display().to_string();
    wait_for(&format!("a limit of {bytes}"), || {
        let text = fs::read_to_string(machine.path("gpu/limits")).unwrap_or_default();
        let line = text.lines().find(|line| line.ends_with(&directory));
        let hard = line.map_or(Some(0), |line| line.split(' ').nth(2)?.parse().ok());
        (hard == Some(bytes)).then_some(())
    });
}

#[test]
fn a_program_without_the_library_is_bounded_with_those_of_its_unit() {
    let Some((a, b)) = unit('a').zip(unit('b')) else { return };
    let machine = machine(&rule(&a, "60M"));
    let mut first = machine.program_in(&a.procs(), "stranger --mem 40M --seconds 600").start();
    first.wait_to_say("holding");
    wait_for_limit(&machine, &a, 64 * MIB);
    let takes = |unit: &Unit| {
        let ask = machine.program_in(&unit.procs(), "oversub --mem 100M --chunk 2M --rounds 0");
        ask.without_nvshare().start().finish().number("allocated")
    };
    assert_eq!(takes(&a), 16 * MIB, "with two contexts of 4 MiB");
    assert_eq!(takes(&b), 100 * MIB, "no rule is about that one");
    first.kill();
    machine.wait_until_empty();
    wait_for_limit(&machine, &a, 0);
}

#[test]
fn programs_that_take_turns_within_their_limits_never_meet_the_drivers() {
    let Some((a, b)) = unit('a').zip(unit('b')) else { return };
    let machine = machine(&(rule(&a, "140M") + &rule(&b, "200M")));
    // Of each unit all that it may have, and more than the GPU has.
    let work =
        |unit: &Unit, mem: &str| machine.program_in(&unit.procs(), &format!("mix --mem {mem} --rounds 15")).start();
    let programs = [work(&a, "64M"), work(&a, "64M"), work(&b, "192M")];
    wait_for_limit(&machine, &a, 148 * MIB);
    for mut program in programs {
        program.finish();
    }
    let moved = machine.trace().iter().any(|line| line.what == "evict");
    assert!(moved, "they did not fit");
    machine.wait_until_empty();
}

#[test]
fn a_limit_that_is_lowered_lets_those_come_back_that_are_beyond_it() {
    let Some((a, b)) = unit('a').zip(unit('b')) else { return };
    let machine = machine(&rule(&a, "160M"));
    let allow = |most: &str| {
        let text = format!("[memory]\ndriver-limits = true\n{}", rule(&a, most));
        fs::write(machine.path("nvshare.toml.d/limits.toml"), text).expect("a drop-in");
        machine.ctl(&["reload"]);
    };
    let mut program = machine.program_in(&a.procs(), "mix --mem 120M --rounds 40").start();
    machine.wait_for_grants(&program, 1);
    let mut other = machine.program_in(&b.procs(), "mix --mem 200M --rounds 100000").start();
    machine.wait_for_grants(&other, 1);
    allow("32M");
    // With its context, in steps of a chunk.
    wait_for_limit(&machine, &a, (128 + 4) * MIB);
    machine.wait_for_grants(&program, grants(&machine.trace(), program.pid()) + 1);
    // It allocates once more, to verify, which the rule would not let it.
    allow("160M");
    wait_for_limit(&machine, &a, 164 * MIB);
    other.kill();
    program.finish();
    machine.wait_until_empty();
    wait_for_limit(&machine, &a, 0);
}
