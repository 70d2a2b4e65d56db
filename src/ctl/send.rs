//! `nvsharectl hibernate --send`: moves a program to another host. The image is copied with rsync
//! over ssh, the other host restores it, and this host deletes it when the program runs there.
//!
//! At any moment, at most one of the two hosts restores the image without a further order. **The
//! image is copied while it belongs to this host. Then this host records that it was sent**, with
//! [`SENT`], and the copy contains that record. `restore --sent` on the other host is the order
//! that makes the copy the program. If this host gets no answer to the order, its image stays, and
//! is not restored here: the program may run there. The same command then continues, from the state
//! of the copy. So it needs no other state than the records.
//!
//! An image here becomes the program again only after its copy was taken away, in one step that
//! only succeeds while the copy was not restored. A copy that is not found may have been restored
//! and deleted, so nothing follows from its absence.

use std::fs::File;
use std::io::{IsTerminal, stderr};
use std::os::fd::AsFd;
use std::process::{Command, Output, Stdio};

use super::hibernate::{Options, saved_before};
use super::{CtlError, Target, all, block_on, password, pause};
use crate::bus::{Image, SchedulerProxy};
use nvshare_hibernate::{SAVED_RECORD, reserve, sent_record};

/// The directory of the images on both hosts.
const IMAGES: &str = "/var/lib/nvshare-hibernate";
/// The state of an image whose program may be on either host.
const SENT: &str = "sent";
/// A connection that is lost is noticed within a minute. Passwords cannot be entered, because there
/// are several connections.
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
/// Longest run time of a command on the other host, in seconds. The longest command is a restore:
/// systemd ends its helper after 20 minutes. A command that waits for a broken disk may never end.
const LIMIT: &str = "1500";

fn failed(text: String) -> CtlError {
    CtlError::Failed(text)
}

/// Saves programs, and moves them to another host. Returns a line for each program. `program` may
/// also be an image.
///
/// # Errors
/// The reason, and the command that continues.
pub fn hibernate(target: &Target, host: &str, program: &str, options: Options) -> Result<String, CtlError> {
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
            let saved: zbus::Result<String> = password::call(&scheduler, "Hibernate", &options.body(pid)).await;
            let image = match saved {
                Ok(image) => image,
                Err(e) => {
                    saved_before(&scheduler, pid, &lines, e).await?;
                    continue;
                }
            };
            eprintln!("Process {pid} is saved as {image}.");
            lines += &other.send(&scheduler, &image).await.inspect_err(|_| all::print(&lines))?;
        }
        Ok(lines)
    })
}

/// The other host.
struct Remote<'a> {
    host: &'a str,
}

async fn find(scheduler: &SchedulerProxy<'_>, image: &str) -> Result<Image, CtlError> {
    let images = scheduler.list_hibernated().await?;
    let found = images.into_iter().find(|known| known.name == image);
    found.ok_or_else(|| failed("there is no such image any more. See: nvsharectl hibernated".into()))
}

/// Locks an image against other commands that send it. The helper locks the directory.
fn lock(image: &str) -> Result<File, CtlError> {
    let refused = |e: &dyn std::fmt::Display| failed(format!("cannot send image {image}: {e}"));
    let file = File::open(format!("{IMAGES}/{image}/manifest")).map_err(|e| refused(&e))?;
    file.try_lock().map_err(|_| refused(&"another command is sending it"))?;
    Ok(file)
}

/// Checks the checksums of keys: this host's, and the other host's with the keys that it trusts.
fn compare_keys(host: &str, own: &str, theirs: &str) -> Result<(), CtlError> {
    let sums = |text: &str| text.lines().filter_map(|line| line.split(' ').next().map(str::to_owned)).collect();
    let (own, theirs): (Vec<String>, Vec<String>) = (sums(own), sums(theirs));
    match (&own[..], &theirs[..]) {
        // Its image would be the copy, and would be deleted with it.
        ([own], [key, ..]) if own == key => Err(failed(format!("{host} is this host, or has the same {IMAGES}/key"))),
        ([own], [_, trusted @ ..]) if trusted.contains(own) => Ok(()),
        _ => Err(failed(format!(
            "{host} does not trust this host's images. If its users may get the programs of this host, run: ssh \
             root@{host} install -d -m 700 {IMAGES}/trusted; scp {IMAGES}/key root@{host}:{IMAGES}/trusted/$(hostname)"
        ))),
    }
}

/// The command that makes a complete copy an image, once it is on the disk of the other host. The
/// record here may have changed before it was copied.
fn publish_command(images: &str, image: &str, host: &str) -> String {
    let sent = sent_record(host);
    format!(
        "cd {images} && grep -qF '{sent}' .incoming-{image}/record && sync -f . && mv -T .incoming-{image} {image} && \
         sync -f ."
    )
}

/// The command that takes a copy away, so that it can never be restored. It fails if the copy was
/// restored, is being restored, or does not exist. The helper's lock protects the record.
fn take_command(images: &str, image: &str, host: &str) -> String {
    let sent = sent_record(host);
    format!(
        "cd {images} && rm -rf .deleted-{image} && if [ -d {image} ]; then ( flock --nonblock 9 && grep -qF -e \
         '{SAVED_RECORD}' -e '{sent}' {image}/record && mv --no-target-directory {image} .deleted-{image} ) \
         9<{image}; else mv --no-target-directory .incoming-{image} .deleted-{image}; fi && sync -f . && \
         {{ rm -rf .deleted-{image} || true; }}"
    )
}

/// Checks that an image of a size has room on a disk. `figures`: the disk's size and free space,
/// and the size of the part that was already copied, in bytes.
fn compare_room(host: &str, bytes: u64, figures: &str) -> Result<(), CtlError> {
    let figures: Vec<u64> = figures.split_whitespace().filter_map(|figure| figure.parse().ok()).collect();
    let [size, free, part @ ..] = &figures[..] else {
        return Err(failed(format!("cannot read the free space of {host}:{IMAGES}")));
    };
    let needed = bytes.saturating_sub(part.iter().sum()) + reserve(*size);
    if needed <= *free {
        return Ok(());
    }
    let (needed, free) = (needed.div_ceil(1 << 20), free >> 20);
    Err(failed(format!("the image needs {needed} MiB, and {host}:{IMAGES} has {free} MiB. Free space there")))
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
        let mut ssh = Command::new("timeout");
        ssh.args(["--foreground", LIMIT, "ssh"]).args(SSH).arg(self.host).arg(command).stdin(Stdio::null());
        ssh.output().map_err(|e| failed(format!("cannot start timeout: {e}. Install coreutils")))
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
        if Command::new("rsync").arg("--version").output().is_err() {
            return Err(failed("cannot start rsync. Install rsync on both hosts".into()));
        }
        self.ask("command -v rsync >/dev/null || { echo 'rsync is missing. Install it' >&2; exit 1; }")?;
        // Creates the directory there.
        self.ask("nvsharectl hibernated")?;
        let trusted = "find trusted -type f -exec sha256sum {} + || true";
        let keys = self.ask(&format!("cd {IMAGES} && sha256sum key && {{ {trusted}; }}"))?;
        let own = Command::new("sha256sum").arg(format!("{IMAGES}/key")).output();
        let own = own.map_err(|e| failed(format!("cannot start sha256sum: {e}")))?;
        compare_keys(self.host, &String::from_utf8_lossy(&own.stdout), &keys)
    }

    /// Checks that the other host has room for an image. It may already have a part.
    fn check_room(&self, image: &Image) -> Result<(), CtlError> {
        let part = format!(".incoming-{}", image.name);
        let figures = self.ask(&format!(
            "cd {IMAGES} && df -B1 --output=size,avail . | tail -n 1 && if [ -d {part} ]; then du -sB1 {part}; fi"
        ))?;
        compare_room(self.host, image.bytes, &figures)
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
        let _lock = lock(image)?;
        let host = self.host;
        let stays = |e: CtlError| {
            failed(format!(
                "cannot send image {image} to {host}: {e}\nThe image is on this host. Try again with: nvsharectl \
                 hibernate --send {host} {image}\nOr restore it here with: nvsharectl restore {image}"
            ))
        };
        let found = find(scheduler, image).await?;
        let here = found.state.as_deref().unwrap_or_default();
        let is_sent = here == SENT;
        if let Some(other) = found.sent_to.as_ref().filter(|other| *other != host) {
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
            match self.check_room(&found).and_then(|()| self.copy(image, false)) {
                Err(e) if is_sent => return Err(self.take_back(scheduler, image, e).await),
                Err(e) => {
                    // The disk may be full.
                    let _ = self.ssh(&format!("rm -rf {IMAGES}/.incoming-{image}")).is_ok();
                    return Err(stays(e));
                }
                Ok(()) => {}
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

    /// Copies the image to a directory that is no image yet. With its record, which says that it
    /// was sent.
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

    fn publish(&self, image: &str) -> Result<(), CtlError> {
        self.ask(&publish_command(IMAGES, image, self.host)).map(drop)
    }

    /// Orders the other host to restore its copy, and deletes the image here when the program runs
    /// there, or has run.
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
                    Ok(Some(_)) => return Err(self.take_back(scheduler, image, why).await),
                    Ok(None) | Err(_) => return Err(self.unknown(image, &why)),
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

    /// Takes the copy away, and then makes the image here the program. Returns the error.
    async fn take_back(&self, scheduler: &SchedulerProxy<'_>, image: &str, why: CtlError) -> CtlError {
        if self.ask(&take_command(IMAGES, image, self.host)).is_err() {
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
            "image {image} was sent to {host}, where its program may run: {why}\nSo the image on this host is not \
             restored. Continue with: nvsharectl hibernate --send {host} {image}\nIf {host} is lost, restore it here \
             with: nvsharectl restore --sent {image}"
        ))
    }
}

/// The message of a failed command.
fn said(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let text = text.trim();
    if output.status.code() == Some(124) {
        return format!("no answer within {LIMIT} s");
    }
    if text.is_empty() { output.status.to_string() } else { text.strip_prefix("nvsharectl: ").unwrap_or(text).into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn hosts_are_no_options_and_no_commands() {
        for host in ["", "-oProxyCommand=x", "a b", "root@a", "a;b", "a:b"] {
            assert!(Remote::new(host).is_err(), "{host:?}");
        }
    }

    #[test]
    fn only_another_host_with_the_key_of_this_host_receives_images() {
        let why = |theirs: &str| compare_keys("gpu2", "aa  key\n", theirs).err().map(|e| e.to_string());
        assert_eq!(why("bb  key\ncc  trusted/x\naa  trusted/gpu1\n"), None);
        for theirs in ["", "bb  key\n", "bb  key\ncc  trusted/x\n"] {
            assert!(why(theirs).is_some_and(|why| why.contains("does not trust")), "{theirs}");
        }
        for theirs in ["aa  key\n", "aa  key\naa  trusted/gpu1\n"] {
            assert!(why(theirs).is_some_and(|why| why.contains("is this host")), "{theirs}");
        }
        assert!(compare_keys("gpu2", "", "bb  key\n").is_err(), "this host has no key");
    }

    #[test]
    fn an_image_is_copied_only_if_the_reserve_stays_free() {
        let has_room = |figures: &str| compare_room("gpu2", 100, figures).is_ok();
        assert!(has_room("1000 200") && !has_room("1000 199"));
        assert!(has_room("1000 150\n50\t.incoming-x-1\n") && !has_room("1000 149\n50\t.incoming-x-1\n"));
        assert!(!has_room("") && !has_room("1000"));
    }

    /// Runs a command of the other host.
    fn succeeds(command: &str) -> bool {
        Command::new("sh").args(["-c", command]).stderr(Stdio::null()).status().expect("a shell").success()
    }

    fn record(stage: &str) -> String {
        format!("{{\"version\":2,\"uid\":1000,{stage}}}")
    }

    #[test]
    fn only_a_copy_whose_record_says_that_it_was_sent_there_becomes_an_image() {
        let directory = tempfile::tempdir().expect("a directory");
        let (part, image) = (directory.path().join(".incoming-x-1"), directory.path().join("x-1"));
        let command = publish_command(&directory.path().display().to_string(), "x-1", "gpu2");
        assert!(!succeeds(&command), "there is no copy");
        fs::create_dir(&part).expect("a directory");
        assert!(!succeeds(&command), "it has no record");
        for stage in [SAVED_RECORD, &sent_record("gpu3"), "\"stage\":{\"Restored\":{}}"] {
            fs::write(part.join("record"), record(stage)).expect("a file");
            assert!(!succeeds(&command) && !image.exists(), "{stage}");
        }
        fs::write(part.join("record"), record(&sent_record("gpu2"))).expect("a file");
        assert!(succeeds(&command) && image.exists() && !part.exists());
    }

    #[test]
    fn a_copy_is_taken_away_only_if_it_was_not_restored() {
        let directory = tempfile::tempdir().expect("a directory");
        let (part, image) = (directory.path().join(".incoming-x-1"), directory.path().join("x-1"));
        let command = take_command(&directory.path().display().to_string(), "x-1", "gpu2");
        assert!(!succeeds(&command), "a copy that does not exist may have been restored and deleted");
        fs::create_dir(&image).expect("a directory");
        for stage in ["\"stage\":{\"Restored\":{}}", "\"stage\":{\"Restoring\":{}}", &sent_record("gpu3")] {
            fs::write(image.join("record"), record(stage)).expect("a file");
            assert!(!succeeds(&command) && image.exists(), "{stage}");
        }
        for stage in [SAVED_RECORD, &sent_record("gpu2")] {
            fs::create_dir_all(&image).expect("a directory");
            fs::write(image.join("record"), record(stage)).expect("a file");
            let helper = File::open(&image).expect("a directory");
            helper.lock().expect("a lock");
            assert!(!succeeds(&command) && image.exists(), "a helper is at work");
            drop(helper);
            assert!(succeeds(&command) && !image.exists(), "{stage}");
        }
        fs::create_dir(&part).expect("a directory");
        assert!(succeeds(&command) && !part.exists(), "a part is no image");
        assert_eq!(fs::read_dir(directory.path()).expect("a directory").count(), 0, "nothing is left");
    }
}
