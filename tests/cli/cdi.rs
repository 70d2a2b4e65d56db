//! The OCI hook that container runtimes call for each container that gets a GPU by CDI.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use test_support::{Directory, artifact};

const NVSHARES: &str = "/usr/lib/nvshare/libnvshare.so\n";

/// A container's bundle and image, as they are when a runtime calls the hook.
struct Container(Directory);

impl Container {
    fn new() -> Self {
        let container = Self(Directory::new());
        for directory in ["bundle", "rootfs/etc"] {
            fs::create_dir_all(container.path(directory)).expect("a directory");
        }
        fs::write(container.path("list"), NVSHARES).expect("nvshare's list");
        fs::write(container.path("rootfs/etc/hostname"), "name\n").expect("a file of the image");
        // Runtimes give the root as a path relative to the bundle, or as an absolute path.
        let config = serde_json::json!({ "root": { "path": "../rootfs", "readonly": true }, "process": {} });
        fs::write(container.path("bundle/config.json"), config.to_string()).expect("the configuration");
        container
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.0.join(name)
    }

    fn own(&self) -> PathBuf {
        self.path("rootfs/etc/ld.so.preload")
    }

    /// Runs the hook, and then a command in the container. Returns `None` if mounts are not
    /// permitted here.
    fn hook(&self, then: &str) -> Option<Output> {
        let script = format!(
            "mount --bind rootfs rootfs && mount --bind list \"${{1:-rootfs/etc/ld.so.preload}}\" && mount -o remount,bind,ro rootfs || exit 99
            \"$0\" cdi merge-preload || exit
            {then}"
        );
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", &script]).arg(artifact("nvsharectl"));
        let is_link = self.own().is_symlink();
        command.args(is_link.then_some("rootfs/etc/other")).current_dir(&self.0.0);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().ok()?;
        let state = serde_json::json!({ "ociVersion": "1.0.2", "id": "c", "status": "creating", "bundle": self.path("bundle") });
        // The error is ignored: without a namespace, no process reads the pipe.
        let _ = child.stdin.take().expect("a pipe").write_all(state.to_string().as_bytes());
        let output = child.wait_with_output().expect("it ends");
        let is_impossible =
            output.status.code() == Some(99) || String::from_utf8_lossy(&output.stderr).contains("unshare:");
        if is_impossible {
            test_support::skip(format_args!("the right to mount: {}", String::from_utf8_lossy(&output.stderr)));
        }
        (!is_impossible).then_some(output)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn the_images_list_is_merged_inside_the_container_only() {
    let container = Container::new();
    let own = "# of the image\n/lib/liba.so:/lib/libb.so\n";
    fs::write(container.own(), own).expect("the image's list");
    let then = "cat rootfs/etc/ld.so.preload rootfs/etc/hostname; ! echo x 2>/dev/null >>rootfs/etc/ld.so.preload";
    let Some(output) = container.hook(then) else { return };
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), format!("/lib/liba.so\n/lib/libb.so\n{NVSHARES}name\n"));
    let read = |path: &Path| fs::read_to_string(path).expect("it is there");
    assert_eq!((&*read(&container.own()), &*read(&container.path("list"))), (own, NVSHARES));
    assert_eq!(
        fs::read_dir(container.path("rootfs/etc")).expect("a directory").count(),
        2,
        "nothing is left in the image"
    );
}

#[test]
fn a_container_without_an_image_list_is_unchanged() {
    // Tests an empty file, which runtimes create as a mount point, and a list without names.
    for own in ["", "# nothing\n"] {
        let container = Container::new();
        fs::write(container.own(), own).expect("the image's list");
        let Some(output) = container.hook("cat rootfs/etc/ld.so.preload; grep -c \"$PWD\" /proc/self/mountinfo") else {
            return;
        };
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout), format!("{NVSHARES}2\n"));
    }
}

#[test]
fn an_unmergeable_list_fails_the_hook_with_a_remedy() {
    type Case = (&'static str, fn(&Path));
    let cases: [Case; 3] = [
        ("it is a symbolic link", |own| symlink("other", own).expect("a link")),
        ("it is not a regular file", |own| {
            mknodat(CWD, own, FileType::Fifo, Mode::from_raw_mode(0o644), 0).expect("a pipe");
        }),
        ("it is longer than 64 KiB", |own| fs::write(own, "/lib/liba.so\n".repeat(6000)).expect("a long list")),
    ];
    for (why, make) in cases {
        let container = Container::new();
        fs::write(container.path("rootfs/etc/other"), "/lib/liba.so\n").expect("where the link leads");
        make(&container.own());
        let Some(output) = container.hook("echo it starts") else { return };
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(1), ""), "{said}");
        assert!(said.contains(why) && said.contains("LD_PRELOAD"), "{said}");
    }
}

#[test]
fn links_resolve_within_the_image_and_invalid_states_are_ignored() {
    let container = Container::new();
    // The image contains a malicious link to a directory of the host. The hook must not read a list
    // there.
    fs::create_dir(container.path("etc")).expect("a directory of the host");
    fs::write(container.path("etc/ld.so.preload"), "/lib/libsecret.so\n").expect("the host's list");
    fs::rename(container.path("rootfs/etc"), container.path("rootfs/real")).expect("renamed");
    symlink("../etc", container.path("rootfs/etc")).expect("a link");
    fs::write(container.path("rootfs/real/ld.so.preload"), "").expect("the image's list");
    let Some(output) = container.hook("cat etc/ld.so.preload") else { return };
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("cannot check whether"), "{}", text(&output.stderr));

    let output = Command::new(artifact("nvsharectl")).args(["cdi", "merge-preload"]).stdin(Stdio::null()).output();
    let output = output.expect("nvsharectl starts");
    assert!(output.status.success() && text(&output.stderr).contains("standard input"), "{}", text(&output.stderr));
}
