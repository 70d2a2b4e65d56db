//! A terminal, provided by tmux. Without tmux, tests that need a terminal are skipped.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use test_support::Directory;
use test_support::daemon::PATIENCE;

/// A terminal of 80 columns and 24 lines that runs a program.
#[derive(Debug)]
pub struct Terminal {
    socket: PathBuf,
    _directory: Directory,
}

impl Terminal {
    /// Returns `None` without tmux.
    pub fn start(command: &[&dyn AsRef<OsStr>]) -> Option<Self> {
        let directory = Directory::new();
        let terminal = Self { socket: directory.0.join("tmux"), _directory: directory };
        let mut tmux = terminal.tmux();
        tmux.args(["-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24"]);
        // The last output stays on the screen.
        tmux.args(["sh", "-c", "\"$@\"; echo \"ended with $?\"; sleep 60", "sh"]).args(command);
        match tmux.env_remove("TMUX").env("LC_ALL", "C.UTF-8").status() {
            Ok(status) => assert!(status.success(), "{status}"),
            Err(e) => {
                test_support::skip(format_args!("tmux: {e}"));
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

    pub fn press(&self, key: &str) {
        assert!(self.tmux().args(["send-keys", key]).status().expect("tmux").success());
    }

    pub fn screen(&self) -> String {
        let output = self.tmux().args(["capture-pane", "-p"]).output().expect("tmux");
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// Waits until all parts are on the screen.
    #[track_caller]
    pub fn wait(&self, parts: &[&str]) -> String {
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
