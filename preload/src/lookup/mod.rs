//! Look-ups of the driver's functions, which are answered with hooks.
//!
//! - [`dlsym`]: the hooks of `dlsym` and `dlopen`. [`table`]: hooks by the address of the real function.
//! - [`entries`]: functions with which this library has nothing to do. [`thunks`]: those of which nothing is known. [`detour`]:
//!   what comes before either.
//! - [`deepbind`]: libraries that would not find the hooks.

pub mod deepbind;
mod detour;
pub mod dlsym;
pub mod entries;
pub mod table;
mod thunks;
