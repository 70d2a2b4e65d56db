//! The memory of one GPU as the program sees it, and where its contents really are.
//!
//! - [`engine`]: ways to put chunks of memory on the GPU and take them off.
//! - [`space`]: the program's allocations: addresses, sizes, chunks. [`account`]: their bytes.
//! - [`chunk`]: the pieces that are moved. [`slab`]: one piece for many small allocations.
//! - [`pool`]: blocks that are allocated and freed in stream order.
//! - [`alias`]: addresses at which the program has mapped memory itself.
//! - [`mover`]: eviction and restoring, only on the client's thread.
//! - [`staging`]: buffers in host memory. [`headroom`]: how much host memory this process may take.
//! - [`file`]: swap files, for copies that exceed host memory.
//! - [`fingerprint`]: recognising contents without copying them.
//! - `waiter`: driver calls that may wait for running work.
//! - [`foreign_devices`]: other devices that may access GPU memory.

pub mod account;
pub mod alias;
mod chunk;
pub mod engine;
pub mod file;
mod fingerprint;
pub mod foreign_devices;
pub mod headroom;
pub mod mover;
pub mod pool;
pub mod slab;
pub mod space;
pub mod staging;
mod waiter;
