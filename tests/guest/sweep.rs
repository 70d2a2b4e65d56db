//! Calls every function that the simulated driver exports, with zeros as arguments. The answers are
//! the same as without the library, no call crashes, and `errno` is unchanged.

use std::collections::BTreeMap;
use std::process::Command;

use crate::compare::*;

/// Returns the answer to each call, by function name.
fn answers(ended: &Ended) -> BTreeMap<String, String> {
    assert_eq!((ended.status, &*ended.stderr), ((Some(0), None), ""), "{}", ended.stdout);
    let lines = ended.stdout.lines().map(|line| line.split_once(' ').expect("a name and an answer"));
    lines.map(|(name, answer)| (name.to_owned(), answer.to_owned())).collect()
}

#[track_caller]
fn every_call_with_zeros(moment: &str) {
    let host = Host::new();
    let driver = host.0.path("lib").join("libcuda.so.1");
    let symbols = output(Command::new("nm").args(["-D", "--defined-only"]).arg(&driver)).stdout;
    let symbols = String::from_utf8(symbols).expect("names");
    let names = symbols.lines().filter_map(|line| line.split(" T ").nth(1).filter(|name| name.starts_with("cu")));
    let names: Vec<&str> = [moment].into_iter().chain(names).collect();
    assert!(names.len() > 300, "{names:?}");

    let case = host.case(host.program("sweep"), &names);
    let (plain, guest) = (answers(&case.without()), answers(&case.with()));
    assert_eq!(plain.len(), names.len() - 1);
    let mut compared = 0;
    for (name, answer) in &plain {
        // A crash in the driver itself proves nothing about the library.
        if answer.starts_with("signal") {
            continue;
        }
        compared += 1;
        let guest = &guest[name];
        assert!(guest == answer, "{name}, {moment}: {guest}, and without the library {answer}");
    }
    assert!(compared > 300, "only {compared} calls can be compared: {plain:#?}");
}

#[test]
fn calls_with_zero_arguments_are_unchanged_before_cuinit() {
    every_call_with_zeros("before");
}

#[test]
fn calls_with_zero_arguments_are_unchanged_without_a_context() {
    every_call_with_zeros("initialised");
}

#[test]
fn calls_with_zero_arguments_are_unchanged_with_a_context() {
    every_call_with_zeros("context");
}
