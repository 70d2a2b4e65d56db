//! Programs whose GPUs access each other's memory.

use test_support::machine::*;

const SHARE: u64 = 12 * MIB;

/// Two GPUs. Neither has room for all programs of a test.
fn two_gpus() -> Setup {
    Setup {
        memory: 56 * MIB,
        anti_thrash: "on",
        simulator: vec![("CUDA_SIM_GPUS", "2".to_owned())],
        ..Setup::default()
    }
}

fn words(how: &str, rounds: u32) -> String {
    format!("across --mem {SHARE} --how {how} --rounds {rounds}")
}

#[track_caller]
fn reach_while_taking_turns(how: &str) {
    let machine = Machine::with_scheduler(two_gpus());
    let mut programs: Vec<Program> = (0..2).map(|_| machine.program(&words(how, 8)).start()).collect();
    // On each GPU, another program needs most of the memory.
    let others = ["0", "1"].map(|gpu| format!("mix --mem 32M --chunks 2 --reps 3 --rounds 4 --device {gpu}"));
    programs.extend(others.iter().map(|words| machine.program(words).start()));
    for program in &mut programs {
        program.finish();
    }
    assert!(evicted(&machine.moves()) > 0, "nothing had to leave");
    machine.wait_until_empty();
}

#[test]
fn copies_between_gpus_are_complete() {
    reach_while_taking_turns("copy");
}

#[test]
fn row_copies_between_gpus_are_complete() {
    reach_while_taking_turns("pitched");
}

#[test]
fn kernels_can_access_memory_of_a_peer() {
    reach_while_taking_turns("kernel");
}

#[test]
fn memory_mapped_for_two_gpus_is_resident_for_both() {
    reach_while_taking_turns("map");
}

#[test]
fn gpus_with_peer_access_are_held_together() {
    let machine = Machine::with_scheduler(two_gpus());
    let mut program = machine.program(&words("kernel", 60)).start();
    program.wait_to_say("access each other's memory");
    let mut other = machine.program("mix --mem 8M --reps 3 --rounds 10 --device 1").start();
    program.finish();
    other.finish();
    assert!(program.stderr().contains("Request { gpus: 3 }"), "both GPUs were never asked for at once");
}

/// Runs work that uses both GPUs while a context of the first GPU is current. Other programs need
/// most of each GPU's memory.
#[track_caller]
fn cross(how: &str, simulator: &[(&'static str, &str)]) {
    let mut setup = two_gpus();
    setup.simulator.extend(simulator.iter().map(|(name, value)| (*name, (*value).to_owned())));
    let machine = Machine::with_scheduler(setup);
    let words = format!("cross --mem {SHARE} --pause-ms 50 --rounds 6 --how {how}");
    let mut programs = vec![machine.program(&words).start()];
    let others = ["0", "1"].map(|gpu| format!("mix --mem 32M --chunks 2 --reps 3 --rounds 4 --device {gpu}"));
    programs.extend(others.iter().map(|words| machine.program(words).start()));
    for program in &mut programs {
        program.finish();
    }
    assert!(evicted(&machine.moves()) > 0, "nothing had to leave");
    machine.wait_until_empty();
}

const APART: &[(&str, &str)] = &[("CUDA_SIM_NO_PEERS", "0-1")];

#[test]
fn copies_by_address_are_complete() {
    cross("unified", &[]);
}

#[test]
fn copies_by_address_are_complete_without_peer_access() {
    cross("unified", APART);
}

#[test]
fn row_and_layer_copies_are_complete_without_peer_access() {
    cross("rows", APART);
}

#[test]
fn captured_copies_are_complete_without_peer_access() {
    cross("recorded", APART);
}

#[test]
fn copies_between_host_and_another_gpu_are_complete() {
    cross("host", &[]);
}

#[test]
fn copies_between_host_and_another_gpu_need_no_peer_access() {
    cross("host", APART);
}

#[test]
fn row_copies_between_host_and_another_gpu_need_no_peer_access() {
    cross("rows-host", APART);
}

#[test]
fn copies_with_attributes_are_complete() {
    cross("attributes", &[]);
    cross("attributes --first 1", &[]);
}

#[test]
fn batch_copies_are_complete() {
    cross("batches", &[]);
    cross("batches --first 1", &[]);
}

#[test]
fn graph_node_copies_are_complete() {
    (0..4).for_each(|first| cross(&format!("nodes --first {first}"), &[]));
}

#[test]
fn copies_through_arrays_are_complete() {
    cross("arrays", &[]);
}

/// Runs work that uses the second GPU while a context of the first GPU is current. Another program
/// needs most of the second GPU's memory. The program pauses for so long that the library no longer
/// counts the second GPU as in use, so the program's requests for the first GPU don't include the
/// second GPU.
#[track_caller]
fn cross_after_pauses(hows: &[&str]) {
    let machine = Machine::with_scheduler(two_gpus());
    let share = SHARE / hows.len() as u64;
    let words = |how: &&str| format!("cross --mem {share} --rounds 2 --pause-ms 2500 --how {how}");
    let mut programs: Vec<Program> = hows.iter().map(|how| machine.program(&words(how)).start()).collect();
    let mut other = machine.program("mix --mem 32M --chunks 2 --reps 3 --rounds endless --device 1").start();
    for program in &mut programs {
        program.finish();
    }
    other.kill();
    assert!(evicted(&machine.moves()) > 0, "nothing had to leave");
    machine.wait_until_empty();
}

// For each kind of work, one of the programs begins with that work after its pause.

#[test]
fn work_in_a_stream_of_another_gpu_finds_its_memory_resident() {
    cross_after_pauses(&["streams --first 0", "streams --first 3"]);
}

#[test]
fn other_work_in_a_stream_of_another_gpu_finds_its_memory_resident() {
    cross_after_pauses(&["streams --first 1", "streams --first 2"]);
}

#[test]
fn a_graph_of_two_gpus_finds_both_gpus_memory_resident() {
    cross_after_pauses(&["graph"]);
}

#[test]
fn a_launch_on_two_gpus_finds_both_gpus_memory_resident() {
    cross("devices", &[]);
}

/// Runs a program that uses an unmanaged GPU and a managed one, beside another program on the
/// managed GPU.
#[track_caller]
fn cross_with_one_left_alone(alone: &'static str, other: u32, hows: &[&str]) {
    let mut setup = two_gpus();
    setup.simulator.push(("CUDA_SIM_EXCLUSIVE", alone.to_owned()));
    let machine = Machine::with_scheduler(setup);
    for how in hows {
        let mut program = machine.program(&format!("cross --mem {SHARE} --how {how} --rounds 6 --pause-ms 50")).start();
        let words = format!("mix --mem 32M --chunks 2 --reps 3 --rounds 4 --device {other}");
        let mut other = machine.program(&words).start();
        program.finish();
        other.finish();
    }
    assert!(evicted(&machine.moves()) > 0, "nothing had to leave");
    machine.wait_until_empty();
}

#[test]
fn memory_of_an_unmanaged_gpu_stays_on_that_gpu() {
    cross_with_one_left_alone("1", 0, &["own"]);
}

#[test]
fn copies_to_and_from_an_unmanaged_gpu_are_complete() {
    cross_with_one_left_alone("1", 0, &["unified", "rows", "host"]);
}

#[test]
fn copies_by_an_unmanaged_gpu_are_complete() {
    cross_with_one_left_alone("0", 1, &["unified", "rows", "host", "rows-host"]);
}
