//! Defective libraries, before and after they are enabled.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use super::host::*;
use test_support::artifact;

#[test]
fn verify_lists_its_checks() {
    on_a_host(|host| {
        let report = host.preload("verify").fine();
        let tried =
            ["/bin/true as root", "/bin/true as nobody", "/bin/cat /proc/self/maps as nobody", "--version as nobody"];
        for line in tried {
            assert!(report.contains(line), "no {line:?} in {report}");
        }
        assert!(report.starts_with("/mnt/lib/libnvshare.so, version 0.1.0\n"), "{report}");
        let note = "note: a program built with gcc -fsanitize=address aborts if a library is preloaded";
        assert!(report.contains(note) && report.contains("ASAN_OPTIONS=verify_asan_link_order=0"), "{report}");
        assert_eq!(host.text(), None);
        let json = said(host.command("verify").args(["--json", "--library", LIBRARY])).fine();
        let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!((&json["right"], &json["version"]), (&true.into(), &"0.1.0".into()));
        assert!(json["notes"].to_string().contains("-static-libasan"), "{json}");
    });
}

/// Asserts that the library is refused with a reason, and that programs still start.
#[track_caller]
fn is_refused(host: &Host, sentence: &str) {
    let verified = host.preload("verify");
    assert_eq!((verified.code(), &*verified.stderr), (Some(1), ""), "{verified:?}");
    assert!(verified.stdout.contains(sentence), "no {sentence:?} in {}", verified.stdout);
    host.write(b"\n");
    let identity = host.identity();
    host.preload("enable").refused(sentence);
    assert_eq!(host.identity(), identity, "{sentence}");
    host.is_sound();
    host.is_tidy();
}

#[test]
fn a_library_that_programs_would_notice_is_refused() {
    on_a_host(|host| {
        let harm = [
            ("-DPRINTS", "/bin/true as root: printed \"hello\""),
            ("-DPRINTS_TO_STDOUT", "/bin/true as root: printed \"hello\""),
            ("-DCRASHES", "/bin/true as root: ended with signal: 6"),
            ("-DCRASHES_FOR_USERS", "/bin/true as nobody: ended with signal: 6"),
            ("-DCRASHES_WHEN_SETUID", "--version as nobody: ended with signal: 6"),
        ];
        for (harm, sentence) in harm {
            host.compile(LIBRARY, &[harm]);
            is_refused(host, sentence);
        }
        host.compile(LIBRARY, &[]);
        host.preload("enable").fine();
    });
}

#[test]
fn a_library_that_never_finishes_loading_is_refused() {
    on_a_host(|host| {
        host.compile(LIBRARY, &["-DHANGS"]);
        host.preload("enable").refused("/bin/true as root: did not end within 20 s");
        host.is_sound();
        assert_eq!(host.text(), None);
    });
}

/// Builds a library that prevents every program from starting.
fn fatal(host: &Host, how: &str) -> &'static str {
    const MADE: &str = "/mnt/lib/made.so";
    let part = |version: &str| {
        fs::write("/mnt/part.map", format!("{version} {{ global: part; }};")).expect("a file");
        fs::write("/mnt/part.c", "void part(void) {}").expect("a file");
        let options =
            ["-shared", "-fPIC", "-Wl,--version-script=/mnt/part.map", "-o", "/mnt/lib/libpart.so", "/mnt/part.c"];
        said(Command::new("cc").args(options)).fine();
    };
    let linked = ["-DNEEDS", "-L/mnt/lib", "-lpart", "-Wl,-rpath,/mnt/lib"];
    match how {
        "needs a library that is gone" => {
            part("PART_1");
            host.compile(MADE, &linked);
            fs::remove_file("/mnt/lib/libpart.so").expect("it goes");
        }
        "needs a version that is gone" => {
            part("PART_2");
            host.compile(MADE, &linked);
            part("PART_1");
        }
        "needs a symbol that nobody has" => host.compile(MADE, &["-DUNRESOLVED", "-Wl,-z,now"]),
        "is cut off" => {
            // The file ends within the segments that the loader maps.
            let whole = fs::read(artifact("libnvshare.so")).expect("the library");
            fs::write(MADE, &whole[..20_000]).expect("it is written");
            fs::set_permissions(MADE, Permissions::from_mode(0o644)).expect("its mode");
        }
        "crashes" => host.compile(MADE, &["-DCRASHES"]),
        _ => unreachable!(),
    }
    MADE
}

const FATAL: [&str; 5] = [
    "needs a library that is gone",
    "needs a version that is gone",
    "needs a symbol that nobody has",
    "is cut off",
    "crashes",
];

#[test]
fn a_fatal_library_is_refused() {
    on_a_host(|host| {
        for how in FATAL {
            fs::rename(fatal(host, how), LIBRARY).expect("it takes the library's place");
            host.preload("enable").refused("WRONG");
            assert_eq!(host.text(), None, "{how}");
            host.is_sound();
        }
    });
}

#[test]
fn disable_works_after_a_library_has_become_fatal() {
    on_a_host(|host| {
        for how in FATAL {
            host.patch(|bytes| *bytes = fs::read(artifact("libnvshare.so")).expect("the library"));
            host.write(b"# kept\n");
            let fatal = fatal(host, how);
            host.preload("enable").fine();
            fs::rename(fatal, LIBRARY).expect("it takes the library's place");
            // No program starts, including a dynamically linked nvsharectl.
            for program in [Path::new("/bin/true"), &artifact("nvshare-scheduler")] {
                let said = said(Command::new(program).arg("--version"));
                assert!(!said.status.success(), "{how}: {said:?}");
            }
            assert_eq!(host.preload("status").code(), Some(0), "{how}");
            host.preload("enable").refused("To stop preloading it, run `nvsharectl preload disable`");
            host.preload("disable").fine();
            assert_eq!(host.text().as_deref(), Some(&b"# kept\n"[..]), "{how}");
            host.is_sound();
        }
    });
}

#[test]
fn a_running_shell_can_empty_the_file() {
    on_a_host(|host| {
        let mut shell = Command::new("/bin/sh").stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("a shell");
        fs::rename(fatal(host, FATAL[0]), LIBRARY).expect("it takes the library's place");
        host.write(format!("{LIBRARY}\n").as_bytes());
        assert!(!said(&mut Command::new("/bin/true")).status.success());
        // This is the manual's command for repairing the host.
        shell.stdin.take().expect("a pipe").write_all(b": > /etc/ld.so.preload\n").expect("it reads");
        assert!(shell.wait().expect("it ends").success());
        host.is_sound();
    });
}

#[test]
fn a_failure_after_the_rehearsal_is_rolled_back() {
    on_a_host(|host| {
        host.compile(LIBRARY, &["-DCRASHES_IN_EARNEST"]);
        assert!(host.preload("verify").status.success(), "the rehearsal notices nothing");
        host.preload("enable").refused("/bin/true as root ended with signal: 6");
        assert_eq!(host.text(), None);
        host.is_sound();

        host.write(b"\n\n");
        let identity = host.identity();
        host.preload("enable").refused("/etc/ld.so.preload has been restored");
        assert_eq!((host.identity(), host.text().as_deref()), (identity, Some(&b"\n\n"[..])), "the very same file");
        host.is_sound();
        host.is_tidy();
    });
}

#[test]
fn without_a_rehearsal_setuid_programs_are_tried_with_the_real_file() {
    on_a_host(|host| {
        let enable = || {
            // Root has the same capabilities as in an ordinary container.
            let arguments =
                ["--bounding-set=-sys_admin", "/mnt/bin/nvsharectl", "preload", "enable", "--library", LIBRARY];
            said(Command::new("setpriv").args(arguments))
        };
        host.compile(LIBRARY, &["-DCRASHES_WHEN_SETUID"]);
        enable().refused("--version as nobody ended with signal: 6");
        assert_eq!(host.text(), None);
        host.compile(LIBRARY, &["-DPRINTS"]);
        enable().refused("/bin/true as root: printed \"hello\"");
        host.compile(LIBRARY, &[]);
        assert!(enable().fine().contains("note: setuid programs were not tested"));
        host.is_sound();
    });
}

#[test]
fn a_library_for_another_machine_is_refused() {
    on_a_host(|host| {
        let genuine = fs::read(LIBRARY).expect("the library");
        let shapes: [fn(&mut Vec<u8>); 5] = [
            // A 32-bit library.
            |bytes| bytes[4] = 1,
            // A library for another processor.
            |bytes| bytes[18..20].copy_from_slice(&8u16.to_le_bytes()),
            |bytes| *bytes = b"hello".to_vec(),
            |bytes| bytes.clear(),
            // The section headers are at the end, so they are cut off.
            |bytes| bytes.truncate(20_000),
        ];
        for change in shapes {
            host.patch(|bytes| {
                *bytes = genuine.clone();
                change(bytes);
            });
            is_refused(host, "not a shared object for this machine");
        }
        fs::remove_file(LIBRARY).expect("it goes");
        host.preload("enable").refused("there is no library /mnt/lib/libnvshare.so. Set its path with --library");
        said(&mut host.command("enable")).refused("Set its path with --library");
        // This is not nvshare's library, so no program is run with it.
        fs::write(
            "/mnt/other.c",
            "#include <unistd.h>\n__attribute__((constructor)) void f(void) { unlink(\"/mnt/other.c\"); }",
        )
        .expect("a file");
        said(Command::new("cc").args(["-shared", "-fPIC", "-o", LIBRARY, "/mnt/other.c"])).fine();
        is_refused(host, "contains no nvshare version");
        assert!(Path::new("/mnt/other.c").exists(), "it was run");
    });
}

#[test]
fn a_library_writable_by_other_users_is_refused() {
    on_a_host(|host| {
        let mode = |path: &str, mode: u32| fs::set_permissions(path, Permissions::from_mode(mode)).expect("its mode");
        let owner =
            |path: &str, uid: u32, gid: u32| std::os::unix::fs::chown(path, Some(uid), Some(gid)).expect("root may");
        mode(LIBRARY, 0o666);
        is_refused(host, "/mnt/lib/libnvshare.so is writable by users other than root (mode 666)");
        mode(LIBRARY, 0o640);
        is_refused(host, "/mnt/lib/libnvshare.so cannot be read by all users");
        mode(LIBRARY, 0o644);
        mode("/mnt/lib", 0o700);
        is_refused(host, "/mnt/lib cannot be entered by all users");
        mode("/mnt/lib", 0o1777);
        is_refused(host, "/mnt/lib is writable by users other");
        mode("/mnt/lib", 0o775);
        owner("/mnt/lib", 0, 50);
        is_refused(host, "/mnt/lib is writable by users other");
        mode("/mnt/lib", 0o755);
        owner("/mnt/lib", 7, 0);
        is_refused(host, "/mnt/lib belongs to user 7");
        owner("/mnt/lib", 0, 0);
        owner(LIBRARY, 7, 0);
        is_refused(host, "/mnt/lib/libnvshare.so belongs to user 7");
        owner(LIBRARY, 0, 0);
        host.preload("enable").fine();
    });
}

#[test]
fn a_path_that_the_loader_would_misread_is_refused() {
    on_a_host(|host| {
        let enable = |library: &str| said(host.command("enable").args(["--library", library]));
        for directory in ["/mnt/a b", "/mnt/a:b", "/mnt/a#b", "/mnt/$LIB", "/mnt/a\nb"] {
            fs::create_dir(directory).expect("a directory");
            let library = format!("{directory}/libnvshare.so");
            fs::copy(LIBRARY, &library).expect("a copy");
            enable(&library).refused("which the loader cannot read");
        }
        fs::copy(LIBRARY, "/mnt/lib/other.so").expect("a copy");
        enable("/mnt/lib/other.so").refused("its file name is not libnvshare.so");
        assert_eq!(host.text(), None);

        // A link is resolved when its path is written, because its target may change later.
        fs::create_dir("/mnt/link").expect("a directory");
        symlink(LIBRARY, "/mnt/link/libnvshare.so").expect("a link");
        enable("/mnt/link/libnvshare.so").fine();
        assert_eq!(host.text().as_deref(), Some(format!("{LIBRARY}\n").as_bytes()));
    });
}
