//! The scheduler is restarted, upgraded or killed while programs run. The programs keep their
//! connections, and continue.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use test_support::daemon::is_root;
use test_support::machine::*;
use test_support::skip;

/// A GPU with room for only one of the two programs.
fn pressed() -> Setup {
    Setup { memory: 64 * MIB, anti_thrash: "on", ..Setup::default() }
}

/// Works until it is told to end.
const WORK: &str = "mix --mem 44M --chunks 4 --reps 3 --rounds endless";
const BLOWS: u32 = 6;

/// Asserts that clients report a lock to a new scheduler only if an earlier scheduler granted it.
/// That need not be the previous scheduler, which may have ended before a client had reported its
/// lock.
fn assert_locks_stay(moves: &[Move], runs: u32) {
    let mut had = BTreeSet::new();
    for run in 1..=runs {
        let moves: Vec<Move> = moves.iter().filter(|m| m.run == run).cloned().collect();
        for Move { client, .. } in moves.iter().filter(|m| m.what == "held") {
            assert!(had.contains(client), "client {client} did not have the lock before scheduler {run}: {had:?}");
        }
        had.retain(|client| !moves.iter().any(|m| m.what == "release" && m.client == *client));
        had.extend(holders(&moves).last().into_iter().flat_map(|(_, now)| now.iter().copied()));
    }
}

/// Ends the scheduler repeatedly, at random moments.
fn restart_beneath_two_programs(end: impl Fn(&mut Machine)) {
    let mut machine = Machine::with_manager(pressed());
    let mut random = Dice::seeded();
    let mut programs = [0, 1].map(|_| machine.program(WORK).start());
    for program in &programs {
        machine.wait_for_grants(program, 1);
    }
    for _ in 0..BLOWS {
        std::thread::sleep(random.milliseconds(150));
        end(&mut machine);
        std::thread::sleep(random.milliseconds(50));
        machine.start_scheduler();
    }
    programs.iter_mut().for_each(|program| drop(program.end()));
    machine.wait_until_empty();

    let moves = machine.moves();
    assert_one_holder(&moves);
    assert_locks_stay(&moves, BLOWS + 1);
    assert_eq!(moves.iter().filter(|m| m.what == "connect").count(), 2, "nobody connects anew");
    assert!(moves.iter().any(|m| m.what == "resume"));
    wait_for("nothing to be kept", || machine.manager.as_ref()?.kept().is_empty().then_some(()));
}

#[test]
fn two_programs_continue_while_the_scheduler_is_repeatedly_killed() {
    restart_beneath_two_programs(Machine::kill_scheduler);
}

#[test]
fn two_programs_continue_while_the_scheduler_is_repeatedly_restarted() {
    restart_beneath_two_programs(Machine::stop_scheduler);
}

#[test]
fn an_uncontended_holder_keeps_lock_and_memory_across_a_restart() {
    let mut machine = Machine::with_manager(pressed());
    let mut program = machine.program(WORK).start();
    program.wait_to_say("← Grant");
    machine.wait_for_move(0, "its memory to be there", |m| m.what == "mapped");
    machine.kill_scheduler();
    machine.start_scheduler();
    let resumed = |m: &Move| m.run == 2 && m.what == "resume";
    machine.wait_for_move(0, "it to go on", resumed);
    program.end();
    let moves = machine.moves();
    let moves = |what: &str| moves.iter().filter(|m| m.run == 2 && m.what == what).count();
    assert_eq!((moves("held"), moves("connect"), moves("evict"), moves("revoke")), (1, 0, 0, 0));
}

/// The scheduler expects the GPUs' device files elsewhere, so no program can prove that it may use one.
#[test]
fn programs_that_cannot_prove_their_gpu_run_as_without_nvshare() {
    let simulator = vec![("NVSHARE_DEVICES", "/nonexistent".to_owned())];
    let machine = Machine::with_scheduler(Setup { simulator, ..Setup::default() });
    let mut programs = [0, 1].map(|_| machine.program("mix --mem 40M --chunks 4 --reps 3 --rounds endless").start());
    machine.wait_for_log("is refused: it has not shown that it can open the device file of GPU-");
    for program in &programs {
        wait_for("`status` to name it", || {
            let named =
                machine.status()["gpus"][0]["unproven"].as_array()?.iter().any(|one| one["pid"] == program.pid());
            named.then_some(())
        });
    }
    let text = machine.ctl(&["status"]);
    for program in &programs {
        let sentence = format!("cuda-program (process {}) of root runs as without nvshare", program.pid());
        assert!(!is_root() || text.contains(&sentence), "{sentence:?} is missing: {text}");
    }
    for program in &mut programs {
        program.end();
        assert!(program.stderr().contains("the scheduler refuses this program: it has not shown"));
    }
    assert!(!machine.moves().iter().any(|m| m.what == "grant"), "a program without proof held the lock");
    wait_for("`status` to forget them", || {
        machine.status()["gpus"][0]["unproven"].as_array()?.is_empty().then_some(())
    });
}

/// The program can no longer open the device file, so it shows the driver's descriptor to the next
/// scheduler.
#[test]
fn a_program_that_dropped_its_privileges_keeps_its_gpu_across_a_restart() {
    if !is_root() {
        return skip("root, to drop privileges");
    }
    let mut machine = Machine::with_manager(Setup::default());
    let mut program = machine.program("mix --mem 20M --reps 3 --rounds endless --setuid 65534").start();
    program.wait_to_say("runs as user 65534");
    let file = machine.path("gpu").join("nvidia0");
    fs::set_permissions(file, Permissions::from_mode(0o600)).expect("the device file");
    machine.kill_scheduler();
    machine.start_scheduler();
    machine.wait_for_move(0, "it to continue", |m| m.run == 2 && m.what == "resume");
    program.end();
    machine.wait_until_empty();
    assert_eq!(machine.moves().iter().filter(|m| m.what == "connect").count(), 1, "it did not connect again");
}

#[test]
fn a_program_stopped_during_a_restart_delays_no_other_program() {
    let mut machine = Machine::with_manager(Setup::default());
    let mut programs = [0, 1].map(|_| machine.program("mix --mem 40M --chunks 4 --reps 6 --rounds endless").start());
    for program in &programs {
        machine.wait_for_grants(program, 1);
    }
    machine.stop_beside_work(&programs[0]);
    machine.kill_scheduler();
    machine.start_scheduler();
    let other = programs[1].pid();
    machine.wait_for_move(0, "the other to go on", |m| m.run == 2 && m.what == "resume" && m.pid == other);
    programs[1].end();
    programs[0].signal(libc::SIGCONT);
    programs[0].end();
    machine.wait_until_empty();
    let moves = machine.moves();
    assert_eq!(moves.iter().filter(|m| m.what == "connect").count(), 2, "nobody connects anew");
}

#[test]
fn programs_reconnect_if_no_service_manager_keeps_connections() {
    let mut machine = Machine::with_scheduler(pressed());
    let mut program = machine.program(WORK).start();
    machine.wait_for_grants(&program, 1);
    machine.kill_scheduler();
    machine.start_scheduler();
    machine.wait_for_move(0, "it to connect", |m| m.run == 2 && m.what == "connect");
    program.end();
    assert!(!machine.moves().iter().any(|m| m.what == "resume"));
}

#[test]
fn programs_run_alone_after_the_scheduler_stops_permanently() {
    let mut machine = Machine::with_manager(pressed());
    let mut programs = [0, 1].map(|_| machine.program("mix --mem 44M --chunks 4 --reps 3 --rounds 10").start());
    for program in &programs {
        machine.wait_for_grants(program, 1);
    }
    machine.stop_scheduler();
    machine.manager.as_ref().expect("a manager").close_all();
    programs.iter_mut().for_each(|program| drop(program.finish()));
}

#[test]
fn an_allocation_during_a_scheduler_restart_is_not_refused() {
    // The host has too little memory to promise each program the whole GPU, so limits follow the
    // programs' demand.
    let mut machine = Machine::with_manager(Setup { swap_max: "16M", ..Setup::default() });
    let mut random = Dice::seeded();
    let mut programs =
        [1, 2].map(|seed| machine.program(&format!("churn --mem 64M --seconds 4 --seed {seed}")).start());
    for program in &programs {
        machine.wait_for_grants(program, 1);
    }
    for _ in 0..BLOWS {
        std::thread::sleep(random.milliseconds(400));
        machine.kill_scheduler();
        std::thread::sleep(random.milliseconds(50));
        machine.start_scheduler();
    }
    for program in &mut programs {
        let report = program.finish();
        assert_eq!(report.number("refused"), 0);
    }
    machine.wait_until_empty();
}
