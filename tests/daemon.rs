//! The daemon as a process, with clients that speak the protocol by hand: what it serves, what it refuses, and what it
//! survives.

mod daemon_support;

use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use daemon_support::*;
use nvshare_wire::client::StuckReason;
use nvshare_wire::own::{self, OwnTerm};
use nvshare_wire::scheduler::Refusal;
use nvshare_wire::{ClientMessage, MAX_LEN, SchedulerMessage, Text, Uuid, version};

#[test]
fn a_conversation() {
    let daemon = Daemon::start();
    let client = daemon.client();
    client.attach();
    client.report(2 * GIB, 0);
    client.request();
    client.until(|message| matches!(message, SchedulerMessage::Allowance { slot: 0, bytes, .. } if *bytes >= 2 * GIB));
    client.until_granted();
    let other = daemon.client();
    assert!(other.id > client.id, "ids are never used twice");
}

#[test]
fn a_library_of_another_age_is_told_so() {
    let daemon = Daemon::start();
    for (min, max) in [(version::MAX + 1, 9), (0, 0), (7, 3)] {
        let client = Client::connect(&daemon.socket()).expect("the daemon listens");
        client.send(hello_of(min, max));
        match client.receive() {
            Some(SchedulerMessage::Refused { reason: Refusal::Version, text }) => {
                let said = format!("library {min} to {max}, scheduler 1 to {}", version::MAX);
                assert!(text.as_str().contains(&said), "{text:?}");
            }
            other => panic!("instead of Refused: {other:?}"),
        }
        client.until_end();
        daemon.log.wait(&format!("its library speaks protocol {min} to {max}"));
    }
    // A newer library that still speaks ours is served.
    let client = Client::connect(&daemon.socket()).expect("the daemon listens");
    client.send(hello_of(1, 9));
    assert!(matches!(client.receive(), Some(SchedulerMessage::Welcome { version: version::MAX, .. })));
}

#[test]
fn a_first_message_that_is_not_hello_ends_the_connection() {
    let daemon = Daemon::start();
    for packet in [ClientMessage::Request { gpus: 1 }.encode(1), attach(0, GPU).encode(0)] {
        let client = Client::connect(&daemon.socket()).expect("the daemon listens");
        assert!(client.send_raw(packet.as_bytes()));
        client.until_end();
    }
    daemon.log.wait("the first message is not Hello");
    assert_eq!(daemon.log.count("connected client"), 0);
}

#[test]
fn what_breaks_the_protocol_ends_its_own_connection_only() {
    let daemon = Daemon::start();
    let bystander = daemon.client();
    bystander.attach();
    bystander.request();
    bystander.until_granted();
    let wire = |message: ClientMessage| message.encode(1).as_bytes().to_vec();
    let changed = |message: ClientMessage, at: usize, byte: u8| {
        let mut packet = wire(message);
        packet[at] = byte;
        packet
    };
    let cases: Vec<(&str, Vec<Vec<u8>>)> = vec![
        ("truncated: 3 bytes where", vec![vec![1, 2, 3]]),
        ("oversized: 257 bytes", vec![vec![0; MAX_LEN + 1]]),
        ("oversized: 60000 bytes", vec![vec![0; 60_000]]),
        ("the header says 200 bytes", vec![changed(release(), 4, 200)]),
        ("unknown message kind 99", vec![changed(release(), 2, 99)]),
        ("protocol version 3 where 1", vec![changed(release(), 0, 3)]),
        ("field reason cannot be 9", vec![wire(attach(0, GPU)), changed(release(), 16, 9)]),
        ("a second Hello", vec![wire(hello())]),
        ("slot 64: there are slots 0 to 63", vec![wire(attach(64, GPU))]),
        ("slot 1 is attached already", vec![wire(attach(1, GPU)), wire(attach(1, Uuid([8; 16])))]),
        ("is attached already, as slot 1", vec![wire(attach(1, GPU)), wire(attach(2, GPU))]),
        ("slot 5 is not attached", vec![wire(memory(5, 1, 1))]),
        ("slot 3 is not attached", vec![wire(attach(0, GPU)), wire(ClientMessage::Request { gpus: 0b1001 })]),
        (
            "slot 0 is not attached",
            vec![wire(attach(0, GPU)), wire(ClientMessage::Detach { slot: 0 }), wire(release())],
        ),
        ("Request of no GPU", vec![wire(ClientMessage::Request { gpus: 0 })]),
        ("demand cannot be", vec![wire(attach(0, GPU)), wire(memory(0, u64::MAX, 0))]),
    ];
    for (reason, packets) in cases {
        let client = daemon.client();
        for packet in packets {
            client.send_raw(&packet);
        }
        client.until_end();
        // Lines about one user are limited, so the reason is looked for only while they are not.
        if daemon.log.count("is hung up on") < 10 {
            daemon.log.wait(reason);
        }
    }
    // The same mistakes again in one go: the log must not grow with them.
    for _ in 0..50 {
        let client = daemon.client();
        client.send_raw(b"junk");
        client.until_end();
    }
    assert!(daemon.log.count("is hung up on") <= 12, "{}", daemon.log.count("is hung up on"));
    bystander.release();
    bystander.request();
    bystander.until_granted();
}

#[test]
fn what_a_client_says_of_itself_is_bounded_and_answered_in_words() {
    let daemon = Daemon::start();
    let own = |more, text: &str| ClientMessage::Own { term: OwnTerm::Weight, more, text: Text::new(text) };
    let client = Client::welcomed_as(&daemon.socket(), version::MAX);
    let say = |message: ClientMessage| client.send(message);
    let remark = || match client.receive() {
        Some(SchedulerMessage::Remark { text }) => text.as_str().to_owned(),
        other => panic!("instead of a remark: {other:?}"),
    };
    // In parts, of which one that belongs to another value is none.
    say(own(1, "1"));
    say(own(0, "0000x"));
    let allowed = "a number from 1 to 10000, or \"idle\" is allowed";
    assert_eq!(remark(), format!("NVSHARE_WEIGHT: weight cannot be \"10000x\": {allowed}"));
    say(own(1, "1"));
    say(ClientMessage::Own { term: OwnTerm::Priority, more: 0, text: Text::new("x") });
    say(own(0, "0"));
    assert!(remark().starts_with("NVSHARE_PRIORITY: "));
    assert_eq!(remark(), format!("NVSHARE_WEIGHT: weight cannot be 0: {allowed}"));
    say(own(0, ""));
    assert_eq!(remark(), format!("NVSHARE_WEIGHT: weight cannot be \"\": {allowed}"));
    daemon.log.wait("NVSHARE_PRIORITY: priority cannot be");
    // One without an end.
    for _ in 0..=own::LONGEST / 100 {
        // Until it is hung up on.
        client.send_raw(own(1, &"1".repeat(100)).encode(version::MAX).as_bytes());
    }
    client.until_end();
    daemon.log.wait("a value of NVSHARE_WEIGHT with more than 4096 bytes");
}

#[test]
fn a_second_daemon_is_refused_and_steals_nothing() {
    let mut daemon = Daemon::start();
    let client = daemon.client();
    let second = Output::of(command(&daemon.directory.0).arg("--no-bus"));
    assert_eq!(second.code, Some(1));
    let expected = format!(
        "nvshare-scheduler: another nvshare-scheduler (process {}) already serves {}: stop it first, or choose another path with --socket\n",
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
fn a_socket_that_a_dead_daemon_left_is_taken_over() {
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
fn what_is_not_a_stale_socket_is_left_alone() {
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
fn anybody_may_connect_and_only_root_may_control() {
    use std::os::unix::fs::PermissionsExt;
    let daemon = Daemon::start();
    let mode = |path: &Path| std::fs::metadata(path).expect("a socket").permissions().mode() & 0o777;
    assert_eq!(mode(&daemon.socket()), 0o666);
    assert_eq!(mode(&daemon.control()), 0o660);
}

#[test]
fn sigterm_ends_it_at_once_and_clients_notice() {
    let mut daemon = Daemon::start();
    let client = daemon.client();
    client.attach();
    let asked = Instant::now();
    daemon.signal(libc::SIGTERM);
    client.until_end();
    assert!(daemon.wait().success());
    assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
    let left: Vec<_> = std::fs::read_dir(&daemon.directory.0).expect("a directory").collect();
    assert!(left.is_empty(), "sockets, locks and directories it made are gone: {left:?}");
}

#[test]
fn two_hundred_clients_at_once() {
    let daemon = Daemon::start();
    let clients: Vec<Client> = (0..200).map(|_| daemon.client()).collect();
    for client in &clients {
        client.send(attach(0, GPU));
        client.request();
    }
    // Each releases as soon as it has its turn, so all of them are served in the end.
    std::thread::scope(|scope| {
        for client in &clients {
            scope.spawn(|| {
                client.until_granted();
                client.release();
            });
        }
    });
}

#[test]
#[ignore = "a helper: connects until it is refused, then says how often it was welcomed"]
fn helper_fill() {
    let path = helper_socket();
    let mut welcomed = Vec::new();
    let refusal = loop {
        let client = Client::connect(&path).expect("the daemon listens");
        client.send(hello());
        match client.receive() {
            Some(SchedulerMessage::Welcome { .. }) => welcomed.push(client),
            other => break other,
        }
        assert!(welcomed.len() < 100, "never refused");
    };
    let Some(SchedulerMessage::Refused { reason: Refusal::TooMany, text }) = refusal else {
        panic!("instead of Refused: {refusal:?}");
    };
    assert_eq!(text.as_str(), "5 programs of this user are connected; max-clients-per-user allows no more");
    assert_eq!(welcomed.len(), 5);
    // When one ends, there is room for another.
    welcomed.pop();
    let deadline = Instant::now() + PATIENCE;
    loop {
        let client = Client::connect(&path).expect("the daemon listens");
        client.send(hello());
        if matches!(client.receive(), Some(SchedulerMessage::Welcome { .. })) {
            break;
        }
        assert!(Instant::now() < deadline, "never let in again");
    }
}

#[test]
fn one_user_can_have_so_many_clients_and_no_more() {
    let daemon = Daemon::start_with(|command, directory| {
        let config = directory.join("nvshare.toml");
        std::fs::write(&config, "max-clients-per-user = 5\n").expect("a file");
        command.arg("--config").arg(config);
    });
    let mut fill = helper("helper_fill", &daemon.socket());
    if is_root() {
        // root has no limit, so somebody else fills it.
        fill.uid(65534).gid(65534);
    }
    let output = fill.stderr(Stdio::piped()).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    daemon.log.wait("has 5 programs connected");
    // Nobody else is affected.
    if is_root() {
        let many: Vec<Client> = (0..10).map(|_| daemon.client()).collect();
        drop(many);
    }
}

/// A client that says it is in a gang.
fn in_gang(path: &Path, gang: u64) -> Client {
    let mut client = Client::connect(path).expect("the daemon listens");
    let library = Text::new("test");
    client.send(ClientMessage::Hello { min_version: 1, max_version: 1, flags: 0, resume: 0, gang, library });
    let Some(SchedulerMessage::Welcome { client: id, .. }) = client.receive() else { panic!("not welcomed") };
    client.id = id;
    client
}

#[test]
#[ignore = "a helper: is in a gang until it is killed"]
fn helper_in_gang() {
    let _client = in_gang(&helper_socket(), 5);
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn nobody_gets_into_another_users_gang() {
    let daemon = Daemon::start();
    let fellows = [in_gang(&daemon.socket(), 5), in_gang(&daemon.socket(), 5)];
    let others = [in_gang(&daemon.socket(), 6), in_gang(&daemon.socket(), 0), in_gang(&daemon.socket(), 0)];
    let gangs = |expected: usize| -> Vec<(u64, Vec<u64>)> {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let output = daemon.ctl(&["status", "--json"]);
            let status: serde_json::Value = serde_json::from_str(&output.stdout).expect("JSON");
            let clients = status["clients"].as_array().expect("clients").clone();
            if clients.len() == expected {
                let number = |value: &serde_json::Value| value.as_u64().expect("a number");
                let gang =
                    |client: &serde_json::Value| client["gang"].as_array().expect("ids").iter().map(number).collect();
                return clients.iter().map(|client| (number(&client["id"]), gang(client))).collect();
            }
            assert!(Instant::now() < deadline, "{}", output.stdout);
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let seen = gangs(5);
    assert!(seen.contains(&(fellows[0].id, vec![fellows[1].id])), "{seen:?}");
    assert!(others.iter().all(|other| seen.contains(&(other.id, vec![]))), "{seen:?}");
    if !is_root() {
        eprintln!("not all of it: needs root to be somebody else");
        return;
    }
    let mut stranger = helper("helper_in_gang", &daemon.socket()).uid(65534).gid(65534).spawn().expect("it starts");
    let seen = gangs(6);
    assert_eq!(seen.iter().filter(|(_, gang)| !gang.is_empty()).count(), 2, "{seen:?}");
    kill(stranger.id(), libc::SIGKILL);
    wait(&mut stranger);
}

#[test]
fn running_out_of_descriptors_neither_ends_it_nor_makes_it_spin() {
    let daemon = Daemon::start_with(|command, _| {
        // SAFETY: setrlimit is async-signal-safe.
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
    std::thread::sleep(Duration::from_millis(500)); // a time in which a spinning daemon would use CPU
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

#[test]
#[ignore = "a helper: takes the lock and keeps it"]
#[expect(clippy::zombie_processes, reason = "the child is to outlive this process")]
fn helper_hold() {
    let client = Client::welcomed(&helper_socket());
    client.attach();
    client.request();
    client.until_granted();
    // A child that has the socket too, and outlives us.
    // SAFETY: a plain call on a descriptor that lives.
    unsafe { libc::fcntl(client.socket.as_raw_fd(), libc::F_SETFD, 0) };
    let _child = Command::new("sleep").arg("60").stderr(Stdio::null()).spawn().expect("sleep");
    eprintln!("holding");
    loop {
        std::thread::park();
    }
}

#[test]
fn a_killed_holder_frees_the_lock_at_once_even_if_a_child_has_its_socket() {
    let daemon = Daemon::start();
    let mut holder = holder(&daemon);
    let waiter = daemon.client();
    waiter.attach();
    waiter.request();
    daemon.log.wait("contended");
    let killed = Instant::now();
    holder.kill().expect("it runs");
    waiter.until_granted();
    assert!(killed.elapsed() < Duration::from_secs(1), "{:?}", killed.elapsed());
    daemon.log.wait("has ended");
    end(&mut holder);
}

#[test]
fn a_stopped_holder_is_found_and_runs_on_later() {
    let daemon = Daemon::start_with(|command, directory| {
        let config = directory.join("nvshare.toml");
        std::fs::write(&config, "time-quantum = 1\nanti-thrash = \"on\"\n").expect("a file");
        command.arg("--config").arg(config);
    });
    let mut holder = holder(&daemon);
    kill(holder.id(), libc::SIGSTOP);
    let waiter = daemon.client();
    waiter.attach();
    waiter.request();
    daemon.log.wait("the process is stopped");
    waiter.until_granted();
    kill(holder.id(), libc::SIGCONT);
    daemon.log.wait("the process runs again");
    end(&mut holder);
}

#[test]
fn a_holder_that_cannot_drain_is_named_and_shown_and_others_run_beside_it() {
    let daemon = Daemon::start_with(|command, directory| {
        let config = directory.join("nvshare.toml");
        std::fs::write(&config, "time-quantum = 1\nanti-thrash = \"on\"\n").expect("a file");
        command.arg("--config").arg(config).arg("--trace").arg(directory.join("trace"));
    });
    let (holder, waiter) = (daemon.client(), daemon.client());
    for client in [&holder, &waiter] {
        client.attach();
        client.request();
    }
    holder.until(|message| matches!(message, SchedulerMessage::Revoke { gpus: 1 }));
    holder.send(ClientMessage::Stuck { gpus: 1, reason: StuckReason::LongWork });
    waiter.until_granted();
    let warning = daemon.log.wait("cannot be drained: others run beside it");
    assert!(warning.contains(&format!("pid={}", std::process::id())), "{warning}");
    let shown = daemon.ctl(&["status", "--json"]).stdout;
    assert!(shown.contains("\"undrainable\"") && shown.contains("\"holding\""), "{shown}");
    let trace = std::fs::read_to_string(daemon.directory.0.join("trace")).expect("the trace");
    assert_eq!(trace.matches("\"undrainable\"").count(), 1, "{trace}");
}

/// Another process that holds the lock.
fn holder(daemon: &Daemon) -> std::process::Child {
    let mut child =
        helper("helper_hold", &daemon.socket()).stderr(Stdio::piped()).process_group(0).spawn().expect("it starts");
    let stderr = child.stderr.take().expect("its stderr");
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(stderr));
    assert!(lines.by_ref().map_while(Result::ok).any(|line| line.contains("holding")), "the helper failed");
    // Kept open, so that what it says later does not end it.
    std::mem::forget(lines);
    child
}

/// Ends a holder and its child, which are a process group of their own.
fn end(holder: &mut std::process::Child) {
    // SAFETY: a plain call; the group is that of a child of ours that has not been waited for.
    unsafe { libc::kill(-(holder.id() as i32), libc::SIGKILL) };
    let _ = holder.wait();
}

#[test]
fn a_client_that_sends_and_never_reads_is_hung_up_on_in_the_end() {
    let daemon = Daemon::start();
    let client = daemon.client();
    client.attach();
    let request = ClientMessage::Request { gpus: 1 }.encode(1);
    let mut sent = 0;
    while client.send_raw(request.as_bytes()) && client.send_raw(release().encode(1).as_bytes()) {
        sent += 1;
        assert!(sent < 100_000, "never hung up on");
    }
    daemon.log.wait("it does not read what it is sent");
    daemon.client().attach();
}

#[test]
fn systemd_can_pass_the_socket() {
    let directory = Directory::new();
    let path = directory.0.join("given.sock");
    // SAFETY: plain system calls; the address is a live sockaddr_un and the descriptor new.
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
        command.args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_nvshare-scheduler")]);
        command.arg("--control-socket").arg(directory.0.join("control/control.sock")).arg("--no-bus");
        command.env("LISTEN_FDS", "1").env("LISTEN_FDNAMES", names);
        let fd = listener.as_raw_fd();
        // SAFETY: dup2 is async-signal-safe.
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
    // A client that connects while nobody runs waits for the next daemon.
    let early = Client::connect(&path).expect("systemd listens");
    early.send(hello());
    let mut daemon = start("clients");
    assert!(matches!(early.receive(), Some(SchedulerMessage::Welcome { .. })));
    kill(daemon.id(), libc::SIGTERM);
    assert!(wait(&mut daemon).success());
    // The wrong kind of socket is an error, not a surprise later.
    let mut daemon = start("control");
    assert_eq!(wait(&mut daemon).code(), Some(1));
}

#[test]
fn systemd_is_told_of_readiness_and_of_the_end() {
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
fn a_wrong_configuration_file_keeps_it_from_starting() {
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
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""));

    // Its drop-ins are part of it.
    let drop_in = directory.0.join("nvshare.toml.d/rules.toml");
    std::fs::create_dir(drop_in.parent().expect("a directory")).expect("a directory");
    std::fs::write(&drop_in, "[[rule]]\nunit = \"jupyter\"\nmemory-max = \"8G\"\n").expect("a drop-in");
    let output = Output::of(command(&directory.0).arg("--config").arg(&config).arg("--check-config"));
    let sentence = format!(
        "nvshare-scheduler: {}:2:8: unit: \"jupyter\" can match no unit: their names end with .service or .scope, as in \"jupyter.service\"\n",
        drop_in.display()
    );
    assert_eq!((output.code, output.stderr), (Some(1), sentence));
}

#[test]
fn the_trace_has_every_move() {
    let daemon = Daemon::start_with(|command, directory| {
        command.arg("--trace").arg(directory.join("trace"));
    });
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
    drop(first);
    daemon.log.wait("disconnected");
    let text = std::fs::read_to_string(daemon.directory.0.join("trace")).expect("a trace");
    let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let moves: Vec<&str> = lines.iter().filter(|l| l["client"] == id).filter_map(|l| l["what"].as_str()).collect();
    let mut left = moves.iter();
    for what in ["connect", "attach", "request", "grant", "mapped", "release", "freed", "disconnect"] {
        assert!(left.any(|seen| *seen == what), "no {what} in its place in {moves:?}");
    }
    let times: Vec<f64> = lines.iter().filter_map(|line| line["ms"].as_f64()).collect();
    assert!(times.len() == lines.len() && times.is_sorted(), "{times:?}");
    let mapped = lines.iter().find(|line| line["what"] == "mapped").expect("seen above");
    assert_eq!((&mapped["bytes"], &mapped["pid"]), (&GIB.into(), &std::process::id().into()));
    std::io::stdout().flush().expect("stdout");
}
