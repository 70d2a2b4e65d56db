//! Limits from programs' environments, message by message. Such a limit applies to one client, in
//! addition to its rule.

use nvshare_sched::*;
use scheduler_sim::*;
use scheduler_tests::*;
use std::time::Duration;

fn say(t: &mut Talk, n: u64, own: EnvLimits) -> Vec<Command> {
    t.say(Event::EnvLimits { client: client(n), limits: own })
}

fn at_most(bytes: u64) -> EnvLimits {
    EnvLimits { memory_max: Amount::Bytes(bytes), ..EnvLimits::default() }
}

/// All clients carry out their limits and allowances, until no more commands follow.
fn settle(t: &mut Talk) {
    let clients = t.machine.clients().len() as u64;
    (0..3).for_each(|_| (1..=clients).for_each(|n| drop(t.map(n))));
}

fn wish(t: &mut Talk, n: u64, bytes: u64) -> Vec<Command> {
    let mut commands = t.wish(n, bytes);
    commands.retain(|command| matches!(command, Command::Waiting { .. } | Command::Denied { .. }));
    settle(t);
    commands
}

/// Connects a client with these environment limits and no memory.
fn arrive(t: &mut Talk, n: u64, own: EnvLimits) -> Vec<Command> {
    t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(0) });
    say(t, n, own);
    t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap })
}

#[test]
fn an_environment_memory_max_includes_the_context() {
    let mut t = Talk::new(Settings { context: 512 * MIB, ..settings(AntiThrash::Auto, Duration::from_secs(1)) });
    let most = 5 * GIB + 2 * MIB;
    let commands = arrive(&mut t, 1, at_most(most));
    let told = commands.iter().find_map(|command| match command {
        Command::Limit { bytes, max, .. } => Some((*bytes, *max)),
        _ => None,
    });
    assert_eq!(told, Some((most - 512 * MIB, Some(most))), "as long as its context was not measured");
    let measured = |bytes| Event::ContextSizes { gpu: gpu(0), bytes: [(client(1), bytes)].into() };
    t.say(measured(300 * MIB));
    settle(&mut t);
    assert_eq!(t.attachment(1).limit, most - 300 * MIB);
    let beyond = most - 300 * MIB + 1;
    assert_eq!(wish(&mut t, 1, beyond), [denied(1, beyond, Denial::EnvLimit)]);
    assert_eq!(wish(&mut t, 1, beyond - 1), []);
    // The limit of client 1 doesn't reduce the limit of other clients.
    t.join(2, 0);
    assert!(t.attachment(2).limit > 14 * GIB, "{:?}", t.attachment(2));
    t.say(Event::Disconnected { client: client(1) });
    t.join(1, 0);
    assert!(t.attachment(1).limit > 14 * GIB, "another one says nothing of itself");
}

#[test]
fn environment_and_rule_limits_hold_independently() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    for n in [1, 2] {
        arrive(&mut t, n, if n == 1 { at_most(3 * GIB) } else { EnvLimits::default() });
        t.put(&[n], RuleLimits { memory_max: Amount::Bytes(8 * GIB), ..RuleLimits::default() });
        settle(&mut t);
    }
    assert_eq!(t.machine.memory_max(client(1), gpu(0)), Some(8 * GIB));
    assert_eq!((t.attachment(1).limit, t.attachment(2).limit), (3 * GIB, 5 * GIB), "the other has what it leaves");
    assert_eq!(wish(&mut t, 2, 6 * GIB), []);
    assert_eq!((t.attachment(1).limit, t.attachment(2).limit), (2 * GIB, 6 * GIB));
    t.report(2, 6 * GIB, 0, 0);
    assert_eq!(wish(&mut t, 1, 3 * GIB), [denied(1, 3 * GIB, Denial::MemoryMax)], "its group's");
    assert_eq!(wish(&mut t, 1, 3 * GIB + 1), [denied(1, 3 * GIB + 1, Denial::EnvLimit)]);
    // An environment limit above the rule's limit changes nothing.
    say(&mut t, 1, at_most(9 * GIB));
    assert_eq!(wish(&mut t, 1, 3 * GIB), [denied(1, 3 * GIB, Denial::MemoryMax)]);
}

#[test]
fn memory_above_an_environment_limit_is_evicted_while_idle() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 6 * GIB);
    let commands = say(&mut t, 1, at_most(4 * GIB));
    assert_eq!(allowances(&commands).into_iter().min(), Some((1, 4 * GIB)), "{commands:?}");
    t.map(1);
    t.request(1);
    assert_eq!((t.state(1), t.attachment(1).allowance), (LockState::Holding, 6 * GIB), "who runs has what it needs");
}
