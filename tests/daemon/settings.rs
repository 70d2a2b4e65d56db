//! Settings that are changed at run time take precedence over the configuration file, and outlive
//! the daemon.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use test_support::daemon::*;

/// Starts a daemon with a state directory, and with a configuration file that sets a time quantum
/// of 20 s.
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
fn a_confirmed_change_survives_a_killed_daemon() {
    let daemon = start(Directory::new());
    assert_eq!(get(&daemon), "time-quantum = \"20s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\npolicy = \"fcfs\"\n");
    ctl(&daemon, &["set", "anti-thrash", "on"]);
    let directory = daemon.kill();
    let daemon = start(directory);
    assert_eq!(get(&daemon), "time-quantum = \"20s\"\nmax-wait = \"60s\"\nanti-thrash = \"on\"\npolicy = \"fcfs\"\n");
    ctl(&daemon, &["set", "time-quantum", "45"]);
    let daemon = start(daemon.kill());
    assert_eq!(get(&daemon), "time-quantum = \"45s\"\nmax-wait = \"60s\"\nanti-thrash = \"on\"\npolicy = \"fcfs\"\n");
    daemon.log.wait("take precedence over the configuration file");
    // The daemon reads the file again, and the settings changed at run time stay in effect.
    ctl(&daemon, &["reload"]);
    assert_eq!(get(&daemon), "time-quantum = \"45s\"\nmax-wait = \"60s\"\nanti-thrash = \"on\"\npolicy = \"fcfs\"\n");
    let text = fs::read_to_string(daemon.directory.0.join("nvshare.toml")).expect("the file");
    assert_eq!(text, "time-quantum = \"20s\"\n", "nobody writes to it");
    ctl(&daemon, &["reset"]);
    assert_eq!(get(&daemon), "time-quantum = \"20s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\npolicy = \"fcfs\"\n");
    let daemon = start(daemon.kill());
    assert_eq!(get(&daemon), "time-quantum = \"20s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\npolicy = \"fcfs\"\n");
    assert!(!state(&daemon.directory.0).join("settings.toml").exists(), "nothing is left");
}

#[test]
fn an_invalid_state_file_is_reported_and_ignored() {
    for wrong in ["time-quantum = \"0s\"\nanti-thrash = \"on\"\npolicy = \"fcfs\"\n", "half a li", "\0\0\0"] {
        let directory = Directory::new();
        fs::create_dir_all(state(&directory.0)).expect("the state directory");
        fs::write(state(&directory.0).join("settings.toml"), wrong).expect("the state file");
        let daemon = start(directory);
        daemon.log.wait("ignoring the settings that were changed at run time");
        assert_eq!(
            get(&daemon),
            "time-quantum = \"20s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\npolicy = \"fcfs\"\n"
        );
        ctl(&daemon, &["set", "time-quantum", "9"]);
        let daemon = start(daemon.kill());
        assert_eq!(
            get(&daemon),
            "time-quantum = \"9s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\npolicy = \"fcfs\"\n",
            "and can be written again"
        );
    }
}

#[test]
fn reset_with_an_invalid_configuration_file_changes_nothing() {
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

/// Asserts that every change is refused for this reason, and that the settings stay the same.
#[track_caller]
fn assert_refused(daemon: &Daemon, why: &str) {
    let before = get(daemon);
    for change in [&["set", "time-quantum", "9"][..], &["set-rule", "batch", "user=5", "weight=5"], &["reset"]] {
        let output = daemon.ctl(change);
        assert_eq!(output.code, Some(1), "{change:?}");
        let text = format!("cannot save the change in {}", state(&daemon.directory.0).display());
        assert!(output.stderr.contains(&text) && output.stderr.contains(why), "{change:?}: {}", output.stderr);
    }
    assert_eq!(get(daemon), before);
}

#[test]
fn a_change_that_cannot_be_saved_is_refused() {
    let daemon = start(Directory::new());
    let path = state(&daemon.directory.0);
    ctl(&daemon, &["set", "time-quantum", "7"]);
    // Even root cannot write into a "directory" that is a file.
    fs::rename(&path, path.with_extension("away")).expect("a directory");
    fs::write(&path, "").expect("a file");
    assert_refused(&daemon, "Not a directory");
    daemon.log.wait("refused a change of settings, because it cannot be saved");
    fs::remove_file(&path).expect("a file");
    fs::rename(path.with_extension("away"), &path).expect("a directory");
    ctl(&daemon, &["set", "time-quantum", "8"]);
    let daemon = start(daemon.kill());
    assert!(get(&daemon).contains("\"8s\""));
}

#[test]
fn a_change_is_refused_on_a_full_disk() {
    if !is_root() {
        return test_support::skip("root, to mount a file system");
    }
    // Fills the disk before the daemon starts.
    const FULL: &str = "mount -t tmpfs -o size=16k none \"$STATE_DIRECTORY\" && \
                        printf 'time-quantum = \"7s\"\\n' > \"$STATE_DIRECTORY/settings.toml\" && \
                        { cat /dev/zero > \"$STATE_DIRECTORY/full\" 2>/dev/null || true; } && exec \"$@\"";
    let directory = Directory::new();
    let state = state(&directory.0);
    fs::create_dir_all(&state).expect("the state directory");
    let daemon = Daemon::start_in(directory, None, |command, _| {
        let mut inside = std::process::Command::new("unshare");
        inside.args(["--mount", "--propagation", "private", "sh", "-ec", FULL, "sh"]);
        inside.arg(command.get_program()).args(command.get_args()).env("STATE_DIRECTORY", &state);
        inside.env_remove("NOTIFY_SOCKET").env_remove("JOURNAL_STREAM");
        *command = inside;
    });
    assert!(get(&daemon).contains("\"7s\""));
    let before = get(&daemon);
    for change in [&["set", "time-quantum", "9"][..], &["set-rule", "batch", "user=5", "weight=5"]] {
        let output = daemon.ctl(change);
        assert_eq!(output.code, Some(1), "{change:?}");
        assert!(output.stderr.contains("No space left on device"), "{}", output.stderr);
    }
    assert_eq!(get(&daemon), before);
    // A reset needs no disk space.
    ctl(&daemon, &["reset"]);
    assert!(get(&daemon).contains("\"30s\""));
}

#[test]
fn a_rule_can_be_set_and_removed_at_run_time() {
    let daemon = start(Directory::new());
    let settings = get(&daemon);
    let drop_ins = daemon.directory.0.join("nvshare.toml.d");
    fs::create_dir_all(&drop_ins).expect("a directory for drop-ins");
    fs::write(drop_ins.join("a.toml"), "[[rule]]\nuser = 54321\nmemory-max = \"8G\"\n").expect("a drop-in");
    ctl(&daemon, &["reload"]);
    let written = format!("\n# {}/a.toml:1\n[[rule]]\nuser = 54321\nmemory-max = 8589934592\n", drop_ins.display());
    assert_eq!(get(&daemon), format!("{settings}{written}"));

    ctl(&daemon, &["set-rule", "batch", "slice=batch.slice", "weight=idle"]);
    ctl(&daemon, &["set-rule", "five", "user=54321", "memory-max=25%", "interactive=true"]);
    let batch = "\n# set at run time\n[[rule]]\nname = \"batch\"\nslice = \"batch.slice\"\nweight = \"idle\"\n";
    let five = "\n# set at run time\n[[rule]]\nname = \"five\"\nuser = 54321\nmemory-max = \"25%\"\nweight = 100\ninteractive = true\n";
    assert_eq!(get(&daemon), format!("{settings}{five}{batch}{written}"), "the newest first, and those of files last");
    let text = get(&daemon);
    fs::write(daemon.directory.0.join("again.toml"), text.split_once("\n\n").expect("rules").1).expect("a file");

    // The rules outlive the daemon, and a reload of the file.
    let daemon = start(daemon.kill());
    ctl(&daemon, &["reload"]);
    assert_eq!(get(&daemon), format!("{settings}{five}{batch}{written}"));
    for (wrong, expected) in [
        (&["set-rule", "five", "user=54321"][..], "the rule sets nothing"),
        (&["set-rule", "six", "weight=0"], "weight cannot be 0: a number from 1 to 10000, or \"idle\" is allowed"),
        (&["set-rule", "six", "wait=5"], "unknown field `wait`"),
        (&["set-rule", "six", "user=nobody-of-this-name", "weight=5"], "this host has no user \"nobody-of-this-name\""),
        (&["set-rule", "six", "weight=5", "weight=6"], "weight is given twice"),
        (&["unset-rule", "six"], "no rule \"six\" was set at run time"),
    ] {
        let output = daemon.ctl(wrong);
        assert_eq!(output.code, Some(1), "{wrong:?}");
        assert!(output.stderr.contains(expected), "{wrong:?}: {}", output.stderr);
    }
    ctl(&daemon, &["unset-rule", "five"]);
    assert_eq!(get(&daemon), format!("{settings}{batch}{written}"));
    assert_eq!(daemon.ctl(&["reset"]).stdout, "Removed the rules that were set at run time: batch\n");
    assert_eq!(get(&daemon), format!("{settings}{written}"));
}

#[test]
fn reading_the_configuration_blocks_no_client() {
    let mut daemon = start(Directory::new());
    let file = daemon.directory.0.join("nvshare.toml");
    // A pipe replaces the file, so that reading it takes long, as with a slow directory service
    // that resolves user names.
    fs::remove_file(&file).expect("the file");
    assert!(Command::new("mkfifo").arg(&file).status().expect("mkfifo").success());
    let mut reload = test_support::daemon::ctl();
    let mut reload = reload.arg("--control").arg(daemon.control()).arg("reload").spawn().expect("it starts");
    let mut writer = fs::File::options().write(true).open(&file).expect("it is being read");
    daemon.holder_and_waiter();
    ctl(&daemon, &["set", "anti-thrash", "on"]);
    assert!(reload.try_wait().expect("a child").is_none());
    writer.write_all(b"time-quantum = \"25s\"\n").expect("a pipe");
    drop(writer);
    assert!(wait(&mut reload).success());
    assert_eq!(get(&daemon), "time-quantum = \"25s\"\nmax-wait = \"60s\"\nanti-thrash = \"on\"\npolicy = \"fcfs\"\n");
    // A daemon that ends doesn't wait for the reload.
    daemon.signal(libc::SIGHUP);
    let _writer = fs::File::options().write(true).open(&file).expect("it is being read");
    daemon.signal(libc::SIGTERM);
    assert!(daemon.wait().success());
}

#[test]
fn an_invalid_file_at_restart_falls_back_to_the_last_good_one() {
    let daemon = start(Directory::new());
    let file = daemon.directory.0.join("nvshare.toml");
    let drop_ins = daemon.directory.0.join("nvshare.toml.d");
    fs::create_dir_all(&drop_ins).expect("a directory for drop-ins");
    fs::write(drop_ins.join("a.toml"), "[[rule]]\nuser = 5\nmemory-max = \"8G\"\n").expect("a drop-in");
    ctl(&daemon, &["reload"]);
    ctl(&daemon, &["set", "anti-thrash", "on"]);
    let before = get(&daemon);
    let wrong = "nvshare.toml.d/zz.toml:1:16: time-quantum: \"banana\" is not a duration";
    fs::write(drop_ins.join("zz.toml"), "time-quantum = \"banana\"\n").expect("a drop-in");
    assert_eq!(daemon.ctl(&["reload"]).code, Some(1));
    let problems = |daemon: &Daemon| {
        let status: serde_json::Value = serde_json::from_str(&daemon.ctl(&["--json"]).stdout).expect("JSON");
        let all = status["problems"].as_array().expect("a list").clone();
        all.iter().filter_map(|one| one.as_str()).find(|one| one.contains("configuration")).unwrap_or("").to_owned()
    };
    let told = |daemon: &Daemon, instead: &str| {
        let problem = problems(daemon);
        let begin = problem.starts_with("the configuration has an error: ") && problem.contains(wrong);
        assert!(begin && problem.ends_with(&format!(" (in effect: {instead})")), "{problem}");
        assert!(daemon.ctl(&[]).stdout.contains(&problem));
    };
    told(&daemon, "the last valid configuration");

    let again = |daemon: Daemon, socket: Option<&std::os::unix::net::UnixDatagram>| {
        let directory = daemon.kill();
        let (state, file) = (state(&directory.0), file.clone());
        let notify = socket.and_then(|socket| socket.local_addr().ok()?.as_pathname().map(Path::to_owned));
        Daemon::start_in(directory, None, |command, _| {
            command.arg("--config").arg(file).env("STATE_DIRECTORY", state);
            notify.map(|path| command.env("NOTIFY_SOCKET", path));
        })
    };
    let notify = std::os::unix::net::UnixDatagram::bind(daemon.directory.0.join("notify")).expect("a socket");
    notify.set_read_timeout(Some(test_support::PATIENCE)).expect("a timeout");
    let daemon = again(daemon, Some(&notify));
    assert!(daemon.log.wait("ERROR the configuration has an error: ").contains(wrong));
    told(&daemon, "the last valid configuration");
    assert_eq!(get(&daemon), before, "the settings and rules of before");
    let mut buffer = [0; 1024];
    let mut line = String::new();
    while !line.starts_with("STATUS=the configuration has an error: ") {
        let length = notify.recv(&mut buffer).expect("a notification");
        line = String::from_utf8_lossy(&buffer[..length]).into_owned();
    }
    assert!(line.contains(wrong), "systemctl status has it: {line}");

    // Without a saved configuration, the daemon uses the defaults and the settings changed at run
    // time.
    fs::remove_file(state(&daemon.directory.0).join("configuration.toml")).expect("what was kept");
    let daemon = again(daemon, None);
    told(&daemon, "the default settings");
    assert!(get(&daemon).starts_with("time-quantum = \"30s\"\n") && get(&daemon).contains("anti-thrash = \"on\""));
    assert_eq!(daemon.ctl(&["reload"]).code, Some(1));
    told(&daemon, "the default settings");
    fs::remove_file(drop_ins.join("zz.toml")).expect("the wrong one");
    ctl(&daemon, &["reload"]);
    assert_eq!((problems(&daemon).as_str(), get(&daemon)), ("", before.clone()));

    // The scheduler starts even if it cannot open a socket.
    fs::write(drop_ins.join("zz.toml"), "[metrics]\nlisten = \"/proc/no/metrics.sock\"\n").expect("a drop-in");
    ctl(&daemon, &["reload"]);
    let daemon = again(daemon, None);
    daemon.log.wait("ERROR cannot serve metrics on /proc/no/metrics.sock");
    assert_eq!(get(&daemon), before);
    assert!(daemon.ctl(&[]).stdout.contains("cannot serve metrics on /proc/no/metrics.sock"));
}

#[test]
fn the_log_names_old_value_new_value_and_author_of_a_change() {
    let daemon = start(Directory::new());
    ctl(&daemon, &["set", "time-quantum", "45"]);
    let line = daemon.log.wait("settings were changed by user ");
    assert!(line.contains(" (nvsharectl, process ") && line.contains("): time-quantum from 20s to 45s"), "{line}");
    ctl(&daemon, &["set-rule", "five", "user=5", "weight=7"]);
    let line = daemon.log.wait("rule \"five\" was set by user ");
    assert!(line.contains("weight = 7"), "{line}");
    ctl(&daemon, &["unset-rule", "five"]);
    daemon.log.wait("rule \"five\" was removed by user ");
    fs::write(daemon.directory.0.join("nvshare.toml"), "max-wait = 9\n").expect("the file");
    daemon.signal(libc::SIGHUP);
    daemon.log.wait("settings were changed by the signal SIGHUP: max-wait from 1min 00s to 9.0s");
    ctl(&daemon, &["reset"]);
    daemon.log.wait("settings and rules that were set at run time were reset by user ");
}

#[test]
fn the_reason_for_refused_memory_is_shown_later_too() {
    let daemon = start(Directory::new());
    let user = rustix::process::geteuid().as_raw().to_string();
    ctl(&daemon, &["set-rule", "small", &format!("user={user}"), "memory-max=2G"]);
    let client = daemon.client();
    client.attach();
    client.send(nvshare_wire::ClientMessage::RequestLimit { slot: 0, bytes: 3 * GIB });
    daemon.log.wait("is refused memory");
    let why = || {
        let output = daemon.ctl(&["why", &std::process::id().to_string()]);
        assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""));
        output.stdout
    };
    let expected = " is refused memory: it requests 3 GiB in total";
    let now = why();
    assert!(
        now.contains("Refused ") && now.contains(expected) && now.contains("memory-max of rule \"small\""),
        "{now}"
    );
    drop(client);
    test_support::wait_for("its end", || why().starts_with("It has ended. ").then_some(()));
    assert!(why().contains(expected), "{}", why());
}
