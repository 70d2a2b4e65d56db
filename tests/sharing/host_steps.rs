//! GPU work that waits for a step of another host thread, which calls the library to take that
//! step. The library must complete this call without waiting for the GPU work.

use std::{
    fs,
    os::{
        fd::{FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    thread,
    time::Duration,
};

use test_support::cgroup::Limited;
use test_support::machine::*;

/// A GPU that cannot hold two programs of 60 MiB at the same time.
fn pressed() -> Setup {
    Setup { memory: 128 * MIB, anti_thrash: "on", ..Setup::default() }
}

/// A limit that exceeds the running time of each program here.
const PATIENCE: Duration = Duration::from_secs(60);

#[track_caller]
fn ends(program: &mut Program) {
    let what = format!("`{}` to end", program.name);
    wait_within(PATIENCE, &what, || program.poll());
    program.finish();
}

#[test]
fn a_context_can_be_destroyed_while_its_work_waits_for_a_turn() {
    let machine = Machine::with_scheduler(pressed());
    let mut worker = machine.program("mix --mem 60M --reps 4 --rounds endless").start();
    machine.wait_for_grants(&worker, 1);
    let mut program = machine.program("host-step --how destroy --mem 60M").start();
    ends(&mut program);
    assert!(worker.poll().is_none());
    worker.kill();
    machine.wait_until_empty();
}

#[test]
fn launches_blocked_by_a_full_queue_hold_no_lock() {
    let machine = Machine::with_scheduler(Setup::default());
    let mut program = machine.program("host-step --how fill").start();
    ends(&mut program);
    machine.wait_until_empty();
}

/// The client's thread samples the utilization while another program waits. A sample records an event in
/// each stream, for which the full queue has no room.
#[test]
fn a_full_queue_does_not_block_the_clients_thread() {
    let machine = Machine::with_scheduler(pressed());
    let mut program = machine.program("host-step --how fill").start();
    machine.wait_for_grants(&program, 1);
    let mut other = machine.program("mix --mem 8M --reps 4 --rounds endless").start();
    ends(&mut program);
    machine.wait_for_grants(&other, 1);
    other.end();
    machine.wait_until_empty();
}

/// A driver call that unregisters host memory blocks until running work ends, and may block other
/// calls too. So no such call is made before the kernel ends.
#[test]
fn host_memory_is_freed_after_a_kernel_that_waits_for_the_host() {
    let Some(group) = Limited::new(&format!("nvshare-steps-{}", std::process::id()), 4 << 30) else { return };
    let machine = Machine::with_scheduler(pressed());
    let words = "host-step --how allocate --mem 60M --before-ms 600000 --pause-ms 600000 --after-ms 600000";
    // The library adds a line to the trace for each call that may block.
    let program = machine.program_in(&group.procs(), words).env("LIBNVSHARE_WAITING_CALLS", "/dev/stderr");
    let mut program = program.start();
    machine.wait_for_grants(&program, 1);
    // The program's memory is evicted and restored, and the host keeps copies.
    let mut other = machine.program("mix --mem 60M --reps 3 --rounds 2").start();
    other.finish();
    machine.wait_for_move(0, "its memory to have left", |m| m.pid == program.pid() && m.what == "freed");
    program.signal(libc::SIGUSR1);
    program.wait_to_say("the kernel runs");
    group.set_limit(group.used() + 2 * MIB);
    let freed = |text: &str, trace: &str| trace.split("the kernel runs").nth(1).is_some_and(|rest| rest.contains(text));
    wait_for("the library to free buffers", || freed("freeing host buffers", &program.stderr()).then_some(()));
    group.set_limit(4 << 30);
    program.signal(libc::SIGUSR1);
    wait_within(PATIENCE, "the program to check its results", || {
        program.stderr().contains("the results are right").then_some(())
    });
    const CALL: &str = "\tcuMemHostUnregister\t";
    wait_for("the driver to be called", || freed(CALL, &program.stderr()).then_some(()));
    let trace = program.stderr();
    let during = trace.split("the kernel ").nth(1).expect("it ran");
    assert!(during.starts_with("runs") && !during.contains(CALL), "a call waits for the kernel: {during}");
    assert!(!trace.contains("wrong\t"), "{trace}");
    program.kill();
    machine.wait_until_empty();
}

/// No program lacks memory, but the library frees the host buffers of restored memory after a long
/// rest.
#[test]
#[ignore = "takes more than three minutes, as the library waits for so long"]
fn host_memory_at_rest_is_freed_while_a_kernel_waits_for_the_host() {
    let machine = Machine::with_scheduler(pressed());
    let mut program = machine.program("host-step --how allocate --mem 60M --before-ms 5000 --pause-ms 190000").start();
    machine.wait_for_grants(&program, 1);
    let mut other = machine.program("mix --mem 60M --reps 3 --rounds 2").start();
    other.finish();
    machine.wait_for_move(0, "its memory to have left", |m| m.pid == program.pid() && m.what == "freed");
    wait_within(Duration::from_secs(260), "it to end", || program.poll());
    program.finish();
    machine.wait_until_empty();
}

#[test]
fn memory_allocated_during_a_capture_is_resident() {
    let machine = Machine::with_scheduler(Setup { memory: 128 * MIB, ..Setup::default() });
    for how in ["captured", "named"] {
        machine.program(&format!("capture-allocs --mem 40M --rounds 20 --how {how}")).start().finish();
    }
    machine.wait_until_empty();
}

#[test]
fn memory_allocated_during_a_capture_is_evicted_from_running_clients() {
    let machine = Machine::with_scheduler(pressed());
    let mut holder = machine.program("mix --mem 90M --reps 4 --rounds endless").start();
    machine.wait_for_grants(&holder, 1);
    machine.program("capture-allocs --mem 60M --rounds 10 --how captured --pause-ms 100").start().finish();
    machine.program("capture-allocs --mem 60M --rounds 5 --how named --pause-ms 100").start().finish();
    assert!(holder.poll().is_none());
    holder.kill();
    machine.wait_until_empty();
}

/// The program has opened a device file through which a network card can reach GPU memory. So its
/// memory stays resident although the program launches nothing.
#[test]
fn memory_accessible_to_a_network_card_is_resident_when_allocated() {
    // SAFETY: `geteuid` has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return test_support::skip("root, to mount device files");
    }
    const DEVICES: &str = "mkdir \"$1\" && mount --rbind /dev \"$1\" && mount -t tmpfs none /dev && mkdir /dev/infiniband /dev/shm && \
                           : > /dev/infiniband/uverbs0 && ln -s \"$1/null\" /dev/null && shift && exec \"$@\" 9< /dev/infiniband/uverbs0";
    let machine = Machine::with_scheduler(pressed());
    let mut holder = machine.program("mix --mem 90M --reps 4 --rounds endless").start();
    machine.wait_for_grants(&holder, 1);
    let (devices, program) = (machine.path("dev"), test_support::artifact("cuda-program"));
    let (devices, program) = (devices.display().to_string(), program.display().to_string());
    let script = ["--mount", "--propagation", "private", "sh", "-ec", DEVICES, "sh", &devices, &program];
    let words = ["capture-allocs", "--how", "reached", "--mem", "60M", "--rounds", "3", "--pause-ms", "100"];
    machine.command("unshare".as_ref(), &[&script[..], &words[..]].concat()).start().finish();
    assert!(holder.poll().is_none());
    holder.kill();
    machine.wait_until_empty();
}

/// Before driver 12.5, a thread waits for a context whenever the scheduler evicts a program whose
/// work the library cannot see. A repeated eviction must not add a second thread.
#[test]
fn on_an_old_driver_only_one_thread_waits_for_a_context() {
    let machine = Machine::with_scheduler(Setup { without: "cuCtxRecordEvent", ..pressed() });
    let mut program = machine.program("unseen --mem 60M --rounds 1 --ms 12000 --pause-ms 100").start();
    machine.wait_for_grants(&program, 1);
    let mut other = machine.program("mix --mem 90M --reps 2 --rounds 2").start();
    machine.wait_for_move(0, "its memory to be asked for", |m| m.pid == program.pid() && m.what == "stuck");
    let waiting = |pid: u32| {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
        let name = |task: fs::DirEntry| fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        tasks
            .flatten()
            .filter(|task| task.path().exists())
            .map(name)
            .filter(|name| name.trim() == "nvshare-idle")
            .count()
    };
    let most = (0..60).map(|_| {
        thread::sleep(Duration::from_millis(100));
        if program.poll().is_none() { waiting(program.pid()) } else { 0 }
    });
    assert_eq!(most.max(), Some(1));
    program.finish();
    other.finish();
    machine.wait_until_empty();
}

/// A kernel that does not end must not keep the client's thread, which copies the memory without
/// fingerprints then.
#[test]
fn an_eviction_does_not_wait_for_a_hung_fingerprint_kernel() {
    let machine = Machine::with_scheduler(pressed());
    let words = "mix --mem 60M --reps 3 --rounds 2 --cpu-ms 600000";
    let mut program = machine.program(words).env("CUDA_SIM_FINGERPRINT_TIME", "8000").start();
    program.wait_to_say("round 0 is over"); // it is idle from now on
    let mut other = machine.program("mix --mem 60M --reps 3 --rounds 2").start();
    program.wait_to_say("the fingerprint kernel does not finish");
    other.finish();
    assert!(!program.stderr().contains("computed fingerprints"));
    program.end();
    machine.wait_until_empty();
}

/// Creates a socket at this path that never answers. The kernel still accepts connections to it.
fn silent_daemon(path: &Path) -> OwnedFd {
    let bytes = path.as_os_str().as_bytes();
    // SAFETY: `sockaddr_un` is plain old data, the calls read a valid address, and only the
    // returned `OwnedFd` owns the new socket.
    unsafe {
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        address.sun_family = libc::AF_UNIX as _;
        address.sun_path.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from as _);
        let socket = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
        assert_eq!(libc::bind(socket, (&raw const address).cast(), size_of_val(&address) as u32), 0);
        assert_eq!(libc::listen(socket, 64), 0);
        OwnedFd::from_raw_fd(socket)
    }
}

/// The longest pause between two attempts to connect to a daemon, in seconds.
const RETRY: f64 = 2.0;

/// True if the client thread of a program restored memory during an attempt to connect: after the
/// attempt had begun and before the attempt failed.
fn restores_during_an_attempt(program: &Program) -> bool {
    let (mut failed, mut is_restored) = (None::<f64>, false);
    for line in program.stderr().lines() {
        let time = || line.split(' ').nth(1)?.parse::<f64>().ok();
        if line.contains("it does not answer") {
            if is_restored {
                return true;
            }
            failed = time();
        } else if line.contains(" bytes came back in ") {
            is_restored |= failed.zip(time()).is_some_and(|(failed, at)| at > failed + RETRY + 0.5);
        }
    }
    false
}

/// Without a scheduler, the client thread moves memory in many steps. An attempt to connect must
/// not delay these steps.
#[test]
fn daemon_that_does_not_answer_does_not_delay_moves() {
    let mut machine = Machine::with_scheduler(pressed());
    let words = "mix --mem 60M --reps 3 --rounds endless";
    let mut programs = [machine.program(words).start(), machine.program(words).start()];
    wait_for("memory to have moved", || (evicted(&machine.moves()) > 0).then_some(()));
    machine.kill_scheduler();
    let _ = fs::remove_file(machine.socket());
    let _daemon = silent_daemon(&machine.socket());
    wait_for("memory to come back during an attempt to connect", || {
        programs.iter().any(restores_during_an_attempt).then_some(())
    });
    programs.iter_mut().for_each(Program::kill);
}
