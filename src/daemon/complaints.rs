//! Keeps one user's broken programs from filling the log: a few lines each, then one now and then.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// This many lines...
const BURST: u32 = 10;
/// (of programs that come and go: a job may be hundreds)
const BURST_OF_CLIENTS: u32 = 200;
/// ...in this time.
const WINDOW: Duration = Duration::from_secs(10);
/// Users are forgotten beyond this many; a fleet of user ids must not cost memory.
const MAX_KEPT: usize = 1024;

#[derive(Debug, Default)]
pub struct Complaints(HashMap<(&'static str, u32), Window>);

#[derive(Debug)]
struct Window {
    since: Instant,
    lines: u32,
}

impl Complaints {
    /// Whether one more line of that topic about that user may be logged now.
    pub fn may(&mut self, topic: &'static str, uid: u32) -> bool {
        let burst = if matches!(topic, "connected" | "gone") { BURST_OF_CLIENTS } else { BURST };
        let now = Instant::now();
        if self.0.len() >= MAX_KEPT {
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
        let mut complaints = Complaints::default();
        let logged = (0..1000).filter(|_| complaints.may("client", 1000)).count();
        assert_eq!(logged, BURST as usize);
        assert!(complaints.may("client", 1001));
        assert!(complaints.may("accept", 1000));
    }
}
