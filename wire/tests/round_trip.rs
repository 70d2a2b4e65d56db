//! Every message survives a round trip, and the decoder panics on no input.

use nvshare_wire::{
    ClientMessage, Counts, HEADER_LEN, MAX_LEN, Moves, SchedulerMessage, Secret, Text, Uuid, WireError,
    client::{
        CheckpointStep, Engine, EngineReason, GpuKind, LeaveAnswer, ReleaseReason, Sharing, SleepRefusal, StuckReason,
    },
    env_limits::LimitName,
    moves::MAX_MOVES,
    scheduler::{Denial, NoPlacement, Refusal, WaitReason},
    version,
    visible_devices::Chooser,
};
use proptest::prelude::*;

fn secret() -> impl Strategy<Value = Secret> {
    any::<[u8; 16]>().prop_map(Secret)
}

fn sharing() -> impl Strategy<Value = Sharing> {
    prop_oneof![Just(Sharing::Done), Just(Sharing::Unknown), Just(Sharing::Failed), Just(Sharing::Busy)]
}

fn client_message() -> impl Strategy<Value = ClientMessage> {
    use ClientMessage::*;
    let engine = prop_oneof![Just(Engine::Swap), Just(Engine::Managed), Just(Engine::None)];
    let reason = prop_oneof![
        Just(EngineReason::Best),
        Just(EngineReason::Asked),
        Just(EngineReason::Oversubscription),
        Just(EngineReason::NoVmm),
        Just(EngineReason::NoManaged),
        Just(EngineReason::Neither),
        Just(EngineReason::Sanitizer)
    ];
    let gpu_kind = prop_oneof![Just(GpuKind::Gpu), Just(GpuKind::Mig)];
    let release = prop_oneof![
        Just(ReleaseReason::Idle),
        Just(ReleaseReason::Revoked),
        Just(ReleaseReason::NoMemory),
        Just(ReleaseReason::Gone)
    ];
    let stuck = prop_oneof![
        Just(StuckReason::NeedsHost),
        Just(StuckReason::LongWork),
        Just(StuckReason::Capturing),
        Just(StuckReason::UntrackedWork),
        Just(StuckReason::HostFull),
        Just(StuckReason::Broken),
        Just(StuckReason::UnseenWork),
        Just(StuckReason::OtherDevice)
    ];
    prop_oneof![
        (any::<(u16, u16, u32, u64, u64)>(), ".{0,40}").prop_map(
            |((min_version, max_version, flags, resume, gang), t)| {
                Hello { min_version, max_version, flags, resume, gang, library: Text::new(&t) }
            }
        ),
        (any::<(u32, [u8; 16], u64)>(), gpu_kind, engine, reason, ".{0,80}").prop_map(
            |((slot, uuid, total), kind, engine, reason, t)| {
                Attach { slot, uuid: Uuid(uuid), kind, engine, total, name: Text::new(&t), reason }
            }
        ),
        any::<u32>().prop_map(|slot| Detach { slot }),
        (any::<(u32, u32, u64, u64, u64, u64, u64, u32, u64)>(), any::<[u64; 7]>()).prop_map(
            |(
                (slot, ack, demand, mapped, swapped, pinned, device_free, limit_ack, host),
                [out, back, unmoved, refused, in_file, managed, managed_mapped],
            )| Memory {
                slot,
                ack,
                demand,
                mapped,
                swapped,
                pinned,
                device_free,
                limit_ack,
                host,
                counts: Counts { swapped_out: out, swapped_in: back, unmoved, refused },
                in_file,
                managed,
                managed_mapped,
            }
        ),
        any::<(u32, u64)>().prop_map(|(slot, bytes)| RequestLimit { slot, bytes }),
        any::<(u32, u64)>().prop_map(|(slot, bytes)| Reserve { slot, bytes }),
        any::<(u32, u32)>().prop_map(|(slot, permille)| Utilization { slot, permille }),
        ".{0,200}".prop_map(|text| VisibleDevices { text: Text::new(&text) }),
        (any::<(u32, u64, u64, u8)>(), prop_oneof![Just(Chooser::Nobody), Just(Chooser::List), Just(Chooser::Rank)])
            .prop_map(|((count, bytes, devices, ahead), chooser)| RequestPlacement {
                chooser,
                count,
                bytes,
                devices,
                ahead
            }),
        (0..LimitName::ALL.len(), any::<u8>(), ".{0,200}").prop_map(|(at, more, text)| EnvLimit {
            limit: LimitName::ALL[at],
            more,
            text: Text::new(&text)
        }),
        any::<u64>().prop_map(|gpus| Request { gpus }),
        (any::<(u64, u64)>(), release).prop_map(|((gpus, busy_us), reason)| Release { gpus, reason, busy_us }),
        (any::<u64>(), stuck).prop_map(|(gpus, reason)| Stuck { gpus, reason }),
        any::<u64>().prop_map(|gpus| Cancel { gpus }),
        secret().prop_map(|key| Exporter { key }),
        (any::<(u32, u32, u64, u32)>(), secret(), secret()).prop_map(
            |((ticket, range, allocation, first), exporter, secret)| {
                Open { ticket, exporter, secret, range, allocation, first }
            }
        ),
        (any::<(u64, u32, u64, u64)>(), sharing()).prop_map(|((ticket, slot, bytes, chunk), outcome)| Exported {
            ticket,
            outcome,
            slot,
            bytes,
            chunk
        }),
        any::<u32>().prop_map(|range| Withdrawn { range }),
        (any::<(u32, u32, u64, u8)>(), secret()).prop_map(|((slot, range, bytes, adopted), exporter)| Imported {
            slot,
            exporter,
            range,
            bytes,
            adopted
        }),
        (secret(), any::<u32>()).prop_map(|(exporter, range)| Adopted { exporter, range }),
        (secret(), any::<u32>()).prop_map(|(exporter, range)| Closed { exporter, range }),
        any::<u64>().prop_map(|gpus| Held { gpus }),
        Just(SleepReady {}),
        prop_oneof![Just(SleepRefusal::Busy), Just(SleepRefusal::Gang)].prop_map(|why| SleepRefused { why }),
        Just(Wake {}),
        any::<u64>().prop_map(|ram_max| UseSwapFile { ram_max }),
        any::<u64>().prop_map(|gang| JoinGang { gang }),
        (any::<u32>(), prop_oneof![Just(CheckpointStep::Locked), Just(CheckpointStep::Restored)])
            .prop_map(|(ticket, step)| ForeignCheckpoint { step, ticket }),
        prop_oneof![Just(LeaveAnswer::Leaves), Just(LeaveAnswer::SwapFile)].prop_map(|answer| Leaving { answer }),
    ]
}

fn scheduler_message() -> impl Strategy<Value = SchedulerMessage> {
    use SchedulerMessage::*;
    let refusal =
        prop_oneof![Just(Refusal::Version), Just(Refusal::TooMany), Just(Refusal::Stopping), Just(Refusal::Identity)];
    let why = prop_oneof![
        Just(WaitReason::Queue),
        Just(WaitReason::HolderStuck),
        Just(WaitReason::Eviction),
        Just(WaitReason::Pinned),
        Just(WaitReason::Context)
    ];
    prop_oneof![
        any::<(u16, u64)>().prop_map(|(version, client)| Welcome { version, client }),
        (refusal, ".{0,140}").prop_map(|(reason, t)| Refused { reason, text: Text::new(&t) }),
        any::<u32>().prop_map(|slot| Attached { slot }),
        any::<(u32, u64, u32, u64, u64, u64)>().prop_map(|(slot, bytes, seq, most, spare, max)| Limit {
            slot,
            bytes,
            seq,
            most,
            spare,
            max
        }),
        (any::<(u32, u64)>(), prop_oneof![Just(Denial::Limit), Just(Denial::Context), Just(Denial::Mapping)])
            .prop_map(|((slot, bytes), what)| Denied { slot, bytes, what }),
        any::<(u32, u64)>().prop_map(|(slot, bytes)| Reserved { slot, bytes }),
        any::<(u32, u32, u64)>().prop_map(|(slot, seq, bytes)| Allowance { slot, seq, bytes }),
        any::<u64>().prop_map(|gpus| Grant { gpus }),
        any::<u64>().prop_map(|gpus| Revoke { gpus }),
        any::<(u64, u64)>().prop_map(|(ram, file)| HostMemory { ram, file }),
        Just(OfferSwapFile {}),
        any::<u32>().prop_map(|ticket| Continue { ticket }),
        Just(Leave {}),
        any::<u32>().prop_map(|flags| PrepareSleep { flags }),
        any::<(u32, u32)>().prop_map(|(slot, micros)| RunAhead { slot, micros }),
        prop::collection::vec(any::<([u8; 16], [u8; 16])>(), 0..=MAX_MOVES).prop_map(|moves| {
            let moves = moves.into_iter().map(|(before, now)| (Uuid(before), Uuid(now)));
            Awake { moved: Moves::new(moves).unwrap() }
        }),
        any::<(u64, u32, u32)>().prop_map(|(gpus, waiters, grace_us)| Contended { gpus, waiters, grace_us }),
        (any::<u64>(), why).prop_map(|(gpus, why)| Waiting { gpus, why }),
        (any::<(u64, u32, u64, u32)>(), secret()).prop_map(|((ticket, range, allocation, first), secret)| Export {
            ticket,
            secret,
            range,
            allocation,
            first
        }),
        (any::<(u32, u64, u64)>(), sharing()).prop_map(|((ticket, bytes, chunk), outcome)| Opened {
            ticket,
            outcome,
            bytes,
            chunk
        }),
        (secret(), any::<u32>()).prop_map(|(exporter, range)| Adopt { exporter, range }),
        any::<u32>().prop_map(|range| Unused { range }),
        any::<u64>().prop_map(|client| Resume { client }),
        (any::<(u32, u32, [u8; 16])>(), prop_oneof![Just(GpuKind::Gpu), Just(GpuKind::Mig)])
            .prop_map(|((at, of, uuid), kind)| Placed { at, of, uuid: Uuid(uuid), kind }),
        any::<([u8; 16], u64, u32)>().prop_map(|(uuid, memory_max, permissions)| GpuRules {
            uuid: Uuid(uuid),
            memory_max,
            permissions
        }),
        (prop_oneof![Just(NoPlacement::Free), Just(NoPlacement::NoGpu)], ".{0,250}")
            .prop_map(|(outcome, text)| Unplaced { outcome, text: Text::new(&text) }),
        ".{0,250}".prop_map(|text| Remark { text: Text::new(&text) }),
    ]
}

proptest! {
    #[test]
    fn client_messages_round_trip(message in client_message(), version in version::MAX..) {
        let packet = message.encode(version);
        prop_assert!(packet.as_bytes().len() <= MAX_LEN);
        prop_assert_eq!(ClientMessage::decode(packet.as_bytes(), version), Ok(message));
    }

    #[test]
    fn scheduler_messages_round_trip(message in scheduler_message(), version in version::MAX..) {
        let packet = message.encode(version);
        prop_assert!(packet.as_bytes().len() <= MAX_LEN);
        prop_assert_eq!(SchedulerMessage::decode(packet.as_bytes(), version), Ok(message));
    }

    /// The decoder rejects a packet that was cut or lengthened anywhere.
    #[test]
    fn packets_of_a_wrong_length_are_rejected(message in client_message(), len in 0usize..MAX_LEN + 8) {
        let packet = message.encode(2);
        let mut bytes = packet.as_bytes().to_vec();
        prop_assume!(len != bytes.len());
        bytes.resize(len, 0);
        prop_assert!(ClientMessage::decode(&bytes, 2).is_err());
        // The decoder rejects the packet even if the header contains the new length.
        if len >= HEADER_LEN {
            bytes[4..8].copy_from_slice(&(len as u32).to_le_bytes());
            prop_assert!(ClientMessage::decode(&bytes, 2).is_err());
        }
    }

    /// A decoded packet encodes to the same bytes: each message has one form.
    #[test]
    fn decodable_bytes_encode_to_the_same_bytes(mut bytes in prop::collection::vec(any::<u8>(), 0..MAX_LEN + 8), kind in 0u16..80, fix in any::<bool>()) {
        if fix && bytes.len() >= HEADER_LEN {
            let len = bytes.len() as u32;
            bytes[..2].copy_from_slice(&1u16.to_le_bytes());
            bytes[2..4].copy_from_slice(&kind.to_le_bytes());
            bytes[4..8].copy_from_slice(&len.to_le_bytes());
        }
        if let Ok(message) = ClientMessage::decode(&bytes, 1) {
            let packet = message.encode(1);
            prop_assert_eq!(packet.as_bytes(), &bytes[..]);
        }
        if let Ok(message) = SchedulerMessage::decode(&bytes, 1) {
            let packet = message.encode(1);
            prop_assert_eq!(packet.as_bytes(), &bytes[..]);
        }
    }

    #[test]
    fn a_long_text_is_truncated_to_a_prefix(text in ".{0,60}") {
        let kept = Text::<32>::new(&text);
        prop_assert!(text.starts_with(kept.as_str()) && kept.as_str().len() <= 32);
    }

    #[test]
    fn the_agreed_version_is_the_newest_common_one(min in 0u16..6, max in 0u16..6) {
        let common = (version::MIN..=version::MAX).rev().find(|v| (min..=max).contains(v));
        prop_assert_eq!(version::negotiate(min, max), common);
    }
}

#[test]
fn each_invalid_packet_has_its_own_error() {
    let packet = ClientMessage::Request { gpus: 1 }.encode(1);
    let mut bytes = packet.as_bytes().to_vec();
    assert_eq!(ClientMessage::decode(&bytes, 2), Err(WireError::Version { got: 1, expected: 2 }));
    bytes[2] = 99;
    assert_eq!(ClientMessage::decode(&bytes, 1), Err(WireError::Kind { kind: 99 }));
    assert_eq!(ClientMessage::decode(&[0; 4], 1), Err(WireError::Truncated { have: 4, need: 8 }));
    assert_eq!(ClientMessage::decode(&[0; 300], 1), Err(WireError::Oversized { have: 300 }));
    let packet = ClientMessage::Stuck { gpus: 1, reason: StuckReason::LongWork }.encode(1);
    let mut bytes = packet.as_bytes().to_vec();
    *bytes.last_mut().unwrap() = 9;
    assert_eq!(ClientMessage::decode(&bytes, 1), Err(WireError::Value { field: "reason", value: 9 }));
}

/// Version 1's bytes stay as released: an old library depends on them.
#[test]
fn version_1_is_frozen() {
    let packet = ClientMessage::Request { gpus: 0x8000_0000_0000_0001 }.encode(1);
    assert_eq!(packet.as_bytes(), [1, 0, 5, 0, 16, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0x80]);
    let packet = SchedulerMessage::Allowance { slot: 2, seq: 3, bytes: 4 }.encode(1);
    assert_eq!(packet.as_bytes(), [1, 0, 68, 0, 24, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
    let packet = SchedulerMessage::Welcome { version: 1, client: 7 }.encode(9);
    assert_eq!(packet.as_bytes(), [0, 0, 64, 0, 18, 0, 0, 0, 1, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
}
