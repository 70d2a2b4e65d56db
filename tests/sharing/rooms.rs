//! Rooms: memory that the scheduler keeps free for programs that don't use nvshare. The tests run
//! real processes on the simulated GPU.

use test_support::machine::*;

/// Two programs of this size fill the GPU. One program fits beside the room.
const SHARE: u64 = 52 * MIB;
const ROOM: u64 = 56 * MIB;

fn machine() -> Machine {
    Machine::with_scheduler(Setup { memory: 128 * MIB, ..Setup::default() })
}

/// Two programs that work until they are told to end.
fn fill(machine: &Machine) -> [Program; 2] {
    assert!(2 * SHARE <= machine.setup.capacity(2) && SHARE + ROOM <= machine.setup.capacity(2));
    let words = format!("mix --mem {SHARE} --chunks 4 --reps 3 --rounds endless");
    let programs = [(); 2].map(|()| machine.program(&words).start());
    wait_for("both to have their memory", || {
        let status = machine.status();
        let clients = status["clients"].as_array()?;
        let has_all = |client: &serde_json::Value| client["gpus"][0]["demand"].as_u64() >= Some(SHARE);
        (clients.len() == 2 && clients.iter().all(has_all)).then_some(())
    });
    programs
}

fn rooms(machine: &Machine) -> Vec<serde_json::Value> {
    machine.status()["gpus"][0]["rooms"].as_array().expect("rooms").clone()
}

fn is_ready(machine: &Machine) -> Option<()> {
    rooms(machine).first().is_some_and(|room| room["ready"] == true).then_some(())
}

#[test]
fn a_room_stays_free_while_programs_run() {
    let machine = machine();
    let mut programs = fill(&machine);
    let mut room = machine.order(&format!("make-room {ROOM}")).start();
    wait_for("the room to be free", || is_ready(&machine));
    assert_eq!(rooms(&machine)[0]["bytes"], ROOM);
    assert!(machine.ctl(&["status"]).contains("room     56 MiB are kept free for nvsharectl"));
    let said = "nvsharectl: 56 MiB are free, and are kept free until this command is interrupted\n";
    wait_for("the message", || (room.stderr() == said).then_some(()));
    let before = programs.each_ref().map(|program| grants(&machine.moves(), program.pid()));
    for _ in 0..5 {
        assert!(machine.free() >= ROOM, "{} are free", machine.free());
    }
    // Both programs have turns on the remaining memory.
    for (program, before) in programs.iter().zip(before) {
        machine.wait_for_grants(program, before + 2);
    }
    let mut game = machine.program("stranger --mem 48M --seconds 600").without_nvshare().start();
    wait_for("its memory to be taken from the room", || (machine.free() < 8 * MIB + SHARE).then_some(()));
    let before = programs.each_ref().map(|program| grants(&machine.moves(), program.pid()));
    for (program, before) in programs.iter().zip(before) {
        machine.wait_for_grants(program, before + 2);
    }
    assert!(game.poll().is_none(), "it has what it asked for");
    game.kill();
    assert!(room.poll().is_none());
    room.kill();
    wait_for("the room to be given back", || rooms(&machine).is_empty().then_some(()));
    programs.iter_mut().for_each(Program::kill);
}

#[test]
fn programs_evicted_for_a_room_have_correct_results() {
    let machine = machine();
    let mut programs = fill(&machine);
    // The order is repeated at arbitrary moments.
    for _ in 0..5 {
        let done = machine.ctl_output(&["make-room", "56M", "--", "/bin/sh", "-c", "sleep 0.1; exit 7"]);
        assert_eq!(done.status.code(), Some(7), "{}", String::from_utf8_lossy(&done.stderr));
    }
    programs.iter_mut().for_each(|program| drop(program.end()));
    assert_eq!(rooms(&machine), [] as [serde_json::Value; 0]);
}

#[test]
fn a_program_too_large_beside_a_room_waits_and_sees_the_reason() {
    let machine = machine();
    let mut program = machine.program(&format!("mix --mem {} --chunks 4 --reps 3 --rounds endless", 80 * MIB)).start();
    machine.wait_for_grants(&program, 1);
    let mut room = machine.order("make-room 56M --for 600s").start();
    wait_for("the room to be free", || is_ready(&machine));
    wait_for("it to be told", || {
        let text = machine.ctl_output(&["why", &program.pid().to_string()]).stdout;
        String::from_utf8_lossy(&text).contains("56 MiB of GPU 0 are kept free for other programs").then_some(())
    });
    assert!(machine.free() >= ROOM);
    room.kill();
    program.end();
}

#[test]
fn a_refused_room_has_a_reason_and_room_commands_run_unmanaged() {
    let machine = machine();
    let mut holding = machine.program("stranger --mem 16M --seconds 600").start();
    holding.wait_to_say("holding");
    let text = machine.ctl_fails(&["make-room", "500M"]);
    assert!(text.contains("GPU 0 has at most 1") && text.contains("for a room"), "{text}");
    let text = machine.ctl_fails(&["make-room", "50M", "--for", "2d"]);
    assert!(text.contains("--for"), "{text}");
    let done = machine.ctl_output(&["make-room", "50M", "--", "/bin/sh", "-c", "echo $NVSHARE_DISABLE; kill -9 $$"]);
    assert_eq!((String::from_utf8_lossy(&done.stdout).trim(), done.status.code()), ("1", Some(137)));
    let missing = machine.ctl_output(&["make-room", "50M", "--", "/nonexistent"]);
    assert_eq!(missing.status.code(), Some(127), "{}", String::from_utf8_lossy(&missing.stderr));
    let short = machine.ctl_output(&["make-room", "50M", "--for", "1s"]);
    let said = String::from_utf8_lossy(&short.stderr);
    assert_eq!((short.status.code(), &*said), (Some(0), "nvsharectl: 50 MiB are free, and are kept free for 1.0s\n"));
    holding.kill();
}

#[test]
fn a_room_lost_with_its_scheduler_is_requested_again() {
    let mut machine = machine();
    let mut holding = machine.program("stranger --mem 16M --seconds 600").start();
    holding.wait_to_say("holding");
    let mut room = machine.order("make-room 50M").start();
    wait_for("the room to be free", || is_ready(&machine));
    machine.kill_scheduler();
    room.wait_to_say("lost the room");
    machine.start_scheduler();
    room.wait_to_say("50 MiB are free again");
    wait_for("the room to be free", || is_ready(&machine));
    room.kill();
    holding.kill();
}
