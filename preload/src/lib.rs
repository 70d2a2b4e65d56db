//! `libnvshare.so`: preloaded into a program, it lets the program share its GPUs with other programs.
//!
//! The library does nothing until the program initialises CUDA. It must never crash, exit, hang,
//! print, or change results. So no code here panics. Calls that the library does not know go to the
//! driver unchanged, and memory that such calls may use stays on the GPU.
//!
//! The folders are layers. Each layer uses only the layers above it in this table, which
//! `tests/layers.rs` checks:
//!
//! | folder | contents |
//! |---|---|
//! | [`sys`] | substitutes for the standard library; keeps the program's `errno` |
//! | [`env`](self::env) | the environment; traces |
//! | [`connection`] | the socket to the scheduler, the handshake, sending; whether the process is on its GPUs |
//! | [`driver`] | the real driver: functions, entries, types, contexts, symbols of other libraries |
//! | [`submit`] | the gates at which work waits, and the fast path through an open gate; submitted work: limiting it, and detecting when it is done; stream captures |
//! | [`memory`] | the allocations of one GPU, and moving them to host memory and back |
//! | [`gpu`] | one GPU: its lane and memory together, and its requests to the scheduler |
//! | [`registry`] | the program's memory on all GPUs, by the handles and addresses that the program uses |
//! | [`client`] | the thread that carries out the scheduler's messages; running without a scheduler |
//! | [`copies`] | copies whose sides may be on different GPUs |
//! | [`calls`] | the steps of hooks besides the driver's call: allocating, mapping, exporting |
//! | [`nvml`] | the interposed functions of NVML |
//! | [`lookup`] | lookups of driver functions, which return hooks |
//! | [`hooks`] | the interposed functions |
//!
//! A call passes from a hook through the gate to the driver. A message of the scheduler passes from the
//! connection through the client's thread to the gate, the work and the memory of a GPU. To add a hook,
//! declare it in the matching file of [`hooks`], and add one line to `coverage/entry-points.tsv`.
//!
//! `version_note` stores the library's version in its file, where `nvsharectl` reads it.

#![no_std]
// Hooks are exported. In test builds no code uses them.
#![cfg_attr(test, allow(dead_code))]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod calls;
mod client;
mod connection;
mod copies;
mod driver;
mod env;
mod gpu;
mod hooks;
mod lookup;
mod memory;
mod nvml;
mod registry;
mod submit;
mod sys;
mod version_note;

/// Records properties of the process when the library is loaded. This takes two system calls, which
/// only read.
extern "C" fn on_load() {
    sys::errno::preserve(|| {
        sys::thread::remember_cpus();
        env::trace::remember_stderr();
    });
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = on_load;
