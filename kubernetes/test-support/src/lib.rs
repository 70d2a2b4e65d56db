//! Support for tests of the programs on a Kubernetes node.

pub mod api_server;
pub mod processes;
pub mod program;

use std::time::{Duration, Instant};

pub use processes::Process;

/// Timeout of all waits. The timeout is long enough for a loaded machine, and only a failing test
/// waits this long.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The name of the node.
pub const NODE: &str = "node-1";

/// Waits until `question` returns an answer, and returns the answer.
#[track_caller]
pub fn until<T>(what: &str, question: impl Fn() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = question() {
            return answer;
        }
        assert!(Instant::now() < deadline, "{what}: it never came");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A unique UID.
pub fn uid(number: u32) -> String {
    format!("{number:08x}-89ab-cdef-0123-456789abcdef")
}
