//! A program's own environment tightens the limits of the program's rule. The tests run real
//! processes on the simulated GPU.

use serde_json::Value;
use test_support::machine::*;

/// Arguments of a program that works until it is killed.
const WORK: &str = "mix --mem 32M --chunks 4 --reps 3 --rounds endless";
/// Allocates in steps of the GPU's granularity until memory is refused, and reports the allocated
/// bytes.
const ASK: &str = "oversub --mem 100M --chunk 2M --rounds 0";

fn ruled(setup: Setup, lines: &str) -> Machine {
    // SAFETY: `getuid` has no preconditions.
    let uid = unsafe { libc::getuid() };
    let rules = format!("[[rule]]\nname = \"mine\"\nuser = {uid}\n{lines}\n");
    Machine::with_scheduler(Setup { rules, ..setup })
}

/// A program's entry in the status.
#[track_caller]
fn client(machine: &Machine, program: &Program) -> Value {
    wait_for("the program in the status", || {
        let status = machine.status();
        status["clients"].as_array()?.iter().find(|client| client["pid"] == program.pid()).cloned()
    })
}

#[track_caller]
fn reach(machine: &Machine, most: &str) -> u64 {
    machine.program(ASK).env("NVSHARE_MEMORY_MAX", most).start().finish().number("allocated") / MIB
}

/// The program's context takes 4 MiB, which count towards the limit.
#[test]
fn an_environment_memory_max_is_exact() {
    let mut machine = ruled(Setup::default(), "memory-max = \"64M\"");
    assert_eq!(reach(&machine, "44M"), 40);
    assert_eq!(reach(&machine, "infinity"), 60, "the rule's");
    machine.wait_for_log("Its environment sets memory-max 44 MiB");
    let report = machine.program("account --mem 16M").env("NVSHARE_MEMORY_MAX", "60M").start().finish();
    assert_eq!(["total", "free", "free_with"].map(|name| report.number(name) / MIB), [60, 56, 40]);
    let mut program = machine.program("stranger --mem 16M --seconds 600").env("NVSHARE_MEMORY_MAX", "44M").start();
    program.wait_to_say("holding");
    let of = |machine: &Machine, key: &str| client(machine, &program)["gpus"][0][key].as_u64();
    assert_eq!((of(&machine, "memory-max"), of(&machine, "environment-memory-max")), (Some(64 * MIB), Some(44 * MIB)));
    assert_eq!(client(&machine, &program)["environment"], "memory-max 44 MiB");
    // Both limits apply. The rule's limit counts all programs of the rule together.
    assert_eq!(reach(&machine, "44M"), 40);
    assert_eq!(reach(&machine, "60M"), 40, "what the other leaves");
    // A new scheduler learns the environment's limit too. The environment's limit also holds
    // without a scheduler.
    machine.kill_scheduler();
    machine.start_scheduler();
    wait_for("it to be back", || (of(&machine, "environment-memory-max") == Some(44 * MIB)).then_some(()));
    program.kill();
    machine.stop_scheduler();
    assert_eq!(reach(&machine, "44M"), 44);
}

#[test]
fn a_program_with_idle_environment_weight_runs_last() {
    let machine = ruled(Setup { time_quantum: HOUR, anti_thrash: "on", ..Setup::default() }, "weight = 500");
    let mut idle = machine.program(WORK).env("NVSHARE_WEIGHT", "idle").start();
    machine.wait_for_grants(&idle, 1);
    // Without its weight `idle`, the idle program would make this program wait for ten minutes.
    machine.program("mix --mem 32M --chunks 4 --reps 3 --rounds 5").start().finish();
    machine.wait_for_grants(&idle, 2);
    let status = machine.ctl(&["status"]);
    assert!(status.contains(" sets weight idle."), "{status}");
    assert!(status.contains(" and its group have weight 500 by rule \"mine\""), "{status}");
    idle.kill();
}

/// The effect on turns is tested in virtual time:
/// `a_lower_environment_weight_delays_a_client_only_temporarily`.
#[test]
fn an_environment_weight_reaches_every_scheduler() {
    let mut machine = ruled(Setup::default(), "weight = 100");
    let mut low = machine.program(WORK).env("NVSHARE_WEIGHT", "10").start();
    let is_shown = |machine: &Machine| (client(machine, &low)["environment"] == "weight 10").then_some(());
    wait_for("the weight in the status", || is_shown(&machine));
    machine.kill_scheduler();
    machine.start_scheduler();
    wait_for("the weight in the new scheduler's status", || is_shown(&machine));
    low.kill();
}

#[test]
fn environment_allowed_gpus_limits_the_visible_gpus() {
    let simulator = vec![("CUDA_SIM_GPUS", "2".to_owned())];
    let machine = ruled(Setup { simulator: simulator.clone(), ..Setup::default() }, "weight = 100");
    let status = machine.status();
    let gpus = status["gpus"].as_array().expect("GPUs");
    let uuid = |index: u64| {
        let gpu = gpus.iter().find(|gpu| gpu["index"] == index).expect("a GPU of that number");
        gpu["uuid"].as_str().expect("a UUID").to_owned()
    };
    let sees = |machine: &Machine, launch: Launch<'_>, allowed: &str| {
        let report = launch.env("NVSHARE_ALLOWED_GPUS", allowed).start().finish();
        let plain = |uuid: &str| uuid.trim_start_matches("GPU-").replace('-', "");
        let first = plain(report.0["uuid"].as_str().expect("a UUID"));
        let number = (0..2).find(|index| plain(&uuid(*index)) == first);
        assert!(machine.status()["gpus"].as_array().is_some_and(|gpus| gpus.len() == 2));
        (report.number("gpus"), number)
    };
    assert_eq!(sees(&machine, machine.program("info"), "1"), (1, Some(1)));
    assert_eq!(sees(&machine, machine.program("info"), &uuid(1)[..12]), (1, Some(1)));
    assert_eq!(sees(&machine, machine.program("info"), "0, 1"), (2, Some(0)));
    assert_eq!(sees(&machine, machine.program("info").env("CUDA_VISIBLE_DEVICES", "1,0"), "0"), (1, Some(0)));
    assert_eq!(sees(&machine, machine.program("info"), "0,first"), (2, Some(0)), "nonsense says nothing");
    assert_eq!(sees(&machine, machine.run(&["--gpus", "1"], "info"), "1"), (1, Some(1)));
    let mut none = machine.program("info").env("CUDA_VISIBLE_DEVICES", "0").env("NVSHARE_ALLOWED_GPUS", "1").start();
    assert!(!none.wait().success());
    machine.wait_for_log("NVSHARE_ALLOWED_GPUS allows none of the program's GPUs");
    drop(machine);

    let machine = ruled(Setup { simulator, ..Setup::default() }, "allowed-gpus = [0]");
    assert_eq!(sees(&machine, machine.program("info"), "0,1").0, 1);
    let mut none = machine.program("info").env("NVSHARE_ALLOWED_GPUS", "1").start();
    assert!(!none.wait().success(), "it lifts nothing");
}

const NONSENSE: [(&str, &str, &str); 3] = [
    ("NVSHARE_MEMORY_MAX", "lots", "memory-max cannot be \"lots\": a size from 2M to 1T"),
    (
        "NVSHARE_WEIGHT",
        "\u{fc}\u{1b}[0m",
        "weight cannot be \"???[0m\": a number from 1 to 10000, or \"idle\" is allowed",
    ),
    ("NVSHARE_ALLOWED_GPUS", "first", "allowed-gpus cannot have \"first\": "),
];

#[test]
fn invalid_environment_limits_are_ignored_and_reported_once() {
    let machine = ruled(Setup::default(), "weight = 100");
    let with_nonsense = |words: &str| {
        let launch = machine.program(words);
        NONSENSE.iter().fold(launch, |launch, (name, value, _)| launch.env(name, value))
    };
    let mut quiet = with_nonsense("account --mem 32M").quiet().start();
    let report = quiet.finish();
    assert_eq!(quiet.stderr(), "");
    assert_eq!(report.number("total"), 256 * MIB);

    let mut traced = with_nonsense("stranger --mem 16M --seconds 600").start();
    traced.wait_to_say("holding");
    let trace = traced.stderr();
    let environment = client(&machine, &traced);
    assert_eq!(environment["environment"], "");
    let ignored: Vec<&str> =
        environment["environment-ignored"].as_array().expect("sentences").iter().filter_map(Value::as_str).collect();
    let status = machine.ctl(&["status"]);
    for (name, _, why) in NONSENSE {
        let lines: Vec<&str> = trace.lines().filter(|line| line.contains(name) && line.contains(why)).collect();
        assert_eq!(lines.len(), 1, "{name}: {trace}");
        assert!(ignored.iter().any(|said| said.starts_with(name) && said.contains(why)), "{name}: {ignored:#?}");
        assert!(status.contains(why), "{name}: {status}");
        machine.wait_for_log(why);
    }
    traced.kill();
}

#[test]
fn environment_limits_looser_than_the_rule_are_ignored_and_reported() {
    let machine = ruled(Setup::default(), "weight = 50\ntime-max = \"90%\"");
    let mut program = machine.program("stranger --mem 16M --seconds 600").env("NVSHARE_WEIGHT", "10000").start();
    program.wait_to_say("holding");
    let why = "NVSHARE_WEIGHT=10000 has no effect: the program already has weight 50 by rule \"mine\" (";
    assert_eq!(program.stderr().lines().filter(|line| line.contains(why)).count(), 1, "{}", program.stderr());
    let seen = client(&machine, &program);
    assert_eq!((&seen["environment"], &seen["share"]), (&Value::from(""), &Value::from("weight 50, time-max 90%")));
    let status = machine.ctl(&["status"]);
    assert!(status.contains(why), "{status}");
    program.kill();
}
