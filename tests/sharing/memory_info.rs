//! The memory sizes that a program sees. CUDA and NVML agree, and report no more than a rule or the
//! program's environment allows. Without such a limit, both report the same total as without nvshare.

use std::fs;

use test_support::machine::*;

/// The driver's own reserve, which NVML counts and CUDA doesn't.
const RESERVED: u64 = 6 * MIB;

fn setup() -> Setup {
    Setup { simulator: vec![("CUDA_SIM_RESERVED", "6M".into())], ..Setup::default() }
}

/// Writes the machine's rules to a drop-in.
fn write(machine: &Machine, rules: &str) {
    let directory = machine.path("nvshare.toml.d");
    fs::create_dir_all(&directory).expect("a directory for drop-ins");
    fs::write(directory.join("rules.toml"), rules).expect("a drop-in");
}

fn rule(machine: &Machine, rules: &str) {
    write(machine, rules);
    machine.ctl(&["reload"]);
}

/// A rule for all programs of this test's user.
fn mine(most: &str) -> String {
    // SAFETY: `getuid` has no preconditions.
    let uid = unsafe { libc::getuid() };
    format!("[[rule]]\nname = \"mine\"\nuser = {uid}\nmemory-max = \"{most}\"\n")
}

fn ruled(setup: Setup, rules: &str) -> Machine {
    let mut machine = Machine::new(setup);
    write(&machine, rules);
    machine.start_scheduler();
    machine
}

/// Returns one reading: the device's total, the total and free memory of `cuMemGetInfo`, and the
/// total and free memory of NVML.
#[track_caller]
fn told(report: &Report, reading: u32) -> [u64; 5] {
    ["device_total", "total", "free", "nvml_total", "nvml_free"].map(|name| report.number(&format!("{name}_{reading}")))
}

/// Returns one reading of a program without a context: the device's total, and NVML's total and
/// free memory.
#[track_caller]
fn foretold(report: &Report, reading: u32) -> [u64; 3] {
    ["device_total", "nvml_total", "nvml_free"].map(|name| report.number(&format!("{name}_{reading}")))
}

/// The program's context takes 4 MiB, which count towards the limit.
#[test]
fn cuda_and_nvml_report_the_same_limit_under_a_rule() {
    let machine = ruled(setup(), &mine("100M"));
    for lookup in ["link", "dlsym", "getproc"] {
        let report = machine.program("story --mem 32M").env("CUDA_LOOKUP", lookup).start().finish();
        assert_eq!(told(&report, 0), [100, 100, 64, 100, 64].map(|mib| mib * MIB), "{lookup}");
        assert_eq!(report.number("nvml_reserved_0"), RESERVED);
    }
    let report = machine.program("story --mem 96M").start().finish();
    assert_eq!((told(&report, 0)[4], report.number("nvml_reserved_0")), (0, RESERVED), "all of it is used");
}

#[test]
fn the_limit_is_reported_before_the_gpu_is_used() {
    let machine = ruled(setup(), &mine("100M"));
    let report = machine.program("story --context 0").start().finish();
    assert_eq!(foretold(&report, 0), [100 * MIB; 3]);
    // A percentage refers to all memory that NVML counts.
    rule(&machine, &mine("50%"));
    let before = foretold(&machine.program("story --context 0").start().finish(), 0);
    let after = told(&machine.program("story").start().finish(), 0);
    assert_eq!(before, [(256 * MIB + RESERVED) / 2; 3]);
    assert_eq!((after[0], after[1], after[3]), (before[0], before[0], before[0]));
    // The limit on host memory limits the reported total too.
    rule(&machine, &mine("100M").replace("memory-max", "swap-max"));
    assert_eq!(foretold(&machine.program("story --context 0").start().finish(), 0), [100 * MIB; 3]);
    assert_eq!(told(&machine.program("story").start().finish(), 0)[..2], [100 * MIB; 2]);
}

#[test]
fn cuda_and_nvml_agree_for_programs_of_a_group() {
    let machine = ruled(setup(), &mine("100M"));
    let holder = machine.program("stranger --mem 40M --seconds 600").start();
    holder.wait_to_say("holding");
    let report = machine.program("story --mem 16M").start().finish();
    let [device_total, total, free, nvml_total, nvml_free] = told(&report, 0);
    assert_eq!([device_total, total, nvml_total], [100 * MIB; 3]);
    assert_eq!(free, nvml_free);
    assert!(free <= 36 * MIB, "{free}: what the other has, and both contexts, are used");
}

#[test]
fn without_a_limit_sizes_are_reported_as_without_nvshare() {
    let machine = ruled(setup(), "");
    let truth = [256 * MIB, 256 * MIB + RESERVED];
    let totals = |report: &Report| {
        let [device_total, total, free, nvml_total, nvml_free] = told(report, 0);
        assert_eq!((device_total, free), (total, nvml_free));
        ([device_total, nvml_total], nvml_free)
    };
    let stranger = totals(&machine.program("story").without_nvshare().start().finish());
    assert_eq!(stranger, (truth, 252 * MIB));
    machine.wait_until_empty();
    assert_eq!(totals(&machine.program("story").start().finish()).0, truth);
    machine.wait_until_empty();
    let before = machine.program("story --context 0").start().finish();
    assert_eq!(foretold(&before, 0), [truth[0], truth[1], truth[0]]);
    // Neither memory taken by other programs nor a limit above the GPU's memory changes the totals.
    let holder = machine.program("stranger --mem 200M --seconds 600").start();
    holder.wait_to_say("holding");
    assert_eq!(totals(&machine.program("story").start().finish()).0, truth);
    rule(&machine, &mine("1G"));
    assert_eq!(totals(&machine.program("story").start().finish()).0, truth);
    // A program with the engine `none` has no limit.
    rule(&machine, &mine("100M"));
    let aside = machine.program("story").env("NVSHARE_ENGINE", "none").start().finish();
    assert_eq!(totals(&aside).0, truth);
}

/// NVML's own figure would be lower by the other program's memory, which leaves the GPU when needed.
#[test]
fn nvml_reports_cudas_free_memory_to_a_program_with_a_context() {
    let machine = ruled(setup(), "");
    let holder = machine.program("stranger --mem 100M --seconds 600").start();
    holder.wait_to_say("holding");
    let report = machine.program("story --mem 32M").start().finish();
    let [_, _, free, nvml_total, nvml_free] = told(&report, 0);
    assert_eq!((free, nvml_total), (nvml_free, 256 * MIB + RESERVED));
    assert!(free > 156 * MIB, "{free}");
    let monitor = machine.program("story --context 0").start().finish();
    assert!(foretold(&monitor, 0)[2] <= 156 * MIB, "a program without a context sees the GPU's own figure");
}

/// Some programs measure free memory twice when they start, and treat a rise as an error.
#[test]
fn free_memory_does_not_rise_when_another_program_ends() {
    let machine = ruled(setup(), "");
    let first = machine.program("stranger --mem 1M --seconds 600").start();
    first.wait_to_say("holding");
    let mut holder = machine.program("stranger --mem 64M --seconds 600").without_nvshare().start();
    holder.wait_to_say("holding");
    wait_for("its memory to be measured", || {
        (number(&machine.status()["gpus"][0]["capacity"]) < 192 * MIB).then_some(())
    });
    let mut user = machine.program("story --mem 16M --too-much 1G").start();
    user.wait_to_say("reading 0");
    let limit = || {
        let status = machine.status();
        let client = status["clients"].as_array()?.iter().find(|client| client["pid"] == user.pid())?.clone();
        client["gpus"][0]["limit"].as_u64()
    };
    let before = wait_for("its limit", limit);
    holder.kill();
    wait_for("a higher limit", || limit().filter(|now| *now >= before + 48 * MIB));
    let report = user.end();
    let [first, second, third] = [0, 1, 2].map(|reading| told(&report, reading));
    assert!(second[2] <= first[2], "the other program's memory is free, and not shown: {first:?} {second:?}");
    assert_eq!([second[2], third[2]], [second[4], third[4]], "NVML agrees");
    assert!(third[2] >= first[2] + 48 * MIB, "an allocation has failed: {first:?} {third:?}");
}

#[test]
fn nvml_reports_real_sizes_to_a_program_without_cuda() {
    let machine = ruled(setup(), &mine("100M"));
    let report = machine.program("story --init 0 --context 0").env("NVSHARE_MEMORY_MAX", "50M").start().finish();
    assert_eq!(report.number("nvml_total_0"), 256 * MIB + RESERVED);
    assert_eq!(report.number("nvml_free_0"), 256 * MIB);
}

#[test]
fn nvml_reports_real_sizes_of_an_invisible_gpu() {
    let mut setup = setup();
    setup.simulator.push(("CUDA_SIM_GPUS", "2".into()));
    let machine = ruled(setup, &mine("100M"));
    let of = |nvml: u32| {
        let program = machine.program(&format!("story --nvml {nvml}")).env("CUDA_VISIBLE_DEVICES", "1");
        let report = program.start().finish();
        (report.number("device_total_0"), report.number("nvml_total_0"))
    };
    assert_eq!(of(0), (100 * MIB, 256 * MIB + RESERVED));
    assert_eq!(of(1), (100 * MIB, 100 * MIB));
}

#[test]
fn a_changed_limit_is_reported_while_programs_run() {
    let machine = ruled(setup(), &mine("100M"));
    let mut user = machine.program("story --mem 32M --changes 3").start();
    let mut newcomer = machine.program("story --context 0 --changes 3").start();
    for (number, rules) in (0..).zip([mine("60M"), mine("120M"), String::new()]) {
        [&user, &newcomer].iter().for_each(|program| program.wait_to_say(&format!("reading {number}")));
        rule(&machine, &rules);
    }
    let (user, newcomer) = (user.finish(), newcomer.finish());
    for (number, mib) in (0..).zip([100, 60, 120]) {
        let [device_total, total, free, nvml_total, nvml_free] = told(&user, number);
        assert_eq!([device_total, total, nvml_total], [mib * MIB; 3], "reading {number}");
        assert_eq!((free, nvml_free), ((mib - 36) * MIB, free), "reading {number}");
        assert_eq!(foretold(&newcomer, number), [mib * MIB; 3], "reading {number}");
    }
    let all = 256 * MIB;
    assert_eq!([told(&user, 3)[0], told(&user, 3)[1], told(&user, 3)[3]], [all, all, all + RESERVED]);
    assert_eq!(foretold(&newcomer, 3)[..2], [all, all + RESERVED]);
}

#[test]
fn an_environment_limit_lowers_the_reported_sizes() {
    let mut machine = ruled(setup(), &mine("100M"));
    let ask = |machine: &Machine, words: &str, most: &str| {
        machine.program(words).env("NVSHARE_MEMORY_MAX", most).start().finish()
    };
    let told_of =
        |machine: &Machine, most: &str| told(&ask(machine, "story --mem 16M", most), 0).map(|bytes| bytes / MIB);
    // With a scheduler, the program's context counts towards the limit too.
    assert_eq!(told_of(&machine, "50M"), [50, 50, 30, 50, 30]);
    assert_eq!(foretold(&ask(&machine, "story --context 0", "25%"), 0), [64 * MIB; 3], "of what CUDA counts");
    for more in ["1G", "infinity", "nonsense", ""] {
        assert_eq!(told_of(&machine, more), [100, 100, 80, 100, 80], "{more:?}");
    }
    rule(&machine, "");
    assert_eq!(told_of(&machine, "50M"), [50, 50, 30, 50, 30]);
    machine.stop_scheduler();
    assert_eq!(told_of(&machine, "50M"), [50, 50, 34, 50, 34]);
}

#[test]
fn an_invalid_environment_limit_is_traced_once() {
    let machine = Machine::new(setup());
    let unread = |most: &str| {
        let mut program = machine.program("story --context 0").env("NVSHARE_MEMORY_MAX", most).start();
        program.finish();
        program.stderr().matches("ignoring NVSHARE_MEMORY_MAX").count()
    };
    assert_eq!(["1M", "lots"].map(unread), [1, 1]);
    assert_eq!(["", "8G", "25%"].map(unread), [0, 0, 0]);
    let mut quiet = machine.program("story --context 0").env("NVSHARE_MEMORY_MAX", "lots").quiet().start();
    quiet.finish();
    assert!(!quiet.stderr().contains("NVSHARE_MEMORY_MAX"), "{}", quiet.stderr());
}

#[test]
fn a_limit_persists_until_the_next_scheduler_changes_it() {
    let mut machine = ruled(setup(), &mine("100M"));
    let mut programs =
        ["--mem 32M", "--context 0"].map(|how| machine.program(&format!("story {how} --changes 2")).start());
    let wait = |programs: &[Program], number: u32| {
        programs.iter().for_each(|program| program.wait_to_say(&format!("reading {number}")));
    };
    wait(&programs, 0);
    machine.kill_scheduler();
    write(&machine, &mine("60M"));
    machine.start_scheduler();
    wait(&programs, 1);
    machine.kill_scheduler();
    write(&machine, "");
    machine.start_scheduler();
    for program in &mut programs {
        let report = program.finish();
        let totals = [0, 1, 2].map(|number| report.number(&format!("device_total_{number}")) / MIB);
        assert_eq!(totals, [100, 60, 256], "{}", program.name);
        assert_eq!(report.number("nvml_total_1"), 60 * MIB);
    }
}

/// A program that starts without a scheduler learns its limit when a scheduler starts.
#[test]
fn a_program_older_than_the_scheduler_learns_its_limit_later() {
    let mut machine = Machine::new(setup());
    write(&machine, &mine("100M"));
    let mut programs =
        ["--mem 32M", "--context 0"].map(|how| machine.program(&format!("story {how} --changes 1")).start());
    programs.iter().for_each(|program| program.wait_to_say("reading 0"));
    machine.start_scheduler();
    for program in &mut programs {
        let report = program.finish();
        assert_eq!([0, 1].map(|number| report.number(&format!("device_total_{number}")) / MIB), [256, 100]);
    }
}
