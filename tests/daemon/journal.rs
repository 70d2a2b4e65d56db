//! The log as journald receives it. The daemon runs in a mount namespace with the test's own
//! journald.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command};

use test_support::daemon::*;

/// Mounts the socket of the test's journald where the daemon looks for journald.
const ENTER: &str = "mount -t tmpfs none /run && mkdir -p /run/systemd/journal && \
                     mount --bind \"$JOURNALD\" /run/systemd/journal && exec \"$@\"";

struct Journald {
    socket: UnixDatagram,
    daemon: Child,
    directory: Directory,
}

impl Drop for Journald {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

impl Journald {
    /// Starts a daemon that logs to the test's journald.
    fn start() -> Self {
        let directory = Directory::new();
        let journald = directory.0.join("journald");
        std::fs::create_dir(&journald).expect("a directory");
        let socket = UnixDatagram::bind(journald.join("socket")).expect("a socket");
        socket.set_read_timeout(Some(PATIENCE)).expect("a limit");
        // systemd tells a service the inode of its stderr, so that the service can detect that
        // stderr is the journal.
        let stderr = std::fs::File::create(directory.0.join("stderr")).expect("a file");
        let inode = stderr.metadata().expect("its inode");
        let daemon = command(&directory.0);
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-ec", ENTER, "sh"]);
        command.arg(daemon.get_program()).args(daemon.get_args()).args(["--no-bus", "--log-level", "debug"]);
        command.env_remove("NOTIFY_SOCKET").env_remove("STATE_DIRECTORY").env("JOURNALD", &journald);
        command.env("JOURNAL_STREAM", format!("{}:{}", inode.dev(), inode.ino())).stderr(stderr);
        let daemon = command.spawn().expect("unshare");
        Self { socket, daemon, directory }
    }

    /// Returns the fields of the next entry by name.
    fn next(&self) -> BTreeMap<String, String> {
        let mut buffer = [0; 64 << 10];
        let length = self.socket.recv(&mut buffer).unwrap_or_else(|e| panic!("no entry came ({e}): {}", self.stderr()));
        let mut entry = &buffer[..length];
        let mut fields = BTreeMap::new();
        while let Some(end) = entry.iter().position(|b| *b == b'\n') {
            let (name, rest) = (String::from_utf8(entry[..end].to_vec()).expect("ASCII"), &entry[end + 1..]);
            if let Some((name, value)) = name.split_once('=') {
                fields.insert(name.to_owned(), value.to_owned());
                entry = rest;
                continue;
            }
            let (length, rest) = rest.split_first_chunk().expect("a length");
            let (value, rest) = rest.split_at(u64::from_le_bytes(*length) as usize);
            assert_eq!(rest[0], b'\n');
            fields.insert(name, String::from_utf8(value.to_vec()).expect("UTF-8"));
            entry = &rest[1..];
        }
        fields
    }

    fn until(&self, text: &str) -> BTreeMap<String, String> {
        loop {
            let fields = self.next();
            if fields.get("MESSAGE").is_some_and(|message| message.contains(text)) {
                return fields;
            }
        }
    }

    fn stderr(&self) -> String {
        std::fs::read_to_string(self.directory.0.join("stderr")).unwrap_or_default()
    }
}

#[test]
fn entries_have_their_fields_and_a_hung_journald_blocks_no_client() {
    if !is_root() {
        return test_support::skip("root, for a mount namespace");
    }
    let journald = Journald::start();
    let started = journald.until(" serves ");
    let expected = [
        ("MESSAGE_ID", "acf6bc07a00d4831a5ed96566922874a"),
        ("PRIORITY", "6"),
        ("SYSLOG_IDENTIFIER", "nvshare-scheduler"),
        ("TARGET", "nvshare::daemon::run"),
    ];
    for (name, value) in expected {
        assert_eq!(started.get(name).map(String::as_str), Some(value), "{started:?}");
    }
    assert!(started["CODE_FILE"].ends_with("run.rs") && started["CODE_LINE"].parse::<u32>().is_ok());

    let socket = journald.directory.0.join("run/scheduler.sock");
    let client = Client::welcomed(&socket);
    let connected = journald.until(" connected");
    let pid = std::process::id().to_string();
    let expected = [
        ("MESSAGE_ID", "bb785cb9d05f4fc3b70e30440bfbf0b8"),
        ("NVSHARE_CLIENT", "1"),
        ("NVSHARE_PID", &pid),
        ("NVSHARE_UID", "0"),
        ("NVSHARE_LIBRARY", "test"),
    ];
    for (name, value) in expected {
        assert_eq!(connected.get(name).map(String::as_str), Some(value), "{connected:?}");
    }
    client.attach();
    let attached = journald.until("attached");
    assert_eq!((attached["PRIORITY"].as_str(), attached.get("MESSAGE_ID")), ("7", None));

    // The daemon writes more lines than a socket buffer holds, while no process reads them.
    for _ in 0..300 {
        client.request();
        client.until_granted();
        client.release();
    }
    drop(client);
    drop(Client::welcomed(&socket));
    assert_eq!(journald.stderr(), "", "nothing of it is on stderr");
    // The log continues where it stopped.
    journald.until("disconnected");
    journald.until(" connected");
}
