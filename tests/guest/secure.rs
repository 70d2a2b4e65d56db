//! Programs that run with more privileges than their caller. The library ignores the caller's
//! environment variables.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::compare::*;

/// Runs a program in a separate mount namespace. The library is in its `/etc/ld.so.preload`, which
/// no other process sees.
const PRELOADED: &str = r#"
mount --make-rprivate / && mount -t tmpfs none "$1" && cp -a /etc "$1/etc" && echo "$2" >"$1/etc/ld.so.preload" &&
mount --bind "$1/etc" /etc && shift 2 && exec "$@"
"#;

#[test]
fn a_setuid_program_ignores_its_callers_environment_variables() {
    let host = Host::new();
    // SAFETY: `geteuid` has no preconditions.
    let root = unsafe { libc::geteuid() } == 0;
    if !root || !output(Command::new("unshare").args(["-m", "mount", "-t", "tmpfs", "none", "/mnt"])).status.success() {
        return test_support::skip("root, and the right to mount, for an /etc/ld.so.preload of its own");
    }
    let (program, place) = (host.program("secure"), host.0.path("place"));
    std::fs::create_dir(&place).expect("a directory");
    std::fs::set_permissions(host.0.path("."), PermissionsExt::from_mode(0o755)).expect("its mode");
    let run = |mode: u32| {
        std::fs::set_permissions(&program, PermissionsExt::from_mode(mode)).expect("its mode");
        let words = [place.to_string_lossy(), library().to_string_lossy().into_owned().into()];
        let program = program.to_string_lossy();
        let arguments = [
            "-m",
            "sh",
            "-c",
            PRELOADED,
            "sh",
            &words[0],
            &words[1],
            "setpriv",
            "--reuid=1",
            "--clear-groups",
            &program,
        ];
        // The command starts without `LD_PRELOAD`. The file `/etc/ld.so.preload` preloads the
        // library.
        let case = host.case("/usr/bin/unshare", &arguments).preloading(&[]);
        let case = case.env("NVSHARE_DEBUG", "1").env("NVSHARE_SOCKET", &host.0.socket().to_string_lossy());
        case.with()
    };
    // An ordinary program of that user obeys the environment, so it logs.
    let plain = run(0o755);
    assert_eq!((plain.status, &*plain.stdout), ((Some(0), None), "not secure, worked\n"), "{plain:?}");
    assert!(plain.stderr.contains("nvshare"), "{plain:?}");
    let clients = host.clients();
    // A program with another user's privileges ignores the environment, so it logs nothing.
    let secure = run(0o4755);
    assert_eq!((secure.status, &*secure.stdout, &*secure.stderr), ((Some(0), None), "secure, worked\n", ""));
    assert_eq!(host.clients(), clients, "it did not connect to a socket of the user's");
}
