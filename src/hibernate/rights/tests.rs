//! Rights that a forged image may claim, in a directory that looks like `/proc`.

use super::*;
use test_support::Directory;

const STATUS: &str = "Name:\tx\nUid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nGroups:\t27 1000 \nCapInh:\t0\n\
    CapPrm:\t0000000000000000\nCapEff:\t0\nCapBnd:\t000001ffffffffff\nCapAmb:\t0\nNoNewPrivs:\t1\nSeccomp:\t0\n";

fn limits_with(files: &str) -> String {
    let mut text = format!("{:<25} {:<20} {:<20} {:<10}\n", "Limit", "Soft Limit", "Hard Limit", "Units");
    for resource in 0..LIMITS {
        let hard = if resource == libc::RLIMIT_NOFILE as usize { files } else { "unlimited" };
        text += &format!("{:<25} {:<20} {:<20} {:<10}\n", "Max something", "0", hard, "files");
    }
    text
}

/// Creates process 7 with two threads.
fn process() -> (Directory, PathBuf) {
    let proc = Directory::new();
    let process = proc.0.join("7");
    for thread in ["7", "8"] {
        fs::create_dir_all(process.join("task").join(thread)).expect("a directory");
        fs::write(process.join("task").join(thread).join("status"), STATUS).expect("a file");
    }
    fs::write(process.join("limits"), limits_with("1024")).expect("a file");
    fs::write(process.join("loginuid"), "1000").expect("a file");
    (proc, process)
}

fn recorded(process: &Path) -> Rights {
    let owner = Credentials { uid: 1000, gid: 1000, groups: vec![27, 1000] };
    Rights::of(owner, Some(1000), &[process.to_owned()]).expect("rights")
}

#[test]
fn a_task_with_more_rights_than_recorded_is_refused() {
    let (proc, process) = process();
    let rights = recorded(&process);
    assert_eq!(rights.limits[libc::RLIMIT_NOFILE as usize], 1024);
    assert_eq!(rights.limits[0], u64::MAX);
    rights.check(&proc.0, &[7]).expect("it has what it had");
    let second = process.join("task/8/status");
    for (from, to, expected) in [
        ("CapInh:\t0", "CapInh:\t100", "capabilities"),
        ("CapPrm:\t0000000000000000", "CapPrm:\t0000010000000100", "capabilities"),
        ("CapEff:\t0", "CapEff:\t1", "capabilities"),
        ("CapAmb:\t0", "CapAmb:\t100", "capabilities"),
        ("CapAmb:\t0\n", "", "capabilities"),
        ("NoNewPrivs:\t1", "NoNewPrivs:\t0", "set-user-ID"),
        ("NoNewPrivs:\t1\n", "", "set-user-ID"),
        ("Uid:\t1000\t1000", "Uid:\t1000\t0", "another user"),
        ("Gid:\t1000\t1000\t1000\t1000", "Gid:\t6\t6\t6\t6", "another user"),
        ("Groups:\t27 1000", "Groups:\t6 27 1000", "another user"),
    ] {
        let forged = STATUS.replace(from, to);
        assert_ne!(forged, STATUS, "{from}");
        fs::write(&second, forged).expect("a file");
        let why = rights.check(&proc.0, &[7]).expect_err("a thread has more");
        assert!(why.contains(expected) && why.contains("process 7"), "{to}: {why}");
    }
    fs::write(&second, STATUS).expect("a file");
    rights.check(&proc.0, &[7]).expect("it has what it had");
}

#[test]
fn higher_limits_and_other_logins_are_refused() {
    let (proc, process) = process();
    let rights = recorded(&process);
    for (limit, is_allowed) in [("1023", true), ("1025", false), ("unlimited", false)] {
        fs::write(process.join("limits"), limits_with(limit)).expect("a file");
        assert_eq!(rights.check(&proc.0, &[7]).is_ok(), is_allowed, "{limit}");
    }
    fs::write(process.join("limits"), limits_with("1024")).expect("a file");
    // An unset login may be set by the process itself.
    for login in ["4294967295", "1001"] {
        fs::write(process.join("loginuid"), login).expect("a file");
        assert!(rights.check(&proc.0, &[7]).is_err_and(|why| why.contains("login")), "{login}");
    }
}

#[test]
fn rights_that_cannot_be_read_are_refused() {
    let (proc, process) = process();
    let rights = recorded(&process);
    assert!(rights.check(&proc.0, &[9]).is_err_and(|why| why.contains("cannot be checked")));
    fs::write(process.join("limits"), "").expect("a file");
    assert!(rights.check(&proc.0, &[7]).is_err());
    fs::remove_file(process.join("task/7/status")).expect("removed");
    assert!(rights.check(&proc.0, &[7]).is_err());
}
