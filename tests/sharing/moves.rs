//! Programs that go from one GPU to another while they run, and GPUs that are drained.

use std::thread;
use std::time::Duration;

use serde_json::Value;
use test_support::machine::*;

fn two_gpus() -> Setup {
    Setup { simulator: vec![("CUDA_SIM_GPUS", "2".to_owned())], ..Setup::default() }
}

/// What is known of a program.
fn client(machine: &Machine, program: &Program) -> Option<Value> {
    let status = machine.status();
    let mut clients = status["clients"].as_array().expect("clients").iter();
    clients.find(|client| client["pid"] == program.pid()).cloned()
}

/// A GPU by its number.
#[track_caller]
fn gpu(machine: &Machine, number: usize) -> Value {
    let status = machine.status();
    let mut gpus = status["gpus"].as_array().expect("GPUs").iter();
    gpus.find(|gpu| gpu["index"] == number).cloned().expect("the GPU")
}

fn uuid(machine: &Machine, number: usize) -> Value {
    gpu(machine, number)["uuid"].clone()
}

#[track_caller]
fn wait_until(machine: &Machine, program: &Program, is_so: impl Fn(&Value) -> bool) -> Value {
    wait_for(&format!("`{}` to be so", program.name), || client(machine, program).filter(&is_so))
}

/// A program of three threads that calls the driver all the time, on the first GPU that it sees.
fn naps(machine: &Machine, memory: &str, more: &str) -> Program {
    let program = machine.program(&format!("naps --mem {memory} --seconds 600 --pause-ms 5 {more}")).start();
    machine.wait_for_grants(&program, 1);
    program
}

fn migrate(machine: &Machine, program: &Program, to: usize) {
    machine.ctl(&["migrate", &program.pid().to_string(), "--to", &to.to_string()]);
    let (here, uuid) = (client(machine, program).expect("it runs"), uuid(machine, to));
    assert_eq!((&here["gpus"][0]["uuid"], here["gpus"].as_array().map(Vec::len)), (&uuid, Some(1)));
}

/// It ends soon, with right results, and knows on which GPU it is.
fn ends(machine: &Machine, mut program: Program, on: usize) {
    program.signal(libc::SIGUSR1);
    let uuid = uuid(machine, on);
    let seen = program.finish().0["uuids"].clone();
    assert!(uuid.as_str().zip(seen.as_str()).is_some_and(|(uuid, seen)| uuid.ends_with(seen)), "{uuid}: {seen}");
}

#[test]
fn a_program_goes_to_another_gpu_and_back_while_it_runs() {
    let machine = Machine::with_scheduler(two_gpus());
    let program = naps(&machine, "8M", "");
    for round in 0..6 {
        let (from, to) = (round % 2, 1 - round % 2);
        migrate(&machine, &program, to);
        assert_eq!(machine.free_on(from), machine.setup.memory, "nothing is left there");
        assert!(machine.free_on(to) < machine.setup.memory);
        machine.wait_for_grants(&program, round + 2);
    }
    let said = machine.ctl_fails(&["migrate", &program.pid().to_string(), "--to", "0"]);
    assert!(said.contains("it is there already"), "{said}");
    ends(&machine, program, 0);
    machine.wait_until_empty();
}

#[test]
fn programs_that_fill_a_gpu_divide_two_between_them() {
    let machine = Machine::with_scheduler(two_gpus());
    let programs = [0, 1].map(|_| naps(&machine, "100M", ""));
    migrate(&machine, &programs[1], 1);
    let [one, other] = programs;
    wait_until(&machine, &other, |client| client["gpus"][0]["swapped"] == 0);
    ends(&machine, one, 0);
    ends(&machine, other, 1);
    machine.wait_until_empty();
}

#[test]
fn a_paused_program_is_moved_and_stays_paused() {
    let machine = Machine::with_scheduler(two_gpus());
    let program = naps(&machine, "8M", "");
    machine.ctl(&["pause", &program.pid().to_string()]);
    wait_until(&machine, &program, |client| client["sleep"] == "sleeping");
    migrate(&machine, &program, 1);
    thread::sleep(Duration::from_millis(300));
    wait_until(&machine, &program, |client| client["sleep"] == "sleeping" && client["paused"] == true);
    machine.ctl(&["resume", &program.pid().to_string()]);
    wait_until(&machine, &program, |client| client["sleep"] == "awake");
    assert_eq!(machine.free(), machine.setup.memory);
    ends(&machine, program, 1);
}

#[test]
fn who_cannot_be_moved_goes_on_and_it_is_said_why() {
    let rules = "[[rule]]\nallowed-gpus = [0]\n".to_owned();
    let machine = Machine::with_scheduler(two_gpus());
    let mut program =
        machine.program("mix --mem 8M --chunks 2 --reps 2 --rounds 400 --cpu-ms 5 --kind managed").start();
    machine.wait_for_grants(&program, 1);
    let pid = program.pid().to_string();
    let said = machine.ctl_fails(&["migrate", &pid, "--to", "1"]);
    assert!(said.contains("it has managed memory"), "{said}");
    let said = machine.ctl_fails(&["migrate", &pid, "--to", "7"]);
    assert!(said.contains("there is no GPU \"7\""), "{said}");
    let said = machine.ctl_fails(&["migrate", "1", "--to", "1"]);
    assert!(said.contains("no program under nvshare has the process id 1"), "{said}");
    program.finish();

    let machine = Machine::with_scheduler(Setup { rules, ..two_gpus() });
    let program = naps(&machine, "8M", "");
    let said = machine.ctl_fails(&["migrate", &program.pid().to_string(), "--to", "1"]);
    assert!(said.contains("does not allow that GPU"), "{said}");
    ends(&machine, program, 0);
}

#[test]
fn a_drained_gpu_is_left_for_another() {
    let machine = Machine::with_scheduler(two_gpus());
    let programs = [0, 1, 2].map(|_| naps(&machine, "60M", ""));
    let said = machine.ctl(&["drain", "0"]);
    assert!(said.contains("No program is on the GPU") && !said.contains("sleep"), "{said}");
    assert_eq!(machine.free(), machine.setup.memory);
    let (drained, other) = (gpu(&machine, 0), gpu(&machine, 1));
    assert_eq!((&drained["drained"], &other["clients"]), (&true.into(), &3.into()));
    assert!(machine.ctl(&["status"]).contains("drained: programs leave this GPU"));
    // One that comes waits, and gets no error.
    let mut newcomer = machine.program("mix --mem 4M --chunks 2 --reps 2 --rounds 3").start();
    wait_until(&machine, &newcomer, |client| client["gpus"][0]["state"] == "attaching");
    thread::sleep(Duration::from_millis(2500));
    assert_eq!(newcomer.poll(), None);
    machine.ctl(&["undrain", "0"]);
    newcomer.finish();
    for program in programs {
        ends(&machine, program, 1);
    }
    machine.wait_until_empty();
}

#[test]
fn where_there_is_no_other_gpu_programs_sleep_until_it_is_undrained() {
    let machine = Machine::with_scheduler(Setup::default());
    let program = naps(&machine, "8M", "");
    let mut managed =
        machine.program("mix --mem 8M --chunks 2 --reps 2 --rounds 600 --cpu-ms 5 --kind managed").start();
    machine.wait_for_grants(&managed, 1);
    let said = machine.ctl_fails(&["drain", "0"]);
    assert!(said.contains("programs stay on the GPU") && said.contains("it has managed memory"), "{said}");
    assert!(said.contains("These programs sleep") && said.contains(&format!("pid {}", program.pid())), "{said}");
    managed.finish();
    machine.ctl(&["drain", "0"]);
    assert_eq!(machine.free(), machine.setup.memory);
    machine.ctl(&["resume", &program.pid().to_string()]);
    thread::sleep(Duration::from_millis(300));
    wait_until(&machine, &program, |client| client["sleep"] == "sleeping");
    machine.ctl(&["undrain", "0"]);
    wait_until(&machine, &program, |client| client["sleep"] == "awake");
    ends(&machine, program, 0);
    machine.wait_until_empty();
}

/// Ends the scheduler at moments of all kinds, while a program is moved to and fro.
#[test]
fn schedulers_that_are_killed_leave_programs_on_one_gpu_or_the_other() {
    let mut machine = Machine::with_scheduler(two_gpus());
    let program = naps(&machine, "8M", "");
    let mut random = Dice::seeded();
    for round in 0..8 {
        let (pid, to) = (program.pid().to_string(), (1 - round % 2).to_string());
        thread::scope(|scope| {
            let machine = &machine;
            scope.spawn(move || drop(machine.ctl_output(&["migrate", &pid, "--to", &to])));
            thread::sleep(random.milliseconds(200));
            // SAFETY: a plain call.
            unsafe { libc::kill(machine.scheduler_pid() as i32, libc::SIGKILL) };
        });
        machine.kill_scheduler();
        machine.start_scheduler();
        wait_until(&machine, &program, |client| client["sleep"] == "awake" && client["gpus"][0]["uuid"].is_string());
    }
    let here = client(&machine, &program).expect("it runs")["gpus"][0]["uuid"].clone();
    let on = usize::from(here != uuid(&machine, 0));
    assert_eq!(machine.free_on(1 - on), machine.setup.memory);
    assert!(machine.free_on(on) < machine.setup.memory);
    ends(&machine, program, on);
    machine.wait_until_empty();
}
