//! The cost of one event in the scheduler's state machine, by the number of clients. Two clients
//! take turns. The other clients are idle or wait for the same GPU.
//!
//! `cargo bench --bench events [-- --json FILE]`: with a file, the benchmark writes the figures to
//! it (see `bench_support::results`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bench_support::results::{Figure, Results};
use nvshare::scheduler::*;

const GPU: GpuId = GpuId(Uuid([7; 16]));
const ROUNDS: u32 = 2000;
/// Demand of each client, in bytes.
const DEMAND: u64 = 8 << 20;
/// The numbers of users to which the waiting clients belong. A turn of one client changes the order
/// of all clients of its user.
const USERS: [u64; 3] = [1, 2, 50];

fn main() {
    let mut results = Results::from_arguments();
    println!("{:>8}  {:>12}  {:>14}  others wait, of 1, 2 and 50 users", "clients", "attach", "others idle");
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    for clients in [10, 100, 1_000, 10_000] {
        let (attach, idle) = cost(clients, 50, false);
        let waiting = USERS.map(|users| cost(clients, users, true).1);
        println!("{clients:>8}  {attach:>12.1?}  {idle:>14.1?}  {waiting:.1?}");
        let mut add =
            |name, value, note: &str| results.add(Figure { name, value: us(value), unit: "us", note: note.into() });
        match clients {
            1_000 => add(
                "event-1000-waiting-clients",
                waiting.into_iter().max().unwrap_or_default(),
                "a request or a release; 1,000 clients wait for one GPU, of 1, 2 or 50 users: the longest of the three",
            ),
            10_000 => add(
                "event-10000-idle-clients",
                idle,
                "a request or a release of one of two clients that take turns; 10,000 others are idle",
            ),
            _ => {}
        }
    }
    results.write();
}

/// A state machine, and clients that acknowledge its commands.
struct World {
    machine: Machine,
    now: Duration,
    /// The newest allowance and limit of each client, and the allowance in bytes.
    told: BTreeMap<ClientId, (u32, u32, u64)>,
    /// Clients with an unacknowledged command.
    unanswered: Vec<ClientId>,
    events: u32,
}

impl World {
    fn new() -> Self {
        let machine = Machine::new(Settings {
            time_quantum: Duration::from_secs(30),
            anti_thrash: AntiThrash::On,
            policy: PolicyName::Fcfs,
            max_wait: Duration::from_secs(60),
            reserve: 0,
            context: 0,
            time_period: Duration::from_secs(10),
            placement: Placement::None,
            sleep_after: None,
        });
        let now = Duration::from_secs(100);
        let mut world = Self { machine, now, told: BTreeMap::new(), unanswered: Vec::new(), events: 0 };
        world.say(Event::GpuFound { gpu: GPU, total: 1 << 40 });
        world.say(Event::HostMemory { bytes: 1 << 60 });
        world.say(Event::GpuOverhead { gpu: GPU, begun: now, bytes: 0, others: 0, complete: true });
        world
    }

    fn say(&mut self, event: Event) -> Vec<Command> {
        self.events += 1;
        let commands = self.machine.handle(self.now, event);
        for command in &commands {
            let client = match command {
                Command::Limit { client, seq, .. } => {
                    self.told.entry(*client).or_default().1 = *seq;
                    client
                }
                Command::Allowance { client, seq, bytes, .. } => {
                    let told = self.told.entry(*client).or_default();
                    (told.0, told.2) = (*seq, *bytes);
                    client
                }
                _ => continue,
            };
            self.unanswered.push(*client);
        }
        commands
    }

    fn answer(&mut self) {
        while let Some(client) = self.unanswered.pop() {
            self.report(client);
        }
    }

    fn report(&mut self, client: ClientId) {
        let (ack, limit_ack, allowance) = self.told.get(&client).copied().unwrap_or_default();
        let mapped = allowance.min(DEMAND);
        let report = MemoryReport { ack, demand: DEMAND, mapped, swapped: DEMAND - mapped, pinned: 0, limit_ack };
        self.say(Event::Memory { client, gpu: GPU, report });
    }

    fn request(&mut self, client: ClientId) {
        self.say(Event::Requested { client, gpus: [GPU].into() });
    }
}

/// Returns the time of one event while clients attach, and while two clients take turns. The
/// `others` remaining clients either wait too or are idle.
fn cost(others: u64, users: u64, wait: bool) -> (Duration, Duration) {
    let mut world = World::new();
    let clients = || (1..=others + 2).map(ClientId);
    let (begun, before) = (Instant::now(), world.events);
    for client in clients() {
        world.say(Event::Connected { client, gang: 0, tenant: TenantId(client.0 % users) });
        world.say(Event::Attached { client, gpu: GPU, engine: Engine::Swap });
        world.report(client);
        world.answer();
        world.now += Duration::from_micros(10);
    }
    let attach = begun.elapsed() / (world.events - before);

    // Advances the time beyond the delayed measurement of contexts.
    world.now += Duration::from_secs(30);
    let now = world.now;
    world.say(Event::ContextSizes { gpu: GPU, bytes: clients().map(|client| (client, 1)).collect() });
    world.say(Event::GpuOverhead { gpu: GPU, begun: now, bytes: others + 2, others: 0, complete: true });
    clients().filter(|client| wait || client.0 <= 2).for_each(|client| world.request(client));
    world.answer();
    let mut holder = world.machine.gpus()[0].holders[0].client;

    let (begun, before) = (Instant::now(), world.events);
    for _ in 0..ROUNDS {
        // Each turn lasts 10 ms, because turns without duration would be charged nothing.
        world.now += Duration::from_millis(10);
        let gpus = [GPU].into();
        let release = Event::Released { client: holder, gpus, reason: ReleaseReason::Idle, busy: Duration::ZERO };
        let commands = world.say(release);
        world.request(holder);
        let granted = commands.iter().find_map(|command| match command {
            Command::Grant { client, .. } => Some(*client),
            _ => None,
        });
        holder = granted.expect("a client waits");
        world.answer();
    }
    (attach, begun.elapsed() / (world.events - before))
}
