//! Revokes of work that doesn't end promptly by itself: deep queues, work that waits for the host
//! or for another process, and work that never ends. The tests run real processes on the simulated
//! GPU, and also read the scheduler's own record of events.

use std::time::Duration;

use test_support::machine::*;

/// A neighbour that checks its results, and works until it is told to end.
const NEIGHBOUR: &str = "mix --mem 16M --reps 8 --rounds endless";

/// A setup with one holder at a time and turns of full length.
fn strict() -> Setup {
    Setup { anti_thrash: "on", ..Setup::default() }
}

/// Returns how each revoke of the process ended: with `release`, or with `stuck`.
fn drains(moves: &[Move], pid: u32) -> Vec<String> {
    let own: Vec<&Move> =
        moves.iter().filter(|m| m.pid == pid && ["revoke", "release", "stuck"].contains(&m.what)).collect();
    let pairs = own.windows(2).filter(|pair| pair[0].what == "revoke");
    pairs.map(|pair| pair[1].what.to_owned()).collect()
}

/// In each stream a kernel waits behind kernels that touch no memory. The waiting kernel fails if
/// its memory is evicted before the kernel has run.
#[test]
fn queued_work_ends_before_its_memory_is_evicted() {
    let machine = Machine::with_scheduler(Setup { memory: 80 * MIB, ..strict() });
    let mut neighbour = machine.program("mix --mem 48M --reps 8 --rounds endless").start();
    machine.wait_for_grants(&neighbour, 1);
    for words in [
        "deep --launches 400 --ns 10000000 --streams 32 --mem 48M",
        "deep --launches 400 --ns 10000000 --streams 32 --mem 48M --per-graph 10",
    ] {
        let mut program = machine.program(words).start();
        program.finish();
        let moves = machine.moves();
        let of = |what: &str| moves.iter().filter(|m| m.pid == program.pid() && m.what == what).count();
        assert!(of("revoke") > 0 && of("evict") > 0, "{words}: it was never evicted in the middle");
    }
    neighbour.kill();
    machine.wait_until_empty();
}

// ---- bounded queues ----------------------------------------------------------------------------------------------

/// The longest GPU time that may be queued in addition to one submission. A drain should take no
/// longer, either.
const RUN_AHEAD: Duration = Duration::from_millis(100);
/// The factor by which a queue may exceed `RUN_AHEAD`. On a busy machine the library measures
/// kernel times late, and lets more work be queued. Without a limit, the queue would be a second or
/// longer.
const LATE: u32 = 3;

/// Runs a program that submits at least a second of work, beside a neighbour that takes turns with
/// the program. `longest` is the GPU time of the program's longest submission.
#[track_caller]
fn queues_little(words: &str, longest: Duration) {
    let machine = Machine::with_scheduler(strict());
    let mut neighbour = machine.program(NEIGHBOUR).start();
    machine.wait_for_grants(&neighbour, 1);
    let mut program = machine.program(words).start();
    let queue = Duration::from_nanos(program.finish().number("longest_queue_ns"));
    let moves = machine.moves();
    neighbour.kill();
    assert!(queue <= longest + LATE * RUN_AHEAD, "`{words}` had queued {queue:?}");
    let drains = drains(&moves, program.pid());
    assert!(!drains.is_empty(), "`{words}` was never asked for the lock while it held it");
    assert!(drains.iter().all(|end| end == "release"), "`{words}` cannot drain: {drains:?}");
    assert!(grants(&moves, neighbour.pid()) > drains.len() / 2, "the neighbour had its turns");
    assert_one_holder(&moves);
    machine.wait_until_empty();
}

#[test]
fn only_few_of_thousands_of_small_kernels_are_queued() {
    queues_little("deep --launches 4000 --ns 250000", Duration::ZERO);
}

#[test]
fn only_few_kernels_are_queued_in_256_streams() {
    queues_little("deep --launches 1000 --ns 2000000 --streams 256", Duration::from_millis(2));
}

#[test]
fn only_few_graphs_of_a_loop_are_queued() {
    queues_little("deep --launches 5000 --ns 200000 --per-graph 50", Duration::from_millis(10));
}

#[test]
fn only_few_kernels_of_30_ms_are_queued() {
    queues_little("deep --launches 40 --ns 30000000", Duration::from_millis(30));
}

#[test]
fn kernels_of_400_ms_are_queued_one_by_one() {
    queues_little("deep --launches 8 --ns 400000000", Duration::from_millis(400));
}

#[test]
fn graphs_of_a_second_are_queued_one_by_one() {
    queues_little("deep --launches 50 --ns 100000000 --per-graph 10", Duration::from_secs(1));
}

// ---- work that waits for a further step of the host --------------------------------------------------------------

/// Runs a program whose work waits for the host, beside a neighbour that never waits. Both take
/// turns and end with correct results. Returns how the program's drains ended.
#[track_caller]
fn both_end(words: &str) -> Vec<String> {
    let machine = Machine::with_scheduler(strict());
    let mut neighbour = machine.program(NEIGHBOUR).start();
    machine.wait_for_grants(&neighbour, 1);
    let mut program = machine.program(words).start();
    program.finish();
    machine.wait_for_grants(&neighbour, 2); // the neighbour was revoked, and holds the lock again
    neighbour.end();
    let moves = machine.moves();
    assert!(grants(&moves, program.pid()) >= 1, "`{words}` ran without the lock");
    assert_one_holder(&moves);
    machine.wait_until_empty();
    drains(&moves, program.pid())
}

/// Like `both_end`, for a program that can always be drained.
#[track_caller]
fn both_end_and_drain(words: &str) {
    let ends = both_end(words);
    assert!(!ends.is_empty() && ends.iter().all(|end| end == "release"), "`{words}`: drains ended with {ends:?}");
}

/// Like `both_end_and_drain`, for a program that captures and is sometimes idle. Such a program may
/// have released the lock before the revoke.
#[track_caller]
fn both_end_and_take_turns(words: &str) {
    let ends = both_end(words);
    assert!(ends.iter().all(|end| end == "release"), "`{words}`: drains ended with {ends:?}");
}

#[test]
fn a_stream_wait_ends_by_a_later_write_of_the_same_thread() {
    both_end("host-waits --how write --rounds 2 --pause-ms 600");
}

/// The streams are blocking streams. If the library recorded an event in the legacy stream, the
/// write would have to wait for the stream that waits for the write.
#[test]
fn a_stream_wait_ends_by_a_later_write_in_a_blocking_stream() {
    both_end("host-waits --how write --blocking 1 --rounds 2 --pause-ms 600");
}

#[test]
fn a_stream_wait_ends_by_a_later_copy_of_the_same_thread() {
    both_end("host-waits --how copy --rounds 2 --pause-ms 600");
}

#[test]
fn a_stream_wait_ends_by_a_write_in_a_batch_operation() {
    both_end("host-waits --how batch --rounds 2 --pause-ms 600");
}

#[test]
fn a_drain_waits_for_a_value_written_by_a_host_thread() {
    both_end_and_drain("host-waits --how thread --rounds 2 --pause-ms 600");
}

#[test]
fn a_host_function_may_wait_for_a_mutex_of_a_thread_at_the_gate() {
    both_end("host-waits --how lock --rounds 2 --pause-ms 600");
}

#[test]
fn a_stream_callback_may_wait_for_a_mutex_of_a_thread_at_the_gate() {
    both_end("host-waits --how callback --rounds 2 --pause-ms 600");
}

#[test]
fn a_kernel_may_wait_for_a_thread_that_copies() {
    both_end("proxy --mem 16M --rounds 3 --steps 10");
}

#[test]
#[ignore = "whether a moment between two kernels is caught is chance"]
fn a_program_drains_between_kernels_that_wait_for_copies() {
    let ends = both_end("proxy --mem 4M --rounds 100 --steps 6");
    let released = ends.iter().filter(|end| *end == "release").count();
    assert!(released > ends.len() / 2, "drains ended with {ends:?}");
}

#[test]
fn a_drain_waits_for_a_graph_that_the_host_ends() {
    both_end_and_drain("endless --seconds 1 --graph 1");
}

#[test]
fn captures_in_global_mode_survive_revokes() {
    both_end_and_take_turns("captures --rounds 4 --capture-ms 400 --mode global");
}

#[test]
fn captures_in_thread_local_mode_survive_revokes() {
    both_end_and_take_turns("captures --rounds 4 --capture-ms 400 --mode thread-local");
}

#[test]
fn captures_in_relaxed_mode_survive_revokes() {
    both_end_and_take_turns("captures --rounds 4 --capture-ms 400 --mode relaxed");
}

#[test]
fn a_capture_of_a_destroyed_stream_blocks_no_program() {
    both_end_and_take_turns("open-captures --how stream --rounds 20 --pause-ms 50");
}

#[test]
fn a_capture_of_a_destroyed_context_blocks_no_program() {
    both_end_and_take_turns("open-captures --how context --rounds 20 --pause-ms 50");
}

#[test]
fn green_contexts_take_turns() {
    both_end_and_drain("green --mem 32M --rounds 8");
}

/// Destroying the context ends the capture, so memory can be evicted afterwards.
#[test]
fn destroying_a_capturing_green_context_ends_its_capture() {
    let machine = Machine::with_scheduler(Setup { memory: 128 * MIB, anti_thrash: "on", ..Setup::default() });
    let mut program = machine.program("green --mem 60M --rounds 100000 --leaves-capture 1").start();
    machine.wait_for_grants(&program, 1);
    machine.program("mix --mem 90M --reps 3 --rounds 3").start().finish();
    assert!(program.poll().is_none());
    program.kill();
}

#[test]
fn a_green_context_without_a_primary_context_takes_turns() {
    both_end_and_drain("green --mem 32M --rounds 8 --primary 0");
}

// ---- programs that wait for each other ---------------------------------------------------------------------------

#[test]
fn a_drain_waits_for_events_of_another_process() {
    both_end("pair --how event --rounds 8");
}

/// Runs two processes that wait for each other, beside an independent neighbour.
#[track_caller]
fn pair(words: &str, gang: &[(&str, &str)]) {
    let machine = Machine::with_scheduler(strict());
    let mut neighbour = machine.program(NEIGHBOUR).start();
    machine.wait_for_grants(&neighbour, 1);
    let mut pair = machine.program(words);
    for (name, value) in gang {
        pair = pair.env(name, value);
    }
    let mut pair = pair.start();
    let other = pair.finish().number("other") as u32;
    neighbour.end();
    let moves = machine.moves();
    for pid in [pair.pid(), other] {
        assert!(grants(&moves, pid) >= 1);
    }
    assert!(grants(&moves, neighbour.pid()) >= 1);
    machine.wait_until_empty();
}

#[test]
fn members_of_a_gang_that_wait_for_each_other_run_together() {
    pair("pair --how value --rounds 60", &[("NVSHARE_GANG", "pair")]);
}

/// Sets the environment that PyTorch's launcher sets. Between two rounds, both processes release
/// the lock.
#[test]
fn processes_of_a_launcher_form_a_gang() {
    let torchrun =
        [("TORCHELASTIC_RUN_ID", "none"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500"), ("WORLD_SIZE", "2")];
    pair("pair --how value --rounds 60", &torchrun);
}

#[test]
fn a_gang_member_rejoins_after_a_pause() {
    pair("pair --how value --rounds 20 --pause-ms 50", &[("NVSHARE_GANG", "pair")]);
}

#[test]
fn two_programs_that_wait_for_each_other_progress_without_a_gang() {
    pair("pair --how value --rounds 3", &[]);
}

// ---- work that never drains ----------------------------------------------------------------------------------------

/// Asserts that a client is shown as stuck if its work doesn't end within the time that the
/// scheduler allows for a drain (3 s), and that other clients then run beside the stuck client.
#[track_caller]
fn is_scheduled_around(words: &str) {
    let machine = Machine::with_scheduler(strict());
    let mut endless = machine.program(words).start();
    wait_for("its kernel to run", || endless.stderr().contains("running").then_some(()));
    let mut neighbour = machine.program("mix --mem 16M --reps 4 --rounds 10").start();
    wait_for("it to be shown as stuck", || {
        let status = machine.status();
        let clients = status["clients"].as_array().expect("clients");
        clients.iter().any(|c| c.to_string().contains("stuck")).then_some(())
    });
    neighbour.finish();
    assert_eq!(endless.poll(), None, "it runs all the while");
    endless.end();
    machine.wait_until_empty();
}

#[test]
fn an_endless_kernel_is_shown_and_other_programs_run() {
    is_scheduled_around("endless --seconds 600");
}

#[test]
fn an_endless_graph_is_shown_and_other_programs_run() {
    is_scheduled_around("endless --seconds 600 --graph 1");
}

// ---- work that the library has not seen --------------------------------------------------------------------------

/// Kernels that were launched past the hooks run longer than all work that the library knows of.
/// The kernels' memory stays mapped until the kernels end.
#[track_caller]
fn unseen_work_keeps_its_memory(machine: &Machine) {
    let mut neighbour = machine.program("mix --mem 40M --reps 8 --rounds endless").start();
    machine.wait_for_grants(&neighbour, 1);
    let mut program = machine.program("unseen --mem 32M --rounds 3 --ms 400 --pause-ms 600").start();
    program.finish();
    let moves = machine.moves();
    let left = moves.iter().filter(|m| m.pid == program.pid() && m.what == "freed").count();
    assert!(left > 0, "it never had to give memory");
    neighbour.kill();
    machine.wait_until_empty();
}

#[test]
fn memory_of_untracked_work_stays_on_the_gpu() {
    unseen_work_keeps_its_memory(&Machine::with_scheduler(Setup { memory: 64 * MIB, ..strict() }));
}

/// Simulates a driver before 12.5, which has no context events.
#[test]
fn memory_of_untracked_work_stays_on_the_gpu_with_an_old_driver() {
    let setup = Setup { memory: 64 * MIB, without: "cuCtxRecordEvent", ..strict() };
    unseen_work_keeps_its_memory(&Machine::with_scheduler(setup));
}
