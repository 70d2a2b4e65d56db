//! GPUs that are lost, and a machine that is about to suspend: message by message, and in random
//! worlds.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;

fn gone(t: &mut Talk) -> Vec<Command> {
    t.say(Event::GpuGone { gpu: gpu(0) })
}

fn found(t: &mut Talk, n: u64) -> Vec<Command> {
    t.say(Event::GpuFound { gpu: gpu(n), total: 16 * GIB })
}

fn suspend(t: &mut Talk, suspended: bool) -> Vec<Command> {
    t.say(Event::Suspend { suspended })
}

/// Client 1 holds the lock and client 2 waits for it. The GPU has room for the memory of one
/// client.
fn one_too_many() -> Talk {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 12 * GIB);
    t.join(2, 12 * GIB);
    t.request(1);
    t.request(2);
    assert_eq!((t.state(1), t.state(2)), (LockState::Holding, LockState::Waiting));
    t
}

fn place(t: &mut Talk, n: u64) -> Vec<Command> {
    t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(0) });
    let request = PlacementRequest { candidates: vec![gpu(0), gpu(1)], count: 1, bytes: None, ahead: false };
    t.say(Event::PlacementRequested { client: client(n), request })
}

// ---- a GPU that is gone ----

#[test]
fn a_missing_gpu_without_clients_is_dropped() {
    let mut t = Talk::in_mode(AntiThrash::On);
    gone(&mut t);
    assert!(t.machine.gpus().is_empty());
    assert_eq!(t.machine.deadline(), None);
    found(&mut t, 0);
    t.join(1, GIB);
    t.request(1);
    assert_eq!(t.state(1), LockState::Holding, "it is there again, like any other");
}

#[test]
fn no_client_waits_on_a_missing_gpu() {
    let mut t = one_too_many();
    let commands = gone(&mut t);
    // The scheduler allows client 2 all memory that it needs. So client 2 continues, and gets the
    // driver's error for the missing GPU.
    assert_eq!(allowances(&commands), [(2, 12 * GIB)]);
    assert!(commands.contains(&grant(2)), "{commands:?}");
    assert!(!commands.iter().any(|command| matches!(command, Command::Revoke { .. })), "{commands:?}");
    // Clients that connect later don't wait either.
    t.say(Event::Connected { client: client(3), gang: 0, tenant: TenantId(1) });
    let commands = t.say(Event::Attached { client: client(3), gpu: gpu(0), engine: Engine::Swap });
    assert!(commands.contains(&Command::Attached { client: client(3), gpu: gpu(0) }), "{commands:?}");
    t.report(3, 12 * GIB, 0, 0);
    assert!(t.request(3).contains(&grant(3)));
    assert_eq!(t.after(std::time::Duration::from_secs(60)), [], "nobody is asked for anything");
}

#[test]
fn a_revoked_client_on_a_missing_gpu_is_granted_again() {
    let mut t = one_too_many();
    assert_eq!(t.after(std::time::Duration::from_secs(10)), [revoke(1)]);
    t.request(1);
    let commands = gone(&mut t);
    assert!(commands.contains(&grant(2)) && !commands.contains(&grant(1)), "{commands:?}");
    assert!(t.release(1, ReleaseReason::Revoked).contains(&grant(1)));
    let mut holders: Vec<u64> = t.machine.gpus()[0].holders.iter().map(|holder| holder.client.0).collect();
    holders.sort_unstable();
    assert_eq!(holders, [1, 2]);
}

#[test]
fn a_missing_gpu_is_dropped_with_its_last_client() {
    let mut t = one_too_many();
    gone(&mut t);
    t.say(Event::Disconnected { client: client(1) });
    assert!(t.machine.gpus()[0].gone);
    t.say(Event::Detached { client: client(2), gpu: gpu(0) });
    assert!(t.machine.gpus().is_empty());
    assert_eq!(t.machine.deadline(), None);
}

#[test]
fn a_returning_gpu_is_shared_in_turns_again() {
    let mut t = one_too_many();
    gone(&mut t);
    assert_eq!((t.state(1), t.state(2)), (LockState::Holding, LockState::Holding));
    let commands = found(&mut t, 0);
    assert!(commands.contains(&revoke(2)), "one of them has to wait: {commands:?}");
    assert!(!t.machine.gpus()[0].gone);
}

#[test]
fn a_request_for_several_gpus_waits_only_for_present_gpus() {
    let mut t = Talk::in_mode(AntiThrash::On);
    found(&mut t, 1);
    t.say(Event::GpuOverhead { gpu: gpu(1), begun: t.now, bytes: 0, others: 0, complete: true });
    t.join(1, GIB);
    t.join(2, GIB);
    t.say(Event::Attached { client: client(2), gpu: gpu(1), engine: Engine::Swap });
    t.request(1);
    t.say(Event::Requested { client: client(2), gpus: gpus([0, 1]) });
    assert_eq!(t.state(2), LockState::Waiting);
    let commands = gone(&mut t);
    let both = Command::Grant { client: client(2), gpus: gpus([0, 1]) };
    assert!(commands.contains(&both), "{commands:?}");
}

#[test]
fn no_program_is_placed_on_a_missing_gpu() {
    let mut t = Talk::new(Settings { placement: Placement::Spread, ..settings(AntiThrash::Auto, ms(1000)) });
    found(&mut t, 1);
    t.join(9, GIB); // the scheduler keeps a missing GPU while it has a client
    gone(&mut t);
    assert_eq!(place(&mut t, 1), [Command::Placed { client: client(1), gpus: vec![gpu(1)] }]);
    t.say(Event::GpuGone { gpu: gpu(1) });
    let why = PlacementError::TooFew { wanted: 1, there: 0 };
    assert_eq!(place(&mut t, 2), [Command::Unplaced { client: client(2), why }]);
}

// ---- suspend ----

#[test]
fn a_suspend_evicts_all_memory_and_stops_all_clients() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 6 * GIB);
    t.join(2, 6 * GIB);
    t.request(1);
    assert!(t.machine.gpus()[0].charged >= 12 * GIB && !t.machine.is_suspended());
    let commands = suspend(&mut t, true);
    assert!(t.machine.is_suspended());
    assert_eq!(allowances(&commands).last(), Some(&(2, 0)), "an idle client is asked at once");
    assert!(commands.contains(&revoke(1)), "{commands:?}");
    t.map(2);
    assert!(!t.machine.is_evacuated(), "client 1 still runs");
    let commands = t.release(1, ReleaseReason::Revoked);
    assert_eq!(allowances(&commands).last(), Some(&(1, 0)));
    assert!(!t.machine.is_evacuated());
    t.map(1);
    assert!(t.machine.is_evacuated());
    assert_eq!((t.attachment(1).mapped, t.attachment(2).mapped), (0, 0));

    // A client that requests the GPU waits until the machine has resumed.
    assert!(!t.request(2).contains(&grant(2)));
    t.after(std::time::Duration::from_secs(20));
    assert_eq!(t.state(2), LockState::Waiting);
    let commands = suspend(&mut t, false);
    assert!(commands.contains(&grant(2)), "{commands:?}");
    t.map(2);
    assert_eq!(t.attachment(2).mapped, 6 * GIB);
}

#[test]
fn unevictable_memory_does_not_block_a_suspend() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 6 * GIB);
    t.report(1, 6 * GIB, 6 * GIB, 2 * GIB);
    t.join(2, 6 * GIB);
    suspend(&mut t, true);
    assert!(!t.machine.is_evacuated());
    t.map(1); // all but the pinned memory
    t.stuck(2, StuckReason::HostFull);
    assert_eq!(t.attachment(1).mapped, 2 * GIB);
    assert!(t.machine.is_evacuated());
}

#[test]
fn managed_clients_without_turns_wait_during_a_suspend() {
    let mut t = Talk::in_mode(AntiThrash::Off);
    t.say(Event::Connected { client: client(1), gang: 0, tenant: TenantId(0) });
    t.say(Event::Attached { client: client(1), gpu: gpu(0), engine: Engine::Managed });
    t.report(1, GIB, 0, 0);
    suspend(&mut t, true);
    assert!(!t.request(1).contains(&grant(1)));
    assert!(suspend(&mut t, false).contains(&grant(1)));
}

#[test]
fn clients_of_a_gpu_found_during_a_suspend_wait_for_the_resume() {
    let mut t = Talk::in_mode(AntiThrash::On);
    gone(&mut t);
    suspend(&mut t, true);
    found(&mut t, 0);
    t.join(1, GIB);
    t.request(1);
    assert_eq!(t.state(1), LockState::Waiting);
    suspend(&mut t, false);
    assert_eq!(t.state(1), LockState::Holding);
    assert_eq!(t.machine.gpus().into_iter().map(|gpu| gpu.holders.len()).collect::<Vec<_>>(), [1]);
}
