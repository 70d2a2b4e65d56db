//! The daemon as a service: its sockets, configuration, messages to the service manager, and
//! record.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nvshare_wire::SchedulerMessage;
use test_support::artifact;
use test_support::daemon::*;
use test_support::record::Record;

#[test]
fn a_second_daemon_fails_to_start_and_disturbs_no_client() {
    let mut daemon = Daemon::start();
    let client = daemon.client();
    let second = Output::of(command(&daemon.directory.0).arg("--no-bus"));
    assert_eq!(second.code, Some(1));
    let expected = format!(
        "nvshare-scheduler: another nvshare-scheduler (process {}) already serves {}. Stop it first, or choose another \
         path with --socket\n",
        daemon.child.id(),
        daemon.socket().display()
    );
    assert_eq!(second.stderr, expected);
    client.attach();
    daemon.client();
    daemon.signal(libc::SIGTERM);
    assert!(daemon.wait().success());
}

#[test]
fn a_killed_daemons_socket_is_replaced() {
    let mut daemon = Daemon::start();
    daemon.child.kill().expect("it runs");
    daemon.wait();
    assert!(exists(daemon.socket()), "a killed daemon cleans nothing up");
    let mut next = command(&daemon.directory.0).arg("--no-bus").stderr(Stdio::null()).spawn().expect("it starts");
    let deadline = Instant::now() + PATIENCE;
    while Client::connect(&daemon.socket()).is_err() {
        assert!(Instant::now() < deadline, "nobody serves the socket");
        std::thread::sleep(Duration::from_millis(5));
    }
    daemon.client();
    kill(next.id(), libc::SIGTERM);
    assert!(wait(&mut next).success());
    assert!(!exists(daemon.socket()), "an ending daemon removes its socket");
}

#[test]
fn a_file_that_is_no_stale_socket_is_left_unchanged() {
    let directory = Directory::new();
    let run = directory.0.join("run");
    std::fs::create_dir(&run).expect("a directory");
    let path = run.join("scheduler.sock");

    std::fs::write(&path, "precious").expect("a file");
    let refused = Output::of(command(&directory.0).arg("--no-bus"));
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("exists and is not a socket"), "{}", refused.stderr);
    assert_eq!(std::fs::read_to_string(&path).expect("the file"), "precious");

    std::fs::remove_file(&path).expect("the file");
    let _somebody = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
    let refused = Output::of(command(&directory.0).arg("--no-bus"));
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("another process already answers"), "{}", refused.stderr);
    std::os::unix::net::UnixStream::connect(&path).expect("it is still served");
}

#[test]
fn every_user_may_connect_and_only_root_may_control() {
    use std::os::unix::fs::PermissionsExt;
    let daemon = Daemon::start();
    let mode = |path: &Path| std::fs::metadata(path).expect("a socket").permissions().mode() & 0o777;
    assert_eq!(mode(&daemon.socket()), 0o666);
    assert_eq!(mode(&daemon.control()), 0o660);
}

#[test]
fn sigterm_ends_the_daemon_and_disconnects_clients() {
    let mut daemon = Daemon::start();
    let client = daemon.client();
    client.attach();
    daemon.signal(libc::SIGTERM);
    client.until_end();
    assert!(daemon.wait().success());
    // The daemon removes its sockets, their locks and the directories that it created. The daemon
    // keeps the files that programs use to take turns without a scheduler.
    let names = |directory: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(directory).expect("a directory").flatten();
        let mut names: Vec<String> = entries.map(|entry| entry.file_name().into_string().expect("UTF-8")).collect();
        names.sort();
        names
    };
    assert_eq!(names(&daemon.directory.0), ["run"]);
    assert_eq!(names(&daemon.directory.0.join("run")), ["here", "turn"].map(|file| format!("nvshare-{GPU}.{file}")));
}

#[test]
fn a_lack_of_descriptors_neither_ends_the_daemon_nor_makes_it_spin() {
    let daemon = Daemon::start_with(|command, _| {
        // SAFETY: `setrlimit` is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                let limit = libc::rlimit { rlim_cur: 48, rlim_max: 48 };
                libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
                Ok(())
            })
        };
    });
    let first = daemon.client();
    let crowd: Vec<Client> = (0..60)
        .map(|_| {
            let client = Client::connect(&daemon.socket()).expect("the daemon listens");
            client.send_raw(hello().encode(0).as_bytes());
            client
        })
        .collect();
    let welcomed = crowd.iter().filter(|c| matches!(c.receive(), Some(SchedulerMessage::Welcome { .. }))).count();
    assert!((5..40).contains(&welcomed), "{welcomed} welcomed");
    let before = daemon.cpu();
    std::thread::sleep(Duration::from_millis(500)); // a spinning daemon would use CPU time
    let used = daemon.cpu() - before;
    assert!(used < Duration::from_millis(200), "{used:?} of CPU while nothing happens");
    first.attach();
    drop(crowd);
    let deadline = Instant::now() + PATIENCE;
    loop {
        let client = Client::connect(&daemon.socket()).expect("the daemon listens");
        client.send_raw(hello().encode(0).as_bytes());
        if matches!(client.receive(), Some(SchedulerMessage::Welcome { .. })) {
            break;
        }
        assert!(Instant::now() < deadline, "nobody is let in although there is room");
    }
}

/// A helper that a killed daemon was just starting has the daemon's lock file open for a moment.
#[test]
fn the_lock_of_a_daemon_that_is_gone_is_awaited() {
    let directory = Directory::new();
    let run = directory.0.join("run");
    std::fs::create_dir(&run).expect("a directory");
    let mut lock = File::create(run.join("scheduler.sock.lock")).expect("a file");
    writeln!(lock, "{}", i32::MAX).expect("written");
    lock.lock().expect("locked");
    let helper = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(lock);
    });
    Daemon::start_in(directory, None, |_, _| {}).client();
    helper.join().expect("no panic");
}

#[test]
fn systemd_can_pass_the_socket() {
    let directory = Directory::new();
    let path = directory.0.join("given.sock");
    // SAFETY: the address is a live `sockaddr_un`, and the descriptor is new and owned here.
    let listener = unsafe {
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0);
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        address.sun_family = libc::AF_UNIX as u16;
        for (to, from) in address.sun_path.iter_mut().zip(std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str())) {
            *to = *from as i8;
        }
        let size = size_of_val(&address) as libc::socklen_t;
        assert_eq!(libc::bind(fd, (&raw const address).cast(), size), 0);
        assert_eq!(libc::listen(fd, 16), 0);
        OwnedFd::from_raw_fd(fd)
    };
    let start = |names: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\""]).arg(artifact("nvshare-scheduler"));
        command.arg("--control-socket").arg(directory.0.join("control/control.sock")).arg("--no-bus");
        command.env("LISTEN_FDS", "1").env("LISTEN_FDNAMES", names);
        let fd = listener.as_raw_fd();
        // SAFETY: `dup2` is async-signal-safe.
        unsafe {
            command.pre_exec(move || if libc::dup2(fd, 3) == 3 { Ok(()) } else { Err(std::io::Error::last_os_error()) })
        };
        command.stderr(Stdio::null()).spawn().expect("it starts")
    };
    let mut daemon = start("clients");
    Client::welcomed(&path).attach();
    kill(daemon.id(), libc::SIGTERM);
    assert!(wait(&mut daemon).success());
    assert!(exists(&path), "a socket that systemd owns is not removed");
    // A client that connects while no daemon runs waits for the next daemon.
    let early = Client::connect(&path).expect("systemd listens");
    early.send(hello());
    let mut daemon = start("clients");
    assert!(matches!(early.receive(), Some(SchedulerMessage::Welcome { .. })));
    kill(daemon.id(), libc::SIGTERM);
    assert!(wait(&mut daemon).success());
    // If a socket has the wrong kind, the daemon refuses to start.
    let mut daemon = start("control");
    assert_eq!(wait(&mut daemon).code(), Some(1));
}

#[test]
fn systemd_is_notified_of_readiness_and_stopping() {
    let directory = Directory::new();
    let notify = std::os::unix::net::UnixDatagram::bind(directory.0.join("notify")).expect("a socket");
    notify.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let said = || {
        let mut buffer = [0; 1024];
        let n = notify.recv(&mut buffer).expect("a notification");
        String::from_utf8_lossy(&buffer[..n]).into_owned()
    };
    let mut daemon = command(&directory.0)
        .arg("--no-bus")
        .env("NOTIFY_SOCKET", directory.0.join("notify"))
        .env("WATCHDOG_USEC", "200000")
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut seen = Vec::new();
    let mut until = |text: &str| {
        while !seen.last().is_some_and(|last: &String| last.contains(text)) {
            seen.push(said());
        }
    };
    until("READY=1");
    until("WATCHDOG=1");
    kill(daemon.id(), libc::SIGHUP);
    until("RELOADING=1");
    until("READY=1");
    kill(daemon.id(), libc::SIGTERM);
    until("STOPPING=1");
    assert!(wait(&mut daemon).success());
    let reloading = seen.iter().find(|text| text.contains("RELOADING=1")).expect("seen above");
    assert!(reloading.contains("MONOTONIC_USEC="), "{reloading}");
}

#[test]
fn an_invalid_configuration_file_prevents_the_start() {
    let directory = Directory::new();
    let config = directory.0.join("nvshare.toml");
    std::fs::write(&config, "time-quantum = \"1ms\"\n").expect("a file");
    let sentence = format!(
        "nvshare-scheduler: {}:1:16: time-quantum: the time quantum cannot be 0.001 seconds: whole seconds from 1 to 3600 are allowed\n",
        config.display()
    );
    for more in [&["--check-config"][..], &["--no-bus"]] {
        let output = Output::of(command(&directory.0).arg("--config").arg(&config).args(more));
        assert_eq!((output.code, &output.stderr), (Some(1), &sentence), "{more:?}");
    }
    let missing = directory.0.join("missing.toml");
    let output = Output::of(command(&directory.0).arg("--config").arg(&missing));
    assert_eq!(output.code, Some(1));
    assert!(output.stderr.contains(&format!("cannot read {}: No such file", missing.display())), "{}", output.stderr);

    std::fs::write(&config, "time-quantum = \"1min\"\n").expect("a file");
    let output = Output::of(command(&directory.0).arg("--config").arg(&config).arg("--check-config"));
    let expected = format!("the configuration has no errors: {}\n", config.display());
    assert_eq!((output.code, output.stdout, output.stderr.as_str()), (Some(0), expected, ""));

    // The configuration includes its drop-ins.
    let drop_in = directory.0.join("nvshare.toml.d/rules.toml");
    std::fs::create_dir(drop_in.parent().expect("a directory")).expect("a directory");
    std::fs::write(&drop_in, "[[rule]]\nunit = \"jupyter\"\nmemory-max = \"8G\"\n").expect("a drop-in");
    let output = Output::of(command(&directory.0).arg("--config").arg(&config).arg("--check-config"));
    let sentence = format!(
        "nvshare-scheduler: {}:2:8: unit: \"jupyter\" cannot match a unit: unit names end with .service or .scope, as \
         in \"jupyter.service\"\n",
        drop_in.display()
    );
    assert_eq!((output.code, output.stderr), (Some(1), sentence));
}

#[test]
fn the_record_file_has_every_memory_move() {
    let daemon = Daemon::start_with(|command, directory| {
        command.arg("--record").arg(directory.join("record"));
    });
    let path = daemon.directory.0.join("record");
    let [first, second] = [daemon.client(), daemon.client()];
    for client in [&first, &second] {
        client.attach();
        client.report(GIB, 0);
    }
    first.request();
    first.until_granted();
    first.report(GIB, GIB);
    first.release();
    first.report(GIB, 0);
    second.request();
    second.until_granted();
    let id = first.id;
    // If a client disconnects without having read all messages, some of the client's messages may
    // stay unread.
    let mut record = Record::new(&path, 1);
    test_support::wait_for("what it has freed", || record.moves().iter().any(|m| m.what == "freed").then_some(()));
    drop(first);
    // The daemon records the disconnect only after the client has closed its connection.
    test_support::wait_for("its end", || record.moves().iter().any(|m| m.what == "disconnect").then_some(()));
    let moves = record.moves();
    let own: Vec<&str> = moves.iter().filter(|m| m.client == id).map(|m| m.what).collect();
    let mut left = own.iter();
    for what in ["connect", "attach", "request", "grant", "mapped", "release", "freed", "disconnect"] {
        assert!(left.any(|seen| *seen == what), "no {what} in its place in {own:?}");
    }
    assert!(moves.is_sorted_by_key(|m| m.ms), "{moves:?}");
    let mapped = moves.iter().find(|m| m.what == "mapped").expect("seen above");
    assert_eq!((mapped.bytes, mapped.pid), (GIB, std::process::id()));

    // The record can be replayed while the scheduler runs, even if the record ends in the middle of
    // a line.
    let text = std::fs::read_to_string(&path).expect("the record");
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    assert!(lines[0].starts_with("{\"kind\":\"nvshare-record\"") && lines.len() > 8, "{text}");
    let replay = |path: &std::path::Path| Output::of(ctl().args(["simulate", "--replay"]).arg(path));
    let replayed = replay(&path);
    assert_eq!((replayed.code, replayed.stderr.as_str()), (Some(0), ""));
    assert!(replayed.stdout.contains(&std::process::id().to_string()), "{}", replayed.stdout);
    let cut = daemon.directory.0.join("cut");
    std::fs::write(&cut, &text[..text.len() - 20]).expect("a file");
    assert_eq!(replay(&cut).code, Some(0));
    std::fs::write(&cut, format!("{}{{\"kind\":\n{}", lines[0], lines[1..].concat())).expect("a file");
    assert!(replay(&cut).stderr.contains("line 2: this line is not an object with a kind"));
}

#[test]
fn a_full_disk_ends_the_record_and_not_the_scheduler() {
    let directory = Directory::new();
    let daemon = Daemon::start_in(directory, None, |command, directory| {
        // A file size limit simulates a full disk: with SIGXFSZ ignored, writes beyond the limit
        // fail.
        let limit = libc::rlimit { rlim_cur: 64 << 10, rlim_max: 64 << 10 };
        let act = move || {
            // SAFETY: `signal` and `setrlimit` get valid arguments.
            let failed = unsafe {
                libc::signal(libc::SIGXFSZ, libc::SIG_IGN) == libc::SIG_ERR
                    || libc::setrlimit(libc::RLIMIT_FSIZE, &limit) != 0
            };
            if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
        };
        // SAFETY: `act` makes only async-signal-safe system calls.
        unsafe { command.pre_exec(act) };
        command.arg("--record").arg(directory.join("record"));
    });
    let path = daemon.directory.0.join("record");
    let client = daemon.client();
    client.attach();
    test_support::wait_for("the file to be full", || {
        client.report(GIB, 0);
        (std::fs::metadata(&path).expect("the record").len() == 64 << 10).then_some(())
    });
    client.request();
    client.until_granted();
    let replayed = Output::of(ctl().args(["simulate", "--replay"]).arg(&path));
    assert_eq!((replayed.code, replayed.stderr.as_str()), (Some(0), ""));
    daemon.log.wait("cannot continue the record");
}

#[test]
fn no_thread_has_a_capability() {
    let directory = Directory::new();
    std::fs::copy(artifact("libnvidia_ml.so"), directory.0.join("libnvidia-ml.so.1")).expect("NVML");
    let libraries = directory.0.clone();
    let daemon = Daemon::start_in(Directory::new(), None, |command, _| {
        command.env("LD_LIBRARY_PATH", libraries);
    });
    daemon.log.wait("found");
    let threads = std::fs::read_dir(format!("/proc/{}/task", daemon.child.id())).expect("it runs");
    let statuses: Vec<String> =
        threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("status")).ok()).collect();
    assert!(statuses.len() > 2, "NVML has a thread of its own: {statuses:?}");
    for status in statuses {
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            assert!(status.contains(&format!("{set}:\t0000000000000000\n")), "{status}");
        }
    }
}
