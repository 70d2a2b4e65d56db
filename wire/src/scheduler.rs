//! Messages from the scheduler to a client.

use crate::{
    Moves, Secret, SlotSet, Text, Uuid,
    client::{GpuKind, Sharing},
    message::{byte_enum, messages},
};

/// The maximum length of a remark in bytes. A longer remark would not fit in a packet.
pub const REMARK: usize = 240;

messages! {
    pub enum SchedulerMessage {
        /// Accepts a `Hello`.
        64 (handshake) => Welcome {
            /// The protocol version of all later messages.
            version: u16,
            /// The client's id, as `nvsharectl status` shows it.
            client: u64,
        },

        /// Refuses a `Hello`, or an [`Attach`](crate::ClientMessage::Attach) without proof. The
        /// scheduler then closes the connection.
        65 (handshake) => Refused { reason: Refusal, text: Text<128> },

        /// The GPU has room for the client's context, so the client may create it.
        66 => Attached { slot: u32 },

        /// The highest demand that the client may reach on the GPU. The scheduler guarantees this
        /// much memory, on the GPU or in the host. An allocation beyond the limit needs a higher
        /// limit ([`RequestLimit`](crate::ClientMessage::RequestLimit)), or fails. A limit may
        /// fall, but only a rule lowers it below a reported demand. `limit_ack` of the next report
        /// acknowledges the limit.
        67 => Limit {
            slot: u32,
            bytes: u64,
            seq: u32,
            /// The highest possible limit on this GPU. With [`MANAGED_BEYOND_GPU`], managed memory may
            /// exceed it.
            most: u64,
            /// Bytes of unused host buffers that the client may keep.
            spare: u64,
            /// Bytes that a rule allows all clients of this client's group together; 0 if no rule
            /// limits them. With such a rule, `NVSHARE_ENABLE_SINGLE_OVERSUB` does not lift the
            /// limit.
            max: u64,
        },

        /// The bytes that the client may have mapped on the GPU from now on. A client with more
        /// mapped memory evicts the excess, except pinned bytes, and reports with this `seq` as
        /// `ack`.
        68 => Allowance { slot: u32, seq: u32, bytes: u64 },

        /// Grants the locks of these GPUs.
        69 => Grant { gpus: SlotSet },

        /// Asks the client to release these locks as soon as its submitted work is done.
        70 => Revoke { gpus: SlotSet },

        /// The number of other clients that wait for one of these GPUs. While the number is not 0,
        /// the client releases the lock after at most `grace_us` microseconds without work.
        71 => Contended { gpus: SlotSet, waiters: u32, grace_us: u32 },

        /// Why the client still waits. Used only for the trace (`NVSHARE_DEBUG=1`).
        72 => Waiting { gpus: SlotSet, why: WaitReason },

        /// Another client, authorized by the scheduler, opens memory that this client has exported.
        /// The client must answer with [`Exported`](crate::ClientMessage::Exported), even if it
        /// cannot pass the memory's descriptors on. `Busy` means that the memory is off the GPU and
        /// on its way back.
        73 => Export { ticket: u64, secret: Secret, range: u32, allocation: u64, first: u32 },

        /// Answers [`Open`](crate::ClientMessage::Open). Carries descriptors of chunks if the
        /// outcome is `Done`.
        74 => Opened { ticket: u32, outcome: Sharing, bytes: u64, chunk: u64 },

        /// The exporter has freed memory that this client has opened. This client includes the
        /// memory in its reports from now on, and confirms with
        /// [`Adopted`](crate::ClientMessage::Adopted).
        75 => Adopt { exporter: Secret, range: u32 },

        /// Denies a request. The client's call that waits for the answer fails.
        76 => Denied {
            slot: u32,
            bytes: u64,
            what: Denial,
        },

        /// Answers [`Reserve`](crate::ClientMessage::Reserve): `bytes` are free on the GPU and are
        /// kept for this client for half a second. `bytes` may be less than requested.
        77 => Reserved { slot: u32, bytes: u64 },

        /// The approximate number of the client's bytes that are likely to be evicted after its
        /// turn. The client can allocate host memory for these bytes before its turn ends.
        78 => Prepare { slot: u32, bytes: u64 },

        /// A new scheduler has taken over the connection. The new scheduler does not know the
        /// earlier messages of the connection. The client sends its state again, as on a new
        /// connection: `Hello` (which is not answered), each GPU with its memory, and finally
        /// [`Held`](crate::ClientMessage::Held). Then the client repeats unanswered requests.
        /// Sequence numbers start again.
        79 => Resume {
            /// The client's id, which stays the same.
            client: u64,
        },

        /// What applies to the client on a GPU, even if the client does not use that GPU. Sent before
        /// any answer to the client, and whenever a value changes. A new client receives this message
        /// only for GPUs with a value other than 0. A reconnecting client receives this message for
        /// every GPU.
        80 => GpuRules {
            uuid: Uuid,
            /// The bytes that a rule allows all clients of this client's group together on the GPU.
            /// 0: no limit. On GPUs that the client has attached, the newest [`Limit`](Self::Limit)
            /// applies instead.
            memory_max: u64,
            /// A combination of [`FABRIC_HANDLES`] and [`MANAGED_BEYOND_GPU`].
            permissions: u32,
        },

        /// The scheduler is about to checkpoint the client. The client evicts all memory and does
        /// not enter the driver until [`Awake`](Self::Awake). Answered by
        /// [`SleepReady`](crate::ClientMessage::SleepReady) or
        /// [`SleepRefused`](crate::ClientMessage::SleepRefused).
        81 => PrepareSleep {
            /// [`PAUSED`], or 0.
            flags: u32,
        },

        /// The client has returned to its GPUs, or never left them.
        82 => Awake {
            /// The GPUs that replaced others when the client was restored, even if the client has
            /// not attached them. The slots of the old GPUs refer to the new GPUs from now on.
            /// Between `PrepareSleep` and this message, the client does not name GPUs. The
            /// exception is a new scheduler that takes over in between: the client names its GPUs
            /// by the UUIDs that they had before the move. If the client's driver reports other
            /// GPUs than this message, the client reconnects and names its GPUs.
            moved: Moves,
        },

        /// The maximum work that the client may queue ahead of the GPU, in microseconds of GPU
        /// time, until the next such message. Queued work delays other users of the GPU, such as a
        /// desktop. 0: the client decides.
        83 => RunAhead { slot: u32, micros: u32 },

        /// Where the client may keep memory that has left its GPUs. Sent only to clients that have
        /// sent [`UseSwapFile`](crate::ClientMessage::UseSwapFile). An attached descriptor is a new
        /// swap file, which replaces the client's earlier file. Contents of the earlier file stay
        /// there until the client needs them.
        84 => HostMemory {
            /// The maximum bytes of host memory that the client may hold for all its GPUs. The
            /// excess is stored in the file, as far as the file has room.
            ram: u64,
            /// The size of the newest file in bytes. Disk space is reserved for the whole file.
            file: u64,
        },

        /// This host has swap files. A client that can use a swap file answers with
        /// [`UseSwapFile`](crate::ClientMessage::UseSwapFile). Other clients do not answer. A
        /// client tests its ability only after this offer, because a seccomp filter may kill a
        /// process that makes the system call.
        85 => OfferSwapFile {},

        /// Answers [`ForeignCheckpoint`](crate::ClientMessage::ForeignCheckpoint): the client may
        /// continue. A client that is about to restore a process is answered when there is room for the
        /// process on its GPUs, or if the scheduler does not know the process.
        86 => Continue { ticket: u32 },

        /// No other client has this exported range open any more, and no request for it is pending.
        /// Until the next [`Export`](Self::Export), the memory may leave the GPU.
        87 => Unused { range: u32 },

        /// CRIU is about to write the process to disk. A client that is asleep closes the
        /// connection. Answered by [`Leaving`](crate::ClientMessage::Leaving).
        88 => Leave {},

        /// Answers [`RequestPlacement`](crate::ClientMessage::RequestPlacement): the GPU that the
        /// process should see at position `at` of `of`.
        90 => Placed { at: u32, of: u32, uuid: Uuid, kind: GpuKind },

        /// Answers [`RequestPlacement`](crate::ClientMessage::RequestPlacement) if no GPU was
        /// chosen. The text gives the reason.
        91 => Unplaced { outcome: NoPlacement, text: Text<200> },

        /// Why a value of [`EnvLimit`](crate::ClientMessage::EnvLimit) has no effect. Used only for
        /// the trace (`NVSHARE_DEBUG=1`).
        92 => Remark { text: Text<REMARK> },
    }
}

/// A permission of [`GpuRules`](SchedulerMessage::GpuRules): the client offers its program FABRIC
/// handles of memory on the GPU, if the driver supports them. Such memory cannot leave the GPU.
pub const FABRIC_HANDLES: u32 = 1;
/// A permission of [`GpuRules`](SchedulerMessage::GpuRules): the client may request a limit beyond the
/// memory of the GPU for managed memory, which the driver pages.
pub const MANAGED_BEYOND_GPU: u32 = 2;

/// A flag of [`PrepareSleep`](SchedulerMessage::PrepareSleep): the client is paused, so it must not
/// refuse because of waiting threads.
pub const PAUSED: u32 = 1;

byte_enum! {
    /// Why a connection is refused.
    pub enum Refusal {
        /// The client and the scheduler share no protocol version.
        Version = 0,
        /// The user has reached the limit of connections.
        TooMany = 1,
        /// The scheduler is shutting down.
        Stopping = 2,
        /// The client is in another PID namespace or cannot be identified.
        Identity = 3,
        /// The client has not proven that it may use a GPU that it attached.
        Device = 4,
    }
}

byte_enum! {
    /// Why no GPU was chosen.
    pub enum NoPlacement {
        /// The process sees the same GPUs as without nvshare.
        Free = 0,
        /// The process is not allowed to use any GPU, and must see none.
        NoGpu = 1,
    }
}

byte_enum! {
    /// The kind of a denied request.
    pub enum Denial {
        /// A limit of `bytes` is denied.
        Limit = 0,
        /// A context is denied, because it would prevent another client from ever running again.
        /// The scheduler keeps the request until the client detaches.
        Context = 1,
        /// The client's allocations need `bytes` on the GPU at the same time, and this demand is
        /// denied. The driver does not map the bytes, although no other client has memory there.
        Mapping = 2,
    }
}

byte_enum! {
    /// Why a client waits.
    pub enum WaitReason {
        /// Other clients hold the lock or are ahead in the queue.
        Queue = 0,
        /// A holder cannot drain.
        HolderStuck = 1,
        /// The scheduler must evict memory first.
        Eviction = 2,
        /// Pinned memory leaves too little room.
        Pinned = 3,
        /// The client is not yet allowed to create its context, because with that context an
        /// attached client could never have all of its memory on the GPU.
        Context = 4,
        /// An allocation of the client waits until other clients have freed memory.
        Memory = 5,
    }
}
