//! A host or control group without room for evicted memory. Memory that cannot be evicted stays on
//! the GPU, other programs make room or wait, and no process is killed.

use std::time::Duration;

use test_support::cgroup::Limited;
use test_support::machine::*;

const SHARE: u64 = 64 * MIB;

/// A limit that is never reached.
const PLENTY: u64 = 1 << 40;

fn group(limit: u64) -> Option<Limited> {
    Limited::new(&format!("nvshare-host-{}", std::process::id()), limit)
}

/// Waits until the group's memory use stops changing, and returns that use.
fn settled(group: &Limited) -> u64 {
    let mut before = group.used();
    wait_for("the group's memory to settle", || {
        std::thread::sleep(Duration::from_millis(200));
        let now = group.used();
        (std::mem::replace(&mut before, now) == now).then_some(now)
    })
}

#[test]
fn memory_stays_on_the_gpu_if_the_programs_cgroup_is_full() {
    stays_on_the_gpu("");
}

/// The kernel immediately populates all mappings of a program that locks its memory.
#[test]
fn memory_stays_on_the_gpu_if_the_cgroup_is_full_and_pages_are_locked() {
    stays_on_the_gpu("--lock 1");
}

#[track_caller]
fn stays_on_the_gpu(options: &str) {
    let Some(group) = group(PLENTY) else { return };
    let machine = Machine::with_scheduler(Setup { memory: 128 * MIB, anti_thrash: "on", ..Setup::default() });
    let mix = |rounds: &str| format!("mix --mem {SHARE} --chunks 4 --reps 3 --rounds {rounds}");
    let mut inside = machine.program_in(&group.procs(), &format!("{} {options}", mix("endless"))).start();
    machine.wait_for_grants(&inside, 1);
    // The simulated GPU's memory is charged to the process, and so to the group. The test therefore
    // sets the group's limit 8 MiB above the group's present memory use.
    wait_for("all of it to be there", || (group.used() >= SHARE).then_some(()));
    group.set_limit(settled(&group) + 8 * MIB);
    let mut other = machine.program(&mix("4")).start();
    wait_for("status to say why its memory stays", || {
        let status = machine.status();
        let clients = status["clients"].as_array().expect("clients").clone();
        let named = clients.into_iter().find(|client| client["pid"] == inside.pid())?;
        (named["gpus"][0]["eviction-blocked"] == "host memory is full").then_some(())
    });
    assert!(inside.poll().is_none() && other.poll().is_none(), "nobody ends for it");
    group.set_limit(PLENTY);
    other.finish();
    assert!(inside.poll().is_none() && group.kills() == 0);
    inside.end();
    machine.wait_until_empty();
}

/// A program that becomes idle with 96 MiB. Its threads share one heap, because glibc would reserve 64 MiB of
/// addresses for the heap of each thread that starts later.
fn idle(machine: &Machine) -> Program {
    let program = machine.program("mix --mem 96M --chunks 12 --reps 3 --rounds 2 --cpu-ms 600000");
    program.env("MALLOC_ARENA_MAX", "1").start()
}

/// Only as much memory is evicted as the limit on address space allows.
#[test]
fn an_address_space_limit_permits_a_partial_eviction() {
    let machine = Machine::with_scheduler(Setup { memory: 128 * MIB, anti_thrash: "on", ..Setup::default() });
    let mut idle = idle(&machine);
    wait_for("it to be idle", || idle.stderr().contains("round 0 is over").then_some(()));
    limit_addresses(idle.pid(), 96 * MIB);
    // The other program needs at most 40 MiB of the idle program's memory. The remaining 56 MiB of
    // address space are for the program and for stacks of threads that start later.
    let mut other = machine.program("mix --mem 48M --chunks 3 --reps 3 --rounds 4").start();
    other.finish();
    assert!(idle.poll().is_none());
    limit_addresses(idle.pid(), PLENTY);
    idle.end();
    machine.wait_until_empty();
}

/// One mapping for all memory that should be evicted would exceed the limit. Smaller mappings do not, so
/// a part of the memory is evicted.
#[test]
fn memory_is_evicted_up_to_the_address_space_limit() {
    let machine = Machine::with_scheduler(Setup { memory: 128 * MIB, anti_thrash: "on", ..Setup::default() });
    let mut idle = idle(&machine);
    wait_for("it to be idle", || idle.stderr().contains("round 0 is over").then_some(()));
    limit_addresses(idle.pid(), 80 * MIB);
    // The other program needs 64 MiB of the idle program's memory. The library leaves 32 MiB of
    // addresses to the program.
    let mut other = machine.program("mix --mem 80M --chunks 5 --reps 3 --rounds 4").start();
    machine.wait_for_move(0, "a part to leave", |m| m.pid == idle.pid() && m.what == "freed" && m.bytes > 0);
    limit_addresses(idle.pid(), PLENTY);
    other.finish();
    assert!(idle.poll().is_none());
    idle.end();
    machine.wait_until_empty();
}

/// Lets a process map `more` bytes in addition to its present mappings.
fn limit_addresses(pid: u32, more: u64) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmSize:")).expect("its size");
    let has: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    let limit = libc::rlimit { rlim_cur: (has << 10) + more, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is valid during the call, and the null pointer asks for no old limit.
    let result = unsafe { libc::prlimit(pid as i32, libc::RLIMIT_AS, &limit, std::ptr::null_mut()) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

#[test]
#[ignore = "takes more than three minutes, as the library waits for so long"]
fn host_memory_at_rest_is_freed_without_losing_contents() {
    // Copies from unregistered memory would be so slow that the test would fail, so memory must be
    // restored at the speed of the link.
    let simulator = vec![("CUDA_SIM_PAGEABLE_BANDWIDTH", "64K".into())];
    let machine =
        Machine::with_scheduler(Setup { memory: 128 * MIB, anti_thrash: "on", simulator, ..Setup::default() });
    let words = format!("mix --mem {SHARE} --chunks 4 --reps 3 --rounds 1 --cpu-ms 190000");
    let mut programs: Vec<Program> = (0..2).map(|_| machine.program(&words).start()).collect();
    machine.wait_for_move(0, "somebody to make room", |m| m.what == "freed");
    // During the pause one program's memory is in the host. The other program has allocated the
    // buffers for a later eviction.
    wait_within(Duration::from_secs(200), "one to tidy up", || {
        programs.iter().any(|p| p.stderr().contains("idle host memory")).then_some(())
    });
    let before = machine.moves().len();
    for program in &mut programs {
        wait_within(Duration::from_secs(60), "it to end", || program.poll());
        program.finish();
    }
    let moved = machine.moves()[before..].iter().any(|m| m.what == "mapped");
    assert!(moved, "what was in the host came back");
    machine.wait_until_empty();
}

const PREPARED: &str = "allocating staging buffers in advance: true";

#[test]
fn memory_at_rest_gets_host_buffers_before_its_eviction() {
    let machine = Machine::with_scheduler(Setup { memory: 128 * MIB, anti_thrash: "on", ..Setup::default() });
    let mix = |cpu_ms: u32| format!("mix --mem 90M --chunks 4 --reps 3 --rounds 2 --cpu-ms {cpu_ms}");
    let mut idle = machine.program(&mix(600_000)).start();
    wait_for("it to prepare", || idle.stderr().contains(PREPARED).then_some(()));
    let mut other = machine.program(&mix(0)).start();
    other.finish();
    assert!(!other.stderr().contains(PREPARED), "it has not been there for long enough");
    machine.wait_for_move(0, "the idle one to make room", |m| m.what == "freed");
    idle.end();
    machine.wait_until_empty();
}

#[test]
fn buffers_made_ahead_are_freed_when_their_cgroup_needs_memory() {
    let Some(group) = group(4 << 30) else { return };
    let machine = Machine::with_scheduler(Setup { memory: 128 * MIB, anti_thrash: "on", ..Setup::default() });
    let words = format!("mix --mem {SHARE} --chunks 4 --reps 3 --rounds 2 --cpu-ms 600000");
    let mut idle = machine.program_in(&group.procs(), &words).start();
    wait_for("it to be asked", || idle.stderr().contains("\u{2190} Prepare").then_some(()));
    let before = group.used();
    wait_for("it to have buffers", || (group.used() >= before.min(SHARE) + SHARE).then_some(()));
    // The free memory of the group is now smaller than the reserve for its other memory, a
    // sixteenth of the limit. The shortfall is less than one buffer, a quarter of `SHARE`. The
    // program may use a little more memory until it has freed that buffer.
    let before = settled(&group);
    group.set_limit(before + 2 * MIB);
    wait_for("it to give them back", || (group.used() + SHARE / 8 <= before).then_some(()));
    assert_eq!(group.kills(), 0);
    assert!(idle.poll().is_none());
    idle.kill();
    machine.wait_until_empty();
}
