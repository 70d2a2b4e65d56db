//! What a client says to the scheduler.

use crate::{
    SlotSet, Text, Uuid,
    message::{byte_enum, messages},
};

messages! {
    pub enum ClientMessage {
        /// The first message of a connection, and only the first.
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
        Unseen = 3,
    }
}
