//! Metrics about moved and refused memory, compared with the programs' output and the scheduler's
//! record. The tests run real processes on the simulated GPU. The tests in `tests/daemon/metrics`
//! parse metrics strictly.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use test_support::machine::*;

const SHARE: u64 = 64 * MIB;
/// Bytes that a program allocates beside its [`SHARE`].
const BESIDES: u64 = 8 * MIB;
/// The scheduler computes metrics again after this time.
const ANEW: Duration = Duration::from_millis(150);

/// A machine whose scheduler serves metrics.
fn served(setup: Setup) -> Machine {
    let mut machine = Machine::new(setup);
    let directory = machine.path("nvshare.toml.d");
    std::fs::create_dir_all(&directory).expect("a directory for drop-ins");
    let text = format!("[metrics]\nlisten = {:?}\n", machine.path("metrics.sock"));
    std::fs::write(directory.join("metrics.toml"), text).expect("a drop-in");
    machine.start_scheduler();
    machine
}

/// The metrics of the machine's only GPU.
fn of_gpu(machine: &Machine) -> BTreeMap<String, f64> {
    let mut stream = UnixStream::connect(machine.path("metrics.sock")).expect("it is served");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("it listens");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let of_one = |line: &str| {
        let (name, rest) = line.strip_prefix("nvshare_gpu_")?.split_once('{')?;
        Some((name.to_owned(), rest.rsplit(' ').next()?.parse().expect("a number")))
    };
    text.lines().filter_map(of_one).collect()
}

/// The metrics after all programs have ended.
fn at_the_end(machine: &Machine) -> BTreeMap<String, f64> {
    machine.wait_until_empty();
    std::thread::sleep(ANEW);
    of_gpu(machine)
}

/// Bytes that were evicted and restored, according to the output of the programs' libraries.
fn told(programs: &[Program]) -> (u64, u64) {
    let (mut left, mut back) = (0, 0);
    for line in programs.iter().flat_map(|program| program.stderr().lines().map(str::to_owned).collect::<Vec<_>>()) {
        let number = |what: &str| line.split_once(what)?.0.rsplit([' ', ':']).next()?.parse::<u64>().ok();
        left += number(" bytes left in").unwrap_or(0);
        back += number(" bytes came back in").unwrap_or(0);
    }
    (left, back)
}

#[test]
fn moved_memory_is_counted_to_the_byte() {
    for engine in ["swap", "managed"] {
        let machine = served(Setup { memory: 128 * MIB, anti_thrash: "on", ..Setup::default() });
        let words = format!("mix --mem {SHARE} --chunks 4 --reps 3 --rounds endless");
        let mut programs: Vec<Program> =
            (0..2).map(|_| machine.program(&words).env("NVSHARE_ENGINE", engine).start()).collect();
        machine.wait_for_exchange(&programs);
        for program in &mut programs {
            program.end();
        }
        let said = at_the_end(&machine);
        let count = |name: &str| said[name] as u64;
        let (out, back, unmoved) =
            (count("swapped_out_bytes_total"), count("swapped_in_bytes_total"), count("unmoved_bytes_total"));
        let (left, came_back) = told(&programs);
        assert!(out > 0 && back > 0, "{engine}: {said:?}");
        // The programs' output also counts memory when it is first mapped, although that memory was
        // never evicted. The metrics don't.
        let fresh = (left + came_back) - (out + back + unmoved);
        assert!(fresh <= 2 * (SHARE + BESIDES), "{engine}: {left} left, {came_back} came back: {said:?}");
        assert!(out <= left && back <= came_back, "{engine}: {left} left, {came_back} came back: {said:?}");
        let moves = machine.moves();
        let grants: usize = programs.iter().map(|program| grants(&moves, program.pid())).sum();
        assert_eq!(count("grants_total") as usize, grants);
        let turns = turns(&moves);
        let changes = turns.windows(2).filter(|pair| pair[0] != pair[1]).count();
        assert_eq!(count("hand_overs_total") as usize, changes, "{turns:?}");
        assert_eq!(count("wait_seconds_count") as usize, grants);
    }
}

#[test]
fn memory_that_fits_is_not_counted_as_moved() {
    let machine = served(Setup::default());
    let words = format!("mix --mem {} --chunks 4 --reps 3 --rounds 4", 40 * MIB);
    let mut programs: Vec<Program> = (0..2).map(|_| machine.program(&words).start()).collect();
    for program in &mut programs {
        program.finish();
    }
    let said = at_the_end(&machine);
    for name in ["swapped_out_bytes_total", "swapped_in_bytes_total", "unmoved_bytes_total"] {
        assert_eq!(said[name], 0.0, "{name}");
    }
    assert_eq!(said["refused_allocations_total"], 0.0);
    assert!(said["lock_seconds_total"] > 0.0);
}

/// Every kind of allocation is counted, whether the library asked the scheduler or not.
#[test]
fn each_refused_allocation_is_counted_once() {
    let rules = "[[rule]]\nmemory-max = \"44M\"\n".to_owned();
    let machine = served(Setup { rules, ..Setup::default() });
    for (count, kind) in (1..).zip(["alloc", "vmm", "managed"]) {
        let ask = format!("oversub --mem 100M --chunk 2M --rounds 0 --kind {kind}");
        let report = machine.program(&ask).start().finish();
        assert_ne!(report.0["failed"], "", "nothing was refused");
        assert_eq!(at_the_end(&machine)["refused_allocations_total"], f64::from(count), "{kind}");
    }
}
