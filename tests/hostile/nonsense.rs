//! The messages of a hostile scheduler: well-formed messages that make no sense, and malformed
//! packets.

use nvshare_wire::{
    SchedulerMessage, Secret, SlotSet, Text, Uuid,
    client::{GpuKind, Sharing},
    scheduler::{Denial, NoPlacement, Refusal, WaitReason},
};

use test_support::Dice;
use test_support::machine::MIB;

/// Returns a set of slots, mostly the set of slot 0.
fn slots(dice: &mut Dice) -> SlotSet {
    let any = dice.number();
    dice.pick(&[1, 1, 1, 1, 1, 0, 2, 1 << 63, u64::MAX, any])
}

fn slot(dice: &mut Dice) -> u32 {
    let any = dice.number() as u32;
    dice.pick(&[0, 0, 0, 0, 0, 1, 63, 64, u32::MAX, any])
}

fn bytes(dice: &mut Dice) -> u64 {
    let (any, near) = (dice.number(), dice.below(16 * MIB));
    dice.pick(&[0, 1, 2 * MIB, 4 * MIB, 8 * MIB, 64 * MIB, u64::MAX, u64::MAX - 1, near, any])
}

fn count(dice: &mut Dice) -> u32 {
    let any = dice.number() as u32;
    dice.pick(&[0, 1, 1, 2, 1000, u32::MAX, any])
}

/// Returns a well-formed message of random type and contents, regardless of the connection's state.
pub fn message(dice: &mut Dice) -> SchedulerMessage {
    match dice.below(31) {
        0 => SchedulerMessage::Welcome { version: dice.pick(&[0, 1, 2, u16::MAX]), client: dice.number() },
        1 => refusal(dice),
        2..5 => SchedulerMessage::Attached { slot: slot(dice) },
        5 => SchedulerMessage::Limit {
            slot: slot(dice),
            bytes: bytes(dice),
            seq: count(dice),
            most: bytes(dice),
            spare: bytes(dice),
            max: bytes(dice),
        },
        6 => SchedulerMessage::Denied {
            slot: slot(dice),
            bytes: bytes(dice),
            what: dice.pick(&[Denial::Limit, Denial::Context, Denial::Mapping]),
        },
        7 => SchedulerMessage::Reserved { slot: slot(dice), bytes: bytes(dice) },
        8..12 => SchedulerMessage::Allowance { slot: slot(dice), seq: count(dice), bytes: bytes(dice) },
        12..16 => SchedulerMessage::Grant { gpus: slots(dice) },
        16..20 => SchedulerMessage::Revoke { gpus: slots(dice) },
        20..23 => SchedulerMessage::Contended { gpus: slots(dice), waiters: count(dice), grace_us: count(dice) },
        23 => SchedulerMessage::Export {
            ticket: dice.number(),
            secret: Secret([dice.number() as u8; 16]),
            range: count(dice),
            allocation: bytes(dice),
            first: count(dice),
        },
        // `at` is always wrong, and the answer is never "no GPU", because the program would obey a
        // valid answer.
        27 => SchedulerMessage::Placed {
            at: count(dice).max(1),
            of: count(dice),
            uuid: Uuid([dice.number() as u8; 16]),
            kind: dice.pick(&[GpuKind::Gpu, GpuKind::Mig]),
        },
        28 => SchedulerMessage::Unplaced { outcome: NoPlacement::Free, text: Text::new("nonsense") },
        29 => SchedulerMessage::Remark { text: Text::new(dice.pick(&["", "%s%n", "\u{1b}[2J\n", LONG])) },
        30 => SchedulerMessage::GpuRules {
            uuid: Uuid([dice.number() as u8; 16]),
            memory_max: bytes(dice),
            permissions: count(dice),
        },
        24 => SchedulerMessage::Opened {
            ticket: slot(dice),
            outcome: dice.pick(&[Sharing::Done, Sharing::Unknown, Sharing::Failed, Sharing::Busy]),
            bytes: bytes(dice),
            chunk: bytes(dice),
        },
        25 => SchedulerMessage::Adopt { exporter: Secret([dice.number() as u8; 16]), range: count(dice) },
        26 => SchedulerMessage::Unused { range: count(dice) },
        _ => SchedulerMessage::Waiting {
            gpus: slots(dice),
            why: dice.pick(&[WaitReason::Queue, WaitReason::HolderStuck, WaitReason::Eviction, WaitReason::Pinned]),
        },
    }
}

pub fn refusal(dice: &mut Dice) -> SchedulerMessage {
    let reason = dice.pick(&[Refusal::Version, Refusal::TooMany, Refusal::Stopping, Refusal::Identity]);
    let text = dice.pick(&["", "no", "%s%n", LONG]);
    SchedulerMessage::Refused { reason, text: Text::new(text) }
}

/// A text that is longer than a message can hold, in letters of two bytes.
const LONG: &str = "ääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääääää";

/// Returns bytes that are no valid message, except by chance.
pub fn packet(dice: &mut Dice, version: u16) -> Vec<u8> {
    let mut packet = message(dice).encode(version).as_bytes().to_vec();
    match dice.below(7) {
        0 => packet.truncate(dice.below(packet.len() as u64) as usize),
        1 => packet.extend((0..=dice.below(64)).map(|i| i as u8)),
        // The packet is longer than any message.
        2 => packet.resize(dice.pick(&[256, 257, 4096, 60_000]), 0xa5),
        3 => packet[0] = packet[0].wrapping_add(1), // another version
        4 => packet = (0..dice.below(64)).map(|_| dice.number() as u8).collect(),
        _ => {
            for _ in 0..=dice.below(3) {
                let at = dice.below(packet.len() as u64) as usize;
                packet[at] ^= 1 << dice.below(8);
            }
        }
    }
    packet
}
