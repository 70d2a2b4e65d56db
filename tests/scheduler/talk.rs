//! Drives the scheduler's machine message by message, and names its commands.

use nvshare_sched::*;
use scheduler_sim::*;
use std::time::Duration;

/// A machine with one GPU of 16 GiB, driven message by message.
#[derive(Debug)]
pub struct Talk {
    pub machine: Machine,
    pub now: Time,
    decisions: Decisions,
}

impl Talk {
    pub fn new(settings: Settings) -> Self {
        let mut talk = Self {
            machine: Machine::new(settings),
            now: Duration::from_secs(100),
            decisions: Decisions::of_this_test(),
        };
        talk.say(Event::GpuFound { gpu: gpu(0), total: 16 * GIB });
        talk.measured(0);
        talk
    }

    pub fn in_mode(anti_thrash: AntiThrash) -> Self {
        Self::new(settings(anti_thrash, Duration::from_secs(1)))
    }

    pub fn say(&mut self, event: Event) -> Vec<Command> {
        let commands = self.machine.handle(self.now, event);
        self.decisions.add(self.now, &commands);
        let deadline = self.machine.deadline();
        assert!(deadline.is_none_or(|at| at > self.now), "a deadline that has passed already: {deadline:?}");
        commands
    }

    pub fn after(&mut self, time: Duration) -> Vec<Command> {
        self.now += time;
        self.say(Event::Tick)
    }

    /// Attaches a client that needs `demand` bytes. If enough memory is free, the client has mapped
    /// all of them.
    pub fn join(&mut self, n: u64, demand: u64) -> Vec<Command> {
        self.join_of(TenantId(0), n, demand)
    }

    pub fn join_of(&mut self, tenant: TenantId, n: u64, demand: u64) -> Vec<Command> {
        self.say(Event::Connected { client: client(n), gang: 0, tenant });
        self.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
        let commands = self.report(n, demand, 0, 0);
        self.map(n);
        commands
    }

    pub fn report(&mut self, n: u64, demand: u64, mapped: u64, pinned: u64) -> Vec<Command> {
        self.acknowledge(n, u32::MAX, demand, mapped, pinned) // acknowledges all limits sent so far
    }

    pub fn acknowledge(&mut self, n: u64, ack: u32, demand: u64, mapped: u64, pinned: u64) -> Vec<Command> {
        let swapped = demand.saturating_sub(mapped);
        let report = MemoryReport { ack, demand, mapped, swapped, pinned, limit_ack: u32::MAX };
        self.say(Event::Memory { client: client(n), gpu: gpu(0), report })
    }

    /// Maps or evicts memory exactly up to the allowance.
    pub fn map(&mut self, n: u64) -> Vec<Command> {
        let attachment = self.attachment(n);
        self.report(
            n,
            attachment.demand,
            attachment.allowance.min(attachment.demand).max(attachment.pinned),
            attachment.pinned,
        )
    }

    pub fn wish(&mut self, n: u64, bytes: u64) -> Vec<Command> {
        self.say(Event::LimitRequested { client: client(n), gpu: gpu(0), bytes })
    }

    /// Puts a client into the only group.
    pub fn group(&mut self, n: u64, memory_max: Amount) -> Vec<Command> {
        self.regroup([n], memory_max)
    }

    pub fn regroup<const N: usize>(&mut self, clients: [u64; N], memory_max: Amount) -> Vec<Command> {
        self.put(&clients, RuleLimits { memory_max, ..RuleLimits::default() })
    }

    /// Puts clients into the only group, which gets these limits.
    pub fn put(&mut self, clients: &[u64], limits: RuleLimits) -> Vec<Command> {
        let group = Some(Group { id: GroupId(7), limits });
        self.say(Event::Groups { groups: clients.iter().map(|n| (client(*n), group)).collect() })
    }

    /// Reports that other programs and the present contexts use `bytes`.
    pub fn measured(&mut self, bytes: u64) -> Vec<Command> {
        self.say(Event::GpuOverhead { gpu: gpu(0), begun: self.now, bytes, others: 0, complete: true })
    }

    pub fn request(&mut self, n: u64) -> Vec<Command> {
        self.request_on(n, [0])
    }

    pub fn release(&mut self, n: u64, reason: ReleaseReason) -> Vec<Command> {
        self.release_on(n, 0, reason)
    }

    pub fn request_on<const N: usize>(&mut self, n: u64, at: [u64; N]) -> Vec<Command> {
        self.say(Event::Requested { client: client(n), gpus: gpus(at) })
    }

    pub fn release_on(&mut self, n: u64, at: u64, reason: ReleaseReason) -> Vec<Command> {
        self.say(Event::Released { client: client(n), gpus: gpus([at]), reason, busy: Duration::ZERO })
    }

    pub fn stuck(&mut self, n: u64, reason: StuckReason) -> Vec<Command> {
        self.say(Event::Stuck { client: client(n), gpus: gpus([0]), reason })
    }

    /// Returns a machine on which client 1 holds the lock, and client 2 waits for it.
    pub fn with_waiter() -> Self {
        let mut t = Self::in_mode(AntiThrash::On);
        t.join(1, GIB);
        t.join(2, GIB);
        t.request(1);
        t.request(2);
        t
    }

    /// Returns a machine on which clients 1 and 2 may have 8 GiB together. Client 1 needs 6 of them. If client 2
    /// wants more than the rest, it waits.
    pub fn with_shared_limit() -> Self {
        let mut t = Self::in_mode(AntiThrash::On);
        let waits = RuleLimits { on_memory_full: OnMemoryFull::Wait, ..RuleLimits::default() };
        for n in [1, 2] {
            t.join(n, 0);
            t.put(&[n], RuleLimits { memory_max: Amount::Bytes(8 * GIB), ..waits });
            t.report(1, 6 * GIB, 0, 0);
            t.map(n);
        }
        t
    }

    /// Returns a machine on which client 1 holds the lock, was revoked 3 s ago, and cannot drain.
    /// Client 2 has waited since then.
    pub fn with_undrainable(anti_thrash: AntiThrash, demands: [u64; 2]) -> (Self, Vec<Command>) {
        let mut t = Self::in_mode(anti_thrash);
        t.join(1, demands[0]);
        t.join(2, demands[1]);
        t.request(1);
        t.request(2);
        assert_eq!(t.after(Duration::from_secs(1)), [revoke(1)]);
        t.stuck(1, StuckReason::NeedsHost);
        t.after(ms(100));
        t.after(ms(2899));
        assert_eq!(t.attachment(1).state, LockState::Stuck);
        let commands = t.after(ms(1));
        assert_eq!(t.attachment(1).state, LockState::Undrainable);
        (t, commands)
    }

    pub fn state(&self, n: u64) -> LockState {
        self.attachment(n).state
    }

    pub fn attachment(&self, n: u64) -> AttachmentView {
        self.machine.client(client(n)).unwrap().attachments[0].clone()
    }
}

pub fn grant(n: u64) -> Command {
    grant_on(n, 0)
}

pub fn grant_on(n: u64, at: u64) -> Command {
    Command::Grant { client: client(n), gpus: gpus([at]) }
}

pub fn revoke(n: u64) -> Command {
    revoke_on(n, 0)
}

pub fn revoke_on(n: u64, at: u64) -> Command {
    Command::Revoke { client: client(n), gpus: gpus([at]) }
}

pub fn undrainable(n: u64) -> Command {
    Command::Undrainable { client: client(n), gpus: gpus([0]) }
}

pub fn contended(n: u64, waiters: u32, grace: Duration) -> Command {
    Command::Contended { client: client(n), gpus: gpus([0]), waiters, grace }
}

pub fn denied(n: u64, bytes: u64, why: Denial) -> Command {
    Command::Denied { client: client(n), gpu: gpu(0), bytes, why }
}

pub fn waiting(n: u64, why: WaitReason) -> Command {
    Command::Waiting { client: client(n), gpus: gpus([0]), why }
}

pub fn allowances(commands: &[Command]) -> Vec<(u64, u64)> {
    let all = commands.iter().filter_map(|c| match c {
        Command::Allowance { client, bytes, .. } => Some((client.0, *bytes)),
        _ => None,
    });
    all.collect()
}

pub fn limits(commands: &[Command]) -> Vec<(u64, u64)> {
    let all = commands.iter().filter_map(|c| match c {
        Command::Limit { client, bytes, .. } => Some((client.0, *bytes)),
        _ => None,
    });
    all.collect()
}

/// Returns the grace period in the first `Contended` command.
pub fn grace(commands: &[Command]) -> Option<Duration> {
    commands.iter().find_map(|c| if let Command::Contended { grace, .. } = c { Some(*grace) } else { None })
}
