//! The work of hooks besides calling the driver.
//!
//! - [`submit`]: work waits at the gate, and is counted.
//! - [`allocate`]: allocations and frees of movable memory. [`pinned`]: allocations that the driver serves.
//! - [`mappings`]: memory that the program creates and maps itself.
//! - [`address_query`]: queries about addresses. [`export`]: calls that share memory with other processes or devices.
//! - [`contexts`]: contexts and captures. [`interop`]: other APIs, whose work passes no hook.

pub mod address_query;
pub mod allocate;
pub mod contexts;
pub mod export;
pub mod interop;
pub mod mappings;
pub mod pinned;
pub mod submit;
