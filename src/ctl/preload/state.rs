//! `nvsharectl preload status`: the state of the preload list, and problems with it.

use std::ffi::OsStr;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::file::{FILE, Found};
use super::{entries, library, service};
use crate::bus;
use crate::ctl::{CtlError, Target, block_on};

/// Timeout of the scheduler's answer.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub struct PreloadState {
    /// The entries of nvshare. More than one entry is a problem.
    pub ours: Vec<String>,
    pub others: Vec<String>,
    /// The version of the library in the first entry.
    pub version: Option<String>,
    /// The version of the running scheduler.
    pub scheduler: Option<String>,
    /// Problems, as sentences.
    pub problems: Vec<String>,
    /// Services that preload the library by a drop-in.
    pub services: Vec<service::UnitState>,
}

impl PreloadState {
    pub fn of(found: &Found, scheduler: Option<String>) -> Self {
        let mut state = Self { scheduler, ..Self::default() };
        let names = entries::names(found.text());
        let (ours, others): (Vec<&[u8]>, Vec<&[u8]>) = names.into_iter().partition(|name| entries::is_ours(name));
        let text = |names: &[&[u8]]| names.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        (state.ours, state.others) = (text(&ours), text(&others));
        let Some(first) = ours.first() else { return state };
        let path = Path::new(OsStr::from_bytes(first));
        let problems = &mut state.problems;
        if ours.len() > 1 {
            problems.push(format!("there are {} entries for libnvshare.so", ours.len()));
        }
        if found.is_hidden() {
            problems.push(format!("{FILE} is not readable by all users, so the loader ignores it for some of them"));
        }
        if !path.is_absolute() {
            problems.push("the path is not absolute, so each program may load another file".into());
            return state;
        }
        match library::version(path) {
            Ok(version) => {
                if state.scheduler.as_ref().is_some_and(|scheduler| *scheduler != version) {
                    problems.push("the library and the running scheduler have different versions".into());
                }
                state.version = Some(version);
            }
            Err(why) => problems.push(format!("{}: {why}", path.display())),
        }
        if path.exists() {
            let resolved = path.canonicalize().unwrap_or_else(|_| path.into());
            problems.extend(
                [library::check_name(path), library::check_owner(&resolved)].into_iter().filter_map(Result::err),
            );
        }
        state
    }

    pub fn is_on(&self) -> bool {
        !self.ours.is_empty()
    }

    pub fn text(&self) -> String {
        let mut text = match self.ours.first() {
            None => format!("off: {FILE} does not name libnvshare.so\n"),
            Some(path) => {
                let version = self.version.as_ref().map_or(String::new(), |version| format!(", version {version}"));
                format!("on: {path}{version}\n")
            }
        };
        let _ = match &self.scheduler {
            Some(version) => writeln!(text, "  the running scheduler is version {version}"),
            None => writeln!(text, "  no scheduler is running"),
        };
        if !self.others.is_empty() {
            let _ = writeln!(text, "  other libraries in {FILE}: {}", self.others.join(", "));
        }
        for problem in &self.problems {
            let _ = writeln!(text, "  problem: {problem}");
        }
        text.extend(self.services.iter().map(service::UnitState::text));
        text
    }

    pub fn json(&self) -> Value {
        json!({
            "on": self.is_on(),
            "file": FILE,
            "entries": self.ours,
            "others": self.others,
            "library-version": self.version,
            "scheduler-version": self.scheduler,
            "problems": self.problems,
            "services": self.services.iter().map(service::UnitState::json).collect::<Vec<_>>(),
        })
    }
}

/// Returns the version of the running scheduler. Does not activate a scheduler.
pub fn scheduler_version(target: &Target) -> Option<String> {
    let ask = async {
        let scheduler = target.connect().await?;
        let connection = scheduler.inner().connection();
        if connection.is_bus() {
            let bus = zbus::fdo::DBusProxy::new(connection).await?;
            if !bus.name_has_owner(bus::NAME.try_into()?).await? {
                return Ok(None);
            }
        }
        Ok::<_, CtlError>(Some(scheduler.version().await?))
    };
    let patient = async { tokio::time::timeout(PATIENCE, ask).await.unwrap_or(Ok(None)) };
    block_on(patient).ok().flatten()
}
