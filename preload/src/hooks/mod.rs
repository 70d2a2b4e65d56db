//! The interposed functions: tables of hooks, and the reading of their arguments. What a hook does beside calling the driver is
//! in [`crate::calls`] and [`crate::copies`]. No file here uses another.
//!
//! - [`gated`]: launches and memsets, which wait at the gate. [`copies`], too.
//! - [`memory`]: allocations, frees and queries about addresses. [`memory_info`]: queries about the size of memory.
//! - [`pools`]: memory pools. [`pinned`]: arrays.
//! - [`vmm`]: memory that the program reserves, creates and maps itself.
//! - [`reservation`]: calls in which the driver takes memory for itself.
//! - [`context`]: initialisation, contexts, captures, look-ups.
//! - [`ipc`]: memory shared with other processes. [`interop`]: other APIs, whose work passes no hook.
//!
//! Beside the hooks, the ways to them: [`lookup`] answers look-ups. [`nvml`]: hooks of NVML, which is another library. [`deepbind`]:
//! libraries that would not find the hooks. [`passed`]: functions with which this library has nothing to do. [`unknown`]: those
//! of which nothing is known. [`detour`]: what comes before either.
//!
//! `coverage/entry-points.tsv` gives a reason for each entry point of the driver.

pub mod context;
pub mod copies;
pub mod deepbind;
mod detour;
pub mod gated;
pub mod interop;
pub mod ipc;
pub mod lookup;
pub mod memory;
pub mod memory_info;
pub mod nvml;
mod passed;
pub mod pinned;
pub mod pools;
pub mod reservation;
mod unknown;
pub mod vmm;

use crate::driver::{
    self,
    hook::{Hook, Hooks},
};

pub fn all() -> impl Iterator<Item = Hook> {
    let files = [
        gated::hooks(),
        copies::hooks(),
        memory::hooks(),
        pinned::hooks(),
        pools::hooks(),
        vmm::hooks(),
        context::hooks(),
        interop::hooks(),
        ipc::hooks(),
        reservation::hooks(),
        memory_info::hooks(),
    ];
    files.into_iter().flat_map(Hooks::iter)
}

/// Shuts every way into the driver, for the program and for this library, or opens all again
/// ([`entry`](crate::driver::entry)).
pub fn shut_driver(shut: bool) {
    driver::each_function(|function| function.entry().set_shut(shut));
    all().for_each(|hook| hook.real.entry().set_shut(shut));
    passed::ways().iter().for_each(|way| way.set_shut(shut));
}
