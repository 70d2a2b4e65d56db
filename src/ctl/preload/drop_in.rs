//! The drop-in that makes systemd start a service with the library. For the system's manager, its
//! path is `/etc/systemd/system/UNIT.d/zz-nvshare-preload.conf`. For a user's manager, the same
//! file is below `~/.config/systemd/user`. The last `Environment=` of a variable takes effect, so
//! the drop-in's name sorts after the name of `systemctl edit`'s drop-in.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::entries;

pub const VARIABLE: &str = "LD_PRELOAD";

const UNITS: &str = "/etc/systemd/system";
const FILE: &str = "zz-nvshare-preload.conf";
/// systemd's limit of unit names, in bytes. Names must be shorter.
const NAME_MAX: usize = 255;

/// The service manager of a unit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Manager {
    #[default]
    System,
    /// The manager of the calling user.
    User,
}

impl Manager {
    fn units(self) -> PathBuf {
        if self == Self::System {
            return UNITS.into();
        }
        let set = |name| std::env::var_os(name).filter(|value| Path::new(value).is_absolute()).map(PathBuf::from);
        let home = || set("HOME").unwrap_or_else(|| "/".into()).join(".config");
        set("XDG_CONFIG_HOME").unwrap_or_else(home).join("systemd/user")
    }

    /// Returns the path of a unit's drop-in, which need not exist.
    pub fn path(self, unit: &str) -> PathBuf {
        self.units().join(format!("{unit}.d")).join(FILE)
    }

    /// The `systemctl` command for this manager.
    pub fn systemctl(self) -> &'static str {
        match self {
            Self::System => "systemctl",
            Self::User => "systemctl --user",
        }
    }
}

/// Lists the units with a drop-in, sorted.
pub fn units() -> Vec<String> {
    let directories = Path::new(UNITS).read_dir().into_iter().flatten().flatten();
    let unit = |name: &OsStr| Some(name.to_str()?.strip_suffix(".d")?.to_owned());
    let mut units: Vec<String> = directories.filter_map(|directory| unit(&directory.file_name())).collect();
    units.retain(|unit| Manager::System.path(unit).is_file());
    units.sort();
    units
}

/// Returns the full name of a unit. The default suffix is `.service`.
///
/// # Errors
/// The name is not a valid unit name.
pub fn unit_name(asked: &str) -> Result<String, String> {
    let name = if asked.contains('.') { asked.to_owned() } else { format!("{asked}.service") };
    let allowed = |c: char| c.is_ascii_alphanumeric() || ":-_.\\@".contains(c);
    let is_name = name.len() <= NAME_MAX && name.chars().all(allowed) && !name.starts_with(['.', '@']);
    is_name.then_some(name).ok_or_else(|| format!("{asked:?} is not a valid unit name"))
}

/// Returns the preload list `before` with the library in front, and without other copies of
/// `libnvshare.so`.
pub fn preload_list(before: &str, library: &str) -> String {
    let others =
        before.split([' ', '\t', '\n', ':']).filter(|name| !name.is_empty() && !entries::is_ours(name.as_bytes()));
    std::iter::once(library).chain(others).collect::<Vec<_>>().join(":")
}

/// Returns the first name in an `LD_PRELOAD` list that is a `libnvshare.so`.
pub fn ours(list: &str) -> Option<&str> {
    list.split([' ', '\t', '\n', ':']).find(|name| entries::is_ours(name.as_bytes()))
}

/// Returns the last value of `LD_PRELOAD` in a list of assignments.
pub fn assigned(environment: &[String]) -> &str {
    let mut values = environment.iter().filter_map(|pair| pair.strip_prefix(VARIABLE)?.strip_prefix('='));
    values.next_back().unwrap_or_default()
}

/// Returns the text of the drop-in. `undo` is the nvsharectl command that removes the drop-in.
pub fn text(undo: &str, list: &str) -> String {
    // systemd interprets `%` and `\`, and a `"` would end the quoted word.
    let quoted = list.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%");
    format!(
        "{}\n\
         [Service]\nEnvironment=\"{VARIABLE}={quoted}\"\n",
        first_line(undo)
    )
}

fn first_line(undo: &str) -> String {
    format!("# Written by nvsharectl(1); `nvsharectl {undo}` removes it.")
}

/// Returns true if the drop-in's text names `undo` as the command that removes the drop-in.
pub fn is_removed_by(text: &str, undo: &str) -> bool {
    text.lines().next() == Some(first_line(undo).as_str())
}

/// Returns the text of a unit's drop-in, or `None` if the unit has no drop-in.
pub fn read(manager: Manager, unit: &str) -> io::Result<Option<String>> {
    match std::fs::read_to_string(manager.path(unit)) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        text => Ok(Some(text?)),
    }
}

/// Writes a unit's drop-in atomically, and returns the text of the earlier drop-in, if any.
pub fn write(manager: Manager, unit: &str, text: &str) -> io::Result<Option<String>> {
    let path = manager.path(unit);
    let directory = path.parent().unwrap_or(Path::new(UNITS));
    let before = read(manager, unit)?;
    std::fs::create_dir_all(directory)?;
    // systemd ignores names that do not end in `.conf`, so it ignores the temporary file.
    let mut file = tempfile::Builder::new().prefix(".nvshare-").suffix(".new").tempfile_in(directory)?;
    file.write_all(text.as_bytes())?;
    file.as_file().set_permissions(PermissionsExt::from_mode(0o644))?;
    file.as_file().sync_all()?;
    file.persist(&path)?;
    Ok(before)
}

/// Removes a unit's drop-in, and the drop-in's directory if it is then empty. Returns false if the
/// unit had no drop-in.
pub fn remove(manager: Manager, unit: &str) -> io::Result<bool> {
    let path = manager.path(unit);
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        removed => removed?,
    }
    let _ = path.parent().map(std::fs::remove_dir);
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_preloaded_libraries_are_kept() {
        for (before, list) in [
            ("", "/l/libnvshare.so"),
            ("/usr/lib/a.so", "/l/libnvshare.so:/usr/lib/a.so"),
            ("a.so  b.so:/old/libnvshare.so", "/l/libnvshare.so:a.so:b.so"),
        ] {
            assert_eq!(preload_list(before, "/l/libnvshare.so"), list, "{before:?}");
            assert_eq!(preload_list(list, "/l/libnvshare.so"), list, "twice is once");
        }
    }

    #[test]
    fn the_last_assignment_takes_effect() {
        let environment = ["A=1", "LD_PRELOAD=a.so", "LD_PRELOADED=x", "LD_PRELOAD=b.so"].map(str::to_owned);
        assert_eq!(assigned(&environment), "b.so");
        assert_eq!(assigned(&environment[..1]), "");
    }

    #[test]
    fn the_value_is_quoted_for_systemd() {
        let text = text("preload disable --unit x.service", "/a%b/libnvshare.so:\"c\\d\".so");
        assert!(text.ends_with("Environment=\"LD_PRELOAD=/a%%b/libnvshare.so:\\\"c\\\\d\\\".so\"\n"), "{text}");
        assert!(is_removed_by(&text, "preload disable --unit x.service") && !is_removed_by(&text, "release x.service"));
    }

    #[test]
    fn unit_names_cannot_be_paths() {
        assert_eq!(unit_name("jupyter").as_deref(), Ok("jupyter.service"));
        assert_eq!(unit_name("batch.slice").as_deref(), Ok("batch.slice"));
        assert_eq!(unit_name("user@1000.service").as_deref(), Ok("user@1000.service"));
        for bad in ["", "../x.service", "a/b.service", "a b.service", ".service", "@.service", &"x".repeat(300)] {
            assert!(unit_name(bad).is_err(), "{bad:?}");
        }
    }
}
