//! A private bus for the scheduler, and connections to the bus.

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nvshare::bus::SchedulerProxy;
use zbus::Connection;
use zbus::connection::Builder;
use zbus::proxy::CacheProperties;

use test_support::daemon::*;

/// A bus with the installed policy, so that the bus treats the scheduler as the system bus does. A
/// fake polkit may be on the bus.
#[derive(Debug)]
pub struct Bus {
    child: Child,
    pub address: String,
    _directory: Directory,
}

impl Bus {
    pub fn start() -> Self {
        let directory = Directory::new();
        Self::start_at(directory)
    }

    pub fn start_at(directory: Directory) -> Self {
        let policy = std::fs::canonicalize("dbus/org.nvshare.Scheduler1.conf").expect("the policy");
        let config = format!(
            r#"<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
                "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
            <busconfig>
              <listen>unix:path={}</listen>
              <auth>EXTERNAL</auth>
              <policy context="default">
                <allow user="*"/>
                <deny own="*"/>
                <deny send_type="method_call"/>
                <allow send_type="signal"/>
                <allow send_requested_reply="true" send_type="method_return"/>
                <allow send_requested_reply="true" send_type="error"/>
                <allow receive_type="method_call"/>
                <allow receive_type="method_return"/>
                <allow receive_type="error"/>
                <allow receive_type="signal"/>
                <allow send_destination="org.freedesktop.DBus"/>
                <allow own="org.freedesktop.PolicyKit1"/>
                <allow send_destination="org.freedesktop.PolicyKit1"/>
                <allow own="org.freedesktop.login1"/>
                <allow send_destination="org.freedesktop.login1"/>
                <allow own="com.feralinteractive.GameMode"/>
                <allow send_destination="com.feralinteractive.GameMode"/>
              </policy>
              <policy user="{}"><allow own="org.nvshare.Scheduler1"/></policy>
              <include>{}</include>
            </busconfig>"#,
            directory.0.join("bus").display(),
            // The installed policy lets root and the user nvshare own the scheduler's name. On this
            // bus, the test's user may own it.
            rustix::process::getuid().as_raw(),
            policy.display()
        );
        let file = directory.0.join("bus.conf");
        std::fs::write(&file, config).expect("a file");
        let mut child = Command::new("dbus-daemon")
            .arg(format!("--config-file={}", file.display()))
            .args(["--nofork", "--print-address=1"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("dbus-daemon is installed");
        let mut address = String::new();
        let stdout = child.stdout.take().expect("its stdout");
        BufReader::new(stdout).read_line(&mut address).expect("an address");
        Self { child, address: address.trim().to_owned(), _directory: directory }
    }

    pub fn daemon(&self) -> Daemon {
        let daemon = Daemon::start_with(|command, _| {
            command.arg("--bus-address").arg(&self.address);
        });
        daemon.log.wait("on the bus as");
        daemon
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a test on a new tokio runtime.
pub fn block_on<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    // Some steps of the test may take `PATIENCE` each.
    runtime.block_on(async { tokio::time::timeout(2 * PATIENCE, work).await.expect("in time") })
}

/// Polls until `look` returns an answer.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = look().await {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} in vain for {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub async fn on_bus(bus: &Bus) -> Connection {
    Builder::address(bus.address.as_str()).build().await.expect("the bus")
}

pub async fn on_control(path: &Path) -> Connection {
    let stream = UnixStream::connect(path).expect("the control socket");
    Builder::unix_stream(stream).p2p().build().await.expect("the handshake")
}

pub async fn scheduler(connection: &Connection) -> SchedulerProxy<'static> {
    let builder = SchedulerProxy::builder(connection).cache_properties(CacheProperties::No);
    builder.build().await.expect("a proxy")
}

/// Returns the name and the text of a D-Bus error.
pub fn refusal<T: std::fmt::Debug>(result: zbus::Result<T>) -> (String, String) {
    use zbus::DBusError;
    match result.expect_err("it is refused") {
        zbus::Error::MethodError(name, text, _) => (name.to_string(), text.unwrap_or_default()),
        zbus::Error::FDO(error) => match *error {
            zbus::fdo::Error::ZBus(zbus::Error::MethodError(name, text, _)) => {
                (name.to_string(), text.unwrap_or_default())
            }
            other => (other.name().to_string(), other.description().unwrap_or_default().to_owned()),
        },
        other => panic!("{other:?}"),
    }
}
