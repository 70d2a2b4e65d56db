//! Programs that other programs lock, checkpoint and restore, with and without the library.

use crate::sleep::{ends, wait_until};
use serde_json::Value;
use std::process::Command;
use test_support::machine::*;

fn machine() -> Machine {
    Machine::with_scheduler(Setup { memory: 128 * MIB, context: 8 * MIB, anti_thrash: "on", ..Setup::default() })
}

fn work(rounds: &str) -> String {
    format!("mix --mem 80M --chunks 4 --reps 3 --cpu-ms 20 --rounds {rounds}")
}

/// Starts a program that changes another program's process: `to` is `locked`, `asleep` or `awake`.
fn checkpoints(machine: &Machine, program: &Program, to: &str, with_library: bool) -> Program {
    let words = format!("checkpoints --pid {} --to {to}", program.pid());
    let tool = machine.program(&words);
    if with_library { tool.start() } else { tool.without_nvshare().start() }
}

fn why(machine: &Machine, program: &Program) -> String {
    machine.ctl(&["why", &program.pid().to_string()])
}

/// `cuda-checkpoint` itself is such a program.
#[test]
fn the_room_of_a_program_checkpointed_without_the_library_stays_reserved() {
    let machine = machine();
    let holder = machine.program(&work("endless")).start();
    machine.wait_for_grants(&holder, 1);
    checkpoints(&machine, &holder, "locked", false).finish();
    let waiter = machine.program(&work("endless")).start();
    wait_until(&machine, &holder, "sleep", "locked");
    assert!(why(&machine, &holder).contains("Another program has locked its process"));
    checkpoints(&machine, &holder, "asleep --from locked", false).finish();
    wait_until(&machine, &holder, "sleep", "checkpointed");
    let said = why(&machine, &holder);
    assert!(said.contains("stays reserved") && said.contains("nvsharectl run"), "{said}");
    assert!(machine.ctl(&["status"]).contains("is checkpointed by another program"));
    // A small program runs beside the reserved room.
    machine.program("mix --mem 8M --rounds 2").start().finish();
    assert_eq!(grants(&machine.moves(), waiter.pid()), 0, "its memory would be in the way of the restore");
    checkpoints(&machine, &holder, "awake", false).finish();
    wait_until(&machine, &holder, "sleep", "awake");
    machine.wait_for_grants(&waiter, 1);
    machine.wait_for_grants(&holder, 2);
    ends(holder);
    ends(waiter);
}

/// vLLM's sleep mode: the parent, which has the library, checkpoints its children.
#[test]
fn a_program_checkpointed_under_the_library_lends_its_room_until_it_is_restored() {
    let machine = machine();
    let holder = machine.program(&work("endless")).start();
    machine.wait_for_grants(&holder, 1);
    checkpoints(&machine, &holder, "asleep", true).finish();
    wait_until(&machine, &holder, "sleep", "lent");
    let guest = machine.program(&work("endless")).start();
    machine.wait_for_grants(&guest, 1);
    assert!(why(&machine, &holder).contains("Other programs use its room"));
    // The restore waits until the other program's memory has left.
    checkpoints(&machine, &holder, "awake", true).finish();
    wait_until(&machine, &holder, "sleep", "awake");
    machine.wait_for_grants(&holder, 2);
    machine.wait_for_grants(&guest, 2);
    ends(holder);
    ends(guest);
    machine.wait_until_empty();
}

#[test]
fn a_program_that_is_killed_while_it_waits_to_restore_leaves_the_room_to_others() {
    let machine = machine();
    let holder = machine.program(&work("endless")).start();
    machine.wait_for_grants(&holder, 1);
    checkpoints(&machine, &holder, "asleep", true).finish();
    wait_until(&machine, &holder, "sleep", "lent");
    let guest = machine.program(&work("endless")).start();
    machine.wait_for_grants(&guest, 1);
    let stopped = |signal: &str| {
        let done = Command::new("kill").args([signal, &guest.pid().to_string()]).status();
        assert!(done.is_ok_and(|done| done.success()));
    };
    // A stopped process frees nothing.
    stopped("-STOP");
    let mut tool = checkpoints(&machine, &holder, "awake", true);
    wait_until(&machine, &holder, "sleep", "waking");
    tool.kill();
    wait_until(&machine, &holder, "sleep", "lent");
    stopped("-CONT");
    checkpoints(&machine, &holder, "awake", true).finish();
    machine.wait_for_grants(&holder, 2);
    ends(holder);
    ends(guest);
}

/// NVML no longer lists an idle process that was checkpointed.
#[test]
fn an_idle_program_that_another_program_checkpoints_is_named() {
    let machine = machine();
    let idle = machine.program("naps --mem 16M --seconds 600 --pause-ms 30000").start();
    machine.wait_for_grants(&idle, 1);
    checkpoints(&machine, &idle, "asleep", false).finish();
    let shown: Value = wait_until(&machine, &idle, "sleep", "checkpointed");
    assert_eq!(shown["stopped"], false);
    checkpoints(&machine, &idle, "awake", false).finish();
    wait_until(&machine, &idle, "sleep", "awake");
    ends(idle);
}
