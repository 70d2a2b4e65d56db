//! Every message survives a round trip, and no bytes make the decoder do anything but return.

use nvshare_wire::{
    ClientMessage, HEADER_LEN, MAX_LEN, SchedulerMessage, Text, Uuid, WireError,
    client::{Engine, GpuKind, ReleaseReason, StuckReason},
    scheduler::{Refusal, WaitReason},
    version,
};
use proptest::prelude::*;

fn client_message() -> impl Strategy<Value = ClientMessage> {
    use ClientMessage::*;
    let engine = prop_oneof![Just(Engine::Swap), Just(Engine::Managed), Just(Engine::None)];
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
        Just(StuckReason::Unseen)
    ];
    prop_oneof![
        (any::<(u16, u16, u32, u64, u64)>(), ".{0,40}").prop_map(
            |((min_version, max_version, flags, resume, gang), t)| {
                Hello { min_version, max_version, flags, resume, gang, library: Text::new(&t) }
            }
        ),
        (any::<(u32, [u8; 16], u64)>(), gpu_kind, engine, ".{0,80}").prop_map(
            |((slot, uuid, total), kind, engine, t)| {
                Attach { slot, uuid: Uuid(uuid), kind, engine, total, name: Text::new(&t) }
            }
        ),
        any::<u32>().prop_map(|slot| Detach { slot }),
        any::<(u32, u32, u64, u64, u64, u64, u64)>().prop_map(
            |(slot, ack, demand, mapped, swapped, pinned, device_free)| Memory {
                slot,
                ack,
                demand,
                mapped,
                swapped,
                pinned,
                device_free
            }
        ),
        any::<u64>().prop_map(|gpus| Request { gpus }),
        (any::<(u64, u64)>(), release).prop_map(|((gpus, busy_us), reason)| Release { gpus, reason, busy_us }),
        (any::<u64>(), stuck).prop_map(|(gpus, reason)| Stuck { gpus, reason }),
        any::<u64>().prop_map(|gpus| Cancel { gpus }),
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
        Just(WaitReason::Pinned)
    ];
    prop_oneof![
        any::<(u16, u64)>().prop_map(|(version, client)| Welcome { version, client }),
        (refusal, ".{0,140}").prop_map(|(reason, t)| Refused { reason, text: Text::new(&t) }),
        any::<u32>().prop_map(|slot| Attached { slot }),
        any::<(u32, u64)>().prop_map(|(slot, bytes)| Limit { slot, bytes }),
        any::<(u32, u32, u64)>().prop_map(|(slot, seq, bytes)| Allowance { slot, seq, bytes }),
        any::<u64>().prop_map(|gpus| Grant { gpus }),
        any::<u64>().prop_map(|gpus| Revoke { gpus }),
        any::<(u64, u32, u32)>().prop_map(|(gpus, waiters, grace_us)| Contended { gpus, waiters, grace_us }),
        (any::<u64>(), why).prop_map(|(gpus, why)| Waiting { gpus, why }),
    ]
}

proptest! {
    #[test]
    fn client_messages_round_trip(message in client_message(), version in 1u16..) {
        let packet = message.encode(version);
        prop_assert!(packet.as_bytes().len() <= MAX_LEN);
        prop_assert_eq!(ClientMessage::decode(packet.as_bytes(), version), Ok(message));
    }

    #[test]
    fn scheduler_messages_round_trip(message in scheduler_message(), version in 1u16..) {
        let packet = message.encode(version);
        prop_assert!(packet.as_bytes().len() <= MAX_LEN);
        prop_assert_eq!(SchedulerMessage::decode(packet.as_bytes(), version), Ok(message));
    }

    /// A packet that was cut or lengthened anywhere is refused.
    #[test]
    fn no_other_length_is_accepted(message in client_message(), len in 0usize..MAX_LEN + 8) {
        let packet = message.encode(1);
        let mut bytes = packet.as_bytes().to_vec();
        prop_assume!(len != bytes.len());
        bytes.resize(len, 0);
        prop_assert!(ClientMessage::decode(&bytes, 1).is_err());
        // Nor with a header that says so.
        if len >= HEADER_LEN {
            bytes[4..8].copy_from_slice(&(len as u32).to_le_bytes());
            prop_assert!(ClientMessage::decode(&bytes, 1).is_err());
        }
    }

    /// What decodes encodes to the same bytes: there is one form of each message.
    #[test]
    fn any_bytes_return(mut bytes in prop::collection::vec(any::<u8>(), 0..MAX_LEN + 8), kind in 0u16..80, fix in any::<bool>()) {
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
    fn a_text_is_a_prefix(text in ".{0,60}") {
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
fn errors_name_what_is_wrong() {
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

/// Version 1's bytes are what they were when it was released: an old library depends on them.
#[test]
fn version_1_is_frozen() {
    let packet = ClientMessage::Request { gpus: 0x8000_0000_0000_0001 }.encode(1);
    assert_eq!(packet.as_bytes(), [1, 0, 5, 0, 16, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0x80]);
    let packet = SchedulerMessage::Allowance { slot: 2, seq: 3, bytes: 4 }.encode(1);
    assert_eq!(packet.as_bytes(), [1, 0, 68, 0, 24, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]);
    let packet = SchedulerMessage::Welcome { version: 1, client: 7 }.encode(9);
    assert_eq!(packet.as_bytes(), [0, 0, 64, 0, 18, 0, 0, 0, 1, 0, 7, 0, 0, 0, 0, 0, 0, 0]);
}
