//! `nvsharectl get`, `set`, `reset` and `reload`: settings that an administrator can change at run
//! time.

use std::time::Duration;

use serde_json::json;

use super::{CtlError, Target, block_on, password, rules};
use crate::config::names;
use crate::config::units;
use crate::scheduler::{AntiThrash, PolicyName};

/// A setting and its new value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    TimeQuantum(Duration),
    MaxWait(Duration),
    AntiThrash(AntiThrash),
    Policy(PolicyName),
}

/// Applies changes in order.
pub fn set(target: &Target, changes: &[Change]) -> Result<(), CtlError> {
    block_on(async {
        let scheduler = target.connect().await?;
        for change in changes {
            match change {
                Change::TimeQuantum(quantum) => {
                    password::set(&scheduler, "TimeQuantum", whole_seconds("time quantum", *quantum)?.into()).await?;
                }
                Change::MaxWait(most) => {
                    password::set(&scheduler, "MaxWait", whole_seconds("longest wait", *most)?.into()).await?;
                }
                Change::AntiThrash(mode) => {
                    password::set(&scheduler, "AntiThrash", names::anti_thrash_name(*mode).into()).await?;
                }
                Change::Policy(policy) => {
                    password::set(&scheduler, "Policy", names::policy_name(*policy).into()).await?;
                }
            }
        }
        Ok(())
    })
}

fn whole_seconds(what: &str, value: Duration) -> Result<u32, CtlError> {
    let whole = value.subsec_nanos() == 0;
    u32::try_from(value.as_secs())
        .ok()
        .filter(|_| whole)
        .ok_or_else(|| CtlError::Failed(format!("the {what} cannot be {value:?}: write whole seconds")))
}

/// Returns the settings and rules in effect, in the format of the configuration file or as JSON.
pub fn get(target: &Target, as_json: bool) -> Result<String, CtlError> {
    block_on(async {
        let scheduler = target.connect().await?;
        let quantum = scheduler.time_quantum().await?;
        let most = scheduler.max_wait().await?;
        let mode = scheduler.anti_thrash().await?;
        let policy = scheduler.policy().await?;
        let rules = scheduler.list_rules().await?;
        if as_json {
            let all = json!({
                "time-quantum": quantum,
                "max-wait": most,
                "anti-thrash": mode,
                "policy": policy,
                "rules": rules.iter().map(rules::json).collect::<Vec<_>>(),
            });
            return Ok(format!("{all:#}\n"));
        }
        let settings = format!(
            "time-quantum = \"{quantum}s\"\nmax-wait = \"{most}s\"\nanti-thrash = \"{mode}\"\npolicy = \"{policy}\"\n"
        );
        Ok(settings + &rules::text(rules))
    })
}

/// Makes the scheduler read its configuration file again.
pub fn reload(target: &Target) -> Result<(), CtlError> {
    block_on(async { Ok(password::call(&target.connect().await?, "Reload", &()).await?) })
}

/// Discards the run-time changes. Returns the names of the removed rules.
pub fn reset(target: &Target) -> Result<String, CtlError> {
    block_on(async {
        let scheduler = target.connect().await?;
        let before = scheduler.list_rules().await?;
        password::call::<()>(&scheduler, "Reset", &()).await?;
        let gone: Vec<String> = before.iter().filter_map(rules::set_at_run_time).collect();
        Ok(if gone.is_empty() {
            String::new()
        } else {
            format!("Removed the rules that were set at run time: {}\n", gone.join(", "))
        })
    })
}

/// Parses whole seconds such as `45`, `45s` or `1min`.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    units::parse_duration(text)
}
