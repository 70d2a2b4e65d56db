//! A simulated `libcuda.so.1`. README.md explains its use and its simplifications.
//!
//! [`exports`] has all symbols and their functions in one table; [`lookup`] finds them by name and version. [`device`], [`context`],
//! [`green`] and [`peer`] are about GPUs. [`memory`] is the table of addresses, and [`alloc`], [`vmm`], [`managed`], [`host`], [`pool`],
//! [`array`] and [`ipc`] add memory to it. [`stream`] queues [`work`], which [`kernels`], [`copy`], [`fill`] and [`value`] execute;
//! [`event`], [`capture`] and [`graph`] build on streams; [`module`] and [`launch`] lead to kernels; [`checkpoint`] takes whole processes
//! off the GPUs. State that processes share is in the crate `cuda-sim-gpus`.

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
    // SAFETY: the API's contract: the program passes null or a pointer to room for a `T`.
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
    // SAFETY: the API's contract: the program passes null or a valid `T`.
    Ok(unsafe { from.read_unaligned() })
}

/// The entry of every call: checks whether the driver is usable in this process, and whether this
/// call should fail.
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

/// Preserves `errno`: the simulator's contended mutexes change it, but the driver's do not, and
/// tests compare a program's `errno`.
fn keeping_errno<R>(call: impl FnOnce() -> R) -> R {
    // SAFETY: the location is valid for the calling thread.
    let errno = unsafe { libc::__errno_location() };
    let before = unsafe { *errno };
    let result = call();
    unsafe { *errno = before };
    result
}

/// `CUDA_SIM_FAIL`: counts the named calls, and logs those that fail.
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
