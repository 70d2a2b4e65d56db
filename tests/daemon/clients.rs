//! Clients of the daemon: the messages that they receive, the messages that the daemon refuses, and
//! failures that harm neither the daemon nor other clients.

use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nvshare_wire::client::{LeaveAnswer, StuckReason};
use nvshare_wire::env_limits::{self, LimitName};
use nvshare_wire::scheduler::Refusal;
use nvshare_wire::{ClientMessage, MAX_LEN, SchedulerMessage, Text, Uuid, version};
use test_support::daemon::*;
use test_support::record::Record;

#[test]
fn a_client_attaches_gets_an_allowance_and_is_granted_the_lock() {
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

/// Only a client that was asked to leave keeps its bytes when it disconnects.
#[test]
fn a_client_that_leaves_without_being_asked_keeps_nothing() {
    let daemon = Daemon::start();
    let client = daemon.client();
    client.attach();
    client.report(2 * GIB, 0);
    client.request();
    client.until_granted();
    client.send(ClientMessage::Leaving { answer: LeaveAnswer::Leaves });
    drop(client);
    let has_clients = || daemon.ctl(&["status", "--json"]).stdout.contains("\"engine\"");
    test_support::wait_for("the scheduler to forget the client", || (!has_clients()).then_some(()));
}

#[test]
fn an_unsupported_library_version_is_refused_with_a_reason() {
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
    // The daemon serves newer and older libraries that also speak the daemon's protocol version.
    for (min, max) in [(version::MAX, version::MAX + 8), (0, version::MAX)] {
        let client = Client::connect(&daemon.socket()).expect("the daemon listens");
        client.send(hello_of(min, max));
        assert!(matches!(client.receive(), Some(SchedulerMessage::Welcome { version: version::MAX, .. })));
        client.attach();
    }
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
fn a_protocol_violation_closes_only_its_own_connection() {
    let (began, daemon) = (Instant::now(), Daemon::start());
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
        ("the header announces 200 bytes", vec![changed(release(), 4, 200)]),
        ("unknown message kind 99", vec![changed(release(), 2, 99)]),
        ("protocol version 3 instead of the negotiated 1", vec![changed(release(), 0, 3)]),
        ("field reason cannot be 9", vec![wire(attach(0, GPU)), changed(release(), 16, 9)]),
        ("a second Hello", vec![wire(hello())]),
        ("slot 64 does not exist: the last slot is 63", vec![wire(attach(64, GPU))]),
        ("slot 1 is attached already", vec![wire(attach(1, GPU)), wire(attach(1, Uuid([8; 16])))]),
        ("is attached already, as slot 1", vec![wire(attach(1, GPU)), wire(attach(2, GPU))]),
        ("slot 5 is not attached", vec![wire(memory(5, 1, 1))]),
        ("slot 3 is not attached", vec![wire(attach(0, GPU)), wire(ClientMessage::Request { gpus: 0b1001 })]),
        (
            "slot 0 is not attached",
            vec![wire(attach(0, GPU)), wire(ClientMessage::Detach { slot: 0 }), wire(release())],
        ),
        ("Request without a GPU", vec![wire(ClientMessage::Request { gpus: 0 })]),
        ("demand cannot be", vec![wire(attach(0, GPU)), wire(memory(0, u64::MAX, 0))]),
    ];
    for (reason, packets) in cases {
        let client = daemon.client();
        for packet in packets {
            client.send_raw(&packet);
        }
        client.until_end();
        // Log lines about one user are limited, so the reason appears only below the limit.
        if daemon.log.count("is disconnected after a protocol violation") < 10 {
            daemon.log.wait(reason);
        }
    }
    // The same mistakes, repeated, must not add log lines.
    for _ in 0..50 {
        let client = daemon.client();
        client.send_raw(b"junk");
        client.until_end();
    }
    let (lines, windows) =
        (daemon.log.count("is disconnected after a protocol violation"), 1 + began.elapsed().as_secs() / 10);
    assert!(lines as u64 <= 12 * windows, "{lines} lines in {windows} times ten seconds");
    bystander.release();
    bystander.request();
    bystander.until_granted();
}

#[test]
fn environment_limits_are_bounded_and_errors_are_answered() {
    let daemon = Daemon::start();
    let own = |more, text: &str| ClientMessage::EnvLimit { limit: LimitName::Weight, more, text: Text::new(text) };
    let client = Client::welcomed(&daemon.socket());
    let say = |message: ClientMessage| client.send(message);
    let remark = || match client.receive() {
        Some(SchedulerMessage::Remark { text }) => text.as_str().to_owned(),
        other => panic!("instead of a remark: {other:?}"),
    };
    // Values are sent in parts. A part of another value may come between two parts.
    say(own(1, "1"));
    say(own(0, "0000x"));
    let allowed = "a number from 1 to 10000, or \"idle\" is allowed";
    assert_eq!(remark(), format!("NVSHARE_WEIGHT: weight cannot be \"10000x\": {allowed}"));
    say(own(1, "1"));
    say(ClientMessage::EnvLimit { limit: LimitName::MemoryMax, more: 0, text: Text::new("x") });
    say(own(0, "0"));
    assert!(remark().starts_with("NVSHARE_MEMORY_MAX: "));
    assert_eq!(remark(), format!("NVSHARE_WEIGHT: weight cannot be 0: {allowed}"));
    say(own(0, ""));
    assert_eq!(remark(), format!("NVSHARE_WEIGHT: weight cannot be \"\": {allowed}"));
    daemon.log.wait("NVSHARE_MEMORY_MAX: memory-max cannot be");
    // The client sends a value without an end.
    for _ in 0..=env_limits::LONGEST / 100 {
        // The daemon may close the connection at any of these messages.
        client.send_raw(own(1, &"1".repeat(100)).encode(version::MAX).as_bytes());
    }
    client.until_end();
    daemon.log.wait("a value of NVSHARE_WEIGHT with more than 4096 bytes");
}

#[test]
fn two_hundred_simultaneous_clients_are_served() {
    let daemon = Daemon::start();
    let clients: Vec<Client> = (0..200).map(|_| daemon.client()).collect();
    for client in &clients {
        client.send(attach(0, GPU));
        client.request();
    }
    // Each client releases the lock when it gets its turn, so all of them are served in the end.
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
    // SAFETY: `getuid` has no preconditions and cannot fail.
    let tenant = format!("user {}", unsafe { libc::getuid() });
    assert_eq!(text.as_str(), format!("{tenant} has 5 programs connected, which is the limit max-clients-per-tenant"));
    assert_eq!(welcomed.len(), 5);
    // When one program ends, the daemon accepts another.
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
fn clients_of_one_user_are_limited() {
    let daemon = Daemon::start_with(|command, directory| {
        let config = directory.join("nvshare.toml");
        std::fs::write(&config, "max-clients-per-tenant = 5\n").expect("a file");
        command.arg("--config").arg(config);
    });
    let mut fill = helper("clients::helper_fill", &daemon.socket());
    if is_root() {
        // root has a higher limit, so the helper fills the limit of another user.
        fill.uid(65534).gid(65534);
    }
    let output = fill.stderr(Stdio::piped()).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    daemon.log.wait("has 5 programs connected");
    // Other users are not affected.
    if !is_root() {
        return test_support::skip("root, to act as another user");
    }
    let many: Vec<Client> = (0..10).map(|_| daemon.client()).collect();
    drop(many);
}

/// Connects a client that reports a gang.
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
fn no_client_joins_another_users_gang() {
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
        return test_support::skip("root, to act as another user");
    }
    let mut stranger =
        helper("clients::helper_in_gang", &daemon.socket()).uid(65534).gid(65534).spawn().expect("it starts");
    let seen = gangs(6);
    assert_eq!(seen.iter().filter(|(_, gang)| !gang.is_empty()).count(), 2, "{seen:?}");
    kill(stranger.id(), libc::SIGKILL);
    wait(&mut stranger);
}

#[test]
#[ignore = "a helper: takes the lock and keeps it"]
#[expect(clippy::zombie_processes, reason = "the child is to outlive this process")]
fn helper_hold() {
    let client = Client::welcomed(&helper_socket());
    client.attach();
    client.request();
    client.until_granted();
    // The child inherits the socket and outlives this process. SAFETY: `fcntl` with F_SETFD takes no
    // pointers, and the descriptor is open.
    unsafe { libc::fcntl(client.socket.as_raw_fd(), libc::F_SETFD, 0) };
    let _child = Command::new("sleep").arg("60").stderr(Stdio::null()).spawn().expect("sleep");
    eprintln!("holding");
    loop {
        std::thread::park();
    }
}

#[test]
fn a_killed_holder_frees_the_lock_even_if_a_child_has_its_socket() {
    // A turn lasts one hour, so only the holder's death releases the lock.
    let daemon = Daemon::start_with(|command, directory| {
        let config = directory.join("nvshare.toml");
        std::fs::write(&config, "time-quantum = 3600\nanti-thrash = \"on\"\n").expect("a file");
        command.arg("--config").arg(config);
    });
    let mut holder = holder(&daemon);
    let waiter = daemon.client();
    waiter.attach();
    waiter.request();
    daemon.log.wait("Contended");
    holder.kill().expect("it runs");
    waiter.until_granted();
    daemon.log.wait("has ended");
    end(&mut holder);
}

#[test]
fn a_stopped_holder_is_detected_and_continues_later() {
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
fn an_undrainable_holder_is_shown_and_other_clients_run_beside_it() {
    let daemon = Daemon::start_with(|command, directory| {
        let config = directory.join("nvshare.toml");
        std::fs::write(&config, "time-quantum = 1\nanti-thrash = \"on\"\n").expect("a file");
        command.arg("--config").arg(config).arg("--record").arg(directory.join("record"));
    });
    let (holder, waiter) = (daemon.client(), daemon.client());
    holder.attach();
    holder.request();
    holder.until_granted();
    waiter.attach();
    waiter.request();
    holder.until(|message| matches!(message, SchedulerMessage::Revoke { gpus: 1 }));
    holder.send(ClientMessage::Stuck { gpus: 1, reason: StuckReason::LongWork });
    waiter.until_granted();
    let warning = daemon.log.wait("cannot interrupt the work of ");
    assert!(warning.contains(&format!("pid={}", std::process::id())), "{warning}");
    let shown = daemon.ctl(&["status", "--json"]).stdout;
    assert!(shown.contains("\"undrainable\"") && shown.contains("\"holding\""), "{shown}");
    let mut record = Record::new(&daemon.directory.0.join("record"), 1);
    assert_eq!(record.moves().iter().filter(|m| m.what == "undrainable").count(), 1, "{record:?}");
}

/// Starts another process that holds the lock.
fn holder(daemon: &Daemon) -> std::process::Child {
    let mut child = helper("clients::helper_hold", &daemon.socket())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .expect("it starts");
    let stderr = child.stderr.take().expect("its stderr");
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(stderr));
    assert!(lines.by_ref().map_while(Result::ok).any(|line| line.contains("holding")), "the helper failed");
    // The pipe stays open: if it were closed, later output would end the process.
    std::mem::forget(lines);
    child
}

/// Kills a holder and its child, which form a separate process group.
fn end(holder: &mut std::process::Child) {
    // SAFETY: `kill` takes no pointers, and the group belongs to a child that has not been waited for.
    unsafe { libc::kill(-(holder.id() as i32), libc::SIGKILL) };
    let _ = holder.wait();
}

#[test]
fn a_client_that_sends_but_never_reads_is_disconnected() {
    let daemon = Daemon::start();
    let client = daemon.client();
    client.attach();
    let request = ClientMessage::Request { gpus: 1 }.encode(1);
    let mut sent = 0;
    while client.send_raw(request.as_bytes()) && client.send_raw(release().encode(1).as_bytes()) {
        sent += 1;
        assert!(sent < 100_000, "never hung up on");
    }
    daemon.log.wait("it does not read its messages");
    daemon.client().attach();
}
