//! Lookups of the driver's functions. They return hooks.
//!
//! - [`dlsym`]: the hooks of `dlsym` and `dlopen`. [`table`]: hooks by the address of the real function.
//! - [`thunks`]: unknown functions.
//! - [`nccl`]: functions of NCCL, which are not the driver's, but are found in the same way.
//! - [`deepbind`]: libraries that would not find the hooks.

pub mod deepbind;
pub mod dlsym;
mod nccl;
pub mod table;
mod thunks;
