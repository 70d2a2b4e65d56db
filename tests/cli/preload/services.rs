//! `--unit` and `--user`: preloading in single services.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use super::fake_systemd::{Systemd, Unit};
use super::host::*;

const DROP_IN: &str = "/etc/systemd/system/jupyter.service.d/zz-nvshare-preload.conf";

fn preload(host: &Host, arguments: &[&str]) -> Said {
    let (verb, options) = arguments.split_first().expect("a verb");
    let mut command = host.command(verb);
    if *verb == "enable" {
        command.args(["--library", LIBRARY]);
    }
    said(command.args(options).env("DBUS_SYSTEM_BUS_ADDRESS", Systemd::ADDRESS))
}

fn jupyter() -> Unit {
    Unit::new("jupyter.service")
}

#[test]
fn only_the_selected_service_preloads_the_library() {
    on_a_host(|host| {
        let _systemd = Systemd::start(vec![jupyter(), Unit::new("other.service")]);
        for unit in ["jupyter.service", "jupyter"] {
            let on = preload(host, &["enable", "--unit", unit]).fine();
            assert_eq!(on, "On: jupyter.service preloads /mnt/lib/libnvshare.so when it next starts.\n");
            let text = fs::read_to_string(DROP_IN).expect("the drop-in");
            assert!(text.ends_with("[Service]\nEnvironment=\"LD_PRELOAD=/mnt/lib/libnvshare.so\"\n"), "{text}");
            assert!(text.contains(&format!("`nvsharectl preload disable --unit {unit}` removes it")), "{text}");
            assert_eq!(fs::metadata(DROP_IN).expect("it is there").permissions().mode() & 0o7777, 0o644);
        }
        assert_eq!(host.text(), None, "nothing else preloads it");

        // The exit code describes either the whole machine or the selected service.
        let all = preload(host, &["status"]);
        assert_eq!(all.code(), Some(4));
        assert!(all.stdout.ends_with("  on for jupyter.service: /mnt/lib/libnvshare.so, version 0.1.0\n"), "{all:?}");
        let one = preload(host, &["status", "--unit", "jupyter"]).fine();
        assert_eq!(one, "on for jupyter.service: /mnt/lib/libnvshare.so, version 0.1.0\n");
        let other = preload(host, &["status", "--unit", "other"]);
        assert_eq!((other.code(), &*other.stdout), (Some(4), "off for other.service\n"));
        let json: serde_json::Value = serde_json::from_str(&preload(host, &["status", "--json"]).stdout).expect("JSON");
        assert_eq!(json["services"][0]["unit"], "jupyter.service");
        assert_eq!(json["services"][0]["library-version"], "0.1.0");

        assert!(
            preload(host, &["disable", "--unit", "jupyter"])
                .fine()
                .starts_with("Off: the next time jupyter.service starts, ")
        );
        assert!(!Path::new("/etc/systemd/system/jupyter.service.d").exists());
        assert!(preload(host, &["disable", "--unit", "jupyter"]).fine().starts_with("Already off: "));
        assert!(!preload(host, &["status"]).stdout.contains("jupyter"));
    });
}

#[test]
fn other_preloaded_libraries_of_a_service_are_kept() {
    on_a_host(|host| {
        let with =
            Unit { environment: vec!["LD_PRELOAD=/usr/lib/a.so:/old/libnvshare.so /usr/lib/b%.so"], ..jupyter() };
        let _systemd = Systemd::start(vec![with]);
        // The administrator's drop-in of `systemctl edit` stays in effect, except for this
        // variable.
        fs::create_dir_all("/etc/systemd/system/jupyter.service.d").expect("a directory");
        fs::write("/etc/systemd/system/jupyter.service.d/override.conf", "[Service]\nNice=5\n").expect("a drop-in");
        for _ in 0..2 {
            preload(host, &["enable", "--unit", "jupyter"]).fine();
            let text = fs::read_to_string(DROP_IN).expect("the drop-in");
            let expected = "\nEnvironment=\"LD_PRELOAD=/mnt/lib/libnvshare.so:/usr/lib/a.so:/usr/lib/b%%.so\"\n";
            assert!(text.ends_with(expected), "{text}");
        }
        preload(host, &["disable", "--unit", "jupyter"]).fine();
        let left: Vec<_> = fs::read_dir("/etc/systemd/system/jupyter.service.d").expect("its directory").collect();
        assert_eq!(left.len(), 1, "{left:?}");
    });
}

#[test]
fn a_users_drop_in_is_for_the_users_manager() {
    on_a_host(|host| {
        let _systemd = Systemd::start(vec![Unit::new("user@1234.service")]);
        fs::write("/etc/passwd", "root:x:0:0::/root:/bin/sh\nalice:x:1234:1234::/nowhere:/bin/sh\n")
            .expect("the users");
        let on = preload(host, &["enable", "--user", "alice"]).fine();
        assert!(on.starts_with("On: user@1234.service preloads "), "{on}");
        assert!(preload(host, &["status"]).stdout.contains("on for user@1234.service: "));
        preload(host, &["disable", "--user", "1234"]).fine();
        assert_eq!(preload(host, &["status", "--user", "alice"]).code(), Some(4));
        preload(host, &["enable", "--user", "bob"]).refused("there is no user \"bob\"");
    });
}

#[test]
fn a_service_that_would_not_load_the_library_is_refused() {
    on_a_host(|host| {
        fs::write("/mnt/environment", "A=1\nLD_PRELOAD=/usr/lib/a.so\n").expect("a file");
        fs::create_dir("/mnt/root").expect("a directory");
        let cases = [
            (Unit { load_state: "not-found", ..jupyter() }, "systemd has no unit jupyter.service"),
            (Unit { load_state: "masked", ..jupyter() }, "its state in systemd is masked"),
            (Unit { load_state: "bad-setting", ..jupyter() }, "its state in systemd is bad-setting"),
            (Unit { environment_files: vec!["/mnt/env*"], ..jupyter() }, "from /mnt/environment, which overrides"),
            (Unit { unset_environment: vec!["LD_PRELOAD"], ..jupyter() }, "UnsetEnvironment=LD_PRELOAD"),
            (Unit { root_directory: "/mnt/root", ..jupyter() }, "/mnt/root/mnt/lib/libnvshare.so does not exist"),
            (Unit { root_image: "/mnt/image.raw", ..jupyter() }, "RootImage=/mnt/image.raw"),
            (Unit { address_families: (true, vec!["AF_INET"]), ..jupyter() }, "Add AF_UNIX"),
            (Unit { address_families: (false, vec!["AF_UNIX"]), ..jupyter() }, "Add AF_UNIX"),
        ];
        for (unit, why) in cases {
            let _systemd = Systemd::start(vec![unit]);
            preload(host, &["enable", "--unit", "jupyter"]).refused(why);
            assert!(!Path::new(DROP_IN).exists(), "{why}");
        }
        let families = Unit { address_families: (true, vec!["AF_INET", "AF_UNIX"]), ..jupyter() };
        let _systemd = Systemd::start(vec![families]);
        preload(host, &["enable", "--unit", "jupyter"]).fine();
    });
}

#[test]
fn an_outranked_drop_in_is_rolled_back() {
    on_a_host(|host| {
        let _systemd = Systemd::start(vec![jupyter()]);
        let directory = Path::new(DROP_IN).parent().expect("a directory");
        fs::create_dir_all(directory).expect("a directory");
        fs::write(directory.join("zzz.conf"), "[Service]\nEnvironment=LD_PRELOAD=/usr/lib/a.so\n").expect("a drop-in");
        preload(host, &["enable", "--unit", "jupyter"]).refused("Find that file with `systemctl cat jupyter.service`");
        assert!(!Path::new(DROP_IN).exists());
        assert!(directory.join("zzz.conf").exists());
    });
}

#[test]
fn units_that_start_no_programs_are_refused() {
    on_a_host(|host| {
        let members = ["a.service", "b.service", "c.service", "user-runtime-dir@1000.service"].map(Unit::new);
        let [mut first, mut below, other, mut directory] = members;
        (first.slice, below.slice, directory.slice) = ("batch.slice", "batch-night.slice", "batch.slice");
        let _systemd = Systemd::start(vec![first, below, other, directory]);
        for slice in [["--unit", "batch.slice"], ["--slice", "batch.slice"], ["--slice", "batch"]] {
            let refused = preload(host, &["enable", slice[0], slice[1]]);
            let lines: Vec<&str> = refused.stderr.lines().skip(1).collect();
            let expected = ["a", "b"].map(|name| format!("  sudo nvsharectl preload enable --unit {name}.service"));
            assert_eq!(lines, expected, "{refused:?}");
            refused.refused("batch.slice is a slice, which cannot pass an environment");
        }
        preload(host, &["enable", "--unit", "session-1.scope"]).refused("is a scope");
        preload(host, &["enable", "--unit", "nvshare.socket"]).refused("is not a service");
        preload(host, &["enable", "--unit", "../x.service"]).refused("is not a valid unit name");
        let both = preload(host, &["enable", "--unit", "a", "--user", "b"]);
        assert_eq!(both.code(), Some(2), "{both:?}");
    });
}

#[test]
fn programs_that_will_not_load_the_library_are_named() {
    on_a_host(|host| {
        let confined = Unit { apparmor_profile: "jupyter", program: "/mnt/bin/nvsharectl", ..jupyter() };
        let _systemd = Systemd::start(vec![confined]);
        let on = preload(host, &["enable", "--unit", "jupyter"]).fine();
        assert!(on.contains("note: AppArmor confines the service with the profile jupyter"), "{on}");
        assert!(on.contains("note: /mnt/bin/nvsharectl is linked statically"), "{on}");
    });
}

#[test]
fn status_shows_whether_the_process_has_loaded_the_library() {
    on_a_host(|host| {
        let start = |preloaded: bool| {
            let mut sleep = Command::new("/bin/sleep");
            sleep.arg("600").stdout(Stdio::null()).env_clear();
            if preloaded {
                sleep.env("LD_PRELOAD", LIBRARY);
            }
            sleep.spawn().expect("it starts")
        };
        for preloaded in [false, true] {
            let mut process = start(preloaded);
            let _systemd = Systemd::start(vec![Unit { main_pid: process.id(), ..jupyter() }]);
            let on = preload(host, &["enable", "--unit", "jupyter"]).fine();
            assert!(on.contains("only after a restart: sudo systemctl restart jupyter.service"), "{on}");
            let says = |problem: &bool| {
                let status = preload(host, &["status", "--unit", "jupyter"]).fine();
                status.contains(
                    "started before preloading was enabled, and loads the library only after a restart: sudo systemctl",
                ) == *problem
            };
            // The loader maps the library shortly after the process exists.
            test_support::wait_for("the status", || says(&!preloaded).then_some(()));
            process.kill().expect("it is ours");
            process.wait().expect("it is ours");
        }
    });
}

#[test]
fn a_bad_library_is_not_enabled_for_a_service() {
    on_a_host(|host| {
        let _systemd = Systemd::start(vec![jupyter()]);
        host.compile(LIBRARY, &["-DCRASHES_FOR_USERS"]);
        preload(host, &["enable", "--unit", "jupyter"]).refused("/bin/true as nobody: ended with signal: 6");
        fs::set_permissions(LIBRARY, Permissions::from_mode(0o666)).expect("its mode");
        preload(host, &["enable", "--unit", "jupyter"]).refused("is writable by users other than root");
        assert!(!Path::new(DROP_IN).exists());
    });
}

#[test]
fn only_root_changes_services_and_disable_works_without_systemd() {
    on_a_host(|host| {
        let nobody = |verb: &str| said(host.command(verb).args(["--unit", "jupyter"]).uid(NOBODY).gid(NOBODY));
        nobody("enable")
            .refused("only root may change jupyter.service. Run `sudo nvsharectl preload enable --unit jupyter`");
        nobody("disable").refused("sudo nvsharectl preload disable --unit jupyter");
        preload(host, &["enable", "--unit", "jupyter"]).refused("cannot reach systemd on the system bus");

        fs::create_dir_all(Path::new(DROP_IN).parent().expect("a directory")).expect("a directory");
        fs::write(DROP_IN, "[Service]\nEnvironment=\"LD_PRELOAD=/mnt/lib/libnvshare.so\"\n").expect("a drop-in");
        assert!(nobody("status").fine().starts_with("on for jupyter.service: "));
        let off = preload(host, &["disable", "--unit", "jupyter"]).fine();
        assert!(off.contains("note: cannot reach systemd on the system bus"), "{off}");
        assert!(!Path::new(DROP_IN).exists());
    });
}

#[test]
fn an_alias_resolves_to_its_service() {
    on_a_host(|host| {
        let _systemd = Systemd::start(vec![Unit { alias: "notebook.service", ..jupyter() }]);
        let on = preload(host, &["enable", "--unit", "notebook"]).fine();
        assert!(on.starts_with("On: jupyter.service "), "{on}");
        assert!(Path::new(DROP_IN).exists());
        preload(host, &["status", "--unit", "notebook"]).fine();
        preload(host, &["disable", "--unit", "notebook"]).fine();
        assert!(!Path::new(DROP_IN).exists());
    });
}
