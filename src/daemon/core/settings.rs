//! The scheduler's settings: the configuration's settings, adapted to the driver's version.

use tracing::info;

use crate::config::{Config, names, units};
use crate::scheduler::Settings;

/// Prefixes of tested driver versions. By default, the scheduler puts idle programs to sleep only
/// with these versions. With some other drivers, killing restored programs has hung hosts
/// (NVIDIA/cuda-checkpoint#53). With the tested versions, 300 such kills caused no failure
/// (`bench/RESULTS.md`).
const KILLS_DO_NO_HARM: [&str; 1] = ["580.159."];

/// The scheduler's settings with this driver version. Without `sleep-after` in the configuration,
/// programs sleep only with the drivers in [`KILLS_DO_NO_HARM`].
pub(super) fn in_effect(config: &Config, driver: Option<&str>) -> Settings {
    let is_known = driver.is_some_and(|driver| KILLS_DO_NO_HARM.iter().any(|begin| driver.starts_with(begin)));
    let sleep_after = config.settings.sleep_after.filter(|_| config.sets_sleep_after || is_known);
    Settings { sleep_after, ..config.settings.clone() }
}

pub(super) fn log_changes(before: &Settings, now: &Settings, by: &str) {
    let changes = changes(before, now);
    let (time_quantum, max_wait) = (now.time_quantum.as_secs(), now.max_wait.as_secs());
    let (anti_thrash, policy) = (names::anti_thrash_name(now.anti_thrash), names::policy_name(now.policy));
    info!(name: "settings-changed", time_quantum, max_wait, anti_thrash, policy, by, "settings were changed by {by}: \
        {changes}");
}

/// Describes the differences between settings, such as `time-quantum from 30s to 45s`. Leaves out
/// values that are formatted the same.
fn changes(before: &Settings, now: &Settings) -> String {
    let texts = |settings: &Settings| {
        let Settings {
            time_quantum,
            max_wait,
            time_period,
            anti_thrash,
            policy,
            placement,
            reserve,
            context,
            sleep_after,
        } = settings;
        [
            ("time-quantum", units::duration(*time_quantum)),
            ("max-wait", units::duration(*max_wait)),
            ("time-period", units::duration(*time_period)),
            ("anti-thrash", names::anti_thrash_name(*anti_thrash).to_owned()),
            ("policy", names::policy_name(*policy).to_owned()),
            ("placement", format!("{placement:?}").to_lowercase()),
            ("memory.reserve", units::size(*reserve)),
            ("memory.context", units::size(*context)),
            ("sleep-after", sleep_after.map_or_else(|| "never".to_owned(), units::duration)),
        ]
    };
    let both = texts(before).into_iter().zip(texts(now));
    let changed = both.filter(|((_, before), (_, now))| before != now);
    let changed = changed.map(|((name, before), (_, now))| format!("{name} from {before} to {now}"));
    changed.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn idle_programs_sleep_by_default_only_with_drivers_that_were_tested() {
        let default = Config::default();
        let after = |config: &Config, driver| in_effect(config, driver).sleep_after;
        assert_eq!(after(&default, None), None);
        assert_eq!(after(&default, Some("570.86.15")), None);
        assert_eq!(after(&default, Some("580.159.04")), Some(Duration::from_secs(300)));
        let given = Config { sets_sleep_after: true, ..Config::default() };
        assert_eq!(after(&given, Some("570.86.15")), Some(Duration::from_secs(300)));
    }

    #[test]
    fn changes_name_the_old_and_the_new_value() {
        let before = Config::default().settings;
        let now = Settings { time_quantum: Duration::from_secs(45), sleep_after: None, ..before.clone() };
        assert_eq!(changes(&before, &before), "");
        assert!(changes(&before, &now).starts_with("time-quantum from 30s to 45s, sleep-after from "));
    }
}
