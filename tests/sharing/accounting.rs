//! Clients that lie about their memory use. Each liar speaks the protocol itself and has no CUDA
//! context. An honest program beside the liars finishes with correct results, and the scheduler
//! keeps answering. The honest program is a real process on the simulated GPU.

use std::io;
use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

use cuda_sim_gpus::trouble::{self, Stranger};
use nvshare_wire::client::{Engine, EngineReason, GpuKind, ReleaseReason, Sharing, StuckReason};
use nvshare_wire::env_limits::LimitName;
use nvshare_wire::{
    ClientMessage, Counts, MAX_LEN, SchedulerMessage, Secret, Text, Uuid, version, visible_devices::Chooser,
};
use test_support::daemon::Client;
use test_support::machine::{Dice, MIB, Machine, PATIENCE, Program, Setup, wait_for};

use crate::memory::others;

/// An honest program that takes longer than this counts as stuck.
const BOUND: Duration = PATIENCE;
/// How often the scheduler is queried while a program runs.
const ASK: Duration = Duration::from_secs(1);
const MEMORY: u64 = 96 * MIB;

/// The host memory suffices for every client's current and previous limit, because a client that
/// never acknowledges a lower limit is charged for the previous limit.
fn machine() -> Machine {
    let setup = Setup { memory: MEMORY, context: 2 * MIB, reserve: 2 * MIB, swap_max: "none", ..Setup::default() };
    Machine::with_scheduler(setup)
}

/// A program that needs more than a third of the GPU.
fn honest(machine: &Machine) -> Program {
    machine.program("grow --mem 40M --step 2M --rounds 2 --pause-ms 10").start()
}

/// Waits until an honest program has ended successfully, with correct results. Until then the liars
/// answer the messages that every client must answer, so that only the lie can do harm.
fn finish_beside(machine: &Machine, liars: &mut [Liar], program: &mut Program, lie: &str) -> Result<(), String> {
    let begin = Instant::now();
    let mut asked = begin;
    let status = loop {
        liars.iter_mut().for_each(Liar::listen);
        if let Some(status) = program.poll() {
            break status;
        }
        if begin.elapsed() >= BOUND {
            program.kill();
            return Err(format!("{lie}: an honest program is not done after {BOUND:?}"));
        }
        if asked.elapsed() >= ASK {
            asked = Instant::now();
            machine.status();
        }
        thread::sleep(Duration::from_millis(2));
    };
    if !status.success() {
        return Err(format!("{lie}: an honest program failed: {}", program.stdout().trim_end()));
    }
    machine.status();
    Ok(())
}

/// The UUID of the machine's only GPU.
fn gpu_of(machine: &Machine) -> Uuid {
    let status = machine.status();
    let text = status["gpus"][0]["uuid"].as_str().expect("a UUID").to_owned();
    Uuid::parse(text.strip_prefix("GPU-").unwrap_or(&text)).expect("a UUID")
}

/// A client that sends arbitrary messages. When another client waits for the lock, the liar
/// releases the lock.
#[derive(Debug)]
struct Liar<'a> {
    machine: &'a Machine,
    client: Client,
    is_connected: bool,
}

impl<'a> Liar<'a> {
    fn new(machine: &'a Machine) -> Self {
        Self { machine, client: machine.client(), is_connected: true }
    }

    /// Sends the messages in order until the scheduler disconnects the client.
    fn tell(&mut self, messages: &[ClientMessage]) {
        for message in messages {
            self.is_connected = self.is_connected && self.client.send_raw(message.encode(version::MAX).as_bytes());
            self.listen();
        }
    }

    /// Answers the messages received so far.
    fn listen(&mut self) {
        while self.is_connected {
            let mut buffer = [0u8; MAX_LEN];
            let (socket, flags) = (self.client.socket.as_raw_fd(), libc::MSG_DONTWAIT);
            // SAFETY: `buffer` is valid for writes of `buffer.len()` bytes, and the kernel writes
            // no more.
            let len = unsafe { libc::recv(socket, buffer.as_mut_ptr().cast(), buffer.len(), flags) };
            match usize::try_from(len) {
                Ok(0) => self.is_connected = false,
                Ok(len) => {
                    let message = SchedulerMessage::decode(&buffer[..len], version::MAX).expect("a message");
                    let (gpus, reason) = match message {
                        SchedulerMessage::Revoke { gpus } => (gpus, ReleaseReason::Revoked),
                        SchedulerMessage::Contended { gpus, waiters: 1.., .. } => (gpus, ReleaseReason::Idle),
                        _ => continue,
                    };
                    let release = ClientMessage::Release { gpus, reason, busy_us: 0 };
                    self.client.send_raw(release.encode(version::MAX).as_bytes());
                }
                Err(_) => {
                    let error = io::Error::last_os_error().kind();
                    self.is_connected = matches!(error, io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted);
                    return;
                }
            }
        }
    }

    /// Reconnects if the scheduler has disconnected the client.
    fn come_back(&mut self) {
        if !self.is_connected {
            *self = Self::new(self.machine);
        }
    }
}

fn attach(gpu: Uuid) -> ClientMessage {
    ClientMessage::Attach {
        slot: 0,
        uuid: gpu,
        kind: GpuKind::Gpu,
        engine: Engine::Swap,
        total: MEMORY,
        name: Text::new("Simulated GPU"),
        reason: EngineReason::Best,
    }
}

/// The figures of a memory report.
#[derive(Debug, Clone, Copy, Default)]
struct Figures {
    slot: u32,
    ack: u32,
    demand: u64,
    mapped: u64,
    swapped: u64,
    pinned: u64,
    device_free: u64,
    limit_ack: u32,
    host: u64,
    counts: Counts,
    in_file: u64,
    managed: u64,
    managed_mapped: u64,
}

impl Figures {
    fn report(self) -> ClientMessage {
        let Self {
            slot,
            ack,
            demand,
            mapped,
            swapped,
            pinned,
            device_free,
            limit_ack,
            host,
            counts,
            in_file,
            managed,
            managed_mapped,
        } = self;
        ClientMessage::Memory {
            slot,
            ack,
            demand,
            mapped,
            swapped,
            pinned,
            device_free,
            limit_ack,
            host,
            counts,
            in_file,
            managed,
            managed_mapped,
        }
    }
}

// ---- a client that claims memory -------------------------------------------------------------------------------------

const MOST: u64 = MEMORY - 8 * MIB;

// The client attaches but creates no context, so NVML doesn't list its process and shows an empty
// GPU. The client ignores requests to evict memory.

#[test]
fn a_false_pinned_claim_without_a_context_blocks_no_program() {
    claim(Figures { demand: MOST, mapped: MOST, pinned: MOST, ..Figures::default() });
}

#[test]
fn a_false_mapped_claim_without_a_context_blocks_no_program() {
    claim(Figures { demand: MOST, mapped: MOST, ..Figures::default() });
}

#[test]
fn a_false_demand_without_a_context_blocks_no_program() {
    claim(Figures { demand: MOST, ..Figures::default() });
}

/// A first client claims a demand of nearly the whole GPU, takes the lock, and then stops reading
/// messages. A second client does the same, and also claims that all of its memory is mapped.
#[test]
fn a_hung_holder_without_a_context_withholds_no_memory() {
    let machine = machine();
    let gpu = gpu_of(&machine);
    for claimed in [0, MEMORY - 10 * MIB] {
        let client = machine.client();
        client.attach_gpu(gpu, MEMORY);
        client.report(MEMORY - 10 * MIB, claimed);
        client.request();
        client.until_granted();
        let mut program = honest(&machine);
        assert_eq!(finish_beside(&machine, &mut [], &mut program, "never gives the lock back"), Ok(()));
    }
}

/// NVML shows managed memory under no process. A client can pass off no more memory of other programs
/// as its own than the scheduler let it have.
#[test]
fn a_false_managed_claim_hides_no_memory_of_other_programs() {
    let machine = machine();
    let gpu = gpu_of(&machine);
    let program = machine.program("stranger --mem 4M --seconds 600").start();
    program.wait_to_say("holding");
    let mut liar = Liar::new(&machine);
    // This process is older than the scheduler, which therefore believes its first claim.
    let first = Figures { demand: 8 * MIB, ..Figures::default() };
    liar.tell(&[attach(gpu), first.report(), Figures { managed: MOST, managed_mapped: MOST, ..first }.report()]);
    wait_for("the program to be measured", || (others(&machine) == Some(0)).then_some(()));
    let unlisted = Stranger { bytes: 32 * MIB, pid: None, is_graphics: false };
    trouble::set_strangers(&machine.path("gpu"), 0, &[unlisted]).expect("the strangers");
    wait_for("their memory to be counted", || {
        liar.listen();
        (others(&machine) >= Some(24 * MIB)).then_some(())
    });
}

fn claim(figures: Figures) {
    let machine = machine();
    let mut liars = [Liar::new(&machine)];
    liars[0].tell(&[attach(gpu_of(&machine)), figures.report()]);
    let mut program = honest(&machine);
    let finished = finish_beside(&machine, &mut liars, &mut program, &format!("{figures:?}"));
    finished.expect("the GPU is as good as empty");
    drop(liars);
    machine.wait_until_empty();
}

// ---- a client that lies about each number -----------------------------------------------------------------------------

const VALUES: [u64; 4] = [0, 1, 1 << 40, u64::MAX];

/// Returns the messages that a liar sends after `Hello`, with the number in one of their fields.
type Lie = fn(Uuid, u64) -> Vec<ClientMessage>;

/// Returns a report with these figures, from an attached client that requests the lock.
fn with(gpu: Uuid, figures: Figures) -> Vec<ClientMessage> {
    vec![attach(gpu), figures.report(), ClientMessage::Request { gpus: 1 }]
}

/// Returns a message from an attached client that has requested the lock and reported 1 MiB of
/// demand.
fn then(gpu: Uuid, message: ClientMessage) -> Vec<ClientMessage> {
    let figures = Figures { demand: MIB, ..Figures::default() };
    vec![attach(gpu), figures.report(), ClientMessage::Request { gpus: 1 }, message]
}

const KEY: Secret = Secret([7; 16]);

/// Every numeric field of every message that clients send.
const LIES: &[(&str, Lie)] = &[
    ("Attach.slot", |gpu, n| match attach(gpu) {
        ClientMessage::Attach { uuid, kind, engine, total, name, reason, .. } => {
            vec![ClientMessage::Attach { slot: n as u32, uuid, kind, engine, total, name, reason }]
        }
        _ => Vec::new(),
    }),
    ("Attach.total", |gpu, n| match attach(gpu) {
        ClientMessage::Attach { slot, uuid, kind, engine, name, reason, .. } => {
            vec![ClientMessage::Attach { slot, uuid, kind, engine, total: n, name, reason }]
        }
        _ => Vec::new(),
    }),
    ("Attach.total of an unknown GPU", |_, n| match attach(Uuid([9; 16])) {
        ClientMessage::Attach { slot, uuid, kind, engine, name, reason, .. } => {
            vec![ClientMessage::Attach { slot, uuid, kind, engine, total: n, name, reason }]
        }
        _ => Vec::new(),
    }),
    ("Detach.slot", |gpu, n| then(gpu, ClientMessage::Detach { slot: n as u32 })),
    ("Memory.slot", |gpu, n| with(gpu, Figures { slot: n as u32, ..Figures::default() })),
    ("Memory.ack", |gpu, n| with(gpu, Figures { ack: n as u32, demand: MIB, ..Figures::default() })),
    ("Memory.demand", |gpu, n| with(gpu, Figures { demand: n, ..Figures::default() })),
    ("Memory.mapped", |gpu, n| with(gpu, Figures { mapped: n, ..Figures::default() })),
    ("Memory.swapped", |gpu, n| with(gpu, Figures { swapped: n, ..Figures::default() })),
    ("Memory.in_file", |gpu, n| with(gpu, Figures { in_file: n, ..Figures::default() })),
    ("Memory.managed", |gpu, n| with(gpu, Figures { managed: n, ..Figures::default() })),
    ("Memory.managed and managed_mapped", |gpu, n| {
        with(gpu, Figures { mapped: n, managed: n, managed_mapped: n, ..Figures::default() })
    }),
    ("Memory.pinned", |gpu, n| with(gpu, Figures { pinned: n, ..Figures::default() })),
    ("Memory.demand, mapped and pinned", |gpu, n| {
        with(gpu, Figures { demand: n, mapped: n, pinned: n, ..Figures::default() })
    }),
    ("Memory.device_free", |gpu, n| with(gpu, Figures { device_free: n, ..Figures::default() })),
    ("Memory.limit_ack", |gpu, n| with(gpu, Figures { limit_ack: n as u32, demand: MIB, ..Figures::default() })),
    ("Memory.host", |gpu, n| with(gpu, Figures { host: n, ..Figures::default() })),
    ("Memory.counts", |gpu, n| {
        let counts = Counts { swapped_out: n, swapped_in: n, unmoved: n, refused: n };
        with(gpu, Figures { counts, ..Figures::default() })
    }),
    ("Request.gpus", |gpu, n| then(gpu, ClientMessage::Request { gpus: n })),
    ("Release.gpus", |gpu, n| then(gpu, ClientMessage::Release { gpus: n, reason: ReleaseReason::Idle, busy_us: 1 })),
    ("Release.busy_us", |gpu, n| {
        then(gpu, ClientMessage::Release { gpus: 1, reason: ReleaseReason::NoMemory, busy_us: n })
    }),
    ("Stuck.gpus", |gpu, n| then(gpu, ClientMessage::Stuck { gpus: n, reason: StuckReason::HostFull })),
    ("Cancel.gpus", |gpu, n| then(gpu, ClientMessage::Cancel { gpus: n })),
    ("Held.gpus", |gpu, n| then(gpu, ClientMessage::Held { gpus: n })),
    ("Wish.slot", |gpu, n| then(gpu, ClientMessage::RequestLimit { slot: n as u32, bytes: MIB })),
    ("Wish.bytes", |gpu, n| then(gpu, ClientMessage::RequestLimit { slot: 0, bytes: n })),
    ("Squeeze.slot", |gpu, n| then(gpu, ClientMessage::Reserve { slot: n as u32, bytes: MIB })),
    ("Squeeze.bytes", |gpu, n| then(gpu, ClientMessage::Reserve { slot: 0, bytes: n })),
    ("Fullness.slot", |gpu, n| then(gpu, ClientMessage::Utilization { slot: n as u32, permille: 500 })),
    ("Fullness.permille", |gpu, n| then(gpu, ClientMessage::Utilization { slot: 0, permille: n as u32 })),
    ("Open", |gpu, n| {
        let (ticket, range, first) = (n as u32, n as u32, n as u32);
        then(gpu, ClientMessage::Open { ticket, exporter: KEY, secret: KEY, range, allocation: n, first })
    }),
    ("Exported", |gpu, n| {
        let slot = n as u32;
        then(gpu, ClientMessage::Exported { ticket: n, outcome: Sharing::Done, slot, bytes: n, chunk: n })
    }),
    ("Withdrawn.range", |gpu, n| then(gpu, ClientMessage::Withdrawn { range: n as u32 })),
    ("Imported", |gpu, n| {
        then(gpu, ClientMessage::Imported { slot: 0, exporter: KEY, range: n as u32, bytes: n, adopted: n as u8 })
    }),
    ("Adopted.range", |gpu, n| then(gpu, ClientMessage::Adopted { exporter: KEY, range: n as u32 })),
    ("Closed.range", |gpu, n| then(gpu, ClientMessage::Closed { exporter: KEY, range: n as u32 })),
    ("Place.count", |_, n| vec![place(n as u32, 0, 0)]),
    ("Place.bytes", |_, n| vec![place(1, n, 0)]),
    ("Place.devices", |_, n| vec![place(1, 0, n)]),
    ("Own.more", |gpu, n| {
        let own = ClientMessage::EnvLimit { limit: LimitName::MemoryMax, more: n as u8, text: Text::new("1M") };
        [vec![own], then(gpu, ClientMessage::Request { gpus: 1 })].concat()
    }),
];

fn place(count: u32, bytes: u64, devices: u64) -> ClientMessage {
    ClientMessage::RequestPlacement { chooser: Chooser::Nobody, count, bytes, devices, ahead: 1 }
}

#[test]
fn no_false_memory_report_blocks_an_honest_program() {
    false_messages_block_no_program(|field| field.starts_with("Memory."));
}

#[test]
fn no_false_message_field_blocks_an_honest_program() {
    false_messages_block_no_program(|field| !field.starts_with("Memory."));
}

/// For each field in turn, four clients send a false value, each a different one. An honest program
/// runs beside these clients from start to end.
#[track_caller]
fn false_messages_block_no_program(is_meant: impl Fn(&str) -> bool) {
    let machine = machine();
    let gpu = gpu_of(&machine);
    let mut failures = Vec::new();
    // `NVSHARE_TEST_LIE` selects a single field.
    let only = std::env::var("NVSHARE_TEST_LIE").ok();
    let is_meant = |field: &str| only.as_ref().map_or_else(|| is_meant(field), |only| only == field);
    for (field, lie) in LIES.iter().filter(|(field, _)| is_meant(field)) {
        let mut liars: Vec<Liar> = VALUES.iter().map(|_| Liar::new(&machine)).collect();
        liars.iter_mut().zip(VALUES).for_each(|(liar, n)| liar.tell(&lie(gpu, n)));
        let mut program = honest(&machine);
        failures.extend(finish_beside(&machine, &mut liars, &mut program, field).err());
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    machine.wait_until_empty();
}

const RANDOM: Duration = Duration::from_secs(3);

/// Three clients send one random lie after another, and reconnect whenever they are disconnected.
#[test]
fn random_false_messages_block_no_honest_program() {
    let machine = machine();
    let (gpu, mut random) = (gpu_of(&machine), Dice::seeded());
    let mut liars: Vec<Liar> = (0..3).map(|_| Liar::new(&machine)).collect();
    let begin = Instant::now();
    while begin.elapsed() < RANDOM {
        let mut program = honest(&machine);
        let deadline = Instant::now() + BOUND;
        while program.poll().is_none() && Instant::now() < deadline {
            for liar in &mut liars {
                liar.come_back();
                let (_, lie) = random.choose(LIES).expect("a lie");
                let any = random.number();
                let n = *random.choose(&[0, 1, MIB, MOST, 1 << 40, u64::MAX, any]).expect("a number");
                // Only every fourth message, on average, is preceded by another `Attach`, because a
                // repeated `Attach` disconnects the liar.
                let messages = lie(gpu, n);
                let from = if random.below(4) == 0 { 0 } else { messages.len() - 1 };
                liar.tell(&messages[from..]);
            }
            thread::sleep(random.milliseconds(10));
        }
        // The liars send no more lies, but stay connected.
        finish_beside(&machine, &mut liars, &mut program, "random lies").expect("an honest program");
    }
    drop(liars);
    machine.wait_until_empty();
}
