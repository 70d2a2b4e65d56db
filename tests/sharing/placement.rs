//! Programs on a machine with two GPUs. Either the scheduler picks a GPU for each program, or rules
//! allow programs only some of the GPUs.

use serde_json::Value;
use test_support::machine::*;

const MEMORY: u64 = 256 * MIB;
/// Reports the number of GPUs that it sees, and the UUID of one of them.
const LOOK: &str = "info";
/// Arguments of a program that holds memory without doing any work, until it is killed.
const STAY: &str = "stranger --mem 24M --seconds 600";
/// The ID of a group without members.
const GROUP: u32 = 47_113;

fn two_gpus(placement: &'static str, rules: &str) -> Machine {
    let simulator = vec![("CUDA_SIM_GPUS", "2".to_owned())];
    Machine::with_scheduler(Setup { memory: MEMORY, placement, rules: rules.into(), simulator, ..Setup::default() })
}

/// UUIDs of the GPUs, in the order of their numbers.
fn uuids(machine: &Machine) -> Vec<String> {
    let status = machine.status();
    let mut gpus: Vec<&Value> = status["gpus"].as_array().expect("GPUs").iter().collect();
    gpus.sort_by_key(|gpu| number(&gpu["index"]));
    gpus.iter().map(|gpu| gpu["uuid"].as_str().expect("a UUID").to_owned()).collect()
}

/// Waits until this number of programs use a GPU. Returns how many use each GPU.
fn settled(machine: &Machine, programs: usize) -> Vec<u64> {
    let uuids = uuids(machine);
    wait_for("all programs to be on GPUs", || {
        let status = machine.status();
        let gpus = status["gpus"].as_array().expect("GPUs");
        let on = |uuid: &String| gpus.iter().find(|gpu| gpu["uuid"] == **uuid).map_or(0, |gpu| number(&gpu["clients"]));
        let all: Vec<u64> = uuids.iter().map(on).collect();
        (all.iter().sum::<u64>() == programs as u64).then_some(all)
    })
}

/// Asserts that the program sees exactly one GPU. Returns that GPU's number.
#[track_caller]
fn only_gpu(machine: &Machine, launch: Launch<'_>) -> usize {
    let report = launch.start().finish();
    assert_eq!(report.number("gpus"), 1, "{}", report.0);
    number_of(machine, &report)
}

#[track_caller]
fn number_of(machine: &Machine, report: &Report) -> usize {
    let plain = |uuid: &str| uuid.trim_start_matches("GPU-").replace('-', "");
    let uuid = report.0["uuid"].as_str().expect("a UUID");
    uuids(machine).iter().position(|known| plain(known) == plain(uuid)).expect("a GPU of this machine")
}

/// Asserts that a program finds no GPU, and that the driver returns the matching error.
#[track_caller]
fn finds_none(launch: Launch<'_>) {
    let mut program = launch.start();
    assert!(!program.wait().success());
    let said = program.stdout() + &program.stderr();
    assert!(said.contains("NO_DEVICE") || said.contains("100"), "{said}");
}

#[test]
fn programs_see_all_gpus_without_a_placement_policy() {
    let machine = two_gpus("none", "");
    let report = machine.program(LOOK).start().finish();
    assert_eq!((report.number("gpus"), number_of(&machine, &report)), (2, 0));
    let report = machine.run(&[], LOOK).start().finish();
    assert_eq!(report.number("gpus"), 2);
    assert_eq!(only_gpu(&machine, machine.run(&["--gpus", "1"], LOOK)), 0, "who asks is placed");
}

#[test]
fn spread_distributes_eight_programs_over_two_gpus() {
    let machine = two_gpus("spread", "");
    let programs: Vec<Program> = (0..8).map(|_| machine.program(STAY).start()).collect();
    assert_eq!(settled(&machine, 8), [4, 4]);
    let status = machine.status();
    for client in status["clients"].as_array().expect("clients") {
        assert_eq!(client["placed"][0], client["gpus"][0]["uuid"]);
    }
    assert!(machine.ctl(&["status"]).contains("was placed on this GPU."));
    drop(programs);
    machine.wait_until_empty();
}

#[test]
fn pack_fills_one_gpu_with_programs_before_the_other() {
    let machine = two_gpus("pack", "");
    let programs: Vec<Program> = (0..8).map(|_| machine.program(STAY).start()).collect();
    assert_eq!(settled(&machine, 8), [8, 0]);
    // At most about 100 MB are free on that GPU.
    assert_eq!(only_gpu(&machine, machine.run(&["--memory", "120M"], LOOK)), 1);
    drop(programs);
    machine.wait_until_empty();
}

#[test]
fn pack_counts_the_memory_of_simultaneously_started_programs() {
    let machine = two_gpus("pack", "");
    let programs: Vec<Program> = (0..8).map(|_| machine.run(&["--memory", "50M"], STAY).start()).collect();
    assert_eq!(settled(&machine, 8), [4, 4]);
    drop(programs);
}

#[test]
fn run_gives_a_command_the_requested_number_of_gpus() {
    let machine = two_gpus("spread", "");
    let stays = machine.run(&[], STAY).start();
    assert_eq!(settled(&machine, 1), [1, 0]);
    assert_eq!(only_gpu(&machine, machine.run(&[], LOOK)), 1);
    let report = machine.run(&["--gpus", "2"], LOOK).start().finish();
    assert_eq!((report.number("gpus"), number_of(&machine, &report)), (2, 1), "the better one is the first");
    let mut refused = machine.run(&["--gpus", "3"], LOOK).quiet().start();
    assert_eq!(refused.wait().code(), Some(1));
    let expected = "nvsharectl: cannot place the command on a GPU: it requests 3 GPUs but may use only 2\n";
    assert_eq!(refused.stderr(), expected);
    drop(stays);
}

#[test]
fn a_program_that_sets_cuda_visible_devices_is_not_placed() {
    let machine = two_gpus("spread", "");
    let uuids = uuids(&machine);
    for (list, gpus, first) in [("1", 1, 1), ("1,0", 2, 1), (uuids[1].as_str(), 1, 1), (&uuids[1][..12], 1, 1)] {
        for launch in [machine.program(LOOK), machine.run(&[], LOOK)] {
            let report = launch.env("CUDA_VISIBLE_DEVICES", list).start().finish();
            assert_eq!((report.number("gpus"), number_of(&machine, &report)), (gpus, first), "{list}");
        }
    }
    finds_none(machine.program(LOOK).env("CUDA_VISIBLE_DEVICES", ""));
    let report = machine.program(LOOK).env("LOCAL_RANK", "1").start().finish();
    assert_eq!(report.number("gpus"), 2);
    let report = machine.program(LOOK).env("SLURM_LOCALID", "0").env("SLURM_NTASKS", "1").start().finish();
    assert_eq!(report.number("gpus"), 1);
    let report = machine.run(&["--gpus", "1"], LOOK).env("CUDA_VISIBLE_DEVICES", "1").start().finish();
    assert_eq!(number_of(&machine, &report), 1);
}

#[test]
fn a_rules_allowed_gpus_limit_the_visible_gpus() {
    for placement in ["none", "pack", "spread"] {
        let machine = two_gpus(placement, "[[rule]]\nallowed-gpus = [1]\n");
        assert_eq!(only_gpu(&machine, machine.program(LOOK)), 1);
        assert_eq!(only_gpu(&machine, machine.run(&[], LOOK)), 1);
        assert_eq!(only_gpu(&machine, machine.program(LOOK).env("CUDA_VISIBLE_DEVICES", "0,1")), 1);
        assert_eq!(only_gpu(&machine, machine.program(LOOK).env("LOCAL_RANK", "0")), 1);
        finds_none(machine.program(LOOK).env("CUDA_VISIBLE_DEVICES", "0"));
        machine.wait_for_log("allows none of the program's GPUs");
        let mut refused = machine.run(&[], LOOK).quiet().env("CUDA_VISIBLE_DEVICES", "0").start();
        assert_eq!(refused.wait().code(), Some(1));
        assert!(refused.stderr().contains("nvshare.toml:9 allows none of the program's GPUs"), "{}", refused.stderr());
    }
}

#[test]
fn programs_with_the_same_affinity_share_a_gpu() {
    let machine = two_gpus("spread", "[[rule]]\naffinity = \"team\"\n");
    let programs: Vec<Program> = (0..4).map(|_| machine.program(STAY).start()).collect();
    assert_eq!(settled(&machine, 4), [4, 0]);
    drop(programs);
}

#[test]
fn programs_with_the_same_anti_affinity_share_no_gpu() {
    let machine = two_gpus("pack", "[[rule]]\nname = \"apart\"\nanti-affinity = \"servers\"\n");
    let mut first = machine.program(STAY).start();
    settled(&machine, 1);
    let second = machine.program(STAY).start();
    assert_eq!(settled(&machine, 2), [1, 1]);
    finds_none(machine.program(LOOK));
    let line = machine.wait_for_log("anti-affinity \"servers\": programs with this label");
    assert!(line.contains("\"apart\""), "{line}");
    let mut refused = machine.run(&[], LOOK).quiet().start();
    assert_eq!(refused.wait().code(), Some(1));
    first.kill();
    settled(&machine, 1);
    assert_eq!(only_gpu(&machine, machine.program(LOOK)), 0);
    drop(second);
}

#[test]
fn programs_with_an_exclusion_share_a_gpu_only_with_each_other() {
    // SAFETY: `geteuid` has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return test_support::skip("root, to start programs of another group");
    }
    let machine = two_gpus("spread", &format!("[[rule]]\ngroup = {GROUP}\nexclusion = \"quiet\"\n"));
    let quiet = machine.program(STAY).group(GROUP).start();
    assert_eq!(settled(&machine, 1), [1, 0]);
    let others: Vec<Program> = (0..2).map(|_| machine.program(STAY).start()).collect();
    assert_eq!(settled(&machine, 3), [1, 2]);
    assert_eq!(only_gpu(&machine, machine.program(LOOK).group(GROUP)), 0);
    drop((quiet, others));
}

#[test]
fn without_a_scheduler_a_program_sees_all_gpus() {
    let simulator = vec![("CUDA_SIM_GPUS", "2".to_owned())];
    let machine = Machine::new(Setup { memory: MEMORY, placement: "pack", simulator, ..Setup::default() });
    for launch in [machine.program(LOOK), machine.run(&["--gpus", "1"], LOOK)] {
        assert_eq!(launch.start().finish().number("gpus"), 2);
    }
}

#[test]
fn a_hung_scheduler_delays_a_start_only_briefly() {
    let machine = two_gpus("spread", "");
    kill(machine.scheduler_pid(), libc::SIGSTOP);
    let mut program = machine.program("info").start();
    wait_for("its end", || program.poll());
    kill(machine.scheduler_pid(), libc::SIGCONT);
    assert_eq!(program.finish().number("gpus"), 2);
}

#[test]
fn nvml_counts_the_gpus_that_a_program_was_given() {
    let machine = two_gpus("spread", "");
    let _stays = machine.program(STAY).start();
    settled(&machine, 1);
    let report = machine.program("info --nvml 1").start().finish();
    assert_eq!(number_of(&machine, &report), 1, "the other one");
    let uuid = report.0["nvml_uuid"].as_str().expect("a UUID").to_owned();
    assert_eq!(uuid, uuids(&machine)[1]);
    assert_eq!(["nvml_gpus", "nvml_index", "nvml_has_another"].map(|name| report.number(name)), [1, 0, 0]);

    let chosen = machine.program("info --nvml 1").env("CUDA_VISIBLE_DEVICES", "1").start().finish();
    assert_eq!(["gpus", "nvml_gpus"].map(|name| chosen.number(name)), [1, 2], "as without nvshare");
}

#[test]
fn a_command_larger_than_every_gpu_is_not_started() {
    let machine = two_gpus("none", "");
    let mut refused = machine.run(&["--memory", "2G"], LOOK).start();
    assert_eq!(refused.wait().code(), Some(1));
    let expected = "nvsharectl: cannot place the command on a GPU: it requests 2 GiB of memory, but the largest GPU \
        that it may use has 256 MiB\n";
    assert_eq!(refused.stderr(), expected);
}
