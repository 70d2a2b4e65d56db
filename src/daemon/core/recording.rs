//! What a recording and a bundle say of the host and of processes.

use std::time::{SystemTime, UNIX_EPOCH};

use nvshare_wire::version;

use crate::daemon::gpu::nvml::DriverVersions;
use crate::identity::Identity;
use crate::recorder::bundle::{FORMAT, Header, Process, nanos};
use crate::scheduler::{ClientId, Time};

/// Reads a file of `/proc/sys/kernel` that describes the system.
fn proc_text(name: &str) -> String {
    std::fs::read_to_string(format!("/proc/sys/kernel/{name}")).unwrap_or_default().trim().into()
}

/// The first line of a bundle or recording that starts at `now`.
pub(super) fn header(now: Time, driver: DriverVersions, command_lines: bool) -> Header {
    Header {
        format: FORMAT,
        version: env!("CARGO_PKG_VERSION").into(),
        protocol: (version::MIN, version::MAX),
        host: proc_text("hostname"),
        kernel: proc_text("osrelease"),
        driver: driver.driver,
        nvml: driver.nvml,
        made: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64),
        now_ns: nanos(now),
        command_lines,
    }
}

/// A client's process, in the form used by bundles and recordings.
pub(super) fn process(client: ClientId, identity: &Identity, resumed: bool) -> Process {
    let Identity { pid, name, unit, container, .. } = identity.clone();
    Process { client: client.0, pid, name, unit, container, resumed }
}
