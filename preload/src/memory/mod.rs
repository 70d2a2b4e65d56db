//! The program's memory on one GPU: its addresses, and the place where its contents are stored.
//!
//! - [`engine`]: ways to map chunks of memory on the GPU and unmap them.
//! - [`space`]: the program's allocations: addresses, sizes, chunks. [`account`]: counts of their
//!   bytes. [`slab`]: one granule shared by many small allocations. [`visible_limit`]: the limit that the
//!   program sees.
//! - [`alias`]: additional addresses at which the program has mapped a chunk.
//! - [`mover`]: eviction and restoring, only on the client's thread.
//! - [`staging`]: buffers in host memory. [`headroom`]: the host memory that this process may still
//!   allocate.
//! - [`file`]: swap files, for copies that do not fit in host memory.
//! - [`fingerprint`]: hashes of chunks, which show whether a chunk has to be copied.
//! - `waiter`: driver calls that may wait for running work.
//! - [`foreign_devices`]: other devices that may access GPU memory.

pub mod account;
pub mod alias;
pub mod engine;
#[cfg(test)]
mod fake;
pub mod file;
mod fingerprint;
pub mod foreign_devices;
pub mod headroom;
pub mod mover;
pub mod slab;
pub mod space;
pub mod staging;
mod visible_limit;
mod waiter;
