//! Other libraries in the same process, preloaded before or after nvshare's library. They are
//! libraries that interpose the same functions of the C library, and the sanitizers' runtimes.

use std::path::{Path, PathBuf};
use std::process::Command;

use test_support::{machine::Move, skip};

use crate::compare::*;

/// Checks programs with and without CUDA. The neighbour is preloaded first before and then after
/// nvshare's library.
#[track_caller]
fn beside(host: &Host, neighbour: &Path) {
    let program = host.program("worker");
    for (program, arguments) in [(&*program, &["4"][..]), (Path::new("/bin/bash"), &["-c", "echo a | cat; echo b >&2"])]
    {
        for ended in [
            host.case(program, arguments).before(neighbour).same(),
            host.case(program, arguments).after(neighbour).same(),
        ] {
            assert_eq!(ended.status, (Some(0), None), "{ended:?}");
        }
    }
}

#[test]
fn an_allocator_that_calls_dlsym_works_beside_the_library() {
    let host = Host::new();
    beside(&host, &host.library("allocator"));
}

#[test]
fn a_library_that_skips_fsync_works_beside_the_library() {
    let host = Host::new();
    beside(&host, &host.library("nosync"));
}

#[test]
fn a_library_that_colours_stderr_works_beside_the_library() {
    let host = Host::new();
    beside(&host, &host.library("colours"));
}

#[test]
fn several_preloaded_libraries_work_together() {
    let host = Host::new();
    let [allocator, nosync, colours] = ["allocator", "nosync", "colours"].map(|name| host.library(name));
    let ended = host.case(host.program("worker"), &["4"]).before(&allocator).before(&colours).after(&nosync).same();
    assert_eq!(ended.status, (Some(0), None), "{ended:?}");
}

/// Tests the real libraries. The other tests use stand-ins for them, which are always available.
#[test]
fn libeatmydata_and_jemalloc_work_beside_the_library() {
    let host = Host::new();
    for names in [&["libeatmydata.so.1", "libeatmydata.so"][..], &["libjemalloc.so.2"]] {
        let find = |name: &&str| {
            let asked = output(Command::new("cc").arg(format!("-print-file-name={name}"))).stdout;
            Some(PathBuf::from(String::from_utf8_lossy(&asked).trim())).filter(|path| path.is_absolute())
        };
        match names.iter().find_map(find) {
            Some(path) => beside(&host, &path),
            None => skip(names[0]),
        }
    }
}

/// Tests a program built with a sanitizer. The sanitizer's runtime is either loaded first, or
/// accepts another order.
#[track_caller]
fn sanitized(sanitizer: &str, options: &str, setting: &str, runtime: Option<&str>) {
    let host = Host::new();
    let built = host.build("worker", "worker", &[&format!("-fsanitize={sanitizer}"), "-fno-sanitize-recover=all"]);
    let Some(program) = built else { return skip(format_args!("a C compiler with -fsanitize={sanitizer}")) };
    let mut case = host.case(&program, &["4"]).env(options, setting);
    if let Some(runtime) = runtime {
        let asked = output(Command::new("cc").arg(format!("-print-file-name={runtime}"))).stdout;
        case = case.before(Path::new(String::from_utf8_lossy(&asked).trim()));
    }
    // Old runtimes cannot handle kernels that randomize addresses strongly.
    if case.without().stderr.contains("unexpected memory mapping") {
        return skip(format_args!("a {sanitizer} sanitizer that runs on this kernel"));
    }
    case.succeeds();
    assert!(host.clients() > 0, "it is shared");
}

/// `nvsharectl preload verify` and the manual document this requirement.
#[test]
fn the_shared_asan_runtime_must_be_preloaded_first() {
    let host = Host::new();
    let build = |output: &str, options: &[&str]| host.build("worker", output, options);
    let Some(shared) = build("shared", &["-fsanitize=address"]) else {
        return skip("a C compiler with -fsanitize=address");
    };
    let ended = host.case(&shared, &["4"]).env("ASAN_OPTIONS", "detect_leaks=0").with();
    assert_eq!(ended.status, (Some(1), None), "{ended:?}");
    assert!(ended.stderr.contains("ASan runtime does not come first"), "{ended:?}");
    // A runtime that is linked into the program is loaded first.
    if let Some(linked) = build("linked", &["-fsanitize=address", "-static-libasan"]) {
        host.case(&linked, &["4"]).env("ASAN_OPTIONS", "detect_leaks=0").succeeds();
    }
}

#[test]
fn the_address_sanitizer_reports_nothing() {
    // The simulated driver keeps the process's memory until its end.
    sanitized("address", "ASAN_OPTIONS", "verify_asan_link_order=0:detect_leaks=0", None);
    sanitized("address", "ASAN_OPTIONS", "detect_leaks=0", Some("libasan.so"));
}

#[test]
fn the_undefined_behaviour_sanitizer_reports_nothing() {
    sanitized("undefined", "UBSAN_OPTIONS", "", None);
}

#[test]
fn the_thread_sanitizer_reports_nothing() {
    // The thread sanitizer sees no locks in code that was built without it, such as the driver and
    // this library. The sanitizer would report false races in such code.
    sanitized("thread", "TSAN_OPTIONS", "ignore_noninstrumented_modules=1", None);
}

/// Builds a library of this name that submits work through private functions.
#[track_caller]
fn engine(host: &Host, name: &str) -> PathBuf {
    let soname = format!("-Wl,-soname,{name}");
    host.build("engines", name, &["-shared", "-fPIC", "-DENGINE", &soname]).expect("a C compiler")
}

#[test]
fn a_restarted_scheduler_learns_of_untracked_work() {
    let mut host = Host::new();
    let (program, engine) = (host.program("engines"), engine(&host, "libnvidia-encode.so.1"));
    let mut running = host.case(&program, &[&engine.to_string_lossy(), "5"]).start();
    let pid = running.pid();
    let is_told = |run| move |m: &Move| m.run == run && m.pid == pid && m.what == "untracked-work";
    host.0.wait_for_move(0, "the scheduler to learn it", is_told(1));
    host.0.kill_scheduler();
    host.0.start_scheduler();
    host.0.wait_for_move(0, "the new one to learn it", is_told(2));
    assert_eq!(end(&mut running).status, (Some(0), None));
}

/// The work of these libraries passes no hook, so memory that they may use must stay on the GPU.
#[test]
fn libraries_that_submit_untracked_work_are_recognized() {
    let host = Host::new();
    let program = host.program("engines");
    for (name, noticed) in [
        ("libnvidia-encode.so.1", true),
        ("libnvidia-opticalflow.so.1", true),
        ("libnvidia-fbc.so.1", true),
        ("libnothing.so.1", false),
    ] {
        let engine = engine(&host, name);
        let mut running = host.case(&program, &[&engine.to_string_lossy()]).start();
        let ended = end(&mut running);
        assert_eq!((ended.status, &*ended.stdout), ((Some(0), None), "worked\n"), "{name}: {ended:?}");
        let said = host.0.moves().iter().any(|m| m.pid == running.pid() && m.what == "untracked-work");
        assert_eq!(said, noticed, "{name}");
    }
}
