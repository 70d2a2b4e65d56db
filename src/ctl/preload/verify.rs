//! `nvsharectl preload verify`: checks that all programs, both of root and of other users, can load
//! the library.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::trial::{self, By, Trial, User};
use super::{entries, library};

/// The trials and their results.
#[derive(Debug)]
pub struct Report {
    pub library: PathBuf,
    pub version: Option<String>,
    pub checks: Vec<Trial>,
    /// Checks that could not be made, with the reasons, and programs that no check covers.
    pub notes: Vec<String>,
}

/// AddressSanitizer's runtime aborts if another library is loaded before it.
const ADDRESS_SANITIZER: &str = "a program built with gcc -fsanitize=address aborts if a library is preloaded (\"ASan \
    runtime does not come first\"). Set ASAN_OPTIONS=verify_asan_link_order=0 for it, link it with -static-libasan, \
    or preload for single programs only, with nvsharectl run or LD_PRELOAD";

/// The packages of Nix. Their C library is built with another path.
const NIX_STORE: &str = "/nix/store";
const NIX: &str = "programs from /nix/store read /etc/ld-nix.so.preload instead of /etc/ld.so.preload, so they do not \
    load the library. Start them with nvsharectl run, or name the library in /etc/ld-nix.so.preload";

/// A note about programs that do not read `/etc/ld.so.preload`, if this host has such programs.
fn nix_note(store: &Path) -> Option<String> {
    store.is_dir().then(|| NIX.into())
}

/// Checks the file, and then runs programs with the library. `rehearse` is the future text of
/// `/etc/ld.so.preload`. Without `rehearse`, the programs load the library through `LD_PRELOAD`.
pub fn verify(path: &Path, rehearse: Option<&[u8]>) -> Report {
    let version = library::version(path);
    let check = |what: &str, result| Trial { what: what.into(), result };
    let checks = vec![
        check("a libnvshare.so for this machine", version.clone().map(drop)),
        check("a path that the loader can read in its list", library::check_name(path)),
        check("readable by all users, and only root can change it or a directory above it", library::check_owner(path)),
    ];
    let mut report = Report { library: path.into(), version: version.ok(), checks, notes: Vec::new() };
    let root = rustix::process::geteuid().is_root();
    // As root, programs load only a file that is a libnvshare.so and that no other user can change.
    let fit = if root { report.is_good() } else { report.version.is_some() && report.checks[1].result.is_ok() };
    if !fit {
        report.notes.push("no program was run with the library".into());
        return report;
    }
    let users: &[User] = if root { &[User::Caller, User::Nobody] } else { &[User::Caller] };
    let environment = |report: &mut Report, why: String| {
        report.notes.push(why);
        trial::all(By::Environment(path), path, users).unwrap_or_default()
    };
    let trials = match rehearse {
        Some(text) if root => trial::all(By::Rehearsal(text), path, users)
            .unwrap_or_else(|why| environment(&mut report, format!("setuid programs were not tested: {why}"))),
        _ if root => trial::all(By::Environment(path), path, users).unwrap_or_default(),
        _ => environment(
            &mut report,
            "tested only as the current user. When run by root, this command also tests as root, as nobody and with \
             setuid programs"
                .into(),
        ),
    };
    report.checks.extend(trials);
    if report.is_good() {
        report.notes.push(ADDRESS_SANITIZER.into());
        report.notes.extend(nix_note(Path::new(NIX_STORE)));
    }
    if !report.is_good() && rehearse.is_some_and(others_are_bad) {
        report.notes.push(
            "another library in /etc/ld.so.preload already makes programs fail. Repair or remove it first".into(),
        );
    }
    report
}

/// Returns true if programs fail even with the other entries alone.
fn others_are_bad(rehearse: &[u8]) -> bool {
    let others = entries::without(rehearse);
    let trials = trial::all(By::Rehearsal(&others), Path::new(""), &[User::Caller]).unwrap_or_default();
    trials.first().is_some_and(|trial| trial.result.is_err())
}

impl Report {
    pub fn is_good(&self) -> bool {
        self.checks.iter().all(|check| check.result.is_ok())
    }

    pub fn text(&self) -> String {
        let version = self.version.as_ref().map_or(String::new(), |version| format!(", version {version}"));
        let mut text = format!("{}{version}\n", self.library.display());
        for check in &self.checks {
            let _ = match &check.result {
                Ok(()) => writeln!(text, "  right  {}", check.what),
                Err(why) => writeln!(text, "  WRONG  {}: {why}", check.what),
            };
        }
        for note in &self.notes {
            let _ = writeln!(text, "  note: {note}");
        }
        text
    }

    pub fn json(&self) -> Value {
        let check = |check: &Trial| json!({ "what": check.what, "right": check.result.is_ok(), "why": check.result.as_ref().err() });
        json!({
            "library": self.library.to_string_lossy(),
            "version": self.version,
            "right": self.is_good(),
            "checks": self.checks.iter().map(check).collect::<Vec<_>>(),
            "notes": self.notes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_with_packages_of_nix_gets_a_note() {
        let store = tempfile::tempdir().expect("a directory");
        assert!(nix_note(store.path()).is_some_and(|note| note.contains("/etc/ld-nix.so.preload")));
        assert_eq!(nix_note(&store.path().join("none")), None);
    }
}
