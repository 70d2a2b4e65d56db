//! Processes. A program's children and successors inherit nothing that belongs to the library.

use std::fs;

use crate::compare::*;
use test_support::machine::*;

#[test]
fn a_forked_child_gets_the_drivers_answers_and_its_parent_continues() {
    let host = Host::new();
    host.succeeds("forks", &["exits", "calls", "handlers"]);
    // The children are not clients.
    assert_eq!(host.clients(), 3);
}

#[test]
fn a_child_that_outlives_its_parent_does_not_keep_the_lock() {
    let host = Host(Machine::with_scheduler(Setup { anti_thrash: "on", time_quantum: HOUR, ..Setup::default() }));
    let mut parent = host.case(host.program("forks"), &["outlives"]).start();
    assert_eq!(end(&mut parent).status, (Some(0), None));
    let child: u32 = parent.stdout().trim().parse().expect("the child's number");
    assert!(fs::exists(format!("/proc/{child}")).expect("/proc"), "the child is still there");
    host.0.wait_until_empty();
    host.0.program("mix --mem 16M --reps 2 --rounds 3").start().finish();
    // When its parent has ended, the child is no longer a child of this test, so `Program` cannot
    // handle it.
    let _ = std::process::Command::new("kill").args(["-9", &child.to_string()]).status();
}

#[test]
fn forks_beside_allocating_and_launching_threads_do_not_deadlock() {
    let host = Host::new();
    let program = host.program("forks");
    let ended = host.case(&program, &["storm"]).with();
    assert_eq!((ended.status, &*ended.stdout, &*ended.stderr), ((Some(0), None), "400 children\n", ""));
}

#[test]
fn exec_spawn_and_system_work_unchanged() {
    let host = Host::new();
    let (program, worker) = (host.program("starts"), host.program("worker"));
    for word in ["vfork", "spawn", "exec", "system", "descriptors"] {
        host.case(&program, &[word, &worker.to_string_lossy()]).succeeds();
    }
}
