//! Programs with managed memory that run at the same moment and do not fit: on the simulated GPU, as on a real one, they
//! push each other's memory off it, and the scheduler finds out.

use serde_json::Value;
use test_support::machine::*;

/// Goes over all of it again and again until it is killed.
const ENDLESS: &str = "mix --mem 160M --reps 4 --rounds 100000";

#[test]
fn programs_that_thrash_are_found_and_take_turns_when_the_administrator_wants_it() {
    // Traffic is how it is found, so this is a card whose NVML tells it.
    let simulator = vec![("CUDA_SIM_PCIE_LANES", "1".to_owned())];
    let machine =
        Machine::with_scheduler(Setup { card: Card::Simulated, anti_thrash: "off", simulator, ..Setup::default() });
    let start = || machine.program(ENDLESS).env("NVSHARE_ENGINE", "managed").start();
    let is = |key: &'static str| (machine.status()["gpus"][0][key] == Value::Bool(true)).then_some(());
    let first = start();
    machine.wait_for_grants(&first, 1);
    assert_eq!(is("thrashing"), None, "one alone does not");
    let second = start();
    machine.wait_for_grants(&second, 1);
    wait_for("it to be seen", || is("thrashing"));
    let seen = |line: &Value| line["what"] == "traffic" && line["to_gpu"].as_u64() > Some(0);
    let trace = std::fs::read_to_string(machine.path("trace-1")).expect("a trace");
    assert!(trace.lines().any(|line| serde_json::from_str(line).is_ok_and(|line| seen(&line))), "the trace has it");

    machine.ctl(&["set", "anti-thrash", "auto"]);
    wait_for("it to end", || if is("thrashing").is_none() { Some(()) } else { None });
    assert_eq!(is("serialized"), Some(()));
    for mut program in [first, second] {
        program.kill();
    }
    machine.wait_until_empty();
}
