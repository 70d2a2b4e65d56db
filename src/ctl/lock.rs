//! `nvsharectl lock`: runs a command with a GPU's lock held, as `systemd-inhibit` does with its own.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use zbus::Variant;

use super::{CtlError, Target, block_on, password};
use crate::bus::LockFd;

/// Which lock, and what people read about who has it.
#[derive(Debug)]
pub struct LockRequest {
    pub gpu: String,
    pub who: Option<String>,
    pub why: String,
}

/// Waits for the lock, runs the command and gives its exit code: its own, or 128 and the signal that ended it.
pub fn lock(target: &Target, request: &LockRequest, command: &[OsString]) -> Result<u8, CtlError> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(CtlError::Failed("there is no command to run".into()));
    };
    let who = request.who.clone().unwrap_or_else(|| program.to_string_lossy().into_owned());
    let lock = block_on(async {
        let scheduler = target.connect().await?;
        let options: HashMap<&str, Variant<'_>> = HashMap::new();
        let lock: LockFd =
            password::call(&scheduler, "AcquireLock", &(&request.gpu, &who, &request.why, options)).await?;
        Ok(lock)
    })?;
    // Closed when this process ends, in whatever way; the command does not inherit it.
    let mut lines = BufReader::new(UnixStream::from(std::os::fd::OwnedFd::from(lock)));
    let mut line = String::new();
    while line != "granted\n" {
        line.clear();
        let gone = || CtlError::Failed("the scheduler has stopped before it gave the lock".into());
        if lines.read_line(&mut line).map_err(|_| gone())? == 0 {
            return Err(gone());
        }
    }
    let status = Command::new(program).args(arguments).status();
    let status =
        status.map_err(|error| CtlError::CannotRun { command: program.to_string_lossy().into_owned(), error })?;
    let code = status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1);
    Ok(u8::try_from(code).unwrap_or(1))
}
