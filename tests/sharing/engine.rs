//! The engine that moves each program's memory, and the reason for the choice, as shown to the
//! administrator.

use serde_json::Value;
use test_support::machine::*;

/// Waits until the only program uses the GPU. Returns its engine, the reason for the engine, and
/// the text of `nvsharectl status`.
fn shown(machine: &Machine, environment: &[(&str, &str)]) -> (String, String, String) {
    let mut launch = machine.program("mix --mem 16M --reps 100000");
    for (name, value) in environment {
        launch = launch.env(name, value);
    }
    let mut program = launch.start();
    let usage = wait_for("it to use the GPU", || {
        let usage = machine.status()["clients"][0]["gpus"][0].clone();
        (usage != Value::Null).then_some(usage)
    });
    let word = |key: &str| usage[key].as_str().expect("a word").to_owned();
    let all = (word("engine"), word("engine-reason"), machine.ctl(&["status"]));
    program.kill();
    machine.wait_until_empty();
    all
}

#[test]
fn status_shows_a_programs_engine_and_its_reason() {
    let machine = Machine::with_scheduler(Setup::default());
    let (engine, reason, text) = shown(&machine, &[]);
    assert_eq!((&*engine, &*reason), ("swap", "the default"));
    assert!(text.contains("  swap ") && !text.contains("has engine"), "{text}");
    for (environment, engine, reason) in [
        (("NVSHARE_ENGINE", "swap"), "swap", "NVSHARE_ENGINE asks for it"),
        (("NVSHARE_ENGINE", "managed"), "managed", "NVSHARE_ENGINE asks for it"),
        (("NVSHARE_ENGINE", "none"), "none", "NVSHARE_ENGINE asks for it"),
        (
            ("NVSHARE_ENABLE_SINGLE_OVERSUB", "1"),
            "managed",
            "NVSHARE_ENABLE_SINGLE_OVERSUB allows it to exceed GPU memory",
        ),
    ] {
        let (seen, why, text) = shown(&machine, &[environment]);
        assert_eq!((&*seen, &*why), (engine, reason));
        assert!(text.contains(&format!(" has engine {engine}: {reason}.")), "{text}");
    }
}

/// compute-sanitizer finds accesses beyond the end of an allocation only if the driver has made it.
#[test]
fn a_program_under_compute_sanitizer_has_the_drivers_own_allocations() {
    let machine = Machine::with_scheduler(Setup::default());
    let reason = "compute-sanitizer checks the program, which needs the driver's own allocations";
    for environment in [
        ("NV_SANITIZER_INJECTION_PORT_BASE", "49152"),
        ("NV_SANITIZER_INJECTION_PORT_RANGE_BEGIN", "49152"),
        ("CUDA_INJECTION64_PATH", "/opt/compute-sanitizer/libsanitizer-collection.so"),
    ] {
        let (engine, why, text) = shown(&machine, &[environment]);
        assert_eq!((&*engine, &*why), ("none", reason), "{environment:?}");
        assert!(text.contains(&format!(" has engine none: {reason}.")), "{text}");
    }
    assert_eq!(shown(&machine, &[("CUDA_INJECTION64_PATH", "/opt/libcupti.so")]).0, "swap", "another tool");
}

#[test]
fn status_shows_that_a_gpu_lacks_virtual_memory_management() {
    let simulator = vec![("CUDA_SIM_VMM", "0".to_owned())];
    let machine = Machine::with_scheduler(Setup { simulator, ..Setup::default() });
    let reason = "this GPU or its driver has no virtual memory management";
    for environment in [&[][..], &[("NVSHARE_ENGINE", "swap")]] {
        let (engine, why, text) = shown(&machine, environment);
        assert_eq!((&*engine, &*why), ("managed", reason));
        assert!(text.contains(&format!(" has engine managed: {reason}.")), "{text}");
    }
}
