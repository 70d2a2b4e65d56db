//! A host, or a control group, without room for what is to be swapped out: what cannot leave stays, others make room or wait,
//! and nobody is killed for it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use test_support::machine::*;

const SHARE: u64 = 64 * MIB;

/// A control group that limits memory; it goes away with the test.
struct Group {
    path: PathBuf,
    limit: &'static str,
}

impl Group {
    /// `None`, with a line that says so, where none can be made.
    fn new() -> Option<Self> {
        let name = format!("nvshare-test-{}", std::process::id());
        let root = Path::new("/sys/fs/cgroup");
        let of_version_2 = fs::read_to_string(root.join("cgroup.subtree_control")).is_ok_and(|c| c.contains("memory"));
        let (parent, limit) = match of_version_2 {
            true => (root.to_owned(), "memory.max"),
            false => (root.join("memory"), "memory.limit_in_bytes"),
        };
        let group = Self { path: parent.join(name), limit };
        if fs::create_dir(&group.path).is_ok() && group.path.join(limit).exists() {
            return Some(group);
        }
        eprintln!("skipped: no control group for memory can be made here");
        None
    }

    fn set(&self, bytes: u64) {
        fs::write(self.path.join(self.limit), bytes.to_string()).expect("a limit");
    }

    fn used(&self) -> u64 {
        let file = if self.limit == "memory.max" { "memory.current" } else { "memory.usage_in_bytes" };
        fs::read_to_string(self.path.join(file)).expect("a figure").trim().parse().expect("a number")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its processes have been waited for; the kernel may need a moment.
        wait_for("the control group to go", || fs::remove_dir(&self.path).is_ok().then_some(()));
    }
}

#[test]
fn what_a_full_control_group_has_no_room_for_stays_on_the_gpu() {
    let Some(group) = Group::new() else { return };
    let machine = Machine::with_scheduler(Setup { memory: 128 * MIB, anti_thrash: "on", ..Setup::default() });
    let mix = |rounds: u32| format!("mix --mem {SHARE} --chunks 4 --reps 3 --rounds {rounds}");
    let mut inside = machine.program_in(&group.path.join("cgroup.procs"), &mix(1_000_000)).start();
    machine.wait_for_grants(&inside, 1);
    // The simulated GPU's memory is the process' own: what it has by now is no matter, only what comes on top.
    wait_for("all of it to be there", || (group.used() >= SHARE).then_some(()));
    group.set(group.used() + 8 * MIB);
    let mut other = machine.program(&mix(4)).start();
    wait_for("status to say why its memory stays", || {
        let status = machine.status();
        let clients = status["clients"].as_array().expect("clients").clone();
        let named = clients.into_iter().find(|client| client["pid"] == inside.pid())?;
        (named["gpus"][0]["eviction-blocked"] == "host memory is full").then_some(())
    });
    assert!(inside.poll().is_none() && other.poll().is_none(), "nobody ends for it");
    group.set(1 << 40);
    other.finish();
    assert!(inside.poll().is_none());
    inside.kill();
    machine.wait_until_empty();
}

#[test]
#[ignore = "takes more than three minutes, as the library waits for so long"]
fn host_memory_at_rest_is_given_back_and_what_is_in_it_is_not_lost() {
    let machine = Machine::with_scheduler(Setup { memory: 128 * MIB, anti_thrash: "on", ..Setup::default() });
    let words = format!("mix --mem {SHARE} --chunks 4 --reps 3 --rounds 1 --cpu-ms 190000");
    let mut programs: Vec<Program> = (0..2).map(|_| machine.program(&words).start()).collect();
    machine.wait_for_move(0, "somebody to make room", |m| m.what == "freed");
    // One has its memory in the host meanwhile, the other has what it would need to make room.
    wait_within(Duration::from_secs(200), "one to tidy up", || {
        programs.iter().any(|p| p.stderr().contains("idle host memory")).then_some(())
    });
    let before = machine.trace().len();
    for program in &mut programs {
        wait_within(Duration::from_secs(60), "it to end", || program.poll());
        program.finish();
    }
    let moved = machine.trace()[before..].iter().any(|m| m.what == "mapped");
    assert!(moved, "what was in the host came back");
    machine.wait_until_empty();
}
