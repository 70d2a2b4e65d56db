//! `libnvshare.so`: preloaded into a program, it makes it share the GPU.
//!
//! It is a guest: it does nothing until the program initialises CUDA, and whatever it meets, it must not crash, exit,
//! hang, print or change results. So nothing here panics, and what it does not know passes through.
//!
//! The folders are layers. Each uses only those above it in this list, which `tests/layers.rs` checks:
//!
//! | folder | what it does |
//! |---|---|
//! | [`sys`] | stands in for the standard library, and keeps the program's `errno` |
//! | [`env`](self::env) | reads the environment; traces |
//! | [`driver`] | the real driver: its functions, its types, contexts, symbols of other libraries |
//! | [`connection`] | the socket to the scheduler, the handshake, and sending |
//! | [`gate`] | where work waits for the GPU lock and for memory, and what makes passing an open gate cheap |
//! | [`work`] | what has been submitted: how much may be queued, and when it is done; stream captures |
//! | [`memory`] | the allocations of one GPU, and moving them to host memory and back |
//! | [`gpu`] | one GPU: its gate, work and memory together, and what it asks the scheduler for |
//! | [`registry`] | the program's memory by the names that the program knows, across GPUs |
//! | [`client`] | the thread that listens to the scheduler and acts: locks, evictions, running without a scheduler |
//! | [`hooks`] | the functions that are interposed, and the look-ups that lead to them |
//!
//! A call goes from a hook through the gate to the driver; an order of the scheduler from the connection through the
//! client's thread to the gate, the work and the memory of a GPU. To add a hook, declare it in the file of [`hooks`] that
//! fits what it does, with one line in `coverage/entry-points.tsv`.
//!
//! `version_note` puts the version into the file, where `nvsharectl` reads it.

#![no_std]
// Hooks are exported, and so used, only outside of tests.
#![cfg_attr(test, allow(dead_code))]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod client;
mod connection;
mod driver;
mod env;
mod gate;
mod gpu;
mod hooks;
mod memory;
mod registry;
mod sys;
mod version_note;
mod work;
