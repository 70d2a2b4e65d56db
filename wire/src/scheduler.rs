//! What the scheduler says to a client.

use crate::{
    Secret, SlotSet, Text, Uuid,
    client::{GpuKind, Sharing},
    message::{byte_enum, messages},
};

/// How long a remark can be: what a packet has room for.
pub const REMARK: usize = 240;

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

        /// The most that this client's demand on that GPU can be, as a promise: the memory for it is there, on the GPU or in
        /// the host. An allocation beyond it needs a higher limit ([`RequestLimit`](crate::ClientMessage::RequestLimit)) or fails. A limit
        /// may fall, and without a rule never below a demand that was reported; `limit_ack` of the next report says that it is known.
        67 => Limit {
            slot: u32,
            bytes: u64,
            (since 2) seq: u32,
            /// What the limit can be at most, whoever asks.
            (since 2) most: u64,
            /// Bytes of host memory that this client may keep although nothing is in them.
            (since 2) spare: u64,
            /// What a rule allows this client and those that count with it, or 0 where none does. No setting of the program
            /// lets it exceed its limit then.
            (since 3) max: u64,
        },

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

        /// Somebody who may asks for memory that this client has exported: to be answered, whatever the answer, with
        /// [`Exported`](crate::ClientMessage::Exported).
        73 (since 2) => Export { ticket: u64, secret: Secret, range: u32, allocation: u64, first: u32 },

        /// The answer to [`Open`](crate::ClientMessage::Open), with descriptors of chunks if it is `Done`.
        74 (since 2) => Opened { ticket: u32, outcome: Sharing, bytes: u64, chunk: u64 },

        /// Memory that this client has open is no longer its exporter's. This client is to count it as its own, and to
        /// say so with [`Adopted`](crate::ClientMessage::Adopted).
        75 (since 2) => Adopt { exporter: Secret, range: u32 },

        /// So many bytes cannot be had: what waits for them fails.
        76 (since 2) => Denied {
            slot: u32,
            bytes: u64,
            (since 6) what: Denial,
        },

        /// So much is free on that GPU now, and kept for this client for a moment; perhaps less than it asked for.
        77 (since 2) => Reserved { slot: u32, bytes: u64 },

        /// So many bytes of this client are likely to leave that GPU when its turn is over: host memory for them may be made
        /// until then.
        78 (since 2) => Prepare { slot: u32, bytes: u64 },

        /// This scheduler has just started, and the connection was kept for it: it knows nothing of what was said on it
        /// before. This client is to say all of it again, as on a new connection: `Hello` (which is not answered), each GPU
        /// with its memory, and, to end with, [`Held`](crate::ClientMessage::Held). What it asked for before and was not
        /// answered, it is to ask for again after that. Sequence numbers begin anew.
        79 (since 3) => Resume {
            /// The client's id, which stays.
            client: u64,
        },

        /// What a rule allows this client, and those that count with it, of that GPU's memory, whether it uses that GPU or not;
        /// 0: no rule does. Said before any answer to this client, and again when it changes: of each GPU to a client that was
        /// here before, else of those alone for which there is something to say. Where the client has attached the GPU, the
        /// newest [`Limit`](Self::Limit) has the last word.
        80 (since 4) => MemoryMax { uuid: Uuid, bytes: u64 },

        /// An answer to [`RequestPlacement`](crate::ClientMessage::RequestPlacement): the GPU that this process is to see as number `at`, of `of`.
        90 (since 3) => Placed { at: u32, of: u32, uuid: Uuid, kind: GpuKind },

        /// The other answer; the text is for people.
        91 (since 3) => Unplaced { outcome: NoPlacement, text: Text<200> },

        /// Something to say of what this client said, for people: why a value of [`EnvLimit`](crate::ClientMessage::EnvLimit) has no
        /// effect. Nothing to act on: traced with `NVSHARE_DEBUG=1`.
        92 (since 4) => Remark { text: Text<REMARK> },
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
    /// What it means that no GPU is named.
    pub enum NoPlacement {
        /// The process sees what it sees.
        Free = 0,
        /// There is no GPU for it: it is to see none.
        NoGpu = 1,
    }
}

byte_enum! {
    /// What a client cannot have.
    #[derive(Default)]
    pub enum Denial {
        /// A limit of so many bytes.
        #[default]
        Limit = 0,
        /// A context, beside which another client could not run. The scheduler keeps the request until the client detaches.
        Context = 1,
        /// So many bytes on the GPU at once, which it needs already: the driver does not map them, though no other client has
        /// anything there.
        Mapping = 2,
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
        /// It may not create a context yet: who is there could then never have all of its memory on the GPU. Since version 3.
        Context = 4,
        /// An allocation of it waits for memory, as long as it takes, until others have freed some. Since version 3.
        Memory = 5,
    }
}
