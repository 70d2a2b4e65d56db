//! How the scheduler's costs grow with the number of clients. Hand-overs, memory, `nvsharectl status`
//! and metrics are measured with a real daemon, whose clients are sockets. Events are measured in the
//! state machine, in virtual time.
//!
//! `cargo bench --bench growth [-- --json FILE]` prints a table for `bench/RESULTS.md`. With a file, the
//! benchmark writes the figure to it (see `bench_support::results`).

#[allow(dead_code, reason = "no table of hand-overs is printed")]
mod crowd;
mod virtual_time;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use bench_support::results::{Figure, Results};
use crowd::{at, crowd, hand_overs, loop_time};
use test_support::daemon::Daemon;

const CLIENTS: [usize; 3] = [10, 100, 1_000];
/// The number of clients in the last column, and their GPUs. Only events are measured with them.
const MANY: (u64, u64) = (10_000, 64);
const CALLS: u32 = 20;
/// Pause between scrapes. The daemon answers more frequent scrapes from its cache.
const PAUSE: Duration = Duration::from_millis(120);

/// The costs of one daemon.
struct Costs {
    hand_over: Duration,
    memory: u64,
    status: Duration,
    metrics: Duration,
}

fn main() {
    let mut results = Results::from_arguments();
    let all = CLIENTS.map(costs);
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let event = |clients, gpus| us(virtual_time::cost(clients, gpus, 50, true).1);
    let mut events = CLIENTS.map(|clients| event(clients as u64, 1)).to_vec();
    events.push(event(MANY.0, MANY.1));
    let of = |cost: fn(&Costs) -> f64| all.iter().map(cost).collect::<Vec<_>>();
    let rows = [
        ("a hand-over, median, µs", of(|costs| costs.hand_over.as_secs_f64() * 1e6)),
        ("an event, µs", events),
        ("the scheduler's memory, MiB", of(|costs| costs.memory as f64 / (1 << 20) as f64)),
        ("`status`, ms of the scheduling loop", of(|costs| costs.status.as_secs_f64() * 1e3)),
        ("a scrape of the metrics, ms", of(|costs| costs.metrics.as_secs_f64() * 1e3)),
    ];
    println!("| cost | 10 | 100 | 1,000 | 10,000 on 64 GPUs |\n|---|---|---|---|---|");
    let mut steepest = (0.0, "");
    for (what, values) in rows {
        let cells: String = values.iter().map(|value| format!(" {value:.2} |")).collect();
        println!("| {what} |{cells}{}", " |".repeat(4 - values.len()));
        let [least, .., most] = CLIENTS;
        let growth = values[CLIENTS.len() - 1] / values[0] / (n_log_n(most) / n_log_n(least));
        if growth > steepest.0 {
            steepest = (growth, what);
        }
    }
    let (value, what) = steepest;
    let note = format!("{what}: the steepest of five costs");
    results.add(Figure { name: "growth-over-n-log-n", value, unit: "ratio", note });
    results.write();
}

fn n_log_n(clients: usize) -> f64 {
    clients as f64 * (clients as f64).log2()
}

fn costs(clients: usize) -> Costs {
    let socket = |directory: &Path| directory.join("metrics.sock");
    let daemon = crowd::daemon(|directory| format!("[metrics]\nlisten = {:?}\n", socket(directory)));
    let _crowd = crowd(&daemon, clients);
    let memory = daemon.private_memory();
    let status = in_loop(&daemon, || {
        assert!(daemon.ctl(&["status", "--json"]).code == Some(0));
    });
    let path = socket(&daemon.directory.0);
    let mut scrapes: Vec<Duration> = (0..CALLS).map(|_| scrape(&path)).collect();
    scrapes.sort();
    let hand_over = at(&hand_overs(&daemon, None), 0.5);
    Costs { hand_over, memory, status, metrics: at(&scrapes, 0.5) }
}

/// Returns the processor time of the scheduling loop for one call.
fn in_loop(daemon: &Daemon, call: impl Fn()) -> Duration {
    let before = loop_time(daemon);
    (0..CALLS).for_each(|_| call());
    (loop_time(daemon) - before) / CALLS
}

fn scrape(path: &Path) -> Duration {
    std::thread::sleep(PAUSE);
    let begin = Instant::now();
    let mut stream = UnixStream::connect(path).expect("the daemon listens");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("it listens");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("an answer");
    assert!(answer.starts_with(b"HTTP/1.1 200"));
    begin.elapsed()
}
