//! `nvsharectl hibernate --send`: moves a program to another host. The image is copied with rsync over ssh, the
//! other host restores it, and this host deletes it when the program runs there.
//!
//! At any moment, at most one of the two hosts restores the image without a further order. **The image is copied
//! while it belongs to this host. Then this host records that it was sent**, with [`SENT`], and the copy
//! contains that record. `restore --sent` on the other host is the order that makes the copy the program. If
//! this host gets no answer to the order, its image stays, and is not restored here: the program may run there.
//! The same command then continues, from the state of the copy. So it needs no other state than the records.

use std::io::{IsTerminal, stderr};
use std::os::fd::AsFd;
use std::process::{Command, Output, Stdio};

use super::{CtlError, Target, block_on, password, pause};
use crate::bus::SchedulerProxy;

/// The directory of the images on both hosts.
const IMAGES: &str = "/var/lib/nvshare-hibernate";
/// The state of an image whose program may be on either host.
const SENT: &str = "sent";
/// A connection that is lost is noticed within a minute. Passwords cannot be entered, because there are several
/// connections.
const SSH: [&str; 8] = [
    "-oBatchMode=yes",
    "-oConnectTimeout=10",
    "-oServerAliveInterval=15",
    "-oServerAliveCountMax=4",
    "-oControlMaster=no",
    "-oControlPath=none",
    "-l",
    "root",
];

fn failed(text: String) -> CtlError {
    CtlError::Failed(text)
}

/// Saves programs, and moves them to another host. Returns a line for each program. `program` may also be an image.
///
/// # Errors
/// The reason, and the command that continues.
pub fn hibernate(target: &Target, host: &str, program: &str) -> Result<String, CtlError> {
    let other = Remote::new(host)?;
    block_on(async {
        let scheduler = target.connect().await?;
        let images = scheduler.list_hibernated().await?;
        // Before any program is stopped. The list above has created this host's key.
        other.check()?;
        if images.iter().any(|image| image.name == program) {
            return other.send(&scheduler, program).await;
        }
        let mut lines = String::new();
        for pid in pause::pids(&scheduler, program).await? {
            let image: String = password::call(&scheduler, "Hibernate", &(pid,)).await?;
            eprintln!("Process {pid} is saved as {image}.");
            lines += &other.send(&scheduler, &image).await?;
        }
        Ok(lines)
    })
}

/// The other host.
struct Remote<'a> {
    host: &'a str,
}

/// Returns the state of an image, and the host that got a copy.
async fn state(scheduler: &SchedulerProxy<'_>, image: &str) -> Result<(String, Option<String>), CtlError> {
    let images = scheduler.list_hibernated().await?;
    let image = images.into_iter().find(|known| known.name == image);
    let found = image.and_then(|image| Some((image.state?, image.sent_to)));
    found.ok_or_else(|| failed("there is no such image any more. See: nvsharectl hibernated".into()))
}

impl<'a> Remote<'a> {
    fn new(host: &'a str) -> Result<Self, CtlError> {
        if !rustix::process::geteuid().is_root() {
            let why = "images belong to root on both hosts. Run it as root, with an ssh key of root on the other host";
            return Err(failed(format!("cannot send programs to {host:?}: {why}")));
        }
        // The name becomes an argument of ssh, and a part of one of rsync.
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        if host.is_empty() || host.starts_with('-') || !host.chars().all(is_allowed) {
            return Err(failed(format!("{host:?} is not the name of a host. The user is always root")));
        }
        Ok(Self { host })
    }

    fn ssh(&self, command: &str) -> Result<Output, CtlError> {
        let mut ssh = Command::new("ssh");
        ssh.args(SSH).arg(self.host).arg(command).stdin(Stdio::null());
        ssh.output().map_err(|e| failed(format!("cannot start ssh: {e}. Install openssh-client")))
    }

    /// Runs a command, and returns its output.
    fn ask(&self, command: &str) -> Result<String, CtlError> {
        let output = self.ssh(command)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(failed(format!("{}: {}", self.host, said(&output))))
    }

    /// Checks that the other host can receive images of this one.
    fn check(&self) -> Result<(), CtlError> {
        let host = self.host;
        if Command::new("rsync").arg("--version").output().is_err() {
            return Err(failed("cannot start rsync. Install rsync on both hosts".into()));
        }
        self.ask("command -v rsync >/dev/null || { echo 'rsync is missing. Install it' >&2; exit 1; }")?;
        // Creates the directory there.
        self.ask("nvsharectl hibernated")?;
        let keys = self.ask(&format!("cd {IMAGES} && find key trusted -type f -exec sha256sum {{}} + || true"))?;
        let own = Command::new("sha256sum").arg(format!("{IMAGES}/key")).output();
        let own = own.map_err(|e| failed(format!("cannot start sha256sum: {e}")))?;
        let own = String::from_utf8_lossy(&own.stdout);
        let own = own.split_whitespace().next().unwrap_or("none");
        if keys.lines().any(|line| line.starts_with(own)) {
            return Ok(());
        }
        Err(failed(format!(
            "{host} does not trust this host's images. If its users may get the programs of this host, run: ssh \
             root@{host} install -d -m 700 {IMAGES}/trusted; scp {IMAGES}/key root@{host}:{IMAGES}/trusted/$(hostname)"
        )))
    }

    /// Returns the state of the copy of an image. `None`: the other host has no copy.
    fn state(&self, image: &str) -> Result<Option<String>, CtlError> {
        let text = self.ask("nvsharectl hibernated --json")?;
        let images: Vec<serde_json::Value> = serde_json::from_str(&text)
            .map_err(|e| failed(format!("cannot read the list of images of {}: {e}", self.host)))?;
        let found = images.iter().find(|known| known.get("name").is_some_and(|name| name == image));
        Ok(found.and_then(|image| Some(image.get("state")?.as_str()?.to_owned())))
    }

    /// Moves an image, from whatever state an earlier attempt has left.
    async fn send(&self, scheduler: &SchedulerProxy<'_>, image: &str) -> Result<String, CtlError> {
        let host = self.host;
        let stays = |e: CtlError| {
            failed(format!(
                "cannot send image {image} to {host}: {e}\nThe image is on this host. Try again with: nvsharectl \
                 hibernate --send {host} {image}\nOr restore it here with: nvsharectl restore {image}"
            ))
        };
        let (here, sent_to) = state(scheduler, image).await?;
        let is_sent = here == SENT;
        if let Some(other) = sent_to.filter(|other| other != host) {
            return Err(failed(format!("image {image} was sent to {other}, where its program may run")));
        }
        if !is_sent && here != "saved" && here != "ended" {
            return Err(failed(format!("cannot send image {image}: its program runs, or is being restored")));
        }
        let unknown = |e: CtlError| if is_sent { self.unknown(image, &e) } else { stays(e) };
        let there = self.state(image).map_err(unknown)?;
        if there.is_none() {
            if is_sent && !self.has_part(image).map_err(unknown)? {
                return Err(failed(format!(
                    "{host} has no image {image}. It may have been restored and deleted there. If it was not, run: \
                     nvsharectl restore --sent {image}"
                )));
            }
            if let Err(e) = self.copy(image, false) {
                // The disk may be full.
                let _ = self.ssh(&format!("rm -rf {IMAGES}/.incoming-{image}")).is_ok();
                return Err(unknown(e));
            }
        }
        if !is_sent {
            let marked: zbus::Result<()> = password::call(scheduler, "SendHibernated", &(image, host)).await;
            marked.map_err(|e| stays(e.into()))?;
        }
        if there.is_none()
            && let Err(e) = self.copy(image, true).and_then(|()| self.publish(image))
        {
            return Err(self.take_back(scheduler, image, e).await);
        }
        self.order(scheduler, image, there).await
    }

    /// Copies the image to a directory that is no image yet. With its record, which says that it was sent.
    fn copy(&self, image: &str, with_record: bool) -> Result<(), CtlError> {
        let mut rsync = Command::new("rsync");
        rsync.args(["--archive", "--numeric-ids", "--whole-file", "--partial", "--exclude=/work/*"]);
        rsync.args(["--exclude=*.new", "--timeout=60"]);
        if !with_record {
            rsync.arg("--exclude=/record");
        }
        if stderr().is_terminal() {
            rsync.arg("--info=progress2");
        }
        rsync.arg(format!("--rsh=ssh {}", SSH.join(" ")));
        rsync.args([format!("{IMAGES}/{image}/"), format!("{}:{IMAGES}/.incoming-{image}/", self.host)]);
        // The progress is no part of the result.
        if let Ok(terminal) = stderr().as_fd().try_clone_to_owned() {
            rsync.stdout(terminal);
        }
        let status = rsync.stdin(Stdio::null()).status();
        match status.map_err(|e| failed(format!("cannot start rsync: {e}")))? {
            status if status.success() => Ok(()),
            status => Err(failed(format!("rsync failed: {status}"))),
        }
    }

    /// True if an earlier attempt has left a part of a copy.
    fn has_part(&self, image: &str) -> Result<bool, CtlError> {
        let test = format!("if [ -d {IMAGES}/.incoming-{image} ]; then echo yes; fi");
        self.ask(&test).map(|answer| answer.trim() == "yes")
    }

    /// Makes a complete copy an image, once it is on the other host's disk.
    fn publish(&self, image: &str) -> Result<(), CtlError> {
        let steps = format!("cd {IMAGES} && sync -f . && mv -T .incoming-{image} {image} && sync -f .");
        self.ask(&steps).map(drop)
    }

    /// Orders the other host to restore its copy, and deletes the image here when the program runs there, or has run.
    async fn order(
        &self,
        scheduler: &SchedulerProxy<'_>,
        image: &str,
        there: Option<String>,
    ) -> Result<String, CtlError> {
        let host = self.host;
        let has_run = |state: &Option<String>| matches!(state.as_deref(), Some("running" | "ended"));
        let mut there = there;
        if !has_run(&there) {
            let output = self.ssh(&format!("nvsharectl restore --sent {image}"))?;
            there = Some("running".into());
            if !output.status.success() {
                let why = failed(format!("{host}: {}", said(&output)));
                there = match self.state(image) {
                    // The answer was lost, not the order.
                    Ok(state) if has_run(&state) => state,
                    Ok(_) => return Err(self.take_back(scheduler, image, why).await),
                    Err(_) => return Err(self.unknown(image, &why)),
                };
            }
        }
        let what = match there.as_deref() {
            Some("running") => format!("{image} runs on {host}"),
            _ => format!("{image} was restored on {host}, where its process has ended"),
        };
        let deleted: zbus::Result<()> = password::call(scheduler, "DeleteHibernated", &(image,)).await;
        deleted.map_err(|e| failed(format!("{what}, but cannot be deleted here: {}", CtlError::from(e))))?;
        Ok(format!("{what}.\n"))
    }

    /// Deletes the copy, so that it can never be restored, and then makes the image here the program. Returns the
    /// error.
    async fn take_back(&self, scheduler: &SchedulerProxy<'_>, image: &str, why: CtlError) -> CtlError {
        let delete = format!(
            "rm -rf {IMAGES}/.incoming-{image} && if [ -d {IMAGES}/{image} ]; then nvsharectl hibernated --delete \
             {image}; fi"
        );
        if self.ask(&delete).is_err() {
            return self.unknown(image, &why);
        }
        let claimed: zbus::Result<()> = password::call(scheduler, "ClaimHibernated", &(image,)).await;
        let restore = match claimed {
            Ok(()) => format!("nvsharectl restore {image}"),
            Err(_) => format!("nvsharectl restore --sent {image}"),
        };
        let host = self.host;
        failed(format!(
            "cannot restore image {image} on {host}: {why}\nThe image is on this host. Try again with: nvsharectl \
             hibernate --send {host} {image}\nOr restore it here with: {restore}"
        ))
    }

    fn unknown(&self, image: &str, why: &CtlError) -> CtlError {
        let host = self.host;
        failed(format!(
            "image {image} was sent to {host}, which does not answer: {why}\nThe program may run there, so the image \
             on this host is not restored. Continue with: nvsharectl hibernate --send {host} {image}\nIf {host} is \
             lost, restore it here with: nvsharectl restore --sent {image}"
        ))
    }
}

/// The message of a failed command.
fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let text = text.trim();
    if text.is_empty() { output.status.to_string() } else { text.strip_prefix("nvsharectl: ").unwrap_or(text).into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_no_options_and_no_commands() {
        for host in ["", "-oProxyCommand=x", "a b", "root@a", "a;b", "a:b"] {
            assert!(Remote::new(host).is_err(), "{host:?}");
        }
    }
}
