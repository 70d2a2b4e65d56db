//! A simulated `libcuda.so.1`. README.md explains its use and its simplifications.
//!
//! [`exports`] lists all symbols and their functions in one table. [`lookup`] finds a symbol by
//! name and version. [`device`], [`context`], [`green`] and [`peer`] implement GPUs. [`memory`] is
//! the table of addresses. [`alloc`], [`vmm`], [`managed`], [`host`], [`pool`], [`array`] and
//! [`ipc`] add memory to that table. [`stream`] queues [`work`], which [`kernels`], [`copy`],
//! [`fill`] and [`value`] execute. [`event`], [`capture`] and [`graph`] build on streams.
//! [`module`] and [`launch`] load and launch kernels. [`checkpoint`] takes whole processes off the
//! GPUs. [`interop`] numbers resources of graphics APIs. The crate `cuda-sim-gpus` contains the state that processes share.

mod alloc;
mod array;
mod capture;
mod checkpoint;
mod context;
mod copy;
mod device;
mod error;
mod event;
mod exports;
mod fill;
mod graph;
mod green;
mod host;
mod interop;
mod ipc;
mod kernels;
mod launch;
mod lookup;
mod managed;
mod memory;
mod module;
mod multicast;
mod peer;
mod pointer;
mod pool;
mod registry;
mod stream;
mod value;
mod vmm;
mod work;

use error::{Done, Error};
use std::{collections::HashMap, io::Write, sync::Mutex};

/// Writes a result to the program's pointer.
fn out<T>(to: *mut T, value: T) -> Done {
    if to.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: by the API's contract, the program passes null or a pointer to room for a `T`.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Writes an optional result.
fn out_if<T>(to: *mut T, value: T) {
    let _ = out(to, value);
}

/// Reads an argument that the program passes by pointer.
fn arg<T: Copy>(from: *const T) -> Result<T, Error> {
    if from.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: by the API's contract, the program passes null or a pointer to a valid `T`.
    Ok(unsafe { from.read_unaligned() })
}

/// The entry of every call. Checks whether the driver is usable in this process, and whether a test
/// makes this call fail.
fn enter(symbol: &str, early: bool, call: impl FnOnce() -> Done) -> u32 {
    let call = || {
        if !early && (!device::initialised() || cuda_sim_gpus::after_fork()) {
            return Err(Error::NOT_INITIALIZED);
        }
        let _inside = if early { None } else { Some(checkpoint::pass(symbol)?) };
        if meant_to_fail(symbol) {
            return Err(Error(cuda_sim_gpus::Config::get().fail_as));
        }
        call()
    };
    keeping_errno(|| call().map_or_else(|e| e.0, |()| 0))
}

/// Runs `call` and restores `errno`. Contended mutexes of the simulator change `errno`, but
/// contended mutexes of the driver do not. Tests compare a program's `errno`.
fn keeping_errno<R>(call: impl FnOnce() -> R) -> R {
    // SAFETY: the location is valid for the calling thread.
    let errno = unsafe { libc::__errno_location() };
    let before = unsafe { *errno };
    let result = call();
    unsafe { *errno = before };
    result
}

/// Whether `CUDA_SIM_FAIL` makes this call fail. Counts the named calls, and logs the failing ones.
fn meant_to_fail(symbol: &str) -> bool {
    static CALLS: Mutex<Option<HashMap<String, u64>>> = Mutex::new(None);
    let Some(nth) = cuda_sim_gpus::Config::get().fail.get(symbol) else { return false };
    let mut calls = CALLS.lock().unwrap_or_else(|e| e.into_inner());
    let count = calls.get_or_insert_default().entry(symbol.to_owned()).or_insert(0);
    *count += 1;
    let fails = nth.contains(count);
    if fails {
        write_down_failure(symbol);
    }
    fails
}

/// Adds a line to the file `failed` for a call that a test makes fail.
fn write_down_failure(symbol: &str) {
    let path = cuda_sim_gpus::Config::get().dir.join("failed");
    let file = std::fs::File::options().append(true).create(true).open(path);
    let _ = file.and_then(|mut file| file.write_all(format!("{} {symbol}\n", std::process::id()).as_bytes()));
}
