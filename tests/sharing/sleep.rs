//! Programs that leave the GPU completely and are restored later. A program leaves when the
//! administrator pauses it, or when it is idle and other programs lack room.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::Value;
use test_support::artifact;
use test_support::machine::*;

/// The client's entry in the status.
pub fn client(machine: &Machine, program: &Program) -> Option<Value> {
    let status = machine.status();
    let mut clients = status["clients"].as_array().expect("clients").iter();
    clients.find(|client| client["pid"] == program.pid()).cloned()
}

#[track_caller]
pub fn wait_until(machine: &Machine, program: &Program, key: &str, value: impl Into<Value>) -> Value {
    let value = value.into();
    wait_for(&format!("{key} of `{}` to be {value}", program.name), || {
        client(machine, program).filter(|client| client[key] == value)
    })
}

pub fn pause(machine: &Machine, program: &Program) {
    machine.ctl(&["pause", &program.pid().to_string()]);
}

pub fn resume(machine: &Machine, program: &Program) {
    machine.ctl(&["resume", &program.pid().to_string()]);
}

/// A program of three threads that call the driver continuously, or with the given pauses.
fn naps(machine: &Machine, memory: &str, pause: u32) -> Program {
    let program = machine.program(&format!("naps --mem {memory} --seconds 600 --pause-ms {pause}")).start();
    machine.wait_for_grants(&program, 1);
    program
}

/// Ends the program and checks its results.
pub fn ends(mut program: Program) -> Report {
    program.end()
}

#[test]
fn a_paused_program_leaves_no_memory_on_the_gpu() {
    let machine = Machine::with_scheduler(Setup::default());
    let mut program = naps(&machine, "8M", 5);
    for _ in 0..3 {
        pause(&machine, &program);
        let shown = wait_until(&machine, &program, "sleep", "sleeping");
        assert_eq!(shown["paused"], true);
        assert_eq!(machine.free(), machine.setup.memory);
        assert!(machine.ctl(&["status"]).contains("paused"));
        thread::sleep(Duration::from_millis(200));
        assert_eq!(program.poll(), None);
        wait_until(&machine, &program, "sleep", "sleeping");
        resume(&machine, &program);
        let shown = wait_until(&machine, &program, "sleep", "awake");
        assert_eq!((&shown["woken-by"], &shown["paused"]), (&"resume".into(), &false.into()));
        assert!(shown["wake-time"].as_f64().is_some_and(|seconds| seconds > 0.0), "{shown}");
    }
    ends(program);
    machine.wait_until_empty();
}

/// A restore that fails for lack of room is never repeated. In this test a process other than
/// nvshare's helper restores the program.
#[test]
fn a_program_whose_restore_fails_gets_the_drivers_error() {
    let machine = Machine::with_scheduler(Setup { context: 32 * MIB, ..Setup::default() });
    let mut program = naps(&machine, "8M", 5);
    pause(&machine, &program);
    wait_until(&machine, &program, "sleep", "sleeping");
    let mut stranger = machine.program("stranger --mem 216M --seconds 600").without_nvshare().start();
    stranger.wait_to_say("holding");
    let restores = format!("checkpoints --pid {} --to awake", program.pid());
    assert!(!machine.program(&restores).without_nvshare().start().wait().success(), "there is no room");
    stranger.kill();
    resume(&machine, &program);
    assert!(!program.wait().success(), "the driver has lost it: {}", program.stdout());
    assert!(program.stdout().contains("304") || program.stdout().contains("OPERATING_SYSTEM"), "{}", program.stdout());
    machine.wait_until_empty();
}

/// The driver refuses all further copies in the program's context, as after an illegal address.
#[test]
fn a_program_with_a_broken_context_refuses_to_sleep_immediately() {
    let machine = Machine::with_scheduler(Setup::default());
    let fails = machine.program("mix --mem 64M --chunks 4 --reps 3 --rounds 2 --cpu-ms 600000");
    let fails = fails.env("CUDA_SIM_FAIL", "cuMemcpyDtoHAsync_v2:1").env("CUDA_SIM_FAIL_AS", "700");
    let mut program = fails.start();
    machine.wait_for_grants(&program, 1);
    // before round 0, the output is one repeated value, which is evicted without a copy
    program.wait_to_say("round 0 is over");
    pause(&machine, &program);
    wait_until(&machine, &program, "sleep-obstacle", "it has memory that cannot leave the GPU");
    let attempts = program.stderr().matches("eviction stopped").count();
    assert!((1..=2).contains(&attempts), "{attempts} attempts");
    program.kill();
    machine.wait_until_empty();
}

#[test]
fn other_programs_get_the_whole_gpu_while_a_program_is_paused() {
    let machine = Machine::with_scheduler(Setup { context: 32 * MIB, ..Setup::default() });
    let program = naps(&machine, "120M", 5);
    pause(&machine, &program);
    wait_until(&machine, &program, "sleep", "sleeping");
    machine.program("mix --mem 128M --chunks 4 --reps 2 --rounds 4").start().finish();
    // The program is restored beside another program that has memory on the GPU.
    let other = naps(&machine, "120M", 5);
    resume(&machine, &program);
    wait_until(&machine, &program, "sleep", "awake");
    ends(program);
    ends(other);
}

#[test]
fn only_processes_of_clients_can_be_paused() {
    let machine = Machine::with_scheduler(Setup::default());
    let said = machine.ctl_fails(&["pause", "1"]);
    assert!(said.contains("no program under nvshare has process ID 1"), "{said}");
    assert!(machine.ctl_fails(&["resume", "nothing.service"]).contains("nothing.service"));
}

#[test]
fn a_paused_program_that_cannot_sleep_gets_no_turn_and_has_a_reason() {
    let machine = Machine::with_scheduler(Setup::default());
    let mut program =
        machine.program("mix --mem 8M --chunks 2 --reps 2 --rounds endless --cpu-ms 5 --kind managed").start();
    machine.wait_for_grants(&program, 1);
    pause(&machine, &program);
    let shown = wait_until(&machine, &program, "sleep-obstacle", "it has managed memory");
    assert_eq!((&shown["sleep"], &shown["paused"]), (&"awake".into(), &true.into()));
    assert!(machine.ctl(&["status"]).contains("it has managed memory"));
    resume(&machine, &program);
    program.end();
}

/// Asserts that a paused program does not sleep, and that `status` shows the reason. Until the
/// program is resumed, other programs use the room of its evicted memory.
#[track_caller]
fn cannot_sleep(machine: &Machine, program: &Program, why: &str) {
    pause(machine, program);
    let shown = wait_until(machine, program, "sleep-obstacle", why);
    assert_eq!((&shown["sleep"], &shown["paused"]), (&"awake".into(), &true.into()));
    let status = machine.ctl(&["status"]);
    assert!(status.contains(&format!("is paused, but cannot sleep: {why}.")), "{status}");
    machine.program("mix --mem 64M --chunks 4 --reps 2 --rounds 3").start().finish();
    resume(machine, program);
    wait_until(machine, program, "paused", false);
}

#[test]
fn a_program_that_shares_memory_cannot_sleep() {
    let machine = Machine::with_scheduler(Setup { memory: 128 * MIB, ..Setup::default() });
    let words = format!("--file {} --private 32M --rounds 100000", machine.path("meeting").display());
    let mut exporter = machine.program(&format!("share --role export {words}")).start();
    let mut importer = machine.program(&format!("share --role import {words}")).start();
    for program in [&exporter, &importer] {
        machine.wait_for_grants(program, 2);
        cannot_sleep(&machine, program, "it shares memory with other processes");
    }
    exporter.end();
    importer.finish();
    machine.wait_until_empty();
}

#[test]
fn a_program_with_peer_access_cannot_sleep() {
    let simulator = vec![("CUDA_SIM_GPUS", "2".to_owned())];
    let machine = Machine::with_scheduler(Setup { simulator, ..Setup::default() });
    let mut program = machine.program("across --mem 16M --how kernel --rounds 100000").start();
    machine.wait_for_grants(&program, 1);
    cannot_sleep(&machine, &program, "its GPUs can access each other's memory");
    program.end();
}

#[test]
fn a_program_that_captures_a_stream_cannot_sleep() {
    let machine = Machine::with_scheduler(Setup::default());
    let mut program = machine.program("captures --mem 16M --rounds 1000 --capture-ms 4000 --mode relaxed").start();
    machine.wait_for_grants(&program, 1);
    // The program can sleep before its first capture.
    let captures = || {
        pause(&machine, &program);
        let shown = wait_for("it to sleep, or not to", || {
            let answered = |client: &Value| client["sleep"] == "sleeping" || client["sleep-obstacle"] != "";
            client(&machine, &program).filter(answered)
        });
        resume(&machine, &program);
        wait_until(&machine, &program, "paused", false);
        shown["sleep"] != "sleeping"
    };
    wait_for("a capture", || captures().then_some(()));
    cannot_sleep(&machine, &program, "it is capturing a stream");
    program.end();
}

/// Work that the library's hooks did not see is drained before the program's memory is evicted.
#[test]
fn a_program_with_untracked_work_sleeps_once_the_work_ends() {
    let machine = Machine::with_scheduler(Setup::default());
    let mut program = machine.program("unseen --mem 16M --rounds 2 --ms 1500 --pause-ms 100").start();
    machine.wait_for_grants(&program, 1);
    thread::sleep(Duration::from_millis(100));
    pause(&machine, &program);
    wait_until(&machine, &program, "sleep", "sleeping");
    resume(&machine, &program);
    program.finish();
}

/// The program has opened a device file through which a network card can reach GPU memory.
#[test]
fn a_program_with_memory_accessible_to_devices_cannot_sleep() {
    // SAFETY: `geteuid` has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return test_support::skip("root, to mount device files");
    }
    const DEVICES: &str = "mkdir \"$1\" && mount --rbind /dev \"$1\" && mount -t tmpfs none /dev && mkdir /dev/infiniband /dev/shm && \
                           : > /dev/infiniband/uverbs0 && ln -s \"$1/null\" /dev/null && shift && exec \"$@\" 9< /dev/infiniband/uverbs0";
    let machine = Machine::with_scheduler(Setup::default());
    let (devices, program) = (machine.path("dev"), test_support::artifact("cuda-program"));
    let (devices, program) = (devices.display().to_string(), program.display().to_string());
    let script = ["--mount", "--propagation", "private", "sh", "-ec", DEVICES, "sh", &devices, &program];
    let words = ["naps", "--mem", "8M", "--seconds", "600", "--pause-ms", "5"];
    let program = machine.command("unshare".as_ref(), &[&script[..], &words[..]].concat()).start();
    machine.wait_for_grants(&program, 1);
    cannot_sleep(&machine, &program, "other devices may access its memory");
    ends(program);
}

#[test]
fn a_paused_program_gets_no_turn_if_the_driver_lacks_checkpoints() {
    let without = "cuCheckpointProcessLock cuCheckpointProcessCheckpoint cuCheckpointProcessRestore \
                   cuCheckpointProcessUnlock cuCheckpointProcessGetState";
    let machine = Machine::with_scheduler(Setup { without, ..Setup::default() });
    let program = naps(&machine, "8M", 5);
    pause(&machine, &program);
    wait_for("a reason", || {
        client(&machine, &program).filter(|client| client["sleep-obstacle"] != "" && client["sleep"] == "awake")
    });
    resume(&machine, &program);
    ends(program);
}

/// The programs are idle in turn, and their memory doesn't fit together.
#[test]
fn idle_programs_sleep_until_they_call_the_driver() {
    let setup = Setup { sleep_after: "1s", ..Setup::default() };
    let machine = Machine::with_scheduler(setup);
    let programs = [0, 1, 2].map(|_| naps(&machine, "100M", 2500));
    wait_for("one to have slept and woken", || {
        programs.iter().any(|program| client(&machine, program).is_some_and(|c| c["woken-by"] == "call")).then_some(())
    });
    programs.into_iter().for_each(|program| drop(ends(program)));
    machine.wait_until_empty();
}

#[test]
fn no_program_sleeps_if_all_fit() {
    let machine = Machine::with_scheduler(Setup { sleep_after: "1s", ..Setup::default() });
    let programs = [0, 1].map(|_| naps(&machine, "16M", 2500));
    thread::sleep(Duration::from_secs(4));
    assert!(!machine.moves().iter().any(|m| m.what == "prepare-sleep"));
    programs.into_iter().for_each(|program| drop(ends(program)));
}

/// Two contexts fit beside the memory of a working program. A third context takes the room of an
/// idle program.
#[test]
fn an_idle_program_sleeps_to_make_room_for_a_new_program() {
    let setup = Setup { sleep_after: "1s", context: 40 * MIB, ..Setup::default() };
    let machine = Machine::with_scheduler(setup);
    let idle = naps(&machine, "8M", 6000);
    let mut busy = machine.program("mix --mem 160M --chunks 4 --reps 1 --rounds endless --cpu-ms 100").start();
    machine.wait_for_grants(&busy, 1);
    thread::sleep(Duration::from_millis(1500));
    let mut newcomer = machine.program("mix --mem 4M --chunks 2 --reps 2 --rounds 3").start();
    newcomer.finish();
    let slept = |m: &Move| m.what == "prepare-sleep" && m.pid == idle.pid();
    assert!(machine.moves().iter().any(slept), "the newcomer had no room");
    ends(idle);
    busy.end();
}

/// Process IDs of the scheduler's children.
pub fn helpers(scheduler: u32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{scheduler}/task")).into_iter().flatten().flatten();
    let children = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    children.flat_map(|text| text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect()
}

#[test]
fn killed_helpers_leave_programs_running_or_asleep() {
    let machine = Machine::with_scheduler(Setup::default());
    let program = naps(&machine, "8M", 5);
    let mut random = Dice::seeded();
    let mut killed = 0;
    for round in 0..40 {
        match round % 2 {
            0 => pause(&machine, &program),
            _ => resume(&machine, &program),
        }
        let end = std::time::Instant::now() + random.milliseconds(250);
        while std::time::Instant::now() < end {
            for helper in helpers(machine.scheduler_pid()) {
                thread::sleep(random.milliseconds(5));
                // SAFETY: `kill` takes no pointers.
                killed += u32::from(unsafe { libc::kill(helper, libc::SIGKILL) } == 0);
            }
        }
    }
    resume(&machine, &program);
    wait_until(&machine, &program, "sleep", "awake");
    assert!(killed > 0, "none was there to be killed");
    ends(program);
    machine.wait_until_empty();
    assert_eq!(machine.free(), machine.setup.memory);
}

/// Ends the scheduler repeatedly, at random moments while a program is paused and resumed.
fn schedulers_end(mut machine: Machine) {
    let program = naps(&machine, "8M", 5);
    let mut random = Dice::seeded();
    for _ in 0..8 {
        pause(&machine, &program);
        thread::sleep(random.milliseconds(150));
        if random.below(2) == 0 {
            resume(&machine, &program);
            thread::sleep(random.milliseconds(50));
        }
        machine.kill_scheduler();
        thread::sleep(random.milliseconds(50));
        machine.start_scheduler();
        // The new scheduler has no order to hold the program off the GPU, so the program's next
        // driver call wakes the program.
        wait_until(&machine, &program, "sleep", "awake");
    }
    ends(program);
    machine.wait_until_empty();
    assert_eq!(machine.free(), machine.setup.memory);
}

#[test]
fn killed_schedulers_leave_programs_running_or_asleep() {
    schedulers_end(Machine::with_scheduler(Setup::default()));
}

#[test]
fn a_restarted_scheduler_takes_over_sleeping_programs() {
    schedulers_end(Machine::with_manager(Setup::default()));
}

/// The program stays asleep until it is resumed, whatever happens to the scheduler. If the program
/// cannot sleep, it is kept off the GPU instead.
fn pauses_survive_a_scheduler_restart(mut machine: Machine, words: &str, phase: &str) {
    let state = machine.path("state");
    fs::create_dir(&state).expect("a directory");
    let again = |machine: &mut Machine| {
        machine.kill_scheduler();
        machine.start_scheduler_with(|command| {
            command.env("STATE_DIRECTORY", &state);
        });
    };
    again(&mut machine);
    let program = machine.program(words).start();
    machine.wait_for_grants(&program, 1);
    pause(&machine, &program);
    wait_until(&machine, &program, "sleep", phase);
    for _ in 0..2 {
        wait_for("it to be saved", || state.join("paused.toml").exists().then_some(()));
        again(&mut machine);
        wait_until(&machine, &program, "paused", true);
        wait_until(&machine, &program, "sleep", phase);
        let before = grants(&machine.moves(), program.pid());
        thread::sleep(Duration::from_millis(300));
        assert_eq!(grants(&machine.moves(), program.pid()), before, "it is held off");
    }
    resume(&machine, &program);
    wait_until(&machine, &program, "sleep", "awake");
    wait_for("it to be saved", || (!state.join("paused.toml").exists()).then_some(()));
    again(&mut machine);
    assert_eq!(wait_until(&machine, &program, "sleep", "awake")["paused"], false);
    drop(program);
    machine.wait_until_empty();
}

#[test]
fn a_pause_survives_a_scheduler_restart() {
    pauses_survive_a_scheduler_restart(
        Machine::with_scheduler(Setup::default()),
        "naps --mem 8M --seconds 600 --pause-ms 5",
        "sleeping",
    );
}

#[test]
fn a_pause_survives_a_restart_that_keeps_connections() {
    pauses_survive_a_scheduler_restart(
        Machine::with_manager(Setup::default()),
        "naps --mem 8M --seconds 600 --pause-ms 5",
        "sleeping",
    );
}

#[test]
fn a_pause_of_a_program_that_cannot_sleep_survives_a_restart() {
    let words = "mix --mem 8M --chunks 2 --reps 2 --rounds endless --cpu-ms 5 --kind managed";
    pauses_survive_a_scheduler_restart(Machine::with_scheduler(Setup::default()), words, "awake");
}

#[test]
fn a_program_killed_during_a_checkpoint_leaves_no_memory() {
    let machine = Machine::with_scheduler(Setup::default());
    let mut random = Dice::seeded();
    for round in 0..12 {
        let mut program = naps(&machine, "8M", 5);
        pause(&machine, &program);
        thread::sleep(random.milliseconds(150));
        if round % 2 == 0 {
            resume(&machine, &program);
            thread::sleep(random.milliseconds(30));
        }
        program.kill();
        machine.wait_until_empty();
    }
    wait_for("the memory", || (machine.free() == machine.setup.memory).then_some(()));
}

/// On Kubernetes, no helper is available either if the component `sleep/` has been removed.
#[test]
fn a_sleeping_program_gets_no_turn_while_no_helper_is_available() {
    let mut machine = Machine::with_scheduler(Setup::default());
    let sleeper = naps(&machine, "8M", 5);
    pause(&machine, &sleeper);
    wait_until(&machine, &sleeper, "sleep", "sleeping");
    machine.kill_scheduler();
    // A scheduler looks for nvshare-checkpoint in its own directory.
    let alone = machine.path("nvshare-scheduler");
    fs::copy(artifact("nvshare-scheduler"), &alone).expect("a copy of the scheduler");
    machine.start_scheduler_with(|command| {
        let mut copy = Command::new(&alone);
        copy.args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => copy.env(name, value),
                None => copy.env_remove(name),
            };
        }
        *command = copy;
    });
    wait_until(&machine, &sleeper, "sleep", "settling");
    let before = grants(&machine.moves(), sleeper.pid());
    ends(naps(&machine, "100M", 5));
    let status = machine.ctl(&["status"]);
    let pid = sleeper.pid();
    let part = format!("Process {pid} may be asleep, and gets no turn until its state is known");
    assert!(status.contains(&part), "{part}: {status}");
    assert!(
        machine.status()["problems"].as_array().is_some_and(Vec::is_empty),
        "a program is no problem of the scheduler"
    );
    let refused = machine.ctl_output(&["resume", &pid.to_string()]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("it may be asleep, and nvshare-checkpoint"), "{said}");
    assert_eq!(grants(&machine.moves(), pid), before, "it is held off");

    machine.kill_scheduler();
    machine.start_scheduler();
    wait_until(&machine, &sleeper, "sleep", "awake");
    assert!(!machine.ctl(&["status"]).contains("may be asleep"));
    ends(sleeper);
}
