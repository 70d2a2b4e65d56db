//! `nvsharectl get`, `set` and `reload`: what an administrator can change while everything runs.

use std::time::Duration;

use super::{CtlError, Target, block_on};
use crate::scheduler::AntiThrash;
use crate::{bus, units};

/// A setting and its new value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    TimeQuantum(Duration),
    AntiThrash(AntiThrash),
}

/// Puts changes into effect, one after the other.
pub fn set(target: &Target, changes: &[Change]) -> Result<(), CtlError> {
    block_on(async {
        let scheduler = target.connect().await?;
        for change in changes {
            match change {
                Change::TimeQuantum(quantum) => {
                    let whole = quantum.subsec_nanos() == 0;
                    let seconds = u32::try_from(quantum.as_secs()).ok().filter(|_| whole).ok_or_else(|| {
                        CtlError::Failed(format!(
                            "the time quantum cannot be {quantum:?}: it is a number of whole seconds"
                        ))
                    })?;
                    scheduler.set_time_quantum(seconds).await?;
                }
                Change::AntiThrash(mode) => scheduler.set_anti_thrash(bus::anti_thrash_name(*mode)).await?,
            }
        }
        Ok(())
    })
}

/// The settings that are in effect, a line each, as they are written in the configuration file.
pub fn get(target: &Target) -> Result<String, CtlError> {
    block_on(async {
        let scheduler = target.connect().await?;
        let quantum = scheduler.time_quantum().await?;
        let mode = scheduler.anti_thrash().await?;
        Ok(format!("time-quantum = \"{quantum}s\"\nanti-thrash = \"{mode}\"\n"))
    })
}

/// Has the scheduler read its configuration file again.
pub fn reload(target: &Target) -> Result<(), CtlError> {
    block_on(async { Ok(target.connect().await?.reload().await?) })
}

/// Reads `45`, `45s` or `1min`.
pub fn parse_time_quantum(text: &str) -> Result<Duration, String> {
    units::parse_duration(text)
}
