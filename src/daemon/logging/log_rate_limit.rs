//! A rate limit for log lines about clients, so that one user's broken programs cannot fill the log.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Lines of one topic about one user that are logged in a window.
const BURST: u32 = 10;
/// The same for lines about clients that come and go: a job may be hundreds of processes.
const BURST_OF_CLIENTS: u32 = 200;
const WINDOW: Duration = Duration::from_secs(10);
/// Expired windows are dropped beyond this many, so that a fleet of user ids does not cost memory.
const MAX_WINDOWS: usize = 1024;

/// The current windows, by topic and user.
#[derive(Debug, Default)]
pub struct LogRateLimit(HashMap<(&'static str, u32), Window>);

#[derive(Debug)]
struct Window {
    since: Instant,
    lines: u32,
}

impl LogRateLimit {
    /// Counts one more line of that topic about that user. True if it may be logged.
    pub fn allows(&mut self, topic: &'static str, uid: u32) -> bool {
        let burst = if matches!(topic, "connected" | "gone") { BURST_OF_CLIENTS } else { BURST };
        let now = Instant::now();
        if self.0.len() >= MAX_WINDOWS {
            self.0.retain(|_, window| now - window.since < WINDOW);
        }
        let window = self.0.entry((topic, uid)).or_insert(Window { since: now, lines: 0 });
        if now - window.since >= WINDOW {
            if window.lines > burst {
                tracing::warn!(name: "lines-left-out", uid, topic, suppressed = window.lines - burst, "lines of this kind were left out");
            }
            *window = Window { since: now, lines: 0 };
        }
        window.lines += 1;
        window.lines <= burst
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_for_its_user_only() {
        let mut limit = LogRateLimit::default();
        let logged = (0..1000).filter(|_| limit.allows("client", 1000)).count();
        assert_eq!(logged, BURST as usize);
        assert!(limit.allows("client", 1001));
        assert!(limit.allows("accept", 1000));
    }
}
