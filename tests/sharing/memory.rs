//! Programs that together need more memory than the GPU has. Each program sees the whole GPU's
//! memory as its own. The tests run real processes on the simulated GPU.

use std::fmt::Display;

use cuda_sim_gpus::account;
use cuda_sim_gpus::trouble::{self, Stranger};
use test_support::machine::*;

/// Work on `memory` bytes whose results reveal every lost, repeated or reordered launch.
fn mix(memory: u64, rounds: impl Display) -> String {
    format!("mix --mem {memory} --chunks 4 --reps 3 --rounds {rounds}")
}

/// Like [`mix`], until the program is told to end.
fn endless(memory: u64) -> String {
    mix(memory, "endless")
}

#[test]
fn swapped_memory_is_restored_unchanged() {
    let machine = Machine::with_scheduler(Setup { anti_thrash: "on", ..pressed() });
    take_turns(&machine, "swap");
}

#[test]
fn programs_with_the_managed_engine_take_turns() {
    let machine = Machine::with_scheduler(Setup { anti_thrash: "on", ..pressed() });
    take_turns(&machine, "managed");
}

/// The programs use the engine `swap` and allocate managed memory themselves. The library
/// prefetches that memory off the GPU and back, so the driver never migrates pages on demand.
#[test]
fn a_programs_own_managed_memory_moves_with_its_turns() {
    let machine = Machine::with_scheduler(Setup { anti_thrash: "on", ..pressed() });
    // The size is not a multiple of any granularity.
    let words = format!("{} --kind managed", endless(SHARE - 4 * 4100));
    let mut programs: Vec<Program> = (0..2).map(|_| machine.program(&words).start()).collect();
    wait_for("both to be known, with nothing pinned", || {
        let status = machine.status();
        let clients = status["clients"].as_array()?;
        let gpu = |client: &serde_json::Value| {
            let gpu = &client["gpus"][0];
            gpu["engine"] == "swap" && gpu["pinned"] == 0 && gpu["demand"].as_u64() >= Some(SHARE)
        };
        (clients.len() == 2 && clients.iter().all(gpu)).then_some(())
    });
    machine.wait_for_exchange(&programs);
    for program in &mut programs {
        program.end();
        let said = program.stderr();
        assert!(said.contains("bytes left in") && said.contains("bytes came back"), "{said}");
    }
    assert_one_holder(&machine.moves());
    machine.wait_until_empty();
}

#[test]
fn evicted_managed_memory_leaves_the_gpu() {
    let machine = Machine::with_scheduler(pressed());
    let mut idle = machine.program(&format!("stranger --mem {SHARE} --kind managed --seconds 600")).start();
    idle.wait_to_say("holding");
    assert!(machine.free() < SHARE, "it is not there");
    let before = machine.moves().len();
    let mut other = machine.program(&endless(SHARE)).start();
    machine.wait_for_move(before, "the managed memory to be evicted", |m| m.what == "freed" && m.pid == idle.pid());
    idle.wait_to_say("bytes left in");
    // Without the library's prefetch, the driver would evict only the minimum.
    let resident = || Some(account::usage(&machine.path("gpu"), idle.pid(), 0)?.managed);
    wait_for("it to have left", || (resident()? <= SHARE / 2).then_some(()));
    idle.kill();
    other.end();
}

/// Regression test: evicted managed memory stays in use until other allocations need it. It
/// counted as memory of other programs, and two programs waited until the end.
#[test]
fn evicted_managed_memory_does_not_count_as_other_programs_memory() {
    let machine = Machine::with_scheduler(Setup { memory: 96 * MIB, ..Setup::default() });
    let (idle_share, share) = (64 * MIB, 60 * MIB);
    assert!(share <= machine.setup.capacity(3) && idle_share <= machine.setup.capacity(3));
    let idle = machine.program(&format!("stranger --mem {idle_share} --kind managed --seconds 600")).start();
    idle.wait_to_say("holding");
    let mut programs: Vec<Program> = (0..2).map(|_| machine.program(&endless(share)).start()).collect();
    idle.wait_to_say("bytes left in");
    machine.wait_for_exchange(&programs);
    let evicted = |client: &serde_json::Value| {
        let gpu = &client["gpus"][0];
        client["pid"] == idle.pid() && gpu["resident"] == 0 && gpu["swapped"].as_u64() == Some(idle_share)
    };
    wait_for("the managed memory to be off the GPU, and no other program's", || {
        let status = machine.status();
        let is_evicted = status["clients"].as_array()?.iter().any(evicted);
        (is_evicted && others(&machine) == Some(0)).then_some(())
    });
    for program in &programs {
        machine.wait_for_grants(program, 4);
    }
    assert_eq!(others(&machine), Some(0));
    for program in &mut programs {
        program.end();
    }
}

#[test]
fn managed_memory_beyond_the_limit_is_refused() {
    let machine = Machine::with_scheduler(Setup::default());
    let report = machine.program("oversub --mem 396M --chunk 36M --rounds 1 --kind managed").start().finish();
    assert_eq!(report.0["failed"], "cuMemAllocManaged");
    assert_eq!(report.number("allocated"), 216 * MIB);
}

/// A new scheduler learns of the evicted memory only from the client's report.
#[test]
fn evicted_managed_memory_does_not_count_as_other_programs_memory_after_a_restart() {
    let mut machine = Machine::with_scheduler(Setup { memory: 96 * MIB, ..Setup::default() });
    let idle = machine.program(&format!("stranger --mem {} --kind managed --seconds 600", 64 * MIB)).start();
    idle.wait_to_say("holding");
    let mut other = machine.program(&endless(60 * MIB)).start();
    idle.wait_to_say("bytes left in");
    machine.wait_for_grants(&other, 1);
    other.end();
    let kept = account::usage(&machine.path("gpu"), idle.pid(), 0).expect("its memory").kept;
    assert!(kept >= 16 * MIB, "the other program got the other pages: {kept}");
    // The stopped program connects after the scheduler has measured the GPU.
    idle.signal(libc::SIGSTOP);
    machine.kill_scheduler();
    machine.start_scheduler();
    let mut other = machine.program(&endless(MIB)).start();
    machine.wait_for_grants(&other, 1);
    wait_for("the memory to be another program's", || (others(&machine) >= Some(kept)).then_some(()));
    idle.signal(libc::SIGCONT);
    wait_for("no memory to be another program's", || (others(&machine) == Some(0)).then_some(()));
    let mut third = machine.program(&endless(60 * MIB)).start();
    machine.wait_for_grants(&third, 1);
    other.end();
    third.end();
}

/// A graphics program grows beside evicted managed memory, which could explain the growth.
#[test]
fn memory_of_graphics_programs_is_not_mistaken_for_managed_memory() {
    let machine = Machine::with_scheduler(Setup { memory: 96 * MIB, ..Setup::default() });
    let idle = machine.program(&format!("stranger --mem {} --kind managed --seconds 600", 64 * MIB)).start();
    idle.wait_to_say("holding");
    let mut other = machine.program(&endless(60 * MIB)).start();
    idle.wait_to_say("bytes left in");
    machine.wait_for_grants(&other, 1);
    let game = Stranger { bytes: 12 * MIB, pid: Some(std::process::id()), is_graphics: true };
    trouble::set_strangers(&machine.path("gpu"), 0, &[game]).expect("the strangers");
    wait_for("the game to be measured", || (others(&machine) == Some(12 * MIB)).then_some(()));
    other.end();
}

/// Pages of a program that exceeds the GPU are faulted in beyond its allowance.
#[test]
fn memory_that_page_faults_bring_onto_the_gpu_does_not_count_as_other_programs_memory() {
    let machine = Machine::with_scheduler(Setup { memory: 64 * MIB, ..Setup::default() });
    let words = mix(80 * MIB, "endless");
    let setup = [("NVSHARE_ENGINE", "managed"), ("NVSHARE_ENABLE_SINGLE_OVERSUB", "1")];
    let program = machine.program(&words);
    let mut program = setup.iter().fold(program, |program, (name, value)| program.env(name, value)).start();
    let resident = || Some(account::usage(&machine.path("gpu"), program.pid(), 0)?.managed);
    wait_for("more than it is allowed to be there", || (resident()? > machine.setup.capacity(1)).then_some(()));
    // Then at most all of the reserve is in use.
    wait_for("its context to be measured", || others(&machine));
    let most = (0..25).filter_map(|_| others(&machine)).max();
    assert_eq!(most, Some(0));
    program.end();
}

/// The memory of other programs, as the scheduler counts it. `None` if it has no figures for processes.
pub(crate) fn others(machine: &Machine) -> Option<u64> {
    let gpu = &machine.status()["gpus"][0];
    (gpu["accounting"] == "processes").then_some(())?;
    Some(gpu["overhead"].as_u64()?.saturating_sub(gpu["contexts"].as_u64()?))
}

/// A GPU that cannot hold two programs of [`SHARE`] at the same time.
fn pressed() -> Setup {
    Setup { memory: 64 * MIB, ..Setup::default() }
}

const SHARE: u64 = 32 * MIB;

#[track_caller]
fn take_turns(machine: &Machine, engine: &str) {
    assert!(2 * SHARE > machine.setup.capacity(2) && SHARE <= machine.setup.capacity(2));
    let mut programs: Vec<Program> =
        (0..2).map(|_| machine.program(&endless(SHARE)).env("NVSHARE_ENGINE", engine).start()).collect();
    wait_for("both to be known by their engine", || {
        let status = machine.status();
        let clients = status["clients"].as_array()?;
        let known = clients.iter().filter(|c| c["gpus"][0]["engine"] == engine).count();
        (known == 2).then_some(())
    });
    for program in &programs {
        machine.wait_for_grants(program, 3);
    }
    machine.wait_for_exchange(&programs);
    for program in &mut programs {
        program.end();
    }
    let moves = machine.moves();
    assert_one_holder(&moves);
    for program in &programs {
        let moved = |what: &str| {
            moves.iter().filter(|m| m.pid == program.pid() && m.what == what).map(|m| m.bytes).sum::<u64>()
        };
        assert!(moved("evict") > 0, "nothing of {} had to leave", program.pid());
        assert!(moved("freed") > 0 && moved("mapped") > SHARE, "nothing of {} left and came back", program.pid());
    }
    machine.wait_until_empty();
}

/// Freeing managed memory needs a context, and waits for pending work.
#[test]
fn freed_memory_is_free_with_every_engine() {
    for (engine, kind) in [("managed", "alloc"), ("swap", "managed"), ("swap", "alloc")] {
        let machine = Machine::with_scheduler(Setup::default());
        let words = format!("frees --mem 16M --rounds 6 --kind {kind} --seconds 600");
        let idle = machine.program(&words).env("NVSHARE_ENGINE", engine).start();
        idle.wait_to_say("holding nothing");
        wait_for("freed memory to be known as free", || {
            let demand = machine.status()["clients"][0]["gpus"][0]["demand"].as_u64()?;
            (demand == 0).then_some(())
        });
        let held = machine.setup.memory - machine.setup.context - machine.free();
        assert!(held <= 4 * MIB, "engine {engine}, kind {kind}: {held} bytes were not freed");
    }
}

#[test]
fn memory_that_fits_is_not_moved() {
    for anti_thrash in ["auto", "on"] {
        let machine = Machine::with_scheduler(Setup { anti_thrash, ..Setup::default() });
        let mut programs: Vec<Program> = (0..2).map(|_| machine.program(&endless(40 * MIB)).start()).collect();
        for program in &programs {
            machine.wait_for_grants(program, 3);
        }
        for program in &mut programs {
            program.end();
            let said = program.stderr();
            assert!(!said.contains("bytes left in"), "memory of {} moved under {anti_thrash}", program.pid());
        }
        let moves = machine.moves();
        assert_eq!(evicted(&moves), 0);
        if anti_thrash == "on" {
            // With `auto`, a program may run beside another one that hardly uses the GPU.
            assert_one_holder(&moves);
        }
    }
}

#[test]
fn programs_without_vmm_or_with_an_old_driver_take_turns() {
    let old = vec![("CUDA_SIM_DRIVER", "12020".to_owned())];
    for (simulator, without) in [(vec![("CUDA_SIM_VMM", "0".to_owned())], ""), (old, "cuCtxRecordEvent")] {
        let machine = Machine::with_scheduler(Setup { anti_thrash: "on", simulator, without, ..pressed() });
        let mut programs: Vec<Program> = (0..2).map(|_| machine.program(&endless(SHARE)).start()).collect();
        machine.wait_for_exchange(&programs);
        for program in &mut programs {
            program.end();
        }
        assert_one_holder(&machine.moves());
    }
}

#[test]
fn programs_see_the_gpus_total_and_their_own_use() {
    let machine = Machine::with_scheduler(Setup::default());
    let (total, limit) = (machine.setup.memory, machine.setup.capacity(1));
    let check = |report: &Report, limit: u64| {
        assert_eq!(report.number("total"), total);
        assert_eq!(report.number("device_total"), total);
        let near = |what: &str, want: u64| {
            let got = report.number(what);
            // The scheduler repeatedly re-measures other programs' contexts, so a figure may
            // deviate by up to three contexts.
            assert!(got.abs_diff(want) <= 3 * machine.setup.context, "{what}: {got}, not {want}");
        };
        near("free", limit);
        near("free_with", limit - 32 * MIB);
        near("free_full", 16 * MIB);
        near("free_after", limit - 32 * MIB);
    };
    check(&machine.program("account --mem 32M").start().finish(), limit);

    // Beside a program that holds the lock and much memory, the figures are the same, less that
    // program's context.
    let mut other = machine.program(&endless(120 * MIB)).start();
    machine.wait_for_grants(&other, 1);
    check(&machine.program("account --mem 32M").start().finish(), machine.setup.capacity(2));
    other.end();
}

#[test]
fn exceeding_the_gpu_requires_single_oversub() {
    let machine = Machine::with_scheduler(Setup::default());
    let words = "oversub --mem 396M --chunk 36M --rounds 1";
    assert_eq!(machine.setup.capacity(1) / (36 * MIB), 6);
    let refused = machine.program(words).start().finish();
    assert_eq!(refused.0["failed"], "cuMemAlloc_v2");
    assert_eq!(refused.number("allocated"), 216 * MIB);

    let exceeds = machine.program(words).env("NVSHARE_ENABLE_SINGLE_OVERSUB", "1").start().finish();
    assert_eq!(exceeds.0["failed"], "");
    assert_eq!(exceeds.number("allocated"), 396 * MIB);

    // `NVSHARE_ENABLE_SINGLE_OVERSUB=0` means off.
    let refused = machine.program(words).env("NVSHARE_ENABLE_SINGLE_OVERSUB", "0").start().finish();
    assert_eq!(refused.0["failed"], "cuMemAlloc_v2");
}

#[test]
fn memory_that_fits_neither_gpu_nor_host_is_refused() {
    let machine = Machine::with_scheduler(Setup { swap_max: "64M", ..Setup::default() });
    let all = machine.setup.capacity(2) + 64 * MIB;
    let mut first = machine.program("stranger --mem 160M --seconds 600").start();
    first.wait_to_say("holding");
    // The first program doesn't use the rest of its limit. That rest passes to the second program
    // as the second program allocates more.
    let words = "oversub --mem 396M --chunk 32M --rounds 1";
    let refused = machine.program(words).start().finish();
    assert_eq!(refused.0["failed"], "cuMemAlloc_v2");
    let got = refused.number("allocated");
    assert!(got <= all - 160 * MIB && got + 32 * MIB > all - 160 * MIB - 16 * MIB, "{got} of {all} less 160 MiB");
    let line = machine.wait_for_log("is refused memory");
    assert!(line.contains("WARN") && line.contains(&format!("(pid {}) 160 MiB", first.pid())), "{line}");
    first.kill();

    // The scheduler treats the only program as if the host had plenty of memory.
    machine.wait_until_empty();
    let alone = machine.program(words).start().finish();
    assert_eq!(alone.number("allocated"), 224 * MIB);
}

#[test]
fn a_driver_call_that_runs_out_of_memory_is_retried_with_room() {
    let machine = Machine::with_scheduler(Setup::default());
    let other = machine.program("stranger --mem 228M --seconds 600").start();
    other.wait_to_say("holding");
    let (mix, green) = ("mix --mem 4M --chunks 1 --reps 1 --rounds 1", "green --mem 4M --rounds 1 --reps 1");
    // The library loads its own module and function before the program loads any.
    for (fails, words) in [
        ("cuModuleLoadData:2", mix),
        ("cuLaunchKernel:1", mix),
        ("cuFuncLoad:2", green),
        ("cuGreenCtxStreamCreate:1", green),
    ] {
        let before = machine.moves().len();
        machine.program(words).env("CUDA_SIM_FAIL", fails).start().finish();
        machine.wait_for_move(before, "room to be made", |m| m.what == "reserved" && m.bytes > 0);
    }
}

#[test]
fn programs_swap_and_see_their_limits_with_little_host_memory() {
    let setup = Setup { memory: 128 * MIB, anti_thrash: "on", swap_max: "40M", ..Setup::default() };
    let machine = Machine::with_scheduler(setup);
    let mut programs: Vec<Program> = (0..2).map(|_| machine.program(&endless(64 * MIB)).start()).collect();
    for program in &programs {
        machine.wait_for_grants(program, 1);
    }
    wait_for("both to be held to what there is", || {
        let status = machine.status();
        let clients = status["clients"].as_array()?;
        let limits: u64 = clients.iter().map(|c| c["gpus"][0]["limit"].as_u64().unwrap_or(u64::MAX / 4)).sum();
        (limits <= machine.setup.capacity(2) + 40 * MIB).then_some(())
    });
    machine.wait_for_exchange(&programs);
    for program in &mut programs {
        program.end();
    }
    assert_one_holder(&machine.moves());
}

#[test]
fn a_program_that_fills_the_gpu_continues_when_new_programs_start() {
    // SAFETY: `getuid` has no preconditions.
    let uid = unsafe { libc::getuid() };
    let rules = format!("[[rule]]\nname = \"mine\"\nuser = {uid}\non-memory-full = \"wait\"\n");
    let machine = Machine::with_scheduler(Setup { rules, ..Setup::default() });
    // The program takes all memory except what its checks need, so no context fits beside it.
    let memory = machine.setup.capacity(1) - 2 * MIB;
    let mut all = machine.program(&format!("mix --mem {memory} --chunks 1 --reps 1 --rounds endless")).start();
    machine.wait_for_grants(&all, 1);
    let others: Vec<Program> = (0..4).map(|_| machine.program("stranger --mem 1M --seconds 600").start()).collect();
    wait_for("the others to wait with their contexts", || {
        (machine.scheduler_log().matches("delaying the CUDA context of").count() == others.len()).then_some(())
    });
    all.end();
    for other in &others {
        other.wait_to_say("holding");
    }
}

#[test]
fn a_programs_context_is_counted_once() {
    let machine = Machine::with_scheduler(Setup { memory: 512 * MIB, context: 32 * MIB, ..Setup::default() });
    let programs: Vec<Program> = (0..2).map(|_| machine.program("stranger --mem 1M --seconds 600").start()).collect();
    for program in &programs {
        program.wait_to_say("holding");
    }
    let want = machine.setup.capacity(2);
    wait_for("the capacity to leave out two contexts", || {
        (number(&machine.status()["gpus"][0]["capacity"]).abs_diff(want) <= 4 * MIB).then_some(())
    });
}

#[test]
fn memory_outside_the_engines_is_free_after_the_last_program_ends() {
    let machine = Machine::with_scheduler(Setup::default());
    let mut last = machine.program("stranger --mem 1M --seconds 600").start();
    last.wait_to_say("holding");
    // A process without nvshare simulates memory that a client holds outside its engine. That
    // process starts after the last client, and ends after that client.
    let mut stranger = machine.program("stranger --mem 128M --seconds 600").without_nvshare().start();
    stranger.wait_to_say("holding");
    wait_for("the stranger to be measured", || {
        (number(&machine.status()["gpus"][0]["capacity"]) < 128 * MIB).then_some(())
    });
    last.kill();
    machine.wait_until_empty();
    stranger.kill();
    assert_eq!(machine.free(), machine.setup.memory);
    machine.program(&mix(128 * MIB, 2)).start().finish();
}

#[test]
fn status_names_programs_without_nvshare() {
    let machine = Machine::with_scheduler(Setup::default());
    let client = machine.program("stranger --mem 1M --seconds 600").start();
    client.wait_to_say("holding");
    let stranger = machine.program("stranger --mem 1M --seconds 600").without_nvshare().start();
    stranger.wait_to_say("holding");
    let line = |program: &Program| format!("(process {}) uses this GPU without nvshare", program.pid());
    wait_for("the program to be named", || machine.ctl(&["status"]).contains(&line(&stranger)).then_some(()));
    assert!(!machine.ctl(&["status"]).contains(&line(&client)));
    assert_eq!(machine.status()["gpus"][0]["others"], serde_json::json!([stranger.pid()]));
}

#[test]
fn memory_is_evicted_for_a_foreign_program() {
    let machine = Machine::with_scheduler(Setup { memory: 512 * MIB, ..Setup::default() });
    let words = "mix --mem 220M --chunks 4 --reps 1 --rounds endless";
    let mut programs: Vec<Program> = (0..2).map(|_| machine.program(words).start()).collect();
    for program in &programs {
        machine.wait_for_grants(program, 1);
    }
    wait_for("both to be on the GPU", || {
        let resident: u64 = number(&machine.status()["gpus"][0]["resident"]);
        (resident >= 440 * MIB).then_some(())
    });
    let before = machine.moves().len();
    // The stranger takes all free memory. The two programs then no longer fit together.
    let mut stranger = machine.program("stranger --mem 52M --seconds 60").without_nvshare().start();
    stranger.wait_to_say("holding");
    machine.wait_for_move(before, "somebody to make room", |m| m.what == "evict");
    stranger.kill();
    for program in &mut programs {
        program.end();
    }
    let moves = machine.moves();
    assert!(!moves.iter().any(|m| m.pid == stranger.pid()), "a stranger is no client");
    machine.wait_until_empty();
}

#[test]
fn unchanged_memory_is_not_copied_again() {
    unchanged_is_not_copied(Vec::new());
}

/// With `CUDA_SIM_FAT_BINARIES=0` the driver compiles the library's kernel from PTX.
#[test]
fn unchanged_memory_is_not_copied_again_on_a_gpu_without_fat_binary() {
    unchanged_is_not_copied(vec![("CUDA_SIM_FAT_BINARIES", "0".to_owned())]);
}

#[track_caller]
fn unchanged_is_not_copied(simulator: Vec<(&'static str, String)>) {
    let compiles = !simulator.is_empty();
    let machine = Machine::with_scheduler(Setup { anti_thrash: "on", simulator, ..pressed() });
    let words = "weights --mem 24M --reserve 8M --state 2M --rounds 5 --pause-ms 150";
    let mut server = machine.program(words).env("NVSHARE_DEBUG", "1").start();
    machine.wait_for_grants(&server, 1);
    let mut other = machine.program(&mix(machine.setup.capacity(2) - 8 * MIB, 1000)).start();
    server.finish();
    other.kill();
    // The lines read "N bytes left in N µs, N bytes in both directions without a copy".
    let said = server.stderr();
    assert_eq!(said.contains("the driver compiles PTX"), compiles);
    let sums = said.lines().fold([0u64; 2], |[out, uncopied], line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some(at) = words.windows(3).position(|words| words == ["bytes", "left", "in"]) else {
            return [out, uncopied];
        };
        let number = |at: usize| words[at].parse::<u64>().expect("a number");
        [out + number(at - 1), uncopied + number(at + 5)]
    });
    let [out, uncopied] = sums;
    assert!(out > 3 * 24 * MIB, "it was moved often: {sums:?}");
    assert!(uncopied * 2 > out, "most of it was not copied: {sums:?}");
    assert!(uncopied < out, "and some was: {sums:?}");
}

/// The library creates one stream in each context in which it moves memory. The program creates
/// none.
#[test]
fn memory_moves_in_one_context_until_the_context_is_destroyed() {
    let machine = Machine::with_scheduler(Setup { anti_thrash: "on", ..pressed() });
    let words = "contexts --mem 16M --rounds 4 --pause-ms 60";
    let mut program = machine.program(words).env("CUDA_SIM_FAIL", "cuStreamCreate:3").start();
    let mut other = machine.program(&mix(SHARE, 1000)).start();
    program.finish();
    other.kill();
    let moves = machine.moves();
    assert!(moves.iter().any(|m| m.pid == program.pid() && m.what == "evict"), "nothing of it had to leave");
    let failed = std::fs::read_to_string(machine.path("gpu/failed")).unwrap_or_default();
    assert_eq!(failed, "", "it left a context that was still there");
}

/// Returns which threads of a program created the stream and the kernel that move its memory.
/// `true` stands for the thread that created the context.
fn made_by(fails: &str) -> [Vec<bool>; 2] {
    let machine = Machine::with_scheduler(Setup { anti_thrash: "on", ..pressed() });
    let launch = || machine.program(&endless(SHARE));
    let mut programs = [launch().env("CUDA_SIM_FAIL", fails).start(), launch().start()];
    machine.wait_for_exchange(&programs);
    for program in &mut programs {
        program.end();
    }
    let [program, _] = programs;
    let (said, main) = (program.stderr(), format!("[{0}:{0}]", program.pid()));
    ["memory can be moved in", "fingerprints can be computed in"]
        .map(|what| said.lines().filter(|line| line.contains(what)).map(|line| line.contains(&main)).collect())
}

#[test]
fn resources_for_an_eviction_are_created_in_advance() {
    assert_eq!(made_by(""), [[true], [true]]);
    // If the driver lacks memory for the kernel, all chunks are copied. If it lacks memory for the stream, the
    // library's thread creates the stream later. The program sees no error.
    assert_eq!(made_by("cuModuleLoadData:1"), [vec![true], vec![]]);
    assert_eq!(made_by("cuFuncLoad:1"), [vec![true], vec![]]);
    assert_eq!(made_by("cuStreamCreate:1"), [vec![false], vec![]]);
}
