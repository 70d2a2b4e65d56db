//! Messages from the scheduler to a client.

use crate::{
    Moves, Secret, SlotSet, Text, Uuid,
    client::{GpuKind, Sharing},
    message::{byte_enum, messages},
};

/// The length of a remark in bytes: as much as fits in a packet.
pub const REMARK: usize = 240;

messages! {
    pub enum SchedulerMessage {
        /// Accepts a `Hello`.
        64 (handshake) => Welcome {
            /// The protocol version of all later messages.
            version: u16,
            /// The client's id, which `nvsharectl status` shows.
            client: u64,
        },

        /// Refuses a `Hello`; the scheduler then closes the connection.
        65 (handshake) => Refused { reason: Refusal, text: Text<128> },

        /// There is room for a context on the GPU: the client may create it.
        66 => Attached { slot: u32 },

        /// The highest demand that the client may reach on the GPU. It is a promise: there is memory for it, on the GPU or in
        /// the host. An allocation beyond it needs a higher limit ([`RequestLimit`](crate::ClientMessage::RequestLimit)) or
        /// fails. A limit may fall, but below a reported demand only by a rule. `limit_ack` of the next report acknowledges it.
        67 => Limit {
            slot: u32,
            bytes: u64,
            seq: u32,
            /// The highest limit possible on this GPU.
            most: u64,
            /// Bytes of unused host buffers that the client may keep.
            spare: u64,
            /// What a rule allows the clients of this client's group together; 0: no rule does. If it is set,
            /// `NVSHARE_ENABLE_SINGLE_OVERSUB` does not lift the limit.
            max: u64,
        },

        /// The bytes that the client may have mapped on the GPU from now on. If it has more, it evicts the excess, except
        /// pinned bytes, and reports with this `seq` as `ack`.
        68 => Allowance { slot: u32, seq: u32, bytes: u64 },

        /// Grants the locks of these GPUs.
        69 => Grant { gpus: SlotSet },

        /// Asks the client to release these locks as soon as its submitted work is done.
        70 => Revoke { gpus: SlotSet },

        /// Other clients wait for one of these GPUs; with `waiters` 0, none does any more. While others wait, the client
        /// releases the lock as soon as its work is done and it has submitted nothing for `grace_us` microseconds.
        71 => Contended { gpus: SlotSet, waiters: u32, grace_us: u32 },

        /// Why the client still waits. Only for the trace (`NVSHARE_DEBUG=1`).
        72 => Waiting { gpus: SlotSet, why: WaitReason },

        /// Another client, which the scheduler has authorized, opens memory that this one has exported. The client must answer
        /// with [`Exported`](crate::ClientMessage::Exported), even if it cannot pass it on.
        73 => Export { ticket: u64, secret: Secret, range: u32, allocation: u64, first: u32 },

        /// Answers [`Open`](crate::ClientMessage::Open), with descriptors of chunks if the outcome is `Done`.
        74 => Opened { ticket: u32, outcome: Sharing, bytes: u64, chunk: u64 },

        /// The exporter of memory that this client has opened has freed it. This client includes it in its reports from now
        /// on, and confirms with [`Adopted`](crate::ClientMessage::Adopted).
        75 => Adopt { exporter: Secret, range: u32 },

        /// Denies a request: the call that waits for it fails.
        76 => Denied {
            slot: u32,
            bytes: u64,
            what: Denial,
        },

        /// Answers [`Reserve`](crate::ClientMessage::Reserve): `bytes`, perhaps fewer than requested, are free on the GPU and
        /// kept for this client for half a second.
        77 => Reserved { slot: u32, bytes: u64 },

        /// About this many bytes of the client are likely to leave the GPU when its turn is over. The client can allocate host
        /// memory for them until then.
        78 => Prepare { slot: u32, bytes: u64 },

        /// A new scheduler has taken over the connection, and does not know what was sent on it before. The client sends its
        /// state again, as on a new connection: `Hello` (which is not answered), each GPU with its memory, and finally
        /// [`Held`](crate::ClientMessage::Held). Then it repeats requests that were not answered. Sequence numbers start again.
        79 => Resume {
            /// The client's id, which does not change.
            client: u64,
        },

        /// The memory of a GPU that a rule allows the clients of this client's group together, whether or not the client uses
        /// that GPU; 0: no limit. Sent before any answer to the client, and when it changes. A new client receives it only for
        /// GPUs with a limit; one that reconnects, for every GPU. On GPUs that the client has attached, the newest
        /// [`Limit`](Self::Limit) applies instead.
        80 => MemoryMax { uuid: Uuid, bytes: u64 },

        /// The client is about to be taken off its GPUs. It is to evict all memory and to enter the driver no more, until
        /// [`Awake`](Self::Awake). Answered by [`SleepReady`](crate::ClientMessage::SleepReady) or
        /// [`SleepRefused`](crate::ClientMessage::SleepRefused).
        81 => PrepareSleep {
            /// [`PAUSED`], or 0.
            flags: u32,
        },

        /// The client is on its GPUs, or stays there after all.
        82 => Awake {
            /// The GPUs that it has come back on in the place of others, whether or not it has attached them. Their slots are
            /// for the new GPUs from now on. From `PrepareSleep` until now the client names no GPU, except to a new scheduler,
            /// as before the move. If its driver says something else, it connects again, and names its GPUs.
            moved: Moves,
        },

        /// How much work the client may queue ahead of the GPU at most, in microseconds of GPU time, until it is told otherwise: what is
        /// queued delays whoever uses the GPU beside it, such as a desktop. 0: as much as the client thinks right.
        83 => RunAhead { slot: u32, micros: u32 },

        /// Where the client may keep memory that has left its GPUs. Sent only to clients that have said
        /// [`UseSwapFile`](crate::ClientMessage::UseSwapFile). If a descriptor comes with it, that is a new swap file of the client, to
        /// be used in the place of an earlier one; what is in the earlier one stays there until it is needed.
        84 => HostMemory {
            /// Bytes of host memory that the client is to hold at most, on account of all its GPUs. What exceeds it goes into the
            /// file, as far as there is room.
            ram: u64,
            /// The size of the newest file in bytes: so much is reserved on the disk.
            file: u64,
        },

        /// This host has swap files. A client that can use one answers with [`UseSwapFile`](crate::ClientMessage::UseSwapFile); one
        /// that cannot does not answer. Only then does it find out, since a filter of system calls may end who tries.
        85 => OfferSwapFile {},

        /// Answers [`RequestPlacement`](crate::ClientMessage::RequestPlacement): the GPU that the process is to see as number `at`
        /// of `of`.
        90 => Placed { at: u32, of: u32, uuid: Uuid, kind: GpuKind },

        /// Answers [`RequestPlacement`](crate::ClientMessage::RequestPlacement) if no GPU was chosen; the text says why.
        91 => Unplaced { outcome: NoPlacement, text: Text<200> },

        /// Why a value of [`EnvLimit`](crate::ClientMessage::EnvLimit) has no effect. Only for the trace (`NVSHARE_DEBUG=1`).
        92 => Remark { text: Text<REMARK> },
    }
}

/// A flag of [`PrepareSleep`](SchedulerMessage::PrepareSleep): the client is paused. Threads that wait are then no reason to stay.
pub const PAUSED: u32 = 1;

byte_enum! {
    /// Why a connection is refused.
    pub enum Refusal {
        /// No protocol version in common.
        Version = 0,
        /// The user has reached the limit of connections.
        TooMany = 1,
        /// The scheduler is shutting down.
        Stopping = 2,
        /// The peer is in another PID namespace or cannot be identified.
        Identity = 3,
    }
}

byte_enum! {
    /// Why no GPU was chosen.
    pub enum NoPlacement {
        /// The process sees the same GPUs as without nvshare.
        Free = 0,
        /// There is no GPU that it may use: it must see none.
        NoGpu = 1,
    }
}

byte_enum! {
    /// What is denied.
    pub enum Denial {
        /// A limit of that many bytes.
        Limit = 0,
        /// A context, beside which another client could never run again. The scheduler keeps the request until the client detaches.
        Context = 1,
        /// That many bytes on the GPU at once, which its allocations need: the driver does not map them, although no other
        /// client has memory there.
        Mapping = 2,
    }
}

byte_enum! {
    /// Why a client waits.
    pub enum WaitReason {
        /// Others hold the lock or wait before this client.
        Queue = 0,
        /// A holder cannot drain.
        HolderStuck = 1,
        /// Bytes must leave the GPU first.
        Eviction = 2,
        /// Memory that cannot leave occupies the room.
        Pinned = 3,
        /// It may not create its context yet: an attached client could then never have all of its memory on the GPU.
        Context = 4,
        /// One of its allocations waits until other clients have freed memory.
        Memory = 5,
    }
}
