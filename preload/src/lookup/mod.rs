//! Lookups of the driver's functions. They return hooks.
//!
//! - [`dlsym`]: the hooks of `dlsym` and `dlopen`. [`table`]: hooks by the address of the real function.
//! - [`entries`]: functions that this library need not intercept. [`thunks`]: unknown functions.
//!   [`detour`]: code that runs before both.
//! - [`deepbind`]: libraries that would not find the hooks.

pub mod deepbind;
mod detour;
pub mod dlsym;
pub mod entries;
pub mod table;
mod thunks;
