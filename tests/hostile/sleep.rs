//! Programs that are put to sleep by the test's fake scheduler and by another process.

use std::thread;
use std::time::{Duration, Instant};

use nvshare_wire::{
    ClientMessage, Moves, SchedulerMessage, Uuid,
    client::{LeaveAnswer, SleepRefusal},
    scheduler::PAUSED,
    version,
};
use test_support::machine::*;

use crate::fake::{Fake, MEMORY, TICK, machine, stays_for};

/// The outcome of a preparation.
#[derive(Debug, PartialEq, Eq)]
enum Prepared {
    Ready,
    Refused(SleepRefusal),
}

impl Fake<'_> {
    /// Answers a program's messages, and returns its next message about sleep.
    fn next_of_sleep(&mut self) -> Option<ClientMessage> {
        self.return_if_away();
        if self.accept() {
            self.welcome(version::MAX);
        }
        while let Some(message) = self.receive() {
            match message {
                ClientMessage::Attach { slot, .. } => self.provide(slot),
                ClientMessage::Request { gpus } if !self.grants_nothing => self.say(SchedulerMessage::Grant { gpus }),
                ClientMessage::SleepReady {} | ClientMessage::SleepRefused { .. } | ClientMessage::Wake {} => {
                    return Some(message);
                }
                _ => {}
            }
        }
        thread::sleep(TICK);
        None
    }

    fn prepare(&mut self, program: &mut Program) -> Prepared {
        self.prepare_with(0, program)
    }

    fn prepare_with(&mut self, flags: u32, program: &mut Program) -> Prepared {
        self.say(SchedulerMessage::PrepareSleep { flags });
        wait_for("an answer", || {
            assert_eq!(program.poll(), None, "`{}` ended", program.name);
            match self.next_of_sleep()? {
                ClientMessage::SleepReady {} => Some(Prepared::Ready),
                ClientMessage::SleepRefused { why } => Some(Prepared::Refused(why)),
                other => panic!("{other:?}"),
            }
        })
    }

    fn wait_for_wake(&mut self) {
        wait_for("a wish to be woken", || match self.next_of_sleep()? {
            ClientMessage::Wake {} => Some(()),
            other => panic!("{other:?}"),
        });
    }

    /// Serves the program until it is prepared, however often it refuses.
    fn prepare_at_last(&mut self, program: &mut Program) {
        wait_for("it to be prepared", || match self.prepare(program) {
            Prepared::Ready => Some(()),
            Prepared::Refused(why) => {
                assert_eq!(why, SleepRefusal::Busy);
                self.serve_for(Duration::from_millis(5));
                None
            }
        });
    }

    fn serve_for(&mut self, time: Duration) {
        let begin = Instant::now();
        while begin.elapsed() < time {
            self.next_of_sleep();
        }
    }
}

/// Checkpoints or restores the program. Returns `false` if the driver fails.
fn checkpoint(machine: &Machine, program: &Program, to: &str) -> bool {
    let words = format!("checkpoints --pid {} --to {to}", program.pid());
    machine.program(&words).without_nvshare().start().wait().success()
}

fn naps(machine: &Machine, words: &str, lookup: &str) -> Program {
    machine.program(&format!("naps --mem 8M {words}")).env("CUDA_LOOKUP", lookup).start()
}

/// Puts a program to sleep and wakes it `TIMES` times. The program then ends with correct results.
fn sleeps_often(lookup: &str) {
    const TIMES: u32 = 34;
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = naps(&machine, "--seconds 600 --pause-ms 100", lookup);
    fake.serve_until_granted(&mut program);
    for _ in 0..TIMES {
        fake.prepare_at_last(&mut program);
        assert!(checkpoint(&machine, &program, "asleep"), "it was locked");
        fake.wait_for_wake();
        assert!(checkpoint(&machine, &program, "awake"), "it is back");
        fake.say(SchedulerMessage::Awake { moved: Moves::default() });
        fake.serve_for(Duration::from_millis(20));
    }
    program.signal(libc::SIGUSR1);
    fake.serve_to_the_end(&mut program);
    program.finish();
}

#[test]
fn a_program_linked_to_the_driver_sleeps_often() {
    sleeps_often("link");
}

#[test]
fn a_program_that_uses_dlsym_sleeps_often() {
    sleeps_often("dlsym");
}

#[test]
fn a_program_that_uses_cugetprocaddress_sleeps_often() {
    sleeps_often("getproc");
}

/// Kills a program that sleeps and makes no calls. Nothing of the program is left.
#[test]
fn a_program_killed_asleep_leaves_no_memory() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = naps(&machine, "--seconds 600 --pause-ms 400", "link");
    fake.serve_until_granted(&mut program);
    fake.prepare_at_last(&mut program);
    assert!(checkpoint(&machine, &program, "asleep"));
    program.kill();
    wait_for("the memory", || (machine.free() >= 2 * MEMORY).then_some(()));
}

/// Waiting threads continue when the scheduler reports that the sleep didn't happen.
#[test]
fn a_program_continues_after_a_cancelled_sleep() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = naps(&machine, "--seconds 600 --pause-ms 50", "link");
    fake.serve_until_granted(&mut program);
    for _ in 0..5 {
        fake.prepare_at_last(&mut program);
        fake.wait_for_wake();
        fake.say(SchedulerMessage::Awake { moved: Moves::default() });
        fake.serve_for(Duration::from_millis(50));
    }
    program.signal(libc::SIGUSR1);
    fake.serve_to_the_end(&mut program);
    program.finish();
}

/// The scheduler disappears while the program sleeps. The next scheduler learns of the sleep, wakes
/// the program, and then receives its other messages.
/// Welcomes a sleeping program that has connected again, and serves it until its end.
#[track_caller]
fn wake_after_return(machine: &Machine, fake: &mut Fake, mut program: Program) {
    let hello = wait_for("a greeting", || fake.receive());
    let ClientMessage::Hello { flags, .. } = hello else { panic!("{hello:?}") };
    assert_eq!(flags & nvshare_wire::client::ASLEEP, nvshare_wire::client::ASLEEP, "{hello:?}");
    fake.welcome(version::MAX);
    let attach = wait_for("its GPU", || fake.receive());
    assert!(matches!(attach, ClientMessage::Attach { slot: 0, .. }), "{attach:?}");
    fake.provide(0);
    fake.wait_for_wake();
    assert!(checkpoint(machine, &program, "awake"));
    fake.say(SchedulerMessage::Awake { moved: Moves::default() });
    program.signal(libc::SIGUSR1);
    fake.serve_to_the_end(&mut program);
    program.finish();
}

#[test]
fn the_next_scheduler_wakes_a_sleeping_program() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = naps(&machine, "--seconds 600 --pause-ms 200", "link");
    fake.serve_until_granted(&mut program);
    fake.prepare_at_last(&mut program);
    assert!(checkpoint(&machine, &program, "asleep"));
    fake.vanish();
    thread::sleep(Duration::from_secs(1));
    fake.return_if_away();
    wait_for("it to return", || fake.accept().then_some(()));
    wake_after_return(&machine, &mut fake, program);
}

/// A sleeping program leaves its scheduler, so that it can be saved to disk. A unit test of the library
/// checks that the time for which the program is stopped does not count.
#[test]
fn a_program_that_leaves_returns_when_it_runs_again() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = naps(&machine, "--seconds 600 --pause-ms 200", "link");
    fake.serve_until_granted(&mut program);
    fake.prepare_at_last(&mut program);
    assert!(checkpoint(&machine, &program, "asleep"));
    let connections = sockets(&program);
    fake.say(SchedulerMessage::Leave {});
    wait_for("its departure", || {
        matches!(fake.receive(), Some(ClientMessage::Leaving { answer: LeaveAnswer::Leaves })).then_some(())
    });
    wait_for("a closed connection", || {
        assert_eq!(fake.receive(), None, "`Leaving` is the last message");
        (sockets(&program) == connections - 1).then_some(())
    });
    // Beside much other load, the program may have run for a second before it is stopped.
    program.signal(libc::SIGSTOP);
    thread::sleep(Duration::from_millis(200));
    let is_back = fake.accept();
    program.signal(libc::SIGCONT);
    wait_for("it to return", || (is_back || fake.accept()).then_some(()));
    wake_after_return(&machine, &mut fake, program);
}

/// The number of sockets that a program has open.
fn sockets(program: &Program) -> usize {
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", program.pid())).expect("its descriptors").flatten();
    let targets = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

/// The scheduler disappears permanently after the preparation, before any process has locked the
/// program.
#[test]
fn an_unlocked_program_continues_without_the_scheduler() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = naps(&machine, "--seconds 600 --pause-ms 100", "link");
    fake.serve_until_granted(&mut program);
    fake.prepare_at_last(&mut program);
    fake.wait_for_wake();
    fake.vanish();
    program.signal(libc::SIGUSR1);
    program.finish();
}

/// The scheduler disappears while the program is off the GPU. The program continues when another
/// process restores it, and not before.
#[test]
fn a_program_restored_by_another_process_continues() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = naps(&machine, "--seconds 600 --pause-ms 100", "link");
    fake.serve_until_granted(&mut program);
    fake.prepare_at_last(&mut program);
    assert!(checkpoint(&machine, &program, "asleep"));
    fake.wait_for_wake();
    fake.vanish();
    program.signal(libc::SIGUSR1);
    stays_for(&mut program, Duration::from_secs(12));
    assert!(checkpoint(&machine, &program, "awake"));
    program.finish();
}

/// A program that exits while it sleeps is woken for its exit.
#[test]
fn an_exit_requests_a_wake() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = naps(&machine, "--seconds 600 --pause-ms 300 --exit 7", "link");
    fake.serve_until_granted(&mut program);
    fake.prepare_at_last(&mut program);
    program.signal(libc::SIGUSR1);
    fake.wait_for_wake();
    fake.say(SchedulerMessage::Awake { moved: Moves::default() });
    fake.serve_to_the_end(&mut program);
    assert_eq!(program.wait().code(), Some(7));
}

/// A program exits while it sleeps, and no scheduler wakes it.
#[test]
fn an_exit_without_a_scheduler_does_not_hang() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = naps(&machine, "--seconds 600 --pause-ms 300 --exit 7", "link");
    fake.serve_until_granted(&mut program);
    fake.prepare_at_last(&mut program);
    program.signal(libc::SIGUSR1);
    fake.wait_for_wake();
    fake.vanish();
    assert_eq!(program.wait().code(), Some(7));
}

/// A paused program sleeps although some of its threads wait for the lock or before a driver call.
#[test]
fn a_paused_program_sleeps_despite_waiting_threads() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = naps(&machine, "--seconds 600 --pause-ms 0", "link");
    fake.serve_until_granted(&mut program);
    fake.grants_nothing = true;
    fake.say(SchedulerMessage::Revoke { gpus: 1 });
    wait_for("threads at the gate", || {
        fake.next_of_sleep();
        program.stderr().trim_end().lines().rev().take(40).any(|line| line.contains("→ Request {")).then_some(())
    });
    assert_eq!(fake.prepare(&mut program), Prepared::Refused(SleepRefusal::Busy));
    fake.say(SchedulerMessage::Allowance { slot: 0, seq: fake.seq + 1, bytes: 0 });
    assert_eq!(fake.prepare_with(PAUSED, &mut program), Prepared::Ready);
    assert!(checkpoint(&machine, &program, "asleep"));
    fake.wait_for_wake();
    assert!(checkpoint(&machine, &program, "awake"));
    fake.grants_nothing = false;
    fake.say(SchedulerMessage::Awake { moved: Moves::default() });
    fake.say(SchedulerMessage::Allowance { slot: 0, seq: fake.seq + 2, bytes: MEMORY });
    fake.say(SchedulerMessage::Grant { gpus: 1 });
    program.signal(libc::SIGUSR1);
    fake.serve_to_the_end(&mut program);
    program.finish();
}

/// A scheduler may get no answer in time, for example because the process was stopped. The
/// scheduler still waits for that answer before it makes another request.
#[test]
fn a_cancelled_sleep_request_is_still_answered() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = naps(&machine, "--seconds 600 --pause-ms 5", "link");
    fake.serve_until_granted(&mut program);
    for _ in 0..50 {
        fake.say(SchedulerMessage::PrepareSleep { flags: 0 });
        fake.say(SchedulerMessage::Awake { moved: Moves::default() });
        wait_for("an answer", || {
            assert_eq!(program.poll(), None);
            match fake.next_of_sleep()? {
                ClientMessage::SleepReady {} | ClientMessage::SleepRefused { .. } => Some(()),
                other => panic!("{other:?}"),
            }
        });
    }
    program.signal(libc::SIGUSR1);
    fake.serve_to_the_end(&mut program);
    program.finish();
}

/// A message that arrives during the preparation is carried out, and doesn't interfere with the
/// preparation.
#[test]
fn messages_during_the_preparation_do_not_prevent_sleep() {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = naps(&machine, "--seconds 600 --pause-ms 400", "link");
    fake.serve_until_granted(&mut program);
    let is_ready = |fake: &mut Fake, program: &mut Program| {
        fake.say(SchedulerMessage::PrepareSleep { flags: 0 });
        for n in 1..200 {
            let (seq, bytes) = (fake.seq + n, MEMORY - u64::from(n) * 4096);
            fake.say(SchedulerMessage::Limit { slot: 0, bytes, seq, most: MEMORY, spare: u64::MAX, max: 0 });
        }
        fake.seq += 200;
        wait_for("an answer", || {
            assert_eq!(program.poll(), None);
            match fake.next_of_sleep()? {
                ClientMessage::SleepReady {} => Some(true),
                ClientMessage::SleepRefused { why: SleepRefusal::Busy } => Some(false),
                other => panic!("{other:?}"),
            }
        })
    };
    wait_for("it to be prepared", || is_ready(&mut fake, &mut program).then_some(()));
    assert!(checkpoint(&machine, &program, "asleep"));
    fake.wait_for_wake();
    assert!(checkpoint(&machine, &program, "awake"));
    fake.say(SchedulerMessage::Awake { moved: Moves::default() });
    let (slot, seq) = (0, fake.seq + 1);
    fake.say(SchedulerMessage::Limit { slot, bytes: MEMORY, seq, most: MEMORY, spare: u64::MAX, max: 0 });
    program.signal(libc::SIGUSR1);
    fake.serve_to_the_end(&mut program);
    program.finish();
}

/// Starts a program that can no longer sleep after it has printed `ready`, and checks the reason.
fn refuses(words: &str, environment: Option<(&str, &str)>, expected: SleepRefusal) {
    let machine = machine();
    let mut fake = Fake::new(&machine);
    let mut program = machine.program(words);
    if let Some((name, value)) = environment {
        program = program.env(name, value);
    }
    let mut program = program.start();
    fake.serve_until_granted(&mut program);
    let begin = Instant::now();
    loop {
        match fake.prepare(&mut program) {
            Prepared::Refused(why) if why == expected => return,
            answer => assert!(begin.elapsed() < PATIENCE, "`{words}`: {answer:?}"),
        }
        fake.say(SchedulerMessage::Awake { moved: Moves::default() });
        fake.serve_for(Duration::from_millis(2));
    }
}

const WORK: &str = "mix --mem 8M --chunks 2 --reps 2 --rounds endless --cpu-ms 5";

#[test]
fn a_program_with_managed_memory_refuses_to_sleep() {
    refuses(&format!("{WORK} --kind managed"), None, SleepRefusal::Managed);
}

#[test]
fn a_program_with_the_managed_engine_refuses_to_sleep() {
    refuses(WORK, Some(("NVSHARE_ENGINE", "managed")), SleepRefusal::Managed);
}

#[test]
fn a_program_without_an_engine_refuses_to_sleep() {
    refuses(WORK, Some(("NVSHARE_ENGINE", "none")), SleepRefusal::Immovable);
}

#[test]
fn a_program_with_driver_allocated_memory_refuses_to_sleep() {
    refuses(&format!("{WORK} --kind async"), Some(("NVSHARE_MOVABLE_POOLS", "0")), SleepRefusal::Immovable);
}

#[test]
fn a_gang_member_refuses_to_sleep() {
    refuses(WORK, Some(("NVSHARE_GANG", "pair")), SleepRefusal::Gang);
}

#[test]
fn a_busy_program_refuses_to_sleep() {
    refuses("mix --mem 8M --reps 2 --rounds endless", None, SleepRefusal::Busy);
}

fn two_gpus() -> Machine {
    let simulator = vec![("CUDA_SIM_GPUS", "2".to_owned())];
    Machine::new(Setup { memory: 2 * MEMORY, context: 2 * MIB, simulator, ..Setup::default() })
}

/// The UUIDs of both GPUs.
fn uuids(machine: &Machine) -> [Uuid; 2] {
    [0, 1].map(|gpu| {
        let report = machine.program(&format!("info --device {gpu}")).without_nvshare().start().finish();
        let text = report.0["uuid"].as_str().and_then(|text| text.strip_prefix("GPU-")).expect("a UUID").to_owned();
        Uuid::parse(&text).expect("a UUID")
    })
}

/// Restores the program with the memory of the two GPUs exchanged.
fn exchange(machine: &Machine, program: &Program) -> bool {
    let words = format!("checkpoints --pid {} --to awake --on 1,0", program.pid());
    machine.program(&words).without_nvshare().start().wait().success()
}

fn both_ways([a, b]: [Uuid; 2]) -> Moves {
    Moves::new([(a, b), (b, a)]).expect("two fit")
}

/// A program's final report of the GPUs that it was on.
fn text_of(gpus: &[Uuid]) -> String {
    gpus.iter().map(|gpu| format!("GPU-{gpu}")).collect::<Vec<_>>().join(",")
}

/// Repeatedly exchanges the machine's two GPUs while a program on these GPUs sleeps. After each
/// exchange, the program tells a new scheduler its present GPUs.
fn changes_gpus(gpus: &[usize], visible: Option<&str>) {
    let machine = two_gpus();
    let both = uuids(&machine);
    let mut fake = Fake::new(&machine);
    let ordinals: Vec<String> = (0..gpus.len()).map(|ordinal| ordinal.to_string()).collect();
    let words = format!("naps --mem 8M --seconds 600 --pause-ms 100 --gpus {}", ordinals.join(","));
    let program = machine.program(&words);
    let program = visible.into_iter().fold(program, |program, list| program.env("CUDA_VISIBLE_DEVICES", list));
    let mut program = program.start();
    fake.serve_until_granted(&mut program);
    let places = |times: usize| gpus.iter().map(move |gpu| both[(gpu + times) % 2]);
    wait_for("it to name its GPUs", || {
        fake.serve();
        fake.named.values().copied().eq(places(0)).then_some(())
    });
    for times in 1..=5 {
        fake.prepare_at_last(&mut program);
        assert!(checkpoint(&machine, &program, "asleep"));
        fake.wait_for_wake();
        assert!(exchange(&machine, &program));
        fake.say(SchedulerMessage::Awake { moved: both_ways(both) });
        fake.serve_for(Duration::from_millis(300));
        assert!(fake.named.values().copied().eq(places(times - 1)), "it has no reason to name them again");
        for (gpu, used) in [0, 1].map(|gpu| (gpu, places(times).any(|uuid| uuid == both[gpu]))) {
            let free = machine.free_on(gpu);
            assert_eq!(free < machine.setup.memory - machine.setup.context, used, "{free} bytes are free on GPU {gpu}");
        }
        fake.vanish();
        wait_for("it to return", || {
            fake.serve();
            fake.named.values().copied().eq(places(times)).then_some(())
        });
    }
    program.signal(libc::SIGUSR1);
    fake.serve_to_the_end(&mut program);
    assert_eq!(program.finish().0["uuids"], text_of(&places(5).collect::<Vec<_>>()));
}

#[test]
fn a_program_continues_on_another_gpu() {
    changes_gpus(&[0], None);
}

#[test]
fn a_program_that_sees_one_gpu_continues_on_another() {
    changes_gpus(&[1], Some("1"));
}

#[test]
fn a_program_on_two_gpus_continues_with_the_gpus_exchanged() {
    changes_gpus(&[0, 1], None);
}

/// The driver knows the process's GPU, whatever the scheduler claims. The program reports that GPU
/// to the scheduler.
#[test]
fn a_program_reports_its_real_gpu_after_false_moves() {
    let machine = two_gpus();
    let both = uuids(&machine);
    let mut fake = Fake::new(&machine);
    let mut program = naps(&machine, "--seconds 600 --pause-ms 100", "link");
    fake.serve_until_granted(&mut program);
    let nonsense = Uuid([0xee; 16]);
    let lies = [
        (true, Moves::default()),
        (false, both_ways(both)),
        (true, Moves::new([(both[1], nonsense), (both[1], both[1])]).expect("they fit")),
        (false, Moves::new([(both[0], nonsense); 7]).expect("they fit")),
    ];
    let mut place = 0;
    for (is_moved, moved) in lies {
        fake.prepare_at_last(&mut program);
        assert!(checkpoint(&machine, &program, "asleep"));
        fake.wait_for_wake();
        let is_back = if is_moved { exchange(&machine, &program) } else { checkpoint(&machine, &program, "awake") };
        assert!(is_back);
        place = (place + usize::from(is_moved)) % 2;
        fake.say(SchedulerMessage::Awake { moved });
        fake.named.clear();
        wait_for("it to name its GPU", || {
            fake.serve();
            fake.named.values().copied().eq([both[place]]).then_some(())
        });
    }
    program.signal(libc::SIGUSR1);
    fake.serve_to_the_end(&mut program);
    assert_eq!(program.finish().0["uuids"], text_of(&both[..1]));
}

/// The scheduler moves the program to another GPU, and disappears before it has told the program.
/// The program tells the next scheduler the old GPU first, and then the new GPU.
#[test]
fn a_program_reports_an_unannounced_move_to_the_next_scheduler() {
    let machine = two_gpus();
    let both = uuids(&machine);
    let mut fake = Fake::new(&machine);
    let mut program = naps(&machine, "--seconds 600 --pause-ms 100", "link");
    fake.serve_until_granted(&mut program);
    fake.prepare_at_last(&mut program);
    assert!(checkpoint(&machine, &program, "asleep"));
    fake.wait_for_wake();
    assert!(exchange(&machine, &program));
    fake.vanish();
    wait_for("it to return", || {
        fake.return_if_away();
        fake.accept().then_some(())
    });
    fake.welcome(version::MAX);
    wait_for("its GPU", || {
        fake.receive();
        fake.named.values().copied().eq([both[0]]).then_some(())
    });
    fake.say(SchedulerMessage::Awake { moved: Moves::default() });
    wait_for("its other GPU", || {
        fake.serve();
        fake.named.values().copied().eq([both[1]]).then_some(())
    });
    program.signal(libc::SIGUSR1);
    fake.serve_to_the_end(&mut program);
    assert_eq!(program.finish().0["uuids"], text_of(&both[1..]));
}
