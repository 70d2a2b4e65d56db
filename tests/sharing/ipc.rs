//! CUDA IPC: one program exports memory and another program opens it, both under nvshare on the
//! simulated GPU.

use std::fs;
use std::path::PathBuf;

use test_support::machine::*;

const SHARED: u64 = 24 * MIB;

/// A GPU that cannot hold the pair and a third program at the same time.
fn pressed() -> Setup {
    Setup { memory: 160 * MIB, anti_thrash: "on", ..Setup::default() }
}

struct Pair {
    file: PathBuf,
    words: String,
}

impl Pair {
    fn new(machine: &Machine, words: &str) -> Self {
        let file = machine.path("meeting");
        Self { words: format!("--file {} {words}", file.display()), file }
    }

    fn exporter<'a>(&self, machine: &'a Machine, more: &str) -> Launch<'a> {
        machine.program(&format!("share --role export {} {more}", self.words))
    }

    fn importer<'a>(&self, machine: &'a Machine, more: &str) -> Launch<'a> {
        machine.program(&format!("share --role import {} {more}", self.words))
    }

    /// Waits until the exporter has written its handles.
    fn wait_until_exported(&self) {
        wait_for("handles", || {
            let words = fs::read(&self.file).ok()?;
            words.get(..4).is_some_and(|count| count != [0; 4]).then_some(())
        });
    }
}

/// The path of a file whose creation a program waits for.
fn mark(machine: &Machine, name: &str) -> String {
    machine.path(name).display().to_string()
}

#[track_caller]
fn reached(path: &str) {
    wait_for(&format!("a program to wait for {path}"), || fs::exists(format!("{path}.reached")).ok()?.then_some(()));
}

fn make(path: &str) {
    fs::write(path, "").expect("a file");
}

/// The program's pinned bytes, as the scheduler counts them.
fn pinned(machine: &Machine, program: &Program) -> u64 {
    let status = machine.status();
    let clients = status["clients"].as_array().expect("clients");
    let of = clients.iter().find(|client| number(&client["pid"]) == u64::from(program.pid()));
    of.map_or(0, |client| client["gpus"].as_array().expect("GPUs").iter().map(|g| number(&g["pinned"])).sum())
}

#[track_caller]
fn wait_for_pinned(machine: &Machine, program: &Program, bytes: u64) {
    wait_for(&format!("{bytes} pinned bytes of {}", program.name), || {
        (pinned(machine, program) == bytes).then_some(())
    });
}

#[test]
fn the_test_program_works_without_nvshare() {
    let machine = Machine::new(Setup::default());
    let pair = Pair::new(&machine, "--count 3 --mem 4M --rounds 3");
    let mut exporter = pair.exporter(&machine, "").without_nvshare().start();
    let mut importer = pair.importer(&machine, "").without_nvshare().start();
    assert_eq!(importer.finish().number("imported"), 3);
    exporter.finish();
}

#[test]
fn ipc_handles_of_the_driver_are_passed_to_the_driver() {
    let machine = Machine::with_scheduler(Setup::default());
    let pair = Pair::new(&machine, "--rounds 3");
    let mut exporter = pair.exporter(&machine, "").env("NVSHARE_ENGINE", "none").start();
    let mut importer = pair.importer(&machine, "").start();
    assert_eq!(importer.finish().number("imported"), 1);
    exporter.finish();
    machine.wait_until_empty();
}

#[test]
fn two_programs_share_memory_while_private_memory_is_swapped() {
    let machine = Machine::with_scheduler(pressed());
    let pair = Pair::new(&machine, &format!("--mem {SHARED} --private 56M --rounds 8"));
    let mut third = machine.program("mix --mem 64M --chunks 4 --reps 3 --rounds endless").start();
    let mut exporter = pair.exporter(&machine, "").start();
    let mut importer = pair.importer(&machine, "").start();
    importer.finish();
    exporter.finish();
    third.end();
    let moves = machine.moves();
    for program in [&exporter, &importer] {
        let freed: u64 = moves.iter().filter(|m| m.pid == program.pid() && m.what == "freed").map(|m| m.bytes).sum();
        assert!(freed > 0, "nothing of `{}` was swapped", program.name);
    }
    machine.wait_until_empty();
}

/// Many small allocations share a slab. The descriptors of the large allocation's chunks do not fit
/// in one answer.
#[test]
fn slab_and_many_chunk_allocations_can_be_imported() {
    let machine = Machine::with_scheduler(Setup { memory: 512 * MIB, ..Setup::default() });
    for (count, mem) in [(40, 60_000), (1, 200 * MIB)] {
        let pair = Pair::new(&machine, &format!("--count {count} --mem {mem} --rounds 2"));
        let mut exporter = pair.exporter(&machine, "").start();
        let mut importer = pair.importer(&machine, "").start();
        assert_eq!(importer.finish().number("imported"), count);
        exporter.finish();
        fs::remove_file(&pair.file).expect("the meeting place");
    }
    machine.wait_until_empty();
}

#[test]
fn a_thousand_handles_can_be_imported() {
    let machine = Machine::with_scheduler(Setup { memory: 512 * MIB, ..Setup::default() });
    let pair = Pair::new(&machine, "--count 1000 --mem 20000 --rounds 1");
    let mut exporter = pair.exporter(&machine, "").quiet().start();
    let mut importer = pair.importer(&machine, "").quiet().start();
    assert_eq!(importer.finish().number("imported"), 1000);
    exporter.finish();
    machine.wait_until_empty();
}

/// Closed memory leaves the GPU for other programs, and returns when it is opened again.
#[test]
fn memory_moves_again_once_its_last_importer_has_closed_it() {
    let machine = Machine::with_scheduler(pressed());
    let (hold, reopen) = (mark(&machine, "hold"), mark(&machine, "reopen"));
    let pair = Pair::new(&machine, &format!("--mem {SHARED} --private 8M --rounds 2"));
    let mut exporter = pair.exporter(&machine, &format!("--hold {hold}")).start();
    let mut importer = pair.importer(&machine, &format!("--reopen {reopen}")).start();
    reached(&reopen);
    wait_for_pinned(&machine, &exporter, 0);
    // The third program leaves room for less than the shared memory.
    let mut third = machine.program("mix --mem 136M --chunks 4 --reps 3 --rounds endless").start();
    wait_for("the shared memory to leave", || {
        let status = machine.status();
        let client = status["clients"].as_array()?.iter().find(|client| client["pid"] == exporter.pid())?.clone();
        (number(&client["gpus"][0]["resident"]) < 8 * MIB).then_some(())
    });
    make(&reopen);
    importer.finish();
    make(&hold);
    exporter.finish();
    third.end();
    machine.wait_until_empty();
}

#[test]
fn memory_moves_again_once_its_last_importer_has_ended() {
    let machine = Machine::with_scheduler(pressed());
    let (hold, keep) = (mark(&machine, "hold"), mark(&machine, "keep"));
    let pair = Pair::new(&machine, &format!("--mem {SHARED} --rounds 2"));
    let mut exporter = pair.exporter(&machine, &format!("--hold {hold}")).start();
    let mut importer = pair.importer(&machine, &format!("--keep {keep}")).start();
    reached(&keep);
    assert_eq!(pinned(&machine, &exporter), SHARED, "it is open");
    importer.kill();
    wait_for_pinned(&machine, &exporter, 0);
    make(&hold);
    exporter.finish();
    machine.wait_until_empty();
}

/// A scheduler that has started since then may not know all importers.
#[test]
fn memory_opened_under_an_earlier_scheduler_stays_on_the_gpu() {
    let mut machine = Machine::with_scheduler(pressed());
    let (hold, keep) = (mark(&machine, "hold"), mark(&machine, "keep"));
    let pair = Pair::new(&machine, &format!("--mem {SHARED} --rounds 2"));
    let mut exporter = pair.exporter(&machine, &format!("--hold {hold}")).start();
    let mut importer = pair.importer(&machine, &format!("--keep {keep}")).start();
    reached(&keep);
    machine.kill_scheduler();
    machine.start_scheduler();
    wait_for_pinned(&machine, &exporter, SHARED);
    make(&keep);
    importer.finish();
    assert_eq!(pinned(&machine, &exporter), SHARED);
    make(&hold);
    exporter.finish();
    machine.wait_until_empty();
}

#[test]
fn exporting_evicted_memory_restores_it() {
    let machine = Machine::with_scheduler(Setup { memory: 128 * MIB, anti_thrash: "on", ..Setup::default() });
    let pair = Pair::new(&machine, &format!("--mem {SHARED} --private 40M --rounds 2"));
    // The exporter fills its memory and waits until another program's demand has evicted it.
    let export = mark(&machine, "export");
    let mut exporter = pair.exporter(&machine, &format!("--filled {export}")).start();
    reached(&export);
    let mut other = machine.program("mix --mem 100M --chunks 4 --reps 3 --rounds endless").start();
    machine.wait_for_move(0, "an eviction", |m| m.pid == exporter.pid() && m.what == "freed");
    make(&export);
    let mut importer = pair.importer(&machine, "--private 4M").start();
    exporter.finish();
    importer.finish();
    other.end();
    machine.wait_until_empty();
}

#[test]
fn a_handle_with_a_wrong_secret_cannot_be_opened() {
    let machine = Machine::with_scheduler(Setup::default());
    let pair = Pair::new(&machine, "--rounds 1");
    let mut exporter = pair.exporter(&machine, "").start();
    pair.wait_until_exported();
    // The spoiled bytes are in the exporter's name, the secret, the number of the allocation, and
    // the range.
    for byte in [8, 24, 48, 56] {
        pair.importer(&machine, &format!("--spoil {byte} --expect 1")).start().finish();
    }
    pair.importer(&machine, "").start().finish();
    exporter.finish();
}

#[test]
fn a_handle_of_freed_memory_cannot_be_opened() {
    let machine = Machine::with_scheduler(Setup::default());
    let stay = mark(&machine, "stay");
    let pair = Pair::new(&machine, "--rounds 0");
    let mut exporter = pair.exporter(&machine, &format!("--stay {stay}")).start();
    reached(&stay); // the exporter has freed the memory
    pair.importer(&machine, "--expect 1").start().finish();
    exporter.kill();
    pair.importer(&machine, "--expect 1").start().finish();
    machine.wait_until_empty();
}

#[test]
fn importing_from_a_stopped_exporter_times_out() {
    let machine = Machine::with_scheduler(Setup::default());
    let pair = Pair::new(&machine, "--rounds 1");
    let mut exporter = pair.exporter(&machine, "").start();
    pair.wait_until_exported();
    machine.stop_beside_work(&exporter);
    pair.importer(&machine, "--expect 205").start().finish();
    exporter.signal(libc::SIGCONT);
    pair.importer(&machine, "").start().finish();
    exporter.finish();
    machine.wait_until_empty();
}

#[test]
fn exported_memory_is_counted_until_its_last_importer_closes_it() {
    let machine = Machine::with_scheduler(Setup::default());
    let (keep, stay) = (mark(&machine, "keep"), mark(&machine, "stay"));
    let pair = Pair::new(&machine, &format!("--mem {SHARED} --rounds 2"));
    let mut exporter = pair.exporter(&machine, &format!("--stay {stay}")).start();
    pair.wait_until_exported();
    wait_for_pinned(&machine, &exporter, SHARED);
    let mut importer = pair.importer(&machine, &format!("--keep {keep}")).start();
    reached(&keep);
    reached(&stay);
    // The exporter has freed the memory, so the memory is charged to the importer now.
    wait_for_pinned(&machine, &importer, SHARED);
    wait_for_pinned(&machine, &exporter, 0);
    exporter.kill();
    make(&keep);
    importer.finish();
    machine.wait_until_empty();
}

#[test]
fn memory_pinned_for_two_reasons_is_counted_once() {
    let machine = Machine::with_scheduler(pressed());
    let pair = Pair::new(&machine, "--count 3 --mem 8M --private 64M --rounds 3");
    let stay = mark(&machine, "stay");
    let mut exporter = pair.exporter(&machine, &format!("--sync 1 --stay {stay}")).start();
    pair.wait_until_exported();
    wait_for_pinned(&machine, &exporter, SHARED);
    pair.importer(&machine, "").start().finish();
    reached(&stay);
    wait_for_pinned(&machine, &exporter, 0);
    make(&stay);
    exporter.finish();
}

#[test]
fn a_killed_exporter_leaves_its_memory_to_the_importer() {
    let machine = Machine::with_scheduler(Setup::default());
    let (keep, end) = (mark(&machine, "keep"), mark(&machine, "end"));
    let pair = Pair::new(&machine, &format!("--mem {SHARED}"));
    let mut exporter = pair.exporter(&machine, "--rounds 1000000").start();
    pair.wait_until_exported();
    let mut importer = pair.importer(&machine, &format!("--rounds 0 --keep {keep} --stay {end}")).start();
    reached(&keep);
    assert_eq!((pinned(&machine, &exporter), pinned(&machine, &importer)), (SHARED, 0), "it is counted once");
    exporter.kill();
    wait_for_pinned(&machine, &importer, SHARED);
    importer.kill();
    machine.wait_until_empty();
}

#[test]
fn a_killed_importer_does_not_affect_the_exporter() {
    let machine = Machine::with_scheduler(Setup::default());
    let pair = Pair::new(&machine, &format!("--mem {SHARED} --rounds 3"));
    let keep = mark(&machine, "keep");
    let mut exporter = pair.exporter(&machine, "").start();
    pair.wait_until_exported();
    let mut importer = pair.importer(&machine, &format!("--rounds 0 --keep {keep}")).start();
    reached(&keep);
    importer.kill();
    pair.importer(&machine, "").start().finish();
    exporter.finish();
    machine.wait_until_empty();
}

#[test]
fn a_restarted_scheduler_learns_of_shared_memory() {
    restarted_scheduler_learns_of_shared_memory(Machine::with_scheduler(Setup::default()));
}

#[test]
fn a_restarted_scheduler_learns_of_shared_memory_on_kept_connections() {
    restarted_scheduler_learns_of_shared_memory(Machine::with_manager(Setup::default()));
}

fn restarted_scheduler_learns_of_shared_memory(mut machine: Machine) {
    let (keep, stay) = (mark(&machine, "keep"), mark(&machine, "stay"));
    let pair = Pair::new(&machine, &format!("--mem {SHARED} --rounds 1"));
    let mut exporter = pair.exporter(&machine, &format!("--stay {stay}")).start();
    pair.wait_until_exported();
    machine.kill_scheduler();
    machine.start_scheduler();
    // The importer still finds the exporter by its name, and the exported memory is still pinned.
    let mut importer = pair.importer(&machine, &format!("--keep {keep}")).start();
    reached(&keep);
    reached(&stay);
    wait_for_pinned(&machine, &importer, SHARED);
    machine.kill_scheduler();
    machine.start_scheduler();
    wait_for_pinned(&machine, &importer, SHARED);
    make(&stay);
    exporter.finish();
    make(&keep);
    importer.finish();
    machine.wait_until_empty();
}

/// Destroying a context closes the memory that was opened in it, except memory that work of another
/// context uses.
#[test]
fn closed_memory_stays_while_work_of_another_context_uses_it() {
    let machine = Machine::with_scheduler(Setup::default());
    let pair = Pair::new(&machine, "--mem 8M --rounds 2");
    let mut exporter = pair.exporter(&machine, "").start();
    let mut importer = pair.importer(&machine, "--other-context 1").start();
    assert_eq!(importer.finish().number("imported"), 1);
    exporter.finish();
    machine.wait_until_empty();
}
