//! Settings that are changed at run time outrank the configuration file and outlive the daemon.

mod daemon_support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use daemon_support::*;

/// A daemon with a directory for its state, and a configuration file that says 20 s.
fn start(directory: Directory) -> Daemon {
    let (state, file) = (state(&directory.0), directory.0.join("nvshare.toml"));
    fs::create_dir_all(&state).expect("the state directory");
    fs::write(&file, "time-quantum = \"20s\"\n").expect("the file");
    Daemon::start_in(directory, None, |command, _| {
        command.arg("--config").arg(&file).env("STATE_DIRECTORY", &state);
    })
}

fn state(directory: &Path) -> PathBuf {
    directory.join("state")
}

fn get(daemon: &Daemon) -> String {
    daemon.ctl(&["get"]).stdout
}

#[track_caller]
fn ctl(daemon: &Daemon, arguments: &[&str]) {
    let output = daemon.ctl(arguments);
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""), "{arguments:?}");
}

#[test]
fn a_change_outlives_a_daemon_that_is_killed_the_moment_it_has_said_yes() {
    let daemon = start(Directory::new());
    assert_eq!(get(&daemon), "time-quantum = \"20s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\n");
    ctl(&daemon, &["set", "anti-thrash", "on"]);
    let directory = daemon.kill();
    let daemon = start(directory);
    assert_eq!(get(&daemon), "time-quantum = \"20s\"\nmax-wait = \"60s\"\nanti-thrash = \"on\"\n");
    ctl(&daemon, &["set", "time-quantum", "45"]);
    let daemon = start(daemon.kill());
    assert_eq!(get(&daemon), "time-quantum = \"45s\"\nmax-wait = \"60s\"\nanti-thrash = \"on\"\n");
    daemon.log.wait("outrank the configuration file");
    // The file is read again, and what was changed stays.
    ctl(&daemon, &["reload"]);
    assert_eq!(get(&daemon), "time-quantum = \"45s\"\nmax-wait = \"60s\"\nanti-thrash = \"on\"\n");
    let text = fs::read_to_string(daemon.directory.0.join("nvshare.toml")).expect("the file");
    assert_eq!(text, "time-quantum = \"20s\"\n", "nobody writes to it");
    ctl(&daemon, &["reset"]);
    assert_eq!(get(&daemon), "time-quantum = \"20s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\n");
    let daemon = start(daemon.kill());
    assert_eq!(get(&daemon), "time-quantum = \"20s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\n");
    assert_eq!(fs::read_dir(state(&daemon.directory.0)).expect("the directory").count(), 0, "nothing is left");
}

#[test]
fn a_state_file_that_is_wrong_is_reported_and_counts_for_nothing() {
    for wrong in ["time-quantum = \"0s\"\nanti-thrash = \"on\"\n", "half a li", "\0\0\0"] {
        let directory = Directory::new();
        fs::create_dir_all(state(&directory.0)).expect("the state directory");
        fs::write(state(&directory.0).join("settings.toml"), wrong).expect("the state file");
        let daemon = start(directory);
        daemon.log.wait("settings that were changed at run time are ignored");
        assert_eq!(get(&daemon), "time-quantum = \"20s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\n");
        ctl(&daemon, &["set", "time-quantum", "9"]);
        let daemon = start(daemon.kill());
        assert_eq!(
            get(&daemon),
            "time-quantum = \"9s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\n",
            "and can be written again"
        );
    }
}

#[test]
fn reset_with_a_wrong_configuration_file_changes_nothing() {
    let daemon = start(Directory::new());
    ctl(&daemon, &["set", "time-quantum", "9"]);
    fs::write(daemon.directory.0.join("nvshare.toml"), "time-quantum = 0\n").expect("the file");
    let output = daemon.ctl(&["reset"]);
    assert_eq!(output.code, Some(1));
    assert!(output.stderr.contains("nvshare.toml:1:16"), "{}", output.stderr);
    assert!(get(&daemon).contains("\"9s\""));
    let daemon = start(daemon.kill());
    assert!(get(&daemon).contains("\"9s\""));
}

#[test]
fn where_it_cannot_be_written_a_change_is_in_effect_all_the_same() {
    let directory = Directory::new();
    let daemon = start(directory);
    let path = state(&daemon.directory.0);
    // Also for root, a directory that is not there cannot be written to.
    fs::remove_dir(&path).expect("an empty directory");
    ctl(&daemon, &["set", "time-quantum", "9"]);
    daemon.log.wait("will not outlive the scheduler");
    assert!(get(&daemon).contains("\"9s\""));
    fs::create_dir(&path).expect("a directory");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("its mode");
    ctl(&daemon, &["set", "time-quantum", "8"]);
    assert!(path.join("settings.toml").exists());
}
