//! The memory of one GPU as the program sees it, and where its bytes really are.
//!
//! - [`engine`]: how chunks of memory get onto the GPU and off it.
//! - [`space`]: the program's allocations: addresses, sizes, chunks; [`account`] their bytes.
//! - [`chunk`]: the pieces that are moved. [`slab`]: small allocations share one.
//! - [`alias`]: addresses at which the program has mapped memory itself.
//! - [`mover`]: evicts and restores chunks; only the client's thread does that.
//! - [`staging`]: buffers in host memory; [`headroom`]: how much of it this process may take.
//! - [`fingerprint`]: what a chunk holds, found out without copying it.
//! - [`foreign_devices`]: other devices that may be using GPU memory.

pub mod account;
pub mod alias;
mod chunk;
pub mod engine;
mod fingerprint;
pub mod foreign_devices;
pub mod headroom;
pub mod mover;
pub mod slab;
pub mod space;
pub mod staging;
