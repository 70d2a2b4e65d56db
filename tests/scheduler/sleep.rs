//! Clients that leave their GPUs completely and are restored later, message by message.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

pub const CONTEXT: u64 = 512 * MIB;

/// Clients on a GPU whose memory is measured. Each client has a context there, and the first client
/// has all of its memory there.
pub struct Scene {
    pub t: Talk,
    /// The clients whose contexts are on the GPU.
    pub contexts: Vec<u64>,
    pub free: Option<u64>,
}

impl Scene {
    pub fn new(demands: &[u64]) -> Self {
        let t = Talk::new(Settings { context: CONTEXT, reserve: 0, ..settings(AntiThrash::On, ms(1000)) });
        let mut scene = Self { t, contexts: Vec::new(), free: None };
        scene.measure();
        for (n, demand) in (1..).zip(demands) {
            scene.t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(n) });
            scene.t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
            scene.contexts.push(n);
            scene.t.report(n, *demand, 0, 0);
            scene.t.request(n);
            (1..=n).for_each(|n| drop(scene.t.map(n)));
            scene.measure();
            scene.t.map(n);
            scene.t.release(n, ReleaseReason::Idle);
        }
        scene
    }

    /// Measures the GPU now. The measurement confirms the clients' reports.
    pub fn measure(&mut self) -> Vec<Command> {
        self.t.now += ms(1);
        let begun = self.t.now;
        let mut commands = self.t.measured(self.contexts.len() as u64 * CONTEXT);
        // The measurement must include at least one client. Otherwise the scheduler assumes that
        // clients cannot be measured at all.
        let there = self.t.machine.clients();
        let is_there = |c: &&ClientView| self.contexts.iter().any(|n| client(*n) == c.client);
        let bytes = |c: &ClientView| c.attachments.first().map_or(0, |a| a.mapped);
        let found = there.iter().map(|c| (c.client, Some(c).filter(is_there).map_or(0, bytes)));
        let mut found: std::collections::BTreeMap<ClientId, Found> =
            found.map(|(client, bytes)| (client, Found { least: bytes, most: bytes })).collect();
        found.entry(client(0)).or_insert(Found { least: 0, most: 0 });
        commands.extend(self.t.say(Event::Measured { gpu: gpu(0), begun, free: self.free, evicted: 0, found }));
        commands
    }

    pub fn phase(&self, n: u64) -> SleepPhase {
        self.t.machine.sleep_of(client(n)).phase
    }

    fn ready(&mut self, n: u64) -> Vec<Command> {
        self.t.say(Event::SleepReady { client: client(n) })
    }

    fn helper(&mut self, n: u64, outcome: SleepOutcome) -> Vec<Command> {
        self.t.say(Event::Checkpointed { client: client(n), outcome })
    }

    fn pause(&mut self, n: u64) -> Vec<Command> {
        self.t.say(Event::SleepWanted { client: client(n), paused: true })
    }

    fn resume(&mut self, n: u64) -> Vec<Command> {
        self.t.say(Event::Resumed { client: client(n) })
    }

    /// Returns a scene in which client 1 is paused, and off the GPU.
    fn paused(demands: &[u64]) -> Self {
        let mut scene = Self::new(demands);
        let commands = scene.pause(1);
        assert_eq!(scene.t.attachment(1).allowance, 0);
        assert_eq!(commands.last(), Some(&Command::PrepareSleep { client: client(1), paused: true }));
        scene.t.map(1);
        assert_eq!(scene.ready(1), [checkpoint(1, SleepOperation::Sleep)]);
        scene.contexts.retain(|n| *n != 1);
        scene.helper(1, SleepOutcome::Asleep);
        assert_eq!(scene.phase(1), SleepPhase::Asleep);
        scene
    }

    pub fn capacity(&self) -> u64 {
        self.t.machine.gpus()[0].capacity
    }
}

fn checkpoint(n: u64, operation: SleepOperation) -> Command {
    Command::Checkpoint { client: client(n), operation, moves: Vec::new() }
}

fn awake(n: u64) -> Command {
    Command::Awake { client: client(n), moved: Vec::new() }
}

#[test]
fn a_sleeping_clients_memory_is_free_once_measured() {
    let mut scene = Scene::paused(&[4 * GIB, GIB]);
    assert_eq!(scene.t.attachment(1).charge, 0);
    assert_eq!(scene.capacity(), 16 * GIB - 2 * CONTEXT, "the newest measurement still has its context");
    scene.measure();
    assert_eq!(scene.capacity(), 16 * GIB - CONTEXT);
    let limit = scene.t.attachment(2).limit;
    assert!(limit <= 16 * GIB - 2 * CONTEXT, "what its context will need is not promised to others: {limit}");
}

#[test]
fn a_client_without_memory_is_not_asked_to_evict_before_it_sleeps() {
    let mut scene = Scene::new(&[0, GIB]);
    let commands = scene.pause(1);
    assert_eq!(allowances(&commands), []);
    assert_eq!(commands.last(), Some(&Command::PrepareSleep { client: client(1), paused: true }));
}

#[test]
fn a_paused_client_runs_only_after_it_is_resumed() {
    let mut scene = Scene::paused(&[4 * GIB, GIB]);
    scene.measure();
    assert_eq!(scene.t.say(Event::WakeRequested { client: client(1) }), []);
    scene.t.request(1);
    assert_eq!(scene.t.after(Duration::from_secs(600)), []);
    assert_eq!((scene.phase(1), scene.t.state(1)), (SleepPhase::Asleep, LockState::Waiting));
    let commands = scene.resume(1);
    assert!(commands.contains(&Command::Measure { gpu: gpu(0) }), "{commands:?}");
    assert_eq!(scene.phase(1), SleepPhase::Waking);
    assert_eq!(scene.measure(), [checkpoint(1, SleepOperation::Wake)]);
    scene.contexts.push(1);
    let commands = scene.helper(1, SleepOutcome::Runs);
    let at = |command: Command| commands.iter().position(|c| *c == command).unwrap_or_else(|| panic!("{commands:?}"));
    assert!(at(awake(1)) < at(grant(1)));
    assert_eq!(allowances(&commands), [(1, 4 * GIB)]);
}

#[test]
fn a_restore_waits_until_evicted_memory_is_measured_free() {
    let mut scene = Scene::paused(&[4 * GIB, 15 * GIB]);
    scene.measure();
    // Client 2 has all of the GPU's memory except its own context.
    scene.t.request(2);
    scene.t.map(2);
    scene.t.release(2, ReleaseReason::Idle);
    assert_eq!(scene.t.attachment(2).mapped, 15 * GIB);
    let commands = scene.resume(1);
    let left = allowances(&commands).last().copied().expect("it is to evict");
    assert!(left.0 == 2 && left.1 <= 16 * GIB - 2 * CONTEXT, "{commands:?}");
    assert_eq!(scene.measure(), [], "it is still there");
    scene.t.map(2);
    assert_eq!(scene.measure(), [Command::Measure { gpu: gpu(0) }], "this one only says that it has left");
    assert_eq!(scene.phase(1), SleepPhase::Waking, "nothing was measured since");
    scene.free = Some(CONTEXT / 2);
    assert_eq!(scene.measure(), [], "somebody else has it");
    assert_eq!(scene.t.after(Duration::from_secs(1)), [Command::Measure { gpu: gpu(0) }]);
    scene.free = Some(2 * CONTEXT);
    assert_eq!(scene.measure(), [checkpoint(1, SleepOperation::Wake)]);
}

#[test]
fn no_client_is_admitted_without_room_during_a_restore() {
    let mut scene = Scene::paused(&[4 * GIB, 15 * GIB]);
    scene.measure();
    scene.t.request(2);
    scene.t.map(2);
    scene.resume(1);
    let commands = scene.t.after(Duration::from_secs(2));
    assert!(commands.contains(&revoke(2)) || scene.t.state(2) == LockState::Revoking, "{commands:?}");
    scene.t.release(2, ReleaseReason::Revoked);
    scene.t.map(2);
    assert_eq!(scene.measure(), [Command::Measure { gpu: gpu(0) }], "this one only says that it is free now");
    assert_eq!(scene.measure(), [checkpoint(1, SleepOperation::Wake)]);
    // Client 2 needs less from now on, but hasn't freed anything yet.
    let mapped = scene.t.attachment(2).mapped;
    scene.t.report(2, 10 * GIB, mapped, 0);
    scene.t.say(Event::Connected { client: client(3), gang: 0, tenant: TenantId(3) });
    scene.t.say(Event::Attached { client: client(3), gpu: gpu(0), engine: Engine::Swap });
    let attached = Command::Attached { client: client(3), gpu: gpu(0) };
    assert!(!scene.t.after(Duration::from_secs(3)).contains(&attached));
    scene.contexts.push(1);
    scene.helper(1, SleepOutcome::Runs);
    let commands = scene.t.after(Duration::from_secs(1));
    assert!(commands.contains(&attached) || scene.t.attachment(3).attached, "{commands:?}");
}

/// Returns a scene in which clients 1 and 2 are off the GPU, and client 1 is being restored.
fn two_asleep() -> Scene {
    let mut scene = Scene::paused(&[4 * GIB, GIB, GIB]);
    scene.measure();
    scene.pause(2);
    scene.t.map(2);
    scene.ready(2);
    scene.contexts.retain(|n| *n != 2);
    scene.helper(2, SleepOutcome::Asleep);
    scene.measure();
    scene.resume(1);
    assert_eq!(scene.measure(), [checkpoint(1, SleepOperation::Wake)]);
    scene
}

/// A restore fails if memory that was reported as freed is still in use.
#[test]
fn during_a_restore_freed_memory_is_measured_before_its_own_tenant_gets_it() {
    for is_restoring in [false, true] {
        let mut scene = Scene::paused(&[4 * GIB]);
        scene.measure();
        for (n, demand) in [(2, 12 * GIB), (3, 0)] {
            scene.t.join_of(TenantId(9), n, demand);
            scene.contexts.push(n);
            scene.measure();
        }
        scene.t.map(2);
        scene.measure();
        assert_eq!(scene.t.attachment(2).mapped, 12 * GIB);
        if is_restoring {
            let commands = [scene.resume(1), scene.measure(), scene.measure()].concat();
            assert!(commands.contains(&checkpoint(1, SleepOperation::Wake)), "{commands:?}");
        }
        scene.t.report(2, 2 * GIB, 2 * GIB, 0);
        scene.t.report(3, 10 * GIB, 0, 0);
        scene.t.request(3);
        scene.t.map(2);
        assert_eq!(scene.t.state(3) == LockState::Waiting, is_restoring);
        scene.measure();
        assert_eq!(scene.t.state(3), LockState::Holding);
    }
}

/// The restore of a stopped process doesn't end.
#[test]
fn a_hung_restore_does_not_block_other_restores() {
    for is_late in [false, true] {
        let mut scene = two_asleep();
        scene.resume(2);
        assert_eq!(scene.phase(2), SleepPhase::Waking);
        if is_late {
            scene.helper(1, SleepOutcome::Unknown);
        }
        let commands = scene.t.after(Duration::from_secs(11));
        assert!(!commands.contains(&checkpoint(2, SleepOperation::Wake)), "nothing was measured: {commands:?}");
        // Client 1's context may still appear, so its memory isn't free for client 2.
        scene.free = Some(2 * CONTEXT);
        assert!(!scene.measure().contains(&checkpoint(2, SleepOperation::Wake)), "there is room for one of them");
        assert!(scene.capacity() <= 16 * GIB - 3 * CONTEXT);
        scene.free = Some(3 * CONTEXT);
        assert_eq!(scene.measure(), [checkpoint(2, SleepOperation::Wake)]);
        scene.contexts.push(2);
        assert!(scene.helper(2, SleepOutcome::Runs).contains(&awake(2)));
        // Finally the scheduler learns that client 1 was restored.
        if is_late {
            scene.t.after(Duration::from_secs(30));
        }
        scene.contexts.push(1);
        assert!(scene.helper(1, SleepOutcome::Runs).contains(&awake(1)));
        scene.free = None;
        scene.t.after(Duration::from_secs(10));
        scene.measure();
        assert_eq!(scene.capacity(), 16 * GIB - 3 * CONTEXT);
    }
}

/// Returns a scene in which client 1 is off the GPU. Client 3 has pinned most of the GPU, so that client
/// 1's context does not fit. Client 2 is idle.
fn crowded() -> Scene {
    let mut scene = Scene::paused(&[4 * GIB, GIB, GIB]);
    scene.measure();
    let free = 16 * GIB - 2 * CONTEXT;
    let pinned = free - CONTEXT / 2;
    scene.t.report(3, pinned, GIB, 0);
    scene.t.request(3);
    for _ in 0..3 {
        scene.t.map(2);
        scene.t.map(3);
        scene.measure();
    }
    scene.t.report(3, pinned, pinned, pinned);
    scene.t.release(3, ReleaseReason::Idle);
    scene.measure();
    assert_eq!(scene.t.attachment(3).pinned, pinned);
    scene
}

#[test]
fn a_client_that_cannot_be_restored_now_delays_no_other_client() {
    let mut scene = crowded();
    let capacity = scene.capacity();
    scene.resume(1);
    scene.measure();
    assert_eq!((scene.phase(1), scene.capacity()), (SleepPhase::Waking, capacity));
    let obstacle = scene.t.machine.explain(client(1), scene.t.now).next().and_then(|what| what.obstacle);
    assert_eq!(obstacle, Some(Obstacle::NoRoomToReturn(scene.t.attachment(3).pinned)));
    // Client 2 fits beside the pinned memory, but not beside that and client 1's context.
    scene.t.report(2, CONTEXT / 2, 0, 0);
    scene.t.request(2);
    assert_eq!(scene.t.state(2), LockState::Holding);
    scene.t.map(2);
    assert_eq!(scene.t.attachment(2).mapped, CONTEXT / 2);
    assert!(!scene.t.after(Duration::from_secs(600)).contains(&revoke(2)));
    // The memory is unpinned, so there is room, although client 2 uses some of it.
    scene.t.report(3, GIB, GIB, 0);
    assert_eq!(
        scene.t.machine.explain(client(1), scene.t.now).next().and_then(|what| what.obstacle),
        Some(Obstacle::Sleeps(SleepPhase::Waking))
    );
    let mut commands = Vec::new();
    for _ in 0..3 {
        scene.t.map(3);
        commands.extend(scene.measure());
    }
    assert!(commands.contains(&checkpoint(1, SleepOperation::Wake)), "{commands:?}");
}

#[test]
fn room_that_can_no_longer_become_free_is_given_up() {
    let mut scene = Scene::paused(&[4 * GIB, GIB, GIB]);
    scene.measure();
    let all = 16 * GIB - 2 * CONTEXT;
    scene.t.report(3, all, GIB, 0);
    scene.t.request(3);
    for _ in 0..3 {
        scene.t.map(2);
        scene.t.map(3);
        scene.measure();
    }
    assert_eq!(scene.t.attachment(3).mapped, all);
    let capacity = scene.capacity();
    scene.resume(1);
    assert_eq!(scene.capacity(), capacity - CONTEXT - 64 * MIB, "room is set aside");
    scene.t.report(3, all, all, all);
    assert_eq!((scene.phase(1), scene.capacity()), (SleepPhase::Waking, capacity));
}

#[test]
fn the_room_for_a_restore_is_a_small_part_of_a_small_gpu() {
    let mut scene = Scene::paused(&[GIB / 2]);
    scene.measure();
    scene.t.say(Event::GpuFound { gpu: gpu(0), total: 2 * GIB });
    let capacity = scene.capacity();
    scene.resume(1);
    assert_eq!(scene.capacity(), capacity - CONTEXT - 64 * MIB, "for the GPU's size when it fell asleep");
    let mut scene = Scene::new(&[GIB / 2]);
    scene.t.say(Event::GpuFound { gpu: gpu(0), total: 2 * GIB });
    scene.pause(1);
    scene.t.map(1);
    scene.ready(1);
    scene.contexts.clear();
    scene.helper(1, SleepOutcome::Asleep);
    scene.measure();
    let capacity = scene.capacity();
    scene.resume(1);
    assert_eq!(scene.capacity(), capacity - 128 * MIB - 32 * MIB);
}

#[test]
fn a_running_client_is_revoked_before_it_sleeps() {
    let mut scene = Scene::new(&[4 * GIB, GIB]);
    scene.t.request(1);
    assert_eq!(scene.pause(1), [revoke(1)]);
    scene.t.request(1);
    let commands = scene.t.release(1, ReleaseReason::Revoked);
    assert!(commands.contains(&Command::PrepareSleep { client: client(1), paused: true }), "{commands:?}");
    assert!(!commands.contains(&grant(1)), "{commands:?}");
    // Client 1 has threads that wait, so it cannot sleep. The scheduler gives it neither the lock
    // nor memory, and asks it again.
    scene.t.map(1);
    scene.t.say(Event::SleepRefused { client: client(1), why: SleepObstacle::Busy });
    assert_eq!(scene.t.attachment(1).allowance, 0);
    let commands = scene.t.after(Duration::from_secs(1));
    assert_eq!(commands.last(), Some(&Command::PrepareSleep { client: client(1), paused: true }));
    scene.t.say(Event::SleepRefused { client: client(1), why: SleepObstacle::Busy });
    assert_eq!(scene.t.machine.sleep_of(client(1)).obstacle, Some(SleepObstacle::Busy));
    assert!(scene.resume(1).contains(&grant(1)));
    assert_eq!(scene.t.after(Duration::from_secs(60)), []);
}

#[test]
fn a_sleeping_client_is_promised_its_demand_or_its_request() {
    let mut scene = Scene::new(&[4 * GIB, GIB]);
    let before = scene.t.attachment(1).limit;
    let commands = scene.pause(1);
    let limits = |commands: &[Command]| {
        let of = |c: &Command| match c {
            Command::Limit { client, bytes, .. } if *client == ClientId(1) => Some(*bytes),
            _ => None,
        };
        commands.iter().filter_map(of).collect::<Vec<_>>()
    };
    assert_eq!((limits(&commands), scene.t.attachment(1).limit), (vec![4 * GIB], 4 * GIB));
    // A thread of client 1 waits for more memory. The lower limit must not cause an error in that
    // thread.
    let commands = scene.t.say(Event::LimitRequested { client: client(1), gpu: gpu(0), bytes: 6 * GIB });
    assert_eq!(limits(&commands), [6 * GIB]);
    scene.t.map(1);
    scene.ready(1);
    scene.contexts.retain(|n| *n != 1);
    scene.helper(1, SleepOutcome::Asleep);
    scene.measure();
    assert_eq!(scene.t.attachment(1).committed, 6 * GIB);
    scene.resume(1);
    scene.measure();
    scene.contexts.push(1);
    let commands = scene.helper(1, SleepOutcome::Runs);
    assert_eq!(limits(&commands).len(), 1, "{commands:?}");
    scene.measure();
    assert_eq!(scene.t.attachment(1).limit, before);
}

#[test]
fn a_busy_client_is_not_put_to_sleep() {
    let mut scene = Scene::new(&[4 * GIB, GIB]);
    scene.t.request(1);
    assert_eq!(scene.t.say(Event::SleepWanted { client: client(1), paused: false }), []);
    let view = SleepView {
        phase: SleepPhase::Awake,
        paused: false,
        drained: false,
        obstacle: Some(SleepObstacle::Busy),
        moving: None,
        woken: None,
    };
    assert_eq!(scene.t.machine.sleep_of(client(1)), view);
    scene.t.release(1, ReleaseReason::Idle);
    assert_eq!(scene.t.after(Duration::from_secs(600)), []);
}

#[test]
fn no_client_sleeps_if_free_memory_cannot_be_measured() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, GIB);
    t.say(Event::SleepWanted { client: client(1), paused: false });
    assert_eq!(t.machine.sleep_of(client(1)).obstacle, Some(SleepObstacle::Unmeasured));
}

#[test]
fn a_helpers_death_is_followed_by_settling_the_client() {
    let mut scene = Scene::new(&[4 * GIB, GIB]);
    scene.t.say(Event::SleepWanted { client: client(1), paused: false });
    scene.t.map(1);
    scene.ready(1);
    assert_eq!(scene.helper(1, SleepOutcome::Unknown), [checkpoint(1, SleepOperation::Settle)]);
    assert_eq!(scene.helper(1, SleepOutcome::Unknown), []);
    assert_eq!(scene.t.after(Duration::from_secs(1)), [checkpoint(1, SleepOperation::Settle)]);
    assert_eq!(scene.helper(1, SleepOutcome::Runs).first(), Some(&awake(1)));
    assert!(scene.t.request(1).contains(&grant(1)));
}

#[test]
fn room_for_the_context_of_a_lost_client_is_promised_to_others() {
    let mut scene = Scene::paused(&[4 * GIB, GIB]);
    scene.measure();
    scene.resume(1);
    scene.measure();
    assert_eq!(scene.phase(1), SleepPhase::Restoring);
    scene.helper(1, SleepOutcome::Lost);
    scene.measure();
    assert_eq!(scene.phase(1), SleepPhase::Lost);
    let promised = |scene: &Scene| scene.t.attachment(2).limit;
    assert!(promised(&scene) > 16 * GIB - 2 * CONTEXT, "{}", promised(&scene));
}

#[test]
fn a_client_that_exits_asleep_or_waking_leaves_no_charges() {
    for wakes in [false, true] {
        let mut scene = Scene::paused(&[4 * GIB, GIB]);
        scene.measure();
        if wakes {
            scene.resume(1);
            assert_eq!(scene.phase(1), SleepPhase::Waking);
        }
        scene.t.say(Event::Disconnected { client: client(1) });
        scene.measure();
        assert_eq!(scene.capacity(), 16 * GIB - CONTEXT);
        assert_eq!(scene.t.attachment(2).limit, 16 * GIB - CONTEXT);
        assert_eq!(scene.helper(1, SleepOutcome::Asleep), []);
        assert_eq!(scene.t.after(Duration::from_secs(60)), []);
    }
}

#[test]
fn unsolicited_answers_have_no_effect() {
    let mut scene = Scene::new(&[GIB, GIB]);
    let all = [
        Event::SleepReady { client: client(1) },
        Event::SleepRefused { client: client(1), why: SleepObstacle::Busy },
        Event::WakeRequested { client: client(1) },
        Event::Resumed { client: client(1) },
        Event::Checkpointed { client: client(1), outcome: SleepOutcome::Lost },
        Event::SleepWanted { client: client(9), paused: true },
    ];
    for event in all {
        assert_eq!(scene.t.say(event), []);
    }
    assert_eq!(scene.phase(1), SleepPhase::Awake);
}

/// Clients of an earlier scheduler that report that they are asleep.
mod found {
    use super::*;

    /// Returns the scene of a new scheduler. A client has connected and reported that it is asleep.
    /// The other clients have these demands.
    fn found(demands: &[u64]) -> Scene {
        let mut scene = Scene::new(demands);
        let n = demands.len() as u64 + 1;
        scene.t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(n) });
        let commands = scene.t.say(Event::FoundAsleep { client: client(n) });
        assert_eq!(commands, [checkpoint(n, SleepOperation::Settle)]);
        scene.t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
        scene
    }

    #[test]
    fn a_client_found_asleep_wakes_on_request_once_there_is_room() {
        let mut scene = found(&[15 * GIB]);
        scene.helper(2, SleepOutcome::Asleep);
        scene.measure();
        scene.t.after(Duration::from_secs(60));
        assert_eq!((scene.phase(2), scene.capacity()), (SleepPhase::Asleep, 16 * GIB - CONTEXT));
        scene.t.request(1);
        scene.t.map(1);
        scene.t.release(1, ReleaseReason::Idle);
        assert_eq!(scene.t.attachment(1).mapped, 15 * GIB);
        let commands = scene.t.say(Event::WakeRequested { client: client(2) });
        let left = allowances(&commands).last().copied().expect("the other is to evict");
        assert!(left.0 == 1 && left.1 <= 16 * GIB - 2 * CONTEXT, "{commands:?}");
        scene.t.map(1);
        scene.measure();
        assert_eq!(scene.measure(), [checkpoint(2, SleepOperation::Wake)]);
        scene.contexts.push(2);
        assert!(scene.helper(2, SleepOutcome::Runs).contains(&awake(2)));
        // From now on the client is treated like a client that connected with a context.
        scene.t.report(2, GIB, 0, 0);
        scene.measure();
        let commands = scene.t.after(Duration::from_secs(3));
        assert!(scene.t.attachment(2).attached, "{commands:?}");
        let commands = [scene.t.request(2), scene.t.map(1), scene.measure(), scene.t.map(2)].concat();
        assert!(commands.contains(&grant(2)), "{commands:?}");
    }

    #[test]
    fn a_client_found_prepared_continues() {
        let mut scene = found(&[GIB]);
        let commands = scene.helper(2, SleepOutcome::Runs);
        assert!(commands.contains(&awake(2)), "{commands:?}");
        scene.t.report(2, GIB, 0, 0);
        assert!(scene.t.request(2).contains(&grant(2)));
    }

    #[test]
    fn a_client_found_asleep_without_a_gpu_is_restored() {
        let mut scene = Scene::new(&[GIB]);
        scene.t.say(Event::Connected { client: client(2), gang: 0, tenant: TenantId(2) });
        scene.t.say(Event::FoundAsleep { client: client(2) });
        scene.t.say(Event::WakeRequested { client: client(2) });
        assert_eq!(scene.helper(2, SleepOutcome::Asleep), [checkpoint(2, SleepOperation::Wake)]);
        assert_eq!(scene.helper(2, SleepOutcome::Runs), [awake(2)]);
    }
}

/// Clients that have been idle for a long time while other clients lack room.
mod idle {
    use super::*;

    const AFTER: Duration = Duration::from_secs(300);

    /// Creates clients that have been idle since they connected. No other programs use the GPU.
    fn idle(demands: &[u64]) -> Scene {
        let mut scene = Scene::new(demands);
        let settings = Settings { sleep_after: Some(AFTER), ..scene.t.machine.settings().clone() };
        scene.t.say(Event::Configure(settings));
        scene.t.say(Event::OtherPrograms { gpu: gpu(0), present: false });
        scene.measure();
        scene
    }

    fn prepares(n: u64) -> Command {
        Command::PrepareSleep { client: client(n), paused: false }
    }

    #[test]
    fn the_longest_idle_clients_sleep_until_the_other_clients_fit() {
        let mut scene = idle(&[5 * GIB; 5]);
        assert!(
            !scene.t.after(AFTER - Duration::from_secs(1)).iter().any(|c| matches!(c, Command::PrepareSleep { .. }))
        );
        let commands = scene.t.after(Duration::from_secs(1));
        assert!(commands.contains(&prepares(1)), "{commands:?}");
        scene.t.map(1);
        scene.t.after(Duration::from_secs(1));
        scene.ready(1);
        scene.contexts.retain(|n| *n != 1);
        let commands = scene.helper(1, SleepOutcome::Asleep);
        assert!(!commands.contains(&prepares(2)), "it is measured first: {commands:?}");
        let commands = scene.measure();
        // Client 2 sleeps, because the three other clients need 15 GiB, more than the contexts
        // leave. Client 3 stays awake, because the two other clients then need 10 GiB, which fit.
        assert!(commands.contains(&prepares(2)), "{commands:?}");
        scene.t.map(2);
        scene.ready(2);
        scene.contexts.retain(|n| *n != 2);
        scene.helper(2, SleepOutcome::Asleep);
        scene.measure();
        scene.measure();
        scene.t.after(AFTER * 3);
        assert!((3..6).all(|n| scene.phase(n) == SleepPhase::Awake));
    }

    #[test]
    fn no_client_sleeps_if_all_fit_or_foreign_programs_use_the_gpu() {
        let mut scene = idle(&[4 * GIB, 4 * GIB]);
        assert_eq!(scene.t.after(AFTER * 2), []);
        let mut scene = idle(&[12 * GIB, 12 * GIB, 12 * GIB]);
        scene.t.say(Event::OtherPrograms { gpu: gpu(0), present: true });
        scene.t.after(AFTER * 2);
        assert!((1..4).all(|n| scene.phase(n) == SleepPhase::Awake));
    }

    #[test]
    fn after_a_refusal_the_next_client_is_asked_to_sleep() {
        let mut scene = idle(&[12 * GIB, 12 * GIB, 12 * GIB]);
        assert!(scene.t.after(AFTER).contains(&prepares(1)));
        let refusal = Event::SleepRefused { client: client(1), why: SleepObstacle::Busy };
        assert!(scene.t.say(refusal).contains(&prepares(2)));
    }

    #[test]
    fn a_rules_sleep_after_overrides_the_setting() {
        let minutes = |minutes: u64| SleepAfter::Idle(Duration::from_secs(60 * minutes));
        let asked_after = |setting: Option<Duration>, rule: Option<SleepAfter>| {
            let mut scene = idle(&[12 * GIB, 12 * GIB, 12 * GIB]);
            let settings = Settings { sleep_after: setting, ..scene.t.machine.settings().clone() };
            scene.t.say(Event::Configure(settings));
            let other = RuleLimits { sleep_after: Some(SleepAfter::Never), ..RuleLimits::default() };
            scene.t.put(&[1, 3], other);
            let ruled = Group { id: GroupId(8), limits: RuleLimits { sleep_after: rule, ..RuleLimits::default() } };
            scene.t.say(Event::Groups { groups: [(client(2), Some(ruled))].into() });
            (1..30).find(|_| scene.t.after(Duration::from_secs(60)).contains(&prepares(2)))
        };
        let (never, default) = (Some(SleepAfter::Never), Some(AFTER));
        assert_eq!(asked_after(default, None), Some(5));
        assert_eq!(asked_after(default, Some(minutes(2))), Some(2));
        assert_eq!(asked_after(default, Some(minutes(9))), Some(9));
        assert_eq!(asked_after(default, never), None);
        assert_eq!(asked_after(None, Some(minutes(2))), Some(2));
    }

    /// The state of a stopped process cannot be determined.
    #[test]
    fn an_unsettled_client_does_not_keep_other_clients_awake() {
        let mut scene = idle(&[12 * GIB, 12 * GIB, 12 * GIB]);
        assert!(scene.t.after(AFTER).contains(&prepares(1)));
        scene.t.map(1);
        scene.ready(1);
        scene.measure();
        let commands = scene.helper(1, SleepOutcome::Unknown);
        assert!(commands.contains(&prepares(2)), "{commands:?}");
    }

    /// If a new client's context would leave another client too little memory, the new client waits
    /// until an idle client has been put to sleep.
    #[test]
    fn an_idle_client_sleeps_to_make_room_for_a_new_client() {
        let mut scene = idle(&[GIB, 15 * GIB]);
        scene.t.request(2);
        scene.t.map(2);
        scene.t.after(AFTER);
        let waits = Command::Waiting { client: client(3), gpus: GpuSet::from([gpu(0)]), why: WaitReason::Context };
        scene.t.say(Event::Connected { client: client(3), gang: 0, tenant: TenantId(3) });
        let commands = scene.t.say(Event::Attached { client: client(3), gpu: gpu(0), engine: Engine::Swap });
        assert!(commands.contains(&waits) && commands.contains(&prepares(1)), "{commands:?}");
        scene.t.map(1);
        // Its memory takes longer to leave than a context without any such prospect may wait.
        let mut commands = scene.t.after(Duration::from_secs(3));
        scene.ready(1);
        scene.contexts.retain(|n| *n != 1);
        commands.extend(scene.helper(1, SleepOutcome::Asleep));
        commands.extend([scene.measure(), scene.t.after(Duration::from_secs(3))].concat());
        assert!(commands.contains(&Command::Attached { client: client(3), gpu: gpu(0) }), "{commands:?}");
        let is_denied = commands.iter().any(|command| matches!(command, Command::Denied { .. }));
        assert!(!is_denied, "the room that its leaving has made is not measured yet: {commands:?}");
    }
}
