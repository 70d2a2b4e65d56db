//! Lookups of the driver's functions. They return hooks.
//!
//! - [`dlsym`]: the hooks of `dlsym` and `dlopen`. [`table`]: hooks by the address of the real function.
//! - [`thunks`]: unknown functions.
//! - [`deepbind`]: libraries that would not find the hooks.

pub mod deepbind;
pub mod dlsym;
pub mod table;
mod thunks;
