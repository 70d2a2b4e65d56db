//! Rooms: memory that is freed immediately and kept free for programs without nvshare. The
//! scheduler also keeps headroom for such programs while they grow.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

fn make(t: &mut Talk, room: u64, bytes: u64) -> Vec<Command> {
    let until = t.now + Duration::from_secs(60);
    t.say(Event::RoomRequested { room: RoomId(room), gpu: gpu(0), bytes, until })
}

fn close(t: &mut Talk, room: u64) -> Vec<Command> {
    t.say(Event::RoomClosed { room: RoomId(room) })
}

fn ready(room: u64) -> Command {
    Command::RoomReady { room: RoomId(room), gpu: gpu(0) }
}

fn refused(room: u64, why: RoomObstacle) -> Command {
    Command::RoomRefused { room: RoomId(room), gpu: gpu(0), why }
}

/// Evicts exactly the memory that must be evicted, and then measures the GPU.
fn evict(t: &mut Talk, n: u64) -> Vec<Command> {
    let commands = t.map(n);
    t.now += ms(1);
    let measured = Event::Measured { gpu: gpu(0), begun: t.now, free: None, evicted: 0, found: Default::default() };
    [commands, t.say(measured)].concat()
}

fn others(t: &mut Talk, bytes: u64) -> Vec<Command> {
    t.say(Event::GpuOverhead { gpu: gpu(0), begun: t.now, bytes, others: bytes, complete: true })
}

#[test]
fn a_room_of_free_memory_is_ready_immediately() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 4 * GIB);
    assert!(make(&mut t, 1, 8 * GIB).contains(&ready(1)));
    let view = t.machine.gpus().remove(0);
    assert_eq!((view.capacity, view.kept, view.rooms.len()), (8 * GIB, 8 * GIB, 1));
    close(&mut t, 1);
    assert_eq!(t.machine.gpus()[0].capacity, 16 * GIB);
}

#[test]
fn a_room_preempts_a_holders_turn() {
    for mode in [AntiThrash::On, AntiThrash::Auto, AntiThrash::Off] {
        let mut t = Talk::in_mode(mode);
        t.join(1, 12 * GIB);
        t.request(1);
        let commands = make(&mut t, 1, 8 * GIB);
        assert!(commands.contains(&revoke(1)), "nobody else waits, and it has to go at once: {commands:?}");
        let commands = t.release(1, ReleaseReason::Revoked);
        assert_eq!(allowances(&commands).last(), Some(&(1, 8 * GIB)), "only what is needed leaves");
        assert!(evict(&mut t, 1).contains(&ready(1)));
        let commands = t.request(1);
        assert!(commands.contains(&waiting(1, WaitReason::Pinned)), "it does not fit beside the room: {commands:?}");
        assert_eq!(
            t.machine.explain(client(1), t.now).next().and_then(|it| it.obstacle),
            Some(Obstacle::Room(gpu(0), 8 * GIB))
        );
        let commands = close(&mut t, 1);
        assert!(allowances(&commands).contains(&(1, 12 * GIB)) && commands.contains(&grant(1)), "{commands:?}");
    }
}

#[test]
fn a_room_preempts_one_of_two_holders_that_fit_beside_it_only_alone() {
    let mut t = Talk::in_mode(AntiThrash::Off);
    for n in [1, 2] {
        t.join(n, 6 * GIB);
        t.request(n);
    }
    let commands = make(&mut t, 1, 8 * GIB);
    assert!(commands.contains(&revoke(1)) && !commands.contains(&revoke(2)), "{commands:?}");
}

#[test]
fn clients_that_fit_beside_a_room_continue() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 8 * GIB);
    t.join(2, 8 * GIB);
    t.request(1);
    let commands = make(&mut t, 1, 8 * GIB);
    assert!(!commands.contains(&revoke(1)), "it fits, and the other gives what is needed: {commands:?}");
    assert_eq!(allowances(&commands).last(), Some(&(2, 0)));
    assert!(evict(&mut t, 2).contains(&ready(1)));
    t.request(2);
    t.after(Duration::from_secs(1));
    let commands = t.release(1, ReleaseReason::Revoked);
    assert_eq!(allowances(&commands).last(), Some(&(1, 0)), "they take turns on what is left");
    assert!(t.map(1).contains(&grant(2)));
}

#[test]
fn a_room_is_ready_once_the_freed_memory_is_measured() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 12 * GIB);
    let found = [(client(1), exactly(12 * GIB))].into();
    t.say(Event::Measured { gpu: gpu(0), begun: t.now, free: None, evicted: 0, found });
    make(&mut t, 1, 8 * GIB);
    t.now += ms(10);
    let commands = t.map(1);
    assert!(!commands.contains(&ready(1)) && commands.contains(&Command::Measure { gpu: gpu(0) }), "{commands:?}");
    let found = [(client(1), exactly(8 * GIB))].into();
    let begun = t.now;
    t.now += ms(2);
    assert!(t.say(Event::Measured { gpu: gpu(0), begun, free: None, evicted: 0, found }).contains(&ready(1)));
}

#[test]
fn freed_memory_beyond_a_room_need_not_be_measured() {
    for more in [0, MIB] {
        let mut t = Talk::in_mode(AntiThrash::On);
        t.join(1, 8 * GIB);
        t.join(2, 12 * GIB);
        t.request(2);
        t.map(1);
        assert_eq!((t.attachment(1).charge, t.attachment(1).unverified), (4 * GIB, 4 * GIB));
        t.say(Event::Disconnected { client: client(2) });
        t.now += ms(1);
        let commands = make(&mut t, 1, 8 * GIB + more);
        let measures = commands.contains(&Command::Measure { gpu: gpu(0) });
        assert_eq!((commands.contains(&ready(1)), measures), (more == 0, more > 0), "{commands:?}");
    }
}

#[test]
fn memory_that_other_programs_take_from_a_room_is_not_kept_again() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 8 * GIB);
    make(&mut t, 1, 8 * GIB);
    t.request(1);
    let commands = others(&mut t, 6 * GIB);
    assert!(!commands.contains(&revoke(1)), "{commands:?}");
    let view = t.machine.gpus().remove(0);
    assert_eq!((view.capacity, view.kept), (8 * GIB, 2 * GIB));
    assert!(make(&mut t, 1, 8 * GIB).contains(&ready(1)), "it can still be renewed");
    close(&mut t, 1);
    assert!(t.machine.gpus()[0].capacity <= 10 * GIB);
}

#[test]
fn an_impossible_room_is_refused() {
    let mut t = Talk::in_mode(AntiThrash::On);
    assert_eq!(make(&mut t, 1, 17 * GIB), [refused(1, RoomObstacle::TooLarge { most: 16 * GIB })]);
    make(&mut t, 2, 6 * GIB);
    assert_eq!(make(&mut t, 3, 11 * GIB), [refused(3, RoomObstacle::TooLarge { most: 10 * GIB })]);
    close(&mut t, 2);
    t.join(1, 12 * GIB);
    t.report(1, 12 * GIB, 12 * GIB, 10 * GIB);
    let commands = make(&mut t, 4, 8 * GIB);
    assert!(commands.contains(&refused(4, RoomObstacle::Unevictable { bytes: 2 * GIB })), "{commands:?}");
    let elsewhere = Event::RoomRequested { room: RoomId(5), gpu: gpu(7), bytes: 1, until: t.now + ms(1000) };
    let commands = t.say(elsewhere);
    assert_eq!(commands, [Command::RoomRefused { room: RoomId(5), gpu: gpu(7), why: RoomObstacle::Gone }]);
    assert_eq!((t.machine.gpus()[0].kept, t.machine.gpus()[0].rooms.len()), (0, 0));
}

#[test]
fn a_room_waits_only_briefly_for_a_holder_that_does_not_drain() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 12 * GIB);
    t.request(1);
    assert!(make(&mut t, 1, 8 * GIB).contains(&revoke(1)));
    let mut refused = false;
    for _ in 0..100 {
        refused |= t.after(ms(100)).iter().any(|command| matches!(command, Command::RoomRefused { .. }));
    }
    assert!(refused);
    assert_eq!(t.machine.gpus()[0].kept, 0, "the others have the memory again");
}

#[test]
fn a_room_expires_unless_it_is_renewed() {
    let mut t = Talk::in_mode(AntiThrash::On);
    make(&mut t, 1, 8 * GIB);
    t.after(Duration::from_secs(50));
    assert!(make(&mut t, 1, 8 * GIB).contains(&ready(1)), "it is free already");
    assert_eq!(t.after(Duration::from_secs(50)), []);
    assert_eq!(t.after(Duration::from_secs(10)), [Command::RoomEnded { room: RoomId(1), gpu: gpu(0) }]);
    assert_eq!((t.machine.gpus()[0].capacity, t.machine.deadline()), (16 * GIB, None));
    make(&mut t, 2, 8 * GIB);
    let commands = t.say(Event::GpuGone { gpu: gpu(0) });
    assert!(commands.contains(&Command::RoomEnded { room: RoomId(2), gpu: gpu(0) }), "{commands:?}");
}

#[test]
fn a_gang_that_does_not_fit_beside_a_room_waits_and_is_not_split() {
    let mut t = Talk::in_mode(AntiThrash::On);
    for n in [1, 2] {
        t.say(Event::Connected { client: client(n), gang: 5, tenant: TenantId(0) });
        t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
        t.report(n, 7 * GIB, 0, 0);
    }
    make(&mut t, 1, 8 * GIB);
    t.request(1);
    let commands = t.request(2);
    assert!(!commands.contains(&grant(1)) && !commands.contains(&grant(2)), "{commands:?}");
    close(&mut t, 1);
    let commands = [t.map(1), t.map(2)].concat();
    let both = [t.state(1), t.state(2)];
    assert_eq!(both, [LockState::Holding; 2], "{commands:?}");
}

#[test]
fn growing_foreign_programs_get_headroom_in_advance() {
    let mut t = Talk::new(Settings { reserve: 512 * MIB, ..settings(AntiThrash::On, Duration::from_secs(1)) });
    t.join(1, 15 * GIB);
    t.request(1);
    // The other programs grow by 1 GiB/s, measured eight times a second.
    let mut free = 0;
    for n in 1..=32u64 {
        t.now += ms(125);
        let used = n * 128 * MIB;
        let commands = others(&mut t, used);
        if commands.contains(&revoke(1)) {
            t.release(1, ReleaseReason::Revoked);
        }
        t.map(1);
        free = 16 * GIB - used - t.attachment(1).mapped;
        assert!(n < 8 || free >= GIB, "{free} after {n}");
    }
    assert!(free <= 4 * GIB, "{free}");
    t.after(Duration::from_secs(10));
    assert_eq!(t.machine.gpus()[0].kept, 0);
}

#[test]
fn memory_attributed_late_to_other_programs_is_no_growth() {
    let mut t = Talk::in_mode(AntiThrash::On);
    // Immediately after the start of the scheduler, unknown processes may be clients that are about
    // to reconnect.
    t.say(Event::GpuOverhead { gpu: gpu(0), begun: t.now, bytes: 8 * GIB, others: 0, complete: false });
    t.now += ms(500);
    others(&mut t, 8 * GIB);
    assert_eq!(t.machine.gpus()[0].kept, 0);
    t.now += ms(500);
    others(&mut t, 9 * GIB);
    assert_eq!(t.machine.gpus()[0].kept, 2 * GIB, "this is");
}

#[test]
fn an_allocation_waits_until_foreign_programs_stop_growing() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.say(Event::HostMemory { bytes: 0 });
    t.join(1, 0);
    others(&mut t, GIB);
    t.now += ms(500);
    others(&mut t, 2 * GIB);
    let commands = t.wish(1, 13 * GIB);
    assert_eq!((t.machine.gpus()[0].kept, limits(&commands)), (2 * GIB, vec![]), "there are only 12 for now");
    let is_allowed = (0..10).any(|_| {
        t.now += ms(500);
        let commands = others(&mut t, 2 * GIB);
        let is_denied = |command: &Command| matches!(command, Command::Denied { .. });
        assert!(!commands.iter().any(is_denied), "it fits soon: {commands:?}");
        limits(&commands).iter().any(|(_, bytes)| *bytes >= 13 * GIB)
    });
    assert!(is_allowed, "{:?}", t.attachment(1));
}
