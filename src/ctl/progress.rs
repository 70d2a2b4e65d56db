//! How far something has got that takes longer than a second: a line on a terminal that is written again and again, and is gone at the
//! end. Where standard error is no terminal there is none.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::identity::printable;

/// What takes no longer says nothing.
const QUIET: Duration = Duration::from_secs(1);
/// How often it is looked how far it has got.
pub const LOOK: Duration = Duration::from_millis(200);
/// So that the line is one line, which can be written again.
const WIDTH: usize = 78;

#[derive(Debug)]
pub struct Progress {
    is_shown: bool,
    since: Instant,
    length: usize,
}

impl Progress {
    pub fn new() -> Self {
        Self { is_shown: std::io::stderr().is_terminal(), since: Instant::now(), length: 0 }
    }

    /// Whether there is somebody to show it to.
    pub fn is_shown(&self) -> bool {
        self.is_shown
    }

    /// Shows how far it is; an empty text removes the line.
    pub fn show(&mut self, text: &str) {
        if self.is_shown && (text.is_empty() || self.since.elapsed() >= QUIET) {
            let line = line(text, self.length);
            let mut stderr = std::io::stderr();
            let _ = stderr.write_all(line.as_bytes());
            let _ = stderr.flush();
            self.length = text.chars().take(WIDTH).count();
        }
    }

    /// Shows that it is under way until it is done, and for how long it has been.
    pub async fn during<T>(&mut self, text: &str, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        let begin = Instant::now();
        loop {
            tokio::select! {
                done = &mut work => {
                    self.show("");
                    return done;
                }
                () = tokio::time::sleep(LOOK), if self.is_shown => {
                    self.show(&format!("{text}: {} s", begin.elapsed().as_secs()));
                }
            }
        }
    }
}

/// What removes the line before, and writes that one. Names that programs chose may be in it.
fn line(text: &str, before: usize) -> String {
    if text.is_empty() && before == 0 {
        return String::new();
    }
    let text: String = printable(text).chars().take(WIDTH).collect();
    format!("\r{:before$}\r{text}", "")
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.show("");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_takes_the_place_of_the_one_before() {
        assert_eq!(line("", 0), "", "nothing was shown");
        assert_eq!(line("ab", 0), "\r\rab");
        assert_eq!(line("c", 2), "\r  \rc");
        assert_eq!(line("", 1), "\r \r");
        assert_eq!(line("a\x1b[2J\nb", 0), "\r\ra?[2J?b");
        assert_eq!(line(&"x".repeat(200), 0).len(), 2 + WIDTH);
    }
}
