//! Memory of pools (`cuMemAllocAsync`) moves like other memory, in stream order. The tests run on
//! the simulated GPU.

use test_support::machine::*;

use crate::sleep;

/// A GPU that cannot hold two programs of 64 MiB at the same time.
fn pressed() -> Setup {
    Setup { memory: 128 * MIB, anti_thrash: "on", ..Setup::default() }
}

#[track_caller]
fn assert_moved(machine: &Machine, programs: &[Program]) {
    let moves = machine.moves();
    assert_one_holder(&moves);
    for program in programs {
        let moved = |what: &str| {
            moves.iter().filter(|m| m.pid == program.pid() && m.what == what).map(|m| m.bytes).sum::<u64>()
        };
        assert!(moved("freed") > 0 && moved("mapped") > 0, "nothing of {} left and came back", program.pid());
    }
}

#[test]
fn pool_memory_is_evicted_and_restored_unchanged() {
    let machine = Machine::with_scheduler(pressed());
    let words = format!("mix --mem {} --chunks 4 --reps 3 --rounds endless --kind async", 64 * MIB);
    let mut programs: Vec<Program> = (0..2).map(|_| machine.program(&words).start()).collect();
    wait_for("both to be known, with nothing pinned", || {
        let status = machine.status();
        let clients = status["clients"].as_array()?;
        let gpu = |client: &serde_json::Value| {
            let gpu = &client["gpus"][0];
            gpu["pinned"] == 0 && gpu["demand"].as_u64() >= Some(64 * MIB)
        };
        (clients.len() == 2 && clients.iter().all(gpu)).then_some(())
    });
    machine.wait_for_exchange(&programs);
    programs.iter_mut().for_each(|program| drop(program.end()));
    assert_moved(&machine, &programs);
    machine.wait_until_empty();
}

#[test]
fn pool_blocks_are_reused_in_stream_order_while_memory_moves() {
    for seed in [1, 2] {
        let machine = Machine::with_scheduler(pressed());
        let program = |number: u64| {
            let words = format!("pools --mem 96M --seconds 2.5 --pause-ms 3 --seed {}", seed * 10 + number);
            machine.program(&words).start()
        };
        let mut programs: Vec<Program> = (0..2).map(program).collect();
        programs.iter_mut().for_each(|program| drop(program.finish()));
        assert_moved(&machine, &programs);
        machine.wait_until_empty();
    }
}

#[test]
fn pool_memory_is_evicted_when_its_program_sleeps() {
    let machine = Machine::with_scheduler(Setup::default());
    let words = "pools --mem 64M --seconds 6 --pause-ms 3 --seed 5";
    let mut program = machine.program(words).start();
    machine.wait_for_grants(&program, 1);
    for _ in 0..3 {
        sleep::pause(&machine, &program);
        sleep::wait_until(&machine, &program, "sleep", "sleeping");
        assert_eq!(machine.free(), machine.setup.memory);
        sleep::resume(&machine, &program);
        sleep::wait_until(&machine, &program, "sleep", "awake");
    }
    program.finish();
    machine.wait_until_empty();
}

#[test]
fn pools_follow_the_drivers_specification() {
    let machine = Machine::with_scheduler(Setup::default());
    machine.program("pool_rules").without_nvshare().start().finish();
    machine.program("pool_rules").env("NVSHARE_MOVABLE_POOLS", "0").start().finish();
    machine.program("pool_rules --reserve 160M").start().finish();
    // With an engine that copies no memory or moves none, the driver manages the pools itself.
    for engine in ["managed", "none"] {
        let program = |words: &str| machine.program(words).env("NVSHARE_ENGINE", engine);
        program("pool_rules").start().finish();
        machine.wait_until_empty();
        if engine == "managed" {
            let mut idle = program("stranger --mem 32M --kind async --seconds 600").start();
            idle.wait_to_say("holding");
            wait_for("it to be counted", || {
                (machine.status()["clients"][0]["gpus"][0]["pinned"] == 32 * MIB).then_some(())
            });
            idle.kill();
            machine.wait_until_empty();
        }
    }
}

#[test]
fn pool_memory_counts_towards_the_limit() {
    let machine = Machine::with_scheduler(Setup::default());
    let words = "oversub --mem 396M --chunk 36M --rounds 1 --kind async";
    let refused = machine.program(words).start().finish();
    assert_eq!(refused.0["failed"], "cuMemAllocAsync");
    assert_eq!(refused.number("allocated"), machine.setup.capacity(1) / (36 * MIB) * 36 * MIB);
    machine.wait_until_empty();
    let under = machine.program(words).env("NVSHARE_MEMORY_MAX", "100M").start().finish();
    assert_eq!((&under.0["failed"], under.number("allocated")), (&"cuMemAllocAsync".into(), 72 * MIB));
}

#[test]
fn unused_pool_memory_is_released_instead_of_moved() {
    let machine = Machine::with_scheduler(Setup { memory: 256 * MIB, ..Setup::default() });
    let idle = machine.program("pool_keeper --mem 96M --live 8M --seconds 600").start();
    idle.wait_to_say("holding");
    wait_for("what it keeps to be known", || {
        (machine.status()["clients"][0]["gpus"][0]["demand"].as_u64() >= Some(96 * MIB)).then_some(())
    });
    let mut other = machine.program("mix --mem 200M --chunks 4 --reps 1 --rounds 2").start();
    other.finish();
    let moves = machine.moves();
    let swapped =
        |what: &str| moves.iter().filter(|m| m.pid == idle.pid() && m.what == what).map(|m| m.bytes).sum::<u64>();
    assert!(swapped("freed") >= 64 * MIB, "nothing left");
    wait_for("no more to be needed than is in use", || {
        (machine.status()["clients"][0]["gpus"][0]["demand"].as_u64() <= Some(64 * MIB)).then_some(())
    });
}

#[test]
fn pool_access_by_other_gpus_follows_the_programs_settings() {
    let simulator = vec![("CUDA_SIM_GPUS", "2".to_owned())];
    let machine = Machine::with_scheduler(Setup { memory: 96 * MIB, anti_thrash: "on", simulator, ..Setup::default() });
    let words = format!("across --mem {} --how pool --rounds 8", 24 * MIB);
    machine.program(&words).without_nvshare().start().finish();
    let mut programs: Vec<Program> = (0..2).map(|_| machine.program(&words).start()).collect();
    let others = ["0", "1"].map(|gpu| format!("mix --mem 64M --chunks 2 --reps 3 --rounds 4 --device {gpu}"));
    programs.extend(others.iter().map(|words| machine.program(words).start()));
    programs.iter_mut().for_each(|program| drop(program.finish()));
    assert!(evicted(&machine.moves()) > 0, "nothing had to leave");
    machine.wait_until_empty();
}

#[test]
fn without_stream_ids_pools_are_left_to_the_driver() {
    let simulator = vec![("CUDA_SIM_DRIVER", "11080".to_owned())];
    let without = "cuStreamGetId cuStreamGetId_ptsz cuCtxRecordEvent";
    let machine = Machine::with_scheduler(Setup { simulator, without, ..Setup::default() });
    machine.program("pool_rules").start().finish();
    let idle = machine.program("stranger --mem 32M --kind async --seconds 600").start();
    idle.wait_to_say("holding");
    wait_for("it to be counted", || (machine.status()["clients"][0]["gpus"][0]["pinned"] == 32 * MIB).then_some(()));
}

#[test]
fn memory_of_driver_managed_pools_is_pinned() {
    let machine = Machine::with_scheduler(Setup::default());
    let idle =
        machine.program("stranger --mem 32M --kind async --seconds 600").env("NVSHARE_MOVABLE_POOLS", "0").start();
    idle.wait_to_say("holding");
    wait_for("it to be counted", || (machine.status()["clients"][0]["gpus"][0]["pinned"] == 32 * MIB).then_some(()));
}

/// RAPIDS declares this usage for all of its pools.
#[test]
fn pools_for_decompression_by_hardware_are_pinned_only_on_gpus_that_have_it() {
    for decompression in [false, true] {
        let simulator = vec![("CUDA_SIM_DECOMPRESSION", u8::from(decompression).to_string())];
        let machine = Machine::with_scheduler(Setup { simulator, ..Setup::default() });
        let mut program = machine.program("pools --mem 64M --seconds 600 --pause-ms 3 --usage 2").start();
        let gpu = || machine.status()["clients"][0]["gpus"][0].clone();
        let bytes = |what: &str| gpu()[what].as_u64().unwrap_or_default();
        wait_for("memory of both pools", || (bytes("demand") >= 32 * MIB).then_some(()));
        if decompression {
            wait_for("pinned memory", || (bytes("pinned") > 0).then_some(()));
        } else {
            assert_eq!(bytes("pinned"), 0);
        }
        program.kill();
        machine.wait_until_empty();
    }
}
