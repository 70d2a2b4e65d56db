//! The effect of hostile tenants on another tenant. Each hostile tenant uses its limits fully, and
//! floods the scheduler with messages, connections, or calls over D-Bus. The daemon and each
//! hostile tenant are real processes. The clients are only sockets.
//!
//! `cargo bench --bench hostile [-- --bus-only] [--json FILE]` requires root, in order to have several
//! users. With a file, the benchmark writes the figures to it (see `bench_support::results`). With
//! `--bus-only`, it measures only a flood on the bus.

#[expect(dead_code, reason = "it needs only hand-overs")]
mod crowd;
#[expect(dead_code, reason = "it needs only the bus and a connection")]
#[path = "../tests/daemon/private_bus.rs"]
mod private_bus;

use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bench_support::results::{Figure, Results};
use bench_support::stage::Stage;
use crowd::{at, hand_overs};
use nvshare_wire::client::{ReleaseReason, Sharing, StuckReason};
use nvshare_wire::env_limits::LimitName;
use nvshare_wire::visible_devices::Chooser;
use nvshare_wire::{ClientMessage, SchedulerMessage, Secret, Text, Uuid, version};
use test_support::daemon::{self, Client, Daemon, GIB};
use test_support::manager::Manager;

/// The default limit of clients per tenant.
const CLIENTS: usize = 512;
/// The maximum number of imports per tenant.
const IMPORTS: u32 = 4096;
/// Length of the flood on the bus.
const BUS_FLOOD: Duration = Duration::from_secs(10);
/// Interval between two probes of the loop.
const LOOK: Duration = Duration::from_millis(1);
/// A GPU that only hostile clients use, and a GPU that only the probe uses.
const THEIRS: Uuid = Uuid([8; 16]);
const OURS: Uuid = Uuid([6; 16]);

/// The floods of hostile tenants.
const FLOODS: [(&str, &str); 6] = [
    ("messages", "every message, from all of its clients"),
    ("waiting", "requests of all of its clients for one GPU"),
    ("leaving", "an exporter of as much memory as may be open, which ends"),
    ("connections", "connections"),
    ("hellos", "Hello of no version, and packets after it"),
    ("gpus", "GPUs that do not exist"),
];

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--flood") {
        return flood(&arguments[at + 1], Path::new(&arguments[at + 2]));
    }
    assert!(daemon::is_root(), "only root can be several users");
    let mut results = Results::from_arguments();
    results.add(flood_of_bus());
    if arguments.iter().any(|argument| argument == "--bus-only") {
        return results.write();
    }
    println!("{:>56}  {:>9}  {:>9}  {:>9}  {:>9}  {:>9}", "beside", "median", "99 %", "longest", "loop", "Welcome");
    row("nobody", &[], false);
    for (name, what) in FLOODS {
        row(&format!("one tenant: {what}"), &[(65534, name)], false);
    }
    row("calls over D-Bus", &[], true);
    let names = FLOODS.map(|(name, _)| name);
    // Each flood has its own user, so that each tenant uses its limits fully.
    let all: Vec<(u32, &str)> = (65_000..).zip(names).collect();
    let worst = row("six tenants, one for each of these, and D-Bus", &all, true);
    let note = format!("beside {} hostile tenants at their limits, and calls over D-Bus", all.len());
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    for (name, value) in [("hostile-loop-gap-max", worst.gap), ("handover-beside-hostile-p99", worst.handover)] {
        results.add(Figure { name, value: ms(value), unit: "ms", note: note.clone() });
    }
    // NVML shows that the silent clients are on no GPU.
    let stage = Stage::from_arguments();
    stage.simulate(16 * GIB, &[]);
    let (first, clients) = first_grant_after_restart(&all);
    println!("first grant to another tenant after SIGKILL and a restart beside all six: {first:.1?}");
    let note = format!("a new client of another tenant, after SIGKILL, with NVML; {clients} connections were kept");
    results.add(Figure { name: "restart-beside-hostile", value: first.as_secs_f64(), unit: "s", note });
    results.write();
}

/// Floods the bus with calls of one connection that expect no reply. Returns the scheduler's memory at
/// the end.
fn flood_of_bus() -> Figure {
    let bus = private_bus::Bus::start();
    let daemon = bus.daemon();
    let begin = Instant::now();
    let flood = Flood::start(65534, "calls", Path::new(&bus.address));
    let mut took = private_bus::block_on(async {
        let mut took = Vec::new();
        let connection = private_bus::on_bus(&bus).await;
        let scheduler = private_bus::scheduler(&connection).await;
        while begin.elapsed() < BUS_FLOOD {
            tokio::time::sleep(Duration::from_millis(500)).await;
            let begin = Instant::now();
            scheduler.set_time_quantum(45).await.expect("root may");
            took.push(begin.elapsed());
        }
        took
    });
    let bytes = daemon.private_memory();
    drop(flood);
    took.sort();
    let [median, longest] = [0.5, 1.0].map(|share| at(&took, share));
    println!("flood of the bus: {} KiB; root's answers took {median:.1?}, at most {longest:.1?}", bytes >> 10);
    let note = format!(
        "at the end of {BUS_FLOOD:?} of calls by one connection, which expect no reply; root's change of a setting \
         was answered after at most {longest:.1?}"
    );
    Figure { name: "dbus-flood-memory", value: bytes as f64 / 1e6, unit: "MB", note }
}

/// Restarts the scheduler during floods. Returns the time from the start until a new client of another
/// tenant gets the lock of its GPU, and the number of kept connections.
fn first_grant_after_restart(floods: &[(u32, &str)]) -> (Duration, usize) {
    let directory = daemon::Directory::new();
    let manager = Manager::new(&directory.0);
    let daemon = Daemon::start_under(&manager, directory);
    let _floods: Vec<Flood> = floods.iter().map(|(uid, name)| Flood::start(*uid, name, &daemon.socket())).collect();
    std::thread::sleep(Duration::from_secs(5));
    let directory = daemon.kill();
    let kept = manager.kept().len();
    let begin = Instant::now();
    let daemon = Daemon::start_under(&manager, directory);
    let client = daemon.client();
    client.attach_gpu(OURS, 1 << 40);
    client.request();
    client.until_granted();
    (begin.elapsed(), kept)
}

struct Measured {
    gap: Duration,
    handover: Duration,
}

/// Prints the times of hand-overs during floods. Also prints the longest time for which the loop
/// did not answer, and the longest time until a new program was welcomed.
fn row(what: &str, floods: &[(u32, &str)], on_bus: bool) -> Measured {
    // The daemon runs with the default limits.
    let daemon = Daemon::start_with(|command, directory| {
        let file = directory.join("nvshare.toml");
        std::fs::write(&file, "anti-thrash = \"on\"\n").expect("a configuration");
        command.arg("--config").arg(file).args(["--log-level", "info"]);
    });
    let _floods: Vec<Flood> = floods.iter().map(|(uid, name)| Flood::start(*uid, name, &daemon.socket())).collect();
    let control = daemon.control();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        if on_bus {
            for _ in 0..4 {
                scope.spawn(|| call(&control, &done));
            }
        }
        std::thread::sleep(Duration::from_secs(3)); // until the floods have reached their limits
        let gap = scope.spawn(|| longest_gap(&daemon, &done));
        let welcome = scope.spawn(|| longest_welcome(&daemon, &done));
        let times = hand_overs(&daemon, None);
        std::thread::sleep(Duration::from_secs(5)); // the loop is observed for longer
        done.store(true, Ordering::Relaxed);
        let (gap, welcome) = (gap.join().expect("no panic"), welcome.join().expect("no panic"));
        let [median, most, all] = [0.5, 0.99, 1.0].map(|share| at(&times, share));
        println!("{what:>56}  {median:>9.1?}  {most:>9.1?}  {all:>9.1?}  {gap:>9.1?}  {welcome:>9.1?}");
        Measured { gap, handover: most }
    })
}

/// Measures the longest time until the only client of a GPU gets the lock.
fn longest_gap(daemon: &Daemon, done: &AtomicBool) -> Duration {
    let client = daemon.client();
    client.attach_gpu(OURS, 1 << 40);
    let mut longest = Duration::ZERO;
    while !done.load(Ordering::Relaxed) {
        let begin = Instant::now();
        client.request();
        client.until_granted();
        longest = longest.max(begin.elapsed());
        client.release();
        std::thread::sleep(LOOK);
    }
    longest
}

fn longest_welcome(daemon: &Daemon, done: &AtomicBool) -> Duration {
    let mut longest = Duration::ZERO;
    while !done.load(Ordering::Relaxed) {
        let begin = Instant::now();
        drop(daemon.client());
        longest = longest.max(begin.elapsed());
        std::thread::sleep(10 * LOOK);
    }
    longest
}

/// Calls methods on the bus, and expects no replies.
fn calls(address: &str) {
    private_bus::block_on(async {
        let connection = zbus::connection::Builder::address(address).build().await.expect("the bus");
        let call = |method: &'static str| {
            let call = zbus::Message::method_call("/org/nvshare/Scheduler1", method);
            let call = call.destination("org.nvshare.Scheduler1").interface("org.nvshare.Scheduler1");
            call.with_flags(zbus::message::Flags::NO_REPLY_EXPECTED).build(&()).expect("a call")
        };
        loop {
            for method in ["CreateTimeline", "ListGpus", "ListClients"] {
                connection.send(&call(method)).await.expect("the bus takes it");
            }
        }
    });
}

/// Lists clients and GPUs repeatedly.
fn call(control: &Path, done: &AtomicBool) {
    lower_priority();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let stream = std::os::unix::net::UnixStream::connect(control).expect("the control socket");
        let connection = zbus::connection::Builder::unix_stream(stream).p2p().build().await.expect("the handshake");
        let (path, interface) = ("/org/nvshare/Scheduler1", Some("org.nvshare.Scheduler1"));
        while !done.load(Ordering::Relaxed) {
            for method in ["ListClients", "ListGpus", "ListRules"] {
                connection.call_method(None::<&str>, path, interface, method, &()).await.expect("a list");
            }
        }
    });
}

/// Lowers the calling thread's priority. The thread should send load to the scheduler, but not
/// compete with the scheduler for processor time.
fn lower_priority() {
    // SAFETY: the call takes no pointers.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
}

/// A hostile tenant. Dropping this value ends the tenant's process.
struct Flood(Child);

impl Flood {
    /// Starts a flood. `target`: the daemon's socket, or the address of the bus.
    fn start(uid: u32, name: &str, target: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--flood", name]).arg(target).uid(uid).gid(uid).stdin(Stdio::null());
        Self(command.spawn().expect("it starts"))
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn flood(name: &str, socket: &Path) {
    let socket = socket.to_owned();
    // The flood of the bus has the normal priority: no hand-over is measured beside it.
    if name != "calls" {
        lower_priority();
    }
    match name {
        "messages" => messages(&socket),
        "waiting" => waiting(&socket),
        "leaving" => leaving(&socket),
        "connections" => loop {
            drop(Client::connect(&socket));
        },
        "hellos" => hellos(&socket),
        "gpus" => gpus(&socket),
        "calls" => calls(&socket.to_string_lossy()),
        other => panic!("no flood {other}"),
    }
}

/// Sends without blocking. Returns false if the daemon has closed the connection.
fn post(client: &Client, message: ClientMessage) -> bool {
    let packet = message.encode(client.version);
    let (bytes, flags) = (packet.as_bytes(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
    // SAFETY: the kernel reads `bytes.len()` bytes of `bytes`, which outlives the call.
    let sent = unsafe { libc::send(client.socket.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
    sent >= 0 || std::io::Error::last_os_error().kind() == std::io::ErrorKind::WouldBlock
}

/// Discards all received messages.
fn discard(client: &Client) {
    let mut buffer = [0u8; 256];
    // SAFETY: the kernel writes at most `buffer.len()` bytes to `buffer`.
    while unsafe { libc::recv(client.socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_DONTWAIT) }
        > 0
    {}
}

/// Connects a client of the newest protocol version and attaches it to two GPUs. Returns `None` if
/// the daemon refuses the client.
fn attached(socket: &Path) -> Option<Client> {
    let mut client = Client::connect(socket).ok()?;
    client.send(daemon::hello_of(version::MAX, version::MAX));
    if !matches!(client.receive(), Some(SchedulerMessage::Welcome { .. })) {
        return None;
    }
    client.version = version::MAX;
    for (slot, gpu) in (0..).zip([THEIRS, daemon::GPU]) {
        let ClientMessage::Attach { kind, engine, name, reason, .. } = daemon::attach(slot, gpu) else { continue };
        post(&client, ClientMessage::Attach { slot, uuid: gpu, kind, engine, total: 1 << 40, name, reason });
    }
    Some(client)
}

fn crowd_of(socket: &Path) -> Vec<Client> {
    (0..CLIENTS).map_while(|_| attached(socket)).collect()
}

fn messages(socket: &Path) {
    let mut clients = crowd_of(socket);
    for round in 0u32.. {
        for client in &mut clients {
            discard(client);
            if !every_message(round).into_iter().all(|message| post(client, message))
                && let Some(next) = attached(socket)
            {
                *client = next;
            }
        }
    }
}

/// Returns every message that is valid in the protocol. Requests name only the hostile clients'
/// GPU.
fn every_message(round: u32) -> Vec<ClientMessage> {
    let (slot, gpus, bytes) = (0, 1, GIB + u64::from(round));
    let (key, range) = (Secret([7; 16]), round % IMPORTS);
    let reason = ReleaseReason::Idle;
    vec![
        daemon::memory(slot, bytes, bytes / 2),
        daemon::memory(1, bytes, 0),
        ClientMessage::Request { gpus },
        ClientMessage::Release { gpus, reason, busy_us: 1 },
        ClientMessage::Request { gpus },
        ClientMessage::Cancel { gpus },
        ClientMessage::RequestLimit { slot, bytes },
        ClientMessage::Reserve { slot, bytes: 1 << 20 },
        ClientMessage::Utilization { slot, permille: round % 1000 },
        ClientMessage::Stuck { gpus, reason: StuckReason::LongWork },
        ClientMessage::VisibleDevices { text: Text::new("0,1") },
        ClientMessage::RequestPlacement { chooser: Chooser::List, count: 1, bytes: 0, devices: 0, ahead: 1 },
        ClientMessage::EnvLimit {
            limit: LimitName::Weight,
            more: 0,
            text: Text::new(if round.is_multiple_of(2) { "50" } else { "60" }),
        },
        ClientMessage::Exporter { key },
        ClientMessage::Open { ticket: round, exporter: key, secret: key, range, allocation: 1, first: 0 },
        ClientMessage::Exported { ticket: u64::from(round), outcome: Sharing::Failed, slot, bytes, chunk: 1 },
        ClientMessage::Imported { slot, exporter: key, range, bytes: 1, adopted: 0 },
        ClientMessage::Withdrawn { range },
        ClientMessage::Adopted { exporter: key, range },
        ClientMessage::Closed { exporter: key, range },
        ClientMessage::Detach { slot: 1 },
        daemon::attach(1, daemon::GPU),
    ]
}

/// Makes all clients wait for the same GPU. Each holder releases the GPU immediately.
fn waiting(socket: &Path) {
    let clients = crowd_of(socket);
    loop {
        for client in &clients {
            post(client, daemon::memory(0, GIB, 0));
            post(client, ClientMessage::Request { gpus: 1 });
            post(client, ClientMessage::Release { gpus: 1, reason: ReleaseReason::Revoked, busy_us: 1 });
            discard(client);
        }
    }
}

fn leaving(socket: &Path) {
    let key = Secret([5; 16]);
    let importers: Vec<Client> = (0..8).filter_map(|_| attached(socket)).collect();
    loop {
        let Some(exporter) = attached(socket) else { continue };
        exporter.send(ClientMessage::Exporter { key });
        for range in 0..IMPORTS {
            let importer = &importers[range as usize % importers.len()];
            importer.send(ClientMessage::Imported { slot: 0, exporter: key, range, bytes: 1, adopted: 0 });
            discard(importer);
        }
        drop(exporter);
        importers.iter().for_each(discard);
    }
}

fn hellos(socket: &Path) {
    let refuse = |socket: PathBuf| loop {
        let Ok(client) = Client::connect(&socket) else { continue };
        client.send_raw(daemon::hello_of(999, 999).encode(0).as_bytes());
        while client.send_raw(daemon::release().encode(1).as_bytes()) {}
    };
    let threads: Vec<_> =
        (0..8).map(|_| socket.to_owned()).map(|socket| std::thread::spawn(move || refuse(socket))).collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
}

fn gpus(socket: &Path) {
    loop {
        let Some(client) = attached(socket) else { continue };
        for slot in 2..60 {
            post(&client, daemon::attach(slot, Uuid([slot as u8 + 100; 16])));
            discard(&client);
        }
        for slot in 2..60 {
            post(&client, ClientMessage::Detach { slot });
        }
    }
}
