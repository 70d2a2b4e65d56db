//! Memory that one program shares with another, as the daemon passes it on. The tests check which
//! clients receive the memory, and that the daemon closes its own descriptors.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::time::{Duration, Instant};

use nvshare_wire::client::Sharing;
use nvshare_wire::{ClientMessage, Counts, MAX_DESCRIPTORS, MAX_LEN, SchedulerMessage, Secret};
use test_support::daemon::*;

const KEY: Secret = Secret([3; 16]);
const SECRET: Secret = Secret([4; 16]);
const CHUNK: u64 = 64 << 20;

fn open(ticket: u32) -> ClientMessage {
    ClientMessage::Open { ticket, exporter: KEY, secret: SECRET, range: 1, allocation: 2, first: 0 }
}

fn exported(ticket: u64) -> ClientMessage {
    ClientMessage::Exported { ticket, outcome: Sharing::Done, slot: 0, bytes: 2 * CHUNK, chunk: CHUNK }
}

fn client(daemon: &Daemon) -> Client {
    Client::welcomed(&daemon.socket())
}

/// Connects a client that exports memory.
fn exporter(daemon: &Daemon) -> Client {
    let client = client(daemon);
    client.attach();
    client.send(ClientMessage::Exporter { key: KEY });
    // The daemon may read other clients' messages first. When it grants the lock, it has read all
    // earlier messages of this client.
    client.request();
    client.until_granted();
    client.release();
    client
}

/// Waits for the daemon's question to the exporter, and returns its ticket.
fn question(exporter: &Client) -> u64 {
    match exporter.until(|message| matches!(message, SchedulerMessage::Export { .. })) {
        SchedulerMessage::Export { ticket, secret: SECRET, range: 1, allocation: 2, first: 0 } => ticket,
        other => panic!("it asks {other:?}"),
    }
}

fn outcome(importer: &Client, asked: u32) -> Sharing {
    match importer.until(|message| matches!(message, SchedulerMessage::Opened { .. })) {
        SchedulerMessage::Opened { ticket, outcome, .. } if ticket == asked => outcome,
        other => panic!("instead of an answer to {asked}: {other:?}"),
    }
}

/// Creates a file with this text.
fn file(text: &str) -> OwnedFd {
    // SAFETY: the descriptor is new and owned here.
    let mut file = unsafe { File::from_raw_fd(libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC)) };
    file.write_all(text.as_bytes()).expect("a file");
    file.into()
}

#[repr(C, align(8))]
struct Control([u8; 16 + 4 * (MAX_DESCRIPTORS + 8)]);

fn send_with(client: &Client, message: &ClientMessage, descriptors: &[OwnedFd]) {
    let packet = message.encode(client.version);
    let mut control = Control([0; _]);
    let mut part =
        libc::iovec { iov_base: packet.as_bytes().as_ptr().cast_mut().cast(), iov_len: packet.as_bytes().len() };
    // SAFETY: the buffers outlive the call, and `control` has room for `MAX_DESCRIPTORS + 8`
    // descriptors, more than any caller sends.
    unsafe {
        let bytes = mem::size_of_val(descriptors) as u32;
        let mut header: libc::msghdr = mem::zeroed();
        (header.msg_iov, header.msg_iovlen) = (&raw mut part, 1);
        header.msg_control = control.0.as_mut_ptr().cast();
        header.msg_controllen = libc::CMSG_SPACE(bytes) as _;
        let rights = &mut *libc::CMSG_FIRSTHDR(&header);
        (rights.cmsg_level, rights.cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
        rights.cmsg_len = libc::CMSG_LEN(bytes) as _;
        let data = libc::CMSG_DATA(rights).cast::<i32>();
        descriptors.iter().enumerate().for_each(|(i, fd)| data.add(i).write_unaligned(fd.as_raw_fd()));
        assert!(libc::sendmsg(client.socket.as_raw_fd(), &header, libc::MSG_NOSIGNAL) > 0);
    }
}

/// Receives the next message and its descriptors.
fn receive_with(client: &Client) -> (SchedulerMessage, Vec<OwnedFd>) {
    let (mut buffer, mut control) = ([0u8; MAX_LEN], Control([0; _]));
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut descriptors = Vec::new();
    // SAFETY: the buffers outlive the call, and the descriptors are new and owned here.
    let n = unsafe {
        let mut header: libc::msghdr = mem::zeroed();
        (header.msg_iov, header.msg_iovlen) = (&raw mut part, 1);
        (header.msg_control, header.msg_controllen) = (control.0.as_mut_ptr().cast(), control.0.len() as _);
        let n = libc::recvmsg(client.socket.as_raw_fd(), &mut header, libc::MSG_CMSG_CLOEXEC);
        if let Some(rights) = libc::CMSG_FIRSTHDR(&header).as_ref() {
            let count = (rights.cmsg_len - libc::CMSG_LEN(0) as usize) / 4;
            let data = libc::CMSG_DATA(rights).cast::<i32>();
            descriptors.extend((0..count).map(|i| OwnedFd::from_raw_fd(data.add(i).read_unaligned())));
        }
        n
    };
    assert!(n > 0, "the daemon has hung up");
    (SchedulerMessage::decode(&buffer[..n as usize], client.version).expect("the protocol"), descriptors)
}

/// The number of files that the daemon has open.
fn open_files(daemon: &Daemon) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", daemon.child.id())).expect("its descriptors").count()
}

fn wait_until_closed(daemon: &Daemon, before: usize) {
    let deadline = Instant::now() + PATIENCE;
    while open_files(daemon) > before {
        assert!(Instant::now() < deadline, "{} files, {before} before", open_files(daemon));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn descriptors_reach_the_requester_and_do_not_leak() {
    let daemon = Daemon::start();
    let (exporter, importer) = (exporter(&daemon), client(&daemon));
    importer.attach();
    let before = open_files(&daemon);
    for round in 0..200 {
        importer.send(open(round));
        let ticket = question(&exporter);
        send_with(&exporter, &exported(ticket), &[file("first"), file("second")]);
        let (message, descriptors) = loop {
            let (message, descriptors) = receive_with(&importer);
            if matches!(message, SchedulerMessage::Opened { .. }) {
                break (message, descriptors);
            }
            assert!(descriptors.is_empty());
        };
        let whole = SchedulerMessage::Opened { ticket: round, outcome: Sharing::Done, bytes: 2 * CHUNK, chunk: CHUNK };
        assert_eq!(message, whole);
        let texts = descriptors.into_iter().map(|fd| {
            let (mut file, mut text) = (File::from(fd), String::new());
            file.rewind().and_then(|()| file.read_to_string(&mut text)).expect("a file");
            text
        });
        assert_eq!(texts.collect::<Vec<_>>(), ["first", "second"]);
        importer.send(ClientMessage::Closed { exporter: KEY, range: 1 });
    }
    wait_until_closed(&daemon, before);
}

#[test]
fn unrequested_descriptors_are_closed_and_invalid_answers_refused() {
    let daemon = Daemon::start();
    let (exporter, importer) = (exporter(&daemon), client(&daemon));
    importer.attach();
    let before = open_files(&daemon);
    for ticket in 0..100 {
        send_with(&exporter, &exported(ticket), &[file("unasked")]);
        send_with(&importer, &ClientMessage::Request { gpus: 1 }, &[file("unasked")]);
    }
    // The exporter sends more descriptors than a packet can carry, and then none.
    let many: Vec<OwnedFd> = (0..MAX_DESCRIPTORS + 8).map(|_| file("many")).collect();
    importer.send(open(1));
    let ticket = question(&exporter);
    send_with(&exporter, &exported(ticket), &many);
    assert!(matches!(outcome(&importer, 1), Sharing::Done | Sharing::Failed));
    importer.send(open(2));
    let ticket = question(&exporter);
    exporter.send(exported(ticket));
    assert_eq!(outcome(&importer, 2), Sharing::Failed);
    // The daemon ignores an answer from a client that it hasn't asked.
    importer.send(open(3));
    let ticket = question(&exporter);
    let third = client(&daemon);
    third.attach();
    send_with(&third, &exported(ticket), &[file("forged")]);
    exporter.send(ClientMessage::Exported { ticket, outcome: Sharing::Unknown, slot: 0, bytes: 0, chunk: 0 });
    assert_eq!(outcome(&importer, 3), Sharing::Unknown);
    drop(third);
    wait_until_closed(&daemon, before);
}

#[test]
fn a_request_fails_when_its_exporter_exits() {
    let daemon = Daemon::start();
    let (exporter, importer) = (exporter(&daemon), client(&daemon));
    importer.send(open(1));
    question(&exporter);
    drop(exporter);
    assert_eq!(outcome(&importer, 1), Sharing::Unknown);
}

#[test]
fn an_exporter_that_never_answers_is_not_flooded() {
    let daemon = Daemon::start();
    let (exporter, importer) = (exporter(&daemon), client(&daemon));
    for ticket in 0..500 {
        importer.send(open(ticket));
    }
    assert_eq!(outcome(&importer, 32), Sharing::Busy, "the first that is not passed on");
    for _ in 0..32 {
        question(&exporter);
    }
    exporter.send(ClientMessage::Request { gpus: 1 });
    let first = exporter.until(|m| matches!(m, SchedulerMessage::Grant { .. } | SchedulerMessage::Export { .. }));
    assert!(matches!(first, SchedulerMessage::Grant { .. }), "{first:?}");
}

#[test]
#[ignore = "a helper: asks for memory that it may not have"]
fn helper_ask() {
    let client = Client::welcomed(&helper_socket());
    let deadline = Instant::now() + PATIENCE;
    for ticket in 0.. {
        client.send(open(ticket));
        match outcome(&client, ticket) {
            // The daemon has just started and may answer that it is busy.
            Sharing::Busy => std::thread::sleep(Duration::from_millis(50)),
            outcome => return assert_eq!(outcome, Sharing::Unknown),
        }
        assert!(Instant::now() < deadline);
    }
}

#[test]
fn another_users_request_is_refused_without_asking_the_exporter() {
    if !is_root() {
        return test_support::skip("root, to act as another user");
    }
    let daemon = Daemon::start();
    let exporter = exporter(&daemon);
    let status =
        helper("shared_memory::helper_ask", &daemon.socket()).uid(65534).gid(65534).status().expect("it starts");
    assert!(status.success());
    exporter.request();
    let first = exporter.until(|m| matches!(m, SchedulerMessage::Grant { .. } | SchedulerMessage::Export { .. }));
    assert!(matches!(first, SchedulerMessage::Grant { .. }), "{first:?}");
}

/// A client's pinned bytes in the status.
fn pinned(daemon: &Daemon, client: &Client) -> u64 {
    let output = daemon.ctl(&["--json", "status"]);
    let status: serde_json::Value = serde_json::from_str(&output.stdout).expect("JSON");
    let clients = status["clients"].as_array().expect("clients");
    let of = clients.iter().find(|c| c["id"] == client.id).expect("that client");
    of["gpus"][0]["pinned"].as_u64().expect("a number")
}

#[test]
fn an_exporters_orphaned_bytes_are_counted_immediately_and_once() {
    let daemon = Daemon::start();
    let (exporter, importer) = (exporter(&daemon), client(&daemon));
    importer.attach();
    let pinned_report = |bytes| ClientMessage::Memory {
        slot: 0,
        ack: 0,
        demand: bytes,
        mapped: bytes,
        swapped: 0,
        pinned: bytes,
        device_free: u64::MAX,
        limit_ack: 0,
        host: 0,
        counts: Counts::default(),
        in_file: 0,
        managed: 0,
        managed_mapped: 0,
    };
    exporter.send(pinned_report(2 * CHUNK));
    importer.send(pinned_report(0));
    importer.send(open(1));
    let ticket = question(&exporter);
    send_with(&exporter, &exported(ticket), &[file("a"), file("b")]);
    assert_eq!(outcome(&importer, 1), Sharing::Done);
    assert_eq!((pinned(&daemon, &exporter), pinned(&daemon, &importer)), (2 * CHUNK, 0));
    exporter.send(ClientMessage::Withdrawn { range: 1 });
    exporter.send(pinned_report(0));
    importer.until(|message| *message == SchedulerMessage::Adopt { exporter: KEY, range: 1 });
    assert_eq!(pinned(&daemon, &importer), 2 * CHUNK, "before it says so itself");
    importer.send(ClientMessage::Adopted { exporter: KEY, range: 1 });
    importer.send(pinned_report(2 * CHUNK));
    let deadline = Instant::now() + PATIENCE;
    while pinned(&daemon, &exporter) != 0 {
        assert!(Instant::now() < deadline);
    }
    assert_eq!(pinned(&daemon, &importer), 2 * CHUNK);
    importer.send(ClientMessage::Closed { exporter: KEY, range: 1 });
    importer.send(pinned_report(0));
    while pinned(&daemon, &importer) != 0 {
        assert!(Instant::now() < deadline);
    }
}

/// Answers the next question about the exporter's memory.
fn export(exporter: &Client) {
    let ticket = question(exporter);
    send_with(exporter, &exported(ticket), &[file("a"), file("b")]);
}

fn import(importer: &Client) {
    importer.attach();
    importer.send(open(1));
}

#[test]
#[ignore = "a helper: opens memory, and stays connected"]
fn helper_import() {
    let client = Client::welcomed(&helper_socket());
    import(&client);
    assert_eq!(outcome(&client, 1), Sharing::Done);
    std::thread::sleep(PATIENCE);
}

#[test]
#[ignore = "a helper: opens memory, and disconnects"]
fn helper_import_and_disconnect() {
    let client = Client::welcomed(&helper_socket());
    import(&client);
    assert_eq!(outcome(&client, 1), Sharing::Done);
    drop(client);
    std::thread::sleep(PATIENCE);
}

#[test]
fn an_exporter_is_told_when_the_only_process_that_opened_its_memory_has_ended() {
    let daemon = Daemon::start();
    let exporter = exporter(&daemon);
    let mut process = helper("shared_memory::helper_import", &daemon.socket()).spawn().expect("it starts");
    export(&exporter);
    exporter.send(ClientMessage::Request { gpus: 1 });
    exporter.until_granted(); // the daemon has then passed the memory on
    process.kill().expect("it runs");
    process.wait().expect("its end");
    exporter.until(|message| *message == SchedulerMessage::Unused { range: 1 });
}

/// A process that goes on without a connection still has the memory mapped.
#[test]
fn memory_stays_in_use_while_a_process_without_a_connection_has_it_open() {
    let daemon = Daemon::start();
    let (exporter, other) = (exporter(&daemon), client(&daemon));
    let test = "shared_memory::helper_import_and_disconnect";
    let mut process = helper(test, &daemon.socket()).spawn().expect("it starts");
    export(&exporter);
    daemon.log.wait("disconnected");
    import(&other);
    export(&exporter);
    assert_eq!(outcome(&other, 1), Sharing::Done);
    other.send(ClientMessage::Closed { exporter: KEY, range: 1 });
    other.send(ClientMessage::Request { gpus: 1 });
    other.until_granted(); // the daemon has then read that it is closed
    other.release();
    exporter.send(ClientMessage::Request { gpus: 1 });
    let is_either =
        |m: &SchedulerMessage| matches!(m, SchedulerMessage::Grant { .. } | SchedulerMessage::Unused { .. });
    assert_eq!(exporter.until(is_either), SchedulerMessage::Grant { gpus: 1 });
    process.kill().expect("it runs");
    process.wait().expect("its end");
}
