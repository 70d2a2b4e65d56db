//! `nvsharectl top`: as text, and on a terminal, which tmux provides.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use test_support::artifact;
use test_support::daemon::*;

#[test]
fn without_a_terminal_it_prints_text() {
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
fn without_a_scheduler_it_says_so_as_other_commands_do() {
    let directory = Directory::new();
    let mut command = ctl();
    command.arg("--control").arg(directory.0.join("none.sock")).arg("top");
    let output = Output::of(&mut command);
    assert_eq!((output.code, output.stdout.as_str()), (Some(3), ""));
    assert!(output.stderr.contains("is not running"), "{}", output.stderr);
}

/// A terminal of 80 columns and 24 lines with a program on it.
struct Terminal {
    socket: PathBuf,
    _directory: Directory,
}

impl Terminal {
    /// `None`: there is no tmux.
    fn start(daemon: &Daemon, environment: &[&str]) -> Option<Self> {
        let directory = Directory::new();
        let terminal = Self { socket: directory.0.join("tmux"), _directory: directory };
        let mut command = terminal.tmux();
        command.args(["-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24"]);
        // What it ends with stays on the screen.
        let script = "env \"$@\"; echo \"ended with $?\"; sleep 60";
        command.args(["sh", "-c", script, "sh"]).args(environment);
        command.arg(artifact("nvsharectl")).arg("--control").arg(daemon.control()).arg("top");
        match command.env_remove("TMUX").env("LC_ALL", "C.UTF-8").status() {
            Ok(status) => assert!(status.success(), "{status}"),
            Err(e) => {
                eprintln!("skipped: no tmux: {e}");
                return None;
            }
        }
        Some(terminal)
    }

    fn tmux(&self) -> Command {
        let mut command = Command::new("tmux");
        command.arg("-S").arg(&self.socket).stdin(Stdio::null());
        command
    }

    fn press(&self, key: &str) {
        assert!(self.tmux().args(["send-keys", key]).status().expect("tmux").success());
    }

    fn screen(&self) -> String {
        let output = self.tmux().args(["capture-pane", "-p"]).output().expect("tmux");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// Waits until all of it is on the screen.
    #[track_caller]
    fn wait(&self, parts: &[&str]) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let screen = self.screen();
            if parts.iter().all(|part| screen.contains(part)) {
                return screen;
            }
            assert!(Instant::now() < deadline, "{parts:?} are not on the screen:\n{screen}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.tmux().arg("kill-server").stderr(Stdio::null()).status();
    }
}

#[test]
fn on_a_terminal_keys_do_what_the_last_line_says() {
    let daemon = Daemon::start();
    let [_holder, waiter] = daemon.holder_and_waiter();
    let Some(terminal) = Terminal::start(&daemon, &["NO_COLOR=1"]) else { return };
    let screen = terminal.wait(&["Test GPU  16 GiB", "runs, ", "waits, about ", "q quit   by memory"]);
    assert!(screen.contains("[####") && screen.contains("holder  "), "{screen}");
    terminal.press("s");
    terminal.wait(&["by time had"]);
    terminal.press("Down");
    terminal.press("w");
    terminal.wait(&["It holds "]);
    terminal.press("Escape");
    terminal.press("p");
    terminal.wait(&["is to be paused"]);
    let all = || daemon.ctl(&["--json", "status"]).stdout;
    let deadline = Instant::now() + PATIENCE;
    while !all().contains("\"paused\": true") {
        assert!(Instant::now() < deadline, "{}", all());
    }
    // The daemon ends: it says so, and is there again when the daemon is.
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
    let Some(terminal) = Terminal::start(&daemon, &["TERM=dumb"]) else { return };
    let screen = terminal.wait(&["waits, about "]);
    assert!(!screen.contains("q quit"), "{screen}");
    terminal.press("C-c");
}
