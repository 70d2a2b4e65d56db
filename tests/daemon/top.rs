//! `nvsharectl top`, as text and on a terminal. tmux provides the terminal.

use std::time::Instant;

use crate::terminal::Terminal;
use test_support::artifact;
use test_support::daemon::*;

/// Returns `None` without tmux.
fn top(daemon: &Daemon, environment: &str) -> Option<Terminal> {
    let (nvsharectl, control) = (artifact("nvsharectl"), daemon.control());
    Terminal::start(&[&"env", &environment, &nvsharectl, &"--control", &control, &"top"])
}

#[test]
fn top_prints_text_without_a_terminal() {
    let daemon = Daemon::start();
    let _clients = daemon.holder_and_waiter();
    let shown = daemon.ctl(&["top", "-n", "1"]);
    assert_eq!((shown.code, shown.stderr.as_str()), (Some(0), ""));
    for part in ["Test GPU  16 GiB", "# holder 12G", "runs, ", "waits, about ", "PROGRAM"] {
        assert!(shown.stdout.contains(part), "{part}: {}", shown.stdout);
    }
    assert!(!shown.stdout.contains('\x1b'), "{}", shown.stdout);
    assert!(shown.stdout.lines().all(|line| line.chars().count() <= 80), "{}", shown.stdout);
    let json = daemon.ctl(&["--json", "status"]).stdout;
    assert!(json.contains("\"share-due\": 500") && json.contains("\"turn-ends\": {"), "{json}");
}

#[test]
fn top_without_a_scheduler_exits_with_3() {
    let directory = Directory::new();
    let mut command = ctl();
    command.arg("--control").arg(directory.0.join("none.sock")).arg("top");
    let output = Output::of(&mut command);
    assert_eq!((output.code, output.stdout.as_str()), (Some(3), ""));
    assert!(output.stderr.contains("is not running"), "{}", output.stderr);
}

#[test]
fn keys_of_top_work_on_a_terminal() {
    let daemon = Daemon::start();
    let [_holder, waiter] = daemon.holder_and_waiter();
    let Some(terminal) = top(&daemon, "NO_COLOR=1") else { return };
    let screen = terminal.wait(&["Test GPU  16 GiB", "runs, ", "waits, about ", "q quit   by memory"]);
    assert!(screen.contains("[####") && screen.contains("holder  "), "{screen}");
    terminal.press("s");
    terminal.wait(&["by time had"]);
    terminal.press("Down");
    terminal.press("w");
    terminal.wait(&["It holds "]);
    terminal.press("Enter");
    terminal.press("p");
    terminal.wait(&["pausing "]);
    let all = || daemon.ctl(&["--json", "status"]).stdout;
    let deadline = Instant::now() + PATIENCE;
    while !all().contains("\"paused\": true") {
        assert!(Instant::now() < deadline, "{}", all());
    }
    // When the daemon ends, `top` shows a message and keeps running.
    drop(waiter);
    drop(daemon.stop());
    terminal.wait(&["the scheduler is not running"]);
    terminal.press("q");
    terminal.wait(&["ended with 0"]);
}

#[test]
fn a_dumb_terminal_gets_text() {
    let daemon = Daemon::start();
    let _clients = daemon.holder_and_waiter();
    let Some(terminal) = top(&daemon, "TERM=dumb") else { return };
    let screen = terminal.wait(&["waits, about "]);
    assert!(!screen.contains("q quit"), "{screen}");
    terminal.press("C-c");
}

#[test]
fn top_shows_the_age_of_outdated_figures() {
    let daemon = Daemon::start();
    let _clients = daemon.holder_and_waiter();
    let Some(terminal) = top(&daemon, "NO_COLOR=1") else { return };
    terminal.wait(&["runs, "]);
    daemon.signal(libc::SIGSTOP);
    terminal.wait(&["the scheduler does not answer. These figures are ", " s old"]);
    daemon.signal(libc::SIGCONT);
    terminal.press("q");
    terminal.wait(&["ended with 0"]);
}
