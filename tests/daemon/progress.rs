//! Progress messages of slow commands, which appear only on a terminal.

use std::process::Command;

use crate::terminal::Terminal;
use test_support::artifact;
use test_support::daemon::*;

#[test]
#[ignore = "a helper: a program that waits for its turn"]
fn helper_program() {
    let client = Client::welcomed(&helper_socket());
    client.attach();
    client.report(12 * GIB, 0);
    client.request();
    client.until_granted();
    client.until_end();
}

/// The arguments of `nvsharectl run`.
fn run(daemon: &Daemon) -> Vec<std::ffi::OsString> {
    let program = std::env::current_exe().expect("this program");
    let socket = daemon.socket();
    let mut words: Vec<std::ffi::OsString> = vec!["env".into()];
    for name in ["NVSHARE_TEST_SOCKET", "NVSHARE_SOCKET"] {
        words.push(format!("{name}={}", socket.display()).into());
    }
    words.extend([artifact("nvsharectl").into(), "--control".into(), daemon.control().into(), "run".into()]);
    // The program speaks the protocol itself, so any library can be preloaded.
    let library = "/usr/lib/x86_64-linux-gnu/libdl.so.2";
    let library = if exists(library) { library.into() } else { artifact("libnvshare.so").into_os_string() };
    words.extend(["--library".into(), library, "--".into(), program.into()]);
    words.extend(
        ["progress::helper_program", "--exact", "--ignored", "--nocapture", "--test-threads=1"].map(Into::into),
    );
    words
}

#[test]
fn a_command_shows_its_wait_on_a_terminal() {
    let daemon = Daemon::start();
    let holder = daemon.client();
    holder.attach();
    holder.report(12 * GIB, 0);
    holder.request();
    holder.until_granted();
    holder.report(12 * GIB, 12 * GIB);
    let words = run(&daemon);
    let words: Vec<&dyn AsRef<std::ffi::OsStr>> = words.iter().map(|word| word as _).collect();
    let Some(terminal) = Terminal::start(&words) else { return };
    terminal.wait(&[" waits for GPU-07070707", " s more"]);
    // When the program starts, the message disappears, and the process that printed the message
    // ends.
    drop(holder);
    let deadline = std::time::Instant::now() + PATIENCE;
    while terminal.screen().contains("waits for") {
        assert!(std::time::Instant::now() < deadline, "{}", terminal.screen());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    drop(daemon);
    terminal.wait(&["ended with "]);
}

#[test]
fn a_command_shows_no_wait_without_a_terminal() {
    let daemon = Daemon::start();
    let words = run(&daemon);
    let mut command = Command::new(&words[0]);
    let child = command.args(&words[1..]).stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::null());
    let mut child = child.spawn().expect("it starts");
    daemon.log.wait("Grant { client");
    drop(daemon);
    wait(&mut child);
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().expect("its stderr"), &mut said).expect("UTF-8");
    assert!(!said.contains("waits for") && !said.contains('\r'), "{said}");
}
