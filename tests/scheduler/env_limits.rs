//! What programs say of their own memory, message by message: it holds for one client, beside what its rule allows.

use crate::talk::*;
use nvshare_sched::*;
use scheduler_sim::*;
use std::time::Duration;

fn say(t: &mut Talk, n: u64, own: EnvLimits) -> Vec<Command> {
    t.say(Event::EnvLimits { client: client(n), limits: own })
}

fn at_most(bytes: u64) -> EnvLimits {
    EnvLimits { memory_max: Amount::Bytes(bytes), ..EnvLimits::default() }
}

/// All take up what they were told, until nobody is told anything.
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

/// One that says this of itself, and has nothing yet.
fn arrive(t: &mut Talk, n: u64, own: EnvLimits) -> Vec<Command> {
    t.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(0) });
    say(t, n, own);
    t.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap })
}

#[test]
fn a_program_has_no_more_than_it_allows_itself_context_included() {
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
    // Nobody else has less by it.
    t.join(2, 0);
    assert!(t.attachment(2).limit > 14 * GIB, "{:?}", t.attachment(2));
    t.say(Event::Disconnected { client: client(1) });
    t.join(1, 0);
    assert!(t.attachment(1).limit > 14 * GIB, "another one says nothing of itself");
}

#[test]
fn both_bounds_hold_each_in_its_own_right() {
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
    // What is looser than the rule changes nothing.
    say(&mut t, 1, at_most(9 * GIB));
    assert_eq!(wish(&mut t, 1, 3 * GIB), [denied(1, 3 * GIB, Denial::MemoryMax)]);
}

#[test]
fn what_a_program_could_swap_out_is_bounded_over_all_gpus() {
    let mut t = Talk::in_mode(AntiThrash::Auto);
    t.say(Event::GpuFound { gpu: gpu(1), total: 16 * GIB });
    arrive(&mut t, 1, EnvLimits { swap_max: Some(6 * GIB), ..EnvLimits::default() });
    t.say(Event::Attached { client: client(1), gpu: gpu(1), engine: Engine::Swap });
    let other = MemoryReport { demand: 2 * GIB, limit_ack: u32::MAX, ack: u32::MAX, ..MemoryReport::default() };
    t.say(Event::Memory { client: client(1), gpu: gpu(1), report: other });
    t.report(1, GIB, 0, 0);
    let limits = |t: &Talk| -> u64 {
        t.machine.client(client(1)).unwrap().attachments.iter().map(|attachment| attachment.committed).sum()
    };
    assert!(limits(&t) <= 6 * GIB, "{}", limits(&t));
    assert_eq!(t.wish(1, 5 * GIB).last(), Some(&denied(1, 5 * GIB, Denial::EnvLimit)));
    t.say(Event::Memory { client: client(1), gpu: gpu(1), report: MemoryReport { demand: 0, ..other } });
    t.wish(1, 5 * GIB);
    t.say(Event::Memory { client: client(1), gpu: gpu(1), report: MemoryReport { demand: 0, ..other } });
    assert!(t.attachment(1).limit >= 5 * GIB && limits(&t) <= 6 * GIB, "{:?}", t.machine.client(client(1)));
}

#[test]
fn whether_its_allocations_wait_is_a_programs_own_affair() {
    let most = RuleLimits { memory_max: Amount::Bytes(8 * GIB), ..RuleLimits::default() };
    let waits = |waits| EnvLimits { waits: Some(waits), ..EnvLimits::default() };
    let group = |limits: RuleLimits, own: [EnvLimits; 3]| {
        let mut t = Talk::in_mode(AntiThrash::On);
        for (n, own) in (1..).zip(own) {
            t.join(n, 0);
            say(&mut t, n, own);
            t.put(&[n], limits);
            t.report(n, if n == 1 { 6 * GIB } else { 0 }, 0, 0);
            settle(&mut t);
        }
        t
    };
    let mut t = group(most, [EnvLimits::default(), waits(true), EnvLimits::default()]);
    assert_eq!(wish(&mut t, 2, 4 * GIB), [waiting(2, WaitReason::Memory)]);
    assert_eq!(wish(&mut t, 3, 4 * GIB), [denied(3, 4 * GIB, Denial::MemoryMax)]);
    assert_eq!(wish(&mut t, 3, GIB), [], "who waits keeps nobody from anything");
    let later = t.after(Duration::from_secs(60));
    assert!(!later.iter().any(|c| matches!(c, Command::Denied { .. })), "it waits as long as it takes: {later:?}");
    t.report(1, 2 * GIB, 2 * GIB, 0);
    settle(&mut t);
    assert!(t.attachment(2).limit >= 4 * GIB);

    let ruled = RuleLimits { on_memory_full: OnMemoryFull::Wait, ..most };
    let mut t = group(ruled, [EnvLimits::default(), waits(false), waits(true)]);
    assert_eq!(wish(&mut t, 3, 4 * GIB), [waiting(3, WaitReason::Memory)]);
    assert_eq!(wish(&mut t, 2, 4 * GIB), [denied(2, 4 * GIB, Denial::MemoryMax)]);
    // Nobody else could give it what it does not allow itself, so it does not wait for that.
    say(&mut t, 3, EnvLimits { waits: Some(true), ..at_most(4 * GIB) });
    assert_eq!(wish(&mut t, 3, 5 * GIB), [denied(3, 5 * GIB, Denial::EnvLimit)]);
}

#[test]
fn what_a_program_does_not_claim_leaves_before_what_others_have() {
    let low = |bytes| RuleLimits { memory_low: Some(Amount::Bytes(bytes)), ..RuleLimits::default() };
    let least = |own: EnvLimits| {
        let mut t = Talk::in_mode(AntiThrash::On);
        for n in [1, 2] {
            t.join(n, 6 * GIB);
        }
        t.put(&[1], low(5 * GIB));
        say(&mut t, 1, own);
        t.join(3, 8 * GIB);
        let commands = t.request(3);
        let least = |n| {
            let own = allowances(&commands).into_iter().filter(|(client, _)| *client == n);
            own.map(|(_, bytes)| bytes).min()
        };
        (least(1), least(2))
    };
    let claims = |bytes| EnvLimits { memory_low: Some(Amount::Bytes(bytes)), ..EnvLimits::default() };
    assert_eq!(least(EnvLimits::default()), (Some(5 * GIB), Some(3 * GIB)));
    assert_eq!(least(claims(6 * GIB)), (Some(5 * GIB), Some(3 * GIB)), "it is looser");
    assert_eq!(least(claims(3 * GIB)), (Some(3 * GIB), Some(5 * GIB)));
    assert_eq!(least(claims(0)), (Some(2 * GIB), None));
}

#[test]
fn what_is_too_much_for_itself_leaves_when_its_client_does_not_run() {
    let mut t = Talk::in_mode(AntiThrash::On);
    t.join(1, 6 * GIB);
    let commands = say(&mut t, 1, at_most(4 * GIB));
    assert_eq!(allowances(&commands).into_iter().min(), Some((1, 4 * GIB)), "{commands:?}");
    t.map(1);
    t.request(1);
    assert_eq!((t.state(1), t.attachment(1).allowance), (LockState::Holding, 6 * GIB), "who runs has what it needs");
}
