//! Locking, checkpointing and restoring another process, which is called the companion.

use crate::support::*;
use cuda_sim_gpus::{
    Config,
    account::Figures,
    trouble::{self, Stranger},
};
use std::{
    io::{BufRead, BufReader, Lines, Write},
    process::{Child, ChildStdout},
    thread,
    time::{Duration, Instant},
};

const M: usize = 1 << 20;
const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
const NOT_INITIALIZED: u32 = 3;
const OPERATING_SYSTEM: u32 = 304;
const ILLEGAL_STATE: u32 = 401;
const NOT_READY: u32 = 600;
const NOT_SUPPORTED: u32 = 801;
const RUNNING: u32 = 0;
const LOCKED: u32 = 1;
const CHECKPOINTED: u32 = 2;
const FAILED: u32 = 3;
const MACHINE: &[(&str, &str)] = &[
    ("CUDA_SIM_MEMORY", "128M"),
    ("CUDA_SIM_CONTEXT", "16M"),
    ("CUDA_SIM_GPUS", "2"),
    ("CUDA_SIM_LINK_BANDWIDTH", "8G"),
];

/// Runs the companion. The companion has a context and 32 MiB with a value, and executes one
/// command per line of its input.
fn target() {
    let _gpu = Gpu::open();
    let at = alloc(32 * M);
    assert_eq!(cu("cuMemsetD32_v2", &[at as usize, 7, 8 * M]), 0);
    let stream = get("cuStreamCreate", &[0]);
    println!("\ndone 0");
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let code = match line.as_str() {
            "read" => read(at + 16 * M as u64),
            "sync" => cu("cuCtxSynchronize", &[]),
            "work" => {
                // This memory is never written, so work that waits for it never ends.
                let never = get("cuMemHostAlloc", &[4096, 2]);
                cu("cuStreamWaitValue32_v2", &[0, never, 1, 0])
            }
            "managed" => {
                let mut at = 0_usize;
                cu("cuMemAllocManaged", &[&raw mut at as usize, M, 1])
            }
            "export" => {
                let mut handle = [0_u64; 8];
                cu("cuIpcGetMemHandle", &[handle.as_mut_ptr() as usize, at as usize])
            }
            "alloc" => {
                let mut at = 0_usize;
                cu("cuMemAlloc_v2", &[&raw mut at as usize, 32 * M])
            }
            "bus" => get("cuDeviceGetAttribute", &[33, 0]) as u32,
            "uuid" => {
                let mut uuid = [0_u8; 16];
                assert_eq!(cu("cuDeviceGetUuid", &[uuid.as_mut_ptr() as usize, 0]), 0);
                u32::from_ne_bytes(uuid[..4].try_into().expect("four bytes"))
            }
            "bus id" => u32::from(bus_id()[6]),
            "device of its bus id" => {
                let id = bus_id();
                let mut device = 9_i32;
                assert_eq!(cu("cuDeviceGetByPCIBusId", &[&raw mut device as usize, id.as_ptr() as usize]), 0);
                device as u32
            }
            "device of its context" => get("cuCtxGetDevice", &[]) as u32,
            "free" => {
                let (mut free, mut total) = (0_usize, 0_usize);
                assert_eq!(cu("cuMemGetInfo_v2", &[&raw mut free as usize, &raw mut total as usize]), 0);
                (free / M) as u32
            }
            "use stream" => {
                let code = cu("cuMemsetD32Async", &[at as usize, 7, 8 * M, stream]);
                code.max(cu("cuStreamSynchronize", &[stream]))
            }
            other => panic!("what is {other}?"),
        };
        println!("\ndone {code}");
    }
}

fn bus_id() -> [u8; 32] {
    let mut id = [0; 32];
    assert_eq!(cu("cuDeviceGetPCIBusId", &[id.as_mut_ptr() as usize, 32, 0]), 0);
    id
}

struct Target {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Target {
    fn start(test: &str) -> Target {
        let mut child = companion(test, "target");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut target = Target { child, lines };
        assert_eq!(target.result(), 0);
        target
    }

    fn pid(&self) -> usize {
        self.child.id() as usize
    }

    fn tell(&mut self, command: &str) {
        writeln!(self.child.stdin.as_mut().expect("piped"), "{command}").expect("it is running");
    }

    fn result(&mut self) -> u32 {
        let mut lines = self.lines.by_ref().map_while(Result::ok);
        let code = lines.find_map(|line| Some(line.strip_prefix("done ")?.to_owned()));
        code.expect("an answer").parse().expect("a number")
    }

    fn does(&mut self, command: &str) -> u32 {
        self.tell(command);
        self.result()
    }

    fn state(&self) -> u32 {
        let mut state = 9_u32;
        assert_eq!(cu("cuCheckpointProcessGetState", &[self.pid(), &raw mut state as usize]), 0);
        state
    }

    fn lock(&self, timeout_ms: u64) -> u32 {
        lock(self.pid(), timeout_ms)
    }

    fn call(&self, name: &str) -> u32 {
        cu(&format!("cuCheckpointProcess{name}"), &[self.pid(), 0])
    }

    /// Restores the process. The memory of the first GPU of each pair goes to the second GPU.
    fn restore_on(&self, pairs: &[(usize, usize)]) -> u32 {
        let uuid = |gpu| Config::get().uuid(gpu);
        let pairs: Vec<[[u8; 16]; 2]> = pairs.iter().map(|(old, new)| [uuid(*old), uuid(*new)]).collect();
        let args: [usize; 8] = [pairs.as_ptr() as usize, pairs.len(), 0, 0, 0, 0, 0, 0];
        cu("cuCheckpointProcessRestore", &[self.pid(), args.as_ptr() as usize])
    }
}

fn lock(pid: usize, timeout_ms: u64) -> u32 {
    let args: [u64; 8] = [timeout_ms, 0, 0, 0, 0, 0, 0, 0];
    cu("cuCheckpointProcessLock", &[pid, args.as_ptr() as usize])
}

fn used(gpu: usize) -> usize {
    Figures::of(gpu).used(gpu) as usize / M
}

/// The memory of a process on a GPU in MiB.
fn bytes_of(pid: usize, gpu: usize) -> usize {
    let processes = Figures::of(gpu).processes;
    let of_it = processes.iter().find(|process| process.pid_here() as usize == pid).expect("it has memory somewhere");
    of_it.gpus[gpu].plain as usize / M
}

fn with_target(test: &'static str, body: impl FnOnce(Target)) {
    isolated(test, MACHINE, || {
        if role().is_some() {
            return target();
        }
        body(Target::start(test));
    });
}

#[test]
fn a_checkpoint_frees_all_memory_and_a_restore_returns_it() {
    with_target("checkpoint::a_checkpoint_frees_all_memory_and_a_restore_returns_it", |mut target| {
        assert_eq!((target.state(), used(0)), (RUNNING, 48));
        assert_eq!((target.lock(0), target.state(), used(0)), (0, LOCKED, 48));
        assert_eq!((target.call("Checkpoint"), target.state(), used(0)), (0, CHECKPOINTED, 0));
        assert_eq!(target.call("Restore"), NOT_INITIALIZED, "nothing keeps the driver loaded");
        assert_eq!(cu("cuInit", &[0]), 0);
        assert_eq!((target.call("Restore"), target.state(), used(0)), (0, LOCKED, 48));
        assert_eq!((target.call("Unlock"), target.state()), (0, RUNNING));
        assert_eq!((target.does("read"), target.does("alloc"), used(0)), (7, 0, 80));
    });
}

#[test]
fn calls_of_a_locked_process_wait_for_the_unlock() {
    with_target("checkpoint::calls_of_a_locked_process_wait_for_the_unlock", |mut target| {
        assert_eq!(target.lock(0), 0);
        target.tell("alloc");
        thread::sleep(Duration::from_millis(100));
        assert_eq!(used(0), 48, "it waits");
        assert_eq!((target.call("Unlock"), target.result(), used(0)), (0, 0, 80));
    });
}

#[test]
fn each_checkpoint_step_requires_its_state() {
    with_target("checkpoint::each_checkpoint_step_requires_its_state", |target| {
        assert_eq!(cu("cuInit", &[0]), 0);
        let steps = || ["Checkpoint", "Restore", "Unlock"].map(|name| target.call(name));
        assert_eq!(steps(), [ILLEGAL_STATE; 3]);
        assert_eq!((target.lock(0), target.lock(0), target.call("Restore")), (0, ILLEGAL_STATE, ILLEGAL_STATE));
        assert_eq!(target.call("Checkpoint"), 0);
        let wrong = ["Checkpoint", "Unlock"].map(|name| target.call(name));
        assert_eq!((wrong, target.lock(0)), ([ILLEGAL_STATE; 2], ILLEGAL_STATE));
        assert_eq!((target.call("Restore"), target.call("Unlock")), (0, 0));
        let reserved: [u64; 8] = [0, 0, 0, 1, 0, 0, 0, 0];
        assert_eq!(cu("cuCheckpointProcessLock", &[target.pid(), reserved.as_ptr() as usize]), INVALID_VALUE);
    });
}

#[test]
fn a_lock_waits_for_unfinished_work_until_the_timeout() {
    with_target("checkpoint::a_lock_waits_for_unfinished_work_until_the_timeout", |mut target| {
        assert_eq!(target.does("work"), 0);
        let begin = Instant::now();
        assert_eq!((target.lock(200), target.state()), (NOT_READY, RUNNING));
        assert!(begin.elapsed() >= Duration::from_millis(200));
        assert_eq!(target.does("alloc"), 0, "it goes on");
    });
}

#[test]
fn managed_and_shared_memory_are_not_supported() {
    for what in ["managed", "export"] {
        with_target("checkpoint::managed_and_shared_memory_are_not_supported", |mut target| {
            assert_eq!(target.does(what), 0);
            assert_eq!((target.lock(0), target.call("Checkpoint")), (0, NOT_SUPPORTED));
            assert_eq!((target.state(), target.call("Unlock"), target.does("read")), (LOCKED, 0, 7));
        });
    }
}

#[test]
fn a_restore_without_room_is_final() {
    with_target("checkpoint::a_restore_without_room_is_final", |mut target| {
        assert_eq!(cu("cuInit", &[0]), 0);
        assert_eq!((target.lock(0), target.call("Checkpoint")), (0, 0));
        target.tell("alloc");
        let stranger = Stranger { bytes: 100 << 20, pid: None, is_graphics: false };
        trouble::set_strangers(&simulated_machine(), 0, &[stranger]).expect("a file");
        assert_eq!((target.call("Restore"), target.state(), used(0)), (OUT_OF_MEMORY, FAILED, 100));
        trouble::set_strangers(&simulated_machine(), 0, &[]).expect("no file");
        let all = ["Checkpoint", "Restore", "Unlock"].map(|name| target.call(name));
        assert_eq!((all, target.lock(0)), ([OPERATING_SYSTEM; 3], OPERATING_SYSTEM));
        assert_eq!((target.result(), target.does("sync")), (OPERATING_SYSTEM, OPERATING_SYSTEM));
    });
}

#[test]
fn a_process_can_be_restored_on_another_gpu() {
    with_target("checkpoint::a_process_can_be_restored_on_another_gpu", |mut target| {
        assert_eq!(cu("cuInit", &[0]), 0);
        let bus = target.does("bus");
        assert_eq!((target.lock(0), target.call("Checkpoint")), (0, 0));
        assert_eq!(target.restore_on(&[(0, 1)]), INVALID_VALUE, "every GPU has to be named");
        assert_eq!(target.restore_on(&[(0, 1), (1, 1)]), INVALID_VALUE, "no two on the same");
        assert_eq!((target.restore_on(&[(0, 1), (1, 0)]), target.call("Unlock")), (0, 0));
        assert_eq!((used(0), used(1), target.does("read"), target.does("bus")), (0, 48, 7, bus + 1));
        assert_eq!((target.does("alloc"), used(1)), (0, 80));
        assert_eq!((target.lock(0), target.call("Checkpoint")), (0, 0));
        assert_eq!((target.restore_on(&[(1, 0), (0, 1)]), target.call("Unlock")), (0, 0));
        assert_eq!((used(0), used(1), target.does("read"), target.does("bus")), (80, 0, 7, bus));
    });
}

/// Devices keep their numbers and bus IDs. Each device has the UUID of the GPU to which its memory
/// was moved. Earlier handles stay valid.
#[test]
fn a_moved_process_sees_the_other_gpu_under_its_device() {
    with_target("checkpoint::a_moved_process_sees_the_other_gpu_under_its_device", |mut target| {
        assert_eq!(cu("cuInit", &[0]), 0);
        let uuid = |gpu| u32::from_ne_bytes(Config::get().uuid(gpu)[..4].try_into().expect("four bytes"));
        assert_ne!(uuid(0), uuid(1));
        // Foreign memory makes the free bytes of the two GPUs differ.
        let stranger = Stranger { bytes: 8 << 20, pid: None, is_graphics: false };
        trouble::set_strangers(&simulated_machine(), 1, &[stranger]).expect("a file");
        let bus = target.does("bus id");
        for (from, to, free) in [(0, 1, 72), (1, 0, 80)] {
            assert_eq!(target.does("uuid"), uuid(from));
            assert_eq!((target.lock(0), target.call("Checkpoint")), (0, 0));
            assert_eq!((target.restore_on(&[(from, to), (to, from)]), target.call("Unlock")), (0, 0));
            assert_eq!((target.does("uuid"), target.does("free")), (uuid(to), free));
            assert_eq!((target.does("bus id"), target.does("device of its bus id")), (bus, 0));
            assert_eq!(target.does("device of its context"), 0);
            assert_eq!((target.does("use stream"), target.does("read")), (0, 7));
            assert_eq!((bytes_of(target.pid(), to), bytes_of(target.pid(), from)), (48, 0));
        }
    });
}

#[test]
fn a_thread_id_names_its_process_but_foreign_pids_are_rejected() {
    with_target("checkpoint::a_thread_id_names_its_process_but_foreign_pids_are_rejected", |target| {
        let mut thread = 0_i32;
        let at = &raw mut thread as usize;
        assert_eq!(cu("cuCheckpointProcessGetRestoreThreadId", &[target.pid(), at]), 0);
        assert_ne!(thread as usize, target.pid());
        assert_eq!((lock(thread as usize, 0), target.state()), (0, LOCKED));
        assert_eq!((lock(1, 0), lock(0, 0)), (INVALID_VALUE, INVALID_VALUE));
    });
}

#[test]
fn a_killed_process_frees_its_memory_and_a_stopped_one_blocks_locks() {
    let test = "checkpoint::a_killed_process_frees_its_memory_and_a_stopped_one_blocks_locks";
    with_target(test, |target| {
        let pid = target.pid();
        // SAFETY: `kill` takes no pointers, and the process is a child that has not been waited
        // for.
        assert_eq!(unsafe { libc::kill(pid as i32, libc::SIGSTOP) }, 0);
        let asking = thread::spawn(move || lock(pid, 10));
        thread::sleep(Duration::from_millis(200));
        assert!(!asking.is_finished(), "the process itself does it");
        drop(target);
        assert_eq!((asking.join().expect("an answer"), used(0)), (INVALID_VALUE, 0));
    });
}
