//! A daemon that is killed or stopped, and its successor. The successor inherits the clients'
//! connections and the locks over D-Bus. The *manager* is a fake systemd, which stores the daemon's
//! descriptors.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use nvshare_wire::{ClientMessage, SchedulerMessage, Text, version};
use test_support::daemon::*;
use test_support::has_own_process;
use test_support::in_flight::InFlight;
use test_support::manager::Manager;

use crate::private_bus::{block_on, on_control, scheduler};

/// Starts a daemon whose connections outlive it.
fn kept() -> (Manager, Daemon) {
    let directory = Directory::new();
    let manager = Manager::new(&directory.0);
    let daemon = Daemon::start_under(&manager, directory);
    (manager, daemon)
}

/// Connects a client, and waits until the fake systemd has stored the client's connection.
fn resuming(manager: &Manager, daemon: &Daemon) -> Client {
    let before = manager.kept().len();
    let client = Client::welcomed(&daemon.socket());
    client.attach();
    until(|| manager.kept().len() > before);
    client
}

#[track_caller]
fn until(mut done: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + PATIENCE;
    while !done() {
        assert!(std::time::Instant::now() < deadline, "it does not happen");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

fn hello_again(id: u64) -> ClientMessage {
    let (min_version, max_version) = (version::MIN, version::MAX);
    ClientMessage::Hello { min_version, max_version, flags: 0, resume: id, gang: 0, library: Text::new("test") }
}

#[track_caller]
fn until_asked(client: &Client) {
    let asked = client.until(|message| matches!(message, SchedulerMessage::Resume { .. }));
    assert_eq!(asked, SchedulerMessage::Resume { client: client.id }, "the id stays");
}

/// Sends all messages of a resumption except the last.
fn say_again(client: &Client, demand: u64, mapped: u64) {
    client.send(hello_again(client.id));
    client.send(attach(0, GPU));
    client.report(demand, mapped);
}

#[track_caller]
fn resume(client: &Client, demand: u64, mapped: u64, gpus: u64) {
    until_asked(client);
    say_again(client, demand, mapped);
    client.send(ClientMessage::Held { gpus });
}

/// Asserts that the daemon has sent no grant until now. The daemon would have sent a due grant
/// already.
#[track_caller]
fn assert_not_granted(daemon: &Daemon, client: &Client) {
    daemon.ctl(&["status"]); // the daemon's loop has then processed all events
    let mut buffer = [0u8; nvshare_wire::MAX_LEN];
    loop {
        // SAFETY: `buffer` is valid for writes of `buffer.len()` bytes, and the kernel writes no
        // more.
        let n = unsafe {
            libc::recv(client.socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_DONTWAIT)
        };
        let Ok(n) = usize::try_from(n) else { return };
        let message = SchedulerMessage::decode(&buffer[..n], client.version).expect("the protocol");
        assert!(!matches!(message, SchedulerMessage::Grant { .. }), "{message:?}");
    }
}

fn clients(daemon: &Daemon) -> Vec<serde_json::Value> {
    let status: serde_json::Value = serde_json::from_str(&daemon.ctl(&["--json"]).stdout).expect("JSON");
    status["clients"].as_array().expect("clients").clone()
}

#[test]
fn a_lock_and_its_memory_survive_a_killed_daemon() {
    let (manager, daemon) = kept();
    let [holder, waiter] = [(); 2].map(|()| resuming(&manager, &daemon));
    holder.report(12 * GIB, 0);
    holder.request();
    holder.until_granted();
    holder.report(12 * GIB, 12 * GIB);
    waiter.report(12 * GIB, 0);
    waiter.request();
    let directory = daemon.kill();

    let daemon = Daemon::start_under(&manager, directory);
    resume(&holder, 12 * GIB, 12 * GIB, 1);
    resume(&waiter, 12 * GIB, 0, 0);
    waiter.request();
    daemon.log.wait("2 of 2 programs continue");
    assert_not_granted(&daemon, &waiter);
    let status: serde_json::Value = serde_json::from_str(&daemon.ctl(&["--json"]).stdout).expect("JSON");
    assert_eq!(status["gpus"][0]["holders"], serde_json::json!([holder.id]));
    assert_eq!(status["gpus"][0]["resident"], 12 * GIB);

    drop(holder);
    waiter.until_granted();
    assert_eq!(daemon.log.count(" connected "), 0);
}

#[test]
fn a_client_asked_by_two_daemons_may_report_twice() {
    let (manager, daemon) = kept();
    let [holder, waiter] = [(); 2].map(|()| resuming(&manager, &daemon));
    holder.report(12 * GIB, 0);
    holder.request();
    holder.until_granted();
    let directory = daemon.kill();
    // This daemon asks the clients to report again, and is killed before it reads the reports.
    let daemon = Daemon::start_under(&manager, directory);
    for client in [&holder, &waiter] {
        until_asked(client);
    }
    let directory = daemon.kill();

    let daemon = Daemon::start_under(&manager, directory);
    for (client, mapped, gpus) in [(&holder, 12 * GIB, 1), (&waiter, 0, 0)] {
        say_again(client, 12 * GIB, 0);
        client.send(ClientMessage::Held { gpus });
        resume(client, 12 * GIB, mapped, gpus);
    }
    waiter.request();
    daemon.log.wait("2 of 2 programs continue");
    until(|| {
        let status: serde_json::Value = serde_json::from_str(&daemon.ctl(&["--json"]).stdout).expect("JSON");
        // The daemon uses the newest report.
        status["gpus"][0]["resident"] == 12 * GIB
    });
    assert_not_granted(&daemon, &waiter);
    assert_eq!(clients(&daemon).len(), 2);
    drop(holder);
    waiter.until_granted();
    assert_eq!(daemon.log.count("protocol violation") + daemon.log.count(" connected "), 0);
    // A second Hello is allowed only from clients that the daemon may have asked twice.
    let fresh = daemon.client();
    fresh.send(hello_again(fresh.id));
    fresh.until_end();
    daemon.log.wait("a second Hello");
}

#[test]
fn no_lock_is_granted_before_every_kept_client_has_answered() {
    let (manager, daemon) = kept();
    let [holder, waiter] = [(); 2].map(|()| resuming(&manager, &daemon));
    holder.request();
    holder.until_granted();
    let directory = daemon.kill();

    let daemon = Daemon::start_under(&manager, directory);
    resume(&waiter, GIB, 0, 0);
    waiter.request();
    // The daemon welcomes a new client, which waits too.
    let newcomer = daemon.client();
    newcomer.send(attach(0, GPU));
    newcomer.request();
    until_asked(&holder);
    assert_not_granted(&daemon, &waiter);
    assert_not_granted(&daemon, &newcomer);
    assert!(clients(&daemon).len() < 3);
    say_again(&holder, GIB, GIB);
    holder.send(ClientMessage::Held { gpus: 1 });
    daemon.log.wait("2 of 2 programs continue");
    holder.until(|message| matches!(message, SchedulerMessage::Contended { .. }));
    assert_not_granted(&daemon, &waiter);
    holder.release();
    waiter.until_granted();
}

#[test]
fn messages_to_the_previous_daemon_are_discarded() {
    let (manager, daemon) = kept();
    let client = resuming(&manager, &daemon);
    client.request();
    client.until_granted();
    let directory = daemon.kill();
    client.report(GIB, GIB);
    client.release();
    assert!(client.send_raw(b"half of something"));
    let daemon = Daemon::start_under(&manager, directory);
    until_asked(&client);
    client.report(2 * GIB, 2 * GIB);
    client.send(hello_again(client.id));
    // Another thread of the client reports memory of a GPU that isn't attached yet.
    client.report(3 * GIB, 3 * GIB);
    client.request();
    say_again(&client, 4 * GIB, 4 * GIB);
    client.send(ClientMessage::Held { gpus: 1 });
    daemon.log.wait("1 of 1 programs continue");
    let seen = &clients(&daemon)[0]["gpus"][0];
    assert_eq!((&seen["state"], &seen["resident"]), (&"holding".into(), &(4 * GIB).into()));
}

#[test]
fn a_stopping_daemon_closes_only_connections_that_are_not_kept() {
    let (manager, daemon) = kept();
    let client = resuming(&manager, &daemon);
    // This client uses no GPU, so it loses nothing when it is disconnected.
    let idle = Client::welcomed(&daemon.socket());
    let directory = daemon.stop();
    idle.until_end();
    assert_eq!(manager.kept().len(), 1);
    let daemon = Daemon::start_under(&manager, directory);
    resume(&client, 0, 0, 0);
    daemon.log.wait("1 of 1 programs continue");
    let directory = daemon.stop();
    // The unit is stopped permanently, so the manager closes the connections.
    manager.close_all();
    client.until_end();
    drop(directory);
}

#[test]
fn a_disconnected_client_is_removed_from_the_fd_store() {
    let (manager, daemon) = kept();
    let client = resuming(&manager, &daemon);
    drop(client);
    until(|| manager.kept().is_empty());
    let gone = resuming(&manager, &daemon);
    let stays = resuming(&manager, &daemon);
    let directory = daemon.kill();
    let daemon = Daemon::start_under(&manager, directory);
    // The client disconnects while the new daemon asks it to report again.
    drop(gone);
    resume(&stays, 0, 0, 0);
    daemon.log.wait("of 2 programs continue");
    until(|| clients(&daemon).len() == 1);
    until(|| manager.kept().len() == 1);
}

#[test]
fn client_ids_are_not_reused_after_a_restart() {
    let (manager, daemon) = kept();
    let client = resuming(&manager, &daemon);
    let directory = daemon.kill();
    let daemon = Daemon::start_under(&manager, directory);
    resume(&client, 0, 0, 0);
    assert!(daemon.client().id > client.id);
}

#[test]
fn a_client_that_answers_with_another_clients_id_is_disconnected() {
    let (manager, daemon) = kept();
    let [liar, honest] = [(); 2].map(|()| resuming(&manager, &daemon));
    let directory = daemon.kill();
    let daemon = Daemon::start_under(&manager, directory);
    until_asked(&liar);
    liar.send(hello_again(honest.id));
    resume(&honest, 0, 0, 0);
    liar.until_end();
    daemon.log.wait("1 of 2 programs continue");
    assert_eq!(clients(&daemon)[0]["id"], honest.id);
}

#[test]
fn an_unrequested_lock_claim_closes_the_connection() {
    let (manager, daemon) = kept();
    let client = resuming(&manager, &daemon);
    client.send(ClientMessage::Held { gpus: 1 });
    client.until_end();
    daemon.log.wait("unexpected Held");
}

#[test]
fn a_silent_kept_client_delays_other_clients_only_briefly() {
    let (manager, daemon) = kept();
    let [silent, other] = [(); 2].map(|()| resuming(&manager, &daemon));
    let directory = daemon.kill();
    let daemon = Daemon::start_under(&manager, directory);
    resume(&other, 0, 0, 0);
    other.request();
    silent.until_end();
    daemon.log.wait("does not answer");
    other.until_granted();
}

/// The client can hold a lock, but its process can run nothing on a GPU.
#[test]
fn a_silent_kept_client_without_memory_on_any_gpu_delays_no_client() {
    let test = "restart::a_silent_kept_client_without_memory_on_any_gpu_delays_no_client";
    if !has_own_process(test, &[("CUDA_SIM_MEMORY", (1u64 << 30).to_string())]) {
        return;
    }
    let (manager, daemon) = kept();
    daemon.log.wait("found");
    let [silent, other] = [(); 2].map(|()| resuming(&manager, &daemon));
    let directory = daemon.kill();
    let daemon = Daemon::start_under(&manager, directory);
    resume(&other, 0, 0, 0);
    other.request();
    other.until_granted();
    assert!(!daemon.log.lines().iter().any(|line| line.contains("does not answer")));
    silent.until_end();
    daemon.log.wait("does not answer");
}

#[test]
fn unknown_descriptors_in_the_fd_store_are_closed() {
    let directory = Directory::new();
    let manager = Manager::new(&directory.0);
    let null = std::fs::File::open("/dev/null").expect("a file");
    manager.keep("of-a-later-version", null.into());
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair");
    manager.keep(&format!("v{}.5.0", version::MAX + 1), theirs.into());
    let daemon = Daemon::start_under(&manager, directory);
    until(|| manager.kept().is_empty());
    let end = std::io::Read::read(&mut &ours, &mut [0u8; 1]).expect("the end");
    assert_eq!(end, 0, "whoever has the other end is told");
    assert!(daemon.client().id > 5);
}

#[test]
fn without_an_fd_store_clients_are_disconnected() {
    let directory = Directory::new();
    let manager = Manager::new(&directory.0);
    manager.keep_nothing();
    let daemon = Daemon::start_under(&manager, directory);
    let client = Client::welcomed(&daemon.socket());
    client.attach();
    until(|| manager.heard("FDSTORE=1") == 1);
    drop(daemon.stop());
    client.until_end();
}

// ---- locks over D-Bus ----------------------------------------------------------------------------------------------

/// A lock whose caller has disconnected from the scheduler, as `nvsharectl lock` does.
struct Lock {
    lines: BufReader<UnixStream>,
}

impl Lock {
    fn acquire(control: &Path) -> Self {
        block_on(async {
            let scheduler = scheduler(&on_control(control).await).await;
            let lock = scheduler.acquire_lock("", "bench", "to measure", HashMap::new()).await.expect("a lock");
            let stream = UnixStream::from(OwnedFd::from(lock));
            stream.set_nonblocking(false).expect("a blocking socket");
            stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
            Self { lines: BufReader::new(stream) }
        })
    }

    #[track_caller]
    fn next(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line in time");
        line
    }

    /// Reads the remaining lines until the end.
    #[track_caller]
    fn until_end(mut self) -> String {
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).expect("the end");
        rest
    }

    #[track_caller]
    fn is_open(&self) {
        self.lines.get_ref().set_nonblocking(true).expect("a socket");
        let read = self.lines.get_ref().read(&mut [0]);
        assert!(read.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock));
        self.lines.get_ref().set_nonblocking(false).expect("a socket");
    }
}

fn start_with_rule(manager: &Manager, directory: Directory) -> Daemon {
    // SAFETY: `geteuid` has no preconditions and cannot fail.
    let uid = unsafe { libc::geteuid() };
    let file = directory.0.join("nvshare.toml");
    std::fs::write(&file, format!("[[rule]]\nname = \"mine\"\nuser = {uid}\nweight = 50\n")).expect("the file");
    Daemon::start_in(directory, Some(manager), |command, _| {
        command.arg("--config").arg(&file);
    })
}

#[test]
fn a_d_bus_lock_survives_a_restart_with_its_identity() {
    let directory = Directory::new();
    let manager = Manager::new(&directory.0);
    let daemon = start_with_rule(&manager, directory);
    let other = resuming(&manager, &daemon);
    let mut lock = Lock::acquire(&daemon.control());
    assert_eq!(lock.next(), "granted\n");
    until(|| manager.kept().len() == 2);
    let seen =
        |daemon: &Daemon| clients(daemon).into_iter().find(|client| client["library"] == "D-Bus").expect("a lock");
    let before = seen(&daemon);
    assert_eq!((&before["rule"], &before["name"]), (&"mine".into(), &"bench".into()));

    // The daemon is killed, and the next daemon is stopped, as during an upgrade.
    let mut daemon = daemon;
    for how in [Daemon::kill, Daemon::stop] {
        let directory = how(daemon);
        lock.is_open();
        daemon = start_with_rule(&manager, directory);
        resume(&other, GIB, 0, 0);
        other.request();
        daemon.log.wait("bench continues");
        daemon.log.wait("1 of 1 programs continue");
        assert_not_granted(&daemon, &other);
        let after = seen(&daemon);
        for key in ["id", "pid", "uid", "name", "why", "command", "unit", "tenant", "rule", "share"] {
            assert_eq!(before[key], after[key], "{key}");
        }
        assert_eq!(after["gpus"][0]["state"], "holding");
        assert_eq!(lock.next(), "granted\n", "it is said again");
        assert_eq!(lock.next(), "wanted\n");
    }
    drop(lock);
    other.until_granted();
    until(|| manager.kept().len() == 1);
}

#[test]
fn a_waiting_d_bus_lock_survives_a_restart() {
    let (manager, daemon) = kept();
    let holder = resuming(&manager, &daemon);
    holder.request();
    holder.until_granted();
    let mut lock = Lock::acquire(&daemon.control());
    until(|| manager.kept().len() == 2);
    daemon.log.wait("Contended");
    let daemon = Daemon::start_under(&manager, daemon.kill());
    resume(&holder, GIB, GIB, 1);
    daemon.log.wait("1 of 1 programs continue");
    lock.is_open();
    holder.release();
    assert_eq!(lock.next(), "granted\n");
}

#[test]
fn a_lock_is_dropped_if_its_caller_exits_while_no_daemon_runs() {
    let (manager, daemon) = kept();
    let other = resuming(&manager, &daemon);
    let mut lock = Lock::acquire(&daemon.control());
    assert_eq!(lock.next(), "granted\n");
    until(|| manager.kept().len() == 2);
    let directory = daemon.kill();
    drop(lock);
    let daemon = Daemon::start_under(&manager, directory);
    resume(&other, 0, 0, 0);
    other.request();
    other.until_granted();
    until(|| manager.kept().len() == 1);
    assert_eq!(clients(&daemon).len(), 1);
}

#[test]
fn a_lock_outside_the_fd_store_ends_with_the_daemon() {
    let directory = Directory::new();
    let manager = Manager::new(&directory.0);
    manager.keep_nothing();
    let daemon = Daemon::start_under(&manager, directory);
    let client = daemon.client();
    client.attach();
    let mut lock = Lock::acquire(&daemon.control());
    assert_eq!(lock.next(), "granted\n");
    until(|| manager.heard("FDSTORE=1") == 2);
    let directory = daemon.kill();
    assert_eq!(lock.until_end(), "");

    let daemon = Daemon::start_under(&manager, directory);
    let client = daemon.client();
    client.attach();
    let mut lock = Lock::acquire(&daemon.control());
    assert_eq!(lock.next(), "granted\n");
    until(|| manager.heard("FDSTORE=1") == 4);
    drop(daemon.stop());
    assert_eq!(lock.until_end(), "");
}

#[test]
fn a_lock_that_cannot_be_restored_ends_and_its_caller_is_notified() {
    let (manager, daemon) = kept();
    let client = daemon.client();
    client.attach();
    let mut lock = Lock::acquire(&daemon.control());
    assert_eq!(lock.next(), "granted\n");
    until(|| manager.kept().len() == 2);
    drop(client);
    until(|| manager.kept().len() == 1);
    let directory = daemon.kill();
    // The manager keeps a lock with a record of a later version, and a lock without a record.
    let [(later, ours), (bare, theirs)] = [(); 2].map(|()| UnixStream::pair().expect("a pair"));
    manager.keep("l9.500.0", later.into());
    manager.keep("l9.500.0", std::fs::File::open("/dev/null").expect("a file").into());
    manager.keep("l1.600.0", bare.into());
    let daemon = Daemon::start_under(&manager, directory);
    daemon.log.wait("bench continues");
    for end in [ours, theirs] {
        assert_eq!((&end).read(&mut [0]).expect("the end"), 0);
    }
    until(|| manager.kept().len() == 1);
    assert_eq!(lock.next(), "granted\n");
    lock.is_open();
    assert!(daemon.client().id > 0x600);
}

#[test]
fn talkative_kept_clients_do_not_delay_other_clients() {
    if !is_root() {
        return test_support::skip("root, whose budget is larger: the program that waits here is of the same user");
    }
    let (manager, daemon) = kept();
    let talkers: Vec<Client> = (0..8).map(|_| resuming(&manager, &daemon)).collect();
    let daemon = Daemon::start_in(daemon.kill(), Some(&manager), |command, _| {
        command.args(["--log-level", "info"]);
    });
    let socket = daemon.socket();
    let talk = std::thread::spawn(move || {
        for (n, client) in (0..).zip(&talkers) {
            until_asked(client);
            client.send(hello_again(client.id));
            for _ in 0..480 {
                client.send(attach(1, nvshare_wire::Uuid([n + 100; 16])));
                client.send(ClientMessage::Detach { slot: 1 });
            }
            client.send(ClientMessage::Held { gpus: 0 });
        }
        // Clients are taken over in the order of their IDs.
        talkers.last().expect("a client").until(|message| matches!(message, SchedulerMessage::Attached { .. }));
        talkers
    });
    let mut welcomed = 0;
    while daemon.log.count("programs continue") == 0 {
        drop(Client::welcomed(&socket));
        welcomed += 1;
    }
    // From that log line on, the daemon handles the packets of the talkative programs.
    let mut later = 0;
    while !talk.is_finished() {
        drop(Client::welcomed(&socket));
        later += 1;
    }
    assert!(welcomed >= 5, "{welcomed} programs were welcomed before the talkative ones were taken over");
    assert!(later >= 5, "{later} programs were welcomed while the talkative ones were taken over");
    drop(talk.join().expect("no panic"));
}

#[test]
fn connections_that_cannot_be_stored_now_are_stored_later() {
    let (manager, daemon) = kept();
    let in_flight = InFlight::more_than_limit_of(daemon.child.id());
    let client = Client::welcomed(&daemon.socket());
    client.attach();
    daemon.log.wait("cannot pass descriptors to systemd");
    assert_eq!(manager.kept().len(), 0);
    drop(in_flight);
    until(|| manager.kept().len() == 1);
    drop(client);
    until(|| manager.kept().is_empty());
}
