//! `nvsharectl timeline`: the holders, waiting clients and moved memory of each GPU over time, as
//! text, a picture or JSON.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read as _, Seek};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::status::Style;
use super::{CtlError, Target, block_on, debug};
use crate::recorder::bundle::{self, Bundle};
use crate::recorder::replay;
use crate::timeline::{Timeline, from_recording, json, svg, text};

/// The source of a timeline.
#[derive(Debug)]
pub enum Source {
    /// The flight recorder of the running scheduler.
    Scheduler(Target),
    Bundle(PathBuf),
}

/// The output format of a timeline.
#[derive(Debug)]
pub enum Form {
    /// Text for the terminal.
    Text,
    /// The scheduler's own JSON, as D-Bus transmits it.
    Json,
    /// A picture in a file. The path `-` stands for standard output.
    Svg(PathBuf),
}

/// A timeline, and the known names of GPUs.
struct Read {
    timeline: Timeline,
    names: BTreeMap<String, String>,
}

/// Draws the timeline, and returns the text to print.
pub fn timeline(source: &Source, gpu: Option<&str>, since: Option<Duration>, form: &Form) -> Result<String, CtlError> {
    let Read { mut timeline, names } = match source {
        Source::Scheduler(target) => ask(target)?,
        Source::Bundle(path) => read_bundle(open(path)?, &path.display().to_string())?,
    };
    if let Some(gpu) = gpu {
        let uuid = names.iter().find(|(_, name)| name.split(' ').nth(1) == Some(gpu)).map(|(uuid, _)| uuid.clone());
        if !timeline.keep_gpu(uuid.as_deref().unwrap_or(gpu)) {
            return Err(CtlError::Failed(format!("no program used a GPU {gpu:?}. Name the GPU by its number or UUID")));
        }
    }
    timeline.cut_blank_beginning();
    if let Some(since) = since {
        timeline.keep_last(since);
    }
    let named = |uuid: &str| names.get(uuid).cloned().unwrap_or_else(|| format!("GPU-{uuid}"));
    let output = match form {
        Form::Text => return Ok(text::draw(&timeline, named, paint())),
        Form::Json => {
            let mut text = json::write(&timeline, &names).map_err(CtlError::Failed)?;
            text.push(b'\n');
            return Ok(String::from_utf8_lossy(&text).into_owned());
        }
        Form::Svg(output) => output,
    };
    let picture = svg::draw(&timeline, "Lock holders, waits and moved memory", named);
    if output == Path::new("-") {
        return Ok(picture);
    }
    write(output, &picture)?;
    Ok(String::new())
}

/// Returns the width and colours of standard output. Without a terminal, lines are 100 characters
/// long.
fn paint() -> text::Paint {
    let Style { colour, width } = Style::of_stdout();
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default().to_uppercase();
    let unicode = locale.contains("UTF-8") || locale.contains("UTF8");
    text::Paint { width: width.unwrap_or(100), colour, unicode }
}

/// Writes a picture to a file.
///
/// # Errors
/// The file cannot be written.
pub fn write(output: &Path, picture: &str) -> Result<(), CtlError> {
    std::fs::write(output, picture)
        .map_err(|e| CtlError::Failed(format!("cannot write {}: {e} (name another file)", output.display())))
}

/// Queries the part of the recording that the caller may see.
fn ask(target: &Target) -> Result<Read, CtlError> {
    let created = block_on(async {
        match target.connect().await?.create_timeline().await {
            // An older scheduler supports only debug bundles, which show the activity of all users.
            Err(zbus::Error::MethodError(name, ..)) if name == "org.freedesktop.DBus.Error.UnknownMethod" => Ok(None),
            created => Ok(Some(OwnedFd::from(created?))),
        }
    })?;
    let cannot = |e: &dyn std::fmt::Display| CtlError::Failed(format!("cannot read the scheduler's recording: {e}"));
    let is_timeline = created.is_some();
    let mut file = File::from(match created {
        Some(file) => file,
        None => debug::create(target, false)?,
    });
    file.rewind().map_err(|e| cannot(&e))?;
    if !is_timeline {
        return read_bundle(file, "the scheduler's recording");
    }
    let mut text = Vec::new();
    file.read_to_end(&mut text).map_err(|e| cannot(&e))?;
    let (timeline, names) = json::read(&text).map_err(|e| cannot(&e))?;
    Ok(Read { timeline, names })
}

fn open(path: &Path) -> Result<File, CtlError> {
    File::open(path).map_err(|e| CtlError::Failed(format!("cannot open {}: {e}", path.display())))
}

fn read_bundle(file: File, shown: &str) -> Result<Read, CtlError> {
    let failed = |e: bundle::ReadError| CtlError::Failed(format!("{shown}, {e}"));
    let Bundle { header, status, checkpoint, mut entries } = bundle::read(BufReader::new(file)).map_err(failed)?;
    let replay = replay::replay(checkpoint, &mut entries).map_err(failed)?;
    let labels = entries.clients.iter().map(|(client, process)| (*client, process.label())).collect();
    Ok(Read { timeline: from_recording(&replay, &labels, &header), names: gpus(&status) })
}

/// Returns titles such as `GPU 0 NVIDIA H200`, by the UUID without its prefix.
fn gpus(status: &Value) -> BTreeMap<String, String> {
    let text = |gpu: &Value| {
        let uuid = gpu["uuid"].as_str()?.split_once('-')?.1.to_owned();
        let number = gpu["index"].as_u64().map_or_else(|| format!("GPU-{uuid}"), |number| format!("GPU {number}"));
        Some((uuid, format!("{number}  {}", gpu["name"].as_str().unwrap_or_default())))
    };
    status["gpus"].as_array().into_iter().flatten().filter_map(text).collect()
}
