//! The HTTP server for metrics: its sockets, its limit on clients, and clients that speak HTTP
//! incorrectly or not at all.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Stdio;
use std::thread;

use super::scrape::{self, *};
use test_support::daemon::*;
use test_support::manager::Manager;

/// Returns the TCP address of the metrics from the log.
fn address(daemon: &Daemon) -> String {
    let line = daemon.log.wait("metrics are at 127.0.0.1:");
    line.rsplit(' ').next().expect("an address").to_owned()
}

#[test]
fn a_unix_socket_is_accessible_to_its_group() {
    let daemon = scrape::daemon("", "");
    let path = metrics_path(&daemon.directory.0);
    scrape(&daemon.directory.0);
    assert_eq!(std::fs::metadata(&path).expect("a socket").permissions().mode() & 0o777, 0o660);
    let directory = daemon.stop();
    assert!(!exists(metrics_path(&directory.0)), "it goes with the daemon");
}

#[test]
fn metrics_are_served_over_tcp() {
    let daemon = scrape::daemon("127.0.0.1:0", "");
    let client = daemon.client();
    client.attach();
    assert_eq!(scrape_tcp(&address(&daemon)).of_gpu("clients"), 1.0);
}

#[test]
fn systemd_can_pass_a_unix_or_a_tcp_socket() {
    let directory = Directory::new();
    let manager = Manager::new(&directory.0);
    let path = directory.0.join("given.sock");
    let local = UnixListener::bind(&path).expect("a socket");
    manager.keep("metrics", local.into());
    let daemon = Daemon::start_under(&manager, directory);
    read(ask(connect(&path), GET.as_bytes()).expect("an answer"));
    let directory = daemon.stop();
    assert!(exists(&path), "a socket that systemd owns is not removed");

    manager.close_all();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
    let at = listener.local_addr().expect("an address").to_string();
    manager.keep("metrics", listener.into());
    // The daemon also serves the sockets of the configuration.
    let daemon = Daemon::start_in(directory, Some(&manager), |command, path| configure(command, path, "", ""));
    scrape_tcp(&at);
    scrape(&daemon.directory.0);
}

#[test]
fn a_datagram_socket_from_systemd_is_rejected() {
    let directory = Directory::new();
    let manager = Manager::new(&directory.0);
    manager.keep("metrics", OwnedFd::from(UdpSocket::bind("127.0.0.1:0").expect("a socket")));
    let output = Output::of(&mut manager.wrap(command(&directory.0).arg("--no-bus")));
    assert_eq!(output.code, Some(1));
    assert!(output.stderr.contains("the socket \"metrics\" from systemd is not a listening socket"), "{output:?}");
}

#[test]
fn an_unusable_address_fails_the_start() {
    let directory = Directory::new();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a socket");
    let taken = taken.local_addr().expect("an address").to_string();
    let _listener = TcpListener::bind(&taken);
    let file = directory.0.join("file");
    std::fs::write(&file, "").expect("a file");
    let cases = [
        (taken.clone(), format!("cannot serve metrics on {taken} (`listen` in [metrics]): Address already in use")),
        (file.display().to_string(), format!("(`listen` in [metrics]): {} exists and is not a socket", file.display())),
        ("/proc/no/metrics.sock".into(), "(`listen` in [metrics]): cannot create the directory of".into()),
        ("9810".into(), "metrics.listen cannot be \"9810\": the path of a socket, like".into()),
    ];
    let _listener = TcpListener::bind(&taken);
    for (listen, expected) in cases {
        let mut command = command(&directory.0);
        configure(&mut command, &directory.0, &listen, "");
        let output = Output::of(command.arg("--no-bus").stdin(Stdio::null()));
        assert_eq!(output.code, Some(1), "{listen}: {output:?}");
        assert!(output.stderr.contains(&expected), "{expected:?}: {output:?}");
    }
}

#[test]
fn the_address_does_not_change_at_run_time() {
    let daemon = scrape::daemon("", "");
    let file = daemon.directory.0.join("nvshare.toml");
    std::fs::write(file, "[metrics]\nlisten = \"/run/elsewhere.sock\"\n").expect("a configuration");
    daemon.signal(libc::SIGHUP);
    daemon.log.wait("[metrics] listen changed; restart the scheduler to apply it");
    scrape(&daemon.directory.0);
}

#[test]
fn paths_and_methods_other_than_get_metrics_are_rejected() {
    let daemon = scrape::daemon("", "");
    let ask = |request: &str| ask(connect(&metrics_path(&daemon.directory.0)), request.as_bytes());
    for path in ["/", "/metrics/", "/metric", "//metrics", "/../metrics", "/%6detrics"] {
        let answer = ask(&format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")).expect("an answer");
        assert_eq!(answer.status, 404, "{path}");
    }
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"] {
        let answer = ask(&format!("{method} /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).expect("an answer");
        assert_eq!((answer.status, answer.header("allow")), (405, Some("GET, HEAD")), "{method}");
    }
    read(ask("GET /metrics?name=x HTTP/1.1\r\nHost: x\r\n\r\n").expect("an answer"));
    read(ask("GET /metrics HTTP/1.0\r\n\r\n").expect("an answer"));
    read(ask("GET http://elsewhere/metrics HTTP/1.1\r\nHost: x\r\n\r\n").expect("an answer"));
    let head = ask("HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n").expect("an answer");
    assert_eq!((head.status, &*head.body), (200, ""));
    assert!(head.header("content-length").is_some_and(|length| length != "0"), "{head:?}");
}

#[test]
fn an_invalid_request_closes_only_its_own_connection() {
    let daemon = scrape::daemon("", "");
    let path = metrics_path(&daemon.directory.0);
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(100_000));
    let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "X: y\r\n".repeat(10_000));
    let cases: [&[u8]; 8] = [
        b"\0\0\0\0\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /metrics HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        long.as_bytes(),
        many.as_bytes(),
    ];
    for case in cases {
        let stream = connect(&path);
        let rest = stream.try_clone().expect("a copy");
        let answer = ask(&stream, case);
        drop(rest);
        assert!(answer.as_ref().is_none_or(|answer| (400..=505).contains(&answer.status)), "{case:?}: {answer:?}");
    }
    // These clients disconnect in the middle of a request.
    for _ in 0..200 {
        let mut stream = connect(&path);
        let _ = stream.write_all(b"GET /metrics HT");
    }
    scrape(&daemon.directory.0);
    daemon.client().attach();
}

/// A silent client occupies one of the server's 64 connections for some time. Then the server
/// disconnects that client and accepts another.
#[test]
fn silent_clients_are_disconnected() {
    let daemon = scrape::daemon("", "");
    let silent: Vec<UnixStream> = (0..64).map(|_| connect(&metrics_path(&daemon.directory.0))).collect();
    // The server accepts no client until it disconnects the silent clients.
    scrape(&daemon.directory.0);
    for mut stream in silent {
        let mut rest = Vec::new();
        // The daemon may send the reason first.
        stream.read_to_end(&mut rest).expect("the end");
        assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 408"), "{:?}", String::from_utf8_lossy(&rest));
    }
}

/// The metrics of this many clients don't fit into any socket's buffer.
const CLIENTS: usize = 250;

fn crowd(daemon: &Daemon) -> Vec<Client> {
    let clients: Vec<Client> = (0..CLIENTS).map(|_| daemon.client()).collect();
    clients.iter().for_each(|client| client.send(attach(0, GPU)));
    test_support::wait_for("all clients", || {
        let scrape = scrape(&daemon.directory.0);
        (scrape.families.contains_key("nvshare_gpu_clients") && scrape.of_gpu("clients") == CLIENTS as f64)
            .then_some(())
    });
    clients
}

#[test]
fn concurrent_scrapes_of_many_clients_do_not_block_grants() {
    test_support::raise_descriptor_limit();
    let daemon = scrape::daemon("", "max-clients-per-tenant = 65535\nanti-thrash = \"on\"");
    let clients = crowd(&daemon);
    let (one, other) = (daemon.client(), daemon.client());
    [&one, &other].into_iter().for_each(Client::attach);
    let directory = daemon.directory.0.clone();
    let reading: Vec<_> = (0..4)
        .map(|_| {
            let path = metrics_path(&directory);
            thread::spawn(move || {
                let answers = (0..5).map(|_| ask(connect(&path), GET.as_bytes()).expect("an answer"));
                answers.reduce(|_, newest| newest).expect("several")
            })
        })
        .collect();
    // The lock is passed back and forth until all readers are done.
    let mut turns = 0;
    while turns < 20 || reading.iter().any(|reader| !reader.is_finished()) {
        for client in [&one, &other] {
            client.request();
            client.until_granted();
            client.release();
        }
        turns += 1;
    }
    for reader in reading {
        let answer = reader.join().expect("it reads");
        assert_eq!(answer.status, 200);
        let samples = |name: &str| answer.body.lines().filter(|line| line.starts_with(&format!("{name}{{"))).count();
        assert_eq!(samples("nvshare_client_grants_total"), CLIENTS + 2);
        assert!(answer.body.ends_with("# EOF\n"));
    }
    let last = test_support::wait_for("all grants to be counted", || {
        Some(scrape(&directory)).filter(|last| last.of_gpu("grants") == 2.0 * f64::from(turns))
    });
    assert_eq!(last.of_gpu("clients"), (CLIENTS + 2) as f64);
    assert_eq!(last.families["nvshare_client_demand_bytes"].samples.len(), CLIENTS + 2);
    drop(clients);
    daemon.client().attach();
}

#[test]
fn readers_that_do_not_read_block_no_other_reader() {
    test_support::raise_descriptor_limit();
    let daemon = scrape::daemon("", "max-clients-per-tenant = 65535");
    let _clients = crowd(&daemon);
    let path = metrics_path(&daemon.directory.0);
    let begin = |path: &Path| {
        let mut stream = connect(path);
        stream.write_all(GET.as_bytes()).expect("it listens");
        stream
    };
    let stuck: Vec<UnixStream> = (0..40).map(|_| begin(&path)).collect();
    for _ in 0..5 {
        assert_eq!(scrape(&daemon.directory.0).of_gpu("clients"), CLIENTS as f64);
    }
    let client = daemon.client();
    client.attach();
    client.request();
    client.until_granted();
    daemon.log.wait("metrics connection failed: timed out");
    let mut rest = String::new();
    (&stuck[0]).read_to_string(&mut rest).expect("the end");
    assert!(rest.starts_with("HTTP/1.1 200") && !rest.ends_with("# EOF\n"), "{} bytes", rest.len());
}

#[test]
fn a_slow_tcp_reader_gets_the_whole_answer() {
    let daemon = scrape::daemon("127.0.0.1:0", "");
    daemon.client().attach();
    let mut stream = TcpStream::connect(address(&daemon)).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    for part in GET.as_bytes().chunks(16) {
        stream.write_all(part).expect("it listens");
        thread::sleep(std::time::Duration::from_millis(10));
    }
    let mut all = Vec::new();
    while let Ok(1..) = Read::by_ref(&mut stream).take(64).read_to_end(&mut all) {}
    assert!(all.ends_with(b"# EOF\n"), "{}", String::from_utf8_lossy(&all));
}
