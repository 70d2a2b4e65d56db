//! Images that were changed, forged or copied, and what killed helpers have left.

use super::room::SHARE_OF_USER;
use super::*;
use crate::claims::tests::{file_for, file_with_capabilities};
use crate::rights::Credentials;
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
    let own = Identity::of(std::process::id() as i32).expect("its files").expect("this process");
    let tree = Tree::of(&own).expect("its files").expect("this process");
    let rights = |owner| Rights { owner, limits: Vec::new(), login: None };
    // Only root can give files to another user.
    let me = rights(Credentials {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: Vec::new(),
    });
    let (entry, _) = store.create("program", &own, &me, 0).expect("an image");
    let rights = rights(Credentials { uid, gid: uid, groups: vec![uid] });
    let core = file_for(&rights);
    let bytes = core.len() as u64 + 10;
    for (name, contents) in [("pages-1.img", b"the memory".as_slice()), ("core-7.img", &core)] {
        fs::write(entry.path.join("criu").join(name), contents).expect("a file");
    }
    let manifest = Manifest::new("program", rights, &own, &tree, Needs::default());
    let image = store.complete(&entry, &Manifest { threads: vec![7], ..manifest }, &|| false).expect("complete");
    assert_eq!((image.uid, image.bytes, image.damage), (uid, bytes, None));
    entry.record(uid, &Stage::Saved).expect("a record");
    entry
}

/// Replaces a file of an image, as if the image had been complete with it.
fn complete_with(store: &Store, entry: &Entry, name: &str, contents: Option<&[u8]>) -> Result<Image, Refusal> {
    let criu = entry.path.join("criu");
    let manifest = store.owned(entry, OWNER).expect("an image");
    fs::set_permissions(&criu, Permissions::from_mode(0o755)).expect("permissions");
    drop(fs::remove_file(criu.join(name)));
    if let Some(contents) = contents {
        fs::write(criu.join(name), contents).expect("a file");
    }
    store.complete(entry, &manifest, &|| false)
}

#[test]
fn an_image_that_claims_other_rights_is_not_used() {
    let (_directory, store, entry) = store();
    let rights = store.verify(&entry, OWNER).expect("an image").rights;
    let forged = file_with_capabilities(&rights);
    let cases: [(&str, Option<&[u8]>, &str); 6] = [
        ("core-7.img", Some(&forged), "core-7.img claims capabilities"),
        ("core-7.img", Some(&[0; 2 << 20]), "too long"),
        ("core-7.img", None, "other threads"),
        ("core-8.img", Some(&file_for(&rights)), "other threads"),
        ("core-x.img", Some(b""), "core-x.img is unknown"),
        ("rlimit-7.img", Some(b""), "rlimit-7.img claims rights"),
    ];
    for (name, contents, expected) in cases {
        let why = complete_with(&store, &entry, name, contents).expect_err(expected).to_string();
        assert!(why.contains(expected), "{why}, not {expected}");
        // The image is signed, as by an earlier version that did not check claims.
        assert_eq!(refusal(&store, &entry), why);
        drop(fs::remove_file(entry.path.join("criu").join(name)));
        complete_with(&store, &entry, "core-7.img", Some(&file_for(&rights))).expect("as before");
    }
}

fn refusal(store: &Store, entry: &Entry) -> String {
    store.verify(entry, OWNER).expect_err("the image is refused").to_string()
}

#[test]
fn a_complete_image_is_accepted_for_its_owner_alone() {
    let (_directory, store, entry) = store();
    assert_eq!(store.verify(&entry, OWNER).expect("it is right").rights.owner.uid, OWNER);
    for other in [OWNER + 1, 0] {
        let why = store.verify(&entry, other).expect_err("another user").to_string();
        assert!(why.contains("belongs to another user"), "{why}");
    }
    assert_eq!(store.list(None, 0).expect("images").iter().map(|image| &image.name).collect::<Vec<_>>(), [&entry.name]);
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
    assert!(store.list(None, 0).expect("images")[0].damage.as_deref().is_some_and(|why| why.contains("not signed")));
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
fn images_of_trusted_hosts_are_accepted() {
    let (_elsewhere, other, foreign) = store();
    let (directory, store, entry) = store();
    for part in [MANIFEST, SIGNATURE] {
        fs::copy(foreign.path.join(part), entry.path.join(part)).expect("a copy");
    }
    assert!(refusal(&store, &entry).contains("trusts no host that has"));
    let trusted = directory.0.join(TRUSTED);
    fs::create_dir(&trusted).expect("a directory");
    fs::copy(other.path.join(KEY), trusted.join("host")).expect("the other host's key");
    fs::write(trusted.join("short"), "no key").expect("a file");
    let opened = Store::open(&directory.0).expect("a store");
    opened.verify(&entry, OWNER).expect("a trusted host has signed it");
    assert!(opened.verify(&entry, OWNER + 1).is_err(), "it still belongs to its owner");
    // A key that others can change is not trusted.
    fs::set_permissions(trusted.join("host"), Permissions::from_mode(0o666)).expect("permissions");
    assert!(refusal(&Store::open(&directory.0).expect("a store"), &entry).contains("trusts no host that has"));
}

#[test]
fn an_image_that_was_sent_is_restored_only_by_an_order() {
    let (directory, store, entry) = store();
    for host in ["", "-oProxyCommand=x", "a b", "a/b"] {
        assert!(entry.send(OWNER, host.into()).is_err(), "{host:?}");
    }
    entry.check_restorable().expect("it was not sent");
    entry.send(OWNER, "gpu2".into()).expect("it was sent");
    entry.send(OWNER, "gpu2".into()).expect("again");
    let why = entry.send(OWNER, "gpu3".into()).expect_err("it may run on gpu2").to_string();
    assert!(why.contains("was sent to gpu2"), "{why}");
    let why = entry.check_restorable().expect_err("it may run there").to_string();
    assert!(why.contains("was sent to gpu2") && why.contains("nvsharectl restore --sent"), "{why}");
    let name = entry.name.clone();
    assert_eq!(store.find(&name).map(|image| image.place), Some(Place::Sent("gpu2".into())));
    // Helpers that settle leave it as it is.
    drop(entry);
    assert!(store.settle() && directory.0.join(&name).exists());
    let entry = store.lock(&name).expect("an image").expect("no helper is at work");
    assert!(entry.check_restorable().is_err());
    entry.claim(OWNER).expect("an order");
    entry.check_restorable().expect("it is the program");
    let process = Identity::of(std::process::id() as i32).expect("its files").expect("this process");
    entry.record(OWNER, &Stage::Restored { process }).expect("a record");
    let why = entry.send(OWNER, "gpu2".into()).expect_err("it runs here").to_string();
    assert!(why.contains("runs as process"), "{why}");
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
    for name in ["", ".", "..", "a/b-1", "../x-1", "key", "a-1/..", "-\0", "-x-7-1-0", &"a-".repeat(40)] {
        assert!(store.lock(name).is_err(), "{name:?}");
    }
}

#[test]
fn names_of_images_are_no_options() {
    let (_directory, store, entry) = store();
    let own = Identity::of(std::process::id() as i32).expect("its files").expect("this process");
    let mut rights = store.owned(&entry, OWNER).expect("an image").rights;
    (rights.owner.uid, rights.owner.gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    for (program, start) in [("-", "program-"), ("", "program-"), ("--delete", "delete-"), ("a-b", "a-b-")] {
        let (entry, _) = store.create(program, &own, &rights, 0).expect("an image");
        assert!(entry.name.starts_with(start) && is_name(&entry.name), "{}", entry.name);
    }
}

/// `nvsharectl hibernate --send` searches for these parts.
#[test]
fn records_contain_what_the_sender_searches_for() {
    let (_directory, _store, entry) = store();
    let contains = |part: &str| fs::read_to_string(entry.path.join("record")).expect("a record").contains(part);
    let sent = nvshare_hibernate::sent_record("gpu2");
    assert!(contains(nvshare_hibernate::SAVED_RECORD) && !contains(&sent));
    entry.send(OWNER, "gpu2".into()).expect("it was sent");
    assert!(contains(&sent) && !contains(nvshare_hibernate::SAVED_RECORD));
    let process = Identity::of(std::process::id() as i32).expect("its files").expect("this process");
    for stage in [Stage::Restoring { scope: scope() }, Stage::Restored { process }] {
        entry.record(OWNER, &stage).expect("a record");
        assert!(!contains(&sent) && !contains(nvshare_hibernate::SAVED_RECORD), "{stage:?}");
    }
}

/// A process that may be stopped and ended.
fn process() -> (std::process::Child, Identity) {
    let child = std::process::Command::new("sleep").arg("1000").spawn().expect("a process");
    let process = Identity::of(child.id() as i32).expect("its files").expect("it runs");
    (child, process)
}

fn is_stopped(process: &Identity) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.pid)).expect("it lives");
    stat.contains(") T ")
}

fn scope() -> Scope {
    Scope::new("test", OWNER).expect("random numbers")
}

#[test]
fn a_partial_image_is_deleted_once_no_helper_is_at_work() {
    let (_directory, store, entry) = store();
    let (mut child, process) = process();
    let _stopped = Tree::stop(&process).expect("it is stopped");
    entry.record(OWNER, &Stage::Saving { process: process.clone(), scope: scope(), expected: 0 }).expect("a record");
    assert!(!store.settle(), "a helper holds the lock");
    let name = entry.name.clone();
    drop(entry);
    assert!(store.settle() && store.lock(&name).is_err());
    assert!(!is_stopped(&process), "the program continues");
    child.kill().expect("killed");
    child.wait().expect("it has ended");
}

#[test]
fn the_process_of_a_complete_image_is_ended() {
    let (_directory, store, entry) = store();
    let (mut child, process) = process();
    entry.record(OWNER, &Stage::Ending { process }).expect("a record");
    let name = entry.name.clone();
    drop(entry);
    // The process is a zombie until it is waited for.
    let reaper = std::thread::spawn(move || child.wait().expect("it has ended"));
    assert!(store.settle());
    assert!(!reaper.join().expect("no panic").success());
    let entry = store.lock(&name).expect("an image").expect("no helper is at work");
    assert_eq!(entry.stage().expect("a record"), Stage::Saved);
    store.verify(&entry, OWNER).expect("the image can be restored");
}

/// For example because the machine has no file descriptors left, a backup has linked the record, or
/// another version has written it.
#[test]
fn a_record_that_cannot_be_read_changes_nothing() {
    type Damage = fn(&Path) -> io::Result<()>;
    let damages: [(Damage, &str); 4] = [
        (|record| fs::hard_link(record, record.with_file_name("backup")), "only the helper can change"),
        (|record| fs::write(record, "{\"version\":3,\"stage\":\"Archived\"}"), "version 3"),
        (|record| fs::write(record, ""), "EOF"),
        (|record| fs::write(record, vec![b' '; 8192]), "too long"),
    ];
    for (damage, expected) in damages {
        let (_directory, store, entry) = store();
        let (mut child, process) = process();
        let _stopped = Tree::stop(&process).expect("it is stopped");
        entry
            .record(OWNER, &Stage::Saving { process: process.clone(), scope: scope(), expected: 0 })
            .expect("a record");
        damage(&entry.path.join("record")).expect("damage");
        assert!(entry.stage().is_err());
        let (name, path) = (entry.name.clone(), entry.path.clone());
        drop(entry);
        assert!(!store.settle(), "it is not finished");
        assert!(path.join("criu/core-7.img").exists() && is_stopped(&process), "nothing has changed");
        let image = store.find(&name).expect("it is listed");
        assert!(image.damage.as_deref().is_some_and(|why| why.contains(expected)), "{image:?}, not {expected}");
        child.kill().expect("killed");
        child.wait().expect("it has ended");
    }
}

#[test]
fn images_of_other_versions_are_not_deleted() {
    let (_directory, store, entry) = store();
    let write = |text: &str| fs::write(entry.path.join("record"), text).expect("a file");
    for version in [VERSION - 1, VERSION + 1] {
        write(&format!("{{\"version\":{version},\"stage\":\"Archived\"}}"));
        let why = store.delete(&entry, OWNER).expect_err("another version").to_string();
        assert!(why.contains(&format!("version {version}")) && entry.path.exists(), "{why}");
    }
    // No version can read this record.
    write("{\"version\"");
    assert!(store.delete(&entry, OWNER + 1).is_err(), "another user");
    assert_eq!(store.delete(&entry, OWNER).expect("deleted"), Reply::Done);
    assert!(!entry.path.exists());
}

#[test]
fn an_image_that_lost_its_record_is_kept() {
    let (_directory, store, entry) = store();
    fs::remove_file(entry.path.join("record")).expect("removed");
    let path = entry.path.clone();
    drop(entry);
    assert!(store.settle() && path.join(MANIFEST).exists());
}

#[test]
fn each_user_has_pages_and_limits_of_its_own() {
    let (_directory, store, first) = store();
    // Many images of another user, all newer.
    let template = image(&store, OWNER + 1);
    for number in 0..MAX_LISTED + 20 {
        let path = store.path.join(format!("program-{number}-1-0"));
        fs::create_dir(&path).expect("a directory");
        for part in [MANIFEST, SIGNATURE, "record"] {
            fs::copy(template.path.join(part), path.join(part)).expect("a copy");
        }
    }
    assert_eq!(store.list(Some(OWNER), 0).expect("images").len(), 1);
    assert_eq!(store.find(&first.name).map(|image| image.uid), Some(OWNER));
    let page = store.list(None, 0).expect("images");
    assert_eq!((page.len(), store.list(None, MAX_LISTED).expect("images").len()), (MAX_LISTED, 22));
    let longest = |image: Image| Image { name: "x".repeat(MAX_NAME), damage: Some("\u{1f480}".repeat(200)), ..image };
    let reply = nvshare_hibernate::Reply::Images(page.into_iter().map(longest).collect());
    let length = nvshare_hibernate::encode(&reply).len();
    assert!(length <= nvshare_hibernate::MAX_PACKET, "{length}");
    store.check_room(OWNER, 1).expect("one image");
    let why = store.check_room(OWNER + 1, 1).expect_err("too many images").to_string();
    assert!(why.contains("has 64 images"), "{why}");
    let why = store.check_room(OWNER, u64::MAX / 4).expect_err("too large").to_string();
    assert!(why.contains("images may have"), "{why}");
}

#[test]
fn an_image_that_is_being_saved_is_listed_and_counts_with_its_estimate() {
    let (_directory, store, entry) = store();
    let (mut child, process) = process();
    let stage = |expected| Stage::Saving { process: process.clone(), scope: scope(), expected };
    entry.record(OWNER, &stage(1 << 30)).expect("a record");
    let [image] = &store.list(Some(OWNER), 0).expect("images")[..] else { panic!("one image") };
    let place = Place::Saving { process: process.pid, expected: 1 << 30 };
    assert_eq!((&image.place, image.program.as_str()), (&place, "program"));
    assert!(image.bytes > 10 && image.saved > 0 && image.damage.is_none(), "{image:?}");
    store.check_room(OWNER, 1).expect("there is room");
    let half = store.disk().expect("a disk").size / SHARE_OF_USER;
    entry.record(OWNER, &stage(half)).expect("a record");
    let why = store.check_room(OWNER, 1).expect_err("no room beside it").to_string();
    assert!(why.contains("images may have"), "{why}");
    let others = store.room_of_others(&entry, OWNER).expect("the other images");
    store.check_written(&entry, others).expect("its own estimate does not count against it");
    child.kill().expect("killed");
    child.wait().expect("it has ended");
}

/// CRIU may write more than was estimated.
#[test]
fn an_image_that_became_larger_than_the_users_share_is_not_completed() {
    let (_directory, store, entry) = store();
    let criu = entry.path.join("criu");
    fs::set_permissions(&criu, Permissions::from_mode(0o755)).expect("permissions");
    let more = File::create(criu.join("pages-2.img")).expect("a file");
    more.set_len(store.disk().expect("a disk").size / SHARE_OF_USER).expect("a sparse file");
    let others = store.room_of_others(&entry, OWNER).expect("the other images");
    let why = store.check_written(&entry, others).expect_err("too large").to_string();
    assert!(why.contains("images may have"), "{why}");
    let manifest = store.owned(&entry, OWNER).expect("an image");
    assert_eq!(store.complete(&entry, &manifest, &|| false).expect_err("too large").to_string(), why);
}

#[test]
fn an_image_is_not_completed_after_its_request_was_cancelled() {
    let (_directory, store, entry) = store();
    let manifest = store.verify(&entry, OWNER).expect("an image");
    let why = store.complete(&entry, &manifest, &|| true).expect_err("cancelled").to_string();
    assert!(why.contains("it was cancelled"), "{why}");
}

#[test]
fn a_manifest_that_is_too_long_to_be_read_is_not_completed() {
    let (_directory, store, entry) = store();
    let manifest = store.verify(&entry, OWNER).expect("an image");
    let threads = (1..MAX_MANIFEST as i32 / 4).collect();
    let why = store.complete(&entry, &Manifest { threads, ..manifest }, &|| false).expect_err("too long").to_string();
    assert!(why.contains("too long"), "{why}");
}

/// The owner can create links in `criu/` while CRIU writes.
#[test]
fn linked_files_are_not_given_to_root() {
    let (directory, store, entry) = store();
    let manifest = store.verify(&entry, OWNER).expect("an image");
    let victim = directory.0.join("victim");
    fs::write(&victim, "not CRIU's").expect("a file");
    fs::set_permissions(&victim, Permissions::from_mode(0o640)).expect("permissions");
    fs::set_permissions(entry.path.join("criu"), Permissions::from_mode(0o755)).expect("permissions");
    fs::hard_link(&victim, entry.path.join("criu/z.img")).expect("a link");
    let why = store.complete(&entry, &manifest, &|| false).expect_err("a link").to_string();
    assert!(why.contains("not a file of its own"), "{why}");
    assert_eq!(fs::metadata(&victim).expect("a file").mode() & 0o777, 0o640);
}

#[test]
fn an_image_that_exists_is_not_touched_by_a_second_one() {
    let (_directory, store, entry) = store();
    let again = image(&store, OWNER);
    assert_ne!(entry.name, again.name, "names are random");
    store.verify(&entry, OWNER).expect("it is as it was");
}

#[test]
fn the_shown_error_of_criu_is_the_first_that_it_did_not_survive() {
    let (_directory, _store, entry) = store();
    let errors = |lines: &[&str]| {
        fs::write(entry.path.join("work/dump.log"), lines.join("\n")).expect("a log");
        entry.error_in("dump.log", &["Can't setup"])
    };
    let limit =
        "(00.000012) Error (criu/util.c:1405): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted";
    let reason = "(00.012000) Error (criu/sk-unix.c:884): unix: External socket is used";
    let end = "(00.012100) Error (criu/cr-dump.c:2128): Dumping FAILED.";
    assert_eq!(
        errors(&["(00.000001) Version: 4.1.1", limit, reason, end]),
        Some("unix: External socket is used".into())
    );
    assert_eq!(errors(&[reason, limit, end]), Some("unix: External socket is used".into()));
    assert!(errors(&[limit]).is_some_and(|error| error.starts_with("rlimit: ")));
    assert_eq!(errors(&["(00.000001) Version: 4.1.1"]), None);
}

/// Runs a function while this process can open no files.
fn without_descriptors<T>(run: impl FnOnce() -> T) -> T {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let before = getrlimit(Resource::Nofile);
    let mut none = getrlimit(Resource::Nofile);
    none.current = Some(0);
    setrlimit(Resource::Nofile, none).expect("a limit");
    let result = run();
    setrlimit(Resource::Nofile, before).expect("a limit");
    result
}

/// If it counted as ended, the image would be deleted, or would count beside its program.
#[test]
fn a_process_that_cannot_be_read_has_not_ended() {
    let (_directory, store, entry) = store();
    let (mut child, process) = process();
    let stopped = Tree::stop(&process).expect("it is stopped");
    let until = std::time::Instant::now();
    let (given_up, ended, lives) = without_descriptors(|| {
        (
            entry.give_up(&process),
            entry.end(OWNER, &process, until),
            Stage::Restored { process: process.clone() }.process(),
        )
    });
    assert!(given_up.is_err() && ended.is_err());
    assert_eq!(lives, Some(process.pid));
    assert!(is_stopped(&process));
    store.verify(&entry, OWNER).expect("the image is still there");
    stopped.resume(process.uid);
    child.kill().expect("killed");
    child.wait().expect("it has ended");
}

#[test]
fn the_rest_of_a_deleted_image_is_deleted_and_no_image() {
    let (directory, store, entry) = store();
    let name = entry.name.clone();
    drop(entry);
    let rest = directory.0.join(format!("{DELETED}{name}"));
    fs::rename(directory.0.join(&name), &rest).expect("the image");
    assert!(store.list(Some(OWNER), 0).expect("a list").is_empty());
    assert!(store.settle() && !rest.exists());
}

#[test]
fn parts_of_copies_are_deleted_when_no_sender_continues() {
    let (directory, store, entry) = store();
    let part = directory.0.join(format!("{INCOMING}{}", entry.name));
    fs::create_dir_all(part.join("criu")).expect("a directory");
    let file = File::create(part.join("criu/pages-1.img")).expect("a file");
    // As rsync does.
    file.set_modified(UNIX_EPOCH).expect("a time");
    drop(entry);
    assert!(store.settle() && part.exists(), "the copy has just begun");
    assert_eq!(store.list(None, 0).expect("images").len(), 1, "a part is no image");
    store.delete_rest(Duration::ZERO).expect("deleted");
    assert!(!part.exists());
    assert_eq!(store.list(None, 0).expect("images").len(), 1);
}
