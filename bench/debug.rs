//! The cost of a debug bundle while a thousand programs share a GPU and the flight recorder is
//! full. The benchmark measures the bundle's duration and size, the time of the scheduling loop,
//! and the slowdown of hand-overs. The daemon is a real process. The clients are only sockets.
//!
//! `cargo bench --bench debug [-- --json FILE]`: with a file, the benchmark writes the figures to
//! it (see `bench_support::results`).

mod crowd;

use std::time::{Duration, Instant};

use bench_support::results::{Figure, Results};
use crowd::{at, crowd, hand_overs, loop_time};
use nvshare::recorder::{Entry, Recorder, bundle};
use test_support::daemon::Daemon;

const CLIENTS: usize = 1_000;
const BUNDLES: u32 = 20;

fn main() {
    let mut results = Results::from_arguments();
    println!(
        "{:>14}  {:>10}  {:>10}  {:>10}  {:>14}  {:>12}",
        "clients", "size", "median", "longest", "loop, a bundle", "memory"
    );
    let mut costs = Vec::new();
    for clients in [0, 100, CLIENTS] {
        let daemon = crowd::daemon(|_| String::new());
        let _crowd = crowd(&daemon, clients);
        hand_overs(&daemon, None); // each hand-over consists of several events
        let (times, size, held) = bundles(&daemon);
        let (median, longest) = (at(&times, 0.5), at(&times, 1.0));
        let memory = memory(&daemon);
        costs.push((clients, recorder(&bundle(&daemon))));
        println!("{clients:>14}  {size:>10}  {median:>10.1?}  {longest:>10.1?}  {held:>14.1?}  {memory:>9} KiB");
        if clients == CLIENTS {
            let note = format!("{BUNDLES} bundles, {CLIENTS} clients of one GPU, at least 10,000 events");
            let ms = |time: Duration| time.as_secs_f64() * 1e3;
            let mut add = |name, value, unit| results.add(Figure { name, value, unit, note: note.clone() });
            add("debug-1000-clients-bundle-p50", ms(median), "ms");
            add("debug-1000-clients-size", size as f64, "bytes");
            add("debug-1000-clients-loop", ms(held), "ms");
        }
    }
    println!("\n{:>14}  {:>10}  {:>16}  {:>10}", "clients", "checkpoint", "an event without", "recorded");
    for (clients, [checkpoint, without, with]) in costs {
        println!("{clients:>14}  {checkpoint:>10.1?}  {without:>16.1?}  {with:>10.1?}");
    }
    crowd::print("hand-over beside them", None);
    for (what, bundled) in [("no bundles", false), ("bundles without pause", true)] {
        let daemon = crowd::daemon(|_| String::new());
        let _crowd = crowd(&daemon, CLIENTS);
        let bundles = || drop(bundle(&daemon));
        crowd::print(what, Some(&hand_overs(&daemon, bundled.then_some(&bundles))));
    }
    results.write();
}

fn bundle(daemon: &Daemon) -> String {
    let output = daemon.ctl(&["debug", "--output", "-"]);
    assert!(
        output.stdout.lines().last().is_some_and(|line| line.starts_with("{\"kind\":\"end\"")),
        "{}",
        output.stderr
    );
    output.stdout
}

/// Measures the cost of the recorder in the scheduling loop: a checkpoint, an event without the
/// recorder, and an event with the recorder.
fn recorder(text: &str) -> [Duration; 3] {
    let read = || {
        let bundle = bundle::read(text.as_bytes()).expect("a bundle");
        let entries: Vec<Entry> = bundle.entries.collect::<Result<_, _>>().expect("entries");
        (bundle.checkpoint, entries)
    };
    let (mut machine, entries) = read();
    let mut recorder = Recorder::new(&machine);
    let count = u32::try_from(entries.len()).expect("some");
    let begin = Instant::now();
    for entry in entries {
        std::hint::black_box(machine.handle(entry.at, entry.event));
    }
    let without = begin.elapsed() / count;
    // A checkpoint of the state with all clients.
    let taken = |_| {
        let begin = Instant::now();
        std::hint::black_box(Recorder::new(&machine));
        begin.elapsed()
    };
    let mut checkpoints: Vec<Duration> = (0..20).map(taken).collect();
    checkpoints.sort();
    let checkpoint = at(&checkpoints, 0.5);
    let (mut machine, entries) = read();
    let begin = Instant::now();
    for entry in entries {
        recorder.begin(&machine, entry.at, &entry.event);
        let commands = machine.handle(entry.at, entry.event);
        recorder.finish(&commands);
        std::hint::black_box(commands);
    }
    [checkpoint, without, begin.elapsed() / count]
}

/// Returns the sorted durations, the size of the last bundle, and the processor time of the
/// scheduling loop per bundle.
fn bundles(daemon: &Daemon) -> (Vec<Duration>, usize, Duration) {
    let before = loop_time(daemon);
    let mut size = 0;
    let mut times: Vec<Duration> = (0..BUNDLES)
        .map(|_| {
            let begin = Instant::now();
            size = bundle(daemon).len();
            begin.elapsed()
        })
        .collect();
    let held = (loop_time(daemon) - before) / BUNDLES;
    times.sort();
    (times, size, held)
}

/// The daemon's resident memory, in KiB.
fn memory(daemon: &Daemon) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).expect("it runs");
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}
