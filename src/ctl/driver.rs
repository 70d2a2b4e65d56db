//! `nvsharectl release-driver`: makes the scheduler release the driver, so that the driver can be
//! unloaded or a GPU reset.

use std::time::Duration;

use super::{CtlError, Target, block_on, password};
use crate::bus::Client;

/// Makes the scheduler release the driver for at most `lasts`. Returns the text to print.
///
/// # Errors
/// Other programs use the driver. The scheduler has released the driver even if this error occurs.
pub fn release(target: &Target, lasts: Duration) -> Result<String, CtlError> {
    let seconds = u32::try_from(lasts.as_secs()).unwrap_or(u32::MAX);
    let (users, clients) = block_on(async {
        let scheduler = target.connect().await?;
        let users: Vec<u64> = password::call(&scheduler, "ReleaseDriver", &(seconds,)).await?;
        let clients = if users.is_empty() { Vec::new() } else { scheduler.list_clients().await? };
        Ok((users, clients))
    })?;
    if users.is_empty() {
        return Ok(format!("The scheduler has released the driver for {seconds} s, or until a program uses a GPU.\n"));
    }
    let lines: String =
        users.iter().filter_map(|id| clients.iter().find(|client| client.id == *id)).map(line).collect();
    Err(CtlError::Failed(format!(
        "the scheduler has released the driver, but programs still use it. Stop these programs, then run this command \
         again:\n{}",
        lines.trim_end()
    )))
}

pub(super) fn line(Client { pid, name, unit, .. }: &Client) -> String {
    match unit.as_str() {
        "" => format!("  {name} (process {pid})\n"),
        unit => format!("  {name} (process {pid}, unit {unit})\n"),
    }
}
