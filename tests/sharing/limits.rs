//! Rules that limit programs' memory and divide the time of a GPU. The tests run real processes on
//! the simulated GPU.

use std::fs;
use std::time::Duration;

use test_support::cgroup::Unit;
use test_support::machine::*;

/// Writes the machine's rules to a drop-in and reloads the scheduler's configuration.
fn rule(machine: &Machine, rules: &str) {
    write(machine, rules);
    machine.ctl(&["reload"]);
}

fn write(machine: &Machine, rules: &str) {
    let directory = machine.path("nvshare.toml.d");
    fs::create_dir_all(&directory).expect("a directory for drop-ins");
    fs::write(directory.join("rules.toml"), rules).expect("a drop-in");
}

/// A rule for all programs of this test's user.
fn mine(most: &str) -> String {
    // SAFETY: `getuid` has no preconditions.
    let uid = unsafe { libc::getuid() };
    format!("[[rule]]\nname = \"mine\"\nuser = {uid}\nmemory-max = \"{most}\"\n")
}

fn ruled(rules: &str) -> Machine {
    let mut machine = Machine::new(Setup::default());
    write(&machine, rules);
    machine.start_scheduler();
    machine
}

/// Returns the bytes that a program allocates, in steps of the GPU's granularity, before it is
/// refused memory.
#[track_caller]
fn reach(program: Launch<'_>) -> u64 {
    let report = program.start().finish();
    assert_ne!(report.0["failed"], "", "nothing was refused");
    report.number("allocated")
}

const ASK: &str = "oversub --mem 100M --chunk 2M --rounds 0";

/// The program's context takes 4 MiB, which count towards the limit.
#[test]
fn memory_max_is_exact() {
    let machine = ruled(&mine("44M"));
    for kind in ["alloc", "vmm", "managed"] {
        assert_eq!(reach(machine.program(&format!("{ASK} --kind {kind}"))), 40 * MIB, "{kind}");
    }
    let exceeding = machine.program(ASK).env("NVSHARE_ENABLE_SINGLE_OVERSUB", "1");
    assert_eq!(reach(exceeding), 40 * MIB, "no setting of the program lifts it");
    wait_for("the log to name the rule", || {
        let log = machine.scheduler_log();
        (log.contains("is refused memory") && log.contains("rule \"mine\" (") && log.contains("rules.toml:1)"))
            .then_some(())
    });
    machine.wait_until_empty();
    rule(&machine, &mine("45M"));
    assert_eq!(reach(machine.program(ASK)), 40 * MIB, "in whole granules");
    rule(&machine, &mine("25%"));
    assert_eq!(reach(machine.program(ASK)), 60 * MIB);
    rule(&machine, "");
    assert_eq!(machine.program(ASK).start().finish().number("allocated"), 100 * MIB);
}

/// The environment tightens the rule's limit and never raises it. The environment's limit also
/// holds without a scheduler, but then excludes contexts.
#[test]
fn the_environment_can_lower_a_programs_limit() {
    let mut machine = ruled(&mine("44M"));
    let ask = |machine: &Machine, most: &str| reach(machine.program(ASK).env("NVSHARE_MEMORY_MAX", most));
    assert_eq!(ask(&machine, "20M"), 16 * MIB);
    assert_eq!(ask(&machine, "10%"), 20 * MIB, "25.6 MiB in whole granules");
    for more in ["1G", "infinity", "nonsense", ""] {
        assert_eq!(ask(&machine, more), 40 * MIB, "{more:?}");
    }
    let exceeding = machine.program(ASK).env("NVSHARE_ENABLE_SINGLE_OVERSUB", "1").env("NVSHARE_MEMORY_MAX", "20M");
    assert_eq!(reach(exceeding), 16 * MIB);
    machine.wait_until_empty();
    rule(&machine, "");
    let told = |machine: &Machine| {
        let report = machine.program("account --mem 32M").env("NVSHARE_MEMORY_MAX", "100M").start().finish();
        ["total", "free", "free_with"].map(|name| report.number(name) / MIB)
    };
    assert_eq!(told(&machine), [100, 96, 64]);
    machine.stop_scheduler();
    assert_eq!(told(&machine), [100, 100, 68]);
    assert_eq!(ask(&machine, "20M"), 20 * MIB);
}

#[test]
fn a_limited_program_sees_only_its_limit() {
    let machine = ruled(&mine("100M"));
    let report = machine.program("account --mem 32M").start().finish();
    assert_eq!(report.number("total"), 100 * MIB);
    assert_eq!(report.number("free"), 96 * MIB);
    assert_eq!(report.number("free_with"), 64 * MIB);
    assert_eq!(report.number("free_full"), 16 * MIB);
    assert_eq!(report.number("free_after"), 64 * MIB);
}

#[test]
fn programs_of_a_group_share_its_limit() {
    let machine = ruled(&mine("76M"));
    let mut holding: Vec<Program> =
        (0..8).map(|_| machine.program("stranger --mem 4M --seconds 600").start()).collect();
    holding.iter().for_each(|program| program.wait_to_say("holding"));
    // The scheduler may first reserve more for a context than it later measures.
    wait_for("all that eight others leave", || {
        let allocated = reach(machine.program(ASK));
        assert!(allocated <= 8 * MIB, "{allocated} beside eight others");
        (allocated == 8 * MIB).then_some(())
    });
    let status = machine.status();
    let clients = status["clients"].as_array().expect("clients");
    assert_eq!(clients.len(), 8);
    for client in clients {
        assert_eq!(client["rule"], "mine");
        assert!(client["rule-origin"].as_str().is_some_and(|origin| origin.ends_with("rules.toml:1")), "{client}");
        assert_eq!(client["gpus"][0]["memory-max"], 76 * MIB);
    }
    let limits: u64 = clients.iter().map(|client| number(&client["gpus"][0]["limit"])).sum();
    assert!(limits <= 76 * MIB, "{limits} promised");
    assert!(machine.ctl(&["status"]).contains("may use 76 MiB by rule \"mine\" ("), "{}", machine.ctl(&["status"]));
    holding.iter_mut().skip(4).for_each(Program::kill);
    wait_for("four to be gone", || (machine.status()["clients"].as_array()?.len() == 4).then_some(()));
    assert_eq!(reach(machine.program(ASK)), 40 * MIB, "what four others leave");
    holding.iter_mut().take(4).for_each(Program::kill);
}

#[test]
fn a_limit_can_be_lowered_and_raised_at_run_time() {
    let machine = ruled(&mine("infinity"));
    let limit = |program: &Program| {
        let status = machine.status();
        let client = status["clients"].as_array()?.iter().find(|client| client["pid"] == program.pid())?.clone();
        client["gpus"][0]["limit"].as_u64()
    };
    let mut worker = machine.program("mix --mem 33554432 --chunks 4 --reps 3 --rounds endless").start();
    machine.wait_for_grants(&worker, 1);
    let mut holder = machine.program("stranger --mem 16M --seconds 600").start();
    holder.wait_to_say("holding");
    rule(&machine, &mine("20M"));
    wait_for("both to know", || (limit(&worker)? + limit(&holder)? <= 20 * MIB).then_some(()));
    assert_eq!(reach(machine.program(ASK)), 0, "more than the limit is there already");
    assert!(holder.poll().is_none(), "nothing fails of what is there");

    // A file with a mistake leaves the rules unchanged.
    write(&machine, "[[rule]]\nuser = \"nobody-of-this-name\"\nmemory-max = \"1G\"\n");
    let refused = machine.ctl_fails(&["reload"]);
    assert!(refused.contains("rules.toml:2:8: user: this host has no user"), "{refused}");
    assert_eq!(reach(machine.program(ASK)), 0);

    rule(&machine, &mine("72M"));
    assert_eq!(reach(machine.program(ASK)), 12 * MIB);
    worker.end();
    wait_for("it to be gone", || (machine.status()["clients"].as_array()?.len() == 1).then_some(()));
    assert_eq!(reach(machine.program(ASK)), 48 * MIB);
    holder.kill();
    machine.wait_until_empty();
}

#[test]
fn an_allocation_waits_until_other_programs_free_memory() {
    let waits = "on-memory-full = \"wait\"\n";
    let machine = ruled(&(mine("64M") + waits));
    let mut holder = machine.program("stranger --mem 40M --seconds 600").start();
    holder.wait_to_say("holding");
    let mut worker = machine.program("mix --mem 32M --chunks 4 --reps 3 --rounds 5").start();
    let awaited = || {
        let status = machine.status();
        let client = status["clients"].as_array()?.iter().find(|client| client["pid"] == worker.pid())?.clone();
        client["gpus"][0]["pending-limit"].as_u64()
    };
    let bytes = wait_for("it to wait for memory", awaited);
    assert!((16 * MIB..=32 * MIB).contains(&bytes), "{bytes}: more than the holder leaves");
    assert!(machine.ctl(&["status"]).contains(" waits for memory: it requests "), "{}", machine.ctl(&["status"]));
    std::thread::sleep(Duration::from_secs(11)); // longer than the library's timeout for other answers
    assert!(worker.poll().is_none(), "it waits still");
    assert_eq!(reach(machine.program("oversub --mem 300M --chunk 100M --rounds 0")), 0, "what can never be had fails");
    holder.kill();
    worker.finish();
    // Each program holds memory that the other waits for: one of them must make progress.
    let ask = "oversub --mem 100M --chunk 2M --rounds 0";
    let (mut one, mut other) = (machine.program(ask).start(), machine.program(ask).start());
    let got = [one.finish(), other.finish()].map(|report| report.number("allocated"));
    assert!(got.iter().any(|bytes| *bytes >= 40 * MIB), "{got:?}");
    machine.wait_until_empty();
}

#[test]
fn a_unit_pattern_limits_each_unit_separately() {
    let name = |letter: char| format!("nvshare-test-{}-{letter}.service", std::process::id());
    let Some((a, b)) = Unit::new(&name('a')).zip(Unit::new(&name('b'))) else { return };
    let machine = ruled("[[rule]]\nunit = \"**/nvshare-test-*.service\"\nmemory-max = \"44M\"\n");
    let mut first = machine.program_in(&a.procs(), "stranger --mem 16M --seconds 600").start();
    first.wait_to_say("holding");
    assert_eq!(reach(machine.program_in(&a.procs(), ASK)), 20 * MIB);
    assert_eq!(reach(machine.program_in(&b.procs(), ASK)), 40 * MIB);
    assert_eq!(
        machine.program(ASK).start().finish().number("allocated"),
        100 * MIB,
        "who is in no such unit has no limit"
    );
    first.kill();
    machine.wait_until_empty();
}

/// Returns the seconds for which the program has held the lock, the seconds for which it has
/// waited, and the number of its grants.
fn lock_times(machine: &Machine, program: &Program) -> (f64, f64, u64) {
    let status = machine.status();
    let clients = status["clients"].as_array().expect("clients");
    let client = clients.iter().find(|client| client["pid"] == program.pid()).expect("the program");
    let seconds = |key: &str| client["gpus"][0][key].as_f64().unwrap_or_else(|| panic!("no {key} in {client}"));
    (seconds("lock-time"), seconds("wait-time"), number(&client["gpus"][0]["grants"]))
}

#[test]
fn time_max_limits_a_programs_share_of_time() {
    // SAFETY: `getuid` has no preconditions.
    let uid = unsafe { libc::getuid() };
    let machine = ruled(&format!("time-period = \"1s\"\n[[rule]]\nuser = {uid}\ntime-max = \"30%\"\n"));
    let mut program = machine.program("mix --mem 32M --chunks 4 --reps 3 --rounds endless").start();
    machine.wait_for_grants(&program, 3); // the limit applies although no other program waits
    let status = machine.ctl(&["status"]);
    assert!(status.contains(" and its group have weight 100, time-max 30% by rule "), "{status}");
    // The program always requests the GPU, so it waits for the rest of the time.
    let before = lock_times(&machine, &program);
    machine.wait_for_grants(&program, before.2 as usize + 4);
    let after = lock_times(&machine, &program);
    let (had, waited) = (after.0 - before.0, after.1 - before.1);
    assert!(had < 0.45 * (had + waited), "{had} s of {} s, {before:?} to {after:?}", had + waited);
    rule(&machine, "");
    wait_for("it to have all of the time", || {
        let before = lock_times(&machine, &program);
        std::thread::sleep(Duration::from_millis(500));
        let after = lock_times(&machine, &program);
        (after.0 > before.0 && after.1 == before.1).then_some(())
    });
    program.kill();
}

#[test]
fn a_program_with_higher_priority_preempts_a_turn() {
    let name = format!("nvshare-test-{}-urgent.service", std::process::id());
    let Some(unit) = Unit::new(&name) else { return };
    let mut machine = Machine::new(Setup { time_quantum: HOUR, anti_thrash: "on", ..Setup::default() });
    write(&machine, &format!("[[rule]]\nunit = \"**/{name}\"\npriority = 10\n"));
    machine.start_scheduler();
    let mut usual = machine.program("mix --mem 32M --chunks 4 --reps 3 --rounds endless").start();
    machine.wait_for_grants(&usual, 1);
    machine.program_in(&unit.procs(), "mix --mem 32M --chunks 4 --reps 3 --rounds 5").start().finish();
    machine.wait_for_grants(&usual, 2);
    usual.kill();
    machine.wait_until_empty();
}

#[test]
fn used_time_counts_for_later_programs_of_the_group() {
    // SAFETY: `getuid` has no preconditions.
    let uid = unsafe { libc::getuid() };
    let machine = ruled(&format!("time-period = \"60s\"\n[[rule]]\nuser = {uid}\ntime-max = \"1%\"\n"));
    let work = "mix --mem 32M --chunks 4 --reps 3 --rounds endless";
    let waits = |program: &Program| {
        let status = machine.status();
        let client = status["clients"].as_array()?.iter().find(|client| client["pid"] == program.pid())?.clone();
        (client["gpus"][0]["state"] == "waiting").then(|| number(&client["gpus"][0]["grants"]))
    };
    let mut first = machine.program(work).start();
    wait_for("it to have had all that it may", || waits(&first).filter(|grants| *grants > 0));
    first.kill();
    machine.wait_until_empty();
    let mut second = machine.program(work).start();
    wait_for("the next one to wait", || waits(&second));
    machine.ctl(&["set-rule", "another", "user=4242", "weight=5"]);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(waits(&second), Some(0), "for what the first had, also where a rule is set that is not its");
    machine.ctl(&["set-rule", "more", &format!("user={uid}"), "time-max=100%"]);
    machine.wait_for_grants(&second, 1);
    second.kill();
}
