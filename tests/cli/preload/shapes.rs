//! Variants of `/etc/ld.so.preload`.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::mount::{MountFlags, mount_bind, mount_remount};
use xattr::FileExt;

use super::host::*;

const LINE: &str = "/mnt/lib/libnvshare.so\n";

#[test]
fn enable_and_disable_keep_every_other_byte() {
    on_a_host(|host| {
        for name in ["a", "b", "c"] {
            host.other(&format!("/mnt/lib/{name}.so"));
        }
        let shapes: [(&str, &str); 9] = [
            ("/mnt/lib/a.so\n", "/mnt/lib/a.so\n/mnt/lib/libnvshare.so\n"),
            ("/mnt/lib/a.so", "/mnt/lib/a.so\n/mnt/lib/libnvshare.so"),
            (
                "/mnt/lib/a.so /mnt/lib/b.so:\t/mnt/lib/c.so",
                "/mnt/lib/a.so /mnt/lib/b.so:\t/mnt/lib/c.so\n/mnt/lib/libnvshare.so",
            ),
            ("\n\n/mnt/lib/a.so\n\n", "\n\n/mnt/lib/a.so\n\n/mnt/lib/libnvshare.so\n"),
            ("/mnt/lib/a.so # and why\n", "/mnt/lib/a.so # and why\n/mnt/lib/libnvshare.so\n"),
            ("# libnvshare.so goes here: not yet", "# libnvshare.so goes here: not yet\n/mnt/lib/libnvshare.so"),
            ("  \t", "  \t\n/mnt/lib/libnvshare.so"),
            (":", ":\n/mnt/lib/libnvshare.so"),
            ("\n", "\n/mnt/lib/libnvshare.so\n"),
        ];
        for (before, after) in shapes {
            host.write(before.as_bytes());
            let mode = 0o664;
            fs::set_permissions(FILE, Permissions::from_mode(mode)).expect("its mode");
            assert!(host.preload("enable").fine().starts_with("On: "), "{before:?}");
            assert_eq!(host.text().as_deref(), Some(after.as_bytes()), "{before:?}");
            host.is_sound();
            assert!(host.loads(0) && host.loads(NOBODY), "{before:?}");
            let identity = host.identity();
            assert!(host.preload("enable").fine().starts_with("Already on: "), "{before:?}");
            assert_eq!(host.identity(), identity, "untouched: {before:?}");
            assert!(host.preload("disable").fine().starts_with("Off: "), "{before:?}");
            assert_eq!(host.text().as_deref(), Some(before.as_bytes()));
            assert_eq!(fs::metadata(FILE).expect("it is there").mode() & 0o7777, mode);
            let identity = host.identity();
            assert!(host.preload("disable").fine().starts_with("Already off: "), "{before:?}");
            assert_eq!(host.identity(), identity, "untouched: {before:?}");
            host.is_tidy();
        }
    });
}

#[test]
fn disable_removes_a_file_that_enable_created() {
    on_a_host(|host| {
        assert_eq!(host.preload("status").code(), Some(4));
        for empty_before in [false, true] {
            if empty_before {
                host.write(b"");
            }
            // nvsharectl finds the library relative to itself.
            assert!(said(&mut host.command("enable")).fine().starts_with("On: "));
            assert_eq!(host.text().as_deref(), Some(LINE.as_bytes()));
            let metadata = fs::metadata(FILE).expect("it is there");
            assert_eq!((metadata.mode() & 0o7777, metadata.uid(), metadata.gid()), (0o644, 0, 0));
            assert!(host.loads(0) && host.loads(NOBODY));
            let on = host.preload("status");
            assert_eq!(on.stdout, format!("on: {LIBRARY}, version 0.1.0\n  no scheduler is running\n"));
            assert_eq!(on.code(), Some(0));
            host.preload("disable").fine();
            assert_eq!(host.text(), None);
            host.is_tidy();
        }
    });
}

#[test]
fn owner_and_attributes_are_kept() {
    on_a_host(|host| {
        host.write(b"");
        std::os::unix::fs::chown(FILE, Some(1), Some(2)).expect("root may");
        fs::set_permissions(FILE, Permissions::from_mode(0o640)).expect("its mode");
        // The access control list is: owner rw-, user 7 r--, group r--, mask rw-, others r--.
        let entries = [(1u16, 6u16, u32::MAX), (2, 4, 7), (4, 4, u32::MAX), (16, 6, u32::MAX), (32, 4, u32::MAX)];
        let list = entries
            .iter()
            .flat_map(|(tag, bits, id)| [&tag.to_le_bytes()[..], &bits.to_le_bytes(), &id.to_le_bytes()].concat());
        let list: Vec<u8> = 2u32.to_le_bytes().into_iter().chain(list).collect();
        let set = [("system.posix_acl_access", &*list), ("trusted.test", b"a label")];
        let set: Vec<_> = set.into_iter().filter(|(name, value)| host.open().set_xattr(name, value).is_ok()).collect();
        if set.len() < 2 {
            test_support::skip(format_args!(
                "a file system with access control lists and trusted attributes, not only {set:?}"
            ));
        }
        host.write_keeping(b"\n");
        for verb in ["enable", "disable"] {
            host.preload(verb).fine();
            let metadata = fs::metadata(FILE).expect("it is there");
            assert_eq!((metadata.uid(), metadata.gid()), (1, 2), "{verb}");
            assert_eq!(metadata.mode() & 0o7777, 0o664, "{verb}");
            for (name, value) in &set {
                assert_eq!(host.open().get_xattr(name).expect("it is read").as_deref(), Some(*value), "{verb}: {name}");
            }
        }
        assert_eq!(host.text().as_deref(), Some(&b"\n"[..]));
    });
}

#[test]
fn an_entry_for_another_libnvshare_is_replaced() {
    on_a_host(|host| {
        host.other("/mnt/lib/a.so");
        fs::create_dir("/mnt/old").expect("a directory");
        fs::copy(LIBRARY, "/mnt/old/libnvshare.so").expect("a copy");
        let shapes = [
            ("/mnt/old/libnvshare.so\n/mnt/lib/a.so\n", "/mnt/lib/libnvshare.so\n/mnt/lib/a.so\n"),
            // The library is missing, so every program prints an error about it.
            ("/mnt/gone/libnvshare.so", "/mnt/lib/libnvshare.so"),
            ("libnvshare.so:/mnt/lib/a.so /mnt/lib/libnvshare.so", "/mnt/lib/libnvshare.so:/mnt/lib/a.so"),
            ("/mnt/lib/libnvshare.so\r\n", "/mnt/lib/libnvshare.so\n"),
        ];
        for (before, after) in shapes {
            host.write(before.as_bytes());
            host.preload("enable").fine();
            assert_eq!(host.text().as_deref(), Some(after.as_bytes()), "{before:?}");
            host.is_sound();
        }
    });
}

#[test]
fn a_symlinked_file_stays_a_symlink() {
    on_a_host(|host| {
        fs::create_dir("/mnt/real").expect("a directory");
        fs::write("/mnt/real/list", "").expect("a file");
        symlink("../mnt/real/list", FILE).expect("a link");
        host.preload("enable").fine();
        assert_eq!(fs::read_to_string("/mnt/real/list").expect("it is there"), LINE);
        assert!(host.loads(NOBODY));
        host.preload("disable").fine();
        assert_eq!(fs::read_to_string("/mnt/real/list").expect("it is there"), "");
        assert!(fs::symlink_metadata(FILE).expect("it is there").is_symlink());

        fs::remove_file("/mnt/real/list").expect("it goes");
        host.preload("enable").refused("is a dangling symbolic link");
        host.preload("disable").refused("is a dangling symbolic link");
    });
}

#[test]
fn an_ambiguous_file_is_refused_and_unchanged() {
    on_a_host(|host| {
        let huge = [b"/mnt/lib/a.so\n".repeat(6000), b"\n".to_vec()].concat();
        let shapes: [(&[u8], &str); 4] = [
            (b"/mnt/lib/a.so\0", "NUL byte"),
            (b"# one\n# two\n", "has comments. If the file becomes longer, the loader reads some comments"),
            (&huge, "longer than 64 KiB"),
            // Because of this foreign entry, the loader prints an error in every program.
            // nvsharectl does not repair foreign entries.
            (b"/mnt/lib/a.so\r\n", "already makes programs fail. Repair or remove it first"),
        ];
        for (text, sentence) in shapes {
            host.write(text);
            let identity = host.identity();
            host.preload("enable").refused(sentence);
            assert_eq!((host.identity(), host.text().as_deref()), (identity, Some(text)), "{sentence}");
            host.is_tidy();
        }
        host.write(b"\n");
        fs::set_permissions(FILE, Permissions::from_mode(0o600)).expect("its mode");
        host.preload("enable")
            .refused("is not readable by all users, so the loader ignores it for some of them. Run chmod 644");
        fs::remove_file(FILE).expect("it goes");

        fs::create_dir(FILE).expect("a directory");
        host.preload("enable").refused("is not a regular file. Remove it first");
        host.preload("disable").refused("is not a regular file. Remove it first");
    });
}

#[test]
fn disable_removes_our_entry_from_an_ambiguous_file() {
    on_a_host(|host| {
        for (before, after) in [
            (&b"/mnt/lib/libnvshare.so\0\xff\xfe\n"[..], &b"\0\xff\xfe\n"[..]),
            (b"# one\n# two\n/mnt/lib/libnvshare.so\n# three\n", b"# one\n# two\n# three\n"),
        ] {
            host.write(before);
            host.preload("disable").fine();
            assert_eq!(host.text().as_deref(), Some(after));
        }
        // Only root's programs read the entry, but it is removed nevertheless.
        host.write(LINE.as_bytes());
        fs::set_permissions(FILE, Permissions::from_mode(0o600)).expect("its mode");
        let status = host.preload("status").fine();
        assert!(status.contains("problem: /etc/ld.so.preload is not readable by all users"), "{status}");
        host.preload("disable").fine();
        assert_eq!(host.text(), None);
    });
}

#[test]
fn an_unchangeable_file_is_reported_with_the_reason() {
    on_a_host(|host| {
        host.write(b"\n");
        if said(Command::new("chattr").args(["+i", FILE])).status.success() {
            host.preload("enable").refused("it may be immutable");
            said(Command::new("chattr").args(["-i", FILE])).fine();
        } else {
            test_support::skip("a file system with immutable files");
        }
        mount_bind(FILE, FILE).expect("it is mounted");
        host.preload("enable").refused("a file system is mounted on it. Unmount that first");
        rustix::mount::unmount(FILE, rustix::mount::UnmountFlags::empty()).expect("it is unmounted");

        mount_remount("/etc", MountFlags::BIND | MountFlags::RDONLY, c"").expect("read-only");
        host.preload("enable").refused("remount its file system read-write");
        assert_eq!(host.text().as_deref(), Some(&b"\n"[..]));
        host.is_tidy();
        host.is_sound();
    });
}

#[test]
fn only_root_changes_the_file_and_other_users_can_read_the_status() {
    on_a_host(|host| {
        let nobody = |verb: &str| said(host.command(verb).uid(NOBODY).gid(NOBODY));
        nobody("enable").refused("only root may change /etc/ld.so.preload. Run `sudo nvsharectl preload enable`");
        nobody("disable").refused("sudo nvsharectl preload disable");
        let verified = nobody("verify").fine();
        assert!(verified.contains("/bin/cat /proc/self/maps as you"), "{verified}");
        assert!(verified.contains("tested only as the current user"), "{verified}");
        assert_eq!(nobody("status").code(), Some(4));
        assert_eq!(host.text(), None);
    });
}

#[test]
fn status_names_problems() {
    on_a_host(|host| {
        host.other("/mnt/lib/a.so");
        host.write(b"/mnt/lib/a.so /mnt/gone/libnvshare.so\nlibnvshare.so\n");
        let said = said(host.command("status").arg("--json"));
        assert_eq!(said.code(), Some(0));
        let json: serde_json::Value = serde_json::from_str(&said.stdout).expect("JSON");
        assert_eq!(json["on"], true);
        assert_eq!(json["entries"], serde_json::json!(["/mnt/gone/libnvshare.so", "libnvshare.so"]));
        assert_eq!(json["others"], serde_json::json!(["/mnt/lib/a.so"]));
        assert_eq!(json["library-version"], serde_json::Value::Null);
        let problems = json["problems"].to_string();
        assert!(problems.contains("there are 2 entries"), "{problems}");
        assert!(problems.contains("/mnt/gone/libnvshare.so: No such file"), "{problems}");
    });
}
