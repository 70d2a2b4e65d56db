//! The fuzzers' corpus (`wire/fuzz/corpus`): every packet in it is read, or refused, and what is read is written again
//! exactly as it was. Run with `NVSHARE_WRITE_CORPUS=1` to write the message of each kind that the corpus begins with.

use nvshare_wire::{
    ClientMessage, Counts, Moves, SchedulerMessage, Secret, Text, Uuid,
    client::{Engine, EngineReason, GpuKind, ReleaseReason, Sharing, SleepRefusal, StuckReason},
    env_limits::LimitName,
    scheduler::{Denial, NoPlacement, Refusal, WaitReason},
    visible_devices::Chooser,
};
use std::{collections::BTreeSet, fs, path::PathBuf};

const KEY: Secret = Secret([0x6b; 16]);
const SECRET: Secret = Secret([0x73; 16]);

/// The version that a packet was written in; the kinds of a handshake have none.
fn version(packet: &[u8]) -> u16 {
    packet.first_chunk().map_or(1, |bytes| u16::from_le_bytes(*bytes)).max(1)
}

fn client_messages() -> Vec<(&'static str, u16, ClientMessage)> {
    use ClientMessage::*;
    let uuid = Uuid([0x5a, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
    let (slot, gpus) = (1, 0b11);
    vec![
        (
            "hello",
            1,
            Hello {
                min_version: 1,
                max_version: 1,
                flags: 0,
                resume: 7,
                gang: 42,
                library: Text::new("nvshare 0.1.0"),
            },
        ),
        (
            "attach",
            1,
            Attach {
                slot,
                uuid,
                kind: GpuKind::Mig,
                engine: Engine::Managed,
                total: 141 << 30,
                name: Text::new("NVIDIA H200"),
                reason: EngineReason::Unsaid,
            },
        ),
        (
            "attach-2",
            2,
            Attach {
                slot,
                uuid,
                kind: GpuKind::Gpu,
                engine: Engine::Managed,
                total: 141 << 30,
                name: Text::new("NVIDIA H200"),
                reason: EngineReason::Oversubscription,
            },
        ),
        ("detach", 1, Detach { slot }),
        (
            "memory",
            1,
            Memory {
                slot,
                ack: 3,
                demand: 8 << 30,
                mapped: 6 << 30,
                swapped: 2 << 30,
                pinned: 2 << 20,
                device_free: u64::MAX,
                limit_ack: 0,
                host: 0,
                counts: Counts::default(),
                in_file: 0,
            },
        ),
        (
            "memory-2",
            2,
            Memory {
                slot,
                ack: 3,
                demand: 8 << 30,
                mapped: 6 << 30,
                swapped: 2 << 30,
                pinned: 2 << 20,
                device_free: 1 << 30,
                limit_ack: 4,
                host: 3 << 30,
                counts: Counts::default(),
                in_file: 0,
            },
        ),
        (
            "memory-5",
            5,
            Memory {
                slot,
                ack: 3,
                demand: 8 << 30,
                mapped: 6 << 30,
                swapped: 2 << 30,
                pinned: 2 << 20,
                device_free: 1 << 30,
                limit_ack: 4,
                host: 3 << 30,
                counts: Counts { swapped_out: 5 << 30, swapped_in: 3 << 30, unmoved: 7 << 20, refused: 2 },
                in_file: 0,
            },
        ),
        (
            "memory-8",
            8,
            Memory {
                slot,
                ack: 3,
                demand: 8 << 30,
                mapped: 6 << 30,
                swapped: 2 << 30,
                pinned: 2 << 20,
                device_free: 1 << 30,
                limit_ack: 4,
                host: 1 << 30,
                counts: Counts { swapped_out: 5 << 30, swapped_in: 3 << 30, unmoved: 7 << 20, refused: 2 },
                in_file: 1 << 30,
            },
        ),
        ("request", 1, Request { gpus }),
        ("release", 1, Release { gpus, reason: ReleaseReason::NoMemory, busy_us: 1_500_000 }),
        ("stuck", 1, Stuck { gpus, reason: StuckReason::Capturing }),
        ("cancel", 1, Cancel { gpus }),
        ("request_limit", 2, RequestLimit { slot, bytes: 9 << 30 }),
        ("reserve", 2, Reserve { slot, bytes: 64 << 20 }),
        ("utilization", 3, Utilization { slot, permille: 345 }),
        ("exporter", 2, Exporter { key: KEY }),
        ("open", 2, Open { ticket: 4, exporter: KEY, secret: SECRET, range: 2, allocation: 9, first: 16 }),
        ("exported", 2, Exported { ticket: 5, outcome: Sharing::Done, slot, bytes: 80 << 20, chunk: 64 << 20 }),
        ("withdrawn", 2, Withdrawn { range: 2 }),
        ("imported", 2, Imported { slot, exporter: KEY, range: 2, bytes: 80 << 20, adopted: 1 }),
        ("adopted", 2, Adopted { exporter: KEY, range: 2 }),
        ("closed", 2, Closed { exporter: KEY, range: 2 }),
        ("held", 3, Held { gpus }),
        ("sleep_ready", 7, SleepReady {}),
        ("sleep_refused", 7, SleepRefused { why: SleepRefusal::Capture }),
        ("wake", 7, Wake {}),
        ("use_swap_file", 8, UseSwapFile { ram_max: 4 << 30 }),
        ("visible_devices", 3, VisibleDevices { text: Text::new("GPU-5a,1") }),
        (
            "request_placement",
            3,
            RequestPlacement { chooser: Chooser::List, count: 2, bytes: 9 << 30, devices: 0b101, ahead: 1 },
        ),
        ("env_limit", 4, EnvLimit { limit: LimitName::Weight, more: 0, text: Text::new("idle") }),
    ]
}

fn scheduler_messages() -> Vec<(&'static str, u16, SchedulerMessage)> {
    use SchedulerMessage::*;
    let (slot, gpus) = (1, 0b11);
    let (uuid, other) = (Uuid([0x5a; 16]), Uuid([0xa5; 16]));
    vec![
        ("welcome", 1, Welcome { version: 1, client: 7 }),
        ("refused", 1, Refused { reason: Refusal::TooMany, text: Text::new("this user has 4096 connections") }),
        ("attached", 1, Attached { slot }),
        ("limit", 1, Limit { slot, bytes: 139 << 30, seq: 0, most: 0, spare: 0, max: 0 }),
        ("limit-2", 2, Limit { slot, bytes: 100 << 30, seq: 4, most: 139 << 30, spare: u64::MAX, max: 0 }),
        ("limit-3", 3, Limit { slot, bytes: 5 << 30, seq: 4, most: 139 << 30, spare: u64::MAX, max: 8 << 30 }),
        ("allowance", 1, Allowance { slot, seq: 3, bytes: 6 << 30 }),
        ("grant", 1, Grant { gpus }),
        ("revoke", 1, Revoke { gpus }),
        ("contended", 1, Contended { gpus, waiters: 2, grace_us: 1000 }),
        ("waiting", 1, Waiting { gpus, why: WaitReason::Pinned }),
        ("denied", 2, Denied { slot, bytes: 9 << 30, what: Denial::Limit }),
        ("denied-6", 6, Denied { slot, bytes: 9 << 30, what: Denial::Mapping }),
        ("reserved", 2, Reserved { slot, bytes: 64 << 20 }),
        ("export", 2, Export { ticket: 5, secret: SECRET, range: 2, allocation: 9, first: 16 }),
        ("opened", 2, Opened { ticket: 4, outcome: Sharing::Busy, bytes: 80 << 20, chunk: 64 << 20 }),
        ("adopt", 2, Adopt { exporter: KEY, range: 2 }),
        ("prepare", 2, Prepare { slot, bytes: 12 << 30 }),
        ("resume", 3, Resume { client: 7 }),
        ("memory-max", 4, MemoryMax { uuid: Uuid([0x5a; 16]), bytes: 8 << 30 }),
        ("prepare_sleep", 7, PrepareSleep { flags: 1 }),
        ("run_ahead", 8, RunAhead { slot, micros: 16_000 }),
        ("host_memory", 8, HostMemory { ram: 1 << 30, file: 2 << 30 }),
        ("offer_swap_file", 8, OfferSwapFile {}),
        ("awake", 7, Awake { moved: Moves::new([(uuid, other), (other, uuid)]).unwrap() }),
        ("placed", 3, Placed { at: 1, of: 2, uuid: Uuid([0x5a; 16]), kind: GpuKind::Gpu }),
        ("unplaced", 3, Unplaced { outcome: NoPlacement::NoGpu, text: Text::new("no GPU is left") }),
        ("remark", 4, Remark { text: Text::new("NVSHARE_WEIGHT: weight cannot be 0") }),
    ]
}

fn folder(target: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "fuzz", "corpus", target].iter().collect()
}

/// The corpus, each packet as what `again` makes of it: the kind, and the packet written again; `None` if it is refused.
fn check<'a>(
    target: &str,
    real: impl Iterator<Item = (&'a str, Vec<u8>)>,
    again: impl Fn(&[u8]) -> Option<(String, Vec<u8>)>,
) {
    let real: Vec<_> = real.collect();
    if std::env::var_os("NVSHARE_WRITE_CORPUS").is_some() {
        fs::create_dir_all(folder(target)).unwrap();
        for (name, packet) in &real {
            fs::write(folder(target).join(name), packet).unwrap();
        }
    }
    let mut kinds = BTreeSet::new();
    for entry in fs::read_dir(folder(target)).unwrap() {
        let packet = fs::read(entry.unwrap().path()).unwrap();
        if let Some((kind, written)) = again(&packet) {
            assert_eq!(written, packet);
            kinds.insert(kind);
        }
    }
    let written = real.iter().filter_map(|(_, packet)| Some(again(packet)?.0)).collect();
    assert_eq!(kinds, written, "a kind is missing from the corpus");
    for (name, packet) in real {
        let file = fs::read(folder(target).join(name)).unwrap();
        assert_eq!(file, packet, "{name} is not written as it was: layouts never change");
    }
}

fn kind(debug: String) -> String {
    debug.split([' ', '{']).next().unwrap_or_default().to_owned()
}

#[test]
fn client_corpus() {
    let real = client_messages();
    check("client_message", real.iter().map(|(n, v, m)| (*n, m.encode(*v).as_bytes().to_vec())), |packet| {
        let message = ClientMessage::decode(packet, version(packet)).ok()?;
        Some((kind(format!("{message:?}")), message.encode(version(packet)).as_bytes().to_vec()))
    });
}

#[test]
fn scheduler_corpus() {
    let real = scheduler_messages();
    check("scheduler_message", real.iter().map(|(n, v, m)| (*n, m.encode(*v).as_bytes().to_vec())), |packet| {
        let message = SchedulerMessage::decode(packet, version(packet)).ok()?;
        Some((kind(format!("{message:?}")), message.encode(version(packet)).as_bytes().to_vec()))
    });
}
