//! `nvsharectl debug`: requests a debug bundle from the scheduler, and saves it.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use zbus::Variant;

use super::{CtlError, Target, block_on, password};
use crate::bus::BundleFd;
use crate::config::units;
use crate::sys::clock;

/// The mode of a bundle's file. A bundle shows the activity of all users, so only the file's owner
/// may read it.
const MODE: u32 = 0o600;

/// Saves a bundle, and returns the text to print. The path `-` writes the bundle to standard
/// output.
pub fn debug(target: &Target, output: Option<&Path>, command_lines: bool) -> Result<String, CtlError> {
    let mut bundle = File::from(create(target, command_lines)?);
    if output == Some(Path::new("-")) {
        return match io::copy(&mut bundle, &mut io::stdout()) {
            Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(CtlError::Failed(format!("cannot print: {e}"))),
            _ => Ok(String::new()),
        };
    }
    let path = output.map_or_else(default_name, Path::to_owned);
    let shown = path.display();
    let mut file = OpenOptions::new().write(true).create_new(true).mode(MODE).open(&path).map_err(|e| {
        CtlError::Failed(match e.kind() {
            ErrorKind::AlreadyExists => {
                format!("{shown} already exists. Use --output to name another file")
            }
            _ => format!("cannot create {shown}: {e} (use --output to name another file)"),
        })
    })?;
    let bytes = io::copy(&mut bundle, &mut file).and_then(|bytes| file.sync_all().map(|()| bytes)).map_err(|e| {
        // Removes an incomplete bundle.
        let _ = std::fs::remove_file(&path);
        CtlError::Failed(format!("cannot write {shown}: {e} (use --output to name another file)"))
    })?;
    Ok(format!("The debug bundle is in {shown} ({}).\n", units::size(bytes)))
}

/// Requests a bundle from the scheduler. Returns a memfd whose position is at the beginning.
pub(super) fn create(target: &Target, command_lines: bool) -> Result<OwnedFd, CtlError> {
    let options: HashMap<&str, Variant<'_>> = HashMap::from([("command-lines", command_lines.into())]);
    block_on(async {
        let scheduler = target.connect().await?;
        let bundle: zbus::Result<BundleFd> = password::call(&scheduler, "CreateDebugBundle", &(options,)).await;
        match bundle {
            Err(zbus::Error::MethodError(name, ..)) if name == "org.freedesktop.DBus.Error.UnknownMethod" => {
                let text = "the running scheduler is older than nvsharectl and has no flight recorder. Run `systemctl \
                    restart nvshare` to start the installed version";
                Err(CtlError::Failed(text.into()))
            }
            bundle => Ok(bundle?.into()),
        }
    })
}

/// Returns the default file name, which contains the host's name and the time.
fn default_name() -> PathBuf {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    name(host.trim(), now).into()
}

fn name(host: &str, seconds: u64) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    let host: String = host.chars().map(|c| if is_plain(c) { c } else { '_' }).collect();
    format!("nvshare-debug-{host}-{}.jsonl", clock::utc(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_name_has_host_and_time() {
        assert_eq!(name("gpu-1.lab", 0), "nvshare-debug-gpu-1.lab-19700101T000000Z.jsonl");
        assert_eq!(name("../x", 951_827_696), "nvshare-debug-.._x-20000229T123456Z.jsonl");
        assert_eq!(name("a", 1_798_761_599), "nvshare-debug-a-20261231T235959Z.jsonl");
    }
}
