//! What a client says to the scheduler.

use crate::{
    Secret, SlotSet, Text, Uuid,
    counts::Counts,
    env_limits::LimitName,
    message::{byte_enum, messages},
    visible_devices::{Chooser, PART},
};

messages! {
    pub enum ClientMessage {
        /// The first message of a connection, and only the first, but for [`Resume`](crate::SchedulerMessage::Resume).
        1 (handshake) => Hello {
            min_version: u16,
            max_version: u16,
            /// Reserved, 0.
            flags: u32,
            /// The id that [`Welcome`](crate::SchedulerMessage::Welcome) gave on an earlier connection of this process, or 0.
            resume: u64,
            /// Processes with the same key that is not 0 are one gang: granted all or nothing.
            gang: u64,
            /// The library's own version, for people.
            library: Text<32>,
        },

        /// This client is about to create a context on a GPU. From now on it calls the GPU `slot`.
        2 => Attach {
            slot: u32,
            uuid: Uuid,
            kind: GpuKind,
            engine: Engine,
            /// `cuDeviceTotalMem` in bytes.
            total: u64,
            /// The device's name, for hosts where the scheduler has no NVML.
            name: Text<64>,
            /// Why that engine.
            (since 2) reason: EngineReason,
        },

        /// The last context on that GPU is gone, and with it every byte and lock.
        3 => Detach { slot: u32 },

        /// The state of this client's memory on one GPU. Replaces the report before it.
        4 => Memory {
            slot: u32,
            /// The sequence number of the newest [`Allowance`](crate::SchedulerMessage::Allowance) that had been carried
            /// out when this was written; 0 before the first.
            ack: u32,
            /// Bytes this client needs on the GPU in order to run, pinned bytes included.
            demand: u64,
            /// Bytes it has there now, pinned bytes included.
            mapped: u64,
            /// Bytes whose contents are in host memory now.
            swapped: u64,
            /// Bytes of `mapped` that no engine can move.
            pinned: u64,
            /// What `cuMemGetInfo` said was free on the whole GPU just now, or [`u64::MAX`] where it was not asked.
            device_free: u64,
            /// The sequence number of the newest [`Limit`](crate::SchedulerMessage::Limit) that was in effect when this
            /// was written; 0 before the first.
            (since 2) limit_ack: u32,
            /// Bytes of host memory that this client holds for contents of that GPU, whether anything is in them or not.
            (since 2) host: u64,
            (since 5) counts: Counts,
        },

        /// Wants the lock of all GPUs in the set, at once or not at all. Replaces a request that still waits.
        5 => Request { gpus: SlotSet },

        /// Gives the lock of those GPUs back: nothing this client submitted there is still running.
        6 => Release {
            gpus: SlotSet,
            reason: ReleaseReason,
            /// How long, in microseconds, the GPU had work of this client during this turn.
            busy_us: u64,
        },

        /// Was revoked and cannot drain now; it keeps the lock and expects to be asked again.
        7 => Stuck { gpus: SlotSet, reason: StuckReason },

        /// No longer wants the lock it requested.
        8 => Cancel { gpus: SlotSet },

        /// This process gives memory to others, under this name: whoever knows it may ask for some.
        9 (since 2) => Exporter { key: Secret },

        /// Asks for memory that another process of the same user has exported: descriptors of its chunks from number
        /// `first` on. The answer is [`Opened`](crate::SchedulerMessage::Opened); a newer question replaces an older one.
        10 (since 2) => Open { ticket: u32, exporter: Secret, secret: Secret, range: u32, allocation: u64, first: u32 },

        /// The answer to [`Export`](crate::SchedulerMessage::Export); with it come the descriptors of as many chunks as
        /// fit, from the one asked for on. All chunks but the last have `chunk` bytes.
        11 (since 2) => Exported { ticket: u64, outcome: Sharing, slot: u32, bytes: u64, chunk: u64 },

        /// Needs a limit of so many bytes on that GPU, for an allocation that waits. Answered by a
        /// [`Limit`](crate::SchedulerMessage::Limit) that is as high, or by [`Denied`](crate::SchedulerMessage::Denied).
        12 (since 2) => RequestLimit { slot: u32, bytes: u64 },

        /// The driver found no memory on that GPU for something of its own; asks for so much room, for a moment. Answered by
        /// [`Reserved`](crate::SchedulerMessage::Reserved).
        13 (since 2) => Reserve { slot: u32, bytes: u64 },

        /// How full this client keeps a GPU that it holds alone, in thousandths: how much of the time work waits there.
        /// More than 1100: it wants nobody beside it.
        21 (since 3) => Utilization { slot: u32, permille: u32 },

        /// Exported memory is no longer this client's: the next report of its memory leaves it out.
        16 (since 2) => Withdrawn { range: u32 },

        /// Has memory open that another process exported. Said again on each new connection; the first time the scheduler
        /// knows it from `Opened`. `adopted`: this client's reports count it.
        17 (since 2) => Imported { slot: u32, exporter: Secret, range: u32, bytes: u64, adopted: u8 },

        /// From the next report on, this client counts that memory as its own, pinned: nobody else does any more.
        18 (since 2) => Adopted { exporter: Secret, range: u32 },

        /// No longer has that memory open.
        19 (since 2) => Closed { exporter: Secret, range: u32 },

        /// The end of what is said after [`Resume`](crate::SchedulerMessage::Resume), and only there: has the lock of those
        /// GPUs, from the scheduler before.
        20 (since 3) => Held { gpus: SlotSet },

        /// A part of the list of GPUs that this process is to see by its environment; those before it come first.
        30 (since 3) => VisibleDevices { text: Text<PART> },

        /// Asks which GPUs this process is to see, before it initialises CUDA. The answer is one
        /// [`Placed`](crate::SchedulerMessage::Placed) for each, or [`Unplaced`](crate::SchedulerMessage::Unplaced).
        31 (since 3) => RequestPlacement {
            chooser: Chooser,
            /// How many GPUs; 0: nothing is said of that.
            count: u32,
            /// Bytes that it needs on each, its context left out; 0: nobody knows.
            bytes: u64,
            /// The GPUs whose device file this process can open, by number: bit *n* is `/dev/nvidia`*n*; 0: nobody knows.
            devices: u64,
            /// 1: the place is for the program that this process becomes or starts, once this connection is closed.
            ahead: u8,
        },

        /// What the environment of this process allows it: it holds for this client alone, beside what a rule allows, where
        /// it is tighter. Said on each connection before the first GPU. A newer value replaces an older one of the same
        /// limit; one that means nothing is as though it had not been said, and a [`Remark`](crate::SchedulerMessage::Remark)
        /// says so.
        32 (since 4) => EnvLimit {
            limit: LimitName,
            /// 1: the value goes on in the next message.
            more: u8,
            text: Text<PART>,
        },
    }
}

byte_enum! {
    /// How it went to get at another process's memory.
    pub enum Sharing {
        /// Here it is.
        Done = 0,
        /// No process that this one may open memory of has any by that name.
        Unknown = 1,
        /// There is such memory, but it could not be passed on.
        Failed = 2,
        /// Not now: the other process has been asked too much already, or the scheduler has just started and may not know
        /// it yet. To be asked again.
        Busy = 3,
    }
}

byte_enum! {
    /// What a slot's GPU is.
    pub enum GpuKind {
        Gpu = 0,
        /// A MIG slice: a GPU of its own, with a UUID of its own.
        Mig = 1,
    }
}

byte_enum! {
    /// How this client's memory on a GPU can leave it.
    pub enum Engine {
        /// Explicit copies; bytes that are not mapped cannot be touched by work, so demand must be mapped to run.
        Swap = 0,
        /// `cuMemAllocManaged`: pages fault in, so it can run with less than its demand.
        Managed = 1,
        /// Nothing can move: everything is pinned.
        None = 2,
    }
}

byte_enum! {
    /// Why a client's memory on a GPU has its engine.
    #[derive(Default)]
    pub enum EngineReason {
        /// An older library does not say.
        #[default]
        Unsaid = 0,
        /// It is the best, and the GPU has it.
        Best = 1,
        /// The user asked for it.
        Asked = 2,
        /// The program may exceed the GPU by itself.
        Oversubscription = 3,
        /// Engine `swap` would have been taken, but the GPU or its driver has no virtual memory management.
        NoVmm = 4,
        /// Engine `managed` was asked for, but the GPU's managed memory cannot be moved.
        NoManaged = 5,
        /// The GPU has neither.
        Neither = 6,
    }
}

byte_enum! {
    /// Why a client gives the lock back.
    pub enum ReleaseReason {
        /// It had no work (early release).
        Idle = 0,
        /// It was revoked.
        Revoked = 1,
        /// Mapping its memory failed although its allowance covers it; it will request again.
        NoMemory = 2,
        /// The context is gone or broken.
        Gone = 3,
    }
}

byte_enum! {
    /// Why a client cannot drain, or its memory not leave.
    pub enum StuckReason {
        /// Submitted work makes no progress while threads wait at the gate: it may need a further call.
        NeedsHost = 0,
        /// Submitted work simply runs long.
        LongWork = 1,
        /// A stream is capturing, so the contexts cannot be shown to be idle.
        Capturing = 2,
        /// Work is submitted by a way that passes no gate (another API on the same GPU), so nobody can tell whether all of
        /// it is done. Said once, whether the lock was asked for or not; the client's memory stays on the GPU.
        UntrackedWork = 3,
        /// An eviction found no room in host memory; what had left has, and the rest stays. Since version 2.
        HostFull = 4,
        /// No context works any more, so nothing can be copied; the memory is free when the program ends. Since version 2.
        Broken = 5,
    }
}
