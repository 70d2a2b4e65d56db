//! The cost of the scheduler: the time without a lock holder at a hand-over, and the CPU time of a
//! daemon with idle clients. Only the clients' work is simulated. The daemon is a real process,
//! clients are sockets, and their threads block in recv.
//!
//! `cargo bench --bench handover [-- --json FILE]`: with a file, the benchmark writes the figures
//! to it (see `bench_support::results`). `--waiting` measures only hand-overs among clients that
//! all wait. If root runs the benchmark, the clients belong to several users.

mod waiting;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use bench_support::results::{Figure, Results};
use nvshare_wire::{ClientMessage, SchedulerMessage};
use test_support::daemon::{self, Client, Daemon, GPU};
use waiting::Waiting;

const HAND_OVERS: usize = 20_000;
const WAITING_CLIENTS: usize = 1_000;
const WAITING_HAND_OVERS: usize = 5_000;
/// The numbers of users that own the waiting clients. Clients of one user get the user's turns in
/// the order of their requests.
const WAITING_USERS: [u32; 3] = [1, 2, 50];
const IDLE_CLIENTS: usize = 1_000;
const IDLE_TIME: Duration = Duration::from_secs(10);

fn main() {
    let mut results = Results::from_arguments();
    println!("{:>34}  {:>10}  {:>10}  {:>10}  {:>10}", "hand-over", "median", "90 %", "99 %", "longest");
    if !std::env::args().any(|argument| argument == "--waiting") {
        two_take_turns(&mut results);
    }
    all_wait(&mut results);
    results.write();
}

/// Measures two clients that take turns while all other clients are idle. Also measures a daemon
/// whose clients are all idle.
fn two_take_turns(results: &mut Results) {
    row("limit: a thread that passes it on", &limit());
    for others in [0, 200] {
        let times = measure(others);
        row(&format!("the daemon, {others} other clients"), &times);
        if others == 0 {
            let note = format!(
                "{HAND_OVERS} hand-overs between two clients, anti-thrash on; {}",
                bench_support::results::load()
            );
            let us = |share| at(&times, share).as_secs_f64() * 1e6;
            results.add(Figure { name: "handover-daemon-p50", value: us(0.5), unit: "us", note: note.clone() });
            results.add(Figure { name: "handover-daemon-p99", value: us(0.99), unit: "us", note });
        }
    }
    let percent = idle();
    println!("CPU of a daemon with {IDLE_CLIENTS} clients that do nothing: {percent:.4} % of one core");
    let note = format!("all threads, over {} s", IDLE_TIME.as_secs());
    results.add(Figure { name: "idle-1000-clients-cpu", value: percent, unit: "percent", note });
}

/// Measures many clients that take turns, with one user and with several users. The figure is the
/// worst of these cases.
fn all_wait(results: &mut Results) {
    let mut worst: Option<(Duration, u32)> = None;
    for users in WAITING_USERS {
        if users > 1 && !daemon::is_root() {
            continue;
        }
        let daemon = quiet_with("max-clients-per-tenant = 65535\nanti-thrash = \"on\"\n");
        let times = Waiting::new(&daemon, WAITING_CLIENTS, users).hand_overs(&daemon, WAITING_HAND_OVERS);
        row(&format!("{WAITING_CLIENTS} clients of {users} users wait"), &times);
        worst = worst.max(Some((at(&times, 0.99), users)));
    }
    let Some((value, users)) = worst else { return };
    let load = bench_support::results::load();
    let note = format!("{WAITING_HAND_OVERS} hand-overs, {users} users, anti-thrash on; {load}");
    results.add(Figure { name: "handover-1000-waiting-p99", value: value.as_secs_f64() * 1e6, unit: "us", note });
}

fn at(sorted: &[Duration], share: f64) -> Duration {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

fn row(what: &str, sorted: &[Duration]) {
    let [median, most, nearly_all, all] = [0.5, 0.9, 0.99, 1.0].map(|share| at(sorted, share));
    println!("{what:>34}  {median:>10.1?}  {most:>10.1?}  {nearly_all:>10.1?}  {all:>10.1?}");
}

/// Measures two clients that alternate while other clients are attached and idle.
fn measure(others: usize) -> Vec<Duration> {
    let daemon = quiet();
    assert_eq!(daemon.ctl(&["set", "anti-thrash", "on"]).code, Some(0));
    let _others = crowd(&daemon, others);
    let [a, b] = [daemon.client(), daemon.client()];
    attach(&a);
    a.request();
    a.until_granted();
    attach(&b);
    b.request();
    let mut pair = [&a, &b];
    let times = (0..HAND_OVERS).map(|_| {
        let [holder, next] = pair;
        // The next client already blocks in recv in its own thread, as the library's thread does.
        let time = between(|| holder.release(), || next.until_granted());
        holder.request();
        pair = [next, holder];
        time
    });
    sorted(times)
}

/// Measures the lower bound, with the same packets but without a scheduler. This thread wakes a
/// relay thread, which wakes the waiting thread.
fn limit() -> Vec<Duration> {
    let ([from, relay_in], [relay_out, to]) = (pair(), pair());
    std::thread::spawn(move || {
        let mut packet = [0u8; 64];
        loop {
            let n = unsafe { libc::recv(relay_in.as_raw_fd(), packet.as_mut_ptr().cast(), packet.len(), 0) };
            if n <= 0 || unsafe { libc::send(relay_out.as_raw_fd(), packet.as_ptr().cast(), n as usize, 0) } < 0 {
                return;
            }
        }
    });
    let receive = || {
        let mut packet = [0u8; 64];
        unsafe { libc::recv(to.as_raw_fd(), packet.as_mut_ptr().cast(), packet.len(), 0) };
    };
    let send = || {
        unsafe { libc::send(from.as_raw_fd(), [0u8; 24].as_ptr().cast(), 24, 0) };
    };
    sorted((0..HAND_OVERS).map(|_| between(send, receive)))
}

fn pair() -> [OwnedFd; 2] {
    let mut fds = [0; 2];
    // SAFETY: the array has room for both descriptors. The descriptors are new, so no other value
    // owns them.
    unsafe {
        assert_eq!(libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0, fds.as_mut_ptr()), 0);
        fds.map(|fd| OwnedFd::from_raw_fd(fd))
    }
}

/// Returns the time from the call of `give` until `wait` returns. `wait` runs in its own thread.
fn between(give: impl FnOnce(), wait: impl FnOnce() + Send) -> Duration {
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            wait();
            Instant::now()
        });
        std::thread::sleep(Duration::from_micros(200)); // until the thread waits
        let given = Instant::now();
        give();
        waiter.join().expect("no panic") - given
    })
}

fn sorted(times: impl Iterator<Item = Duration>) -> Vec<Duration> {
    let mut times: Vec<_> = times.collect();
    times.sort();
    times
}

/// Returns the CPU time of the daemon while its clients are idle, in percent of one core.
fn idle() -> f64 {
    let daemon = quiet();
    let _clients = crowd(&daemon, IDLE_CLIENTS);
    std::thread::sleep(Duration::from_secs(3)); // until the work after attaching is done
    let before = daemon.cpu();
    std::thread::sleep(IDLE_TIME);
    (daemon.cpu() - before).as_secs_f64() / IDLE_TIME.as_secs_f64() * 100.0
}

/// Attaches a GPU that has room for all contexts.
fn attach(client: &Client) {
    let ClientMessage::Attach { slot, uuid, kind, engine, name, reason, .. } = daemon::attach(0, GPU) else {
        return;
    };
    client.send(ClientMessage::Attach { slot, uuid, kind, engine, total: 1 << 40, name, reason });
    client.until(|message| matches!(message, SchedulerMessage::Attached { slot: 0 }));
}

fn quiet() -> Daemon {
    quiet_with("")
}

/// Starts a daemon with this configuration.
fn quiet_with(configuration: &str) -> Daemon {
    Daemon::start_with(|command, directory| {
        let file = directory.join("nvshare.toml");
        std::fs::write(&file, configuration).expect("a configuration");
        command.arg("--config").arg(file).args(["--log-level", "info"]);
    })
}

fn crowd(daemon: &Daemon, clients: usize) -> Vec<Client> {
    let clients: Vec<Client> = (0..clients).map(|_| daemon.client()).collect();
    for client in &clients {
        attach(client);
    }
    clients
}
