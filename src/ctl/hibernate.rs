//! `nvsharectl hibernate`, `restore` and `hibernated`: save programs to disk, restore and list them.

use super::arguments::Images;
use super::progress::Progress;
use super::table::{Align, Table};
use super::{CtlError, Target, all, block_on, password, pause, send, shutdown};
use crate::bus::status::json_fields;
use crate::bus::{Image, SchedulerProxy};
use crate::config::units;
use std::collections::HashMap;
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::time::sleep;
use zbus::Variant;

/// Interval of the lists that show the progress. Each list starts a helper.
const LOOK: Duration = Duration::from_secs(1);

/// How programs are saved.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Also saves programs that have network connections, which the restore closes.
    pub close_connections: bool,
}

impl Options {
    /// The arguments of the method `Hibernate`.
    pub fn body(self, pid: u32) -> (u32, HashMap<&'static str, Variant<'static>>) {
        (pid, HashMap::from([("close-connections", Variant::from(self.close_connections))]))
    }
}

/// Carries out one of the three commands. Returns the text to print.
///
/// # Errors
/// The command fails.
pub fn carry_out(target: &Target, command: Images, is_json: bool) -> Result<String, CtlError> {
    match command {
        Images::Hibernate { send, close_connections, all, within, at_shutdown, program } => {
            let options = Options { close_connections };
            match send {
                Some(host) => send::hibernate(target, &host, &program, options),
                None if at_shutdown => shutdown::wait_and_save(target, options),
                None if all => all::save(target, within, options),
                None => hibernate(target, &program, options),
            }
        }
        Images::Restore { all: true, .. } => all::restore(target),
        Images::Restore { check: true, image, .. } => check(target, &image),
        Images::Restore { sent, image, .. } => restore(target, &image, sent),
        Images::Hibernated { delete: Some(image), .. } => delete(target, &image).map(|()| String::new()),
        Images::Hibernated { delete: None, .. } => list(target, is_json),
    }
}

/// Saves programs to disk and ends their processes. Returns a line for each program.
///
/// # Errors
/// The program does not exist, or cannot be saved. It then continues.
fn hibernate(target: &Target, program: &str, options: Options) -> Result<String, CtlError> {
    block_on(async {
        let scheduler = target.connect().await?;
        let mut lines = String::new();
        for pid in pause::pids(&scheduler, program).await? {
            match save(&scheduler, pid, options).await {
                Ok(image) => {
                    lines += &format!("Process {pid} is saved. Restore it with: nvsharectl restore {image}\n");
                }
                Err(e) => saved_before(&scheduler, pid, &lines, e).await?,
            }
        }
        Ok(lines)
    })
}

/// Handles a program of several that was not saved. `lines`: about the earlier ones, which are printed.
///
/// # Errors
/// The program is still there, so it was not saved with an earlier one that has started it.
pub(super) async fn saved_before(
    scheduler: &SchedulerProxy<'_>,
    pid: u32,
    lines: &str,
    e: zbus::Error,
) -> Result<(), CtlError> {
    if !lines.is_empty() && !all::is_present(scheduler, pid).await {
        return Ok(());
    }
    all::print(lines);
    Err(e.into())
}

/// Saves a program, and shows the progress on a terminal. Returns the name of the image. If this process is
/// interrupted, the scheduler cancels the hibernation.
async fn save(scheduler: &SchedulerProxy<'_>, pid: u32, options: Options) -> zbus::Result<String> {
    let mut progress = Progress::new();
    let body = options.body(pid);
    let mut saving = pin!(password::call(scheduler, "Hibernate", &body));
    let mut begun = None;
    loop {
        tokio::select! {
            image = &mut saving => {
                progress.show("");
                return image;
            }
            () = sleep(LOOK), if progress.is_shown() => {
                if !password::asks() {
                    // An older scheduler lists only complete images.
                    let images = scheduler.list_hibernated().await.unwrap_or_default();
                    let image = images.iter().find(|image| image.runs_as == pid && image.expected_bytes.is_some());
                    let since = image.map(|_| *begun.get_or_insert_with(Instant::now));
                    progress.show(&step(pid, image, since.map_or(Duration::ZERO, |since| since.elapsed())));
                }
            }
        }
    }
}

/// Describes how far a program is saved. `elapsed`: the time since its image was first seen.
fn step(pid: u32, image: Option<&Image>, elapsed: Duration) -> String {
    let Some(Image { bytes, expected_bytes: Some(expected), .. }) = image else {
        return format!("pausing process {pid}");
    };
    if bytes >= expected {
        return format!("saving process {pid}: {} written, checking the image", units::size(*bytes));
    }
    let written = format!("saving process {pid}: {} of about {}", units::size(*bytes), units::size(*expected));
    let rate = *bytes as f64 / elapsed.as_secs_f64();
    match rate > 0.0 && elapsed >= LOOK {
        true => format!("{written}, {:.0} s left", ((expected - bytes) as f64 / rate).ceil()),
        false => written,
    }
}

/// Checks whether an image can be restored here and now. Returns a line about it.
///
/// # Errors
/// It cannot. The error lists everything that the host lacks.
fn check(target: &Target, image: &str) -> Result<String, CtlError> {
    let lacks: Vec<String> = block_on(async {
        let scheduler = target.connect().await?;
        Ok(password::call(&scheduler, "CheckHibernated", &(image,)).await?)
    })?;
    match &lacks[..] {
        [] => Ok(format!("{image} can be restored on this host.\n")),
        lacks => Err(CtlError::Failed(format!("cannot restore image {image:?}: {}", lacks.join("\n")))),
    }
}

/// Restores the program of an image. Returns a line about it. `is_claimed`: the program does not run on the host
/// that got a copy of the image.
///
/// # Errors
/// The image does not exist, is damaged, or cannot be restored here and now.
fn restore(target: &Target, image: &str, is_claimed: bool) -> Result<String, CtlError> {
    block_on(async {
        let scheduler = target.connect().await?;
        if is_claimed {
            password::call::<()>(&scheduler, "ClaimHibernated", &(image,)).await?;
        }
        let pid: u32 = password::call(&scheduler, "Restore", &(image,)).await?;
        Ok(format!("{image} runs as process {pid}.\n"))
    })
}

/// Lists the images.
///
/// # Errors
/// The scheduler cannot read the images.
fn list(target: &Target, is_json: bool) -> Result<String, CtlError> {
    let images = block_on(async { Ok(target.connect().await?.list_hibernated().await?) })?;
    if is_json {
        let image = |image: &Image| {
            json_fields!(
                image; name, uid, program, saved, bytes, expected_bytes, runs_as, damage, state, sent_to,
            )
        };
        return Ok(format!("{:#}\n", serde_json::Value::from_iter(images.iter().map(image))));
    }
    Ok(present(&images))
}

/// Deletes an image.
///
/// # Errors
/// The image does not exist, or is being restored.
fn delete(target: &Target, image: &str) -> Result<(), CtlError> {
    block_on(async {
        let scheduler = target.connect().await?;
        Ok(password::call::<()>(&scheduler, "DeleteHibernated", &(image,)).await?)
    })
}

fn present(images: &[Image]) -> String {
    if images.is_empty() {
        return "No program is saved.\n".into();
    }
    let mut table =
        Table::new(&[("IMAGE", Align::Left), ("UID", Align::Right), ("SIZE", Align::Right), ("STATE", Align::Left)]);
    for image in images {
        let state = match (image.runs_as, image.damage.as_str(), &image.sent_to) {
            (pid, ..) if image.expected_bytes.is_some() => format!("process {pid} is being saved"),
            (0, "", Some(host)) => format!("sent to {host}"),
            (0, "", None) => "saved".to_owned(),
            (0, damage, _) => format!("unusable: {damage}"),
            (pid, ..) => format!("runs as process {pid}"),
        };
        table.row(vec![image.name.clone(), image.uid.to_string(), units::size(image.bytes), state]);
    }
    table.lines().iter().map(|line| format!("{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_listed_with_their_state() {
        let image = |name: &str, runs_as, damage: &str| Image {
            name: name.into(),
            uid: 1000,
            bytes: 3 << 30,
            runs_as,
            damage: damage.into(),
            ..Image::default()
        };
        let sent = Image { sent_to: Some("gpu2".into()), ..image("a-1-4", 0, "") };
        let unsigned = image("b-2-4", 0, "this host has not signed it");
        let partial = Image { expected_bytes: Some(4 << 30), ..image("c-9-5", 9, "") };
        let images = [image("a-1-2", 0, ""), image("a-1-3", 7, ""), sent, unsigned, partial];
        let expected = "\
IMAGE   UID   SIZE  STATE
a-1-2  1000  3 GiB  saved
a-1-3  1000  3 GiB  runs as process 7
a-1-4  1000  3 GiB  sent to gpu2
b-2-4  1000  3 GiB  unusable: this host has not signed it
c-9-5  1000  3 GiB  process 9 is being saved
";
        assert_eq!(present(&images), expected);
        assert_eq!(present(&[]), "No program is saved.\n");
    }

    #[test]
    fn the_progress_has_a_time_left_once_bytes_are_written() {
        let image = |bytes| Image { bytes, expected_bytes: Some(8 << 30), runs_as: 7, ..Image::default() };
        let step = |bytes, seconds| super::step(7, Some(&image(bytes)), Duration::from_secs(seconds));
        assert_eq!(super::step(7, None, Duration::ZERO), "pausing process 7");
        assert_eq!(step(0, 5), "saving process 7: 0 B of about 8 GiB");
        assert_eq!(step(2 << 30, 0), "saving process 7: 2 GiB of about 8 GiB");
        assert_eq!(step(2 << 30, 5), "saving process 7: 2 GiB of about 8 GiB, 15 s left");
        assert_eq!(step(9 << 30, 5), "saving process 7: 9 GiB written, checking the image");
    }
}
