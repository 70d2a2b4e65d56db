//! The interposed functions: tables of hooks, and the parsing of their arguments. [`crate::calls`]
//! and [`crate::copies`] implement the hooks. No file in this directory uses another.
//!
//! - [`launch`]: launches and memsets, which wait at the gate. [`copies`]: copies, which wait there
//!   too.
//! - [`memory`]: allocations, frees and queries about addresses. [`memory_info`]: queries about the
//!   size of memory.
//! - [`pools`]: memory pools. [`arrays`]: arrays.
//! - [`vmm`]: memory that the program reserves, creates and maps itself.
//! - [`device`]: queries about a GPU. [`reservation`]: calls in which the driver allocates GPU
//!   memory for itself.
//! - [`context`]: initialisation, contexts, captures, lookups.
//! - [`checkpoints`]: calls that checkpoint other processes.
//! - [`ipc`]: memory shared with other processes. [`interop`]: other APIs. Their work passes no
//!   hook.
//!
//! A parameter of a type like `Option<&Copy3D>` is a pointer that is NULL or valid: the driver
//! dereferences it too, and rejects NULL.
//!
//! `coverage/entry-points.tsv` lists all entry points of the driver, with the reason why each is
//! hooked or not.

mod arrays;
mod checkpoints;
mod context;
mod copies;
mod device;
mod interop;
mod ipc;
mod launch;
mod memory;
mod memory_info;
mod pools;
mod reservation;
mod vmm;
