//! The messages between `libnvshare.so` (a client) and `nvshare-scheduler`.
//!
//! One message is one `SOCK_SEQPACKET` packet: a header ([`header`]) and a body of fixed layout,
//! all integers little-endian.
//!
//! - [`client`]: messages of the client.
//! - [`scheduler`]: messages of the scheduler.
//! - [`version`]: protocol versions.
//! - [`visible_devices`]: variables that choose a program's GPUs.
//! - [`env_limits`]: variables for a program's own limits.
//! - [`counts`]: counters of a client.
//! - [`moves`]: the GPUs that replaced a client's earlier GPUs.
//! - [`codec`]: the encoding of fields.
//! - [`error`]: malformed packets.
//!
//! The crate neither allocates nor panics, because the client's side runs inside unmodified programs.
//! For the same reason its only dependency, `serde`, is optional: the scheduler enables it to record
//! enums of one byte.
//!
//! # A conversation
//! ```text
//! client                              scheduler
//! Hello ────────────────────────────▶
//!       ◀──────────────────────────── Welcome            (or Refused, then closes)
//! EnvLimit(weight, "10") ───────────▶                     one for each variable that is set; a Remark if it has no effect
//!       ◀──────────────────────────── GpuRules(GPU by UUID)     one for each GPU on which a rule limits or permits something
//! Attach(slot 0 = GPU by UUID) ─────▶                     before it creates a context there
//!       ◀──────────────────────────── Attached            there is room for the context; limit and first allowance
//! Memory(demand 2 GiB, mapped 0) ───▶                     a state, not a change: the newest report replaces all others
//! Request(GPUs {0}) ────────────────▶
//!       ◀──────────────────────────── Allowance(2 GiB)    may map 2 GiB
//!       ◀──────────────────────────── Grant(GPUs {0})     may submit work
//!       ◀──────────────────────────── Contended           another client waits: release as soon as idle
//!       ◀──────────────────────────── Revoke              drain, then
//! Release(GPUs {0}) ────────────────▶
//!       ◀──────────────────────────── Allowance(0)        evict: copy out, unmap
//! Memory(mapped 0, ack) ────────────▶
//! ```
//! The scheduler also passes on memory that one program shares with another. The scheduler passes
//! descriptors of the memory's chunks, and keeps none of them:
//! ```text
//! importer                            scheduler                            exporter
//! Open(ticket, secret) ─────────────▶ same tenant? ───────────── Export ──▶
//!       ◀─────── Opened + descriptors      ◀──────── Exported + descriptors
//! ```
//! A client that is taken off its GPUs may be restored on other GPUs. The client's slots then refer
//! to the new GPUs:
//! ```text
//! client                              scheduler
//!       ◀──────────────────────────── PrepareSleep           evict, and stay out of the driver
//! Memory(mapped 0), SleepReady ─────▶                         checkpoint; restore on another GPU
//!       ◀──────────────────────────── Awake(GPU by UUID → GPU by UUID)
//! Request(GPUs {0}) ────────────────▶                         slot 0 is the other GPU
//! ```
//! Evicted memory is in host memory. Memory beyond the scheduler's limit on host memory is in a
//! file that the scheduler provides:
//! ```text
//! client                              scheduler
//!       ◀──────────────────────────── OfferSwapFile
//! UseSwapFile ──────────────────────▶
//!       ◀────────────── HostMemory(ram 1 GiB, file 2 GiB) + descriptor
//! Memory(swapped 3 GiB, in_file 2 GiB) ─▶
//! ```
//! Managed memory keeps GPU memory in use after its eviction, until other programs need that
//! memory. NVML shows it under no process. So clients report all managed memory that they have:
//! ```text
//! client                              scheduler
//! Memory(mapped 8 GiB, managed 6 GiB, managed_mapped 6 GiB) ─▶
//!       ◀──────────────────────────── Allowance(0)
//! Memory(mapped 0, managed 6 GiB, managed_mapped 0) ─▶        up to 6 GiB in use are evicted memory
//! ```
//! The holder of the *GPU lock* (Grant, Revoke, Release) may submit work. The *allowance* is the
//! number of bytes that a client may have mapped. The two are independent: a client that has lost
//! the lock keeps its memory until the bytes are needed. The *limit* is the number of bytes that a
//! client may allocate. The limit guarantees room on the GPU or in the host. RequestLimit requests
//! a higher limit.

#![cfg_attr(not(test), no_std)]

pub mod client;
pub mod codec;
pub mod counts;
pub mod env_limits;
pub mod error;
pub mod header;
mod message;
pub mod moves;
pub mod scheduler;
pub mod version;
pub mod visible_devices;

pub use client::ClientMessage;
pub use codec::{Secret, Text, Uuid};
pub use counts::Counts;
pub use error::WireError;
pub use header::{HEADER_LEN, MAX_LEN};
pub use moves::Moves;
pub use scheduler::SchedulerMessage;

/// The largest number of descriptors in one packet.
pub const MAX_DESCRIPTORS: usize = 16;

/// A set of one client's GPUs, by slot: bit *n* is slot *n*.
pub type SlotSet = u64;

/// The number of GPUs that one client can attach, which is the number of bits of a [`SlotSet`].
pub const MAX_SLOTS: u32 = SlotSet::BITS;
