//! The cost of a scrape while a thousand programs share a GPU. The benchmark measures the scrape's
//! duration and size, the time of the scheduling loop, and the slowdown of hand-overs. The daemon
//! is a real process. The clients are only sockets.
//!
//! `cargo bench --bench metrics [-- --json FILE]`: with a file, the benchmark writes the figures to
//! it (see `bench_support::results`).

mod crowd;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bench_support::results::{Figure, Results};
use crowd::{at, crowd, hand_overs, loop_time};
use test_support::daemon::Daemon;

const CLIENTS: usize = 1_000;
const SCRAPES: u32 = 100;
/// Pause between scrapes. The daemon answers more frequent scrapes from its cache.
const PAUSE: Duration = Duration::from_millis(120);

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
            let note = format!(
                "{SCRAPES} scrapes over a Unix socket, {CLIENTS} clients of one GPU; longest {longest:.1?}; {}",
                bench_support::results::load()
            );
            let ms = |time: Duration| time.as_secs_f64() * 1e3;
            let mut add = |name, value, unit| results.add(Figure { name, value, unit, note: note.clone() });
            add("metrics-scrape-1000-clients", ms(median), "ms");
            add("metrics-1000-clients-size", size as f64, "bytes");
            add("metrics-1000-clients-loop", ms(held), "ms");
        }
    }
    crowd::print("hand-over beside them", None);
    for (what, scraped) in [("not scraped", false), ("scraped without pause", true)] {
        let (daemon, path) = served();
        let _crowd = crowd(&daemon, CLIENTS);
        let scrapes = || {
            scrape(&path);
        };
        crowd::print(what, Some(&hand_overs(&daemon, scraped.then_some(&scrapes))));
    }
    results.write();
}

/// A daemon that serves metrics, and the path of its socket.
fn served() -> (Daemon, PathBuf) {
    let path = |directory: &Path| directory.join("metrics.sock");
    let daemon = crowd::daemon(|directory| format!("[metrics]\nlisten = {:?}\n", path(directory)));
    let path = path(&daemon.directory.0);
    (daemon, path)
}

fn scrape(path: &Path) -> usize {
    let mut stream = UnixStream::connect(path).expect("the daemon listens");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("it listens");
    let mut answer = Vec::with_capacity(8 << 20);
    stream.read_to_end(&mut answer).expect("an answer");
    assert!(answer.starts_with(b"HTTP/1.1 200") && answer.ends_with(b"# EOF\n"));
    answer.len()
}

/// Returns the sorted durations, the size of the last answer, and the processor time of the
/// scheduling loop per scrape.
fn scrapes(daemon: &Daemon, path: &Path) -> (Vec<Duration>, usize, Duration) {
    // Measures the loop's other activity for the duration of the scrapes, and subtracts it.
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
