//! What tests of the programs on a node of Kubernetes have around these.

pub mod api_server;
pub mod processes;
pub mod program;

use std::time::{Duration, Instant};

pub use processes::Process;

/// Long enough for a loaded machine; nothing waits this long unless it fails.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The name of the node.
pub const NODE: &str = "node-1";

/// Waits until a question has an answer, and returns it.
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

/// A UID that is like no other's.
pub fn uid(number: u32) -> String {
    format!("{number:08x}-89ab-cdef-0123-456789abcdef")
}
