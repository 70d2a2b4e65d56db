//! A progress line for operations that take more than a second. On a terminal, the line is
//! rewritten in place and erased at the end. If standard error is not a terminal, nothing is shown.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use super::password;
use crate::identity::printable;

/// Operations that are shorter than this time show no progress.
const QUIET: Duration = Duration::from_secs(1);
/// The interval between updates.
pub const LOOK: Duration = Duration::from_millis(200);
/// Maximum length of the line in characters, so that it fits one line of a terminal.
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

    /// True if standard error is a terminal.
    pub fn is_shown(&self) -> bool {
        self.is_shown
    }

    /// Shows `text`; an empty text erases the line.
    pub fn show(&mut self, text: &str) {
        if self.is_shown && (text.is_empty() || self.since.elapsed() >= QUIET) {
            let line = line(text, self.length);
            let mut stderr = std::io::stderr();
            let _ = stderr.write_all(line.as_bytes());
            let _ = stderr.flush();
            self.length = text.chars().take(WIDTH).count();
        }
    }

    /// Shows `text` with the elapsed time until `work` is done.
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
                    if !password::asks() {
                        self.show(&format!("{text}: {} s", begin.elapsed().as_secs()));
                    }
                }
            }
        }
    }
}

/// Returns the characters that erase the previous line and write a new line. Programs choose the
/// names in the line, so control characters are replaced.
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
    fn a_line_replaces_the_previous_line() {
        assert_eq!(line("", 0), "", "nothing was shown");
        assert_eq!(line("ab", 0), "\r\rab");
        assert_eq!(line("c", 2), "\r  \rc");
        assert_eq!(line("", 1), "\r \r");
        assert_eq!(line("a\x1b[2J\nb", 0), "\r\ra?[2J?b");
        assert_eq!(line(&"x".repeat(200), 0).len(), 2 + WIDTH);
    }
}
