//! The messages between `libnvshare.so` (a client) and `nvshare-scheduler`.
//!
//! One message is one `SOCK_SEQPACKET` packet: a header ([`header`]) and a body of fixed layout, all integers
//! little-endian. [`client`] has what a client says, [`scheduler`] what the scheduler says, [`version`] how the
//! two agree on a protocol version, [`visible_devices`] who chooses a program's GPUs, [`env_limits`] what its environment allows it, [`counts`] what it
//! counts, [`codec`] how fields become bytes, [`error`] what can be wrong with a packet.
//!
//! The crate has no dependencies and neither allocates nor panics: one side of it runs inside other people's
//! processes.
//!
//! # A conversation
//! ```text
//! client                              scheduler
//! Hello ────────────────────────────▶
//!       ◀──────────────────────────── Welcome            (or Refused, and the end)
//! EnvLimit(weight, "10") ────────────────▶                     what its environment allows it, if anything; perhaps a Remark
//!       ◀──────────────────────────── MemoryMax(GPU by UUID)    for each whose memory a rule bounds
//! Attach(slot 0 = GPU by UUID) ─────▶                     before it creates a context there
//!       ◀──────────────────────────── Attached            room for the context is made; limit and first allowance
//! Memory(demand 2 GiB, mapped 0) ───▶                     a state, not a change: the newest report replaces all others
//! Request(GPUs {0}) ────────────────▶
//!       ◀──────────────────────────── Allowance(2 GiB)    may map that much
//!       ◀──────────────────────────── Grant(GPUs {0})     may submit work
//!       ◀──────────────────────────── Contended           somebody waits: release as soon as idle
//!       ◀──────────────────────────── Revoke              drain, then
//! Release(GPUs {0}) ────────────────▶
//!       ◀──────────────────────────── Allowance(0)        evict: copy out, unmap
//! Memory(mapped 0, ack) ────────────▶
//! ```
//! Memory that one program lets another use goes the same way, on demand; the scheduler keeps none of it:
//! ```text
//! importer                            scheduler                            exporter
//! Open(ticket, secret) ─────────────▶ same user, same container? Export ──▶
//!       ◀─────── Opened + descriptors      ◀──────── Exported + descriptors
//! ```
//! The *GPU lock* (Grant, Revoke, Release) says who may submit; the *allowance* says how many bytes a client may have
//! mapped. They are separate: a client that lost the lock keeps its memory until the bytes are needed. The *limit* says what
//! it may allocate: a promise that there is a place for it, on the GPU or in the host (RequestLimit asks for a higher one).

#![cfg_attr(not(test), no_std)]

pub mod client;
pub mod codec;
pub mod counts;
pub mod env_limits;
pub mod error;
pub mod header;
mod message;
pub mod scheduler;
pub mod version;
pub mod visible_devices;

pub use client::ClientMessage;
pub use codec::{Secret, Text, Uuid};
pub use counts::Counts;
pub use error::WireError;
pub use header::{HEADER_LEN, MAX_LEN};
pub use scheduler::SchedulerMessage;

/// How many descriptors come with one packet, at most.
pub const MAX_DESCRIPTORS: usize = 16;

/// GPUs of one client as a set of its slots: bit *n* is slot *n*.
pub type SlotSet = u64;

/// How many GPUs one client can attach: the bits of a [`SlotSet`].
pub const MAX_SLOTS: u32 = SlotSet::BITS;
