//! Libraries that are opened with `RTLD_DEEPBIND`. Such libraries resolve symbols in their own
//! dependencies before preloaded libraries. The file also tests other properties that a program may
//! expect of `dlopen`.

use std::path::PathBuf;

use crate::compare::*;

/// Builds two versions of a library, each with several linker options. One is linked to the driver,
/// and the other looks up the driver itself.
fn libraries(host: &Host) -> Vec<PathBuf> {
    let build = |name: &str, output: &str, options: &[&str]| {
        host.build(name, output, &[&["-shared", "-fPIC"], options].concat()).expect("a C compiler")
    };
    vec![
        build("plugin", "libplugin-now.so", &["-Wl,-z,now", "-Wl,-z,relro"]),
        build("plugin", "libplugin-lazy.so", &["-Wl,-z,lazy", "-Wl,-z,norelro"]),
        build("plugin", "libplugin-sysv.so", &["-Wl,--hash-style=sysv"]),
        build("plugin", "libplugin-pointers.so", &["-fno-plt"]),
        build("runtime", "libruntime-now.so", &["-Wl,-z,now"]),
        build("runtime", "libruntime-lazy.so", &["-Wl,-z,lazy"]),
    ]
}

#[test]
fn a_deepbind_library_shares_the_gpu() {
    let host = Host::new();
    let program = host.program("deepbind");
    let mut clients = 0;
    for library in libraries(&host) {
        for word in ["now", "lazy", "driver-first", "driver-deep", "driver-late"] {
            host.case(&program, &[word, &library.to_string_lossy()]).succeeds();
            clients += 1;
            assert_eq!(host.clients(), clients, "{word} {library:?}");
        }
    }
}

#[test]
fn constructors_of_a_deepbind_library_share_the_gpu() {
    let host = Host::new();
    let options = ["-shared", "-fPIC", "-DCONSTRUCT"];
    let library = host.build("runtime", "libconstruct.so", &options).expect("a C compiler");
    host.case(host.program("deepbind"), &["constructor", &library.to_string_lossy()]).succeeds();
    assert_eq!(host.clients(), 1);
}

#[test]
fn work_of_a_deepbind_library_waits_for_the_lock() {
    let (host, mut free) = Host::occupied();
    let program = host.program("deepbind");
    let mut programs: Vec<_> = libraries(&host)
        .iter()
        .map(|library| host.case(&program, &["now", &library.to_string_lossy()]).start())
        .collect();
    for program in &mut programs {
        host.0.wait_for_move(0, "a request", |m| m.pid == program.pid() && m.what == "request");
        assert_eq!(program.poll(), None);
    }
    free();
    for program in &mut programs {
        assert_eq!(end(program).stdout, "worked\n");
    }
}

/// nvshare cannot see the work of a library that is not bound to the hooks, so memory that the
/// library may use must stay on the GPU.
#[test]
fn memory_is_pinned_if_a_library_cannot_be_bound_to_the_hooks() {
    let host = Host::new();
    let program = host.program("deepbind");
    for library in libraries(&host) {
        let case = host.case(&program, &["refused", &library.to_string_lossy()]);
        case.succeeds();
        // The test reads the program's own trace, because the scheduler doesn't read the last
        // messages of a program that has ended.
        let ended = case.env("NVSHARE_DEBUG", "1").with();
        assert_eq!(ended.stdout, "worked\n");
        assert!(ended.stderr.contains("reason: UntrackedWork"), "{}", ended.stderr);
    }
}

/// Julia looks up all functions that it calls. nvshare knows each function that is looked up in
/// this way, with or without a hook.
#[test]
fn looking_up_driver_functions_leaves_memory_movable() {
    let host = Host::new();
    let case = host.case(host.program("deepbind"), &["look-up", ""]);
    case.succeeds();
    let mut running = case.start();
    assert_eq!(end(&mut running).stdout, "worked\n");
    host.0.wait_for_move(0, "its end", |m| m.pid == running.pid() && m.what == "disconnect");
    let trace = host.0.moves();
    assert!(!trace.iter().any(|m| m.pid == running.pid() && m.what == "untracked-work"), "its memory stays");
}

#[test]
fn a_library_keeps_its_own_functions_with_driver_names() {
    let host = Host::new();
    let program = host.program("deepbind");
    for options in [&["-Wl,-z,now"][..], &["-Wl,-z,lazy"], &["-Wl,-Bsymbolic"]] {
        let options = [&["-shared", "-fPIC", "-DOWN", "-fno-builtin"], options].concat();
        let library = host.build("runtime", "libown.so", &options).expect("a C compiler");
        let ended = host.case(&program, &["own", &library.to_string_lossy()]).succeeds();
        assert_eq!(ended.stdout, "142\n142\nworked\n");
    }
}

#[test]
fn threads_can_open_and_close_deepbind_libraries_concurrently() {
    let host = Host::new();
    let program = host.program("deepbind");
    for library in libraries(&host) {
        host.case(&program, &["threads", &library.to_string_lossy()]).succeeds();
    }
}

#[test]
fn a_program_with_two_copies_of_the_library_is_one_client() {
    let host = Host::new();
    let (program, copied) = (host.program("deepbind"), host.0.path("libnvshare-copied.so"));
    std::fs::copy(self::library(), &copied).expect("a copy");
    let copies = [self::library(), copied];
    let mut clients = 0;
    for library in libraries(&host) {
        for word in ["now", "lazy", "driver-first"] {
            host.case(&program, &[word, &library.to_string_lossy()]).preloading(&copies).succeeds();
            clients += 1;
            assert_eq!(host.clients(), clients, "{word} {library:?}");
        }
    }
}

#[test]
fn a_disabled_library_changes_nothing() {
    let host = Host::new();
    let program = host.program("deepbind");
    for library in libraries(&host) {
        host.case(&program, &["now", &library.to_string_lossy()]).env("NVSHARE_DISABLE", "1").succeeds();
    }
    assert_eq!(host.clients(), 0);
}

#[test]
fn dlopen_search_paths_and_errors_are_unchanged() {
    let host = Host::new();
    std::fs::create_dir_all(host.0.path("inner/deeper")).expect("directories");
    let build = |name: &str, output: &str, options: &[&str]| host.build(name, output, options).expect("a C compiler");
    build("plugin", "inner/deeper/libdeeper.so", &["-shared", "-fPIC"]);
    let here = "-Wl,-rpath,$ORIGIN/deeper";
    let outer = build("finds", "inner/libfinds.so", &["-shared", "-fPIC", "-DOUTER", here]);
    let program = build("finds", "finds", &["-Wl,-rpath,$ORIGIN/inner"]);
    let ended = host.case(&program, &[&outer.to_string_lossy()]).succeeds();
    assert!(ended.stdout.contains("libdeeper.so by outer: found"), "{ended:?}");
    assert!(ended.stdout.contains("libdeeper.so by program: libdeeper.so: cannot open"), "{ended:?}");
}

#[test]
fn interposers_of_dlopen_see_the_same_calls_as_without_the_library() {
    let host = Host::new();
    let (watcher, program) = (host.library("watcher"), host.program("deepbind"));
    for library in libraries(&host) {
        for word in ["now", "driver-deep"] {
            let case = || host.case(&program, &[word, &library.to_string_lossy()]);
            for ended in [case().before(&watcher).same(), case().after(&watcher).same()] {
                assert_eq!(ended.status, (Some(0), None), "{ended:?}");
                assert!(ended.stdout.contains(&*format!("opens {}", library.display())), "{ended:?}");
            }
        }
    }
}
