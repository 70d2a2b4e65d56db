//! Puts restored programs into scopes of systemd.
//!
//! A restored program is in the control group of the helper. There, the limits of its user would not
//! apply, and it would belong to a unit of the system. So it becomes a scope in the slice of its user, as
//! the user's sessions are.

use crate::process::{self, Tree};
use std::process::{Command, Stdio};

/// Puts all processes of a tree into a scope that is named after an image. Without systemd, the processes
/// stay where the helper is.
pub fn put_into(tree: &Tree, image: &str) {
    let Some(uid) = process::owner(tree.root()) else { return };
    let pids = tree.pids();
    let mut command = Command::new("busctl");
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").stdin(Stdio::null()).stdout(Stdio::null());
    let manager = ["org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager"];
    command.args(["--system", "--quiet", "call"]).args(manager).args(["StartTransientUnit", "ssa(sv)a(sa(sv))"]);
    command.args([&format!("nvshare-{image}.scope"), "fail", "4"]);
    command.args(["Description", "s", &format!("program restored from image {image}")]);
    command.args(["Slice", "s", &format!("user-{uid}.slice"), "CollectMode", "s", "inactive-or-failed"]);
    command.args(["PIDs", "au", &pids.len().to_string()]).args(pids.iter().map(i32::to_string)).arg("0");
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => eprintln!("nvshare-hibernate: cannot create a scope for image {image}: busctl: {status}"),
        Err(e) => eprintln!("nvshare-hibernate: cannot create a scope for image {image}: busctl: {e}"),
    }
}
