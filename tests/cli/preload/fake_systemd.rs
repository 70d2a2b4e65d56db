//! A fake systemd on a private bus, which manages a test's services. Like systemd, it reads
//! drop-ins on reload.

use std::collections::HashMap;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use zbus::connection::Builder;
use zbus::{Connection, OwnedObjectPath};

const BUS: &str = "/mnt/bus";

/// The unit file of a service.
#[derive(Debug, Clone)]
pub struct Unit {
    pub name: &'static str,
    /// The service's alias.
    pub alias: &'static str,
    pub load_state: &'static str,
    pub environment: Vec<&'static str>,
    pub environment_files: Vec<&'static str>,
    pub unset_environment: Vec<&'static str>,
    pub root_directory: &'static str,
    pub root_image: &'static str,
    pub address_families: (bool, Vec<&'static str>),
    pub apparmor_profile: &'static str,
    pub program: &'static str,
    pub slice: &'static str,
    pub main_pid: u32,
    /// The active state after a start.
    pub active_state: &'static str,
    /// The active state and the sub-state some time after the start.
    pub later: (&'static str, &'static str),
}

impl Unit {
    pub fn new(name: &'static str) -> Self {
        Self {
            name,
            alias: "",
            load_state: "loaded",
            environment: Vec::new(),
            environment_files: Vec::new(),
            unset_environment: Vec::new(),
            root_directory: "",
            root_image: "",
            address_families: (false, Vec::new()),
            apparmor_profile: "",
            program: "/bin/true",
            slice: "system.slice",
            main_pid: 0,
            active_state: "active",
            later: ("active", "running"),
        }
    }
}

type Loaded = Arc<Mutex<HashMap<String, Vec<String>>>>;

/// The file that lists the names of restarted units, one per line.
pub const RESTARTED: &str = "/mnt/restarted";

struct Manager {
    units: Vec<Unit>,
    loaded: Loaded,
}

type Listed = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

#[zbus::interface(name = "org.freedesktop.systemd1.Manager")]
impl Manager {
    fn load_unit(&self, name: &str) -> OwnedObjectPath {
        let known = self.units.iter().position(|unit| unit.name == name || unit.alias == name);
        path(known.unwrap_or(self.units.len()))
    }

    fn restart_unit(&self, name: &str, mode: &str) -> OwnedObjectPath {
        assert_eq!(mode, "replace");
        let before = fs::read_to_string(RESTARTED).unwrap_or_default();
        fs::write(RESTARTED, format!("{before}{name}\n")).expect("a file");
        OwnedObjectPath::try_from("/org/freedesktop/systemd1/job/7").expect("a path")
    }

    fn reload(&self) {
        let mut loaded = self.loaded.lock().expect("what is loaded");
        for unit in &self.units {
            loaded.insert(unit.name.to_owned(), environment(unit));
        }
    }

    fn list_units_by_patterns(&self, _states: Vec<String>, _patterns: Vec<String>) -> Vec<Listed> {
        let listed = |(at, unit): (usize, &Unit)| {
            let (name, state, none) = (unit.name.to_owned(), unit.load_state.to_owned(), String::new);
            (name, none(), state, none(), none(), none(), path(at), 0, none(), path(at))
        };
        self.units.iter().enumerate().filter(|(_, unit)| unit.name.ends_with(".service")).map(listed).collect()
    }
}

fn path(at: usize) -> OwnedObjectPath {
    OwnedObjectPath::try_from(format!("/org/freedesktop/systemd1/unit/_{at}")).expect("a path")
}

/// Returns the environment of the unit file and of the drop-ins, in the order of the drop-ins'
/// names.
fn environment(unit: &Unit) -> Vec<String> {
    let mut environment: Vec<String> = unit.environment.iter().map(|pair| (*pair).to_owned()).collect();
    for name in [unit.name, unit.alias] {
        // Reads the files of the system's manager and of a user's manager, because the fake
        // represents both.
        let directories = ["/etc/systemd/system", "/mnt/config/systemd/user"];
        let directories = directories.map(|all| Path::new(all).join(format!("{name}.d")));
        let of = |directory: &std::path::PathBuf| fs::read_dir(directory).into_iter().flatten().flatten();
        let mut files: Vec<_> = directories.iter().flat_map(of).map(|file| file.path()).collect();
        files.sort();
        for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "conf")) {
            let text = fs::read_to_string(file).expect("a drop-in");
            let pairs = text.lines().filter_map(|line| line.strip_prefix("Environment="));
            environment.extend(pairs.map(|pair| pair.trim_matches('"').replace("%%", "%")));
        }
    }
    environment
}

struct Described(Unit);

impl Described {
    /// Whether some time has passed since the service was restarted.
    fn is_later(&self) -> bool {
        let restarted = fs::metadata(RESTARTED).and_then(|file| file.modified()).ok();
        let since = restarted.and_then(|time| time.elapsed().ok());
        self.0.active_state == "active" && since.is_some_and(|since| since > Duration::from_millis(300))
    }
}

#[zbus::interface(name = "org.freedesktop.systemd1.Unit")]
impl Described {
    #[zbus(property)]
    fn id(&self) -> String {
        self.0.name.into()
    }

    #[zbus(property)]
    fn load_state(&self) -> String {
        self.0.load_state.into()
    }

    #[zbus(property)]
    fn active_state(&self) -> String {
        if self.is_later() { self.0.later.0.into() } else { self.0.active_state.into() }
    }

    #[zbus(property)]
    fn sub_state(&self) -> String {
        if self.is_later() { self.0.later.1.into() } else { "running".into() }
    }

    #[zbus(property)]
    fn job(&self) -> (u32, OwnedObjectPath) {
        (0, OwnedObjectPath::try_from("/").expect("a path"))
    }
}

struct Service(Unit, Loaded);

fn owned(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

#[zbus::interface(name = "org.freedesktop.systemd1.Service")]
impl Service {
    #[zbus(property)]
    fn environment(&self) -> Vec<String> {
        self.1.lock().expect("what is loaded").get(self.0.name).cloned().unwrap_or_default()
    }

    #[zbus(property)]
    fn environment_files(&self) -> Vec<(String, bool)> {
        self.0.environment_files.iter().map(|file| ((*file).to_owned(), false)).collect()
    }

    #[zbus(property)]
    fn unset_environment(&self) -> Vec<String> {
        owned(&self.0.unset_environment)
    }

    #[zbus(property)]
    fn root_directory(&self) -> String {
        self.0.root_directory.into()
    }

    #[zbus(property)]
    fn root_image(&self) -> String {
        self.0.root_image.into()
    }

    #[zbus(property)]
    fn restrict_address_families(&self) -> (bool, Vec<String>) {
        (self.0.address_families.0, owned(&self.0.address_families.1))
    }

    #[zbus(property)]
    fn app_armor_profile(&self) -> (bool, String) {
        (false, self.0.apparmor_profile.into())
    }

    #[zbus(property)]
    #[allow(clippy::type_complexity)]
    fn exec_start(&self) -> Vec<(String, Vec<String>, bool, u64, u64, u64, u64, u32, i32, i32)> {
        vec![(self.0.program.into(), vec![self.0.program.into()], false, 0, 0, 0, 0, 0, 0, 0)]
    }

    #[zbus(property, name = "MainPID")]
    fn main_pid(&self) -> u32 {
        self.0.main_pid
    }

    #[zbus(property)]
    fn slice(&self) -> String {
        self.0.slice.into()
    }
}

/// The fake systemd, which runs until this value is dropped.
#[derive(Debug)]
pub struct Systemd {
    bus: Child,
    _stop: tokio::sync::oneshot::Sender<()>,
}

impl Systemd {
    pub const ADDRESS: &'static str = "unix:path=/mnt/bus";

    pub fn start(units: Vec<Unit>) -> Self {
        let config = format!(
            r#"<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
                "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
            <busconfig>
              <listen>unix:path={BUS}</listen>
              <auth>EXTERNAL</auth>
              <policy context="default">
                <allow user="*"/>
                <allow own="*"/>
                <allow send_type="method_call"/>
                <allow send_type="signal"/>
                <allow send_requested_reply="true" send_type="method_return"/>
                <allow send_requested_reply="true" send_type="error"/>
                <allow receive_type="method_call"/>
                <allow receive_type="method_return"/>
                <allow receive_type="error"/>
                <allow receive_type="signal"/>
              </policy>
            </busconfig>"#
        );
        fs::write("/mnt/bus.conf", config).expect("a file");
        let _ = fs::remove_file(BUS);
        let mut command = Command::new("dbus-daemon");
        command.args(["--config-file=/mnt/bus.conf", "--nofork"]).stdout(Stdio::null()).stderr(Stdio::null());
        let bus = command.spawn().expect("dbus-daemon is installed");
        test_support::wait_for("the bus", || UnixStream::connect(BUS).ok());

        let (ready, is_ready) = channel();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let connection = serve(units).await.expect("the bus");
                ready.send(()).expect("the test waits");
                let _ = stopped.await;
                drop(connection);
            });
        });
        is_ready.recv().expect("it is there");
        Self { bus, _stop: stop }
    }
}

async fn serve(units: Vec<Unit>) -> zbus::Result<Connection> {
    let loaded = Loaded::default();
    let manager = Manager { units: units.clone(), loaded: loaded.clone() };
    manager.reload();
    let nothing = Unit { load_state: "not-found", ..Unit::new("nothing.service") };
    let mut builder = Builder::address(Systemd::ADDRESS);
    for (at, unit) in units.into_iter().chain([nothing]).enumerate() {
        builder = builder.serve_at(path(at), Described(unit.clone())).serve_at(path(at), Service(unit, loaded.clone()));
    }
    builder.serve_at("/org/freedesktop/systemd1", manager).name("org.freedesktop.systemd1").build().await
}

impl Drop for Systemd {
    fn drop(&mut self) {
        let _ = self.bus.kill();
        let _ = self.bus.wait();
    }
}
