//! What is installed for systemd, as systemd itself judges it. Where a tool is missing there is nothing to ask.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use test_support::Directory;

fn installed(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd").join(name)
}

/// `None` where there is no such tool.
fn ask(command: &mut Command) -> Option<Output> {
    match command.stdin(Stdio::null()).output() {
        Ok(output) => Some(output),
        Err(e) => {
            eprintln!("not asked: {command:?}: {e}");
            None
        }
    }
}

#[test]
fn the_service_is_exposed_to_little() {
    let mut command = Command::new("systemd-analyze");
    // In tenths: 0.7.
    command.args(["security", "--offline=true", "--no-pager", "--threshold=7"]).arg(installed("nvshare.service"));
    let Some(output) = ask(&mut command) else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// The abstraction is included in a profile, and the parser knows all that is in it.
#[test]
fn apparmor_takes_the_abstraction() {
    let directory = Directory::new();
    let abstraction = Path::new(env!("CARGO_MANIFEST_DIR")).join("etc/apparmor-abstraction");
    let profile = directory.0.join("profile");
    let text = format!(
        "include <tunables/global>\nprofile program /usr/bin/program {{\n  include <abstractions/base>\n  include \"{}\"\n}}\n",
        abstraction.display()
    );
    std::fs::write(&profile, text).expect("a file");
    let mut command = Command::new("apparmor_parser");
    // Compiled, and not loaded into the kernel.
    command.args(["--skip-kernel-load", "--skip-cache"]).arg(&profile);
    let Some(output) = ask(&mut command) else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_journal_takes_the_catalog() {
    let directory = Directory::new();
    let place = directory.0.join("usr/lib/systemd/catalog");
    std::fs::create_dir_all(&place).expect("a directory");
    std::fs::create_dir_all(directory.0.join("var/lib/systemd/catalog")).expect("a directory");
    std::fs::copy(installed("nvshare.catalog"), place.join("nvshare.catalog")).expect("a copy");
    let mut command = Command::new("journalctl");
    command.arg("--update-catalog").arg("--root").arg(&directory.0);
    let Some(output) = ask(&mut command) else { return };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "{said}");
    assert!(directory.0.join("var/lib/systemd/catalog/database").exists());
}

/// The directories of sockets belong to tmpfiles.d: one that the service owned would go with it, and strand whoever has
/// mounted it.
#[test]
fn sockets_are_in_directories_that_outlive_the_service() {
    let read = |name: &str| std::fs::read_to_string(installed(name)).expect("a file");
    let made = read("nvshare.tmpfiles");
    for socket in ["nvshare.socket", "nvshare-control.socket", "nvshare-metrics.socket"] {
        let text = read(socket);
        let path = text.lines().find_map(|line| line.strip_prefix("Listen")?.split_once('=')).expect("a socket").1;
        let directory = Path::new(path).parent().expect("a directory").display().to_string();
        assert!(made.lines().any(|line| line.starts_with(&format!("d {directory} "))), "{directory}");
    }
    assert!(!read("nvshare.service").contains("RuntimeDirectory="));
}
