//! The fuzzers' corpus (`wire/fuzz/corpus`): every packet in it is read, or refused, and what is read is written again
//! exactly as it was. Run with `NVSHARE_WRITE_CORPUS=1` to write the message of each kind that the corpus begins with.

use nvshare_wire::{
    ClientMessage, SchedulerMessage, Text, Uuid,
    client::{Engine, GpuKind, ReleaseReason, StuckReason},
    scheduler::{Refusal, WaitReason},
};
use std::{collections::BTreeSet, fs, path::PathBuf};

const VERSION: u16 = 1;

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
                device_free: u64::MAX,
            },
        ),
        ("request", Request { gpus }),
        ("release", Release { gpus, reason: ReleaseReason::NoMemory, busy_us: 1_500_000 }),
        ("stuck", Stuck { gpus, reason: StuckReason::Capturing }),
        ("cancel", Cancel { gpus }),
    ]
}

fn scheduler_messages() -> Vec<(&'static str, SchedulerMessage)> {
    use SchedulerMessage::*;
    let (slot, gpus) = (1, 0b11);
    vec![
        ("welcome", Welcome { version: 1, client: 7 }),
        ("refused", Refused { reason: Refusal::TooMany, text: Text::new("this user has 4096 connections") }),
        ("attached", Attached { slot }),
        ("limit", Limit { slot, bytes: 139 << 30 }),
        ("allowance", Allowance { slot, seq: 3, bytes: 6 << 30 }),
        ("grant", Grant { gpus }),
        ("revoke", Revoke { gpus }),
        ("contended", Contended { gpus, waiters: 2, grace_us: 1000 }),
        ("waiting", Waiting { gpus, why: WaitReason::Pinned }),
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
    assert_eq!(kinds.len(), real.len(), "a kind is missing from the corpus: {kinds:?}");
    for (name, packet) in real {
        let file = fs::read(folder(target).join(name)).unwrap();
        assert_eq!(file, packet, "version {VERSION} of {name} is not written as it was: layouts never change");
    }
}

fn kind(debug: String) -> String {
    debug.split([' ', '{']).next().unwrap_or_default().to_owned()
}

#[test]
fn client_corpus() {
    let real = client_messages();
    check("client_message", real.iter().map(|(n, m)| (*n, m.encode(VERSION).as_bytes().to_vec())), |packet| {
        let message = ClientMessage::decode(packet, VERSION).ok()?;
        Some((kind(format!("{message:?}")), message.encode(VERSION).as_bytes().to_vec()))
    });
}

#[test]
fn scheduler_corpus() {
    let real = scheduler_messages();
    check("scheduler_message", real.iter().map(|(n, m)| (*n, m.encode(VERSION).as_bytes().to_vec())), |packet| {
        let message = SchedulerMessage::decode(packet, VERSION).ok()?;
        Some((kind(format!("{message:?}")), message.encode(VERSION).as_bytes().to_vec()))
    });
}
