//! The duration of a hand-over that moves memory, between two programs on a GPU that has room for
//! one. The same run measures two references: the link's speed, and two programs that exchange
//! memory without a scheduler. Requires an NVIDIA GPU, on which another program occupies all memory
//! except the needed amount.
//!
//! `cargo bench --bench exchange -- [--programs DIR] [--mem 14G] [--leave 17G] [--seconds 20]
//! [--record FILE] [--json FILE]`
//!
//! The first eviction of a program is measured separately, before the exchange, because it may have
//! to create host buffers. For this measurement, a new program evicts a program that has been idle
//! for ten seconds.
//!
//! With `--json FILE` and `--mem 14G` or `--mem 40G`, the benchmark writes the figures of that size
//! to the file (see `bench_support::results`).
//!
//! `--record` keeps the scheduler's record of the hand-overs. `--programs` is the directory of
//! `nvshare-scheduler`, `libnvshare.so` and `cuda-program` (default: the directory of this
//! benchmark). The benchmark also runs on a simulated GPU in `LD_LIBRARY_PATH`, but the figures are
//! then meaningless.

use std::{
    collections::BTreeMap,
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use bench_support::results::{Figure, Results};
use bench_support::stage::{Stage, bytes, kill, option};
use test_support::record::{Move, Record};

const GIB: f64 = (1u64 << 30) as f64;
const SETTINGS: &str = "time-quantum = 1\nanti-thrash = \"on\"\n";
/// The number of exchanges that are measured without nvshare.
const BARE_RUNS: usize = 5;
/// Time for which a program is idle before its memory is evicted for the first time.
const IDLE: Duration = Duration::from_secs(10);

fn main() {
    let mut results = Results::from_arguments();
    let stage = Stage::from_arguments();
    let (memory, leave) = (bytes(&option("--mem", "14G")), bytes(&option("--leave", "17G")));
    let seconds: f64 = option("--seconds", "20").parse().expect("seconds");

    let part = (memory / 4).min(1 << 30).to_string();
    let Some(link) = stage.ask(&["link", "--mem", &part, "--rounds", "8"]) else {
        println!("no GPU here: nothing is measured");
        return;
    };
    let speed = |name: &str| link[name].as_f64().expect("a speed");
    println!("the link: {:.1} GiB/s out, {:.1} in, {:.1} each way at once", speed("out"), speed("in"), speed("both"));

    let holder = stage.ballast(leave);
    // Both programs' parts must fit on the GPU at the same time, together with two contexts.
    let part = ((leave - leave / 8) / 2).min(memory).to_string();
    let bare = median((0..BARE_RUNS).filter_map(|_| stage.ask(&["exchange", "--mem", &part])?["each_way"].as_f64()))
        .expect("two programs exchange memory");
    println!("two programs that copy, unmap and map without nvshare: {bare:.1} GiB/s each way");
    let mem = memory.to_string();
    let first = first_hand_over(&stage, &mem);
    println!("the first hand-over: {first:.3} s from the request until all is there");
    if memory >> 30 == 14 {
        let note = format!(
            "from the request of a program that comes until its memory is on the GPU; a program of {:.1} GiB, idle for {IDLE:?}, leaves",
            memory as f64 / GIB
        );
        results.add(Figure { name: "first-handover-14GiB", value: first, unit: "s", note });
    }

    let record = stage.file("record.jsonl");
    let scheduler = stage.scheduler(SETTINGS, &record);
    let begin = Instant::now();
    // The programs would run much longer than `--seconds`. `kill` ends them.
    let mut pair: Vec<Child> = (0..2)
        .map(|_| {
            let words = ["mix", "--mem", &mem, "--reps", "40", "--rounds", "100000000"];
            stage.shared(&words).stdout(Stdio::null()).spawn().expect("it runs")
        })
        .collect();
    while begin.elapsed().as_secs_f64() < seconds {
        std::thread::sleep(Duration::from_millis(100));
        assert!(pair.iter_mut().all(|p| p.try_wait().expect("a child").is_none()), "a program ended early");
    }
    pair.into_iter().chain([scheduler, holder]).for_each(kill);

    match option("--record", "").as_str() {
        "" => {}
        kept => drop(std::fs::copy(&record, kept).expect("the record can be kept")),
    }
    let mut record = Record::new(&record, 1);
    let hand_overs = hand_overs(record.moves());
    println!("{:>12} {:>12} {:>12} {:>12} {:>14}", "drain, ms", "to grant", "to run", "moved, GiB", "GiB/s each way");
    for h in &hand_overs {
        let rate = h.moved / (h.mapped / 1e3).max(1e-6);
        println!("{:>12.0} {:>12.0} {:>12.0} {:>12.2} {:>14.1}", h.drain, h.grant, h.mapped, h.moved, rate);
    }
    // The first two hand-overs allocate the host buffers, so they are skipped.
    let warm = hand_overs.get(2..).unwrap_or(&[]);
    let Some(middle) = median(warm.iter().map(|h| h.mapped)) else { return println!("too few hand-overs") };
    let moved = median(warm.iter().map(|h| h.moved)).unwrap_or_default();
    println!(
        "from release to all there: {middle:.0} ms for {moved:.2} GiB; the link's own: {:.0} ms; exchanged without nvshare: {:.0} ms",
        moved / speed("both") * 1e3,
        moved / bare * 1e3
    );
    let rate = moved / (middle / 1e3);
    let note = format!(
        "{moved:.2} GiB each way in {:.3} s, median of {} hand-overs from the release until all is there; the link alone {:.1} GiB/s each way, \
         two programs that copy, unmap and map without nvshare {bare:.1}",
        middle / 1e3,
        warm.len(),
        speed("both")
    );
    let mut add = |name, value, unit| results.add(Figure { name, value, unit, note: note.clone() });
    match memory >> 30 {
        14 => {
            add("handover-14GiB", 14.0 / rate, "s");
            add("exchange-bandwidth-each-way", rate, "GiB/s");
        }
        40 => {
            add("handover-40GiB", 40.0 / rate, "s");
            add("exchange-over-link", rate / speed("both"), "ratio");
        }
        _ => println!("of this size there is no figure"),
    }
    results.write();
}

/// Returns the seconds from a program's first request until all of its memory is on the GPU.
/// Another program has been idle on the GPU for [`IDLE`] when this program starts.
fn first_hand_over(stage: &Stage, memory: &str) -> f64 {
    let record = stage.file("first.jsonl");
    let scheduler = stage.scheduler(SETTINGS, &record);
    let start = |words: &[&str]| stage.shared(words).stdout(Stdio::null()).spawn().expect("it runs");
    let bytes: u64 = memory.parse().expect("bytes");
    // Waits until all of the program's memory is on the GPU. Returns the seconds since the
    // program's first request.
    let mut record = Record::new(&record, 1);
    let mut wait_for_memory = |program: &Child| loop {
        let all = record.moves();
        let own = || all.iter().filter(|m| m.pid == program.id());
        let request = own().find(|m| m.what == "request");
        let mut mapped = 0;
        let last = own().filter(|m| m.what == "mapped").find(|m| {
            mapped += m.bytes;
            mapped >= bytes
        });
        if let (Some(request), Some(last)) = (request, last) {
            break (last.ms - request.ms) / 1e3;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    let pause = (600 * 1000).to_string();
    let idle = start(&["mix", "--mem", memory, "--reps", "1", "--rounds", "2", "--cpu-ms", &pause]);
    wait_for_memory(&idle);
    std::thread::sleep(IDLE);
    let comes = start(&["mix", "--mem", memory, "--reps", "40", "--rounds", "100000000"]);
    let seconds = wait_for_memory(&comes);
    [idle, comes, scheduler].into_iter().for_each(kill);
    seconds
}

struct HandOver {
    /// Durations in ms: from the revoke to the release, from the release to the next grant, and from the release to the last
    /// byte of the next program's memory.
    drain: f64,
    grant: f64,
    mapped: f64,
    moved: f64,
}

fn hand_overs(moves: &[Move]) -> Vec<HandOver> {
    let mut revoked: BTreeMap<u32, f64> = BTreeMap::new();
    let mut released: Option<(u32, f64)> = None;
    let mut list = Vec::new();
    for (at, event) in moves.iter().enumerate() {
        let pid = event.pid;
        match event.what {
            "revoke" => drop(revoked.entry(pid).or_insert(event.ms)),
            "release" => released = Some((pid, event.ms)),
            "grant" => {
                let Some((from, when)) = released.filter(|(from, _)| *from != pid) else { continue };
                let drain = revoked.remove(&from).map_or(0.0, |since| when - since);
                // The moves of the next program, from the old holder's release until the next
                // program releases the lock.
                let own = |m: &&Move| m.pid == pid;
                let back =
                    moves[at..].iter().position(|m| own(&m) && m.what == "release").map_or(moves.len(), |n| at + n);
                let mapped: Vec<&Move> =
                    moves[..back].iter().filter(own).filter(|m| m.what == "mapped" && m.ms >= when).collect();
                let Some(last) = mapped.last() else { continue };
                let moved = mapped.iter().map(|m| m.bytes as f64).sum::<f64>() / GIB;
                list.push(HandOver { drain, grant: event.ms - when, mapped: last.ms - when, moved });
            }
            _ => {}
        }
    }
    list
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}
