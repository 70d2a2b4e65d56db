//! The cost of a call doesn't grow with the number of earlier calls. Earlier calls may have left
//! pending launches, destroyed streams, or many mappings of the same memory.

use test_support::machine::*;

fn alone(words: &str) -> Report {
    let machine = Machine::with_scheduler(Setup::default());
    let report = machine.program(words).quiet().start().finish();
    eprintln!("{}", report.0);
    report
}

/// The limits are wide: they only have to distinguish a constant cost from a cost that grows with
/// the number of earlier calls.
#[track_caller]
fn is_at_most(report: &Report, name: &str, most: f64) {
    let value = report.0[name].as_f64().unwrap_or_else(|| panic!("no {name} in {}", report.0));
    assert!(value <= most, "{name} is {value}, not at most {most}");
}

/// Each stream queues 5 % fewer launches than the driver's limit, so that no launch blocks, either
/// natively or under nvshare.
#[test]
fn launches_behind_waiting_work_take_constant_time() {
    is_at_most(&alone("queued --streams 16 --each 970"), "launch_us", 200.0);
}

/// The events that the library records in a stream take entries of the stream's queue, but must not
/// fill the queue.
#[test]
fn launches_to_one_stream_behind_waiting_work_do_not_block() {
    is_at_most(&alone("queued --streams 1 --each 970"), "launch_us", 1000.0);
}

#[test]
fn destroyed_streams_leak_nothing() {
    for words in ["cycles --streams 20000", "cycles --streams 20000 --busy 1"] {
        let report = alone(words);
        let first = report.0["first_us"].as_f64().expect("a number");
        is_at_most(&report, "last_us", first * 3.0);
        // Allocators grow in large steps, so some growth is allowed.
        is_at_most(&report, "grown_kib", 6.0 * 1024.0);
    }
}

#[test]
fn mapping_time_does_not_grow_with_the_number_of_mappings() {
    let (few, many) = (alone("aliases --count 256"), alone("aliases"));
    let few = few.0["remap_us"].as_f64().expect("a number");
    is_at_most(&many, "remap_us", few * 10.0);
}
