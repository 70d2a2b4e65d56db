//! Messages from a client to the scheduler.

use crate::{
    Secret, SlotSet, Text, Uuid,
    counts::Counts,
    env_limits::LimitName,
    message::{byte_enum, messages},
    visible_devices::{Chooser, PART},
};

messages! {
    pub enum ClientMessage {
        /// Starts a connection. Sent once, and again after
        /// [`Resume`](crate::SchedulerMessage::Resume).
        1 (handshake) => Hello {
            min_version: u16,
            max_version: u16,
            /// [`ASLEEP`], or 0.
            flags: u32,
            /// The id from [`Welcome`](crate::SchedulerMessage::Welcome) on an earlier connection
            /// of this process, or 0.
            resume: u64,
            /// The key of the process's gang; 0: none. Processes with the same key are granted
            /// their GPUs together or not at all.
            gang: u64,
            /// The version of the library, for display.
            library: Text<32>,
        },

        /// The client is about to create a context on a GPU. Later messages name the GPU by `slot`.
        /// Carries descriptors of GPU device files, open for reading and writing, as proof that the
        /// client may use these GPUs. A client that is asleep sends none.
        2 => Attach {
            slot: u32,
            uuid: Uuid,
            kind: GpuKind,
            engine: Engine,
            /// `cuDeviceTotalMem` in bytes.
            total: u64,
            /// The device's name, for hosts where the scheduler has no NVML.
            name: Text<64>,
            /// Why the client has this engine.
            reason: EngineReason,
        },

        /// The client has destroyed its last context on the GPU, and holds no memory and no lock
        /// there.
        3 => Detach { slot: u32 },

        /// The state of this client's memory on one GPU. Replaces the client's previous report.
        4 => Memory {
            slot: u32,
            /// The sequence number of the newest [`Allowance`](crate::SchedulerMessage::Allowance)
            /// that the client had carried out when it wrote this report; 0 before the first.
            ack: u32,
            /// Bytes that the client needs on the GPU to run, including pinned bytes.
            demand: u64,
            /// Bytes that the client has mapped on the GPU now, including pinned bytes.
            mapped: u64,
            /// Bytes whose contents are in host memory now.
            swapped: u64,
            /// The part of `mapped` that cannot leave the GPU.
            pinned: u64,
            /// Free bytes of the whole GPU, from `cuMemGetInfo`, or [`u64::MAX`] if `cuMemGetInfo`
            /// was not called.
            device_free: u64,
            /// The sequence number of the newest [`Limit`](crate::SchedulerMessage::Limit) that was
            /// in effect when the client wrote this report; 0 before the first.
            limit_ack: u32,
            /// Bytes of host memory that the client holds for this GPU's memory, including unused
            /// buffers.
            host: u64,
            counts: Counts,
            /// The part of `swapped` that is in a swap file instead of host memory.
            in_file: u64,
            /// Bytes of the client's managed memory (`cuMemAllocManaged`), wherever they are. NVML does
            /// not show them under the client's process. Managed memory that has left the GPU
            /// counts as in use there until the driver gives its pages to another program.
            managed: u64,
            /// The part of `mapped` that is managed memory.
            managed_mapped: u64,
        },

        /// Requests the locks of all GPUs in the set together. Replaces a pending request.
        5 => Request { gpus: SlotSet },

        /// Releases the locks of these GPUs. None of the client's submitted work still runs there.
        6 => Release {
            gpus: SlotSet,
            reason: ReleaseReason,
            /// How long the client's work ran on the GPUs in this turn, in microseconds.
            busy_us: u64,
        },

        /// The client was asked to release the locks, and cannot drain yet. The client keeps the
        /// locks, and the scheduler asks again later.
        7 => Stuck { gpus: SlotSet, reason: StuckReason },

        /// Withdraws the request for these locks.
        8 => Cancel { gpus: SlotSet },

        /// The process exports memory. Processes that know the key can open the memory.
        9 => Exporter { key: Secret },

        /// Asks for memory that another process of the same tenant has exported. The request is for
        /// the descriptors of the memory's chunks, from chunk number `first` on. Answered by
        /// [`Opened`](crate::SchedulerMessage::Opened). A newer request replaces an older request.
        10 => Open { ticket: u32, exporter: Secret, secret: Secret, range: u32, allocation: u64, first: u32 },

        /// Answers [`Export`](crate::SchedulerMessage::Export). Carries the descriptors of as many
        /// chunks as fit, starting with the requested chunk. All chunks have `chunk` bytes, except
        /// a shorter last chunk.
        11 => Exported { ticket: u64, outcome: Sharing, slot: u32, bytes: u64, chunk: u64 },

        /// Requests a limit of `bytes` on the GPU for a pending allocation. Answered by a
        /// [`Limit`](crate::SchedulerMessage::Limit) of at least `bytes`, or by
        /// [`Denied`](crate::SchedulerMessage::Denied).
        12 => RequestLimit { slot: u32, bytes: u64 },

        /// Requests a reservation. The driver found no free GPU memory for an allocation of its
        /// own, and the client is about to repeat the driver call. Answered by
        /// [`Reserved`](crate::SchedulerMessage::Reserved).
        13 => Reserve { slot: u32, bytes: u64 },

        /// The part of the time, in thousandths, in which the client's work keeps a GPU busy while
        /// no other client uses the GPU. A value above 1100 asks the scheduler to run no other
        /// client at the same time.
        21 => Utilization { slot: u32, permille: u32 },

        /// The client has freed exported memory. The client's next report no longer includes the
        /// memory.
        16 => Withdrawn { range: u32 },

        /// The client has opened memory that another process exported. Sent on each later
        /// connection. Not sent on the connection that opened the memory, because the scheduler
        /// itself answered the `Open` there. `adopted`: the client's reports include the memory.
        17 => Imported { slot: u32, exporter: Secret, range: u32, bytes: u64, adopted: u8 },

        /// The exporter has freed this memory. The client's later reports include the memory as
        /// pinned.
        18 => Adopted { exporter: Secret, range: u32 },

        /// The client has closed memory that it had opened.
        19 => Closed { exporter: Secret, range: u32 },

        /// The last message after [`Resume`](crate::SchedulerMessage::Resume): the client holds the
        /// locks of these GPUs, which an earlier scheduler granted.
        20 => Held { gpus: SlotSet },

        /// Answers [`PrepareSleep`](crate::SchedulerMessage::PrepareSleep): no thread of the client
        /// enters the driver until [`Awake`](crate::SchedulerMessage::Awake).
        22 => SleepReady {},

        /// Answers [`PrepareSleep`](crate::SchedulerMessage::PrepareSleep): the client refuses to
        /// sleep.
        23 => SleepRefused { why: SleepRefusal },

        /// A thread waits to enter the driver while the client is asleep or ready to sleep. Sent
        /// once for each sleep.
        24 => Wake {},

        /// Answers [`OfferSwapFile`](crate::SchedulerMessage::OfferSwapFile): the client can use a swap file.
        25 => UseSwapFile {
            /// The host memory that the client's cgroups allow, in bytes; [`u64::MAX`]: no limit.
            ram_max: u64,
        },

        /// The process is in another gang, in addition to earlier ones. Gangs that have a process in
        /// common run as one. Sent when the process joins the gang, and on each later connection.
        26 => JoinGang {
            /// The key of the gang, as in [`Hello`](Self::Hello). 0 has no effect.
            gang: u64,
        },

        /// The client changes the CUDA state of another process by a driver call. Carries a pidfd of that
        /// process. Answered by [`Continue`](crate::SchedulerMessage::Continue).
        27 => ForeignCheckpoint { step: CheckpointStep, ticket: u32 },

        /// Answers [`Leave`](crate::SchedulerMessage::Leave).
        28 => Leaving { answer: LeaveAnswer },

        /// A part of the process's `CUDA_VISIBLE_DEVICES`. Parts are sent in order.
        30 => VisibleDevices { text: Text<PART> },

        /// Asks which GPUs this process should see. Sent before the process initializes CUDA.
        /// Answered by one [`Placed`](crate::SchedulerMessage::Placed) for each GPU, or by
        /// [`Unplaced`](crate::SchedulerMessage::Unplaced).
        31 => RequestPlacement {
            chooser: Chooser,
            /// The number of GPUs; 0: unspecified.
            count: u32,
            /// Bytes that the process needs on each GPU, excluding its context; 0: unknown.
            bytes: u64,
            /// The device files that the process can open: bit *n* is `/dev/nvidia`*n*; 0: unknown.
            devices: u64,
            /// 1: the placement is for a program that this process becomes or starts after it has
            /// closed the connection.
            ahead: u8,
        },

        /// A limit from this process's environment. The limit applies to this client alone, in
        /// addition to its rule. Sent on each connection before the first [`Attach`](Self::Attach).
        /// A newer value of the same limit replaces an older value. A
        /// [`Remark`](crate::SchedulerMessage::Remark) answers a value that is invalid or has no
        /// effect.
        32 => EnvLimit {
            limit: LimitName,
            /// 1: the value continues in the next message.
            more: u8,
            text: Text<PART>,
        },
    }
}

byte_enum! {
    /// The outcome of opening another process's memory.
    pub enum Sharing {
        /// The memory has been opened.
        Done = 0,
        /// No process exports this memory to this client.
        Unknown = 1,
        /// The memory exists, but its descriptors could not be passed.
        Failed = 2,
        /// The exporter has too many pending requests, or the scheduler has just started and may
        /// not know the exporter yet. The client should retry.
        Busy = 3,
    }
}

byte_enum! {
    /// How a client changes the CUDA state of another process.
    pub enum CheckpointStep {
        /// `cuCheckpointProcessLock` or `cuCheckpointProcessUnlock` has succeeded.
        Locked = 0,
        /// `cuCheckpointProcessCheckpoint` has succeeded. The client will send `Restoring` before it
        /// restores the process.
        Checkpointed = 1,
        /// The client is about to call `cuCheckpointProcessRestore`, and waits for room. The room is
        /// kept until `Restored`.
        Restoring = 2,
        /// `cuCheckpointProcessRestore` has returned, with or without success.
        Restored = 3,
    }
}

byte_enum! {
    /// The kind of a GPU.
    #[derive(Default)]
    pub enum GpuKind {
        #[default]
        Gpu = 0,
        /// A MIG slice. It counts as a separate GPU and has its own UUID.
        Mig = 1,
    }
}

byte_enum! {
    /// The method that moves a client's memory off a GPU.
    pub enum Engine {
        /// The library copies the memory. Work cannot access unmapped memory, so all of the demand
        /// must be mapped before the client runs.
        Swap = 0,
        /// The driver handles page faults (`cuMemAllocManaged`), so the client can run with less
        /// than its demand mapped.
        Managed = 1,
        /// Memory cannot be moved: all memory is pinned.
        None = 2,
    }
}

byte_enum! {
    /// Why a client uses this engine on a GPU.
    pub enum EngineReason {
        /// The engine is the best that the GPU supports.
        Best = 0,
        /// The user selected the engine.
        Asked = 1,
        /// The program may use more memory than the GPU has.
        Oversubscription = 2,
        /// Engine `swap` was preferred, but the GPU or its driver has no virtual memory management.
        NoVmm = 3,
        /// Engine `managed` was selected, but the GPU's managed memory cannot be moved.
        NoManaged = 4,
        /// The GPU supports neither engine.
        Neither = 5,
        /// compute-sanitizer checks the program, and recognizes only the driver's allocations.
        Sanitizer = 6,
    }
}

/// A flag of [`Hello`](ClientMessage::Hello): an earlier scheduler told the client to sleep, and
/// the client is ready to sleep or asleep. The client names its GPUs (`Attach`). Neither side sends
/// any other message about these GPUs before [`Awake`](crate::SchedulerMessage::Awake). After
/// [`Resume`](crate::SchedulerMessage::Resume), the client sends `Held` without GPUs.
pub const ASLEEP: u32 = 1;

byte_enum! {
    /// Why a client cannot sleep.
    pub enum SleepRefusal {
        /// The client has running work, or threads that may be inside the driver.
        Busy = 0,
        /// The client uses managed memory, which the driver does not checkpoint.
        Managed = 1,
        /// The client shares memory with other processes.
        Ipc = 2,
        /// Peer access is enabled between the client's GPUs.
        Peers = 3,
        /// The client has memory that cannot leave the GPU.
        Immovable = 4,
        /// Other devices may access the client's memory.
        Rdma = 5,
        /// The client submits work that bypasses the gate.
        UnseenWork = 6,
        /// A stream is being captured.
        Capture = 7,
        /// The client is in a gang.
        Gang = 8,
    }
}

byte_enum! {
    /// Whether a client leaves, so that CRIU can write its process to disk.
    pub enum LeaveAnswer {
        /// The client closes the connection, and sends no other message. The client connects again
        /// after one second, without the time for which its process is stopped.
        Leaves = 0,
        /// The client stays, because it is not asleep.
        Awake = 1,
        /// The client stays, because it has a swap file. The file is open in a descriptor table that
        /// CRIU does not save.
        SwapFile = 2,
    }
}

byte_enum! {
    /// Why a client releases the lock.
    pub enum ReleaseReason {
        /// The client had no work (early release).
        Idle = 0,
        /// The lock was revoked.
        Revoked = 1,
        /// Mapping the client's memory failed although the allowance covers it. The client will
        /// request the lock again.
        NoMemory = 2,
        /// The context is gone or broken.
        Gone = 3,
    }
}

byte_enum! {
    /// Why a client cannot drain, or why its memory cannot be evicted.
    pub enum StuckReason {
        /// Submitted work makes no progress while threads wait at the gate. The work may need a
        /// call from one of these threads.
        NeedsHost = 0,
        /// Submitted work runs for a long time.
        LongWork = 1,
        /// A stream is being captured, so the client cannot check that its contexts are idle.
        Capturing = 2,
        /// Work bypassed the gate through another API on the same GPU, so the client cannot know
        /// whether all work is done. Sent once, even if the lock was not revoked. The client's
        /// memory stays on the GPU.
        UntrackedWork = 3,
        /// Host memory is full. An eviction has stopped, and the rest of the memory stays on the
        /// GPU.
        HostFull = 4,
        /// The contexts have failed, so the client cannot copy memory. The memory is freed when the
        /// program ends.
        Broken = 5,
        /// The driver does not report the contexts as idle, although all work that passed the gate
        /// is done. The client has abandoned an eviction.
        UnseenWork = 6,
        /// A device other than a GPU, such as a network card, may access the client's memory. Sent
        /// like `UntrackedWork`, and with the same effect.
        OtherDevice = 7,
    }
}
