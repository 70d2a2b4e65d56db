//! `nvsharectl preload`: the entry in `/etc/ld.so.preload` that loads `libnvshare.so` into every
//! program of the machine, and drop-ins that load the library into single services.
//!
//! - `entries`: the text of `/etc/ld.so.preload`, in bytes.
//! - `file`: `/etc/ld.so.preload` on disk.
//! - `library`: `libnvshare.so` as a file.
//! - `trial`: programs that are run with the library.
//! - `verify`: checks that the library can be loaded everywhere.
//! - `state`: the current state.
//! - `service`: single services.
//! - `drop_in`: the file that systemd reads.
//! - `program`: checks whether a program heeds `LD_PRELOAD`.
//!
//! A library that cannot be loaded prevents every program of the system from starting. Trial
//! programs therefore run first with a new file that only they see, and again after the file is
//! installed. If the second trials fail, the old file is restored. After a power failure between
//! the trials, the installed file has passed the first trials. `disable` starts no program. A
//! statically linked nvsharectl (`make build` creates one) can therefore disable preloading even if
//! other programs no longer start.

pub(super) mod drop_in;
pub mod entries;
mod file;
pub(super) mod library;
mod program;
pub mod service;
mod state;
mod trial;
mod verify;

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use file::FILE;
pub use service::Of;
use state::PreloadState;
use trial::{By, User};
use verify::Report;

use super::{CtlError, Target};

/// The output and the exit code.
#[derive(Debug)]
pub struct Output {
    pub text: String,
    pub exit_code: u8,
}

/// The exit code of `preload status` if the library is not preloaded.
const OFF: u8 = 4;

impl Output {
    fn done(text: String) -> Self {
        Self { text, exit_code: 0 }
    }
}

pub fn status(target: &Target, of: &Of, json: bool) -> Result<Output, CtlError> {
    if let Some(selected) = of.selected()? {
        return Ok(service::status(&selected, json));
    }
    let mut state = PreloadState::of(&file::read()?, state::scheduler_version(target));
    state.services = service::states(None);
    let text = if json { format!("{:#}\n", state.json()) } else { state.text() };
    Ok(Output { text, exit_code: if state.is_on() { 0 } else { OFF } })
}

pub fn verify(asked: Option<&Path>, json: bool) -> Result<Output, CtlError> {
    let library = library::find(asked)?;
    let alone = [library.as_os_str().as_bytes(), b"\n"].concat();
    // Verifies the library even if `enable` would refuse to change the file.
    let text = file::read().ok().and_then(|found| entries::with(found.text(), library.as_os_str().as_bytes()).ok());
    let report = verify::verify(&library, Some(&text.unwrap_or(alone)));
    let text = if json { format!("{:#}\n", report.json()) } else { report.text() };
    Ok(Output { text, exit_code: u8::from(!report.is_good()) })
}

pub fn enable(asked: Option<&Path>, of: &Of) -> Result<Output, CtlError> {
    if let Some(selected) = of.selected()? {
        return service::enable(&selected, asked);
    }
    only_root(FILE, "preload enable")?;
    let library = library::find(asked)?;
    library::check_name(&library).map_err(|why| CtlError::Failed(format!("{}: {why}", library.display())))?;
    let _lock = file::lock()?;
    let found = file::read()?;
    if found.is_hidden() {
        return Err(CtlError::Failed(format!(
            "{FILE} is not readable by all users, so the loader ignores it for some of them. Run chmod 644 {FILE}"
        )));
    }
    let text = entries::with(found.text(), library.as_os_str().as_bytes()).map_err(|refusal| {
        CtlError::Failed(match refusal {
            entries::Refusal::Nul => {
                format!("the loader stops reading {FILE} at a NUL byte. Remove that byte")
            }
            entries::Refusal::Comments => format!(
                "{FILE} has comments. If the file becomes longer, the loader reads some comments as library names. \
                 Remove the comments"
            ),
        })
    })?;
    let on_already = text == found.text();
    let report = verify::verify(&library, Some(&text));
    if !report.is_good() {
        let state = if on_already {
            format!("{FILE} still names the library. To stop preloading it, run `nvsharectl preload disable`")
        } else {
            format!("{FILE} is unchanged")
        };
        return Err(CtlError::Failed(format!("the library cannot be preloaded\n{}{state}.", report.text())));
    }
    if on_already {
        return Ok(Output::done(format!("Already on: {FILE} names {}.\n", library.display())));
    }
    put_in_force(found, &text, &library)?;
    Ok(Output::done(format!(
        "On: {FILE} names {}. All programs started from now on load it.\n{}",
        library.display(),
        notes(&report)
    )))
}

/// Replaces the file, and restores the old file if a trial fails.
fn put_in_force(found: file::Found, text: &[u8], library: &Path) -> Result<(), CtlError> {
    let replaced = found.replace(text)?;
    let trials = trial::all(By::File, library, &[User::Caller, User::Nobody]).unwrap_or_default();
    let Some((what, why)) = trials.into_iter().find_map(|trial| Some((trial.what, trial.result.err()?))) else {
        return Ok(());
    };
    replaced.undo()?;
    Err(CtlError::Failed(format!(
        "cannot preload the library: the trial run of {what} {why}. {FILE} has been restored."
    )))
}

fn notes(report: &Report) -> String {
    let mut notes = report.notes.clone();
    if Path::new("/lib/ld-linux.so.2").exists() {
        notes.push("32-bit programs cannot load the library, and each prints an error on stderr".into());
    }
    notes.iter().map(|note| format!("  note: {note}\n")).collect()
}

/// Disables preloading for every program of the machine. Starts no program and reads no library.
pub fn disable(of: &Of) -> Result<Output, CtlError> {
    if let Some(selected) = of.selected()? {
        return service::disable(&selected);
    }
    only_root(FILE, "preload disable")?;
    let _lock = file::lock()?;
    let found = file::read()?;
    let text = entries::without(found.text());
    if text == found.text() {
        return Ok(Output::done(format!("Already off: {FILE} does not name libnvshare.so.\n")));
    }
    drop(found.replace(&text)?);
    Ok(Output::done("Off: programs started from now on do not load libnvshare.so. Running programs keep it.\n".into()))
}

pub(super) fn only_root(what: &str, verb: &str) -> Result<(), CtlError> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(CtlError::Failed(format!("only root may change {what}. Run `sudo nvsharectl {verb}`")))
}
