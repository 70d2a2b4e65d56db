//! The scheduler's state machine with many clients, in virtual time: no daemon and no sockets.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nvshare::scheduler::*;

const ROUNDS: u32 = 2000;
/// Demand of each client, in bytes.
const DEMAND: u64 = 8 << 20;

/// A state machine, and clients that acknowledge its commands.
struct World {
    machine: Machine,
    now: Duration,
    /// The newest allowance and limit of each client, and the allowance in bytes.
    told: BTreeMap<ClientId, (u32, u32, u64)>,
    /// Clients with an unacknowledged command.
    unanswered: Vec<ClientId>,
    events: u32,
    gpus: u64,
}

impl World {
    fn new(gpus: u64) -> Self {
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
        let mut world = Self { machine, now, told: BTreeMap::new(), unanswered: Vec::new(), events: 0, gpus };
        world.say(Event::HostMemory { bytes: 1 << 60 });
        for gpu in (0..gpus).map(gpu) {
            world.say(Event::GpuFound { gpu, total: 1 << 40 });
            world.say(Event::GpuOverhead { gpu, begun: now, bytes: 0, others: 0, complete: true });
        }
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
        self.say(Event::Memory { client, gpu: self.gpu_of(client), report });
    }

    fn request(&mut self, client: ClientId) {
        self.say(Event::Requested { client, gpus: [self.gpu_of(client)].into() });
    }

    fn gpu_of(&self, client: ClientId) -> GpuId {
        gpu(client.0 % self.gpus)
    }
}

fn gpu(number: u64) -> GpuId {
    GpuId(Uuid(u128::from(number + 1).to_be_bytes()))
}

/// Returns the time of one event while clients attach, and while clients take turns on each of the
/// `gpus` GPUs, two on each. The `others` remaining clients either wait too or are idle. The clients
/// belong to `users` users.
pub fn cost(others: u64, gpus: u64, users: u64, wait: bool) -> (Duration, Duration) {
    let mut world = World::new(gpus);
    let clients = || (1..=others + 2 * gpus).map(ClientId);
    let (begun, before) = (Instant::now(), world.events);
    for client in clients() {
        let gpu = world.gpu_of(client);
        world.say(Event::Connected { client, gang: 0, tenant: TenantId(client.0 % users) });
        world.say(Event::Attached { client, gpu, engine: Engine::Swap });
        world.report(client);
        world.answer();
        world.now += Duration::from_micros(10);
    }
    let attach = begun.elapsed() / (world.events - before);

    // Advances the time beyond the delayed measurement of contexts.
    world.now += Duration::from_secs(30);
    let now = world.now;
    for number in 0..gpus {
        let bytes = clients().filter(|client| client.0 % gpus == number).map(|client| (client, 1)).collect();
        world.say(Event::ContextSizes { gpu: gpu(number), bytes });
        let bytes = (others + 2 * gpus).div_ceil(gpus);
        world.say(Event::GpuOverhead { gpu: gpu(number), begun: now, bytes, others: 0, complete: true });
    }
    clients().filter(|client| wait || client.0 <= 2 * gpus).for_each(|client| world.request(client));
    world.answer();
    let mut holders: BTreeMap<GpuId, ClientId> =
        world.machine.gpus().iter().map(|gpu| (gpu.gpu, gpu.holders[0].client)).collect();

    let (begun, before) = (Instant::now(), world.events);
    for round in 0..ROUNDS {
        // Each turn lasts at least 10 ms, because turns without duration would be charged nothing.
        world.now += Duration::from_millis(10) / gpus as u32;
        let id = gpu(u64::from(round) % gpus);
        let Some(holder) = holders.get_mut(&id) else { continue };
        let release =
            Event::Released { client: *holder, gpus: [id].into(), reason: ReleaseReason::Idle, busy: Duration::ZERO };
        let commands = world.say(release);
        world.request(*holder);
        let granted = commands.iter().find_map(|command| match command {
            Command::Grant { client, .. } => Some(*client),
            _ => None,
        });
        *holder = granted.expect("a client waits");
        world.answer();
    }
    (attach, begun.elapsed() / (world.events - before))
}
