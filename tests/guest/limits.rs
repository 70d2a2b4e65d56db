//! Programs that exhaust a resource, lack a permission, or manage their descriptors themselves.
//! They get the driver's answers, and continue.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;

use crate::compare::*;
use test_support::machine::*;

/// Checks for each word that the program ends successfully and as without the library. The library
/// may fail to connect to the scheduler, and print a line about that.
#[track_caller]
fn on_bare_driver(name: &str, words: &[&str]) {
    let host = Host::new();
    let program = host.program(name);
    for word in words {
        let plain = host.case(&program, &[word]).on_bare_driver().same_but_for_the_line();
        assert_eq!(plain.status, (Some(0), None), "{plain:?}");
    }
}

#[test]
fn a_program_without_file_descriptors_gets_the_drivers_answers() {
    on_bare_driver("limits", &["files", "files-after"]);
}

#[test]
fn a_program_without_address_space_gets_the_drivers_answers() {
    // The minimal driver is used because the simulated driver ends the process if it cannot
    // allocate.
    on_bare_driver("limits", &["space", "space-after"]);
}

#[test]
fn a_program_that_cannot_create_threads_gets_the_drivers_answers() {
    on_bare_driver("limits", &["threads", "threads-after"]);
}

#[test]
fn refused_system_calls_do_not_change_results() {
    let host = Host::new();
    let program = host.program("refused");
    for call in ["membarrier", "socket", "connect", "eventfd2", "sendto", "recvfrom", "ppoll", "prctl", "sched_yield"] {
        let ended = host.case(&program, &[call, "before"]).without();
        assert_eq!(ended.status, (Some(0), None), "{ended:?}");
        // The library notices from the start if a call is refused before CUDA is initialised. A
        // later refusal is harder to handle.
        for moment in ["before", "after"] {
            let said = host.case(&program, &[call, moment]).with();
            assert_eq!((said.status, &*said.stdout), (ended.status, &*ended.stdout), "{call}, {moment}: {said:?}");
            let lines: Vec<&str> = said.stderr.lines().collect();
            assert!(matches!(*lines, []) || lines.len() == 1 && lines[0].starts_with("nvshare: "), "{call}: {said:?}");
        }
    }
}

/// The program initialises CUDA, loses the right to open files, and then uses the GPU. So the library
/// cannot open the device file, and shows the scheduler a copy of the driver's descriptor.
#[track_caller]
fn attaches_without_opening_files(way: &str) {
    // SAFETY: `geteuid` has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return test_support::skip("root, to give up rights");
    }
    let host = Host::new();
    let device = host.0.path("gpu/nvidia0");
    std::fs::create_dir_all(host.0.path("gpu")).expect("the simulator's directory");
    std::fs::set_permissions(host.0.path("gpu"), Permissions::from_mode(0o777)).expect("its mode");
    std::fs::write(&device, "").expect("the device file");
    std::fs::set_permissions(&device, Permissions::from_mode(0o600)).expect("its mode");
    let case = host.case(host.program("restricted"), &[way, &device.to_string_lossy()]);
    let ended = case.without();
    if ended.stdout == "no Landlock\n" {
        return test_support::skip("a kernel with Landlock");
    }
    let expected = Ended { status: (Some(0), None), stdout: "worked\n".into(), stderr: String::new() };
    assert_eq!(ended, expected, "without the library");
    assert_eq!(case.with(), expected);
    let (moves, log) = (host.0.moves(), host.0.scheduler_log());
    let count = |what: &str| moves.iter().filter(|m| m.what == what).count();
    assert_eq!((count("connect"), count("attach")), (1, 1), "{log}");
    assert!(count("grant") > 0 && !log.contains("is refused"), "{log}");
}

#[test]
fn a_program_that_has_dropped_its_privileges_attaches() {
    attaches_without_opening_files("user");
}

#[test]
fn a_program_whose_filter_refuses_to_open_files_attaches() {
    attaches_without_opening_files("seccomp");
}

#[test]
fn a_program_restricted_by_landlock_attaches() {
    attaches_without_opening_files("landlock");
}

#[test]
fn a_program_that_has_changed_its_root_attaches() {
    attaches_without_opening_files("chroot");
}

#[test]
fn a_broken_or_full_stderr_neither_kills_nor_blocks_a_program() {
    // Without a scheduler, the library writes one line.
    let host = Host::without_scheduler();
    let program = host.program("stderr");
    for word in ["broken", "full"] {
        host.case(&program, &[word]).on_bare_driver().succeeds();
    }
}

#[test]
fn a_program_file_with_descriptor_2_gets_no_message() {
    let host = Host::without_scheduler();
    host.case(host.program("stderr"), &["file"]).on_bare_driver().succeeds();
}

#[test]
fn a_stopped_clock_does_not_stop_the_library() {
    let setup = Setup { anti_thrash: "on", time_quantum: HOUR, ..Setup::default() };
    let mut host = Host(Machine::with_scheduler(setup));
    let path = host.program("clock");
    let mut holder = host.case(&path, &[]).on_bare_driver().start();
    wait_for("it to begin", || holder.stdout().contains("begun").then_some(()));
    let mut waiting = host.case(&path, &[]).on_bare_driver().start();
    host.0.wait_for_move(0, "a request", |m| m.pid == waiting.pid() && m.what == "request");
    // Without a scheduler, waiting programs continue after some time.
    host.0.kill_scheduler();
    for program in [&mut holder, &mut waiting] {
        assert_eq!(end(program).stdout, "begun\nworked\n");
    }
}

#[test]
fn library_threads_do_not_change_the_programs_scheduling() {
    let host = Host::new();
    let ended = host.case(host.program("scheduling"), &[]).with();
    let expected = "policy 0, all processors, the right nice value, the default memory policy\n";
    assert_eq!((ended.status, &*ended.stdout), ((Some(0), None), expected), "{ended:?}");
}

/// The program runs as without the library.
#[test]
fn a_deadline_scheduled_program_runs_without_the_librarys_thread() {
    let host = Host::new();
    let mut program = host.case(host.program("scheduling"), &["deadline"]).on_bare_driver().start();
    let ended = end(&mut program);
    if ended.stdout == "the kernel refuses it\n" {
        return test_support::skip("the right to have work done by a deadline");
    }
    assert_eq!((ended.status, &*ended.stdout), ((Some(0), None), "worked\n"), "{ended:?}");
}

#[test]
fn closed_standard_descriptors_are_not_reused() {
    let host = Host::new();
    let program = host.program("standard").to_string_lossy().into_owned();
    let result = host.0.path("result").to_string_lossy().into_owned();
    let script = r#""$0" "$1" <&- >&- 2>&-"#;
    let ended = host.case("/bin/sh", &["-c", script, &program, &result]).on_bare_driver().with();
    assert_eq!(ended, Ended { status: (Some(0), None), stdout: String::new(), stderr: String::new() });
    assert_eq!(std::fs::read_to_string(result).expect("its result"), "worked\n");
    for host in [host, Host::without_scheduler()] {
        host.case(host.program("stderr"), &["closed"]).on_bare_driver().succeeds();
    }
}

#[test]
fn a_program_runs_with_an_empty_environment() {
    let host = Host::without_scheduler();
    let program = host.program("environment");
    host.case(&program, &[]).succeeds();
}

#[test]
fn a_socket_that_reuses_a_closed_library_descriptor_is_unchanged() {
    Host::new().succeeds("closes", &["socket"]);
}

#[test]
fn a_file_that_reuses_a_closed_library_descriptor_is_unchanged() {
    Host::new().succeeds("closes", &["file"]);
}

#[test]
fn a_program_that_closes_every_descriptor_continues() {
    Host::new().succeeds("closes", &["range", "each"]);
}

/// A thread's stack also contains its static thread-local storage. If the stack is too small, the
/// thread cannot be created, or the stack overflows early.
#[test]
fn a_program_with_large_thread_local_storage_takes_turns() {
    let host = Host::new();
    for kib in [100, 228, 248, 1024] {
        let name = format!("tls-{kib}");
        let program = host.build("tls", &name, &[&format!("-DTLS={}", kib << 10)]).expect("a C compiler");
        let mut running = host.case(&program, &["2"]).start();
        let ended = end(&mut running);
        assert_eq!((ended.status, &*ended.stdout), ((Some(0), None), "worked\n"), "{kib} KiB: {ended:?}");
        assert!(grants(&host.0.moves(), running.pid()) > 0, "{kib} KiB: it ran without taking turns");
    }
}
