//! The memory of one GPU as the program sees it, and where its bytes really are.
//!
//! - [`engine`]: how chunks of memory get onto the GPU and off it.
//! - [`space`]: the program's allocations: addresses, sizes, chunks, and the account of bytes.
//! - [`alias`]: addresses at which the program has mapped memory itself.
//! - [`vmm`]: what the program has reserved, made and mapped itself, by the handles it knows.
//! - [`foreign`]: other devices that may be using it.
//! - [`slab`]: small allocations share a chunk.
//! - [`host`]: buffers in host memory.
//! - [`shared`]: memory that another process uses, or that is another's.
//! - [`headroom`]: how much more of it this process can take.
//! - [`print`]: what a chunk holds, told without copying it.
//! - [`pinned`]: what the program holds and no engine can move.
//! - [`mover`]: evicts and restores chunks; only the link's thread does that.

pub mod alias;
pub mod engine;
pub mod foreign;
pub mod headroom;
pub mod host;
pub mod mover;
pub mod pinned;
mod print;
pub mod shared;
pub mod slab;
pub mod space;
pub mod vmm;
