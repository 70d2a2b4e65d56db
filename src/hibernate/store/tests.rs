//! Images that were changed, forged or copied, and what killed helpers have left.

use super::*;
use std::os::unix::fs::symlink;
use test_support::Directory;

const OWNER: u32 = 1000;

/// A store with an image of `OWNER` that has two files.
fn store() -> (Directory, Store, Entry) {
    let directory = Directory::new();
    fs::set_permissions(&directory.0, Permissions::from_mode(0o700)).expect("permissions");
    let store = Store::open(&directory.0).expect("a store");
    let entry = image(&store, OWNER);
    (directory, store, entry)
}

fn image(store: &Store, uid: u32) -> Entry {
    let own = std::process::id() as i32;
    let tree = Tree::of(own).expect("this process");
    let credentials = Credentials { uid, gid: uid, groups: vec![uid] };
    // Only root can give files to another user.
    let me = Credentials {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: Vec::new(),
    };
    let entry = store.create("program", &Identity::of(own).expect("this process"), &me).expect("an image");
    for (name, contents) in [("pages-1.img", "the memory"), ("core-7.img", "uid 1000")] {
        fs::write(entry.path.join("criu").join(name), contents).expect("a file");
    }
    let process = Identity::of(own).expect("this process");
    let image = store.complete(&entry, &Manifest::new("program", credentials, &tree), process).expect("complete");
    assert_eq!((image.uid, image.bytes, image.damage), (uid, 18, None));
    entry.record(&Stage::Saved).expect("a record");
    entry
}

fn refusal(store: &Store, entry: &Entry) -> String {
    store.verify(entry, OWNER).expect_err("the image is refused").to_string()
}

#[test]
fn a_complete_image_is_accepted_for_its_owner_alone() {
    let (_directory, store, entry) = store();
    assert_eq!(store.verify(&entry, OWNER).expect("it is right").owner.uid, OWNER);
    for other in [OWNER + 1, 0] {
        let why = store.verify(&entry, other).expect_err("another user").to_string();
        assert!(why.contains("belongs to another user"), "{why}");
    }
    assert_eq!(store.list().iter().map(|image| &image.name).collect::<Vec<_>>(), [&entry.name]);
}

#[test]
fn changed_files_are_refused() {
    type Change = fn(&Path) -> io::Result<()>;
    let writable = |path: &Path| fs::set_permissions(path, Permissions::from_mode(0o755));
    let changes: [(Change, &str); 7] = [
        (
            |criu| {
                fs::remove_file(criu.join("core-7.img")).and_then(|()| fs::write(criu.join("core-7.img"), "uid 0000"))
            },
            "core-7.img is damaged",
        ),
        (|criu| fs::write(criu.join("more.img"), "more"), "files are missing, or were added"),
        (|criu| fs::remove_file(criu.join("core-7.img")), "files are missing, or were added"),
        (
            |criu| {
                fs::rename(criu.join("core-7.img"), criu.join("../elsewhere"))?;
                symlink("../elsewhere", criu.join("core-7.img"))
            },
            "cannot use image",
        ),
        (|criu| fs::hard_link(criu.join("core-7.img"), criu.join("../link")), "only the helper can change"),
        (
            |criu| fs::set_permissions(criu.join("core-7.img"), Permissions::from_mode(0o666)),
            "only the helper can change",
        ),
        (|criu| fs::set_permissions(criu, Permissions::from_mode(0o777)), "others can change its files"),
    ];
    for (change, expected) in changes {
        let (_directory, store, entry) = store();
        let criu = entry.path.join("criu");
        writable(&criu).expect("permissions");
        change(&criu).expect("a change");
        let why = refusal(&store, &entry);
        assert!(why.contains(expected), "{why}, not {expected}");
    }
}

#[test]
fn files_that_a_process_can_still_write_are_refused() {
    let (_directory, store, entry) = store();
    let path = entry.path.join("criu/core-7.img");
    fs::set_permissions(&path, Permissions::from_mode(0o644)).expect("permissions");
    let open = OpenOptions::new().write(true).open(&path).expect("a file");
    assert!(refusal(&store, &entry).contains("temporarily unavailable"), "{}", refusal(&store, &entry));
    drop(open);
    store.verify(&entry, OWNER).expect("no process can write it");
}

#[test]
fn manifests_that_this_host_has_not_signed_are_refused() {
    let (_directory, store, entry) = store();
    let manifest = fs::read_to_string(entry.path.join(MANIFEST)).expect("a manifest");
    // As if the image belonged to another user.
    replace(&entry.path, MANIFEST, manifest.replace("\"uid\":1000", "\"uid\":1001").as_bytes()).expect("a file");
    assert!(refusal(&store, &entry).contains("this host has not signed it"));
    assert!(store.list()[0].damage.as_deref().is_some_and(|why| why.contains("not signed")));
    replace(&entry.path, MANIFEST, manifest.as_bytes()).expect("a file");
    store.verify(&entry, OWNER).expect("it is as it was");
    for signature in ["", "00", "nonsense", &"00".repeat(32)] {
        replace(&entry.path, SIGNATURE, signature.as_bytes()).expect("a file");
        assert!(refusal(&store, &entry).contains("this host has not signed it"), "{signature}");
    }
    // Another host's image.
    let (_elsewhere, other, foreign) = self::store();
    for part in [MANIFEST, SIGNATURE] {
        fs::copy(foreign.path.join(part), entry.path.join(part)).expect("a copy");
    }
    assert!(refusal(&store, &entry).contains("this host has not signed it"));
    other.verify(&foreign, OWNER).expect("the other host accepts it");
}

#[test]
fn a_directory_that_others_can_enter_is_not_used() {
    let directory = Directory::new();
    fs::set_permissions(&directory.0, Permissions::from_mode(0o755)).expect("permissions");
    let why = Store::open(&directory.0).expect_err("others can enter it").to_string();
    assert!(why.contains("other users can enter"), "{why}");
}

#[test]
fn names_of_images_are_no_paths() {
    let (_directory, store, entry) = store();
    assert!(store.lock(&entry.name).expect("an image").is_none(), "the test holds its lock");
    for name in ["", ".", "..", "a/b-1", "../x-1", "key", "a-1/..", "-\0", &"a-".repeat(40)] {
        assert!(store.lock(name).is_err(), "{name:?}");
    }
}

#[test]
fn a_partial_image_is_deleted_once_no_helper_is_at_work() {
    let (_directory, store, entry) = store();
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("a process");
    let process = Identity::of(child.id() as i32).expect("it runs");
    let _stopped = Tree::stop(process.pid).expect("it is stopped");
    entry.record(&Stage::Saving { process: process.clone() }).expect("a record");
    assert!(!store.settle(), "a helper holds the lock");
    let name = entry.name.clone();
    drop(entry);
    assert!(store.settle() && store.lock(&name).is_err());
    let state = || fs::read_to_string(format!("/proc/{}/stat", process.pid)).expect("it lives");
    assert!(!state().contains(") T "), "the program continues");
    child.kill().expect("killed");
    child.wait().expect("it has ended");
}

#[test]
fn the_process_of_a_complete_image_is_ended() {
    let (_directory, store, entry) = store();
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().expect("a process");
    let process = Identity::of(child.id() as i32).expect("it runs");
    entry.record(&Stage::Ending { process }).expect("a record");
    let name = entry.name.clone();
    drop(entry);
    // The process is a zombie until it is waited for.
    let reaper = std::thread::spawn(move || child.wait().expect("it has ended"));
    assert!(store.settle());
    assert!(!reaper.join().expect("no panic").success());
    let entry = store.lock(&name).expect("an image").expect("no helper is at work");
    assert_eq!(entry.stage(), Some(Stage::Saved));
    store.verify(&entry, OWNER).expect("the image can be restored");
}

#[test]
fn children_of_a_killed_criu_do_not_hold_the_lock_forever() {
    if !rustix::process::geteuid().is_root() {
        return test_support::skip("root");
    }
    let (_directory, store, entry) = store();
    let mut orphan = std::process::Command::new("sleep");
    std::os::unix::process::CommandExt::uid(&mut orphan, 65534);
    crate::criu::keep_open(&mut orphan, &entry.lock);
    let mut orphan = orphan.arg("1000").spawn().expect("a process");
    let mut criu = std::process::Command::new("sleep").arg("1000").spawn().expect("a process");
    entry.begin(Identity::of(criu.id() as i32).expect("it runs"), 65534).expect("a record");
    drop(entry);
    assert!(!store.settle() && orphan.try_wait().expect("a child").is_none(), "CRIU lives");
    criu.kill().expect("killed");
    criu.wait().expect("it has ended");
    let reaper = std::thread::spawn(move || orphan.wait().expect("it has ended"));
    assert!(!store.settle(), "the lock was held");
    assert!(!reaper.join().expect("no panic").success());
    assert!(store.settle());
}
