//! Signals are delivered only to the program's own threads.

use crate::compare::*;
use test_support::machine::*;

#[test]
fn no_signal_is_delivered_to_the_librarys_thread() {
    let host = Host::new();
    let program = host.program("signals");
    host.case(&program, &["wait"]).succeeds();
    let ended = host.case(&program, &["blocked"]).with();
    assert_eq!(
        (ended.status, &*ended.stdout),
        ((Some(0), None), "one thread, which blocks every signal\n"),
        "{ended:?}"
    );
}

#[test]
fn thousands_of_signals_per_second_disturb_no_call() {
    Host::new().succeeds("signals", &["timer"]);
}

#[test]
fn signals_disturb_no_wait_for_the_scheduler() {
    let host = Host::new();
    let program = host.program("signals");
    kill(host.0.scheduler_pid(), libc::SIGSTOP);
    let mut program = host.case(&program, &["early"]).start();
    // The program receives hundreds of signals while the scheduler doesn't answer.
    std::thread::sleep(std::time::Duration::from_millis(500));
    kill(host.0.scheduler_pid(), libc::SIGCONT);
    let ended = Ended { status: (Some(0), None), stdout: "worked\n".into(), stderr: String::new() };
    assert_eq!(end(&mut program), ended);
}

#[test]
fn signals_disturb_no_wait_at_the_gate() {
    let (host, mut free) = Host::occupied();
    let mut program = host.case(host.program("signals"), &["gate"]).start();
    host.0.wait_for_move(0, "a request", |m| m.pid == program.pid() && m.what == "request");
    // The program handles signals while it waits, and then continues to wait.
    wait_for("signals", || program.stdout().contains("100 signals").then_some(()));
    assert_eq!(program.poll(), None);
    free();
    assert_eq!(end(&mut program).stdout, "100 signals\nworked\n");
}

#[test]
fn a_stopped_program_continues_after_sigcont() {
    let host = Host::new();
    let mut program = host.case(host.program("signals"), &["timer"]).start();
    for _ in 0..5 {
        std::thread::sleep(std::time::Duration::from_millis(30));
        program.signal(libc::SIGSTOP);
        std::thread::sleep(std::time::Duration::from_millis(30));
        program.signal(libc::SIGCONT);
    }
    assert_eq!(end(&mut program).status, (Some(0), None));
}

/// Creates a machine with turns of one second, and a program that always has work.
fn with_turns() -> (Host, Program) {
    let time_quantum = std::time::Duration::from_secs(1);
    let host = Host(Machine::with_scheduler(Setup { anti_thrash: "on", time_quantum, ..Setup::default() }));
    let worker = host.0.program("mix --mem 16M --reps 4 --rounds endless").start();
    host.0.wait_for_grants(&worker, 1);
    (host, worker)
}

#[test]
fn a_gate_wait_left_by_longjmp_requests_no_more_turns() {
    let (host, mut worker) = with_turns();
    let mut program = host.case(host.program("jumps"), &["gate"]).start();
    wait_for("the jump", || program.stdout().contains("left").then_some(()));
    let before = grants(&host.0.moves(), program.pid());
    assert_eq!(end(&mut program).status, (Some(0), None));
    // The program may get the turn that it requested before the jump, but no series of turns.
    let turns = grants(&host.0.moves(), program.pid()) - before;
    assert!(turns <= 2, "a program that does nothing had {turns} turns in 8 s");
    worker.kill();
}

#[test]
fn a_copy_left_by_longjmp_ends_with_the_next_call() {
    let (host, mut worker) = with_turns();
    let mut program = host.case(host.program("jumps"), &["copy"]).start();
    wait_for("the jump", || program.stdout().contains("went on").then_some(()));
    // The program has no work from now on.
    wait_within(std::time::Duration::from_secs(5), "the worker's turn", || {
        let turns = turns(&host.0.moves());
        (turns.contains(&program.pid()) && turns.last() == Some(&worker.pid())).then_some(())
    });
    assert_eq!(program.poll(), None);
    let drains = host.0.moves().iter().filter(|m| m.pid == program.pid() && m.what == "undrainable").count();
    assert_eq!(drains, 0, "the copy that was left counts as work that does not end");
    assert_eq!(end(&mut program).status, (Some(0), None));
    worker.kill();
}
