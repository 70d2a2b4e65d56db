//! The fuzzers' corpus (`wire/fuzz/corpus`): every packet in it is either rejected, or decoded and
//! encoded again to the same bytes. Run with `NVSHARE_WRITE_CORPUS=1` to write one message of each
//! kind into the corpus.

use nvshare_wire::{
    ClientMessage, Counts, Moves, SchedulerMessage, Secret, Text, Uuid,
    client::{
        CheckpointStep, Engine, EngineReason, GpuKind, LeaveAnswer, ReleaseReason, Sharing, SleepRefusal, StuckReason,
    },
    env_limits::LimitName,
    scheduler::{Denial, NoPlacement, Refusal, WaitReason},
    visible_devices::Chooser,
};
use std::{collections::BTreeSet, fs, path::PathBuf};

const KEY: Secret = Secret([0x6b; 16]);
const SECRET: Secret = Secret([0x73; 16]);

fn client_messages() -> Vec<(&'static str, ClientMessage)> {
    use ClientMessage::*;
    let uuid = Uuid([0x5a, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
    let (slot, gpus) = (1, 0b11);
    vec![
        (
            "hello",
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
            Attach {
                slot,
                uuid,
                kind: GpuKind::Mig,
                engine: Engine::Managed,
                total: 141 << 30,
                name: Text::new("NVIDIA H200"),
                reason: EngineReason::Oversubscription,
            },
        ),
        ("detach", Detach { slot }),
        (
            "memory",
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
                managed: 3 << 30,
                managed_mapped: 2 << 30,
            },
        ),
        ("request", Request { gpus }),
        ("release", Release { gpus, reason: ReleaseReason::NoMemory, busy_us: 1_500_000 }),
        ("stuck", Stuck { gpus, reason: StuckReason::Capturing }),
        ("cancel", Cancel { gpus }),
        ("request_limit", RequestLimit { slot, bytes: 9 << 30 }),
        ("reserve", Reserve { slot, bytes: 64 << 20 }),
        ("utilization", Utilization { slot, permille: 345 }),
        ("exporter", Exporter { key: KEY }),
        ("open", Open { ticket: 4, exporter: KEY, secret: SECRET, range: 2, allocation: 9, first: 16 }),
        ("exported", Exported { ticket: 5, outcome: Sharing::Done, slot, bytes: 80 << 20, chunk: 64 << 20 }),
        ("withdrawn", Withdrawn { range: 2 }),
        ("imported", Imported { slot, exporter: KEY, range: 2, bytes: 80 << 20, adopted: 1 }),
        ("adopted", Adopted { exporter: KEY, range: 2 }),
        ("closed", Closed { exporter: KEY, range: 2 }),
        ("held", Held { gpus }),
        ("sleep_ready", SleepReady {}),
        ("sleep_refused", SleepRefused { why: SleepRefusal::Capture }),
        ("wake", Wake {}),
        ("use_swap_file", UseSwapFile { ram_max: 4 << 30 }),
        ("join_gang", JoinGang { gang: 0x6e63_636c }),
        ("foreign_checkpoint", ForeignCheckpoint { step: CheckpointStep::Restoring, ticket: 9 }),
        ("leaving", Leaving { answer: LeaveAnswer::SwapFile }),
        ("visible_devices", VisibleDevices { text: Text::new("GPU-5a,1") }),
        (
            "request_placement",
            RequestPlacement { chooser: Chooser::List, count: 2, bytes: 9 << 30, devices: 0b101, ahead: 1 },
        ),
        ("env_limit", EnvLimit { limit: LimitName::Weight, more: 0, text: Text::new("idle") }),
    ]
}

fn scheduler_messages() -> Vec<(&'static str, SchedulerMessage)> {
    use SchedulerMessage::*;
    let (slot, gpus) = (1, 0b11);
    let (uuid, other) = (Uuid([0x5a; 16]), Uuid([0xa5; 16]));
    vec![
        ("welcome", Welcome { version: 1, client: 7 }),
        ("refused", Refused { reason: Refusal::TooMany, text: Text::new("this user has 4096 connections") }),
        ("attached", Attached { slot }),
        ("limit", Limit { slot, bytes: 5 << 30, seq: 4, most: 139 << 30, spare: u64::MAX, max: 8 << 30 }),
        ("allowance", Allowance { slot, seq: 3, bytes: 6 << 30 }),
        ("grant", Grant { gpus }),
        ("revoke", Revoke { gpus }),
        ("contended", Contended { gpus, waiters: 2, grace_us: 1000 }),
        ("waiting", Waiting { gpus, why: WaitReason::Pinned }),
        ("denied", Denied { slot, bytes: 9 << 30, what: Denial::Mapping }),
        ("reserved", Reserved { slot, bytes: 64 << 20 }),
        ("export", Export { ticket: 5, secret: SECRET, range: 2, allocation: 9, first: 16 }),
        ("opened", Opened { ticket: 4, outcome: Sharing::Busy, bytes: 80 << 20, chunk: 64 << 20 }),
        ("adopt", Adopt { exporter: KEY, range: 2 }),
        ("unused", Unused { range: 2 }),
        ("prepare", Prepare { slot, bytes: 12 << 30 }),
        ("resume", Resume { client: 7 }),
        ("gpu_rules", GpuRules { uuid: Uuid([0x5a; 16]), memory_max: 8 << 30, permissions: 1 }),
        ("prepare_sleep", PrepareSleep { flags: 1 }),
        ("run_ahead", RunAhead { slot, micros: 16_000 }),
        ("host_memory", HostMemory { ram: 1 << 30, file: 2 << 30 }),
        ("offer_swap_file", OfferSwapFile {}),
        ("continue", Continue { ticket: 9 }),
        ("awake", Awake { moved: Moves::new([(uuid, other), (other, uuid)]).unwrap() }),
        ("leave", Leave {}),
        ("placed", Placed { at: 1, of: 2, uuid: Uuid([0x5a; 16]), kind: GpuKind::Gpu }),
        ("unplaced", Unplaced { outcome: NoPlacement::NoGpu, text: Text::new("no GPU is left") }),
        ("remark", Remark { text: Text::new("NVSHARE_WEIGHT: weight cannot be 0") }),
    ]
}

fn folder(target: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "fuzz", "corpus", target].iter().collect()
}

/// Checks the corpus of `target`. `again` decodes a packet and encodes it again. `again` returns
/// the kind and the new packet, or `None` if the decoder rejects the packet.
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
fn the_client_corpus_covers_and_round_trips_all_messages() {
    let real = client_messages();
    check("client_message", real.iter().map(|(n, m)| (*n, m.encode(1).as_bytes().to_vec())), |packet| {
        let message = ClientMessage::decode(packet, 1).ok()?;
        Some((kind(format!("{message:?}")), message.encode(1).as_bytes().to_vec()))
    });
}

#[test]
fn the_scheduler_corpus_covers_and_round_trips_all_messages() {
    let real = scheduler_messages();
    check("scheduler_message", real.iter().map(|(n, m)| (*n, m.encode(1).as_bytes().to_vec())), |packet| {
        let message = SchedulerMessage::decode(packet, 1).ok()?;
        Some((kind(format!("{message:?}")), message.encode(1).as_bytes().to_vec()))
    });
}
