//! Exits of programs. Any code that runs during an exit may call CUDA, and the library's pending
//! work doesn't delay the exit.

use crate::compare::*;

/// Runs the programs on the minimal driver. Like real drivers, it needs no thread-local variables.
/// The simulated driver's thread-local variables no longer exist at the end of a program.
#[track_caller]
fn each_on_bare_driver(words: &[&str]) {
    let host = Host::new();
    let program = host.program("ends");
    words.iter().for_each(|word| drop(host.case(&program, &[word]).on_bare_driver().succeeds()));
}

#[test]
fn exit_handlers_and_destructors_may_call_cuda() {
    each_on_bare_driver(&["early-handler", "late-handler", "destructors", "destroyed"]);
}

#[test]
fn a_program_continues_after_its_main_thread_exits() {
    Host::new().succeeds("ends", &["main-thread"]);
}

#[test]
fn thread_local_destructors_may_call_cuda() {
    each_on_bare_driver(&["keys"]);
}

#[test]
fn exit_statuses_are_unchanged() {
    let host = Host::new();
    let program = host.program("ends");
    for (word, status) in [
        ("return", (Some(17), None)),
        ("exit", (Some(18), None)),
        ("quick_exit", (Some(19), None)),
        ("_exit", (Some(20), None)),
        ("thread-exits", (Some(21), None)),
        ("abort", (None, Some(libc::SIGABRT))),
        ("segv", (None, Some(libc::SIGSEGV))),
        ("term", (None, Some(libc::SIGTERM))),
        ("kill", (None, Some(libc::SIGKILL))),
    ] {
        assert_eq!(host.case(&program, &[word]).same().status, status, "{word}");
    }
}

#[test]
fn a_program_may_exit_while_its_threads_wait_at_the_gate() {
    for (word, status) in [("exit", (Some(18), None)), ("_exit", (Some(20), None)), ("abort", (None, Some(6)))] {
        let (host, _free) = Host::occupied();
        let ended = host.case(host.program("waits"), &[word]).with();
        assert_eq!((ended.status, &*ended.stdout, &*ended.stderr), (status, "waiting\n", ""), "{word}");
    }
}

#[test]
fn thousands_of_short_launching_threads_leak_nothing() {
    let host = Host::new();
    host.case(host.program("threads"), &[]).succeeds();
}
