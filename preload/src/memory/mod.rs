//! The memory of one GPU as the program sees it, and where its bytes really are.
//!
//! - [`engine`]: how chunks of memory get onto the GPU and off it.
//! - [`space`]: the program's allocations: addresses, sizes, chunks, and the account of bytes.
//! - [`slab`]: small allocations share a chunk.
//! - [`host`]: buffers in host memory.
//! - [`pinned`]: what the program holds and no engine can move.
//! - [`mover`]: evicts and restores chunks; only the link's thread does that.

pub mod engine;
pub mod host;
pub mod mover;
pub mod pinned;
pub mod slab;
pub mod space;
