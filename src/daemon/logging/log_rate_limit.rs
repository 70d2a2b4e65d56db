//! A rate limit for log lines about clients, so that one tenant's broken programs cannot fill the log.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::identity::Tenant;

/// Maximum number of lines per window about one topic and one tenant.
const BURST: u32 = 10;
/// Maximum number of lines per window about clients that connect, disconnect, or are refused memory. The number is higher
/// than `BURST`, because a job may have hundreds of processes.
const BURST_OF_CLIENTS: u32 = 200;
const WINDOW: Duration = Duration::from_secs(10);
/// Threshold for the number of windows. If it is reached, expired windows are dropped. Otherwise,
/// windows of many tenants would accumulate in memory.
const MAX_WINDOWS: usize = 1024;

/// The current window of each topic and tenant.
#[derive(Debug, Default)]
pub struct LogRateLimit(HashMap<(&'static str, u64), Window>);

#[derive(Debug)]
struct Window {
    since: Instant,
    lines: u32,
}

impl LogRateLimit {
    /// Counts a line about this topic and tenant. Returns true if the line may be logged.
    pub fn allows(&mut self, topic: &'static str, tenant: &Tenant) -> bool {
        let burst = if matches!(topic, "connected" | "gone" | "memory-refused") { BURST_OF_CLIENTS } else { BURST };
        let now = Instant::now();
        if self.0.len() >= MAX_WINDOWS {
            self.0.retain(|_, window| now - window.since < WINDOW);
        }
        let window = self.0.entry((topic, tenant.number())).or_insert(Window { since: now, lines: 0 });
        if now - window.since >= WINDOW {
            if window.lines > burst {
                tracing::warn!(name: "lines-left-out", %tenant, topic, suppressed = window.lines - burst, "suppressed \
                    log lines about {tenant}");
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
    fn log_rate_limits_apply_per_tenant() {
        let mut limit = LogRateLimit::default();
        let logged = (0..1000).filter(|_| limit.allows("client", &Tenant::User(1000))).count();
        assert_eq!(logged, BURST as usize);
        assert!(limit.allows("client", &Tenant::User(1001)));
        assert!(limit.allows("accept", &Tenant::User(1000)));
    }
}
