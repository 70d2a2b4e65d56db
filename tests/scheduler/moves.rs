//! Clients that migrate between GPUs, message by message.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::collections::BTreeMap;
use std::time::Duration;

const CONTEXT: u64 = 512 * MIB;

/// Two GPUs on which memory is measured, and clients with memory on one of them.
struct Scene {
    t: Talk,
    /// The number of the GPU with each client's context.
    contexts: BTreeMap<u64, u64>,
    gpus: u64,
}

impl Scene {
    /// Client 1 has 4 GiB on GPU 0.
    fn new() -> Self {
        let mut t = Talk::new(Settings { context: CONTEXT, reserve: 0, ..settings(AntiThrash::On, ms(1000)) });
        t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
        let mut scene = Self { t, contexts: BTreeMap::new(), gpus: 2 };
        scene.measure();
        scene.join(1, 0, 4 * GIB);
        scene
    }

    fn join(&mut self, n: u64, on: u64, demand: u64) {
        self.t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(n) });
        self.t.say(Event::Attached { client: client(n), gpu: gpu(on), engine: Engine::Swap });
        self.contexts.insert(n, on);
        self.measure();
        self.report(n, demand, 0);
        self.request(n);
        self.map(n);
        self.measure();
        self.map(n);
        self.release(n);
        assert_eq!(self.attachment(n).mapped, demand);
    }

    fn add_gpu(&mut self, n: u64) {
        self.t.say(Event::GpuFound { gpu: gpu(n), total: 16 * GIB });
        self.gpus = self.gpus.max(n + 1);
        self.measure();
    }

    /// Measures the GPUs now. The measurement confirms the clients' reports.
    fn measure(&mut self) -> Vec<Command> {
        self.t.now += ms(1);
        let begun = self.t.now;
        let mut commands = Vec::new();
        for on in 0..self.gpus {
            let bytes = self.contexts.values().filter(|there| **there == on).count() as u64 * CONTEXT;
            commands.extend(self.t.say(Event::GpuOverhead { gpu: gpu(on), begun, bytes, others: 0, complete: true }));
            let there = self.t.machine.clients().into_iter();
            let there = there.flat_map(|c| c.attachments.into_iter().map(move |a| (c.client, a)));
            let there = there.filter(|(_, a)| a.gpu == gpu(on)).map(|(client, a)| (client, a.mapped));
            let found = there.map(|(client, bytes)| (client, Found { least: bytes, most: bytes })).collect();
            commands.extend(self.t.say(Event::Measured { gpu: gpu(on), begun, free: None, evicted: 0, found }));
        }
        commands
    }

    fn attachment(&self, n: u64) -> AttachmentView {
        self.t.attachment(n)
    }

    fn phase(&self, n: u64) -> SleepPhase {
        self.t.machine.sleep_of(client(n)).phase
    }

    fn report(&mut self, n: u64, demand: u64, mapped: u64) -> Vec<Command> {
        let swapped = demand - mapped;
        let report = MemoryReport { ack: u32::MAX, demand, mapped, swapped, pinned: 0, limit_ack: u32::MAX };
        let gpu = self.attachment(n).gpu;
        self.t.say(Event::Memory { client: client(n), gpu, report })
    }

    /// Maps or evicts memory exactly up to the allowance.
    fn map(&mut self, n: u64) -> Vec<Command> {
        let AttachmentView { demand, allowance, .. } = self.attachment(n);
        self.report(n, demand, allowance.min(demand))
    }

    fn request(&mut self, n: u64) -> Vec<Command> {
        let gpus = [self.attachment(n).gpu].into();
        self.t.say(Event::Requested { client: client(n), gpus })
    }

    fn release(&mut self, n: u64) -> Vec<Command> {
        let gpus = [self.attachment(n).gpu].into();
        self.t.say(Event::Released { client: client(n), gpus, reason: ReleaseReason::Idle, busy: Duration::ZERO })
    }

    fn migrate(&mut self, n: u64, from: u64, to: u64) -> Vec<Command> {
        self.t.say(Event::Migrate { client: client(n), from: gpu(from), to: gpu(to) })
    }

    fn helper(&mut self, n: u64, outcome: SleepOutcome) -> Vec<Command> {
        self.t.say(Event::Checkpointed { client: client(n), outcome })
    }

    /// Checkpoints client 1 after it has prepared to sleep.
    fn goes(&mut self) -> Vec<Command> {
        self.map(1);
        assert_eq!(self.t.say(Event::SleepReady { client: client(1) }), [checkpoint(SleepOperation::Sleep, &[])]);
        self.contexts.remove(&1);
        self.helper(1, SleepOutcome::Asleep)
    }

    /// Measures room for the sleeping client 1, which is due to wake. The client's restore begins.
    fn comes(&mut self, moves: &[(u64, u64)]) {
        let commands = [self.measure(), self.measure()].concat();
        assert!(commands.contains(&checkpoint(SleepOperation::Wake, moves)), "{commands:?}");
    }

    /// Returns a scene in which client 1 is being restored on GPU 1.
    fn restoring() -> Self {
        let mut scene = Self::new();
        scene.migrate(1, 0, 1);
        scene.goes();
        scene.comes(&[(0, 1)]);
        scene
    }

    /// Returns a scene in which client 1 sleeps until it requests the GPU.
    fn asleep() -> Self {
        let mut scene = Self::new();
        scene.t.say(Event::SleepWanted { client: client(1), paused: false });
        scene.goes();
        assert_eq!(scene.phase(1), SleepPhase::Asleep);
        scene
    }

    /// Lets client 1 run on that GPU.
    fn runs_on(&mut self, on: u64) {
        self.contexts.insert(1, on);
        self.measure();
        let commands = [self.request(1), self.map(1), self.measure(), self.map(1)].concat();
        assert!(commands.contains(&Command::Grant { client: client(1), gpus: gpus([on]) }), "{commands:?}");
        assert_eq!((self.attachment(1).gpu, self.attachment(1).mapped), (gpu(on), 4 * GIB));
        let attachments = self.t.machine.clients().into_iter().flat_map(|c| c.attachments);
        let others: u64 = attachments.filter(|a| a.gpu == gpu(1 - on)).map(|a| a.committed).sum();
        let view = self.t.machine.gpu(gpu(1 - on)).unwrap();
        assert_eq!(view.committed, others, "it is promised nothing there any more");
    }
}

fn moves(pairs: &[(u64, u64)]) -> Vec<Move> {
    pairs.iter().map(|(from, to)| Move { from: gpu(*from), to: gpu(*to) }).collect()
}

fn checkpoint(operation: SleepOperation, pairs: &[(u64, u64)]) -> Command {
    Command::Checkpoint { client: client(1), operation, moves: moves(pairs) }
}

fn awake(pairs: &[(u64, u64)]) -> Command {
    Command::Awake { client: client(1), moved: moves(pairs) }
}

fn moved(from: u64, to: u64) -> Command {
    Command::Moved { client: client(1), from: gpu(from), to: gpu(to) }
}

fn migrated(from: u64, to: u64, why: Option<MoveObstacle>) -> Command {
    Command::Migrated { client: client(1), from: gpu(from), to: gpu(to), why }
}

const PREPARE: Command = Command::PrepareSleep { client: ClientId(1), paused: true };

#[test]
fn an_idle_client_sleeps_moves_and_wakes() {
    let mut scene = Scene::new();
    let commands = scene.migrate(1, 0, 1);
    assert_eq!(commands.last(), Some(&PREPARE), "{commands:?}");
    let commands = scene.goes();
    assert!(commands.contains(&moved(0, 1)), "{commands:?}");
    let AttachmentView { gpu: on, demand, charge, .. } = scene.attachment(1);
    assert_eq!((on, demand, charge, scene.phase(1)), (gpu(1), 4 * GIB, 0, SleepPhase::Waking));
    scene.comes(&[(0, 1)]);
    let commands = scene.helper(1, SleepOutcome::Runs);
    let at = |command: Command| commands.iter().position(|c| *c == command).unwrap_or_else(|| panic!("{commands:?}"));
    assert!(at(awake(&[(0, 1)])) < at(migrated(0, 1, None)));
    scene.runs_on(1);
    scene.release(1);
    scene.t.say(Event::SleepWanted { client: client(1), paused: false });
    scene.goes();
    scene.t.say(Event::WakeRequested { client: client(1) });
    scene.comes(&[]);
}

#[test]
fn a_busy_client_releases_the_lock_and_resumes_on_the_new_gpu() {
    let mut scene = Scene::new();
    scene.request(1);
    assert_eq!(scene.migrate(1, 0, 1), [revoke(1)]);
    scene.request(1);
    let commands = scene.release(1);
    assert!(commands.contains(&PREPARE) && !commands.contains(&grant(1)), "{commands:?}");
    scene.goes();
    assert_eq!((scene.attachment(1).gpu, scene.attachment(1).state), (gpu(1), LockState::Waiting));
    scene.comes(&[(0, 1)]);
    scene.contexts.insert(1, 1);
    let mut commands = scene.helper(1, SleepOutcome::Runs);
    commands.extend([scene.map(1), scene.measure(), scene.map(1)].concat());
    assert!(commands.contains(&Command::Grant { client: client(1), gpus: gpus([1]) }), "{commands:?}");
}

#[test]
fn a_sleeping_client_moves_immediately_and_stays_asleep() {
    let mut scene = Scene::asleep();
    let commands = scene.migrate(1, 0, 1);
    assert!(commands.contains(&moved(0, 1)) && commands.contains(&migrated(0, 1, None)), "{commands:?}");
    scene.t.after(Duration::from_secs(600));
    assert_eq!((scene.phase(1), scene.attachment(1).gpu), (SleepPhase::Asleep, gpu(1)));
    scene.t.say(Event::WakeRequested { client: client(1) });
    scene.comes(&[(0, 1)]);
    assert!(scene.helper(1, SleepOutcome::Runs).contains(&awake(&[(0, 1)])));
    scene.runs_on(1);
}

#[test]
fn a_client_moved_back_before_it_wakes_counts_as_unmoved() {
    let mut scene = Scene::asleep();
    scene.migrate(1, 0, 1);
    assert!(scene.migrate(1, 1, 0).contains(&moved(1, 0)));
    scene.t.say(Event::WakeRequested { client: client(1) });
    scene.comes(&[]);
    assert!(scene.helper(1, SleepOutcome::Runs).contains(&awake(&[])));
    scene.runs_on(0);
}

#[test]
fn a_client_whose_restore_fails_returns_to_its_old_gpu() {
    for settles in [false, true] {
        let mut scene = Scene::restoring();
        if settles {
            let commands = scene.helper(1, SleepOutcome::Unknown);
            assert!(commands.contains(&checkpoint(SleepOperation::Settle, &[])), "{commands:?}");
        }
        let commands = scene.helper(1, SleepOutcome::Asleep);
        assert!(commands.contains(&moved(1, 0)), "{commands:?}");
        assert!(commands.contains(&migrated(0, 1, Some(MoveObstacle::Failed))), "{commands:?}");
        scene.t.after(Duration::from_secs(1));
        scene.comes(&[]);
        assert!(scene.helper(1, SleepOutcome::Runs).contains(&awake(&[])));
        scene.runs_on(0);
    }
}

#[test]
fn a_client_found_running_after_a_restore_is_on_the_new_gpu() {
    let mut scene = Scene::restoring();
    scene.helper(1, SleepOutcome::Unknown);
    let commands = scene.helper(1, SleepOutcome::Runs);
    assert!(commands.contains(&awake(&[(0, 1)])) && commands.contains(&migrated(0, 1, None)), "{commands:?}");
    scene.runs_on(1);
}

#[test]
fn a_client_that_refuses_to_sleep_continues_on_its_gpu() {
    let mut scene = Scene::new();
    scene.request(1);
    scene.migrate(1, 0, 1);
    scene.request(1);
    scene.release(1);
    scene.map(1);
    let commands = scene.t.say(Event::SleepRefused { client: client(1), why: SleepObstacle::Capture });
    let why = Some(MoveObstacle::Sleep(SleepObstacle::Capture));
    assert!(commands.contains(&migrated(0, 1, why)), "{commands:?}");
    let commands = [commands, scene.map(1), scene.measure(), scene.map(1)].concat();
    assert!(commands.contains(&grant(1)), "{commands:?}");
}

#[test]
fn a_client_resumed_before_it_sleeps_is_not_moved() {
    let mut scene = Scene::new();
    scene.request(1);
    scene.migrate(1, 0, 1);
    scene.request(1);
    let commands = scene.t.say(Event::Resumed { client: client(1) });
    assert!(commands.contains(&migrated(0, 1, Some(MoveObstacle::Resumed))), "{commands:?}");
    assert!(scene.release(1).contains(&grant(1)));
    assert_eq!(scene.t.machine.sleep_of(client(1)).moving, None);
}

#[test]
fn a_client_paused_during_its_restore_has_been_moved() {
    let mut scene = Scene::restoring();
    scene.t.say(Event::SleepWanted { client: client(1), paused: true });
    let commands = scene.helper(1, SleepOutcome::Runs);
    assert!(commands.contains(&migrated(0, 1, None)) && commands.contains(&PREPARE), "{commands:?}");
}

#[test]
fn an_impossible_move_is_refused_immediately() {
    let mut scene = Scene::new();
    let refused = |scene: &mut Scene, from, to, why| {
        assert_eq!(scene.migrate(1, from, to), [migrated(from, to, Some(why))]);
        assert_eq!(scene.t.machine.sleep_of(client(1)).moving, None);
    };
    refused(&mut scene, 1, 0, MoveObstacle::NotThere);
    refused(&mut scene, 0, 0, MoveObstacle::Attached);
    refused(&mut scene, 0, 2, MoveObstacle::NoGpu);
    scene.t.say(Event::GpuFound { gpu: gpu(2), total: 24 * GIB });
    refused(&mut scene, 0, 2, MoveObstacle::NoGpu);
    scene.t.say(Event::GpuFound { gpu: gpu(2), total: 16 * GIB });
    refused(&mut scene, 0, 2, MoveObstacle::Sleep(SleepObstacle::Unmeasured));
    scene.t.say(Event::GpuGone { gpu: gpu(2) });
    refused(&mut scene, 0, 2, MoveObstacle::NoGpu);

    // Client 2 needs nearly all of the other GPU, so client 1's context doesn't fit there.
    scene.join(2, 1, 15 * GIB);
    refused(&mut scene, 0, 1, MoveObstacle::NoRoom);
    scene.t.say(Event::Disconnected { client: client(2) });
    scene.contexts.remove(&2);
    scene.measure();

    // Client 1's memory and client 2's memory together exceed the other GPU and the host memory.
    scene.join(2, 1, 13 * GIB);
    scene.t.say(Event::HostMemory { bytes: GIB });
    scene.map(1);
    scene.map(2);
    refused(&mut scene, 0, 1, MoveObstacle::NoRoom);
    scene.t.say(Event::HostMemory { bytes: 64 * GIB });
    scene.t.say(Event::Disconnected { client: client(2) });
    scene.contexts.remove(&2);
    scene.measure();

    assert!(scene.migrate(1, 0, 1).contains(&PREPARE));
    assert_eq!(scene.migrate(1, 0, 1), [migrated(0, 1, Some(MoveObstacle::Moving))]);
    assert_eq!(scene.migrate(9, 0, 1), [], "there is no such client");
}

/// The clients take turns on the other GPU, unless the memory there cannot be evicted.
#[test]
fn a_move_is_refused_because_of_a_client_whose_memory_cannot_be_evicted() {
    let mut scene = Scene::new();
    scene.join(2, 1, 12 * GIB);
    scene.join(3, 1, GIB);
    for n in [2, 3] {
        scene.t.say(Event::Stopped { client: client(n), stopped: true });
    }
    let why = MoveObstacle::Unevictable(client(2), EvictionBlock::Stopped);
    assert_eq!(scene.migrate(1, 0, 1), [migrated(0, 1, Some(why))]);
    scene.t.say(Event::Stopped { client: client(2), stopped: false });
    assert!(scene.migrate(1, 0, 1).contains(&PREPARE));
}

#[test]
fn a_move_is_refused_because_of_a_limit_that_a_stopped_client_does_not_acknowledge() {
    let mut scene = scarce();
    scene.t.say(Event::Stopped { client: client(2), stopped: true });
    assert_eq!(scene.migrate(1, 0, 1), [migrated(0, 1, Some(MoveObstacle::Unacknowledged))]);
    scene.t.say(Event::Stopped { client: client(2), stopped: false });
    assert!(scene.migrate(1, 0, 1).contains(&PREPARE));
}

/// Client 1 has 4 GiB, and its limit is a whole GPU. Client 2 has 8 GiB on the other GPU. Host
/// memory is scarce.
fn scarce() -> Scene {
    let mut scene = Scene::new();
    scene.join(2, 1, 8 * GIB);
    scene.t.say(Event::HostMemory { bytes: GIB });
    (1..3).for_each(|n| drop(scene.map(n)));
    let committed: u64 = (1..3).map(|n| scene.attachment(n).committed).sum();
    assert!(committed > 30 * GIB, "{committed}");
    scene
}

#[test]
fn scarce_host_memory_lowers_limits_on_the_target_gpu() {
    let mut scene = scarce();
    let commands = scene.migrate(1, 0, 1);
    let own = commands.iter().position(|c| matches!(c, Command::Limit { client: ClientId(1), .. }));
    assert!(own < commands.iter().position(|c| *c == PREPARE), "{commands:?}");
    assert_eq!(scene.attachment(1).limit, 4 * GIB, "it is promised what it has");
    assert!(scene.attachment(2).limit <= 13 * GIB, "{commands:?}");
    scene.map(2);
    let commands = scene.goes();
    assert!(
        commands.contains(&moved(0, 1)),
        "{commands:?} {:?} {:?}",
        scene.attachment(1),
        scene.t.machine.gpu(gpu(1))
    );
    let (host, promised) = scene.t.machine.host();
    assert!(Some(promised) <= host);
    scene.comes(&[(0, 1)]);
    scene.helper(1, SleepOutcome::Runs);
    scene.runs_on(1);
    assert!(scene.attachment(1).limit > 4 * GIB, "it is awake");
    let (host, promised) = scene.t.machine.host();
    assert!(Some(promised) <= host);
}

#[test]
fn a_moved_clients_demand_counts_towards_host_memory_on_its_new_gpu() {
    let mut scene = Scene::restoring();
    scene.helper(1, SleepOutcome::Runs);
    scene.runs_on(1);
    scene.t.say(Event::HostMemory { bytes: GIB });
    scene.map(1);
    // Another program takes most of the GPU, so 2 GiB of the client's memory do not fit there.
    let begun = scene.t.now;
    scene.t.say(Event::GpuOverhead { gpu: gpu(1), begun, bytes: 14 * GIB, others: 0, complete: true });
    assert_eq!(scene.attachment(1).limit, 4 * GIB, "host memory is scarce, and a limit does not fall below a demand");
}

#[test]
fn a_sleeping_client_moves_after_lower_limits_are_acknowledged() {
    for answers in [false, true] {
        let mut scene = scarce();
        scene.t.say(Event::SleepWanted { client: client(1), paused: true });
        scene.goes();
        let commands = scene.migrate(1, 0, 1);
        let is_there = |commands: &[Command]| commands.contains(&moved(0, 1));
        assert!(!is_there(&commands) && scene.attachment(2).limit <= 13 * GIB, "{commands:?}");
        if answers {
            let commands = scene.map(2);
            assert!(is_there(&commands) && commands.contains(&migrated(0, 1, None)), "{commands:?}");
        } else {
            let commands = scene.t.after(Duration::from_secs(5));
            assert!(commands.contains(&migrated(0, 1, Some(MoveObstacle::Unacknowledged))), "{commands:?}");
            scene.map(2);
            assert!(scene.attachment(2).limit > 14 * GIB, "nobody comes any more");
        }
        assert_eq!(scene.phase(1), SleepPhase::Asleep);
    }
}

/// Client 1 with 4 GiB and client 3 with 8 GiB are on GPU 0. GPU 1 is empty. There is hardly any
/// host memory.
fn shared_home() -> Scene {
    let mut scene = Scene::new();
    scene.join(3, 0, 8 * GIB);
    scene.t.say(Event::HostMemory { bytes: MIB });
    [1, 3].into_iter().for_each(|n| drop(scene.map(n)));
    scene
}

#[track_caller]
fn keeps_its_promises(scene: &Scene) {
    let (host, promised) = scene.t.machine.host();
    assert!(Some(promised) <= host, "{promised} of {host:?}: {:?}", scene.t.machine.gpus());
}

/// The maximum memory of client 3 beside client 1 and both contexts, including the host memory.
const BESIDE: u64 = 11 * GIB + MIB;

#[test]
fn the_old_gpus_memory_stays_reserved_until_the_restore_succeeds() {
    for fails in [true, false] {
        let mut scene = shared_home();
        scene.migrate(1, 0, 1);
        scene.goes();
        scene.comes(&[(0, 1)]);
        scene.t.say(Event::LimitRequested { client: client(3), gpu: gpu(0), bytes: 14 * GIB });
        scene.t.after(Duration::from_secs(5));
        scene.map(3);
        assert!(scene.attachment(3).committed <= BESIDE, "{:?}", scene.attachment(3));
        if fails {
            assert!(scene.helper(1, SleepOutcome::Asleep).contains(&moved(1, 0)));
            keeps_its_promises(&scene);
            scene.t.after(Duration::from_secs(1));
            scene.comes(&[]);
            scene.helper(1, SleepOutcome::Runs);
            scene.contexts.insert(1, 0);
        } else {
            scene.helper(1, SleepOutcome::Runs);
            scene.contexts.insert(1, 1);
            assert!(scene.attachment(3).limit > 14 * GIB, "it does not come back any more: {:?}", scene.attachment(3));
        }
        scene.measure();
        keeps_its_promises(&scene);
    }
}

#[test]
fn repeated_moves_while_asleep_keep_the_memory_on_the_old_gpu() {
    let mut scene = shared_home();
    scene.add_gpu(2);
    scene.t.say(Event::SleepWanted { client: client(1), paused: true });
    scene.goes();
    assert!(scene.migrate(1, 0, 1).contains(&moved(0, 1)));
    assert!(scene.migrate(1, 1, 2).contains(&moved(1, 2)));
    scene.measure();
    let committed = |scene: &Scene, on| scene.t.machine.gpu(gpu(on)).unwrap().committed;
    assert_eq!(committed(&scene, 1), 0, "its process was never there");
    scene.t.say(Event::LimitRequested { client: client(3), gpu: gpu(0), bytes: 14 * GIB });
    scene.t.after(Duration::from_secs(5));
    scene.map(3);
    assert!(scene.attachment(3).committed <= BESIDE, "{:?}", scene.attachment(3));
    // A request during the migration is granted only if both GPUs have room.
    scene.t.say(Event::LimitRequested { client: client(1), gpu: gpu(2), bytes: 12 * GIB });
    let commands = scene.t.after(Duration::from_secs(5));
    let denied = |c: &Command| matches!(c, Command::Denied { client: ClientId(1), .. });
    assert!(commands.iter().any(denied) && scene.attachment(1).committed == 4 * GIB, "{commands:?}");
    assert!(scene.migrate(1, 2, 0).contains(&moved(2, 0)));
    keeps_its_promises(&scene);
    assert_eq!(committed(&scene, 2), 0);
    scene.t.say(Event::Disconnected { client: client(1) });
    scene.measure();
    assert_eq!(committed(&scene, 0), scene.attachment(3).committed);
}

#[test]
fn a_clients_possible_return_gpu_is_no_target_for_its_other_gpus() {
    let mut scene = Scene::new();
    scene.add_gpu(2);
    scene.t.say(Event::Attached { client: client(1), gpu: gpu(2), engine: Engine::Swap });
    scene.measure();
    scene.t.after(Duration::from_secs(3));
    scene.t.say(Event::SleepWanted { client: client(1), paused: true });
    scene.goes();
    assert!(scene.migrate(1, 0, 1).contains(&moved(0, 1)));
    assert_eq!(scene.migrate(1, 2, 0), [migrated(2, 0, Some(MoveObstacle::Attached))]);
    assert!(scene.migrate(1, 1, 0).contains(&moved(1, 0)));
}

#[test]
fn a_gang_member_cannot_be_moved() {
    let mut scene = Scene::new();
    let group = Group { id: GroupId(1), limits: RuleLimits { gang: true, ..RuleLimits::default() } };
    scene.join(2, 0, GIB);
    scene.t.say(Event::Groups { groups: [1, 2].map(|n| (client(n), Some(group))).into() });
    let why = MoveObstacle::Sleep(SleepObstacle::Gang);
    assert_eq!(scene.migrate(1, 0, 1), [migrated(0, 1, Some(why))]);
}

#[test]
fn a_move_beyond_the_group_limit_is_refused() {
    let mut scene = Scene::new();
    scene.join(2, 1, 6 * GIB);
    let limits = RuleLimits { memory_max: Amount::Bytes(10 * GIB), ..RuleLimits::default() };
    scene.t.say(Event::Groups { groups: [1, 2].map(|n| (client(n), Some(Group { id: GroupId(1), limits }))).into() });
    (1..3).for_each(|n| drop(scene.map(n)));
    assert_eq!(scene.migrate(1, 0, 1), [migrated(0, 1, Some(MoveObstacle::NoRoom))]);
}

#[test]
fn a_client_without_room_on_the_target_wakes_on_its_old_gpu() {
    let mut scene = Scene::new();
    scene.migrate(1, 0, 1);
    scene.map(1);
    scene.t.say(Event::SleepReady { client: client(1) });
    scene.join(2, 1, 15 * GIB);
    scene.contexts.remove(&1);
    let commands = scene.helper(1, SleepOutcome::Asleep);
    assert!(commands.contains(&migrated(0, 1, Some(MoveObstacle::NoRoom))), "{commands:?}");
    scene.comes(&[]);
    assert!(scene.helper(1, SleepOutcome::Runs).contains(&awake(&[])));
    scene.runs_on(0);
}

#[test]
fn a_client_that_exits_during_a_move_leaves_no_charges() {
    for stage in 0..3 {
        let mut scene = Scene::new();
        scene.migrate(1, 0, 1);
        if stage > 0 {
            scene.goes();
        }
        if stage > 1 {
            scene.comes(&[(0, 1)]);
        }
        let commands = scene.t.say(Event::Disconnected { client: client(1) });
        assert!(!commands.iter().any(|c| c.client() == Some(client(1))), "{commands:?}");
        scene.contexts.clear();
        scene.measure();
        scene.measure();
        for on in 0..2 {
            let view = scene.t.machine.gpu(gpu(on)).unwrap();
            assert_eq!((view.committed, view.charged, view.capacity), (0, 0, 16 * GIB));
        }
    }
}

#[test]
fn room_for_a_restore_is_set_aside_on_all_gpus_of_a_client_or_on_none() {
    let mut scene = Scene::new();
    scene.join(2, 0, GIB);
    scene.t.say(Event::Attached { client: client(2), gpu: gpu(1), engine: Engine::Swap });
    scene.measure();
    scene.t.after(Duration::from_secs(3));
    let of = |n| (client(n), SleepOutcome::Asleep);
    for (client, outcome) in [of(2), of(1)] {
        scene.t.say(Event::SleepWanted { client, paused: true });
        scene.map(client.0);
        scene.t.say(Event::SleepReady { client });
        scene.contexts.remove(&client.0);
        scene.t.say(Event::Checkpointed { client, outcome });
        scene.measure();
    }
    scene.t.say(Event::Resumed { client: client(1) });
    scene.comes(&[]);
    // Client 1 is being restored on GPU 0, so client 2 waits for that GPU.
    let capacity = |scene: &Scene| scene.t.machine.gpu(gpu(1)).expect("a GPU").capacity;
    let before = capacity(&scene);
    scene.t.say(Event::Resumed { client: client(2) });
    assert_eq!((scene.phase(2), capacity(&scene)), (SleepPhase::Waking, before));
    scene.contexts.insert(1, 0);
    scene.helper(1, SleepOutcome::Runs);
    assert_eq!(capacity(&scene), before - CONTEXT - 64 * MIB);
}

/// Draining a GPU.
mod drain {
    use super::*;

    fn drain(scene: &mut Scene, candidates: &[u64]) -> Vec<Command> {
        scene.t.say(Event::Kinds { kinds: vec![(0..3).map(gpu).collect()] });
        scene.t.say(Event::Allowed {
            allowed: [(client(1), Some(candidates.iter().map(|on| gpu(*on)).collect()))].into(),
        });
        scene.t.say(Event::Drain { gpu: gpu(0), drained: true })
    }

    fn undrain(scene: &mut Scene) -> Vec<Command> {
        scene.t.say(Event::Drain { gpu: gpu(0), drained: false })
    }

    #[test]
    fn draining_a_gpu_moves_its_clients() {
        let mut scene = Scene::new();
        scene.request(1);
        assert_eq!(drain(&mut scene, &[1]), [revoke(1)]);
        assert_eq!(scene.release(1).last(), Some(&PREPARE));
        scene.goes();
        assert_eq!(scene.attachment(1).gpu, gpu(1));
        scene.comes(&[(0, 1)]);
        let commands = scene.helper(1, SleepOutcome::Runs);
        assert!(commands.contains(&migrated(0, 1, None)), "{commands:?}");
        scene.runs_on(1);
        assert_eq!(undrain(&mut scene), []);
    }

    #[test]
    fn a_client_without_another_gpu_sleeps_until_the_undrain() {
        for is_idle in [false, true] {
            let mut scene = if is_idle { Scene::asleep() } else { Scene::new() };
            drain(&mut scene, &[]);
            if !is_idle {
                scene.goes();
            }
            scene.measure();
            assert_eq!(scene.phase(1), SleepPhase::Asleep);
            scene.t.say(Event::Resumed { client: client(1) });
            if !is_idle {
                scene.t.say(Event::WakeRequested { client: client(1) });
            }
            scene.t.after(Duration::from_secs(600));
            assert_eq!(scene.phase(1), SleepPhase::Asleep);
            undrain(&mut scene);
            assert_eq!(scene.phase(1), SleepPhase::Waking);
            scene.comes(&[]);
        }
    }

    #[test]
    fn a_client_asleep_before_a_drain_stays_asleep() {
        let mut scene = Scene::asleep();
        drain(&mut scene, &[]);
        undrain(&mut scene);
        assert_eq!(scene.phase(1), SleepPhase::Asleep);
        assert!(drain(&mut scene, &[1]).contains(&moved(0, 1)));
        assert_eq!((scene.phase(1), scene.attachment(1).gpu), (SleepPhase::Asleep, gpu(1)));
        scene.t.say(Event::WakeRequested { client: client(1) });
        scene.comes(&[(0, 1)]);
    }

    #[test]
    fn a_client_that_waits_for_its_restore_sleeps_on_if_its_gpu_is_drained() {
        let mut scene = Scene::asleep();
        scene.t.say(Event::WakeRequested { client: client(1) });
        assert_eq!(scene.phase(1), SleepPhase::Waking);
        drain(&mut scene, &[]);
        scene.measure();
        scene.measure();
        assert_eq!(scene.phase(1), SleepPhase::Asleep);
        undrain(&mut scene);
        scene.comes(&[]);
    }

    #[test]
    fn a_client_that_cannot_leave_a_drained_gpu_runs_and_is_asked_again() {
        let mut scene = Scene::new();
        scene.request(1);
        drain(&mut scene, &[]);
        scene.request(1);
        assert!(!scene.release(1).contains(&grant(1)));
        scene.map(1);
        let mut commands = scene.t.say(Event::SleepRefused { client: client(1), why: SleepObstacle::Ipc });
        commands.extend([scene.map(1), scene.measure(), scene.map(1)].concat());
        assert!(commands.contains(&grant(1)), "{commands:?}");
        let view = scene.t.machine.sleep_of(client(1));
        assert_eq!((view.phase, view.obstacle), (SleepPhase::Awake, Some(SleepObstacle::Ipc)));
        assert!(scene.t.after(Duration::from_secs(1)).contains(&revoke(1)));
        assert!(scene.release(1).contains(&PREPARE));
        let commands = [undrain(&mut scene), scene.t.say(Event::SleepReady { client: client(1) })].concat();
        assert!(commands.contains(&awake(&[])), "{commands:?}");
    }

    #[test]
    fn a_client_that_can_never_sleep_is_not_interrupted_by_a_drain() {
        let mut scene = Scene::new();
        let group = Group { id: GroupId(1), limits: RuleLimits { gang: true, ..RuleLimits::default() } };
        scene.join(2, 0, GIB);
        scene.t.say(Event::Groups { groups: [1, 2].map(|n| (client(n), Some(group))).into() });
        scene.request(1);
        assert_eq!(drain(&mut scene, &[1]), []);
        let commands = scene.t.after(Duration::from_secs(600));
        assert!(!commands.contains(&revoke(1)), "{commands:?}");
        assert_eq!(scene.t.machine.sleep_of(client(1)).obstacle, Some(SleepObstacle::Gang));
    }

    #[test]
    fn a_client_attaching_to_a_drained_gpu_waits() {
        let mut scene = Scene::new();
        drain(&mut scene, &[1]);
        scene.t.say(Event::Connected { client: client(2), gang: 0, tenant: TenantId(2) });
        let waits = Command::Waiting { client: client(2), gpus: gpus([0]), why: WaitReason::Context };
        let commands = scene.t.say(Event::Attached { client: client(2), gpu: gpu(0), engine: Engine::Swap });
        assert!(commands.contains(&waits), "{commands:?}");
        let commands = scene.t.after(Duration::from_secs(3600));
        assert!(!commands.iter().any(|c| c.client() == Some(client(2))), "{commands:?}");
        let commands = [undrain(&mut scene), scene.t.after(Duration::from_secs(3))].concat();
        assert!(commands.contains(&Command::Attached { client: client(2), gpu: gpu(0) }), "{commands:?}");
    }

    /// While the clients are deferred, their contexts don't count. When the drain ends, their
    /// limits together must leave room for all their contexts.
    #[test]
    fn limits_of_deferred_clients_leave_room_for_their_contexts() {
        let mut t = Talk::new(Settings { context: CONTEXT, reserve: 0, ..settings(AntiThrash::On, ms(1000)) });
        t.say(Event::HostMemory { bytes: 0 });
        t.say(Event::Drain { gpu: gpu(0), drained: true });
        for n in 1..4 {
            t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(n) });
            t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
        }
        t.after(Duration::from_secs(600));
        let commands = t.say(Event::Drain { gpu: gpu(0), drained: false });
        let told = commands.iter().filter_map(|command| match command {
            Command::Limit { bytes, .. } => Some(*bytes),
            _ => None,
        });
        assert_eq!(told.clone().count(), 3, "{commands:?}");
        assert!(told.sum::<u64>() <= 16 * GIB - 3 * CONTEXT, "{commands:?}");
    }

    #[test]
    fn no_client_is_moved_to_or_placed_on_a_drained_gpu() {
        let mut scene = Scene::new();
        scene.t.say(Event::Drain { gpu: gpu(1), drained: true });
        assert_eq!(scene.migrate(1, 0, 1), [migrated(0, 1, Some(MoveObstacle::Drained))]);
        scene.t.say(Event::Connected { client: client(2), gang: 0, tenant: TenantId(2) });
        let request = PlacementRequest { candidates: vec![gpu(1), gpu(0)], count: 1, bytes: None, ahead: false };
        let commands = scene.t.say(Event::PlacementRequested { client: client(2), request });
        assert_eq!(commands, [Command::Placed { client: client(2), gpus: vec![gpu(0)] }]);
    }

    #[test]
    fn a_drained_client_tries_the_next_gpu_after_a_failed_restore() {
        let mut scene = Scene::new();
        scene.add_gpu(2);
        drain(&mut scene, &[1, 2]);
        scene.goes();
        scene.comes(&[(0, 1)]);
        let commands = scene.helper(1, SleepOutcome::Asleep);
        assert!(commands.contains(&moved(1, 0)) && commands.contains(&moved(0, 2)), "{commands:?}");
        scene.t.after(Duration::from_secs(1));
        scene.comes(&[(0, 2)]);
        assert!(scene.helper(1, SleepOutcome::Asleep).contains(&moved(2, 0)));
        assert_eq!(scene.t.after(Duration::from_secs(600)), [], "there is no other");
        assert_eq!((scene.phase(1), scene.attachment(1).gpu), (SleepPhase::Asleep, gpu(0)));
        assert!(drain(&mut scene, &[1, 2]).contains(&moved(0, 1)), "it is told again");
    }

    #[test]
    fn a_drained_client_tries_the_next_gpu_if_the_first_is_full() {
        let mut scene = Scene::new();
        scene.add_gpu(2);
        drain(&mut scene, &[1, 2]);
        scene.map(1);
        scene.t.say(Event::SleepReady { client: client(1) });
        scene.join(2, 1, 15 * GIB);
        scene.contexts.remove(&1);
        let commands = scene.helper(1, SleepOutcome::Asleep);
        assert!(commands.contains(&moved(0, 2)), "{commands:?}");
        scene.comes(&[(0, 2)]);
    }

    /// A new scheduler first learns that the GPU is drained, and then about the clients on it.
    #[test]
    fn a_drain_also_moves_clients_that_reconnect() {
        let mut scene = Scene::new();
        scene.t.say(Event::Disconnected { client: client(1) });
        drain(&mut scene, &[1]);
        scene.t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(1) });
        scene.t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Swap });
        let mut commands = scene.report(1, 4 * GIB, 4 * GIB);
        commands.extend([scene.measure(), scene.t.after(Duration::from_secs(2)), scene.measure()].concat());
        commands.extend(scene.t.after(Duration::from_secs(2)));
        assert!(commands.contains(&PREPARE), "{commands:?}");
        assert!(scene.goes().contains(&moved(0, 1)));
    }

    #[test]
    fn a_drained_client_sleeps_on_its_gpu_if_no_restore_succeeds() {
        let mut scene = Scene::new();
        drain(&mut scene, &[1]);
        scene.goes();
        scene.comes(&[(0, 1)]);
        assert!(scene.helper(1, SleepOutcome::Asleep).contains(&moved(1, 0)));
        scene.t.after(Duration::from_secs(600));
        assert_eq!((scene.phase(1), scene.attachment(1).gpu), (SleepPhase::Asleep, gpu(0)));
        undrain(&mut scene);
        scene.comes(&[]);
    }
}
