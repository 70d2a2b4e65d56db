//! The interposed functions: tables of hooks, and the reading of their arguments. Their work besides calling the driver
//! is in [`crate::calls`] and [`crate::copies`]. No file in this folder uses another.
//!
//! - [`gated`]: launches and memsets, which wait at the gate, as do [`copies`].
//! - [`memory`]: allocations, frees and queries about addresses. [`memory_info`]: queries about the size of memory.
//! - [`pools`]: memory pools. [`pinned`]: arrays.
//! - [`vmm`]: memory that the program reserves, creates and maps itself.
//! - [`reservation`]: calls in which the driver takes memory for itself.
//! - [`context`]: initialisation, contexts, captures, lookups.
//! - [`ipc`]: memory shared with other processes. [`interop`]: other APIs, whose work passes no hook.
//!
//! `coverage/entry-points.tsv` gives a reason for each entry point of the driver.

mod context;
mod copies;
mod gated;
mod interop;
mod ipc;
mod memory;
mod memory_info;
mod pinned;
mod pools;
mod reservation;
mod vmm;
