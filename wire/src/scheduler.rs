//! What the scheduler says to a client.

use crate::{
    SlotSet, Text,
    message::{byte_enum, messages},
};

messages! {
    pub enum SchedulerMessage {
        /// The answer to a `Hello` that was accepted.
        64 (handshake) => Welcome {
            /// What both sides speak from here on.
            version: u16,
            /// This client's id, the one people see in `nvsharectl status`.
            client: u64,
        },

        /// The answer to a `Hello` that was not; the scheduler then closes the connection.
        65 (handshake) => Refused { reason: Refusal, text: Text<128> },

        /// Room for a context was made on that GPU; it may be created now.
        66 => Attached { slot: u32 },

        /// The most that this client's demand on that GPU can be: an allocation beyond it fails.
        67 => Limit { slot: u32, bytes: u64 },

        /// How many bytes this client may have mapped on that GPU from now on. More than before is credit; less means
        /// *evict*: bring `mapped` down to it, then report with this `seq` as `ack`. Pinned bytes stay.
        68 => Allowance { slot: u32, seq: u32, bytes: u64 },

        /// The lock of those GPUs is this client's.
        69 => Grant { gpus: SlotSet },

        /// Give the lock of those GPUs back once what was submitted is done.
        70 => Revoke { gpus: SlotSet },

        /// Somebody waits for one of those GPUs (or nobody does any more, with `waiters` 0): release as soon as nothing
        /// submitted is running and nothing was submitted for `grace_us`.
        71 => Contended { gpus: SlotSet, waiters: u32, grace_us: u32 },

        /// Why this client still waits. Nothing to act on: traced with `NVSHARE_DEBUG=1`.
        72 => Waiting { gpus: SlotSet, why: WaitReason },
    }
}

byte_enum! {
    /// Why a connection is refused.
    pub enum Refusal {
        /// No protocol version in common.
        Version = 0,
        /// This user has as many connections as it may have.
        TooMany = 1,
        /// The scheduler is shutting down.
        Stopping = 2,
        /// The peer is in another PID namespace or cannot be identified.
        Identity = 3,
    }
}

byte_enum! {
    /// Why a waiter waits.
    pub enum WaitReason {
        /// Others hold the lock or wait before this client.
        Queue = 0,
        /// A holder cannot drain.
        HolderStuck = 1,
        /// Bytes must leave the GPU first.
        Eviction = 2,
        /// Bytes that no engine can move take the place.
        Pinned = 3,
    }
}
