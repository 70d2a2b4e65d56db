//! The cost of one event in the scheduler's state machine, by the number of clients: two of them take turns, and all others
//! are idle, or wait for the same GPU.
//!
//! `cargo bench --bench events [-- --json FILE]`; with a file, the figures are put into it (see `bench_support::results`).

use std::time::{Duration, Instant};

use bench_support::results::{Figure, Results};
use nvshare::scheduler::*;

const GPU: GpuId = GpuId(Uuid([7; 16]));
const ROUNDS: u32 = 2000;
/// Clients of a host, spread over this many users.
const TENANTS: u64 = 50;

fn main() {
    let mut results = Results::from_arguments();
    println!("{:>8}  {:>12}  {:>14}  {:>14}", "clients", "attach", "others idle", "others wait");
    for clients in [10, 100, 1_000, 10_000] {
        let (attach, idle) = cost(clients, false);
        // Each turn moves all that wait in the queue.
        let waiting = (clients <= 1_000).then(|| cost(clients, true).1);
        println!(
            "{clients:>8}  {attach:>12.1?}  {idle:>14.1?}  {:>14}",
            waiting.map_or("".into(), |w| format!("{w:.1?}"))
        );
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        let mut add =
            |name, value, note: &str| results.add(Figure { name, value: us(value), unit: "us", note: note.into() });
        if clients == 10_000 {
            add(
                "event-10000-idle-clients",
                idle,
                "a request or a release of one of two clients that take turns; 10,000 others are idle",
            );
        }
        if let Some(waiting) = waiting.filter(|_| clients == 1_000) {
            add(
                "event-1000-waiting-clients",
                waiting,
                "a request or a release; 1,000 clients of 50 users wait for one GPU",
            );
        }
    }
    results.write();
}

/// The time of one event while clients attach, and while they take turns. Besides two clients there are `others`, which wait
/// as well or are idle.
fn cost(others: u64, wait: bool) -> (Duration, Duration) {
    let mut machine = Machine::new(Settings {
        time_quantum: Duration::from_secs(30),
        anti_thrash: AntiThrash::Auto,
        policy: PolicyName::Fcfs,
        max_wait: Duration::from_secs(60),
        reserve: 0,
        context: 0,
        time_period: Duration::from_secs(10),
        placement: Placement::None,
        sleep_after: None,
    });
    let mut now = Duration::from_secs(100);
    machine.handle(now, Event::GpuFound { gpu: GPU, total: 80 << 30 });
    machine.handle(now, Event::HostMemory { bytes: 1 << 45 });
    machine.handle(now, Event::GpuOverhead { gpu: GPU, begun: now, bytes: 0, complete: true });
    let begun = Instant::now();
    for number in 1..=others + 2 {
        let client = ClientId(number);
        let tenant = TenantId(number % TENANTS);
        machine.handle(now, Event::Connected { client, gang: 0, tenant });
        machine.handle(now, Event::Attached { client, gpu: GPU, engine: Engine::Swap });
        let (ack, limit_ack) = (u32::MAX, u32::MAX);
        let report = MemoryReport { ack, demand: 1 << 20, mapped: 0, swapped: 0, pinned: 0, limit_ack };
        machine.handle(now, Event::Memory { client, gpu: GPU, report });
        now += Duration::from_micros(10);
    }
    let attach = begun.elapsed() / (3 * (others + 2)) as u32;

    // Contexts are measured a moment later.
    now += Duration::from_secs(30);
    let bytes = (1..=others + 2).map(|number| (ClientId(number), 1)).collect();
    machine.handle(now, Event::ContextSizes { gpu: GPU, bytes });
    machine.handle(now, Event::GpuOverhead { gpu: GPU, begun: now, bytes: others + 2, complete: true });
    let request = |client| Event::Requested { client, gpus: [GPU].into() };
    let waiting = if wait { 3..=others + 2 } else { 2..=2 };
    machine.handle(now, request(ClientId(1)));
    waiting.for_each(|number| drop(machine.handle(now, request(ClientId(number)))));
    let mut holder = machine.gpus()[0].holders[0].client;

    let begun = Instant::now();
    for _ in 0..ROUNDS {
        now += Duration::from_micros(100);
        let gpus = [GPU].into();
        let release = Event::Released { client: holder, gpus, reason: ReleaseReason::Idle, busy: Duration::ZERO };
        let commands = machine.handle(now, release);
        machine.handle(now, request(holder));
        let granted = commands.iter().find_map(|command| match command {
            Command::Grant { client, .. } => Some(*client),
            _ => None,
        });
        holder = granted.expect("a client waits");
    }
    (attach, begun.elapsed() / (2 * ROUNDS))
}
