//! The steps of hooks besides the driver's call.
//!
//! - [`access`]: calls that name memory, and copies.
//! - [`allocate`]: allocations and frees of movable memory. [`driver_memory`]: allocations that the driver
//!   serves.
//! - [`mappings`]: memory that the program creates and maps itself.
//! - [`address_query`]: queries about addresses. [`export`]: calls that share memory with other
//!   processes or devices.
//! - [`contexts`]: contexts and stream captures. [`interop`]: other APIs, whose work passes no hook.

pub mod access;
pub mod address_query;
pub mod allocate;
pub mod contexts;
pub mod driver_memory;
pub mod export;
pub mod interop;
pub mod mappings;
