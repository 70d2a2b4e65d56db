//! Checks the files that are installed for systemd, with systemd's own tools. A check is skipped if
//! its tool is missing.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use test_support::Directory;

fn installed(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd").join(name)
}

/// Returns `None` if the tool is missing.
fn ask(command: &mut Command) -> Option<Output> {
    match command.stdin(Stdio::null()).output() {
        Ok(output) => Some(output),
        Err(e) => {
            test_support::skip(format_args!("{command:?}: {e}"));
            None
        }
    }
}

#[test]
fn systemd_analyze_rates_the_services_as_secure() {
    // The thresholds are in tenths: 0.7, and 1.5 for the service with capabilities.
    for (unit, threshold) in [("nvshare.service", 7), ("nvshare-checkpoint@.service", 15)] {
        let mut command = Command::new("systemd-analyze");
        command.args(["security", "--offline=true", "--no-pager", &format!("--threshold={threshold}")]);
        let Some(output) = ask(command.arg(installed(unit))) else { return };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
}

/// A process that may connect to the helper has power over all processes.
#[test]
fn the_checkpoint_helper_is_started_for_the_scheduler_alone() {
    let read = |name: &str| std::fs::read_to_string(installed(name)).expect("a file");
    let (socket, service, scheduler) =
        (read("nvshare-checkpoint.socket"), read("nvshare-checkpoint@.service"), read("nvshare.service"));
    let value = |unit: &str, key: &str| {
        let values: Vec<_> = unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect();
        values.join(" ")
    };
    let user = value(&scheduler, "User");
    assert_eq!((value(&socket, "SocketUser"), value(&socket, "SocketMode")), (user.clone(), "0600".to_owned()));
    assert_eq!(value(&service, "User"), user, "it takes requests from its own user");
    // Neither capability suffices alone [H100, driver 580.159]. `src/checkpoint/tests/helper.rs`
    // tries each capability on the simulated GPU.
    for key in ["CapabilityBoundingSet", "AmbientCapabilities"] {
        assert_eq!(value(&service, key), "CAP_SYS_PTRACE CAP_DAC_OVERRIDE");
    }
    let state = format!("-/var/lib/{}", value(&scheduler, "StateDirectory"));
    assert!(value(&service, "InaccessiblePaths").split(' ').any(|path| path == state), "{state}");
    assert_eq!(value(&socket, "ListenSequentialPacket"), nvshare::daemon::checkpoint::SOCKET);
    let directory = Path::new(nvshare::daemon::checkpoint::SOCKET).parent().expect("a directory").display().to_string();
    let made = format!("d {directory} 0700 {user} {user} -");
    assert!(read("nvshare.tmpfiles").lines().any(|line| line == made), "{made}");
    assert!(value(&read("nvshare.socket"), "Wants").split(' ').any(|unit| unit == "nvshare-checkpoint.socket"));
}

/// Any user may cause connections to the hibernation helper, and runs programs that it has restored.
#[test]
fn the_hibernation_helper_is_limited_in_time_and_privileges_but_not_in_starts() {
    let read = |name: &str| std::fs::read_to_string(installed(name)).expect("a file");
    let (socket, service) = (read("nvshare-hibernate.socket"), read("nvshare-hibernate@.service"));
    let has = |unit: &str, line: &str| unit.lines().any(|found| found == line);
    for line in ["SocketUser=nvshare", "SocketMode=0600", "MaxConnections=64", "TriggerLimitIntervalSec=0"] {
        assert!(has(&socket, line), "{line}");
    }
    // 20 minutes are longer than the time for CRIU, and shorter than the scheduler waits.
    for line in ["NoNewPrivileges=yes", "RuntimeMaxSec=20min", "Restart=no", "StateDirectoryMode=0700"] {
        assert!(has(&service, line), "{line}");
    }
}

/// Checks that systemd accepts every unit. Replaces the units' commands with `/bin/true`, because
/// the programs need not be installed.
#[test]
fn systemd_accepts_the_units() {
    let directory = Directory::new();
    for unit in std::fs::read_dir(installed("")).expect("a directory").map(|entry| entry.expect("an entry").path()) {
        let name = unit.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
        let is_unit = [".service", ".socket", ".path"].iter().any(|kind| name.ends_with(kind));
        if is_unit {
            let text = std::fs::read_to_string(&unit).expect("a file");
            let command = |line: &str| line.starts_with("ExecStart") || line.starts_with("ExecReload=");
            let lines = text.lines().map(|line| match line.split_once('=') {
                Some((key, _)) if command(line) => format!("{key}=/bin/true\n"),
                _ => format!("{line}\n"),
            });
            std::fs::write(directory.0.join(name), lines.collect::<String>()).expect("a file");
        }
    }
    let helpers = ["nvshare-checkpoint", "nvshare-hibernate"];
    let helpers = helpers.iter().flat_map(|name| [format!("{name}.socket"), format!("{name}@x.service")]);
    let own = ["nvshare.socket", "nvshare.service", "nvshare-boot.service"].map(str::to_owned);
    for unit in own.into_iter().chain(helpers) {
        let mut command = Command::new("systemd-analyze");
        command.args(["verify", "--man=no", "--recursive-errors=no"]).arg(directory.0.join(&unit));
        command.env("SYSTEMD_UNIT_PATH", format!("{}:", directory.0.display()));
        let Some(output) = ask(&mut command) else { return };
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !said.contains(&*directory.0.to_string_lossy()), "{unit}: {said}");
    }
}

/// Checks that a profile can include the abstraction, and that the parser accepts the result.
#[test]
fn apparmor_accepts_the_abstraction() {
    let directory = Directory::new();
    let abstraction = Path::new(env!("CARGO_MANIFEST_DIR")).join("etc/apparmor-abstraction");
    let profile = directory.0.join("profile");
    let text = format!(
        "include <tunables/global>\nprofile program /usr/bin/program {{\n  include <abstractions/base>\n  include \"{}\"\n}}\n",
        abstraction.display()
    );
    std::fs::write(&profile, text).expect("a file");
    let mut command = Command::new("apparmor_parser");
    // Compiles the profile without loading it into the kernel.
    command.args(["--skip-kernel-load", "--skip-cache"]).arg(&profile);
    let Some(output) = ask(&mut command) else { return };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn journalctl_accepts_the_catalog() {
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

/// tmpfiles.d creates the sockets' directories. A directory that belonged to the service would
/// disappear with the service, and containers that have mounted the directory would keep a dead
/// mount.
#[test]
fn sockets_are_in_directories_that_outlive_the_service() {
    let read = |name: &str| std::fs::read_to_string(installed(name)).expect("a file");
    let made = read("nvshare.tmpfiles");
    let names = ["", "-control", "-metrics", "-checkpoint", "-hibernate"];
    let sockets = names.map(|name| format!("nvshare{name}.socket"));
    for socket in sockets {
        let text = read(&socket);
        let path = text.lines().find_map(|line| line.strip_prefix("Listen")?.split_once('=')).expect("a socket").1;
        let directory = Path::new(path).parent().expect("a directory").display().to_string();
        assert!(made.lines().any(|line| line.starts_with(&format!("d {directory} "))), "{directory}");
    }
    assert!(!read("nvshare.service").contains("RuntimeDirectory="));
}

/// The user must exist before the bus reads its policy. systemd-sysusers runs too late for that.
#[test]
fn preinst_creates_the_user_of_sysusers_d() {
    let sysusers = include_str!("../../systemd/nvshare.sysusers");
    let line = sysusers.lines().find(|line| line.starts_with("u ")).expect("a user");
    let preinst = include_str!("../../debian/nvshare.preinst");
    assert!(preinst.contains(&format!("echo '{line}'")), "{line} is not in debian/nvshare.preinst");
}
