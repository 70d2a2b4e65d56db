//! `nvsharectl get`, `set`, `reset` and `reload`: settings that an administrator can change at run
//! time.

use std::time::Duration;

use serde_json::json;

use super::arguments::Setting;
use super::{CtlError, Target, block_on, password, rules};
use crate::config::names;

/// Changes settings in order.
pub fn set(target: &Target, settings: &[Setting]) -> Result<(), CtlError> {
    block_on(async {
        let scheduler = target.connect().await?;
        for setting in settings {
            let (property, value) = match *setting {
                Setting::TimeQuantum { value } => ("TimeQuantum", whole_seconds("time quantum", value)?.into()),
                Setting::MaxWait { value } => ("MaxWait", whole_seconds("longest wait", value)?.into()),
                Setting::AntiThrash { value } => ("AntiThrash", names::anti_thrash_name(value).into()),
                Setting::Policy { value } => ("Policy", names::policy_name(value).into()),
            };
            password::set(&scheduler, property, value).await?;
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
