//! `nvsharectl run`: runs one command with the library preloaded. The command replaces this process
//! by `exec`, so the caller sees the command's own exit code and signals. With `--portable`, the command
//! runs in the background.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nvshare_wire::env_limits::LimitName;

use super::place::{self, GpuRequest};
use super::{CtlError, Target, run_progress};
use crate::config::rules::{EnvLimits, variable};

const LIBRARY: &str = "libnvshare.so";
const PRELOAD: &str = "LD_PRELOAD";

/// Executes the command in place of this process, or starts it in the background if `portable` names a
/// file for its output. Returns a line about the started command.
///
/// # Errors
/// The command cannot be executed.
pub fn run(
    target: &Target,
    library: Option<&Path>,
    request: GpuRequest,
    portable: Option<&Path>,
    command: &[OsString],
) -> Result<String, CtlError> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(CtlError::Failed("the command is missing".into()));
    };
    // An invalid limit is an error, so that a typo does not remove the limit.
    if let Some(mistake) = env_limits().mistake() {
        return Err(CtlError::Failed(mistake));
    }
    let library = find(library)?;
    let preload = preload(std::env::var_os(PRELOAD).as_deref(), &library);
    let mut starting = Command::new(program);
    starting.args(arguments).env(PRELOAD, preload);
    if let Some(gpus) = place::ask(request)? {
        starting.env("CUDA_VISIBLE_DEVICES", gpus);
    }
    let cannot = |error| CtlError::CannotRun { command: program.to_string_lossy().into_owned(), error };
    if let Some(log) = portable {
        let pid = detach(&mut starting, log)?.spawn().map_err(cannot)?.id();
        return Ok(format!("{} runs as process {pid}, with its output in {}.\n", program.display(), log.display()));
    }
    run_progress::begin(target);
    Err(cannot(starting.exec()))
}

/// Gives a command nothing that cannot be saved to disk: no terminal, no session or process group of other
/// programs, and no open files but the log.
fn detach<'a>(command: &'a mut Command, log: &Path) -> Result<&'a mut Command, CtlError> {
    let open = || {
        let log = File::options().create(true).append(true).mode(0o600).open(log)?;
        Ok((log.try_clone()?, log))
    };
    let (output, errors) =
        open().map_err(|e: io::Error| CtlError::Failed(format!("cannot open {}: {e}", log.display())))?;
    command.stdin(Stdio::null()).stdout(output).stderr(errors);
    // SAFETY: the closure only makes system calls.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            // The pipe on which the parent waits for the result of `exec` is close-on-exec, too.
            match libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as i32) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        });
    }
    Ok(command)
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
