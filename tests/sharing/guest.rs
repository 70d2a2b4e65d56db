//! `libnvshare.so` in programs without CUDA, in programs with unusual behaviour, and without a
//! scheduler. The tests use real processes.

use std::path::Path;

use test_support::artifact;
use test_support::machine::*;

const SHORT: &str = "mix --mem 16M --reps 2 --rounds 3";

#[test]
fn programs_run_without_a_scheduler_and_report_it_once() {
    let machine = Machine::new(Setup::default());
    let mut programs: Vec<Program> = (0..2).map(|_| machine.program(SHORT).quiet().start()).collect();
    for program in &mut programs {
        program.finish();
        let said = program.stderr();
        let begin = format!("nvshare: no scheduler at {} ", machine.socket().display());
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.starts_with(&begin), "{said}");
    }
}

#[test]
fn programs_join_a_scheduler_that_starts_later() {
    let mut machine = Machine::new(Setup { anti_thrash: "on", ..Setup::default() });
    let words = "mix --mem 24M --reps 6 --rounds 20";
    let mut programs: Vec<Program> = (0..2).map(|_| machine.program(words).quiet().start()).collect();
    for program in &programs {
        wait_for("it to run ungated", || program.stderr().contains("no scheduler").then_some(()));
    }
    machine.start_scheduler();
    for program in &programs {
        machine.wait_for_grants(program, 2);
    }
    for program in &mut programs {
        program.finish();
        assert_eq!(program.stderr().lines().count(), 1, "{}", program.stderr());
    }
    assert_one_holder(&machine.moves());
    machine.wait_until_empty();
}

#[test]
fn nvshare_required_fails_a_program_without_a_scheduler() {
    let mut machine = Machine::new(Setup::default());
    let mut program = machine.program(SHORT).quiet().env("NVSHARE_REQUIRED", "1").start();
    let status = wait_for("its end", || program.poll());
    assert!(!status.success());
    let said = program.stderr();
    assert!(said.contains("no scheduler at ") && said.contains("CUDA_ERROR_SYSTEM_NOT_READY"), "{said}");
    assert!(program.stdout().contains("cuInit") && program.stdout().contains("802"), "{}", program.stdout());

    machine.start_scheduler();
    let mut program = machine.program(SHORT).quiet().env("NVSHARE_REQUIRED", "1").start();
    program.finish();
    assert_eq!(program.stderr(), "");
}

#[test]
fn nvshare_disable_turns_the_library_off() {
    let machine = Machine::with_scheduler(Setup::default());
    let mut program = machine.program(SHORT).quiet().env("NVSHARE_DISABLE", "1").start();
    program.finish();
    assert_eq!(program.stderr(), "");
    assert_eq!(machine.moves(), []);

    // `NVSHARE_DISABLE=0` doesn't disable the library.
    let mut program = machine.program(SHORT).quiet().env("NVSHARE_DISABLE", "0").start();
    program.finish();
    assert_eq!(program.stderr(), "");
    assert!(grants(&machine.moves(), program.pid()) > 0);
}

#[test]
fn programs_without_cuda_run_unchanged() {
    let machine = Machine::with_scheduler(Setup::default());
    let commands: [(&str, &[&str]); 5] = [
        ("/bin/true", &[]),
        ("/bin/false", &[]),
        ("/bin/sh", &["-c", "echo out; echo err >&2; (exit 3); echo $?; sh -c 'exit 4'"]),
        // The library leaves no descriptor and no thread behind.
        ("/bin/sh", &["-c", "ls /proc/self/fd /proc/self/task | sed 's/^[0-9]\\{3,\\}$/N/'"]),
        ("/usr/bin/env", &["LC_ALL=C", "sort", "/etc/passwd"]),
    ];
    for (program, arguments) in commands {
        let run = |launch: Launch<'_>| {
            let mut program = launch.start();
            (program.wait().code(), program.stdout(), program.stderr())
        };
        let plain = run(machine.command(Path::new(program), arguments).without_nvshare());
        assert_eq!(run(machine.command(Path::new(program), arguments)), plain, "{program} {arguments:?}");
    }
    assert_eq!(machine.moves(), []);
}

#[test]
fn a_program_without_a_gpu_gets_the_drivers_error() {
    let machine = Machine::with_scheduler(Setup::default());
    for lookup in ["link", "dlsym", "getproc"] {
        let launch = machine.program(SHORT).quiet().env("CUDA_VISIBLE_DEVICES", "").env("CUDA_LOOKUP", lookup);
        let mut program = launch.start();
        assert_eq!(program.wait().code(), Some(1));
        assert!(program.stdout().contains("cuInit: CUDA_ERROR_NO_DEVICE (100)"), "{}", program.stdout());
        assert_eq!(program.stderr(), "");
    }
    assert_eq!(machine.moves(), []);
}

#[test]
fn null_and_invalid_arguments_get_the_drivers_answers() {
    let machine = Machine::with_scheduler(Setup::default());
    let answers = |launch: Launch<'_>| {
        let mut report = launch.start().finish().0;
        report.as_object_mut().expect("an object").remove("seconds");
        report
    };
    let plain = answers(machine.program("nulls").without_nvshare());
    assert!(plain.as_object().expect("an object").len() > 40);
    for engine in ["swap", "managed", "none"] {
        assert_eq!(answers(machine.program("nulls").env("NVSHARE_ENGINE", engine)), plain, "engine {engine}");
    }
}

#[test]
fn forked_children_do_not_use_their_parents_connection() {
    let machine = Machine::with_scheduler(Setup { anti_thrash: "on", ..Setup::default() });
    let mut other = machine.program("mix --mem 24M --reps 4 --rounds endless").start();
    let mut parent = machine.program("forks --mem 24M --rounds 9").start();
    parent.finish();
    let moves = machine.moves();
    let connections: Vec<&Move> = moves.iter().filter(|m| m.what == "connect" && m.pid == parent.pid()).collect();
    assert_eq!(connections.len(), 1, "{connections:?}");
    // The script's children that are CUDA programs are separate clients.
    let clients = moves.iter().filter(|m| m.what == "connect").count();
    assert_eq!(clients, 2 + 3);
    assert_one_holder(&moves);
    other.kill();
    machine.wait_until_empty();
}

#[test]
fn memory_is_tracked_for_any_thread_that_initialises_cuda() {
    let machine = Machine::with_scheduler(Setup::default());
    for _ in 0..4 {
        let mut program = machine.program("starts --mem 4M --threads 8").start();
        wait_for("the memory of all threads", || {
            let demand = number(&machine.status()["gpus"][0]["demand"]);
            (demand == 8 * 4 * MIB).then_some(())
        });
        program.end();
        machine.wait_until_empty();
    }
}

#[test]
fn a_cuda_program_started_by_a_shell_is_granted_the_lock() {
    let machine = Machine::with_scheduler(Setup::default());
    let program = artifact("cuda-program");
    let script = format!("{0} {SHORT} && exec {0} {SHORT}", program.display());
    let mut shell = machine.command(Path::new("/bin/sh"), &["-c", &script]).start();
    assert!(shell.wait().success());
    let moves = machine.moves();
    assert_eq!(moves.iter().filter(|m| m.what == "connect").count(), 2);
    assert_eq!(grants(&moves, shell.pid()), 1, "the shell that became a CUDA program");
}
