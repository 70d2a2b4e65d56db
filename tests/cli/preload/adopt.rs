//! `adopt` and `release`, which change a service's drop-in and its rule in the scheduler.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::fake_systemd::{RESTARTED, Systemd, Unit};
use super::host::*;
use test_support::daemon::Daemon;

const DROP_IN: &str = "/etc/systemd/system/ollama.service.d/zz-nvshare-preload.conf";
const OF_USER: &str = "/mnt/config/systemd/user/comfyui.service.d/zz-nvshare-preload.conf";

fn ctl(daemon: &Daemon, arguments: &[&str]) -> Said {
    let mut command = Command::new("/mnt/bin/nvsharectl");
    command.arg("--control").arg(daemon.control()).args(arguments);
    if arguments[0] == "adopt" && !arguments.contains(&"--container") {
        command.args(["--library", LIBRARY]);
    }
    command.env("DBUS_SYSTEM_BUS_ADDRESS", Systemd::ADDRESS).env("DBUS_SESSION_BUS_ADDRESS", Systemd::ADDRESS);
    said(command.env("XDG_CONFIG_HOME", "/mnt/config"))
}

fn rules(daemon: &Daemon) -> String {
    let all = ctl(daemon, &["get"]).fine();
    all.split_once("\n[[rule]]").map_or_else(String::new, |(_, rules)| rules.to_owned())
}

fn ollama() -> Unit {
    Unit::new("ollama.service")
}

#[test]
fn a_service_is_adopted_and_released() {
    on_a_host(|host| {
        let _systemd = Systemd::start(vec![Unit { alias: "llm.service", main_pid: 1, ..ollama() }]);
        let daemon = Daemon::start();
        let before = ctl(&daemon, &["get"]).fine();
        // The service can also be adopted under its alias.
        let text = ctl(&daemon, &["adopt", "llm"]).fine();
        assert!(
            text.starts_with("ollama.service is adopted. To undo this: `nvsharectl release ollama.service`\n"),
            "{text}"
        );
        for part in [
            "  note: ollama.service is running, and loads the library only after a restart: sudo systemctl restart ollama.service\n",
            DROP_IN,
            "Environment=\"LD_PRELOAD=/mnt/lib/libnvshare.so\"",
            "# set at run time\n[[rule]]\nname = \"adopted ollama.service\"\nunit = \"ollama.service\"\n",
            "interactive = true",
            "sleep-after = \"300s\"",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(rules(&daemon).contains("adopted ollama.service") && Path::new(DROP_IN).exists());
        assert!(!Path::new(RESTARTED).exists(), "nobody asked for that");
        // Adopting the service again changes nothing.
        let (file, rule) = (fs::read_to_string(DROP_IN).expect("it"), rules(&daemon));
        let again = ctl(&daemon, &["adopt", "ollama.service", "--restart"]).fine();
        assert!(again.starts_with("ollama.service is adopted already.\nRestarted ollama.service.\n"), "{again}");
        assert_eq!((fs::read_to_string(DROP_IN).expect("it"), rules(&daemon)), (file, rule));
        assert_eq!(fs::read_to_string(RESTARTED).expect("it was"), "ollama.service\n");
        assert_eq!(host.text(), None, "nothing else preloads it");

        let text = ctl(&daemon, &["release", "ollama", "--restart"]).fine();
        let expected = "The next time ollama.service starts, it does not preload the library.\n\
                        Removed the rule \"adopted ollama.service\".\nRestarted ollama.service.\n";
        assert_eq!(text, expected);
        assert!(!Path::new("/etc/systemd/system/ollama.service.d").exists());
        assert_eq!(ctl(&daemon, &["get"]).fine(), before);
        assert_eq!(ctl(&daemon, &["release", "ollama"]).fine(), "ollama.service is not adopted.\n");
    });
}

#[test]
fn release_keeps_an_earlier_drop_in_and_rule() {
    on_a_host(|host| {
        let systemd = Systemd::start(vec![ollama()]);
        let daemon = Daemon::start();
        let mut enable = host.command("enable");
        enable.args(["--library", LIBRARY, "--unit", "ollama"]).env("DBUS_SYSTEM_BUS_ADDRESS", Systemd::ADDRESS);
        said(&mut enable).fine();
        // `release` also works after the library has moved.
        let file = fs::read_to_string(DROP_IN).expect("it").replace("/mnt/lib/", "/mnt/old/");
        fs::write(DROP_IN, &file).expect("it is written");
        drop(systemd);
        let _systemd = Systemd::start(vec![ollama()]);
        ctl(&daemon, &["set-rule", "adopted ollama.service", "unit=ollama.service", "weight=50"]).fine();
        let rule = rules(&daemon);
        assert!(ctl(&daemon, &["adopt", "ollama"]).fine().starts_with("ollama.service is adopted already.\n"));
        assert_eq!(rules(&daemon), rule, "who changed it knows why");
        assert_eq!(ctl(&daemon, &["release", "ollama"]).fine(), "Removed the rule \"adopted ollama.service\".\n");
        assert_eq!(fs::read_to_string(DROP_IN).expect("it is of `preload enable`"), file);
    });
}

#[test]
fn a_users_service_has_its_drop_in_in_the_users_files() {
    on_a_host(|_| {
        let _systemd = Systemd::start(vec![Unit::new("comfyui.service")]);
        let daemon = Daemon::start();
        let text = ctl(&daemon, &["adopt", "--user", "comfyui"]).fine();
        assert!(
            text.contains("To undo this: `nvsharectl release --user comfyui.service`") && text.contains(OF_USER),
            "{text}"
        );
        assert!(rules(&daemon).contains("\nuser = 0 # root\n"), "it is that of this user only: {}", rules(&daemon));
        assert!(!Path::new("/etc/systemd/system/comfyui.service.d").exists());
        ctl(&daemon, &["release", "comfyui"]).fine();
        assert!(Path::new(OF_USER).exists(), "that is another one");
        ctl(&daemon, &["release", "--user", "comfyui"]).fine();
        assert!(!Path::new(OF_USER).exists() && rules(&daemon).is_empty());
    });
}

#[test]
fn a_failed_adoption_is_rolled_back() {
    on_a_host(|_| {
        let daemon = Daemon::start();
        let before = ctl(&daemon, &["get"]).fine();
        let nothing = |what: &str| {
            assert!(!Path::new("/etc/systemd/system/ollama.service.d/zz-nvshare-preload.conf").exists(), "{what}");
            assert_eq!(ctl(&daemon, &["get"]).fine(), before, "{what}");
        };
        // Without a session, the user has no bus.
        ctl(&daemon, &["adopt", "--user", "comfyui"])
            .refused("Run nvsharectl in a session of the service's user. To start the user's services");
        let systemd = Systemd::start(vec![ollama()]);
        ctl(&daemon, &["adopt", "nothing"]).refused("systemd has no unit nothing.service");
        ctl(&daemon, &["adopt", "ollama.slice"]).refused("is a slice");
        nothing("there is none");
        // If another file outranks the drop-in, the rule is removed too.
        let directory = Path::new(DROP_IN).parent().expect("a directory");
        fs::create_dir_all(directory).expect("a directory");
        fs::write(directory.join("zzz.conf"), "[Service]\nEnvironment=LD_PRELOAD=/usr/lib/a.so\n").expect("a drop-in");
        ctl(&daemon, &["adopt", "ollama"]).refused("is overridden by another file");
        nothing("it is outranked");
        fs::remove_dir_all(directory).expect("it was there");
        drop(systemd);
        // The service does not start with the drop-in, so it is restarted without the drop-in.
        let systemd = Systemd::start(vec![Unit { active_state: "failed", ..ollama() }]);
        ctl(&daemon, &["adopt", "ollama", "--restart"]).refused("ollama.service does not start");
        assert_eq!(fs::read_to_string(RESTARTED).expect("it was"), "ollama.service\nollama.service\n");
        nothing("it does not start");
        drop(systemd);
        // systemd considers the service started, but the service fails later, or restarts
        // repeatedly.
        for later in [("failed", "failed"), ("activating", "auto-restart")] {
            let systemd = Systemd::start(vec![Unit { later, ..ollama() }]);
            ctl(&daemon, &["adopt", "ollama", "--restart"]).refused("ollama.service does not start");
            nothing(later.1);
            drop(systemd);
        }
        let systemd = Systemd::start(vec![ollama()]);
        // Without a scheduler, `adopt` creates neither a rule nor a drop-in.
        let control = daemon.control();
        drop(daemon.stop());
        let mut command = Command::new("/mnt/bin/nvsharectl");
        command.arg("--control").arg(control).args(["adopt", "ollama", "--library", LIBRARY]);
        let refused = said(command.env("DBUS_SYSTEM_BUS_ADDRESS", Systemd::ADDRESS));
        assert_eq!(refused.code(), Some(3), "{refused:?}");
        assert!(!Path::new(DROP_IN).exists());
        drop(systemd);
    });
}

#[test]
fn adopting_a_container_prints_its_options() {
    on_a_host(|_| {
        let daemon = Daemon::start();
        let text = ctl(&daemon, &["adopt", "--container", "vllm"]).fine();
        assert!(text.contains("docker run --device nvshare.com/gpu=0 --name vllm"), "{text}");
    });
}

/// Runs `nvsharectl` while no scheduler is on the bus.
fn without_a_scheduler() -> Said {
    let mut command = Command::new("/mnt/bin/nvsharectl");
    said(command.arg("status").env("DBUS_SYSTEM_BUS_ADDRESS", Systemd::ADDRESS))
}

#[test]
fn a_scheduler_that_systemd_cannot_start_is_reported_immediately() {
    on_a_host(|_| {
        for (unit, expected) in [
            (
                Unit { active_state: "failed", ..Unit::new("nvshare.service") },
                "nvshare.service has failed. `journalctl",
            ),
            (
                Unit { load_state: "masked", ..Unit::new("nvshare.service") },
                "nvshare.service is masked. As root, run `systemctl unmask",
            ),
        ] {
            let _systemd = Systemd::start(vec![unit]);
            let refused = without_a_scheduler();
            assert_eq!(refused.code(), Some(3), "{refused:?}");
            assert!(refused.stderr.contains(&format!("the scheduler is not running: {expected}")), "{refused:?}");
        }
    });
}
