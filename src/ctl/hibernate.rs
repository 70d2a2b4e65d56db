//! `nvsharectl hibernate`, `restore` and `hibernated`: save programs to disk, restore and list them.

use super::arguments::Images;
use super::table::{Align, Table};
use super::{CtlError, Target, all, block_on, password, pause, send, shutdown};
use crate::bus::Image;
use crate::config::units;

/// Carries out one of the three commands. Returns the text to print.
///
/// # Errors
/// The command fails.
pub fn carry_out(target: &Target, command: Images, is_json: bool) -> Result<String, CtlError> {
    match command {
        Images::Hibernate { send: Some(host), program, .. } => send::hibernate(target, &host, &program),
        Images::Hibernate { at_shutdown: true, .. } => shutdown::wait_and_save(target),
        Images::Hibernate { all: true, within, .. } => all::save(target, within),
        Images::Hibernate { program, .. } => hibernate(target, &program),
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
fn hibernate(target: &Target, program: &str) -> Result<String, CtlError> {
    block_on(async {
        let scheduler = target.connect().await?;
        let mut lines = String::new();
        for pid in pause::pids(&scheduler, program).await? {
            let image: String = password::call(&scheduler, "Hibernate", &(pid,)).await?;
            lines += &format!("Process {pid} is saved. Restore it with: nvsharectl restore {image}\n");
        }
        Ok(lines)
    })
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
            let Image { name, uid, program, saved, bytes, runs_as, damage, state, sent_to } = image;
            serde_json::json!({
                "name": name, "uid": uid, "program": program, "saved": saved, "bytes": bytes, "runs-as": runs_as,
                "damage": damage, "state": state, "sent-to": sent_to,
            })
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
        let images = [image("a-1-2", 0, ""), image("a-1-3", 7, ""), sent, unsigned];
        let expected = "\
IMAGE   UID   SIZE  STATE
a-1-2  1000  3 GiB  saved
a-1-3  1000  3 GiB  runs as process 7
a-1-4  1000  3 GiB  sent to gpu2
b-2-4  1000  3 GiB  unusable: this host has not signed it
";
        assert_eq!(present(&images), expected);
        assert_eq!(present(&[]), "No program is saved.\n");
    }
}
