//! `nvsharectl run`: runs one command with the library preloaded. The command replaces this process
//! by `exec`, so the caller sees the command's own exit code and signals.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nvshare_wire::env_limits::LimitName;

use super::place::{self, GpuRequest};
use super::{CtlError, Target, run_progress};
use crate::config::rules::{EnvLimits, variable};

const LIBRARY: &str = "libnvshare.so";
const PRELOAD: &str = "LD_PRELOAD";

/// Executes the command. Returns only if the execution fails.
pub fn run(target: &Target, library: Option<&Path>, request: GpuRequest, command: &[OsString]) -> CtlError {
    let Some((program, arguments)) = command.split_first() else {
        return CtlError::Failed("the command is missing".into());
    };
    // An invalid limit is an error, so that a typo does not remove the limit.
    if let Some(mistake) = env_limits().mistake() {
        return CtlError::Failed(mistake);
    }
    let library = match find(library) {
        Ok(library) => library,
        Err(e) => return e,
    };
    let preload = preload(std::env::var_os(PRELOAD).as_deref(), &library);
    let mut starting = Command::new(program);
    starting.args(arguments).env(PRELOAD, preload);
    match place::ask(request) {
        Ok(Some(gpus)) => drop(starting.env("CUDA_VISIBLE_DEVICES", gpus)),
        Ok(None) => {}
        Err(e) => return e,
    }
    run_progress::begin(target);
    let error = starting.exec();
    CtlError::CannotRun { command: program.to_string_lossy().into_owned(), error }
}

/// The limits that the environment sets.
fn env_limits() -> EnvLimits {
    let mut limits = EnvLimits::default();
    for limit in LimitName::ALL {
        if let Some(value) = std::env::var_os(variable(limit)).filter(|value| !value.is_empty()) {
            limits.set(limit, &value.to_string_lossy());
        }
    }
    limits
}

/// Returns the requested library. Without a request, returns the library beside this program. If
/// there is none, returns a name that the loader searches for.
fn find(asked: Option<&Path>) -> Result<PathBuf, CtlError> {
    if let Some(path) = asked {
        let whole = std::path::absolute(path).unwrap_or_else(|_| path.into());
        if !whole.is_file() {
            return Err(CtlError::Failed(format!("there is no library {}", path.display())));
        }
        // The loader splits its list at blanks and colons, and supports no quoting.
        if whole.as_os_str().as_bytes().iter().any(|b| b.is_ascii_whitespace() || *b == b':') {
            let path = whole.display();
            return Err(CtlError::Failed(format!(
                "the path {path} contains a space or a colon, which the loader cannot read. Move the library elsewhere"
            )));
        }
        return Ok(whole);
    }
    let beside = std::env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_owned));
    let places = beside.iter().flat_map(|bin| [bin.join(LIBRARY), bin.join("../lib").join(LIBRARY)]);
    let mut found = places.filter_map(|path| path.canonicalize().ok()).filter_map(|path| find(Some(&path)).ok());
    Ok(found.next().unwrap_or_else(|| LIBRARY.into()))
}

/// Returns a value of `LD_PRELOAD` that names the library once, in the first position.
fn preload(before: Option<&OsStr>, library: &Path) -> OsString {
    let before = before.filter(|list| !list.is_empty());
    let Some(list) = before else { return library.into() };
    let separator = |b: &u8| b.is_ascii_whitespace() || *b == b':';
    let mut entries = list.as_bytes().split(separator);
    if entries.any(|entry| Path::new(OsStr::from_bytes(entry)).file_name() == Some(OsStr::new(LIBRARY))) {
        return list.into();
    }
    let mut joined = library.as_os_str().to_owned();
    joined.push(":");
    joined.push(list);
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_preloaded_libraries_are_kept() {
        let cases = [
            (None, "/lib/libnvshare.so"),
            (Some(""), "/lib/libnvshare.so"),
            (Some("libjemalloc.so:/x/y.so"), "/lib/libnvshare.so:libjemalloc.so:/x/y.so"),
            (Some("a.so libnvshare.so"), "a.so libnvshare.so"),
            (Some("/other/libnvshare.so:b.so"), "/other/libnvshare.so:b.so"),
        ];
        for (before, expected) in cases {
            assert_eq!(preload(before.map(OsStr::new), Path::new("/lib/libnvshare.so")), OsString::from(expected));
        }
    }
}
