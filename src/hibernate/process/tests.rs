//! Which processes can be saved.

use super::*;
use std::{
    io::Read,
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
};
use test_support::Directory;

fn child() -> (Child, Identity) {
    let child = Command::new("sleep").arg("1000").spawn().expect("a process");
    let identity = Identity::of(child.id() as i32).expect("its files").expect("it runs");
    (child, identity)
}

fn state(pid: i32) -> char {
    Stat::of(pid).expect("its file").expect("it lives").state
}

#[test]
fn only_processes_of_the_users_slice_that_systemd_does_not_start_again_are_saved() {
    for place in ["session-2.scope", "user@1000.service/app.slice/run-1.scope", "nvshare-a.scope"] {
        check_place(&format!("/user.slice/user-1000.slice/{place}"), 1000).expect(place);
    }
    for (place, expected) in [
        ("/system.slice/slurmstepd.scope/job_1", "outside of the slice"),
        ("/system.slice/train.service", "outside of the slice"),
        ("/user.slice/user-1001.slice/session-2.scope", "outside of the slice"),
        ("/", "outside of the slice"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/train.service", "service \"train.service\""),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/train.service/inner", "service \"train.service\""),
    ] {
        let why = check_place(place, 1000).expect_err(place);
        assert!(why.contains(expected), "{place}: {why}");
    }
}

#[test]
fn restrictions_of_any_thread_are_refused() {
    let directory = Directory::new();
    let owner = Credentials { uid: 1000, gid: 1000, groups: vec![1000] };
    let status = "Uid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nGroups:\t1000 \nCapInh:\t0\nCapPrm:\t0\n\
        CapEff:\t0\nCapAmb:\t0\nNoNewPrivs:\t0\nSeccomp:\t0\nTracerPid:\t0\n";
    let check = |status: &str, is_restored| {
        fs::write(directory.0.join("status"), status).expect("a file");
        check_task(&directory.0, 1000, &owner, is_restored)
    };
    check(status, false).expect("it has no restrictions");
    for (from, to, expected) in [
        ("Seccomp:\t0", "Seccomp:\t2", "seccomp"),
        ("NoNewPrivs:\t0", "NoNewPrivs:\t1", "NoNewPrivs"),
        ("CapAmb:\t0", "CapAmb:\t1", "capabilities"),
        ("TracerPid:\t0", "TracerPid:\t5", "debugged"),
        ("Groups:\t1000", "Groups:\t27", "another user or group"),
    ] {
        let why = check(&status.replace(from, to), false).expect_err(to);
        assert!(why.contains(expected), "{to}: {why}");
    }
    // Each restored program has the flag.
    check(&status.replace("NoNewPrivs:\t0", "NoNewPrivs:\t1"), true).expect("it is saved again");
}

#[test]
fn all_threads_have_stopped_when_a_tree_has() {
    // A thread that starts another one all the time.
    let script = "import threading\ndef go():\n threading.Thread(target=go).start()\n\
        for _ in range(8): go()\n";
    let Ok(mut busy) = Command::new("python3").args(["-c", script]).stderr(std::process::Stdio::null()).spawn() else {
        return test_support::skip("python3");
    };
    let identity = Identity::of(busy.id() as i32).expect("its files").expect("it runs");
    sleep(Duration::from_millis(300));
    for _ in 0..20 {
        let stopped = Tree::stop(&identity).expect("it is stopped");
        let states: Vec<char> = tasks(&directory(identity.pid))
            .expect("threads")
            .iter()
            .filter_map(|task| Some(Stat::read(task).expect("its file")?.state))
            .collect();
        assert!(states.iter().all(|state| matches!(state, 'T' | 'Z' | 'X')), "{states:?}");
        stopped.resume(identity.uid);
    }
    busy.kill().expect("killed");
    busy.wait().expect("it has ended");
}

#[test]
fn only_processes_of_the_program_and_its_user_get_signals() {
    let (mut child, identity) = child();
    let pid = identity.pid;
    // As if the process ID had been given to another process, or the process to another user.
    for other in [
        Identity { started: identity.started + 1, ..identity.clone() },
        Identity { uid: Some(identity.uid.expect("a user") + 1), ..identity.clone() },
        Identity { boot: "other".into(), ..identity.clone() },
    ] {
        assert!(Tree::of(&other).is_ok_and(|tree| tree.is_none()), "{other:?}");
        assert!(Tree::stop(&other).is_err() && !other.lives().expect("its files"), "{other:?}");
        assert_ne!(state(pid), 'T');
    }
    let tree = Tree::of(&identity).expect("its files").expect("it lives");
    for uid in [None, identity.uid.map(|uid| uid + 1)] {
        tree.signal(uid, Signal::STOP);
        tree.kill(uid, Instant::now()).expect("none is meant");
        assert_ne!(state(pid), 'T');
    }
    tree.check_running().expect("it runs");
    let stopped = Tree::stop(&identity).expect("it is stopped");
    assert!(stopped.check_running().is_err_and(|why| why.to_string().contains("is stopped")));
    stopped.resume(identity.uid);
    child.kill().expect("killed");
    child.wait().expect("it has ended");
}

#[test]
fn connections_are_refused_unless_they_are_to_be_closed() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
    let own = std::process::id() as i32;
    check_files(own, false).expect("it only listens");
    let connection = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
    let why = check_files(own, false).expect_err("it is connected");
    assert!(why.contains("--close-connections"), "{why}");
    check_files(own, true).expect("the connection is closed later");
    drop(connection);
}

#[test]
fn shared_memory_counts_once() {
    let file = rustix::fs::memfd_create("shared", rustix::fs::MemfdFlags::empty()).expect("a file in memory");
    let size = 64 << 20;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, size).expect("memory");
    let mut command = Command::new("sh");
    let mut shell = command.args(["-c", "sleep 1000 & echo; wait"]).stdout(Stdio::piped()).spawn().expect("a shell");
    // Written when both processes run.
    shell.stdout.as_mut().expect("its output").read_exact(&mut [0]).expect("a line");
    let root = Identity::of(shell.id() as i32).expect("its files").expect("it runs");
    let tree = Tree::of(&root).expect("its files").expect("it runs");
    assert_eq!(tree.pids().len(), 2);
    let memory = tree.memory();
    assert!((size..size * 2).contains(&memory), "{memory}");
    tree.signal(root.uid, Signal::KILL);
    shell.wait().expect("it has ended");
}

#[test]
fn only_shared_memory_without_a_name_is_saved() {
    let map = |line: &str| shared_mapping(7, line);
    let range = "00400000-7f0000402000";
    assert_eq!(
        map(&format!("{range} rw-s 00000000 00:01 5  /memfd:x (deleted)")),
        Some("/proc/7/map_files/400000-7f0000402000".into())
    );
    for path in ["/dev/zero (deleted)", "/SYSV00000000 (deleted)", "/dev/shm/a b (deleted)"] {
        assert!(map(&format!("{range} rw-s 00000000 00:01 5        {path}")).is_some(), "{path}");
    }
    for other in [
        "rw-p 00000000 00:01 5 /memfd:x (deleted)",
        "rw-s 00000000 00:01 5 /dev/shm/named",
        "rw-s 00000000 00:01 5 /home/a/file (deleted)",
        "rw-s 00000000 00:00 0 ",
        "",
    ] {
        assert_eq!(map(&format!("{range} {other}")), None, "{other}");
    }
}
