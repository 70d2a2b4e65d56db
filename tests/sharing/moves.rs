//! Programs that migrate between GPUs while they run, and GPUs that are drained.

use std::thread;
use std::time::Duration;

use cuda_sim_gpus::trouble;
use serde_json::Value;
use test_support::machine::*;

use crate::sleep::{client, ends, helpers, pause, resume, wait_until};

fn setup() -> Setup {
    Setup { simulator: vec![("CUDA_SIM_GPUS", "2".to_owned())], ..Setup::default() }
}

/// Returns the status of the GPU with this number.
#[track_caller]
fn gpu(machine: &Machine, number: usize) -> Value {
    let status = machine.status();
    let mut gpus = status["gpus"].as_array().expect("GPUs").iter();
    gpus.find(|gpu| gpu["index"] == number).cloned().expect("the GPU")
}

/// UUIDs of the GPUs, in the order of their numbers.
fn uuids(machine: &Machine) -> [String; 2] {
    [0, 1].map(|number| gpu(machine, number)["uuid"].as_str().expect("a UUID").to_owned())
}

/// A program of three threads that call the driver continuously, or with the given pauses.
fn naps<'a>(machine: &'a Machine, words: &str) -> Launch<'a> {
    machine.program(&format!("naps --seconds 600 {words}"))
}

fn started(machine: &Machine, launch: Launch<'_>) -> Program {
    let program = launch.start();
    machine.wait_for_grants(&program, 1);
    program
}

fn migrate(machine: &Machine, program: &Program, to: &str) {
    machine.ctl(&["migrate", &program.pid().to_string(), "--to", to]);
}

/// UUIDs of the GPUs that a program is on.
fn places(machine: &Machine, program: &Program) -> Vec<String> {
    let client = client(machine, program).expect("it runs");
    client["gpus"].as_array().expect("GPUs").iter().map(|at| at["uuid"].as_str().expect("a UUID").to_owned()).collect()
}

/// Asserts that scheduler and driver both show the program on this GPU, and that none of its memory
/// is left on the other GPU.
#[track_caller]
fn is_on(machine: &Machine, program: &Program, gpu: usize) {
    assert_eq!(places(machine, program), [uuids(machine)[gpu].clone()]);
    assert_eq!(machine.free_on(1 - gpu), machine.setup.memory, "nothing is left on the other");
    assert!(machine.free_on(gpu) < machine.setup.memory);
}

/// Asserts that the program still gets turns on the GPU.
#[track_caller]
fn goes_on(machine: &Machine, program: &Program) {
    let time = || client(machine, program).and_then(|client| client["gpus"][0]["lock-time"].as_f64());
    let before = time();
    wait_for("it to go on", || (time() > before).then_some(()));
}

/// Ends the program. Its results must be correct, and it must know which GPU it is on.
#[track_caller]
fn ends_on(machine: &Machine, program: Program, gpu: usize) -> Report {
    let known = uuids(machine)[gpu].clone();
    let report = ends(program);
    assert_eq!(report.0["uuids"], known);
    report
}

#[test]
fn a_running_program_moves_to_another_gpu_and_back() {
    let machine = Machine::with_scheduler(setup());
    let program = started(&machine, naps(&machine, "--mem 16M --pause-ms 1"));
    is_on(&machine, &program, 0);
    for to in [1, 0, 1, 0, 1] {
        migrate(&machine, &program, &to.to_string()); // by the GPU's number; other tests pass the UUID
        is_on(&machine, &program, to);
        goes_on(&machine, &program);
        assert_eq!(client(&machine, &program).expect("it runs")["moving"], "");
        thread::sleep(Duration::from_millis(100));
    }
    let said = machine.ctl_fails(&["migrate", &program.pid().to_string(), "--to", "1"]);
    assert!(said.contains("it is already on that GPU"), "{said}");
    ends_on(&machine, program, 1);
    machine.wait_until_empty();
}

/// On either GPU, the moved program and the GPU's other program together need more memory than the
/// GPU has.
#[test]
fn a_moved_program_takes_turns_with_programs_on_its_new_gpu() {
    let machine = Machine::with_scheduler(setup());
    let both = uuids(&machine);
    let program = started(&machine, naps(&machine, "--mem 100M --pause-ms 1"));
    let visible = |list| naps(&machine, "--mem 100M --pause-ms 1").env("CUDA_VISIBLE_DEVICES", list);
    let others = [started(&machine, visible("0")), started(&machine, visible("1"))];
    for to in [1, 0, 1, 0, 1] {
        // While the program that is there does not answer, as on a busy machine, its memory cannot make room.
        let order = ["migrate", &program.pid().to_string(), "--to", &both[to]];
        wait_for("room for the move", || machine.ctl_output(&order).status.success().then_some(()));
        assert_eq!(places(&machine, &program), both[to..=to]);
        goes_on(&machine, &program);
    }
    ends_on(&machine, program, 1);
    for (gpu, other) in others.into_iter().enumerate() {
        ends_on(&machine, other, gpu);
    }
    machine.wait_until_empty();
}

#[test]
fn two_programs_that_fill_one_gpu_can_use_one_gpu_each() {
    let machine = Machine::with_scheduler(setup());
    let [one, other] = [0, 1].map(|_| started(&machine, naps(&machine, "--mem 100M --pause-ms 5")));
    migrate(&machine, &other, "1");
    wait_for("all of its memory", || client(&machine, &other).filter(|client| client["gpus"][0]["swapped"] == 0));
    ends_on(&machine, one, 0);
    ends_on(&machine, other, 1);
    machine.wait_until_empty();
}

/// The program sees only GPU 1, but also moves to GPU 0.
#[test]
fn a_program_moves_to_a_gpu_that_it_does_not_see() {
    let machine = Machine::with_scheduler(setup());
    let both = uuids(&machine);
    let program = naps(&machine, "--mem 16M --pause-ms 1").env("CUDA_VISIBLE_DEVICES", "1");
    let program = started(&machine, program);
    for to in [0, 1, 0] {
        is_on(&machine, &program, 1 - to);
        migrate(&machine, &program, &both[to]);
        is_on(&machine, &program, to);
    }
    ends_on(&machine, program, 0);
}

/// The scheduler has placed the program on one GPU. After the move, NVML in the program counts the
/// program's new GPU too.
#[test]
fn nvml_shows_the_gpu_of_a_placed_program_after_a_move() {
    let machine = Machine::with_scheduler(Setup { placement: "spread", ..setup() });
    let both = uuids(&machine);
    let program = started(&machine, naps(&machine, "--mem 8M --pause-ms 5 --nvml 1"));
    let from = both.iter().position(|uuid| places(&machine, &program) == [uuid.clone()]).expect("one of both");
    migrate(&machine, &program, &both[1 - from]);
    let report = ends_on(&machine, program, 1 - from);
    assert_eq!(report.0["nvml_uuid"], both[1 - from]);
}

#[test]
fn a_sleeping_program_moves_and_wakes_on_the_new_gpu() {
    let machine = Machine::with_scheduler(setup());
    let both = uuids(&machine);
    let program = started(&machine, naps(&machine, "--mem 16M --pause-ms 5"));
    for to in [1, 0, 1] {
        pause(&machine, &program);
        wait_until(&machine, &program, "sleep", "sleeping");
        migrate(&machine, &program, &both[to]);
        thread::sleep(Duration::from_millis(100));
        let shown = client(&machine, &program).expect("it sleeps");
        assert_eq!((&shown["sleep"], &shown["paused"]), (&"sleeping".into(), &true.into()));
        assert_eq!(places(&machine, &program), both[to..=to]);
        assert_eq!([0, 1].map(|gpu| machine.free_on(gpu)), [machine.setup.memory; 2]);
        resume(&machine, &program);
        wait_until(&machine, &program, "sleep", "awake");
        is_on(&machine, &program, to);
    }
    ends_on(&machine, program, 1);
}

#[test]
fn a_program_that_cannot_move_stays_and_its_obstacle_is_shown() {
    let machine = Machine::with_scheduler(setup());
    let both = uuids(&machine);
    let refused = |program: &Program, to: &str, why: &str| {
        let said = machine.ctl_fails(&["migrate", &program.pid().to_string(), "--to", to]);
        assert!(said.contains(why), "{said}");
        wait_until(&machine, program, "sleep", "awake");
    };
    let program = started(&machine, naps(&machine, "--mem 8M --pause-ms 5"));
    refused(&program, &both[0], "it is already on that GPU");
    refused(&program, "GPU-of-nobody", "GPU-of-nobody");
    refused(&program, "7", "unknown GPU \"7\"");
    assert!(machine.ctl_fails(&["migrate", "1", "--to", &both[1]]).contains("process ID 1"));
    let two = started(&machine, naps(&machine, "--mem 8M --pause-ms 5 --gpus 0,1"));
    refused(&two, &both[1], "it uses several GPUs");
    let managed = machine.program("mix --mem 8M --chunks 2 --reps 2 --rounds endless --cpu-ms 5 --kind managed");
    let managed = started(&machine, managed);
    refused(&managed, &both[1], "it has managed memory");
    is_on_still(&machine, &program, &both[..1]);
    is_on_still(&machine, &two, &both);
    ends(program);
    ends(two);
    drop(managed);

    let rules = "[[rule]]\nallowed-gpus = [0]\n".to_owned();
    let machine = Machine::with_scheduler(Setup { rules, ..setup() });
    let program = started(&machine, naps(&machine, "--mem 8M --pause-ms 5"));
    let said = machine.ctl_fails(&["migrate", &program.pid().to_string(), "--to", "1"]);
    assert!(said.contains("does not allow that GPU"), "{said}");
    ends_on(&machine, program, 0);
}

#[track_caller]
fn is_on_still(machine: &Machine, program: &Program, gpus: &[String]) {
    let mut places = places(machine, program);
    places.sort();
    let mut gpus = gpus.to_vec();
    gpus.sort();
    assert_eq!(places, gpus);
}

/// After a migration, the program sees its former GPU as a second GPU.
#[test]
fn a_moved_program_may_use_its_former_gpu() {
    let machine = Machine::with_scheduler(setup());
    let both = uuids(&machine);
    let first = started(&machine, naps(&machine, "--mem 8M --pause-ms 5 --gpus 0 --later 1"));
    migrate(&machine, &first, &both[1]);
    is_on(&machine, &first, 1);
    first.signal(libc::SIGUSR2);
    wait_for("both GPUs", || (places(&machine, &first).len() == 2).then_some(()));
    assert_eq!(ends(first).0["uuids"], format!("{},{}", both[1], both[0]));
}

#[test]
fn a_gpu_can_be_drained_and_undrained() {
    let machine = Machine::with_scheduler(setup());
    let both = uuids(&machine);
    let programs = [0, 1, 2].map(|_| started(&machine, naps(&machine, "--mem 60M --pause-ms 2")));
    let said = machine.ctl(&["drain", "0"]);
    assert!(said.contains("No program is on the GPU") && !said.contains("sleep"), "{said}");
    programs.iter().for_each(|program| is_on(&machine, program, 1));
    assert_eq!((&gpu(&machine, 0)["drained"], &gpu(&machine, 1)["clients"]), (&true.into(), &3.into()));
    assert!(machine.ctl(&["status"]).contains("drained: programs are moved off this GPU"));
    // A new program waits for the GPU instead of getting an error.
    let mut newcomer = machine.program("mix --mem 4M --chunks 2 --reps 2 --rounds 3").start();
    wait_for("it to wait", || client(&machine, &newcomer).filter(|it| it["gpus"][0]["state"] == "attaching"));
    thread::sleep(Duration::from_millis(2500));
    assert_eq!(newcomer.poll(), None);
    machine.ctl(&["undrain", &both[0]]);
    newcomer.finish();
    migrate(&machine, &programs[0], &both[0]);
    for (program, gpu) in programs.into_iter().zip([0, 1, 1]) {
        ends_on(&machine, program, gpu);
    }
    machine.wait_until_empty();
}

#[test]
fn without_another_gpu_programs_sleep_until_the_undrain() {
    let machine = Machine::with_scheduler(Setup::default());
    let program = started(&machine, naps(&machine, "--mem 8M --pause-ms 5"));
    let mut managed =
        machine.program("mix --mem 8M --chunks 2 --reps 2 --rounds endless --cpu-ms 5 --kind managed").start();
    machine.wait_for_grants(&managed, 1);
    let said = machine.ctl_fails(&["drain", "0"]);
    assert!(
        said.contains("these programs can neither move nor sleep") && said.contains("it has managed memory"),
        "{said}"
    );
    assert!(said.contains("These programs sleep") && said.contains(&format!("process {}", program.pid())), "{said}");
    managed.end();
    machine.ctl(&["drain", "0"]);
    assert_eq!(machine.free(), machine.setup.memory);
    resume(&machine, &program);
    thread::sleep(Duration::from_millis(300));
    wait_until(&machine, &program, "sleep", "sleeping");
    machine.ctl(&["undrain", "0"]);
    wait_until(&machine, &program, "sleep", "awake");
    ends(program);
    machine.wait_until_empty();
}

/// A new scheduler also keeps the drained GPU empty until it is undrained, and moves away the
/// programs that are still on it.
fn a_drain_outlives(mut machine: Machine) {
    let state = machine.path("state");
    std::fs::create_dir(&state).expect("a directory");
    let again = |machine: &mut Machine| {
        machine.kill_scheduler();
        machine.start_scheduler_with(|command| {
            command.env("STATE_DIRECTORY", &state);
        });
    };
    again(&mut machine);
    let programs = [0, 1].map(|_| started(&machine, naps(&machine, "--mem 16M --pause-ms 5")));
    let drain = machine.order("drain 0").start();
    wait_for("it to be saved", || state.join("drained.toml").exists().then_some(()));
    drop(drain);
    again(&mut machine);
    programs
        .iter()
        .for_each(|program| wait_for("it to be moved", || (is_somewhere(&machine, program) == 1).then_some(())));
    assert_eq!(gpu(&machine, 0)["drained"], true);
    machine.ctl(&["undrain", "0"]);
    wait_for("it to be saved", || (!state.join("drained.toml").exists()).then_some(()));
    again(&mut machine);
    assert_eq!(gpu(&machine, 0)["drained"], false);
    programs.into_iter().for_each(|program| drop(ends_on(&machine, program, 1)));
    machine.wait_until_empty();
}

#[test]
fn a_drain_survives_a_scheduler_restart() {
    a_drain_outlives(Machine::with_scheduler(setup()));
}

#[test]
fn a_drain_survives_a_restart_that_keeps_connections() {
    a_drain_outlives(Machine::with_manager(setup()));
}

#[test]
fn no_program_is_placed_on_a_gpu_that_needs_a_reset() {
    let dir = |machine: &Machine| machine.path("gpu");
    is_avoided(
        |machine, gpu| trouble::advise(&dir(machine), gpu, Some(1)).expect("the advice"),
        "the driver reports that the GPU needs a reset",
    );
}

#[test]
fn no_program_is_placed_on_a_gpu_with_a_hardware_error() {
    let happens = |machine: &Machine, gpu, xid| {
        let event = trouble::Event { gpu, kind: trouble::XID, data: xid };
        trouble::happen(&machine.path("gpu"), event).expect("an event");
    };
    let fails = |machine: &Machine, gpu| {
        happens(machine, 1 - gpu, 31); // an illegal address
        happens(machine, gpu, 79);
    };
    is_avoided(fails, "the driver reported XID 79");
}

/// A program on the failing GPU stays there until it is migrated by hand.
#[track_caller]
fn is_avoided(fails: impl Fn(&Machine, usize), why: &str) {
    let machine = Machine::with_scheduler(Setup { placement: "spread", ..setup() });
    let both = uuids(&machine);
    let program = started(&machine, naps(&machine, "--mem 16M --pause-ms 5"));
    let from = both.iter().position(|uuid| places(&machine, &program) == [uuid.clone()]).expect("one of both");
    fails(&machine, from);
    machine.wait_for_log(&format!("reports errors: {why}"));
    let newcomers = [0, 1].map(|_| started(&machine, naps(&machine, "--mem 16M --pause-ms 5")));
    for newcomer in &newcomers {
        assert_eq!(places(&machine, newcomer), both[1 - from..=1 - from]);
    }
    assert_eq!(places(&machine, &program), both[from..=from], "it stays");
    migrate(&machine, &program, &both[1 - from]);
    ends_on(&machine, program, 1 - from);
    newcomers.into_iter().for_each(|newcomer| drop(ends_on(&machine, newcomer, 1 - from)));
    machine.wait_until_empty();
}

/// Waits until the program is awake on one of the two GPUs, with nothing left on the other. The
/// last order may have failed. Returns the GPU.
#[track_caller]
fn is_somewhere(machine: &Machine, program: &Program) -> usize {
    wait_for(&format!("`{}` to be awake on one GPU", program.name), || {
        let client = client(machine, program)?;
        let is_settled = client["sleep"] == "awake" && client["moving"] == "" && client["gpus"].as_array()?.len() == 1;
        let gpu = uuids(machine).iter().position(|uuid| client["gpus"][0]["uuid"] == **uuid)?;
        (is_settled && machine.free_on(1 - gpu) == machine.setup.memory).then_some(gpu)
    })
}

#[test]
fn killed_helpers_leave_programs_on_one_gpu() {
    let machine = Machine::with_scheduler(setup());
    let both = uuids(&machine);
    let program = started(&machine, naps(&machine, "--mem 8M --pause-ms 5"));
    let mut random = Dice::seeded();
    let mut killed = 0;
    for _ in 0..10 {
        let from = is_somewhere(&machine, &program);
        let mut order = machine.order(&format!("migrate {} --to {}", program.pid(), both[1 - from])).start();
        let end = std::time::Instant::now() + random.milliseconds(400);
        while std::time::Instant::now() < end {
            for helper in helpers(machine.scheduler_pid()) {
                thread::sleep(random.milliseconds(5));
                // SAFETY: `kill` takes no pointers.
                killed += u32::from(unsafe { libc::kill(helper, libc::SIGKILL) } == 0);
            }
        }
        order.wait(); // returns, whether the order succeeds or fails
    }
    let gpu = is_somewhere(&machine, &program);
    assert!(killed > 0, "none was there to be killed");
    ends_on(&machine, program, gpu);
    machine.wait_until_empty();
}

/// Ends the scheduler repeatedly, at random moments while a program is migrated.
fn schedulers_end(mut machine: Machine) {
    let both = uuids(&machine);
    let program = started(&machine, naps(&machine, "--mem 8M --pause-ms 5"));
    let mut random = Dice::seeded();
    for _ in 0..12 {
        let from = is_somewhere(&machine, &program);
        let order = machine.order(&format!("migrate {} --to {}", program.pid(), both[1 - from])).start();
        thread::sleep(random.milliseconds(250));
        machine.kill_scheduler();
        drop(order);
        thread::sleep(random.milliseconds(50));
        machine.start_scheduler();
    }
    let gpu = is_somewhere(&machine, &program);
    ends_on(&machine, program, gpu);
    machine.wait_until_empty();
    assert_eq!([0, 1].map(|gpu| machine.free_on(gpu)), [machine.setup.memory; 2]);
}

#[test]
fn killed_schedulers_leave_programs_on_one_gpu() {
    schedulers_end(Machine::with_scheduler(setup()));
}

#[test]
fn a_restarted_scheduler_learns_moved_programs_gpus() {
    schedulers_end(Machine::with_manager(setup()));
}

#[test]
fn a_program_killed_during_a_move_leaves_no_memory() {
    let machine = Machine::with_scheduler(setup());
    let both = uuids(&machine);
    let mut random = Dice::seeded();
    for _ in 0..10 {
        let mut program = started(&machine, naps(&machine, "--mem 8M --pause-ms 5"));
        let mut order = machine.order(&format!("migrate {} --to {}", program.pid(), both[1])).start();
        thread::sleep(random.milliseconds(250));
        program.kill();
        order.wait();
        machine.wait_until_empty();
    }
    wait_for("the memory", || ([0, 1].map(|gpu| machine.free_on(gpu)) == [machine.setup.memory; 2]).then_some(()));
}
