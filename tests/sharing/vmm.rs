//! Programs that map their memory themselves (`cuMemCreate`, `cuMemMap`). Their memory moves like
//! other memory, at all addresses where it is mapped.

use test_support::machine::*;

use crate::sleep;

/// A GPU that cannot hold two programs of 64 MiB at the same time.
fn pressed() -> Setup {
    Setup { memory: 128 * MIB, anti_thrash: "on", ..Setup::default() }
}

/// Returns the bytes that were restored to the program.
fn came_back(program: &Program) -> u64 {
    let said = program.stderr();
    let back = said.lines().filter_map(|line| line.split_once(" bytes came back").map(|(before, _)| before));
    back.filter_map(|before| before.rsplit(' ').next()?.parse::<u64>().ok()).sum()
}

/// Checks the test's model of mappings against the driver, without nvshare.
#[test]
fn the_tests_model_of_mappings_matches_the_driver() {
    let machine = Machine::new(pressed());
    for seed in 1..=3 {
        let report = machine
            .program(&format!("maps --mem 100M --seconds 1 --strict 1 --seed {seed}"))
            .without_nvshare()
            .start()
            .finish();
        assert!(report.number("steps") > 100 && report.number("checks") > 5, "{}", report.0);
    }
}

#[test]
fn memory_can_be_bound_to_arrays_and_multicast_objects() {
    const NOT_SUPPORTED: u64 = 801;
    let machine = Machine::with_scheduler(Setup { memory: 512 * MIB, ..Setup::default() });
    let alone = machine.program("binds").without_nvshare().start().finish();
    let shared = machine.program("binds").start().finish();
    assert_eq!(alone.number("array"), shared.number("array"));
    // In one call the driver binds only one of its own allocations, and this memory consists of
    // several.
    assert_eq!((alone.number("other"), shared.number("other")), (0, NOT_SUPPORTED));
    let small = machine.program("binds --mem 64M").start().finish();
    assert_eq!(small.number("other"), 0);
    machine.wait_until_empty();
}

#[test]
fn all_mappings_of_a_program_are_restored_unchanged() {
    let machine = Machine::with_scheduler(pressed());
    let mut random = Dice::seeded();
    let words = |seed: u64| format!("maps --mem 80M --seconds 4 --checks 6 --strict 1 --seed {seed}");
    let mut programs: Vec<Program> = (0..2).map(|_| machine.program(&words(random.below(1 << 30))).start()).collect();
    for program in &mut programs {
        let report = program.finish();
        assert!(report.number("steps") > 100 && report.number("checks") > 5, "{}", report.0);
        let back = came_back(program);
        eprintln!("{}: {} MiB came back", report.0, back / MIB);
        assert!(back > 0, "nothing of {} came back", program.pid());
    }
    assert!(evicted(&machine.moves()) > 0);
    machine.wait_until_empty();
    assert_eq!(machine.free(), machine.setup.memory);
}

#[test]
fn a_program_that_maps_all_its_memory_takes_turns() {
    let machine = Machine::with_scheduler(pressed());
    let words = "mix --mem 64M --chunks 4 --reps 3 --rounds endless --kind vmm";
    let mut programs: Vec<Program> = (0..2).map(|_| machine.program(words).start()).collect();
    wait_for("both to be there", || {
        let status = machine.status();
        let pinned = |client: &serde_json::Value| client["gpus"][0]["pinned"].as_u64();
        let clients = status["clients"].as_array()?;
        (clients.len() == 2 && clients.iter().all(|c| pinned(c) == Some(0))).then_some(())
    });
    machine.wait_for_exchange(&programs);
    for program in &mut programs {
        program.end();
        assert!(came_back(program) > 0, "nothing of {} came back", program.pid());
    }
    machine.wait_until_empty();
}

#[test]
fn mapping_does_not_wait_for_a_turn() {
    let machine = Machine::with_scheduler(Setup { time_quantum: HOUR, ..pressed() });
    // The holder keeps the GPU continuously, and needs most of its memory.
    let mut holder = machine.program("persistent --mem 80M --seconds 3600").start();
    machine.wait_for_grants(&holder, 1);
    let mut other = machine.program("maps --mem 80M --seconds 1 --unused 1").start();
    other.finish();
    holder.kill();
}

/// Asserts that exported memory stays on the GPU and is shown as pinned, while the rest of the
/// program's memory moves.
#[track_caller]
fn check_shared_with_another_device(words: &str, pinned: u64) {
    check_shared_on(&Machine::with_scheduler(pressed()), words, pinned);
}

#[track_caller]
fn check_shared_on(machine: &Machine, words: &str, pinned: u64) {
    let mut program = machine.program(&format!("escapes --mem 16M --beside 64M --seconds 600 {words}")).start();
    program.wait_to_say("holding");
    let mut other = machine.program("mix --mem 60M --chunks 4 --reps 3 --rounds endless").start();
    machine.wait_for_move(0, "some of it to leave", |m| m.what == "freed" && m.pid == program.pid());
    let status = machine.status();
    let clients = status["clients"].as_array().expect("clients");
    let client = clients.iter().find(|c| c["pid"] == program.pid()).expect("the program");
    assert_eq!(number(&client["gpus"][0]["pinned"]), pinned, "{status:#}");
    program.end();
    other.end();
    machine.wait_until_empty();
    assert_eq!(machine.free(), machine.setup.memory);
}

#[test]
fn memory_shared_with_another_device_stays_resident() {
    check_shared_with_another_device("--how sync", 16 * MIB);
    check_shared_with_another_device("--how tokens", 16 * MIB);
    check_shared_with_another_device("--how token-list", 16 * MIB);
    check_shared_with_another_device("--how range", 16 * MIB);
}

/// Resources of graphics APIs are the driver's own memory, and concern no other memory of the program.
#[test]
fn memory_of_a_program_with_graphics_resources_moves() {
    check_shared_with_another_device("--how graphics", 0);
}

#[test]
fn a_program_with_graphics_resources_does_not_sleep() {
    let machine = Machine::with_scheduler(Setup::default());
    let mut program = machine.program("escapes --mem 16M --beside 16M --seconds 600 --how graphics").start();
    program.wait_to_say("holding");
    sleep::pause(&machine, &program);
    let why = "it uses driver functions that the library does not intercept";
    sleep::wait_until(&machine, &program, "sleep-obstacle", why);
    sleep::resume(&machine, &program);
    program.end();
    machine.wait_until_empty();
}

/// Programs prefer FABRIC handles if the driver offers them. Memory with such handles cannot move.
#[test]
fn fabric_handles_are_offered_only_on_a_fabric_of_several_hosts_or_by_a_rule() {
    let by_rule = "[[rule]]\nfabric-handles = true\n";
    for (fabric, rules, pinned) in [
        ("handles", "", 0),
        ("cluster", "", 16 * MIB),
        ("handles", by_rule, 16 * MIB),
        ("none", by_rule, 0), // what the driver lacks is not offered
    ] {
        eprintln!("{fabric}, {rules:?}");
        let simulator = vec![("CUDA_SIM_FABRIC", fabric.to_owned())];
        let machine = Machine::with_scheduler(Setup { rules: rules.into(), simulator, ..pressed() });
        check_shared_on(&machine, "--how offered", pinned);
    }
}

/// Only the scheduler knows whether a fabric exists.
#[test]
fn fabric_handles_are_offered_without_a_scheduler() {
    let machine = Machine::new(Setup { simulator: vec![("CUDA_SIM_FABRIC", "handles".into())], ..pressed() });
    assert_eq!(machine.program("info").start().finish().number("fabric_handles"), 1);
}

#[test]
fn mapped_memory_shared_with_another_device_stays_resident() {
    check_shared_with_another_device("--how sync --kind vmm", 16 * MIB);
    check_shared_with_another_device("--how tokens --kind vmm", 16 * MIB);
    check_shared_with_another_device("--how token-list --kind vmm", 16 * MIB);
    check_shared_with_another_device("--how range --kind vmm", 16 * MIB);
}

#[test]
fn memory_that_other_devices_no_longer_access_moves_again() {
    check_shared_with_another_device("--how sync-and-clear", 0);
    check_shared_with_another_device("--how sync-and-clear --kind vmm", 0);
}

#[test]
fn exported_memory_stays_resident() {
    check_shared_with_another_device("--how export", 16 * MIB);
    check_shared_with_another_device("--how none", 0);
}

#[test]
fn memory_bound_to_a_multicast_object_stays_resident() {
    check_shared_with_another_device("--how bind", 16 * MIB);
    check_shared_with_another_device("--how bind-address", 16 * MIB);
}

/// A driver without room for page tables refuses a mapping, for example.
#[test]
fn a_mapping_that_fails_during_a_restore_is_retried() {
    let machine = Machine::with_scheduler(pressed());
    // The program itself causes the first eight calls: two for each of its four chunks. The later
    // calls restore memory. Some of these calls map the chunks themselves, and the library retries
    // them immediately. The others map the addresses where the program has mapped the chunks.
    let failing = |call: &str, n: u32| {
        let words = "mix --mem 64M --chunks 4 --reps 3 --rounds 5 --kind vmm";
        machine.program(words).env("CUDA_SIM_FAIL", &format!("{call}:{n}")).start()
    };
    for call in ["cuMemMap", "cuMemSetAccess"] {
        let mut programs: Vec<Program> = [12, 16].into_iter().map(|n| failing(call, n)).collect();
        for program in &mut programs {
            program.finish();
        }
    }
    machine.wait_until_empty();
}

/// The memory belongs to its program, and a program that does not fit beside it is refused.
#[test]
fn memory_that_a_program_creates_without_a_context_counts_as_its_own() {
    let machine = Machine::with_scheduler(Setup { memory: 256 * MIB, context: 8 * MIB, ..Setup::default() });
    let mut service = machine.program("provides --mem 128M --seconds 600").start();
    service.wait_to_say("holding");
    let shown = wait_for("its memory", || {
        let status = machine.status();
        let clients = status["clients"].as_array()?;
        let client = clients.iter().find(|client| client["pid"] == service.pid())?;
        let gpu = client["gpus"].as_array()?.first()?.clone();
        (gpu["pinned"].as_u64()? >= 128 * MIB).then_some(gpu)
    });
    assert_eq!(shown["resident"], 128 * MIB, "{shown}");
    let overhead = || machine.status()["gpus"][0]["overhead"].as_u64().expect("a number");
    wait_for("a measurement", || (overhead() < 64 * MIB).then_some(()));
    // Another program gets the rest, and shares it as usual.
    machine.program("mix --mem 64M --rounds 3").start().finish();
    service.kill();
    machine.wait_until_empty();
    machine.program("mix --mem 160M --rounds 3").start().finish();
}
