//! Clients whose processes other programs lock, checkpoint and restore, message by message.

use crate::sleep::{CONTEXT, Scene};
use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::collections::BTreeMap;
use std::time::Duration;

const LENT: ForeignState = ForeignState::Checkpointed { restore_waits: true };
const RESERVED: ForeignState = ForeignState::Checkpointed { restore_waits: false };

impl Scene {
    /// Client 1 holds the GPU with 10 GiB, and client 2 waits with the same demand.
    fn contended() -> Self {
        let mut scene = Self::new(&[10 * GIB, 10 * GIB]);
        scene.t.request(1);
        for _ in 0..3 {
            scene.t.map(2);
            scene.t.map(1);
            scene.measure();
        }
        assert_eq!(scene.t.state(1), LockState::Holding);
        scene.t.request(2);
        scene
    }

    fn foreign(&mut self, n: u64, state: ForeignState) -> Vec<Command> {
        match state {
            ForeignState::Checkpointed { .. } => self.contexts.retain(|there| *there != n),
            _ if !self.contexts.contains(&n) => self.contexts.push(n),
            _ => {}
        }
        self.t.say(Event::ForeignCheckpoint { client: client(n), state })
    }

    /// Lets client 2 map what it may, and measures the GPU.
    fn settle(&mut self) -> Vec<Command> {
        let mut commands = self.t.map(2);
        commands.extend(self.measure());
        commands.extend(self.t.map(2));
        commands
    }
}

#[test]
fn a_locked_holder_loses_its_turn_and_keeps_its_memory() {
    let mut scene = Scene::contended();
    let commands = scene.foreign(1, ForeignState::Locked);
    assert_eq!((scene.phase(1), scene.t.state(1)), (SleepPhase::Locked, LockState::Suspended), "{commands:?}");
    scene.settle();
    assert_eq!(scene.t.attachment(1).charge, 10 * GIB);
    assert_eq!(scene.t.state(2), LockState::Waiting, "there is no room beside the locked process");
    assert_eq!(scene.t.after(Duration::from_secs(120)), [], "it is neither probed nor asked again");
    // Another client fits beside the memory of the locked process.
    scene.t.join(3, GIB);
    scene.contexts.push(3);
    scene.t.request(3);
    for _ in 0..3 {
        scene.settle();
        scene.t.map(3);
    }
    assert_eq!(scene.t.state(3), LockState::Holding);
}

/// The driver locks a process only when its work has ended.
#[test]
fn a_stuck_holder_that_is_then_locked_loses_its_turn() {
    let mut scene = Scene::contended();
    scene.t.after(Duration::from_secs(60));
    scene.t.say(Event::Stuck { client: client(1), gpus: [gpu(0)].into(), reason: StuckReason::LongWork });
    scene.foreign(1, ForeignState::Locked);
    assert_eq!((scene.phase(1), scene.t.state(1)), (SleepPhase::Locked, LockState::Suspended));
}

#[test]
fn the_room_of_a_checkpointed_client_stays_reserved_if_its_restore_would_not_wait() {
    let mut scene = Scene::contended();
    scene.foreign(1, ForeignState::Locked);
    scene.foreign(1, RESERVED);
    for _ in 0..20 {
        scene.settle();
        scene.t.after(Duration::from_secs(10));
    }
    assert_eq!((scene.phase(1), scene.t.state(2)), (SleepPhase::Checkpointed, LockState::Waiting));
    let view = scene.t.attachment(1);
    assert_eq!((view.charge, view.eviction_blocked), (10 * GIB, Some(EvictionBlock::Foreign)));
    let capacity = scene.capacity();
    assert!(capacity <= 16 * GIB - 2 * CONTEXT, "the room for its context is reserved, too: {capacity}");
    // The process is back without a word, and runs when it is unlocked.
    scene.foreign(1, ForeignState::Locked);
    let commands = scene.foreign(1, ForeignState::Runs);
    assert!(commands.contains(&Command::Awake { client: client(1), moved: Vec::new() }), "{commands:?}");
    scene.t.release(1, ReleaseReason::Revoked);
    scene.t.map(1);
    scene.settle();
    assert_eq!(scene.t.state(2), LockState::Holding);
}

#[test]
fn others_use_the_room_of_a_checkpointed_client_until_its_restore_waits_for_it() {
    let mut scene = Scene::contended();
    scene.foreign(1, ForeignState::Locked);
    scene.foreign(1, LENT);
    scene.settle();
    scene.settle();
    assert_eq!((scene.phase(1), scene.t.state(2)), (SleepPhase::Lent, LockState::Holding));
    assert_eq!((scene.t.attachment(1).charge, scene.t.attachment(2).mapped), (10 * GIB, 10 * GIB));

    let allowed = Command::RestoreAllowed { client: client(1) };
    let commands = scene.t.say(Event::RestoreRequested { client: client(1) });
    assert!(!commands.contains(&allowed), "{commands:?}");
    assert_eq!(scene.phase(1), SleepPhase::Waking);
    let mut commands = Vec::new();
    for _ in 0..50 {
        if scene.t.state(2) == LockState::Revoking {
            scene.t.release(2, ReleaseReason::Revoked);
        }
        commands.extend(scene.settle());
        commands.extend(scene.t.after(ms(500)));
        if commands.contains(&allowed) {
            break;
        }
        let free = 16 * GIB - scene.t.attachment(2).mapped - CONTEXT;
        scene.free = Some(free);
    }
    assert!(commands.contains(&allowed), "{commands:?}");
    assert!(scene.t.attachment(2).charge <= 16 * GIB - 2 * CONTEXT - 10 * GIB, "the room is there");
    scene.foreign(1, ForeignState::Locked);
    assert_eq!((scene.phase(1), scene.t.attachment(1).charge), (SleepPhase::Locked, 10 * GIB));
    scene.foreign(1, ForeignState::Runs);
    assert_eq!(scene.phase(1), SleepPhase::Awake);
}

#[test]
fn a_restore_that_is_given_up_lends_the_room_again() {
    let mut scene = Scene::contended();
    scene.foreign(1, LENT);
    scene.settle();
    scene.settle();
    scene.t.say(Event::RestoreRequested { client: client(1) });
    scene.foreign(1, LENT);
    assert_eq!(scene.phase(1), SleepPhase::Lent);
    scene.settle();
    assert_eq!(scene.t.state(2), LockState::Holding);
    assert_eq!(
        scene.t.after(Duration::from_secs(60)).iter().filter(|c| matches!(c, Command::Revoke { .. })).count(),
        0
    );
}

#[test]
fn a_client_that_ends_while_it_is_checkpointed_leaves_nothing_behind() {
    for state in [ForeignState::Locked, RESERVED, LENT] {
        let mut scene = Scene::contended();
        scene.foreign(1, state);
        scene.contexts.retain(|n| *n != 1);
        scene.t.say(Event::Disconnected { client: client(1) });
        scene.settle();
        scene.settle();
        assert_eq!((scene.t.state(2), scene.t.attachment(2).mapped), (LockState::Holding, 10 * GIB));
        assert_eq!(scene.capacity(), 16 * GIB - CONTEXT);
    }
}

/// The library has reported the memory, and no measurement can show it.
#[test]
fn a_new_scheduler_keeps_the_room_of_a_checkpointed_client() {
    for (state, knows_first) in [(RESERVED, true), (RESERVED, false), (LENT, true), (LENT, false)] {
        let mut scene = Scene::new(&[]);
        for n in [1, 2] {
            scene.t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(n) });
            scene.t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
        }
        scene.contexts.push(2);
        scene.measure();
        if knows_first {
            scene.foreign(1, state);
        }
        scene.t.report(1, 10 * GIB, 10 * GIB, 0);
        scene.measure();
        scene.foreign(1, state);
        assert_eq!(scene.t.attachment(1).charge, 10 * GIB, "{state:?}");
        scene.t.report(1, 10 * GIB, 10 * GIB, 0);
        scene.measure();
        assert_eq!(scene.t.attachment(1).charge, 10 * GIB, "{state:?}");
        scene.t.report(2, 10 * GIB, 0, 0);
        scene.t.request(2);
        scene.settle();
        scene.settle();
        assert_eq!(scene.t.state(2) == LockState::Holding, state == LENT);
        assert_eq!(scene.t.attachment(1).charge, 10 * GIB, "{state:?}");
    }
}

#[test]
fn a_report_of_a_checkpointed_client_reserves_no_more_than_there_is() {
    let mut scene = Scene::new(&[]);
    for n in [1, 2] {
        scene.t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(n) });
        scene.t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
    }
    scene.contexts.push(2);
    scene.t.report(2, 4 * GIB, 0, 0);
    scene.t.map(2);
    scene.t.report(2, 4 * GIB, 4 * GIB, 4 * GIB);
    scene.measure();
    scene.foreign(1, RESERVED);
    scene.t.report(1, 1 << 50, 1 << 50, 0);
    scene.measure();
    let view = scene.t.machine.gpu(gpu(0)).unwrap();
    assert!(view.charged <= view.capacity && scene.t.attachment(1).charge > 8 * GIB, "{view:?}");
    scene.t.request(2);
    assert_eq!(scene.t.state(2), LockState::Holding);
}

#[test]
fn a_checkpointed_client_that_does_not_fit_now_delays_no_other_client() {
    let mut scene = Scene::contended();
    scene.foreign(1, LENT);
    for _ in 0..3 {
        scene.settle();
    }
    // Client 2 now has memory where client 1's was, and cannot evict it.
    scene.t.report(2, 10 * GIB, 10 * GIB, 8 * GIB);
    let capacity = scene.capacity();
    scene.t.say(Event::RestoreRequested { client: client(1) });
    assert_eq!((scene.phase(1), scene.capacity()), (SleepPhase::Waking, capacity));
    let obstacle = scene.t.machine.explain(client(1), scene.t.now).next().and_then(|what| what.obstacle);
    assert_eq!(obstacle, Some(Obstacle::NoRoomToReturn(8 * GIB)));
    assert!(!scene.t.after(Duration::from_secs(600)).contains(&revoke(2)));
    assert_eq!(scene.t.state(2), LockState::Holding);
    scene.t.release(2, ReleaseReason::Idle);
    scene.t.request(2);
    assert_eq!(scene.t.state(2), LockState::Holding);
    // Half of it can be evicted again, which makes room.
    scene.t.report(2, 10 * GIB, 10 * GIB, 4 * GIB);
    let mut commands = Vec::new();
    for _ in 0..50 {
        if scene.t.state(2) == LockState::Revoking {
            scene.t.release(2, ReleaseReason::Revoked);
        }
        commands.extend(scene.settle());
        commands.extend(scene.t.after(ms(500)));
    }
    assert!(commands.contains(&Command::RestoreAllowed { client: client(1) }), "{commands:?}");
}

/// The programs fill the GPU, one of them always runs a kernel that is longer than their turns, and the
/// client does not fit beside either of them.
#[test]
fn programs_with_long_kernels_do_not_keep_a_client_from_returning() {
    const KERNEL: Duration = Duration::from_secs(45);
    let mut scene = Scene::new(&[10 * GIB, 2 * GIB, 2 * GIB]);
    scene.foreign(1, LENT);
    scene.measure();
    assert_eq!(scene.t.attachment(1).charge, 10 * GIB);
    // The first kernel of client 2 is shorter, so that the kernels of the two end at different times.
    let mut ends = BTreeMap::from([(2, scene.t.now + KERNEL / 2)]);
    let mut idle = 0;
    for second in 0..1200 {
        scene.t.now += Duration::from_secs(1);
        scene.t.after(Duration::ZERO);
        for n in [2, 3] {
            let holds = !matches!(scene.t.state(n), LockState::Idle | LockState::Waiting);
            if holds && *ends.entry(n).or_insert(scene.t.now + KERNEL) <= scene.t.now {
                ends.remove(&n);
                scene.t.release(n, ReleaseReason::Revoked);
            } else if scene.t.state(n) == LockState::Revoking {
                scene.t.stuck(n, StuckReason::LongWork);
            }
            if scene.t.state(n) == LockState::Idle {
                scene.t.request(n);
            }
            let allowed = scene.t.attachment(n).allowance;
            scene.t.report(n, 15 * GIB / 2, allowed.min(15 * GIB / 2), 0);
        }
        scene.measure();
        match second {
            0..200 => {}
            200 => {
                assert_eq!([2, 3].map(|n| scene.t.attachment(n).mapped), [15 * GIB / 2; 2]);
                scene.t.say(Event::RestoreRequested { client: client(1) });
            }
            _ if scene.phase(1) == SleepPhase::Restoring => return assert!(idle < 100, "no client ran for {idle} s"),
            _ => idle += u32::from(ends.is_empty()),
        }
    }
    panic!("client 1 is not restored: {:?}", scene.t.machine.gpus());
}

/// Otherwise its memory would count as evictable again, and room would be set aside again and again.
#[test]
fn a_holder_that_cannot_drain_stays_revoked_while_a_client_waits_to_return() {
    let mut scene = Scene::new(&[10 * GIB, 2 * GIB]);
    scene.foreign(1, LENT);
    scene.t.report(2, 10 * GIB, 2 * GIB, 0);
    scene.t.request(2);
    scene.settle();
    scene.settle();
    assert_eq!((scene.t.state(2), scene.t.attachment(1).charge), (LockState::Holding, 10 * GIB));
    let capacity = scene.capacity();
    scene.t.say(Event::RestoreRequested { client: client(1) });
    assert!(scene.capacity() < capacity, "room is set aside");
    for second in 0..200 {
        if scene.t.after(Duration::from_secs(1)).contains(&revoke(2)) {
            scene.t.stuck(2, StuckReason::LongWork);
        }
        if second > 60 {
            assert_eq!((scene.t.state(2), scene.capacity()), (LockState::Undrainable, capacity), "{second}");
        }
    }
    scene.t.release(2, ReleaseReason::Revoked);
    for _ in 0..3 {
        scene.settle();
    }
    assert_eq!(scene.phase(1), SleepPhase::Restoring);
}

/// A checkpoint takes seconds, and so may the daemon's question about it. Until it is noticed,
/// measurements refute the client's report.
#[test]
fn a_checkpoint_that_is_noticed_late_keeps_the_charge_of_its_memory() {
    for seconds in [0, 3, 12, 30] {
        let mut scene = Scene::contended();
        scene.contexts.retain(|there| *there != 1);
        for _ in 0..seconds * 5 {
            scene.measure();
            scene.t.after(Duration::from_millis(200));
        }
        scene.foreign(1, LENT);
        assert_eq!(scene.t.attachment(1).charge, 10 * GIB, "noticed after {seconds} s");
        scene.settle();
        let commands = scene.t.say(Event::RestoreRequested { client: client(1) });
        assert!(!commands.contains(&Command::RestoreAllowed { client: client(1) }), "{commands:?}");
    }
}
