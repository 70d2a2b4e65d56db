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

/// Whether a control group limits what this test's programs may take.
fn is_limited() -> bool {
    let text = fs::read_to_string("/proc/self/cgroup").expect("control groups");
    let limit = |root: &str, group: &Path, file: &str| {
        let path = Path::new(root).join(group.strip_prefix("/").unwrap_or(group)).join(file);
        // What is no number, or beyond any memory, is no limit.
        fs::read_to_string(path).is_ok_and(|text| text.trim().parse().is_ok_and(|bytes: u64| bytes < 1 << 60))
    };
    text.lines().any(|line| match line.splitn(3, ':').collect::<Vec<_>>()[..] {
        [_, "", group] => Path::new(group).ancestors().any(|group| limit("/sys/fs/cgroup", group, "memory.max")),
        [_, "memory", group] => {
            Path::new(group).ancestors().any(|group| limit("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes"))
        }
        _ => false,
    })
}

const PREPARED: &str = "buffers are allocated ahead: true";

#[test]
fn memory_at_rest_has_its_buffers_before_it_has_to_leave() {
    if is_limited() || !Path::new("/proc/pressure/memory").exists() {
        return eprintln!(
            "skipped: the memory of this test's programs is limited, or the kernel does not tell of pressure"
        );
    }
    let machine = Machine::with_scheduler(Setup { memory: 128 * MIB, anti_thrash: "on", ..Setup::default() });
    let mix = |cpu_ms: u32| format!("mix --mem 90M --chunks 4 --reps 3 --rounds 2 --cpu-ms {cpu_ms}");
    let mut idle = machine.program(&mix(6000)).start();
    wait_for("it to prepare", || idle.stderr().contains(PREPARED).then_some(()));
    let mut other = machine.program(&mix(0)).start();
    other.finish();
    assert!(!other.stderr().contains(PREPARED), "it has not been there for long enough");
    machine.wait_for_move(0, "the idle one to make room", |m| m.what == "freed");
    idle.finish();
    machine.wait_until_empty();
}

#[test]
fn where_a_control_group_limits_memory_none_is_taken_ahead() {
    let Some(group) = Group::new() else { return };
    if !Path::new("/proc/pressure/memory").exists() {
        return eprintln!("skipped: the kernel does not tell of pressure");
    }
    group.set(4 << 30);
    let machine = Machine::with_scheduler(Setup { memory: 128 * MIB, anti_thrash: "on", ..Setup::default() });
    let words = "mix --mem 90M --chunks 4 --reps 3 --rounds 2 --cpu-ms 5000";
    let mut idle = machine.program_in(&group.path.join("cgroup.procs"), words).start();
    wait_for("it to be asked", || idle.stderr().contains("\u{2190} Prepare").then_some(()));
    idle.finish();
    let said = idle.stderr();
    assert!(!said.contains(PREPARED), "{said}");
    machine.wait_until_empty();
}
