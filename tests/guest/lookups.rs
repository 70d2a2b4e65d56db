//! The loader. Look-ups have the same results as without the library, however a program obtains the
//! driver's functions, and whatever it loads and unloads.

use crate::compare::*;
use test_support::machine::*;

#[test]
fn plugins_opened_with_deepbind_or_dlmopen_work() {
    let host = Host::new();
    let plugin = host.library("plugin");
    let program = host.program("loads");
    for word in ["deepbind", "deepbind-mixed", "namespace", "namespace-beside", "unload", "unload-many"] {
        host.case(&program, &[word, &plugin.to_string_lossy()]).succeeds();
    }
}

/// A program may replace the first instructions of functions that it finds, which are this library's.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_program_that_redirects_functions_in_place_works() {
    let host = Host::new();
    let program = host.program("patches");
    let mut running = host.case(&program, &[]).start();
    let ended = end(&mut running);
    assert_eq!((ended.status, &*ended.stdout), ((Some(0), None), "redirected\n"), "{ended:?}");
    assert!(host.clients() > 0, "it is shared");
}

#[test]
fn rtld_next_of_an_interposer_is_unchanged() {
    let host = Host::new();
    let (interposer, program) = (host.library("interposer"), host.program("worker"));
    let ended = host.case(&program, &["2"]).before(&interposer).same();
    assert_eq!(ended.status, (Some(0), None), "{ended:?}");
    assert!(ended.stdout.contains("saw malloc") && ended.stdout.contains("saw cuInit"), "{ended:?}");
    assert!(host.clients() > 0, "it is shared all the same");
}

#[test]
#[ignore = "a hook calls the driver, not the next library which interposes the same function"]
fn an_interposer_behind_the_library_sees_the_same_calls() {
    let host = Host::new();
    let (interposer, program) = (host.library("interposer"), host.program("worker"));
    let ended = host.case(&program, &["2"]).after(&interposer).same();
    assert!(ended.stdout.contains("saw malloc") && ended.stdout.contains("saw cuInit"), "{ended:?}");
}

#[test]
fn versioned_lookups_and_dladdr_names_are_unchanged() {
    Host::new().succeeds("lookups", &["versions", "addresses", "next"]);
}

#[test]
fn errors_of_the_loader_name_the_program() {
    Host::new().succeeds("lookups", &["errors"]);
}

#[test]
fn errors_of_driver_lookups_are_unchanged() {
    Host::new().succeeds("lookups", &["errors-loaded"]);
}

#[test]
fn a_function_missing_in_the_driver_is_not_found_despite_its_hook() {
    let without = "cuGreenCtxCreate cuMemcpyBatchAsync";
    let host = Host(Machine::with_scheduler(Setup { without, ..Setup::default() }));
    let ended = host.case(host.program("lookups"), &["lacking"]).succeeds();
    assert_eq!(ended.stdout.lines().map(|line| line.ends_with("not there")).collect::<Vec<_>>(), [true, true, false]);
}

#[test]
fn pending_dlerror_messages_are_unchanged() {
    Host::new().succeeds("lookups", &["errors-pending"]);
}

#[test]
#[ignore = "hooks are found by RTLD_NEXT and by the program's own handle, and a look-up that is refused leaves no error"]
fn driver_functions_are_not_found_before_the_driver_is_loaded() {
    Host::new().succeeds("lookups", &["absent"]);
}

#[test]
fn symbols_in_a_plugins_own_scope_are_found() {
    let host = Host::new();
    let (plugin, program) = (host.library("scoped"), host.program("scopes"));
    let ended = host.case(&program, &[&plugin.to_string_lossy()]).succeeds();
    assert_eq!(ended.stdout, "42\n42\n");
}

#[test]
fn without_an_exported_dlsym_the_c_librarys_is_found() {
    let host = Host::new();
    let (without, program) = (host.library("nodlsym"), host.program("asks"));
    let ended = host.case(&program, &[]).before(&without).same();
    assert_eq!((ended.status, &*ended.stdout), ((Some(0), None), "found\nfound\nnothing\nnothing\nnothing\n"));
}

#[test]
fn nvml_answers_are_unchanged_for_every_kind_of_lookup() {
    let host = Host::new();
    let program = host.program("nvml");
    for word in ["linked", "looked-up", "default", "next"] {
        host.case(&program, &[word]).succeeds();
        // A limit above the GPU's memory changes nothing, but makes the library check each query.
        host.case(&program, &[word]).env("NVSHARE_MEMORY_MAX", "1T").succeeds();
    }
}

#[test]
fn without_nvml_a_librarys_own_nvml_functions_are_called() {
    let host = Host::new();
    let (library, program) = (host.library("wrapper"), host.program("wrapped"));
    let ended = host.case(&program, &[&library.to_string_lossy()]).same();
    assert_eq!((&*ended.stdout, ended.status), ("7, 0 7\n", (Some(0), None)), "{ended:?}");
}

#[test]
fn lookups_work_in_constructors_and_signal_handlers() {
    let host = Host::new();
    host.case(host.program("constructors"), &[]).succeeds();
    host.case(host.program("handlers"), &[]).succeeds();
}

#[test]
#[ignore = "the simulated driver starts a thread with the first work in a stream, which needs the loader's lock"]
fn a_constructor_waiting_at_the_gate_blocks_no_other_thread() {
    let (host, mut free) = Host::occupied();
    let (plugin, program) = (host.library("constructor"), host.program("gated"));
    let mut program = host.case(&program, &[&plugin.to_string_lossy()]).start();
    host.0.wait_for_move(0, "a request", |m| m.pid == program.pid() && m.what == "request");
    // While one thread waits with the loader's lock held, other threads allocate, free and query
    // memory.
    test_support::wait_for("the other thread", || program.stdout().contains("allocated").then_some(()));
    assert_eq!(program.poll(), None);
    free();
    assert_eq!(end(&mut program).stdout, "allocated\nconstructed\nworked\n");
}

/// The client's thread has prepared everything that it needs from the driver. So no step of an
/// eviction waits for the loader's lock.
#[test]
fn a_first_eviction_works_while_a_constructor_runs() {
    let host = Host::new();
    let (until, plugin, program) = (host.0.path("until"), host.library("until"), host.program("loading"));
    let case = host.case(&program, &[&plugin.to_string_lossy()]).env("UNTIL", &until.to_string_lossy());
    let mut loading = case.start();
    wait_for("the constructor", || loading.stdout().contains("constructing").then_some(()));
    host.0.program("mix --mem 150M --reps 1 --rounds 2").start().finish();
    // The memory may have been restored by now.
    let status = host.0.status();
    let left = status["gpus"][0]["swapped-out-bytes"].as_u64().expect("bytes");
    assert!(left > 50 * MIB, "{status}");
    assert_eq!(loading.poll(), None);
    std::fs::write(&until, "").expect("a file");
    assert_eq!(end(&mut loading).stdout, "constructing\nworked\n");
}

#[test]
fn the_library_can_be_opened_and_closed_with_dlopen() {
    let host = Host::new();
    let program = host.program("opens");
    let library = library().to_string_lossy().into_owned();
    for word in ["idle", "preloaded", "running"] {
        let case = host.case(&program, &[word, &library]);
        let ended = if word == "preloaded" { case.with() } else { case.without() };
        assert_eq!(
            (ended.status, &*ended.stdout, &*ended.stderr),
            ((Some(0), None), "worked\n", ""),
            "{word}: {ended:?}"
        );
    }
}

#[test]
fn the_library_may_be_preloaded_twice() {
    let host = Host::new();
    let program = host.program("worker");
    host.case(&program, &["2"]).preloading(&[library(), library()]).succeeds();
    let (linked, copied) = (host.0.path("libnvshare-linked.so"), host.0.path("libnvshare-copied.so"));
    std::os::unix::fs::symlink(library(), &linked).expect("a link");
    std::fs::copy(library(), &copied).expect("a copy");
    host.case(&program, &["2"]).preloading(&[library(), linked]).succeeds();
    host.case(&program, &["2"]).preloading(&[library(), copied]).succeeds();
}
