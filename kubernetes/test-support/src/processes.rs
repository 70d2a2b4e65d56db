//! Processes that tests start, and their logs.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::PATIENCE;

/// The lines that a process has written to stderr so far.
#[derive(Debug, Clone, Default)]
pub struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    pub fn lines(&self) -> Vec<String> {
        self.0.lock().expect("the log").clone()
    }

    pub fn count(&self, text: &str) -> usize {
        self.lines().iter().filter(|line| line.contains(text)).count()
    }

    /// Waits for a line that contains the text.
    #[track_caller]
    pub fn wait(&self, text: &str) {
        self.wait_for(text, 1);
    }

    /// Waits for `count` lines that contain the text.
    #[track_caller]
    pub fn wait_for(&self, text: &str, count: usize) {
        let deadline = Instant::now() + PATIENCE;
        while self.count(text) < count {
            assert!(Instant::now() < deadline, "not {count} log lines with {text:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A process that ends with the test. If the test fails, the process's log is printed.
#[derive(Debug)]
pub struct Process {
    name: &'static str,
    child: Child,
    pub log: Log,
}

impl Process {
    pub fn start(name: &'static str, mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("it starts");
        let (stderr, log) = (child.stderr.take().expect("its stderr"), Log::default());
        let to = log.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                to.0.lock().expect("the log").push(line);
            }
        });
        Self { name, child, log }
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: the call takes no pointers. The process is a child that has not been reaped, so
        // its pid has not been reused.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Waits for the end of the process.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.child.try_wait().expect("a child") {
                Some(status) => return status,
                None => assert!(Instant::now() < deadline, "it does not end"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn kill(mut self) {
        self.signal(libc::SIGKILL);
        self.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- the {}'s log ---\n{}", self.name, self.log.lines().join("\n"));
        }
    }
}
