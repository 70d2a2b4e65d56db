//! What a scrape costs where a thousand programs share a GPU: how long the answer takes, how large it is, for how long the
//! scheduling loop is held by it, and what hand-overs notice. The daemon is a process, and the clients are sockets.
//!
//! `cargo bench --bench metrics [-- --json FILE]`; with a file, the figures are put into it (see `results.rs`).

#[path = "../tests/daemon_support/mod.rs"]
mod daemon_support;
mod results;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use daemon_support::{Client, Daemon, GIB, GPU};
use nvshare_wire::ClientMessage;
use results::{Figure, Results};

const CLIENTS: usize = 1_000;
const SCRAPES: u32 = 100;
/// Scrapes closer together are answered alike.
const PAUSE: Duration = Duration::from_millis(120);
const HAND_OVERS: usize = 5_000;

fn main() {
    let mut results = Results::from_arguments();
    println!("{:>14}  {:>10}  {:>10}  {:>10}  {:>14}", "clients", "size", "median", "longest", "loop, a scrape");
    for clients in [0, 10, 100, CLIENTS] {
        let (daemon, path) = served();
        let _crowd = crowd(&daemon, clients);
        let (times, size, held) = scrapes(&daemon, &path);
        let (median, longest) = (at(&times, 0.5), at(&times, 1.0));
        println!("{clients:>14}  {size:>10}  {median:>10.1?}  {longest:>10.1?}  {held:>14.1?}");
        if clients == CLIENTS {
            let note = format!("{SCRAPES} scrapes over a Unix socket, {CLIENTS} clients of one GPU");
            let ms = |time: Duration| time.as_secs_f64() * 1e3;
            let mut add = |name, value, unit| results.add(Figure { name, value, unit, note: note.clone() });
            add("metrics-1000-clients-answer-p50", ms(median), "ms");
            add("metrics-1000-clients-size", size as f64, "bytes");
            add("metrics-1000-clients-loop", ms(held), "ms");
        }
    }
    println!("\n{:>34}  {:>10}  {:>10}  {:>10}", "hand-over beside them", "median", "99 %", "longest");
    for scraped in [false, true] {
        let (daemon, path) = served();
        let _crowd = crowd(&daemon, CLIENTS);
        let times = hand_overs(&daemon, scraped.then_some(&path));
        let [median, most, all] = [0.5, 0.99, 1.0].map(|share| at(&times, share));
        let what = if scraped { "scraped without pause" } else { "not scraped" };
        println!("{what:>34}  {median:>10.1?}  {most:>10.1?}  {all:>10.1?}");
    }
    results.write();
}

fn at(sorted: &[Duration], share: f64) -> Duration {
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

/// A daemon that serves metrics, and where.
fn served() -> (Daemon, PathBuf) {
    let daemon = Daemon::start_with(|command, directory| {
        let (file, path) = (directory.join("nvshare.toml"), directory.join("metrics.sock"));
        let text = format!(
            "anti-thrash = \"on\"\nmax-clients-per-user = 65535\nlog-level = \"warn\"\n[metrics]\nlisten = {path:?}\n"
        );
        std::fs::write(&file, text).expect("a configuration");
        command.arg("--config").arg(file).args(["--log-level", "info"]);
    });
    let path = daemon.directory.0.join("metrics.sock");
    (daemon, path)
}

/// Clients that have some memory each, on a GPU that has room for everybody's context.
fn crowd(daemon: &Daemon, clients: usize) -> Vec<Client> {
    let crowd: Vec<Client> = (0..clients).map(|_| daemon.client()).collect();
    for client in &crowd {
        attach(client);
        client.report(GIB / 4, GIB / 8);
    }
    std::thread::sleep(Duration::from_secs(2)); // until what attaching has left to do is done
    crowd
}

fn attach(client: &Client) {
    let ClientMessage::Attach { slot, uuid, kind, engine, name, reason, .. } = daemon_support::attach(0, GPU) else {
        return;
    };
    client.send(ClientMessage::Attach { slot, uuid, kind, engine, total: 1 << 40, name, reason });
}

fn scrape(path: &Path) -> usize {
    let mut stream = UnixStream::connect(path).expect("the daemon listens");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("it listens");
    let mut answer = Vec::with_capacity(8 << 20);
    stream.read_to_end(&mut answer).expect("an answer");
    assert!(answer.starts_with(b"HTTP/1.1 200") && answer.ends_with(b"# EOF\n"));
    answer.len()
}

/// How long each took, in order; the size of the last; what each cost the thread of the scheduling loop.
fn scrapes(daemon: &Daemon, path: &Path) -> (Vec<Duration>, usize, Duration) {
    // What the loop does by itself in that time is left out.
    let time = PAUSE * SCRAPES;
    let idle = {
        let before = loop_time(daemon);
        std::thread::sleep(time);
        (loop_time(daemon) - before).as_secs_f64() / time.as_secs_f64()
    };
    let (before, begin) = (loop_time(daemon), Instant::now());
    let mut size = 0;
    let mut times: Vec<Duration> = (0..SCRAPES)
        .map(|_| {
            std::thread::sleep(PAUSE);
            let begin = Instant::now();
            size = scrape(path);
            begin.elapsed()
        })
        .collect();
    let by_itself = begin.elapsed().mul_f64(idle);
    let held = (loop_time(daemon) - before).saturating_sub(by_itself) / SCRAPES;
    times.sort();
    (times, size, held)
}

/// What the first thread, which the scheduling loop is in, has had of the processor.
fn loop_time(daemon: &Daemon) -> Duration {
    let pid = daemon.child.id();
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/schedstat")).expect("it runs");
    Duration::from_nanos(text.split(' ').next().and_then(|time| time.parse().ok()).expect("a time"))
}

/// From the packet that releases the lock to the next client's having it, perhaps while somebody reads metrics all the time.
fn hand_overs(daemon: &Daemon, scraped: Option<&PathBuf>) -> Vec<Duration> {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        if let Some(path) = scraped {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    scrape(path);
                }
            });
        }
        let [a, b] = [daemon.client(), daemon.client()];
        [&a, &b].into_iter().for_each(attach);
        a.request();
        a.until_granted();
        b.request();
        let mut pair = [&a, &b];
        let mut times: Vec<Duration> = (0..HAND_OVERS)
            .map(|_| {
                let [holder, next] = pair;
                let begin = Instant::now();
                holder.release();
                next.until_granted();
                let time = begin.elapsed();
                holder.request();
                pair = [next, holder];
                time
            })
            .collect();
        done.store(true, Ordering::Relaxed);
        times.sort();
        times
    })
}
